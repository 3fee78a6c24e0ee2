//! Send queue: numbers PDUs, gathers them into batches, and accounts the memory that they hold until they are sent.

use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::Arc;

use forebay_block::BufList;
use forebay_reactor::Instant;
use zerocopy::big_endian::U16;

use super::memory::MemoryAccount;
use super::task::{CommandInfo, PendingScsiCommand};
use crate::scsi::stats::ScsiTallies;
use crate::scsi::{LogicalUnit, ScsiResult, status};
use crate::session::params::Params;
use crate::session::receive::IscsiPools;
use crate::session::reply::IscsiReplies;
use crate::session::window::CommandWindow;
use crate::sessions::IscsiSession;
use crate::targets::Targets;
use crate::wire::{self, Bhs, DataIn, FINAL, R2t, RejectReason, Response, ScsiResponse, TAG_NONE, response};

/// Maximum bytes of unsent responses; above this nothing more is received.
const BACKLOG_MAX: usize = 4 << 20;
/// Maximum bytes of unsent responses without a memory reservation: headers, and responses built without the device.
const BACKLOG_LOOSE_MAX: usize = 64 << 10;
/// Maximum bytes per send.
const SEND_BYTES: usize = 512 * 1024;
/// Maximum number of buffers per send.
const SEND_PARTS: usize = 256;

/// Batch being sent, and the bytes of memory accounted to it.
type Batch = (BufList, usize);

/// Send queue of a session, its command window, and its accounts.
///
/// 1. StatSN increases by one with each response that takes a number.
/// 2. `outstanding` is the number of commands that were received with a number and have not been answered or aborted;
///    the window never lets more than `depth` be outstanding.
/// 3. Bytes are held from the request until its response is sent or discarded: `unsent` by `replies`, the others by
///    `batches` and `sending`.
pub(super) struct IscsiOutbox {
    replies: IscsiReplies,
    unsent: usize,
    batches: VecDeque<Batch>,
    sending: Option<usize>,
    /// Output is discarded: the host no longer reads.
    discarding: bool,
    params: Params,
    stat_sn: u32,
    window: CommandWindow,
    /// Depth of the command window when nothing is in flight.
    depth: u32,
    /// Commands received and not yet completed.
    outstanding: u32,
    memory: MemoryAccount,
    /// Maximum number of bytes held, unless by a single command.
    bytes_max: usize,
    tallies: ScsiTallies,
}

impl IscsiOutbox {
    pub(super) fn new(
        pools: &Rc<IscsiPools>,
        (params, stat_sn, cmd_sn): (Params, u32, u32),
        (depth, bytes_max): (u32, usize),
        (targets, session): (Targets, Arc<IscsiSession>),
    ) -> Self {
        let mut replies = IscsiReplies::new(pools.clone());
        replies.set_digests(params.header_digest, params.data_digest);
        Self {
            replies,
            unsent: 0,
            batches: VecDeque::new(),
            sending: None,
            discarding: false,
            params,
            stat_sn,
            window: CommandWindow::new(cmd_sn, depth),
            depth,
            outstanding: 0,
            memory: MemoryAccount::new(targets, session.clone()),
            bytes_max,
            tallies: ScsiTallies::new(session.counters.clone()),
        }
    }

    pub(super) fn params(&mut self) -> &mut Params {
        &mut self.params
    }

    pub(super) fn window(&mut self) -> &mut CommandWindow {
        &mut self.window
    }

    /// Returns true if the number of unsent bytes requires receiving to stop.
    pub(super) fn is_full(&self) -> bool {
        let (waiting, held) = self.batches.iter().fold((self.replies.len(), self.unsent), |(waiting, held), batch| {
            (waiting + batch.0.len(), held + batch.1)
        });
        waiting > BACKLOG_MAX || waiting.saturating_sub(held) > BACKLOG_LOOSE_MAX
    }

    // ---- Window and memory ----

    /// Counts a numbered command that was received.
    pub(super) fn taken(&mut self) {
        self.outstanding += 1;
    }

    /// Counts a numbered command that was completed or aborted, and opens the window.
    pub(super) fn settled(&mut self) {
        self.outstanding -= 1;
        self.open_window();
    }

    /// Accounts for a numbered or immediate command that has been aborted before it began.
    pub(super) fn drop_command(&mut self, numbered: bool, held: usize) {
        if numbered {
            self.settled();
        }
        self.release(held);
    }

    fn open_window(&mut self) {
        // When memory is short, each session continues with a window of at most two commands.
        let depth = if self.memory.is_short() { self.depth.min(2) } else { self.depth };
        self.window.open(depth.saturating_sub(self.outstanding));
    }

    /// Holds memory for data that was received already.
    pub(super) fn hold(&mut self, bytes: usize) {
        self.memory.hold(bytes);
    }

    /// Releases memory.
    pub(super) fn release(&mut self, bytes: usize) {
        self.memory.release(bytes, self.outstanding == 0);
    }

