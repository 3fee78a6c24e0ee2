#!/usr/bin/env bash
# Replicated write logs over RDMA: two daemons in the guest, one with copies in a DAX device, before a real Ceph cluster.
#
#   FOREBAY=.../forebay replication-rdma.sh
#
# Starts a cluster of its own, on an address that the guest can reach.  Needs root.
set -uo pipefail

export ADDR=10.79.$((RANDOM % 250)).1
NAME=replication-rdma; source "$(dirname "$0")/../lab/cluster.sh"
AT_END=(away)
away() { ip addr del "$ADDR/32" dev lo 2>/dev/null; }
ask ip addr add "$ADDR/32" dev lo

start_cluster 2
ok "a cluster"
mkdir "$WORK/share"
sed "s|^keyring = .*|keyring = /share/keyring|" "$CEPH_CONF" >"$WORK/share/ceph.conf"
cp "$CLUSTER_DIR/keyring" "$WORK/share/keyring"
ask rbd create --size 8M rbd/disk

SHARE=$WORK/share TIMEOUT=160 FSDAX=1 RDMA=1 limit 200 "$LAB/guest" "$LAB/../interop/guest-replication.sh" "$FOREBAY" \
  2>&1 | tee "$WORK/out" || exit 1
! grep -q '^not ok' "$WORK/out" || exit 1
