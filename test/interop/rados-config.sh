#!/usr/bin/env bash
# What our RADOS client is told, and by whom: the file, the monitors (`ceph config set`), the name service; clusters that ask
# nobody for proof; and that timeouts report.
#
#   PROGRAM=.../rados-lab FOREBAY=.../forebay rados-config.sh
#
# Starts two clusters and daemons of its own.  Needs root: one daemon has a resolv.conf of its own.
set -uo pipefail

NAME=rados-config; source "$(dirname "$0")/../lab/cluster.sh"

stop_daemon() {
  kill "$DAEMON" && wait "$DAEMON" 2>/dev/null
  DAEMON=
}
holds() { grep -q "$1" "$WORK/out" || fail "$2"; }

start_cluster

# Settings that the monitors keep.
lab settings true 'osd_timeout: None' || fail "settings when nothing is said"
ask ceph config set client rados_mon_op_timeout 4
lab settings "ceph config set client rados_osd_op_timeout 7" 'osd_timeout: Some(7s)' || fail "a setting made while we run"
holds 'monitor_timeout: 4s' "a setting that was there before"
[[ $(head -n 1 "$WORK/out") == *'osd_timeout: None'* ]] || fail "it was there too early"
ask ceph config set client.admin rados_osd_op_timeout 8
lab settings "ceph config rm client.admin rados_osd_op_timeout" 'osd_timeout: Some(7s)' || fail "a setting that goes"
[[ $(head -n 1 "$WORK/out") == *'osd_timeout: Some(8s)'* ]] || fail "our own section goes first"
file=$(conf_with own '[client]' 'rados osd op timeout = 5')
CEPH_CONF=$file lab settings "ceph config set client rados_osd_op_timeout 9; ceph config set client rados_mon_op_timeout 3" \
  'monitor_timeout: 3s' || fail "what the file does not say"
grep -q 'Some(7s)\|Some(9s)' "$WORK/out" && fail "the file goes before the monitors"
holds 'osd_timeout: Some(5s)' "what the file says"
file=$(conf_with alone '[client]' 'no mon config = true')
CEPH_CONF=$file lab settings true 'osd_timeout: None' || fail "who does not ask the monitors"
ask ceph config set client ms_client_mode secure
lab status || fail "secure mode, as the monitors keep it"
lab settings true 'osd_modes: [2]' || fail "a mode of connections"
ask ceph config rm client ms_client_mode
ok "settings of the monitors: at the start, changed while we run, taken back; the file goes before them"

# Connection modes that do not overlap: commands are told at once, and by which settings.
differs() { # CONF THEIRS OURS COMMAND...
  local file=$1 theirs=$2 ours=$3 text status who=${WHO:-osd\\.[0-2]} setting=${SETTING:-ms_client_mode}
  shift 3
  FOREBAY_DATA=$WORK/nothing CEPH_CONF=$file limit 20 "$FOREBAY" "$@" >"$WORK/out" 2>&1 </dev/null
  status=$?
  text="$who at [^ ]* accepts connections in mode $theirs only, and this client offers $ours only: change $setting"
  [[ $status == 9 ]] && grep -q "forebay: .*$text of the client or ${setting/client/service}" "$WORK/out" &&
    [[ $(grep -c 'forebay: ' "$WORK/out") == 1 && $(grep 'forebay: ' "$WORK/out" | grep -o 'accepts' | wc -l) == 1 ]]
}
crc=$(conf_with crc '[client]' 'ms client mode = crc' 'rados osd op timeout = 3')
secure=$(conf_with secure '[client]' 'ms client mode = secure')
for file in "$crc" "$secure"; do CEPH_CONF=$file lab status || fail "modes that OSDs take"; done
ask ceph config set osd ms_service_mode secure
await 30 "a list before OSDs that take secure only says so" differs "$crc" secure crc ls rbd
differs "$crc" secure crc create rbd/no --size 1M || fail "creating an image before OSDs that take secure only"
ask ceph config set osd ms_service_mode crc
await 30 "a list before OSDs that take crc only says so" differs "$secure" crc secure ls rbd
ask ceph config rm osd ms_service_mode
alone=$(conf_with alone '[client]' 'ms mon client mode = crc')
ask ceph config set mon ms_mon_service_mode secure
WHO='the monitor' SETTING=ms_mon_client_mode await 30 "monitors that take secure only say so" differs "$alone" secure crc ls rbd
ask ceph config rm mon ms_mon_service_mode
FOREBAY_DATA=$WORK/nothing CEPH_CONF=$crc await 30 "OSDs take both again" limit 20 "$FOREBAY" ls rbd
ok "connection modes that do not overlap: commands name the OSD, the modes of both and the settings"

