//! What an open image has to do with the other clients of its pool: its watch on the header, its share of the
//! exclusive lock, and the object map that belongs to the lock.

use std::cell::{Cell, RefCell};
use std::rc::{Rc, Weak};
use std::time::Duration;

use forebay_block::{
    Error, ErrorKind, Extent, Method, Notification, ObjectName, ObjectOp, Result, SharedObjects, SnapId, Transaction,
    Watch, WatchHandler,
};
use forebay_reactor::sync::{Notify, Semaphore};
use forebay_reactor::{sleep, spawn, timeout};

use crate::format::{Features, map_object};
use crate::image::Shared;
use crate::images::{SIZE_MAX, within};
use crate::lock::{Phase, Then, Verdict, judge, react};
use crate::objectmap::ObjectMap;
use crate::wire::lock::{self as wire, TAG};
use crate::wire::notify::{Client, Message, decode_response, encode_incarnation};

const LOCK: Method = Method::new("lock", "lock");
const UNLOCK: Method = Method::new("lock", "unlock");
const BREAK: Method = Method::new("lock", "break_lock");
pub(crate) const GET_INFO: Method = Method::new("lock", "get_info");
const SET_COOKIE: Method = Method::new("lock", "set_cookie");
const ASSERT_LOCKED: Method = Method::new("lock", "assert_locked");
/// How long others may take to answer; librbd's.
pub(crate) const NOTIFY_TIMEOUT: Duration = Duration::from_secs(5);
/// Between looks at a lock whose owner lives and has not given it up yet.
const ASK_AGAIN: Duration = Duration::from_secs(1);
/// Between attempts to watch again.
const WATCH_AGAIN: Duration = Duration::from_secs(1);

/// An open image's dealings with other clients.
pub(crate) struct Session {
    image: Weak<Shared>,
    objects: Rc<dyn SharedObjects>,
    header: ObjectName,
    watch: RefCell<Option<Box<dyn Watch>>>,
    /// The watch that the lock is named after, while we have it.
    locked_by: Cell<u64>,
    phase: Cell<Phase>,
    /// Taking, giving up and taking again: one at a time.
    turn: Semaphore,
    /// The lock may be free.
    look: Notify,
    map: RefCell<Option<Rc<ObjectMap>>>,
    /// Who wants the lock to be kept, whoever asks for it.
    keepers: Cell<usize>,
    /// Others have shut us out; nothing goes any more.
    fenced: RefCell<Option<Error>>,
    /// It is being closed; the lock is not waited for any more.
    ending: Cell<bool>,
    /// It has been closed; nothing is watched again.
    ended: Cell<bool>,
}

/// While it is held, an exclusive lock that is ours goes to nobody who asks for it.
pub struct KeptLock(Option<Rc<Session>>);

impl KeptLock {
    /// Of an image that has no lock.
    pub(crate) fn none() -> Self {
        Self(None)
    }
}

impl Drop for KeptLock {
    fn drop(&mut self) {
        if let Some(session) = &self.0 {
            session.keepers.set(session.keepers.get() - 1);
        }
    }
}

struct Handler(Weak<Session>);

impl WatchHandler for Handler {
    fn notified(&self, notification: Notification) {
        if let Some(session) = self.0.upgrade() {
            drop(spawn(async move { session.notified(notification).await }));
        }
    }

    fn broken(&self, error: Error) {
        if let Some(session) = self.0.upgrade() {
            drop(spawn(async move { session.watch_broken(error).await }));
        }
    }
}

impl Session {
    /// Begins to watch the header of an image that is being opened.
    pub(crate) async fn begin(
        image: Weak<Shared>,
        objects: Rc<dyn SharedObjects>,
        header: ObjectName,
    ) -> Result<Rc<Self>> {
        let session = Rc::new(Self {
            image,
            objects,
            header,
            watch: RefCell::default(),
            locked_by: Cell::new(0),
            phase: Cell::new(Phase::Unlocked),
            turn: Semaphore::new(1),
            look: Notify::new(),
            map: RefCell::default(),
            keepers: Cell::new(0),
            fenced: RefCell::default(),
            ending: Cell::new(false),
            ended: Cell::new(false),
        });
        session.set_watch().await?;
        Ok(session)
    }

    async fn set_watch(self: &Rc<Self>) -> Result<()> {
        let watch = self.objects.watch(&self.header, Rc::new(Handler(Rc::downgrade(self)))).await?;
        *self.watch.borrow_mut() = Some(watch);
        Ok(())
    }

    fn me(&self) -> Client {
        let watch = self.watch.borrow().as_ref().map_or(0, |watch| watch.cookie());
        Client { number: self.objects.identity().number, watch }
    }

    /// We have the lock, and keep it.
    pub(crate) fn is_locked(&self) -> bool {
        self.phase.get() == Phase::Locked
    }

