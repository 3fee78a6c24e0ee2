//! Write log as a block device: admission and dispatch of requests.

use std::cell::RefCell;
use std::future::ready;
use std::rc::Rc;

use forebay_block::{
    BlockDevice, BlockReply, BlockRequest, BufList, Error, ErrorKind, Extent, ExtentMap, ExtentState, Geometry,
    LocalFuture, Result, SizeWatch, WriteRange, WriteRangeLock,
};
use forebay_reactor::spawn;
use forebay_reactor::sync::{Notify, oneshot};

use crate::cipher::PayloadCipher;
use crate::entries::{EntryKind, SAME_LEN};
use crate::format::{MediumKind, PAYLOAD_MAX, RUN_MAX};
use crate::media::Medium;
use crate::mode::Mode;
use crate::options::{DirtyLimits, LogOptions, LogOwner, Persist};
use crate::pattern::{Pattern, pattern_of};
use crate::pending_write::PendingWrite;
use crate::shelf::{OpenGuard, OpenLog};
use crate::state::LogState;
use crate::stats::LogStats;
use crate::throttle::{self, WriteThrottle};
use crate::{acquire, append, bypass, flush, read, writeback};

pub(crate) struct LogShared {
    pub(crate) inner: Rc<dyn BlockDevice>,
    pub(crate) medium: Rc<dyn Medium>,
    pub(crate) kind: MediumKind,
    /// Cipher of payloads on the medium.
    pub(crate) cipher: Option<Rc<PayloadCipher>>,
    pub(crate) owner: Rc<dyn LogOwner>,
    pub(crate) options: LogOptions,
    pub(crate) state: RefCell<LogState>,
    /// Signaled when a piece is queued, or the log is to stop.
    pub(crate) append: Notify,
    /// Signaled when there may be entries to write back.
    pub(crate) write_back: Notify,
    /// Signaled when there may be space on the medium, or in the queue for it.
    pub(crate) room: Rc<Notify>,
    /// Signaled when a change has ended, entries were published or retired, or the mode has changed.
    pub(crate) settled: Rc<Notify>,
    pub(crate) throttle: WriteThrottle,
    /// Ranges of the changes in flight.
    pub(crate) ranges: WriteRangeLock,
    /// Dropped together with the log's registration as open: tasks that wait for that hold the other ends.
    waiting: RefCell<Vec<oneshot::Sender<()>>>,
    _held: OpenGuard,
}

impl LogShared {
    /// Returns whether writes are acknowledged before they are durable.
    pub(crate) fn is_write_back_ack(&self) -> bool {
        self.options.persist == Persist::OnFlush && self.kind == MediumKind::Ssd
    }

    fn check(&self, extent: Extent) -> Result<()> {
        let state = self.state.borrow();
        let size = state.size_limits.limit(self.inner.geometry().size);
        if extent.checked_end().is_none_or(|end| end > size) {
            let text = format!("{} bytes at {} of a volume of {size}", extent.len, extent.offset);
            return Err(Error::new(ErrorKind::OutOfRange, text));
        }
        Ok(())
    }
}

/// Volume with a write log in front of it.
pub struct WriteLog {
    pub(crate) shared: Rc<LogShared>,
}

impl Drop for WriteLog {
    fn drop(&mut self) {
        {
            let mut state = self.shared.state.borrow_mut();
            state.life.close();
        }
        self.shared.append.notify_all();
        self.shared.write_back.notify_all();
        self.shared.room.notify_all();
        self.shared.settled.notify_all();
    }
}

impl WriteLog {
    /// Starts an opened log in front of its volume. Its contents are readable at once, and are written back in the
    /// background.
    ///
    /// # Panics
    /// If no reactor runs on this thread.
    pub fn new(inner: Rc<dyn BlockDevice>, log: OpenLog, owner: Rc<dyn LogOwner>, options: LogOptions) -> Rc<Self> {
        let OpenLog { medium, found, kind, cipher, room, held } = log;
        let acquiring = owner.acquire();
        let state = LogState::new(found.tail_seq, &found.entries, acquiring.is_some());
        let settled = Rc::new(Notify::new());
        let shared = Rc::new(LogShared {
            inner,
            medium,
            kind,
            cipher,
            owner,
            throttle: WriteThrottle::new(options.limits),
            options,
            state: RefCell::new(state),
            append: Notify::new(),
            write_back: Notify::new(),
            room,
            ranges: WriteRangeLock::new(settled.clone()),
            settled,
            waiting: RefCell::default(),
            _held: held,
        });
        drop(spawn(append::run(shared.clone())));
        drop(spawn(writeback::run(shared.clone())));
        if let Some(first) = acquiring {
            drop(spawn(acquire::run(shared.clone(), first)));
        }
        if let Some(unusable) = shared.owner.unusable() {
            drop(spawn(append::disable_when(shared.clone(), unusable)));
        }
        Rc::new(Self { shared })
    }

