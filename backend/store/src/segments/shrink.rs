//! Segments that are taken from the log: while their columns are moved, and before the store gives them up.

use super::{SegmentState, Segments};

impl Segments {
    /// Takes a free segment from the log until it is released. Returns false if it is not free.
    pub fn hold(&mut self, segment: u32) -> bool {
        if self.state(segment) != SegmentState::Free || self.held.contains(&segment) || self.added.contains(&segment) {
            return false;
        }
        self.free.retain(|&free| free != segment);
        self.held.insert(segment);
        true
    }

    /// Ends the hold of a free segment, which is used last then.
    pub fn release(&mut self, segment: u32) {
        if self.held.remove(&segment) && segment < self.retired_from {
            self.free.push_back(segment);
        }
    }

    /// Takes the segments from number `count` on from the log, and returns all others to it.
    pub fn retire_from(&mut self, count: u32) {
        let before = std::mem::replace(&mut self.retired_from, count);
        self.free.retain(|&free| free < count);
        for segment in before..count.min(self.geometry.segment_count) {
            let is_taken = self.held.contains(&segment) || self.added.contains(&segment);
            if self.state(segment) == SegmentState::Free && !is_taken {
                self.free.push_back(segment);
            }
        }
    }

    /// Returns the first number, `count` or higher, from which on segments can be retired so that `needed` free ones are left.
    pub fn retirable_from(&self, count: u32, needed: u32) -> u32 {
        let is_free = |segment: u32| {
            let is_taken = self.held.contains(&segment) || self.added.contains(&segment);
            self.state(segment) == SegmentState::Free && !is_taken
        };
        let mut free = (0..self.geometry.segment_count).filter(|&segment| is_free(segment));
        match free.nth((needed as usize).saturating_sub(1)) {
            Some(last) => count.max(last + 1),
            None => self.geometry.segment_count.max(count),
        }
    }

    /// Returns the number of retired segments.
    pub fn retired_count(&self) -> u32 {
        self.geometry.segment_count.saturating_sub(self.retired_from)
    }

    /// Returns the retired segments that are not free, with their states.
    pub fn retired_in_use(&self) -> impl Iterator<Item = (u32, SegmentState)> {
        let retired = self.retired_from.min(self.geometry.segment_count)..self.geometry.segment_count;
        let state = |segment| (segment, self.state(segment));
        let is_used = |(segment, state): &(u32, SegmentState)| {
            *state != SegmentState::Free || self.held.contains(segment) || self.added.contains(segment)
        };
        retired.map(state).filter(is_used)
    }

    /// Returns the live bytes of retired segments that can be emptied.
    pub fn retired_live_bytes(&self) -> u64 {
        let used = self.retired_in_use().filter(|(_, state)| *state == SegmentState::Used);
        used.map(|(segment, _)| u64::from(self.live.of(segment))).sum()
    }

    /// Returns the retired segments with live data that can be moved, the emptiest first: the first one, and others up to
    /// `live_max` live bytes in total.
    pub fn retired_victims(&self, live_max: u64) -> Vec<u32> {
        let used = self.retired_in_use().filter(|(_, state)| *state == SegmentState::Used);
        let mut victims: Vec<(u32, u32)> = used.map(|(segment, _)| (self.live.of(segment), segment)).collect();
        victims.retain(|&(live, _)| live > 0);
        victims.sort_unstable();
        let mut sum = 0;
        let fits = |&(live, _): &(u32, u32)| {
            let is_first = sum == 0;
            sum += u64::from(live);
            is_first && live_max > 0 || sum <= live_max
        };
        victims.into_iter().take_while(fits).map(|(_, segment)| segment).collect()
    }

