//! The exclusive lock of an image that several clients use at once, watches, and the blocklist.

use std::cell::Cell;
use std::io;
use std::rc::Rc;
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Duration;

use crate::common::cluster::{
    OBJECT, POOL, check_map, cluster, create_and_open, kind, names, of_size, open, read, two_clients, until, write,
};
use crate::common::{bytes, pattern, run};
use forebay_block::{BlockDevice, BlockRequest, ErrorKind, Extent, ObjectBackend, ObjectName, ObjectOp, Transaction};
use forebay_image::{Image, Images, RemoveOptions};
use forebay_reactor::{sleep, spawn, yield_now};
use tracing::Dispatch;
use tracing::subscriber::NoSubscriber;
use tracing_subscriber::fmt::MakeWriter;

/// Wait for handles in use.
const PATIENCE: Duration = Duration::from_millis(200);

#[test]
fn the_lock_goes_to_whoever_writes() {
    for seed in 0..6 {
        run(async {
            let cluster = cluster(seed * 77 + 1, 2 * seed);
            let (a, b) = (cluster.client().pool(POOL), cluster.client().pool(POOL));
            forebay_image::create(&a, "vm", of_size(16 * OBJECT)).await.expect("created");
            let id = forebay_image::info(&b, "vm").await.expect("info").id;
            let (one, two) = (open(&a, "vm").await, open(&b, "vm").await);
            let mut expected = vec![0; 16 * OBJECT as usize];
            for round in 0..12u64 {
                let image = if round % 3 == 0 { &two } else { &one };
                let at = round * OBJECT + 77 * round;
                write(image, at, &pattern(round as u8, 70_000)).await;
                expected[at as usize..at as usize + 70_000].copy_from_slice(&pattern(round as u8, 70_000));
                let cut = Extent::new(((round * 7) % 15) * OBJECT, OBJECT);
                image.submit(BlockRequest::Discard(cut)).await.expect("a discard");
                expected[cut.offset as usize..cut.end() as usize].fill(0);
                assert!(read(&one, 0, 16 * OBJECT).await == expected, "round {round}");
                assert!(read(&two, 0, 16 * OBJECT).await == expected, "round {round}");
                check_map(&*cluster.bare(POOL), &id).await;
            }
            assert_eq!(kind(forebay_image::remove(&a, "vm", |_| {}).await), Some(ErrorKind::Busy), "open elsewhere");
            one.close().await;
            assert_eq!(kind(forebay_image::remove(&a, "vm", |_| {}).await), Some(ErrorKind::Busy), "open elsewhere");
            two.close().await;
            forebay_image::remove(&a, "vm", |_| {}).await.expect("removed");
            assert_eq!(names(&*cluster.bare(POOL)).await, ["rbd_directory"]);
            assert_eq!(cluster.blocklisted(), [""; 0]);
        });
    }
}

#[test]
fn images_are_given_up_when_all_of_a_pool_are_closed() {
    for seed in 0..4 {
        run(async {
            let cluster = cluster(seed * 13 + 5, 3 * seed);
            let (a, b) = (cluster.client().pool(POOL), cluster.client().pool(POOL));
            let image = create_and_open(&a, "vm", 4 * OBJECT).await;
            write(&image, 0, b"held").await;
            let mut kept = None;
            // Dropped before, meanwhile, or not at all.
            match seed {
                0 => drop(image),
                1 => drop(spawn(async move {
                    sleep(PATIENCE / 2).await;
                    drop(image);
                })),
                _ => kept = Some(image),
            }
            Images::close_all(&a, PATIENCE).await;
            if let Some(image) = &kept {
                let write = BlockRequest::Write { offset: 0, data: bytes(b"late"), fua: false };
                assert_eq!(kind(image.submit(write).await), Some(ErrorKind::ShuttingDown));
            }
            // Neither a watch nor a lock is left, which would prevent the removal.
            forebay_image::remove(&b, "vm", |_| {}).await.expect("removed");
            assert_eq!(cluster.blocklisted(), [""; 0]);
        });
    }
}

