//! ANA states of NVMe namespaces, set by a failover manager and persisted in a file across restarts.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use forebay_nvmf::session::admin::ANA_GROUPS_MAX;
use forebay_nvmf::wire::log::AnaState;
use forebay_reactor::sync::Semaphore;
use serde::{Deserialize, Serialize};

use super::Engine;
use super::offload::offload;
use super::small_files::replace_file;
use crate::api::{Ana, SetAnaRequest};
use crate::failure::{Failure, FailureKind, Result};

/// Version of the file that this build writes and reads.
const FILE_VERSION: u32 = 1;

/// Content of the file: every state other than `optimized`.
#[derive(Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct AnaFile {
    version: u32,
    states: Vec<StoredState>,
}

/// ANA state of a group on a port.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct StoredState {
    port: u16,
    group: u32,
    state: String,
}

/// Permit to write the file, one writer at a time, so that it ends with the last state.
pub struct AnaFileLock(Semaphore);

impl Default for AnaFileLock {
    fn default() -> Self {
        Self(Semaphore::new(1))
    }
}

fn path(data: &Path) -> PathBuf {
    data.join("ana.json")
}

/// Reads the file.  No file means that every group is optimized.  A malformed file is an error: a daemon that assumed
/// optimized could write in parallel with another one.
fn load(data: &Path) -> Result<Vec<(u16, u32, AnaState)>> {
    let path = path(data);
    let bytes = match fs::read(&path) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(Failure::io(error, format_args!("reading {}", path.display()))),
    };
    let damaged = |why: String| {
        Failure::new(FailureKind::Corrupt, format!("the ANA states in {} are damaged: {why}", path.display()))
            .hint("repair it, or remove it and set them again with 'forebay ana set'")
    };
    let file: AnaFile = serde_json::from_slice(&bytes).map_err(|error| damaged(error.to_string()))?;
    if file.version != FILE_VERSION {
        let text = format!("{} has version {}, this build knows {FILE_VERSION}", path.display(), file.version);
        return Err(Failure::new(FailureKind::Unsupported, text).hint("run the newer forebay that wrote it"));
    }
    let state = |kept: StoredState| match AnaState::named(&kept.state) {
        Some(state) => Ok((kept.port, kept.group, state)),
        None => Err(damaged(format!("'{}' is no state", kept.state))),
    };
    file.states.into_iter().map(state).collect()
}

fn store(data: &Path, states: Vec<StoredState>) -> Result<()> {
    let path = path(data);
    let text = serde_json::to_vec_pretty(&AnaFile { version: FILE_VERSION, states })
        .map_err(|error| Failure::failed(format!("writing the ANA states: {error}")))?;
    replace_file(&path, &text).map_err(|error| Failure::io(error, format_args!("writing {}", path.display())))
}

impl Engine {
    /// Restores the states from before the restart.  A port that no longer exists is skipped.
    pub(super) fn restore_ana(&self) -> Result<()> {
        let subsystems = self.fronts.nvme().subsystems();
        let ports = subsystems.ports();
        for (id, group, state) in load(&self.options.data)? {
            if let Some(port) = ports.iter().find(|port| port.id == id) {
                subsystems.set_ana(port, group, state);
                tracing::info!(port = id, group, state = state.name(), "ANA state restored");
            }
        }
        Ok(())
    }

    /// Writes the current states to the file.
    async fn save_ana(&self) -> Result<()> {
        let _turn = self.ana.0.acquire(1).await;
        let mut states = Vec::new();
        for port in self.fronts.nvme().subsystems().ports() {
            for group in 1..=ANA_GROUPS_MAX {
                let state = port.ana(group);
                if state != AnaState::Optimized {
                    states.push(StoredState { port: port.id, group, state: state.name().into() });
                }
            }
        }
        let data = self.options.data.clone();
        offload(move || store(&data, states)).await
    }

