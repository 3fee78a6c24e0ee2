//! Emulation of steps that OSDs lack: guards on the absence of a key, and zeroing that preserves the object size.
//!
//! An OSD compares a missing key as an empty value, fails comparisons on a missing object, and truncates an object when
//! its end is zeroed.  For a guard on a key's absence or empty value, and for zeroing, the object is therefore
//! inspected first, and the transaction is sent with a guard on the inspected version; if that fails, the procedure is
//! repeated.  Meanwhile, further transactions on the object are queued, which preserves their order.

use std::collections::{BTreeMap, VecDeque};

use forebay_block::{Error, ErrorKind, LocalFuture, ObjectBackend, ObjectName, ObjectOp, Result, SnapId, Transaction};
use forebay_reactor::spawn;
use forebay_reactor::sync::oneshot;

use super::write::operation;
use super::{RadosPool, ended};
use crate::osd::wire::{OP_EXCLUSIVE, OsdOp, code};

/// Maximum number of attempts while other clients change the object.
const TRIES: usize = 64;

type Waiting = oneshot::Receiver<Result<u64>>;

/// Transactions queued behind the one in flight on their object.
#[derive(Default)]
pub(super) struct Line(VecDeque<(Transaction, oneshot::Sender<Result<u64>>)>);

/// Returns whether the operation is a guard on a key's absence or empty value.
fn asks_for_absence(op: &ObjectOp) -> bool {
    matches!(op, ObjectOp::KvCompare { value, .. } if value.as_ref().is_none_or(Vec::is_empty))
}

/// Returns whether the transaction has steps that depend on the object's state.
pub(super) fn needs_a_look(transaction: &Transaction) -> bool {
    let steps = |op: &ObjectOp| asks_for_absence(op) || matches!(op, ObjectOp::Zero { .. });
    transaction.ops.iter().any(steps)
}

/// Inspected state of an object.
struct Seen {
    /// Object version; `None` if the object does not exist.
    version: Option<u64>,
    size: u64,
    values: BTreeMap<Vec<u8>, Vec<u8>>,
}

impl Seen {
    /// Returns the transaction's operations for an object in this state.  They end at a step that is known to fail,
    /// because only the OSD can tell whether an earlier one fails.
    fn plan(&self, transaction: &Transaction) -> Vec<OsdOp> {
        // Predicted state before the next step.
        let mut exists = self.version.is_some();
        let mut size = self.size;
        let mut values = self.values.clone();
        let mut ops = Vec::new();
        for op in &transaction.ops {
            match op {
                ObjectOp::KvCompare { key, value } => {
                    if values.get(key) == value.as_ref() {
                        // Implied by the guard on the version.
                        continue;
                    }
                    // Value that the key certainly does not have.
                    let other = [values.get(key).map_or(&[][..], Vec::as_slice), &[1]].concat();
                    ops.extend(operation(&ObjectOp::KvCompare { key: key.clone(), value: Some(other) }));
                    return ops;
                }
                ObjectOp::Zero { extent } => {
                    let end = extent.end().min(size);
                    if exists && extent.offset < end {
                        ops.push(OsdOp::extent(code::ZERO, extent.offset, end - extent.offset));
                    }
                    if exists && (end == size || extent.offset >= end) {
                        // Restores a truncated size; or if nothing is zeroed, creates a write that snapshots observe.
                        ops.push(OsdOp::extent(code::TRUNCATE, size, 0));
                    }
                    continue;
                }
                _ => {}
            }
            ops.extend(operation(op));
            match op {
                ObjectOp::Create { .. } | ObjectOp::Expect { .. } => exists = true,
                ObjectOp::Write { offset, data } => {
                    exists = true;
                    size = size.max(if data.is_empty() { 0 } else { offset + data.len() as u64 });
                }
                ObjectOp::WriteFull { data } => (exists, size) = (true, data.len() as u64),
                ObjectOp::Truncate { size: new } if exists => size = *new,
                ObjectOp::KvSet { pairs } => {
                    exists = true;
                    values.extend(pairs.iter().cloned());
                }
                ObjectOp::KvRemove { keys } => keys.iter().for_each(|key| drop(values.remove(key))),
                ObjectOp::Remove => {
                    (exists, size) = (false, 0);
                    values.clear();
                }
                _ => {}
            }
        }
        ops
    }

    /// Returns operations that succeed only if the object is unchanged.
    fn condition(&self) -> Vec<OsdOp> {
        match self.version {
            Some(version) => vec![OsdOp::assert_version(version)],
            None => {
                let mut create = OsdOp::new(code::CREATE);
                create.flags = OP_EXCLUSIVE;
                vec![create, OsdOp::new(code::DELETE)]
            }
        }
    }
}

impl RadosPool {
    /// Queues behind a multi-step transaction, if there is one on this object.
    pub(super) fn wait_in_line(&self, object: &ObjectName, transaction: &Transaction) -> Option<Waiting> {
        let mut lines = self.lines.borrow_mut();
        if lines.is_empty() {
            return None;
        }
        let line = lines.get_mut(object)?;
        let (answer, answered) = oneshot::channel();
        line.0.push_back((transaction.clone(), answer));
        Some(answered)
    }

