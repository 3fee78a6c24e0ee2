//! Numbers of exports within their front, as [`ExportNumbers`] chooses them, in the words of operators.

use forebay_export::{ExportNumbers, NumberError, TakenNumbers};

use crate::api::Front;
use crate::failure::{Failure, FailureKind, Result};
use crate::spec::ImageSpec;

/// Chooses the number of a new export; `None` in fronts whose exports have none.
pub fn choose_number(
    numbers: &ExportNumbers<Front>,
    front: Front,
    within: &str,
    taken: &TakenNumbers<'_, ImageSpec>,
    wanted: Option<u32>,
    image: &str,
) -> Result<Option<u32>> {
    if let Some(unit) = wanted {
        front.check_unit(unit)?;
    }
    let Some(units) = front.units() else { return Ok(None) };
    let count = units.end() - units.start() + 1;
    let chosen = numbers.choose((&front, within), units, taken, wanted, image);
    chosen.map(Some).map_err(|error| match error {
        NumberError::Taken(owner) => {
            let unit = wanted.unwrap_or_default();
            let what = format!("number {unit} is {owner}'s already over {}", front.name());
            Failure::new(FailureKind::Exists, what)
        }
        NumberError::NoneFree => {
            let (group, more) = match front {
                Front::Iscsi => ("target", "--target of 'forebay iscsi-target create'"),
                Front::Vhost => ("controller", "another socket"),
                _ => ("subsystem", "--subsystem of 'forebay nvme-subsystem create'"),
            };
            let what = format!("there are {count} exports in the {group} already, which is all there can be");
            Failure::new(FailureKind::NoSpace, what)
                .hint(format!("end one with 'forebay detach', or attach with {more}"))
        }
    })
}

#[cfg(test)]
mod tests {
    use forebay_export::{NumberOwners, RetiredNumber};

    use super::*;

    fn retired(unit: u32, image: &str) -> RetiredNumber<Front> {
        RetiredNumber { front: Front::Iscsi, within: String::new(), unit, image: image.into() }
    }

    /// Chooses a number of the default subsystem or target for an image that has no export yet.
    fn choose(
        numbers: &ExportNumbers<Front>,
        front: Front,
        owners: &NumberOwners<ImageSpec>,
        wanted: Option<u32>,
        image: &str,
    ) -> Result<Option<u32>> {
        let except = "local/new".parse().expect("a spec");
        choose_number(numbers, front, "", &TakenNumbers { owners, except: &except, own: None }, wanted, image)
    }

    fn owner(unit: u32) -> ImageSpec {
        format!("local/i{unit}").parse().expect("a spec")
    }

    fn owned(units: impl IntoIterator<Item = u32>) -> NumberOwners<ImageSpec> {
        let mut owners = NumberOwners::new();
        units.into_iter().for_each(|unit| owners.add(unit, owner(unit)));
        owners
    }

    #[test]
    fn numbers_are_those_that_the_front_can_serve() {
        let numbers = ExportNumbers::new(Vec::new());
        for (front, beyond, limit) in [
            (Front::Nvme, vec![0, 8193, 9000, u32::MAX], "1 to 8192"),
            (Front::Iscsi, vec![16_384, 65_536, u32::MAX], "0 to 16383"),
        ] {
            for unit in beyond {
                let failure = choose(&numbers, front, &NumberOwners::new(), Some(unit), "x").expect_err("out of range");
                assert_eq!(failure.kind, FailureKind::Invalid);
                assert!(failure.message.contains(limit), "{failure:?}");
            }
        }
        assert_eq!(choose(&numbers, Front::Nvme, &NumberOwners::new(), Some(8192), "x"), Ok(Some(8192)));
        assert_eq!(choose(&numbers, Front::Iscsi, &NumberOwners::new(), Some(16_383), "x"), Ok(Some(16_383)));
    }

    #[test]
    fn when_all_numbers_are_taken_no_more_are_given() {
        let mut taken = owned(1..=8192);
        let mut numbers = ExportNumbers::new(Vec::new());
        let failure = choose(&numbers, Front::Nvme, &taken, None, "x").expect_err("one too many");
        assert_eq!(failure.kind, FailureKind::NoSpace);
        assert!(failure.message.contains("8192"), "{failure:?}");
        // A retired number is reused rather than failing, the oldest first.
        for unit in [77, 5] {
            taken.remove(unit, &owner(unit));
            numbers.retire(RetiredNumber { front: Front::Nvme, ..retired(unit, "gone") });
        }
        assert_eq!(choose(&numbers, Front::Nvme, &taken, None, "x"), Ok(Some(77)));
        // A number that an older build assigned is not reused if the front cannot serve it.
        numbers.retire(RetiredNumber { front: Front::Nvme, ..retired(9000, "x") });
        assert_eq!(choose(&numbers, Front::Nvme, &taken, None, "x"), Ok(Some(77)));
    }

    #[test]
    fn fronts_without_numbers_take_none() {
        let numbers = ExportNumbers::new(Vec::new());
        assert_eq!(choose(&numbers, Front::Nbd, &NumberOwners::new(), None, "x"), Ok(None));
        assert!(choose(&numbers, Front::Nbd, &NumberOwners::new(), Some(1), "x").is_err());
        assert!(choose(&numbers, Front::Nvme, &NumberOwners::new(), Some(0), "x").is_err(), "namespaces begin with 1");
    }
}
