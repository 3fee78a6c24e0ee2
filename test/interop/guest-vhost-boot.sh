#!/usr/bin/env bash
# Debian booted from an image that a vhost-user-blk back-end serves: written to, grown, trimmed and switched off; then the
# image is looked at.
#
#   FOREBAY=.../forebay guest-vhost-boot.sh      POOL=local|rados, BACKEND=qemu: as vhost.sh has it
#
# Runs here, starts a daemon and a guest.  Prints a line for each check.
set -uo pipefail
NAME=vhost-boot
# shellcheck source=test/interop/vhost.sh
source "$(dirname "$0")/vhost.sh"
QUEUES=2 SOCKET=$WORK/debian.sock IMAGE=$(image debian)
[[ $POOL == rados ]] || export STORE_SIZE=3G

root=$("$LAB/debian-image") || fail "no image of Debian"
start_backend
import "$root" "$IMAGE"
attach "$IMAGE" "$SOCKET" $QUEUES
measure "$IMAGE"; before=$USED
ok "Debian imported into $IMAGE: $((before >> 20)) MiB"
VHOST=$SOCKET,num-queues=$QUEUES ROOT_DISK=/dev/vda MEM=1G TIMEOUT=400 BOOT_LIMIT=240 END_LIMIT=60 \
  start_guest "$WORK/console" guest-vhost-debian.sh boot
until_guest 300 "$WORK/console" "step filled"
measure "$IMAGE"; filled=$USED
((filled >= before + (180 << 20))) || fail "$((before >> 20)) MiB are used before, $((filled >> 20)) MiB with 192 MiB written"
resize "$IMAGE" 1536M
await_guest
measure "$IMAGE"; after=$USED
((after < filled - (150 << 20))) || fail "$((filled >> 20)) MiB are used before fstrim, $((after >> 20)) MiB after it"
ok "used: $((before >> 20)) MiB, filled $((filled >> 20)) MiB, trimmed $((after >> 20)) MiB"
look_at_left "$IMAGE" 1536
stop_backend
