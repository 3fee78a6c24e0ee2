#!/usr/bin/env bash
# Ceph 18.2 in a cluster of its own: what of our client depends on a release.  Placement with what 16.2 does not know, images
# in turns with that release's rbd, an OSD killed and groups split under writers, both connection modes, keys with few
# rights and keys that are replaced.
#
#   PROGRAM=.../rados-lab RBD_LAB=.../rbd-lab FOREBAY=.../forebay ceph-18.sh
#
# CEPH_RELEASE chooses another release.  With FULL=1, rados.sh and rbd.sh run in whole on it, too.  Prints a line for each
# check.
set -uo pipefail

export CEPH_RELEASE=${CEPH_RELEASE:-18.2}
export EXTRA='osd pool default pg autoscale mode = off
mgr stats period = 1'
NAME=ceph-18; source "$(dirname "$0")/../lab/cluster.sh"
export FOREBAY_DATA=$WORK/nothing

images() { ask "$RBD_LAB" "$@"; }
# Commands of `ceph`, one a line, in one process: each would have its interpreter to start.
batch() {
  limit 90 ceph >"$WORK/out" 2>&1 || fail "commands (status $?)"
  grep -Eq '^Error|invalid command' "$WORK/out" && fail "a command"
  return 0
}

start_cluster
ceph versions >"$WORK/out" 2>&1
grep -A 9 overall "$WORK/out" | grep -q "ceph version $CEPH_RELEASE.*: 5" || fail "five daemons of $CEPH_RELEASE"
lab status || fail "connecting"
grep -q 'osds_up: 3' "$WORK/out" || fail "three OSDs are seen up"
ok "connected to $(ceph version | cut -d' ' -f1-3), client of $(lab status; sed -n 's/.*fsid: "\([^"]*\)".*/\1/p' "$WORK/out" | head -n 1)"

# Placement, with the exceptions of older releases and `pg-upmap-primary`, which 18.2 brought.
batch <<'C'
osd set-require-min-compat-client reef --yes-i-really-mean-it
osd erasure-code-profile set small k=2 m=1 crush-failure-domain=osd
osd pool create maps 32 32
osd pool create coded 8 8 erasure small
osd pool create work 8 8
osd pool set coded allow_ec_overwrites true
C
maps=$(pool_number maps)
# Commands that make the last OSD of each of these groups its primary.
choose() { # POOL GROUP...
  local pool=$1 group
  shift
  "$PROGRAM" groups "$WORK/map" "$pool" >"$WORK/groups"
  for group; do
    awk -v group="$pool.$group" '$1 == group { gsub(/[][]/, "", $2); n = split($2, osd, ","); print "osd pg-upmap-primary", group, osd[n] }' "$WORK/groups"
  done
}
for attempt in 1 2 3; do
  await 60 "the cluster is clean" is_clean
  compare_placement "a fresh cluster"
  cp "$WORK/map" "$WORK/before"
  lab groups "$WORK/before" "$maps" && cp "$WORK/out" "$WORK/placed"
  # Some groups get another primary than they have.
  choose "$maps" 0 5 a 11 1f >"$WORK/chosen"
  limit 90 ceph <"$WORK/chosen" >"$WORK/out" 2>&1
  grep -q 'already primary' "$WORK/out" || break
  # On a busy machine an OSD may have been down for a moment, with its groups elsewhere in that map.
  sed 's/pg-upmap-primary \([^ ]*\).*/rm-pg-upmap-primary \1/' "$WORK/chosen" | limit 90 ceph >/dev/null 2>&1
done
grep -Eq '^Error|invalid command' "$WORK/out" && fail "a command"
compare_placement "chosen primaries"
diff "$WORK/placed" <("$PROGRAM" groups "$WORK/map" "$maps") >"$WORK/out"
[[ $(grep -c '^>' "$WORK/out") == 5 ]] || fail "five groups have another primary"
batch <<C
osd pg-upmap-items $maps.1 0 1 1 2
osd pg-temp $maps.4 2 0
osd primary-affinity 2 0.3
osd reweight 1 0.6
C
compare_placement "with upmaps, temporary placements, affinities and weights"
batch <<C
osd rm-pg-upmap-primary $maps.5
osd reweight 1 1
osd primary-affinity 2 1
C
compare_placement "some of it taken back"
ok "placement groups are where osdmaptool of $CEPH_RELEASE says, with 5 chosen primaries, upmaps, affinities, weights"

# Images in turns with this release's rbd.
same() { # IMAGE FILE
  rm -f "$WORK"/export.*
  ask rbd export --no-progress "$1" "$WORK/export.rbd"
  cmp "$WORK/export.rbd" "$2" >"$WORK/out" 2>&1 || fail "what rbd reads of $1"
  images export "$1" "$WORK/export.ours"
  cmp "$WORK/export.ours" "$2" >"$WORK/out" 2>&1 || fail "what we read of $1"
  ask rbd object-map check --no-progress "$1"
  ask rbd info "$1"
  grep -q invalid "$WORK/out" && fail "the object map of $1"
}
truncate -s 12M "$WORK/one"
images create rbd/one $((12 << 20)) 1048576
images mutate rbd/one "$WORK/one" 1 100
same rbd/one "$WORK/one"
ask rbd snap create --no-progress rbd/one@s; cp "$WORK/one" "$WORK/s"
images mutate rbd/one "$WORK/one" 2 60
same rbd/one "$WORK/one"; same rbd/one@s "$WORK/s"
ask rbd bench --io-type write --io-pattern rand --io-size 4096 --io-total 1M --io-threads 4 rbd/one
rm -f "$WORK/one"
ask rbd export --no-progress rbd/one "$WORK/one"
images resize rbd/one $((9 << 20)); truncate -s 9M "$WORK/one"
same rbd/one "$WORK/one"
ask rbd clone --rbd-default-clone-format 2 rbd/one@s rbd/child; cp "$WORK/s" "$WORK/child"
images mutate rbd/child "$WORK/child" 3 60
same rbd/child "$WORK/child"
ask rbd flatten --no-progress rbd/child
same rbd/child "$WORK/child"
ask rbd create --size 8M --object-size 1M --data-pool coded rbd/coded; truncate -s 8M "$WORK/coded"
images mutate rbd/coded "$WORK/coded" 4 60
same rbd/coded "$WORK/coded"
ask rbd group create rbd/group
ask rbd group image add rbd/group rbd/one
ask rbd group snap create rbd/group@g
images mutate rbd/one "$WORK/one" 5 40
same rbd/one "$WORK/one"
for what in 'info rbd/one' 'info rbd/child' 'ls -l rbd' 'du rbd/child'; do
  # shellcheck disable=SC2086
  ask "$FOREBAY" $what
  cp "$WORK/out" "$WORK/ours"
  # shellcheck disable=SC2086
  peer_reads 60 rbd $what >"$WORK/theirs" 2>/dev/null
  diff "$WORK/theirs" "$WORK/ours" >"$WORK/out" || fail "what both print: $what"
done
images remove rbd/child
images remove rbd/coded
ok "images in turns with its rbd: snapshots, a group's too, a clone, an erasure-coded data pool; both print the same"

# Writers that number what they write, while an OSD is killed and started, groups split and get other primaries.
await 60 "the cluster is clean" is_clean
"$PROGRAM" hammer work "$WORK/stop" >"$WORK/said" 2>"$WORK/hammer.log" </dev/null &
HAMMER=$!
acked() { tac "$WORK/said" 2>/dev/null | sed -n 's/^acked \([0-9]*\) .*/\1/p' | head -n 1; }
has_acked() { [[ $(acked) -gt $1 ]]; }
goes_on() { # WHAT
  local now
  now=$(acked)
  kill -0 "$HAMMER" 2>/dev/null || { cp "$WORK/hammer.log" "$WORK/out"; fail "$1: the writers have ended"; }
  await 60 "$1" has_acked $((${now:-0} + 200))
}
goes_on "writers write"
batch <<'C'
osd pool set work pg_num 16
osd pool set work pgp_num 16
C
split() { [[ $(ceph osd pool get work pg_num -f json 2>/dev/null | jq .pg_num) == 16 ]] && is_clean; }
await 120 "groups have split" split
goes_on "groups that split"
ask "$LAB/ceph-cluster" kill-osd 1
goes_on "an OSD killed"
ask "$LAB/ceph-cluster" start-osd 1
await 120 "it is back" is_clean
work=$(pool_number work)
ask ceph osd getmap -o "$WORK/map"
choose "$work" 0 1 2 3 | batch
goes_on "groups with other primaries"
touch "$WORK/stop"
ended() { ! kill -0 "$HAMMER" 2>/dev/null; }
await 60 "the writers end" ended
wait "$HAMMER" || { cat "$WORK/said" "$WORK/hammer.log" | tail -n 20 >"$WORK/out"; fail "the writers"; }
grep -q '^error' "$WORK/said" && fail "an error came to the writers"
grep -q '^verified' "$WORK/said" || fail "the writers have not verified"
ok "an OSD killed and started, groups split and given other primaries: $(acked) writes acknowledged, none lost"

# Both connection modes, and OSDs that take one of them.
crc=$(conf_with crc '[client]' 'ms client mode = crc' 'ms mon client mode = crc')
secure=$(conf_with secure '[client]' 'ms client mode = secure')
CEPH_CONF=$crc images mutate rbd/one "$WORK/one" 6 60
CEPH_CONF=$secure images mutate rbd/one "$WORK/one" 7 60
same rbd/one "$WORK/one"
ask ceph config set osd ms_service_mode secure
refuses() { ! CEPH_CONF=$crc limit 20 "$FOREBAY" ls rbd; }
await 30 "OSDs take secure mode only" refuses
grep -q 'accepts connections in mode secure only, and this client offers crc only' "$WORK/out" || fail "why a list fails"
lab status || fail "a client that offers both"
ask ceph config rm osd ms_service_mode
ok "crc and secure mode; a client with crc alone is told that OSDs take secure only"

# A key for one pool, and one that is replaced while it is in use.
ask ceph auth get-or-create client.vol mon 'profile rbd' osd 'profile rbd pool=rbd' -o "$WORK/keyring"
ask "$FOREBAY" ls rbd --id vol --keyring "$WORK/keyring"
limit 60 "$FOREBAY" ls maps --id vol --keyring "$WORK/keyring" >"$WORK/out" 2>&1
[[ $? == 10 ]] || fail "a pool that the key does not allow"
ask ceph auth get-or-create-pending client.vol -f json
printf '[client.vol]\n\tkey = %s\n' "$(jq -r '.[0].pending_key' "$WORK/out")" >"$WORK/pending"
ask "$FOREBAY" ls rbd --id vol --keyring "$WORK/pending"
gone() { ! "$FOREBAY" ls rbd --id vol --keyring "$WORK/keyring" && grep -q 'refuses client.vol' "$WORK/out"; }
await 30 "the key before is refused" gone
ask "$FOREBAY" create rbd/rotated --size 1M --id vol --keyring "$WORK/pending"
ok "a key for one pool, and one that was replaced by its successor"

if [[ ${FULL:-0} == 1 ]]; then
  "$LAB/ceph-cluster" down >/dev/null 2>&1
  unset EXTRA FOREBAY_DATA
  SEEDS=1 bash "$(dirname "$0")/rados.sh" || exit 1
  PROGRAM=$RBD_LAB bash "$(dirname "$0")/rbd.sh" || exit 1
fi