    /// Returns whether writes are acknowledged before the log's medium has them, in the mode `on-flush`: a kill of this
    /// process loses them.
    pub fn acknowledges_early(&self) -> bool {
        self.shared.is_write_back_ack()
    }

    /// Returns the current mode.
    pub fn mode(&self) -> Mode {
        self.shared.state.borrow().life.mode().clone()
    }

    /// Returns the limits of dirty data.
    pub fn limits(&self) -> DirtyLimits {
        self.shared.throttle.limits()
    }

    /// Sets the limits of dirty data.
    pub fn set_limits(&self, limits: DirtyLimits) {
        self.shared.throttle.set_limits(limits);
        self.shared.write_back.notify_all();
        self.shared.settled.notify_all();
    }

    /// Returns whether payloads are encrypted on the medium.
    pub fn is_encrypted(&self) -> bool {
        self.shared.cipher.is_some()
    }

    /// Returns the kind of log device.
    pub fn medium(&self) -> MediumKind {
        self.shared.kind
    }

    /// Returns the last write-back error, if write-back is stalled.
    pub fn backend_error(&self) -> Option<Error> {
        self.shared.state.borrow().life.backend_error().cloned()
    }

    /// Returns the counters, without gauges.
    pub fn counters(&self) -> LogStats {
        self.shared.state.borrow().counters.get()
    }

    /// Returns the counters and gauges.
    pub fn stats(&self) -> LogStats {
        let state = self.shared.state.borrow();
        LogStats {
            capacity: self.shared.medium.capacity(),
            used: self.shared.medium.used(),
            dirty_bytes: state.dirty.bytes(),
            dirty_entries: state.dirty.len(),
            dirty_age: state.dirty.age(),
            index_memory: state.dirty.memory(),
            ..state.counters.get()
        }
    }

    /// Waits until this process is known to be the volume's only writer, or an attempt has failed.
    ///
    /// # Errors
    /// Error of the last attempt; it is retried unless the log has failed.
    pub async fn acquired(&self) -> Result<()> {
        let shared = &self.shared;
        let over = || {
            let state = shared.state.borrow();
            !state.life.is_acquiring() || state.life.backend_error().is_some() || state.life.is_ending()
        };
        shared.settled.wait_until(over).await;
        let state = shared.state.borrow();
        match state.life.mode() {
            Mode::Failed(error) => Err(error.clone()),
            Mode::Acquiring => Err(state.life.backend_error().cloned().unwrap_or_else(closed)),
            _ => Ok(()),
        }
    }

    /// Disables the log permanently: writes all data back, has the owner record that the log must never be replayed,
    /// and passes requests to the backend from then on. Requests wait in the meantime; none fails. `reason` is shown
    /// to operators.
    ///
    /// # Errors
    /// If the log has failed, or is closed.
    pub async fn disable(&self, reason: Error) -> Result<()> {
        let shared = &self.shared;
        shared.settled.wait_until(|| shared.state.borrow().life.has_decided()).await;
        if shared.state.borrow().life.is_on() {
            append::disable(shared, reason);
        }
        let over = || {
            let state = shared.state.borrow();
            state.life.is_closing() || state.life.is_over()
        };
        shared.settled.wait_until(over).await;
        match shared.state.borrow().life.mode() {
            Mode::Off(_) => Ok(()),
            Mode::Failed(error) => Err(error.clone()),
            _ => Err(closed()),
        }
    }

    /// Returns a number that changes whenever entries were written back: the sequence number of the oldest one.
    pub fn progress(&self) -> u64 {
        self.shared.state.borrow().dirty.tail()
    }

    /// Returns whether the log refuses new requests, permanently; requests in flight continue.
    pub fn is_ending(&self) -> bool {
        self.shared.state.borrow().life.is_ending()
    }

    /// Returns the maximum number of acknowledged bytes not known to be durable on the medium or at the backend: they
    /// are lost if the process ends now.
    pub fn unkept_bytes(&self) -> u64 {
        if !self.shared.is_write_back_ack() {
            return 0;
        }
        let state = self.shared.state.borrow();
        let first = state.queue.synced_seq().max(state.dirty.tail());
        (first..state.dirty.head()).filter_map(|seq| state.dirty.get(seq)).map(|entry| entry.extent().len).sum()
    }

