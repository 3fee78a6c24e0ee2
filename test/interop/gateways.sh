#!/usr/bin/env bash
# A gateway group of three daemons in front of a Ceph cluster: volumes that are attached once and served by all, members
# that are killed, drained, stopped and cut off under a verifying load.
#
#   FOREBAY=.../forebay PROGRAM=.../nvme-two gateways.sh
#
# Prints a line for each check.  ROUNDS: kills under load.  VOLUMES: number of volumes of a member that is killed at the end.
set -uo pipefail

NAME=gateways; source "$(dirname "$0")/../lab/cluster.sh"

declare -A PIDS
# Each daemon has a host name of its own, by which the group shows it.
start() { # NAME [OPTION...]
  local name=$1; shift
  mkdir -p "$WORK/$name"
  printf "[replicas]\npath = '%s'\nquota = '96M'\n" "$WORK/$name/replicas" >"$WORK/$name/forebay.toml"
  unshare --uts bash -c 'hostname "$1"; shift; exec "$@"' _ "$name" "$FOREBAY" serve --data "$WORK/$name" --store-size 64M \
    --nbd "127.0.0.1:$((21000 + ${name#g}))" --nvme "127.0.0.1:$((22000 + ${name#g}))" --peer "127.0.0.1:$((23000 + ${name#g}))" \
    --iscsi "127.0.0.1:$((24000 + ${name#g}))" --config "$WORK/$name/forebay.toml" \
    "$@" >>"$WORK/$name.log" 2>&1 &
  PIDS[$name]=$!
  await 60 "the daemon $name is ready" "$FOREBAY" --control "$WORK/$name/control.sock" status
}
control() { local name=$1; shift; limit 90 "$FOREBAY" --control "$WORK/$name/control.sock" "$@"; }
at() { local name=$1; shift; ask "$FOREBAY" --control "$WORK/$name/control.sock" "$@"; }
ask_not() { limit 90 "$@" >"$WORK/out" 2>&1 </dev/null && fail "$* must be refused"; }
at_not() { local name=$1; shift; ask_not "$FOREBAY" --control "$WORK/$name/control.sock" "$@"; }
status() { control "$1" --format json group status >"$WORK/status.json" 2>"$WORK/out"; }
of_status() { jq -r "$1" "$WORK/status.json"; }
# members NAME COUNT: that many serve, as NAME sees it, and all volumes have owners among them.
members() { status "$1" && [[ $(of_status '[.members[] | select(.state == "active")] | length') == "$2" ]]; }
connected() { status "$1" && [[ $(of_status '[.members[] | select(.connected)] | length') == "$2" ]]; }
owner() { status "$1" && of_status ".volumes[] | select(.image == \"$2\") | .owner"; }
owned_elsewhere() { local is; is=$(owner "$1" "$2") && [[ -n $is && $is != "$3" ]]; }
owns_nothing() { status "$1" && [[ $(of_status ".members[] | select(.host == \"$2\") | .volumes") == 0 ]]; }
served() { [[ $(control "$1" --format json targets 2>/dev/null | jq "[.[] | select(.uri != null)] | length") == "$2" ]]; }
nbd() { echo "nbd://127.0.0.1:$((21000 + ${1#g}))/rbd/$2"; }
io() { ask qemu-io -f raw "$@"; }

# The end of each daemon's log, if a check fails.
logs() {
  local log
  [[ $status == 0 ]] && return
  for log in "$WORK"/g*.log; do echo "$log:"; tail -n 12 "$log"; done | sed 's/^/  /'
}
AT_END+=(logs)

start_cluster
for image in a b c; do ask "$FOREBAY" create rbd/$image --size 64M; done
ask "$FOREBAY" group create rbd/gw --gateways --lease 1s
ask "$FOREBAY" --format json group status rbd/gw
[[ $(jq -c '[.lease_ms, .members, .volumes]' "$WORK/out") == '[1000,[],[]]' ]] || fail "a new group is empty"
ask_not "$FOREBAY" group create rbd/gw --gateways
ok "a group is made without a daemon, once"

for name in g1 g2 g3; do start $name --group rbd/gw; done
for name in g1 g2 g3; do
  await 30 "three members" members $name 3
  await 30 "$name reaches the others" connected $name 2
