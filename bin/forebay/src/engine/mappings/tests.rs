use std::fs;
use std::io;
use std::rc::{Rc, Weak};
use std::sync::atomic::{AtomicU32, Ordering};

use forebay_reactor::{DriverChoice, Reactor, spawn};

use super::kernel::{LinkEvent, LinkEventSource};
use super::supervise::{MappingUpkeep, supervise};
use super::*;
use crate::api::{CreateImageRequest, UpdateImageRequest};
use crate::engine::testing::{engine, until};
use crate::ops::ProgressSink;
use crate::spec::{GroupSnapshotSpec, GroupSpec, SnapshotSpec};

/// Number of a device that no machine has.
const NO_DEVICE: u32 = 1_048_577;

fn run<F: Future<Output = ()>>(test: impl FnOnce() -> F) {
    Reactor::system(DriverChoice::Auto).expect("a reactor").block_on(test());
}

fn spec(name: &str) -> ImageSpec {
    format!("local/{name}").parse().expect("a spec")
}

fn progress() -> ProgressSink {
    ProgressSink::channel().0
}

fn record(name: &str) -> MappingRecord {
    MappingRecord {
        pool: "local".into(),
        image: name.into(),
        image_id: None,
        backend: format!("forebay:local/{name}:0"),
        boot: "another".into(),
        device: Some(NO_DEVICE),
        connections: 1,
        owns_export: false,
    }
}

/// Adds a mapping as if the kernel had its device.
fn mapped(engine: &Engine, name: &str) -> Rc<Mapping> {
    let mapping = Mapping::new(spec(name), record(name));
    engine.mappings.mappings.borrow_mut().insert(spec(name), mapping.clone());
    mapping
}

async fn create(engine: &Rc<Engine>, name: &str) {
    let request = CreateImageRequest {
        pool: "local".into(),
        image: name.into(),
        size: 1 << 20,
        object_size: 1 << 20,
        stripe_unit: None,
        stripe_count: None,
        features: None,
        data_pool: None,
        compression: None,
        encrypt: false,
    };
    engine.clone().create_image(request).await.expect("an image");
}

#[test]
fn a_mapped_image_is_neither_removed_nor_renamed_nor_rolled_back() {
    let dir = tempfile::tempdir().expect("a directory");
    run(|| async {
        let engine = engine(dir.path()).await;
        create(&engine, "x").await;
        let snapshot = SnapshotSpec::new(spec("x"), "s").expect("a spec");
        engine.create_snapshot(&snapshot).await.expect("a snapshot");
        let group: GroupSpec = "local/g".parse().expect("a spec");
        engine.create_group(&group).await.expect("a group");
        engine.add_to_group(&group, &spec("x")).await.expect("added");
        let of_group = GroupSnapshotSpec::new(group.clone(), "s").expect("a spec");
        engine.create_group_snapshot(&of_group).await.expect("a snapshot");
        mapped(&engine, "x");
        let refused = |failure: Failure| {
            assert_eq!(failure.kind, FailureKind::Busy, "{failure}");
            assert!(failure.message.contains("local/x is mapped to /dev/nbd"), "{failure}");
            assert!(failure.hint.is_some_and(|hint| hint.contains("forebay unmap local/x")));
        };
        refused(engine.remove_image(&spec("x"), progress()).await.expect_err("rm"));
        let renamed = UpdateImageRequest { size: None, allow_shrink: false, name: Some("y".into()) };
        refused(engine.update_image(&spec("x"), renamed.clone(), progress()).await.expect_err("mv"));
        refused(engine.move_to_trash(&spec("x"), None).await.expect_err("trash mv"));
        refused(engine.roll_back(&snapshot, progress()).await.expect_err("snap rollback"));
        refused(engine.roll_back_group(&of_group, progress()).await.expect_err("group snap rollback"));

        engine.clone().unmap(&spec("x"), false).await.expect("unmapped");
        engine.roll_back(&snapshot, progress()).await.expect("rolled back");
        engine.update_image(&spec("x"), renamed, progress()).await.expect("renamed");

        // A command without a daemon finds that the kernel has no such device, as after a reboot.
        mapped(&engine, "y");
        engine.mappings.mark_stale();
        let snapshot = SnapshotSpec::new(spec("y"), "s").expect("a spec");
        engine.roll_back(&snapshot, progress()).await.expect("rolled back");
        engine.close().await.expect("closed");
    });
}

