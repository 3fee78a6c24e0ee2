//! Commands of an I/O queue.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::{Rc, Weak};
use std::sync::atomic::Ordering;

use std::future::ready;

use forebay_block::{Buf, BufList, Extent, Request};

use super::OpenNamespace;
use super::connection::{Connection, Note};
use super::work::{self, Outcome, Work};
use crate::session::io::{self, Action, Command, Data, FUSED_MAX};
use crate::stats::CommandKind;
use crate::subsystem::Notice;
use crate::wire::command::{Fuse, NSID_ALL, Sgl, nvm};
use crate::wire::log::ErrorEntry;
use crate::wire::{Sqe, Status, reservation};

/// Validated command that is not submitted to the device yet.  It may wait for its host indefinitely, so that it
/// must not keep its namespace open.
pub(super) struct Started {
    pub(super) sqe: Sqe,
    command: Command,
    namespace: Weak<OpenNamespace>,
    /// Bytes of the budget that it holds already.
    held: usize,
}

/// Context of a command in flight at the device.
pub(super) struct Pending {
    sqe: Sqe,
    /// Command identifier of the second half, for a fused operation.
    second: Option<u16>,
    action: Action,
    held: usize,
    _namespace: Rc<OpenNamespace>,
}

/// Fused Compare and Write whose data is being received.
pub(super) struct Fused {
    first: Sqe,
    second: Sqe,
    namespace: Weak<OpenNamespace>,
    begun: Cell<bool>,
    extent: Extent,
    fua: bool,
    expect: RefCell<Option<BufList>>,
    data: RefCell<Option<BufList>>,
    intact: Cell<bool>,
}

fn kind_of(action: &Action) -> CommandKind {
    match action {
        Action::Read(_) => CommandKind::Read,
        Action::Write { .. } => CommandKind::Write,
        Action::Compare(_) => CommandKind::Compare,
        Action::WriteZeroes { .. } => CommandKind::WriteZeroes,
        Action::Flush => CommandKind::Flush,
        Action::Ranges { .. } => CommandKind::Deallocate,
        Action::Verify(_) => CommandKind::Other,
        Action::Reservation | Action::ReservationReport => CommandKind::Reservation,
    }
}

/// Returns the bytes that a command transfers between host and volume.
fn bytes_of(action: &Action) -> u64 {
    match action {
        Action::Read(extent) | Action::Write { extent, .. } => extent.len,
        _ => 0,
    }
}

/// Returns the maximum bytes of memory that a command takes, from its beginning to the end of its response.
fn memory_of(command: &Command) -> usize {
    match (command.action, command.data) {
        // A Compare also reads the volume, and may copy that into one contiguous buffer.
        (Action::Compare(_), Data::In(len)) => 3 * len as usize,
        (Action::Verify(extent), _) => extent.len.min(work::VERIFY_PIECE) as usize,
        (_, Data::In(len) | Data::Out(len)) => len as usize,
        (_, Data::None) => 0,
    }
}

impl Connection {
    /// Handles a command of an I/O queue, with its in-capsule data.
    pub(super) fn io_command(&mut self, sqe: Sqe, data: BufList) {
        if let Some(first) = self.fused.take() {
            let first_data = std::mem::take(&mut self.fused_data);
            if sqe.fuse() == Fuse::Second {
                return self.fused_command((first, first_data), (sqe, data));
            }
            self.fail(&first, Status::FUSED_MISSING.final_());
        }
        match sqe.fuse() {
            Fuse::None => {}
            Fuse::First => {
                self.fused = Some(sqe);
                self.fused_data = data;
                return;
            }
            Fuse::Second => return self.fail(&sqe, Status::FUSED_MISSING.final_()),
            Fuse::Reserved => return self.fail(&sqe, Status::INVALID_FIELD.final_()),
        }
        let (command, namespace) = match self.prepare(&sqe) {
            Ok(prepared) => prepared,
            Err(status) => return self.fail(&sqe, status),
        };
        let started = Started { sqe, command, namespace: Rc::downgrade(&namespace), held: 0 };
        if let Data::In(len) = command.data
            && matches!(sqe.sgl(), Sgl::InCapsule { .. })
        {
            return match io::in_capsule(sqe.sgl(), len, &data) {
                Ok(data) => {
                    // The data is in memory already, bounded by the length of the queue.
                    let held = memory_of(&command);
                    self.outbox.hold_anyway(held);
                    self.start(Started { held, ..started }, data);
                }
                Err(status) => self.fail_started(started, status),
            };
        }
        if self.waiting.is_empty() {
            if let Some(refused) = self.try_begin(started) {
                self.waiting.push_back(refused);
            }
        } else {
            self.waiting.push_back(started);
        }
    }

