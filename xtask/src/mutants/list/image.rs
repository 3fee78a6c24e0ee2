//! Faults of images.

use super::Mutant;
use crate::mutants::stage::Stage;

const RANGES: Stage = Stage::Test("forebay-block", "range_lock");
const UNIT: Stage = Stage::Lib("forebay-image");
const CLONES: Stage = Stage::Test("forebay-image", "clones");
const LOCKS: Stage = Stage::Test("forebay-image", "locks");
const MAPS: Stage = Stage::Test("forebay-image", "object_map");
const SHARED: Stage = Stage::Test("forebay-image", "shared");
const DEVICE: Stage = Stage::Test("forebay-image", "device");
const CRASH: Stage = Stage::Test("forebay-image", "crash");
const SNAPSHOTS: Stage = Stage::Test("forebay-image", "snapshots");
const FAMILIES: Stage = Stage::Test("forebay-image", "families");
const CRASH_CLONES: Stage = Stage::Test("forebay-image", "crash_clones");
const OWNER: Stage = Stage::Test("forebay-image", "owner");
const CHANGES: Stage = Stage::Test("forebay-image", "changes");
const CRASH_SNAPSHOTS: Stage = Stage::Test("forebay-image", "crash_snapshots");
const TRASH: Stage = Stage::Test("forebay-image", "trash");
const FEATURES: Stage = Stage::Test("forebay-image", "features");
const SPARSE: Stage = Stage::Test("forebay-image", "sparsify");
const RESERVED: Stage = Stage::Test("forebay-image", "reserved");
const GROUPS: Stage = Stage::Test("forebay-image", "groups");
const ENGINE: Stage = Stage::Bin("forebay");
const SIM: Stage = Stage::Sim(&[], 1000);
const SIM_SHARED: Stage = Stage::Sim(&["--shared"], 400);
const SIM_FAMILIES: Stage = Stage::Sim(&["--families"], 1000);

const LOCK: &str = "volume/image/src/exclusive_lock.rs";
const OPEN_IMAGE: &str = "volume/image/src/open_image.rs";
const REQUESTS: &str = "volume/image/src/requests.rs";
const RESIZE: &str = "volume/image/src/resize.rs";
const SNAPSHOT_OPS: &str = "volume/image/src/snapshots.rs";
const CHILDREN: &str = "volume/image/src/children.rs";
const FLATTEN: &str = "volume/image/src/flatten.rs";
const OWNER_OPS: &str = "volume/image/src/owner.rs";
const ASK_OWNER: &str = "volume/image/src/ask_owner.rs";
const CHANGES_OPS: &str = "volume/image/src/changes.rs";
const ROLLBACK: &str = "volume/image/src/rollback.rs";
const OBJECT_MAP: &str = "volume/image/src/objectmap.rs";
const TRASH_OPS: &str = "volume/image/src/trash.rs";
const FEATURE_OPS: &str = "volume/image/src/features.rs";
const REBUILD: &str = "volume/image/src/rebuild.rs";
const IMAGES: &str = "volume/image/src/images.rs";
const SPARSIFY: &str = "volume/image/src/sparsify.rs";
const ADMISSION: &str = "volume/image/src/admission.rs";
const IN_FLIGHT: &str = "base/block/src/in_flight.rs";
const RANGE_LOCK: &str = "base/block/src/range_lock.rs";

