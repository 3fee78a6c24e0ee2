//! Handling of request PDUs.

use forebay_block::BufList;

use super::connection::{Connection, EXTRA_MAX, Violation};
use super::data_out::DataOutTransfer;
use super::outbox::{Command, Pending, Role};
use crate::scsi::BLOCK;
use crate::scsi::cdb::{self, Transfer};
use crate::scsi::inquiry::TRANSFER_BLOCKS_MAX;
use crate::scsi::sense::{Sense, code, key};
use crate::session::login::PORTAL_GROUP;
use crate::session::params::renegotiate;
use crate::session::receive::Pdu;
use crate::session::text;
use crate::session::window::Place;
use crate::stats::CommandKind;
use crate::target::Target;
use crate::unit::Failure;
use crate::unit::commands::{Execution, ReadyCommand};
use crate::wire::{
    Bhs, CONTINUE, DataOut, Lun, NAME_MAX, RejectReason, Request, ScsiCommand, TAG_NONE, TaskRequest, command_flag,
    logout_response, request, response,
};
use forebay_reactor::Addr;

/// Maximum text response in bytes, besides discovered targets; more is omitted.
const TEXT_MAX: usize = 128 << 10;
/// Maximum data in bytes of PDUs received out of order.
const LATER_BYTES_MAX: usize = 1 << 20;

/// Rest of a text response: encoded text, then the discovered targets that are not encoded yet.
#[derive(Default)]
pub(super) struct TextAnswer {
    text: Vec<u8>,
    discovering: Option<Discovering>,
}

/// Progress of a SendTargets discovery of all targets.
#[derive(Default)]
struct Discovering {
    /// Name of the last target that was listed.
    after: Option<String>,
}

/// Command that waits for memory, or for other commands to end.
pub(super) struct Waiting {
    pub(super) itt: u32,
    pub(super) ready: ReadyCommand,
    pub(super) command: Command,
    pub(super) numbered: bool,
    pub(super) ordered: bool,
    /// Bytes of memory accounted to it already.
    pub(super) held: usize,
}