    /// Refuses new requests, and makes all acknowledged writes durable on the medium, without waiting for the backend
    /// as long as the medium has space. To be followed by [`close`](Self::close).
    pub async fn stop(&self) {
        let shared = &self.shared;
        shared.state.borrow_mut().life.end();
        shared.settled.notify_all();
        shared.write_back.notify_all();
        flush::sync_acknowledged_on_medium(shared).await;
    }

    /// Waits until a closed log has nothing in flight any more, so that its space can be reused.
    pub async fn gone(self: Rc<Self>) {
        let (last, gone) = oneshot::channel::<()>();
        self.shared.waiting.borrow_mut().push(last);
        drop(self);
        // Resolves when the last task has dropped the shared state.
        gone.await;
    }

    /// Closes the log. Requests in flight are acknowledged first; throttled ones fail. With `flush`, the backend
    /// holds all data when this returns.
    ///
    /// # Errors
    /// If not all data could be written back, or the medium failed. The log is closed nevertheless.
    pub async fn close(&self, flush: bool) -> Result<()> {
        let shared = &self.shared;
        // An unresponsive backend does not delay writes to the medium.
        self.stop().await;
        if !flush && shared.state.borrow().life.is_acquiring() {
            // No write was acknowledged, and only the owner may change the medium.
            shared.state.borrow_mut().life.close();
            shared.append.notify_all();
            shared.write_back.notify_all();
            shared.settled.notify_all();
            return Ok(());
        }
        let over = || {
            let state = shared.state.borrow();
            let quiet = shared.ranges.is_free() && state.queue.is_empty() && state.queue.groups() == 0;
            quiet && !state.life.is_acquiring() || state.life.failure().is_some()
        };
        shared.settled.wait_until(over).await;
        let synced = flush::sync_acknowledged(shared).await;
        let drained = if flush { self.drain().await } else { synced };
        let clean = {
            let mut state = shared.state.borrow_mut();
            state.life.close();
            state.dirty.is_empty()
        };
        shared.append.notify_all();
        shared.write_back.notify_all();
        shared.settled.notify_all();
        let (failed, off) = {
            let state = shared.state.borrow();
            (state.life.failure().is_some(), !state.life.is_on())
        };
        if failed || off {
            return drained;
        }
        // Write-back has written the tail to one copy of the superblock; this writes the other. For an empty log,
        // neither copy leads to a replay.
        let noted = writeback::persist_tail(shared, clean).await;
        drained.and(noted)
    }
}

/// Dispatches a request according to the mode.
fn submit(shared: &Rc<LogShared>, request: BlockRequest) -> LocalFuture<Result<BlockReply>> {
    let (mode, ending) = {
        let state = shared.state.borrow();
        (state.life.mode().clone(), state.life.is_ending())
    };
    match (mode, request) {
        _ if ending => Box::pin(ready(Err(closed()))),
        (Mode::Off(_), request) => shared.inner.submit(request),
        (Mode::Failed(error), _) => Box::pin(ready(Err(error))),
        (Mode::Acquiring, request) => {
            let shared = shared.clone();
            Box::pin(async move {
                acquire::wait(&shared).await?;
                submit(&shared, request).await
            })
        }
        (_, BlockRequest::Read(extent)) => match shared.check(extent) {
            Ok(()) => read::read(shared.clone(), extent),
            Err(error) => Box::pin(ready(Err(error))),
        },
        (_, BlockRequest::Flush) => flush::flush(shared.clone()),
        (_, request) => change(shared.clone(), request),
    }
}

fn change(shared: Rc<LogShared>, request: BlockRequest) -> LocalFuture<Result<BlockReply>> {
    let extent = request.extent().unwrap_or(Extent::new(0, 0));
    if let Err(error) = shared.check(extent) {
        return Box::pin(ready(Err(error)));
    }
    if shared.inner.geometry().read_only {
        return Box::pin(ready(Err(Error::new(ErrorKind::ReadOnly, "a write to a read-only volume"))));
    }
    if extent.len == 0 {
        return Box::pin(ready(Ok(BlockReply::Done)));
    }
    let (sender, receiver) = oneshot::channel();
    let answer = ChangeCompletion { sender, arrived: shared.state.borrow().queue.generation() };
    match try_at_once(&shared, request, extent, answer) {
        Ok(()) => {}
        // The task continues if the caller drops its future.
        Err((request, answer)) => drop(spawn(wait_and_begin(shared, request, extent, answer))),
    }
    Box::pin(async move { receiver.await.unwrap_or_else(|| Err(closed())) })
}

