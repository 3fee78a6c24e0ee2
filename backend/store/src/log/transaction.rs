//! Transaction in progress in the log.

use std::cell::Cell;

/// Start of a transaction's entries.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Start {
    /// Number of the batch that has its first entry.
    seq: u64,
    /// Bytes of earlier entries in that batch.
    entry_bytes: u32,
}

/// Transaction in progress, of which there is at most one: its entries are recovered together or not at all.
#[derive(Default)]
pub struct OpenTransaction {
    in_progress: Cell<bool>,
    /// Start of the transaction, once it has an entry.
    start: Cell<Option<Start>>,
}

impl OpenTransaction {
    /// Begins a transaction.
    pub fn begin(&self) {
        assert!(!self.in_progress.replace(true), "transactions do not nest");
        self.start.set(None);
    }

    /// Ends the transaction.
    pub fn end(&self) {
        assert!(self.in_progress.replace(false), "no transaction to end");
    }

    /// Returns whether a transaction is in progress.
    pub fn is_in_progress(&self) -> bool {
        self.in_progress.get()
    }

    /// Records that an entry will be added to batch `seq`, after `entry_bytes` bytes of entries.
    pub fn note_entry(&self, seq: u64, entry_bytes: usize) {
        if self.in_progress.get() && self.start.get().is_none() {
            self.start.set(Some(Start { seq, entry_bytes: entry_bytes as u32 }));
        }
    }

    /// Returns whether a batch that is closed now ends within the transaction.
    pub fn continues(&self) -> bool {
        self.in_progress.get() && self.start.get().is_some()
    }

    /// Returns the bytes of entries in batch `seq`, which is closed now, that belong to complete transactions although
    /// the last one continues: they may be acknowledged as durable before it. 0 if none continues.
    pub fn settled_bytes(&self, seq: u64) -> u32 {
        match self.start.get() {
            Some(start) if self.continues() && start.seq == seq => start.entry_bytes,
            _ => 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_batch_continues_if_it_is_closed_within_a_transaction_with_entries() {
        let transaction = OpenTransaction::default();
        transaction.note_entry(1, 0);
        assert!(!transaction.continues(), "no transaction");
        transaction.begin();
        assert!(!transaction.continues(), "no entry");
        transaction.note_entry(1, 40);
        transaction.note_entry(1, 80);
        assert!(transaction.continues());
        assert_eq!((transaction.settled_bytes(1), transaction.settled_bytes(2)), (40, 0));
        transaction.end();
        assert_eq!((transaction.continues(), transaction.settled_bytes(1)), (false, 0));
        transaction.begin();
        assert!(!transaction.continues(), "a new transaction has no entry yet");
    }
}
