//! Numbers of exports within their front: LUNs, namespace ids.
//!
//! A host may remember a volume by its number indefinitely, and its outstanding writes to that volume must not reach
//! another one.  So a retired number is reserved for its image, and reused for another only when no other number is
//! free.

mod owners;

use std::collections::{BTreeSet, VecDeque};

use serde::{Deserialize, Serialize};

use crate::api::Front;
use crate::failure::{Failure, FailureKind, Result};
use crate::spec::ImageSpec;

pub use owners::Owners;

/// Maximum number of retired numbers; beyond it the oldest are free again.
const RETIRED_MAX: usize = 4096;

/// Number whose export has ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Retired {
    /// Front of the number.
    pub front: Front,
    /// Subsystem or target within the front; empty for the default one.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub within: String,
    /// Retired number.
    pub unit: u32,
    /// Identity of the image that had it; empty if unknown.
    #[serde(default)]
    pub image: String,
}

/// Numbers that exports other than `except` have.
pub struct TakenNumbers<'a> {
    /// Owners of all numbers.
    pub owners: &'a Owners,
    /// Export to ignore.
    pub except: &'a ImageSpec,
    /// Number of the ignored export.
    pub own: Option<u32>,
}

impl TakenNumbers<'_> {
    /// Returns the owner of a number.
    fn owner(&self, unit: u32) -> Option<&ImageSpec> {
        self.owners.of(unit).iter().find(|spec| *spec != self.except)
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
#[derive(Debug, Default)]
pub struct Numbers(VecDeque<Retired>);

impl Numbers {
    /// Creates it from persisted numbers.
    pub fn new(retired: Vec<Retired>) -> Self {
        let mut numbers = Self::default();
        retired.into_iter().for_each(|retired| numbers.retire(retired));
        numbers
    }

    /// Returns the numbers to persist.
    pub fn retired(&self) -> impl Iterator<Item = &Retired> {
        self.0.iter()
    }

    /// Retires the number of an export that has ended.
    pub fn retire(&mut self, retired: Retired) {
        self.take(retired.front, &retired.within, retired.unit);
        if self.0.len() == RETIRED_MAX {
            self.0.pop_front();
        }
        self.0.push_back(retired);
    }

    /// Removes a number from the list: it is in use again.
    pub fn take(&mut self, front: Front, within: &str, unit: u32) {
        self.0.retain(|retired| (retired.front, &*retired.within, retired.unit) != (front, within, unit));
    }

    /// Chooses the number of a new export: the requested one if it is free, the previous number of the image, the
    /// lowest that is neither taken nor retired, or the one that was retired first.
    pub fn choose(
        &self,
        front: Front,
        within: &str,
        taken: &TakenNumbers<'_>,
        wanted: Option<u32>,
        image: &str,
    ) -> Result<Option<u32>> {
        if let Some(unit) = wanted {
            front.check_unit(unit)?;
            return match taken.owner(unit) {
                Some(who) => {
                    let what = format!("number {unit} is {who}'s already over {}", front.name());
                    Err(Failure::new(FailureKind::Exists, what))
                }
                None => Ok(Some(unit)),
            };
        }
        let Some(units) = front.units() else { return Ok(None) };
        let (first, last) = (*units.start(), *units.end());
        let free = |unit: &u32| (first..=last).contains(unit) && taken.owner(*unit).is_none();
        let of_front = || self.0.iter().filter(|each| each.front == front && each.within == within && free(&each.unit));
        let before = of_front().rev().find(|retired| retired.image == image).map(|retired| retired.unit);
        let retired: BTreeSet<u32> = of_front().map(|retired| retired.unit).collect();
        let unit = before
            .or_else(|| taken.lowest_free(first, &retired).filter(|unit| *unit <= last))
            .or_else(|| of_front().next().map(|retired| retired.unit));
        unit.map(Some).ok_or_else(|| {
            let count = last - first + 1;
            let (group, more) = match front {
                Front::Iscsi => ("target", "--target of 'forebay iscsi-target create'"),
                _ => ("subsystem", "--subsystem of 'forebay nvme-subsystem create'"),
            };
            let what = format!("there are {count} exports in the {group} already, which is all there can be");
            Failure::new(FailureKind::NoSpace, what)
                .hint(format!("end one with 'forebay detach', or attach with {more}"))
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn retired(unit: u32, image: &str) -> Retired {
        Retired { front: Front::Iscsi, within: String::new(), unit, image: image.into() }
    }

    /// Chooses a number of the default subsystem or target for an image that has no export yet.
    fn choose(
        numbers: &Numbers,
        front: Front,
        owners: &Owners,
        wanted: Option<u32>,
        image: &str,
    ) -> Result<Option<u32>> {
        let except = "local/new".parse().expect("a spec");
        numbers.choose(front, "", &TakenNumbers { owners, except: &except, own: None }, wanted, image)
    }

    fn owner(unit: u32) -> ImageSpec {
        format!("local/i{unit}").parse().expect("a spec")
    }

    fn owned(units: impl IntoIterator<Item = u32>) -> Owners {
        let mut owners = Owners::new();
        units.into_iter().for_each(|unit| owners.add(unit, owner(unit)));
        owners
    }

    #[test]
    fn a_number_is_kept_for_its_image() {
        let mut numbers = Numbers::default();
        let taken = owned([0]);
        let choose = |numbers: &Numbers, wanted, image: &str| choose(numbers, Front::Iscsi, &taken, wanted, image);
        assert_eq!(choose(&numbers, None, "b"), Ok(Some(1)));
        numbers.retire(retired(1, "b"));
        assert_eq!(choose(&numbers, None, "c"), Ok(Some(2)), "another image gets another number");
        assert_eq!(choose(&numbers, None, "b"), Ok(Some(1)), "the same one gets its own");
        assert_eq!(choose(&numbers, Some(1), "c"), Ok(Some(1)), "who asks for it has it");
        assert!(choose(&numbers, Some(0), "c").is_err());
        numbers.take(Front::Iscsi, "", 1);
        assert_eq!(choose(&numbers, None, "c"), Ok(Some(1)));
        numbers.retire(Retired { front: Front::Nvme, ..retired(1, "x") });
        assert_eq!(choose(&numbers, None, "c"), Ok(Some(1)), "each front has its own");
        numbers.retire(Retired { within: "iqn.x:other".into(), ..retired(1, "x") });
        assert_eq!(choose(&numbers, None, "c"), Ok(Some(1)), "and each target");
    }

    #[test]
    fn so_many_are_kept_and_no_more() {
        let mut numbers = Numbers::default();
        (0..RETIRED_MAX as u32 + 10).for_each(|unit| numbers.retire(retired(unit, "x")));
        assert_eq!(numbers.retired().count(), RETIRED_MAX);
        assert_eq!(choose(&numbers, Front::Iscsi, &Owners::new(), None, "y"), Ok(Some(0)), "the oldest is free again");
    }

    #[test]
    fn numbers_are_those_that_the_front_can_serve() {
        let numbers = Numbers::default();
        for (front, beyond, limit) in [
            (Front::Nvme, vec![0, 8193, 9000, u32::MAX], "1 to 8192"),
            (Front::Iscsi, vec![16_384, 65_536, u32::MAX], "0 to 16383"),
        ] {
            for unit in beyond {
                let failure = choose(&numbers, front, &Owners::new(), Some(unit), "x").expect_err("out of range");
                assert_eq!(failure.kind, FailureKind::Invalid);
                assert!(failure.message.contains(limit), "{failure:?}");
            }
        }
        assert_eq!(choose(&numbers, Front::Nvme, &Owners::new(), Some(8192), "x"), Ok(Some(8192)));
        assert_eq!(choose(&numbers, Front::Iscsi, &Owners::new(), Some(16_383), "x"), Ok(Some(16_383)));
    }

    #[test]
    fn when_all_numbers_are_taken_no_more_are_given() {
        let mut taken = owned(1..=8192);
        let mut numbers = Numbers::default();
        let failure = choose(&numbers, Front::Nvme, &taken, None, "x").expect_err("one too many");
        assert_eq!(failure.kind, FailureKind::NoSpace);
        assert!(failure.message.contains("8192"), "{failure:?}");
        // A retired number is reused rather than failing, the oldest first.
        for unit in [77, 5] {
            taken.remove(unit, &owner(unit));
            numbers.retire(Retired { front: Front::Nvme, ..retired(unit, "gone") });
        }
        assert_eq!(choose(&numbers, Front::Nvme, &taken, None, "x"), Ok(Some(77)));
        // A number that an older build assigned is not reused if the front cannot serve it.
        numbers.retire(Retired { front: Front::Nvme, ..retired(9000, "x") });
        assert_eq!(choose(&numbers, Front::Nvme, &taken, None, "x"), Ok(Some(77)));
    }

    #[test]
    fn fronts_without_numbers_take_none() {
        let numbers = Numbers::default();
        assert_eq!(choose(&numbers, Front::Nbd, &Owners::new(), None, "x"), Ok(None));
        assert!(choose(&numbers, Front::Nbd, &Owners::new(), Some(1), "x").is_err());
        assert!(choose(&numbers, Front::Nvme, &Owners::new(), Some(0), "x").is_err(), "namespaces begin with 1");
    }

    #[test]
    fn an_export_does_not_stand_in_its_own_way() {
        let owners = owned([1, 2]);
        let taken = TakenNumbers { owners: &owners, except: &owner(2), own: Some(2) };
        let numbers = Numbers::default();
        assert_eq!(numbers.choose(Front::Nvme, "", &taken, Some(2), "x"), Ok(Some(2)));
        assert_eq!(numbers.choose(Front::Nvme, "", &taken, None, "x"), Ok(Some(2)));
        assert!(numbers.choose(Front::Nvme, "", &taken, Some(1), "x").is_err());
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
