#!/usr/bin/env bash
# The management of images on a real cluster of its own, beside `rbd`: the trash, metadata, locks, features, object maps,
# watches. What either does the other finds, and both print the same.
#
#   FOREBAY=.../forebay rbd-manage.sh
#
# Prints a line for each check.
set -uo pipefail

NAME=rbd-manage; source "$(dirname "$0")/../lab/cluster.sh"

ours() { ask "$FOREBAY" "$@"; }
fails_with() { # CODE TEXT ARGUMENTS...
  local code=$1 text=$2 status
  shift 2
  limit 60 "$FOREBAY" "$@" >"$WORK/out" 2>&1 </dev/null
  status=$?
  [[ $status == "$code" ]] && grep -q "$text" "$WORK/out" || fail "the refusal of $* (status $status)"
}
they_refuse() { limit 60 rbd "$@" >"$WORK/out" 2>&1 </dev/null && fail "rbd $*"; }
# Both print the same, as JSON key by key and as columns.
shape() { # ARGUMENTS...
  peer_reads 120 rbd "$@" --format json >"$WORK/theirs" 2>"$WORK/out" || fail "rbd $*"
  limit 60 "$FOREBAY" "$@" --format json >"$WORK/ours" 2>"$WORK/out" || fail "forebay $*"
  # Where there is no metadata, rbd prints nothing.
  [[ -s $WORK/theirs ]] || echo '{}' >"$WORK/theirs"
  jq -S 'if type == "object" then del(.exports) else . end' "$WORK/ours" >"$WORK/ours.sorted"
  jq -S . "$WORK/theirs" | diff - "$WORK/ours.sorted" >"$WORK/out" || fail "the JSON of $*"
  peer_reads 120 rbd "$@" >"$WORK/theirs" 2>"$WORK/out" || fail "rbd $* as columns"
  limit 60 "$FOREBAY" "$@" >"$WORK/ours" 2>"$WORK/out" || fail "forebay $* as columns"
  diff "$WORK/theirs" "$WORK/ours" >"$WORK/out" || fail "the columns of $*"
}
id_of() { rbd info "rbd/$1" --format json 2>/dev/null | jq -r .id; }
trashed() { rbd trash ls rbd --format json 2>/dev/null | jq -r --arg name "$1" '.[] | select(.name == $name) | .id'; }
in_both_ways() { # FUNCTION: with the daemon, and with a client of the command's own
  "$@" daemon
  FOREBAY_DATA=$WORK/nothing "$@" direct
}
# rbd finds nothing wrong with the map of an image or snapshot, which is valid.
true_map() { # IMAGE
  limit 90 rbd object-map check --no-progress "$1" >"$WORK/out" 2>&1 </dev/null || fail "rbd object-map check $1"
  grep -q 'object map error' "$WORK/out" && fail "rbd finds the map of $1 wrong"
  ask rbd info "$1"
  grep -q 'invalid' "$WORK/out" && fail "the map of $1 is marked as invalid"
  limit 90 "$FOREBAY" object-map check --no-progress "$1" --format json >"$WORK/ours" 2>"$WORK/out" || fail "check $1"
  jq -e '.valid and .wrong == 0' "$WORK/ours" >"$WORK/out" || fail "forebay finds the map of $1 wrong"
}

start_cluster
start_daemon
ok "a cluster, and a daemon beside it"

# The page that lists the commands of rbd is true.
here=$(dirname "$0")
"$here/rbd-commands.py" "$FOREBAY" "$here/../../docs/rbd-commands.md" >"$WORK/out" 2>&1 || fail "docs/rbd-commands.md"
ok "commands and options of rbd: $(<"$WORK/out")"