#[test]
fn writes_of_two_clients_at_once_all_happen() {
    for seed in 0..6 {
        run(async {
            let cluster = cluster(seed * 13 + 5, 4);
            let (a, b) = (cluster.client().pool(POOL), cluster.client().pool(POOL));
            forebay_image::create(&a, "vm", of_size(64 * OBJECT)).await.expect("created");
            let images = [open(&a, "vm").await, open(&b, "vm").await];
            let mut tasks = Vec::new();
            for step in 0..40u64 {
                let image = images[(step % 2) as usize].clone();
                let data = pattern(step as u8, 4096);
                tasks.push(spawn(async move { write(&image, step * OBJECT + step * 512, &data).await }));
                if step % 5 == 0 {
                    yield_now().await;
                }
            }
            for task in tasks {
                task.await;
            }
            for step in 0..40u64 {
                let found = read(&images[1], step * OBJECT + step * 512, 4096).await;
                assert!(found == pattern(step as u8, 4096), "step {step}");
            }
            check_map(&*cluster.bare(POOL), images[0].id()).await;
        });
    }
}

#[test]
fn a_dead_owner_is_fenced_and_its_lock_broken() {
    run(async {
        let cluster = cluster(9, 1);
        let (dead, alive) = (cluster.client(), cluster.client());
        let (a, b) = (dead.pool(POOL), alive.pool(POOL));
        let one = create_and_open(&a, "vm", 4 * OBJECT).await;
        write(&one, 0, b"before").await;
        dead.die();
        cluster.expire_watches();
        let two = open(&b, "vm").await;
        write(&two, 6, b", after").await;
        assert_eq!(read(&two, 0, 13).await, b"before, after");
        assert_eq!(cluster.blocklisted(), [dead.address()]);
        check_map(&*cluster.bare(POOL), two.id()).await;
    });
}

#[test]
fn a_request_for_the_lock_that_is_lost_is_repeated() {
    run(async {
        let cluster = cluster(9, 1);
        let (a, b) = (cluster.client().pool(POOL), cluster.client().pool(POOL));
        let one = create_and_open(&a, "vm", 4 * OBJECT).await;
        write(&one, 0, b"before").await;
        let two = open(&b, "vm").await;
        cluster.lose_notifications(2);
        write(&two, 6, b", after").await;
        assert_eq!(read(&two, 0, 13).await, b"before, after");
        assert_eq!(cluster.blocklisted(), [""; 0]);
    });
}

#[test]
fn a_fenced_client_writes_no_more() {
    run(async {
        let cluster = cluster(9, 1);
        let (fenced, other) = (cluster.client(), cluster.client());
        let (a, b) = (fenced.pool(POOL), other.pool(POOL));
        let one = create_and_open(&a, "vm", 4 * OBJECT).await;
        write(&one, 0, b"before").await;
        b.shared().expect("shared").blocklist(&fenced.address(), None).await.expect("fenced");
        let late = BlockRequest::Write { offset: OBJECT, data: bytes(b"late"), fua: false };
        assert_eq!(kind(one.submit(late).await), Some(ErrorKind::Fenced));
        assert_eq!(kind(one.submit(BlockRequest::Read(Extent::new(0, 1))).await), Some(ErrorKind::Fenced));
    });
}

#[test]
fn fencing_the_owner_of_the_lock_breaks_it_at_once() {
    run(async {
        let cluster = cluster(9, 1);
        let (fenced, other, third) = (cluster.client(), cluster.client(), cluster.client());
        let (a, b, c) = (fenced.pool(POOL), other.pool(POOL), third.pool(POOL));
        let one = create_and_open(&a, "vm", 4 * OBJECT).await;
        write(&one, 0, b"before").await;
        let kept = one.keep_lock();
        let two = open(&b, "vm").await;
        // Who does not hold the lock is fenced, and the lock stays.
        let bystander = c.shared().expect("shared").identity();
        two.fence(&bystander, Duration::from_secs(60)).await.expect("fenced");
        assert_eq!(cluster.blocklisted(), [third.address()]);
        assert!(kind(two.take_lock().await).is_some(), "its owner keeps it");
        // The owner is alive, and would keep it.
        two.fence(&one.client().expect("a client"), Duration::from_secs(60)).await.expect("fenced");
        assert_eq!(cluster.blocklisted().len(), 2);
        two.take_lock().await.expect("nobody's");
        write(&two, 6, b", after").await;
        assert_eq!(kind(one.submit(BlockRequest::Read(Extent::new(0, 1))).await), Some(ErrorKind::Fenced));
        assert_eq!(read(&two, 0, 13).await, b"before, after");
        drop(kept);
    });
}

