//! NVMe subsystems and their hosts.

use forebay_nvmf::Subsystem;

use super::file::{AccessFile, SubsystemEntry};
use super::{last_of_default, of_configuration};
use crate::api::{self, CreateNvmeSubsystemRequest, Front, NvmeHost};
use crate::config::{NvmeAccess, NvmeSubsystemSettings, check_nqn};
use crate::engine::Engine;
use crate::engine::gateways::of_group;
use crate::engine::offload::offload;
use crate::failure::{Failure, FailureKind, Result};

/// Reads the secrets and keys of hosts that were added.
///
/// # Errors
/// Failure of the first host whose files cannot be read.
fn read_hosts(mut access: NvmeAccess, hosts: &[NvmeHost]) -> Result<NvmeAccess> {
    hosts.iter().try_for_each(|host| access.add(host))?;
    Ok(access)
}

/// Reads the secrets and keys of hosts that were added; hosts whose files cannot be read are omitted and logged.
pub fn read_readable(mut access: NvmeAccess, hosts: &[NvmeHost], subsystem: &str) -> NvmeAccess {
    for host in hosts {
        // Access restricted to some hosts must not become open if its only host cannot be read.
        access.hosts.get_or_insert_default();
        if let Err(failure) = access.add(host) {
            // The host is not admitted by its configured entry either, which may require weaker proof.
            access.remove(&host.nqn);
            tracing::error!(front = "nvme", host = host.nqn, subsystem, error = %failure.message, "a host is not admitted");
        }
    }
    access
}

/// Returns access without the hosts that were added.
fn base_of(entry: &SubsystemEntry) -> NvmeAccess {
    if entry.any_host { NvmeAccess::default() } else { NvmeAccess::nobody() }
}

/// Snapshot of the access that the configuration and the files define.
pub(in crate::engine) struct ReadAccess {
    configured: NvmeAccess,
    /// Access of the default subsystem, with the hosts that were added.
    default: NvmeAccess,
    /// Access of the subsystems that were added, by name.
    added: Vec<(String, NvmeAccess)>,
}

impl Engine {
    pub(super) fn restore_nvme_access(&self) {
        let Some(daemon) = &self.options.daemon else { return };
        let front = self.fronts.nvme();
        let added = self.access.file.borrow();
        let configured = daemon.config.nvme_subsystem.access.clone();
        front.set_configured(configured.clone());
        let default = front.default_subsystem();
        front.admit(default, &read_readable(configured, &added.default_nvme_hosts, default.nqn()));
        for entry in &added.nvme_subsystems {
            let access = read_readable(base_of(entry), &entry.hosts, &entry.nqn);
            if let Err(failure) = check_nqn(&entry.nqn, "access.json").and_then(|()| front.create(&entry.nqn, &access))
            {
                tracing::error!(subsystem = entry.nqn, error = %failure.message, "an NVMe subsystem is not served");
            }
        }
    }

    /// Re-reads the files of all hosts without applying them.
    ///
    /// # Errors
    /// Failure of the first host whose files cannot be read.
    pub(in crate::engine) async fn read_nvme_access(&self, configured: &NvmeSubsystemSettings) -> Result<ReadAccess> {
        let (added, configured): (AccessFile, _) = (self.access.file.borrow().clone(), configured.clone());
        offload(move || {
            let default = read_hosts(configured.access.clone(), &added.default_nvme_hosts)?;
            default.check_tls(&configured.tls)?;
            let read = |entry: &SubsystemEntry| Ok((entry.nqn.clone(), read_hosts(base_of(entry), &entry.hosts)?));
            let added = added.nvme_subsystems.iter().map(read).collect::<Result<_>>()?;
            Ok(ReadAccess { configured: configured.access, default, added })
        })
        .await
    }

    /// Applies the hosts that may connect to each subsystem.
    pub(in crate::engine) fn apply_nvme_access(&self, read: ReadAccess) {
        let ReadAccess { configured, default, added } = read;
        let front = self.fronts.nvme();
        front.set_configured(configured);
        front.admit(front.default_subsystem(), &default);
        for (nqn, access) in added {
            // A subsystem that was removed meanwhile admits no host.
            if let Some(subsystem) = front.subsystems().get(&nqn) {
                front.admit(&subsystem, &access);
            }
        }
    }

