//! Object maps compared with the objects, and rebuilt from them.
//!
//! A rebuild first stores a map in which every object may exist, which is never wrong, and marks the map as valid again,
//! but not what it says of changes. From then on the owner of the lock maintains it. Then the state of each object is
//! found and stored, with the object's range locked, and in the end the changes are marked as valid as well. So hosts
//! write meanwhile, the lock may pass to other clients, and an interrupted rebuild leaves a map that may be relied on.

use std::ops::Range;
use std::rc::Rc;

use forebay_block::{Error, ErrorKind, Extent, LocalFuture, Result, SnapId, SnapSet};

use crate::features::{INVALID, TRIES, contended, store};
use crate::format::{ImageFeatures, ImageHeader, map_object};
use crate::image::Image;
use crate::images::SIZE_MAX;
use crate::info::ObjectProgress;
use crate::objectmap::{ObjectMap, load, start_over_in_snapshot, update_in_snapshot};
use crate::open_image::OpenImage;
use crate::snapshots::find;
use crate::usage::version_at;
use crate::window::{WALK_WINDOW, windowed};
use crate::wire::bitmap::{Bitmap, ObjectMapState};

/// Objects whose range is locked at once.
const STEP: u64 = 128;
/// Wrong objects that are reported one by one.
const REPORTED_MAX: usize = 1000;

/// Result of comparing an object map with the objects.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct MapCheck {
    /// Objects compared.
    pub objects: u64,
    /// Objects whose state is marked wrongly, in a way that misleads.
    pub wrong: u64,
    /// The first of them, 1000 at most.
    pub first_wrong: Vec<WrongObject>,
    /// Set if the map is marked as valid after the check.
    pub valid: bool,
}

/// Object whose state is marked wrongly. States are those of the format: 0, it does not exist; 1, it exists; 2, it is being
/// removed; 3, it exists, unchanged since the snapshot before.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct WrongObject {
    /// Object name.
    pub name: String,
    /// State in the map.
    pub marked: u8,
    /// Actual state.
    pub actual: u8,
}

/// Head or snapshot whose object map is examined.
struct MapOwner {
    snap: SnapId,
    /// Next older snapshot.
    previous: Option<SnapId>,
    objects: u64,
    flags: u64,
    fast_diff: bool,
}

impl MapOwner {
    fn find(shared: &OpenImage, snapshot: Option<&str>) -> Result<Self> {
        let header = shared.header();
        if !header.features.has(ImageFeatures::OBJECT_MAP) {
            return Err(Error::new(ErrorKind::Invalid, "the feature object-map is not enabled"));
        }
        let (snap, size, flags) = match snapshot {
            Some(name) => find(shared, name).map(|snapshot| (snapshot.id, snapshot.size, snapshot.flags))?,
            None => (SnapId::HEAD, shared.size(), header.flags),
        };
        // Newest first.
        let previous = header.snapshots.iter().map(|other| other.id).find(|&other| other < snap);
        let fast_diff = header.features.has(ImageFeatures::FAST_DIFF);
        Ok(Self { snap, previous, objects: shared.layout().objects(size), flags, fast_diff })
    }

    fn is_valid(&self) -> bool {
        self.flags & ImageHeader::MAP_INVALID == 0
    }

    /// Returns the snapshot; `None` for the head.
    fn snapshot(&self) -> Option<SnapId> {
        (self.snap != SnapId::HEAD).then_some(self.snap)
    }

    /// Returns the state of an object with these clones.
    fn state(&self, set: &SnapSet) -> ObjectMapState {
        let seen = version_at(set, self.snap);
        match self.previous.filter(|_| self.fast_diff).and_then(|previous| version_at(set, previous)) {
            _ if seen.is_none() => ObjectMapState::Nonexistent,
            before if before == seen => ObjectMapState::Clean,
            _ => ObjectMapState::Exists,
        }
    }

    /// Returns the states of a range of objects, which the caller has locked.
    async fn states(&self, shared: &Rc<OpenImage>, range: Range<u64>) -> Result<Vec<ObjectMapState>> {
        let mut states = vec![ObjectMapState::Nonexistent; (range.end - range.start) as usize];
        let mut objects = range;
        let next = || {
            let asked = shared.data().snap_set(&shared.object_name(objects.next()?));
            let found: LocalFuture<Result<SnapSet>> = Box::pin(async move {
                match asked.await {
                    Err(error) if error.kind() == ErrorKind::NotFound => Ok(SnapSet::default()),
                    other => other,
                }
            });
            Some(found)
        };
        windowed(WALK_WINDOW, next, |at, set| states[at] = self.state(&set)).await?;
        Ok(states)
    }

