//! Block requests on objects.
//!
//! A request within one object is submitted to the backend before the call returns, as one transaction. A request
//! over several objects, or one that waits for a range lock, runs in its own task, so that it completes even if the
//! caller no longer waits for it.

use std::collections::BTreeMap;
use std::future::{Future, ready};
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};

use forebay_block::{
    Advice, BlockReply, BlockRequest, BufList, Error, ErrorKind, Extent, LocalFuture, ObjectOp, Result, SharedRange,
    Transaction, WriteExtent,
};
use forebay_reactor::spawn;

use crate::admission::detach;
use crate::clone::{CopiedUp, copy_up};
use crate::image::TRANSFER_MAX;
use crate::layout::ObjectExtent;
use crate::open_image::{ImageView, OpenImage};
use crate::present::Present;
use crate::read::{read, read_pieces};
use crate::window::{REQUEST_WINDOW, windowed};
use crate::wire::bitmap::ObjectMapState;

/// Modification of a range.
enum Change {
    Write(BufList),
    /// Deallocate; the range reads as zeroes afterwards.
    Clear,
}

/// Write flags.
#[derive(Clone, Copy, Default)]
pub(crate) struct WriteFlags {
    /// Durable before it is acknowledged (FUA).
    pub(crate) durable: bool,
    /// Access pattern hint for the bytes.
    pub(crate) advice: Advice,
}

impl WriteFlags {
    fn transaction(self, shared: &OpenImage, ops: Vec<ObjectOp>) -> Transaction {
        Transaction { snapc: shared.snapc(), ops, durable: self.durable, advice: self.advice }
    }
}

/// Submits a request. The caller has checked that the handle permits writes, which apply only to the head.
pub(crate) fn submit(
    shared: &Rc<OpenImage>,
    view: ImageView,
    request: BlockRequest,
    advice: Advice,
) -> LocalFuture<Result<BlockReply>> {
    let Some(extent) = request.extent() else { return flush(shared) };
    if let Err(error) = shared.check_range(view, extent) {
        return failed(error);
    }
    if let BlockRequest::CompareAndWrite { expect, data, .. } = &request
        && expect.len() != data.len()
    {
        let what = format!("image {}: compare {} bytes, write {}", shared.name(), expect.len(), data.len());
        return failed(Error::new(ErrorKind::Invalid, what));
    }
    let flags = |durable| WriteFlags { durable, advice };
    match request {
        BlockRequest::Read(_) if extent.len > TRANSFER_MAX.into() => {
            failed(Error::new(ErrorKind::Invalid, format!("image {}: a read of {} bytes", shared.name(), extent.len)))
        }
        BlockRequest::Read(extent) => read(shared, view, extent, advice),
        _ if extent.len == 0 => Box::pin(ready(Ok(BlockReply::Done))),
        BlockRequest::Write { data, fua, .. } => change(shared, extent, Change::Write(data), flags(fua)),
        BlockRequest::Discard(_) => change(shared, extent, Change::Clear, flags(false)),
        BlockRequest::WriteZeroes { no_unmap: false, fua, .. } => change(shared, extent, Change::Clear, flags(fua)),
        BlockRequest::WriteZeroes { no_unmap: true, fua, .. } => write_zeroes(shared, extent, flags(fua)),
        BlockRequest::CompareAndWrite { expect, data, fua, .. } => {
            compare_and_write(shared, extent, expect, data, flags(fua))
        }
        BlockRequest::Flush => flush(shared),
    }
}

/// Returns the future of a request that fails at once.
pub(crate) fn failed<T: 'static>(error: Error) -> LocalFuture<Result<T>> {
    Box::pin(ready(Err(error)))
}

fn flush(shared: &Rc<OpenImage>) -> LocalFuture<Result<BlockReply>> {
    let flushed = shared.data().flush();
    Box::pin(async move { flushed.await.map(|()| BlockReply::Done) })
}

// ---- Writing ----

