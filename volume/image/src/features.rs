//! Features of an open image: enabled and disabled while it is in use.
//!
//! ```text
//! enabling:  maps created, empty  ---->  features set, maps marked as invalid  ---->  rebuilt when a user asks for it
//! disabling: maps marked as invalid  ---->  maps removed  ---->  features and flags cleared
//! ```
//!
//! Either may be interrupted anywhere: without the feature, or with the mark, a map is not relied on, whether it exists or
//! not. Once the header says that there are maps, only the owner of the lock changes them.

use std::rc::Rc;

use forebay_block::{Error, ErrorKind, Extent, ObjectOp, Result, SnapId, Transaction};

use crate::exclusive_lock::LockedImage;
use crate::format::{ImageFeatures, ImageHeader, map_object, snapshot_key};
use crate::image::Image;
use crate::images::SIZE_MAX;
use crate::objectmap;
use crate::open_image::OpenImage;
use crate::resize::unless_absent;
use crate::wire::bitmap::OBJECTS_MAX;
use crate::wire::snapshot::Snapshot;

/// Attempts to change a header that other clients change at the same time.
pub(crate) const TRIES: usize = 8;
/// Object map and fast-diff, which are enabled and disabled together.
const MAPS: u64 = ImageFeatures::OBJECT_MAP.0 | ImageFeatures::FAST_DIFF.0;
/// Features that can be enabled and disabled.
const MUTABLE: u64 = MAPS | ImageFeatures::EXCLUSIVE_LOCK.0;
/// Features that can be disabled.
const DISABLED_ONLY: u64 = ImageFeatures::DEEP_FLATTEN.0;
const JOURNALING: u64 = 1 << 6;
/// Flags of an object map that is not relied on.
pub(crate) const INVALID: u64 = ImageHeader::MAP_INVALID | ImageHeader::FAST_DIFF_INVALID;

impl Image {
    /// Enables or disables features, durably, while the image is in use; returns its features after that. Writes wait
    /// meanwhile. An object map that is enabled is invalid until it is
    /// [rebuilt](Self::rebuild_object_map).
    ///
    /// # Errors
    /// `Invalid` for features that cannot be changed, are enabled or disabled already, or depend on others; `Unsupported`
    /// for journaling, and for features of shared pools in another one; `ReadOnly`; `Busy` if other clients change the image
    /// at the same time; errors of the backend, after which an object map is invalid at worst.
    pub async fn set_features(&self, features: ImageFeatures, enabled: bool) -> Result<ImageFeatures> {
        let shared = self.shared();
        let how = if enabled { "enabling" } else { "disabling" };
        let what = format!("{how} {features} of image {}", shared.name());
        let changed = async {
            for _ in 0..TRIES {
                let _alone = self.begin_change().await?;
                let tried = try_change(shared, features, enabled).await;
                // The feature was disabled by this change, or by another one while this client waited for the lock.
                let no_lock = !shared.header().features.has(ImageFeatures::EXCLUSIVE_LOCK);
                if let Some(lock) = shared.exclusive_lock().filter(|lock| no_lock && lock.is_locked()) {
                    lock.release(&**shared, None).await;
                }
                if let Some(after) = tried? {
                    return Ok(after);
                }
            }
            Err(contended())
        };
        let changed: Result<ImageFeatures> = changed.await;
        if let Some(watcher) = shared.watcher() {
            // After a failure too: the flags may have changed.
            watcher.header_changed().await;
        }
        changed.map_err(|error| error.within(what))
    }
}

