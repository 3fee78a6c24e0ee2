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
const CHANGES: Stage = Stage::Test("forebay-image", "changes");
const CRASH_SNAPSHOTS: Stage = Stage::Test("forebay-image", "crash_snapshots");
const RESERVED: Stage = Stage::Test("forebay-image", "reserved");
const SIM: Stage = Stage::Sim(&[], 1000);
const SIM_SHARED: Stage = Stage::Sim(&["--shared"], 400);

const LOCK: &str = "volume/image/src/exclusive_lock.rs";
const OPEN_IMAGE: &str = "volume/image/src/open_image.rs";
const REQUESTS: &str = "volume/image/src/requests.rs";
const RESIZE: &str = "volume/image/src/resize.rs";
const SNAPSHOT_OPS: &str = "volume/image/src/snapshots.rs";
const CHANGES_OPS: &str = "volume/image/src/changes.rs";
const ROLLBACK: &str = "volume/image/src/rollback.rs";
const OBJECT_MAP: &str = "volume/image/src/objectmap.rs";
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
        SNAPSHOT_OPS,
        "Some(objects) => (objects.pool_id(), objects.pool_ids()),",
        "Some(objects) => (objects.pool_id(), vec![objects.pool_id()]),",
        &[SNAPSHOTS],
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
];
