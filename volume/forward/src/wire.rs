//! Messages between a forwarder and the owner of a volume: `docs/formats/forward.md`.
//!
//! A request names the session that it belongs to.  Payloads are in the data segment of a message and are not copied;
//! everything else is in its front segment.

mod answer;
mod event;
mod failure;
mod fields;
mod request;
mod reservation;
#[cfg(test)]
mod tests;

use std::ops::RangeInclusive;
use std::time::Duration;

use forebay_block::BufList;
use forebay_messenger::wire::codec::MalformedPayload;
use forebay_messenger::{Message, message_priority};
use forebay_reactor::Buf;

pub use answer::{ForwardAnswer, ForwardRefusal};
pub use event::{ForwardEvent, SessionEndReason};
pub use failure::RemoteCause;
pub use request::{ForwardRequest, RequestClass, RequestFootprint, VolumeRequest};
pub use reservation::{NumberedTable, ReservationOutcome};

/// Message type of requests to an owner.
pub const KIND_REQUEST: u16 = 0x0201;
/// Message type of its answers.
pub const KIND_ANSWER: u16 = 0x0202;
/// Message type of its events.
pub const KIND_EVENT: u16 = 0x0203;

/// Version of the protocol.
pub const VERSION: u16 = 1;
/// Maximum length of the data of one message in bytes.
pub const TRANSFER_MAX: u32 = 4 << 20;
/// Maximum length of a front segment in bytes.
pub const FRONT_MAX: usize = 64 << 10;
/// Maximum length of the identity of a volume in bytes.
pub const VOLUME_MAX: usize = 1024;
/// Maximum length of any other text in bytes.
pub const TEXT_MAX: usize = 1024;
/// Maximum number of extents in one answer to a map request.
pub const MAP_RUNS_MAX: usize = 4096;

/// Maximum length of a reservation table, and of the hosts in an answer to an action, in bytes.
pub const RESERVATIONS_MAX: usize = 2 << 20;

/// Limits of the lease of a session.
pub const LEASES: RangeInclusive<Duration> = Duration::from_millis(100)..=Duration::from_secs(60);

/// Id of one life of a forwarding daemon, drawn by it.
pub type ForwarderStart = [u8; 16];

/// Front segment and data segment of a message.
pub type MessageParts = (Vec<u8>, BufList);

/// Returns a message of these parts.  All messages have one priority, so that they stay in order.
pub fn message(kind: u16, (front, data): MessageParts) -> Message {
    Message::new(kind).front(Buf::copy_of(&front)).data(data).priority(message_priority::DEFAULT)
}

/// Returns a message that overtakes the others, as it concerns a time and not their order.
pub fn urgent(message: Message) -> Message {
    message.priority(message_priority::HIGH)
}

/// Returns a reply of these parts.
pub fn reply(request: &Message, (front, data): MessageParts) -> Message {
    request.reply(KIND_ANSWER).front(Buf::copy_of(&front)).data(data).priority(message_priority::DEFAULT)
}

/// Returns the front segment of a message as bytes in one piece.
///
/// # Errors
/// If it is longer than any of this protocol.
pub fn front(message: &Message) -> Result<Vec<u8>, MalformedPayload> {
    if message.front.len() > FRONT_MAX {
        return Err(MalformedPayload { what: "a message about a forwarded volume", newer: None });
    }
    Ok(message.front.to_vec())
}
