//! Object: its head, the clones kept for snapshots, and the execution of transactions.

use std::collections::BTreeSet;
use std::rc::Rc;

use forebay_block::{
    Error, ErrorKind, Extent, Method, ObjectOp, Result, SnapClone, SnapContext, SnapId, SnapSet, Transaction,
};

use crate::content::{ObjectContent, PageCounter};

/// Maximum object size in bytes.  Pages are sparse, so this bounds offsets, not memory.
pub(crate) const OBJECT_SIZE_MAX: u64 = 1 << 40;

/// Object classes: execution of a [`Call`](ObjectOp::Call).
pub(crate) trait Classes {
    /// Calls a method on an object; the caller undoes its changes if it fails.
    fn call(
        &self,
        head: &mut Option<ObjectContent>,
        method: Method,
        input: &[u8],
        space: &Rc<PageCounter>,
    ) -> Result<()>;
}

/// Empty set of object classes, for a pool of one client.
pub(crate) struct NoClasses;

impl Classes for NoClasses {
    fn call(&self, _: &mut Option<ObjectContent>, method: Method, _: &[u8], _: &Rc<PageCounter>) -> Result<()> {
        Err(Error::new(ErrorKind::Unsupported, format!("{method:?}")))
    }
}

/// Pool state shared by all objects of a backend.
pub(crate) struct PoolState {
    pub(crate) space: Rc<PageCounter>,
    /// Maximum number of pages.
    pub(crate) pages_max: u64,
    /// Removed snapshots; a write context that still names one preserves nothing for it.
    pub(crate) removed: BTreeSet<SnapId>,
    /// Highest snapshot ID allocated.
    pub(crate) snap_last: u64,
    /// Highest object version; grows with each change of any object, so that a removed and re-created object never
    /// repeats a version.
    pub(crate) version_last: u64,
}

/// Clone: a state kept for snapshots.
struct KeptClone {
    id: SnapId,
    /// Snapshots of the clone, newest first.
    snaps: Vec<SnapId>,
    content: ObjectContent,
    version: u64,
}

/// Object; exists while it has a head or a clone.
#[derive(Default)]
pub(crate) struct RamObject {
    head: Option<ObjectContent>,
    version: u64,
    /// Newest snapshot that a write to the head has seen.
    seq: u64,
    /// Clones, oldest first.
    clones: Vec<KeptClone>,
}

impl RamObject {
    pub(crate) fn head(&self) -> Option<&ObjectContent> {
        self.head.as_ref()
    }

    /// Returns true if neither a head nor a clone is left.
    pub(crate) fn is_gone(&self) -> bool {
        self.head.is_none() && self.clones.is_empty()
    }

    /// Returns the content and version at `snap`; `None` if the object did not exist then.
    pub(crate) fn at(&self, snap: SnapId) -> Option<(&ObjectContent, u64)> {
        match find(&self.clones, self.seq, snap) {
            Found::Head => self.head.as_ref().map(|head| (head, self.version)),
            Found::Clone(kept) => Some((&kept.content, kept.version)),
            Found::Nothing => None,
        }
    }

    pub(crate) fn snap_set(&self) -> SnapSet {
        let clones = self.clones.iter().map(|kept| SnapClone {
            id: kept.id,
            snaps: kept.snaps.clone(),
            size: kept.content.size(),
        });
        SnapSet { seq: self.seq, head_exists: self.head.is_some(), clones: clones.collect() }
    }

    /// Removes a snapshot; a clone without any other snapshot is dropped.
    pub(crate) fn forget_snap(&mut self, snap: SnapId) {
        self.clones.retain_mut(|kept| {
            kept.snaps.retain(|&other| other != snap);
            !kept.snaps.is_empty()
        });
    }

