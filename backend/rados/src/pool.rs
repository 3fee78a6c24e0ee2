//! Pool as an object backend.

pub(crate) mod answer;
mod attrs;
mod guard;
mod list;
pub(crate) mod shared;
mod write;

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::{Rc, Weak};

use forebay_block::{
    BackendInfo, Error, ErrorKind, Extent, ExtentMap, ExtentState, KvPage, ListPage, LocalFuture, ObjectBackend,
    ObjectName, ObjectRead, ObjectStat, PoolIdentity, Result, SharedObjects, SnapId, SnapSet, SparseData, Transaction,
    Usage,
};
use forebay_messenger::wire::PayloadWriter;
use forebay_reactor::{Buf, BufList};

use crate::cluster::RadosCluster;
use crate::error::{errno, failure};
use crate::map::{PgPool, PoolKind};
use crate::osd::wire::{OsdOp, OsdReply, SNAP_DIR, code, flag, keys};
use crate::osd::{OsdRequest, check};
pub use attrs::AttrOp;
use guard::Line;

/// Maximum object size in bytes: the default of `osd max object size`.
const OBJECT_SIZE_MAX: u64 = 128 << 20;
/// Minimum length of a sparse read, in bytes; for shorter reads, looking up extents costs more than the saved transfer.
const SPARSE_FROM: u64 = 64 << 10;
/// Write unit in bytes that OSDs write without a preceding read.
const PREFERRED_IO: u32 = 4096;

/// Pool of a Ceph cluster.
pub struct RadosPool {
    cluster: Rc<RadosCluster>,
    id: i64,
    name: String,
    /// Objects whose transactions wait for a multi-step transaction.
    lines: Rc<RefCell<HashMap<ObjectName, Line>>>,
    this: Weak<Self>,
}

type Answered = Result<OsdReply>;

impl RadosPool {
    pub(crate) fn new(cluster: Rc<RadosCluster>, id: i64, name: &str) -> Rc<Self> {
        Rc::new_cyclic(|this| Self { cluster, id, name: name.into(), lines: Rc::default(), this: this.clone() })
    }

    /// Returns the cluster of the pool.
    pub fn cluster(&self) -> &Rc<RadosCluster> {
        &self.cluster
    }

    /// Returns the pool id.
    pub fn id(&self) -> i64 {
        self.id
    }

    fn is_erasure_coded(&self) -> bool {
        let kind = |pool: &PgPool| pool.kind == PoolKind::Erasure;
        self.cluster.map().pools.get(&self.id).is_some_and(kind)
    }

    fn request(&self, object: &ObjectName, snap: u64, flags: u32, ops: Vec<OsdOp>) -> OsdRequest {
        OsdRequest { pool: self.id, object: object.clone(), group: 0, snap, snapc: None, flags, ops }
    }

    /// Sends a read-only request and returns the reply; error statuses become errors.
    fn ask(&self, object: &ObjectName, snap: u64, ops: Vec<OsdOp>) -> impl Future<Output = Answered> + use<> {
        let checked = check_name(object);
        let answered = checked.map(|()| self.cluster.objecter().submit(self.request(object, snap, flag::READ, ops)));
        let object = object.clone();
        async move {
            let reply = answered?.await.unwrap_or_else(|| Err(ended()))?;
            check(reply, &object)
        }
    }
}

fn ended() -> Error {
    crate::osd::closed()
}

fn check_name(object: &ObjectName) -> Result<()> {
    let fits = |text: &str| text.len() <= ObjectName::LEN_MAX && !text.contains('\0');
    if object.name().is_empty() || !fits(object.name()) || !fits(object.namespace()) {
        let text =
            format!("an object's name of {} bytes in a namespace of {}", object.name().len(), object.namespace().len());
        return Err(Error::new(ErrorKind::Invalid, text));
    }
    Ok(())
}

fn overflow(object: &ObjectName) -> Error {
    Error::new(ErrorKind::OutOfRange, format!("object {object}: a run past 2^64"))
}

fn ready<T: 'static>(result: Result<T>) -> LocalFuture<Result<T>> {
    Box::pin(std::future::ready(result))
}

