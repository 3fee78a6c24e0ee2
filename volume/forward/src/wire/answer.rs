//! Answers of an owner.

use std::time::Duration;

use forebay_block::{BufList, Error, ExtentMap, ExtentState, Geometry};
use forebay_messenger::wire::codec::{MalformedPayload, PayloadReader, PayloadWriter};

use super::failure::{read_error, write_error};
use super::fields::{read_end, read_geometry, read_lease, read_text, write_geometry, write_lease, write_text};
use super::reservation::{NumberedTable, ReservationOutcome, read_outcome, write_outcome};
use super::{MAP_RUNS_MAX, MessageParts, TEXT_MAX, TRANSFER_MAX, VERSION};

/// Answer of the owner of a volume.
#[derive(Debug, Clone)]
pub enum ForwardAnswer {
    /// The session is open.
    Opened {
        /// Term in which the owner owns the volume.
        term: u64,
        /// Geometry of the volume.
        geometry: Geometry,
        /// Reservations of the volume, which the forwarder adopts before it sends anything in the session; `None` if the
        /// volume cannot be reserved.
        reservations: Option<NumberedTable>,
        /// Lease of the session.
        lease: Duration,
    },
    /// The request was not executed, and never will be.
    Refused(ForwardRefusal),
    /// The request was executed.
    Done,
    /// The read was executed; its data.
    Data(BufList),
    /// The request failed with an error of the owner's device.
    Failed(Error),
    /// The reservation action was executed or refused, and all forwarders have adopted the table.
    Reserved(ReservationOutcome),
    /// Map of a beginning of the extent that was asked for.
    Mapped(ExtentMap),
    /// The leases of all sessions of the connection count from the grant that the request has named.
    Renewed {
        /// Grant to name next.
        grant: u64,
    },
}

/// Reason for which an owner does not execute a request or open a session.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ForwardRefusal {
    /// Another daemon owns the volume.
    #[error("another daemon owns the volume ({hint:?})")]
    NotOwner {
        /// Name of that daemon, or nothing.
        hint: String,
    },
    /// The volume is being moved.
    #[error("the volume is being moved")]
    Moving,
    /// The owner has too many sessions.
    #[error("the owner has too many sessions")]
    Busy,
    /// The daemon knows no such volume.
    #[error("the daemon does not know the volume")]
    Unknown,
    /// The session has ended, or never began.
    #[error("the session has ended")]
    NoSession,
    /// The group has declared this life of the forwarder dead.
    #[error("the group has declared this start of the forwarding daemon dead")]
    StartEnded,
    /// Refused for another reason.
    #[error("{0}")]
    Other(String),
}

impl ForwardRefusal {
    fn write(&self, writer: &mut PayloadWriter) {
        let (code, text) = match self {
            Self::NotOwner { hint } => (1, &hint[..]),
            Self::Moving => (2, ""),
            Self::Busy => (3, ""),
            Self::Unknown => (4, ""),
            Self::NoSession => (5, ""),
            Self::StartEnded => (6, ""),
            Self::Other(text) => (7, &text[..]),
        };
        writer.u8(code);
        write_text(writer, text, TEXT_MAX);
    }

    /// Reads a refusal; one of a later version becomes `Other`.
    fn read(reader: &mut PayloadReader<'_>) -> Result<Self, MalformedPayload> {
        let (code, text) = (reader.u8()?, read_text(reader, TEXT_MAX)?);
        Ok(match code {
            1 => Self::NotOwner { hint: text },
            2 => Self::Moving,
            3 => Self::Busy,
            4 => Self::Unknown,
            5 => Self::NoSession,
            6 => Self::StartEnded,
            _ => Self::Other(text),
        })
    }
}

