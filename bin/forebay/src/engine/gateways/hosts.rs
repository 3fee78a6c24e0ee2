//! Hosts that may use the group's NVMe subsystem and iSCSI target: those that the record lists, or those of each member's
//! configuration.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use forebay_gateways::GroupIdentity;
use forebay_gateways::record::GroupChange;
use forebay_reactor::spawn;
use serde::{Deserialize, Serialize};

use super::settings::{self, GroupSettings};
use super::{Gateways, JoinedGroup};
use crate::api::{Front, GatewayHostSource, NvmeHost};
use crate::config::{IscsiAccess, NvmeAccess};
use crate::engine::Engine;
use crate::engine::access::read_readable;
use crate::engine::offload::offload;
use crate::failure::{Failure, FailureKind, Result};

/// Lists of hosts in the record of a group.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GroupHosts {
    /// Whose hosts are admitted.
    #[serde(default)]
    pub source: GatewayHostSource,
    /// Hosts of the group's NVMe subsystem.  Their secrets and keys are files of these names at each member.
    #[serde(default)]
    pub nvme: Vec<NvmeHost>,
    /// Initiators of the group's iSCSI target.
    #[serde(default)]
    pub initiators: Vec<String>,
}

impl GroupHosts {
    /// Returns whether nothing was ever set.
    pub fn is_default(&self) -> bool {
        *self == Self::default()
    }
}

/// Lists of the record as this member follows them.
#[derive(Default)]
pub(super) struct AdmittedHosts {
    lists: RefCell<GroupHosts>,
    /// Listed NVMe hosts, with the secrets and keys that their files held when they were last read.
    nvme: RefCell<Option<NvmeAccess>>,
    /// Number of times that the files were read: an earlier reading that ends late is not used.
    readings: Cell<u64>,
}

impl AdmittedHosts {
    /// Returns whether the lists of the record count.
    fn are_listed(&self) -> bool {
        self.lists.borrow().source == GatewayHostSource::Group
    }
}

impl Gateways {
    /// Returns the group, if the NVMe subsystem of this NQN is its own.
    pub fn with_subsystem(&self, nqn: Option<&str>) -> Option<Rc<JoinedGroup>> {
        let is_its = |joined: &Rc<JoinedGroup>| joined.host_paths.names().is_some_and(|names| Some(&*names.nqn) == nqn);
        self.joined().filter(is_its)
    }

    /// Returns the group, if the iSCSI target of this name is its own.
    pub fn with_target(&self, name: Option<&str>) -> Option<Rc<JoinedGroup>> {
        let is_its = |joined: &Rc<JoinedGroup>| {
            let names = joined.host_paths.names();
            names.zip(name).is_some_and(|(names, name)| names.target.eq_ignore_ascii_case(name))
        };
        self.joined().filter(is_its)
    }

    fn cache_hosts(&self, hosts: &GroupHosts) -> Result<()> {
        let mut stored = self.stored()?;
        stored.hosts.clone_from(hosts);
        self.store(&stored)
    }
}

impl JoinedGroup {
    /// Returns the access to the group's NVMe subsystem here.
    pub(super) fn nvme_access(&self, engine: &Engine) -> NvmeAccess {
        match self.hosts.are_listed() {
            true => self.hosts.nvme.borrow().clone().unwrap_or_else(NvmeAccess::nobody),
            false => engine.fronts.nvme().configured(),
        }
    }

    /// Returns the access to the group's iSCSI target here.  CHAP is that of the configuration.
    pub fn iscsi_access(&self, engine: &Engine) -> IscsiAccess {
        let configured = engine.fronts.iscsi().configured();
        match self.hosts.are_listed() {
            true => IscsiAccess { initiators: Some(self.hosts.lists.borrow().initiators.clone()), ..configured },
            false => configured,
        }
    }

    /// Follows the lists that this daemon knew last, before hosts may come.
    pub(super) fn restore_hosts(&self, engine: &Engine) {
        if let Ok(stored) = engine.gateways.stored() {
            self.hosts.lists.replace(stored.hosts);
            self.read_at_once();
        }
    }

    /// Reads the files of hosts at once: hosts are waiting for nothing else, or none can be there yet.
    fn read_at_once(&self) {
        let hosts = self.hosts.lists.borrow().nvme.clone();
        self.hosts.nvme.replace(Some(read_readable(NvmeAccess::nobody(), &hosts, "of the group")));
    }

    /// Follows the lists of the record.
    pub(super) fn follow_hosts(&self, engine: &Rc<Engine>, lists: &GroupHosts) {
        if *self.hosts.lists.borrow() == *lists {
            return;
        }
        self.hosts.lists.replace(lists.clone());
        if let Err(failure) = engine.gateways.cache_hosts(lists) {
            tracing::warn!(group = %self.spec, error = %failure, "cannot keep the hosts of a gateway group");
        }
        match self.host_paths.names() {
            None => self.read_at_once(),
            Some(_) => self.reload_hosts(engine),
        }
    }

