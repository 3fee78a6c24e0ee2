//! What the configuration says of the NVMe subsystem.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use forebay_accel::crypto::dh::Group;
use forebay_nvmf::Limits;
use forebay_nvmf::session::admin::QUEUES_MAX;
use forebay_nvmf::session::auth::{Keys, group_name};
use forebay_nvmf::session::psk::TlsKey;
use forebay_nvmf::session::secret::{Hash, Secret};
use forebay_nvmf::wire::fabrics::is_nqn;
use forebay_reactor::Addr;
use serde::Deserialize;

use super::parse_addr;
use super::peers::read_private;
use crate::cli::Serve;
use crate::failure::{Failure, Result};
use crate::units::Size;

/// The largest id of an NVMe controller; those above mean something.
const CNTLID_MAX: u16 = 0xFFEF;
/// Bytes that a connection, a host and a core may hold at least: a few of the longest commands.
const MEMORY_MIN: usize = 4 << 20;

/// The `[nvme-subsystem]` section.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct NvmeSection {
    nqn: Option<String>,
    first_controller: Option<u16>,
    last_controller: Option<u16>,
    advertise: Option<Vec<String>>,
    hosts: Option<Vec<String>>,
    #[serde(default)]
    host: Vec<HostSection>,
    #[serde(default)]
    limits: BTreeMap<String, toml::Value>,
}

/// A `[[nvme-subsystem.host]]` section: a host that may connect, and what it has to show.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct HostSection {
    nqn: String,
    secret: Option<PathBuf>,
    tls_key: Option<PathBuf>,
    controller_secret: Option<PathBuf>,
    hashes: Option<Vec<String>>,
    groups: Option<Vec<String>>,
}

impl HostSection {
    /// Of `NQN[,secret=FILE][,controller-secret=FILE][,tls-key=FILE]`, as the command line says it.
    fn parse(text: &str) -> Result<Self> {
        let mut parts = text.split(',');
        let mut host = Self { nqn: parts.next().unwrap_or_default().into(), ..Self::default() };
        for part in parts {
            match part.split_once('=') {
                Some(("secret", path)) => host.secret = Some(path.into()),
                Some(("controller-secret", path)) => host.controller_secret = Some(path.into()),
                Some(("tls-key", path)) => host.tls_key = Some(path.into()),
                _ => {
                    let text = format!(
                        "--nvme-host {text}: '{part}' is none of secret=FILE, controller-secret=FILE, tls-key=FILE"
                    );
                    return Err(Failure::invalid(text));
                }
            }
        }
        Ok(host)
    }

    fn tls_key(&self) -> Result<Option<TlsKey>> {
        let Some(path) = &self.tls_key else { return Ok(None) };
        let key = TlsKey::parse(&read_private(path)?).map_err(|why| {
            Failure::invalid(format!("{} holds no key for TLS: {why}", path.display()))
                .hint("make one: (umask 077; nvme gen-tls-key --hmac=1 > FILE)")
        });
        key.map(Some)
    }

    fn keys(&self) -> Result<Option<Arc<Keys>>> {
        let Some(path) = &self.secret else {
            if self.controller_secret.is_some() {
                let text =
                    format!("nvme-subsystem: {} has a controller-secret, which is of no use without secret", self.nqn);
                return Err(Failure::invalid(text));
            }
            return Ok(None);
        };
        let host = read_secret(path)?;
        let controller = self.controller_secret.as_ref().map(|path| read_secret(path)).transpose()?;
        if controller.as_ref() == Some(&host) {
            let text =
                format!("nvme-subsystem: {} and its controller have the same secret, which proves nothing", self.nqn);
            return Err(Failure::invalid(text));
        }
        let hash = |name: &String| Hash::ALL.into_iter().find(|hash| hash.name() == name);
        let group = |name: &String| groups().into_iter().find(|group| group_name(*group) == *name);
        let hashes = choose("hashes", &self.hashes, hash)?.unwrap_or_else(|| Hash::ALL.to_vec());
        // The smallest is strong enough, and what a larger one costs is paid before it is known who asks.
        let groups = choose("groups", &self.groups, group)?
            .unwrap_or_else(|| Group::ALL[..3].iter().copied().map(Some).collect());
        Ok(Some(Arc::new(Keys { host, controller, hashes, groups })))
    }
}

