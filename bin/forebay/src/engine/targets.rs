//! What is exported, and the file that remembers it over restarts.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::numbers::Retired;
use crate::failure::{Failure, FailureKind, Result};

/// The version of the file that this build writes and reads.
const FILE_VERSION: u32 = 1;

/// The file's content.
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

/// Where the file is.
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

/// Space kept for the daemon's own files, so that an export can be ended when the file system is full.
const RESERVE_NAME: &str = "reserve";
const RESERVE_LEN: usize = 64 << 10;

/// Takes the space that is kept for the daemon's own files, if there is any.
pub fn keep_reserve(data: &Path) {
    let path = data.join(RESERVE_NAME);
    if fs::metadata(&path).is_ok_and(|meta| meta.len() == RESERVE_LEN as u64) {
        return;
    }
    // Not of zeroes: a file system may store those as nothing.
    if let Err(error) = fs::write(&path, [0xa5; RESERVE_LEN]) {
        tracing::debug!(%error, "no space is kept for the daemon's own files");
        let _ = fs::remove_file(&path);
    }
}

/// Replaces a file in one step.  On a full file system the space kept beside it is used.
///
/// # Errors
/// Those of the file system; whatever they are, the old file is there.
pub fn replace_file(path: &Path, content: &[u8]) -> io::Result<()> {
    let reserve = path.with_file_name(RESERVE_NAME);
    match write_and_rename(path, content) {
        Err(error) if error.kind() == io::ErrorKind::StorageFull && fs::remove_file(&reserve).is_ok() => {
            let done = write_and_rename(path, content);
            if let Some(data) = path.parent() {
                keep_reserve(data);
            }
            done
        }
        done => done,
    }
}

/// Writes a file beside, makes it durable, and puts it in the place of the old one.
fn write_and_rename(path: &Path, content: &[u8]) -> io::Result<()> {
    let dir = path.parent().ok_or_else(|| io::Error::other("a path without a directory"))?;
    let beside = path.with_extension("new");
    let written = File::create(&beside).and_then(|mut file| {
        file.write_all(content)?;
        file.sync_all()
    });
    if let Err(error) = written.and_then(|()| fs::rename(&beside, path)) {
        let _ = fs::remove_file(&beside);
        return Err(error);
    }
    File::open(dir)?.sync_all()
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
    fn what_cannot_be_written_leaves_the_old_file() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("file");
        replace_file(&path, b"old").expect("written");
        keep_reserve(dir.path());
        assert_eq!(fs::metadata(dir.path().join(RESERVE_NAME)).expect("kept").len(), RESERVE_LEN as u64);
        // The place beside it is taken by what cannot be written to.
        fs::create_dir(path.with_extension("new")).expect("a directory");
        assert!(replace_file(&path, b"new").is_err());
        assert_eq!(fs::read(&path).expect("there"), b"old");
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
