#!/usr/bin/env bash
# Runs inside the guest (test/lab/guest): the kernel's NVMe/TCP initiator and nvme-cli against a daemon on the host.
#
#   guest-nvme.sh PORT      prints a line `ok ...` for each thing that holds; ends at the first that does not
#
# The daemon has two ports, which discovery tells; the second is behind something that can be cut.  What has to happen
# on the host is asked for through files in /share: see xtask/src/guest/nvme.rs.
set -euo pipefail
PORT=$1 HOST=10.0.2.2 MOUNT=/run/volume

source "$(dirname "$0")/guest.sh"
# The block device of a namespace.
device() { # NSID
  local found
  for found in /sys/class/nvme-subsystem/nvme-subsys*/nvme*n*; do
    [[ -e $found/nsid && $(cat "$found/nsid") == "$1" && $(basename "$found") =~ ^nvme[0-9]+n[0-9]+$ ]] && { basename "$found"; return; }
  done
  return 1
}
paths() { grep -l "^$1$" /sys/class/nvme/nvme*/state 2>/dev/null | wc -l; }
has_paths() { [[ $(paths live) == "$1" ]]; }
has_size() { [[ $(cat "/sys/block/$1/size") == "$2" ]]; }
verify() { # DEVICE NAME MORE...
  local device=$1 name=$2; shift 2
  # Serialized, because paths and queues reorder commands in flight.
  without_sigpipe fio --name="$name" --filename="/dev/$device" --rw=randwrite --bsrange=512-64k --direct=1 \
    --ioengine=libaio --iodepth=16 --serialize_overlap=1 --eta=never --verify=crc32c --verify_fatal=1 --randseed=7 \
    --output="/run/$name.fio" "$@"
}

modprobe nvme-tcp; modprobe ext4; modprobe xfs
mkdir -p "$MOUNT"

nvme discover -t tcp -a $HOST -s "$PORT" >/run/discover || fail "discover"
[[ $(grep -c "nvme subsystem" /run/discover) == 2 ]] || { cat /run/discover; fail "two ports are told"; }
ok "discovery tells both ports"
nvme connect-all -t tcp -a $HOST -s "$PORT" --ctrl-loss-tmo=60 --reconnect-delay=1 --keep-alive-tmo=5 || fail "connect-all"
await "two paths" has_paths 2
await "a namespace" device 1
DISK=$(device 1)
CTRL=$(basename "$(ls -d /sys/class/nvme/nvme* | head -n 1)")
await "the disk has a size" test -s "/sys/block/$DISK/size"
ok "connected by two paths, $DISK has $(($(cat "/sys/block/$DISK/size") / 2048)) MiB"
nvme list-subsys >/run/subsys; [[ $(grep -c "live" /run/subsys) == 2 ]] || { cat /run/subsys; fail "list-subsys"; }
ok "list-subsys shows both"
[[ $(cat "/sys/block/$DISK/queue/write_cache") == "write back" ]] || fail "the kernel sees no write cache, so it sends no flush"
[[ $(cat "/sys/block/$DISK/queue/fua") == 1 ]] || fail "the kernel sees no FUA"
[[ $(cat "/sys/block/$DISK/queue/discard_max_bytes") -gt 0 ]] || fail "the kernel sees no discard"
[[ $(cat "/sys/block/$DISK/queue/write_zeroes_max_bytes") -gt 0 ]] || fail "the kernel sees no write-zeroes"
[[ $(cat "/sys/block/$DISK/queue/logical_block_size") == 512 ]] || fail "logical block size"
[[ $(cat "/sys/block/$DISK/queue/physical_block_size") == 4096 ]] || fail "the kernel does not see that 4 KiB are better"
ok "the kernel sends flushes, FUA, discards and write-zeroes"
[[ -s /sys/block/$DISK/uuid && -s /sys/block/$DISK/wwid ]] || fail "no identity"
ok "the volume has the identity $(cat "/sys/block/$DISK/wwid")"

while read -r what on more; do
  # shellcheck disable=SC2086
  nvme "$what" "$on" $more >"/run/$what.txt" 2>&1 || { cat "/run/$what.txt"; fail "nvme $what"; }