    /// Returns the NQN of a subsystem in the form that the file uses: `None` for the default one.
    fn added_nqn<'a>(&self, nqn: Option<&'a str>) -> Option<&'a str> {
        nqn.filter(|nqn| *nqn != self.fronts.nvme().default_subsystem().nqn())
    }

    /// Lists the subsystems, the default one first.
    pub fn list_nvme_subsystems(&self) -> Vec<api::NvmeSubsystem> {
        let front = self.fronts.nvme();
        let mut all = vec![self.describe_nvme_subsystem(front.default_subsystem())];
        let added = self.access.file.borrow();
        let added = added.nvme_subsystems.iter().filter_map(|entry| front.subsystems().get(&entry.nqn));
        all.extend(added.map(|subsystem| self.describe_nvme_subsystem(&subsystem)));
        let of_group = front
            .subsystems()
            .all()
            .into_iter()
            .filter(|each| self.gateways.with_subsystem(Some(each.nqn())).is_some());
        all.extend(of_group.map(|subsystem| self.describe_nvme_subsystem(&subsystem)));
        all
    }

    fn describe_nvme_subsystem(&self, subsystem: &Subsystem) -> api::NvmeSubsystem {
        let nqn = subsystem.nqn();
        let added = self.access.file.borrow();
        let entry = added.nvme_subsystems.iter().find(|entry| entry.nqn == nqn);
        let group = self.gateways.with_subsystem(Some(nqn));
        let (any_host, hosts) = match (entry, &group) {
            (Some(entry), _) => (entry.any_host, entry.hosts.clone()),
            (None, Some(group)) => {
                let hosts = group.listed_nvme_hosts().or_else(|| self.configured_nvme_hosts());
                (hosts.is_none(), hosts.unwrap_or_default())
            }
            (None, None) => {
                let configured = self.configured_nvme_hosts();
                let any = configured.is_none() && added.default_nvme_hosts.is_empty();
                let mut hosts = configured.unwrap_or_default();
                hosts.retain(|host| added.default_nvme_hosts.iter().all(|other| other.nqn != host.nqn));
                hosts.extend(added.default_nvme_hosts.iter().cloned());
                (any, hosts)
            }
        };
        api::NvmeSubsystem {
            nqn: nqn.to_owned(),
            is_default: entry.is_none() && group.is_none(),
            any_host,
            hosts,
            exports: match &group {
                Some(group) => group.exports_over(Front::Nvme),
                None => self.exports_within(Front::Nvme, self.added_nqn(Some(nqn))),
            },
            controllers: subsystem.controller_count(),
        }
    }

    /// Returns the hosts that the configuration lists, by name only: its secret files are not shown.
    fn configured_nvme_hosts(&self) -> Option<Vec<NvmeHost>> {
        let access = self.fronts.nvme().configured();
        let names = access.hosts.as_ref()?.keys();
        Some(names.map(|nqn| NvmeHost { nqn: nqn.clone(), ..NvmeHost::default() }).collect())
    }

    /// Creates a subsystem.
    ///
    /// # Errors
    /// If its name is taken or invalid, or the files of a host cannot be read; nothing has changed then.
    pub async fn create_nvme_subsystem(&self, request: CreateNvmeSubsystemRequest) -> Result<api::NvmeSubsystem> {
        let CreateNvmeSubsystemRequest { nqn, any_host, hosts } = request;
        check_nqn(&nqn, "the new subsystem")?;
        if any_host && !hosts.is_empty() {
            return Err(Failure::invalid("a subsystem admits either every host or those that are named: choose one"));
        }
        let front = self.fronts.nvme();
        let exists = || Failure::new(FailureKind::Exists, format!("the subsystem {nqn} exists already"));
        if front.subsystems().get(&nqn).is_some() {
            return Err(exists());
        }
        let entry = SubsystemEntry { nqn: nqn.clone(), any_host, hosts };
        let (base, named) = (base_of(&entry), entry.hosts.clone());
        let access = offload(move || read_hosts(base, &named)).await?;
        self.check_nvme_tls(&access)?;
        let turn = self.access_turn().await;
        self.change_access(&turn, |file| {
            if front.subsystems().get(&nqn).is_some() || file.nvme_subsystems.iter().any(|each| each.nqn == nqn) {
                return Err(exists());
            }
            file.nvme_subsystems.push(entry);
            Ok(())
        })
        .await?;
        let subsystem = front.create(&nqn, &access)?;
        let hosts = access.hosts.as_ref().map_or("any".to_owned(), |hosts| hosts.len().to_string());
        tracing::info!(subsystem = nqn, hosts, "an NVMe subsystem is created");
        Ok(self.describe_nvme_subsystem(&subsystem))
    }

    /// Removes a subsystem that has no exports.
    ///
    /// # Errors
    /// If there is none of that name, it has exports, or it is the default one.
    pub async fn remove_nvme_subsystem(&self, nqn: &str) -> Result<()> {
        let front = self.fronts.nvme();
        front.subsystem(Some(nqn))?;
        if self.gateways.with_subsystem(Some(nqn)).is_some() {
            return Err(of_group("subsystem", nqn));
        }
        if self.added_nqn(Some(nqn)).is_none() {
            return Err(of_configuration("subsystem", nqn));
        }
        // From here on no new export finds it; exports that found it before are seen.
        let turn = self.access_turn().await;
        let removal = front.begin_removal(nqn);
        self.change_access(&turn, |file| {
            self.check_unused(Front::Nvme, nqn)?;
            file.nvme_subsystems.retain(|each| each.nqn != nqn);
            Ok(())
        })
        .await?;
        front.remove(nqn);
        drop((removal, turn));
        tracing::info!(subsystem = nqn, "an NVMe subsystem is removed");
        Ok(())
    }

    /// Allows a host to connect to a subsystem; the secrets and keys of a listed host are replaced.
    ///
    /// # Errors
    /// If the subsystem admits every host, or the host's files cannot be read; nothing has changed then.
    pub async fn allow_nvme_host(&self, nqn: Option<&str>, host: NvmeHost) -> Result<api::NvmeSubsystem> {
        let front = self.fronts.nvme();
        let subsystem = front.subsystem(nqn)?;
        if let Some(group) = self.gateways.with_subsystem(nqn) {
            let single = host.clone();
            let read = offload(move || read_hosts(NvmeAccess::nobody(), &[single])).await?;
            self.check_nvme_tls(&read)?;
            group.allow_nvme_host(&host).await?;
            return Ok(self.describe_nvme_subsystem(&subsystem));
        }
        let nqn = self.added_nqn(nqn);
        let described = self.describe_nvme_subsystem(&subsystem);
        if described.any_host {
            let what =
                format!("every host may connect to {}: a list with one name would exclude the others", described.nqn);
            let hint = match nqn {
                None => "list the hosts in the configuration ([nvme-subsystem] hosts = [...]), and say: forebay reload",
                Some(_) => "make another subsystem, with hosts, and attach the images there",
            };
            return Err(Failure::invalid(what).hint(hint));
        }
        let single = host.clone();
        let read = offload(move || read_hosts(NvmeAccess::nobody(), &[single])).await?;
        self.check_nvme_tls(&read)?;
        let turn = self.access_turn().await;
        self.change_access(&turn, |file| {
            let hosts = file.hosts_mut(nqn).ok_or_else(|| gone(subsystem.nqn()))?;
            hosts.retain(|each| each.nqn != host.nqn);
            hosts.push(host.clone());
            Ok(())
        })
        .await?;
        // Other hosts keep what was read before: their files may have moved since.
        front.change(&subsystem, |access| access.take_in(read));
        drop(turn);
        tracing::info!(front = "nvme", host = host.nqn, subsystem = subsystem.nqn(), "a host is allowed");
        Ok(self.describe_nvme_subsystem(&subsystem))
    }

    /// Revokes a host's access to a subsystem, and disconnects it after its commands in flight complete.
    ///
    /// # Errors
    /// If it is not listed, or is listed in the configuration.
    pub async fn deny_nvme_host(&self, nqn: Option<&str>, host: &str) -> Result<api::NvmeSubsystem> {
        let subsystem = self.fronts.nvme().subsystem(nqn)?;
        if let Some(group) = self.gateways.with_subsystem(nqn) {
            group.deny_nvme_host(host).await?;
            return Ok(self.describe_nvme_subsystem(&subsystem));
        }
        let nqn = self.added_nqn(nqn);
        let turn = self.access_turn().await;
        let listed = self.configured_nvme_hosts();
        self.change_access(&turn, |file| {
            if nqn.is_none() && listed.iter().flatten().any(|each| each.nqn == host) {
                return Err(Failure::invalid(format!("the host {host} is listed in the configuration"))
                    .hint("remove it there, and run: forebay reload"));
            }
            let hosts = file.hosts_mut(nqn).ok_or_else(|| gone(subsystem.nqn()))?;
            let before = hosts.len();
            hosts.retain(|each| each.nqn != host);
            if hosts.len() == before {
                let what = format!("the host {host} is not on the list of {}", subsystem.nqn());
                return Err(
                    Failure::new(FailureKind::NotFound, what).hint("'forebay nvme-subsystem ls' shows the lists")
                );
            }
            match nqn.is_none() && listed.is_none() && hosts.is_empty() {
                true => Err(last_of_default(host)),
                false => Ok(()),
            }
        })
        .await?;
        self.fronts.nvme().change(&subsystem, |access| access.remove(host));
        drop(turn);
        tracing::info!(front = "nvme", host, subsystem = subsystem.nqn(), "a host is not allowed any more");
        Ok(self.describe_nvme_subsystem(&subsystem))
    }

    /// Checks that hosts with a TLS key have a TLS listener.
    fn check_nvme_tls(&self, access: &NvmeAccess) -> Result<()> {
        let tls: Vec<bool> = self.fronts.nvme().subsystems().ports().iter().map(|port| port.tls).collect();
        access.check_tls(&tls)
    }
}

/// Returns the failure of a change to a subsystem that was removed meanwhile.
fn gone(nqn: &str) -> Failure {
    Failure::new(FailureKind::NotFound, format!("the subsystem {nqn} was removed"))
}
