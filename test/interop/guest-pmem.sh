#!/usr/bin/env bash
# Runs inside the guest (test/lab/guest, FSDAX=1): a volume whose write log is in persistent memory, on a DAX file system
# with MAP_SYNC.  The store lies on the same file system, so that it outlives the guest too.
#
#   guest-pmem.sh FOREBAY ROUND     verifies what was promised in earlier rounds (/share/promised), then writes until
#                                   the guest is killed, saying on the console what is promised
set -euo pipefail
FOREBAY=$1 ROUND=$2 DEVICE=/dev/pmem0 MOUNT=/run/pmem
fail() { echo "not ok guest: $*"; tail -n 20 /run/forebay.log 2>/dev/null || true; exit 1; }
modprobe ext4
mkdir -p "$MOUNT"
blkid "$DEVICE" >/dev/null 2>&1 || mkfs.ext4 -q -b 4096 "$DEVICE" || fail "mkfs"
mount -o dax "$DEVICE" "$MOUNT" || fail "mount -o dax"
export FOREBAY_CONTROL=/run/forebay.sock
"$FOREBAY" serve --data "$MOUNT/data" --store-size 96M --control /run/forebay.sock --nbd unix:/run/nbd.sock --cores 1 \
  >/run/forebay.log 2>&1 &
for _ in $(seq 600); do
  "$FOREBAY" status >/dev/null 2>&1 && break
  sleep 0.1
done
if [[ $ROUND == 1 ]]; then
  "$FOREBAY" create local/disk --size 8M || fail "create"
  "$FOREBAY" attach local/disk --nbd --log "pmem:$MOUNT/logs:16M" || fail "attach"
fi
"$FOREBAY" log info local/disk || fail "log info"
exec perl "$(dirname "$0")/guest-pmem.pl" /run/nbd.sock local/disk /share/promised
