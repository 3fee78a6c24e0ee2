//! Commands of an I/O queue.

use std::rc::{Rc, Weak};
use std::sync::atomic::Ordering;

use std::future::ready;

use forebay_block::{BlockRequest, Buf, BufList};

use super::OpenNamespace;
use super::connection::NvmeConnection;
use super::data::DataOwner;
use super::submit::{self, DeviceCommand, NvmeCommandData};
use crate::session::io::{self, Data, NvmeAction, NvmeCommand};
use crate::stats::NvmeCommandKind;
use crate::subsystem::{Notice, Subsystem};
use crate::wire::command::{Fuse, NSID_ALL, Sgl, nvm};
use crate::wire::log::{AnaState, ErrorEntry};
use crate::wire::{NvmeStatus, Sqe, reservation};

/// Validated command that is not submitted to the device yet.  It may wait for its host indefinitely, so that it
/// must not keep its namespace open.
pub(super) struct ReadyNvmeCommand {
    sqe: Sqe,
    command: NvmeCommand,
    namespace: Weak<OpenNamespace>,
    /// Bytes of the budget that it holds already.
    held: usize,
}

/// Context of a command in flight at the device.
pub(super) struct PendingCommand {
    sqe: Sqe,
    /// Command identifier of the second half, for a fused operation.
    second: Option<u16>,
    action: NvmeAction,
    held: usize,
    _namespace: Rc<OpenNamespace>,
}

impl PendingCommand {
    /// Creates the context of a fused operation, whose second half has the command identifier `second`.
    pub(super) fn fused(sqe: Sqe, second: u16, action: NvmeAction, held: usize, namespace: Rc<OpenNamespace>) -> Self {
        Self { sqe, second: Some(second), action, held, _namespace: namespace }
    }
}

fn kind_of(action: &NvmeAction) -> NvmeCommandKind {
    match action {
        NvmeAction::Read(_) => NvmeCommandKind::Read,
        NvmeAction::Write { .. } => NvmeCommandKind::Write,
        NvmeAction::Compare(_) => NvmeCommandKind::Compare,
        NvmeAction::WriteZeroes { .. } => NvmeCommandKind::WriteZeroes,
        NvmeAction::Flush => NvmeCommandKind::Flush,
        NvmeAction::Ranges { .. } => NvmeCommandKind::Deallocate,
        NvmeAction::Verify(_) => NvmeCommandKind::Other,
        NvmeAction::Reservation | NvmeAction::ReservationReport => NvmeCommandKind::Reservation,
    }
}

/// Returns the bytes that a command transfers between host and volume.
fn bytes_of(action: &NvmeAction) -> u64 {
    match action {
        NvmeAction::Read(extent) | NvmeAction::Write { extent, .. } => extent.len,
        _ => 0,
    }
}

/// Returns the maximum bytes of memory that a command takes, from its beginning to the end of its response.
fn memory_of(command: &NvmeCommand) -> usize {
    match (command.action, command.data) {
        // A Compare also reads the volume, and may copy that into one contiguous buffer.
        (NvmeAction::Compare(_), Data::In(len)) => 3 * len as usize,
        (NvmeAction::Verify(extent), _) => extent.len.min(submit::VERIFY_PIECE) as usize,
        (_, Data::In(len) | Data::Out(len)) => len as usize,
        (_, Data::None) => 0,
    }
}

impl NvmeConnection {
    /// Handles a command of an I/O queue, with its in-capsule data.
    pub(super) fn io_command(&mut self, sqe: Sqe, data: BufList) {
        if let Some((first, first_data)) = self.commands.take_first_half() {
            if sqe.fuse() == Fuse::Second {
                return self.fused_command((first, first_data), (sqe, data));
            }
            self.fail(&first, NvmeStatus::FUSED_MISSING.final_());
        }
        match sqe.fuse() {
            Fuse::None => {}
            Fuse::First => return self.commands.keep_first_half(sqe, data),
            Fuse::Second => return self.fail(&sqe, NvmeStatus::FUSED_MISSING.final_()),
            Fuse::Reserved => return self.fail(&sqe, NvmeStatus::INVALID_FIELD.final_()),
        }
        let (command, namespace) = match self.prepare(&sqe) {
            Ok(prepared) => prepared,
            Err(status) => return self.fail(&sqe, status),
        };
        let ready = ReadyNvmeCommand { sqe, command, namespace: Rc::downgrade(&namespace), held: 0 };
        if let Data::In(len) = command.data
            && matches!(sqe.sgl(), Sgl::InCapsule { .. })
        {
            return match io::in_capsule(sqe.sgl(), len, &data) {
                Ok(data) => {
                    // The data is in memory already, bounded by the length of the queue.
                    let held = memory_of(&command);
                    self.outbox.hold_anyway(held);
                    self.start(ReadyNvmeCommand { held, ..ready }, data);
                }
                Err(status) => self.fail_ready(&ready, status),
            };
        }
        if self.commands.has_waiting() {
            self.commands.wait(ready);
        } else if let Some(ready) = self.try_begin(ready) {
            self.commands.wait(ready);
        }
    }

