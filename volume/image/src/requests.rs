//! Block requests, done on objects.
//!
//! A request within one object is handed to the backend within the call, as one transaction.  One over several
//! objects, or one that has to wait for a range, goes on in a task of its own, so that it is done to its end even if
//! nobody waits for it any more.

use std::future::{Future, ready};
use std::pin::Pin;
use std::rc::Rc;
use std::task::{Context, Poll};

use forebay_block::{
    BufList, Error, ErrorKind, Extent, ExtentMap, ExtentState, LocalFuture, ObjectOp, ObjectRead, Reply, Request,
    Result, Transaction,
};
use forebay_reactor::spawn;

use crate::gate::Pass;
use crate::image::{ImageUsage, Shared, TRANSFER_MAX};
use crate::images::Progress;
use crate::layout::Piece;
use crate::resize::unless_absent;
use crate::window::{REQUEST_WINDOW, WALK_WINDOW, windowed};

/// A change of a range.
enum Change {
    Write(BufList),
    /// Reads as zeroes after; the space is given back.
    Clear,
}

/// Does a request; the handle has checked that it may write.
pub(crate) fn submit(shared: &Rc<Shared>, request: Request) -> LocalFuture<Result<Reply>> {
    let Some(extent) = request.extent() else { return flush(shared) };
    if let Err(error) = shared.check_range(extent) {
        return failed(error);
    }
    if let Request::CompareAndWrite { expect, data, .. } = &request
        && expect.len() != data.len()
    {
        let what = format!("image {}: compare {} bytes, write {}", shared.name(), expect.len(), data.len());
        return failed(Error::new(ErrorKind::Invalid, what));
    }
    match request {
        Request::Read(_) if extent.len > TRANSFER_MAX.into() => {
            failed(Error::new(ErrorKind::Invalid, format!("image {}: a read of {} bytes", shared.name(), extent.len)))
        }
        Request::Read(extent) => read(shared, extent),
        _ if extent.len == 0 => Box::pin(ready(Ok(Reply::Done))),
        Request::Write { data, fua, .. } => change(shared, extent, Change::Write(data), fua),
        Request::Discard(_) => change(shared, extent, Change::Clear, false),
        Request::WriteZeroes { no_unmap: false, fua, .. } => change(shared, extent, Change::Clear, fua),
        Request::WriteZeroes { no_unmap: true, fua, .. } => write_zeroes(shared, extent, fua),
        Request::CompareAndWrite { expect, data, fua, .. } => compare_and_write(shared, extent, expect, data, fua),
        Request::Flush => flush(shared),
    }
}

fn failed<T: 'static>(error: Error) -> LocalFuture<Result<T>> {
    Box::pin(ready(Err(error)))
}

fn flush(shared: &Rc<Shared>) -> LocalFuture<Result<Reply>> {
    let flushed = shared.backend().flush();
    Box::pin(async move { flushed.await.map(|()| Reply::Done) })
}

// ---- Reading ----

fn read(shared: &Rc<Shared>, extent: Extent) -> LocalFuture<Result<Reply>> {
    if let Some(piece) = shared.layout().single(extent) {
        let data = read_piece(shared, piece);
        return Box::pin(async move { data.await.map(Reply::Data) });
    }
    let shared = shared.clone();
    Box::pin(async move { read_pieces(&shared, extent).await.map(Reply::Data) })
}

/// Exactly the piece's bytes; an object that is not there holds zeroes.
fn read_piece(shared: &Shared, piece: Piece) -> impl Future<Output = Result<BufList>> + use<> {
    let Extent { offset, len } = piece.extent;
    let stored = shared.backend().read(&shared.object_name(piece.object), ObjectRead::head(offset, len));
    async move {
        match stored.await {
            Ok(data) => Ok(data.fill(piece.extent)),
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(BufList::zeroes(len as usize)),
            Err(error) => Err(error),
        }
    }
}

async fn read_pieces(shared: &Rc<Shared>, extent: Extent) -> Result<BufList> {
    let mut pieces = shared.layout().pieces(extent);
    let mut parts: Vec<BufList> = vec![BufList::new(); pieces_of(shared, extent)];
    let next = || -> Option<LocalFuture<Result<BufList>>> { Some(Box::pin(read_piece(shared, pieces.next()?))) };
    windowed(REQUEST_WINDOW, next, |number, data| parts[number] = data).await?;
    let mut whole = BufList::new();
    parts.into_iter().for_each(|part| whole.append(part));
    Ok(whole)
}

/// How many objects `extent` touches.
fn pieces_of(shared: &Shared, extent: Extent) -> usize {
    if extent.len == 0 {
        return 0;
    }
    let object_size = shared.layout().object_size();
    ((extent.end() - 1) / object_size - extent.offset / object_size + 1) as usize
}

// ---- Writing ----

