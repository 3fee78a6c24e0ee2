//! Gateway groups: this daemon as a member of one (`docs/design/gateways.md`).
//!
//! The record of the group says what is exported and who owns each volume.  Here, the owner's volumes are opened and offered
//! to the others (`owner.rs`), and every volume is published to hosts of this daemon, its own or not (`exports.rs`), with a
//! state that tells them which paths to prefer (`paths.rs`).

mod commands;
mod copies;
mod exports;
mod guest_volume;
mod guests;
mod hosts;
mod loads;
mod logs;
mod names;
mod owner;
mod paths;
mod plan;
mod refusals;
mod settings;
mod stale_copies;
#[cfg(test)]
mod tests;

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::rc::{Rc, Weak};
use std::time::Duration;

use forebay_block::LocalFuture;
use forebay_forward::wire::{KIND_EVENT, KIND_REQUEST};
use forebay_forward::{ForwardClient, ForwardHost, ForwarderLimits};
use forebay_gateways::runner::{GatewayHost, GatewayRunner};
use forebay_gateways::store::GroupStore;
use forebay_gateways::wire::{GatewayMessage, KIND_GATEWAY};
use forebay_gateways::{
    CloseReason, EndReason, GatewayMember, GatewayVolume, GroupRecord, MemberId, OpenFailure, StartId, VolumeLoads,
    VolumeName,
};
use forebay_messenger::{Address, Connection, Message};
use forebay_reactor::sync::Notify;
use forebay_reactor::{random, sleep, spawn};
use forebay_writelog::replication::PeerId;
use serde::{Deserialize, Serialize};

use super::Engine;
use super::peers::GroupMessages;
use super::small_files::replace_file;
use crate::api::Front;
use crate::failure::{Failure, FailureKind, Result};
use crate::spec::GroupSpec;
use exports::GroupExports;
pub use hosts::of_group;
use hosts::{AdmittedHosts, GroupHosts};
use logs::OwnedLogs;
use names::{GroupNames, HostPaths};
use owner::OwnedVolumes;
use settings::{MemberSettings, SettingsByMember, SettingsByVolume};

/// Time between attempts to join a group, from the first to the longest.
const REJOIN: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(5));
/// Time that an orderly stop may take until the others fence this daemon instead.
const STOPPING: Duration = Duration::from_secs(10);

/// Content of the file that names the group of a data directory.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
struct StoredMembership {
    #[serde(default)]
    group: Option<String>,
    /// Names of the group that this daemon was last a member of, by its configuration or by `group`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    names: Option<GroupNames>,
    /// Hosts that its members admit.
    #[serde(default, skip_serializing_if = "GroupHosts::is_default")]
    hosts: GroupHosts,
}

/// Membership of this daemon in a gateway group, if it has one.
pub struct Gateways {
    file: PathBuf,
    group: RefCell<Option<Rc<JoinedGroup>>>,
    /// Set once the daemon stops.
    closing: Cell<bool>,
}

impl Gateways {
    /// Creates it for a data directory; nothing is joined yet.
    pub fn new(data: &std::path::Path) -> Self {
        Self { file: data.join("gateway-group.json"), group: RefCell::default(), closing: Cell::new(false) }
    }

    /// Returns the group that this daemon is in.
    pub fn joined(&self) -> Option<Rc<JoinedGroup>> {
        self.group.borrow().clone()
    }

    fn stored(&self) -> Result<StoredMembership> {
        let text = match std::fs::read(&self.file) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(StoredMembership::default()),
            Err(error) => return Err(Failure::io(error, format_args!("reading {}", self.file.display()))),
        };
        serde_json::from_slice(&text).map_err(|error| {
            Failure::new(FailureKind::Corrupt, format!("reading {}: {error}", self.file.display()))
                .hint("remove it, and join the group again: forebay group join POOL/GROUP")
        })
    }

    fn store(&self, stored: &StoredMembership) -> Result<()> {
        let text = serde_json::to_vec(stored).map_err(|error| Failure::failed(error.to_string()))?;
        replace_file(&self.file, &text)
            .map_err(|error| Failure::io(error, format_args!("writing {}", self.file.display())))
    }
}

