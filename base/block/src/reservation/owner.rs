//! Owner of the reservation table: one task, on the core that owns the volume.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::{Arc, Weak};

use forebay_reactor::cross::{self, OneshotSender};
use forebay_reactor::spawn;

use super::mirror::ReservationAuthority;
use super::peers::{ReservationPeers, StoredTable};
use super::shared::{Keep, ReservationMessage, ReservationShared};
use super::table::{HostId, Refusal, ReservationAction, ReservationChange, ReservationTable};
use crate::error::{Error, ErrorKind, Result};
use crate::remote;

/// Change of the table, or the refusal.
pub(super) type ReservationResult = std::result::Result<ReservationChange, Refusal>;

/// Reservation state local to the core that owns the volume.
pub(super) struct ReservationOwner {
    /// Weak: the users of the table keep it alive.
    shared: Weak<ReservationShared>,
    keep: Rc<dyn Keep>,
    listeners: RefCell<Vec<cross::Sender<()>>>,
    /// Handles by which other cores reach the volume.
    gates: RefCell<Vec<Weak<remote::DeviceShared>>>,
    /// State shared with other daemons, where there can be any.
    pub(super) joint: Option<StoredTable>,
    /// Daemon that changes the table, where it is not this one.
    authority: Option<Rc<dyn ReservationAuthority>>,
}

/// Executes actions one after the other.
pub(super) async fn own(mut messages: cross::Receiver<ReservationMessage>, owner: Rc<ReservationOwner>) {
    while let Some(message) = messages.recv().await {
        // Messages do not keep the table alive: their senders may be gone.
        let Some(shared) = owner.shared.upgrade() else { return };
        match message {
            ReservationMessage::Watch(listener) => owner.listeners.borrow_mut().push(listener),
            ReservationMessage::Gate(gate) => {
                let mut gates = owner.gates.borrow_mut();
                gates.retain(|gate| gate.strong_count() > 0);
                gates.push(gate);
            }
            ReservationMessage::Apply(host, action, answer) if owner.authority.is_some() => {
                owner.forward(host, action, answer);
            }
            ReservationMessage::ClearAll(answer) if owner.authority.is_some() => {
                let what = "reservations are cleared at the daemon that has the volume open";
                answer.send(Err(Error::new(ErrorKind::Unsupported, what)));
            }
            ReservationMessage::Apply(host, action, answer) => match owner.apply(&shared, &host, &action).await {
                Err(error) => answer.send(Err(error)),
                Ok(Err(refusal)) => answer.send(Ok(Err(refusal))),
                Ok(Ok((change, changed))) => {
                    let takes = matches!(
                        action,
                        ReservationAction::Reserve { .. }
                            | ReservationAction::Preempt { .. }
                            | ReservationAction::HoldWhole
                            | ReservationAction::Reset
                    );
                    owner.clone().answer_when_over(answer, Ok(Ok(change)), takes, changed);
                }
            },
            ReservationMessage::ClearAll(answer) => {
                let cleared = owner.change(&shared, |table| {
                    table.clear_all();
                    Ok(ReservationChange::default())
                });
                match cleared.await {
                    Err(error) => answer.send(Err(error)),
                    Ok(outcome) => {
                        owner.clone().answer_when_over(
                            answer,
                            Ok(()),
                            false,
                            outcome.is_ok_and(|(_, changed)| changed),
                        );
                    }
                }
            }
        }
    }
}

impl ReservationOwner {
    pub(super) fn new(
        shared: Weak<ReservationShared>,
        keep: Rc<dyn Keep>,
        peers: Option<Rc<dyn ReservationPeers>>,
    ) -> Self {
        let joint = peers.map(StoredTable::new);
        Self { shared, keep, listeners: RefCell::default(), gates: RefCell::default(), joint, authority: None }
    }

    /// Leaves changes of the table to another daemon.
    pub(super) fn with_authority(self, authority: Rc<dyn ReservationAuthority>) -> Self {
        Self { authority: Some(authority), ..self }
    }

