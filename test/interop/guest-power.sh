#!/usr/bin/env bash
# Runs inside the guest (test/lab/guest, FSDAX=1 or DISKS): volumes on media that outlive the guest.
#
#   guest-power.sh pmem|disk FOREBAY ROUND
#
# Verifies what was promised in earlier rounds (/share/promised), then writes until the guest is killed, saying on the
# console what is promised.
#
#   pmem   the write log and the store are on a DAX file system with MAP_SYNC
#   disk   the store is on one disk, the write log on another; both disks lose what was not flushed
set -euo pipefail
MEDIUM=$1 FOREBAY=$2 ROUND=$3
fail() { echo "not ok guest: $*"; tail -n 20 /run/forebay.log 2>/dev/null || true; exit 1; }
if [[ $MEDIUM == pmem ]]; then
  MOUNT=/run/pmem
  modprobe ext4
  mkdir -p "$MOUNT"
  blkid /dev/pmem0 >/dev/null 2>&1 || mkfs.ext4 -q -b 4096 /dev/pmem0 || fail "mkfs"
  mount -o dax /dev/pmem0 "$MOUNT" || fail "mount -o dax"
  store=(--data "$MOUNT/data" --store-size 96M) logged="pmem:$MOUNT/logs:16M"
else
  [[ -b /dev/vda && -b /dev/vdb ]] || fail "the disks are missing"
  store=(--data /share/data --store /dev/vda) logged=ssd:/dev/vdb:64M
  if [[ $ROUND == 1 ]]; then
    "$FOREBAY" store init "${store[@]}" || fail "store init"
  fi
fi
export FOREBAY_CONTROL=/run/forebay.sock
"$FOREBAY" serve "${store[@]}" --control /run/forebay.sock --nbd unix:/run/nbd.sock --cores 1 >/run/forebay.log 2>&1 &
for _ in $(seq 600); do
  "$FOREBAY" status >/dev/null 2>&1 && break
  sleep 0.1
done
if [[ $ROUND == 1 ]]; then
  "$FOREBAY" create local/logged --size 8M || fail "create"
  "$FOREBAY" attach local/logged --nbd --log "$logged" || fail "attach"
  if [[ $MEDIUM == disk ]]; then
    "$FOREBAY" create local/plain --size 8M || fail "create"
    "$FOREBAY" attach local/plain --nbd || fail "attach"
  fi
fi
"$FOREBAY" log info local/logged || fail "log info"
promises=$(dirname "$0")/guest-promises.pl
# What has a log lasts when it is answered; what has none, when a flush has covered it.
if [[ $MEDIUM == disk ]]; then
  perl "$promises" /run/nbd.sock local/plain /share/promised 8 &
fi
perl "$promises" /run/nbd.sock local/logged /share/promised 0 &
# Neither ends by itself, nor does the daemon.
wait -n || true
fail "a client or the daemon has ended"