    /// The object map, while we have the lock.
    pub(crate) fn map(&self) -> Option<Rc<ObjectMap>> {
        self.map.borrow().clone()
    }

    /// What makes a change of the header fail unless we have the lock.
    pub(crate) fn assertion(&self) -> Option<ObjectOp> {
        let cookie = wire::cookie_of(self.locked_by.get());
        let assert = || ObjectOp::Call { method: ASSERT_LOCKED, input: wire::encode_assert(&cookie, TAG) };
        (self.locked_by.get() != 0).then(assert)
    }

    /// The error of a client that was fenced.
    pub(crate) fn check(&self) -> Result<()> {
        self.fenced.borrow().clone().map_or(Ok(()), Err)
    }

    /// Tells the other clients that the header has changed.
    pub(crate) async fn header_changed(&self) {
        self.tell(Message::HeaderUpdate).await;
    }

    async fn tell(&self, message: Message) {
        // Who does not answer has lost its watch, or will look when it comes back.
        if let Err(error) = self.objects.notify(&self.header, message.encode(), NOTIFY_TIMEOUT).await {
            tracing::debug!(header = %self.header, %error, "others were not told");
        }
    }

    /// Tells the others of the image's reservations: what they answer, and who has not, of those who still watch.
    pub(crate) async fn ask_of_reservations(&self) -> Result<(Vec<Vec<u8>>, Vec<String>)> {
        let message = Message::Reservations(self.me());
        let told = self.objects.notify(&self.header, message.encode(), NOTIFY_TIMEOUT).await?;
        let answers = told.answers.into_iter().map(|answer| answer.payload).collect();
        if told.missed.is_empty() {
            return Ok((answers, Vec::new()));
        }
        let watchers = self.objects.watchers(&self.header).await?;
        let missed = watchers.iter().filter(|watcher| told.missed.contains(&(watcher.client, watcher.cookie)));
        Ok((answers, missed.map(|watcher| format!("client.{} at {}", watcher.client, watcher.address)).collect()))
    }

    /// Who else watches the header, as `client.NUMBER at ADDRESS`.
    pub(crate) async fn others(&self) -> Result<Vec<String>> {
        let me = self.objects.identity().number;
        let watchers = self.objects.watchers(&self.header).await?;
        let others = watchers.iter().filter(|watcher| watcher.client != me);
        Ok(others.map(|watcher| format!("client.{} at {}", watcher.client, watcher.address)).collect())
    }

    // ---- The lock ----

    /// Takes the lock, unless we have it.
    pub(crate) async fn acquire(self: &Rc<Self>, image: &Rc<Shared>) -> Result<()> {
        let _turn = self.turn.acquire(1).await;
        self.check()?;
        if self.is_locked() {
            return Ok(());
        }
        self.phase.set(Phase::Acquiring);
        let taken = async {
            self.take().await?;
            self.phase.set(Phase::Opening);
            // What others did while they had it: the size, snapshots, features.
            image.refresh().await?;
            self.open_map(image).await?;
            image.claimed().await
        };
        match taken.await {
            Ok(()) => {
                self.phase.set(Phase::Locked);
                let session = self.clone();
                drop(spawn(async move { session.tell(Message::AcquiredLock(session.me())).await }));
                Ok(())
            }
            Err(error) => {
                if let Some(map) = self.map.take() {
                    map.close().await;
                }
                if self.locked_by.get() != 0 {
                    self.unlock().await;
                }
                self.phase.set(Phase::Unlocked);
                if error.kind() == ErrorKind::Fenced {
                    self.fenced.borrow_mut().get_or_insert(error.clone());
                }
                Err(within(format_args!("image {}: taking its lock", image.name()), error))
            }
        }
    }

    /// While we have the lock, nobody gets it who asks for it, until the answer is dropped.
    pub(crate) fn keep(self: &Rc<Self>) -> KeptLock {
        self.keepers.set(self.keepers.get() + 1);
        KeptLock(Some(self.clone()))
    }

    fn is_kept(&self) -> bool {
        self.keepers.get() > 0
    }

    async fn take(self: &Rc<Self>) -> Result<()> {
        loop {
            if self.ending.get() {
                return Err(Error::new(ErrorKind::ShuttingDown, "the image is being closed"));
            }
            let watch = self.me().watch;
            if watch == 0 {
                // The watch broke, and is being set anew.
                self.check()?;
                let _ = timeout(WATCH_AGAIN, self.look.wait()).await;
                continue;
            }
            let call = ObjectOp::Call { method: LOCK, input: wire::encode_lock(&wire::cookie_of(watch), TAG) };
            match self.image()?.backend().submit(&self.header, Transaction::of(call)).await {
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::Exists => {}
                Err(error) if error.kind() == ErrorKind::Busy => {
                    self.deal_with_owner().await?;
                    continue;
                }
                Err(error) => return Err(error),
            }
            self.locked_by.set(watch);
            return Ok(());
        }
    }

