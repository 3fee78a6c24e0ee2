use std::rc::Rc;

use forebay_block::{
    Advice, ErrorKind, ObjectBackend, ObjectName, ObjectOp, ObjectRead, SnapContext, SnapId, Transaction,
};

use super::steps::{Guard, OBJECTS, RandomStep, StepOp, Submit};
use super::{content, pattern};

/// Executes `steps` on `subject`, which must be empty, and on `model`, and panics at the first difference.
///
/// Compares all observable state after each step: sizes, bytes at the head and at every snapshot, keys, clones (where
/// the model reports them), and the kinds of errors.  Versions may differ, but must grow.
pub async fn compare(subject: Rc<dyn ObjectBackend>, model: Rc<dyn ObjectBackend>, steps: &[RandomStep]) {
    let mut pair = Pair {
        subject,
        model,
        names: (0..OBJECTS).map(|i| ObjectName::new(format!("compare.{i}"))).collect(),
        snaps: Vec::new(),
        seq: 0,
        versions: vec![0; OBJECTS as usize],
    };
    for (number, step) in steps.iter().enumerate() {
        pair.step(number, step).await;
    }
    for object in 0..OBJECTS {
        pair.look(object, &format!("at the end, object {object}")).await;
    }
    pair.listing().await;
}

struct Pair {
    subject: Rc<dyn ObjectBackend>,
    model: Rc<dyn ObjectBackend>,
    names: Vec<ObjectName>,
    /// Existing snapshots, oldest first: the subject's ID and the model's.
    snaps: Vec<(SnapId, SnapId)>,
    /// Highest ID ever allocated on the model; the subject's are the same, which is checked.
    seq: u64,
    /// Newest version of each object on the subject.
    versions: Vec<u64>,
}

impl Pair {
    async fn step(&mut self, number: usize, step: &RandomStep) {
        match step {
            RandomStep::Submit(submits) => self.submit(number, submits).await,
            RandomStep::Snap => {
                let snap = self.subject.snap_allocate().await.expect("a snapshot number");
                let model = self.model.snap_allocate().await.expect("a snapshot number");
                assert!(self.snaps.last().is_none_or(|last| last.0 < snap), "step {number}: snapshot numbers grow");
                self.snaps.push((snap, model));
                self.seq = self.snaps.len() as u64;
            }
            RandomStep::SnapRemove(place) => {
                if self.snaps.is_empty() {
                    return;
                }
                let (snap, model) = self.snaps.remove(*place as usize % self.snaps.len());
                self.subject.snap_remove(snap).await.unwrap_or_else(|error| panic!("step {number}: {error}"));
                self.model.snap_remove(model).await.expect("the model removes it");
                for object in 0..OBJECTS {
                    self.look(object, &format!("step {number}: {step:?}, object {object}")).await;
                }
            }
            RandomStep::Flush => {
                self.subject.flush().await.unwrap_or_else(|error| panic!("step {number}: flush: {error}"))
            }
        }
    }

    async fn submit(&mut self, number: usize, submits: &[Submit]) {
        // Guards are constructed from the state before the first submission.
        let mut made = Vec::new();
        for submit in submits {
            let ours = self.transaction(submit, true, submits.len() == 1).await;
            let models = self.transaction(submit, false, submits.len() == 1).await;
            made.push((submit, ours, models));
        }
        let waiting: Vec<_> = made
            .into_iter()
            .map(|(submit, ours, models)| {
                let name = &self.names[submit.object as usize];
                (submit, self.subject.submit(name, ours), self.model.submit(name, models))
            })
            .collect();
        for (place, (submit, ours, models)) in waiting.into_iter().enumerate() {
            let at = format!("step {number}.{place}: {submit:?}");
            match (ours.await, models.await) {
                (Ok(version), Ok(_)) => {
                    let last = &mut self.versions[submit.object as usize];
                    let changed = !submit.ops.is_empty();
                    // A step without effect may leave the version unchanged.
                    assert!(version >= *last || version == 0 || !changed, "{at}: version {version} after {last}");
                    *last = version.max(*last);
                }
                (Err(ours), Err(model)) => assert_eq!(ours.kind(), model.kind(), "{at}: {ours}"),
                (ours, model) => panic!("{at}: answered {ours:?} where {model:?} was expected"),
            }
        }
        let mut touched: Vec<u8> = submits.iter().map(|submit| submit.object).collect();
        touched.sort_unstable();
        touched.dedup();
        for object in touched {
            self.look(object, &format!("step {number}: {submits:?}, object {object}")).await;
        }
    }

