//! Online resize of an image, and removal of the objects past its end.

use std::cmp::Ordering;
use std::future::ready;
use std::ops::Range;
use std::rc::Rc;

use forebay_block::{Advice, Error, ErrorKind, Extent, LocalFuture, ObjectOp, Result, Transaction};

use crate::clone::copy_up;
use crate::format::ImageHeader;
use crate::image::Image;
use crate::images::SIZE_MAX;
use crate::info::ObjectProgress;
use crate::open_image::OpenImage;
use crate::owner::OwnerOperation;
use crate::present::walk;
use crate::requests::WriteFlags;
use crate::window::{WALK_WINDOW, after_others, windowed};
use crate::wire::bitmap::ObjectMapState;

/// Removes the objects wholly within `range`, and truncates those in which it begins. Updates the object map, if
/// there is one, before and after; objects marked nonexistent are skipped, unless snapshots still need the parent's
/// bytes.
///
/// Not durable before the next flush. Can be repeated: removed objects stay removed.
pub(crate) async fn trim(
    shared: &Rc<OpenImage>,
    range: Range<u64>,
    progress: &mut impl FnMut(ObjectProgress),
) -> Result<()> {
    let layout = shared.layout();
    let first_whole = layout.objects(range.start);
    let end = layout.objects(range.end);
    // Objects that keep a part: of the set in which the range begins.
    let kept = |object| layout.bytes_below(object, range.start);
    let cut = (range.start / layout.set_size() * layout.set_objects()..first_whole)
        .filter(|&object| kept(object) < layout.object_size())
        .collect::<Vec<_>>();
    let total = cut.len() as u64 + end.saturating_sub(first_whole);
    let map = shared.map();
    if let Some(map) = &map {
        map.update_range(first_whole..end, ObjectMapState::Pending, Some(ObjectMapState::Exists)).await?;
    }
    progress(ObjectProgress { done: 0, total });
    let mut before = 0;
    let mut cut = cut.into_iter();
    let cut_next = || {
        let object = cut.next()?;
        Some(after_others(trim_object(shared, object, ObjectOp::Truncate { size: kept(object) })))
    };
    windowed(WALK_WINDOW, cut_next, |_, _| {
        before += 1;
        progress(ObjectProgress { done: before, total });
    })
    .await?;
    let remove = |object| trim_object(shared, object, ObjectOp::Remove);
    // Snapshots may need the parent's data: absent objects are created by copy-up.
    let copied = match shared.snapc().is_some_and(|snapc| !snapc.snaps.is_empty()) {
        true => layout.objects(shared.head().overlap).clamp(first_whole, end.max(first_whole)),
        false => first_whole,
    };
    let mut copies = first_whole..copied;
    windowed(
        WALK_WINDOW,
        || copies.next().map(|object| after_others(remove(object))),
        |_, _| {
            before += 1;
            progress(ObjectProgress { done: before, total });
        },
    )
    .await?;
    let done = |passed, _| progress(ObjectProgress { done: before + passed, total });
    walk(shared, shared.head(), copied..end, remove, done).await?;
    if let Some(map) = &map {
        map.update_range(first_whole..end, ObjectMapState::Nonexistent, Some(ObjectMapState::Pending)).await?;
    }
    Ok(())
}

