//! The write log.

use super::Mutant;
use crate::mutants::stage::Stage;

const UNIT: Stage = Stage::Lib("forebay-writelog");
const ALLOCATE: Stage = Stage::Test("forebay-writelog", "allocate");
const ATTACHMENT: Stage = Stage::Test("forebay-writelog", "attachment");
const DAMAGE: Stage = Stage::Test("forebay-writelog", "damage");
const FAILURES: Stage = Stage::Test("forebay-writelog", "failures");
const ORDER: Stage = Stage::Test("forebay-writelog", "order");
const LOG: Stage = Stage::Test("forebay-writelog", "log");
const HOSTILE: Stage = Stage::Test("forebay-writelog", "hostile");
const HOSTILE_SSD: Stage = Stage::Test("forebay-writelog", "hostile_ssd");
const SIM: Stage = Stage::Sim(&["--writelog"], 1000);

const SSD: &str = "volume/writelog/src/media/ssd.rs";
const RING: &str = "volume/writelog/src/media/ssd/ring.rs";
const SCAN: &str = "volume/writelog/src/media/ssd/scan.rs";
const PMEM: &str = "volume/writelog/src/media/pmem.rs";
const BYPASS: &str = "volume/writelog/src/bypass.rs";
const LOG_RS: &str = "volume/writelog/src/log.rs";
const CONSISTENCY: &str = "volume/writelog/src/consistency.rs";
const QUEUE: &str = "volume/writelog/src/queue.rs";
const READ: &str = "volume/writelog/src/read.rs";
const BACK: &str = "volume/writelog/src/writeback.rs";
const THROTTLE: &str = "volume/writelog/src/throttle.rs";
const FLUSH: &str = "volume/writelog/src/flush.rs";

