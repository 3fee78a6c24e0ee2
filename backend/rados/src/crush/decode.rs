//! Decoder for CRUSH maps as encoded by `CrushWrapper`. Validates the map, so that placement can rely on it.

use forebay_messenger::wire::{MalformedPayload, PayloadReader};

use super::{Alg, Bucket, ChooseArg, CrushMap, RuleStep, Tunables};
use crate::denc::ReaderExt;

const MAGIC: u32 = 0x0001_0000;
const WHAT: &str = "a CRUSH map";
/// Maximum number of copies that a step may choose.
const COPIES_MAX: u32 = 255;
/// Maximum number of buckets and of rules.
const COUNT_MAX: usize = 1 << 20;

impl CrushMap {
    /// Decodes a map.  Fields that later releases append are skipped.
    pub fn decode(bytes: &[u8]) -> Result<Self, MalformedPayload> {
        let mut from = PayloadReader::new(bytes, WHAT);
        let malformed = from.malformed();
        if from.u32()? != MAGIC {
            return Err(malformed);
        }
        let buckets = usize::try_from(from.i32()?).map_err(|_| malformed)?;
        let rules = from.u32()? as usize;
        let devices_max = from.i32()?;
        if buckets.max(rules) > COUNT_MAX || !(0..=COUNT_MAX as i32).contains(&devices_max) {
            return Err(malformed);
        }
        let mut map = Self { devices_max, ..Self::default() };
        for place in 0..buckets {
            map.buckets.push(bucket(&mut from, -1 - place as i32)?);
        }
        for _ in 0..rules {
            map.rules.push(rule(&mut from)?);
        }
        // Names of types, buckets and rules.
        for _ in 0..3 {
            names(&mut from)?;
        }
        map.tunables = tunables(&mut from)?;
        if !from.rest().is_empty() {
            // Device classes: of devices, their names, and the shadow buckets.
            from.map(|from| Ok((from.i32()?, from.i32()?)), |_| ())?;
            from.map(|from| Ok((from.i32()?, from.blob()?)), |_| ())?;
            from.map(|from| Ok((from.i32()?, from.map(|from| Ok((from.i32()?, from.i32()?)), |_| ())?)), |_| ())?;
        }
        if !from.rest().is_empty() {
            map.read_choose_args(&mut from)?;
        }
        map.check(malformed)?;
        Ok(map)
    }

    fn read_choose_args(&mut self, from: &mut PayloadReader<'_>) -> Result<(), MalformedPayload> {
        for _ in 0..from.count(12)? {
            let index = from.u64()? as i64;
            let mut args = std::collections::BTreeMap::new();
            for _ in 0..from.count(12)? {
                let bucket = from.u32()?;
                let mut arg = ChooseArg::default();
                for _ in 0..from.count(4)? {
                    arg.weight_sets.push(from.list()?);
                }
                arg.ids = from.list()?.into_iter().map(|id| id as i32).collect();
                args.insert(bucket, arg);
            }
            self.choose_args.insert(index, args);
        }
        Ok(())
    }

    /// Verifies that all items exist, that no bucket contains itself, and that choose-args match their buckets.
    fn check(&self, malformed: MalformedPayload) -> Result<(), MalformedPayload> {
        for bucket in self.buckets.iter().flatten() {
            for &item in &bucket.items {
                if item < 0 && self.bucket(item).is_none() {
                    return Err(malformed);
                }
            }
        }
        // Topological sort: a bucket is sound if all its items are; buckets left at the end are part of a cycle.
        let mut users: Vec<Vec<usize>> = vec![Vec::new(); self.buckets.len()];
        let mut open: Vec<usize> = vec![0; self.buckets.len()];
        for (place, bucket) in self.buckets.iter().enumerate() {
            for &item in bucket.iter().flat_map(|bucket| &bucket.items).filter(|&&item| item < 0) {
                users[(-1 - item) as usize].push(place);
                open[place] += 1;
            }
        }
        let mut sound: Vec<usize> = (0..open.len()).filter(|&place| open[place] == 0).collect();
        let mut count = 0;
        while let Some(place) = sound.pop() {
            count += 1;
            for &user in &users[place] {
                open[user] -= 1;
                if open[user] == 0 {
                    sound.push(user);
                }
            }
        }
        if count != self.buckets.len() {
            return Err(malformed);
        }
        for (&place, arg) in self.choose_args.values().flatten() {
            // An entry for a removed bucket is harmless.
            let Some(bucket) = self.buckets.get(place as usize).and_then(Option::as_ref) else { continue };
            let fits = |len: usize| len == bucket.items.len();
            if !arg.weight_sets.iter().all(|set| fits(set.len())) || !(arg.ids.is_empty() || fits(arg.ids.len())) {
                return Err(malformed);
            }
        }
        Ok(())
    }
}

