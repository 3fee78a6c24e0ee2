#!/usr/bin/env bash
# Runs inside the guest (test/lab/guest, DISKS with a disk): images mapped to block devices of the machine on which the
# daemon runs, while that is killed and restarted.
#
#   guest-map.sh PROGRAM      prints a line `ok ...` for each thing that holds; ends at the first that does not
set -euo pipefail
PROGRAM=$1 MOUNT=/run/mapped
export FOREBAY_DATA=/run/disk/data
LOGS="/run/serve.log /run/fio.log"
# shellcheck source=test/interop/guest.sh
source "$(dirname "$0")/guest.sh"

forebay() { timeout 120 "$PROGRAM" "$@"; }
start() { # COMMAND... that runs it
  "$@" "$PROGRAM" serve --nbd 127.0.0.1:10809 >>/run/serve.log 2>&1 &
  DAEMON=$!
  await "the daemon" forebay status
}
crash() { kill -9 "$DAEMON"; wait "$DAEMON" 2>/dev/null || true; }
stop() { kill -TERM "$DAEMON"; wait "$DAEMON" || fail "the daemon ended with $?"; }
# Runs a command that must fail with an exit code and a text.
refused() { # CODE TEXT COMMAND...
  local code=$1 text=$2 got=0; shift 2
  "$@" >/run/refused 2>&1 || got=$?
  [[ $got == "$code" ]] || { cat /run/refused; fail "$*: exit code $got, not $code"; }
  grep -q -- "$text" /run/refused || { cat /run/refused; fail "$*: says nothing of '$text'"; }
}
size() { blockdev --getsize64 "$1"; }
sums() { (cd "$MOUNT" && find . -type f -print0 | sort -z | xargs -0 sha256sum | sha256sum | cut -d' ' -f1); }
written() { awk '{print $7 * 512}' /sys/block/nbd0/stat; }
wrote() { (($(written) >= $1)) || ! kill -0 "$FIO" 2>/dev/null; }
connections() { forebay targets --format json | jq '[.[].connections] | add // 0'; }
connections_are() { [[ $(connections) == "$1" ]]; }
has_size() { [[ $(size "$1") == "$2" ]]; }
errors() { forebay showmapped --format json | jq -c '[.[].error.kind // "none"]'; }
errors_are() { [[ $(errors) == "$1" ]]; }

modprobe -r nbd 2>/dev/null || true
modprobe ext4
mkdir -p "$MOUNT" /run/disk
mountpoint -q /run/disk || { mkfs.ext4 -q -F /dev/vda; mount /dev/vda /run/disk; }

refused 4 "no daemon" forebay map local/disk
start setpriv --inh-caps=-sys_admin --bounding-set=-sys_admin
forebay create local/disk --size 256M
refused 10 CAP_SYS_ADMIN forebay map local/disk
stop
start
# A machine without the kernel's module.
mount -t tmpfs tmpfs /lib/modules
refused 9 "modprobe nbd" forebay map local/disk
umount /lib/modules
refused 3 "nothing" forebay map local/nothing
refused 3 "not mapped" forebay unmap local/disk
[[ -z $(forebay showmapped) && $(forebay showmapped --format json) == '[]' ]] || fail "nothing is mapped"
[[ $(forebay targets --format json) == '[]' ]] || fail "what failed leaves no export"
ok "what cannot be mapped is refused, and leaves nothing behind"

DEVICE=$(forebay map --timeout 3 local/disk) || fail "map"
[[ $DEVICE == /dev/nbd0 && $(size "$DEVICE") == $((256 << 20)) ]] || fail "the device is '$DEVICE', of $(size "$DEVICE") bytes"
[[ $(cat /sys/block/nbd0/queue/write_cache) == "write back" ]] || fail "the kernel sends no flush"
[[ $(cat /sys/block/nbd0/queue/discard_max_bytes) -gt 0 ]] || fail "the kernel sends no discard"
refused 5 "mapped already" forebay map local/disk
refused 6 "mapped to /dev/nbd0" forebay detach local/disk
forebay showmapped >/run/shown
diff /run/shown - <<'T' || fail "the table"
id  pool   namespace  image  snap  device
0   local             disk   -     /dev/nbd0
T
[[ $(forebay device list --format json) == '[{"id":"0","pool":"local","namespace":"","name":"disk","snap":"-","device":"/dev/nbd0"}]' ]] ||
  fail "the list in JSON"
! (: </dev/tcp/127.0.0.1/10809) 2>/dev/null || ! qemu-img info nbd://127.0.0.1:10809/local/disk >/dev/null 2>&1 || fail "the export is for this machine only"
ok "mapped, and listed"

mkfs.ext4 -q "$DEVICE" || fail "mkfs"
mount "$DEVICE" "$MOUNT"
find /usr/share/perl -type f -size -64k >/run/names
head -n 200 /run/names | xargs cp -t "$MOUNT" --backup=numbered
before=$(sums)
total=$((48 << 20)) start=$(written)
fio --name=load --filename="$MOUNT/load" --size=$total --rw=randwrite --bs=16k --ioengine=libaio --direct=1 --iodepth=8 \
  --verify=crc32c --verify_fatal=1 --fsync=64 >/run/fio.log 2>&1 &
