#!/usr/bin/env bash
# Our RADOS client against a real cluster of its own: maps, what every object backend must do, failures.
#
#   PROGRAM=.../rados-lab rados.sh
#
# Prints a line for each check.
set -uo pipefail

NAME=rados; source "$(dirname "$0")/../lab/cluster.sh"

compare() { compare_placement "$1"; ok "$1: placement groups are where osdmaptool says"; }

start_cluster
lab status || fail "connecting"
grep -q 'osds_up: 3' "$WORK/out" || fail "three OSDs are seen up"
ok "connected"

# Maps: everything that makes a placement an exception.
ask ceph osd pool create maps 64 64
ask ceph osd erasure-code-profile set small k=2 m=1 crush-failure-domain=osd
ask ceph osd pool create coded 32 32 erasure small
ask ceph osd set-require-min-compat-client luminous --yes-i-really-mean-it
compare "a fresh cluster"
POOL=$(pool_number maps)
ask ceph osd reweight 1 0.4
ask ceph osd primary-affinity 0 0.3
ask ceph osd primary-affinity 2 0
compare "weights and affinities"
for seed in 1 2 3; do ask ceph osd pg-upmap-items "$POOL.$seed" 0 1 1 2; done
ask ceph osd pg-upmap "$POOL.5" 2 1
ask ceph osd pg-temp "$POOL.6" 2 0
ask ceph osd primary-temp "$POOL.7" 1
ask ceph osd crush weight-set create-compat
ask ceph osd crush weight-set reweight-compat osd.0 0.3
compare "exceptions and weight sets"
for i in $(seq 40); do echo "object.$i-$RANDOM$RANDOM"; done >"$WORK/names"
"$PROGRAM" objects "$WORK/map" "$POOL" <"$WORK/names" >"$WORK/ours" 2>"$WORK/out" || fail "names of objects"
while read -r name _ pg _ _ acting _; do
  osdmaptool "$WORK/map" --test-map-object "$name" --pool "$POOL" 2>/dev/null | grep -qF "$pg -> $acting" || fail "object $name is elsewhere"
done <"$WORK/ours"
ok "40 objects are where osdmaptool says"
ask ceph osd crush weight-set rm-compat
ask ceph osd reweight 1 1
ask ceph osd primary-affinity 0 1
ask ceph osd primary-affinity 2 1

LIMIT=300 lab conformance || fail "what every object backend must do"
ok "$(grep -c '^case' "$WORK/out") cases of what every object backend must do"
for seed in ${SEEDS:-1 2 3 4}; do lab steps "$seed" || fail "random steps of seed $seed"; done
ok "random steps as in memory"

# Two clients that share a pool; the OSD that has their object is killed and started meanwhile.
cat >"$WORK/disturb" <<'SCRIPT'
osd=$(ceph osd map shared header -f json 2>/dev/null | sed -n 's/.*acting_primary":\([0-9]*\).*/\1/p')
[ -n "$osd" ] || { echo "no OSD has the object"; exit 1; }
"$LAB/ceph-cluster" kill-osd "$osd" && "$LAB/ceph-cluster" start-osd "$osd"
SCRIPT
lab shared "bash $WORK/disturb" || fail "two clients that share a pool"
grep -q 'ok watches are taken up again' "$WORK/out" || fail "watches are taken up again"
sed -n 's/^ok /ok rados: /p' "$WORK/out"

# Extended attributes, in turns with rados.
echo content >"$WORK/content"
ask rados -p rbd put attributed "$WORK/content"
ask rados -p rbd setxattr attributed theirs 'of rados'
lab attrs rbd || fail "extended attributes"
[[ $(rados -p rbd getxattr attributed ours) == 'of forebay' ]] || fail "an attribute that rados reads"
[[ $(rados -p rbd listxattr attributed | sort | tr '\n' ' ') == 'empty new ours theirs ' ]] || fail "attributes that rados lists"
ask rados -p rbd rm attributed
ok "extended attributes, in turns with rados"

