//! The way from other threads to the engine on its reactor.

use std::future::Future;
use std::rc::Rc;

use forebay_reactor::spawn;
use tokio::sync::{mpsc, oneshot};

use super::Engine;
use crate::failure::{Failure, Result};

type Work = Box<dyn FnOnce(Rc<Engine>) + Send>;

/// What comes to the engine.
enum Job {
    Run(Work),
    /// Take no more.
    Stop,
}

/// Reaches the engine from any thread.  The engine ends when all handles are gone, or when it is told to stop.
#[derive(Clone)]
pub struct EngineHandle {
    jobs: mpsc::UnboundedSender<Job>,
}

/// Where an engine finds what it is asked to do.
pub struct Jobs {
    jobs: mpsc::UnboundedReceiver<Job>,
}

/// A handle, and the queue that the engine serves.
pub fn jobs() -> (EngineHandle, Jobs) {
    let (sender, receiver) = mpsc::unbounded_channel();
    (EngineHandle { jobs: sender }, Jobs { jobs: receiver })
}

impl EngineHandle {
    /// Runs `job` on the engine's reactor and waits for its result.  The job goes on if this future is dropped.
    pub fn call<F, Fut, T>(&self, job: F) -> impl Future<Output = Result<T>> + Send + use<F, Fut, T>
    where
        F: FnOnce(Rc<Engine>) -> Fut + Send + 'static,
        Fut: Future<Output = Result<T>> + 'static,
        T: Send + 'static,
    {
        let answer = self.start(job);
        async move { answer.await.unwrap_or_else(|_| Err(gone())) }
    }

    /// As [`call`](Self::call), from a thread that may block.
    pub fn call_blocking<F, Fut, T>(&self, job: F) -> Result<T>
    where
        F: FnOnce(Rc<Engine>) -> Fut + Send + 'static,
        Fut: Future<Output = Result<T>> + 'static,
        T: Send + 'static,
    {
        self.start(job).blocking_recv().unwrap_or_else(|_| Err(gone()))
    }

    /// Tells the engine to take no more.  What it has begun goes on.
    pub fn stop(&self) {
        // An engine that is gone has stopped.
        let _ = self.jobs.send(Job::Stop);
    }

    fn start<F, Fut, T>(&self, job: F) -> oneshot::Receiver<Result<T>>
    where
        F: FnOnce(Rc<Engine>) -> Fut + Send + 'static,
        Fut: Future<Output = Result<T>> + 'static,
        T: Send + 'static,
    {
        let (sender, receiver) = oneshot::channel();
        let work: Work = Box::new(move |engine| {
            spawn(async move {
                let result = job(engine).await;
                // Nobody waits for the answer of a caller that has gone.
                let _ = sender.send(result);
            });
        });
        // With the engine gone the job is dropped, and its sender with it, which the receiver sees.
        let _ = self.jobs.send(Job::Run(work));
        receiver
    }
}

fn gone() -> Failure {
    Failure::failed("the daemon is stopping").hint("try again when it runs again")
}

impl Jobs {
    /// Starts jobs as they come, until it is told to stop or every handle is gone.
    pub async fn serve(mut self, engine: &Rc<Engine>) {
        while let Some(Job::Run(work)) = self.jobs.recv().await {
            work(engine.clone());
        }
    }
}
