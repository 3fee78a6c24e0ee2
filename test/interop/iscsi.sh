#!/usr/bin/env bash
# Runs real iSCSI initiators against a real daemon, and prints a line `ok ...` for each thing that holds.
#
#   FOREBAY=target/release/forebay test/interop/iscsi.sh     starts daemons of its own
#   QUICK=1                                                 leaves out the longer half of the conformance suite
#
# Needs libiscsi-bin (iscsi-test-cu, iscsi-ls, iscsi-inq, iscsi-perf), qemu-utils with qemu-block-extra, jq and python3.
set -euo pipefail
source "$(dirname "$0")/../lab/limits.sh"

WORK=$(mktemp -d)
DAEMON=
cleanup() {
  [[ -n $DAEMON ]] && kill -9 "$DAEMON" 2>/dev/null
  rm -rf "$WORK"
}
trap cleanup EXIT

ok() { echo "ok $LABEL: $*"; }
fail() {
  echo "not ok $LABEL: $*"
  [[ -s $WORK/out ]] && tail -n 30 "$WORK/out"
  [[ -s $WORK/daemon.log ]] && tail -n 10 "$WORK/daemon.log"
  exit 1
}
check() { # WHAT COMMAND...
  local what=$1
  shift
  "$@" >"$WORK/out" 2>&1 || fail "$what ($?): $*"
  ok "$what"
}
refused() { # WHAT COMMAND...
  local what=$1
  shift
  if "$@" >"$WORK/out" 2>&1; then fail "$what is not refused: $*"; fi
  ok "$what"
}
needs() {
  local command
  for command in "$@"; do
    command -v "$command" >/dev/null || { echo "not ok iscsi: $command is not installed (scripts/setup test)"; exit 1; }
  done
}

# Tests of the suite that are left out, with the reason; docs/design/iscsi.md has the same list.
#   GetLBAStatus.UnmapSingle  its second half asks for block N+1 and wants an answer that begins at N+8, which is right
#                             only for units whose physical block is one logical block
SKIPPED='GetLBAStatus.UnmapSingle'

suite() { # URI: the whole conformance suite, family by family
  local uri=$1 family test tests log=$WORK/suite list=$WORK/list
  iscsi-test-cu --list >"$list" 2>/dev/null || fail "the suite lists no tests"
  while read -r family; do
    tests="ALL.$family"
    if [[ $SKIPPED == "$family".* ]]; then
      tests=$(grep -E "^ALL\.$family\." "$list" | grep -vxF "ALL.$SKIPPED")
      ok "suite: $SKIPPED is left out"
    fi
    local paths=("$uri")
    [[ $family != MultipathIO ]] || paths+=("$uri")
    for test in $tests; do
      limit 120 iscsi-test-cu --dataloss --allow-sanitize -n -t "$test" "${paths[@]}" >"$log" 2>&1 </dev/null ||
        { local status=$?; cp "$log" "$WORK/out"; fail "suite: $test ends with $status"; }
      # Total, Ran, Passed, Failed
      if grep -q 'had failures' "$log" || ! grep -qE '^ +tests +([0-9]+) +\1 +\1 +0 ' "$log"; then
        cp "$log" "$WORK/out"
        fail "suite: $test"
      fi
    done
    ok "suite: $family"
  done < <(sed -nE 's/^ALL\.([^.]+)$/\1/p' "$list")
}

serve() { # MORE...
  "$FOREBAY" serve --data "$WORK/${DATA:-data}" --store-size "${STORE:-2G}" --control "$FOREBAY_CONTROL" --iscsi "127.0.0.1:$PORT" "$@" \
    >>"$WORK/daemon.log" 2>&1 &
  DAEMON=$!
  for _ in {1..300}; do
    "$FOREBAY" status >/dev/null 2>&1 && return
    kill -0 "$DAEMON" 2>/dev/null || break
    sleep 0.1
  done
  fail "the daemon is not ready"
}
stop() {
  kill -TERM "$DAEMON"
  wait "$DAEMON" || fail "the daemon ended with $?"
  DAEMON=
}
attach() { "$FOREBAY" attach "$@" --iscsi 2>"$WORK/out" | tail -n 1; }

