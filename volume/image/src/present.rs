//! Candidate objects of an image that may exist, found without a lookup of each possible one.
//!
//! Uses the object map for the head, or the listing of a backend that keeps names in order. With any other backend,
//! every object may exist.

use std::ops::Range;
use std::rc::Rc;

use forebay_block::{Extent, LocalFuture, Result, SnapId};
use forebay_reactor::{stand_back, yield_now};

use crate::objectmap::SCAN;
use crate::open_image::{ImageView, OpenImage};
use crate::window::{WALK_WINDOW, after_others, windowed};

/// Maximum number of objects found in one step, which bounds the delay of a host's request.
const STEP: usize = 64;
/// Objects of one step where each needs a lookup, which yields to other tasks anyway.
const UNKNOWN: u64 = 1024;

/// Maximum number of objects to look up one by one; for more, the candidates are searched first.
const LOOK_UP_MAX: usize = 8;

/// First objects of a range that may exist.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct PresentObjects {
    /// Object numbers, in order.
    pub(crate) objects: Vec<u64>,
    /// End of the searched range: objects before it that are not listed do not exist.
    pub(crate) upto: u64,
}

/// Finds the first objects of `range` that may exist at a view, for the head or a snapshot.
pub(crate) async fn find(shared: &OpenImage, view: ImageView, range: Range<u64>) -> Result<PresentObjects> {
    if range.is_empty() {
        return Ok(PresentObjects { objects: Vec::new(), upto: range.end });
    }
    let head = view.snap == SnapId::HEAD;
    if let Some(map) = shared.map().filter(|map| head && map.is_valid()) {
        let scanned = range.start..range.end.min(range.start + SCAN as u64);
        return Ok(first(scanned.clone().filter(|&object| map.may_exist(object)), scanned.end));
    }
    let names = shared.layout().name(range.start)..shared.layout().name(range.end);
    let Some(listed) = shared.data().list_between(names, STEP) else { return Ok(unknown(range)) };
    let names = listed.await?;
    let Some(mut objects) = names.iter().map(|name| shared.layout().number(name)).collect::<Option<Vec<u64>>>() else {
        // A foreign name: its position in the order tells nothing.
        return Ok(unknown(range));
    };
    objects.dedup();
    let upto = match objects.last() {
        Some(last) if names.len() == STEP => last + 1,
        _ => range.end,
    };
    Ok(PresentObjects { objects, upto })
}

/// Returns the first `UNKNOWN` objects of a range, all as candidates.
fn unknown(range: Range<u64>) -> PresentObjects {
    let upto = range.end.min(range.start + UNKNOWN);
    PresentObjects { objects: (range.start..upto).collect(), upto }
}

fn first(mut objects: impl Iterator<Item = u64>, end: u64) -> PresentObjects {
    let found: Vec<u64> = objects.by_ref().take(STEP).collect();
    let upto = match found.last() {
        Some(last) if found.len() == STEP => last + 1,
        _ => end,
    };
    PresentObjects { objects: found, upto }
}

/// Calls `each` for every object of `range` that may exist, [`WALK_WINDOW`] at once. Calls `done` with each result
/// and the number of objects of the range processed, and after each step with that number alone. Yields to other
/// tasks between objects and between steps.
pub(crate) async fn walk<T: 'static>(
    shared: &Rc<OpenImage>,
    view: ImageView,
    range: Range<u64>,
    each: impl Fn(u64) -> LocalFuture<Result<T>>,
    mut done: impl FnMut(u64, Option<T>),
) -> Result<()> {
    let mut at = range.start;
    while at < range.end {
        let found = find(shared, view, at..range.end).await?;
        let mut objects = found.objects.into_iter();
        let mut passed = at - range.start;
        let each_done = |_, value| {
            passed += 1;
            done(passed, Some(value));
        };
        windowed(WALK_WINDOW, || objects.next().map(|object| after_others(each(object))), each_done).await?;
        at = found.upto;
        if passed < at - range.start {
            done(at - range.start, None);
        }
        yield_now().await;
        stand_back().await;
    }
    Ok(())
}

/// Set of objects that may exist.
pub(crate) enum Present {
    All,
    /// Object numbers, in order.
    These(Vec<u64>),
}

impl Present {
    /// Returns whether an object may be there.
    pub(crate) fn may_have(&self, object: u64) -> bool {
        match self {
            Present::All => true,
            Present::These(objects) => objects.binary_search(&object).is_ok(),
        }
    }

    /// Finds the objects of `extent` that may exist, where that is cheaper than a lookup of each.
    pub(crate) async fn within(shared: &OpenImage, view: ImageView, extent: Extent) -> Result<Self> {
        if shared.layout().pieces(extent).nth(LOOK_UP_MAX - 1).is_none() {
            return Ok(Present::All);
        }
        let mut range = shared.layout().objects_of(extent);
        let mut objects = Vec::new();
        while !range.is_empty() {
            let found = find(shared, view, range.clone()).await?;
            range.start = found.upto;
            objects.extend(found.objects);
        }
        Ok(Present::These(objects))
    }
}
