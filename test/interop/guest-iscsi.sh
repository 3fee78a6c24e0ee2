#!/usr/bin/env bash
# Runs inside the guest (test/lab/guest): open-iscsi and the kernel's iSCSI initiator against a daemon on the host.
#
#   guest-iscsi.sh PORT      prints a line `ok ...` for each thing that holds; ends at the first that does not
#
# What has to happen on the host is asked for through files in /share: see xtask/src/guest/mod.rs.
set -euo pipefail
PORT=$1 HOST=10.0.2.2 MOUNT=/run/volume TARGET=iqn.2026-11.io.forebay:guest

LOGS="/run/*.log"
source "$(dirname "$0")/guest.sh"
# The disk of a unit.
disk() { # LUN
  local found
  found=$(ls -d /sys/class/scsi_device/*:0:0:"$1"/device/block/* 2>/dev/null | head -n 1)
  [[ -n $found ]] && basename "$found"
}
disk_is_gone() { ! disk "$1" >/dev/null; }
has_sectors() { [[ $(cat "/sys/block/$1/size") == "$2" ]]; }
logged_in() { [[ $(cat /sys/class/iscsi_session/session*/state 2>/dev/null) == LOGGED_IN ]]; }
sums() { (cd "$MOUNT" && find . -type f -print0 | sort -z | xargs -0 sha256sum | sha256sum | cut -d' ' -f1); }
set_up() { # KEY VALUE
  iscsiadm -m node -T "$TARGET" -o update -n "$1" -v "$2" >/dev/null || fail "set $1"
}

modprobe iscsi_tcp; modprobe sd_mod; modprobe ext4
mkdir -p "$MOUNT" /run/lock/iscsi /etc/iscsi
echo "InitiatorName=iqn.2026-11.io.forebay:guest-initiator" >/etc/iscsi/initiatorname.iscsi
iscsid -f >/run/iscsid.log 2>&1 &
await "iscsid" iscsiadm -m iface

iscsiadm -m discovery -t sendtargets -p "$HOST:$PORT" >/run/discovery.log 2>&1 || { cat /run/discovery.log; fail "discovery"; }
grep -q "$HOST:$PORT,1 $TARGET" /run/discovery.log || { cat /run/discovery.log; fail "the target is told"; }
ok "discovery tells the target"
if iscsiadm -m node -T "$TARGET" --login >/run/login.log 2>&1; then fail "logged in without a secret"; fi
ok "nobody logs in without a secret"
set_up node.session.auth.authmethod CHAP
set_up node.session.auth.username host
set_up node.session.auth.password a-secret-of-hosts
set_up node.session.auth.username_in disk
set_up node.session.auth.password_in a-secret-of-disks
set_up node.conn[0].iscsi.HeaderDigest CRC32C
set_up node.conn[0].iscsi.DataDigest CRC32C
set_up node.session.timeo.replacement_timeout 120
set_up node.conn[0].timeo.noop_out_interval 2
iscsiadm -m node -T "$TARGET" --login >/run/login.log 2>&1 || { cat /run/login.log; fail "login"; }
await "a disk" disk 0
DISK=$(disk 0)
ok "logged in with CHAP both ways and digests; $DISK has $(($(cat "/sys/block/$DISK/size") / 2048)) MiB"
[[ $(cat "/sys/block/$DISK/queue/write_cache") == "write back" ]] || fail "the kernel sees no write cache, so it sends no flush"
[[ $(cat "/sys/block/$DISK/queue/fua") == 1 ]] || fail "the kernel sees no FUA"
[[ $(cat "/sys/block/$DISK/queue/discard_max_bytes") -gt 0 ]] || fail "the kernel sees no discard"
[[ $(cat "/sys/block/$DISK/queue/physical_block_size") == 4096 ]] || fail "the kernel does not see that 4 KiB are better"
[[ $(cat "/sys/block/$DISK/queue/rotational") == 0 ]] || fail "the kernel thinks that the disk turns"
ok "the kernel sends flushes, FUA and discards"
WWID=$(cat "/sys/block/$DISK/device/wwid")
[[ -n $WWID ]] || fail "no identity"
ok "the volume has the identity $WWID"

mkfs.ext4 -q -F "/dev/$DISK" || fail "mkfs"
mount -o discard "/dev/$DISK" "$MOUNT" || fail "mount"
mkdir "$MOUNT/small"
find /usr/share/perl /usr/share/doc -type f -size -64k >/run/files || fail "list files"
head -n 300 /run/files | xargs cp -t "$MOUNT/small" --backup=numbered || fail "copy"
dd if=/dev/urandom of="$MOUNT/large" bs=1M count=16 conv=fsync status=none || fail "large file"
rm "$MOUNT/small/"*1* && fstrim "$MOUNT" || fail "fstrim"
before=$(sums)
ok "ext4 with $(find "$MOUNT" -type f | wc -l) files, and fstrim"

dd if=/dev/urandom of="$MOUNT/load" bs=64k count=1024 conv=fsync status=none &
LOAD=$!
host restart >/dev/null
wait $LOAD || fail "writing while the daemon restarts"
await "the session" logged_in
ok "writing goes on over a restart of the daemon"
dd if=/dev/urandom of="$MOUNT/load2" bs=64k count=512 conv=fsync status=none &
LOAD=$!
host kill >/dev/null
wait $LOAD || fail "writing while the daemon is killed"
await "the session" logged_in
ok "writing goes on over a kill -9 of the daemon"
rm "$MOUNT/load" "$MOUNT/load2"
[[ $(sums) == "$before" ]] || fail "files differ"
ok "every file is the same"

host forebay resize local/guest --size 320M >/dev/null
iscsiadm -m node -T "$TARGET" --rescan >/dev/null || fail "rescan"
await "the new size" has_sectors "$DISK" $((320 * 2048))
resize2fs "/dev/$DISK" >/run/resize.log 2>&1 || { cat /run/resize.log; fail "resize2fs"; }
ok "grown while mounted"
umount "$MOUNT"
e2fsck -f -n "/dev/$DISK" >/run/fsck.log 2>&1 || { cat /run/fsck.log; fail "fsck"; }
ok "fsck is clean"

host forebay create local/second --size 64M >/dev/null
host forebay attach local/second --iscsi >/dev/null
iscsiadm -m session --rescan >/dev/null || fail "rescan"
await "a second disk" disk 1
ok "a second unit comes while the first is there"
host forebay detach local/second --iscsi --force >/dev/null
echo 1 >"/sys/block/$(disk 1)/device/delete"
await "the second disk is gone" disk_is_gone 1
mount -o ro "/dev/$DISK" "$MOUNT" || fail "mount again"
[[ $(sums) == "$before" ]] || fail "files differ"
umount "$MOUNT"
ok "and goes; the first is untouched"
iscsiadm -m node -T "$TARGET" --logout >/dev/null || fail "logout"
ok "logged out"