FIO=$!
for part in 1 2 3; do
  PATIENCE=120 await "writes of part $part" wrote $((start + part * total / 5))
  kill -0 $FIO 2>/dev/null || fail "fio ended early"
  crash
  start
done
PATIENCE=120 await "writes after the kills" wrote $((start + 4 * total / 5))
kill -0 $FIO 2>/dev/null || fail "fio ended early"
stop
start
wait $FIO || { grep -iE "verify|error|err=" /run/fio.log; fail "fio: an error, or data that differs"; }
[[ $(sums | wc -c) -gt 1 ]] && rm "$MOUNT/load"
[[ $(sums) == "$before" ]] || fail "files differ"
! dmesg | grep -E "I/O error.*nbd0|EXT4-fs error|Buffer I/O error" || fail "an I/O error reached the device"
ok "kill -9 three times and a restart under load: no error, and all data is right"

forebay resize --no-progress local/disk --size 512M >/dev/null
await "the new size" has_size "$DEVICE" $((512 << 20))
resize2fs "$DEVICE" >/dev/null 2>&1 || fail "resize2fs"
[[ $(sums) == "$before" ]] || fail "files differ after the resize"
crash
forebay resize --no-progress local/disk --size 640M >/dev/null
start
await "a size that changed while no daemon ran" has_size "$DEVICE" $((640 << 20))
ok "a resize reaches the device"

refused 6 "in use" forebay unmap local/disk
umount "$MOUNT"
exec 5<"$DEVICE"
refused 6 "open in process" forebay unmap "$DEVICE"
exec 5<&-
forebay unmap "$DEVICE" || fail "unmap"
[[ ! -e /sys/block/nbd0/pid && $(forebay showmapped --format json) == '[]' ]] || fail "the device is there still"
[[ $(forebay targets --format json) == '[]' ]] || fail "the export is there still"
ok "a device in use is not ended; then it ends with its export"

forebay attach local/disk --nbd >/dev/null
DEVICE=$(forebay device map --read-only --nbd-connections 2 -t nbd local/disk) || fail "map read-only"
[[ $(blockdev --getro "$DEVICE") == 1 ]] || fail "the device is not read-only"
! dd if=/dev/zero of="$DEVICE" bs=4k count=1 oflag=direct status=none 2>/dev/null || fail "a write succeeds"
connections_are 2 || fail "$(connections) connections"
mount -o ro,noload "$DEVICE" "$MOUNT"
[[ $(sums) == "$before" ]] || fail "files differ over two connections"
crash
start
await "both connections again" connections_are 2
echo 3 >/proc/sys/vm/drop_caches
[[ $(sums) == "$before" ]] || fail "files differ after both connections were replaced"
umount "$MOUNT"
forebay device unmap local/disk || fail "unmap read-only"
[[ $(forebay targets --format json | jq length) == 1 ]] || fail "an export that was there before ends"
forebay detach local/disk
ok "read-only, over two connections, of an export that stays"

DEVICE=$(forebay map local/disk) || fail "map again"
forebay detach local/disk --force
await "a stale device" errors_are '["not_found"]'
forebay showmapped 2>&1 | grep -q "no longer exported" || fail "the stale device is not shown"
refused 6 "not connected" forebay unmap local/disk
forebay attach local/disk --nbd >/dev/null
await "connected again" errors_are '["none"]'
dd if="$DEVICE" of=/dev/null bs=1M count=4 iflag=direct status=none || fail "read from what was stale"
exec 5<"$DEVICE"
forebay unmap --force local/disk || fail "unmap --force"
exec 5<&-
[[ $(forebay showmapped --format json) == '[]' ]] || fail "it is mapped still"
await "the device is free" test ! -e /sys/block/nbd0/pid
ok "a device without its export is shown, and comes back with it; --force ends one in use"

# The kernel keeps a write of the image that was mapped, and another image takes the name.
forebay detach local/disk 2>/dev/null || true
forebay snap create --no-progress local/disk@before >/dev/null
DEVICE=$(forebay map local/disk) || fail "map for the exchange"
for refusal in "snap rollback --no-progress local/disk@before" "mv local/disk local/other" "trash mv local/disk"; do
  # shellcheck disable=SC2086
  refused 6 "forebay unmap local/disk" forebay $refusal
