//! iSCSI targets and their initiators.

use forebay_iscsi::Target;
use forebay_reactor::sync::Permit;

use super::file::{AccessFile, TargetEntry};
use super::{last_of_default, of_configuration};
use crate::api::{self, CreateIscsiTargetRequest, Front};
use crate::config::{IscsiAccess, IscsiTargetSettings, check_iqn};
use crate::engine::Engine;
use crate::engine::exports::check_initiators;
use crate::engine::gateways::of_group;
use crate::engine::offload::offload;
use crate::failure::{Failure, FailureKind, Result};

/// Returns the access with initiators that were added.
fn with_added(mut access: IscsiAccess, added: &[String]) -> IscsiAccess {
    if !added.is_empty() {
        access.initiators.get_or_insert_default().extend(added.iter().cloned());
    }
    access
}

/// Reads the secrets of a target that was added.
fn read_target(entry: &TargetEntry) -> Result<IscsiAccess> {
    let initiators = (!entry.any_initiator).then(|| entry.initiators.clone());
    IscsiAccess::read(initiators, entry.chap.as_ref(), entry.mutual_chap.as_ref())
}

/// Snapshot of the access that the configuration and the files define.
pub(in crate::engine) struct ReadTargets {
    configured: IscsiTargetSettings,
    /// Access of the default target, with the initiators that were added.
    default: IscsiAccess,
    /// Access of the targets that were added, by name.
    added: Vec<(String, IscsiAccess)>,
}

impl Engine {
    pub(super) fn restore_iscsi_access(&self) {
        let Some(daemon) = &self.options.daemon else { return };
        let front = self.fronts.iscsi();
        let added = self.access.file.borrow();
        let configured = daemon.config.iscsi_target.access.clone();
        front.admit(front.default_target(), &with_added(configured, &added.default_initiators));
        for entry in &added.iscsi_targets {
            let access = read_or_nobody(entry);
            if let Err(failure) = front.create(&entry.name, &access) {
                tracing::error!(target_name = entry.name, error = %failure.message, "an iSCSI target is not served");
            }
        }
    }

    /// Re-reads the secrets of all targets without applying them.
    ///
    /// # Errors
    /// Failure of the first target whose files cannot be read.
    pub(in crate::engine) async fn read_iscsi_access(&self, configured: &IscsiTargetSettings) -> Result<ReadTargets> {
        let (file, configured): (AccessFile, _) = (self.access.file.borrow().clone(), configured.clone());
        offload(move || {
            let default = with_added(configured.access.clone(), &file.default_initiators);
            let read = |entry: &TargetEntry| Ok((entry.name.clone(), read_target(entry)?));
            let added = file.iscsi_targets.iter().map(read).collect::<Result<_>>()?;
            Ok(ReadTargets { configured, default, added })
        })
        .await
    }

    /// Applies the initiators that may log in to each target.
    pub(in crate::engine) fn apply_iscsi_access(&self, read: ReadTargets) {
        let front = self.fronts.iscsi();
        front.set_discovery_chap(&read.configured);
        front.set_configured(read.configured.access);
        front.admit(front.default_target(), &read.default);
        for (name, access) in read.added {
            if let Some(target) = front.targets().get(&name) {
                front.admit(&target, &access);
            }
        }
    }

    /// Returns the name of a target in the form that the file uses: `None` for the default one.
    fn added_iqn(&self, name: Option<&str>) -> Option<String> {
        let name = name?.to_ascii_lowercase();
        (name != self.fronts.iscsi().default_target().name()).then_some(name)
    }

    /// Lists the targets, the default one first.
    pub fn list_iscsi_targets(&self) -> Vec<api::IscsiTarget> {
        let front = self.fronts.iscsi();
        let mut all = vec![self.describe_iscsi_target(front.default_target())];
        let added = self.access.file.borrow();
        let added = added.iscsi_targets.iter().filter_map(|entry| front.targets().get(&entry.name));
        all.extend(added.map(|target| self.describe_iscsi_target(&target)));
        let of_group =
            front.targets().all().into_iter().filter(|each| self.gateways.with_target(Some(each.name())).is_some());
        all.extend(of_group.map(|target| self.describe_iscsi_target(&target)));
        all
    }

