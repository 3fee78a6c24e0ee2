//! What is sent and received.

use std::fmt;

use forebay_reactor::{Buf, BufList};

use crate::throttle::Held;
use crate::wire::Header;
use crate::wire::header::FLAG_COMPLETE;

/// Priorities; higher goes first.  The numbers are Ceph's.
pub mod priority {
    /// What can wait.
    pub const LOW: u16 = 64;
    /// Most messages.
    pub const DEFAULT: u16 = 127;
    /// What others wait for.
    pub const HIGH: u16 = 196;
    /// What holds the cluster together.
    pub const HIGHEST: u16 = 255;
}

/// Whether a message asks, answers, or neither.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Role {
    /// Nobody waits for an answer.
    #[default]
    OneWay,
    /// It is to be answered under the same tid.
    Request,
    /// The answer to the request with this tid.
    Reply,
    /// Asks for something to be done with a window of the receiver's messenger; handlers do not see it.
    Window,
}

impl Role {
    pub(crate) fn code(self) -> u16 {
        self as u16
    }

    /// Whatever a later version may send counts as one-way.
    pub(crate) fn from_code(code: u16) -> Self {
        match code {
            1 => Self::Request,
            2 => Self::Reply,
            3 => Self::Window,
            _ => Self::OneWay,
        }
    }
}

/// A message: its type, and up to three segments, each a list of buffers that are not copied.
#[derive(Default)]
pub struct Message {
    /// What it is, in the space of whoever uses the messenger.
    pub kind: u16,
    /// Higher goes first; messages of one priority stay in order.
    pub priority: u16,
    /// Of the encoding of `front`.
    pub version: u16,
    /// The oldest version that can read `front`.
    pub compat_version: u16,
    /// Whether it asks or answers.
    pub role: Role,
    /// Matches a reply with its request; set by [`Connection::request`](crate::Connection::request), or given to
    /// [`Connection::request_as`](crate::Connection::request_as).
    pub tid: u64,
    /// The message's own structure.
    pub front: BufList,
    /// What is neither of the others; Ceph uses it for attributes.
    pub middle: BufList,
    /// Payload.
    pub data: BufList,
    /// Its share of what its receiver has set aside; given back when the message is dropped.
    pub(crate) held: Option<Held>,
}

/// Messages are moved from queue to queue; past this size each move would be a call.
const _: () = assert!(size_of::<Message>() <= 128);

impl Message {
    /// A one-way message of this type, with nothing in it.
    #[inline]
    pub fn new(kind: u16) -> Self {
        Self { kind, priority: priority::DEFAULT, version: 1, compat_version: 1, ..Self::default() }
    }

    /// With this front.
    pub fn front(mut self, front: impl Into<BufList>) -> Self {
        self.front = front.into();
        self
    }

    /// With this payload.
    pub fn data(mut self, data: impl Into<BufList>) -> Self {
        self.data = data.into();
        self
    }

    /// With this priority.
    pub fn priority(mut self, priority: u16) -> Self {
        self.priority = priority;
        self
    }

    /// A reply to this request, of type `kind`, with nothing in it yet.
    #[inline]
    pub fn reply(&self, kind: u16) -> Self {
        Self { role: Role::Reply, tid: self.tid, priority: self.priority, ..Self::new(kind) }
    }

    /// Bytes of all segments.
    #[inline]
    pub fn len(&self) -> usize {
        self.front.len() + self.middle.len() + self.data.len()
    }

    /// There is not one byte in it.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Gives back its share of what the receiver has set aside, before the message is dropped: for who keeps the
    /// message, and counts by itself what it keeps.
    pub fn detach(&mut self) {
        self.held = None;
    }

    #[inline]
    pub(crate) fn header(&self, seq: u64, ack_seq: u64) -> Header {
        Header {
            seq,
            tid: self.tid,
            kind: self.kind,
            priority: self.priority,
            version: self.version,
            data_off: 0,
            ack_seq,
            flags: FLAG_COMPLETE,
            compat_version: self.compat_version,
            reserved: self.role.code(),
        }
    }

    #[inline]
    pub(crate) fn received(header: &Header, segments: [Option<Buf>; 3], held: Held) -> Self {
        let [front, middle, data] = segments;
        let list = |segment: Option<Buf>| segment.map_or_else(BufList::new, BufList::from);
        let (front, middle, data) = (list(front), list(middle), list(data));
        Self {
            kind: header.kind,
            priority: header.priority,
            version: header.version,
            compat_version: header.compat_version,
            role: Role::from_code(header.reserved),
            tid: header.tid,
            front,
            middle,
            data,
            held: Some(held),
        }
    }
}

impl fmt::Debug for Message {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (front, middle, data) = (self.front.len(), self.middle.len(), self.data.len());
        write!(f, "Message({:?} {} tid {}: {front} + {middle} + {data} bytes)", self.role, self.kind, self.tid)
    }
}
