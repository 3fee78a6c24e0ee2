//! SCSI commands and their data, from the PDU to their start.

use forebay_block::BufList;

use super::connection::{IscsiConnection, IscsiViolation};
use super::data_out::DataOutTransfer;
use super::task::{CommandInfo, IscsiTask, PendingScsiCommand};
use crate::scsi::cdb;
use crate::scsi::sense::{Sense, code, key};
use crate::scsi::{ReadyScsiCommand, ScsiFailure, ScsiTask};
use crate::session::receive::IscsiPdu;
use crate::stats::ScsiCommandKind;
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
        if !numbered && self.is_full_for_immediate() {
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
        let kind = ScsiCommandKind::of(&command);
        let mut ready = ReadyScsiCommand { lun: Lun::parse(&header.lun), command, data: pdu.data, verdict: None };
        let takes = ready.takes();
        let info = CommandInfo {
            lun_bytes: header.lun,
            kind,
            expected,
            takes,
            reads: header.flags & command_flag::READ != 0,
            began: self.now,
            r2ts: 0,
        };
        if pdu.damaged {
            self.outbox.reject(RejectReason::DataDigest, &pdu.bhs);
            ready.verdict = Some(Sense::new(key::ABORTED_COMMAND, code::CRC).into());
            ready.data = BufList::new();
        }
        let ordered = header.flags & command_flag::ATTRIBUTE == command_flag::ORDERED;
        if !writes && ready.data.is_empty() {
            let nothing = expected == 0 && ready.may_be_cut(0);
            if takes.is_some_and(|takes| takes > 0) && !nothing && ready.verdict.is_none() {
                // The command requires data-out, and the initiator offers none.
                ready.verdict = Some(Sense::illegal(code::INFORMATION_UNIT).into());
            }
            self.submit(ready, PendingScsiCommand { itt, info, numbered, held: 0 }, ordered);
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
        if here > info.expected as usize || self.transfers.contains(itt) {
            let reason =
                if here > info.expected as usize { RejectReason::Protocol } else { RejectReason::TaskInProgress };
            self.refuse(reason, bhs, numbered);
            return Ok(());
        }
        if (here > 0 && !params.immediate_data) || here > params.first_burst as usize {
            let verdict = Sense::new(key::ABORTED_COMMAND, code::UNEXPECTED_DATA);
            ready.verdict = ready.verdict.or(Some(verdict.into()));
        }
        ready.refuse_oversized();
        let unsolicited = !bhs.is_final();
        if (here > 0 || unsolicited) && self.outbox.is_starved() {
            ready.verdict = ready.verdict.or(Some(ScsiFailure::BUSY));
        }
        ready.refuse_mismatch(info.expected.into());
        if unsolicited && params.initial_r2t && ready.verdict.is_none() {
            ready.verdict = Some(Sense::new(key::ABORTED_COMMAND, code::UNEXPECTED_DATA).into());
        }
        let want = info.takes.unwrap_or(0).min(info.expected.into()) as usize;
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
            self.transfers.receive(itt, transfer, self.now, &mut self.outbox);
        }
        Ok(())
    }

    /// Handles data of a command.
    pub(super) fn data_out(&mut self, pdu: IscsiPdu) -> Result<(), IscsiViolation> {
        let itt = pdu.bhs.itt.get();
        // Data of an aborted task may still arrive.
        let Some(transfer) = self.transfers.get_mut(itt) else { return Ok(()) };
        if pdu.damaged {
            self.outbox.reject(RejectReason::DataDigest, &pdu.bhs);
            transfer.ready.verdict = Some(Sense::new(key::ABORTED_COMMAND, code::CRC).into());
        }
        transfer.heard = self.now;
        if let Err(error) = transfer.take(pdu.bhs.view::<DataOut>(), pdu.data) {
            // The task fails, and further data for it is dropped (RFC 7143, section 7.9).
            tracing::debug!(itt, %error, "iSCSI command aborted: data out of order");
            if let Some(mut transfer) = self.transfers.take(itt) {
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
            if let Some(transfer) = self.transfers.take(itt) {
                self.data_received(itt, transfer);
            }
        } else if transfer.needs_r2t() {
            if transfer.held >= transfer.want() {
                transfer.send_r2ts(itt, &mut self.outbox);
            } else {
                self.transfers.solicit(itt, self.now, &mut self.outbox);
            }
        }
        Ok(())
    }

    fn data_received(&mut self, itt: u32, transfer: DataOutTransfer) {
        let DataOutTransfer { ready, info, numbered, ordered, held, .. } = transfer;
        self.submit(ready, PendingScsiCommand { itt, info, numbered, held }, ordered);
    }

    /// Begins a command, or queues it behind waiting ones.
    #[inline]
    fn submit(&mut self, command: ReadyScsiCommand, pending: PendingScsiCommand, ordered: bool) {
        let task = ScsiTask { tag: pending.itt.into(), command, ordered, note: IscsiTask::Command(pending) };
        let (scsi, mut port) = self.scsi_port();
        scsi.submit(task, &mut port);
    }

    /// Begins waiting commands, as far as permitted.
    pub(super) fn begin_waiting(&mut self) {
        self.transfers.feed(self.now, &mut self.outbox);
        let (scsi, mut port) = self.scsi_port();
        scsi.begin_waiting(&mut port);
    }
}
