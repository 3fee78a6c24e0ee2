//! Names by which hosts know a group, and its NVMe subsystem and iSCSI target here, which exist before this daemon has joined
//! again.

use std::cell::{Cell, RefCell};
use std::ops::RangeInclusive;
use std::rc::Rc;
use std::time::Duration;

use forebay_gateways::GroupRecord;
use forebay_gateways::record::GROUP_MEMBERS_MAX;
use forebay_iscsi::PortGroups;
use forebay_nvmf::AnaGrouping;
use forebay_reactor::{sleep, spawn};
use serde::{Deserialize, Serialize};

use super::exports::has_paths;
use super::hosts::GroupHosts;
use super::settings::GroupSettings;
use super::{Gateways, JoinedGroup, paths};
use crate::api::Front;
use crate::engine::Engine;
use crate::failure::{Failure, FailureKind, Result};

/// Number of NVMe controller ids of each member.
const CNTLIDS: u16 = 500;
/// Longest time for which hosts that are admitted wait for exports that are not published yet.
pub(super) const PUBLISHING: Duration = Duration::from_secs(10);
/// Longest time for which Connects are refused after a start.  Linux gives a path up after 10 minutes.
const HELD: Duration = Duration::from_secs(5 * 60);

/// Names by which hosts know a group, and the slot of this member, which its NVMe controller ids follow from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct GroupNames {
    /// Pool and name of the group.
    pub(super) group: String,
    pub(super) nqn: String,
    pub(super) target: String,
    pub(super) slot: u16,
}

impl GroupNames {
    fn cntlids(&self) -> RangeInclusive<u16> {
        self.slot * CNTLIDS + 1..=(self.slot + 1) * CNTLIDS
    }
}

/// Subsystem and target of the group here.
#[derive(Default)]
pub(super) struct HostPaths {
    /// Names of those that exist; `None` while they are not known.
    names: RefCell<Option<GroupNames>>,
    /// Set once the exports are published: hosts are refused before, as they would miss their volumes.
    open: Cell<bool>,
    /// Last error that was logged.
    last_error: RefCell<Option<String>>,
}

impl HostPaths {
    /// Returns the names, once they are known.
    pub(super) fn names(&self) -> Option<GroupNames> {
        self.names.borrow().clone()
    }

    /// Returns whether hosts may come.
    pub(super) fn are_open(&self) -> bool {
        self.open.get()
    }

    /// Logs a failure, once.
    pub(super) fn report(&self, failure: &Failure) {
        let text = failure.to_string();
        if self.last_error.replace(Some(text.clone())).as_ref() != Some(&text) {
            tracing::error!(error = text, "paths of hosts to a gateway group are not complete here");
        }
    }
}

impl Gateways {
    /// Returns the names of a group as this daemon knew them last.
    fn cached_names(&self, group: &str) -> Option<GroupNames> {
        let names = self.stored().ok()?.names?;
        (names.group == group && names.slot < GROUP_MEMBERS_MAX).then_some(names)
    }

    /// Keeps the names of a group, and its hosts.
    fn cache_names(&self, names: &GroupNames, hosts: &GroupHosts) -> Result<()> {
        let mut stored = self.stored()?;
        if stored.names.as_ref() == Some(names) {
            return Ok(());
        }
        stored.names = Some(names.clone());
        stored.hosts.clone_from(hosts);
        self.store(&stored)
    }
}

impl JoinedGroup {
    /// Creates the subsystem and the target by the names that are cached, if they are.  Until hosts may come, they are told to
    /// try again.
    pub(super) fn prepare_paths(&self, engine: &Engine) {
        engine.fronts.hide_empty_defaults(true);
        match engine.gateways.cached_names(&self.spec.to_string()) {
            Some(names) => {
                self.restore_hosts(engine);
                self.create_paths(engine, names);
            }
            None => engine.fronts.set_expecting(true),
        }
    }

    fn create_paths(&self, engine: &Engine, names: GroupNames) {
        self.host_paths.names.replace(Some(names));
        for created in [self.ensure_subsystem(engine), self.ensure_target(engine)] {
            if let Err(failure) = created {
                self.host_paths.report(&failure);
            }
        }
        engine.fronts.set_expecting(false);
        if !self.host_paths.are_open() {
            self.open_paths_in(HELD);
        }
    }

    /// Returns the names, or why they are not known.
    pub(super) fn must_have_names(&self) -> Result<GroupNames> {
        self.host_paths.names().ok_or_else(|| {
            let why = self.host_paths.last_error.borrow().clone();
            let why = why.unwrap_or_else(|| "this daemon has not joined it yet".into());
            Failure::new(FailureKind::Unreachable, format!("the names of the group {} are not known: {why}", self.spec))
        })
    }

