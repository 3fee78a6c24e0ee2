//! Logs in persistent memory with malicious or lost contents: refused, with the reason.

use std::rc::Rc;

use forebay_block::{Error, ErrorKind, Extent};
use forebay_reactor::pmem::PersistentMemory;
use forebay_sim::{Faults, SimPmem, World};
use forebay_writelog::format::{
    AREA_AT, ENTRY_LEN, EntryKind, EntryRecord, HEAD_AT, LOGS_AT, LogSuperblock, SUPER_COPIES, SUPER_LEN, TAIL_AT,
    encode_word, tag_of,
};
use forebay_writelog::{LogId, Shelf, ShelfOptions};

const PATH: &str = "/dev/pmem";
const LOG_SIZE: u64 = 16 << 20;
const BLOCK: u64 = 4096;

/// Log with two entries of one block each, of generations 1 and 2.
struct Bench {
    memory: SimPmem,
    shelf: Rc<Shelf>,
    id: LogId,
    superblock: LogSuperblock,
    tag: u32,
}

impl Bench {
    async fn new(world: &World) -> Self {
        let memory = SimPmem::new(world, LOGS_AT + LOG_SIZE + (1 << 20));
        let options = ShelfOptions { create: true, ..ShelfOptions::default() };
        let shelf = Shelf::on_memory(Rc::new(memory.clone()) as Rc<dyn PersistentMemory>, PATH, options).await;
        let shelf = shelf.expect("a shelf");
        let id = shelf.create("one", "local/a", LOG_SIZE, 2).await.expect("room");
        let mut bytes = vec![0; SUPER_LEN];
        memory.load(LOGS_AT + SUPER_COPIES[0], &mut bytes);
        let superblock = LogSuperblock::decode(&bytes).expect("a superblock");
        let bench = Self { memory, shelf, id, superblock, tag: tag_of(&id) };
        bench.reset();
        bench
    }

    /// Restores the valid contents.
    fn reset(&self) {
        for copy in SUPER_COPIES {
            self.memory.store(LOGS_AT + copy, &self.superblock.encode());
        }
        for seq in 0..2 {
            self.payload(seq);
            self.entry(seq, self.record(seq), self.tag);
        }
        self.word(TAIL_AT, 0);
        self.word(HEAD_AT, 2);
    }

    fn record(&self, seq: u64) -> EntryRecord {
        let extent = Extent::new(seq * BLOCK, BLOCK);
        let crc = forebay_accel::crc32c::crc32c(&[seq as u8 + 1; BLOCK as usize]);
        let place = (seq * BLOCK / 64) as u32;
        EntryRecord {
            kind: EntryKind::Write,
            extent,
            seq,
            generation: seq + 1,
            place,
            crc,
            time_ms: 0,
            term: 0,
            salt: None,
        }
    }

    /// Returns the offset of the buffers.
    fn buffers(&self) -> u64 {
        LOGS_AT + (AREA_AT + self.superblock.slots * ENTRY_LEN as u64).next_multiple_of(4096)
    }

    fn payload(&self, seq: u64) {
        self.memory.store(self.buffers() + seq * BLOCK, &[seq as u8 + 1; BLOCK as usize]);
    }

    fn entry(&self, seq: u64, record: EntryRecord, tag: u32) {
        let at = seq % self.superblock.slots * ENTRY_LEN as u64;
        self.memory.store(LOGS_AT + AREA_AT + at, &record.encode(tag));
    }

    fn word(&self, at: u64, seq: u64) {
        self.memory.store_word(LOGS_AT + at, encode_word(seq, self.tag));
    }

    fn superblock(&self, change: impl FnOnce(&mut LogSuperblock)) {
        let mut superblock = self.superblock.clone();
        change(&mut superblock);
        for copy in SUPER_COPIES {
            self.memory.store(LOGS_AT + copy, &superblock.encode());
        }
    }

    async fn open(&self) -> Result<(), Error> {
        // Inspection is as strict as opening.
        let looked = self.shelf.inspect(&self.id).await.map(drop);
        let opened = self.shelf.open_log(&self.id, "one", 2).await.map(drop);
        if let (Err(looked), Ok(())) = (&looked, &opened) {
            panic!("only looking at it found: {looked}");
        }
        opened
    }
}

fn on_a_bench(test: impl AsyncFnOnce(Bench)) {
    let world = World::new(1, Faults::none());
    let reactor = world.reactor();
    let ran = world.run(&reactor, async {
        let bench = Bench::new(&world).await;
        bench.open().await.expect("it is as it should be");
        test(bench).await;
    });
    ran.expect("it ends");
}

type Case = (&'static str, fn(&Bench), ErrorKind, &'static str);

async fn all_refused(bench: &Bench, cases: &[Case]) {
    for (what, change, kind, text) in cases {
        bench.reset();
        change(bench);
        let error = bench.open().await.err().unwrap_or_else(|| panic!("{what}: it was taken"));
        assert_eq!(error.kind(), *kind, "{what}: {error}");
        assert!(error.to_string().contains(text), "{what}: {error} does not say '{text}'");
    }
    bench.reset();
    bench.open().await.expect("it is as it was");
}

