//! `attach`, `detach`, `targets`.

use super::with_session;
use crate::api::{self, Front, ImageExport};
use crate::cli;
use crate::cli::GlobalArgs;
use crate::cli::many::each;
use crate::client::session::CommandSession;
use crate::failure::{Failure, Result};
use crate::ops::{AttachImage, DetachImage, ListTargets};
use crate::output::{Output, table};
use crate::spec::ImageSpec;

/// Exports an image and prints its URI.
pub fn attach(global: &GlobalArgs, output: Output, options: cli::AttachArgs) -> Result<()> {
    let (is_one, images) = (options.name.is_one(), options.name.resolve()?);
    let front = match (options.nvme, options.iscsi) {
        (true, _) => Front::Nvme,
        (_, true) => Front::Iscsi,
        _ => Front::Nbd,
    };
    let (unit, hosts) = (options.nsid.or(options.lun), [options.host, options.initiator].concat());
    let (read_only, mut log, replicas) = (options.read_only, options.log, options.replicas);
    if let (Some(log), false) = (&mut log, options.replica.is_empty()) {
        log.replicas = Some(options.replica);
    }
    let (ana_group, uuid) = (options.ana_group, options.uuid);
    let (subsystem, target) = (options.subsystem, options.target);
    if images.len() > 1 && (unit.is_some() || uuid.is_some()) {
        let what = format!("--nsid, --lun and --uuid are for one image; {} are named", images.len());
        return Err(
            Failure::invalid(what).hint("leave them out, and each gets the lowest number that no image has had")
        );
    }
    let daemon = CommandSession::daemon(global)?;
    let targets = each(images, |ImageSpec { pool, image }| {
        let (hosts, uuid, log) = (hosts.clone(), uuid.clone(), log.clone());
        let (subsystem, target) = (subsystem.clone(), target.clone());
        let request = api::AttachRequest {
            pool,
            image,
            front,
            read_only,
            unit,
            hosts,
            subsystem,
            target,
            ana_group,
            uuid,
            log,
            replicas,
        };
        let target = daemon.call(&AttachImage(request), None, |_| {})?;
        for warning in &target.warnings {
            eprintln!("forebay: warning: {warning}");
        }
        Ok(target)
    })?;
    let uri = |target: &ImageExport| target.uri.clone().unwrap_or_default();
    match targets.as_slice() {
        [target] if is_one => output.print(target, uri),
        all => output.print(&all, |all| all.iter().map(uri).collect::<Vec<_>>().join("\n")),
    }
}

/// Ends exports.
pub fn detach(global: &GlobalArgs, output: Output, options: cli::DetachArgs) -> Result<()> {
    let (is_one, images) = (options.name.is_one(), options.name.resolve()?);
    let asked = match (options.nbd, options.nvme, options.iscsi) {
        (true, _, _) => Some(Front::Nbd),
        (_, true, _) => Some(Front::Nvme),
        (_, _, true) => Some(Front::Iscsi),
        _ => None,
    };
    let (force, keep_log) = (options.force, options.keep_log);
    let ended = with_session(global, |session| {
        let listed = if asked.is_none() { session.call(ListTargets, |_| {})? } else { Vec::new() };
        each(images, |spec| {
            let of_image = listed.iter().filter(|target| target.pool == spec.pool && target.image == spec.image);
            let mut fronts: Vec<Front> = asked.into_iter().chain(of_image.map(|target| target.front)).collect();
            if fronts.is_empty() {
                // That there is none is for the engine to say.
                fronts.push(Front::Nbd);
            }
            for front in fronts {
                session.call(DetachImage { spec: spec.clone(), front, force, keep_log }, |_| {})?;
            }
            Ok(spec)
        })
    })?;
    match ended.as_slice() {
        [spec] if is_one => output.print(spec, |_| String::new()),
        all => output.print(&all, |_| String::new()),
    }
}

/// Lists what is exported.
pub fn list(global: &GlobalArgs, output: Output) -> Result<()> {
    let targets = with_session(global, |session| session.call(ListTargets, |_| {}))?;
    output.print(&targets, |targets| show(targets))
}

fn show(targets: &[ImageExport]) -> String {
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