    /// Returns the namespace of a command, opening it on first use.
    ///
    /// # Errors
    /// Invalid Namespace if it does not exist or the host may know another volume by this id; an ANA status if it is
    /// not accessible through this port.
    fn find(&mut self, nsid: u32) -> Result<Rc<OpenNamespace>, NvmeStatus> {
        let withdrawals = self.server.subsystems.withdrawals();
        let namespace = match self.namespaces.last(withdrawals, nsid) {
            Some(last) => last,
            None => {
                self.reachable(nsid)?;
                self.look_up(nsid, withdrawals)?
            }
        };
        self.accessible(&namespace)?;
        Ok(namespace)
    }

    fn look_up(&mut self, nsid: u32, withdrawals: u64) -> Result<Rc<OpenNamespace>, NvmeStatus> {
        if nsid == 0 || nsid == NSID_ALL {
            return Err(NvmeStatus::INVALID_NAMESPACE.final_());
        }
        let queue = self.queue.as_ref().ok_or(NvmeStatus::SEQUENCE.final_())?;
        let subsystem = &queue.association.subsystem;
        let found = self.server.namespace(subsystem, nsid).ok_or(NvmeStatus::INVALID_NAMESPACE.final_())?;
        if queue.association.is_stale(nsid) {
            return Err(NvmeStatus::INVALID_NAMESPACE.final_());
        }
        if self.namespaces.keep(withdrawals, &found) {
            queue.association.uses(nsid);
        }
        Ok(found)
    }

    /// Checks that a namespace that has an ANA state of its own is accessible now.  Its device may be gone otherwise.
    ///
    /// # Errors
    /// An ANA status.
    fn reachable(&self, nsid: u32) -> Result<(), NvmeStatus> {
        let state = self.queue.as_ref().and_then(|queue| queue.association.subsystem.namespace_state(nsid));
        state.and_then(AnaState::refuses).map_or(Ok(()), Err)
    }

    /// Checks that a namespace is accessible through this port now.
    ///
    /// # Errors
    /// An ANA status.
    fn accessible(&self, namespace: &OpenNamespace) -> Result<(), NvmeStatus> {
        namespace.subsystem.ana(&self.port, &namespace.info).refuses().map_or(Ok(()), Err)
    }

    /// Returns the namespace of a command that has waited, if it is still accessible through this port.
    ///
    /// # Errors
    /// Invalid Namespace if it was withdrawn; an ANA status if it is not accessible.
    pub(super) fn still(&self, namespace: &Weak<OpenNamespace>, nsid: u32) -> Result<Rc<OpenNamespace>, NvmeStatus> {
        let namespace = namespace.upgrade().ok_or_else(|| {
            // Where only its device was replaced, the host sends the command again.
            let subsystem = self.queue.as_ref().map(|queue| &queue.association.subsystem);
            let stays = |subsystem: &Subsystem| {
                subsystem.namespace_state(nsid).is_some() && subsystem.namespace(nsid).is_some()
            };
            match subsystem.is_some_and(stays) {
                true => NvmeStatus::ANA_TRANSITION,
                false => NvmeStatus::INVALID_NAMESPACE.final_(),
            }
        })?;
        self.accessible(&namespace)?;
        Ok(namespace)
    }

    pub(super) fn prepare(&mut self, sqe: &Sqe) -> Result<(NvmeCommand, Rc<OpenNamespace>), NvmeStatus> {
        if !sqe.uses_sgl() {
            return Err(NvmeStatus::INVALID_FIELD.final_());
        }
        let namespace = self.find(sqe.nsid())?;
        let command = io::decode(sqe, &namespace.rules())?;
        self.admit(&namespace, &command.action)?;
        Ok((command, namespace))
    }

