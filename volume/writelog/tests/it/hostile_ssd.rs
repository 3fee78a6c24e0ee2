//! Malicious append blocks with valid checksums: a log ends before the first invalid one, and is refused if that one
//! is known to have been durable.

use std::path::Path;
use std::rc::Rc;

use forebay_accel::crc32c::crc32c;
use forebay_block::{Buf, ErrorKind, Extent};
use forebay_reactor::{File, OpenOptions};
use forebay_sim::{Faults, World};
use forebay_writelog::format::{
    AREA_AT, BEHIND_UNKNOWN, BlockHeader, ENTRY_LEN, EntryKind, EntryRecord, LOGS_AT, LogSuperblock, SUPER_COPIES,
    SUPER_LEN, tag_of,
};
use forebay_writelog::{LogId, MediumKind, Shelf, ShelfOptions};

const PATH: &str = "/logs";
const LOG_SIZE: u64 = 16 << 20;
const UNIT: usize = 512;
const DATA: usize = 4096;
/// Units of a block of one entry: header and entry in the first.
const UNITS: u64 = 1 + (DATA / UNIT) as u64;
const RING: u64 = (LOG_SIZE - AREA_AT) / UNIT as u64;

/// Append block, and the bytes written in its place.
#[derive(Clone)]
struct Block {
    header: BlockHeader,
    tag: u32,
    entries: Vec<EntryRecord>,
    payload: Vec<u8>,
}

/// Log with blocks; at first two of one entry each, of generations 1 and 2.
#[derive(Clone)]
struct Contents {
    superblock: LogSuperblock,
    /// Set if the superblock's second copy is unreadable.
    one_lost: bool,
    blocks: Vec<Block>,
}

impl Contents {
    fn new(superblock: LogSuperblock) -> Self {
        let tag = tag_of(&superblock.log);
        let superblock = LogSuperblock {
            run: 1,
            clean: false,
            tail_pos: 0,
            tail_block: 0,
            tail_seq: 0,
            head_block: 0,
            ..superblock
        };
        let block = |at: u64| {
            let (pos, payload) = (at * UNITS, vec![at as u8 + 1; DATA]);
            let extent = Extent::new(at * DATA as u64, DATA as u64);
            let (place, crc) = (pos as u32 + 1, crc32c(&payload));
            let entry = EntryRecord {
                kind: EntryKind::Write,
                extent,
                seq: at,
                generation: at + 1,
                place,
                crc,
                time_ms: 0,
                term: 0,
                salt: None,
            };
            let header = BlockHeader {
                run: 1,
                count: 1,
                behind: 0,
                number: at,
                pos,
                first_seq: at,
                tail_pos: 0,
                tail_seq: 0,
                units: UNITS as u32,
            };
            Block { header, tag, entries: vec![entry], payload }
        };
        Self { superblock, one_lost: false, blocks: vec![block(0), block(1)] }
    }

    /// Returns the second block, and its entry.
    fn last(&mut self) -> (&mut BlockHeader, &mut EntryRecord) {
        let Block { header, entries, .. } = &mut self.blocks[1];
        (header, &mut entries[0])
    }

    async fn write(&self, file: &File) {
        for block in &self.blocks {
            let len = (ENTRY_LEN * (1 + block.entries.len())).next_multiple_of(UNIT);
            let mut bytes = vec![0; len];
            block.header.encode(block.tag, &block.entries, &mut bytes);
            bytes.extend_from_slice(&block.payload);
            let at = LOGS_AT + AREA_AT + block.header.pos % RING * UNIT as u64;
            file.write_durable_at(Buf::copy_of(&bytes), at).await.expect("written");
        }
        for copy in SUPER_COPIES {
            let lost = self.one_lost && copy == SUPER_COPIES[1];
            let bytes = if lost { Buf::zeroed(SUPER_LEN) } else { Buf::copy_of(&self.superblock.encode()) };
            file.write_durable_at(bytes, LOGS_AT + copy).await.expect("written");
        }
    }
}

struct Bench {
    shelf: Rc<Shelf>,
    file: File,
    id: LogId,
    good: Contents,
}

impl Bench {
    async fn new() -> Self {
        let options = ShelfOptions { create: true, ..ShelfOptions::default() };
        let shelf = Shelf::open(MediumKind::Ssd, Path::new(PATH), options).await.expect("a shelf");
        let id = shelf.create("one", "local/a", LOG_SIZE, 0).await.expect("room");
        let file = File::open(PATH, OpenOptions::read_write()).expect("the shelf's file");
        let bytes = file.read_exact_at(LOGS_AT, SUPER_LEN).await.expect("a superblock").to_vec();
        let good = Contents::new(LogSuperblock::decode(&bytes).expect("a good one"));
        Self { shelf, file, id, good }
    }

