#!/usr/bin/env bash
# Disks of a guest at a vhost-user-scsi controller: their shape, their commands, disks that come and go, a resize, and a
# reservation that keeps another guest's controller out.
#
#   FOREBAY=.../forebay guest-vhost-scsi.sh
#
# Runs here, starts a daemon and a guest.  Prints a line for each check.
set -uo pipefail
NAME=vhost-scsi
# shellcheck source=test/interop/vhost.sh
source "$(dirname "$0")/vhost.sh"
export STORE_SIZE=1G
SOCKET=$WORK/scsi.sock

# Does what the guest asks for.
serve() { # WORDS...
  case $1 in
    resize) resize "$2" "$3" ;;
    plug) ask "$FOREBAY" attach "$2" --vhost "$SOCKET" --scsi ;;
    unplug) ask "$FOREBAY" detach "$2" --force ;;
    *) fail "the guest asks for: $*" ;;
  esac
}

start_backend
for image in local/first local/second local/third; do create $image 256M; done
ask "$FOREBAY" attach local/first local/second --vhost "$SOCKET" --scsi --queues 2
[[ $(<"$WORK/out") == *"scsi.sock?lun=0"*"scsi.sock?lun=1"* ]] || fail "the units are $(<"$WORK/out")"
mkdir "$WORK/share"
VHOST="scsi:$SOCKET,num_queues=2" SHARE=$WORK/share MEM=1G TIMEOUT=240 start_guest "$WORK/console" guest-vhost-scsi-inside.sh
serve_guest

ask "$FOREBAY" reservations ls local/second --format json
[[ $(<"$WORK/out") == *naa:3* ]] || fail "the guest's reservation has not lasted: $(<"$WORK/out")"
for image in local/first:320 local/second:256; do
  rm -f "$WORK/exported"
  export_image "${image%:*}" "$WORK/exported"
  [[ $(stat -c %s "$WORK/exported") == $((${image#*:} << 20)) ]] || fail "the size of $image"
  ask e2fsck -f -n "$WORK/exported"
done
stop_backend
ok "the images have clean file systems, and the reservation has outlived the guest"
