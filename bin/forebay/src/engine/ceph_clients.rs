//! Ceph client addresses used by daemons of this data directory.
//!
//! A daemon that is killed leaves watches and locks behind, which a cluster keeps for its watch timeout
//! (`osd_client_watch_timeout`, 30 s).  The next daemon of the data directory knows that the process is gone, since
//! it holds the lock of the embedded store; so it fences the client at once instead of waiting for the timeout.  The
//! address of a client is kept in the file `ceph-clients.json`, from before its first request until it has ended
//! cleanly.
//!
//! A copy of the directory has another store, and its lock does not cover the daemon that runs on the original.  So
//! the file is valid only in the directory in which it was written, on the same machine since it booted, and for
//! clients with the same IP address; in any other case the watch timeout applies.

use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::small_files::replace_file;
use crate::failure::{Failure, FailureKind, Result};

/// Client of a cluster.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct CephClient {
    /// FSID of the cluster.
    pub fsid: String,
    /// Client address with its nonce, in the cluster's notation.
    pub address: String,
}

/// Content of the file.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Listed {
    /// Identity of the directory in which the file was written.
    place: String,
    clients: Vec<CephClient>,
}

/// File that lists the clients of a data directory's daemons.
#[derive(Debug, Clone)]
pub struct CephClients {
    path: PathBuf,
    place: String,
}

impl CephClients {
    /// Returns the file of a data directory.  The process must hold the lock of its store.
    pub fn of(data: &Path) -> Self {
        Self { path: data.join("ceph-clients.json"), place: place_of(data) }
    }

    /// Returns the clients that did not end cleanly, of the cluster and the IP address of `own`.
    ///
    /// # Errors
    /// A file that cannot be read, or has another format.
    pub fn left(&self, own: &CephClient) -> Result<Vec<CephClient>> {
        let is_alike = |client: &CephClient| client.fsid == own.fsid && client.ip() == own.ip() && client != own;
        Ok(self.read()?.clients.into_iter().filter(is_alike).collect())
    }

    /// Records a client before its first request, replacing all entries of its cluster: they are fenced, or their
    /// watches time out.
    ///
    /// # Errors
    /// A file that cannot be written; it is unchanged then.
    pub fn begin(&self, own: CephClient) -> Result<()> {
        // An unreadable file is replaced: it identifies no client.
        let mut clients = self.read().unwrap_or_default().clients;
        clients.retain(|client| client.fsid != own.fsid);
        clients.extend(own.ip().is_some().then_some(own));
        self.write(clients)
    }

    /// Removes a client that has ended cleanly.
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
        Ok(if listed.place == self.place { listed } else { Listed::default() })
    }

    fn write(&self, clients: Vec<CephClient>) -> Result<()> {
        let listed = Listed { place: self.place.clone(), clients };
        let text = serde_json::to_vec(&listed).map_err(|error| Failure::failed(error.to_string()))?;
        replace_file(&self.path, &text)
            .map_err(|error| Failure::io(error, format_args!("writing {}", self.path.display())))
    }
}

impl CephClient {
    /// Returns the IP address, without port and nonce, if the monitors have reported one.
    fn ip(&self) -> Option<&str> {
        let socket = self.address.split_once('/')?.0;
        socket.rsplit_once(':').map(|(ip, _)| ip).filter(|ip| !ip.is_empty())
    }
}

/// Identifies a directory and its location: the machine since it booted, and the directory's file system and inode,
/// which no copy shares.
fn place_of(data: &Path) -> String {
    let read = |path| fs::read_to_string(path).map(|text| text.trim().to_owned()).unwrap_or_default();
    let boot = read("/proc/sys/kernel/random/boot_id");
    let (machine, host) = (read("/etc/machine-id"), read("/proc/sys/kernel/hostname"));
    let (device, inode) = fs::metadata(data).map_or((0, 0), |meta| (meta.dev(), meta.ino()));
    format!("{boot} {machine} {host} {device}:{inode}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn client(fsid: &str, nonce: u32) -> CephClient {
        CephClient { fsid: fsid.into(), address: format!("192.0.2.7:0/{nonce}") }
    }

    #[test]
    fn clients_are_listed_until_they_end_or_another_takes_their_place() {
        let dir = tempfile::tempdir().expect("a directory");
        let clients = CephClients::of(dir.path());
        assert_eq!(clients.left(&client("a", 9)).expect("no file"), []);
        clients.begin(client("a", 1)).expect("written");
        clients.begin(client("b", 2)).expect("written");
        // The next daemon finds the entries of its own cluster, and replaces them.
        assert_eq!(CephClients::of(dir.path()).left(&client("a", 3)).expect("read"), [client("a", 1)]);
        clients.begin(client("a", 3)).expect("written");
        assert_eq!(clients.left(&client("a", 4)).expect("read"), [client("a", 3)]);
        assert_eq!(clients.left(&client("a", 3)).expect("read"), [], "nobody fences itself");
        assert_eq!(clients.left(&client("b", 4)).expect("read"), [client("b", 2)], "another cluster's is kept");
        clients.end(&client("a", 3)).expect("written");
        assert_eq!(clients.left(&client("a", 4)).expect("read"), []);
    }

    #[test]
    fn a_copy_fences_nobody() {
        let (dir, copy) = (tempfile::tempdir().expect("a directory"), tempfile::tempdir().expect("a directory"));
        let clients = CephClients::of(dir.path());
        clients.begin(client("a", 1)).expect("written");
        fs::copy(&clients.path, copy.path().join("ceph-clients.json")).expect("copied");
        assert_eq!(CephClients::of(copy.path()).left(&client("a", 2)).expect("read"), [], "in another directory");
        let later = CephClients { place: clients.place.replacen(|c| c != ' ', "0", 36), ..clients.clone() };
        assert_eq!(later.left(&client("a", 2)).expect("read"), [], "after another boot");
        let elsewhere = CephClient { address: "192.0.2.8:0/2".into(), ..client("a", 2) };
        assert_eq!(clients.left(&elsewhere).expect("read"), [], "from another address");
        assert_eq!(clients.left(&client("a", 2)).expect("read"), [client("a", 1)]);
    }

    #[test]
    fn a_client_without_an_address_is_not_listed() {
        let dir = tempfile::tempdir().expect("a directory");
        let clients = CephClients::of(dir.path());
        let nameless = |nonce: u32| CephClient { address: format!(":/{nonce}"), ..client("a", 1) };
        clients.begin(nameless(1)).expect("written");
        assert_eq!(clients.left(&nameless(2)).expect("read"), []);
        let six = CephClient { address: "[2001:db8::7]:0/1".into(), ..client("a", 1) };
        assert_eq!(six.ip(), Some("[2001:db8::7]"));
    }

    #[test]
    fn a_damaged_file_is_an_error_and_is_replaced() {
        let dir = tempfile::tempdir().expect("a directory");
        let clients = CephClients::of(dir.path());
        fs::write(&clients.path, b"{").expect("written");
        assert_eq!(clients.left(&client("a", 2)).expect_err("damaged").kind, FailureKind::Corrupt);
        clients.begin(client("a", 1)).expect("written");
        assert_eq!(clients.left(&client("a", 2)).expect("read"), [client("a", 1)]);
    }
}
