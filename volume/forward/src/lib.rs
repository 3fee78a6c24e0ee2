//! Volumes that another daemon has open: block requests over the messenger.
//!
//! In a group of daemons each volume is open at one of them, its *owner*.  [`ForwardHost`] is the owner's side: it offers
//! open volumes to the others.  [`ForwardedVolume`] is the side of a *forwarder*: a
//! [`BlockDevice`](forebay_block::BlockDevice) whose requests the owner executes.  The design, with its numbered
//! invariants, is in `docs/design/forward.md`; the wire format in `docs/formats/forward.md`.

mod authority;
mod client;
mod device;
#[cfg(any(fuzzing, test))]
pub mod fuzz;
mod give_up;
mod host;
mod offer;
mod renewal;
mod reserve;
mod route;
pub mod session;
#[cfg(test)]
mod tests;
pub mod wire;

pub use client::{ForwardClient, OwnerLocator, ReachableOwner};
pub use device::ForwardedVolume;
pub use host::ForwardHost;
pub use offer::VolumeOffer;
pub use route::OwnerRoute;
pub use session::ForwarderLimits;
pub use wire::ForwarderStart;
