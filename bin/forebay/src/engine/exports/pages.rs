//! Paged list of exports: describing thousands at once would block the reactor.

use forebay_export::ExportState;

use super::{Engine, Export, Exports};
use crate::api::{Front, ImageExport};
use crate::engine::overview::OverviewPage;
use crate::spec::ImageSpec;

impl Export {
    /// Returns whether hosts cannot reach it, or get only errors from it.
    fn is_unserved(&self) -> bool {
        match self.life.state() {
            ExportState::Serving(served) => served.volume.is_fenced(),
            ExportState::Opening(_) | ExportState::Failed(_) | ExportState::Broken(_) => true,
            ExportState::Idle => false,
        }
    }
}

impl Exports {
    /// Returns whether the export of an image over NBD is read-only; `None` without such an export.
    pub fn nbd_access(&self, spec: &ImageSpec) -> Option<bool> {
        let exports = self.exports.borrow();
        let export = exports.get(&(Front::Nbd, spec.clone())).filter(|export| !export.life.is_detaching())?;
        Some(export.request.read_only)
    }
}

impl Engine {
    /// Returns page `number` of the exports; those that hosts cannot reach come first.
    pub fn targets_page(&self, number: usize) -> OverviewPage<ImageExport> {
        let connections = self.connections();
        let exports = self.exports.exports.borrow();
        let mut there: Vec<_> = exports.iter().filter(|(_, export)| !export.life.is_detaching()).collect();
        there.sort_by_key(|(_, export)| !export.is_unserved());
        OverviewPage::of(there, number).map(|(key, export)| self.describe_target(&key.1, export, connections.of(key)))
    }

    /// Returns the exports of an image.
    pub fn targets_of(&self, spec: &ImageSpec) -> Vec<ImageExport> {
        let exports = self.exports.exports.borrow();
        let of_front = |front| {
            let export = exports.get(&(front, spec.clone())).filter(|export| !export.life.is_detaching())?;
            Some(self.describe_target(spec, export, self.fronts.connections_of(front, spec)))
        };
        Front::ALL.into_iter().filter_map(of_front).collect()
    }

    /// Returns the fronts over which an image is exported.
    pub fn fronts_of(&self, spec: &ImageSpec) -> Vec<Front> {
        let exports = self.exports.exports.borrow();
        let there =
            |front: &Front| exports.get(&(*front, spec.clone())).is_some_and(|export| !export.life.is_detaching());
        Front::ALL.into_iter().filter(there).collect()
    }
}