    /// Checks an action against the reservations of the namespace.
    ///
    /// # Errors
    /// Reservation Conflict.
    pub(super) fn admit(&self, namespace: &OpenNamespace, action: &NvmeAction) -> Result<(), NvmeStatus> {
        if let Some(view) = &namespace.reservations
            && let Some(access) = action.access()
            && let Some(queue) = &self.queue
            && !view.borrow_mut().allows(queue.association.reserver.as_ref(), access)
        {
            return Err(NvmeStatus::RESERVATION_CONFLICT.final_());
        }
        Ok(())
    }

    /// Begins a command.  Returns the command if there is no buffer space for its data.
    fn try_begin(&mut self, mut ready: ReadyNvmeCommand) -> Option<ReadyNvmeCommand> {
        let len = memory_of(&ready.command);
        if len > 0 {
            let held = self.outbox.held();
            let has_space = held == 0 || held + len <= self.server.subsystems.limits().connection_bytes;
            if !has_space || !self.outbox.hold(len) {
                return Some(ready);
            }
            ready.held = len;
        }
        match ready.command.data {
            Data::In(len) => self.ask(ready.sqe.cid(), len, DataOwner::Io(ready)),
            _ => self.start(ready, BufList::new()),
        }
        None
    }

    /// Begins commands that wait for buffer space, as far as there is space now.
    pub(super) fn start_waiting(&mut self) {
        while let Some(ready) = self.commands.next_waiting() {
            if let Some(ready) = self.try_begin(ready) {
                return self.commands.wait_again(ready);
            }
        }
        self.outbox.needs_no_space();
    }

    /// Submits a command to the device, with its data from the host.
    pub(super) fn start(&mut self, ready: ReadyNvmeCommand, data: BufList) {
        let namespace = match self.still(&ready.namespace, ready.sqe.nsid()) {
            Ok(namespace) => namespace,
            Err(status) => return self.fail_ready(&ready, status),
        };
        // The data may have taken long, and another host may hold the reservation now.
        if let Err(status) = self.admit(&namespace, &ready.command.action) {
            return self.fail_ready(&ready, status);
        }
        let ReadyNvmeCommand { sqe, command, held, .. } = ready;
        let device = &namespace.device;
        let through = self.writes_through();
        let submitted = match command.action {
            NvmeAction::Read(extent) => submit::read(device, extent),
            NvmeAction::Write { extent, fua } => submit::write(device, extent, data, fua || through),
            NvmeAction::Compare(extent) => submit::compare(device, extent, data),
            NvmeAction::WriteZeroes { extent, no_unmap, fua } => {
                submit::one(device, BlockRequest::WriteZeroes { extent, no_unmap, fua: fua || through })
            }
            NvmeAction::Flush => submit::one(device, BlockRequest::Flush),
            NvmeAction::Verify(extent) => submit::verify(device, extent),
            NvmeAction::Ranges { deallocate } => {
                match io::ranges(&data.into_contiguous(), &namespace.rules()) {
                    Ok(ranges) if deallocate && !ranges.is_empty() => submit::discard(device, ranges),
                    // Access hints for the ranges have no effect here.
                    Ok(_) => DeviceCommand::Many(Box::pin(std::future::ready(Ok(NvmeCommandData::Done)))),
                    Err(status) => return self.fail_ready(&ready, status),
                }
            }
            NvmeAction::Reservation | NvmeAction::ReservationReport => match self.reservation(&sqe, &namespace, data) {
                Ok(submitted) => submitted,
                Err(status) => return self.fail_ready(&ready, status),
            },
        };
        let context = PendingCommand { sqe, second: None, action: command.action, held, _namespace: namespace };
        self.submit(submitted, context);
    }

    /// Submits a command, and finishes it if the device completes it at once.
    pub(super) fn submit(&mut self, command: DeviceCommand, context: PendingCommand) {
        if let Some((result, context)) = self.commands.submit(command, context) {
            self.finish(result, context);
        }
    }

    /// Returns whether the host has disabled the write cache, so that every write is durable when it is acknowledged.
    pub(super) fn writes_through(&self) -> bool {
        self.queue.as_ref().is_some_and(|queue| queue.association.write_through.load(Ordering::Relaxed))
    }

    /// Processes completions of the device.
    pub(super) fn poll_commands(&mut self) {
        for (result, context) in self.commands.take_completed() {
            self.finish(result, context);
        }
    }

