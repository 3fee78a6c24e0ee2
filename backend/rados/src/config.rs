//! Client configuration for a Ceph cluster: identity, key, monitor addresses, and a few settings.
//!
//! Follows the rules of all Ceph clients: a `ceph.conf` with sections, keyrings, and environment variables.  Files,
//! names and the environment are accessed through [`Environment`], so that everything here is pure.

mod conf;
pub mod dns;
mod keyring;
mod monitors;
mod settings;

use std::collections::BTreeMap;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use forebay_messenger::session::cephx::CephxSecret;
use forebay_messenger::wire::control::mode;

pub use conf::Conf;
pub use keyring::find_key;
pub use monitors::parse_monitors;
pub use settings::{Said, Settings};
use settings::{modes, seconds};

/// Environment in which a configuration is resolved.
pub trait Environment {
    /// Returns the content of a file.
    fn read(&self, path: &Path) -> io::Result<String>;
    /// Returns an environment variable.
    fn variable(&self, name: &str) -> Option<String>;
    /// Returns the host name of this machine, up to its first dot.
    fn host(&self) -> String;
    /// Resolves the addresses of another host by name.
    fn resolve(&self, name: &str) -> io::Result<Vec<IpAddr>>;
    /// Returns names and ports of the SRV records `_NAME._tcp` in a domain, or in this machine's search domains, most
    /// preferred first.
    fn service(&self, name: &str, domain: Option<&str>) -> io::Result<Vec<(String, u16)>>;
}

/// Command-line flags common to all Ceph clients.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Flags {
    /// `-c`: path of the configuration file.
    pub conf: Option<PathBuf>,
    /// `--id`: the part of the client name after `client.`.
    pub id: Option<String>,
    /// `--keyring`: path of the keyring.
    pub keyring: Option<PathBuf>,
    /// `--cluster`: name that prefixes configuration files and keyrings.
    pub cluster: Option<String>,
}

/// Error in resolving a configuration.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// No configuration file was specified, and none is in the default locations.
    #[error("no configuration of a Ceph cluster was found (looked for {0})")]
    NoConf(String),
    /// File that cannot be read.
    #[error("reading {path}: {error}")]
    Read {
        /// Path of the file.
        path: PathBuf,
        /// Error of the read.
        error: io::Error,
    },
    /// Syntax error in a line.
    #[error("{path}:{line}: {text}")]
    Line {
        /// Path of the file.
        path: PathBuf,
        /// Line number, counted from 1.
        line: usize,
        /// Description of the error.
        text: String,
    },
    /// Invalid value of a setting.
    #[error("the setting '{name}' is '{value}': {text}")]
    Value {
        /// Name of the setting.
        name: &'static str,
        /// Value found.
        value: String,
        /// Description of valid values.
        text: String,
    },
    /// No key was found for this client.
    #[error("no key for {name} was found (looked for {places})")]
    NoKey {
        /// Name of this client.
        name: String,
        /// Keyring locations searched.
        places: String,
    },
    /// No reachable monitor is configured.
    #[error("{0}")]
    NoMonitors(String),
}

/// Authentication credentials of the client.
#[derive(Debug, Clone)]
pub enum Credentials {
    /// No authentication required by the cluster.
    None,
    /// Cephx secret key.
    Cephx(CephxSecret),
}

/// Configuration of a client.
#[derive(Debug, Clone)]
pub struct CephConfig {
    /// Part of the client name after `client.`.
    pub id: String,
    /// Authentication credentials.
    pub credentials: Credentials,
    /// Monitor addresses for msgr2.
    pub monitors: Vec<SocketAddr>,
    /// Connection modes for monitors, as defined in [`mode`], most preferred first.
    pub monitor_modes: Vec<u32>,
    /// Configuration file values of settings that the monitors may also store.
    pub said: Said,
    /// Set if the monitors are asked for the settings they store for this client.
    pub ask_monitors: bool,
    /// Time limit for the initial connection.
    pub connect_timeout: Duration,
}