#[test]
fn superblocks_that_are_not_what_they_should_be_are_refused() {
    let corrupt = ErrorKind::Corrupt;
    let cases: [Case; 13] = [
        ("opened too often", |it| it.superblock(|it| it.run = u32::MAX), corrupt, "opened 4294967295 times"),
        ("written too often", |it| it.superblock(|it| it.serial = u64::MAX), corrupt, "written 18446744073709551615"),
        ("another log", |it| it.superblock(|it| it.log[0] ^= 1), corrupt, "differs from the directory"),
        ("longer than its place", |it| it.superblock(|it| it.size += 1 << 20), corrupt, "differs from the directory"),
        (
            "one for a disk",
            |it| {
                it.superblock(|it| (it.medium, it.unit) = (forebay_writelog::MediumKind::Ssd, 512));
            },
            corrupt,
            "differs from the directory",
        ),
        ("unknown features", |it| it.superblock(|it| it.features = 4), ErrorKind::Invalid, "feature bits 0x4"),
        ("units of a disk", |it| it.superblock(|it| it.unit = 512), corrupt, "units of 512 bytes"),
        ("no slots", |it| it.superblock(|it| it.slots = 0), corrupt, "0 slots"),
        ("as many slots as bytes", |it| it.superblock(|it| it.slots = it.size / 64), corrupt, "slots"),
        ("slots to the very end", |it| it.superblock(|it| it.slots = it.size / 64 - 1), corrupt, "slots"),
        ("slots past everything", |it| it.superblock(|it| it.slots = u64::MAX / 32), corrupt, "slots"),
        ("another volume", |it| it.superblock(|it| it.volume = "two".into()), ErrorKind::Denied, "another volume"),
        ("an older epoch", |it| it.superblock(|it| it.epoch = 1), ErrorKind::Fenced, "is of epoch 1"),
    ];
    on_a_bench(async |bench| all_refused(&bench, &cases).await);
}

#[test]
fn rings_that_are_not_what_they_should_be_are_refused() {
    let corrupt = ErrorKind::Corrupt;
    let cases: [Case; 13] = [
        ("no head", |it| it.memory.store_word(LOGS_AT + HEAD_AT, 0), corrupt, "the head: the word"),
        ("a flipped tail", |it| it.memory.flip(LOGS_AT + TAIL_AT + 2, 0), corrupt, "the tail: the word"),
        ("the tail past the head", |it| it.word(TAIL_AT, 3), corrupt, "the tail is 3, the head 2"),
        ("more entries than slots", |it| it.word(HEAD_AT, it.superblock.slots + 1), corrupt, "slots"),
        ("an entry that was never written", |it| it.word(HEAD_AT, 3), corrupt, "entry 2: the checksum"),
        ("a flipped entry", |it| it.memory.flip(LOGS_AT + AREA_AT + 64 + 8, 3), corrupt, "entry 1: the checksum"),
        ("an entry of another log", |it| it.entry(1, it.record(1), it.tag ^ 1), corrupt, "of log"),
        (
            "an entry of another place",
            |it| it.entry(1, EntryRecord { seq: 7, ..it.record(1) }, it.tag),
            corrupt,
            "it is number 7",
        ),
        (
            "a generation that goes back",
            |it| it.entry(1, EntryRecord { generation: 0, ..it.record(1) }, it.tag),
            corrupt,
            "older generation",
        ),
        (
            "a buffer outside",
            |it| it.entry(1, EntryRecord { place: u32::MAX, ..it.record(1) }, it.tag),
            corrupt,
            "its buffer is outside",
        ),
        (
            "a buffer that ends outside",
            |it| {
                let lines = (LOGS_AT + it.superblock.size - it.buffers()) / 64;
                it.entry(1, EntryRecord { place: lines as u32 - 63, ..it.record(1) }, it.tag);
            },
            corrupt,
            "its buffer is outside",
        ),
        ("a flipped payload", |it| it.memory.flip(it.buffers() + 5000, 1), corrupt, "entry 1: the payload's checksum"),
        (
            "one buffer for two entries",
            |it| {
                let crc = it.record(0).crc;
                it.entry(1, EntryRecord { place: 0, crc, ..it.record(1) }, it.tag);
            },
            corrupt,
            "belongs to another entry too",
        ),
    ];
    on_a_bench(async |bench| all_refused(&bench, &cases).await);
}

#[test]
fn one_damaged_copy_of_a_superblock_is_what_a_crash_leaves() {
    on_a_bench(async |bench| {
        for copy in SUPER_COPIES {
            bench.reset();
            bench.memory.flip(LOGS_AT + copy + 200, 0);
            bench.open().await.expect("the other copy holds");
        }
    });
}
