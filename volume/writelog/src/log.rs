//! The log as a block device: how a request finds its way.

use std::cell::{Cell, RefCell};
use std::future::ready;
use std::rc::Rc;
use std::time::Duration;

use forebay_block::{
    BlockDevice, BufList, Error, ErrorKind, Extent, ExtentMap, ExtentState, Geometry, LocalFuture, Reply, Request,
    Result, SizeWatch,
};
use forebay_reactor::sync::{Notify, Semaphore, oneshot};
use forebay_reactor::{now, sleep, spawn, timeout};

use crate::entries::{Kind, SAME_LEN};
use crate::expand::{Pattern, pattern_of};
use crate::format::{MediumKind, PAYLOAD_MAX, RUN_MAX};
use crate::media::Medium;
use crate::options::{Limits, Options, Owner, Persist};
use crate::pressure::FREE_BELOW;
use crate::shelf::{Held, OpenLog};
use crate::state::{LogStats, Mode, State};
use crate::ticket::Ticket;
use crate::{acquire, append, direct, flush, read, writeback};

/// Between looks at a full log.
const FILL_LOOK: Duration = Duration::from_millis(5);

/// Payload bytes that wait for the medium at most.
pub(crate) const QUEUE_MAX: u64 = 8 << 20;

pub(crate) struct Shared {
    pub(crate) inner: Rc<dyn BlockDevice>,
    pub(crate) medium: Rc<dyn Medium>,
    pub(crate) kind: MediumKind,
    pub(crate) owner: Rc<dyn Owner>,
    pub(crate) options: Options,
    pub(crate) limits: Cell<Limits>,
    pub(crate) state: RefCell<State>,
    /// Something is queued, or the log is to stop.
    pub(crate) append: Notify,
    /// There may be something to write back.
    pub(crate) write_back: Notify,
    /// There may be room on the medium.
    pub(crate) room: Rc<Notify>,
    /// A change has ended, something was published or retired, or the mode has changed.
    pub(crate) settled: Notify,
    /// Writes that are held back come in one after the other.
    admission: Semaphore,
    /// Dropped with the log's place: whoever waits for that holds the other ends.
    waiting: RefCell<Vec<oneshot::Sender<()>>>,
    _held: Held,
}

impl Shared {
    /// Writes are answered before they last.
    pub(crate) fn is_early(&self) -> bool {
        self.options.persist == Persist::OnFlush && self.kind == MediumKind::Ssd
    }

    pub(crate) fn dirty_max(&self) -> u64 {
        self.limits.get().bytes_max.unwrap_or(u64::MAX)
    }

    pub(crate) fn fill(&self) -> f64 {
        self.state.borrow().fill(&*self.medium, self.dirty_max(), QUEUE_MAX)
    }

    fn check(&self, extent: Extent) -> Result<()> {
        let state = self.state.borrow();
        let size = state.size_limits.iter().fold(self.inner.geometry().size, |least, &limit| least.min(limit));
        if extent.checked_end().is_none_or(|end| end > size) {
            let text = format!("{} bytes at {} of a volume of {size}", extent.len, extent.offset);
            return Err(Error::new(ErrorKind::OutOfRange, text));
        }
        Ok(())
    }
}

/// A volume behind a write log.
pub struct WriteLog {
    pub(crate) shared: Rc<Shared>,
}

impl Drop for WriteLog {
    fn drop(&mut self) {
        {
            let mut state = self.shared.state.borrow_mut();
            (state.ending, state.closing) = (true, true);
        }
        self.shared.append.notify_all();
        self.shared.write_back.notify_all();
        self.shared.room.notify_all();
        self.shared.settled.notify_all();
    }
}

