//! Replicated write logs: members, terms, copies, takeovers.

use super::Mutant;
use crate::mutants::stage::Stage;

const UNIT: Stage = Stage::Lib("forebay-writelog");
const TESTS: Stage = Stage::Test("forebay-writelog", "replication");
const COPY_TESTS: Stage = Stage::Test("forebay-writelog", "replica");
const PEER_TESTS: Stage = Stage::Test("forebay-writelog", "peers");
const SIM: Stage = Stage::Sim(&["--replication"], 400);

const PRIMARY: &str = "volume/writelog/src/replication/primary.rs";
const REPLICA: &str = "volume/writelog/src/replication/replica.rs";
const RECORD: &str = "volume/writelog/src/replication/record.rs";
const SHAPE: &str = "volume/writelog/src/replication/shape.rs";
const CONTROL: &str = "volume/writelog/src/replication/control.rs";
const SET: &str = "volume/writelog/src/replication/set.rs";
const MEMBER: &str = "volume/writelog/src/replication/member.rs";
const OPEN: &str = "volume/writelog/src/replication/open.rs";
const OPEN_COPY: &str = "volume/writelog/src/replication/open_copy.rs";
const HOST: &str = "volume/writelog/src/replication/host.rs";
const COPY: &str = "volume/writelog/src/media/ssd/copy.rs";
const SSD: &str = "volume/writelog/src/media/ssd.rs";
const RING: &str = "volume/writelog/src/media/ssd/ring.rs";
const ATTACHED: &str = "volume/writelog/src/attachment/members.rs";
const PEERS: &str = "volume/writelog/src/replication/peers.rs";
const MEMBERS: &str = "volume/writelog/src/media/members.rs";
const STORAGE: &str = "volume/writelog/src/media/storage.rs";
const SHELF: &str = "volume/writelog/src/shelf.rs";
const CREATE: &str = "volume/writelog/src/shelf/create.rs";
const SPACE: &str = "volume/writelog/src/shelf/space.rs";
const SUPERBLOCK: &str = "volume/writelog/src/format/superblock.rs";

