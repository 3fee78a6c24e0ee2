//! Gateway groups: daemons that hosts see as one array.
//!
//! [`GroupRecord`] says who is a member, and which member owns a volume; it is kept in a pool and changed by
//! compare-and-set.  [`GatewayMachine`] decides what one member does next: it observes others, fences those that have
//! failed, and opens, prepares and closes volumes.  Neither does I/O.

pub mod assign;
mod ids;
pub mod load;
pub mod member;
pub mod observe;
pub mod record;
pub mod runner;
pub mod store;
pub mod wire;

pub use ids::{GatewayGroupId, MalformedId, MemberId, StartId, VolumeName};
pub use load::{LoadSampler, RequestLoad, RequestTotals, VolumeLoads};
pub use member::{
    ChangeOutcome, CloseReason, EndReason, GatewayAction, GatewayEvent, GatewayMachine, MemberStanding, OpenFailure,
};
pub use record::{
    ChangeRefusal, GatewayMember, GatewayState, GatewayVolume, GroupChange, GroupIdentity, GroupPolicy, GroupRecord,
    GroupVersions, LaterFields, MalformedGroup, VolumeOwner, WEIGHT_MAX,
};
