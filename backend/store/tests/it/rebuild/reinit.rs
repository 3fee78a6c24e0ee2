//! Tests on a device that held another store before, with a different segment size: its batches are never taken for
//! those of the current store.

use forebay_store::format::superblock::SEGMENTS_START;

use super::*;

/// Segment sizes of the first store and of the one created over it, in bytes.
const SHAPES: [(u32, u32); 4] =
    [(256 << 10, 64 << 10), (64 << 10, 256 << 10), (128 << 10, 64 << 10), (64 << 10, 128 << 10)];

async fn init_with(segment_size: u32) {
    let options = InitOptions { size: SIZE, segment_size, force: true, ..InitOptions::default() };
    Store::init(DISK, options).await.expect("init");
}

/// Returns a device with a store that has "b", created over one that has written 120 objects "a0" to "a119".
fn reinitialized(seed: u64, (before, now): (u32, u32)) -> World {
    let world = World::new(seed, Faults::none());
    world.add_disk(DISK, SIZE, 4096);
    run(&world, async {
        init_with(before).await;
        for life in 0..4 {
            let store = open().await.expect("open");
            for i in life * 30..(life + 1) * 30 {
                write(&store, &format!("a{i}"), 1).await;
            }
            store.close().await.expect("close");
        }
        init_with(now).await;
        for byte in 1..=2 {
            let store = open().await.expect("open");
            write(&store, "b", byte).await;
            store.close().await.expect("close");
        }
    });
    world
}

#[test]
fn a_store_is_rebuilt_with_its_own_segments_and_not_those_of_the_one_before_it() {
    for (i, shape) in SHAPES.into_iter().enumerate() {
        for seed in 0..3 {
            // The superblock or an anchor identifies the current store.
            for lost in [anchors(), SLOTS[0].to_vec(), SLOTS[1].to_vec(), COPIES.to_vec()] {
                let what = format!("segments {shape:?}, seed {seed}, lost {lost:?}");
                let world = reinitialized(10 * i as u64 + seed, shape);
                run(&world, async {
                    wipe(&lost, 0xAA).await;
                    if seed > 0 {
                        // No longer needed, but segments of any size begin here.
                        wipe(&[SEGMENTS_START], 0xAA).await;
                    }
                    let report = check(true, false).await.unwrap_or_else(|error| panic!("{what}: {error}"));
                    let rebuilt = report.rebuild.as_ref().expect("a rebuild");
                    assert!(rebuilt.written && rebuilt.lost.is_empty(), "{what}: {rebuilt:?}");
                    assert_eq!(rebuilt.segment_size, u64::from(shape.1), "{what}");
                    assert!(rebuilt.batches_of_others > 0, "{what}: {rebuilt:?}");
                    let store = open().await.unwrap_or_else(|error| panic!("{what}: {error}"));
                    assert_eq!(
                        (first_byte(&store, "a0").await, first_byte(&store, "b").await),
                        (None, Some(2)),
                        "{what}"
                    );
                    store.close().await.expect("close");
                    drop(store);
                    let report = check(false, false).await.expect("check");
                    assert!(report.is_clean() && report.objects == 1, "{what}: {report:?}");
                });
            }
        }
    }
}

#[test]
fn nothing_is_rebuilt_unasked_where_only_the_log_tells_of_two_stores() {
    for (i, shape) in SHAPES.into_iter().enumerate() {
        for seed in 0..3 {
            let world = reinitialized(10 * i as u64 + seed, shape);
            run(&world, wipe(&everything(), 0));
            let before = head(&world);
            run(&world, async {
                match check(true, false).await {
                    // Records of both stores were found.
                    Err(error) => assert!(error.to_string().contains("several stores"), "{error}"),
                    // The segments of one store hide the records of the other.
                    Ok(report) => {
                        let rebuilt = report.rebuild.as_ref().expect("a rebuild");
                        assert!(!rebuilt.written && rebuilt.batches_of_others > 0, "segments {shape:?}: {rebuilt:?}");
                        let told = rebuilt.lost.iter().any(|lost| lost.contains("of other stores"));
                        assert!(told && !report.is_clean(), "segments {shape:?}: {rebuilt:?}");
                    }
                }
            });
            assert!(head(&world) == before, "segments {shape:?}: nothing was written");
        }
    }
}

#[test]
fn batches_of_the_store_before_do_not_tell_of_a_later_life() {
    for (i, shape) in SHAPES.into_iter().enumerate() {
        for slot in SLOTS {
            let what = format!("segments {shape:?}, slot {slot:?}");
            let world = reinitialized(10 * i as u64, shape);
            run(&world, async {
                wipe(&slot, 0xAA).await;
                let store = open().await.unwrap_or_else(|error| panic!("{what}: {error}"));
                assert_eq!((first_byte(&store, "a0").await, first_byte(&store, "b").await), (None, Some(2)), "{what}");
                store.close().await.expect("close");
            });
        }
    }
}
