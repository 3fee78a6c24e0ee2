//! Snapshots of an open image: created, removed, renamed, protected, limited.

use std::rc::Rc;

use forebay_block::{Error, ErrorKind, ExclusiveRange, Extent, ObjectOp, Result, SnapId, Transaction};
use forebay_reactor::sync::Permit;
use forebay_reactor::{random, wall_clock};

use crate::children::{CLONE_CHILD, SNAPSHOT_TRASH, legacy_pool, operations_change, prune};
use crate::clone::until_unused;
use crate::details::LIMIT_KEY;
use crate::format::{ImageFeatures, ImageHeader, map_object, snapshot_key};
use crate::image::Image;
use crate::images::SIZE_MAX;
use crate::info::{SnapshotInfo, SnapshotKind};
use crate::objectmap::{load, merge_removed_into};
use crate::open_image::OpenImage;
use crate::owner::OwnerOperation;
use crate::resize::unless_absent;
use crate::wire::bitmap::Bitmap;
use crate::wire::snapshot::{NewSnapshot, Parent, Protection, Snapshot};

/// Header key of the snapshot numbers that are still to be removed from the pool: their snapshots are gone, or are not created
/// yet.  Ceph's clients ignore it.
const REMOVED_KEY: &[u8] = b"forebay_removed_snapshots";
/// Attempts to change a header that other clients change at the same time.
const TRIES: usize = 8;

impl Image {
    /// Returns the snapshots made by users, oldest first.
    pub fn snapshots(&self) -> Vec<SnapshotInfo> {
        self.shared()
            .header()
            .snapshots
            .iter()
            .rev()
            .filter(|snapshot| snapshot.is_user())
            .map(Snapshot::info)
            .collect()
    }

    /// Creates a snapshot of the image as it is now: with all writes completed before this call, and with none submitted
    /// after it returned.  Writes wait meanwhile.  Durable when this returns.
    ///
    /// # Errors
    /// `Exists`; `Invalid` for an invalid name; `NoSpace` at the snapshot limit; `ReadOnly`; `Busy` if another client
    /// keeps the image's lock, or changes the image at the same time; errors of the backend, after which the snapshot may
    /// exist.
    pub async fn create_snapshot(&self, name: &str) -> Result<SnapshotInfo> {
        let shared = self.shared();
        let what = format!("creating snapshot {name} of image {}", shared.name());
        let created = async {
            check_name(name)?;
            let operation = OwnerOperation::CreateSnapshot { name: name.to_owned() };
            if self.ask_owner(operation, &mut |_| {}).await? {
                return find(shared, name).map(|snapshot| snapshot.info());
            }
            for _ in 0..TRIES {
                let Some(pending) = self.begin_snapshot(name, SnapshotKind::User).await? else { continue };
                let hold = shared.enter_alone(Extent::new(0, SIZE_MAX)).await?;
                if let Some(info) = pending.create(shared, hold).await? {
                    return Ok(info);
                }
            }
            Err(contended())
        };
        let created: Result<SnapshotInfo> = created.await;
        announce(shared, created.map_err(|error| error.within(what))).await
    }

    /// Removes a snapshot; the space that only it needs is freed in the background.  One with clones of version 2 moves to the
    /// trash instead, and is removed with the last of them.  Durable when this returns.
    ///
    /// # Errors
    /// `NotFound`; `Busy` if it is protected; `ReadOnly`; errors of the backend, after which it can be removed again.
    pub async fn remove_snapshot(&self, name: &str) -> Result<()> {
        let shared = self.shared();
        let what = format!("removing snapshot {name} of image {}", shared.name());
        let removed = async {
            let operation = OwnerOperation::RemoveSnapshot { name: name.to_owned(), in_trash: false };
            match self.ask_owner(operation, &mut |_| {}).await? {
                true => Ok(()),
                false => self.remove_found(|| find(shared, name)).await,
            }
        };
        let removed: Result<()> = removed.await;
        removed.map_err(|error| error.within(what))
    }

