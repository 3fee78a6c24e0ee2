#!/usr/bin/env bash
# Runs inside the guest (test/lab/guest, KERNEL=backports TLS=1): the kernel's initiator through TLS, with tlshd.
#
#   guest-nvme-tls.sh PORT PLAIN NQN KEYS    prints a line `ok ...` for each thing that holds; ends at the first that does not
#
# At PORT the daemon wants TLS, at PLAIN it does not.  It knows two hosts with keys.  KEYS is a folder with their names and
# keys, and another key.
set -euo pipefail
PORT=$1 PLAIN=$2 NQN=$3 KEYS=$4 HOST=10.0.2.2

LOGS=/run/tlshd.log
source "$(dirname "$0")/guest.sh"
live() { [[ $(grep -l '^live$' /sys/class/nvme/nvme*/state 2>/dev/null | wc -l) == "$1" ]]; }
insert() { # HOST KEY VERSION
  nvme check-tls-key --hostnqn="$(<"$KEYS/$1.nqn")" --subsysnqn="$NQN" --keydata="$(<"$KEYS/$2.tls")" --identity="$3" \
    --insert >/run/insert 2>&1 || { cat /run/insert; fail "insert a key"; }
}
connect() { # HOST PORT MORE...
  local who=$1 port=$2; shift 2
  nvme connect -t tcp -a $HOST -s "$port" -n "$NQN" -q "$(<"$KEYS/$who.nqn")" --nr-io-queues=2 --reconnect-delay=1 "$@" \
    >/run/connect 2>&1
}
disk() { basename "$(ls -d /sys/class/nvme-subsystem/nvme-subsys*/nvme*n* | grep -E 'nvme[0-9]+n[0-9]+$' | head -n 1)"; }
verify() { # NAME
  fio --name="$1" --filename="/dev/$DISK" --rw=randwrite --bsrange=512-64k --direct=1 --ioengine=libaio --iodepth=16 \
    --size=16M --io_size=8M --verify=crc32c --verify_fatal=1 --eta=never --output=/run/fio || { cat /run/fio; fail "fio $1"; }
}

printf '[debug]\nloglevel=1\ntls=1\nnl=1\n[authenticate]\nkeyrings=.nvme\n' >/run/tlshd.conf
modprobe nvme-tcp
tlshd -s -c /run/tlshd.conf >/run/tlshd.log 2>&1 &
dmesg -C

connect one "$PLAIN" && fail "a host with a key gets in without TLS"
connect one "$PORT" --ctrl-loss-tmo=2 && fail "without TLS where it is wanted"
live 0 || fail "a controller without TLS"
ok "without TLS nobody gets in who has a key, nor anybody where it is wanted"

for version in 0 1; do
  for who in one two; do
    insert "$who" "$who" "$version"
    connect "$who" "$PORT" --tls || { cat /run/connect; fail "connect $who with version $version"; }
    await "a controller" live 1
    DISK=$(disk)
    await "a disk" test -b "/dev/$DISK"
    [[ $(grep "Using psk identity" /run/tlshd.log | tail -n 1) == *"NVMe${version}R01 "* ]] || fail "another identity"
    verify "$who$version"
    nvme disconnect-all
    await "it is disconnected" live 0
    ok "host $who, identity of version $version: $(grep -o 'TLS1.3.*' /run/tlshd.log | tail -n 1 || true)"
  done
done

insert one one 1
connect one "$PORT" --tls --hdr-digest --data-digest || { cat /run/connect; fail "connect with digests"; }
await "a controller" live 1
DISK=$(disk)
await "a disk" test -b "/dev/$DISK"
verify digests
ok "fio verifies what it wrote, with digests within TLS"
without_sigpipe fio --name=restart --filename="/dev/$DISK" --rw=randwrite --bs=4k --direct=1 --ioengine=libaio --iodepth=8 \
  --size=16M --serialize_overlap=1 --time_based --runtime=12 --verify=crc32c --verify_backlog=256 --verify_fatal=1 \
  --eta=never --output=/run/fio &
LOAD=$!
written() { [[ $(awk '{print $7}' "/sys/block/$DISK/stat") -gt $1 ]]; }
await "writes are under way" written $(($(awk '{print $7}' "/sys/block/$DISK/stat") + 4096))
host restart
wait $LOAD || { cat /run/fio; fail "fio over a restart of the daemon"; }
live 1 || fail "it is not connected again"
ok "reconnects after the daemon was restarted under load"
nvme disconnect-all
await "it is disconnected" live 0
insert one wrong 0
SERIAL=$((0x$(awk '/NVMe0R01 .*:one / {print $1; exit}' /proc/keys)))
connect one "$PORT" --tls --ctrl-loss-tmo=2 --tls_key=$SERIAL && fail "a host with another key gets in"
live 0 || fail "a controller with another key"
[[ $(grep "Using psk identity" /run/tlshd.log | tail -n 1) == *NVMe0R01*:one\ * ]] || fail "the other key was not tried"
ok "who has another key stays out"
