//! Translations of a guest's IOMMU, as its monitor sends them (vhost-user's IOTLB messages).

use std::collections::BTreeMap;

use crate::memory::MemoryAccess;

/// Maximum translations; a monitor that sends more is refused.
pub const IOTLB_ENTRIES_MAX: usize = 64 << 10;

/// Address whose translation is missing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct IotlbMiss {
    /// I/O virtual address.
    pub iova: u64,
    /// Access that is wanted.
    pub access: MemoryAccess,
}

#[derive(Debug, Clone, Copy)]
struct Translation {
    len: u64,
    user: u64,
    access: MemoryAccess,
}

/// Table of translations by I/O virtual address; no two overlap.
#[derive(Debug, Clone, Default)]
pub struct Iotlb {
    entries: BTreeMap<u64, Translation>,
}

impl Iotlb {
    /// Adds a translation, which replaces those that it overlaps.
    ///
    /// # Errors
    /// Text that says what is wrong with it, or that the table is full.
    pub fn insert(&mut self, iova: u64, len: u64, user: u64, access: MemoryAccess) -> Result<(), String> {
        // A length of zero stands for the whole space in the kernel's interface, and for nothing in this one.
        let valid = len > 0 && iova.checked_add(len - 1).is_some() && user.checked_add(len - 1).is_some();
        if !valid {
            return Err(format!("translation of {iova:#x} + {len} to {user:#x} is empty or overflows"));
        }
        self.remove(iova, len);
        if self.entries.len() >= IOTLB_ENTRIES_MAX {
            return Err(format!("more than {IOTLB_ENTRIES_MAX} translations"));
        }
        self.entries.insert(iova, Translation { len, user, access });
        Ok(())
    }

    /// Removes the translations that share an address with a range.
    pub fn remove(&mut self, iova: u64, len: u64) {
        let Some(last) = len.checked_sub(1).map(|len| iova.saturating_add(len)) else { return };
        while let Some((&first, translation)) = self.entries.range(..=last).next_back()
            && first.saturating_add(translation.len - 1) >= iova
        {
            self.entries.remove(&first);
        }
    }

    /// Removes all translations.
    pub fn clear(&mut self) {
        self.entries.clear();
    }

    /// Returns the user address of an I/O virtual address, and the number of bytes that follow it in the translation.
    ///
    /// # Errors
    /// When there is none that allows the access.
    pub fn translate(&self, iova: u64, access: MemoryAccess) -> Result<(u64, u64), IotlbMiss> {
        let miss = IotlbMiss { iova, access };
        let (first, translation) = self.entries.range(..=iova).next_back().ok_or(miss)?;
        let at = iova - first;
        let allowed = translation.access == MemoryAccess::ReadWrite || translation.access == access;
        if at >= translation.len || !allowed {
            return Err(miss);
        }
        Ok((translation.user + at, translation.len - at))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn translations_are_those_of_a_map_of_pages(
            steps in proptest::collection::vec((any::<bool>(), 0_u64..32, 1_u64..8, 0_u64..64), 1..60)
        ) {
            // Each page is 0x1000 bytes; a removal takes whole translations, so the model keeps their number.
            let mut table = Iotlb::default();
            let mut model: BTreeMap<u64, (u64, usize)> = BTreeMap::new();
            for (number, (add, iova, len, user)) in steps.into_iter().enumerate() {
                let hit: Vec<usize> = (iova..iova + len).filter_map(|page| model.get(&page).map(|entry| entry.1)).collect();
                model.retain(|_, entry| !hit.contains(&entry.1));
                if add {
                    table.insert(iova << 12, len << 12, user << 12, MemoryAccess::ReadWrite).expect("room");
                    (0..len).for_each(|at| _ = model.insert(iova + at, (user + at, number)));
                } else {
                    table.remove(iova << 12, len << 12);
                }
                for page in 0..48 {
                    let found = table.translate((page << 12) + 5, MemoryAccess::Read).ok().map(|found| found.0);
                    prop_assert_eq!(found, model.get(&page).map(|entry| (entry.0 << 12) + 5));
                }
            }
        }
    }

    #[test]
    fn nonsense_is_refused() {
        let mut table = Iotlb::default();
        for (iova, len, user) in [(0, 0, 0), (u64::MAX, 2, 0), (0, 2, u64::MAX)] {
            assert!(table.insert(iova, len, user, MemoryAccess::Read).is_err());
        }
        table.insert(u64::MAX, 1, 7, MemoryAccess::Write).expect("the last address");
        assert_eq!(table.translate(u64::MAX, MemoryAccess::Write), Ok((7, 1)));
        assert!(table.translate(u64::MAX, MemoryAccess::Read).is_err());
        table.remove(u64::MAX, u64::MAX);
        assert!(table.translate(u64::MAX, MemoryAccess::Write).is_err());
    }
}