#[test]
fn a_lock_taken_by_hand_is_left_alone() {
    run(async {
        let cluster = cluster(3, 0);
        let (a, b) = (cluster.client().pool(POOL), cluster.client().pool(POOL));
        let image = create_and_open(&a, "vm", OBJECT).await;
        let header = ObjectName::new(format!("rbd_header.{}", image.id()));
        let text = |text: &str| [&(text.len() as u32).to_le_bytes()[..], text.as_bytes()].concat();
        let body = [text("rbd_lock"), vec![1], text("mine"), text("tag"), text(""), vec![0; 9]].concat();
        let input = [&[1, 1][..], &(body.len() as u32).to_le_bytes(), &body].concat();
        let method = forebay_block::Method::new("lock", "lock");
        b.submit(&header, Transaction::of(ObjectOp::Call { method, input })).await.expect("locked");
        let refused = image.submit(BlockRequest::Write { offset: 0, data: bytes(b"x"), fua: false }).await;
        let error = refused.expect_err("somebody has locked it");
        assert_eq!(error.kind(), ErrorKind::Busy);
        assert!(error.to_string().contains("locked by hand, with the tag 'tag', by client."), "{error}");
        assert_eq!(read(&image, 0, 1).await, [0], "reading needs no lock");
    });
}

#[test]
fn a_watch_that_breaks_is_set_again_and_the_lock_kept() {
    run(async {
        let cluster = cluster(4, 2);
        let (_, [one, two]) = two_clients(&cluster, 4 * OBJECT).await;
        write(&one, 0, b"one").await;
        cluster.break_watches();
        until(|| cluster.watches() == 2).await;
        write(&one, 3, b"two").await;
        write(&two, 6, b"three").await;
        assert_eq!(read(&one, 0, 11).await, b"onetwothree");
        assert_eq!(cluster.blocklisted(), [""; 0], "nobody was taken for dead");
    });
}

#[test]
fn a_lock_that_is_kept_goes_to_nobody_who_asks() {
    run(async {
        let cluster = cluster(41, 2);
        let (_, [one, two]) = two_clients(&cluster, 4 * OBJECT).await;
        write(&two, 0, b"before").await;
        let (kept, also) = (one.keep_lock(), one.keep_lock());
        one.take_lock().await.expect("taken");
        let refused = || two.submit(BlockRequest::Write { offset: 0, data: bytes(b"other"), fua: false });
        let error = refused().await.expect_err("it is kept");
        assert_eq!(error.kind(), ErrorKind::Busy);
        assert!(error.to_string().contains("refuses to release it"), "{error}");
        assert_eq!(kind(two.take_lock().await), Some(ErrorKind::Busy), "by itself, too");
        drop(also);
        assert_eq!(kind(refused().await), Some(ErrorKind::Busy), "somebody keeps it still");
        // The lock moves with its owner to a new watch.
        cluster.break_watches();
        until(|| cluster.watches() == 2).await;
        assert_eq!(kind(refused().await), Some(ErrorKind::Busy), "under another name");
        write(&one, 0, b"ours").await;
        assert_eq!(read(&two, 0, 6).await, b"oursre", "reading needs no lock");
        drop(kept);
        write(&two, 0, b"theirs").await;
        assert_eq!(read(&one, 0, 6).await, b"theirs");
        assert_eq!(cluster.blocklisted(), [""; 0], "nobody was taken for dead");
    });
}

#[test]
fn a_lock_whose_taker_has_outdated_knowledge_is_given_back() {
    run(async {
        let cluster = cluster(43, 2);
        let (_, [one, two]) = two_clients(&cluster, 4 * OBJECT).await;
        write(&one, 0, b"ours").await;
        let (outdated, asked) = (Rc::new(Cell::new(true)), Rc::new(Cell::new(0)));
        let (said, counted) = (outdated.clone(), asked.clone());
        two.set_lock_check(Rc::new(move || {
            counted.set(counted.get() + 1);
            let result = if said.get() { Err(ErrorKind::Busy.into()) } else { Ok(()) };
            Box::pin(std::future::ready(result))
        }));
        let refused = two.submit(BlockRequest::Write { offset: 0, data: bytes(b"other"), fua: false }).await;
        assert_eq!((kind(refused), asked.get()), (Some(ErrorKind::Busy), 1));
        write(&one, 4, b"s again").await;
        assert_eq!(read(&two, 0, 11).await, b"ourss again", "nothing of the other has passed");
        outdated.set(false);
        write(&two, 0, b"theirs").await;
        write(&two, 6, b"!").await;
        assert_eq!(asked.get(), 2, "once each time that the lock is taken");
    });
}

