//! Read path: data in the log from the log, the rest from the backend.

use std::future::ready;
use std::rc::Rc;

use forebay_block::{BlockReply, BlockRequest, Buf, BufList, Extent, ExtentMap, ExtentState, LocalFuture, Result};
use forebay_reactor::spawn;

use crate::entries::{EntryKind, LogEntry, NOWHERE};
use crate::log::LogShared;
use crate::state::LogState;

/// Source of a part of a read.
enum Source {
    Ready(BufList),
    Work(LocalFuture<Result<BufList>>),
}

/// Returns the bytes of `part` that an entry wrote. A payload not in memory is pinned on the medium until the future
/// is dropped.
pub(crate) fn content(
    shared: &LogShared,
    state: &LogState,
    seq: u64,
    entry: &LogEntry,
    part: Extent,
) -> LocalFuture<Result<BufList>> {
    match source(shared, state, seq, entry, part) {
        Source::Ready(data) => Box::pin(ready(Ok(data))),
        Source::Work(work) => work,
    }
}

fn source(shared: &LogShared, state: &LogState, seq: u64, entry: &LogEntry, part: Extent) -> Source {
    if !entry.kind().has_payload() {
        return Source::Ready(BufList::zeroes(part.len as usize));
    }
    if let Some(payload) = state.dirty.payload(seq) {
        return Source::Ready(shape(entry, part, payload.clone()));
    }
    debug_assert_ne!(entry.place, NOWHERE, "entry {seq} is neither on the medium nor in memory");
    Source::Work(content_of(entry, part, payload(shared, seq, entry, shared.medium.read(entry))))
}

/// Returns the payload of an entry from a read of what its medium has stored.
pub(crate) fn payload(
    shared: &LogShared,
    seq: u64,
    entry: &LogEntry,
    read: LocalFuture<Result<Buf>>,
) -> LocalFuture<Result<Buf>> {
    let Some(cipher) = shared.cipher.clone() else { return read };
    let len = entry.payload_len() as usize;
    Box::pin(async move { cipher.open(seq, &read.await?, len) })
}

/// Extracts the bytes of `part` from an entry's payload.
fn shape(entry: &LogEntry, part: Extent, payload: BufList) -> BufList {
    let extent = entry.extent();
    match entry.kind() {
        EntryKind::Same => BufList::repeated(&payload.to_vec(), part.offset - extent.offset, part.len as usize),
        _ => payload.slice((part.offset - extent.offset) as usize..(part.end() - extent.offset) as usize),
    }
}

/// Returns the bytes of `part` that an entry wrote, from a read of its payload.
pub(crate) fn content_of(
    entry: &LogEntry,
    part: Extent,
    read: LocalFuture<Result<Buf>>,
) -> LocalFuture<Result<BufList>> {
    let entry = *entry;
    Box::pin(async move { Ok(shape(&entry, part, read.await?.into())) })
}

/// Returns whether the entry's payload is on the medium only.
pub(crate) fn must_be_read(state: &LogState, seq: u64, entry: &LogEntry) -> bool {
    entry.kind().has_payload() && state.dirty.payload(seq).is_none()
}

/// Read that includes the backend: it is repeated if a part of its range is written in the meantime.
struct MixedRead {
    id: u64,
    extent: Extent,
    stale: bool,
}

/// Reads in flight that include the backend.
///
/// Invariant: a read that overlaps any change between its begin and its end is stale.
#[derive(Default)]
pub(crate) struct MixedReads {
    reads: Vec<MixedRead>,
    next: u64,
}

impl MixedReads {
    fn begin(&mut self, extent: Extent) -> u64 {
        self.next += 1;
        self.reads.push(MixedRead { id: self.next, extent, stale: false });
        self.next
    }

    fn end(&mut self, id: u64) {
        self.reads.retain(|read| read.id != id);
    }

    fn is_stale(&self, id: u64) -> bool {
        self.reads.iter().any(|read| read.id == id && read.stale)
    }

    /// Marks a range as changed: overlapping reads are repeated.
    pub(crate) fn mark_stale(&mut self, extent: Extent) {
        for read in &mut self.reads {
            read.stale |= read.extent.overlaps(extent);
        }
    }
}

/// Guard that unregisters a read that includes the backend.
struct Watched {
    shared: Rc<LogShared>,
    id: u64,
}

impl Watched {
    fn is_stale(&self) -> bool {
        self.shared.state.borrow().reads.is_stale(self.id)
    }
}

impl Drop for Watched {
    fn drop(&mut self) {
        self.shared.state.borrow_mut().reads.end(self.id);
    }
}

/// Number of stale attempts after which a read locks its range against writes.
const OVERTAKEN_MAX: u32 = 4;

/// Reads a range within the volume.
pub(crate) fn read(shared: Rc<LogShared>, extent: Extent) -> LocalFuture<Result<BlockReply>> {
    Box::pin(async move {
        let mut overtaken = 0;
        loop {
            let _range = match overtaken >= OVERTAKEN_MAX {
                true => Some(shared.ranges.lock(extent).await),
                false => None,
            };
            // Nothing is awaited between the permission and the look into the log.
            if let Some(permitted) = shared.owner.permit_read() {
                permitted.await?;
            }
            if let Some(error) = shared.state.borrow().life.failure() {
                return Err(error.clone());
            }
            let (parts, watched) = begin(&shared, extent);
            let data = gather(parts).await?;
            if !watched.is_some_and(|watched| watched.is_stale()) {
                return Ok(BlockReply::Data(data));
            }
            overtaken += 1;
        }
    })
}

/// Starts the parts of a read, in order.
fn begin(shared: &Rc<LogShared>, extent: Extent) -> (Vec<Source>, Option<Watched>) {
    let mut state = shared.state.borrow_mut();
    let mut parts = Vec::new();
    let (mut hits, mut misses) = (0, Vec::new());
    let mut at = extent.offset;
    {
        let state = &*state;
        for (part, seq) in state.dirty.overlaps(extent) {
            if part.offset > at {
                misses.push((parts.len(), Extent::new(at, part.offset - at)));
                parts.push(Source::Ready(BufList::new()));
            }
            if let Some(entry) = state.dirty.get(seq) {
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
    state.counters.read(hits, extent.len - hits);
    // A concurrently written block may reach the backend in parts, visible to a read from there.
    let watched = (!misses.is_empty()).then(|| {
        let id = state.reads.begin(extent);
        Watched { shared: shared.clone(), id }
    });
    drop(state);
    for (index, miss) in misses {
        let read = shared.inner.submit(BlockRequest::Read(miss));
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
