//! Daemon configuration, resolved from flags, environment, configuration file and defaults.

mod iscsi;
mod nbd;
mod nvme;
pub mod peers;
mod qos;
mod read_cache;
mod replicas;

use std::collections::BTreeMap;
use std::fs;
use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use forebay_nbd::Tls;
use forebay_reactor::{Addr, DriverChoice};
use forebay_readcache::CacheOptions;
use forebay_writelog::DirtyLimits;
use peers::{PeerSettings, PeerTransport};
use serde::Deserialize;

use crate::cli::{CephArgs, DriverKind, GlobalArgs, LogFormat, ServeArgs};
use crate::engine::store::devices::DEVICE_LIST;
use crate::failure::{Failure, Result};
use crate::master_key::MasterKeySource;
use crate::spec::GroupSpec;
use crate::units::{Size, Span};
use iscsi::IscsiSection;
pub use iscsi::{IscsiAccess, IscsiTargetSettings, check_iqn, parse_chap};
pub use nbd::NbdAccess;
use nbd::NbdTlsSection;
use nvme::NvmeSection;
pub use nvme::{NvmeAccess, NvmeSubsystemSettings, check_nqn, parse_host};
use qos::QosSection;
use read_cache::ReadCacheSection;
pub use replicas::ReplicaSettings;
use replicas::ReplicasSection;

/// Default time a reactor busy-polls before it sleeps, in microseconds: about the wake-up latency of a virtual
/// machine.
pub const LINGER_US: u32 = 50;
/// Maximum time a reactor busy-polls before it sleeps, in microseconds.
const LINGER_US_MAX: u32 = 1000;
/// Default rate of filling and scrubbing the store's devices, a second.
const REPAIR_RATE: Size = Size(256 << 20);
/// Maximum number of threads that compress.
const COMPRESSION_THREADS_MAX: u16 = 64;
/// Default size of the store's data cache.
pub const STORE_CACHE: Size = Size(256 << 20);
/// Maximum number of reactors: more than any machine can provide cores for.
const CORES_MAX: u16 = 256;

/// Configuration file of `serve`.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct ConfigFile {
    data: Option<PathBuf>,
    control: Option<PathBuf>,
    nbd: Option<Vec<String>>,
    nbd_allow: Option<Vec<String>>,
    nvme: Option<Vec<String>>,
    iscsi: Option<Vec<String>>,
    http: Option<String>,
    cores: Option<u16>,
    linger_us: Option<u32>,
    driver: Option<DriverKind>,
    log_level: Option<String>,
    #[serde(alias = "log_format")]
    log_format: Option<LogFormat>,
    cluster: Option<PeerTransport>,
    client: Option<PeerTransport>,
    #[serde(alias = "rdma_local")]
    rdma_local: Option<IpAddr>,
    peer: Option<Vec<String>>,
    peers: Option<Vec<String>>,
    peer_key: Option<PathBuf>,
    peer_allow: Option<Vec<String>>,
    peer_secure: Option<bool>,
    group: Option<String>,
    #[serde(default)]
    store: StoreSection,
    #[serde(default)]
    ram: RamSection,
    #[serde(default)]
    read_cache: ReadCacheSection,
    #[serde(default)]
    write_log: WriteLogSection,
    #[serde(default)]
    replicas: ReplicasSection,
    #[serde(default)]
    qos: QosSection,
    #[serde(default)]
    ceph: CephSection,
    #[serde(default)]
    nbd_tls: NbdTlsSection,
    #[serde(default)]
    nvme_subsystem: NvmeSection,
    #[serde(default)]
    iscsi_target: IscsiSection,
}

impl ConfigFile {
    fn load(path: &Path) -> Result<Self> {
        let text = fs::read_to_string(path)
            .map_err(|error| Failure::io(error, format_args!("reading the configuration {}", path.display())))?;
        toml::from_str(&text).map_err(|error| {
            Failure::invalid(format!("the configuration {} is invalid: {error}", path.display()))
                .hint("docs/operations.md lists every setting")
        })
    }
}

/// `[store]` section.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct StoreSection {
    path: Option<PathBuf>,
    size: Option<Size>,
    cache: Option<Size>,
    repair_rate: Option<Size>,
    master_key: Option<MasterKeySource>,
    compression_threads: Option<u16>,
}

/// `[ram]` section.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct RamSection {
    size: Option<Size>,
}

/// `[write-log]` section.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct WriteLogSection {
    dirty_max: Option<Size>,
    dirty_age: Option<Span>,
}

