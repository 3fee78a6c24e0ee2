//! The simulator behind the reactor's driver trait.

use std::io;
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use forebay_reactor::driver::{
    Completion, Driver, FileDriver, FileInfo, FileSystemSpace, Handle, Op, OpKey, OpenOptions, Unpark, Wait,
};
use forebay_reactor::{Addr, Instant};

use crate::core::Event;
use crate::fs::{EIO, os_error};
use crate::trace::What;
use crate::world::{Shared, State, Stop};

/// Looks at the driver without waiting, and without anything completing, after which time passes by itself: so a
/// task that spins until something happens sees it happen.
const IDLE_LOOKS_MAX: u32 = 64;

/// The wall clock when the world begins: 2025-01-01T00:00:00Z.
const WALL_CLOCK_START: Duration = Duration::from_secs(1_735_689_600);

/// One life of the machine: from power on (or the start of the process) to the next crash.
pub(crate) struct SimDriver {
    pub(crate) shared: Rc<Shared>,
    pub(crate) incarnation: u32,
    pub(crate) unpark: Arc<Unparked>,
}

#[derive(Default)]
pub(crate) struct Unparked(AtomicBool);

impl Unpark for Unparked {
    fn unpark(&self) {
        self.0.store(true, Ordering::SeqCst);
    }
}

impl SimDriver {
    /// The state, if this driver's life has not ended.
    fn alive<R>(&self, f: impl FnOnce(&mut State) -> R) -> Option<R> {
        let mut state = self.shared.state.borrow_mut();
        if state.incarnation != self.incarnation || state.core.stop.is_some() {
            return None;
        }
        let result = f(&mut state);
        let stopped = state.core.stop.is_some();
        drop(state);
        if stopped {
            self.shared.wake_runner();
        }
        Some(result)
    }

    fn alive_io<R>(&self, f: impl FnOnce(&mut State) -> io::Result<R>) -> io::Result<R> {
        self.alive(f).unwrap_or_else(|| os_error(EIO))
    }
}

impl State {
    /// Lets everything happen that is due.
    fn happen(&mut self) {
        while let Some(event) = self.core.take_due() {
            match event {
                Event::Disk(number) => self.files.finish(&mut self.core, number),
                Event::Net(event) => self.net.happen(&mut self.core, event),
            }
        }
    }

    /// Lets time pass until something completes, or until `deadline`.
    fn wait(&mut self, deadline: Option<u64>) {
        loop {
            self.happen();
            if !self.core.done.is_empty() || self.core.stop.is_some() {
                return;
            }
            match (self.core.next_at(), deadline) {
                (Some(at), Some(deadline)) if at > deadline => {
                    self.core.now = self.core.now.max(deadline);
                    return;
                }
                (Some(at), _) => self.core.now = self.core.now.max(at),
                (None, Some(deadline)) => {
                    self.core.now = self.core.now.max(deadline);
                    return;
                }
                (None, None) => return self.core.stop(Stop::Deadlock),
            }
        }
    }
}

impl FileDriver for SimDriver {
    fn open(&mut self, path: &Path, options: OpenOptions) -> io::Result<(Handle, FileInfo)> {
        self.alive_io(|state| state.files.open(&mut state.core, path, options))
    }

    fn file_size(&mut self, file: Handle) -> io::Result<u64> {
        self.alive_io(|state| state.files.size(file))
    }

    fn set_file_size(&mut self, file: Handle, size: u64) -> io::Result<()> {
        self.alive_io(|state| state.files.set_size(&mut state.core, file, size))
    }

    fn remove_file(&mut self, path: &Path) -> io::Result<()> {
        self.alive_io(|state| state.files.remove(&mut state.core, path))
    }

    fn sync_dir(&mut self, path: &Path) -> io::Result<()> {
        self.alive_io(|state| {
            state.files.sync_dir(&mut state.core, path);
            Ok(())
        })
    }

    fn allocated_size(&mut self, file: Handle) -> io::Result<Option<u64>> {
        self.alive_io(|state| state.files.allocated_size(file))
    }

    fn next_data(&mut self, file: Handle, from: u64) -> io::Result<Option<u64>> {
        self.alive_io(|state| state.files.next_data(file, from))
    }

