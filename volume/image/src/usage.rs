//! Space usage as counted by `rbd du`: the whole objects that an image and each of its snapshots have of their own.
//!
//! An object belongs to a snapshot, or to the head, if it exists and differs from its state at the preceding
//! snapshot. Object maps with fast-diff record that for all objects at once; without them each object is queried for
//! its clones.

use std::rc::Rc;

use forebay_block::{ErrorKind, Result, SnapId, SnapSet};
use forebay_reactor::yield_now;

use crate::format::{ImageFeatures, ImageHeader, map_object};
use crate::image::{Image, SpaceUsage};
use crate::info::{ObjectProgress, SnapshotInfo};
use crate::objectmap::{SCAN, load};
use crate::open_image::OpenImage;
use crate::window::{WALK_WINDOW, windowed};
use crate::wire::bitmap::{Bitmap, ObjectMapState};

/// Usage of an image or of a snapshot, in whole objects.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SnapshotUsage {
    /// Snapshot; `None` for the head.
    pub snapshot: Option<SnapshotInfo>,
    /// Size, and the space not shared with the preceding snapshot.
    pub usage: SpaceUsage,
}

/// Snapshot or head.
struct Step {
    snapshot: Option<SnapshotInfo>,
    snap: SnapId,
    size: u64,
    /// Flags of its object map.
    flags: u64,
    /// Set if reported; snapshots of groups and the like are only counted along.
    shown: bool,
}

impl Image {
    /// Returns the usage of each snapshot, from the oldest, and finally of the head, in whole objects; for a clone,
    /// without its parent's data. `progress` reports the number of objects examined.
    ///
    /// # Errors
    /// `NotFound` if the image has been removed; errors of the backend.
    pub async fn usage_by_snapshot(&self, mut progress: impl FnMut(ObjectProgress)) -> Result<Vec<SnapshotUsage>> {
        let shared = self.shared();
        shared.check_there()?;
        let header = shared.header();
        let steps = steps(&header, shared.size());
        let used = match used_of_maps(shared, &header, &steps, &mut progress).await? {
            Some(used) => used,
            None => used_of_objects(shared, &steps, &mut progress).await?,
        };
        let shown = steps.into_iter().zip(used).filter(|(step, _)| step.shown);
        Ok(shown
            .map(|(step, used)| SnapshotUsage {
                snapshot: step.snapshot,
                usage: SpaceUsage { provisioned: step.size, used },
            })
            .collect())
    }
}

fn steps(header: &ImageHeader, size: u64) -> Vec<Step> {
    let snapshots = header.snapshots.iter().rev().map(|snapshot| Step {
        snapshot: Some(snapshot.info()),
        snap: snapshot.id,
        size: snapshot.size,
        flags: snapshot.flags,
        shown: snapshot.is_user(),
    });
    let head = Step { snapshot: None, snap: SnapId::HEAD, size, flags: header.flags, shown: true };
    snapshots.chain([head]).collect()
}

/// Returns the bytes of an object within a size.
fn bytes_within(shared: &OpenImage, object: u64, size: u64) -> u64 {
    shared.layout().bytes_below(object, size)
}

/// Counts the bytes of each step from the object maps; `None` if they are missing, invalid or lack fast-diff.
async fn used_of_maps(
    shared: &Rc<OpenImage>,
    header: &ImageHeader,
    steps: &[Step],
    progress: &mut impl FnMut(ObjectProgress),
) -> Result<Option<Vec<u64>>> {
    let invalid = ImageHeader::MAP_INVALID | ImageHeader::FAST_DIFF_INVALID;
    if !header.features.has(ImageFeatures::FAST_DIFF) || steps.iter().any(|step| step.flags & invalid != 0) {
        return Ok(None);
    }
    let total = steps.iter().map(|step| shared.layout().objects(step.size)).sum();
    let mut done = 0;
    let mut before: Option<Bitmap> = None;
    // Objects changed since the last reported step.
    let mut changed = Bitmap::default();
    let mut all = Vec::with_capacity(steps.len());
    for step in steps {
        let objects = shared.layout().objects(step.size);
        let snap = (step.snap != SnapId::HEAD).then_some(step.snap);
        let map = match load(shared.backend(), &map_object(shared.namespace(), shared.id(), snap)).await {
            Ok(map) if map.objects() >= objects => map,
            Ok(_) => return Ok(None),
            Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::Corrupt) => return Ok(None),
            Err(error) => return Err(error),
        };
        changed.resize(objects.max(changed.objects()));
        let mut used = 0;
        for object in 0..objects {
            let state = map.get(object);
            let was_there = before
                .as_ref()
                .is_some_and(|before| object < before.objects() && before.get(object) != ObjectMapState::Nonexistent);
            if state != ObjectMapState::Nonexistent {
                if state != ObjectMapState::Clean || !was_there {
                    changed.set(object, ObjectMapState::Exists);
                }
                if changed.get(object) == ObjectMapState::Exists {
                    used += bytes_within(shared, object, step.size);
                }
            }
            if object % SCAN as u64 == 0 {
                progress(ObjectProgress { done: done + object, total });
                yield_now().await;
            }
        }
        done += objects;
        progress(ObjectProgress { done, total });
        all.push(used);
        if step.shown {
            changed = Bitmap::default();
        }
        before = Some(map);
    }
    Ok(Some(all))
}