    /// Executes a transaction atomically; returns the version after it.
    pub(crate) fn submit(
        &mut self,
        transaction: &Transaction,
        pool: &mut PoolState,
        classes: &dyn Classes,
    ) -> Result<u64> {
        let ops = &transaction.ops[..];
        let changes = ops.iter().any(|op| !is_guard(op));
        let kept = if changes { self.keep(transaction.snapc.as_deref(), pool) } else { None };
        // A step that fails changes nothing, so a transaction in which no step can fail after the first change is
        // executed in place; any other is executed on a copy, which shares its pages with the original.
        let first = ops.iter().position(|op| !is_guard(op)).unwrap_or(ops.len());
        let calls = ops.iter().any(|op| matches!(op, ObjectOp::Call { .. }));
        let only_one = !calls && first + 1 >= ops.len();
        if only_one || cannot_fail(&ops[first..], self.head.as_ref(), pool) {
            let before = BeforeTransaction { head: None, clones: &self.clones, seq: self.seq, version: self.version };
            apply(&mut self.head, ops, &before, pool, classes)?;
        } else {
            let mut draft = self.head.clone();
            let before = BeforeTransaction {
                head: Some(&self.head),
                clones: &self.clones,
                seq: self.seq,
                version: self.version,
            };
            apply(&mut draft, ops, &before, pool, classes)?;
            self.head = draft;
        }
        if changes {
            self.clones.extend(kept);
            self.seq = self.seq.max(transaction.snapc.as_ref().map_or(0, |snapc| snapc.seq));
            pool.version_last += 1;
            self.version = pool.version_last;
        }
        Ok(self.version)
    }

    /// Returns the clone that a change with this context must preserve, as RADOS does: if there are snapshots newer
    /// than the last one that a write has seen, the clone represents all of them.
    fn keep(&self, snapc: Option<&SnapContext>, pool: &PoolState) -> Option<KeptClone> {
        let (head, snapc) = (self.head.as_ref()?, snapc?);
        let is_new = |snap: &&SnapId| snap.0 > self.seq && !pool.removed.contains(snap);
        let snaps: Vec<SnapId> = snapc.snaps.iter().filter(is_new).copied().collect();
        if snaps.is_empty() {
            return None;
        }
        Some(KeptClone { id: SnapId(snapc.seq), snaps, content: head.clone(), version: self.version })
    }
}

enum Found<'a> {
    Head,
    Clone(&'a KeptClone),
    Nothing,
}

/// Finds the state at `snap`: the head if no write has seen the snapshot, else the first clone that is no older, if
/// that clone represents it.
fn find(clones: &[KeptClone], seq: u64, snap: SnapId) -> Found<'_> {
    if snap == SnapId::HEAD || snap.0 > seq {
        return Found::Head;
    }
    match clones.iter().find(|kept| kept.id >= snap) {
        Some(kept) if kept.snaps.contains(&snap) => Found::Clone(kept),
        _ => Found::Nothing,
    }
}

fn is_guard(op: &ObjectOp) -> bool {
    matches!(
        op,
        ObjectOp::AssertExists | ObjectOp::AssertVersion(_) | ObjectOp::Compare { .. } | ObjectOp::KvCompare { .. }
    )
}

/// Returns true if these are writes for which there is space, whatever pages they share with each other.
fn cannot_fail(ops: &[ObjectOp], head: Option<&ObjectContent>, pool: &PoolState) -> bool {
    // Mostly there is space even if all pages were missing.  Which of them are is looked up only otherwise: that costs
    // more than the write of a page does.
    have_space(ops, pool, pages_of) || have_space(ops, pool, |extent| pages_to_add(head, extent))
}

/// Returns true if these are writes, and there is space for the pages that each adds by `count`.
fn have_space(ops: &[ObjectOp], pool: &PoolState, count: impl Fn(Extent) -> u64) -> bool {
    let mut pages = 0_u64;
    ops.iter().all(|op| match op {
        ObjectOp::Expect { .. } | ObjectOp::Create { exclusive: false } | ObjectOp::KvSet { .. } => true,
        ObjectOp::Write { offset, data } => check_range(*offset, data.len() as u64).is_ok_and(|extent| {
            pages += count(extent);
            check_space(pages, pool).is_ok()
        }),
        _ => false,
    })
}

/// Object before a transaction.
struct BeforeTransaction<'a> {
    /// Head before the transaction; `None` if the steps work on the head in place, and none reads the state before the
    /// first change.
    head: Option<&'a Option<ObjectContent>>,
    clones: &'a [KeptClone],
    seq: u64,
    version: u64,
}