/// Makes a change once; returns the features after it, `None` if another client has changed the header meanwhile.
async fn try_change(shared: &Rc<OpenImage>, features: ImageFeatures, enabled: bool) -> Result<Option<ImageFeatures>> {
    // While the turn is held, the lock is neither acquired nor released.
    let _turn = match shared.exclusive_lock() {
        Some(lock) if shared.header().features.has(ImageFeatures::EXCLUSIVE_LOCK) => {
            Some(lock.acquire_in_turn(&**shared).await?)
        }
        Some(lock) => Some(lock.begin_turn().await),
        None => None,
    };
    let before = shared.header().features;
    let after = plan(shared, before, features, enabled)?;
    if !shared.may_write() {
        // Another client has enabled the lock meanwhile.
        return Ok(None);
    }
    let _hold = shared.admission().exclusive(Extent::new(0, SIZE_MAX)).await;
    shared.check_there()?;
    let done = match enabled {
        true => enable(shared, before, after).await?,
        false => disable(shared, before, after).await?,
    };
    Ok(done.then_some(after))
}

pub(crate) fn contended() -> Error {
    Error::new(ErrorKind::Busy, format!("other clients have changed the image {TRIES} times meanwhile; try again"))
}

/// Returns the features after a change, by the rules of `rbd`.
fn plan(shared: &OpenImage, before: ImageFeatures, change: ImageFeatures, enabled: bool) -> Result<ImageFeatures> {
    let refuse = |why: String| Err(Error::new(ErrorKind::Invalid, why));
    let among = |bits: u64| ImageFeatures(change.0 & bits);
    let allowed = if enabled { MUTABLE } else { MUTABLE | DISABLED_ONLY };
    if change.0 == 0 {
        return refuse("no feature is named".to_owned());
    }
    if among(JOURNALING).0 != 0 {
        return Err(Error::new(ErrorKind::Unsupported, "journaling is not supported"));
    }
    if among(!allowed).0 != 0 {
        let changes = ImageFeatures(allowed);
        return refuse(format!("{} cannot be changed; only {changes} can", among(!allowed)));
    }
    if !shared.is_shared() && among(MUTABLE).0 != 0 {
        let what = format!("{} are for pools that other clients use, those of a Ceph cluster", among(MUTABLE));
        return Err(Error::new(ErrorKind::Unsupported, what));
    }
    let already = if enabled { among(before.0) } else { among(!before.0) };
    if already.0 != 0 {
        return refuse(format!("{already} is {} already", if enabled { "enabled" } else { "disabled" }));
    }
    let together = if change.0 & MAPS != 0 { change.0 | MAPS } else { change.0 };
    let after = ImageFeatures(if enabled { before.0 | together } else { before.0 & !together });
    if after.has(ImageFeatures::OBJECT_MAP) && !after.has(ImageFeatures::EXCLUSIVE_LOCK) {
        let first = if enabled { "enable exclusive-lock before it" } else { "disable object-map before it" };
        return refuse(format!("object-map needs exclusive-lock; {first}"));
    }
    if enabled && together & MAPS != 0 && shared.layout().objects(shared.size()) > OBJECTS_MAX {
        return refuse(format!("more than {OBJECTS_MAX} objects are too many for an object map"));
    }
    Ok(after)
}

/// Enables features; `false` if another client has changed the header meanwhile.
async fn enable(shared: &Rc<OpenImage>, before: ImageFeatures, after: ImageFeatures) -> Result<bool> {
    let maps = after.0 & !before.0 & MAPS != 0;
    let header = shared.header();
    if maps && !before.has(ImageFeatures::OBJECT_MAP) {
        let snapshots = header.snapshots.iter().map(|snapshot| (Some(snapshot.id), snapshot.size));
        for (snap, size) in snapshots.chain([(None, shared.size())]) {
            let map = map_object(shared.namespace(), shared.id(), snap);
            // One that was left by an interrupted change.
            unless_absent(shared.backend().submit(&map, Transaction::of(ObjectOp::Remove).durable())).await?;
            objectmap::create(shared.backend(), &map, shared.layout().objects(size)).await?;
        }
    }
    let guards =
        [(b"snap_seq".to_vec(), header.snap_seq.to_le_bytes().to_vec()), ImageHeader::encode_size(header.size)];
    let guards = guards.map(|(key, value)| ObjectOp::KvCompare { key, value: Some(value) });
    let flags = |_, flags| if maps { flags | INVALID } else { flags };
    if !store(shared, before, after, guards.to_vec(), &flags).await? {
        return Ok(false);
    }
    if let Some(lock) = shared.exclusive_lock().filter(|lock| maps && lock.is_locked()) {
        lock.set_map(shared.open_map().await?);
    }
    Ok(true)
}

