//! Attachment of an image whose record another host has changed, and remains of a released log.

use std::cell::{Cell, RefCell};
use std::future::ready;
use std::rc::Rc;
use std::time::Duration;

use crate::common::{Gate, LONG, MILLISECOND, Memory, PATH, on_a_shelf, patience, read, write};
use forebay_block::{BlockDevice, BlockRequest, DataKey, Error, ErrorKind, Extent, LocalFuture, Result};
use forebay_reactor::{sleep, spawn, timeout};
use forebay_sim::{CrashKind, Faults, World};
use forebay_writelog::{
    LogAttachment, LogKeeper, LogOptions, LogRecord, MediumKind, Mode, Persist, PlaceChange, Shelf, ShelfOptions,
};

const PLACE: &str = "/logs:16M";
/// Same place with another limit.
const LIMITED: &str = "/logs:16M:dirty=1M";

/// Image that several hosts use.
struct SharedImage {
    base: Rc<Memory>,
    shelf: Rc<Shelf>,
    record: RefCell<LogRecord<&'static str>>,
    /// Number of reads of the record.
    loads: Cell<u64>,
    /// Host that holds the exclusive lock, and the number of its guards.
    owner: Cell<Option<(u8, usize)>>,
    persist: Cell<Persist>,
    /// Key of the image, if it is encrypted; or why it is unavailable.
    key: RefCell<Result<Option<DataKey>>>,
    /// Gate of stores of the record.
    storing: Gate,
    /// Gate of the completion of changes past the log.
    changing: Gate,
}

impl SharedImage {
    fn new(shelf: Rc<Shelf>) -> Rc<Self> {
        let (base, record) = (Memory::new(1 << 20), RefCell::default());
        let (persist, storing, changing) = (Cell::new(Persist::OnWrite), Gate::default(), Gate::default());
        let (loads, owner, key) = (Cell::new(0), Cell::new(None), RefCell::new(Ok(None)));
        Rc::new(Self { base, shelf, record, loads, owner, persist, key, storing, changing })
    }

    async fn open(self: &Rc<Self>, host: u8) -> LogAttachment<Host> {
        let keeper = Rc::new(Host { image: self.clone(), host });
        LogAttachment::open(keeper, self.base.clone()).await.expect("opened")
    }
}

/// Access of one host to the image.
struct Host {
    image: Rc<SharedImage>,
    host: u8,
}

/// Exclusive lock guard of a host.
struct Hold(Rc<SharedImage>);

impl Drop for Hold {
    fn drop(&mut self) {
        let owner = &self.0.owner;
        owner.set(owner.get().filter(|(_, holds)| *holds > 1).map(|(host, holds)| (host, holds - 1)));
    }
}

impl LogKeeper for Host {
    type Place = &'static str;
    type Lock = Hold;

    fn volume_id(&self) -> String {
        "one".into()
    }

    fn volume_name(&self) -> String {
        "pool/image".into()
    }

    fn load(&self) -> LocalFuture<Result<LogRecord<Self::Place>>> {
        self.image.loads.set(self.image.loads.get() + 1);
        Box::pin(ready(Ok(self.image.record.borrow().clone())))
    }

    fn store(&self, record: LogRecord<Self::Place>) -> LocalFuture<Result<()>> {
        let image = self.image.clone();
        Box::pin(async move {
            image.storing.waiting.set(image.storing.waiting.get() + 1);
            image.storing.opened.wait_until(|| !image.storing.closed.get()).await;
            image.storing.waiting.set(image.storing.waiting.get() - 1);
            image.record.replace(record);
            Ok(())
        })
    }

    fn lock(&self) -> LocalFuture<Result<Hold>> {
        let holds = match self.image.owner.get() {
            Some((owner, _)) if owner != self.host => {
                return Box::pin(ready(Err(Error::new(ErrorKind::Busy, "held by another host"))));
            }
            owner => owner.map_or(1, |(_, holds)| holds + 1),
        };
        self.image.owner.set(Some((self.host, holds)));
        Box::pin(ready(Ok(Hold(self.image.clone()))))
    }

    fn drain_changes(&self) -> LocalFuture<()> {
        let image = self.image.clone();
        Box::pin(async move { image.changing.opened.wait_until(|| !image.changing.closed.get()).await })
    }

    fn shelf(&self, _place: &Self::Place, _create: bool) -> LocalFuture<Result<Rc<Shelf>>> {
        Box::pin(ready(Ok(self.image.shelf.clone())))
    }

    fn log_size(&self, _place: &Self::Place) -> u64 {
        16 << 20
    }

    fn key(&self) -> LocalFuture<Result<Option<DataKey>>> {
        Box::pin(ready(self.image.key.borrow().clone()))
    }

