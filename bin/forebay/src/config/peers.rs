//! Who the daemon talks to by messages, and how: other daemons on the cluster's side, clients on the other.

use std::fs;
use std::net::IpAddr;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use forebay_messenger::wire::control::mode;
use forebay_messenger::{Address, Key, Network};
use serde::Deserialize;

use super::{ConfigFile, absolute};
use crate::cli::Serve;
use crate::failure::{Failure, Result};

/// What carries messages to an address that does not say so itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Transport {
    /// TCP.
    #[default]
    Tcp,
    /// RDMA; TCP at the same place where that is not to be had.
    Rdma,
}

impl Transport {
    /// An address: as it says, or over this transport.
    pub fn address(self, text: &str) -> Result<Address> {
        let names_one = ["tcp:", "rdma:", "unix:", "shm:"].iter().any(|scheme| text.starts_with(scheme));
        let whole = match self {
            Self::Rdma if !names_one => format!("rdma:{text}"),
            _ => text.to_owned(),
        };
        let address = whole.parse::<Address>().map_err(|error| Failure::invalid(error.to_string()))?;
        Ok(match address {
            Address::Unix(path) => Address::Unix(absolute(&path)?),
            Address::Shm(path) => Address::Shm(absolute(&path)?),
            Address::Loopback(_) => {
                return Err(Failure::invalid(format!(
                    "'{text}' is within one process, where there is no other daemon"
                )));
            }
            address => address,
        })
    }
}

/// The daemon's side of its peers.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Peers {
    /// Where it listens.
    pub listen: Vec<Address>,
    /// Other daemons that it keeps a session with.
    pub connect: Vec<Address>,
    /// The key that all of them share.
    pub key: Option<Key>,
    /// From where they may come; empty for everywhere.
    pub allow: Vec<Network>,
    /// Frames to and from other machines are encrypted.
    pub secure: bool,
    /// The address of the RDMA device that is used to connect.
    pub rdma_local: Option<IpAddr>,
}

impl Peers {
    /// Flags over the configuration file.
    pub(super) fn resolve(serve: &Serve, file: &mut ConfigFile) -> Result<Self> {
        let cluster = file.cluster.unwrap_or_default();
        let addresses = |texts: &[String]| texts.iter().map(|text| cluster.address(text)).collect::<Result<Vec<_>>>();
        let listen = if serve.peer.is_empty() { file.peer.take().unwrap_or_default() } else { serve.peer.clone() };
        let (listen, connect) = (addresses(&listen)?, addresses(&file.peers.take().unwrap_or_default())?);
        let allow = if serve.peer_allow.is_empty() {
            file.peer_allow.take().unwrap_or_default()
        } else {
            serve.peer_allow.clone()
        };
        let allow = allow.iter().map(|text| text.parse::<Network>().map_err(Failure::invalid));
        let key = match serve.peer_key.clone().or(file.peer_key.take()) {
            Some(path) => Some(read_key(&path)?),
            None => None,
        };
        if let (None, Some(open)) = (&key, listen.iter().chain(&connect).find(|address| !address.is_local())) {
            let text = format!("{open} is reached from other machines, and there is no key: --peer-key is needed");
            return Err(Failure::invalid(text).hint(KEY_HINT));
        }
        Ok(Self {
            listen,
            connect,
            key,
            allow: allow.collect::<Result<_>>()?,
            secure: file.peer_secure.unwrap_or(true),
            rdma_local: file.rdma_local,
        })
    }

    /// The modes that are offered and taken; `None` for the messenger's own choice.
    pub fn modes(&self) -> Option<Vec<u32>> {
        (!self.secure).then(|| vec![mode::CRC, mode::SECURE])
    }
}

const KEY_HINT: &str =
    "make one, and give it to each machine: (umask 077; od -An -v -tx1 -N32 /dev/urandom | tr -d ' \\n' > peer.key)";

/// A key of 64 hexadecimal digits, from a file that nobody else may read.
pub fn read_key(path: &Path) -> Result<Key> {
    let text = read_private(path)?;
    let wrong = || Failure::invalid(format!("{} holds no key of 64 hexadecimal digits", path.display()));
    Key::from_hex(&text).ok_or_else(|| wrong().hint(KEY_HINT))
}

