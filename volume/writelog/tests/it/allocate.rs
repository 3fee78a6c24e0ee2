//! Logs that cannot be allocated, or whose creation is abandoned: no remains are left.

use std::future::Future;
use std::path::Path;
use std::rc::Rc;
use std::time::Duration;

use forebay_block::{Buf, ErrorKind};
use forebay_reactor::{File, OpenOptions, sleep, timeout};
use forebay_sim::{Faults, World};
use forebay_writelog::{MediumKind, Shelf, ShelfOptions};

const FILE: &str = "/logs/new";

fn on_files<Fut: Future<Output = ()>>(capacity: u64, test: impl FnOnce() -> Fut) {
    let world = World::new(1, Faults { files_capacity: Some(capacity), ..Faults::none() });
    let reactor = world.reactor();
    world.run(&reactor, async { test().await }).expect("it ends");
}

async fn open() -> Rc<Shelf> {
    let options = ShelfOptions { create: true, ..ShelfOptions::default() };
    Shelf::open(MediumKind::Ssd, Path::new(FILE), options).await.expect("a file for logs")
}

/// Returns the length of the file in bytes; `None` if it does not exist.
fn length() -> Option<u64> {
    File::open(FILE, OpenOptions::read()).ok().map(|file| file.info().size)
}

async fn until(holds: impl Fn() -> bool) {
    while !holds() {
        sleep(Duration::from_millis(1)).await;
    }
}

#[test]
fn a_file_made_for_a_log_that_does_not_fit_is_removed() {
    on_files(40 << 20, async || {
        let shelf = open().await;
        assert!(length().is_some());
        let refused = shelf.create("one", "local/a", 64 << 20, 0).await.expect_err("too much");
        assert_eq!(refused.kind(), ErrorKind::NoSpace);
        assert!(shelf.is_removed() && length().is_none(), "{:?} bytes are left", length());
        // No log is created in a file without a name.
        assert_eq!(shelf.create("one", "local/a", 16 << 20, 0).await.expect_err("gone").kind(), ErrorKind::Busy);
        // The entire space can be reused.
        let id = open().await.create("one", "local/a", 32 << 20, 0).await.expect("space");
        assert_eq!(open().await.ids(), [id]);
    });
}

#[test]
fn a_file_with_logs_is_cut_to_what_it_was() {
    on_files(40 << 20, async || {
        let shelf = open().await;
        let one = shelf.create("one", "local/a", 16 << 20, 0).await.expect("space");
        let before = length();
        for _ in 0..2 {
            let refused = shelf.create("two", "local/b", 32 << 20, 0).await.expect_err("too much");
            assert_eq!((refused.kind(), length()), (ErrorKind::NoSpace, before));
        }
        let two = shelf.create("two", "local/b", 18 << 20, 0).await.expect("what is left");
        assert_eq!(shelf.ids(), [one, two]);
    });
}

#[test]
fn a_log_that_nobody_waits_for_is_given_up() {
    // From before the first allocation to after the last one.
    for wait in (0..40).map(|step| Duration::from_micros(50 << (step / 2))) {
        on_files(80 << 20, async move || {
            let shelf = open().await;
            let Err(_) = timeout(wait, shelf.create("one", "local/a", 64 << 20, 0)).await else {
                assert_eq!(shelf.ids().len(), 1);
                return;
            };
            until(|| shelf.is_removed()).await;
            assert_eq!((shelf.ids().len(), length()), (0, None));
            open().await.create("two", "local/b", 64 << 20, 0).await.expect("all of the space");
        });
    }
}

#[test]
fn a_file_that_another_process_makes_meanwhile_is_not_removed() {
    const OTHER: &str = "/logs/other";
    let world = World::new(1, Faults::none());
    let reactor = world.reactor();
    let ran = world.run(&reactor, async {
        let file = File::open(OTHER, OpenOptions::read_write().create()).expect("made");
        file.write_at(Buf::copy_of(&[7; 4096]), 0).await.expect("written");
        drop(file);
        // Between the failed open and the creation of the file.
        world.rename_late(OTHER, FILE);
        let options = ShelfOptions { create: true, ..ShelfOptions::default() };
        let refused =
            Shelf::open(MediumKind::Ssd, Path::new(FILE), options).await.err().expect("no logs are kept there");
        assert_eq!(refused.kind(), ErrorKind::Invalid, "{refused}");
        assert_eq!(length(), Some(4096), "what another process has made is gone");
        // Likewise a file with a log: it is not new, and stays when no second log can be created in it.
        forebay_reactor::fs::remove_file(FILE).expect("there");
        let other = Shelf::open(MediumKind::Ssd, Path::new(OTHER), options).await.expect("a file for logs");
        drop(other);
        world.rename_late(OTHER, FILE);
        let shelf = Shelf::open(MediumKind::Ssd, Path::new(FILE), options).await.expect("a file for logs");
        shelf.create("one", "local/a", 1 << 10, 0).await.expect_err("too small");
        assert!(!shelf.is_removed() && length().is_some(), "a file of another process is gone");
    });
    ran.expect("it ends");
}
