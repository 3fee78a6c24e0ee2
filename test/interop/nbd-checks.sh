# shellcheck shell=bash
# Checks of what real NBD clients do, a line each; nbd.sh and nbd-tls.sh source it.
#
# They set WORK, a folder that goes at the end; LABEL, how lines begin; DAEMON, the daemon's process while one runs; and
# PATIENCE, the seconds that a client may take.

finish() {
  local status=$?
  if [[ -n $DAEMON ]]; then
    kill -TERM "$DAEMON" 2>/dev/null
    wait "$DAEMON" 2>/dev/null
  fi
  rm -rf "$WORK"
  exit $status
}
trap finish EXIT

fail() { # WHAT
  echo "not ok $LABEL: $1"
  [[ -s $WORK/out ]] && tail -n 30 "$WORK/out" | sed 's/^/  /'
  [[ -s $WORK/daemon.log ]] && tail -n 20 "$WORK/daemon.log" | sed 's/^/  daemon: /'
  exit 1
}
ok() { echo "ok $LABEL: $1"; }
check() { # WHAT COMMAND...
  local what=$1
  shift
  limit "$PATIENCE" "$@" >"$WORK/out" 2>&1 </dev/null || fail "$what ($*, status $?)"
  ok "$what"
}
refused() { # WHAT COMMAND...: the command must fail, and by itself
  local what=$1 status
  shift
  limit "$PATIENCE" "$@" >"$WORK/out" 2>&1 </dev/null
  status=$?
  ((status > 0 && status < 124)) || fail "$what ($* ended with $status)"
  ok "$what"
}
says() { # WHAT PATTERN: in what the last command said
  grep -Eq -- "$2" "$WORK/out" || fail "$1 (no '$2' in what it said)"
  ok "$1"
}
