//! Command `group`, for groups of gateways.

use super::{CommandSession, with_session};
use crate::api::{DrainGateway, GatewayGroupStatus, GatewayMove};
use crate::cli::{CreateGroupArgs, DrainGroupArgs, GlobalArgs, GroupStatusArgs, JoinGroupArgs, RemoveGroupArgs};
use crate::failure::{Failure, Result};
use crate::ops::{
    CreateGatewayGroup, DrainGatewayMember, GetGatewayGroup, JoinGatewayGroup, LeaveGatewayGroup, RebalanceGateways,
    RemoveGatewayGroup,
};
use crate::output::{Output, table};

/// Creates a group.
pub fn create(global: &GlobalArgs, output: Output, options: CreateGroupArgs) -> Result<()> {
    let spec = options.of.group;
    let lease_ms = match options.lease {
        Some(lease) => Some(u32::try_from(lease.0.as_millis()).map_err(|_| Failure::invalid("the lease is too long"))?),
        None => None,
    };
    with_session(global, |session| session.call(CreateGatewayGroup { spec: spec.clone(), lease_ms }, |_| {}))?;
    output.print(&spec, |_| String::new())
}

/// Removes a group.
pub fn remove(global: &GlobalArgs, output: Output, options: RemoveGroupArgs) -> Result<()> {
    let spec = options.of.group;
    with_session(global, |session| session.call(RemoveGatewayGroup(spec.clone()), |_| {}))?;
    output.print(&spec, |_| String::new())
}

/// Makes the daemon a member.
pub fn join(global: &GlobalArgs, output: Output, options: JoinGroupArgs) -> Result<()> {
    CommandSession::daemon(global)?.call(&JoinGatewayGroup(options.group.clone()), None, |_| {})?;
    output.print(&options.group, |_| String::new())
}

/// Lets the daemon leave its group.
pub fn leave(global: &GlobalArgs) -> Result<()> {
    CommandSession::daemon(global)?.call(&LeaveGatewayGroup, None, |_| {})
}

/// Shows a group.
pub fn status(global: &GlobalArgs, output: Output, options: GroupStatusArgs) -> Result<()> {
    let status = match options.group {
        None => CommandSession::daemon(global)?.call(&GetGatewayGroup(None), None, |_| {})?,
        group => with_session(global, |session| session.call(GetGatewayGroup(group), |_| {}))?,
    };
    output.print(&status, show)
}

/// Begins or ends draining a member.
pub fn drain(global: &GlobalArgs, options: DrainGroupArgs) -> Result<()> {
    let request = DrainGateway { member: options.member, undo: options.undo };
    CommandSession::daemon(global)?.call(&DrainGatewayMember(request), None, |_| {})
}

/// Spreads the volumes over the members.
pub fn rebalance(global: &GlobalArgs, output: Output) -> Result<()> {
    let moves = CommandSession::daemon(global)?.call(&RebalanceGateways, None, |_| {})?;
    output.print(&moves, |moves| show_moves(moves))
}

fn show_moves(moves: &[GatewayMove]) -> String {
    if moves.is_empty() {
        return "the volumes are spread evenly\n".into();
    }
    let rows = moves.iter().map(|one| vec![one.volume.clone(), one.from.clone(), one.to.clone()]);
    table(&["VOLUME", "FROM", "TO"], &[], rows)
}

fn show(status: &GatewayGroupStatus) -> String {
    let GatewayGroupStatus { group, epoch, lease_ms, nqn, target, .. } = status;
    let mut text =
        format!("group {group}, epoch {epoch}, lease {lease_ms} ms\nNVMe subsystem {nqn}\niSCSI target {target}\n");
    if let Some(error) = &status.error {
        text.push_str(&format!("this daemon does not take part: {error}\n"));
    }
    let members = status.members.iter().map(|member| {
        let link = match (member.own, member.connected) {
            (true, _) => "this daemon",
            (false, true) => "connected",
            (false, false) => "-",
        };
        let volumes = member.volumes.to_string();
        vec![member.host.clone(), member.id.clone(), member.state.clone(), volumes, link.into(), member.peer.join(" ")]
    });
    text.push('\n');
    text.push_str(&table(&["HOST", "ID", "STATE", "VOLUMES", "CONNECTION", "PEER"], &[3], members));
    if !status.volumes.is_empty() {
        let volumes = status.volumes.iter().map(|volume| {
            let state = match (&volume.next, volume.leaving, &volume.error) {
                (_, true, _) => "being removed".to_owned(),
                (Some(next), ..) => format!("moving to {next}"),
                (None, _, Some(error)) => error.clone(),
                (None, false, None) if volume.open_here => "open here".to_owned(),
                _ => String::new(),
            };
            vec![volume.image.clone(), volume.fronts.join(","), volume.owner.clone(), state]
        });
        text.push('\n');
        text.push_str(&table(&["VOLUME", "FRONTS", "OWNER", "STATE"], &[], volumes));
    }
    text
}