# The trash.
trash() { # MODE
  local id
  for image in mine theirs both; do ask rbd create --size 8M "rbd/$image"; done
  ask rbd bench --io-type write --io-size 64K --io-total 1M rbd/both
  ask rbd export --no-progress rbd/both "$WORK/both.$1"
  ask rbd snap create --no-progress rbd/both@s
  ask rbd clone --rbd-default-clone-format 2 rbd/both@s rbd/clone
  ours trash mv rbd/mine
  ask rbd trash mv rbd/theirs --expires-at '2 weeks'
  ours trash mv rbd/both
  ours trash mv rbd/clone --expires-at '1 hour'
  for how in "" --long --all "--long --all"; do
    # shellcheck disable=SC2086
    shape trash ls $how rbd
  done
  # To the byte, but for the times.
  rados -p rbd getomapval rbd_trash "id_$(trashed mine)" "$WORK/value" >"$WORK/out" 2>&1 || fail "our entry"
  [[ $(stat -c %s "$WORK/value") == 32 && $(head -c 15 "$WORK/value" | xxd -p) == 02011a00000000040000006d696e65 &&
    $(tail -c 1 "$WORK/value" | xxd -p) == 00 ]] || fail "our entry to the byte"
  # A clone in the trash has its parent there.
  ask rbd trash restore "rbd/$(trashed clone)"
  ask rbd export --no-progress rbd/clone "$WORK/clone.theirs.$1"
  cmp "$WORK/clone.theirs.$1" "$WORK/both.$1" >"$WORK/out" 2>&1 || fail "a clone of an image in the trash"
  ours export --no-progress rbd/clone "$WORK/clone.$1"
  cmp "$WORK/clone.$1" "$WORK/both.$1" >"$WORK/out" 2>&1 || fail "a clone of an image in the trash, as we read it"
  ask rbd rm --no-progress rbd/clone
  # Restored by the other.
  ask rbd trash restore "rbd/$(trashed mine)"
  id=$(trashed theirs)
  fails_with 10 deferment trash rm "rbd/$id"
  ours trash restore "rbd/$id" --image renamed
  [[ $(id_of renamed) == "$id" ]] || fail "the id of a restored image"
  shape trash ls rbd
  # One with snapshots is kept.
  id=$(trashed both)
  fails_with 6 '1 snapshot' trash rm "rbd/$id"
  fails_with 6 "keeps $id (both)" trash purge rbd
  ours trash restore "rbd/$id"
  ask rbd export --no-progress rbd/both "$WORK/again.$1"
  cmp "$WORK/again.$1" "$WORK/both.$1" >"$WORK/out" 2>&1 || fail "a restored image"
  ask rbd snap rm --no-progress rbd/both@s
  # Removed by the other, and purged.
  for image in both mine renamed; do ours trash mv rbd/$image; done
  ask rbd trash rm --no-progress "rbd/$(trashed both)"
  ours trash rm "rbd/$(trashed mine)"
  fails_with 3 'no image of the id' trash rm rbd/0123456789ab
  fails_with 9 threshold trash purge rbd --threshold 0.5
  ours trash purge rbd
  [[ $(rbd trash ls rbd) == "" ]] || fail "what is left in the trash"
  ask rbd create --size 1M rbd/open
  rbd bench --io-type read --io-size 4K --io-total 1T rbd/open >/dev/null 2>&1 &
  local reader=$!
  watched() { [[ $(rbd status rbd/open) == *client.* ]]; }
  await 30 "a reader watches" watched
  fails_with 6 'open elsewhere' trash mv rbd/open
  kill -9 $reader
  wait $reader 2>/dev/null
  unwatched() { [[ $(rbd status rbd/open) == *none* ]]; }
  await 60 "the watch has expired" unwatched
  ours trash mv rbd/open
  ours trash purge rbd
  rados -p rbd ls 2>/dev/null | grep -E 'rbd_(data|header|object_map|id)' >"$WORK/out" && fail "objects that are left"
}
ask ceph config set osd osd_client_watch_timeout 6
in_both_ways trash
ok "the trash: listed alike, and whatever either moved there the other restores and removes"

# Metadata.
metadata() { # MODE
  ask rbd create --size 1M rbd/meta
  shape image-meta ls rbd/meta
  ours image-meta set rbd/meta mine 'of two words'
  ask rbd image-meta set rbd/meta theirs value
  shape image-meta ls rbd/meta
  [[ $(rbd image-meta get rbd/meta mine) == 'of two words' ]] || fail "a value of ours"
  [[ $("$FOREBAY" image-meta get rbd/meta theirs) == value ]] || fail "a value of theirs"
  ours image-meta rm rbd/meta theirs
  shape image-meta ls -p rbd --image meta
  ask rbd image-meta rm rbd/meta mine
  fails_with 3 "'mine'" image-meta rm rbd/meta mine
  fails_with 3 'no image' image-meta ls rbd/none
  shape image-meta ls rbd/meta
  ask rbd rm --no-progress rbd/meta
}
in_both_ways metadata
ok "metadata: set, listed and removed by either"

