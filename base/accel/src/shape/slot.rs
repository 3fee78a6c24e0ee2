//! Slots: which shape of one kernel and class of sizes is in use.

use std::sync::atomic::{AtomicU8, Ordering};

/// Index of the shape in use, in the list of shapes that a class has on the tier in use.
#[derive(Debug)]
pub(crate) struct ShapeSlot(AtomicU8);

/// Neither read nor set so far.
const UNSET: u8 = u8::MAX;

impl ShapeSlot {
    /// Makes an unset slot.
    pub(crate) const fn new() -> Self {
        Self(AtomicU8::new(UNSET))
    }

    /// Returns the shape in use; an unset slot is first set to what `initial` returns.
    #[inline(always)]
    pub(crate) fn get(&self, initial: impl FnOnce() -> usize) -> usize {
        // A shape is a number into a constant list, so no order is needed.
        match self.0.load(Ordering::Relaxed) {
            UNSET => self.set_if_unset(initial()),
            shape => usize::from(shape),
        }
    }

    /// Returns the shape in use, or a number beyond every list of shapes while the slot is unset.
    #[inline(always)]
    pub(crate) fn peek(&self) -> usize {
        usize::from(self.0.load(Ordering::Relaxed))
    }

    /// Sets the shape in use.
    pub(crate) fn set(&self, shape: usize) {
        self.0.store(stored(shape), Ordering::Relaxed);
    }

    /// Sets the shape unless calibration has set one meanwhile; returns the one in use.
    #[cold]
    fn set_if_unset(&self, shape: usize) -> usize {
        match self.0.compare_exchange(UNSET, stored(shape), Ordering::Relaxed, Ordering::Relaxed) {
            Ok(_) => shape,
            Err(set) => usize::from(set),
        }
    }
}

/// Returns the form in which a slot holds an index.
fn stored(shape: usize) -> u8 {
    debug_assert!(shape < usize::from(UNSET), "no class has {shape} shapes");
    shape as u8
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_shape_read_or_set_stays_until_another_is_set() {
        let slot = ShapeSlot::new();
        assert_eq!(slot.peek(), usize::from(UNSET));
        assert_eq!(slot.get(|| 3), 3);
        assert_eq!(slot.peek(), 3);
        assert_eq!(slot.get(|| panic!("set already")), 3);
        slot.set(0);
        assert_eq!(slot.get(|| panic!("set already")), 0);
        let slot = ShapeSlot::new();
        slot.set(2);
        assert_eq!(slot.get(|| panic!("set already")), 2);
    }

    #[test]
    fn a_shape_that_is_set_while_the_initial_one_is_sought_stays() {
        let slot = ShapeSlot::new();
        let initial = || {
            slot.set(5);
            1
        };
        assert_eq!(slot.get(initial), 5);
    }
}
