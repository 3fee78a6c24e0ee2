//! Request targets: the placement group of an object, and the OSD that handles its requests.

use std::rc::Rc;

use forebay_block::{Error, ErrorKind, ObjectName, Result};

use super::hobject::HObject;
use super::wire::flag;
use super::{Objecter, Op};
use crate::map::{Epoch, Mapping, OsdMap, PgId, flags as map_flags};

/// Target of a placement group, compared to detect a new interval.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Place {
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
    pub(super) fn place_of(&self, pool: i64, object: &ObjectName) -> Option<Rc<Place>> {
        let map = self.map()?;
        let pool_facts = map.pools.get(&pool)?;
        let hash = pool_facts.hash_object(object.namespace(), object.name())?;
        let pg = PgId { pool, seed: pool_facts.group(hash) };
        let known = self.places.borrow().get(&pg).cloned();
        let place = known.or_else(|| self.place(&map, pg).map(Rc::new))?;
        (place.mapping.primary >= 0).then_some(place)
    }

    /// Computes the target of a request and returns its OSD; `None` if the request must wait.
    pub(super) fn locate(&self, map: &OsdMap, op: &mut Op) -> Result<Option<i32>> {
        let request = &op.request;
        let base = op.redirect.as_ref().map_or(request.pool, |redirect| redirect.pool);
        let gone = |pool: i64| Error::new(ErrorKind::NotFound, format!("pool {pool} is not there (any more)"));
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
                let unknown =
                    || Error::new(ErrorKind::Unsupported, format!("pool {id} hashes names in a way of its own"));
                pool.hash_object(namespace, name).ok_or_else(unknown)?
            }
        };
        let pg = PgId { pool: id, seed: pool.group(op.hash) };
        let known = self.places.borrow().get(&pg).cloned();
        let place = match known {
            Some(place) => place,
            None => {
                let place = Rc::new(self.place(map, pg).ok_or_else(|| gone(id))?);
                self.places.borrow_mut().insert(pg, place.clone());
                place
            }
        };
        let osd = place.mapping.primary;
        op.place = Some(place);
        let paused = map.flags & if write { map_flags::PAUSE_WRITES } else { map_flags::PAUSE_READS } != 0;
        Ok((osd >= 0 && !paused).then_some(osd))
    }

    pub(super) fn place(&self, map: &OsdMap, pg: PgId) -> Option<Place> {
        let pool = map.pools.get(&pg.pool)?;
        let mapping = map.map_pg(pg)?;
        Some(Place {
            pg,
            shard: mapping.primary_shard(pool),
            mapping,
            shape: (pool.size, pool.min_size, pool.pg_num),
            force_resend: pool.force_resend,
        })
    }
}

/// Returns a copy of a target.
pub(super) fn clone_place(place: &Place) -> Place {
    Place { mapping: place.mapping.clone(), ..*place }
}

/// Returns the position of a request's object in the sort order of its placement group.
pub(super) fn hobject(op: &Op, place: &Place) -> HObject {
    let bytes = |text: &str| text.as_bytes().to_vec();
    HObject {
        pool: place.pg.pool,
        namespace: bytes(op.request.object.namespace()),
        key: Vec::new(),
        name: bytes(op.request.object.name()),
        snap: op.request.snap,
        hash: op.hash,
        max: false,
    }
}
