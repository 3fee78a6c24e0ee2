#!/usr/bin/env bash
# Images on a real cluster of its own, shared with Ceph's clients: rbd, fio's rbd engine, QEMU's rbd driver; first without
# a daemon, then through one, then with write logs in front.
#
#   FOREBAY=.../forebay PROGRAM=.../rbd-lab rbd.sh
#
# Prints a line for each check.
set -uo pipefail

NAME=rbd; source "$(dirname "$0")/../lab/cluster.sh"

lab() { ask "$PROGRAM" "$@"; }
# What rbd reads of an image, or of a snapshot of it, is what is in a file; and so is what we read.
same() { # IMAGE FILE
  rm -f "$WORK"/export.*
  ask rbd export --no-progress "$1" "$WORK/export.rbd"
  cmp "$WORK/export.rbd" "$2" >"$WORK/out" 2>&1 || fail "what rbd reads of $1"
  lab export "$1" "$WORK/export.ours"
  cmp "$WORK/export.ours" "$2" >"$WORK/out" 2>&1 || fail "what we read of $1"
}
qemu_reads() { # IMAGE FILE
  rm -f "$WORK/qemu"
  ask qemu-img convert -f raw -O raw "rbd:$1:conf=$CEPH_CONF" "$WORK/qemu"
  cmp "$WORK/qemu" "$2" >"$WORK/out" 2>&1 || fail "what QEMU reads of $1"
}
# rbd looks at every object, and finds nothing that its map does not say.
checked() { # IMAGE
  ask rbd object-map check --no-progress "$1"
  ask rbd info "$1"
  grep -q 'invalid' "$WORK/out" && fail "the object map of $1"
}

start_cluster
# The dead are known by their watches, which run out after half a minute otherwise.
ask ceph config set osd osd_client_watch_timeout 6
ok "a cluster"

# Ours, with RBD's default features, read by theirs.
SIZE=$((24 << 20))
truncate -s $SIZE "$WORK/one"
lab create rbd/one $SIZE 1048576
ask rbd info rbd/one
grep -q 'features: layering, exclusive-lock, object-map, fast-diff, deep-flatten$' "$WORK/out" || fail "features"
checked rbd/one
lab mutate rbd/one "$WORK/one" 1 160
same rbd/one "$WORK/one"; checked rbd/one
qemu_reads rbd/one "$WORK/one"
ok "written by us, read by rbd export and QEMU; the object map is true"

# What is new is announced, as librbd announces it, and nothing else; OSDs remember the last requests.
for osd in 0 1 2; do ask ceph tell osd.$osd config set osd_op_history_size 5000; done
lab create rbd/hinted 4194304 1048576
truncate -s 4M "$WORK/hinted"
lab mutate rbd/hinted "$WORK/hinted" 5 30
id=$(rbd info rbd/hinted --format json | grep -o '"id":"[^"]*"' | cut -d'"' -f4)
for osd in 0 1 2; do ceph tell osd.$osd dump_historic_ops 2>/dev/null; done | grep -o "osd_op(.*rbd_data\.$id\.[^ ]* \[.*\]" >"$WORK/out"
grep -q '\[set-alloc-hint object_size 1048576 write_size 1048576' "$WORK/out" || fail "what is new is announced"
writes=$(grep -c '\[write ' "$WORK/out")
[[ $writes -gt 0 ]] || fail "what is there is announced, too"
lab remove rbd/hinted
ok "OSDs are told how large new objects will be"

# Snapshots by theirs between writes of ours.
for i in 1 2 3; do
  ask rbd snap create --no-progress "rbd/one@s$i"
  cp "$WORK/one" "$WORK/one@s$i"
  lab mutate rbd/one "$WORK/one" $((10 + i)) 60
  checked rbd/one
done
for i in 1 2 3; do
  same "rbd/one@s$i" "$WORK/one@s$i"; checked "rbd/one@s$i"
  qemu_reads "rbd/one@s$i" "$WORK/one@s$i"
done
same rbd/one "$WORK/one"
rbd diff --from-snap s3 --whole-object rbd/one >"$WORK/fast" 2>/dev/null || fail "fast-diff"
rbd diff --from-snap s3 rbd/one >"$WORK/slow" 2>/dev/null || fail "diff"
objects() { awk 'NR > 1 { for (o = int($1 / 1048576); o * 1048576 < $1 + $2; o++) print o }' "$1" | sort -un; }
[[ -z $(comm -13 <(objects "$WORK/fast" | sort) <(objects "$WORK/slow" | sort)) ]] || fail "fast-diff misses a change"
ask rbd snap rm --no-progress rbd/one@s2
lab mutate rbd/one "$WORK/one" 20 40
same rbd/one "$WORK/one"; same rbd/one@s1 "$WORK/one@s1"; same rbd/one@s3 "$WORK/one@s3"; checked rbd/one
ok "snapshots keep what they saw; fast-diff misses nothing"

# Resized by either.
lab resize rbd/one $((17 << 20)); truncate -s $((17 << 20)) "$WORK/one"
lab resize rbd/one $((30 << 20)); truncate -s $((30 << 20)) "$WORK/one"
checked rbd/one; same rbd/one "$WORK/one"
ask rbd resize --no-progress --size 20M --allow-shrink rbd/one; truncate -s $((20 << 20)) "$WORK/one"
lab mutate rbd/one "$WORK/one" 30 60
same rbd/one "$WORK/one"; checked rbd/one
ok "resized by either"

# Theirs, written by fio and QEMU, then by us.
ask rbd create --size 16M --object-size 512K rbd/two
ask fio --name=w --ioengine=rbd --pool=rbd --rbdname=two --rw=randwrite --bs=4k --size=16M --io_size=4M --iodepth=16
ask qemu-io -f raw -c 'write -P 0x77 1M 3M' -c 'discard 2M 1M' "rbd:rbd/two:conf=$CEPH_CONF"
ask rbd export --no-progress rbd/two "$WORK/two"
same rbd/two "$WORK/two"
lab mutate rbd/two "$WORK/two" 40 120
same rbd/two "$WORK/two"; checked rbd/two
ok "written by fio and QEMU, read and written by us"