/// Default time limit for the initial connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(30);
const FOREVER: Duration = Duration::from_secs(1 << 30);

impl CephConfig {
    /// Resolves a configuration from flags, files and the environment.
    pub fn resolve(flags: &Flags, outside: &dyn Environment) -> Result<Self, ConfigError> {
        let cluster = flags.cluster.clone().unwrap_or_else(|| "ceph".into());
        let id = flags.id.clone().unwrap_or_else(|| "admin".into());
        let (path, text) = find_conf(flags, &cluster, outside)?;
        let conf = Conf::parse(&text, &cluster, &id, &outside.host()).map_err(|(line, text)| ConfigError::Line {
            path: path.clone(),
            line,
            text,
        })?;
        let credentials = find_credentials(flags, &conf, outside)?;
        let monitors = find_monitors(&conf, outside)?;
        let said = Said::of(&conf);
        said.with(&BTreeMap::new())?;
        let connect_timeout = match conf.get("client_mount_timeout") {
            Some(value) => seconds("client_mount_timeout", &value)?.unwrap_or(FOREVER),
            None => CONNECT_TIMEOUT,
        };
        let monitor_modes = match conf.get("ms_mon_client_mode") {
            Some(value) => modes("ms_mon_client_mode", &value)?,
            None => Vec::new(),
        };
        Ok(Self {
            credentials,
            monitors,
            monitor_modes: if monitor_modes.is_empty() { vec![mode::SECURE, mode::CRC] } else { monitor_modes },
            said,
            ask_monitors: !conf.get("no_mon_config").is_some_and(|value| is_yes(&value)),
            connect_timeout,
            id,
        })
    }
}

fn read(outside: &dyn Environment, path: &Path) -> Result<Option<String>, ConfigError> {
    match outside.read(path) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(ConfigError::Read { path: path.into(), error }),
    }
}

fn find_conf(flags: &Flags, cluster: &str, outside: &dyn Environment) -> Result<(PathBuf, String), ConfigError> {
    let named = flags.conf.clone().or_else(|| outside.variable("CEPH_CONF").map(PathBuf::from));
    if let Some(path) = named {
        let text = outside.read(&path).map_err(|error| ConfigError::Read { path: path.clone(), error })?;
        return Ok((path, text));
    }
    let mut places = vec![PathBuf::from(format!("/etc/ceph/{cluster}.conf"))];
    places.extend(outside.variable("HOME").map(|home| Path::new(&home).join(format!(".ceph/{cluster}.conf"))));
    places.push(format!("{cluster}.conf").into());
    for path in &places {
        if let Some(text) = read(outside, path)? {
            return Ok((path.clone(), text));
        }
    }
    Err(ConfigError::NoConf(join(&places)))
}

fn join(places: &[PathBuf]) -> String {
    places.iter().map(|path| path.display().to_string()).collect::<Vec<_>>().join(", ")
}

