//! Stored form of a [`ReservationTable`]: `docs/formats/reservations.md`.

use std::str::FromStr;

use super::table::{
    EVENTS_MAX, EventKind, HeldReservation, HostId, REGISTRANTS_MAX, Registrant, ReservationEvent, ReservationTable,
    ReservationType,
};
use crate::error::{Error, ErrorKind, Result};

/// First word of the first line, before the version.
const HEADER: &str = "forebay-reservations";

/// Maximum size of a table's stored events, in bytes.
const EVENTS_LEN_MAX: usize = 64 << 10;

/// Table as it is stored for several daemons, with its incarnation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Stored {
    pub(super) table: ReservationTable,
    /// Incarnation that non-persistent registrations belong to; 0 in format version 1, in which everything is
    /// persistent.
    pub(super) incarnation: u64,
}

impl ReservationTable {
    /// Encodes the table for storage; `None` when nothing needs to survive a restart.
    pub fn encode(&self) -> Option<Vec<u8>> {
        if !self.persist || self.registrants.is_empty() {
            return None;
        }
        Some(format!("{HEADER} 1\n{}end\n", self.lines()).into_bytes())
    }

    fn lines(&self) -> String {
        let mut text = String::new();
        for Registrant { host, key } in &self.registrants {
            text += &format!("registrant {key:016x} {}\n", hex(host.as_bytes()));
        }
        if let Some(HeldReservation { kind, holder }) = &self.held {
            text += &format!("reservation {} {}\n", kind.scsi(), hex(holder.as_bytes()));
        }
        text
    }

    /// Decodes the stored form.  Registrations that are not persistent are dropped.
    ///
    /// # Errors
    /// [`ErrorKind::Corrupt`] when it is damaged and [`ErrorKind::Unsupported`] for a newer version: losing a
    /// reservation would let a host write that must not.
    pub fn decode(bytes: &[u8]) -> Result<Self> {
        let table = Stored::decode(bytes)?.table;
        Ok(if table.persist { table } else { ReservationTable::new() })
    }
}

/// Incarnation in tables that daemons send to each other, where it has no meaning.
const SENT_INCARNATION: u64 = 1;

impl ReservationTable {
    /// Encodes everything that hosts can see of the table, for other daemons: version 2 of the stored form.
    pub fn encode_whole(&self) -> Vec<u8> {
        Stored { table: self.clone(), incarnation: SENT_INCARNATION }.encode()
    }

    /// Decodes a table of another daemon.
    ///
    /// # Errors
    /// As for [`decode`](Self::decode).
    pub fn decode_whole(bytes: &[u8]) -> Result<Self> {
        Ok(Stored::decode(bytes)?.table)
    }
}

impl Stored {
    /// Encodes the stored form, version 2.
    pub(super) fn encode(&self) -> Vec<u8> {
        let table = &self.table;
        let mut text = format!("{HEADER} 2\nincarnation {:016x}\n", self.incarnation);
        text += &format!("generation {}\npersist {}\ntold {}\n", table.generation, u8::from(table.persist), table.told);
        text += &format!("revision {}\n", table.revision);
        text += &table.lines();
        // Newest events, as far as there is space.
        let events: Vec<String> = table.events.iter().map(event_line).collect();
        let mut room = EVENTS_LEN_MAX;
        let fits = |line: &&String| {
            room = room.saturating_sub(line.len());
            room > 0
        };
        let count = events.iter().rev().take_while(fits).count();
        text.extend(events[events.len() - count..].iter().map(String::as_str));
        text += "end\n";
        text.into_bytes()
    }

    /// Decodes any version of the stored form; see [`ReservationTable::decode`].
    pub(super) fn decode(bytes: &[u8]) -> Result<Self> {
        let text = std::str::from_utf8(bytes).map_err(|_| damaged("not text"))?;
        let mut lines = text.lines();
        let header = lines.next().and_then(|line| line.strip_prefix(HEADER)?.strip_prefix(' '));
        let mut stored = Stored { table: ReservationTable::new(), incarnation: 0 };
        let table = &mut stored.table;
        match header {
            Some("1") => table.persist = true,
            Some("2") => {
                let mut field = |name: &str| {
                    let value = lines.next().and_then(|line| line.strip_prefix(name)?.strip_prefix(' '));
                    value.ok_or_else(|| damaged("a field is missing"))
                };
                stored.incarnation = key_of(field("incarnation")?).ok_or_else(|| damaged("an invalid incarnation"))?;
                table.generation = number(field("generation")?)?;
                table.persist = number::<u8>(field("persist")?)? != 0;
                table.told = number(field("told")?)?;
                // Absent where an earlier version of this program stored the table.
                let mut after = lines.clone();
                if let Some(revision) = after.next().and_then(|line| line.strip_prefix("revision ")) {
                    table.revision = number(revision)?;
                    lines = after;
                }
            }
            Some(other) => {
                let what = format!("the stored reservations are of a newer version ({other})");
                return Err(Error::new(ErrorKind::Unsupported, what));
            }
            None => return Err(damaged("the first line is missing")),
        }
        loop {
            let line = lines.next().ok_or_else(|| damaged("cut short"))?;
            if line == "end" {
                break;
            }
            if !table.take_line(line)? && (stored.incarnation == 0 || !table.take_event(line)?) {
                return Err(damaged("an unknown line"));
            }
        }
        match lines.next() {
            None => Ok(stored),
            Some(_) => Err(damaged("something after its end")),
        }
    }
}

