//! Random steps for [`compare`](super::compare).

use forebay_block::Extent;
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};

/// Objects that the steps work on.
pub(super) const OBJECTS: u8 = 3;
/// Offsets and sizes stay below this, in bytes.
const SPAN: u64 = 96 * 1024;

/// One step.
#[derive(Debug, Clone)]
pub enum Step {
    /// Transactions given in one go, and waited for only then.
    Submit(Vec<Submit>),
    /// Takes a snapshot of all objects.
    Snap,
    /// Gives up one of the snapshots there are, by its place among them.
    SnapRemove(u8),
    /// Flushes.
    Flush,
}

/// One transaction.
#[derive(Debug, Clone)]
pub struct Submit {
    /// On which object.
    pub object: u8,
    /// Guards, before all else.
    pub guards: Vec<Guard>,
    /// What is changed.
    pub ops: Vec<StepOp>,
    /// Durable before it is answered.
    pub durable: bool,
}

/// A guard, made to hold or not at the time when its step begins.
#[derive(Debug, Clone)]
pub enum Guard {
    /// The object exists.
    Exists,
    /// Its version; holding, it is only used for a transaction submitted alone.
    Version {
        /// The one it has.
        holds: bool,
    },
    /// Its bytes.
    Compare {
        /// Where.
        extent: Extent,
        /// Those it has.
        holds: bool,
    },
    /// One of its keys.
    Kv {
        /// Key.
        key: u8,
        /// The value it has.
        holds: bool,
    },
    /// It does not exist; creates it.
    CreateNew,
}

/// A change.
#[derive(Debug, Clone)]
pub enum StepOp {
    /// Creates the object.
    Create,
    /// Writes a pattern.
    Write(Extent, u8),
    /// Replaces the content by so many bytes of a pattern.
    WriteFull(u64, u8),
    /// Zeroes.
    Zero(Extent),
    /// Sets the size.
    Truncate(u64),
    /// Removes the object.
    Remove,
    /// Sets keys.
    KvSet(Vec<(u8, u8)>),
    /// Removes keys.
    KvRemove(Vec<u8>),
    /// Rolls back to one of the snapshots there are, by its place among them.
    Rollback(u8),
}

/// Up to `max` random steps.
pub fn steps(max: usize) -> impl Strategy<Value = Vec<Step>> {
    prop::collection::vec(step(), 1..=max)
}

/// The steps that belong to a seed, for simulations that replay from one.
pub fn steps_from_seed(seed: u64, max: usize) -> Vec<Step> {
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&seed.to_le_bytes());
    let rng = TestRng::from_seed(RngAlgorithm::ChaCha, &bytes);
    let mut runner = TestRunner::new_with_rng(Config::default(), rng);
    steps(max).new_tree(&mut runner).expect("nothing here is filtered").current()
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        12 => prop::collection::vec(submit(), 1..6).prop_map(Step::Submit),
        2 => Just(Step::Snap),
        1 => any::<u8>().prop_map(Step::SnapRemove),
        1 => Just(Step::Flush),
    ]
}

fn submit() -> impl Strategy<Value = Submit> {
    let guards = prop_oneof![3 => Just(vec![]), 1 => prop::collection::vec(guard(), 1..3)];
    let ops = prop_oneof![6 => prop::collection::vec(op(), 1..2), 4 => prop::collection::vec(op(), 0..5)];
    (0..OBJECTS, guards, ops, prop::bool::weighted(0.1)).prop_map(|(object, guards, ops, durable)| Submit {
        object,
        guards,
        ops,
        durable,
    })
}

fn guard() -> impl Strategy<Value = Guard> {
    let holds = || prop::bool::weighted(0.8);
    prop_oneof![
        Just(Guard::Exists),
        holds().prop_map(|holds| Guard::Version { holds }),
        (extent(), holds()).prop_map(|(extent, holds)| Guard::Compare { extent, holds }),
        (0..8u8, holds()).prop_map(|(key, holds)| Guard::Kv { key, holds }),
        Just(Guard::CreateNew),
    ]
}

fn op() -> impl Strategy<Value = StepOp> {
    prop_oneof![
        1 => Just(StepOp::Create),
        10 => (extent(), 0..250u8).prop_map(|(extent, seed)| StepOp::Write(extent, seed)),
        1 => (offset(), any::<u8>()).prop_map(|(len, seed)| StepOp::WriteFull(len, seed)),
        4 => extent().prop_map(StepOp::Zero),
        3 => offset().prop_map(StepOp::Truncate),
        1 => Just(StepOp::Remove),
        3 => prop::collection::vec((0..8u8, any::<u8>()), 1..4).prop_map(StepOp::KvSet),
        1 => prop::collection::vec(0..8u8, 1..3).prop_map(StepOp::KvRemove),
        1 => any::<u8>().prop_map(StepOp::Rollback),
    ]
}

/// Often at or beside a boundary of blocks, where mistakes live.
fn offset() -> impl Strategy<Value = u64> {
    prop_oneof![
        (0..SPAN / 4096).prop_map(|block| block * 4096),
        (1..SPAN / 4096, 0..3u64).prop_map(|(block, by)| block * 4096 - 1 + by),
        0..SPAN,
    ]
}

fn extent() -> impl Strategy<Value = Extent> {
    (offset(), offset(), any::<bool>()).prop_map(|(a, b, short)| {
        if short {
            return Extent::new(a, b % 6000);
        }
        Extent::new(a.min(b), a.abs_diff(b))
    })
}