    /// Tries to hold `bytes` more for a command that holds `own` bytes already, within the session's maximum and the budget
    /// of all sessions. If that is exhausted, the session is woken when memory may be available.
    pub(super) fn try_hold(&mut self, bytes: usize, own: usize) -> bool {
        self.memory.try_hold(bytes, own, self.bytes_max)
    }

    /// Returns true when memory is so short that immediate and unsolicited data cannot be kept.
    pub(super) fn is_starved(&self) -> bool {
        self.memory.is_starved()
    }

    // ---- Batches ----

    /// Accounts `bytes` to the PDUs in `replies` until they are sent.
    #[inline]
    fn queued(&mut self, bytes: usize) {
        self.unsent += bytes;
        if self.discarding {
            self.replies.clear();
            let bytes = std::mem::take(&mut self.unsent);
            self.release(bytes);
        } else if self.replies.len() >= SEND_BYTES || self.replies.parts() >= SEND_PARTS {
            self.batches.push_back((self.replies.take(), std::mem::take(&mut self.unsent)));
        }
    }

    pub(super) fn next_batch(&mut self) -> Option<BufList> {
        debug_assert!(self.sending.is_none());
        let (batch, bytes) = match self.batches.pop_front() {
            Some(batch) => batch,
            None if self.replies.is_empty() => return None,
            None => (self.replies.take(), std::mem::take(&mut self.unsent)),
        };
        self.sending = Some(bytes);
        Some(batch)
    }

    pub(super) fn sent(&mut self) {
        let bytes = self.sending.take().unwrap_or(0);
        self.release(bytes);
    }

    pub(super) fn is_empty(&self) -> bool {
        self.batches.is_empty() && self.replies.is_empty() && self.sending.is_none()
    }

    /// Discards all output from now on.
    pub(super) fn discard_output(&mut self) {
        self.discarding = true;
        let dropped: usize = self.batches.drain(..).map(|(_, bytes)| bytes).sum();
        self.replies.clear();
        let bytes = dropped + std::mem::take(&mut self.unsent);
        self.release(bytes);
    }

    // ---- PDUs ----

    #[inline]
    fn next_stat_sn(&mut self) -> u32 {
        let number = self.stat_sn;
        self.stat_sn = number.wrapping_add(1);
        number
    }

    /// Sends the outcome of a command and its sense data, updates the counters, and releases its place in the window.
    pub(super) fn answer(
        &mut self,
        now: Instant,
        (result, sense): (ScsiResult, Vec<u8>),
        command: PendingScsiCommand,
        unit: Option<&Rc<LogicalUnit>>,
    ) {
        let PendingScsiCommand { itt, info, numbered, held } = command;
        if numbered {
            self.settled();
        }
        let (read, failed) = match &result {
            Ok(data) => (data.len() as u64, false),
            Err(_) => (0, true),
        };
        let (took, written) = (now.since(info.began), info.takes.unwrap_or(0));
        self.tallies.answered(unit, (info.kind, took), failed, (read, written));
        match result {
            Ok(data) if !data.is_empty() && info.reads => self.data(itt, &info, data),
            Ok(data) => self.status(itt, &info, status::GOOD, data.len() as u64, &[]),
            Err(failure) => self.status(itt, &info, failure.status, 0, &sense),
        }
        self.queued(held);
    }

    /// Returns the residual flags and count of a command that has `len` bytes to transfer.
    fn residual(expected: u32, len: u64) -> (u8, u32) {
        use wire::response_flag::{OVERFLOW, UNDERFLOW};
        match len.cmp(&expected.into()) {
            std::cmp::Ordering::Equal => (0, 0),
            std::cmp::Ordering::Less => (UNDERFLOW, expected - len as u32),
            std::cmp::Ordering::Greater => (OVERFLOW, u32::try_from(len - u64::from(expected)).unwrap_or(u32::MAX)),
        }
    }

    fn status(&mut self, itt: u32, command: &CommandInfo, status: u8, gives: u64, sense: &[u8]) {
        let (flags, residual) = Self::residual(command.expected, command.takes.unwrap_or(gives));
        let data = match sense {
            [] => Vec::new(),
            sense => [&(sense.len() as u16).to_be_bytes(), sense].concat(),
        };
        let header = ScsiResponse {
            opcode: response::SCSI,
            flags: FINAL | flags,
            response: 0,
            status,
            ahs_len: 0,
            data_len: wire::data_len(data.len()),
            reserved: [0; 8],
            itt: itt.into(),
            snack_tag: 0.into(),
            stat_sn: self.next_stat_sn().into(),
            exp_cmd_sn: self.window.expected().into(),
            max_cmd_sn: self.window.last().into(),
            exp_data_sn: command.r2ts.into(),
            read_residual: 0.into(),
            residual: residual.into(),
        };
        self.replies.pdu_with(&header, &data);
    }

