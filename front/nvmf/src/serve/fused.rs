//! Fused Compare and Write.

use std::cell::{Cell, RefCell};
use std::rc::{Rc, Weak};

use forebay_block::{BlockRequest, BufList, Extent};

use super::OpenNamespace;
use super::connection::NvmeConnection;
use super::data::DataOwner;
use super::io::PendingCommand;
use super::submit;
use crate::session::io::{self, FUSED_MAX, NvmeAction};
use crate::wire::command::Sgl;
use crate::wire::{NvmeStatus, Sqe};

/// Fused Compare and Write whose data is being received.
pub(super) struct FusedPair {
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

impl NvmeConnection {
    /// Handles both halves of a fused operation, with their in-capsule data.
    pub(super) fn fused_command(&mut self, (first, first_data): (Sqe, BufList), (second, second_data): (Sqe, BufList)) {
        let both = match (self.prepare(&first), self.prepare(&second)) {
            (Err(status), _) => Err((status, NvmeStatus::FUSED_FAILED)),
            (_, Err(status)) => Err((NvmeStatus::FUSED_FAILED, status)),
            (Ok((compare, namespace)), Ok((write, _))) => match (compare.action, write.action) {
                _ if first.nsid() != second.nsid() => {
                    Err((NvmeStatus::INVALID_FIELD.final_(), NvmeStatus::FUSED_FAILED))
                }
                (NvmeAction::Compare(expect), NvmeAction::Write { extent, fua }) if expect == extent => {
                    if extent.len > FUSED_MAX {
                        Err((NvmeStatus::ATOMIC_UNIT.final_(), NvmeStatus::FUSED_FAILED))
                    } else {
                        Ok((namespace, extent, fua))
                    }
                }
                _ => Err((NvmeStatus::INVALID_FIELD.final_(), NvmeStatus::FUSED_FAILED)),
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
                return self.fail(&second, NvmeStatus::FUSED_FAILED);
            }
            (_, Err(status)) => {
                self.fail(&first, NvmeStatus::FUSED_FAILED);
                return self.fail(&second, status);
            }
        };
        self.outbox.hold_anyway(2 * extent.len as usize);
        let fused = Rc::new(FusedPair {
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
                None => self.ask(sqe.cid(), extent.len as u32, DataOwner::Fused(fused.clone(), is_first)),
            }
        }
    }

    /// Stores the data of one half of a fused operation.  Begins the operation once both are there.
    pub(super) fn fused_arrived(&mut self, fused: &FusedPair, first: bool, data: BufList, intact: bool) {
        let half = if first { &fused.expect } else { &fused.data };
        half.replace(Some(data));
        fused.intact.set(fused.intact.get() && intact);
        if fused.expect.borrow().is_none() || fused.data.borrow().is_none() {
            return;
        }
        let held = 2 * fused.extent.len as usize;
        if fused.begun.replace(true) {
            return;
        }
        let intact = if fused.intact.get() { Ok(()) } else { Err(NvmeStatus::TRANSPORT) };
        let action = NvmeAction::Write { extent: fused.extent, fua: fused.fua };
        // The data may have taken long, and another host may hold the reservation now.
        let allowed = intact.and_then(|()| {
            let namespace = self.still(&fused.namespace, fused.first.nsid())?;
            self.admit(&namespace, &action).map(|()| namespace)
        });
        let namespace = match allowed {
            Ok(namespace) => namespace,
            Err(status) => {
                self.fail_unsubmitted(&fused.first, &action, status, held);
                return self.respond(fused.second.cid(), NvmeStatus::FUSED_FAILED, 0, 0);
            }
        };
        let request = BlockRequest::CompareAndWrite {
            offset: fused.extent.offset,
            expect: fused.expect.take().unwrap_or_default(),
            data: fused.data.take().unwrap_or_default(),
            fua: fused.fua || self.writes_through(),
        };
        let command = submit::one(&namespace.device, request);
        self.submit(command, PendingCommand::fused(fused.first, fused.second.cid(), action, held, namespace));
    }
}
