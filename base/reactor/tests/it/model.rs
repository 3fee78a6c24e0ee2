//! Model tests of the executor, buffers and files with random programs.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

use crate::common::TempDir;
use forebay_reactor::sync::{Notify, Semaphore, queue};
use forebay_reactor::{
    Buf, BufList, BufMut, DriverChoice, File, JoinHandle, OpenOptions, Reactor, sleep, spawn, yield_now,
};
use proptest::prelude::*;

/// Step of a task of a random program.
#[derive(Debug, Clone)]
enum Step {
    Yield,
    Sleep(u8),
    /// Wakes itself from another thread and waits for that.
    Remote,
    /// Takes a permit, yields, releases it.
    Permit,
    /// Wakes all waiters of the bell.
    Ring,
    /// Waits for the bell, with a short timeout.
    Hear,
    Send,
    /// Takes a sent item, if there is one.
    Receive,
    Spawn(Vec<Step>),
    Join,
    Cancel,
    Abort,
    Detach,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let leaf = prop_oneof![
        3 => Just(Step::Yield),
        2 => (0..200u8).prop_map(Step::Sleep),
        1 => Just(Step::Remote),
        2 => Just(Step::Permit),
        1 => Just(Step::Ring),
        1 => Just(Step::Hear),
        2 => Just(Step::Send),
        2 => Just(Step::Receive),
        2 => Just(Step::Join),
        1 => Just(Step::Cancel),
        1 => Just(Step::Abort),
        1 => Just(Step::Detach),
    ];
    let list = prop::collection::vec(leaf.clone(), 0..6);
    list.prop_recursive(3, 40, 8, move |inner| {
        let spawn = inner.prop_map(Step::Spawn);
        prop::collection::vec(prop_oneof![3 => leaf.clone(), 2 => spawn], 0..8)
    })
}

/// Shared state and counters of the program.
struct World {
    born: Cell<usize>,
    died: Cell<usize>,
    polled_after_end: Cell<bool>,
    stopped: Cell<bool>,
    sent: Cell<usize>,
    received: Cell<usize>,
    bell: Notify,
    permits: Semaphore,
    inbox: RefCell<queue::Receiver<usize>>,
    outbox: queue::Sender<usize>,
}

impl World {
    fn new() -> Rc<Self> {
        let (outbox, inbox) = queue::unbounded();
        Rc::new(Self {
            born: Cell::new(0),
            died: Cell::new(0),
            polled_after_end: Cell::new(false),
            stopped: Cell::new(false),
            sent: Cell::new(0),
            received: Cell::new(0),
            bell: Notify::new(),
            permits: Semaphore::new(2),
            inbox: RefCell::new(inbox),
            outbox,
        })
    }
}

/// Guard that lives as long as its task's future.
struct Life(Rc<World>);

impl Life {
    fn new(world: &Rc<World>) -> Self {
        world.born.set(world.born.get() + 1);
        Self(world.clone())
    }
}

impl Drop for Life {
    fn drop(&mut self) {
        self.0.died.set(self.0.died.get() + 1);
        // Destructor that wakes other tasks.
        self.0.bell.notify_all();
    }
}

/// Future that another thread completes.
async fn remote() {
    let (answer, answered) = forebay_reactor::cross::oneshot();
    let thread = std::thread::spawn(move || answer.send(()));
    answered.await;
    thread.join().expect("the thread ends");
}

fn start(world: &Rc<World>, program: Vec<Step>) -> JoinHandle<usize> {
    let life = Life::new(world);
    let world = world.clone();
    spawn(async move {
        let _life = life;
        run(&world, program).await
    })
}

