//! Notifications between the clients of an image, sent on its header.

use super::{CephReader, CephWriter};
use crate::info::SnapshotKind;
use crate::owner::OwnerOperation;

/// Sender of a notification: client number and watch cookie.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub(crate) struct ClientId {
    pub(crate) number: u64,
    pub(crate) watch: u64,
}

/// Identity of a request to the lock owner that completes later: its sender, and its number there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Default)]
pub(crate) struct RequestId {
    pub(crate) client: ClientId,
    pub(crate) number: u64,
}

/// Request to the lock owner to carry out an operation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct OwnerRequest {
    /// Set if the owner answers at once, and sends the result in a message of its own; `None` if the answer is the result.
    pub(crate) id: Option<RequestId>,
    /// Operation; `None` for one that this client does not carry out for others.
    pub(crate) operation: Option<OwnerOperation>,
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
    /// Request to the lock owner.
    Operation(OwnerRequest),
    /// Progress of a request to the sender, in steps of which there are `total`.
    Progress { id: RequestId, done: u64, total: u64 },
    /// Result of a request to the sender: 0, or a negative errno.
    Completed { id: RequestId, result: i32 },
    /// Message that needs no response from the lock owner.
    Other(u32),
}

const ACQUIRED: u32 = 0;
const RELEASED: u32 = 1;
const REQUEST: u32 = 2;
const HEADER_UPDATE: u32 = 3;
const PROGRESS: u32 = 4;
const COMPLETED: u32 = 5;
const FLATTEN: u32 = 6;
const RESIZE: u32 = 7;
const SNAP_CREATE: u32 = 8;
const SNAP_REMOVE: u32 = 9;
const REBUILD_MAP: u32 = 10;
const SNAP_RENAME: u32 = 11;
const SNAP_PROTECT: u32 = 12;
const SNAP_UNPROTECT: u32 = 13;
const RENAME: u32 = 14;
const UPDATE_FEATURES: u32 = 15;
const MIGRATE: u32 = 16;
const SPARSIFY: u32 = 17;
const METADATA_UPDATE: u32 = 20;
/// Operation number far from librbd's, which count up from 0.
const RESERVATIONS: u32 = 0x4642_0001;

/// Returns whether librbd asks the lock owner for this operation.
fn is_operation(op: u32) -> bool {
    matches!(op, FLATTEN..=SPARSIFY | METADATA_UPDATE)
}

impl RequestId {
    fn read(body: &mut CephReader<'_>) -> Option<Self> {
        Some(Self { client: ClientId { number: body.u64()?, watch: body.u64()? }, number: body.u64()? })
    }

    /// Reads an id that only newer clients send.
    fn read_if_there(body: &mut CephReader<'_>) -> Option<Option<Self>> {
        if body.rest().is_empty() { Some(None) } else { Self::read(body).map(Some) }
    }

    fn write(&self, out: CephWriter) -> CephWriter {
        out.u64(self.client.number).u64(self.client.watch).u64(self.number)
    }
}

