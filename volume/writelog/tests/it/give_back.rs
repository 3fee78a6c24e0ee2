//! Discarded logs: their space returns to the file system, and the other logs keep theirs, whenever the power fails.

use std::collections::BTreeMap;
use std::path::Path;
use std::rc::Rc;

use forebay_block::{Buf, ErrorKind};
use forebay_reactor::{File, OpenOptions};
use forebay_sim::{CrashKind, Faults, World};
use forebay_writelog::format::{
    DIRECTORY_COPIES, LOG_SIZE_LEAST, LOGS_AT, LOGS_MAX, LogDirectory, LogSuperblock, SUPER_LEN, ShelfEntry,
};
use forebay_writelog::{LogId, MediumKind, Shelf, ShelfOptions};
use proptest::prelude::*;

const FILE: &str = "/logs/shared";
const MIB: u64 = 1 << 20;

async fn open() -> Rc<Shelf> {
    let options = ShelfOptions { create: true, small: true, ..ShelfOptions::default() };
    Shelf::open(MediumKind::Ssd, Path::new(FILE), options).await.expect("a file for logs")
}

async fn create(shelf: &Rc<Shelf>, volume: &str, size: u64) -> forebay_block::Result<LogId> {
    shelf.create(volume, volume, size, 0).await
}

/// Returns the length of the file in bytes.
fn length() -> u64 {
    File::open(FILE, OpenOptions::read()).expect("the file").info().size
}

fn world(seed: u64, capacity: u64) -> World {
    World::new(seed, Faults { files_capacity: Some(capacity), ..Faults::none() })
}

fn run<F: Future>(world: &World, future: F) -> F::Output {
    let reactor = world.reactor();
    let out = world.run(&reactor, future).expect("it ends");
    world.crash(reactor, CrashKind::Power);
    out
}

#[test]
fn the_last_log_that_goes_leaves_an_empty_file() {
    let world = world(1, 64 * MIB);
    run(&world, async {
        let shelf = open().await;
        let empty = length();
        for round in 0..5 {
            let mut ids = Vec::new();
            for i in 0..3 {
                ids.push(create(&shelf, &format!("{round} {i}"), 16 * MIB).await.expect("space"));
            }
            assert_eq!(length(), LOGS_AT + 48 * MIB);
            for id in ids {
                shelf.discard(&id).await.expect("discarded");
            }
            assert_eq!((length(), empty), (LOGS_AT, LOGS_AT));
            assert!(world.allocated(FILE).expect("the file") <= LOGS_AT);
        }
    });
}

#[test]
fn a_hole_is_given_to_others_and_a_log_that_finds_no_space_in_it_leaves_it_so() {
    let world = world(1, 64 * MIB);
    run(&world, async {
        let shelf = open().await;
        let first = create(&shelf, "a", 16 * MIB).await.expect("space");
        let second = create(&shelf, "b", 16 * MIB).await.expect("space");
        shelf.discard(&first).await.expect("discarded");
        assert_eq!(length(), LOGS_AT + 32 * MIB, "the second one keeps its place");
        assert!(world.allocated(FILE).expect("the file") <= LOGS_AT + 16 * MIB, "the hole takes space");
        // Another file uses the freed space.
        let other = File::open("/logs/other", OpenOptions::read_write().create()).expect("made");
        other.write_at(Buf::zeroed((40 * MIB) as usize), 0).await.expect("space");
        other.sync_data().await.expect("sync");
        let error = create(&shelf, "c", 16 * MIB).await.expect_err("no space");
        assert_eq!(error.kind(), ErrorKind::NoSpace, "{error}");
        assert!(world.allocated(FILE).expect("the file") <= LOGS_AT + 16 * MIB, "half a log is left in the hole");
        assert_eq!(shelf.ids(), [second]);
        other.set_size(0).expect("cut");
        other.sync_data().await.expect("sync");
        create(&shelf, "c", 16 * MIB).await.expect("space");
        assert_eq!(length(), LOGS_AT + 32 * MIB, "it has the hole");
        assert!(world.allocated(FILE).expect("the file") >= 32 * MIB, "all of it is allocated");
    });
}

#[derive(Debug, Clone)]
enum Step {
    /// Creates a log of this many MiB.
    Create(u64),
    /// Discards one of the existing logs.
    Discard(usize),
    /// Reopens the file.
    Reopen,
    /// Creates or discards a log while the power fails at this point.
    Crash(Box<Step>, u64),
}

