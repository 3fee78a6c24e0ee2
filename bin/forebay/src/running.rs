//! Files by which commands find the daemons that run on this machine.

use std::fs::{self, DirBuilder};
use std::io::ErrorKind;
use std::os::unix::fs::DirBuilderExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

/// The runtime directory of daemons that belong to root.
const SYSTEM_RUN_DIR: &str = "/run/forebay";

/// Names the runtime directory in place of the default.
pub const RUN_DIR_VARIABLE: &str = "FOREBAY_RUN_DIR";

/// Registration of a running daemon, in `DIR/daemon.json` and in its user's runtime directory.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunningDaemon {
    /// Process id.
    pub pid: u32,
    /// Control socket.
    pub control: PathBuf,
    /// Data directory; empty in files of versions that did not write it.
    #[serde(default)]
    pub data: PathBuf,
}

impl RunningDaemon {
    /// Returns the path of the file in a data directory.
    pub fn path_in(data: &Path) -> PathBuf {
        data.join("daemon.json")
    }

    /// Reads the file in a data directory; `None` when there is none that makes sense.
    pub fn read_in(data: &Path) -> Option<Self> {
        Self::read(&Self::path_in(data))
    }

    fn read(path: &Path) -> Option<Self> {
        serde_json::from_slice(&fs::read(path).ok()?).ok()
    }

    /// Tests whether a process accepts connections at its control socket; a socket of another user counts.
    fn answers(&self) -> bool {
        match UnixStream::connect(&self.control) {
            Ok(_) => true,
            Err(error) => error.kind() == ErrorKind::PermissionDenied,
        }
    }
}

/// Returns the directory where daemons of this user list themselves, if there is one.
fn own_list() -> Option<PathBuf> {
    let variable = |name| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    let run = variable(RUN_DIR_VARIABLE).or_else(|| match rustix::process::geteuid().is_root() {
        true => Some(SYSTEM_RUN_DIR.into()),
        false => variable("XDG_RUNTIME_DIR").map(|run| run.join("forebay")),
    });
    run.map(|run| list_in(&run))
}

fn list_in(run: &Path) -> PathBuf {
    run.join("daemons")
}

/// A daemon's entry in the list of those that run; removed when this is dropped.
pub struct RunningEntry {
    path: PathBuf,
}

impl RunningEntry {
    /// Writes the entry.  `None`: there is no directory for it, and commands find the daemon by its data directory
    /// only.
    pub fn write(daemon: &RunningDaemon) -> Option<Self> {
        Self::write_to(&own_list()?, daemon)
    }

    fn write_to(list: &Path, daemon: &RunningDaemon) -> Option<Self> {
        let path = list.join(format!("{}.json", daemon.pid));
        let written = serde_json::to_vec(daemon).map_err(std::io::Error::from).and_then(|text| {
            // Others may look: the names of directories are no secret, the sockets are their owner's.
            DirBuilder::new().recursive(true).mode(0o755).create(list)?;
            // A reader that sees a part of it ignores the entry.
            fs::write(&path, &text)
        });
        match written {
            Ok(()) => Some(Self { path }),
            Err(error) => {
                tracing::debug!(%error, path = %path.display(), "not listed among the running daemons");
                None
            }
        }
    }
}

impl Drop for RunningEntry {
    fn drop(&mut self) {
        // A leftover file is removed by the next command that reads the directory.
        let _ = fs::remove_file(&self.path);
    }
}

/// Returns the daemons of this user and of root that answer, by process.
pub fn daemons() -> Vec<RunningDaemon> {
    let system = match std::env::var_os(RUN_DIR_VARIABLE) {
        Some(_) => None,
        None => Some(list_in(Path::new(SYSTEM_RUN_DIR))),
    };
    let mut lists: Vec<PathBuf> = own_list().into_iter().chain(system).collect();
    lists.dedup();
    let mut found: Vec<RunningDaemon> = lists.iter().flat_map(|list| daemons_in(list)).collect();
    found.sort_by_key(|daemon| daemon.pid);
    found
}

