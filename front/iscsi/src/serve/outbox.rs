//! What is sent: PDUs with their numbers, gathered for one send, and what they hold until they are sent.

use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::Arc;

use forebay_block::BufList;
use forebay_reactor::Instant;
use zerocopy::big_endian::U16;

use super::execute::Outcome;
use super::local::{Failure, Local};
use crate::scsi::mode::Modes;
use crate::scsi::status;
use crate::session::params::Params;
use crate::session::receive::Pools;
use crate::session::reply::Replies;
use crate::session::window::Window;
use crate::site::{Session, Site};
use crate::stats::{CommandKind, Tally};
use crate::unit::Drain;
use crate::wire::{self, Bhs, DataIn, FINAL, R2t, RejectReason, Response, ScsiResponse, TAG_NONE, response};

/// Bytes of answers that wait to be sent, past which nothing more is received.
const BACKLOG_MAX: usize = 4 << 20;
/// The same for those that no memory was set aside for: headers, and what is answered without the device.
const BACKLOG_LOOSE_MAX: usize = 64 << 10;
/// Bytes gathered for one send.
const SEND_BYTES: usize = 512 * 1024;
/// Buffers gathered for one send.
const SEND_PARTS: usize = 256;
/// Memory is set aside with the site in steps of this many bytes.
const MEMORY_STEP: usize = 256 << 10;

/// What is under way.
#[derive(Debug)]
pub(super) enum Role {
    /// A command.
    Command(Command),
    /// A task management function, and what it comes to.
    Task(u8),
}

/// A command under way.
#[derive(Debug)]
pub(super) struct Command {
    /// The unit as it stands in the PDU.
    pub(super) lun_bytes: [u8; 8],
    pub(super) kind: CommandKind,
    /// Bytes that the initiator expects to move.
    pub(super) expected: u32,
    /// Bytes that the command takes from the initiator, if it does.
    pub(super) takes: Option<u64>,
    /// The initiator is willing to take data.
    pub(super) reads: bool,
    pub(super) began: Instant,
    /// R2Ts that were sent.
    pub(super) r2ts: u32,
}

/// What is known of what is under way.
pub(super) struct Pending {
    pub(super) itt: u32,
    pub(super) local: Option<Rc<Local>>,
    pub(super) role: Role,
    /// It has a place in the window.
    pub(super) numbered: bool,
    /// Nobody waits for the answer any more.
    pub(super) aborted: bool,
    /// It keeps what comes after it waiting.
    pub(super) ordered: bool,
    /// It waits for the end of others, and is not waited for.
    pub(super) control: bool,
    /// Bytes that it holds.
    pub(super) held: usize,
    /// Those who wait for its end.
    pub(super) drains: Vec<Arc<Drain>>,
}

/// A batch on its way, and the bytes that it holds.
type Batch = (BufList, usize);

pub(super) struct Outbox {
    replies: Replies,
    unsent: usize,
    batches: VecDeque<Batch>,
    sending: Option<usize>,
    /// Nobody reads what is sent any more.
    deaf: bool,
    params: Params,
    stat_sn: u32,
    window: Window,
    /// Commands that the window has room for, when nothing is under way.
    depth: u32,
    /// Commands that were taken and not answered.
    outstanding: u32,
    /// Bytes that commands under way and unsent answers hold.
    held: usize,
    /// Bytes set aside with the site.
    granted: usize,
    site: Site,
    session: Arc<Session>,
    session_tally: Tally,
    unit_tally: (Option<Rc<Local>>, Tally),
    /// Commands in flight that keep others waiting.
    pub(super) ordered: u32,
}

impl Outbox {
    pub(super) fn new(
        pools: &Rc<Pools>,
        (params, stat_sn, cmd_sn): (Params, u32, u32),
        depth: u32,
        (site, session): (Site, Arc<Session>),
    ) -> Self {
        let mut replies = Replies::new(pools.clone());
        replies.set_digests(params.header_digest, params.data_digest);
        Self {
            replies,
            unsent: 0,
            batches: VecDeque::new(),
            sending: None,
            deaf: false,
            params,
            stat_sn,
            window: Window::new(cmd_sn, depth),
            depth,
            outstanding: 0,
            held: 0,
            granted: 0,
            site,
            session,
            session_tally: Tally::default(),
            unit_tally: (None, Tally::default()),
            ordered: 0,
        }
    }

