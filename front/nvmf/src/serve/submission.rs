//! Command accounting of a submission queue.

/// Value of SQHD that grants a host's request to disable flow control (base 6.3).
const NO_FLOW_CONTROL: u16 = 0xFFFF;

/// Submission queue of a connection: its length, its head, and the commands without a response.
///
/// 1. No more commands are outstanding than the queue has entries.
/// 2. Every accepted command is completed once: by a response, by data with the SUCCESS flag, or by a reset that
///    drops it.
/// 3. With flow control, the head is less than the number of entries, and moves by one for every command.
#[derive(Debug)]
pub(super) struct SubmissionQueue {
    entries: usize,
    outstanding: usize,
    head: u16,
    flow_control: bool,
}

impl SubmissionQueue {
    /// Creates the queue of a connection before its Connect, which accepts one command at a time.
    pub(super) fn before_connect() -> Self {
        Self { entries: 1, outstanding: 0, head: 0, flow_control: false }
    }

    /// Accepts a command.  Returns false if the queue is full, which is a protocol error of the host.
    pub(super) fn accept(&mut self) -> bool {
        if self.flow_control {
            self.head = if usize::from(self.head) + 1 >= self.entries { 0 } else { self.head + 1 };
        }
        if self.outstanding >= self.entries {
            return false;
        }
        self.outstanding += 1;
        self.check();
        true
    }

    /// Completes a command.  Returns the queue head to report to the host.
    pub(super) fn complete(&mut self) -> u16 {
        self.drop_commands(1);
        self.head
    }

    /// Drops commands that get no response.
    pub(super) fn drop_commands(&mut self, count: usize) {
        debug_assert!(self.outstanding >= count, "more completions than commands");
        self.outstanding -= count;
    }

    /// Turns the queue into one of `entries`, and completes its Connect.  Returns the queue head to report with that.
    pub(super) fn connect(&mut self, entries: u16, flow_control: bool) -> u16 {
        self.drop_commands(1);
        debug_assert!(self.outstanding == 0, "nothing is accepted beside a Connect");
        *self = Self { entries: entries.into(), outstanding: 0, head: 1, flow_control };
        self.check();
        if flow_control { self.head } else { NO_FLOW_CONTROL }
    }

    /// Returns whether C2HData with the SUCCESS flag replaces the response to a command that returns data.
    pub(super) fn has_success_flag(&self) -> bool {
        !self.flow_control
    }

    fn check(&self) {
        debug_assert!(self.outstanding <= self.entries);
        debug_assert!(usize::from(self.head) < self.entries);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_queue_accepts_as_many_commands_as_it_has_entries() {
        let mut queue = SubmissionQueue::before_connect();
        assert!(queue.accept() && !queue.accept());
        assert_eq!(queue.complete(), 0);
        assert!(queue.accept());
        assert_eq!(queue.connect(4, true), 1);
        for _ in 0..4 {
            assert!(queue.accept());
        }
        assert!(!queue.accept());
    }

    #[test]
    fn the_head_goes_round() {
        let mut queue = SubmissionQueue::before_connect();
        assert!(queue.accept());
        assert_eq!(queue.connect(3, true), 1);
        for head in [2, 0, 1, 2] {
            assert!(queue.accept());
            assert_eq!(queue.complete(), head);
        }
    }

    #[test]
    fn without_flow_control_the_head_stays() {
        let mut queue = SubmissionQueue::before_connect();
        assert!(queue.accept());
        assert_eq!(queue.connect(2, false), 0xFFFF);
        assert!(queue.has_success_flag());
        for _ in 0..5 {
            assert!(queue.accept());
            assert_eq!(queue.complete(), 1);
        }
    }

    #[test]
    fn dropped_commands_make_space() {
        let mut queue = SubmissionQueue::before_connect();
        assert!(queue.accept());
        queue.connect(4, true);
        assert!(queue.accept() && queue.accept() && queue.accept());
        queue.drop_commands(2);
        assert!(queue.accept() && queue.accept() && queue.accept() && !queue.accept());
    }
}