    pub(super) fn shared(&self) -> Option<Arc<ReservationShared>> {
        self.shared.upgrade()
    }

    /// Executes a host's action; returns the change, and whether the table has changed.
    async fn apply(
        &self,
        shared: &ReservationShared,
        host: &HostId,
        action: &ReservationAction,
    ) -> Result<std::result::Result<(ReservationChange, bool), Refusal>> {
        if self.joint.is_some()
            && let Some(result) = of_one_daemon(action)
        {
            return Ok(result.map(|change| (change, false)));
        }
        self.change(shared, |table| table.apply(host, action)).await
    }

    /// Sends an action to the authority.  Called in the order of the actions; the authority decides on theirs.
    fn forward(&self, host: HostId, action: ReservationAction, answer: OneshotSender<Result<ReservationResult>>) {
        let Some(authority) = &self.authority else { return };
        if let Some(result) = of_one_daemon(&action) {
            return answer.send(Ok(result));
        }
        let applied = authority.apply(host, action);
        drop(spawn(async move { answer.send(applied.await) }));
    }

    async fn change(
        &self,
        shared: &ReservationShared,
        change: impl Fn(&mut ReservationTable) -> ReservationResult,
    ) -> Result<std::result::Result<(ReservationChange, bool), Refusal>> {
        if let Some(joint) = &self.joint {
            return joint.change(self, shared, change).await;
        }
        let before = shared.current();
        let mut table = ReservationTable::clone(&before);
        let change = match change(&mut table) {
            Err(refusal) => return Ok(Err(refusal)),
            Ok(change) => change,
        };
        if table == *before {
            return Ok(Ok((change, false)));
        }
        table.revision += 1;
        let stored = table.encode();
        if stored != before.encode() {
            self.keep.save(stored).await?;
        }
        self.publish(shared, table);
        Ok(Ok((change, true)))
    }

    /// Makes `table` the current one and notifies the listeners.
    pub(super) fn publish(&self, shared: &ReservationShared, table: ReservationTable) {
        shared.publish(Arc::new(table));
        self.listeners.borrow_mut().retain(|listener| listener.send(()).is_ok());
    }

    /// Replies from a task of its own, since the next action need not wait for the medium or other daemons.  The reply
    /// is sent when the other daemons have adopted a change, and, for a change that takes the volume from another host,
    /// when the requests allowed before have completed.
    fn answer_when_over<T: Send + 'static>(
        self: Rc<Self>,
        answer: OneshotSender<Result<T>>,
        result: Result<T>,
        takes: bool,
        changed: bool,
    ) {
        let told = changed && self.joint.is_some();
        if !takes && !told {
            return answer.send(result);
        }
        drop(spawn(async move {
            if takes {
                self.fence().await;
                self.keep.drain().await;
            }
            if let Some(joint) = self.joint.as_ref().filter(|_| told) {
                joint.peers.announce().await;
            }
            answer.send(result);
        }));
    }

    /// Waits until every request that any core has admitted by now has been given to the device.
    pub(super) async fn fence(&self) {
        let gates: Vec<_> = self.gates.borrow().iter().filter_map(Weak::upgrade).collect();
        for gate in gates {
            gate.fence().await;
        }
    }

    /// Waits until the changes in flight in the device have completed.
    pub(super) async fn drain(&self) {
        self.keep.drain().await;
    }
}

/// Returns the result of an action of SPC-2, where several daemons serve the volume; `None` for all others.
pub(super) fn of_one_daemon(action: &ReservationAction) -> Option<ReservationResult> {
    match action {
        // Refused: it ends with the host's session, and a daemon that has died cannot tell the others.
        ReservationAction::HoldWhole => Some(Err(Refusal::Unsupported)),
        ReservationAction::LetGoWhole | ReservationAction::Reset => Some(Ok(ReservationChange::default())),
        _ => None,
    }
}

/// Returns the error of a volume that is not in use any more.
pub(super) fn closed() -> Error {
    Error::new(ErrorKind::ShuttingDown, "the volume is closed")
}
