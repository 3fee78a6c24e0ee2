#!/usr/bin/env bash
# A store on five files (3+2) under fio with verification: two are overwritten with noise, then deleted; the daemon is
# killed while it is degraded, while it fills their replacements, while it scrubs, after it has grown, and while columns are moved; then two others are lost. No client
# sees an error, and every byte is verified.
#
#   FOREBAY=PROGRAM store-devices.sh
#
# Prints a line for each check, and ends with 1 at the first that fails.
set -uo pipefail
source "$(dirname "$0")/../lab/limits.sh"

WORK=$(mktemp -d "${TMPDIR:-/tmp}/store-devices.XXXXXX")
DATA=$WORK/data
SOCKET=$WORK/nbd.sock
DAEMON=
PATIENCE=120
# Bytes of each device, and of the image that fio fills.
DEVICE=${DEVICE:-160M}
IMAGE=${IMAGE:-96M}
cd "$WORK" || exit 1

cleanup() {
  [[ -z $DAEMON ]] || { kill -9 "$DAEMON" 2>/dev/null; wait "$DAEMON" 2>/dev/null; }
  rm -rf "$WORK"
}
trap cleanup EXIT
ok() { echo "ok store-devices: $*"; }
fail() {
  echo "not ok store-devices: $*"
  [[ ! -s $WORK/out ]] || tail -20 "$WORK/out"
  [[ ! -s $WORK/log ]] || tail -20 "$WORK/log"
  exit 1
}
forebay() { limit 100 "$FOREBAY" --data "$DATA" "$@" >"$WORK/out" 2>&1 </dev/null; }
start() { # [OPTION...]
  "$FOREBAY" --data "$DATA" serve --nbd "unix:$SOCKET" --store-cache 0 "$@" >>"$WORK/log" 2>&1 </dev/null &
  DAEMON=$!
  until_true "the daemon serves" "$FOREBAY" --data "$DATA" status
}
crash() { kill -9 "$DAEMON"; wait "$DAEMON" 2>/dev/null; DAEMON=; }
until_true() { # WHAT COMMAND...
  local what=$1 end=$((SECONDS + PATIENCE))
  shift
  until limit 20 "$@" >"$WORK/out" 2>&1 </dev/null; do
    [[ -z $DAEMON ]] || kill -0 "$DAEMON" 2>/dev/null || fail "$what: the daemon has ended"
    ((SECONDS < end)) || fail "$what: not within $PATIENCE s"
    sleep 0.1
  done
}
devices() { "$FOREBAY" --data "$DATA" store devices --format json; }
# Returns whether as many devices as said are in a state.
in_state() { [[ $(devices | jq "[.devices[] | select(.state == \"$1\")] | length") == "$2" ]]; }
scrubbed() { "$FOREBAY" --data "$DATA" store scrub --status --format json | jq -e '.running | not' >/dev/null; }
settled() { devices | jq -e '.moves.pending | not' >/dev/null; }
export -f devices in_state scrubbed settled
export FOREBAY DATA
wait_for() { until_true "$1" bash -c "$2"; }
fio_with() { # NAME OPTION...
  local name=$1
  shift
  limit 300 fio --name="$name" --ioengine=nbd --uri="nbd+unix:///local%2Fvolume?socket=$SOCKET" --size="$IMAGE" --verify=crc32c \
    --verify_fatal=1 --verify_dump=0 --output-format=terse "$@"
}
verify() { # WHAT
  fio_with read --rw=write --bs=256k --verify_only=1 --iodepth=8 >"$WORK/out" 2>&1 || fail "$1"
  ok "$1"
}
noise() { # FILE
  # Past the page cache, which would make the flushes of a device that is open past it fail.
  dd if=/dev/urandom of="$1" bs=1M count=$((${DEVICE%M})) conv=notrunc oflag=direct status=none
}

forebay store init --ec 3+2 d0 d1 d2 d3 d4 --size "$DEVICE" || fail "init"
ok "a store on five files"
start
forebay create volume --size "$IMAGE" || fail "create"
forebay attach volume --nbd || fail "attach"
fio_with fill --rw=write --bs=256k --iodepth=8 --do_verify=0 >"$WORK/out" 2>&1 || fail "fill"

# While fio writes and reads, two devices become noise under the daemon.
fio_with mixed --rw=write --bs=256k --iodepth=8 --do_verify=1 --loops=6 >"$WORK/fio" 2>&1 </dev/null &
FIO=$!
while kill -0 "$FIO" 2>/dev/null; do
  noise d0
  noise d3
done
wait "$FIO" || { cp "$WORK/fio" "$WORK/out"; fail "noise on two devices under fio"; }
ok "noise on two devices under fio: no error"
[[ $(devices | jq '[.devices[].wrong_blocks] | add') -gt 0 ]] || fail "noise was noticed"
ok "noise was noticed"

crash
rm d0 d3
start
in_state away 2 || fail "two devices are missing: $(devices)"
"$FOREBAY" --data "$DATA" status 2>&1 | grep -q "is missing" || fail "status says what is missing"
verify "killed; two devices deleted: everything is read"
fio_with degraded --rw=write --bs=256k --iodepth=8 --do_verify=1 >"$WORK/out" 2>&1 || fail "degraded writes"
ok "degraded writes"

