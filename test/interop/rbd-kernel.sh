#!/usr/bin/env bash
# Images of a real Ceph cluster between Forebay and the kernel's rbd client in the guest: what one writes the other reads,
# with snapshots and clones.
#
#   FOREBAY=.../forebay PROGRAM=.../rbd-lab rbd-kernel.sh
#
# Starts a cluster of its own, on an address that the guest can reach, and no daemon.  Needs root.
set -uo pipefail

export ADDR=10.78.$((RANDOM % 250)).1
NAME=rbd-kernel; source "$(dirname "$0")/../lab/cluster.sh"
AT_END=(away)
away() { ip addr del "$ADDR/32" dev lo 2>/dev/null; }
ask ip addr add "$ADDR/32" dev lo

sum() { sha256sum <"$1" | cut -d' ' -f1; }
guest() {
  local word
  word=$(basename "$WORK/share")
  SHARE=$WORK/$word TIMEOUT=280 limit 300 "$LAB/guest" "$LAB/../interop/guest-rbd.sh" "$ADDR:$MON_V1_PORT" >"$WORK/out" 2>&1 ||
    fail "the guest"
  grep -q '^not ok' "$WORK/out" && fail "the guest"
}
expect() { # IMAGE SNAPSHOT FILE
  grep -q "^rbd/$1@$2 $(sum "$3")$" "$WORK/share/sums" || { cp "$WORK/share/sums" "$WORK/out"; fail "what the kernel reads of $1@$2"; }
}

start_cluster
mkdir "$WORK/share"
ceph auth get-key client.admin >"$WORK/share/secret" 2>"$WORK/out" || fail "the key"

# 20 MiB, with holes; without a daemon, and without a store.
export FOREBAY_DATA=$WORK/nothing
head -c $((6 << 20)) /dev/urandom >"$WORK/first"
truncate -s $((14 << 20)) "$WORK/first"
head -c $((1 << 20)) /dev/urandom >>"$WORK/first"
truncate -s $((20 << 20)) "$WORK/first"
ask "$FOREBAY" import --no-progress "$WORK/first" rbd/ours
[[ ! -e $WORK/nothing ]] || fail "a command without a daemon left something behind"
ask "$FOREBAY" ls rbd
grep -qx ours "$WORK/out" || fail "a list without a daemon"
ok "import and ls without a daemon, and without a store"

# A snapshot, writes after it, a clone with writes of ours.
ask rbd snap create --no-progress rbd/ours@one
cp "$WORK/first" "$WORK/head"
ask "$PROGRAM" mutate rbd/ours "$WORK/head" 1 40
ask rbd clone --rbd-default-clone-format 2 rbd/ours@one rbd/child
cp "$WORK/first" "$WORK/child"
ask "$PROGRAM" mutate rbd/child "$WORK/child" 2 40
ask rbd create --size 20M rbd/theirs

head -c $((3 << 20)) /dev/urandom >"$WORK/share/patch"
cat >"$WORK/share/plan" <<'PLAN'
sum rbd ours -
sum rbd ours one
sum rbd child -
write rbd ours patch 5
write rbd child patch 12
write rbd theirs patch 2
sum rbd ours one
PLAN
guest
expect ours - "$WORK/head"
expect ours one "$WORK/first"
expect child - "$WORK/child"
ok "the kernel reads what we wrote: an image, its snapshot, a clone"

patch() { dd if="$WORK/share/patch" of="$1" bs=1M seek="$2" conv=notrunc status=none; }
truncate -s 20M "$WORK/theirs"
patch "$WORK/head" 5; patch "$WORK/child" 12; patch "$WORK/theirs" 2
for image in ours child theirs; do
  file=$WORK/$image
  [[ $image == ours ]] && file=$WORK/head
  rm -f "$WORK/export"
  ask "$FOREBAY" export --no-progress rbd/$image "$WORK/export"
  cmp "$WORK/export" "$file" >"$WORK/out" 2>&1 || fail "what we read of $image"
  ask rbd object-map check --no-progress rbd/$image
done
ask "$PROGRAM" export rbd/ours@one "$WORK/export"
cmp "$WORK/export" "$WORK/first" >"$WORK/out" 2>&1 || fail "the snapshot"
ok "we read what the kernel wrote: an image of either's making, a clone; the snapshot stays; the object maps are true"
