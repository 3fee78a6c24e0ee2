//! Persistent reservations of an image: shown, and cleared when a host is permanently gone.

use std::rc::{Rc, Weak};
use std::sync::Arc;

use forebay_block::reservation::{Keep, ReservationTable, ReservationType, Reservations};
use forebay_block::{InFlightTracker, LocalFuture};
use forebay_image::Image;
use forebay_qos::VolumeQos;

use super::Engine;
use crate::api;
use crate::failure::Result;
use crate::spec::ImageSpec;

/// Metadata key of an image's reservations.
pub(super) const RESERVATIONS_KEY: &str = "forebay.reservations";

/// Reservation store in the metadata of the image.
struct WithImage {
    image: Weak<Image>,
    changes: Rc<InFlightTracker>,
    qos: Rc<VolumeQos>,
}

impl Keep for WithImage {
    fn save(&self, table: Option<Vec<u8>>) -> LocalFuture<forebay_block::Result<()>> {
        let image = self.image.upgrade();
        Box::pin(async move {
            let closed = || forebay_block::Error::new(forebay_block::ErrorKind::ShuttingDown, "the volume is closed");
            image.ok_or_else(closed)?.set_metadata(RESERVATIONS_KEY, table).await
        })
    }

    fn drain(&self) -> LocalFuture<()> {
        let (changes, qos) = (self.changes.clone(), self.qos.clone());
        Box::pin(async move {
            // Writes that wait for a limit were allowed already, and a host waits for the reservation.
            qos.release_all();
            changes.drain().await;
        })
    }
}

/// Loads the reservations of an image.
pub(super) async fn reservations_of(
    image: &Rc<Image>,
    changes: &Rc<InFlightTracker>,
    qos: &Rc<VolumeQos>,
) -> forebay_block::Result<Option<Reservations>> {
    let keep = Rc::new(WithImage { image: Rc::downgrade(image), changes: changes.clone(), qos: qos.clone() });
    if image.is_shared() {
        return image.joint_reservations(RESERVATIONS_KEY, keep).await;
    }
    let table = match image.metadata(RESERVATIONS_KEY).await? {
        Some(stored) => ReservationTable::decode(&stored)?,
        None => ReservationTable::new(),
    };
    Ok(Some(Reservations::new(table, keep)))
}

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