    /// Returns the number of entries of a log with these contents, or the reason of its refusal.
    async fn entries(&self, contents: &Contents) -> Result<u64, String> {
        contents.write(&self.file).await;
        // Inspection finds the same as opening.
        let looked = self.shelf.inspect(&self.id).await;
        let opened = self.shelf.open_log(&self.id, "one", 0).await;
        match (looked, opened) {
            (Ok(info), Ok(_)) => Ok(info.dirty_entries),
            (Err(looked), Err(error)) => {
                assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
                assert_eq!(looked.to_string(), error.to_string());
                Err(error.to_string())
            }
            (looked, opened) => panic!("looking found {looked:?}, opening {:?}", opened.map(drop)),
        }
    }
}

fn on_a_bench(test: impl AsyncFnOnce(Bench)) {
    let world = World::new(1, Faults::none());
    world.add_disk(PATH, 64 << 20, UNIT as u32);
    let reactor = world.reactor();
    let ran = world.run(&reactor, async {
        let bench = Bench::new().await;
        assert_eq!(bench.entries(&bench.good).await, Ok(2), "as it should be");
        test(bench).await;
    });
    ran.expect("it ends");
}

type Case = (&'static str, fn(&mut Contents));

#[test]
fn a_log_ends_before_a_block_that_is_not_what_it_should_be() {
    let cases: [Case; 16] = [
        ("of another log", |it| it.blocks[1].tag ^= 1),
        ("of another place", |it| it.last().0.pos += RING),
        ("of an opening that has not been", |it| it.last().0.run = 3),
        ("of an older opening than the one before", |it| it.last().0.run = 0),
        ("after a gap", |it| (it.last().0.first_seq, it.last().1.seq) = (2, 2)),
        ("again of the entry before", |it| (it.last().0.first_seq, it.last().1.seq) = (0, 0)),
        ("without entries", |it| it.last().0.count = 0),
        ("of more entries than there may be", |it| it.last().0.count = 257),
        ("longer than its entries", |it| it.last().0.units += 1),
        ("shorter than its entries", |it| it.last().0.units -= 1),
        ("longer than any", |it| it.last().0.units = u32::MAX),
        ("behind more than there are", |it| it.last().0.behind = 2),
        ("with an entry of another number", |it| it.last().1.seq = 9),
        ("with a payload elsewhere", |it| it.last().1.place = 1),
        ("with an entry that is too long", |it| it.last().1.extent.len = (64 << 10) + 512),
        ("with an entry past all volumes", |it| it.last().1.extent.offset = u64::MAX - 100),
    ];
    on_a_bench(async |bench| {
        for (what, change) in cases {
            let mut contents = bench.good.clone();
            change(&mut contents);
            assert_eq!(bench.entries(&contents).await, Ok(1), "a block {what}");
            // Durable blocks cannot be torn.
            contents.superblock.head_block = 2;
            let error = bench.entries(&contents).await.expect_err(what);
            assert!(error.contains("block 1 should be there and is not"), "a block {what}: {error}");
        }
    });
}

#[test]
fn blocks_of_an_opening_whose_superblock_was_lost_are_taken_and_not_mistaken_for_the_next_one() {
    on_a_bench(async |bench| {
        let mut contents = bench.good.clone();
        contents.last().0.run = 2;
        assert_eq!(bench.entries(&contents).await, Ok(2));
        assert_eq!(bench.shelf.inspect(&bench.id).await.expect("a log").run, 3);
    });
}

#[test]
fn a_torn_payload_ends_a_log_only_where_it_may_be_torn() {
    on_a_bench(async |bench| {
        let mut contents = bench.good.clone();
        contents.blocks[1].payload[UNIT] ^= 1;
        assert_eq!(bench.entries(&contents).await, Ok(1));
        // The error is reported on reading.
        contents.superblock.head_block = 2;
        assert_eq!(bench.entries(&contents).await, Ok(2));
    });
}

#[test]
fn a_missing_block_that_a_later_one_says_was_durable_is_damage() {
    const THIRD: u64 = 2;
    let cases: [Case; 3] = [
        ("one is skipped", |it| it.last().0.number = THIRD),
        ("the first is unreadable", |it| it.blocks[0].tag ^= 1),
        ("the first is not where the tail is", |it| {
            it.superblock.tail_pos = RING - 5;
            it.blocks[0].header.pos = RING - 5;
            it.blocks[0].entries[0].place = (RING - 4) as u32;
        }),
    ];
    on_a_bench(async |bench| {
        for (what, change) in cases {
            let mut contents = bench.good.clone();
            change(&mut contents);
            let error = bench.entries(&contents).await.expect_err(what);
            assert!(error.contains("should be there and is not"), "{what}: {error}");
            // A block that knows of fewer durable blocks permits the log's end.
            contents.last().0.behind = contents.last().0.number as u16;
            let left = u64::from(what == "one is skipped");
            assert_eq!(bench.entries(&contents).await, Ok(left), "{what}");
        }
    });
}

#[test]
fn the_whole_ring_is_searched_when_a_superblock_is_lost() {
    on_a_bench(async |bench| {
        let mut contents = bench.good.clone();
        contents.superblock.serial = 9;
        contents.blocks[0].tag ^= 1;
        // No block of the log is near its tail any more; the only one left is 10 MiB further.
        let far = (10 << 20) / UNIT as u64;
        let (header, entry) = contents.last();
        (header.pos, entry.place) = (far, far as u32 + 1);
        let hole = Buf::zeroed(UNITS as usize * UNIT);
        let near = LOGS_AT + AREA_AT + UNITS * UNIT as u64;
        bench.file.write_durable_at(hole, near).await.expect("written");
        assert_eq!(bench.entries(&contents).await, Ok(0), "nothing says that the superblock is not the newest");
        contents.one_lost = true;
        let error = bench.entries(&contents).await.expect_err("the newest superblock may be lost");
        assert!(error.contains("block 0 should be there and is not"), "{error}");
        // New logs have one copy only.
        contents.superblock.serial = 1;
        assert_eq!(bench.entries(&contents).await, Ok(0));
    });
}

#[test]
fn a_block_behind_more_blocks_than_it_can_count_says_nothing_of_them() {
    on_a_bench(async |bench| {
        // 70,000 blocks were written and none of them synced when the power failed; block 0 is torn.
        let mut contents = bench.good.clone();
        contents.blocks[0].payload[UNIT] ^= 1;
        let number = 70_000;
        assert_eq!(BlockHeader::behind_of(number), BEHIND_UNKNOWN);
        (contents.last().0.number, contents.last().0.behind) = (number, BlockHeader::behind_of(number));
        assert_eq!(bench.entries(&contents).await, Ok(0));
        // The largest value that is not unknown counts.
        contents.last().0.behind = BEHIND_UNKNOWN - 1;
        let error = bench.entries(&contents).await.expect_err("4,466 blocks were durable");
        assert!(error.contains("up to block 4466"), "{error}");
    });
}

#[test]
fn generations_that_go_back_are_damage() {
    on_a_bench(async |bench| {
        for head_block in [0, 2] {
            let mut contents = bench.good.clone();
            contents.superblock.head_block = head_block;
            contents.last().1.generation = 0;
            let error = bench.entries(&contents).await.expect_err("it was taken");
            assert!(error.contains("entry 1 is of an older generation"), "{error}");
        }
    });
}

#[test]
fn tails_are_taken_as_far_as_there_is_a_log() {
    let cases: [(&str, fn(&mut Contents), u64); 5] = [
        ("the first block's first entry is at the backend", |it| it.superblock.tail_seq = 1, 1),
        ("all of them are", |it| it.superblock.tail_seq = 2, 0),
        ("more than there are", |it| it.superblock.tail_seq = 1 << 40, 0),
        ("the last block says so", |it| it.last().0.tail_seq = 1, 1),
        ("the last block says more than there are", |it| it.last().0.tail_seq = u64::MAX, 0),
    ];
    on_a_bench(async |bench| {
        for (what, change, entries) in cases {
            let mut contents = bench.good.clone();
            change(&mut contents);
            assert_eq!(bench.entries(&contents).await, Ok(entries), "{what}");
        }
    });
}

#[test]
fn a_torn_block_of_an_older_run_gives_way_to_the_one_at_the_start_of_the_ring() {
    on_a_bench(async |bench| {
        let mut contents = bench.good.clone();
        // The second block ends where the ring does.
        let tail_pos = RING - 2 * UNITS;
        contents.superblock = LogSuperblock { run: 2, tail_pos, ..contents.superblock };
        for (at, block) in (0..).zip(&mut contents.blocks) {
            let pos = tail_pos + at * UNITS;
            block.header = BlockHeader { pos, tail_pos, ..block.header };
            block.entries[0].place = pos as u32 + 1;
        }
        // The next run has written a block of the same number, with two entries, at the start of the ring.
        let mut next = contents.blocks[1].clone();
        let data_units = (DATA / UNIT) as u32;
        next.header = BlockHeader { run: 2, pos: RING, count: 2, units: 1 + 2 * data_units, ..next.header };
        next.entries[0].place = 1;
        let second = EntryRecord { seq: 2, place: 1 + data_units, ..next.entries[0] };
        next.entries.push(second);
        next.payload = next.payload.repeat(2);
        contents.blocks.push(next);
        assert_eq!(bench.entries(&contents).await, Ok(3), "the torn block has one entry, the newer one two");
    });
}