impl Connection<'_> {
    /// Handles a received PDU.
    pub(super) fn handle(&mut self, pdu: Pdu) -> Result<(), Violation> {
        let opcode = pdu.bhs.opcode();
        match opcode {
            request::DATA_OUT => return self.data_out(pdu),
            request::SCSI_COMMAND | request::TASK_MANAGEMENT | request::TEXT | request::LOGOUT | request::NOP_OUT => {}
            request::LOGIN => {
                self.outbox.reject(RejectReason::Protocol, &pdu.bhs);
                return Err(Violation::Login);
            }
            request::SNACK => {
                self.outbox.reject(RejectReason::Snack, &pdu.bhs);
                return Ok(());
            }
            _ => {
                self.outbox.reject(RejectReason::NotSupported, &pdu.bhs);
                return Ok(());
            }
        }
        if pdu.bhs.is_immediate() {
            return self.deliver(pdu, false);
        }
        // These PDUs all have the CmdSN at the same offset.
        let number = pdu.bhs.view::<Request>().cmd_sn.get();
        match self.outbox.window().place(number) {
            Place::Never => return Ok(()),
            Place::Later => return self.keep_for_later(number, pdu),
            Place::Now => {}
        }
        self.numbered(pdu)?;
        while !self.later.is_empty() {
            let next = self.outbox.window().expected();
            let Some(pdu) = self.later.remove(&next) else { break };
            self.outbox.release(pdu.data.len());
            self.numbered(pdu)?;
        }
        Ok(())
    }

    /// Queues a PDU that arrived before those with lower CmdSNs.  Hosts do not reorder on a single connection (RFC
    /// 7143, section 4.2.2.1), so the queue is small.
    fn keep_for_later(&mut self, number: u32, pdu: Pdu) -> Result<(), Violation> {
        let kept: usize = self.later.values().map(|pdu| pdu.data.len()).sum();
        if kept + pdu.data.len() > LATER_BYTES_MAX {
            return Err(Violation::Early);
        }
        self.outbox.hold(pdu.data.len());
        if let Some(before) = self.later.insert(number, pdu) {
            self.outbox.release(before.data.len());
        }
        Ok(())
    }

    #[inline]
    fn numbered(&mut self, pdu: Pdu) -> Result<(), Violation> {
        self.outbox.window().take();
        self.outbox.taken();
        self.deliver(pdu, true)
    }

    #[inline]
    fn deliver(&mut self, pdu: Pdu, numbered: bool) -> Result<(), Violation> {
        if pdu.bhs.opcode() == request::SCSI_COMMAND {
            return self.scsi(pdu, numbered);
        }
        // These requests get an immediate response, or have no place in the window.
        if numbered {
            self.outbox.settled();
        }
        if pdu.damaged {
            self.outbox.reject(RejectReason::DataDigest, &pdu.bhs);
            return Ok(());
        }
        match pdu.bhs.opcode() {
            request::TASK_MANAGEMENT => self.task_management(pdu.bhs.view::<TaskRequest>()),
            request::TEXT => self.text_request(&pdu),
            request::LOGOUT => self.logout(pdu.bhs.view::<Request>()),
            _ => self.nop_out(&pdu),
        }
        Ok(())
    }

    // ---- SCSI commands ----

    #[inline]
    fn scsi(&mut self, pdu: Pdu, numbered: bool) -> Result<(), Violation> {
        let header = pdu.bhs.view::<ScsiCommand>();
        let itt = header.itt.get();
        if self.discovery || itt == TAG_NONE {
            self.refuse(RejectReason::Protocol, &pdu.bhs, numbered);
            return Ok(());
        }
        let kept = self.work.len() + self.waiting.len() + self.transfers.len();
        if !numbered && kept >= self.options.commands_max as usize + EXTRA_MAX / 2 {
            self.refuse(RejectReason::ImmediateCommands, &pdu.bhs, numbered);
            return Ok(());
        }
        let expected = header.edtl.get();
        let writes = header.flags & command_flag::WRITE != 0;
        let command = match header.ahs_len {
            0 => cdb::parse(&header.cdb),
            // Extended CDBs and bidirectional commands are not supported.
            _ => Err(Sense::illegal(code::INVALID_OPCODE)),
        };
        let takes = match &command {
            Ok(command) => match command.transfer(BLOCK) {
                Transfer::Out(bytes) => Some(bytes),
                _ => None,
            },
            Err(_) => None,
        };
        let info = Command {
            lun_bytes: header.lun,
            kind: kind(&command),
            expected,
            takes,
            reads: header.flags & command_flag::READ != 0,
            began: self.now,
            r2ts: 0,
        };
        let mut ready = ReadyCommand { lun: Lun::parse(&header.lun), command, data: pdu.data, verdict: None };
        if pdu.damaged {
            self.outbox.reject(RejectReason::DataDigest, &pdu.bhs);
            ready.verdict = Some(Sense::new(key::ABORTED_COMMAND, code::CRC).into());
            ready.data = BufList::new();
        }
        let ordered = header.flags & command_flag::ATTRIBUTE == command_flag::ORDERED;
        if !writes && ready.data.is_empty() {
            let nothing = expected == 0 && may_be_cut(&ready.command, 0);
            if takes.is_some_and(|takes| takes > 0) && !nothing && ready.verdict.is_none() {
                // The command requires data-out, and the initiator offers none.
                ready.verdict = Some(Sense::illegal(code::INFORMATION_UNIT).into());
            }
            let waiting = Waiting { itt, ready, command: info, numbered, ordered, held: 0 };
            self.admit(waiting);
            return Ok(());
        }
        self.writing(&pdu.bhs, ready, info, (numbered, ordered))
    }

    fn refuse(&mut self, reason: RejectReason, bhs: &Bhs, numbered: bool) {
        if numbered {
            self.outbox.settled();
        }
        self.outbox.reject(reason, bhs);
    }

    /// Handles a command with data-out, immediate or to follow.
    fn writing(
        &mut self,
        bhs: &Bhs,
        mut ready: ReadyCommand,
        info: Command,
        (numbered, ordered): (bool, bool),
    ) -> Result<(), Violation> {
        let itt = bhs.itt.get();
        let here = ready.data.len();
        let params = *self.outbox.params();
        if here > info.expected as usize || self.transfers.contains_key(&itt) {
            let reason =
                if here > info.expected as usize { RejectReason::Protocol } else { RejectReason::TaskInProgress };
            self.refuse(reason, bhs, numbered);
            return Ok(());
        }
        if (here > 0 && !params.immediate_data) || here > params.first_burst as usize {
            let verdict = Sense::new(key::ABORTED_COMMAND, code::UNEXPECTED_DATA);
            ready.verdict = ready.verdict.or(Some(verdict.into()));
        }
        let takes = info.takes.unwrap_or(0);
        if takes > u64::from(TRANSFER_BLOCKS_MAX * BLOCK) && ready.verdict.is_none() {
            // More data than any command may transfer: refused before memory is allocated.
            ready.verdict = Some(Sense::cdb(0).into());
        }
        let unasked = !bhs.is_final();
        if (here > 0 || unasked) && self.outbox.is_starved() {
            ready.verdict = ready.verdict.or(Some(Failure::BUSY));
        }
        let exact = matches!(ready.command, Ok(cdb::Command::CompareAndWrite(_) | cdb::Command::WriteSame { .. }));
        if exact && takes != info.expected.into() && ready.verdict.is_none() {
            // Any other length mismatch may be an error of the initiator.
            ready.verdict = Some(
                Sense::cdb(if matches!(ready.command, Ok(cdb::Command::CompareAndWrite(_))) { 13 } else { 10 }).into(),
            );
        }
        if takes > info.expected.into() && !may_be_cut(&ready.command, info.expected) && ready.verdict.is_none() {
            // The command requires more data than the initiator is going to send.
            ready.verdict = Some(Sense::illegal(code::INFORMATION_UNIT).into());
        }
        if unasked && params.initial_r2t && ready.verdict.is_none() {
            ready.verdict = Some(Sense::new(key::ABORTED_COMMAND, code::UNEXPECTED_DATA).into());
        }
        let want = takes.min(info.expected.into()) as usize;
        if here > want {
            ready.data = ready.data.slice(0..want);
        }
        // A command that fails anyway needs no data.
        let hopeless = ready.verdict.is_some() || ready.command.is_err();
        let mut transfer = DataOutTransfer::new(ready, info, (numbered, ordered), (unasked, params.first_burst));
        if hopeless {
            transfer.give_up();
        } else {
            transfer.held = here;
            self.outbox.hold(here);
        }
        if transfer.is_whole() {
            self.gathered(itt, transfer);
        } else {
            let hungry = transfer.is_hungry();
            self.transfers.insert(itt, transfer);
            if hungry {
                self.hungry.push_back(itt);
                self.feed();
            }
        }
        Ok(())
    }

    /// Sends R2Ts for waiting transfers, as far as memory allows.
    fn feed(&mut self) {
        while let Some(&itt) = self.hungry.front() {
            let Some(transfer) = self.transfers.get_mut(&itt) else {
                self.hungry.pop_front();
                continue;
            };
            let more = transfer.want().saturating_sub(transfer.held);
            if !self.outbox.try_hold(more, transfer.held, self.options.bytes_max) {
                return;
            }
            transfer.held += more;
            transfer.heard = self.now;
            transfer.ask(itt, &mut self.outbox);
            self.hungry.pop_front();
        }
    }

    fn data_out(&mut self, pdu: Pdu) -> Result<(), Violation> {
        let itt = pdu.bhs.itt.get();
        // Data of an aborted task may still arrive.
        let Some(transfer) = self.transfers.get_mut(&itt) else { return Ok(()) };
        if pdu.damaged {
            self.outbox.reject(RejectReason::DataDigest, &pdu.bhs);
            transfer.ready.verdict = Some(Sense::new(key::ABORTED_COMMAND, code::CRC).into());
        }
        transfer.heard = self.now;
        if let Err(disorder) = transfer.take(pdu.bhs.view::<DataOut>(), pdu.data) {
            // The task fails, and further data for it is dropped (RFC 7143, section 7.9).
            tracing::debug!(itt, %disorder, "a write is given up");
            if let Some(mut transfer) = self.take_transfer(itt) {
                transfer.ready.verdict = Some(Sense::new(key::ABORTED_COMMAND, code::DATA_PHASE).into());
                transfer.ready.data = BufList::new();
                self.gathered(itt, transfer);
            }
            return Ok(());
        }
        if pdu.bhs.view::<DataOut>().ttt.get() == TAG_NONE && self.outbox.is_starved() {
            transfer.ready.verdict = transfer.ready.verdict.or(Some(Failure::BUSY));
            transfer.give_up();
        }
        // Unsolicited data is accounted from here on.
        let unheld = transfer.ready.data.len().saturating_sub(transfer.held);
        transfer.held += unheld;
        self.outbox.hold(unheld);
        if transfer.is_whole() {
            if let Some(transfer) = self.take_transfer(itt) {
                self.gathered(itt, transfer);
            }
        } else if transfer.is_hungry() {
            if transfer.held >= transfer.want() {
                transfer.ask(itt, &mut self.outbox);
            } else {
                self.hungry.push_back(itt);
                self.feed();
            }
        }
        Ok(())
    }

    /// Removes a command from the transfers, and from those that wait for memory.
    pub(super) fn take_transfer(&mut self, itt: u32) -> Option<DataOutTransfer> {
        let transfer = self.transfers.remove(&itt)?;
        self.hungry.retain(|&other| other != itt);
        Some(transfer)
    }

    fn gathered(&mut self, itt: u32, transfer: DataOutTransfer) {
        let DataOutTransfer { ready, command, numbered, ordered, held, .. } = transfer;
        self.admit(Waiting { itt, ready, command, numbered, ordered, held });
    }

    /// Begins a command, or queues it behind waiting ones.
    #[inline]
    fn admit(&mut self, waiting: Waiting) {
        if self.waiting.is_empty() {
            self.begin_or_wait(waiting);
        } else {
            self.waiting.push_back(waiting);
        }
    }

    /// Begins waiting commands, as far as permitted.
    pub(super) fn begin_waiting(&mut self) {
        if !self.hungry.is_empty() {
            self.feed();
        }
        while let Some(waiting) = self.waiting.pop_front() {
            if !self.begin_or_wait(waiting) {
                return;
            }
        }
    }

    /// Begins a command. If it may not begin yet, returns false and queues it first.
    #[inline]
    fn begin_or_wait(&mut self, mut waiting: Waiting) -> bool {
        let may = self.may_begin(&mut waiting);
        match may {
            true => self.begin(waiting),
            false => self.waiting.push_front(waiting),
        }
        may
    }

    /// Returns the bytes of memory that a command holds once it has begun.
    #[inline]
    fn needs(waiting: &Waiting) -> usize {
        match &waiting.ready.command {
            // A read above the maximum transfer length is refused.
            Ok(cdb::Command::Read(run)) if run.blocks <= TRANSFER_BLOCKS_MAX => {
                ((run.blocks * BLOCK) as usize).max(waiting.held)
            }
            _ => waiting.held,
        }
    }

    #[inline]
    fn may_begin(&mut self, waiting: &mut Waiting) -> bool {
        // An ordered command waits for all earlier ones, and later ones wait for it.
        let in_order = self.outbox.ordered == 0 && (!waiting.ordered || self.work.is_empty());
        let room = self.work.len() < self.options.commands_max as usize + EXTRA_MAX;
        if !in_order || !room {
            return false;
        }
        let more = Self::needs(waiting) - waiting.held;
        if more > 0 && !self.outbox.try_hold(more, waiting.held, self.options.bytes_max) {
            return false;
        }
        waiting.held += more;
        true
    }

    #[inline]
    fn begin(&mut self, waiting: Waiting) {
        let Waiting { itt, ready, command, numbered, ordered, held } = waiting;
        self.units.note_changed_luns();
        let (unit, begun) = match self.is_draining() {
            // BUSY makes the host retry with the server that is active then.
            true => (None, Execution::Done(Err(Failure::BUSY))),
            false => self.units.begin(ready),
        };
        let role = Role::Command(command);
        let mut pending =
            Pending { itt, unit, role, numbered, aborted: false, ordered, control: false, held, drains: Vec::new() };
        self.outbox.ordered += u32::from(ordered);
        let work = match begun {
            Execution::Done(outcome) => return self.outbox.answer(self.now, outcome, pending),
            Execution::InFlight(work) => work,
            Execution::Control(work) => {
                pending.control = true;
                work
            }
        };
        if let Some((outcome, pending)) = self.work.start(work, pending) {
            let now = forebay_reactor::now();
            self.outbox.answer(now, outcome, pending);
        }
    }

    // ---- Other requests ----

    fn nop_out(&mut self, pdu: &Pdu) {
        let header = pdu.bhs.view::<Request>();
        if header.itt.get() == TAG_NONE {
            // Response to a NOP-In of this target; its arrival is all that matters.
            return;
        }
        let room = (self.outbox.params().send_max as usize).min(pdu.data.len());
        let data = pdu.data.slice(0..room).to_vec();
        self.outbox.response(response::NOP_IN, 0, header.itt.get(), TAG_NONE, &data);
    }

    fn logout(&mut self, header: &Request) {
        let reason = header.flags & 0x7f;
        let cid = (header.ttt.get() >> 16) as u16;
        let code = match reason {
            0 => return self.log_out(header.itt.get()),
            1 if cid == self.cid => return self.log_out(header.itt.get()),
            // There is no other connection.
            1 => logout_response::NO_CONNECTION,
            _ => logout_response::NO_RECOVERY,
        };
        self.outbox.response(response::LOGOUT, code, header.itt.get(), 0, &[]);
    }

    fn text_request(&mut self, pdu: &Pdu) {
        let header = pdu.bhs.view::<Request>();
        let (itt, ttt) = (header.itt.get(), header.ttt.get());
        if header.flags & CONTINUE != 0 {
            // Requests fit in one PDU.
            return self.outbox.reject(RejectReason::LongOperation, &pdu.bhs);
        }
        if ttt != TAG_NONE {
            match self.text.take() {
                Some((tag, answer)) if tag == ttt => return self.send_text(itt, answer),
                _ => return self.outbox.reject(RejectReason::InvalidField, &pdu.bhs),
            }
        }
        let data = pdu.data.to_vec();
        let Ok(pairs) = text::parse(&data) else {
            return self.outbox.reject(RejectReason::Protocol, &pdu.bhs);
        };
        let mut answer = TextAnswer::default();
        for pair in pairs {
            let out = &mut answer.text;
            if out.len() > TEXT_MAX {
                break;
            }
            match pair.key {
                "SendTargets" if pair.value == "All" && self.discovery => {
                    answer.discovering = Some(Discovering::default());
                }
                "SendTargets" => self.send_targets(pair.value, out),
                _ if renegotiate(self.outbox.params(), pair, out) => {}
                _ => text::push(out, pair.key, "NotUnderstood"),
            }
        }
        answer.text.truncate(TEXT_MAX);
        self.send_text(itt, answer);
    }

    /// Sends as much text as one PDU may carry, and keeps the rest.
    fn send_text(&mut self, itt: u32, mut answer: TextAnswer) {
        let room = self.outbox.params().send_max as usize;
        // Targets are encoded as the host requests them, so that a long list takes no memory.
        while let Some(discovering) = answer.discovering.as_mut().filter(|_| answer.text.len() <= room) {
            match self.units.targets().next_visible(discovering.after.as_deref(), self.units.initiator()) {
                Some(target) => {
                    self.list_target(&target, &mut answer.text);
                    discovering.after = Some(target.name().to_owned());
                }
                None => answer.discovering = None,
            }
        }
        if answer.text.len() <= room {
            return self.outbox.text(itt, TAG_NONE, false, &answer.text);
        }
        let later = answer.text.split_off(room);
        let tag = self.tag();
        self.outbox.text(itt, tag, true, &answer.text);
        self.text = Some((tag, TextAnswer { text: later, ..answer }));
    }

    fn send_targets(&mut self, which: &str, out: &mut Vec<u8>) {
        let target = match (which, self.units.target()) {
            // `All` is permitted in discovery sessions only.
            ("All", _) => return text::push(out, "SendTargets", "Reject"),
            (name, _) if name.len() > NAME_MAX => None,
            // A normal session learns of its own target only (RFC 7143, appendix C).
            ("", own) => own.cloned(),
            (name, Some(own)) => Some(own).filter(|own| name.eq_ignore_ascii_case(own.name())).cloned(),
            (name, None) => {
                let named = self.units.targets().get(name);
                named.filter(|target| target.admits(self.units.initiator()))
            }
        };
        if let Some(target) = target {
            self.list_target(&target, out);
        }
    }

    fn list_target(&self, target: &Target, out: &mut Vec<u8>) {
        text::push(out, "TargetName", target.name());
        for portal in self.units.targets().portals() {
            // An unspecified listen address is omitted: hosts know the address that they connected to.
            if let Addr::Tcp(addr) = portal
                && !addr.ip().is_unspecified()
            {
                text::push(out, "TargetAddress", &format!("{addr},{PORTAL_GROUP}"));
            }
        }
    }
}

/// Returns true if a write may be truncated: the initiator sends whole blocks, but fewer than the CDB says. These are
/// written, and the residual count reports the others (FCP-4 specifies this; iSCSI does not).  A partial block cannot
/// be written; then nothing is transferred.
fn may_be_cut(command: &Result<cdb::Command, Sense>, expected: u32) -> bool {
    expected.is_multiple_of(BLOCK) && matches!(command, Ok(cdb::Command::Write(_) | cdb::Command::WriteVerify { .. }))
}

fn kind(command: &Result<cdb::Command, Sense>) -> CommandKind {
    match command {
        Ok(cdb::Command::Read(_)) => CommandKind::Read,
        Ok(cdb::Command::Write(_) | cdb::Command::WriteVerify { .. } | cdb::Command::OrWrite(_)) => CommandKind::Write,
        Ok(cdb::Command::WriteSame { .. } | cdb::Command::Unmap { .. }) => CommandKind::Unmap,
        Ok(cdb::Command::CompareAndWrite(_)) => CommandKind::CompareAndWrite,
        Ok(cdb::Command::SyncCache(_)) => CommandKind::Sync,
        Ok(cdb::Command::ExtendedCopy { .. }) => CommandKind::Copy,
        _ => CommandKind::Other,
    }
}
