//! Asynchronous part of a member: carries out what its state machine asks for.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeSet, VecDeque};
use std::rc::{Rc, Weak};
use std::time::Duration;

use forebay_block::{ErrorKind, LocalFuture, Result};
use forebay_reactor::sync::Notify;
use forebay_reactor::{now, sleep, spawn, wall_clock};

use crate::ids::{MemberId, StartId, VolumeName};
use crate::load::VolumeLoads;
use crate::member::{ChangeOutcome, CloseReason, EndReason, GatewayAction, GatewayEvent, GatewayMachine, OpenFailure};
use crate::record::{ChangeRefusal, GatewayMember, GatewayVolume, GroupChange, GroupRecord};
use crate::store::{GroupStore, RecordWatch};
use crate::wire::GatewayMessage;

/// Time for which a start stays on the blocklist: longer than a suspended machine may sleep.
const FENCED: Duration = Duration::from_secs(30 * 24 * 3600);
/// Number of times in a lease that a member looks whether the record has changed.
const LOOKS_PER_LEASE: u32 = 4;

/// Daemon of a member, as its start needs it.
pub trait GatewayHost {
    /// Sends a message to a member, or drops it if there is no connection yet.
    fn send(&self, to: MemberId, entry: Option<&GatewayMember>, message: &GatewayMessage);

    /// Opens a volume, with its log, and serves it.
    fn open(
        &self,
        volume: &VolumeName,
        term: u64,
        entry: &GatewayVolume,
    ) -> LocalFuture<std::result::Result<(), OpenFailure>>;

    /// Reads what opening a volume will need, without its lock.  Completes at the latest when that has failed.
    fn prepare(&self, volume: &VolumeName, entry: &GatewayVolume) -> LocalFuture<()>;

    /// Forgets what was prepared.
    fn unprepare(&self, volume: &VolumeName);

    /// Closes a volume: nothing of it is in flight at the pool afterwards, and its lock is given up.
    fn close(&self, volume: &VolumeName, reason: CloseReason) -> LocalFuture<()>;

    /// Admits the connections of hosts, or closes them and refuses new ones.
    fn admit_hosts(&self, admitted: bool);

    /// Returns the loads of the volumes that are open here.  Called several times in a lease.
    fn loads(&self) -> Rc<VolumeLoads>;

    /// Takes note of the record, which has changed.
    fn record_changed(&self, record: &Rc<GroupRecord>);

    /// Ends this start: closes everything at once, without a word to the pool.  Called once.
    fn ended(&self, reason: EndReason);
}

/// Start of a member of a group, running.
pub struct GatewayRunner {
    store: Rc<GroupStore>,
    host: Rc<dyn GatewayHost>,
    machine: RefCell<GatewayMachine>,
    events: RefCell<VecDeque<GatewayEvent>>,
    stepping: Cell<bool>,
    watch: RefCell<Option<RecordWatch>>,
    refreshing: Cell<bool>,
    ended: Cell<Option<EndReason>>,
    ending: Notify,
    this: Weak<Self>,
}

impl GatewayRunner {
    /// Begins a start of the member `own`, which joins the group with `entry`, or rejoins.
    ///
    /// # Errors
    /// `NotFound` if there is no such group; errors of the pool.
    pub async fn start(
        store: Rc<GroupStore>,
        host: Rc<dyn GatewayHost>,
        own: MemberId,
        entry: GatewayMember,
    ) -> Result<Rc<Self>> {
        let record = store.load().await?;
        let seconds = || wall_clock().as_secs();
        let runner = Rc::new_cyclic(|this| Self {
            machine: RefCell::new(GatewayMachine::new(own, entry, record.clone(), now(), seconds)),
            store,
            host,
            events: RefCell::default(),
            stepping: Cell::new(false),
            watch: RefCell::default(),
            refreshing: Cell::new(false),
            ended: Cell::default(),
            ending: Notify::new(),
            this: this.clone(),
        });
        runner.watch_record().await?;
        runner.host.record_changed(&record);
        drop(spawn(tick(runner.this.clone())));
        drop(spawn(look(runner.this.clone())));
        Ok(runner)
    }

    /// Takes a message from another member.
    pub fn message(&self, message: GatewayMessage) {
        self.step(GatewayEvent::Message(message));
    }

    /// Takes note that no process of this start of a member is left: its machine refuses connections to it.
    pub fn refused(&self, member: MemberId, start: StartId) {
        self.step(GatewayEvent::Refused(member, start));
    }

    /// Takes note that the pool refuses this member's client.
    pub fn client_fenced(&self) {
        self.step(GatewayEvent::ClientFenced);
    }

    /// Asks the other members for the loads of their volumes.
    pub fn ask_loads(&self) {
        self.step(GatewayEvent::AskLoads);
    }