    /// Sends Data-In PDUs; the last one carries GOOD status.
    fn data(&mut self, itt: u32, command: &CommandInfo, data: BufList) {
        let (residual_flags, residual) = Self::residual(command.expected, data.len() as u64);
        let total = data.len().min(command.expected as usize);
        if total == 0 {
            return self.status(itt, command, status::GOOD, data.len() as u64, &[]);
        }
        let data = if data.len() > total { data.slice(0..total) } else { data };
        let (segment, burst) = (self.params.send_max as usize, self.params.burst_max as usize);
        let mut header = DataIn {
            opcode: response::DATA_IN,
            flags: 0,
            reserved: 0,
            status: 0,
            ahs_len: 0,
            data_len: [0; 3],
            lun: [0; 8],
            itt: itt.into(),
            ttt: TAG_NONE.into(),
            stat_sn: 0.into(),
            exp_cmd_sn: self.window.expected().into(),
            max_cmd_sn: self.window.last().into(),
            data_sn: 0.into(),
            offset: 0.into(),
            residual: 0.into(),
        };
        let (mut at, mut number) = (0, 0u32);
        loop {
            // PDUs end at burst boundaries.
            let len = segment.min(total - at).min(burst - at % burst);
            let last = at + len == total;
            let part = if len == data.len() { data.clone() } else { data.slice(at..at + len) };
            header.data_len = wire::data_len(len);
            header.offset = (at as u32).into();
            header.data_sn = number.into();
            header.flags = if last || (at + len).is_multiple_of(burst) { FINAL } else { 0 };
            if last {
                header.flags |= wire::response_flag::STATUS | residual_flags;
                header.residual = residual.into();
                header.stat_sn = self.next_stat_sn().into();
            }
            self.replies.pdu(&header, part);
            if last {
                return;
            }
            at += len;
            number += 1;
        }
    }

    /// Sends an R2T.
    pub(super) fn ready_to_transfer(&mut self, lun: [u8; 8], itt: u32, ttt: u32, number: u32, offset: u32, len: u32) {
        let header = R2t {
            opcode: response::R2T,
            flags: FINAL,
            reserved: [0; 2],
            ahs_len: 0,
            data_len: [0; 3],
            lun,
            itt: itt.into(),
            ttt: ttt.into(),
            stat_sn: self.stat_sn.into(),
            exp_cmd_sn: self.window.expected().into(),
            max_cmd_sn: self.window.last().into(),
            r2t_sn: number.into(),
            offset: offset.into(),
            len: len.into(),
        };
        self.replies.pdu_with(&header, &[]);
        self.queued(0);
    }

    /// Sends a simple response that takes a StatSN.
    pub(super) fn response(&mut self, opcode: u8, code: u8, itt: u32, ttt: u32, data: &[u8]) {
        self.plain(opcode, FINAL, code, itt, ttt, [0; 6], data);
    }

    #[allow(clippy::too_many_arguments)]
    fn plain(&mut self, opcode: u8, flags: u8, code: u8, itt: u32, ttt: u32, rest: [u16; 6], data: &[u8]) {
        let header = Response {
            opcode,
            flags,
            code,
            reserved: 0,
            ahs_len: 0,
            data_len: wire::data_len(data.len()),
            lun: [0; 8],
            itt: itt.into(),
            ttt: ttt.into(),
            stat_sn: self.next_stat_sn().into(),
            exp_cmd_sn: self.window.expected().into(),
            max_cmd_sn: self.window.last().into(),
            rest: rest.map(U16::new),
        };
        self.replies.pdu_with(&header, data);
        self.queued(0);
    }

    /// Sends part of a text response; if `more` is set, the rest follows under `ttt`.
    pub(super) fn text(&mut self, itt: u32, ttt: u32, more: bool, data: &[u8]) {
        let flags = if more { wire::CONTINUE } else { FINAL };
        self.plain(response::TEXT, flags, 0, itt, ttt, [0; 6], data);
    }

    /// Sends a Reject with the header of the rejected PDU.
    pub(super) fn reject(&mut self, reason: RejectReason, bhs: &Bhs) {
        use zerocopy::IntoBytes;
        self.plain(response::REJECT, FINAL, reason as u8, TAG_NONE, TAG_NONE, [0; 6], bhs.as_bytes());
    }

    /// Sends a NOP-In that requests a NOP-Out from the initiator.
    pub(super) fn ping(&mut self, ttt: u32) {
        let number = self.stat_sn;
        self.plain(response::NOP_IN, FINAL, 0, TAG_NONE, ttt, [0; 6], &[]);
        // This NOP-In carries the next StatSN without consuming it.
        self.stat_sn = number;
    }

    /// Sends an Asynchronous Message.
    pub(super) fn event(&mut self, event: u8, parameters: [u16; 3]) {
        let [first, second, third] = parameters;
        // AsyncEvent and AsyncVCode share the first two bytes.
        let rest = [u16::from(event) << 8, first, second, third, 0, 0];
        self.plain(response::ASYNC, FINAL, 0, TAG_NONE, TAG_NONE, rest, &[]);
    }

    // ---- Statistics ----

    /// Adds the counts of this turn to the shared counters.
    pub(super) fn flush_tallies(&mut self) {
        self.tallies.flush();
    }
}
