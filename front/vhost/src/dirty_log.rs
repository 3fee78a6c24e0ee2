//! Bitmap of the guest's pages that the device has written, for live migration.
//!
//! Source: QEMU's vhost-user specification, "Migration".  A bit stands for 4 KiB of guest addresses; the front-end reads
//! and clears the bits while the device sets them, so they are set atomically, after the bytes are written.

use std::rc::Rc;
use std::sync::atomic::Ordering;

use forebay_reactor::GuardedMapping;

use crate::memory::GuestPart;

/// Bytes for which a bit stands.
const PAGE: u64 = 4096;

/// Log of written pages.
#[derive(Debug, Clone)]
pub struct DirtyLog {
    bits: Rc<GuardedMapping>,
}

impl DirtyLog {
    /// Creates a log in shared memory.
    pub fn new(bits: Rc<GuardedMapping>) -> Self {
        Self { bits }
    }

    /// Returns another mapping of the bits, for the log of another core.
    pub fn share(&self) -> GuardedMapping {
        self.bits.share()
    }

    /// Marks `len` bytes from a guest address as written.  Pages past the log's end are not logged: the front-end has
    /// sized it for all of the guest's memory.
    pub fn mark(&self, guest: u64, len: u64) {
        let Some(last) = len.checked_sub(1).map(|len| guest.saturating_add(len) / PAGE) else { return };
        let last = last.min((self.bits.len() as u64 * 8).saturating_sub(1));
        for page in guest / PAGE..=last {
            let at = (page / 8) as usize;
            if at < self.bits.len() {
                self.bits.or_u8(at, 1 << (page % 8), Ordering::SeqCst);
            }
        }
    }

    /// Marks the first `len` bytes of a buffer's parts as written.
    pub fn mark_parts(&self, parts: &[GuestPart], mut len: u64) {
        for part in parts {
            let take = len.min(part.area.len() as u64);
            self.mark(part.guest, take);
            len -= take;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_are_marked_and_those_past_the_end_are_not() {
        let bits = Rc::new(GuardedMapping::anonymous(4).expect("memory"));
        let log = DirtyLog::new(bits.clone());
        log.mark(4095, 2);
        log.mark(9 * 4096 + 7, 0);
        log.mark(31 * 4096, 100 * 4096);
        log.mark(u64::MAX, 5);
        let mut found = [0; 4];
        bits.read(0, &mut found);
        assert_eq!(found, [0b11, 0, 0, 0x80]);
    }
}