fn find_credentials(flags: &Flags, conf: &Conf, outside: &dyn Environment) -> Result<Credentials, ConfigError> {
    let said = conf.get("auth_client_required").or_else(|| conf.get("auth_supported"));
    let may_be_none = said.is_some();
    let methods = said.unwrap_or_else(|| "cephx, none".into());
    let takes = |method: &str| methods.split([',', ' ', ';']).any(|word| word == method);
    if !takes("cephx") {
        if takes("none") {
            return Ok(Credentials::None);
        }
        let text = "this client knows cephx and none".into();
        return Err(ConfigError::Value { name: "auth_client_required", value: methods, text });
    }
    let secret = |name: &'static str, text: &str| {
        let wrong = || {
            // Releases after Squid may use other key types.
            let text = match CephxSecret::kind_of(text) {
                Some(kind @ 2..=15) => {
                    format!("its type is {kind}, and this build knows keys of type 1 (AES-128) only")
                }
                _ => "it is no key".into(),
            };
            ConfigError::Value { name, value: "(hidden)".into(), text }
        };
        CephxSecret::from_base64(text).map(Credentials::Cephx).ok_or_else(wrong)
    };
    let named = flags.keyring.clone().or_else(|| outside.variable("CEPH_KEYRING").map(PathBuf::from));
    if named.is_none() {
        if let Some(key) = conf.get("key") {
            return secret("key", &key);
        }
        if let Some(path) = conf.get("keyfile") {
            let path = PathBuf::from(path);
            let text = outside.read(&path).map_err(|error| ConfigError::Read { path, error })?;
            return secret("keyfile", text.trim());
        }
    }
    let name = conf.name();
    let places = match (named, conf.get("keyring")) {
        (Some(path), _) => vec![path],
        (None, Some(list)) => list.split([',', ';']).map(|path| PathBuf::from(path.trim())).collect(),
        (None, None) => {
            let names =
                [format!("$cluster.{name}.keyring"), "$cluster.keyring".into(), "keyring".into(), "keyring.bin".into()];
            names.iter().map(|file| PathBuf::from(conf.expand(&format!("/etc/ceph/{file}")))).collect()
        }
    };
    for path in &places {
        let Some(text) = read(outside, path)? else { continue };
        let found = find_key(&text, &name);
        if let Some(key) = found.map_err(|(line, text)| ConfigError::Line { path: path.clone(), line, text })? {
            return secret("keyring", &key);
        }
    }
    // Without a key, a client that accepts both methods can only use `none`.
    if may_be_none && takes("none") {
        return Ok(Credentials::None);
    }
    Err(ConfigError::NoKey { name, places: join(&places) })
}

fn find_monitors(conf: &Conf, outside: &dyn Environment) -> Result<Vec<SocketAddr>, ConfigError> {
    let mut texts: Vec<String> = conf.get("mon_host").into_iter().collect();
    if texts.is_empty() {
        texts = conf.monitor_addrs();
    }
    let wrong = |value: &str, text: String| ConfigError::Value { name: "mon_host", value: value.into(), text };
    let mut addrs = Vec::new();
    for text in &texts {
        for place in parse_monitors(text).map_err(|error| wrong(text, error))? {
            match place.host.parse::<IpAddr>() {
                Ok(ip) => addrs.push(SocketAddr::new(ip, place.port)),
                Err(_) => {
                    let ips = outside
                        .resolve(&place.host)
                        .map_err(|error| wrong(text, format!("{}: {error}", place.host)))?;
                    addrs.extend(ips.into_iter().map(|ip| SocketAddr::new(ip, place.port)));
                }
            }
        }
    }
    if texts.is_empty() {
        let service = conf.get("mon_dns_srv_name").unwrap_or_else(|| "ceph-mon".into());
        // A domain may follow the service name.
        let (service, domain) = match service.split_once('_') {
            Some((service, domain)) => (service, Some(domain)),
            None => (service.as_str(), None),
        };
        let none = |error: io::Error| {
            let text = format!("the configuration has no 'mon host', and the name service no _{service}._tcp: {error}");
            ConfigError::NoMonitors(text)
        };
        for (name, port) in outside.service(service, domain).map_err(none)? {
            // SRV records for msgr1 have its port.
            if port == monitors::PORT_V1 {
                continue;
            }
            let ips = outside.resolve(&name).map_err(none)?;
            addrs.extend(ips.into_iter().map(|ip| SocketAddr::new(ip, port)));
        }
    }
    addrs.dedup();
    if addrs.is_empty() {
        let text = "no monitor of the configuration speaks the protocol's second version (msgr2, usually on port 3300)";
        return Err(ConfigError::NoMonitors(text.into()));
    }
    Ok(addrs)
}

fn is_yes(value: &str) -> bool {
    matches!(value.to_ascii_lowercase().as_str(), "true" | "yes" | "on" | "1")
}

#[cfg(test)]
mod tests;
