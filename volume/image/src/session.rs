//! Coordination of an open image with the other clients of its pool: its watch on the header, the exclusive lock, and
//! the object map that the lock protects.

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
use crate::images::SIZE_MAX;
use crate::lock::{Phase, Then, Verdict, judge, owner_name, react};
use crate::objectmap::ObjectMap;
use crate::wire::lock::{self as wire, Locker, TAG};
use crate::wire::notify::{Client, Message, decode_response, encode_incarnation};

const LOCK: Method = Method::new("lock", "lock");
const UNLOCK: Method = Method::new("lock", "unlock");
const BREAK: Method = Method::new("lock", "break_lock");
pub(crate) const GET_INFO: Method = Method::new("lock", "get_info");
const SET_COOKIE: Method = Method::new("lock", "set_cookie");
const ASSERT_LOCKED: Method = Method::new("lock", "assert_locked");
/// Notification timeout, the same as librbd's.
pub(crate) const NOTIFY_TIMEOUT: Duration = Duration::from_secs(5);
/// Retry interval for a lock whose living owner has not released it yet.
const ASK_AGAIN: Duration = Duration::from_secs(1);
/// Retry interval for re-establishing the watch.
const WATCH_AGAIN: Duration = Duration::from_secs(1);

/// Watch and exclusive lock of an open image.
pub(crate) struct Session {
    image: Weak<Shared>,
    objects: Rc<dyn SharedObjects>,
    header: ObjectName,
    watch: RefCell<Option<Box<dyn Watch>>>,
    /// Watch that the lock's cookie names, while this client holds it; 0 otherwise.
    locked_by: Cell<u64>,
    phase: Cell<Phase>,
    /// Serializes acquiring, releasing and reacquiring the lock.
    turn: Semaphore,
    /// Owner of the lock when this client began to acquire it, if it was another client.
    former: RefCell<Option<FormerOwner>>,
    /// Signaled when the lock may be free.
    look: Notify,
    map: RefCell<Option<Rc<ObjectMap>>>,
    /// Number of [`KeptLock`] guards; while there is one, the lock is not released on request.
    keepers: Cell<usize>,
    /// Set once this client is blocklisted or the image cannot be used any more.
    fenced: RefCell<Option<Error>>,
    /// Set while the image is closing; the lock is not waited for any more.
    ending: Cell<bool>,
    /// Set once the image is closed; the watch is not re-established.
    ended: Cell<bool>,
}

/// Owner from which an exclusive lock is taken over.
struct FormerOwner {
    name: String,
    /// Set if the owner was dead and has been blocklisted.
    fenced: bool,
}

/// Guard that keeps an exclusive lock held by this client from being released on request.
pub struct KeptLock(Option<Rc<Session>>);

impl KeptLock {
    /// Returns the guard of an image that has no lock.
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
    /// Establishes the watch on the header of an image that is being opened.
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
            former: RefCell::default(),
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

    /// Returns whether this client holds the lock and is not releasing it.
    pub(crate) fn is_locked(&self) -> bool {
        self.phase.get() == Phase::Locked
    }

    /// Returns the object map, while this client holds the lock.
    pub(crate) fn map(&self) -> Option<Rc<ObjectMap>> {
        self.map.borrow().clone()
    }

    /// Returns the assertion that makes a change of the header fail unless this client holds the lock; `None` if it
    /// does not.
    pub(crate) fn assertion(&self) -> Option<ObjectOp> {
        let cookie = wire::cookie_of(self.locked_by.get());
        let assert = || ObjectOp::Call { method: ASSERT_LOCKED, input: wire::encode_assert(&cookie, TAG) };
        (self.locked_by.get() != 0).then(assert)
    }

    /// Fails with the recorded error if this client was fenced.
    pub(crate) fn check(&self) -> Result<()> {
        self.fenced.borrow().clone().map_or(Ok(()), Err)
    }

    /// Notifies the other clients of a changed header.
    pub(crate) async fn header_changed(&self) {
        self.tell(Message::HeaderUpdate).await;
    }

    async fn tell(&self, message: Message) {
        // Clients that do not respond have lost their watch, or re-read when they have it again.
        if let Err(error) = self.objects.notify(&self.header, message.encode(), NOTIFY_TIMEOUT).await {
            tracing::debug!(header = %self.header, %error, "others were not told");
        }
    }

    /// Notifies the other clients of the image's reservations; returns their responses, and the clients without one
    /// that still watch.
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

    /// Returns the other watchers of the header, as `client.NUMBER at ADDRESS`.
    pub(crate) async fn others(&self) -> Result<Vec<String>> {
        let me = self.objects.identity().number;
        let watchers = self.objects.watchers(&self.header).await?;
        let others = watchers.iter().filter(|watcher| watcher.client != me);
        Ok(others.map(|watcher| format!("client.{} at {}", watcher.client, watcher.address)).collect())
    }

