//! Reactors on threads of their own, and calls between them.

use std::any::Any;
use std::fmt;
use std::future::Future;
use std::io;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll};
use std::thread;
use std::time::Duration;

use crate::cross::{self, OneshotReceiver, OneshotSender};
use crate::driver::{DriverChoice, os};
use crate::executor::{Reactor, Remote, ThreadMessage, spawn, with_current};

/// Error of a core that was stopped, or panicked.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CoreGone;

impl fmt::Display for CoreGone {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the core has stopped")
    }
}

impl std::error::Error for CoreGone {}

/// Handle to a reactor that works from any thread.
#[derive(Clone)]
pub struct CoreHandle {
    remote: Arc<Remote>,
}

impl CoreHandle {
    /// Returns the handle of the reactor that runs on this thread.
    ///
    /// # Panics
    /// When no reactor runs on this thread.
    pub fn current() -> Self {
        with_current(|inner| Self { remote: inner.remote.clone() })
    }

    pub(crate) fn new(remote: Arc<Remote>) -> Self {
        Self { remote }
    }

    /// Returns whether the reactor is the one that runs on this thread.
    pub fn is_current(&self) -> bool {
        self.remote.is_current()
    }

    /// Returns whether the reactor has stopped.
    pub fn is_gone(&self) -> bool {
        self.remote.closed.load(Ordering::Acquire)
    }

    /// Runs `start` on the core, and the future that it returns as a task there.  It begins at once.  The result can be
    /// awaited on any core; dropping the returned future does not cancel the task.
    pub fn run<F, R>(&self, start: F) -> Running<R::Output>
    where
        F: FnOnce() -> R + Send + 'static,
        R: Future + 'static,
        R::Output: Send + 'static,
    {
        let (answer, answered) = cross::oneshot();
        let begin = move || {
            let future = start();
            drop(spawn(async move { answer.send(future.await) }));
        };
        self.remote.push(ThreadMessage::Begin(Box::new(begin)));
        Running { answered }
    }
}

impl fmt::Debug for CoreHandle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CoreHandle({:p})", Arc::as_ptr(&self.remote))
    }
}

/// Task on another core; awaiting it returns the result.  Dropping this does not cancel the task.
pub struct Running<T> {
    answered: OneshotReceiver<T>,
}

impl<T: Send> Future for Running<T> {
    type Output = Result<T, CoreGone>;
    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        Pin::new(&mut self.answered).poll(cx).map(|value| value.ok_or(CoreGone))
    }
}

/// Options of [`Cores::start`].
#[derive(Debug, Clone)]
pub struct CoresOptions {
    /// Reactors, a thread each; at least one.
    pub count: usize,
    /// Driver of each reactor.
    pub driver: DriverChoice,
    /// Name prefix of the threads; a dash and a number are appended.  The kernel keeps 15 bytes of it.
    pub name: String,
    /// Pin each thread to a processor of its own; ignored when there are fewer processors than reactors.
    pub pin: bool,
    /// Busy-poll time after the last work before a reactor sleeps; see [`Reactor::set_linger`].
    pub linger: Duration,
    /// Called on the thread of a core that has panicked, for a process that must not continue without one of its cores.
    /// The core's tasks and driver are dropped only after the call: that waits for operations that may never complete.
    pub on_panic: Option<fn(&CorePanic)>,
}

impl Default for CoresOptions {
    fn default() -> Self {
        Self {
            count: 1,
            driver: DriverChoice::Auto,
            name: "core".into(),
            pin: true,
            linger: Duration::ZERO,
            on_panic: None,
        }
    }
}

/// Panic of a core.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CorePanic {
    /// Number of the core.
    pub core: usize,
    /// Message of the panic.
    pub message: String,
}

impl fmt::Display for CorePanic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "core {} panicked: {}", self.core, self.message)
    }
}

impl std::error::Error for CorePanic {}

struct Core {
    handle: CoreHandle,
    stop: Option<OneshotSender<()>>,
    thread: Option<thread::JoinHandle<Result<(), CorePanic>>>,
}

