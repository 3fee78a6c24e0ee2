#!/usr/bin/env bash
# Reservations of one image of a Ceph cluster that two daemons serve over NVMe/TCP, with the project's initiator.
#
#   FOREBAY=.../forebay PROGRAM=.../nvme-two nvme-two.sh
#
# Prints a line for each check.
set -uo pipefail

NAME=nvme-two; source "$(dirname "$0")/../lab/cluster.sh"

UUID=6f1a3b52-0000-4000-8000-5d7c21f0a002
NQN=nqn.2014-08.org.example:two-daemons
declare -A PIDS URIS
start() { # NAME FIRST-CONTROLLER
  local name=$1 first=$2
  printf "[nvme-subsystem]\nnqn = '%s'\nfirst-controller = %s\nlast-controller = %s\n" "$NQN" "$first" $((first + 999)) >"$WORK/$name.toml"
  mkdir -p "$WORK/$name"
  "$FOREBAY" serve --data "$WORK/$name" --store-size 256M --config "$WORK/$name.toml" --nvme 127.0.0.1:0 >>"$WORK/daemon.log" 2>&1 &
  PIDS[$name]=$!
  await 60 "the daemon $name is ready" "$FOREBAY" --control "$WORK/$name/control.sock" status
}
control() { local name=$1; shift; limit 90 "$FOREBAY" --control "$WORK/$name/control.sock" "$@"; }
attach() {
  URIS[$1]=$(control "$1" attach rbd/two --nvme --nsid 1 --uuid $UUID 2>"$WORK/out") || fail "attaching at $1"
}
# A restarted daemon prints it: exports are served again, at another port.
again() { URIS[$1]=$(control "$1" --format json targets 2>"$WORK/out" | jq -r '.. | .uri? // empty' | head -n 1); [[ -n ${URIS[$1]} ]]; }
crash() { local name; for name; do kill -9 "${PIDS[$name]}"; wait "${PIDS[$name]}" 2>/dev/null; done; }

start_cluster
ask ceph config set osd osd_client_watch_timeout 6
start first 1
start second 1001
ask "$FOREBAY" --control "$WORK/first/control.sock" create rbd/two --size 64M
attach first; attach second
ok "two daemons serve one image"

ask "$PROGRAM" take "${URIS[first]}" "${URIS[second]}" --rounds "${ROUNDS:-12}"
sed "s/^ok /ok $NAME: /" "$WORK/out"

ask "$PROGRAM" held "${URIS[first]}"; ask "$PROGRAM" held "${URIS[second]}"
for name in first second; do control $name --format json reservations ls rbd/two >"$WORK/$name.json" || fail "reservations ls"; done
cmp -s "$WORK/first.json" "$WORK/second.json" || fail "both daemons show the same"
ok "both show the same registrants"

crash first
ask "$PROGRAM" held "${URIS[second]}"
start first 1
await 60 "the export is back" again first
ask "$PROGRAM" held "${URIS[first]}"
ok "a daemon that was killed goes by what the other knows"

crash first second
start first 1
await 60 "the export is back" again first
ask "$PROGRAM" free "${URIS[first]}"
start second 1001
await 60 "the export is back" again second
ask "$PROGRAM" free "${URIS[second]}"
ok "what is not persistent is gone when all daemons have been killed"

ask "$PROGRAM" take "${URIS[second]}" "${URIS[first]}" --rounds 2
control first reservations clear rbd/two >"$WORK/out" 2>&1 || fail "reservations clear"
ask "$PROGRAM" free "${URIS[second]}"
ok "reservations that are cleared at one daemon are cleared at the other"