fn groups() -> Vec<Option<Group>> {
    Group::ALL.into_iter().map(Some).chain([None]).collect()
}

/// A list of names, each of something that is known.
fn choose<T>(what: &str, names: &Option<Vec<String>>, known: impl Fn(&String) -> Option<T>) -> Result<Option<Vec<T>>> {
    let Some(names) = names else { return Ok(None) };
    let wrong = |name: &str| Failure::invalid(format!("nvme-subsystem.host.{what}: '{name}' is not known"));
    let found = names.iter().map(|name| known(name).ok_or_else(|| wrong(name))).collect::<Result<Vec<_>>>()?;
    if found.is_empty() {
        return Err(Failure::invalid(format!("nvme-subsystem.host.{what} is empty; leave it out for the default")));
    }
    Ok(Some(found))
}

fn read_secret(path: &Path) -> Result<Secret> {
    let text = read_private(path)?;
    Secret::parse(&text).map_err(|why| {
        Failure::invalid(format!("{} holds no secret: {why}", path.display()))
            .hint("make one: (umask 077; nvme gen-dhchap-key --nqn HOSTNQN > FILE)")
    })
}

/// What hosts see of the NVMe subsystem.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NvmeSubsystem {
    /// Its name, if not the data directory's own.
    pub nqn: Option<String>,
    /// Ids of its controllers; daemons that serve one subsystem together have ranges of their own.
    pub cntlids: RangeInclusive<u16>,
    /// What discovery tells instead of the addresses that are listened on, in their order.
    pub advertise: Vec<SocketAddr>,
    /// The hosts that may connect, by name, and what each has to show; `None`: all.
    pub hosts: Option<BTreeMap<String, Option<Arc<Keys>>>>,
    /// Keys for TLS of those that have one.
    pub tls_keys: BTreeMap<String, TlsKey>,
    /// Of each address that is listened on: hosts must speak TLS.
    pub tls: Vec<bool>,
    /// What hosts may take.
    pub limits: Limits,
}

impl Default for NvmeSubsystem {
    fn default() -> Self {
        Self {
            nqn: None,
            cntlids: 1..=CNTLID_MAX,
            advertise: Vec::new(),
            hosts: None,
            tls_keys: BTreeMap::new(),
            tls: Vec::new(),
            limits: Limits::default(),
        }
    }
}

impl NvmeSubsystem {
    pub(super) fn resolve(section: NvmeSection, serve: &Serve, tls: Vec<bool>) -> Result<Self> {
        if let Some(nqn) = section.nqn.as_deref().filter(|nqn| !is_nqn(nqn)) {
            return Err(Failure::invalid(format!("nvme-subsystem.nqn: '{nqn}' is no NVMe qualified name"))
                .hint("such as nqn.2024-05.org.example:disks"));
        }
        let (first, last) = (section.first_controller.unwrap_or(1), section.last_controller.unwrap_or(CNTLID_MAX));
        if first == 0 || first > last || last > CNTLID_MAX {
            let text = format!("nvme-subsystem: controllers {first} to {last}; ids go from 1 to {CNTLID_MAX}");
            return Err(Failure::invalid(text));
        }
        let mut advertise = Vec::new();
        for text in section.advertise.unwrap_or_default() {
            match parse_addr(&text)? {
                Addr::Tcp(addr) => advertise.push(addr),
                Addr::Unix(_) => {
                    return Err(Failure::invalid(format!("nvme-subsystem.advertise: '{text}' is not TCP")));
                }
            }
        }
        if advertise.len() > tls.len() {
            return Err(Failure::invalid("nvme-subsystem.advertise has more addresses than nvme"));
        }
        let (hosts, tls_keys) = hosts(section.hosts, section.host, &serve.nvme_host)?;
        if tls.contains(&true) && tls_keys.is_empty() {
            return Err(Failure::invalid("an address of nvme has tls=required, but no host has a tls-key")
                .hint("--nvme-host NQN,tls-key=FILE, with what 'nvme gen-tls-key' prints in the file"));
        }
        if !tls.is_empty() && !tls.contains(&true) && !tls_keys.is_empty() {
            return Err(Failure::invalid("a host has a tls-key, but no address of nvme has tls=required")
                .hint("--nvme ADDR,tls=required"));
        }
        let limits = limits(&section.limits, &serve.nvme_limit)?;
        Ok(Self { nqn: section.nqn, cntlids: first..=last, advertise, hosts, tls_keys, tls, limits })
    }
}

