#!/usr/bin/env bash
# Options of images and pools in a real cluster, overridden by forebay and by rbd, and the limits that both apply.
#
#   FOREBAY=.../forebay rbd-qos.sh
#
# Prints a line for each check.
set -uo pipefail

NAME=rbd-qos; source "$(dirname "$0")/../lab/cluster.sh"

# What both print of one list: the JSON, and the columns.
same() { # ARGUMENTS...
  peer_reads 60 rbd "$@" --format json 2>"$WORK/out" | jq -S . >"$WORK/theirs" || fail "rbd $*"
  limit 60 "$FOREBAY" "$@" --format json 2>"$WORK/out" | jq -S . | diff "$WORK/theirs" - >"$WORK/out" || fail "the JSON of $*"
  peer_reads 60 rbd "$@" >"$WORK/theirs" 2>"$WORK/out" || fail "rbd $* as columns"
  limit 60 "$FOREBAY" "$@" 2>"$WORK/out" | diff "$WORK/theirs" - >"$WORK/out" || fail "the columns of $*"
}
# A value that both take, or both refuse.
agree() { # taken|refused ARGUMENTS...
  local want=$1 ours=refused theirs=refused
  shift
  limit 60 rbd "$@" >"$WORK/out" 2>&1 && theirs=taken
  limit 60 "$FOREBAY" "$@" >"$WORK/out" 2>&1 && ours=taken
  [[ $ours/$theirs == "$want/$want" ]] || fail "$*: $ours by forebay, $theirs by rbd"
}
limits() { # IMAGE: what the daemon holds it at
  "$FOREBAY" targets --format json | jq -c ".[] | select(.image == \"$1\") | .qos.limits"
}
limited() { [[ $(limits "$1") == "$2" ]]; }

start_cluster 1
ask rbd create rbd/disk --size 64M
ok "a cluster"

export FOREBAY_DATA=$WORK/nothing
same config image ls rbd/disk
same config pool ls rbd
ask "$FOREBAY" config image set rbd/disk rbd_qos_iops_limit 1000
ask "$FOREBAY" config image set -p rbd --image disk rbd_cache_policy writeback
ask rbd config image set rbd/disk rbd_qos_write_bps_limit 5M
ask "$FOREBAY" config pool set rbd rbd_qos_iops_limit 500
ask rbd config pool set rbd rbd_qos_read_iops_limit 2K
[[ $(rbd config image get rbd/disk rbd_qos_iops_limit) == 1000 ]] || fail "rbd reads what forebay has set"
[[ $("$FOREBAY" config image get rbd/disk rbd_qos_write_bps_limit) == 5M ]] || fail "forebay reads what rbd has set"
[[ $(rbd config pool get rbd rbd_qos_iops_limit) == 500 ]] || fail "rbd reads what forebay has set for the pool"
[[ $("$FOREBAY" config pool get rbd rbd_qos_read_iops_limit) == 2K ]] || fail "forebay reads what rbd has set for the pool"
same config image ls rbd/disk
same config pool ls rbd
ok "options set by either are seen by both"

for value in 0 1 1K 1M 18E 007; do agree taken config image set rbd/disk rbd_qos_bps_limit "$value"; done
for value in 1k 1Ki 1_M 10MB 0x10 12B "12 K" abc 20E ""; do
  agree refused config image set rbd/disk rbd_qos_bps_limit "$value"
done
agree refused config image set rbd/disk rbd_qos_iops_burst_seconds 0
agree refused config image set rbd/disk rbd_cache maybe
agree refused config image set rbd/disk rbd_default_features 1
agree refused config image set rbd/disk rbd_nosuch 1
agree refused config pool set rbd rbd_nosuch 1
agree refused config image get rbd/disk rbd_qos_read_bps_limit
agree refused config image rm rbd/disk rbd_qos_read_bps_limit
agree refused config pool rm rbd rbd_cache
ask "$FOREBAY" config image rm rbd/disk rbd_qos_bps_limit
limit 60 rbd config image get rbd/disk rbd_qos_bps_limit >"$WORK/out" 2>&1 && fail "an option that forebay has removed"
ok "values are taken and refused alike"

unset FOREBAY_DATA
export FOREBAY_DATA=$WORK/data FOREBAY_RUN_DIR=$WORK/run
"$FOREBAY" serve >"$WORK/daemon.log" 2>&1 &
DAEMON=$!
await 60 "the daemon is ready" "$FOREBAY" status
uri=$("$FOREBAY" attach rbd/disk --nbd 2>"$WORK/out") || fail "attaching"
limited disk '{"rbd_qos_iops_limit":1000,"rbd_qos_read_iops_limit":2000,"rbd_qos_write_bps_limit":5000000}' || fail "limits at the start: $(limits disk)"
# rbd notifies those who have the image open.
ask rbd config image set rbd/disk rbd_qos_iops_limit 50
await 20 "a limit set by rbd applies" limited disk '{"rbd_qos_iops_limit":50,"rbd_qos_read_iops_limit":2000,"rbd_qos_write_bps_limit":5000000}'
ask "$FOREBAY" config pool rm rbd rbd_qos_read_iops_limit
limited disk '{"rbd_qos_iops_limit":50,"rbd_qos_write_bps_limit":5000000}' || fail "a limit removed from the pool: $(limits disk)"
ok "limits of an attached image change with its options"

# 200 reads at 50 a second, of which a second's worth may have been saved up.
began=${EPOCHREALTIME/[.,]/}
for ((i = 0; i < 200; i++)); do echo "read -q $((i * 4096)) 4096"; done >"$WORK/commands"
limit 90 qemu-io -f raw "$uri" <"$WORK/commands" >"$WORK/out" 2>&1 || fail "reads"
took=$(((${EPOCHREALTIME/[.,]/} - began) / 1000))
((took >= 2900)) || fail "200 reads at 50 per second in $took ms"
ok "the limit holds under load"
