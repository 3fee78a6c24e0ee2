//! Reservation tables and actions, as they cross the wire.

use std::sync::Arc;

use forebay_block::BufList;
use forebay_block::reservation::{
    HostId, REGISTRANTS_MAX, Refusal, ReservationAction, ReservationChange, ReservationTable, ReservationType,
};
use forebay_messenger::wire::codec::{MalformedPayload, PayloadReader, PayloadWriter};
use forebay_reactor::Buf;

use super::RESERVATIONS_MAX;
use super::fields::{read_end, read_flag};

/// Result of a reservation action that was executed: the change, or why the table refuses it.
pub type ReservationOutcome = Result<ReservationChange, Refusal>;

/// Reservation table with its number at the owner, which is never 0.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NumberedTable {
    /// Number, higher than those of all tables that the owner has sent before.
    pub number: u64,
    /// Table of the owner.
    pub table: Arc<ReservationTable>,
}

impl NumberedTable {
    pub(super) fn payload(&self) -> BufList {
        Buf::copy_of(&self.table.encode_whole()).into()
    }

    /// Reads the table with a number from a data segment.
    pub(super) fn read(
        number: u64,
        data: &BufList,
        reader: &PayloadReader<'_>,
    ) -> Result<Option<Self>, MalformedPayload> {
        if number == 0 {
            return if data.is_empty() { Ok(None) } else { Err(reader.malformed()) };
        }
        if data.len() > RESERVATIONS_MAX {
            return Err(reader.malformed());
        }
        let table = ReservationTable::decode_whole(&data.to_vec()).map_err(|_| reader.malformed())?;
        Ok(Some(Self { number, table: Arc::new(table) }))
    }
}

pub(super) fn write_host(writer: &mut PayloadWriter, host: &HostId) {
    writer.blob(host.as_bytes());
}

pub(super) fn read_host(reader: &mut PayloadReader<'_>) -> Result<HostId, MalformedPayload> {
    HostId::new(reader.blob()?).ok_or(reader.malformed())
}

fn write_key(writer: &mut PayloadWriter, key: Option<u64>) {
    writer.u8(u8::from(key.is_some())).u64(key.unwrap_or(0));
}

fn read_key(reader: &mut PayloadReader<'_>) -> Result<Option<u64>, MalformedPayload> {
    match (read_flag(reader)?, reader.u64()?) {
        (true, key) => Ok(Some(key)),
        (false, 0) => Ok(None),
        (false, _) => Err(reader.malformed()),
    }
}

fn write_persist(writer: &mut PayloadWriter, persist: Option<bool>) {
    writer.u8(persist.map_or(0, |persist| 1 + u8::from(persist)));
}

fn read_persist(reader: &mut PayloadReader<'_>) -> Result<Option<bool>, MalformedPayload> {
    match reader.u8()? {
        0 => Ok(None),
        1 => Ok(Some(false)),
        2 => Ok(Some(true)),
        _ => Err(reader.malformed()),
    }
}

fn read_kind(reader: &mut PayloadReader<'_>) -> Result<ReservationType, MalformedPayload> {
    ReservationType::from_nvme(reader.u8()?).ok_or(reader.malformed())
}

pub(super) fn write_action(writer: &mut PayloadWriter, action: &ReservationAction) {
    match action {
        ReservationAction::Register { current, new, persist } => {
            writer.u8(1);
            write_key(writer, *current);
            writer.u64(*new);
            write_persist(writer, *persist);
        }
        ReservationAction::Add { key, persist } => {
            writer.u8(2).u64(*key);
            write_persist(writer, *persist);
        }
        ReservationAction::Replace { current, new, persist } => {
            writer.u8(3);
            write_key(writer, *current);
            writer.u64(*new);
            write_persist(writer, *persist);
        }
        ReservationAction::Remove { current, persist } => {
            writer.u8(4);
            write_key(writer, *current);
            write_persist(writer, *persist);
        }
        ReservationAction::Move { key, new, to, unregister, persist } => {
            writer.u8(5).u64(*key).u64(*new);
            write_host(writer, to);
            writer.u8(u8::from(*unregister));
            write_persist(writer, *persist);
        }
        ReservationAction::Reserve { key, kind } => {
            writer.u8(6).u64(*key).u8(kind.nvme());
        }
        ReservationAction::Release { key, kind } => {
            writer.u8(7);
            write_key(writer, *key);
            writer.u8(kind.nvme());
        }
        ReservationAction::Clear { key } => {
            writer.u8(8);
            write_key(writer, *key);
        }
        ReservationAction::Preempt { key, victim, kind, abort } => {
            writer.u8(9).u64(*key).u64(*victim).u8(kind.nvme()).u8(u8::from(*abort));
        }
        ReservationAction::HoldWhole => {
            writer.u8(10);
        }
        ReservationAction::LetGoWhole => {
            writer.u8(11);
        }
        ReservationAction::Reset => {
            writer.u8(12);
        }
    }
}

