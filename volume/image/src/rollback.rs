//! Rollback of an image to one of its snapshots.

use std::rc::Rc;

use forebay_block::{Advice, Error, ErrorKind, Extent, LocalFuture, ObjectOp, Result, SnapId, Transaction};
use forebay_reactor::yield_now;

use crate::format::{ImageFeatures, ImageHeader, map_object};
use crate::image::Image;
use crate::images::SIZE_MAX;
use crate::info::ObjectProgress;
use crate::objectmap::{SCAN, load};
use crate::open_image::{ImageView, OpenImage};
use crate::present::walk;
use crate::read::read_piece;
use crate::resize::{resize_to, unless_absent};
use crate::snapshots::find;
use crate::window::{WALK_WINDOW, after_others, windowed};
use crate::wire::bitmap::{Bitmap, ObjectMapState};
use crate::wire::snapshot::Snapshot;

impl Image {
    /// Rolls the image back to a snapshot: its content and its size, durably.  The snapshot, and newer ones, stay.  Requests
    /// to the image wait meanwhile, and `progress` reports the number of objects.
    ///
    /// # Errors
    /// `NotFound`; `ReadOnly`; errors of the backend: part of the image is rolled back then, and rolling it back again
    /// completes that.
    pub async fn rollback(&self, name: &str, progress: impl FnMut(ObjectProgress)) -> Result<()> {
        let shared = self.shared();
        let rolled_back = self.rollback_found(|| find(shared, name), progress).await;
        rolled_back.map_err(|error| error.within(format_args!("rolling image {} back to {name}", shared.name())))
    }

    /// Rolls the image back to the snapshot of a number, of whatever kind, as [`rollback`](Self::rollback) does.
    ///
    /// # Errors
    /// As there.
    pub async fn rollback_number(&self, id: SnapId, progress: impl FnMut(ObjectProgress)) -> Result<()> {
        let shared = self.shared();
        let find = || {
            let found = shared.header().snapshots.iter().find(|snapshot| snapshot.id == id).cloned();
            found.ok_or_else(|| Error::new(ErrorKind::NotFound, format!("snapshot {}", id.0)))
        };
        let rolled_back = self.rollback_found(find, progress).await;
        rolled_back.map_err(|error| error.within(format_args!("rolling image {} back", shared.name())))
    }

    async fn rollback_found(
        &self,
        find: impl Fn() -> Result<Snapshot>,
        mut progress: impl FnMut(ObjectProgress),
    ) -> Result<()> {
        let shared = self.shared();
        let rolled_back = async {
            let _alone = self.begin_change().await?;
            shared.note_rollback();
            let snapshot = find()?;
            resize_to(shared, snapshot.size, &mut |_| {}).await?;
            let hold = shared.enter_alone(Extent::new(0, SIZE_MAX)).await?;
            let gone = || Error::new(ErrorKind::Busy, "another client has removed it meanwhile");
            let view = shared.view_of(snapshot.id).ok_or_else(gone)?;
            roll_back_objects(shared, &snapshot, view, &mut progress).await?;
            shared.data().flush().await?;
            drop(hold);
            Ok(())
        };
        let rolled_back: Result<()> = rolled_back.await;
        if let Some(watcher) = shared.watcher() {
            watcher.header_changed().await;
        }
        rolled_back
    }
}

async fn roll_back_objects(
    shared: &Rc<OpenImage>,
    snapshot: &Snapshot,
    view: ImageView,
    progress: &mut impl FnMut(ObjectProgress),
) -> Result<()> {
    let total = shared.layout().objects(view.size);
    let then = map_at(shared, snapshot).await?.map(Rc::new);
    let each =
        |object| -> LocalFuture<Result<()>> { Box::pin(roll_back_object(shared.clone(), object, view, then.clone())) };
    progress(ObjectProgress { done: 0, total });
    let own = shared.map().filter(|map| map.is_valid());
    match (&own, &then) {
        (Some(own), Some(then)) => {
            let there = |&object: &u64| own.may_exist(object) || then.get(object) != ObjectMapState::Nonexistent;
            for start in (0..total).step_by(SCAN) {
                let end = total.min(start + SCAN as u64);
                let mut objects = (start..end).filter(there);
                let mut done = start;
                let next = || objects.next().map(|object| after_others(each(object)));
                windowed(WALK_WINDOW, next, |_, ()| {
                    done += 1;
                    progress(ObjectProgress { done, total });
                })
                .await?;
                progress(ObjectProgress { done: end, total });
                yield_now().await;
            }
        }
        // Without both maps: all objects that exist or have existed, or any that may.
        _ => walk(shared, view, 0..total, each, |done, _| progress(ObjectProgress { done, total })).await?,
    }
    progress(ObjectProgress { done: total, total });
    Ok(())
}

/// Returns the object map of a snapshot, if it is valid.
async fn map_at(shared: &OpenImage, snapshot: &Snapshot) -> Result<Option<Bitmap>> {
    let flags = shared.header().features;
    if shared.map().is_none() || !flags.has(ImageFeatures::OBJECT_MAP) || snapshot.flags & ImageHeader::MAP_INVALID != 0
    {
        return Ok(None);
    }
    match load(shared.backend(), &map_object(shared.namespace(), shared.id(), Some(snapshot.id))).await {
        Ok(map) if map.objects() >= shared.layout().objects(snapshot.size) => Ok(Some(map)),
        Err(error) if !matches!(error.kind(), ErrorKind::NotFound | ErrorKind::Corrupt) => Err(error),
        _ => Ok(None),
    }
}

async fn roll_back_object(shared: Rc<OpenImage>, object: u64, view: ImageView, then: Option<Rc<Bitmap>>) -> Result<()> {
    if let Some(map) = shared.map() {
        // Marked before it exists.
        map.update(object, ObjectMapState::Exists, None).await?;
    }
    let op = match shared.overlap_in(view, object) > shared.overlap_in(shared.head(), object) {
        // The head does not see the parent any more where the snapshot does.
        true => {
            let piece = shared.layout().piece_of(object, view.size);
            ObjectOp::WriteFull { data: read_piece(&shared, view, piece, Advice::NONE).await? }
        }
        false => ObjectOp::Rollback { snap: view.snap },
    };
    let full = matches!(op, ObjectOp::WriteFull { .. });
    let name = shared.object_name(object);
    let transaction = Transaction { snapc: shared.snapc(), ..Transaction::of(op) };
    unless_absent(shared.change_data(object, transaction)).await?;
    let Some(map) = shared.map() else { return Ok(()) };
    let exists = full
        || match then {
            Some(then) => then.get(object) != ObjectMapState::Nonexistent,
            None => match shared.data().stat(&name, SnapId::HEAD).await {
                Ok(_) => true,
                Err(error) if error.kind() == ErrorKind::NotFound => false,
                Err(error) => return Err(error),
            },
        };
    if !exists {
        map.update(object, ObjectMapState::Nonexistent, None).await?;
    }
    Ok(())
}