    // ---- The lock ----

    /// Acquires the lock, unless this client holds it.
    pub(crate) async fn acquire(self: &Rc<Self>, image: &Rc<Shared>) -> Result<()> {
        let _turn = self.turn.acquire(1).await;
        self.check()?;
        if self.is_locked() {
            return Ok(());
        }
        self.phase.set(Phase::Acquiring);
        self.former.take();
        let taken = async {
            self.take().await?;
            self.phase.set(Phase::Opening);
            // Changes by former owners: the size, snapshots, features.
            image.refresh().await?;
            self.open_map(image).await?;
            image.claimed().await
        };
        match taken.await {
            Ok(()) => {
                self.phase.set(Phase::Locked);
                if let Some(FormerOwner { name, fenced }) = self.former.take() {
                    tracing::info!(image = image.name(), former_owner = name, fenced, "exclusive lock taken over");
                }
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
                Err(error.within(format_args!("image {}: taking its lock", image.name())))
            }
        }
    }

    /// Returns a guard that keeps the lock, while this client holds it, from being released on request.
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
                // The watch broke, and is being re-established.
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

    /// Requests the lock from a living owner, and breaks a dead one's; returns when the lock should be tried again.
    async fn deal_with_owner(&self) -> Result<()> {
        let info = self.info().await?;
        let watchers = self.objects.watchers(&self.header).await?;
        match judge(&info, &watchers) {
            Verdict::Free => Ok(()),
            Verdict::Foreign(why) => Err(Error::new(ErrorKind::Busy, why)),
            Verdict::Ask => {
                self.note_former(info.lockers.first(), false);
                self.ask().await
            }
            Verdict::Break(locker) => {
                // The lock may have been taken over, or released, since.
                if self.info().await?.lockers.first() != Some(&locker) {
                    return Ok(());
                }
                if locker.client() == Some(self.objects.identity().number) {
                    // The lock of an earlier watch of this client: it must not fence itself.
                    tracing::debug!(header = %self.header, "an earlier lock of this client is broken");
                } else {
                    self.objects.blocklist(&locker.address, None).await?;
                    self.note_former(Some(&locker), true);
                }
                let call = ObjectOp::Call { method: BREAK, input: wire::encode_break(&locker) };
                match self.image()?.backend().submit(&self.header, Transaction::of(call)).await {
                    Err(error) if error.kind() != ErrorKind::NotFound => Err(error),
                    _ => Ok(()),
                }
            }
        }
    }

    /// Records the former owner of the lock, unless it is this client itself.
    fn note_former(&self, locker: Option<&Locker>, fenced: bool) {
        if let Some(locker) = locker.filter(|locker| locker.client() != Some(self.objects.identity().number)) {
            *self.former.borrow_mut() = Some(FormerOwner { name: owner_name(locker), fenced });
        }
    }