# A volume in use waits for OSDs that take other modes now: the log says why at once, its host after rados_osd_op_timeout.
CEPH_CONF=$crc start_daemon
ask "$FOREBAY" create rbd/modes --size 32M
uri=$(limit 60 "$FOREBAY" attach rbd/modes --nbd 2>"$WORK/out") || fail "attaching"
ask qemu-io -f raw -c 'write -P 0x32 0 1M' -c flush "$uri"
ask ceph config set osd ms_service_mode secure
for osd in 0 1 2; do ask "$LAB/ceph-cluster" kill-osd $osd; ask "$LAB/ceph-cluster" start-osd $osd; done
limit 60 qemu-io -r -f raw -c 'read 0 4096' "$uri" >"$WORK/out" 2>&1 </dev/null
holds 'read failed' "a read while OSDs take other modes"
until_says "$WORK/daemon.log" 'WARN.*osd\.[0-2] at .* accepts connections in mode secure only'
ask ceph config rm osd ms_service_mode
modes_again() { limit 30 qemu-io -r -f raw -c 'read -P 0x32 0 1M' "$uri" && ! grep -Eq 'failed|error' "$WORK/out"; }
await 120 "reading goes on" modes_again
await 120 "all copies are back" is_clean
ask "$FOREBAY" detach rbd/modes
stop_daemon
ok "a volume in use waits for OSDs with other modes, and goes on when they take its mode again"

# Timeouts are reported: the OSDs are down, and reads fail; when they are back, reads work again.
ask ceph config set client rados_osd_op_timeout 3
start_daemon
ask "$FOREBAY" create rbd/timed --size 32M
uri=$(limit 60 "$FOREBAY" attach rbd/timed --nbd 2>"$WORK/out") || fail "attaching"
ask qemu-io -f raw -c 'write -P 0x31 0 1M' -c flush "$uri"
for osd in 0 1 2; do ask "$LAB/ceph-cluster" kill-osd $osd; done
begun=$SECONDS
quiet_now; quiet=$NOW
limit 60 qemu-io -r -f raw -c 'read 0 4096' "$uri" >"$WORK/out" 2>&1 </dev/null
took=$((SECONDS - begun))
quiet_now
holds 'read failed' "a read while no OSD is there"
((took >= 2 && NOW - quiet <= 20)) || fail "the read was told after $took s"
until_says "$WORK/daemon.log" 'osd\.[0-2] does not'
for osd in 0 1 2; do ask "$LAB/ceph-cluster" start-osd $osd; done
reads_again() { limit 30 qemu-io -r -f raw -c 'read -P 0x31 0 1M' "$uri" && ! grep -Eq 'failed|error' "$WORK/out"; }
await 120 "reading goes on" reads_again
await 120 "all copies are back" is_clean
ask "$FOREBAY" detach rbd/timed
stop_daemon
# Watches are taken up again, however long that takes: nothing of the image is left behind.
grep -q 'watch of an image broke\|image locks are not released' "$WORK/daemon.log" &&
  fail "what the timeout did to the image's watch"
ok "rados_osd_op_timeout of the monitors: a read without OSDs fails after $took s, and goes on when they are back"
ask ceph config rm client rados_osd_op_timeout

begun=$SECONDS
quiet_now; quiet=$NOW
LIMIT=60 lab ask "'$LAB/ceph-cluster' kill-mon a" || fail "asking monitors that are gone"
holds 'TimedOut after [0-9]* s' "rados_mon_op_timeout"
after=$(sed -n 's/.*TimedOut after \([0-9]*\) s.*/\1/p' "$WORK/out" | head -n 1)
quiet_now
# At most 9 s of quiet time, of which there was as much as the clock says.
((after >= 3 && after * (NOW - quiet + 1) <= 9 * (SECONDS - begun + 1))) || fail "rados_mon_op_timeout of 3 s after $after s"
said=$(cut -d: -f1 "$WORK/out")
ask "$LAB/ceph-cluster" start-mon a
await 60 "the monitor is back" ceph -s
ok "rados_mon_op_timeout of the monitors: $said"