impl WriteLogSection {
    fn resolve(self, serve: &ServeArgs) -> Result<DirtyLimits> {
        let bytes_max = serve.log_dirty_max.or(self.dirty_max).map(|size| size.0);
        if bytes_max == Some(0) {
            return Err(Failure::invalid("--log-dirty-max 0 leaves no space for a write")
                .hint("leave it out for as much as each log holds"));
        }
        let age_max = serve.log_dirty_age.or(self.dirty_age).map_or(DirtyLimits::default().age_max, |span| span.0);
        Ok(DirtyLimits { bytes_max, age_max })
    }
}

/// `[ceph]` section.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct CephSection {
    conf: Option<PathBuf>,
    id: Option<String>,
    keyring: Option<PathBuf>,
    cluster: Option<String>,
}

/// Resolved configuration of the daemon.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DaemonConfig {
    /// Data directory.
    pub data: PathBuf,
    /// Control socket.
    pub control: PathBuf,
    /// NBD addresses; never empty.
    pub nbd: Vec<Addr>,
    /// Access control and TLS of the NBD addresses.
    pub nbd_access: NbdAccess,
    /// NVMe/TCP addresses.
    pub nvme: Vec<Addr>,
    /// Settings of the default NVMe subsystem.
    pub nvme_subsystem: NvmeSubsystemSettings,
    /// iSCSI addresses.
    pub iscsi: Vec<Addr>,
    /// Settings of the default iSCSI target.
    pub iscsi_target: IscsiTargetSettings,
    /// Address of HTTP over TCP, besides the control socket.
    pub http: Option<std::net::SocketAddr>,
    /// Number of reactors.
    pub cores: u16,
    /// Time that reactors busy-poll after their last work before they sleep.
    pub linger: Duration,
    /// I/O driver of the reactors.
    pub driver: DriverChoice,
    /// File or device of the embedded store.
    pub store: PathBuf,
    /// Size of the store at creation.
    pub store_size: Option<Size>,
    /// Bytes of memory for the store's data cache.
    pub store_cache: usize,
    /// Bytes a second that filling and scrubbing the store's devices may read; 0 for no limit.
    pub repair_rate: u64,
    /// Threads that compress long writes; with 0, the store's reactor does.
    pub compression_threads: usize,
    /// Set to open the store although missing devices may have continued without the others.
    pub accept_missing_devices: bool,
    /// Source of the store's master key.
    pub master_key: Option<MasterKeySource>,
    /// Set to open the store without its master key.
    pub without_master_key: bool,
    /// Read cache of snapshot parents, if there is one.
    pub read_cache: Option<CacheOptions>,
    /// Maximum bytes of the pool in memory.
    pub ram_size: u64,
    /// Log filter.
    pub log_level: Option<String>,
    /// Format of log lines.
    pub log_format: LogFormat,
    /// Limits on dirty data, for write logs that specify none.
    pub log_limits: DirtyLimits,
    /// Options of librbd for images that neither they nor their pool override, by name.
    pub qos: BTreeMap<String, String>,
    /// Connection flags for a Ceph cluster.
    pub ceph: forebay_rados::Flags,
    /// Peer messenger settings.
    pub peers: PeerSettings,
    /// Gateway group that it is a member of.
    pub group: Option<GroupSpec>,
    /// Log device for copies of other daemons' write logs, if it holds some.
    pub replicas: Option<ReplicaSettings>,
}

