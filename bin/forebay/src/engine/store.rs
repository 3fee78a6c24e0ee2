//! The embedded store as the engine and `forebay store` use it.

use std::os::unix::fs::FileTypeExt;
use std::path::Path;
use std::rc::Rc;

use forebay_block::{ErrorKind, ObjectBackend, Usage};
use forebay_store::{CheckOptions, InitOptions, Store, StoreOptions};
use serde::Serialize;

use crate::api::StoreSpace;
use crate::failure::{Failure, FailureKind, Result};
use crate::ops::ProgressSink;
use crate::output::fields;
use crate::spec::LOCAL_POOL;

/// Counter of the store itself, for metrics.
#[derive(Debug)]
pub struct StoreCounter {
    /// Name without the prefix.
    pub name: &'static str,
    /// Help text of the metric.
    pub help: &'static str,
    /// Set if it counts bytes.
    pub bytes: bool,
    /// Set for a counter, not for a gauge.
    pub grows: bool,
    /// Value.
    pub value: u64,
}

/// Returns whether the path is a block device, which brings its own size.
pub fn is_device(path: &Path) -> bool {
    std::fs::metadata(path).is_ok_and(|meta| meta.file_type().is_block_device())
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
        ErrorKind::Corrupt => failure.hint("'forebay store check' finds what is damaged, and with --repair it mends what can be mended"),
        ErrorKind::Unsupported => failure.hint("run the version of forebay that made it, or a newer one"),
        ErrorKind::Exists => failure.hint("name another place with --store; --force overwrites all that is there"),
        ErrorKind::Invalid => failure.hint("a store elsewhere is named with --store"),
        _ => failure,
    }
}

/// Returns whether nothing is yet where the store shall be: no file, or an empty one.
pub fn is_absent(path: &Path) -> Result<bool> {
    match std::fs::metadata(path) {
        Ok(meta) => Ok(meta.is_file() && meta.len() == 0),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(true),
        Err(error) => Err(Failure::io(error, format_args!("the store {}", path.display()))),
    }
}

/// Makes a store; `size` 0: as large as the device is.
pub async fn init(path: &Path, options: InitOptions, progress: ProgressSink) -> Result<()> {
    let made = Store::init_with_progress(path, options, |done, total| progress.report(done, total)).await;
    made.map_err(|error| match error.kind() {
        ErrorKind::Busy => Failure::from(error).hint("end that first; --force does not change it"),
        ErrorKind::Unsupported => Failure::from(error).hint("make it without --preallocate"),
        ErrorKind::Invalid => Failure::from(error).hint("say how large with --size, for example --size 100G"),
        _ => failure(error, path),
    })
}

/// Opens a store for the engine, with so many bytes of memory for data.
pub async fn open(path: &Path, data_cache: usize) -> Result<Rc<Store>> {
    let options = StoreOptions { pool: LOCAL_POOL.into(), data_cache, ..StoreOptions::default() };
    Store::open(path, options).await.map_err(|error| failure(error, path))
}

/// Returns the space of a store that nobody has open.
pub async fn space(path: &Path) -> Result<StoreSpace> {
    let store = open(path, 0).await?;
    let usage = store.usage().await.map_err(|error| failure(error, path));
    store.close().await.map_err(|error| failure(error, path))?;
    Ok(describe(path, usage?))
}

/// Describes a store's space.
pub fn describe(path: &Path, usage: Usage) -> StoreSpace {
    StoreSpace {
        path: path.into(),
        capacity: usage.capacity,
        used: usage.used,
        available: usage.available,
        objects: usage.objects,
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
}

impl Report {
    /// Returns how much damage was not repaired.
    pub fn damage_count(&self) -> usize {
        self.damage.iter().filter(|damage| !damage.repaired).count()
    }

    /// Renders the report as text.
    pub fn show(&self) -> String {
        let mut text = fields(&[
            ("objects", self.objects.to_string()),
            ("blocks", format!("{} ({} read and compared)", self.blocks, self.blocks_read)),
            ("map nodes", self.nodes.to_string()),
            ("replayed batches", self.replayed.to_string()),
            ("damage", self.damage_count().to_string()),
        ]);
        for damage in &self.damage {
            let repaired = if damage.repaired { " (repaired)" } else { "" };
            text.push_str(&format!("  {}: {}{repaired}\n", damage.place, damage.problem));
        }
        text
    }
}

/// Verifies a store that nobody has open: its structure and, with `data`, every stored block.
pub async fn check(path: &Path, options: CheckOptions, progress: ProgressSink) -> Result<Report> {
    let found = Store::check(path, options, |done, total| progress.report(done, total)).await;
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
    })
}

/// Returns the store's own counters.
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
        counter("store_user", "Written by users since the store was made", true, stats.user_bytes),
        counter("store_device", "Written to the device since the store was made", true, stats.device_bytes),
        counter("store_cleaned", "Moved by the cleaner since the start", true, stats.cleaned_bytes),
        counter("store_checkpoints", "Checkpoints since the start", false, stats.checkpoints),
        counter("store_page_loads", "Map pages read since the start", false, stats.page_loads),
        counter("store_checksum_errors", "Checksum errors found since the start", false, stats.checksum_errors),
    ]
}
