//! What is under load in a run: objects, or an image; with its oracle.

use std::cell::RefCell;
use std::rc::Rc;
use std::time::Duration;

use forebay_block::{Error, ErrorKind, ObjectBackend, ObjectName, ObjectOp, Result, Transaction};
use forebay_reactor::sleep;

use super::scenario::Scenario;
use crate::oracle::{CheckedBackend, Expected, ObjectOracle};
use crate::rng::Rng;
use crate::workload::{ObjectLoad, Seen, verify_objects};
use crate::world::{CrashKind, World};

/// A load with its oracle; it outlives crashes.
pub(super) struct Load {
    objects: ObjectLoad,
    oracle: Rc<RefCell<ObjectOracle>>,
    rooms: u64,
}

impl Load {
    pub(super) fn draw(rng: &mut Rng, scenario: &Scenario, size: u64, world: &World) -> Self {
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
        Self { objects, oracle, rooms: 0 }
    }

    pub(super) fn seen(&self) -> &Seen {
        &self.objects.seen
    }

    pub(super) fn expect(&mut self, expected: Expected) {
        self.oracle.borrow_mut().expect(expected);
    }

    pub(super) fn violation(&self) -> Option<String> {
        self.oracle.borrow().violation().map(str::to_owned)
    }

    /// No violation so far.
    pub(super) fn is_quiet(&self) -> bool {
        self.oracle.borrow().violation().is_none()
    }

    pub(super) async fn verify(&mut self, backend: Rc<dyn ObjectBackend>, before: CrashKind) -> Result<()> {
        let snaps = self.objects.snaps.borrow().clone();
        let corrupt = verify_objects(&*backend, &self.oracle, &snaps, before).await?;
        self.objects.seen.corrupt.set(self.objects.seen.corrupt.get() + corrupt as u64);
        Ok(())
    }

    pub(super) async fn run(&mut self, backend: Rc<dyn ObjectBackend>, rng: &mut Rng, requests: Option<usize>) {
        if let Some(requests) = requests {
            self.objects.requests = requests;
        }
        let backend = CheckedBackend::new(backend, self.oracle.clone());
        self.objects.run(backend, self.oracle.clone(), rng).await;
    }

    /// If the store was full: removing must work, and after it there must be room again.
    pub(super) async fn make_room(&mut self, backend: Rc<dyn ObjectBackend>) -> Result<()> {
        if self.seen().no_space.get() == self.rooms {
            return Ok(());
        }
        self.rooms = self.seen().no_space.get();
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
        // The space of clones comes back in the background.
        const TRIES: u32 = 100;
        for _ in 0..TRIES {
            let data = crate::stamp::stamp(0, 64 << 10, 0).into();
            match backend.submit(&ObjectName::new("room"), Transaction::of(ObjectOp::Write { offset: 0, data })).await {
                Err(error) if error.kind() == ErrorKind::NoSpace => sleep(Duration::from_millis(100)).await,
                result => return result.map(drop),
            }
        }
        Err(Error::new(ErrorKind::NoSpace, "everything was removed, and there is no room for 64 KiB"))
    }

    pub(super) fn close_begins(&mut self) -> (u64, u64) {
        self.oracle.borrow_mut().flush()
    }

    pub(super) fn closed(&mut self, mark: (u64, u64)) {
        self.oracle.borrow_mut().flushed(mark);
    }

    pub(super) fn crash(&mut self) {
        self.oracle.borrow_mut().crash();
    }
}
