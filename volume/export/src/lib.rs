//! Exports of volumes: their list, their life, their numbers and their request counters.
//!
//! Nothing here opens an image or listens for hosts. The daemon puts these parts between volumes and fronts:
//!
//! - [`Meters`] counts requests by volume and by path; [`Meter::measure`] counts one request.
//! - [`mod@list`] has the exports persisted in a list and its journal; its files are read and written elsewhere.
//! - [`ExportLifecycle`] is the state of an export, from its entry in a list to its end.
//! - [`ExportNumbers`] chooses the LUNs and namespace ids by which hosts remember volumes.
//! - [`Delayed`] adds latency to a device, to measure what hides latency.

mod delayed;
#[cfg(any(fuzzing, test))]
pub mod fuzz;
mod lifecycle;
pub mod list;
pub mod meter;
mod numbers;

pub use delayed::Delayed;
pub use lifecycle::{ExportLifecycle, ExportState};
pub use meter::{MeasuredRequest, Meter, Meters};
pub use numbers::{ExportNumbers, NumberError, NumberOwners, RetiredNumber, TakenNumbers};