/// A write within one object, under way; dropped, it goes on.
struct OneWrite {
    shared: Rc<Shared>,
    work: Option<(LocalFuture<Result<u64>>, Pass)>,
}

impl Future for OneWrite {
    type Output = Result<Reply>;
    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let (work, _) = self.work.as_mut().expect("polled after it was done");
        let Poll::Ready(result) = work.as_mut().poll(cx) else { return Poll::Pending };
        self.work = None;
        Poll::Ready(result.map(|_| Reply::Done))
    }
}

impl Drop for OneWrite {
    fn drop(&mut self) {
        if let Some((work, pass)) = self.work.take() {
            self.shared.gate().leave(work, pass);
        }
    }
}

/// Writes or clears a range that is not empty.
fn change(shared: &Rc<Shared>, extent: Extent, change: Change, fua: bool) -> LocalFuture<Result<Reply>> {
    let pass = shared.gate().try_pass(extent);
    if let Some(piece) = shared.layout().single(extent)
        && let Some(pass) = pass
    {
        let work = change_piece(shared, piece, &change, fua);
        return Box::pin(OneWrite { shared: shared.clone(), work: Some((work, pass)) });
    }
    let shared = shared.clone();
    let task = spawn(async move {
        let _pass = match pass {
            Some(pass) => pass,
            None => wait_to_pass(&shared, extent).await?,
        };
        change_pieces(&shared, extent, &change, fua).await
    });
    Box::pin(async move { task.await.map(|()| Reply::Done) })
}

/// Waits until a write may pass; the image may have become smaller, or gone, meanwhile.
async fn wait_to_pass(shared: &Shared, extent: Extent) -> Result<Pass> {
    let pass = shared.gate().pass(extent).await;
    shared.check_range(extent)?;
    Ok(pass)
}

async fn change_pieces(shared: &Rc<Shared>, extent: Extent, change: &Change, fua: bool) -> Result<()> {
    let mut pieces = shared.layout().pieces(extent);
    let next = || Some(change_piece(shared, pieces.next()?, change, fua));
    windowed(REQUEST_WINDOW, next, |_, _| {}).await
}

fn change_piece(shared: &Shared, piece: Piece, change: &Change, durable: bool) -> LocalFuture<Result<u64>> {
    let extent = piece.extent;
    let op = match change {
        Change::Write(data) => {
            let whole = piece.at == 0 && data.len() as u64 == extent.len;
            let data = if whole { data.clone() } else { part(data, piece) };
            ObjectOp::Write { offset: extent.offset, data }
        }
        Change::Clear => clear_op(shared, piece),
    };
    let may_be_absent = matches!(op, ObjectOp::Remove);
    let transaction = Transaction { snapc: shared.snapc(), ops: vec![op], durable };
    let work = shared.backend().submit(&shared.object_name(piece.object), transaction);
    if may_be_absent { unless_absent(work) } else { work }
}

/// The part of a request's data that belongs to a piece, sharing the memory.
fn part(data: &BufList, piece: Piece) -> BufList {
    data.slice(piece.at as usize..(piece.at + piece.extent.len) as usize)
}

/// What clears a piece: removing the object when that is all there is of it, cutting it when its end is cleared, and
/// zeroing in it otherwise.
fn clear_op(shared: &Shared, piece: Piece) -> ObjectOp {
    let Extent { offset, len } = piece.extent;
    let object_size = shared.layout().object_size();
    // The last object may be shorter.  It is looked up now, not when the request came, since the image may have grown.
    let used = object_size.min(shared.size().saturating_sub(piece.object * object_size));
    if offset == 0 && len >= used {
        return ObjectOp::Remove;
    }
    if offset + len == object_size {
        return ObjectOp::Truncate { size: offset };
    }
    ObjectOp::Zero { extent: piece.extent }
}

/// Writes zeroes that keep their space, a window of them at a time.
fn write_zeroes(shared: &Rc<Shared>, extent: Extent, fua: bool) -> LocalFuture<Result<Reply>> {
    let pass = shared.gate().try_pass(extent);
    let shared = shared.clone();
    let task = spawn(async move {
        let _pass = match pass {
            Some(pass) => pass,
            None => wait_to_pass(&shared, extent).await?,
        };
        // One run of zeroes serves all objects.
        let zeroes = BufList::zeroes(extent.len.min(shared.layout().object_size()) as usize);
        let mut pieces = shared.layout().pieces(extent);
        let next = || {
            let piece = Piece { at: 0, ..pieces.next()? };
            let data = Change::Write(zeroes.slice(0..piece.extent.len as usize));
            Some(change_piece(&shared, piece, &data, fua))
        };
        windowed(REQUEST_WINDOW, next, |_, _| {}).await
    });
    Box::pin(async move { task.await.map(|()| Reply::Done) })
}

// ---- Compare and write ----

