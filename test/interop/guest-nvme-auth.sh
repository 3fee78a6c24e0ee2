#!/usr/bin/env bash
# Runs inside the guest (test/lab/guest, KERNEL=backports): the kernel's initiator authenticates with DH-HMAC-CHAP.
#
#   guest-nvme-auth.sh PORT NQN KEYS    prints a line `ok ...` for each thing that holds; ends at the first that does not
#
# The daemon knows three hosts: one by a secret, one that wants to be shown the daemon's own as well, and one for which it
# takes nothing but SHA-512 and ffdhe4096.  KEYS is a folder with their names and secrets.
set -euo pipefail
PORT=$1 NQN=$2 KEYS=$3 HOST=10.0.2.2

source "$(dirname "$0")/guest.sh"
live() { [[ $(grep -l '^live$' /sys/class/nvme/nvme*/state 2>/dev/null | wc -l) == "$1" ]]; }
connect() { # HOST MORE...
  local who=$1; shift
  nvme connect -t tcp -a $HOST -s "$PORT" -n "$NQN" -q "$(<"$KEYS/$who.nqn")" --nr-io-queues=2 --ctrl-loss-tmo=2 \
    --reconnect-delay=1 "$@" >/run/connect 2>&1
}
disk() { basename "$(ls -d /sys/class/nvme-subsystem/nvme-subsys*/nvme*n* | grep -E 'nvme[0-9]+n[0-9]+$' | head -n 1)"; }

modprobe nvme-tcp
dmesg -C
connect one && fail "a host without its secret gets in"
live 0 || fail "a controller of a host without its secret"
connect one --dhchap-secret="$(<"$KEYS/wrong.key")" && fail "a host with another secret gets in"
ok "who does not know the secret stays out"
connect one --dhchap-secret="$(<"$KEYS/one.key")" || { cat /run/connect; fail "connect with a secret"; }
await "a controller" live 1
dmesg | grep -q "authenticated with hash" || fail "the kernel did not authenticate"
ok "$(dmesg | sed -n 's/.*qid 0: \(authenticated with.*\)/\1/p' | head -n 1)"
DISK=$(disk)
await "a disk" test -b "/dev/$DISK"
fio --name=plain --filename="/dev/$DISK" --rw=randwrite --bsrange=512-64k --direct=1 --ioengine=libaio --iodepth=16 \
  --size=16M --io_size=16M --verify=crc32c --verify_fatal=1 --eta=never --output=/run/fio || { cat /run/fio; fail "fio"; }
ok "fio verifies what it wrote over authenticated queues"
CTRL=$(basename "$(ls -d /sys/class/nvme/nvme* | head -n 1)")
authentications() { [[ $(dmesg | grep -c "qid 0: authenticated with hash") -ge $1 ]]; }
dmesg -C
# A secret that is set makes the kernel authenticate again, even if it is the same.
cat "$KEYS/one.key" >"/sys/class/nvme/$CTRL/dhchap_secret" || fail "set the same secret"
await "it has authenticated again" authentications 1
live 1 || fail "a controller that has authenticated again"
cat "$KEYS/wrong.key" >"/sys/class/nvme/$CTRL/dhchap_secret" || fail "set another secret"
await "the controller of a host with another secret ends" live 0
nvme disconnect-all
ok "authenticates again while it is connected"

connect two --dhchap-secret="$(<"$KEYS/two.key")" --dhchap-ctrl-secret="$(<"$KEYS/wrong.key")" &&
  fail "a host connects to a daemon that does not know its secret"
dmesg -C
connect two --dhchap-secret="$(<"$KEYS/two.key")" --dhchap-ctrl-secret="$(<"$KEYS/controller.key")" ||
  { cat /run/connect; fail "connect with both secrets"; }
await "a controller" live 1
dmesg | grep -q "controller authenticated" || fail "the daemon has not authenticated"
nvme disconnect-all; await "it is disconnected" live 0
ok "both show each other who they are"
dmesg -C
connect three --dhchap-secret="$(<"$KEYS/three.key")" || { cat /run/connect; fail "connect with another hash and group"; }
await "a controller" live 1
dmesg | grep -q "hmac(sha512) dhgroup ffdhe4096" || fail "another hash or group"
nvme disconnect-all; await "it is disconnected" live 0
ok "SHA-512 and ffdhe4096"
