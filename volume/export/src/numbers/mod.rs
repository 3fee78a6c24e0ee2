//! Numbers of exports within their front: LUNs, namespace ids.
//!
//! A host may remember a volume by its number indefinitely, and its outstanding writes to that volume must not reach
//! another one.
//!
//! | invariant | |
//! |---|---|
//! | N1 | a chosen number has no other owner |
//! | N2 | a retired number is reserved for its image; another image gets it only on request, or when no other number is free, the oldest first |
//! | N3 | a number is retired at most once |

mod owners;

use std::collections::{BTreeSet, VecDeque};
use std::ops::RangeInclusive;

use serde::{Deserialize, Serialize};

pub use owners::NumberOwners;

/// Maximum number of retired numbers; beyond it the oldest are free again.
const RETIRED_MAX: usize = 4096;

/// Number over a front `F` whose export has ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct RetiredNumber<F> {
    /// Front of the number.
    pub front: F,
    /// Subsystem or target within the front; empty for the default one.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub within: String,
    /// Retired number.
    pub unit: u32,
    /// Identity of the image that had it; empty if unknown.
    #[serde(default)]
    pub image: String,
}

/// Reason for which no number can be chosen.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NumberError<N> {
    /// The requested number has an owner.
    Taken(N),
    /// All numbers have owners.
    NoneFree,
}

/// Numbers that exports other than `except` have.
pub struct TakenNumbers<'a, N> {
    /// Owners of all numbers.
    pub owners: &'a NumberOwners<N>,
    /// Export to ignore.
    pub except: &'a N,
    /// Number of the ignored export.
    pub own: Option<u32>,
}

impl<N: PartialEq> TakenNumbers<'_, N> {
    /// Returns the owner of a number.
    fn owner(&self, unit: u32) -> Option<&N> {
        self.owners.of(unit).iter().find(|name| *name != self.except)
    }

    /// Returns the lowest number from `first` on that has no owner and is not in `list`.
    fn lowest_free(&self, first: u32, list: &BTreeSet<u32>) -> Option<u32> {
        let mut lowest = self.owners.lowest_free(first);
        while let Some(unit) = lowest.filter(|unit| list.contains(unit)) {
            lowest = unit.checked_add(1).and_then(|next| self.owners.lowest_free(next));
        }
        let own = self.own.filter(|unit| *unit >= first && self.owner(*unit).is_none() && !list.contains(unit));
        match (own, lowest) {
            (Some(own), Some(lowest)) => Some(own.min(lowest)),
            (own, lowest) => own.or(lowest),
        }
    }
}

/// Retired numbers, reserved for images that are no longer exported, the oldest first.
#[derive(Debug)]
pub struct ExportNumbers<F>(VecDeque<RetiredNumber<F>>);

impl<F: PartialEq> ExportNumbers<F> {
    /// Creates it from persisted numbers.
    pub fn new(retired: Vec<RetiredNumber<F>>) -> Self {
        let mut numbers = Self(VecDeque::new());
        retired.into_iter().for_each(|retired| numbers.retire(retired));
        numbers
    }

    /// Returns the numbers to persist.
    pub fn retired(&self) -> impl Iterator<Item = &RetiredNumber<F>> {
        self.0.iter()
    }

    /// Retires the number of an export that has ended.
    pub fn retire(&mut self, retired: RetiredNumber<F>) {
        self.take(&retired.front, &retired.within, retired.unit);
        if self.0.len() == RETIRED_MAX {
            self.0.pop_front();
        }
        self.0.push_back(retired);
    }

    /// Removes a number from the list: it is in use again.
    pub fn take(&mut self, front: &F, within: &str, unit: u32) {
        self.0.retain(|retired| (&retired.front, &*retired.within, retired.unit) != (front, within, unit));
    }

    /// Chooses the number of a new export among those that its front can serve: the requested one if it is free, the
    /// previous number of the image, the lowest that is neither taken nor retired, or the one that was retired first.
    ///
    /// # Errors
    /// If the requested number, or every number, is taken.
    pub fn choose<N: PartialEq + Clone>(
        &self,
        (front, within): (&F, &str),
        units: RangeInclusive<u32>,
        taken: &TakenNumbers<'_, N>,
        wanted: Option<u32>,
        image: &str,
    ) -> Result<u32, NumberError<N>> {
        if let Some(unit) = wanted {
            return taken.owner(unit).map_or(Ok(unit), |owner| Err(NumberError::Taken(owner.clone())));
        }
        let (first, last) = (*units.start(), *units.end());
        let free = |unit: &u32| units.contains(unit) && taken.owner(*unit).is_none();
        let of_front =
            || self.0.iter().filter(|each| each.front == *front && each.within == within && free(&each.unit));
        let before = of_front().rev().find(|retired| retired.image == image).map(|retired| retired.unit);
        let retired: BTreeSet<u32> = of_front().map(|retired| retired.unit).collect();
        let unit = before
            .or_else(|| taken.lowest_free(first, &retired).filter(|unit| *unit <= last))
            .or_else(|| of_front().next().map(|retired| retired.unit));
        debug_assert!(unit.is_none_or(|unit| taken.owner(unit).is_none()), "N1");
        unit.ok_or(NumberError::NoneFree)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn retired(unit: u32, image: &str) -> RetiredNumber<&'static str> {
        RetiredNumber { front: "iscsi", within: String::new(), unit, image: image.into() }
    }

