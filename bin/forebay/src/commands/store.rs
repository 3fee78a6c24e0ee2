//! `store init`, `store check`, `store devices`, `store replace`, `store grow`, `store add`, `store remove`, `store scrub`,
//! `store df`; `store ranges` is in [`ranges`].

use std::path::{Path, PathBuf};

use forebay_block::StoredBytes;
use forebay_reactor::{DriverChoice, Reactor};
use forebay_store::{CheckOptions, DeviceSetOptions, InitOptions};

use super::{ranges, with_session};
use crate::api::{
    AddDevicesRequest, GrowStoreRequest, RemoveDevicesRequest, ReplaceDeviceRequest, RotateKeyRequest, ScrubInfo,
    StoreDeviceInfo, StoreDevices, StoreSpace,
};
use crate::cli::{
    GlobalArgs, StoreAddArgs, StoreCheckArgs, StoreCommand, StoreGrowArgs, StoreInitArgs, StoreKeyCommand,
    StoreRemoveArgs, StoreReplaceArgs, StoreScrubArgs,
};
use crate::client::progress::{Bar, ProgressUnit};
use crate::client::session::CommandSession;
use crate::config::{absolute, default_data_dir, default_store, follow_links, size_from_free_space};
use crate::daemon::{link_store, prepare_dir};
use crate::engine::store;
use crate::engine::store::devices::{DEVICE_LIST, DeviceList, init_devices};
use crate::failure::{Failure, FailureKind, Result};
use crate::master_key;
use crate::ops::{
    AddStoreDevices, GetScrub, GetStoreKeys, GetStoreSpace, GrowStore, ListStoreDevices, ProgressSink,
    RemoveStoreDevices, ReplaceStoreDevice, RotateMasterKey, StartScrub,
};
use crate::output::{Output, fields, table};
use crate::timestamp::Timestamp;
use crate::units::{Size, percent};