done
ok "three daemons are members, and know each other"

at g1 attach rbd/a --nbd; at g2 attach rbd/b --nbd; at g3 attach rbd/c --nvme; at g1 attach rbd/b --iscsi
for name in g1 g2 g3; do await 30 "all volumes at $name" served $name 4; done
ok "what one member attaches, all serve"

io -c 'write -P 1 0 1M' "$(nbd g1 a)"
io -c 'read -P 1 0 1M' -c 'write -P 2 512k 1M' "$(nbd g2 a)"
io -c 'read -P 1 0 512k' -c 'read -P 2 512k 1M' -c 'discard 0 64k' -c 'read -P 0 0 64k' "$(nbd g3 a)"
at g2 resize rbd/a --size 96M
grown() { [[ $(limit 20 qemu-img info --output json "$(nbd "$1" a)" | jq '."virtual-size"') == $((96 << 20)) ]]; }
for name in g1 g2 g3; do await 20 "the new size at $name" grown $name; done
uri() { control "$1" --format json targets | jq -r ".[] | select(.front == \"$2\") | .uri"; }
for name in g1 g2 g3; do
  await 20 "the LUN at $name" limit 20 iscsi-inq "$(uri $name iscsi)"
done
status g1; ask iscsi-ls iscsi://127.0.0.1:24002
[[ $(grep "^Target:$(of_status .target) " "$WORK/out" | cut -d, -f2 | sort | xargs) == "1 2 3" ]] || fail "SendTargets lists three portals, each in a group of its own"
[[ $(grep '^Target:' "$WORK/out" | cut -d' ' -f1 | sort -u | wc -l) == 1 ]] || fail "the daemon's own empty target is not listed"
io -c 'write -P 5 0 1M' "$(uri g1 iscsi)"
io -c 'read -P 5 0 1M' "$(uri g3 iscsi)"
io -c 'read -P 5 0 1M' "$(nbd g2 b)"
ok "every path reads and writes the same volume, and sees its size"

ask "$PROGRAM" take "$(uri g1 nvme)" "$(uri g2 nvme)" --rounds 3
ask "$PROGRAM" held "$(uri g1 nvme)"; ask "$PROGRAM" held "$(uri g3 nvme)"
at g3 reservations clear rbd/c || fail "reservations clear"
ok "reservations apply at all members, whichever owns the volume"

# Hosts that the group lists are admitted by all members.
NQN=$(of_status .nqn); IQN=$(of_status .target); HOST=iqn.2000-01.org.host
finds() { limit 20 iscsi-inq -i "$HOST:$2" "$(uri "$1" iscsi)" >"$WORK/out" 2>&1; }
joins() { limit 20 "$PROGRAM" free "$(uri "$1" nvme)" >"$WORK/out" 2>&1; }
for name in g1 g2 g3; do finds $name other && joins $name || fail "$name admits all hosts"; done
at_not g1 group set --hosts group
at g1 iscsi-target allow $HOST:listed --target "$IQN"
at g2 nvme-subsystem allow nqn.2000-01.org.host:listed --subsystem "$NQN"
at g3 group set --hosts group
admits() { finds "$1" listed && ! finds "$1" other && ! joins "$1"; }
for name in g1 g2 g3; do await 20 "$name admits the listed hosts only" admits $name; done
at g2 --format json nvme-subsystem ls
[[ $(jq -c ".[] | select(.nqn == \"$NQN\") | [.any_host, .hosts[].nqn]" "$WORK/out") == '[false,"nqn.2000-01.org.host:listed"]' ]] || fail "a member shows the listed hosts"
at g3 iscsi-target deny $HOST:listed --target "$IQN"
refuses() { ! finds "$1" listed; }
for name in g1 g2 g3; do await 20 "$name does not admit the host any more" refuses $name; done
at_not g1 iscsi-target deny $HOST:listed --target "$IQN"
at_not g1 nvme-subsystem rm "$NQN"
at g1 group set --hosts members
everyone() { finds "$1" other && joins "$1"; }
for name in g1 g2 g3; do await 20 "$name admits all hosts again" everyone $name; done
ok "hosts that the group lists are admitted at all members, and no others"

