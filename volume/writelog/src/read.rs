//! Read path: data in the log from the log, the rest from the backend.

use std::future::ready;
use std::rc::Rc;

use forebay_block::{Buf, BufList, Extent, ExtentMap, ExtentState, LocalFuture, Reply, Request, Result};
use forebay_reactor::spawn;

use crate::entries::{Entry, Kind, NOWHERE};
use crate::expand::expand;
use crate::log::Shared;
use crate::state::{MixedRead, State};

/// Source of a part of a read.
enum Source {
    Ready(BufList),
    Work(LocalFuture<Result<BufList>>),
}

/// Returns the bytes of `part` that an entry wrote. A payload not in memory is pinned on the medium until the future
/// is dropped.
pub(crate) fn content(
    shared: &Shared,
    state: &State,
    seq: u64,
    entry: &Entry,
    part: Extent,
) -> LocalFuture<Result<BufList>> {
    match source(shared, state, seq, entry, part) {
        Source::Ready(data) => Box::pin(ready(Ok(data))),
        Source::Work(work) => work,
    }
}

fn source(shared: &Shared, state: &State, seq: u64, entry: &Entry, part: Extent) -> Source {
    if !entry.kind().has_payload() {
        return Source::Ready(BufList::zeroes(part.len as usize));
    }
    if let Some(payload) = state.recent.get(seq) {
        return Source::Ready(shape(entry, part, payload.clone()));
    }
    debug_assert_ne!(entry.place, NOWHERE, "entry {seq} is neither on the medium nor in memory");
    Source::Work(content_of(entry, part, shared.medium.read(entry)))
}

/// Extracts the bytes of `part` from an entry's payload.
fn shape(entry: &Entry, part: Extent, payload: BufList) -> BufList {
    let extent = entry.extent();
    match entry.kind() {
        Kind::Same => expand(&payload.to_vec(), part.offset - extent.offset, part.len as usize),
        _ => payload.slice((part.offset - extent.offset) as usize..(part.end() - extent.offset) as usize),
    }
}

/// Returns the bytes of `part` that an entry wrote, from a read of its payload.
pub(crate) fn content_of(entry: &Entry, part: Extent, read: LocalFuture<Result<Buf>>) -> LocalFuture<Result<BufList>> {
    let entry = *entry;
    Box::pin(async move { Ok(shape(&entry, part, read.await?.into())) })
}

/// Returns whether the entry's payload is on the medium only.
pub(crate) fn must_be_read(state: &State, seq: u64, entry: &Entry) -> bool {
    entry.kind().has_payload() && state.recent.get(seq).is_none()
}

/// Guard that unregisters a read that includes the backend.
struct Watched {
    shared: Rc<Shared>,
    id: u64,
}

impl Watched {
    fn is_stale(&self) -> bool {
        let state = self.shared.state.borrow();
        state.mixed_reads.iter().any(|(id, read)| *id == self.id && read.stale)
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        self.shared.state.borrow_mut().mixed_reads.retain(|(id, _)| *id != self.id);
    }
}

/// Number of stale attempts after which a read locks its range against writes.
const OVERTAKEN_MAX: u32 = 4;

/// Reads a range within the volume.
pub(crate) fn read(shared: Rc<Shared>, extent: Extent) -> LocalFuture<Result<Reply>> {
    Box::pin(async move {
        let mut overtaken = 0;
        loop {
            let _range = match overtaken >= OVERTAKEN_MAX {
                true => Some(shared.ranges.lock(extent).await),
                false => None,
            };
            let (parts, watched) = begin(&shared, extent);
            let data = gather(parts).await?;
            if !watched.is_some_and(|watched| watched.is_stale()) {
                return Ok(Reply::Data(data));
            }
            overtaken += 1;
        }
    })
}

/// Starts the parts of a read, in order.
fn begin(shared: &Rc<Shared>, extent: Extent) -> (Vec<Source>, Option<Watched>) {
    let mut state = shared.state.borrow_mut();
    let mut parts = Vec::new();
    let (mut hits, mut misses) = (0, Vec::new());
    let mut at = extent.offset;
    {
        let state = &*state;
        for segment in state.index.overlaps(extent) {
            if segment.start > at {
                misses.push((parts.len(), Extent::new(at, segment.start - at)));
                parts.push(Source::Ready(BufList::new()));
            }
            let part = Extent::new(segment.start, u64::from(segment.len));
            let seq = state.entries.seq_of(segment.entry);
            if let Some(entry) = state.entries.get(seq) {
                parts.push(source(shared, state, seq, entry, part));
            }
            hits += part.len;
            at = part.end();
        }
    }
    if at < extent.end() {
        misses.push((parts.len(), Extent::new(at, extent.end() - at)));
        parts.push(Source::Ready(BufList::new()));
    }
    state.stats.hit_bytes += hits;
    state.stats.miss_bytes += extent.len - hits;
    // A concurrently written block may reach the backend in parts, visible to a read from there.
    let watched = (!misses.is_empty()).then(|| {
        let id = state.next_read;
        state.next_read += 1;
        state.mixed_reads.push((id, MixedRead { extent, stale: false }));
        Watched { shared: shared.clone(), id }
    });
    drop(state);
    for (index, miss) in misses {
        let read = shared.inner.submit(Request::Read(miss));
        parts[index] = Source::Work(Box::pin(async move { Ok(read.await?.into_data()) }));
    }
    (parts, watched)
}

/// Waits for all parts, which run concurrently.
async fn gather(parts: Vec<Source>) -> Result<BufList> {
    let working = parts.iter().filter(|part| matches!(part, Source::Work(_))).count();
    let mut out = BufList::new();
    if working <= 1 {
        for part in parts {
            out.append(match part {
                Source::Ready(data) => data,
                Source::Work(work) => work.await?,
            });
        }
        return Ok(out);
    }
    let started: Vec<_> = parts
        .into_iter()
        .map(|part| match part {
            Source::Ready(data) => Err(data),
            Source::Work(work) => Ok(spawn(work)),
        })
        .collect();
    for part in started {
        out.append(match part {
            Err(data) => data,
            Ok(work) => work.await?,
        });
    }
    Ok(out)
}

/// Returns a map with the log's runs overlaid.
pub(crate) fn overlay(below: &ExtentMap, hits: &[(Extent, ExtentState)]) -> ExtentMap {
    let mut out = ExtentMap::new();
    let mut hits = hits.iter().copied().peekable();
    for run in below.runs() {
        let mut at = run.extent.offset;
        while at < run.extent.end() {
            while hits.next_if(|(hit, _)| hit.end() <= at).is_some() {}
            match hits.peek() {
                Some(&(hit, state)) if hit.offset <= at => {
                    let end = hit.end().min(run.extent.end());
                    out.push(at, end - at, state);
                    at = end;
                }
                next => {
                    let end = next.map_or(u64::MAX, |(hit, _)| hit.offset).min(run.extent.end());
                    out.push(at, end - at, run.state);
                    at = end;
                }
            }
        }
    }
    out
}
