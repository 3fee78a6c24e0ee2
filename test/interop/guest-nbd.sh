#!/usr/bin/env bash
# Runs inside the guest (test/lab/guest): the kernel's NBD client with ext4 on top, over TCP to the host.
#
#   guest-nbd.sh PORT EXPORT PROGRAM      prints a line `ok ...` for each thing that holds; ends at the first that does not.
#                                         Goes on with guest-map.sh, which spares a boot
set -euo pipefail
PORT=$1 EXPORT=$2 PROGRAM=$3 HOST=10.0.2.2 DEVICE=/dev/nbd0 MOUNT=/run/volume

ok() { echo "ok guest: $*"; }
fail() { echo "not ok guest: $*"; dmesg | tail -n 20; exit 1; }

connect() { # CONNECTIONS
  nbd-client "$HOST" "$PORT" "$DEVICE" -N "$EXPORT" -b 4096 -C "$1" >/run/client.log 2>&1 || { cat /run/client.log; fail "connect"; }
  for _ in {1..100}; do
    [[ $(cat /sys/block/nbd0/size) -gt 0 ]] && return
    sleep 0.05
  done
  fail "the device stays empty"
}
disconnect() { sync; nbd-client -d "$DEVICE" >/dev/null; }
sums() { (cd "$MOUNT" && find . -type f -print0 | sort -z | xargs -0 sha256sum | sha256sum | cut -d' ' -f1); }

modprobe nbd nbds_max=1
modprobe ext4
mkdir -p "$MOUNT"

connect 1
ok "connected, $(($(cat /sys/block/nbd0/size) / 2048)) MiB"
[[ $(cat /sys/block/nbd0/queue/write_cache) == "write back" ]] || fail "the kernel sees no write cache, so it sends no flush"
ok "the kernel sends flushes"
[[ $(cat /sys/block/nbd0/queue/discard_max_bytes) -gt 0 ]] || fail "the kernel sees no discard"
ok "the kernel sends discards"
mkfs.ext4 -q -F "$DEVICE" || fail "mkfs"
ok "mkfs.ext4"
mount -o discard "$DEVICE" "$MOUNT" || fail "mount"
mkdir "$MOUNT/small"
# Listed first: with pipefail, a find that head leaves behind would fail the whole.
find /usr/share/perl /usr/share/doc -type f -size -64k >/run/files || fail "list files"
head -n 300 /run/files | xargs cp -t "$MOUNT/small" --backup=numbered || fail "copy"
dd if=/dev/urandom of="$MOUNT/large" bs=1M count=16 conv=fsync status=none || fail "large file"
before=$(sums)
ok "wrote $(find "$MOUNT" -type f | wc -l) files"
dd if=/dev/urandom of="$MOUNT/passing" bs=1M count=16 conv=fsync status=none
rm "$MOUNT/passing"
fstrim "$MOUNT" || fail "fstrim"
ok "fstrim"
umount "$MOUNT"
e2fsck -f -n "$DEVICE" >/run/fsck.log 2>&1 || { cat /run/fsck.log; fail "fsck"; }
ok "fsck is clean"
disconnect

connect 4
mount -o ro "$DEVICE" "$MOUNT" || fail "mount after reconnecting with four connections"
[[ $(sums) == "$before" ]] || fail "files differ after reconnecting"
ok "every file is the same over four connections"
umount "$MOUNT"
disconnect
ok "disconnected"

exec bash "$(dirname "$0")/guest-map.sh" "$PROGRAM"
