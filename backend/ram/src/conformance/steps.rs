//! Random steps for [`compare`](super::compare()).

use forebay_block::Extent;

/// Number of objects that the steps work on.
pub(super) const OBJECTS: u8 = 3;
/// Upper bound of offsets and sizes, in bytes.
const SPAN: u64 = 96 * 1024;

/// Random step.
#[derive(Debug, Clone)]
pub enum RandomStep {
    /// Transactions submitted together, and awaited afterwards.
    Submit(Vec<Submit>),
    /// Takes a snapshot of all objects.
    Snap,
    /// Removes one of the existing snapshots, by its index.
    SnapRemove(u8),
    /// Flushes the backend.
    Flush,
}

/// Random transaction.
#[derive(Debug, Clone)]
pub struct Submit {
    /// Index of the object.
    pub object: u8,
    /// Guards, before all other steps.
    pub guards: Vec<Guard>,
    /// Operations of the transaction.
    pub ops: Vec<StepOp>,
    /// Durability required before the acknowledgement.
    pub durable: bool,
}

/// Guard, constructed to hold or to fail at the time when its step begins.
#[derive(Debug, Clone)]
pub enum Guard {
    /// Existence of the object.
    Exists,
    /// Version of the object; a guard that holds is only used for a transaction submitted alone.
    Version {
        /// True to assert the current version.
        holds: bool,
    },
    /// Bytes of the object.
    Compare {
        /// Range to compare.
        extent: Extent,
        /// True to compare with the current bytes.
        holds: bool,
    },
    /// Value of one key.
    Kv {
        /// Key to compare.
        key: u8,
        /// True to compare with the current value.
        holds: bool,
    },
    /// Exclusive creation of the object.
    CreateNew,
}

/// Random change.
#[derive(Debug, Clone)]
pub enum StepOp {
    /// Creates the object.
    Create,
    /// Writes a pattern.
    Write(Extent, u8),
    /// Replaces the content by this many bytes of a pattern.
    WriteFull(u64, u8),
    /// Zeroes a range.
    Zero(Extent),
    /// Sets the size.
    Truncate(u64),
    /// Removes the object.
    Remove,
    /// Sets keys.
    KvSet(Vec<(u8, u8)>),
    /// Removes keys.
    KvRemove(Vec<u8>),
    /// Rolls back to one of the existing snapshots, by its index.
    Rollback(u8),
}

/// Generates up to `max` steps, at least one, from a seed: the same ones each time.
pub fn steps_from_seed(seed: u64, max: usize) -> Vec<RandomStep> {
    let mut dice = Dice(seed);
    let count = 1 + dice.below(max as u64) as usize;
    (0..count).map(|_| dice.step()).collect()
}

/// Random numbers from a seed: SplitMix64.
struct Dice(u64);

impl Dice {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ (mixed >> 31)
    }

    /// Returns a number below `end`, which is far below 2^64: the remainder's bias does not matter here.
    fn below(&mut self, end: u64) -> u64 {
        self.next() % end.max(1)
    }

    fn byte(&mut self) -> u8 {
        self.next() as u8
    }

    /// Returns true `part` times of ten.
    fn of_ten(&mut self, part: u64) -> bool {
        self.below(10) < part
    }

    /// Returns a list of `least` to `most` elements.
    fn list<T>(&mut self, least: u64, most: u64, mut element: impl FnMut(&mut Self) -> T) -> Vec<T> {
        let count = least + self.below(most - least + 1);
        (0..count).map(|_| element(self)).collect()
    }

    fn step(&mut self) -> RandomStep {
        match self.below(16) {
            0..12 => RandomStep::Submit(self.list(1, 5, Self::submit)),
            12..14 => RandomStep::Snap,
            14 => RandomStep::SnapRemove(self.byte()),
            _ => RandomStep::Flush,
        }
    }

    fn submit(&mut self) -> Submit {
        Submit {
            object: self.below(OBJECTS.into()) as u8,
            guards: if self.below(4) == 0 { self.list(1, 2, Self::guard) } else { Vec::new() },
            ops: if self.of_ten(6) { vec![self.op()] } else { self.list(0, 4, Self::op) },
            durable: self.of_ten(1),
        }
    }

    fn guard(&mut self) -> Guard {
        let holds = self.of_ten(8);
        match self.below(5) {
            0 => Guard::Exists,
            1 => Guard::Version { holds },
            2 => Guard::Compare { extent: self.extent(), holds },
            3 => Guard::Kv { key: self.below(8) as u8, holds },
            _ => Guard::CreateNew,
        }
    }

    fn op(&mut self) -> StepOp {
        match self.below(25) {
            0 => StepOp::Create,
            1..11 => StepOp::Write(self.extent(), self.below(250) as u8),
            11 => StepOp::WriteFull(self.offset(), self.byte()),
            12..16 => StepOp::Zero(self.extent()),
            16..19 => StepOp::Truncate(self.offset()),
            19 => StepOp::Remove,
            20..23 => StepOp::KvSet(self.list(1, 3, |dice| (dice.below(8) as u8, dice.byte()))),
            23 => StepOp::KvRemove(self.list(1, 2, |dice| dice.below(8) as u8)),
            _ => StepOp::Rollback(self.byte()),
        }
    }

    /// Returns an offset, often at or beside a block boundary, where errors are likely.
    fn offset(&mut self) -> u64 {
        match self.below(3) {
            0 => self.below(SPAN / 4096) * 4096,
            1 => (1 + self.below(SPAN / 4096 - 1)) * 4096 - 1 + self.below(3),
            _ => self.below(SPAN),
        }
    }

    fn extent(&mut self) -> Extent {
        let (a, b) = (self.offset(), self.offset());
        if self.below(2) == 0 {
            return Extent::new(a, b % 6000);
        }
        Extent::new(a.min(b), a.abs_diff(b))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_seed_always_gives_the_same_steps_and_seeds_give_all_kinds() {
        let text = |seed| format!("{:?}", steps_from_seed(seed, 40));
        assert_eq!(text(7), text(7));
        assert_ne!(text(7), text(8));
        let all: String = (0..200).map(text).collect();
        let kinds = [
            "Snap,",
            "SnapRemove",
            "Flush",
            "Exists",
            "Version",
            "Compare",
            "Kv {",
            "CreateNew",
            "Create,",
            "Write(",
            "WriteFull",
            "Zero",
            "Truncate",
            "Remove",
            "KvSet",
            "KvRemove",
            "Rollback",
            "durable: true",
        ];
        for kind in kinds {
            assert!(all.contains(kind), "{kind}");
        }
        assert!((0..200).all(|seed| (1..=40).contains(&steps_from_seed(seed, 40).len())));
    }
}
