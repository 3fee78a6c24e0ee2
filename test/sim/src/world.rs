//! The world: a seed, a clock, disks, a network, and a machine that can crash.

use std::cell::{Cell, RefCell};
use std::fmt;
use std::future::Future;
use std::path::Path;
use std::rc::Rc;
use std::task::{Poll, Waker};

use forebay_reactor::{Addr, Reactor};

use crate::content::{Content, Effect};
use crate::core::Core;
use crate::driver::{SimDriver, Unparked};
use crate::faults::{DiskFaults, Faults};
use crate::fs::Files;
use crate::net::Net;
pub(crate) use crate::pages::PAGE;
use crate::trace::What;

/// Reason for which a run ended before its future completed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stop {
    /// The power failed at this persistence point.
    Crash(u64),
    /// Deadlock: no operation is in flight, no timer runs, and the future is not complete.
    Deadlock,
    /// More events than [`Faults::events_max`].
    Runaway,
}

impl fmt::Display for Stop {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Stop::Crash(point) => write!(f, "the power failed at persistence point {point}"),
            Stop::Deadlock => f.write_str("deadlock: nothing is in flight, no timer runs, and nobody is done"),
            Stop::Runaway => f.write_str("the run goes on and on"),
        }
    }
}

impl std::error::Error for Stop {}

/// Kind of crash.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CrashKind {
    /// The power fails: what was not synced is at risk.
    Power,
    /// The process is killed: what has completed stays readable, and stays at risk until it is synced.
    Kill,
}

pub(crate) struct State {
    pub(crate) core: Core,
    pub(crate) files: Files,
    pub(crate) net: Net,
    pub(crate) incarnation: u32,
    pub(crate) idle_looks: u32,
}

pub(crate) struct Shared {
    pub(crate) state: RefCell<State>,
    runner: RefCell<Option<Waker>>,
    running: Cell<bool>,
    seed: u64,
}

impl Shared {
    /// Wakes [`World::run`], so that it detects that the world has stopped.
    pub(crate) fn wake_runner(&self) {
        let runner = self.runner.borrow_mut().take();
        if let Some(waker) = runner {
            waker.wake();
        } else if !self.running.get() && !std::thread::panicking() {
            // Events are not processed: the reactor was driven by hand.
            let state = self.state.borrow();
            if let Some(stop) = state.core.stop {
                let tail = state.core.trace.tail(200);
                drop(state);
                panic!("seed {}: {stop}, outside World::run\n{tail}", self.seed);
            }
        }
    }
}

/// A simulated world.  Cloning gives another handle to the same one.
///
/// ```
/// use forebay_sim::{CrashKind, Faults, World};
/// use forebay_reactor::{Buf, File, OpenOptions};
/// let world = World::new(7, Faults::none());
/// world.add_disk("/dev/a", 1 << 20, 512);
/// let reactor = world.reactor();
/// let written = world.run(&reactor, async {
///     let disk = File::open("/dev/a", OpenOptions::read_write()).unwrap();
///     disk.write_at(Buf::copy_of(b"kept"), 0).await.unwrap();
///     disk.sync_data().await.unwrap();
///     disk.write_at(Buf::copy_of(b"perhaps"), 512).await.unwrap();
/// });
/// assert!(written.is_ok());
/// world.crash(reactor, CrashKind::Power);
/// let reactor = world.reactor();
/// let read = world.run(&reactor, async {
///     let disk = File::open("/dev/a", OpenOptions::read()).unwrap();
///     disk.read_exact_at(0, 4).await.unwrap()
/// });
/// assert_eq!(&read.unwrap()[..], b"kept");
/// ```
#[derive(Clone)]
pub struct World {
    shared: Rc<Shared>,
}

/// A disk or file as it was.
pub(crate) struct Saved(Content);

