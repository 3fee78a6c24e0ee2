//! Exports of the group's volumes at this member, which may own them or not.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::rc::{Rc, Weak};

use forebay_block::{BlockDevice, LocalFuture};
use forebay_forward::{ForwardedVolume, ForwarderStart, OwnerLocator, OwnerRoute, ReachableOwner};
use forebay_gateways::VolumeName;
use forebay_reactor::{sleep, spawn};

use super::guests::GuestExports;
use super::settings::{VolumeSettings, is_of_one_member};
use super::{ByVolume, JoinedGroup, REJOIN};
use crate::api::{AttachRequest, Front};
use crate::engine::Engine;
use crate::engine::fronts::{ExportedImage, VhostBinding};
use crate::engine::identity::parse_uuid;
use crate::failure::{Failure, FailureKind, Result};
use crate::spec::ImageSpec;

/// Volume as hosts of this member see it.
enum PublishedVolume {
    /// Being opened at its owner.
    Opening,
    /// Hosts reach it.
    Open {
        device: Rc<ForwardedVolume>,
        identity: String,
        /// Exports that are published.
        exports: BTreeMap<Front, AttachRequest>,
    },
}

/// Volumes of the group at this member.
#[derive(Default)]
pub(super) struct GroupExports {
    volumes: ByVolume<PublishedVolume>,
    /// Exports that this member keeps while it must not serve them: hosts keep their paths, and use others.
    suspended: ByVolume<SuspendedExports>,
    /// Exports that were withdrawn, and whose connections are being ended.
    pub(super) ending: RefCell<BTreeSet<(VolumeName, Front)>>,
    /// Failures of the last attempts to publish exports.
    failures: RefCell<BTreeMap<(VolumeName, Front), Failure>>,
    /// Exports to guests of this machine.
    pub(super) guests: GuestExports,
}

/// Exports of a volume that hosts see as inaccessible, by front.
struct SuspendedExports {
    identity: String,
    exports: BTreeMap<Front, AttachRequest>,
}

/// Returns whether a front can tell hosts that a path is inaccessible for now.  Others end their connections.
pub(super) fn has_paths(front: Front) -> bool {
    matches!(front, Front::Nvme | Front::Iscsi)
}

/// Finds the owner of a volume by the record.
struct RecordLocator {
    group: Weak<JoinedGroup>,
    volume: VolumeName,
}

impl OwnerLocator for RecordLocator {
    fn owner(&self) -> Option<ReachableOwner> {
        let group = self.group.upgrade()?;
        let owner = group.record()?.volume(&self.volume)?.owner;
        let route = match owner.member == group.own {
            true if group.owned.is_open(&self.volume) => OwnerRoute::Local(group.forward_host.clone()),
            true => return None,
            false => OwnerRoute::Remote(group.connection(owner.member)?),
        };
        Some(ReachableOwner { route, term: Some(owner.term) })
    }

    fn changed(&self) -> LocalFuture<()> {
        let Some(group) = self.group.upgrade() else { return Box::pin(std::future::pending()) };
        group.changed.next()
    }
}

impl GroupExports {
    /// Brings what hosts reach here nearer to what the record says.
    pub(super) fn reconcile(&self, group: &JoinedGroup) {
        let Some(group) = group.this.upgrade() else { return };
        // In a task of its own: the caller may be in the middle of a change.
        drop(spawn(async move { group.reconcile_exports() }));
    }

    /// Returns whether any export over a front is kept while this member must not serve it.
    pub(super) fn any_suspended(&self, front: Front) -> bool {
        self.suspended.borrow().values().any(|suspended| suspended.exports.contains_key(&front))
    }

    /// Returns whether an export is kept while this member must not serve it.
    pub(super) fn is_suspended(&self, name: &VolumeName, front: Front) -> bool {
        self.suspended.borrow().get(name).is_some_and(|suspended| suspended.exports.contains_key(&front))
    }

    /// Returns why an export could not be published.
    pub(super) fn failure(&self, name: &VolumeName, front: Front) -> Option<Failure> {
        self.failures.borrow().get(&(name.clone(), front)).cloned()
    }

    /// Notes the outcome of an attempt to publish an export; logs a failure unless it is the one before.
    pub(super) fn published(&self, name: &VolumeName, front: Front, outcome: Result<()>) -> bool {
        let (key, mut failures) = ((name.clone(), front), self.failures.borrow_mut());
        match outcome {
            Ok(()) => {
                failures.remove(&key);
                true
            }
            Err(failure) => {
                let text = failure.to_string();
                let before = failures.insert(key, failure);
                if before.is_none_or(|before| before.to_string() != text) {
                    let front = front.name();
                    tracing::error!(volume = %name, front, error = text, "an export of the group is not served here");
                }
                false
            }
        }
    }

