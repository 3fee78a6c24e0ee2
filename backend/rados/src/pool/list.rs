//! Listing of a pool's objects, one placement group after the other.

use std::rc::Rc;

use forebay_block::{Error, ErrorKind, ListPage, ObjectName, Result};
use forebay_messenger::wire::{PayloadReader, PayloadWriter};
use forebay_reactor::Buf;

use super::{answer, ended};
use crate::cluster::RadosCluster;
use crate::osd::hobject::HObject;
use crate::osd::wire::{OsdOp, SNAP_HEAD, code, flag};
use crate::osd::{OsdRequest, check};

/// Namespace value that selects objects of all namespaces.
const ALL_NAMESPACES: &str = "\u{1}";

/// Maximum number of names requested at a time.
const PAGE_MAX: usize = 1000;
/// Result code that marks the end of a placement group.
const LAST_PART: i32 = 1;

pub(super) struct List {
    pub(super) cluster: Rc<RadosCluster>,
    pub(super) pool: i64,
    pub(super) namespace: Option<String>,
}

/// Encodes the cursor of a list: a placement group, and a position in it.
fn encode(group: u32, at: &HObject) -> Vec<u8> {
    let mut out = PayloadWriter::new();
    out.u32(group);
    at.encode(&mut out);
    out.finish()
}

fn decode(cursor: &[u8]) -> Result<(u32, HObject)> {
    let mut from = PayloadReader::new(cursor, "a place in a list");
    let read = from.u32().and_then(|group| Ok((group, HObject::decode(&mut from)?)));
    read.map_err(|error| Error::new(ErrorKind::Invalid, error.to_string()))
}

impl List {
    pub(super) async fn page(&self, cursor: Option<Vec<u8>>, max: usize) -> Result<ListPage> {
        let groups = || {
            let gone = || Error::new(ErrorKind::NotFound, format!("pool {} is not there any more", self.pool));
            self.cluster.map().pools.get(&self.pool).map(|pool| pool.pg_num).ok_or_else(gone)
        };
        let (mut group, mut at) = match cursor {
            Some(cursor) => decode(&cursor)?,
            None => (0, HObject::start(self.pool, 0)),
        };
        let mut page = ListPage::default();
        while group < groups()? {
            if page.names.len() >= max {
                page.next = Some(encode(group, &at));
                return Ok(page);
            }
            let (names, last) = self.ask(group, &at, max - page.names.len()).await?;
            let found =
                names.names.into_iter().map(|(namespace, name, _)| ObjectName::in_namespace(namespace.into(), name));
            self.keep_those_there(found.collect(), &mut page.names).await?;
            if last || names.next.max || names.next <= at {
                group += 1;
                at = HObject::start(self.pool, group);
            } else {
                at = names.next;
            }
        }
        Ok(page)
    }

    /// Filters out objects without a head, because OSDs also list objects that exist only for snapshots.
    async fn keep_those_there(&self, found: Vec<ObjectName>, names: &mut Vec<ObjectName>) -> Result<()> {
        let map = self.cluster.map();
        if map.pools.get(&self.pool).is_none_or(|pool| pool.snap_seq == 0) {
            names.extend(found);
            return Ok(());
        }
        let ask = |object: &ObjectName| {
            let (object, ops) = (object.clone(), vec![OsdOp::new(code::STAT)]);
            let request =
                OsdRequest { pool: self.pool, object, group: 0, snap: SNAP_HEAD, snapc: None, flags: flag::READ, ops };
            self.cluster.objecter().submit(request)
        };
        let asked: Vec<_> = found.iter().map(ask).collect();
        for (object, answered) in found.into_iter().zip(asked) {
            let reply = answered.await.unwrap_or_else(|| Err(ended()))?;
            match check(reply, &object) {
                Ok(_) => names.push(object),
                Err(error) if error.kind() == ErrorKind::NotFound => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    /// Returns a page of a placement group's names, and whether it is the last one.
    async fn ask(&self, group: u32, at: &HObject, max: usize) -> Result<(answer::Names, bool)> {
        let mut cursor = PayloadWriter::new();
        at.encode(&mut cursor);
        let epoch = self.cluster.map().epoch;
        let op = OsdOp::list(max.min(PAGE_MAX) as u64, epoch).with(Buf::copy_of(&cursor.finish()));
        let namespace = self.namespace.as_deref().unwrap_or(ALL_NAMESPACES);
        let object = ObjectName::in_namespace(namespace.into(), "");
        let flags = flag::READ | flag::PG_OP;
        let request = OsdRequest {
            pool: self.pool,
            object: object.clone(),
            group,
            snap: SNAP_HEAD,
            snapc: None,
            flags,
            ops: vec![op],
        };
        let reply = self.cluster.objecter().submit(request).await.unwrap_or_else(|| Err(ended()))?;
        let mut reply = check(reply, &object)?;
        let data = super::output(&mut reply, 0);
        let names = answer::names(&data).map_err(|error| answer::strange(&object, error))?;
        Ok((names, reply.result == LAST_PART))
    }
}
