//! Tests of unreadable data and checkpoints: reported before anything is written, and permanently discarded on request.

use std::time::Duration;

use forebay_reactor::{sleep, spawn};
use forebay_sim::DiskFaults;
use forebay_store::format::record::CheckpointRecord;
use forebay_store::format::superblock::StoreSuperblock;

use super::*;

/// Returns the superblock's store number, from the disk.
fn store_number(world: &World) -> u64 {
    let superblock = world.peek(DISK, COPIES[0], 4096).expect("peek");
    u64::from_le_bytes(superblock[32..40].try_into().expect("8 bytes"))
}

/// Returns the newest anchor, with its slot.
fn newest_anchor(world: &World) -> (Anchor, usize) {
    let number = store_number(world);
    let read = |slot: usize| {
        let block = world.peek(DISK, SLOTS[slot][0], 4096).expect("peek");
        Some((Anchor::decode(&block, number).ok()?, slot))
    };
    (0..SLOTS.len()).filter_map(read).max_by_key(|(anchor, _)| anchor.generation).expect("an anchor")
}

/// Returns the byte address of the first payload block of the newest batch with object data.
fn newest_data(world: &World) -> u64 {
    let writes = |header: &&BatchHeader| {
        let entries = StoreEntry::decode_all(&header.entries).expect("entries");
        entries.iter().any(|entry| matches!(entry, StoreEntry::Write { .. }))
    };
    let headers = headers(world);
    (headers.iter().filter(writes).max_by_key(|header| header.seq).expect("a batch").block + 1) * 4096
}

#[test]
fn damaged_data_is_told_before_anything_is_written() {
    for lost in [everything(), anchors(), COPIES.to_vec()] {
        let world = machine(SIZE, Faults::none());
        run(&world, async {
            init(false).await.expect("init");
            let store = open().await.expect("open");
            write(&store, "a", 1).await;
            write(&store, "b", 1).await;
            // No replay is needed: only reads of the data detect the damage.
            store.close().await.expect("close");
        });
        run(&world, flip(newest_data(&world)));
        run(&world, wipe(&lost, 0));
        let before = head(&world);
        run(&world, async {
            let report = check(true, false).await.expect("a report");
            let rebuilt = report.rebuild.as_ref().expect("a rebuild");
            assert!(!rebuilt.written && !report.is_clean(), "{report:?}");
            assert!(rebuilt.lost.iter().any(|lost| lost.starts_with("b: ")), "the object is named: {rebuilt:?}");
        });
        assert!(head(&world) == before, "nothing was written");
        run(&world, async {
            let report = check(true, true).await.expect("a report");
            assert!(report.rebuild.as_ref().is_some_and(|rebuilt| rebuilt.written), "{report:?}");
            assert!(!report.is_clean(), "what is damaged stays so: {report:?}");
            let store = open().await.expect("open");
            assert_eq!(first_byte(&store, "a").await, Some(1));
            let read = store.read(&ObjectName::new("b"), ObjectRead::head(0, 1)).await;
            assert_eq!(read.expect_err("its data is damaged").kind(), ErrorKind::Corrupt);
            store.close().await.expect("close");
        });
    }
}

/// Returns a store with "a" from its first opening and "b" from its second, both cleanly closed.
fn two_openings() -> World {
    let world = machine(SIZE, Faults::none());
    run(&world, async {
        init(false).await.expect("init");
        for name in ["a", "b"] {
            let store = open().await.expect("open");
            write(&store, name, 1).await;
            store.close().await.expect("close");
        }
    });
    world
}

/// Returns a store whose newest checkpoints' segment tables are unreadable, with the anchors of the previous checkpoint
/// lost, and the superblocks as well if `headless`.  "a" and "b" can be recovered from that previous checkpoint.
fn unusable_checkpoint(headless: bool) -> World {
    let world = two_openings();
    let (anchor, slot) = newest_anchor(&world);
    run(&world, async {
        flip(anchor.segments.addr).await;
        wipe(&SLOTS[1 - slot], 0xAA).await;
        if headless {
            wipe(&COPIES, 0).await;
        }
    });
    world
}

/// Returns a store with "a", "b" and "c" from three openings, of which only the first one's checkpoints are usable.
fn unusable_checkpoints() -> World {
    let world = machine(SIZE, Faults::none());
    run(&world, async {
        init(false).await.expect("init");
        for name in ["a", "b", "c"] {
            let store = open().await.expect("open");
            write(&store, name, 1).await;
            store.close().await.expect("close");
        }
    });
    let entries =
        headers(&world).into_iter().flat_map(|header| StoreEntry::decode_all(&header.entries).expect("entries"));
    let records = entries.filter_map(|entry| match entry {
        StoreEntry::Checkpoint { record } => Some(CheckpointRecord::decode(&record).expect("a record").anchor),
        _ => None,
    });
    let tables: Vec<u64> = records.filter(|anchor| anchor.generation > 2).map(|anchor| anchor.segments.addr).collect();
    assert_eq!(tables.len(), 4, "each life takes two checkpoints");
    run(&world, async {
        for at in tables {
            flip(at).await;
        }
    });
    world
}