# Clones of theirs: both kinds, with snapshots, flattened under us, and of a namespace and a data pool.
ask rbd snap protect rbd/one@s3
cut() { head -c "$1" "$2"; }
ask rbd clone --rbd-default-clone-format 1 rbd/one@s3 rbd/child1
ask rbd clone --rbd-default-clone-format 2 rbd/one@s3 rbd/child2
for child in child1 child2; do
  cp "$WORK/one@s3" "$WORK/$child"
  same rbd/$child "$WORK/$child"
  lab mutate rbd/$child "$WORK/$child" 50 60
  same rbd/$child "$WORK/$child"; checked rbd/$child
  ask rbd snap create --no-progress rbd/$child@a; cp "$WORK/$child" "$WORK/$child@a"
  lab mutate rbd/$child "$WORK/$child" 51 60
  lab resize rbd/$child $((9 << 20)); truncate -s $((9 << 20)) "$WORK/$child"
  lab resize rbd/$child $((26 << 20)); truncate -s $((26 << 20)) "$WORK/$child"
  same rbd/$child "$WORK/$child"; same rbd/$child@a "$WORK/$child@a"; checked rbd/$child; checked rbd/$child@a
  qemu_reads rbd/$child "$WORK/$child"; qemu_reads rbd/$child@a "$WORK/$child@a"
  # Now theirs copy up, and write beside what we wrote.
  ask fio --name=c --ioengine=rbd --pool=rbd --rbdname=$child --rw=randwrite --bs=4k --size=26M --io_size=1M --iodepth=8 \
    --verify=crc32c --do_verify=1
  ask qemu-io -f raw -c 'write -P 0x55 3M 700k' "rbd:rbd/$child:conf=$CEPH_CONF"
  ask rbd export --no-progress rbd/$child "$WORK/$child.theirs"
  mv "$WORK/$child.theirs" "$WORK/$child"
  same rbd/$child "$WORK/$child"; same rbd/$child@a "$WORK/$child@a"; checked rbd/$child; checked rbd/$child@a
  lab mutate rbd/$child "$WORK/$child" 53 40
  same rbd/$child "$WORK/$child"; qemu_reads rbd/$child "$WORK/$child"; checked rbd/$child
  ask rbd flatten --no-progress rbd/$child
  same rbd/$child "$WORK/$child"; same rbd/$child@a "$WORK/$child@a"
  lab mutate rbd/$child "$WORK/$child" 52 40
  same rbd/$child "$WORK/$child"; checked rbd/$child
done
ask rbd info rbd/child2
grep -q parent "$WORK/out" && fail "a parent is left"
same rbd/one@s3 "$WORK/one@s3"
ok "clones read through, copied up, resized, flattened"

ask ceph osd pool create data 8
ask rbd namespace create rbd/ns
ask ceph osd erasure-code-profile set small k=2 m=1 crush-failure-domain=osd
ask ceph osd pool create coded 8 8 erasure small
ask ceph osd pool set coded allow_ec_overwrites true
lab create rbd/ns/three 8388608 1048576; truncate -s 8M "$WORK/three"
lab mutate rbd/ns/three "$WORK/three" 60 60
same rbd/ns/three "$WORK/three"; checked rbd/ns/three
lab create rbd/four 8388608 1048576 data; truncate -s 8M "$WORK/four"
lab mutate rbd/four "$WORK/four" 61 60
same rbd/four "$WORK/four"; checked rbd/four
ask rbd info rbd/four
grep -q 'data_pool: data' "$WORK/out" || fail "the data pool"
ask rbd clone --rbd-default-clone-format 2 rbd/one@s3 rbd/ns/five; cp "$WORK/one@s3" "$WORK/five"
lab mutate rbd/ns/five "$WORK/five" 62 60
same rbd/ns/five "$WORK/five"; checked rbd/ns/five
ask rbd create --size 8M --object-size 1M --data-pool coded rbd/six; truncate -s 8M "$WORK/six"
lab mutate rbd/six "$WORK/six" 63 60
same rbd/six "$WORK/six"; checked rbd/six
ok "namespaces and data pools, an erasure-coded one among them"

# The lock, handed over under load both ways.
truncate -s 16M "$WORK/zero"
ask rbd create --size 16M --object-size 1M rbd/shared
"$PROGRAM" hold rbd/shared 12 0 >"$WORK/held" 2>&1 &
HELD=$!
until_says "$WORK/held" holding
for i in 1 2 3; do
  ask fio --name=v --ioengine=rbd --pool=rbd --rbdname=shared --rw=randwrite --bs=4k --offset=8M --size=4M --io_size=400k \
    --verify=crc32c --do_verify=1
done
wait $HELD || { cp "$WORK/held" "$WORK/out"; fail "writing while fio does"; }
grep -q '^written [1-9]' "$WORK/held" || { cp "$WORK/held" "$WORK/out"; fail "writing while fio does"; }
checked rbd/shared
ask ceph osd blocklist ls
grep -q '127.0.0.1' "$WORK/out" && fail "somebody was taken for dead"
ok "the lock goes to and fro under fio: $(cat "$WORK/held" | tail -n 1)"

