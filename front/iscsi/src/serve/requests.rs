//! Handling of request PDUs.

use super::connection::{IscsiConnection, IscsiViolation};
use crate::session::receive::IscsiPdu;
use crate::session::window::CmdSnPosition;
use crate::wire::{RejectReason, Request, TAG_NONE, TaskRequest, logout_response, request, response};

impl IscsiConnection<'_> {
    /// Handles a received PDU.
    pub(super) fn handle(&mut self, pdu: IscsiPdu) -> Result<(), IscsiViolation> {
        let opcode = pdu.bhs.opcode();
        match opcode {
            request::DATA_OUT => return self.data_out(pdu),
            request::SCSI_COMMAND | request::TASK_MANAGEMENT | request::TEXT | request::LOGOUT | request::NOP_OUT => {}
            request::LOGIN => {
                self.outbox.reject(RejectReason::Protocol, &pdu.bhs);
                return Err(IscsiViolation::Login);
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
        match self.outbox.window().position(number) {
            CmdSnPosition::Ignored => return Ok(()),
            CmdSnPosition::Early => return self.keep_early(number, pdu),
            CmdSnPosition::Next => {}
        }
        self.numbered(pdu)?;
        while let Some(pdu) = self.early.take(self.outbox.window().expected()) {
            self.outbox.release(pdu.data.len());
            self.numbered(pdu)?;
        }
        Ok(())
    }

    /// Keeps a PDU that arrived before those with lower CmdSNs.
    fn keep_early(&mut self, number: u32, pdu: IscsiPdu) -> Result<(), IscsiViolation> {
        let bytes = pdu.data.len();
        let before = self.early.keep(number, pdu)?;
        self.outbox.hold(bytes);
        if let Some(before) = before {
            self.outbox.release(before.data.len());
        }
        Ok(())
    }

    #[inline]
    fn numbered(&mut self, pdu: IscsiPdu) -> Result<(), IscsiViolation> {
        self.outbox.window().take();
        self.outbox.taken();
        self.deliver(pdu, true)
    }

    #[inline]
    fn deliver(&mut self, pdu: IscsiPdu, numbered: bool) -> Result<(), IscsiViolation> {
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

    fn nop_out(&mut self, pdu: &IscsiPdu) {
        let header = pdu.bhs.view::<Request>();
        if header.itt.get() == TAG_NONE {
            // Response to a NOP-In of this target; its arrival is all that matters.
            return;
        }
        let space = (self.outbox.params().send_max as usize).min(pdu.data.len());
        let data = pdu.data.slice(0..space).to_vec();
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
}