fn bucket(from: &mut PayloadReader<'_>, id: i32) -> Result<Option<Bucket>, MalformedPayload> {
    let malformed = from.malformed();
    let alg = from.u32()?;
    if alg == 0 {
        return Ok(None);
    }
    let said = from.i32()?;
    let kind = i32::from(from.u16()?);
    let (again, hash) = (from.u8()?, from.u8()?);
    let _weight = from.u32()?;
    // Only one hash is defined.
    if said != id || u32::from(again) != alg || hash != 0 {
        return Err(malformed);
    }
    let items: Vec<i32> = from.list()?.into_iter().map(|item| item as i32).collect();
    let pairs = |from: &mut PayloadReader<'_>| -> Result<(Vec<u32>, Vec<u32>), MalformedPayload> {
        items
            .iter()
            .map(|_| Ok((from.u32()?, from.u32()?)))
            .collect::<Result<Vec<_>, _>>()
            .map(|all| all.into_iter().unzip())
    };
    let alg = match alg {
        1 => {
            from.u32()?;
            Alg::Uniform
        }
        2 => {
            let (weights, sums) = pairs(from)?;
            Alg::List { weights, sums }
        }
        3 => {
            // The number of nodes is stored in one byte.
            let count = usize::from(from.u8()?);
            let nodes = (0..count).map(|_| from.u32()).collect::<Result<Vec<_>, _>>()?;
            let enough = items.is_empty() || (count.is_power_of_two() && count >= 2 * items.len());
            if !enough {
                return Err(malformed);
            }
            Alg::Tree { nodes }
        }
        4 => {
            let (_, straws) = pairs(from)?;
            Alg::Straw { straws }
        }
        5 => Alg::Straw2 { weights: items.iter().map(|_| from.u32()).collect::<Result<_, _>>()? },
        _ => return Err(malformed),
    };
    Ok(Some(Bucket { id, kind, alg, items }))
}

fn rule(from: &mut PayloadReader<'_>) -> Result<Option<Vec<RuleStep>>, MalformedPayload> {
    if from.u32()? == 0 {
        return Ok(None);
    }
    let len = from.u32()? as usize;
    // Rule id, type, and obsolete minimum and maximum pool sizes.
    from.take(4)?;
    if len > from.rest().len() / 12 {
        return Err(from.malformed());
    }
    let step = |from: &mut PayloadReader<'_>| {
        let (op, one, two) = (from.u32()?, from.i32()?, from.i32()?);
        let choose = |firstn, leaf| RuleStep::Choose { firstn, leaf, count: one, kind: two };
        // A pool has up to 255 copies; larger magnitudes are invalid.
        if matches!(op, 2 | 3 | 6 | 7) && one.unsigned_abs() > COPIES_MAX {
            return Err(from.malformed());
        }
        Ok(match op {
            0 => RuleStep::Noop,
            1 => RuleStep::Take(one),
            2 => choose(true, false),
            3 => choose(false, false),
            4 => RuleStep::Emit,
            6 => choose(true, true),
            7 => choose(false, true),
            8 => RuleStep::SetTries(one),
            9 => RuleStep::SetLeafTries(one),
            10 => RuleStep::SetLocalTries(one),
            11 => RuleStep::SetLocalFallbackTries(one),
            12 => RuleStep::SetVaryR(one),
            13 => RuleStep::SetStable(one),
            other => RuleStep::Unknown(other),
        })
    };
    (0..len).map(|_| step(from)).collect::<Result<_, _>>().map(Some)
}

/// Skips a map from ids to names.  Very old maps have 64-bit keys, which are recognized because names are never empty.
fn names(from: &mut PayloadReader<'_>) -> Result<(), MalformedPayload> {
    for _ in 0..from.count(8)? {
        from.u32()?;
        let mut len = from.u32()? as usize;
        if len == 0 {
            len = from.u32()? as usize;
        }
        from.take(len)?;
    }
    Ok(())
}

fn tunables(from: &mut PayloadReader<'_>) -> Result<Tunables, MalformedPayload> {
    let mut tunables = Tunables::default();
    if !from.rest().is_empty() {
        tunables.local_tries = from.u32()?;
        tunables.local_fallback_tries = from.u32()?;
        tunables.total_tries = from.u32()?;
    }
    if !from.rest().is_empty() {
        tunables.descend_once = from.u32()? != 0;
    }
    if !from.rest().is_empty() {
        tunables.vary_r = from.u8()?.into();
    }
    if !from.rest().is_empty() {
        // Version of the straw calculation; the resulting lengths are in the map.
        from.u8()?;
    }
    if !from.rest().is_empty() {
        // Algorithms allowed for new buckets.
        from.u32()?;
    }
    if !from.rest().is_empty() {
        tunables.stable = from.u8()? != 0;
    }
    Ok(tunables)
}