    /// Returns whether hosts reach a volume over a front.
    pub(super) fn is_published(&self, name: &VolumeName, front: Front) -> bool {
        match self.volumes.borrow().get(name) {
            Some(PublishedVolume::Open { exports, .. }) => exports.contains_key(&front),
            _ => false,
        }
    }
}

impl JoinedGroup {
    /// Returns the settings of a volume that hosts are to reach here.
    fn wanted(&self, name: &VolumeName) -> Option<Rc<VolumeSettings>> {
        let wanted = self.settings.get(name).filter(|settings| settings.exports_at(self.own).next().is_some());
        wanted.filter(|_| self.hosts_admitted.get() && self.running().is_some())
    }

    /// Returns the start whose volumes hosts are to reach here.
    fn wanted_start(&self) -> Option<ForwarderStart> {
        self.running().filter(|_| self.hosts_admitted.get()).map(|running| *running.client.start())
    }

    fn reconcile_exports(self: Rc<Self>) {
        let Some(engine) = self.current_engine() else { return };
        // What was opened in a former start of this member is refused by the others for good.
        let start = self.running().map(|running| *running.client.start());
        let is_stale = |(name, volume): (&VolumeName, &PublishedVolume)| match volume {
            PublishedVolume::Open { device, identity, .. } => {
                let wanted = self.wanted(name);
                wanted.is_none_or(|settings| settings.identity != *identity) || Some(*device.start()) != start
            }
            PublishedVolume::Opening => false,
        };
        let stale = |volumes: &BTreeMap<VolumeName, PublishedVolume>| {
            let stale = volumes.iter().filter(|(name, volume)| is_stale((name, volume)));
            stale.map(|(name, _)| name.clone()).collect::<Vec<_>>()
        };
        let gone = stale(&self.exports.volumes.borrow());
        for name in gone {
            self.withdraw(&engine, &name);
        }
        self.drop_suspended(&engine);
        let wanted: Vec<_> = self.settings.all().into_iter().filter(|(name, _)| self.wanted(name).is_some()).collect();
        let is_wanted = |name: &VolumeName, front| {
            self.settings.get(name).is_some_and(|all| all.export_at(self.own, front).is_some())
        };
        self.exports.failures.borrow_mut().retain(|(name, front), _| is_wanted(name, *front));
        self.exports.guests.retain_sockets(|name| is_wanted(name, Front::Vhost));
        // Numbers that others give up are free before any is taken.
        for (name, settings) in &wanted {
            self.withdraw_changes(&engine, name, settings);
        }
        for (name, settings) in wanted {
            let is_new = !self.exports.volumes.borrow().contains_key(&name);
            if is_new {
                self.exports.volumes.borrow_mut().insert(name.clone(), PublishedVolume::Opening);
                drop(spawn(self.clone().open_forwarded(name)));
            } else {
                self.publish_new(&engine, &name, &settings);
            }
        }
        self.open_paths(false);
    }

    /// Withdraws suspended exports that the record no longer has.
    fn drop_suspended(self: &Rc<Self>, engine: &Rc<Engine>) {
        let mut gone = Vec::new();
        self.exports.suspended.borrow_mut().retain(|name, suspended| {
            let settings = self.settings.get(name).filter(|settings| settings.identity == suspended.identity);
            let recorded = |front: &Front, export: &AttachRequest| {
                settings.as_ref().is_some_and(|settings| settings.export_at(self.own, *front) == Some(export))
            };
            let ended = suspended.exports.extract_if(.., |front, export| !recorded(front, export));
            gone.extend(ended.map(|(front, _)| (front, name.clone())));
            !suspended.exports.is_empty()
        });
        for (front, name) in gone {
            self.end_exports(engine, &name, [front]);
        }
    }

    /// Withdraws everything: this daemon is no longer a member.
    pub(super) fn forget_exports(self: &Rc<Self>) {
        let Some(engine) = self.engine() else { return };
        self.settings.clear();
        self.exports.failures.take();
        let names: Vec<VolumeName> = self.exports.volumes.borrow().keys().cloned().collect();
        for name in names {
            self.withdraw(&engine, &name);
        }
        self.drop_suspended(&engine);
    }