    /// Removes the snapshot of a number, of whatever kind, as [`remove_snapshot`](Self::remove_snapshot) does.
    ///
    /// # Errors
    /// As there; `Busy` for one in the trash that has clones; `Unsupported` for one that belongs to a group, or to mirroring.
    pub async fn remove_snapshot_number(&self, id: SnapId) -> Result<()> {
        let shared = self.shared();
        let what = format!("removing snapshot {} of image {}", id.0, shared.name());
        let kind = shared.header().snapshots.iter().find(|snapshot| snapshot.id == id).map(|found| found.kind.clone());
        let is_orphan = match kind {
            // Its group's snapshot is gone: nothing else removes it.
            Some(SnapshotKind::Group { pool, group, snapshot }) => {
                shared.images().group_names(pool, &group, &snapshot).await?.2.is_none()
            }
            _ => false,
        };
        let find = || {
            let header = shared.header();
            let found = header.snapshots.iter().find(|snapshot| snapshot.id == id);
            let found = found.ok_or_else(|| Error::new(ErrorKind::NotFound, format!("snapshot {}", id.0)))?;
            match found.kind {
                SnapshotKind::User | SnapshotKind::Trash { .. } => Ok(found.clone()),
                SnapshotKind::Group { .. } if is_orphan => Ok(found.clone()),
                _ => Err(Error::new(ErrorKind::Unsupported, "it belongs to a group, or to mirroring")),
            }
        };
        self.remove_found(find).await.map_err(|error| error.within(what))
    }

    /// Removes the part of a group's snapshot that is this image's. `NotFound` if there is none.
    pub(crate) async fn remove_group_part(&self, kind: &SnapshotKind) -> Result<()> {
        let shared = self.shared();
        let find = || {
            let found = shared.header().snapshots.iter().find(|snapshot| snapshot.kind == *kind).cloned();
            found.ok_or_else(|| Error::new(ErrorKind::NotFound, "a part of the group's snapshot"))
        };
        self.remove_found(find).await.map_err(|error| error.within(format_args!("image {}", shared.name())))
    }

    async fn remove_found(&self, find: impl Fn() -> Result<Snapshot>) -> Result<()> {
        let shared = self.shared();
        let removed = async {
            for _ in 0..TRIES {
                let alone = self.begin_change().await?;
                let snapshot = find()?;
                match snapshot.protection {
                    Protection::None => {}
                    Protection::Full => return Err(Error::new(ErrorKind::Busy, "it is protected")),
                    // Its end was cut short: it is completed, unless there are clones.
                    Protection::Ending => {
                        unprotect(shared, &snapshot).await?;
                        continue;
                    }
                }
                let done = match snapshot.children {
                    0 => remove(shared, &snapshot).await?,
                    _ => match prune(shared.images(), shared.id(), snapshot.id).await?.len() {
                        0 => Removal::Contended,
                        clones if move_to_trash(shared, &snapshot, clones).await? => Removal::Done,
                        _ => Removal::Contended,
                    },
                };
                match done {
                    Removal::Contended => {}
                    Removal::Done => return Ok(()),
                    Removal::Orphaned(header) => {
                        // The parent's header may be changed next, and those who change that may wait for this one's.
                        drop(alone);
                        return shared.images().forget_child(shared.id(), &header).await;
                    }
                }
            }
            Err(contended())
        };
        let removed: Result<()> = removed.await;
        announce(shared, removed).await
    }

