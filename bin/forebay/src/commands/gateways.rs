//! Command `group`, for groups of gateways.

use super::{CommandSession, with_session};
use crate::api::{
    DrainGateway, GatewayGroupPolicy, GatewayGroupStatus, GatewayHostSource, GatewayLoad, GatewayMove,
    GatewayMoveState, GatewayWeight, RebalanceGatewaysRequest,
};
use crate::cli::{
    CreateGroupArgs, DrainGroupArgs, GlobalArgs, GroupStatusArgs, HostSource, JoinGroupArgs, OnOff, RebalanceGroupArgs,
    RemoveGroupArgs, SetGroupArgs, SetWeightArgs,
};
use crate::client::progress::{Bar, ProgressUnit};
use crate::failure::{Failure, Result};
use crate::ops::{
    CreateGatewayGroup, DrainGatewayMember, GetGatewayGroup, JoinGatewayGroup, LeaveGatewayGroup, RebalanceGateways,
    RemoveGatewayGroup, SetGatewayPolicy, SetGatewayWeight,
};
use crate::output::{Output, table};

/// Creates a group.
pub fn create(global: &GlobalArgs, output: Output, options: CreateGroupArgs) -> Result<()> {
    let spec = options.of.group;
    let lease_ms = match options.lease {
        Some(lease) => Some(u32::try_from(lease.0.as_millis()).map_err(|_| Failure::invalid("the lease is too long"))?),
        None => None,
    };
    let operation = CreateGatewayGroup { spec: spec.clone(), lease_ms, rebalance: options.rebalance };
    with_session(global, |session| session.call(operation, |_| {}))?;
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

/// Changes the policy of the group.
pub fn set(global: &GlobalArgs, options: &SetGroupArgs) -> Result<()> {
    let hosts = options.hosts.map(|source| match source {
        HostSource::Group => GatewayHostSource::Group,
        HostSource::Members => GatewayHostSource::Members,
    });
    let request = GatewayGroupPolicy { rebalance: options.rebalance.map(|rebalance| rebalance == OnOff::On), hosts };
    CommandSession::daemon(global)?.call(&SetGatewayPolicy(request), None, |_| {})
}

/// Sets the weight of a member.
pub fn set_weight(global: &GlobalArgs, options: SetWeightArgs) -> Result<()> {
    let request = GatewayWeight { member: options.member, weight: options.weight };
    CommandSession::daemon(global)?.call(&SetGatewayWeight(request), None, |_| {})
}

/// Moves volumes so that members are loaded alike.
pub fn rebalance(global: &GlobalArgs, output: Output, options: &RebalanceGroupArgs) -> Result<()> {
    let request = RebalanceGatewaysRequest { dry_run: options.dry_run };
    let bar = Bar::new(global, "Moving", ProgressUnit::Steps);
    let moves = CommandSession::daemon(global)?.call(&RebalanceGateways(request), None, |now| bar.show(now))?;
    drop(bar);
    output.print(&moves, |moves| show_moves(moves))?;
    let (moved, all) = (moves.iter().filter(|one| one.state == GatewayMoveState::Moved).count(), moves.len());
    if options.dry_run || moved == all {
        return Ok(());
    }
    Err(Failure::failed(format!("{} of {all} volumes were not moved", all - moved))
        .hint("'forebay group status' shows their owners; the logs of the members say why"))
}

fn show_moves(moves: &[GatewayMove]) -> String {
    if moves.is_empty() {
        return "no move would make the loads of the members more alike\n".into();
    }
    let rows = moves.iter().map(|one| {
        let state = match (one.state, &one.error) {
            (_, Some(error)) => error.clone(),
            (GatewayMoveState::Planned, None) => "planned".into(),
            (GatewayMoveState::Moving, None) => "still moving".into(),
            (GatewayMoveState::Moved, None) => "moved".into(),
            (GatewayMoveState::Stayed, None) => "not moved".into(),
        };
        let [requests, mib] = show_load(one.load);
        vec![one.volume.clone(), one.from.clone(), one.to.clone(), requests, mib, state]
    });
    table(&["VOLUME", "FROM", "TO", "REQ/S", "MIB/S", "STATE"], &[3, 4], rows)
}

/// Writes a load as requests and MiB a second.
fn show_load(load: Option<GatewayLoad>) -> [String; 2] {
    match load {
        Some(GatewayLoad { requests_per_s, kib_per_s }) => {
            [requests_per_s.to_string(), format!("{:.1}", f64::from(kib_per_s) / 1024.0)]
        }
        None => ["-".into(), "-".into()],
    }
}

/// Writes whose hosts are admitted, and which are listed.
fn show_hosts(status: &GatewayGroupStatus) -> String {
    let nvme = status.nvme_hosts.iter().map(|host| host.nqn.as_str());
    let listed: Vec<&str> = nvme.chain(status.initiators.iter().map(String::as_str)).collect();
    match (status.hosts, listed.is_empty()) {
        (GatewayHostSource::Members, true) => String::new(),
        (GatewayHostSource::Members, false) => {
            format!(
                "hosts of each member's configuration; listed for 'group set --hosts group': {}\n",
                listed.join(", ")
            )
        }
        (GatewayHostSource::Group, true) => "hosts none\n".into(),
        (GatewayHostSource::Group, false) => format!("hosts {}\n", listed.join(", ")),
    }
}

fn show(status: &GatewayGroupStatus) -> String {
    let GatewayGroupStatus { group, epoch, lease_ms, nqn, target, .. } = status;
    let rebalance = if status.rebalance { "on" } else { "off" };
    let mut text = format!(
        "group {group}, epoch {epoch}, lease {lease_ms} ms, automatic rebalancing {rebalance}\nNVMe subsystem {nqn}\niSCSI target {target}\n"
    );
    text.push_str(&show_hosts(status));
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
        let (weight, [requests, mib]) = (member.weight.to_string(), show_load(member.load));
        let (host, id, state) = (member.host.clone(), member.id.clone(), member.state.clone());
        vec![host, id, state, volumes, weight, requests, mib, link.into(), member.peer.join(" ")]
    });
    text.push('\n');
    text.push_str(&table(
        &["HOST", "ID", "STATE", "VOLUMES", "WEIGHT", "REQ/S", "MIB/S", "CONNECTION", "PEER"],
        &[3, 4, 5, 6],
        members,
    ));
    if !status.volumes.is_empty() {
        let volumes = status.volumes.iter().map(|volume| {
            let state = match (&volume.next, volume.leaving, &volume.error) {
                (_, true, _) => "being removed".to_owned(),
                (Some(next), ..) => format!("moving to {next}"),
                (None, _, Some(error)) => error.clone(),
                (None, false, None) if volume.open_here => "open here".to_owned(),
                _ => String::new(),
            };
            let copies = volume.log.as_ref().map_or_else(
                || "-".to_owned(),
                |log| match log.copies_wanted {
                    0 => "log ends".to_owned(),
                    wanted => format!("{} of {wanted}: {}", log.copies.len(), log.copies.join(",")),
                },
            );
            let [requests, mib] = show_load(volume.load);
            let sockets = volume.sockets.iter().map(|socket| format!("vhost@{}", socket.member));
            let fronts: Vec<String> = volume.fronts.iter().cloned().chain(sockets).collect();
            vec![volume.image.clone(), fronts.join(","), volume.owner.clone(), requests, mib, copies, state]
        });
        text.push('\n');
        text.push_str(&table(
            &["VOLUME", "FRONTS", "OWNER", "REQ/S", "MIB/S", "LOG COPIES", "STATE"],
            &[3, 4],
            volumes,
        ));
    }
    text
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn moves_are_shown_with_their_loads_and_states() {
        assert!(show_moves(&[]).starts_with("no move would"));
        let read = |value| serde_json::from_value::<GatewayMove>(value).expect("a move");
        let moves = [
            read(json!({"volume": "rbd/a", "from": "g1", "to": "g2", "state": "moved",
                "load": {"requests_per_s": 1200, "kib_per_s": 5120}})),
            read(json!({"volume": "rbd/b", "from": "g1", "to": "g3", "state": "stayed", "error": "it is gone"})),
            // Of a daemon that knows no states.
            read(json!({"volume": "rbd/c", "from": "g1", "to": "g3"})),
        ];
        let lines: Vec<Vec<String>> =
            show_moves(&moves).lines().map(|line| line.split_whitespace().map(str::to_owned).collect()).collect();
        assert_eq!(lines[1], ["rbd/a", "g1", "g2", "1200", "5.0", "moved"]);
        assert_eq!(lines[2], ["rbd/b", "g1", "g3", "-", "-", "it", "is", "gone"]);
        assert_eq!(lines[3], ["rbd/c", "g1", "g3", "-", "-", "planned"]);
    }

    #[test]
    fn a_status_shows_weights_and_loads() {
        let status: GatewayGroupStatus = serde_json::from_value(json!({
            "group": "rbd/gw", "id": "00", "epoch": 7, "lease_ms": 1000, "rebalance": true, "nqn": "nqn.x",
            "members": [
                {"id": "01", "host": "g1", "version": "0", "state": "active", "own": true, "connected": false, "volumes": 1,
                    "weight": 200, "load": {"requests_per_s": 10, "kib_per_s": 512}, "peer": ["tcp:10.0.0.1:1"]},
                {"id": "02", "host": "g2", "version": "0", "state": "out", "own": false, "connected": false, "volumes": 0,
                    "weight": 100, "peer": []},
            ],
            "volumes": [
                {"image": "rbd/a", "fronts": ["nbd"], "owner": "g1", "open_here": true,
                    "load": {"requests_per_s": 10, "kib_per_s": 512}},
            ],
        }))
        .expect("a status");
        let text = show(&status);
        assert!(text.contains("automatic rebalancing on"), "{text}");
        let line = |begins: &str| {
            let line = text.lines().find(|line| line.starts_with(begins)).expect("a line");
            line.split_whitespace().map(str::to_owned).collect::<Vec<_>>()
        };
        assert_eq!(line("g1 ")[3..7], ["1", "200", "10", "0.5"]);
        assert_eq!(line("g2 ")[3..7], ["0", "100", "-", "-"]);
        assert_eq!(line("rbd/a")[2..5], ["g1", "10", "0.5"]);
    }
}