    /// Opens a volume at its owner, and publishes it.
    async fn open_forwarded(self: Rc<Self>, name: VolumeName) {
        let mut wait = REJOIN.0;
        loop {
            let identity = || self.wanted(&name).map(|settings| settings.identity.clone());
            let (Some(running), Some(wanted)) = (self.running(), identity()) else {
                self.exports.volumes.borrow_mut().remove(&name);
                return;
            };
            let locator = Rc::new(RecordLocator { group: self.this.clone(), volume: name.clone() });
            match running.client.open(&wanted, locator).await {
                Ok(device) if identity().as_ref() == Some(&wanted) => {
                    let (device, exports) = (Rc::new(device), BTreeMap::new());
                    let open = PublishedVolume::Open { device, identity: wanted, exports };
                    self.exports.volumes.borrow_mut().insert(name.clone(), open);
                    return self.exports.reconcile(&self);
                }
                Ok(_) => {}
                Err(error) => {
                    tracing::debug!(group = %self.spec, volume = %name, %error, "cannot forward a volume yet")
                }
            }
            sleep(wait).await;
            wait = (wait * 2).min(REJOIN.1);
        }
    }

    /// Withdraws the exports of an open volume that have ended or changed.
    fn withdraw_changes(self: &Rc<Self>, engine: &Rc<Engine>, name: &VolumeName, settings: &VolumeSettings) {
        let withdrawn: Vec<Front> = match self.exports.volumes.borrow_mut().get_mut(name) {
            Some(PublishedVolume::Open { exports, .. }) => {
                let is_other =
                    |front: &Front, export: &mut AttachRequest| settings.export_at(self.own, *front) != Some(export);
                exports.extract_if(.., is_other).map(|(front, _)| front).collect()
            }
            _ => return,
        };
        if !withdrawn.is_empty() {
            self.end_exports(engine, name, withdrawn);
            self.update_paths();
            self.changed.announce();
        }
    }

    /// Publishes the exports of an open volume that are new.
    fn publish_new(self: &Rc<Self>, engine: &Rc<Engine>, name: &VolumeName, settings: &VolumeSettings) {
        let Ok(spec) = name.as_str().parse::<ImageSpec>() else { return };
        let mut published_any = false;
        {
            let mut volumes = self.exports.volumes.borrow_mut();
            let Some(PublishedVolume::Open { device, exports, .. }) = volumes.get_mut(name) else { return };
            for export in settings.exports_at(self.own) {
                let is_ending = self.exports.ending.borrow().contains(&(name.clone(), export.front));
                if is_ending || exports.contains_key(&export.front) {
                    continue;
                }
                let socket = match &export.vhost {
                    Some(options) => match self.take_socket(name, options) {
                        Some(socket) => Some(socket),
                        // Exports are reconciled again.
                        None => continue,
                    },
                    None => None,
                };
                let published = match self.take_suspended(name, export, &settings.identity) {
                    true => {
                        let device: Rc<dyn BlockDevice> = device.clone();
                        engine.resume_group_export(export.front, &spec, &device);
                        Ok(())
                    }
                    false => self.publish(engine, &spec, (export, socket.as_ref()), &settings.identity, device),
                };
                let lacks_socket = published.is_err() && socket.is_some();
                if self.exports.published(name, export.front, published) {
                    published_any = true;
                    exports.insert(export.front, export.clone());
                }
                if lacks_socket {
                    self.retry_sockets();
                    // For a command that waits.
                    self.changed.announce();
                }
            }
        }
        if published_any {
            // This runs for each volume whenever the record changes.
            self.update_paths();
            self.changed.announce();
        }
    }

    /// Takes an export out of those that are suspended; returns whether it was one.
    fn take_suspended(&self, name: &VolumeName, export: &AttachRequest, identity: &str) -> bool {
        let mut all = self.exports.suspended.borrow_mut();
        let Some(suspended) = all.get_mut(name).filter(|suspended| suspended.identity == identity) else {
            return false;
        };
        let is_it = suspended.exports.get(&export.front) == Some(export);
        if is_it {
            suspended.exports.remove(&export.front);
            if suspended.exports.is_empty() {
                all.remove(name);
            }
        }
        is_it
    }