# Locks.
locks() { # MODE
  local locker
  ask rbd create --size 4M rbd/locked
  shape lock ls rbd/locked
  ours lock add rbd/locked by-hand
  shape lock ls rbd/locked
  they_refuse lock add rbd/locked other
  fails_with 6 'locked already' lock add rbd/locked other
  fails_with 3 "no lock 'none'" lock rm rbd/locked none client.1
  locker=$(rbd lock ls rbd/locked --format json | jq -r '.[0].locker')
  case $1 in
    # The daemon would be fenced by rbd.
    daemon) ours lock rm rbd/locked by-hand "$locker" ;;
    *) ask rbd lock rm rbd/locked by-hand "$locker" ;;
  esac
  ask rbd lock add rbd/locked one --shared tag
  ours lock add rbd/locked two --shared tag
  shape lock ls rbd/locked
  fails_with 6 'locked already' lock add rbd/locked three --shared other
  # A lock of rbd, whose client is gone: it is fenced all the same.
  locker=$(rbd lock ls rbd/locked --format json | jq -r '.[] | select(.id == "one")')
  ours lock rm rbd/locked one "$(jq -r .locker <<<"$locker")"
  ceph osd blocklist ls >"$WORK/out" 2>&1
  grep -q "$(jq -r .address <<<"$locker")" "$WORK/out" || fail "the holder of a lock is not fenced"
  ours lock rm rbd/locked two "$(rbd lock ls rbd/locked --format json | jq -r '.[0].locker')"
  shape lock ls rbd/locked
  # An automatic one of a living client, which loses its image.
  rbd bench --io-type write --io-size 4K --io-total 1T rbd/locked >"$WORK/writer" 2>&1 &
  local writer=$!
  automatic() { [[ $(rbd lock ls rbd/locked --format json) == *'"auto '* ]]; }
  await 30 "rbd has the lock" automatic
  shape lock ls rbd/locked
  locker=$(rbd lock ls rbd/locked --format json | jq -r '.[0]')
  ours lock rm -p rbd --image locked "$(jq -r .id <<<"$locker")" "$(jq -r .locker <<<"$locker")"
  gone() { ! kill -0 $writer; }
  await 60 "a fenced writer ends" gone
  wait $writer 2>/dev/null && fail "a fenced writer ends well"
  ask rbd bench --io-type write --io-size 4K --io-total 64K rbd/locked
  ask rbd rm --no-progress rbd/locked
}
in_both_ways locks
ok "locks: listed alike, taken and removed by either, and their holders fenced"