/// Who may connect: those of the list, those with a section, and those of the command line, which wins.
fn hosts(
    listed: Option<Vec<String>>,
    sections: Vec<HostSection>,
    flags: &[String],
) -> Result<(Option<BTreeMap<String, Option<Arc<Keys>>>>, BTreeMap<String, TlsKey>)> {
    let mut tls_keys = BTreeMap::new();
    if listed.is_none() && sections.is_empty() && flags.is_empty() {
        return Ok((None, tls_keys));
    }
    let mut hosts: BTreeMap<String, Option<Arc<Keys>>> =
        listed.unwrap_or_default().into_iter().map(|host| (host, None)).collect();
    let flags = flags.iter().map(|flag| HostSection::parse(flag)).collect::<Result<Vec<_>>>()?;
    for section in sections.into_iter().chain(flags) {
        let keys = section.keys()?;
        match section.tls_key()? {
            Some(key) => tls_keys.insert(section.nqn.clone(), key),
            None => tls_keys.remove(&section.nqn),
        };
        hosts.insert(section.nqn, keys);
    }
    if let Some(host) = hosts.keys().find(|host| !is_nqn(host)) {
        return Err(Failure::invalid(format!("nvme-subsystem: the host '{host}' is no NVMe qualified name"))
            .hint("a Linux host has it in /etc/nvme/hostnqn"));
    }
    Ok((Some(hosts), tls_keys))
}

/// An address that is listened on, `ADDR[,tls=required|none]`, and whether hosts must speak TLS there.
pub(super) fn parse_listener(text: &str) -> Result<(Addr, bool)> {
    let (addr, tls) = match text.split_once(",tls=") {
        None => (text, false),
        Some((addr, "none")) => (addr, false),
        Some((addr, "required")) => (addr, true),
        Some((_, other)) => {
            return Err(Failure::invalid(format!("nvme: '{text}': tls is required or none, not '{other}'")));
        }
    };
    Ok((parse_addr(addr)?, tls))
}

/// Limits by name, from the section and then from `NAME=VALUE` of the command line.
fn limits(section: &BTreeMap<String, toml::Value>, flags: &[String]) -> Result<Limits> {
    let mut limits = Limits::default();
    for (name, value) in section {
        let value = value.as_str().map_or_else(|| value.to_string(), str::to_owned);
        set_limit(&mut limits, name, &value)?;
    }
    for flag in flags {
        let (name, value) = flag
            .split_once('=')
            .ok_or_else(|| Failure::invalid(format!("--nvme-limit {flag}: write NAME=VALUE, for example queues=8")))?;
        set_limit(&mut limits, name, value)?;
    }
    Ok(limits)
}

