#!/usr/bin/env bash
# Runs inside the guest (test/lab/guest): one namespace that two daemons serve, an image of a Ceph cluster; the paths are
# moved from one to the other, and one of them is killed, under load.
#
#   guest-nvme-two.sh PORT PORT NQN      prints a line `ok ...` for each thing that holds; ends at the first that does not
#
# What has to happen on the host is asked for through files in /share, with `first` or `second` before what a daemon is to
# do: see xtask/src/guest/nvme.rs.
set -euo pipefail
FIRST=$1 SECOND=$2 NQN=$3 HOST=10.0.2.2

PATIENCE=60
source "$(dirname "$0")/guest.sh"
device() {
  local found
  for found in /sys/class/nvme-subsystem/nvme-subsys*/nvme*n*; do
    [[ -e $found/nsid && $(basename "$found") =~ ^nvme[0-9]+n[0-9]+$ ]] && { basename "$found"; return; }
  done
  return 1
}
live() { [[ $(grep -l "^live$" /sys/class/nvme/nvme*/state 2>/dev/null | wc -l) == "$1" ]]; }
have_states() { [[ $(cat /sys/class/nvme/nvme*/nvme*c*n*/ana_state | sort | xargs) == "$1" ]]; }
# What was written before is read and found whole, while other blocks are written.
verify() { # NAME MORE...
  local name=$1; shift
  without_sigpipe fio --name="$name" --filename="/dev/$DISK" --rw=randwrite --bsrange=4k-64k --direct=1 --ioengine=libaio \
    --iodepth=8 --serialize_overlap=1 --eta=never --verify=crc32c --verify_fatal=1 --randseed=7 --size=24M \
    --output="/run/$name.fio" "$@"
}
# Requests that a path has carried: the kernel counts them by path, and not for the whole.
carried() { cat /sys/class/nvme/nvme"$1"/nvme*c*n*/stat | awk '{print $1 + $5}'; }
# Requests take a path that did not when this was called: 0 to the first daemon, 1 to the second.
goes_on() { # PATH WHAT
  local path=$1 before; before=$(carried "$path")
  grown() { (($(carried "$path") > before)); }
  await "$2" grown
}

modprobe nvme-tcp
for port in "$FIRST" "$SECOND"; do
  nvme connect -t tcp -a $HOST -s "$port" -n "$NQN" --ctrl-loss-tmo=240 --reconnect-delay=1 --keep-alive-tmo=5 || fail "connect"
done
await "two paths" live 2
await "the namespace" device
DISK=$(device)
await "its size" test -s "/sys/block/$DISK/size"
[[ $(ls -d /sys/class/nvme-subsystem/nvme-subsys*/nvme*n[0-9] | grep -cE 'nvme[0-9]+n[0-9]+$') == 1 ]] || fail "one namespace, not two"
await "one path is optimized, the other inaccessible" have_states "inaccessible optimized"
ok "two daemons are one subsystem, and one of them has the namespace"

verify moved --io_size=48M --rate=2M >/dev/null 2>&1 & load=$!
goes_on 0 "writes reach the first daemon"
host first forebay ana set inaccessible >/dev/null
await "no path" have_states "inaccessible inaccessible"
host second forebay ana set optimized >/dev/null
await "the other has it" have_states "inaccessible optimized"
goes_on 1 "writes reach the second daemon"
host second forebay ana set inaccessible >/dev/null
host first forebay ana set optimized >/dev/null
goes_on 0 "writes reach the first daemon again"
wait $load || { cat /run/moved.fio; fail "fio over a hand-over there and back"; }
ok "fio goes on while the namespace moves from daemon to daemon and back, and verifies"

verify killed --io_size=64M --rate=2M >/dev/null 2>&1 & load=$!
goes_on 0 "writes reach the first daemon"
host first kill
host second forebay ana set optimized >/dev/null
before=$(date +%s)
goes_on 1 "writes reach the second daemon when the first has been killed"
ok "$(($(date +%s) - before)) s after a kill -9 the second daemon writes"
wait $load || { cat /run/killed.fio; fail "fio over a kill -9 of the daemon that had the namespace"; }
ok "fio goes on over a kill -9 of the daemon that had the namespace, and verifies"

host second forebay ana set inaccessible >/dev/null
host second restart
await "the second daemon is back" live 1
host second forebay ana ls >/run/ana
grep -q inaccessible /run/ana || { cat /run/ana; fail "the state is lost with a restart"; }
ok "a state is kept over a restart"
host second forebay ana set optimized >/dev/null
goes=$(dd if="/dev/$DISK" of=/dev/null bs=1M count=8 iflag=direct 2>&1) || fail "reading: $goes"
nvme disconnect-all
