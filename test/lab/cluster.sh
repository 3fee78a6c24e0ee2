# What the scripts of test/interop that have a Ceph cluster of their own begin with, and perhaps a daemon beside it.
# To be sourced, with NAME set to what the script's lines begin with:
#
#   NAME=rbd; source "$(dirname "$0")/../lab/cluster.sh"
#
# CEPH_RELEASE chooses the release of the cluster and of Ceph's programs, as for ceph-cluster.
# Sets LAB, WORK (goes at the end), CEPH_CONF, and what ceph-cluster takes.  What was run last is in $WORK/out.
LAB=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$LAB/limits.sh"
WORK=$(mktemp -d "${TMPDIR:-/tmp}/$NAME.XXXXXX")
# Ports below 32768: others may be in use by an outgoing connection.
export LAB CLUSTER_DIR=$WORK/cluster MON_PORT=$((12000 + RANDOM % 10000)) MON_V1_PORT=$((22000 + RANDOM % 10000))
export CEPH_CONF=$CLUSTER_DIR/ceph.conf
DAEMON=
# Programs of another release than this machine's, where one is asked for.
if [[ -n ${CEPH_RELEASE:-} ]]; then
  PATH=$("$LAB/ceph-release" "$CEPH_RELEASE"):$PATH || exit 1
fi

finish() {
  local status=$? hook
  for hook in "${AT_END[@]:-}"; do [[ -z $hook ]] || $hook; done
  # shellcheck disable=SC2046
  kill $(jobs -p) 2>/dev/null
  [[ -z $DAEMON ]] || wait "$DAEMON" 2>/dev/null
  "$LAB/ceph-cluster" down >/dev/null 2>&1
  rm -rf "$WORK"
  exit $status
}
trap finish EXIT

# Prints a check that passed, and when.
ok() { echo "ok $NAME: $* (at $SECONDS s)"; }
fail() {
  echo "not ok $NAME: $1 (at $SECONDS s)"
  tail -n 25 "$WORK/out" 2>/dev/null | sed 's/^/  /'
  tail -n 15 "$WORK/daemon.log" 2>/dev/null | sed 's/^/  daemon: /'
  exit 1
}
# Runs to the end, which must be a good one.  `ceph` runs again if it hangs or aborts: both happen while librados 16.2
# disconnects (see `peer_reads`; `ceph config set` hung once), when the monitors have done what they were asked.
ask() {
  local attempt status seconds=${LIMIT:-90}
  [[ $1 != ceph ]] || seconds=${LIMIT:-30}
  for attempt in 1 2 3; do
    limit "$seconds" "$@" >"$WORK/out" 2>&1 </dev/null
    status=$?
    [[ $1 == ceph && ($status == 124 || $status == 134 || $status == 137) ]] || break
    echo "$NAME: '$*' ended with status $status, attempt $attempt" >&2
  done
  ((status == 0)) || fail "$* (status $status)"
}
# Runs a command that only reads; again if it aborts.  Programs of librados 16.2 abort now and then while they disconnect
# (std::system_error in a thread of io_context_pool; `rbd du` once in 200 runs on a busy machine).
peer_reads() { # SECONDS COMMAND...
  local attempt status
  for attempt in 1 2 3; do
    limit "$@" >"$WORK/read"
    status=$?
    [[ $status == 134 ]] || break
  done
  cat "$WORK/read"
  return "$status"
}
# Waits until a command succeeds, for so many seconds of quiet time.  Between two attempts it waits twice as long as an
# attempt takes: Ceph's programs each start an interpreter, and would take the processor from what is waited for.
await() { # SECONDS WHAT COMMAND...
  local end what=$2 NOW began pause
  quiet_now
  end=$((NOW + $1))
  shift 2
  began=${EPOCHREALTIME/[.,]/}
  until "$@" >"$WORK/out" 2>&1 </dev/null; do
    quiet_now
    ((NOW <= end)) || fail "waiting until $what"
    pause=$((2 * (${EPOCHREALTIME/[.,]/} - began)))
    ((pause >= 100000)) || pause=100000
    sleep "$((pause / 1000000)).$(printf %06d $((pause % 1000000)))"
    began=${EPOCHREALTIME/[.,]/}
  done
}
says() { grep -q "$2" "$1"; }
# Waits until a file has a line with this in it.
until_says() { # FILE TEXT
  await 60 "$1 says '$2'" says "$1" "$2"
}
start_cluster() { "$LAB/ceph-cluster" up "${1:-3}" >"$WORK/out" 2>&1 || fail "a cluster"; }
# Every placement group has all its copies, and the maps are those of now.  Prints their states.
is_clean() {
  local now
  now=$(ceph pg stat 2>&1)
  echo "$now"
  [[ $now =~ ^[0-9]+\ pgs:\ [0-9]+\ active\+clean\; ]]
}
# Writes a configuration with more in it than the cluster's own, and prints its place.
conf_with() { # NAME LINE...
  local file=$WORK/$1.conf
  shift
  cp "$CLUSTER_DIR/ceph.conf" "$file"
  printf '%s\n' "$@" >>"$file"
  echo "$file"
}
# Runs a step of the RADOS client, whose program is $PROGRAM.
lab() { limit "${LIMIT:-120}" "$PROGRAM" "$@" >"$WORK/out" 2>&1 </dev/null; }
# Compares the places of all placement groups, by the cluster's map of now, with those of its osdmaptool.
compare_placement() { # WHAT
  local pool
  ask ceph osd getmap -o "$WORK/map"
  for pool in $(ceph osd lspools -f json 2>/dev/null | grep -o '"poolnum":[0-9]*' | cut -d: -f2); do
    lab groups "$WORK/map" "$pool" || fail "$1: pool $pool"
    cp "$WORK/out" "$WORK/ours"
    osdmaptool "$WORK/map" --test-map-pgs-dump --pool "$pool" 2>/dev/null | grep "^$pool\." >"$WORK/theirs"
    [[ -s $WORK/theirs ]] || fail "$1: osdmaptool says nothing of pool $pool"
    diff "$WORK/ours" "$WORK/theirs" >"$WORK/out" || fail "$1: placement groups of pool $pool"
  done
}
# Prints the number of a pool.
pool_number() { ceph osd pool stats "$1" -f json 2>/dev/null | grep -o '"pool_id":[0-9]*' | cut -d: -f2; }
start_daemon() { # MORE FLAGS; STORE_SIZE: of its own store, 256M if nothing else is said
  export FOREBAY_DATA=$WORK/data FOREBAY_CONTROL=
  mkdir -p "$WORK/data"
  "$FOREBAY" serve --store-size "${STORE_SIZE:-256M}" "$@" >>"$WORK/daemon.log" 2>&1 &
  DAEMON=$!
  await 30 "the daemon is ready" "$FOREBAY" status
}
