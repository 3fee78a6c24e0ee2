//! Changes to the replicas of write logs of images that are served.

use forebay_writelog::PlaceChange;

use super::ExportKey;
use crate::api::{self, ImageExport};
use crate::engine::Engine;
use crate::failure::{Failure, Result};

/// Compares the replicas of an export, and their policy, with requested ones: without a wish it keeps those it has.  Returns
/// the place of the log if nothing else differs.  `recorded` is the place of a log that this daemon has taken over.
pub(super) fn replicas_changed(
    before: &api::AttachRequest,
    request: &mut api::AttachRequest,
    recorded: Option<&api::LogPlace>,
) -> Option<api::LogPlace> {
    let place = request.log.as_mut()?;
    let had = before.log.as_ref().or(recorded)?;
    if place.replicas.is_none() {
        place.replicas.clone_from(&had.replicas);
    }
    place.takeover = place.takeover.or(had.takeover);
    place.replicas_min = place.replicas_min.or(had.replicas_min);
    place.lease_ms = place.lease_ms.or(had.lease_ms);
    let place = place.clone();
    let policy = |place: &api::LogPlace| (place.replicas.clone(), place.takeover, place.replicas_min);
    let apart = |request: &api::AttachRequest| api::AttachRequest { log: None, ..request.clone() };
    let only_replicas = match &before.log {
        Some(before) => {
            let limits = |place: &api::LogPlace| (place.dirty_max, place.dirty_age_ms);
            policy(&place) != policy(had) && place.fixed() == before.fixed() && limits(&place) == limits(before)
        }
        None => had.change_to(&place) != PlaceChange::Other,
    };
    (only_replicas && apart(request) == apart(before)).then_some(place)
}

impl Engine {
    /// Changes the peers that have copies of the log of an image that is served.
    pub(super) async fn change_replicas(
        &self,
        key: &ExportKey,
        request: api::AttachRequest,
        place: &api::LogPlace,
    ) -> Result<ImageExport> {
        let spec = &key.1;
        let volume = self.open_volume(spec).await?;
        self.ensure_log(spec, &volume, place).await?;
        if let Some(export) = self.exports.exports.borrow_mut().get_mut(key) {
            export.request = request;
        }
        self.exports.save(key).await?;
        let exports = self.exports.exports.borrow();
        let export = exports.get(key).ok_or_else(|| Failure::failed("the export was removed meanwhile"))?;
        Ok(self.describe_target(spec, export, self.fronts.connections_of(key.0, spec)))
    }
}