    fn describe_iscsi_target(&self, target: &Target) -> api::IscsiTarget {
        let file = self.access.file.borrow();
        let entry = file.iscsi_targets.iter().find(|entry| entry.name == target.name());
        let group = self.gateways.with_target(Some(target.name()));
        let initiators = match (entry, &group) {
            (Some(entry), _) => (!entry.any_initiator).then(|| entry.initiators.clone()),
            (None, Some(group)) => group.iscsi_access(self).initiators,
            (None, None) => with_added(self.fronts.iscsi().configured(), &file.default_initiators).initiators,
        };
        let chap = target.access().chap;
        let name = |name: &str| name.to_owned();
        api::IscsiTarget {
            name: target.name().to_owned(),
            is_default: entry.is_none() && group.is_none(),
            any_initiator: initiators.is_none(),
            initiators: initiators.unwrap_or_default(),
            chap: chap.as_ref().map(|chap| name(&chap.initiator.name)),
            mutual_chap: chap.as_ref().and_then(|chap| Some(name(&chap.target.as_ref()?.name))),
            exports: match &group {
                Some(group) => group.exports_over(Front::Iscsi),
                None => self.exports_within(Front::Iscsi, self.added_iqn(Some(target.name())).as_deref()),
            },
            sessions: target.session_count(),
        }
    }

    /// Creates a target.
    ///
    /// # Errors
    /// If its name is taken or invalid, or a secret cannot be read; nothing has changed then.
    pub async fn create_iscsi_target(&self, request: CreateIscsiTargetRequest) -> Result<api::IscsiTarget> {
        let CreateIscsiTargetRequest { name, any_initiator, initiators, chap, mutual_chap } = request;
        check_iqn(&name, "the new target")?;
        check_initiators(&initiators)?;
        if any_initiator && !initiators.is_empty() {
            return Err(Failure::invalid("a target admits either every initiator or those that are named: choose one"));
        }
        let front = self.fronts.iscsi();
        let name = name.to_ascii_lowercase();
        let exists = || Failure::new(FailureKind::Exists, format!("the target {name} exists already"));
        if front.targets().get(&name).is_some() {
            return Err(exists());
        }
        let entry = TargetEntry { name: name.clone(), any_initiator, initiators, chap, mutual_chap };
        let reading = entry.clone();
        let access = offload(move || read_target(&reading)).await?;
        let turn = self.access_turn().await;
        self.change_access(&turn, |file| {
            if front.targets().get(&name).is_some() || file.iscsi_targets.iter().any(|each| each.name == name) {
                return Err(exists());
            }
            file.iscsi_targets.push(entry);
            Ok(())
        })
        .await?;
        let target = front.create(&name, &access)?;
        tracing::info!(target_name = name, chap = access.chap.is_some(), "an iSCSI target is created");
        Ok(self.describe_iscsi_target(&target))
    }

    /// Removes a target that has no exports; its sessions end.
    ///
    /// # Errors
    /// If there is none of that name, it has exports, or it is the default one.
    pub async fn remove_iscsi_target(&self, name: &str) -> Result<()> {
        let front = self.fronts.iscsi();
        front.target(Some(name))?;
        if self.gateways.with_target(Some(name)).is_some() {
            return Err(of_group("target", name));
        }
        let Some(name) = self.added_iqn(Some(name)) else { return Err(of_configuration("target", name)) };
        // From here on no new export finds it; exports that found it before are seen.
        let turn = self.access_turn().await;
        let removal = front.begin_removal(&name);
        self.change_access(&turn, |file| {
            self.check_unused(Front::Iscsi, &name)?;
            file.iscsi_targets.retain(|each| each.name != name);
            Ok(())
        })
        .await?;
        front.remove(&name).await;
        drop(removal);
        tracing::info!(target_name = name, "an iSCSI target is removed");
        Ok(())
    }

