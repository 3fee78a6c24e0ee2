# What the scripts that run inside the guest share: sourced, not run.

ok() { echo "ok guest: $*"; }
# Ends the script; shows the logs named in LOGS, if any, and what the kernel said.
fail() {
  local log
  echo "not ok guest: $*"
  for log in ${LOGS:-}; do tail -n 20 "$log" 2>/dev/null; done
  dmesg | tail -n 30
  exit 1
}
# Has the host do something, which is asked for through files in /share (xtask/src/guest/mod.rs); prints what it says, and
# fails if the host does.
try_host() {
  rm -f /share/answer
  printf '%s\n' "$@" >/share/ask.new && mv /share/ask.new /share/ask
  for _ in {1..1200}; do
    if [[ -e /share/answer ]]; then
      local status; status=$(head -n 1 /share/answer); tail -n +2 /share/answer
      return "$status"
    fi
    sleep 0.05
  done
  fail "the host does not answer: $*"
}
# Has the host do something, which must succeed.
host() { try_host "$@" || fail "host $*"; }
# Runs a command that ignores SIGPIPE.  The NVMe/TCP initiator of Linux 6.1 sends commands from the process that submits
# them, without MSG_NOSIGNAL: a connection that is reset kills that process, although another path takes the command.
without_sigpipe() { (trap '' PIPE; exec "$@"); }
# Waits until a condition holds: for PATIENCE seconds, and twice as long if its command is slow, but for 100 attempts.
await() { # WHAT COMMAND...
  local what=$1 turn late=$((SECONDS + 2 * ${PATIENCE:-30})); shift
  for ((turn = 0; turn < ${PATIENCE:-30} * 20 && (turn < 100 || SECONDS < late); turn++)); do
    "$@" >/dev/null 2>&1 && return
    sleep 0.05
  done
  fail "waited in vain: $what"
}
