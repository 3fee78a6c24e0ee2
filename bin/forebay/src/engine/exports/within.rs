//! Subsystems and targets that exports are in.

use crate::api::{self, Front};
use crate::engine::Engine;
use crate::failure::{Failure, Result};

impl Engine {
    /// Counts the exports in a subsystem or target; without a name, in the default one.
    pub fn exports_within(&self, front: Front, within: Option<&str>) -> usize {
        let exports = self.exports.exports.borrow();
        let of_front = exports.iter().filter(|((other, _), _)| *other == front);
        of_front.filter(|(_, export)| export.request.within() == within).count()
    }

    /// Checks that the subsystem or target of a request exists, and normalizes its name.
    pub(super) fn check_within(&self, request: &mut api::AttachRequest) -> Result<()> {
        let wrong = match request.front {
            Front::Nvme => request.target.is_some(),
            Front::Iscsi => request.subsystem.is_some(),
            Front::Nbd | Front::Vhost => request.target.is_some() || request.subsystem.is_some(),
        };
        if wrong {
            return Err(Failure::invalid("subsystem is for exports over nvme, target for exports over iscsi"));
        }
        let front = request.front;
        if let Some(within) = request.within_mut()
            && let Some(name) = within.take()
        {
            *within = self.fronts.within(front, &name)?;
        }
        Ok(())
    }
}
