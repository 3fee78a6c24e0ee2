//! `nvme-subsystem` and `iscsi-target`.

use crate::api::{self, IscsiTarget, NvmeHost, NvmeSubsystem};
use crate::cli::{GlobalArgs, IscsiTargetCommand, NvmeSubsystemCommand};
use crate::client::session::CommandSession;
use crate::config::{parse_chap, parse_host};
use crate::failure::Result;
use crate::ops::{
    AdmitInitiator, AllowNvmeHost, CreateIscsiTarget, CreateNvmeSubsystem, DenyNvmeHost, ListIscsiTargets,
    ListNvmeSubsystems, RemoveIscsiTarget, RemoveNvmeSubsystem,
};
use crate::output::{Output, table};

/// Manages NVMe subsystems.
pub fn nvme_subsystem(global: &GlobalArgs, output: Output, command: NvmeSubsystemCommand) -> Result<()> {
    let daemon = CommandSession::daemon(global)?;
    let one = |subsystem: NvmeSubsystem| {
        output.print(&subsystem, |subsystem| show_subsystems(std::slice::from_ref(subsystem)))
    };
    match command {
        NvmeSubsystemCommand::Ls => {
            let all = daemon.call(&ListNvmeSubsystems, None, |_| {})?;
            output.print(&all, |all| show_subsystems(all))
        }
        NvmeSubsystemCommand::Create(options) => {
            let hosts = options.host.iter().map(|host| parse_host(host)).collect::<Result<Vec<NvmeHost>>>()?;
            let request = api::CreateNvmeSubsystemRequest { nqn: options.nqn, any_host: options.any_host, hosts };
            one(daemon.call(&CreateNvmeSubsystem(request), None, |_| {})?)
        }
        NvmeSubsystemCommand::Rm { nqn } => daemon.call(&RemoveNvmeSubsystem(nqn), None, |_| {}),
        NvmeSubsystemCommand::Allow(options) => {
            let host = parse_host(&options.host)?;
            one(daemon.call(&AllowNvmeHost { subsystem: options.subsystem, host }, None, |_| {})?)
        }
        NvmeSubsystemCommand::Deny(options) => {
            let request = DenyNvmeHost { subsystem: options.subsystem, host: options.host };
            one(daemon.call(&request, None, |_| {})?)
        }
    }
}

fn show_subsystems(all: &[NvmeSubsystem]) -> String {
    let proves = |host: &NvmeHost| {
        let parts =
            [(&host.secret, "secret"), (&host.controller_secret, "controller-secret"), (&host.tls_key, "tls-key")];
        let named: Vec<&str> = parts.into_iter().filter_map(|(file, name)| file.as_ref().map(|_| name)).collect();
        match named.is_empty() {
            true => host.nqn.clone(),
            false => format!("{} ({})", host.nqn, named.join(", ")),
        }
    };
    let rows = all.iter().map(|subsystem| {
        let hosts = match subsystem.any_host {
            true => "any".to_owned(),
            false => subsystem.hosts.iter().map(proves).collect::<Vec<_>>().join("\n"),
        };
        let (exports, controllers) = (subsystem.exports.to_string(), subsystem.controllers.to_string());
        vec![marked(&subsystem.nqn, subsystem.is_default), exports, controllers, hosts]
    });
    table(&["SUBSYSTEM", "EXPORTS", "CONTROLLERS", "HOSTS"], &[1, 2], rows)
}

/// Manages iSCSI targets.
pub fn iscsi_target(global: &GlobalArgs, output: Output, command: IscsiTargetCommand) -> Result<()> {
    let daemon = CommandSession::daemon(global)?;
    let one = |target: IscsiTarget| output.print(&target, |target| show_targets(std::slice::from_ref(target)));
    let admit = |options: crate::cli::AdmitInitiatorArgs, allowed| {
        let request = AdmitInitiator { target: options.target, initiator: options.initiator, allowed };
        one(daemon.call(&request, None, |_| {})?)
    };
    match command {
        IscsiTargetCommand::Ls => {
            let all = daemon.call(&ListIscsiTargets, None, |_| {})?;
            output.print(&all, |all| show_targets(all))
        }
        IscsiTargetCommand::Create(options) => {
            let request = api::CreateIscsiTargetRequest {
                name: options.name,
                any_initiator: options.any_initiator,
                initiators: options.initiator,
                chap: options.chap.as_deref().map(parse_chap).transpose()?,
                mutual_chap: options.mutual_chap.as_deref().map(parse_chap).transpose()?,
            };
            one(daemon.call(&CreateIscsiTarget(request), None, |_| {})?)
        }
        IscsiTargetCommand::Rm { name } => daemon.call(&RemoveIscsiTarget(name), None, |_| {}),
        IscsiTargetCommand::Allow(options) => admit(options, true),
        IscsiTargetCommand::Deny(options) => admit(options, false),
    }
}

fn show_targets(all: &[IscsiTarget]) -> String {
    let rows = all.iter().map(|target| {
        let initiators = match target.any_initiator {
            true => "any".to_owned(),
            false => target.initiators.join("\n"),
        };
        let chap = match (&target.chap, &target.mutual_chap) {
            (None, _) => "none",
            (Some(_), None) => "one-way",
            (Some(_), Some(_)) => "mutual",
        };
        let (exports, sessions) = (target.exports.to_string(), target.sessions.to_string());
        vec![marked(&target.name, target.is_default), exports, sessions, chap.to_owned(), initiators]
    });
    table(&["TARGET", "EXPORTS", "SESSIONS", "CHAP", "INITIATORS"], &[1, 2], rows)
}

/// Marks the subsystem or target of the configuration.
fn marked(name: &str, is_default: bool) -> String {
    if is_default { format!("{name} (default)") } else { name.to_owned() }
}