    /// Runs a multi-step transaction, and then those queued meanwhile.
    pub(super) fn begin_line(&self, object: &ObjectName, transaction: Transaction) -> LocalFuture<Result<u64>> {
        let (answer, answered) = oneshot::channel();
        let lines = self.lines.clone();
        lines.borrow_mut().insert(object.clone(), Line::default());
        let (pool, object) = (self.this.upgrade(), object.clone());
        drop(spawn(async move {
            let Some(pool) = pool else { return };
            let mut next = Some((transaction, answer));
            while let Some((transaction, answer)) = next.take() {
                if needs_a_look(&transaction) {
                    answer.send(pool.look_and_send(&object, &transaction).await);
                } else {
                    // The request is sent within the call; its reply need not be awaited here.
                    let answered = pool.send(&object, &transaction);
                    drop(spawn(async move { answer.send(answered.await) }));
                }
                let mut lines = lines.borrow_mut();
                next = lines.get_mut(&object).and_then(|line| line.0.pop_front());
                if next.is_none() {
                    lines.remove(&object);
                }
            }
        }));
        Box::pin(async move { answered.await.unwrap_or_else(|| Err(ended())) })
    }

    async fn look_and_send(&self, object: &ObjectName, transaction: &Transaction) -> Result<u64> {
        for _ in 0..TRIES {
            let seen = self.look(object, transaction).await?;
            let steps = seen.plan(transaction);
            if steps.is_empty() {
                return Ok(seen.version.unwrap_or(0));
            }
            let mut ops = seen.condition();
            ops.extend(steps);
            match self.send_ops(object, transaction, ops).await {
                // Another client changed the object; or if it is unchanged, a guard of the transaction failed.
                Err(error) if matches!(error.kind(), ErrorKind::Guard | ErrorKind::Exists) => {
                    let now = self.look(object, transaction).await?;
                    if now.version == seen.version {
                        return Err(error);
                    }
                }
                result => return result,
            }
        }
        Err(Error::new(ErrorKind::Busy, format!("object {object}: too many concurrent changes by other clients")))
    }

    async fn look(&self, object: &ObjectName, transaction: &Transaction) -> Result<Seen> {
        let keys: Vec<Vec<u8>> = transaction
            .ops
            .iter()
            .filter_map(|op| if let ObjectOp::KvCompare { key, .. } = op { Some(key.clone()) } else { None })
            .collect();
        let stat = match self.stat(object, SnapId::HEAD).await {
            Ok(stat) => stat,
            Err(error) if error.kind() == ErrorKind::NotFound => {
                return Ok(Seen { version: None, size: 0, values: BTreeMap::new() });
            }
            Err(error) => return Err(error),
        };
        // Read after the version: if the object changes in between, the guard on the version fails.
        if keys.is_empty() {
            return Ok(Seen { version: Some(stat.version), size: stat.size, values: BTreeMap::new() });
        }
        let values = match self.kv_get(object, keys.clone()).await {
            Ok(values) => values,
            Err(error) if error.kind() == ErrorKind::NotFound => vec![None; keys.len()],
            Err(error) => return Err(error),
        };
        let found = keys.into_iter().zip(values).filter_map(|(key, value)| Some((key, value?)));
        Ok(Seen { version: Some(stat.version), size: stat.size, values: found.collect() })
    }
}

#[cfg(test)]
mod tests {
    use forebay_block::Extent;

    use super::*;

    fn codes(ops: &[OsdOp]) -> Vec<u16> {
        ops.iter().map(|op| op.code).collect()
    }

    fn seen(version: Option<u64>, size: u64) -> Seen {
        Seen { version, size, values: BTreeMap::from([(b"k".to_vec(), b"v".to_vec())]) }
    }

    #[test]
    fn what_was_planned_holds_only_for_the_object_as_it_was_seen() {
        let there = seen(Some(7), 10).condition();
        assert_eq!((codes(&there), there[0].numbers().1), (vec![code::ASSERT_VER], 7));
        let absent = seen(None, 0).condition();
        assert_eq!(codes(&absent), [code::CREATE, code::DELETE]);
        assert_eq!(absent[0].flags, OP_EXCLUSIVE, "it fails if somebody has made it meanwhile");
    }

    #[test]
    fn zeroing_keeps_the_size() {
        let plan = |size, offset, len| {
            let zero = Transaction::of(ObjectOp::Zero { extent: Extent::new(offset, len) });
            let ops = seen(Some(7), size).plan(&zero);
            ops.iter().map(|op| (op.code, op.numbers())).collect::<Vec<_>>()
        };
        assert_eq!(plan(100, 10, 20), [(code::ZERO, (10, 20))]);
        // OSDs truncate an object when its end is zeroed.
        let cut_and_grown = [(code::ZERO, (90, 10)), (code::TRUNCATE, (100, 0))];
        assert_eq!((plan(100, 90, 10), plan(100, 90, 50)), (cut_and_grown.to_vec(), cut_and_grown.to_vec()));
        assert_eq!(plan(100, 100, 10), [(code::TRUNCATE, (100, 0))], "nothing is zeroed, and snapshots see a write");
        let zero = Transaction::of(ObjectOp::Zero { extent: Extent::new(0, 10) });
        assert!(seen(None, 0).plan(&zero).is_empty(), "what is not there reads as zeroes");
    }

    #[test]
    fn a_guard_that_is_known_to_fail_ends_the_plan() {
        let remove = ObjectOp::Remove;
        let guard = |value: Option<&[u8]>| ObjectOp::KvCompare { key: b"k".to_vec(), value: value.map(<[u8]>::to_vec) };
        let holds = Transaction::new(vec![guard(Some(b"v")), remove.clone()]);
        assert_eq!(codes(&seen(Some(1), 0).plan(&holds)), [code::DELETE]);
        let fails = Transaction::new(vec![guard(None), remove]);
        assert_eq!(codes(&seen(Some(1), 0).plan(&fails)), [code::OMAP_CMP]);
    }
}
