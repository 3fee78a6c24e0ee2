//! The clients of Ceph clusters that daemons of this data directory were.
//!
//! A daemon that is killed leaves watches and locks behind, which a cluster keeps for its watch timeout
//! (`osd_client_watch_timeout`, 30 s).  The next daemon of the data directory knows that the process is gone, since it has
//! the embedded store's lock; so it fences the client at once instead of waiting for the timeout.  What a client is known
//! by is kept in the file `ceph-clients.json`, from before its first request until it has ended in order.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::small_files::replace_file;
use crate::failure::{Failure, FailureKind, Result};

/// A client of a cluster.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CephClient {
    /// The cluster.
    pub fsid: String,
    /// The client's address with its nonce, as the cluster writes it.
    pub address: String,
}

/// The content of the file.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Listed {
    /// The machine that the clients ran on: a copy of the data directory elsewhere fences nobody.
    machine: String,
    clients: Vec<CephClient>,
}

/// The file that lists the clients of a data directory's daemons.
#[derive(Debug)]
pub struct CephClients {
    path: PathBuf,
    machine: String,
}

impl CephClients {
    /// The file of a data directory, whose store's lock the process has.
    pub fn of(data: &Path) -> Self {
        Self { path: data.join("ceph-clients.json"), machine: machine() }
    }

    /// Returns the clients of a cluster that did not end in order.
    ///
    /// # Errors
    /// A file that cannot be read, or is not one of ours.
    pub fn left(&self, fsid: &str) -> Result<Vec<CephClient>> {
        let listed = self.read()?;
        Ok(listed.clients.into_iter().filter(|client| client.fsid == fsid).collect())
    }

    /// Lists a client before its first request, in place of those that are fenced.
    ///
    /// # Errors
    /// A file that cannot be written; it is unchanged then.
    pub fn begin(&self, own: CephClient, fenced: &[CephClient]) -> Result<()> {
        // What cannot be read is not kept: it says nothing of anybody.
        let mut clients = self.read().unwrap_or_default().clients;
        clients.retain(|client| !fenced.contains(client) && *client != own);
        clients.push(own);
        self.write(clients)
    }

    /// Forgets a client that has ended in order.
    ///
    /// # Errors
    /// A file that cannot be written; it is unchanged then.
    pub fn end(&self, own: &CephClient) -> Result<()> {
        let mut clients = self.read()?.clients;
        clients.retain(|client| client != own);
        self.write(clients)
    }

    fn read(&self) -> Result<Listed> {
        let text = match fs::read(&self.path) {
            Ok(text) => text,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Listed::default()),
            Err(error) => return Err(Failure::io(error, format_args!("reading {}", self.path.display()))),
        };
        let listed: Listed = serde_json::from_slice(&text)
            .map_err(|error| Failure::new(FailureKind::Corrupt, format!("reading {}: {error}", self.path.display())))?;
        Ok(if listed.machine == self.machine { listed } else { Listed::default() })
    }

    fn write(&self, clients: Vec<CephClient>) -> Result<()> {
        let listed = Listed { machine: self.machine.clone(), clients };
        let text = serde_json::to_vec(&listed).map_err(|error| Failure::failed(error.to_string()))?;
        replace_file(&self.path, &text)
            .map_err(|error| Failure::io(error, format_args!("writing {}", self.path.display())))
    }
}

/// What tells this machine from others: its id, or its host name where it has none.
fn machine() -> String {
    let read = |path| fs::read_to_string(path).ok().map(|text| text.trim().to_owned()).filter(|text| !text.is_empty());
    read("/etc/machine-id").or_else(|| read("/proc/sys/kernel/hostname")).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn client(fsid: &str, nonce: u32) -> CephClient {
        CephClient { fsid: fsid.into(), address: format!("192.0.2.7:0/{nonce}") }
    }

    #[test]
    fn clients_are_listed_until_they_end_or_are_fenced() {
        let dir = tempfile::tempdir().expect("a directory");
        let clients = CephClients::of(dir.path());
        assert_eq!(clients.left("a").expect("no file"), []);
        clients.begin(client("a", 1), &[]).expect("written");
        clients.begin(client("b", 2), &[]).expect("written");
        assert_eq!(CephClients::of(dir.path()).left("a").expect("read"), [client("a", 1)]);
        // The next daemon fences what it finds of its own cluster.
        clients.begin(client("a", 3), &[client("a", 1)]).expect("written");
        assert_eq!(clients.left("a").expect("read"), [client("a", 3)]);
        assert_eq!(clients.left("b").expect("read"), [client("b", 2)], "another cluster's is kept");
        clients.end(&client("a", 3)).expect("written");
        assert_eq!(clients.left("a").expect("read"), []);
    }

    #[test]
    fn a_copy_on_another_machine_fences_nobody() {
        let dir = tempfile::tempdir().expect("a directory");
        CephClients::of(dir.path()).begin(client("a", 1), &[]).expect("written");
        let elsewhere = CephClients { machine: "another".into(), ..CephClients::of(dir.path()) };
        assert_eq!(elsewhere.left("a").expect("read"), []);
    }

    #[test]
    fn a_damaged_file_is_an_error_and_is_replaced() {
        let dir = tempfile::tempdir().expect("a directory");
        let clients = CephClients::of(dir.path());
        fs::write(&clients.path, b"{").expect("written");
        assert_eq!(clients.left("a").expect_err("damaged").kind, FailureKind::Corrupt);
        clients.begin(client("a", 1), &[]).expect("written");
        assert_eq!(clients.left("a").expect("read"), [client("a", 1)]);
    }
}