    /// Queues the response to a command that the device has completed.
    fn finish(&mut self, result: Result<NvmeCommandData, NvmeStatus>, context: PendingCommand) {
        let PendingCommand { sqe, second, action, held, _namespace: namespace } = context;
        let cid = sqe.cid();
        let result = match result {
            Ok(NvmeCommandData::Data(data))
                if action != NvmeAction::ReservationReport && data.len() as u64 != bytes_of(&action) =>
            {
                Err(NvmeStatus::INTERNAL)
            }
            other => other,
        };
        if let Some(queue) = &self.queue {
            // Responses count as traffic: with traffic-based keep-alive (base 3.9.3) a host that receives them need not
            // send anything else to keep its controller.
            queue.association.note_traffic();
            queue.count(kind_of(&action), bytes_of(&action), result.is_err());
        }
        drop(namespace);
        match result {
            Ok(NvmeCommandData::Data(data)) => {
                // Without flow control, C2HData with the SUCCESS flag replaces the response.
                if self.submission.has_success_flag() {
                    self.submission.complete();
                    self.outbox.data_with_success(cid, data, held);
                } else {
                    self.outbox.data(cid, data);
                    self.respond(cid, NvmeStatus::SUCCESS, 0, held);
                }
            }
            Ok(NvmeCommandData::Done) => {
                self.respond(cid, NvmeStatus::SUCCESS, 0, held);
                if let Some(second) = second {
                    self.respond(second, NvmeStatus::SUCCESS, 0, 0);
                }
            }
            Err(status) => {
                self.note_error(&sqe, status);
                self.respond(cid, status, 0, held);
                if let Some(second) = second {
                    self.respond(second, NvmeStatus::FUSED_FAILED, 0, 0);
                }
            }
        }
    }

    /// Queues an error response to a command that was not submitted to the device.
    pub(super) fn fail_ready(&mut self, ready: &ReadyNvmeCommand, status: NvmeStatus) {
        self.fail_unsubmitted(&ready.sqe, &ready.command.action, status, ready.held);
    }

    /// Queues an error response to a valid command that was not submitted to the device, and that holds `held` bytes of
    /// the budget.  Records the error and counts the command.
    pub(super) fn fail_unsubmitted(&mut self, sqe: &Sqe, action: &NvmeAction, status: NvmeStatus, held: usize) {
        self.note_error(sqe, status);
        if let Some(queue) = &self.queue {
            queue.count(kind_of(action), 0, true);
        }
        self.respond(sqe.cid(), status, 0, held);
    }

    /// Records an error for the Error Information log page, except for statuses of normal operation.
    pub(super) fn note_error(&mut self, sqe: &Sqe, status: NvmeStatus) {
        let usual = [NvmeStatus::COMPARE_FAILED, NvmeStatus::RESERVATION_CONFLICT, NvmeStatus::FUSED_FAILED];
        let Some(queue) = &self.queue else { return };
        if usual.iter().any(|usual| usual.code() == status.code()) || status.code() >> 8 == 3 {
            return;
        }
        let (slba, nsid) = (sqe.slba(), sqe.nsid());
        let entry = ErrorEntry { count: 0, queue: queue.id, cid: sqe.cid(), status, lba: slba, nsid };
        queue.association.notice(Notice::Error(entry));
    }

    /// Prepares a reservation command.
    ///
    /// # Errors
    /// Invalid Opcode if the device has no reservations, and the status of a malformed command or unusable host
    /// identifier.
    fn reservation(
        &self,
        sqe: &Sqe,
        namespace: &Rc<OpenNamespace>,
        data: BufList,
    ) -> Result<DeviceCommand, NvmeStatus> {
        let view = namespace.reservations.as_ref().ok_or(NvmeStatus::INVALID_OPCODE.final_())?;
        let host = self.queue.as_ref().and_then(|queue| queue.association.reserver.clone());
        let host = host.ok_or(NvmeStatus::HOST_ID.final_())?;
        if sqe.opcode() == nvm::RESV_REPORT {
            let len = (sqe.cdw(10) as usize + 1) * 4;
            let of_host = |id: &_| self.queue.as_ref()?.association.subsystem.controller_of(id);
            let mut report = reservation::report(view.borrow_mut().table(), of_host);
            report.resize(len, 0);
            let report = Buf::copy_of(&report);
            return Ok(DeviceCommand::Many(Box::pin(ready(Ok(NvmeCommandData::Data(report.into()))))));
        }
        let action = reservation::decode(sqe, &data.into_contiguous())?;
        let applied = view.borrow().reservations().apply(&host, action);
        Ok(DeviceCommand::Many(Box::pin(async move {
            match applied.await {
                Ok(Ok(_)) => Ok(NvmeCommandData::Done),
                Ok(Err(refusal)) => Err(reservation::status(refusal)),
                Err(error) => Err(NvmeStatus::of(&error, true)),
            }
        })))
    }
}
