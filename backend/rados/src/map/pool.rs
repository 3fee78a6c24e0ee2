//! Pool definition (`pg_pool_t`).

use forebay_messenger::wire::{MalformedPayload, PayloadReader};

use super::Epoch;
use crate::denc::ReaderExt;

/// Bits of [`PgPool::flags`].
pub mod pool_flags {
    /// Hash the pool id into placement seeds, so that placement groups of different pools do not overlap.
    pub const HASH_PS_POOL: u64 = 1 << 0;
    /// Quota exceeded, or the cluster is full.
    pub const FULL: u64 = 1 << 1;
    /// Erasure-coded pool whose objects can be overwritten.
    pub const EC_OVERWRITES: u64 = 1 << 2;
    /// Quota of the pool exceeded.
    pub const FULL_QUOTA: u64 = 1 << 10;
    /// Erasure coding optimizations of Tentacle: temporary placements are listed in a different order.
    pub const EC_OPTIMIZATIONS: u64 = 1 << 19;
}

/// Redundancy scheme of a pool.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PoolKind {
    /// Replicated: full copies.
    Replicated,
    /// Erasure-coded shards.
    Erasure,
}

/// Pool properties that a client needs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PgPool {
    /// Redundancy scheme.
    pub kind: PoolKind,
    /// Number of copies or shards.
    pub size: u32,
    /// Minimum number of available copies or shards for I/O.
    pub min_size: u32,
    /// Id of the CRUSH rule.
    pub rule: u32,
    /// Hash function for object names, one of [`crate::crush::hash::name`].
    pub hash: u8,
    /// Number of placement groups.
    pub pg_num: u32,
    /// Number of placement groups that are placed independently.
    pub pgp_num: u32,
    /// Flags, a combination of [`pool_flags`].
    pub flags: u64,
    /// Newest self-managed snapshot id allocated.
    pub snap_seq: u64,
    /// Pool that serves its reads, if there is a cache tier.
    pub read_tier: Option<i64>,
    /// Pool that serves its writes, if there is a cache tier.
    pub write_tier: Option<i64>,
    /// Bytes of data per stripe; 0 for replicated pools.
    pub stripe_width: u32,
    /// Epoch before which sent requests must be resent.
    pub force_resend: Epoch,
    /// Applications of the pool, for example `rbd`.
    pub applications: Vec<String>,
}

/// Newest encoding version whose fields are known here; fields that later versions append are skipped.
pub(super) const VERSION: u8 = 30;

impl PgPool {
    /// Decodes a pool as encoded by Luminous or later.
    pub(crate) fn decode(from: &mut PayloadReader<'_>) -> Result<Self, MalformedPayload> {
        let (version, mut from) = from.part(VERSION)?;
        let from = &mut from;
        // Older encodings lack required fields.
        if version < 21 {
            return Err(from.malformed());
        }
        let kind = match from.u8()? {
            1 => PoolKind::Replicated,
            3 => PoolKind::Erasure,
            _ => return Err(from.malformed()),
        };
        let size = u32::from(from.u8()?);
        let rule = u32::from(from.u8()?);
        let hash = from.u8()?;
        let (pg_num, pgp_num) = (from.u32()?, from.u32()?);
        // Localised PGs (2), epoch of the last change.
        from.take(12)?;
        let snap_seq = from.u64()?;
        from.u32()?;
        // Pool snapshots: ids, and a versioned part each; then removed ones, as intervals.
        from.map(|from| Ok((from.u64()?, from.part(u8::MAX)?)), |_| ())?;
        from.map(|from| from.take(16), |_| ())?;
        // Obsolete owner (auid).
        from.u64()?;
        let flags = from.u64()?;
        from.u32()?;
        let min_size = u32::from(from.u8()?);
        // Quotas.
        from.take(16)?;
        from.map(|from| from.u64(), |_| ())?;
        // Base pool of this tier, and its cache mode.
        from.take(9)?;
        let tier = |value: i64| (value >= 0).then_some(value);
        let (read_tier, write_tier) = (tier(from.i64()?), tier(from.i64()?));
        // Properties.
        from.map(|from| Ok((from.blob()?, from.blob()?)), |_| ())?;
        // Hit sets: a part, period, count.
        from.part(u8::MAX)?;
        from.take(8)?;
        let stripe_width = from.u32()?;
        // Cache targets: two of eight bytes, four of four bytes.
        from.take(32)?;
        // Name of the erasure code profile.
        from.blob()?;
        // Resend epoch for clients from before Luminous.
        from.u32()?;
        // Recency, expected objects, ratio, recency, times in GMT.
        from.take(4 + 8 + 4 + 4 + 1)?;
        if version >= 22 {
            // Fast reads.
            from.u8()?;
        }
        if version >= 23 {
            from.take(8)?;
        }
        if version >= 24 {
            from.part(u8::MAX)?;
        }
        let mut force_resend = if version >= 25 { from.u32()? } else { 0 };
        let mut applications = Vec::new();
        if version >= 26 {
            let metadata = |from: &mut PayloadReader<'_>| from.map(|from| Ok((from.blob()?, from.blob()?)), |_| ());
            applications = from.vec(|from| {
                let name = from.text()?;
                metadata(from)?;
                Ok(name)
            })?;
        }
        if version >= 27 {
            from.take(8)?;
        }
        if version >= 28 {
            // Target numbers of PGs, and an obsolete pending merge.
            from.take(20)?;
            force_resend = from.u32()?;
        }
        if pg_num == 0 || pgp_num == 0 || size == 0 {
            return Err(from.malformed());
        }
        Ok(Self {
            kind,
            size,
            min_size,
            rule,
            hash,
            pg_num,
            pgp_num,
            flags,
            snap_seq,
            read_tier,
            write_tier,
            stripe_width,
            force_resend,
            applications,
        })
    }

    /// Returns whether a flag of [`pool_flags`] is set.
    pub fn has(&self, flag: u64) -> bool {
        self.flags & flag != 0
    }

    /// Returns whether a missing copy is replaced by the next one in the list. Shards keep their positions instead.
    pub(crate) fn shifts(&self) -> bool {
        self.kind == PoolKind::Replicated
    }
}