pub(super) const LIST: &[Mutant] = &[
    Mutant::new(
        "log-space-freed-early",
        "Space of the ring is freed before the tail that gives it up is durable",
        RING,
        "let needed = self.persisted_pos.min(self.held_pos);",
        "let needed = self.tail_pos.min(self.held_pos);",
        &[ORDER, SIM],
    ),
    Mutant::new(
        "log-payload-unverified",
        "The checksum of a payload is not verified when it is read",
        SSD,
        "if crc32c(data) == entry.crc {",
        "if crc32c(data) == entry.crc || !data.is_empty() {",
        &[DAMAGE, HOSTILE_SSD, SIM],
    ),
    Mutant::new(
        "log-direct-over-tail",
        "A write bypasses the log while a recovery would still replay older entries over it",
        BYPASS,
        "shared.medium.persisted_tail() < state.dirty.tail()",
        "shared.medium.persisted_tail() == u64::MAX",
        &[ORDER, DAMAGE, SIM],
    ),
    Mutant::new(
        "log-tail-of-one-superblock",
        "The tail counts as durable when one copy of the superblock has it, and the other leads back to older entries",
        SSD,
        "one.min(other)",
        "one.max(other)",
        &[DAMAGE, SIM],
    ),
    Mutant::new(
        "log-closed-in-one-superblock",
        "A log that is closed with nothing in it leaves a copy of the superblock that leads back to older entries",
        LOG_RS,
        "let noted = writeback::persist_tail(shared, clean).await;",
        "let noted = Ok(clean).map(drop);",
        &[DAMAGE],
    ),
    Mutant::new(
        "log-cut-misses-direct",
        "A consistency point does not wait for writes in flight that bypass the log",
        CONSISTENCY,
        "shared.settled.wait_until(|| shared.state.borrow().bypassed.is_idle()).await;",
        "",
        &[ORDER, SIM],
    ),
    Mutant::new(
        "log-retire-over-tail",
        "A batch is retired while the tail of the batch before it is not durable",
        BACK,
        "if let Some(before) = persisting.take()",
        "if let Some(before) = persisting.take().filter(|_| false)",
        &[ORDER, SIM],
    ),
    Mutant::new(
        "log-off-without-flush",
        "A log turns off without flushing what it wrote back",
        BACK,
        "let released = match shared.inner.submit(BlockRequest::Flush).await {",
        "let released = match Ok::<(), Error>(()) {",
        &[FAILURES, SIM],
    ),
    Mutant::new(
        "log-readers-overwritten",
        "A payload on an SSD is overwritten while it is being read",
        SSD,
        "*self.state.borrow_mut().reads.entry(pos).or_insert(0) += 1;",
        "self.state.borrow_mut().reads.remove(&pos);",
        &[ORDER, SIM],
    ),
    Mutant::new(
        "log-pmem-readers-overwritten",
        "A buffer of persistent memory is used again while it is being read",
        PMEM,
        "Some((_, given)) => *given = lines,",
        "Some(_) => self.space.give(start, lines),",
        &[UNIT, SIM],
    ),
    Mutant::new(
        "log-shrink-misses-writes",
        "Shrinking does not wait for writes in flight past the new end",
        CONSISTENCY,
        "let over = || shared.ranges.is_free_from(size);",
        "let over = || size < u64::MAX;",
        &[ORDER, SIM],
    ),
    Mutant::new(
        "log-append-not-durable",
        "A write is acknowledged when its block is written and not durable",
        SSD,
        "true => storage.write_durable_at(bufs, offset).await,",
        "true => storage.write_at(bufs, offset).await,",
        &[ORDER, SIM],
    ),
    Mutant::new(
        "log-superblock-not-durable",
        "The tail counts as durable although its superblock is only written",
        SSD,
        "let written = storage.write_durable_at(Buf::copy_of(&bytes), offset).await;",
        "let written = storage.write_at(Buf::copy_of(&bytes), offset).await;",
        &[ORDER, SIM],
    ),
    Mutant::new(
        "log-superblocks-race",
        "Two writes of the superblock are under way at once",
        SSD,
        "let _turn = turn.acquire(1).await;",
        "let _turn = turn;",
        &[UNIT, ORDER, SIM],
    ),
    Mutant::new(
        "log-superblock-one-copy",
        "The superblock is always written to the same copy",
        SSD,
        "copy.replace(1 - copy.get())",
        "copy.get()",
        &[ORDER, SIM],
    ),
    Mutant::new(
        "log-barrier-ignored",
        "A flush begins no new generation, so that write-back may reorder over it",
        QUEUE,
        "self.generation += 1;",
        "self.generation += 0;",
        &[LOG, SIM],
    ),
    Mutant::new(
        "log-read-half-old",
        "A read that a write has overtaken at the backend is not made again",
        READ,
        "read.stale |= read.extent.overlaps(extent);",
        "read.stale |= read.extent.overlaps(extent) && read.extent.len == 0;",
        &[LOG, SIM],
    ),
    Mutant::new(
        "log-flush-misses-direct",
        "A flush does not make writes durable that bypassed the log",
        FLUSH,
        "&& state.bypassed.is_durable();",
        ";",
        &[LOG, SIM],
    ),
    Mutant::new(
        "log-damage-is-the-end",
        "A damaged block in the middle is taken for the log's end",
        SCAN,
        "if found.next_block < found.durable {",
        "if found.next_block < found.durable && found.durable == u64::MAX {",
        &[DAMAGE, HOSTILE_SSD, SIM],
    ),
    Mutant::new(
        "log-torn-block-replayed",
        "A block whose payload is torn is replayed",
        SCAN,
        "if !whole {",
        "if !whole && at == usize::MAX {",
        &[DAMAGE, HOSTILE_SSD, SIM],
    ),
    Mutant::new(
        "log-pmem-damage-unseen",
        "The payloads in persistent memory are not verified when a log is opened",
        PMEM,
        "if forebay_accel::crc32c::crc32c(payload) != entry.crc {",
        "if forebay_accel::crc32c::crc32c(payload) != entry.crc && payload.is_empty() {",
        &[HOSTILE, SIM],
    ),
    Mutant::new(
        "log-pmem-head-first",
        "The head in persistent memory may become durable before the entries",
        PMEM,
        "        self.memory.fence();\n        state.head = first_seq",
        "        state.head = first_seq",
        &[LOG, SIM],
    ),
    Mutant::new(
        "log-retire-without-flush",
        "Entries are retired before the backend has flushed them",
        BACK,
        "    shared.inner.submit(BlockRequest::Flush).await.map_err(Failure::Backend)?;\n    Ok(acknowledged)",
        "    Ok(acknowledged)",
        &[FAILURES, SIM],
    ),
    Mutant::new(
        "log-early-flush-lost",
        "With write-back acknowledgement, a flush does not sync the medium",
        FLUSH,
        "shared.medium.sync().await?;",
        "",
        &[LOG, SIM],
    ),
    Mutant::new(
        "log-hidden-across-barriers",
        "An entry that a later generation has overwritten is not recovered",
        "volume/writelog/src/superseded.rs",
        "!= Some(entry.generation) {\n            covered.clear();",
        "!= Some(entry.generation) {\n            let _ = &covered;",
        &[UNIT, LOG, SIM],
    ),
    Mutant::new(
        "log-oldest-wins",
        "Of several entries of a run, write-back takes the oldest bytes",
        "volume/writelog/src/plan.rs",
        "for (seq, entry) in entries.rev() {",
        "for (seq, entry) in entries {",
        &[UNIT],
    ),
    Mutant::new(
        "log-torn-block-preferred",
        "Of two blocks that may come next, recovery takes the torn one of the older run",
        SCAN,
        "header.run > other.run",
        "header.run < other.run",
        &[DAMAGE, HOSTILE_SSD, Stage::Sim(&["--writelog", "--everywhere"], 40)],
    ),
    Mutant::new(
        "log-past-not-flushed",
        "A flush does not cover writes that were in flight past a log when it was attached",
        BYPASS,
        "self.past_active == 0 && self.acknowledged == self.flushed",
        "self.acknowledged == self.flushed",
        &[ORDER, SIM],
    ),
    Mutant::new(
        "log-own-bytes-hold-back",
        "A write that is acknowledged early takes its run before the fill is looked at",
        THROTTLE,
        "shared.is_write_back_ack() && fill(shared) >= 1.0",
        "shared.is_write_back_ack() && false && fill(shared) >= 1.0",
        &[FAILURES, SIM],
    ),
    Mutant::new(
        "log-removes-file-of-others",
        "A file that another process has made meanwhile counts as made for a log, and is removed when that fails",
        "volume/writelog/src/shelf/space.rs",
        "match File::open(path, how.create_new()) {",
        "match File::open(path, how.create()) {",
        &[ALLOCATE],
    ),
    Mutant::new(
        "log-closed-unheard",
        "Who waits for a log to be written back does not hear that it is closed",
        CONSISTENCY,
        "state.dirty.tail() >= seq || state.life.is_closing() ||",
        "state.dirty.tail() >= seq ||",
        &[FAILURES],
    ),
    Mutant::new(
        "log-attach-writes-over",
        "A log that is attached writes back before the writes in flight past it have ended",
        "volume/writelog/src/attachment.rs",
        "keeper.drain_changes().await;",
        "",
        &[ATTACHMENT, Stage::Sim(&["--attachment"], 4000)],
    ),
    Mutant::new(
        "log-record-not-read-with-lock",
        "A log is served when the lock comes, although the record may not name it any more",
        "volume/writelog/src/attachment.rs",
        "Self::verify(&keeper, id, epoch).await?;\n            lock.replace",
        "lock.replace",
        &[ATTACHMENT, Stage::Sim(&["--attachment"], 4000)],
    ),
    Mutant::new(
        "log-of-others-passed-by",
        "A volume without a log is served when the lock is taken anew, although another host has given it one",
        "volume/writelog/src/attachment.rs",
        "let Some(recorded) = record.log else { return Ok(()) };\n        if !matches",
        "let Some(recorded) = record.log.filter(|_| false) else { return Ok(()) };\n        if !matches",
        &[ATTACHMENT, Stage::Sim(&["--attachment"], 4000)],
    ),
    Mutant::new(
        "log-record-outlives-release",
        "A change of the limits writes the record of a log back that has turned itself off",
        "volume/writelog/src/attachment.rs",
        "let Some(named) = named.filter(|named| named.id == recorded.id) else {",
        "let Some(named) = named.or(Some(recorded.clone())) else {",
        &[ATTACHMENT, Stage::Sim(&["--attachment"], 4000)],
    )
    .equivalent(
        "a log in use has not been released, and no wait lies between the look at that and the turn of the record",
    ),
    Mutant::new(
        "log-off-under-a-cut",
        "A log that is disabled while a cut is held lets later writes go to the backend",
        "volume/writelog/src/writeback.rs",
        "tail >= self.there(shared) && !at_point;",
        "tail >= self.there(shared);",
        &[LOG],
    ),
];
