//! File that persists the mappings across restarts: `mappings.json` in the data directory.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::engine::small_files::replace_file;
use crate::failure::{Failure, FailureKind, Result};

/// Version of the format.
const VERSION: u32 = 1;

/// Mapping of an image to a device of this machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct MappingRecord {
    /// Pool name.
    pub pool: String,
    /// Image name.
    pub image: String,
    /// Identifier that the kernel keeps with the device (`/sys/block/nbdN/backend`).
    pub backend: String,
    /// Boot of the machine in which it was mapped; devices do not outlive it.
    pub boot: String,
    /// Device number; absent until the kernel has assigned it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<u32>,
    /// Number of connections.
    pub connections: u32,
    /// Set if the export over NBD was created for the mapping, and ends with it.
    pub owns_export: bool,
}

#[derive(Serialize, Deserialize)]
struct StoredMappings<T> {
    version: u32,
    mappings: T,
}

/// Path of the file in a data directory.
pub fn path_in(data: &Path) -> PathBuf {
    data.join("mappings.json")
}

/// Reads the file.  No file means no mappings.
///
/// # Errors
/// A file that cannot be read, is damaged, or has another version.
pub fn load(data: &Path) -> Result<Vec<MappingRecord>> {
    let path = path_in(data);
    match fs::read(&path) {
        Ok(bytes) => decode(&bytes).map_err(|why| {
            Failure::new(FailureKind::Corrupt, format!("the mappings in {}: {why}", path.display()))
                .hint("move the file away; end its devices with 'nbd-client -d /dev/nbdN'")
        }),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(error) => Err(Failure::io(error, format_args!("reading the mappings from {}", path.display()))),
    }
}

/// Writes the file, durably.
///
/// # Errors
/// Errors of the file system.
pub fn save(data: &Path, records: &[MappingRecord]) -> Result<()> {
    let path = path_in(data);
    let bytes = serde_json::to_vec(&StoredMappings { version: VERSION, mappings: records })
        .map_err(|error| Failure::failed(format!("writing the mappings: {error}")))?;
    replace_file(&path, &bytes)
        .map_err(|error| Failure::io(error, format_args!("writing the mappings to {}", path.display())))
}

fn decode(bytes: &[u8]) -> std::result::Result<Vec<MappingRecord>, String> {
    let stored: StoredMappings<Vec<MappingRecord>> =
        serde_json::from_slice(bytes).map_err(|error| format!("cannot be parsed: {error}"))?;
    match stored.version {
        VERSION => Ok(stored.mappings),
        other => Err(format!("version {other}, this build has version {VERSION}")),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn record(device: Option<u32>) -> MappingRecord {
        MappingRecord {
            pool: "local".into(),
            image: "disk1".into(),
            backend: "forebay:local/disk1:1".into(),
            boot: "b".into(),
            device,
            connections: 1,
            owns_export: true,
        }
    }

    #[test]
    fn what_is_saved_is_loaded() {
        let dir = tempfile::tempdir().expect("a directory");
        assert_eq!(load(dir.path()).expect("no file"), []);
        let records = [record(None), record(Some(3))];
        save(dir.path(), &records).expect("saved");
        assert_eq!(load(dir.path()).expect("loaded"), records);
    }

    #[test]
    fn another_version_is_refused() {
        let dir = tempfile::tempdir().expect("a directory");
        fs::write(path_in(dir.path()), r#"{"version":2,"mappings":[]}"#).expect("written");
        let failure = load(dir.path()).expect_err("another version");
        assert_eq!(failure.kind, FailureKind::Corrupt);
        assert!(failure.message.contains("version 2"), "{failure}");
    }

    proptest! {
        #[test]
        fn foreign_bytes_are_parsed_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..100)) {
            let _ = decode(&bytes);
        }
    }
}