impl DaemonConfig {
    /// Resolves the configuration: flags override the configuration file, which overrides defaults.
    pub fn resolve(global: &GlobalArgs, serve: &ServeArgs) -> Result<Self> {
        let mut file = match &serve.config {
            None => ConfigFile::default(),
            Some(path) => ConfigFile::load(path)?,
        };
        let peers = PeerSettings::resolve(serve, &mut file)?;
        let data = absolute(&global.data.clone().or(file.data).unwrap_or_else(default_data_dir))?;
        let control = match global.control.clone().or(file.control) {
            Some(path) => absolute(&path)?,
            None => data.join("control.sock"),
        };
        let nbd = if !serve.nbd.is_empty() { Some(serve.nbd.clone()) } else { file.nbd };
        let nbd = match nbd {
            Some(addrs) if addrs.is_empty() => {
                return Err(Failure::invalid("the configuration's list 'nbd' is empty; leave it out for the default"));
            }
            Some(addrs) => addrs.iter().map(|text| nbd::parse_listener(text)).collect::<Result<Vec<_>>>()?,
            None => vec![(Addr::Unix(data.join("nbd.sock")), Tls::None)],
        };
        let (nbd, nbd_tls): (Vec<_>, Vec<_>) = nbd.into_iter().unzip();
        let nbd_access = NbdAccess::resolve(file.nbd_tls, file.nbd_allow, serve, nbd_tls)?;
        let nvme = if !serve.nvme.is_empty() { serve.nvme.clone() } else { file.nvme.unwrap_or_default() };
        let nvme = nvme.iter().map(|text| nvme::parse_listener(text)).collect::<Result<Vec<_>>>()?;
        let (nvme, nvme_tls): (Vec<_>, Vec<_>) = nvme.into_iter().unzip();
        let nvme_subsystem = NvmeSubsystemSettings::resolve(file.nvme_subsystem, serve, nvme_tls)?;
        let iscsi = if !serve.iscsi.is_empty() { serve.iscsi.clone() } else { file.iscsi.unwrap_or_default() };
        let iscsi = iscsi.iter().map(|text| parse_addr(text)).collect::<Result<Vec<_>>>()?;
        let iscsi_target = IscsiTargetSettings::resolve(file.iscsi_target)?;
        let http = match serve.http.clone().or(file.http) {
            None => None,
            Some(text) => match parse_addr(&text)? {
                Addr::Tcp(addr) => Some(addr),
                Addr::Unix(_) => {
                    return Err(Failure::invalid(format!("--http {text}: HTTP on a Unix socket is --control")));
                }
            },
        };
        let cores = serve.cores.or(file.cores).unwrap_or(1);
        if cores == 0 || cores > CORES_MAX {
            return Err(Failure::invalid(format!("--cores {cores}: run from 1 to {CORES_MAX}")));
        }
        let linger_us = serve.linger_us.or(file.linger_us).unwrap_or(LINGER_US);
        if linger_us > LINGER_US_MAX {
            let text =
                format!("--linger-us {linger_us}: at most {LINGER_US_MAX}; longer costs a core and gains nothing");
            return Err(Failure::invalid(text));
        }
        let driver = match serve.driver.or(file.driver).unwrap_or_default() {
            DriverKind::Auto => DriverChoice::Auto,
            DriverKind::IoUring => DriverChoice::Uring,
            DriverKind::Epoll => DriverChoice::Poll,
        };
        let store = match serve.store.clone().or(file.store.path) {
            Some(path) => absolute(&path)?,
            None => default_store(&data),
        };
        let store_cache = serve.store_cache.or(file.store.cache).unwrap_or(STORE_CACHE);
        if store_cache.0 > memory() {
            let text = format!("--store-cache {store_cache}: this machine has {} of memory", Size(memory()));
            return Err(Failure::invalid(text));
        }
        let store_cache = store_cache.0 as usize;
        let compression_threads = match serve.compression_threads.or(file.store.compression_threads) {
            Some(count) if count > COMPRESSION_THREADS_MAX => {
                let text = format!("{count} threads that compress: at most {COMPRESSION_THREADS_MAX}");
                return Err(Failure::invalid(text));
            }
            Some(count) => count,
            None => std::thread::available_parallelism().is_ok_and(|count| count.get() > usize::from(cores)).into(),
        };
        Ok(Self {
            control,
            nbd,
            nbd_access,
            nvme,
            nvme_subsystem,
            iscsi,
            iscsi_target,
            http,
            cores,
            linger: Duration::from_micros(linger_us.into()),
            driver,
            read_cache: file.read_cache.resolve(&store)?,
            store,
            store_size: serve.store_size.or(file.store.size),
            store_cache,
            repair_rate: serve.repair_rate.or(file.store.repair_rate).unwrap_or(REPAIR_RATE).0,
            compression_threads: compression_threads.into(),
            accept_missing_devices: serve.accept_missing_devices,
            master_key: global.master_key.clone().or(file.store.master_key),
            without_master_key: serve.without_master_key,
            ram_size: file.ram.size.map_or_else(|| memory() / 2, |size| size.0),
            log_limits: file.write_log.resolve(serve)?,
            qos: file.qos.resolve()?,
            log_level: global.log_level.clone().or(file.log_level),
            log_format: global.log_format.or(file.log_format).unwrap_or_default(),
            ceph: global.ceph.flags(CephArgs {
                conf: file.ceph.conf,
                id: file.ceph.id,
                keyring: file.ceph.keyring,
                cluster: file.ceph.cluster,
            }),
            peers,
            group: match serve.group.clone().or(file.group) {
                Some(text) => Some(text.parse::<GroupSpec>().map_err(Failure::invalid)?),
                None => None,
            },
            replicas: file.replicas.resolve()?,
            data,
        })
    }
}

