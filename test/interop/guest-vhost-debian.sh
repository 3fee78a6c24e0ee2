#!/usr/bin/env bash
# Runs inside a guest whose root is a disk of a vhost-user-blk back-end (test/lab/guest, ROOT_DISK): Debian with systemd.
#
#   guest-vhost-debian.sh boot       a load, a resize, fstrim
#   guest-vhost-debian.sh migrate    a verified load that goes on until the disk grows
#
# Nothing of the host's can be seen here: it reads on the console how far this has come, and answers by a resize.
set -euo pipefail
source "$(dirname "$0")/guest.sh"
SCENARIO=$1
LOGS="/run/fio.log"

sectors() { cat /sys/block/vda/size; }
has_grown() { (($(sectors) > BEFORE)); }
load() { # MIB OPTIONS...
  fio --name=load --filename=/root/load --ioengine=libaio --direct=1 --verify=crc32c --verify_fatal=1 --eta=never --rw=randwrite \
    --bsrange=4k-64k --iodepth=16 --size="$1M" "${@:2}" >/run/fio.log 2>&1 || fail "fio: an error, or data that differs"
}
# Leaves a file with a digest beside it, for the host to compare when the guest is gone.
leave() {
  head -c $((8 << 20)) /dev/urandom >/root/left
  sha256sum </root/left | cut -d' ' -f1 >/root/left.sum
}
grow() {
  resize2fs /dev/vda >/run/fio.log 2>&1 || fail "resize2fs"
  (($(stat -f -c '%b * %S' /) > $(sectors) * 512 * 9 / 10)) || fail "the file system has not grown"
}
no_errors() { ! dmesg | grep -iE 'I/O error|EXT4-fs (error|warning)|Buffer I/O|blocked for more than|virtio.*(fail|broken)'; }

BEFORE=$(sectors)
[[ $(findmnt -no SOURCE /) == /dev/vda && $(findmnt -no FSTYPE /) == ext4 ]] || fail "the root is $(findmnt -no SOURCE /)"
[[ $(cat /proc/1/comm) == systemd ]] || fail "process 1 is $(cat /proc/1/comm)"
ok "Debian $(cat /etc/debian_version) on /dev/vda, systemd is $(systemctl is-system-running || true)"

case $SCENARIO in
  boot)
    load 32
    rm /root/load
    ok "written and verified"
    head -c $((192 << 20)) /dev/urandom >/root/filling
    sync
    echo "step filled"
    PATIENCE=120 await "the resize" has_grown
    grow
    ok "grown to $(($(sectors) / 2048)) MiB, and the file system with it"
    rm /root/filling
    sync
    fstrim / || fail "fstrim"
    ok "fstrim"
    ;;
  migrate)
    head -c $((8 << 20)) /dev/urandom >/root/before
    before=$(sha256sum </root/before)
    for ((round = 1; round < 1000; round++)); do
      load 16
      echo "step round $round"
      ! has_grown || break
    done
    rm /root/load
    sync
    echo 3 >/proc/sys/vm/drop_caches
    [[ $(sha256sum </root/before) == "$before" ]] || fail "what was written first has changed"
    grow
    ok "verified $round rounds, and the disk has grown"
    ;;
esac
leave
no_errors || fail "an error reached the guest"
sync
ok "no error"