impl World {
    /// A world without disks.  The same seed, faults and calls give the same run.
    pub fn new(seed: u64, faults: Faults) -> Self {
        let state = State {
            core: Core::new(seed, faults),
            files: Files::default(),
            net: Net::default(),
            incarnation: 0,
            idle_looks: 0,
        };
        let shared = Shared { state: RefCell::new(state), runner: RefCell::default(), running: Cell::new(false), seed };
        Self { shared: Rc::new(shared) }
    }

    /// Returns the seed.
    pub fn seed(&self) -> u64 {
        self.shared.seed
    }

    /// A device of `size` bytes with sectors of `sector` bytes: the unit of direct I/O, and the unit in which a
    /// crash tears a write.
    pub fn add_disk(&self, path: impl AsRef<Path>, size: u64, sector: u32) {
        self.with(|state| state.files.add(path.as_ref(), size, sector, true));
    }

    /// A file of `size` zero bytes, known to be on its file system.
    pub fn add_file(&self, path: impl AsRef<Path>, size: u64, sector: u32) {
        self.with(|state| state.files.add(path.as_ref(), size, sector, false));
    }

    /// Makes a disk or file `size` bytes long, as another process does.
    pub fn resize(&self, path: impl AsRef<Path>, size: u64) {
        self.with(|state| {
            if let Some((_, node)) = state.files.find(path.as_ref()) {
                node.content.land(Effect::Resize(size), true);
            }
        });
    }

    /// Makes another process rename a file as soon as an open has not found its new name.
    pub fn rename_late(&self, from: impl AsRef<Path>, to: impl AsRef<Path>) {
        self.with(|state| state.files.rename_late(from.as_ref(), to.as_ref()));
    }

    /// A reactor in this world.  One at a time: the one before must have been given to [`crash`](Self::crash), or
    /// dropped.
    pub fn reactor(&self) -> Reactor {
        let incarnation = self.with(|state| state.incarnation);
        let driver = SimDriver { shared: self.shared.clone(), incarnation, unpark: Unparked::default().into() };
        Reactor::new(Box::new(driver))
    }

    /// Runs `future` on a reactor of this world, until it ends or the world stops.
    pub fn run<F: Future>(&self, reactor: &Reactor, future: F) -> Result<F::Output, Stop> {
        self.shared.running.set(true);
        let result = reactor.block_on(async {
            let mut future = std::pin::pin!(future);
            std::future::poll_fn(|cx| {
                if let Some(stop) = self.with(|state| state.core.stop) {
                    return Poll::Ready(Err(stop));
                }
                *self.shared.runner.borrow_mut() = Some(cx.waker().clone());
                future.as_mut().poll(cx).map(Ok)
            })
            .await
        });
        self.shared.running.set(false);
        result
    }

    /// The machine (or only its process) dies: all tasks end where they stand, the disks keep what they keep.
    /// The next [`reactor`](Self::reactor) sees what survived.
    pub fn crash(&self, reactor: Reactor, kind: CrashKind) {
        self.with(|state| {
            // From here on the old driver does nothing, whatever its tasks do while they are dropped.
            state.incarnation += 1;
            let kill = kind == CrashKind::Kill;
            let number = u64::from(state.incarnation);
            state.core.log(if kill { What::Kill } else { What::Crash }, "", [number, state.core.points, 0]);
        });
        drop(reactor);
        self.with(|state| {
            state.core.forget_events();
            state.core.stop = None;
            state.core.crash_at = None;
            state.files.crash(&mut state.core, kind == CrashKind::Kill);
            state.net.crash();
            state.idle_looks = 0;
        });
        self.shared.runner.borrow_mut().take();
    }

    /// One machine of several dies, or only its process: whatever has this disk open gets errors from now on, and what was in
    /// flight is on the disk as after a [`crash`](Self::crash). Returns false if there is no such disk.
    pub fn lose_disk(&self, path: impl AsRef<Path>, kind: CrashKind) -> bool {
        self.with(|state| state.files.lose(&mut state.core, path.as_ref(), kind == CrashKind::Kill))
    }

