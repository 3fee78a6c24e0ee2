//! The embedded store as the engine and `forebay store` use it.

pub mod devices;
mod keys;

use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use forebay_block::{Compression, DataPolicy, ErrorKind, ObjectBackend, ObjectName, Usage};
use forebay_store::{
    CheckOptions, ColumnState, InitOptions, RebuildReport, Store, StoreOptions, StoreStats, split_range,
};
use serde::Serialize;

use self::devices::{DeviceList, update_list};
use crate::api::StoreSpace;
use crate::config::follow_links;
use crate::failure::{Failure, FailureKind, Result};
use crate::ops::ProgressSink;
use crate::output::fields;
use crate::spec::LOCAL_POOL;
use crate::units::Size;

/// Counter of the store, for metrics.
#[derive(Debug)]
pub struct StoreCounter {
    /// Name without the prefix.
    pub name: &'static str,
    /// Help text of the metric.
    pub help: &'static str,
    /// Set if it counts bytes.
    pub bytes: bool,
    /// Set for a counter, unset for a gauge.
    pub grows: bool,
    /// Current value.
    pub value: u64,
}

/// Returns whether the path is a block device or a named range, which have a fixed size.
pub fn is_device(path: &Path) -> bool {
    match std::fs::metadata(path) {
        Ok(meta) => meta.file_type().is_block_device(),
        Err(_) => is_range(&follow_links(path)),
    }
}

/// Returns whether a path without a file names a range of a file or block device.
fn is_range(path: &Path) -> bool {
    let is_divided = |meta: std::fs::Metadata| meta.is_file() || meta.file_type().is_block_device();
    split_range(path).is_some_and(|(device, _)| std::fs::metadata(device).is_ok_and(is_divided))
}

/// Returns the path to open for a store: a link to a named range leads to no file.
fn opened_path(path: &Path) -> PathBuf {
    let target = follow_links(path);
    if !path.exists() && is_range(&target) { target } else { path.to_owned() }
}

/// Returns whether there is a store at a path, or another file or device.
pub fn exists(path: &Path) -> bool {
    path.exists() || is_range(&follow_links(path))
}

/// Explains an error about a store to its user.
fn failure(error: forebay_block::Error, path: &Path) -> Failure {
    let kind = error.kind();
    let failure = Failure::from(error).context(format_args!("the store {}", path.display()));
    match kind {
        ErrorKind::Busy if is_device(path) => failure.hint(
            "unmount it, or take it out of what uses it; a daemon whose control socket is elsewhere is named with --control",
        ),
        ErrorKind::Busy => {
            Failure::new(FailureKind::Busy, format!("the store {} is in use by another process", path.display()))
                .hint("a daemon whose control socket is elsewhere? name that with --control or FOREBAY_CONTROL")
        }
        ErrorKind::NotFound => failure.hint("make one with 'forebay store init', or start 'forebay serve'"),
        ErrorKind::Corrupt => failure.hint(
            "'forebay store check' finds what is damaged, --repair renews a damaged copy of the superblock, and --rebuild \
             rebuilds superblocks and anchors from the log",
        ),
        ErrorKind::Unsupported => failure.hint("run the version of forebay that made it, or a newer one"),
        ErrorKind::Exists => failure.hint("name another place with --store; --force overwrites all that is there"),
        ErrorKind::Invalid => failure.hint("a store elsewhere is named with --store"),
        _ => failure,
    }
}

/// Returns whether the store does not exist yet: no file, or an empty one.
pub fn is_absent(path: &Path) -> Result<bool> {
    match std::fs::metadata(path) {
        Ok(meta) => Ok(meta.is_file() && meta.len() == 0),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(!is_range(&follow_links(path))),
        Err(error) => Err(Failure::io(error, format_args!("the store {}", path.display()))),
    }
}