# Features, and the maps that come with them.
features() { # MODE
  ask rbd create --size 24M --object-size 1M rbd/featured
  ask rbd bench --io-type write --io-pattern rand --io-size 4096 --io-total 256K rbd/featured
  ask rbd snap create --no-progress rbd/featured@one
  ask rbd bench --io-type write --io-pattern rand --io-size 4096 --io-total 32K rbd/featured
  true_map rbd/featured; true_map rbd/featured@one
  ours feature disable rbd/featured fast-diff
  ask rbd info rbd/featured
  grep -q 'features: layering, exclusive-lock, deep-flatten$' "$WORK/out" || fail "features that we disabled"
  rados -p rbd ls 2>/dev/null | grep 'object_map' >"$WORK/out" && fail "maps that are left"
  fails_with 2 'disabled already' feature disable rbd/featured object-map
  ours feature disable rbd/featured exclusive-lock deep-flatten
  fails_with 2 'needs exclusive-lock' feature enable rbd/featured object-map
  fails_with 9 journaling feature enable rbd/featured journaling
  fails_with 2 'cannot be changed' feature disable rbd/featured layering
  fails_with 2 'not enabled' object-map check rbd/featured
  ask rbd bench --io-type write --io-pattern rand --io-size 4096 --io-total 32K rbd/featured
  ours feature enable rbd/featured exclusive-lock object-map
  ask rbd info rbd/featured
  grep -q 'features: layering, exclusive-lock, object-map, fast-diff$' "$WORK/out" || fail "features that we enabled"
  grep -q 'flags: object map invalid, fast diff invalid' "$WORK/out" || fail "flags of the image"
  ask rbd info rbd/featured@one
  grep -q 'flags: object map invalid, fast diff invalid' "$WORK/out" || fail "flags of the snapshot"
  ours object-map rebuild --no-progress rbd/featured
  ours object-map rebuild --no-progress rbd/featured@one
  true_map rbd/featured; true_map rbd/featured@one
  # Those of rbd are rebuilt by us, and ours by rbd.
  ask rbd feature disable rbd/featured object-map
  ask rbd feature enable rbd/featured fast-diff
  ours object-map rebuild --no-progress rbd/featured@one
  ours object-map rebuild --no-progress rbd/featured
  true_map rbd/featured; true_map rbd/featured@one
  ours feature disable rbd/featured object-map
  ours feature enable rbd/featured object-map
  ask rbd object-map rebuild --no-progress rbd/featured
  ask rbd object-map rebuild --no-progress rbd/featured@one
  true_map rbd/featured; true_map rbd/featured@one
  # A map that is wrong is found by either, in the same words.
  local object
  object=rbd_data.$(id_of featured).$(printf %016x 23)
  rados -p rbd rm "$object" >/dev/null 2>&1
  ours object-map rebuild --no-progress rbd/featured
  ask rados -p rbd put "$object" /etc/hostname
  for by in ours ask\ rbd; do
    $by object-map check --no-progress rbd/featured
    grep -q "object map error: object $object marked as [013], but should be [13]" "$WORK/out" || fail "a wrong map, by $by"
  done
  ask rbd info rbd/featured
  grep -q 'flags: object map invalid, fast diff invalid' "$WORK/out" || fail "flags of a wrong map"
  ours object-map rebuild --no-progress rbd/featured
  true_map rbd/featured
  ask rados -p rbd rm "$object"
  ask rados -p rbd rm "rbd_object_map.$(id_of featured)"
  ours object-map rebuild --no-progress rbd/featured
  true_map rbd/featured
  ask rbd snap purge --no-progress rbd/featured
  ask rbd rm --no-progress rbd/featured
  rados -p rbd ls 2>/dev/null | grep -E 'rbd_(data|header|object_map)' >"$WORK/out" && fail "objects that are left"
}
in_both_ways features
ok "features and object maps: changed, checked and rebuilt by either"

