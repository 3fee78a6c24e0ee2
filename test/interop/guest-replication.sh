#!/usr/bin/env bash
# Runs inside the guest (test/lab/guest, FSDAX=1 RDMA=1): two daemons whose write logs have copies at the other one, connected over
# RDMA.  The first one's log is in memory that is not persistent, the other one's copies are in a DAX device.
#
#   guest-replication.sh FOREBAY      /share/ceph.conf names the cluster, whose image rbd/disk has 8 MiB
#
# The first daemon is killed under a client that remembers what it was promised, and the other one takes over.
set -euo pipefail
FOREBAY=$1

PATIENCE=60
source "$(dirname "$0")/guest.sh"
export CEPH_CONF=/share/ceph.conf
IP=$(ip -4 -o addr show dev eth0 | awk '{sub("/.*", "", $4); print $4; exit}')
PROMISES=$(dirname "$0")/guest-promises.pl
declare -A PID

finish() {
  local status=$?
  [[ $status == 0 ]] || tail -n 12 /run/{one,two}/forebay.log /run/*.client | sed 's/^/  /'
  # shellcheck disable=SC2046
  kill -9 $(jobs -p) 2>/dev/null || true
}
trap finish EXIT

of() { # DAEMON COMMAND...
  FOREBAY_CONTROL=/run/$1/control "$FOREBAY" "${@:2}"
}
is_up() { of "$1" status >/dev/null 2>&1; }
start() { # DAEMON
  (cd "/run/$1" && exec "$FOREBAY" serve --data "/run/$1/data" --store-size 64M --config "/run/$1/forebay.toml" --cores 1 \
    --control "/run/$1/control" --nbd "unix:/run/$1/nbd") >>"/run/$1/forebay.log" 2>&1 &
  PID[$1]=$!
  await "daemon $1" is_up "$1"
}
prepare() { # DAEMON PORT OTHER-PORT LINES: its [replicas]
  mkdir -p "/run/$1"
  printf '5a%.0s' {1..32} >"/run/$1/peer.key"
  chmod 600 "/run/$1/peer.key"
  printf '%s\n' "peer = ['rdma:$IP:$2']" "peers = ['rdma:$IP:$3']" "peer-key = '/run/$1/peer.key'" 'peer-secure = false' \
    "rdma-local = '$IP'" '[replicas]' "medium = 'pmem'" "$4" >"/run/$1/forebay.toml"
}
metric() { # DAEMON NAME
  curl -s --unix-socket "/run/$1/control" http://x/metrics | awk -v name="$2" 'index($1, name) == 1 { sum += $2 } END { print sum + 0 }'
}
over_rdma() { of "$1" --format json status | jq -e '[.peers[] | select(.id != null and .outgoing and .transport == "rdma")] | length > 0' >/dev/null; }
# Both copies are complete.
complete() { [[ $(metric "$1" 'forebay_log_copies{') == 2 ]]; }
took_over() { of "$1" log takeover rbd/disk >"/run/$1/takeover" 2>&1; }
wrote() { # FILE LINES
  [[ $(grep -c '^promised' "$1") -ge $2 ]]
}
# Lets the client verify and write, until so many of its blocks were acknowledged.
write_at() { # DAEMON NAME LINES
  perl "$PROMISES" "/run/$1/nbd" rbd/disk /run/promised 0 >"/run/$2.client" 2>&1 &
  await "a client of daemon $1" wrote "/run/$2.client" "$3"
  grep -q '^ok' "/run/$2.client" || fail "what was promised"
  grep '^ok' "/run/$2.client"
}
# Kills a daemon under load, and keeps what its client was promised.
crash() { # DAEMON NAME
  kill -9 "${PID[$1]}"
  wait "${PID[$1]}" 2>/dev/null || true
  await "the client notices" grep -q 'not ok' "/run/$2.client"
  grep '^promised' "/run/$2.client" >>/run/promised
}

ndctl create-namespace -f -e namespace0.0 --mode=devdax --align=2M >/run/ndctl 2>&1 || { cat /run/ndctl; fail "a DAX device"; }
await "the DAX device" test -c /dev/dax0.0
: >/run/promised
prepare one 7101 7102 $'path = \'/run/one/replicas\'\nquota = \'32M\'\nforce = true'
prepare two 7102 7101 $'path = \'/dev/dax0.0\'\nquota = \'128M\''
start one
start two
await "peers over RDMA" over_rdma one
ok "two daemons, connected over RDMA"

of one attach rbd/disk --nbd --log pmem:/run/one/logs:16M:force --replica "rdma:$IP:7102" >/run/attach 2>&1 || fail "attach: $(cat /run/attach)"
await "two complete copies" complete one
write_at one first 500
placed=$(metric one forebay_log_one_sided_blocks_total)
here=$(metric two forebay_replica_one_sided_blocks_total)
((placed >= 400 && here >= 400)) || fail "$placed blocks were written one-sided, and $here arrived"
crash one first
await "a takeover" took_over two
of two attach rbd/disk --nbd >/run/attach 2>&1 || fail "attach at the other daemon: $(cat /run/attach)"
write_at two second 50
ok "all that was acknowledged is there, after $placed blocks were written into a DAX device one-sided"
