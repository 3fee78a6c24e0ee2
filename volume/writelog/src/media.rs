//! What a log is kept on.  The layer above decides what is written and when; a medium decides where, and makes it last.

pub(crate) mod later;
pub mod pmem;
pub mod ssd;

use std::collections::VecDeque;
use std::rc::Rc;

use forebay_accel::crc32c::crc32c_parts;
use forebay_block::{Buf, BufList, Error, ErrorKind, Extent, LocalFuture, Result};
use forebay_reactor::wall_clock;

use crate::entries::{Entry, Kind};
use crate::format::EntryRecord;
use crate::ticket::Ticket;

/// A change that is to be appended.
pub(crate) struct Piece {
    pub(crate) kind: Kind,
    pub(crate) extent: Extent,
    /// Nothing for kinds without payload.
    pub(crate) payload: BufList,
    pub(crate) generation: u64,
    pub(crate) ticket: Rc<Ticket>,
}

impl Piece {
    /// So many generations before its own it was submitted.
    pub(crate) fn slack(&self) -> u64 {
        self.generation.saturating_sub(self.ticket.arrived)
    }
}

/// A piece with its place on the medium.
pub(crate) struct Placed {
    pub(crate) piece: Piece,
    pub(crate) place: u32,
    pub(crate) crc: u32,
}

impl Placed {
    pub(crate) fn new(piece: Piece, place: u32) -> Self {
        let crc = crc32c_parts(piece.payload.parts().iter().map(|part| &part[..]));
        Self { piece, place, crc }
    }

    pub(crate) fn record(&self, seq: u64, time_ms: u64) -> EntryRecord {
        let Piece { kind, extent, generation, .. } = self.piece;
        EntryRecord { kind, extent, seq, generation, place: self.place, crc: self.crc, time_ms }
    }

    pub(crate) fn entry(&self) -> Entry {
        Entry::new(self.piece.kind, self.piece.extent, self.place, self.crc).with_slack(self.piece.slack())
    }
}

/// Pieces that are being appended together.
pub(crate) struct Group {
    /// Number of its first entry.
    pub(crate) first_seq: u64,
    /// The medium's own name for it; groups are named in order.
    pub(crate) number: u64,
    pub(crate) pieces: Vec<Placed>,
    /// What is left to be done before it lasts; nothing when that is done already.
    pub(crate) work: Option<LocalFuture<Result<()>>>,
}

/// What was found on a medium.
pub(crate) struct Recovered {
    /// Entries with their generations, oldest first; the first has the number `tail_seq`.
    pub(crate) entries: Vec<EntryRecord>,
    pub(crate) tail_seq: u64,
}

/// Milliseconds since 1970.
pub(crate) fn now_ms() -> u64 {
    wall_clock().as_millis() as u64
}

/// A place for one log.
pub(crate) trait Medium {
    /// Bytes that payloads may take.
    fn capacity(&self) -> u64;

    /// Bytes that cannot be written now.
    fn used(&self) -> u64;

    /// Takes as many pieces from the queue as fit and go together, and begins to append them; nothing when there is
    /// no room for the first one.  `durable`: they last when the group's work is done; otherwise only when a
    /// [`sync`](Self::sync) that began after that is.
    fn take(&self, queue: &mut VecDeque<Piece>, first_seq: u64, durable: bool) -> Option<Group>;

    /// A group is appended, and so are all before it.
    fn finished(&self, group: u64);

    /// The payload of an entry, verified.
    fn read(&self, entry: &Entry) -> LocalFuture<Result<Buf>>;

    /// The same for several entries, in the order in which they are given; what lies close together may be read together.
    fn read_many(&self, entries: &[Entry]) -> Vec<LocalFuture<Result<Buf>>> {
        entries.iter().map(|entry| self.read(entry)).collect()
    }

    /// A later entry of the same generation has overwritten this one wholly; neither reads nor the backend need it.
    fn hidden(&self, entry: &Entry);

    /// The backend holds everything before `tail_seq` durably; `gone` are the entries with a payload that were not
    /// [`hidden`](Self::hidden).
    fn retire(&self, tail_seq: u64, gone: &[Entry]);

    /// Returns a number such that no recovery replays an entry before it, whichever copy of the superblock it can read.
    /// Every [`persist_tail`](Self::persist_tail) writes one copy: after two it is the tail.
    fn persisted_tail(&self) -> u64;

    /// Makes the tail last.  `clean`: the log is closed, and everything is at the backend.  Run to its end: the next one
    /// must not begin beside it.
    fn persist_tail(&self, clean: bool) -> LocalFuture<Result<()>>;

    /// Makes everything last that is appended now.
    fn sync(&self) -> LocalFuture<Result<()>>;
}

/// What was found on a medium is not what a log can have left.
pub(crate) fn corrupt(text: impl std::fmt::Display) -> Error {
    Error::new(ErrorKind::Corrupt, format!("the write log is damaged: {text}"))
}

/// Entries in the order of their numbers are in that of their generations, too.
pub(crate) fn check_generations<'a>(entries: impl IntoIterator<Item = &'a EntryRecord>) -> Result<()> {
    let mut generation = 0;
    for entry in entries {
        if entry.generation < generation {
            return Err(corrupt(format_args!("entry {} is of an older generation than the one before", entry.seq)));
        }
        generation = entry.generation;
    }
    Ok(())
}