fn step() -> impl Strategy<Value = Step> {
    let plain = prop_oneof![
        3 => (1..6_u64).prop_map(Step::Create),
        3 => any::<usize>().prop_map(Step::Discard),
        1 => Just(Step::Reopen),
    ];
    let crash = (plain.clone(), 1..80_u64).prop_map(|(step, point)| Step::Crash(Box::new(step), point));
    prop_oneof![3 => plain, 2 => crash]
}

/// Expected logs by volume: id, size, and content of the last block.
#[derive(Default)]
struct Model {
    logs: BTreeMap<String, (LogId, u64, u8)>,
    /// Volume of a log that may or may not exist.
    unsure: Option<String>,
    made: u8,
}

/// Returns the offset of a log in the newest directory.
fn start(world: &World, id: &LogId) -> u64 {
    let copies = DIRECTORY_COPIES.iter().filter_map(|&at| world.peek(FILE, at, 64 << 10));
    let directories = copies.filter_map(|bytes| {
        let len = LogDirectory::encoded_len(&bytes).ok()?;
        LogDirectory::decode(bytes.get(..len.next_multiple_of(4096))?).ok()
    });
    let newest = directories.max_by_key(|directory| directory.serial).expect("a directory");
    newest.logs.iter().find(|log| log.log == *id).expect("it is in the directory").start
}

impl Model {
    async fn apply(&mut self, world: &World, shelf: &Rc<Shelf>, step: &Step) {
        match step {
            Step::Create(mib) => {
                self.made += 1;
                let (volume, byte, size) = (format!("volume {}", self.made), self.made, mib * MIB);
                self.unsure = Some(volume.clone());
                let Ok(id) = create(shelf, &volume, size).await else { return };
                // Written like the log itself would.
                let file = File::open(FILE, OpenOptions::read_write().direct()).expect("the file");
                let last = start(world, &id) + size - 4096;
                file.write_durable_at(Buf::copy_of(&[byte; 4096]), last).await.expect("write");
                self.logs.insert(volume, (id, size, byte));
            }
            Step::Discard(which) => {
                let Some(volume) = self.logs.keys().nth(which % self.logs.len().max(1)).cloned() else { return };
                let (id, ..) = self.logs.remove(&volume).expect("it is there");
                self.unsure = Some(volume);
                shelf.discard(&id).await.expect("discarded");
            }
            Step::Reopen | Step::Crash(..) => return,
        }
        self.unsure = None;
    }

    /// Asserts that every log is intact and fully allocated, and that no other space is allocated.
    async fn compare(&mut self, world: &World, shelf: &Rc<Shelf>) {
        for id in shelf.ids() {
            let info = shelf.inspect(&id).await.expect("a log");
            let known = self.logs.get(&info.volume).is_some_and(|(known, size, _)| (*known, *size) == (id, info.size));
            assert!(known || self.unsure.as_ref() == Some(&info.volume), "{info:?} is nobody's");
            if !known {
                shelf.discard(&id).await.expect("discarded");
            }
        }
        self.unsure = None;
        let mut end = LOGS_AT;
        for (volume, (id, size, byte)) in &self.logs {
            assert!(shelf.ids().contains(id), "{volume} is gone");
            let at = start(world, id);
            end = end.max(at + size);
            let last = world.peek(FILE, at + size - 4096, 4096).expect("all of it is in the file");
            assert!(last.iter().all(|found| found == byte), "{volume} was written over, or its space given away");
        }
        let copies = directories(world);
        assert!(copies.len() == 2 && copies[0].0.logs == copies[1].0.logs, "the copies differ: {copies:?}");
        assert_eq!(length(), end, "the file ends with its last log");
        let taken: u64 = self.logs.values().map(|(_, size, _)| size).sum();
        let allocated = world.allocated(FILE).expect("the file");
        assert!((taken..=taken + LOGS_AT).contains(&allocated), "{allocated} bytes are allocated for {taken} of logs");
    }
}

/// Damage of a copy of the directory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Spoil {
    Flip,
    Blank,
    Noise,
    /// Unreadable medium.
    Unreadable,
}

const SPOILS: [Spoil; 4] = [Spoil::Flip, Spoil::Blank, Spoil::Noise, Spoil::Unreadable];

async fn spoil(world: &World, at: u64, how: Spoil) {
    let file = File::open(FILE, OpenOptions::read_write().direct()).expect("the file");
    let mut block = file.read_exact_at(at, 4096).await.expect("read").to_vec();
    match how {
        Spoil::Flip => block[70] ^= 1,
        Spoil::Blank => block.fill(0),
        Spoil::Noise => block.fill(0xA5),
        Spoil::Unreadable => assert!(world.set_bad_sector(FILE, at)),
    }
    if how != Spoil::Unreadable {
        file.write_durable_at(Buf::copy_of(&block), at).await.expect("write");
    }
}

