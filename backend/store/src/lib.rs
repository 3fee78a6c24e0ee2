//! The embedded object store: a pool of objects in a sparse file or on a block device, with no cluster at all.
//!
//! Everything is appended to a log, in segments; a map says where each 4 KiB block of an object lies and what its
//! CRC32C is; checkpoints store the map in a copy-on-write tree that lies in the same log; a cleaner empties segments
//! that are mostly dead.  `docs/design/store.md` explains it, `docs/formats/store.md` has every byte.
//!
//! The path of a write: `backend` -> `transact` (`plan`, `commit`) -> `log`, `apply` -> `object`, `segments`.
//! The path of a read: `backend` -> `read` -> `object` -> `media`.

mod apply;
mod backend;
mod cache;
mod check;
mod checkpoint;
mod clean;
mod commit;
mod core;
pub mod format;
#[cfg(any(fuzzing, test, feature = "fuzz"))]
pub mod fuzz;
mod host;
mod init;
mod kv;
mod log;
mod media;
mod merge;
mod object;
mod occupant;
mod plan;
mod read;
mod recover;
mod segments;
mod snaps;
mod store;
mod transact;
mod tree;

pub use cache::CacheStats;
pub use check::{CheckOptions, CheckReport, Finding};
pub use init::InitOptions;
pub use occupant::Occupant;
pub use recover::Replay;
pub use store::{Store, StoreOptions, StoreStats};
