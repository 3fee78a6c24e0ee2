//! The image that all gateways share: its record, and its backend, which knows who is fenced.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::rc::Rc;
use std::time::Duration;

use forebay_block::{
    BlockDevice, BlockReply, BlockRequest, Error, ErrorKind, Extent, ExtentMap, Geometry, LocalFuture, Result,
    SizeWatch,
};
use forebay_reactor::sync::Notify;
use forebay_reactor::{sleep, spawn};
use forebay_writelog::LogId;
use forebay_writelog::replication::{LogMembers, RecordChange};

use super::ReplicationTally;
use crate::faults::{MICRO, MILLI};
use crate::rng::Rng;
use crate::world::World;

/// The image: it outlives gateways.
pub(super) struct SharedImage {
    pub(super) world: World,
    pub(super) log: Cell<LogId>,
    /// Epoch of the record when its log was released.
    pub(super) last_epoch: Cell<u64>,
    pub(super) record: RefCell<Option<LogMembers>>,
    /// Numbers of times that each gateway was started.
    pub(super) starts: RefCell<BTreeMap<u8, u64>>,
    /// Gateway of each copy that a record has named, and how often that one had been started.
    pub(super) copies: RefCell<BTreeMap<LogId, (u8, u64)>>,
    pub(super) rng: RefCell<Rng>,
    pub(super) fenced: RefCell<BTreeSet<String>>,
    /// Changes on their way to the backend, by client.
    pub(super) under_way: RefCell<BTreeMap<String, usize>>,
    /// Requests at the backend: their ranges, and whether they write.
    pub(super) in_flight: RefCell<BTreeMap<u64, (Extent, bool)>>,
    pub(super) requests: Cell<u64>,
    pub(super) ended: Notify,
    pub(super) clients: Cell<u64>,
    pub(super) tally: RefCell<ReplicationTally>,
    /// Violation that a task beside the load has found.
    pub(super) violation: RefCell<Option<String>>,
    pub(super) backend: Rc<dyn BlockDevice>,
}

impl SharedImage {
    pub(super) fn count(&self, change: impl FnOnce(&mut ReplicationTally)) {
        change(&mut self.tally.borrow_mut());
    }

    pub(super) fn takes(&self) -> Duration {
        Duration::from_nanos(self.rng.borrow_mut().range(50 * MICRO..3 * MILLI))
    }

    pub(super) fn new_client(&self) -> String {
        self.clients.set(self.clients.get() + 1);
        format!("client.{}", self.clients.get())
    }

    pub(super) async fn load(&self) -> Option<LogMembers> {
        sleep(self.takes()).await;
        self.record.borrow().clone()
    }

    /// Fences a client: once this has ended, nothing of it reaches the backend any more.
    pub(super) async fn fence(&self, client: &str) {
        sleep(self.takes()).await;
        self.fenced.borrow_mut().insert(client.to_owned());
        self.ended.wait_until(|| !self.under_way.borrow().contains_key(client)).await;
        sleep(self.takes()).await;
    }

    /// Changes the record for a client, if it is still `from`.
    pub(super) async fn change(&self, client: &str, from: Option<LogMembers>, to: LogMembers) -> Result<RecordChange> {
        let (takes, lost, applied) = {
            let mut rng = self.rng.borrow_mut();
            (Duration::from_nanos(rng.range(50 * MICRO..3 * MILLI)), rng.one_in(10), rng.coin())
        };
        sleep(takes).await;
        if lost && !applied {
            return Err(Error::new(ErrorKind::TimedOut, "the record cannot be reached"));
        }
        if self.fenced.borrow().contains(client) {
            return Err(Error::new(ErrorKind::Fenced, format!("{client} is fenced")));
        }
        let outcome = {
            let mut record = self.record.borrow_mut();
            match *record == from {
                true => {
                    self.world.note(|| format!("the record is {to:?}"));
                    self.count_members(&to, record.as_ref());
                    *record = Some(to);
                    RecordChange::Changed
                }
                false => RecordChange::Other(record.clone()),
            }
        };
        sleep(takes).await;
        if lost {
            Err(Error::new(ErrorKind::TimedOut, "the record was changed, and nobody was told"))
        } else {
            Ok(outcome)
        }
    }

