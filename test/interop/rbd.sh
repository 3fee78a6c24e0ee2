#!/usr/bin/env bash
# Images in a real Ceph cluster, shared with RBD's own clients: what one writes the other reads, with snapshots, clones,
# resizing, and the exclusive lock going to and fro.
#
#   FOREBAY=.../forebay rbd.sh
#
# Starts a cluster and a daemon of its own.  Prints a line for each check.
set -uo pipefail

LAB=$(cd "$(dirname "$0")/../lab" && pwd)
WORK=$(mktemp -d "${TMPDIR:-/tmp}/rbd.XXXXXX")
export CLUSTER_DIR=$WORK/cluster MON_PORT=$((20000 + RANDOM % 10000)) MON_V1_PORT=$((30000 + RANDOM % 10000))
export CEPH_CONF=$CLUSTER_DIR/ceph.conf FOREBAY_DATA=$WORK/data FOREBAY_CONTROL=
DAEMON=

finish() {
  local status=$?
  if [[ -n $DAEMON ]]; then
    kill -TERM "$DAEMON" 2>/dev/null
    wait "$DAEMON" 2>/dev/null
  fi
  "$LAB/ceph-cluster" down >/dev/null 2>&1
  # The daemons leave in their own time, and their files with them.
  for _ in $(seq 100); do
    compgen -G "$CLUSTER_DIR/run/*.pid" >/dev/null || break
    sleep 0.1
  done
  rm -rf "$WORK"
  exit $status
}
trap finish EXIT

fail() {
  echo "not ok rbd: $1"
  sed 's/^/  /' "$WORK/out" 2>/dev/null | tail -n 15
  tail -n 15 "$WORK/daemon.log" 2>/dev/null | sed 's/^/  daemon: /'
  exit 1
}
ok() { echo "ok rbd: $1"; }
ask() { timeout -k 5 "${LIMIT:-60}" "$@" >"$WORK/out" 2>&1 </dev/null || fail "$* (status $?)"; }
# The content of an image by RBD's own client, and by ours.
theirs() { timeout 60 rbd export "$1" - 2>>"$WORK/out" | sha256sum | cut -d' ' -f1; }
ours() { timeout 60 "$FOREBAY" export --no-progress "$1" - 2>>"$WORK/out" | sha256sum | cut -d' ' -f1; }
same() { # WHAT IMAGE FILE
  local expected
  expected=$(sha256sum <"$3" | cut -d' ' -f1)
  [[ $(theirs "$2") == "$expected" ]] || fail "$1: rbd reads something else"
  [[ $(ours "$2") == "$expected" ]] || fail "$1: forebay reads something else"
  ok "$1"
}
write() { # URI OFFSET PATTERN LENGTH: through NBD, and into the file that says what must be there
  timeout 60 qemu-io -f raw -c "write -P $3 $2 $4" -c flush "$1" >"$WORK/out" 2>&1 </dev/null || fail "writing by NBD"
  grep -Eiq 'failed|error' "$WORK/out" && fail "writing by NBD"
  head -c "$4" /dev/zero | tr '\0' "\\$(printf %o "$3")" | dd of="$WORK/model" bs=64k seek="$2" oflag=seek_bytes conv=notrunc status=none
}
attach() { timeout 60 "$FOREBAY" attach "$1" --nbd 2>"$WORK/out" || fail "attaching $1"; }

"$LAB/ceph-cluster" up 3 >"$WORK/out" 2>&1 || fail "a cluster"
mkdir -p "$WORK/data"
"$FOREBAY" serve --store-size 256M >"$WORK/daemon.log" 2>&1 &
DAEMON=$!
for _ in $(seq 200); do
  "$FOREBAY" status >/dev/null 2>&1 && break
  sleep 0.1
done
ask "$FOREBAY" status

# 48 MiB, with holes in it.
head -c $((8 << 20)) /dev/urandom >"$WORK/model"
truncate -s $((30 << 20)) "$WORK/model"
head -c $((2 << 20)) /dev/urandom >>"$WORK/model"
truncate -s $((48 << 20)) "$WORK/model"
cp "$WORK/model" "$WORK/first"

