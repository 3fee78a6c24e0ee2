#!/usr/bin/env bash
# Changes of images on a real cluster of its own, both ways with Ceph's rbd: diff, export-diff, import-diff, merge-diff, exports
# with snapshots, copies; through a daemon, and without one.
#
#   FOREBAY=.../forebay rbd-diff.sh
#
# Prints a line for each check.
set -uo pipefail

NAME=rbd-diff; source "$(dirname "$0")/../lab/cluster.sh"

# Runs our program without a daemon.
alone() { FOREBAY_DATA=$WORK/nothing ask "$FOREBAY" "$@"; }
# What rbd reads of an image or snapshot, once.
content() { # IMAGE
  local file=$WORK/content.${1//\//.}
  [[ -e $file ]] || ask rbd export --no-progress "$1" "$file"
  echo "$file"
}
# Two images or snapshots are the same to rbd.
same() { # IMAGE OTHER WHAT
  rm -f "$WORK/content.${2//\//.}"
  cmp "$(content "$1")" "$(content "$2")" >"$WORK/out" 2>&1 || fail "$3"
}
# rbd looks at every object, and finds nothing that its map does not say.
checked() { # IMAGE
  ask rbd object-map check --no-progress "$1"
  ask rbd info "$1"
  grep -q 'invalid' "$WORK/out" && fail "the object map of $1"
}
io() { # IMAGE QEMU-IO COMMANDS...
  local image=$1 commands=()
  shift
  for command in "$@"; do commands+=(-c "$command"); done
  ask qemu-io -f raw --discard=unmap "${commands[@]}" "rbd:$image:conf=$CEPH_CONF"
  grep -Eiq 'failed|error' "$WORK/out" && fail "writing to $image"
}
# The blocks of 4 KiB that a table of changes names.
blocks() { awk 'NR > 1 { for (b = int($1 / 4096); b * 4096 < $1 + $2; b++) print b }' "$1" | LC_ALL=C sort -u; }
# The blocks in which two files differ; what one of them lacks is zeroes.
differing() { # FILE OTHER
  local size
  size=$(stat -c %s "$2")
  cp "$1" "$WORK/padded"
  truncate -s "$size" "$WORK/padded"
  cmp -l "$WORK/padded" "$2" | awk '{ b = int(($1 - 1) / 4096); if (b != last || NR == 1) print b; last = b }' | LC_ALL=C sort -u
}
# Lists changes with both, and compares: ours are no less than what differs, and no more than rbd's; in whole objects they are
# the same.
listed() { # IMAGE[@SNAP] [FROM]
  local image=$1 from=${2:-} since=()
  [[ -z $from ]] || since=(--from-snap "$from")
  peer_reads 90 rbd diff "$image" "${since[@]}" >"$WORK/theirs" 2>"$WORK/out" || fail "rbd diff $image $from"
  ask "$FOREBAY" diff "$image" "${since[@]}"
  cp "$WORK/out" "$WORK/ours"
  if [[ -n $from ]]; then
    differing "$(content "${image%@*}@$from")" "$(content "$image")" >"$WORK/true"
  else
    head -c 0 /dev/zero >"$WORK/nothing-yet"
    differing "$WORK/nothing-yet" "$(content "$image")" >"$WORK/true"
  fi
  LC_ALL=C comm -23 "$WORK/true" <(blocks "$WORK/ours") >"$WORK/out"
  [[ ! -s $WORK/out ]] || fail "changes of $image since '$from' that are left out"
  LC_ALL=C comm -23 <(blocks "$WORK/ours") <(blocks "$WORK/theirs") >"$WORK/out"
  [[ ! -s $WORK/out ]] || fail "changes of $image since '$from' that rbd has not"
  peer_reads 90 rbd diff --whole-object "$image" "${since[@]}" >"$WORK/theirs" 2>"$WORK/out" || fail "rbd diff --whole-object $image"
  ask "$FOREBAY" diff --whole-object "$image" "${since[@]}"
  diff "$WORK/theirs" "$WORK/out" >"$WORK/differ" || { cp "$WORK/differ" "$WORK/out"; fail "whole objects of $image since '$from'"; }
  peer_reads 90 rbd diff --whole-object "$image" "${since[@]}" --format json >"$WORK/theirs" 2>"$WORK/out" || fail "rbd diff as JSON"
  ask "$FOREBAY" diff --whole-object "$image" "${since[@]}" --format json
  diff <(jq -c . "$WORK/theirs") <(jq -c . "$WORK/out") >"$WORK/differ" || { cp "$WORK/differ" "$WORK/out"; fail "the JSON of $image since '$from'"; }
}

start_cluster
# The dead are known by their watches, which run out after half a minute otherwise.
ask ceph config set osd osd_client_watch_timeout 6
start_daemon
ok "a cluster and a daemon"

# An image by rbd, with snapshots by both: data, holes, objects that come and go, a smaller size and a larger one.
ask rbd create --size 24M --object-size 1M rbd/disk
io rbd/disk 'write -P 0x11 0 3M' 'write -P 0x12 5M 100k' 'write -P 0x13 8M 4k' 'write -P 0x14 23M 1M'
ask rbd snap create --no-progress rbd/disk@one
io rbd/disk 'write -P 0x21 512k 4k' 'write -P 0x22 6M 2M' 'discard 1M 1M' 'discard 2M 64k' 'write -P 0x13 8M 4k'
ask "$FOREBAY" snap create rbd/disk@two
ask rbd resize --no-progress --allow-shrink --size 9M rbd/disk
io rbd/disk 'write -P 0x31 8M 512k'
ask rbd resize --no-progress --size 30M rbd/disk
io rbd/disk 'write -P 0x32 29M 300k' 'discard 6M 1M' 'write -z 7M 8k'
ask rbd snap create --no-progress rbd/disk@three
io rbd/disk 'write -P 0x41 1M 12k' 'discard 5M 1M'
ask rbd image-meta set rbd/disk color green
ask rbd image-meta set rbd/disk 'conf_rbd_cache' false
ask rbd snap protect rbd/disk@two
for pair in "one " "two one" "three two" "three one" " three" " one" " "; do
  to=${pair% *} from=${pair#* }
  listed "rbd/disk${to:+@$to}" "$from"
done
FOREBAY_DATA=$WORK/nothing listed rbd/disk@three one
ok "changes are listed as rbd does, exact to the block, and in whole objects the same"

# The same without object maps, which tell which objects to look at.
ask rbd create --size 24M --object-size 1M --image-feature layering rbd/mapless
io rbd/mapless 'write -P 0x11 0 3M' 'write -P 0x14 23M 1M'
ask rbd snap create --no-progress rbd/mapless@one
io rbd/mapless 'write -P 0x21 512k 4k' 'discard 1M 1M' 'write -P 0x22 9M 8k'
ask rbd snap create --no-progress rbd/mapless@two
io rbd/mapless 'discard 23M 1M'
listed rbd/mapless@two one
listed rbd/mapless two
listed rbd/mapless one
ok "changes without object maps"

# Ours into rbd, and rbd's into ours, one after the other.
ask rbd create --size 1M --object-size 1M rbd/to-rbd
ask rbd create --size 1M rbd/to-us
ask "$FOREBAY" create local/to-us --size 1M
for step in " one" "one two" "two three" "three "; do
  from=${step% *} to=${step#* }
  since=(${from:+--from-snap "$from"})
  spec=rbd/disk${to:+@$to}
  rm -f "$WORK"/step.*
  ask "$FOREBAY" export-diff "$spec" "${since[@]}" "$WORK/step.ours"
  alone export-diff "$spec" "${since[@]}" "$WORK/step.alone"
  cmp "$WORK/step.ours" "$WORK/step.alone" >"$WORK/out" 2>&1 || fail "with a daemon and without, $spec is exported in two ways"
  ask rbd export-diff --no-progress "$spec" "${since[@]}" "$WORK/step.theirs"
  ask rbd import-diff --no-progress "$WORK/step.ours" rbd/to-rbd
  ask "$FOREBAY" import-diff "$WORK/step.theirs" rbd/to-us
  if [[ -n $to ]]; then
    limit 60 "$FOREBAY" import-diff "$WORK/step.theirs" rbd/to-us >"$WORK/out" 2>&1
    [[ $? == 5 ]] || fail "a snapshot is imported twice"
  fi
  ask "$FOREBAY" import-diff "$WORK/step.theirs" local/to-us
  same "$spec" "rbd/to-rbd${to:+@$to}" "our changes from '$from' to '$to', imported by rbd"
  same "$spec" "rbd/to-us${to:+@$to}" "rbd's changes from '$from' to '$to', imported by us"
  rm -f "$WORK/local"
  ask "$FOREBAY" export "local/to-us${to:+@$to}" "$WORK/local"
  cmp "$(content "$spec")" "$WORK/local" >"$WORK/out" 2>&1 || fail "rbd's changes from '$from' to '$to', imported into the store"
  cp "$WORK/step.ours" "$WORK/ours.${to:-head}"
  cp "$WORK/step.theirs" "$WORK/theirs.${to:-head}"
done
checked rbd/to-rbd; checked rbd/to-us
ask rbd create --size 1M rbd/whole
ask "$FOREBAY" export-diff --whole-object rbd/disk@one "$WORK/whole"
ask rbd import-diff --no-progress "$WORK/whole" rbd/whole
same rbd/disk@one rbd/whole@one "whole objects"
ok "export-diff and import-diff, each way, with a daemon and without"

# Merged by either.
ask rbd merge-diff --no-progress "$WORK/theirs.two" "$WORK/theirs.three" "$WORK/merged.theirs"
ask "$FOREBAY" merge-diff "$WORK/theirs.two" "$WORK/theirs.three" "$WORK/merged.ours"
ask "$FOREBAY" merge-diff "$WORK/ours.two" "$WORK/ours.three" "$WORK/merged.own"
ask rbd merge-diff --no-progress "$WORK/ours.two" "$WORK/ours.three" "$WORK/merged.mixed"
for merged in theirs ours own mixed; do
  ask rbd create --size 1M "rbd/merged-$merged"
  ask rbd import-diff --no-progress "$WORK/theirs.one" "rbd/merged-$merged"
  case $merged in
    theirs | mixed) ask "$FOREBAY" import-diff "$WORK/merged.$merged" "rbd/merged-$merged" ;;
    *) ask rbd import-diff --no-progress "$WORK/merged.$merged" "rbd/merged-$merged" ;;
  esac
  same rbd/disk@three "rbd/merged-$merged@three" "diffs merged: $merged"
done
limit 60 rbd merge-diff --no-progress "$WORK/theirs.one" "$WORK/theirs.three" "$WORK/gap" >"$WORK/out" 2>&1 && fail "rbd merges with a gap"
limit 60 "$FOREBAY" merge-diff "$WORK/theirs.one" "$WORK/theirs.three" "$WORK/gap" >"$WORK/out" 2>&1 && fail "diffs are merged with a gap"
ok "diffs merged by either are imported by either"

# Whole images with their snapshots.
snapshots() { # IMAGE OTHER: the same names, sizes and protection
  diff <(rbd snap ls "$1" --format json 2>/dev/null | jq -c '.[] | [.name, .size, .protected]') \
    <(rbd snap ls "$2" --format json 2>/dev/null | jq -c '.[] | [.name, .size, .protected]') >"$WORK/out" || fail "the snapshots of $2"
}
alike() { # IMAGE: the same as rbd/disk
  local at
  snapshots rbd/disk "$1"
  for at in @one @two @three ""; do same "rbd/disk$at" "$1$at" "$1$at is not rbd/disk$at"; done
  diff <(rbd image-meta ls rbd/disk --format json 2>/dev/null | jq -S .) <(rbd image-meta ls "$1" --format json 2>/dev/null | jq -S .) \
    >"$WORK/out" || fail "the metadata of $1"
}
whole() { # IMAGE: the same as rbd/disk, with an object map
  alike "$1"
  checked "$1"
}
ask rbd export --no-progress --export-format 2 rbd/disk "$WORK/v2.theirs"
ask "$FOREBAY" export --export-format 2 rbd/disk "$WORK/v2.ours"
alone export --export-format 2 rbd/disk "$WORK/v2.alone"
cmp "$WORK/v2.ours" "$WORK/v2.alone" >"$WORK/out" 2>&1 || fail "with a daemon and without, an image is exported in two ways"
ask "$FOREBAY" import --export-format 2 "$WORK/v2.theirs" rbd/v2-theirs
whole rbd/v2-theirs
ask rbd import --no-progress --export-format 2 "$WORK/v2.ours" rbd/v2-ours
whole rbd/v2-ours
alone import --export-format 2 "$WORK/v2.theirs" rbd/v2-alone
whole rbd/v2-alone
diff <(rbd info rbd/disk --format json 2>/dev/null | jq -c '[.order, .features]') \
  <(rbd info rbd/v2-alone --format json 2>/dev/null | jq -c '[.order, .features]') >"$WORK/out" || fail "order and features"
ask "$FOREBAY" import --export-format 2 "$WORK/v2.theirs" local/v2
ask "$FOREBAY" deep cp local/v2 rbd/v2-back
whole rbd/v2-back
ok "images with their snapshots, exported and imported by either, and through the embedded store"

# Copies, and clones.
ask "$FOREBAY" cp rbd/disk@one rbd/copy
same rbd/disk@one rbd/copy "a copy of a snapshot"
alone deep cp rbd/disk rbd/deep
whole rbd/deep
ask rbd clone rbd/disk@two rbd/child
io rbd/child 'write -P 0x51 5M 4k' 'discard 0 1M' 'write -P 0x52 20M 4k'
ask rbd snap create --no-progress rbd/child@first
io rbd/child 'write -P 0x53 6M 4k' 'discard 2M 1M'
for pair in "first " " first"; do
  to=${pair% *} from=${pair#* } image=rbd/child
  [[ -z $to ]] || image=rbd/child@$to
  ask "$FOREBAY" export-diff "$image" ${from:+--from-snap "$from"} "$WORK/child.${to:-head}"
done
ask rbd create --size 1M rbd/child-copy
for part in first head; do ask rbd import-diff --no-progress "$WORK/child.$part" rbd/child-copy; done
same rbd/child@first rbd/child-copy@first "a clone's snapshot, with what its parent has"
same rbd/child rbd/child-copy "a clone, with what its parent has"
# A deep copy of a clone is a clone of the same parent, with its own objects alone.
copies=0
own() { rados -p rbd ls 2>/dev/null | grep -c "$(rbd info "$1" --format json 2>/dev/null | jq -r .block_name_prefix)"; }
for by in alone "ask $FOREBAY" "ask rbd"; do
  sister=rbd/sister$((++copies))
  $by deep cp rbd/child $sister
  same rbd/child@first $sister@first "the snapshot of a clone's deep copy by $by"
  same rbd/child $sister "a clone's deep copy by $by"
  rbd children rbd/disk@two 2>/dev/null | grep -q ${sister#*/} || fail "the child by $by"
  (($(own $sister) <= $(own rbd/child))) || { echo "$(own $sister) of $(own rbd/child)" >"$WORK/out"; fail "objects by $by"; }
  ask rbd snap purge --no-progress $sister
  ask "$FOREBAY" rm $sister
done
limit 60 "$FOREBAY" deep cp rbd/child local/sister >"$WORK/out" 2>&1
[[ $? == 2 ]] || fail "a clone whose parent is in another place"
grep -q -- '--flatten' "$WORK/out" || fail "what to do about it"
ask "$FOREBAY" deep cp --flatten rbd/child rbd/flat
same rbd/child@first rbd/flat@first "the snapshot of a clone's deep copy"
same rbd/child rbd/flat "a clone's deep copy"
ask rbd info rbd/flat
grep -q 'parent:' "$WORK/out" && fail "a deep copy that is a clone"
ask "$FOREBAY" cp rbd/child local/child
rm -f "$WORK/local"
ask "$FOREBAY" export local/child "$WORK/local"
cmp "$(content rbd/child)" "$WORK/local" >"$WORK/out" 2>&1 || fail "a clone's copy in the store"
# Features and the data pool of a copy are the source's, or those that are asked for.
ask ceph osd pool create data 8
properties() { rbd info "$1" --format json 2>/dev/null | jq -c '[.features, .data_pool]'; }
expected() { [[ $(properties "$1") == "$2" ]] || { properties "$1" >"$WORK/out"; fail "the features and the data pool of $1"; }; }
ask "$FOREBAY" cp rbd/disk rbd/other --image-feature layering,exclusive-lock --data-pool data
expected rbd/other '[["layering","exclusive-lock","data-pool"],"data"]'
same rbd/disk rbd/other "a copy with its data in another pool"
alone deep cp rbd/disk rbd/shared --image-shared
expected rbd/shared '[["layering","deep-flatten"],null]'
alike rbd/shared
ask "$FOREBAY" import --export-format 2 --data-pool data "$WORK/v2.theirs" rbd/v2-data
whole rbd/v2-data
alone import --image-feature layering --data-pool data "$(content rbd/disk)" rbd/raw
expected rbd/raw '[["layering","data-pool"],"data"]'
same rbd/disk rbd/raw "an import with its data in another pool"
ok "copies, deep copies, and clones with what their parents have"
