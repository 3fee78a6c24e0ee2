//! Commands of a session whose data is being received.

use std::collections::{BTreeMap, VecDeque};

use forebay_reactor::Instant;

use super::data_out::DataOutTransfer;
use super::outbox::IscsiOutbox;
use crate::wire::Lun;

/// Data-out transfers of a session, by initiator task tag; those that wait for memory first in `hungry`.
///
/// Each entry of `hungry` is a tag in `transfers`.
#[derive(Default)]
pub(super) struct DataOutSet {
    transfers: BTreeMap<u32, DataOutTransfer>,
    /// Initiator task tags of transfers that wait for memory, in FIFO order.
    hungry: VecDeque<u32>,
}

impl DataOutSet {
    /// Returns the number of transfers.
    pub(super) fn len(&self) -> usize {
        self.transfers.len()
    }

    /// Returns true if a command with this tag is receiving data.
    pub(super) fn contains(&self, itt: u32) -> bool {
        self.transfers.contains_key(&itt)
    }

    /// Returns the transfer of a command that is receiving data.
    pub(super) fn get_mut(&mut self, itt: u32) -> Option<&mut DataOutTransfer> {
        self.transfers.get_mut(&itt)
    }

    /// Returns true if solicited or announced data of a command has been outstanding for so long.
    pub(super) fn is_data_late(&self, late: impl Fn(&DataOutTransfer) -> bool) -> bool {
        self.transfers.values().any(late)
    }

    /// Adds a command whose data is incomplete, and solicits the data as soon as there is memory for it.
    pub(super) fn receive(&mut self, itt: u32, transfer: DataOutTransfer, now: Instant, outbox: &mut IscsiOutbox) {
        let hungry = transfer.needs_r2t();
        let before = self.transfers.insert(itt, transfer);
        debug_assert!(before.is_none(), "two commands with tag {itt}");
        if hungry {
            self.solicit(itt, now, outbox);
        }
    }

    /// Solicits more data of a transfer, behind those that wait for memory already.
    pub(super) fn solicit(&mut self, itt: u32, now: Instant, outbox: &mut IscsiOutbox) {
        debug_assert!(self.transfers.contains_key(&itt));
        self.hungry.push_back(itt);
        self.feed(now, outbox);
    }

    /// Sends R2Ts for transfers that wait for memory, as far as there is some.
    pub(super) fn feed(&mut self, now: Instant, outbox: &mut IscsiOutbox) {
        while let Some(&itt) = self.hungry.front() {
            let Some(transfer) = self.transfers.get_mut(&itt) else {
                debug_assert!(false, "no transfer {itt}");
                self.hungry.pop_front();
                continue;
            };
            let more = transfer.want().saturating_sub(transfer.held);
            if !outbox.try_hold(more, transfer.held) {
                return;
            }
            transfer.held += more;
            transfer.heard = now;
            transfer.send_r2ts(itt, outbox);
            self.hungry.pop_front();
        }
    }

    /// Removes a command from the transfers, and from those that wait for memory.
    pub(super) fn take(&mut self, itt: u32) -> Option<DataOutTransfer> {
        let transfer = self.transfers.remove(&itt)?;
        self.hungry.retain(|&other| other != itt);
        Some(transfer)
    }

    /// Aborts a command, and returns true if there is one with this tag.
    pub(super) fn abort(&mut self, itt: u32, outbox: &mut IscsiOutbox) -> bool {
        let transfer = self.take(itt);
        if let Some(transfer) = &transfer {
            outbox.drop_command(transfer.numbered, transfer.held);
        }
        transfer.is_some()
    }

    /// Aborts the commands of one unit.
    pub(super) fn abort_unit(&mut self, lun: u16, outbox: &mut IscsiOutbox) {
        let of_unit =
            |(&itt, transfer): (&u32, &DataOutTransfer)| (transfer.ready.lun == Lun::Unit(lun)).then_some(itt);
        let tags: Vec<u32> = self.transfers.iter().filter_map(of_unit).collect();
        for itt in tags {
            self.abort(itt, outbox);
        }
    }

    /// Aborts all commands.
    pub(super) fn abort_all(&mut self, outbox: &mut IscsiOutbox) {
        self.hungry.clear();
        for (_, transfer) in std::mem::take(&mut self.transfers) {
            outbox.drop_command(transfer.numbered, transfer.held);
        }
    }
}