/// Disables features; `false` if another client has changed the header meanwhile.
async fn disable(shared: &Rc<OpenImage>, before: ImageFeatures, after: ImageFeatures) -> Result<bool> {
    let maps = before.0 & !after.0 & MAPS != 0;
    if maps {
        if !store(shared, before, before, Vec::new(), &|_, flags| flags | INVALID).await? {
            return Ok(false);
        }
        if let Some(map) = shared.map() {
            map.set_flags(INVALID);
        }
        let header = shared.header();
        for snap in header.snapshots.iter().map(|snapshot| Some(snapshot.id)).chain([None]) {
            let map = map_object(shared.namespace(), shared.id(), snap);
            unless_absent(shared.backend().submit(&map, Transaction::of(ObjectOp::Remove).durable())).await?;
        }
    }
    let flags = |_, flags| if maps { flags & !INVALID } else { flags };
    if !after.has(ImageFeatures::EXCLUSIVE_LOCK) {
        // Others may write as soon as this is stored.
        shared.own_blocks().end();
    }
    if !store(shared, before, after, Vec::new(), &flags).await? {
        return Ok(false);
    }
    if let Some(lock) = shared.exclusive_lock().filter(|_| maps) {
        lock.set_map(None);
    }
    Ok(true)
}

/// Stores features, and the flags of the head (`None`) and of each snapshot, in one transaction if the `guards` hold; returns
/// `false` if another client has changed the header meanwhile.
pub(crate) async fn store(
    shared: &OpenImage,
    before: ImageFeatures,
    after: ImageFeatures,
    guards: Vec<ObjectOp>,
    flags: &dyn Fn(Option<SnapId>, u64) -> u64,
) -> Result<bool> {
    let refresh = shared.begin_refresh().await;
    let header = shared.header();
    let mut changed = ImageHeader { features: after, flags: flags(None, header.flags), ..(*header).clone() };
    let mut pairs = Vec::new();
    if after != before {
        pairs.push((b"features".to_vec(), after.0.to_le_bytes().to_vec()));
    }
    if changed.flags != header.flags {
        pairs.push((b"flags".to_vec(), changed.flags.to_le_bytes().to_vec()));
    }
    let key = b"features".to_vec();
    let mut ops = guards;
    if header.flags & !changed.flags != 0 {
        // A write may mark the map as invalid meanwhile. A header without flags may lack the key.
        ops.push(ObjectOp::KvCompare { key: b"flags".to_vec(), value: Some(header.flags.to_le_bytes().to_vec()) });
    }
    ops.push(ObjectOp::KvCompare { key, value: Some(before.0.to_le_bytes().to_vec()) });
    for snapshot in &mut changed.snapshots {
        let wanted = flags(Some(snapshot.id), snapshot.flags);
        if wanted == snapshot.flags {
            continue;
        }
        let stored = snapshot.with_flags(wanted).and_then(|value| Snapshot::decode(&value)).ok_or_else(|| {
            let what = format!("snapshot {} is stored in a format that has no object map", snapshot.name);
            Error::new(ErrorKind::Unsupported, what)
        })?;
        let key = snapshot_key(snapshot.id);
        ops.push(ObjectOp::KvCompare { key: key.clone(), value: Some(snapshot.stored.clone()) });
        pairs.push((key, stored.stored.clone()));
        *snapshot = stored;
    }
    if pairs.is_empty() {
        // Nothing is stored, but the header in memory is what it was.
        refresh.apply(changed);
        return Ok(true);
    }
    ops.push(ObjectOp::KvSet { pairs });
    match shared.store_header(ops).await {
        Ok(()) => refresh.apply(changed),
        Err(error) if error.kind() == ErrorKind::Guard => return Ok(false),
        Err(error) => return Err(error),
    }
    Ok(true)
}
