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
# shellcheck source=test/interop/vhost-migrate.sh
source "$(dirname "$0")/vhost-migrate.sh"
QUEUES=2 IMAGE=$(image debian) ROUNDS=${ROUNDS:-1}
[[ $POOL == rados ]] || export STORE_SIZE=3G

# Prints the socket of a QEMU.  A storage daemon serves one QEMU at a time: each has one of its own, on the same file.
socket_of() { # NUMBER
  if [[ $BACKEND == qemu ]]; then echo "$WORK/debian-$1.sock"; else echo "$WORK/debian.sock"; fi
}

root=$("$LAB/debian-image") || fail "no image of Debian"
start_backend
import "$root" "$IMAGE"
attach "$IMAGE" "$(socket_of 0)" $QUEUES
start_host 0 "$(socket_of 0)"
until_guest 300 "$CONSOLE" "step round 2"
for ((round = 1; round <= ROUNDS; round++)); do
  [[ $BACKEND == forebay ]] || attach "$IMAGE" "$(socket_of "$round")" $QUEUES
  migrate "$round" "$(socket_of "$round")"
done
resize "$IMAGE" 1280M
await_guest
look_at_left "$IMAGE" 1280
stop_backend
