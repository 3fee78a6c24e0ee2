//! Copy of a log with members: terms, blocks that arrive whole from another member, and blocks that are sent to one.

use std::rc::Rc;

use forebay_accel::crc32c::crc32c_parts;
use forebay_block::{Buf, BufList, BufMut, Error, ErrorKind, LocalFuture, Result};
use forebay_reactor::pmem::PersistentMemory;

use super::ring::{Mark, StartedBlock};
use super::{Ssd, io};
use crate::format::{AREA_AT, BlockHeader, CopyState, ENTRY_LEN, KeyCheck};
use crate::media::copy::{CopyFuture, CopyMedium, NewTerm};
use crate::media::{Medium, corrupt};
use crate::replication::{AppendCursor, CopyStart, LogShape, RawAppend};

impl Ssd {
    /// Returns the header of a block of this log, after verifying all of it; with `placed`, `bytes` have no payloads, and none
    /// is read.
    fn parse(&self, bytes: &BufList, placed: bool) -> Result<BlockHeader> {
        let wrong = |why: &dyn std::fmt::Display| {
            Error::new(ErrorKind::Invalid, format!("an append block from another member: {why}"))
        };
        let unit = self.unit as usize;
        let all = bytes.len();
        if all == 0 || !all.is_multiple_of(unit) {
            return Err(wrong(&format_args!("{all} bytes are no units of {unit}")));
        }
        let first = contiguous(bytes, ENTRY_LEN.min(all));
        let header = BlockHeader::peek(&first, self.tag, self.unit).ok_or_else(|| wrong(&"not a block of this log"))?;
        let units = if placed { header.head_units(self.unit) } else { header.units };
        if units as usize * unit != all {
            return Err(wrong(&format_args!("{all} bytes instead of {units} units")));
        }
        let head = contiguous(bytes, header.head_len());
        let entries = header.entries(&head, self.tag, self.unit, self.ring).map_err(|error| wrong(&error))?;
        if placed {
            return Ok(header);
        }
        let mut at = header.head_units(self.unit) as usize * unit;
        for entry in &entries {
            let len = entry.stored_len() as usize;
            if len > 0 && crc32c_parts(bytes.slice(at..at + len).parts().iter().map(|part| &part[..])) != entry.crc {
                return Err(wrong(&format_args!("the payload of entry {} has another checksum", entry.seq)));
            }
            at += len.next_multiple_of(unit);
        }
        Ok(header)
    }

    /// Returns the offset in the storage and the length, in bytes, of the payloads of a block of which `head` bytes are here.
    fn payloads_of(&self, header: &BlockHeader, head: usize) -> (u64, u64) {
        let (unit, head) = (u64::from(self.unit), head as u64);
        (self.base + AREA_AT + header.pos % self.ring * unit + head, u64::from(header.units) * unit - head)
    }

    /// Returns a block that begins at `pos`, if it is block `number` of this log.
    async fn header_at(&self, pos: u64, number: u64) -> Result<Option<BlockHeader>> {
        let place = pos % self.ring;
        let offset = self.base + AREA_AT + place * u64::from(self.unit);
        let head = self.storage.read_exact_at(offset, self.unit as usize).await;
        let head = head.map_err(|error| io(error, "reading a block for another member"))?;
        let header = BlockHeader::peek(&head, self.tag, self.unit);
        Ok(header.filter(|header| (header.number, header.pos) == (number, pos)))
    }

    /// Clears the places where a recovery looks for the next block, durably.
    async fn clear_next(&self) -> Result<()> {
        let (head, free) = {
            let state = self.state.borrow();
            (state.head_pos, state.free_pos())
        };
        let wrapped = head.next_multiple_of(self.ring);
        for pos in if wrapped == head { vec![head] } else { vec![head, wrapped] } {
            if pos - free >= self.ring {
                continue;
            }
            let offset = self.base + AREA_AT + pos % self.ring * u64::from(self.unit);
            let cleared = self.storage.write_durable_at(BufMut::zeroed(self.unit as usize), offset).await;
            cleared.map_err(|error| io(error, "clearing what another primary has left over"))?;
        }
        Ok(())
    }

