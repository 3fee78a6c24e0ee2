//! `attach`, `detach`, `targets`.

use super::with_session;
use crate::api::{self, Front, ImageExport, VhostSocketOptions};
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
    let vhost = socket_options(&options)?;
    let (is_one, images) = (options.name.is_one(), options.name.resolve()?);
    let front = match (options.nvme, options.iscsi, &vhost) {
        (true, ..) => Front::Nvme,
        (_, true, _) => Front::Iscsi,
        (.., Some(_)) => Front::Vhost,
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
    if images.len() > 1 && vhost.as_ref().is_some_and(|options| !options.scsi) {
        let what = format!("--vhost is for one image, as a socket is of one disk; {} are named", images.len());
        let hint = "attach them one by one, each with its own path, or as units of one controller: --scsi";
        return Err(Failure::invalid(what).hint(hint));
    }
    let daemon = CommandSession::daemon(global)?;
    let targets = each(images, |ImageSpec { pool, image }| {
        let (hosts, uuid, log) = (hosts.clone(), uuid.clone(), log.clone());
        let (subsystem, target, vhost) = (subsystem.clone(), target.clone(), vhost.clone());
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
            vhost,
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

/// Returns the socket that the command line asks for; a relative path is taken from the current directory.
fn socket_options(options: &cli::AttachArgs) -> Result<Option<VhostSocketOptions>> {
    let Some(path) = &options.vhost else { return Ok(None) };
    let path = std::path::absolute(path)
        .map_err(|error| Failure::io(error, format_args!("looking for the current directory of {}", path.display())))?;
    if path.to_str().is_none() {
        return Err(Failure::invalid(format!("the path {} is not UTF-8", path.display())));
    }
    let (mode, owner) = (options.socket_mode.clone(), options.socket_owner.clone());
    let (queues, scsi, connect) = (options.queues, options.scsi, options.socket_connect);
    let socket = VhostSocketOptions { path, queues, mode, owner, scsi, connect };
    socket.check()?;
    Ok(Some(socket))
}

/// Ends exports.
pub fn detach(global: &GlobalArgs, output: Output, options: cli::DetachArgs) -> Result<()> {
    let (is_one, images) = (options.name.is_one(), options.name.resolve()?);
    let asked = match (options.nbd, options.nvme, options.iscsi, options.vhost) {
        (true, ..) => Some(Front::Nbd),
        (_, true, ..) => Some(Front::Nvme),
        (_, _, true, _) => Some(Front::Iscsi),
        (.., true) => Some(Front::Vhost),
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
