//! Requests of all logs of one core to a peer, which share messages.
//!
//! Requests that are asked for in one turn of the reactor are one message. While several messages are on their way, further
//! requests wait for an answer, so that a busy peer gets few large messages, and one that is not gets each request at once.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::Rc;
use std::time::Duration;

use forebay_block::{BufList, Error, ErrorKind, Result};
use forebay_messenger::{Connection, Message};
use forebay_reactor::sync::{Notify, oneshot};
use forebay_reactor::{Buf, spawn, timeout, yield_now};

use super::wire::{
    GROUP_DATA_MAX, GROUP_REQUESTS_MAX, KIND_ANSWER, KIND_GROUP, KIND_REQUEST, ReplicaAnswer, ReplicaRequest,
    decode_answers, encode_group,
};

/// Number of messages on their way to a peer from which on requests wait for more to share a message with.
const MESSAGES: usize = 2;
/// Bytes of waiting entries that are worth a message of their own.
const FULL: usize = 64 << 10;
/// Longest time that a request waits: a peer may answer one log late, and not the others.
const WAIT_MAX: Duration = Duration::from_micros(200);

/// Requests of all logs of one core to its peers.
#[derive(Default)]
pub struct RequestGroups {
    senders: RefCell<Vec<Rc<GroupSender>>>,
    requests: Cell<u64>,
    messages: Rc<Cell<u64>>,
}

impl RequestGroups {
    /// Asks a peer, in the order of the calls, and waits for the answer.
    ///
    /// # Errors
    /// If the connection ends before.
    pub async fn ask(&self, connection: &Connection, request: &ReplicaRequest, data: BufList) -> Result<ReplicaAnswer> {
        let (answer, answered) = oneshot::channel();
        self.requests.set(self.requests.get() + 1);
        let sender = self.sender(connection);
        sender.bytes.set(sender.bytes.get() + data.len());
        sender.waiting.borrow_mut().push_back(WaitingRequest { request: request.clone(), data, answer });
        if sender.running.replace(true) {
            sender.changed.notify_all();
        } else {
            drop(spawn(sender.run()));
        }
        answered.await.unwrap_or_else(|| Err(ended("the request was dropped")))
    }

    /// Returns the number of requests, and of messages that they were sent in.
    pub fn sent(&self) -> (u64, u64) {
        (self.requests.get(), self.messages.get())
    }

    fn sender(&self, connection: &Connection) -> Rc<GroupSender> {
        let mut senders = self.senders.borrow_mut();
        if let Some(sender) = senders.iter().find(|sender| sender.connection == *connection) {
            return sender.clone();
        }
        senders.retain(|sender| sender.connection.reason().is_none() || sender.running.get());
        let sender = Rc::new(GroupSender {
            connection: connection.clone(),
            waiting: RefCell::default(),
            bytes: Cell::new(0),
            in_flight: Cell::new(0),
            running: Cell::new(false),
            messages: self.messages.clone(),
            changed: Notify::new(),
        });
        senders.push(sender.clone());
        sender
    }
}

fn ended(why: impl std::fmt::Display) -> Error {
    Error::new(ErrorKind::Io, format!("a replica of the write log: {why}"))
}

/// Request that waits for a message.
struct WaitingRequest {
    request: ReplicaRequest,
    data: BufList,
    answer: oneshot::Sender<Result<ReplicaAnswer>>,
}

/// Requests over one connection.
struct GroupSender {
    connection: Connection,
    waiting: RefCell<VecDeque<WaitingRequest>>,
    /// Bytes of data of the waiting ones.
    bytes: Cell<usize>,
    /// Messages on their way.
    in_flight: Cell<usize>,
    /// Set while a task sends what waits.
    running: Cell<bool>,
    messages: Rc<Cell<u64>>,
    /// Signaled when a request or an answer has come.
    changed: Notify,
}

impl GroupSender {
    /// Sends what waits, until nothing does.
    async fn run(self: Rc<Self>) {
        loop {
            // Other logs' requests of this turn join.
            yield_now().await;
            let ready = || self.in_flight.get() < MESSAGES || self.bytes.get() >= FULL;
            if !ready() {
                let _ = timeout(WAIT_MAX, self.changed.wait_until(ready)).await;
            }
            let group = self.next_group();
            if group.is_empty() {
                self.running.set(false);
                return;
            }
            self.in_flight.set(self.in_flight.get() + 1);
            self.messages.set(self.messages.get() + 1);
            drop(spawn(self.clone().send(group)));
        }
    }

    /// Takes the next requests out that fit into a message.
    fn next_group(&self) -> Vec<WaitingRequest> {
        let mut waiting = self.waiting.borrow_mut();
        let (mut count, mut bytes) = (0, 0);
        for request in waiting.iter().take(GROUP_REQUESTS_MAX) {
            if count > 0 && bytes + request.data.len() > GROUP_DATA_MAX {
                break;
            }
            (count, bytes) = (count + 1, bytes + request.data.len());
        }
        self.bytes.set(self.bytes.get() - bytes);
        waiting.drain(..count).collect()
    }

    async fn send(self: Rc<Self>, mut group: Vec<WaitingRequest>) {
        let mut data = BufList::new();
        let parts: Vec<_> = group
            .iter_mut()
            .map(|part| {
                let len = part.data.len();
                data.append(std::mem::take(&mut part.data));
                (&part.request, len)
            })
            .collect();
        let message = match &parts[..] {
            [(request, _)] => Message::new(KIND_REQUEST).front(Buf::copy_of(&request.encode())),
            parts => Message::new(KIND_GROUP).front(Buf::copy_of(&encode_group(parts))),
        };
        let count = group.len();
        let answered = match self.connection.request(message.data(data)).await {
            Ok(answer) => answers(&answer, count).map_err(|error| error.to_string()),
            Err(error) => Err(error.to_string()),
        };
        self.in_flight.set(self.in_flight.get() - 1);
        self.changed.notify_all();
        match answered {
            Ok(answers) => group.into_iter().zip(answers).for_each(|(part, answer)| part.answer.send(Ok(answer))),
            Err(why) => group.into_iter().for_each(|part| part.answer.send(Err(ended(&why)))),
        }
    }
}

fn answers(message: &Message, count: usize) -> Result<Vec<ReplicaAnswer>> {
    let front = message.front.to_vec();
    let decoded = match message.kind {
        // Also the answer of a peer that refuses the whole message.
        KIND_ANSWER => ReplicaAnswer::decode(&front).map(|answer| vec![answer; count]),
        _ => decode_answers(&front),
    };
    let answers = decoded.map_err(|error| Error::new(ErrorKind::Io, error.to_string()))?;
    match answers.len() == count {
        true => Ok(answers),
        false => Err(Error::new(ErrorKind::Io, format!("{} answers to {count} requests", answers.len()))),
    }
}