    /// Returns the header of the block at a cursor; `None` if it has been overwritten.
    async fn header_after(&self, cursor: &AppendCursor) -> Result<Option<BlockHeader>> {
        let wrapped = cursor.pos.next_multiple_of(self.ring);
        let mut found: Option<BlockHeader> = None;
        for pos in [cursor.pos, wrapped] {
            let header = self.header_at(pos, cursor.number).await?;
            if let Some(header) = header.filter(|header| header.first_seq == cursor.seq)
                && found.is_none_or(|found| found.run < header.run)
            {
                found = Some(header);
            }
        }
        Ok(found)
    }
}

/// Returns the first `len` bytes in one piece.
fn contiguous(bytes: &BufList, len: usize) -> Buf {
    bytes.slice(0..len).into_contiguous()
}

/// Returns a block as it is sent to other members.
pub(super) fn raw_append(header: &BlockHeader, bytes: BufList) -> RawAppend {
    let BlockHeader { first_seq, count, run: term, .. } = *header;
    RawAppend { first_seq, count: count.into(), term, next: after(header), bytes }
}

fn after(header: &BlockHeader) -> AppendCursor {
    AppendCursor {
        number: header.number + 1,
        pos: header.pos + u64::from(header.units),
        seq: header.first_seq + u64::from(header.count),
    }
}

impl CopyMedium for Ssd {
    fn size(&self) -> u64 {
        self.state.borrow().superblock.size
    }

    fn unit(&self) -> u32 {
        self.unit
    }

    fn state(&self) -> Option<CopyState> {
        self.state.borrow().superblock.copy
    }

    fn encryption(&self) -> Option<KeyCheck> {
        self.state.borrow().superblock.encryption
    }

    fn check(&self) -> Result<()> {
        match self.state.borrow().failed {
            true => Err(Error::new(ErrorKind::Io, "an earlier append to this copy of the write log failed")),
            false => Ok(()),
        }
    }

    fn term(&self) -> u32 {
        self.run.get()
    }

    fn epoch(&self) -> u64 {
        self.state.borrow().superblock.epoch
    }

    fn shape(&self) -> LogShape {
        self.shape.clone()
    }

    fn start(&self) -> CopyStart {
        let state = self.state.borrow();
        let Mark { number, pos, first_seq } = state.mark_before(state.tail_seq);
        CopyStart { tail_seq: state.tail_seq, at: AppendCursor { number, pos, seq: first_seq } }
    }

    fn next_seq(&self) -> u64 {
        self.state.borrow().next_seq
    }

    fn durable_seq(&self) -> u64 {
        self.state.borrow().durable_seq
    }

    fn durable_tail(&self) -> u64 {
        let [one, other] = self.state.borrow().persisted_seqs;
        one.max(other)
    }

    fn bytes_from(&self, seq: u64) -> u64 {
        let state = self.state.borrow();
        state.head_pos.saturating_sub(state.mark_before(seq).pos) * u64::from(self.unit)
    }

    fn written(&self, seq: u64) -> LocalFuture<()> {
        let (state, room) = (self.state.clone(), self.room.clone());
        Box::pin(async move {
            let over = || {
                let state = state.borrow();
                state.failed || state.started.iter().all(|block| block.done || block.end_seq > seq)
            };
            room.wait_until(over).await;
        })
    }

    fn held(&self) -> u64 {
        self.state.borrow().persisted_pos
    }

    fn hold(&self, pos: u64) {
        self.state.borrow_mut().held_pos = pos;
        self.room.notify_all();
    }

