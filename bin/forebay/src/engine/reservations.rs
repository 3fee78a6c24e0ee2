//! Persistent reservations of an image: shown, and cleared when a host is permanently gone.

use std::sync::Arc;

use forebay_block::reservation::{Kind, Table};

use super::Engine;
use crate::api;
use crate::failure::Result;
use crate::spec::ImageSpec;

impl Engine {
    /// Returns the registrants and the reservation of an image.
    pub async fn reservations(&self, spec: &ImageSpec) -> Result<api::Reservations> {
        let volume = self.open_volume(spec).await?;
        let reservations = volume.reservations().map_err(|error| self.reservations_failure(error, spec))?;
        let table = match reservations {
            Some(reservations) => reservations.view().table().clone(),
            None => Arc::new(Table::new()),
        };
        let registrants = table.registrants().iter().map(|registrant| api::Registrant {
            host: registrant.host.as_bytes().escape_ascii().to_string(),
            key: registrant.key,
            holder: table.is_holder(&registrant.host),
        });
        Ok(api::Reservations {
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

fn kind_name(kind: Kind) -> &'static str {
    match kind {
        Kind::WriteExclusive => "write-exclusive",
        Kind::ExclusiveAccess => "exclusive-access",
        Kind::WriteExclusiveRegistrants => "write-exclusive-registrants-only",
        Kind::ExclusiveAccessRegistrants => "exclusive-access-registrants-only",
        Kind::WriteExclusiveAll => "write-exclusive-all-registrants",
        Kind::ExclusiveAccessAll => "exclusive-access-all-registrants",
    }
}
