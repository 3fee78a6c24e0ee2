//! Write-back log in front of a volume: a write is acknowledged as soon as it is durable in the log, and reaches the
//! volume's backend later, in an order that keeps the backend crash-consistent at any moment.
//!
//! [`WriteLog`] is a [`BlockDevice`](forebay_block::BlockDevice) over another one. A [`Shelf`] is the log device: a
//! file, block device or persistent memory that holds logs. See `docs/design/writelog.md` and
//! `docs/formats/writelog.md`.

mod acquire;
mod append;
mod attachment;
mod bypass;
mod cipher;
mod consistency;
mod dirty;
mod entries;
mod flush;
pub mod format;
#[doc(hidden)]
pub mod fuzz;
mod index;
mod interval_set;
mod log;
mod media;
mod mode;
mod options;
mod pattern;
mod payload_cache;
mod pending_write;
mod plan;
mod queue;
mod read;
mod record;
pub mod replication;
mod shelf;
mod state;
mod stats;
mod superseded;
mod survey;
mod throttle;
#[cfg(any(test, feature = "record-tweaks"))]
#[doc(hidden)]
pub mod tweaks;
mod writeback;

pub use attachment::{LogAttachment, LogKeeper, PeerAccess, PlaceChange};
pub use consistency::{ChangesPast, Cut, Shrinking};
pub use format::{LogId, MediumKind};
pub use log::WriteLog;
pub use mode::Mode;
pub use options::{DirtyLimits, LogOptions, LogOwner, Persist};
pub use record::{LogRecord, RecordedLog, Standing};
pub use shelf::{LogInfo, OpenLog, Shelf, ShelfOptions, id_text, parse_id};
pub use stats::LogStats;
pub use survey::{LogSurvey, Membership};