/// Creates a store; with `size` 0 it is as large as the device.
pub async fn init(path: &Path, options: InitOptions, progress: ProgressSink) -> Result<()> {
    let made = Store::init_with_progress(path, options, |done, total| progress.report(done, total)).await;
    made.map_err(|error| match error.kind() {
        ErrorKind::Busy => Failure::from(error).hint("end that first; --force does not change it"),
        ErrorKind::Unsupported => Failure::from(error).hint("make it without --preallocate"),
        ErrorKind::Invalid if !is_device(path) => {
            Failure::from(error).hint("say how large with --size, for example --size 100G")
        }
        ErrorKind::Invalid => Failure::from(error),
        _ => failure(error, path),
    })
}

/// Opens a store for the engine: a file or device, or the devices that the list at `path` names.
pub async fn open(path: &Path, options: StoreOptions) -> Result<Rc<Store>> {
    let options = StoreOptions { pool: LOCAL_POOL.into(), ..options };
    if !DeviceList::is_list(path) {
        return Store::open(opened_path(path), options).await.map_err(|error| failure(error, path));
    }
    let list = DeviceList::load(path)?;
    let store = Store::open_devices(&list.devices, list.uuid(), options).await;
    let store = store.map_err(|error| match error.kind() {
        ErrorKind::Io | ErrorKind::NotFound | ErrorKind::Invalid => {
            let hint = format!("{} names the devices; correct paths there", path.display());
            Failure::from(error).context(format_args!("the store {}", path.display())).hint(hint)
        }
        _ => failure(error, path),
    })?;
    update_list(path, &store)?;
    Ok(store)
}

/// Sets the default compression of a store that no process has open.
pub async fn set_compression(path: &Path, compression: Compression) -> Result<()> {
    let store = open(path, StoreOptions { data_cache: 0, ..StoreOptions::default() }).await?;
    let set = store.set_data_policy(&ObjectName::new(""), Some(DataPolicy { compression })).await;
    store.close().await.map_err(|error| failure(error, path))?;
    set.map_err(|error| failure(error, path))
}

/// Returns the space of a store that no process has open.
pub async fn space(path: &Path) -> Result<StoreSpace> {
    let store = open(path, StoreOptions { data_cache: 0, ..StoreOptions::default() }).await?;
    let usage = store.usage().await.map_err(|error| failure(error, path));
    let stats = store.stats();
    store.close().await.map_err(|error| failure(error, path))?;
    Ok(describe(path, usage?, &stats))
}

/// Describes a store's space.
pub fn describe(path: &Path, usage: Usage, stats: &StoreStats) -> StoreSpace {
    StoreSpace {
        path: path.into(),
        capacity: usage.capacity,
        used: usage.used,
        available: usage.available,
        objects: usage.objects,
        compressed_logical: stats.compressed_logical,
        compressed_stored: stats.compressed_stored,
        limited_by: None,
        refuses_writes: None,
    }
}

/// Damage in a store.
#[derive(Debug, Serialize)]
pub struct Damage {
    /// Structure or object that is damaged.
    place: String,
    /// Problem found there.
    problem: String,
    /// Set once it was repaired.
    repaired: bool,
}

/// Report of a check.
#[derive(Debug, Serialize)]
pub struct Report {
    objects: u64,
    blocks: u64,
    blocks_read: u64,
    nodes: u64,
    replayed: u64,
    damage: Vec<Damage>,
    #[serde(skip_serializing_if = "Option::is_none")]
    rebuild: Option<Rebuild>,
    /// Set if nothing was written, as that would lose what `damage` names.
    waits_for_force: bool,
    /// Bytes freed because nothing referred to them any more.
    freed: u64,
}

/// Report of a rebuild.
#[derive(Debug, Serialize)]
pub struct Rebuild {
    /// First half of the store's identity, in hexadecimal digits.
    store: String,
    segment_size: u64,
    segments: u32,
    /// Number of readable log batches, followed by the lowest and the highest batch number.
    batches: u64,
    first_batch: u64,
    last_batch: u64,
    /// Batches that belong to earlier stores on the device.
    batches_of_others: u64,
    /// Checkpoints found in the log.
    checkpoints: usize,
    /// Number of the checkpoint from which the store resumes.
    checkpoint: u64,
    /// Time of that checkpoint: seconds since 1970; 0 if unknown.
    checkpoint_time_s: u64,
    replayed: u64,
    /// Last batch whose changes were recovered.
    recovered_to: u64,
    objects: u64,
    lost: Vec<String>,
    unproven: Vec<String>,
    written: bool,
}