/// In-flight write within one object; if dropped, it continues detached.
///
/// Keeps the image open: as long as it is in flight, removing or resizing the image waits for its range.
struct ObjectWrite {
    image: Rc<OpenImage>,
    work: Option<(LocalFuture<Result<u64>>, SharedRange)>,
}

impl Future for ObjectWrite {
    type Output = Result<BlockReply>;
    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let (work, _) = self.work.as_mut().expect("polled after it was done");
        let Poll::Ready(result) = work.as_mut().poll(cx) else { return Poll::Pending };
        self.work = None;
        Poll::Ready(result.map(|_| BlockReply::Done))
    }
}

impl Drop for ObjectWrite {
    fn drop(&mut self) {
        if let Some((work, range)) = self.work.take() {
            detach(self.image.clone(), work, range);
        }
    }
}

/// Writes or deallocates a non-empty range.
fn change(
    shared: &Rc<OpenImage>,
    extent: Extent,
    change: Change,
    flags: WriteFlags,
) -> LocalFuture<Result<BlockReply>> {
    let range = try_enter(shared, extent);
    let single = shared.layout().single(extent).filter(|piece| is_plain(shared, piece.object, &change));
    let range = match (single, range) {
        (Some(piece), Some(range)) => {
            let work = change_piece(shared, piece, &change, flags);
            return Box::pin(ObjectWrite { image: shared.clone(), work: Some((work, range)) });
        }
        (_, range) => range,
    };
    let (shared, epoch) = (shared.clone(), shared.admission().epoch());
    let task = spawn(async move {
        let _range = match range {
            Some(range) => range,
            None => wait_to_enter(&shared, extent, epoch).await?,
        };
        change_pieces(&shared, extent, &change, flags).await
    });
    Box::pin(async move { task.await.map(|()| BlockReply::Done) })
}

/// Admits a write at once, if its range is not locked and the exclusive lock, if required, is held.
fn try_enter(shared: &OpenImage, extent: Extent) -> Option<SharedRange> {
    if shared.may_write() { shared.admission().try_shared(extent) } else { None }
}

/// Waits until a write that arrived in `epoch` is admitted. Checks the reservations and the size again, which may
/// have changed in the meantime.
async fn wait_to_enter(shared: &Rc<OpenImage>, extent: Extent, epoch: u64) -> Result<SharedRange> {
    let range = shared.enter(extent).await?;
    shared.admission().check(epoch)?;
    shared.check_range(shared.head(), extent)?;
    Ok(range)
}

/// Returns whether a change of this object is a single transaction: the object has no overlap with a parent, and the
/// object map needs no change.
fn is_plain(shared: &OpenImage, object: u64, change: &Change) -> bool {
    if shared.overlap_in(shared.head(), object) > 0 {
        return false;
    }
    shared.map().is_none_or(|map| map.is_marked(object) && matches!(change, Change::Write(_)))
}

async fn change_pieces(shared: &Rc<OpenImage>, extent: Extent, change: &Change, flags: WriteFlags) -> Result<()> {
    let present = match change {
        Change::Clear => Present::within(shared, shared.head(), extent).await?,
        Change::Write(_) => Present::All,
    };
    // Absent objects need not be deallocated, but the parent's data must be masked.
    let overlap = shared.layout().objects(shared.head().overlap);
    let mut skipped = false;
    let mut pieces = shared.layout().pieces(extent).filter(|piece| {
        let is_there = piece.object < overlap || present.may_have(piece.object);
        skipped |= !is_there;
        is_there
    });
    let next = || Some(change_piece(shared, pieces.next()?, change, flags));
    windowed(REQUEST_WINDOW, next, |_, _| {}).await?;
    drop(pieces);
    if skipped {
        cleared_nothing(shared, flags).await?;
    }
    Ok(())
}

/// Completes a deallocation that found no object. A preceding removal may not be durable yet, so `durable` requires a
/// flush.
async fn cleared_nothing(shared: &OpenImage, flags: WriteFlags) -> Result<u64> {
    if flags.durable {
        shared.data().flush().await?;
    }
    Ok(0)
}

