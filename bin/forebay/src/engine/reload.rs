//! Reload of the access-control configuration while the daemon runs: hosts, secrets and keys.

use super::Engine;
use super::offload::offload;
use crate::api;
use crate::config::{DaemonConfig, NbdAccess};
use crate::failure::{Failure, FailureKind, Result};

impl Engine {
    /// Re-reads the configuration and applies its hosts and secrets.  If any of it is invalid, nothing changes.
    pub async fn reload(&self) -> Result<api::Reloaded> {
        let Some(daemon) = &self.options.daemon else {
            return Err(Failure::new(FailureKind::Unreachable, "no daemon runs"));
        };
        // Blocks changes of hosts meanwhile; of two reloads the later one reads the newer configuration.
        let _turn = self.access_turn().await;
        let read = daemon.read_config.clone();
        let config = offload(move || read()).await.map_err(|failure| failure.context("nothing has changed"))?;
        // Everything is read before anything is applied.
        let unchanged = |failure: Failure| failure.context("nothing has changed");
        let nbd = config.nbd_access.access().map_err(unchanged)?;
        let nvme = self.read_nvme_access(&config.nvme_subsystem).await.map_err(unchanged)?;
        let iscsi = self.read_iscsi_access(&config.iscsi_target).await.map_err(unchanged)?;
        self.fronts.nbd().admit(nbd);
        self.fronts.nbd().expel(self.cores()).await;
        self.apply_nvme_access(nvme);
        self.apply_iscsi_access(iscsi);
        if let Some(joined) = self.gateways.joined() {
            joined.reload_hosts(self);
        }
        let restart = !same_but_for_hosts(&daemon.config, config);
        match restart {
            false => tracing::info!("hosts and secrets have been read again"),
            true => tracing::warn!("hosts and secrets have been read again; other settings that differ need a restart"),
        }
        Ok(api::Reloaded { restart })
    }
}

/// Returns whether two configurations are equal in all settings that apply at startup only.
fn same_but_for_hosts(running: &DaemonConfig, mut new: DaemonConfig) -> bool {
    let nbd = &running.nbd_access;
    new.nbd_access = NbdAccess { tls: std::mem::take(&mut new.nbd_access.tls), ..nbd.clone() };
    let (nvme, iscsi) = (&running.nvme_subsystem, &running.iscsi_target);
    new.nvme_subsystem.access.clone_from(&nvme.access);
    new.iscsi_target.access.clone_from(&iscsi.access);
    new.iscsi_target.discovery_chap.clone_from(&iscsi.discovery_chap);
    new == *running
}
