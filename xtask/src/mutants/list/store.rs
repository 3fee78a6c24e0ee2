//! The embedded store.

use super::Mutant;
use crate::mutants::stage::Stage;

const UNIT: Stage = Stage::Lib("forebay-store");
const CONFORMANCE: Stage = Stage::Test("forebay-store", "conformance");
const DAMAGE: Stage = Stage::Test("forebay-store", "damage");
const INDEX: Stage = Stage::Test("forebay-store", "damaged_index");
const ANCHORS: Stage = Stage::Test("forebay-store", "anchors");
const UPKEEP: Stage = Stage::Test("forebay-store", "upkeep");
const SIM: Stage = Stage::Sim(&[], 1000);
const SWEEP: Stage = Stage::Sim(&["--everywhere"], 6);

const SEGMENTS: &str = "backend/store/src/segments.rs";
const RECOVER: &str = "backend/store/src/recover.rs";

pub(super) const LIST: &[Mutant] = &[
    Mutant::new(
        "store-freed-while-referred",
        "A segment is freed although the new checkpoint refers to it",
        SEGMENTS,
        "let unused = table.of(segment) == 0 && self.live.of(segment) == 0;",
        "let unused = self.live.of(segment) == 0;",
        &[UNIT, SIM],
    ),
    Mutant::new(
        "store-freed-while-replayed",
        "A segment is freed although a replay needs its part of the log",
        SEGMENTS,
        "&& !self.replay.contains(&segment)",
        "",
        &[UNIT, SIM, SWEEP],
    ),
    Mutant::new(
        "store-freed-while-read",
        "A segment is freed while it is being read",
        SEGMENTS,
        "if self.pins.contains_key(&segment) {",
        "if self.pins.contains_key(&u32::MAX) {",
        &[UNIT, SIM],
    ),
    Mutant::new(
        "store-acknowledged-in-memory",
        "A write is acknowledged before the kernel has it",
        "backend/store/src/transact.rs",
        "false => self.log().wait_written_to(seq).await?,",
        "false => {}",
        &[UPKEEP, SIM],
    ),
    Mutant::new(
        "store-version-ignored",
        "A transaction is done although the object has not the version that it asserts",
        "backend/store/src/plan.rs",
        "if plan.exists && now == version {",
        "if plan.exists {",
        &[CONFORMANCE, SIM],
    ),
    Mutant::new(
        "store-key-guard-ignored",
        "A transaction is done although a key has not the value that it asserts",
        "backend/store/src/plan.rs",
        "if self.kv_value(plan, &key).await? == value {",
        "if self.kv_value(plan, &key).await? == value || value.is_some() {",
        &[CONFORMANCE, SIM],
    ),
    Mutant::new(
        "store-data-unverified",
        "The checksums of data blocks are not verified when they are read",
        "backend/store/src/media.rs",
        "if crc32c(&buf[i * BLOCK..(i + 1) * BLOCK]) != *crc {",
        "if crc32c(&buf[i * BLOCK..(i + 1) * BLOCK]) != *crc && crcs.is_empty() {",
        &[DAMAGE, SIM],
    ),
    Mutant::new(
        "store-metadata-unverified",
        "The checksums of metadata are not verified when it is read",
        "backend/store/src/media.rs",
        "if crc32c(&buf[range.clone()]) == ptr.crc {",
        "if crc32c(&buf[range.clone()]) == ptr.crc || !buf.is_empty() {",
        &[INDEX, DAMAGE, SIM],
    ),
    Mutant::new(
        "store-anchor-first",
        "An anchor is written before what it refers to is durable",
        "backend/store/src/checkpoint.rs",
        "log.sync(log.last_seq()).await?;\n        self.write_anchor(anchor).await",
        "self.write_anchor(anchor).await",
        &[ANCHORS, SIM, SWEEP],
    ),
    Mutant::new(
        "store-anchor-one-slot",
        "Every anchor goes into the same slot",
        "backend/store/src/checkpoint.rs",
        "let places = SLOTS[(anchor.generation % 2) as usize];",
        "let places = SLOTS[0];",
        &[ANCHORS, SIM],
    ),
    Mutant::new(
        "store-flush-without-sync",
        "A flush is answered although nothing was synced to the device",
        "backend/store/src/log/writer.rs",
        "match self.device.sync().await {",
        "match Ok::<(), Error>(()) {",
        &[UPKEEP, SIM],
    ),
    Mutant::new(
        "store-torn-batch-replayed",
        "A batch whose payload is torn is replayed",
        RECOVER,
        "if !whole && !self.is_followed(",
        "if !whole && entries.len() > 1_000_000 && !self.is_followed(",
        &[DAMAGE, SIM],
    ),
    Mutant::new(
        "store-half-a-transaction",
        "A transaction of which only the first batch is there is replayed",
        RECOVER,
        "let settled = if header.continues {",
        "let settled = if header.continues && header.entries.is_empty() {",
        &[UPKEEP, SIM, SWEEP],
    ),
    Mutant::new(
        "store-gap-is-the-end",
        "A damaged header in the middle of the log is taken for its end",
        RECOVER,
        "(anchor_lost || header.durable_seq >= seq)",
        "(anchor_lost || header.durable_seq == u64::MAX)",
        &[ANCHORS, SIM],
    ),
    Mutant::new(
        "store-lost-anchor-damaged-batch",
        "A damaged batch ends the log although a newer checkpoint was lost",
        RECOVER,
        "break anchor_lost.then(|| {",
        "break (anchor_lost && entries.is_empty()).then(|| {",
        &[ANCHORS, SIM],
    ),
    Mutant::new(
        "store-lost-anchor-damaged-header",
        "A damaged header ends the log although a newer checkpoint was lost",
        RECOVER,
        "filter(|_| anchor_lost)",
        "filter(|_| anchor_lost && seq == 0)",
        &[ANCHORS, SIM],
    ),
    Mutant::new(
        "store-lost-anchor-unseen",
        "A store goes on from an older checkpoint when the newest anchor was lost",
        RECOVER,
        "if header.durable_seq >= later {",
        "if header.durable_seq == u64::MAX {",
        &[ANCHORS, SIM],
    ),
    Mutant::new(
        "store-snapshot-blocks-freed",
        "Blocks that a snapshot still refers to count as free",
        "backend/store/src/apply.rs",
        "if slot.block != 0 && !state.is_shared(of, block, slot) {",
        "if slot.block != 0 {",
        &[CONFORMANCE, SIM],
    ),
    Mutant::new(
        "store-cleaner-hides-damage",
        "The cleaner gives a damaged block a new checksum by moving it as if it were whole",
        "backend/store/src/clean.rs",
        "                None => run.crcs[at..at + count].to_vec(),",
        "                None => block_crcs(appended.stored),",
        &[DAMAGE, SIM],
    )
    .equivalent(
        "the cleaner has verified the data by the same checksums just before, in the same call; the stored ones only guard \
         against a bit that flips in memory in between",
    ),
    Mutant::new(
        "store-cleaner-moves-damage",
        "The cleaner does not look whether what it moves is damaged",
        "backend/store/src/clean.rs",
        "let damaged = found.iter().zip(&run.crcs).any(|(found, stored)| found != stored);",
        "let damaged = found.is_empty();",
        &[DAMAGE, UPKEEP, SIM],
    ),
];