load() { # IMAGE MEMBER SECONDS
  limit 120 fio --name load --ioengine nbd --uri "$(nbd "$2" "$1")" --rw randwrite --bs 4k --iodepth 8 --size 32M --time_based \
    --runtime "$3" --verify crc32c --verify_fatal 1 --verify_backlog 256 --verify_state_save 0 --output-format json \
    >"$WORK/load.json" 2>"$WORK/load.err"
}
# longest: longest latency of a request in ms.
longest() { sed -n '/^{/,$p' "$WORK/load.json" | jq '[.jobs[] | .write, .read | .clat_ns.max] | max / 1e6 | floor'; }

for ((round = 1; round <= ${ROUNDS:-3}; round++)); do
  victim=$(owner g1 rbd/a) || fail "the owner of rbd/a"
  path=g1; [[ $victim == g1 ]] && path=g2
  load a $path 8 & loading=$!
  sleep 2
  kill -9 "${PIDS[$victim]}"; wait "${PIDS[$victim]}" 2>/dev/null
  await 20 "rbd/a has another owner" owned_elsewhere $path rbd/a "$victim"
  wait $loading || { cat "$WORK/load.err" "$WORK/load.json" >"$WORK/out"; fail "the load goes on at $path after $victim was killed"; }
  printf 'pause %s ms after the kill of an owner\n' "$(longest)" >>"$WORK/pauses"
  start "$victim" --group rbd/gw
  # Before it is a member again, or has opened a volume.
  status $path; ask iscsi-ls "iscsi://127.0.0.1:$((24000 + ${victim#g}))"
  grep -q "^Target:$(of_status .target) " "$WORK/out" || fail "hosts find the target at $victim as soon as it listens"
  await 60 "$victim is a member again" members $path 3
  for name in g1 g2 g3; do await 30 "all volumes at $name" served $name 4; done
done
ok "owners that are killed under load: $(sort -V "$WORK/pauses" | tr '\n' ';')"

victim=$(owner g1 rbd/a); path=g1; [[ $victim == g1 ]] && path=g2
load a $path 8 & loading=$!
sleep 2
at $path group drain "$victim"
await 30 "$victim has no volumes" owns_nothing $path "$victim"
wait $loading || { cat "$WORK/load.err" "$WORK/load.json" >"$WORK/out"; fail "the load goes on while $victim is drained"; }
ok "a member is drained under load: a pause of $(longest) ms"
at $path group drain "$victim" --undo
await 20 "it takes volumes again" members $path 3
at $path group rebalance

# A member that is to have nothing gives its volumes away under load, and gets some again when it is to have most.
victim=$(owner $path rbd/a); path=g1; [[ $victim == g1 ]] && path=g2
load a $path 6 & loading=$!
sleep 3
measured() { status "$1" && [[ $(of_status ".members[] | select(.host == \"$2\") | .load.requests_per_s > 10") == true ]]; }
await 20 "the load of $victim is known at $path" measured $path "$victim"
at $path group set-weight 0 "$victim"
at $path --format json group rebalance --dry-run
[[ $(jq -c "[.[] | select(.volume == \"rbd/a\") | .from, .state, (.load.requests_per_s > 10)]" "$WORK/out") == "[\"$victim\",\"planned\",true]" ]] || fail "rebalance --dry-run plans to move rbd/a with its load"
[[ $(owner $path rbd/a) == "$victim" ]] || fail "rebalance --dry-run moves nothing"
at $path --format json group rebalance
[[ $(jq -c '[.[].state] | unique' "$WORK/out") == '["moved"]' ]] || fail "rebalance moves the volumes of $victim"
owns_nothing $path "$victim" || fail "$victim gives all volumes away"
wait $loading || { cat "$WORK/load.err" "$WORK/load.json" >"$WORK/out"; fail "the load goes on while volumes are rebalanced"; }
ok "volumes are rebalanced under load: a pause of $(longest) ms"
at $path group set-weight 100 "$victim"
at $path group set --rebalance on
status $path; [[ $(of_status '[.rebalance, ([.members[].weight] | unique)] | tostring') == '[true,[100]]' ]] || fail "policy and weights in the status"
at $path group set --rebalance off
path=g1; [[ $(owner g1 rbd/a) == g1 ]] && path=g2