    /// Renames a snapshot, durably.
    ///
    /// # Errors
    /// `NotFound`; `Exists`; `Invalid` for an invalid name; `ReadOnly`; `Busy` if other clients change the image at the same
    /// time.
    pub async fn rename_snapshot(&self, from: &str, to: &str) -> Result<()> {
        let shared = self.shared();
        let what = format!("renaming snapshot {from} of image {}", shared.name());
        let renamed = async {
            check_name(to)?;
            if shared.has_other_owner().await? {
                shared.refresh().await?;
                let id = find(shared, from)?.id.0;
                if find(shared, to).is_ok() {
                    return Err(Error::new(ErrorKind::Exists, format!("snapshot {to}")));
                }
                if self.ask_owner(OwnerOperation::RenameSnapshot { id, to: to.to_owned() }, &mut |_| {}).await? {
                    return Ok(());
                }
            }
            for _ in 0..TRIES {
                let _alone = self.begin_change().await?;
                let snapshot = find(shared, from)?;
                if find(shared, to).is_ok() {
                    return Err(Error::new(ErrorKind::Exists, format!("snapshot {to}")));
                }
                let value = snapshot.renamed(to).ok_or_else(|| malformed(&snapshot))?;
                if rewrite(shared, &snapshot, value).await? {
                    return Ok(());
                }
            }
            Err(contended())
        };
        let renamed: Result<()> = renamed.await;
        announce(shared, renamed.map_err(|error| error.within(what))).await
    }

    /// Protects a snapshot against removal, or ends that, durably.  Returns whether that changed anything.
    ///
    /// # Errors
    /// `NotFound`; `Busy` if clones rely on the protection, or other clients change the image at the same time; `Unsupported`
    /// for an image without layering; `ReadOnly`.
    pub async fn set_snapshot_protection(&self, name: &str, protected: bool) -> Result<bool> {
        let shared = self.shared();
        let how = if protected { "protecting" } else { "unprotecting" };
        let what = format!("{how} snapshot {name} of image {}", shared.name());
        let changed = async {
            if shared.has_other_owner().await? {
                shared.refresh().await?;
                let wanted = if protected { Protection::Full } else { Protection::None };
                if find(shared, name)?.protection == wanted {
                    return Ok(false);
                }
                let operation = OwnerOperation::ProtectSnapshot { name: name.to_owned(), protected };
                if self.ask_owner(operation, &mut |_| {}).await? {
                    return Ok(true);
                }
            }
            for _ in 0..TRIES {
                let _alone = self.begin_change().await?;
                let snapshot = find(shared, name)?;
                if !shared.header().features.has(ImageFeatures::LAYERING) {
                    return Err(Error::new(ErrorKind::Unsupported, "the image has no layering"));
                }
                if snapshot.protection == if protected { Protection::Full } else { Protection::None } {
                    return Ok(false);
                }
                let done = match protected {
                    true => protect(shared, &snapshot, Protection::Full).await?,
                    false => unprotect(shared, &snapshot).await?,
                };
                if done {
                    return Ok(true);
                }
            }
            Err(contended())
        };
        let changed: Result<bool> = changed.await;
        announce(shared, changed.map_err(|error| error.within(what))).await
    }

    /// Limits the number of snapshots, durably; `None` ends that.  Existing snapshots stay.
    ///
    /// # Errors
    /// `ReadOnly`; errors of the backend.
    pub async fn set_snapshot_limit(&self, limit: Option<u64>) -> Result<()> {
        let shared = self.shared();
        let what = format!("limiting the snapshots of image {}", shared.name());
        let limited = async {
            let _alone = self.begin_change().await?;
            let key = LIMIT_KEY.to_vec();
            let change = match limit {
                Some(limit) => ObjectOp::KvSet { pairs: vec![(key, limit.to_le_bytes().to_vec())] },
                None => ObjectOp::KvRemove { keys: vec![key] },
            };
            shared.store_header(vec![change]).await
        };
        let limited: Result<()> = limited.await;
        announce(shared, limited.map_err(|error| error.within(what))).await
    }