    pub(super) fn params(&mut self) -> &mut Params {
        &mut self.params
    }

    pub(super) fn window(&mut self) -> &mut Window {
        &mut self.window
    }

    /// So much waits to be sent that nothing more is received.
    pub(super) fn is_full(&self) -> bool {
        let (waiting, held) = self.batches.iter().fold((self.replies.len(), self.unsent), |(waiting, held), batch| {
            (waiting + batch.0.len(), held + batch.1)
        });
        waiting > BACKLOG_MAX || waiting.saturating_sub(held) > BACKLOG_LOOSE_MAX
    }

    // ---- What is held ----

    /// A numbered command was taken.
    pub(super) fn taken(&mut self) {
        self.outstanding += 1;
    }

    /// A numbered command is answered, or nobody waits for it any more.
    pub(super) fn settled(&mut self) {
        self.outstanding -= 1;
        self.open_window();
    }

    fn open_window(&mut self) {
        // Where memory is short, each session goes on with a little.
        let depth = if self.granted == 0 || self.site.has_memory() { self.depth } else { self.depth.min(2) };
        self.window.open(depth.saturating_sub(self.outstanding));
    }

    pub(super) fn hold(&mut self, bytes: usize) {
        self.held += bytes;
        if self.held > self.granted {
            let more = (self.held - self.granted).next_multiple_of(MEMORY_STEP);
            self.site.take_memory(more);
            self.granted += more;
        }
    }

    pub(super) fn release(&mut self, bytes: usize) {
        self.held -= bytes;
        let needed = self.held.next_multiple_of(MEMORY_STEP);
        // One step is kept while there is traffic, so that not every command passes by the site.
        if self.granted > needed + MEMORY_STEP || (self.held == 0 && self.outstanding == 0 && self.granted > 0) {
            self.site.give_memory(self.granted - needed);
            self.granted = needed;
        }
    }

    /// Holds `bytes` more for a command that holds `own` already, if there is room.  Where it is the site that has none,
    /// the session is woken when there may be some.
    pub(super) fn try_hold(&mut self, bytes: usize, own: usize, bytes_max: usize) -> bool {
        if self.held > own && self.held + bytes > bytes_max {
            return false;
        }
        let needed = self.held + bytes;
        if needed > self.granted {
            let more = (needed - self.granted).next_multiple_of(MEMORY_STEP);
            if !self.site.try_take_memory(more, &self.session.signal) {
                return false;
            }
            self.granted += more;
        }
        self.held = needed;
        true
    }

    /// There is so little memory that what came along with a command cannot be kept.
    pub(super) fn is_starved(&self) -> bool {
        self.held >= self.granted && self.site.is_starved()
    }

    // ---- Batches ----

