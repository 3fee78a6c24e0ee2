//! Embedded object store: a pool of objects in a sparse file or on a block device, without a cluster.
//!
//! Log-structured. Every write is appended to a log, in segments. A map records the location and the CRC32C of each 4
//! KiB block of an object. Checkpoints store the map in a copy-on-write tree in the same log. A cleaner (garbage
//! collector) empties segments that are mostly dead.  `docs/design/store.md` explains the design;
//! `docs/formats/store.md` specifies every byte.
//!
//! Write path: `backend` -> `transact` (`plan`, `commit`) -> `log`, `apply` -> `object`, `segments`.
//! Read path: `backend` -> `read` -> `object` -> `media`.

mod apply;
mod backend;
mod blobs;
mod cache;
mod check;
mod checkpoint;
mod checkpoint_state;
mod clean;
mod clean_blobs;
mod columns;
mod commit;
mod core;
mod counters;
mod crypt;
mod device;
mod dirty;
mod drop_lost;
mod features;
pub mod format;
#[cfg(any(fuzzing, test, feature = "fuzz"))]
pub mod fuzz;
mod gc;
mod grow;
mod helpers;
mod host;
mod index;
mod init;
mod keys;
mod kv;
mod log;
mod maintenance;
mod map;
mod media;
mod merge;
mod object;
mod occupant;
mod pacer;
mod pack;
mod plan;
mod policies;
mod queue;
mod ranges;
mod read;
mod read_blobs;
mod rebuild;
mod recover;
mod scrub;
mod segment_uses;
mod segments;
mod shrink;
mod snaps;
mod space;
mod sparse;
mod store;
mod transact;
mod tree;

pub use cache::CacheStats;
pub use check::{CheckOptions, CheckReport, Finding};
pub use columns::{ColumnCounters, ColumnState, DeviceSetOptions, DeviceStatus};
pub use crypt::{KeyStatus, MasterKey, MasterKeyError};
pub use init::InitOptions;
pub use occupant::Occupant;
pub use ranges::{NewRange, RangeStatus, RangedDevice, create_range, list_ranges, remove_range, split_range};
pub use rebuild::{RebuildReport, RecordFound};
pub use recover::Replay;
pub use scrub::ScrubStatus;
pub use shrink::ColumnMoves;
pub use store::{Store, StoreOptions, StoreStats};
