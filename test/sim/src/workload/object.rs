use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::rc::Rc;
use std::time::Duration;

use forebay_block::{
    Advice, Error, ErrorKind, Extent, ObjectBackend, ObjectName, ObjectOp, ObjectRead, Result, SnapContext, SnapId,
    Transaction,
};
use forebay_reactor::sync::Semaphore;
use forebay_reactor::{sleep, spawn};

use super::{Odds, Seen};
use crate::oracle::{CheckedBackend, ObjectOracle, observe};
use crate::rng::Rng;
use crate::stamp::stamp;
use crate::world::CrashKind;

#[derive(Debug, Clone, Copy)]
enum Kind {
    Write,
    Change,
    Read,
    Keys,
    Flush,
    Snap,
    SnapRemove,
    List,
}

/// A load on an object backend.
#[derive(Debug, Clone)]
pub struct ObjectLoad {
    /// Objects it works on.
    pub objects: u64,
    /// Maximum object size in bytes.
    pub size_max: u64,
    /// Longest write in bytes.
    pub write_max: u64,
    /// Tasks at once, each with one request in flight.
    pub tasks: usize,
    /// Requests of all tasks together.
    pub requests: usize,
    /// Snapshots at once; 0: none are taken.
    pub snaps_max: usize,
    /// Existing snapshots; they outlive a crash.
    pub snaps: Rc<RefCell<SnapContext>>,
    /// Numbers every write.
    pub version: Rc<Cell<u64>>,
    /// Counts of results.
    pub seen: Rc<Seen>,
}

const FAILURES_MAX: usize = 8;

impl ObjectLoad {
    /// A small one by chance.
    pub fn draw(rng: &mut Rng) -> Self {
        Self {
            objects: rng.range(1..8),
            size_max: 4096 << rng.below(7),
            write_max: u64::MAX,
            tasks: *rng.pick(&[1, 2, 4, 8]),
            requests: rng.range(20..200) as usize,
            snaps_max: *rng.pick(&[0, 1, 3]),
            snaps: Rc::default(),
            version: Rc::default(),
            seen: Rc::default(),
        }
    }

    /// The names of its objects.
    pub fn names(&self) -> Vec<ObjectName> {
        (0..self.objects).map(object_name).collect()
    }

    /// Runs it until it is done, the oracle objects, or the backend is gone.
    pub async fn run(&self, backend: Rc<CheckedBackend>, oracle: Rc<RefCell<ObjectOracle>>, rng: &mut Rng) {
        let odds = Odds::draw(
            rng,
            &[
                (Kind::Write, 30),
                (Kind::Change, 20),
                (Kind::Read, 20),
                (Kind::Keys, 10),
                (Kind::Flush, 4),
                (Kind::Snap, 2),
                (Kind::SnapRemove, 1),
                (Kind::List, 1),
            ],
        );
        let durable_ppm = *rng.pick(&[0, 0, 50_000, 300_000]);
        let pauses = rng.one_in(4);
        let left = Rc::new(Cell::new(self.requests));
        // Removing a snapshot waits until its last reader is done.
        let quiet = Semaphore::new(self.tasks);
        let tasks: Vec<_> = (0..self.tasks)
            .map(|_| {
                let (load, backend, oracle, odds) = (self.clone(), backend.clone(), oracle.clone(), odds.clone());
                let (left, quiet, mut rng) = (left.clone(), quiet.clone(), rng.fork());
                spawn(async move {
                    let mut failures = 0;
                    while left.get() > 0 && failures < FAILURES_MAX && oracle.borrow().violation().is_none() {
                        left.set(left.get() - 1);
                        let kind = odds.pick(&mut rng);
                        let alone = matches!(kind, Kind::SnapRemove | Kind::List);
                        let permit = quiet.acquire(if alone { load.tasks } else { 1 }).await;
                        let result = load.step(kind, &backend, &oracle, durable_ppm, &mut rng).await;
                        drop(permit);
                        load.seen.note(&result);
                        match result {
                            Err(error) if is_failure(&error) => failures += 1,
                            _ => failures = 0,
                        }
                        if pauses && rng.one_in(8) {
                            sleep(Duration::from_micros(rng.below(20_000))).await;
                        }
                    }
                })
            })
            .collect();
        for task in tasks {
            task.await;
        }
    }

