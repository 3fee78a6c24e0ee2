//! Flattening: a clone gets all data of its parent, and depends on it no more.

use std::rc::Rc;

use forebay_block::{Error, ErrorKind, Extent, LocalFuture, ObjectOp, Result, SnapId};

use crate::children::{CLONE_CHILD, operations_change};
use crate::clone::{copy_data_up, until_unused};
use crate::format::{ImageFeatures, ImageHeader, snapshot_key};
use crate::image::Image;
use crate::info::ObjectProgress;
use crate::open_image::OpenImage;
use crate::owner::OwnerOperation;
use crate::window::{WALK_WINDOW, after_others, windowed};
use crate::wire::snapshot::{Parent, Snapshot};

/// Attempts to end the dependence on the parent, while other clients change the image.
const TRIES: usize = 8;

impl Image {
    /// Copies the data that the image has from its parent into it, and ends its dependence on the parent, durably. Writes go on
    /// meanwhile. Without the feature deep-flatten, snapshots of the image still need the parent.
    ///
    /// # Errors
    /// `Invalid` if it has no parent; `ReadOnly`; `Busy` if other clients change the image at the same time; errors of the
    /// backend: the image can be flattened again then, which goes on with what is missing.
    pub async fn flatten(&self, mut progress: impl FnMut(ObjectProgress)) -> Result<()> {
        let shared = self.shared();
        let flattened = async {
            if self.ask_owner(OwnerOperation::Flatten, &mut progress).await? {
                return Ok(());
            }
            for _ in 0..TRIES {
                drop(self.begin_change().await?);
                check_parent(&shared.header())?;
                let rollbacks = shared.rollbacks();
                copy_all(shared, &mut progress).await?;
                shared.data().flush().await?;
                let alone = self.begin_change().await?;
                let pass = shared.enter(Extent::new(0, 1)).await?;
                // A rollback may have removed an object that was there.
                if shared.rollbacks() == rollbacks
                    && let Some(former) = end_dependence(shared).await?
                {
                    // The parent's header may be changed next, and those who change that may wait for this one's.
                    drop((pass, alone));
                    if let FormerParent::Unneeded(header) = former {
                        shared.images().forget_child(shared.id(), &header).await?;
                    }
                    return Ok(());
                }
            }
            let what = format!("other clients have changed the image {TRIES} times meanwhile; try again");
            Err(Error::new(ErrorKind::Busy, what))
        };
        let flattened: Result<()> = flattened.await;
        flattened.map_err(|error| error.within(format_args!("flattening image {}", shared.name())))
    }
}

fn check_parent(header: &ImageHeader) -> Result<()> {
    match header.parent.as_ref().and_then(|(_, parent)| parent.overlap) {
        Some(_) => Ok(()),
        None => Err(Error::new(ErrorKind::Invalid, "it has no parent")),
    }
}

/// Copies all objects up that do not exist.
async fn copy_all(shared: &Rc<OpenImage>, progress: &mut impl FnMut(ObjectProgress)) -> Result<()> {
    let total = shared.layout().objects(shared.head().overlap);
    let mut objects = 0..total;
    let mut done = 0;
    progress(ObjectProgress { done, total });
    let next = || {
        let object = objects.next()?;
        let copy: LocalFuture<Result<()>> = Box::pin(copy_one(shared.clone(), object));
        Some(after_others(copy))
    };
    windowed(WALK_WINDOW, next, |_, ()| {
        done += 1;
        progress(ObjectProgress { done, total });
    })
    .await
}

async fn copy_one(shared: Rc<OpenImage>, object: u64) -> Result<()> {
    // While the object's range is held, the exclusive lock is not released.
    let _pass = shared.enter(shared.layout().span_of(&(object..object + 1))).await?;
    shared.check_there()?;
    let overlap = shared.overlap_in(shared.head(), object);
    if overlap == 0 {
        return Ok(());
    }
    // An object that the map has may still not exist: it is marked before it is written.
    if shared.map().is_none_or(|map| map.may_exist(object)) {
        match shared.data().stat(&shared.object_name(object), SnapId::HEAD).await {
            Ok(_) => return Ok(()),
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) => return Err(error),
        }
    }
    copy_data_up(&shared, object, overlap).await
}