    fn options(&self, _place: &Self::Place) -> LogOptions {
        LogOptions { persist: self.image.persist.get(), ..patience() }
    }

    fn compare(&self, is: &Self::Place, wanted: &Self::Place) -> PlaceChange {
        match (*is, *wanted) {
            (is, wanted) if is == wanted => PlaceChange::Same,
            (PLACE | LIMITED, PLACE | LIMITED) => PlaceChange::Limits,
            _ => PlaceChange::Other,
        }
    }
}

#[test]
fn a_lock_that_is_taken_anew_serves_nothing_past_a_log_that_another_host_has_attached() {
    on_a_shelf(async |_, shelf| {
        let image = SharedImage::new(shelf);
        let ours = image.open(1).await;
        ours.check_record().await.expect("there is no log");
        ours.device().submit(write(0, 1, 4096)).await.expect("written");
        // Another host acquires the lock, attaches a log, and closes with a write that is only in the log.
        let theirs = image.open(2).await;
        theirs.attach(&PLACE).await.expect("attached");
        theirs.device().submit(write(0, 2, 4096)).await.expect("written");
        theirs.close().await.expect("closed");
        assert_eq!((image.base.bytes.borrow()[0], image.owner.get()), (1, None));
        // The lock returns to this host.
        let loads = image.loads.get();
        let told = ours.check_record().await.expect_err("the record names a log that is not open here");
        assert_eq!((told.kind(), image.loads.get()), (ErrorKind::Busy, loads + 1), "{told}");
        let device = ours.device();
        device.submit(write(0, 3, 4096)).await.expect_err("a write past the log");
        device.submit(BlockRequest::Read(Extent::new(0, 512))).await.expect_err("an old read");
        device.submit(BlockRequest::Flush).await.expect_err("a flush past the log");
        assert_eq!(image.base.bytes.borrow()[0], 1);
        ours.settle().await.expect("the log can be opened");
        assert_eq!(read(&*ours.device(), 0, 1).await, [2], "what the other host acknowledged");
        ours.check_record().await.expect("the log that it names is here");
        ours.close().await.expect("closed");
    });
}

#[test]
fn a_log_that_another_host_has_given_up_is_not_written_back_when_the_lock_comes() {
    on_a_shelf(async |_, shelf| {
        let image = SharedImage::new(shelf);
        {
            let before = image.open(1).await;
            before.attach(&PLACE).await.expect("attached");
            before.device().submit(write(0, 1, 4096)).await.expect("written");
            before.close().await.expect("closed");
        }
        // Reopened here while another host holds the lock, which releases the log and writes to the image itself.
        let lock = Host { image: image.clone(), host: 2 }.lock().await.expect("free");
        let ours = image.open(1).await;
        let log = ours.log().expect("the record names it");
        assert_eq!(log.mode().name(), "acquiring");
        let waiting = spawn(log.submit(write(4096, 3, 4096)));
        sleep(Duration::from_secs(10)).await;
        assert_eq!((log.mode().name(), image.base.writes.get()), ("acquiring", 0));
        image.record.replace(LogRecord { epoch: 1, log: None });
        image.base.submit(write(0, 2, 4096)).await.expect("written");
        drop(lock);
        let refused = timeout(LONG, waiting).await.expect("answered").expect_err("the log is not the image's any more");
        assert_eq!(refused.kind(), ErrorKind::Fenced, "{refused}");
        assert!(matches!(log.mode(), Mode::Failed(_)), "{:?}", log.mode());
        sleep(LONG).await;
        assert_eq!(
            (image.base.writes.get(), image.base.bytes.borrow()[0]),
            (1, 2),
            "an older write went over a newer one"
        );
        drop(log);
        ours.close().await.expect("closed");
        assert_eq!(image.owner.get(), None, "the lock of an image that is not served is free");
    });
}

#[test]
fn attaching_opens_the_log_that_another_host_has_attached_meanwhile() {
    on_a_shelf(async |_, shelf| {
        let image = SharedImage::new(shelf);
        let ours = image.open(1).await;
        let theirs = image.open(2).await;
        theirs.attach(&PLACE).await.expect("attached");
        theirs.device().submit(write(0, 2, 4096)).await.expect("written");
        assert_eq!(ours.attach(&PLACE).await.expect_err("another host has the lock").kind(), ErrorKind::Busy);
        theirs.close().await.expect("closed");
        ours.attach(&PLACE).await.expect("attached");
        assert_eq!(read(&*ours.device(), 0, 1).await, [2], "what the other host acknowledged");
        assert_eq!(image.shelf.ids().len(), 1, "a second log was made");
        ours.close().await.expect("closed");
    });
}

