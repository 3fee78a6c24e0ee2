//! Engines: whoever compresses and expands for those who must not wait.
//!
//! The shape is an offload device's.  A [`Job`] brings scattered pages of input and of output; [`Engine::submit`]
//! queues it and returns at once; the [`Ticket`] is a future that is ready when the pages may be used again, and wakes
//! its task on whatever core that lives.  A queue has an end: a job that finds it full comes back, and
//! [`Engine::poll_room`] says when to try again.
//!
//! The trait knows no executor: a ticket needs a [`Waker`](std::task::Waker) and nothing else, so it serves the reactor, the simulator
//! and a plain thread alike, and this crate stays below all of them.
//!
//! [`Pool`] has threads of its own; [`Inline`] works where it is called, which suits tests and the simulator since it
//! is deterministic.  An engine in hardware takes the same jobs: it maps the pages instead of gathering them, keeps
//! the slot of each ticket beside its descriptor, and completes it from its own completion ring.

mod inline;
mod pool;
#[cfg(test)]
mod tests;
mod ticket;
mod worker;

use std::any::Any;
use std::collections::VecDeque;
use std::future::poll_fn;
use std::ops::{Deref, DerefMut};
use std::task::{Context, Poll};

pub use inline::Inline;
pub use pool::{Pool, PoolOptions};
pub use ticket::{Completion, EngineGone, Ticket, ticket};

use super::{Codec, DecompressError};

/// Scattered input: read as one run of bytes, in order.
pub trait Pages: Any + Send {
    /// How many pieces there are.
    fn count(&self) -> usize;
    /// One of them.
    fn page(&self, index: usize) -> &[u8];
    /// Bytes in all.
    fn total(&self) -> usize {
        (0..self.count()).map(|index| self.page(index).len()).sum()
    }
}

/// Scattered output: filled in order, as one run of bytes.
pub trait PagesMut: Pages {
    /// One of the pieces, to be written to.
    fn page_mut(&mut self, index: usize) -> &mut [u8];
}

impl<P: Deref<Target = [u8]> + Send + 'static> Pages for Vec<P> {
    fn count(&self) -> usize {
        self.len()
    }

    fn page(&self, index: usize) -> &[u8] {
        &self[index]
    }
}

impl<P: DerefMut<Target = [u8]> + Send + 'static> PagesMut for Vec<P> {
    fn page_mut(&mut self, index: usize) -> &mut [u8] {
        &mut self[index]
    }
}

/// What is to be done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Work {
    /// Compress the input, if that is worth it.
    Compress {
        /// Into what.
        codec: Codec,
        /// A result longer than this many bytes is worth nothing; the job then ends as [`Outcome::PassedThrough`].
        at_most: usize,
        /// Looks at samples first, and does not even try where they look like noise.
        sample: bool,
    },
    /// Expand the input, which must be one whole stream, into at most the bytes of the output.
    Decompress {
        /// From what; the level does not matter.
        codec: Codec,
    },
}

/// Work and the memory it is done on, which belongs to the engine until the ticket is ready.
pub struct Job {
    /// What is to be done.
    pub work: Work,
    /// From where.
    pub input: Box<dyn Pages>,
    /// Into what.
    pub output: Box<dyn PagesMut>,
}

impl Job {
    /// A job on vectors of pages.
    pub fn new<I, O>(work: Work, input: Vec<I>, output: Vec<O>) -> Self
    where
        I: Deref<Target = [u8]> + Send + 'static,
        O: DerefMut<Target = [u8]> + Send + 'static,
    {
        Self { work, input: Box::new(input), output: Box::new(output) }
    }
}

/// How a job ended that did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Outcome {
    /// This many bytes at the front of the output are the result.
    Done(usize),
    /// The data does not shrink to what was asked for; the output means nothing, and the input is to be kept as it is.
    PassedThrough,
}

/// Why a job did not.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum JobError {
    /// The compressed data would have been short enough, but not for these pages.
    #[error("the pages of the output do not hold the compressed data")]
    NoRoom,
    /// The input could not be expanded.
    #[error(transparent)]
    Decompress(#[from] DecompressError),
}

/// A job that has ended: what came of it, and its memory.
pub struct Finished {
    /// What came of it.
    pub result: Result<Outcome, JobError>,
    /// The pages of the input, as they were.
    pub input: Box<dyn Pages>,
    /// The pages of the output.
    pub output: Box<dyn PagesMut>,
}

impl Finished {
    /// The pages as the vectors that [`Job::new`] was given; `None` where they were of other types.
    pub fn into_pages<I: 'static, O: 'static>(self) -> Option<(Vec<I>, Vec<O>)> {
        let (input, output): (Box<dyn Any>, Box<dyn Any>) = (self.input, self.output);
        Some((*input.downcast().ok()?, *output.downcast().ok()?))
    }
}

/// The queue is full; the job comes back.
pub struct Full(pub Job);

/// Whoever does jobs.
pub trait Engine: Send + Sync {
    /// What it is called in tables and figures.
    fn name(&self) -> &str;

    /// Jobs its queue holds.
    fn depth(&self) -> usize;

    /// Takes a job, without waiting for anything.
    ///
    /// A ticket that is dropped does not end its job; the pages are freed when it has ended.
    ///
    /// # Errors
    /// The queue is full.
    fn submit(&self, job: Job) -> Result<Ticket, Full>;

    /// Takes jobs from the front of `jobs` for as long as there is room, with one wake-up for all; the tickets are
    /// appended to `tickets` in the order of the jobs.
    fn submit_batch(&self, jobs: &mut VecDeque<Job>, tickets: &mut Vec<Ticket>);

    /// Ready when the queue has room, or had some just now: somebody else may take it first.
    fn poll_room(&self, context: &mut Context<'_>) -> Poll<()>;
}

/// Submits a job as soon as there is room for it.
pub async fn submit(engine: &dyn Engine, mut job: Job) -> Ticket {
    loop {
        match engine.submit(job) {
            Ok(ticket) => return ticket,
            Err(Full(back)) => job = back,
        }
        poll_fn(|context| engine.poll_room(context)).await;
    }
}
