#!/usr/bin/env bash
# Runs inside the guest (test/lab/guest): the kernel's rbd client, on images that are written on the other side, too.
#
#   guest-rbd.sh MONITOR      /share/secret holds client.admin's key, /share/plan a line an image:
#
#     sum POOL IMAGE SNAPSHOT        its SHA-256 goes into /share/sums; `-` for no snapshot
#     write POOL IMAGE FILE MIB      /share/FILE is written there
set -euo pipefail
MONITOR=$1 SECRET=$(cat /share/secret)

fail() { echo "not ok guest: $*"; dmesg | tail -n 20; exit 1; }
map() { # POOL IMAGE SNAPSHOT
  echo "$MONITOR name=admin,secret=$SECRET $1 $2 $3" >/sys/bus/rbd/add_single_major || fail "mapping $1/$2@$3"
  ID=$(ls /sys/bus/rbd/devices | sort -n | tail -n 1)
  for _ in {1..100}; do
    [[ -b /dev/rbd$ID ]] && return
    sleep 0.05
  done
  fail "no device for $1/$2"
}
unmap() { echo "$ID" >/sys/bus/rbd/remove_single_major || fail "unmapping"; }

modprobe rbd
: >/share/sums
while read -r verb pool image what where; do
  case $verb in
    sum)
      map "$pool" "$image" "$what"
      echo "$pool/$image@$what $(sha256sum <"/dev/rbd$ID" | cut -d' ' -f1)" >>/share/sums
      unmap
      echo "ok guest: read $pool/$image@$what"
      ;;
    write)
      map "$pool" "$image" -
      dd if="/share/$what" of="/dev/rbd$ID" bs=1M seek="$where" oflag=direct conv=fsync status=none || fail "writing $image"
      unmap
      echo "ok guest: wrote to $pool/$image"
      ;;
  esac
done </share/plan
