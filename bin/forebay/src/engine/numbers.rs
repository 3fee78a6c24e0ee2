//! The numbers of exports within their front: LUNs, namespace ids.
//!
//! A host remembers a volume by its number for as long as it likes, and what it still has to write to the one it knows
//! must not reach another.  So a number that was given up is kept for its image, and given to others only when there
//! is no end of those that were given up since.

use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fmt;

use serde::{Deserialize, Serialize};

use crate::api::Front;
use crate::failure::{Failure, FailureKind, Result};

/// Numbers that are kept after their exports have ended; past that the oldest are free again.
const RETIRED_MAX: usize = 4096;

/// A number whose export has ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Retired {
    /// Where it was a number.
    pub front: Front,
    /// The number.
    pub unit: u32,
    /// What identifies the image that had it; empty where that was not known.
    #[serde(default)]
    pub image: String,
}

/// The numbers that are kept for images that are not exported any more, the oldest first.
#[derive(Debug, Default)]
pub struct Numbers(VecDeque<Retired>);

impl Numbers {
    /// What was remembered.
    pub fn new(retired: Vec<Retired>) -> Self {
        let mut numbers = Self::default();
        retired.into_iter().for_each(|retired| numbers.retire(retired));
        numbers
    }

    /// What is to be remembered.
    pub fn retired(&self) -> impl Iterator<Item = &Retired> {
        self.0.iter()
    }

    /// An export has ended.
    pub fn retire(&mut self, retired: Retired) {
        self.take(retired.front, retired.unit);
        if self.0.len() == RETIRED_MAX {
            self.0.pop_front();
        }
        self.0.push_back(retired);
    }

    /// A number is in use again.
    pub fn take(&mut self, front: Front, unit: u32) {
        self.0.retain(|retired| (retired.front, retired.unit) != (front, unit));
    }