/// Returns a store that has lost "b" and "c" to a damaged batch, and its anchors; see [`headless`].
fn gap_in_the_log() -> World {
    let world = headless();
    let batch = newest_batch(&world, false, 1);
    run(&world, flip(batch * 4096 + 100));
    world
}

async fn contents(store: &Store) -> Vec<Option<u8>> {
    let mut found = Vec::new();
    for name in ["a", "b", "c"] {
        found.push(first_byte(store, name).await);
    }
    found
}

/// Loss scenario, and the contents that remain after discarding the lost data.
struct Loss {
    name: &'static str,
    make: fn() -> World,
    /// First bytes of "a", "b" and "c".
    remains: [Option<u8>; 3],
}

const LOSSES: [Loss; 4] = [
    Loss { name: "one table", make: || unusable_checkpoint(false), remains: [Some(1), Some(1), None] },
    Loss {
        name: "one table and the superblocks",
        make: || unusable_checkpoint(true),
        remains: [Some(1), Some(1), None],
    },
    Loss { name: "four tables", make: unusable_checkpoints, remains: [Some(1), None, None] },
    Loss { name: "a batch and the head", make: gap_in_the_log, remains: [Some(1), None, None] },
];

/// Returns the anchor at each anchor location, if it is valid.
fn anchors_there(world: &World) -> Vec<Option<Anchor>> {
    anchors().into_iter().map(|at| Anchor::decode_any(&world.peek(DISK, at, 4096).expect("peek")).ok()).collect()
}

fn has_superblock(world: &World) -> bool {
    COPIES.iter().any(|&at| StoreSuperblock::decode(&world.peek(DISK, at, 4096).expect("peek")).is_ok())
}

/// Rebuilds a store and discards the lost data, with a power failure at the `point`th point; then opens it, or rebuilds
/// it again if it is unchanged.  Returns whether the power failed.
fn give_up_with_a_crash(loss: &Loss, point: u64) -> bool {
    let (world, what) = ((loss.make)(), format!("{}, point {point}", loss.name));
    let before = anchors_there(&world);
    world.crash_at_point(Some(world.points() + point));
    let reactor = world.reactor();
    let ended = world.run(&reactor, async {
        check(true, true).await.expect("a report");
    });
    world.crash(reactor, CrashKind::Power);
    world.crash_at_point(None);
    // The first written copy of an anchor is decisive.
    let written = anchors_there(&world).iter().zip(&before).any(|(now, before)| now.is_some() && now != before);
    let is_decided = written && has_superblock(&world);
    run(&world, async {
        let store = match open().await {
            Ok(store) => store,
            Err(error) => {
                assert!(!is_decided, "{what}: {error}");
                let again = check(true, true).await.unwrap_or_else(|again| panic!("{what}: {error}, then {again}"));
                // One copy of the superblock is sufficient; `--repair` rewrites the other.
                let damage = |finding: &&Finding| !finding.repaired && !finding.place.starts_with("superblock");
                assert_eq!(again.findings.iter().find(damage), None, "{what}: {error}, then {again:?}");
                open().await.unwrap_or_else(|again| panic!("{what}: {error}, then {again}"))
            }
        };
        assert_eq!(contents(&store).await, loss.remains, "{what}");
        write(&store, "d", 4).await;
        // Interrupted, not closed.
    });
    // Discarded data stays discarded, even if only the log remains.
    run(&world, async {
        wipe(&everything(), 0).await;
        let report = check(true, false).await.unwrap_or_else(|error| panic!("{what}: {error}"));
        let rebuilt = report.rebuild.as_ref().expect("a rebuild");
        assert!(rebuilt.written && rebuilt.lost.is_empty(), "{what}: {rebuilt:?}");
        let store = open().await.unwrap_or_else(|error| panic!("{what}: {error}"));
        assert_eq!(contents(&store).await, loss.remains, "{what}");
        assert_eq!(first_byte(&store, "d").await, Some(4), "{what}");
        store.close().await.expect("close");
        drop(store);
        let report = check(false, false).await.expect("check");
        assert!(report.is_clean(), "{what}: {report:?}");
    });
    ended.is_err()
}

#[test]
fn what_is_given_up_stays_so_wherever_the_power_fails() {
    for loss in &LOSSES {
        let crashes = (1..).take_while(|&point| give_up_with_a_crash(loss, point));
        assert!(crashes.count() > 10, "{}: the power never failed", loss.name);
    }
}

