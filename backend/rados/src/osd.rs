//! Sessions with OSDs: requests find the OSD that takes them, and find it again when the cluster changes.
//!
//! Every request that is not answered is in one table, in the order of its number.  It is *sent* on the session of its
//! OSD, or waits there: for a connection, for room, for the end of a backoff or a pause, for a map with somebody who
//! takes it.  Whenever what it waits for comes, all that wait for the same are sent in their order; so requests on one
//! object reach its OSD in the order in which they were submitted.  The rules for sending again are Ceph's: when the
//! placement group's interval changes, when the session is lost, when an OSD asks for it.

pub(crate) mod hobject;
mod session;
#[cfg(test)]
mod tests;
pub(crate) mod watch;
pub(crate) mod wire;

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, HashMap};
use std::rc::{Rc, Weak};
use std::time::Duration;

use forebay_block::{Error, ErrorKind, ObjectName, Result, SnapContext};
use forebay_messenger::session::cephx::Wallet;
use forebay_messenger::wire::entity;
use forebay_messenger::{Auth, Budget, Message, Messenger, Options, Portal};
use forebay_reactor::sync::{Notify, oneshot};
use forebay_reactor::{Buf, BufList, Instant, now, sleep, spawn, wall_clock};

use crate::config::{Credentials, Settings};
use crate::error::{errno, failure};
use crate::map::{Epoch, Incremental, MapError, Mapping, OsdMap, PgId, flags as map_flags};
use crate::monitor::wire::OsdMaps;
use crate::monitor::{FEATURES, Monitors};
use hobject::HObject;
use session::{Incoming, Session};
use watch::Watches;
use wire::{Envelope, OsdOp, Redirect, Reply, flag, kind};

/// Requests are looked after so often ...
const WATCH_INTERVAL: Duration = Duration::from_secs(5);
/// ... and reported when they wait for so long.
const REPORT_AFTER: Duration = Duration::from_secs(30);
/// Of an operation for a client, as Ceph's clients have it.
const PRIORITY: u16 = 63;
/// Redirects of one request at most.
const REDIRECTS_MAX: u32 = 8;

/// What a request is about.
#[derive(Debug, Clone)]
pub(crate) struct Request {
    pub(crate) pool: i64,
    /// No name for a placement group itself.
    pub(crate) object: ObjectName,
    /// The group, when there is no name.
    pub(crate) group: u32,
    /// Of [`wire::SNAP_HEAD`], [`wire::SNAP_DIR`], or a snapshot's number.
    pub(crate) snap: u64,
    pub(crate) snapc: Option<Rc<SnapContext>>,
    /// Of [`flag`].
    pub(crate) flags: u32,
    pub(crate) ops: Vec<OsdOp>,
}

/// Where a placement group takes requests, as long as it does not change.
#[derive(Debug, PartialEq, Eq)]
struct Place {
    pg: PgId,
    shard: i8,
    mapping: Mapping,
    /// Of the pool: what begins a new interval when it changes.
    shape: (u32, u32, u32),
    /// Requests sent before this epoch are to be sent again.
    force_resend: Epoch,
}

struct Op {
    request: Request,
    hash: u32,
    /// The group's place when it was last looked at.
    place: Option<Rc<Place>>,
    /// It is on its way on the session of its place's primary.
    sent: bool,
    attempts: i32,
    sent_epoch: Epoch,
    redirect: Option<Redirect>,
    redirects: u32,
    since: Instant,
    /// It stands for a watch that is kept: no time is too long for it.
    lingers: bool,
    answer: oneshot::Sender<Result<Reply>>,
}

/// All requests of a client that OSDs have not answered, and the sessions on which they are.
pub(crate) struct Objecter {
    wallet: Rc<Wallet>,
    timeout: Cell<Option<Duration>>,
    messenger: RefCell<Option<Messenger>>,
    monitors: RefCell<Option<Monitors>>,
    map: RefCell<Option<Rc<OsdMap>>>,
    /// Groups that were looked up in this map.
    places: RefCell<HashMap<PgId, Rc<Place>>>,
    ops: RefCell<BTreeMap<u64, Op>>,
    last_tid: Cell<u64>,
    last_serial: Cell<u64>,
    sessions: RefCell<HashMap<i32, Session>>,
    watches: Watches,
    /// Counts what may concern watches: lost sessions, new maps, ends.
    disturbance: Cell<u64>,
    disturbed: Notify,
    watching: Cell<bool>,
    fenced: Cell<bool>,
    /// Why no monitor takes us: who has no session with an OSD gets none any more.
    refused: RefCell<Option<Error>>,
    closed: Cell<bool>,
    pub(crate) changed: Notify,
}