    fn image(&self) -> Result<Rc<Shared>> {
        self.image.upgrade().ok_or_else(|| Error::new(ErrorKind::ShuttingDown, "the image is being closed"))
    }

    async fn info(&self) -> Result<wire::LockInfo> {
        let answer = self.objects.exec(&self.header, SnapId::HEAD, GET_INFO, wire::encode_get_info()).await?;
        wire::decode_info(&answer).ok_or_else(|| Error::new(ErrorKind::Corrupt, "the lock of the image"))
    }

    /// Asks a living owner for the lock, and breaks a dead one's; returns when it is worth trying again.
    async fn deal_with_owner(&self) -> Result<()> {
        let info = self.info().await?;
        let watchers = self.objects.watchers(&self.header).await?;
        match judge(&info, &watchers) {
            Verdict::Free => Ok(()),
            Verdict::Foreign(why) => Err(Error::new(ErrorKind::Busy, why)),
            Verdict::Ask => self.ask().await,
            Verdict::Break(locker) => {
                // It may have been taken over, or given up, since.
                if self.info().await?.lockers.first() != Some(&locker) {
                    return Ok(());
                }
                let who = format!("client.{}", locker.entity.1);
                if locker.client() == Some(self.objects.identity().number) {
                    // Our own, of a watch that is no more: nobody to be fenced.
                    tracing::debug!(header = %self.header, "an earlier lock of this client is broken");
                } else {
                    tracing::warn!(header = %self.header, who, address = locker.address, "a dead owner's lock is broken");
                    self.objects.blocklist(&locker.address, None).await?;
                }
                let call = ObjectOp::Call { method: BREAK, input: wire::encode_break(&locker) };
                match self.image()?.backend().submit(&self.header, Transaction::of(call)).await {
                    Err(error) if error.kind() != ErrorKind::NotFound => Err(error),
                    _ => Ok(()),
                }
            }
        }
    }

    async fn ask(&self) -> Result<()> {
        // From before it is asked, so that no release is missed.
        let released = self.look.wait();
        let request = Message::RequestLock { client: self.me(), force: false };
        let told = self.objects.notify(&self.header, request.encode(), NOTIFY_TIMEOUT).await?;
        for answer in &told.answers {
            match decode_response(&answer.payload) {
                Some(refused) if refused < 0 => {
                    let what = format!("client.{} has it, and keeps it ({refused})", answer.client);
                    return Err(Error::new(ErrorKind::Busy, what));
                }
                _ => {}
            }
        }
        // An owner that is busy giving it up says so when it has; one that died says nothing.
        let _ = timeout(ASK_AGAIN, released).await;
        Ok(())
    }

    async fn open_map(&self, image: &Rc<Shared>) -> Result<()> {
        let header = image.header();
        if !header.features.has(Features::OBJECT_MAP) {
            return Ok(());
        }
        let object = map_object(image.namespace(), image.id(), None);
        let map = ObjectMap::open(image.backend(), &self.objects, object, self.header.clone(), &header).await?;
        *self.map.borrow_mut() = Some(map);
        Ok(())
    }

    /// Gives the lock up, when the writes under way have ended.  Because somebody has `asked`, unless it is kept.
    async fn release(self: &Rc<Self>, image: &Rc<Shared>, asked: bool) {
        let _turn = self.turn.acquire(1).await;
        if self.phase.get() != Phase::Locked || (asked && self.is_kept()) {
            return;
        }
        self.phase.set(Phase::Releasing);
        let hold = image.gate().hold(Extent::new(0, SIZE_MAX)).await;
        if let Err(error) = image.backend().flush().await {
            tracing::warn!(header = %self.header, %error, "a flush before the lock is given up");
        }
        let map = self.map.take();
        if let Some(map) = map {
            map.close().await;
        }
        self.unlock().await;
        self.phase.set(Phase::Unlocked);
        drop(hold);
        self.tell(Message::ReleasedLock(self.me())).await;
    }

    async fn unlock(&self) {
        let cookie = wire::cookie_of(self.locked_by.replace(0));
        let call = ObjectOp::Call { method: UNLOCK, input: wire::encode_unlock(&cookie) };
        let Ok(image) = self.image() else { return };
        if let Err(error) = image.backend().submit(&self.header, Transaction::of(call)).await
            && error.kind() != ErrorKind::NotFound
        {
            tracing::warn!(header = %self.header, %error, "the lock could not be given up; it goes with the watch");
        }
    }