# While we hold it, rbd resizes, takes snapshots and more: we do it for rbd, and keep the lock.
owner() { rbd lock ls "rbd/$1" 2>/dev/null | awk 'END { print $1 }'; }
"$PROGRAM" hold rbd/shared 8 0 >"$WORK/held" 2>&1 &
HELD=$!
until_says "$WORK/held" holding
before=$(owner shared)
[[ $before == client.* ]] || fail "who has the lock"
ask rbd snap create --no-progress rbd/shared@under
ask rbd snap create --no-progress rbd/shared@other
ask rbd snap rename rbd/shared@other rbd/shared@second
ask rbd snap protect rbd/shared@second
limit 20 rbd snap rm --no-progress rbd/shared@second >"$WORK/out" 2>&1 && fail "a protected snapshot is removed"
ask rbd snap unprotect rbd/shared@second
ask rbd snap rm --no-progress rbd/shared@second
ask rbd image-meta set rbd/shared color blue
ask rbd resize --no-progress --size 20M rbd/shared
[[ $(owner shared) == "$before" ]] || fail "the lock has changed hands for what we do for others: $before, $(owner shared)"
[[ $(rbd snap ls rbd/shared --format json | jq -r '.[].name') == under ]] || fail "snapshots made for rbd"
[[ $(rbd image-meta get rbd/shared color) == blue ]] || fail "metadata set for rbd"
ask rbd export --no-progress rbd/shared@under "$WORK/under1"
wait $HELD || { cp "$WORK/held" "$WORK/out"; fail "writing while rbd resizes"; }
ask rbd export --no-progress rbd/shared@under "$WORK/under2"
cmp "$WORK/under1" "$WORK/under2" >"$WORK/out" 2>&1 || fail "the snapshot under load changed"
checked rbd/shared; checked rbd/shared@under
"$PROGRAM" wait-size rbd/shared $((24 << 20)) >"$WORK/watched" 2>&1 &
WATCHED=$!
until_says "$WORK/watched" watching
ask rbd resize --no-progress --size 24M rbd/shared
wait $WATCHED || { cp "$WORK/watched" "$WORK/out"; fail "a resize by rbd is seen"; }
# And the other way round: what we ask of librbd, which has the lock and keeps it.
{ echo 'aio_write -P 0x61 0 4k'; sleep 12; } | qemu-io -f raw "rbd:rbd/shared:conf=$CEPH_CONF" >"$WORK/held" 2>&1 &
HELD=$!
for _ in $(seq 100); do [[ $(owner shared) == client.* ]] && break; sleep 0.1; done
before=$(owner shared)
[[ $before == client.* ]] || fail "who has the lock"
ask "$FOREBAY" snap create rbd/shared@asked --data "$WORK/nothing"
ask "$FOREBAY" snap rename rbd/shared@asked rbd/shared@renamed --data "$WORK/nothing"
ask "$FOREBAY" sparsify rbd/shared --data "$WORK/nothing"
ask "$FOREBAY" snap protect rbd/shared@renamed --data "$WORK/nothing"
ask "$FOREBAY" snap unprotect rbd/shared@renamed --data "$WORK/nothing"
ask "$FOREBAY" snap rm rbd/shared@renamed --data "$WORK/nothing"
ask "$FOREBAY" resize rbd/shared --size 28M --data "$WORK/nothing"
[[ $(owner shared) == "$before" ]] || fail "librbd has lost the lock: $before, $(owner shared)"
kill $HELD 2>/dev/null; wait $HELD 2>/dev/null
[[ $(rbd snap ls rbd/shared --format json | jq -r '.[].name') == under ]] || fail "snapshots made by librbd for us"
ok "who has the lock keeps it: snapshots, resizes and metadata for others, both ways"

# The dead: ours broken by theirs, theirs by ours.
"$PROGRAM" hold rbd/shared 60 0 >"$WORK/held" 2>&1 &
HELD=$!
locked() { for _ in $(seq 300); do rbd lock ls rbd/shared 2>/dev/null | grep -q auto && return; sleep 0.1; done; fail "a lock"; }
until_says "$WORK/held" holding; locked
kill -9 $HELD; wait $HELD 2>/dev/null
ask qemu-io -f raw -c 'write -P 0x31 0 4k' "rbd:rbd/shared:conf=$CEPH_CONF"
ask ceph osd blocklist ls
grep -q '127.0.0.1' "$WORK/out" || fail "our dead client was not fenced by librbd"
fio --name=d --ioengine=rbd --pool=rbd --rbdname=shared --rw=randwrite --bs=4k --size=4M --time_based --runtime=60 \
  >/dev/null 2>&1 &
FIO=$!
locked
pkill -9 -P $FIO 2>/dev/null; kill -9 $FIO; wait $FIO 2>/dev/null
ask rbd export --no-progress rbd/shared "$WORK/dead"
lab mutate rbd/shared "$WORK/dead" 70 40
same rbd/shared "$WORK/dead"; checked rbd/shared
ok "dead owners are fenced, and their locks broken, both ways"

# Removed by either; nothing is left.
ask rbd snap purge --no-progress rbd/shared
lab remove rbd/shared
ask rbd rm --no-progress rbd/four
lab remove rbd/ns/three
lab remove rbd/ns/five
for child in child1 child2; do ask rbd snap purge --no-progress rbd/$child; lab remove rbd/$child; done
ask rbd clone --rbd-default-clone-format 1 rbd/one@s3 rbd/child1; lab remove rbd/child1
ask rbd clone --rbd-default-clone-format 2 rbd/one@s3 rbd/child2; lab remove rbd/child2
ask rbd children rbd/one@s3
[[ ! -s $WORK/out ]] || fail "children are left"
ask rbd snap unprotect rbd/one@s3
ask rbd snap purge --no-progress rbd/one
lab remove rbd/one
lab remove rbd/two
lab remove rbd/six
# What only snapshots had is taken away by the OSDs in their own time.
left() {
  for pool in rbd data coded; do rados -p $pool --all ls; done | grep -vE 'rbd_(directory|info|children|namespace|trash|mirroring)'
}
for _ in $(seq 240); do left >"$WORK/out" || break; sleep 0.5; done
[[ ! -s $WORK/out ]] || fail "objects are left"
ok "removed by either, without a trace"

