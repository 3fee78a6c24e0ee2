//! Requests of a forwarder.

use std::time::Duration;

use forebay_block::reservation::{HostId, ReservationAction};
use forebay_block::{Advice, BlockRequest, BufList, Extent};
use forebay_messenger::wire::codec::{MalformedPayload, PayloadReader, PayloadWriter};

use super::fields::{
    read_advice, read_end, read_extent, read_flag, read_lease, read_text, write_advice, write_extent, write_lease,
    write_text,
};
use super::reservation::{read_action, read_host, write_action, write_host};
use super::{ForwarderStart, MessageParts, TRANSFER_MAX, VERSION, VOLUME_MAX};

/// Request of a forwarder to the owner of a volume.
#[derive(Debug, Clone)]
pub enum ForwardRequest {
    /// Opens a session of a volume.
    Open {
        /// Identity of the volume, the same at all daemons.
        volume: String,
        /// Life of the forwarding daemon.
        start: ForwarderStart,
        /// Number of the session, higher than all that this life has opened before.
        session: u64,
        /// Lease that the session is to have; the owner's answer has the one that counts.
        lease: Duration,
    },
    /// Executes a request to the volume in a session.
    Volume {
        /// Number of the session.
        session: u64,
        /// Request to execute.
        request: VolumeRequest,
    },
    /// Tells that the forwarder has adopted a reservation table: all requests that an earlier one has admitted have completed.
    Adopted {
        /// Number of the session.
        session: u64,
        /// Number of the table.
        number: u64,
    },
    /// Ends a session.
    Close {
        /// Number of the session.
        session: u64,
    },
    /// Renews the leases of all sessions of the connection.
    Renew {
        /// Newest grant that the forwarder has received over the connection; 0 if none.
        grant: u64,
    },
}

/// Class of a request to a volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RequestClass {
    /// Access of a host, which has the same result if it is executed twice.
    Repeatable,
    /// Access of a host that is not executed twice.
    OnceOnly,
    /// Reservation action, which is not executed twice, and which no reservation table admits or forbids.
    Reservation,
}

impl RequestClass {
    /// Returns whether executing the request twice may have another result than executing it once.
    pub fn is_once_only(self) -> bool {
        self != Self::Repeatable
    }

    /// Returns whether a reservation table decides whether the request is allowed.
    pub fn is_access(self) -> bool {
        self != Self::Reservation
    }
}

/// Part of a volume that a request reads or changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RequestFootprint {
    /// No part, as for a flush.
    Nothing,
    /// Reads an extent.
    Reads(Extent),
    /// Changes an extent, and may read it.
    Changes(Extent),
    /// Changes the reservations.
    Reservations,
}

impl RequestFootprint {
    /// Returns whether the request changes something.
    pub fn is_change(&self) -> bool {
        matches!(self, Self::Changes(_) | Self::Reservations)
    }

    /// Returns whether the result of this request depends on whether a change is made before or after it, or the other way
    /// round.
    pub fn depends_on(&self, change: &Self) -> bool {
        match (self, change) {
            (Self::Reads(extent) | Self::Changes(extent), Self::Changes(changed)) => extent.overlaps(*changed),
            (Self::Reservations, Self::Reservations) => true,
            _ => false,
        }
    }
}

/// Request to a volume.
#[derive(Debug, Clone)]
pub enum VolumeRequest {
    /// Block request with its access advice.
    Submit(BlockRequest, Advice),
    /// Maps the stored extents, as many as fit into an answer.
    Map(Extent),
    /// Executes a reservation action of a host.
    Reserve(HostId, ReservationAction),
}

impl VolumeRequest {
    /// Returns the bytes of payload that the request and its answer have together.
    pub fn cost(&self) -> usize {
        match self {
            Self::Submit(BlockRequest::Read(extent), _) => extent.len as usize,
            Self::Submit(BlockRequest::Write { data, .. }, _) => data.len(),
            Self::Submit(BlockRequest::CompareAndWrite { expect, data, .. }, _) => expect.len() + data.len(),
            _ => 0,
        }
    }

    /// Returns the part of the volume that the request concerns.
    pub fn footprint(&self) -> RequestFootprint {
        match self {
            Self::Reserve(..) => RequestFootprint::Reservations,
            Self::Map(extent) => RequestFootprint::Reads(*extent),
            Self::Submit(request, _) => match request.extent() {
                None => RequestFootprint::Nothing,
                Some(extent) if request.is_write() => RequestFootprint::Changes(extent),
                Some(extent) => RequestFootprint::Reads(extent),
            },
        }
    }

    /// Encodes the request, in a session.
    pub fn encode(&self, session: u64) -> MessageParts {
        let mut writer = PayloadWriter::with_capacity(64);
        let mut payload = BufList::new();
        match self {
            Self::Map(extent) => {
                writer.u8(3).u64(session);
                write_extent(&mut writer, *extent);
            }
            Self::Reserve(host, action) => {
                writer.u8(6).u64(session);
                write_host(&mut writer, host);
                write_action(&mut writer, action);
            }
            Self::Submit(request, advice) => {
                writer.u8(4).u64(session);
                write_advice(&mut writer, *advice);
                payload = write_block(&mut writer, request);
            }
        }
        (writer.finish(), payload)
    }

    /// Returns what a forwarder and an owner have to know of the request.
    pub fn class(&self) -> RequestClass {
        match self {
            Self::Submit(BlockRequest::CompareAndWrite { .. }, _) => RequestClass::OnceOnly,
            Self::Submit(..) | Self::Map(_) => RequestClass::Repeatable,
            Self::Reserve(..) => RequestClass::Reservation,
        }
    }
}