    /// The number of a new export: the one asked for if nobody has it, the one that the image had before, the lowest that
    /// nobody had, or the one that was given up longest ago.  `taken` says who has numbers now.
    pub fn choose(
        &self,
        front: Front,
        taken: &BTreeMap<u32, impl fmt::Display>,
        wanted: Option<u32>,
        image: &str,
    ) -> Result<Option<u32>> {
        if let Some(unit) = wanted {
            front.check_unit(unit)?;
            return match taken.get(&unit) {
                Some(who) => {
                    let what = format!("number {unit} is {who}'s already over {}", front.name());
                    Err(Failure::new(FailureKind::Exists, what))
                }
                None => Ok(Some(unit)),
            };
        }
        let Some(mut units) = front.units() else { return Ok(None) };
        let (first, last) = (*units.start(), *units.end());
        let free = |unit: &u32| (first..=last).contains(unit) && !taken.contains_key(unit);
        let of_front = || self.0.iter().filter(|retired| retired.front == front && free(&retired.unit));
        let before = of_front().rev().find(|retired| retired.image == image).map(|retired| retired.unit);
        let retired: BTreeSet<u32> = of_front().map(|retired| retired.unit).collect();
        let unit = before
            .or_else(|| units.find(|unit| free(unit) && !retired.contains(unit)))
            .or_else(|| of_front().next().map(|retired| retired.unit));
        unit.map(Some).ok_or_else(|| {
            let count = last - first + 1;
            let what = format!("there are {count} exports over {} already, which is all there can be", front.name());
            Failure::new(FailureKind::NoSpace, what).hint("end one with 'forebay detach', or export over another front")
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn retired(unit: u32, image: &str) -> Retired {
        Retired { front: Front::Iscsi, unit, image: image.into() }
    }

    #[test]
    fn a_number_is_kept_for_its_image() {
        let mut numbers = Numbers::default();
        let taken = BTreeMap::from([(0, "local/a".to_owned())]);
        let choose = |numbers: &Numbers, wanted, image: &str| numbers.choose(Front::Iscsi, &taken, wanted, image);
        assert_eq!(choose(&numbers, None, "b"), Ok(Some(1)));
        numbers.retire(retired(1, "b"));
        assert_eq!(choose(&numbers, None, "c"), Ok(Some(2)), "another image gets another number");
        assert_eq!(choose(&numbers, None, "b"), Ok(Some(1)), "the same one gets its own");
        assert_eq!(choose(&numbers, Some(1), "c"), Ok(Some(1)), "who asks for it has it");
        assert!(choose(&numbers, Some(0), "c").is_err());
        numbers.take(Front::Iscsi, 1);
        assert_eq!(choose(&numbers, None, "c"), Ok(Some(1)));
        numbers.retire(Retired { front: Front::Nvme, unit: 1, image: "x".into() });
        assert_eq!(choose(&numbers, None, "c"), Ok(Some(1)), "each front has its own");
    }

    #[test]
    fn so_many_are_kept_and_no_more() {
        let mut numbers = Numbers::default();
        (0..RETIRED_MAX as u32 + 10).for_each(|unit| numbers.retire(retired(unit, "x")));
        assert_eq!(numbers.retired().count(), RETIRED_MAX);
        assert_eq!(
            numbers.choose(Front::Iscsi, &BTreeMap::<u32, String>::new(), None, "y"),
            Ok(Some(0)),
            "the oldest is free again"
        );
    }

    #[test]
    fn numbers_are_those_that_the_front_can_serve() {
        let numbers = Numbers::default();
        for (front, beyond, limit) in [
            (Front::Nvme, vec![0, 8193, 9000, u32::MAX], "1 to 8192"),
            (Front::Iscsi, vec![16_384, 65_536, u32::MAX], "0 to 16383"),
        ] {
            for unit in beyond {
                let failure =
                    numbers.choose(front, &BTreeMap::<u32, String>::new(), Some(unit), "x").expect_err("out of range");
                assert_eq!(failure.kind, FailureKind::Invalid);
                assert!(failure.message.contains(limit), "{failure:?}");
            }
        }
        assert_eq!(numbers.choose(Front::Nvme, &BTreeMap::<u32, String>::new(), Some(8192), "x"), Ok(Some(8192)));
        assert_eq!(numbers.choose(Front::Iscsi, &BTreeMap::<u32, String>::new(), Some(16_383), "x"), Ok(Some(16_383)));
    }

    #[test]
    fn when_all_numbers_are_taken_no_more_are_given() {
        let mut taken: BTreeMap<u32, String> = (1..=8192).map(|unit| (unit, format!("local/{unit}"))).collect();
        let mut numbers = Numbers::default();
        let failure = numbers.choose(Front::Nvme, &taken, None, "x").expect_err("one too many");
        assert_eq!(failure.kind, FailureKind::NoSpace);
        assert!(failure.message.contains("8192"), "{failure:?}");
        // What was given up is given again before nothing is given, and the oldest first.
        for unit in [77, 5] {
            taken.remove(&unit);
            numbers.retire(Retired { front: Front::Nvme, unit, image: "gone".into() });
        }
        assert_eq!(numbers.choose(Front::Nvme, &taken, None, "x"), Ok(Some(77)));
        // A number that an older build gave is not given again when the front cannot serve it.
        numbers.retire(Retired { front: Front::Nvme, unit: 9000, image: "x".into() });
        assert_eq!(numbers.choose(Front::Nvme, &taken, None, "x"), Ok(Some(77)));
    }

    #[test]
    fn fronts_without_numbers_take_none() {
        let numbers = Numbers::default();
        assert_eq!(numbers.choose(Front::Nbd, &BTreeMap::<u32, String>::new(), None, "x"), Ok(None));
        assert!(numbers.choose(Front::Nbd, &BTreeMap::<u32, String>::new(), Some(1), "x").is_err());
        assert!(
            numbers.choose(Front::Nvme, &BTreeMap::<u32, String>::new(), Some(0), "x").is_err(),
            "namespaces begin with 1"
        );
    }
}
