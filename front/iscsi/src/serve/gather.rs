//! Commands whose data is on its way.

use std::collections::VecDeque;

use forebay_block::BufList;
use forebay_reactor::Instant;

use super::outbox::{Command, Outbox};
use super::units::Ready;
use crate::wire::{DataOut, FINAL, TAG_NONE};

/// Data that was asked for.
#[derive(Debug)]
struct Asked {
    ttt: u32,
    /// The next byte that comes.
    at: u32,
    end: u32,
    /// The number of the next PDU.
    data_sn: u32,
}

/// A command whose data is not all there.
#[derive(Debug)]
pub(super) struct Gather {
    pub(super) ready: Ready,
    pub(super) command: Command,
    pub(super) numbered: bool,
    pub(super) ordered: bool,
    /// Bytes that it holds.
    pub(super) held: usize,
    /// When it was last asked for data, or some came.
    pub(super) heard: Instant,
    /// Bytes that the command needs of those that the initiator wants to send.
    want: u32,
    /// More comes unasked: the next byte and the number of the next PDU, up to this many bytes.
    unasked: Option<(u32, u32, u32)>,
    asked: VecDeque<Asked>,
    /// Bytes that have been asked for, or came unasked.
    covered: u32,
    next_ttt: u32,
}

/// What breaks the rules of moving data.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("data out of order or that nobody asked for")]
pub(super) struct Disorder;

impl Gather {
    /// A command with what came along with it.  `first_burst` bytes may come unasked if `unasked` says that they do.
    pub(super) fn new(
        ready: Ready,
        command: Command,
        (numbered, ordered): (bool, bool),
        (unasked, first_burst): (bool, u32),
    ) -> Self {
        let here = ready.data.len() as u32;
        let want = command.takes.unwrap_or(0).min(command.expected.into()) as u32;
        let limit = first_burst.min(command.expected);
        Self {
            ready,
            heard: command.began,
            command,
            numbered,
            ordered,
            held: 0,
            want,
            unasked: unasked.then_some((here, 0, limit)),
            asked: VecDeque::new(),
            covered: here,
            next_ttt: 0,
        }
    }

    /// Bytes that it will hold when all is there.
    pub(super) fn want(&self) -> usize {
        self.want as usize
    }

    /// All is there.
    pub(super) fn is_whole(&self) -> bool {
        self.unasked.is_none() && self.asked.is_empty() && self.covered >= self.want
    }

    /// Nothing is asked for: the command has failed already, and what comes unasked is dropped.
    pub(super) fn give_up(&mut self) {
        self.want = 0;
        self.ready.data = BufList::new();
    }

    /// It is the initiator's turn: data was asked for, or comes unasked.
    pub(super) fn is_awaited(&self) -> bool {
        self.unasked.is_some() || !self.asked.is_empty()
    }

    /// It is time to ask for data.
    pub(super) fn is_hungry(&self) -> bool {
        self.unasked.is_none() && self.covered < self.want
    }

    /// Asks for as much as may be asked for at a time.
    pub(super) fn ask(&mut self, itt: u32, outbox: &mut Outbox) {
        let (open_max, burst) = (usize::from(outbox.params().r2t_max), outbox.params().burst_max);
        while self.covered < self.want && self.asked.len() < open_max {
            let len = burst.min(self.want - self.covered);
            let ttt = self.next_ttt;
            // Any number but the one that means none.
            self.next_ttt = (self.next_ttt + 1) % TAG_NONE;
            outbox.ready_to_transfer(self.command.lun_bytes, itt, ttt, self.command.r2ts, self.covered, len);
            self.command.r2ts += 1;
            self.asked.push_back(Asked { ttt, at: self.covered, end: self.covered + len, data_sn: 0 });
            self.covered += len;
        }
    }