    /// Begins to create a snapshot: checks that there may be one more of that name and kind, and reserves a number; `None` if
    /// another client changes the snapshots at the same time.
    pub(crate) async fn begin_snapshot(&self, name: &str, kind: SnapshotKind) -> Result<Option<PendingSnapshot>> {
        let shared = self.shared();
        let alone = self.begin_change().await?;
        let header = shared.header();
        if header.snapshots.iter().any(|snapshot| snapshot.kind == kind && snapshot.name == name) {
            return Err(Error::new(ErrorKind::Exists, format!("snapshot {name}")));
        }
        check_limit(shared, &header).await?;
        let id = shared.data().snap_allocate().await?;
        if !reserve(shared, id).await? {
            free(shared, id).await;
            return Ok(None);
        }
        Ok(Some(PendingSnapshot { name: name.to_owned(), kind, id, _alone: alone }))
    }

    /// Prepares a change of the header: acquires the exclusive lock, if there is one, re-reads the header if it may have
    /// changed, and acquires the permit to change size and snapshots.
    pub(crate) async fn begin_change(&self) -> Result<Permit> {
        if self.is_read_only() {
            return Err(Error::new(ErrorKind::ReadOnly, "opened for reading only"));
        }
        let shared = self.shared();
        shared.lock().await?;
        // Before the permit is acquired, so that the size is taken over too. Clones change the headers of their parents without
        // a lock.
        shared.refresh().await?;
        let alone = shared.begin_resize().await;
        shared.check_there()?;
        free_removed(shared).await?;
        Ok(alone)
    }
}

/// Snapshot that is being created, whose number is reserved. No other change of the header begins meanwhile; what is dropped
/// before it is created is freed by the next one.
pub(crate) struct PendingSnapshot {
    name: String,
    kind: SnapshotKind,
    id: SnapId,
    _alone: Permit,
}

impl PendingSnapshot {
    /// Creates the snapshot: of the image as it is under `hold`, which blocks its writes. `None` if another client has changed
    /// the header meanwhile.
    pub(crate) async fn create(self, shared: &Rc<OpenImage>, hold: ExclusiveRange) -> Result<Option<SnapshotInfo>> {
        add(shared, &self, hold).await
    }
}

/// Notifies the other clients of a changed header, if there was a change.
pub(crate) async fn announce<T>(shared: &OpenImage, changed: Result<T>) -> Result<T> {
    if changed.is_ok()
        && let Some(watcher) = shared.watcher()
    {
        watcher.header_changed().await;
    }
    changed
}

/// Returns the snapshot of that name that a user made.
pub(crate) fn find(shared: &OpenImage, name: &str) -> Result<Snapshot> {
    let header = shared.header();
    let found = header.snapshots.iter().find(|snapshot| snapshot.is_user() && snapshot.name == name);
    found.cloned().ok_or_else(|| Error::new(ErrorKind::NotFound, format!("snapshot {name}")))
}

pub(crate) fn check_name(name: &str) -> Result<()> {
    if name.is_empty() || name.contains(['/', '@']) {
        let what = format!("'{name}' is no name of a snapshot: it must not be empty, or contain / or @");
        return Err(Error::new(ErrorKind::Invalid, what));
    }
    Ok(())
}

async fn check_limit(shared: &OpenImage, header: &ImageHeader) -> Result<()> {
    let mut values = shared.backend().kv_get(&shared.header_object(), vec![LIMIT_KEY.to_vec()]).await?;
    let stored = values.pop().flatten();
    let limit = stored.and_then(|value| value.first_chunk::<8>().map(|bytes| u64::from_le_bytes(*bytes)));
    match limit {
        Some(limit) if header.snapshots.len() as u64 >= limit => {
            Err(Error::new(ErrorKind::NoSpace, format!("the image has reached its limit of {limit} snapshots")))
        }
        _ => Ok(()),
    }
}

pub(crate) fn contended() -> Error {
    Error::new(ErrorKind::Busy, format!("other clients have changed the image {TRIES} times meanwhile; try again"))
}

