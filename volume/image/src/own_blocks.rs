//! Cache of an image's own blocks: reads of its head, kept while only this client changes the image.
//!
//! A *generation* of cached blocks begins with an acquisition of the exclusive lock, or when the option is enabled, and is
//! never used with a later acquisition. `docs/design/readcache.md` has the argument.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

use forebay_block::{
    Error, ErrorKind, Extent, HeadGeneration, LocalFuture, ObjectBackend, ObjectName, ObjectOp, Result, Transaction,
    WATCH_LIFE_MIN,
};
use forebay_reactor::{sleep, spawn};

use crate::exclusive_lock::LockedImage;
use crate::format::metadata_key;
use crate::image::Image;
use crate::open_image::OpenImage;
use crate::parent_cache::installed;

/// Metadata key of an image whose own blocks are to be cached: `true`; other values and none disable it.
pub const OWN_BLOCKS_KEY: &str = "forebay.cache-own-blocks";

/// Time after the last confirmed ping of the watch in which own blocks are read from the cache.
pub(crate) const READ_LEASE: Duration = Duration::from_secs(8);
/// Wait after an owner was blocklisted, until it reads nothing from its cache any more: the lease, and a margin for clocks
/// that differ in speed.
const FENCED_READS: Duration = Duration::from_secs(10);

const _: () =
    assert!(READ_LEASE.as_secs() < FENCED_READS.as_secs() && FENCED_READS.as_secs() < WATCH_LIFE_MIN.as_secs());

/// State of the cache of an image's own blocks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum OwnBlockState {
    /// Not asked for.
    Disabled,
    /// Asked for, but this process has no read cache, or the pool is in memory.
    Unavailable,
    /// Not in use: this client does not hold the exclusive lock, or may have lost it, or does not know the outcome of a
    /// change.
    Idle,
    /// In use.
    Active,
}

/// Generation of cached blocks, and the acquisition of the exclusive lock for which it holds.
struct CurrentGeneration {
    acquisition: u64,
    blocks: Rc<dyn HeadGeneration>,
}

/// Cache of the own blocks of an open image.
///
/// Invariants:
/// 1. When a generation begins, no change of the image is in flight; every later one is announced to it before it is
///    submitted.
/// 2. A generation is read from only in the acquisition of the lock in which it began, and while that is certain.
/// 3. Once the outcome of a change is unknown, no generation is used any more: the change may happen later.
#[derive(Default)]
pub(crate) struct OwnBlockCache {
    wanted: Cell<bool>,
    generation: RefCell<Option<CurrentGeneration>>,
    uncertain: Rc<Cell<bool>>,
    /// Number of reasons to doubt the lock that are being looked into: nothing is read from the cache meanwhile.
    doubts: Cell<u32>,
}

/// Change of a data object in flight. Dropped before it has ended, its outcome is unknown.
pub(crate) struct OwnBlockChange {
    /// Generation that it was announced to, with the ranges of the object.
    announced: Option<(Rc<dyn HeadGeneration>, u64, Vec<Extent>)>,
    uncertain: Rc<Cell<bool>>,
    ended: bool,
}

impl OwnBlockChange {
    /// Waits for the change, and ends it.
    pub(crate) fn until(mut self, submitted: LocalFuture<Result<u64>>) -> LocalFuture<Result<u64>> {
        Box::pin(async move {
            let result = submitted.await;
            self.ended = result.as_ref().err().is_none_or(is_definite);
            drop(self);
            result
        })
    }
}

impl Drop for OwnBlockChange {
    fn drop(&mut self) {
        if !self.ended {
            self.uncertain.set(true);
            return;
        }
        if let Some((generation, object, extents)) = &self.announced {
            extents.iter().for_each(|extent| generation.end_change(*object, *extent));
        }
    }
}

/// Returns whether a change that has failed in this way does not happen later.
fn is_definite(error: &Error) -> bool {
    use ErrorKind::{Exists, Guard, Invalid, Mismatch, NotFound, OutOfRange, ReadOnly};
    // Not without space: what the store has applied may take effect when there is space again.
    matches!(error.kind(), NotFound | Exists | Mismatch(_) | Guard | Invalid | OutOfRange | ReadOnly)
}

/// Returns the ranges of an object that a transaction changes.
fn changed_by(transaction: &Transaction, object_size: u64) -> Vec<Extent> {
    let whole = Extent::new(0, object_size);
    let changed = |op: &ObjectOp| match op {
        ObjectOp::Write { offset, data } => Some(Extent::new(*offset, data.len() as u64)),
        ObjectOp::Zero { extent } => Some(*extent),
        // Guards, and what changes no byte of an object that exists; absence is not cached.
        ObjectOp::AssertExists
        | ObjectOp::AssertVersion(_)
        | ObjectOp::Compare { .. }
        | ObjectOp::KvCompare { .. }
        | ObjectOp::Create { .. }
        | ObjectOp::Expect { .. } => None,
        _ => Some(whole),
    };
    transaction.ops.iter().filter_map(changed).collect()
}

impl OwnBlockCache {
    /// Announces a change of an object, which the caller submits next; `None` if nobody needs to know when it ends.
    pub(crate) fn begin_change(
        &self,
        image: &OpenImage,
        object: u64,
        transaction: &Transaction,
    ) -> Option<OwnBlockChange> {
        let generation = self.generation.borrow().as_ref().map(|current| current.blocks.clone());
        // In a pool of its own, a change that has failed does not happen later.
        if generation.is_none() && !image.is_shared() {
            return None;
        }
        let announced = generation.map(|generation| {
            let extents = changed_by(transaction, image.layout().object_size());
            extents.iter().for_each(|extent| generation.begin_change(object, *extent));
            (generation, object, extents)
        });
        Some(OwnBlockChange { announced, uncertain: self.uncertain.clone(), ended: false })
    }