/// Treats the removal of an absent object as done, once its absence is durable if required.
fn removed(shared: &Rc<OpenImage>, work: LocalFuture<Result<u64>>, flags: WriteFlags) -> LocalFuture<Result<u64>> {
    let shared = shared.clone();
    Box::pin(async move {
        match work.await {
            Err(error) if error.kind() == ErrorKind::NotFound => cleared_nothing(&shared, flags).await,
            other => other,
        }
    })
}

fn change_piece(
    shared: &Rc<OpenImage>,
    piece: ObjectExtent,
    change: &Change,
    flags: WriteFlags,
) -> LocalFuture<Result<u64>> {
    let extent = piece.extent;
    let op = match change {
        Change::Write(data) => {
            let whole = piece.at == 0 && data.len() as u64 == extent.len;
            let data = if whole { data.clone() } else { shared.layout().part(data, piece) };
            ObjectOp::Write { offset: extent.offset, data }
        }
        Change::Clear => clear_op(shared, piece),
    };
    if !is_plain(shared, piece.object, change) {
        return Box::pin(change_managed(shared.clone(), piece.object, vec![op], flags));
    }
    if matches!(op, ObjectOp::Write { .. }) {
        return store(shared, piece.object, vec![op], flags);
    }
    let may_be_absent = matches!(op, ObjectOp::Remove);
    let work = shared.change_data(piece.object, flags.transaction(shared, vec![op]));
    if may_be_absent { removed(shared, work, flags) } else { work }
}

/// Writes to an object that needs no copy-up and no object map update.
fn store(shared: &OpenImage, object: u64, mut ops: Vec<ObjectOp>, flags: WriteFlags) -> LocalFuture<Result<u64>> {
    // Without an object map it is unknown whether this creates the object.
    if let Some(expect) = shared.expectation().filter(|_| shared.map().is_none()) {
        ops.insert(0, expect);
    }
    shared.change_data(object, flags.transaction(shared, ops))
}

/// Submits non-overlapping writes; those to one object are one transaction.
pub(crate) fn write_many(shared: &Rc<OpenImage>, writes: Vec<WriteExtent>, fua: bool) -> LocalFuture<Result<()>> {
    let flags = WriteFlags { durable: fua, advice: Advice::NONE };
    let mut objects: BTreeMap<u64, Vec<ObjectOp>> = BTreeMap::new();
    for WriteExtent { offset, data } in writes {
        let extent = Extent::new(offset, data.len() as u64);
        if let Err(error) = shared.check_range(shared.head(), extent) {
            return failed(error);
        }
        for piece in shared.layout().pieces(extent) {
            let op = ObjectOp::Write { offset: piece.extent.offset, data: shared.layout().part(&data, piece) };
            objects.entry(piece.object).or_default().push(op);
        }
    }
    let mut in_flight: Vec<_> =
        objects.into_iter().map(|(object, ops)| write_object(shared, object, ops, flags)).collect();
    match in_flight.len() {
        1 => in_flight.remove(0),
        // All are polled: one that is done keeps its range locked until then. Another may wait behind an exclusive lock
        // that waits for that range.
        objects => {
            let mut in_flight = in_flight.into_iter();
            Box::pin(windowed(objects.max(1), move || in_flight.next(), |_, ()| {}))
        }
    }
}

