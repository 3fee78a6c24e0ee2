//! Medium of a log that has members: the primary's own copy, and what is sent to the replicas.

use std::collections::VecDeque;
use std::rc::Rc;

use forebay_block::{Buf, LocalFuture, Result};

use super::copy::CopyMedium;
use super::{AppendGroup, AppendPiece, Medium};
use crate::cipher::PayloadCipher;
use crate::entries::LogEntry;
use crate::replication::PrimarySet;

/// Medium of a log that has members.
///
/// | invariant | |
/// |---|---|
/// | A group is done only when every complete member has it durably. | R1 |
/// | The tail is durable only when it is so at every complete member. | R5 |
/// | A read that fails here is answered by a replica. | R6 |
/// | No member's ring is overwritten where a recovery of its copy would read. | |
pub(crate) struct MembersMedium {
    local: Rc<dyn CopyMedium>,
    set: Rc<PrimarySet>,
}

impl MembersMedium {
    pub(crate) fn new(local: Rc<dyn CopyMedium>, set: Rc<PrimarySet>) -> Self {
        Self { local, set }
    }

    /// Reads an entry from a replica if that fails here.
    fn or_elsewhere(&self, entry: &LogEntry, read: LocalFuture<Result<Buf>>) -> LocalFuture<Result<Buf>> {
        let (set, entry) = (self.set.clone(), *entry);
        Box::pin(async move {
            match read.await {
                Ok(data) => Ok(data),
                Err(error) => set.read_replica(&entry, error).await,
            }
        })
    }
}

impl Drop for MembersMedium {
    fn drop(&mut self) {
        self.set.stop(crate::log::closed());
    }
}

impl Medium for MembersMedium {
    fn capacity(&self) -> u64 {
        self.local.capacity()
    }

    fn used(&self) -> u64 {
        self.local.used()
    }

    fn take(&self, queue: &mut VecDeque<AppendPiece>, first_seq: u64, durable: bool) -> Option<AppendGroup> {
        let mut group = self.local.take(queue, first_seq, durable)?;
        let end = group.first_seq + group.pieces.len() as u64;
        if let Some(raw) = group.raw.take() {
            self.set.append(raw);
        }
        let (work, set) = (group.work.take(), self.set.clone());
        group.work = Some(Box::pin(async move {
            if let Some(work) = work {
                // What was in flight is submitted again, once all that the log holds is at the backend.
                work.await.inspect_err(|error| set.local_failed(error))?;
            }
            if durable {
                set.local_durable(end);
                set.published(end).await?;
            }
            Ok(())
        }));
        Some(group)
    }

    fn finished(&self, group: u64) {
        self.local.finished(group);
    }

    fn encrypt_with(&self, cipher: Rc<PayloadCipher>) {
        self.local.encrypt_with(cipher);
    }

    fn read(&self, entry: &LogEntry) -> LocalFuture<Result<Buf>> {
        self.or_elsewhere(entry, self.local.read(entry))
    }

    fn read_many(&self, entries: &[LogEntry]) -> Vec<LocalFuture<Result<Buf>>> {
        let reads = self.local.read_many(entries);
        entries.iter().zip(reads).map(|(entry, read)| self.or_elsewhere(entry, read)).collect()
    }

    fn superseded(&self, entry: &LogEntry) {
        self.local.superseded(entry);
    }

    fn retire(&self, tail_seq: u64, gone: &[LogEntry]) {
        self.local.retire(tail_seq, gone);
    }

    fn persisted_tail(&self) -> u64 {
        self.local.persisted_tail().min(self.set.persisted_tail())
    }

    fn persist_tail(&self, clean: bool) -> LocalFuture<Result<()>> {
        let (local, set, tail) = (self.local.persist_tail(clean), self.set.clone(), self.local.start().tail_seq);
        Box::pin(async move {
            let local = local.await.map(|()| set.local_retired(tail)).inspect_err(|error| set.local_failed(error));
            match local {
                // There is no other copy.
                Err(error) if set.replicas().is_empty() => Err(error),
                // The replicas retire it all the same: what is written back must not be replayed after a takeover.
                local => set.retired(tail).await.and(local),
            }
        })
    }

    fn sync(&self) -> LocalFuture<Result<()>> {
        let (local, set, copy) = (self.local.sync(), self.set.clone(), self.local.clone());
        Box::pin(async move {
            local.await.inspect_err(|error| set.local_failed(error))?;
            let durable = copy.durable_seq();
            set.local_durable_before(durable);
            set.published(durable).await
        })
    }
}
