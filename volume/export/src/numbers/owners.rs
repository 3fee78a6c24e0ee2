//! Owners of the numbers within a front's subsystem or target.

use std::collections::BTreeMap;

/// Owners of the numbers within a front's subsystem or target: one export, with a name `N`, each, unless the list of
/// exports is inconsistent.
///
/// The lowest number without an owner is found without a scan: consecutive numbers with owners form one run, and no
/// two runs touch.
#[derive(Debug)]
pub struct NumberOwners<N> {
    names: BTreeMap<u32, Vec<N>>,
    /// Last number of each run, by its first number.
    runs: BTreeMap<u32, u32>,
}

impl<N> Default for NumberOwners<N> {
    fn default() -> Self {
        Self::new()
    }
}

impl<N> NumberOwners<N> {
    /// Creates it without owners.
    pub const fn new() -> Self {
        Self { names: BTreeMap::new(), runs: BTreeMap::new() }
    }
}

impl<N: PartialEq> NumberOwners<N> {
    /// Returns the owners of a number; most numbers have none.
    pub fn of(&self, number: u32) -> &[N] {
        self.names.get(&number).map_or(&[], Vec::as_slice)
    }

    /// Returns whether no number has an owner.
    pub fn is_empty(&self) -> bool {
        self.names.is_empty()
    }

    /// Returns the lowest number from `first` on that has no owner; `None` if all have one.
    pub fn lowest_free(&self, first: u32) -> Option<u32> {
        match self.run_of(first) {
            Some((_, last)) => last.checked_add(1),
            None => Some(first),
        }
    }

    /// Adds an owner of a number.
    pub fn add(&mut self, number: u32, name: N) {
        let names = self.names.entry(number).or_default();
        names.push(name);
        if names.len() > 1 {
            return;
        }
        let mut run = (number, number);
        if let Some((first, _)) = number.checked_sub(1).and_then(|before| self.run_of(before)) {
            run.0 = first;
        }
        if let Some(last) = number.checked_add(1).and_then(|after| self.runs.remove(&after)) {
            run.1 = last;
        }
        self.runs.insert(run.0, run.1);
    }

    /// Removes an owner of a number.
    pub fn remove(&mut self, number: u32, name: &N) {
        let Some(names) = self.names.get_mut(&number) else { return };
        names.retain(|each| each != name);
        if !names.is_empty() {
            return;
        }
        self.names.remove(&number);
        let Some((first, last)) = self.run_of(number) else { return };
        self.runs.remove(&first);
        if first < number {
            self.runs.insert(first, number - 1);
        }
        if number < last {
            self.runs.insert(number + 1, last);
        }
    }

    /// Returns the run that contains a number.
    fn run_of(&self, number: u32) -> Option<(u32, u32)> {
        let (&first, &last) = self.runs.range(..=number).next_back()?;
        (number <= last).then_some((first, last))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn the_lowest_free_number_is_that_of_a_plain_model(
            steps in prop::collection::vec((any::<bool>(), prop_oneof![0_u32..12, u32::MAX - 3..=u32::MAX], 0..3), 0..60),
        ) {
            let mut owners = NumberOwners::<String>::new();
            let mut model: BTreeMap<u32, Vec<String>> = BTreeMap::new();
            for (adds, number, image) in steps {
                let name = format!("local/i{image}");
                let specs = model.entry(number).or_default();
                if adds && !specs.contains(&name) {
                    owners.add(number, name.clone());
                    specs.push(name);
                } else if !adds {
                    owners.remove(number, &name);
                    specs.retain(|each| *each != name);
                }
                model.retain(|_, specs| !specs.is_empty());
                for first in (0..14).chain(u32::MAX - 4..=u32::MAX) {
                    let expected = (first..=u32::MAX).find(|number| !model.contains_key(number));
                    prop_assert_eq!(owners.lowest_free(first), expected, "from {}", first);
                }
                prop_assert_eq!(owners.is_empty(), model.is_empty());
                for number in 0..14 {
                    let names: Vec<String> = owners.of(number).to_vec();
                    prop_assert_eq!(names, model.get(&number).cloned().unwrap_or_default());
                }
            }
        }
    }
}