    /// Stores flags of this map; `false` if another client has changed the header meanwhile.
    async fn set_flags(&self, shared: &OpenImage, change: impl Fn(u64) -> u64) -> Result<bool> {
        let features = shared.header().features;
        let own = self.snapshot();
        let flags = |snap, flags| if snap == own { change(flags) } else { flags };
        store(shared, features, features, Vec::new(), &flags).await
    }
}

/// Returns whether a marked state misleads: that an object may exist which does not is no error.
fn misleads(marked: ObjectMapState, actual: ObjectMapState) -> bool {
    let may_exist = matches!(marked, ObjectMapState::Exists | ObjectMapState::Clean);
    marked != actual && !(may_exist && actual == ObjectMapState::Nonexistent)
}

/// Returns the map of the head, which is there while this client holds the lock.
fn head_map(shared: &OpenImage) -> Result<Rc<ObjectMap>> {
    shared.map().ok_or_else(|| Error::new(ErrorKind::Busy, "the exclusive lock was lost; try again"))
}

impl Image {
    /// Compares the object map of the head, or of a snapshot, with the objects, and marks it as invalid if it misleads.
    ///
    /// # Errors
    /// `Invalid` if the image has no object map; `NotFound` if there is no such snapshot; `ReadOnly`; `Busy` if another
    /// client keeps the image's lock; errors of the backend.
    pub async fn check_object_map(
        &self,
        snapshot: Option<&str>,
        mut progress: impl FnMut(ObjectProgress),
    ) -> Result<MapCheck> {
        let shared = self.shared();
        let what = format!("checking the object map of image {}", shared.name());
        let checked = async {
            let mut check = MapCheck::default();
            let mut stored = None;
            loop {
                let _alone = self.begin_change().await?;
                let owner = MapOwner::find(shared, snapshot)?;
                if check.objects >= owner.objects {
                    break;
                }
                let range = check.objects..owner.objects.min(check.objects + STEP);
                let _hold = shared.enter_alone(shared.layout().span_of(&range)).await?;
                let states = owner.states(shared, range.clone()).await?;
                for (object, actual) in range.clone().zip(states) {
                    let marked = marked(shared, &owner, &mut stored, object, actual).await?;
                    if misleads(marked, actual) {
                        check.wrong += 1;
                        if check.first_wrong.len() < REPORTED_MAX {
                            let name = shared.object_name(object).name().to_owned();
                            check.first_wrong.push(WrongObject { name, marked: marked as u8, actual: actual as u8 });
                        }
                    }
                }
                check.objects = range.end;
                progress(ObjectProgress { done: range.end, total: owner.objects });
            }
            for _ in 0..TRIES {
                let _alone = self.begin_change().await?;
                let owner = MapOwner::find(shared, snapshot)?;
                check.valid = owner.is_valid() && check.wrong == 0;
                if check.valid || owner.flags & INVALID == INVALID {
                    return Ok(check);
                }
                let invalid = if owner.fast_diff { INVALID } else { ImageHeader::MAP_INVALID };
                if owner.set_flags(shared, |flags| flags | invalid).await? {
                    if let Some(map) = shared.map().filter(|_| owner.snapshot().is_none()) {
                        map.set_flags(invalid);
                    }
                    return Ok(check);
                }
            }
            Err(contended())
        };
        let checked: Result<MapCheck> = checked.await;
        if let Some(watcher) = shared.watcher().filter(|_| checked.as_ref().is_ok_and(|check| check.wrong > 0)) {
            watcher.header_changed().await;
        }
        checked.map_err(|error| error.within(what))
    }

    /// Rebuilds the object map of the head, or of a snapshot, from the objects, and marks it as valid. The image may be
    /// written meanwhile.
    ///
    /// # Errors
    /// As [`check_object_map`](Self::check_object_map); the map may be relied on then, if it is marked as valid.
    pub async fn rebuild_object_map(
        &self,
        snapshot: Option<&str>,
        mut progress: impl FnMut(ObjectProgress),
    ) -> Result<()> {
        let shared = self.shared();
        let what = format!("rebuilding the object map of image {}", shared.name());
        let rebuilt = async {
            for _ in 0..TRIES {
                if self.start_over(snapshot).await? && self.refine(snapshot, &mut progress).await? {
                    return Ok(());
                }
            }
            Err(contended())
        };
        let rebuilt: Result<()> = rebuilt.await;
        if let Some(watcher) = shared.watcher() {
            watcher.header_changed().await;
        }
        rebuilt.map_err(|error| error.within(what))
    }