impl From<RebuildReport> for Rebuild {
    fn from(found: RebuildReport) -> Self {
        Self {
            store: format!("{:016x}", found.store),
            segment_size: found.segment_size,
            segments: found.segments,
            batches: found.batches,
            first_batch: found.sequence.0,
            last_batch: found.sequence.1,
            batches_of_others: found.batches_of_others,
            checkpoints: found.records.len(),
            checkpoint: found.generation,
            checkpoint_time_s: found.taken_s,
            replayed: found.replayed,
            recovered_to: found.next_seq.saturating_sub(1),
            objects: found.objects,
            lost: found.lost,
            unproven: found.unproven,
            written: found.written,
        }
    }
}

impl Rebuild {
    fn show(&self) -> String {
        let mut text = fields(&[
            ("store", self.store.clone()),
            ("segments", format!("{} of {}", self.segments, Size(self.segment_size))),
            ("batches", format!("{} ({} to {})", self.batches, self.first_batch, self.last_batch)),
            ("batches of others", self.batches_of_others.to_string()),
            ("checkpoints found", self.checkpoints.to_string()),
            ("goes on from", format!("checkpoint {}, {} batches replayed", self.checkpoint, self.replayed)),
            ("recovered to", format!("batch {}", self.recovered_to)),
            ("objects", self.objects.to_string()),
            ("written", if self.written { "yes" } else { "no" }.to_owned()),
        ]);
        self.lost.iter().for_each(|what| text.push_str(&format!("  lost: {what}\n")));
        self.unproven.iter().for_each(|what| text.push_str(&format!("  cannot be proven: {what}\n")));
        text
    }
}

impl Report {
    /// Returns whether a rebuild has found losses and written nothing.
    pub fn waits_for_roll_back(&self) -> bool {
        self.rebuild.as_ref().is_some_and(|rebuild| !rebuild.written)
    }

    /// Returns whether losses were found and nothing was written because of them.
    pub fn waits_for_force(&self) -> bool {
        self.waits_for_force
    }

    /// Returns the number of damages that were not repaired.
    pub fn damage_count(&self) -> usize {
        self.damage.iter().filter(|damage| !damage.repaired).count()
    }

    /// Renders the report as text.
    pub fn show(&self) -> String {
        let rebuilt = self.rebuild.as_ref().map(|rebuild| format!("rebuilt from the log:\n{}\n", rebuild.show()));
        if self.waits_for_roll_back() {
            return rebuilt.unwrap_or_default();
        }
        let mut text = rebuilt.unwrap_or_default();
        if self.waits_for_force {
            text.push_str("would be lost:\n");
            self.damage.iter().for_each(|damage| text.push_str(&format!("  {}: {}\n", damage.place, damage.problem)));
            return text;
        }
        text += &fields(&[
            ("objects", self.objects.to_string()),
            ("blocks", format!("{} ({} read and compared)", self.blocks, self.blocks_read)),
            ("map nodes", self.nodes.to_string()),
            ("replayed batches", self.replayed.to_string()),
            ("freed", Size(self.freed).to_string()),
            ("damage", self.damage_count().to_string()),
        ]);
        for damage in &self.damage {
            let repaired = if damage.repaired { " (repaired)" } else { "" };
            text.push_str(&format!("  {}: {}{repaired}\n", damage.place, damage.problem));
        }
        text
    }
}

/// Verifies a store that no process has open: its structure and, with `data`, every stored block.
pub async fn check(path: &Path, options: CheckOptions, progress: ProgressSink) -> Result<Report> {
    let report = |done, total| progress.report(done, total);
    let found = if DeviceList::is_list(path) {
        let list = DeviceList::load(path)?;
        Store::check_devices(&list.devices, list.uuid(), options, report).await
    } else {
        Store::check(opened_path(path), options, report).await
    };
    let found = found.map_err(|error| failure(error, path))?;
    let damage = found.findings.into_iter().map(|finding| Damage {
        place: finding.place,
        problem: finding.problem,
        repaired: finding.repaired,
    });
    Ok(Report {
        objects: found.objects,
        blocks: found.blocks,
        blocks_read: found.blocks_read,
        nodes: found.nodes,
        replayed: found.replayed,
        damage: damage.collect(),
        rebuild: found.rebuild.map(Rebuild::from),
        waits_for_force: found.waits_for_force,
        freed: found.freed_bytes,
    })
}

