//! CRUSH placement: buckets draw items, and rules descend the hierarchy.

use std::cell::Cell;
use std::collections::BTreeMap;

use super::hash::{hash2, hash3, hash4};
use super::log::ln;
use super::{Alg, Bucket, ChooseArg, CrushMap, ITEM_NONE, RuleStep, WEIGHT_ONE};

/// Position that is not decided yet.
const UNDECIDED: i32 = 0x7fff_fffe;
/// Maximum number of attempts, regardless of the map.
const TRIES_MAX: u32 = 5000;

/// Maximum number of items examined per input: hundreds of times what any realistic map needs.
const LOOKS_MAX: u64 = if cfg!(any(fuzzing, feature = "fuzz")) { 1 << 19 } else { 1 << 28 };

/// State that is constant for one input.
struct Input<'a> {
    /// Remaining number of items that may be examined.
    looks: Cell<u64>,
    map: &'a CrushMap,
    weights: &'a [u32],
    args: Option<&'a BTreeMap<u32, ChooseArg>>,
    x: u32,
}

/// Retry limits, from the map and the rule's steps.
struct Tries {
    total: u32,
    leaf: u32,
    local: u32,
    local_fallback: u32,
    vary_r: u32,
    stable: bool,
}

pub(super) fn place(
    map: &CrushMap,
    rule: usize,
    x: u32,
    max: usize,
    weights: &[u32],
    args: Option<&BTreeMap<u32, ChooseArg>>,
) -> Vec<i32> {
    let Some(Some(steps)) = map.rules.get(rule) else { return Vec::new() };
    let input = Input { looks: Cell::new(LOOKS_MAX), map, weights, args, x };
    let tunables = &map.tunables;
    let mut tries = Tries {
        // The tunable counts retries, not attempts.
        total: tunables.total_tries.saturating_add(1).min(TRIES_MAX),
        leaf: 0,
        local: tunables.local_tries.min(TRIES_MAX),
        local_fallback: tunables.local_fallback_tries.min(TRIES_MAX),
        vary_r: tunables.vary_r,
        stable: tunables.stable,
    };
    let mut working: Vec<i32> = Vec::new();
    let mut result = Vec::with_capacity(max);
    let at_least =
        |value: i32, least: i32| u32::try_from(value).ok().filter(|_| value >= least).map(|v| v.min(TRIES_MAX));
    for step in steps {
        match *step {
            RuleStep::Take(item) => {
                let known = if item >= 0 { item < map.devices_max } else { map.bucket(item).is_some() };
                if known {
                    working = vec![item];
                }
            }
            RuleStep::SetTries(value) => tries.total = at_least(value, 1).unwrap_or(tries.total),
            RuleStep::SetLeafTries(value) => tries.leaf = at_least(value, 1).unwrap_or(tries.leaf),
            RuleStep::SetLocalTries(value) => tries.local = at_least(value, 0).unwrap_or(tries.local),
            RuleStep::SetLocalFallbackTries(value) => {
                tries.local_fallback = at_least(value, 0).unwrap_or(tries.local_fallback);
            }
            RuleStep::SetVaryR(value) => tries.vary_r = at_least(value, 0).unwrap_or(tries.vary_r),
            RuleStep::SetStable(value) if value >= 0 => tries.stable = value > 0,
            RuleStep::Choose { firstn, leaf, count, kind } => {
                working = input.choose_step(&working, &tries, (firstn, leaf, count, kind), max);
            }
            RuleStep::Emit => {
                let room = max - result.len();
                result.extend(working.drain(..).take(room));
                working.clear();
            }
            RuleStep::SetStable(_) | RuleStep::Noop | RuleStep::Unknown(_) => {}
        }
    }
    // Placements that exceed the limit have no result.
    if input.looks.get() == 0 { Vec::new() } else { result }
}

