//! `store init`, `store check`, `store df`.

use std::path::{Path, PathBuf};

use forebay_reactor::{DriverChoice, Reactor};
use forebay_store::{CheckOptions, InitOptions};

use super::with_session;
use crate::api::StoreSpace;
use crate::cli::{GlobalArgs, StoreCheckArgs, StoreCommand, StoreInitArgs};
use crate::client::progress::{Bar, ProgressUnit};
use crate::client::session::CommandSession;
use crate::config::{absolute, default_data_dir, default_store, follow_links, size_from_free_space};
use crate::daemon::{link_store, prepare_dir};
use crate::engine::store;
use crate::failure::{Failure, FailureKind, Result};
use crate::ops::{GetStoreSpace, ProgressSink};
use crate::output::{Output, fields};
use crate::units::{Size, percent};

/// Does what is asked with the store.
pub fn run(global: &GlobalArgs, output: Output, command: StoreCommand) -> Result<()> {
    match command {
        StoreCommand::Init(options) => init(global, output, options),
        StoreCommand::Check(options) => check(global, output, options),
        StoreCommand::Df => {
            let space = with_session(global, |session| session.call(GetStoreSpace, |_| {}))?;
            output.print(&space, show_space)
        }
    }
}

/// Returns the data directory, and the store in it or elsewhere.
fn places(global: &GlobalArgs, store: Option<&Path>) -> Result<(PathBuf, PathBuf)> {
    let data = absolute(&global.data.clone().unwrap_or_else(default_data_dir))?;
    let store = match store {
        Some(path) => absolute(path)?,
        None => default_store(&data),
    };
    Ok((data, store))
}

fn refuse_beside_daemon(global: &GlobalArgs, what: &str) -> Result<()> {
    match CommandSession::daemon(global) {
        Ok(client) => {
            let message =
                format!("{what} needs the store for itself, and the daemon at {} has it", client.socket.display());
            Err(Failure::new(FailureKind::Busy, message).hint("stop the daemon first"))
        }
        Err(failure) if failure.kind == FailureKind::Unreachable => Ok(()),
        Err(failure) => Err(failure),
    }
}

fn on_reactor<F: Future>(work: F) -> Result<F::Output> {
    let reactor = Reactor::system(DriverChoice::Auto).map_err(|error| Failure::io(error, "starting the reactor"))?;
    Ok(reactor.block_on(work))
}

/// Runs work that reports how far it is, and shows that.
fn on_reactor_with_bar<T, F: Future<Output = Result<T>>>(bar: &Bar, work: impl FnOnce(ProgressSink) -> F) -> Result<T> {
    let (sink, mut seen) = ProgressSink::channel();
    on_reactor(async {
        let mut work = std::pin::pin!(work(sink));
        loop {
            tokio::select! {
                biased;
                done = &mut work => break done,
                Ok(()) = seen.changed() => {
                    if let Some(now) = *seen.borrow_and_update() {
                        bar.show(now);
                    }
                }
            }
        }
    })?
}

fn init(global: &GlobalArgs, output: Output, options: StoreInitArgs) -> Result<()> {
    let (data, path) = places(global, options.store.as_deref())?;
    let link = default_store(&data);
    // A store elsewhere that the data directory names already.
    let path = if path == link { std::fs::read_link(&link).map_or(path, |target| data.join(target)) } else { path };
    refuse_beside_daemon(global, "making a store")?;
    prepare_dir(&data)?;
    let linked = link.symlink_metadata().is_ok();
    link_store(&data, &path)?;
    // The file itself: a link is neither made nor removed with it.
    let made = make(global, &follow_links(&path), &options);
    if made.is_err() && !linked && path != link {
        // Nothing in the data directory names what is not a store of ours.
        if let Err(error) = std::fs::remove_file(&link) {
            tracing::warn!(%error, "cannot remove the dangling link {}", link.display());
        }
    }
    made?;
    let space = on_reactor(store::space(&path))??;
    output.print(&space, |space| format!("made {} with {}", space.path.display(), Size(space.capacity)))
}

fn make(global: &GlobalArgs, path: &Path, options: &StoreInitArgs) -> Result<()> {
    let size = match options.size {
        Some(Size(size)) => size,
        None if store::is_device(path) => 0,
        None => size_from_free_space(path.parent().unwrap_or(path))?,
    };
    let StoreInitArgs { force, preallocate, .. } = *options;
    let options = InitOptions { size, force, preallocate, ..InitOptions::default() };
    let bar = preallocate.then(|| Bar::new(global, "Allocating", ProgressUnit::Bytes));
    match &bar {
        Some(bar) => on_reactor_with_bar(bar, |sink| store::init(path, options, sink)),
        None => on_reactor(store::init(path, options, ProgressSink::channel().0))?,
    }
}

fn check(global: &GlobalArgs, output: Output, options: StoreCheckArgs) -> Result<()> {
    let (_, path) = places(global, options.store.as_deref())?;
    refuse_beside_daemon(global, "checking")?;
    let bar = Bar::new(global, "Checking", ProgressUnit::Steps);
    let StoreCheckArgs { quick, repair, roll_back, rebuild, .. } = options;
    let checking = CheckOptions { data: !quick, repair, roll_back, rebuild };
    let report = on_reactor_with_bar(&bar, |sink| store::check(&path, checking, sink))?;
    drop(bar);
    output.print(&report, store::Report::show)?;
    match report.damage_count() {
        0 => Ok(()),
        count => {
            let what = format!("the store {} is damaged in {count} place(s)", path.display());
            let hint = match report.waits_for_roll_back() {
                true => {
                    "nothing was written; copy the file or device first, then --rebuild --roll-back gives up what is lost"
                }
                false => "export what can still be read, make a new store, and import that",
            };
            Err(Failure::new(FailureKind::Corrupt, what).hint(hint))
        }
    }
}

fn show_space(space: &StoreSpace) -> String {
    fields(&[
        ("store", space.path.display().to_string()),
        ("capacity", Size(space.capacity).to_string()),
        ("used", format!("{} ({})", Size(space.used), percent(space.used, space.capacity))),
        ("available", Size(space.available).to_string()),
        ("objects", space.objects.to_string()),
        ("limited by", space.limited_by.clone().unwrap_or_else(|| "-".into())),
        ("writes", space.refuses_writes.as_ref().map_or_else(|| "taken".into(), |why| format!("refused: {why}"))),
    ])
}
