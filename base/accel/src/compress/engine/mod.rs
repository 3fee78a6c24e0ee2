//! Compression engines: asynchronous compression and expansion for tasks that must not block.
//!
//! Modelled on an offload device.  A [`CompressionJob`] brings scattered pages of input and of output;
//! [`CompressionEngine::submit`] queues it and returns at once; the [`JobTicket`] is a future that completes when the
//! pages may be used again, and wakes its task on whatever core that lives.  The queue is bounded: a job that finds it
//! full is returned, and [`CompressionEngine::poll_room`] tells when to retry.
//!
//! Independent of any executor: a ticket only needs a [`Waker`](std::task::Waker), so it serves the reactor, the
//! simulator and a plain thread alike, and this crate stays below all of them.
//!
//! [`CompressionPool`] has threads of its own; [`Inline`] works where it is called, which suits tests and the simulator
//! since it is deterministic.  An engine in hardware takes the same jobs: it maps the pages instead of gathering them,
//! keeps the slot of each ticket beside its descriptor, and completes it from its own completion ring.

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
pub use pool::{CompressionPool, PoolOptions};
pub use ticket::{EngineGone, JobCompletion, JobTicket, ticket};

use super::{Codec, DecompressError};

/// Scattered input: read as one run of bytes, in order.
pub trait InputPages: Any + Send {
    /// Returns the number of pages.
    fn count(&self) -> usize;
    /// Returns one page.
    fn page(&self, index: usize) -> &[u8];
    /// Returns the number of bytes in all pages.
    fn total(&self) -> usize {
        (0..self.count()).map(|index| self.page(index).len()).sum()
    }
}

/// Scattered output: filled in order, as one run of bytes.
pub trait PagesMut: InputPages {
    /// Returns one page for writing.
    fn page_mut(&mut self, index: usize) -> &mut [u8];
}

impl<P: Deref<Target = [u8]> + Send + 'static> InputPages for Vec<P> {
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

/// Operation of a job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CompressionWork {
    /// Compress the input, if that is worth it.
    Compress {
        /// Target format and level.
        codec: Codec,
        /// Maximum useful length of the result in bytes; if it is longer, the job ends as
        /// [`JobOutcome::PassedThrough`].
        at_most: usize,
        /// Looks at samples first, and does not even try where they look like noise.
        sample: bool,
    },
    /// Expand the input, which must be one whole stream, into at most the bytes of the output.
    Decompress {
        /// Source format; the level is ignored.
        codec: Codec,
    },
}

/// Work and the memory it is done on, which belongs to the engine until the ticket is ready.
pub struct CompressionJob {
    /// Operation to perform.
    pub work: CompressionWork,
    /// Input pages.
    pub input: Box<dyn InputPages>,
    /// Output pages.
    pub output: Box<dyn PagesMut>,
}

impl CompressionJob {
    /// Creates a job on vectors of pages.
    pub fn new<I, O>(work: CompressionWork, input: Vec<I>, output: Vec<O>) -> Self
    where
        I: Deref<Target = [u8]> + Send + 'static,
        O: DerefMut<Target = [u8]> + Send + 'static,
    {
        Self { work, input: Box::new(input), output: Box::new(output) }
    }
}

/// Outcome of a successful job.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum JobOutcome {
    /// Result written: this many bytes at the front of the output.
    Done(usize),
    /// Incompressible data, which does not shrink to the requested length; the output is undefined, and the input
    /// should be stored as it is.
    PassedThrough,
}

/// Error of a failed job.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum JobError {
    /// Output pages too short for the compressed data, which would have been within the requested length.
    #[error("the compressed data exceeds the pages of the output")]
    NoRoom,
    /// Input that could not be expanded.
    #[error(transparent)]
    Decompress(#[from] DecompressError),
}

/// Completed job: its result, and its memory.
pub struct Finished {
    /// Result of the job.
    pub result: Result<JobOutcome, JobError>,
    /// Input pages, unchanged.
    pub input: Box<dyn InputPages>,
    /// Output pages.
    pub output: Box<dyn PagesMut>,
}

impl Finished {
    /// Returns the pages as the vectors that [`CompressionJob::new`] was given; `None` if they were of other types.
    pub fn into_pages<I: 'static, O: 'static>(self) -> Option<(Vec<I>, Vec<O>)> {
        let (input, output): (Box<dyn Any>, Box<dyn Any>) = (self.input, self.output);
        Some((*input.downcast().ok()?, *output.downcast().ok()?))
    }
}

/// Error of a full queue, with the job returned.
pub struct Full(pub CompressionJob);

/// Compression engine.
pub trait CompressionEngine: Send + Sync {
    /// Returns the name in tables and figures.
    fn name(&self) -> &str;

    /// Jobs its queue holds.
    fn depth(&self) -> usize;

    /// Takes a job, without waiting for anything.
    ///
    /// Dropping a ticket does not cancel its job; the pages are freed when the job has ended.
    ///
    /// # Errors
    /// The queue is full.
    fn submit(&self, job: CompressionJob) -> Result<JobTicket, Full>;

    /// Takes jobs from the front of `jobs` until the queue is full, with one wake-up for all; the tickets are appended
    /// to `tickets` in the order of the jobs.
    fn submit_batch(&self, jobs: &mut VecDeque<CompressionJob>, tickets: &mut Vec<JobTicket>);

    /// Polls for space in the queue: ready if it has, or just had, some; another submitter may take it first.
    fn poll_room(&self, context: &mut Context<'_>) -> Poll<()>;
}

/// Submits a job as soon as the queue has space.
pub async fn submit(engine: &dyn CompressionEngine, mut job: CompressionJob) -> JobTicket {
    loop {
        match engine.submit(job) {
            Ok(ticket) => return ticket,
            Err(Full(back)) => job = back,
        }
        poll_fn(|context| engine.poll_room(context)).await;
    }
}
