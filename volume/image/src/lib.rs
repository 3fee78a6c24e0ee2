//! RBD images: thin volumes over objects.
//!
//! An image is cut into objects of 64 KiB to 32 MiB, which exist only where something was written.  What is stored is
//! RBD's format 2 (`docs/formats/rbd-image.md`), so that on a RADOS pool these are ordinary RBD images.  What is open
//! is described in `docs/design/image.md`.
//!
//! [`Images`] are the images of one backend: it creates, lists, opens, renames and removes them, and knows which are
//! open.  An open [`Image`] is a [`BlockDevice`](forebay_block::BlockDevice).  The functions of this module are short
//! forms for callers that have only the backend at hand.

mod clone;
mod details;
mod directory;
mod format;
#[cfg(any(fuzzing, test, feature = "fuzz"))]
pub mod fuzz;
mod gate;
mod image;
mod images;
mod info;
mod layout;
mod lock;
mod metadata;
mod objectmap;
mod present;
mod remove;
mod requests;
mod reserved;
mod resize;
mod session;
mod usage;
mod window;
mod wire;

use std::rc::Rc;

use forebay_block::{ObjectBackend, Result};

pub use format::Features;
pub use image::{Image, ImageUsage, LockCheck, OpenOptions};
pub use images::{Images, NAME_LEN_MAX, OBJECT_SIZES, SIZE_MAX};
pub use info::{
    CreateOptions, ImageDetails, ImageInfo, LockKind, ParentInfo, Progress, RemoveOptions, SnapshotDetails,
    SnapshotInfo,
};
pub use metadata::METADATA_VALUE_MAX;
pub use session::KeptLock;
pub use usage::SnapshotUsage;

/// Objects of 4 MiB, as everywhere in RBD.
pub const OBJECT_SIZE_DEFAULT: u64 = 4 << 20;

/// Creates an image; see [`Images::create`].
pub async fn create(backend: &Rc<dyn ObjectBackend>, name: &str, options: CreateOptions) -> Result<()> {
    Images::of(backend).create(name, options).await
}

/// The names of all images; see [`Images::list`].
pub async fn list(backend: &Rc<dyn ObjectBackend>) -> Result<Vec<String>> {
    Images::of(backend).list().await
}

/// What an image is; see [`Images::info`].
pub async fn info(backend: &Rc<dyn ObjectBackend>, name: &str) -> Result<ImageInfo> {
    Images::of(backend).info(name).await
}

/// Removes an image that is not open; see [`Images::remove`].
pub async fn remove(backend: &Rc<dyn ObjectBackend>, name: &str, progress: impl FnMut(Progress)) -> Result<()> {
    Images::of(backend).remove(name, RemoveOptions::default(), progress).await
}

/// Gives an image another name; see [`Images::rename`].
pub async fn rename(backend: &Rc<dyn ObjectBackend>, from: &str, to: &str) -> Result<()> {
    Images::of(backend).rename(from, to).await
}
