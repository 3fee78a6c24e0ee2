#!/usr/bin/env bash
# Two hosts, in network namespaces, with the link between them cut and restored: lossless sessions resume, lossy ones report.
#
#   FOREBAY=PROGRAM messenger-netns.sh [SECONDS...]     how long each cut lasts; default 1 10 60
#
# Needs root.  Prints a line for each check.
set -uo pipefail

WORK=$(mktemp -d "${TMPDIR:-/tmp}/messenger-netns.XXXXXX")
NS=fbmsgr$$ A=fbm0$$ B=fbm1$$
KEY=$(printf '5a%.0s' $(seq 32))
export FOREBAY_PERF_KEY=$KEY
SERVER=

finish() {
  local status=$?
  [[ -n $SERVER ]] && kill "$SERVER" 2>/dev/null
  ip netns del "$NS" 2>/dev/null
  ip link del "$A" 2>/dev/null
  rm -rf "$WORK"
  exit $status
}
trap finish EXIT
fail() {
  echo "not ok messenger-netns: $1"
  tail -n 20 "$WORK"/*.log | sed 's/^/  /'
  exit 1
}
# until COMMAND...: waits for a condition, for 20 s.
until_true() {
  for _ in $(seq 400); do "$@" && return 0; sleep 0.05; done
  return 1
}

ip netns add "$NS" && ip link add "$A" type veth peer name "$B" && ip link set "$B" netns "$NS" || fail "namespaces"
ip addr add 10.213.77.1/24 dev "$A" && ip link set "$A" up || fail "this side of the link"
ip netns exec "$NS" sh -c "ip addr add 10.213.77.2/24 dev $B && ip link set $B up && ip link set lo up" || fail "the other side"

ip netns exec "$NS" "$FOREBAY" perf messenger serve --addr 10.213.77.2:7000 --secure >"$WORK/server.log" 2>&1 &
SERVER=$!
until_true grep -q 7000 "$WORK/server.log" || fail "a server"

cut() { # SECONDS
  ip link set "$A" down
  # The link is what is tested: its absence has to last this long.
  sleep "$1"
  ip link set "$A" up
  ip addr add 10.213.77.1/24 dev "$A" 2>/dev/null
}
ran() { # TIME FLAGS...: a client in the background
  local time=$1
  shift
  "$FOREBAY" perf messenger run --addr 10.213.77.2:7000 --secure --size 4096 --depth 8 --seconds "$time" --timeout 120 --format json "$@" \
    >"$WORK/run.log" 2>&1 &
  CLIENT=$!
}
# The client's packets are seen on the link: it is at work.
busy() { (($(<"/sys/class/net/$A/statistics/tx_packets") > SEEN + 200)); }
working() {
  SEEN=$(<"/sys/class/net/$A/statistics/tx_packets")
  until_true busy
}

for seconds in "${@:-1 10 60}"; do
  for length in $seconds; do
    ran $((length + 4))
    working || fail "a client before a cut of $length s"
    cut "$length"
    wait "$CLIENT" || fail "a lossless session does not survive a cut of $length s"
    [[ $(jq .messages "$WORK/run.log") -gt 100 ]] || fail "nothing was exchanged around a cut of $length s"
    echo "ok messenger-netns: a lossless session resumes after $length s ($(jq .messages "$WORK/run.log") answers)"
  done
done

ran 40 --lossy
working || fail "a lossy client"
ip link set "$A" down
wait "$CLIENT" && fail "a lossy client does not notice that its peer is gone"
ip link set "$A" up
grep -q 'silent\|connection' "$WORK/run.log" || fail "a lossy client says nothing of the reason"
echo "ok messenger-netns: a lossy connection reports: $(jq -r .error.message "$WORK/run.log")"