impl WriteLog {
    /// Puts an opened log in front of its volume.  What is in it is readable at once, and written back as time goes.
    ///
    /// # Panics
    /// When no reactor runs on this thread.
    pub fn new(inner: Rc<dyn BlockDevice>, log: OpenLog, owner: Rc<dyn Owner>, options: Options) -> Rc<Self> {
        let OpenLog { medium, found, kind, room, held } = log;
        let mut state = State::new(found.tail_seq, &found.entries);
        let acquiring = owner.acquire();
        if acquiring.is_some() {
            state.mode = Mode::Acquiring;
        }
        let shared = Rc::new(Shared {
            inner,
            medium,
            kind,
            owner,
            limits: Cell::new(options.limits),
            options,
            state: RefCell::new(state),
            append: Notify::new(),
            write_back: Notify::new(),
            room,
            settled: Notify::new(),
            admission: Semaphore::new(1),
            waiting: RefCell::default(),
            _held: held,
        });
        drop(spawn(append::run(shared.clone())));
        drop(spawn(writeback::run(shared.clone())));
        if let Some(first) = acquiring {
            drop(spawn(acquire::run(shared.clone(), first)));
        }
        Rc::new(Self { shared })
    }

    /// How it stands.
    pub fn mode(&self) -> Mode {
        self.shared.state.borrow().mode.clone()
    }

    /// How much the backend may lack.
    pub fn limits(&self) -> Limits {
        self.shared.limits.get()
    }

    /// From now on the backend may lack so much.
    pub fn set_limits(&self, limits: Limits) {
        self.shared.limits.set(limits);
        self.shared.write_back.notify_all();
        self.shared.settled.notify_all();
    }

    /// What it is on.
    pub fn medium(&self) -> MediumKind {
        self.shared.kind
    }

    /// Why writing back does not get on.
    pub fn backend_error(&self) -> Option<Error> {
        self.shared.state.borrow().backend_error.clone()
    }

    /// What it counts, without how it stands.
    pub fn counters(&self) -> LogStats {
        self.shared.state.borrow().stats
    }

    /// What it counts, and how it stands.
    pub fn stats(&self) -> LogStats {
        let state = self.shared.state.borrow();
        LogStats {
            capacity: self.shared.medium.capacity(),
            used: self.shared.medium.used(),
            dirty_bytes: state.dirty_bytes,
            dirty_entries: state.entries.len(),
            dirty_age: state.age(),
            index_memory: (state.index.memory() + state.entries.memory()) as u64,
            ..state.stats
        }
    }

    /// Waits until this process is known to be the volume's only writer, or an attempt at that has failed.
    ///
    /// # Errors
    /// Why the last attempt failed; it is made again unless the log has failed.
    pub async fn acquired(&self) -> Result<()> {
        let shared = &self.shared;
        let over = || {
            let state = shared.state.borrow();
            !matches!(state.mode, Mode::Acquiring) || state.backend_error.is_some() || state.ending
        };
        shared.settled.wait_until(over).await;
        let state = shared.state.borrow();
        match &state.mode {
            Mode::Failed(error) => Err(error.clone()),
            Mode::Acquiring => Err(state.backend_error.clone().unwrap_or_else(closed)),
            _ => Ok(()),
        }
    }

    /// Disables the log for good: writes everything back, has the owner record that it must never be replayed, and lets
    /// requests through to the backend from then on.  Requests wait meanwhile; none fails.  `reason` is for people.
    ///
    /// # Errors
    /// When the log has failed, or is closed.
    pub async fn disable(&self, reason: Error) -> Result<()> {
        let shared = &self.shared;
        shared.settled.wait_until(|| !matches!(shared.state.borrow().mode, Mode::Acquiring)).await;
        if shared.state.borrow().mode.is_on() {
            append::disable(shared, reason);
        }
        let over = || {
            let state = shared.state.borrow();
            state.closing || matches!(state.mode, Mode::Off(_) | Mode::Failed(_))
        };
        shared.settled.wait_until(over).await;
        match &shared.state.borrow().mode {
            Mode::Off(_) => Ok(()),
            Mode::Failed(error) => Err(error.clone()),
            _ => Err(closed()),
        }
    }

    /// Returns a number that changes whenever entries were written back.
    pub fn progress(&self) -> u64 {
        self.shared.state.borrow().entries.tail()
    }