    fn publish(
        &self,
        engine: &Rc<Engine>,
        spec: &ImageSpec,
        (export, socket): (&AttachRequest, Option<&VhostBinding>),
        identity: &str,
        device: &Rc<ForwardedVolume>,
    ) -> Result<()> {
        let uuid = parse_uuid(identity).ok_or_else(|| {
            Failure::new(FailureKind::Corrupt, format!("'{identity}' is not the identity of a volume"))
        })?;
        match export.front {
            Front::Nbd | Front::Vhost => {}
            Front::Nvme => self.ensure_subsystem(engine)?,
            Front::Iscsi => {
                self.ensure_target(engine)?;
                let record = self.record().ok_or_else(|| Failure::failed("the record of the group is not known"))?;
                self.port_groups(&record)?;
            }
        }
        let exported = ExportedImage {
            spec,
            unit: export.unit,
            identity: &uuid,
            // A group of its own: its owner changes alone.
            ana_group: export.unit.unwrap_or(1),
            read_only: export.read_only,
            within: export.within(),
            hosts: &export.hosts,
            socket,
        };
        let device: Rc<dyn BlockDevice> = device.clone();
        let device = match socket {
            Some(_) => self.exports.guests.wrap(&VolumeName::new(spec.to_string()), device),
            None => device,
        };
        engine.publish_group_export(export, &exported, &device)
    }

    /// Withdraws a volume from hosts.  Paths that can be inaccessible stay; the other connections are ended.
    ///
    /// Requests in flight complete first.  If this member gives its hosts up, they end when it is certain that they are not
    /// executed after the hosts have sent them again.
    fn withdraw(self: &Rc<Self>, engine: &Rc<Engine>, name: &VolumeName) {
        let former = self.exports.volumes.borrow_mut().remove(name);
        let Some(PublishedVolume::Open { device, exports, identity }) = former else { return };
        let gives_up = !self.leaving.get() && self.wanted_start() != Some(*device.start());
        let settings = self.settings.get(name).filter(|settings| settings.identity == identity);
        let stays = |front: &Front, export: &AttachRequest| {
            has_paths(*front)
                && settings.as_ref().is_some_and(|settings| settings.export_at(self.own, *front) == Some(export))
        };
        let (kept, ended): (BTreeMap<_, _>, BTreeMap<_, _>) =
            exports.into_iter().partition(|(front, export)| stays(front, export));
        if !kept.is_empty() {
            let mut all = self.exports.suspended.borrow_mut();
            let nothing = || SuspendedExports { identity, exports: BTreeMap::new() };
            all.entry(name.clone()).or_insert_with(nothing).exports.extend(kept);
            drop(all);
            self.update_paths();
        }
        self.end_exports(engine, name, ended.into_keys());
        if gives_up {
            // After its connections are told to end, which `end_exports` has begun: hosts repeat requests that get no answer.
            drop(spawn(async move { device.give_up() }));
        }
    }

    /// Withdraws exports of a volume, and ends the connections to them.  They are published again only when that is done; the
    /// volume's other exports do not wait.
    ///
    /// Requests in flight complete first, which may take as long as their owner does not answer.
    fn end_exports(self: &Rc<Self>, engine: &Rc<Engine>, name: &VolumeName, fronts: impl IntoIterator<Item = Front>) {
        let Ok(spec) = name.as_str().parse::<ImageSpec>() else { return };
        for front in fronts {
            engine.withdraw_group_export(front, &spec);
            let ending = (name.clone(), front);
            self.exports.ending.borrow_mut().insert(ending.clone());
            let (group, engine, spec) = (self.clone(), engine.clone(), spec.clone());
            let guest = if is_of_one_member(front) { self.exports.guests.take(name) } else { None };
            drop(spawn(async move {
                match guest {
                    Some(guest) => guest.end(engine.disconnect(front, &spec)).await,
                    None => engine.disconnect(front, &spec).await,
                }
                group.exports.ending.borrow_mut().remove(&ending);
                group.changed.announce();
                group.exports.reconcile(&group);
            }));
        }
    }

    /// Ends the exports of all volumes over a front, those that are kept as well.
    pub(super) fn end_all_exports(self: &Rc<Self>, engine: &Rc<Engine>, front: Front) {
        let mut ended: BTreeSet<VolumeName> = BTreeSet::new();
        self.exports.suspended.borrow_mut().retain(|name, suspended| {
            if suspended.exports.remove(&front).is_some() {
                ended.insert(name.clone());
            }
            !suspended.exports.is_empty()
        });
        for (name, volume) in self.exports.volumes.borrow_mut().iter_mut() {
            if let PublishedVolume::Open { exports, .. } = volume
                && exports.remove(&front).is_some()
            {
                ended.insert(name.clone());
            }
        }
        for name in ended {
            self.end_exports(engine, &name, [front]);
        }
    }
}