# Replaced; killed while they are filled.
crash
start --repair-rate 1M
forebay store replace "$WORK/d0" n0 || fail "replace d0"
forebay store replace "$WORK/d3" n3 || fail "replace d3"
in_state filling 2 || fail "two devices are being filled: $(devices)"
crash
start --repair-rate 0
wait_for "both replacements are filled, though the daemon was killed meanwhile" "in_state active 5"
ok "killed while filling: both replacements are complete"

# Killed while it scrubs.
crash
start --repair-rate 1M
forebay store scrub || fail "scrub"
crash
start --repair-rate 0
forebay store scrub --wait || fail "scrub"
wait_for "the scrub ends" scrubbed
forebay store scrub --wait --format json || fail "a whole scrub"
[[ $(jq '.mended + .lost' "$WORK/out") == 0 ]] || fail "a scrub after a scrub finds nothing"
ok "killed while scrubbing: scrubbed clean"

# It grows, and gets five more devices; killed right after each, and filled with more than fitted before.
capacity() { "$FOREBAY" --data "$DATA" store df --format json | jq .capacity; }
BEFORE=$(capacity)
forebay store grow --size $((${DEVICE%M} * 3 / 2))M || fail "grow"
crash
start --repair-rate 0
GROWN=$(capacity)
((GROWN > BEFORE * 4 / 3)) || fail "capacity $BEFORE has grown to $GROWN"
ok "grown under the daemon, which was killed: capacity $BEFORE is $GROWN"
forebay store add "$WORK"/a{0,1,2,3,4} --size "$DEVICE" || fail "add"
crash
start --repair-rate 0
in_state active 10 || fail "ten devices: $(devices)"
ADDED=$(capacity)
((ADDED > GROWN + BEFORE * 4 / 5)) || fail "capacity $GROWN has become $ADDED"
ok "five devices added under the daemon, which was killed: capacity $ADDED"
dd if=/dev/urandom of=big bs=1M count=$((ADDED * 13 / 20 / 1048576)) status=none
(($(stat -c %s big) > GROWN * 9 / 10)) || fail "more than fitted before"
limit 300 "$FOREBAY" --data "$DATA" import big more >"$WORK/out" 2>&1 </dev/null || fail "filling it"
limit 300 "$FOREBAY" --data "$DATA" export more - 2>"$WORK/out" </dev/null | cmp - big || fail "reading it back"
rm big
forebay rm more || fail "rm more"
forebay store scrub --wait --format json || fail "a scrub of all devices"
[[ $(jq '.mended + .lost' "$WORK/out") == 0 ]] || fail "a scrub of all devices finds nothing"
verify "grown: everything is read"

# One device that is added to ten full ones is used, and one with data removed again; killed meanwhile.
dd if=/dev/urandom of=kept bs=1M count=48 status=none
limit 300 "$FOREBAY" --data "$DATA" import kept kept >"$WORK/out" 2>&1 </dev/null || fail "import what is moved"
forebay store add "$WORK/b0" --size "$DEVICE" || fail "add one"
crash
start --repair-rate 0
wait_for "columns are moved, though the daemon was killed" settled
MOVED=$(capacity)
((MOVED > ADDED + BEFORE / 6)) || fail "capacity $ADDED has become $MOVED"
fio_with moving --rw=randwrite --bs=64k --iodepth=8 --loops=4 --do_verify=0 >"$WORK/fio" 2>&1 &
FIO=$!
forebay store remove "$WORK/a0" || fail "remove"
crash
kill "$FIO" 2>/dev/null
wait "$FIO" 2>/dev/null
start --repair-rate 0
wait_for "a device is removed, though the daemon was killed" settled
[[ $(devices | jq '.devices | length') == 10 ]] || fail "ten devices: $(devices)"
forebay store remove "$WORK/b0" --wait || fail "remove, and wait"
[[ $(devices | jq -c '[.devices[].path | select(test("/[ab]0$"))]') == '[]' ]] || fail "removed: $(devices)"
forebay store remove d1 d2 d4 n0 n3 a1 && fail "only three would be left"
grep -q "3+2 needs 5" "$WORK/out" || fail "a refusal that says how many are needed"
limit 300 "$FOREBAY" --data "$DATA" export kept - 2>"$WORK/out" </dev/null | cmp - kept || fail "what was moved reads back"
fio_with again --rw=write --bs=256k --iodepth=8 --do_verify=1 >"$WORK/out" 2>&1 || fail "writes after it"
forebay store scrub --wait --format json || fail "a scrub after it"
[[ $(jq '.mended + .lost' "$WORK/out") == 0 ]] || fail "a scrub finds nothing after columns were moved"
verify "columns moved to an added device, and away from two that were removed: everything is read"

# The replacements prove themselves: two others are lost.
crash
rm d1 d4
start
verify "two other devices deleted: everything is read"
crash
mv d2 gone
"$FOREBAY" --data "$DATA" serve --nbd "unix:$SOCKET" >"$WORK/out" 2>&1 </dev/null && fail "three devices are gone"
grep -q "3 of 9 devices are gone" "$WORK/out" || fail "a refusal that says how many are gone"
ok "a third one gone: refused, with what is lost"
mv gone d2
start
verify "it is back: everything is read"
kill "$DAEMON"
wait "$DAEMON" || fail "an orderly end"
DAEMON=
forebay store check --quick
grep -q "d1" "$WORK/out" || fail "the check names what is missing"
ok "the check names what is missing"
