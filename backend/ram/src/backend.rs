use std::cell::{Cell, RefCell};
use std::collections::{BTreeSet, HashMap};
use std::fmt;
use std::future::ready;
use std::hash::{BuildHasherDefault, DefaultHasher};
use std::ops::{Bound, Range};
use std::rc::Rc;

use forebay_block::{
    BackendInfo, Error, ErrorKind, ExtentMap, KvPage, ListPage, LocalFuture, ObjectBackend, ObjectName, ObjectRead,
    ObjectStat, Result, SnapId, SnapSet, SparseData, Transaction, Usage,
};

use crate::content::{ObjectContent, PAGE};
use crate::object::{Classes, NoClasses, OBJECT_SIZE_MAX, PoolState, RamObject, check_overflow};

/// Pool of objects in memory, lost when it is dropped.
///
/// Operations are executed within the call, in the order of the calls.  Used space counts pages of 4 KiB, one shared by
/// an object and its snapshots once; keys, values and names are not counted.
pub struct RamBackend {
    name: String,
    objects: RefCell<Objects>,
    pool: RefCell<PoolState>,
    heads: Cell<u64>,
}

/// Objects of a pool, by name.
///
/// A hash map serves the lookup of every read and write; the listing order is kept separately.
#[derive(Default)]
struct Objects {
    by_name: HashMap<ObjectName, RamObject, BuildHasherDefault<DefaultHasher>>,
    names: BTreeSet<ObjectName>,
}

impl Objects {
    fn get(&self, name: &ObjectName) -> Option<&RamObject> {
        self.by_name.get(name)
    }

    fn insert(&mut self, name: &ObjectName, object: RamObject) {
        self.names.insert(name.clone());
        self.by_name.insert(name.clone(), object);
    }

    fn remove(&mut self, name: &ObjectName) {
        self.names.remove(name);
        self.by_name.remove(name);
    }

    /// Returns the names after `from`, in order, with their objects.
    fn range(&self, from: Bound<&ObjectName>) -> impl Iterator<Item = (&ObjectName, &RamObject)> {
        let names = self.names.range::<ObjectName, _>((from, Bound::Unbounded));
        names.filter_map(|name| Some((name, self.by_name.get(name)?)))
    }

    fn retain(&mut self, mut keep: impl FnMut(&mut RamObject) -> bool) {
        let Self { by_name, names } = self;
        names.retain(|name| {
            let stays = by_name.get_mut(name).is_some_and(&mut keep);
            if !stays {
                by_name.remove(name);
            }
            stays
        });
    }
}

impl RamBackend {
    /// Creates an empty pool, limited by the machine's memory only; its usage reports `u64::MAX` as capacity.
    pub fn new(pool_name: impl Into<String>) -> Rc<Self> {
        Self::build(pool_name.into(), u64::MAX)
    }

    /// Creates an empty pool of `capacity` bytes, rounded down to 4 KiB; writes past it fail with
    /// [`NoSpace`](ErrorKind::NoSpace), operations that free space always succeed.
    pub fn with_capacity(pool_name: impl Into<String>, capacity: u64) -> Rc<Self> {
        Self::build(pool_name.into(), capacity / PAGE as u64)
    }

    fn build(name: String, pages_max: u64) -> Rc<Self> {
        let pool =
            PoolState { space: Rc::default(), pages_max, removed: Default::default(), snap_last: 0, version_last: 0 };
        Rc::new(Self { name, objects: RefCell::default(), pool: RefCell::new(pool), heads: Cell::new(0) })
    }

    /// Calls `look` with an object's content and version at `snap`.
    pub(crate) fn look<T>(
        &self,
        object: &ObjectName,
        snap: SnapId,
        look: impl FnOnce(&ObjectContent, u64) -> Result<T>,
    ) -> LocalFuture<Result<T>>
    where
        T: 'static,
    {
        let objects = self.objects.borrow();
        let result = match objects.get(object).and_then(|found| found.at(snap)) {
            Some((content, version)) => look(content, version),
            None => Err(not_found(object)),
        };
        Box::pin(ready(result))
    }