    async fn ask(&self) -> Result<()> {
        // Registered before the request, so that no release is missed.
        let released = self.look.wait();
        let request = Message::RequestLock { client: self.me(), force: false };
        let told = match self.objects.notify(&self.header, request.encode(), NOTIFY_TIMEOUT).await {
            Ok(told) => told,
            Err(error) if error.kind() == ErrorKind::TimedOut => {
                // As without a response: if the owner is dead, its watch expires.
                tracing::debug!(header = %self.header, %error, "a request for the lock is repeated");
                return Ok(());
            }
            Err(error) => return Err(error),
        };
        for answer in &told.answers {
            match decode_response(&answer.payload) {
                Some(refused) if refused < 0 => {
                    let what = format!("client.{} has it, and keeps it ({refused})", answer.client);
                    return Err(Error::new(ErrorKind::Busy, what));
                }
                _ => {}
            }
        }
        // An owner that is busy releasing the lock notifies when it is done; a dead one does not.
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

    /// Releases the lock, after the in-flight writes have ended. A lock that is kept is not released if a client has
    /// `asked`.
    async fn release(self: &Rc<Self>, image: &Rc<Shared>, asked: Option<Client>) {
        let _turn = self.turn.acquire(1).await;
        if self.phase.get() != Phase::Locked || (asked.is_some() && self.is_kept()) {
            return;
        }
        self.phase.set(Phase::Releasing);
        let hold = image.admission().exclusive(Extent::new(0, SIZE_MAX)).await;
        if let Err(error) = image.flush().await {
            tracing::warn!(
                image = image.name(),
                %error,
                "flush before the release of the exclusive lock failed; the lock is released all the same"
            );
        }
        let map = self.map.take();
        if let Some(map) = map {
            map.close().await;
        }
        self.unlock().await;
        self.phase.set(Phase::Unlocked);
        drop(hold);
        if let Some(Client { number, .. }) = asked {
            tracing::info!(image = image.name(), new_owner = %format_args!("client.{number}"), "exclusive lock handed over");
        }
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

    /// Releases the lock and the watch.
    pub(crate) async fn end(self: &Rc<Self>, image: &Rc<Shared>) {
        self.ending.set(true);
        self.release(image, None).await;
        self.ended.set(true);
        let watch = self.watch.take();
        if let Some(watch) = watch
            && let Err(error) = watch.end().await
        {
            tracing::debug!(header = %self.header, %error, "a watch could not be ended; it runs out");
        }
    }

    // ---- Notifications ----

    async fn notified(self: Rc<Self>, notification: Notification) {
        let message = Message::decode(&notification.payload);
        let (answer, then) = react(self.phase.get(), self.is_kept(), self.me(), message.as_ref());
        let image = self.image.upgrade();
        // A header update is acknowledged after the change is known here.
        if let (Then::Refresh, Some(image)) = (then, &image)
            && let Err(error) = image.refresh().await
        {
            tracing::warn!(header = %self.header, %error, "a changed header could not be read");
        }
        let answer = match (then, image.as_ref().and_then(|image| image.reserved())) {
            (Then::Reservations, Some(reserved)) => match reserved.told().await {
                Ok(incarnation) => encode_incarnation(incarnation),
                Err(error) => {
                    // Not acknowledged: the sender must not assume that the reservations are in force here.
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
        let asked = match message {
            Some(Message::RequestLock { client, .. }) => Some(client),
            _ => None,
        };
        match (then, image) {
            (Then::Release, Some(image)) => self.release(&image, asked).await,
            (Then::Look, _) => self.look.notify_all(),
            _ => {}
        }
    }

    /// Re-establishes the watch; an owner of the lock moves it to the new watch's cookie, or has lost it.
    async fn watch_broken(self: Rc<Self>, why: Error) {
        let reserved = self.image.upgrade().and_then(|image| image.reserved());
        if let Some(reserved) = &reserved {
            reserved.lost_touch();
        }
        self.watch_again(why).await;
        // Reservations registered in the meantime are re-read too: changes before that may have been missed.
        if let Some(reserved) = self.image.upgrade().and_then(|image| image.reserved()).or(reserved) {
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
                if let Some(image) = self.image.upgrade().filter(|_| self.is_locked()) {
                    log_lost(&image, None, &why);
                }
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
            match self.phase.get() {
                Phase::Locked => self.rename_lock(&image).await.err(),
                _ => None,
            }
        };
        if let Some(error) = lost.as_ref().filter(|_| self.is_kept()) {
            // The write-back layer in front of the image would overwrite later writes of other clients.
            self.shut_out(Error::new(ErrorKind::Fenced, "the lock was lost that was to be kept"));
            return self.lost(&image, error).await;
        }
        if let Some(error) = lost {
            // Another client may hold the lock: cached object state is invalid. In-flight writes are fenced by the
            // client that took the lock.
            self.phase.set(Phase::Releasing);
            let hold = image.admission().exclusive(Extent::new(0, SIZE_MAX)).await;
            self.map.take();
            self.locked_by.set(0);
            self.phase.set(Phase::Unlocked);
            drop(hold);
            self.lost(&image, &error).await;
        }
        if let Err(error) = image.refresh().await {
            tracing::warn!(header = %self.header, %error, "the header could not be read after a watch broke");
        }
    }

    /// Logs that the lock was lost while the watch was broken, with its present owner if known.
    async fn lost(&self, image: &Rc<Shared>, why: &Error) {
        let owner = self.info().await.ok().and_then(|info| info.lockers.first().map(owner_name));
        log_lost(image, owner.as_deref(), why);
    }

    /// Changes the lock's cookie to the new watch's, if this client still holds the lock.
    async fn rename_lock(&self, image: &Rc<Shared>) -> Result<()> {
        let watch = self.me().watch;
        let (old, new) = (wire::cookie_of(self.locked_by.get()), wire::cookie_of(watch));
        let call = ObjectOp::Call { method: SET_COOKIE, input: wire::encode_set_cookie(&old, TAG, &new) };
        image.backend().submit(&self.header, Transaction::of(call)).await?;
        self.locked_by.set(watch);
        Ok(())
    }

    fn shut_out(&self, why: Error) {
        tracing::error!(header = %self.header, error = %why, "this image cannot be used any more");
        *self.fenced.borrow_mut() = Some(why);
        self.phase.set(Phase::Unlocked);
        self.map.take();
        self.look.notify_all();
    }
}

/// Logs that an exclusive lock was lost.
fn log_lost(image: &Rc<Shared>, owner: Option<&str>, why: &Error) {
    let new_owner = owner.unwrap_or("unknown");
    tracing::info!(image = image.name(), new_owner, reason = %why, "exclusive lock lost");
}