fn compare_and_write(
    shared: &Rc<Shared>,
    extent: Extent,
    expect: BufList,
    data: BufList,
    fua: bool,
) -> LocalFuture<Result<Reply>> {
    if let Some(piece) = shared.layout().single(extent) {
        // The backend's transaction is atomic against everything else that happens to the object.
        if let Some(pass) = shared.gate().try_pass(extent) {
            let work = compare_and_write_piece(shared, piece, expect, data, fua);
            return Box::pin(OneWrite { shared: shared.clone(), work: Some((work, pass)) });
        }
        let shared = shared.clone();
        let task = spawn(async move {
            let _pass = wait_to_pass(&shared, extent).await?;
            compare_and_write_piece(&shared, piece, expect, data, fua).await
        });
        return Box::pin(async move { task.await.map(|_| Reply::Done) });
    }
    let shared = shared.clone();
    let task = spawn(async move {
        let _hold = shared.gate().hold(extent).await;
        shared.check_range(extent)?;
        let found = read_pieces(&shared, extent).await?;
        if let Some(at) = first_difference(&found, &expect) {
            return Err(Error::new(ErrorKind::Mismatch(at), format!("image {}", shared.name())));
        }
        change_pieces(&shared, extent, &Change::Write(data), fua).await
    });
    Box::pin(async move { task.await.map(|()| Reply::Done) })
}

fn compare_and_write_piece(
    shared: &Shared,
    piece: Piece,
    expect: BufList,
    data: BufList,
    durable: bool,
) -> LocalFuture<Result<u64>> {
    let offset = piece.extent.offset;
    let ops = vec![ObjectOp::Compare { offset, data: expect }, ObjectOp::Write { offset, data }];
    shared.backend().submit(&shared.object_name(piece.object), Transaction { snapc: shared.snapc(), ops, durable })
}

/// Where two lists of equal length first differ.
fn first_difference(a: &BufList, b: &BufList) -> Option<u64> {
    let (mut a_parts, mut b_parts) = (a.parts().iter(), b.parts().iter());
    let (mut a_rest, mut b_rest): (&[u8], &[u8]) = (&[], &[]);
    let mut at = 0;
    loop {
        if a_rest.is_empty() {
            a_rest = a_parts.next()?;
        }
        if b_rest.is_empty() {
            b_rest = b_parts.next()?;
        }
        let len = a_rest.len().min(b_rest.len());
        if a_rest[..len] != b_rest[..len] {
            let same = a_rest.iter().zip(b_rest).take_while(|(a, b)| a == b).count();
            return Some(at + same as u64);
        }
        (a_rest, b_rest) = (&a_rest[len..], &b_rest[len..]);
        at += len as u64;
    }
}

// ---- What is stored where ----

/// What is stored where, object by object.
pub(crate) fn map(shared: &Rc<Shared>, extent: Extent) -> LocalFuture<Result<ExtentMap>> {
    if let Err(error) = shared.check_range(extent) {
        return failed(error);
    }
    let shared = shared.clone();
    Box::pin(async move {
        let mut pieces = shared.layout().pieces(extent);
        let mut parts: Vec<Option<ExtentMap>> = vec![None; pieces_of(&shared, extent)];
        let next = || Some(map_piece(&shared, pieces.next()?));
        windowed(REQUEST_WINDOW, next, |number, map| parts[number] = Some(map)).await?;
        let mut whole = ExtentMap::new();
        let mut at = extent.offset;
        for run in parts.iter().flatten().flat_map(ExtentMap::runs) {
            whole.push(at, run.extent.len, run.state);
            at += run.extent.len;
        }
        Ok(whole)
    })
}

fn map_piece(shared: &Shared, piece: Piece) -> LocalFuture<Result<ExtentMap>> {
    let Extent { offset, len } = piece.extent;
    let map = shared.backend().map(&shared.object_name(piece.object), ObjectRead::head(offset, len));
    Box::pin(async move {
        match map.await {
            Err(error) if error.kind() == ErrorKind::NotFound => {
                let mut hole = ExtentMap::new();
                hole.push(offset, len, ExtentState::Hole);
                Ok(hole)
            }
            other => other,
        }
    })
}

/// Adds up what is stored, object by object.
pub(crate) async fn usage(shared: &Rc<Shared>, mut progress: impl FnMut(Progress)) -> Result<ImageUsage> {
    shared.check_there()?;
    let provisioned = shared.size();
    let total = shared.layout().objects(provisioned);
    let mut pieces = shared.layout().pieces(Extent::new(0, provisioned));
    let (mut done, mut used) = (0, 0);
    progress(Progress { done, total });
    let next = || Some(map_piece(shared, pieces.next()?));
    windowed(WALK_WINDOW, next, |_, map: ExtentMap| {
        used += map.data_bytes();
        done += 1;
        progress(Progress { done, total });
    })
    .await?;
    Ok(ImageUsage { provisioned, used })
}