# Through the daemon: what it serves over NBD, and its commands.
start_daemon
head -c $((8 << 20)) /dev/urandom >"$WORK/model"
truncate -s $((30 << 20)) "$WORK/model"
head -c $((2 << 20)) /dev/urandom >>"$WORK/model"
truncate -s $((48 << 20)) "$WORK/model"
write() { # URI OFFSET PATTERN LENGTH: through NBD, and into the file that says what must be there
  ask qemu-io -f raw -c "write -P $3 $2 $4" -c flush "$1"
  grep -Eiq 'failed|error' "$WORK/out" && fail "writing by NBD"
  head -c "$4" /dev/zero | tr '\0' "\\$(printf %o "$3")" | dd of="$WORK/model" bs=64k seek="$2" oflag=seek_bytes conv=notrunc status=none
}
theirs() { # IMAGE FILE WHAT
  rm -f "$WORK/export.rbd"
  ask rbd export --no-progress "$1" "$WORK/export.rbd"
  cmp "$WORK/export.rbd" "$2" >"$WORK/out" 2>&1 || fail "$3"
}
attach() { limit 60 "$FOREBAY" attach "$1" --nbd 2>"$WORK/out" || fail "attaching $1"; }

ask "$FOREBAY" import --no-progress "$WORK/model" rados:rbd/disk
theirs rbd/disk "$WORK/model" "what was imported"
ask "$FOREBAY" ls rbd
grep -qx disk "$WORK/out" || fail "a list"
uri=$(attach rbd/disk)
write "$uri" $((5 << 20)) 0x61 $((1 << 20))
theirs rbd/disk "$WORK/model" "rbd reads what is written over NBD"
cp "$WORK/model" "$WORK/snapped"
ask rbd snap create --no-progress rbd/disk@one
write "$uri" $((4 << 20)) 0x63 $((2 << 20))
write "$uri" 12345 0x64 777
theirs rbd/disk@one "$WORK/snapped" "the snapshot stays"
theirs rbd/disk "$WORK/model" "what came after the snapshot"
ask rbd bench --io-type write --io-size 4096 --io-threads 1 --io-total 65536 rbd/disk
rm -f "$WORK/model"
ask rbd export --no-progress rbd/disk "$WORK/model"
write "$uri" $((40 << 20)) 0x65 $((1 << 20))
ask rbd resize --no-progress --size 64M rbd/disk
truncate -s $((64 << 20)) "$WORK/model"
is_resized() { [[ $(nbdinfo --size "$uri" 2>/dev/null) == $((64 << 20)) ]]; }
await 30 "a resize by rbd is seen over NBD" is_resized
write "$uri" $((60 << 20)) 0x66 $((1 << 20))
ask "$FOREBAY" detach rbd/disk
theirs rbd/disk "$WORK/model" "in turns with rbd, and resized by it"
ask "$FOREBAY" export --no-progress --force rbd/disk "$WORK/export.ours"
cmp "$WORK/export.ours" "$WORK/model" >"$WORK/out" 2>&1 || fail "our own export"
checked rbd/disk
# What is read once, as a whole, does not push out of the OSDs' caches what others read; a read by a host goes into them.
cached() { # Bytes of objects in the OSDs' caches
  local osd sum=0
  for osd in 0 1 2; do
    sum=$((sum + $(ceph daemon "$CLUSTER_DIR/run/osd.$osd.asok" perf dump bluestore 2>/dev/null |
      jq '.bluestore | .bluestore_buffer_bytes // .buffer_bytes')))
  done
  echo $sum
}
for osd in 0 1 2; do ask ceph tell osd.$osd cache drop; done
before=$(cached)
ask "$FOREBAY" export --no-progress --force rbd/disk "$WORK/export.ours"
between=$(cached)
uri=$(attach rbd/disk)
ask qemu-img convert -f raw -O raw "$uri" "$WORK/export.ours"
ask "$FOREBAY" detach rbd/disk
after=$(cached)
((between - before < 1 << 20 && after - between > 4 << 20)) || fail "caches of OSDs: $before, exported $between, read $after"
ok "an export leaves the OSDs' caches alone: $((between - before)) bytes more in them, $((after - between)) after a host's reads"
ask rbd clone --rbd-default-clone-format 2 rbd/disk@one rbd/child
cp "$WORK/snapped" "$WORK/model"
uri=$(attach rbd/child)
write "$uri" $((6 << 20)) 0x67 4096
write "$uri" $((25 << 20)) 0x68 100000
ask "$FOREBAY" detach rbd/child
theirs rbd/child "$WORK/model" "a clone that is written over NBD"
ask "$FOREBAY" resize rbd/disk --size 80M
ask rbd info rbd/disk
grep -q '80 MiB' "$WORK/out" || fail "rbd sees our resize"
ask "$FOREBAY" mv rbd/child rbd/adult
ask rbd info rbd/adult
ask "$FOREBAY" rm rbd/adult
rbd info rbd/adult >"$WORK/out" 2>&1 && fail "rbd still sees a removed image"
ok "through the daemon: snapshots, turns and resizes by rbd under NBD, a clone, import, export, resize, mv, rm"

# What cannot be served is refused in one sentence, that says what was wanted: reading or writing.
refused() { # TEXT ARGUMENTS...
  local text=$1
  shift
  limit 60 "$FOREBAY" "$@" >"$WORK/out" 2>&1
  [[ $? == 9 && $(cat "$WORK/out") == "forebay: $text: not supported" ]] || fail "the refusal of $*"
}
ask rbd create --size 8M --image-feature layering,exclusive-lock,journaling rbd/journaled
ask rbd bench --io-type write --io-size 4096 --io-threads 1 --io-total 65536 rbd/journaled
ask rbd create --size 8M --stripe-unit 64K --stripe-count 2000 rbd/striped
ask rbd create --size 8M rbd/old
ask rbd migration prepare rbd/old rbd/moved
refused "rbd/moved: image moved: reading an image with the features migrating" export rbd/moved "$WORK/none"
refused "rbd/moved: image moved: reading an image with the features migrating" attach rbd/moved --nbd --read-only
refused "rbd/moved: image moved: writing an image with the features migrating" attach rbd/moved --nbd
refused "rbd/moved: removing image moved: it has the features migrating" rm rbd/moved
for command in "export rbd/striped $WORK/none" "attach rbd/striped --nbd" "attach rbd/striped --nbd --read-only"; do
  refused "rbd/striped: image striped: a stripe unit of 65536 bytes and a stripe count of 2000" $command
