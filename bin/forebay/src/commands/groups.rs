//! Command `group`.

use serde::Serialize;

use super::with_session;
use super::{gateways, shapes};
use crate::api::{GroupImage, GroupSnapshotListing};
use crate::cli::{GlobalArgs, GroupCommand, GroupImageCommand, GroupSnapCommand};
use crate::client::progress::{Bar, ProgressUnit};
use crate::failure::Result;
use crate::ops::{
    AddToGroup, CreateGroup, CreateGroupSnapshot, ListGroupImages, ListGroupSnapshots, ListGroups, Operation,
    RemoveFromGroup, RemoveGroup, RemoveGroupSnapshot, RenameGroup, RenameGroupSnapshot, RollBackGroup,
};
use crate::output::Output;
use crate::spec::{GroupSnapshotSpec, GroupSpec};

/// Manages groups.
pub fn run(global: &GlobalArgs, output: Output, command: GroupCommand) -> Result<()> {
    match command {
        GroupCommand::Create(options) if options.gateways => gateways::create(global, output, options),
        GroupCommand::Create(options) => {
            let group = options.of.group;
            change(global, output, CreateGroup(group.clone()), &group)
        }
        GroupCommand::Ls(options) => {
            let groups = with_session(global, |session| session.call(ListGroups { pool: options.pool }, |_| {}))?;
            output.print(&groups, |groups| groups.iter().map(|name| format!("{name}\n")).collect())
        }
        GroupCommand::Rename(options) => {
            let renamed = GroupSpec { pool: options.group.pool.clone(), group: options.to.clone() };
            change(global, output, RenameGroup { spec: options.group, name: options.to }, &renamed)
        }
        GroupCommand::Rm(options) if options.gateways => gateways::remove(global, output, options),
        GroupCommand::Rm(options) => {
            let group = options.of.group;
            change(global, output, RemoveGroup(group.clone()), &group)
        }
        GroupCommand::Image(command) => images(global, output, command),
        GroupCommand::Snap(command) => snapshots(global, output, command),
        GroupCommand::Join(options) => gateways::join(global, output, options),
        GroupCommand::Leave => gateways::leave(global),
        GroupCommand::Status(options) => gateways::status(global, output, options),
        GroupCommand::Drain(options) => gateways::drain(global, options),
        GroupCommand::Set(options) => gateways::set(global, &options),
        GroupCommand::SetWeight(options) => gateways::set_weight(global, options),
        GroupCommand::Rebalance(options) => gateways::rebalance(global, output, &options),
    }
}

/// Runs an operation without a result, and shows its subject in JSON.
fn change<O: Operation<Reply = ()>>(
    global: &GlobalArgs,
    output: Output,
    operation: O,
    subject: &impl Serialize,
) -> Result<()> {
    with_session(global, |session| session.call(operation, |_| {}))?;
    output.print(subject, |_| String::new())
}

fn images(global: &GlobalArgs, output: Output, command: GroupImageCommand) -> Result<()> {
    match command {
        GroupImageCommand::Add(options) => {
            let image = options.image.clone();
            change(global, output, AddToGroup { spec: options.group, image: options.image }, &image)
        }
        GroupImageCommand::Rm(options) => {
            let image = options.image.clone();
            change(global, output, RemoveFromGroup { spec: options.group, image: options.image }, &image)
        }
        GroupImageCommand::Ls(options) => {
            let images = with_session(global, |session| session.call(ListGroupImages(options.group), |_| {}))?;
            output.print(&images, |images| images.iter().map(image_line).collect())
        }
    }
}

/// Writes an image as `rbd group image ls` does.
fn image_line(image: &GroupImage) -> String {
    let slash = if image.namespace.is_empty() { "" } else { "/" };
    let state = if image.state == 0 { "" } else { "incomplete" };
    format!("{}/{}{slash}{} {state}\n", image.pool, image.namespace, image.image)
}

fn snapshots(global: &GlobalArgs, output: Output, command: GroupSnapCommand) -> Result<()> {
    match command {
        GroupSnapCommand::Create(options) => {
            let snapshot = options.name.snapshot;
            change(global, output, CreateGroupSnapshot(snapshot.clone()), &snapshot)
        }
        GroupSnapCommand::Ls(options) => {
            let all = with_session(global, |session| session.call(ListGroupSnapshots(options.group), |_| {}))?;
            output.print(&all, |all| snapshot_table(all))
        }
        GroupSnapCommand::Rename(options) => {
            let renamed = GroupSnapshotSpec { group: options.snapshot.group.clone(), snapshot: options.to.clone() };
            change(global, output, RenameGroupSnapshot { spec: options.snapshot, name: options.to }, &renamed)
        }
        GroupSnapCommand::Rm(options) => {
            change(global, output, RemoveGroupSnapshot(options.snapshot.clone()), &options.snapshot)
        }
        GroupSnapCommand::Rollback(options) => {
            let bar = Bar::new(global, "Rolling back", ProgressUnit::Steps);
            let operation = RollBackGroup(options.snapshot.clone());
            with_session(global, |session| session.call(operation, |now| bar.show(now)))?;
            drop(bar);
            output.print(&options.snapshot, |_| String::new())
        }
    }
}

/// Writes snapshots as `rbd group snap ls` does.
fn snapshot_table(all: &[GroupSnapshotListing]) -> String {
    let rows = all.iter().map(|snapshot| [snapshot.snapshot.clone(), snapshot.state.clone()]);
    shapes::table(["NAME", "STATUS"], &[1], rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Output of `rbd group` 16.2.
    #[test]
    fn lists_byte_for_byte() {
        let snapshot = |name: &str| GroupSnapshotListing { snapshot: name.into(), state: "ok".into() };
        assert_eq!(snapshot_table(&[snapshot("s1")]), "NAME  STATUS\ns1        ok\n");
        assert_eq!(snapshot_table(&[snapshot("empty")]), "NAME   STATUS\nempty      ok\n");
        assert_eq!(snapshot_table(&[]), "");
        let image = GroupImage { image: "a".into(), pool: "rbd".into(), namespace: String::new(), state: 0 };
        assert_eq!(image_line(&image), "rbd/a \n");
        assert_eq!(image_line(&GroupImage { namespace: "ns".into(), state: 1, ..image }), "rbd/ns/a incomplete\n");
    }
}