/// Parent of an image that was flattened.
enum FormerParent {
    /// Snapshots of the image still read it.
    Needed,
    /// Its record of the clone is to be removed: in this header of the image, it is still the parent.
    Unneeded(Rc<ImageHeader>),
}

/// Removes the parent from the header: the image's, and with the feature deep-flatten that of its snapshots. Returns `None` if
/// another client has changed the header meanwhile. The caller holds the permit to resize, and the exclusive lock.
///
/// The parent's record of the clone is removed last, when no client reads the parent any more for this image: the parent's
/// snapshot may be removed then.
async fn end_dependence(shared: &Rc<OpenImage>) -> Result<Option<FormerParent>> {
    let refresh = shared.begin_refresh().await;
    let header = shared.header();
    check_parent(&header)?;
    let Some((stored, parent)) = header.parent.clone() else { return Ok(None) };
    let is_deep = header.features.has(ImageFeatures::DEEP_FLATTEN);
    let has_parent = |snapshot: &Snapshot| snapshot.overlap.is_some() || snapshot.parent.is_some();
    let keeps = !is_deep && header.snapshots.iter().any(has_parent);
    let mut change = vec![ObjectOp::KvCompare { key: b"parent".to_vec(), value: Some(stored.clone()) }];
    let mut pairs = Vec::new();
    let mut snapshots = header.snapshots.clone();
    for snapshot in snapshots.iter_mut().filter(|snapshot| is_deep && has_parent(snapshot)) {
        let key = snapshot_key(snapshot.id);
        change.push(ObjectOp::KvCompare { key: key.clone(), value: Some(snapshot.stored.clone()) });
        let without = snapshot.without_parent().and_then(|value| Snapshot::decode(&value));
        *snapshot = without.ok_or_else(|| Error::new(ErrorKind::Corrupt, format!("snapshot {}", snapshot.id.0)))?;
        pairs.push((key, snapshot.stored.clone()));
    }
    let clear = if keeps { 0 } else { header.op_features & CLONE_CHILD };
    if !keeps {
        // A snapshot of another client, made meanwhile, would need the parent.
        let seq = header.snap_seq.to_le_bytes().to_vec();
        change.push(ObjectOp::KvCompare { key: b"snap_seq".to_vec(), value: Some(seq) });
        change.extend(operations_change(shared.backend(), &shared.header_object(), 0, clear).await?);
        change.push(ObjectOp::KvRemove { keys: vec![b"parent".to_vec()] });
    }
    let kept = keeps.then(|| {
        let parent = Parent { overlap: None, ..parent };
        (parent.encode_like(&stored), parent)
    });
    pairs.extend(kept.iter().map(|(stored, _)| (b"parent".to_vec(), stored.clone())));
    if !pairs.is_empty() {
        change.push(ObjectOp::KvSet { pairs });
    }
    match shared.store_header(change).await {
        Err(error) if error.kind() == ErrorKind::Guard => return Ok(None),
        stored => stored?,
    }
    shared.reduce_overlap(0);
    let former = shared.parent().filter(|_| !keeps);
    if !keeps {
        refresh.set_parent(None);
    }
    refresh.apply(ImageHeader { parent: kept, snapshots, ..(*header).clone() }.with_operations(0, clear));
    if let Some(former) = former {
        until_unused(former).await;
    }
    if let Some(watcher) = shared.watcher() {
        watcher.header_changed().await;
    }
    Ok(Some(if keeps { FormerParent::Needed } else { FormerParent::Unneeded(header) }))
}
