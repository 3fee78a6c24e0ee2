//! The stored form of a [`Table`]: `docs/formats/reservations.md`.

use super::table::{Held, HostId, Kind, REGISTRANTS_MAX, Registrant, Table};
use crate::error::{Error, ErrorKind, Result};

/// The first line: the format's name and version.
const HEADER: &str = "forebay-reservations 1";

impl Table {
    /// What must be stored for the table to survive; `None` when nothing must.
    pub fn encode(&self) -> Option<Vec<u8>> {
        if !self.persist || self.registrants.is_empty() {
            return None;
        }
        let mut text = format!("{HEADER}\n");
        for Registrant { host, key } in &self.registrants {
            text += &format!("registrant {key:016x} {}\n", hex(host.as_bytes()));
        }
        if let Some(Held { kind, holder }) = &self.held {
            text += &format!("reservation {} {}\n", kind.scsi(), hex(holder.as_bytes()));
        }
        text += "end\n";
        Some(text.into_bytes())
    }

    /// From the stored form.  What is damaged is refused with [`ErrorKind::Corrupt`] and a newer version with
    /// [`ErrorKind::Unsupported`]: forgetting a reservation would let a host write that must not.
    pub fn decode(bytes: &[u8]) -> Result<Self> {
        let damaged = |why: &str| Error::new(ErrorKind::Corrupt, format!("the stored reservations: {why}"));
        let text = std::str::from_utf8(bytes).map_err(|_| damaged("not text"))?;
        let mut lines = text.lines();
        match lines.next() {
            Some(HEADER) => {}
            Some(line) if line.starts_with("forebay-reservations ") => {
                let what = format!("the stored reservations are of a newer version ({line})");
                return Err(Error::new(ErrorKind::Unsupported, what));
            }
            _ => return Err(damaged("the first line is missing")),
        }
        let mut table = Table::new();
        table.persist = true;
        loop {
            let line = lines.next().ok_or_else(|| damaged("cut short"))?;
            let mut words = line.split(' ');
            match (words.next(), words.next(), words.next(), words.next()) {
                (Some("end"), None, None, None) => break,
                (Some("registrant"), Some(key), Some(host), None) if table.held.is_none() => {
                    let key = u64::from_str_radix(key, 16).ok().filter(|&key| key != 0);
                    let key = key.ok_or_else(|| damaged("a key is none"))?;
                    let host = unhex(host).ok_or_else(|| damaged("a host is none"))?;
                    if table.key_of(&host).is_some() || table.registrants.len() == REGISTRANTS_MAX {
                        return Err(damaged("a host is there twice, or there are too many"));
                    }
                    table.registrants.push(Registrant { host, key });
                }
                (Some("reservation"), Some(kind), Some(host), None) if table.held.is_none() => {
                    let kind = kind.parse().ok().and_then(Kind::from_scsi);
                    let kind = kind.ok_or_else(|| damaged("a kind of reservation that there is not"))?;
                    let holder = unhex(host).filter(|host| table.key_of(host).is_some());
                    let holder = holder.ok_or_else(|| damaged("the holder is not registered"))?;
                    table.held = Some(Held { kind, holder });
                }
                _ => return Err(damaged("a line that means nothing")),
            }
        }
        match lines.next() {
            None => Ok(table),
            Some(_) => Err(damaged("something after its end")),
        }
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

fn unhex(text: &str) -> Option<HostId> {
    if !text.is_ascii() || !text.len().is_multiple_of(2) {
        return None;
    }
    let pair = |at: usize| u8::from_str_radix(&text[at..at + 2], 16).ok();
    // A sign would be taken for a digit's.
    let bytes: Option<Vec<u8>> = if text.bytes().all(|byte| byte.is_ascii_hexdigit()) {
        (0..text.len()).step_by(2).map(pair).collect()
    } else {
        None
    };
    HostId::new(&bytes?)
}
