//! Options of the commands on NVMe subsystems, iSCSI targets, and the hosts that may use them.

use clap::{Args, Subcommand};

/// Commands on NVMe subsystems.
#[derive(Debug, Subcommand)]
pub enum NvmeSubsystemCommand {
    /// List the subsystems, with the hosts that may connect to each
    #[command(after_help = "Example:\n  forebay nvme-subsystem ls --format json")]
    Ls,

    /// Create a subsystem; 'forebay attach --nvme --subsystem NQN' adds namespaces to it
    #[command(
        after_help = "Example:\n  forebay nvme-subsystem create nqn.2024-05.org.example:disks --host nqn.2014-08.org.nvmexpress:uuid:1b4e28ba-2fa1-11d2-883f-0016d3cca427"
    )]
    Create(CreateNvmeSubsystemArgs),

    /// Remove a subsystem that has no exports
    #[command(after_help = "Example:\n  forebay nvme-subsystem rm nqn.2024-05.org.example:disks")]
    Rm {
        /// The subsystem's NQN
        nqn: String,
    },

    /// Allow a host to connect to a subsystem, or renew its secrets and keys
    #[command(
        after_help = "Example:\n  forebay nvme-subsystem allow --subsystem nqn.2024-05.org.example:disks nqn.2024-05.org.example:host,secret=/etc/forebay/host.key"
    )]
    Allow(AllowNvmeHostArgs),

    /// Disallow a host, and disconnect it once its commands in flight are done
    #[command(
        after_help = "Example:\n  forebay nvme-subsystem deny --subsystem nqn.2024-05.org.example:disks nqn.2024-05.org.example:host"
    )]
    Deny(DenyNvmeHostArgs),
}

/// Options of `nvme-subsystem create`.
#[derive(Debug, Args)]
pub struct CreateNvmeSubsystemArgs {
    /// The new subsystem's NQN
    pub nqn: String,

    /// A host that may connect; may be repeated [default: none]
    ///
    /// Files follow the host's NQN: NQN,secret=FILE (DH-HMAC-CHAP), ,controller-secret=FILE (what is proved to the
    /// host), ,tls-key=FILE.  The daemon reads them, now and at each start and reload.  Only their owner may have read
    /// access.
    #[arg(long, value_name = "NQN[,secret=FILE...]", conflicts_with = "any_host")]
    pub host: Vec<String>,

    /// Let every host connect
    #[arg(long)]
    pub any_host: bool,
}

/// Options of `nvme-subsystem allow`.
#[derive(Debug, Args)]
pub struct AllowNvmeHostArgs {
    /// The host's NQN, and its files behind it as with 'create --host': NQN,secret=FILE
    pub host: String,

    /// The subsystem's NQN [default: the subsystem of the configuration]
    #[arg(long, value_name = "NQN")]
    pub subsystem: Option<String>,
}

/// Options of `nvme-subsystem deny`.
#[derive(Debug, Args)]
pub struct DenyNvmeHostArgs {
    /// The host's NQN
    pub host: String,

    /// The subsystem's NQN [default: the subsystem of the configuration]
    #[arg(long, value_name = "NQN")]
    pub subsystem: Option<String>,
}

/// Commands on iSCSI targets.
#[derive(Debug, Subcommand)]
pub enum IscsiTargetCommand {
    /// List the targets, with the initiators that may log in to each
    #[command(after_help = "Example:\n  forebay iscsi-target ls --format json")]
    Ls,

    /// Create a target; 'forebay attach --iscsi --target IQN' adds units to it
    #[command(
        after_help = "Example:\n  forebay iscsi-target create iqn.2024-05.org.example:disks --initiator iqn.1993-08.org.debian:01:abc"
    )]
    Create(CreateIscsiTargetArgs),

    /// Remove a target that has no exports; its sessions end
    #[command(after_help = "Example:\n  forebay iscsi-target rm iqn.2024-05.org.example:disks")]
    Rm {
        /// The target's IQN
        name: String,
    },

    /// Allow an initiator to log in to a target
    #[command(
        after_help = "Example:\n  forebay iscsi-target allow --target iqn.2024-05.org.example:disks iqn.1993-08.org.debian:01:abc"
    )]
    Allow(AdmitInitiatorArgs),

    /// Disallow an initiator, and end its sessions once their commands in flight are done
    #[command(
        after_help = "Example:\n  forebay iscsi-target deny --target iqn.2024-05.org.example:disks iqn.1993-08.org.debian:01:abc"
    )]
    Deny(AdmitInitiatorArgs),
}

/// Options of `iscsi-target create`.
#[derive(Debug, Args)]
pub struct CreateIscsiTargetArgs {
    /// The new target's IQN
    pub name: String,

    /// An initiator that may log in, by name; may be repeated, and end in * [default: none]
    #[arg(long, value_name = "IQN", conflicts_with = "any_initiator")]
    pub initiator: Vec<String>,

    /// Let every initiator log in
    #[arg(long)]
    pub any_initiator: bool,

    /// Name and secret that initiators prove by CHAP: the file holds 12 to 255 bytes and is readable only by its owner
    #[arg(long, value_name = "USER,FILE")]
    pub chap: Option<String>,

    /// Name and secret that the target proves to them
    #[arg(long, value_name = "USER,FILE", requires = "chap")]
    pub mutual_chap: Option<String>,
}

/// Options of `iscsi-target allow` and `iscsi-target deny`.
#[derive(Debug, Args)]
pub struct AdmitInitiatorArgs {
    /// The initiator's name
    pub initiator: String,

    /// The target's IQN [default: the target of the configuration]
    #[arg(long, value_name = "IQN")]
    pub target: Option<String>,
}
