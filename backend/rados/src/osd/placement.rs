//! Request targets: the placement group of an object, and the OSD that handles its requests.

use std::rc::Rc;

use forebay_block::{Error, ErrorKind, ObjectName, Result};

use super::hobject::HObject;
use super::wire::flag;
use super::{InFlightOp, Objecter};
use crate::map::{Epoch, Mapping, OsdMap, PgId, flags as map_flags};

/// Target of a placement group, compared to detect a new interval.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct PgTarget {
    pub(super) pg: PgId,
    pub(super) shard: i8,
    pub(super) mapping: Mapping,
    /// Pool size, minimum size and PG number; a change begins a new interval.
    pub(super) shape: (u32, u32, u32),
    /// Epoch before which sent requests must be resent.
    pub(super) force_resend: Epoch,
}

impl Objecter {
    /// Returns the current target of an object; `None` without a primary.
    pub(super) fn target_of(&self, pool: i64, object: &ObjectName) -> Option<Rc<PgTarget>> {
        let map = self.map()?;
        let pool_facts = map.pools.get(&pool)?;
        let hash = pool_facts.hash_object(object.namespace(), object.name())?;
        let pg = PgId { pool, seed: pool_facts.group(hash) };
        let target = self.current.target(pg)?;
        (target.mapping.primary >= 0).then_some(target)
    }

    /// Computes the target of a request with the current map and returns its OSD; `None` if the request must wait.
    pub(super) fn locate(&self, map: &OsdMap, op: &mut InFlightOp) -> Result<Option<i32>> {
        let request = &op.request;
        let base = op.redirect.as_ref().map_or(request.pool, |redirect| redirect.pool);
        let gone = |pool: i64| Error::new(ErrorKind::NotFound, format!("pool {pool} does not exist (any more)"));
        let mut id = base;
        let mut pool = map.pools.get(&id).ok_or_else(|| gone(id))?;
        let write = request.flags & flag::WRITE != 0;
        let tier = if write { pool.write_tier } else { pool.read_tier };
        if let Some(tier) = tier.filter(|_| request.flags & flag::IGNORE_OVERLAY == 0 && op.redirect.is_none()) {
            id = tier;
            pool = map.pools.get(&id).ok_or_else(|| gone(id))?;
        }
        op.hash = match (&op.redirect, request.object.name()) {
            (None, "") => request.group,
            (redirect, name) => {
                let (namespace, name) = match redirect {
                    None => (request.object.namespace(), name),
                    Some(to) if to.key.is_empty() => (to.namespace.as_str(), to.name_or(name)),
                    Some(to) => (to.namespace.as_str(), to.key.as_str()),
                };
                let unknown = || Error::new(ErrorKind::Unsupported, format!("pool {id} has an unknown object hash"));
                pool.hash_object(namespace, name).ok_or_else(unknown)?
            }
        };
        let pg = PgId { pool: id, seed: pool.group(op.hash) };
        let target = self.current.target(pg).ok_or_else(|| gone(id))?;
        let osd = target.mapping.primary;
        op.target = Some(target);
        let paused = map.flags & if write { map_flags::PAUSE_WRITES } else { map_flags::PAUSE_READS } != 0;
        Ok((osd >= 0 && !paused).then_some(osd))
    }
}

impl PgTarget {
    /// Computes the target of a placement group; `None` if the map does not have its pool.
    pub(super) fn of(map: &OsdMap, pg: PgId) -> Option<Self> {
        let pool = map.pools.get(&pg.pool)?;
        let mapping = map.map_pg(pg)?;
        Some(PgTarget {
            pg,
            shard: mapping.primary_shard(pool),
            mapping,
            shape: (pool.size, pool.min_size, pool.pg_num),
            force_resend: pool.force_resend,
        })
    }
}

/// Returns the position of a request's object in the sort order of its placement group.
pub(super) fn hobject(op: &InFlightOp, target: &PgTarget) -> HObject {
    let bytes = |text: &str| text.as_bytes().to_vec();
    HObject {
        pool: target.pg.pool,
        namespace: bytes(op.request.object.namespace()),
        key: Vec::new(),
        name: bytes(op.request.object.name()),
        snap: op.request.snap,
        hash: op.hash,
        max: false,
    }
}