/// Group that this daemon is a member of, across its starts.
pub struct JoinedGroup {
    spec: GroupSpec,
    own: MemberId,
    engine: Weak<Engine>,
    this: Weak<JoinedGroup>,
    forward_host: Rc<ForwardHost>,
    /// Start that is running.
    running: RefCell<Option<Rc<RunningStart>>>,
    record: RefCell<Option<Rc<GroupRecord>>>,
    /// Settings of the volumes in the record.
    settings: SettingsByVolume,
    /// Settings of the members in the record.
    member_settings: SettingsByMember,
    host_paths: HostPaths,
    hosts: AdmittedHosts,
    /// Addresses that several members list, of which was warned.
    ambiguous: RefCell<BTreeMap<Front, BTreeSet<SocketAddr>>>,
    /// Signaled when the record, a connection, or what is offered here has changed.
    changed: Rc<GroupChanges>,
    owned: OwnedVolumes,
    logs: OwnedLogs,
    exports: GroupExports,
    hosts_admitted: Cell<bool>,
    /// Set while starts of this member follow each other.
    is_running: Cell<bool>,
    /// Set once this daemon leaves the group or stops: it does not join again.
    leaving: Cell<bool>,
    last_error: RefCell<Option<String>>,
}

/// Announcements of changes of the group, as this member sees it.
#[derive(Default)]
struct GroupChanges {
    count: Cell<u64>,
    notify: Notify,
}

impl GroupChanges {
    fn announce(&self) {
        self.count.set(self.count.get() + 1);
        self.notify.notify_all();
    }

    /// Waits for the next announcement after this call.
    fn next(self: &Rc<Self>) -> LocalFuture<()> {
        let (changes, seen) = (self.clone(), self.count.get());
        Box::pin(async move { changes.notify.wait_until(|| changes.count.get() != seen).await })
    }

    /// Waits until something is so, which is announced.
    async fn wait_until(&self, is_so: impl FnMut() -> bool) {
        self.notify.wait_until(is_so).await;
    }
}

/// One start of this member.
struct RunningStart {
    runner: Rc<GatewayRunner>,
    client: Rc<ForwardClient>,
}

impl JoinedGroup {
    fn new(engine: &Rc<Engine>, spec: GroupSpec) -> Rc<Self> {
        Rc::new_cyclic(|this| Self {
            spec,
            own: MemberId(engine.peers.known().own().0),
            engine: Rc::downgrade(engine),
            this: this.clone(),
            forward_host: ForwardHost::new(),
            running: RefCell::default(),
            record: RefCell::default(),
            settings: SettingsByVolume::default(),
            member_settings: SettingsByMember::default(),
            host_paths: HostPaths::default(),
            hosts: AdmittedHosts::default(),
            ambiguous: RefCell::default(),
            changed: Rc::default(),
            owned: OwnedVolumes::default(),
            logs: OwnedLogs::default(),
            exports: GroupExports::default(),
            hosts_admitted: Cell::new(false),
            is_running: Cell::new(false),
            leaving: Cell::new(false),
            last_error: RefCell::default(),
        })
    }

    fn engine(&self) -> Option<Rc<Engine>> {
        self.engine.upgrade()
    }

    /// Returns the engine while this is the group that the daemon is in: the former one must not change what hosts of the
    /// present one see.
    fn current_engine(&self) -> Option<Rc<Engine>> {
        let engine = self.engine()?;
        let is_current = engine.gateways.joined().is_some_and(|joined| std::ptr::eq(&*joined, self));
        is_current.then_some(engine)
    }

    /// Returns the record as this member knows it.
    fn record(&self) -> Option<Rc<GroupRecord>> {
        self.record.borrow().clone()
    }

    fn running(&self) -> Option<Rc<RunningStart>> {
        self.running.borrow().clone()
    }

    /// Returns the running start, or why there is none.
    fn must_run(&self) -> Result<Rc<RunningStart>> {
        self.running().ok_or_else(|| {
            let why = self.last_error.borrow().clone().unwrap_or_else(|| "it has not joined yet".into());
            Failure::new(
                FailureKind::Unreachable,
                format!("this daemon cannot take part in group {}: {why}", self.spec),
            )
        })
    }

    /// Returns an open connection to a member.
    fn connection(&self, member: MemberId) -> Option<Connection> {
        self.engine()?.peers.known().connection(PeerId(member.0))
    }

    /// Keeps connections to the other members, at the addresses that the record has.
    fn connect(&self, record: &GroupRecord) {
        let Some(engine) = self.engine() else { return };
        for (member, entry) in record.members() {
            if *member == self.own || self.connection(*member).is_some() {
                continue;
            }
            for address in entry.peer_addrs.iter().filter_map(|text| text.parse::<Address>().ok()) {
                engine.peers.connect(&address);
            }
        }
    }