#[test]
fn a_device_is_connected_to_the_image_with_the_same_id_only() {
    let dir = tempfile::tempdir().expect("a directory");
    run(|| async {
        let engine = engine(dir.path()).await;
        create(&engine, "x").await;
        let mapping = mapped(&engine, "x");
        let failure = engine.bind_image(&mapping).await.expect_err("not open");
        assert_eq!(failure.kind, FailureKind::NotFound);
        let volume = engine.open_volume(&spec("x")).await.expect("open");
        // A record of a build that did not store the id.
        engine.bind_image(&mapping).await.expect("bound");
        let id = volume.image.id().to_owned();
        let stored = record::load(dir.path()).expect("stored");
        assert_eq!(stored[0].image_id.as_ref(), Some(&id));
        engine.bind_image(&mapping).await.expect("bound still");
        drop(volume);

        // As another client removes an image: it knows of no mappings.
        engine.mappings.mappings.borrow_mut().clear();
        engine.remove_image(&spec("x"), progress()).await.expect("removed");
        create(&engine, "x").await;
        engine.mappings.mappings.borrow_mut().insert(spec("x"), mapping.clone());
        let volume = engine.open_volume(&spec("x")).await.expect("open");
        let failure = engine.bind_image(&mapping).await.expect_err("another image");
        assert!(failure.message.contains(&id) && failure.message.contains(volume.image.id()), "{failure}");
        assert_eq!(mapping.record.borrow().image_id.as_ref(), Some(&id), "it stays with the image that was mapped");
        drop(volume);
        engine.close().await.expect("closed");
    });
}

#[test]
fn a_mapping_whose_removal_cannot_be_recorded_can_be_unmapped_again() {
    let dir = tempfile::tempdir().expect("a directory");
    run(|| async {
        let engine = engine(dir.path()).await;
        mapped(&engine, "x");
        let file = record::path_in(dir.path());
        fs::create_dir_all(file.join("in the way")).expect("a directory");
        let failure = engine.clone().unmap(&spec("x"), false).await.expect_err("not recorded");
        assert!(failure.message.contains("mappings.json"), "{failure}");
        assert!(failure.hint.is_some_and(|hint| hint.contains("forebay unmap local/x")));
        assert!(engine.mappings.get(&spec("x")).is_some());
        fs::remove_dir_all(&file).expect("removed");
        engine.clone().unmap(&spec("x"), false).await.expect("unmapped");
        assert!(engine.mappings.get(&spec("x")).is_none());
        assert_eq!(record::load(dir.path()).expect("loaded"), []);
        engine.close().await.expect("closed");
    });
}

#[test]
fn timeouts_are_bounded() {
    let dir = tempfile::tempdir().expect("a directory");
    run(|| async {
        let engine = engine(dir.path()).await;
        let request = |timeout_s, reconnect_timeout_s| MapRequest {
            pool: "local".into(),
            image: "x".into(),
            read_only: false,
            connections: 1,
            timeout_s,
            reconnect_timeout_s,
        };
        for (request, text) in [
            (request(TIMEOUT_MAX_S + 1, 0), "--timeout 86401: at most 86400 seconds"),
            (request(0, u64::MAX), "--reconnect-timeout 18446744073709551615: at most 2592000 seconds"),
        ] {
            let failure = engine.clone().map(request).await.expect_err("too long");
            assert_eq!(failure.kind, FailureKind::Invalid);
            assert!(failure.message.contains(text), "{failure}");
        }
        let failure = engine.clone().map(request(TIMEOUT_MAX_S, RECONNECT_TIMEOUT_MAX_S)).await.expect_err("no daemon");
        assert_eq!(failure.kind, FailureKind::Denied, "{failure}");
        engine.close().await.expect("closed");
    });
}