    /// Sets the time without a change after which volumes are moved by themselves, for tests.
    pub fn set_settle_time(&self, settle: Duration) {
        self.machine.borrow_mut().set_settle_time(settle);
    }

    /// Returns the record as this member knows it.
    pub fn record(&self) -> Rc<GroupRecord> {
        self.machine.borrow().record().clone()
    }

    /// Returns what `read` reads of the state machine.
    pub fn inspect<T>(&self, read: impl FnOnce(&GatewayMachine) -> T) -> T {
        read(&self.machine.borrow())
    }

    /// Returns the access to the record.
    pub fn store(&self) -> &Rc<GroupStore> {
        &self.store
    }

    /// Changes the record for an operator.
    ///
    /// # Errors
    /// Errors of the pool; the inner one if the change is refused.
    pub async fn change(&self, changes: &[GroupChange]) -> Result<std::result::Result<(), ChangeRefusal>> {
        let asked = now();
        let changed = self.store.change(changes).await?;
        Ok(changed.map(|record| self.step(GatewayEvent::Record(record, asked))))
    }

    /// Stops in order: volumes are closed, and others get them.  Completes when this start has ended.
    pub async fn stop(&self) {
        self.step(GatewayEvent::Stop);
        self.ending.wait_until(|| self.ended.get().is_some()).await;
    }

    /// Returns why this start has ended, if it has.
    pub fn end_reason(&self) -> Option<EndReason> {
        self.ended.get()
    }

    /// Waits until this start has ended.
    pub async fn ended(&self) -> EndReason {
        self.ending.wait_until(|| self.ended.get().is_some()).await;
        self.ended.get().expect("waited for")
    }

    /// Takes an event, after those that are being taken.
    fn step(&self, event: GatewayEvent) {
        self.events.borrow_mut().push_back(event);
        if self.stepping.replace(true) {
            return;
        }
        loop {
            let Some(event) = self.events.borrow_mut().pop_front() else { break };
            let epoch = self.record().epoch();
            let actions = self.machine.borrow_mut().step(now(), event);
            let record = self.record();
            if record.epoch() != epoch {
                self.host.record_changed(&record);
            }
            for action in actions {
                self.act(&record, action);
            }
        }
        self.stepping.set(false);
    }

    /// Runs a future, and takes the event that it returns, unless this start has been dropped.
    fn then(&self, future: impl Future<Output = Option<GatewayEvent>> + 'static) {
        let this = self.this.clone();
        drop(spawn(async move {
            if let (Some(event), Some(runner)) = (future.await, this.upgrade()) {
                runner.step(event);
            }
        }));
    }

    fn act(&self, record: &Rc<GroupRecord>, action: GatewayAction) {
        match action {
            GatewayAction::Send(to, body) => {
                let message = self.machine.borrow().message(now(), body);
                self.host.send(to, record.member(to), &message);
            }
            GatewayAction::Refresh => self.refresh(),
            GatewayAction::FindPresent => {
                let (store, record) = (self.store.clone(), record.clone());
                self.then(async move { Some(GatewayEvent::Present(present(&store, &record).await?)) });
            }
            GatewayAction::Change(changes) => self.begin_change(changes),
            GatewayAction::Fence { member, start, clients } => self.fence(member, start, clients),
            GatewayAction::Open(volume, term) => {
                let Some(entry) = record.volume(&volume) else { return };
                let opened = self.host.open(&volume, term, entry);
                self.then(async move {
                    Some(match opened.await {
                        Ok(()) => GatewayEvent::Opened(volume, term),
                        Err(why) => GatewayEvent::OpenFailed(volume, term, why),
                    })
                });
            }
            GatewayAction::Prepare(volume, term) => {
                let Some(entry) = record.volume(&volume) else { return };
                let prepared = self.host.prepare(&volume, entry);
                self.then(async move {
                    prepared.await;
                    Some(GatewayEvent::Prepared(volume, term))
                });
            }
            GatewayAction::Unprepare(volume) => self.host.unprepare(&volume),
            GatewayAction::Close(volume, term, reason) => {
                let closed = self.host.close(&volume, reason);
                self.then(async move {
                    closed.await;
                    Some(GatewayEvent::Closed(volume, term))
                });
            }
            GatewayAction::AdmitHosts(admitted) => self.host.admit_hosts(admitted),
            GatewayAction::End(reason) => {
                self.ended.set(Some(reason));
                self.watch.take();
                self.host.ended(reason);
                self.ending.notify_all();
            }
        }
    }