done
rm -f "$WORK/export.ours"
ask "$FOREBAY" export --no-progress rbd/journaled "$WORK/export.ours"
theirs rbd/journaled "$WORK/export.ours" "a journaled image, read"
refused "rbd/journaled: image journaled: writing an image with the features journaling" attach rbd/journaled --nbd
uri=$(limit 60 "$FOREBAY" attach rbd/journaled --nbd --read-only 2>"$WORK/out") || fail "a journaled image, attached for reading"
ask qemu-img compare -f raw -F raw "$uri" "$WORK/export.ours"
refused "rbd/journaled: image journaled: writing an image with the features journaling" attach rbd/journaled --iscsi
ask "$FOREBAY" detach rbd/journaled
ask rbd migration execute --no-progress rbd/moved
ask rbd migration commit --no-progress rbd/moved
for image in journaled striped moved; do ask rbd rm --no-progress rbd/$image; done
ok "stripe counts above 1024, migration and journaling are refused once, for reading and for writing; a journaled image is read"

# An image that rbd has encrypted is attached unchanged, with a warning.
echo secret >"$WORK/passphrase"
for version in 1 2; do
  ask rbd create --size 24M rbd/locked
  ask "$FOREBAY" attach rbd/locked --nbd
  grep -q warning "$WORK/out" && fail "a warning about an image that is not encrypted"
  ask "$FOREBAY" detach rbd/locked
  ask rbd encryption format rbd/locked luks$version "$WORK/passphrase"
  limit 60 "$FOREBAY" --format json attach rbd/locked --nbd >"$WORK/json" 2>"$WORK/out" || fail "an encrypted image"
  for file in json out daemon.log; do
    grep -q "rbd/locked holds a LUKS$version header: hosts get the encrypted bytes" "$WORK/$file" || fail "a warning in $file"
  done
  [[ $(jq -r '.warnings | length' "$WORK/json") == 1 ]] || fail "one warning"
  ask "$FOREBAY" detach rbd/locked
  ask rbd rm --no-progress rbd/locked
done
ok "images encrypted with LUKS 1 and 2 are attached with a warning: in the answer, on standard error, in the log"

# The shapes of rbd: what both print of the same images.  Keys that only we have are named.
shape() { # "MORE KEYS" ARGUMENTS...
  local more=$1
  shift
  peer_reads 120 rbd "$@" --format json >"$WORK/theirs" 2>"$WORK/out" || fail "rbd $*"
  limit 60 "$FOREBAY" "$@" --format json >"$WORK/ours" 2>"$WORK/out" || fail "forebay $*"
  jq -S --arg more "$more" 'if type == "object" then delpaths($more | split(" ") | map([.])) else . end' "$WORK/ours" >"$WORK/ours.sorted"
  jq -S . "$WORK/theirs" | diff - "$WORK/ours.sorted" >"$WORK/out" || fail "the JSON of $*"
  [[ -z $more ]] || jq -e --arg more "$more" '($more | split(" ")) - keys == []' "$WORK/ours" >"$WORK/out" || fail "more keys of $*: $more"
  peer_reads 120 rbd "$@" >"$WORK/theirs" 2>"$WORK/out" || fail "rbd $* as columns"
  limit 60 "$FOREBAY" "$@" >"$WORK/ours" 2>"$WORK/out" || fail "forebay $* as columns"
  diff "$WORK/theirs" "$WORK/ours" >"$WORK/out" || fail "the columns of $*"
}
shapes() {
  local image
  shape "" ls rbd
  shape "" ls -l rbd
  shape "" du -p rbd
  for image in plain cloned mapless; do
    shape pool info rbd/$image
    shape pool info -p rbd --image $image
    shape exports status rbd/$image
    shape "total_provisioned_size total_used_size" du rbd/$image
    shape "" snap ls rbd/$image
  done
  shape pool info rbd/plain@s1
  shape pool info -p rbd --image mapless --snap s2
  shape "total_provisioned_size total_used_size" du rbd/plain@s2
  shape "" snap ls --all rbd/plain
}
written() { ask rbd bench --io-type write --io-pattern rand --io-size 4096 --io-total 65536 --io-threads 2 "$1"; }
ask "$FOREBAY" create -p rbd --image plain --order 20 --size 24M
grep -q 'order is deprecated' "$WORK/out" || fail "--order is accepted, and said to be deprecated"
ask rbd create --size 12500K --object-size 1M --image-feature layering rbd/mapless
for image in plain mapless; do
  for i in 1 2; do
    written rbd/$image
    ask rbd snap create --no-progress rbd/$image@s$i
  done
  written rbd/$image