impl ReservationTable {
    /// Decodes a registrant or the reservation; returns `false` if the line is neither, or in the wrong place.
    fn take_line(&mut self, line: &str) -> Result<bool> {
        let mut words = line.split(' ');
        let words = (words.next(), words.next(), words.next(), words.next());
        if self.held.is_some() || !self.events.is_empty() {
            return Ok(false);
        }
        match words {
            (Some("registrant"), Some(key), Some(host), None) => {
                let key = key_of(key).ok_or_else(|| damaged("an invalid key"))?;
                let host = unhex(host).ok_or_else(|| damaged("an invalid host"))?;
                if self.key_of(&host).is_some() || self.registrants.len() == REGISTRANTS_MAX {
                    return Err(damaged("a host is there twice, or there are too many"));
                }
                self.registrants.push(Registrant { host, key });
            }
            (Some("reservation"), Some(kind), Some(host), None) => {
                let kind = kind.parse().ok().and_then(ReservationType::from_scsi);
                let kind = kind.ok_or_else(|| damaged("an unknown kind of reservation"))?;
                let holder = unhex(host).filter(|host| self.key_of(host).is_some());
                let holder = holder.ok_or_else(|| damaged("the holder is not registered"))?;
                self.held = Some(HeldReservation { kind, holder });
            }
            _ => return Ok(false),
        }
        Ok(true)
    }

    /// Decodes an event; returns `false` if the line is none.
    fn take_event(&mut self, line: &str) -> Result<bool> {
        let mut words = line.split(' ');
        let (Some("event"), Some(count), Some(kind)) = (words.next(), words.next(), words.next()) else {
            return Ok(false);
        };
        let count = number(count)?;
        let kind = EVENT_KINDS.iter().find(|(name, _)| *name == kind).ok_or_else(|| damaged("an invalid event"))?.1;
        let hosts: Option<Vec<HostId>> = words.map(unhex).collect();
        let hosts = hosts.filter(|hosts| !hosts.is_empty() && hosts.len() <= REGISTRANTS_MAX);
        let hosts = hosts.ok_or_else(|| damaged("an event without a host"))?;
        let after = self.events.back().map_or(0, |event| event.number);
        if count <= after || count > self.told || self.events.len() == EVENTS_MAX {
            return Err(damaged("events are out of order"));
        }
        self.events.push_back(ReservationEvent { number: count, kind, hosts: hosts.into() });
        Ok(true)
    }
}

const EVENT_KINDS: [(&str, EventKind); 3] = [
    ("released", EventKind::Released),
    ("preempted", EventKind::RegistrationPreempted),
    ("cleared", EventKind::Cleared),
];

fn event_line(event: &ReservationEvent) -> String {
    let name = EVENT_KINDS.iter().find(|(_, kind)| *kind == event.kind).map_or("", |(name, _)| name);
    let hosts: String = event.hosts.iter().map(|host| format!(" {}", hex(host.as_bytes()))).collect();
    format!("event {} {name}{hosts}\n", event.number)
}

fn damaged(why: &str) -> Error {
    Error::new(ErrorKind::Corrupt, format!("the stored reservations: {why}"))
}

fn number<T: FromStr>(word: &str) -> Result<T> {
    // Rejects a leading sign, which `parse` would accept.
    let digits = word.bytes().all(|byte| byte.is_ascii_digit());
    word.parse().ok().filter(|_| digits).ok_or_else(|| damaged("an invalid number"))
}

/// Decodes a key: hexadecimal, up to 64 bits, not 0.
fn key_of(word: &str) -> Option<u64> {
    u64::from_str_radix(word, 16).ok().filter(|&key| key != 0)
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn unhex(text: &str) -> Option<HostId> {
    if !text.is_ascii() || !text.len().is_multiple_of(2) {
        return None;
    }
    let pair = |at: usize| u8::from_str_radix(&text[at..at + 2], 16).ok();
    // Checks the digits first: `from_str_radix` would accept a sign.
    let bytes: Option<Vec<u8>> = if text.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        (0..text.len()).step_by(2).map(pair).collect()
    } else {
        None
    };
    HostId::new(&bytes?)
}
