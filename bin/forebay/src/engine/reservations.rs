//! Persistent reservations of an image: shown, and cleared when a host is permanently gone.

use std::sync::Arc;

use forebay_block::reservation::{ReservationTable, ReservationType};

use super::Engine;
use crate::api;
use crate::failure::Result;
use crate::spec::ImageSpec;

impl Engine {
    /// Returns the registrants and the reservation of an image.
    pub async fn reservations(&self, spec: &ImageSpec) -> Result<api::ReservationsInfo> {
        let volume = self.open_volume(spec).await?;
        let reservations = volume.reservations().map_err(|error| self.reservations_failure(error, spec))?;
        let table = match reservations {
            Some(reservations) => reservations.view().table().clone(),
            None => Arc::new(ReservationTable::new()),
        };
        let registrants = table.registrants().iter().map(|registrant| api::RegistrantInfo {
            host: registrant.host.as_bytes().escape_ascii().to_string(),
            key: registrant.key,
            holder: table.is_holder(&registrant.host),
        });
        Ok(api::ReservationsInfo {
            registrants: registrants.collect(),
            kind: table.held().map(|held| kind_name(held.kind).into()),
            whole: table.whole().map(|host| host.as_bytes().escape_ascii().to_string()),
            persistent: table.persists(),
        })
    }

    /// Clears the registrants and the reservation of an image.
    pub async fn clear_reservations(&self, spec: &ImageSpec) -> Result<()> {
        let volume = self.open_volume(spec).await?;
        volume.clear_reservations().await.map_err(|error| self.image_failure(error, spec))?;
        if volume.reservations().is_err() {
            tracing::warn!(image = %spec, "damaged reservations were cleared; attach the image again to serve it");
        }
        Ok(())
    }
}

impl Engine {
    /// Explains the error that prevented reading the reservations of an image.
    pub fn reservations_failure(&self, error: forebay_block::Error, spec: &ImageSpec) -> crate::failure::Failure {
        self.image_failure(error, spec).hint(format!(
            "make sure that no host counts on its reservation, and forget it: forebay reservations clear {spec}"
        ))
    }
}

fn kind_name(kind: ReservationType) -> &'static str {
    match kind {
        ReservationType::WriteExclusive => "write-exclusive",
        ReservationType::ExclusiveAccess => "exclusive-access",
        ReservationType::WriteExclusiveRegistrants => "write-exclusive-registrants-only",
        ReservationType::ExclusiveAccessRegistrants => "exclusive-access-registrants-only",
        ReservationType::WriteExclusiveAll => "write-exclusive-all-registrants",
        ReservationType::ExclusiveAccessAll => "exclusive-access-all-registrants",
    }
}