    /// What was put into `replies` holds `bytes` until it is sent.
    #[inline]
    fn queued(&mut self, bytes: usize) {
        self.unsent += bytes;
        if self.deaf {
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

    /// From now on nothing is sent.
    pub(super) fn deafen(&mut self) {
        self.deaf = true;
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

    /// What a command came to; whether it failed.
    pub(super) fn answer(&mut self, now: Instant, outcome: Outcome, pending: Pending) {
        let Pending { itt, local, role, numbered, aborted, ordered, held, .. } = pending;
        if numbered {
            self.settled();
        }
        self.ordered -= u32::from(ordered);
        let command = match role {
            Role::Task(response) => {
                if aborted {
                    return self.release(held);
                }
                self.response(response::TASK_MANAGEMENT, response, itt, TAG_NONE, &[]);
                return self.queued(held);
            }
            Role::Command(command) => command,
        };
        if aborted {
            return self.release(held);
        }
        let (read, failed) = match &outcome {
            Ok(data) => (data.len() as u64, false),
            Err(_) => (0, true),
        };
        let (took, written) = (now.since(command.began), command.takes.unwrap_or(0));
        self.session_tally.answered(command.kind, took, failed, read, written);
        if let Some(local) = &local {
            if self.unit_tally.0.as_ref().is_none_or(|last| !Rc::ptr_eq(last, local)) {
                self.flush_unit();
                self.unit_tally.0 = Some(local.clone());
            }
            self.unit_tally.1.answered(command.kind, took, failed, read, written);
        }
        match outcome {
            Ok(data) if !data.is_empty() && command.reads => self.data(itt, &command, data),
            Ok(data) => self.status(itt, &command, status::GOOD, data.len() as u64, &[]),
            Err(failure) => self.failure(itt, &command, failure, local.as_deref()),
        }
        self.queued(held);
    }

    pub(super) fn failure(&mut self, itt: u32, command: &Command, failure: Failure, local: Option<&Local>) {
        let descriptor = local.is_some_and(|local| local.unit.modes().has(Modes::DESCRIPTOR_SENSE));
        let sense = failure.sense.map(|sense| sense.to_bytes(descriptor)).unwrap_or_default();
        self.status(itt, command, failure.status, 0, &sense);
    }

    /// Residuals: flags and count, for a command that has `len` bytes to move.
    fn residual(expected: u32, len: u64) -> (u8, u32) {
        use wire::response_flag::{OVERFLOW, UNDERFLOW};
        match len.cmp(&expected.into()) {
            std::cmp::Ordering::Equal => (0, 0),
            std::cmp::Ordering::Less => (UNDERFLOW, expected - len as u32),
            std::cmp::Ordering::Greater => (OVERFLOW, u32::try_from(len - u64::from(expected)).unwrap_or(u32::MAX)),
        }
    }

    fn status(&mut self, itt: u32, command: &Command, status: u8, gives: u64, sense: &[u8]) {
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

    /// Data with GOOD status in its last PDU.
    fn data(&mut self, itt: u32, command: &Command, data: BufList) {
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
            // A PDU ends where a burst does.
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

    /// Asks for data.
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

    /// One of the simpler responses, with its own number.
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

    /// A part of a text; `more` follows under `ttt`.
    pub(super) fn text(&mut self, itt: u32, ttt: u32, more: bool, data: &[u8]) {
        let flags = if more { wire::CONTINUE } else { FINAL };
        self.plain(response::TEXT, flags, 0, itt, ttt, [0; 6], data);
    }

    /// A PDU is refused; its header goes back with the refusal.
    pub(super) fn reject(&mut self, reason: RejectReason, bhs: &Bhs) {
        use zerocopy::IntoBytes;
        self.plain(response::REJECT, FINAL, reason as u8, TAG_NONE, TAG_NONE, [0; 6], bhs.as_bytes());
    }

    /// Asks the initiator whether it is still there.
    pub(super) fn ping(&mut self, ttt: u32) {
        let number = self.stat_sn;
        self.plain(response::NOP_IN, FINAL, 0, TAG_NONE, ttt, [0; 6], &[]);
        // A ping has the number of the next status, and does not use it up.
        self.stat_sn = number;
    }

    /// Tells the initiator of something that it did not ask for.
    pub(super) fn event(&mut self, event: u8, parameters: [u16; 3]) {
        let [first, second, third] = parameters;
        // Event and vendor code share the first two bytes.
        let rest = [u16::from(event) << 8, first, second, third, 0, 0];
        self.plain(response::ASYNC, FINAL, 0, TAG_NONE, TAG_NONE, rest, &[]);
    }

    // ---- Statistics ----

    fn flush_unit(&mut self) {
        if let (Some(local), tally) = &mut self.unit_tally {
            tally.flush(&[local.unit.counters()]);
        }
    }

    /// Adds what was counted to what everybody sees, and forgets the unit.
    pub(super) fn flush_tallies(&mut self) {
        self.session_tally.flush(&[&self.session.counters]);
        self.flush_unit();
        self.unit_tally.0 = None;
    }
}

impl Drop for Outbox {
    fn drop(&mut self) {
        self.flush_tallies();
        self.site.give_memory(self.granted);
    }
}
