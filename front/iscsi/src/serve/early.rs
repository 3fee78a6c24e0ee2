//! PDUs that were received before those with lower CmdSNs.

use std::collections::BTreeMap;

use super::connection::IscsiViolation;
use crate::session::receive::IscsiPdu;

/// Maximum data in bytes of PDUs received out of order.
const BYTES_MAX: usize = 1 << 20;

/// PDUs received out of order, by CmdSN, until the preceding ones arrive.  Hosts do not reorder on a single connection
/// (RFC 7143, section 4.2.2.1), so they are few: `bytes` is the sum of their data, and at most [`BYTES_MAX`].
#[derive(Default)]
pub(super) struct EarlyPdus {
    pdus: BTreeMap<u32, IscsiPdu>,
    bytes: usize,
}

impl EarlyPdus {
    /// Keeps a PDU.  Returns the one with the same number that it replaces.
    pub(super) fn keep(&mut self, number: u32, pdu: IscsiPdu) -> Result<Option<IscsiPdu>, IscsiViolation> {
        if self.bytes + pdu.data.len() > BYTES_MAX {
            return Err(IscsiViolation::Early);
        }
        self.bytes += pdu.data.len();
        let before = self.pdus.insert(number, pdu);
        self.bytes -= before.as_ref().map_or(0, |pdu| pdu.data.len());
        Ok(before)
    }

    /// Takes the PDU with this number.
    #[inline]
    pub(super) fn take(&mut self, number: u32) -> Option<IscsiPdu> {
        if self.pdus.is_empty() {
            return None;
        }
        let pdu = self.pdus.remove(&number)?;
        self.bytes -= pdu.data.len();
        debug_assert!(!self.pdus.is_empty() || self.bytes == 0);
        Some(pdu)
    }

    /// Drops all PDUs.  Returns the bytes of their data.
    pub(super) fn clear(&mut self) -> usize {
        self.pdus.clear();
        std::mem::take(&mut self.bytes)
    }
}
