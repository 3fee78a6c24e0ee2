//! Media of logs with members: a term that the copy follows, entries as bytes that are the same on every member.

use std::pin::Pin;
use std::rc::Rc;

use forebay_block::{BufList, LocalFuture, Result};
use forebay_reactor::pmem::PersistentMemory;

use super::Medium;
use crate::format::{CopyState, KeyCheck, LogId};
use crate::replication::{AppendCursor, CopyStart, LogShape, RawAppend};

/// Future that borrows the medium.
pub(crate) type CopyFuture<'a, T> = Pin<Box<dyn Future<Output = T> + 'a>>;

/// Term that a copy begins to follow.
#[derive(Debug, Clone, Copy)]
pub(crate) struct NewTerm {
    /// The term.
    pub(crate) term: u32,
    /// Epoch of the record.
    pub(crate) epoch: u64,
    /// Id of the copy.
    pub(crate) copy: LogId,
    /// Set if the copy is known to lack entries.
    pub(crate) filling: bool,
    /// Check value of the key that the term's payloads are encrypted with.
    pub(crate) encryption: Option<KeyCheck>,
    /// At a replica, [`CopyState::cut`] of the primary; `None` at the primary itself.
    pub(crate) cut: Option<u64>,
}

/// Medium of a copy of a log that has members.
pub(crate) trait CopyMedium: Medium {
    /// Returns the size of the log in bytes.
    fn size(&self) -> u64;

    /// Returns its unit in bytes.
    fn unit(&self) -> u32;

    /// Returns the state of the copy; `None` for a log that has never had members.
    fn state(&self) -> Option<CopyState>;

    /// Returns the check value of the key that payloads are encrypted with.
    fn encryption(&self) -> Option<KeyCheck>;

    /// Returns an error once an append that came from another member has failed: what the medium holds is not known any more,
    /// until the copy is opened again.
    fn check(&self) -> Result<()>;

    /// Returns the term that the copy follows.
    fn term(&self) -> u32;

    /// Returns the epoch of the record when the copy began to follow its term, or was created.
    fn epoch(&self) -> u64;

    /// Returns the entries that were found when the copy was opened.
    fn shape(&self) -> LogShape;

    /// Returns where the copy begins.
    fn start(&self) -> CopyStart;

    /// Returns the number of the entry that is appended next: after a copy [began again](Self::restart), one that is retired,
    /// where the block that the tail is found from begins before it.
    fn next_seq(&self) -> u64;

    /// Returns the number of the first entry that is not durable here.
    fn durable_seq(&self) -> u64;

    /// Returns the tail as it is durable in one of the two superblocks.
    fn durable_tail(&self) -> u64;

    /// Returns the bytes from the block with entry `seq` to the end of the log: not less than those of its entries.
    fn bytes_from(&self, seq: u64) -> u64;

    /// Waits until the entries before `seq` are written, or an append has failed.
    fn written(&self, seq: u64) -> LocalFuture<()>;

    /// Returns the position from which a recovery of this copy reads, as it is durable: nothing from there on may be
    /// overwritten.
    fn held(&self) -> u64;

    /// Keeps everything from a position on: other members need it.
    fn hold(&self, pos: u64);

    /// Returns the place of the entries appended together with entry `seq`, or of the next ones if there is no such
    /// entry yet; `None` if they have been overwritten.
    fn find(&self, seq: u64) -> CopyFuture<'_, Result<Option<AppendCursor>>>;

    /// Reads the entries at a place, which are durable; `None` if they have been overwritten.
    fn read_raw(&self, cursor: AppendCursor) -> CopyFuture<'_, Result<Option<RawAppend>>>;

    /// Follows a term from the next entry on, durably. Nothing is being appended.
    fn begin_term(&self, term: NewTerm) -> CopyFuture<'_, Result<()>>;

    /// Drops the entries from a place on, from memory: [`begin_term`](Self::begin_term) makes that durable.
    fn truncate(&self, cursor: AppendCursor);

    /// Drops all entries, and begins where another member does: [`begin_term`](Self::begin_term) makes that durable.
    fn restart(&self, start: CopyStart);

    /// Verifies bytes that another member appended, checksums and all.
    ///
    /// # Errors
    /// [`ErrorKind::Invalid`](forebay_block::ErrorKind::Invalid) if they are no entries of this log.
    fn inspect(&self, bytes: BufList) -> Result<RawAppend>;

    /// Verifies header and entries of a block whose payloads another member has written into the ring.
    ///
    /// # Errors
    /// [`ErrorKind::Invalid`](forebay_block::ErrorKind::Invalid) if they are no entries of this log, or no ring is in memory.
    fn inspect_placed(&self, head: BufList) -> Result<RawAppend>;

    /// Returns the ring, if another member can write into it: the memory, and the offset and length of the ring in bytes.
    fn ring_memory(&self) -> Option<(Rc<dyn PersistentMemory>, u64, u64)>;

    /// Starts writing back the payloads of a placed block, which a later sync makes durable.
    fn flush_placed(&self, raw: &RawAppend);

    /// Appends verified entries of another member. They are written, and durable with `durable`, once the future has
    /// ended.
    ///
    /// # Errors
    /// [`ErrorKind::Invalid`](forebay_block::ErrorKind::Invalid) if they are not the next entries of this log.
    fn append_raw(&self, raw: RawAppend, durable: bool) -> Result<LocalFuture<Result<()>>>;
}
