//! A Ceph cluster for a while: the lab's, or one that is named.

use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result};

use crate::shell::{self, Scratch};

/// A cluster; if it is ours, it goes when dropped.
pub struct Cluster {
    conf: PathBuf,
    /// Folder and commands of a cluster of our own.
    lab: Option<(Scratch, [String; 2])>,
    /// Address that a cluster of our own listens at; loopback if none.
    address: Option<String>,
    /// Runs its daemons at idle priority.
    idle: bool,
}

impl Cluster {
    /// Starts a cluster of the lab with this many OSDs.
    pub fn start(osds: u32) -> Result<Self> {
        Self::start_in(&shell::target(), osds, None, false)
    }

    /// Starts a cluster of the lab that listens at an address of this machine.
    pub fn start_at(osds: u32, address: &str) -> Result<Self> {
        Self::start_in(&shell::target(), osds, Some(address.into()), false)
    }

    /// The one that `CEPH_CONF` names, or one of the lab's that has its disks in memory and only gets what others
    /// leave of the processors, as if it were on other machines.
    pub fn named_or_apart(osds: u32) -> Result<Self> {
        Self::named().map_or_else(|| Self::start_in(Path::new("/dev/shm"), osds, None, true), Ok)
    }

    /// Starts one of the lab's like that of `named_or_apart`, at an address of this machine.
    pub fn apart_at(osds: u32, address: &str) -> Result<Self> {
        Self::start_in(Path::new("/dev/shm"), osds, Some(address.into()), true)
    }

    fn start_in(folder: &Path, osds: u32, address: Option<String>, idle: bool) -> Result<Self> {
        let scratch = Scratch::within(folder, "ceph")?;
        let ports = [shell::free_port()?.to_string(), shell::free_port()?.to_string()];
        let conf = scratch.path().join("ceph.conf");
        let cluster = Self { conf, lab: Some((scratch, ports)), address, idle };
        shell::output(cluster.script().args(["up", &osds.to_string()])).context("a cluster of the lab")?;
        Ok(cluster)
    }

    /// The one that `CEPH_CONF` names, or one of the lab's.
    pub fn named_or_start(osds: u32) -> Result<Self> {
        Self::named().map_or_else(|| Self::start(osds), Ok)
    }

    fn named() -> Option<Self> {
        let conf = std::env::var_os("CEPH_CONF").filter(|conf| !conf.is_empty())?;
        Some(Self { conf: conf.into(), lab: None, address: None, idle: false })
    }

    fn script(&self) -> Command {
        let path = shell::root().join("test/lab/ceph-cluster");
        let mut script = shell::command(if self.idle { Path::new("chrt") } else { &path });
        if self.idle {
            script.args(["--idle", "0"]).arg(&path);
        }
        if let Some((scratch, [port, v1])) = &self.lab {
            script.env("CLUSTER_DIR", scratch.path()).env("MON_PORT", port).env("MON_V1_PORT", v1);
        }
        if let Some(address) = &self.address {
            script.env("ADDR", address);
        }
        script
    }

    /// Its configuration.
    pub fn conf(&self) -> &Path {
        &self.conf
    }

    /// Returns the environment variable by which programs find it: `CEPH_CONF=...`.
    pub fn variable(&self) -> String {
        format!("CEPH_CONF={}", self.conf.display())
    }

    /// A command that finds the cluster.
    pub fn command(&self, program: impl AsRef<std::ffi::OsStr>) -> Command {
        let mut command = shell::command(program);
        command.env("CEPH_CONF", &self.conf);
        command
    }

    /// Leaves it up when we end.
    pub fn leave(mut self) {
        if let Some((mut scratch, _)) = self.lab.take() {
            scratch.keep();
        }
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        if self.lab.is_some() {
            // Errors of the cleanup cannot be reported here.
            let _ = shell::output(self.script().arg("down"));
        }
    }
}