pub(super) fn read_action(reader: &mut PayloadReader<'_>) -> Result<ReservationAction, MalformedPayload> {
    Ok(match reader.u8()? {
        1 => ReservationAction::Register {
            current: read_key(reader)?,
            new: reader.u64()?,
            persist: read_persist(reader)?,
        },
        2 => ReservationAction::Add { key: reader.u64()?, persist: read_persist(reader)? },
        3 => ReservationAction::Replace {
            current: read_key(reader)?,
            new: reader.u64()?,
            persist: read_persist(reader)?,
        },
        4 => ReservationAction::Remove { current: read_key(reader)?, persist: read_persist(reader)? },
        5 => ReservationAction::Move {
            key: reader.u64()?,
            new: reader.u64()?,
            to: read_host(reader)?,
            unregister: read_flag(reader)?,
            persist: read_persist(reader)?,
        },
        6 => ReservationAction::Reserve { key: reader.u64()?, kind: read_kind(reader)? },
        7 => ReservationAction::Release { key: read_key(reader)?, kind: read_kind(reader)? },
        8 => ReservationAction::Clear { key: read_key(reader)? },
        9 => ReservationAction::Preempt {
            key: reader.u64()?,
            victim: reader.u64()?,
            kind: read_kind(reader)?,
            abort: read_flag(reader)?,
        },
        10 => ReservationAction::HoldWhole,
        11 => ReservationAction::LetGoWhole,
        12 => ReservationAction::Reset,
        _ => return Err(reader.malformed()),
    })
}

/// Refusals by their codes, from 1 on.
const REFUSALS: [Refusal; 5] =
    [Refusal::Conflict, Refusal::Invalid, Refusal::WrongKind, Refusal::TooMany, Refusal::Unsupported];

/// Writes an outcome; returns its payload, the hosts whose commands are aborted.
pub(super) fn write_outcome(writer: &mut PayloadWriter, outcome: &ReservationOutcome) -> BufList {
    match outcome {
        Err(refusal) => {
            let code = REFUSALS.iter().position(|known| known == refusal).map_or(0, |at| at + 1);
            writer.u8(code as u8);
            BufList::new()
        }
        Ok(change) => {
            writer.u8(0).u32(change.abort.len() as u32);
            if change.abort.is_empty() {
                return BufList::new();
            }
            let mut hosts = PayloadWriter::new();
            change.abort.iter().for_each(|host| write_host(&mut hosts, host));
            Buf::copy_of(&hosts.finish()).into()
        }
    }
}

pub(super) fn read_outcome(
    reader: &mut PayloadReader<'_>,
    data: &BufList,
) -> Result<ReservationOutcome, MalformedPayload> {
    let code = reader.u8()?;
    let count = if code == 0 { reader.u32()? as usize } else { 0 };
    if count > REGISTRANTS_MAX || (count == 0) != data.is_empty() || data.len() > RESERVATIONS_MAX {
        return Err(reader.malformed());
    }
    if code != 0 {
        return REFUSALS.get(usize::from(code) - 1).map(|refusal| Err(*refusal)).ok_or(reader.malformed());
    }
    let hosts = data.to_vec();
    let mut hosts = PayloadReader::new(&hosts, "hosts whose commands are aborted");
    let abort = (0..count).map(|_| read_host(&mut hosts)).collect::<Result<_, _>>()?;
    read_end(&hosts)?;
    Ok(Ok(ReservationChange { abort }))
}
