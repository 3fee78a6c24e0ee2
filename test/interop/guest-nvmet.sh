#!/usr/bin/env bash
# Runs inside the guest (test/lab/guest): the kernel's own NVMe/TCP target, and a daemon beside it, each with a volume in
# memory, loaded over loopback in turn by nvme-load.
#
#   guest-nvmet.sh FOREBAY LOAD ROUNDS SECONDS
#
# Prints a line `RUN case who figures` for each run: who is `forebay` or `nvmet`, the figures are JSON.
set -euo pipefail
FOREBAY=$1 LOAD=$2 ROUNDS=$3 SECONDS_EACH=$4
SIZE_MIB=64 NQN=nqn.2014-08.org.nvmexpress:uuid:11111111-2222-4333-8444-555555555555
CONFIG=/sys/kernel/config/nvmet
export FOREBAY_CONTROL=/run/control

modprobe brd rd_nr=1 rd_size=$((SIZE_MIB * 1024)); modprobe nvmet-tcp
mountpoint -q /sys/kernel/config || mount -t configfs none /sys/kernel/config
mkdir $CONFIG/subsystems/$NQN $CONFIG/subsystems/$NQN/namespaces/1 $CONFIG/ports/1
echo 1 >$CONFIG/subsystems/$NQN/attr_allow_any_host
echo -n /dev/ram0 >$CONFIG/subsystems/$NQN/namespaces/1/device_path
echo 1 >$CONFIG/subsystems/$NQN/namespaces/1/enable
echo tcp >$CONFIG/ports/1/addr_trtype; echo ipv4 >$CONFIG/ports/1/addr_adrfam
echo 127.0.0.1 >$CONFIG/ports/1/addr_traddr; echo 4420 >$CONFIG/ports/1/addr_trsvcid
ln -s $CONFIG/subsystems/$NQN $CONFIG/ports/1/subsystems/

taskset -c 0 "$FOREBAY" serve --data /run/data --control $FOREBAY_CONTROL --store-size 64M --nvme 127.0.0.1:4421 >/run/log 2>&1 &
for _ in {1..600}; do "$FOREBAY" status >/dev/null 2>&1 && break; sleep 0.1; done
"$FOREBAY" create ram/bench --size ${SIZE_MIB}M >/dev/null || { tail -n 20 /run/log; exit 1; }
OURS=$("$FOREBAY" attach ram/bench --nvme | grep -m 1 '^nvme+tcp://')

run() { # CASE WHO URI WORDS...
  local name=$1 who=$2 uri=$3; shift 3
  echo "RUN $name $who $(taskset -c 1 "$LOAD" "$uri" --seconds "$SECONDS_EACH" "$@")"
}
both() { # ROUND CASE WORDS...
  local round=$1 name=$2; shift 2
  local order="forebay nvmet"
  # Each round begins with the other one.
  if ((round % 2)); then order="nvmet forebay"; fi
  local who
  for who in $order; do
    case $who in
      forebay) run "$name" forebay "$OURS" "$@" ;;
      nvmet) run "$name" nvmet "nvme+tcp://127.0.0.1:4420/$NQN#1" "$@" ;;
    esac
  done
}
# Once from end to end, so that no read hits data that was never written.
for uri in "$OURS" "nvme+tcp://127.0.0.1:4420/$NQN#1"; do
  "$LOAD" "$uri" --pattern write --block 1048576 --depth 4 --once >/dev/null
done
for ((round = 0; round < ROUNDS; round++)); do
  both "$round" randread-4k-qd1 --depth 1
  both "$round" randread-4k-qd32 --depth 32
  both "$round" randwrite-4k-qd32 --pattern randwrite --depth 32
  both "$round" read-1m --pattern read --block 1048576 --depth 4
done