impl Objecter {
    pub(crate) fn new(wallet: Rc<Wallet>) -> Rc<Self> {
        Rc::new(Self {
            wallet,
            timeout: Cell::new(None),
            messenger: RefCell::default(),
            monitors: RefCell::default(),
            map: RefCell::default(),
            places: RefCell::default(),
            ops: RefCell::default(),
            last_tid: Cell::new(0),
            last_serial: Cell::new(0),
            sessions: RefCell::default(),
            watches: Watches::default(),
            disturbance: Cell::new(0),
            disturbed: Notify::new(),
            watching: Cell::new(false),
            fenced: Cell::new(false),
            refused: RefCell::default(),
            closed: Cell::new(false),
            changed: Notify::new(),
        })
    }

    /// Begins, when the monitors have said what they keep for us: nothing is asked of OSDs before.
    pub(crate) fn start(
        self: &Rc<Self>,
        (id, credentials): (String, Credentials),
        nonce: u32,
        portal: &Portal,
        settings: &Settings,
    ) {
        self.timeout.set(settings.osd_timeout);
        let wallet = self.wallet.clone();
        let (auth, modes) = match credentials {
            Credentials::None => (Auth::Named { id, wallet, monitors: false }, None),
            Credentials::Cephx(_) => {
                (Auth::CephxService { wallet, service: entity::OSD.into() }, Some(settings.osd_modes.clone()))
            }
        };
        let options = Options {
            entity: entity::CLIENT,
            peer_entity: Some(entity::OSD),
            nonce: Some(nonce),
            auth,
            modes,
            supported: FEATURES,
            receive: Budget { messages: 1 << 16, bytes: 256 << 20 },
            send: Budget { messages: 1 << 14, bytes: 256 << 20 },
            ..Options::default()
        };
        *self.messenger.borrow_mut() = Some(Messenger::new(portal, options, Incoming(Rc::downgrade(self))));
    }

    /// A request to an OSD fails after so long; those that are on their way, too.
    pub(crate) fn set_timeout(&self, timeout: Option<Duration>) {
        self.timeout.set(timeout);
    }

    pub(crate) fn set_monitors(&self, monitors: Monitors) {
        *self.monitors.borrow_mut() = Some(monitors);
    }

    pub(crate) fn map(&self) -> Option<Rc<OsdMap>> {
        self.map.borrow().clone()
    }

    /// The client was put on the cluster's blocklist: nothing of it is taken any more.
    pub(crate) fn is_fenced(&self) -> bool {
        self.fenced.get()
    }

    /// Something has happened that may concern watches.
    fn disturb(&self) {
        self.disturbance.set(self.disturbance.get() + 1);
        self.disturbed.notify_all();
    }

    fn disturbances(&self) -> u64 {
        self.disturbance.get()
    }

    /// Where an object is at the moment, if somebody has it.
    fn place_of(&self, pool: i64, object: &ObjectName) -> Option<Rc<Place>> {
        let map = self.map()?;
        let pool_facts = map.pools.get(&pool)?;
        let hash = pool_facts.hash_object(object.namespace(), object.name())?;
        let pg = PgId { pool, seed: pool_facts.group(hash) };
        let known = self.places.borrow().get(&pg).cloned();
        let place = known.or_else(|| self.place(&map, pg).map(Rc::new))?;
        (place.mapping.primary >= 0).then_some(place)
    }

    /// Requests that are not answered, and sessions.
    pub(crate) fn counts(&self) -> (usize, usize) {
        (self.ops.borrow().len(), self.sessions.borrow().len())
    }

    /// Ends all sessions; what is not answered fails.
    pub(crate) fn close(&self) {
        self.closed.set(true);
        let ops = std::mem::take(&mut *self.ops.borrow_mut());
        for (_, op) in ops {
            op.answer.send(Err(Error::new(ErrorKind::ShuttingDown, "the client has ended")));
        }
        self.sessions.borrow_mut().clear();
        self.monitors.borrow_mut().take();
        let messenger = self.messenger.borrow_mut().take();
        if let Some(messenger) = messenger {
            messenger.shutdown();
        }
        self.changed.notify_all();
        self.disturb();
    }

