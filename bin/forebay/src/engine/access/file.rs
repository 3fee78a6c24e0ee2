//! `DATA/access.json`: subsystems, targets and hosts added while the daemon ran.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::api::{ChapUser, NvmeHost};
use crate::engine::small_files::replace_file;
use crate::failure::{Failure, FailureKind, Result};

/// Version of the file that this build writes and reads.
const FILE_VERSION: u32 = 1;

/// Content of the file.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct AccessFile {
    version: u32,
    /// Hosts added to the default NVMe subsystem; the configuration lists its other hosts.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) default_nvme_hosts: Vec<NvmeHost>,
    /// Initiators added to the default iSCSI target.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) default_initiators: Vec<String>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) nvme_subsystems: Vec<SubsystemEntry>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(super) iscsi_targets: Vec<TargetEntry>,
}

/// Subsystem that was created while the daemon ran.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct SubsystemEntry {
    pub(super) nqn: String,
    #[serde(default)]
    pub(super) any_host: bool,
    #[serde(default)]
    pub(super) hosts: Vec<NvmeHost>,
}

/// Target that was created while the daemon ran.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct TargetEntry {
    pub(super) name: String,
    #[serde(default)]
    pub(super) any_initiator: bool,
    #[serde(default)]
    pub(super) initiators: Vec<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) chap: Option<ChapUser>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) mutual_chap: Option<ChapUser>,
}

fn path(data: &Path) -> PathBuf {
    data.join("access.json")
}

impl AccessFile {
    /// Reads the file; without a file nothing was added.
    ///
    /// # Errors
    /// If it cannot be read, is damaged, or comes from a newer build.
    pub(super) fn load(data: &Path) -> Result<Self> {
        let path = path(data);
        let bytes = match fs::read(&path) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Self::default()),
            Err(error) => return Err(Failure::io(error, format_args!("reading {}", path.display()))),
        };
        #[derive(Deserialize)]
        struct Version {
            version: u32,
        }
        let damaged = |error: serde_json::Error| {
            Failure::new(FailureKind::Corrupt, format!("the list of hosts in {} is damaged: {error}", path.display()))
                .hint(
                    "repair it, or remove it and add subsystems, targets and hosts again with 'forebay nvme-subsystem' \
                     and 'forebay iscsi-target'",
                )
        };
        let Version { version } = serde_json::from_slice(&bytes).map_err(damaged)?;
        if version != FILE_VERSION {
            let text = format!("{} has version {version}, this build knows {FILE_VERSION}", path.display());
            return Err(Failure::new(FailureKind::Unsupported, text).hint("run the newer forebay that wrote it"));
        }
        serde_json::from_slice(&bytes).map_err(damaged)
    }

    /// Replaces the file atomically.
    ///
    /// # Errors
    /// If it cannot be written; the previous file remains then.
    pub(super) fn store(mut self, data: &Path) -> Result<()> {
        self.version = FILE_VERSION;
        let path = path(data);
        let text = serde_json::to_vec_pretty(&self)
            .map_err(|error| Failure::failed(format!("writing the list of hosts: {error}")))?;
        replace_file(&path, &text).map_err(|error| Failure::io(error, format_args!("writing {}", path.display())))
    }

    /// Returns the hosts that were added to a subsystem; without an NQN, to the default one.
    pub(super) fn hosts_mut(&mut self, nqn: Option<&str>) -> Option<&mut Vec<NvmeHost>> {
        match nqn {
            None => Some(&mut self.default_nvme_hosts),
            Some(nqn) => self.nvme_subsystems.iter_mut().find(|each| each.nqn == nqn).map(|each| &mut each.hosts),
        }
    }

    /// Returns the initiators that were added to a target; without a name, to the default one.
    pub(super) fn initiators_mut(&mut self, name: Option<&str>) -> Option<&mut Vec<String>> {
        match name {
            None => Some(&mut self.default_initiators),
            Some(name) => self.iscsi_targets.iter_mut().find(|each| each.name == name).map(|each| &mut each.initiators),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_file_survives_a_round_trip_and_damage_is_named() {
        let dir = tempfile::tempdir().expect("a directory");
        assert_eq!(AccessFile::load(dir.path()), Ok(AccessFile::default()));
        let host = NvmeHost { nqn: "nqn.2024-05.org.example:h".into(), ..NvmeHost::default() };
        let subsystem = SubsystemEntry { nqn: "nqn.2024-05.org.example:s".into(), any_host: false, hosts: vec![host] };
        let file = AccessFile { nvme_subsystems: vec![subsystem], ..AccessFile::default() };
        file.clone().store(dir.path()).expect("written");
        let read = AccessFile::load(dir.path()).expect("read");
        assert_eq!(read, AccessFile { version: FILE_VERSION, ..file });
        for (text, kind) in [
            ("{", FailureKind::Corrupt),
            ("{\"version\":1,\"nvme_subsystems\":[{\"nqn\":7}]}", FailureKind::Corrupt),
            ("{\"version\":1,\"other\":1}", FailureKind::Corrupt),
            ("{\"version\":9}", FailureKind::Unsupported),
        ] {
            fs::write(path(dir.path()), text).expect("written");
            assert_eq!(AccessFile::load(dir.path()).expect_err(text).kind, kind, "{text}");
        }
    }
}
