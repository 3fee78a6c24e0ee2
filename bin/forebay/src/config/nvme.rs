//! Configuration of the NVMe subsystem.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use forebay_accel::crypto::dh::DhGroup;
use forebay_nvmf::HostLimits;
use forebay_nvmf::session::admin::QUEUES_MAX;
use forebay_nvmf::session::auth::{AuthSecrets, group_name};
use forebay_nvmf::session::psk::TlsKey;
use forebay_nvmf::session::secret::{DhChapHash, DhChapSecret};
use forebay_nvmf::wire::fabrics::{DISCOVERY_NQN, is_nqn};
use forebay_reactor::Addr;
use serde::Deserialize;

use super::parse_addr;
use super::peers::read_private;
use crate::api;
use crate::cli::ServeArgs;
use crate::failure::{Failure, Result};
use crate::units::Size;

/// Largest id of an NVMe controller; higher values are reserved.
const CNTLID_MAX: u16 = 0xFFEF;
/// Minimum memory limit in bytes for a connection, a host and a core: a few of the longest commands.
const MEMORY_MIN: usize = 4 << 20;

/// `[nvme-subsystem]` section.
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

/// `[[nvme-subsystem.host]]` section: a host that may connect, and its credentials.
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

impl From<&api::NvmeHost> for HostSection {
    fn from(host: &api::NvmeHost) -> Self {
        let api::NvmeHost { nqn, secret, controller_secret, tls_key } = host.clone();
        Self { nqn, secret, controller_secret, tls_key, hashes: None, groups: None }
    }
}

/// Parses the command-line form of a host with its files:
/// `NQN[,secret=FILE][,controller-secret=FILE][,tls-key=FILE]`.  Paths become absolute: the daemon reads the files.
///
/// # Errors
/// If a part is none of these.
pub fn parse_host(text: &str) -> Result<api::NvmeHost> {
    let HostSection { nqn, secret, controller_secret, tls_key, .. } = HostSection::parse(text)?;
    let whole = |path: Option<PathBuf>| path.map(|path| super::absolute(&path)).transpose();
    let host = api::NvmeHost {
        nqn,
        secret: whole(secret)?,
        controller_secret: whole(controller_secret)?,
        tls_key: whole(tls_key)?,
    };
    check_host(&host.nqn)?;
    Ok(host)
}

