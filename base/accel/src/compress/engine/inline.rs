//! Inline engine: executes each job synchronously, where it is submitted.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::task::{Context, Poll};

use super::worker::Worker;
use super::{CompressionEngine, CompressionJob, Full, JobTicket, ticket};

thread_local! {
    static WORKER: RefCell<Worker> = RefCell::default();
}

/// Does a job on this thread; the ticket is ready when it is returned.
pub(super) fn run_here(job: CompressionJob) -> JobTicket {
    let (completion, ticket) = ticket();
    completion.complete(WORKER.with_borrow_mut(|worker| worker.run(job)));
    ticket
}

/// Compresses on the submitter's own time: for tests, for the simulator, and for programs without a reactor.
#[derive(Debug, Clone, Copy, Default)]
pub struct Inline;

impl CompressionEngine for Inline {
    fn name(&self) -> &str {
        "inline"
    }

    fn depth(&self) -> usize {
        1
    }

    fn submit(&self, job: CompressionJob) -> Result<JobTicket, Full> {
        Ok(run_here(job))
    }

    fn submit_batch(&self, jobs: &mut VecDeque<CompressionJob>, tickets: &mut Vec<JobTicket>) {
        tickets.extend(jobs.drain(..).map(run_here));
    }

    fn poll_room(&self, _: &mut Context<'_>) -> Poll<()> {
        Poll::Ready(())
    }
}
