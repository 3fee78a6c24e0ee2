//! Quality of service by volume: limits of requests and bytes per second.
//!
//! The settings are librbd's `rbd_qos_*` options, with their meaning.  The core is pure, time is an argument:
//!
//! - [`QosLimits`] are the limits of a volume; [`QosLimits::from_options`] reads them from options.
//! - [`TokenBucket`] is one limit with its burst.
//! - [`Throttle`] has the buckets of a volume, and the requests that wait for them, in order.
//!
//! At the edge, [`VolumeQos`] delays the requests of a volume by the reactor's clock, and [`QosDevice`] is a device with
//! a `VolumeQos` in front.

mod bucket;
mod device;
mod limits;
mod throttle;
mod volume;

pub use bucket::TokenBucket;
pub use device::QosDevice;
pub use limits::{ExcludedOperations, QosLimits, RateLimit, parse_count, parse_operations};
pub use throttle::{Admission, Direction, RequestCost, Throttle, Ticket};
pub use volume::{AdmissionWait, QosStats, VolumeQos};
