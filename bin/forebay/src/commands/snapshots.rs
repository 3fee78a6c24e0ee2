//! Command `snap`.

use super::shapes::{self, SnapshotRow};
use super::with_session;
use crate::api::UpdateSnapshotRequest;
use crate::cli::{GlobalArgs, RemovedSnapshot, SnapCommand, SnapLimitCommand, SnapRenameArgs};
use crate::client::progress::{Bar, ProgressUnit};
use crate::failure::Result;
use crate::ops::{
    CreateSnapshot, ListSnapshots, PurgeSnapshots, RemoveSnapshot, RemoveSnapshotById, RollBack, SetSnapshotLimit,
    UpdateSnapshot,
};
use crate::output::Output;
use crate::spec::{ImageSpec, SnapshotSpec};

/// Manages snapshots.
pub fn run(global: &GlobalArgs, output: Output, command: SnapCommand) -> Result<()> {
    match command {
        SnapCommand::Create(options) => {
            let bar = Bar::new(global, "Creating", ProgressUnit::Steps);
            let operation = CreateSnapshot(options.name.snapshot);
            let made = with_session(global, |session| session.call(operation, |now| bar.show(now)))?;
            drop(bar);
            output.print(&SnapshotRow::from(&made), |_| String::new())
        }
        SnapCommand::Ls(options) => {
            let operation = ListSnapshots { spec: options.name.image, all: options.all };
            let snapshots = with_session(global, |session| session.call(operation, |_| {}))?;
            let snapshots: Vec<_> = snapshots.iter().map(SnapshotRow::from).collect();
            output.print(&snapshots, |snapshots| shapes::snapshots(snapshots, options.all))
        }
        SnapCommand::Rename(SnapRenameArgs { snapshot, to }) => {
            let update = UpdateSnapshotRequest { name: Some(to), ..UpdateSnapshotRequest::default() };
            change(global, output, snapshot, update)
        }
        SnapCommand::Protect(options) => protect(global, output, options.snapshot, true),
        SnapCommand::Unprotect(options) => protect(global, output, options.snapshot, false),
        SnapCommand::Rm(options) => {
            let bar = Bar::new(global, "Removing", ProgressUnit::Steps);
            let removed = match options.snapshot {
                RemovedSnapshot::Named(spec) => {
                    let removed = spec.clone();
                    let operation = RemoveSnapshot { spec, force: options.force };
                    with_session(global, |session| session.call(operation, |now| bar.show(now)))?;
                    removed
                }
                RemovedSnapshot::Numbered(spec, id) => {
                    let operation = RemoveSnapshotById { spec, id };
                    with_session(global, |session| session.call(operation, |now| bar.show(now)))?
                }
            };
            drop(bar);
            output.print(&removed, |_| String::new())
        }
        SnapCommand::Purge(options) => {
            let bar = Bar::new(global, "Removing", ProgressUnit::Steps);
            let operation = PurgeSnapshots(options.image);
            let removed = with_session(global, |session| session.call(operation, |now| bar.show(now)))?;
            drop(bar);
            output.print(&removed, |_| String::new())
        }
        SnapCommand::Rollback(options) => {
            let bar = Bar::new(global, "Rolling back", ProgressUnit::Steps);
            let done = options.snapshot.clone();
            with_session(global, |session| session.call(RollBack(options.snapshot), |now| bar.show(now)))?;
            drop(bar);
            output.print(&done, |_| String::new())
        }
        SnapCommand::Limit(SnapLimitCommand::Set(options)) => {
            limit(global, output, options.name.image, Some(options.limit))
        }
        SnapCommand::Limit(SnapLimitCommand::Clear(options)) => limit(global, output, options.image, None),
    }
}

fn protect(global: &GlobalArgs, output: Output, spec: SnapshotSpec, protected: bool) -> Result<()> {
    let update = UpdateSnapshotRequest { protected: Some(protected), ..UpdateSnapshotRequest::default() };
    change(global, output, spec, update)
}

fn change(global: &GlobalArgs, output: Output, spec: SnapshotSpec, update: UpdateSnapshotRequest) -> Result<()> {
    let changed = with_session(global, |session| session.call(UpdateSnapshot { spec, update }, |_| {}))?;
    output.print(&SnapshotRow::from(&changed), |_| String::new())
}

fn limit(global: &GlobalArgs, output: Output, spec: ImageSpec, limit: Option<u64>) -> Result<()> {
    let limited = spec.clone();
    with_session(global, |session| session.call(SetSnapshotLimit { spec, limit }, |_| {}))?;
    output.print(&limited, |_| String::new())
}