/// Submits the writes to one object as one transaction.
fn write_object(shared: &Rc<OpenImage>, object: u64, ops: Vec<ObjectOp>, flags: WriteFlags) -> LocalFuture<Result<()>> {
    let ends = ops.iter().map(|op| match op {
        ObjectOp::Write { offset, data } => (*offset, offset + data.len() as u64),
        _ => (0, 0),
    });
    let (from, to) = ends.fold((u64::MAX, 0), |(from, to), (start, end)| (from.min(start), to.max(end)));
    // Span of all writes: a range lock on any part of it blocks them.
    let extent = shared.layout().span(object, Extent::new(from, to - from));
    let range = try_enter(shared, extent);
    if is_plain(shared, object, &Change::Write(BufList::new()))
        && let Some(range) = range
    {
        let write = ObjectWrite { image: shared.clone(), work: Some((store(shared, object, ops, flags), range)) };
        return Box::pin(async move { write.await.map(drop) });
    }
    let (shared, epoch) = (shared.clone(), shared.admission().epoch());
    let task = spawn(async move {
        let _range = match range {
            Some(range) => range,
            None => wait_to_enter(&shared, extent, epoch).await?,
        };
        let write = match is_plain(&shared, object, &Change::Write(BufList::new())) {
            true => store(&shared, object, ops, flags),
            false => Box::pin(change_managed(shared.clone(), object, ops, flags)),
        };
        write.await.map(drop)
    });
    Box::pin(task)
}

/// Returns the operation that deallocates a piece: removing the object if the piece covers it, truncating it if the
/// piece reaches its end, zeroing otherwise.
fn clear_op(shared: &OpenImage, piece: ObjectExtent) -> ObjectOp {
    let Extent { offset, len } = piece.extent;
    let object_size = shared.layout().object_size();
    // The last objects may be shorter. Their length is computed now, not when the request came, since the image may have
    // grown.
    let used = shared.layout().bytes_below(piece.object, shared.size());
    if offset == 0 && len >= used {
        return ObjectOp::Remove;
    }
    if offset + len == object_size {
        return ObjectOp::Truncate { size: offset };
    }
    ObjectOp::Zero { extent: piece.extent }
}

/// Writes zeroes that keep their space allocated, with a bounded number of objects in flight.
fn write_zeroes(shared: &Rc<OpenImage>, extent: Extent, flags: WriteFlags) -> LocalFuture<Result<BlockReply>> {
    let range = try_enter(shared, extent);
    let (shared, epoch) = (shared.clone(), shared.admission().epoch());
    let task = spawn(async move {
        let _range = match range {
            Some(range) => range,
            None => wait_to_enter(&shared, extent, epoch).await?,
        };
        // One zero buffer serves all objects.
        let zeroes = BufList::zeroes(extent.len.min(shared.layout().object_size()) as usize);
        let mut pieces = shared.layout().pieces(extent);
        let next = || {
            let piece = ObjectExtent { at: 0, ..pieces.next()? };
            let data = Change::Write(zeroes.slice(0..piece.extent.len as usize));
            Some(change_piece(&shared, piece, &data, flags))
        };
        windowed(REQUEST_WINDOW, next, |_, _| {}).await
    });
    Box::pin(async move { task.await.map(|()| BlockReply::Done) })
}

// ---- Compare and write ----

fn compare_and_write(
    shared: &Rc<OpenImage>,
    extent: Extent,
    expect: BufList,
    data: BufList,
    flags: WriteFlags,
) -> LocalFuture<Result<BlockReply>> {
    if let Some(piece) = shared.layout().single(extent) {
        // The backend's transaction is atomic with respect to all other operations on the object.
        if let Some(range) = try_enter(shared, extent)
            && is_plain(shared, piece.object, &Change::Write(BufList::new()))
        {
            let work = compare_and_write_piece(shared, piece, expect, data, flags);
            return Box::pin(ObjectWrite { image: shared.clone(), work: Some((work, range)) });
        }
        let (shared, epoch) = (shared.clone(), shared.admission().epoch());
        let task = spawn(async move {
            let _range = wait_to_enter(&shared, extent, epoch).await?;
            compare_and_write_piece(&shared, piece, expect, data, flags).await
        });
        return Box::pin(async move { task.await.map(|_| BlockReply::Done) });
    }
    let (shared, epoch) = (shared.clone(), shared.admission().epoch());
    let task = spawn(async move {
        let _hold = shared.enter_alone(extent).await?;
        shared.admission().check(epoch)?;
        shared.check_range(shared.head(), extent)?;
        let found = read_pieces(&shared, shared.head(), extent, Advice::NONE).await?;
        if let Some(at) = found.first_difference(&expect) {
            return Err(Error::new(ErrorKind::Mismatch(at), format!("image {}", shared.name())));
        }
        change_pieces(&shared, extent, &Change::Write(data), flags).await
    });
    Box::pin(async move { task.await.map(|()| BlockReply::Done) })
}

