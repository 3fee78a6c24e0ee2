//! Conformance tests for every [`ObjectBackend`].
//!
//! [`CASES`] are named tests of one property each; [`compare()`] runs random steps on two backends and reports any
//! difference.  Neither needs a particular reactor: call them from within whichever the backend runs on.  They panic on
//! a nonconforming backend, as `cargo test` expects.
//!
//! ```text
//! for (name, case) in conformance::CASES {
//!     reactor.block_on(async { case(open_an_empty_backend().await).await });
//! }
//! for seed in 0..100 {
//!     let steps = conformance::steps_from_seed(seed, 40);
//!     reactor.block_on(async { conformance::compare(open_an_empty_backend().await, RamBackend::new("m"), &steps).await });
//! }
//! ```

mod cases;
mod compare;
mod snaps;
mod steps;

use std::rc::Rc;

use forebay_block::{
    Buf, BufList, ErrorKind, Extent, ExtentState, LocalFuture, ObjectBackend, ObjectName, ObjectOp, ObjectRead, Result,
    SnapId, Transaction,
};

pub use compare::compare;
pub use steps::{Guard, RandomStep, StepOp, Submit, steps_from_seed};

/// Test of one property.  It uses object names of its own, so that all can run on one backend, one after another.
pub type Case = fn(Rc<dyn ObjectBackend>) -> LocalFuture<()>;

macro_rules! cases {
    ($($module:ident::$name:ident),* $(,)?) => {
        /// Named tests, one per property.
        pub const CASES: &[(&str, Case)] = &[$((stringify!($name), |backend| Box::pin($module::$name(backend)))),*];
    };
}

cases!(
    cases::nothing_is_there,
    cases::sparse_reads_and_writes,
    cases::write_full_replaces_bytes_and_keeps_keys,
    cases::zero_keeps_the_size,
    cases::truncate_cuts_and_grows,
    cases::map_tells_holes_from_data,
    cases::guards_undo_the_whole,
    cases::a_failed_step_undoes_the_whole,
    cases::exclusive_create,
    cases::versions_grow,
    cases::keys_and_values,
    cases::keys_in_pages,
    cases::submission_order_is_kept,
    cases::a_dropped_future_undoes_nothing,
    cases::large_objects,
    cases::listing,
    cases::bad_arguments,
    cases::durable_and_flush,
    snaps::first_write_keeps_a_clone,
    snaps::snapshots_of_what_was_not_there,
    snaps::a_removed_object_keeps_its_clones,
    snaps::rollback,
    snaps::one_clone_for_many_snapshots,
    snaps::removed_snapshots_go,
);

/// Test subject: shorthands for one object of the backend.
pub(crate) struct TestSubject {
    backend: Rc<dyn ObjectBackend>,
    object: ObjectName,
}

impl TestSubject {
    pub(crate) fn new(backend: &Rc<dyn ObjectBackend>, object: &str) -> Self {
        Self { backend: backend.clone(), object: ObjectName::new(format!("conformance.{object}")) }
    }

    pub(crate) async fn submit(&self, transaction: Transaction) -> Result<u64> {
        self.backend.submit(&self.object, transaction).await
    }

    pub(crate) async fn run(&self, ops: Vec<ObjectOp>) -> Result<u64> {
        self.submit(Transaction::new(ops)).await
    }

    #[track_caller]
    pub(crate) fn must(&self, ops: Vec<ObjectOp>) -> impl Future<Output = ()> {
        let text = format!("{ops:?}");
        let at = std::panic::Location::caller();
        let done = self.backend.submit(&self.object, Transaction::new(ops));
        let object = self.object.clone();
        async move {
            if let Err(error) = done.await {
                panic!("{at}: {text} on {object}: {error}");
            }
        }
    }

    pub(crate) async fn size(&self) -> u64 {
        self.backend.stat(&self.object, SnapId::HEAD).await.expect("the object is there").size
    }

    pub(crate) async fn exists(&self, snap: SnapId) -> bool {
        match self.backend.stat(&self.object, snap).await {
            Ok(_) => true,
            Err(error) if error.kind() == ErrorKind::NotFound => false,
            Err(error) => panic!("stat of {}: {error}", self.object),
        }
    }

    /// Returns all bytes at a snapshot.
    pub(crate) async fn bytes_at(&self, snap: SnapId) -> Vec<u8> {
        content(&*self.backend, &self.object, snap).await.unwrap_or_else(|| panic!("no {} at {snap:?}", self.object))
    }

    pub(crate) async fn bytes(&self) -> Vec<u8> {
        self.bytes_at(SnapId::HEAD).await
    }
}

/// Returns all bytes of an object, checked for consistency between `stat`, `read` and `map`; `None` if it does not
/// exist.
pub(crate) async fn content(backend: &dyn ObjectBackend, object: &ObjectName, snap: SnapId) -> Option<Vec<u8>> {
    let size = match backend.stat(object, snap).await {
        Ok(stat) => stat.size,
        Err(error) if error.kind() == ErrorKind::NotFound => {
            let read = ObjectRead::new(snap, Extent::new(0, 1));
            let error = backend.read(object, read).await.expect_err("stat says it is not there, read finds it");
            assert_eq!(error.kind(), ErrorKind::NotFound, "read of {object}, which is not there");
            return None;
        }
        Err(error) => panic!("stat of {object}: {error}"),
    };
    // One byte past the end: the read must stop at the end, and the map must report the rest as a hole.
    let extent = Extent::new(0, size + 1);
    let data = backend.read(object, ObjectRead::new(snap, extent)).await.expect("read of an object that is there");
    let mut at = 0;
    for (offset, run) in &data.runs {
        assert!(*offset >= at && !run.is_empty(), "{object}: runs out of order, or an empty one");
        at = offset + run.len() as u64;
    }
    assert!(at <= size, "{object}: read past the end");
    let bytes = data.fill(Extent::new(0, size)).to_vec();

    let map = backend.map(object, ObjectRead::new(snap, extent)).await.expect("map of an object that is there");
    let mut at = 0;
    for run in map.runs() {
        assert_eq!(run.extent.offset, at, "{object}: a gap in the map");
        at = run.extent.end();
        let within = run.extent.offset.min(size) as usize..at.min(size) as usize;
        let holds = bytes[within].iter().fold(0, |all, byte| all | byte) != 0;
        assert!(!holds || run.state == ExtentState::Data, "{object}: bytes in {run:?}");
    }
    assert_eq!(at, size + 1, "{object}: the map does not cover what was asked for");
    assert_eq!(map.runs().last().expect("a run").state, ExtentState::Hole, "{object}: past the end is a hole");
    Some(bytes)
}

/// Generates bytes that depend on `seed`; 0 gives zeroes.
pub(crate) fn pattern(seed: u8, len: usize) -> BufList {
    if seed == 0 {
        return BufList::zeroes(len);
    }
    let bytes: Vec<u8> = (0..len).map(|i| (i as u8).wrapping_mul(31).wrapping_add((i >> 8) as u8) ^ seed).collect();
    // Two parts exercise scatter-gather.
    let (a, b) = bytes.split_at(len / 3);
    [a, b].into_iter().map(Buf::copy_of).collect()
}

pub(crate) fn write(offset: u64, data: &[u8]) -> ObjectOp {
    ObjectOp::Write { offset, data: Buf::copy_of(data).into() }
}

pub(crate) fn zero(offset: u64, len: u64) -> ObjectOp {
    ObjectOp::Zero { extent: Extent::new(offset, len) }
}

pub(crate) fn pair(key: &str, value: &str) -> (Vec<u8>, Vec<u8>) {
    (key.into(), value.into())
}
