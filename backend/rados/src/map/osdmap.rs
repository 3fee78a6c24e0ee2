//! OSD map: OSDs and pools (`OSDMap`).

use std::collections::BTreeMap;

use forebay_accel::crc32c;
use forebay_messenger::wire::{EntityAddr, MalformedPayload, PayloadReader};

use super::blocklist::Blocklist;
use super::place::PgId;
use super::pool::PgPool;
use super::{Epoch, Fsid, MapError};
use crate::crush::CrushMap;
use crate::denc::ReaderExt;

const WHAT: &str = "a map of OSDs";
/// Maximum number of OSDs.
pub(super) const OSDS_MAX: u32 = 1 << 20;

/// Bits of [`OsdMap::flags`].
pub mod flags {
    /// Cluster is full.
    pub const FULL: u32 = 1 << 1;
    /// Reads are paused.
    pub const PAUSE_READS: u32 = 1 << 2;
    /// Writes are paused.
    pub const PAUSE_WRITES: u32 = 1 << 3;
}

/// State bits of an OSD.
pub(super) mod state {
    pub const EXISTS: u32 = 1 << 0;
    pub const UP: u32 = 1 << 1;
}

/// Part of the OSD map that a client needs.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct OsdMap {
    /// Cluster fsid.
    pub fsid: Fsid,
    /// Epoch of this map.
    pub epoch: Epoch,
    /// Cluster flags, a combination of [`flags`].
    pub flags: u32,
    /// Pools, by id.
    pub pools: BTreeMap<i64, PgPool>,
    /// Names of pools, by id.
    pub names: BTreeMap<i64, String>,
    /// State bits, by OSD.
    pub(super) states: Vec<u32>,
    /// Reweight ("in" weight), by OSD, in 16.16 fixed point.
    pub(super) weights: Vec<u32>,
    /// Public addresses, by OSD.
    pub(super) addrs: Vec<Vec<EntityAddr>>,
    /// Primary affinities, by OSD; empty if all have the default.
    pub(super) affinities: Vec<u32>,
    pub(super) pg_temp: BTreeMap<PgId, Vec<i32>>,
    pub(super) primary_temp: BTreeMap<PgId, i32>,
    pub(super) upmap: BTreeMap<PgId, Vec<i32>>,
    pub(super) upmap_items: BTreeMap<PgId, Vec<(i32, i32)>>,
    pub(super) upmap_primaries: BTreeMap<PgId, i32>,
    pub(super) crush: CrushMap,
    pub(super) blocklist: Blocklist,
}

/// Newest version of the client section whose fields are known here; fields that later versions append are skipped.
const VERSION: u8 = 10;

/// Parts of a full or incremental map.
pub(super) struct MapParts<'a, T> {
    /// Version of the client section.
    pub(super) version: u8,
    /// Content of the client section.
    pub(super) client: PayloadReader<'a>,
    /// Result of reading the OSDs' section.
    pub(super) osds: T,
    /// Computed and stored checksums, if the map has one; `verify` compares them.
    pub(super) checksum: Option<(u32, u32)>,
}

/// Splits a full or incremental map into its sections, of which `osds` reads that of the OSDs, and computes its checksum,
/// which covers everything but itself.
pub(super) fn split<'a, T>(
    bytes: &'a [u8],
    what: &'static str,
    osds: impl FnOnce(&mut PayloadReader<'_>) -> Result<T, MalformedPayload>,
) -> Result<MapParts<'a, T>, MalformedPayload> {
    let mut whole = PayloadReader::new(bytes, what);
    let (version, mut inner) = whole.part(8)?;
    if version < 7 {
        return Err(whole.malformed());
    }
    let end = bytes.len() - whole.rest().len();
    let (part_version, client) = inner.part(VERSION)?;
    let osds = osds(&mut inner)?;
    let mut checksum = None;
    if version >= 8 {
        let at = end - inner.rest().len();
        let said = inner.u32()?;
        // Ceph's CRC32C has no final inversion.
        let found = !crc32c::crc32c_parts([&bytes[..at], &bytes[at + 4..end]]);
        checksum = Some((found, said));
    }
    Ok(MapParts { version: part_version, client, osds, checksum })
}

pub(super) fn verify(checksum: Option<(u32, u32)>, epoch: Epoch) -> Result<(), MapError> {
    match checksum {
        Some((found, said)) if found != said => Err(MapError::Checksum { epoch, found, said }),
        _ => Ok(()),
    }
}

pub(super) fn pg_list(from: &mut PayloadReader<'_>) -> Result<(PgId, Vec<i32>), MalformedPayload> {
    Ok((PgId::decode(from)?, from.list()?.into_iter().map(|osd| osd as i32).collect()))
}

pub(super) fn pg_pairs(from: &mut PayloadReader<'_>) -> Result<(PgId, Vec<(i32, i32)>), MalformedPayload> {
    Ok((PgId::decode(from)?, from.vec(|from| Ok((from.i32()?, from.i32()?)))?))
}

