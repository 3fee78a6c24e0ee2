#!/usr/bin/env bash
# Runs inside the guest (test/lab/guest with DISKS, FSDAX=1 and RDMA=1): durable writes to images whose write logs have a
# replica, and to DRBD with protocol C, on media of the same kind.
#
#   guest-drbd.sh FOREBAY ROUNDS SECONDS DEPTHS MEDIA WHO       the last three are lists: "1 8 32" "ssd pmem" "none tcp rdma drbd"
#
# /share/ceph.conf names a cluster with a pool rbd.  The disks: /dev/vda for the primary's logs, /dev/vdb and /dev/vdc for
# copies over TCP and RDMA, /dev/vdd and /dev/vde for DRBD's primary and secondary.  Persistent memory is divided likewise.
#
# Prints a line `RUN MEDIUM WHO DEPTH ROUND` for each measurement, whose report of fio is /share/MEDIUM-WHO-DEPTH-ROUND.json.
set -euo pipefail
source "$(dirname "$0")/guest.sh"
FOREBAY=$1 ROUNDS=$2 SECONDS_EACH=$3 DEPTHS=$4 MEDIA=$5
read -ra COMPETITORS <<<"$6"
PATIENCE=90
# MiB of an image, of a log (more than a measurement writes), and of a disk of DRBD's with its metadata.
IMAGE_MIB=16 LOG_MIB=128 DRBD_MIB=24
DRBDSETUP=/usr/lib/drbd/drbdsetup-84
IP=$(ip -4 -o addr show dev eth0 | awk '{sub("/.*", "", $4); print $4; exit}')
export CEPH_CONF=/share/ceph.conf
LOGS="/run/primary.log /run/tcp.log /run/rdma.log"
declare -A DEVICE DAEMON MINOR

forebay() { "$FOREBAY" "$@"; }
is_wanted() { [[ " ${COMPETITORS[*]} " == *" $1 "* ]]; }
address() { if [[ $1 == tcp ]]; then echo 127.0.0.1:7001; else echo "rdma:$IP:7002"; fi; }
# Starts a daemon with the lines of the standard input as its configuration.
serve() { # NAME
  cat >"/run/$1.toml"
  printf '%s\n' "data = '/run/$MEDIUM-$1'" "peer-key = '/run/key'" "peer-secure = false" "rdma-local = '$IP'" | cat - "/run/$1.toml" >"/run/$1.new"
  mv "/run/$1.new" "/run/$1.toml"
  FOREBAY_CONTROL= "$FOREBAY" serve --config "/run/$1.toml" --control "/run/$1.sock" --nbd "unix:/run/$1.nbd" \
    --store-size 64M --cores 1 --linger-us 0 >"/run/$1.log" 2>&1 &
  DAEMON[$1]=$!
  FOREBAY_CONTROL=/run/$1.sock await "the daemon $1" "$FOREBAY" status
}
members() { forebay --format json log info "$1" | jq "[.members[]? | select(.state == \"complete\")] | length"; }
is_complete() { [[ $(members "$1") == 2 ]]; }
knows_peers() { [[ $(forebay --format json status | jq '[.peers[]? | select(.id | type == "string")] | length') == "$1" ]]; }