    async fn step(
        &self,
        kind: Kind,
        backend: &CheckedBackend,
        oracle: &RefCell<ObjectOracle>,
        durable_ppm: u32,
        rng: &mut Rng,
    ) -> Result<()> {
        let object = object_name(rng.below(self.objects));
        if matches!(kind, Kind::Write | Kind::Change) && oracle.borrow().is_vague(&object) {
            // Time passes, so that what is in flight is settled.
            sleep(Duration::from_micros(50)).await;
            return Ok(());
        }
        match kind {
            Kind::Write | Kind::Change => {
                let count = if matches!(kind, Kind::Write) { 1 } else { rng.range(1..5) };
                let mut ops = Vec::new();
                if matches!(kind, Kind::Change) && rng.one_in(4) {
                    ops.push(version_guard(oracle.borrow().version(&object), rng));
                }
                for _ in 0..count {
                    let op = self.op(matches!(kind, Kind::Write), rng);
                    // The contract leaves open whether a length alone makes an object.
                    if matches!(op, ObjectOp::Truncate { .. }) {
                        ops.push(ObjectOp::Create { exclusive: false });
                    }
                    ops.push(op);
                }
                let snapc = Rc::new(self.snaps.borrow().clone());
                let snapc = if snapc.seq == 0 { None } else { Some(snapc) };
                let transaction = Transaction { snapc, ops, durable: rng.ppm(durable_ppm), advice: Advice::NONE };
                backend.submit(&object, transaction).await.map(drop)
            }
            Kind::Read => {
                let snap = self.any_snap(rng);
                let extent = Extent::new(rng.below(self.size_max), rng.below(self.size_max) + 1);
                match rng.below(4) {
                    0 => backend.stat(&object, snap).await.map(drop),
                    1 => backend.map(&object, ObjectRead::new(snap, extent)).await.map(drop),
                    _ => backend.read(&object, ObjectRead::new(snap, extent)).await.map(drop),
                }
            }
            Kind::Keys => {
                if rng.coin() {
                    let keys = (0..rng.range(1..4)).map(|_| key(rng)).collect();
                    backend.kv_get(&object, keys).await.map(drop)
                } else {
                    let prefix = rng.pick(&["", "k", "k1", "x"]).as_bytes();
                    let after = if rng.coin() { key(rng) } else { Vec::new() };
                    backend.kv_list(&object, prefix, &after, rng.range(1..6) as usize).await.map(drop)
                }
            }
            Kind::Flush => backend.flush().await,
            Kind::Snap => {
                if self.snaps.borrow().snaps.len() >= self.snaps_max {
                    return Ok(());
                }
                let snap = backend.snap_allocate().await?;
                // As an image does: nothing names a snapshot before its number is durable.
                backend.flush().await?;
                let mut snaps = self.snaps.borrow_mut();
                // Two may have been taken at once, and the second answered first.
                if snap.0 > snaps.seq {
                    snaps.seq = snap.0;
                    snaps.snaps.insert(0, snap);
                }
                Ok(())
            }
            Kind::SnapRemove => {
                let snap = self.any_snap(rng);
                if snap == SnapId::HEAD {
                    return Ok(());
                }
                self.snaps.borrow_mut().snaps.retain(|&other| other != snap);
                backend.snap_remove(snap).await
            }
            Kind::List => self.check_list(backend, oracle, rng).await,
        }
    }

    /// A step of a transaction; `plain` ones are what an image does.
    fn op(&self, plain: bool, rng: &mut Rng) -> ObjectOp {
        let offset = if rng.coin() { rng.below(self.size_max / 4096) * 4096 } else { rng.below(self.size_max) };
        let len = if rng.coin() { 4096 } else { rng.below(self.size_max) + 1 }.min(self.size_max - offset);
        self.version.set(self.version.get() + 1);
        let part = len.min(self.write_max);
        let write = |len: u64| ObjectOp::Write { offset, data: stamp(offset, len as usize, self.version.get()).into() };
        if plain {
            return match rng.below(10) {
                0 => ObjectOp::Zero { extent: Extent::new(offset, len) },
                1 => ObjectOp::Truncate { size: offset },
                _ => write(part),
            };
        }
        match rng.below(14) {
            0 => ObjectOp::AssertExists,
            1 => ObjectOp::Create { exclusive: true },
            2 => ObjectOp::Create { exclusive: false },
            3 => ObjectOp::Compare { offset, data: stamp(offset, 16, self.version.get()).into() },
            4 => ObjectOp::Compare { offset, data: forebay_block::BufList::zeroes(16) },
            5 => ObjectOp::KvCompare { key: key(rng), value: rng.coin().then(|| value(rng)) },
            6 => ObjectOp::WriteFull { data: stamp(0, part as usize, self.version.get()).into() },
            7 => ObjectOp::Zero { extent: Extent::new(offset, len * 2) },
            8 => ObjectOp::Truncate { size: offset },
            9 => ObjectOp::Remove,
            10 | 11 => ObjectOp::KvSet { pairs: (0..rng.range(1..6)).map(|_| (key(rng), value(rng))).collect() },
            12 => ObjectOp::KvRemove { keys: (0..rng.range(1..3)).map(|_| key(rng)).collect() },
            _ => match self.any_snap(rng) {
                SnapId::HEAD => write(part),
                snap => ObjectOp::Rollback { snap },
            },
        }
    }

