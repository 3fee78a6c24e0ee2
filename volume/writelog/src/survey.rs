//! Survey of the logs on log devices: which of them do images use, and which are abandoned?
//!
//! A log is abandoned only if no record names it, and an image may have been renamed since its log was created. So
//! before a log is called abandoned, all images of its group (their pool) have been searched.
//!
//! | invariant | |
//! |---|---|
//! | S1 | a log that a record names is never reported as abandoned or unknown |
//! | S2 | a log is reported as abandoned only after a complete search of its group |
//! | S3 | a group is searched at most once, and only if a log is found that nothing names so far |

use std::collections::BTreeMap;

/// Survey of logs with ids `I`, of images in groups `G`, described by `L`; a failure to search a group is an `E`.
#[derive(Debug)]
pub struct LogSurvey<I, G, L, E> {
    /// Logs that the record of an image names.
    named: BTreeMap<I, L>,
    /// Logs found on devices, with the group of the image that each was created for.
    found: BTreeMap<I, (L, Result<G, E>)>,
    searched: BTreeMap<G, Result<(), E>>,
}

/// Result of a survey for one log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Membership<E> {
    /// Named by the record of an image.
    Named,
    /// Not named by the record of any image.
    Abandoned,
    /// Not known to be either: its images could not be searched.
    Unknown(E),
}

impl<I, G, L, E> Default for LogSurvey<I, G, L, E> {
    fn default() -> Self {
        Self { named: BTreeMap::new(), found: BTreeMap::new(), searched: BTreeMap::new() }
    }
}

impl<I: Ord, G: Ord, L, E: Clone> LogSurvey<I, G, L, E> {
    /// Adds a log that the record of an image names.
    pub fn add_named(&mut self, id: I, log: L) {
        self.named.insert(id, log);
    }

    /// Adds a log found on a device, with the group of its image, or the reason why that is unknown.
    pub fn add_found(&mut self, id: I, log: L, group: Result<G, E>) {
        self.found.entry(id).or_insert((log, group));
    }

    /// Returns the next group whose images are to be searched, if any.
    pub fn next_group(&self) -> Option<&G> {
        let unclaimed = self.found.iter().filter(|(id, _)| !self.named.contains_key(id));
        let mut groups = unclaimed.filter_map(|(_, (_, group))| group.as_ref().ok());
        groups.find(|group| !self.searched.contains_key(group))
    }

    /// Records the end of a search, after [`add_named`](Self::add_named) for each log that it found.
    pub fn end_search(&mut self, group: G, result: Result<(), E>) {
        debug_assert!(!self.searched.contains_key(&group), "S3");
        self.searched.insert(group, result);
    }

    /// Returns all logs, ordered by id.  A group that was not searched counts as one without images.
    pub fn finish(self) -> Vec<(L, Membership<E>)> {
        debug_assert!(self.next_group().is_none(), "S2");
        let mut logs: BTreeMap<I, (L, Membership<E>)> = BTreeMap::new();
        for (id, (log, group)) in self.found {
            let membership = match group.and_then(|group| self.searched.get(&group).cloned().unwrap_or(Ok(()))) {
                Ok(()) => Membership::Abandoned,
                Err(error) => Membership::Unknown(error),
            };
            logs.insert(id, (log, membership));
        }
        // S1: what a record names replaces what was found on a device.
        logs.extend(self.named.into_iter().map(|(id, log)| (id, (log, Membership::Named))));
        logs.into_values().collect()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::{BTreeMap, BTreeSet};

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_group_is_searched_only_for_a_log_that_nothing_names() {
        let mut survey = LogSurvey::<u32, &str, &str, &str>::default();
        survey.add_named(1, "named");
        survey.add_found(1, "on its device", Ok("pool"));
        assert_eq!(survey.next_group(), None);
        survey.add_found(2, "renamed", Ok("pool"));
        survey.add_found(3, "lost", Err("no name"));
        assert_eq!(survey.next_group(), Some(&"pool"));
        survey.add_named(2, "of another image");
        survey.end_search("pool", Ok(()));
        assert_eq!(survey.next_group(), None);
        let expected = [
            ("named", Membership::Named),
            ("of another image", Membership::Named),
            ("lost", Membership::Unknown("no name")),
        ];
        assert_eq!(survey.finish(), expected);
    }

    proptest! {
        /// Compares a survey with a plain model that looks at all images of all pools.
        #[test]
        fn a_log_is_abandoned_if_no_image_of_its_pool_names_it(
            // Pools that answer; images with the log that each names; logs on devices with the pool they tell.
            pools in prop::collection::btree_map(0u8..4, any::<bool>(), 4),
            images in prop::collection::btree_map(0u8..12, 0u8..4, 0..12),
            devices in prop::collection::btree_map(0u8..12, prop::option::of(0u8..4), 0..12),
            asked_first in prop::collection::btree_set(0u8..12, 0..12),
        ) {
            let mut survey = LogSurvey::<u8, u8, u8, &str>::default();
            let mut known: BTreeSet<u8> = BTreeSet::new();
            for (&log, _) in images.iter().filter(|(log, _)| asked_first.contains(log)) {
                survey.add_named(log, log);
                known.insert(log);
            }
            for (&log, pool) in &devices {
                survey.add_found(log, log, pool.ok_or("no pool"));
            }
            let mut searches: BTreeMap<u8, usize> = BTreeMap::new();
            while let Some(&pool) = survey.next_group() {
                *searches.entry(pool).or_default() += 1;
                prop_assert_eq!(searches[&pool], 1, "S3");
                if pools[&pool] {
                    for (&log, _) in images.iter().filter(|(_, of)| **of == pool) {
                        survey.add_named(log, log);
                        known.insert(log);
                    }
                    survey.end_search(pool, Ok(()));
                } else {
                    survey.end_search(pool, Err("no answer"));
                }
            }
            let all: BTreeSet<u8> = devices.keys().chain(&known).copied().collect();
            let expected: Vec<(u8, Membership<&str>)> = all.into_iter().map(|log| {
                let membership = match devices.get(&log) {
                    _ if known.contains(&log) => Membership::Named,
                    Some(None) => Membership::Unknown("no pool"),
                    Some(Some(pool)) if !pools[pool] => Membership::Unknown("no answer"),
                    _ => Membership::Abandoned,
                };
                (log, membership)
            }).collect();
            for (&log, pool) in &images {
                let on_device = devices.get(&log) == Some(&Some(*pool));
                prop_assert!(!on_device || !pools[pool] || known.contains(&log), "S1: log {}", log);
            }
            prop_assert_eq!(survey.finish(), expected);
        }
    }
}
