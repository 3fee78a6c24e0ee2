//! Session state that survives reconnects: sequence numbers, queued and unacknowledged messages.
//!
//! Both sides of a lossless session have one.  A message gets the next sequence number when it is first sent, and keeps
//! it: after a reconnect the peer reports the highest number received, messages up to there are released, and the rest
//! are sent again, in the same order, under the same numbers.  So each message is delivered exactly once and in order
//! as long as both sides keep their sessions; when one of them does not, the other one is notified
//! ([`MessengerSession::reset`]).

use std::collections::VecDeque;

use super::SessionViolation;
use super::handshake::Resume;
use crate::priority::PriorityQueue;

/// Session policy on loss of the connection.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Policy {
    /// Client without a session: state is dropped, and the user is notified.
    LossyClient,
    /// Client or server with a session: state is kept, and resumed by the next connection.
    LosslessPeer,
    /// Server without a session: state is dropped, the client reconnects.
    StatelessServer,
}

impl Policy {
    /// Returns true if no state is kept across reconnects.
    #[inline]
    pub fn is_lossy(self) -> bool {
        self != Self::LosslessPeer
    }
}

/// Action for a received message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReceiveVerdict {
    /// Next in sequence; deliver it.
    Deliver,
    /// Duplicate of a message that was received before; drop it.
    Duplicate,
}

/// One side of a session.  `M` is a message, or a handle of one.
///
/// Invariants:
/// 1. Numbers in `sent` and then in `replay` increase: after `acked`, and up to `out_seq`.
/// 2. Nothing is reported to the peer as received that was not: `told` is at most `resume.in_seq`.
/// 3. A message has its number from the first time that it is sent; only a reset gives it another one.
#[derive(Debug)]
pub struct MessengerSession<M> {
    lossy: bool,
    resume: Resume,
    /// Messages to be sent for the first time.
    waiting: PriorityQueue<M>,
    /// Messages sent under these numbers, to be sent again before all others.
    replay: VecDeque<(u64, M)>,
    /// Messages sent under these numbers, and not acknowledged.
    sent: VecDeque<(u64, M)>,
    out_seq: u64,
    /// Highest number that the peer has acknowledged.
    acked: u64,
    /// Highest received number that was reported to the peer.
    told: u64,
}

impl<M> MessengerSession<M> {
    /// Creates a session.  `resume` holds its IDs, and the number of the connection.
    pub fn new(lossy: bool, resume: Resume) -> Self {
        Self {
            lossy,
            resume: Resume { in_seq: 0, ..resume },
            waiting: PriorityQueue::default(),
            replay: VecDeque::new(),
            sent: VecDeque::new(),
            out_seq: 0,
            acked: 0,
            told: 0,
        }
    }

    /// Asserts the invariants, as far as the ends of the queues show them.
    #[inline]
    fn check(&self) {
        let (sent, replay) = (&self.sent, &self.replay);
        let ends = [sent.front(), sent.back(), replay.front(), replay.back()];
        debug_assert!(
            ends.iter().flatten().is_sorted_by_key(|(seq, _)| *seq)
                && ends.iter().flatten().all(|(seq, _)| (self.acked + 1..=self.out_seq).contains(seq)),
            "messages after {}, up to {}: {:?}",
            self.acked,
            self.out_seq,
            ends.map(|end| end.map(|(seq, _)| *seq))
        );
        debug_assert!(self.told <= self.resume.in_seq, "{} reported of {}", self.told, self.resume.in_seq);
    }

    /// Returns true if no state is kept across reconnects.
    #[inline]
    pub fn is_lossy(&self) -> bool {
        self.lossy
    }

    /// Sets what a handshake has agreed on: IDs and numbers, except for the highest number received; and whether the
    /// session is lossy, which the server may demand although the client did not ask.
    pub fn agree(&mut self, resume: Resume, lossy: bool) {
        self.set_resume(resume);
        self.lossy = lossy;
    }

    /// Returns the IDs and numbers to resume with.
    pub fn resume(&self) -> Resume {
        self.resume
    }

    /// Sets IDs and numbers, except for the highest number received.
    pub fn set_resume(&mut self, resume: Resume) {
        self.resume = Resume { in_seq: self.resume.in_seq, ..resume };
    }

    /// Returns the number of messages that were not sent yet, or must be sent again.
    pub fn queued(&self) -> usize {
        self.waiting.len() + self.replay.len()
    }

    /// Returns the number of messages that were sent and not acknowledged.
    pub fn unacknowledged(&self) -> usize {
        self.sent.len()
    }

    /// Appends a message.
    #[inline]
    pub fn push(&mut self, priority: u16, message: M) {
        self.waiting.push(priority, message);
    }

