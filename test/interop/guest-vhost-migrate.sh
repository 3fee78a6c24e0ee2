#!/usr/bin/env bash
# Debian migrates under a verified load from one QEMU to another, both of which have its disk from one vhost-user-blk
# back-end.
#
#   FOREBAY=.../forebay guest-vhost-migrate.sh      POOL=local|rados, BACKEND=qemu: as vhost.sh has it; ROUNDS=1: times
#
# Runs here, starts a daemon and the guests.  Prints a line for each check.
set -uo pipefail
NAME=vhost-migrate
# shellcheck source=test/interop/vhost.sh
source "$(dirname "$0")/vhost.sh"
QUEUES=2 IMAGE=$(image debian) ROUNDS=${ROUNDS:-1}
[[ $POOL == rados ]] || export STORE_SIZE=3G

# Starts a QEMU; its monitor is at CONSOLE.qmp.
start_host() { # NUMBER [INCOMING]
  local socket=$WORK/debian.sock
  # A storage daemon serves one QEMU at a time: each has one of its own, on the same file.
  if [[ $BACKEND == qemu ]]; then
    socket=$WORK/debian-$1.sock
    attach "$IMAGE" "$socket" $QUEUES
  fi
  CONSOLE=$WORK/console-$1
  # QEMU before 9.0 migrates emulated guests well only if their memory is no multiple of 256 KiB (test/lab/README.md).
  VHOST=$socket,num-queues=$QUEUES ROOT_DISK=/dev/vda QMP=$CONSOLE.qmp INCOMING=${2:-} MEM=1048584K TIMEOUT=500 BOOT_LIMIT=240 \
    END_LIMIT=60 start_guest "$CONSOLE" guest-vhost-debian.sh migrate
}
migration() { qmp "$CONSOLE.qmp" query-migrate | jq -r .status; }
is_over() { [[ $(migration) =~ ^(completed|failed|cancelled)$ ]]; }
is_waiting() { [[ $(qmp "$WORK/console-$1.qmp" query-status | jq -r .status) == inmigrate ]]; }
# How many rounds of the load have ended on a host.
rounds() { grep -c '^step round' "$1"; }
has_rounds() { (($(rounds "$1") >= $2)); }

root=$("$LAB/debian-image") || fail "no image of Debian"
start_backend
import "$root" "$IMAGE"
[[ $BACKEND == qemu ]] || attach "$IMAGE" "$WORK/debian.sock" $QUEUES
start_host 0
until_guest 300 "$CONSOLE" "step round 2"
for ((round = 1; round <= ROUNDS; round++)); do
  from=$CONSOLE source_guest=$GUEST
  start_host "$round" "unix:$WORK/incoming-$round"
  await 60 "QEMU waits for the guest" is_waiting "$round"
  to=$CONSOLE CONSOLE=$from
  qmp "$from.qmp" migrate-set-parameters '{"downtime-limit": 1000, "max-bandwidth": 268435456}' >"$WORK/out" || fail "parameters"
  qmp "$from.qmp" migrate "{\"uri\": \"unix:$WORK/incoming-$round\"}" >"$WORK/out" || fail "migrate"
  await 180 "the migration ends" is_over
  [[ $(migration) == completed ]] || { qmp "$from.qmp" query-migrate >"$WORK/out"; fail "the migration"; }
  took=$(qmp "$from.qmp" query-migrate | jq -r '"\(."total-time") ms, down for \(.downtime) ms, \(.ram.transferred / 1048576 | floor) MiB of memory, \(.ram."dirty-sync-count") passes"')
  qmp "$from.qmp" quit >"$WORK/out" || fail "quit"
  wait "$source_guest"
  CONSOLE=$to
  until_guest 120 "$CONSOLE" "step round"
  await 120 "the load goes on" has_rounds "$CONSOLE" 2
  ok "migrated in $took; the load goes on"
done
resize "$IMAGE" 1280M
await_guest
look_at_left "$IMAGE" 1280
stop_backend