/// Removes or truncates an object that need not show the parent's bytes any more; copies them up first if snapshots
/// need them.
fn trim_object(shared: &Rc<OpenImage>, object: u64, op: ObjectOp) -> LocalFuture<Result<u64>> {
    let overlap = shared.overlap_in(shared.head(), object);
    let snapc = shared.snapc();
    // Copy-up makes the parent's data the snapshots' own, so that the overlap can shrink.
    let copies = overlap > 0 && snapc.as_ref().is_some_and(|snapc| !snapc.snaps.is_empty());
    if !copies && shared.map().is_some_and(|map| !map.may_exist(object)) {
        return Box::pin(ready(Ok(0)));
    }
    let state = if matches!(op, ObjectOp::Remove) { ObjectMapState::Pending } else { ObjectMapState::Exists };
    // A truncated object differs from its state at the last snapshot.
    let marks = copies || state == ObjectMapState::Exists && shared.map().is_some_and(|map| !map.is_marked(object));
    let transaction = Transaction { snapc, ops: vec![op.clone()], durable: false, advice: Advice::NONE };
    if !marks {
        return unless_absent(shared.change_data(object, transaction));
    }
    let shared = shared.clone();
    Box::pin(async move {
        if let Some(map) = shared.map() {
            // Marked before it exists: the copy-up may create it.
            map.update(object, state, None).await?;
        }
        if copies {
            copy_up(&shared, object, overlap, &[], WriteFlags::default()).await?;
        }
        unless_absent(shared.change_data(object, transaction)).await
    })
}

/// Treats the removal of an absent object as done.
pub(crate) fn unless_absent(work: LocalFuture<Result<u64>>) -> LocalFuture<Result<u64>> {
    Box::pin(async move {
        match work.await {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(0),
            other => other,
        }
    })
}

/// Guard that shows the new size during a shrink, and restores the old one when dropped, unless the shrink was
/// completed.
struct Shown<'a> {
    shared: &'a OpenImage,
    before: Option<u64>,
}

impl Drop for Shown<'_> {
    fn drop(&mut self) {
        if let Some(before) = self.before {
            self.shared.set_size(before);
        }
    }
}

impl Image {
    /// Resizes the image to `new_size` bytes, online.
    ///
    /// Growing: the new end reads as zeroes. Shrinking must be allowed by `allow_shrink`: requests beyond the new end
    /// are refused with `OutOfRange` at once, in-flight ones are waited for, and the objects there are removed;
    /// `progress` reports their number. After a crash in between, the size is the old one, and part of the end may be
    /// gone: shrink again.
    ///
    /// # Errors
    /// `Invalid` for a size beyond [`SIZE_MAX`], or a smaller one without `allow_shrink`; `ReadOnly`; errors of the
    /// backend, after which the size is the old one.
    pub async fn resize(
        &self,
        new_size: u64,
        allow_shrink: bool,
        mut progress: impl FnMut(ObjectProgress),
    ) -> Result<()> {
        let shared = self.shared();
        let refuse = |kind, why: String| Err(Error::new(kind, format!("resizing image {}: {why}", shared.name())));
        if self.is_read_only() {
            return refuse(ErrorKind::ReadOnly, "opened for reading only".to_owned());
        }
        if new_size > SIZE_MAX {
            return refuse(ErrorKind::Invalid, format!("{new_size} bytes are more than the largest size, {SIZE_MAX}"));
        }
        let asked = self.ask_owner(OwnerOperation::Resize { size: new_size, allow_shrink }, &mut progress).await;
        match asked {
            Ok(false) => {}
            Ok(true) => return Ok(()),
            Err(error) => {
                return Err(error.within(format_args!("resizing image {} to {new_size} bytes", shared.name())));
            }
        }
        // Acquired before the size is read, which may change with the lock's owner.
        shared.lock().await?;
        shared.refresh_stale().await?;
        let alone = shared.begin_resize().await;
        shared.check_there()?;
        let size = shared.size();
        if new_size < size && !allow_shrink {
            return refuse(ErrorKind::Invalid, format!("{new_size} bytes are fewer than {size}, and that loses data"));
        }
        let resized = if new_size < size {
            shrink(shared, size, new_size, &mut progress).await
        } else {
            grow(shared, size, new_size, &mut progress).await
        };
        if resized.is_ok()
            && let Err(error) = shared.refresh_stored().await
        {
            // The new size is stored and in force. The header is read again before it is needed.
            tracing::warn!(image = shared.name(), %error, "cannot re-read the header after a resize");
        }
        drop(alone);
        if let Some(watcher) = shared.watcher()
            && resized.is_ok()
        {
            watcher.header_changed().await;
        }
        resized.map_err(|error| error.within(format_args!("resizing image {} to {new_size} bytes", shared.name())))
    }
}