# Starts a primary with an image for each competitor, and daemons for their copies.
start_forebay() {
  local who image log copies peers=() more
  for who in tcp rdma; do
    is_wanted $who || continue
    peers+=("'$(address $who)'")
    copies=/run/pmem/copies-$who more=
    if [[ $MEDIUM == ssd ]]; then copies=$([[ $who == tcp ]] && echo /dev/vdb || echo /dev/vdc); fi
    serve $who <<TOML
peer = ['$(address $who)']
[replicas]
medium = '$MEDIUM'
path = '$copies'
quota = '$((LOG_MIB + 64))M'
TOML
  done
  serve primary <<TOML
peers = [$(IFS=,; echo "${peers[*]}")]
[ceph]
conf = '$CEPH_CONF'
TOML
  export FOREBAY_CONTROL=/run/primary.sock
  await "the peers of the primary" knows_peers ${#peers[@]}
  # Both ends fall back to TCP where RDMA does not work.
  ! is_wanted rdma || forebay --format json status | jq -e 'any(.peers[]; .transport == "rdma")' >/dev/null || fail "RDMA is not used"
  for who in none tcp rdma; do
    is_wanted $who || continue
    image=rbd/$MEDIUM-$who log=pmem:/run/pmem/log-$who:${LOG_MIB}M more=()
    [[ $MEDIUM == pmem ]] || log=ssd:/dev/vda:${LOG_MIB}M
    [[ $who == none ]] || more=("--replica=$(address $who)")
    forebay create "$image" --size ${IMAGE_MIB}M >/dev/null || fail "creating $image"
    forebay attach "$image" --nbd --log="$log" "${more[@]}" >/run/attach 2>&1 || { cat /run/attach; fail "attaching $image"; }
    [[ $who == none ]] || await "a copy of the log of $image" is_complete "$image"
    DEVICE[$who]=/dev/nbd$NBD
    nbd-client -unix /run/primary.nbd "/dev/nbd$NBD" -N "$image" -b 4096 >/run/nbd 2>&1 || { cat /run/nbd; fail "connecting to $image"; }
    NBD=$((NBD + 1))
  done
}
stop_forebay() {
  local who
  for who in none tcp rdma; do
    is_wanted $who || continue
    nbd-client -d "${DEVICE[$who]}" >/dev/null
    forebay detach "rbd/$MEDIUM-$who" --force >/dev/null || fail "detaching"
  done
  for who in primary tcp rdma; do
    [[ -n ${DAEMON[$who]:-} ]] || continue
    kill "${DAEMON[$who]}"
    wait "${DAEMON[$who]}" || fail "the daemon $who has ended badly"
  done
}

# Connects two resources of this kernel with each other over loopback, each with a minor of its own: to DRBD they are two
# machines.  All options are its defaults: it flushes its disks, and checks no data on the wire.
start_drbd() { # DISK OF THE PRIMARY, OF THE SECONDARY
  local minor=$DRBD disk port=$((7100 + DRBD)) resource
  DRBD=$((DRBD + 2))
  for disk in "$@"; do
    drbdmeta --force "$minor" v08 "$disk" internal create-md >/run/drbd.log 2>&1 </dev/null || { cat /run/drbd.log; fail "drbdmeta"; }
    $DRBDSETUP new-resource "r$minor" && $DRBDSETUP new-minor "r$minor" "$minor" 0 || fail "a minor of DRBD"
    $DRBDSETUP attach "$minor" "$disk" "$disk" internal || fail "attaching $disk to DRBD"
    minor=$((minor + 1))
  done
  $DRBDSETUP connect "r$((minor - 2))" "ipv4:127.0.0.1:$port" "ipv4:127.0.0.1:$((port + 1))" --protocol=C || fail "DRBD"
  $DRBDSETUP connect "r$((minor - 1))" "ipv4:127.0.0.1:$((port + 1))" "ipv4:127.0.0.1:$port" --protocol=C || fail "DRBD"
  MINOR[$MEDIUM]=$((minor - 2))
  DEVICE[drbd]=/dev/drbd$((minor - 2))
  await "the connection of DRBD" drbd_is 'cs:Connected'
  $DRBDSETUP primary "${MINOR[$MEDIUM]}" --force || fail "a primary of DRBD"
  await "a copy of DRBD" drbd_is 'ds:UpToDate/UpToDate C'
}
drbd_is() { grep -q "^ *${MINOR[$MEDIUM]}: .*$1" /proc/drbd; }

write() { # FIO'S OPTIONS
  fio --filename="${DEVICE[$who]}" --size=${IMAGE_MIB}M --direct=1 --ioengine=libaio --thread --eta=never --name=write "$@"
}
# Writes at random, each write durable at all copies when it is acknowledged (O_DSYNC: the kernel sends it with FUA).
measure() { # WHO DEPTH ROUND
  local who=$1 report=$MEDIUM-$1-$2-$3.json image=rbd/$MEDIUM-$1
  write --rw=randwrite --bs=4k --sync=1 --iodepth="$2" --time_based --runtime="$SECONDS_EACH" --randrepeat=0 \
    --norandommap --output-format=json+ --percentile_list=50:99:99.9:99.99 --output="/run/$report" || fail "fio: $report"
  case $who in
    drbd) drbd_is 'cs:Connected.*ds:UpToDate/UpToDate C' || { cat /proc/drbd; fail "DRBD has lost its copy"; } ;;
    tcp | rdma) is_complete "$image" || fail "$image has lost its copy" ;;
  esac
  # Empties the log for the next measurement.
  [[ $who == drbd ]] || forebay log flush "$image" >/dev/null || fail "log flush"
  mv "/run/$report" "/share/$report"
  echo "RUN $MEDIUM $who $2 $3"
}

modprobe nbd nbds_max=8; modprobe ext4
if is_wanted drbd; then
  # DRBD's tools keep locks here.
  mkdir -p /run/lock /run/drbd /var/lib/drbd
  modprobe drbd minor_count=8 usermode_helper=/bin/true || fail "no module of DRBD"
fi
(umask 077; printf '5a%.0s' {1..32} >/run/key)
if [[ " $MEDIA " == *" pmem "* ]]; then
  # Divides the memory without a partition table.
  end=$(($(blockdev --getsz /dev/pmem0) / 4096 * 4096)) drbd=$((DRBD_MIB * 2048))
  addpart /dev/pmem0 1 4096 $((end - 4096 - 2 * drbd)); addpart /dev/pmem0 2 $((end - 2 * drbd)) $drbd
  addpart /dev/pmem0 3 $((end - drbd)) $drbd
  mkfs.ext4 -q -F -b 4096 /dev/pmem0p1 || fail "mkfs"
  mkdir -p /run/pmem
  mount -o dax /dev/pmem0p1 /run/pmem || fail "mount -o dax"
fi
NBD=0 DRBD=0
for MEDIUM in $MEDIA; do
  start_forebay
  if is_wanted drbd; then
    if [[ $MEDIUM == ssd ]]; then start_drbd /dev/vdd /dev/vde; else start_drbd /dev/pmem0p2 /dev/pmem0p3; fi
  fi
  # Once around each ring, and once over DRBD's disks.
  for who in "${COMPETITORS[@]}"; do
    write --rw=write --bs=1M --iodepth=4 --io_size=$((LOG_MIB + 16))M --time_based=0 >/run/fill 2>&1 || { cat /run/fill; fail "filling $MEDIUM-$who"; }
    [[ $who == drbd ]] || forebay log flush "rbd/$MEDIUM-$who" >/dev/null || fail "log flush"
  done
  for ((round = 0; round < ROUNDS; round++)); do
    for depth in $DEPTHS; do
      for ((turn = 0; turn < ${#COMPETITORS[@]}; turn++)); do
        # Each round begins with another one.
        measure "${COMPETITORS[(turn + round) % ${#COMPETITORS[@]}]}" "$depth" "$round"
      done
    done
  done
  stop_forebay
  if is_wanted drbd; then
    $DRBDSETUP down "r${MINOR[$MEDIUM]}" && $DRBDSETUP down "r$((MINOR[$MEDIUM] + 1))" || fail "stopping DRBD"
  fi
done