# What an initiator says that others do not say on request; prints a line a command: status, sense, data.
say() { "${SAY:-$(dirname "$FOREBAY")/iscsi-say}" "$@" 2>"$WORK/out" || fail "iscsi-say ($?): $*"; }
expect() { # WHAT WANTED FOUND
  [[ $3 == $2 ]] || { echo "wanted '$2', found '$3'" >"$WORK/out"; fail "$1"; }
  ok "$1"
}
keys() { # KEY SERVICE-KEY APTPL: the list of PERSISTENT RESERVE OUT
  printf '%016x%016x00000000%02x000000' "$1" "$2" "$3"
}

needs iscsi-test-cu iscsi-ls iscsi-inq iscsi-readcapacity16 iscsi-perf qemu-img qemu-io jq python3
[[ -n ${FOREBAY:-} ]] || { sed -n '2,7s/^# \{0,1\}//p' "$0"; exit 2; }
export FOREBAY_CONTROL=$WORK/control
PORT=$((20000 + RANDOM % 12000))

LABEL=iscsi
serve --cores 2
for pool in ram local; do
  check "create $pool/suite" "$FOREBAY" create "$pool/suite" --size 256M
done
RAM=$(attach ram/suite) && [[ $RAM == iscsi://127.0.0.1:*/iqn.*/0 ]] || fail "attach printed '$RAM'"
LOCAL=$(attach local/suite) && [[ $LOCAL == */1 ]] || fail "attach printed '$LOCAL'"
ok "attach prints URIs"
iscsi-ls -s "iscsi://127.0.0.1:$PORT" >"$WORK/out" 2>&1 || fail "discovery"
[[ $(grep -c '^Lun:' "$WORK/out") == 2 ]] || fail "discovery finds two units"
ok "discovery finds the target and its units"
iscsi-inq -e 1 -c 131 "$RAM" >"$WORK/out" 2>&1 || fail "inquiry"
grep -q 'Designator:\[' "$WORK/out" || fail "the unit has names"
ok "the unit has names"

LABEL=ram
suite "$RAM"
if [[ ${QUICK:-} != 1 ]]; then
  LABEL=local
  suite "$LOCAL"
fi

LABEL=read-only
check "create" "$FOREBAY" create ram/ro --size 64M
RO=$(attach ram/ro --read-only) || fail "attach"
for test in ALL.ReadOnly ALL.Read10 ALL.Inquiry ALL.ModeSense6; do
  limit 60 iscsi-test-cu --dataloss -n -t "$test" "$RO" >"$WORK/out" 2>&1 || fail "suite: $test ends with $?"
  ! grep -q 'had failures' "$WORK/out" || fail "suite: $test"
  ok "suite: $test"
done
refused "writing is refused" qemu-io -f raw -c 'write 0 4k' "$RO"

LABEL=qemu
head -c 48M /dev/urandom >"$WORK/image"
truncate -s 64M "$WORK/image"
check "create" "$FOREBAY" create local/qemu --size 64M
URI=$(attach local/qemu) || fail "attach"
check "qemu-img writes" qemu-img convert -n -f raw -O raw "$WORK/image" "$URI"
check "qemu-img compares" qemu-img compare -f raw -F raw "$WORK/image" "$URI"
check "qemu-io writes, discards, zeroes and flushes" qemu-io -f raw -c 'write -P 0x5a 1M 3M' -c 'discard 2M 1M' \
  -c 'write -z 3M 64k' -c 'read -P 0x5a 1M 1M' -c 'read -P 0 2M 1M' -c 'read -P 0 3M 64k' -c 'flush' "$URI"
qemu-img map -f raw --output=json "$URI" >"$WORK/map" 2>"$WORK/out" || fail "map"
[[ $(jq '[.[] | select(.data | not) | .length] | add' "$WORK/map") -ge $((1 << 20)) ]] || fail "what was discarded is a hole"
ok "what was discarded is a hole"
check "reads after a resize" "$FOREBAY" resize local/qemu --size 96M
size=$(iscsi-readcapacity16 "$URI" 2>/dev/null | sed -n 's/.*RETURNED LOGICAL BLOCK ADDRESS:\([0-9]*\).*/\1/p')
[[ $size == $((96 * 2048 - 1)) ]] || fail "the new size is seen ($size)"
ok "the new size is seen"
check "iscsi-perf reads" limit 30 iscsi-perf -b 8 -m 32 -t 2 -r "$URI"

LABEL=restart
copy() { qemu-img convert -f raw -O raw "$URI" "$WORK/copy" >"$WORK/out" 2>&1 && sha256sum <"$WORK/copy"; }
sum=$(copy) || fail "the volume is copied"
inq=$(iscsi-inq -e 1 -c 131 "$URI" | sha256sum)
kill -9 "$DAEMON"; wait "$DAEMON" 2>/dev/null || true
serve --cores 2
[[ $(attach local/qemu) == "$URI" ]] || fail "the unit has another number"
[[ $(iscsi-inq -e 1 -c 131 "$URI" | sha256sum) == "$inq" ]] || fail "the unit has other names"
[[ $(copy) == "$sum" ]] || fail "the data differs"
ok "after kill -9 the unit is the same"
check "detach" "$FOREBAY" detach local/qemu --iscsi
refused "what is detached is gone" iscsi-readcapacity16 "$URI"
stop
ok "stops"

LABEL=reservations
serve --cores 2
A=iqn.2026-11.io.forebay:a B=iqn.2026-11.io.forebay:b
for image in one two three; do
  check "create" "$FOREBAY" create "local/$image" --size 64M
done
ONE=$(attach local/one) || fail "attach"
REGISTER=5f000000000000001800 RESERVE=5f010500000000001800 READ_KEYS=5e000000000000020000 READ_HELD=5e010000000000020000
WRITE=2a000000000000000100
expect "registers, to be kept through power loss" "00 " "$(say --initiator $A "$ONE" "$REGISTER:out=$(keys 0 0xabc 1)")"
expect "reserves" "00 " "$(say --initiator $A "$ONE" "$RESERVE:out=$(keys 0xabc 0 0)")"
expect "another cannot write" "18 " "$(say --initiator $B "$ONE" "$WRITE:out=00x512")"
kill -9 "$DAEMON"; wait "$DAEMON" 2>/dev/null || true
serve --cores 2
expect "after kill -9 the key is there" "00 ????????000000080000000000000abc" \
  "$(say --initiator $B "$ONE" "$READ_KEYS:in=512")"
expect "and the reservation" "00 ????????000000100000000000000abc0000000000050000" \
  "$(say --initiator $B "$ONE" "$READ_HELD:in=512")"
expect "another still cannot write" "18 " "$(say --initiator $B "$ONE" "$WRITE:out=00x512")"
expect "the holder can" "00 " "$(say --initiator $A "$ONE" "$WRITE:out=77x512")"
expect "another registers and preempts" $'00 \n00 ' "$(say --initiator $B "$ONE" "$REGISTER:out=$(keys 0 0xdef 1)" \
  "5f050500000000001800:out=$(keys 0xdef 0xabc 0)")"
expect "who was preempted cannot write" "18 " "$(say --initiator $A "$ONE" "$WRITE:out=00x512")"
stop
serve --cores 2
expect "after a restart the one who preempted holds it" "00 ????????000000100000000000000def0000000000050000" \
  "$(say --initiator $A "$ONE" "$READ_HELD:in=512")"
expect "clears" "00 " "$(say --initiator $B "$ONE" "5f030000000000001800:out=$(keys 0xdef 0 0)")"

LABEL=units
TWO=$(attach local/two --initiator "$A") || fail "attach"
luns() { echo $((16#$(say --initiator "$1" "$ONE" a0000000000000000400:in=1024 | cut -c4-11) / 8)); }
expect "its host sees a unit more than another does" "$(($(luns $B) + 1))" "$(luns $A)"
expect "who does not see it cannot use it" "02 5/2500 " "$(say --initiator $B "$TWO" 00)"
expect "its host can" "00 " "$(say --initiator $A "$TWO" 00)"
check "detach" "$FOREBAY" detach local/one --iscsi --force
THREE=$(attach local/three) || fail "attach"
[[ $THREE != "$ONE" ]] || fail "a unit that hosts remember is another volume"
ok "a number that was given up is not given to another volume"
stop
serve --cores 2
[[ $(attach local/one) == "$ONE" ]] || fail "the volume has another number than before"
ok "its volume gets it back, after a restart too"
expect "one port group, which is active" "00 0000000c8001000100020001*" "$(say "$ONE" a30a0000000000000100:in=256)"
expect "it can be asked to be what it is" "00 " "$(say "$ONE" a40a00000000000000080000:out=0000000000000001)"
expect "and nothing else" "02 5/2600 " "$(say "$ONE" a40a00000000000000080000:out=0000000002000001)"
expect "the pages are those that are named" "00 0000000?008083*b0b1b2*" "$(say "$ONE" 12010000ff:in=255)"
stop

LABEL=space
cat >"$WORK/config" <<T
[iscsi-target]
threshold-percent = 5
T
DATA=space STORE=1G serve --config "$WORK/config"
check "create" "$FOREBAY" create local/full --size 64M
FULL=$(attach local/full) || fail "attach"
"${SAY:-$(dirname "$FOREBAY")/iscsi-say}" --initiator $A --until 6/3807 "$FULL" 00 >"$WORK/told" 2>&1 &
TOLD=$!
check "a part of the pool is filled" qemu-io -f raw -c 'write -P 0x5a 0 64M' "$FULL"
wait $TOLD || { cp "$WORK/told" "$WORK/out"; fail "hosts are told that the pool has become fuller than its threshold"; }
ok "hosts are told that the pool has become fuller than its threshold"
expect "the threshold can be read" "00 *5c02*" "$(say "$FULL" 5a001c02000000010000:in=256)"
expect "what is used and what is left can be read" "00 0c00001800010308*00020308*" "$(say "$FULL" 4d004c00000000010000:in=256)"
stop
DATA=small STORE=256M serve
check "create" "$FOREBAY" create local/thin --size 2G
THIN=$(attach local/thin) || fail "attach"
expect "a full pool is said to be full" "02 7/2707 " "$(say "$THIN" 93000000000000000000001000000000:out=5ax512)"
expect "what is there can still be read" "00 5a5a*" "$(say "$THIN" 28000000000000000100:in=512)"
stop

LABEL=portals
SECOND=$((PORT + 1))
serve --iscsi "127.0.0.1:$SECOND"
ONE=$(attach local/one) || fail "attach"
iscsi-ls "iscsi://127.0.0.1:$SECOND" >"$WORK/out" 2>&1 || fail "discovery"
grep -q "Portal:127.0.0.1:$PORT,1" "$WORK/out" && grep -q "Portal:127.0.0.1:$SECOND,1" "$WORK/out" || fail "both portals are told"
ok "both portals are told"
expect "the unit is the same through the second" "$(say "$ONE" 12018300ff:in=255)" \
  "$(say "${ONE/:$PORT\//:$SECOND/}" 12018300ff:in=255)"
stop

LABEL=chap
cat >"$WORK/config" <<T
[iscsi-target]
name = "iqn.2026-11.io.forebay:chap"
initiators = ["iqn.2007-10.com.github:*"]
[iscsi-target.chap]
user = "host"
secret = "a-secret-of-hosts"
[iscsi-target.mutual-chap]
user = "disk"
secret = "a-secret-of-disks"
T
serve --config "$WORK/config"
check "create" "$FOREBAY" create ram/chap --size 64M
URI=$(attach ram/chap) || fail "attach"
[[ $URI == */iqn.2026-11.io.forebay:chap/* ]] || fail "the target has its name ($URI)"
refused "nobody gets in without a secret" iscsi-inq -i iqn.2007-10.com.github:x "$URI?header_digest=crc32c"
WITH=${URI/iscsi:\/\//iscsi://host%a-secret-of-hosts@}
check "the secret opens" iscsi-inq -i iqn.2007-10.com.github:x "$WITH?header_digest=crc32c"
check "both prove who they are" iscsi-inq -i iqn.2007-10.com.github:x \
  "$WITH?header_digest=crc32c&target_user=disk&target_password=a-secret-of-disks"
refused "a wrong secret does not" iscsi-inq -i iqn.2007-10.com.github:x \
  "${WITH/a-secret-of-hosts/another-secret-it-is}?header_digest=crc32c"
refused "a target that proves nothing is not taken" iscsi-inq -i iqn.2007-10.com.github:x \
  "$WITH?header_digest=crc32c&target_user=disk&target_password=some-other-secret"
refused "a stranger is not let in" iscsi-inq -i iqn.2000-01.org.stranger:x "$WITH?header_digest=crc32c"
stop
ok "stops"