#[test]
fn who_waits_for_a_lock_does_not_keep_an_image_from_being_closed() {
    run(async {
        let cluster = cluster(45, 1);
        let (a, b) = (cluster.client().pool(POOL), cluster.client().pool(POOL));
        forebay_image::create(&a, "vm", of_size(4 * OBJECT)).await.expect("created");
        // The dead owner does not respond, but its watch still exists.
        let dead = cluster.client();
        let image = open(&dead.pool(POOL), "vm").await;
        write(&image, 0, b"held").await;
        dead.die();
        let waiting = open(&b, "vm").await;
        waiting.take_lock_soon();
        yield_now().await;
        waiting.close().await;
        assert_eq!(cluster.blocklisted(), [""; 0], "nobody was taken for dead");
    });
}

/// Breaks the lock of an image whose owner is the only watcher, without fencing the owner.
async fn break_by_hand(image: &Image, other: &Rc<dyn ObjectBackend>) {
    let header = ObjectName::new(format!("rbd_header.{}", image.id()));
    let shared = other.shared().expect("shared");
    let owner = shared.watchers(&header).await.expect("watchers").remove(0);
    let text = |text: &str| [&(text.len() as u32).to_le_bytes(), text.as_bytes()].concat();
    let cookie = text(&format!("auto {}", owner.cookie));
    let body = [text("rbd_lock"), vec![8], owner.client.to_le_bytes().to_vec(), cookie].concat();
    let input = [vec![1, 1], (body.len() as u32).to_le_bytes().to_vec(), body].concat();
    let method = forebay_block::Method::new("lock", "break_lock");
    other.submit(&header, Transaction::of(ObjectOp::Call { method, input })).await.expect("broken");
}

#[test]
fn who_loses_a_lock_that_was_to_be_kept_writes_no_more() {
    run(async {
        let cluster = cluster(43, 1);
        let (a, b) = (cluster.client().pool(POOL), cluster.client().pool(POOL));
        let image = create_and_open(&a, "vm", 4 * OBJECT).await;
        let kept = image.keep_lock();
        image.take_lock().await.expect("taken");
        break_by_hand(&image, &b).await;
        cluster.break_watches();
        for _ in 0..1000 {
            let late = BlockRequest::Write { offset: 0, data: bytes(b"late"), fua: false };
            if kind(image.submit(late).await) == Some(ErrorKind::Fenced) {
                return drop(kept);
            }
            yield_now().await;
        }
        panic!("it wrote without the lock");
    });
}

#[test]
fn a_lock_is_given_up_when_writes_in_flight_have_ended() {
    for waited_for in [true, false] {
        run(async {
            let cluster = cluster(51, 0);
            let (a, b) = (cluster.client().pool(POOL), cluster.client().pool(POOL));
            forebay_image::create(&a, "vm", of_size(4 * OBJECT)).await.expect("created");
            let (one, two) = (open(&a, "vm").await, open(&b, "vm").await);
            write(&one, 0, b"before").await;
            let stall = cluster.stall(POOL, "rbd_data.");
            let late = one.submit(BlockRequest::Write { offset: 0, data: bytes(b"in flight"), fua: false });
            until(|| stall.waiting() == 1).await;
            // A dropped write continues.
            let late = Some(late).filter(|_| waited_for);
            let taken = Rc::new(Cell::new(false));
            let (told, taker) = (taken.clone(), two.clone());
            let taking = spawn(async move {
                taker.take_lock().await.expect("taken");
                told.set(true);
            });
            for _ in 0..1000 {
                yield_now().await;
                assert!(!taken.get(), "a write of its earlier owner is still in flight");
            }
            drop(stall);
            if let Some(late) = late {
                late.await.expect("it had the lock");
            }
            taking.await;
            assert_eq!(read(&two, 0, 9).await, b"in flight");
            // Objects removed by the next owner are not recreated.
            two.submit(BlockRequest::Discard(Extent::new(0, OBJECT))).await.expect("a discard");
            assert_eq!(read(&one, 0, 9).await, [0; 9]);
            check_map(&*cluster.bare(POOL), one.id()).await;
        });
    }
}

