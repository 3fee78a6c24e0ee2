#!/usr/bin/env bash
# Encrypted images on the embedded store: nothing that a client wrote is on the device; the master key comes from a file, a
# command or the environment; it is rotated under load; a wrong one is refused; a key is destroyed with its image.
#
#   FOREBAY=PROGRAM store-encryption.sh
#
# Prints a line for each check, and ends with 1 at the first that fails.
set -uo pipefail
source "$(dirname "$0")/../lab/limits.sh"

WORK=$(mktemp -d "${TMPDIR:-/tmp}/store-encryption.XXXXXX")
DATA=$WORK/data
SOCKET=$WORK/nbd.sock
DAEMON=
PATIENCE=60
MARKER="nobody may read this"
cd "$WORK" || exit 1

cleanup() {
  [[ -z $DAEMON ]] || { kill -9 "$DAEMON" 2>/dev/null; wait "$DAEMON" 2>/dev/null; }
  rm -rf "$WORK"
}
trap cleanup EXIT
ok() { echo "ok store-encryption: $*"; }
fail() {
  echo "not ok store-encryption: $*"
  [[ ! -s $WORK/out ]] || tail -20 "$WORK/out"
  [[ ! -s $WORK/log ]] || tail -20 "$WORK/log"
  exit 1
}
forebay() { limit 100 "$FOREBAY" --data "$DATA" "$@" >"$WORK/out" 2>&1 </dev/null; }
start() { # OPTION...
  "$FOREBAY" --data "$DATA" serve --nbd "unix:$SOCKET" --store-cache 0 "$@" >>"$WORK/log" 2>&1 </dev/null &
  DAEMON=$!
  local end=$((SECONDS + PATIENCE))
  until forebay status; do
    kill -0 "$DAEMON" 2>/dev/null || fail "the daemon has ended"
    ((SECONDS < end)) || fail "the daemon does not serve within $PATIENCE s"
    sleep 0.1
  done
}
stop() { kill -INT "$DAEMON"; wait "$DAEMON" || fail "the daemon ended with $?"; DAEMON=; }
crash() { kill -9 "$DAEMON"; wait "$DAEMON" 2>/dev/null; DAEMON=; }
refused() { # TEXT OPTION...
  local text=$1
  shift
  limit 60 "$FOREBAY" --data "$DATA" serve --nbd "unix:$SOCKET" "$@" >"$WORK/out" 2>&1 </dev/null && fail "opened: $*"
  grep -q "$text" "$WORK/out" || fail "the refusal does not say '$text'"
}
marker_on_device() { grep -q -a -F "$MARKER" "$DATA/store.img"; }
key_of() { "$FOREBAY" --data "$DATA" store key status --format json | jq -r "$1"; }
uri() { echo "nbd+unix:///local%2F$1?socket=$SOCKET"; }

forebay store key generate old.key && forebay store key generate new.key || fail "store key generate"
[[ $(stat -c %a old.key) == 600 ]] || fail "others can read the key"
forebay store key generate old.key && fail "a key was overwritten"
forebay store init --size 400M || fail "store init"
start
forebay create local/secret --size 64M --encrypt && fail "encrypted without a master key"
grep -q -- --master-key "$WORK/out" || fail "the error does not name --master-key"
forebay create local/secret --size 64M --encrypt; forebay info local/secret && fail "an image is left of a failed creation"
ok "without a master key no image is encrypted"
stop

start --master-key "file:$WORK/old.key"
for image in secret squeezed; do
  forebay create "local/$image" --size 64M --encrypt || fail "create $image"
  forebay attach "local/$image" --nbd || fail "attach $image"
done
forebay config image set local/squeezed forebay_compression lz4 || fail "compression"
forebay info local/secret --format json && jq -e .encrypted "$WORK/out" >/dev/null || fail "info does not say that it is encrypted"
for image in secret squeezed; do
  limit 200 fio --name="$image" --ioengine=nbd --uri="$(uri $image)" --size=64M --rw=randwrite --bs=4k --iodepth=16 \
    --io_size=96M --buffer_pattern="\"$MARKER\"" --verify=0 >"$WORK/out" 2>&1 || fail "fio writes $image"
  qemu-io -f raw -c "write -P 0x5a 1M 1M" -c "read -P 0x5a 1M 1M" "$(uri $image)" >"$WORK/out" 2>&1 || fail "qemu-io"
  grep -q "verification failed" "$WORK/out" && fail "$image reads back something else"