fn compare_and_write_piece(
    shared: &Rc<OpenImage>,
    piece: ObjectExtent,
    expect: BufList,
    data: BufList,
    flags: WriteFlags,
) -> LocalFuture<Result<u64>> {
    let offset = piece.extent.offset;
    let ops = vec![ObjectOp::Compare { offset, data: expect }, ObjectOp::Write { offset, data }];
    if !is_plain(shared, piece.object, &Change::Write(BufList::new())) {
        return Box::pin(change_managed(shared.clone(), piece.object, ops, flags));
    }
    shared.change_data(piece.object, flags.transaction(shared, ops))
}

// ---- With a parent, or an object map ----

/// Changes an object together with its object map state, before and after, and the copy-up from the parent.
pub(crate) async fn change_managed(
    shared: Rc<OpenImage>,
    object: u64,
    mut ops: Vec<ObjectOp>,
    flags: WriteFlags,
) -> Result<u64> {
    let overlap = shared.overlap_in(shared.head(), object);
    let snapc = shared.snapc();
    let keeps = snapc.as_ref().is_some_and(|snapc| !snapc.snaps.is_empty());
    let clears = matches!(ops[..], [ObjectOp::Remove | ObjectOp::Truncate { .. } | ObjectOp::Zero { .. }]);
    if overlap > 0 && matches!(ops[..], [ObjectOp::Remove]) {
        // Removing the object would expose the parent's data.
        ops = vec![ObjectOp::Create { exclusive: false }, ObjectOp::Truncate { size: 0 }];
    }
    let removes = matches!(ops[..], [ObjectOp::Remove]);
    // Overwriting the whole object needs no copy-up, unless snapshots do.
    let replaces = match &ops[..] {
        [ObjectOp::Create { .. }, ObjectOp::Truncate { size: 0 }] => true,
        [ObjectOp::Write { offset: 0, data }] => data.len() as u64 == shared.layout().object_size(),
        _ => false,
    };
    let guarded = overlap > 0 && (keeps || !replaces);
    // Existing objects have had their allocation hint.
    let writes = ops.iter().all(|op| matches!(op, ObjectOp::Write { .. }));
    let expect = shared.expectation().filter(|_| !guarded && writes);
    let map = shared.map();
    let absent = map.as_ref().is_some_and(|map| !map.may_exist(object));
    if clears && absent && overlap == 0 {
        return cleared_nothing(&shared, flags).await;
    }
    if let Some(map) = &map {
        map.update(object, if removes { ObjectMapState::Pending } else { ObjectMapState::Exists }, None).await?;
    }
    let mut known_absent = absent;
    let version = loop {
        if guarded && known_absent && copy_up(&shared, object, overlap, &ops, flags).await? == CopiedUp::WithChange {
            break 0;
        }
        let mut all = Vec::with_capacity(ops.len() + 2);
        all.extend(guarded.then_some(ObjectOp::AssertExists));
        all.extend(expect.clone());
        all.extend(ops.iter().cloned());
        let change = Transaction { snapc: snapc.clone(), ..flags.transaction(&shared, all) };
        match shared.change_data(object, change).await {
            Ok(version) => break version,
            Err(error) if error.kind() == ErrorKind::NotFound && removes => {
                break cleared_nothing(&shared, flags).await?;
            }
            Err(error) if error.kind() == ErrorKind::NotFound && guarded => known_absent = true,
            Err(error) => return Err(error),
        }
    };
    if let (Some(map), true) = (&map, removes) {
        map.update(object, ObjectMapState::Nonexistent, Some(ObjectMapState::Pending)).await?;
    }
    Ok(version)
}