    /// Takes a request; it is sent before this returns, if that can be.
    pub(crate) fn submit(self: &Rc<Self>, request: Request) -> oneshot::Receiver<Result<Reply>> {
        self.submit_for(request, false)
    }

    /// The same; one that lingers is not ended by a timeout.
    fn submit_for(self: &Rc<Self>, request: Request, lingers: bool) -> oneshot::Receiver<Result<Reply>> {
        let (answer, answered) = oneshot::channel();
        if self.closed.get() {
            answer.send(Err(Error::new(ErrorKind::ShuttingDown, "the client has ended")));
            return answered;
        }
        if self.fenced.get() {
            let text = format!("object {}: the cluster has this client on its blocklist", request.object);
            answer.send(Err(Error::new(ErrorKind::Fenced, text)));
            return answered;
        }
        let tid = self.last_tid.get() + 1;
        self.last_tid.set(tid);
        let op = Op {
            request,
            hash: 0,
            place: None,
            sent: false,
            attempts: 0,
            sent_epoch: 0,
            redirect: None,
            redirects: 0,
            since: now(),
            lingers,
            answer,
        };
        self.ops.borrow_mut().insert(tid, op);
        self.dispatch(tid);
        self.fail_refused(Some(tid));
        if !self.watching.replace(true) {
            drop(spawn(watch(Rc::downgrade(self))));
        }
        answered
    }

    /// Finds the place of a request that is not sent, and sends it if it can be.
    fn dispatch(self: &Rc<Self>, tid: u64) {
        let Some(map) = self.map() else { return };
        let located = {
            let mut ops = self.ops.borrow_mut();
            let Some(op) = ops.get_mut(&tid) else { return };
            self.locate(&map, op)
        };
        match located {
            Err(error) => self.answer(tid, Err(error)),
            Ok(Some(osd)) => self.send(&map, tid, osd),
            Ok(None) => {}
        }
    }

    /// Looks up a request's place: the OSD that takes it; `None` when it is to wait.
    fn locate(&self, map: &OsdMap, op: &mut Op) -> Result<Option<i32>> {
        let request = &op.request;
        let base = op.redirect.as_ref().map_or(request.pool, |redirect| redirect.pool);
        let gone = |pool: i64| Error::new(ErrorKind::NotFound, format!("pool {pool} is not there (any more)"));
        let mut id = base;
        let mut pool = map.pools.get(&id).ok_or_else(|| gone(id))?;
        let write = request.flags & flag::WRITE != 0;
        let tier = if write { pool.write_tier } else { pool.read_tier };
        if let Some(tier) = tier.filter(|_| request.flags & flag::IGNORE_OVERLAY == 0 && op.redirect.is_none()) {
            id = tier;
            pool = map.pools.get(&id).ok_or_else(|| gone(id))?;
        }
        op.hash = match (&op.redirect, request.object.name()) {
            (None, "") => request.group,
            (redirect, name) => {
                let (namespace, name) = match redirect {
                    None => (request.object.namespace(), name),
                    Some(to) if to.key.is_empty() => (to.namespace.as_str(), to.name_or(name)),
                    Some(to) => (to.namespace.as_str(), to.key.as_str()),
                };
                let unknown =
                    || Error::new(ErrorKind::Unsupported, format!("pool {id} hashes names in a way of its own"));
                pool.hash_object(namespace, name).ok_or_else(unknown)?
            }
        };
        let pg = PgId { pool: id, seed: pool.group(op.hash) };
        let known = self.places.borrow().get(&pg).cloned();
        let place = match known {
            Some(place) => place,
            None => {
                let place = Rc::new(self.place(map, pg).ok_or_else(|| gone(id))?);
                self.places.borrow_mut().insert(pg, place.clone());
                place
            }
        };
        let osd = place.mapping.primary;
        op.place = Some(place);
        let paused = map.flags & if write { map_flags::PAUSE_WRITES } else { map_flags::PAUSE_READS } != 0;
        Ok((osd >= 0 && !paused).then_some(osd))
    }

    fn place(&self, map: &OsdMap, pg: PgId) -> Option<Place> {
        let pool = map.pools.get(&pg.pool)?;
        let mapping = map.map_pg(pg)?;
        Some(Place {
            pg,
            shard: mapping.primary_shard(pool),
            mapping,
            shape: (pool.size, pool.min_size, pool.pg_num),
            force_resend: pool.force_resend,
        })
    }

