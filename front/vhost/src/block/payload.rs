//! Data between a buffer's parts in guest memory and the device's buffers.

use forebay_reactor::{BufList, BufMut, BufPool};

use crate::memory::GuestPart;

/// Bytes of the shortest pooled buffer.
const SHORTEST: usize = 4 << 10;
/// Maximum bytes of a piece.
const PIECE: usize = 1 << 20;
/// Bytes of free buffers that are kept for each length.
const KEPT_BYTES: usize = 8 << 20;

/// Pools of buffers for the data of writes, shared by the devices of a core.
#[derive(Debug)]
pub struct PayloadPools {
    /// In powers of two from [`SHORTEST`] to [`PIECE`].
    pools: Vec<BufPool>,
}

impl Default for PayloadPools {
    fn default() -> Self {
        Self::new()
    }
}

impl PayloadPools {
    /// Creates empty pools.
    pub fn new() -> Self {
        let sizes = (SHORTEST.ilog2()..=PIECE.ilog2()).map(|bits| 1 << bits);
        Self { pools: sizes.map(|size| BufPool::new(size, KEPT_BYTES / size)).collect() }
    }

    /// Returns an empty buffer for exactly `len` bytes, at most [`PIECE`].
    fn get(&self, len: usize) -> BufMut {
        let pool = self.pools.iter().find(|pool| pool.buf_size() >= len).expect("no longer than a piece");
        pool.get().limited(len)
    }
}

/// Returns the bytes of a buffer's parts.
pub fn buffer_len(parts: &[GuestPart]) -> u64 {
    parts.iter().map(|part| part.area.len() as u64).sum()
}

/// Position in a buffer's parts.
struct PartCursor<'a> {
    parts: &'a [GuestPart],
    /// Bytes of the first of them that are behind the position.
    at: usize,
}

impl<'a> PartCursor<'a> {
    fn new(parts: &'a [GuestPart], skip: u64) -> Self {
        let mut cursor = Self { parts, at: 0 };
        let mut left = skip;
        while left > 0
            && let Some((_, _, len)) = cursor.next(left)
        {
            left -= len as u64;
        }
        cursor
    }

    /// Takes the next contiguous bytes, at most `max` (not zero): their part, their position in it and their number.
    fn next(&mut self, max: u64) -> Option<(&'a GuestPart, usize, usize)> {
        loop {
            let part = self.parts.first()?;
            let rest = part.area.len() - self.at;
            if rest > 0 {
                let (at, len) = (self.at, max.min(rest as u64) as usize);
                self.at += len;
                return Some((part, at, len));
            }
            self.parts = &self.parts[1..];
            self.at = 0;
        }
    }
}

/// Copies the bytes after the first `skip` out of a buffer; returns their number, which is less than `to` can take if
/// there are fewer.
pub fn copy_from(parts: &[GuestPart], skip: u64, to: &mut [u8]) -> usize {
    let mut from = PartCursor::new(parts, skip);
    let mut done = 0;
    while done < to.len()
        && let Some((part, at, len)) = from.next((to.len() - done) as u64)
    {
        part.area.read(at, &mut to[done..done + len]);
        done += len;
    }
    done
}

/// Copies `len` bytes after the first `skip` out of a buffer, in pieces of at most 1 MiB; fewer bytes if there are
/// fewer.
pub fn gather(parts: &[GuestPart], skip: u64, len: u64, pools: &PayloadPools) -> BufList {
    let mut from = PartCursor::new(parts, skip);
    let mut left = len.min(buffer_len(parts).saturating_sub(skip)) as usize;
    let mut data = BufList::with_room(left.div_ceil(PIECE));
    while left > 0 {
        let mut piece = pools.get(left.min(PIECE));
        left -= piece.spare();
        while piece.spare() > 0
            && let Some((part, at, len)) = from.next(piece.spare() as u64)
        {
            if len == part.area.len() {
                part.area.read_into(&mut piece);
            } else {
                part.area.part(at, len).read_into(&mut piece);
            }
        }
        data.push(piece.freeze());
    }
    data
}

/// Copies data to the beginning of a buffer; returns the number of bytes, fewer if the buffer is shorter.
pub fn scatter(data: &BufList, parts: &[GuestPart]) -> u64 {
    let mut to = PartCursor::new(parts, 0);
    let mut written = 0;
    for piece in data.parts() {
        let mut done = 0;
        while done < piece.len()
            && let Some((part, at, len)) = to.next((piece.len() - done) as u64)
        {
            part.area.write(at, &piece[done..done + len]);
            done += len;
        }
        written += done as u64;
    }
    written
}

/// Writes the status to the last byte of a buffer's writable parts; returns the guest address of that byte, `None` when
/// there is none.
pub fn put_status(writable: &[GuestPart], status: u8) -> Option<u64> {
    let last = writable.iter().rev().find(|part| !part.area.is_empty())?;
    let at = last.area.len() - 1;
    last.area.write(at, &[status]);
    Some(last.guest.wrapping_add(at as u64))
}