    /// Reads the files of listed hosts again, and admits those that may use the group's subsystem and target.
    pub fn reload_hosts(&self, engine: &Engine) {
        self.hosts.readings.set(self.hosts.readings.get() + 1);
        if !self.hosts.are_listed() {
            return self.admit_listed(engine);
        }
        let (group, reading) = (self.this.clone(), self.hosts.readings.get());
        let hosts = self.hosts.lists.borrow().nvme.clone();
        drop(spawn(async move {
            let read = offload(move || Ok(read_readable(NvmeAccess::nobody(), &hosts, "of the group"))).await;
            let Some(group) = group.upgrade().filter(|group| group.hosts.readings.get() == reading) else { return };
            group.hosts.nvme.replace(read.ok());
            if let Some(engine) = group.current_engine() {
                group.admit_listed(&engine);
            }
        }));
    }

    /// Admits the hosts that may use the group's subsystem and target, and disconnects others.
    fn admit_listed(&self, engine: &Engine) {
        let Some(names) = self.host_paths.names() else { return };
        let (nvme, iscsi) = (engine.fronts.nvme(), engine.fronts.iscsi());
        if let Some(subsystem) = nvme.subsystems().get(&names.nqn) {
            nvme.admit(&subsystem, &self.nvme_access(engine));
        }
        if let Some(target) = iscsi.targets().get(&names.target) {
            iscsi.admit(&target, &self.iscsi_access(engine));
        }
    }

    /// Changes the lists in the record.
    async fn change_hosts(&self, change: impl Fn(&mut GroupHosts) -> Result<()>) -> Result<()> {
        self.change(|record| {
            let before = settings_to_change(record.identity())?;
            let mut after = before.clone();
            change(&mut after.hosts)?;
            Ok(match after == before {
                true => Vec::new(),
                false => vec![GroupChange::SetSettings(settings::write(&after))],
            })
        })
        .await
    }

    /// Adds an NVMe host to the list of the record, or replaces its files.
    pub async fn allow_nvme_host(&self, host: &NvmeHost) -> Result<()> {
        self.change_hosts(|hosts| {
            match hosts.nvme.iter_mut().find(|each| each.nqn == host.nqn) {
                Some(listed) => listed.clone_from(host),
                None => hosts.nvme.push(host.clone()),
            }
            Ok(())
        })
        .await?;
        tracing::info!(group = %self.spec, front = "nvme", host = host.nqn, "a host is on the list of a gateway group");
        Ok(())
    }

    /// Removes an NVMe host from the list of the record.
    pub async fn deny_nvme_host(&self, host: &str) -> Result<()> {
        self.change_hosts(|hosts| {
            let before = hosts.nvme.len();
            hosts.nvme.retain(|each| each.nqn != host);
            (hosts.nvme.len() < before).then_some(()).ok_or_else(|| self.unlisted(host))
        })
        .await?;
        tracing::info!(group = %self.spec, front = "nvme", host, "a host is off the list of a gateway group");
        Ok(())
    }

    /// Adds an initiator to the list of the record, or removes it.
    pub async fn admit_initiator(&self, initiator: &str, allowed: bool) -> Result<()> {
        self.change_hosts(|hosts| {
            let before = hosts.initiators.len();
            let listed = hosts.initiators.iter().any(|each| each.eq_ignore_ascii_case(initiator));
            match allowed {
                true if listed => {}
                true => hosts.initiators.push(initiator.to_owned()),
                false => hosts.initiators.retain(|each| !each.eq_ignore_ascii_case(initiator)),
            }
            match allowed || hosts.initiators.len() < before {
                true => Ok(()),
                false => Err(self.unlisted(initiator)),
            }
        })
        .await?;
        tracing::info!(group = %self.spec, front = "iscsi", host = initiator, allowed, "the hosts of a gateway group have changed");
        Ok(())
    }

    fn unlisted(&self, host: &str) -> Failure {
        Failure::new(FailureKind::NotFound, format!("the host {host} is not on the list of the group {}", self.spec))
            .hint("'forebay group status' shows the lists")
    }

    /// Returns the NVMe hosts that the group lists, if its lists count.
    pub fn listed_nvme_hosts(&self) -> Option<Vec<NvmeHost>> {
        self.hosts.are_listed().then(|| self.hosts.lists.borrow().nvme.clone())
    }

    /// Returns the number of volumes that are exported over a front.
    pub fn exports_over(&self, front: Front) -> usize {
        self.settings.all().iter().filter(|(_, settings)| settings.export(front).is_some()).count()
    }
}

/// Reads the settings of a group that are to be changed.
pub(super) fn settings_to_change(identity: &GroupIdentity) -> Result<GroupSettings> {
    match identity.settings.is_null() {
        true => Ok(GroupSettings::new(identity.id)),
        false => settings::read_to_change("the settings of the group", &identity.settings),
    }
}

/// Returns the failure of a change of the group's own subsystem or target.
pub fn of_group(what: &str, name: &str) -> Failure {
    Failure::invalid(format!("{name} is the {what} of the gateway group")).hint("leave the group: forebay group leave")
}