    async fn transaction(&self, submit: &Submit, ours: bool, alone: bool) -> Transaction {
        let backend = if ours { &self.subject } else { &self.model };
        let name = &self.names[submit.object as usize];
        let mut ops = Vec::new();
        for guard in &submit.guards {
            ops.push(match guard {
                Guard::Exists => ObjectOp::AssertExists,
                Guard::Version { holds } => {
                    // No object ever has the highest version.
                    let version = backend.stat(name, SnapId::HEAD).await.map_or(u64::MAX, |stat| stat.version);
                    match (holds, alone) {
                        (true, true) => ObjectOp::AssertVersion(version),
                        // A step without effect may or may not change the version.
                        (true, false) => ObjectOp::AssertExists,
                        (false, _) => ObjectOp::AssertVersion(u64::MAX),
                    }
                }
                Guard::Compare { extent, holds } => {
                    let read = ObjectRead::new(SnapId::HEAD, *extent);
                    let mut data = self.model.read(name, read).await.unwrap_or_default().fill(*extent).to_vec();
                    if let (Some(last), false) = (data.last_mut(), *holds) {
                        *last = !*last;
                    }
                    ObjectOp::Compare { offset: extent.offset, data: forebay_block::Buf::copy_of(&data).into() }
                }
                Guard::Kv { key, holds } => {
                    let found = self.model.kv_get(name, vec![vec![*key]]).await.unwrap_or_default().pop().flatten();
                    let value = if *holds { found } else { found.xor(Some(b"other".to_vec())) };
                    ObjectOp::KvCompare { key: vec![*key], value }
                }
                Guard::CreateNew => ObjectOp::Create { exclusive: true },
            });
        }
        for op in &submit.ops {
            ops.extend(self.op(op, ours));
        }
        let snaps = self.snaps.iter().rev().map(|&(subject, model)| if ours { subject } else { model }).collect();
        let mut snapc = SnapContext { seq: 0, snaps };
        snapc.seq = snapc.snaps.first().map_or(0, |newest| newest.0);
        Transaction { snapc: Some(Rc::new(snapc)), ops, durable: submit.durable, advice: Advice::NONE }
    }

    fn op(&self, op: &StepOp, ours: bool) -> Option<ObjectOp> {
        Some(match op {
            StepOp::Create => ObjectOp::Create { exclusive: false },
            StepOp::Write(extent, seed) => {
                ObjectOp::Write { offset: extent.offset, data: pattern(*seed, extent.len as usize) }
            }
            StepOp::WriteFull(len, seed) => ObjectOp::WriteFull { data: pattern(*seed, *len as usize) },
            StepOp::Zero(extent) => ObjectOp::Zero { extent: *extent },
            StepOp::Truncate(size) => ObjectOp::Truncate { size: *size },
            StepOp::Remove => ObjectOp::Remove,
            StepOp::KvSet(pairs) => ObjectOp::KvSet {
                pairs: pairs.iter().map(|&(key, value)| (vec![key], vec![value; value as usize])).collect(),
            },
            StepOp::KvRemove(keys) => ObjectOp::KvRemove { keys: keys.iter().map(|&key| vec![key]).collect() },
            StepOp::Rollback(place) => {
                let (subject, model) = *self.snaps.get((*place as usize).checked_rem(self.snaps.len())?)?;
                ObjectOp::Rollback { snap: if ours { subject } else { model } }
            }
        })
    }

    /// Compares the complete state of one object.
    async fn look(&self, object: u8, at: &str) {
        let name = &self.names[object as usize];
        let head = (SnapId::HEAD, SnapId::HEAD);
        for &(snap, model) in self.snaps.iter().chain([&head]) {
            let ours = content(&*self.subject, name, snap).await;
            let expected = content(&*self.model, name, model).await;
            if ours != expected {
                panic!("{at}: at {snap:?}: {}", difference(ours.as_deref(), expected.as_deref()));
            }
        }
        let keys = self.subject.kv_list(name, b"", b"", 1000).await.map_err(|error| error.kind());
        assert_eq!(keys, self.model.kv_list(name, b"", b"", 1000).await.map_err(|error| error.kind()), "{at}: keys");

        let model = match self.model.snap_set(name).await {
            Err(error) if error.kind() == ErrorKind::Unsupported => return,
            other => other,
        };
        // Clones of removed snapshots may still be awaiting trim, so only existing snapshots count.
        let clones = |set: forebay_block::SnapSet, ours: bool| -> Vec<(Vec<usize>, u64)> {
            let place =
                |snap: &SnapId| self.snaps.iter().position(|pair| if ours { pair.0 == *snap } else { pair.1 == *snap });
            let seen = set.clones.iter().map(|clone| (clone.snaps.iter().filter_map(place).collect(), clone.size));
            seen.filter(|(snaps, _): &(Vec<usize>, u64)| !snaps.is_empty()).collect()
        };
        let ours = self.subject.snap_set(name).await.map_or_else(|_| Vec::new(), |set| clones(set, true));
        assert_eq!(ours, model.map_or_else(|_| Vec::new(), |set| clones(set, false)), "{at}: clones");
    }

    async fn listing(&self) {
        let names = self.subject.list(None, None, 1000).await.expect("names").names;
        for name in &self.names {
            let expected = self.model.stat(name, SnapId::HEAD).await.is_ok();
            assert_eq!(names.contains(name), expected, "{name} in the listing");
        }
    }
}

fn difference(ours: Option<&[u8]>, expected: Option<&[u8]>) -> String {
    match (ours, expected) {
        (Some(ours), Some(expected)) if ours.len() == expected.len() => {
            let at = ours.iter().zip(expected).position(|(a, b)| a != b).unwrap_or(ours.len());
            let show = |bytes: &[u8]| bytes[at..(at + 8).min(bytes.len())].to_vec();
            format!("byte {at} of {}: {:?} where {:?} was expected", ours.len(), show(ours), show(expected))
        }
        (ours, expected) => {
            let size =
                |bytes: Option<&[u8]>| bytes.map_or("nothing".to_owned(), |bytes| format!("{} bytes", bytes.len()));
            format!("{} where {} was expected", size(ours), size(expected))
        }
    }
}