done
forebay detach local/disk --force
refused 6 "forebay unmap local/disk" forebay mv local/disk local/other
forebay create local/victim --size 640M
head -c 4096 /dev/urandom >/run/pending
dd if=/run/pending of="$DEVICE" bs=4k count=1 oflag=direct status=none &
WRITER=$!
in_flight() { grep -q '^State:.*D' "/proc/$WRITER/status"; }
await "the write that waits" in_flight
crash
# As another client of a cluster renames: without looking at mappings.
mv /run/disk/data/mappings.json /run/mappings.json
forebay mv local/disk local/other >/dev/null
forebay mv local/victim local/disk >/dev/null
mv /run/mappings.json /run/disk/data/mappings.json
start
forebay attach local/disk --nbd >/dev/null
await "a device of another image" errors_are '["failed"]'
forebay showmapped 2>&1 | grep -q "is another one now" || fail "the reason is not shown"
grep -q "is another one now" /run/serve.log || fail "no warning"
in_flight || fail "the write reached another image"
forebay detach local/disk --force
crash
mv /run/disk/data/mappings.json /run/mappings.json
forebay mv local/disk local/victim >/dev/null
forebay mv local/other local/disk >/dev/null
mv /run/mappings.json /run/disk/data/mappings.json
start
forebay attach local/disk --nbd >/dev/null
await "connected to its image again" errors_are '["none"]'
wait $WRITER || fail "the write that waited failed"
cmp -n 4096 /run/pending "$DEVICE" || fail "the write that waited did not reach its image"
forebay export --no-progress local/victim /run/disk/victim >/dev/null
cmp -n 4096 /run/disk/victim /dev/zero || fail "another image was written"
forebay unmap local/disk || fail "unmap after the exchange"
forebay detach local/disk 2>/dev/null || true
forebay snap rollback --no-progress local/disk@before
ok "a device stays with the image that was mapped, by its id"

DEVICE=$(forebay map local/disk) || fail "map for partitions"
# A partition of 128 MiB from sector 2048 on.
printf '\x00\x00\x00\x00\x83\x00\x00\x00\x00\x08\x00\x00\x00\x00\x04\x00' | dd of="$DEVICE" bs=1 seek=446 status=none
printf '\x55\xaa' | dd of="$DEVICE" bs=1 seek=510 status=none
blockdev --rereadpt "$DEVICE" || fail "blockdev --rereadpt"
await "the partition" test -b "${DEVICE}p1"
exec 5<"${DEVICE}p1"
refused 6 "nbd0p1 is open in process" forebay unmap local/disk
exec 5<&-
mkdir -p /run/node && mknod /run/node/other b "$(($(stat -c 0x%t "${DEVICE}p1")))" "$(($(stat -c 0x%T "${DEVICE}p1")))"
exec 5</run/node/other
refused 6 "nbd0p1 is open in process" forebay unmap local/disk
exec 5<&-
modprobe loop
LOOP=$(losetup --show -f "${DEVICE}p1") || fail "losetup"
refused 6 "nbd0p1 is behind the loop device $LOOP" forebay unmap local/disk
losetup -d "$LOOP"
mkfs.ext4 -q "${DEVICE}p1"
unshare -m --propagation private sh -c "mount ${DEVICE}p1 $MOUNT && touch /run/is-mounted && exec sleep 1000" &
HIDDEN=$!
await "the mount in another namespace" test -e /run/is-mounted
! mountpoint -q "$MOUNT" || fail "the mount is not hidden"
refused 6 "nbd0p1 is mounted at $MOUNT, as process" forebay unmap local/disk
kill $HIDDEN; wait $HIDDEN 2>/dev/null || true
# Dirty pages of the partition's own, of a process that has ended.
dd if=/run/pending of="${DEVICE}p1" bs=4k seek=100 conv=notrunc status=none
forebay unmap local/disk || fail "unmap with partitions"
DEVICE=$(forebay map local/disk) || fail "map to compare"
await "the partition again" test -b "${DEVICE}p1"
dd if="${DEVICE}p1" bs=4k skip=100 count=1 status=none | cmp - /run/pending || fail "dirty pages of a partition were lost"
forebay unmap local/disk || fail "unmap to compare"
ok "users of partitions, loop devices and other mount namespaces are seen, and partitions flushed"

# A daemon that stands still while the kernel gives connections up with requests in them.
DEVICE=$(forebay map --timeout 2 --nbd-connections 2 local/disk) || fail "map with a timeout"
ended() { (($(dmesg | grep -c "nbd0.*timed out, retrying") > $1)); }
timeouts=$(dmesg | grep -c "nbd0.*timed out, retrying" || true)
kill -STOP "$DAEMON"
dd if=/dev/zero of="$DEVICE" bs=4k count=64 oflag=direct status=none &
WRITER=$!
await "a connection that is given up" ended "$timeouts"
kill -CONT "$DAEMON"
wait $WRITER || fail "writes failed while the daemon stood still"
dd if=/run/pending of="$DEVICE" bs=4k count=1 oflag=direct status=none
await "both connections after that" connections_are 2
cmp -n 4096 /run/pending "$DEVICE" || fail "an abandoned write was carried out"
forebay unmap local/disk || fail "unmap after the timeout"
ok "a daemon that stood still carries out nothing that was sent again"

forebay detach local/disk 2>/dev/null || true
DEVICE=$(forebay map local/disk) || fail "map once more"
crash
forebay showmapped 2>&1 | grep -q "no daemon runs" || fail "a device without a daemon is not shown"
nbd-client -d "$DEVICE" >/dev/null
await "the device has ended" test ! -e /sys/block/nbd0/pid
start
none() { [[ $(forebay showmapped --format json)$(forebay targets --format json) == '[][]' ]]; }
await "the mapping is removed" none
stop
ok "the mapping of a device that is gone is removed with its export"