/// Parses an address.  A path is made absolute, so that printed addresses are valid in any directory.
fn parse_addr(text: &str) -> Result<Addr> {
    match text.parse::<Addr>().map_err(|error| Failure::invalid(error.to_string()))? {
        Addr::Unix(path) => Ok(Addr::Unix(absolute(&path)?)),
        addr => Ok(addr),
    }
}

/// Returns a path that does not depend on the working directory.
pub fn absolute(path: &Path) -> Result<PathBuf> {
    std::path::absolute(path).map_err(|error| Failure::io(error, format_args!("the path '{}'", path.display())))
}

/// Resolves symbolic links of a path, even if the target does not exist yet.  Relative links are resolved from their
/// own directory, as the kernel does.
pub fn follow_links(path: &Path) -> PathBuf {
    /// Maximum number of links followed, as in Linux; opening a path that exceeds it fails.
    const LINKS_MAX: usize = 40;
    let mut path = path.to_owned();
    for _ in 0..LINKS_MAX {
        let Ok(target) = std::fs::read_link(&path) else { break };
        path = path.parent().map_or_else(|| target.clone(), |dir| dir.join(&target));
    }
    path
}

/// Returns the default path of the store: the list of its devices, if there is one, or a file.
pub fn default_store(data: &Path) -> PathBuf {
    let list = data.join(DEVICE_LIST);
    if list.exists() { list } else { data.join("store.img") }
}

/// Returns the default data directory.
pub fn default_data_dir() -> PathBuf {
    if rustix::process::geteuid().is_root() {
        return "/var/lib/forebay".into();
    }
    let home = || std::env::var_os("HOME").map(|home| Path::new(&home).join(".local/share"));
    let base = std::env::var_os("XDG_DATA_HOME").map(PathBuf::from).filter(|path| path.is_absolute()).or_else(home);
    base.map_or_else(|| "/var/lib/forebay".into(), |base| base.join("forebay"))
}

/// Returns the memory of the machine in bytes.
fn memory() -> u64 {
    let text = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let total = text.lines().find_map(|line| line.strip_prefix("MemTotal:")?.trim().strip_suffix(" kB")?.parse().ok());
    // Fallback if the kernel does not report it: an amount that any machine has.
    total.map_or(512 << 20, |kib: u64| kib.saturating_mul(1024))
}

/// Default size of a store, in percent of the free space.
pub const STORE_PERCENT: u64 = 80;

