//! `attach`, `detach`, `targets`.

use super::with_session;
use crate::api::{self, Front, Target};
use crate::cli;
use crate::cli::Global;
use crate::client::session::Session;
use crate::failure::Result;
use crate::ops::{Attach, Detach, ListTargets};
use crate::output::{Output, table};
use crate::spec::ImageSpec;

/// Exports an image and prints its URI.
pub fn attach(global: &Global, output: Output, options: cli::Attach) -> Result<()> {
    let ImageSpec { pool, image } = options.name.image;
    let front = match (options.nvme, options.iscsi) {
        (true, _) => Front::Nvme,
        (_, true) => Front::Iscsi,
        _ => Front::Nbd,
    };
    let (unit, hosts) = (options.nsid.or(options.lun), options.initiator);
    let (read_only, log) = (options.read_only, options.log);
    let (ana_group, uuid) = (options.ana_group, options.uuid);
    let request = api::Attach { pool, image, front, read_only, unit, hosts, ana_group, uuid, log };
    let target = Session::daemon(global)?.call(&Attach(request), None, |_| {})?;
    output.print(&target, |target| target.uri.clone().unwrap_or_default())
}

/// Ends an export.
pub fn detach(global: &Global, output: Output, options: cli::Detach) -> Result<()> {
    let ended = options.name.image.clone();
    let mut fronts = match (options.nbd, options.nvme, options.iscsi) {
        (true, _, _) => vec![Front::Nbd],
        (_, true, _) => vec![Front::Nvme],
        (_, _, true) => vec![Front::Iscsi],
        _ => with_session(global, |session| session.call(ListTargets, |_| {}))?
            .iter()
            .filter(|target| target.pool == ended.pool && target.image == ended.image)
            .map(|target| target.front)
            .collect(),
    };
    if fronts.is_empty() {
        // That there is none is for the engine to say.
        fronts.push(Front::Nbd);
    }
    for front in fronts {
        let operation =
            Detach { spec: options.name.image.clone(), front, force: options.force, keep_log: options.keep_log };
        with_session(global, |session| session.call(operation, |_| {}))?;
    }
    output.print(&ended, |_| String::new())
}

/// Lists what is exported.
pub fn list(global: &Global, output: Output) -> Result<()> {
    let targets = with_session(global, |session| session.call(ListTargets, |_| {}))?;
    output.print(&targets, |targets| show(targets))
}

fn show(targets: &[Target]) -> String {
    let rows = targets.iter().map(|target| {
        let state = match (&target.error, &target.uri) {
            (Some(failure), _) => failure.message.clone(),
            (None, Some(uri)) => match &target.log {
                Some(log) => format!("{uri}  (log {}: {}, {})", log.place.medium.name(), log.state, log.dirty()),
                None => uri.clone(),
            },
            (None, None) => "not served".into(),
        };
        vec![
            format!("{}/{}", target.pool, target.image),
            target.front.name().into(),
            if target.read_only { "ro".into() } else { "rw".into() },
            target.connections.to_string(),
            state,
        ]
    });
    table(&["IMAGE", "FRONT", "ACCESS", "CONNECTIONS", "URI"], &[3], rows)
}