    /// Takes no more requests, ever; those that have begun go on.
    pub fn is_ending(&self) -> bool {
        self.shared.state.borrow().ending
    }

    /// Returns how many bytes were answered, at most, that neither the medium nor the backend is known to keep: they are lost
    /// if the process ends now.
    pub fn unkept_bytes(&self) -> u64 {
        if !self.shared.is_early() {
            return 0;
        }
        let state = self.shared.state.borrow();
        let first = state.synced_seq.max(state.entries.tail());
        (first..state.entries.head()).filter_map(|seq| state.entries.get(seq)).map(|entry| entry.extent().len).sum()
    }

    /// Takes no more requests, and makes what was answered last on the medium, without waiting for the backend where the
    /// medium has room.  To be followed by [`close`](Self::close).
    pub async fn stop(&self) {
        let shared = &self.shared;
        shared.state.borrow_mut().ending = true;
        shared.settled.notify_all();
        shared.write_back.notify_all();
        flush::make_last_on_medium(shared).await;
    }

    /// Waits until nothing of a closed log is under way any more, so that its place can be given to others.
    pub async fn gone(self: Rc<Self>) {
        let (last, gone) = oneshot::channel::<()>();
        self.shared.waiting.borrow_mut().push(last);
        drop(self);
        // Resolves when the last task has dropped what it shares.
        gone.await;
    }

    /// Takes no more requests, and ends.  Those that had begun are acknowledged first; those that were held back fail.
    /// `flush`: the backend holds everything when this returns.
    ///
    /// # Errors
    /// When not everything could be written back, or the medium failed.  The log is closed all the same.
    pub async fn close(&self, flush: bool) -> Result<()> {
        let shared = &self.shared;
        // A backend that does not answer keeps nothing from the medium.
        self.stop().await;
        if !flush && matches!(shared.state.borrow().mode, Mode::Acquiring) {
            // Nothing was acknowledged, and nothing on the medium may be changed by who is not the owner.
            shared.state.borrow_mut().closing = true;
            shared.append.notify_all();
            shared.write_back.notify_all();
            return Ok(());
        }
        let over = || {
            let state = shared.state.borrow();
            let quiet = state.in_flight.is_empty() && state.queue.is_empty() && state.appending.is_empty();
            quiet && !matches!(state.mode, Mode::Acquiring) || matches!(state.mode, Mode::Failed(_))
        };
        shared.settled.wait_until(over).await;
        let lasts = flush::make_last(shared).await;
        let drained = if flush { self.drain().await } else { lasts };
        let clean = {
            let mut state = shared.state.borrow_mut();
            state.closing = true;
            state.entries.len() == 0
        };
        shared.append.notify_all();
        shared.write_back.notify_all();
        shared.settled.notify_all();
        let (failed, off) = {
            let state = shared.state.borrow();
            (matches!(state.mode, Mode::Failed(_)), !state.mode.is_on())
        };
        if failed || off {
            return drained;
        }
        // After write-back has written the tail to one copy of the superblock this writes the other: of an empty log
        // neither leads back.
        let noted = writeback::persist_tail(shared, clean).await;
        drained.and(noted)
    }
}

/// Sends a request where it belongs.
fn submit(shared: &Rc<Shared>, request: Request) -> LocalFuture<Result<Reply>> {
    let (mode, ending) = {
        let state = shared.state.borrow();
        (state.mode.clone(), state.ending)
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
        (_, Request::Read(extent)) => match shared.check(extent) {
            Ok(()) => read::read(shared.clone(), extent),
            Err(error) => Box::pin(ready(Err(error))),
        },
        (_, Request::Flush) => flush::flush(shared.clone()),
        (_, request) => change(shared.clone(), request),
    }
}

