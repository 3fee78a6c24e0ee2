#!/usr/bin/env bash
# Runs inside the guest (test/lab/guest, KERNEL=backports TLS=1 FSDAX=1, two DISKS): the blocks of README.md and
# docs/operations.md, one after the other, each line as a reader would type it.
#
#   guest-documented.sh PROGRAM     prints a line `ok ...` for each thing that holds; ends at the first that does not
#
# The blocks are in /share/blocks, listed in /share/index with their pages and headings (xtask/src/guest/documented.rs).
# given() makes what a heading's text speaks of as being there, holds() looks whether what it promises is so.
set -euo pipefail
PROGRAM=$1 HOST=127.0.0.1 DATA=/var/lib/forebay
LOGS="/run/serve.log /run/command.log"
source "$(dirname "$0")/guest.sh"
page='' heading='' block='' DAEMON='' UNIT=''

# Ends the daemon that runs, as someone who goes on to the next example would.
stop() {
  if [[ -n $UNIT ]]; then in_systemd systemctl stop forebay || fail "$heading: stop the unit"; UNIT=''; fi
  [[ -n $DAEMON ]] || return 0
  kill -TERM "$DAEMON"; wait "$DAEMON" || fail "$heading: the daemon ended with $?"
  DAEMON=''
}
# A line that stays in the foreground: it goes on in the background when it is ready.
serve() { # LINE
  stop
  # The daemon takes the shell's place, so that its process is known.
  eval "exec $1" >/run/serve.log 2>&1 &
  DAEMON=$!
  await "$1" ready "$DAEMON"
}
ready() {
  [[ -e /run/forebay/daemons/$1.json ]] && forebay status --control "$(jq -r .control "/run/forebay/daemons/$1.json")"
}
# Types one line of a block.
enter() { # LINE
  [[ -n $1 && $1 != '#'* ]] || return 0
  case $1 in
    'forebay serve'*) serve "$1" ;;
    *) eval "$1" >/run/command.log 2>&1 </dev/null || fail "$page, $heading: $1" ;;
  esac
  ok "$page, $heading: $1"
}
fresh() { stop; rm -rf ${DATA:?}/* /srv/*; mkdir -p /srv/fast; unset FOREBAY_DATA; blkdiscard /dev/vdb; }
create() { local image; for image; do timeout 60 forebay create "$image" --size 256M >/run/command.log || fail "create $image"; done; }
nvme_disk() { [[ -b $(ls /dev/nvme*n1 2>/dev/null | head -n 1) ]]; }
leave() { nvme disconnect-all >/dev/null; }
subsystem() { NQN=$(forebay targets --format json | jq -r '[.[] | .uri // empty | select(startswith("nvme"))][0]' | sed 's/.*4420.//; s/#.*//'); }

# The page's `cargo build` has been done: it is the program under test.
cargo() {
  [[ $* == "build --release -p forebay" ]] || return 1
  mkdir -p target/release
  [[ target/release/forebay -ef $PROGRAM ]] || ln -sf "$PROGRAM" target/release/forebay
}
# Runs a command where the systemd that start_systemd has started runs.
in_systemd() { nsenter -t "$SYSTEMD" -m -p -r -w "$@"; }
start_systemd() {
  mkdir -p /run/systemd-test
  printf '[Unit]\nDescription=Nothing but what is asked for\n' >/etc/systemd/system/idle.target
  mountpoint -q /sys/fs/cgroup || mount -t cgroup2 cgroup2 /sys/fs/cgroup
  unshare --mount --pid --fork --mount-proc env -i container=test PATH="$PATH" /lib/systemd/systemd --system \
    --unit=idle.target --log-target=console --default-standard-output=kmsg --default-standard-error=kmsg >/run/systemd.log 2>&1 &
  LOGS+=" /run/systemd.log"
  await "systemd" pgrep -x systemd
  SYSTEMD=$(pgrep -x systemd)
  await "systemd answers" in_systemd systemctl is-active idle.target
}
# The unit as printed, with the configuration as printed: all that the text says of both.
try_unit() {
  local configuration
  forebay store init --data $DATA --store /dev/nvme1n1 >/run/command.log 2>&1 || fail "make the store"
  configuration=$(awk -F'\t' '$3 == "Configuration" && $1 ~ /toml/ {print $1}' /share/index)
  configure "$configuration"
  ln -sf "$PROGRAM" /usr/bin/forebay
  cp "/share/blocks/$block" /etc/systemd/system/forebay.service
  start_systemd
  in_systemd systemctl start forebay || fail "start the unit"
  UNIT=1
  ok "$page, $heading: the unit starts, and is ready when it says so"
  create local/disk
  timeout 60 forebay attach local/disk --nbd --log ssd:/srv/fast/logs:64M >/run/command.log 2>&1 || fail "attach with a log"
  timeout 60 qemu-io -f raw -c 'write -P 7 0 64k' -c 'read -P 7 0 64k' 'nbd+unix:///local/disk?socket=/run/forebay/nbd.sock' \
    >/run/command.log 2>&1 || fail "write over the socket in /run/forebay"
  ! in_systemd nsenter -t "$(in_systemd systemctl show -P MainPID forebay)" -m -r touch /srv/elsewhere 2>/dev/null ||
    fail "the unit may write everywhere"
  ok "$page, $heading: a socket in /run/forebay, a log below /srv/fast, and nothing else"
  in_systemd systemctl reload forebay || fail "reload the unit"
  in_systemd systemctl restart forebay || fail "restart the unit"
  forebay targets --format json >/run/command.log && jq -e '.[0].image == "local/disk" or length == 1' /run/command.log >/dev/null ||
    fail "the export is there again"
  ok "$page, $heading: reload, and restart with the export kept"
}

configure() { # BLOCK
  mkdir -p /etc/forebay /run/forebay
  cp "/share/blocks/$1" /etc/forebay.toml
  (umask 077; cd /etc/forebay
    nvme gen-tls-key --hmac=1 >host.tls; nvme gen-dhchap-key >host.key
    od -An -v -tx1 -N32 /dev/urandom | tr -d ' \n' >peer.key)
}

given() {
  case $heading in
    'Use it')
      [[ -e debian.qcow2 ]] && return
      head -c 8M /dev/urandom >content; truncate -s 64M content
      qemu-img convert -f raw -O qcow2 content debian.qcow2 ;;
    'Images') serve "forebay serve --data $DATA"; head -c 4M /dev/urandom >debian.raw; truncate -s 64M debian.raw ;;
    'A block device of this machine') serve "forebay serve --data $DATA"; create local/disk1 ;;
    'Virtual machines of this machine') serve "forebay serve --data $DATA"; create local/vm1; mkdir -p /run/forebay ;;
    'virtio-scsi controllers') serve "forebay serve --data $DATA"; create local/vm1 local/data; mkdir -p /run/forebay ;;
    'The shapes of rbd' | 'Snapshots') serve "forebay serve --data $DATA"; create local/disk1 ;;
    'Clones') serve "forebay serve --data $DATA"; create local/golden ;;
    'Groups') serve "forebay serve --data $DATA"; create local/tables local/journal ;;
    'Space') serve "forebay serve --data $DATA"; create local/vm1 ;;
    'Own blocks') serve "forebay serve --data $DATA"; create local/disk ;;
    'Write logs')
      mkfs.ext4 -q -F /dev/pmem0; mkdir -p /mnt/pmem; mountpoint -q /mnt/pmem || mount -o dax /dev/pmem0 /mnt/pmem
      serve "forebay serve --data $DATA"; create local/disk local/db ;;
    'NBD')
      if [[ ! -e $DATA/store.img ]]; then serve "forebay serve --data $DATA"; create local/disk1 local/disk2; stop; fi ;;
    'NVMe/TCP' | 'iSCSI')
      leave
      rm -f /dev/nvme1n1 # the kernel may want the name
      if [[ ! -e $DATA/store.img ]]; then serve "forebay serve --data $DATA"; create local/disk1; stop; fi ;;
    'Several subsystems and targets')
      leave
      serve "forebay serve --data $DATA --nvme 127.0.0.1:4420 --iscsi 127.0.0.1:3260"; create local/disk1 local/disk2
      IQN=$(sed 's/InitiatorName=//' /etc/iscsi/initiatorname.iscsi)
      (umask 077; nvme gen-dhchap-key --nqn "$HOSTNQN" >host.key) ;;
  esac
}
holds() {
  case $heading in
    'Use it')
      [[ $block == *2.sh ]] || return 0
      qemu-img compare -f raw -F qcow2 nbd://127.0.0.1:10809/local/disk debian.qcow2 >/run/command.log 2>&1 || true
      grep -q 'identical' /run/command.log || fail "the image has arrived" ;;
    'NVMe/TCP')
      [[ $block == *.sh ]] || return 0
      await "a namespace" nvme_disk
      subsystem
      [[ $(cat /sys/class/nvme-subsystem/nvme-subsys*/subsysnqn | grep -vc discovery) == 1 ]] || fail "one subsystem" ;;
    'iSCSI')
      await "a unit's disk" grep -q Forebay /sys/class/scsi_device/*/device/model
      iscsiadm -m node --logout >/dev/null || fail "log out" ;;
    'Several subsystems and targets')
      forebay nvme-subsystem ls --format json >/run/command.log || fail "list the subsystems"
      jq -e '.[1] | .exports == 1 and .hosts == []' /run/command.log >/dev/null || fail "an export, and no host any more"
      forebay iscsi-target ls --format json >/run/command.log || fail "list the targets"
      jq -e '.[1] | .exports == 1 and .initiators == []' /run/command.log >/dev/null || fail "an export, and no initiator" ;;
    'Other daemons')
      forebay status --format json >/run/command.log || fail "the status with peers"
      [[ $block == *.toml || $(tr -d "\n" <peer.key | wc -c) == 64 ]] || fail "a key of 64 digits" ;;
    'Images')
      [[ $(forebay ls) == disk2 ]] || fail "disk1 is gone, disk2 is there"
      [[ $(zstd -dc disk1.zst | head -c 1048576 | wc -c) == 1048576 ]] || fail "what was exported" ;;
    'A block device of this machine')
      [[ $(forebay showmapped --format json)$(forebay targets --format json) == '[][]' ]] || fail "nothing is mapped any more" ;;
    'Virtual machines of this machine')
      [[ $(forebay targets --format json) == '[]' && ! -e /run/forebay/vm1.sock ]] || fail "the export and its socket are gone"
      [[ $(forebay info local/vm1 --format json | jq .size) == $((40 << 30)) ]] || fail "the size" ;;
    'virtio-scsi controllers')
      [[ $(forebay targets --format json | jq -r '.[].uri' | grep -c 'vm1-scsi.sock?lun=[01]$') == 2 ]] || fail "two units are left"
      forebay detach local/vm1 local/data
      [[ ! -e /run/forebay/vm1-scsi.sock ]] || fail "the socket goes with the last unit" ;;
    'Snapshots')
      [[ $(forebay snap ls local/disk1 --format json) == '[]' ]] || fail "all snapshots are gone"
      [[ -e monday.raw ]] || fail "what was exported" ;;
    'Groups')
      [[ $(forebay group ls local --format json) == '[]' ]] || fail "the group is gone"
      [[ $(forebay snap ls --all local/tables --format json) == '[]' ]] || fail "no part of a snapshot is left" ;;
    'Clones')
      [[ $(forebay snap ls --all local/golden --format json) == '[]' ]] || fail "no snapshot is left"
      [[ $(forebay info local/vm1 --format json | jq .parent) == null ]] || fail "what was flattened has no parent" ;;
    'Space')
      [[ $(forebay du local/vm1 --format json | jq '.images[0].used_size') == 0 ]] || fail "nothing is stored" ;;
    'The shapes of rbd')
      [[ $(forebay info disk2 --format json | jq .order) == 22 ]] || fail "the order of disk2" ;;
  esac
}

# Loaded early: a device that udev looks at while the first image is mapped is not the one that the text names.
modprobe -a ext4 nbd nvme-tcp iscsi_tcp sd_mod
mkfs.ext4 -q -F /dev/vda; mkdir -p /run/files; mount /dev/vda /run/files; mkdir -p /run/files/{data,srv} $DATA /srv
mount --bind /run/files/data $DATA; mount --bind /run/files/srv /srv
# shellcheck disable=SC2046
mknod /dev/nvme1n1 b $(stat -c '0x%t 0x%T' /dev/vdb)
mkdir -p /etc/nvme /etc/iscsi /run/lock/iscsi
nvme gen-hostnqn >/etc/nvme/hostnqn; HOSTNQN=$(cat /etc/nvme/hostnqn)
echo "InitiatorName=iqn.2026-11.io.forebay:guest-initiator" >/etc/iscsi/initiatorname.iscsi
iscsid -f >/run/iscsid.log 2>&1 &
printf '[authenticate]\nkeyrings=.nvme\n' >/run/tlshd.conf
tlshd -s -c /run/tlshd.conf >/run/tlshd.log 2>&1 &
# Addresses that configurations name, and that discovery returns of hosts that listen on all addresses.
for address in 192.0.2.7 10.17.23.10; do ip address add "$address/24" dev lo; done

last=''
while IFS=$'\t' read -r block page heading <&3; do
  [[ $page/$heading == "$last" ]] || fresh
  last=$page/$heading
  [[ $heading != Forebay ]] || continue # what make does: stages of their own, and tests of scripts/install
  given
  case $block in
    *.sh) while IFS= read -r line <&4; do enter "$line"; done 4<"/share/blocks/$block" ;;
    *.toml) configure "$block"; serve "forebay serve --config /etc/forebay.toml"; ok "$page, $heading: a configuration" ;;
    *.ini) try_unit ;;
  esac
  holds
done 3</share/index
stop
