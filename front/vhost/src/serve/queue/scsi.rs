//! Requests of a virtio-scsi queue: commands, task management, or buffers for events.

use std::rc::Rc;
use std::task::Waker;

use forebay_reactor::now;
use forebay_scsi::ScsiTask;
use forebay_scsi::cdb::ScsiCommand;

use super::{EndedChain, IntakeError};
use crate::memory::GuestPart;
use crate::rings::Chain;
use crate::scsi::{self, ScsiControlAction, ScsiControlRequest, ScsiOutcome, ScsiRequest, ScsiResponse};
use crate::serve::device::VhostDevice;
use crate::serve::scsi_nexus::{EndedScsi, ScsiModel, ScsiNexus, ScsiNote, ScsiResponseForm};
use crate::stats::VhostRequestKind;

/// Chain that has ended, if it has, and its readable parts.
type Begun = Result<(Option<EndedChain>, Vec<GuestPart>), IntakeError>;

/// Requests of a queue.
pub(super) struct ScsiWork {
    queue: usize,
    device: Rc<VhostDevice>,
    nexus: Rc<ScsiNexus>,
    in_flight: usize,
    bytes: u64,
}

impl ScsiWork {
    pub(super) fn new(queue: usize, device: &Rc<VhostDevice>, model: &ScsiModel) -> Self {
        Self { queue, device: device.clone(), nexus: model.nexus(), in_flight: 0, bytes: 0 }
    }

    pub(super) fn len(&self) -> usize {
        self.in_flight
    }

    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }

    pub(super) fn wants_chains(&self) -> bool {
        self.queue != scsi::EVENT_QUEUE || self.nexus.has_event()
    }

    pub(super) fn set_task(&mut self, task: &Waker) {
        self.nexus.set_task(self.queue, task);
    }

    pub(super) fn begin(&mut self, chain: Chain, again: bool) -> Begun {
        match self.queue {
            scsi::CONTROL_QUEUE => self.begin_control(chain),
            scsi::EVENT_QUEUE => self.put_event(chain),
            _ => self.begin_command(chain, again),
        }
    }

    /// Checks that what was read were not zeroes in place of the guest's data.
    fn check_memory(&self) -> Result<(), IntakeError> {
        if self.device.is_memory_lost() { Err(IntakeError::Lost) } else { Ok(()) }
    }

    fn put_event(&mut self, chain: Chain) -> Begun {
        let Chain { token, readable, writable } = chain;
        let put = self.nexus.put_event(&writable, self.device.log().as_ref());
        let used = put.map_err(|violation| IntakeError::Request(violation.to_string()))?.unwrap_or(0);
        Ok((Some(EndedChain { token, writable, used }), readable))
    }

    fn begin_control(&mut self, chain: Chain) -> Begun {
        let Chain { token, readable, writable } = chain;
        let request = ScsiControlRequest::parse(&readable, &writable)
            .map_err(|violation| IntakeError::Request(violation.to_string()))?;
        self.check_memory()?;
        match request.action {
            ScsiControlAction::Respond(response) => {
                let used = request.respond(&writable, response, self.device.log().as_ref());
                Ok((Some(EndedChain { token, writable, used }), readable))
            }
            ScsiControlAction::Manage(function) => {
                let form = ScsiResponseForm::Control(request);
                let (queue, kind, bytes, began) = (self.queue, VhostRequestKind::Other, 0, now());
                self.in_flight += 1;
                self.nexus.manage(function, ScsiNote { queue, token, writable, form, kind, bytes, began });
                Ok((None, readable))
            }
        }
    }

    fn begin_command(&mut self, chain: Chain, again: bool) -> Begun {
        let Chain { token, readable, writable } = chain;
        let mut request = ScsiRequest::parse(&readable, &writable, &self.device.scsi().config())
            .map_err(|violation| IntakeError::Request(violation.to_string()))?;
        let ready = request.ready_command(&readable, &self.device.pools).and_then(|ready| {
            // The driver is to know that it may have been executed.
            let is_in_doubt = again && ready.command.as_ref().is_ok_and(|command| !command.is_repeatable());
            if is_in_doubt { Err(ScsiOutcome::failed(ScsiResponse::Reset)) } else { Ok(ready) }
        });
        let command = match ready {
            Ok(command) => command,
            Err(outcome) => {
                let used = request.respond(&writable, &outcome, self.device.log().as_ref());
                return Ok((Some(EndedChain { token, writable, used }), readable));
            }
        };
        self.check_memory()?;
        let kind = match &command.command {
            Ok(ScsiCommand::Read(_)) => VhostRequestKind::Read,
            Ok(ScsiCommand::Write(_)) => VhostRequestKind::Write,
            _ => VhostRequestKind::Other,
        };
        let bytes = command.read_bytes() as u64 + command.data.len() as u64;
        let form = ScsiResponseForm::Command(request.reply);
        let note = ScsiNote { queue: self.queue, token, writable, form, kind, bytes, began: now() };
        self.in_flight += 1;
        self.bytes += bytes;
        self.nexus.submit(ScsiTask { tag: request.id, command, ordered: request.is_ordered(), note });
        Ok((None, readable))
    }

    pub(super) fn poll(&mut self, mut give_back: impl FnMut(EndedChain)) {
        while let Some(ended) = self.nexus.take_ended(self.queue) {
            self.in_flight -= 1;
            self.bytes -= ended.note.bytes;
            if self.device.phase.is_over() {
                // The guest may have given its buffers to others.
                continue;
            }
            let used = ended.respond(self.device.log().as_ref());
            let EndedScsi { note, outcome } = ended;
            let failed = outcome.response != ScsiResponse::Ok || outcome.status != forebay_scsi::status::GOOD;
            self.device.counters.answered(note.kind, note.bytes, now().since(note.began), failed);
            give_back(EndedChain { token: note.token, writable: note.writable, used });
        }
    }
}
