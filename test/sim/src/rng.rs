//! The one source of chance: xoshiro256++, seeded through SplitMix64.

use std::ops::Range;

/// A seeded generator of random numbers.  The same seed gives the same numbers on every machine.
#[derive(Debug, Clone)]
pub struct Rng {
    state: [u64; 4],
}

impl Rng {
    /// From a seed; any number will do, neighbours too.
    pub fn new(seed: u64) -> Self {
        let mut mix = seed;
        let state = std::array::from_fn(|_| {
            mix = mix.wrapping_add(0x9e37_79b9_7f4a_7c15);
            mix64(mix)
        });
        Self { state }
    }

    /// Another generator, whose numbers have nothing to do with what this one gives from now on.
    pub fn fork(&mut self) -> Self {
        Self::new(self.bits())
    }

    /// 64 random bits.
    pub fn bits(&mut self) -> u64 {
        let s = &mut self.state;
        let result = s[0].wrapping_add(s[3]).rotate_left(23).wrapping_add(s[0]);
        let t = s[1] << 17;
        s[2] ^= s[0];
        s[3] ^= s[1];
        s[1] ^= s[2];
        s[0] ^= s[3];
        s[2] ^= t;
        s[3] = s[3].rotate_left(45);
        result
    }

    /// A number below `bound`, which must not be zero.
    pub fn below(&mut self, bound: u64) -> u64 {
        assert!(bound > 0, "a random number below zero");
        ((u128::from(self.bits()) * u128::from(bound)) >> 64) as u64
    }

    /// A number from the range, which must not be empty.
    pub fn range(&mut self, range: Range<u64>) -> u64 {
        range.start + self.below(range.end - range.start)
    }

    /// True `ppm` times in a million.  Takes no number from the generator when `ppm` is zero.
    pub fn ppm(&mut self, ppm: u32) -> bool {
        ppm > 0 && self.below(1_000_000) < u64::from(ppm)
    }

    /// True once in `n` times.
    pub fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }

    /// Returns true with a probability of one half.
    pub fn coin(&mut self) -> bool {
        self.bits() >> 63 == 1
    }

    /// One of the slice's items, which must not be empty.
    pub fn pick<'a, T>(&mut self, items: &'a [T]) -> &'a T {
        &items[self.below(items.len() as u64) as usize]
    }

    /// Brings the items into a random order.
    pub fn shuffle<T>(&mut self, items: &mut [T]) {
        for i in (1..items.len()).rev() {
            items.swap(i, self.below(i as u64 + 1) as usize);
        }
    }
}

/// Mixes the bits of a number well; a bijection.
pub fn mix64(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_numbers_of_a_seed_never_change() {
        // A change here means that every recorded seed replays something else.
        let mut rng = Rng::new(1);
        let first: Vec<u64> = (0..3).map(|_| rng.bits()).collect();
        assert_eq!(first, [0xcfc5d07f6f03c29b, 0xbf424132963fe08d, 0x19a37d5757aaf520]);
    }

    #[test]
    fn numbers_stay_below_their_bound_and_reach_it() {
        let mut rng = Rng::new(7);
        let mut seen = [false; 10];
        (0..1000).for_each(|_| seen[rng.below(10) as usize] = true);
        assert!(seen.iter().all(|&hit| hit));
        assert!((0..1000).all(|_| !rng.ppm(0)));
        assert!((0..1000).all(|_| rng.ppm(1_000_000)));
    }
}
