//! Exports of the group's volumes at this member, which may own them or not.

use std::collections::BTreeMap;
use std::pin::Pin;
use std::rc::{Rc, Weak};

use forebay_block::{BlockDevice, LocalFuture};
use forebay_forward::{ForwardedVolume, ForwarderStart, OwnerLocator, OwnerRoute, ReachableOwner};
use forebay_gateways::VolumeName;
use forebay_nvmf::AnaGrouping;
use forebay_reactor::sync::join_all;
use forebay_reactor::{sleep, spawn};

use super::settings::{GroupSettings, VolumeSettings};
use super::{ByVolume, JoinedGroup, REJOIN};
use crate::api::{AttachRequest, Front};
use crate::engine::Engine;
use crate::engine::fronts::ExportedImage;
use crate::engine::identity::parse_uuid;
use crate::failure::{Failure, FailureKind, Result};
use crate::spec::ImageSpec;

/// Number of NVMe controller ids of each member.
const CNTLIDS: u16 = 500;

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
    /// Withdrawn; connections of hosts are being ended.
    Closing,
}

/// Volumes of the group at this member.
#[derive(Default)]
pub(super) struct GroupExports {
    volumes: ByVolume<PublishedVolume>,
    /// Exports that this member keeps while it must not serve them: hosts keep their paths, and use others.
    suspended: ByVolume<SuspendedExports>,
}

/// Exports of a volume that hosts see as inaccessible, by front.
struct SuspendedExports {
    identity: String,
    exports: BTreeMap<Front, AttachRequest>,
}