done
ask rbd snap protect rbd/plain@s1
ask rbd clone --rbd-default-clone-format 2 rbd/plain@s1 rbd/cloned
ask rbd snap create --no-progress rbd/cloned@own
ask rbd group create rbd/group
ask rbd group image add rbd/group rbd/mapless
ask rbd group snap create rbd/group@all
written rbd/mapless
ask rbd snap limit set rbd/mapless --limit 9
ask rbd lock add rbd/mapless by-hand
ask rbd lock add --shared tag rbd/cloned by-hand
shapes
# To the byte, of an image that has no snapshots.
ask "$FOREBAY" import --no-progress --order 20 "$WORK/model" rbd/bytes
usage() { "$@" --format json 2>/dev/null | jq '.images[0].used_size'; }
used=$(usage peer_reads 120 rbd du rbd/bytes --exact)
[[ $used -gt 0 && $(usage "$FOREBAY" du rbd/bytes --exact) == "$used" ]] || fail "du --exact"
# A reader is listed as a watcher.
fio --name=s --ioengine=rbd --pool=rbd --rbdname=plain --rw=randread --bs=4k --size=4M --time_based --runtime=60 >/dev/null 2>&1 &
FIO=$!
is_watched() { [[ $(rbd status rbd/plain) == *client.* ]]; }
await 30 "fio watches" is_watched
shape exports status rbd/plain
# The watch of a reader that is killed would end at any time in the next half minute, between two lists that are compared.
kill -TERM $FIO; wait $FIO 2>/dev/null
is_not_watched() { ! is_watched; }
await 60 "fio watches no longer" is_not_watched
# Our own daemon is a client like others.
uri=$(attach rbd/cloned)
is_ours() { [[ $(rbd status rbd/cloned) == *client.* ]]; }
await 30 "the daemon watches" is_ours
shape exports status rbd/cloned
[[ $("$FOREBAY" status rbd/cloned --format json | jq -r '.exports[0].uri') == "$uri" ]] || fail "the exports of an image"
ask "$FOREBAY" detach rbd/cloned
for image in rbd/none none/none; do
  limit 60 "$FOREBAY" status $image >"$WORK/out" 2>&1
  [[ $? == 3 ]] || fail "the exit code of an image that is not there"
  grep -q 'error opening image none: (2) No such file or directory' "$WORK/out" || fail "words about an image that is not there"
done
# The same without a daemon.
FOREBAY_DATA=$WORK/nothing shapes
# A key that is not the cluster's.
printf '[client.admin]\n\tkey = %s\n' "$(ceph-authtool --gen-print-key)" >"$WORK/wrong.keyring"
FOREBAY_DATA=$WORK/nothing limit 60 "$FOREBAY" ls rbd --keyring "$WORK/wrong.keyring" >"$WORK/out" 2>&1
[[ $? == 10 ]] && grep -q 'refuses client.admin' "$WORK/out" && grep -q 'ceph auth get' "$WORK/out" || fail "words about a wrong key"
ok "ls, info, du and status print what rbd prints, key for key and column for column"

# Snapshots: those of forebay seen and used by rbd, and the other way round.
fails_with() { # CODE TEXT ARGUMENTS...
  local code=$1 text=$2 status
  shift 2
  limit 60 "$FOREBAY" "$@" >"$WORK/out" 2>&1
  status=$?
  [[ $status == "$code" ]] && grep -q "$text" "$WORK/out" || fail "the refusal of $* (status $status)"
}
they_refuse() { limit 60 rbd "$@" >"$WORK/out" 2>&1 && fail "rbd $*"; }
alike() { # IMAGE: what both read of it is in the file of that name
  theirs "rbd/$1" "$WORK/$1" "what rbd reads of $1"
  rm -f "$WORK/export.ours"
  ask "$FOREBAY" export --no-progress "rbd/$1" "$WORK/export.ours"
  cmp "$WORK/export.ours" "$WORK/$1" >"$WORK/out" 2>&1 || fail "what forebay reads of $1"
}
kept() { # IMAGE...: the head or snapshots, to be found as in the files of these names
  local image
  for image in "$@"; do
    alike "$image"
    checked "rbd/$image"
  done
  shape "" snap ls rbd/kept
}
{ head -c 5M /dev/urandom; head -c 3M /dev/zero; } >"$WORK/model"
ask "$FOREBAY" import --no-progress --object-size 1M "$WORK/model" rbd/kept
cp "$WORK/model" "$WORK/kept@one"
ask "$FOREBAY" snap create rbd/kept@one
uri=$(attach rbd/kept)
write "$uri" $((2 << 20)) 0x41 $((1 << 20))
write "$uri" $((6 << 20)) 0x42 4096
ask "$FOREBAY" snap create -p rbd --image kept --snap two --skip-quiesce
cp "$WORK/model" "$WORK/kept@two"
write "$uri" $((2 << 20)) 0x43 $((3 << 20))
cp "$WORK/model" "$WORK/kept"
kept kept kept@one kept@two
rbd diff --from-snap two --whole-object rbd/kept >"$WORK/fast" 2>/dev/null || fail "fast-diff"
[[ $(objects "$WORK/fast" | tr '\n' ' ') == "2 3 4 " ]] || fail "fast-diff after a snapshot by forebay: $(objects "$WORK/fast" | tr '\n' ' ')"
fails_with 6 'is exported' snap rollback rbd/kept@one
ask "$FOREBAY" detach rbd/kept
ask rbd snap create --no-progress rbd/kept@theirs
cp "$WORK/kept" "$WORK/kept@three"
ask "$FOREBAY" snap rename rbd/kept@theirs rbd/kept@three
kept kept@three
ask "$FOREBAY" resize rbd/kept --size 10M
ask "$FOREBAY" snap rollback --no-progress rbd/kept@one
cp "$WORK/kept@one" "$WORK/kept"
kept kept kept@one kept@two kept@three
ask rbd snap rollback --no-progress rbd/kept@three
cp "$WORK/kept@three" "$WORK/kept"
alike kept
# Its own check does not agree with the map that rbd leaves: what is rolled back has changed, and is marked as unchanged.
ask rbd object-map rebuild --no-progress rbd/kept
checked rbd/kept
# A rollback over objects that are new, of an image whose object map says so.
uri=$(attach rbd/kept)
cp "$WORK/kept" "$WORK/model"
write "$uri" $((7 << 20)) 0x44 4096
ask "$FOREBAY" detach rbd/kept
ask "$FOREBAY" snap rollback rbd/kept@two
cp "$WORK/kept@two" "$WORK/kept"
kept kept kept@one kept@two kept@three
ok "snapshots by forebay and rollbacks to them: rbd lists and reads them alike, and the object maps are true"