/// Takes the output of the operation at an index.
fn output(reply: &mut OsdReply, place: usize) -> BufList {
    reply.ops.get_mut(place).map(|(_, data)| std::mem::take(data)).unwrap_or_default()
}

fn text_of(key: &[u8], out: &mut PayloadWriter) {
    out.blob(key);
}

impl ObjectBackend for RadosPool {
    fn info(&self) -> BackendInfo {
        BackendInfo {
            pool: self.name.clone(),
            kind: "rados",
            object_size_max: OBJECT_SIZE_MAX,
            preferred_io: PREFERRED_IO,
            durable_at_once: true,
        }
    }

    fn read(&self, object: &ObjectName, read: ObjectRead) -> LocalFuture<Result<SparseData>> {
        let Some(end) = read.extent.checked_end() else { return ready(Err(overflow(object))) };
        let offset = read.extent.offset;
        let len = end.min(OBJECT_SIZE_MAX).saturating_sub(offset);
        if len == 0 {
            let asked = self.ask(object, read.snap.0, vec![OsdOp::new(code::STAT)]);
            return Box::pin(async move { asked.await.map(|_| SparseData::default()) });
        }
        let sparse = len >= SPARSE_FROM && !self.is_erasure_coded();
        let op = if sparse { code::SPARSE_READ } else { code::READ };
        let asked = self.ask(object, read.snap.0, vec![OsdOp::extent(op, offset, len).advised(read.advice)]);
        let object = object.clone();
        Box::pin(async move {
            let mut reply = asked.await?;
            let data = output(&mut reply, 0);
            if sparse {
                return answer::sparse(data, Extent::new(offset, len)).map_err(|error| answer::strange(&object, error));
            }
            if data.len() as u64 > len {
                return Err(Error::new(
                    ErrorKind::Io,
                    format!("object {object}: the reply has more data than requested"),
                ));
            }
            let runs = if data.is_empty() { Vec::new() } else { vec![(offset, data)] };
            Ok(SparseData { runs })
        })
    }

    fn map(&self, object: &ObjectName, read: ObjectRead) -> LocalFuture<Result<ExtentMap>> {
        let Some(end) = read.extent.checked_end() else { return ready(Err(overflow(object))) };
        let extent = read.extent;
        let len = end.min(OBJECT_SIZE_MAX).saturating_sub(extent.offset);
        let coded = self.is_erasure_coded();
        let mut ops = vec![OsdOp::new(code::STAT)];
        if !coded && len > 0 {
            ops.push(OsdOp::extent(code::MAPEXT, extent.offset, len));
        }
        let asked = self.ask(object, read.snap.0, ops);
        let object = object.clone();
        Box::pin(async move {
            let mut reply = asked.await?;
            let strange = |error| answer::strange(&object, error);
            let (size, _) = answer::stat(&output(&mut reply, 0)).map_err(strange)?;
            let runs = if coded {
                vec![(0, size)]
            } else if len == 0 {
                Vec::new()
            } else {
                answer::extents(&output(&mut reply, 1)).map_err(strange)?
            };
            let mut map = ExtentMap::new();
            let mut at = extent.offset;
            for (offset, len) in runs {
                let (from, to) = (offset.max(at), offset.saturating_add(len).min(size).min(extent.end()));
                if from < to {
                    map.push(at, from - at, ExtentState::Hole);
                    map.push(from, to - from, ExtentState::Data);
                    at = to;
                }
            }
            map.push(at, extent.end() - at, ExtentState::Hole);
            Ok(map)
        })
    }

    fn stat(&self, object: &ObjectName, snap: SnapId) -> LocalFuture<Result<ObjectStat>> {
        let asked = self.ask(object, snap.0, vec![OsdOp::new(code::STAT)]);
        let object = object.clone();
        Box::pin(async move {
            let mut reply = asked.await?;
            let (size, _) = answer::stat(&output(&mut reply, 0)).map_err(|error| answer::strange(&object, error))?;
            Ok(ObjectStat { size, version: reply.version })
        })
    }

    fn submit(&self, object: &ObjectName, transaction: Transaction) -> LocalFuture<Result<u64>> {
        self.transact(object, transaction)
    }

