//! Log media. The layer above decides what is written and when; a medium decides the location, and makes it durable.

pub(crate) mod copy;
pub(crate) mod later;
pub(crate) mod members;
pub mod pmem;
pub(crate) mod shared_sync;
pub mod ssd;
pub(crate) mod storage;

use std::collections::VecDeque;
use std::rc::Rc;

use forebay_accel::crc32c::{crc32c, crc32c_parts};
use forebay_block::{Buf, BufList, Error, ErrorKind, Extent, LocalFuture, Result};
use forebay_reactor::wall_clock;

use crate::cipher::PayloadCipher;
use crate::entries::{EntryKind, LogEntry, stored_len};
use crate::format::EntryRecord;
use crate::pending_write::PendingWrite;
use crate::replication::RawAppend;

/// Piece of a change, to be appended as one entry.
pub(crate) struct AppendPiece {
    pub(crate) kind: EntryKind,
    pub(crate) extent: Extent,
    /// Payload; empty for kinds without one.
    pub(crate) payload: BufList,
    pub(crate) generation: u64,
    pub(crate) pending: Rc<PendingWrite>,
}

impl AppendPiece {
    /// Returns the number of generations by which the submission preceded the piece's own.
    pub(crate) fn slack(&self) -> u64 {
        self.generation.saturating_sub(self.pending.arrived)
    }
}

/// Piece with its place on the medium.
pub(crate) struct Placed {
    pub(crate) piece: AppendPiece,
    pub(crate) place: u32,
    /// Checksum of the payload, as it is stored.
    pub(crate) crc: u32,
    /// Encrypted payload, padded with zeroes to units of the medium.
    sealed: Option<BufList>,
}

impl Placed {
    /// Returns a piece as entry `seq`, whose payload is encrypted if there is a cipher; `unit` is that of the medium.
    pub(crate) fn new(piece: AppendPiece, place: u32, seq: u64, unit: usize, cipher: Option<&PayloadCipher>) -> Self {
        let cipher = cipher.filter(|_| !piece.payload.is_empty());
        let Some(cipher) = cipher else {
            let crc = crc32c_parts(piece.payload.parts().iter().map(|part| &part[..]));
            return Self { piece, place, crc, sealed: None };
        };
        let sealed = cipher.seal(seq, &piece.payload, unit);
        let crc = crc32c(&sealed[..stored_len(piece.payload.len() as u32, true) as usize]);
        Self { piece, place, crc, sealed: Some(sealed.into()) }
    }

    /// Returns the payload as it is stored.
    pub(crate) fn stored(&self) -> &BufList {
        self.sealed.as_ref().unwrap_or(&self.piece.payload)
    }

    /// Returns the entry; with a cipher, of its run, and otherwise of term `term`.
    pub(crate) fn record(&self, seq: u64, time_ms: u64, term: u32, cipher: Option<&PayloadCipher>) -> EntryRecord {
        let AppendPiece { kind, extent, generation, .. } = self.piece;
        let (term, salt) = cipher.map_or((term, None), |cipher| (cipher.run(), Some(cipher.salt())));
        EntryRecord { kind, extent, seq, generation, place: self.place, crc: self.crc, time_ms, term, salt }
    }

    pub(crate) fn entry(&self) -> LogEntry {
        LogEntry::new(self.piece.kind, self.piece.extent, self.place, self.crc).with_slack(self.piece.slack())
    }
}

/// Pieces appended together.
pub(crate) struct AppendGroup {
    /// Sequence number of the first entry.
    pub(crate) first_seq: u64,
    /// Number that the medium assigned, ascending.
    pub(crate) number: u64,
    pub(crate) pieces: Vec<Placed>,
    /// Remaining work until the group is durable; `None` if it is durable already.
    pub(crate) work: Option<LocalFuture<Result<()>>>,
    /// Bytes for other members of the log.
    pub(crate) raw: Option<RawAppend>,
}

/// Contents recovered from a medium.
pub(crate) struct Recovered {
    /// Entries with their generations, oldest first; the first has the sequence number `tail_seq`.
    pub(crate) entries: Vec<EntryRecord>,
    pub(crate) tail_seq: u64,
}

/// Returns the time in milliseconds since 1970.
pub(crate) fn now_ms() -> u64 {
    wall_clock().as_millis() as u64
}

/// Storage of one log.
pub(crate) trait Medium {
    /// Returns the payload capacity in bytes.
    fn capacity(&self) -> u64;

    /// Returns the bytes in use, which cannot be written now.
    fn used(&self) -> u64;

    /// Takes as many pieces from the queue as fit in one group, and starts to append them; `None` if there is no
    /// space for the first one. With `durable`, they are durable when the group's work is done; otherwise only after
    /// a [`sync`](Self::sync) that began after that.
    fn take(&self, queue: &mut VecDeque<AppendPiece>, first_seq: u64, durable: bool) -> Option<AppendGroup>;

    /// Notes that a group is appended, and all groups before it.
    fn finished(&self, group: u64);

    /// Encrypts the payloads of what is appended from now on.
    fn encrypt_with(&self, cipher: Rc<PayloadCipher>);

    /// Reads and verifies the payload of an entry, as it is stored.
    fn read(&self, entry: &LogEntry) -> LocalFuture<Result<Buf>>;

    /// Reads several payloads, in the order given; adjacent ones may be read together.
    fn read_many(&self, entries: &[LogEntry]) -> Vec<LocalFuture<Result<Buf>>> {
        entries.iter().map(|entry| self.read(entry)).collect()
    }

    /// Notes that a later entry of the same generation has superseded this one; neither reads nor write-back need it.
    fn superseded(&self, entry: &LogEntry);

    /// Notes that the backend durably holds everything before `tail_seq`; `gone` lists the retired entries with a
    /// payload that were not reported to [`superseded`](Self::superseded).
    fn retire(&self, tail_seq: u64, gone: &[LogEntry]);

    /// Returns a sequence number before which no recovery replays an entry, whichever copy of the superblock is
    /// readable. Every [`persist_tail`](Self::persist_tail) writes one copy: after two calls it is the tail.
    fn persisted_tail(&self) -> u64;

    /// Makes the tail durable. `clean`: the log is closed, and all data is at the backend. Must be run to completion:
    /// two calls must not overlap.
    fn persist_tail(&self, clean: bool) -> LocalFuture<Result<()>>;

    /// Makes everything appended so far durable.
    fn sync(&self) -> LocalFuture<Result<()>>;
}

/// Returns the error for contents of a medium that no log can have left.
pub(crate) fn corrupt(text: impl std::fmt::Display) -> Error {
    Error::new(ErrorKind::Corrupt, format!("the write log is damaged: {text}"))
}

/// Verifies that generations do not decrease in sequence order.
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
