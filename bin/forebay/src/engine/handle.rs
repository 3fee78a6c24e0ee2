//! Handle to the engine on its reactor, for other threads.

use std::future::Future;
use std::rc::Rc;

use forebay_reactor::spawn;
use tokio::sync::{mpsc, oneshot};

use super::Engine;
use crate::failure::{Failure, Result};

type EngineCall = Box<dyn FnOnce(Rc<Engine>) + Send>;

/// Message to the engine.
enum Job {
    Run(EngineCall),
    /// Stops taking jobs.
    Stop,
}

/// Handle to the engine, usable from any thread.  The engine ends when all handles are dropped, or when it is told to
/// stop.
#[derive(Clone)]
pub struct EngineHandle {
    jobs: mpsc::UnboundedSender<Job>,
}

/// Queue of jobs for the engine.
pub struct Jobs {
    jobs: mpsc::UnboundedReceiver<Job>,
}

/// Creates a handle, and the queue that the engine serves.
pub fn jobs() -> (EngineHandle, Jobs) {
    let (sender, receiver) = mpsc::unbounded_channel();
    (EngineHandle { jobs: sender }, Jobs { jobs: receiver })
}

impl EngineHandle {
    /// Runs `job` on the engine's reactor and waits for its result.  The job continues if this future is dropped.
    pub fn call<F, Fut, T>(&self, job: F) -> impl Future<Output = Result<T>> + Send + use<F, Fut, T>
    where
        F: FnOnce(Rc<Engine>) -> Fut + Send + 'static,
        Fut: Future<Output = Result<T>> + 'static,
        T: Send + 'static,
    {
        let answer = self.start(job);
        async move { answer.await.unwrap_or_else(|_| Err(gone())) }
    }

    /// Runs `job` as [`call`](Self::call) does, from a thread that may block.
    pub fn call_blocking<F, Fut, T>(&self, job: F) -> Result<T>
    where
        F: FnOnce(Rc<Engine>) -> Fut + Send + 'static,
        Fut: Future<Output = Result<T>> + 'static,
        T: Send + 'static,
    {
        self.start(job).blocking_recv().unwrap_or_else(|_| Err(gone()))
    }

    /// Tells the engine to take no more jobs.  Running jobs continue.
    pub fn stop(&self) {
        // An engine that has ended needs no message.
        let _ = self.jobs.send(Job::Stop);
    }

    fn start<F, Fut, T>(&self, job: F) -> oneshot::Receiver<Result<T>>
    where
        F: FnOnce(Rc<Engine>) -> Fut + Send + 'static,
        Fut: Future<Output = Result<T>> + 'static,
        T: Send + 'static,
    {
        let (sender, receiver) = oneshot::channel();
        let work: EngineCall = Box::new(move |engine| {
            spawn(async move {
                let result = job(engine).await;
                // The caller may have dropped its future; the result is discarded then.
                let _ = sender.send(result);
            });
        });
        // If the engine has ended, the job is dropped with its sender, which the receiver sees.
        let _ = self.jobs.send(Job::Run(work));
        receiver
    }
}

fn gone() -> Failure {
    Failure::failed("the daemon is stopping").hint("try again when it runs again")
}

impl Jobs {
    /// Starts jobs as they arrive, until told to stop or every handle is dropped.
    pub async fn serve(mut self, engine: &Rc<Engine>) {
        while let Some(Job::Run(work)) = self.jobs.recv().await {
            work(engine.clone());
        }
    }
}
