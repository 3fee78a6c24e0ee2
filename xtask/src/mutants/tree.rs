//! A copy of the source in which faults are planted, so that the working tree stays unchanged.

use std::collections::BTreeSet;
use std::fs::{File, TryLockError};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use super::list::Mutant;
use crate::shell;

/// Returns the folder of the copy, its build and the results.
pub(super) fn folder() -> PathBuf {
    shell::root().join("target/mutants")
}

/// Copy of the source.
pub(super) struct Tree {
    root: PathBuf,
    commit: String,
    /// Locked as long as faults are planted: two runs would undo each other's.
    _lock: File,
}

/// Fault that is in the copy.
pub(super) struct Planted {
    path: PathBuf,
    text: String,
}

impl Planted {
    /// Removes it.
    pub(super) fn undo(self) -> Result<()> {
        std::fs::write(&self.path, &self.text).with_context(|| format!("cannot write {}", self.path.display()))
    }
}

impl Tree {
    /// Makes the copy the same as the source, and skips unchanged files, so that they are not rebuilt.
    pub(super) fn prepare() -> Result<Self> {
        let root = folder().join("tree");
        std::fs::create_dir_all(&root).with_context(|| format!("cannot create {}", root.display()))?;
        let lock = lock(&folder().join("lock"))?;
        let arguments = ["ls-files", "--cached", "--others", "--exclude-standard", "-z"];
        let listed = shell::output(shell::command("git").args(arguments))?;
        let names: BTreeSet<PathBuf> = listed.split_terminator('\0').map(PathBuf::from).collect();
        for name in names.iter().filter(|name| shell::root().join(name).is_file()) {
            copy(&shell::root().join(name), &root.join(name)).with_context(|| format!("copying {}", name.display()))?;
        }
        remove_others(&root, &root, &names)?;
        Ok(Self { root, commit: commit()?, _lock: lock })
    }

    /// Returns the commit that it is a copy of, with `+` where the source has changes beside it.
    pub(super) fn commit(&self) -> &str {
        &self.commit
    }

    /// Returns its folder.
    pub(super) fn root(&self) -> &Path {
        &self.root
    }

    /// Plants a fault in it.
    pub(super) fn plant(&self, mutant: &Mutant) -> Result<Planted> {
        let path = self.root.join(mutant.file);
        let text = std::fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))?;
        std::fs::write(&path, mutant.apply(&text)?).with_context(|| format!("cannot write {}", path.display()))?;
        Ok(Planted { path, text })
    }
}

fn commit() -> Result<String> {
    let git = |arguments: &[&str]| shell::output(shell::command("git").args(arguments));
    let changed = !git(&["status", "--porcelain"])?.trim().is_empty();
    Ok(git(&["rev-parse", "--short=9", "HEAD"])?.trim().to_owned() + if changed { "+" } else { "" })
}

fn lock(path: &Path) -> Result<File> {
    let file = File::create(path).with_context(|| format!("cannot create {}", path.display()))?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(TryLockError::WouldBlock) => bail!("faults are being planted already: {} is locked", path.display()),
        Err(TryLockError::Error(error)) => Err(error).with_context(|| format!("cannot lock {}", path.display())),
    }
}

fn copy(from: &Path, to: &Path) -> Result<()> {
    let bytes = std::fs::read(from)?;
    if std::fs::read(to).is_ok_and(|there| there == bytes) {
        return Ok(());
    }
    if let Some(folder) = to.parent() {
        std::fs::create_dir_all(folder)?;
    }
    std::fs::write(to, bytes)?;
    std::fs::set_permissions(to, std::fs::metadata(from)?.permissions())?;
    Ok(())
}

/// Removes files that the source has no more.
fn remove_others(root: &Path, folder: &Path, names: &BTreeSet<PathBuf>) -> Result<()> {
    for entry in std::fs::read_dir(folder)? {
        let path = entry?.path();
        if path.is_dir() {
            remove_others(root, &path, names)?;
        } else if !names.contains(path.strip_prefix(root)?) {
            std::fs::remove_file(&path).with_context(|| format!("cannot remove {}", path.display()))?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::shell::Scratch;

    #[test]
    fn two_runs_at_once_are_refused() {
        let scratch = Scratch::new("lock").expect("a folder");
        let path = scratch.path().join("lock");
        let first = lock(&path).expect("free");
        assert!(lock(&path).is_err());
        drop(first);
        lock(&path).expect("free again");
    }

    #[test]
    fn a_copy_keeps_what_is_the_same_and_forgets_what_is_gone() {
        let scratch = Scratch::new("tree").expect("a folder");
        let (from, to) = (scratch.path().join("from"), scratch.path().join("to/deep"));
        std::fs::write(&from, "one").expect("written");
        copy(&from, &to).expect("copied");
        let first = std::fs::metadata(&to).expect("there").modified().expect("a time");
        copy(&from, &to).expect("copied");
        assert_eq!(std::fs::metadata(&to).expect("there").modified().expect("a time"), first, "left alone");
        std::fs::write(&from, "two").expect("written");
        copy(&from, &to).expect("copied");
        assert_eq!(std::fs::read(&to).expect("there"), b"two");
        let root = scratch.path().join("to");
        std::fs::write(root.join("other"), "x").expect("written");
        remove_others(&root, &root, &BTreeSet::from([PathBuf::from("deep")])).expect("removed");
        assert!(to.exists() && !root.join("other").exists());
    }
}