fn malformed(snapshot: &Snapshot) -> Error {
    let key = String::from_utf8_lossy(&snapshot_key(snapshot.id)).into_owned();
    Error::new(ErrorKind::Corrupt, format!("header key '{key}' has no room for the change"))
}

/// Returns whether a guarded change was made; `false` if another client was first.
fn unless_changed(stored: Result<()>) -> Result<bool> {
    match stored {
        Ok(()) => Ok(true),
        Err(error) if error.kind() == ErrorKind::Guard => Ok(false),
        Err(error) => Err(error),
    }
}

fn holds(snapshot: &Snapshot) -> ObjectOp {
    ObjectOp::KvCompare { key: snapshot_key(snapshot.id), value: Some(snapshot.stored.clone()) }
}

/// Adds a snapshot of the number `id`; `None` if another client has changed the header meanwhile.
///
/// Invariant: whenever the header has the snapshot, or may have it, every write carries it in its snapshot context. So writes
/// wait until the outcome is known; and if it is not, the snapshot stays in the context, which preserves too much at worst.
async fn add(
    shared: &Rc<OpenImage>,
    PendingSnapshot { name, kind, id, .. }: &PendingSnapshot,
    hold: ExclusiveRange,
) -> Result<Option<SnapshotInfo>> {
    let id = *id;
    shared.check_there()?;
    // The snapshot must not be more durable than the writes before it.
    shared.data().flush().await?;
    let refresh = shared.begin_refresh().await;
    let header = shared.header();
    if id.0 <= header.snap_seq {
        // The next change frees the number.
        return Ok(None);
    }
    let size = shared.size();
    let overlap = header.parent.as_ref().and_then(|(_, parent)| parent.overlap);
    let new = NewSnapshot { name: name.clone(), kind: kind.clone(), size, flags: header.flags, overlap };
    let snapshot = Snapshot::new(id, &new, wall_clock());
    let map = map_object(shared.namespace(), shared.id(), Some(id));
    // Stored first: a map without a snapshot harms nobody.
    if let Some(own) = shared.map() {
        own.copy_to(&map).await?;
    }
    let mut change = vec![
        ObjectOp::KvCompare { key: b"snap_seq".to_vec(), value: Some(header.snap_seq.to_le_bytes().to_vec()) },
        ObjectOp::KvCompare { key: b"size".to_vec(), value: Some(size.to_le_bytes().to_vec()) },
    ];
    if shared.is_shared() && shared.exclusive_lock().and_then(|lock| lock.assertion()).is_none() {
        // Without a lock, others may rename snapshots at the same time.
        change.extend(header.snapshots.iter().map(holds));
    }
    let pairs = vec![(snapshot_key(id), snapshot.stored.clone()), (b"snap_seq".to_vec(), id.0.to_le_bytes().to_vec())];
    change.push(ObjectOp::KvSet { pairs });
    let reserved = Some(id.0.to_le_bytes().to_vec());
    change.push(ObjectOp::KvCompare { key: REMOVED_KEY.to_vec(), value: reserved });
    change.push(ObjectOp::KvRemove { keys: vec![REMOVED_KEY.to_vec()] });
    let info = snapshot.info();
    let snapshots = std::iter::once(snapshot).chain(header.snapshots.iter().cloned()).collect();
    let adopted = ImageHeader { snap_seq: id.0, snapshots, ..(*header).clone() };
    refresh.adopt(&adopted);
    match unless_changed(shared.store_header(change).await)? {
        true => refresh.apply(adopted),
        false => {
            refresh.adopt(&header);
            return Ok(None);
        }
    }
    if let Some(own) = shared.map()
        && let Err(error) = own.mark_clean().await
    {
        // Objects count as changed that are not: an overestimate of `du`, and of a fast diff.
        tracing::warn!(image = shared.name(), snapshot = name, %error, "cannot mark the objects of an image as unchanged");
    }
    drop(hold);
    Ok(Some(info))
}

