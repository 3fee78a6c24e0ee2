//! Stores on several devices.

use super::Mutant;
use crate::mutants::stage::Stage;

const UNIT: Stage = Stage::Lib("forebay-store");
const DEVICES: Stage = Stage::Test("forebay-store", "devices");
const MOVES: Stage = Stage::Test("forebay-store", "moves");
const SIM: Stage = Stage::Sim(&["--devices"], 2000);

const TABLE: &str = "backend/store/src/columns/table.rs";
const OPEN: &str = "backend/store/src/columns/open.rs";
const FILL: &str = "backend/store/src/columns/fill.rs";
const MOVE: &str = "backend/store/src/columns/moves.rs";
const ROW: &str = "backend/store/src/columns/row.rs";
const DEVICE: &str = "backend/store/src/columns/device.rs";
const RECOVER: &str = "backend/store/src/recover.rs";
const SCRUB: &str = "backend/store/src/scrub.rs";
const RANGE_TESTS: Stage = Stage::Test("forebay-store", "ranges");
const FILE_TESTS: Stage = Stage::Test("forebay-reactor", "ranges");
const RANGES: &str = "backend/store/src/ranges.rs";
const FS: &str = "base/reactor/src/fs.rs";

pub(super) const LIST: &[Mutant] = &[
    Mutant::new(
        "moves-not-flushed",
        "The table has the new place of a column before it is durable there",
        MOVE,
        "if copied && let Err(error) = target.sync().await {",
        "if copied && let Err(error) = Ok::<(), std::io::Error>(()) {",
        &[MOVES, SIM],
    ),
    Mutant::new(
        "moves-free-segments-not-held",
        "The log may enter a free segment while its columns get new places",
        MOVE,
        "|| !core.segments.borrow_mut().hold(segment) {",
        "|| core.segments.borrow().state(segment) != SegmentState::Free {",
        &[MOVES, SIM],
    ),
    Mutant::new(
        "moves-segments-not-pinned",
        "A segment may be used again while its columns are copied",
        MOVE,
        "pins.push(core.media.pin(first * BLOCK64));",
        "pins.push(core.media.pin(first.min(256) * BLOCK64));",
        &[MOVES, SIM],
    ),
    Mutant::new(
        "columns-acknowledged-unrecorded",
        "A batch counts without a device that failed, which is not recorded as away",
        TABLE,
        "self.write_table(table, &[]).await?;\n        device.set_reason(reason.to_owned());",
        "self.apply_table(table, &[]);\n        device.set_reason(reason.to_owned());",
        &[DEVICES, SIM],
    ),
    Mutant::new(
        "columns-one-too-many-away",
        "One device more than parity allows may be away",
        TABLE,
        "if others + 1 > parity {",
        "if others > parity {",
        &[DEVICES, SIM],
    ),
    Mutant::new(
        "columns-away-since-too-late",
        "A device that failed is not given the batches that were not durable when it did",
        TABLE,
        "let since = self.durable_seq.get() + 1;",
        "let since = self.durable_seq.get() + 40;",
        &[DEVICES, SIM],
    ),
    Mutant::new(
        "columns-missing-since-too-late",
        "A device that is missing at opening is not given what was replayed then",
        OPEN,
        "(None, RecordedState::Active) => RecordedState::Away { since: anchor.redo.seq },",
        "(None, RecordedState::Active) => RecordedState::Away { since: anchor.redo.seq + 8 },",
        &[DEVICES, SIM],
    ),
    Mutant::new(
        "columns-returned-trusted",
        "A device that was away is trusted when it is back",
        OPEN,
        "(Some(_), RecordedState::Away { since }) => RecordedState::Filling { since, below: 0 },",
        "(Some(_), RecordedState::Away { .. }) => RecordedState::Active,",
        &[DEVICES, SIM],
    ),
    Mutant::new(
        "columns-past-trusted",
        "A device whose content is from the past is trusted",
        OPEN,
        "candidate.past = true;",
        "candidate.past = false;",
        &[DEVICES, SIM],
    ),
    Mutant::new(
        "columns-uncertain-opened",
        "A store is opened although missing devices may have continued without the others",
        OPEN,
        "if unseen >= total - parity && !accept_missing {",
        "if unseen > total - parity && !accept_missing {",
        &[DEVICES],
    ),
    Mutant::new(
        "columns-table-not-spread",
        "A table that a crash left on some devices is not written to the others before the next one",
        OPEN,
        "set.spread_table(&newest).await;",
        "",
        &[DEVICES, SIM],
    ),
    Mutant::new(
        "columns-head-not-filled",
        "What the log's current segment had before a device was filled is left out",
        FILL,
        "SegmentState::Open if segment != head_segment => return Ok(()),",
        "SegmentState::Open if segment != head_segment || position.block > 0 => return Ok(()),",
        &[DEVICES, SIM],
    ),
    Mutant::new(
        "columns-filled-from-old-batches",
        "A device that was away is given only batches that came well after",
        FILL,
        "if header.seq >= since {",
        "if header.seq > since + 8 {",
        &[DEVICES, SIM],
    ),
    Mutant::new(
        "columns-filling-read",
        "A device is read where it is not filled yet",
        DEVICE,
        "RecordedState::Filling { below, .. } => segment < below && self.replaces.get().is_none(),",
        "RecordedState::Filling { .. } => self.replaces.get().is_none(),",
        &[DEVICES, SIM],
    ),
    Mutant::new(
        "columns-replacement-not-written",
        "Batches are not written to a device that replaces another one while it is filled",
        ROW,
        "let targets = [Some(device), replacing].into_iter().flatten()",
        "let targets = [Some(device), replacing.filter(|_| false)].into_iter().flatten()",
        &[DEVICES, SIM],
    ),
    Mutant::new(
        "columns-tail-not-settled",
        "Batches at the end of the log that a crash left on some devices only stay so",
        RECOVER,
        "settled += set.settle(block, &content.into()).await?;",
        "settled += content.len() as u64 & set.counters().mended_blocks & 1;",
        &[DEVICES, SIM],
    ),
    Mutant::new(
        "columns-parity-not-scrubbed",
        "A scrub does not compare parity",
        SCRUB,
        "let mended = set.settle(header.block, &Buf::copy_of(&batch.content).into()).await?;",
        "let mended = set.counters().mended_blocks & 0 & batch.content.len() as u64 & u64::from(Buf::copy_of(&[]).is_empty());",
        &[DEVICES, SIM],
    ),
    Mutant::new(
        "columns-not-rotated",
        "Columns are on distinct devices only in the first segment of a group",
        "backend/store/src/columns/geometry.rs",
        "self.slot_offset(place.slot + (segment - first))",
        "self.slot_offset(place.slot + (segment - first) / 2)",
        &[UNIT],
    ),
    Mutant::new(
        "columns-table-of-few",
        "Of two tables of one generation, one that only a returned device has may count",
        OPEN,
        "(table.generation, holders, away)",
        "(table.generation, holders & 0, away & 0)",
        &[UNIT, SIM],
    ),
    Mutant::new(
        "columns-added-segments-early",
        "Added segments are used before a checkpoint has them",
        "backend/store/src/segments.rs",
        "let later = self.added.split_off(&self.checkpoint_segments);",
        "let later = BTreeSet::<u32>::new();",
        &[UNIT],
    ),
    Mutant::new(
        "columns-growth-forgotten",
        "A store whose growth a crash interrupted between the copies of the superblock has the smaller number of segments",
        "backend/store/src/format/superblock.rs",
        "let segment_count = self.segment_count.max(other.segment_count);",
        "let segment_count = self.segment_count.min(other.segment_count);",
        &[UNIT],
    ),
    Mutant::new(
        "ranges-unbounded",
        "A write reaches what is behind its range",
        FS,
        "match offset.checked_add(len).is_some_and(|end| end <= self.bytes.len) {",
        "match offset.checked_add(len).is_some_and(|end| end < u64::MAX / 2) {",
        &[FILE_TESTS],
    ),
    Mutant::new(
        "ranges-unlocked-whole",
        "The whole device can be opened while ranges of it are",
        "base/reactor/src/driver/files.rs",
        "let whole = if range.is_none() { libc::LOCK_EX } else { libc::LOCK_SH };",
        "let whole = if range.is_none() { libc::LOCK_EX } else { libc::LOCK_UN };",
        &[FILE_TESTS],
    ),
    Mutant::new(
        "ranges-without-limit",
        "A store on a range has any number of requests in flight",
        "base/reactor/src/queue_limit.rs",
        "if self.in_flight.get() < self.max {",
        "if self.max > 0 {",
        &[RANGE_TESTS],
    ),
    Mutant::new(
        "ranges-one-copy",
        "A changed range table is written to one place only",
        RANGES,
        "let others = PLACES.into_iter().filter(|&place| place != newest);\n    for place in others.chain([newest]) {",
        "let others = PLACES.into_iter().filter(|&place| place != newest);\n    for place in [newest].into_iter().chain(others.take(0)) {",
        &[RANGE_TESTS],
    ),
    Mutant::new(
        "ranges-removed-in-use",
        "A range is removed while a daemon has it open",
        RANGES,
        "let options = OpenOptions::read_write().direct().lock();\n    let opened",
        "let options = OpenOptions::read_write().direct();\n    let opened",
        &[RANGE_TESTS],
    ),
];
