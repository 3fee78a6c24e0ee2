//! The read cache.

use super::Mutant;
use crate::mutants::stage::Stage;

const UNIT: Stage = Stage::Lib("forebay-readcache");
const DISK: Stage = Stage::Test("forebay-readcache", "disk");
const SHARING: Stage = Stage::Test("forebay-readcache", "sharing");
const OWN: Stage = Stage::Test("forebay-readcache", "own_blocks");
const OWN_IMAGES: Stage = Stage::Test("forebay-rbd-lab", "own_blocks");
const SIM_SHARED: Stage = Stage::Sim(&["--shared"], 400);

const CACHE: &str = "volume/readcache/src/cache.rs";
const ON_DISK: &str = "volume/readcache/src/disk.rs";
const FORMAT: &str = "volume/readcache/src/format.rs";
const QUEUES: &str = "volume/readcache/src/s3fifo.rs";
const TABLE: &str = "volume/readcache/src/table.rs";
const OWN_GENERATION: &str = "volume/readcache/src/own_blocks.rs";
const OWN_CACHE: &str = "volume/image/src/own_blocks.rs";

pub(super) const LIST: &[Mutant] = &[
    Mutant::new(
        "readcache-key-unbound",
        "The checksum of a part does not cover its key, so a part in a wrong slot is taken for another",
        FORMAT,
        "Some(extend(crc32c(&encode_key(identity, object, part)?), data))",
        "encode_key(identity, object, part).map(|_| extend(crc32c(b\"\"), data))",
        &[UNIT],
    ),
    Mutant::new(
        "readcache-unverified",
        "A part from disk is returned without a look at its checksum",
        ON_DISK,
        "Ok(data) if part_crc(identity, key.object, key.part, &data) == Some(crc) => {",
        "Ok(data) if part_crc(identity, key.object, key.part, &data).is_some() => {",
        &[DISK],
    ),
    Mutant::new(
        "readcache-slot-overwritten",
        "A slot is free for another part while it is being read",
        TABLE,
        "Some(pin) => pin.released = true,",
        "Some(_) => self.free_data.push(row),",
        &[UNIT],
    ),
    Mutant::new(
        "readcache-clear-keeps-file",
        "Clearing leaves the table on disk valid for the next start",
        ON_DISK,
        "        flags.clear();\n        self.format().await",
        "        flags.clear();\n        Ok(())",
        &[DISK],
    ),
    Mutant::new(
        "readcache-fetched-twice",
        "A request for a part that is being read starts another read of the pool",
        CACHE,
        "if let Some(flight) = self.flights.borrow().get(key) {",
        "if let Some(flight) = self.flights.borrow().get(key).filter(|_| key.part == u32::MAX) {",
        &[SHARING],
    ),
    Mutant::new(
        "readcache-absence-outlives-parent",
        "An object that inherits its parent's data is remembered as absent for good",
        CACHE,
        "if !read.inherits {",
        "if !read.inherits || read.object_size > 0 {",
        &[SHARING],
    ),
    Mutant::new(
        "readcache-scan-is-hot",
        "Each of the small reads of a scan counts as a reference of its part",
        QUEUES,
        "if now_ms.wrapping_sub(node.referenced_ms) >= CORRELATED_MS {",
        "if now_ms >= node.referenced_ms {",
        &[UNIT],
    ),
    Mutant::new(
        "own-block-not-invalidated",
        "A change of an own block leaves the former one in memory",
        CACHE,
        "let in_memory = self.memory.borrow_mut().remove(&key).is_some();",
        "let in_memory = self.memory.borrow_mut().peek(&key).is_some();",
        &[OWN],
    ),
    Mutant::new(
        "own-block-filled-late",
        "A read of the pool that began before a change fills the cache after it",
        CACHE,
        "if self.is_current(&key, &flight) {\n                        self.add(&key, &part);",
        "if !self.flights.borrow().contains_key(&key) || self.is_current(&key, &flight) {\n                        self.add(&key, &part);",
        &[OWN],
    ),
    Mutant::new(
        "own-block-joined-late",
        "A read after a change joins one that began before it",
        CACHE,
        "            self.flights.borrow_mut().remove(&key);\n            let on_disk",
        "            let on_disk",
        &[OWN],
    ),
    Mutant::new(
        "own-block-filled-meanwhile",
        "A read fills the cache while a change of the part is in flight",
        OWN_GENERATION,
        "if extent.len > 0 && extent.end() <= object_size && self.is_changing(object, &parts_of(extent)) {",
        "if extent.len > object_size && self.is_changing(object, &parts_of(extent)) {",
        &[OWN],
    ),
    Mutant::new(
        "own-block-written-late",
        "A part that was invalidated while it was written to disk is found there",
        ON_DISK,
        "is_same && pending.remove(key).is_some()",
        "pending.remove(key).is_some() || !is_same || key.source.is_own()",
        &[OWN],
    ),
    Mutant::new(
        "own-block-change-unannounced",
        "Changes of an image are not announced to the generation of its own blocks",
        OWN_CACHE,
        "extents.iter().for_each(|extent| generation.begin_change(object, *extent));",
        "",
        &[OWN_IMAGES, SIM_SHARED],
    ),
    Mutant::new(
        "own-block-lease-ignored",
        "Own blocks are read from the cache although the watch was not confirmed for long",
        "volume/image/src/watcher.rs",
        "&& watch.confirmed().elapsed() < age",
        "&& (watch.confirmed().elapsed() < age || age.is_zero() || watch.cookie() == cookie)",
        &[OWN_IMAGES],
    ),
    Mutant::new(
        "own-block-fenced-at-once",
        "Who fences an owner does not wait until that reads nothing from its cache any more",
        OWN_CACHE,
        "        sleep(FENCED_READS).await;",
        "        sleep(FENCED_READS.saturating_sub(FENCED_READS)).await;",
        &[OWN_IMAGES],
    ),
    Mutant::new(
        "own-block-outcome-forgotten",
        "A change of unknown outcome leaves own blocks in the cache",
        OWN_CACHE,
        "            self.uncertain.set(true);",
        "            self.uncertain.set(self.uncertain.get());",
        &[OWN_IMAGES],
    ),
];