/// Notes that a snapshot number is to be removed from the pool, unless the snapshot is created: a creation that is cut short
/// leaves neither the number nor a map. Returns `false` if another client changes the snapshots at the same time.
async fn reserve(shared: &OpenImage, id: SnapId) -> Result<bool> {
    let change = vec![
        ObjectOp::KvCompare { key: REMOVED_KEY.to_vec(), value: None },
        ObjectOp::KvSet { pairs: vec![(REMOVED_KEY.to_vec(), id.0.to_le_bytes().to_vec())] },
    ];
    unless_changed(shared.store_header(change).await)
}

/// Returns a snapshot number that is not used after all.
async fn free(shared: &OpenImage, id: SnapId) {
    if let Err(error) = shared.data().snap_remove(id).await {
        tracing::debug!(image = shared.name(), snap = id.0, %error, "cannot return an unused snapshot number");
    }
}

async fn remove_map(shared: &OpenImage, id: SnapId) -> Result<()> {
    if !shared.is_shared() {
        return Ok(());
    }
    // It is also left by an interrupted change of the features.
    let map = map_object(shared.namespace(), shared.id(), Some(id));
    unless_absent(shared.backend().submit(&map, Transaction::of(ObjectOp::Remove).durable())).await.map(drop)
}

/// Result of the removal of a snapshot.
enum Removal {
    /// Another client has changed it meanwhile.
    Contended,
    Done,
    /// Done, and it was the last that needed the parent, whose record of the clone is to be removed: in this header of the image,
    /// it is still the parent.
    Orphaned(Rc<ImageHeader>),
}

/// Removes a snapshot.
///
/// The header forgets the snapshot first, and remembers in the same transaction that its number is still to be removed from
/// the pool: a clone that another client makes at the same time either prevents the removal, or does not find the snapshot.
async fn remove(shared: &Rc<OpenImage>, snapshot: &Snapshot) -> Result<Removal> {
    // While this guard is held, the exclusive lock is not released.
    let pass = shared.enter(Extent::new(0, 1)).await?;
    // From here on no refresh is applied that this change would undo.
    let refresh = shared.begin_refresh().await;
    let header = shared.header();
    merge_map(shared, &header, snapshot).await?;
    // It was freed before; if another client has added one meanwhile, that is freed first.
    let mut change = vec![holds(snapshot), ObjectOp::KvCompare { key: REMOVED_KEY.to_vec(), value: None }];
    let mut keys = vec![snapshot_key(snapshot.id)];
    let orphaned = header.parent.clone().filter(|(_, parent)| is_last_use(&header, parent, snapshot));
    let in_trash = |snapshot: &Snapshot| matches!(snapshot.kind, SnapshotKind::Trash { .. });
    let keeps_trash = header.snapshots.iter().any(|other| other.id != snapshot.id && in_trash(other));
    let unused = if orphaned.is_some() { CLONE_CHILD } else { 0 } | if keeps_trash { 0 } else { SNAPSHOT_TRASH };
    let clear = header.op_features & unused;
    if clear != 0 {
        change.extend(operations_change(shared.backend(), &shared.header_object(), 0, clear).await?);
    }
    if let Some((stored, _)) = &orphaned {
        change.push(ObjectOp::KvCompare { key: b"parent".to_vec(), value: Some(stored.clone()) });
        keys.push(b"parent".to_vec());
    }
    change.push(ObjectOp::KvRemove { keys });
    change.push(ObjectOp::KvSet { pairs: vec![(REMOVED_KEY.to_vec(), snapshot.id.0.to_le_bytes().to_vec())] });
    if !unless_changed(shared.store_header(change).await)? {
        return Ok(Removal::Contended);
    }
    let snapshots = header.snapshots.iter().filter(|other| other.id != snapshot.id).cloned().collect();
    let parent = header.parent.clone().filter(|_| orphaned.is_none());
    let former = shared.parent().filter(|_| orphaned.is_some());
    if former.is_some() {
        refresh.set_parent(None);
    }
    refresh.apply(ImageHeader { snapshots, parent, ..(*header).clone() }.with_operations(0, clear));
    drop(pass);
    if orphaned.is_some() {
        if let Some(former) = former {
            until_unused(former).await;
        }
        if let Some(watcher) = shared.watcher() {
            watcher.header_changed().await;
        }
    }
    remove_map(shared, snapshot.id).await?;
    free_removed(shared).await?;
    Ok(if orphaned.is_some() { Removal::Orphaned(header) } else { Removal::Done })
}

