#!/usr/bin/env bash
# An image in a real Ceph cluster under verified writes, while OSDs are killed and started again: no acknowledged write is
# lost, and I/O goes on by itself.
#
#   FOREBAY=.../forebay rados-thrash.sh [SECONDS]
#
# Starts a cluster and a daemon of its own.
set -uo pipefail

SECONDS_WANTED=${1:-60}     # of a quiet machine: on a slow one as many kills take longer
NAME=rados-thrash; source "$(dirname "$0")/../lab/cluster.sh"

start_cluster
start_daemon
"$FOREBAY" create rbd/thrashed --size 256M >"$WORK/out" 2>&1 || fail "an image"
URI=$("$FOREBAY" attach rbd/thrashed --nbd 2>"$WORK/out") || fail "attaching"

slowdown
# Every block is written with its checksum and number, and verified while the next ones are written, and at the end.
fio --name=verify --ioengine=nbd --uri="$URI" --rw=randwrite --bs=4k --iodepth=16 --size=128M --thread \
  --time_based --runtime=$((SECONDS_WANTED * SLOWDOWN)) --verify=crc32c --verify_backlog=512 --verify_fatal=1 >"$WORK/fio" 2>&1 &
FIO=$!
# Every group takes requests again; copies may still be missing.  Killed OSDs come back with what they have stored, so that
# the next one may go meanwhile: groups whose newest copy it has wait for it.
all_active() { ceph pg stat 2>/dev/null | sed 's/^[0-9]* pgs: //; s/;.*//' | tr ',' '\n' | { ! grep -v active; }; }
is_back() { ! kill -0 $FIO 2>/dev/null || { ceph osd stat 2>/dev/null | grep -q '3 up' && all_active; }; }
kills=0
osd=0
while kill -0 $FIO 2>/dev/null; do
  sleep 2
  kill -0 $FIO 2>/dev/null || break
  "$LAB/ceph-cluster" kill-osd $osd 2>/dev/null
  kills=$((kills + 1))
  sleep 2
  "$LAB/ceph-cluster" start-osd $osd
  await 120 "every group is active after kill $kills" is_back
  osd=$(((osd + 1) % 3))
done
wait $FIO || { cp "$WORK/fio" "$WORK/out"; fail "fio, after $kills kills"; }
cp "$WORK/fio" "$WORK/out"
((kills > 1)) || fail "nothing was killed"
grep -q 'err= 0' "$WORK/out" || fail "fio's verification"
writes=$(grep -o 'total=r=[0-9]*,w=[0-9]*\|issued rwts: total=[0-9,]*' "$WORK/out" | head -n 1)
await 120 "all copies are back" is_clean
rbd object-map check rbd/thrashed >"$WORK/out" 2>&1 || fail "the object map after it"
ok "$kills times an OSD was killed, ${writes:-all} requests verified"