    fn kv_get(&self, object: &ObjectName, wanted: Vec<Vec<u8>>) -> LocalFuture<Result<Vec<Option<Vec<u8>>>>> {
        let input = keys(wanted.iter().map(Vec::as_slice));
        let op = OsdOp::new(code::OMAP_GET_VALS_BY_KEYS).with(Buf::copy_of(&input));
        let asked = self.ask(object, SnapId::HEAD.0, vec![op]);
        let object = object.clone();
        Box::pin(async move {
            let mut reply = asked.await?;
            let found = answer::pairs(&output(&mut reply, 0)).map_err(|error| answer::strange(&object, error))?;
            let mut found: HashMap<_, _> = found.pairs.into_iter().collect();
            // The same key may be requested twice.
            let mut values: Vec<Option<Vec<u8>>> = wanted.iter().map(|key| found.get(key).cloned()).collect();
            found.clear();
            values.truncate(wanted.len());
            Ok(values)
        })
    }

    fn kv_list(&self, object: &ObjectName, prefix: &[u8], after: &[u8], max: usize) -> LocalFuture<Result<KvPage>> {
        let mut input = PayloadWriter::new();
        text_of(after, &mut input);
        input.u64(max as u64);
        text_of(prefix, &mut input);
        let op = OsdOp::new(code::OMAP_GET_VALS).with(Buf::copy_of(&input.finish()));
        let asked = self.ask(object, SnapId::HEAD.0, vec![op]);
        let object = object.clone();
        Box::pin(async move {
            let mut reply = asked.await?;
            answer::pairs(&output(&mut reply, 0)).map_err(|error| answer::strange(&object, error))
        })
    }

    fn snap_set(&self, object: &ObjectName) -> LocalFuture<Result<SnapSet>> {
        let asked = self.ask(object, SNAP_DIR, vec![OsdOp::new(code::LIST_SNAPS)]);
        let object = object.clone();
        Box::pin(async move {
            let mut reply = asked.await?;
            answer::snap_set(&output(&mut reply, 0)).map_err(|error| answer::strange(&object, error))
        })
    }

    fn identity(&self) -> Option<PoolIdentity> {
        Some(PoolIdentity { store: self.cluster.fsid(), pool: self.id })
    }

    fn snap_allocate(&self) -> LocalFuture<Result<SnapId>> {
        let (cluster, id) = (self.cluster.clone(), self.id);
        Box::pin(async move { cluster.create_snap(id).await.map(SnapId) })
    }

    fn snap_remove(&self, snap: SnapId) -> LocalFuture<Result<()>> {
        let (cluster, id) = (self.cluster.clone(), self.id);
        Box::pin(async move { cluster.remove_snap(id, snap.0).await })
    }

    fn list(&self, namespace: Option<&str>, cursor: Option<Vec<u8>>, max: usize) -> LocalFuture<Result<ListPage>> {
        let list = list::List { cluster: self.cluster.clone(), pool: self.id, namespace: namespace.map(str::to_owned) };
        Box::pin(async move { list.page(cursor, max).await })
    }

    fn flush(&self) -> LocalFuture<Result<()>> {
        // An OSD acknowledges a write only when all replicas have persisted it.
        ready(Ok(()))
    }

    fn shared(&self) -> Option<Rc<dyn SharedObjects>> {
        self.this.upgrade().map(|this| -> Rc<dyn SharedObjects> { this })
    }

    fn usage(&self) -> LocalFuture<Result<Usage>> {
        let (cluster, id) = (self.cluster.clone(), self.id);
        Box::pin(async move {
            let space = cluster.space(id).await?;
            let bytes = |kib: u64| kib.saturating_mul(1024);
            Ok(Usage {
                capacity: bytes(space.total_kib),
                used: bytes(space.used_kib),
                available: bytes(space.left_kib),
                objects: space.objects,
            })
        })
    }
}

/// Converts the status of a reply that rejects a transaction to an error.
fn refusal(status: i32, object: &ObjectName) -> Error {
    match status {
        // Versions begin at 1, and OSDs reject version 0 as invalid.
        status if status == -errno::EINVAL => Error::new(ErrorKind::Invalid, format!("object {object}")),
        status => failure(status, format!("object {object}")),
    }
}
