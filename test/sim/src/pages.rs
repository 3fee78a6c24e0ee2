//! Sparse content in 4 KiB pages that are shared until one of them is changed.

use std::collections::BTreeMap;
use std::ops::Range;
use std::rc::Rc;

use forebay_reactor::BufList;

/// Bytes in a page.
pub(crate) const PAGE: u64 = 4096;

/// Shared bytes: a whole page in a [`PageMap`], a page's worth or less in a [`Piece`].
pub(crate) type Bytes = Rc<[u8]>;

/// Part of a write that lies in one page.
#[derive(Debug, Clone)]
pub(crate) struct Piece {
    /// First byte on the disk.
    pub(crate) offset: u64,
    /// Never crosses a page's end.
    pub(crate) data: Bytes,
}

impl Piece {
    /// Cuts a write into pieces, one a page.  The only copy of the payload that the simulation makes.
    pub(crate) fn cut(offset: u64, bufs: &BufList) -> Vec<Piece> {
        let end = offset + bufs.len() as u64;
        let mut pieces = Vec::with_capacity((bufs.len() as u64 / PAGE + 2) as usize);
        let mut parts = bufs.parts().iter();
        let mut part: &[u8] = &[];
        let mut at = offset;
        while at < end {
            let len = ((at / PAGE + 1) * PAGE).min(end) - at;
            while part.is_empty() {
                part = parts.next().expect("the parts of a list add up to its length");
            }
            let data: Bytes = if part.len() as u64 >= len {
                let (head, rest) = part.split_at(len as usize);
                part = rest;
                head.into()
            } else {
                let mut joined = Vec::with_capacity(len as usize);
                while (joined.len() as u64) < len {
                    if part.is_empty() {
                        part = parts.next().expect("the parts of a list add up to its length");
                    }
                    let take = part.len().min(len as usize - joined.len());
                    joined.extend_from_slice(&part[..take]);
                    part = &part[take..];
                }
                joined.into()
            };
            pieces.push(Piece { offset: at, data });
            at += len;
        }
        pieces
    }

    pub(crate) fn range(&self) -> Range<u64> {
        self.offset..self.offset + self.data.len() as u64
    }

    /// The part of it in `range`, which must lie within.
    pub(crate) fn part(&self, range: Range<u64>) -> Piece {
        if range == self.range() {
            return self.clone();
        }
        let from = (range.start - self.offset) as usize;
        let to = (range.end - self.offset) as usize;
        Piece { offset: range.start, data: self.data[from..to].into() }
    }
}

/// Pages by number; those that are not there read as zeroes.  Cloning shares all pages.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct PageMap {
    pages: BTreeMap<u64, Bytes>,
}

thread_local! {
    static ZERO: Bytes = vec![0; PAGE as usize].into();
}

impl PageMap {
    /// Pages stored.
    pub(crate) fn len(&self) -> usize {
        self.pages.len()
    }

    pub(crate) fn contains(&self, page: u64) -> bool {
        self.pages.contains_key(&page)
    }

    /// The numbers of the pages stored, in order.
    pub(crate) fn numbers(&self) -> impl Iterator<Item = u64> + '_ {
        self.pages.keys().copied()
    }

    /// Returns the number of the first page stored from `page` on.
    pub(crate) fn next(&self, page: u64) -> Option<u64> {
        self.pages.range(page..).next().map(|(&number, _)| number)
    }

    /// Fills `out` with what is at `offset`.
    pub(crate) fn read(&self, offset: u64, out: &mut [u8]) {
        let end = offset + out.len() as u64;
        if out.is_empty() {
            return;
        }
        let mut at = offset;
        for (&number, page) in self.pages.range(offset / PAGE..=(end - 1) / PAGE) {
            let start = (number * PAGE).max(offset);
            let stop = ((number + 1) * PAGE).min(end);
            out[(at - offset) as usize..(start - offset) as usize].fill(0);
            let within = (start - number * PAGE) as usize..(stop - number * PAGE) as usize;
            out[(start - offset) as usize..(stop - offset) as usize].copy_from_slice(&page[within]);
            at = stop;
        }
        out[(at - offset) as usize..].fill(0);
    }

    /// Writes one piece; a whole page is shared, not copied.
    pub(crate) fn write(&mut self, piece: &Piece) {
        let number = piece.offset / PAGE;
        if piece.data.len() as u64 == PAGE {
            self.pages.insert(number, piece.data.clone());
            return;
        }
        let page = self.pages.entry(number).or_insert_with(|| ZERO.with(Rc::clone));
        let from = (piece.offset % PAGE) as usize;
        Rc::make_mut(page)[from..from + piece.data.len()].copy_from_slice(&piece.data);
    }

    /// Makes a run read as zeroes; whole pages are given back.
    pub(crate) fn zero(&mut self, range: Range<u64>) {
        if range.is_empty() {
            return;
        }
        let mut gone = Vec::new();
        for (&number, page) in self.pages.range_mut(range.start / PAGE..=(range.end - 1) / PAGE) {
            let from = range.start.max(number * PAGE) - number * PAGE;
            let to = range.end.min((number + 1) * PAGE) - number * PAGE;
            if to - from == PAGE {
                gone.push(number);
            } else {
                Rc::make_mut(page)[from as usize..to as usize].fill(0);
            }
        }
        for number in gone {
            self.pages.remove(&number);
        }
    }

    /// Flips one bit, if its page is stored; true when it was.
    pub(crate) fn flip(&mut self, offset: u64, bit: u8) -> bool {
        let Some(page) = self.pages.get_mut(&(offset / PAGE)) else { return false };
        Rc::make_mut(page)[(offset % PAGE) as usize] ^= 1 << (bit & 7);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use forebay_reactor::Buf;

    #[test]
    fn pieces_written_are_read_back_at_any_alignment() {
        let mut map = PageMap::default();
        let mut plain = vec![0; 40_000];
        let mut rng = crate::Rng::new(3);
        for step in 0..500_u64 {
            let offset = rng.below(30_000);
            let len = rng.range(1..9_000);
            let data: Vec<u8> = (0..len).map(|i| (i + step) as u8).collect();
            if rng.one_in(4) {
                map.zero(offset..offset + len);
                plain[offset as usize..(offset + len) as usize].fill(0);
            } else {
                let cut = rng.below(len + 1) as usize;
                let list: BufList = [&data[..cut], &data[cut..]].into_iter().map(Buf::copy_of).collect();
                Piece::cut(offset, &list).iter().for_each(|piece| map.write(piece));
                plain[offset as usize..(offset + len) as usize].copy_from_slice(&data);
            }
            let mut out = vec![1; 40_000];
            map.read(0, &mut out);
            assert!(out == plain, "step {step}");
            let mut part = vec![1; 5_000];
            map.read(offset, &mut part);
            assert_eq!(part, plain[offset as usize..offset as usize + 5_000]);
        }
    }

    #[test]
    fn a_copy_does_not_see_later_changes() {
        let mut map = PageMap::default();
        Piece::cut(0, &Buf::copy_of(&[7; 4096]).into()).iter().for_each(|piece| map.write(piece));
        let copy = map.clone();
        assert!(map.flip(5, 1));
        let mut out = [0; 1];
        copy.read(5, &mut out);
        assert_eq!(out, [7]);
        map.read(5, &mut out);
        assert_eq!(out, [5]);
    }
}