pub(crate) fn closed() -> Error {
    Error::new(ErrorKind::ShuttingDown, "the write log is closed")
}

/// Completion of a change.
pub(crate) struct ChangeCompletion {
    sender: oneshot::Sender<Result<BlockReply>>,
    /// Generation in which it was submitted.
    arrived: u64,
}

impl ChangeCompletion {
    pub(crate) fn send(self, result: Result<BlockReply>) {
        self.sender.send(result);
    }
}

/// Starts a change, unless it has to wait.
fn try_at_once(
    shared: &Rc<LogShared>,
    request: BlockRequest,
    extent: Extent,
    answer: ChangeCompletion,
) -> std::result::Result<(), (BlockRequest, ChangeCompletion)> {
    if matches!(request, BlockRequest::CompareAndWrite { .. }) || !throttle::admits_at_once(shared) {
        return Err((request, answer));
    }
    if !shared.state.borrow().life.is_on() {
        return Err((request, answer));
    }
    let Some(range) = shared.ranges.try_lock(extent) else { return Err((request, answer)) };
    begin(shared, request, range, answer);
    Ok(())
}

/// Waits until a change is admitted, then starts it.
async fn wait_and_begin(shared: Rc<LogShared>, request: BlockRequest, extent: Extent, answer: ChangeCompletion) {
    let mut range = None;
    loop {
        if let Err(error) = throttle::admit(&shared, extent.len).await {
            return answer.send(Err(error));
        }
        let over = || {
            // Other writes may have filled the log while this one waited for its range. Checked before its own bytes
            // count.
            if throttle::readmits(&shared) {
                return true;
            }
            let state = shared.state.borrow();
            if state.life.is_ending() || state.life.is_disabling() {
                return state.life.is_ending();
            }
            if state.life.is_on() {
                range = shared.ranges.try_lock(extent);
            }
            range.is_some() || !state.life.is_on()
        };
        shared.settled.wait_until(over).await;
        if shared.state.borrow().life.is_ending() && range.is_none() {
            return answer.send(Err(closed()));
        }
        if range.is_some() || !shared.state.borrow().life.is_on() {
            break;
        }
    }
    if let Some(range) = range {
        if let Err(error) = shared.check(extent) {
            // The volume began to shrink in the meantime.
            drop(range);
            return answer.send(Err(error));
        }
        return match request {
            BlockRequest::CompareAndWrite { offset, expect, data, fua } => {
                compare(shared, range, (offset, expect, data, fua), answer).await;
            }
            request => begin(&shared, request, range, answer),
        };
    }
    let mode = shared.state.borrow().life.mode().clone();
    debug_assert!(!mode.is_on(), "a write without a locked range");
    match mode {
        Mode::Failed(error) => answer.send(Err(error)),
        _ => answer.send(shared.inner.submit(request).await),
    }
}

/// Starts a change whose range is locked: in the log, or bypassing it.
fn begin(shared: &Rc<LogShared>, request: BlockRequest, range: WriteRange, answer: ChangeCompletion) {
    if bypass::may_bypass(shared, &request, range.extent()) {
        // Counted from here, not from the task's first poll: a consistency point must not miss it.
        shared.state.borrow_mut().bypassed.begin();
        drop(spawn(bypass::write(shared.clone(), request, range, answer)));
        return;
    }
    log(shared, request, range, answer);
}

/// Queues a change whose range is locked.
pub(crate) fn log(shared: &Rc<LogShared>, request: BlockRequest, range: WriteRange, answer: ChangeCompletion) {
    let extent = range.extent();
    let fua = matches!(
        request,
        BlockRequest::Write { fua: true, .. }
            | BlockRequest::WriteZeroes { fua: true, .. }
            | BlockRequest::CompareAndWrite { fua: true, .. }
    );
    let pieces = split(&request, extent);
    let write_back_ack = shared.is_write_back_ack();
    let mut state = shared.state.borrow_mut();
    state.bypassed.wrote(extent);
    if !write_back_ack {
        let pending = Rc::new(PendingWrite::new(request, Some(range), answer.arrived, pieces.len(), answer.sender));
        state.enqueue(pieces, &pending, false);
        drop(state);
        shared.append.notify_all();
        return;
    }
    let (unheard, _) = oneshot::channel();
    let pending = Rc::new(PendingWrite::new(request, None, answer.arrived, pieces.len(), unheard));
    state.enqueue(pieces, &pending, true);
    drop(state);
    shared.append.notify_all();
    drop(range);
    if fua {
        let shared = shared.clone();
        drop(spawn(async move { answer.send(flush::sync_acknowledged(&shared).await.map(|()| BlockReply::Done)) }));
    } else {
        answer.send(Ok(BlockReply::Done));
    }
}

