//! Read cache of snapshot parents, shared by all clones that this daemon has open.
//!
//! Objects of an image at a snapshot never change. So their parts, of 64 KiB, are kept in memory and in a file on an
//! SSD, and each part is read from the backend once, however many clones want it at the same time. The design is in
//! `docs/design/readcache.md`, the format of the file in `docs/formats/readcache.md`.
//!
//! Own blocks of an image, those of its head, are kept in the same way while this process alone changes them.
//!
//! [`ReadCache`] implements [`SnapshotCache`](forebay_block::SnapshotCache). It belongs to the core of the images.

mod cache;
mod disk;
mod flags;
mod flight;
mod format;
#[cfg(any(fuzzing, test, feature = "fuzz"))]
pub mod fuzz;
mod own_blocks;
mod part;
mod s3fifo;
mod stats;
mod table;
mod writer;

pub use cache::{CacheOptions, DiskOptions, ReadCache};
pub use format::{DISK_SIZE_MIN, PART_LEN};
pub use stats::{DiskState, ReadCacheStats, SourceStats};
