//! Options of `serve`.

use std::path::PathBuf;

use clap::{Args, ValueEnum, ValueHint};

use crate::units::{Size, Span};

/// Options of `serve`.
#[derive(Debug, Clone, Default, Args)]
pub struct ServeArgs {
    /// Configuration file (TOML); options on the command line override it
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub config: Option<PathBuf>,

    /// Addresses of NBD.
    #[arg(
        long,
        value_name = "ADDR[,tls=required|allowed]",
        help = "Serve NBD here: host:port, [v6]:port or unix:PATH; may be repeated [default: unix:DIR/nbd.sock]",
        long_help = "Serve NBD here: host:port, [v6]:port or unix:PATH; may be repeated [default: unix:DIR/nbd.sock].\n\
            With tls=required hosts must speak TLS 1.3, with tls=allowed they may; --nbd-tls and --nbd-psk say with \
            which certificates and keys."
    )]
    pub nbd: Vec<String>,

    /// Certificates for NBD.
    #[arg(
        long,
        value_name = "DIR",
        value_hint = ValueHint::DirPath,
        help = "Directory with the certificates for NBD with TLS: server-cert.pem, server-key.pem, ca-cert.pem",
        long_help = "Directory with the certificates for NBD with TLS, named as for QEMU: server-cert.pem, server-key.pem \
            (which nobody else may read) and ca-cert.pem.\n\
            Hosts must show a certificate that one of the authorities in ca-cert.pem has signed, unless the configuration \
            says nbd-tls.verify-peer = false."
    )]
    pub nbd_tls: Option<PathBuf>,

    /// Pre-shared keys for NBD with TLS: a file of USER:HEX lines, as 'psktool' writes it, readable only by its owner
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub nbd_psk: Option<PathBuf>,

    /// A network from which NBD hosts may connect, ADDRESS/BITS; may be repeated [default: everywhere]
    #[arg(long, value_name = "NETWORK")]
    pub nbd_allow: Vec<String>,

    /// Addresses of NVMe/TCP.
    #[arg(
        long,
        value_name = "ADDR[,tls=required]",
        help = "Serve NVMe/TCP here: host:port or [v6]:port, usually 4420; may be repeated",
        long_help = "Serve NVMe/TCP here: host:port or [v6]:port, usually 4420; may be repeated.\n\
            With tls=required hosts must speak TLS 1.3, with the key that --nvme-host NQN,tls-key=FILE gives them."
    )]
    pub nvme: Vec<String>,

    /// A host that may use the NVMe subsystem; with any of these, only those that are named.
    #[arg(
        long,
        value_name = "NQN[,secret=FILE]",
        help = "A host that may use the NVMe subsystem [default: all may]; may be repeated",
        long_help = "A host that may use the NVMe subsystem [default: all may]; may be repeated.\n\
            With secret=FILE it has to authenticate (DH-HMAC-CHAP), with controller-secret=FILE the daemon \
            authenticates to it as well.  These files hold what 'nvme gen-dhchap-key' prints.  With tls-key=FILE, \
            which holds what 'nvme gen-tls-key' prints, it is let in through TLS only.  Nobody else may read the \
            files.\n\
            Example: --nvme-host nqn.2014-08.org.nvmexpress:uuid:...,secret=/etc/forebay/host.key"
    )]
    pub nvme_host: Vec<String>,

    /// A resource limit for NVMe hosts.
    #[arg(
        long,
        value_name = "NAME=VALUE",
        help = "A resource limit for NVMe hosts, such as queues=8; may be repeated",
        long_help = "A resource limit for NVMe hosts; may be repeated.\n\
            connections, handshakes (connections that are not authenticated yet): a core's; controllers, \
            controllers-per-host; queues: I/O queues a controller; memory-per-connection, memory-per-host, memory: \
            bytes of commands under way, a core's.\n\
            Example: --nvme-limit queues=8 --nvme-limit memory-per-host=32M"
    )]
    pub nvme_limit: Vec<String>,

    /// Addresses of iSCSI.
    #[arg(long, value_name = "ADDR", help = "Serve iSCSI here: host:port or [v6]:port, usually 3260; may be repeated")]
    pub iscsi: Vec<String>,

    /// Serve the HTTP API, /metrics and the status page here, besides on the control socket
    #[arg(
        long,
        value_name = "ADDR",
        long_help = "Serve the HTTP API, /metrics and the status page here (host:port), besides on the control socket.\n\
            Over TCP everything that changes or reads images asks for the token in DIR/http.token."
    )]
    pub http: Option<String>,

    /// Reactors to run, one thread each [default: 1]
    #[arg(long, value_name = "N")]
    pub cores: Option<u16>,

    /// Busy-poll for this many microseconds after the last work before sleeping [default: 50]
    #[arg(
        long,
        value_name = "US",
        long_help = "Busy-poll for this many microseconds after the last work before sleeping [default: 50]\n\
            Takes the time of waking up out of each request at depth 1, for up to a whole core while clients are \
            busy; 0 saves that CPU time.  Where requests come less often than that, and in an idle daemon, reactors \
            sleep either way."
    )]
    pub linger_us: Option<u32>,

    /// Path of the embedded store: a file or a block device [default: DIR/store.img]
    #[arg(long, value_name = "PATH", value_hint = ValueHint::FilePath)]
    pub store: Option<PathBuf>,

    /// Size of the store file when the first start creates it [default: 80 % of the free space]
    #[arg(long, value_name = "SIZE")]
    pub store_size: Option<Size>,

    /// Size of the cache of recently read or written blocks; 0 disables it [default: 256M]
    #[arg(
        long,
        value_name = "SIZE",
        long_help = "Size of the cache of recently read or written blocks; 0 disables it [default: 256M]\n\
            The store reads and writes its file past the kernel's page cache; this is its own.  Memory is taken as \
            blocks come in, never more than that (and some 4 % for the books).  Example: --store-cache 4G"
    )]
    pub store_cache: Option<Size>,

    /// Rate, a second, at which devices of the store are filled and scrubbed; 0 for no limit [default: 256M]
    #[arg(long, value_name = "SIZE")]
    pub repair_rate: Option<Size>,

    /// Threads that compress long writes beside the reactors; with 0, the store's reactor does [default: 1, or 0 if the reactors
    /// take all processors]
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u16).range(..=64))]
    pub compression_threads: Option<u16>,

    /// Open a store on several devices although those that are missing may have been used without the others
    #[arg(long)]
    pub accept_missing_devices: bool,

    /// Open a store with encrypted images without their master key: they can be neither read nor written
    #[arg(long)]
    pub without_master_key: bool,

    /// Maximum of dirty data in a write log that specifies none [default: its capacity]
    #[arg(long, value_name = "SIZE")]
    pub log_dirty_max: Option<Size>,

    /// Maximum age of dirty data in a write log that specifies none: 500ms, 2s, 5m [default: 2s]
    #[arg(long, value_name = "TIME")]
    pub log_dirty_age: Option<Span>,

    /// I/O driver for disks and sockets
    #[arg(long, value_name = "DRIVER")]
    pub driver: Option<DriverKind>,

    /// Addresses for other daemons and for clients of the peer protocol.
    #[arg(
        long,
        value_name = "ADDR",
        help = "Listen for other daemons here: host:port, rdma:HOST:PORT, unix:PATH or shm:PATH; may be repeated",
        long_help = "Listen for other daemons here: host:port, rdma:HOST:PORT, unix:PATH or shm:PATH; may be repeated.\n\
            An address that names no transport has the one that the configuration calls 'cluster'.  Off this machine \
            --peer-key is needed, and frames are encrypted unless the configuration says peer-secure = false."
    )]
    pub peer: Vec<String>,

    /// The key that daemons share: a file of 64 hexadecimal digits, readable only by its owner
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub peer_key: Option<PathBuf>,

    /// A network from which daemons may connect, ADDRESS/BITS; may be repeated [default: everywhere]
    #[arg(long, value_name = "NETWORK")]
    pub peer_allow: Vec<String>,

    /// Gateway group.
    #[arg(
        long,
        value_name = "POOL/GROUP",
        help = "Be a member of this gateway group, which 'forebay group create --gateways' makes",
        long_help = "Be a member of this gateway group, which 'forebay group create --gateways' makes.\n\
            Its members serve the same volumes of a Ceph cluster; --peer says where they reach each other.\n\
            Example: --group rbd/gateways --peer 10.0.0.1:7000 --peer-key /etc/forebay/peer.key"
    )]
    pub group: Option<String>,
}

/// I/O driver of a reactor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DriverKind {
    /// io_uring, or epoll where io_uring is forbidden.
    #[default]
    Auto,
    /// io_uring or nothing.
    #[value(name = "io_uring")]
    IoUring,
    /// epoll and a few file threads.
    Epoll,
}
