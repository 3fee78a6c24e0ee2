//! Forwarder's side of one volume: a block device whose requests its owner executes.

use std::cell::{Cell, OnceCell, RefCell};
use std::future::poll_fn;
use std::pin::pin;
use std::rc::Rc;
use std::task::Poll;
use std::time::Duration;

use forebay_block::reservation::Reservations;
use forebay_block::{
    Advice, BlockDevice, BlockReply, BlockRequest, BufList, Error, ErrorKind, Extent, ExtentMap, Geometry,
    InFlightGuard, InFlightTracker, LocalFuture, Result, SizeWatch,
};
use forebay_reactor::sync::{Notify, join_all, oneshot};
use forebay_reactor::{now, sleep_until, spawn};

use crate::client::{ForwardClient, OwnerLocator};
use crate::reserve::ForwardedReservations;
use crate::route::{OwnerRoute, PreparedRequest, RouteError};
use crate::session::{AttemptEnd, ForwarderLimits, ForwarderState, Resolution, SessionFailure};
use crate::wire::{
    ForwardAnswer, ForwardEvent, ForwardRefusal, ForwarderStart, NumberedTable, TRANSFER_MAX, VolumeRequest,
};

/// Parts of a long read or write begin at multiples of this, so that no block is written in two parts.
const PART_ALIGN: u64 = 4096;

/// Request of a host, until it is over.
pub(crate) struct HostRequest {
    request: VolumeRequest,
    answer: oneshot::Sender<Result<ForwardAnswer>>,
    /// In flight for those who drain the volume.
    _in_flight: InFlightGuard,
}

/// Forwarder of a volume: its state, and the task that keeps a session open.
pub(crate) struct VolumeForwarder {
    pub(crate) client: Rc<ForwardClient>,
    volume: String,
    locator: Rc<dyn OwnerLocator>,
    limits: ForwarderLimits,
    pub(crate) state: RefCell<ForwarderState<HostRequest>>,
    /// Routes to owners are numbered, so that the state machine can tell one from the next.
    owner: RefCell<Option<(u64, OwnerRoute)>>,
    /// Route of the session that is open or being opened.
    pub(crate) route: RefCell<Option<OwnerRoute>>,
    /// Longest lease of any session.
    pub(crate) lease: Cell<Duration>,
    geometry: Cell<Option<Geometry>>,
    /// Newest event about the size, with its session: it may be seen before the session is.
    size_event: Cell<Option<(u64, Geometry)>>,
    /// Reservations, known since the first session; `None` if the volume has none.
    pub(crate) reserved: OnceCell<Option<ForwardedReservations>>,
    /// Newest event about the reservations before its session is open, with the session.
    table_event: RefCell<Option<(u64, NumberedTable)>>,
    /// Number of tables that are being adopted.
    pub(crate) adopting: Cell<usize>,
    watch: Rc<SizeWatch>,
    in_flight: InFlightTracker,
    /// Reason why there is no session.
    trouble: RefCell<String>,
    pub(crate) closing: Cell<bool>,
    over: Cell<bool>,
    /// Signaled when the task has something to do, or has done it.
    pub(crate) changed: Notify,
}

impl VolumeForwarder {
    pub(crate) fn begin(
        client: Rc<ForwardClient>,
        volume: &str,
        locator: Rc<dyn OwnerLocator>,
        limits: ForwarderLimits,
    ) -> Rc<Self> {
        let forwarder = Rc::new(Self {
            client,
            volume: volume.to_owned(),
            locator,
            limits,
            state: RefCell::new(ForwarderState::new(limits, now())),
            owner: RefCell::default(),
            route: RefCell::default(),
            lease: Cell::default(),
            geometry: Cell::default(),
            size_event: Cell::default(),
            reserved: OnceCell::new(),
            table_event: RefCell::default(),
            adopting: Cell::new(0),
            watch: Rc::default(),
            in_flight: InFlightTracker::default(),
            trouble: RefCell::new("no owner is known".into()),
            closing: Cell::new(false),
            over: Cell::new(false),
            changed: Notify::new(),
        });
        drop(spawn(forwarder.clone().run()));
        forwarder
    }

