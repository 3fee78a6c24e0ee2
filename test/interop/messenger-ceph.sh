#!/usr/bin/env bash
# Our messenger against a real Ceph monitor: the handshake with cephx, in crc and secure mode, and a message each way.
#
#   PROGRAM=.../messenger-mon messenger-ceph.sh
#
# Starts a cluster of its own with one OSD (test/lab/ceph-cluster) and stops it at the end.  Prints a line for each check.
set -uo pipefail

LAB=$(cd "$(dirname "$0")/../lab" && pwd)
source "$LAB/limits.sh"
WORK=$(mktemp -d "${TMPDIR:-/tmp}/messenger-ceph.XXXXXX")
export CLUSTER_DIR=$WORK/cluster MON_PORT=$((12000 + RANDOM % 10000)) MON_V1_PORT=$((22000 + RANDOM % 10000))
ADDR=127.0.0.1:$MON_PORT

finish() {
  local status=$?
  "$LAB/ceph-cluster" down >/dev/null 2>&1
  rm -rf "$WORK"
  exit $status
}
trap finish EXIT

fail() {
  echo "not ok messenger-ceph: $1"
  sed 's/^/  /' "$WORK/out" 2>/dev/null | tail -n 20
  exit 1
}
ask() { limit 60 "$PROGRAM" "$ADDR" "$@" >"$WORK/out" 2>&1 </dev/null; }

"$LAB/ceph-cluster" up 1 >"$WORK/out" 2>&1 || fail "a cluster"
KEY=$(awk '/client.admin/ {found = 1} found && /key/ {print $3; exit}' "$CLUSTER_DIR/keyring")
[[ -n $KEY ]] || fail "the keyring has no key for client.admin"

for mode in crc secure; do
  ask admin "$KEY" $mode || fail "the handshake in $mode mode"
  grep -q '^a map of [1-9]' "$WORK/out" || fail "a map in $mode mode"
  echo "ok messenger-ceph: $mode mode, $(<"$WORK/out")"
done
for mode in crc secure; do
  for _ in 1 2 3 4 5; do ask admin "$KEY" $mode || fail "again in $mode mode"; done
  echo "ok messenger-ceph: $mode mode, five times more"
done

# Another user's key: the right form, the wrong bytes.
WRONG=AQAAAAAAAAAAABAABwcHBwcHBwcHBwcHBwcHBw==
ask admin "$WRONG" secure && fail "a wrong key was taken"
grep -q 'refuses' "$WORK/out" || fail "a wrong key has no reason"
echo "ok messenger-ceph: a wrong key is refused"
ask nobody "$KEY" crc && fail "an unknown name was taken"
echo "ok messenger-ceph: an unknown name is refused"