#[test]
fn a_log_that_is_attached_writes_nothing_back_before_what_is_on_its_way_past_it_has_ended() {
    on_a_shelf(async |_, shelf| {
        let image = SharedImage::new(shelf);
        let ours = image.open(1).await;
        // Write in flight to the image when the log is attached.
        image.base.gate.closed.set(true);
        image.changing.closed.set(true);
        let past = ours.device().submit(write(0, 1, 4096));
        let past = spawn(past);
        ours.attach(&PLACE).await.expect("a log");
        image.base.gate.closed.set(false);
        ours.device().submit(write(0, 2, 4096)).await.expect("written");
        let log = ours.log().expect("a log");
        let drained = spawn(async move { log.drain().await });
        sleep(LONG).await;
        assert_eq!(image.base.writes.get(), 0, "an older write can land over what was written back");
        image.base.gate.open();
        past.await.expect("written");
        assert_eq!(image.base.bytes.borrow()[0], 1);
        image.changing.open();
        drained.await.expect("written back");
        assert_eq!(image.base.bytes.borrow()[0], 2);
        ours.close().await.expect("closed");
    });
}

#[test]
fn new_limits_do_not_bring_back_the_record_of_a_log_that_is_being_given_up() {
    on_a_shelf(async |_, shelf| {
        let image = SharedImage::new(shelf);
        let ours = Rc::new(image.open(1).await);
        ours.attach(&PLACE).await.expect("a log");
        // The log is being disabled, and its record is about to be cleared.
        image.storing.closed.set(true);
        let log = ours.log().expect("a log");
        let worn = log.clone();
        let disabled = spawn(async move { worn.disable(Error::new(ErrorKind::Io, "its medium is worn")).await });
        while image.storing.waiting.get() == 0 {
            sleep(MILLISECOND).await;
        }
        let attachment = ours.clone();
        let limited = spawn(async move { attachment.attach(&LIMITED).await });
        sleep(LONG).await;
        image.storing.open();
        disabled.await.expect("given up");
        let refused = timeout(LONG, limited).await.expect("answered").expect_err("it is being given up");
        assert_eq!(refused.kind(), ErrorKind::Busy, "{refused}");
        assert_eq!(image.record.borrow().log, None, "the record names a log that was given up");
        drop(log);
        ours.close().await.expect("closed");
    });
}

/// End of a disabled log.
#[derive(Debug, Clone, Copy)]
enum Way {
    Close,
    CloseAndDiscard,
    End,
    Attach,
}

#[test]
fn a_disabled_log_leaves_no_space_behind_however_its_volume_goes_on() {
    for way in [Way::Close, Way::CloseAndDiscard, Way::End, Way::Attach] {
        on_a_shelf(async move |_, shelf| {
            let image = SharedImage::new(shelf.clone());
            let attachment = image.open(1).await;
            attachment.attach(&PLACE).await.expect("a log");
            let before = shelf.ids();
            attachment.device().submit(write(0, 7, 4096)).await.expect("written");
            let log = attachment.log().expect("a log");
            log.disable(Error::new(ErrorKind::Io, "its medium is worn")).await.expect("written back");
            assert!(matches!(log.mode(), Mode::Off(_)));
            drop(log);
            assert_eq!(image.record.borrow().log, None, "the record has let go of it");
            match way {
                Way::Close => attachment.close().await.expect("closed"),
                Way::CloseAndDiscard => {
                    attachment.close().await.expect("closed");
                    let keeper = Host { image: image.clone(), host: 1 };
                    LogAttachment::discard(&keeper).await.expect("nothing more to give up");
                }
                Way::End => attachment.end(Duration::from_secs(1)).await.expect("ended"),
                Way::Attach => attachment.attach(&PLACE).await.expect("another log"),
            }
            let left = shelf.ids();
            match way {
                Way::Attach => assert!(left.len() == 1 && left != before, "{left:?}"),
                _ => assert!(left.is_empty(), "{way:?}: {left:?} still takes space"),
            }
            assert_ne!(image.base.bytes.borrow()[0], 0, "what it had acknowledged is written back");
        });
    }
}

#[test]
fn a_log_that_is_released_while_it_is_closed_leaves_no_space_behind() {
    on_a_shelf(async |_, shelf| {
        let image = SharedImage::new(shelf.clone());
        let attachment = image.open(1).await;
        attachment.attach(&PLACE).await.expect("a log");
        attachment.device().submit(write(0, 7, 4096)).await.expect("written");
        let log = attachment.log().expect("a log");
        image.storing.closed.set(true);
        let disabling = spawn(async move { log.disable(Error::new(ErrorKind::Io, "its medium is worn")).await });
        while image.storing.waiting.get() == 0 {
            sleep(MILLISECOND).await;
        }
        let closing = spawn(async move { attachment.close().await });
        sleep(Duration::from_secs(1)).await;
        assert_eq!(disabling.await.expect_err("it is closed first").kind(), ErrorKind::ShuttingDown);
        image.storing.open();
        timeout(LONG, closing).await.expect("it ends").expect("closed");
        assert_eq!(image.record.borrow().log, None, "the record has let go of it");
        assert!(shelf.ids().is_empty(), "{:?} still takes space", shelf.ids());
        assert_ne!(image.base.bytes.borrow()[0], 0, "what it had acknowledged is written back");
    });
}