    /// Keeps a session open until the volume is closed and nothing is in flight.
    async fn run(self: Rc<Self>) {
        loop {
            // Both count from here on, so that no change is missed.
            let moved = self.locator.changed();
            let notified = self.changed.wait();
            if self.step() {
                break;
            }
            let deadline = self.state.borrow().deadline();
            first_of(moved, notified, deadline).await;
        }
        self.over.set(true);
        self.changed.notify_all();
    }

    /// Does what is due; returns whether the volume is closed.
    fn step(self: &Rc<Self>) -> bool {
        let time = now();
        self.follow_owner();
        self.note_renewals();
        let expired = self.state.borrow_mut().expired(time);
        self.resolve(expired);
        if self.state.borrow().is_dead() {
            let all = self.state.borrow_mut().take_all();
            all.into_iter().for_each(|request| request.answer.send(Err(self.dead())));
        }
        if self.closing.get() && self.state.borrow().is_idle() {
            self.close_session();
            return true;
        }
        let asked = self.state.borrow().owner_to_ask(time);
        let owner = self.owner.borrow().clone();
        if let (Some(asked), Some((number, route))) = (asked, owner) {
            debug_assert_eq!(asked, number);
            let session = self.client.next_session();
            self.state.borrow_mut().begin_open(session);
            *self.route.borrow_mut() = Some(route.clone());
            drop(spawn(self.clone().ask_for_session(route, session)));
        }
        self.send_waiting();
        false
    }

    fn follow_owner(&self) {
        let found = self.locator.owner();
        let mut state = self.state.borrow_mut();
        let Some(found) = found else {
            // A session that is open goes on: the group may not know its state at the moment.
            state.set_owner(None, None, now());
            return;
        };
        let mut owner = self.owner.borrow_mut();
        let number = match &*owner {
            Some((number, route)) if *route == found.route => *number,
            before => before.as_ref().map_or(0, |(number, _)| number + 1),
        };
        if state.set_owner(Some(number), found.term, now()) {
            *owner = Some((number, found.route));
        }
    }

    async fn ask_for_session(self: Rc<Self>, route: OwnerRoute, session: u64) {
        let mut failure = SessionFailure::Retry;
        let why = match route.open(&self.client, &self.volume, session).await.map_err(RouteError::into_text) {
            Ok(ForwardAnswer::Opened { term, geometry, reservations, lease }) => {
                self.lease_begins(&route, lease);
                match self.session_opened(session, term, geometry, reservations).await {
                    Ok(true) => return self.changed.notify_all(),
                    // Opened too late, or by a former owner.
                    Ok(false) => {
                        route.close(&self.client, session).await;
                        return self.changed.notify_all();
                    }
                    Err(why) => {
                        route.close(&self.client, session).await;
                        why
                    }
                }
            }
            Ok(ForwardAnswer::Refused(refusal)) => {
                match &refusal {
                    ForwardRefusal::StartEnded => failure = SessionFailure::Final,
                    ForwardRefusal::NotOwner { hint } if !hint.is_empty() => self.locator.hint(hint),
                    _ => {}
                }
                refusal.to_string()
            }
            Ok(_) => "unexpected answer to a request to open a session".into(),
            Err(why) => why,
        };
        tracing::debug!(volume = self.volume, ?route, why, "no session with the owner of a volume");
        *self.trouble.borrow_mut() = why;
        self.state.borrow_mut().open_failed(session, failure, now());
        self.changed.notify_all();
    }

