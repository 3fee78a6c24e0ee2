//! Load of a run: objects, or images; with its oracle.

use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

use forebay_block::{Error, ErrorKind, ObjectBackend, ObjectName, ObjectOp, Result, Transaction};
use forebay_reactor::sleep;

use super::images::ImageLoad;
use super::scenario::{Scenario, Subject};
use crate::oracle::{CheckedBackend, Expected, ObjectOracle};
use crate::rng::Rng;
use crate::workload::{ObjectLoad, Seen, verify_objects};
use crate::world::{CrashKind, World};

/// A load with its oracle; it outlives crashes.
pub(super) enum Load {
    Objects(Box<Objects>),
    Images(Box<ImageLoad>),
}

/// A load on objects.
pub(super) struct Objects {
    objects: ObjectLoad,
    oracle: Rc<RefCell<ObjectOracle>>,
    rooms: u64,
    /// Writes that a close in flight makes durable.
    closing: Option<(u64, u64)>,
}

impl Load {
    pub(super) fn draw(rng: &mut Rng, scenario: &Scenario, size: u64, world: &World) -> Self {
        match scenario.subject {
            Subject::Objects => Load::Objects(Box::new(Objects::draw(rng, scenario, size, world))),
            Subject::Image => Load::Images(Box::new(ImageLoad::draw(rng, scenario, size, world))),
        }
    }

    pub(super) fn seen(&self) -> &Seen {
        match self {
            Load::Objects(load) => &load.objects.seen,
            Load::Images(load) => load.seen(),
        }
    }

    pub(super) fn expect(&mut self, expected: Expected) {
        match self {
            Load::Objects(load) => load.oracle.borrow_mut().expect(expected),
            Load::Images(load) => load.expect(expected),
        }
    }

    pub(super) fn violation(&self) -> Option<String> {
        match self {
            Load::Objects(load) => load.oracle.borrow().violation().map(str::to_owned),
            Load::Images(load) => load.violation(),
        }
    }

    /// No violation so far.
    pub(super) fn is_quiet(&self) -> bool {
        self.violation().is_none()
    }

    pub(super) async fn verify(&mut self, backend: Rc<dyn ObjectBackend>, before: CrashKind) -> Result<()> {
        match self {
            Load::Objects(load) => load.verify(backend, before).await,
            Load::Images(load) => load.verify(backend).await,
        }
    }

    pub(super) async fn run(&mut self, backend: Rc<dyn ObjectBackend>, rng: &mut Rng, requests: Option<usize>) {
        match self {
            Load::Objects(load) => load.run(backend, rng, requests).await,
            Load::Images(load) => load.run(backend, rng, requests).await,
        }
    }

    /// Checks, if the store was full, that removing works and frees space.
    pub(super) async fn make_room(&mut self, backend: Rc<dyn ObjectBackend>) -> Result<()> {
        match self {
            Load::Objects(load) => load.make_room(backend).await,
            Load::Images(load) => load.make_room(backend).await,
        }
    }

    pub(super) fn close_begins(&mut self) {
        match self {
            Load::Objects(load) => load.closing = Some(load.oracle.borrow_mut().flush()),
            Load::Images(load) => load.close_begins(),
        }
    }

    pub(super) fn closed(&mut self) {
        match self {
            Load::Objects(load) => {
                if let Some(mark) = load.closing.take() {
                    load.oracle.borrow_mut().flushed(mark);
                }
            }
            Load::Images(load) => load.closed(),
        }
    }

    pub(super) fn crash(&mut self, kind: CrashKind) {
        match self {
            Load::Objects(load) => load.oracle.borrow_mut().crash(kind),
            Load::Images(load) => load.crash(kind),
        }
    }
}

impl Objects {
    fn draw(rng: &mut Rng, scenario: &Scenario, size: u64, world: &World) -> Self {
        let mut objects = ObjectLoad::draw(rng);
        if scenario.crowded {
            // Together they may want twice what there is.
            objects.objects = objects.objects.max(4);
            objects.size_max = (2 * size / objects.objects).next_multiple_of(4096).min(1 << 20);
            objects.requests *= 2;
        }
        objects.write_max = *rng.pick(&[4096, 16 << 10, 64 << 10]);
        let mut oracle = ObjectOracle::new(Expected::nothing());
        oracle.note_in(world.clone());
        let oracle = Rc::new(RefCell::new(oracle));
        Self { objects, oracle, rooms: 0, closing: None }
    }

    async fn verify(&mut self, backend: Rc<dyn ObjectBackend>, before: CrashKind) -> Result<()> {
        let snaps = self.objects.snaps.borrow().clone();
        let corrupt = verify_objects(&*backend, &self.oracle, &snaps, before).await?;
        self.objects.seen.corrupt.set(self.objects.seen.corrupt.get() + corrupt as u64);
        Ok(())
    }

    async fn run(&mut self, backend: Rc<dyn ObjectBackend>, rng: &mut Rng, requests: Option<usize>) {
        if let Some(requests) = requests {
            self.objects.requests = requests;
        }
        let backend = CheckedBackend::new(backend, self.oracle.clone());
        self.objects.run(backend, self.oracle.clone(), rng).await;
    }

    async fn make_room(&mut self, backend: Rc<dyn ObjectBackend>) -> Result<()> {
        if self.objects.seen.no_space.get() == self.rooms {
            return Ok(());
        }
        self.rooms = self.objects.seen.no_space.get();
        let backend = CheckedBackend::new(backend, self.oracle.clone());
        let snaps = std::mem::take(&mut self.objects.snaps.borrow_mut().snaps);
        for snap in snaps {
            backend.snap_remove(snap).await?;
        }
        for name in self.objects.names() {
            match backend.submit(&name, Transaction::of(ObjectOp::Remove)).await {
                Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
                _ => {}
            }
        }
        backend.flush().await?;
        check_room(&*backend).await
    }
}

/// Checks that there is space for 64 KiB.
pub(super) async fn check_room(backend: &dyn ObjectBackend) -> Result<()> {
    // The space of clones comes back in the background.
    const TRIES: u32 = 100;
    let mut last = None;
    for _ in 0..TRIES {
        let data = crate::stamp::stamp(0, 64 << 10, 0).into();
        match backend.submit(&ObjectName::new("room"), Transaction::of(ObjectOp::Write { offset: 0, data })).await {
            Err(error) if error.kind() == ErrorKind::NoSpace => {
                last = Some(error);
                sleep(Duration::from_millis(100)).await;
            }
            result => return result.map(drop),
        }
    }
    let text = format!("everything was removed, and there is no room for 64 KiB: {last:?}");
    Err(Error::new(ErrorKind::NoSpace, text))
}