# Groups: their images and snapshots, made, removed and rolled back to by either.
same_group() { # IMAGE: both say the same of its group
  local words='[.group, .features, .op_features]'
  rbd info "rbd/$1" --format json 2>/dev/null | jq -S "$words" >"$WORK/theirs"
  "$FOREBAY" info "rbd/$1" --format json | jq -S "$words" | diff "$WORK/theirs" - >"$WORK/out" 2>&1 || fail "the group of $1"
}
groups() { # MODE
  local image
  shape group ls rbd
  for image in a b; do
    ask rbd create --size 4M "rbd/$image"
    ask qemu-io -f raw "rbd:rbd/$image:conf=$CEPH_CONF" -c 'write -P 1 0 64K'
  done
  ours group create rbd/mine
  ask rbd group create rbd/theirs
  fails_with 5 'exists already' group create rbd/theirs
  they_refuse group create rbd/mine
  ours group image add rbd/theirs rbd/a
  ask rbd group image add rbd/theirs rbd/b
  fails_with 5 'belongs to the group rbd/theirs' group image add rbd/mine rbd/b
  they_refuse group image add rbd/mine rbd/a
  for image in a b; do same_group "$image"; done
  shape group ls rbd; shape group image ls rbd/theirs; shape group image ls rbd/mine
  ours group snap create rbd/theirs@ours
  ask rbd group snap create rbd/theirs@rbds
  fails_with 5 'exists already' group snap create rbd/theirs@rbds
  they_refuse group snap create rbd/theirs@ours
  shape group snap ls rbd/theirs
  for image in a b; do shape snap ls --all "rbd/$image"; done
  # Each is rolled back to by the other.
  for image in a b; do ask qemu-io -f raw "rbd:rbd/$image:conf=$CEPH_CONF" -c 'write -P 2 0 128K'; done
  ask rbd group snap rollback --no-progress rbd/theirs@ours
  for image in a b; do
    ask qemu-io -f raw "rbd:rbd/$image:conf=$CEPH_CONF" -c 'read -P 1 0 64K' -c 'read -P 0 64K 64K' -c 'write -P 3 0 128K'
    grep -q 'Pattern verification failed' "$WORK/out" && fail "rbd rolls $image back to our snapshot"
  done
  ours group snap rollback --no-progress rbd/theirs@rbds
  for image in a b; do
    ask qemu-io -f raw "rbd:rbd/$image:conf=$CEPH_CONF" -c 'read -P 1 0 64K' -c 'read -P 0 64K 64K'
    grep -q 'Pattern verification failed' "$WORK/out" && fail "we roll $image back to a snapshot of rbd"
    true_map "rbd/$image"
  done
  ask rbd group snap rename rbd/theirs@ours renamed
  ours group snap rename rbd/theirs@rbds others
  shape group snap ls rbd/theirs
  fails_with 6 'has 2 snapshots' rm rbd/a
  ours group snap rm rbd/theirs@others
  ask rbd group snap rm rbd/theirs@renamed
  for image in a b; do shape snap ls --all "rbd/$image"; done
  fails_with 6 'belongs to the group rbd/theirs' rm rbd/a
  they_refuse rm --no-progress rbd/b
  fails_with 6 'belongs to the group rbd/theirs' trash mv rbd/a
  # Removed by the other, with a snapshot.
  ours group snap create rbd/theirs@last
  ask rbd group image rm rbd/theirs rbd/a
  ours group rename rbd/theirs rbd/renamed
  shape group image ls rbd/renamed
  case $1 in
    daemon) ask rbd group rm rbd/renamed ;;
    *) ours group rm rbd/renamed ;;
  esac
  ask rbd group create rbd/renamed
  ask rbd group image add rbd/renamed rbd/a
  ask rbd group snap create rbd/renamed@last
  ours group image rm rbd/renamed rbd/a
  ours group rm rbd/renamed
  ask rbd group rm rbd/mine
  shape group ls rbd
  for image in a b; do
    same_group "$image"
    ours rm "rbd/$image"
  done
  rados -p rbd ls 2>/dev/null | grep -E 'rbd_(data|header|object_map|id|group_header)' >"$WORK/out" && fail "objects that are left"
}
in_both_ways groups
ok "groups: images, snapshots of one moment, rollbacks, made and removed by either"