/// Calls `start` on a thread that may run on any processor of this process, and returns its result. Threads that it starts
/// inherit that; those that a pinned reactor starts itself would share its processor.
pub fn start_unpinned<T: Send>(start: impl FnOnce() -> T + Send) -> io::Result<T> {
    thread::scope(|scope| {
        let starter = thread::Builder::new().name("starter".into());
        let started = starter.spawn_scoped(scope, || {
            os::unpin();
            start()
        })?;
        started.join().map_err(|_| io::Error::other("the thread that starts others has panicked"))
    })
}

/// Reactors on threads of their own.  Dropping it stops them.
pub struct Cores {
    cores: Vec<Core>,
}

impl Cores {
    /// Starts the threads; returns when all reactors run.
    pub fn start(options: &CoresOptions) -> io::Result<Self> {
        assert!(options.count > 0, "no cores to start");
        let cpus = if options.pin { os::allowed_cpus() } else { Vec::new() };
        let mut cores = Self { cores: Vec::with_capacity(options.count) };
        for index in 0..options.count {
            let cpu = (options.count <= cpus.len()).then(|| cpus[index]);
            let (stop, stopped) = cross::oneshot();
            let (ready, started) = std::sync::mpsc::sync_channel(1);
            let (driver, linger, on_panic) = (options.driver, options.linger, options.on_panic);
            let run = move || {
                if let Some(cpu) = cpu {
                    os::pin_to(cpu);
                }
                let reactor = match Reactor::system(driver) {
                    Ok(reactor) => reactor,
                    Err(error) => {
                        // The receiver is gone when starting was aborted already.
                        let _ = ready.send(Err(error));
                        return Ok(());
                    }
                };
                reactor.set_linger(linger);
                if ready.send(Ok(reactor.handle())).is_err() {
                    return Ok(());
                }
                let body = AssertUnwindSafe(|| reactor.block_on(stopped).unwrap_or(()));
                // The reactor still exists when `on_panic` ends the process.
                catch_unwind(body).map_err(|payload| {
                    let panic = CorePanic { core: index, message: panic_message(&*payload) };
                    if let Some(on_panic) = on_panic {
                        on_panic(&panic);
                    }
                    panic
                })
            };
            let thread = thread::Builder::new().name(format!("{}-{index}", options.name)).spawn(run)?;
            let handle = match started.recv() {
                Ok(handle) => handle?,
                Err(_) => {
                    let _ = thread.join();
                    return Err(io::Error::other("a core panicked while it was starting"));
                }
            };
            cores.cores.push(Core { handle, stop: Some(stop), thread: Some(thread) });
        }
        Ok(cores)
    }

    /// Returns the number of cores.
    pub fn len(&self) -> usize {
        self.cores.len()
    }

    /// Returns false: there is at least one core.
    pub fn is_empty(&self) -> bool {
        self.cores.is_empty()
    }

    /// Returns the handle of core number `core`.
    pub fn handle(&self, core: usize) -> &CoreHandle {
        &self.cores[core].handle
    }

    /// Returns the handles of all cores, in order.
    pub fn handles(&self) -> Vec<CoreHandle> {
        self.cores.iter().map(|core| core.handle.clone()).collect()
    }

    /// Drops all tasks at their current await points and ends the threads.  Anything that needs an orderly shutdown
    /// must be closed before.  Returns the first core's panic, if any.
    pub fn stop(mut self) -> Result<(), CorePanic> {
        self.end()
    }

    fn end(&mut self) -> Result<(), CorePanic> {
        for core in &mut self.cores {
            if let Some(stop) = core.stop.take() {
                stop.send(());
            }
        }
        let mut result = Ok(());
        for (index, core) in self.cores.iter_mut().enumerate() {
            let ended = core.thread.take().map(thread::JoinHandle::join);
            if let Some(ended) = ended {
                // A panic while the reactor is dropped is only reported here.
                let ended = ended.unwrap_or_else(|payload| {
                    let message = panic_message(&*payload);
                    Err(CorePanic { core: index, message })
                });
                result = result.and(ended);
            }
        }
        result
    }
}