    /// Adopts the reservations of a session that the owner has opened, and notes that it is open; returns whether it is of use.
    async fn session_opened(
        self: &Rc<Self>,
        session: u64,
        term: u64,
        geometry: Geometry,
        reservations: Option<NumberedTable>,
    ) -> std::result::Result<bool, String> {
        // Tables of a former owner are not adopted.
        let is_awaited = self.state.borrow().is_awaited(session, term);
        let table = if is_awaited { self.adopt_opened(session, reservations.as_ref()).await? } else { 0 };
        let opened = self.state.borrow_mut().opened(session, term, table, now());
        let Some(over) = opened else { return Ok(false) };
        self.client.keep_leases();
        self.resolve(over);
        // Events of this session are newer than the answer.
        let newer = self.size_event.get().filter(|(of, _)| *of == session);
        self.set_geometry(newer.map_or(geometry, |(_, geometry)| geometry));
        if let Some((_, table)) = self.table_event.take().filter(|(of, _)| *of == session) {
            self.table_changed(session, &table);
        }
        Ok(true)
    }

    fn set_geometry(&self, geometry: Geometry) {
        let geometry = Geometry { transfer_max: geometry.transfer_max.min(TRANSFER_MAX), ..geometry };
        let before = self.geometry.replace(Some(geometry));
        if before.is_some_and(|before| before.size != geometry.size) {
            self.watch.announce();
        }
    }

    /// Sends what waits, as far as the bounds allow.
    fn send_waiting(self: &Rc<Self>) {
        let Some(route) = self.route.borrow().clone() else { return };
        let mut state = self.state.borrow_mut();
        while let Some(next) = state.next_to_send() {
            let prepared = route.prepare(next.session, &next.request.request);
            drop(spawn(self.clone().attempt(route.clone(), next.session, next.id, prepared)));
        }
    }

    /// Sends a request in a session, and handles its answer.
    async fn attempt(self: Rc<Self>, route: OwnerRoute, session: u64, id: u64, prepared: PreparedRequest) {
        let (end, result) = match route.execute(&self.client, session, prepared).await {
            Err(RouteError::Lost(why)) => {
                *self.trouble.borrow_mut() = why.clone();
                (AttemptEnd::Lost, Err(self.failed(why)))
            }
            Err(RouteError::Failed(why)) => (AttemptEnd::Answered, Err(self.failed(why))),
            Ok(ForwardAnswer::Refused(refusal)) => {
                *self.trouble.borrow_mut() = refusal.to_string();
                (AttemptEnd::NotExecuted, Err(self.failed(refusal)))
            }
            Ok(ForwardAnswer::Failed(error)) if matches!(error.kind(), ErrorKind::Fenced | ErrorKind::ShuttingDown) => {
                *self.trouble.borrow_mut() = format!("the owner has stopped: {error}");
                (AttemptEnd::OwnerStopped, Err(error))
            }
            Ok(ForwardAnswer::Failed(error)) => (AttemptEnd::Answered, Err(error)),
            Ok(answer) => (AttemptEnd::Answered, Ok(answer)),
        };
        let over = self.state.borrow_mut().answered(session, id, end, now());
        match (over, end) {
            (Some(request), AttemptEnd::Answered) => request.answer.send(result),
            (Some(request), _) => self.resolve(vec![Resolution::OutcomeUnknown(request)]),
            (None, _) => {}
        }
        if self.adopting.get() > 0 {
            self.changed.notify_all();
        }
        match end {
            AttemptEnd::Answered if !self.closing.get() && self.state.borrow().is_open() => self.send_waiting(),
            _ => self.changed.notify_all(),
        }
    }

    pub(crate) fn resolve(&self, over: Vec<Resolution<HostRequest>>) {
        for one in over {
            match one {
                Resolution::TimedOut(request) => {
                    let (volume, patience, why) = (&self.volume, self.limits.patience, self.trouble.borrow());
                    let text =
                        format!("volume {volume}: waiting {patience:?} for its owner to execute a request: {why}");
                    request.answer.send(Err(Error::new(ErrorKind::TimedOut, text)));
                }
                Resolution::OutcomeUnknown(request) => {
                    let text = "the session with the owner ended before the answer; the request may have been executed";
                    request.answer.send(Err(self.failed(text)));
                }
                Resolution::Outdated(request) => {
                    request.answer.send(Err(self.outdated()));
                }
                Resolution::GivenUp(request) => {
                    request.answer.send(Err(self.given_up()));
                }
            }
        }
    }