/// Returns the readable copies of the directory, with their addresses; the newest one last.
fn directories(world: &World) -> Vec<(LogDirectory, u64)> {
    let copies = DIRECTORY_COPIES.iter().map(|&at| (world.peek(FILE, at, 64 << 10).expect("in the file"), at));
    let mut found: Vec<(LogDirectory, u64)> =
        copies.filter_map(|(bytes, at)| Some((LogDirectory::decode(&bytes).ok()?, at))).collect();
    found.sort_by_key(|(directory, _)| directory.serial);
    found
}

/// Creates four logs, discards the second, and returns the contents of their last blocks.
async fn three_logs(world: &World) -> Model {
    let mut model = Model::default();
    let shelf = open().await;
    for mib in [2, 3, 1] {
        model.apply(world, &shelf, &Step::Create(mib)).await;
    }
    model.apply(world, &shelf, &Step::Discard(1)).await;
    model.apply(world, &shelf, &Step::Create(4)).await;
    assert_eq!(model.logs.len(), 3);
    model
}

#[test]
fn a_spoiled_copy_of_the_directory_costs_no_log() {
    for how in SPOILS {
        for copy in DIRECTORY_COPIES {
            // Discarded with the copy damaged; created with it damaged; or neither.
            for step in [Step::Discard(0), Step::Discard(1), Step::Discard(2), Step::Create(3), Step::Reopen] {
                let world = world(1, 1 << 30);
                let mut model = run(&world, three_logs(&world));
                run(&world, async {
                    spoil(&world, copy, how).await;
                    let shelf = open().await;
                    model.apply(&world, &shelf, &step).await;
                });
                // Twice: the second run reads the result of the first.
                for _ in 0..2 {
                    run(&world, async { model.compare(&world, &open().await).await });
                }
            }
        }
    }
}

/// Removes the newest log from the older copy of the directory, like a program that writes one copy for each created
/// log. Returns the address of the copy that lists it.
async fn leave_in_newest_copy_only(world: &World, model: &Model) -> u64 {
    let (newest, at) = directories(world).pop().expect("a directory");
    let (last, ..) = model.logs[&format!("volume {}", model.made)];
    let other = DIRECTORY_COPIES.into_iter().find(|&other| other != at).expect("two copies");
    let logs = newest.logs.iter().filter(|log| log.log != last).copied().collect();
    let before = LogDirectory { serial: newest.serial - 1, logs, ..newest.clone() };
    let file = File::open(FILE, OpenOptions::read_write().direct()).expect("the file");
    file.write_durable_at(Buf::copy_of(&before.encode()), other).await.expect("write");
    at
}

/// Reason why the superblocks of a log are unusable at an open.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Untold {
    Unreadable,
    Newer,
}

#[test]
fn a_log_that_cannot_be_looked_for_beside_a_spoiled_copy_is_kept() {
    for (how, why) in SPOILS.into_iter().flat_map(|how| [(how, Untold::Unreadable), (how, Untold::Newer)]) {
        let world = world(1, 1 << 30);
        let mut model = run(&world, three_logs(&world));
        let (last, ..) = model.logs[&format!("volume {}", model.made)];
        let at = start(&world, &last);
        let superblock = world.peek(FILE, at, SUPER_LEN).expect("in the file");
        run(&world, async {
            let copy = leave_in_newest_copy_only(&world, &model).await;
            spoil(&world, copy, how).await;
            let newer = LogSuperblock { features: 1, ..LogSuperblock::decode(&superblock).expect("a superblock") };
            match why {
                Untold::Unreadable => assert!(world.set_bad_sector(FILE, at)),
                Untold::Newer => {
                    let file = File::open(FILE, OpenOptions::read_write().direct()).expect("the file");
                    file.write_durable_at(Buf::copy_of(&newer.encode()), at).await.expect("write");
                }
            }
        });
        let head = world.peek(FILE, 0, LOGS_AT as usize);
        run(&world, async {
            let shelf = open().await;
            let ids = shelf.ids();
            assert_eq!(ids.len(), 2, "{how:?} {why:?}");
            let expected = if why == Untold::Newer { ErrorKind::Invalid } else { ErrorKind::Io };
            let error = create(&shelf, "new", MIB).await.expect_err("it may be written over the log");
            assert_eq!(error.kind(), expected, "{how:?} {why:?}: {error}");
            let error = shelf.discard(&ids[0]).await.expect_err("the directory would be written without the log");
            assert_eq!(error.kind(), expected, "{how:?} {why:?}: {error}");
            shelf.inspect(&ids[0]).await.expect("the others can be used");
        });
        assert!(world.peek(FILE, 0, LOGS_AT as usize) == head, "{how:?} {why:?}: the directory was written");
        run(&world, async {
            let file = File::open(FILE, OpenOptions::read_write().direct()).expect("the file");
            file.write_durable_at(Buf::copy_of(&superblock), at).await.expect("write");
        });
        for _ in 0..2 {
            run(&world, async { model.compare(&world, &open().await).await });
        }
    }
}

