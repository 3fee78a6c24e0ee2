//! A pool (`pg_pool_t`).

use forebay_messenger::wire::{Malformed, Reader};

use super::Epoch;
use crate::denc::ReaderExt;

/// Bits of [`Pool::flags`].
pub mod pool_flags {
    /// Placement groups of different pools do not lie one over another.
    pub const HASH_PS_POOL: u64 = 1 << 0;
    /// A quota is exceeded, or the cluster is full.
    pub const FULL: u64 = 1 << 1;
    /// Erasure-coded, and objects can be overwritten.
    pub const EC_OVERWRITES: u64 = 1 << 2;
    /// The pool's quota is used up.
    pub const FULL_QUOTA: u64 = 1 << 10;
    /// Erasure-coded in the way of Tentacle: temporary placements are listed in an order of their own.
    pub const EC_OPTIMIZATIONS: u64 = 1 << 19;
}

/// How a pool keeps its objects.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PoolKind {
    /// Whole copies.
    Replicated,
    /// Shards of an erasure code.
    Erasure,
}

/// What a client needs to know of a pool.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pool {
    /// How it keeps objects.
    pub kind: PoolKind,
    /// Copies or shards.
    pub size: u32,
    /// Copies or shards that must be there for I/O.
    pub min_size: u32,
    /// The CRUSH rule's number.
    pub rule: u32,
    /// How names are hashed, of [`crate::crush::hash::name`].
    pub hash: u8,
    /// Placement groups ...
    pub pg_num: u32,
    /// ... and how many of them are placed apart.
    pub pgp_num: u32,
    /// Of [`pool_flags`].
    pub flags: u64,
    /// The newest self-managed snapshot number that was given out.
    pub snap_seq: u64,
    /// The pool that takes reads for it, if there is a cache tier.
    pub read_tier: Option<i64>,
    /// The pool that takes writes for it.
    pub write_tier: Option<i64>,
    /// Bytes of data in a stripe; 0 when replicated.
    pub stripe_width: u32,
    /// Requests from before this epoch are to be sent again.
    pub force_resend: Epoch,
    /// What the pool is for: `rbd` and the like.
    pub applications: Vec<String>,
}

/// The newest version whose additions are known here; what a later one appends is passed over.
const VERSION: u8 = 30;

impl Pool {
    /// Reads one of Luminous or later.
    pub(crate) fn decode(from: &mut Reader<'_>) -> Result<Self, Malformed> {
        let (version, mut from) = from.part(VERSION)?;
        let from = &mut from;
        // What is older has no place for what we must know.
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
        // Localised groups (2), the epoch of the last change.
        from.take(12)?;
        let snap_seq = from.u64()?;
        from.u32()?;
        // Snapshots of the pool itself: numbers, and a part each; then removed ones, as intervals.
        from.map(|from| Ok((from.u64()?, from.part(u8::MAX)?)), |_| ())?;
        from.map(|from| from.take(16), |_| ())?;
        // An owner of old.
        from.u64()?;
        let flags = from.u64()?;
        from.u32()?;
        let min_size = u32::from(from.u8()?);
        // Quotas.
        from.take(16)?;
        from.map(|from| from.u64(), |_| ())?;
        // The pool of which this is a tier, and how it caches.
        from.take(9)?;
        let tier = |value: i64| (value >= 0).then_some(value);
        let (read_tier, write_tier) = (tier(from.i64()?), tier(from.i64()?));
        // Properties.
        from.map(|from| Ok((from.blob()?, from.blob()?)), |_| ())?;
        // Hit sets: a part, period, count.
        from.part(u8::MAX)?;
        from.take(8)?;
        let stripe_width = from.u32()?;
        // Targets of caching: two of eight bytes, four of four.
        from.take(32)?;
        // The name of the code's profile.
        from.blob()?;
        // When to send again, for clients from before Luminous.
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
            let metadata = |from: &mut Reader<'_>| from.map(|from| Ok((from.blob()?, from.blob()?)), |_| ());
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
            // Targets of the numbers of groups, and of a merge of old.
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

    /// It has such a flag, of [`pool_flags`].
    pub fn has(&self, flag: u64) -> bool {
        self.flags & flag != 0
    }

    /// A copy that is missing is made up for by the next one; shards have places.
    pub(crate) fn shifts(&self) -> bool {
        self.kind == PoolKind::Replicated
    }
}
