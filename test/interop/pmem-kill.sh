#!/usr/bin/env bash
# A write log in real (emulated) persistent memory, under power failures: the guest's QEMU is killed under load, booted
# again on the same memory, and everything that was promised must be there.
#
#   pmem-kill.sh [ROUNDS]      FOREBAY: the program (default target/release/forebay)
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
source "$root/test/lab/limits.sh"
rounds=${1:-10}
FOREBAY=$(realpath "${FOREBAY:-$root/target/release/forebay}")
work=$(mktemp -d)
guest=
stop() { # kills the guest's QEMU, and nothing else
  [[ -n $guest ]] || return 0
  local timeout_pid
  for timeout_pid in $(ps -o pid= --ppid "$guest" 2>/dev/null); do
    for qemu in $(ps -o pid= --ppid "$timeout_pid" 2>/dev/null); do kill -9 "$qemu" 2>/dev/null || true; done
    kill -9 "$timeout_pid" 2>/dev/null || true
  done
  wait "$guest" 2>/dev/null || true
  guest=
}
trap 'stop; rm -rf "$work"' EXIT
mkdir "$work/share"
: >"$work/share/promised"
for ((round = 1; round <= rounds + 1; round++)); do
  log=$work/console-$round
  FSDAX=1 PMEM=$work/pmem.img PMEM_SIZE=256 SHARE=$work/share TIMEOUT=200 \
    "$root/test/lab/guest" "$root/test/interop/guest-pmem.sh" "$FOREBAY" "$round" >"$log" 2>&1 &
  guest=$!
  # Until it was verified, and a good deal of new writes was promised.
  want=$((100 + RANDOM % 400))
  quiet_now; end=$((NOW + 180))
  while true; do
    # The console may end lines with a carriage return.
    have=$(tr -d '\r' <"$log" | grep -c '^promised ' || true)
    ((have >= want)) && break
    if grep -q 'not ok' "$log" || ! kill -0 "$guest" 2>/dev/null || ((NOW > end)); then
      tail -n 40 "$log"
      echo "not ok pmem: round $round"
      exit 1
    fi
    sleep 0.1
    quiet_now
  done
  stop
  tr -d '\r' <"$log" | grep '^promised [0-9]* [0-9]*$' | sed '$d' >>"$work/share/promised"
  grep -h 'ok guest' "$log" | tr -d '\r'
done
echo "ok pmem: $rounds power failures, $(wc -l <"$work/share/promised") writes promised, all of them there"
