//! What is exported, and the file that remembers it over restarts.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::numbers::Retired;
use super::small_files::replace_file;
use crate::failure::{Failure, FailureKind, Result};

/// Version of the file that this build writes and reads.
const FILE_VERSION: u32 = 1;

/// Content of the file.
#[derive(Debug, Serialize, Deserialize)]
struct TargetsFile {
    version: u32,
    /// Exports, each an [`Attach`](crate::api::Attach).  They are looked at one by one: one that makes no sense must not
    /// take the others with it.
    targets: Vec<Value>,
    /// Numbers that hosts may remember; a build that does not know them may give them to others.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    retired: Vec<Retired>,
}

/// Returns the path of the file.
pub fn path(data: &Path) -> PathBuf {
    data.join("targets.json")
}

/// Reads the file: the exports, and the numbers of those that have ended.  No file means none.
pub fn load(data: &Path) -> Result<(Vec<Value>, Vec<Retired>)> {
    let path = path(data);
    let bytes = match fs::read(&path) {
        Ok(bytes) => bytes,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Default::default()),
        Err(error) => return Err(Failure::io(error, format_args!("reading the exports from {}", path.display()))),
    };
    let damaged = |why: String| {
        Failure::new(FailureKind::Corrupt, format!("the list of exports {} is damaged: {why}", path.display()))
            .hint("mend it, or remove it and attach the images again")
    };
    let version = serde_json::from_slice::<Value>(&bytes)
        .map_err(|error| damaged(error.to_string()))?
        .get("version")
        .and_then(Value::as_u64);
    if let Some(version) = version.filter(|&version| version > u64::from(FILE_VERSION)) {
        return Err(Failure::new(
            FailureKind::Unsupported,
            format!("the list of exports {} has version {version}, this build knows {FILE_VERSION}", path.display()),
        )
        .hint("run the newer forebay that wrote it"));
    }
    let file: TargetsFile = serde_json::from_slice(&bytes).map_err(|error| damaged(error.to_string()))?;
    Ok((file.targets, file.retired))
}

/// Replaces the file in one step: after a crash it is wholly the old or wholly the new one.
pub fn store(data: &Path, targets: Vec<Value>, retired: Vec<Retired>) -> Result<()> {
    let path = path(data);
    let text = serde_json::to_vec_pretty(&TargetsFile { version: FILE_VERSION, targets, retired })
        .map_err(|error| Failure::failed(format!("writing the exports: {error}")))?;
    replace_file(&path, &text).map_err(|error| Failure::io(error, format_args!("writing {}", path.display())))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::api::{Attach, Front};

    #[test]
    fn the_list_survives() {
        let dir = tempfile::tempdir().expect("a directory");
        assert_eq!(load(dir.path()), Ok(Default::default()));
        let attach = Attach {
            pool: "local".into(),
            image: "x".into(),
            front: Front::Nbd,
            read_only: true,
            unit: Some(3),
            hosts: Vec::new(),
            ana_group: None,
            uuid: None,
            log: None,
        };
        let targets = vec![serde_json::to_value(attach).expect("JSON"), serde_json::json!({ "no": "export" })];
        let retired = vec![Retired { front: Front::Iscsi, unit: 7, image: "an image".into() }];
        store(dir.path(), targets.clone(), retired.clone()).expect("stored");
        assert_eq!(load(dir.path()), Ok((targets, retired)));
        store(dir.path(), Vec::new(), Vec::new()).expect("stored again");
        assert_eq!(load(dir.path()), Ok(Default::default()));
        assert_eq!(fs::read_dir(dir.path()).expect("a directory").count(), 1, "nothing is left beside the file");
    }

    #[test]
    fn damage_and_newer_versions_are_named() {
        let dir = tempfile::tempdir().expect("a directory");
        fs::write(path(dir.path()), b"{\"version\":1,").expect("written");
        assert_eq!(load(dir.path()).expect_err("damaged").kind, FailureKind::Corrupt);
        fs::write(path(dir.path()), b"{\"version\":2,\"targets\":{}}").expect("written");
        assert_eq!(load(dir.path()).expect_err("newer").kind, FailureKind::Unsupported);
    }
}