    /// Sends a request on the session of its OSD, if that takes it now.
    fn send(self: &Rc<Self>, map: &OsdMap, tid: u64, osd: i32) {
        let mut sessions = self.sessions.borrow_mut();
        let session = sessions.entry(osd).or_insert_with(|| Session::open(self, map, osd));
        if !session.takes() {
            return;
        }
        let mut ops = self.ops.borrow_mut();
        let Some(op) = ops.get_mut(&tid) else { return };
        let Some(place) = op.place.clone() else { return };
        if session.holds_back(&place, || hobject(op, &place)) {
            return;
        }
        op.attempts += 1;
        op.sent_epoch = map.epoch;
        let message = self.message(map.epoch, tid, op, &place);
        op.sent = session.post(self, osd, message);
    }

    fn message(&self, epoch: Epoch, tid: u64, op: &Op, place: &Place) -> Message {
        let request = &op.request;
        let mut flags = request.flags | flag::ON_DISK;
        if op.attempts > 1 {
            flags |= flag::RETRY;
        }
        let (namespace, name, key) = match &op.redirect {
            None => (request.object.namespace(), request.object.name(), ""),
            Some(to) => {
                flags |= flag::REDIRECTED | flag::IGNORE_CACHE | flag::IGNORE_OVERLAY;
                (to.namespace.as_str(), to.name_or(request.object.name()), to.key.as_str())
            }
        };
        let time = wall_clock();
        let snaps: Vec<u64>;
        let (snap_seq, snaps) = match &request.snapc {
            Some(snapc) => {
                snaps = snapc.snaps.iter().map(|snap| snap.0).collect();
                (snapc.seq, snaps.as_slice())
            }
            None => (0, [].as_slice()),
        };
        let envelope = Envelope {
            pg: place.pg,
            shard: place.shard,
            hash: op.hash,
            epoch,
            flags,
            client: self.wallet.global_id(),
            tid,
            time: if flags & flag::WRITE == 0 { (0, 0) } else { (time.as_secs() as u32, time.subsec_nanos()) },
            pool: place.pg.pool,
            namespace,
            name,
            key,
            snap: request.snap,
            snap_seq,
            snaps,
            attempt: op.attempts - 1,
            features: FEATURES,
        };
        let front = wire::request(&envelope, &request.ops);
        let mut data = BufList::new();
        for op in &request.ops {
            if !op.data.is_empty() {
                data.append(op.data.clone());
            }
        }
        let mut message = Message::new(kind::OSD_OP).front(Buf::copy_of(&front)).data(data).priority(PRIORITY);
        (message.version, message.compat_version) = (8, 3);
        message.tid = tid;
        message
    }

    fn answer(&self, tid: u64, result: Result<Reply>) {
        let op = self.ops.borrow_mut().remove(&tid);
        if let Some(op) = op {
            op.answer.send(result);
        }
    }

    /// Takes an OSD's answer.
    fn take_reply(self: &Rc<Self>, osd: i32, tid: u64, reply: Reply) {
        let mut ops = self.ops.borrow_mut();
        let Some(op) = ops.get_mut(&tid) else { return };
        let ours = op.sent && op.place.as_ref().is_some_and(|place| place.mapping.primary == osd);
        if !ours || (reply.attempt >= 0 && reply.attempt != op.attempts - 1) {
            // The answer to an attempt that was given up; that to a later one comes yet.
            return;
        }
        if let Some(to) = reply.redirect.clone() {
            op.redirects += 1;
            if op.redirects > REDIRECTS_MAX {
                drop(ops);
                self.answer(tid, Err(Error::new(ErrorKind::Io, "a request is redirected without end")));
                return;
            }
            tracing::debug!(osd, pool = to.pool, object = %op.request.object, "a request is redirected");
            (op.redirect, op.sent) = (Some(to), false);
            drop(ops);
            self.dispatch(tid);
            return;
        }
        let object = op.request.object.clone();
        drop(ops);
        if reply.result == -errno::ESHUTDOWN {
            self.fenced.set(true);
            self.changed.notify_all();
            let text = format!("object {object}: the cluster has this client on its blocklist");
            self.answer(tid, Err(Error::new(ErrorKind::Fenced, text)));
            return;
        }
        self.answer(tid, Ok(reply));
    }

