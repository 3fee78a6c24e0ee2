//! Simplest model of objects: a vector and a map each, copied in full for every snapshot and every transaction.
//!
//! Without clones: a snapshot is a copy of everything, which is correct for writers that always pass all snapshots.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::future::ready;

use forebay_block::{
    BackendInfo, BufList, Error, ErrorKind, Extent, ExtentMap, ExtentState, KvPage, ListPage, LocalFuture,
    ObjectBackend, ObjectName, ObjectOp, ObjectRead, ObjectStat, Result, SnapId, SnapSet, SparseData, Transaction,
    Usage,
};

#[derive(Clone, Default)]
struct Plainest {
    bytes: Vec<u8>,
    kv: BTreeMap<Vec<u8>, Vec<u8>>,
    version: u64,
}

type Objects = BTreeMap<ObjectName, Plainest>;

#[derive(Default)]
struct State {
    heads: Objects,
    snaps: BTreeMap<SnapId, Objects>,
    snap_last: u64,
    version_last: u64,
}

#[derive(Default)]
pub struct Plain {
    state: RefCell<State>,
}

impl Plain {
    fn get(&self, name: &ObjectName, snap: SnapId) -> Result<Plainest> {
        let state = self.state.borrow();
        let objects = if snap == SnapId::HEAD { Some(&state.heads) } else { state.snaps.get(&snap) };
        objects.and_then(|objects| objects.get(name)).cloned().ok_or_else(|| ErrorKind::NotFound.into())
    }
}

fn answer<T: 'static>(result: Result<T>) -> LocalFuture<Result<T>> {
    Box::pin(ready(result))
}

fn apply(state: &State, name: &ObjectName, mut object: Option<Plainest>, ops: &[ObjectOp]) -> Result<Option<Plainest>> {
    let version = object.as_ref().map_or(0, |object| object.version);
    let fail = |kind: ErrorKind| Err(Error::from(kind));
    for op in ops {
        match op {
            ObjectOp::AssertExists if object.is_none() => return fail(ErrorKind::NotFound),
            ObjectOp::AssertExists => {}
            ObjectOp::AssertVersion(wanted) => {
                if object.is_none() || version != *wanted {
                    return fail(ErrorKind::Guard);
                }
            }
            ObjectOp::Compare { offset, data } => {
                let stored = object.clone().unwrap_or_default().bytes;
                let there = |i: usize| stored.get(*offset as usize + i).copied().unwrap_or(0);
                let data = data.to_vec();
                if let Some(i) = (0..data.len()).find(|&i| there(i) != data[i]) {
                    return fail(ErrorKind::Mismatch(i as u64));
                }
            }
            ObjectOp::KvCompare { key, value } => {
                if object.clone().unwrap_or_default().kv.get(key) != value.as_ref() {
                    return fail(ErrorKind::Guard);
                }
            }
            ObjectOp::Create { exclusive } => {
                if *exclusive && object.is_some() {
                    return fail(ErrorKind::Exists);
                }
                object.get_or_insert_default();
            }
            ObjectOp::Expect { .. } => {
                object.get_or_insert_default();
            }
            ObjectOp::Write { offset, data } => {
                let bytes = &mut object.get_or_insert_default().bytes;
                if !data.is_empty() {
                    let range = *offset as usize..*offset as usize + data.len();
                    bytes.resize(bytes.len().max(range.end), 0);
                    data.copy_to(&mut bytes[range]);
                }
            }
            ObjectOp::WriteFull { data } => object.get_or_insert_default().bytes = data.to_vec(),
            ObjectOp::Zero { extent } => {
                if let Some(object) = &mut object {
                    let end = (extent.end() as usize).min(object.bytes.len());
                    object.bytes[(extent.offset as usize).min(end)..end].fill(0);
                }
            }
            ObjectOp::Truncate { size } => {
                if let Some(object) = &mut object {
                    object.bytes.resize(*size as usize, 0);
                }
            }
            ObjectOp::Remove => drop(object.take().ok_or(ErrorKind::NotFound)?),
            ObjectOp::KvSet { pairs } => object.get_or_insert_default().kv.extend(pairs.iter().cloned()),
            ObjectOp::KvRemove { keys } => {
                let kv = &mut object.as_mut().ok_or(ErrorKind::NotFound)?.kv;
                kv.retain(|key, _| !keys.contains(key));
            }
            ObjectOp::Rollback { snap } => {
                object = state.snaps.get(snap).and_then(|objects| objects.get(name)).cloned()
            }
            ObjectOp::Call { .. } => return fail(ErrorKind::Unsupported),
        }
    }
    Ok(object)
}

