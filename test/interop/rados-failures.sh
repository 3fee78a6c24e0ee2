#!/usr/bin/env bash
# Our RADOS client while a cluster of its own misbehaves: OSDs marked out, placement groups that move and split, monitors
# killed one after the other, the network cut, pauses, full pools, deleted pools, revoked keys, fenced clients.
#
#   PROGRAM=.../rados-lab FOREBAY=.../forebay rados-failures.sh
#
# Writers number what they write, and look whether what is there is ever older than what was acknowledged; they end with a
# comparison of everything.  Prints a line for each check.  Needs root, for a network of its own.
set -uo pipefail

export ADDR=10.77.$((RANDOM % 250)).1 MONS=3 EXTRA='auth mon ticket ttl = 15
auth service ticket ttl = 15
mon osd down out interval = 600
osd pool default pg autoscale mode = off
osd mclock profile = high_recovery_ops
mon osd full ratio = 0.95'
# What our client says of monitors and OSDs is looked at.
export RUST_LOG=info
NAME=rados-failures; source "$(dirname "$0")/../lab/cluster.sh"

# The clients that are cut off live in a network of their own, with one way out.
NET=fb$$
AT_END=(unplug)
unplug() {
  [[ -z ${HAMMER:-} ]] || kill -9 "$HAMMER" 2>/dev/null
  ip netns del "$NET" 2>/dev/null
  ip link del "$NET" 2>/dev/null
}
{
  ip netns add "$NET" && ip link add "$NET" type veth peer name inside netns "$NET" &&
    ip addr add "$ADDR/24" dev "$NET" && ip link set "$NET" up &&
    ip -n "$NET" addr add "${ADDR%.1}.2/24" dev inside && ip -n "$NET" link set inside up && ip -n "$NET" link set lo up
} >"$WORK/out" 2>&1 || fail "a network of its own"

HAMMER= SAID=$WORK/said
hammer() { # POOL [WORDS BEFORE]
  local pool=$1
  shift
  # What the writers before have printed is not what these print.
  rm -f "$WORK/stop" "$SAID"
  "$@" "$PROGRAM" hammer "$pool" "$WORK/stop" >"$SAID" 2>"$WORK/hammer.log" </dev/null &
  HAMMER=$!
  await 60 "writers write" has_acked 100
}
acked() { tac "$SAID" 2>/dev/null | sed -n 's/^acked \([0-9]*\) .*/\1/p' | head -n 1; }
has_acked() { [[ $(acked) -gt $1 ]]; }
monitor() { tac "$SAID" | sed -n 's/^acked .* monitor //p' | head -n 1; }
goes_on() { # SECONDS WHAT
  local now
  now=$(acked)
  kill -0 "$HAMMER" 2>/dev/null || { cp "$WORK/hammer.log" "$WORK/out"; fail "$2: the writers have ended"; }
  await "$1" "$2" has_acked $((now + 200))
}
# Nothing has been acknowledged while this many lines were said.
stands() {
  local last
  last=$(tail -n 12 "$SAID" | grep -c '^acked')
  # The monitor is another one, or none, while it looks for one.
  [[ $last -ge 10 && $(tail -n 10 "$SAID" | sed -n 's/^acked \([0-9]*\) .*/\1/p' | sort -u | wc -l) == 1 ]]
}
stop_hammer() { # WHAT
  touch "$WORK/stop"
  await 60 "$1: the writers end" ended
  wait "$HAMMER" || { cat "$SAID" "$WORK/hammer.log" | tail -n 20 >"$WORK/out"; fail "$1: the writers"; }
  HAMMER=
}
ended() { ! kill -0 "$HAMMER" 2>/dev/null; }
without_error() { ! grep -q '^error' "$SAID" || { grep '^error' "$SAID" >"$WORK/out"; fail "$1: an error came"; }; }
verified() { grep -q '^verified' "$SAID" || { tail -n 5 "$SAID" >"$WORK/out"; fail "$1: not verified"; }; }

start_cluster
ask ceph osd pool create work 8 8
await 60 "the cluster is clean" is_clean

hammer work
ask ceph osd out 0
goes_on 60 "an OSD marked out"
await 120 "data has moved" is_clean
goes_on 60 "an OSD that is out"
ask ceph osd in 0
await 120 "data has moved back" is_clean
goes_on 60 "an OSD back in"
without_error "an OSD marked out and in"
ok "an OSD marked out, and in again: writes go on"

ask ceph osd set-require-min-compat-client luminous --yes-i-really-mean-it
for group in 0 1 2 3; do
  id=$(ceph osd pool stats work -f json 2>/dev/null | grep -o '"pool_id":[0-9]*' | cut -d: -f2)
  for pair in "0 1" "1 2" "2 0"; do
    read -r from to <<<"$pair"
    ceph osd pg-upmap-items "$id.$group" "$from" "$to" >/dev/null 2>&1
  done
