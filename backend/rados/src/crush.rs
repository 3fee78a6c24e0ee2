//! CRUSH: computes the placement of a placement group from the cluster map.
//!
//! The algorithm is defined by the results of Ceph's implementation, which every client must reproduce.
//! `test/interop/rados-crush.sh` compares it with Debian's `crushtool`.  Pure: no I/O, no time, no randomness.

mod choose;
mod decode;
pub mod hash;
mod log;

use std::collections::BTreeMap;

/// Placeholder for a position of an erasure-coded placement that could not be filled.
pub const ITEM_NONE: i32 = 0x7fff_ffff;
/// Weight of a device that is fully in, and of a primary affinity of 1: 16.16 fixed point.
pub const WEIGHT_ONE: u32 = 0x1_0000;
/// Index of the choose-args for pools without their own.
const CHOOSE_ARGS_DEFAULT: i64 = -1;

/// Bucket algorithm, by which a bucket chooses among its items.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Alg {
    /// Uniform: all items have the same weight.
    Uniform,
    /// List, newest item last: weights, and cumulative weights from the first item on.
    List { weights: Vec<u32>, sums: Vec<u32> },
    /// Binary tree of weights.
    Tree { nodes: Vec<u32> },
    /// Straws of scaled length.
    Straw { straws: Vec<u32> },
    /// Straw2: exponentially distributed draws by weight.
    Straw2 { weights: Vec<u32> },
}

/// Bucket: a host, a rack, a root.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Bucket {
    pub(crate) id: i32,
    /// Bucket type id; devices have type 0.
    pub(crate) kind: i32,
    pub(crate) alg: Alg,
    pub(crate) items: Vec<i32>,
}

/// Step of a rule.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum RuleStep {
    Noop,
    Take(i32),
    Emit,
    Choose {
        firstn: bool,
        leaf: bool,
        count: i32,
        kind: i32,
    },
    SetTries(i32),
    SetLeafTries(i32),
    SetLocalTries(i32),
    SetLocalFallbackTries(i32),
    SetVaryR(i32),
    SetStable(i32),
    /// Step of a later release, unknown to this client.
    Unknown(u32),
}

/// Replacement of weights and ids of a bucket's items, for some pools.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct ChooseArg {
    /// Weights by position in the result; the last set applies to all further positions.
    pub(crate) weight_sets: Vec<Vec<u32>>,
    pub(crate) ids: Vec<i32>,
}

/// Tunables of the algorithm, set by the operator.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Tunables {
    pub(crate) local_tries: u32,
    pub(crate) local_fallback_tries: u32,
    pub(crate) total_tries: u32,
    pub(crate) descend_once: bool,
    pub(crate) vary_r: u32,
    pub(crate) stable: bool,
}

impl Default for Tunables {
    /// Returns the values for maps that predate tunables ("legacy").
    fn default() -> Self {
        Self { local_tries: 2, local_fallback_tries: 5, total_tries: 19, descend_once: false, vary_r: 0, stable: false }
    }
}

/// Device hierarchy of a cluster, and its placement rules.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CrushMap {
    /// Buckets, by `-1 - id`.
    buckets: Vec<Option<Bucket>>,
    rules: Vec<Option<Vec<RuleStep>>>,
    devices_max: i32,
    tunables: Tunables,
    choose_args: BTreeMap<i64, BTreeMap<u32, ChooseArg>>,
}

impl CrushMap {
    fn bucket(&self, id: i32) -> Option<&Bucket> {
        let place = usize::try_from(-1 - i64::from(id)).ok()?;
        self.buckets.get(place)?.as_ref()
    }

    /// Returns the number of rule slots; some may be unused.
    pub fn rules(&self) -> usize {
        self.rules.len()
    }

    /// Returns whether the rule exists and this client knows all of its steps.
    pub fn knows_rule(&self, rule: usize) -> bool {
        let known = |steps: &Vec<RuleStep>| steps.iter().all(|step| !matches!(step, RuleStep::Unknown(_)));
        self.rules.get(rule).and_then(Option::as_ref).is_some_and(known)
    }

    /// Chooses up to `max` devices for the input `x` by a rule.  `weights` has the reweight of each device in units of
    /// [`WEIGHT_ONE`]; `pool` selects the choose-args.  Returns an empty list if the rule does not exist or has unknown
    /// steps.
    pub fn place(&self, rule: usize, x: u32, max: usize, weights: &[u32], pool: i64) -> Vec<i32> {
        if !self.knows_rule(rule) {
            return Vec::new();
        }
        let args = self.choose_args.get(&pool).or_else(|| self.choose_args.get(&CHOOSE_ARGS_DEFAULT));
        choose::place(self, rule, x, max, weights, args)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn copies_are_on_different_devices_that_are_in() {
        let items = (0..5).collect();
        let root = Bucket { id: -1, kind: 1, alg: Alg::Straw2 { weights: vec![WEIGHT_ONE; 5] }, items };
        let choose = |firstn| RuleStep::Choose { firstn, leaf: false, count: 0, kind: 0 };
        let rule = |firstn| Some(vec![RuleStep::Take(-1), choose(firstn), RuleStep::Emit]);
        let map = CrushMap {
            buckets: vec![Some(root)],
            rules: vec![rule(true), rule(false)],
            devices_max: 5,
            tunables: Tunables { total_tries: 50, ..Tunables::default() },
            ..CrushMap::default()
        };
        let weights = [WEIGHT_ONE, WEIGHT_ONE, 0, WEIGHT_ONE, WEIGHT_ONE];
        for (rule, x) in (0..2).flat_map(|rule| (0..500).map(move |x| (rule, x))) {
            let mut found = map.place(rule, x, 3, &weights, 1);
            assert_eq!(found.len(), 3, "rule {rule}, {x}");
            found.sort_unstable();
            found.dedup();
            assert_eq!(found.len(), 3, "rule {rule}, {x}: the same device twice");
            assert!(!found.contains(&2), "rule {rule}, {x}: a device that is out");
        }
    }
}
