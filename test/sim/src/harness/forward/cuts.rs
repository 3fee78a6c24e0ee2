//! Owners that handle messages late, and forwarders that give the volume up.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

use forebay_forward::wire::{self, ForwardRequest};
use forebay_forward::{ForwardHost, ForwarderStart};
use forebay_messenger::{Connection, Message};
use forebay_reactor::{sleep, spawn};

use super::VOLUME;
use super::daemons::{ForwarderNode, Group};
use crate::rng::Rng;

/// Messages that an owner has received and not handled.
#[derive(Default)]
pub(super) struct LateMessages {
    /// Whose messages are late, while some are: of one start, or of all.
    of: Cell<Option<Option<ForwarderStart>>>,
    /// Connections that forwarders have opened sessions over.
    from: RefCell<Vec<(Connection, ForwarderStart)>>,
    messages: RefCell<Vec<(Connection, Message)>>,
}

impl LateMessages {
    /// Keeps a message if it is to be late; returns it otherwise.
    pub(super) fn keep(&self, connection: &Connection, message: Message) -> Option<Message> {
        let decoded = wire::front(&message).and_then(|front| ForwardRequest::decode(&front, message.data.clone()));
        if let Ok(ForwardRequest::Open { start, .. }) = decoded {
            self.from.borrow_mut().push((connection.clone(), start));
        }
        let is_of =
            |start: ForwarderStart| self.from.borrow().iter().any(|(known, of)| known == connection && *of == start);
        let is_late = self.of.get().is_some_and(|of| of.is_none_or(is_of));
        if !is_late {
            return Some(message);
        }
        self.messages.borrow_mut().push((connection.clone(), message));
        None
    }

    /// Drops the messages of a connection that has ended.
    pub(super) fn forget(&self, connection: &Connection) {
        self.messages.borrow_mut().retain(|(from, _)| from != connection);
        self.from.borrow_mut().retain(|(from, _)| from != connection);
    }

    /// Keeps the messages of a start, or of all, for a while.
    pub(super) fn begin(self: &Rc<Self>, host: &Rc<ForwardHost>, of: Option<ForwarderStart>, delay: Duration) {
        if self.of.get().is_some() {
            return;
        }
        self.of.set(Some(of));
        let (late, host) = (self.clone(), host.clone());
        drop(spawn(async move {
            sleep(delay).await;
            late.of.set(None);
            for (connection, message) in late.messages.take() {
                assert!(host.handle(&connection, message), "an owner gets requests only");
            }
        }));
    }
}

impl Group {
    /// Makes a forwarder give the volume up, and open it again after a while.  Its messages to owners may be late until then, or
    /// longer, of which it knows nothing.  Returns whether they are.
    pub(super) fn give_up(&self, lease: Duration, rng: &mut Rng) -> bool {
        let node: Rc<ForwarderNode> = rng.pick(self.forwarders()).clone();
        let life = node.life.borrow().clone();
        let longest = 3 * lease.as_micros() as u64;
        let (delay, pause) = (Duration::from_micros(rng.below(longest)), Duration::from_micros(rng.below(longest)));
        let until = Duration::from_micros(rng.below(delay.as_micros() as u64 + 1));
        let are_late = !rng.one_in(4);
        if are_late {
            let start = *life.volume.borrow().start();
            self.delay_messages(Some(start), delay);
        }
        let reopening = self.reopening.clone();
        reopening.set(reopening.get() + 1);
        drop(spawn(async move {
            sleep(until).await;
            life.volume.borrow().give_up();
            sleep(pause).await;
            while !life.over.get() {
                if let Ok(volume) = life.client.open(VOLUME, Group::locator(&life)).await {
                    *life.volume.borrow_mut() = Rc::new(volume);
                    break;
                }
                sleep(Duration::from_millis(10)).await;
            }
            reopening.set(reopening.get() - 1);
        }));
        are_late
    }
}