    /// The power will fail at persistence point `point` (counted from the world's beginning, the first is 1).
    /// Every submit and every completion of a write, a sync or a punch is one, and so is each change of a file's
    /// length or name.
    pub fn crash_at_point(&self, point: Option<u64>) {
        self.with(|state| state.core.crash_at = point);
    }

    /// Fails the power now: nothing more is written, and nothing more completes.
    pub fn power_off(&self) {
        self.with(|state| {
            let point = state.core.points;
            state.core.stop(Stop::Crash(point));
        });
        if self.shared.running.get() {
            self.shared.wake_runner();
        }
    }

    /// A store or a fence of persistent memory: false when the power is off, so that it does nothing.
    pub(crate) fn memory_point(&self, incarnation: u32) -> bool {
        let (alive, stopped) = self.with(|state| {
            if state.core.stop.is_some() || state.incarnation != incarnation {
                return (false, false);
            }
            state.core.point();
            (true, state.core.stop.is_some())
        });
        if stopped && self.shared.running.get() {
            self.shared.wake_runner();
        }
        alive
    }

    /// The power is off: what code that still runs finds out does not count.
    pub fn is_off(&self) -> bool {
        self.with(|state| state.core.stop.is_some())
    }

    /// The machine that began as this incarnation runs.
    pub(crate) fn has_power(&self, incarnation: u32) -> bool {
        self.with(|state| state.core.stop.is_none() && state.incarnation == incarnation)
    }

    pub(crate) fn incarnation(&self) -> u32 {
        self.with(|state| state.incarnation)
    }

    /// Returns the number of persistence points passed so far.
    pub fn points(&self) -> u64 {
        self.with(|state| state.core.points)
    }

    /// Returns the nanoseconds since the world began.
    pub fn now(&self) -> u64 {
        self.with(|state| state.core.now)
    }

    /// Sets the faults from now on.
    pub fn set_faults(&self, faults: Faults) {
        self.with(|state| state.core.faults = faults);
    }

    /// Faults of one disk or file alone; `None`: those of the world again.  False when there is no such path.
    pub fn set_disk_faults(&self, path: impl AsRef<Path>, faults: Option<DiskFaults>) -> bool {
        self.with(|state| state.files.set_faults(path.as_ref(), faults))
    }

    /// The sector at `offset` cannot be read until it is written again.
    pub fn set_bad_sector(&self, path: impl AsRef<Path>, offset: u64) -> bool {
        self.with(|state| state.files.set_bad(path.as_ref(), offset))
    }

    /// Returns the largest number of operations that were in flight on a disk or file at a time since the last call; `None`
    /// when there is no such path.
    pub fn take_most_in_flight(&self, path: impl AsRef<Path>) -> Option<usize> {
        self.with(|state| state.files.take_most_in_flight(path.as_ref()))
    }

    /// Flips `count` bits at random places of what is stored, as reads see it; returns the places.
    pub fn flip_bits(&self, path: impl AsRef<Path>, count: usize) -> Vec<u64> {
        self.flip_bits_where(path, count, |_| true)
    }

    /// Flips `count` bits at random places of those stored 4 KiB pages whose offset `wanted` accepts.
    pub fn flip_bits_where(
        &self,
        path: impl AsRef<Path>,
        count: usize,
        mut wanted: impl FnMut(u64) -> bool,
    ) -> Vec<u64> {
        self.with(|state| {
            let State { core, files, .. } = state;
            let Some((inode, node)) = files.find(path.as_ref()) else { return Vec::new() };
            let mut pages = node.content.stored_pages();
            pages.retain(|page| wanted(page * PAGE));
            if pages.is_empty() {
                return Vec::new();
            }
            let mut places = Vec::new();
            for _ in 0..count {
                let at = core.rng.pick(&pages) * PAGE + core.rng.below(PAGE);
                node.content.flip(at, core.rng.below(8) as u8);
                core.log(What::Fault, "bit flipped on the disk", [inode as u64, at, 0]);
                places.push(at);
            }
            files.damage.extend(places.iter().map(|&at| (inode, at)));
            places
        })
    }

