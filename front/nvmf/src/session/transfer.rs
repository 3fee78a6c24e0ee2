use forebay_block::BufList;

use crate::wire::pdu::{DataHeader, Fes};

/// A command's data that the host was asked for with an R2T.
#[derive(Debug)]
struct Transfer<T> {
    cid: u16,
    len: u32,
    data: BufList,
    intact: bool,
    note: T,
}

/// The transfers of a connection under way, by tag.  One R2T asks for all of a command's data, so data comes in order.
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
    /// Transfers under way.
    pub fn len(&self) -> usize {
        self.slots.len() - self.free.len()
    }

    /// There are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Begins a transfer of `len` bytes for a command; returns its tag.
    ///
    /// # Panics
    /// When there are 65,536 already; a queue is far shorter.
    pub fn begin(&mut self, cid: u16, len: u32, note: T) -> u16 {
        let transfer = Some(Transfer { cid, len, data: BufList::new(), intact: true, note });
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

    /// Whether data may come as `header` says.
    ///
    /// # Errors
    /// What the host did wrong.
    pub fn check(&self, header: &DataHeader, last: bool) -> Result<(), Fes> {
        let found = self.slots.get(usize::from(header.tag)).and_then(Option::as_ref);
        let transfer = found.filter(|transfer| transfer.cid == header.cid).ok_or(Fes::Sequence)?;
        let at = transfer.data.len() as u64;
        let end = at + u64::from(header.len);
        if u64::from(header.offset) != at || end > u64::from(transfer.len) {
            return Err(Fes::DataOutOfRange);
        }
        if last != (end == u64::from(transfer.len)) {
            return Err(Fes::Sequence);
        }
        Ok(())
    }

    /// Takes data that was checked; all of it, and whether it was intact, when it was the last.
    pub fn arrived(&mut self, header: &DataHeader, data: BufList, intact: bool) -> Option<(T, BufList, bool)> {
        let slot = self.slots.get_mut(usize::from(header.tag))?;
        let transfer = slot.as_mut()?;
        transfer.data.append(data);
        transfer.intact &= intact;
        if (transfer.data.len() as u64) < u64::from(transfer.len) {
            return None;
        }
        let Transfer { data, intact, note, .. } = slot.take()?;
        self.free.push(header.tag);
        Some((note, data, intact))
    }

    /// Gives up what is under way.
    pub fn clear(&mut self) -> impl Iterator<Item = T> {
        self.free.clear();
        std::mem::take(&mut self.slots).into_iter().flatten().map(|transfer| transfer.note)
    }
}