#[test]
fn a_directory_that_cannot_be_read_is_not_called_damaged() {
    for other in SPOILS {
        for create in [false, true] {
            for [first, second] in [DIRECTORY_COPIES, [DIRECTORY_COPIES[1], DIRECTORY_COPIES[0]]] {
                let world = world(1, 1 << 30);
                run(&world, three_logs(&world));
                run(&world, async {
                    spoil(&world, first, Spoil::Unreadable).await;
                    spoil(&world, second, other).await;
                    let options = ShelfOptions { create, small: true, ..ShelfOptions::default() };
                    let opened = Shelf::open(MediumKind::Ssd, Path::new(FILE), options).await;
                    let error = opened.err().expect("no copy of the directory is whole");
                    assert_eq!(error.kind(), ErrorKind::Io, "{other:?}: {error}");
                    assert!(!error.to_string().contains("clear"), "{other:?}: {error}");
                });
            }
        }
    }
}

#[test]
fn a_log_that_only_the_spoiled_copy_names_keeps_its_data() {
    for how in SPOILS {
        for step in [Step::Discard(0), Step::Discard(1), Step::Create(3), Step::Reopen] {
            let world = world(1, 1 << 30);
            let mut model = run(&world, three_logs(&world));
            run(&world, async {
                let at = leave_in_newest_copy_only(&world, &model).await;
                spoil(&world, at, how).await;
                let shelf = open().await;
                model.apply(&world, &shelf, &step).await;
            });
            for _ in 0..2 {
                run(&world, async { model.compare(&world, &open().await).await });
            }
        }
    }
}

#[test]
fn space_is_not_given_back_by_the_opening_that_finds_a_copy_spoiled() {
    for how in SPOILS {
        for copy in DIRECTORY_COPIES {
            let world = world(1, 1 << 30);
            let mut model = run(&world, three_logs(&world));
            run(&world, async {
                // Like an interrupted creation of a log.
                let file = File::open(FILE, OpenOptions::read_write().direct()).expect("the file");
                let longer = length() + 4 * MIB;
                file.set_size(longer).expect("longer");
                drop(file);
                spoil(&world, copy, how).await;
                let shelf = open().await;
                assert_eq!(length(), longer, "{how:?}: it may be of a log that the copy named");
                model.apply(&world, &shelf, &Step::Discard(0)).await;
                assert_eq!(length(), longer, "{how:?}");
            });
            // Both copies are readable again.
            run(&world, async { model.compare(&world, &open().await).await });
        }
    }
}

#[test]
fn a_discarded_log_does_not_come_back_beside_a_spoiled_copy() {
    for how in SPOILS {
        for copy in DIRECTORY_COPIES {
            let world = world(1, 1 << 30);
            // Block devices keep the contents of a discarded log.
            world.add_disk(FILE, 16 * MIB, 4096);
            run(&world, async {
                let mut model = three_logs(&world).await;
                let shelf = open().await;
                model.apply(&world, &shelf, &Step::Discard(2)).await;
                drop(shelf);
                spoil(&world, copy, how).await;
                let there = open().await.ids();
                assert_eq!(there.len(), 2, "{how:?}");
                assert!(model.logs.values().all(|(id, ..)| there.contains(id)), "{how:?}");
            });
        }
    }
}

