#!/usr/bin/env bash
# Runs inside the guest (test/lab/guest with VHOST): two disks of 256 MiB at a vhost-user-scsi controller, and a third that
# comes and goes.  Asks the host for that (test/interop/guest-vhost-scsi.sh).
set -euo pipefail
LOGS="/run/fio-first.log /run/fio-second.log"
source "$(dirname "$0")/guest.sh"

attribute() { cat "/sys/block/$1/$2"; }
has_size() { [[ $(attribute "$1" size) == $(($2 * 2048)) ]]; }
is_zero() { cmp -s -n "$3" -i "$2:0" "/dev/$1" /dev/zero; }
sums() { (cd "/run/$1" && find . -type f -print0 | sort -z | xargs -0 sha256sum | sha256sum | cut -d' ' -f1); }
fio_on() { # DISK OPTIONS...
  fio --name=load --ioengine=libaio --direct=1 --verify=crc32c --verify_fatal=1 --eta=never "${@:2}" >"/run/fio-$([[ $1 == $first ]] && echo first || echo second).log" 2>&1
}
no_errors() { ! dmesg | grep -iE 'I/O error|EXT4-fs (error|warning)|Buffer I/O|blocked for more than|virtio.*(fail|broken)'; }
# Finds the disk with a number: the kernel names disks in the order in which it has looked at them.
find_disk() { [[ -b /dev/$(basename "/sys/bus/scsi/devices/"*":0:0:$1/block/"* 2>/dev/null) ]]; }
disk_of() { basename "/sys/bus/scsi/devices/"*":0:0:$1/block/"*; }
number() { basename "$(readlink -f "/sys/block/$1/device")"; }
# Asks for a persistent reservation of a disk, as pr_ops does (linux/pr.h).  A status other than GOOD is a positive result; a
# unit attention, as after a change of the controller's units, is one, and the command is then to be sent again.
reserve() { # DISK
  python3 - "/dev/$1" <<'P'
import fcntl, os, struct, sys

IGNORE_KEY = 1
ATTEMPTS = 8

disk = os.open(sys.argv[1], os.O_RDWR)

def ask(what, operation, argument):
    for _ in range(ATTEMPTS):
        # Of immutable bytes the result would be these, not the status.
        status = fcntl.ioctl(disk, operation, bytearray(argument))
        if status == 0:
            return
        print(f"{what}: SCSI status {status:#x}", file=sys.stderr)
    sys.exit(f"{what} is refused")

ask("the registration", 0x401870C8, struct.pack("=QQII", 0, 0xF0E, IGNORE_KEY, 0))
ask("the reservation", 0x401070C9, struct.pack("=QII", 0xF0E, 1, 0))
P
}

modprobe sd_mod
modprobe virtio_scsi
modprobe ext4
await "the first disk" find_disk 0
await "the second disk" find_disk 1
first=$(disk_of 0) second=$(disk_of 1)
for disk in $first $second; do
  [[ $(attribute $disk device/vendor) == FOREBAY* ]] || fail "$disk is of $(attribute $disk device/vendor)"
  has_size $disk 256 || fail "$disk has $(attribute $disk size) sectors"
  (($(attribute $disk queue/physical_block_size) == 4096)) || fail "$disk: blocks of $(attribute $disk queue/physical_block_size)"
  (($(attribute $disk queue/discard_max_bytes) > 0)) || fail "$disk takes no discards"
  [[ $(attribute $disk "device/scsi_disk/$(number $disk)/thin_provisioning") == 1 ]] || fail "$disk is not thin"
  [[ $(attribute $disk "device/scsi_disk/$(number $disk)/cache_type") == "write back" ]] || fail "$disk: its cache"
  [[ $(ls /sys/block/$disk/mq | wc -l) == 2 ]] || fail "$disk has $(ls /sys/block/$disk/mq | wc -l) queues"
done
cmp -s /sys/block/$first/device/vpd_pg83 /sys/block/$second/device/vpd_pg83 && fail "both disks have one identity"
ok "two disks at one controller: $(number $first) and $(number $second), with 2 queues"

for disk in $first $second; do
  fio_on $disk --filename=/dev/$disk --rw=randwrite --bsrange=4k-64k --size=8M --offset_increment=8M --numjobs=4 --iodepth=8 \
    --fsync=64 --group_reporting &
done
wait -n || fail "fio"
wait -n || fail "fio"
ok "written and verified on both at once"

dd if=/dev/urandom of=/dev/$first bs=1M count=16 oflag=direct status=none
dd if=/dev/$first of=/run/before bs=1M count=16 iflag=direct status=none
blkdiscard -o 4M -l 4M /dev/$first || fail "blkdiscard"
is_zero $first $((4 << 20)) $((4 << 20)) || fail "what was discarded is there"
blkdiscard -z -o 9M -l 2M /dev/$first || fail "blkdiscard -z"
is_zero $first $((9 << 20)) $((2 << 20)) || fail "what was overwritten with zeroes is there"
for range in "0 4" "8 1" "11 5"; do
  read -r from length <<<"$range"
  cmp -s -n $((length << 20)) -i $((from << 20)) /dev/$first /run/before || fail "$length MiB from $from MiB on have changed"
done
ok "discards and zeroes, and what is beside them stays"

find /usr/share/perl -type f -size -64k >/run/names
for disk in $first $second; do
  mkfs.ext4 -q -F /dev/$disk || fail "mkfs of $disk"
  mkdir -p /run/$disk
  mount -o discard /dev/$disk /run/$disk || fail "mount of $disk"
  head -n 120 /run/names | xargs cp -t /run/$disk --backup=numbered
done
before=$(sums $first)
host plug local/third
await "the third disk" find_disk 2
third=$(disk_of 2)
dd if=/dev/urandom of=/dev/$third bs=1M count=4 oflag=direct status=none || fail "write to the third disk"
host unplug local/third
gone() { [[ ! -e /sys/block/$third ]]; }
await "the end of the third disk" gone
host plug local/third
await "the third disk again" find_disk 2
ok "a disk comes, goes, and comes again by itself"

host resize local/first 320M
await "the new size" has_size $first 320
resize2fs /dev/$first >/run/fio-first.log 2>&1 || fail "resize2fs"
[[ $(sums $first) == "$before" ]] || fail "files differ after the resize"
ok "a resize is seen, and the file system grows into it"

reserve $second || fail "a persistent reservation"
dd if=/dev/zero of=/run/$second/reserved bs=1M count=4 conv=fsync status=none || fail "write under the own reservation"
ok "a persistent reservation"
for disk in $first $second; do umount /run/$disk; done
no_errors || fail "an error reached the guest"
ok "no errors"