    /// Returns the generation to read from, if this client alone changes the image at this moment.
    pub(crate) fn for_read(&self, image: &OpenImage) -> Option<Rc<dyn HeadGeneration>> {
        let current = self.generation.borrow();
        let CurrentGeneration { acquisition, blocks } = current.as_ref()?;
        let is_alone = || image.certain_acquisition() == Some(*acquisition);
        (!self.uncertain.get() && self.doubts.get() == 0 && is_alone()).then(|| blocks.clone())
    }

    /// Begins a generation, if own blocks are to be cached. The caller sees to it that the lock is neither acquired nor
    /// released meanwhile.
    pub(crate) async fn begin(&self, image: &OpenImage) {
        let can = || self.wanted.get() && !self.uncertain.get() && image.data().identity().is_some();
        if !can() || installed().is_none() {
            return;
        }
        let acquisition = image.acquisition();
        if self.generation.borrow().as_ref().is_some_and(|current| current.acquisition == acquisition) {
            return;
        }
        let _blocked = image.block_writes().await;
        if let Some(cache) = installed().filter(|_| can()) {
            let begun = cache.begin_generation(image.id());
            *self.generation.borrow_mut() = begun.map(|blocks| CurrentGeneration { acquisition, blocks });
        }
    }

    /// Ends the generation: another client may change the image from now on.
    pub(crate) fn end(&self) {
        self.generation.take();
    }

    /// Looks whether the lock is still this client's, after the header may have been changed by another one: a lock can be
    /// broken although its owner is alive. Nothing is read from the cache until then.
    pub(crate) async fn check_lock(&self, image: &OpenImage) {
        let Some(lock) = image.exclusive_lock().filter(|_| self.generation.borrow().is_some()) else { return };
        let acquisition = image.acquisition();
        self.doubts.set(self.doubts.get() + 1);
        let is_stored = lock.is_stored().await;
        self.doubts.set(self.doubts.get() - 1);
        if !matches!(is_stored, Ok(true)) && image.acquisition() == acquisition {
            self.end();
        }
    }

    fn state(&self, image: &OpenImage) -> OwnBlockState {
        if !self.wanted.get() {
            return OwnBlockState::Disabled;
        }
        if installed().is_none() || image.data().identity().is_none() {
            return OwnBlockState::Unavailable;
        }
        if self.for_read(image).is_some() { OwnBlockState::Active } else { OwnBlockState::Idle }
    }
}

impl Image {
    /// Enables or disables the cache of the image's own blocks. It is used while this client holds the exclusive lock, or
    /// has the image open in a pool that has no other clients; a lock that is held already is used soon.
    pub fn cache_own_blocks(&self, wanted: bool) {
        let shared = self.shared().clone();
        let own_blocks = shared.own_blocks();
        if own_blocks.wanted.replace(wanted) == wanted {
            return;
        }
        if !wanted {
            own_blocks.generation.take();
            return;
        }
        drop(spawn(async move {
            match shared.exclusive_lock() {
                Some(lock) => {
                    let _turn = lock.begin_turn().await;
                    if lock.is_locked() {
                        shared.own_blocks().begin(&shared).await;
                    }
                }
                None => shared.own_blocks().begin(&shared).await,
            }
        }));
    }

    /// Returns the state of the cache of the image's own blocks.
    pub fn own_block_state(&self) -> OwnBlockState {
        self.shared().own_blocks().state(self.shared())
    }
}

/// Waits until a client that has just been blocklisted reads no own blocks of an image from its cache any more, if the image
/// asks for that cache.
pub(crate) async fn outlast_fenced_reads(pool: &Rc<dyn ObjectBackend>, header: &ObjectName) -> Result<()> {
    // After this, no ping of the blocklisted client is answered by the server of the header.
    let found = pool.kv_get(header, vec![metadata_key(OWN_BLOCKS_KEY)]).await?;
    if found.into_iter().flatten().next().is_some() {
        sleep(FENCED_READS).await;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use forebay_block::{Buf, SnapId};

    use super::*;

    #[test]
    fn a_change_names_what_it_may_change() {
        let write = |offset, len| ObjectOp::Write { offset, data: Buf::copy_of(&vec![1; len]).into() };
        let of = |ops: Vec<ObjectOp>| changed_by(&Transaction::new(ops), 1 << 20);
        let whole = [Extent::new(0, 1 << 20)];
        assert_eq!(
            of(vec![ObjectOp::AssertExists, write(5, 7), write(100, 1)]),
            [Extent::new(5, 7), Extent::new(100, 1)]
        );
        let compare = ObjectOp::Compare { offset: 0, data: Buf::copy_of(b"x").into() };
        assert_eq!(of(vec![compare, write(0, 1)]), [Extent::new(0, 1)]);
        let zero = Extent::new(4096, 8192);
        assert_eq!(of(vec![ObjectOp::Create { exclusive: false }, ObjectOp::Zero { extent: zero }]), [zero]);
        let full = ObjectOp::WriteFull { data: Buf::copy_of(b"all").into() };
        let rollback = ObjectOp::Rollback { snap: SnapId(1) };
        for op in [ObjectOp::Remove, ObjectOp::Truncate { size: 1 }, full, rollback] {
            assert_eq!(of(vec![op]), whole);
        }
    }
}