    /// Stores a map in which every object may exist, and marks it as valid but for the changes; `false` if another client
    /// has changed the header meanwhile.
    async fn start_over(&self, snapshot: Option<&str>) -> Result<bool> {
        let shared = self.shared();
        let _alone = self.begin_change().await?;
        let owner = MapOwner::find(shared, snapshot)?;
        let _hold = shared.enter_alone(Extent::new(0, SIZE_MAX)).await?;
        let head = match owner.snapshot() {
            Some(snap) => {
                let map = map_object(shared.namespace(), shared.id(), Some(snap));
                start_over_in_snapshot(shared.backend(), &map, owner.objects).await?;
                None
            }
            None => {
                let map = head_map(shared)?;
                map.start_over(owner.objects).await?;
                Some(map)
            }
        };
        let flags = if owner.fast_diff { ImageHeader::FAST_DIFF_INVALID } else { 0 };
        if !owner.set_flags(shared, |old| old & !INVALID | flags).await? {
            return Ok(false);
        }
        if let Some(map) = head {
            map.set_valid();
        }
        Ok(true)
    }

    /// Stores the state of each object, and marks the changes as valid; `false` if another client has marked the map as
    /// invalid meanwhile.
    async fn refine(&self, snapshot: Option<&str>, progress: &mut impl FnMut(ObjectProgress)) -> Result<bool> {
        let shared = self.shared();
        let mut done = 0;
        loop {
            let _alone = self.begin_change().await?;
            let owner = MapOwner::find(shared, snapshot)?;
            if !owner.is_valid() {
                return Ok(false);
            }
            if done >= owner.objects {
                return owner.set_flags(shared, |flags| flags & !INVALID).await;
            }
            let range = done..owner.objects.min(done + STEP);
            let _hold = shared.enter_alone(shared.layout().span_of(&range)).await?;
            let states = owner.states(shared, range.clone()).await?;
            for (run, state) in runs(range.start, &states) {
                match owner.snapshot() {
                    None => head_map(shared)?.update_range(run, state, None).await?,
                    Some(snap) => {
                        let map = map_object(shared.namespace(), shared.id(), Some(snap));
                        update_in_snapshot(shared.backend(), &map, run, state).await?;
                    }
                }
            }
            done = range.end;
            progress(ObjectProgress { done, total: owner.objects });
        }
    }
}

/// Returns the state of an object as it is marked. The map of a snapshot is read again if it seems to be wrong: the object
/// may have been copied up since.
async fn marked(
    shared: &OpenImage,
    owner: &MapOwner,
    stored: &mut Option<Bitmap>,
    object: u64,
    actual: ObjectMapState,
) -> Result<ObjectMapState> {
    let Some(snap) = owner.snapshot() else { return Ok(head_map(shared)?.state(object)) };
    if let Some(state) = stored.as_ref().map(|map| map.get(object)).filter(|&state| !misleads(state, actual)) {
        return Ok(state);
    }
    let read = match load(shared.backend(), &map_object(shared.namespace(), shared.id(), Some(snap))).await {
        Ok(map) => map,
        // One that is missing or damaged marks nothing.
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::Corrupt) => {
            let mut none = Bitmap::default();
            none.resize(owner.objects);
            none
        }
        Err(error) => return Err(error),
    };
    Ok(stored.insert(read).get(object))
}

/// Returns the runs of equal states of the objects from `first` on.
fn runs(first: u64, states: &[ObjectMapState]) -> Vec<(Range<u64>, ObjectMapState)> {
    let mut runs: Vec<(Range<u64>, ObjectMapState)> = Vec::new();
    for (object, &state) in (first..).zip(states) {
        match runs.last_mut() {
            Some((run, last)) if *last == state => run.end = object + 1,
            _ => runs.push((object..object + 1, state)),
        }
    }
    runs
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_misleads() {
        use ObjectMapState::{Clean, Exists, Nonexistent, Pending};
        for (marked, actual) in [
            (Nonexistent, Exists),
            (Nonexistent, Clean),
            (Exists, Clean),
            (Clean, Exists),
            (Pending, Exists),
            (Pending, Nonexistent),
        ] {
            assert!(misleads(marked, actual), "{marked:?} {actual:?}");
        }
        for (marked, actual) in
            [(Exists, Exists), (Nonexistent, Nonexistent), (Exists, Nonexistent), (Clean, Nonexistent)]
        {
            assert!(!misleads(marked, actual), "{marked:?} {actual:?}");
        }
    }

    #[test]
    fn states_in_runs() {
        use ObjectMapState::{Clean, Exists, Nonexistent};
        let found = runs(7, &[Exists, Exists, Clean, Nonexistent, Nonexistent, Exists]);
        assert_eq!(found, [(7..9, Exists), (9..10, Clean), (10..12, Nonexistent), (12..13, Exists)]);
        assert_eq!(runs(0, &[]), []);
    }
}
