#!/usr/bin/env bash
# Two daemons with a store each, on named ranges of one file, under fio with verification at once: one is killed in the middle and started
# again, while the other goes on; ranges are created and removed meanwhile. Then one range is removed, and the other is whole.
#
#   FOREBAY=PROGRAM store-ranges.sh
#
# Prints a line for each check, and ends with 1 at the first that fails.
set -uo pipefail
source "$(dirname "$0")/../lab/limits.sh"

WORK=$(mktemp -d "${TMPDIR:-/tmp}/store-ranges.XXXXXX")
DISK=$WORK/disk
PATIENCE=120
# Sizes of each range, and of the image that fio fills.
RANGE=${RANGE:-256M}
IMAGE=${IMAGE:-64M}
declare -A DAEMONS=()
cd "$WORK" || exit 1

cleanup() {
  local pid
  for pid in "${DAEMONS[@]}" $(jobs -p); do
    kill -9 "$pid" 2>/dev/null
    wait "$pid" 2>/dev/null
  done
  rm -rf "$WORK"
}
trap cleanup EXIT
ok() { echo "ok store-ranges: $*"; }
fail() {
  echo "not ok store-ranges: $*"
  tail -n 20 "$WORK"/out "$WORK"/log.* "$WORK"/fio.* 2>/dev/null
  exit 1
}
forebay() { limit 100 "$FOREBAY" "$@" >"$WORK/out" 2>&1 </dev/null; }
refused() { # WHAT PATTERN COMMAND...
  local what=$1 pattern=$2
  shift 2
  ! forebay "$@" || fail "$what: it was not refused"
  grep -q -- "$pattern" "$WORK/out" || fail "$what: the refusal does not say '$pattern'"
  ok "$what"
}
start() { # NAME
  "$FOREBAY" --data "$WORK/$1" serve --nbd "unix:$WORK/$1.sock" --store-cache 0 >>"$WORK/log.$1" 2>&1 </dev/null &
  DAEMONS[$1]=$!
  local end=$((SECONDS + PATIENCE))
  until forebay --data "$WORK/$1" status; do
    kill -0 "${DAEMONS[$1]}" 2>/dev/null || fail "the daemon of $1 has ended"
    ((SECONDS < end)) || fail "the daemon of $1 does not serve within $PATIENCE s"
    sleep 0.1
  done
}
stop() { # NAME SIGNAL
  kill "-$2" "${DAEMONS[$1]}"
  wait "${DAEMONS[$1]}" 2>/dev/null
  unset "DAEMONS[$1]"
}
fio_with() { # NAME OPTION...
  local name=$1
  shift
  limit 300 fio --name="$name" --ioengine=nbd --uri="nbd+unix:///local%2Fvolume?socket=$WORK/$name.sock" --size="$IMAGE" --verify=crc32c \
    --verify_fatal=1 --verify_dump=0 --output-format=terse "$@" >>"$WORK/fio.$name" 2>&1
}
verify() { # NAME WHAT
  fio_with "$1" --rw=write --bs=64k --verify_only=1 --iodepth=8 || fail "$2"
  ok "$2"
}
connections() { grep -c "connected to NBD" "$WORK/fio.$1"; }

for name in a b; do
  forebay store ranges create "$DISK" "$name" "$RANGE" || fail "creating the range $name"
  forebay --data "$WORK/$name" store init --store "$DISK#$name" || fail "a store on $name"
done
ok "two stores on ranges of one file"
refused "a whole store on a file with ranges" "named ranges of Forebay" --data "$WORK/c" store init --store "$DISK" --size 100M
refused "a range that is not there" "its ranges: a, b" --data "$WORK/c" store init --store "$DISK#c"
refused "a second range of the same name" "already has a range" store ranges create "$DISK" a 10M
start a
start b
for name in a b; do
  forebay --data "$WORK/$name" create volume --size "$IMAGE" || fail "create"
  forebay --data "$WORK/$name" attach volume --nbd || fail "attach"
done
refused "a range in use is not removed" "is in use" store ranges remove "$DISK" a --force
refused "a range in use is not opened again" "in use" store check --store "$DISK#a" --data "$WORK/c"
forebay store ranges list "$DISK" --format json || fail "list"
[[ $(jq -r '[.ranges[] | "\(.name) \(.in_use) \(.requests) \(.holds)"] | join(";")' "$WORK/out") == \
  "a true 64 a Forebay store;b true 64 a Forebay store" ]] || fail "the list of ranges"
ok "the list says what is in use, and the limits of requests"

fio_with b --rw=write --bs=64k --iodepth=16 --loops=8 &
other=$!
fio_with a --rw=write --bs=64k --iodepth=8 --do_verify=0 --end_fsync=1 || fail "filling a"
fio_with a --rw=randread --bs=4k --iodepth=16 --time_based --runtime=60 --verify=0 &
load=$!
end=$((SECONDS + PATIENCE))
until (($(connections a) == 2)); do
  ((SECONDS < end)) || fail "the reads of a have not begun within $PATIENCE s"
  sleep 0.1
done
forebay store ranges create "$DISK" c 32M --share 200 || fail "a range beside two in use"
forebay store ranges remove "$DISK" c || fail "removing it again"
stop a 9
! wait "$load" 2>/dev/null || fail "the reads of a ended before it was killed"
kill -0 "$other" 2>/dev/null || fail "the writes to b ended before a was killed"
start a
verify a "a after kill -9, while b is written"
wait "$other" || fail "the writes to b, and their verification"
ok "b was written and verified while a was killed"
verify a "a once more"
for name in a b; do
  stop "$name" TERM
  forebay --data "$WORK/$name" store check || fail "the check of $name"
done
ok "both stores are whole"
refused "a range with a store is not removed" "holds a Forebay store" store ranges remove "$DISK" a
forebay store ranges remove "$DISK" a --force || fail "removing a by force"
start b
verify b "b after a was removed"
stop b TERM
forebay --data "$WORK/b" store check || fail "the check of b"
ok "b is whole"