ask "$FOREBAY" import --no-progress "$WORK/first" rados:rbd/ours
ask rbd info rbd/ours
same "an image of ours" rbd/ours "$WORK/first"
ask rbd import "$WORK/first" rbd/theirs
ask rbd info rbd/theirs
grep -q 'exclusive-lock.*object-map.*fast-diff.*deep-flatten' "$WORK/out" || fail "rbd's default features"
same "an image of theirs" rbd/theirs "$WORK/first"
ask "$FOREBAY" ls rbd
grep -q ours "$WORK/out" && grep -q theirs "$WORK/out" || fail "a list of both"
ok "a list of both"

for image in ours theirs; do
  cp "$WORK/first" "$WORK/model"
  uri=$(attach rbd/$image)
  write "$uri" $((5 << 20)) 0x61 $((1 << 20))
  write "$uri" $((20 << 20)) 0x62 65536
  [[ $(theirs rbd/$image) == $(sha256sum <"$WORK/model" | cut -d' ' -f1) ]] || fail "$image: rbd reads what was written"
  ok "$image: rbd reads what we write"

  # A snapshot made by rbd while we write: what comes after is not in it.
  cp "$WORK/model" "$WORK/snapped"
  ask rbd snap create rbd/$image@one
  write "$uri" $((4 << 20)) 0x63 $((2 << 20))
  write "$uri" 12345 0x64 777
  [[ $(theirs rbd/$image@one) == $(sha256sum <"$WORK/snapped" | cut -d' ' -f1) ]] || fail "$image: the snapshot stays"
  [[ $(theirs rbd/$image) == $(sha256sum <"$WORK/model" | cut -d' ' -f1) ]] || fail "$image: what came after the snapshot"
  ok "$image: a snapshot by rbd while we write"

  # The lock goes to rbd when it writes, and comes back when we do.
  timeout 60 rbd bench --io-type write --io-size 4096 --io-threads 1 --io-total 65536 rbd/$image >"$WORK/out" 2>&1 </dev/null || fail "$image: rbd writes meanwhile"
  rm -f "$WORK/again"
  timeout 60 rbd export rbd/$image "$WORK/again" >"$WORK/out" 2>&1 || fail "exporting"
  cp "$WORK/again" "$WORK/model"
  write "$uri" $((40 << 20)) 0x65 $((1 << 20))
  [[ $(theirs rbd/$image) == $(sha256sum <"$WORK/model" | cut -d' ' -f1) ]] || fail "$image: writing in turns"
  ok "$image: rbd and we write in turns"

  # Resizing is seen at once.
  ask rbd resize --size 64M rbd/$image
  for _ in $(seq 100); do
    [[ $(nbdinfo --size "$uri" 2>/dev/null) == $((64 << 20)) ]] && break
    sleep 0.1
  done
  [[ $(nbdinfo --size "$uri" 2>"$WORK/out") == $((64 << 20)) ]] || fail "$image: a resize by rbd is seen"
  truncate -s $((64 << 20)) "$WORK/model"
  write "$uri" $((60 << 20)) 0x66 $((1 << 20))
  ask "$FOREBAY" detach rbd/$image
  same "$image: resized by rbd" rbd/$image "$WORK/model"
done
ask rbd object-map check rbd/theirs
ask rbd diff rbd/theirs
ok "the object map is right"

# A clone: reads fall through to the parent, the first write of an object copies it up.
ask rbd snap protect rbd/theirs@one
ask rbd clone rbd/theirs@one rbd/child
cp "$WORK/snapped" "$WORK/model"
same "a clone" rbd/child "$WORK/model"
uri=$(attach rbd/child)
write "$uri" $((6 << 20)) 0x67 4096
write "$uri" $((25 << 20)) 0x68 100000
ask "$FOREBAY" detach rbd/child
same "a clone that was written to" rbd/child "$WORK/model"
ask rbd flatten --no-progress rbd/child
same "a clone that rbd has flattened" rbd/child "$WORK/model"

ask "$FOREBAY" resize rbd/ours --size 80M
rbd info rbd/ours 2>"$WORK/out" | grep -q '80 MiB' || fail "rbd sees our resize"
ask "$FOREBAY" mv rbd/child rbd/adult
ask rbd info rbd/adult
ask "$FOREBAY" rm rbd/adult
rbd info rbd/adult >"$WORK/out" 2>&1 && fail "rbd still sees a removed image"
ok "resized, renamed and removed by us, seen by rbd"
