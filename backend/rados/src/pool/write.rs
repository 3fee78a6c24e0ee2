//! Encoding of transactions as operation vectors.

use forebay_block::{Advice, Error, ErrorKind, LocalFuture, ObjectName, ObjectOp, Result, Transaction};
use forebay_messenger::wire::PayloadWriter;
use forebay_reactor::Buf;

use super::{OBJECT_SIZE_MAX, RadosPool, check_name, ended, guard, ready, refusal};
use crate::error::errno;
use crate::osd::OsdRequest;
use crate::osd::wire::{OP_EXCLUSIVE, OsdOp, SNAP_HEAD, code, flag, keys, pairs};

/// Comparison operator for key values: equal.
const CMP_EQ: u32 = 1;

/// Rejects transactions that no object supports.
fn check(object: &ObjectName, transaction: &Transaction) -> Result<()> {
    check_name(object)?;
    if transaction.snapc.as_ref().is_some_and(|snapc| !snapc.is_valid()) {
        return Err(Error::new(ErrorKind::Invalid, format!("object {object}: snapshot context out of order")));
    }
    let past = |offset: u64, len: u64| offset.checked_add(len).is_none_or(|end| end > OBJECT_SIZE_MAX);
    let rolls_back = transaction.ops.iter().any(|op| matches!(op, ObjectOp::Rollback { .. }));
    if rolls_back && transaction.ops.iter().filter(|op| !is_guard(op)).count() > 1 {
        // OSDs leave stale bytes of the rolled-back state if further operations follow.
        let text = format!("object {object}: rolling back and changing it otherwise, in one transaction");
        return Err(Error::new(ErrorKind::Unsupported, text));
    }
    for op in &transaction.ops {
        let wrong = match op {
            ObjectOp::Write { offset, data } => past(*offset, data.len() as u64),
            ObjectOp::WriteFull { data } => past(0, data.len() as u64),
            ObjectOp::Truncate { size } => past(*size, 0),
            ObjectOp::Zero { extent } => extent.checked_end().is_none(),
            ObjectOp::Compare { offset, data } => offset.checked_add(data.len() as u64).is_none(),
            _ => false,
        };
        if wrong {
            let text = format!("object {object}: past the largest size of {OBJECT_SIZE_MAX} bytes");
            return Err(Error::new(ErrorKind::OutOfRange, text));
        }
    }
    Ok(())
}

/// Returns the operation for a step; `None` if it has no effect or is planned elsewhere.
pub(super) fn operation(op: &ObjectOp) -> Option<OsdOp> {
    Some(match op {
        ObjectOp::AssertExists => OsdOp::new(code::STAT),
        // No object has version 0, which OSDs reject; u64::MAX is never assigned either.
        ObjectOp::AssertVersion(0) => OsdOp::assert_version(u64::MAX),
        ObjectOp::AssertVersion(version) => OsdOp::assert_version(*version),
        ObjectOp::Compare { data, .. } if data.is_empty() => return None,
        ObjectOp::Compare { offset, data } => {
            OsdOp::extent(code::CMPEXT, *offset, data.len() as u64).with(data.clone())
        }
        ObjectOp::KvCompare { key, value } => {
            let mut input = PayloadWriter::new();
            input.u32(1).blob(key).blob(value.as_deref().unwrap_or_default()).u32(CMP_EQ);
            OsdOp::new(code::OMAP_CMP).with(Buf::copy_of(&input.finish()))
        }
        ObjectOp::Create { exclusive } => {
            let mut op = OsdOp::new(code::CREATE);
            op.flags = if *exclusive { OP_EXCLUSIVE } else { 0 };
            op
        }
        ObjectOp::Expect { object_size, write_size } => OsdOp::expect(*object_size, *write_size),
        // An empty write would extend the object.
        ObjectOp::Write { data, .. } if data.is_empty() => OsdOp::new(code::CREATE),
        ObjectOp::Write { offset, data } => OsdOp::extent(code::WRITE, *offset, data.len() as u64).with(data.clone()),
        ObjectOp::WriteFull { data } => OsdOp::extent(code::WRITE_FULL, 0, data.len() as u64).with(data.clone()),
        // Planned with knowledge of the object's size, in `guard.rs`.
        ObjectOp::Zero { .. } => return None,
        ObjectOp::Truncate { size } => OsdOp::extent(code::TRUNCATE, *size, 0),
        ObjectOp::Remove => OsdOp::new(code::DELETE),
        ObjectOp::KvSet { pairs: set } => {
            let mut sorted: Vec<(&[u8], &[u8])> = set.iter().map(|(key, value)| (&key[..], &value[..])).collect();
            // If a key is set twice, the last value wins.
            sorted.reverse();
            sorted.sort_by_key(|(key, _)| *key);
            sorted.dedup_by_key(|(key, _)| *key);
            OsdOp::new(code::OMAP_SET_VALS).with(Buf::copy_of(&pairs(sorted.into_iter())))
        }
        ObjectOp::KvRemove { keys: gone } => {
            OsdOp::new(code::OMAP_RM_KEYS).with(Buf::copy_of(&keys(gone.iter().map(Vec::as_slice))))
        }
        ObjectOp::Rollback { snap } => OsdOp::snap(code::ROLLBACK, snap.0),
        ObjectOp::Call { method, input } => OsdOp::call(method.class, method.name, input),
    })
}

