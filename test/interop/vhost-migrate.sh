# What the scripts share in which a guest migrates from one QEMU to another; sourced after vhost.sh.

# Starts a QEMU, whose disk is at a socket; its monitor is at CONSOLE.qmp.
start_host() { # NUMBER SOCKET [INCOMING]
  CONSOLE=$WORK/console-$1
  # QEMU before 9.0 migrates emulated guests well only if their memory is no multiple of 256 KiB (test/lab/README.md).
  VHOST=$2,num-queues=$QUEUES ROOT_DISK=/dev/vda QMP=$CONSOLE.qmp INCOMING=${3:-} MEM=1048584K TIMEOUT=${GUEST_TIMEOUT:-500} \
    BOOT_LIMIT=240 END_LIMIT=60 start_guest "$CONSOLE" guest-vhost-debian.sh migrate
}
migration() { qmp "$CONSOLE.qmp" query-migrate | jq -r .status; }
is_over() { [[ $(migration) =~ ^(completed|failed|cancelled)$ ]]; }
is_waiting() { [[ $(qmp "$WORK/console-$1.qmp" query-status | jq -r .status) == inmigrate ]]; }
# How many rounds of the load have ended on a host.
rounds() { grep -c '^step round' "$1"; }
has_rounds() { (($(rounds "$1") >= $2)); }
# Waits until the load has gone on for more rounds.
goes_on() { # ROUNDS
  ! grep -q '^not ok' "$CONSOLE" || fail "the guest"
  await 120 "the load goes on" has_rounds "$CONSOLE" $(($(rounds "$CONSOLE") + $1))
}
# Migrates the guest to another QEMU, which has its disk at a socket, under load.
migrate() { # NUMBER SOCKET
  local from=$CONSOLE source_guest=$GUEST to took
  start_host "$1" "$2" "unix:$WORK/incoming-$1"
  await 60 "QEMU waits for the guest" is_waiting "$1"
  to=$CONSOLE CONSOLE=$from
  qmp "$from.qmp" migrate-set-parameters '{"downtime-limit": 1000, "max-bandwidth": 268435456}' >"$WORK/out" || fail "parameters"
  qmp "$from.qmp" migrate "{\"uri\": \"unix:$WORK/incoming-$1\"}" >"$WORK/out" || fail "migrate"
  await 180 "the migration ends" is_over
  [[ $(migration) == completed ]] || { qmp "$from.qmp" query-migrate >"$WORK/out"; fail "the migration"; }
  took=$(qmp "$from.qmp" query-migrate | jq -r '"\(."total-time") ms, down for \(.downtime) ms, \(.ram.transferred / 1048576 | floor) MiB of memory, \(.ram."dirty-sync-count") passes"')
  qmp "$from.qmp" quit >"$WORK/out" || fail "quit"
  wait "$source_guest"
  CONSOLE=$to
  until_guest 120 "$CONSOLE" "step round"
  await 120 "the load goes on" has_rounds "$CONSOLE" 2
  ok "migrated in $took; the load goes on"
}