done
goes_on 60 "groups that move"
ask ceph osd pool set work pg_num 16
ask ceph osd pool set work pgp_num 16
split() { [[ $(ceph osd pool get work pg_num -f json 2>/dev/null | grep -o '"pg_num":[0-9]*') == '"pg_num":16' ]] && is_clean; }
await 120 "groups have split" split
goes_on 60 "groups that split"
without_error "groups that move and split"
ok "placement groups that move, and split: writes go on"

ask ceph osd set pause
await 30 "writes stand while the cluster is paused" stands
ask ceph osd unset pause
goes_on 60 "after the pause"
ask ceph osd set noup
ask "$LAB/ceph-cluster" kill-osd 1
goes_on 90 "an OSD killed"
ask "$LAB/ceph-cluster" start-osd 1
ask ceph osd unset noup
await 120 "it is back" is_clean
goes_on 60 "an OSD that is back"
without_error "a pause, and an OSD killed"
ok "a pause ends by itself; an OSD killed and started"

# Each monitor is down once; the others report changes.
for step in "a out" "b in" "c out"; do
  read -r name change <<<"$step"
  ask "$LAB/ceph-cluster" kill-mon "$name"
  port=$((MON_PORT + $(printf '%d' "'$name") - 97))
  elsewhere() { local now; now=$(monitor); [[ -n $now && $now != *":$port" ]]; }
  await 60 "the client has another monitor than $name" elsewhere
  ask ceph osd "$change" 2
  await 120 "data has moved" is_clean
  goes_on 60 "monitor $name gone"
  ask "$LAB/ceph-cluster" start-mon "$name"
  quorum() { [[ $(ceph quorum_status -f json 2>/dev/null | grep -o '"quorum":\[[0-9,]*\]') == '"quorum":[0,1,2]' ]]; }
  await 60 "monitor $name is back" quorum
done
ask ceph osd in 2
await 120 "data has moved back" is_clean
without_error "monitors restarted"
stop_hammer "monitors restarted"
verified "monitors restarted"
ok "three monitors killed in turn: maps come from another, nothing acknowledged is lost"

hammer work ip netns exec "$NET"
ask ip link set "$NET" down
await 60 "writes stand while the network is cut" stands
ask ip link set "$NET" up
goes_on 90 "the network is back"
for _ in 1 2 3; do
  ask ip link set "$NET" down
  await 60 "writes stand again" stands
  ask ip link set "$NET" up
  goes_on 90 "the network is back again"
done
without_error "the network cut"
stop_hammer "the network cut"
verified "the network cut"
ok "the network cut four times: writes go on, nothing acknowledged is lost"

# Cut for longer than the keepalive timeout: sessions end on our side and are opened again.
hammer work ip netns exec "$NET"
ask ip link set "$NET" down
await 90 "a silent OSD is taken for gone" says "$WORK/hammer.log" 'session with an OSD is lost.*the peer is silent'
await 90 "a silent monitor is taken for gone" says "$WORK/hammer.log" 'a monitor is lost'
ask ip link set "$NET" up
goes_on 90 "the network is back after long"
without_error "the network cut for long"
stop_hammer "the network cut for long"
verified "the network cut for long"
ok "the network cut until everybody is taken for gone: writes go on, nothing acknowledged is lost"

# A group with too few copies asks clients to hold their requests back, and to go on when it has enough.
ask ceph osd set noout
ask ceph osd pool create strict 8 8
ask ceph osd pool set strict min_size 2
await 60 "the cluster is clean" is_clean
hammer strict env RUST_LOG=info,forebay_rados=debug
ask "$LAB/ceph-cluster" kill-osd 2
await 90 "an OSD asks to hold back" says "$WORK/hammer.log" 'requests are blocked by a backoff'
ask "$LAB/ceph-cluster" start-osd 2
await 90 "an OSD asks to go on" says "$WORK/hammer.log" 'requests are sent again'
goes_on 90 "the copy is back"
without_error "backoffs"
stop_hammer "backoffs"
verified "backoffs"
ask ceph osd unset noout
ask ceph osd pool delete strict strict --yes-i-really-really-mean-it
ok "$(grep -c 'requests are blocked by a backoff' "$WORK/hammer.log") backoffs: requests wait, and go on when they may"