fn change(shared: Rc<Shared>, request: Request) -> LocalFuture<Result<Reply>> {
    let extent = request.extent().unwrap_or(Extent::new(0, 0));
    if let Err(error) = shared.check(extent) {
        return Box::pin(ready(Err(error)));
    }
    if shared.inner.geometry().read_only {
        return Box::pin(ready(Err(Error::new(ErrorKind::ReadOnly, "a write to a read-only volume"))));
    }
    if extent.len == 0 {
        return Box::pin(ready(Ok(Reply::Done)));
    }
    let (sender, receiver) = oneshot::channel();
    let answer = Answer { sender, arrived: shared.state.borrow().generation };
    match try_at_once(&shared, request, extent, answer) {
        Ok(()) => {}
        // It goes on though its future may be dropped.
        Err((request, answer)) => drop(spawn(wait_and_begin(shared, request, extent, answer))),
    }
    Box::pin(async move { receiver.await.unwrap_or_else(|| Err(closed())) })
}

pub(crate) fn closed() -> Error {
    Error::new(ErrorKind::ShuttingDown, "the write log is closed")
}

/// Who waits for a change.
pub(crate) struct Answer {
    sender: oneshot::Sender<Result<Reply>>,
    /// The generation in which it was submitted.
    arrived: u64,
}

impl Answer {
    pub(crate) fn send(self, result: Result<Reply>) {
        self.sender.send(result);
    }
}

/// Begins a change if nothing makes it wait.
fn try_at_once(
    shared: &Rc<Shared>,
    request: Request,
    extent: Extent,
    answer: Answer,
) -> std::result::Result<(), (Request, Answer)> {
    if matches!(request, Request::CompareAndWrite { .. }) || shared.admission.available() == 0 {
        return Err((request, answer));
    }
    let fill = shared.fill();
    let mut state = shared.state.borrow_mut();
    if !state.mode.is_on() || state.starved && fill >= 1.0 {
        return Err((request, answer));
    }
    // The wait is worked out where it is waited.
    if fill > FREE_BELOW || !state.enter(extent) {
        return Err((request, answer));
    }
    drop(state);
    begin(shared, request, extent, answer);
    Ok(())
}

/// Waits for what stands in a change's way, then begins it.
async fn wait_and_begin(shared: Rc<Shared>, request: Request, extent: Extent, answer: Answer) {
    loop {
        if let Err(error) = hold_back(&shared, extent).await {
            return answer.send(Err(error));
        }
        // Others may have filled the log while it waited for its run.  Looked at before its own bytes count.
        let full = || shared.is_early() && shared.fill() >= 1.0 && shared.state.borrow().mode.is_on();
        let entered = Cell::new(false);
        let over = || {
            if full() {
                return true;
            }
            let mut state = shared.state.borrow_mut();
            if state.ending || matches!(state.mode, Mode::TurningOff(_)) {
                return state.ending;
            }
            entered.set(state.mode.is_on() && state.enter(extent));
            entered.get() || !state.mode.is_on()
        };
        shared.settled.wait_until(over).await;
        if shared.state.borrow().ending && !entered.get() {
            return answer.send(Err(closed()));
        }
        if entered.get() || !shared.state.borrow().mode.is_on() {
            break;
        }
    }
    let mode = shared.state.borrow().mode.clone();
    if matches!(mode, Mode::On)
        && let Err(error) = shared.check(extent)
    {
        // The volume has begun to shrink while it waited.
        shared.state.borrow_mut().leave(extent);
        shared.settled.notify_all();
        return answer.send(Err(error));
    }
    match mode {
        Mode::On => match request {
            Request::CompareAndWrite { offset, expect, data, fua } => {
                compare(shared, extent, (offset, expect, data, fua), answer).await;
            }
            request => begin(&shared, request, extent, answer),
        },
        Mode::Failed(error) => answer.send(Err(error)),
        Mode::Acquiring | Mode::Off(_) | Mode::TurningOff(_) => answer.send(shared.inner.submit(request).await),
    }
}

