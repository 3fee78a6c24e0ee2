//! A plain model of one object: its head, its keys, the states kept for snapshots, and what a transaction does to
//! them.  Written from the contract of [`ObjectBackend`](forebay_block::ObjectBackend) alone.

use std::collections::BTreeMap;
use std::rc::Rc;

use forebay_block::{BufList, ErrorKind, Extent, ObjectOp, SnapId, SparseData, Transaction};

use crate::pages::{PageMap, Piece};

type Keys = BTreeMap<Vec<u8>, Vec<u8>>;

/// Bytes and keys.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Body {
    size: u64,
    pages: Rc<PageMap>,
    keys: Rc<Keys>,
    /// The object's version, once it has been told; a kept state has none.
    version: Option<u64>,
}

impl Body {
    /// Returns the size in bytes.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// The keys and their values.
    pub fn keys(&self) -> &Keys {
        &self.keys
    }

    /// The object's version, if a transaction or a recovery has told it.
    pub fn version(&self) -> Option<u64> {
        self.version
    }

    /// The bytes of `extent`, zeroes past the end.
    pub fn bytes(&self, extent: Extent) -> Vec<u8> {
        let mut out = vec![0; extent.len as usize];
        self.pages.read(extent.offset, &mut out);
        out
    }

    /// Returns true if `data` is a permitted result of a read of `extent`.
    pub fn answers(&self, extent: Extent, data: &SparseData) -> bool {
        let end = extent.end().min(self.size);
        let mut at = extent.offset;
        let mut gaps = Vec::new();
        for (offset, run) in &data.runs {
            let stop = offset.saturating_add(run.len() as u64);
            if *offset < at
                || stop > end
                || run.is_empty()
                || *run != self.bytes(Extent::new(*offset, run.len() as u64))[..]
            {
                return false;
            }
            gaps.push(at..*offset);
            at = stop;
        }
        gaps.push(at..end.max(at));
        gaps.into_iter().all(|gap| forebay_block::is_zero(&self.bytes(Extent::new(gap.start, gap.end - gap.start))))
    }

    fn write(&mut self, offset: u64, data: &BufList) {
        let pages = Rc::make_mut(&mut self.pages);
        Piece::cut(offset, data).iter().for_each(|piece| pages.write(piece));
        self.size = self.size.max(offset + data.len() as u64);
    }

    fn zero(&mut self, extent: Extent) {
        let end = extent.end().min(self.size);
        if extent.offset < end {
            Rc::make_mut(&mut self.pages).zero(extent.offset..end);
        }
    }

    fn truncate(&mut self, size: u64) {
        self.zero(Extent::new(size.min(self.size), self.size - size.min(self.size)));
        self.size = size;
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
struct Kept {
    id: u64,
    snaps: Vec<SnapId>,
    body: Body,
}

/// A state of an object.  Cheap to clone.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ObjectState {
    head: Option<Body>,
    seq: u64,
    kept: Rc<Vec<Kept>>,
}

/// Observed state of an object, after everything of it was read.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Observed {
    /// The head's bytes and keys; `None` when it is not there.
    pub head: Option<(Vec<u8>, Keys)>,
    /// The head's version.
    pub version: Option<u64>,
    /// The bytes at snapshots; `None` when it was not there.
    pub snaps: Vec<(SnapId, Option<Vec<u8>>)>,
}

impl ObjectState {
    /// The head, if it is there.
    pub fn head(&self) -> Option<&Body> {
        self.head.as_ref()
    }

    /// Returns the object at a snapshot (or at the head): the head, if no write has seen the snapshot yet; else the
    /// first kept clone that is no older, if it covers the snapshot.
    pub fn at(&self, snap: SnapId) -> Option<&Body> {
        if snap == SnapId::HEAD || snap.0 > self.seq {
            return self.head.as_ref();
        }
        let kept = self.kept.iter().find(|kept| kept.id >= snap.0)?;
        kept.snaps.contains(&snap).then_some(&kept.body)
    }

    /// The object could have been read so.
    pub fn fits(&self, observed: &Observed) -> bool {
        let whole = |body: &Body| body.bytes(Extent::new(0, body.size));
        let head_fits = match (&self.head, &observed.head) {
            (Some(body), Some((bytes, keys))) => {
                let version_fits =
                    body.version.is_none() || observed.version.is_none() || body.version == observed.version;
                version_fits && whole(body) == *bytes && *body.keys == *keys
            }
            (None, None) => true,
            _ => false,
        };
        head_fits && observed.snaps.iter().all(|(snap, bytes)| self.at(*snap).map(whole) == *bytes)
    }

    /// Returns the same state with its version told, or not known.
    pub fn with_version(&self, version: Option<u64>) -> Self {
        let mut told = self.clone();
        if let Some(head) = &mut told.head {
            head.version = version;
        }
        told
    }

    /// Returns whether a transaction may be refused by a guard on a version that is not known yet; then
    /// [`apply`](Self::apply) takes it that the guard holds.
    pub fn may_refuse_version(&self, transaction: &Transaction) -> bool {
        let guarded = transaction.ops.iter().any(|op| matches!(op, ObjectOp::AssertVersion(_)));
        guarded && self.head.as_ref().is_some_and(|head| head.version.is_none())
    }