#[test]
fn a_newest_checkpoint_that_cannot_be_opened_is_given_up_only_when_asked() {
    // Superblocks and anchors are intact, but the segment tables are unreadable.
    for unreadable in [false, true] {
        let world = two_openings();
        let table = newest_anchor(&world).0.segments.addr;
        match unreadable {
            true => assert!(world.set_bad_sector(DISK, table / 4096 * 4096)),
            false => run(&world, flip(table)),
        }
        let before = head(&world);
        run(&world, async {
            open().await.err().expect("its newest checkpoint cannot be opened");
            check(false, false).await.expect_err("nor checked");
            let report = check(true, false).await.expect("a report");
            let rebuilt = report.rebuild.as_ref().expect("a rebuild");
            let told = rebuilt.lost.iter().any(|lost| lost.contains("cannot be used"));
            assert!(!rebuilt.written && told, "{rebuilt:?}");
        });
        assert!(head(&world) == before, "nothing was written");
        run(&world, async {
            let report = check(true, true).await.expect("a report");
            assert!(report.rebuild.as_ref().is_some_and(|rebuilt| rebuilt.written) && report.is_clean(), "{report:?}");
            let store = open().await.expect("open");
            // The unreadable batch is part of the log that the previous checkpoint needs.
            let b = Some(1).filter(|_| !unreadable);
            assert_eq!(contents(&store).await, [Some(1), b, None]);
            store.close().await.expect("close");
        });
    }
}

/// Moment of a rebuild at which reads begin to fail temporarily.
#[derive(Debug, Clone, Copy)]
enum Disturbed {
    /// Time after the beginning of the rebuild.
    After(Duration),
    /// After the scan of the log.
    AfterWalk,
}

#[test]
fn a_read_error_that_passes_costs_nothing() {
    let no_reads = || DiskFaults { read_error_ppm: 1_000_000, ..DiskFaults::none() };
    let steps = || (0..60).map(|step| Duration::from_micros(50 * step));
    let whole = steps().map(|time| (false, Disturbed::After(time)));
    let headless = steps().map(|time| (true, Disturbed::After(time))).chain([(true, Disturbed::AfterWalk)]);
    for (headless, moment) in whole.chain(headless) {
        let what = format!("headless {headless}, {moment:?}");
        let world = machine(SIZE, Faults::none());
        run(&world, async {
            init(false).await.expect("init");
            for name in ["a", "b"] {
                let store = open().await.expect("open");
                write(&store, name, 1).await;
                store.close().await.expect("close");
            }
            if headless {
                wipe(&everything(), 0).await;
            }
        });
        let before = head(&world);
        run(&world, async {
            let disturb = |after: Duration| {
                let world = world.clone();
                spawn(async move {
                    sleep(after).await;
                    assert!(world.set_disk_faults(DISK, Some(no_reads())));
                    sleep(Duration::from_millis(100)).await;
                    assert!(world.set_disk_faults(DISK, None));
                })
            };
            let mut disturbed = match moment {
                Disturbed::After(time) => Some(disturb(time)),
                Disturbed::AfterWalk => None,
            };
            let options = CheckOptions { data: true, rebuild: true, roll_back: true, ..CheckOptions::default() };
            let progress = |done, all| {
                if done == all && disturbed.is_none() {
                    assert!(world.set_disk_faults(DISK, Some(no_reads())));
                    disturbed = Some(disturb(Duration::ZERO));
                }
            };
            match Store::check(DISK, options, progress).await {
                Ok(report) => {
                    let lost = report.rebuild.map(|rebuilt| rebuilt.lost).unwrap_or_default();
                    let given_up = lost.iter().find(|lost| lost.contains("cannot be used") || lost.contains("blocks"));
                    assert_eq!(given_up, None, "{what}");
                }
                Err(error) => assert_eq!(error.kind(), ErrorKind::Io, "{what}: {error}"),
            }
            disturbed.expect("the log was walked").await;
            if head(&world) == before {
                check(true, false).await.unwrap_or_else(|error| panic!("{what}: {error}"));
            }
            let store = open().await.unwrap_or_else(|error| panic!("{what}: {error}"));
            assert_eq!(contents(&store).await, [Some(1), Some(1), None], "{what}");
            store.close().await.expect("close");
        });
    }
}

#[test]
fn a_file_that_was_cut_short_is_not_rebuilt() {
    // With and without superblocks.
    for world in [unusable_checkpoint(false), headless()] {
        let before = head(&world);
        run(&world, async {
            let disk = File::open(DISK, OpenOptions::read_write().direct()).expect("the disk");
            disk.set_size(SIZE - (1 << 20)).expect("shorter");
            disk.sync_data().await.expect("sync");
            drop(disk);
            let error = check(true, true).await.expect_err("it was cut short");
            assert!(error.to_string().contains("cut short"), "{error}");
        });
        assert!(head(&world) == before, "nothing was written");
    }
}
