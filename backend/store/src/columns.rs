//! Store on several devices: segments as rows of columns, with parity, on distinct devices.
//!
//! `docs/design/store-devices.md` explains the design. The log, the cleaner and recovery use block numbers of one
//! linear device; [`ColumnSet`] maps them to lines and columns.

mod balance;
mod buffers;
mod check;
mod code;
mod copy;
mod degraded;
mod device;
mod fill;
mod geometry;
mod grow;
mod headers;
mod init;
mod line;
mod moves;
mod open;
mod place_uses;
mod places;
mod remove;
mod replace;
mod row;
mod set;
mod table;

pub(crate) use check::check_devices;
pub use device::ColumnState;
pub(crate) use fill::fill_devices;
pub(crate) use grow::DeviceGrowth;
pub use init::DeviceSetOptions;
pub(crate) use init::init_devices;
pub(crate) use moves::{MoveState, move_columns};
pub(crate) use set::ColumnSet;
pub use set::{ColumnCounters, DeviceStatus};
