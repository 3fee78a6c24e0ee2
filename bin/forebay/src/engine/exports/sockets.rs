//! Sockets of exports over vhost-user: each is of one export, or of a controller whose units are exports.

use std::collections::BTreeSet;
use std::fmt::Display;
use std::path::Path;
use std::rc::Rc;

use forebay_export::ExportState;
use forebay_reactor::{Addr, Listener, spawn};

use super::restore::not_served;
use super::{Export, ExportKey, Exports};
use crate::api::{self, Front};
use crate::engine::Engine;
use crate::failure::{Failure, FailureKind, Result};
use crate::spec::ImageSpec;

impl Exports {
    /// Applies a function to the exports over vhost.
    fn over_vhost<R>(&self, look: impl FnOnce(&mut dyn Iterator<Item = (&ImageSpec, &Export)>) -> R) -> R {
        let exports = self.exports.borrow();
        let first = (Front::Vhost, ImageSpec { pool: String::new(), image: String::new() });
        let mut all = exports.range(first..).filter(|((front, _), _)| *front == Front::Vhost);
        look(&mut all.by_ref().map(|((_, spec), export)| (spec, export)))
    }

    /// Checks that no other export has the socket of a request; a unit adopts the options of its controller.
    ///
    /// # Errors
    /// Names the image that has it, or says that the controller has other options.
    fn join_socket(&self, key: &ExportKey, request: &mut api::AttachRequest) -> Result<()> {
        let Some(path) = request.socket_path() else { return Ok(()) };
        let is_unit = request.controller_path().is_some();
        // A unit that is exported already has the options of its controller, too.
        let shares = |spec: &ImageSpec, export: &Export| {
            let is_other = (Front::Vhost, spec) != (key.0, &key.1);
            export.request.socket_path() == Some(path)
                && (is_other || is_unit && export.request.controller_path().is_some())
        };
        let other = self.over_vhost(|all| {
            let mut sharing = all.filter(|(spec, export)| shares(spec, export));
            sharing.next().map(|(spec, export)| (spec.clone(), export.request.vhost.clone()))
        });
        match (other, &mut request.vhost) {
            (Some((_, Some(options))), Some(own)) if own.scsi && options.scsi => own.join(&options),
            (Some((owner, _)), Some(own)) => Err(socket_taken(&own.path, &owner)),
            _ => Ok(()),
        }
    }

    /// Returns whether units of a controller have not been opened since startup, and have not failed to be.
    pub fn is_controller_opening(&self, path: &Path) -> bool {
        let is_opening =
            |export: &Export| matches!(export.life.state(), ExportState::Opening(None)) && !export.life.is_detaching();
        self.over_vhost(|all| {
            let mut units = all.filter(|(_, export)| export.request.controller_path() == Some(path));
            units.any(|(_, export)| is_opening(export))
        })
    }

    /// Waits until the sockets that exports create are free: a daemon that was just killed may still hold them.
    pub async fn settle_sockets(&self) {
        let paths = self.over_vhost(|all| {
            let served = all.filter(|(_, export)| !matches!(export.life.state(), ExportState::Broken(_)));
            let options = served.filter_map(|(_, export)| export.request.vhost.as_ref());
            // Waiting creates a socket: not where there is none.
            let left = options.filter(|options| !options.connect && options.path.symlink_metadata().is_ok());
            left.map(|options| options.path.clone()).collect::<BTreeSet<_>>()
        });
        let waits = paths.into_iter().map(|path| spawn(async move { Listener::settle(&Addr::Unix(path)).await }));
        for wait in waits.collect::<Vec<_>>() {
            wait.await;
        }
    }
}

/// Returns the failure to use the socket of another export.
pub fn socket_taken(path: &Path, owner: &impl Display) -> Failure {
    Failure::new(FailureKind::Exists, format!("the socket {} is {owner}'s already", path.display()))
        .hint(format!("choose another path, or end that export: forebay detach {owner} --vhost"))
}

impl Engine {
    /// Checks that no other export of this daemon, its own or its gateway group's, has the socket of a request; a unit adopts
    /// the options of its controller.
    pub(super) fn join_socket(&self, key: &ExportKey, request: &mut api::AttachRequest) -> Result<()> {
        self.exports.join_socket(key, request)?;
        let Some((path, group)) = request.socket_path().zip(self.gateways.joined()) else { return Ok(()) };
        group.socket_owner(path).filter(|owner| *owner != key.1).map_or(Ok(()), |owner| Err(socket_taken(path, &owner)))
    }

    /// Marks a served export as failed: its front cannot serve it.  It is retried.
    pub fn lose_export(self: &Rc<Self>, front: Front, spec: &ImageSpec, failure: Failure) {
        let served = self.exports.with(&(front, spec.clone()), |export| export.life.lose(failure.clone())).flatten();
        if served.is_some() {
            not_served(front, spec, &failure);
            self.keep_trying();
        }
    }
}