    fn any_snap(&self, rng: &mut Rng) -> SnapId {
        let snaps = self.snaps.borrow();
        if snaps.snaps.is_empty() || rng.coin() { SnapId::HEAD } else { *rng.pick(&snaps.snaps) }
    }

    /// While nothing else runs, the list names each object that is there, once.
    async fn check_list(&self, backend: &CheckedBackend, oracle: &RefCell<ObjectOracle>, rng: &mut Rng) -> Result<()> {
        let found = list_all(backend, rng.range(1..5) as usize).await?;
        oracle.borrow_mut().listed(&found);
        Ok(())
    }
}

async fn list_all(backend: &dyn ObjectBackend, page: usize) -> Result<Vec<ObjectName>> {
    let mut found = Vec::new();
    let mut cursor = None;
    loop {
        let page = backend.list(None, cursor, page).await?;
        found.extend(page.names);
        cursor = page.next;
        if cursor.is_none() {
            return Ok(found);
        }
    }
}

fn is_failure(error: &Error) -> bool {
    !matches!(
        error.kind(),
        ErrorKind::NotFound | ErrorKind::Exists | ErrorKind::Guard | ErrorKind::Mismatch(_) | ErrorKind::NoSpace
    )
}

/// A guard by a version: most often the object's, else one that it never had, has no more, or may get next.
fn version_guard(known: Option<u64>, rng: &mut Rng) -> ObjectOp {
    let known = known.unwrap_or(0);
    ObjectOp::AssertVersion(match rng.below(6) {
        0 => known + 1,
        1 => known.saturating_sub(1),
        2 => *rng.pick(&[0, u64::MAX]),
        _ => known,
    })
}

fn object_name(index: u64) -> ObjectName {
    if index.is_multiple_of(3) {
        ObjectName::in_namespace("other".into(), format!("o{index}"))
    } else {
        // Of two volumes, one of which may be encrypted.
        ObjectName::new(format!("{}.{index}", if index.is_multiple_of(2) { "a" } else { "b" }))
    }
}

fn key(rng: &mut Rng) -> Vec<u8> {
    format!("k{}", rng.below(30)).into_bytes()
}

fn value(rng: &mut Rng) -> Vec<u8> {
    let len = *rng.pick(&[0, 1, 8, 8, 8, 300]);
    vec![rng.below(3) as u8; len]
}

/// Reads every object that the oracle knows after a crash and tells the oracle what is there.  Objects of which a
/// part is said to be corrupt are skipped; the answer is their number.
pub async fn verify_objects(
    backend: &dyn ObjectBackend,
    oracle: &RefCell<ObjectOracle>,
    snaps: &SnapContext,
    kind: CrashKind,
) -> Result<usize> {
    let snaps: BTreeSet<SnapId> = snaps.snaps.iter().copied().collect();
    let names = oracle.borrow().names();
    let mut corrupt = 0;
    for name in names {
        match observe(backend, &name, &snaps).await {
            Ok(observed) => oracle.borrow_mut().recovered(&name, &observed, kind),
            Err(error) if error.kind() == ErrorKind::Corrupt => corrupt += 1,
            Err(error) => return Err(error),
        }
    }
    if corrupt == 0 {
        const PAGE_NAMES: usize = 3;
        let found = list_all(backend, PAGE_NAMES).await?;
        oracle.borrow_mut().listed(&found);
    }
    Ok(corrupt)
}