/// Returns the default size of the store: [`STORE_PERCENT`] of the free space of the file system, rounded down to
/// whole GiB from 10 GiB on, otherwise to whole MiB.
pub fn size_from_free_space(dir: &Path) -> Result<u64> {
    let stat = rustix::fs::statvfs(dir)
        .map_err(|error| Failure::io(error.into(), format_args!("reading the free space of {}", dir.display())))?;
    let free = stat.f_bavail.saturating_mul(stat.f_frsize);
    let size = free / 100 * STORE_PERCENT;
    let unit = if size >= 10 << 30 { 1 << 30 } else { 1 << 20 };
    Ok(size / unit * unit)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::Format;

    fn global(data: &str) -> GlobalArgs {
        GlobalArgs {
            master_key: None,
            data: Some(data.into()),
            control: None,
            format: Format::Plain,
            pretty_format: false,
            no_progress: false,
            log_level: None,
            log_format: None,
            ceph: CephArgs::default(),
        }
    }

    fn with_file(text: &str, serve: ServeArgs) -> Result<DaemonConfig> {
        let file = tempfile::NamedTempFile::new().expect("a temporary file");
        fs::write(file.path(), text).expect("the configuration");
        DaemonConfig::resolve(&global("/d"), &ServeArgs { config: Some(file.path().into()), ..serve })
    }

    #[test]
    fn defaults() {
        let config = DaemonConfig::resolve(&global("/d"), &ServeArgs::default()).expect("defaults");
        assert_eq!(config.control, Path::new("/d/control.sock"));
        assert_eq!(config.nbd, vec![Addr::Unix("/d/nbd.sock".into())]);
        assert_eq!(config.store, Path::new("/d/store.img"));
        assert_eq!((config.cores, config.http), (1, None));
    }

    #[test]
    fn the_file_fills_in_and_flags_win() {
        let text = "data = '/other'\ncores = 3\nnbd = ['127.0.0.1:1', 'unix:/n']\ndriver = 'epoll'\n\
            [store]\npath = '/dev/x'\nsize = '5G'\ncompression-threads = 5\n\
            [ram]\nsize = '1G'\n";
        let config = with_file(text, ServeArgs { cores: Some(2), ..ServeArgs::default() }).expect("a configuration");
        assert_eq!(config.data, Path::new("/d"));
        assert_eq!(config.cores, 2);
        assert_eq!(config.nbd.len(), 2);
        assert_eq!(config.driver, DriverChoice::Poll);
        assert_eq!((config.store.as_path(), config.store_size), (Path::new("/dev/x"), Some(Size(5 << 30))));
        assert_eq!(config.compression_threads, 5);
        assert_eq!(config.ram_size, 1 << 30);
    }

    #[test]
    fn the_example_has_every_setting_and_changes_none() {
        let example = include_str!("../../../packaging/forebay.toml");
        let plain = DaemonConfig::resolve(&global("/d"), &ServeArgs::default()).expect("defaults");
        assert_eq!(with_file(example, ServeArgs::default()), Ok(plain));
        // A commented-out setting has no space after the `#`.
        let setting = |line: &&str| !line.is_empty() && !line.starts_with("# ") && *line != "#";
        let all: String =
            example.lines().filter(setting).map(|line| format!("{}\n", line.trim_start_matches('#'))).collect();
        let parsed: std::result::Result<ConfigFile, _> = toml::from_str(&all);
        assert!(parsed.is_ok(), "{:?} in {all}", parsed.err());
        let page = include_str!("../../../docs/operations.md");
        let table = page.split("| setting | flag |").nth(1).expect("the table of settings");
        let rows = table.lines().skip(2).take_while(|line| line.starts_with('|'));
        let mut count = 0;
        for name in rows.flat_map(|row| row.split('|').nth(1).unwrap_or_default().split('`').skip(1).step_by(2)) {
            let last = name.rsplit('.').next().unwrap_or_default();
            let there = |line: &str| {
                let line = line.trim_start_matches(['#', '[']);
                line.starts_with(&format!("{last} =")) || line.trim_end_matches(']').ends_with(&format!(".{last}"))
            };
            assert!(example.lines().any(there), "packaging/forebay.toml lacks {name}");
            count += 1;
        }
        assert!(count > 40, "{count} settings");
    }

    #[test]
    fn what_is_wrong_is_said() {
        for (text, says) in [
            ("coers = 2", "coers"),
            ("cores = 0", "from 1"),
            ("nbd = []", "empty"),
            ("nbd = ['nowhere']", "nowhere"),
            ("nbd = ['127.0.0.1:1,tls=maybe']", "'maybe'"),
            ("nbd = ['127.0.0.1:1,tls=required']", "neither"),
            ("nbd-allow = ['somewhere']", "nbd-allow"),
            ("http = 'unix:/x'", "--control"),
            ("nvme = ['nowhere']", "nowhere"),
            ("iscsi = ['nowhere']", "nowhere"),
            ("[iscsi-target]\nname = 'x'", "valid target name"),
            ("[iscsi-target.chap]\nuser = 'a'\nsecret = 'short'", "12"),
            ("[iscsi-target.mutual-chap]\nuser = 'a'\nsecret = 'long enough it is'", "chap"),
            ("[iscsi-target]\nthreshold-percent = 101", "percent"),
            ("[nvme-subsystem]\nnqn = 'x'", "qualified name"),
            ("[nvme-subsystem]\nfirst-controller = 9\nlast-controller = 8", "controllers 9 to 8"),
            ("[nvme-subsystem]\nadvertise = ['127.0.0.1:1']", "more addresses"),
            ("[nvme-subsystem]\nhosts = ['somebody']", "qualified name"),
            ("[store]\nsize = '5GB'", "GiB"),
            ("[store]\ncompression-threads = 65", "at most 64"),
        ] {
            let failure = with_file(text, ServeArgs::default()).expect_err(text);
            assert!(failure.message.contains(says), "{text}: {failure}");
            assert_eq!(failure.kind.exit_code(), 2, "{text}");
        }
    }

    #[test]
    fn the_store_fits_into_the_free_space() {
        let size = size_from_free_space(Path::new("/tmp")).expect("free space");
        assert!(size.is_multiple_of(1 << 20));
    }
}
