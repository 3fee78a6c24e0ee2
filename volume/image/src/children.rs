//! Clones of snapshots: how they are recorded, found and named.
//!
//! Clones of version 2 are recorded in the header of their parent, under the snapshot: their number, and who they are.
//! Clones of version 1 are recorded in a list of their own pool. A clone is recorded before its header exists, and as long
//! as its header names the snapshot. So a crash leaves an entry too many at worst, never one too few.

use std::rc::Rc;

use forebay_block::{Error, ErrorKind, ObjectBackend, ObjectName, ObjectOp, Result, SnapId, Transaction};

use crate::format::{ImageFeatures, ImageHeader, children_key, children_object, snapshot_key};
use crate::images::Images;
use crate::info::{ChildInfo, SnapshotKind};
use crate::watcher::NOTIFY_TIMEOUT;
use crate::wire::children::{
    Child, decode_children, decode_legacy_children, encode_children, encode_legacy_children, encode_legacy_key,
};
use crate::wire::notify::NotifyMessage;
use crate::wire::snapshot::{Parent, Snapshot};

/// Bit of `op_features` for an image whose header lists clones.
pub(crate) const CLONE_PARENT: u64 = 1;
/// Bit of `op_features` for a clone that its parent's header lists.
pub(crate) const CLONE_CHILD: u64 = 2;
/// Bit of `op_features` for an image in a group.
pub(crate) const GROUP_MEMBER: u64 = 4;
/// Bit of `op_features` for an image with snapshots in the trash.
pub(crate) const SNAPSHOT_TRASH: u64 = 8;
/// Attempts to change a header or a list that other clients change at the same time.
const TRIES: usize = 16;

impl Images {
    /// Returns the number of the pool; 0 where there is only one.
    pub(crate) fn pool_id(&self) -> i64 {
        self.backend().shared().map_or(0, |shared| shared.pool_id())
    }

    /// Returns the clones of an image's snapshots, or of one of them; with `descendants`, their clones too.
    ///
    /// # Errors
    /// `NotFound`; `Corrupt` for a damaged header or list; errors of the backend.
    pub async fn children(
        self: &Rc<Self>,
        name: &str,
        snapshot: Option<&str>,
        descendants: bool,
    ) -> Result<Vec<ChildInfo>> {
        if let Some((images, name)) = self.route(name) {
            return Box::pin(images.children(name, snapshot, descendants)).await;
        }
        let (id, header) = self.load(name).await?;
        let found = async {
            let of = |stored: &Snapshot| snapshot.is_none_or(|name| stored.is_user() && stored.name == name);
            let snapshots: Vec<_> = header.snapshots.iter().rev().filter(|stored| of(stored)).map(|s| s.id).collect();
            if let (Some(snapshot), true) = (snapshot, snapshots.is_empty()) {
                return Err(Error::new(ErrorKind::NotFound, format!("snapshot {snapshot}")));
            }
            let mut all = Vec::new();
            let mut next: Vec<(Rc<Self>, String, SnapId)> =
                snapshots.into_iter().map(|snap| (self.clone(), id.clone(), snap)).collect();
            next.reverse();
            while let Some((images, id, snap)) = next.pop() {
                for child in clones_of(&images, &id, snap).await? {
                    all.push(images.describe_child(&child).await?);
                    if descendants && let Some((there, header)) = find(&images, &child).await? {
                        let grandchildren = header.snapshots.iter();
                        next.extend(grandchildren.map(|snapshot| (there.clone(), child.image.clone(), snapshot.id)));
                    }
                }
            }
            Ok(all)
        };
        found.await.map_err(|error: Error| error.within(format_args!("clones of image {name}")))
    }

    /// Resolves the ids of a clone to names. Deleted pools and images are shown by id.
    async fn describe_child(&self, child: &Child) -> Result<ChildInfo> {
        let mut info = ChildInfo {
            pool: child.pool.to_string(),
            namespace: child.namespace.clone(),
            image: child.image.clone(),
            id: child.image.clone(),
            trash: false,
        };
        let Some(backend) = self.pool_of(child.pool).await? else { return Ok(info) };
        info.pool = backend.info().pool;
        let images = Images::in_namespace(&backend, &child.namespace);
        match images.directory().name_of(&child.image).await? {
            Some(name) => info.image = name,
            None => {
                if let Some(trashed) = images.trash().entry(&child.image).await? {
                    (info.image, info.trash) = (trashed.name, true);
                }
            }
        }
        Ok(info)
    }
}

