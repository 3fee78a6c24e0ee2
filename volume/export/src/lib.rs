//! Exports of volumes: their list, their life, their numbers, request counters, and in-flight changes that a change of
//! reservations or of a write log drains.
//!
//! Nothing here opens an image or listens for hosts. The daemon puts these parts between volumes and fronts:
//!
//! - [`Meters`] counts requests by volume and by path; [`Meter::measure`] counts one request.
//! - [`InFlightChanges`] tracks writes, and waits for those that began before.
//! - [`mod@list`] has the exports persisted in a list and its journal; its files are read and written elsewhere.
//! - [`ExportLifecycle`] is the state of an export, from its entry in a list to its end.
//! - [`ExportNumbers`] chooses the LUNs and namespace ids by which hosts remember volumes.
//! - [`Delayed`] adds latency to a device, to measure what hides latency.

mod delayed;
#[cfg(any(fuzzing, test))]
pub mod fuzz;
mod in_flight;
mod lifecycle;
pub mod list;
pub mod meter;
mod numbers;

pub use delayed::Delayed;
pub use in_flight::{InFlightChanges, Tracked};
pub use lifecycle::{ExportLifecycle, ExportState};
pub use meter::{MeasuredRequest, Meter, Meters};
pub use numbers::{ExportNumbers, NumberError, NumberOwners, RetiredNumber, TakenNumbers};