#[test]
fn a_new_log_takes_the_space_of_older_ones_of_its_volume_and_of_no_other() {
    on_a_shelf(async |_, shelf| {
        let image = SharedImage::new(shelf.clone());
        let older = shelf.create("one", "pool/image", 16 << 20, 0).await.expect("room");
        let other = shelf.create("two", "pool/other", 16 << 20, 0).await.expect("room");
        let open = shelf.create("one", "pool/image", 1 << 24, 0).await.expect("room");
        let held = shelf.open_log(&open, "one", 0).await.expect("open");
        image.record.replace(LogRecord { epoch: 1, log: None });
        let attachment = image.open(1).await;
        attachment.attach(&PLACE).await.expect("a log");
        let ours = attachment.recorded().expect("a log").id;
        let left = shelf.ids();
        assert!(!left.contains(&older), "nobody will ever open it");
        for kept in [other, open, ours] {
            assert!(left.contains(&kept));
        }
        drop(held);
        attachment.close().await.expect("closed");
    });
}

#[test]
fn closing_makes_acknowledged_writes_last_in_the_log_before_it_waits_for_the_backend() {
    let world = World::new(1, Faults::none());
    world.add_disk(PATH, 64 << 20, 512);
    let open = async || {
        let options = ShelfOptions { create: true, ..ShelfOptions::default() };
        Shelf::open(MediumKind::Ssd, std::path::Path::new(PATH), options).await.expect("a shelf")
    };
    let reactor = world.reactor();
    let ran = world.run(&reactor, async {
        let image = SharedImage::new(open().await);
        image.persist.set(Persist::OnFlush);
        let attachment = Rc::new(image.open(1).await);
        attachment.attach(&PLACE).await.expect("a log");
        attachment.device().submit(write(0, 1, 4096)).await.expect("written");
        image.base.gate.closed.set(true);
        let ending = attachment.clone();
        drop(spawn(async move { ending.end(LONG).await }));
        while image.base.gate.waiting.get() == 0 {
            sleep(MILLISECOND).await;
        }
        for at in 1..20 {
            attachment.device().submit(write(at << 15, at as u8, 4096)).await.expect("acknowledged");
        }
        let log = attachment.log().expect("a log");
        assert_eq!(log.unkept_bytes(), 19 * 4096, "they are acknowledged before they last");
        timeout(Duration::from_secs(10), attachment.close()).await.expect_err("no response from the backend");
        assert_eq!(log.unkept_bytes(), 0);
    });
    ran.expect("it ends");
    world.crash(reactor, CrashKind::Power);
    let reactor = world.reactor();
    let ran = world.run(&reactor, async {
        let shelf = open().await;
        let found = shelf.inspect(&shelf.ids()[0]).await.expect("a log");
        assert_eq!(found.dirty_entries, 20);
    });
    ran.expect("it ends");
}

#[test]
fn the_log_of_an_encrypted_image_is_encrypted_with_its_key() {
    on_a_shelf(async |_, shelf| {
        let image = SharedImage::new(shelf.clone());
        let key = |byte| Ok(Some(DataKey::from_bytes(&std::array::from_fn(|at| byte ^ at as u8))));
        *image.key.borrow_mut() = key(1);
        let attachment = image.open(1).await;
        attachment.attach(&PLACE).await.expect("attached");
        let id = attachment.recorded().expect("a log").id;
        attachment.device().submit(write(0, 1, 4096)).await.expect("written");
        attachment.close().await.expect("closed");
        assert!(shelf.inspect(&id).await.expect("a log").encrypted);
        let unavailable = Err(Error::new(ErrorKind::Denied, "the master key is locked"));
        for (wrong, says) in [
            (key(2), "encrypted with another key"),
            (Ok(None), "no key was given"),
            (unavailable, "the master key is locked"),
        ] {
            *image.key.borrow_mut() = wrong;
            let keeper = Rc::new(Host { image: image.clone(), host: 1 });
            let refused = LogAttachment::open(keeper, image.base.clone()).await.err().expect("refused");
            assert!(refused.kind() == ErrorKind::Denied && refused.to_string().contains(says), "{refused}");
        }
        *image.key.borrow_mut() = key(1);
        let attachment = image.open(1).await;
        assert_eq!(read(&*attachment.device(), 0, 512).await, [1; 512]);
        attachment.end(LONG).await.expect("ended");
        assert_eq!(image.base.bytes.borrow()[..512], [1; 512]);
    });
}
