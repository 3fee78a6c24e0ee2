//! Daemons that are each other's peers, each in a network of its own, and which one serves the images.

use std::path::{Path, PathBuf};
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use super::commands::ISCSI_PORT;
use super::{FIO, HOSTS, NUMBERED, PATIENCE};
use crate::daemon::{Crashed, Daemon};
use crate::network::{End, Network};
use crate::shell;

/// Port on which each daemon listens for its peers.
const PEER_PORT: u16 = 7100;

/// Machine with a daemon.
pub struct Host {
    /// Folder of all that it keeps.
    pub folder: PathBuf,
    /// Address for its peers.
    pub address: String,
    /// The daemon, while it runs.
    pub daemon: Option<Daemon>,
    /// Remains of the daemon, when it does not run.
    pub crashed: Option<Crashed>,
}

impl Host {
    /// Returns its daemon, which must run.
    pub fn daemon(&self) -> &Daemon {
        self.daemon.as_ref().expect("its daemon runs")
    }

    /// Runs a command of the daemon, and returns what it printed.
    pub fn command(&self, arguments: &[&str]) -> Result<String> {
        shell::output(self.daemon().command().args(arguments))
    }

    /// Repeats a command until it succeeds.
    pub fn until(&self, arguments: &[&str]) -> Result<String> {
        let mut last = None;
        let done = shell::wait_for(PATIENCE, || match self.command(arguments) {
            Ok(output) => Some(output),
            Err(error) => {
                last = Some(error);
                None
            }
        });
        done.with_context(|| match last {
            Some(error) => format!("{error:#}\n{}", self.daemon().log_tail()),
            None => "no answer".into(),
        })
    }
}

/// Hosts, and which one serves the images.
pub struct Hosts {
    /// All hosts.
    pub all: Vec<Host>,
    /// Number of the host that serves the images.
    pub primary: usize,
    /// Length of a primary's lease.
    pub lease: String,
    /// Set once replicas take over by themselves.
    pub is_automatic: bool,
    /// The network between them, which is deleted after their daemons have ended.
    pub network: Network,
}

impl Hosts {
    /// Starts a daemon in each namespace of the network, with the cluster that `variable` names.
    pub fn start(folder: &Path, network: Network, variable: &str, lease: &str) -> Result<Self> {
        let addresses: Vec<String> =
            (0..HOSTS).map(|number| format!("{}:{PEER_PORT}", network.address(End::Host(number)))).collect();
        let mut all = Vec::new();
        for (number, address) in addresses.iter().enumerate() {
            let folder = folder.join(format!("host{number}"));
            std::fs::create_dir_all(&folder)?;
            let key = folder.join("peer.key");
            std::fs::write(&key, "5a".repeat(32))?;
            std::fs::set_permissions(&key, std::os::unix::fs::PermissionsExt::from_mode(0o600))?;
            let others: Vec<&String> = addresses.iter().filter(|other| *other != address).collect();
            let text = format!(
                "peer = ['{address}']\npeers = {others:?}\npeer-key = '{}'\n[replicas]\npath = '{}'\nquota = '128M'\n",
                key.display(),
                folder.join("replicas").display(),
            );
            let config = folder.join("forebay.toml");
            std::fs::write(&config, text)?;
            let config = config.display().to_string();
            let iscsi = format!("{}:{ISCSI_PORT}", network.address(End::Host(number)));
            let mut flags = vec!["--store-size", "64M", "--config", &config, "--iscsi", &iscsi];
            flags.extend(["--log-level", "info,forebay_writelog=debug,forebay::engine::failover=debug"]);
            let wrapper = network.wrapper(number);
            let mut wrapper: Vec<&str> = wrapper.iter().map(String::as_str).collect();
            wrapper.extend(["/usr/bin/env", variable]);
            let daemon = Daemon::start_under(&wrapper, &folder.join("data"), &flags)?;
            all.push(Host { folder, address: address.clone(), daemon: Some(daemon), crashed: None });
        }
        let hosts = Self { all, primary: 0, lease: lease.to_owned(), is_automatic: false, network };
        for host in &hosts.all {
            let knows = || {
                let status: Value = serde_json::from_str(&host.command(&["--format", "json", "status"]).ok()?).ok()?;
                let peers = status["peers"].as_array()?;
                let known = peers.iter().filter(|peer| peer["outgoing"] == true && peer["id"].is_string());
                (known.count() == HOSTS - 1).then_some(())
            };
            shell::wait_for(PATIENCE, knows).with_context(|| format!("no peers:\n{}", host.daemon().log_tail()))?;
        }
        Ok(hosts)
    }

    /// Returns the host that serves the images.
    pub fn primary(&self) -> &Host {
        &self.all[self.primary]
    }

    /// Creates an image, and attaches it at the primary with a log that both others have copies of.
    pub fn volume(&self, name: &str, size: &str) -> Result<String> {
        let flags = self.log_flags();
        let flags: Vec<&str> = flags.iter().map(String::as_str).collect();
        self.primary().daemon().volume_with(name, size, &flags)
    }

    /// Returns the flag that names the log of a host.
    pub fn place(&self, host: &Host) -> String {
        let takeover = if self.is_automatic { "auto" } else { "manual" };
        let path = host.folder.join("logs");
        format!("--log=ssd:{}:16M:takeover={takeover}:lease={}", path.display(), self.lease)
    }

    /// Returns the flags of the primary's log, which both other hosts have copies of.
    fn log_flags(&self) -> Vec<String> {
        let host = self.primary();
        let others = self.all.iter().filter(|other| other.address != host.address);
        let replicas = others.map(|other| format!("--replica={}", other.address));
        std::iter::once(self.place(host)).chain(replicas).collect()
    }