    /// The monitors refuse our key, or have taken us again.  Sessions with OSDs stay as long as those let them: fencing
    /// is for who must not write any more.
    pub(crate) fn refuse(&self, error: Option<Error>) {
        if let (Some(error), None) = (&error, &*self.refused.borrow()) {
            tracing::warn!(%error, "requests to OSDs without a session fail from now on");
        }
        *self.refused.borrow_mut() = error;
        self.fail_refused(None);
    }

    /// Fails what is not sent, or one of it, while nobody takes us.
    fn fail_refused(&self, one: Option<u64>) {
        let Some(error) = self.refused.borrow().clone() else { return };
        let waits = |tid: &u64| self.ops.borrow().get(tid).is_some_and(|op| !op.sent);
        let all = || self.ops.borrow().keys().copied().collect();
        let tids: Vec<u64> = one.map_or_else(all, |tid| vec![tid]);
        for tid in tids.into_iter().filter(waits) {
            self.answer(tid, Err(error.clone()));
        }
    }

    /// Sends what is not sent, in order: of all OSDs, or of one.
    fn send_waiting(self: &Rc<Self>, osd: Option<i32>) {
        let waits = |op: &Op| {
            let primary = op.place.as_ref().map(|place| place.mapping.primary);
            !op.sent && (osd.is_none() || osd == primary)
        };
        let tids: Vec<u64> = self.ops.borrow().iter().filter(|(_, op)| waits(op)).map(|(&tid, _)| tid).collect();
        for tid in tids {
            self.dispatch(tid);
        }
    }

    /// What was sent to an OSD is to be sent again.
    fn unsend(&self, osd: i32, which: impl Fn(&Op, &Place) -> bool) {
        for op in self.ops.borrow_mut().values_mut() {
            if let Some(place) = &op.place
                && place.mapping.primary == osd
                && which(op, place)
            {
                op.sent = false;
            }
        }
    }

    /// Takes maps in, from whomever they are.
    pub(crate) fn take_maps(self: &Rc<Self>, maps: &OsdMaps<'_>) {
        let Some(monitors) = self.monitors.borrow().clone() else { return };
        if monitors.fsid() != [0; 16] && monitors.fsid() != maps.fsid {
            tracing::warn!("a map of another cluster's OSDs came; it is not taken");
            return;
        }
        let before = self.map();
        let (after, missed) = match advance(before.as_deref(), maps) {
            Ok(advanced) => advanced,
            Err(error) => {
                tracing::warn!(%error, "a map of OSDs is not taken; the whole map is asked for");
                monitors.want_osd_map(0);
                monitors.ask_again();
                return;
            }
        };
        if let Some(after) = after {
            monitors.want_osd_map(after.epoch + 1);
            tracing::debug!(epoch = after.epoch, "a new map of OSDs");
            *self.map.borrow_mut() = Some(Rc::new(after));
            self.rescan();
            self.changed.notify_all();
            self.disturb();
        }
        if missed {
            monitors.ask_again();
        }
    }

    /// A new map: sessions with OSDs that are not there any more end, and requests whose place has changed are sent
    /// again.
    fn rescan(self: &Rc<Self>) {
        let Some(map) = self.map() else { return };
        self.places.borrow_mut().clear();
        let mut lost = Vec::new();
        self.sessions.borrow_mut().retain(|&osd, session| {
            let stays = session.is_at(&map, osd);
            if !stays {
                lost.push((osd, session.close()));
            }
            stays
        });
        for (osd, connection) in lost {
            if let Some(connection) = connection {
                connection.close();
            }
            self.unsend(osd, |_, _| true);
        }
        let tids: Vec<u64> = self.ops.borrow().keys().copied().collect();
        for tid in tids {
            let located = {
                let mut ops = self.ops.borrow_mut();
                let Some(op) = ops.get_mut(&tid) else { continue };
                let before = op.place.clone();
                let located = self.locate(&map, op);
                let same = match (&before, &op.place) {
                    (Some(before), Some(after)) => {
                        let unforced = Place { force_resend: before.force_resend, ..clone_place(after) };
                        **before == unforced && after.force_resend <= op.sent_epoch
                    }
                    _ => false,
                };
                if !same {
                    op.sent = false;
                }
                // What is sent and stays where it is needs nothing.
                if op.sent && located.is_ok() { Ok(None) } else { located }
            };
            match located {
                Err(error) => self.answer(tid, Err(error)),
                Ok(Some(osd)) => self.send(&map, tid, osd),
                Ok(None) => {}
            }
        }
    }

