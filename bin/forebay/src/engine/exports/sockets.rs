//! Sockets of exports over vhost-user: each is of one export.

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

    /// Checks that no other export has the socket of a request.
    ///
    /// # Errors
    /// Names the image that has it.
    pub(super) fn check_socket(&self, key: &ExportKey, request: &api::AttachRequest) -> Result<()> {
        let Some(path) = request.socket_path() else { return Ok(()) };
        let owner = self.over_vhost(|all| {
            let mut others = all.filter(|(spec, _)| (Front::Vhost, *spec) != (key.0, &key.1));
            others.find(|(_, export)| export.request.socket_path() == Some(path)).map(|(spec, _)| spec.clone())
        });
        match owner {
            Some(owner) => {
                let what = format!("the socket {} is {owner}'s already", path.display());
                Err(Failure::new(FailureKind::Exists, what)
                    .hint(format!("choose another path, or end that export: forebay detach {owner} --vhost")))
            }
            None => Ok(()),
        }
    }

    /// Waits until the sockets that exports create are free: a daemon that was just killed may still hold them.
    pub async fn settle_sockets(&self) {
        let paths: Vec<_> = self.over_vhost(|all| {
            let served = all.filter(|(_, export)| !matches!(export.life.state(), ExportState::Broken(_)));
            let options = served.filter_map(|(_, export)| export.request.vhost.as_ref());
            // Waiting creates a socket: not where there is none.
            let left = options.filter(|options| !options.connect && options.path.symlink_metadata().is_ok());
            left.map(|options| options.path.clone()).collect()
        });
        let waits = paths.into_iter().map(|path| spawn(async move { Listener::settle(&Addr::Unix(path)).await }));
        for wait in waits.collect::<Vec<_>>() {
            wait.await;
        }
    }
}

impl Engine {
    /// Marks a served export as failed: its front cannot serve it.  It is retried.
    pub fn lose_export(self: &Rc<Self>, front: Front, spec: &ImageSpec, failure: Failure) {
        let served = self.exports.with(&(front, spec.clone()), |export| export.life.lose(failure.clone())).flatten();
        if served.is_some() {
            not_served(front, spec, &failure);
            self.keep_trying();
        }
    }
}