    fn begin_change(&self, changes: Vec<GroupChange>) {
        let this = self.this.clone();
        drop(spawn(async move {
            let Some(store) = this.upgrade().map(|runner| runner.store.clone()) else { return };
            let asked = now();
            let changed = store.change(&changes).await;
            let Some(runner) = this.upgrade() else { return };
            let outcome = match changed {
                Ok(Ok(record)) => {
                    runner.step(GatewayEvent::Record(record, asked));
                    ChangeOutcome::Made
                }
                Ok(Err(refusal)) => {
                    tracing::debug!(group = store.name(), %refusal, ?changes, "a change of a gateway group is refused");
                    if let Some(record) = store.known() {
                        runner.step(GatewayEvent::Record(record, asked));
                    }
                    ChangeOutcome::Refused(refusal)
                }
                Err(error) => {
                    if error.kind() == ErrorKind::Fenced {
                        return runner.client_fenced();
                    }
                    tracing::warn!(group = store.name(), %error, "cannot change the record of a gateway group");
                    ChangeOutcome::Failed
                }
            };
            runner.step(GatewayEvent::Changed(outcome));
        }));
    }

    fn fence(&self, member: MemberId, start: StartId, clients: Vec<String>) {
        let (store, host) = (self.store.clone(), self.record().member(member).map(|entry| entry.host.clone()));
        self.then(async move {
            for client in &clients {
                if let Err(error) = store.shared().blocklist(client, Some(FENCED)).await {
                    tracing::warn!(group = store.name(), %member, client, %error, "cannot fence a member of a gateway group");
                    return Some(GatewayEvent::FenceEnded(member, start, false));
                }
            }
            tracing::warn!(group = store.name(), %member, host, ?clients, "fenced a member of a gateway group");
            Some(GatewayEvent::FenceEnded(member, start, true))
        });
    }

    /// Reads the record if it has changed, unless that is being done.
    fn refresh(&self) {
        if self.refreshing.replace(true) {
            return;
        }
        let this = self.this.clone();
        drop(spawn(async move {
            let Some(store) = this.upgrade().map(|runner| runner.store.clone()) else { return };
            let asked = now();
            let read = store.refresh().await;
            let Some(runner) = this.upgrade() else { return };
            runner.refreshing.set(false);
            match read {
                Ok(record) => runner.step(GatewayEvent::Record(record, asked)),
                Err(error) if error.kind() == ErrorKind::Fenced => runner.client_fenced(),
                Err(error) => {
                    tracing::debug!(group = store.name(), %error, "cannot read the record of a gateway group")
                }
            }
        }));
    }

    async fn watch_record(&self) -> Result<()> {
        let this = self.this.clone();
        let changed = move |must_read: bool| {
            let Some(runner) = this.upgrade() else { return };
            match runner.store.known() {
                Some(record) if !must_read => {
                    // Says nothing about when the pool was reached.
                    let asked = runner.machine.borrow().pool_confirmed();
                    runner.step(GatewayEvent::Record(record, asked));
                }
                _ => runner.refresh(),
            }
        };
        let watch = self.store.watch(changed).await?;
        *self.watch.borrow_mut() = Some(watch);
        Ok(())
    }
}

/// Steps the state machine as time passes.
async fn tick(this: Weak<GatewayRunner>) {
    loop {
        let Some(interval) = this.upgrade().map(|runner| runner.machine.borrow().tick_interval()) else { return };
        sleep(interval).await;
        let Some(runner) = this.upgrade().filter(|runner| runner.ended.get().is_none()) else { return };
        runner.step(GatewayEvent::Load(runner.host.loads()));
    }
}

/// Looks whether the record has changed, which also shows that the pool is reached, and restores a lost watch.
async fn look(this: Weak<GatewayRunner>) {
    loop {
        let Some(lease) = this.upgrade().map(|runner| runner.record().policy().lease()) else { return };
        sleep(lease / LOOKS_PER_LEASE).await;
        let Some(runner) = this.upgrade().filter(|runner| runner.ended.get().is_none()) else { return };
        runner.refresh();
        let lost = runner.watch.borrow().as_ref().is_none_or(RecordWatch::is_broken);
        if lost && let Err(error) = runner.watch_record().await {
            tracing::debug!(group = runner.store.name(), %error, "cannot watch the record of a gateway group");
        }
    }
}

/// Returns the starts whose clients watch the record.
async fn present(store: &GroupStore, record: &GroupRecord) -> Option<BTreeSet<(MemberId, StartId)>> {
    let watchers = match store.watchers().await {
        Ok(watchers) => watchers,
        Err(error) => {
            tracing::debug!(group = store.name(), %error, "cannot list who watches the record of a gateway group");
            return None;
        }
    };
    let watches = |entry: &GatewayMember| {
        entry.clients.iter().any(|client| watchers.iter().any(|watcher| watcher.address == *client))
    };
    let members = record.members().iter().filter(|(_, entry)| watches(entry));
    Some(members.map(|(id, entry)| (*id, entry.start)).collect())
}