impl HostSection {
    /// Parses the command-line form `NQN[,secret=FILE][,controller-secret=FILE][,tls-key=FILE]`.
    fn parse(text: &str) -> Result<Self> {
        let mut parts = text.split(',');
        let mut host = Self { nqn: parts.next().unwrap_or_default().into(), ..Self::default() };
        for part in parts {
            match part.split_once('=') {
                Some(("secret", path)) => host.secret = Some(path.into()),
                Some(("controller-secret", path)) => host.controller_secret = Some(path.into()),
                Some(("tls-key", path)) => host.tls_key = Some(path.into()),
                _ => {
                    let text = format!("{text}: '{part}' is none of secret=FILE, controller-secret=FILE, tls-key=FILE");
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

    fn keys(&self) -> Result<Option<Arc<AuthSecrets>>> {
        let Some(path) = &self.secret else {
            if self.controller_secret.is_some() {
                let text = format!("nvme-subsystem: {} has a controller-secret, which requires a secret", self.nqn);
                return Err(Failure::invalid(text));
            }
            return Ok(None);
        };
        let host = read_secret(path)?;
        let controller = self.controller_secret.as_ref().map(|path| read_secret(path)).transpose()?;
        if controller.as_ref() == Some(&host) {
            let text =
                format!("nvme-subsystem: {} and its controller have the same secret; they must differ", self.nqn);
            return Err(Failure::invalid(text));
        }
        let hash = |name: &String| DhChapHash::ALL.into_iter().find(|hash| hash.name() == name);
        let group = |name: &String| groups().into_iter().find(|group| group_name(*group) == *name);
        let hashes = choose("hashes", &self.hashes, hash)?.unwrap_or_else(|| DhChapHash::ALL.to_vec());
        // The smallest group is strong enough, and the cost of a larger one is incurred before the host is
        // authenticated.
        let groups = choose("groups", &self.groups, group)?
            .unwrap_or_else(|| DhGroup::ALL[..3].iter().copied().map(Some).collect());
        Ok(Some(Arc::new(AuthSecrets { host, controller, hashes, groups })))
    }
}

fn groups() -> Vec<Option<DhGroup>> {
    DhGroup::ALL.into_iter().map(Some).chain([None]).collect()
}

/// Parses a list of names, each of a known value.
fn choose<T>(what: &str, names: &Option<Vec<String>>, known: impl Fn(&String) -> Option<T>) -> Result<Option<Vec<T>>> {
    let Some(names) = names else { return Ok(None) };
    let wrong = |name: &str| Failure::invalid(format!("nvme-subsystem.host.{what}: '{name}' is not known"));
    let found = names.iter().map(|name| known(name).ok_or_else(|| wrong(name))).collect::<Result<Vec<_>>>()?;
    if found.is_empty() {
        return Err(Failure::invalid(format!("nvme-subsystem.host.{what} is empty; leave it out for the default")));
    }
    Ok(Some(found))
}

fn read_secret(path: &Path) -> Result<DhChapSecret> {
    let text = read_private(path)?;
    DhChapSecret::parse(&text).map_err(|why| {
        Failure::invalid(format!("{} holds no secret: {why}", path.display()))
            .hint("make one: (umask 077; nvme gen-dhchap-key --nqn HOSTNQN > FILE)")
    })
}

/// Hosts that may connect to a subsystem, with their credentials.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct NvmeAccess {
    /// Hosts by NQN, each with its secrets; `None`: every host.
    pub hosts: Option<BTreeMap<String, Option<Arc<AuthSecrets>>>>,
    /// TLS keys of the hosts that have one.
    pub tls_keys: BTreeMap<String, TlsKey>,
}

impl NvmeAccess {
    /// Returns access that admits no host.
    pub fn nobody() -> Self {
        Self { hosts: Some(BTreeMap::new()), tls_keys: BTreeMap::new() }
    }

    /// Adds a host, with the secrets and keys that its files hold now.
    ///
    /// # Errors
    /// If the name is not an NVMe qualified name, or a file cannot be read or is malformed; nothing has changed then.
    pub fn add(&mut self, host: &api::NvmeHost) -> Result<()> {
        self.add_section(HostSection::from(host))
    }

    /// Adds the hosts of another list; their secrets and keys replace existing ones.
    pub fn take_in(&mut self, other: Self) {
        for (nqn, keys) in other.hosts.into_iter().flatten() {
            self.remove(&nqn);
            self.hosts.get_or_insert_default().insert(nqn, keys);
        }
        self.tls_keys.extend(other.tls_keys);
    }

    /// Removes a host.
    pub fn remove(&mut self, nqn: &str) {
        if let Some(hosts) = &mut self.hosts {
            hosts.remove(nqn);
        }
        self.tls_keys.remove(nqn);
    }

    fn add_section(&mut self, section: HostSection) -> Result<()> {
        check_host(&section.nqn)?;
        let (keys, tls_key) = (section.keys()?, section.tls_key()?);
        match tls_key {
            Some(key) => self.tls_keys.insert(section.nqn.clone(), key),
            None => self.tls_keys.remove(&section.nqn),
        };
        self.hosts.get_or_insert_default().insert(section.nqn, keys);
        Ok(())
    }

    /// Checks that hosts with a TLS key can connect.
    ///
    /// # Errors
    /// If a host has a TLS key, and no listening address accepts TLS.
    pub fn check_tls(&self, tls: &[bool]) -> Result<()> {
        if !tls.is_empty() && !tls.contains(&true) && !self.tls_keys.is_empty() {
            return Err(Failure::invalid("a host has a tls-key, but no address of nvme has tls=required")
                .hint("--nvme ADDR,tls=required"));
        }
        Ok(())
    }
}

/// Validates the NQN of a host.
fn check_host(nqn: &str) -> Result<()> {
    if is_nqn(nqn) {
        return Ok(());
    }
    Err(Failure::invalid(format!(
        "nvme-subsystem: the host '{}' is not a valid NVMe qualified name",
        nqn.escape_debug()
    ))
    .hint("a Linux host has it in /etc/nvme/hostnqn"))
}

/// Validates the NQN of a subsystem.
///
/// # Errors
/// If it is not an NVMe qualified name, or is that of discovery.
pub fn check_nqn(nqn: &str, whose: &str) -> Result<()> {
    if is_nqn(nqn) && nqn != DISCOVERY_NQN {
        return Ok(());
    }
    Err(Failure::invalid(format!(
        "{whose}: '{}' is not a valid NVMe qualified name of a subsystem",
        nqn.escape_debug()
    ))
    .hint("such as nqn.2024-05.org.example:disks"))
}

/// Settings of the default NVMe subsystem: identity, access and limits.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NvmeSubsystemSettings {
    /// NQN, if it is not derived from the data directory.
    pub nqn: Option<String>,
    /// Controller ids; daemons that serve one subsystem together have disjoint ranges.
    pub cntlids: RangeInclusive<u16>,
    /// Addresses reported by discovery instead of the listening addresses, in their order.
    pub advertise: Vec<SocketAddr>,
    /// Hosts that may connect to it.
    pub access: NvmeAccess,
    /// Per listening address: set if hosts must use TLS.
    pub tls: Vec<bool>,
    /// Resource limits for hosts.
    pub limits: HostLimits,
}

impl Default for NvmeSubsystemSettings {
    fn default() -> Self {
        Self {
            nqn: None,
            cntlids: 1..=CNTLID_MAX,
            advertise: Vec::new(),
            access: NvmeAccess::default(),
            tls: Vec::new(),
            limits: HostLimits::default(),
        }
    }
}

impl NvmeSubsystemSettings {
    pub(super) fn resolve(section: NvmeSection, serve: &ServeArgs, tls: Vec<bool>) -> Result<Self> {
        if let Some(nqn) = &section.nqn {
            check_nqn(nqn, "nvme-subsystem.nqn")?;
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
        let access = access(section.hosts, section.host, &serve.nvme_host)?;
        access.check_tls(&tls)?;
        let limits = limits(&section.limits, &serve.nvme_limit)?;
        Ok(Self { nqn: section.nqn, cntlids: first..=last, advertise, access, tls, limits })
    }
}

/// Returns the hosts that may connect: those of the list, those with a section, and those of the command line, which
/// takes precedence.
fn access(listed: Option<Vec<String>>, sections: Vec<HostSection>, flags: &[String]) -> Result<NvmeAccess> {
    let mut access = NvmeAccess::default();
    if listed.is_none() && sections.is_empty() && flags.is_empty() {
        return Ok(access);
    }
    access.hosts = Some(BTreeMap::new());
    let listed = listed.unwrap_or_default().into_iter().map(|nqn| HostSection { nqn, ..HostSection::default() });
    let flags = flags.iter().map(|flag| HostSection::parse(flag)).collect::<Result<Vec<_>>>()?;
    listed.chain(sections).chain(flags).try_for_each(|section| access.add_section(section))?;
    Ok(access)
}

/// Parses a listening address, `ADDR[,tls=required|none]`; also returns whether hosts must use TLS.
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

/// Parses limits by name, from the section and then from `NAME=VALUE` flags.
fn limits(section: &BTreeMap<String, toml::Value>, flags: &[String]) -> Result<HostLimits> {
    let mut limits = HostLimits::default();
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

fn set_limit(limits: &mut HostLimits, name: &str, value: &str) -> Result<()> {
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

    fn resolve(text: &str, serve: &ServeArgs) -> Result<NvmeSubsystemSettings> {
        NvmeSubsystemSettings::resolve(toml::from_str(text).expect("a section"), serve, Vec::new())
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
        let found = resolve(&text, &ServeArgs::default()).expect("a configuration");
        let hosts = found.access.hosts.as_ref().expect("a list");
        assert_eq!(hosts.get("nqn.2014-08.org.example:open"), Some(&None));
        let keys = hosts[HOST].as_ref().expect("keys");
        assert_eq!(
            (&keys.hashes[..], &keys.groups[..]),
            (&[DhChapHash::Sha512][..], &[Some(DhGroup::Ffdhe4096), None][..])
        );
        assert!(keys.controller.is_some());
        assert!(!format!("{found:?}").contains("IwtN"), "a secret is shown");
        let flag = format!("{HOST},secret={}", other.path().display());
        let found = resolve(&text, &ServeArgs { nvme_host: vec![flag], ..ServeArgs::default() }).expect("flags win");
        let keys = found.access.hosts.as_ref().and_then(|hosts| hosts[HOST].clone()).expect("keys");
        assert_eq!((keys.controller.is_some(), keys.hashes.len(), keys.groups.len()), (false, 3, 3));
        assert_eq!(resolve("", &ServeArgs::default()).expect("nothing"), NvmeSubsystemSettings::default());
    }

    #[test]
    fn keys_for_tls_come_from_files_and_go_with_listeners() {
        let key = file("NVMeTLSkey-1:01:VRLbtnN9AQb2WXW3c9+wEf/DRLz0QuLdbYvEhwtdWwNf9LrZ:\n", 0o600);
        let text = format!("[[host]]\nnqn = '{HOST}'\ntls-key = '{}'\n", key.path().display());
        let with = |text: &str, tls: &[bool], serve: &ServeArgs| {
            NvmeSubsystemSettings::resolve(toml::from_str(text).expect("a section"), serve, tls.to_vec())
        };
        let none = ServeArgs::default();
        let found = with(&text, &[true, false], &none).expect("a configuration");
        let access = &found.access;
        assert!(access.tls_keys.contains_key(HOST) && access.hosts.as_ref().is_some_and(|hosts| hosts[HOST].is_none()));
        assert!(!format!("{found:?}").contains("VRLb"), "a key is shown");
        assert!(with(&text, &[false], &none).expect_err("no listener").message.contains("tls=required"));
        assert!(with("", &[true], &none).is_ok(), "hosts may be added while the daemon runs");
        // A flag replaces the section, including its key.
        let flag = ServeArgs { nvme_host: vec![HOST.into()], ..ServeArgs::default() };
        assert!(with(&text, &[true], &flag).expect("a flag").access.tls_keys.is_empty());
        let flag =
            ServeArgs { nvme_host: vec![format!("{HOST},tls-key={}", key.path().display())], ..ServeArgs::default() };
        assert_eq!(with("", &[true], &flag).expect("a flag").access.tls_keys.len(), 1);
        let secret = file(SECRET, 0o600);
        let flag = ServeArgs {
            nvme_host: vec![format!("{HOST},tls-key={}", secret.path().display())],
            ..ServeArgs::default()
        };
        assert!(with("", &[true], &flag).expect_err("another secret").message.contains("NVMeTLSkey"));
        let listener = |text| parse_listener(text).map(|(addr, tls)| (addr.to_string(), tls)).ok();
        assert_eq!(listener("127.0.0.1:4420,tls=required"), Some(("127.0.0.1:4420".into(), true)));
        assert_eq!(listener("127.0.0.1:4420,tls=none"), Some(("127.0.0.1:4420".into(), false)));
        assert_eq!(listener("127.0.0.1:4420"), Some(("127.0.0.1:4420".into(), false)));
        assert_eq!(listener("127.0.0.1:4420,tls=maybe"), None);
    }

    #[test]
    fn limits_are_set_by_name() {
        let flags = ServeArgs { nvme_limit: vec!["queues=4".into(), "memory=64M".into()], ..ServeArgs::default() };
        let limits = resolve("[limits]\nqueues = 8\nconnections = 100\n", &flags).expect("limits").limits;
        assert_eq!((limits.queues_max, limits.connections_max, limits.core_bytes), (4, 100, 64 << 20));
        for (limit, says) in
            [("queues=65", "64"), ("queues=0", "64"), ("memory=1M", "4 MiB"), ("colour=1", "no such"), ("x", "NAME")]
        {
            let flags = ServeArgs { nvme_limit: vec![limit.into()], ..ServeArgs::default() };
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
            (format!("{HOST},controller-secret={}", path(&secret)), "requires a secret"),
            (format!("{HOST},secret={0},controller-secret={0}", path(&secret)), "same secret"),
        ] {
            let failure =
                resolve("", &ServeArgs { nvme_host: vec![flag.clone()], ..ServeArgs::default() }).expect_err(&flag);
            assert!(failure.message.contains(says), "{flag}: {failure}");
        }
        let text = format!("[[host]]\nnqn = '{HOST}'\nsecret = '{}'\nhashes = ['md5']", path(&secret));
        assert!(resolve(&text, &ServeArgs::default()).expect_err("a hash").message.contains("md5"));
    }
}