#[test]
fn a_forced_removal_gives_up_the_lock() {
    run(async {
        let cluster = cluster(8, 1);
        let a = cluster.client().pool(POOL);
        let image = create_and_open(&a, "vm", 4 * OBJECT).await;
        write(&image, 0, b"x").await;
        Images::of(&a).remove("vm", RemoveOptions { force: true }, |_| {}).await.expect("removed");
        assert_eq!(kind(image.submit(BlockRequest::Read(Extent::new(0, 1))).await), Some(ErrorKind::NotFound));
        assert_eq!(names(&*cluster.bare(POOL)).await, ["rbd_directory"]);
        assert_eq!(cluster.watches(), 0);
    });
}

/// Log lines from level info on.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl Log {
    /// Runs a test with its log: the lines of this thread.
    fn of(test: impl FnOnce(&Log)) {
        // With a single subscriber, a thread without one may disable lines for all threads.
        static ANOTHER: OnceLock<Dispatch> = OnceLock::new();
        ANOTHER.get_or_init(|| Dispatch::new(NoSubscriber::default()));
        let log = Log::default();
        let subscriber = tracing_subscriber::fmt().without_time().with_ansi(false).with_writer(log.clone()).finish();
        tracing::subscriber::with_default(subscriber, || test(&log));
    }

    /// Takes the lines about exclusive locks.
    fn take(&self) -> Vec<String> {
        let bytes = std::mem::take(&mut *self.0.lock().expect("no panic"));
        let text = String::from_utf8(bytes).expect("text");
        text.lines().filter(|line| line.contains("exclusive lock")).map(|line| line.trim().to_owned()).collect()
    }
}

impl io::Write for &Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().expect("no panic").extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl<'a> MakeWriter<'a> for Log {
    type Writer = &'a Log;

    fn make_writer(&'a self) -> &'a Log {
        self
    }
}

#[test]
fn a_lock_that_changes_hands_is_a_line_at_each_end() {
    Log::of(|log| {
        run(async {
            let cluster = cluster(4, 2);
            let (one, two) = (cluster.client(), cluster.client());
            let (a, b) = (one.pool(POOL), two.pool(POOL));
            let number = |pool: &Rc<dyn ObjectBackend>| pool.shared().expect("shared").identity().number;
            let first = create_and_open(&a, "vm", 4 * OBJECT).await;
            let second = open(&b, "vm").await;
            write(&first, 0, b"nobody had it").await;
            write(&first, 0, b"it is there still").await;
            assert_eq!(log.take(), [""; 0]);
            write(&second, 0, b"mine").await;
            let info = |what: &str| format!("INFO forebay_image::exclusive_lock: exclusive lock {what}");
            let (from, to) = (number(&a), number(&b));
            let taken = info(&format!(
                "taken over image=\"vm\" former_owner=\"client.{from} at {}\" fenced=false",
                one.address()
            ));
            assert_eq!(log.take(), [info(&format!("handed over image=\"vm\" new_owner=client.{to}")), taken]);
            // Dead owners do not hand the lock over.
            two.die();
            cluster.expire_watches();
            write(&first, 0, b"mine again").await;
            let dead = two.address();
            let taken = info(&format!("taken over image=\"vm\" former_owner=\"client.{to} at {dead}\" fenced=true"));
            assert_eq!(log.take(), [taken]);
        });
    });
}

#[test]
fn a_lock_that_is_lost_is_a_line_with_its_new_owner() {
    Log::of(|log| {
        run(async {
            let cluster = cluster(43, 1);
            let (one, two) = (cluster.client(), cluster.client());
            let (a, b) = (one.pool(POOL), two.pool(POOL));
            let image = create_and_open(&a, "vm", 4 * OBJECT).await;
            write(&image, 0, b"mine").await;
            break_by_hand(&image, &b).await;
            let other = open(&b, "vm").await;
            write(&other, 0, b"theirs").await;
            assert_eq!(log.take(), [""; 0], "nobody has handed anything over, or knows of it");
            cluster.break_watches();
            let owner = format!("client.{} at {}", b.shared().expect("shared").identity().number, two.address());
            let line = "INFO forebay_image::exclusive_lock: exclusive lock lost image=\"vm\" new_owner=";
            let line = format!("{line}\"{owner}\" reason=");
            let mut found = Vec::new();
            for _ in 0..1_000_000 {
                found.extend(log.take());
                if !found.is_empty() && cluster.watches() == 2 {
                    break;
                }
                yield_now().await;
            }
            assert!(found.len() == 1 && found[0].starts_with(&line), "{found:?}");
        });
    });
}