    /// Chooses a number of the default target for an image that has no export yet.
    fn choose(
        numbers: &ExportNumbers<&'static str>,
        owners: &NumberOwners<String>,
        wanted: Option<u32>,
        image: &str,
    ) -> Result<u32, NumberError<String>> {
        let taken = TakenNumbers { owners, except: &"new".to_owned(), own: None };
        numbers.choose((&"iscsi", ""), 0..=16_383, &taken, wanted, image)
    }

    fn owner(unit: u32) -> String {
        format!("i{unit}")
    }

    fn owned(units: impl IntoIterator<Item = u32>) -> NumberOwners<String> {
        let mut owners = NumberOwners::new();
        units.into_iter().for_each(|unit| owners.add(unit, owner(unit)));
        owners
    }

    #[test]
    fn a_number_is_kept_for_its_image() {
        let mut numbers = ExportNumbers::new(Vec::new());
        let taken = owned([0]);
        let choose = |numbers: &ExportNumbers<_>, wanted, image: &str| choose(numbers, &taken, wanted, image);
        assert_eq!(choose(&numbers, None, "b"), Ok(1));
        numbers.retire(retired(1, "b"));
        assert_eq!(choose(&numbers, None, "c"), Ok(2), "another image gets another number");
        assert_eq!(choose(&numbers, None, "b"), Ok(1), "the same one gets its own");
        assert_eq!(choose(&numbers, Some(1), "c"), Ok(1), "who asks for it has it");
        assert_eq!(choose(&numbers, Some(0), "c"), Err(NumberError::Taken(owner(0))));
        numbers.take(&"iscsi", "", 1);
        assert_eq!(choose(&numbers, None, "c"), Ok(1));
        numbers.retire(RetiredNumber { front: "nvme", ..retired(1, "x") });
        assert_eq!(choose(&numbers, None, "c"), Ok(1), "each front has its own");
        numbers.retire(RetiredNumber { within: "iqn.x:other".into(), ..retired(1, "x") });
        assert_eq!(choose(&numbers, None, "c"), Ok(1), "and each target");
    }

    #[test]
    fn so_many_are_kept_and_no_more() {
        let mut numbers = ExportNumbers::new(Vec::new());
        (0..RETIRED_MAX as u32 + 10).for_each(|unit| numbers.retire(retired(unit, "x")));
        assert_eq!(numbers.retired().count(), RETIRED_MAX);
        assert_eq!(choose(&numbers, &NumberOwners::new(), None, "y"), Ok(0), "the oldest is free again");
    }

    #[test]
    fn an_export_does_not_stand_in_its_own_way() {
        let owners = owned([1, 2]);
        let taken = TakenNumbers { owners: &owners, except: &owner(2), own: Some(2) };
        let numbers = ExportNumbers::new(Vec::new());
        let choose = |wanted| numbers.choose((&"nvme", ""), 1..=8192, &taken, wanted, "x");
        assert_eq!(choose(Some(2)), Ok(2));
        assert_eq!(choose(None), Ok(2));
        assert_eq!(choose(Some(1)), Err(NumberError::Taken(owner(1))));
    }

    proptest! {
        #[test]
        fn the_lowest_free_number_is_the_first_that_no_other_has_and_that_is_not_kept(
            taken in prop::collection::btree_set(0_u32..24, 0..20),
            kept in prop::collection::btree_set(0_u32..24, 0..20),
            (first, own) in (0_u32..4, 0_u32..24),
        ) {
            let owners = owned(taken.iter().copied());
            let except = owner(own);
            let numbers = TakenNumbers { owners: &owners, except: &except, own: taken.get(&own).copied() };
            let expected = (first..).find(|unit| (!taken.contains(unit) || *unit == own) && !kept.contains(unit));
            prop_assert_eq!(numbers.lowest_free(first, &kept), expected);
        }
    }
}