    pub(crate) fn transact(&self, name: &ObjectName, transaction: &Transaction, classes: &dyn Classes) -> Result<u64> {
        check_name(name)?;
        if transaction.snapc.as_ref().is_some_and(|snapc| !snapc.is_valid()) {
            return Err(Error::new(ErrorKind::Invalid, format!("object {name}: snapshot context out of order")));
        }
        let mut objects = self.objects.borrow_mut();
        let pool = &mut *self.pool.borrow_mut();
        let describe = |error: Error| Error::new(error.kind(), format!("object {name}"));
        let Some(object) = objects.by_name.get_mut(name) else {
            let mut object = RamObject::default();
            let version = object.submit(transaction, pool, classes).map_err(describe)?;
            if !object.is_gone() {
                self.heads.set(self.heads.get() + 1);
                objects.insert(name, object);
            }
            return Ok(version);
        };
        let existed = object.head().is_some();
        let version = object.submit(transaction, pool, classes).map_err(describe)?;
        match (existed, object.head().is_some()) {
            (false, true) => self.heads.set(self.heads.get() + 1),
            (true, false) => self.heads.set(self.heads.get() - 1),
            _ => {}
        }
        if object.is_gone() {
            objects.remove(name);
        }
        Ok(version)
    }

    fn page(&self, namespace: Option<&str>, cursor: Option<Vec<u8>>, max: usize) -> Result<ListPage> {
        let after = cursor.map(|cursor| decode_cursor(&cursor)).transpose()?;
        let first = ObjectName::in_namespace(namespace.unwrap_or("").into(), "");
        let from = after.as_ref().map_or(Bound::Included(&first), Bound::Excluded);
        let objects = self.objects.borrow();
        let mut names = objects
            .range(from)
            .take_while(|(name, _)| namespace.is_none_or(|wanted| name.namespace() == wanted))
            .filter(|(_, object)| object.head().is_some())
            .map(|(name, _)| name.clone());
        let page: Vec<ObjectName> = names.by_ref().take(max.max(1)).collect();
        let next = names.next().and_then(|_| page.last()).map(encode_cursor);
        Ok(ListPage { names: page, next })
    }
}

impl fmt::Debug for RamBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RamBackend({}, {} objects)", self.name, self.heads.get())
    }
}

fn not_found(object: &ObjectName) -> Error {
    Error::new(ErrorKind::NotFound, format!("object {object}"))
}

fn check_name(name: &ObjectName) -> Result<()> {
    if name.name().is_empty() || name.name().len() > ObjectName::LEN_MAX || name.namespace().len() > ObjectName::LEN_MAX
    {
        return Err(Error::new(ErrorKind::Invalid, format!("an object's name has 1 to {} bytes", ObjectName::LEN_MAX)));
    }
    Ok(())
}

/// Encodes the last name of a page of a listing: the namespace's length in two bytes, the namespace, the name.
fn encode_cursor(name: &ObjectName) -> Vec<u8> {
    let mut cursor = (name.namespace().len() as u16).to_le_bytes().to_vec();
    cursor.extend_from_slice(name.namespace().as_bytes());
    cursor.extend_from_slice(name.name().as_bytes());
    cursor
}

fn decode_cursor(cursor: &[u8]) -> Result<ObjectName> {
    let parse = || {
        let (len, rest) = cursor.split_first_chunk::<2>()?;
        let (namespace, name) = rest.split_at_checked(u16::from_le_bytes(*len).into())?;
        let namespace = std::str::from_utf8(namespace).ok()?;
        Some(ObjectName::in_namespace(namespace.into(), std::str::from_utf8(name).ok()?))
    };
    parse().ok_or_else(|| Error::new(ErrorKind::Invalid, "not a listing cursor of this pool"))
}

impl ObjectBackend for RamBackend {
    fn info(&self) -> BackendInfo {
        BackendInfo {
            pool: self.name.clone(),
            kind: "ram",
            object_size_max: OBJECT_SIZE_MAX,
            preferred_io: PAGE as u32,
            durable_at_once: true,
        }
    }