    /// Removes the log of a term from the record, for a client.
    pub(super) async fn release(&self, client: &str, term: u64) -> Result<()> {
        sleep(self.takes()).await;
        if self.rng.borrow_mut().one_in(10) {
            return Err(Error::new(ErrorKind::TimedOut, "the record cannot be reached"));
        }
        let mut record = self.record.borrow_mut();
        let is_own = record.as_ref().is_some_and(|record| record.term() == term);
        if self.fenced.borrow().contains(client) || !is_own {
            return Err(Error::new(ErrorKind::Fenced, format!("{client} is not the primary's any more")));
        }
        self.world.note(|| format!("the log of term {term} is released"));
        self.last_epoch.set(record.as_ref().map_or(0, LogMembers::epoch));
        *record = None;
        self.count(|tally| tally.released += 1);
        Ok(())
    }

    /// Returns whether a request may reach the backend: it is atomic there, as one to an object of an image is.
    fn is_free(&self, extent: Extent, changes: bool) -> bool {
        let in_flight = self.in_flight.borrow();
        let conflicts = in_flight.values().any(|(other, writes)| (changes || *writes) && other.overlaps(extent));
        !conflicts
    }

    /// Remembers which processes have the copies that a record names.
    pub(super) fn note_copies(&self, record: &LogMembers) {
        for (peer, entry) in record.members() {
            let (number, starts) = (peer.0[0], self.starts.borrow());
            let start = starts.get(&number).copied().unwrap_or_default();
            self.copies.borrow_mut().entry(entry.copy).or_insert((number, start));
        }
    }

    fn count_members(&self, to: &LogMembers, from: Option<&LogMembers>) {
        self.note_copies(to);
        let complete = |record: &LogMembers| record.complete().count();
        let before = from.map_or(0, complete);
        self.count(|tally| {
            let opens = from.is_some_and(|from| from.term() != to.term());
            let takes_over = from.is_some_and(|from| from.primary() != to.primary());
            tally.takeovers += u64::from(takes_over);
            tally.reopened += u64::from(opens && !takes_over);
            tally.changes += 1;
            tally.filled += u64::from(complete(to) > before && from.is_some());
            tally.dropped += u64::from(complete(to) < before);
        });
    }
}

/// Client of the backend.
pub(super) struct BackendClient {
    pub(super) image: Rc<SharedImage>,
    pub(super) name: String,
    /// Set while its process lives.
    pub(super) alive: Rc<Cell<bool>>,
}

impl BlockDevice for BackendClient {
    fn geometry(&self) -> Geometry {
        self.image.backend.geometry()
    }

    fn submit(&self, request: BlockRequest) -> LocalFuture<Result<BlockReply>> {
        if !self.alive.get() {
            return Box::pin(std::future::pending());
        }
        let (image, name) = (self.image.clone(), self.name.clone());
        let delay = image.takes();
        // What was sent goes on when its caller is gone.
        let sent = spawn(async move {
            let changes = request.is_write();
            sleep(delay).await;
            if image.fenced.borrow().contains(&name) {
                image.count(|tally| tally.fenced += 1);
                return Err(Error::new(ErrorKind::Fenced, format!("{name} is fenced")));
            }
            if changes {
                *image.under_way.borrow_mut().entry(name.clone()).or_default() += 1;
            }
            let extent = request.extent().unwrap_or(Extent::new(0, 0));
            image.ended.wait_until(|| image.is_free(extent, changes)).await;
            let number = image.requests.get() + 1;
            image.requests.set(number);
            image.in_flight.borrow_mut().insert(number, (extent, changes));
            let result = image.backend.submit(request).await;
            image.in_flight.borrow_mut().remove(&number);
            image.ended.notify_all();
            if changes {
                let mut under_way = image.under_way.borrow_mut();
                if let Some(count) = under_way.get_mut(&name) {
                    *count -= 1;
                    if *count == 0 {
                        under_way.remove(&name);
                    }
                }
                drop(under_way);
                image.ended.notify_all();
            }
            result
        });
        Box::pin(sent)
    }

    fn map(&self, extent: Extent) -> LocalFuture<Result<ExtentMap>> {
        self.image.backend.map(extent)
    }

    fn size_watch(&self) -> Option<Rc<SizeWatch>> {
        None
    }
}