/// Moves a snapshot to the trash, since clones need it; returns `false` if another client has changed it meanwhile.
async fn move_to_trash(shared: &OpenImage, snapshot: &Snapshot, clones: usize) -> Result<bool> {
    if !snapshot.is_user() {
        let what = format!("it has {clones} clone{}, which need its data", if clones == 1 { "" } else { "s" });
        return Err(Error::new(ErrorKind::Busy, what));
    }
    let value = snapshot.trashed(&random_uuid()).ok_or_else(|| malformed(snapshot))?;
    let flag = operations_change(shared.backend(), &shared.header_object(), SNAPSHOT_TRASH, 0).await?;
    let moved = rewrite_with(shared, snapshot, value, flag).await?;
    if moved {
        shared.refresh().await?;
    }
    Ok(moved)
}

/// Returns a random UUID (RFC 9562, version 4).
fn random_uuid() -> String {
    let (high, low) = (random() & !0xf000 | 0x4000, random() & !(0b11 << 62) | 0b10 << 62);
    let (first, second, third) = (high >> 32, high >> 16 & 0xffff, high & 0xffff);
    format!("{first:08x}-{second:04x}-{third:04x}-{:04x}-{:012x}", low >> 48, low & 0xffff_ffff_ffff)
}

/// Returns whether only this snapshot still reads the parent.
fn is_last_use(header: &ImageHeader, parent: &Parent, snapshot: &Snapshot) -> bool {
    let uses = |snapshot: &Snapshot| snapshot.overlap.is_some() || snapshot.parent.is_some();
    parent.overlap.is_none() && !header.snapshots.iter().any(|other| other.id != snapshot.id && uses(other))
}

/// Marks the objects as changed, in the map after that of a snapshot which is being removed, that had changed before it.
async fn merge_map(shared: &Rc<OpenImage>, header: &ImageHeader, snapshot: &Snapshot) -> Result<()> {
    let Some(own) = shared.map().filter(|map| map.has_fast_diff()) else { return Ok(()) };
    let map_of = |id| map_object(shared.namespace(), shared.id(), Some(id));
    let next = header.snapshots.iter().rev().find(|other| other.id > snapshot.id);
    let removed = match load(shared.backend(), &map_of(snapshot.id)).await {
        Ok(removed) if snapshot.flags & ImageHeader::MAP_INVALID == 0 => removed,
        Err(error) if !matches!(error.kind(), ErrorKind::NotFound | ErrorKind::Corrupt) => return Err(error),
        // Every object may have changed.
        _ => Bitmap::existing(shared.layout().objects(next.map_or(shared.size(), |next| next.size))),
    };
    match next {
        None => own.merge_removed(&removed).await,
        Some(next) => match merge_removed_into(shared.backend(), &map_of(next.id), &removed).await {
            // Nothing relies on the map of a snapshot that has none.
            Err(error) if error.kind() != ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        },
    }
}