    /// Returns the namespace of a command, opening it on first use.
    ///
    /// # Errors
    /// Invalid Namespace if it does not exist or the host may know another volume by this id; an ANA status if it is
    /// not accessible through this port.
    fn find(&mut self, nsid: u32) -> Result<Rc<OpenNamespace>, Status> {
        let withdrawals = self.server.subsystems.withdrawals();
        let namespace = match &self.last {
            Some((seen, last)) if *seen == withdrawals && last.info.nsid == nsid => last.clone(),
            _ => {
                self.last = None;
                if nsid == 0 || nsid == NSID_ALL {
                    return Err(Status::INVALID_NAMESPACE.final_());
                }
                let queue = self.queue.as_ref().ok_or(Status::SEQUENCE.final_())?;
                let subsystem = &queue.association.subsystem;
                let found = self.server.namespace(subsystem, nsid).ok_or(Status::INVALID_NAMESPACE.final_())?;
                if queue.association.mistakes(nsid) {
                    return Err(Status::INVALID_NAMESPACE.final_());
                }
                if let Some(queue) = &self.queue
                    && self.used.insert(nsid)
                {
                    queue.association.uses(nsid);
                }
                self.last = Some((withdrawals, found.clone()));
                found
            }
        };
        self.accessible(&namespace)?;
        Ok(namespace)
    }

    /// Checks that a namespace is accessible through this port now.
    ///
    /// # Errors
    /// An ANA status.
    fn accessible(&self, namespace: &OpenNamespace) -> Result<(), Status> {
        self.port.ana(namespace.info.ana_group).refuses().map_or(Ok(()), Err)
    }

    /// Returns the namespace of a command that has waited, if it is still accessible through this port.
    ///
    /// # Errors
    /// Invalid Namespace if it was withdrawn; an ANA status if it is not accessible.
    fn still(&self, namespace: &Weak<OpenNamespace>) -> Result<Rc<OpenNamespace>, Status> {
        let namespace = namespace.upgrade().ok_or(Status::INVALID_NAMESPACE.final_())?;
        self.accessible(&namespace)?;
        Ok(namespace)
    }

