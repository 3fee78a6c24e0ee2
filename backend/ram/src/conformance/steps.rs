//! Random steps for [`compare`](super::compare).

use forebay_block::Extent;
use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::{Config, RngAlgorithm, TestRng, TestRunner};

/// Number of objects that the steps work on.
pub(super) const OBJECTS: u8 = 3;
/// Upper bound of offsets and sizes, in bytes.
const SPAN: u64 = 96 * 1024;

/// Random step.
#[derive(Debug, Clone)]
pub enum RandomStep {
    /// Transactions submitted together, and awaited afterwards.
    Submit(Vec<Submit>),
    /// Takes a snapshot of all objects.
    Snap,
    /// Removes one of the existing snapshots, by its index.
    SnapRemove(u8),
    /// Flushes the backend.
    Flush,
}

/// Random transaction.
#[derive(Debug, Clone)]
pub struct Submit {
    /// Index of the object.
    pub object: u8,
    /// Guards, before all other steps.
    pub guards: Vec<Guard>,
    /// Operations of the transaction.
    pub ops: Vec<StepOp>,
    /// Durability required before the acknowledgement.
    pub durable: bool,
}

/// Guard, constructed to hold or to fail at the time when its step begins.
#[derive(Debug, Clone)]
pub enum Guard {
    /// Existence of the object.
    Exists,
    /// Version of the object; a guard that holds is only used for a transaction submitted alone.
    Version {
        /// True to assert the current version.
        holds: bool,
    },
    /// Bytes of the object.
    Compare {
        /// Range to compare.
        extent: Extent,
        /// True to compare with the current bytes.
        holds: bool,
    },
    /// Value of one key.
    Kv {
        /// Key to compare.
        key: u8,
        /// True to compare with the current value.
        holds: bool,
    },
    /// Exclusive creation of the object.
    CreateNew,
}

/// Random change.
#[derive(Debug, Clone)]
pub enum StepOp {
    /// Creates the object.
    Create,
    /// Writes a pattern.
    Write(Extent, u8),
    /// Replaces the content by this many bytes of a pattern.
    WriteFull(u64, u8),
    /// Zeroes a range.
    Zero(Extent),
    /// Sets the size.
    Truncate(u64),
    /// Removes the object.
    Remove,
    /// Sets keys.
    KvSet(Vec<(u8, u8)>),
    /// Removes keys.
    KvRemove(Vec<u8>),
    /// Rolls back to one of the existing snapshots, by its index.
    Rollback(u8),
}

/// Generates up to `max` random steps.
pub fn steps(max: usize) -> impl Strategy<Value = Vec<RandomStep>> {
    prop::collection::vec(step(), 1..=max)
}

/// Generates the steps of a seed, for simulations that replay from one.
pub fn steps_from_seed(seed: u64, max: usize) -> Vec<RandomStep> {
    let mut bytes = [0; 32];
    bytes[..8].copy_from_slice(&seed.to_le_bytes());
    let rng = TestRng::from_seed(RngAlgorithm::ChaCha, &bytes);
    let mut runner = TestRunner::new_with_rng(Config::default(), rng);
    steps(max).new_tree(&mut runner).expect("nothing here is filtered").current()
}

fn step() -> impl Strategy<Value = RandomStep> {
    prop_oneof![
        12 => prop::collection::vec(submit(), 1..6).prop_map(RandomStep::Submit),
        2 => Just(RandomStep::Snap),
        1 => any::<u8>().prop_map(RandomStep::SnapRemove),
        1 => Just(RandomStep::Flush),
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

/// Generates offsets, often at or beside a block boundary, where errors are likely.
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