    fn read(&self, object: &ObjectName, read: ObjectRead) -> LocalFuture<Result<SparseData>> {
        self.look(object, read.snap, |content, _| {
            check_overflow(read.extent)?;
            Ok(content.read(read.extent))
        })
    }

    fn map(&self, object: &ObjectName, read: ObjectRead) -> LocalFuture<Result<ExtentMap>> {
        self.look(object, read.snap, |content, _| {
            check_overflow(read.extent)?;
            Ok(content.map(read.extent))
        })
    }

    fn stat(&self, object: &ObjectName, snap: SnapId) -> LocalFuture<Result<ObjectStat>> {
        self.look(object, snap, |content, version| Ok(ObjectStat { size: content.size(), version }))
    }

    fn submit(&self, object: &ObjectName, transaction: Transaction) -> LocalFuture<Result<u64>> {
        Box::pin(ready(self.transact(object, &transaction, &NoClasses)))
    }

    fn kv_get(&self, object: &ObjectName, keys: Vec<Vec<u8>>) -> LocalFuture<Result<Vec<Option<Vec<u8>>>>> {
        self.look(object, SnapId::HEAD, |content, _| Ok(keys.iter().map(|key| content.kv.get(key).cloned()).collect()))
    }

    fn kv_list(&self, object: &ObjectName, prefix: &[u8], after: &[u8], max: usize) -> LocalFuture<Result<KvPage>> {
        self.look(object, SnapId::HEAD, |content, _| {
            let mut found = content.keys_after(prefix, after);
            let pairs = found.by_ref().take(max).map(|(key, value)| (key.clone(), value.clone())).collect();
            Ok(KvPage { pairs, more: found.next().is_some() })
        })
    }

    fn snap_set(&self, object: &ObjectName) -> LocalFuture<Result<SnapSet>> {
        let found = self.objects.borrow().get(object).map(RamObject::snap_set);
        Box::pin(ready(found.ok_or_else(|| not_found(object))))
    }

    fn snap_allocate(&self) -> LocalFuture<Result<SnapId>> {
        let mut pool = self.pool.borrow_mut();
        pool.snap_last += 1;
        Box::pin(ready(Ok(SnapId(pool.snap_last))))
    }

    fn snap_remove(&self, snap: SnapId) -> LocalFuture<Result<()>> {
        let pool = &mut *self.pool.borrow_mut();
        if snap.0 == 0 || snap.0 > pool.snap_last {
            return Box::pin(ready(Err(Error::new(ErrorKind::NotFound, format!("snapshot {}", snap.0)))));
        }
        if pool.removed.insert(snap) {
            self.objects.borrow_mut().retain(|object| {
                object.forget_snap(snap);
                !object.is_gone()
            });
        }
        Box::pin(ready(Ok(())))
    }

    fn list(&self, namespace: Option<&str>, cursor: Option<Vec<u8>>, max: usize) -> LocalFuture<Result<ListPage>> {
        Box::pin(ready(self.page(namespace, cursor, max)))
    }

    fn list_between(&self, names: Range<ObjectName>, max: usize) -> Option<LocalFuture<Result<Vec<ObjectName>>>> {
        let objects = self.objects.borrow();
        let found = objects.range(Bound::Included(&names.start)).map(|(name, _)| name);
        let found = found.take_while(|name| **name < names.end).take(max).cloned().collect();
        Some(Box::pin(ready(Ok(found))))
    }

    fn flush(&self) -> LocalFuture<Result<()>> {
        Box::pin(ready(Ok(())))
    }

    fn usage(&self) -> LocalFuture<Result<Usage>> {
        let pool = self.pool.borrow();
        let page = PAGE as u64;
        let used = pool.space.pages() * page;
        let capacity = pool.pages_max.saturating_mul(page);
        let available = capacity.saturating_sub(used);
        Box::pin(ready(Ok(Usage { capacity, used, available, objects: self.heads.get() })))
    }
}
