//! Options of `group` for groups of gateways.

use clap::{Args, ValueEnum};

use super::groups::OneGroup;
use crate::spec::GroupSpec;
use crate::units::Span;

/// Options of `group create`.
#[derive(Debug, Args)]
pub struct CreateGroupArgs {
    /// Spec of the group.
    #[command(flatten)]
    pub of: OneGroup,

    /// Create a group of gateways: daemons that serve the same volumes, and take over from each other
    #[arg(long)]
    pub gateways: bool,

    /// Time for which a gateway may be silent before the others take its volumes over: 500ms, 2s [default: 1s]
    #[arg(long, value_name = "TIME", requires = "gateways")]
    pub lease: Option<Span>,

    /// Move volumes automatically where the loads of gateways differ
    #[arg(long, requires = "gateways")]
    pub rebalance: bool,
}

/// Options of `group rm`.
#[derive(Debug, Args)]
pub struct RemoveGroupArgs {
    /// Spec of the group.
    #[command(flatten)]
    pub of: OneGroup,

    /// Remove a group of gateways, which has no members and no volumes
    #[arg(long)]
    pub gateways: bool,
}

/// Options of `group join`.
#[derive(Debug, Args)]
pub struct JoinGroupArgs {
    /// The group of gateways, POOL/GROUP
    #[arg(value_name = "GROUP")]
    pub group: GroupSpec,
}

/// Options of `group status`.
#[derive(Debug, Args)]
pub struct GroupStatusArgs {
    /// The group of gateways, POOL/GROUP [default: that of the daemon]
    #[arg(value_name = "GROUP")]
    pub group: Option<GroupSpec>,
}

/// Options of `group drain`.
#[derive(Debug, Args)]
pub struct DrainGroupArgs {
    /// Host name or id of the member [default: this daemon]
    #[arg(value_name = "MEMBER")]
    pub member: Option<String>,

    /// Let the member take volumes again
    #[arg(long)]
    pub undo: bool,
}

/// Setting that is on or off.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum OnOff {
    /// Enables the setting.
    On,
    /// Disables the setting.
    Off,
}

/// Options of `group set`.
#[derive(Debug, Args)]
pub struct SetGroupArgs {
    /// Move volumes automatically where the loads of gateways differ
    #[arg(long, value_enum, value_name = "on|off", required_unless_present = "hosts")]
    pub rebalance: Option<OnOff>,

    /// Admit the hosts that the group lists, or those of each member's configuration
    ///
    /// The lists are changed by `nvme-subsystem allow` and `iscsi-target allow` with the group's subsystem and target.
    #[arg(long, value_enum, value_name = "group|members")]
    pub hosts: Option<HostSource>,
}

/// Origin of the hosts that a group of gateways admits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum HostSource {
    /// Lists of the group.
    Group,
    /// Configuration of each member.
    Members,
}

/// Options of `group set-weight`.
#[derive(Debug, Args)]
pub struct SetWeightArgs {
    /// The weight: 100 is usual, 200 is twice the load, 0 takes no volumes; at most 10000
    #[arg(value_name = "WEIGHT")]
    pub weight: u32,

    /// Host name or id of the member [default: this daemon]
    #[arg(value_name = "MEMBER")]
    pub member: Option<String>,
}

/// Options of `group rebalance`.
#[derive(Debug, Args)]
pub struct RebalanceGroupArgs {
    /// Show what would be moved, and move nothing
    #[arg(short = 'n', long)]
    pub dry_run: bool,
}