impl Drop for Cores {
    fn drop(&mut self) {
        // The panic hook has already reported a panic.
        let _ = self.end();
    }
}

fn panic_message(payload: &(dyn Any + Send)) -> String {
    let text = payload.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| payload.downcast_ref::<String>().cloned()).unwrap_or_else(|| "no message".to_owned())
}

#[cfg(test)]
mod tests {
    use std::os::unix::process::ExitStatusExt;
    use std::process::Command;

    use super::*;
    use crate::driver::{OpenOptions, threads};
    use crate::executor::yield_now;
    use crate::fs::File;

    /// Environment variable of the child process that [`a_core_that_panics_is_told_of_while_its_disk_hangs`] starts.
    const HANGING: &str = "FOREBAY_TEST_HANGING_DISK";
    const CODE: i32 = 77;

    #[test]
    fn threads_of_a_pinned_reactor_may_run_elsewhere() {
        let all = os::allowed_cpus();
        let cores =
            Cores::start(&CoresOptions { count: all.len(), pin: true, ..CoresOptions::default() }).expect("cores");
        let allowed = || std::fs::read_to_string("/proc/thread-self/status").expect("status of a thread");
        let list =
            |status: &str| status.lines().find(|line| line.starts_with("Cpus_allowed:")).expect("a line").to_owned();
        let before = list(&allowed());
        let look = cores.handle(0).run(move || async move {
            let started = start_unpinned(|| thread::spawn(allowed).join().expect("a thread")).expect("a thread");
            (allowed(), started)
        });
        let reactor = Reactor::system(DriverChoice::Auto).expect("a reactor");
        let (pinned, started) = reactor.block_on(look).expect("a core");
        assert_eq!(list(&started), before);
        assert!(all.len() == 1 || list(&pinned) != before, "the reactor is pinned");
    }

    #[test]
    fn a_core_that_panics_is_told_of_while_its_disk_hangs() {
        if let Some(path) = std::env::var_os(HANGING) {
            return hang_and_panic(path.into());
        }
        let path = std::env::temp_dir().join(format!("forebay-hanging-{}", std::process::id()));
        let this = std::env::current_exe().expect("this program");
        let name = "cores::tests::a_core_that_panics_is_told_of_while_its_disk_hangs";
        let mut child = Command::new(this);
        let mut child = child.args(["--exact", name, "--nocapture"]).env(HANGING, &path).spawn().expect("this program");
        let began = std::time::Instant::now();
        let status = loop {
            if let Some(status) = child.try_wait().expect("its state") {
                break Some(status);
            }
            if began.elapsed() > Duration::from_secs(60) {
                break None;
            }
            thread::yield_now();
        };
        drop(child.kill());
        drop(child.wait());
        std::fs::remove_file(path).expect("its file");
        let status = status.expect("the process ends after one of its cores has panicked");
        assert_eq!((status.code(), status.signal()), (Some(CODE), None));
    }

    fn hang_and_panic(path: std::path::PathBuf) {
        let end = |panic: &CorePanic| {
            eprintln!("{panic}");
            std::process::exit(CODE);
        };
        // This driver runs all file operations on threads.
        let options = CoresOptions { driver: DriverChoice::Poll, on_panic: Some(end), ..CoresOptions::default() };
        let cores = Cores::start(&options).expect("a core");
        let running = cores.handle(0).run(move || async move {
            let file = File::open(path, OpenOptions::read_write().create()).expect("a file");
            drop(spawn(async move { file.punch_hole(threads::HANGS_AT, 1).await }));
            while !threads::HANGS.load(Ordering::SeqCst) {
                yield_now().await;
            }
            panic!("on purpose");
        });
        drop::<Running<()>>(running);
        loop {
            thread::park();
        }
    }
}
