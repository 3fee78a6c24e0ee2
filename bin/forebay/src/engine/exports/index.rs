//! Exports by front and image, and by their number.

use std::collections::BTreeMap;
use std::ops::Deref;

use forebay_export::NumberOwners;

use super::{Export, ExportKey};
use crate::api::Front;
use crate::spec::ImageSpec;

/// Owner of the exports.  The index of numbers is updated on each insertion and removal, so choosing the number of a
/// new export does not scan all exports.
pub(super) struct ExportIndex {
    exports: BTreeMap<ExportKey, Export>,
    /// Owners of numbers by front and subsystem or target; the name is empty for the default one.
    owners: BTreeMap<(Front, String), NumberOwners<ImageSpec>>,
}

/// Empty set of owners.
static NO_OWNERS: NumberOwners<ImageSpec> = NumberOwners::new();

impl ExportIndex {
    pub(super) fn new(exports: BTreeMap<ExportKey, Export>) -> Self {
        let mut index = Self { exports: BTreeMap::new(), owners: BTreeMap::new() };
        exports.into_iter().for_each(|(key, export)| drop(index.insert(key, export)));
        index
    }

    /// Returns the owners of the numbers within a subsystem or target.
    pub(super) fn owners(&self, front: Front, within: &str) -> &NumberOwners<ImageSpec> {
        self.owners.get(&(front, within.to_owned())).unwrap_or(&NO_OWNERS)
    }

    /// Inserts an export; returns the previous export under that key, if any.
    pub(super) fn insert(&mut self, key: ExportKey, export: Export) -> Option<Export> {
        let before = self.remove(&key);
        if let Some((group, unit)) = number_of(&key, &export) {
            self.owners.entry(group).or_default().add(unit, key.1.clone());
        }
        self.exports.insert(key, export);
        before
    }

    pub(super) fn remove(&mut self, key: &ExportKey) -> Option<Export> {
        let export = self.exports.remove(key)?;
        if let Some((group, unit)) = number_of(key, &export)
            && let Some(owners) = self.owners.get_mut(&group)
        {
            owners.remove(unit, &key.1);
            if owners.is_empty() {
                self.owners.remove(&group);
            }
        }
        Some(export)
    }

    /// Returns an export for changes to anything but its number.
    pub(super) fn get_mut(&mut self, key: &ExportKey) -> Option<&mut Export> {
        self.exports.get_mut(key)
    }

    /// Returns all exports with their keys, for changes to anything but their numbers.
    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = (&ExportKey, &mut Export)> {
        self.exports.iter_mut()
    }

    /// Returns all exports, for changes to anything but their numbers.
    pub(super) fn values_mut(&mut self) -> impl Iterator<Item = &mut Export> {
        self.exports.values_mut()
    }
}

impl Deref for ExportIndex {
    type Target = BTreeMap<ExportKey, Export>;

    fn deref(&self) -> &Self::Target {
        &self.exports
    }
}

/// Returns the subsystem or target in which an export has its number, and the number.
fn number_of(key: &ExportKey, export: &Export) -> Option<((Front, String), u32)> {
    let within = export.request.within().unwrap_or_default().to_owned();
    Some(((key.0, within), export.request.unit?))
}