pub(super) const LIST: &[Mutant] = &[
    Mutant::new(
        "image-lock-released-early",
        "The exclusive lock is released before writes in flight have ended",
        LOCK,
        "let blocked = image.block_writes().await;\n        if let Err(error) = image.flush()",
        "let blocked = ();\n        if let Err(error) = image.flush()",
        &[LOCKS, SIM_SHARED],
    ),
    Mutant::new(
        "image-map-clears-early",
        "The object map says that an object is not there before it is removed",
        REQUESTS,
        "map.update(object, if removes { ObjectMapState::Pending } else { ObjectMapState::Exists }, None).await?;",
        "map.update(object, if removes { ObjectMapState::Nonexistent } else { ObjectMapState::Exists }, None).await?;",
        &[MAPS, SIM_SHARED],
    ),
    Mutant::new(
        "image-map-trims-early",
        "Shrinking tells the object map that objects are gone before they are",
        RESIZE,
        "map.update_range(first_whole..end, ObjectMapState::Pending, Some(ObjectMapState::Exists)).await?;",
        "map.update_range(first_whole..end, ObjectMapState::Nonexistent, Some(ObjectMapState::Exists)).await?;",
        &[MAPS, LOCKS, SIM_SHARED],
    ),
    Mutant::new(
        "image-map-misses-copies",
        "Shrinking copies an object up without telling the object map",
        RESIZE,
        "map.update(object, state, None).await?;",
        "map.update(object, state, Some(ObjectMapState::Clean)).await?;",
        &[MAPS, SIM_SHARED],
    ),
    Mutant::new(
        "image-shrink-lets-writes-in",
        "While a clone shrinks, a write to what stays of its last object copies up what is being cut off",
        RESIZE,
        "true => new_size - new_size % shared.layout().object_size(),",
        "true => new_size,",
        &[CLONES, SIM_SHARED],
    ),
    Mutant::new(
        "image-map-misses-writes",
        "An object is written before the object map says that it is there",
        REQUESTS,
        "map.is_marked(object) && matches!(change, Change::Write(_))",
        "matches!(change, Change::Write(_))",
        &[MAPS, LOCKS, SIM_SHARED],
    ),
    Mutant::new(
        "image-owner-not-fenced",
        "A dead owner's lock is broken, and the owner is not put on the blocklist",
        LOCK,
        "objects.blocklist(&locker.address, None).await?;",
        "",
        &[LOCKS, SIM_SHARED],
    ),
    Mutant::new(
        "image-stale-header",
        "The header is not read again when the lock is taken",
        LOCK,
        "image.refresh().await?;\n            let map = image.open_map().await?;",
        "let map = image.open_map().await?;",
        &[LOCKS, SHARED, SIM_SHARED],
    ),
    Mutant::new(
        "image-discard-shows-parent",
        "Discarding a whole object of a clone shows the parent's bytes again",
        REQUESTS,
        "if overlap > 0 && matches!(ops[..], [ObjectOp::Remove]) {",
        "if overlap > u64::MAX - 1 && matches!(ops[..], [ObjectOp::Remove]) {",
        &[CLONES, SIM_SHARED],
    ),
    Mutant::new(
        "image-copy-up-after-snapshot",
        "A copy from the parent counts as a change since the last snapshot",
        "volume/image/src/clone.rs",
        "snapc: if keeps { None } else { snapc }",
        "snapc",
        &[CLONES, SIM_SHARED],
    ),
    Mutant::new(
        "image-copy-up-unguarded",
        "A write to a clone does not look whether the object has been copied up",
        REQUESTS,
        "all.extend(guarded.then_some(ObjectOp::AssertExists));",
        "",
        &[CLONES, SIM_SHARED],
    ),
    Mutant::new(
        "image-overlap-kept",
        "A clone that was shrunk and grown shows the parent's bytes again",
        RESIZE,
        "shared.reduce_overlap(overlap.min(new_size));",
        "shared.reduce_overlap(overlap);",
        &[CLONES, SIM_SHARED],
    ),
    Mutant::new(
        "image-shrink-header-first",
        "The header says the new size before what was cut off is durably gone",
        RESIZE,
        "    shared.data().flush().await?;\n    store_size",
        "    store_size",
        &[CRASH, SIM],
    ),
    Mutant::new(
        "image-hold-without-waiting",
        "A range is locked exclusively although writes admitted before have not ended",
        RANGE_LOCK,
        "self.0.shared.drain().await;",
        "",
        &[RANGES, DEVICE],
    ),
    Mutant::new(
        "image-unheard-write-dropped",
        "A write whose caller no longer waits for it is dropped",
        IN_FLIGHT,
        "work.await;\n            drop(guard);",
        "drop((work, guard));",
        &[UNIT, DEVICE],
    ),
    Mutant::new(
        "image-writes-in-turn",
        "Writes submitted as one are polled one after another, and wait for themselves behind an exclusive lock",
        REQUESTS,
        "windowed(objects.max(1), move || in_flight.next()",
        "windowed(1, move || in_flight.next()",
        &[DEVICE],
    ),
    Mutant::new(
        "image-compare-not-alone",
        "A comparison over several objects lets other writes in before it writes",
        REQUESTS,
        "let _hold = shared.enter_alone(extent).await?;",
        "let _hold = shared.enter(extent).await?;",
        &[DEVICE, SIM],
    ),
    Mutant::new(
        "image-removed-under-others",
        "An image is removed that another client has open",
        "volume/image/src/remove.rs",
        "if let Some(other) = others.first() {",
        "if let Some(other) = others.get(1_000_000) {",
        &[LOCKS],
    ),
    Mutant::new(
        "image-outdated-write",
        "A write that waited for the lock goes on although others changed the reservations meanwhile",
        ADMISSION,
        "if epoch == self.epoch.get() { Ok(()) }",
        "if epoch < u64::MAX { Ok(()) }",
        &[RESERVED],
    ),
    Mutant::new(
        "image-parent-past-overlap",
        "Bytes of the parent past the overlap are read",
        OPEN_IMAGE,
        "view.overlap.saturating_sub(start).min(self.layout.object_size())",
        "view.overlap.min(self.layout.object_size())",
        &[CLONES, SIM_SHARED],
    ),
    Mutant::new(
        "image-snapshot-under-writes",
        "Writes go on while a snapshot is created",
        SNAPSHOT_OPS,
        "let hold = shared.enter_alone(Extent::new(0, SIZE_MAX)).await?;",
        "let hold = shared.enter(Extent::new(0, 1)).await?;",
        &[SNAPSHOTS],
    ),
    Mutant::new(
        "image-snapshot-not-flushed",
        "A snapshot is durable before the writes that it shows",
        SNAPSHOT_OPS,
        "shared.data().flush().await?;",
        "",
        &[CRASH_SNAPSHOTS],
    ),
    Mutant::new(
        "image-snapshot-unguarded",
        "A snapshot is created although another client was first",
        SNAPSHOT_OPS,
        "ObjectOp::KvCompare { key: b\"snap_seq\".to_vec(), value: Some(header.snap_seq.to_le_bytes().to_vec()) },",
        "",
        &[SNAPSHOTS],
    ),
    Mutant::new(
        "image-snapshot-map-not-merged",
        "What had changed in a removed snapshot counts as unchanged in the next one",
        SNAPSHOT_OPS,
        "merge_map(shared, &header, snapshot).await?;",
        "let _ = merge_map;",
        &[SNAPSHOTS],
    ),
    Mutant::new(
        "image-snapshot-number-kept",
        "The number of a removed snapshot stays in the pool, with the space that only it needs",
        SNAPSHOT_OPS,
        "match shared.data().snap_remove(SnapId(u64::from_le_bytes(*id))).await {",
        "match Ok::<_, Error>(drop((id, SnapId(0)))) {",
        &[SNAPSHOTS],
    ),
    Mutant::new(
        "image-snapshot-removal-forgotten",
        "An interrupted removal of a snapshot is not completed",
        SNAPSHOT_OPS,
        "        free_removed(shared).await?;\n        Ok(alone)",
        "        Ok(alone)",
        &[CRASH_SNAPSHOTS],
    ),
    Mutant::new(
        "image-snapshot-clones-elsewhere",
        "Only the image's own pool is searched for clones before the protection of a snapshot ends",
        CHILDREN,
        "Some(objects) => objects.pool_ids(),",
        "Some(objects) => vec![objects.pool_id()],",
        &[SNAPSHOTS, FAMILIES],
    ),
    Mutant::new(
        "image-snapshot-limit-passed",
        "One snapshot more than the limit is created",
        SNAPSHOT_OPS,
        "header.snapshots.len() as u64 >= limit",
        "header.snapshots.len() as u64 > limit",
        &[SNAPSHOTS],
    ),
    Mutant::new(
        "image-copy-up-hides-changes",
        "A copy-up marks objects as unchanged in snapshots in which they have changed",
        OBJECT_MAP,
        "encode_update(object..object + 1, state, Some(ObjectMapState::Nonexistent))",
        "encode_update(object..object + 1, state, None)",
        &[SNAPSHOTS],
    ),
    Mutant::new(
        "image-rollback-unmarked",
        "Rolling back creates objects without telling the object map",
        ROLLBACK,
        "map.update(object, ObjectMapState::Exists, None).await?;",
        "map.update(object, ObjectMapState::Exists, Some(ObjectMapState::Exists)).await?;",
        &[SNAPSHOTS],
    ),
    Mutant::new(
        "image-rollback-keeps-newer",
        "Rolling back leaves objects as they are that the snapshot does not have",
        ROLLBACK,
        "own.may_exist(object) || then.get(object) != ObjectMapState::Nonexistent;",
        "own.may_exist(object) && then.get(object) != ObjectMapState::Nonexistent;",
        &[SNAPSHOTS],
    ),
    Mutant::new(
        "clone-recorded-late",
        "A clone is recorded after its header is stored",
        "volume/image/src/images.rs",
        "            source.record(self, id).await?;\n            header = source.inherit(header);",
        "            header = source.inherit(header);",
        &[FAMILIES, CRASH_CLONES],
    ),
    Mutant::new(
        "clone-records-all-left-over",
        "The record of a clone that is being created is taken for a left-over one",
        CHILDREN,
        "    Ok(!is_known)",
        "    Ok(true)",
        &[FAMILIES, CRASH_CLONES],
    ),
    Mutant::new(
        "clone-record-stays",
        "The record of a clone that is removed stays",
        CHILDREN,
        "detach(&there, parent, &child).await?;\n        if let Err",
        "if let Err",
        &[FAMILIES],
    ),
    Mutant::new(
        "snapshot-trash-kept",
        "A snapshot in the trash stays when its last clone is gone",
        CHILDREN,
        "if !header.snapshots.iter().any(|snapshot| is_unused(&snapshot)) {",
        "if header.snapshots.iter().any(|snapshot| is_unused(&snapshot)) {",
        &[FAMILIES],
    ),
    Mutant::new(
        "snapshot-removed-with-clones",
        "A snapshot with clones is removed instead of moved to the trash",
        SNAPSHOT_OPS,
        "0 => remove(shared, &snapshot).await?,\n                    _ =>",
        "_ if snapshot.is_user() => remove(shared, &snapshot).await?,\n                    _ =>",
        &[FAMILIES],
    ),
    Mutant::new(
        "flatten-trusts-map",
        "Flattening takes every object for there that may be there",
        FLATTEN,
        "            Err(error) if error.kind() == ErrorKind::NotFound => {}\n            Err(error) => return Err(error),",
        "            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),\n            Err(error) => return Err(error),",
        &[FAMILIES, CRASH_CLONES],
    ),
    Mutant::new(
        "flatten-ignores-rollback",
        "Flattening does not copy again what a rollback has removed",
        FLATTEN,
        "if shared.rollbacks() == rollbacks && end_dependence(shared).await? {",
        "if end_dependence(shared).await? {",
        &[FAMILIES],
    ),
    Mutant::new(
        "flatten-keeps-snapshots-parent",
        "Flattening takes the parent from snapshots that need it",
        FLATTEN,
        "let keeps = !is_deep && header.snapshots.iter().any(has_parent);",
        "let keeps = false && header.snapshots.iter().any(has_parent);",
        &[FAMILIES],
    ),
    Mutant::new(
        "flatten-lets-go-early",
        "Flattening removes the record of a clone while a read still uses the parent",
        FLATTEN,
        "    if let Some(former) = former {\n        until_unused(former).await;\n    }\n",
        "    drop(former);\n",
        &[FAMILIES],
    ),
    Mutant::new(
        "snapshot-map-left",
        "The object map of a snapshot whose creation was cut short stays",
        SNAPSHOT_OPS,
        "        remove_map(shared, SnapId(u64::from_le_bytes(*id))).await?;\n        match",
        "        match",
        &[SIM_FAMILIES],
    ),
    Mutant::new(
        "owner-repeats-requests",
        "The owner of the lock carries a request out as often as it is sent",
        OWNER_OPS,
        "        Some(Some(result)) => return Some(encode_response(result)),\n        Some(None) => return Some(encode_response(0)),",
        "        Some(Some(_) | None) => {}",
        &[OWNER],
    ),
    Mutant::new(
        "owner-passes-layer-by",
        "An operation for another client passes the layer above the image by",
        OWNER_OPS,
        "Some(operations) => operations.perform(operation, progress).await,",
        "Some(_) => image.perform(operation, progress).await,",
        &[OWNER],
    ),
    Mutant::new(
        "asker-takes-lock",
        "A client takes the lock for what its owner has carried out",
        ASK_OWNER,
        "if !shared.has_other_owner().await? {\n            return Ok(false);",
        "if !shared.has_other_owner().await? || TRIES > 1 {\n            return Ok(false);",
        &[OWNER],
    ),
    Mutant::new(
        "image-diff-misses-removals",
        "Objects that came or went between two snapshots are not among the changes",
        CHANGES_OPS,
        "\n                        || (was == ObjectMapState::Nonexistent) != (now == ObjectMapState::Nonexistent)",
        "",
        &[CHANGES],
    ),
    Mutant::new(
        "image-diff-of-an-older-map",
        "Object maps are believed that were read while a snapshot was created",
        CHANGES_OPS,
        "if snapshots(&now) == snapshots(&header) && flags(&now) == flags(&header) {",
        "if flags(&now).0 == flags(&header).0 {",
        &[CHANGES],
    ),
    Mutant::new(
        "image-diff-without-parent",
        "What a clone reads of its parent is not among its data",
        CHANGES_OPS,
        "None => (0, to.overlap),",
        "None => (0, 0),",
        &[CHANGES],
    ),
    Mutant::new(
        "image-diff-says-what-was",
        "A changed range counts as data or zeroes by what it was before",
        CHANGES_OPS,
        "let exists = !is_zero(&is[bytes]);",
        "let exists = !is_zero(&was[bytes]);",
        &[CHANGES],
    ),
    Mutant::new(
        "image-trash-loses-half-moved",
        "An image that is not fully moved to the trash is removed while it still has its name",
        TRASH_OPS,
        "entry.state == TrashState::Moving && self.directory().name_of(id).await?.is_some()",
        "entry.state == TrashState::Moving && self.directory().name_of(id).await?.is_none()",
        &[TRASH],
    ),
    Mutant::new(
        "image-trash-forgets-deferment",
        "An image is removed from the trash before its time",
        TRASH_OPS,
        "if wall_clock() < entry.deferred_until && !options.force {",
        "if wall_clock() < entry.deleted && !options.force {",
        &[TRASH],
    ),
    Mutant::new(
        "image-trash-entry-goes-first",
        "A restoration removes the entry before the image has its name",
        TRASH_OPS,
        "if let Err(error) = self.give_name(id, name).await {",
        "self.trash().remove(id, &restoring).await?;\n            if let Err(error) = self.give_name(id, name).await {",
        &[TRASH],
    ),
    Mutant::new(
        "image-new-map-is-relied-on",
        "An object map that is enabled counts as valid before it is rebuilt",
        FEATURE_OPS,
        "let flags = |_, flags| if maps { flags | INVALID } else { flags };",
        "let flags = |_, flags| if maps { flags & !INVALID } else { flags };",
        &[FEATURES],
    ),
    Mutant::new(
        "image-features-change-under-writes",
        "Features change while writes are in flight",
        FEATURE_OPS,
        "let _hold = shared.admission().exclusive(Extent::new(0, SIZE_MAX)).await;",
        "let _hold = ();",
        &[FEATURES],
    ),
    Mutant::new(
        "image-rebuild-without-range",
        "A rebuild looks at objects that are being written",
        REBUILD,
        "let _hold = shared.enter_alone(extent_of(shared, &range)).await?;\n            let states = owner.states(shared, range.clone()).await?;\n            for (run, state)",
        "let states = owner.states(shared, range.clone()).await?;\n            for (run, state)",
        &[FEATURES],
    ),
    Mutant::new(
        "image-rebuild-forgets-snapshots",
        "A rebuild marks objects as unchanged that have changed since the snapshot before",
        REBUILD,
        "before if before == seen => ObjectMapState::Clean,",
        "before if before.is_some() => ObjectMapState::Clean,",
        &[FEATURES],
    ),
    Mutant::new(
        "snapshot-number-freed-unclaimed",
        "A number is removed from the pool while another client is about to create its snapshot",
        SNAPSHOT_OPS,
        "let claimed = [&stored[..], &[1]].concat();",
        "let claimed = stored.clone();",
        &[SNAPSHOTS],
    ),
    Mutant::new(
        "image-trash-partly-removed-is-restored",
        "An image in the trash whose removal was cut short counts as whole",
        TRASH_OPS,
        "if begun.get() || entry.state == TrashState::Removing {",
        "if begun.get() && entry.state == TrashState::Moving {",
        &[TRASH],
    ),
    Mutant::new(
        "image-created-under-a-removed-id",
        "An image that is created while another client removes one of its name takes over the id",
        IMAGES,
        "if !directory.replace(name, &left, &id).await? {",
        "return Ok(left);\n            #[allow(unreachable_code)]\n            if !directory.replace(name, &left, &id).await? {",
        &[SHARED],
    ),
    Mutant::new(
        "image-sparsify-lets-writes-in",
        "Writes are admitted between the read of an object and the deallocation of its zeroes",
        SPARSIFY,
        "let _hold = shared.enter_alone(Extent::new(object * size, size)).await?;",
        "drop(shared.enter_alone(Extent::new(object * size, size)).await?);",
        &[SPARSE],
    ),
    Mutant::new(
        "image-sparsify-shows-the-parent",
        "An object of a clone that stores only zeroes is removed",
        REQUESTS,
        "if overlap > 0 && matches!(ops[..], [ObjectOp::Remove]) {",
        "if overlap > object && matches!(ops[..], [ObjectOp::Remove]) && object > 0 {",
        &[SPARSE, CLONES],
    ),
    Mutant::new(
        "lock-broken-after-a-cut",
        "A lock is broken at once although what broke this client's watch may have broken that of the owner",
        LOCK,
        "then.elapsed() < WATCH_NOTICED",
        "then.elapsed() > WATCH_NOTICED",
        &[Stage::Test("forebay-image", "reserved")],
    ),
    Mutant::new(
        "image-closed-with-its-watch",
        "An image that is in use when its pool is closed keeps its lock and its watch",
        IMAGES,
        "image.end_coordination().await;",
        "drop(image);",
        &[LOCKS],
    ),
    Mutant::new(
        "asker-forgets-silence",
        "A request that was carried out in silence fails when it is repeated",
        ASK_OWNER,
        "if silent && !was_so && !matches!(answered, Ok(Answer::Done)) {",
        "if silent && was_so && !matches!(answered, Ok(Answer::Done)) {",
        &[OWNER],
    ),
    Mutant::new(
        "group-writes-not-held",
        "Hosts submit writes while the moments of a group's parts are chosen",
        "bin/forebay/src/engine/held_writes.rs",
        "        self.holds.get() > 0\n",
        "        false\n",
        &[ENGINE],
    ),
    Mutant::new(
        "group-parts-not-held",
        "Writes go on while the parts of a group's snapshot are created",
        "volume/image/src/groups/parts.rs",
        "        if self.hold.is_none() {",
        "        if false {",
        &[GROUPS],
    ),
    Mutant::new(
        "group-complete-early",
        "A snapshot of a group is complete before its first part is created",
        "volume/image/src/wire/group.rs",
        "Self { id, name, is_complete: false,",
        "Self { id, name, is_complete: true,",
        &[GROUPS],
    ),
    Mutant::new(
        "group-complete-while-removed",
        "A snapshot of a group stays complete while its parts are removed",
        "volume/image/src/groups/snapshots.rs",
        "        if snapshot.is_complete {\n            self.replace",
        "        if false {\n            self.replace",
        &[GROUPS],
    ),
    Mutant::new(
        "group-unlisted-parts-stay",
        "Parts of an interrupted snapshot of a group stay when it is removed",
        "volume/image/src/groups/snapshots.rs",
        "        places.extend(self.member_ids(group).await?.into_keys());\n",
        "",
        &[GROUPS],
    ),
    Mutant::new(
        "group-member-removed",
        "An image is removed while it belongs to a group",
        "volume/image/src/remove.rs",
        "if let Some(group) = self.group_of(id).await? {",
        "if let Some(group) = self.group_of(id).await?.filter(|_| false) {",
        &[GROUPS],
    ),
    Mutant::new(
        "group-reference-first",
        "A group that is to have an image does not list it before the image's header names it",
        "volume/image/src/groups/members.rs",
        "            self.set_link(&id, pool, &image, LinkState::Incomplete).await?;\n            if let Err",
        "            if let Err",
        &[GROUPS],
    ),
];
