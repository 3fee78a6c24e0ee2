#!/usr/bin/env bash
# Runs inside the guest: the store on five disks in memory with 3+2 columns and on three with 3+0, and the kernel's RAID 6
# and RAID 0 on the same disks.
#
#   guest-mdraid.sh SERVICES ROUNDS SECONDS SIZE_MIB     SERVICES: the store's example of that name
#
# Appends a line `COMPETITOR MODE VALUE` to /share/results for each measurement: MB/s, or requests a second where the mode
# begins with rand; /share/kernel gets the kernel's release.  The competitors are store-ec, store-stripes, md-ec and md-stripes.
set -euo pipefail
source "$(dirname "$0")/guest.sh"
SERVICES=$1 ROUNDS=$2 SECONDS_EACH=$3 SIZE_MIB=$4
DATA=3 PARITY=2
DISKS=$((DATA + PARITY))
MODES="write read randwrite randread"
DEGRADED="read-degraded randread-degraded"
# MiB of a disk: a third of the data, and its metadata.
DISK_MIB=$((SIZE_MIB / DATA + 32))

uname -r >/share/kernel
modprobe raid456 && modprobe raid0 || fail "the kernel's RAID"
mkdir -p /run/mdadm /run/store
for ((disk = 0; disk < DISKS; disk++)); do ln -sf "/dev/ram$disk" "/run/store/dev$disk"; done

# Has disks of zeroes, which are in sync to a RAID.
fresh_disks() {
  ! [[ -e /dev/ram0 ]] || rmmod brd || fail "disks in memory that are in use"
  modprobe brd rd_nr=$DISKS rd_size=$((DISK_MIB * 1024)) max_part=0 || fail "disks in memory"
  await "disks in memory" test -b "/dev/ram$((DISKS - 1))"
}
depth() { if [[ $1 == rand* ]]; then echo 32; else echo 8; fi; }
report() { # COMPETITOR MODE VALUE
  echo "$1 $2 $3" | tee -a /share/results
}
store() { # COMPETITOR COLUMNS MODES
  local mode line field
  for mode in $3; do
    line=$("$SERVICES" /run/store "$SIZE_MIB" "$2" none "$mode" "$(depth "$mode")" "$SECONDS_EACH" 2>/run/error | tail -n 1)
    [[ $line == '{'* ]] || { cat /run/error; fail "the store with $2 columns, $mode"; }
    field=.bytes_per_second/1e6
    [[ $mode != rand* ]] || field=.requests_per_second
    report "$1" "$mode" "$(jq "$field" <<<"$line")"
  done
}

# Runs fio on the array, and prints its report.
run_fio() { # RW DEPTH MORE...
  local rw=$1 depth=$2 size=1M
  shift 2
  [[ $rw != rand* ]] || size=4k
  fio --name=raid --filename=/dev/md0 --direct=1 --ioengine=io_uring --rw="$rw" --bs=$size --iodepth="$depth" \
    --size=$((SIZE_MIB / 2))M --output-format=json "$@" 2>/run/error || { cat /run/error; fail "fio on the array, $rw"; }
}
measure_array() { # COMPETITOR MODE
  local rw=${2%-degraded} side=read field=bw_bytes/1e6 output
  [[ $rw != *write ]] || side=write
  [[ $rw != rand* ]] || field=iops
  output=$(run_fio "$rw" "$(depth "$rw")" --time_based --runtime="$SECONDS_EACH")
  report "$1" "$2" "$(jq ".jobs[0].$side.$field" <<<"$output")"
}
manage() { mdadm --quiet "$@" >/run/error 2>&1 || { cat /run/error; fail "mdadm $*"; }; }
array() { # COMPETITOR LEVEL COUNT
  local mode disk disks=() clean=()
  for ((disk = 0; disk < $3; disk++)); do disks+=("/dev/ram$disk"); done
  [[ $2 == 0 ]] || clean=(--assume-clean)
  manage --create /dev/md0 --run --level="$2" --raid-devices="$3" --chunk=64 --metadata=1.2 "${clean[@]}" "${disks[@]}"
  # What is read was written.
  run_fio write 8 >/dev/null
  for mode in $MODES; do measure_array "$1" "$mode"; done
  if [[ $2 != 0 ]]; then
    manage /dev/md0 --fail /dev/ram0
    manage /dev/md0 --fail /dev/ram1
    for mode in $DEGRADED; do measure_array "$1" "$mode"; done
  fi
  manage --stop /dev/md0
}

COMPETITORS=(store-ec md-ec store-stripes md-stripes)
for ((round = 0; round < ROUNDS; round++)); do
  # The order turns with each round.
  for ((place = 0; place < ${#COMPETITORS[@]}; place++)); do
    competitor=${COMPETITORS[(place + round) % ${#COMPETITORS[@]}]}
    fresh_disks
    case $competitor in
      store-ec) store $competitor $DATA+$PARITY "$MODES $DEGRADED" ;;
      store-stripes) store $competitor $DATA+0 "$MODES" ;;
      md-ec) array $competitor 6 $DISKS ;;
      md-stripes) array $competitor 0 $DATA ;;
    esac
  done
  echo "round $((round + 1)) of $ROUNDS"
done