    pub(crate) fn volume(&self) -> &str {
        &self.volume
    }

    pub(crate) fn failed(&self, why: impl std::fmt::Display) -> Error {
        Error::new(ErrorKind::Io, format!("volume {}, forwarded to its owner: {why}", self.volume))
    }

    /// Returns the error of a request that a superseded table has admitted.  Hosts send it again, and the current table decides.
    fn outdated(&self) -> Error {
        let text = format!("volume {}: reservations have changed since this was allowed", self.volume);
        Error::new(ErrorKind::Busy, text)
    }

    fn dead(&self) -> Error {
        let why = ForwardRefusal::StartEnded;
        Error::new(ErrorKind::Fenced, format!("volume {}, forwarded to its owner: {why}", self.volume))
    }

    /// Handles an event of the owner.
    pub(crate) fn event(self: &Rc<Self>, event: &ForwardEvent) {
        if self.state.borrow().session() != Some(event.session()) {
            return;
        }
        match event {
            ForwardEvent::Size { session, geometry } => {
                self.size_event.set(Some((*session, *geometry)));
                if self.state.borrow().is_open() {
                    self.set_geometry(*geometry);
                }
            }
            ForwardEvent::Reservations { session, table } => {
                if self.state.borrow().is_open() {
                    return self.table_changed(*session, table);
                }
                let mut kept = self.table_event.borrow_mut();
                if kept.as_ref().is_none_or(|(of, kept)| of != session || kept.number < table.number) {
                    *kept = Some((*session, table.clone()));
                }
            }
            ForwardEvent::Ended { session, why } => {
                *self.trouble.borrow_mut() = why.to_string();
                self.state.borrow_mut().end(*session, now());
                self.changed.notify_all();
            }
        }
    }

    /// Returns whether the session is over this route.
    pub(crate) fn is_over(&self, route: &OwnerRoute) -> bool {
        self.route.borrow().as_ref() == Some(route)
    }

    pub(crate) fn connection_lost(&self) {
        let session = self.state.borrow().session();
        if let Some(session) = session {
            self.state.borrow_mut().end(session, now());
            self.changed.notify_all();
        }
    }

    fn close_session(&self) {
        let session = self.state.borrow().session();
        if let (Some(session), Some(route)) = (session, self.route.take()) {
            let client = self.client.clone();
            drop(spawn(async move { route.close(&client, session).await }));
        }
    }

    pub(crate) fn push(self: &Rc<Self>, request: VolumeRequest) -> LocalFuture<Result<ForwardAnswer>> {
        let (answer, answered) = oneshot::channel();
        let refused = if self.state.borrow().is_given_up() {
            Some(self.given_up())
        } else if self.closing.get() {
            Some(Error::new(ErrorKind::ShuttingDown, format!("volume {} is being closed", self.volume)))
        } else {
            self.state.borrow().is_dead().then(|| self.dead())
        };
        if let Some(error) = refused {
            return Box::pin(std::future::ready(Err(error)));
        }
        let (cost, class) = (request.cost(), request.class());
        let request = HostRequest { request, answer, _in_flight: self.in_flight.begin() };
        self.state.borrow_mut().push(request, cost, class, now());
        if self.state.borrow().is_open() {
            self.send_waiting()
        } else {
            self.changed.notify_all()
        }
        let volume = self.volume.clone();
        Box::pin(async move {
            let gone = || Err(Error::new(ErrorKind::ShuttingDown, format!("volume {volume} was closed")));
            answered.await.unwrap_or_else(gone)
        })
    }
}

/// Waits for the first of three events.
async fn first_of(
    mut moved: LocalFuture<()>,
    notified: impl Future<Output = ()>,
    deadline: Option<forebay_reactor::Instant>,
) {
    let mut notified = pin!(notified);
    let mut late = deadline.map(|deadline| Box::pin(sleep_until(deadline)));
    poll_fn(|cx| {
        let is_late = late.as_mut().is_some_and(|late| late.as_mut().poll(cx).is_ready());
        if is_late || moved.as_mut().poll(cx).is_ready() || notified.as_mut().poll(cx).is_ready() {
            return Poll::Ready(());
        }
        Poll::Pending
    })
    .await;
}

