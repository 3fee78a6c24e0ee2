//! Data-out transfers: commands whose data is being received.

use std::collections::VecDeque;

use forebay_block::BufList;
use forebay_reactor::Instant;

use super::outbox::IscsiOutbox;
use super::task::CommandInfo;
use crate::scsi::ReadyScsiCommand;
use crate::wire::{DataOut, FINAL, TAG_NONE};

/// Data-out sequence solicited by an R2T.
#[derive(Debug)]
struct SolicitedSequence {
    ttt: u32,
    /// Offset of the next byte.
    at: u32,
    end: u32,
    /// DataSN of the next PDU.
    data_sn: u32,
}

/// Command whose data-out transfer is not complete.
#[derive(Debug)]
pub(super) struct DataOutTransfer {
    pub(super) ready: ReadyScsiCommand,
    pub(super) info: CommandInfo,
    pub(super) numbered: bool,
    pub(super) ordered: bool,
    /// Bytes of memory accounted to it.
    pub(super) held: usize,
    /// Time when data was last solicited or received.
    pub(super) heard: Instant,
    /// Bytes of data-out to keep: the lesser of what the command takes and what the initiator sends.
    want: u32,
    /// Unsolicited data still to come: offset of the next byte, DataSN of the next PDU, and limit in bytes.
    unsolicited: Option<(u32, u32, u32)>,
    solicited: VecDeque<SolicitedSequence>,
    /// Bytes that were solicited with R2Ts or received unsolicited.
    covered: u32,
    next_ttt: u32,
}

/// Violation of the rules for data-out sequences.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("data out of order, or not solicited")]
pub(super) struct OutOfOrder;

impl DataOutTransfer {
    /// Creates a transfer with the command's immediate data.  If `unsolicited` is true, up to `first_burst` bytes follow
    /// unsolicited.
    pub(super) fn new(
        ready: ReadyScsiCommand,
        info: CommandInfo,
        (numbered, ordered): (bool, bool),
        (unsolicited, first_burst): (bool, u32),
    ) -> Self {
        let here = ready.data.len() as u32;
        let want = info.takes.unwrap_or(0).min(info.expected.into()) as u32;
        let limit = first_burst.min(info.expected);
        Self {
            ready,
            heard: info.began,
            info,
            numbered,
            ordered,
            held: 0,
            want,
            unsolicited: unsolicited.then_some((here, 0, limit)),
            solicited: VecDeque::new(),
            covered: here,
            next_ttt: 0,
        }
    }

    /// Returns the bytes that it will hold once the transfer is complete.
    pub(super) fn want(&self) -> usize {
        self.want as usize
    }

    /// Returns true once all data has been received.
    pub(super) fn is_complete(&self) -> bool {
        self.unsolicited.is_none() && self.solicited.is_empty() && self.covered >= self.want
    }

    /// Stops soliciting data: the command has failed already, and further unsolicited data is dropped.
    pub(super) fn stop_soliciting(&mut self) {
        self.want = 0;
        self.ready.data = BufList::new();
    }

    /// Returns true while data from the initiator is outstanding, solicited or not.
    pub(super) fn is_awaited(&self) -> bool {
        self.unsolicited.is_some() || !self.solicited.is_empty()
    }

    /// Returns true if the next R2T can be sent.
    pub(super) fn needs_r2t(&self) -> bool {
        self.unsolicited.is_none() && self.covered < self.want
    }

    /// Sends R2Ts, as many as may be outstanding at a time.
    pub(super) fn send_r2ts(&mut self, itt: u32, outbox: &mut IscsiOutbox) {
        let (open_max, burst) = (usize::from(outbox.params().r2t_max), outbox.params().burst_max);
        while self.covered < self.want && self.solicited.len() < open_max {
            let len = burst.min(self.want - self.covered);
            let ttt = self.next_ttt;
            // Any tag except the reserved one.
            self.next_ttt = (self.next_ttt + 1) % TAG_NONE;
            outbox.ready_to_transfer(self.info.lun_bytes, itt, ttt, self.info.r2ts, self.covered, len);
            self.info.r2ts += 1;
            self.solicited.push_back(SolicitedSequence { ttt, at: self.covered, end: self.covered + len, data_sn: 0 });
            self.covered += len;
        }
    }