    /// Takes data.
    pub(super) fn take(&mut self, header: &DataOut, data: BufList) -> Result<(), Disorder> {
        let (ttt, offset, number) = (header.ttt.get(), header.offset.get(), header.data_sn.get());
        let (len, last) = (data.len() as u32, header.flags & FINAL != 0);
        if ttt == TAG_NONE {
            let (at, data_sn, limit) = self.unasked.as_mut().ok_or(Disorder)?;
            if offset != *at || number != *data_sn || len > limit.saturating_sub(*at) {
                return Err(Disorder);
            }
            *at += len;
            *data_sn += 1;
            self.covered = *at;
            if last {
                self.unasked = None;
            }
        } else {
            let asked = self.asked.front_mut().ok_or(Disorder)?;
            if ttt != asked.ttt || offset != asked.at || number != asked.data_sn || len > asked.end - asked.at {
                return Err(Disorder);
            }
            asked.at += len;
            asked.data_sn += 1;
            if last != (asked.at == asked.end) {
                return Err(Disorder);
            }
            if last {
                self.asked.pop_front();
            }
        }
        // What is more than the command needs is dropped.
        let room = (self.want as usize).saturating_sub(self.ready.data.len());
        let part = if data.len() > room { data.slice(0..room) } else { data };
        self.ready.data.append(part);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use forebay_block::Buf;
    use forebay_reactor::Instant;
    use zerocopy::FromZeros;

    use super::*;
    use crate::scsi::cdb;
    use crate::stats::CommandKind;
    use crate::wire::Lun;

    fn gather(expected: u32, takes: u64, here: usize, unasked: bool) -> Gather {
        let ready =
            Ready { lun: Lun::Unit(0), command: cdb::parse(&[0; 16]), data: BufList::zeroes(here), verdict: None };
        let command = Command {
            lun_bytes: [0; 8],
            kind: CommandKind::Write,
            expected,
            takes: Some(takes),
            reads: false,
            began: Instant::default(),
            r2ts: 0,
        };
        Gather::new(ready, command, (true, false), (unasked, 1000))
    }

    fn data(ttt: u32, offset: u32, number: u32, last: bool) -> DataOut {
        let mut header = DataOut::new_zeroed();
        (header.ttt, header.offset, header.data_sn) = (ttt.into(), offset.into(), number.into());
        header.flags = if last { FINAL } else { 0 };
        header
    }

    fn bytes(len: usize) -> BufList {
        Buf::zeroed(len).into()
    }

    #[test]
    fn what_comes_unasked_comes_in_order() {
        let mut task = gather(2000, 1500, 100, true);
        assert_eq!(task.take(&data(TAG_NONE, 100, 0, false), bytes(400)), Ok(()));
        assert_eq!(task.take(&data(TAG_NONE, 500, 2, false), bytes(100)), Err(Disorder));
        assert_eq!(task.take(&data(TAG_NONE, 500, 1, true), bytes(501)), Err(Disorder), "past the first burst");
        assert_eq!(task.take(&data(TAG_NONE, 500, 1, true), bytes(500)), Ok(()));
        assert!(task.is_hungry() && !task.is_whole());
        assert_eq!(task.ready.data.len(), 1000);
    }

    #[test]
    fn what_was_asked_for_comes_in_order() {
        let mut task = gather(1000, 1000, 0, false);
        task.asked.push_back(Asked { ttt: 5, at: 0, end: 1000, data_sn: 0 });
        task.covered = 1000;
        assert_eq!(task.take(&data(4, 0, 0, false), bytes(400)), Err(Disorder), "by another tag");
        assert_eq!(task.take(&data(5, 400, 0, false), bytes(400)), Err(Disorder), "from the middle");
        assert_eq!(task.take(&data(5, 0, 1, false), bytes(400)), Err(Disorder), "a later one");
        assert_eq!(task.take(&data(5, 0, 0, false), bytes(400)), Ok(()));
        assert_eq!(task.take(&data(5, 0, 1, false), bytes(400)), Err(Disorder), "again");
        assert_eq!(task.take(&data(5, 400, 1, true), bytes(601)), Err(Disorder), "more than was asked for");
        assert_eq!(task.take(&data(5, 400, 1, true), bytes(600)), Ok(()));
        assert!(task.is_whole());
    }

    #[test]
    fn more_than_is_needed_is_dropped() {
        let mut task = gather(900, 512, 0, true);
        assert_eq!(task.take(&data(TAG_NONE, 0, 0, true), bytes(900)), Ok(()));
        assert!(task.is_whole());
        assert_eq!(task.ready.data.len(), 512);
    }
}