ask "$FOREBAY" snap protect rbd/kept@one
they_refuse snap rm --no-progress rbd/kept@one
ask rbd snap protect rbd/kept@two
shape "" snap ls rbd/kept
fails_with 6 'is protected' snap rm rbd/kept@two
ask rbd clone --rbd-default-clone-format 1 rbd/kept@one rbd/child1
ask rbd clone --rbd-default-clone-format 2 rbd/kept@three rbd/child2
fails_with 6 'rbd/kept' snap unprotect rbd/kept@one
fails_with 6 'rbd/kept has 3 snapshots' rm rbd/kept
shape "" snap ls rbd/kept
for child in child1 child2; do ask rbd rm --no-progress rbd/$child; done
ask "$FOREBAY" snap unprotect rbd/kept@one
ask rbd snap rename rbd/kept@one rbd/kept@first
shape "" snap ls rbd/kept
ask rbd snap rm --no-progress rbd/kept@first
ask "$FOREBAY" snap rm --force rbd/kept@two
kept kept kept@three
ask rbd snap limit set rbd/kept --limit 1
fails_with 7 'snapshot limit is 1' snap create rbd/kept@more
ask "$FOREBAY" snap limit clear rbd/kept
ask rbd snap create --no-progress rbd/kept@more
ask "$FOREBAY" snap limit set rbd/kept --limit 2
they_refuse snap create --no-progress rbd/kept@most
shape pool info rbd/kept
ask rbd snap limit clear rbd/kept
ask "$FOREBAY" snap create rbd/kept@most
ask rbd snap protect rbd/kept@more
fails_with 6 '1 protected snapshot: more' snap purge rbd/kept
shape "" snap ls rbd/kept
ask "$FOREBAY" snap unprotect rbd/kept@more
# The same without a daemon; and in front of a write log, which has what the image has not.
FOREBAY_DATA=$WORK/nothing ask "$FOREBAY" snap create rbd/kept@alone
shape "" snap ls rbd/kept
FOREBAY_DATA=$WORK/nothing ask "$FOREBAY" snap purge rbd/kept
cp "$WORK/kept" "$WORK/model"
uri=$(limit 60 "$FOREBAY" attach rbd/kept --nbd --log "ssd:$WORK/logs:16M:age=60m" 2>"$WORK/out") || fail "a log before rbd/kept"
write "$uri" $((1 << 20)) 0x45 $((1 << 20))
ask "$FOREBAY" snap create rbd/kept@logged
cp "$WORK/model" "$WORK/kept@logged"
write "$uri" $((1 << 20)) 0x46 4096
theirs rbd/kept@logged "$WORK/kept@logged" "a snapshot in front of a log"
theirs rbd/kept "$WORK/kept@logged" "what came after the snapshot is in the log"
ask "$FOREBAY" detach rbd/kept
cp "$WORK/model" "$WORK/kept"
kept kept kept@logged
ask "$FOREBAY" snap purge rbd/kept
ask "$FOREBAY" rm rbd/kept
rbd info rbd/kept >"$WORK/out" 2>&1 && fail "rbd still sees a removed image"
ok "snapshots renamed, protected, limited and removed by either; without a daemon, and in front of a write log"

# Clones of both versions by forebay, seen, written and flattened by either.
head -c 6M /dev/urandom >"$WORK/gold"
ask "$FOREBAY" import --no-progress --object-size 1M "$WORK/gold" rbd/gold
ask "$FOREBAY" snap create rbd/gold@v1
ask rbd image-meta set rbd/gold color blue
ask "$FOREBAY" clone rbd/gold@v1 rbd/second
they_refuse clone --rbd-default-clone-format 1 rbd/gold@v1 rbd/none
fails_with 2 'protect' clone --clone-format 1 rbd/gold@v1 rbd/none
ask rbd snap protect rbd/gold@v1
ask "$FOREBAY" clone --clone-format 1 -p rbd --image gold --snap v1 --dest-pool rbd --dest first
ask rbd clone --rbd-default-clone-format 2 rbd/gold@v1 rbd/third
for image in first second third; do
  cp "$WORK/gold" "$WORK/$image"
  alike $image; checked rbd/$image
  shape pool info rbd/$image
  [[ $(rbd image-meta get rbd/$image color) == blue ]] || fail "the metadata of a clone"
done
shape "" children rbd/gold@v1; shape "" children --all rbd/gold
shape pool info rbd/gold
ask fio --name=w --ioengine=rbd --pool=rbd --rbdname=first --rw=randwrite --bs=16k --size=6M --io_size=1M --iodepth=8
ask rbd export --no-progress rbd/first - >/dev/null; rm -f "$WORK/first"; ask rbd export --no-progress rbd/first "$WORK/first"
cp "$WORK/second" "$WORK/model"
uri=$(attach rbd/second)
write "$uri" $((1 << 20)) 0x51 $((1 << 19))
write "$uri" $((5 << 20)) 0x52 4096
ask "$FOREBAY" detach rbd/second
cp "$WORK/model" "$WORK/second"
for image in first second; do alike $image; checked rbd/$image; done
they_refuse snap unprotect rbd/gold@v1
fails_with 6 'clones in pool rbd' snap unprotect rbd/gold@v1
ask "$FOREBAY" flatten --no-progress rbd/first
alike first; checked rbd/first
shape pool info rbd/first
ask rbd snap unprotect rbd/gold@v1
ok "clones by forebay: listed, read, written by either; one of version 1 is flattened"

