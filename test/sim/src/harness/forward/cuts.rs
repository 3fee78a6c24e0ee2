//! Owners that handle messages late, and forwarders that give the volume up.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

use forebay_forward::ForwardHost;
use forebay_messenger::{Connection, Message};
use forebay_reactor::{sleep, spawn};

use super::VOLUME;
use super::daemons::{ForwarderNode, Group};
use crate::rng::Rng;

/// Messages that an owner has received and not handled.
#[derive(Default)]
pub(super) struct LateMessages {
    keeps: Cell<bool>,
    /// Connections whose messages are handled at once all the same.
    spared: RefCell<Vec<(Connection, bool)>>,
    rng: RefCell<Option<Rng>>,
    messages: RefCell<Vec<(Connection, Message)>>,
}

impl LateMessages {
    /// Keeps a message if it is to be late; returns it otherwise.
    pub(super) fn keep(&self, connection: &Connection, message: Message) -> Option<Message> {
        if !self.keeps.get() || self.spares(connection) {
            return Some(message);
        }
        self.messages.borrow_mut().push((connection.clone(), message));
        None
    }

    /// Draws whether the messages of a connection are on time, which holds until the others are handled.
    fn spares(&self, connection: &Connection) -> bool {
        let mut spared = self.spared.borrow_mut();
        if let Some((_, spares)) = spared.iter().find(|(known, _)| known == connection) {
            return *spares;
        }
        let spares = self.rng.borrow_mut().as_mut().is_some_and(Rng::coin);
        spared.push((connection.clone(), spares));
        spares
    }

    /// Drops the messages of a connection that has ended.
    pub(super) fn forget(&self, connection: &Connection) {
        self.messages.borrow_mut().retain(|(from, _)| from != connection);
    }

    /// Keeps messages for a while.
    pub(super) fn begin(self: &Rc<Self>, host: &Rc<ForwardHost>, longest: Duration, rng: &mut Rng) {
        if self.keeps.replace(true) {
            return;
        }
        // Without a generator all are late.
        *self.rng.borrow_mut() = (!rng.one_in(4)).then(|| rng.fork());
        let (late, host) = (self.clone(), host.clone());
        let delay = Duration::from_micros(rng.below(longest.as_micros() as u64));
        drop(spawn(async move {
            sleep(delay).await;
            late.keeps.set(false);
            late.spared.take();
            for (connection, message) in late.messages.take() {
                assert!(host.handle(&connection, message), "an owner gets requests only");
            }
        }));
    }
}

impl Group {
    /// Has a forwarder give the volume up, and open it again after a while.  Its messages to owners may be late, of which it
    /// knows nothing.
    pub(super) fn give_up(&self, longest: Duration, rng: &mut Rng) {
        let node: Rc<ForwarderNode> = rng.pick(self.forwarders()).clone();
        let life = node.life.borrow().clone();
        let until = Duration::from_micros(rng.below(longest.as_micros() as u64));
        let pause = Duration::from_micros(rng.below(2 * longest.as_micros() as u64));
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
    }
}