impl ObjectBackend for Plain {
    fn info(&self) -> BackendInfo {
        BackendInfo {
            pool: "plain".into(),
            kind: "ram",
            object_size_max: 1 << 40,
            preferred_io: 1,
            durable_at_once: true,
        }
    }

    fn read(&self, object: &ObjectName, read: ObjectRead) -> LocalFuture<Result<SparseData>> {
        answer(self.get(object, read.snap).map(|found| {
            let end = (read.extent.end() as usize).min(found.bytes.len());
            let start = (read.extent.offset as usize).min(end);
            let data: BufList = forebay_block::Buf::copy_of(&found.bytes[start..end]).into();
            SparseData { runs: if data.is_empty() { vec![] } else { vec![(start as u64, data)] } }
        }))
    }

    fn map(&self, object: &ObjectName, read: ObjectRead) -> LocalFuture<Result<ExtentMap>> {
        answer(self.get(object, read.snap).map(|found| {
            let Extent { offset, len } = read.extent;
            let stored = (found.bytes.len() as u64).clamp(offset, offset + len) - offset;
            let mut map = ExtentMap::new();
            map.push(offset, stored, ExtentState::Data);
            map.push(offset + stored, len - stored, ExtentState::Hole);
            map
        }))
    }

    fn stat(&self, object: &ObjectName, snap: SnapId) -> LocalFuture<Result<ObjectStat>> {
        let stat = |found: Plainest| ObjectStat { size: found.bytes.len() as u64, version: found.version };
        answer(self.get(object, snap).map(stat))
    }

    fn submit(&self, name: &ObjectName, transaction: Transaction) -> LocalFuture<Result<u64>> {
        let mut state = self.state.borrow_mut();
        let object = match apply(&state, name, state.heads.get(name).cloned(), &transaction.ops) {
            Ok(object) => object,
            Err(error) => return answer(Err(error)),
        };
        state.version_last += 1;
        let version = state.version_last;
        match object {
            Some(object) => drop(state.heads.insert(name.clone(), Plainest { version, ..object })),
            None => drop(state.heads.remove(name)),
        }
        answer(Ok(version))
    }

    fn kv_get(&self, object: &ObjectName, keys: Vec<Vec<u8>>) -> LocalFuture<Result<Vec<Option<Vec<u8>>>>> {
        answer(self.get(object, SnapId::HEAD).map(|found| keys.iter().map(|key| found.kv.get(key).cloned()).collect()))
    }

    fn kv_list(&self, object: &ObjectName, prefix: &[u8], after: &[u8], max: usize) -> LocalFuture<Result<KvPage>> {
        answer(self.get(object, SnapId::HEAD).map(|found| {
            let wanted =
                |(key, _): &(Vec<u8>, Vec<u8>)| key.starts_with(prefix) && (after.is_empty() || key[..] > *after);
            let mut pairs: Vec<_> = found.kv.into_iter().filter(wanted).collect();
            let more = pairs.len() > max;
            pairs.truncate(max);
            KvPage { pairs, more }
        }))
    }

    fn snap_set(&self, _object: &ObjectName) -> LocalFuture<Result<SnapSet>> {
        answer(Err(ErrorKind::Unsupported.into()))
    }

    fn snap_allocate(&self) -> LocalFuture<Result<SnapId>> {
        let mut state = self.state.borrow_mut();
        state.snap_last += 1;
        let snap = SnapId(state.snap_last);
        let copy = state.heads.clone();
        state.snaps.insert(snap, copy);
        answer(Ok(snap))
    }

    fn snap_remove(&self, snap: SnapId) -> LocalFuture<Result<()>> {
        answer(self.state.borrow_mut().snaps.remove(&snap).map(drop).ok_or_else(|| ErrorKind::NotFound.into()))
    }

    fn list(&self, _namespace: Option<&str>, _cursor: Option<Vec<u8>>, _max: usize) -> LocalFuture<Result<ListPage>> {
        answer(Ok(ListPage { names: self.state.borrow().heads.keys().cloned().collect(), next: None }))
    }

    fn flush(&self) -> LocalFuture<Result<()>> {
        answer(Ok(()))
    }

    fn usage(&self) -> LocalFuture<Result<Usage>> {
        answer(Ok(Usage::default()))
    }
}