# Namespaces.
same_info() { # IMAGE: both say the same of it
  rbd info "$1" --format json 2>/dev/null | jq -S 'del(.access_timestamp, .modify_timestamp)' >"$WORK/theirs"
  "$FOREBAY" info "$1" --format json | jq -S 'del(.pool, .access_timestamp, .modify_timestamp)' |
    diff "$WORK/theirs" - >"$WORK/out" 2>&1 || fail "what both say of $1"
}
namespaces() { # MODE
  shape namespace ls rbd
  ours namespace create rbd/mine
  ask rbd namespace create rbd/theirs
  fails_with 5 'exists already' namespace create rbd/theirs
  they_refuse namespace create rbd/mine
  fails_with 3 'no namespace rbd/none' ls rbd/none
  shape namespace ls rbd
  [[ $(rados -p rbd listomapkeys rbd_namespace 2>/dev/null | tr '\n' ' ') == "name_mine name_theirs " ]] || fail "our entry"
  rados -p rbd -N mine getomapval rbd_directory state "$WORK/value" >"$WORK/out" 2>&1 || fail "the state of the directory"
  [[ $(xxd -p "$WORK/value") == 00 ]] || fail "the state of the directory to the byte"
  for place in mine theirs; do
    ours create --size 8M "rbd/$place/ours"
    ask rbd create --size 8M "rbd/$place/rbds"
    ask rbd bench --io-type write --io-size 64K --io-total 1M "rbd/$place/ours"
    limit 60 "$FOREBAY" bench --no-progress --io-type write --io-size 64K --seconds 1 "rbd/$place/rbds" >"$WORK/out" 2>&1 || fail "bench"
    for image in ours rbds; do
      ask rbd export --no-progress "rbd/$place/$image" "$WORK/$place.$image.theirs.$1"
      ours export --no-progress "rbd/$place/$image" "$WORK/$place.$image.ours.$1"
      cmp "$WORK/$place.$image.theirs.$1" "$WORK/$place.$image.ours.$1" >"$WORK/out" 2>&1 || fail "rbd/$place/$image"
      same_info "rbd/$place/$image"
      true_map "rbd/$place/$image"
    done
    shape ls "rbd/$place"; shape ls --long "rbd/$place"
  done
  shape ls --namespace mine rbd
  # Clones between them, and groups and the trash in them.
  ours snap create --no-progress rbd/mine/ours@s
  ask rbd clone --rbd-default-clone-format 2 rbd/mine/ours@s rbd/theirs/clone
  ours clone rbd/mine/ours@s rbd/clone
  shape children rbd/mine/ours; same_info rbd/clone; same_info rbd/theirs/clone
  ask rbd export --no-progress rbd/clone "$WORK/of-namespace.$1"
  cmp "$WORK/mine.ours.ours.$1" "$WORK/of-namespace.$1" >"$WORK/out" 2>&1 || fail "a clone of an image in a namespace"
  ours flatten --no-progress rbd/theirs/clone
  ask rbd flatten --no-progress rbd/clone
  ours rm --no-progress rbd/theirs/clone; ours rm --no-progress rbd/clone
  ask rbd snap rm --no-progress rbd/mine/ours@s
  ours group create rbd/mine/g
  ask rbd group image add rbd/mine/g rbd/mine/ours
  ours group image add rbd/mine/g rbd/mine/rbds
  shape group ls rbd/mine; shape group image ls rbd/mine/g
  ours group snap create rbd/mine/g@1
  ask rbd group snap create rbd/mine/g@2
  shape group snap ls rbd/mine/g
  ask rbd group rm rbd/mine/g
  ours trash mv rbd/mine/ours
  ask rbd trash mv rbd/mine/rbds
  shape trash ls rbd/mine
  fails_with 6 'images in its trash' namespace rm rbd/mine
  fails_with 6 'has images' namespace rm rbd/theirs
  they_refuse namespace remove rbd/mine
  for id in $(rbd trash ls rbd/mine --format json 2>/dev/null | jq -r '.[].id'); do ours trash rm --no-progress "rbd/mine/$id"; done
  for image in ours rbds; do ask rbd rm --no-progress "rbd/theirs/$image"; done
  ask rbd namespace remove rbd/mine
  ours namespace rm rbd/theirs
  shape namespace ls rbd
  for place in mine theirs; do
    [[ -z $(rados -p rbd -N "$place" ls 2>/dev/null) ]] || fail "objects that are left in $place"
  done
}
in_both_ways namespaces
ok "namespaces: made and removed by either, images, clones, groups and the trash in them"

