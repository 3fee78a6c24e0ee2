#!/usr/bin/env bash
# Runs inside the guest (test/lab/guest with VHOST): disks that a vhost-user-blk back-end serves.
#
#   guest-vhost-inside.sh BACKEND QUEUES DISK=RING:IMAGE...    RING is split or packed; the disks have 256 MiB
#
# Asks the host for resizes and kills (test/interop/guest-vhost.sh).
set -euo pipefail
BACKEND=$1 QUEUES=$2; shift 2
LOGS="/run/fio-vda.log /run/fio-vdb.log"
source "$(dirname "$0")/guest.sh"
declare -A RING IMAGE
DISKS=() MIB=256

for disk; do
  name=${disk%%=*}
  DISKS+=("$name")
  IFS=: read -r RING[$name] IMAGE[$name] <<<"${disk#*=}"
done

attribute() { cat "/sys/block/$1/$2"; }
feature() { local bits; bits=$(attribute "$1" device/features); [[ ${bits:$2:1} == 1 ]]; }
has_size() { [[ $(attribute "$1" size) == $(($2 * 2048)) ]]; }
# Prints how many interrupts a queue of a disk has raised.
interrupts() { # DISK QUEUE
  local device
  device=$(basename "$(readlink -f "/sys/block/$1/device")")
  awk -v name="$device-req.$2" '$NF == name {for (i = 2; $i ~ /^[0-9]+$/; i++) sum += $i} END {print sum + 0}' /proc/interrupts
}
written() { awk '{print $7 * 512}' "/sys/block/$1/stat"; }
# Bytes of a disk that read as zeroes, or not.
is_zero() { cmp -s -n "$3" -i "$2:0" "/dev/$1" /dev/zero; }
sums() { (cd "/run/$1" && find . -type f ! -name load -print0 | sort -z | xargs -0 sha256sum | sha256sum | cut -d' ' -f1); }
fio_on() { # DISK OPTIONS...
  fio --name=load --ioengine=libaio --direct=1 --verify=crc32c --verify_fatal=1 --eta=never "${@:2}" >"/run/fio-$1.log" 2>&1
}
no_errors() { ! dmesg | grep -iE 'I/O error|EXT4-fs (error|warning)|Buffer I/O|blocked for more than|virtio.*(fail|broken)'; }

