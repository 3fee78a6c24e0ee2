//! Quality of service by volume: limits of requests and bytes per second, and a fair share of the core.
//!
//! The settings are librbd's `rbd_qos_*` options, with their meaning.  The core is pure, time is an argument:
//!
//! - [`QosLimits`] are the limits of a volume; [`QosLimits::from_options`] reads them from options.
//! - [`TokenBucket`] is one limit with its burst.
//! - [`Throttle`] has the buckets of a volume, and the requests that wait for them, in order.
//!
//! At the edge, [`VolumeQos`] delays the requests of a volume by the reactor's clock, and [`QosDevice`] is a device with
//! a `VolumeQos` in front.
//!
//! [`FairShare`] keeps volumes with many requests in flight from delaying those with few; [`CoreShare`] and
//! [`VolumeShare`] apply it.

mod bucket;
mod core_share;
mod device;
mod limits;
mod share;
mod throttle;
mod volume;
mod waiters;

pub use bucket::TokenBucket;
pub use core_share::{CoreShare, ShareAdmission, SharedRequest, VolumeShare};
pub use device::QosDevice;
pub use limits::{ExcludedOperations, QosLimits, RateLimit, parse_count, parse_operations};
pub use share::{FairShare, ShareKey};
pub use throttle::{QosAdmission, RequestCost, RequestDirection, Throttle, Ticket};
pub use volume::{AdmissionWait, QosStats, VolumeQos};