impl ForwardRequest {
    /// Encodes the request.
    pub fn encode(&self) -> MessageParts {
        let mut writer = PayloadWriter::with_capacity(64);
        match self {
            Self::Open { volume, start, session, lease } => {
                writer.u8(1).u16(VERSION).u64(*session).raw(start);
                write_text(&mut writer, volume, VOLUME_MAX);
                write_lease(&mut writer, *lease);
            }
            Self::Close { session } => {
                writer.u8(2).u64(*session);
            }
            Self::Adopted { session, number } => {
                writer.u8(5).u64(*session).u64(*number);
            }
            Self::Renew { grant } => {
                writer.u8(7).u64(*grant);
            }
            Self::Volume { session, request } => return request.encode(*session),
        }
        (writer.finish(), BufList::new())
    }

    /// Decodes a request, which owns the data segment from then on.
    ///
    /// # Errors
    /// If it is malformed.
    pub fn decode(front: &[u8], data: BufList) -> Result<Self, MalformedPayload> {
        let mut reader = PayloadReader::new(front, "a request to the owner of a volume");
        let (action, mut payload) = (reader.u8()?, Some(data).filter(|data| !data.is_empty()));
        let request = match action {
            1 => {
                // A later version keeps the beginning as it is; the owner answers with the version that it has.
                let version = reader.u16()?;
                let (session, start) = (reader.u64()?, reader.array()?);
                let volume = read_text(&mut reader, VOLUME_MAX)?;
                let lease = read_lease(&mut reader)?;
                if version == 0 || session == 0 {
                    return Err(reader.malformed());
                }
                Self::Open { volume, start, session, lease }
            }
            2 => Self::Close { session: reader.u64()? },
            3 => Self::Volume { session: reader.u64()?, request: VolumeRequest::Map(read_extent(&mut reader)?) },
            4 => {
                let (session, advice) = (reader.u64()?, read_advice(&mut reader)?);
                let request = read_block(&mut reader, payload.take())?;
                Self::Volume { session, request: VolumeRequest::Submit(request, advice) }
            }
            5 => Self::Adopted { session: reader.u64()?, number: reader.u64()? },
            6 => {
                let (session, host) = (reader.u64()?, read_host(&mut reader)?);
                let action = read_action(&mut reader)?;
                Self::Volume { session, request: VolumeRequest::Reserve(host, action) }
            }
            7 => Self::Renew { grant: reader.u64()? },
            _ => return Err(reader.malformed()),
        };
        if payload.is_some() {
            return Err(reader.malformed());
        }
        read_end(&reader)?;
        Ok(request)
    }
}

/// Writes a block request; returns its payload.
fn write_block(writer: &mut PayloadWriter, request: &BlockRequest) -> BufList {
    match request {
        BlockRequest::Read(extent) => {
            writer.u8(1);
            write_extent(writer, *extent);
        }
        BlockRequest::Write { offset, data, fua } => {
            writer.u8(2).u64(*offset).u8(u8::from(*fua));
            return data.clone();
        }
        BlockRequest::Discard(extent) => {
            writer.u8(3);
            write_extent(writer, *extent);
        }
        BlockRequest::WriteZeroes { extent, no_unmap, fua } => {
            writer.u8(4);
            write_extent(writer, *extent);
            writer.u8(u8::from(*no_unmap)).u8(u8::from(*fua));
        }
        BlockRequest::CompareAndWrite { offset, expect, data, fua } => {
            writer.u8(5).u64(*offset).u8(u8::from(*fua));
            let mut payload = expect.clone();
            payload.append(data.clone());
            return payload;
        }
        BlockRequest::Flush => {
            writer.u8(6);
        }
    }
    BufList::new()
}

fn read_block(reader: &mut PayloadReader<'_>, payload: Option<BufList>) -> Result<BlockRequest, MalformedPayload> {
    let malformed = reader.malformed();
    let code = reader.u8()?;
    if payload.is_some() && !matches!(code, 2 | 5) {
        return Err(malformed);
    }
    let payload = payload.unwrap_or_default();
    if payload.len() > TRANSFER_MAX as usize {
        return Err(malformed);
    }
    let request = match code {
        1 => BlockRequest::Read(read_extent(reader)?),
        2 => BlockRequest::Write { offset: reader.u64()?, data: payload, fua: read_flag(reader)? },
        3 => BlockRequest::Discard(read_extent(reader)?),
        4 => BlockRequest::WriteZeroes {
            extent: read_extent(reader)?,
            no_unmap: read_flag(reader)?,
            fua: read_flag(reader)?,
        },
        5 => {
            let (offset, fua, half) = (reader.u64()?, read_flag(reader)?, payload.len() / 2);
            if !payload.len().is_multiple_of(2) {
                return Err(malformed);
            }
            let (expect, data) = (payload.slice(0..half), payload.slice(half..2 * half));
            BlockRequest::CompareAndWrite { offset, expect, data, fua }
        }
        6 => BlockRequest::Flush,
        _ => return Err(malformed),
    };
    let ends = match &request {
        BlockRequest::Read(extent) => extent.len <= u64::from(TRANSFER_MAX),
        BlockRequest::Write { offset, data, .. } | BlockRequest::CompareAndWrite { offset, data, .. } => {
            offset.checked_add(data.len() as u64).is_some()
        }
        _ => true,
    };
    if ends { Ok(request) } else { Err(malformed) }
}