/// Volume that another daemon owns.
///
/// Requests wait while no owner executes them, for [`ForwarderLimits::patience`] at most; a request that an owner may still
/// execute waits until that is known.  Dropping the volume ends its session when nothing is in flight any more.
pub struct ForwardedVolume {
    forwarder: Rc<VolumeForwarder>,
}

impl ForwardedVolume {
    pub(crate) fn new(forwarder: Rc<VolumeForwarder>) -> Self {
        Self { forwarder }
    }

    /// Waits for the first session.
    pub(crate) async fn opened(&self) -> Result<()> {
        let forwarder = &self.forwarder;
        let settled = || forwarder.geometry.get().is_some() || forwarder.state.borrow().is_dead();
        let waited = forebay_reactor::timeout(forwarder.limits.patience, forwarder.changed.wait_until(settled)).await;
        if forwarder.state.borrow().is_dead() {
            return Err(forwarder.dead());
        }
        if waited.is_err() {
            let (volume, patience, why) = (&forwarder.volume, forwarder.limits.patience, forwarder.trouble.borrow());
            let text = format!("volume {volume}: waiting {patience:?} for its owner: {why}");
            return Err(Error::new(ErrorKind::TimedOut, text));
        }
        Ok(())
    }

    /// Waits until every request that was submitted before has been answered.
    pub async fn drain(&self) {
        self.forwarder.in_flight.drain().await;
    }

    /// Refuses further requests, waits until all are answered, and ends the session.
    pub async fn close(&self) {
        let forwarder = &self.forwarder;
        forwarder.closing.set(true);
        forwarder.changed.notify_all();
        forwarder.changed.wait_until(|| forwarder.over.get()).await;
    }

    /// Ends its requests, as hosts are to use other paths: with an error that makes them do so, as soon as none of them begins
    /// to be executed any more, which the owner says or the end of a lease.  Further requests fail at once.
    ///
    /// A request that was executed or may be, and that must not be executed twice, fails with an I/O error.
    pub fn give_up(&self) {
        self.forwarder.give_up();
    }

    /// Returns the id of the life of the daemon that forwards it.
    pub fn start(&self) -> &ForwarderStart {
        self.forwarder.client.start()
    }

    /// Returns whether a session is open.
    pub fn is_connected(&self) -> bool {
        self.forwarder.state.borrow().is_open()
    }

    fn submit_part(&self, request: BlockRequest, advice: Advice) -> LocalFuture<Result<BlockReply>> {
        let wanted = match &request {
            BlockRequest::Read(extent) => Some(extent.len as usize),
            _ => None,
        };
        let (answer, forwarder) = (self.forwarder.push(VolumeRequest::Submit(request, advice)), self.forwarder.clone());
        Box::pin(async move {
            match (answer.await?, wanted) {
                (ForwardAnswer::Data(data), Some(wanted)) if data.len() == wanted => Ok(BlockReply::Data(data)),
                (ForwardAnswer::Done, None) => Ok(BlockReply::Done),
                _ => Err(forwarder.failed("an answer that does not belong to the request")),
            }
        })
    }
}

/// Splits an extent into parts of at most [`TRANSFER_MAX`] bytes.
fn parts_of(extent: Extent) -> Vec<Extent> {
    let mut parts = Vec::new();
    let (mut at, end) = (extent.offset, extent.end());
    while at < end {
        let next = (at + u64::from(TRANSFER_MAX)) / PART_ALIGN * PART_ALIGN;
        let next = next.min(end);
        parts.push(Extent::new(at, next - at));
        at = next;
    }
    parts
}

impl BlockDevice for ForwardedVolume {
    fn geometry(&self) -> Geometry {
        self.forwarder.geometry.get().expect("a forwarded volume is returned when it is open")
    }

    fn submit(&self, request: BlockRequest) -> LocalFuture<Result<BlockReply>> {
        self.submit_advised(request, Advice::NONE)
    }

