#!/usr/bin/env bash
# Runs inside the guest (test/lab/guest): the kernel's NVMe/TCP initiator with native multipath, before a gateway group whose
# members fail.
#
#   guest-gateways-nvme.sh ROUNDS FAULT,... DRILL ADDRESS...      prints a line `ok ...` for each thing that holds; ends at the first that does not
#
# DRILL is the page with the operators' drill, which is run at the end, or "-".
# What has to happen on the host is asked for through files in /share: see xtask/src/guest/gateways.rs.
set -euo pipefail
ROUNDS=$1 DRILL=$3; IFS=, read -r -a FAULTS <<<"$2"; shift 3
source "$(dirname "$0")/guest-gateways.sh"

# Controllers of the group's subsystem; each member has another one besides.
paths_live() {
  local controller count=0
  for controller in $(grep -lx "$NQN" /sys/class/nvme/nvme*/subsysnqn); do
    [[ $(<"${controller%/*}/state") == live ]] && count=$((count + 1))
  done
  [[ $count == "$1" ]]
}
# ANA states of a namespace over all paths, sorted.
states() { cat /sys/class/nvme/nvme*/nvme*c*n"$1"/ana_state 2>/dev/null | sort | xargs; } # NSID
have_states() { [[ $(states 1) == "$1" && $(states 2) == "$1" ]]; }
disks() { ls -d /sys/class/nvme-subsystem/nvme-subsys*/nvme*n* 2>/dev/null | grep -E '/nvme[0-9]+n[0-9]+$' | sort; }
# The kernel counts requests by path, and not for the whole.
completed() { cat /sys/class/nvme/nvme*/nvme*c*n"${1##*n}"/stat | awk '{ sum += $1 + $5 } END { print sum }'; }
two_disks() { [[ $(disks | wc -l) == 2 ]]; }

modprobe nvme-tcp
nvme discover -t tcp -a "$1" -s 4420 >/run/discovery || fail "discovery"
for address; do grep -q "traddr: *$address\$" /run/discovery || { cat /run/discovery; fail "$address is discovered"; }; done
[[ $(grep -E "^portid:" /run/discovery | sort -u | wc -l) -ge 3 ]] || { cat /run/discovery; fail "port ids differ"; }
NQN=$(awk '$1 == "subnqn:" { print $2 }' /run/discovery | sort | uniq -c | awk '$1 == 3 { print $2 }')
[[ -n $NQN ]] || { cat /run/discovery; fail "one subsystem has three ports"; }
ok "one member tells the ports of all"
nvme connect-all -t tcp -a "$1" -s 4420 --ctrl-loss-tmo=600 --reconnect-delay=1 --keep-alive-tmo=5 || fail "connect"
await "three paths" paths_live 3
await "two disks" two_disks
DISKS=($(disks | sed 's,.*/,/dev/,'))
for disk in "${DISKS[@]}"; do await "its size" test -s "/sys/block/${disk##*/}/size"; done
await "one path is optimized, two are not" have_states "non-optimized non-optimized optimized"
ok "three members are one subsystem; each disk has one optimized path"
rounds "$ROUNDS"
await "all paths" paths_live 3
await "one path is optimized, two are not" have_states "non-optimized non-optimized optimized"
ok "all paths are back, with one that is optimized"
nvme disconnect-all >/dev/null
[[ $DRILL == - ]] || drill "$DRILL" "$1"