    fn prepare(&mut self, sqe: &Sqe) -> Result<(Command, Rc<OpenNamespace>), Status> {
        if !sqe.uses_sgl() {
            return Err(Status::INVALID_FIELD.final_());
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
    fn admit(&self, namespace: &OpenNamespace, action: &Action) -> Result<(), Status> {
        if let Some(view) = &namespace.reservations
            && let Some(access) = action.access()
            && let Some(queue) = &self.queue
            && !view.borrow_mut().allows(queue.association.reserver.as_ref(), access)
        {
            return Err(Status::RESERVATION_CONFLICT.final_());
        }
        Ok(())
    }

    /// Begins a command.  Returns the command if there is no buffer space for its data.
    fn try_begin(&mut self, mut started: Started) -> Option<Started> {
        let len = memory_of(&started.command);
        if len > 0 {
            let held = self.outbox.held();
            let room = held == 0 || held + len <= self.server.subsystems.limits().connection_bytes;
            if !room || !self.outbox.hold(len) {
                return Some(started);
            }
            started.held = len;
        }
        match started.command.data {
            Data::In(len) => self.ask(started.sqe.cid(), len, Note::Io(started)),
            _ => self.start(started, BufList::new()),
        }
        None
    }

    /// Begins commands that wait for buffer space, as far as there is space now.
    pub(super) fn start_waiting(&mut self) {
        while let Some(started) = self.waiting.pop_front() {
            if let Some(refused) = self.try_begin(started) {
                self.waiting.push_front(refused);
                return;
            }
        }
        self.outbox.needs_no_room();
    }

    /// Submits a command to the device, with its data from the host.
    pub(super) fn start(&mut self, started: Started, data: BufList) {
        let namespace = match self.still(&started.namespace) {
            Ok(namespace) => namespace,
            Err(status) => return self.fail_started(started, status),
        };
        // The data may have taken long, and another host may hold the reservation now.
        if let Err(status) = self.admit(&namespace, &started.command.action) {
            return self.fail_started(started, status);
        }
        let Started { sqe, command, held, .. } = started;
        let device = &namespace.device;
        let queue = self.queue.as_ref();
        let through = queue.is_some_and(|queue| queue.association.write_through.load(Ordering::Relaxed));
        let work = match command.action {
            Action::Read(extent) => work::read(device, extent),
            Action::Write { extent, fua } => work::write(device, extent, data, fua || through),
            Action::Compare(extent) => work::compare(device, extent, data),
            Action::WriteZeroes { extent, no_unmap, fua } => {
                work::one(device, Request::WriteZeroes { extent, no_unmap, fua: fua || through })
            }
            Action::Flush => work::one(device, Request::Flush),
            Action::Verify(extent) => work::verify(device, extent),
            Action::Ranges { deallocate } => {
                match io::ranges(&data.into_contiguous(), &namespace.rules()) {
                    Ok(ranges) if deallocate && !ranges.is_empty() => work::discard(device, ranges),
                    // Access hints for the ranges have no effect here.
                    Ok(_) => Work::Many(Box::pin(std::future::ready(Ok(Outcome::Done)))),
                    Err(status) => return self.fail_started(started, status),
                }
            }
            Action::Reservation | Action::ReservationReport => match self.reservation(&sqe, &namespace, data) {
                Ok(work) => work,
                Err(status) => return self.fail_started(started, status),
            },
        };
        let pending = Pending { sqe, second: None, action: command.action, held, _namespace: namespace };
        if let Some((result, pending)) = self.work.start(work, pending) {
            self.finish(result, pending);
        }
    }

    /// Processes completions of the device.
    pub(super) fn poll_work(&mut self) {
        if self.work.is_empty() {
            return;
        }
        let mut done = VecDeque::new();
        self.work.poll(|result, pending| done.push_back((result, pending)));
        for (result, pending) in done {
            self.finish(result, pending);
        }
    }

    /// Queues the response to a command that the device has completed.
    fn finish(&mut self, result: Result<Outcome, Status>, pending: Pending) {
        let Pending { sqe, second, action, held, _namespace: namespace } = pending;
        let cid = sqe.cid();
        let result = match result {
            Ok(Outcome::Data(data))
                if action != Action::ReservationReport && data.len() as u64 != bytes_of(&action) =>
            {
                Err(Status::INTERNAL)
            }
            other => other,
        };
        if let Some(queue) = &self.queue {
            // Responses count as traffic: with traffic-based keep-alive (base 3.9.3) a host that receives them need not
            // send anything else to keep its controller.
            queue.association.note_traffic();
            queue.entered.counters.answered(kind_of(&action), bytes_of(&action), result.is_err());
        }
        drop(namespace);
        match result {
            Ok(Outcome::Data(data)) => {
                // Without flow control, C2HData with the SUCCESS flag replaces the response.
                let success = self.queue.as_ref().is_some_and(|queue| !queue.flow_control);
                self.outbox.replies.data(cid, data, success);
                if success {
                    self.outstanding -= 1;
                    self.outbox.replied(held);
                } else {
                    self.respond(cid, Status::SUCCESS, 0, held);
                }
            }
            Ok(Outcome::Done) => {
                self.respond(cid, Status::SUCCESS, 0, held);
                if let Some(second) = second {
                    self.respond(second, Status::SUCCESS, 0, 0);
                }
            }
            Err(status) => {
                self.note_error(&sqe, status);
                self.respond(cid, status, 0, held);
                if let Some(second) = second {
                    self.respond(second, Status::FUSED_FAILED, 0, 0);
                }
            }
        }
    }

    /// Queues an error response to a command that was not submitted to the device.
    pub(super) fn fail_started(&mut self, started: Started, status: Status) {
        self.note_error(&started.sqe, status);
        if let Some(queue) = &self.queue {
            queue.entered.counters.answered(kind_of(&started.command.action), 0, true);
        }
        self.respond(started.sqe.cid(), status, 0, started.held);
    }

    /// Records an error for the Error Information log page, except for statuses of normal operation.
    pub(super) fn note_error(&mut self, sqe: &Sqe, status: Status) {
        let usual = [Status::COMPARE_FAILED, Status::RESERVATION_CONFLICT, Status::FUSED_FAILED];
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
    fn reservation(&self, sqe: &Sqe, namespace: &Rc<OpenNamespace>, data: BufList) -> Result<Work, Status> {
        let view = namespace.reservations.as_ref().ok_or(Status::INVALID_OPCODE.final_())?;
        let host = self.queue.as_ref().and_then(|queue| queue.association.reserver.clone());
        let host = host.ok_or(Status::HOST_ID.final_())?;
        if sqe.opcode() == nvm::RESV_REPORT {
            let len = (sqe.cdw(10) as usize + 1) * 4;
            let of_host = |id: &_| self.queue.as_ref()?.association.subsystem.controller_of(id);
            let mut report = reservation::report(view.borrow_mut().table(), of_host);
            report.resize(len, 0);
            let report = Buf::copy_of(&report);
            return Ok(Work::Many(Box::pin(ready(Ok(Outcome::Data(report.into()))))));
        }
        let action = reservation::decode(sqe, &data.into_contiguous())?;
        let applied = view.borrow().reservations().apply(&host, action);
        Ok(Work::Many(Box::pin(async move {
            match applied.await {
                Ok(Ok(_)) => Ok(Outcome::Done),
                Ok(Err(refusal)) => Err(reservation::status(refusal)),
                Err(error) => Err(Status::of(&error, true)),
            }
        })))
    }

    // ---- Compare and Write ----

    fn fused_command(&mut self, (first, first_data): (Sqe, BufList), (second, second_data): (Sqe, BufList)) {
        let both = match (self.prepare(&first), self.prepare(&second)) {
            (Err(status), _) => Err((status, Status::FUSED_FAILED)),
            (_, Err(status)) => Err((Status::FUSED_FAILED, status)),
            (Ok((compare, namespace)), Ok((write, _))) => match (compare.action, write.action) {
                _ if first.nsid() != second.nsid() => Err((Status::INVALID_FIELD.final_(), Status::FUSED_FAILED)),
                (Action::Compare(expect), Action::Write { extent, fua }) if expect == extent => {
                    if extent.len > FUSED_MAX {
                        Err((Status::ATOMIC_UNIT.final_(), Status::FUSED_FAILED))
                    } else {
                        Ok((namespace, extent, fua))
                    }
                }
                _ => Err((Status::INVALID_FIELD.final_(), Status::FUSED_FAILED)),
            },
        };
        let (namespace, extent, fua) = match both {
            Ok(both) => both,
            Err((of_first, of_second)) => {
                self.fail(&first, of_first);
                return self.fail(&second, of_second);
            }
        };
        // In-capsule data must be complete before an R2T is sent.
        let in_capsule = |sqe: &Sqe, data: &BufList| match sqe.sgl() {
            Sgl::InCapsule { .. } => io::in_capsule(sqe.sgl(), extent.len as u32, data).map(Some),
            _ => Ok(None),
        };
        let parts = match (in_capsule(&first, &first_data), in_capsule(&second, &second_data)) {
            (Ok(first), Ok(second)) => [first, second],
            (Err(status), _) => {
                self.fail(&first, status);
                return self.fail(&second, Status::FUSED_FAILED);
            }
            (_, Err(status)) => {
                self.fail(&first, Status::FUSED_FAILED);
                return self.fail(&second, status);
            }
        };
        self.outbox.hold_anyway(2 * extent.len as usize);
        let fused = Rc::new(Fused {
            first,
            second,
            namespace: Rc::downgrade(&namespace),
            begun: Cell::new(false),
            extent,
            fua,
            expect: RefCell::default(),
            data: RefCell::default(),
            intact: Cell::new(true),
        });
        for (part, (sqe, is_first)) in parts.into_iter().zip([(first, true), (second, false)]) {
            match part {
                Some(part) => self.fused_arrived(&fused, is_first, part, true),
                None => self.ask(sqe.cid(), extent.len as u32, Note::Fused(fused.clone(), is_first)),
            }
        }
    }

    /// Stores the data of one half of a fused operation.  Begins the operation once both are there.
    pub(super) fn fused_arrived(&mut self, fused: &Rc<Fused>, first: bool, data: BufList, intact: bool) {
        let place = if first { &fused.expect } else { &fused.data };
        place.replace(Some(data));
        fused.intact.set(fused.intact.get() && intact);
        if fused.expect.borrow().is_none() || fused.data.borrow().is_none() {
            return;
        }
        let held = 2 * fused.extent.len as usize;
        if fused.begun.replace(true) {
            return;
        }
        let intact = if fused.intact.get() { Ok(()) } else { Err(Status::TRANSPORT) };
        let action = Action::Write { extent: fused.extent, fua: fused.fua };
        // The data may have taken long, and another host may hold the reservation now.
        let allowed = intact.and_then(|()| {
            let namespace = self.still(&fused.namespace)?;
            self.admit(&namespace, &action).map(|()| namespace)
        });
        let namespace = match allowed {
            Ok(namespace) => namespace,
            Err(status) => {
                self.note_error(&fused.first, status);
                if let Some(queue) = &self.queue {
                    queue.entered.counters.answered(kind_of(&action), 0, true);
                }
                self.respond(fused.first.cid(), status, 0, held);
                return self.respond(fused.second.cid(), Status::FUSED_FAILED, 0, 0);
            }
        };
        let through = self.queue.as_ref().is_some_and(|queue| queue.association.write_through.load(Ordering::Relaxed));
        let request = Request::CompareAndWrite {
            offset: fused.extent.offset,
            expect: fused.expect.take().unwrap_or_default(),
            data: fused.data.take().unwrap_or_default(),
            fua: fused.fua || through,
        };
        let work = work::one(&namespace.device, request);
        let pending =
            Pending { sqe: fused.first, second: Some(fused.second.cid()), action, held, _namespace: namespace };
        if let Some((result, pending)) = self.work.start(work, pending) {
            self.finish(result, pending);
        }
    }
}
