//! Notifications between the clients of an image, sent on its header.

use super::{CephReader, CephWriter};

/// Sender of a notification: client number and watch cookie.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct ClientId {
    pub(crate) number: u64,
    pub(crate) watch: u64,
}

/// Notification message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum NotifyMessage {
    /// Sender has acquired the exclusive lock.
    AcquiredLock(ClientId),
    /// Sender has released the exclusive lock.
    ReleasedLock(ClientId),
    /// Sender requests the exclusive lock.
    RequestLock {
        client: ClientId,
        /// Sender will take the lock by force if it is not released.
        force: bool,
    },
    /// Header has changed.
    HeaderUpdate,
    /// Sender has changed the image's reservations, or queries their owner. A Forebay extension: Ceph's clients treat
    /// it as an unknown message.
    Reservations(ClientId),
    /// Request to the lock owner (a resize, a snapshot, ...), by its operation number.
    Operation(u32),
    /// Message that needs no response from the lock owner.
    Other(u32),
}

const ACQUIRED: u32 = 0;
const RELEASED: u32 = 1;
const REQUEST: u32 = 2;
const HEADER_UPDATE: u32 = 3;
/// Operation number far from librbd's, which count up from 0.
const RESERVATIONS: u32 = 0x4642_0001;

/// Returns whether the lock owner performs this operation for other clients: flatten, resize, snapshots created,
/// removed, renamed, protected and unprotected, object maps rebuilt, renames, features, migration, sparsify,
/// metadata.
fn is_operation(op: u32) -> bool {
    matches!(op, 6..=17 | 20)
}

impl NotifyMessage {
    /// Encodes the message as librbd does.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let client = |op: u32, client: &ClientId| CephWriter::new().u32(op).u64(client.number).u64(client.watch);
        let body = match self {
            NotifyMessage::AcquiredLock(from) => client(ACQUIRED, from),
            NotifyMessage::ReleasedLock(from) => client(RELEASED, from),
            NotifyMessage::RequestLock { client: from, force } => client(REQUEST, from).u8((*force).into()),
            NotifyMessage::HeaderUpdate => CephWriter::new().u32(HEADER_UPDATE),
            NotifyMessage::Reservations(from) => client(RESERVATIONS, from),
            NotifyMessage::Operation(op) | NotifyMessage::Other(op) => CephWriter::new().u32(*op),
        };
        CephWriter::new().versioned(6, 1, body).done()
    }

    /// Decodes a message; `None` if it is malformed. Empty input is a header update of the oldest clients.
    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        if bytes.is_empty() {
            return Some(NotifyMessage::HeaderUpdate);
        }
        let mut message = CephReader::new(bytes).versioned(7)?;
        let body = &mut message.body;
        let client = |body: &mut CephReader<'_>| {
            if message.version < 2 {
                return Some(ClientId::default());
            }
            Some(ClientId { number: body.u64()?, watch: body.u64()? })
        };
        Some(match body.u32()? {
            ACQUIRED => NotifyMessage::AcquiredLock(client(body)?),
            RELEASED => NotifyMessage::ReleasedLock(client(body)?),
            REQUEST => {
                let client = client(body)?;
                let force = message.version >= 3 && body.u8()? != 0;
                NotifyMessage::RequestLock { client, force }
            }
            HEADER_UPDATE => NotifyMessage::HeaderUpdate,
            RESERVATIONS => NotifyMessage::Reservations(client(body)?),
            op if is_operation(op) => NotifyMessage::Operation(op),
            op => NotifyMessage::Other(op),
        })
    }
}

/// Encodes the response to a request: 0, or a negative errno.
pub(crate) fn encode_response(result: i32) -> Vec<u8> {
    CephWriter::new().versioned(1, 1, CephWriter::new().u32(result as u32)).done()
}

/// Decodes the result in a response; `None` if there is none, from a client that is not concerned.
pub(crate) fn decode_response(bytes: &[u8]) -> Option<i32> {
    Some(CephReader::new(bytes).versioned(1)?.body.u32()? as i32)
}

/// Encodes the response to [`NotifyMessage::Reservations`]: the incarnation that owns the non-persistent reservations.
pub(crate) fn encode_incarnation(incarnation: u64) -> Vec<u8> {
    CephWriter::new().versioned(1, 1, CephWriter::new().u32(RESERVATIONS).u64(incarnation)).done()
}

/// Decodes the response to [`NotifyMessage::Reservations`]; `None` for any other client's.
pub(crate) fn decode_incarnation(bytes: &[u8]) -> Option<u64> {
    let mut body = CephReader::new(bytes).versioned(1)?.body;
    if body.u32()? == RESERVATIONS { body.u64() } else { None }
}

#[cfg(test)]
mod tests {
    use super::super::unhex;
    use super::*;

    #[test]
    fn messages_round_trip_and_byte_for_byte() {
        let client = ClientId { number: 4123, watch: 0x55aa };
        let request = NotifyMessage::RequestLock { client, force: false };
        let bytes = unhex("0601 15000000 02000000 1b10000000000000 aa55000000000000 00");
        assert_eq!(request.encode(), bytes);
        for message in [
            NotifyMessage::AcquiredLock(client),
            NotifyMessage::ReleasedLock(client),
            request,
            NotifyMessage::HeaderUpdate,
            NotifyMessage::Reservations(client),
            NotifyMessage::Operation(8),
            NotifyMessage::Other(18),
        ] {
            let bytes = message.encode();
            assert_eq!(NotifyMessage::decode(&bytes), Some(message));
            for at in 1..bytes.len() {
                assert_eq!(NotifyMessage::decode(&bytes[..at]), None);
            }
        }
    }

    #[test]
    fn older_messages() {
        assert_eq!(NotifyMessage::decode(&[]), Some(NotifyMessage::HeaderUpdate));
        let first = unhex("0101 04000000 02000000");
        let expected = NotifyMessage::RequestLock { client: ClientId::default(), force: false };
        assert_eq!(NotifyMessage::decode(&first), Some(expected));
    }

    #[test]
    fn responses() {
        assert_eq!(encode_response(-95), unhex("0101 04000000 a1ffffff"));
        assert_eq!(decode_response(&encode_response(-30)), Some(-30));
        assert_eq!(decode_response(&[]), None);
        assert_eq!(encode_incarnation(5), unhex("0101 0c000000 01004246 0500000000000000"));
        assert_eq!(decode_incarnation(&encode_incarnation(u64::MAX)), Some(u64::MAX));
        for other in [encode_response(0), encode_response(-95), vec![]] {
            assert_eq!(decode_incarnation(&other), None, "librbd's");
        }
    }
}