pub(super) const LIST: &[Mutant] = &[
    Mutant::new(
        "repl-acknowledged-alone",
        "A write is acknowledged when the primary has it, whatever its replicas have",
        MEMBERS,
        "                set.published(end).await?;\n            }",
        "            }",
        &[TESTS, SIM],
    ),
    Mutant::new(
        "repl-proposed-uncounted",
        "A peer that is proposed as a complete member counts only once the record says so",
        PRIMARY,
        "self.record.complete().chain(self.proposed.iter().flat_map(MemberRecord::complete))",
        "self.record.complete()",
        &[UNIT, SIM],
    ),
    Mutant::new(
        "repl-served-at-once",
        "A primary serves before its replicas have all that it opened the log with",
        PRIMARY,
        "        self.published >= self.base.head()\n",
        "        true\n",
        &[UNIT, SIM],
    ),
    Mutant::new(
        "repl-complete-without-base",
        "A peer becomes complete without what the log held when it was opened",
        PRIMARY,
        "let needed = self.published.max(self.base.head());",
        "let needed = self.published;",
        &[UNIT, SIM],
    ),
    Mutant::new(
        "repl-complete-unretired",
        "A peer becomes complete although it would replay what the others have retired",
        PRIMARY,
        "copy.head < needed || copy.tail < retired",
        "copy.head < needed",
        &[UNIT, SIM],
    ),
    Mutant::new(
        "repl-other-copy-counted",
        "What another copy of the same peer held counts for the one that the record names",
        PRIMARY,
        "        if self.record.copy(peer) != Some(copy) {\n            return;\n        }\n",
        "",
        &[UNIT, SIM],
    ),
    Mutant::new(
        "repl-later-opening-ignored",
        "A primary goes on although the record names a later opening",
        PRIMARY,
        "        if record.term() != self.record.term() {\n            return false;\n        }\n",
        "",
        &[UNIT, SIM],
    ),
    Mutant::new(
        "repl-filling-takes-over",
        "A peer whose copy is being filled takes over",
        RECORD,
        "            MemberState::Filling => Err(ChangeRefused::Filling),\n",
        "            MemberState::Filling => Ok(()),\n",
        &[UNIT, SIM],
    ),
    Mutant::new(
        "repl-lost-copy-takes-over",
        "A peer whose medium was replaced takes over with another copy",
        RECORD,
        "            MemberState::Complete if member.copy != copy => Err(ChangeRefused::CopyLost),\n",
        "",
        &[UNIT, SIM],
    ),
    Mutant::new(
        "repl-divergence-kept",
        "A replica keeps entries that its new primary does not have",
        REPLICA,
        "        self.log.truncate(agreed);\n",
        "",
        &[UNIT, SIM],
    ),
    Mutant::new(
        "repl-former-primary-heard",
        "A replica takes entries of a primary that has been superseded",
        REPLICA,
        "        if term < self.term {\n            return Err(AppendRefused::Superseded(self.term));\n        }\n        if term > self.term {\n            return Err(AppendRefused::NotAdopted);\n        }\n        let head",
        "        if term > self.term {\n            return Err(AppendRefused::NotAdopted);\n        }\n        let head",
        &[UNIT],
    ),
    Mutant::new(
        "repl-adoption-waits-for-nothing",
        "A replica follows a new primary while entries of the former one are still being written",
        OPEN_COPY,
        "        self.appends.drain().await;\n        self.medium.check()?;\n",
        "        self.medium.check()?;\n",
        &[SIM],
    ),
    Mutant::new(
        "repl-appends-while-adopting",
        "A replica takes entries while it adopts a term",
        OPEN_COPY,
        "term if term > own || self.adopting.get() =>",
        "term if term > own =>",
        &[COPY_TESTS, SIM],
    ),
    Mutant::new(
        "repl-retired-before-written",
        "A replica retires entries that it has not written yet, and says less than was asked",
        OPEN_COPY,
        "        self.medium.written(tail).await;\n",
        "",
        &[COPY_TESTS, SIM],
    ),
    Mutant::new(
        "repl-retired-backwards",
        "A copy that is ahead of its primary's tail goes back to it, without the place of that tail",
        SSD,
        "        state.tail_seq = state.tail_seq.max(tail_seq);\n",
        "        state.tail_seq = tail_seq;\n",
        &[COPY_TESTS, SIM],
    ),
    Mutant::new(
        "repl-append-says-nothing-lasts",
        "A replica answers before the entries are durable",
        MEMBER,
        "ReplicaAction::Append { durable: true }",
        "ReplicaAction::Append { durable: false }",
        &[TESTS, SIM],
    ),
    Mutant::new(
        "repl-superseded-creates",
        "A primary that was superseded has a copy of its log discarded and created anew",
        HOST,
        "        self.require_newest(log, term, epoch).await?;\n        self.release(log).await;\n        self.discard_older",
        "        self.release(log).await;\n        self.discard_older",
        &[TESTS],
    ),
    Mutant::new(
        "repl-term-in-one-superblock",
        "A new term is written to one copy of the superblock",
        COPY,
        "            self.persist_tail(false).await?;\n            self.persist_tail(false).await\n",
        "            self.persist_tail(false).await\n",
        &[TESTS],
    ),
    Mutant::new(
        "repl-left-over-kept",
        "What a former primary has left over is not cleared where the next block comes",
        COPY,
        "                self.clear_next().await?;\n",
        "",
        &[COPY_TESTS, SIM],
    ),
    Mutant::new(
        "repl-cut-ignored",
        "Blocks of a former term are valid where the new term has begun",
        SUPERBLOCK,
        "Some(copy) => (run == self.run) == (number >= copy.cut) && run <= self.run,",
        "Some(_) => run <= self.run,",
        &[UNIT, SIM],
    ),
    Mutant::new(
        "repl-left-over-believed",
        "What a block that was left over says about those before it counts",
        SUPERBLOCK,
        "!(copy.kept..copy.cut).contains(&number) && self.accepts(run, 0, number)",
        "run <= self.run",
        &[UNIT, SIM],
    ),
    Mutant::new(
        "repl-durable-elsewhere",
        "A replica writes a block although those that it says are durable are not so here",
        COPY,
        "                    || state.durable_block >= before\n",
        "                    || true\n",
        &[COPY_TESTS, SIM],
    ),
    Mutant::new(
        "repl-durable-out-of-order",
        "A block counts as durable when a later one is",
        RING,
        "let durable = |block: &&StartedBlock| block.done && (block.durable || block.number < number);",
        "let durable = |block: &&StartedBlock| block.done && block.number < number;",
        &[TESTS, SIM],
    ),
    Mutant::new(
        "repl-ring-not-held",
        "The primary overwrites the ring where a replica's recovery reads",
        SET,
        "        self.local.hold(self.lowest(|progress| progress.held));\n",
        "",
        &[TESTS, SIM],
    )
    .equivalent("a replica refuses a block that would overwrite what it needs, and gets it again later"),
    Mutant::new(
        "repl-tail-of-primary",
        "The tail counts as durable when the primary has it",
        MEMBERS,
        "                local => set.retired(tail).await.and(local),\n",
        "                local => local,\n",
        &[SIM],
    ),
    Mutant::new(
        "repl-dropped-before-record",
        "A change of the record counts as made although it is not known to be stored",
        CONTROL,
        "            Err(error) => {\n                tracing::warn!(%error, \"cannot store the members of a write log, trying again\");\n",
        "            Err(error) => {\n                set.learn(&next);\n                tracing::warn!(%error, \"cannot store the members of a write log, trying again\");\n",
        &[TESTS, SIM],
    ),
    Mutant::new(
        "repl-conflict-ignored",
        "A primary goes on although another one has changed the record",
        SET,
        "        } else {\n            self.stop(superseded(record.term()));\n        }\n        goes_on",
        "        }\n        true",
        &[TESTS, SIM],
    ),
    Mutant::new(
        "repl-not-fenced",
        "A takeover does not fence the former primary",
        OPEN,
        "        if !is_own && !record.client().is_empty() {\n",
        "        if false {\n",
        &[TESTS, SIM],
    ),
    Mutant::new(
        "repl-own-client-not-fenced",
        "A restarted primary does not fence its former process",
        OPEN,
        "        if !is_own && !record.client().is_empty() {\n",
        "        if record.primary() != own {\n",
        &[TESTS, SIM],
    ),
    Mutant::new(
        "repl-idle-replica-kept",
        "A replica that is gone is not dropped while only its retirement is waited for",
        MEMBER,
        "        let done = self.adopted.get() && head >= set.head.get() && retired;\n",
        "        let done = self.adopted.get() && head >= set.head.get();\n",
        &[SIM],
    ),
    Mutant::new(
        "repl-agreement-too-long",
        "Copies are said to agree where their terms differ",
        SHAPE,
        "            if mine.term != theirs.term {\n                break;\n            }\n",
        "",
        &[UNIT, SIM],
    ),
    Mutant::new(
        "repl-retired-entry-skipped",
        "A primary takes the oldest entry that is not retired for the one that a replica lacks",
        COPY,
        "            if first_seq > seq {",
        "            if first_seq > seq && next < seq {",
        &[TESTS, SIM],
    ),
    Mutant::new(
        "repl-unwanted-removed-first",
        "A replica that is to be replaced is removed before its successor is filled",
        CONTROL,
        "unwanted(peer) && (filled || is_filling(peer))",
        "unwanted(peer) || filled && is_filling(peer)",
        &[TESTS],
    ),
    Mutant::new(
        "repl-copies-left-over",
        "A log that has ended leaves its copies at the replicas",
        SET,
        "for peer in peers {",
        "for peer in peers.into_iter().take(0) {",
        &[TESTS],
    ),
    Mutant::new(
        "repl-not-resumed",
        "A peer that could not take a log over accepts nothing from its primary any more",
        HOST,
        "self.given_up.borrow_mut().remove(log);",
        "self.given_up.borrow().contains(log);",
        &[TESTS],
    ),
    Mutant::new(
        "repl-closed-keeps-client",
        "A log that was closed leaves a client to be fenced in its record",
        ATTACHED,
        "now.closed(NOBODY.into())",
        "now.closed(now.client().clone())",
        &[TESTS],
    ),
    Mutant::new(
        "repl-place-not-moved",
        "A log that was taken over keeps the location of its former primary",
        ATTACHED,
        "match from.primary() == to.primary() {",
        "match from.epoch() <= to.epoch() {",
        &[TESTS],
    ),
    Mutant::new(
        "repl-copied-identity-trusted",
        "A daemon whose data directory is a copy of another one's counts as a peer",
        PEERS,
        "two[0] != two[1]",
        "two[0] != two[1] && peer == self.own",
        &[PEER_TESTS],
    ),
    Mutant::new(
        "repl-own-identity-trusted",
        "A daemon takes a copy of its own data directory for a peer",
        PEERS,
        "(peer == self.own).then_some(self.boot)",
        "(peer == self.own && false).then_some(self.boot)",
        &[PEER_TESTS],
    ),
    Mutant::new(
        "repl-late-create-obeyed",
        "A request to create a copy that arrives late destroys a newer copy",
        HOST,
        "        if copy.epoch() > epoch {",
        "        if copy.epoch() > epoch && false {",
        &[TESTS],
    ),
    Mutant::new(
        "repl-fenced-goes-on",
        "A primary whose client is fenced tries to change the record without end",
        CONTROL,
        "Err(error) if error.kind() == ErrorKind::Fenced => {\n                // A takeover",
        "Err(error) if error.kind() == ErrorKind::Invalid => {\n                // A takeover",
        &[TESTS],
    ),
    Mutant::new(
        "repl-takeover-of-successor",
        "A takeover fences another primary than the one that it was decided about",
        "volume/writelog/src/attachment.rs",
        "members.term() != term) {",
        "members.term() < term) {",
        &[TESTS],
    ),
    Mutant::new(
        "repl-pmem-unfenced",
        "A copy in persistent memory acknowledges a block, or a term, that no fence covers",
        STORAGE,
        "                store(&**memory, &bytes.into(), at);\n                memory.fence();\n",
        "                store(&**memory, &bytes.into(), at);\n",
        &[TESTS, SIM],
    ),
    Mutant::new(
        "repl-pmem-left-in-caches",
        "What a killed process has stored counts as durable although it is in the processor's caches only",
        SHELF,
        "        storage.store_again(superblocks.into_iter().chain(found.unproven.iter().copied()));\n",
        "        storage.store_again(superblocks);\n",
        &[TESTS, SIM],
    ),
    Mutant::new(
        "repl-pmem-former-copy-found",
        "A new copy in persistent memory finds the blocks of a former one of the same log",
        SPACE,
        "        memory.store(at, &zeroes[..len as usize]);\n",
        "        memory.store(at, &zeroes[..1]);\n",
        &[TESTS, SIM],
    ),
    Mutant::new(
        "repl-unit-below-sectors",
        "A device with sectors takes a copy of a log whose units are smaller",
        CREATE,
        "if unit < self.unit() || !is_unit(unit) {",
        "if !is_unit(unit) {",
        &[TESTS],
    ),
    Mutant::new(
        "repl-pmem-ring-of-entries-copied",
        "A log in persistent memory that has a ring of entries is opened as one of append blocks",
        SHELF,
        "        if self.kind == MediumKind::Pmem && superblock.copy.is_none() {\n",
        "        if self.kind == MediumKind::Ssd && superblock.copy.is_none() && superblock.slots > 0 {\n",
        &[TESTS],
    ),
    Mutant::new(
        "repl-pmem-too-large",
        "A log of append blocks may be longer than its entries can say where their payloads are",
        SUPERBLOCK,
        "MediumKind::Pmem => is_unit(unit) && slots == 0 && size <= blocks_size_max(unit),",
        "MediumKind::Pmem => is_unit(unit) && slots == 0,",
        &[UNIT],
    ),
    Mutant::new(
        "repl-block-torn-in-memory",
        "A replica in persistent memory takes a block from its primary without a fence, when that is all it needs",
        COPY,
        "                    true => storage.write_durable_at(bytes, offset).await,",
        "                    true => storage.write_at(bytes, offset).await,",
        &[TESTS, SIM],
    ),
];