fn daemons_in(list: &Path) -> Vec<RunningDaemon> {
    let mut found = Vec::new();
    for entry in fs::read_dir(list).into_iter().flatten().flatten() {
        let path = entry.path();
        let Some(daemon) = RunningDaemon::read(&path) else { continue };
        if daemon.answers() {
            found.push(daemon);
        } else {
            // Its daemon was killed.
            let _ = fs::remove_file(&path);
        }
    }
    found
}

/// Names these sockets in a sentence.
pub fn either(controls: &[PathBuf]) -> String {
    controls.iter().map(|path| path.display().to_string()).collect::<Vec<_>>().join(" or ")
}

/// Advises what to do when no daemon answers where a command looked: names those that run elsewhere, or else
/// `otherwise`.
pub fn advise(otherwise: &str) -> String {
    advise_of(&daemons(), otherwise)
}

fn advise_of(daemons: &[RunningDaemon], otherwise: &str) -> String {
    let option = |daemon: &RunningDaemon| match daemon.data.as_os_str().is_empty() {
        true => format!("--control {}", quoted(&daemon.control)),
        false => format!("--data {}", quoted(&daemon.data)),
    };
    match daemons {
        [] => otherwise.to_owned(),
        [one] => format!("a daemon runs as process {}: add '{}', or set FOREBAY_DATA", one.pid, option(one)),
        several => {
            let each: Vec<String> =
                several.iter().map(|daemon| format!("'{}' (process {})", option(daemon), daemon.pid)).collect();
            format!("several daemons run; choose one with {}, or set FOREBAY_DATA", each.join(" or "))
        }
    }
}

/// Returns a path for a shell.
fn quoted(path: &Path) -> String {
    let text = path.display().to_string();
    let plain = |c: char| c.is_ascii_alphanumeric() || "/._-+:@,".contains(c);
    if text.chars().all(plain) { text } else { format!("'{}'", text.replace('\'', r"'\''")) }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixListener;

    use super::*;

    fn daemon(pid: u32, dir: &Path) -> RunningDaemon {
        RunningDaemon { pid, control: dir.join(format!("{pid}.sock")), data: dir.into() }
    }

    #[test]
    fn the_list_has_daemons_that_answer_and_forgets_others() {
        let dir = tempfile::tempdir().expect("a directory");
        let list = list_in(dir.path());
        assert!(daemons_in(&list).is_empty(), "there is no list");
        let (first, second) = (daemon(1, dir.path()), daemon(2, dir.path()));
        let _listening = UnixListener::bind(&first.control).expect("a socket");
        let entries = [&first, &second].map(|daemon| RunningEntry::write_to(&list, daemon).expect("listed"));
        assert_eq!(daemons_in(&list), std::slice::from_ref(&first));
        assert!(!entries[1].path.exists(), "the entry of a daemon that is gone is removed");
        drop(entries);
        assert!(daemons_in(&list).is_empty(), "a daemon takes its entry with it");
    }

    #[test]
    fn advice_names_the_option_for_each_running_daemon() {
        let (first, mut second) = (daemon(1, Path::new("/srv/a")), daemon(2, Path::new("/srv/b")));
        assert_eq!(advise_of(&[], "start one"), "start one");
        let text = advise_of(std::slice::from_ref(&first), "start one");
        assert_eq!(text, "a daemon runs as process 1: add '--data /srv/a', or set FOREBAY_DATA");
        second.data = PathBuf::new();
        let text = advise_of(&[first, second], "start one");
        assert!(text.contains("'--data /srv/a' (process 1) or '--control /srv/b/2.sock' (process 2)"), "{text}");
    }

    #[test]
    fn paths_are_quoted_for_a_shell() {
        assert_eq!(quoted(Path::new("/srv/it's")), r"'/srv/it'\''s'");
        assert_eq!(quoted(Path::new("/srv/a-1")), "/srv/a-1");
    }
}