/// A file with a secret, which nobody else may read.
pub fn read_private(path: &Path) -> Result<String> {
    let failed = |error| Failure::io(error, format_args!("reading the key {}", path.display()));
    let mode = fs::metadata(path).map_err(failed)?.permissions().mode();
    if mode & 0o077 != 0 {
        let text = format!("the key {} may be read or changed by others (mode {:o})", path.display(), mode & 0o777);
        return Err(Failure::invalid(text).hint(format!("chmod 600 {}", path.display())));
    }
    fs::read_to_string(path).map_err(failed)
}

/// What the configuration says to a client.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ClientSide {
    /// What carries messages to addresses that do not say so themselves.
    pub transport: Transport,
    /// The address of the RDMA device that is used.
    pub rdma_local: Option<IpAddr>,
    /// The file of the key.
    pub key: Option<PathBuf>,
}

impl ClientSide {
    /// From a daemon's configuration file.
    pub fn load(path: &Path) -> Result<Self> {
        let file = ConfigFile::load(path)?;
        Ok(Self { transport: file.client.unwrap_or_default(), rdma_local: file.rdma_local, key: file.peer_key })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key_file(text: &str, mode: u32) -> tempfile::NamedTempFile {
        let file = tempfile::NamedTempFile::new().expect("a temporary file");
        fs::write(file.path(), text).expect("written");
        fs::set_permissions(file.path(), fs::Permissions::from_mode(mode)).expect("its mode");
        file
    }

    fn resolve(text: &str, serve: &Serve) -> Result<Peers> {
        Peers::resolve(serve, &mut toml::from_str(text).expect("a configuration"))
    }

    #[test]
    fn each_side_has_a_transport_of_its_own() {
        let key = key_file(&"ab".repeat(32), 0o600);
        let text = format!(
            "cluster = 'rdma'\nclient = 'tcp'\nrdma_local = '10.17.23.10'\npeer = ['10.17.23.10:7000', 'tcp:127.0.0.1:1']\n\
             peers = ['10.17.23.11:7000']\npeer-allow = ['10.17.0.0/16']\npeer-key = '{}'\n",
            key.path().display()
        );
        let peers = resolve(&text, &Serve::default()).expect("a configuration");
        let shown = |addresses: &[Address]| addresses.iter().map(ToString::to_string).collect::<Vec<_>>();
        assert_eq!(shown(&peers.listen), ["rdma:10.17.23.10:7000", "tcp:127.0.0.1:1"]);
        assert_eq!(shown(&peers.connect), ["rdma:10.17.23.11:7000"]);
        assert_eq!((peers.rdma_local, peers.allow.len()), ("10.17.23.10".parse().ok(), 1));
        assert!(peers.secure && peers.modes().is_none());
        let file = key_file(&text, 0o644);
        let client = ClientSide::load(file.path()).expect("the same file");
        assert_eq!((client.transport, client.key.as_deref()), (Transport::Tcp, Some(key.path())));
        let flags = Serve { peer: vec!["127.0.0.1:5".into()], ..Serve::default() };
        assert_eq!(shown(&resolve(&text, &flags).expect("flags win").listen), ["rdma:127.0.0.1:5"]);
        assert_eq!(resolve("", &Serve::default()).expect("nothing"), Peers { secure: true, ..Peers::default() });
    }

    #[test]
    fn what_is_wrong_is_said() {
        let open = key_file(&"ab".repeat(32), 0o644);
        let short = key_file("ab", 0o600);
        let key = |file: &tempfile::NamedTempFile| format!("peer-key = '{}'", file.path().display());
        for (text, says) in [
            ("peer = ['10.0.0.1:7000']".to_owned(), "--peer-key"),
            ("peers = ['10.0.0.1:7000']".to_owned(), "--peer-key"),
            ("peer = ['nowhere']".to_owned(), "nowhere"),
            ("peer = ['loopback:x']".to_owned(), "loopback:x"),
            ("peer-allow = ['10.0.0.0/99']".to_owned(), "10.0.0.0/99"),
            ("peer-key = '/nowhere/at/all'".to_owned(), "/nowhere/at/all"),
            (key(&open), "others"),
            (key(&short), "64"),
        ] {
            let failure = resolve(&text, &Serve::default()).expect_err(&text);
            assert!(failure.message.contains(says), "{text}: {failure}");
        }
        assert!(toml::from_str::<ConfigFile>("cluster = 'pigeon'").is_err());
    }
}