    /// Allows an initiator to log in to a target.
    ///
    /// # Errors
    /// If the target admits every initiator, or the name is invalid; nothing has changed then.
    pub async fn allow_initiator(&self, name: Option<&str>, initiator: &str) -> Result<api::IscsiTarget> {
        let target = self.fronts.iscsi().target(name)?;
        check_initiators(&[initiator.to_owned()])?;
        if let Some(group) = self.gateways.with_target(name) {
            group.admit_initiator(initiator, true).await?;
            return Ok(self.describe_iscsi_target(&target));
        }
        let added = self.added_iqn(name);
        if self.describe_iscsi_target(&target).any_initiator {
            let what = format!(
                "every initiator may log in to {}: a list with one name would exclude the others",
                target.name()
            );
            let hint = match added {
                None => "list them in the configuration ([iscsi-target] initiators = [...]), and say: forebay reload",
                Some(_) => "make another target, with initiators, and attach the images there",
            };
            return Err(Failure::invalid(what).hint(hint));
        }
        let turn = self.access_turn().await;
        self.change_access(&turn, |file| {
            let initiators = file.initiators_mut(added.as_deref()).ok_or_else(|| gone(target.name()))?;
            initiators.retain(|each| !each.eq_ignore_ascii_case(initiator));
            initiators.push(initiator.to_owned());
            Ok(())
        })
        .await?;
        self.renew_iscsi_access(&turn, &target, added.as_deref()).await;
        drop(turn);
        tracing::info!(front = "iscsi", host = initiator, target_name = target.name(), "a host is allowed");
        Ok(self.describe_iscsi_target(&target))
    }

    /// Revokes an initiator's login to a target, and ends its sessions after their commands in flight complete.
    ///
    /// # Errors
    /// If it is not listed, or is listed in the configuration.
    pub async fn deny_initiator(&self, name: Option<&str>, initiator: &str) -> Result<api::IscsiTarget> {
        let target = self.fronts.iscsi().target(name)?;
        if let Some(group) = self.gateways.with_target(name) {
            group.admit_initiator(initiator, false).await?;
            return Ok(self.describe_iscsi_target(&target));
        }
        let added = self.added_iqn(name);
        let turn = self.access_turn().await;
        let listed = self.fronts.iscsi().configured().initiators;
        self.change_access(&turn, |file| {
            if added.is_none() && listed.iter().flatten().any(|each| each.eq_ignore_ascii_case(initiator)) {
                return Err(Failure::invalid(format!("the initiator {initiator} is listed in the configuration"))
                    .hint("remove it there, and run: forebay reload"));
            }
            let initiators = file.initiators_mut(added.as_deref()).ok_or_else(|| gone(target.name()))?;
            let before = initiators.len();
            initiators.retain(|each| !each.eq_ignore_ascii_case(initiator));
            if initiators.len() == before {
                let what = format!("the initiator {initiator} is not on the list of {}", target.name());
                return Err(Failure::new(FailureKind::NotFound, what).hint("'forebay iscsi-target ls' shows the lists"));
            }
            match added.is_none() && listed.is_none() && initiators.is_empty() {
                true => Err(last_of_default(initiator)),
                false => Ok(()),
            }
        })
        .await?;
        self.renew_iscsi_access(&turn, &target, added.as_deref()).await;
        drop(turn);
        tracing::info!(
            front = "iscsi",
            host = initiator,
            target_name = target.name(),
            "a host is not allowed any more"
        );
        Ok(self.describe_iscsi_target(&target))
    }

    /// Applies the current list of a target.  Its secrets stay as they were read; those that could not be read are
    /// read again, and until then no initiator is admitted.
    async fn renew_iscsi_access(&self, _turn: &Permit, target: &Target, name: Option<&str>) {
        let front = self.fronts.iscsi();
        let Some(name) = name else {
            let access = with_added(front.configured(), &self.access.file.borrow().default_initiators);
            return front.admit(target, &access);
        };
        let entry = self.access.file.borrow().iscsi_targets.iter().find(|entry| entry.name == name).cloned();
        let Some(entry) = entry else { return };
        let access = match (&entry.chap, target.access().chap) {
            (Some(_), None) => offload(move || Ok(read_or_nobody(&entry))).await.unwrap_or_else(|_| nobody()),
            (_, chap) => IscsiAccess { initiators: (!entry.any_initiator).then_some(entry.initiators), chap },
        };
        front.admit(target, &access);
    }
}

/// Returns access that admits no initiator.
fn nobody() -> IscsiAccess {
    IscsiAccess { initiators: Some(Vec::new()), chap: None }
}

/// Reads the secrets of a target that was added.  Without them no initiator is admitted, but its exports keep their
/// target.
fn read_or_nobody(entry: &TargetEntry) -> IscsiAccess {
    read_target(entry).unwrap_or_else(|failure| {
        tracing::error!(target_name = entry.name, error = %failure.message, "no initiator is admitted to a target");
        nobody()
    })
}

/// Returns the failure of a change to a target that was removed meanwhile.
fn gone(name: &str) -> Failure {
    Failure::new(FailureKind::NotFound, format!("the target {name} was removed"))
}
