#!/usr/bin/env bash
# Runs real iSCSI initiators against a real daemon, and prints a line `ok ...` for each thing that holds.
#
#   FOREBAY=target/release/forebay test/interop/iscsi.sh     starts daemons of its own
#   QUICK=1                                                 leaves out the longer half of the conformance suite
#
# Needs libiscsi-bin (iscsi-test-cu, iscsi-ls, iscsi-inq, iscsi-perf), qemu-utils with qemu-block-extra, jq and python3.
set -euo pipefail

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
      timeout 120 iscsi-test-cu --dataloss --allow-sanitize -n -t "$test" "${paths[@]}" >"$log" 2>&1 </dev/null ||
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
  "$FOREBAY" serve --data "$WORK/data" --store-size 2G --control "$FOREBAY_CONTROL" --iscsi "127.0.0.1:$PORT" "$@" \
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

needs iscsi-test-cu iscsi-ls iscsi-inq iscsi-readcapacity16 iscsi-perf qemu-img qemu-io jq python3
[[ -n ${FOREBAY:-} ]] || { sed -n '2,7s/^# \{0,1\}//p' "$0"; exit 2; }
export FOREBAY_CONTROL=$WORK/control
PORT=$((20000 + RANDOM % 20000))

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
  timeout 60 iscsi-test-cu --dataloss -n -t "$test" "$RO" >"$WORK/out" 2>&1 || fail "suite: $test ends with $?"
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
check "iscsi-perf reads" timeout 30 iscsi-perf -b 8 -m 32 -t 2 -r "$URI"

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