/// Returns the header of a clone, and the images of its pool and namespace; `None` if the clone does not exist.
async fn find(images: &Rc<Images>, child: &Child) -> Result<Option<(Rc<Images>, ImageHeader)>> {
    let Some(backend) = images.pool_of(child.pool).await? else { return Ok(None) };
    let there = Images::in_namespace(&backend, &child.namespace);
    match there.header(&child.image).await {
        Ok(header) => Ok(Some((there, header))),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Returns whether an entry is left over: its clone does not exist, is not being created, or is not one of this snapshot.
async fn is_left_over(images: &Rc<Images>, id: &str, snap: SnapId, child: &Child) -> Result<bool> {
    if let Some((_, header)) = find(images, child).await? {
        let parent = parent_of(images, id, snap);
        let own = header.parent.iter().map(|(_, parent)| parent);
        let all = own.chain(header.snapshots.iter().filter_map(|snapshot| snapshot.parent.as_ref()));
        return Ok(!all.into_iter().any(|other| other.is_same_snapshot(&parent)));
    }
    // Its creation is in progress, or was interrupted, as long as the directory has it.
    let Some(backend) = images.pool_of(child.pool).await? else { return Ok(true) };
    let there = Images::in_namespace(&backend, &child.namespace);
    let is_known =
        there.directory().name_of(&child.image).await?.is_some() || there.trash().entry(&child.image).await?.is_some();
    Ok(!is_known)
}

/// Returns the entry of a clone of this snapshot, without an overlap.
fn parent_of(images: &Images, id: &str, snap: SnapId) -> Parent {
    let (pool, namespace) = (images.pool_id(), images.namespace().to_string());
    Parent { pool, namespace, image: id.to_owned(), snap, overlap: None }
}

// ---- Lists of clones ----

/// Returns the clones of a snapshot, of both versions.
pub(crate) async fn clones_of(images: &Rc<Images>, id: &str, snap: SnapId) -> Result<Vec<Child>> {
    let mut children = recorded_clones(images, id, snap).await?.1;
    children.extend(legacy_clones_of(images, id, snap).await?);
    Ok(children)
}

/// Returns the stored list of the clones of version 2 of a snapshot, and its decoded form.
async fn recorded_clones(images: &Images, id: &str, snap: SnapId) -> Result<(Option<Vec<u8>>, Vec<Child>)> {
    let object = images.header_object(id);
    let stored = images.backend().kv_get(&object, vec![children_key(snap)]).await?.pop().flatten();
    let decoded =
        stored.as_deref().map(|stored| decode_children(stored).ok_or_else(|| damaged(&object))).transpose()?;
    Ok((stored, decoded.unwrap_or_default()))
}

/// Returns the clones of version 1 of a snapshot, of all pools.
async fn legacy_clones_of(images: &Rc<Images>, id: &str, snap: SnapId) -> Result<Vec<Child>> {
    let pools = match images.backend().shared() {
        Some(objects) => objects.pool_ids(),
        None => vec![0],
    };
    let object = children_object(images.namespace());
    let key = encode_legacy_key(images.pool_id(), id, snap);
    let mut children = Vec::new();
    for pool in pools {
        // A pool that has been removed meanwhile has no clones.
        let Some(backend) = images.pool_of(pool).await? else { continue };
        let ids = legacy_list(&backend, &object, &key).await?.1;
        let namespace = images.namespace().to_string();
        children.extend(ids.into_iter().map(|image| Child { pool, namespace: namespace.clone(), image }));
    }
    Ok(children)
}

/// Returns a stored list of clones of version 1 in a pool, and its decoded form.
async fn legacy_list(
    backend: &Rc<dyn ObjectBackend>,
    object: &ObjectName,
    key: &[u8],
) -> Result<(Option<Vec<u8>>, Vec<String>)> {
    let stored = match backend.kv_get(object, vec![key.to_vec()]).await {
        Ok(mut values) => values.pop().flatten(),
        Err(error) if error.kind() == ErrorKind::NotFound => None,
        Err(error) => return Err(error),
    };
    let decode = |stored: &[u8]| decode_legacy_children(stored).ok_or_else(|| damaged(object));
    let ids = stored.as_deref().map(decode).transpose()?.unwrap_or_default();
    Ok((stored, ids))
}

fn damaged(object: &ObjectName) -> Error {
    Error::new(ErrorKind::Corrupt, format!("the list of clones in {object}"))
}

// ---- Recording clones ----

/// Records a clone of version 2 of a snapshot; one that is recorded already stays so.
///
/// # Errors
/// `NotFound` if the snapshot does not exist, or is in the trash; `Unsupported` if it is stored in a format without clones.
pub(crate) async fn attach(images: &Rc<Images>, parent: &Parent, child: &Child) -> Result<()> {
    let add = |children: &mut Vec<Child>| match children.contains(child) {
        true => false,
        false => {
            children.push(child.clone());
            true
        }
    };
    for _ in 0..TRIES {
        let header = images.header(&parent.image).await?;
        let found = header.snapshots.iter().find(|snapshot| snapshot.id == parent.snap);
        let Some(snapshot) = found.filter(|snapshot| !matches!(snapshot.kind, SnapshotKind::Trash { .. })) else {
            return Err(Error::new(ErrorKind::NotFound, "the snapshot to be cloned"));
        };
        if store_children(images, (&parent.image, &header), snapshot, add).await? {
            announce(images, &parent.image).await;
            return Ok(());
        }
    }
    Err(contended())
}

/// Removes a clone of version 2 from the record of a snapshot. Succeeds if it is not there, and if the snapshot does not
/// exist.
pub(crate) async fn detach(images: &Rc<Images>, parent: &Parent, child: &Child) -> Result<()> {
    let remove = |children: &mut Vec<Child>| {
        let before = children.len();
        children.retain(|other| other != child);
        children.len() < before
    };
    for _ in 0..TRIES {
        let header = match images.header(&parent.image).await {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
            header => header?,
        };
        let Some(snapshot) = header.snapshots.iter().find(|snapshot| snapshot.id == parent.snap) else { return Ok(()) };
        if store_children(images, (&parent.image, &header), snapshot, remove).await? {
            announce(images, &parent.image).await;
            return Ok(());
        }
    }
    Err(contended())
}

/// Changes the record of a snapshot's clones. Returns `false` if another client was first.
async fn store_children(
    images: &Rc<Images>,
    (id, header): (&str, &ImageHeader),
    snapshot: &Snapshot,
    change: impl FnOnce(&mut Vec<Child>) -> bool,
) -> Result<bool> {
    let object = images.header_object(id);
    let (stored, mut children) = recorded_clones(images, id, snapshot.id).await?;
    if !change(&mut children) {
        return Ok(true);
    }
    let value = snapshot.with_children(children.len() as u32).ok_or_else(|| {
        let what = "the snapshot is stored in a format of before there were clones of version 2";
        Error::new(ErrorKind::Unsupported, what)
    })?;
    let others = header.snapshots.iter().any(|other| other.id != snapshot.id && other.children > 0);
    let (set, clear) = match children.is_empty() && !others {
        true => (0, CLONE_PARENT),
        false if children.is_empty() => (0, 0),
        false => (CLONE_PARENT, 0),
    };
    let mut ops = vec![
        ObjectOp::AssertExists,
        ObjectOp::KvCompare { key: snapshot_key(snapshot.id), value: Some(snapshot.stored.clone()) },
        ObjectOp::KvCompare { key: children_key(snapshot.id), value: stored },
    ];
    if clear != 0 {
        // No other snapshot has got a clone meanwhile.
        let others = header.snapshots.iter().filter(|other| other.id != snapshot.id);
        ops.extend(
            others.map(|other| ObjectOp::KvCompare { key: snapshot_key(other.id), value: Some(other.stored.clone()) }),
        );
    }
    ops.extend(operations_change(images.backend(), &object, set, clear).await?);
    let mut pairs = vec![(snapshot_key(snapshot.id), value)];
    match children.is_empty() {
        true => ops.push(ObjectOp::KvRemove { keys: vec![children_key(snapshot.id)] }),
        false => pairs.push((children_key(snapshot.id), encode_children(&mut children))),
    }
    ops.push(ObjectOp::KvSet { pairs });
    match images.backend().submit(&object, Transaction::new(ops).durable()).await {
        Ok(_) => Ok(true),
        Err(error) if error.kind() == ErrorKind::Guard => Ok(false),
        Err(error) => Err(error),
    }
}

/// Removes left-over entries from the record of a snapshot's clones of version 2; returns the clones that are left.
pub(crate) async fn prune(images: &Rc<Images>, id: &str, snap: SnapId) -> Result<Vec<Child>> {
    let mut left = Vec::new();
    for child in recorded_clones(images, id, snap).await?.1 {
        match is_left_over(images, id, snap, &child).await? {
            true => {
                tracing::info!(
                    image = id,
                    snap = snap.0,
                    clone = child.image,
                    "a record of a clone that is none is removed"
                );
                detach(images, &parent_of(images, id, snap), &child).await?;
            }
            false => left.push(child),
        }
    }
    Ok(left)
}

/// Returns a pool with a clone of version 1 of a snapshot. Left-over entries do not count, and are removed.
pub(crate) async fn legacy_pool(images: &Rc<Images>, id: &str, snap: SnapId) -> Result<Option<String>> {
    for child in legacy_clones_of(images, id, snap).await? {
        let Some(backend) = images.pool_of(child.pool).await? else { continue };
        if !is_left_over(images, id, snap, &child).await? {
            return Ok(Some(backend.info().pool));
        }
        tracing::info!(image = id, snap = snap.0, clone = child.image, "a record of a clone that is none is removed");
        let there = Images::in_namespace(&backend, &child.namespace);
        remove_legacy(&there, &parent_of(images, id, snap), &child.image).await?;
    }
    Ok(None)
}

/// Adds a clone of version 1 to the list of its pool; one that is there already stays.
pub(crate) async fn add_legacy(images: &Images, parent: &Parent, child: &str) -> Result<()> {
    change_legacy(images, parent, |ids| match ids.iter().any(|id| id == child) {
        true => false,
        false => {
            ids.push(child.to_owned());
            true
        }
    })
    .await
}

/// Removes a clone of version 1 from the list of its pool; succeeds if it is not there.
pub(crate) async fn remove_legacy(images: &Images, parent: &Parent, child: &str) -> Result<()> {
    change_legacy(images, parent, |ids| {
        let before = ids.len();
        ids.retain(|id| id != child);
        ids.len() < before
    })
    .await
}

async fn change_legacy(images: &Images, parent: &Parent, change: impl Fn(&mut Vec<String>) -> bool) -> Result<()> {
    let (backend, object) = (images.backend(), children_object(images.namespace()));
    let key = encode_legacy_key(parent.pool, &parent.image, parent.snap);
    for _ in 0..TRIES {
        let (stored, mut ids) = legacy_list(backend, &object, &key).await?;
        if !change(&mut ids) {
            return Ok(());
        }
        let store = match ids.is_empty() {
            true => ObjectOp::KvRemove { keys: vec![key.clone()] },
            false => ObjectOp::KvSet { pairs: vec![(key.clone(), encode_legacy_children(&mut ids))] },
        };
        let guard = ObjectOp::KvCompare { key: key.clone(), value: stored };
        let ops = vec![ObjectOp::Create { exclusive: false }, guard, store];
        match backend.submit(&object, Transaction::new(ops).durable()).await {
            Err(error) if error.kind() == ErrorKind::Guard => {}
            stored => return stored.map(drop),
        }
    }
    Err(contended())
}

/// Returns the operations that set and clear bits of a header's `op_features`, and the feature `operations` with them. They
/// fail with `Guard` if another client has changed those meanwhile.
pub(crate) async fn operations_change(
    backend: &Rc<dyn ObjectBackend>,
    header: &ObjectName,
    set: u64,
    clear: u64,
) -> Result<Vec<ObjectOp>> {
    let keys = [b"features".to_vec(), b"op_features".to_vec()];
    let values = backend.kv_get(header, keys.to_vec()).await?;
    let number = |at: usize| {
        let stored = values.get(at).and_then(|value| value.as_deref());
        stored.and_then(|value| value.first_chunk::<8>()).map_or(0, |bytes| u64::from_le_bytes(*bytes))
    };
    let (features, before) = (number(0), number(1));
    let guards =
        keys.iter().zip(&values).map(|(key, value)| ObjectOp::KvCompare { key: key.clone(), value: value.clone() });
    let mut ops: Vec<_> = guards.collect();
    let after = before & !clear | set;
    if after == before {
        return Ok(ops);
    }
    let [features_key, operations_key] = keys;
    let operations = ImageFeatures::OPERATION_LIST.0;
    let features = if after == 0 { features & !operations } else { features | operations };
    let mut pairs = vec![(features_key, features.to_le_bytes().to_vec())];
    match after {
        0 => ops.push(ObjectOp::KvRemove { keys: vec![operations_key] }),
        _ => pairs.push((operations_key, after.to_le_bytes().to_vec())),
    }
    ops.push(ObjectOp::KvSet { pairs });
    Ok(ops)
}

/// Makes a header that was changed known to the image, if it is open here, and to the other clients that have it open.
pub(crate) async fn announce(images: &Images, id: &str) {
    if let Some(open) = images.find_open(id)
        && let Err(error) = open.refresh().await
    {
        // The header stays stale, and is read again before it is needed.
        tracing::warn!(image = open.name(), %error, "cannot read a changed header");
    }
    if let Some(shared) = images.backend().shared() {
        let update = NotifyMessage::HeaderUpdate.encode();
        if let Err(error) = shared.notify(&images.header_object(id), update, NOTIFY_TIMEOUT).await {
            tracing::debug!(image = id, %error, "cannot notify the other clients of an image");
        }
    }
}

fn contended() -> Error {
    Error::new(
        ErrorKind::Busy,
        format!("other clients have changed the list of clones {TRIES} times meanwhile; try again"),
    )
}

// ---- A clone that no longer needs its parent ----

impl Images {
    /// Ends the record of a clone, which needs its parent no more. A snapshot in the trash that had no other clone is
    /// removed.
    pub(crate) async fn forget_child(&self, id: &str, header: &ImageHeader) -> Result<()> {
        let Some((_, parent)) = &header.parent else { return Ok(()) };
        if header.op_features & CLONE_CHILD == 0 {
            return remove_legacy(self, parent, id).await;
        }
        // The parent is gone with its pool.
        let Some(backend) = self.pool_of(parent.pool).await? else { return Ok(()) };
        let there = Images::in_namespace(&backend, &parent.namespace);
        let child = Child { pool: self.pool_id(), namespace: self.namespace().to_string(), image: id.to_owned() };
        detach(&there, parent, &child).await?;
        if let Err(error) = there.remove_unused(parent).await {
            let hint = "remove it with 'forebay snap rm --snap-id'";
            tracing::warn!(image = parent.image, snap = parent.snap.0, %error, hint, "a snapshot in the trash that no clone needs any more stays");
        }
        Ok(())
    }

    /// Removes the snapshots of an image in the trash that have no clones any more: a crash may have left them.
    ///
    /// # Errors
    /// `NotFound`; errors of the backend.
    pub async fn empty_snapshot_trash(self: &Rc<Self>, name: &str) -> Result<()> {
        if let Some((images, name)) = self.route(name) {
            return Box::pin(images.empty_snapshot_trash(name)).await;
        }
        let (id, header) = self.load(name).await?;
        self.empty_trash_of(&id, &header).await
    }

    /// Does the same for the image of an id.
    pub(crate) async fn empty_trash_of(self: &Rc<Self>, id: &str, header: &ImageHeader) -> Result<()> {
        let in_trash = |snapshot: &&Snapshot| matches!(snapshot.kind, SnapshotKind::Trash { .. });
        let trash: Vec<_> = header.snapshots.iter().filter(in_trash).map(|snapshot| snapshot.id).collect();
        if trash.is_empty() {
            return Ok(());
        }
        let image = self.open_id(id).await?;
        let mut emptied = Ok(());
        for snap in trash {
            match Box::pin(image.remove_snapshot_number(snap)).await {
                Err(error) if !matches!(error.kind(), ErrorKind::Busy | ErrorKind::NotFound) => {
                    emptied = Err(error);
                    break;
                }
                _ => {}
            }
        }
        image.close().await;
        emptied
    }

    /// Removes a snapshot in the trash, if it has no clones any more.
    async fn remove_unused(self: &Rc<Self>, parent: &Parent) -> Result<()> {
        let header = match self.header(&parent.image).await {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(()),
            header => header?,
        };
        let is_unused = |snapshot: &&Snapshot| {
            snapshot.id == parent.snap && snapshot.children == 0 && matches!(snapshot.kind, SnapshotKind::Trash { .. })
        };
        if !header.snapshots.iter().any(|snapshot| is_unused(&snapshot)) {
            return Ok(());
        }
        let image = self.open_id(&parent.image).await?;
        // The parent may be a clone itself, which this snapshot alone needed.
        let removed = Box::pin(image.remove_snapshot_number(parent.snap)).await;
        image.close().await;
        match removed {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
            removed => removed,
        }
    }
}
