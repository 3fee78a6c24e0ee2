# Limits in time for test scripts; to be sourced.  A slow machine must fail no test (docs/design/test-runs.md):
#
#   limit SECONDS COMMAND...   ends a command that hangs; judges no time, so that within `cargo xtask test` it waits
#                              HANG_FACTOR times longer
#   quiet_now                  sets NOW to the seconds of a clock that goes more slowly while the machine is slow; to be
#                              compared with what it was before.  Without `cargo xtask test`, seconds as they pass.
#   slowdown                   sets SLOWDOWN to how many times longer everything has taken than on a quiet machine since this
#                              file was sourced, rounded: for loads whose length is a time, during which things must happen
limit() {
  local seconds=$1
  shift
  timeout -k 5 $((seconds * ${HANG_FACTOR:-1})) "$@"
}
quiet_now() {
  local milliseconds
  if [[ -n ${FOREBAY_QUIET_CLOCK:-} ]] && read -r milliseconds <"$FOREBAY_QUIET_CLOCK"; then
    NOW=$((10#$milliseconds / 1000))
  else
    NOW=$SECONDS
  fi
}
slowdown() {
  local NOW quiet wall
  quiet_now
  quiet=$((NOW - LIMITS_QUIET > 0 ? NOW - LIMITS_QUIET : 1)) wall=$((SECONDS - LIMITS_WALL))
  SLOWDOWN=$(((wall + quiet / 2) / quiet))
  ((SLOWDOWN > 0)) || SLOWDOWN=1
}
quiet_now
LIMITS_QUIET=$NOW LIMITS_WALL=$SECONDS
