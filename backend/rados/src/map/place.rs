//! Placement: maps an object name to the OSDs that store it.

use forebay_messenger::wire::{MalformedPayload, PayloadReader, PayloadWriter};

use super::osdmap::OsdMap;
use super::pool::{PgPool, PoolKind, pool_flags};
use crate::crush::hash::{hash_name, hash2};
use crate::crush::{ITEM_NONE, WEIGHT_ONE};
use crate::denc::WriterExt;

/// Separator between namespace and object name in hash input.
const NAMESPACE_SEPARATOR: u8 = 0x1f;

/// Placement group: pool id and PG number (or, in raw form, any hash, of which only some bits count).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PgId {
    /// Pool id.
    pub pool: i64,
    /// PG number.
    pub seed: u32,
}

impl std::fmt::Display for PgId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}.{:x}", self.pool, self.seed)
    }
}

impl PgId {
    /// Decodes a placement group.
    pub(crate) fn decode(from: &mut PayloadReader<'_>) -> Result<Self, MalformedPayload> {
        if from.u8()? != 1 {
            return Err(from.malformed());
        }
        let (pool, seed) = (from.u64()? as i64, from.u32()?);
        // Obsolete preferred OSD.
        from.u32()?;
        Ok(Self { pool, seed })
    }

    /// Appends the encoded placement group.
    pub(crate) fn encode(self, out: &mut PayloadWriter) {
        out.u8(1).i64(self.pool).u32(self.seed).i32(-1);
    }
}

/// Placement of a placement group.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Mapping {
    /// Up set: OSDs assigned by CRUSH; [`ITEM_NONE`] for a shard without an OSD.
    pub up: Vec<i32>,
    /// Primary of the up set; -1 if there is none.
    pub up_primary: i32,
    /// Acting set: OSDs currently responsible.
    pub acting: Vec<i32>,
    /// Acting primary, which receives requests; -1 if there is none.
    pub primary: i32,
}

impl Mapping {
    /// Returns the shard of the primary in erasure-coded pools; -1 in replicated ones.
    pub fn primary_shard(&self, pool: &PgPool) -> i8 {
        match pool.kind {
            PoolKind::Replicated => -1,
            PoolKind::Erasure => self.acting.iter().position(|&osd| osd == self.primary).map_or(-1, |at| at as i8),
        }
    }
}

/// Returns `x` modulo a number that may grow: when `b` grows, values move only to new numbers.
fn stable_mod(x: u32, b: u32) -> u32 {
    let mask = b.checked_next_power_of_two().map_or(u32::MAX, |power| power - 1);
    if x & mask < b { x & mask } else { x & (mask >> 1) }
}

impl PgPool {
    /// Hashes an object name, or its locator key, within its namespace.  Returns `None` for an unknown hash function.
    pub fn hash_object(&self, namespace: &str, name: &str) -> Option<u32> {
        if namespace.is_empty() {
            return hash_name(self.hash, name.as_bytes());
        }
        let mut text = Vec::with_capacity(namespace.len() + 1 + name.len());
        text.extend_from_slice(namespace.as_bytes());
        text.push(NAMESPACE_SEPARATOR);
        text.extend_from_slice(name.as_bytes());
        hash_name(self.hash, &text)
    }

    /// Returns the PG number of a hash.
    pub fn group(&self, hash: u32) -> u32 {
        stable_mod(hash, self.pg_num)
    }

    /// Returns the CRUSH input of a placement group.
    fn placement_seed(&self, pg: PgId) -> u32 {
        let seed = stable_mod(pg.seed, self.pgp_num);
        if self.has(pool_flags::HASH_PS_POOL) { hash2(seed, pg.pool as u32) } else { seed.wrapping_add(pg.pool as u32) }
    }
}

impl OsdMap {
    /// Returns the placement of a placement group.  `None` if its pool does not exist.
    pub fn map_pg(&self, pg: PgId) -> Option<Mapping> {
        let pool = self.pools.get(&pg.pool)?;
        let pg = PgId { seed: pool.group(pg.seed), ..pg };
        let seed = pool.placement_seed(pg);
        let mut up = self.crush.place(pool.rule as usize, seed, pool.size as usize, &self.weights, pg.pool);
        self.keep(pool, &mut up, |osd| self.exists(osd));
        self.apply_upmap(pg, &mut up);
        self.keep(pool, &mut up, |osd| self.is_up(osd));
        let up_primary = self.apply_affinity(pool, seed, &mut up);
        let (mut acting, mut primary) = self.temporary(pool, pg);
        if acting.is_empty() {
            acting = up.clone();
            if primary < 0 {
                primary = up_primary;
            }
        }
        Some(Mapping { up, up_primary, acting, primary })
    }

    /// Returns an error if a pool uses features that this client does not know, as its objects would be looked for in
    /// the wrong place.
    pub fn check_pool(&self, pool: &PgPool) -> Result<(), String> {
        if !self.crush.knows_rule(pool.rule as usize) {
            return Err(format!(
                "its CRUSH rule {} is not there, or has steps that this client does not know",
                pool.rule
            ));
        }
        if hash_name(pool.hash, b"").is_none() {
            return Err(format!("it hashes names by method {}, which this client does not know", pool.hash));
        }
        if pool.has(pool_flags::EC_OPTIMIZATIONS) {
            return Err(
                "it has the optimizations of erasure codes that came with Tentacle (allow_ec_optimizations), whose \
                        temporary placements this client does not know"
                    .into(),
            );
        }
        Ok(())
    }

