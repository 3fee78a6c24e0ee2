//! RBD images: thin volumes over objects.
//!
//! Stores an image as objects of 64 KiB to 32 MiB, allocated on first write. The on-disk format is RBD format 2
//! (`docs/formats/rbd-image.md`), so images in a RADOS pool are ordinary RBD images. Open images are described in
//! `docs/design/image.md`.
//!
//! [`Images`] is the image registry of one backend: it creates, lists, opens, renames and removes images, and tracks
//! which are open. An open [`Image`] is a [`BlockDevice`](forebay_block::BlockDevice). The functions of this module
//! are shorthands for callers that have only the backend.

mod admission;
mod ask_owner;
mod changes;
mod children;
mod clone;
mod config;
mod create_clone;
mod data_policy;
mod details;
mod directory;
mod exclusive_lock;
mod exported;
mod features;
mod flatten;
mod format;
#[cfg(any(fuzzing, test, feature = "fuzz"))]
pub mod fuzz;
mod groups;
mod header_state;
mod image;
mod images;
mod info;
mod layout;
mod lifecycle;
mod lock;
mod locks;
mod luks;
mod metadata;
mod namespaces;
mod notifications;
mod objectmap;
mod open_image;
mod own_blocks;
mod owner;
mod parent_cache;
mod pools;
mod present;
mod read;
mod rebuild;
mod remove;
mod requests;
mod reserved;
mod resize;
mod rollback;
mod snapshots;
mod sparsify;
mod times;
mod trash;
mod usage;
mod watcher;
mod window;
mod wire;

use std::rc::Rc;

use forebay_block::{ObjectBackend, Result};

pub use changes::{ChangedRange, ImageChanges};
pub use config::MetadataReader;
pub use exclusive_lock::KeptLock;
pub use format::ImageFeatures;
pub use groups::{
    CreatedPart, GroupGuard, GroupMember, GroupSnapshotInfo, GroupSnapshotPart, PendingGroupSnapshot, PendingPart,
};
pub use image::{Image, ImageOpenOptions, SpaceUsage};
pub use images::{Images, NAME_LEN_MAX, OBJECT_SIZES, SIZE_MAX};
pub use info::{
    ChildInfo, CloneFormat, CloneOptions, CreateOptions, ImageDescription, ImageDetails, LockKind, ObjectProgress,
    ParentInfo, RemoveOptions, STRIPE_COUNT_MAX, STRIPE_UNIT_MIN, SnapshotDetails, SnapshotInfo, SnapshotKind,
    Striping,
};
pub use locks::{ImageLock, ImageLocks};
pub use luks::{LUKS_HEADER_LEN, LuksHeader};
pub use metadata::METADATA_VALUE_MAX;
pub use notifications::{ImageNotification, NotificationReceiver, NotificationWatch};
pub use open_image::{HeaderHook, LockCheck};
pub use own_blocks::{OWN_BLOCKS_KEY, OwnBlockState};
pub use owner::{OperationProgress, OwnerOperation, OwnerOperations};
pub use parent_cache::{InstalledSnapshotCache, install_snapshot_cache};
pub use rebuild::{MapCheck, WrongObject};
pub use sparsify::SPARSE_SIZE_MIN;
pub use times::{ImageTimes, TimesRecorder};
pub use trash::{TrashSource, TrashedImage};
pub use usage::SnapshotUsage;
pub use wire::{diff, image_stream};

/// Default object size, RBD's own: 4 MiB.
pub const OBJECT_SIZE_DEFAULT: u64 = 4 << 20;

/// Creates an image; see [`Images::create`].
pub async fn create(backend: &Rc<dyn ObjectBackend>, name: &str, options: CreateOptions) -> Result<()> {
    Images::of(backend).create(name, options).await
}

/// Returns the names of all images; see [`Images::list`].
pub async fn list(backend: &Rc<dyn ObjectBackend>) -> Result<Vec<String>> {
    Images::of(backend).list().await
}

/// Returns the description of an image; see [`Images::info`].
pub async fn info(backend: &Rc<dyn ObjectBackend>, name: &str) -> Result<ImageDescription> {
    Images::of(backend).info(name).await
}

/// Removes an image that is not open; see [`Images::remove`].
pub async fn remove(backend: &Rc<dyn ObjectBackend>, name: &str, progress: impl FnMut(ObjectProgress)) -> Result<()> {
    Images::of(backend).remove(name, RemoveOptions::default(), progress).await
}

/// Renames an image; see [`Images::rename`].
pub async fn rename(backend: &Rc<dyn ObjectBackend>, from: &str, to: &str) -> Result<()> {
    Images::of(backend).rename(from, to).await
}