# Striped images: either makes them, writes, copies, clones and shrinks them, and both read the same.
same_bytes() { # IMAGE WHAT: rbd and forebay read the same
  rm -f "$WORK"/bytes.{theirs,ours}
  ask rbd export --no-progress "$1" "$WORK/bytes.theirs"
  ours export --no-progress "$1" "$WORK/bytes.ours"
  cmp "$WORK/bytes.theirs" "$WORK/bytes.ours" >"$WORK/out" 2>&1 || fail "$2"
}
striping() { # MODE
  local image
  fails_with 2 'stripe unit' create --size 8M --object-size 256K --stripe-unit 3000 --stripe-count 3 rbd/s.ours
  fails_with 2 'stripe-count' create --size 8M --stripe-unit 64K rbd/s.ours
  they_refuse create --size 8M --object-size 256K --stripe-unit 3000 --stripe-count 3 rbd/s.ours
  ours create --size 9M --object-size 256K --stripe-unit 65536 --stripe-count 3 rbd/s.ours
  ask rbd create --size 9M --object-size 256K --stripe-unit 65536 --stripe-count 3 rbd/s.rbds
  ask qemu-io -f raw "rbd:rbd/s.ours:conf=$CEPH_CONF" -c 'write -P 1 0 1000K' -c 'write -P 2 5M 300K' -c 'discard 100K 300K'
  limit 60 "$FOREBAY" bench --no-progress --io-type write --io-size 96K --io-pattern rand --seconds 1 rbd/s.rbds >"$WORK/out" 2>&1 || fail "bench"
  for image in s.ours s.rbds; do
    same_bytes "rbd/$image" "the bytes of $image"; same_info "rbd/$image"; true_map "rbd/$image"
    diff <(rbd info "rbd/$image" 2>/dev/null </dev/null) <("$FOREBAY" info "rbd/$image" 2>&1) >"$WORK/out" || fail "info as text"
    # Shrunk into a set by one, grown by the other: nothing that was cut comes back.
    ours snap create --no-progress "rbd/$image@before"
    ours resize --no-progress --allow-shrink --size 5300K "rbd/$image"
    ask rbd resize --no-progress --size 9M "rbd/$image"
    same_bytes "rbd/$image" "$image, shrunk by forebay"
    ask rbd resize --no-progress --allow-shrink --size 4900K "rbd/$image"
    ours resize --no-progress --size 9M "rbd/$image"
    same_bytes "rbd/$image" "$image, shrunk by rbd"; true_map "rbd/$image"
    same_bytes "rbd/$image@before" "the snapshot of $image"
    # The ranges that have changed, in whatever order; forebay joins those that adjoin.
    rbd diff --from-snap before "rbd/$image" --format json 2>/dev/null >"$WORK/theirs" </dev/null || fail "rbd diff"
    limit 60 "$FOREBAY" diff --from-snap before "rbd/$image" --format json >"$WORK/ours" 2>"$WORK/out" || fail "forebay diff"
    covered "$WORK/theirs" "$WORK/ours" >"$WORK/out" 2>&1 || fail "changes of $image"
    # Streams both ways.
    rm -f "$WORK"/stream
    ours export --no-progress --export-format 2 "rbd/$image" "$WORK/stream"
    ask rbd import --no-progress --export-format 2 "$WORK/stream" rbd/s.copy
    same_bytes rbd/s.copy "$image, exported by forebay"; same_bytes rbd/s.copy@before "its snapshot"
    rbd info rbd/s.copy --format json 2>/dev/null | jq -e '.stripe_unit == 65536 and .stripe_count == 3' >"$WORK/out" || fail "striping of a stream by forebay"
    ask rbd snap purge --no-progress rbd/s.copy; ours rm --no-progress rbd/s.copy
    rm -f "$WORK"/stream
    ask rbd export --no-progress --export-format 2 "rbd/$image" "$WORK/stream"
    ours import --no-progress --export-format 2 "$WORK/stream" rbd/s.copy
    same_bytes rbd/s.copy "$image, exported by rbd"; same_info rbd/s.copy
    ours snap purge --no-progress rbd/s.copy; ask rbd rm --no-progress rbd/s.copy
    # Clones of other striping, copied up by either.
    ours clone "rbd/$image@before" rbd/s.clone --stripe-unit 16K --stripe-count 2
    ask qemu-io -f raw "rbd:rbd/s.clone:conf=$CEPH_CONF" -c 'write -P 7 90K 20K' -c 'write -P 8 4M 1K'
    limit 60 "$FOREBAY" bench --no-progress --io-type write --io-size 4K --io-pattern rand --seconds 1 rbd/s.clone >"$WORK/out" 2>&1 || fail "bench"
    same_bytes rbd/s.clone "a clone of $image"; true_map rbd/s.clone; same_info rbd/s.clone
    ours flatten --no-progress rbd/s.clone
    same_bytes rbd/s.clone "a flattened clone of $image"; true_map rbd/s.clone
    ask rbd rm --no-progress rbd/s.clone
    ask rbd clone --rbd-default-clone-format 2 "rbd/$image@before" rbd/s.clone
    ours deep cp --no-progress --flatten rbd/s.clone rbd/s.copy
    same_bytes rbd/s.copy "a copy of a clone by rbd"
    ours rm --no-progress rbd/s.copy; ours rm --no-progress rbd/s.clone
    ours snap rollback --no-progress "rbd/$image@before"
    same_bytes "rbd/$image" "$image, rolled back"
    true_map "rbd/$image"
    ours snap purge --no-progress "rbd/$image"
  done
  ours rm --no-progress rbd/s.rbds; ask rbd rm --no-progress rbd/s.ours
  [[ -z $(rados -p rbd ls 2>/dev/null | grep rbd_data) ]] || fail "objects that are left"
}
# All that forebay calls changed, rbd does too: rbd counts what was written, forebay what differs.
covered() { # THEIRS OURS
  jq -e -n --slurpfile theirs "$1" --slurpfile ours "$2" '
    def joined: sort_by(.offset) | reduce .[] as $r ([];
      if length > 0 and .[-1].end == $r.offset then .[-1].end = $r.offset + $r.length else . + [{start: $r.offset, end: ($r.offset + $r.length)}] end);
    ($theirs[0] | joined) as $all | $ours[0] | length > 0 and all(.[]; . as $r | any($all[]; .start <= $r.offset and $r.offset + $r.length <= .end))'
}
in_both_ways striping
ok "striped images: made, written, copied, cloned and shrunk by either"

