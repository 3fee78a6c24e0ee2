//! Peer messenger configuration: other daemons in the cluster, and messenger clients.

use std::fs;
use std::net::IpAddr;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use forebay_messenger::wire::control::mode;
use forebay_messenger::{Address, Network, SharedKey};
use serde::Deserialize;

use super::{ConfigFile, absolute};
use crate::cli::ServeArgs;
use crate::failure::{Failure, Result};

/// Transport for addresses that do not specify one.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum PeerTransport {
    /// TCP transport.
    #[default]
    Tcp,
    /// RDMA, with TCP to the same address as a fallback.
    Rdma,
}

impl PeerTransport {
    /// Parses an address, which may specify its own transport.
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
                    "'{text}' is local to one process and cannot reach another daemon"
                )));
            }
            address => address,
        })
    }
}

/// Peer settings of the daemon.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct PeerSettings {
    /// Listening addresses.
    pub listen: Vec<Address>,
    /// Other daemons with which it keeps a session.
    pub connect: Vec<Address>,
    /// Key shared by all peers.
    pub key: Option<SharedKey>,
    /// Networks from which peers may connect; if empty, all.
    pub allow: Vec<Network>,
    /// Set if frames to and from other machines are encrypted.
    pub secure: bool,
    /// Address of the RDMA device used to connect.
    pub rdma_local: Option<IpAddr>,
}

impl PeerSettings {
    /// Resolves the settings: flags override the configuration file.
    pub(super) fn resolve(serve: &ServeArgs, file: &mut ConfigFile) -> Result<Self> {
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
            let text = format!("{open} is reachable from other machines: --peer-key is required");
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

    /// Returns the connection modes to offer and accept; `None` for the messenger's default.
    pub fn modes(&self) -> Option<Vec<u32>> {
        (!self.secure).then(|| vec![mode::CRC, mode::SECURE])
    }
}

const KEY_HINT: &str =
    "make one, and give it to each machine: (umask 077; od -An -v -tx1 -N32 /dev/urandom | tr -d ' \\n' > peer.key)";

/// Reads a key of 64 hexadecimal digits from a file that no other user may read.
pub fn read_key(path: &Path) -> Result<SharedKey> {
    let text = read_private(path)?;
    let wrong = || Failure::invalid(format!("{} holds no key of 64 hexadecimal digits", path.display()));
    SharedKey::from_hex(&text).ok_or_else(|| wrong().hint(KEY_HINT))
}

/// Reads a file with a secret, which no other user may read.
pub fn read_private(path: &Path) -> Result<String> {
    let failed = |error| Failure::io(error, format_args!("reading the key {}", path.display()));
    let mode = fs::metadata(path).map_err(failed)?.permissions().mode();
    if mode & 0o077 != 0 {
        let text = format!("the key {} may be read or changed by others (mode {:o})", path.display(), mode & 0o777);
        return Err(Failure::invalid(text).hint(format!("chmod 600 {}", path.display())));
    }
    fs::read_to_string(path).map_err(failed)
}

/// Peer settings of a client.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct ClientSide {
    /// Transport for addresses that do not specify one.
    pub transport: PeerTransport,
    /// Address of the RDMA device to use.
    pub rdma_local: Option<IpAddr>,
    /// Key file.
    pub key: Option<PathBuf>,
}

impl ClientSide {
    /// Loads the settings from a daemon's configuration file.
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

    fn resolve(text: &str, serve: &ServeArgs) -> Result<PeerSettings> {
        PeerSettings::resolve(serve, &mut toml::from_str(text).expect("a configuration"))
    }

    #[test]
    fn each_side_has_a_transport_of_its_own() {
        let key = key_file(&"ab".repeat(32), 0o600);
        let text = format!(
            "cluster = 'rdma'\nclient = 'tcp'\nrdma_local = '10.17.23.10'\npeer = ['10.17.23.10:7000', 'tcp:127.0.0.1:1']\n\
             peers = ['10.17.23.11:7000']\npeer-allow = ['10.17.0.0/16']\npeer-key = '{}'\n",
            key.path().display()
        );
        let peers = resolve(&text, &ServeArgs::default()).expect("a configuration");
        let shown = |addresses: &[Address]| addresses.iter().map(ToString::to_string).collect::<Vec<_>>();
        assert_eq!(shown(&peers.listen), ["rdma:10.17.23.10:7000", "tcp:127.0.0.1:1"]);
        assert_eq!(shown(&peers.connect), ["rdma:10.17.23.11:7000"]);
        assert_eq!((peers.rdma_local, peers.allow.len()), ("10.17.23.10".parse().ok(), 1));
        assert!(peers.secure && peers.modes().is_none());
        let file = key_file(&text, 0o644);
        let client = ClientSide::load(file.path()).expect("the same file");
        assert_eq!((client.transport, client.key.as_deref()), (PeerTransport::Tcp, Some(key.path())));
        let flags = ServeArgs { peer: vec!["127.0.0.1:5".into()], ..ServeArgs::default() };
        assert_eq!(shown(&resolve(&text, &flags).expect("flags win").listen), ["rdma:127.0.0.1:5"]);
        assert_eq!(
            resolve("", &ServeArgs::default()).expect("nothing"),
            PeerSettings { secure: true, ..PeerSettings::default() }
        );
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
            let failure = resolve(&text, &ServeArgs::default()).expect_err(&text);
            assert!(failure.message.contains(says), "{text}: {failure}");
        }
        assert!(toml::from_str::<ConfigFile>("cluster = 'pigeon'").is_err());
    }
}