# Advice about what will become of bytes reaches the OSDs with the operations on them, and with no others.
for osd in 0 1 2; do
  ask ceph daemon "$CLUSTER_DIR/run/osd.$osd.asok" config set osd_op_history_size 1000
done
lab advice rbd || fail "requests with advice"
seen() { # OBJECT ALTERNATIVE...: an OSD had requests for this object with each
  local object=$1 one
  shift
  for one in "$@"; do grep -F ":::advised-$object:head [" "$WORK/history" | grep -qF "$one" || return 1; done
}
history_has_all() {
  local osd
  for osd in 0 1 2; do ceph daemon "$CLUSTER_DIR/run/osd.$osd.asok" dump_historic_ops; done >"$WORK/history" 2>/dev/null
  local name words
  # Pacific spells one of them wrongly.
  for name in random:fadvise_random sequential:fadvise_sequential willneed:favise_willneed dontneed:fadvise_dontneed \
    nocache:fadvise_nocache onepass:fadvise_sequential+fadvise_nocache; do
    words=${name#*:}
    seen "${name%%:*}" "[write 0~131072 [$words]]" "zero 4096~4096 [$words]]" \
      "[read 0~4096 [$words]]" "[stat]" || return 1
    grep -F ":::advised-${name%%:*}:head [sparse-read" "$WORK/history" | grep -qF "[$words]]" || return 1
  done
}
await 20 "every kind of advice is seen at the OSDs" history_has_all
ok "six kinds of advice are with the operations on bytes, as OSDs saw them"

# Cache tiers.  One for reading only answers writes with a redirect to the pool behind it; one that writes back takes them,
# and clients find it by the map.
ask ceph osd pool create behind 8 8
ask ceph osd pool create hot 8 8
ask ceph osd tier add behind hot
ask ceph osd tier cache-mode hot readonly --yes-i-really-mean-it
ask ceph osd tier set-overlay behind hot
RUST_LOG=forebay_rados=debug lab tier behind "ceph osd tier remove-overlay behind" || fail "writes through a tier for reading"
grep -q 'a request is redirected' "$WORK/out" || fail "no request was redirected"
[[ $(rados -p behind --all ls | wc -l) == 8 && -z $(rados -p hot --all ls) ]] || fail "where redirected writes went"
ok "$(grep -c 'a request is redirected' "$WORK/out") redirects followed: $(sed -n 's/^ok //p' "$WORK/out" | tr '\n' ' ')"
ask ceph osd tier cache-mode hot writeback
ask ceph osd pool set hot hit_set_type bloom
ask ceph osd tier set-overlay behind hot
cat >"$WORK/flush" <<'SCRIPT'
[ "$(rados -p hot --all ls | wc -l)" = 8 ] || { echo "the writes are not in the tier"; exit 1; }
ceph osd tier cache-mode hot proxy && rados -p hot cache-flush-evict-all && ceph osd tier remove-overlay behind
SCRIPT
lab tier behind "sh $WORK/flush" || fail "writes to a tier that writes back"
ok "a tier that writes back: $(sed -n 's/^ok //p' "$WORK/out" | tr '\n' ' ')"

# Who is refused, and how.
ceph-authtool "$CLUSTER_DIR/wrong" -C -n client.admin --add-key AQAAAAAAAAAAABAABwcHBwcHBwcHBwcHBwcHBw== >/dev/null 2>&1
CEPH_KEYRING=$CLUSTER_DIR/wrong lab status && fail "a wrong key was taken"
grep -q 'refuses client.admin' "$WORK/out" || fail "a wrong key has no reason"
LAB_ID=nobody lab status && fail "somebody without a key was taken"
grep -q 'no key for client.nobody' "$WORK/out" || fail "no key has no reason"
ok "who has no key is told so"