done <<END
id-ctrl /dev/$CTRL
ns-descs /dev/$DISK
id-ns /dev/$DISK
cmdset-ind-id-ns /dev/$CTRL -n 1
nvm-id-ctrl /dev/$CTRL
list-ns /dev/$CTRL
list-ctrl /dev/$CTRL
smart-log /dev/$CTRL
error-log /dev/$CTRL
fw-log /dev/$CTRL
effects-log /dev/$CTRL
ana-log /dev/$CTRL
changed-ns-list-log /dev/$CTRL
supported-log-pages /dev/$CTRL
get-feature /dev/$CTRL -f 6
END
! nvme primary-ctrl-caps "/dev/$CTRL" >/run/caps 2>&1 || fail "there is no virtualization, and its capabilities are told"
grep -q "mn *: Forebay" /run/id-ctrl.txt || { cat /run/id-ctrl.txt; fail "id-ctrl"; }
grep -q "optimized" /run/ana-log.txt || { cat /run/ana-log.txt; fail "ana-log"; }
ok "nvme-cli reads every structure and log page"

# ---- Reservations, which outlive the daemon ----
reserved() {
  nvme resv-report "/dev/$DISK" --eds >/run/report 2>&1 && grep -Eq 'regctl *: *1$' /run/report &&
    grep -Eq 'rtype *: *1$' /run/report && grep -Eq 'ptpls *: *1$' /run/report
}
nvme resv-register "/dev/$DISK" --nrkey=0x11 --rrega=0 --cptpl=3 >/run/register 2>&1 || { cat /run/register; fail "resv-register"; }
nvme resv-acquire "/dev/$DISK" --crkey=0x11 --rtype=1 --racqa=0 >/run/acquire 2>&1 || { cat /run/acquire; fail "resv-acquire"; }
! nvme resv-acquire "/dev/$DISK" --crkey=0x12 --rtype=1 --racqa=0 >/run/acquire 2>&1 || fail "resv-acquire with another key"
reserved || { cat /run/report; fail "resv-report"; }
ok "resv-register, resv-acquire, resv-report"

verify "$DISK" plain --size=24M --io_size=24M || { cat /run/plain.fio; fail "fio"; }
ok "fio verifies what it wrote"
printf 'same%.0s' {1..128} >/run/block
dd if=/run/block of="/dev/$DISK" bs=512 count=1 oflag=direct status=none
nvme compare "/dev/$DISK" -s 0 -c 0 -z 512 -d /run/block >/run/compare.txt 2>&1 || { cat /run/compare.txt; fail "compare"; }
printf 'else%.0s' {1..128} >/run/other
! nvme compare "/dev/$DISK" -s 0 -c 0 -z 512 -d /run/other >/run/compare.txt 2>&1 || fail "compare finds no difference"
nvme write-zeroes "/dev/$DISK" -s 0 -c 7 >/dev/null || fail "write-zeroes"
nvme verify "/dev/$DISK" -s 0 -c 7 >/dev/null || fail "verify"
nvme dsm "/dev/$DISK" -d -s 0 -b 8 >/dev/null || fail "dsm"
nvme flush "/dev/$DISK" -n 1 >/dev/null || fail "flush"
cmp -s -n 4096 "/dev/$DISK" /dev/zero || fail "what was deallocated reads as zeroes"
ok "compare, write-zeroes, verify, deallocate, flush"

for kind in ext4 xfs; do
  case $kind in ext4) mkfs.ext4 -q -F "/dev/$DISK" ;; xfs) mkfs.xfs -q -f "/dev/$DISK" ;; esac || fail "mkfs.$kind"
  mount -o discard "/dev/$DISK" "$MOUNT" || fail "mount $kind"
  dd if=/dev/urandom of="$MOUNT/large" bs=1M count=16 conv=fsync status=none
  # Listed first: with pipefail, a find that head leaves behind would fail the whole.
  find /usr/share/perl /usr/share/doc -type f -size -64k >/run/files
  mkdir "$MOUNT/small"; head -n 100 /run/files | xargs cp -t "$MOUNT/small" --backup=numbered
  before=$(cd "$MOUNT" && find . -type f -print0 | sort -z | xargs -0 sha256sum | sha256sum)
  umount "$MOUNT"
  case $kind in
    ext4) e2fsck -f -n "/dev/$DISK" >/run/fsck 2>&1 ;;
    xfs) xfs_repair -n "/dev/$DISK" >/run/fsck 2>&1 ;;
  esac || { cat /run/fsck; fail "fsck of $kind"; }
  echo 3 >/proc/sys/vm/drop_caches
  mount -o ro "/dev/$DISK" "$MOUNT"
  after=$(cd "$MOUNT" && find . -type f -print0 | sort -z | xargs -0 sha256sum | sha256sum)
  umount "$MOUNT"
  [[ $before == "$after" ]] || fail "files on $kind differ"
  ok "$kind: files stay, fsck is clean"
