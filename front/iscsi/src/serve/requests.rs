//! What PDUs ask for.

use forebay_block::BufList;

use super::connection::{Connection, EXTRA_MAX, End, Violation};
use super::gather::Gather;
use super::local::Failure;
use super::outbox::{Command, Pending, Role};
use super::units::{Begun, Ready};
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
use crate::wire::{
    Bhs, CONTINUE, DataOut, Lun, NAME_MAX, RejectReason, Request, ScsiCommand, TAG_NONE, TaskRequest, command_flag,
    request, response,
};
use forebay_reactor::Addr;

/// Bytes of an answer to a text; more is left out.
const TEXT_MAX: usize = 128 << 10;
/// Bytes of data of PDUs that came before others that come before them.
const LATER_BYTES_MAX: usize = 1 << 20;

/// A command that waits for memory, or for others to end.
pub(super) struct Waiting {
    pub(super) itt: u32,
    pub(super) ready: Ready,
    pub(super) command: Command,
    pub(super) numbered: bool,
    pub(super) ordered: bool,
    /// Bytes that it holds already.
    pub(super) held: usize,
}

impl Connection<'_> {
    /// Takes a PDU.
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
        // All of these have their number in the same place.
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

    /// A PDU that came before others that come before it.  Over one connection that is nothing that a host does (section
    /// 4.2.2.1 of the RFC), so there is little room for it.
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
        // The others are answered at once, or have no place in the window.
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
        let kept = self.work.len() + self.waiting.len() + self.gathers.len();
        if !numbered && kept >= self.options.commands_max as usize + EXTRA_MAX / 2 {
            self.refuse(RejectReason::ImmediateCommands, &pdu.bhs, numbered);
            return Ok(());
        }
        let expected = header.edtl.get();
        let writes = header.flags & command_flag::WRITE != 0;
        let command = match header.ahs_len {
            0 => cdb::parse(&header.cdb),
            // A longer command, or one that moves data both ways.
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
        let mut ready = Ready { lun: Lun::parse(&header.lun), command, data: pdu.data, verdict: None };
        if pdu.damaged {
            self.outbox.reject(RejectReason::DataDigest, &pdu.bhs);
            ready.verdict = Some(Sense::new(key::ABORTED_COMMAND, code::CRC).into());
            ready.data = BufList::new();
        }
        let ordered = header.flags & command_flag::ATTRIBUTE == command_flag::ORDERED;
        if !writes && ready.data.is_empty() {
            let nothing = expected == 0 && may_be_cut(&ready.command, 0);
            if takes.is_some_and(|takes| takes > 0) && !nothing && ready.verdict.is_none() {
                // It wants data, and none is offered.
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

    /// A command that comes with data, or whose data follows.
    fn writing(
        &mut self,
        bhs: &Bhs,
        mut ready: Ready,
        info: Command,
        (numbered, ordered): (bool, bool),
    ) -> Result<(), Violation> {
        let itt = bhs.itt.get();
        let here = ready.data.len();
        let params = *self.outbox.params();
        if here > info.expected as usize || self.gathers.contains_key(&itt) {
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
            // More than any command may bring: it is refused before anything is set aside for it.
            ready.verdict = Some(Sense::cdb(0).into());
        }
        let unasked = !bhs.is_final();
        if (here > 0 || unasked) && self.outbox.is_starved() {
            ready.verdict = ready.verdict.or(Some(Failure::BUSY));
        }
        let exact = matches!(ready.command, Ok(cdb::Command::CompareAndWrite(_) | cdb::Command::WriteSame { .. }));
        if exact && takes != info.expected.into() && ready.verdict.is_none() {
            // Less or more than that cannot be told apart from a mistake.
            ready.verdict = Some(
                Sense::cdb(if matches!(ready.command, Ok(cdb::Command::CompareAndWrite(_))) { 13 } else { 10 }).into(),
            );
        }
        if takes > info.expected.into() && !may_be_cut(&ready.command, info.expected) && ready.verdict.is_none() {
            // The command says that more comes than the initiator is going to send.
            ready.verdict = Some(Sense::illegal(code::INFORMATION_UNIT).into());
        }
        if unasked && params.initial_r2t && ready.verdict.is_none() {
            ready.verdict = Some(Sense::new(key::ABORTED_COMMAND, code::UNEXPECTED_DATA).into());
        }
        let want = takes.min(info.expected.into()) as usize;
        if here > want {
            ready.data = ready.data.slice(0..want);
        }
        // What fails anyway needs no data, and neither does what is not a command.
        let hopeless = ready.verdict.is_some() || ready.command.is_err();
        let mut gather = Gather::new(ready, info, (numbered, ordered), (unasked, params.first_burst));
        if hopeless {
            gather.give_up();
        } else {
            gather.held = here;
            self.outbox.hold(here);
        }
        if gather.is_whole() {
            self.gathered(itt, gather);
        } else {
            let hungry = gather.is_hungry();
            self.gathers.insert(itt, gather);
            if hungry {
                self.hungry.push_back(itt);
                self.feed();
            }
        }
        Ok(())
    }

    /// Asks for data, as far as there is memory for it.
    fn feed(&mut self) {
        while let Some(&itt) = self.hungry.front() {
            let Some(gather) = self.gathers.get_mut(&itt) else {
                self.hungry.pop_front();
                continue;
            };
            let more = gather.want().saturating_sub(gather.held);
            if !self.outbox.try_hold(more, gather.held, self.options.bytes_max) {
                return;
            }
            gather.held += more;
            gather.heard = self.now;
            gather.ask(itt, &mut self.outbox);
            self.hungry.pop_front();
        }
    }

    fn data_out(&mut self, pdu: Pdu) -> Result<(), Violation> {
        let itt = pdu.bhs.itt.get();
        // Of a task that was given up: its data may have been on its way.
        let Some(gather) = self.gathers.get_mut(&itt) else { return Ok(()) };
        if pdu.damaged {
            self.outbox.reject(RejectReason::DataDigest, &pdu.bhs);
            gather.ready.verdict = Some(Sense::new(key::ABORTED_COMMAND, code::CRC).into());
        }
        gather.heard = self.now;
        if let Err(disorder) = gather.take(pdu.bhs.view::<DataOut>(), pdu.data) {
            // The task fails, and what still comes for it is dropped (section 7.9 of the RFC).
            tracing::debug!(itt, %disorder, "a write is given up");
            if let Some(mut gather) = self.take_gather(itt) {
                gather.ready.verdict = Some(Sense::new(key::ABORTED_COMMAND, code::DATA_PHASE).into());
                gather.ready.data = BufList::new();
                self.gathered(itt, gather);
            }
            return Ok(());
        }
        if pdu.bhs.view::<DataOut>().ttt.get() == TAG_NONE && self.outbox.is_starved() {
            gather.ready.verdict = gather.ready.verdict.or(Some(Failure::BUSY));
            gather.give_up();
        }
        // What came unasked is held from here on.
        let unheld = gather.ready.data.len().saturating_sub(gather.held);
        gather.held += unheld;
        self.outbox.hold(unheld);
        if gather.is_whole() {
            if let Some(gather) = self.take_gather(itt) {
                self.gathered(itt, gather);
            }
        } else if gather.is_hungry() {
            if gather.held >= gather.want() {
                gather.ask(itt, &mut self.outbox);
            } else {
                self.hungry.push_back(itt);
                self.feed();
            }
        }
        Ok(())
    }

    /// Takes a command off those whose data is on its way, and off those that wait for memory.
    pub(super) fn take_gather(&mut self, itt: u32) -> Option<Gather> {
        let gather = self.gathers.remove(&itt)?;
        self.hungry.retain(|&other| other != itt);
        Some(gather)
    }

    fn gathered(&mut self, itt: u32, gather: Gather) {
        let Gather { ready, command, numbered, ordered, held, .. } = gather;
        self.admit(Waiting { itt, ready, command, numbered, ordered, held });
    }

    /// Begins a command, or has it wait for others.
    #[inline]
    fn admit(&mut self, waiting: Waiting) {
        if self.waiting.is_empty() {
            self.begin_or_wait(waiting);
        } else {
            self.waiting.push_back(waiting);
        }
    }

    /// Begins what waits, as far as it may.
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

    /// Begins a command; false, and it waits before all others, if it may not begin yet.
    #[inline]
    fn begin_or_wait(&mut self, mut waiting: Waiting) -> bool {
        let may = self.may_begin(&mut waiting);
        match may {
            true => self.begin(waiting),
            false => self.waiting.push_front(waiting),
        }
        may
    }

    /// Bytes that a command holds once it has begun.
    #[inline]
    fn needs(waiting: &Waiting) -> usize {
        match &waiting.ready.command {
            // What is longer than a read may be is refused.
            Ok(cdb::Command::Read(run)) if run.blocks <= TRANSFER_BLOCKS_MAX => {
                ((run.blocks * BLOCK) as usize).max(waiting.held)
            }
            _ => waiting.held,
        }
    }

    #[inline]
    fn may_begin(&mut self, waiting: &mut Waiting) -> bool {
        // One that has to come after all others waits for them, and they for it.
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
        self.units.look();
        let (local, begun) = match self.is_draining() {
            // The host tries again, and finds whoever serves then.
            true => (None, Begun::Now(Err(Failure::BUSY))),
            false => self.units.begin(ready),
        };
        let role = Role::Command(command);
        let mut pending =
            Pending { itt, local, role, numbered, aborted: false, ordered, control: false, held, drains: Vec::new() };
        self.outbox.ordered += u32::from(ordered);
        let work = match begun {
            Begun::Now(outcome) => return self.outbox.answer(self.now, outcome, pending),
            Begun::Later(work) => work,
            Begun::Control(work) => {
                pending.control = true;
                work
            }
        };
        if let Some((outcome, pending)) = self.work.start(work, pending) {
            let now = forebay_reactor::now();
            self.outbox.answer(now, outcome, pending);
        }
    }

    // ---- The rest ----

    fn nop_out(&mut self, pdu: &Pdu) {
        let header = pdu.bhs.view::<Request>();
        if header.itt.get() == TAG_NONE {
            // The answer to a question of ours; that it came is all that matters.
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
            0 => 0,
            1 if cid == self.cid => 0,
            // There is no other connection.
            1 => 1,
            // Recovery of a connection is not offered.
            _ => 2,
        };
        if code == 0 {
            self.give_up_all();
        }
        self.outbox.response(response::LOGOUT, code, header.itt.get(), 0, &[]);
        if code == 0 {
            self.stop_receiving(End::LoggedOut);
        }
    }

    fn text_request(&mut self, pdu: &Pdu) {
        let header = pdu.bhs.view::<Request>();
        let (itt, ttt) = (header.itt.get(), header.ttt.get());
        if header.flags & CONTINUE != 0 {
            // Nothing that is asked here needs more than a PDU.
            return self.outbox.reject(RejectReason::LongOperation, &pdu.bhs);
        }
        if ttt != TAG_NONE {
            match self.text.take() {
                Some((tag, rest)) if tag == ttt => return self.send_text(itt, rest),
                _ => return self.outbox.reject(RejectReason::InvalidField, &pdu.bhs),
            }
        }
        let data = pdu.data.to_vec();
        let Ok(pairs) = text::parse(&data) else {
            return self.outbox.reject(RejectReason::Protocol, &pdu.bhs);
        };
        let mut out = Vec::new();
        for pair in pairs {
            if out.len() > TEXT_MAX {
                break;
            }
            match pair.key {
                "SendTargets" => self.send_targets(pair.value, &mut out),
                _ if renegotiate(self.outbox.params(), pair, &mut out) => {}
                _ => text::push(&mut out, pair.key, "NotUnderstood"),
            }
        }
        out.truncate(TEXT_MAX);
        self.send_text(itt, out);
    }

    /// Sends as much as the initiator takes at once, and keeps the rest.
    fn send_text(&mut self, itt: u32, mut rest: Vec<u8>) {
        let room = self.outbox.params().send_max as usize;
        if rest.len() <= room {
            return self.outbox.text(itt, TAG_NONE, false, &rest);
        }
        let later = rest.split_off(room);
        let tag = self.tag();
        self.outbox.text(itt, tag, true, &rest);
        self.text = Some((tag, later));
    }

    fn send_targets(&mut self, which: &str, out: &mut Vec<u8>) {
        let site = self.units.site();
        let target = site.target();
        let mine = match which {
            // All there are may only be asked for by those who are not logged in to one.
            "All" if !self.discovery => return text::push(out, "SendTargets", "Reject"),
            "All" => true,
            "" => !self.discovery,
            name => name.len() <= NAME_MAX && name.eq_ignore_ascii_case(target),
        };
        if !mine {
            return;
        }
        text::push(out, "TargetName", target);
        for portal in site.portals() {
            // Where hosts reach a socket that listens everywhere is for them to know: they have reached it.
            if let Addr::Tcp(addr) = portal
                && !addr.ip().is_unspecified()
            {
                text::push(out, "TargetAddress", &format!("{addr},{PORTAL_GROUP}"));
            }
        }
    }
}

/// Where the initiator sends whole blocks, and fewer than a write says, these are written and the residual tells of the
/// others (FCP-4 has the words that iSCSI lacks).  A part of a block cannot be written, and nothing is transferred then.
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