    /// Reports requests that wait for long, and fails those that wait for too long.
    fn look_after(&self) {
        let mut oldest: Option<(Duration, String)> = None;
        let mut count = 0;
        let mut late = Vec::new();
        for (&tid, op) in &*self.ops.borrow() {
            let age = op.since.elapsed();
            if self.timeout.get().is_some_and(|limit| age >= limit && !op.lingers) {
                late.push((tid, describe(op)));
            } else if age >= REPORT_AFTER {
                count += 1;
                if oldest.as_ref().is_none_or(|(other, _)| age > *other) {
                    oldest = Some((age, describe(op)));
                }
            }
        }
        if let Some((age, what)) = oldest {
            tracing::warn!(requests = count, oldest_s = age.as_secs(), "requests to OSDs are not answered: {what}");
        }
        for (tid, what) in late {
            self.answer(tid, Err(Error::new(ErrorKind::TimedOut, what)));
        }
    }
}

fn clone_place(place: &Place) -> Place {
    Place { mapping: place.mapping.clone(), ..*place }
}

fn describe(op: &Op) -> String {
    let object = &op.request.object;
    match &op.place {
        None => format!("object {object}: no map has come yet"),
        Some(place) if place.mapping.primary < 0 => format!("object {object}: nobody has placement group {}", place.pg),
        Some(place) => {
            let how = if op.sent { "does not answer" } else { "does not take it" };
            format!("object {object}: osd.{} {how} (placement group {})", place.mapping.primary, place.pg)
        }
    }
}

fn hobject(op: &Op, place: &Place) -> HObject {
    let bytes = |text: &str| text.as_bytes().to_vec();
    HObject {
        pool: place.pg.pool,
        namespace: bytes(op.request.object.namespace()),
        key: Vec::new(),
        name: bytes(op.request.object.name()),
        snap: op.request.snap,
        hash: op.hash,
        max: false,
    }
}

/// The map after these; whether some in between are missing.
fn advance(before: Option<&OsdMap>, maps: &OsdMaps<'_>) -> std::result::Result<(Option<OsdMap>, bool), MapError> {
    let mut map: Option<OsdMap> = None;
    let epoch = |map: &Option<OsdMap>| map.as_ref().or(before).map_or(0, |map| map.epoch);
    let newest = maps.changes.iter().chain(&maps.wholes).map(|(epoch, _)| *epoch).max().unwrap_or(0);
    let mut changes = maps.changes.clone();
    changes.sort_by_key(|(epoch, _)| *epoch);
    let newest_whole = maps.wholes.iter().max_by_key(|(epoch, _)| *epoch);
    if let Some((whole, bytes)) = newest_whole
        && *whole > epoch(&map)
        && (epoch(&map) == 0 || !changes.iter().any(|(change, _)| *change == epoch(&map) + 1))
    {
        map = Some(OsdMap::decode(bytes)?);
    }
    for (number, bytes) in changes {
        if epoch(&map) > 0 && number == epoch(&map) + 1 {
            let change = Incremental::decode(bytes)?;
            map.get_or_insert_with(|| before.expect("there is a map").clone()).apply(change)?;
        }
    }
    let missed = newest > epoch(&map);
    Ok((map, missed))
}

/// Looks after requests as long as there are any.
async fn watch(objecter: Weak<Objecter>) {
    loop {
        let limit = objecter.upgrade().and_then(|objecter| objecter.timeout.get());
        let interval =
            limit.map_or(WATCH_INTERVAL, |limit| (limit / 4).clamp(Duration::from_millis(100), WATCH_INTERVAL));
        sleep(interval).await;
        let Some(objecter) = objecter.upgrade() else { return };
        objecter.look_after();
        if objecter.ops.borrow().is_empty() {
            objecter.watching.set(false);
            return;
        }
    }
}

/// The result of a request as an error, unless it is none.
pub(crate) fn check(reply: Reply, object: &ObjectName) -> Result<Reply> {
    if reply.result < 0 { Err(failure(reply.result, format!("object {object}"))) } else { Ok(reply) }
}