    fn find(&self, seq: u64) -> CopyFuture<'_, Result<Option<AppendCursor>>> {
        Box::pin(async move {
            let (next, Mark { number, pos, first_seq }) = {
                let state = self.state.borrow();
                (state.next_seq, state.mark_before(seq))
            };
            if first_seq > seq {
                // Retired: the place is that of the oldest entry that is not.
                return Ok(None);
            }
            let mut cursor = AppendCursor { number, pos, seq: first_seq };
            while cursor.seq < seq.min(next) {
                let Some(header) = self.header_after(&cursor).await? else { return Ok(None) };
                let end = after(&header);
                if end.seq > seq {
                    break;
                }
                cursor = end;
            }
            Ok(Some(cursor))
        })
    }

    fn read_raw(&self, cursor: AppendCursor) -> CopyFuture<'_, Result<Option<RawAppend>>> {
        Box::pin(async move {
            let _pin = self.pin(cursor.pos);
            if cursor.pos < self.state.borrow().persisted_pos {
                return Ok(None);
            }
            let Some(header) = self.header_after(&cursor).await? else { return Ok(None) };
            let (place, units) = (header.pos % self.ring, u64::from(header.units));
            if place + units > self.ring {
                return Err(corrupt(format_args!("block {} is longer than the ring", header.number)));
            }
            let (offset, len) = (self.base + AREA_AT + place * u64::from(self.unit), units * u64::from(self.unit));
            let bytes = self.storage.read_exact_at(offset, len as usize).await;
            let bytes = BufList::from(bytes.map_err(|error| io(error, "reading a block for another member"))?.freeze());
            self.parse(&bytes, false).map_err(|error| corrupt(error.to_string()))?;
            Ok(Some(raw_append(&header, bytes)))
        })
    }

    fn begin_term(&self, new: NewTerm) -> CopyFuture<'_, Result<()>> {
        let NewTerm { term, epoch, copy, filling, encryption, cut } = new;
        Box::pin(async move {
            let kept = {
                let state = self.state.borrow();
                assert!(state.started.is_empty(), "a term begins while nothing is appended");
                state.next_block
            };
            let cut = cut.unwrap_or(kept).max(kept);
            if kept < cut {
                // What comes next is of former terms, like what another primary may have left over there.  Its superblock no
                // longer relies on it before it is cleared.
                self.persist_tail(false).await?;
                self.clear_next().await?;
            }
            {
                let mut state = self.state.borrow_mut();
                (state.superblock.run, state.superblock.epoch) = (term, epoch);
                state.superblock.set_copy(CopyState { copy, kept, cut, filling });
                if let Some(check) = encryption {
                    state.superblock.set_encryption(check);
                }
            }
            self.run.set(term);
            // Both copies: blocks of the term must not depend on the newer one.
            self.persist_tail(false).await?;
            self.persist_tail(false).await
        })
    }

    fn truncate(&self, cursor: AppendCursor) {
        self.state.borrow_mut().truncate(cursor.number, cursor.pos, cursor.seq);
    }

    fn restart(&self, start: CopyStart) {
        self.state.borrow_mut().restart(start.at.number, start.at.pos, start.at.seq);
    }

    fn inspect(&self, bytes: BufList) -> Result<RawAppend> {
        let header = self.parse(&bytes, false)?;
        Ok(raw_append(&header, bytes))
    }

    fn inspect_placed(&self, head: BufList) -> Result<RawAppend> {
        if self.storage.memory().is_none() {
            return Err(Error::new(ErrorKind::Invalid, "no other member writes into a ring on an SSD"));
        }
        let header = self.parse(&head, true)?;
        Ok(raw_append(&header, head))
    }

    fn ring_memory(&self) -> Option<(Rc<dyn PersistentMemory>, u64, u64)> {
        let memory = self.storage.memory()?.clone();
        Some((memory, self.base + AREA_AT, self.ring * u64::from(self.unit)))
    }

    fn flush_placed(&self, raw: &RawAppend) {
        let head = contiguous(&raw.bytes, ENTRY_LEN.min(raw.bytes.len()));
        if let Some(header) = BlockHeader::peek(&head, self.tag, self.unit) {
            let (at, len) = self.payloads_of(&header, raw.bytes.len());
            self.storage.flush(at, len);
        }
    }

    fn append_raw(&self, raw: RawAppend, durable: bool) -> Result<LocalFuture<Result<()>>> {
        self.check()?;
        let bytes = raw.bytes;
        let Some(header) = BlockHeader::peek(&contiguous(&bytes, ENTRY_LEN), self.tag, self.unit) else {
            return Err(Error::new(ErrorKind::Invalid, "not a block of this log"));
        };
        let mut state = self.state.borrow_mut();
        let wrapped = state.head_pos.next_multiple_of(self.ring);
        let refuse = |why: &dyn std::fmt::Display| {
            Err(Error::new(ErrorKind::Invalid, format!("block {} from another member: {why}", header.number)))
        };
        // An empty copy may begin in the middle of a block, of which the entries before the tail are not needed.
        let begins = state.tail_block == state.next_block && header.first_seq <= state.tail_seq;
        if header.number != state.next_block || header.first_seq != state.next_seq && !begins {
            return refuse(&format_args!("block {} with entry {} is next", state.next_block, state.next_seq));
        }
        if header.pos != state.head_pos && header.pos != wrapped {
            return refuse(&format_args!("at {} units, not at {} or {wrapped}", header.pos, state.head_pos));
        }
        let end = header.pos + u64::from(header.units);
        if end - state.free_pos() > self.ring {
            return refuse(&"it would overwrite entries that are not retired here");
        }
        state.head_pos = end;
        state.next_block += 1;
        state.next_seq = header.first_seq + u64::from(header.count);
        state.mark(Mark { number: header.number, pos: header.pos, first_seq: header.first_seq });
        let end_seq = state.next_seq;
        state.started.push_back(StartedBlock { number: header.number, end_seq, done: false, durable: false });
        drop(state);
        let unit = self.unit as usize;
        let bytes = match bytes.parts().iter().all(|part| self.storage.takes(part, unit)) {
            true => bytes,
            false => self.aligned.copy(&bytes),
        };
        let offset = self.base + AREA_AT + header.pos % self.ring * u64::from(self.unit);
        // Empty unless they are in the ring already.
        let (placed_at, placed) = self.payloads_of(&header, bytes.len());
        let (storage, state, room) = (self.storage.clone(), self.state.clone(), self.room.clone());
        let before = header.durable_before();
        let sync = self.sync();
        Ok(Box::pin(async move {
            // A block says which blocks before it are durable: they are here, too, before it is written.
            let ready = || {
                let state = state.borrow();
                state.failed
                    || state.durable_block >= before
                    || state.started.iter().all(|block| block.number >= before || block.done)
            };
            room.wait_until(ready).await;
            let write = async {
                if state.borrow().failed {
                    return Err(Error::new(ErrorKind::Io, "an earlier append to this copy of the write log failed"));
                }
                if state.borrow().durable_block < before {
                    sync.await?;
                }
                // The block is valid from when its header is stored, and durable with the same fence as its payloads.
                storage.flush(placed_at, placed);
                let written = match durable {
                    true => storage.write_durable_at(bytes, offset).await,
                    false => storage.write_at(bytes, offset).await,
                };
                written.map_err(|error| io(error, "appending"))
            };
            if let Err(error) = write.await {
                state.borrow_mut().failed = true;
                room.notify_all();
                return Err(error);
            }
            let mut ring = state.borrow_mut();
            if let Some(block) = ring.started.iter_mut().find(|block| block.number == header.number) {
                (block.done, block.durable) = (true, durable);
            }
            ring.durable(0);
            drop(ring);
            room.notify_all();
            Ok(())
        }))
    }
}