/// Compares and writes, with the range locked against other changes.
async fn compare(
    shared: Rc<LogShared>,
    range: WriteRange,
    (offset, expect, data, fua): (u64, BufList, BufList, bool),
    answer: ChangeCompletion,
) {
    let extent = range.extent();
    let found = read::read(shared.clone(), extent).await.map(BlockReply::into_data);
    if !shared.state.borrow().life.is_on() {
        // The log is being disabled: start again in the new mode.
        drop(range);
        let request = BlockRequest::CompareAndWrite { offset, expect, data, fua };
        drop(spawn(wait_and_begin(shared, request, extent, answer)));
        return;
    }
    let refused = match found {
        Err(error) => error,
        Ok(found) if expect.len() as u64 != extent.len || found.len() != expect.len() => {
            Error::new(ErrorKind::Invalid, "compare-and-write: the lengths of data and comparison differ")
        }
        Ok(found) => match found.first_difference(&expect) {
            Some(at) => Error::new(ErrorKind::Mismatch(at), "compare-and-write"),
            None => return begin(&shared, BlockRequest::Write { offset, data, fua }, range, answer),
        },
    };
    drop(range);
    answer.send(Err(refused));
}

/// Splits a change into pieces of one entry each, at multiples of the maximum length.
fn split(request: &BlockRequest, extent: Extent) -> Vec<(EntryKind, Extent, BufList)> {
    let (kind, longest, payload) = match request {
        BlockRequest::Write { data, .. } => match pattern_of(data) {
            Pattern::Mixed => (EntryKind::Write, u64::from(PAYLOAD_MAX), data.clone()),
            Pattern::Zeroes => (EntryKind::ZeroesKeep, RUN_MAX, BufList::new()),
            Pattern::Same(_) => (EntryKind::Same, RUN_MAX, data.slice(0..SAME_LEN as usize)),
        },
        BlockRequest::WriteZeroes { no_unmap: true, .. } => (EntryKind::ZeroesKeep, RUN_MAX, BufList::new()),
        BlockRequest::WriteZeroes { .. } => (EntryKind::Zeroes, RUN_MAX, BufList::new()),
        _ => (EntryKind::Discard, RUN_MAX, BufList::new()),
    };
    let mut pieces = Vec::with_capacity(1);
    let mut at = extent.offset;
    while at < extent.end() {
        let end = (at - at % longest + longest).min(extent.end());
        let part = Extent::new(at, end - at);
        let bytes = match kind {
            EntryKind::Write if part.len < extent.len => {
                payload.slice((at - extent.offset) as usize..(end - extent.offset) as usize)
            }
            // Each piece begins with the start of its payload, so the pattern is rotated unless the piece begins at a
            // whole pattern.
            EntryKind::Same if !(at - extent.offset).is_multiple_of(u64::from(SAME_LEN)) => {
                let skip = ((at - extent.offset) % u64::from(SAME_LEN)) as usize;
                let mut turned = payload.slice(skip..payload.len());
                turned.append(payload.slice(0..skip));
                turned
            }
            _ => payload.clone(),
        };
        pieces.push((kind, part, bytes));
        at = end;
    }
    pieces
}

impl BlockDevice for WriteLog {
    fn geometry(&self) -> Geometry {
        self.shared.inner.geometry()
    }

    fn submit(&self, request: BlockRequest) -> LocalFuture<Result<BlockReply>> {
        submit(&self.shared, request)
    }

    fn map(&self, extent: Extent) -> LocalFuture<Result<ExtentMap>> {
        let shared = self.shared.clone();
        Box::pin(async move {
            acquire::wait(&shared).await?;
            if let Some(permitted) = shared.owner.permit_read() {
                permitted.await?;
            }
            let hits: Vec<(Extent, ExtentState)> = {
                let state = shared.state.borrow();
                let known = |(part, seq): (Extent, u64)| {
                    let entry = state.dirty.get(seq)?;
                    let known = match entry.kind() {
                        EntryKind::Write | EntryKind::Same => ExtentState::Data,
                        EntryKind::ZeroesKeep => ExtentState::Zero,
                        EntryKind::Zeroes | EntryKind::Discard => ExtentState::Hole,
                    };
                    Some((part, known))
                };
                state.dirty.overlaps(extent).filter_map(known).collect()
            };
            let below = shared.inner.map(extent).await?;
            Ok(read::overlay(&below, &hits))
        })
    }

    fn size_watch(&self) -> Option<Rc<SizeWatch>> {
        self.shared.inner.size_watch()
    }
}
