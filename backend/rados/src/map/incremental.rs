//! Incremental OSD map: changes from one epoch to the next (`OSDMap::Incremental`).

use std::collections::{BTreeMap, BTreeSet};

use forebay_messenger::wire::{EntityAddr, PayloadReader};

use super::blocklist::BlocklistChange;
use super::osdmap::{MapParts, OSDS_MAX, OsdMap, pg_list, pg_osd, pg_pairs, split, state, verify};
use super::place::PgId;
use super::pool::PgPool;
use super::{Epoch, Fsid, MapError};
use crate::crush::{CrushMap, WEIGHT_ONE};
use crate::denc::ReaderExt;

const WHAT: &str = "a change of the map of OSDs";

/// Incremental map.
#[derive(Debug, Clone, PartialEq)]
pub struct Incremental {
    /// Cluster fsid.
    pub fsid: Fsid,
    /// Epoch of the resulting map.
    pub epoch: Epoch,
    whole: Option<Box<OsdMap>>,
    crush: Option<Box<CrushMap>>,
    flags: Option<u32>,
    osds: Option<usize>,
    pools: Vec<(i64, PgPool)>,
    names: Vec<(i64, String)>,
    pools_gone: BTreeSet<i64>,
    up: Vec<(u32, Vec<EntityAddr>)>,
    states: Vec<(u32, u32)>,
    weights: Vec<(u32, u32)>,
    pg_temp: Vec<(PgId, Vec<i32>)>,
    primary_temp: Vec<(PgId, i32)>,
    affinities: Vec<(u32, u32)>,
    upmap: Vec<(PgId, Vec<i32>)>,
    upmap_gone: Vec<PgId>,
    upmap_items: Vec<(PgId, Vec<(i32, i32)>)>,
    upmap_items_gone: Vec<PgId>,
    upmap_primaries: Vec<(PgId, i32)>,
    upmap_primaries_gone: Vec<PgId>,
    /// `None` if it could not be read.
    blocklist: Option<BlocklistChange>,
}

impl Incremental {
    /// Decodes an incremental map of Nautilus or later, and verifies its checksum.
    pub fn decode(bytes: &[u8]) -> Result<Self, MapError> {
        let (change, checksum) = Self::read(bytes)?;
        verify(checksum, change.epoch)?;
        Ok(change)
    }

    /// Decodes an incremental map regardless of its checksum, for fuzzing and tests.
    #[cfg(any(fuzzing, test, feature = "fuzz"))]
    pub(crate) fn decode_unverified(bytes: &[u8]) -> Result<Self, MapError> {
        Self::read(bytes).map(|(change, _)| change)
    }

    fn read(bytes: &[u8]) -> Result<(Self, Option<(u32, u32)>), MapError> {
        let MapParts { version, mut client, osds: blocklist, checksum } = split(bytes, WHAT, BlocklistChange::decode)?;
        let from = &mut client;
        let (fsid, epoch) = (from.array()?, from.u32()?);
        if version < 7 {
            return Err(from.malformed().into());
        }
        // Modification time; highest pool id.
        from.take(8 + 8)?;
        let flags = from.i32()?;
        let whole = from.blob()?;
        let crush = from.blob()?;
        let osds = from.i32()?;
        if osds > OSDS_MAX as i32 {
            return Err(from.malformed().into());
        }
        let numbers = |from: &mut PayloadReader<'_>| Ok((from.u32()?, from.u32()?));
        let mut change = Self {
            fsid,
            epoch,
            whole: if whole.is_empty() { None } else { Some(Box::new(OsdMap::decode(whole)?)) },
            crush: if crush.is_empty() { None } else { Some(Box::new(CrushMap::decode(crush)?)) },
            flags: u32::try_from(flags).ok(),
            osds: usize::try_from(osds).ok(),
            pools: from.vec(|from| Ok((from.i64()?, PgPool::decode(from)?)))?,
            names: from.vec(|from| Ok((from.i64()?, from.text()?)))?,
            pools_gone: from.vec(|from| from.i64())?.into_iter().collect(),
            up: from.vec(|from| Ok((from.u32()?, EntityAddr::decode_vector(from)?)))?,
            states: from.vec(numbers)?,
            weights: from.vec(numbers)?,
            pg_temp: from.vec(pg_list)?,
            primary_temp: from.vec(pg_osd)?,
            affinities: from.vec(numbers)?,
            upmap: Vec::new(),
            upmap_gone: Vec::new(),
            upmap_items: Vec::new(),
            upmap_items_gone: Vec::new(),
            upmap_primaries: Vec::new(),
            upmap_primaries_gone: Vec::new(),
            blocklist,
        };
        // Erasure code profiles: new ones by name, and names of removed ones.
        from.map(|from| Ok((from.blob()?, from.map(|from| Ok((from.blob()?, from.blob()?)), |_| ())?)), |_| ())?;
        from.map(|from| from.blob(), |_| ())?;
        change.upmap = from.vec(pg_list)?;
        change.upmap_gone = from.vec(PgId::decode)?;
        change.upmap_items = from.vec(pg_pairs)?;
        change.upmap_items_gone = from.vec(PgId::decode)?;
        // Queues of snapshots being removed, and of purged ones.
        for _ in 0..2 {
            from.map(|from| Ok((from.i64()?, from.map(|from| from.take(16), |_| ())?)), |_| ())?;
        }
        if version >= 8 {
            from.take(16)?;
        }
        if version >= 9 {
            change.upmap_primaries = from.vec(pg_osd)?;
            change.upmap_primaries_gone = from.vec(PgId::decode)?;
        }
        Ok((change, checksum))
    }
}