    /// Takes part in the group, from now on or still.
    pub fn begin(self: &Rc<Self>) {
        self.leaving.set(false);
        if !self.is_running.replace(true) {
            let group = self.clone();
            drop(spawn(async move {
                group.run().await;
                group.is_running.set(false);
            }));
        }
    }

    /// Begins starts of this member, one after the other, until it leaves.
    async fn run(self: &Rc<Self>) {
        let mut wait = REJOIN.0;
        while !self.leaving.get() {
            match self.start().await {
                Ok(runner) if self.leaving.get() => {
                    // It was to leave while it was joining.
                    runner.stop().await;
                    break;
                }
                Ok(runner) => {
                    self.last_error.take();
                    wait = REJOIN.0;
                    let reason = runner.ended().await;
                    tracing::warn!(group = %self.spec, ?reason, "this daemon's membership has ended in this start");
                    if self.leaving.get() || reason == EndReason::Left {
                        break;
                    }
                    if let Some(engine) = self.engine() {
                        if reason == EndReason::Fenced {
                            // The client of that start is on the blocklist, or will be in a moment.
                            engine.ceph.renew_client();
                        }
                        // The other members take a connection for that of one start.
                        engine.peers.reconnect();
                    }
                }
                Err(failure) => {
                    let text = failure.to_string();
                    if self.last_error.replace(Some(text.clone())).as_ref() != Some(&text) {
                        tracing::warn!(group = %self.spec, error = text, "cannot join a gateway group yet; trying again");
                    }
                }
            }
            sleep(wait).await;
            wait = (wait * 2).min(REJOIN.1);
        }
    }

    async fn start(self: &Rc<Self>) -> Result<Rc<GatewayRunner>> {
        let engine = self.engine().ok_or_else(|| Failure::failed("the daemon has stopped"))?;
        let backend = engine.pool(&self.spec.pool).await?;
        let store = GroupStore::new(&backend, &self.spec.group)?;
        let start = new_start();
        let entry = GatewayMember {
            host: super::peers::host_name(),
            version: env!("CARGO_PKG_VERSION").into(),
            clients: vec![store.shared().identity().address],
            peer_addrs: engine.peers.addrs(),
            settings: settings::write(&MemberSettings {
                nbd: engine.fronts.uri_addrs(Front::Nbd),
                nvme: paths::own_nvme_ports(&engine),
                iscsi: paths::own_portals(&engine)?,
                member_exports: true,
            }),
            ..GatewayMember::new(start)
        };
        let client = ForwardClient::new(start.0, ForwarderLimits::default());
        let host = Rc::new(MemberHost { group: self.clone() });
        let runner = GatewayRunner::start(store, host, self.own, entry).await?;
        if let Some(record) = self.record() {
            client.set_lease(session_lease(&record));
        }
        *self.running.borrow_mut() = Some(Rc::new(RunningStart { runner: runner.clone(), client }));
        if let Some(record) = self.record() {
            self.connect(&record);
        }
        self.update_paths();
        self.exports.reconcile(self);
        Ok(runner)
    }

    /// Stops in order, so that others serve the volumes at once.
    async fn stop(&self) {
        self.leaving.set(true);
        if let Some(running) = self.running()
            && forebay_reactor::timeout(STOPPING, running.runner.stop()).await.is_err()
        {
            tracing::warn!(group = %self.spec, "this daemon could not stop in order; the others fence it");
        }
    }
}

/// Returns the lease of sessions at owners.  It runs out soon after a member that is cut off gives its hosts up, and not while
/// an owner is replaced that has failed.
fn session_lease(record: &GroupRecord) -> Duration {
    2 * record.policy().lease()
}

/// Draws the id of a start.
fn new_start() -> StartId {
    let mut id = [0; 16];
    id[..8].copy_from_slice(&random().to_le_bytes());
    id[8..].copy_from_slice(&random().to_le_bytes());
    StartId(id)
}