load a $path 8 & loading=$!
sleep 2
victim=$(owner $path rbd/a)
if [[ $victim != "$path" ]]; then
  kill -TERM "${PIDS[$victim]}"; wait "${PIDS[$victim]}"
  await 10 "another one has rbd/a" owned_elsewhere $path rbd/a "$victim"
fi
wait $loading || { cat "$WORK/load.err" "$WORK/load.json" >"$WORK/out"; fail "the load goes on while $victim stops"; }
ok "a member is stopped in order under load: a pause of $(longest) ms"
[[ $victim != "$path" ]] && start "$victim" --group rbd/gw
await 30 "three members" members $path 3

victim=$(owner $path rbd/a); kill -STOP "${PIDS[$victim]}"
path=g1; [[ $victim == g1 ]] && path=g2
await 20 "a suspended owner loses rbd/a" owned_elsewhere $path rbd/a "$victim"
io -c 'write -P 9 0 1M' "$(nbd $path a)"
kill -CONT "${PIDS[$victim]}"
await 30 "it joins again as another client" members "$victim" 3
await 30 "and serves again" served "$victim" 4
io -c 'read -P 9 0 1M' "$(nbd "$victim" a)"
ok "a suspended member is fenced, and joins again by itself"

# A volume with a write log: what its owner has acknowledged is at another member as well.
ask "$FOREBAY" create rbd/d --size 64M
at_not g1 attach rbd/d --nbd --log "ssd:$WORK/log:16M"
at_not g1 attach rbd/d --nbd --log ssd:1G
at_not g1 attach rbd/d --nbd --log ssd:32M --replicas 3
at g1 attach rbd/d --nbd --log ssd:32M --replicas 1
of_d() { status "$1" && of_status ".volumes[] | select(.image == \"rbd/d\") | $2"; }
copies() { [[ $(of_d "$1" '.log.copies | length') == "$2" && -n $(owner "$1" rbd/d) ]]; }
for name in g1 g2 g3; do await 20 "rbd/d at $name" served $name 5; done
await 20 "two complete copies" copies g1 2
holder() { of_d "$1" '.owner as $owner | .log.copies[] | select(. != $owner)' | head -n 1; }
at_not "$(holder g1)" log takeover rbd/d --force; at_not "$(holder g1)" log discard rbd/d
ok "a volume gets a write log with two copies, at members with space, and commands leave it to the group"

beside() { local name; for name in g1 g2 g3; do [[ $name == "$1" || $name == "$2" ]] || break; done; echo "$name"; }
verified() { wait "$1" || { cat "$WORK/load.err" "$WORK/load.json" >"$WORK/out"; fail "the load of rbd/d goes on: $2"; }; }
victim=$(owner g1 rbd/d); next=$(holder g1); path=$(beside "$victim" "$next")
load d "$path" 6 & loading=$!
sleep 2
kill -9 "${PIDS[$victim]}"; wait "${PIDS[$victim]}" 2>/dev/null
await 20 "rbd/d has another owner" owned_elsewhere "$path" rbd/d "$victim"
verified $loading "its owner $victim was killed"
[[ $(owner "$path" rbd/d) == "$next" ]] || fail "$next has the copy, and is the owner"
pauses="$(longest) ms after the kill of its owner"
start "$victim" --group rbd/gw
await 60 "$victim is a member again" members "$path" 3
await 30 "two copies again" copies "$path" 2

victim=$(owner g1 rbd/d); path=$(beside "$victim" "$(holder g1)")
load d "$path" 6 & loading=$!
sleep 2
at "$path" group drain "$victim"
await 30 "$victim does not own rbd/d" owned_elsewhere "$path" rbd/d "$victim"
verified $loading "$victim is drained"
pauses+=", $(longest) ms as it moves"
at "$path" group drain "$victim" --undo
await 30 "two copies again" copies "$path" 2