/// Returns the number of tasks: this one and its joined children.
async fn run(world: &Rc<World>, program: Vec<Step>) -> usize {
    let mut children: Vec<JoinHandle<usize>> = Vec::new();
    let mut count = 1;
    for step in program {
        if world.stopped.get() {
            world.polled_after_end.set(true);
        }
        match step {
            Step::Yield => yield_now().await,
            Step::Sleep(micros) => sleep(Duration::from_micros(micros.into())).await,
            Step::Remote => remote().await,
            Step::Permit => {
                let _permit = world.permits.acquire(1).await;
                yield_now().await;
            }
            Step::Ring => world.bell.notify_all(),
            Step::Hear => {
                let _ = forebay_reactor::timeout(Duration::from_micros(300), world.bell.wait()).await;
            }
            Step::Send => {
                world.sent.set(world.sent.get() + 1);
                world.outbox.send(world.sent.get());
            }
            Step::Receive => {
                if let Some(number) = world.inbox.borrow_mut().try_recv() {
                    world.received.set(world.received.get() + 1);
                    assert_eq!(number, world.received.get(), "a queue out of order");
                }
            }
            Step::Spawn(program) => children.push(start(world, program)),
            Step::Join => {
                if let Some(child) = children.pop() {
                    count += Box::pin(child).await;
                }
            }
            Step::Cancel => {
                if let Some(child) = children.pop() {
                    let died = world.died.get();
                    let ended = child.is_finished();
                    let result = child.cancel().await;
                    assert!(ended || result.is_some() || world.died.get() > died, "cancelled, but not dropped");
                }
            }
            Step::Abort => {
                if let Some(child) = children.pop() {
                    child.abort();
                }
            }
            Step::Detach => drop(children.pop()),
        }
    }
    for child in children {
        count += child.await;
    }
    count
}

fn drivers() -> [Reactor; 2] {
    [DriverChoice::Uring, DriverChoice::Poll].map(|choice| Reactor::system(choice).expect("a driver"))
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    /// Every task ends, and every future is dropped exactly once.
    #[test]
    fn programs_end(program in steps()) {
        for reactor in drivers() {
            let world = World::new();
            let count = reactor.block_on(async {
                let count = start(&world, program.clone()).await;
                // Detached and aborted tasks end by themselves.
                while world.died.get() < world.born.get() {
                    yield_now().await;
                }
                count
            });
            prop_assert!(count <= world.born.get());
            prop_assert_eq!(world.permits.available(), 2, "a permit was lost");
            prop_assert!(world.received.get() <= world.sent.get());
            drop(reactor);
            prop_assert_eq!(world.died.get(), world.born.get());
            prop_assert_eq!(Rc::strong_count(&world), 1);
        }
    }

    /// Crash after any number of iterations: nothing is left and nothing is polled any more.
    #[test]
    fn programs_crash(program in steps(), turns in 0..40usize) {
        for reactor in drivers() {
            let world = World::new();
            reactor.block_on(async {
                drop(start(&world, program.clone()));
                for _ in 0..turns {
                    yield_now().await;
                }
            });
            world.stopped.set(true);
            drop(reactor);
            prop_assert!(!world.polled_after_end.get());
            prop_assert_eq!(world.died.get(), world.born.get());
            prop_assert_eq!(world.permits.available(), 2, "a permit was lost");
            prop_assert_eq!(Rc::strong_count(&world), 1);
        }
    }

    /// Buffer lists, split and joined, against a vector of bytes.
    #[test]
    fn lists_are_runs_of_bytes(
        parts in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..40), 0..12),
        cuts in prop::collection::vec((any::<prop::sample::Index>(), any::<prop::sample::Index>()), 0..12),
    ) {
        let mut model: Vec<u8> = parts.concat();
        let mut list = BufList::new();
        for (at, part) in parts.iter().enumerate() {
            // Half of the parts are slices of a longer buffer, so that parts contiguous in memory occur.
            let mut buf = BufMut::with_capacity(part.len() + 7);
            buf.extend_from_slice(part);
            buf.extend_from_slice(b"trailer");
            let mut head = buf.split_to(part.len());
            if at % 2 == 0 {
                let first = head.split_to(part.len() / 2);
                list.push(first);
            }
            list.push(head);
            prop_assert_eq!(&buf[..], b"trailer");
        }
        prop_assert!(list.parts().iter().all(|part| !part.is_empty()));
        for (a, b) in cuts {
            prop_assert_eq!(list.to_vec(), model.clone());
            prop_assert!(list == model[..]);
            let (a, b) = (a.index(model.len() + 1), b.index(model.len() + 1));
            let (from, to) = (a.min(b), a.max(b));
            let (head, tail) = (list.slice(0..from), list.slice(to..list.len()));
            let middle = list.slice(from..to);
            prop_assert_eq!(middle.to_vec(), &model[from..to]);
            prop_assert_eq!(&middle.clone().into_contiguous()[..], &model[from..to]);
            // Joined again in another order.
            list = middle;
            list.append(tail);
            list.append(head);
            model = [&model[from..to], &model[to..], &model[..from]].concat();
        }
        prop_assert_eq!(list.len(), model.len());
        prop_assert!(list == model[..]);
    }
}