/// Counts the bytes of each step object by object.
async fn used_of_objects(
    shared: &Rc<OpenImage>,
    steps: &[Step],
    progress: &mut impl FnMut(ObjectProgress),
) -> Result<Vec<u64>> {
    let total = steps.iter().map(|step| shared.layout().objects(step.size)).max().unwrap_or(0);
    let mut used = vec![0; steps.len()];
    let mut objects = 0..total;
    let next = || {
        let object = objects.next()?;
        let asked = shared.data().snap_set(&shared.object_name(object));
        let found: forebay_block::LocalFuture<Result<(u64, SnapSet)>> = Box::pin(async move {
            match asked.await {
                Ok(set) => Ok((object, set)),
                Err(error) if error.kind() == ErrorKind::NotFound => Ok((object, SnapSet::default())),
                Err(error) => Err(error),
            }
        });
        Some(found)
    };
    let mut done = 0;
    windowed(WALK_WINDOW, next, |_, (object, set)| {
        let mut before = None;
        for (step, used) in steps.iter().zip(&mut used) {
            let now = version_at(&set, step.snap);
            if now.is_some() && now != before {
                *used += bytes_within(shared, object, step.size);
            }
            if step.shown {
                before = now;
            }
        }
        done += 1;
        progress(ObjectProgress { done, total });
    })
    .await?;
    Ok(used)
}

/// Returns the state of an object that a snapshot sees, or the head; `None` if it sees none.
pub(crate) fn version_at(set: &SnapSet, snap: SnapId) -> Option<SnapId> {
    if snap == SnapId::HEAD || snap.0 > set.seq {
        // No write since that snapshot.
        return set.head_exists.then_some(SnapId::HEAD);
    }
    let clone = set.clones.iter().find(|clone| clone.id >= snap)?;
    clone.snaps.contains(&snap).then_some(clone.id)
}

#[cfg(test)]
mod tests {
    use forebay_block::SnapClone;

    use super::*;

    #[test]
    fn what_a_snapshot_sees_of_an_object() {
        let clone = |id, snaps: &[u64]| SnapClone {
            id: SnapId(id),
            snaps: snaps.iter().map(|&snap| SnapId(snap)).collect(),
            size: 1,
        };
        // Written, preserved for 4 and 3, written after 4; created again after 7.
        let set = SnapSet { seq: 7, head_exists: true, clones: vec![clone(4, &[4, 3]), clone(6, &[6])] };
        let seen = |snap| version_at(&set, snap).map(|version| version.0);
        assert_eq!([3, 4, 6].map(|snap| seen(SnapId(snap))), [Some(4), Some(4), Some(6)]);
        assert_eq!(seen(SnapId(2)), None, "it was not there");
        assert_eq!(seen(SnapId(5)), None, "nor then");
        assert_eq!(seen(SnapId(7)), None, "removed before 7");
        assert_eq!([SnapId(8), SnapId::HEAD].map(seen), [Some(SnapId::HEAD.0); 2]);
        let gone = SnapSet { head_exists: false, ..set };
        assert_eq!(version_at(&gone, SnapId::HEAD), None);
        assert_eq!(version_at(&SnapSet::default(), SnapId(3)), None);
    }
}