# Zeroes that are stored: whoever frees them, both read the same, and the map is true.
sparsify() { # MODE
  local by
  ask rbd create --size 16M --object-size 1M rbd/sparse
  for by in ours ask\ rbd; do
    ask qemu-io -f raw "rbd:rbd/sparse:conf=$CEPH_CONF" -c 'write -P 0 0 4M' -c 'write -P 5 4M 1M' -c 'write -P 0 4160K 128K'
    rm -f "$WORK"/sparse.{before,after}
    ask rbd export --no-progress rbd/sparse "$WORK/sparse.before"
    $by sparsify --no-progress rbd/sparse
    ask rbd export --no-progress rbd/sparse "$WORK/sparse.after"
    cmp "$WORK/sparse.before" "$WORK/sparse.after" >"$WORK/out" 2>&1 || fail "an image sparsified by $by"
    [[ $(rados -p rbd ls 2>/dev/null | grep -c "rbd_data.$(id_of sparse)\.") == 1 ]] || fail "the objects that $by leaves"
    true_map rbd/sparse
  done
  fails_with 2 'power of two' sparsify rbd/sparse --sparse-size 5000
  fails_with 2 'power of two' sparsify rbd/sparse --sparse-size 2M
  ask rbd rm --no-progress rbd/sparse
}
in_both_ways sparsify
ok "zeroes freed by either"

# While a host writes through the daemon.
ask rbd create --size 16M --object-size 512K rbd/busy
ask "$FOREBAY" attach rbd/busy --nbd
uri=$(tail -n 1 "$WORK/out")
truncate -s 16M "$WORK/busy"
STOP=$WORK/stop
host() {
  local round=0 at
  while [[ ! -e $STOP ]]; do
    round=$((round + 1)) at=$(((round * 7919 * 4096) % (16 << 20)))
    qemu-io -f raw -c "write -P $((round % 255 + 1)) $at 4096" "$uri" >"$WORK/host" 2>&1 || return 1
    qemu-io -f raw -c "write -P $((round % 255 + 1)) $at 4096" "$WORK/busy" >/dev/null 2>&1 || return 1
  done
}
host &
HOST=$!
for by in "$FOREBAY" rbd "$FOREBAY"; do
  ask "$by" feature disable rbd/busy object-map
  ask "$by" feature enable rbd/busy object-map
  ask "$by" object-map rebuild --no-progress rbd/busy
  ask "$by" image-meta set rbd/busy by "$by"
done
fails_with 6 exported feature disable rbd/busy exclusive-lock
touch "$STOP"
wait $HOST || fail "the host's writes"
ask "$FOREBAY" detach rbd/busy
ask rbd export --no-progress rbd/busy "$WORK/found"
cmp "$WORK/found" "$WORK/busy" >"$WORK/out" 2>&1 || fail "what the host wrote"
true_map rbd/busy
ok "features and object maps under a host that writes"

# Watches.
mkfifo "$WORK/enter"
"$FOREBAY" watch rbd/busy <"$WORK/enter" >"$WORK/watched" 2>&1 &
WATCH=$!
exec 9>"$WORK/enter"
until_says "$WORK/watched" 'press enter to exit...'
shape status rbd/busy
ask rbd resize --no-progress --size 20M rbd/busy
until_says "$WORK/watched" 'busy received notification: notify_id=[0-9]*, cookie=[0-9]*, notifier_id=[0-9]*, bl.length=[0-9]*'
echo >&9
exec 9>&-
wait $WATCH || fail "a watch ends"
fails_with 3 'no image' watch rbd/none
shape status rbd/busy
ok "watches: of a header, and as status lists them"