# No monitor in the file: the name service knows them (RFC 2782).
cat >"$WORK/dns.py" <<'PY'
"""Answers for _ceph-mon._tcp.lab.test (SRV) and mon.lab.test (A); of anything else there is nothing."""
import socket, struct, sys
address, port = sys.argv[1], int(sys.argv[2])
server = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
server.bind((address, 53))
print("ready", flush=True)
labels = lambda name: b"".join(bytes([len(part)]) + part.encode() for part in name.split(".")) + b"\0"
while True:
    question, client = server.recvfrom(4096)
    at, name = 12, []
    while question[at]:
        name.append(question[at + 1:at + 1 + question[at]].decode().lower())
        at += 1 + question[at]
    kind = struct.unpack(">H", question[at + 1:at + 3])[0]
    name = ".".join(name)
    print(name, kind, flush=True)
    data = None
    if (name, kind) == ("_ceph-mon._tcp.lab.test", 33):
        data = struct.pack(">HHH", 10, 60, port) + labels("mon.lab.test")
    elif (name, kind) == ("mon.lab.test", 1):
        data = socket.inet_aton("127.0.0.1")
    known = name in ("_ceph-mon._tcp.lab.test", "mon.lab.test")
    answer = question[:2] + struct.pack(">HHHHH", 0x8180 if known else 0x8183, 1, 1 if data else 0, 0, 0)
    answer += question[12:at + 5]
    if data:
        answer += b"\xc0\x0c" + struct.pack(">HHIH", kind, 1, 60, len(data)) + data
    server.sendto(answer, client)
PY
resolver=127.$((RANDOM % 200 + 20)).$((RANDOM % 250 + 1)).53
python3 "$WORK/dns.py" "$resolver" "$MON_PORT" >"$WORK/dns.log" 2>&1 &
until_says "$WORK/dns.log" ready
printf 'nameserver %s\nsearch lab.test\n' "$resolver" >"$WORK/resolv.conf"
grep -v '^mon host' "$CLUSTER_DIR/ceph.conf" >"$WORK/dns.conf"
cat >"$WORK/within" <<'SH'
#!/bin/sh
# A daemon that sees another resolv.conf than everybody else.
mount --bind "$WORK/resolv.conf" /etc/resolv.conf && exec "$REAL" "$@"
SH
chmod +x "$WORK/within"
for more in '' 'mon dns srv name = ceph-mon_lab.test'; do
  # With the domain behind the service's name, none has to be searched.
  [[ -z $more ]] || { printf 'nameserver %s\n' "$resolver" >"$WORK/resolv.conf"; sed -i "s/^fsid/$more\nfsid/" "$WORK/dns.conf"; }
  : >"$WORK/dns.log"
  FOREBAY_DATA=$WORK/data CEPH_CONF=$WORK/dns.conf WORK=$WORK REAL=$FOREBAY \
    unshare -m "$WORK/within" serve --store-size 256M >>"$WORK/daemon.log" 2>&1 &
  DAEMON=$!
  await 30 "the daemon is ready" "$FOREBAY" status
  ask "$FOREBAY" ls rbd
  holds timed "images of a cluster that the name service knows"
  grep -q '^_ceph-mon._tcp.lab.test 33' "$WORK/dns.log" || fail "the name service was not asked"
  stop_daemon
done
ok "monitors from the name service, in this machine's domain and in another"
"$LAB/ceph-cluster" down >/dev/null 2>&1

# A cluster without authentication.
gone() {
  local pid
  for pid in $(cat "$CLUSTER_DIR"/run/*.pid 2>/dev/null); do ! kill -0 "$pid" 2>/dev/null || return 1; done
}
await 30 "the first cluster is gone" gone
export MON_PORT=$((MON_PORT + 100)) MON_V1_PORT=$((MON_V1_PORT + 100)) AUTH=none
start_cluster
grep -q 'auth client required = none' "$CEPH_CONF" || fail "a cluster without cephx"
sed -i '/^keyring/d' "$CEPH_CONF"
lab status || fail "connecting without a proof"
grep -q 'client: [1-9]' "$WORK/out" || fail "a number of ours"
ok "without cephx: connected"
cat >"$WORK/disturb" <<'SCRIPT'
osd=$(ceph osd map shared header -f json 2>/dev/null | sed -n 's/.*acting_primary":\([0-9]*\).*/\1/p')
[ -n "$osd" ] || { echo "no OSD has the object"; exit 1; }
"$LAB/ceph-cluster" kill-osd "$osd" && "$LAB/ceph-cluster" start-osd "$osd"
SCRIPT
lab shared "bash $WORK/disturb" || fail "without cephx: two clients that share a pool"
for seed in 1 2; do lab steps "$seed" || fail "without cephx: random steps of seed $seed"; done
ok "without cephx: watches, locks, the blocklist, random steps"
head -c 8M /dev/urandom >"$WORK/model"
start_daemon
ask "$FOREBAY" import --no-progress "$WORK/model" rbd/open
ask rbd export --no-progress rbd/open "$WORK/export"
cmp "$WORK/export" "$WORK/model" >"$WORK/out" 2>&1 || fail "without cephx: what rbd reads"
file=$(conf_with wants '[client]' 'auth client required = cephx' "keyring = $CLUSTER_DIR/keyring")
CEPH_CONF=$file lab status && fail "a client that wants cephx was taken"
holds 'refuses client.admin' "who wants cephx is told"
ok "without cephx: images in turns with rbd; who wants cephx is told"