    /// Accepts a Data-Out PDU.
    pub(super) fn take(&mut self, header: &DataOut, data: BufList) -> Result<(), OutOfOrder> {
        let (ttt, offset, number) = (header.ttt.get(), header.offset.get(), header.data_sn.get());
        let (len, last) = (data.len() as u32, header.flags & FINAL != 0);
        if ttt == TAG_NONE {
            let (at, data_sn, limit) = self.unsolicited.as_mut().ok_or(OutOfOrder)?;
            if offset != *at || number != *data_sn || len > limit.saturating_sub(*at) {
                return Err(OutOfOrder);
            }
            *at += len;
            *data_sn += 1;
            self.covered = *at;
            if last {
                self.unsolicited = None;
            }
        } else {
            let open = self.solicited.front_mut().ok_or(OutOfOrder)?;
            if ttt != open.ttt || offset != open.at || number != open.data_sn || len > open.end - open.at {
                return Err(OutOfOrder);
            }
            open.at += len;
            open.data_sn += 1;
            if last != (open.at == open.end) {
                return Err(OutOfOrder);
            }
            if last {
                self.solicited.pop_front();
            }
        }
        // Data beyond what the command needs is dropped.
        let space = (self.want as usize).saturating_sub(self.ready.data.len());
        let part = if data.len() > space { data.slice(0..space) } else { data };
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
    use crate::stats::ScsiCommandKind;
    use crate::wire::Lun;

    fn transfer(expected: u32, takes: u64, here: usize, unsolicited: bool) -> DataOutTransfer {
        let ready = ReadyScsiCommand {
            lun: Lun::Unit(0),
            command: cdb::parse(&[0; 16]),
            data: BufList::zeroes(here),
            verdict: None,
        };
        let info = CommandInfo {
            lun_bytes: [0; 8],
            kind: ScsiCommandKind::Write,
            expected,
            takes: Some(takes),
            reads: false,
            began: Instant::default(),
            r2ts: 0,
        };
        DataOutTransfer::new(ready, info, (true, false), (unsolicited, 1000))
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
        let mut task = transfer(2000, 1500, 100, true);
        assert_eq!(task.take(&data(TAG_NONE, 100, 0, false), bytes(400)), Ok(()));
        assert_eq!(task.take(&data(TAG_NONE, 500, 2, false), bytes(100)), Err(OutOfOrder));
        assert_eq!(task.take(&data(TAG_NONE, 500, 1, true), bytes(501)), Err(OutOfOrder), "past the first burst");
        assert_eq!(task.take(&data(TAG_NONE, 500, 1, true), bytes(500)), Ok(()));
        assert!(task.needs_r2t() && !task.is_complete());
        assert_eq!(task.ready.data.len(), 1000);
    }

    #[test]
    fn what_was_asked_for_comes_in_order() {
        let mut task = transfer(1000, 1000, 0, false);
        task.solicited.push_back(SolicitedSequence { ttt: 5, at: 0, end: 1000, data_sn: 0 });
        task.covered = 1000;
        assert_eq!(task.take(&data(4, 0, 0, false), bytes(400)), Err(OutOfOrder), "by another tag");
        assert_eq!(task.take(&data(5, 400, 0, false), bytes(400)), Err(OutOfOrder), "from the middle");
        assert_eq!(task.take(&data(5, 0, 1, false), bytes(400)), Err(OutOfOrder), "a later one");
        assert_eq!(task.take(&data(5, 0, 0, false), bytes(400)), Ok(()));
        assert_eq!(task.take(&data(5, 0, 1, false), bytes(400)), Err(OutOfOrder), "again");
        assert_eq!(task.take(&data(5, 400, 1, true), bytes(601)), Err(OutOfOrder), "more than was asked for");
        assert_eq!(task.take(&data(5, 400, 1, true), bytes(600)), Ok(()));
        assert!(task.is_complete());
    }

    #[test]
    fn more_than_is_needed_is_dropped() {
        let mut task = transfer(900, 512, 0, true);
        assert_eq!(task.take(&data(TAG_NONE, 0, 0, true), bytes(900)), Ok(()));
        assert!(task.is_complete());
        assert_eq!(task.ready.data.len(), 512);
    }
}