#[test]
fn a_mapping_that_waits_does_not_hold_up_others_at_the_start() {
    let dir = tempfile::tempdir().expect("a directory");
    run(|| async {
        let engine = engine(dir.path()).await;
        mapped(&engine, "first");
        mapped(&engine, "second");
        let turn = engine.mappings.turns.lock(&spec("first")).await;
        let resumed = spawn(engine.clone().resume_mappings());
        until(|| engine.mappings.get(&spec("second")).is_none()).await;
        assert!(engine.mappings.get(&spec("first")).is_some());
        drop(turn);
        resumed.await;
        assert!(engine.mappings.get(&spec("first")).is_none(), "its device is gone");
        engine.close().await.expect("closed");
    });
}

/// Number of subscriptions of the test below.
static SUBSCRIBED: AtomicU32 = AtomicU32::new(0);

/// Fails at once the first time, and has an event the second time.
struct FailingEvents(u32);

impl LinkEventSource for FailingEvents {
    fn next(&mut self) -> io::Result<Option<LinkEvent>> {
        match self.0 {
            0 => Err(io::Error::other("lost")),
            _ => {
                std::thread::yield_now();
                Ok(Some(LinkEvent::Dead(NO_DEVICE)))
            }
        }
    }
}

#[test]
fn events_are_subscribed_to_again_when_their_receiver_fails() {
    let dir = tempfile::tempdir().expect("a directory");
    run(|| async {
        let engine = engine(dir.path()).await;
        let mapping = mapped(&engine, "x");
        engine.mappings.subscribe.set(|| match SUBSCRIBED.fetch_add(1, Ordering::SeqCst) {
            // The second attempt to subscribe fails.
            1 => Err(Failure::failed("no socket")),
            count => Ok(Some(Box::new(FailingEvents(count)))),
        });
        engine.watch_links().await.expect("subscribed");
        until(|| SUBSCRIBED.load(Ordering::SeqCst) == 3 && mapping.is_dead.get()).await;
        // By an event, and not only since events were lost.
        mapping.is_dead.set(false);
        until(|| mapping.is_dead.get()).await;
        engine.closing.set(true);
        engine.close().await.expect("closed");
    });
}

/// Device whose first resizes fail.
#[derive(Default)]
struct FailingResizes {
    failures: Cell<u32>,
    resized: Cell<u32>,
    reconnected: Cell<u32>,
}

impl MappingUpkeep for FailingResizes {
    fn is_closing(&self) -> bool {
        false
    }

    async fn reconnect(&self, _: &Rc<Mapping>) -> Result<bool> {
        self.reconnected.set(self.reconnected.get() + 1);
        Ok(true)
    }

    async fn resize(&self, _: &Rc<Mapping>) -> Result<()> {
        match self.failures.get() {
            0 => self.resized.set(self.resized.get() + 1),
            left => {
                self.failures.set(left - 1);
                return Err(Failure::failed("the kernel is busy"));
            }
        }
        Ok(())
    }
}

#[test]
fn a_resize_that_fails_is_tried_again() {
    run(|| async {
        let device = Rc::new(FailingResizes { failures: Cell::new(2), ..FailingResizes::default() });
        let mapping = Mapping::new(spec("x"), record("x"));
        let weak: Weak<FailingResizes> = Rc::downgrade(&device);
        let supervised = spawn(supervise(weak, mapping.clone()));
        mapping.is_resized.set(true);
        mapping.wake.notify_all();
        until(|| device.resized.get() == 1).await;
        assert!(!mapping.is_resized.get());
        assert_eq!(device.reconnected.get(), 0, "its connections are as they were");
        mapping.mark_dead();
        until(|| device.reconnected.get() == 1).await;
        mapping.end();
        supervised.await;
    });
}
