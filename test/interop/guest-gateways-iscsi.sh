#!/usr/bin/env bash
# Runs inside the guest (test/lab/guest): open-iscsi with dm-multipath, before a gateway group whose members fail.
#
#   guest-gateways-iscsi.sh ROUNDS FAULT,... DRILL ADDRESS...      prints a line `ok ...` for each thing that holds; ends at the first that does not
#
# DRILL is not used.  What has to happen on the host is asked for through files in /share: see xtask/src/guest/gateways.rs.
set -euo pipefail
ROUNDS=$1 DRILL=$3; IFS=, read -r -a FAULTS <<<"$2"; shift 3
LOGS="/run/*.log"
source "$(dirname "$0")/guest-gateways.sh"

# SCSI disks of a unit, one for each path.
paths() { ls -d /sys/class/scsi_device/*:0:0:"$1"/device/block/* 2>/dev/null; } # LUN
sessions() { grep -l LOGGED_IN /sys/class/iscsi_session/session*/state 2>/dev/null | wc -l; }
paths_live() { [[ $(sessions) == "$1" && $(active 0) == "$1" && $(active 1) == "$1" ]]; }
# Paths that the map of a unit uses.
active() { dmsetup status "$(basename "${DISKS[$1]}")" | grep -oE '[0-9]+:[0-9]+ A ' | wc -l; }
# States of the paths to a unit, as the kernel has them, sorted.
states() { # LUN
  local path
  for path in $(paths "$1"); do cat "$path/device/access_state"; done | sort | xargs
}
have_states() { [[ $(states 0) == "$1" && $(states 1) == "$1" ]]; }
three_paths() { [[ $(paths 0 | wc -l) == 3 && $(paths 1 | wc -l) == 3 ]]; }
maps() { [[ $(dmsetup ls --target multipath 2>/dev/null | grep -c .) == 2 ]]; }

modprobe iscsi_tcp; modprobe sd_mod; modprobe dm_multipath; modprobe dm_service_time; modprobe scsi_dh_alua
mkdir -p /run/lock/iscsi /etc/iscsi /run/multipath
/lib/systemd/systemd-udevd --daemon >/run/udevd.log 2>&1
udevadm trigger && udevadm settle
echo "InitiatorName=iqn.2026-11.io.forebay:guest-initiator" >/etc/iscsi/initiatorname.iscsi
cat >/etc/multipath.conf <<'CONF'
defaults {
  user_friendly_names no
  find_multipaths no
  polling_interval 1
  max_polling_interval 2
  path_checker tur
  path_grouping_policy group_by_prio
  prio alua
  failback immediate
  no_path_retry 60
}
CONF
iscsid -f >/run/iscsid.log 2>&1 &
await "iscsid" iscsiadm -m iface
multipathd -d >/run/multipathd.log 2>&1 &
await "multipathd" multipathd show status

iscsiadm -m discovery -t sendtargets -p "$1:3260" >/run/discovery.log 2>&1 || fail "discovery"
for address; do grep -q "^$address:3260," /run/discovery.log || { cat /run/discovery.log; fail "$address is discovered"; }; done
# Each member has a target of its own besides.
TARGET=$(awk '{ print $2 }' /run/discovery.log | sort | uniq -c | awk '$1 == 3 { print $2 }')
[[ -n $TARGET && $(cut -d, -f2 /run/discovery.log | cut -d' ' -f1 | sort -u | wc -l) == 3 ]] || { cat /run/discovery.log; fail "three portal groups"; }
ok "one member tells the portals of all"
for setting in node.session.timeo.replacement_timeout=2 node.conn[0].timeo.noop_out_interval=1 node.conn[0].timeo.noop_out_timeout=2; do
  iscsiadm -m node -T "$TARGET" -o update -n "${setting%=*}" -v "${setting#*=}" >/dev/null || fail "set $setting"
done
iscsiadm -m node -T "$TARGET" --login >/run/login.log 2>&1 || fail "login"
await "three paths to each unit" three_paths
await "two maps" maps
DISKS=()
for lun in 0 1; do
  first=$(paths $lun | head -n 1)
  held() { ls "$first"/holders/* >/dev/null; }
  await "a map of unit $lun" held
  DISKS+=("/dev/mapper/$(cat "$first"/holders/*/dm/name)")
done
# Statistics are of the map, whose name in /sys is another one.
completed() { awk '{print $1 + $5}' "/sys/block/$(basename "$(readlink -f "$1")")/stat"; }
await "all paths are used" paths_live 3
await "one path is optimized, two are not" have_states "active/non-optimized active/non-optimized active/optimized"
ok "three members are one target; each unit has one optimized path"
rounds "$ROUNDS"
await "all paths" paths_live 3
await "one path is optimized, two are not" have_states "active/non-optimized active/non-optimized active/optimized"
ok "all paths are back, with one that is optimized"
multipathd shutdown >/dev/null || true