/// Gives the image another size, larger or smaller, and its header too. The caller holds the permit to resize.
pub(crate) async fn resize_to(
    shared: &Rc<OpenImage>,
    new_size: u64,
    progress: &mut impl FnMut(ObjectProgress),
) -> Result<()> {
    let size = shared.size();
    match new_size.cmp(&size) {
        Ordering::Less => shrink(shared, size, new_size, progress).await?,
        Ordering::Equal => return Ok(()),
        Ordering::Greater => grow(shared, size, new_size, progress).await?,
    }
    shared.refresh_stored().await
}

async fn grow(
    shared: &Rc<OpenImage>,
    size: u64,
    new_size: u64,
    progress: &mut impl FnMut(ObjectProgress),
) -> Result<()> {
    if new_size > size {
        // A discard up to the old end removes or cuts off all that its object has; new bytes of the object must come after it.
        // While this guard is held, the exclusive lock is not released.
        let from = size - size % shared.layout().set_size();
        let _hold = shared.enter_alone(Extent::new(from, new_size - from)).await?;
        check_stored(shared, size)?;
        if let Some(map) = shared.map() {
            map.resize(shared.layout().objects(new_size)).await?;
        }
        store_size(shared, new_size).await?;
        shared.set_size(new_size);
    }
    progress(ObjectProgress { done: 0, total: 0 });
    Ok(())
}

async fn shrink(
    shared: &Rc<OpenImage>,
    size: u64,
    new_size: u64,
    progress: &mut impl FnMut(ObjectProgress),
) -> Result<()> {
    let mut shown = Shown { shared, before: Some(size) };
    shared.set_size(new_size);
    // A write to the kept part of an object copies up the parent's data for all of it, so it waits until the overlap
    // has been reduced to the kept part.
    let from = match shared.head().overlap > new_size {
        true => new_size - new_size % shared.layout().set_size(),
        false => new_size,
    };
    let hold = shared.enter_alone(Extent::new(from, size - from)).await?;
    check_stored(shared, size)?;
    trim(shared, new_size..size, progress).await?;
    // The objects must be durably removed before the header shrinks, or growing again would expose their data.
    shared.data().flush().await?;
    store_size(shared, new_size).await?;
    shown.before = None;
    let overlap = shared.head().overlap;
    shared.reduce_overlap(overlap.min(new_size));
    if let Some(map) = shared.map()
        && let Err(error) = map.resize(shared.layout().objects(new_size)).await
    {
        // The new size is stored. A map that is too long covers all objects, and marks those past the end nonexistent.
        tracing::warn!(image = shared.name(), %error, "cannot shorten the object map after a shrink");
    }
    drop(hold);
    Ok(())
}

/// Fails with `Busy` if another client changed the size while this one waited for the lock.
fn check_stored(shared: &OpenImage, size: u64) -> Result<()> {
    if shared.is_shared() && shared.header().size != size {
        return Err(Error::new(ErrorKind::Busy, "another client has changed the size in the meantime; try again"));
    }
    Ok(())
}

/// Stores the size, and the overlap with the parent if it exceeds the size.
async fn store_size(shared: &OpenImage, size: u64) -> Result<()> {
    let header = shared.header();
    let mut pairs = vec![ImageHeader::encode_size(size)];
    let mut ops = Vec::new();
    if header.parent.as_ref().and_then(|(_, parent)| parent.overlap).is_some_and(|overlap| overlap > size)
        && let Some((key, before, after)) = header.encode_overlap(size)
    {
        ops.push(ObjectOp::KvCompare { key: key.clone(), value: Some(before) });
        pairs.push((key, after));
    }
    ops.push(ObjectOp::KvSet { pairs });
    shared.store_header(ops).await
}