done

# ---- Namespaces come, go and grow while others are used ----
verify "$DISK" during --size=16M --time_based --runtime=6 >/dev/null 2>&1 & load=$!
host forebay create local/second --size 32M
host forebay attach local/second --nvme --nsid 7
await "the new namespace" device 7
ok "a namespace is added while hosts are connected"
SECOND=$(device 7)
await "it has its size" has_size "$SECOND" 65536
host forebay resize local/second --size 48M
await "it has grown" has_size "$SECOND" 98304
ok "a namespace grows while it is used"
host forebay detach local/second --nvme --force
gone() { ! device 7; }
await "the namespace has gone" gone
ok "a namespace is taken away"
wait $load || { cat /run/during.fio; fail "fio on the other namespace"; }
ok "the other namespace has noticed nothing"

# ---- The daemon restarts under load ----
verify "$DISK" restart --size=16M --io_size=64M >/dev/null 2>&1 & load=$!
sleep 1
host restart
wait $load || { cat /run/restart.fio; fail "fio over a restart of the daemon"; }
await "both paths are back" has_paths 2
ok "fio goes on over a restart of the daemon, and verifies"
verify "$DISK" kill --size=16M --io_size=64M >/dev/null 2>&1 & load=$!
sleep 1
host kill
wait $load || { cat /run/kill.fio; fail "fio over a kill -9 of the daemon"; }
await "both paths are back" has_paths 2
ok "fio goes on over a kill -9 of the daemon, and verifies"

reserved || { cat /run/report; fail "the reservation is gone after the daemon was killed"; }
nvme resv-release "/dev/$DISK" --crkey=0x11 --rtype=1 --rrela=0 >/run/release 2>&1 || { cat /run/release; fail "resv-release"; }
nvme resv-register "/dev/$DISK" --crkey=0x11 --rrega=1 >/run/register 2>&1 || { cat /run/register; fail "unregister"; }
! reserved || fail "it is still reserved"
ok "a reservation is kept over a restart and a kill, and released"

# ---- One path of two is cut ----
verify "$DISK" cut --size=16M --io_size=48M >/dev/null 2>&1 & load=$!
sleep 1
host cut
await "one path is left" has_paths 1
wait $load || { cat /run/cut.fio; fail "fio with one path cut"; }
host mend
await "the path is back" has_paths 2
ok "fio goes on when one of two paths is cut"

# ---- States of asymmetric access, set from outside ----
have_states() { [[ $(cat /sys/class/nvme/nvme*/nvme*c*n*/ana_state | sort | xargs) == "$1" ]]; }
await "both paths are optimized" have_states "optimized optimized"
verify "$DISK" ana --size=16M --time_based --runtime=8 >/dev/null 2>&1 & load=$!
host forebay ana set inaccessible --port 1 >/dev/null
await "the kernel knows that one path is inaccessible" have_states "inaccessible optimized"
host forebay ana set non-optimized --port 2 >/dev/null
await "the kernel knows that the other is not optimized" have_states "inaccessible non-optimized"
host forebay ana set optimized --port 1 >/dev/null
host forebay ana set persistent-loss --port 2 >/dev/null
await "the kernel knows that the other is lost" have_states "optimized persistent-loss"
host forebay ana set inaccessible >/dev/null
sleep 1
host forebay ana set optimized >/dev/null
await "both paths are optimized again" have_states "optimized optimized"
wait $load || { cat /run/ana.fio; fail "fio while states change"; }
ok "fio goes on while ANA states change, with no path for a while too, and verifies"

nvme disconnect-all
none_left() { [[ $(paths live) == 0 ]]; }
await "all is disconnected" none_left

# ---- Digests ----
NQN=$(sed -n 's/^subnqn: *//p' /run/discover | grep -v discovery | head -n 1)
nvme connect -t tcp -a $HOST -s "$PORT" -n "$NQN" --hdr-digest --data-digest --nr-io-queues=2 || fail "connect with digests"
await "the disk is back" device 1
DISK=$(device 1)
verify "$DISK" digests --size=16M --io_size=16M || { cat /run/digests.fio; fail "fio with digests"; }
ok "fio verifies with header and data digests"
nvme disconnect-all
await "all is disconnected" none_left
