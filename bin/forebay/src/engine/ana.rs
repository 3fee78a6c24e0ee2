//! How NVMe namespaces are reached: what whoever looks after failover sets, kept over restarts in a file.

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
use crate::api::{Ana, SetAna};
use crate::failure::{Failure, FailureKind, Result};

/// The version of the file that this build writes and reads.
const FILE_VERSION: u32 = 1;

/// The file's content: every state that is not `optimized`.
#[derive(Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
struct AnaFile {
    version: u32,
    states: Vec<Kept>,
}

/// How a group is reached through a port.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Kept {
    port: u16,
    group: u32,
    state: String,
}

/// Lets one at a time write the file, so that it has the last state in the end.
pub struct Keeper(Semaphore);

impl Default for Keeper {
    fn default() -> Self {
        Self(Semaphore::new(1))
    }
}

fn path(data: &Path) -> PathBuf {
    data.join("ana.json")
}

/// Reads the file.  No file means that all is optimized; one that makes no sense does not: a daemon that took it for that
/// could write beside another.
fn load(data: &Path) -> Result<Vec<(u16, u32, AnaState)>> {
    let path = path(data);
    let bytes = match fs::read(&path) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(Failure::io(error, format_args!("reading {}", path.display()))),
    };
    let damaged = |why: String| {
        Failure::new(FailureKind::Corrupt, format!("the states of ANA in {} are damaged: {why}", path.display()))
            .hint("mend it, or remove it and set them again with 'forebay ana set'")
    };
    let file: AnaFile = serde_json::from_slice(&bytes).map_err(|error| damaged(error.to_string()))?;
    if file.version != FILE_VERSION {
        let text = format!("{} has version {}, this build knows {FILE_VERSION}", path.display(), file.version);
        return Err(Failure::new(FailureKind::Unsupported, text).hint("run the newer forebay that wrote it"));
    }
    let state = |kept: Kept| match AnaState::named(&kept.state) {
        Some(state) => Ok((kept.port, kept.group, state)),
        None => Err(damaged(format!("'{}' is no state", kept.state))),
    };
    file.states.into_iter().map(state).collect()
}

fn store(data: &Path, states: Vec<Kept>) -> Result<()> {
    let path = path(data);
    let text = serde_json::to_vec_pretty(&AnaFile { version: FILE_VERSION, states })
        .map_err(|error| Failure::failed(format!("writing the states of ANA: {error}")))?;
    replace_file(&path, &text).map_err(|error| Failure::io(error, format_args!("writing {}", path.display())))
}

impl Engine {
    /// Takes up the states of before the restart.  A port that is not there any more is left out.
    pub(super) fn restore_ana(&self) -> Result<()> {
        let target = self.fronts.nvme().target();
        let ports = target.ports();
        for (id, group, state) in load(&self.options.data)? {
            if let Some(port) = ports.iter().find(|port| port.id == id) {
                target.set_ana(port, group, state);
                tracing::info!(port = id, group, state = state.name(), "an ANA state is as it was before");
            }
        }
        Ok(())
    }

    /// Makes the file say how it is.
    async fn save_ana(&self) -> Result<()> {
        let _turn = self.ana.0.acquire(1).await;
        let mut states = Vec::new();
        for port in self.fronts.nvme().target().ports() {
            for group in 1..=ANA_GROUPS_MAX {
                let state = port.ana(group);
                if state != AnaState::Optimized {
                    states.push(Kept { port: port.id, group, state: state.name().into() });
                }
            }
        }
        let data = self.options.data.clone();
        offload(move || store(&data, states)).await
    }

    /// Every port with every group that has namespaces or is not optimized.
    pub fn ana(&self) -> Vec<Ana> {
        let target = self.fronts.nvme().target();
        let addrs = self.fronts.addrs(crate::api::Front::Nvme);
        let mut states = Vec::new();
        for port in target.ports() {
            let address = addrs.get(usize::from(port.id) - 1).map(ToString::to_string).unwrap_or_default();
            let (_, groups) = target.ana_groups(&port);
            for group in 1..=ANA_GROUPS_MAX {
                let (state, known) = (port.ana(group), groups.iter().find(|known| known.id == group));
                if known.is_none() && state == AnaState::Optimized {
                    continue;
                }
                let namespaces = known.map(|known| known.namespaces.clone()).unwrap_or_default();
                let (port, address, state) = (port.id, address.clone(), state.name().into());
                states.push(Ana { port, address, group, state, namespaces });
            }
        }
        states
    }

    /// Sets how groups are reached through ports, tells the hosts, and keeps it; says how it is then.
    pub async fn set_ana(&self, request: &SetAna) -> Result<Vec<Ana>> {
        let target = self.fronts.nvme().target();
        let state = AnaState::named(&request.state).ok_or_else(|| {
            Failure::invalid(format!("'{}' is no state of ANA", request.state))
                .hint("optimized, non-optimized, inaccessible, persistent-loss or change")
        })?;
        if let Some(group) = request.group.filter(|group| !(1..=ANA_GROUPS_MAX).contains(group)) {
            return Err(Failure::invalid(format!("ANA group {group}: from 1 to {ANA_GROUPS_MAX}")));
        }
        let ports = target.ports();
        if let Some(id) = request.port.filter(|id| !ports.iter().any(|port| port.id == *id)) {
            let text = format!("there is no NVMe port {id}");
            return Err(Failure::new(FailureKind::NotFound, text).hint("'forebay ana ls' lists them"));
        }
        for port in ports.iter().filter(|port| request.port.is_none_or(|id| id == port.id)) {
            for group in (1..=ANA_GROUPS_MAX).filter(|group| request.group.is_none_or(|wanted| wanted == *group)) {
                target.set_ana(port, group, state);
            }
        }
        self.save_ana()
            .await
            .map_err(|failure| failure.context("the states are set, but will not outlast a restart"))?;
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
        let kept = |port, group, state: &str| Kept { port, group, state: state.into() };
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