    /// Returns the next message to send, and its number.  A lossless session keeps it until it is acknowledged.
    #[inline]
    pub fn pop(&mut self) -> Option<(u64, M)>
    where
        M: Clone,
    {
        let (seq, message) = match self.replay.pop_front() {
            Some(again) => again,
            None => {
                let message = self.waiting.pop()?;
                self.out_seq += 1;
                (self.out_seq, message)
            }
        };
        if !self.lossy {
            self.sent.push_back((seq, message.clone()));
        }
        self.check();
        Some((seq, message))
    }

    /// Processes an acknowledgement of everything up to `seq`: calls `done` with each newly acknowledged message.
    ///
    /// # Errors
    /// When `seq` exceeds the highest number sent.
    #[inline]
    pub fn acknowledged(&mut self, seq: u64, mut done: impl FnMut(M)) -> Result<(), SessionViolation> {
        if seq <= self.acked {
            return Ok(());
        }
        // Messages to be sent again were not sent on this connection.
        let sent = self.replay.front().map_or(self.out_seq, |(seq, _)| seq - 1);
        if seq > sent {
            return Err(SessionViolation::Sequence { got: seq, expected: sent });
        }
        self.acked = seq;
        while self.sent.front().is_some_and(|(number, _)| *number <= seq) {
            self.sent.pop_front().map(|(_, message)| message).into_iter().for_each(&mut done);
        }
        self.check();
        Ok(())
    }

    /// Processes the receipt of a message with the number `seq`.
    ///
    /// # Errors
    /// When a number was skipped, in a lossless session.
    #[inline]
    pub fn received(&mut self, seq: u64) -> Result<ReceiveVerdict, SessionViolation> {
        // The peer of a lossy session may have skipped to the highest number.
        let expected = self.resume.in_seq.saturating_add(1);
        if seq < expected {
            return Ok(ReceiveVerdict::Duplicate);
        }
        if seq > expected && !self.lossy {
            return Err(SessionViolation::Sequence { got: seq, expected });
        }
        self.resume.in_seq = seq;
        Ok(ReceiveVerdict::Deliver)
    }

    /// Returns the highest number received, and records it as reported to the peer.
    #[inline]
    pub fn tell(&mut self) -> u64 {
        self.told = self.resume.in_seq;
        self.told
    }

    /// Returns true if the peer of a lossless session is owed an acknowledgement.
    #[inline]
    pub fn owes_ack(&self) -> bool {
        !self.lossy && self.told != self.resume.in_seq
    }

    /// Handles the loss of the connection: unacknowledged messages will be sent again.
    pub fn lost(&mut self) {
        // Messages not yet sent again follow those that were sent again on this connection.
        let mut again = std::mem::take(&mut self.sent);
        again.append(&mut self.replay);
        self.replay = again;
        self.check();
    }

    /// Resumes the session on a new connection; the peer has received everything up to `seq`.
    ///
    /// # Errors
    /// When `seq` exceeds the highest number sent, or is below what was acknowledged.
    pub fn resumed(&mut self, seq: u64, mut done: impl FnMut(M)) -> Result<(), SessionViolation> {
        if seq > self.out_seq || seq < self.acked {
            return Err(SessionViolation::Sequence { got: seq, expected: self.out_seq });
        }
        self.lost();
        self.acked = seq;
        while self.replay.front().is_some_and(|(number, _)| *number <= seq) {
            self.replay.pop_front().map(|(_, message)| message).into_iter().for_each(&mut done);
        }
        // The resume has reported the highest number received.
        self.told = self.resume.in_seq;
        self.check();
        Ok(())
    }

    /// Resets the session.  With `full` the peer has dropped it: unacknowledged messages may or may not have been
    /// delivered, queued ones were not; all are returned, in this order.  Otherwise the peer's half never existed:
    /// nothing was delivered, and everything is sent under new numbers.
    pub fn reset(&mut self, full: bool) -> Vec<M> {
        self.lost();
        let mut out: Vec<M> = self.replay.drain(..).map(|(_, message)| message).collect();
        if full {
            out.extend(self.waiting.drain());
        } else {
            // They precede all others, whatever their priority, because they were sent first.
            self.replay = std::mem::take(&mut out).into_iter().zip(1..).map(|(message, seq)| (seq, message)).collect();
        }
        (self.out_seq, self.acked, self.told) = (self.replay.len() as u64, 0, 0);
        self.resume = Resume {
            client_cookie: self.resume.client_cookie,
            global_seq: self.resume.global_seq,
            ..Resume::default()
        };
        self.check();
        out
    }
}

#[cfg(test)]
mod tests;