/// Removes from the pool the snapshot numbers whose snapshots are gone, of this removal, or of a removal or creation that was
/// interrupted, and their maps.
pub(crate) async fn free_removed(shared: &OpenImage) -> Result<()> {
    let key = || REMOVED_KEY.to_vec();
    let mut values = shared.backend().kv_get(&shared.header_object(), vec![key()]).await?;
    let Some(stored) = values.pop().flatten() else { return Ok(()) };
    // Claimed with a byte more, before the numbers are freed: a creation that has reserved one cannot be completed any more.
    let claimed = match stored.len().is_multiple_of(8) {
        true => {
            let claimed = [&stored[..], &[1]].concat();
            let claim = vec![
                ObjectOp::KvCompare { key: key(), value: Some(stored.clone()) },
                ObjectOp::KvSet { pairs: vec![(key(), claimed.clone())] },
            ];
            if !unless_changed(shared.store_header(claim).await)? {
                // Created meanwhile, or claimed by another client, which frees them.
                return Ok(());
            }
            claimed
        }
        false => stored.clone(),
    };
    for id in stored.as_chunks::<8>().0 {
        remove_map(shared, SnapId(u64::from_le_bytes(*id))).await?;
        match shared.data().snap_remove(SnapId(u64::from_le_bytes(*id))).await {
            Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
            _ => {}
        }
    }
    let change =
        vec![ObjectOp::KvCompare { key: key(), value: Some(claimed) }, ObjectOp::KvRemove { keys: vec![key()] }];
    // Another client that was first has removed them, or more.
    unless_changed(shared.store_header(change).await).map(drop)
}

/// Replaces the stored value of a snapshot; returns `false` if another client has changed it meanwhile.
async fn rewrite(shared: &OpenImage, snapshot: &Snapshot, value: Vec<u8>) -> Result<bool> {
    rewrite_with(shared, snapshot, value, Vec::new()).await
}

/// Does the same together with other changes.
async fn rewrite_with(shared: &OpenImage, snapshot: &Snapshot, value: Vec<u8>, others: Vec<ObjectOp>) -> Result<bool> {
    let key = snapshot_key(snapshot.id);
    let refresh = shared.begin_refresh().await;
    let header = shared.header();
    let mut guards = vec![holds(snapshot)];
    if shared.is_shared() && shared.exclusive_lock().and_then(|lock| lock.assertion()).is_none() {
        // Without a lock, others may use the new name at the same time.
        guards = header.snapshots.iter().map(holds).collect();
    }
    let decoded = Snapshot::decode(&value).ok_or_else(|| malformed(snapshot))?;
    guards.extend(others);
    guards.push(ObjectOp::KvSet { pairs: vec![(key, value)] });
    if !unless_changed(shared.store_header(guards).await)? {
        return Ok(false);
    }
    let mut changed = (*header).clone();
    for other in changed.snapshots.iter_mut().filter(|other| other.id == snapshot.id) {
        *other = decoded.clone();
    }
    refresh.apply(changed);
    Ok(true)
}

async fn protect(shared: &OpenImage, snapshot: &Snapshot, protection: Protection) -> Result<bool> {
    let value = snapshot.with_protection(protection).ok_or_else(|| {
        Error::new(ErrorKind::Unsupported, "the snapshot is stored in a format of before there was protection")
    })?;
    rewrite(shared, snapshot, value).await
}

/// Ends the protection of a snapshot, unless clones of version 1 rely on it. Meanwhile it is marked, so that other clients
/// make no clones.
async fn unprotect(shared: &Rc<OpenImage>, snapshot: &Snapshot) -> Result<bool> {
    if !protect(shared, snapshot, Protection::Ending).await? {
        return Ok(false);
    }
    let ending = find(shared, &snapshot.name)?;
    match legacy_pool(shared.images(), shared.id(), snapshot.id).await {
        Ok(None) => protect(shared, &ending, Protection::None).await,
        found => {
            protect(shared, &ending, Protection::Full).await?;
            match found? {
                Some(pool) => Err(Error::new(ErrorKind::Busy, format!("it has clones in pool {pool}"))),
                None => Ok(false),
            }
        }
    }
}