check_shape() { # DISK
  local logical physical minimum optimal queue
  has_size "$1" $MIB || fail "$1 has $(attribute "$1" size) sectors"
  [[ $(lsblk -dnbo SIZE "/dev/$1") == $((MIB << 20)) && $(lsblk -dno TYPE "/dev/$1") == disk ]] || fail "lsblk of $1"
  [[ $(lsblk -dno RO "/dev/$1" | tr -d ' ') == 0 ]] || fail "$1 is read-only"
  [[ -n $(attribute "$1" serial) ]] || fail "$1 has no serial number"
  feature "$1" 32 || fail "$1 is not of VIRTIO 1"
  if [[ ${RING[$1]} == packed ]]; then
    feature "$1" 34 || fail "$1 has no packed rings"
  else
    ! feature "$1" 34 || fail "$1 has packed rings"
  fi
  [[ $(ls "/sys/block/$1/mq" | wc -l) == "$QUEUES" ]] || fail "$1 has $(ls "/sys/block/$1/mq" | wc -l) queues"
  logical=$(attribute "$1" queue/logical_block_size) physical=$(attribute "$1" queue/physical_block_size)
  minimum=$(attribute "$1" queue/minimum_io_size) optimal=$(attribute "$1" queue/optimal_io_size)
  ((logical == 512 || logical == 4096)) || fail "$1: logical blocks of $logical bytes"
  ((physical % logical == 0 && minimum % logical == 0 && optimal % physical == 0)) ||
    fail "$1: physical blocks of $physical, minimum $minimum, optimum $optimal"
  [[ $BACKEND == qemu ]] || ((physical == 4096 && minimum == 4096)) || fail "$1: physical blocks of $physical, minimum $minimum"
  (($(attribute "$1" queue/discard_max_bytes) > 0 && $(attribute "$1" queue/write_zeroes_max_bytes) > 0)) ||
    fail "$1 takes no discards, or no zeroes"
  ok "$1: ${RING[$1]} rings, $QUEUES queues, serial $(attribute "$1" serial), blocks of $logical and $physical bytes, optimum $optimal"
}
check_load() { # DISK
  local queue
  fio_on "$1" --filename="/dev/$1" --rw=randwrite --bsrange=4k-64k --size=8M --offset_increment=8M --numjobs=4 --iodepth=8 \
    --cpus_allowed=0,1 --cpus_allowed_policy=split --fsync=64 --group_reporting || fail "fio on $1"
  for ((queue = 0; queue < QUEUES; queue++)); do
    (($(interrupts "$1" $queue) > 20)) || fail "$1: queue $queue has raised $(interrupts "$1" $queue) interrupts"
  done
  ok "$1: written and verified over $QUEUES queues"
}
check_discard() { # DISK
  local before
  dd if=/dev/urandom of="/dev/$1" bs=1M count=16 oflag=direct status=none
  dd if="/dev/$1" of=/run/before bs=1M count=16 iflag=direct status=none
  before=$(awk '{print $12}' "/sys/block/$1/stat")
  blkdiscard -o 4M -l 4M "/dev/$1" || fail "blkdiscard of $1"
  (($(awk '{print $12}' "/sys/block/$1/stat") > before)) || fail "$1 was sent no discard"
  is_zero "$1" $((4 << 20)) $((4 << 20)) || fail "$1: what was discarded is there"
  blkdiscard -z -o 9M -l 2M "/dev/$1" || fail "blkdiscard -z of $1"
  is_zero "$1" $((9 << 20)) $((2 << 20)) || fail "$1: what was overwritten with zeroes is there"
  # Zeroes that may be holes.
  fallocate -p -o 12M -l 1M "/dev/$1" || fail "fallocate -p of $1"
  is_zero "$1" $((12 << 20)) $((1 << 20)) || fail "$1: where a hole was punched, something is there"
  for range in "0 4" "8 1" "11 1" "13 3"; do
    read -r from length <<<"$range"
    cmp -s -n $((length << 20)) -i $((from << 20)) "/dev/$1" /run/before || fail "$1: $length MiB from $from MiB on have changed"
  done
  ok "$1: discards and zeroes, and what is beside them stays"
}
check_cache() { # DISK
  local mode
  feature "$1" 11 || fail "$1: the cache cannot be turned off"
  [[ $BACKEND == qemu || $(attribute "$1" cache_type) == "write back" ]] || fail "$1: $(attribute "$1" cache_type)"
  for mode in "write through" "write back" "write through" "write back"; do
    echo "$mode" >"/sys/block/$1/cache_type" || fail "$1: $mode"
    [[ $(attribute "$1" cache_type) == "$mode" && $(attribute "$1" queue/write_cache) == "$mode" ]] ||
      fail "$1: $(attribute "$1" cache_type), not $mode"
    head -c 65536 /dev/urandom >/run/written
    dd if=/run/written of="/dev/$1" bs=4k oflag=direct conv=fsync status=none || fail "write to $1, $mode"
    dd if="/dev/$1" bs=64k count=1 iflag=direct status=none | cmp - /run/written || fail "$1, $mode: it reads something else"
  done
  ok "$1: its cache goes off and on"
}
make_files() { # DISK
  mkfs.ext4 -q -F "/dev/$1" || fail "mkfs of $1"
  mkdir -p "/run/$1"
  mount -o discard "/dev/$1" "/run/$1" || fail "mount of $1"
  find /usr/share/perl -type f -size -64k >/run/names
  head -n 120 /run/names | xargs cp -t "/run/$1" --backup=numbered
  BEFORE[$1]=$(sums "$1")
  umount "/run/$1"
  e2fsck -f -n "/dev/$1" >"/run/fio-$1.log" 2>&1 || fail "fsck of $1"
  mount -o discard "/dev/$1" "/run/$1" || fail "mount of $1"
  [[ $(sums "$1") == "${BEFORE[$1]}" ]] || fail "$1: files differ"
  fstrim "/run/$1" || fail "fstrim of $1"
  ok "$1: ext4 with files"
}
check_resize() { # DISK
  MIB=320
  host resize "${IMAGE[$1]}" ${MIB}M
  await "the new size of $1" has_size "$1" $MIB
  resize2fs "/dev/$1" >"/run/fio-$1.log" 2>&1 || fail "resize2fs of $1"
  [[ $(sums "$1") == "${BEFORE[$1]}" ]] || fail "$1: files differ after the resize"
  MIB=256
  ok "$1: a resize is seen, and the file system grows into it"
}

modprobe ext4
declare -A BEFORE START FIO SERIAL
for disk in "${DISKS[@]}"; do
  [[ -b /dev/$disk ]] || fail "no $disk"
  check_shape "$disk"
  SERIAL[$disk]=$(attribute "$disk" serial)
  check_load "$disk"
  check_discard "$disk"
  check_cache "$disk"
  make_files "$disk"
  check_resize "$disk"
done
if [[ $BACKEND == forebay && ${#DISKS[@]} == 2 ]]; then
  [[ ${SERIAL[vda]} != "${SERIAL[vdb]}" ]] || fail "both disks have one serial number"
fi

# Without a region of requests in flight no more than one can be sent again.
total=$((48 << 20)) depth=16
[[ $BACKEND != qemu ]] || depth=1
for disk in "${DISKS[@]}"; do
  START[$disk]=$(written "$disk")
  fio_on "$disk" --filename="/run/$disk/load" --rw=randwrite --bs=16k --size=$total --iodepth=$depth &
  FIO[$disk]=$!
done
wrote() { # BYTES: of the load, by each disk
  local disk
  for disk in "${DISKS[@]}"; do
    (($(written "$disk") >= START[$disk] + $1)) || ! kill -0 "${FIO[$disk]}" 2>/dev/null || return 1
  done
}
for part in 1 2; do
  PATIENCE=120 await "writes before kill $part" wrote $((part * total / 4))
  for disk in "${DISKS[@]}"; do kill -0 "${FIO[$disk]}" 2>/dev/null || fail "the load on $disk ended early"; done
  host kill
done
for disk in "${DISKS[@]}"; do
  wait "${FIO[$disk]}" || fail "$disk: an error, or data that differs"
  rm "/run/$disk/load"
  [[ $(sums "$disk") == "${BEFORE[$disk]}" ]] || fail "$disk: files differ"
  [[ $(attribute "$disk" serial) == "${SERIAL[$disk]}" ]] || fail "$disk: the serial number has changed"
  umount "/run/$disk"
  e2fsck -f -n "/dev/$disk" >"/run/fio-$disk.log" 2>&1 || fail "fsck of $disk"
done
no_errors || fail "an error reached the guest"
ok "kill -9 twice under load: no error, and all data is right"
