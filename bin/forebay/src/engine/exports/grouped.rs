//! Exports of the gateway group, which its record lists, at this member.

use std::rc::Rc;

use forebay_block::BlockDevice;

use crate::api::{self, Front};
use crate::engine::Engine;
use crate::engine::fronts::ExportedImage;
use crate::failure::{Failure, FailureKind, Result};
use crate::spec::ImageSpec;

impl Engine {
    /// Lets hosts reach an export of the gateway group here.
    pub fn publish_group_export(
        &self,
        request: &api::AttachRequest,
        exported: &ExportedImage<'_>,
        device: &Rc<dyn BlockDevice>,
    ) -> Result<()> {
        let key = (request.front, exported.spec.clone());
        if self.exports.exports.borrow().contains_key(&key) {
            let what = format!("{} is exported over {} by this daemon alone", exported.spec, request.front.name());
            return Err(Failure::new(FailureKind::Exists, what).hint(format!("forebay detach {}", exported.spec)));
        }
        // Exports of a group are no units, and adopt nothing.
        self.join_socket(&key, &mut request.clone())?;
        // Inserted first: a host that learns of the export finds its device.
        self.exports.grouped.borrow_mut().insert(key.clone(), device.clone());
        let published = self.publish(request.front, exported, device);
        if published.is_err() {
            self.exports.grouped.borrow_mut().remove(&key);
        }
        published
    }

    /// Gives an export that hosts have kept another device: the former one belongs to an ended start of this member.
    pub fn resume_group_export(&self, front: Front, spec: &ImageSpec, device: &Rc<dyn BlockDevice>) {
        let before = self.exports.grouped.borrow_mut().insert((front, spec.clone()), device.clone());
        self.fronts.replace_device(front, spec, device);
        drop(before);
    }

    /// Withdraws an export of the gateway group from hosts; those that have it open keep it until they are disconnected.
    pub fn withdraw_group_export(&self, front: Front, spec: &ImageSpec) {
        self.unpublish(front, spec);
        let device = self.exports.grouped.borrow_mut().remove(&(front, spec.clone()));
        drop(device);
    }
}
