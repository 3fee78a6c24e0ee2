//! What outlives connections: sequence numbers, what is queued, and what is not acknowledged yet.
//!
//! Both sides of a lossless session have one.  Every message gets the next sequence number when it is first sent, and
//! keeps it: after a reconnect the peer says up to where it has received, that much is forgotten, and the rest is sent
//! again, in the same order, under the same numbers.  So each message is delivered once and in order as long as both
//! sides keep their sessions; when one of them does not, the other one is told so ([`Session::reset`]).

use std::collections::VecDeque;

use super::Violation;
use super::link::Resume;
use crate::priority::PriorityQueue;

/// What becomes of a session when its connection is lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Policy {
    /// Of a client: nothing is kept, and whoever uses it is told.
    LossyClient,
    /// Of either side: everything is kept, and goes on with the next connection.
    LosslessPeer,
    /// Of a server: nothing is kept, the client comes again.
    StatelessServer,
}

impl Policy {
    /// Nothing is kept.
    #[inline]
    pub fn is_lossy(self) -> bool {
        self != Self::LosslessPeer
    }
}

/// What is to be done with a message that came.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// It is the next one.
    Deliver,
    /// It came before; the peer did not know.
    Duplicate,
}

/// One side of a session.  `M` is a message, or what stands for it.
#[derive(Debug)]
pub struct Session<M> {
    lossy: bool,
    resume: Resume,
    /// To be sent for the first time.
    waiting: PriorityQueue<M>,
    /// Sent under these numbers, and to be sent again before all others.
    replay: VecDeque<(u64, M)>,
    /// Sent under these numbers, and not acknowledged.
    sent: VecDeque<(u64, M)>,
    out_seq: u64,
    /// The highest number that the peer has acknowledged.
    acked: u64,
    /// The highest number of ours that the peer knows to have been received.
    told: u64,
}

impl<M> Session<M> {
    /// A new one.  `resume` has its names, and the number of the connection.
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

    /// Nothing is kept across connections.
    #[inline]
    pub fn is_lossy(&self) -> bool {
        self.lossy
    }

    /// The server may make a session lossy that was not asked to be.
    pub fn set_lossy(&mut self, lossy: bool) {
        self.lossy = lossy;
    }

    /// Names and numbers to go on with.
    pub fn resume(&self) -> Resume {
        self.resume
    }

    /// Sets names and numbers, but for what was received.
    pub fn set_resume(&mut self, resume: Resume) {
        self.resume = Resume { in_seq: self.resume.in_seq, ..resume };
    }

    /// Messages that were not sent yet, or have to be sent again.
    pub fn queued(&self) -> usize {
        self.waiting.len() + self.replay.len()
    }

    /// Messages that were sent and not acknowledged.
    pub fn unacknowledged(&self) -> usize {
        self.sent.len()
    }

    /// Appends a message.
    #[inline]
    pub fn push(&mut self, priority: u16, message: M) {
        self.waiting.push(priority, message);
    }

    /// The next message to send, and its number.  A lossless session keeps it until it is acknowledged.
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
        Some((seq, message))
    }

    /// The peer has received everything up to `seq`: calls `done` with each message that is settled thereby.
    ///
    /// # Errors
    /// When so much was never sent.
    #[inline]
    pub fn acknowledged(&mut self, seq: u64, mut done: impl FnMut(M)) -> Result<(), Violation> {
        if seq <= self.acked {
            return Ok(());
        }
        // What waits to be sent again was not sent on this connection.
        let sent = self.replay.front().map_or(self.out_seq, |(seq, _)| seq - 1);
        if seq > sent {
            return Err(Violation::Sequence { got: seq, expected: sent });
        }
        self.acked = seq;
        while self.sent.front().is_some_and(|(number, _)| *number <= seq) {
            self.sent.pop_front().map(|(_, message)| message).into_iter().for_each(&mut done);
        }
        Ok(())
    }

    /// A message came under the number `seq`.
    ///
    /// # Errors
    /// When one was left out, in a lossless session.
    #[inline]
    pub fn received(&mut self, seq: u64) -> Result<Verdict, Violation> {
        let expected = self.resume.in_seq + 1;
        if seq < expected {
            return Ok(Verdict::Duplicate);
        }
        if seq > expected && !self.lossy {
            return Err(Violation::Sequence { got: seq, expected });
        }
        self.resume.in_seq = seq;
        Ok(Verdict::Deliver)
    }

    /// The highest number received; the peer is about to be told.
    #[inline]
    pub fn tell(&mut self) -> u64 {
        self.told = self.resume.in_seq;
        self.told
    }

    /// The peer does not know yet what was received; in a lossless session it should.
    #[inline]
    pub fn owes_ack(&self) -> bool {
        !self.lossy && self.told != self.resume.in_seq
    }

    /// The connection is lost.  What was not acknowledged will be sent again.
    pub fn lost(&mut self) {
        // What is still to be sent again comes after what was sent again on this connection.
        let mut again = std::mem::take(&mut self.sent);
        again.append(&mut self.replay);
        self.replay = again;
    }

    /// A connection goes on with the session; the peer has received everything up to `seq`.
    ///
    /// # Errors
    /// When so much was never sent, or it was acknowledged that more was received.
    pub fn resumed(&mut self, seq: u64, mut done: impl FnMut(M)) -> Result<(), Violation> {
        if seq > self.out_seq || seq < self.acked {
            return Err(Violation::Sequence { got: seq, expected: self.out_seq });
        }
        self.lost();
        self.acked = seq;
        while self.replay.front().is_some_and(|(number, _)| *number <= seq) {
            self.replay.pop_front().map(|(_, message)| message).into_iter().for_each(&mut done);
        }
        // In resuming it was said what was received.
        self.told = self.resume.in_seq;
        Ok(())
    }

    /// The peer has forgotten the session (`full`): what was not acknowledged may or may not have been delivered, what
    /// was queued was not; all of it comes back, in this order.  Or only the peer's half was never there: then nothing
    /// was delivered, and everything is sent under new numbers.
    pub fn reset(&mut self, full: bool) -> Vec<M> {
        self.lost();
        let mut out: Vec<M> = self.replay.drain(..).map(|(_, message)| message).collect();
        if full {
            out.extend(self.waiting.drain());
        } else {
            // They go first, whatever their priority: they were sent first.
            self.replay = std::mem::take(&mut out).into_iter().zip(1..).map(|(message, seq)| (seq, message)).collect();
        }
        (self.out_seq, self.acked, self.told) = (self.replay.len() as u64, 0, 0);
        self.resume = Resume {
            client_cookie: self.resume.client_cookie,
            global_seq: self.resume.global_seq,
            ..Resume::default()
        };
        out
    }
}

#[cfg(test)]
mod tests;