impl ForwardAnswer {
    /// Encodes the answer.  A map is cut to the number of extents that fit.
    pub fn encode(&self) -> MessageParts {
        let mut writer = PayloadWriter::with_capacity(64);
        let mut payload = BufList::new();
        match self {
            Self::Opened { term, geometry, reservations, lease } => {
                writer.u8(1).u16(VERSION).u64(*term);
                write_geometry(&mut writer, geometry);
                writer.u64(reservations.as_ref().map_or(0, |reservations| reservations.number));
                write_lease(&mut writer, *lease);
                payload = reservations.as_ref().map(NumberedTable::payload).unwrap_or_default();
            }
            Self::Refused(refusal) => {
                writer.u8(2);
                refusal.write(&mut writer);
            }
            Self::Done => {
                writer.u8(3);
            }
            Self::Data(data) => {
                writer.u8(4);
                payload = data.clone();
            }
            Self::Failed(error) => {
                writer.u8(5);
                write_error(&mut writer, error);
            }
            Self::Renewed { grant } => {
                writer.u8(8).u64(*grant);
            }
            Self::Reserved(outcome) => {
                writer.u8(7);
                payload = write_outcome(&mut writer, outcome);
            }
            Self::Mapped(map) => {
                let runs = &map.runs()[..map.runs().len().min(MAP_RUNS_MAX)];
                writer.u8(6).u64(runs.first().map_or(0, |run| run.extent.offset)).u32(runs.len() as u32);
                for run in runs {
                    let state = match run.state {
                        ExtentState::Data => 1,
                        ExtentState::Hole => 2,
                        ExtentState::Zero => 3,
                    };
                    writer.u64(run.extent.len).u8(state);
                }
            }
        }
        (writer.finish(), payload)
    }

    /// Decodes an answer, which owns the data segment from then on.
    ///
    /// # Errors
    /// If it is malformed.
    pub fn decode(front: &[u8], data: BufList) -> Result<Self, MalformedPayload> {
        let mut reader = PayloadReader::new(front, "an answer of the owner of a volume");
        let code = reader.u8()?;
        if (!matches!(code, 1 | 4 | 7) && !data.is_empty()) || data.len() > TRANSFER_MAX as usize {
            return Err(reader.malformed());
        }
        let answer = match code {
            1 => {
                let version = reader.u16()?;
                let (term, geometry) = (reader.u64()?, read_geometry(&mut reader)?);
                if version == 0 {
                    return Err(reader.malformed());
                }
                let (number, lease) = (reader.u64()?, read_lease(&mut reader)?);
                let reservations = NumberedTable::read(number, &data, &reader)?;
                Self::Opened { term, geometry, reservations, lease }
            }
            2 => Self::Refused(ForwardRefusal::read(&mut reader)?),
            3 => Self::Done,
            4 => Self::Data(data),
            5 => Self::Failed(read_error(&mut reader)?),
            6 => Self::Mapped(read_map(&mut reader)?),
            7 => Self::Reserved(read_outcome(&mut reader, &data)?),
            8 => Self::Renewed { grant: reader.u64()? },
            _ => return Err(reader.malformed()),
        };
        read_end(&reader)?;
        Ok(answer)
    }
}

fn read_map(reader: &mut PayloadReader<'_>) -> Result<ExtentMap, MalformedPayload> {
    let (mut offset, count) = (reader.u64()?, reader.u32()? as usize);
    if count > MAP_RUNS_MAX || (count == 0 && offset != 0) {
        return Err(reader.malformed());
    }
    let mut map = ExtentMap::new();
    let mut before = None;
    for _ in 0..count {
        let (len, state) = (reader.u64()?, reader.u8()?);
        let state = match state {
            1 => ExtentState::Data,
            2 => ExtentState::Hole,
            3 => ExtentState::Zero,
            _ => return Err(reader.malformed()),
        };
        let end = offset.checked_add(len).filter(|_| len > 0 && before != Some(state)).ok_or(reader.malformed())?;
        map.push(offset, len, state);
        (offset, before) = (end, Some(state));
    }
    Ok(map)
}