pub(super) fn pg_osd(from: &mut PayloadReader<'_>) -> Result<(PgId, i32), MalformedPayload> {
    Ok((PgId::decode(from)?, from.i32()?))
}

impl OsdMap {
    /// Decodes a map of Nautilus or later, and verifies its checksum.
    pub fn decode(bytes: &[u8]) -> Result<Self, MapError> {
        let (map, checksum) = Self::read(bytes)?;
        verify(checksum, map.epoch)?;
        Ok(map)
    }

    /// Decodes a map regardless of its checksum, for fuzzing and tests.
    #[cfg(any(fuzzing, test, feature = "fuzz"))]
    pub(crate) fn decode_unverified(bytes: &[u8]) -> Result<Self, MapError> {
        Self::read(bytes).map(|(map, _)| map)
    }

    fn read(bytes: &[u8]) -> Result<(Self, Option<(u32, u32)>), MapError> {
        let MapParts { version, mut client, osds: blocklist, checksum } = split(bytes, WHAT, Blocklist::decode)?;
        let from = &mut client;
        let mut map = Self { fsid: from.array()?, epoch: from.u32()?, blocklist, ..Self::default() };
        if version < 7 {
            return Err(from.malformed().into());
        }
        // Creation and modification times.
        from.take(16)?;
        let mut pools = BTreeMap::new();
        from.map(|from| Ok((from.i64()?, PgPool::decode(from)?)), |(id, pool)| drop(pools.insert(id, pool)))?;
        map.pools = pools;
        let mut names = BTreeMap::new();
        from.map(|from| Ok((from.i64()?, from.text()?)), |(id, name)| drop(names.insert(id, name)))?;
        map.names = names;
        // Highest pool id.
        from.u32()?;
        map.flags = from.u32()?;
        let count = from.u32()?;
        if count > OSDS_MAX {
            return Err(from.malformed().into());
        }
        map.states = from.list()?;
        map.weights = from.list()?;
        map.addrs = from.vec(EntityAddr::decode_vector)?;
        from.map(pg_list, |(pg, osds)| drop(map.pg_temp.insert(pg, osds)))?;
        map.primary_temp = from.vec(pg_osd)?.into_iter().collect();
        map.affinities = from.list()?;
        map.crush = CrushMap::decode(from.blob()?)?;
        map.resize(count as usize);
        // Erasure code profiles: settings by name.
        from.map(|from| Ok((from.blob()?, from.map(|from| Ok((from.blob()?, from.blob()?)), |_| ())?)), |_| ())?;
        from.map(pg_list, |(pg, osds)| drop(map.upmap.insert(pg, osds)))?;
        from.map(pg_pairs, |(pg, pairs)| drop(map.upmap_items.insert(pg, pairs)))?;
        // Version of the CRUSH map; queues of snapshots being removed, and of purged ones.
        from.u32()?;
        for _ in 0..2 {
            from.map(|from| Ok((from.i64()?, from.map(|from| from.take(16), |_| ())?)), |_| ())?;
        }
        if version >= 9 {
            from.take(16)?;
        }
        if version >= 10 {
            map.upmap_primaries = from.vec(pg_osd)?.into_iter().collect();
        }
        Ok((map, checksum))
    }

    /// Resizes the map to `count` OSDs.
    pub(super) fn resize(&mut self, count: usize) {
        self.states.resize(count, 0);
        self.weights.resize(count, 0);
        self.addrs.resize(count, Vec::new());
        if !self.affinities.is_empty() {
            self.affinities.resize(count, crate::crush::WEIGHT_ONE);
        }
    }

    /// Returns the number of OSD slots (`max_osd`).
    pub fn osds(&self) -> usize {
        self.states.len()
    }

    /// Returns the number of OSDs that are up.
    pub fn osds_up(&self) -> usize {
        (0..self.osds() as i32).filter(|&osd| self.is_up(osd)).count()
    }

    pub(super) fn has(&self, osd: i32, bits: u32) -> bool {
        usize::try_from(osd).ok().and_then(|osd| self.states.get(osd)).is_some_and(|state| state & bits == bits)
    }

    /// Returns whether the OSD exists, up or down.
    pub fn exists(&self, osd: i32) -> bool {
        self.has(osd, state::EXISTS)
    }

    /// Returns whether the OSD is up.
    pub fn is_up(&self, osd: i32) -> bool {
        self.has(osd, state::EXISTS | state::UP)
    }

    /// Returns the public addresses of an OSD; empty unless it is up.
    pub fn addrs(&self, osd: i32) -> &[EntityAddr] {
        if !self.is_up(osd) {
            return &[];
        }
        self.addrs.get(osd as usize).map_or(&[], Vec::as_slice)
    }

    /// Returns the id of a pool by name.
    pub fn pool_named(&self, name: &str) -> Option<i64> {
        self.names.iter().find(|(_, found)| *found == name).map(|(&id, _)| id)
    }
}
