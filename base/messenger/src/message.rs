//! Messages: type, header fields and segments.

use std::fmt;

use forebay_reactor::{Buf, BufList};

use crate::throttle::BudgetShare;
use crate::wire::MessageHeader;
use crate::wire::header::FLAG_COMPLETE;

/// Priorities; higher goes first.  The numbers are Ceph's.
pub mod priority {
    /// Background work.
    pub const LOW: u16 = 64;
    /// Default of most messages.
    pub const DEFAULT: u16 = 127;
    /// Work that other clients wait for.
    pub const HIGH: u16 = 196;
    /// Cluster-critical traffic.
    pub const HIGHEST: u16 = 255;
}

/// Role of a message: request, reply or one-way.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum MessageRole {
    /// One-way message; expects no reply.
    #[default]
    OneWay,
    /// Request; the reply carries its tid.
    Request,
    /// Reply to the request with this tid.
    Reply,
    /// Operation on a memory window of the receiver's messenger; not passed to handlers.
    Window,
}

impl MessageRole {
    pub(crate) fn code(self) -> u16 {
        self as u16
    }

    /// Decodes a role; unknown codes of later versions count as one-way.
    pub(crate) fn from_code(code: u16) -> Self {
        match code {
            1 => Self::Request,
            2 => Self::Reply,
            3 => Self::Window,
            _ => Self::OneWay,
        }
    }
}

/// Message with a type and up to three segments, each a list of buffers that are not copied.
#[derive(Default)]
pub struct Message {
    /// Message type, in the number space of the messenger's user.
    pub kind: u16,
    /// Priority; higher is dispatched first.  Messages of one priority stay in order.
    pub priority: u16,
    /// Version of the encoding of `front`.
    pub version: u16,
    /// Oldest version of the decoder that can read `front`.
    pub compat_version: u16,
    /// Request, reply or one-way.
    pub role: MessageRole,
    /// Matches a reply with its request; set by [`Connection::request`](crate::Connection::request), or given to
    /// [`Connection::request_as`](crate::Connection::request_as).
    pub tid: u64,
    /// Front segment: the encoded structure of the message.
    pub front: BufList,
    /// Middle segment; Ceph uses it for attributes.
    pub middle: BufList,
    /// Data segment: the payload.
    pub data: BufList,
    /// Share of the receive budget; released when the message is dropped.
    pub(crate) held: Option<BudgetShare>,
}

/// Size bound: messages are moved from queue to queue, and past this size each move becomes a function call.
const _: () = assert!(size_of::<Message>() <= 128);

impl Message {
    /// Creates an empty one-way message of this type.
    #[inline]
    pub fn new(kind: u16) -> Self {
        Self { kind, priority: priority::DEFAULT, version: 1, compat_version: 1, ..Self::default() }
    }

    /// Sets the front segment.
    pub fn front(mut self, front: impl Into<BufList>) -> Self {
        self.front = front.into();
        self
    }

    /// Sets the data segment.
    pub fn data(mut self, data: impl Into<BufList>) -> Self {
        self.data = data.into();
        self
    }

    /// Sets the priority.
    pub fn priority(mut self, priority: u16) -> Self {
        self.priority = priority;
        self
    }

    /// Creates an empty reply to this request, of type `kind`, with its tid and priority.
    #[inline]
    pub fn reply(&self, kind: u16) -> Self {
        Self { role: MessageRole::Reply, tid: self.tid, priority: self.priority, ..Self::new(kind) }
    }

    /// Returns the number of bytes in all segments.
    #[inline]
    pub fn len(&self) -> usize {
        self.front.len() + self.middle.len() + self.data.len()
    }

    /// Returns true if all segments are empty.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Releases the message's share of the receive budget before the message is dropped: for receivers that keep the
    /// message and account for it themselves.
    pub fn detach(&mut self) {
        self.held = None;
    }

    #[inline]
    pub(crate) fn header(&self, seq: u64, ack_seq: u64) -> MessageHeader {
        MessageHeader {
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
    pub(crate) fn received(header: &MessageHeader, segments: [Option<Buf>; 3], held: BudgetShare) -> Self {
        let [front, middle, data] = segments;
        let list = |segment: Option<Buf>| segment.map_or_else(BufList::new, BufList::from);
        let (front, middle, data) = (list(front), list(middle), list(data));
        Self {
            kind: header.kind,
            priority: header.priority,
            version: header.version,
            compat_version: header.compat_version,
            role: MessageRole::from_code(header.reserved),
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