    /// Lets replicas take over by themselves from now on, while the images are served.
    pub fn take_over_automatically(&mut self) -> Result<()> {
        self.is_automatic = true;
        let flags = self.log_flags();
        for name in [NUMBERED, FIO] {
            let mut command = vec!["attach", name, "--nbd"];
            command.extend(flags.iter().map(String::as_str));
            self.primary().until(&command)?;
        }
        self.filled()
    }

    /// Waits until another host has taken both images over, and exports them there; returns fio's URI.
    pub fn await_takeover(&mut self, former: usize) -> Result<String> {
        let serves = || {
            let others = (0..HOSTS).filter(|number| *number != former);
            others.into_iter().find(|number| self.all[*number].command(&["attach", NUMBERED, "--nbd"]).is_ok())
        };
        let to = shell::wait_for(PATIENCE, serves).with_context(|| {
            let logs = self.all.iter().filter_map(|host| host.daemon.as_ref().map(Daemon::log_tail));
            format!("nobody takes over by itself:\n{}", logs.collect::<Vec<_>>().join("\n"))
        })?;
        let host = &self.all[to];
        let attach = || host.command(&["attach", FIO, "--nbd"]).ok();
        let uri = match shell::wait_for(Duration::from_secs(10), attach) {
            Some(uri) => uri,
            // The third host was first.
            None => {
                ensure!(acquire_log(host, FIO, true)?, "the one that took {NUMBERED} over has no copy of {FIO}");
                host.until(&["attach", FIO, "--nbd"])?
            }
        };
        self.primary = to;
        nbd_uri(&uri)
    }

    /// Waits until this many hosts have complete copies of a log.
    pub fn complete(&self, name: &str, copies: usize) -> Result<()> {
        let mut last = String::new();
        let full = shell::wait_for(PATIENCE, || {
            last = self.primary().command(&["--format", "json", "log", "info", name]).ok()?;
            let log: Value = serde_json::from_str(&last).ok()?;
            let members = log["members"].as_array()?;
            let complete = members.iter().filter(|member| member["state"] == "complete").count();
            (complete == copies && log["copies_wanted"] == HOSTS).then_some(())
        });
        full.with_context(|| {
            format!("{name} does not have {copies} copies: {last}\n{}", self.primary().daemon().log_tail())
        })
    }

    /// Waits until every host has complete copies of both logs.
    pub fn filled(&self) -> Result<()> {
        [NUMBERED, FIO].into_iter().try_for_each(|name| self.complete(name, HOSTS))
    }

    /// Takes both images over at host `to`, or at another replica if that one has been dropped, and exports them there; returns
    /// fio's URI.
    pub fn take_over(&mut self, to: usize, force: bool) -> Result<String> {
        let third = (0..HOSTS).filter(|number| ![to, self.primary].contains(number));
        // The other one may have taken one of them over: then its primary lives.
        let attempts: Vec<_> = [(to, force)].into_iter().chain(third.map(|number| (number, true))).collect();
        for (number, force) in attempts {
            let host = &self.all[number];
            if !acquire_log(host, NUMBERED, force)? || !acquire_log(host, FIO, force)? {
                continue;
            }
            self.primary = number;
            host.until(&["attach", NUMBERED, "--nbd"])?;
            return nbd_uri(&host.until(&["attach", FIO, "--nbd"])?);
        }
        bail!("no other host has a copy of both logs")
    }

    /// Starts a primary again that was killed, until its exports are served again; returns fio's URI, which stays.
    pub fn restart(&mut self, number: usize, uri: &str) -> Result<String> {
        let host = &mut self.all[number];
        host.daemon = Some(host.crashed.take().context("it was killed")?.restart()?);
        let mut last = String::new();
        let served = || {
            last = host.command(&["--format", "json", "targets"]).ok()?;
            let targets: Value = serde_json::from_str(&last).ok()?;
            targets.as_array()?.iter().all(|target| target["uri"].is_string()).then_some(())
        };
        shell::wait_for(PATIENCE, served).with_context(|| format!("not served again: {last}"))?;
        Ok(uri.to_owned())
    }

    /// Brings a host back as a replica: what it served before is served by another one.
    pub fn bring_back(&mut self, number: usize) -> Result<()> {
        let host = &mut self.all[number];
        if let Some(crashed) = host.crashed.take() {
            host.daemon = Some(crashed.restart()?);
        }
        for name in [NUMBERED, FIO] {
            let targets = host.command(&["--format", "json", "targets"])?;
            if targets.contains(name.split_once('/').map_or(name, |(_, image)| image)) {
                host.until(&["detach", name, "--nbd", "--keep-log", "--force"])?;
            }
        }
        Ok(())
    }
}

/// Returns the URI in what `attach` printed.
fn nbd_uri(printed: &str) -> Result<String> {
    Ok(printed.lines().map(str::trim).find(|line| line.starts_with("nbd")).context("no URI")?.to_owned())
}

/// Takes a log over by command; returns false if the host is no member, having been dropped.
fn acquire_log(host: &Host, name: &str, force: bool) -> Result<bool> {
    let mut command = vec!["log", "takeover", name];
    command.extend(force.then_some("--force"));
    let mut last = None;
    let done = shell::wait_for(PATIENCE, || match host.command(&command) {
        Ok(_) => Some(true),
        Err(error) if format!("{error:#}").contains("is no member of") => Some(false),
        Err(error) => {
            last = Some(error);
            None
        }
    });
    done.with_context(|| format!("{last:#?}\n{}", host.daemon().log_tail()))
}