/// Operation on a file.
#[derive(Debug, Clone)]
enum FileStep {
    Write {
        at: u16,
        parts: Vec<u16>,
        durable: bool,
    },
    Read {
        at: u16,
        len: u16,
    },
    Punch {
        at: u16,
        len: u16,
    },
    Resize(u16),
    Sync,
    /// Starts a read and drops it.
    Forget {
        at: u16,
        len: u16,
    },
}

fn file_steps() -> impl Strategy<Value = Vec<FileStep>> {
    let at = 0..20_000u16;
    let len = 0..9000u16;
    let step = prop_oneof![
        4 => (at.clone(), prop::collection::vec(1..3000u16, 0..6), any::<bool>())
            .prop_map(|(at, parts, durable)| FileStep::Write { at, parts, durable }),
        4 => (at.clone(), len.clone()).prop_map(|(at, len)| FileStep::Read { at, len }),
        1 => (at.clone(), len.clone()).prop_map(|(at, len)| FileStep::Punch { at, len }),
        1 => at.clone().prop_map(FileStep::Resize),
        1 => Just(FileStep::Sync),
        1 => (at, len).prop_map(|(at, len)| FileStep::Forget { at, len }),
    ];
    prop::collection::vec(step, 0..20)
}

async fn check_file(steps: &[FileStep], unit: usize, options: OpenOptions) {
    let dir = TempDir::new();
    let file = File::open(dir.join("f"), options).expect("opens");
    let mut model: Vec<u8> = Vec::new();
    let round = |value: u16| usize::from(value) / unit * unit;
    for (number, step) in steps.iter().enumerate() {
        match step {
            FileStep::Write { at, parts, durable } => {
                let (at, mut list, mut end) = (round(*at), BufList::new(), round(*at));
                for (index, &part) in parts.iter().enumerate() {
                    let data = vec![(number * 16 + index) as u8; round(part)];
                    if model.len() < end + data.len() && !data.is_empty() {
                        model.resize(end + data.len(), 0);
                    }
                    if let Some(part) = model.get_mut(end..end + data.len()) {
                        part.copy_from_slice(&data);
                    }
                    end += data.len();
                    list.push(Buf::copy_of(&data));
                }
                let written = if *durable {
                    file.write_durable_at(list, at as u64).await
                } else {
                    file.write_at(list, at as u64).await
                };
                written.expect("writes");
            }
            FileStep::Read { at, len } => {
                let (at, len) = (round(*at), round(*len));
                let (result, buf) = file.read_at(BufMut::with_capacity(len), at as u64).await;
                let expect = &model[at.min(model.len())..(at + len).min(model.len())];
                assert_eq!(result.expect("reads"), expect.len());
                assert!(buf[..] == *expect);
            }
            FileStep::Punch { at, len } => {
                let (at, len) = (round(*at), round(*len));
                file.punch_hole(at as u64, len as u64).await.expect("punches");
                let end = (at + len).min(model.len());
                model[at.min(end)..end].fill(0);
            }
            FileStep::Resize(size) => {
                model.resize(round(*size), 0);
                file.set_size(model.len() as u64).expect("resizes");
            }
            FileStep::Sync => file.sync_data().await.expect("syncs"),
            FileStep::Forget { at, len } => {
                let read = spawn({
                    let (file, at, len) = (file.clone(), round(*at), round(*len));
                    async move { file.read_at(BufMut::with_capacity(len), at as u64).await.0.map(drop) }
                });
                yield_now().await;
                read.abort();
            }
        }
        assert_eq!(file.size().expect("size"), model.len() as u64);
    }
    assert!(std::fs::read(dir.join("f")).expect("reads") == model);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    /// Any sequence of operations leaves the bytes that a vector would contain, through the page cache and past it.
    #[test]
    fn files_are_runs_of_bytes(steps in file_steps()) {
        let plain = OpenOptions::read_write().create();
        for reactor in drivers() {
            reactor.block_on(async {
                check_file(&steps, 1, plain).await;
                check_file(&steps, 4096, plain.direct()).await;
            });
        }
    }
}
