//! Per-core messenger state: memory pools, receive budget, and the queue of messages awaiting dispatch.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::rc::{Rc, Weak};

use forebay_reactor::{spawn, yield_now};

use crate::connection::{Conn, Connection};
use crate::message::{Message, Role};
use crate::messenger::Inner;
use crate::priority::PriorityQueue;
use crate::throttle::{Budget, Throttle};
use crate::window;
use crate::wire::Pools;

/// Maximum number of messages dispatched before other tasks run.
const DISPATCH_TURN: usize = 512;

/// Per-core messenger state.  All its connections are served by the reactor of the thread that created it.
/// Clones share it.
#[derive(Clone)]
pub struct MessengerCore {
    pub(crate) shared: Rc<Shared>,
}

pub(crate) struct Shared {
    pub(crate) pools: Rc<Pools>,
    /// Budget of all messages that were received and not dropped.
    pub(crate) throttle: Rc<Throttle>,
    queue: RefCell<PriorityQueue<(Rc<Conn>, Message)>>,
    dispatching: Cell<bool>,
    scheduled: Cell<bool>,
    /// Endpoints of this process that are reached without serialising, by name.
    pub(crate) names: RefCell<BTreeMap<String, Weak<Inner>>>,
}

impl MessengerCore {
    /// Creates the messenger core of this thread's reactor.  `budget` bounds the messages that were received and not dropped,
    /// over all connections.
    pub fn new(budget: Budget) -> Self {
        let shared = Shared {
            pools: Rc::new(Pools::new()),
            throttle: Throttle::new(budget, None),
            queue: RefCell::default(),
            dispatching: Cell::new(false),
            scheduled: Cell::new(false),
            names: RefCell::default(),
        };
        Self { shared: Rc::new(shared) }
    }

    /// Returns the number of messages that were received and not dropped, and their bytes.
    pub fn held(&self) -> Budget {
        self.shared.throttle.used()
    }
}

impl Default for MessengerCore {
    /// Returns a messenger core with a budget of 65,536 messages and 512 MiB.
    fn default() -> Self {
        Self::new(Budget { messages: 1 << 16, bytes: 512 << 20 })
    }
}

impl Shared {
    /// Queues a message for its handler.
    pub(crate) fn enqueue(&self, conn: Rc<Conn>, message: Message) {
        self.queue.borrow_mut().push(message.priority, (conn, message));
    }

    /// Dispatches queued messages to their handlers, highest priority first across all connections.
    pub(crate) fn dispatch(self: &Rc<Self>) {
        // A handler may re-enter this function; the outer call then continues.
        if self.dispatching.replace(true) {
            return;
        }
        for _ in 0..DISPATCH_TURN {
            let next = self.queue.borrow_mut().pop();
            let Some((conn, message)) = next else { break };
            if conn.is_closed() {
                continue;
            }
            if message.role == Role::Window {
                window::asked(&conn, message);
            } else {
                let connection = Connection::new(conn);
                connection.conn.messenger.handler.message(&connection, message);
            }
        }
        self.dispatching.set(false);
        if !self.queue.borrow().is_empty() {
            self.schedule();
        }
    }

    /// Schedules a dispatch as a separate task.
    pub(crate) fn schedule(self: &Rc<Self>) {
        if self.scheduled.replace(true) {
            return;
        }
        let shared = self.clone();
        drop(spawn(async move {
            yield_now().await;
            shared.scheduled.set(false);
            shared.dispatch();
        }));
    }
}