    /// Reads from a disk or file past all faults, without a reactor; `None` when there is no such path.
    pub fn peek(&self, path: impl AsRef<Path>, offset: u64, len: usize) -> Option<Vec<u8>> {
        self.with(|state| {
            let (_, node) = state.files.find(path.as_ref())?;
            let mut out = vec![0; len];
            node.content.read(offset, &mut out);
            Some(out)
        })
    }

    /// Flips a bit of what is stored on a disk or file.
    pub(crate) fn flip(&self, path: impl AsRef<Path>, at: u64, bit: u8) {
        self.with(|state| {
            let State { core, files, .. } = state;
            let Some((inode, node)) = files.find(path.as_ref()) else { return };
            node.content.flip(at, bit);
            core.log(What::Fault, "bit flipped on the disk", [inode as u64, at, u64::from(bit)]);
        });
    }

    /// Numbers of the stored pages of a disk or file.
    pub(crate) fn stored_pages(&self, path: impl AsRef<Path>) -> Vec<u64> {
        self.with(|state| state.files.find(path.as_ref()).map(|(_, node)| node.content.stored_pages()))
            .unwrap_or_default()
    }

    /// Returns a disk or file as it is, with what was not synced; `None` when there is no such path.
    pub(crate) fn save(&self, path: impl AsRef<Path>) -> Option<Saved> {
        self.with(|state| state.files.find(path.as_ref()).map(|(_, node)| Saved(node.content.clone())))
    }

    /// Makes a disk or file what it was.
    pub(crate) fn restore(&self, path: impl AsRef<Path>, saved: &Saved) {
        self.with(|state| {
            if let Some((_, node)) = state.files.find(path.as_ref()) {
                node.content = saved.0.clone();
            }
        });
    }

    /// Times that something stored or read was not what was written (flips, lost and misdirected writes).
    pub fn damage_count(&self) -> usize {
        self.with(|state| state.files.damage.len())
    }

    /// Bytes stored in a disk or file now.
    pub fn allocated(&self, path: impl AsRef<Path>) -> Option<u64> {
        self.with(|state| state.files.find(path.as_ref()).map(|(_, node)| node.content.allocated()))
    }

    /// Resets live connections to `addr` (`None`: all), each with a chance of `ppm` in a million; returns how many.
    pub fn reset_connections(&self, addr: Option<&Addr>, ppm: u32) -> usize {
        self.with(|state| state.net.reset_some(&mut state.core, addr, ppm))
    }

    /// Silences live connections as [`reset_connections`](Self::reset_connections) resets them: from then on
    /// nothing arrives, and neither end is told.
    pub fn cut_connections(&self, addr: Option<&Addr>, ppm: u32) -> usize {
        self.with(|state| state.net.cut_some(&mut state.core, addr, ppm))
    }

    /// Keeps notes in the trace from now on.
    pub fn set_verbose(&self) {
        self.with(|state| state.core.trace.set_verbose());
    }

    /// Adds a line to the trace; the text is made only when notes are kept.
    pub fn note(&self, text: impl FnOnce() -> String) {
        self.with(|state| {
            let now = state.core.now;
            state.core.trace.note(now, text);
        });
    }

    /// A hash over every event so far: two runs with the same hash were the same.
    pub fn trace_hash(&self) -> u64 {
        self.with(|state| state.core.trace.hash())
    }

    /// Events so far.
    pub fn trace_count(&self) -> u64 {
        self.with(|state| state.core.trace.count())
    }

    /// Returns the last `lines` events, for people.
    pub fn trace(&self, lines: usize) -> String {
        self.with(|state| state.core.trace.tail(lines))
    }

    fn with<R>(&self, f: impl FnOnce(&mut State) -> R) -> R {
        f(&mut self.shared.state.borrow_mut())
    }
}

impl fmt::Debug for World {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "World(seed {}, {} events)", self.seed(), self.trace_count())
    }
}