impl OwnerRequest {
    /// Reads the body of the request `op`, of a message of this version.
    fn read(op: u32, version: u8, body: &mut CephReader<'_>) -> Option<Self> {
        let kind = |body: &mut CephReader<'_>| {
            if version >= 6 { SnapshotKind::read(body) } else { Some(SnapshotKind::User) }
        };
        let request = |id, operation| Some(Self { id, operation: Some(operation) });
        match op {
            FLATTEN => request(Some(RequestId::read(body)?), OwnerOperation::Flatten),
            RESIZE => {
                let (size, id) = (body.u64()?, RequestId::read(body)?);
                let allow_shrink = if version >= 4 { body.u8()? != 0 } else { true };
                request(Some(id), OwnerOperation::Resize { size, allow_shrink })
            }
            SNAP_CREATE => {
                let (name, kind) = (body.string()?, kind(body)?);
                // Its flags follow, about hooks that there are none of here.
                let id = if version >= 7 { Some(RequestId::read(body)?) } else { None };
                match kind {
                    SnapshotKind::User => request(id, OwnerOperation::CreateSnapshot { name }),
                    _ => Some(Self { id, operation: None }),
                }
            }
            SNAP_REMOVE => {
                let (name, kind) = (body.string()?, kind(body)?);
                let id = RequestId::read_if_there(body)?;
                match kind {
                    SnapshotKind::User => request(id, OwnerOperation::RemoveSnapshot { name, in_trash: false }),
                    SnapshotKind::Trash { .. } => request(id, OwnerOperation::RemoveSnapshot { name, in_trash: true }),
                    _ => Some(Self { id, operation: None }),
                }
            }
            SNAP_RENAME => {
                let (snap, to) = (body.u64()?, body.string()?);
                kind(body)?;
                request(RequestId::read_if_there(body)?, OwnerOperation::RenameSnapshot { id: snap, to })
            }
            SNAP_PROTECT | SNAP_UNPROTECT => {
                let name = body.string()?;
                kind(body)?;
                let protected = op == SNAP_PROTECT;
                request(RequestId::read_if_there(body)?, OwnerOperation::ProtectSnapshot { name, protected })
            }
            RENAME => {
                let to = body.string()?;
                request(RequestId::read_if_there(body)?, OwnerOperation::Rename { to })
            }
            METADATA_UPDATE => {
                let key = body.string()?;
                let value = body.optional(|body| body.bytes().map(<[u8]>::to_vec))?;
                request(RequestId::read_if_there(body)?, OwnerOperation::SetMetadata { key, value })
            }
            REBUILD_MAP => request(Some(RequestId::read(body)?), OwnerOperation::RebuildObjectMap),
            UPDATE_FEATURES => {
                let (features, enabled) = (body.u64()?, body.u8()? != 0);
                request(RequestId::read_if_there(body)?, OwnerOperation::UpdateFeatures { features, enabled })
            }
            SPARSIFY => {
                let id = RequestId::read(body)?;
                request(Some(id), OwnerOperation::Sparsify { sparse_size: body.u64()? })
            }
            // Migrate.
            _ => Some(Self { id: Some(RequestId::read(body)?), operation: None }),
        }
    }

    /// Encodes the message as the oldest clients that know it do; requests without an operation are never sent.
    fn write(&self) -> CephWriter {
        let id = |out: CephWriter| match &self.id {
            Some(id) => id.write(out),
            None => out,
        };
        let out = |op: u32| CephWriter::new().u32(op);
        let user = |out: CephWriter| out.append(SnapshotKind::User.encode_new());
        match &self.operation {
            None => out(MIGRATE),
            Some(OwnerOperation::Flatten) => id(out(FLATTEN)),
            Some(OwnerOperation::Resize { size, allow_shrink }) => {
                id(out(RESIZE).u64(*size)).u8((*allow_shrink).into())
            }
            Some(OwnerOperation::CreateSnapshot { name }) => id(user(out(SNAP_CREATE).string(name))).u64(0),
            Some(OwnerOperation::RemoveSnapshot { name, in_trash }) => {
                let named = out(SNAP_REMOVE).string(name);
                id(if *in_trash { named.append(SnapshotKind::encode_trash("")) } else { user(named) })
            }
            Some(OwnerOperation::RenameSnapshot { id: snap, to }) => id(user(out(SNAP_RENAME).u64(*snap).string(to))),
            Some(OwnerOperation::ProtectSnapshot { name, protected }) => {
                id(user(out(if *protected { SNAP_PROTECT } else { SNAP_UNPROTECT }).string(name)))
            }
            Some(OwnerOperation::Rename { to }) => id(out(RENAME).string(to)),
            Some(OwnerOperation::RebuildObjectMap) => id(out(REBUILD_MAP)),
            Some(OwnerOperation::Sparsify { sparse_size }) => id(out(SPARSIFY)).u64(*sparse_size),
            Some(OwnerOperation::UpdateFeatures { features, enabled }) => {
                id(out(UPDATE_FEATURES).u64(*features).u8((*enabled).into()))
            }
            Some(OwnerOperation::SetMetadata { key, value }) => {
                let named = out(METADATA_UPDATE).string(key);
                id(match value {
                    Some(value) => named.u8(1).bytes(value),
                    None => named.u8(0),
                })
            }
        }
    }
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
            NotifyMessage::Operation(request) => request.write(),
            NotifyMessage::Progress { id, done, total } => {
                id.write(CephWriter::new().u32(PROGRESS)).u64(*done).u64(*total)
            }
            NotifyMessage::Completed { id, result } => id.write(CephWriter::new().u32(COMPLETED)).u32(*result as u32),
            NotifyMessage::Other(op) => CephWriter::new().u32(*op),
        };
        // In version 7 requests for snapshots have ids; newer owners expect ids of the others too.
        let version = match self {
            NotifyMessage::Operation(OwnerRequest { id: Some(_), .. }) => 7,
            _ => 6,
        };
        CephWriter::new().versioned(version, 1, body).done()
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
            PROGRESS => NotifyMessage::Progress { id: RequestId::read(body)?, done: body.u64()?, total: body.u64()? },
            COMPLETED => NotifyMessage::Completed { id: RequestId::read(body)?, result: body.u32()? as i32 },
            op if is_operation(op) => NotifyMessage::Operation(OwnerRequest::read(op, message.version, body)?),
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
        let id = RequestId { client, number: 5 };
        let request = NotifyMessage::RequestLock { client, force: false };
        let bytes = unhex("0601 15000000 02000000 1b10000000000000 aa55000000000000 00");
        assert_eq!(request.encode(), bytes);
        for message in [
            NotifyMessage::AcquiredLock(client),
            NotifyMessage::ReleasedLock(client),
            request,
            NotifyMessage::HeaderUpdate,
            NotifyMessage::Reservations(client),
            NotifyMessage::Progress { id, done: 3, total: 9 },
            NotifyMessage::Completed { id, result: -17 },
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
    fn requests_to_the_owner_round_trip() {
        let id = Some(RequestId { client: ClientId { number: 4123, watch: 7 }, number: 5 });
        let name = || "s".to_owned();
        for (id, operation) in [
            (id, OwnerOperation::Flatten),
            (id, OwnerOperation::Resize { size: 1 << 30, allow_shrink: true }),
            (id, OwnerOperation::CreateSnapshot { name: name() }),
            (None, OwnerOperation::RemoveSnapshot { name: name(), in_trash: false }),
            (id, OwnerOperation::RemoveSnapshot { name: name(), in_trash: true }),
            (None, OwnerOperation::RenameSnapshot { id: 17, to: name() }),
            (None, OwnerOperation::ProtectSnapshot { name: name(), protected: true }),
            (id, OwnerOperation::ProtectSnapshot { name: name(), protected: false }),
            (None, OwnerOperation::Rename { to: name() }),
            (id, OwnerOperation::RebuildObjectMap),
            (id, OwnerOperation::Sparsify { sparse_size: 8192 }),
            (None, OwnerOperation::UpdateFeatures { features: 24, enabled: true }),
            (None, OwnerOperation::SetMetadata { key: name(), value: Some(b"x".to_vec()) }),
            (id, OwnerOperation::SetMetadata { key: name(), value: None }),
        ] {
            let request = NotifyMessage::Operation(OwnerRequest { id, operation: Some(operation) });
            let bytes = request.encode();
            assert_eq!(NotifyMessage::decode(&bytes), Some(request));
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
