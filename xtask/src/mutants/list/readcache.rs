//! The read cache.

use super::Mutant;
use crate::mutants::stage::Stage;

const UNIT: Stage = Stage::Lib("forebay-readcache");
const DISK: Stage = Stage::Test("forebay-readcache", "disk");
const SHARING: Stage = Stage::Test("forebay-readcache", "sharing");

const CACHE: &str = "volume/readcache/src/cache.rs";
const ON_DISK: &str = "volume/readcache/src/disk.rs";
const FORMAT: &str = "volume/readcache/src/format.rs";
const QUEUES: &str = "volume/readcache/src/s3fifo.rs";
const TABLE: &str = "volume/readcache/src/table.rs";

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
];
