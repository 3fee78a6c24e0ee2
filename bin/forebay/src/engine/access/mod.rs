//! Access control: NVMe subsystems and iSCSI targets added while the daemon runs, and the hosts that may use each.
//!
//! The default subsystem and the default target come from the configuration; hosts may be added to their lists here.
//! Additions are persisted in a file ([`AccessFile`]) before they take effect.  Secrets and keys stay in separate
//! files: they are read at startup, when a host is added, and by a reload.

mod file;
mod iscsi;
mod nvme;

use std::cell::RefCell;
use std::path::Path;

use forebay_reactor::sync::{Permit, Semaphore};

use super::Engine;
use super::offload::offload;
use crate::api::Front;
use crate::failure::{Failure, FailureKind, Result};
use file::AccessFile;
pub use nvme::read_readable;

/// Owner of the added subsystems, targets and hosts; the file has the same content.
pub struct AccessLists {
    file: RefCell<AccessFile>,
    /// Permit to change the file: one change at a time.
    turn: Semaphore,
}

impl AccessLists {
    /// Loads what was added before.
    ///
    /// # Errors
    /// If the file cannot be read, is damaged, or comes from a newer build.
    pub fn load(data: &Path) -> Result<Self> {
        Ok(Self { file: RefCell::new(AccessFile::load(data)?), turn: Semaphore::new(1) })
    }
}

impl Engine {
    /// Creates the subsystems and targets that were added before, and admits their hosts.  A host whose secret or key
    /// cannot be read is not admitted; the failure is logged.
    pub(super) fn restore_access(&self) {
        self.restore_nvme_access();
        self.restore_iscsi_access();
    }

    /// Waits for the permit to change access: its holder reads, writes and applies without another change in between.
    pub(super) async fn access_turn(&self) -> Permit {
        self.access.turn.acquire(1).await
    }

    /// Changes the additions: `change` works on a copy, which is written before it takes effect.
    async fn change_access(&self, _turn: &Permit, change: impl FnOnce(&mut AccessFile) -> Result<()>) -> Result<()> {
        let mut changed = self.access.file.borrow().clone();
        change(&mut changed)?;
        let (data, written) = (self.options.data.clone(), changed.clone());
        offload(move || written.store(&data)).await?;
        *self.access.file.borrow_mut() = changed;
        Ok(())
    }

    /// Checks that no addition has the name of the default subsystem or target, as is possible after a change of the
    /// configuration: two host lists, and two exports with one number, would be in one subsystem.
    pub(super) fn check_default_names(&self) -> Result<()> {
        let file = self.access.file.borrow();
        let (nqn, iqn) = (self.fronts.nvme().default_subsystem().nqn(), self.fronts.iscsi().default_target().name());
        let wrong = [
            (nqn, "nvme-subsystem.nqn", file.nvme_subsystems.iter().any(|entry| entry.nqn == nqn)),
            (iqn, "iscsi-target.name", file.iscsi_targets.iter().any(|entry| entry.name == iqn)),
        ];
        match wrong.into_iter().find(|(_, _, taken)| *taken) {
            None => Ok(()),
            Some((name, setting, _)) => {
                let what = format!("{setting} is {name}, which was added while the daemon ran (access.json)");
                Err(Failure::invalid(what)
                    .hint("choose another name, or start without it, detach its exports and remove it"))
            }
        }
    }

    /// Checks that no export is in a subsystem or target that is about to be removed.
    fn check_unused(&self, front: Front, name: &str) -> Result<()> {
        let count = self.exports_within(front, Some(name));
        if count == 0 {
            return Ok(());
        }
        let what = format!("{count} export(s) are in {name}");
        Err(Failure::new(FailureKind::Busy, what).hint("'forebay targets' lists them; end them with 'forebay detach'"))
    }
}

/// Returns the failure of a change that would open a restricted subsystem or target to every host.
fn last_of_default(host: &str) -> Failure {
    Failure::invalid(format!(
        "{host} is the last on the list, and the configuration has none: without it everybody may connect"
    ))
    .hint("list hosts in the configuration, and run: forebay reload")
}

/// Returns the failure of removing something that the configuration defines.
fn of_configuration(what: &str, name: &str) -> Failure {
    Failure::invalid(format!("{name} is the {what} of the configuration"))
        .hint("change it there, and run: forebay reload")
}
