//! State of a ring as the front-end sets it up.

use super::RING_SIZE_MAX;
use crate::wire::RingAddresses;

/// Setup of a ring.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct VringState {
    /// Size; 0 until it is set.
    pub size: u16,
    /// Addresses of its areas.
    pub addresses: Option<RingAddresses>,
    /// Next index: that of the available ring, or with packed rings both indexes and their wrap counters.
    pub base: u32,
    /// Set by a kick descriptor, unset when the ring is stopped.
    pub kicked: bool,
    /// Set if the front-end has enabled it.
    pub enabled: bool,
}

/// Change of a ring's setup.
#[derive(Debug, Clone, Copy)]
pub(super) enum RingChange {
    /// Number of entries.
    Size(u32),
    /// Addresses of its areas.
    Addresses(RingAddresses),
    /// Next index.
    Base(u32),
}

impl VringState {
    /// Returns whether size and addresses are set.
    pub fn is_complete(&self) -> bool {
        self.size > 0 && self.addresses.is_some()
    }

    /// Applies a change.
    ///
    /// # Errors
    /// Reason for which it is not valid, or not while the ring runs.
    pub(super) fn change(&mut self, change: RingChange, packed: bool, runs: bool) -> Result<(), String> {
        match change {
            RingChange::Size(size) => {
                let fits = (1..=RING_SIZE_MAX).contains(&size) && (packed || size.is_power_of_two());
                if !fits {
                    let power = if packed { "" } else { "a power of two, " };
                    return Err(format!("size {size}; {power}1 to {RING_SIZE_MAX} is allowed"));
                }
                if runs && u32::from(self.size) != size {
                    return Err("its size is changed while it runs".to_owned());
                }
                self.size = size as u16;
            }
            RingChange::Addresses(addresses) => {
                // A split ring's are aligned to 16, 2 and 4 bytes, a packed ring's to 16, 4 and 4 (VIRTIO 1.2, 2.7 and 2.8).
                let driver_align = if packed { 4 } else { 2 };
                for (what, addr, align) in [
                    ("descriptor", addresses.descriptors, 16),
                    ("driver", addresses.driver, driver_align),
                    ("device", addresses.device, 4),
                ] {
                    if !addr.is_multiple_of(align) {
                        return Err(format!("{what} area at {addr:#x} is not aligned to {align} bytes"));
                    }
                }
                // Sent again when the dirty log is turned on or off.
                if runs && self.addresses != Some(addresses) {
                    return Err("its addresses are changed while it runs".to_owned());
                }
                self.addresses = Some(addresses);
            }
            RingChange::Base(base) => {
                if !packed && base > u32::from(u16::MAX) {
                    return Err(format!("base {base} of a split ring; at most {} is possible", u16::MAX));
                }
                if runs {
                    return Err("its next index is changed while it runs".to_owned());
                }
                self.base = base;
            }
        }
        Ok(())
    }
}
