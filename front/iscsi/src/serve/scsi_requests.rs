//! SCSI commands and their data, from the PDU to their start.

use forebay_block::BufList;

use super::connection::{IscsiConnection, IscsiViolation};
use super::data_out::DataOutTransfer;
use super::task::{CommandInfo, PendingTask, TaskKind};
use super::task_set::QueuedCommand;
use crate::scsi::BLOCK;
use crate::scsi::cdb::{self, Transfer};
use crate::scsi::inquiry::TRANSFER_BLOCKS_MAX;
use crate::scsi::sense::{Sense, code, key};
use crate::session::receive::IscsiPdu;
use crate::stats::ScsiCommandKind;
use crate::unit::ScsiFailure;
use crate::unit::commands::{Execution, ReadyScsiCommand};
use crate::wire::{Bhs, DataOut, Lun, RejectReason, ScsiCommand, TAG_NONE, command_flag};

impl IscsiConnection<'_> {
    /// Handles a SCSI command.
    #[inline]
    pub(super) fn scsi(&mut self, pdu: IscsiPdu, numbered: bool) -> Result<(), IscsiViolation> {
        let header = pdu.bhs.view::<ScsiCommand>();
        let itt = header.itt.get();
        if self.discovery || itt == TAG_NONE {
            self.refuse(RejectReason::Protocol, &pdu.bhs, numbered);
            return Ok(());
        }
        if !numbered && self.tasks.is_full_for_immediate() {
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
        let info = CommandInfo {
            lun_bytes: header.lun,
            kind: kind(&command),
            expected,
            takes,
            reads: header.flags & command_flag::READ != 0,
            began: self.now,
            r2ts: 0,
        };
        let mut ready = ReadyScsiCommand { lun: Lun::parse(&header.lun), command, data: pdu.data, verdict: None };
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
            self.admit(QueuedCommand { itt, ready, info, numbered, ordered, held: 0 });
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
        mut ready: ReadyScsiCommand,
        info: CommandInfo,
        (numbered, ordered): (bool, bool),
    ) -> Result<(), IscsiViolation> {
        let itt = bhs.itt.get();
        let here = ready.data.len();
        let params = *self.outbox.params();
        if here > info.expected as usize || self.tasks.has_transfer(itt) {
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
        let unsolicited = !bhs.is_final();
        if (here > 0 || unsolicited) && self.outbox.is_starved() {
            ready.verdict = ready.verdict.or(Some(ScsiFailure::BUSY));
        }
        let exact =
            matches!(ready.command, Ok(cdb::ScsiCommand::CompareAndWrite(_) | cdb::ScsiCommand::WriteSame { .. }));
        if exact && takes != info.expected.into() && ready.verdict.is_none() {
            // Any other length mismatch may be an error of the initiator.
            ready.verdict = Some(
                Sense::cdb(if matches!(ready.command, Ok(cdb::ScsiCommand::CompareAndWrite(_))) { 13 } else { 10 })
                    .into(),
            );
        }
        if takes > info.expected.into() && !may_be_cut(&ready.command, info.expected) && ready.verdict.is_none() {
            // The command requires more data than the initiator is going to send.
            ready.verdict = Some(Sense::illegal(code::INFORMATION_UNIT).into());
        }
        if unsolicited && params.initial_r2t && ready.verdict.is_none() {
            ready.verdict = Some(Sense::new(key::ABORTED_COMMAND, code::UNEXPECTED_DATA).into());
        }
        let want = takes.min(info.expected.into()) as usize;
        if here > want {
            ready.data = ready.data.slice(0..want);
        }
        // A command that fails anyway needs no data.
        let hopeless = ready.verdict.is_some() || ready.command.is_err();
        let mut transfer = DataOutTransfer::new(ready, info, (numbered, ordered), (unsolicited, params.first_burst));
        if hopeless {
            transfer.stop_soliciting();
        } else {
            transfer.held = here;
            self.outbox.hold(here);
        }
        if transfer.is_complete() {
            self.data_received(itt, transfer);
        } else {
            self.tasks.receive(itt, transfer, self.now, &mut self.outbox);
        }
        Ok(())
    }

    /// Handles data of a command.
    pub(super) fn data_out(&mut self, pdu: IscsiPdu) -> Result<(), IscsiViolation> {
        let itt = pdu.bhs.itt.get();
        // Data of an aborted task may still arrive.
        let Some(transfer) = self.tasks.transfer(itt) else { return Ok(()) };
        if pdu.damaged {
            self.outbox.reject(RejectReason::DataDigest, &pdu.bhs);
            transfer.ready.verdict = Some(Sense::new(key::ABORTED_COMMAND, code::CRC).into());
        }
        transfer.heard = self.now;
        if let Err(error) = transfer.take(pdu.bhs.view::<DataOut>(), pdu.data) {
            // The task fails, and further data for it is dropped (RFC 7143, section 7.9).
            tracing::debug!(itt, %error, "iSCSI command aborted: data out of order");
            if let Some(mut transfer) = self.tasks.take_transfer(itt) {
                transfer.ready.verdict = Some(Sense::new(key::ABORTED_COMMAND, code::DATA_PHASE).into());
                transfer.ready.data = BufList::new();
                self.data_received(itt, transfer);
            }
            return Ok(());
        }
        if pdu.bhs.view::<DataOut>().ttt.get() == TAG_NONE && self.outbox.is_starved() {
            transfer.ready.verdict = transfer.ready.verdict.or(Some(ScsiFailure::BUSY));
            transfer.stop_soliciting();
        }
        // Unsolicited data is accounted from here on.
        let unheld = transfer.ready.data.len().saturating_sub(transfer.held);
        transfer.held += unheld;
        self.outbox.hold(unheld);
        if transfer.is_complete() {
            if let Some(transfer) = self.tasks.take_transfer(itt) {
                self.data_received(itt, transfer);
            }
        } else if transfer.needs_r2t() {
            if transfer.held >= transfer.want() {
                transfer.send_r2ts(itt, &mut self.outbox);
            } else {
                self.tasks.solicit(itt, self.now, &mut self.outbox);
            }
        }
        Ok(())
    }

    fn data_received(&mut self, itt: u32, transfer: DataOutTransfer) {
        let DataOutTransfer { ready, info, numbered, ordered, held, .. } = transfer;
        self.admit(QueuedCommand { itt, ready, info, numbered, ordered, held });
    }

    /// Begins a command, or queues it behind waiting ones.
    #[inline]
    fn admit(&mut self, command: QueuedCommand) {
        if let Some(command) = self.tasks.admit(command, &mut self.outbox) {
            self.begin(command);
        }
    }

    /// Begins waiting commands, as far as permitted.
    pub(super) fn begin_waiting(&mut self) {
        self.tasks.feed(self.now, &mut self.outbox);
        while let Some(command) = self.tasks.next_queued(&mut self.outbox) {
            self.begin(command);
        }
    }

    #[inline]
    fn begin(&mut self, command: QueuedCommand) {
        let QueuedCommand { itt, ready, info, numbered, ordered, held } = command;
        self.units.note_changed_luns();
        let (unit, execution) = match self.is_draining() {
            // BUSY makes the host retry with the server that is active then.
            true => (None, Execution::Done(Err(ScsiFailure::BUSY))),
            false => self.units.begin(ready),
        };
        let control = matches!(execution, Execution::Control(_));
        let (kind, guards) = (TaskKind::Command(info), Vec::new());
        let task = PendingTask { itt, unit, kind, numbered, aborted: false, ordered, control, held, guards };
        match execution {
            Execution::Done(outcome) => self.outbox.answer(self.now, outcome, task),
            Execution::InFlight(work) | Execution::Control(work) => self.start(work, task),
        }
    }
}

/// Returns true if a write may be truncated: the initiator sends whole blocks, but fewer than the CDB says. These are
/// written, and the residual count reports the others (FCP-4 specifies this; iSCSI does not).  A partial block cannot
/// be written; then nothing is transferred.
fn may_be_cut(command: &Result<cdb::ScsiCommand, Sense>, expected: u32) -> bool {
    expected.is_multiple_of(BLOCK)
        && matches!(command, Ok(cdb::ScsiCommand::Write(_) | cdb::ScsiCommand::WriteVerify { .. }))
}

fn kind(command: &Result<cdb::ScsiCommand, Sense>) -> ScsiCommandKind {
    match command {
        Ok(cdb::ScsiCommand::Read(_)) => ScsiCommandKind::Read,
        Ok(cdb::ScsiCommand::Write(_) | cdb::ScsiCommand::WriteVerify { .. } | cdb::ScsiCommand::OrWrite(_)) => {
            ScsiCommandKind::Write
        }
        Ok(cdb::ScsiCommand::WriteSame { .. } | cdb::ScsiCommand::Unmap { .. }) => ScsiCommandKind::Unmap,
        Ok(cdb::ScsiCommand::CompareAndWrite(_)) => ScsiCommandKind::CompareAndWrite,
        Ok(cdb::ScsiCommand::SyncCache(_)) => ScsiCommandKind::Sync,
        Ok(cdb::ScsiCommand::ExtendedCopy { .. }) => ScsiCommandKind::Copy,
        _ => ScsiCommandKind::Other,
    }
}