fn set_limit(limits: &mut Limits, name: &str, value: &str) -> Result<()> {
    let wrong = |why: String| Failure::invalid(format!("nvme-subsystem.limits.{name}: {why}"));
    let count = |max: usize| match value.parse::<usize>() {
        Ok(count) if (1..=max).contains(&count) => Ok(count),
        _ => Err(wrong(format!("'{value}' is no number from 1 to {max}"))),
    };
    let bytes = || match value.parse::<Size>() {
        Ok(size) if size.0 >= MEMORY_MIN as u64 => Ok(usize::try_from(size.0).unwrap_or(usize::MAX)),
        Ok(size) => Err(wrong(format!("{size}; at least {}", Size(MEMORY_MIN as u64)))),
        Err(why) => Err(wrong(why)),
    };
    match name {
        "connections" => limits.connections_max = count(1 << 20)?,
        "handshakes" => limits.handshakes_max = count(1 << 20)?,
        "controllers" => limits.controllers_max = count(CNTLID_MAX.into())?,
        "controllers-per-host" => limits.controllers_per_host = count(CNTLID_MAX.into())?,
        "queues" => limits.queues_max = count(QUEUES_MAX.into())? as u16,
        "memory-per-connection" => limits.connection_bytes = bytes()?,
        "memory-per-host" => limits.host_bytes = bytes()?,
        "memory" => limits.core_bytes = bytes()?,
        _ => {
            return Err(wrong("there is no such limit".into()).hint(
                "connections, handshakes, controllers, controllers-per-host, queues, memory-per-connection, \
                 memory-per-host, memory",
            ));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    use super::*;

    const HOST: &str = "nqn.2014-08.org.example:one";
    const SECRET: &str = "DHHC-1:00:IwtNfQh/g40PNAxa3nbIYCHkRcC/ZQqHegC7NP5ynMfj9HeR:\n";
    const OTHER: &str = "DHHC-1:01:lyZICQpw10TSDU2/vycqpoDznmOxABOZzH0YZzSUXsTrP13F:\n";

    fn file(text: &str, mode: u32) -> tempfile::NamedTempFile {
        let file = tempfile::NamedTempFile::new().expect("a temporary file");
        fs::write(file.path(), text).expect("written");
        fs::set_permissions(file.path(), fs::Permissions::from_mode(mode)).expect("its mode");
        file
    }

    fn resolve(text: &str, serve: &Serve) -> Result<NvmeSubsystem> {
        NvmeSubsystem::resolve(toml::from_str(text).expect("a section"), serve, Vec::new())
    }

    #[test]
    fn hosts_show_what_their_files_say() {
        let (secret, other) = (file(SECRET, 0o600), file(OTHER, 0o600));
        let text = format!(
            "hosts = ['nqn.2014-08.org.example:open']\n[[host]]\nnqn = '{HOST}'\nsecret = '{}'\n\
             controller-secret = '{}'\nhashes = ['sha512']\ngroups = ['ffdhe4096', 'null']\n",
            secret.path().display(),
            other.path().display()
        );
        let found = resolve(&text, &Serve::default()).expect("a configuration");
        let hosts = found.hosts.as_ref().expect("a list");
        assert_eq!(hosts.get("nqn.2014-08.org.example:open"), Some(&None));
        let keys = hosts[HOST].as_ref().expect("keys");
        assert_eq!((&keys.hashes[..], &keys.groups[..]), (&[Hash::Sha512][..], &[Some(Group::Ffdhe4096), None][..]));
        assert!(keys.controller.is_some());
        assert!(!format!("{found:?}").contains("IwtN"), "a secret is shown");
        let flag = format!("{HOST},secret={}", other.path().display());
        let found = resolve(&text, &Serve { nvme_host: vec![flag], ..Serve::default() }).expect("flags win");
        let keys = found.hosts.as_ref().and_then(|hosts| hosts[HOST].clone()).expect("keys");
        assert_eq!((keys.controller.is_some(), keys.hashes.len(), keys.groups.len()), (false, 3, 3));
        assert_eq!(resolve("", &Serve::default()).expect("nothing"), NvmeSubsystem::default());
    }

    #[test]
    fn keys_for_tls_come_from_files_and_go_with_listeners() {
        let key = file("NVMeTLSkey-1:01:VRLbtnN9AQb2WXW3c9+wEf/DRLz0QuLdbYvEhwtdWwNf9LrZ:\n", 0o600);
        let text = format!("[[host]]\nnqn = '{HOST}'\ntls-key = '{}'\n", key.path().display());
        let with = |text: &str, tls: &[bool], serve: &Serve| {
            NvmeSubsystem::resolve(toml::from_str(text).expect("a section"), serve, tls.to_vec())
        };
        let none = Serve::default();
        let found = with(&text, &[true, false], &none).expect("a configuration");
        assert!(found.tls_keys.contains_key(HOST) && found.hosts.as_ref().is_some_and(|hosts| hosts[HOST].is_none()));
        assert!(!format!("{found:?}").contains("VRLb"), "a key is shown");
        assert!(with(&text, &[false], &none).expect_err("no listener").message.contains("tls=required"));
        assert!(with("", &[true], &none).expect_err("no key").message.contains("tls-key"));
        // A flag takes the place of the section, its key included.
        let flag = Serve { nvme_host: vec![HOST.into()], ..Serve::default() };
        assert!(with(&text, &[true], &flag).is_err());
        let flag = Serve { nvme_host: vec![format!("{HOST},tls-key={}", key.path().display())], ..Serve::default() };
        assert_eq!(with("", &[true], &flag).expect("a flag").tls_keys.len(), 1);
        let secret = file(SECRET, 0o600);
        let flag = Serve { nvme_host: vec![format!("{HOST},tls-key={}", secret.path().display())], ..Serve::default() };
        assert!(with("", &[true], &flag).expect_err("another secret").message.contains("NVMeTLSkey"));
        let listener = |text| parse_listener(text).map(|(addr, tls)| (addr.to_string(), tls)).ok();
        assert_eq!(listener("127.0.0.1:4420,tls=required"), Some(("127.0.0.1:4420".into(), true)));
        assert_eq!(listener("127.0.0.1:4420,tls=none"), Some(("127.0.0.1:4420".into(), false)));
        assert_eq!(listener("127.0.0.1:4420"), Some(("127.0.0.1:4420".into(), false)));
        assert_eq!(listener("127.0.0.1:4420,tls=maybe"), None);
    }

    #[test]
    fn limits_are_set_by_name() {
        let flags = Serve { nvme_limit: vec!["queues=4".into(), "memory=64M".into()], ..Serve::default() };
        let limits = resolve("[limits]\nqueues = 8\nconnections = 100\n", &flags).expect("limits").limits;
        assert_eq!((limits.queues_max, limits.connections_max, limits.core_bytes), (4, 100, 64 << 20));
        for (limit, says) in
            [("queues=65", "64"), ("queues=0", "64"), ("memory=1M", "4 MiB"), ("colour=1", "no such"), ("x", "NAME")]
        {
            let flags = Serve { nvme_limit: vec![limit.into()], ..Serve::default() };
            let failure = resolve("", &flags).expect_err(limit);
            assert!(failure.message.contains(says), "{limit}: {failure}");
        }
    }

    #[test]
    fn what_is_wrong_with_a_host_is_said() {
        let (secret, open, none) = (file(SECRET, 0o600), file(SECRET, 0o644), file("secret", 0o600));
        let path = |file: &tempfile::NamedTempFile| file.path().display().to_string();
        for (flag, says) in [
            ("somebody".to_owned(), "qualified name"),
            (format!("{HOST},secret=/nowhere/at/all"), "/nowhere/at/all"),
            (format!("{HOST},secret={}", path(&open)), "others"),
            (format!("{HOST},secret={}", path(&none)), "DHHC-1"),
            (format!("{HOST},password=x"), "password"),
            (format!("{HOST},controller-secret={}", path(&secret)), "without secret"),
            (format!("{HOST},secret={0},controller-secret={0}", path(&secret)), "same secret"),
        ] {
            let failure = resolve("", &Serve { nvme_host: vec![flag.clone()], ..Serve::default() }).expect_err(&flag);
            assert!(failure.message.contains(says), "{flag}: {failure}");
        }
        let text = format!("[[host]]\nnqn = '{HOST}'\nsecret = '{}'\nhashes = ['md5']", path(&secret));
        assert!(resolve(&text, &Serve::default()).expect_err("a hash").message.contains("md5"));
    }
}