    /// Lists every port with every group that has namespaces, by subsystem, or is not optimized.
    pub fn ana(&self) -> Vec<Ana> {
        let subsystems = self.fronts.nvme().subsystems();
        let addrs = self.fronts.addrs(crate::api::Front::Nvme);
        let mut states = Vec::new();
        for port in subsystems.ports() {
            let address = addrs.get(usize::from(port.id) - 1).map(ToString::to_string).unwrap_or_default();
            // By group, and then by the subsystem's name.
            let mut rows: BTreeMap<(u32, String), (AnaState, Vec<u32>)> = BTreeMap::new();
            let mut used = BTreeSet::new();
            for subsystem in subsystems.all() {
                for group in subsystem.ana_groups(&port).1 {
                    if subsystem.namespace_state(group.id).is_none() {
                        used.insert(group.id);
                    }
                    rows.insert((group.id, subsystem.nqn().to_owned()), (group.state, group.namespaces));
                }
            }
            for group in (1..=ANA_GROUPS_MAX).filter(|group| !used.contains(group)) {
                let (state, nqn) = (port.ana(group), self.fronts.nvme().default_subsystem().nqn());
                if state != AnaState::Optimized {
                    rows.insert((group, nqn.to_owned()), (state, Vec::new()));
                }
            }
            states.extend(rows.into_iter().map(|((group, subsystem), (state, namespaces))| {
                let (port, address, state) = (port.id, address.clone(), state.name().into());
                Ana { port, address, group, state, subsystem, namespaces }
            }));
        }
        states
    }

    /// Sets the ANA state of groups on ports, notifies the hosts, and persists it; returns the resulting states.
    pub async fn set_ana(&self, request: &SetAnaRequest) -> Result<Vec<Ana>> {
        let subsystems = self.fronts.nvme().subsystems();
        let state = AnaState::named(&request.state).ok_or_else(|| {
            Failure::invalid(format!("'{}' is not an ANA state", request.state))
                .hint("optimized, non-optimized, inaccessible, persistent-loss or change")
        })?;
        if let Some(group) = request.group.filter(|group| !(1..=ANA_GROUPS_MAX).contains(group)) {
            return Err(Failure::invalid(format!("ANA group {group}: from 1 to {ANA_GROUPS_MAX}")));
        }
        let ports = subsystems.ports();
        if let Some(id) = request.port.filter(|id| !ports.iter().any(|port| port.id == *id)) {
            let text = format!("there is no NVMe port {id}");
            return Err(Failure::new(FailureKind::NotFound, text).hint("'forebay ana ls' lists them"));
        }
        for port in ports.iter().filter(|port| request.port.is_none_or(|id| id == port.id)) {
            for group in (1..=ANA_GROUPS_MAX).filter(|group| request.group.is_none_or(|wanted| wanted == *group)) {
                subsystems.set_ana(port, group, state);
            }
        }
        self.save_ana()
            .await
            .map_err(|failure| failure.context("the states are set, but cannot be saved and are lost at a restart"))?;
        Ok(self.ana())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn states_are_kept() {
        let dir = tempfile::tempdir().expect("a directory");
        assert_eq!(load(dir.path()), Ok(Vec::new()));
        let kept = |port, group, state: &str| StoredState { port, group, state: state.into() };
        store(dir.path(), vec![kept(1, 3, "inaccessible"), kept(2, 16, "non-optimized")]).expect("stored");
        assert_eq!(load(dir.path()), Ok(vec![(1, 3, AnaState::Inaccessible), (2, 16, AnaState::NonOptimized)]));
        store(dir.path(), Vec::new()).expect("stored again");
        assert_eq!(load(dir.path()), Ok(Vec::new()));
    }

    #[test]
    fn what_makes_no_sense_is_not_taken_for_optimized() {
        let dir = tempfile::tempdir().expect("a directory");
        for (text, kind) in [
            ("{", FailureKind::Corrupt),
            (r#"{"version":1,"states":[{"port":1,"group":1,"state":"fine"}]}"#, FailureKind::Corrupt),
            (r#"{"version":2,"states":[]}"#, FailureKind::Unsupported),
        ] {
            fs::write(path(dir.path()), text).expect("written");
            assert_eq!(load(dir.path()).expect_err("refused").kind, kind, "{text}");
        }
    }
}