    /// Removes OSDs for which `keep` is false, or empties their positions if the pool has fixed positions.
    fn keep(&self, pool: &PgPool, osds: &mut Vec<i32>, keep: impl Fn(i32) -> bool) {
        if pool.shifts() {
            osds.retain(|&osd| keep(osd));
        } else {
            osds.iter_mut().filter(|osd| !keep(**osd)).for_each(|osd| *osd = ITEM_NONE);
        }
    }

    /// Returns whether the OSD is in the map and marked out (weight 0).
    fn is_out(&self, osd: i32) -> bool {
        osd != ITEM_NONE && usize::try_from(osd).ok().and_then(|osd| self.weights.get(osd)) == Some(&0)
    }

    /// Applies upmap exceptions of the balancer or the operator.
    fn apply_upmap(&self, pg: PgId, osds: &mut Vec<i32>) {
        if let Some(instead) = self.upmap.get(&pg) {
            // A single target that is out voids the whole exception, including those behind it.
            if instead.iter().any(|&osd| self.is_out(osd)) {
                return;
            }
            osds.clone_from(instead);
        }
        for &(from, to) in self.upmap_items.get(&pg).into_iter().flatten() {
            if osds.contains(&to) || self.is_out(to) {
                continue;
            }
            if let Some(place) = osds.iter_mut().find(|osd| **osd == from) {
                *place = to;
            }
        }
        if let Some(&primary) = self.upmap_primaries.get(&pg) {
            let is_in = usize::try_from(primary).ok().and_then(|osd| self.weights.get(osd)).is_some_and(|&w| w != 0);
            if is_in && let Some(at) = osds.iter().position(|&osd| osd == primary) {
                osds.swap(0, at);
            }
        }
    }

    /// Selects the primary; OSDs with reduced affinity are skipped for a share of the placement groups.
    fn apply_affinity(&self, pool: &PgPool, seed: u32, osds: &mut [i32]) -> i32 {
        let first = osds.iter().copied().find(|&osd| osd != ITEM_NONE).unwrap_or(-1);
        let affinity = |osd: i32| self.affinities.get(osd as usize).copied().unwrap_or(WEIGHT_ONE);
        if !osds.iter().any(|&osd| osd != ITEM_NONE && affinity(osd) != WEIGHT_ONE) {
            return first;
        }
        let willing = |osd: i32| affinity(osd) >= WEIGHT_ONE || (hash2(seed, osd as u32) >> 16) < affinity(osd);
        let place = osds.iter().position(|&osd| osd != ITEM_NONE && willing(osd));
        // Without a willing OSD, the first one is primary.
        let Some(place) = place.or_else(|| osds.iter().position(|&osd| osd != ITEM_NONE)) else { return first };
        let primary = osds[place];
        if pool.shifts() {
            osds[..=place].rotate_right(1);
        }
        primary
    }

    /// Returns the temporary acting set and its primary; empty if there is no override.
    fn temporary(&self, pool: &PgPool, pg: PgId) -> (Vec<i32>, i32) {
        let mut acting = self.pg_temp.get(&pg).cloned().unwrap_or_default();
        self.keep(pool, &mut acting, |osd| self.is_up(osd));
        let primary = match self.primary_temp.get(&pg) {
            Some(&primary) => primary,
            None => acting.iter().copied().find(|&osd| osd != ITEM_NONE).unwrap_or(-1),
        };
        (acting, primary)
    }
}

#[cfg(test)]
mod tests {
    use super::super::osdmap::state;
    use super::super::tests::sample;
    use super::*;

    #[test]
    fn namespaces_are_apart_from_names() {
        let pool = sample().pools[&4].clone();
        let hash = |namespace, name| pool.hash_object(namespace, name).expect("a known hash");
        assert_ne!(hash("a", "bc"), hash("ab", "c"));
        assert_ne!(hash("a", "b"), hash("", "ab"));
        assert_eq!(hash("a", "b"), hash("", "a\u{1f}b"), "as Ceph joins them");
    }

    #[test]
    fn who_is_down_takes_no_requests_while_a_group_moves() {
        let mut map = sample();
        map.states = vec![state::EXISTS, state::EXISTS | state::UP, state::EXISTS | state::UP];
        map.weights = vec![WEIGHT_ONE; 3];
        let pg = PgId { pool: 4, seed: 3 };
        map.pg_temp.insert(pg, vec![0, 2, 1]);
        let place = map.map_pg(pg).expect("a pool");
        assert_eq!((place.acting, place.primary), (vec![2, 1], 2));
        map.primary_temp.insert(pg, 1);
        assert_eq!(map.map_pg(pg).expect("a pool").primary, 1);
    }

    #[test]
    fn groups_split_only_into_new_ones() {
        for b in 1..200 {
            for x in (0..2000).map(|x: u32| x.wrapping_mul(0x9e37_79b9)) {
                let (before, after) = (stable_mod(x, b), stable_mod(x, b + 1));
                assert!(before < b && (after == before || after == b));
            }
        }
    }
}