/// Waits as long as the fill of the log asks for.
///
/// # Errors
/// [`ErrorKind::NoSpace`] when log and backend are full and the write would be acknowledged before it is on either.
async fn hold_back(shared: &Rc<Shared>, extent: Extent) -> Result<()> {
    if shared.fill() <= FREE_BELOW && shared.admission.available() > 0 {
        return Ok(());
    }
    let started = now();
    let turn = shared.admission.acquire(1).await;
    let fill = shared.fill();
    let wait = shared.state.borrow_mut().pressure.wait(extent.len, fill, now());
    if !wait.is_zero() {
        shared.write_back.notify_all();
        sleep(wait).await;
    }
    // The limit of dirty bytes is one: only a log that fails, or a backend that is full, ends the wait.
    let within = || {
        let state = shared.state.borrow();
        let full = state.backend_error.as_ref().is_some_and(|error| error.kind() == ErrorKind::NoSpace);
        state.dirty_bytes + state.in_flight_bytes < shared.dirty_max() || full || state.ending || !state.mode.is_on()
    };
    if !within() {
        shared.write_back.notify_all();
        shared.settled.wait_until(within).await;
    }
    if fill >= 1.0 {
        // Whatever was measured: more than this must not wait for the medium in memory.
        shared.write_back.notify_all();
        while shared.fill() >= 1.0 {
            let full = {
                let state = shared.state.borrow();
                if state.ending || !state.mode.is_on() {
                    break;
                }
                state.backend_error.clone().filter(|error| error.kind() == ErrorKind::NoSpace)
            };
            match full {
                Some(error) if shared.is_early() => return Err(error),
                // The appender tells it.
                Some(_) => break,
                // Not every change of the fill is notified.
                None => drop(timeout(FILL_LOOK, shared.settled.wait()).await),
            }
        }
    }
    drop(turn);
    let stats = &mut shared.state.borrow_mut().stats;
    stats.throttled += 1;
    stats.throttled_ns += started.elapsed().as_nanos() as u64;
    Ok(())
}

/// Begins a change whose run is its own: in the log, or round it.
fn begin(shared: &Rc<Shared>, request: Request, extent: Extent, answer: Answer) {
    if direct::goes_round(shared, &request, extent) {
        // From here on, not from the task's first turn: a cut must not miss it.
        shared.state.borrow_mut().direct_active += 1;
        drop(spawn(direct::write(shared.clone(), request, extent, answer)));
        return;
    }
    log(shared, request, extent, answer);
}

/// Queues a change whose run is its own.
pub(crate) fn log(shared: &Rc<Shared>, request: Request, extent: Extent, answer: Answer) {
    let fua = matches!(
        request,
        Request::Write { fua: true, .. }
            | Request::WriteZeroes { fua: true, .. }
            | Request::CompareAndWrite { fua: true, .. }
    );
    let pieces = cut(&request, extent);
    let early = shared.is_early();
    let mut state = shared.state.borrow_mut();
    state.last_end = extent.end();
    if !early {
        let ticket = Rc::new(Ticket::new(request, extent, answer.arrived, pieces.len(), answer.sender));
        state.enqueue(pieces, &ticket, false);
        drop(state);
        shared.append.notify_all();
        return;
    }
    let (unheard, _) = oneshot::channel();
    let ticket = Rc::new(Ticket::new(request, extent, answer.arrived, pieces.len(), unheard));
    state.enqueue(pieces, &ticket, true);
    state.leave(extent);
    drop(state);
    shared.append.notify_all();
    shared.settled.notify_all();
    if fua {
        let shared = shared.clone();
        drop(spawn(async move { answer.send(flush::make_last(&shared).await.map(|()| Reply::Done)) }));
    } else {
        answer.send(Ok(Reply::Done));
    }
}

