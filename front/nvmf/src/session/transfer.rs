use forebay_block::{BufList, BufMut};

use super::pools::DATA_OWN;
use crate::wire::pdu::{DataHeader, Fes};

/// Data transfer from the host, requested with an R2T.
#[derive(Debug)]
struct Transfer<T> {
    cid: u16,
    len: u32,
    /// Time of the R2T, in units of the caller's clock.
    since: u64,
    /// Bytes received.
    here: u32,
    data: BufList,
    /// Short pieces that follow `data`.
    gathered: Option<BufMut>,
    intact: bool,
    note: T,
}

impl<T> Transfer<T> {
    /// Appends a piece.  A short piece that is not all of the data is copied: it may keep a whole receive buffer in
    /// memory, and a host may split its data into pieces of one byte.
    fn take(&mut self, piece: BufList) {
        let len = piece.len();
        if len >= DATA_OWN || len == self.len as usize {
            self.seal();
            self.data.append(piece);
        } else {
            piece.parts().iter().for_each(|part| self.gather(part));
        }
        self.here += len as u32;
    }

    fn gather(&mut self, mut bytes: &[u8]) {
        while !bytes.is_empty() {
            let room = ((self.len - self.here) as usize).min(DATA_OWN);
            let gathered = self.gathered.get_or_insert_with(|| BufMut::with_capacity(room));
            let (now, later) = bytes.split_at(gathered.spare().min(bytes.len()));
            gathered.extend_from_slice(now);
            bytes = later;
            if gathered.spare() == 0 {
                self.seal();
            }
        }
    }

    /// Moves gathered pieces to `data`.
    fn seal(&mut self) {
        if let Some(gathered) = self.gathered.take() {
            self.data.push(gathered.freeze());
        }
    }
}

/// Data transfers in progress on a connection, by transfer tag.  One R2T requests all of a command's data, so
/// that the data arrives in order.
#[derive(Debug)]
pub struct Transfers<T> {
    slots: Vec<Option<Transfer<T>>>,
    free: Vec<u16>,
}

impl<T> Default for Transfers<T> {
    fn default() -> Self {
        Self { slots: Vec::new(), free: Vec::new() }
    }
}

impl<T> Transfers<T> {
    /// Returns the number of transfers in progress.
    pub fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// Returns whether no transfer is in progress.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the time of the oldest outstanding R2T.
    pub fn oldest(&self) -> Option<u64> {
        self.slots.iter().flatten().map(|transfer| transfer.since).min()
    }

    /// Begins a transfer of `len` bytes for a command; returns its tag.
    ///
    /// # Panics
    /// When there are 65,536 already; a queue is far shorter.
    pub fn begin(&mut self, cid: u16, len: u32, since: u64, note: T) -> u16 {
        let transfer = Transfer { cid, len, since, here: 0, data: BufList::new(), gathered: None, intact: true, note };
        let transfer = Some(transfer);
        match self.free.pop() {
            Some(tag) => {
                self.slots[usize::from(tag)] = transfer;
                tag
            }
            None => {
                let tag = u16::try_from(self.slots.len()).expect("fewer transfers than tags");
                self.slots.push(transfer);
                tag
            }
        }
    }

    /// Checks that an H2CData with this `header` is expected.
    ///
    /// # Errors
    /// The fatal error status for an unknown tag, a wrong position or length, or a wrong LAST_PDU flag.
    pub fn check(&self, header: &DataHeader, last: bool) -> Result<(), Fes> {
        let found = self.slots.get(usize::from(header.tag)).and_then(Option::as_ref);
        let transfer = found.filter(|transfer| transfer.cid == header.cid).ok_or(Fes::Sequence)?;
        let at = u64::from(transfer.here);
        let end = at + u64::from(header.len);
        if u64::from(header.offset) != at || end > u64::from(transfer.len) {
            return Err(Fes::DataOutOfRange);
        }
        if last != (end == u64::from(transfer.len)) {
            return Err(Fes::Sequence);
        }
        Ok(())
    }

    /// Adds data that was checked.  Returns the note, the data and whether all digests matched once the transfer is
    /// complete.
    pub fn arrived(&mut self, header: &DataHeader, data: BufList, intact: bool) -> Option<(T, BufList, bool)> {
        let slot = self.slots.get_mut(usize::from(header.tag))?;
        let transfer = slot.as_mut()?;
        transfer.take(data);
        transfer.intact &= intact;
        if transfer.here < transfer.len {
            return None;
        }
        transfer.seal();
        let Transfer { data, intact, note, .. } = slot.take()?;
        self.free.push(header.tag);
        Some((note, data, intact))
    }

    /// Aborts all transfers, and returns their notes.
    pub fn clear(&mut self) -> impl Iterator<Item = T> {
        self.free.clear();
        std::mem::take(&mut self.slots).into_iter().flatten().map(|transfer| transfer.note)
    }
}
