//! The engine in this process, for commands when no daemon runs.

use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread::JoinHandle;
use std::time::Duration;

use forebay_reactor::{DriverChoice, Reactor};

use crate::api::Progress;
use crate::engine::handle::{EngineHandle, jobs};
use crate::engine::{Engine, EngineOptions};
use crate::failure::{Failure, Result};
use crate::ops::{Operation, ProgressSink};

/// Interval between progress updates while an operation runs.
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// An engine on a thread of this process.
pub struct Direct {
    engine: EngineHandle,
    thread: JoinHandle<Result<()>>,
}

impl Direct {
    /// Starts the engine; its reactor polls for `linger` before it sleeps.
    pub fn open(options: EngineOptions, linger: Duration) -> Result<Self> {
        let (engine, jobs) = jobs();
        let (opened, wait) = mpsc::channel();
        let run = move || {
            let reactor = match Reactor::system(DriverChoice::Auto) {
                Ok(reactor) => reactor,
                Err(error) => {
                    let failure = Failure::io(error, "starting the reactor");
                    let _ = opened.send(Err(failure.clone()));
                    return Err(failure);
                }
            };
            reactor.set_linger(linger);
            reactor.block_on(async move {
                let engine = match Engine::open(options).await {
                    Ok(engine) => engine,
                    Err(failure) => {
                        // The opener hears of it here; the thread's own result is for what comes later.
                        let _ = opened.send(Err(failure));
                        return Ok(());
                    }
                };
                let _ = opened.send(Ok(()));
                drop(opened);
                jobs.serve(&engine).await;
                engine.close().await
            })
        };
        let thread = std::thread::Builder::new()
            .name("engine".into())
            .spawn(run)
            .map_err(|error| Failure::io(error, "starting a thread"))?;
        match wait.recv() {
            Ok(Ok(())) => Ok(Self { engine, thread }),
            Ok(Err(failure)) => Err(failure),
            Err(_) => Err(Failure::failed("the engine stopped while opening the store")),
        }
    }

    /// Returns the handle to the engine.
    pub fn engine(&self) -> &EngineHandle {
        &self.engine
    }

    /// Runs an operation; `progress` is called with its progress.
    pub fn call<O: Operation>(&self, operation: O, mut progress: impl FnMut(Progress)) -> Result<O::Reply> {
        let (sink, mut seen) = ProgressSink::channel();
        let (answer, wait) = mpsc::channel();
        let engine = self.engine.clone();
        let waiter = std::thread::Builder::new()
            .name("waiter".into())
            .spawn(move || answer.send(engine.call_blocking(move |engine| operation.run(engine, sink))))
            .map_err(|error| Failure::io(error, "starting a thread"))?;
        let result = loop {
            match wait.recv_timeout(LOOK_EVERY) {
                Ok(result) => break result,
                Err(RecvTimeoutError::Timeout) => {
                    let now = *seen.borrow_and_update();
                    if let Some(now) = now {
                        progress(now);
                    }
                }
                Err(RecvTimeoutError::Disconnected) => break Err(Failure::failed("the engine ended")),
            }
        };
        let _ = waiter.join();
        result
    }

    /// Flushes and closes the store.
    pub fn close(self) -> Result<()> {
        drop(self.engine);
        self.thread.join().unwrap_or_else(|_| Err(Failure::failed("the engine ended with a panic")))
    }
}