impl GroupMessages for JoinedGroup {
    fn message(&self, connection: &Connection, message: Message) -> bool {
        if message.kind == KIND_REQUEST {
            // Answered without a running start too: a request that gets no answer is waited for.
            return self.forward_host.handle(connection, message);
        }
        let Some(running) = self.running() else { return false };
        match message.kind {
            KIND_GATEWAY => {
                match GatewayMessage::decode(&message.front.to_vec()) {
                    Ok(Some(message)) => running.runner.message(message),
                    Ok(None) => {}
                    Err(error) => tracing::warn!(peer = %connection.address(), %error, "malformed message of a peer"),
                }
                true
            }
            KIND_EVENT => running.client.handle(connection, &message),
            _ => false,
        }
    }

    fn connected(&self, _: &Connection) {
        self.changed.announce();
    }

    fn interrupted(&self, connection: &Connection) {
        if let Some(group) = self.this.upgrade() {
            drop(spawn(group.probe(connection.clone())));
        }
    }

    fn lost(&self, connection: &Connection) {
        self.forward_host.forget(connection);
        if let Some(running) = self.running() {
            running.client.reset(connection);
        }
        self.changed.announce();
    }
}

/// Daemon of a member, as its state machine sees it.
struct MemberHost {
    group: Rc<JoinedGroup>,
}

impl GatewayHost for MemberHost {
    fn send(&self, to: MemberId, _: Option<&GatewayMember>, message: &GatewayMessage) {
        if let Some(connection) = self.group.connection(to) {
            // One that is lost is repeated.
            let _ = connection.post(
                Message::new(KIND_GATEWAY)
                    .front(forebay_block::BufList::from(forebay_block::Buf::copy_of(&message.encode()))),
            );
        }
    }

    fn open(
        &self,
        volume: &VolumeName,
        term: u64,
        entry: &GatewayVolume,
    ) -> LocalFuture<std::result::Result<(), OpenFailure>> {
        owner::open(&self.group, volume, term, entry)
    }

    fn prepare(&self, volume: &VolumeName, entry: &GatewayVolume) -> LocalFuture<()> {
        owner::prepare(&self.group, volume, entry)
    }

    fn unprepare(&self, volume: &VolumeName) {
        self.group.owned.unprepare(volume);
    }

    fn close(&self, volume: &VolumeName, _: CloseReason) -> LocalFuture<()> {
        owner::close(&self.group, volume)
    }

    fn admit_hosts(&self, admitted: bool) {
        if self.group.hosts_admitted.replace(admitted) != admitted {
            tracing::info!(group = %self.group.spec, admitted, "hosts of group volumes are admitted or not");
            // At once: hosts must not take this path any more.
            self.group.update_paths();
            self.group.exports.reconcile(&self.group);
            if admitted {
                self.group.open_paths_in(names::PUBLISHING);
            }
        }
    }

    fn loads(&self) -> Rc<VolumeLoads> {
        self.group.owned.loads()
    }

    fn record_changed(&self, record: &Rc<GroupRecord>) {
        let former = self.group.record.replace(Some(record.clone()));
        self.group.settings.update(record);
        if let Some(running) = self.group.running() {
            running.client.set_lease(session_lease(record));
        }
        self.group.member_settings.update(record);
        self.group.follow_names(record);
        self.group.connect(record);
        self.end_fenced_starts(former.as_deref(), record);
        self.group.update_paths();
        self.group.changed.announce();
        self.group.exports.reconcile(&self.group);
    }

    fn ended(&self, _: EndReason) {
        if let Some(former) = self.group.running.take() {
            // What hosts of this member have sent in that start is not executed late by a later one.
            let (host, start) = (self.group.forward_host.clone(), *former.client.start());
            drop(spawn(async move { host.end_start(start).await }));
        }
        self.group.owned.abandon(&self.group);
        self.group.hosts_admitted.set(false);
        self.group.update_paths();
        self.group.exports.reconcile(&self.group);
        self.group.changed.announce();
    }
}

impl MemberHost {
    /// Ends the forwarding sessions of starts that the record no longer names: what they have sent is not executed late.
    fn end_fenced_starts(&self, former: Option<&GroupRecord>, record: &GroupRecord) {
        let Some(former) = former else { return };
        for (member, entry) in former.members().iter().filter(|(_, entry)| entry.state.serves()) {
            if *member != self.group.own && !record.serves(*member, entry.start) {
                let (host, start) = (self.group.forward_host.clone(), entry.start.0);
                drop(spawn(async move { host.end_start(start).await }));
            }
        }
    }
}

/// Volumes by name.
type ByVolume<T> = RefCell<BTreeMap<VolumeName, T>>;