# Full: by a quota.
ask ceph osd pool create small 8 8
hammer small
ask ceph osd pool set-quota small max_objects 1
await 60 "a full pool says so" says "$SAID" '^error NoSpace'
ask ceph osd pool set-quota small max_objects 0
well_again() { [[ $(grep -n '^well' "$SAID" | tail -n 1 | cut -d: -f1) -gt $(grep -n '^error' "$SAID" | tail -n 1 | cut -d: -f1) ]]; }
await 60 "there is room again" well_again
goes_on 60 "room again"
# Full: the whole cluster.  OSDs take the highest of the three ratios.
full_at() { # NEARLY BACKFILL FULL
  ask ceph osd set-nearfull-ratio "$1"
  ask ceph osd set-backfillfull-ratio "$2"
  ask ceph osd set-full-ratio "$3"
}
said_before=$(wc -l <"$SAID")
full_again() { tail -n +$((said_before + 1)) "$SAID" | grep -q '^error NoSpace'; }
full_at 0.0001 0.0001 0.0001
await 60 "a full cluster says so" full_again
full_at 0.85 0.9 0.95
await 60 "there is room again" well_again
goes_on 60 "room again in the cluster"
stop_hammer "full"
verified "full"
ok "a full pool, a full cluster: $(grep -m 1 '^error' "$SAID"); writes go on when there is room"

hammer small
ask ceph osd pool delete small small --yes-i-really-really-mean-it
await 60 "a deleted pool says so" says "$SAID" '^error NotFound'
stop_hammer "a pool deleted"
ok "a pool deleted: $(grep -m 1 '^error NotFound' "$SAID")"

# The OSD that gathers the answers to a notification goes.
cat >"$WORK/disturb" <<'SCRIPT'
osd=$(ceph osd map rbd header -f json 2>/dev/null | sed -n 's/.*acting_primary":\([0-9]*\).*/\1/p')
"$LAB/ceph-cluster" kill-osd "$osd" && "$LAB/ceph-cluster" start-osd "$osd"
SCRIPT
LIMIT=120 ask "$PROGRAM" notify "sh $WORK/disturb"
says "$WORK/out" 'ok heard again' || fail "watches after it"
ok "an OSD killed while a notification waits: $(sed -n 's/^ok notified: //p' "$WORK/out")"

# A key that is taken away.
await 120 "the cluster is clean" is_clean
ceph auth get-or-create client.passing mon 'profile rbd' osd 'allow *' -o "$WORK/passing" >"$WORK/out" 2>&1 || fail "a key"
hammer work env LAB_ID=passing CEPH_KEYRING="$WORK/passing"
ask ceph auth del client.passing
refused() { grep -q 'refuses client.passing\|does not take client.passing' "$WORK/hammer.log"; }
await 90 "the monitors refuse the key" refused
# Tickets that OSDs have taken hold for their sessions; a new session needs a new one.
all_up() { ceph osd stat 2>/dev/null | grep -q '3 up' && is_clean; }
for osd in 0 1 2; do
  says "$SAID" '^error Denied' && break
  ask "$LAB/ceph-cluster" kill-osd $osd
  ask "$LAB/ceph-cluster" start-osd $osd
  await 120 "osd.$osd is back" all_up
done
await 60 "requests without a session are refused" says "$SAID" '^error Denied'
stop_hammer "a key revoked"
ok "a key revoked: $(grep -m 1 '^error Denied' "$SAID")"

# Fenced: the volume reports it; attached again it works as another client.
await 120 "the cluster is clean" is_clean
start_daemon --log-level info
ask "$FOREBAY" create rbd/fenced --size 16M
uri=$("$FOREBAY" attach rbd/fenced --nbd 2>"$WORK/out") || fail "attaching"
write() { limit 60 qemu-io -f raw -c 'write -P 0x41 0 4k' -c flush "$uri" >"$WORK/out" 2>&1 && ! grep -Eiq 'failed|error' "$WORK/out"; }
write || fail "writing"
who=$(rbd status rbd/fenced 2>/dev/null | sed -n 's/.*watcher=\([^ ]*\) .*/\1/p' | head -n 1)
[[ -n $who ]] || fail "who watches the image"
ask ceph osd blocklist add "$who"
# The watch finds out by itself; a request does at once.
shows_fenced() { "$FOREBAY" targets 2>/dev/null | grep -q 'rbd/fenced .*fenced this client'; }
await 60 "the list of exports says that the volume is fenced" shows_fenced
fenced() { ! write; }
await 30 "a fenced client's write fails" fenced
"$FOREBAY" targets --format json >"$WORK/out" 2>&1
says "$WORK/out" 'forebay detach rbd/fenced' || fail "what to do about a fenced volume"
ask "$FOREBAY" detach rbd/fenced
uri=$("$FOREBAY" attach rbd/fenced --nbd 2>"$WORK/out") || fail "attaching again"
write || fail "writing after it was attached again"
shows_fenced && fail "an export that was attached again is shown as fenced"
says "$WORK/daemon.log" 'connecting as a new client' || fail "the daemon does not log that it connects as a new client"
ok "a fenced client's requests fail; a volume that is attached anew is a new client's"