/// Returns the counters of the store.
pub fn counters(store: &Store) -> Vec<StoreCounter> {
    let stats = store.stats();
    let gauge = |name, help, bytes, value| StoreCounter { name, help, bytes, grows: false, value };
    let counter = |name, help, bytes, value| StoreCounter { name, help, bytes, grows: true, value };
    vec![
        gauge("store_segments", "Segments of the store", false, stats.segments.into()),
        gauge("store_segments_free", "Free segments of the store", false, stats.segments_free.into()),
        gauge("store_cache_capacity", "Memory that the store's data cache may take", true, stats.cache.capacity),
        gauge("store_cache", "Data in the store's cache", true, stats.cache.bytes),
        counter("store_cache_hits", "Blocks that were in the cache when they were read", false, stats.cache.hits),
        counter("store_cache_misses", "Reads that had to go to the device", false, stats.cache.misses),
        gauge("store_metadata", "Memory that the store's metadata takes, about", true, stats.metadata_bytes),
        gauge("store_compressed_logical", "Live blocks that are stored compressed", true, stats.compressed_logical),
        gauge("store_compressed", "Space that these blocks take on the device", true, stats.compressed_stored),
        counter("store_user", "Written by users since the store was made", true, stats.user_bytes),
        counter("store_device", "Written to the device since the store was made", true, stats.device_bytes),
        counter("store_cleaned", "Moved by the cleaner since the start", true, stats.cleaned_bytes),
        counter("store_checkpoints", "Checkpoints since the start", false, stats.checkpoints),
        counter("store_page_loads", "Map pages read since the start", false, stats.page_loads),
        counter("store_checksum_errors", "Checksum errors found since the start", false, stats.checksum_errors),
    ]
    .into_iter()
    .chain(device_counters(store))
    .collect()
}

/// Returns the counters of the devices of a store on several.
fn device_counters(store: &Store) -> Vec<StoreCounter> {
    let Some((_, parity)) = store.columns() else { return Vec::new() };
    let gauge = |name, help, value| StoreCounter { name, help, bytes: false, grows: false, value };
    let counter = |name, help, value| StoreCounter { name, help, bytes: false, grows: true, value };
    let devices = store.devices();
    let members = || devices.iter().filter(|device| device.replaces.is_none());
    let in_state = |state| devices.iter().filter(|device| device.state == state).count() as u64;
    let counters = store.column_counters();
    let errors: u64 = devices.iter().map(|device| device.read_errors + device.write_errors).sum();
    let wrong: u64 = devices.iter().map(|device| device.wrong_blocks).sum();
    let scrub = store.scrub_status();
    vec![
        gauge("store_devices", "Devices of the store", members().count() as u64),
        gauge("store_devices_away", "Devices of the store that are away", in_state(ColumnState::Away)),
        gauge("store_devices_filling", "Devices of the store that are being filled", in_state(ColumnState::Filling)),
        gauge("store_devices_may_fail", "Devices that may fail without loss, if all are complete", parity as u64),
        counter("store_device_errors", "Failed requests to devices since the start", errors),
        counter("store_wrong_blocks", "Blocks with wrong content found on devices since the start", wrong),
        counter("store_degraded_reads", "Reads that were reconstructed since the start", counters.degraded_reads),
        counter("store_late_reads", "Reads that devices answered late since the start", counters.late_reads),
        counter("store_mended_blocks", "Wrong blocks that were mended since the start", counters.mended_blocks),
        gauge("store_scrub_mended", "Blocks that the last scrub mended", scrub.mended),
        gauge("store_scrub_lost", "Blocks in use that the last scrub found lost", scrub.lost),
    ]
}
