//! Acknowledgements: tasks that wait until a batch is written, before they acknowledge a transaction.

use std::cell::RefCell;
use std::collections::VecDeque;

use forebay_reactor::sync::oneshot;

/// Queue of the tasks that wait for batches to be written.
///
/// # Invariants
/// 1. The queue is sorted by batch number.
/// 2. A task waits until its batch and all batches before it are written, or until the device fails.
#[derive(Default)]
pub struct PendingAcks {
    queue: RefCell<VecDeque<(u64, oneshot::Sender<()>)>>,
}

impl PendingAcks {
    /// Adds a task that waits for batch `seq`; its receiver resolves when the wait is over.
    pub fn add(&self, seq: u64) -> oneshot::Receiver<()> {
        let (sender, receiver) = oneshot::channel();
        let mut queue = self.queue.borrow_mut();
        // Almost always at the end: batches are numbered in the order in which transactions are appended.
        let at = queue.iter().rposition(|(before, _)| *before <= seq).map_or(0, |index| index + 1);
        queue.insert(at, (seq, sender));
        receiver
    }

    /// Returns whether a task waits for batch `seq` or a later one.
    pub fn is_awaited(&self, seq: u64) -> bool {
        self.queue.borrow().back().is_some_and(|(last, _)| *last >= seq)
    }

    /// Ends the waits for batches up to `written_seq`.
    pub fn written(&self, written_seq: u64) {
        loop {
            // Waking a task may run any code, so not under the borrow.
            let mut queue = self.queue.borrow_mut();
            if queue.front().is_none_or(|(seq, _)| *seq > written_seq) {
                return;
            }
            let front = queue.pop_front();
            drop(queue);
            drop(front);
        }
    }

    /// Ends all waits: the device has failed.
    pub fn failed(&self) {
        let waiting = self.queue.take();
        drop(waiting);
    }
}

#[cfg(test)]
mod tests {
    use forebay_reactor::{DriverChoice, Reactor, spawn, yield_now};

    use super::*;

    #[test]
    fn a_wait_ends_when_its_batch_and_those_before_it_are_written() {
        Reactor::system(DriverChoice::Auto).expect("a reactor").block_on(async {
            let acks = PendingAcks::default();
            assert!(!acks.is_awaited(1));
            let tasks: Vec<_> = [3, 5, 4, 3].map(|seq| spawn(acks.add(seq))).into_iter().collect();
            assert!(acks.is_awaited(5) && !acks.is_awaited(6));
            let mut ended = Vec::new();
            for written in [2, 3, 4] {
                acks.written(written);
                for _ in 0..3 {
                    yield_now().await;
                }
                ended.push(tasks.iter().map(|task| task.is_finished()).collect::<Vec<_>>());
            }
            let expected =
                [[false, false, false, false], [true, false, false, true], [true, false, true, true]].map(Vec::from);
            assert_eq!(ended, expected);
            acks.failed();
            for task in tasks {
                task.await;
            }
            assert!(!acks.is_awaited(0));
        });
    }
}
