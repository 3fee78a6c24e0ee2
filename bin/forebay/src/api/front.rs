//! Protocols over which images are exported.

use std::ops::RangeInclusive;

use forebay_iscsi::wire::Lun;
use forebay_nvmf::session::admin::NAMESPACES_MAX;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::failure::Failure;

/// Protocol over which an image is exported.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum Front {
    /// NBD front.
    Nbd,
    /// NVMe over TCP.
    Nvme,
    /// iSCSI front.
    Iscsi,
    /// virtio-blk devices of virtual machines, over vhost-user.
    Vhost,
}

impl Front {
    /// All fronts.
    pub const ALL: [Front; 4] = [Front::Nbd, Front::Nvme, Front::Iscsi, Front::Vhost];

    /// Returns the name used in URIs and listings.
    pub fn name(self) -> &'static str {
        match self {
            Front::Nbd => "nbd",
            Front::Nvme => "nvme",
            Front::Iscsi => "iscsi",
            Front::Vhost => "vhost",
        }
    }

    /// Returns the numbers that exports may have within the front: namespace ids or LUNs.  `None` if exports have
    /// names instead.
    pub fn units(self) -> Option<RangeInclusive<u32>> {
        match self {
            Front::Nbd => None,
            Front::Nvme => Some(1..=NAMESPACES_MAX),
            // Over vhost, units of a controller have numbers.
            Front::Iscsi | Front::Vhost => Some(0..=u32::from(Lun::MAX)),
        }
    }

    /// Checks that an export may have a number.
    ///
    /// # Errors
    /// If the front has no such numbers; the error names the limit.
    pub fn check_unit(self, unit: u32) -> Result<(), Failure> {
        match self.units() {
            None => Err(Failure::invalid(format!("number {unit}: exports over {} have no numbers", self.name()))),
            Some(units) if !units.contains(&unit) => {
                let (first, last) = units.into_inner();
                let what =
                    format!("number {unit} is out of range: exports over {} have {first} to {last}", self.name());
                Err(Failure::invalid(what).hint("choose one of these, or leave it out"))
            }
            Some(_) => Ok(()),
        }
    }
}