    fn next_hole(&mut self, file: Handle, from: u64) -> io::Result<Option<u64>> {
        self.alive_io(|state| state.files.next_hole(file, from))
    }

    fn file_system_space(&mut self, _path: &Path) -> io::Result<Option<FileSystemSpace>> {
        self.alive_io(|state| Ok(state.files.space(&state.core)))
    }

    fn space_beneath(&mut self, _file: Handle) -> io::Result<Option<FileSystemSpace>> {
        self.alive_io(|state| Ok(state.files.space(&state.core)))
    }

    fn file_user(&mut self, _path: &Path) -> Option<String> {
        None
    }
}

impl Driver for SimDriver {
    fn name(&self) -> &'static str {
        "simulation"
    }

    fn submit(&mut self, key: OpKey, op: Op) {
        // With the power off nothing is started, and nothing ends.
        self.alive(|state| match op {
            Op::Read { .. } | Op::Write { .. } | Op::Sync { .. } | Op::Punch { .. } | Op::Allocate { .. } => {
                state.files.submit(&mut state.core, key, op);
            }
            // There is nothing to wait for: this driver takes no foreign descriptors in.
            Op::Ready { .. } => {}
            Op::Accept { .. } | Op::Connect { .. } | Op::Recv { .. } | Op::Send { .. } => {
                state.net.submit(&mut state.core, key, op);
            }
        });
    }

    fn cancel(&mut self, key: OpKey) {
        // What a disk has begun, it ends.
        self.alive(|state| {
            state.core.log(What::Cancel, "", [key.0, 0, 0]);
            state.net.cancel(&mut state.core, key);
        });
    }

    fn poll(&mut self, wait: Wait, done: &mut Vec<Completion>) {
        let parked = !self.unpark.0.swap(false, Ordering::SeqCst);
        let polled = self.alive(|state| {
            state.happen();
            if state.core.done.is_empty() && parked {
                match wait {
                    Wait::No => {
                        state.idle_looks += 1;
                        if state.idle_looks > IDLE_LOOKS_MAX {
                            state.core.now += crate::faults::MICRO;
                        }
                        if u64::from(state.idle_looks) > state.core.faults.events_max {
                            state.core.stop(Stop::Runaway);
                        }
                    }
                    Wait::Until(deadline) => state.wait(Some(deadline.as_nanos())),
                    Wait::Forever => state.wait(None),
                }
            }
            if state.core.stop.is_none() && !state.core.done.is_empty() {
                state.idle_looks = 0;
                done.append(&mut state.core.done);
            }
        });
        if polled.is_none() {
            self.shared.wake_runner();
        }
    }

    fn now(&self) -> Instant {
        Instant::from_nanos(self.shared.state.borrow().core.now)
    }

    fn wall_clock(&self) -> Duration {
        WALL_CLOCK_START + Duration::from_nanos(self.shared.state.borrow().core.now)
    }

    fn random(&mut self) -> u64 {
        self.shared.state.borrow_mut().core.rng.bits()
    }

    fn unparker(&self) -> Arc<dyn Unpark> {
        self.unpark.clone()
    }

    fn listen(&mut self, addr: &Addr, _private: bool) -> io::Result<(Handle, Addr)> {
        self.alive_io(|state| {
            let handle = state.core.handle();
            let addr = state.net.listen(handle, addr)?;
            Ok((handle, addr))
        })
    }

    fn is_peer_closed(&mut self, sock: Handle) -> bool {
        self.alive(|state| state.net.is_peer_closed(sock)).unwrap_or(true)
    }

    fn shutdown(&mut self, sock: Handle) {
        self.alive(|state| state.net.shutdown(&mut state.core, sock));
    }

    fn shutdown_send(&mut self, sock: Handle) {
        self.alive(|state| state.net.shutdown_send(&mut state.core, sock));
    }

    fn close(&mut self, handle: Handle) {
        self.alive(|state| {
            state.core.log(What::Close, "", [handle.0, 0, 0]);
            if !state.net.close(&mut state.core, handle) {
                state.files.close(handle);
            }
        });
    }
}