/// Returns whether a front can tell hosts that a path is inaccessible for now.  Others end their connections.
fn has_paths(front: Front) -> bool {
    front != Front::Nbd
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
        self.settings.get(name).filter(|_| self.hosts_admitted.get() && self.running().is_some())
    }

    /// Returns the start whose volumes hosts are to reach here.
    fn wanted_start(&self) -> Option<ForwarderStart> {
        self.running().filter(|_| self.hosts_admitted.get()).map(|running| *running.client.start())
    }

    fn reconcile_exports(self: Rc<Self>) {
        let Some(engine) = self.engine() else { return };
        // What was opened in a former start of this member is refused by the others for good.
        let start = self.running().map(|running| *running.client.start());
        let is_stale = |(name, volume): (&VolumeName, &PublishedVolume)| match volume {
            PublishedVolume::Open { device, identity, .. } => {
                let wanted = self.wanted(name);
                wanted.is_none_or(|settings| settings.identity != *identity) || Some(*device.start()) != start
            }
            PublishedVolume::Opening | PublishedVolume::Closing => false,
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
        for (name, settings) in self.settings.all() {
            if self.wanted(&name).is_none() {
                continue;
            }
            let is_new = !self.exports.volumes.borrow().contains_key(&name);
            if is_new {
                self.exports.volumes.borrow_mut().insert(name.clone(), PublishedVolume::Opening);
                drop(spawn(self.clone().open_forwarded(name)));
            } else {
                self.publish_changes(&engine, &name, &settings);
            }
        }
    }

    /// Withdraws suspended exports that the record no longer has.
    fn drop_suspended(&self, engine: &Rc<Engine>) {
        let mut gone = Vec::new();
        self.exports.suspended.borrow_mut().retain(|name, suspended| {
            let settings = self.settings.get(name).filter(|settings| settings.identity == suspended.identity);
            let recorded = |front: &Front, export: &AttachRequest| {
                settings.as_ref().is_some_and(|settings| settings.export(*front) == Some(export))
            };
            let ended = suspended.exports.extract_if(.., |front, export| !recorded(front, export));
            gone.extend(ended.map(|(front, _)| (front, name.clone())));
            !suspended.exports.is_empty()
        });
        for (front, name) in gone {
            if let Ok(spec) = name.as_str().parse::<ImageSpec>() {
                engine.withdraw_group_export(front, &spec);
                let engine = engine.clone();
                drop(spawn(async move { engine.disconnect(front, &spec).await }));
            }
        }
    }

    /// Withdraws everything: this daemon is no longer a member.
    pub(super) fn forget_exports(self: &Rc<Self>) {
        let Some(engine) = self.engine() else { return };
        self.settings.clear();
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

    /// Publishes the exports of an open volume that are new, and withdraws those that have ended or changed.
    fn publish_changes(self: &Rc<Self>, engine: &Rc<Engine>, name: &VolumeName, settings: &VolumeSettings) {
        let Ok(spec) = name.as_str().parse::<ImageSpec>() else { return };
        let (mut withdrawn, mut published_any) = (Vec::new(), false);
        {
            let mut volumes = self.exports.volumes.borrow_mut();
            let Some(PublishedVolume::Open { device, exports, .. }) = volumes.get_mut(name) else { return };
            let is_other = |front: &Front, export: &AttachRequest| settings.export(*front) != Some(export);
            withdrawn.extend(exports.extract_if(.., |front, export| is_other(front, export)).map(|(front, _)| front));
            for front in &withdrawn {
                engine.withdraw_group_export(*front, &spec);
            }
            for export in &settings.exports {
                if exports.contains_key(&export.front) {
                    continue;
                }
                let published = match self.take_suspended(name, export, &settings.identity) {
                    true => {
                        let device: Rc<dyn BlockDevice> = device.clone();
                        engine.resume_group_export(export.front, &spec, &device);
                        Ok(())
                    }
                    false => self.publish(engine, &spec, export, &settings.identity, device),
                };
                match published {
                    Ok(()) => {
                        published_any = true;
                        exports.insert(export.front, export.clone());
                    }
                    Err(failure) => tracing::error!(
                        group = %self.spec, volume = %name, front = export.front.name(), error = %failure,
                        "an export of the group is not served here"
                    ),
                }
            }
        }
        if withdrawn.is_empty() && !published_any {
            // This runs for each volume whenever the record changes.
            return;
        }
        if !withdrawn.is_empty() {
            let engine = engine.clone();
            drop(spawn(async move {
                for front in withdrawn {
                    engine.disconnect(front, &spec).await;
                }
            }));
        }
        self.update_paths();
        self.changed.announce();
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
        export: &AttachRequest,
        identity: &str,
        device: &Rc<ForwardedVolume>,
    ) -> Result<()> {
        let uuid = parse_uuid(identity).ok_or_else(|| {
            Failure::new(FailureKind::Corrupt, format!("'{identity}' is not the identity of a volume"))
        })?;
        match export.front {
            Front::Nbd => {}
            Front::Nvme => self.ensure_subsystem(engine)?,
            Front::Iscsi => self.ensure_target(engine)?,
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
        };
        let device: Rc<dyn BlockDevice> = device.clone();
        engine.publish_group_export(export, &exported, &device)
    }

    /// Creates the NVMe subsystem of the group here, with the controller ids of this member.
    fn ensure_subsystem(&self, engine: &Engine) -> Result<()> {
        let record = self.record().ok_or_else(|| Failure::failed("the record of the group is not known"))?;
        let GroupSettings { nqn, .. } = GroupSettings::of(record.identity());
        if engine.fronts.nvme().subsystem(Some(&nqn)).is_ok() {
            return Ok(());
        }
        let slot = record.member(self.own).map_or(0, |member| member.slot);
        let cntlids = slot * CNTLIDS + 1..=(slot + 1) * CNTLIDS;
        engine.fronts.nvme().create_with(
            &nqn,
            &engine.fronts.nvme().configured(),
            cntlids,
            AnaGrouping::ByNamespace,
        )?;
        self.update_paths();
        Ok(())
    }

    /// Creates the iSCSI target of the group here, as the port group of this member.
    fn ensure_target(&self, engine: &Engine) -> Result<()> {
        let record = self.record().ok_or_else(|| Failure::failed("the record of the group is not known"))?;
        let GroupSettings { target, .. } = GroupSettings::of(record.identity());
        if engine.fronts.iscsi().target(Some(&target)).is_ok() {
            return Ok(());
        }
        engine.fronts.iscsi().name_portals()?;
        let groups = self.port_groups(&record)?;
        engine.fronts.iscsi().create_with(&target, &engine.fronts.iscsi().configured(), Some(groups))?;
        self.update_paths();
        Ok(())
    }

    /// Withdraws a volume from hosts.  Paths that can be inaccessible stay; the other connections are ended.
    ///
    /// Requests in flight complete first.  If this member gives its hosts up, they end when it is certain that they are not
    /// executed after the hosts have sent them again; otherwise that may take as long as their owner does not answer, and other
    /// volumes do not wait.
    fn withdraw(self: &Rc<Self>, engine: &Rc<Engine>, name: &VolumeName) {
        let Ok(spec) = name.as_str().parse::<ImageSpec>() else { return };
        let former = self.exports.volumes.borrow_mut().insert(name.clone(), PublishedVolume::Closing);
        let Some(PublishedVolume::Open { device, exports, identity }) = former else { return };
        let gives_up = !self.leaving.get() && self.wanted_start() != Some(*device.start());
        let settings = self.settings.get(name).filter(|settings| settings.identity == identity);
        let stays = |front: &Front, export: &AttachRequest| {
            has_paths(*front) && settings.as_ref().is_some_and(|settings| settings.export(*front) == Some(export))
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
        for front in ended.keys() {
            engine.withdraw_group_export(*front, &spec);
        }
        let (group, engine, name) = (self.clone(), engine.clone(), name.clone());
        drop(spawn(async move {
            // Connections are told to end before requests do: hosts repeat those that get no answer.
            let disconnected = async {
                for front in ended.keys() {
                    engine.disconnect(*front, &spec).await;
                }
            };
            let given_up = async {
                if gives_up {
                    device.give_up();
                }
                drop(device);
            };
            let both: [Pin<Box<dyn Future<Output = ()> + '_>>; 2] = [Box::pin(disconnected), Box::pin(given_up)];
            join_all(both).await;
            group.exports.volumes.borrow_mut().remove(&name);
            group.changed.announce();
            group.exports.reconcile(&group);
        }));
    }
}
