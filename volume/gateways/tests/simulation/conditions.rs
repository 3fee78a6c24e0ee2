//! Conditions of a world: its random numbers, times and faults.

use std::time::Duration;

/// Random numbers from a seed (splitmix64).
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut hash = self.0;
        hash = (hash ^ (hash >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        hash = (hash ^ (hash >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        hash ^ (hash >> 31)
    }

    pub fn below(&mut self, end: u64) -> u64 {
        self.next() % end.max(1)
    }

    pub fn one_in(&mut self, of: u64) -> bool {
        self.below(of) == 0
    }

    pub fn between(&mut self, (low, high): (Duration, Duration)) -> Duration {
        low + Duration::from_nanos(self.below((high - low).as_nanos() as u64 + 1))
    }
}

/// Times of a world, from and to.
#[derive(Clone, Copy)]
pub struct Latencies {
    pub message: (Duration, Duration),
    /// One way of a request to the record's object.
    pub record: (Duration, Duration),
    pub notify: (Duration, Duration),
    pub fence: (Duration, Duration),
    pub open: (Duration, Duration),
    pub close: (Duration, Duration),
    pub prepare: (Duration, Duration),
}

const fn ms(low: u64, high: u64) -> (Duration, Duration) {
    (Duration::from_millis(low), Duration::from_millis(high))
}

impl Latencies {
    pub const USUAL: Self = Self {
        message: ms(0, 2),
        record: ms(1, 10),
        notify: ms(1, 20),
        fence: ms(50, 700),
        open: ms(10, 200),
        close: ms(2, 50),
        prepare: ms(5, 50),
    };
    /// The record's object answers late.
    pub const SLOW_RECORD: Self = Self { record: ms(20, 60), notify: ms(20, 200), ..Self::USUAL };
}

/// Faults that come at random.
#[derive(Clone, Copy, Default)]
pub struct RandomFaults {
    /// One in so many answers of the pool to a change is lost; 0: none.
    pub lost_answers: u64,
    /// One in so many messages is lost; 0: none.
    pub lost_messages: u64,
    /// One in so many attempts to open a volume fails; 0: none.
    pub failed_opens: u64,
    /// One in so many fencing requests fails; 0: none.
    pub failed_fences: u64,
}