/// Compares and writes, while nothing else changes the run.
async fn compare(
    shared: Rc<Shared>,
    extent: Extent,
    (offset, expect, data, fua): (u64, BufList, BufList, bool),
    answer: Answer,
) {
    let found = read::read(shared.clone(), extent).await.map(Reply::into_data);
    let refuse = |error: Error| {
        shared.state.borrow_mut().leave(extent);
        shared.settled.notify_all();
        error
    };
    if !shared.state.borrow().mode.is_on() {
        // The log has turned off meanwhile: from the beginning, with whoever does it now.
        shared.state.borrow_mut().leave(extent);
        shared.settled.notify_all();
        let request = Request::CompareAndWrite { offset, expect, data, fua };
        drop(spawn(wait_and_begin(shared, request, extent, answer)));
        return;
    }
    match found {
        Err(error) => answer.send(Err(refuse(error))),
        Ok(found) if expect.len() as u64 != extent.len || found.len() != expect.len() => {
            answer.send(Err(refuse(Error::new(ErrorKind::Invalid, "a comparison of two lengths"))));
        }
        Ok(found) => match first_difference(&found, &expect) {
            Some(at) => answer.send(Err(refuse(Error::new(ErrorKind::Mismatch(at), "compare-and-write")))),
            None => begin(&shared, Request::Write { offset, data, fua }, extent, answer),
        },
    }
}

fn first_difference(found: &BufList, expect: &BufList) -> Option<u64> {
    let bytes = |list: &BufList| list.to_vec();
    let (found, expect) = (bytes(found), bytes(expect));
    found.iter().zip(&expect).position(|(one, other)| one != other).map(|at| at as u64)
}

/// Cuts a change into pieces of one entry each, at multiples of the longest payload.
fn cut(request: &Request, extent: Extent) -> Vec<(Kind, Extent, BufList)> {
    let (kind, longest, payload) = match request {
        Request::Write { data, .. } => match pattern_of(data) {
            Pattern::Mixed => (Kind::Write, u64::from(PAYLOAD_MAX), data.clone()),
            Pattern::Zeroes => (Kind::ZeroesKeep, RUN_MAX, BufList::new()),
            Pattern::Same(_) => (Kind::Same, RUN_MAX, data.slice(0..SAME_LEN as usize)),
        },
        Request::WriteZeroes { no_unmap: true, .. } => (Kind::ZeroesKeep, RUN_MAX, BufList::new()),
        Request::WriteZeroes { .. } => (Kind::Zeroes, RUN_MAX, BufList::new()),
        _ => (Kind::Discard, RUN_MAX, BufList::new()),
    };
    let mut pieces = Vec::with_capacity(1);
    let mut at = extent.offset;
    while at < extent.end() {
        let end = (at - at % longest + longest).min(extent.end());
        let part = Extent::new(at, end - at);
        let bytes = match kind {
            Kind::Write if part.len < extent.len => {
                payload.slice((at - extent.offset) as usize..(end - extent.offset) as usize)
            }
            // The pattern begins anew with each piece, and pieces begin at whole patterns of the first.
            Kind::Same if !(at - extent.offset).is_multiple_of(u64::from(SAME_LEN)) => {
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

    fn submit(&self, request: Request) -> LocalFuture<Result<Reply>> {
        submit(&self.shared, request)
    }

    fn map(&self, extent: Extent) -> LocalFuture<Result<ExtentMap>> {
        let shared = self.shared.clone();
        Box::pin(async move {
            acquire::wait(&shared).await?;
            let hits: Vec<(Extent, ExtentState)> = {
                let state = shared.state.borrow();
                let known = |segment: crate::index::Segment| {
                    let entry = state.entries.get(state.entries.seq_of(segment.entry))?;
                    let known = match entry.kind() {
                        Kind::Write | Kind::Same => ExtentState::Data,
                        Kind::ZeroesKeep => ExtentState::Zero,
                        Kind::Zeroes | Kind::Discard => ExtentState::Hole,
                    };
                    Some((Extent::new(segment.start, u64::from(segment.len)), known))
                };
                state.index.overlaps(extent).filter_map(known).collect()
            };
            let below = shared.inner.map(extent).await?;
            Ok(read::overlay(&below, &hits))
        })
    }

    fn size_watch(&self) -> Option<Rc<SizeWatch>> {
        self.shared.inner.size_watch()
    }
}