    /// Gives up the retired segments, which must all be free. Returns false, and changes nothing, if they are not.
    pub fn shrink(&mut self) -> bool {
        if self.retired_in_use().next().is_some() {
            return false;
        }
        let count = self.retired_from.min(self.geometry.segment_count);
        self.geometry.segment_count = count;
        self.live.truncate(count);
        if let Some(table) = &mut self.checkpoint {
            table.truncate(count);
        }
        self.state.truncate(count as usize);
        self.to_punch.retain(|&segment| segment < count);
        self.uses.forget_from(count);
        self.checkpoint_segments = self.checkpoint_segments.min(count);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::segments::{LiveTable, SegmentGeometry};

    fn segments(count: u32) -> Segments {
        let geometry = SegmentGeometry { segment_size: 64 << 10, segment_count: count };
        Segments::new(geometry, LiveTable::new(count))
    }

    #[test]
    fn a_held_segment_is_not_allocated() {
        let mut segments = segments(24);
        assert!(segments.hold(0) && !segments.hold(0));
        assert_eq!((segments.allocate(), segments.free_count()), (Some(1), 22));
        assert!(!segments.hold(1), "the log has it");
        segments.release(0);
        segments.release(0);
        assert_eq!(segments.free_count(), 23, "released once");
        let order: Vec<u32> = std::iter::from_fn(|| segments.allocate()).collect();
        assert_eq!(order.last(), Some(&0));
    }

    #[test]
    fn retired_segments_are_emptied_and_given_up() {
        let mut segments = segments(30);
        let log = segments.allocate().expect("free");
        segments.entered(log, 1);
        let next = segments.allocate().expect("free");
        for _ in 0..27 {
            segments.allocate().expect("free");
        }
        // One of the last ones has live data, and another one is read.
        let data = segments.geometry.first_block(27);
        segments.add_block(data);
        (2..29).for_each(|segment| segments.leave(segment));
        segments.begin_checkpoint();
        segments.commit_checkpoint(log, None);
        let free = segments.free_count();
        segments.retire_from(26);
        assert_eq!((segments.retired_count(), segments.free_count()), (4, free - 3));
        assert_eq!(segments.retired_in_use().collect::<Vec<_>>(), [(27, SegmentState::Used)]);
        assert_eq!((segments.retired_victims(1), segments.retired_victims(0)), (vec![27], vec![]));
        assert_eq!(segments.retired_live_bytes(), 4096);
        assert!(!segments.shrink());
        segments.sub_block(data);
        assert_eq!(segments.retired_victims(u64::MAX), []);
        segments.begin_checkpoint();
        segments.commit_checkpoint(log, None);
        assert_eq!(segments.free_count(), free - 3, "a retired one is not free for the log");
        // All of them back, and taken again.
        segments.retire_from(u32::MAX);
        assert_eq!((segments.retired_count(), segments.free_count()), (0, free + 1));
        segments.retire_from(26);
        assert!(segments.hold(25));
        assert!(segments.shrink());
        assert_eq!((segments.geometry.segment_count, segments.state(26)), (26, SegmentState::Gone));
        assert!(!segments.is_needed(29));
        segments.release(25);
        assert!(std::iter::from_fn(|| segments.allocate()).all(|segment| segment < 26 && segment != next));
        segments.retire_from(u32::MAX);
        segments.grow(28);
        segments.begin_checkpoint();
        segments.commit_checkpoint(log, None);
        assert_eq!(segments.free_count(), 2);
    }

    #[test]
    fn segments_are_retired_as_far_as_enough_free_ones_are_left() {
        let mut segments = segments(30);
        let used: Vec<u32> = (0..10).map(|_| segments.allocate().expect("free")).collect();
        assert_eq!(used.last(), Some(&9));
        // Free ones begin with number 10.
        assert_eq!(segments.retirable_from(20, 5), 20);
        assert_eq!(segments.retirable_from(12, 5), 15);
        assert_eq!(segments.retirable_from(12, 25), 30, "there are only 20");
        segments.retire_from(15);
        assert_eq!((segments.free_count(), segments.retirable_from(12, 5)), (5, 15), "retired before or not");
        assert!(segments.hold(10));
        assert_eq!(segments.retirable_from(12, 5), 16);
    }

    #[test]
    fn a_retired_segment_of_the_log_is_in_use() {
        let mut segments = segments(24);
        let log = segments.allocate().expect("free");
        segments.entered(log, 1);
        segments.retire_from(0);
        assert_eq!(segments.retired_in_use().collect::<Vec<_>>(), [(log, SegmentState::Open)]);
        assert!(segments.allocate().is_none() && !segments.shrink());
    }
}
