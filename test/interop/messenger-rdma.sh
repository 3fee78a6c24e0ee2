#!/usr/bin/env bash
# Messengers over RDMA, on a machine with a device: the lab's guest with RDMA=1, or any other.
#
#   messenger-rdma.sh FOREBAY EXAMPLE [IP]      the program, the messenger's example messenger-rdma, and the device's
#                                               address; default that of eth0
#
# Prints a line for each check.
set -uo pipefail

FOREBAY=$1 RDMA_CHECK=$2
IP=${3:-$(ip -4 -o addr show dev eth0 | awk '{sub("/.*", "", $4); print $4; exit}')}
WORK=$(mktemp -d "${TMPDIR:-/tmp}/messenger-rdma.XXXXXX")
FOREBAY_PERF_KEY=$(printf '5a%.0s' $(seq 32))
export FOREBAY_PERF_KEY
SERVER=

finish() {
  local status=$?
  [[ -n $SERVER ]] && kill "$SERVER" 2>/dev/null
  rm -rf "$WORK"
  exit $status
}
trap finish EXIT
fail() {
  echo "not ok messenger-rdma: $1"
  tail -n 20 "$WORK"/*.log | sed 's/^/  /'
  exit 1
}
until_true() { # COMMAND...: waits for a condition, for 60 s
  for _ in $(seq 600); do "$@" && return 0; sleep 0.1; done
  return 1
}
serve() { # ADDR FLAGS...
  "$FOREBAY" perf messenger serve --addr "$@" >"$WORK/server.log" 2>&1 &
  SERVER=$!
  until_true grep -q :7000 "$WORK/server.log" || fail "a server at $1"
}
stop() {
  kill "$SERVER" && wait "$SERVER" 2>/dev/null
  SERVER=
}

"$RDMA_CHECK" "$IP" 2>"$WORK/check.log" || fail "both ends in one process"

for mode in --crc --no-crc --secure; do
  serve "rdma:$IP:7000" "$mode"
  grep -q "rdma:$IP:7000" "$WORK/server.log" || fail "the server does not listen over RDMA"
  for size in 0 4096 65536 1000000; do
    RUST_LOG=debug "$FOREBAY" perf messenger run --addr "rdma:$IP:7000" "$mode" --rdma-local "$IP" --size $size --depth 8 \
      --seconds 2 --format json >"$WORK/run.log" 2>"$WORK/client.log" || fail "$mode, $size bytes"
    grep -q 'cannot connect over RDMA' "$WORK/client.log" && fail "the client has fallen back to TCP"
    [[ $(jq .messages "$WORK/run.log") -gt 0 ]] || fail "nothing was exchanged"
    echo "ok messenger-rdma: two processes, $mode, $size bytes, $(jq .messages "$WORK/run.log") answers"
  done
  stop
done

# A peer that is killed is noticed, and its successor is found.
serve "rdma:$IP:7000"
"$FOREBAY" perf messenger run --addr "rdma:$IP:7000" --size 4096 --depth 4 --seconds 3 --lossy >"$WORK/run.log" 2>&1 &
CLIENT=$!
until_true test -e "/proc/$CLIENT/task/$CLIENT/children"
until_true sh -c "grep -q . /proc/$CLIENT/stat && [ \$(awk '{print \$14 + \$15}' /proc/$CLIENT/stat) -gt 50 ]" ||
  fail "a client at work"
kill -9 "$SERVER"; SERVER=
wait "$CLIENT" && fail "a client does not notice that its peer was killed"
echo "ok messenger-rdma: a killed peer is noticed"

# Without RDMA on one side both find each other over TCP, and say so.
serve "tcp:$IP:7000"
"$FOREBAY" perf messenger run --addr "rdma:$IP:7000" --size 4096 --depth 8 --seconds 1 --format json \
  >"$WORK/run.log" 2>"$WORK/client.log" || fail "falling back to TCP"
[[ $(jq .messages "$WORK/run.log") -gt 0 ]] || fail "nothing was exchanged over TCP"
grep -q 'cannot connect over RDMA' "$WORK/client.log" || fail "it is not said that TCP is used"
echo "ok messenger-rdma: falls back to TCP, and says so"
stop
