#!/usr/bin/env bash
# Debian migrates under a verified load from one QEMU to another and back.  Two daemons of a gateway group in front of a Ceph
# cluster serve its disk, each QEMU at a socket of its own daemon; daemons are killed while the guest runs.
#
#   FOREBAY=.../forebay guest-vhost-migrate-group.sh      ROUNDS=2: number of migrations
#
# Runs here, starts the cluster, the daemons and the guests.  Prints a line for each check.
set -uo pipefail
NAME=vhost-migrate-group POOL=rados BACKEND=forebay
# shellcheck source=test/interop/vhost.sh
source "$(dirname "$0")/vhost.sh"
# shellcheck source=test/interop/vhost-migrate.sh
source "$(dirname "$0")/vhost-migrate.sh"
QUEUES=2 IMAGE=$(image debian) ROUNDS=${ROUNDS:-2} PEERS=$((12000 + RANDOM % 10000)) GUEST_TIMEOUT=900

declare -A MEMBERS
# Each daemon has a host name of its own, by which the group shows it.
start_member() { # NAME
  mkdir -p "$WORK/$1"
  unshare --uts bash -c 'hostname "$1"; shift; exec "$@"' _ "$1" "$FOREBAY" serve --data "$WORK/$1" --control "$WORK/$1/control.sock" \
    --store-size 64M --group rbd/gw --peer "127.0.0.1:$((PEERS + ${1#g}))" >>"$WORK/$1.log" 2>&1 &
  MEMBERS[$1]=$!
  await 60 "the daemon $1 is ready" "$FOREBAY" --control "$WORK/$1/control.sock" status
}
kill_member() { # NAME
  kill -9 "${MEMBERS[$1]}"
  wait "${MEMBERS[$1]}" 2>/dev/null
}
at() { local name=$1; shift; ask "$FOREBAY" --control "$WORK/$name/control.sock" "$@"; }
at_not() {
  local name=$1; shift
  limit 90 "$FOREBAY" --control "$WORK/$name/control.sock" "$@" >"$WORK/out" 2>&1 </dev/null && fail "$* must be refused"
}
status() { limit 30 "$FOREBAY" --control "$WORK/$1/control.sock" --format json group status >"$WORK/status.json"; }
of_status() { jq -r "$1" "$WORK/status.json"; }
members() { status "$1" && [[ $(of_status '[.members[] | select(.state == "active")] | length') == "$2" ]]; }
owner() { status "$1" && of_status ".volumes[] | select(.image == \"$IMAGE\") | .owner"; }
is_owner() { [[ $(owner "$1") == "$2" ]]; }
# Prints the number of monitors that are connected at a member; fails if the image is not served there.
monitors() {
  limit 30 "$FOREBAY" --control "$WORK/$1/control.sock" --format json targets |
    jq -e '.[] | select(.front == "vhost" and .uri != null) | .connections'
}
has_monitors() { [[ $(monitors "$1") == "$2" ]]; }
socket_of() { echo "$WORK/$1/debian.sock"; }
other() { if [[ $1 == g1 ]]; then echo g2; else echo g1; fi; }
logs() {
  local log
  [[ $status == 0 ]] && return
  for log in "$WORK"/g?.log; do echo "$log:"; tail -n 25 "$log"; done | sed 's/^/  /'
}
AT_END+=(logs)

root=$("$LAB/debian-image") || fail "no image of Debian"
start_cluster
ask "$FOREBAY" group create rbd/gw --gateways --lease 2s
for name in g1 g2; do start_member $name; done
for name in g1 g2; do await 30 "two members" members $name 2; done
# Commands without a socket of their own speak to this one.
export FOREBAY_DATA=$WORK/g1 FOREBAY_CONTROL=$WORK/g1/control.sock
import "$root" "$IMAGE"
at_not g1 attach "$IMAGE" --vhost "$WORK/missing/debian.sock"
status g1
[[ $(of_status '.volumes | length') == 0 ]] || fail "an export without a socket stays in the group"
at g1 attach "$IMAGE" --vhost "$(socket_of g1)" --queues $QUEUES
at_not g2 detach "$IMAGE" --vhost
at_not g1 group leave
at g2 attach "$IMAGE" --vhost "$(socket_of g2)" --queues $QUEUES
await 30 "the socket of each member" test -S "$(socket_of g1)" -a -S "$(socket_of g2)"
ok "exported at two members, at a socket each"

host=g1
start_host 0 "$(socket_of $host)"
until_guest 300 "$CONSOLE" "step round 2"
for ((round = 1; round <= ROUNDS; round++)); do
  to=$(other $host)
  migrate "$round" "$(socket_of "$to")"
  has_monitors "$host" 0 || fail "no QEMU is connected to $host any more"
  at_not "$to" detach "$IMAGE" --vhost
  at "$host" detach "$IMAGE" --vhost
  [[ ! -e $(socket_of "$host") ]] || fail "the socket of $host is still there"
  former=$host host=$to
  goes_on 1
  ok "detached at $former: the guest goes on at $host"

  if [[ $(owner "$host") == "$host" ]]; then
    at "$host" group drain
    await 30 "the volume moves" is_owner "$host" "$former"
    at "$host" group drain --undo
    goes_on 1
    ok "its volume has moved to $former, and the guest goes on"
  fi
  kill_member "$former"
  await 60 "the volume has another owner" is_owner "$host" "$host"
  goes_on 1
  ok "the owner of its volume was killed: the guest goes on at $host, the next owner"
  start_member "$former"
  await 60 "two members again" members "$host" 2
  at "$former" attach "$IMAGE" --vhost "$(socket_of "$former")" --queues $QUEUES
  kill_member "$host"
  await 60 "the volume has another owner" is_owner "$former" "$former"
  start_member "$host"
  await 60 "two members again" members "$former" 2
  await 60 "QEMU has connected again" has_monitors "$host" 1
  goes_on 2
  ok "the daemon of the guest was killed, and is a member again: the guest goes on"
done
resize "$IMAGE" 1280M
await_guest
await 30 "no QEMU is connected" has_monitors "$host" 0
for name in g1 g2; do at $name detach "$IMAGE" --vhost; done
status g1
[[ $(of_status '.volumes | length') == 0 ]] || fail "the volume is still in the group"
look_at_left "$IMAGE" 1280
for name in g1 g2; do
  kill -TERM "${MEMBERS[$name]}"
  wait "${MEMBERS[$name]}" || fail "the daemon $name has ended with $?"
done
ok "both daemons have stopped"