/// Does what is asked with the store.
pub fn run(global: &GlobalArgs, output: Output, command: StoreCommand) -> Result<()> {
    match command {
        StoreCommand::Init(options) if options.ec.is_some() => init_several(global, output, &options),
        StoreCommand::Init(options) => init(global, output, options),
        StoreCommand::Devices => {
            let devices = with_session(global, |session| session.call(ListStoreDevices, |_| {}))?;
            output.print(&devices, show_devices)
        }
        StoreCommand::Replace(options) => replace(global, output, options),
        StoreCommand::Grow(options) => grow(global, output, options),
        StoreCommand::Add(options) => add(global, output, options),
        StoreCommand::Remove(options) => remove(global, output, options),
        StoreCommand::Scrub(options) => scrub(global, output, &options),
        StoreCommand::Check(options) => check(global, output, options),
        StoreCommand::Key(command) => key(global, output, command),
        StoreCommand::Ranges(command) => ranges::run(output, command),
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

pub(super) fn on_reactor<F: Future>(work: F) -> Result<F::Output> {
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
    if let Some(compression) = options.compression {
        on_reactor(store::set_compression(&path, compression))??;
    }
    let space = on_reactor(store::space(&path))??;
    output.print(&space, |space| format!("made {} with {}", space.path.display(), Size(space.capacity)))
}

/// Creates a store on several devices.
fn init_several(global: &GlobalArgs, output: Output, options: &StoreInitArgs) -> Result<()> {
    let (data, _) = places(global, None)?;
    refuse_beside_daemon(global, "making a store")?;
    prepare_dir(&data)?;
    let list = data.join(DEVICE_LIST);
    for there in [&list, &data.join("store.img")] {
        if there.symlink_metadata().is_ok() && !(options.force && there == &list) {
            return Err(Failure::new(FailureKind::Exists, format!("{} is there already", there.display())).hint(
                "name another data directory with --data; --force makes a new store on the same or other devices",
            ));
        }
    }
    let paths = options.devices.iter().map(|path| absolute(path)).collect::<Result<Vec<PathBuf>>>()?;
    let (columns, parity) = options.ec.unwrap_or_default();
    let making = DeviceSetOptions {
        data: columns,
        parity,
        size: options.size.map_or(0, |Size(size)| size),
        force: options.force,
        ..DeviceSetOptions::default()
    };
    let bar = Bar::new(global, "Allocating", ProgressUnit::Bytes);
    on_reactor_with_bar(&bar, |sink| init_devices(&list, &paths, &making, sink))?;
    drop(bar);
    if let Some(compression) = options.compression {
        on_reactor(store::set_compression(&list, compression))??;
    }
    let space = on_reactor(store::space(&list))??;
    output.print(&space, |space| format!("made a store on {} devices with {}", paths.len(), Size(space.capacity)))
}

fn replace(global: &GlobalArgs, output: Output, options: StoreReplaceArgs) -> Result<()> {
    let StoreReplaceArgs { old, new, force, wait } = options;
    let request = ReplaceDeviceRequest { old: listed(old)?, new: absolute(&new)?, force, wait };
    let bar = Bar::new(global, "Filling", ProgressUnit::Steps);
    let devices =
        with_session(global, |session| session.call(ReplaceStoreDevice(request), |progress| bar.show(progress)))?;
    drop(bar);
    output.print(&devices, show_devices)
}

/// Returns how a device is listed: a path becomes absolute, and a number stays as it is.
fn listed(device: String) -> Result<String> {
    if device.parse::<u16>().is_ok() { Ok(device) } else { Ok(absolute(Path::new(&device))?.display().to_string()) }
}

fn grow(global: &GlobalArgs, output: Output, options: StoreGrowArgs) -> Result<()> {
    let devices = options.devices.into_iter().map(listed).collect::<Result<_>>()?;
    let request = GrowStoreRequest { devices, size: options.size.map_or(0, |Size(size)| size) };
    let bar = Bar::new(global, "Allocating", ProgressUnit::Bytes);
    let space = with_session(global, |session| session.call(GrowStore(request), |progress| bar.show(progress)))?;
    drop(bar);
    output.print(&space, show_space)
}

fn add(global: &GlobalArgs, output: Output, options: StoreAddArgs) -> Result<()> {
    let StoreAddArgs { devices, size, force, wait } = options;
    let devices = devices.iter().map(|path| absolute(path)).collect::<Result<_>>()?;
    let request = AddDevicesRequest { devices, size: size.map_or(0, |Size(size)| size), force, wait };
    let bar = Bar::new(global, "Adding", ProgressUnit::Steps);
    let devices =
        with_session(global, |session| session.call(AddStoreDevices(request), |progress| bar.show(progress)))?;
    drop(bar);
    output.print(&devices, show_devices)
}

fn remove(global: &GlobalArgs, output: Output, options: StoreRemoveArgs) -> Result<()> {
    let StoreRemoveArgs { devices, wait, cancel } = options;
    let devices = devices.into_iter().map(listed).collect::<Result<_>>()?;
    let request = RemoveDevicesRequest { devices, cancel, wait };
    let bar = Bar::new(global, "Moving", ProgressUnit::Steps);
    let devices =
        with_session(global, |session| session.call(RemoveStoreDevices(request), |progress| bar.show(progress)))?;
    drop(bar);
    output.print(&devices, show_devices)
}

fn scrub(global: &GlobalArgs, output: Output, options: &StoreScrubArgs) -> Result<()> {
    let bar = Bar::new(global, "Scrubbing", ProgressUnit::Steps);
    let status = with_session(global, |session| match options.status {
        true => session.call(GetScrub, |_| {}),
        false => session.call(StartScrub { wait: options.wait }, |progress| bar.show(progress)),
    })?;
    drop(bar);
    output.print(&status, show_scrub)?;
    match status.lost {
        0 => Ok(()),
        lost => Err(Failure::new(FailureKind::Corrupt, format!("the scrub found {lost} lost block(s)"))
            .hint("the log and --status name them; restore these objects or images from elsewhere")),
    }
}

fn key(global: &GlobalArgs, output: Output, command: StoreKeyCommand) -> Result<()> {
    let keys = match command {
        StoreKeyCommand::Generate { file } => {
            let file = absolute(&file)?;
            master_key::generate(&file)?;
            return output.print(&serde_json::json!({ "file": file }), |_| {
                format!("made {}; without it encrypted images are lost: keep a copy elsewhere", file.display())
            });
        }
        StoreKeyCommand::Status => with_session(global, |session| session.call(GetStoreKeys, |_| {}))?,
        StoreKeyCommand::Rotate { to } => {
            let request = RotateKeyRequest { to: to.absolute()?.to_string() };
            with_session(global, |session| session.call(RotateMasterKey(request), |_| {}))?
        }
    };
    output.print(&keys, |keys| {
        let state = match (keys.locked, keys.images) {
            (true, _) => "locked: opened without the master key",
            (false, 0) => "none",
            (false, _) => "available",
        };
        fields(&[
            ("encrypted images", keys.images.to_string()),
            ("master key", keys.master_key.clone().unwrap_or_else(|| "-".into())),
            ("state", state.to_owned()),
        ])
    })
}

fn show_scrub(status: &ScrubInfo) -> String {
    let state = match (status.running, status.completed_s) {
        (true, _) => format!("{} of segments", percent(status.segment.into(), status.segments.into())),
        (false, 0) => "never".into(),
        (false, at) => format!("completed {}", Timestamp(at)),
    };
    let mut text = fields(&[
        ("scrub", state),
        ("verified", Size(status.bytes).to_string()),
        ("mended blocks", status.mended.to_string()),
        ("lost blocks", status.lost.to_string()),
    ]);
    status.losses.iter().for_each(|what| text.push_str(&format!("  lost: {what}\n")));
    text
}

fn show_devices(devices: &StoreDevices) -> String {
    let row = |device: &StoreDeviceInfo| {
        let state = match device.state.as_str() {
            "filling" => format!("filling {}", percent(device.filled.into(), devices.segments.into())),
            state if device.missing => format!("{state}, missing"),
            state => state.to_owned(),
        };
        let state = if device.leaving { format!("{state}, leaving") } else { state };
        let note = match (device.replaces, &device.reason) {
            (Some(old), _) => format!("replaces {old}"),
            (None, Some(reason)) => reason.clone(),
            (None, None) => String::new(),
        };
        vec![
            device.number.to_string(),
            device.path.display().to_string(),
            Size(device.size).to_string(),
            percent(device.allocated, device.size),
            state,
            device.read_errors.to_string(),
            device.write_errors.to_string(),
            device.wrong_blocks.to_string(),
            note,
        ]
    };
    let mut text = format!("{}+{} columns\n", devices.data, devices.parity);
    let header =
        ["NUMBER", "PATH", "SIZE", "ALLOCATED", "STATE", "READ ERRORS", "WRITE ERRORS", "WRONG BLOCKS", "NOTE"];
    text.push_str(&table(&header, &[0, 2, 3, 5, 6, 7], devices.devices.iter().map(row)));
    text.push('\n');
    text.push_str(&fields(&[
        ("degraded reads", devices.degraded_reads.to_string()),
        ("late reads", devices.late_reads.to_string()),
        ("mended blocks", format!("{} of {} wrong", devices.mended_blocks, devices.reconstructed_blocks)),
    ]));
    let moves = &devices.moves;
    if moves.pending {
        let left = format!("{}, {} moved", Size(moves.bytes_left), Size(moves.bytes_moved));
        text.push_str(&fields(&[("to be moved", left), ("segments to empty", moves.segments_left.to_string())]));
    }
    if let Some(why) = &moves.blocked {
        text.push_str(&format!("blocked: {why}\n"));
    }
    text
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
    let StoreCheckArgs { quick, repair, roll_back, rebuild, drop_lost, force, accept_missing_devices, .. } = options;
    if force && !(drop_lost || roll_back) {
        let message = "--force is for --drop-lost and --roll-back";
        return Err(Failure::new(FailureKind::Invalid, message).hint("give one of them, too"));
    }
    let checking = CheckOptions {
        data: !quick,
        repair,
        roll_back,
        rebuild,
        drop_lost,
        force,
        accept_missing: accept_missing_devices,
    };
    let report = on_reactor_with_bar(&bar, |sink| store::check(&path, checking, sink))?;
    drop(bar);
    output.print(&report, store::Report::show)?;
    match report.damage_count() {
        0 => Ok(()),
        count => {
            let what = format!("the store {} is damaged in {count} place(s)", path.display());
            let hint = match (report.waits_for_roll_back(), report.waits_for_force()) {
                (true, _) => {
                    "nothing was written; copy the file or device first, then --rebuild --roll-back gives up what is lost"
                }
                (_, true) => {
                    "nothing was written; copy the file or device first, then the same with --force gives up what is named"
                }
                _ if DeviceList::is_list(&path) => {
                    "replace devices that are missing, then scrub; what is lost for good, restore from elsewhere"
                }
                _ => "export what can still be read, make a new store, and import that",
            };
            Err(Failure::new(FailureKind::Corrupt, what).hint(hint))
        }
    }
}

/// Describes what is stored compressed.
fn compressed(space: &StoreSpace) -> String {
    let sizes = StoredBytes { logical: space.compressed_logical, stored: space.compressed_stored };
    match sizes.stored {
        0 => "-".into(),
        stored => format!("{} in {} (ratio {:.2})", Size(sizes.logical), Size(stored), sizes.ratio()),
    }
}

fn show_space(space: &StoreSpace) -> String {
    fields(&[
        ("store", space.path.display().to_string()),
        ("capacity", Size(space.capacity).to_string()),
        ("used", format!("{} ({})", Size(space.used), percent(space.used, space.capacity))),
        ("available", Size(space.available).to_string()),
        ("compressed", compressed(space)),
        ("objects", space.objects.to_string()),
        ("limited by", space.limited_by.clone().unwrap_or_else(|| "-".into())),
        ("writes", space.refuses_writes.as_ref().map_or_else(|| "taken".into(), |why| format!("refused: {why}"))),
    ])
}
