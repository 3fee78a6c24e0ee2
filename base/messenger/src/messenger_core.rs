//! Per-core messenger state: memory pools, receive budget, and the queue of messages awaiting dispatch.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use forebay_reactor::{spawn, yield_now};

use crate::connection::{Conn, Connection};
use crate::loopback::LocalEndpoints;
use crate::message::{Message, MessageRole};
use crate::priority::PriorityQueue;
use crate::throttle::{MessageBudget, MessageThrottle};
use crate::window;
use crate::wire::MessengerPools;

/// Maximum number of messages dispatched before other tasks run.
const DISPATCH_TURN: usize = 512;

/// Per-core messenger state.  All its connections are served by the reactor of the thread that created it.
/// Clones share it.
#[derive(Clone)]
pub struct MessengerCore {
    pub(crate) state: Rc<CoreState>,
}

/// State of a core, shared with its endpoints.
///
/// Invariants:
/// 1. One dispatch runs at a time: a handler that causes another one only adds to the queue.
/// 2. A dispatch follows whatever is queued: one that is scheduled, or that of the stream's task in the same turn; if the
///    stream fails in that turn, the next dispatch of any stream.
pub(crate) struct CoreState {
    pub(crate) pools: Rc<MessengerPools>,
    /// Budget of all messages that were received and not dropped.
    pub(crate) receive_budget: Rc<MessageThrottle>,
    queue: RefCell<PriorityQueue<(Rc<Conn>, Message)>>,
    dispatching: Cell<bool>,
    scheduled: Cell<bool>,
    /// Endpoints of this core that are reached without serialising.
    pub(crate) local: LocalEndpoints,
}

impl MessengerCore {
    /// Creates the messenger core of this thread's reactor.  `budget` bounds the messages that were received and not
    /// dropped, over all connections.
    pub fn new(budget: MessageBudget) -> Self {
        let state = CoreState {
            pools: Rc::new(MessengerPools::new()),
            receive_budget: MessageThrottle::new(budget, None),
            queue: RefCell::default(),
            dispatching: Cell::new(false),
            scheduled: Cell::new(false),
            local: LocalEndpoints::default(),
        };
        Self { state: Rc::new(state) }
    }

    /// Returns the number of messages that were received and not dropped, and their bytes.
    pub fn held(&self) -> MessageBudget {
        self.state.receive_budget.used()
    }
}

impl Default for MessengerCore {
    /// Returns a messenger core with a budget of 65,536 messages and 512 MiB.
    fn default() -> Self {
        Self::new(MessageBudget { messages: 1 << 16, bytes: 512 << 20 })
    }
}

impl CoreState {
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
            if message.role == MessageRole::Window {
                window::execute(&conn, message);
            } else {
                let connection = Connection::new(conn);
                connection.conn.endpoint.handler.message(&connection, message);
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
        let state = self.clone();
        drop(spawn(async move {
            yield_now().await;
            state.scheduled.set(false);
            state.dispatch();
        }));
    }
}
