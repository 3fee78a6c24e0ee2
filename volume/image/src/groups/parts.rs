//! Parts of a group's snapshot: a snapshot of each image.

use std::rc::Rc;

use forebay_block::{Error, ErrorKind, ExclusiveRange, Extent, Result, SnapId};

use super::TRIES;
use crate::exclusive_lock::KeptLock;
use crate::image::Image;
use crate::images::SIZE_MAX;
use crate::info::SnapshotKind;
use crate::snapshots::{PendingSnapshot, announce, contended};
use crate::wire::group::SnapshotPart;

/// Snapshot of an image that is to be created as part of a group's. Its number is reserved. The exclusive lock is kept once its
/// writes are blocked.
pub struct PendingPart {
    image: Rc<Image>,
    pending: PendingSnapshot,
    hold: Option<ExclusiveRange>,
    kept: Option<KeptLock>,
}

/// Snapshot of an image that was created as part of a group's.
pub struct CreatedPart(pub(super) SnapshotPart);

impl PendingPart {
    pub(super) async fn begin(image: Rc<Image>, name: &str, kind: &SnapshotKind) -> Result<Self> {
        let begun = async {
            for _ in 0..TRIES {
                if let Some(pending) = image.begin_snapshot(name, kind.clone()).await? {
                    return Ok(pending);
                }
            }
            Err(contended())
        };
        let begun: Result<PendingSnapshot> = begun.await;
        let pending = begun.map_err(|error| error.within(format_args!("image {}", image.name())))?;
        Ok(Self { image, pending, hold: None, kept: None })
    }

    /// Returns the image.
    pub fn image(&self) -> &Rc<Image> {
        &self.image
    }

    /// Blocks the writes to the image, and waits for those in flight.
    ///
    /// # Errors
    /// If the exclusive lock was lost.
    pub async fn hold(&mut self) -> Result<()> {
        if self.hold.is_none() {
            self.kept = Some(self.image.keep_lock_briefly());
            self.hold = Some(self.image.shared().enter_alone(Extent::new(0, SIZE_MAX)).await?);
        }
        Ok(())
    }

    /// Creates the snapshot, of the image as it was when its writes were blocked, durably. Writes continue when this returns.
    ///
    /// # Errors
    /// `Busy` if another client has changed the image meanwhile; errors of the backend, after which the snapshot may exist.
    pub async fn create(mut self) -> Result<CreatedPart> {
        let shared = self.image.shared();
        let what = format!("a snapshot of image {}", shared.name());
        let created = async {
            let hold = match self.hold.take() {
                Some(hold) => hold,
                None => shared.enter_alone(Extent::new(0, SIZE_MAX)).await?,
            };
            let changed = || Error::new(ErrorKind::Busy, "another client has changed it meanwhile; try again");
            let info = self.pending.create(shared, hold).await?.ok_or_else(changed)?;
            let (pool, image) = (shared.images().pool_id(), shared.id().to_owned());
            Ok(CreatedPart(SnapshotPart { pool, image, snap: SnapId(info.id) }))
        };
        let created: Result<CreatedPart> = created.await;
        drop(self.kept);
        announce(shared, created.map_err(|error| error.within(what))).await
    }
}