victim=$(holder g1); path=$(beside "$victim" "$victim")
load d "$path" 6 & loading=$!
sleep 2
kill -9 "${PIDS[$victim]}"; wait "${PIDS[$victim]}" 2>/dev/null
verified $loading "its copy at $victim is lost"
pauses+=", $(longest) ms after the kill of a copy"
copied_elsewhere() { copies "$1" 2 && [[ $(holder "$1") != "$2" ]]; }
await 30 "a copy at another member" copied_elsewhere "$path" "$victim"
start "$victim" --group rbd/gw
await 60 "$victim is a member again" members "$path" 3
ok "a volume with a write log goes on: $pauses"

io -c 'write -P 7 0 1M' "$(nbd g2 d)"
at g1 detach rbd/d --nbd
at g2 attach rbd/d --nbd
[[ $(of_d g2 .log) == null ]] || fail "rbd/d has no log any more"
io -c 'read -P 7 0 1M' "$(nbd g3 d)"
at g3 detach rbd/d --nbd
no_copies() { control "$1" --format json log ls >"$WORK/out" && [[ $(jq length "$WORK/out") == 0 ]]; }
for name in g1 g2 g3; do await 40 "no copy of its log at $name" no_copies $name; done
ok "its log is written back and discarded with its last export"

at g1 detach rbd/a --nbd; at g2 detach rbd/b --nbd; at g3 detach rbd/c --nvme; at g3 detach rbd/b --iscsi
for name in g1 g2 g3; do await 20 "nothing at $name" served $name 0; done
# A member with many volumes is killed.
count=${VOLUMES:-20}
for ((number = 1; number <= count; number++)); do ask "$FOREBAY" create "rbd/v$number" --size 16M; done
at g2 group drain; at g3 group drain
for ((number = 1; number <= count; number++)); do at g1 attach "rbd/v$number" --nbd; done
at g2 group drain --undo; at g3 group drain --undo
await 30 "three members" members g1 3
open_at() { status "$1" && of_status '[.volumes[] | select(.open_here)] | length'; }
open_at_both() { local two three; two=$(open_at g2) && three=$(open_at g3) && ((two + three == count)); }
all_open_at_g1() { [[ $(open_at g1) == "$count" ]]; }
await 60 "all volumes are open at one member" all_open_at_g1
for name in g2 g3; do await 60 "all volumes at $name" served $name $count; done
kill -9 "${PIDS[g1]}"; killed=${EPOCHREALTIME/./}; wait "${PIDS[g1]}" 2>/dev/null
await 30 "all volumes are open elsewhere" open_at_both
took=$(((${EPOCHREALTIME/./} - killed) / 1000))
io -c 'write -P 3 0 1M' "$(nbd g2 v1)"; io -c 'read -P 3 0 1M' "$(nbd g3 v1)"; io -c 'read -P 0 0 1M' "$(nbd g3 v$count)"
ok "a member with $count volumes is killed: all are open elsewhere after $took ms"
# Whatever a member had open: monitors take up to a second for each change of the blocklist.
fenced() { ceph log last 2000 debug audit 2>/dev/null | grep -F '"osd blocklist"' | grep -F ': dispatch' | grep -oP '"addr": "\K[^"]+' >"$WORK/fenced"; [[ -s $WORK/fenced ]]; }
await 20 "the log of the cluster has those that were fenced" fenced
[[ -z $(sort "$WORK/fenced" | uniq -d) ]] || { cp "$WORK/fenced" "$WORK/out"; fail "every client is fenced once"; }
ok "$(wc -l <"$WORK/fenced") clients were fenced, each once"
start g1 --group rbd/gw
await 60 "it is a member again" members g2 3
for ((number = 1; number <= count; number++)); do at g2 detach "rbd/v$number" --nbd; done
for name in g1 g2 g3; do await 30 "nothing at $name" served $name 0; done

at g1 group leave; at g2 group leave
await 20 "one member is left" members g3 1
ask_not "$FOREBAY" group rm rbd/gw --gateways
at g3 group leave
ask "$FOREBAY" group rm rbd/gw --gateways
ask_not "$FOREBAY" group status rbd/gw
ask "$FOREBAY" rm rbd/a
ok "exports end everywhere, and a group ends when all have left"