impl RadosPool {
    pub(super) fn transact(&self, object: &ObjectName, transaction: Transaction) -> LocalFuture<Result<u64>> {
        if let Err(error) = check(object, &transaction) {
            return ready(Err(error));
        }
        if let Some(waiting) = self.wait_in_line(object, &transaction) {
            return Box::pin(async move { waiting.await.unwrap_or_else(|| Err(ended())) });
        }
        if guard::needs_a_look(&transaction) {
            return self.begin_line(object, transaction);
        }
        self.send(object, &transaction)
    }

    /// Sends a transaction that does not depend on the object's state, and returns the resulting version.
    pub(super) fn send(&self, object: &ObjectName, transaction: &Transaction) -> LocalFuture<Result<u64>> {
        let ops: Vec<OsdOp> = transaction.ops.iter().filter_map(operation).collect();
        if transaction.ops.iter().all(is_guard) {
            return self.send_guards(object, transaction, ops);
        }
        self.send_ops(object, transaction, ops)
    }

    pub(super) fn send_ops(
        &self,
        object: &ObjectName,
        transaction: &Transaction,
        ops: Vec<OsdOp>,
    ) -> LocalFuture<Result<u64>> {
        // Requests beyond the quota or capacity must fail instead of waiting.
        let flags = flag::WRITE | flag::FULL_TRY;
        let ops: Vec<OsdOp> = match transaction.advice {
            Advice::NONE => ops,
            advice => ops.into_iter().map(|op| op.advised(advice)).collect(),
        };
        let codes: Vec<u16> = ops.iter().map(|op| op.code).collect();
        let snapc = transaction.snapc.clone();
        let request =
            OsdRequest { pool: self.id, object: object.clone(), group: 0, snap: SNAP_HEAD, snapc, flags, ops };
        let answered = self.cluster.objecter().submit(request);
        let object = object.clone();
        Box::pin(async move {
            let reply = answered.await.unwrap_or_else(|| Err(ended()))?;
            if reply.result >= 0 {
                return Ok(reply.version);
            }
            // A comparison on a missing object fails like one with a different value.
            let failed = reply.ops.iter().position(|(status, _)| *status < 0);
            let compared = failed.and_then(|at| codes.get(at)) == Some(&code::OMAP_CMP);
            if compared && reply.result == -errno::ENOENT {
                return Err(Error::new(ErrorKind::Guard, format!("object {object}")));
            }
            Err(refusal(reply.result, &object))
        })
    }

    /// Sends a transaction of guards only.  OSDs fail all operations on a missing object, although some guards hold
    /// there.
    fn send_guards(
        &self,
        object: &ObjectName,
        transaction: &Transaction,
        mut ops: Vec<OsdOp>,
    ) -> LocalFuture<Result<u64>> {
        ops.push(OsdOp::new(code::STAT));
        let absent = transaction.ops.iter().find_map(refuses_absent);
        let answered = self.cluster.objecter().submit(self.request(object, SNAP_HEAD, flag::READ, ops));
        let object = object.clone();
        Box::pin(async move {
            let reply = answered.await.unwrap_or_else(|| Err(ended()))?;
            match (reply.result, absent) {
                (0.., _) => Ok(reply.version),
                (result, None) if result == -errno::ENOENT => Ok(0),
                (result, Some(kind)) if result == -errno::ENOENT => Err(Error::new(kind, format!("object {object}"))),
                (result, _) => Err(refusal(result, &object)),
            }
        })
    }
}

fn is_guard(op: &ObjectOp) -> bool {
    matches!(
        op,
        ObjectOp::AssertExists | ObjectOp::AssertVersion(_) | ObjectOp::Compare { .. } | ObjectOp::KvCompare { .. }
    )
}

/// Returns the error of a guard on a missing object; `None` if the guard holds.
fn refuses_absent(op: &ObjectOp) -> Option<ErrorKind> {
    match op {
        ObjectOp::AssertExists => Some(ErrorKind::NotFound),
        ObjectOp::AssertVersion(_) => Some(ErrorKind::Guard),
        ObjectOp::Compare { data, .. } => {
            let mut bytes = data.parts().iter().flat_map(|part| part.iter());
            bytes.position(|&byte| byte != 0).map(|at| ErrorKind::Mismatch(at as u64))
        }
        ObjectOp::KvCompare { value, .. } => value.as_ref().map(|_| ErrorKind::Guard),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_version_is_zero() {
        // An OSD treats version 0 as no guard at all.
        let of = |version| operation(&ObjectOp::AssertVersion(version)).map(|op| (op.code, op.numbers().1));
        assert_eq!(of(5), Some((code::ASSERT_VER, 5)));
        assert_eq!(of(0), Some((code::ASSERT_VER, u64::MAX)));
    }

    #[test]
    fn of_a_key_that_is_set_twice_the_last_value_counts() {
        let pair = |key: &str, value: &str| (key.as_bytes().to_vec(), value.as_bytes().to_vec());
        let set = ObjectOp::KvSet { pairs: vec![pair("b", "1"), pair("a", "2"), pair("b", "3")] };
        let expected = pairs([(&b"a"[..], &b"2"[..]), (&b"b"[..], &b"3"[..])].into_iter());
        assert_eq!(operation(&set).map(|op| op.data.to_vec()), Some(expected));
    }
}