    /// Follows the names that the record has.  Subsystem and target of other names, or with controller ids of another slot,
    /// are replaced.
    pub(super) fn follow_names(self: &Rc<Self>, record: &GroupRecord) {
        let (Some(engine), Some(own)) = (self.current_engine(), record.member(self.own)) else { return };
        let GroupSettings { nqn, target, hosts } = match GroupSettings::of(record.identity()) {
            Ok(settings) => settings,
            // The former names stay.
            Err(failure) => return self.host_paths.report(&failure),
        };
        self.follow_hosts(&engine, &hosts);
        let names = GroupNames { group: self.spec.to_string(), nqn, target, slot: own.slot };
        let former = self.host_paths.names();
        if former.as_ref() == Some(&names) {
            return;
        }
        if let Some(former) = former {
            tracing::warn!(group = %self.spec, ?former, ?names, "the group has other names than before: hosts see others");
            self.remove_paths(&engine, &former, &names);
        }
        if let Err(failure) = engine.gateways.cache_names(&names, &hosts) {
            tracing::warn!(group = %self.spec, error = %failure, "cannot keep the names of a gateway group");
        }
        self.create_paths(&engine, names);
    }

    /// Removes what has another name now, with its exports; those are published again.
    fn remove_paths(self: &Rc<Self>, engine: &Rc<Engine>, former: &GroupNames, names: &GroupNames) {
        self.host_paths.open.set(false);
        if self.hosts_admitted.get() {
            self.open_paths_in(PUBLISHING);
        }
        if (&former.nqn, former.slot) != (&names.nqn, names.slot) {
            self.end_all_exports(engine, Front::Nvme);
            engine.fronts.nvme().remove(&former.nqn);
        }
        if former.target != names.target {
            self.end_all_exports(engine, Front::Iscsi);
            let (engine, target) = (engine.clone(), former.target.clone());
            drop(spawn(async move { engine.fronts.iscsi().remove(&target).await }));
        }
    }

    /// Removes subsystem and target: this daemon is no longer a member.
    pub(super) async fn forget_paths(&self, engine: &Engine) {
        engine.fronts.set_expecting(false);
        engine.fronts.hide_empty_defaults(false);
        if let Some(names) = self.host_paths.names.take() {
            engine.fronts.nvme().remove(&names.nqn);
            engine.fronts.iscsi().remove(&names.target).await;
        }
    }

    /// Creates the NVMe subsystem of the group here, with the controller ids of this member.
    pub(super) fn ensure_subsystem(&self, engine: &Engine) -> Result<()> {
        let names = self.must_have_names()?;
        if engine.fronts.nvme().subsystem(Some(&names.nqn)).is_ok() {
            return Ok(());
        }
        let (access, grouping) = (self.nvme_access(engine), AnaGrouping::ByNamespace);
        let held = !self.host_paths.are_open();
        engine
            .fronts
            .nvme()
            .create_with(&names.nqn, &access, names.cntlids(), grouping, |subsystem| subsystem.set_held(held))?;
        self.update_paths();
        Ok(())
    }

    /// Creates the iSCSI target of the group here, as the port group of this member.
    pub(super) fn ensure_target(&self, engine: &Engine) -> Result<()> {
        let names = self.must_have_names()?;
        let front = engine.fronts.iscsi();
        if front.target(Some(&names.target)).is_ok() {
            return Ok(());
        }
        front.name_portals()?;
        let own = PortGroups::new(paths::target_port(names.slot), Vec::new());
        let own = own.map_err(|error| Failure::invalid(error.to_string()))?;
        front.create_shared(&names.target, &self.iscsi_access(engine), own)?;
        self.update_paths();
        Ok(())
    }

    /// Lets hosts come, once all exports that they may have had here are published; or now, if they must not wait longer.
    pub(super) fn open_paths(&self, overdue: bool) {
        let (Some(engine), Some(_)) = (self.current_engine(), self.host_paths.names()) else { return };
        if self.host_paths.are_open() {
            return;
        }
        let is_published = || {
            let all = self.settings.all();
            let mut exports = all.iter().flat_map(|(name, settings)| {
                settings.exports.iter().filter(|export| has_paths(export.front)).map(move |export| (name, export.front))
            });
            exports.all(|(name, front)| self.exports.is_published(name, front))
        };
        let is_due = overdue || (self.serves_hosts() && is_published());
        if !is_due {
            return;
        }
        self.host_paths.open.set(true);
        self.update_paths();
        if let Some(subsystem) = self.subsystem(&engine) {
            subsystem.set_held(false);
        }
    }

    /// Lets hosts come after some time, whatever is missing.
    pub(super) fn open_paths_in(&self, time: Duration) {
        let group = self.this.clone();
        drop(spawn(async move {
            sleep(time).await;
            let Some(group) = group.upgrade() else { return };
            // Its slot may be another member's.
            let is_member = |record: Rc<GroupRecord>| record.member(group.own).is_some();
            if group.record().is_none_or(is_member) && (time == HELD || group.serves_hosts()) {
                group.open_paths(true);
            }
        }));
    }
}