impl Input<'_> {
    /// Performs one choose step, from each item that the previous step selected.
    fn choose_step(
        &self,
        working: &[i32],
        tries: &Tries,
        (firstn, leaf, count, kind): (bool, bool, i32, i32),
        max: usize,
    ) -> Vec<i32> {
        let mut all = Vec::with_capacity(max);
        for &from in working {
            // Zero and negative counts are relative to the result size.
            let wanted = if count > 0 { i64::from(count) } else { i64::from(count) + max as i64 };
            if wanted <= 0 {
                continue;
            }
            let Some(bucket) = self.map.bucket(from) else { continue };
            let room = max - all.len();
            if firstn {
                let leaf_tries = match (tries.leaf, self.map.tunables.descend_once) {
                    (0, true) => 1,
                    (0, false) => tries.total,
                    (said, _) => said,
                };
                let mut out = Vec::new();
                let mut leaves = leaf.then(Vec::new);
                let reps = 0..wanted.min(i64::from(u32::MAX)) as u32;
                self.firstn(bucket, reps, kind, (&mut out, leaves.as_mut()), room, tries, (tries.total, leaf_tries), 0);
                all.extend(leaves.unwrap_or(out));
            } else {
                let places = room.min(wanted as usize);
                let mut out = vec![UNDECIDED; places];
                let mut leaves = leaf.then(|| vec![UNDECIDED; places]);
                let leaf_tries = tries.leaf.max(1);
                self.indep(
                    bucket,
                    (0, places),
                    wanted as u32,
                    kind,
                    (&mut out, leaves.as_deref_mut()),
                    (tries.total, leaf_tries),
                    0,
                );
                all.extend(leaves.unwrap_or(out));
            }
        }
        all
    }

    /// Chooses distinct items of a type, in the order found; later ones move up if one is rejected (`firstn`).
    ///
    /// `out` has the items found so far, and `leaves` their devices, if requested.
    #[allow(clippy::too_many_arguments)]
    fn firstn(
        &self,
        start: &Bucket,
        reps: std::ops::Range<u32>,
        kind: i32,
        (out, mut leaves): (&mut Vec<i32>, Option<&mut Vec<i32>>),
        mut room: usize,
        tries: &Tries,
        (total, leaf_tries): (u32, u32),
        parent_r: u32,
    ) {
        'reps: for rep in reps {
            if room == 0 {
                break;
            }
            let mut failures = 0;
            let item = 'descent: loop {
                let mut bucket = start;
                let mut local_failures = 0;
                loop {
                    let r = rep.wrapping_add(parent_r).wrapping_add(failures);
                    let size = bucket.items.len() as u32;
                    let mut collides = false;
                    let mut found = None;
                    if size > 0 {
                        let search = tries.local_fallback > 0
                            && local_failures >= size >> 1
                            && local_failures > tries.local_fallback;
                        let item = if search && self.may_look(bucket) {
                            permuted(bucket, self.x, r)
                        } else {
                            self.draw(bucket, r, out.len())
                        };
                        if item >= self.map.devices_max {
                            continue 'reps;
                        }
                        let deeper = self.map.bucket(item);
                        let found_kind = if item < 0 { deeper.map_or(-1, |bucket| bucket.kind) } else { 0 };
                        if found_kind != kind {
                            let Some(deeper) = deeper else { continue 'reps };
                            bucket = deeper;
                            continue;
                        }
                        collides = out.contains(&item);
                        let ok = !collides
                            && leaves.as_deref_mut().is_none_or(|leaves| match deeper {
                                Some(deeper) => {
                                    let r = if tries.vary_r > 0 { r >> (tries.vary_r - 1).min(31) } else { 0 };
                                    let found = leaves.len();
                                    let first = if tries.stable { 0 } else { found as u32 };
                                    let reps = first..first + 1;
                                    self.firstn(deeper, reps, 0, (leaves, None), room, tries, (leaf_tries, 0), r);
                                    leaves.len() > found
                                }
                                None => {
                                    leaves.push(item);
                                    true
                                }
                            });
                        if ok {
                            if found_kind == 0 && self.is_out(item) {
                                // Remove its leaf entry as well.
                                if let Some(leaves) = leaves.as_deref_mut() {
                                    leaves.truncate(out.len());
                                }
                            } else {
                                found = Some(item);
                            }
                        }
                    }
                    if let Some(item) = found {
                        break 'descent item;
                    }
                    failures += 1;
                    local_failures += 1;
                    let again_here = (collides && local_failures <= tries.local)
                        || (tries.local_fallback > 0 && local_failures <= size + tries.local_fallback);
                    if again_here {
                        continue;
                    }
                    if failures < total {
                        continue 'descent;
                    }
                    continue 'reps;
                }
            };
            out.push(item);
            room -= 1;
        }
    }

    /// Chooses items of a type for fixed positions (`indep`): a position that cannot be filled stays empty, without
    /// effect on the others.
    #[allow(clippy::too_many_arguments)]
    fn indep(
        &self,
        start: &Bucket,
        (first, count): (usize, usize),
        wanted: u32,
        kind: i32,
        (out, mut leaves): (&mut [i32], Option<&mut [i32]>),
        (total, leaf_tries): (u32, u32),
        parent_r: u32,
    ) {
        let places = first..first + count;
        for place in places.clone() {
            out[place] = UNDECIDED;
            if let Some(leaves) = leaves.as_deref_mut() {
                leaves[place] = UNDECIDED;
            }
        }
        for failures in 0..total {
            if places.clone().all(|place| out[place] != UNDECIDED) {
                break;
            }
            for place in places.clone() {
                if out[place] != UNDECIDED {
                    continue;
                }
                let mut bucket = start;
                loop {
                    let size = bucket.items.len() as u32;
                    let stride = if matches!(bucket.alg, Alg::Uniform) && size.is_multiple_of(wanted) {
                        wanted.wrapping_add(1)
                    } else {
                        wanted
                    };
                    let r = (place as u32).wrapping_add(parent_r).wrapping_add(stride.wrapping_mul(failures));
                    if size == 0 {
                        break;
                    }
                    let item = self.draw(bucket, r, first);
                    let deeper = self.map.bucket(item);
                    let found_kind = if item < 0 { deeper.map_or(-1, |bucket| bucket.kind) } else { 0 };
                    let nowhere = item >= self.map.devices_max || (found_kind != kind && deeper.is_none());
                    if nowhere {
                        out[place] = ITEM_NONE;
                        if let Some(leaves) = leaves.as_deref_mut() {
                            leaves[place] = ITEM_NONE;
                        }
                        break;
                    }
                    if found_kind != kind {
                        bucket = deeper.expect("looked at above");
                        continue;
                    }
                    if out[places.clone()].contains(&item) {
                        break;
                    }
                    if let Some(leaves) = leaves.as_deref_mut() {
                        match deeper {
                            Some(deeper) => {
                                self.indep(deeper, (place, 1), wanted, 0, (leaves, None), (leaf_tries, 0), r);
                                if leaves[place] == ITEM_NONE {
                                    break;
                                }
                            }
                            None => leaves[place] = item,
                        }
                    }
                    if found_kind == 0 && self.is_out(item) {
                        break;
                    }
                    out[place] = item;
                    break;
                }
            }
        }
        for place in places {
            if out[place] == UNDECIDED {
                out[place] = ITEM_NONE;
            }
            if let Some(leaves) = leaves.as_deref_mut()
                && leaves[place] == UNDECIDED
            {
                leaves[place] = ITEM_NONE;
            }
        }
    }

    /// Counts the items of a bucket as examined; returns false if the limit is reached.
    fn may_look(&self, bucket: &Bucket) -> bool {
        self.looks.set(self.looks.get().saturating_sub(bucket.items.len() as u64));
        self.looks.get() > 0
    }

    /// Returns whether a device is out for this input, fully or because of its reduced weight.
    fn is_out(&self, device: i32) -> bool {
        match self.weights.get(device as usize) {
            None | Some(0) => true,
            Some(&weight) => weight < WEIGHT_ONE && hash2(self.x, device as u32) & 0xffff >= weight,
        }
    }

    /// Draws an item of a nonempty bucket.
    fn draw(&self, bucket: &Bucket, r: u32, position: usize) -> i32 {
        if !self.may_look(bucket) {
            return ITEM_NONE;
        }
        let (x, id) = (self.x, bucket.id as u32);
        match &bucket.alg {
            Alg::Uniform => permuted(bucket, x, r),
            Alg::List { weights, sums } => {
                for (place, &item) in bucket.items.iter().enumerate().rev() {
                    let draw = u64::from(hash4(x, item as u32, r, id) & 0xffff) * u64::from(sums[place]);
                    if draw >> 16 < u64::from(weights[place]) {
                        return item;
                    }
                }
                bucket.items[0]
            }
            Alg::Tree { nodes } => {
                let mut node = nodes.len() >> 1;
                while node & 1 == 0 {
                    let draw = (u64::from(hash4(x, node as u32, r, id)) * u64::from(nodes[node])) >> 32;
                    let half = 1 << (node.trailing_zeros() - 1);
                    node = if draw < u64::from(nodes[node - half]) { node - half } else { node + half };
                }
                // Inconsistent tree weights can lead past the last item.
                bucket.items.get(node >> 1).copied().unwrap_or(bucket.items[0])
            }
            Alg::Straw { straws } => {
                let draw = |place: usize| {
                    u64::from(hash3(x, bucket.items[place] as u32, r) & 0xffff) * u64::from(straws[place])
                };
                highest(bucket, draw)
            }
            Alg::Straw2 { weights } => {
                let arg = self.args.and_then(|args| args.get(&((-1 - bucket.id) as u32)));
                let set = arg.and_then(|arg| arg.weight_sets.get(position).or(arg.weight_sets.last()));
                let weights = set.unwrap_or(weights);
                let ids = arg.map(|arg| &arg.ids).filter(|ids| !ids.is_empty()).unwrap_or(&bucket.items);
                highest(bucket, |place| match weights[place] {
                    0 => i64::MIN,
                    weight => {
                        let draw = hash3(x, ids[place] as u32, r) & 0xffff;
                        (ln(draw) as i64 - (1 << 48)) / i64::from(weight)
                    }
                })
            }
        }
    }
}

/// Returns the item with the highest draw; the first one of several.
fn highest<T: Ord>(bucket: &Bucket, draw: impl Fn(usize) -> T) -> i32 {
    let mut best = (draw(0), 0);
    for place in 1..bucket.items.len() {
        let drawn = draw(place);
        if drawn > best.0 {
            best = (drawn, place);
        }
    }
    bucket.items[best.1]
}

/// Returns the item at position `r` of a permutation of the bucket, seeded by `x`.
fn permuted(bucket: &Bucket, x: u32, r: u32) -> i32 {
    let size = bucket.items.len() as u32;
    let place = r % size;
    let pick = |at: u32| hash3(x, bucket.id as u32, at) % (size - at);
    if place == 0 {
        return bucket.items[pick(0) as usize];
    }
    let mut order: Vec<u32> = (0..size).collect();
    for at in 0..=place.min(size - 2) {
        order.swap(at as usize, (at + pick(at)) as usize);
    }
    bucket.items[order[place as usize] as usize]
}