fn change<K: Ord, V>(map: &mut BTreeMap<K, V>, all: Vec<(K, V)>, gone: impl Fn(&V) -> bool) {
    for (key, value) in all {
        if gone(&value) {
            map.remove(&key);
        } else {
            map.insert(key, value);
        }
    }
}

fn set<T>(all: &mut [T], osd: u32, value: T) {
    if let Some(place) = all.get_mut(osd as usize) {
        *place = value;
    }
}

impl OsdMap {
    /// Applies an incremental map, which advances this map to the next epoch.
    pub fn apply(&mut self, change: Incremental) -> Result<(), MapError> {
        if change.fsid != self.fsid {
            return Err(MapError::Cluster);
        }
        if change.epoch != self.epoch.wrapping_add(1) {
            return Err(MapError::Order { have: self.epoch, got: change.epoch });
        }
        if let Some(whole) = change.whole {
            *self = *whole;
            return Ok(());
        }
        self.epoch = change.epoch;
        self.flags = change.flags.unwrap_or(self.flags);
        if let Some(osds) = change.osds {
            self.resize(osds);
        }
        self.pools.extend(change.pools);
        self.names.extend(change.names);
        for pool in &change.pools_gone {
            self.pools.remove(pool);
            self.names.remove(pool);
        }
        for (osd, weight) in change.weights {
            set(&mut self.weights, osd, weight);
            // A nonzero weight implies that the OSD exists.
            if weight > 0
                && let Some(bits) = self.states.get_mut(osd as usize)
            {
                *bits |= state::EXISTS;
            }
        }
        if !change.affinities.is_empty() && self.affinities.is_empty() {
            self.affinities = vec![WEIGHT_ONE; self.states.len()];
        }
        for (osd, affinity) in change.affinities {
            set(&mut self.affinities, osd, affinity);
        }
        for (osd, bits) in change.states {
            // State bits to toggle; 0 is how old monitors mark an OSD down.
            let bits = if bits == 0 { state::UP } else { bits };
            let Some(now) = self.states.get_mut(osd as usize) else { continue };
            if *now & state::EXISTS != 0 && bits & state::EXISTS != 0 {
                // Destroyed: its state is reset.
                *now = 0;
                set(&mut self.addrs, osd, Vec::new());
                set(&mut self.affinities, osd, WEIGHT_ONE);
            } else {
                *now ^= bits;
            }
        }
        for (osd, addrs) in change.up {
            if let Some(now) = self.states.get_mut(osd as usize) {
                *now |= state::EXISTS | state::UP;
            }
            set(&mut self.addrs, osd, addrs);
        }
        let pools_gone = change.pools_gone;
        change_all(self, change.pg_temp, change.primary_temp, &pools_gone);
        if let Some(crush) = change.crush {
            self.crush = *crush;
        }
        self.upmap.extend(change.upmap);
        self.upmap_items.extend(change.upmap_items);
        self.upmap_primaries.extend(change.upmap_primaries);
        change.upmap_gone.iter().for_each(|pg| drop(self.upmap.remove(pg)));
        change.upmap_items_gone.iter().for_each(|pg| drop(self.upmap_items.remove(pg)));
        self.upmap_primaries.retain(|pg, _| !change.upmap_primaries_gone.contains(pg));
        self.blocklist.apply(change.blocklist);
        Ok(())
    }
}

/// Updates temporary placements: empty lists and negative OSD numbers remove them.
fn change_all(
    map: &mut OsdMap,
    pg_temp: Vec<(PgId, Vec<i32>)>,
    primary_temp: Vec<(PgId, i32)>,
    pools_gone: &BTreeSet<i64>,
) {
    change(&mut map.pg_temp, pg_temp, Vec::is_empty);
    change(&mut map.primary_temp, primary_temp, |&osd| osd < 0);
    if !pools_gone.is_empty() {
        map.pg_temp.retain(|pg, _| !pools_gone.contains(&pg.pool));
        map.primary_temp.retain(|pg, _| !pools_gone.contains(&pg.pool));
    }
}