/// Discards a log of a block device while the power fails at the given point, and damages a copy of the directory
/// later; with `reuse` another log has then been created before the place of the discarded one, without an open in
/// between. Returns whether the power failed.
fn discard_with_a_crash(point: u64, copy: u64, reuse: bool) -> bool {
    let world = world(1, 1 << 30);
    world.add_disk(FILE, 16 * MIB, 4096);
    let model = run(&world, three_logs(&world));
    // The second log follows a hole: a new log fills the hole, and ends where the discarded one began.
    let id = *model.logs.values().map(|(id, ..)| id).nth(if reuse { 1 } else { 2 }).expect("three logs");
    world.crash_at_point(Some(world.points() + point));
    let reactor = world.reactor();
    let ended = world.run(&reactor, async { open().await.discard(&id).await.expect("discarded") });
    world.crash(reactor, CrashKind::Power);
    let there = run(&world, async {
        let shelf = open().await;
        if reuse {
            create(&shelf, "new", 3 * MIB).await.expect("space");
        }
        shelf.ids()
    });
    run(&world, async {
        spoil(&world, copy, Spoil::Noise).await;
        let found = open().await.ids();
        assert_eq!(found, there, "point {point}, copy at {copy}, reuse {reuse}");
    });
    ended.is_err()
}

#[test]
fn a_log_whose_discard_a_crash_cut_off_does_not_come_back() {
    for copy in DIRECTORY_COPIES {
        for reuse in [false, true] {
            let crashes = (1..).take_while(|&point| discard_with_a_crash(point, copy, reuse));
            assert!(crashes.count() >= 3, "the power never failed");
        }
    }
}

#[test]
fn no_more_logs_are_taken_in_than_a_directory_can_name() {
    let world = world(1, 1 << 30);
    let (size, full) = (LOG_SIZE_LEAST, LOGS_MAX as u64);
    world.add_disk(FILE, LOGS_AT + (full + 2) * size, 4096);
    run(&world, async {
        let superblock = {
            let shelf = open().await;
            create(&shelf, "one too many", size).await.expect("space");
            world.peek(FILE, LOGS_AT, SUPER_LEN).expect("on the disk")
        };
        let entry = |i: u64| ShelfEntry {
            log: std::array::from_fn(|at| i.to_le_bytes()[at % 8]),
            start: LOGS_AT + i * size,
            size,
        };
        let directory = LogDirectory { serial: 8, medium: MediumKind::Ssd, logs: (0..full).map(entry).collect() };
        let file = File::open(FILE, OpenOptions::read_write().direct()).expect("the disk");
        file.write_durable_at(Buf::copy_of(&directory.encode()), DIRECTORY_COPIES[0]).await.expect("write");
        file.write_durable_at(Buf::copy_of(&superblock), LOGS_AT + full * size).await.expect("write");
        drop(file);
        spoil(&world, DIRECTORY_COPIES[1], Spoil::Noise).await;
        for _ in 0..2 {
            assert_eq!(open().await.ids().len() as u64, full);
        }
    });
}

#[test]
fn nothing_is_changed_where_both_copies_of_the_directory_are_spoiled() {
    for first in SPOILS {
        for second in SPOILS {
            let world = world(1, 1 << 30);
            run(&world, three_logs(&world));
            run(&world, async {
                spoil(&world, DIRECTORY_COPIES[0], first).await;
                spoil(&world, DIRECTORY_COPIES[1], second).await;
            });
            let size = run(&world, async { length() });
            let before = world.peek(FILE, LOGS_AT, (size - LOGS_AT) as usize).expect("the logs");
            run(&world, async {
                for create in [false, true] {
                    let options = ShelfOptions { create, small: true, ..ShelfOptions::default() };
                    let opened = Shelf::open(MediumKind::Ssd, Path::new(FILE), options).await;
                    assert!(opened.is_err(), "{first:?} and {second:?}, create {create}");
                }
                assert_eq!(length(), size, "{first:?} and {second:?}");
            });
            let after = world.peek(FILE, LOGS_AT, (size - LOGS_AT) as usize).expect("the logs");
            assert!(after == before, "{first:?} and {second:?}");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn logs_keep_their_space_and_others_have_the_rest(steps in proptest::collection::vec(step(), 1..30), seed in any::<u64>()) {
        let world = world(seed, 1 << 30);
        let mut model = Model::default();
        run(&world, async { drop(open().await) });
        for step in &steps {
            if let Step::Crash(step, point) = step {
                world.crash_at_point(Some(world.points() + point));
                let reactor = world.reactor();
                let _ = world.run(&reactor, async {
                    let shelf = open().await;
                    model.apply(&world, &shelf, step).await;
                });
                world.crash(reactor, CrashKind::Power);
            }
            run(&world, async {
                let shelf = open().await;
                model.apply(&world, &shelf, step).await;
                model.compare(&world, &shelf).await;
            });
        }
    }
}