    fn submit_advised(&self, request: BlockRequest, advice: Advice) -> LocalFuture<Result<BlockReply>> {
        let invalid = |text: &str| -> LocalFuture<Result<BlockReply>> {
            let error = Error::new(ErrorKind::Invalid, format!("volume {}: {text}", self.forwarder.volume));
            Box::pin(std::future::ready(Err(error)))
        };
        let extent = match &request {
            BlockRequest::Write { offset, data, .. } | BlockRequest::CompareAndWrite { offset, data, .. } => {
                Some((*offset, data.len() as u64))
            }
            BlockRequest::Read(extent) | BlockRequest::Discard(extent) | BlockRequest::WriteZeroes { extent, .. } => {
                Some((extent.offset, extent.len))
            }
            BlockRequest::Flush => None,
        };
        if extent.is_some_and(|(offset, len)| offset.checked_add(len).is_none()) {
            return invalid("a request past 2^64");
        }
        let long = |len: u64| len > u64::from(TRANSFER_MAX);
        match request {
            BlockRequest::Read(extent) if long(extent.len) => {
                let read = |part| self.submit_part(BlockRequest::Read(part), advice);
                let reads: Vec<_> = parts_of(extent).into_iter().map(read).collect();
                Box::pin(async move {
                    let mut all = BufList::new();
                    for part in join_all(reads).await {
                        all.append(part?.into_data());
                    }
                    Ok(BlockReply::Data(all))
                })
            }
            BlockRequest::Write { offset, data, fua } if long(data.len() as u64) => {
                let write = |part: Extent| {
                    let from = (part.offset - offset) as usize;
                    let data = data.slice(from..from + part.len as usize);
                    self.submit_part(BlockRequest::Write { offset: part.offset, data, fua }, advice)
                };
                let writes: Vec<_> = parts_of(Extent::new(offset, data.len() as u64)).into_iter().map(write).collect();
                Box::pin(async move {
                    join_all(writes).await.into_iter().find(Result::is_err).unwrap_or(Ok(BlockReply::Done))
                })
            }
            BlockRequest::CompareAndWrite { expect, data, .. } if expect.len() != data.len() => {
                invalid("a compare-and-write whose parts differ in length")
            }
            BlockRequest::CompareAndWrite { data, .. } if long(2 * data.len() as u64) => {
                invalid("a compare-and-write that is too long to be forwarded")
            }
            request => self.submit_part(request, advice),
        }
    }

    fn map(&self, extent: Extent) -> LocalFuture<Result<ExtentMap>> {
        let forwarder = self.forwarder.clone();
        let table = forwarder.state.borrow().table();
        Box::pin(async move {
            let mut map = ExtentMap::new();
            let Some(end) = extent.checked_end() else {
                return Err(Error::new(ErrorKind::OutOfRange, format!("mapping {extent:?}")));
            };
            let mut at = extent.offset;
            while at < end {
                if forwarder.state.borrow().table() != table {
                    return Err(forwarder.outdated());
                }
                let answer = forwarder.push(VolumeRequest::Map(Extent::new(at, end - at))).await?;
                let malformed = || forwarder.failed("an extent map that does not belong to the request");
                let ForwardAnswer::Mapped(part) = answer else { return Err(malformed()) };
                let fits = part.runs().first().is_some_and(|run| run.extent.offset == at);
                if !fits || part.runs().last().is_some_and(|run| run.extent.end() > end) {
                    return Err(malformed());
                }
                for run in part.runs() {
                    map.push(run.extent.offset, run.extent.len, run.state);
                    at = run.extent.end();
                }
            }
            Ok(map)
        })
    }

    fn size_watch(&self) -> Option<Rc<SizeWatch>> {
        Some(self.forwarder.watch.clone())
    }

    fn reservations(&self) -> Option<Reservations> {
        self.forwarder.reserved().map(ForwardedReservations::handle)
    }
}

impl Drop for ForwardedVolume {
    fn drop(&mut self) {
        self.forwarder.closing.set(true);
        self.forwarder.changed.notify_all();
    }
}
