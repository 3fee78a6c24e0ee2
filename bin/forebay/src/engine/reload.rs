//! The configuration read again while the daemon runs: who may connect, and what they prove.

use super::Engine;
use super::offload::offload;
use crate::api;
use crate::config::Config;
use crate::failure::{Failure, FailureKind, Result};

impl Engine {
    /// Reads the configuration again, and goes by it as far as hosts and secrets are concerned.  If anything in it is
    /// wrong, nothing changes.
    pub async fn reload(&self) -> Result<api::Reloaded> {
        let Some(daemon) = &self.options.daemon else {
            return Err(Failure::new(FailureKind::Unreachable, "no daemon runs"));
        };
        let read = daemon.read_config.clone();
        let config = offload(move || read()).await.map_err(|failure| failure.context("nothing has changed"))?;
        self.fronts.nvme().admit(&config.nvme_subsystem);
        self.fronts.iscsi().admit(&config.iscsi_target);
        let restart = !same_but_for_hosts(&daemon.config, config);
        match restart {
            false => tracing::info!("hosts and secrets have been read again"),
            true => tracing::warn!("hosts and secrets have been read again; other settings that differ need a restart"),
        }
        Ok(api::Reloaded { restart })
    }
}

/// Whether nothing differs that only a start looks at.
fn same_but_for_hosts(running: &Config, mut new: Config) -> bool {
    let (nvme, iscsi) = (&running.nvme_subsystem, &running.iscsi_target);
    new.nvme_subsystem.hosts.clone_from(&nvme.hosts);
    new.nvme_subsystem.tls_keys.clone_from(&nvme.tls_keys);
    new.iscsi_target.initiators.clone_from(&iscsi.initiators);
    new.iscsi_target.chap.clone_from(&iscsi.chap);
    new.iscsi_target.discovery_chap.clone_from(&iscsi.discovery_chap);
    new == *running
}