ask "$FOREBAY" snap create rbd/second@s
ask rbd clone --rbd-default-clone-format 2 rbd/second@s rbd/fourth; cp "$WORK/second" "$WORK/fourth"
ask "$FOREBAY" clone rbd/second@s rbd/fifth; cp "$WORK/second" "$WORK/fifth"
shape "" children --descendants rbd/gold
ask "$FOREBAY" snap rm rbd/gold@v1
shape "" snap ls --all rbd/gold
fails_with 6 'children --all rbd/gold' rm rbd/gold
for image in second third fourth fifth second@s; do cp "$WORK/${image%@s}" "$WORK/$image" 2>/dev/null; alike $image; done
# Flattened by forebay while rbd's clone of its snapshot is read; by rbd the other.
ask "$FOREBAY" flatten rbd/second
shape pool info rbd/second
alike second; alike second@s; alike fourth; alike fifth; checked rbd/second
ask rbd flatten --no-progress rbd/third
[[ $("$FOREBAY" snap ls --all rbd/gold --format json) == "[]" ]] || fail "the snapshot in the trash goes with its last clone"
ask rbd rm --no-progress rbd/gold
# The last clone is one of ours: it takes the snapshot in the trash along, for rbd too.
ask rbd snap rm --no-progress rbd/second@s
shape "" snap ls --all rbd/second
ask rbd rm --no-progress rbd/fourth
ask "$FOREBAY" flatten rbd/fifth
alike fifth; checked rbd/fifth
[[ $(rbd snap ls --all rbd/second --format json) == "[]" ]] || fail "a snapshot in the trash stays"
for image in first second third fifth; do ask rbd rm --no-progress rbd/$image; done
# As with rbd, a forced removal flattens the clones.
ask "$FOREBAY" create rbd/gold --size 4M
ask "$FOREBAY" snap create rbd/gold@v1; ask "$FOREBAY" snap protect rbd/gold@v1
ask rbd clone --rbd-default-clone-format 1 rbd/gold@v1 rbd/child1
ask "$FOREBAY" snap rm --force rbd/gold@v1
for image in child1 gold; do ask "$FOREBAY" rm rbd/$image; done
ok "snapshots in the trash, and clones of clones, flattened and removed by either"

# Write logs in front of the cluster's images, when no daemon serves these.
head -c $((8 << 20)) /dev/zero >"$WORK/empty"
logged() { "$FOREBAY" --format json log info "rbd/$1" 2>"$WORK/out" | jq -r "$2"; }
for image in saved lost; do
  ask "$FOREBAY" create "rbd/$image" --size 8M
  uri=$(limit 60 "$FOREBAY" attach "rbd/$image" --nbd --log "ssd:$WORK/logs:16M:age=60m" 2>"$WORK/out") || fail "a log before rbd/$image"
  ask qemu-io -f raw -c "write -P 0x71 64k 4k" -c flush "$uri"
done
# What a log has answered is not in the image yet: no other client may write there, nor take a snapshot without it.
their_write() { limit 30 rbd bench --io-type write --io-size 4096 --io-threads 1 --io-total 4096 "$1" >"$WORK/out" 2>&1; }
their_write rbd/saved && fail "rbd writes beside a log"
# rbd asks the daemon for a snapshot, which has what only the log has, and for more.
ask "$FOREBAY" create rbd/asked --size 8M
uri=$(limit 60 "$FOREBAY" attach rbd/asked --nbd --log "ssd:$WORK/logs:16M:age=60m" 2>"$WORK/out") || fail "a log before rbd/asked"
cp "$WORK/empty" "$WORK/model"
write "$uri" 65536 0x71 4096
before=$(owner asked)
ask rbd snap create --no-progress rbd/asked@one
theirs rbd/asked@one "$WORK/model" "a snapshot that rbd has asked for, in front of a log"
write "$uri" 65536 0x72 4096
ask rbd snap rename rbd/asked@one rbd/asked@two
ask rbd resize --no-progress --size 12M rbd/asked
ask rbd resize --no-progress --size 6M --allow-shrink rbd/asked
[[ $(nbdinfo --size "$uri") == $((6 << 20)) ]] || fail "a resize that rbd has asked for"
ask rbd sparsify --no-progress rbd/asked
ask rbd snap rm --no-progress rbd/asked@two
[[ $(owner asked) == "$before" ]] || fail "the lock of an image with a log has changed hands"
ask "$FOREBAY" detach rbd/asked
truncate -s 6M "$WORK/model"
theirs rbd/asked "$WORK/model" "what was written since"
ask "$FOREBAY" rm rbd/asked
kill -9 "$DAEMON"
wait "$DAEMON" 2>/dev/null
DAEMON=
theirs rbd/saved "$WORK/empty" "what is in the log alone"
ask "$FOREBAY" log ls
[[ $(grep -Ec '^rbd/(saved|lost) ' "$WORK/out") == 2 ]] || fail "the logs of images that no daemon serves"
for image in saved lost; do
  [[ $(logged $image .dirty_bytes) == 4096 ]] || fail "how much is dirty of rbd/$image"
  [[ $(logged $image .dirty_since_ms) -gt 0 ]] || fail "since when rbd/$image is dirty"
done
ask "$FOREBAY" log flush rbd/saved
cp "$WORK/empty" "$WORK/model"
head -c 4096 /dev/zero | tr '\0' 'q' | dd of="$WORK/model" bs=4k seek=16 conv=notrunc status=none
theirs rbd/saved "$WORK/model" "what 'log flush' has written back"
[[ $(logged saved .dirty_bytes) == 0 ]] || fail "a log that was flushed"
limit 60 "$FOREBAY" log discard rbd/lost >"$WORK/out" 2>&1 && fail "a log with writes is given up without --force"
ask "$FOREBAY" log discard rbd/lost --force
limit 60 "$FOREBAY" log info rbd/lost >"$WORK/out" 2>&1 && fail "a log that was discarded is still there"
theirs rbd/lost "$WORK/empty" "an image whose log was discarded"
their_write rbd/lost || fail "an image without a log is not rbd's to write"
ok "write logs: theirs alone to write while they are served; ls, info, flush and discard when they are not"
