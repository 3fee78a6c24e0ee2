//! Pending unit attentions of an I_T nexus.

use std::collections::VecDeque;

use crate::sense::code;

/// Maximum number of pending unit attentions; the oldest are dropped first.
const ATTENTIONS_MAX: usize = 16;

/// Queue of additional sense codes, each at most once, in the order in which they were established.
#[derive(Debug)]
pub(super) struct UnitAttentions(VecDeque<u16>);

impl UnitAttentions {
    /// Creates the queue of a new nexus, with its first unit attention.
    pub(super) fn new(first: u16) -> Self {
        Self(VecDeque::from([first]))
    }

    /// Establishes a unit attention.
    pub(super) fn establish(&mut self, attention: u16) {
        if self.0.contains(&attention) {
            return;
        }
        if self.0.len() == ATTENTIONS_MAX {
            self.0.pop_front();
        }
        self.0.push_back(attention);
        debug_assert!(self.0.len() <= ATTENTIONS_MAX);
    }

    /// Establishes the unit attention for a reset, which clears all earlier ones.
    pub(super) fn reset(&mut self) {
        self.0.clear();
        self.establish(code::UNIT_RESET);
    }

    /// Clears a unit attention: the host knows already.
    pub(super) fn clear(&mut self, attention: u16) {
        self.0.retain(|&pending| pending != attention);
    }

    /// Returns true if a unit attention is pending.
    #[inline]
    pub(super) fn any(&self) -> bool {
        !self.0.is_empty()
    }

    /// Takes the oldest unit attention.
    pub(super) fn take(&mut self) -> Option<u16> {
        self.0.pop_front()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn drain(mut attentions: UnitAttentions) -> Vec<u16> {
        std::iter::from_fn(|| attentions.take()).collect()
    }

    #[test]
    fn each_is_pending_once_and_the_oldest_are_dropped() {
        let mut attentions = UnitAttentions::new(code::POWER_ON);
        attentions.establish(code::MODE_CHANGED);
        attentions.establish(code::POWER_ON);
        assert_eq!(drain(attentions), [code::POWER_ON, code::MODE_CHANGED]);
        let mut attentions = UnitAttentions::new(0);
        (1..=ATTENTIONS_MAX as u16).for_each(|attention| attentions.establish(attention));
        assert_eq!(drain(attentions), (1..=ATTENTIONS_MAX as u16).collect::<Vec<_>>());
    }

    #[test]
    fn a_reset_clears_the_others() {
        let mut attentions = UnitAttentions::new(code::POWER_ON);
        attentions.reset();
        attentions.establish(code::MODE_CHANGED);
        attentions.clear(code::MODE_CHANGED);
        assert!(attentions.any());
        assert_eq!(drain(attentions), [code::UNIT_RESET]);
    }
}
