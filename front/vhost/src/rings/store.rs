//! Stores to memory that survives the device: rings and in-flight regions.
//!
//! Tests let a device die between any two of them.

use std::sync::atomic::Ordering;

use crate::memory::GuestArea;

/// Stores a number; later stores do not precede it for an observer that has seen a later one of them released.
pub(crate) fn put_u16(area: &GuestArea, at: usize, value: u16, order: Ordering) {
    if step() {
        area.store_u16(at, value, order);
    }
}

/// Stores a number.
pub(crate) fn put_u32(area: &GuestArea, at: usize, value: u32, order: Ordering) {
    if step() {
        area.store_u32(at, value, order);
    }
}

/// Stores a number.
pub(crate) fn put_u64(area: &GuestArea, at: usize, value: u64, order: Ordering) {
    if step() {
        area.store_u64(at, value, order);
    }
}

#[cfg(not(test))]
fn step() -> bool {
    true
}

#[cfg(test)]
thread_local! {
    static STEPS_LEFT: std::cell::Cell<u64> = const { std::cell::Cell::new(u64::MAX) };
}

#[cfg(test)]
fn step() -> bool {
    STEPS_LEFT.with(|left| {
        let alive = left.get() > 0;
        left.set(left.get().saturating_sub(u64::from(alive && left.get() < u64::MAX)));
        alive
    })
}

/// Loses all stores of this thread after the next `steps`, as if the device was killed there.  `u64::MAX` loses none.
#[cfg(test)]
pub(crate) fn die_after(steps: u64) {
    STEPS_LEFT.with(|left| left.set(steps));
}

/// Returns whether stores are lost.
#[cfg(test)]
pub(crate) fn is_dead() -> bool {
    STEPS_LEFT.with(|left| left.get() == 0)
}