    /// The state after a transaction; or why it is refused, and nothing changed.  Its version is not known if it has
    /// changed.
    pub fn apply(&self, transaction: &Transaction) -> Result<ObjectState, ErrorKind> {
        let mut after = self.clone();
        let changes = transaction.ops.iter().any(|op| !is_guard(op));
        if let Some(snapc) = transaction.snapc.as_ref().filter(|_| changes) {
            let snaps: Vec<SnapId> = snapc.snaps.iter().copied().filter(|snap| snap.0 > self.seq).collect();
            if let (Some(head), false) = (&self.head, snaps.is_empty()) {
                Rc::make_mut(&mut after.kept).push(Kept {
                    id: snapc.seq,
                    snaps,
                    body: Body { version: None, ..head.clone() },
                });
            }
            after.seq = after.seq.max(snapc.seq);
        }
        for op in &transaction.ops {
            self.step(&mut after.head, op)?;
        }
        if changes && let Some(head) = &mut after.head {
            head.version = None;
        }
        Ok(after)
    }

    fn step(&self, head: &mut Option<Body>, op: &ObjectOp) -> Result<(), ErrorKind> {
        match op {
            ObjectOp::AssertExists => drop(head.as_ref().ok_or(ErrorKind::NotFound)?),
            // Of the object as it was before the transaction, whose steps workloads put after it.
            ObjectOp::AssertVersion(version) => {
                let now = head.as_ref().ok_or(ErrorKind::Guard)?.version;
                if now.is_some_and(|now| now != *version) {
                    return Err(ErrorKind::Guard);
                }
            }
            ObjectOp::Compare { offset, data } => {
                let found = head.clone().unwrap_or_default().bytes(Extent::new(*offset, data.len() as u64));
                let expected = data.to_vec();
                if let Some(at) = found.iter().zip(&expected).position(|(a, b)| a != b) {
                    return Err(ErrorKind::Mismatch(at as u64));
                }
            }
            ObjectOp::KvCompare { key, value } => {
                if head.as_ref().and_then(|head| head.keys.get(key)) != value.as_ref() {
                    return Err(ErrorKind::Guard);
                }
            }
            ObjectOp::Create { exclusive } => {
                if *exclusive && head.is_some() {
                    return Err(ErrorKind::Exists);
                }
                head.get_or_insert_default();
            }
            ObjectOp::Expect { .. } => {
                head.get_or_insert_default();
            }
            ObjectOp::Write { offset, data } => head.get_or_insert_default().write(*offset, data),
            ObjectOp::WriteFull { data } => {
                let body = head.get_or_insert_default();
                body.truncate(0);
                body.write(0, data);
            }
            ObjectOp::Zero { extent } => {
                if let Some(body) = head {
                    body.zero(*extent);
                }
            }
            ObjectOp::Truncate { size } => {
                if let Some(body) = head {
                    body.truncate(*size);
                }
            }
            ObjectOp::Remove => {
                head.take().ok_or(ErrorKind::NotFound)?;
            }
            ObjectOp::KvSet { pairs } => {
                let body = head.get_or_insert_default();
                Rc::make_mut(&mut body.keys).extend(pairs.iter().cloned());
            }
            ObjectOp::KvRemove { keys } => {
                let body = head.as_mut().ok_or(ErrorKind::NotFound)?;
                let map = Rc::make_mut(&mut body.keys);
                keys.iter().for_each(|key| drop(map.remove(key)));
            }
            ObjectOp::Rollback { snap } => *head = self.at(*snap).cloned(),
            // No backend that this model stands beside has classes.
            ObjectOp::Call { .. } => return Err(ErrorKind::Unsupported),
        }
        Ok(())
    }
}

fn is_guard(op: &ObjectOp) -> bool {
    matches!(
        op,
        ObjectOp::AssertExists | ObjectOp::AssertVersion(_) | ObjectOp::Compare { .. } | ObjectOp::KvCompare { .. }
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay_block::{Buf, SnapContext};

    fn write(offset: u64, data: &[u8]) -> ObjectOp {
        ObjectOp::Write { offset, data: Buf::copy_of(data).into() }
    }

    #[test]
    fn a_refused_transaction_changes_nothing() {
        let state = ObjectState::default().apply(&Transaction::of(write(0, b"abc"))).expect("a write");
        let twice = Transaction::new(vec![write(0, b"xyz"), ObjectOp::Create { exclusive: true }]);
        assert_eq!(state.apply(&twice), Err(ErrorKind::Exists));
        assert_eq!(state.head().map(|body| body.bytes(Extent::new(0, 4))), Some(b"abc\0".to_vec()));
    }

    #[test]
    fn snapshots_keep_what_was_there() {
        let context = |seq, snaps: &[u64]| {
            let snaps = snaps.iter().map(|&snap| SnapId(snap)).collect();
            Rc::new(SnapContext { seq, snaps })
        };
        let state = ObjectState::default().apply(&Transaction::of(write(0, b"one"))).expect("a write");
        let second = Transaction::of(write(0, b"two")).with_snapc(context(2, &[2, 1]));
        let state = state.apply(&second).expect("a write");
        let state = state.apply(&Transaction::of(ObjectOp::Remove).with_snapc(context(3, &[3, 2, 1]))).expect("gone");
        let at = |snap| state.at(SnapId(snap)).map(|body| body.bytes(Extent::new(0, 3)));
        assert_eq!([at(1), at(2), at(3)], [Some(b"one".to_vec()), Some(b"one".to_vec()), Some(b"two".to_vec())]);
        assert_eq!(state.at(SnapId(4)), None);
        let back = Transaction::of(ObjectOp::Rollback { snap: SnapId(2) }).with_snapc(context(3, &[3, 2, 1]));
        let state = state.apply(&back).expect("a rollback");
        assert_eq!(state.head().map(|body| body.bytes(Extent::new(0, 3))), Some(b"one".to_vec()));
    }
}