done
forebay export local/secret secret.raw --force || fail "export"
grep -q -a -F "$MARKER" secret.raw || fail "the client's data is not what was written"
forebay snap create local/secret@s && forebay clone local/secret@s local/child && forebay cp local/secret local/copy || fail "clone and copy"
for image in child copy; do
  forebay info "local/$image" --format json && jq -e .encrypted "$WORK/out" >/dev/null || fail "$image is not encrypted"
done
[[ $(key_of .images) == 4 ]] || fail "four images have keys"
marker_on_device && fail "what a client wrote is on the device"
ok "nothing that was written is on the device: images, compressed ones, clones and copies"

limit 200 fio --name=load --ioengine=nbd --uri="$(uri squeezed)" --size=64M --rw=randrw --bs=4k --iodepth=8 --verify=crc32c \
  --io_size=48M --verify_fatal=1 --verify_backlog=256 >fio.out 2>&1 &
LOAD=$!
before=$(key_of .master_key)
for key in new old new; do
  forebay store key rotate "file:$key.key" || fail "rotate"
done
wait $LOAD || { cp fio.out out; fail "fio during the rotation"; }
[[ $(key_of .master_key) != "$before" ]] || fail "the master key is the same"
crash
refused "wrong master key" --master-key "file:$WORK/old.key"
refused "no master key was given"
start --master-key "command:cat $WORK/new.key"
forebay export local/secret again.raw --force && cmp secret.raw again.raw || fail "the image reads back something else"
stop
KEY=$(cat new.key) start --master-key env:KEY
forebay export local/copy again.raw --force && cmp secret.raw again.raw || fail "the copy reads back something else"
ok "the master key is rotated under load; the old one is refused; file, command and environment have it"

# A write log keeps what was acknowledged, encrypted as well: also while nothing is written back.
forebay create local/logged --size 32M --encrypt || fail "create logged"
limit 60 "$FOREBAY" --data "$DATA" attach local/logged --nbd --log "ssd:$WORK/log.img:64M" >"$WORK/out" 2>&1 </dev/null || fail "attach with a log"
limit 100 fio --name=logged --ioengine=nbd --uri="$(uri logged)" --size=16M --rw=write --bs=64k --iodepth=4 \
  --buffer_pattern="\"$MARKER\"" >"$WORK/out" 2>&1 || fail "fio writes through the log"
crash
grep -q -a -F "$MARKER" "$WORK/log.img" && fail "what a client wrote is in the write log"
marker_on_device && fail "what was written back is on the device"
KEY=$(cat new.key) start --master-key env:KEY
forebay export local/logged logged.raw --force || fail "export logged"
[[ $(grep -c -a -F "$MARKER" logged.raw) -gt 0 ]] || fail "the log was not replayed"
limit 100 fio --name=logged --ioengine=nbd --uri="$(uri logged)" --size=16M --rw=read --bs=64k --verify=pattern \
  --verify_pattern="\"$MARKER\"" >"$WORK/out" 2>&1 || fail "the logged image reads back something else"
"$FOREBAY" --data "$DATA" detach local/logged >"$WORK/out" 2>&1 || fail "detach"
forebay log flush local/logged; forebay log discard local/logged --force; forebay rm local/logged || fail "rm logged"
ok "the write log of an encrypted image is encrypted, and replayed after a kill"

forebay rm local/copy && [[ $(key_of .images) == 3 ]] || fail "the key is not destroyed with its image"
stop
start --without-master-key
[[ $(key_of .locked) == true ]] || fail "not locked"
forebay export local/secret again.raw --force && fail "read without the master key"
forebay create local/open --size 16M && forebay import secret.raw local/plain || fail "other images do not work"
stop
forebay store check || fail "store check finds something"
marker_on_device || fail "the search for what was written does not work"
ok "without the master key only encrypted images are locked"
