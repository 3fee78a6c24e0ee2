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
    /// Id of the image, to which alone its device is connected; absent until it was connected once, and in records of
    /// builds that did not store it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image_id: Option<String>,
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
/// `Unsupported` for a file of another version; `Corrupt` for a damaged one; errors of the file system.
pub fn load(data: &Path) -> Result<Vec<MappingRecord>> {
    let path = path_in(data);
    match fs::read(&path) {
        Ok(bytes) => decode(&bytes).map_err(|error| error.describe(&path)),
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

/// Reason why the file cannot be used.
#[derive(Debug)]
enum MappingsFileError {
    /// The file is not the JSON of mappings.
    Damaged(serde_json::Error),
    /// The file has a version that this build does not know.
    Version(u64),
}

impl MappingsFileError {
    fn describe(self, path: &Path) -> Failure {
        let path = path.display();
        match self {
            Self::Damaged(error) => {
                Failure::new(FailureKind::Corrupt, format!("the mappings in {path} cannot be parsed: {error}"))
                    .hint("move the file away; end its devices with 'nbd-client -d /dev/nbdN'")
            }
            Self::Version(version) => {
                let what = format!("the mappings in {path} have version {version}, this build knows {VERSION}");
                Failure::new(FailureKind::Unsupported, what)
                    .hint("use the build of forebay that wrote the file, or a later one")
            }
        }
    }
}

fn decode(bytes: &[u8]) -> std::result::Result<Vec<MappingRecord>, MappingsFileError> {
    let any: serde_json::Value = serde_json::from_slice(bytes).map_err(MappingsFileError::Damaged)?;
    // Another version may have other fields.
    if let Some(version) = any.get("version").and_then(serde_json::Value::as_u64)
        && version != u64::from(VERSION)
    {
        return Err(MappingsFileError::Version(version));
    }
    let stored: StoredMappings<Vec<MappingRecord>> = serde_json::from_value(any).map_err(MappingsFileError::Damaged)?;
    Ok(stored.mappings)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn record(device: Option<u32>) -> MappingRecord {
        MappingRecord {
            pool: "local".into(),
            image: "disk1".into(),
            image_id: Some("1234".into()),
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
    fn a_record_without_an_id_is_loaded() {
        let dir = tempfile::tempdir().expect("a directory");
        let text = r#"{"version":1,"mappings":[{"pool":"local","image":"disk1","backend":"forebay:local/disk1:1",
            "boot":"b","device":3,"connections":1,"owns_export":true}]}"#;
        fs::write(path_in(dir.path()), text).expect("written");
        assert_eq!(load(dir.path()).expect("loaded"), [MappingRecord { image_id: None, ..record(Some(3)) }]);
    }

    #[test]
    fn another_version_is_refused_by_its_number_whatever_it_holds() {
        let dir = tempfile::tempdir().expect("a directory");
        for text in [r#"{"version":2,"mappings":[]}"#, r#"{"version":2,"mappings":[{"what":1}]}"#, r#"{"version":2}"#] {
            fs::write(path_in(dir.path()), text).expect("written");
            let failure = load(dir.path()).expect_err("another version");
            assert_eq!(failure.kind, FailureKind::Unsupported);
            assert!(failure.message.contains("version 2, this build knows 1"), "{failure}");
        }
        for text in ["{", r#"{"version":1}"#, r#"{"mappings":[]}"#] {
            fs::write(path_in(dir.path()), text).expect("written");
            assert_eq!(load(dir.path()).expect_err("damaged").kind, FailureKind::Corrupt, "{text}");
        }
    }

    proptest! {
        #[test]
        fn foreign_bytes_are_parsed_or_refused(bytes in proptest::collection::vec(any::<u8>(), 0..100)) {
            let _ = decode(&bytes);
        }
    }
}
