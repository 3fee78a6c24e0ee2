//! Events that an owner sends without being asked.

use std::fmt;

use forebay_block::{BufList, Geometry};
use forebay_messenger::wire::codec::{MalformedPayload, PayloadReader, PayloadWriter};

use super::fields::{read_end, read_geometry, read_text, write_geometry, write_text};
use super::reservation::NumberedTable;
use super::{MessageParts, TEXT_MAX};

/// Event of a session.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ForwardEvent {
    /// The size of the volume has changed.
    Size {
        /// Number of the session.
        session: u64,
        /// Geometry from now on.
        geometry: Geometry,
    },
    /// The reservations of the volume have changed; the forwarder tells the owner when it has adopted them.
    Reservations {
        /// Number of the session.
        session: u64,
        /// Table from now on.
        table: NumberedTable,
    },
    /// The session has ended: every request that was executed in it has been answered before this.
    Ended {
        /// Number of the session.
        session: u64,
        /// Reason of the end.
        why: SessionEndReason,
    },
}

/// Reason of the end of a session.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SessionEndReason {
    /// The volume moves to another owner.
    Moved,
    /// The owner has closed the volume.
    Closed,
    /// The group has declared this life of the forwarder dead.
    StartEnded,
    /// The forwarder has violated the protocol, or another reason.
    Other(String),
}

impl fmt::Display for SessionEndReason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Moved => "the volume is being moved",
            Self::Closed => "the owner has closed the volume",
            Self::StartEnded => "the group has declared this start of the forwarding daemon dead",
            Self::Other(text) => text,
        })
    }
}

impl ForwardEvent {
    /// Returns the number of the session.
    pub fn session(&self) -> u64 {
        match self {
            Self::Size { session, .. } | Self::Reservations { session, .. } | Self::Ended { session, .. } => *session,
        }
    }

    /// Encodes the event.
    pub fn encode(&self) -> MessageParts {
        let mut writer = PayloadWriter::new();
        let mut payload = BufList::new();
        match self {
            Self::Size { session, geometry } => {
                writer.u8(1).u64(*session);
                write_geometry(&mut writer, geometry);
            }
            Self::Reservations { session, table } => {
                writer.u8(3).u64(*session).u64(table.number);
                payload = table.payload();
            }
            Self::Ended { session, why } => {
                let (code, text) = match why {
                    SessionEndReason::Moved => (1, ""),
                    SessionEndReason::Closed => (2, ""),
                    SessionEndReason::StartEnded => (3, ""),
                    SessionEndReason::Other(text) => (4, &text[..]),
                };
                writer.u8(2).u64(*session).u8(code);
                write_text(&mut writer, text, TEXT_MAX);
            }
        }
        (writer.finish(), payload)
    }

    /// Decodes an event, which owns the data segment from then on.
    ///
    /// # Errors
    /// If it is malformed.
    pub fn decode(front: &[u8], data: BufList) -> Result<Self, MalformedPayload> {
        let mut reader = PayloadReader::new(front, "an event of the owner of a volume");
        let code = reader.u8()?;
        if code != 3 && !data.is_empty() {
            return Err(reader.malformed());
        }
        let event = match code {
            1 => Self::Size { session: reader.u64()?, geometry: read_geometry(&mut reader)? },
            2 => {
                let (session, code) = (reader.u64()?, reader.u8()?);
                let text = read_text(&mut reader, TEXT_MAX)?;
                let why = match code {
                    1 => SessionEndReason::Moved,
                    2 => SessionEndReason::Closed,
                    3 => SessionEndReason::StartEnded,
                    _ => SessionEndReason::Other(text),
                };
                Self::Ended { session, why }
            }
            3 => {
                let (session, number) = (reader.u64()?, reader.u64()?);
                let table = NumberedTable::read(number, &data, &reader)?.ok_or(reader.malformed())?;
                Self::Reservations { session, table }
            }
            _ => return Err(reader.malformed()),
        };
        read_end(&reader)?;
        Ok(event)
    }
}