    /// Gives up the lock and the watch.
    pub(crate) async fn end(self: &Rc<Self>, image: &Rc<Shared>) {
        self.ending.set(true);
        self.release(image, false).await;
        self.ended.set(true);
        let watch = self.watch.take();
        if let Some(watch) = watch
            && let Err(error) = watch.end().await
        {
            tracing::debug!(header = %self.header, %error, "a watch could not be ended; it runs out");
        }
    }

    // ---- What others say ----

    async fn notified(self: Rc<Self>, notification: Notification) {
        let message = Message::decode(&notification.payload);
        let (answer, then) = react(self.phase.get(), self.is_kept(), self.me(), message.as_ref());
        let image = self.image.upgrade();
        // A header update is answered when what it tells of is known here.
        if let (Then::Refresh, Some(image)) = (then, &image)
            && let Err(error) = image.refresh().await
        {
            tracing::warn!(header = %self.header, %error, "a changed header could not be read");
        }
        let answer = match (then, image.as_ref().and_then(|image| image.reserved())) {
            (Then::Reservations, Some(reserved)) => match reserved.told().await {
                Ok(incarnation) => encode_incarnation(incarnation),
                Err(error) => {
                    // Not answered: who asks must not take it that they count here.
                    tracing::warn!(header = %self.header, %error, "changed reservations could not be read");
                    return;
                }
            },
            _ => answer,
        };
        let answered = self.objects.answer_notification(&self.header, notification.id, notification.cookie, answer);
        if let Err(error) = answered.await {
            tracing::debug!(header = %self.header, %error, "a notification could not be answered");
        }
        match (then, image) {
            (Then::Release, Some(image)) => self.release(&image, true).await,
            (Then::Look, _) => self.look.notify_all(),
            _ => {}
        }
    }

    /// Watches again; whoever has the lock keeps it under the new watch's name, or has lost it.
    async fn watch_broken(self: Rc<Self>, why: Error) {
        let reserved = self.image.upgrade().and_then(|image| image.reserved());
        if let Some(reserved) = &reserved {
            reserved.lost_touch();
        }
        self.watch_again(why).await;
        if let Some(reserved) = reserved {
            let go_on = || !self.ended.get() && self.check().is_ok();
            match go_on() {
                true => reserved.found_touch(go_on).await,
                false => reserved.let_go(),
            }
        }
    }

    async fn watch_again(self: &Rc<Self>, why: Error) {
        let before = self.watch.take();
        drop(before);
        tracing::warn!(header = %self.header, error = %why, "the watch of an image broke");
        let mut why = why;
        while !self.ended.get() {
            if why.kind() == ErrorKind::Fenced {
                return self.shut_out(why);
            }
            match self.set_watch().await {
                Ok(()) => break,
                Err(error) if error.kind() == ErrorKind::NotFound => {
                    return self.shut_out(Error::new(ErrorKind::NotFound, "the image has been removed"));
                }
                Err(error) => why = error,
            }
            sleep(WATCH_AGAIN).await;
        }
        let Some(image) = self.image.upgrade().filter(|_| !self.ended.get()) else { return };
        self.look.notify_all();
        let lost = {
            let _turn = self.turn.acquire(1).await;
            self.phase.get() == Phase::Locked && !self.rename_lock(&image).await
        };
        if lost && self.is_kept() {
            // What is in front of the image would overwrite what others have written meanwhile.
            return self.shut_out(Error::new(ErrorKind::Fenced, "the lock was lost that was to be kept"));
        }
        if lost {
            // Somebody else may have it: nothing of what we know of objects counts any more.  Writes under way are
            // for who took it to fence.
            self.phase.set(Phase::Releasing);
            let hold = image.gate().hold(Extent::new(0, SIZE_MAX)).await;
            self.map.take();
            self.locked_by.set(0);
            self.phase.set(Phase::Unlocked);
            drop(hold);
        }
        if let Err(error) = image.refresh().await {
            tracing::warn!(header = %self.header, %error, "the header could not be read after a watch broke");
        }
    }

    /// The lock goes under the new watch's name, if it is still ours.
    async fn rename_lock(&self, image: &Rc<Shared>) -> bool {
        let watch = self.me().watch;
        let (old, new) = (wire::cookie_of(self.locked_by.get()), wire::cookie_of(watch));
        let call = ObjectOp::Call { method: SET_COOKIE, input: wire::encode_set_cookie(&old, TAG, &new) };
        match image.backend().submit(&self.header, Transaction::of(call)).await {
            Ok(_) => {
                self.locked_by.set(watch);
                true
            }
            Err(error) => {
                tracing::warn!(header = %self.header, %error, "the lock was lost while nobody watched");
                false
            }
        }
    }

    fn shut_out(&self, why: Error) {
        tracing::error!(header = %self.header, error = %why, "this image cannot be used any more");
        *self.fenced.borrow_mut() = Some(why);
        self.phase.set(Phase::Unlocked);
        self.map.take();
        self.look.notify_all();
    }
}