fn apply(
    head: &mut Option<ObjectContent>,
    ops: &[ObjectOp],
    before: &BeforeTransaction<'_>,
    pool: &PoolState,
    classes: &dyn Classes,
) -> Result<()> {
    for op in ops {
        match op {
            ObjectOp::AssertExists => drop(existing(head)?),
            ObjectOp::AssertVersion(wanted) => {
                if head.is_none() || before.version != *wanted {
                    return Err(ErrorKind::Guard.into());
                }
            }
            ObjectOp::Compare { offset, data } => {
                check_range(*offset, data.len() as u64)?;
                // A missing object compares as zeroes, as in RADOS.
                let difference = match head {
                    Some(head) => head.first_difference(*offset, data),
                    None => ObjectContent::default().first_difference(*offset, data),
                };
                if let Some(at) = difference {
                    return Err(ErrorKind::Mismatch(at).into());
                }
            }
            ObjectOp::KvCompare { key, value } => {
                if head.as_ref().and_then(|head| head.kv.get(key)) != value.as_ref() {
                    return Err(ErrorKind::Guard.into());
                }
            }
            ObjectOp::Create { exclusive } => {
                if *exclusive && head.is_some() {
                    return Err(ErrorKind::Exists.into());
                }
                head.get_or_insert_default();
            }
            ObjectOp::Expect { .. } => {
                head.get_or_insert_default();
            }
            ObjectOp::Write { offset, data } => {
                let extent = check_range(*offset, data.len() as u64)?;
                if check_space(pages_of(extent), pool).is_err() {
                    check_space(pages_to_add(head.as_ref(), extent), pool)?;
                }
                head.get_or_insert_default().write(*offset, data, &pool.space);
            }
            ObjectOp::WriteFull { data } => {
                let extent = check_range(0, data.len() as u64)?;
                // The replaced pages count as free only if no clone keeps them.
                let freed = head.as_ref().map_or(0, |head| pages_of(extent).saturating_sub(head.pages_to_add(extent)));
                check_space(pages_of(extent) - freed, pool)?;
                head.get_or_insert_default().replace(data, &pool.space);
            }
            ObjectOp::Zero { extent } => {
                check_overflow(*extent)?;
                if let Some(head) = head {
                    head.zero(*extent);
                }
            }
            ObjectOp::Truncate { size } => {
                check_range(0, *size)?;
                if let Some(head) = head {
                    head.truncate(*size);
                }
            }
            ObjectOp::Remove => {
                existing(head)?;
                *head = None;
            }
            ObjectOp::KvSet { pairs } => head.get_or_insert_default().kv.extend(pairs.iter().cloned()),
            ObjectOp::KvRemove { keys } => {
                let head = existing(head)?;
                keys.iter().for_each(|key| drop(head.kv.remove(key)));
            }
            ObjectOp::Rollback { snap } => match find(before.clones, before.seq, *snap) {
                // No write has seen the snapshot, so it shows the head before this transaction.
                Found::Head => {
                    if let Some(head_before) = before.head {
                        head.clone_from(head_before);
                    }
                }
                Found::Clone(kept) => *head = Some(kept.content.clone()),
                Found::Nothing => *head = None,
            },
            ObjectOp::Call { method, input } => classes.call(head, *method, input, &pool.space)?,
        }
    }
    Ok(())
}

fn existing(head: &mut Option<ObjectContent>) -> Result<&mut ObjectContent> {
    head.as_mut().ok_or_else(|| ErrorKind::NotFound.into())
}

/// Returns the number of pages that an extent touches.
fn pages_of(extent: Extent) -> u64 {
    ObjectContent::default().pages_to_add(extent)
}

/// Returns the number of pages that a write to `extent` would add.
fn pages_to_add(head: Option<&ObjectContent>, extent: Extent) -> u64 {
    head.map_or_else(|| pages_of(extent), |head| head.pages_to_add(extent))
}

fn check_space(pages: u64, pool: &PoolState) -> Result<()> {
    if pages > 0 && pool.space.pages().saturating_add(pages) > pool.pages_max {
        return Err(ErrorKind::NoSpace.into());
    }
    Ok(())
}

fn check_range(offset: u64, len: u64) -> Result<Extent> {
    match offset.checked_add(len) {
        Some(end) if end <= OBJECT_SIZE_MAX => Ok(Extent::new(offset, len)),
        _ => Err(Error::new(ErrorKind::OutOfRange, format!("{len} bytes at {offset} of an object"))),
    }
}

pub(crate) fn check_overflow(extent: Extent) -> Result<()> {
    match extent.checked_end() {
        Some(_) => Ok(()),
        None => Err(Error::new(ErrorKind::OutOfRange, format!("{} bytes at {}", extent.len, extent.offset))),
    }
}
