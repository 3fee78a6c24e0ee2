#!/usr/bin/env bash
# Disks of a guest that a vhost-user-blk back-end serves: their shape, their commands, a resize, kills of the back-end under
# load.
#
#   FOREBAY=.../forebay guest-vhost.sh       BACKEND=qemu proves the script without a front of ours (vhost.sh)
#
# Runs here, starts a daemon and a guest.  Prints a line for each check.
set -uo pipefail
NAME=vhost
# shellcheck source=test/interop/vhost.sh
source "$(dirname "$0")/vhost.sh"
QUEUES=2
export STORE_SIZE=1G

# Does what the guest asks for.
serve() { # WORDS...
  case $1 in
    resize) resize "$2" "$3" ;;
    kill) crash ;;
    *) fail "the guest asks for: $*" ;;
  esac
}

# Each disk has a queue on each core.
start_backend --cores $QUEUES
create local/split 256M
attach local/split "$WORK/split.sock" $QUEUES
devices="$WORK/split.sock,num-queues=$QUEUES" disks=(vda=split:local/split)
if [[ $BACKEND == forebay ]]; then
  create local/packed 256M
  attach local/packed "$WORK/packed.sock" $QUEUES
  devices+=" $WORK/packed.sock,num-queues=$QUEUES,packed=on"
  disks+=(vdb=packed:local/packed)
fi
mkdir "$WORK/share"
VHOST=$devices SHARE=$WORK/share MEM=1G TIMEOUT=240 start_guest "$WORK/console" guest-vhost-inside.sh \
  "$BACKEND" $QUEUES "${disks[@]}"
serve_guest

for disk in "${disks[@]}"; do
  image=${disk#*:}
  rm -f "$WORK/exported"
  export_image "$image" "$WORK/exported"
  [[ $(stat -c %s "$WORK/exported") == $((320 << 20)) ]] || fail "the size of $image"
  ask e2fsck -f -n "$WORK/exported"
done
stop_backend
ok "the images have clean file systems"
