//! Exclusive lock of an open image, and the object map that it protects.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

use forebay_block::{
    ClientIdentity, Error, ErrorKind, ExclusiveRange, Method, ObjectBackend, ObjectOp, Result, SnapId, Transaction,
};
use forebay_reactor::sync::{Notify, Permit, Semaphore};
use forebay_reactor::{Instant, now, spawn, timeout, yield_now};

use crate::lock::{Keeping, LockVerdict, Phase, Then, is_brief, judge, owner_name, react};
use crate::objectmap::ObjectMap;
use crate::own_blocks::{READ_LEASE, outlast_fenced_reads};
use crate::watcher::HeaderWatcher;
use crate::wire::lock::{self as wire, Locker, TAG};
use crate::wire::notify::{ClientId, NotifyMessage, decode_response};

const LOCK: Method = Method::new("lock", "lock");
const UNLOCK: Method = Method::new("lock", "unlock");
const BREAK: Method = Method::new("lock", "break_lock");
pub(crate) const GET_INFO: Method = Method::new("lock", "get_info");
const SET_COOKIE: Method = Method::new("lock", "set_cookie");
const ASSERT_LOCKED: Method = Method::new("lock", "assert_locked");
/// Retry interval for a lock whose living owner has not released it yet.
const ASK_AGAIN: Duration = Duration::from_secs(1);
/// Retry interval while there is no watch to bind the lock to.
const WATCH_AGAIN: Duration = Duration::from_secs(1);
/// Time in which every client notices that its watch broke, and establishes it again: twice the interval of pings.
const WATCH_NOTICED: Duration = Duration::from_secs(10);

/// Actions of an image before its exclusive lock is released, and after it was acquired.
pub(crate) trait LockedImage {
    /// Returns the current name, for log messages.
    fn name(&self) -> String;

    /// Returns the pool and the name, for error messages.
    fn path(&self) -> String;

    /// Re-reads the header: former owners may have changed the size, snapshots, features.
    async fn refresh(&self) -> Result<()>;

    /// Opens the object map, if the image has one.
    async fn open_map(&self) -> Result<Option<Rc<ObjectMap>>>;

    /// Handles the acquisition of the lock, before any write is admitted.
    async fn on_lock_acquired(&self) -> Result<()>;

    /// Blocks writes, and waits for those in flight, until the guard is dropped.
    async fn block_writes(&self) -> ExclusiveRange;

    /// Makes completed writes durable.
    async fn flush(&self) -> Result<()>;
}

/// Exclusive lock of an open image, acquired for writing and released on request.
///
/// Invariants:
/// 1. Writes are admitted in the phase `Locked` only, in which the stored lock has this client's cookie, and the object
///    map is loaded if the image has one.
/// 2. In the phases `Unlocked` and `Acquiring` there is no object map.
/// 3. The phase changes under `turn`, but for [`on_blocklisted`](Self::on_blocklisted), after which it is never
///    `Locked` again.
/// 4. While there is a [`KeptLock`], the lock is not released on request.
pub(crate) struct ExclusiveLock {
    watcher: Rc<HeaderWatcher>,
    /// Pool of the metadata.
    pool: Rc<dyn ObjectBackend>,
    phase: Cell<Phase>,
    /// Watch that the lock's cookie names, while this client holds it; 0 otherwise.
    locked_by: Cell<u64>,
    /// Number of the present acquisition of the lock, or of the next one, from 1.
    acquisition: Cell<u64>,
    /// Serializes acquiring, releasing and reacquiring the lock.
    turn: Semaphore,
    /// Owner of the lock when this client began to acquire it, if it was another client.
    former: RefCell<Option<FormerOwner>>,
    /// Signaled when the lock may be free.
    may_be_free: Notify,
    map: RefCell<Option<Rc<ObjectMap>>>,
    /// Number of [`KeptLock`] guards that last.
    keepers: Cell<usize>,
    /// Number of those for a moment.
    brief_keepers: Cell<usize>,
    /// Set once this client is blocklisted or the image cannot be used any more.
    fenced: RefCell<Option<Error>>,
    /// Set while the image is closing; the lock is not waited for any more.
    closing: Cell<bool>,
    /// Set when this client's watch was re-established: those of other clients may have been lost with it.
    watches_broke: Cell<Option<Instant>>,
}

/// Owner from which an exclusive lock is taken over.
struct FormerOwner {
    name: String,
    /// Set if the owner was dead and has been blocklisted.
    fenced: bool,
}

/// Guard that keeps an exclusive lock held by this client from being released on request.
pub struct KeptLock(Option<(Rc<ExclusiveLock>, Keeping)>);

impl KeptLock {
    /// Returns the guard of an image that has no lock.
    pub(crate) fn none() -> Self {
        Self(None)
    }
}

impl Drop for KeptLock {
    fn drop(&mut self) {
        if let Some((lock, keeping)) = &self.0 {
            let keepers = lock.keepers_for(*keeping);
            keepers.set(keepers.get() - 1);
        }
    }
}

impl ExclusiveLock {
    /// Creates the lock of an image, not held.
    pub(crate) fn new(watcher: Rc<HeaderWatcher>, pool: Rc<dyn ObjectBackend>) -> Rc<Self> {
        Rc::new(Self {
            watcher,
            pool,
            phase: Cell::new(Phase::Unlocked),
            locked_by: Cell::new(0),
            acquisition: Cell::new(1),
            turn: Semaphore::new(1),
            former: RefCell::default(),
            may_be_free: Notify::new(),
            map: RefCell::default(),
            keepers: Cell::new(0),
            brief_keepers: Cell::new(0),
            fenced: RefCell::default(),
            closing: Cell::new(false),
            watches_broke: Cell::default(),
        })
    }

    /// Returns whether this client holds the lock and is not releasing it.
    pub(crate) fn is_locked(&self) -> bool {
        self.phase.get() == Phase::Locked
    }

    /// Returns the number of the present acquisition of the lock, or of the next one: it changes when the lock is not held any
    /// more.
    pub(crate) fn acquisition(&self) -> u64 {
        self.acquisition.get()
    }

    /// Returns the number of the present acquisition, if no other client can have acquired the lock since: others see the
    /// watch that the lock names, and have not broken the lock for want of it.
    pub(crate) fn certain_acquisition(&self) -> Option<u64> {
        let is_certain = self.is_locked() && self.watcher.is_confirmed(self.locked_by.get(), READ_LEASE);
        is_certain.then(|| self.acquisition.get())
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

    /// Returns a guard that keeps the lock, while this client holds it, from being released on request.
    pub(crate) fn keep(self: &Rc<Self>, keeping: Keeping) -> KeptLock {
        let keepers = self.keepers_for(keeping);
        keepers.set(keepers.get() + 1);
        KeptLock(Some((self.clone(), keeping)))
    }

    fn keepers_for(&self, keeping: Keeping) -> &Cell<usize> {
        match keeping {
            Keeping::Lasting => &self.keepers,
            Keeping::Brief => &self.brief_keepers,
        }
    }

    /// Returns whether a guard that lasts keeps the lock from being released on request.
    pub(crate) fn is_kept(&self) -> bool {
        self.keepers.get() > 0
    }

    /// Returns for how long a guard keeps the lock, if one does.
    fn kept(&self) -> Option<Keeping> {
        match (self.is_kept(), self.brief_keepers.get()) {
            (true, _) => Some(Keeping::Lasting),
            (false, 0) => None,
            (false, _) => Some(Keeping::Brief),
        }
    }

    /// Returns the response to a notification, and the action that follows.
    pub(crate) fn react(&self, me: ClientId, message: Option<&NotifyMessage>) -> (Vec<u8>, Then) {
        react(self.phase.get(), self.kept(), me, message)
    }

    fn set_phase(&self, phase: Phase) {
        debug_assert!(phase != Phase::Locked || self.locked_by.get() != 0, "locked without a stored lock");
        debug_assert!(phase != Phase::Locked || self.check().is_ok(), "locked by a fenced client");
        debug_assert!(phase != Phase::Unlocked || self.map.borrow().is_none(), "an object map without the lock");
        if self.phase.replace(phase) == Phase::Locked && phase != Phase::Locked {
            self.acquisition.set(self.acquisition.get() + 1);
        }
    }

    // ---- Acquiring ----

    /// Acquires the lock, unless this client holds it.
    pub(crate) async fn acquire(self: &Rc<Self>, image: &impl LockedImage) -> Result<()> {
        self.acquire_in_turn(image).await.map(drop)
    }

    /// Acquires the lock, unless this client holds it, and keeps it until the guard is dropped.
    pub(crate) async fn acquire_in_turn(self: &Rc<Self>, image: &impl LockedImage) -> Result<Permit> {
        let turn = self.turn.acquire(1).await;
        self.check()?;
        if self.is_locked() {
            return Ok(turn);
        }
        self.set_phase(Phase::Acquiring);
        self.former.take();
        let taken = async {
            self.take().await?;
            self.set_phase(Phase::Opening);
            image.refresh().await?;
            let map = image.open_map().await?;
            *self.map.borrow_mut() = map;
            image.on_lock_acquired().await?;
            // This client may have been blocklisted, or the image removed, in the meantime.
            self.check()
        };
        match taken.await {
            Ok(()) => {
                self.set_phase(Phase::Locked);
                if let Some(FormerOwner { name, fenced }) = self.former.take() {
                    tracing::info!(image = image.name(), former_owner = name, fenced, "exclusive lock taken over");
                }
                let watcher = self.watcher.clone();
                drop(spawn(async move { watcher.tell(NotifyMessage::AcquiredLock(watcher.client())).await }));
                Ok(turn)
            }
            Err(error) => {
                if let Some(map) = self.map.take() {
                    map.close().await;
                }
                if self.locked_by.get() != 0 {
                    self.unlock().await;
                }
                self.set_phase(Phase::Unlocked);
                if error.kind() == ErrorKind::Fenced {
                    self.fenced.borrow_mut().get_or_insert(error.clone());
                }
                Err(error.within(format_args!("cannot acquire exclusive lock of {}", image.path())))
            }
        }
    }

    async fn take(&self) -> Result<()> {
        loop {
            if self.closing.get() {
                return Err(Error::new(ErrorKind::ShuttingDown, "the image is being closed"));
            }
            let watch = self.watcher.client().watch;
            if watch == 0 {
                // The watch broke, and is being re-established.
                self.check()?;
                let _ = timeout(WATCH_AGAIN, self.may_be_free.wait()).await;
                continue;
            }
            let call = ObjectOp::Call { method: LOCK, input: wire::encode_lock(&wire::cookie_of(watch), TAG) };
            match self.submit(call).await {
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

    /// Returns whether another client holds the lock, and is alive.
    pub(crate) async fn has_other_owner(&self) -> Result<bool> {
        if self.phase.get() != Phase::Unlocked {
            return Ok(false);
        }
        let info = self.info().await?;
        let watchers = self.watcher.objects().watchers(self.watcher.header()).await?;
        let me = self.watcher.objects().identity().number;
        let is_other = info.lockers.first().is_some_and(|locker| locker.client() != Some(me));
        Ok(is_other && judge(&info, &watchers) == LockVerdict::Ask)
    }

    /// Returns whether the stored lock is the one that this client holds.
    pub(crate) async fn is_stored(&self) -> Result<bool> {
        let (me, watch) = (self.watcher.objects().identity().number, self.locked_by.get());
        let info = self.info().await?;
        let is_mine = |locker: &Locker| locker.client() == Some(me) && wire::watch_of(&locker.cookie) == Some(watch);
        Ok(watch != 0 && info.lockers.first().is_some_and(is_mine))
    }

    /// Waits until the lock is neither being acquired nor released, and keeps it so until the guard is dropped.
    pub(crate) async fn begin_turn(&self) -> Permit {
        self.turn.acquire(1).await
    }

    /// Replaces the object map, whose feature is being enabled or disabled. The caller has the turn.
    pub(crate) fn set_map(&self, map: Option<Rc<ObjectMap>>) {
        debug_assert_eq!(self.turn.available(), 0, "an object map is replaced out of turn");
        debug_assert!(map.is_none() || self.is_locked(), "an object map without the lock");
        *self.map.borrow_mut() = map;
    }

    async fn submit(&self, call: ObjectOp) -> Result<u64> {
        self.pool.submit(self.watcher.header(), Transaction::of(call)).await
    }

    async fn info(&self) -> Result<wire::LockInfo> {
        let header = self.watcher.header();
        let answer = self.watcher.objects().exec(header, SnapId::HEAD, GET_INFO, wire::encode_get_info()).await?;
        wire::decode_info(&answer).ok_or_else(|| Error::new(ErrorKind::Corrupt, "the lock of the image"))
    }

    /// Requests the lock from a living owner, and breaks a dead one's; returns when the lock should be tried again.
    async fn deal_with_owner(&self) -> Result<()> {
        let objects = self.watcher.objects();
        let info = self.info().await?;
        let watchers = objects.watchers(self.watcher.header()).await?;
        match judge(&info, &watchers) {
            LockVerdict::Free => Ok(()),
            LockVerdict::Foreign(why) => Err(Error::new(ErrorKind::Busy, why)),
            LockVerdict::Ask => {
                self.note_former(info.lockers.first(), false);
                self.ask(info.lockers.first()).await
            }
            LockVerdict::Break(locker) => {
                // The lock may have been taken over, or released, since.
                if self.info().await?.lockers.first() != Some(&locker) {
                    return Ok(());
                }
                // What has broken this client's watch may have broken that of a living owner, which re-establishes it.
                let me = self.watcher.client();
                let is_watching =
                    watchers.iter().any(|watcher| watcher.cookie == me.watch && watcher.client == me.number);
                if !is_watching || self.watches_broke.get().is_some_and(|then| then.elapsed() < WATCH_NOTICED) {
                    let _ = timeout(WATCH_AGAIN, self.may_be_free.wait()).await;
                    return Ok(());
                }
                if locker.client() == Some(objects.identity().number) {
                    // The lock of an earlier watch of this client: it must not fence itself.
                    tracing::debug!(header = %self.watcher.header(), "breaking an earlier lock of this client");
                } else {
                    objects.blocklist(&locker.address, None).await?;
                    outlast_fenced_reads(&self.pool, self.watcher.header()).await?;
                    self.note_former(Some(&locker), true);
                }
                match self.submit(ObjectOp::Call { method: BREAK, input: wire::encode_break(&locker) }).await {
                    Err(error) if error.kind() != ErrorKind::NotFound => Err(error),
                    _ => Ok(()),
                }
            }
        }
    }

    /// Records the former owner of the lock, unless it is this client itself.
    fn note_former(&self, locker: Option<&Locker>, fenced: bool) {
        let me = self.watcher.objects().identity().number;
        if let Some(locker) = locker.filter(|locker| locker.client() != Some(me)) {
            *self.former.borrow_mut() = Some(FormerOwner { name: owner_name(locker), fenced });
        }
    }

    /// Requests the lock from its `owner`, and waits for a while for its release.
    async fn ask(&self, owner: Option<&Locker>) -> Result<()> {
        // Registered before the request, so that no release is missed.
        let released = self.may_be_free.wait();
        let request = NotifyMessage::RequestLock { client: self.watcher.client(), force: false };
        let told = match self.watcher.notify(request).await {
            Ok(told) => told,
            Err(error) if error.kind() == ErrorKind::TimedOut => {
                // As without a response: if the owner is dead, its watch expires.
                tracing::debug!(header = %self.watcher.header(), %error, "repeating a request for the exclusive lock");
                return Ok(());
            }
            Err(error) => return Err(error),
        };
        for answer in &told.answers {
            match decode_response(&answer.payload) {
                // It is asked again after a while.
                Some(refused) if is_brief(refused) => {}
                Some(refused) if refused < 0 => {
                    let owner = owner.map_or_else(|| format!("client.{}", answer.client), owner_name);
                    let what = format!("held by {owner}, which refuses to release it ({refused})");
                    return Err(Error::new(ErrorKind::Busy, what));
                }
                _ => {}
            }
        }
        // An owner that is busy releasing the lock notifies when it is done; a dead one does not.
        let _ = timeout(ASK_AGAIN, released).await;
        Ok(())
    }

    // ---- Releasing ----

    /// Releases the lock, and does not wait for it any more, since the image is closing.
    pub(crate) async fn close(&self, image: &impl LockedImage) {
        self.closing.set(true);
        self.release(image, None).await;
    }

    /// Releases the lock, after the in-flight writes have ended. A lock that is kept is not released if a client has
    /// `asked`.
    pub(crate) async fn release(&self, image: &impl LockedImage, asked: Option<ClientId>) {
        let _turn = self.turn.acquire(1).await;
        if self.phase.get() != Phase::Locked || (asked.is_some() && self.kept().is_some()) {
            return;
        }
        self.set_phase(Phase::Releasing);
        let blocked = image.block_writes().await;
        if let Err(error) = image.flush().await {
            tracing::warn!(image = image.path(), %error, "cannot flush before releasing the exclusive lock");
        }
        let map = self.map.take();
        if let Some(map) = map {
            map.close().await;
        }
        self.unlock().await;
        self.set_phase(Phase::Unlocked);
        drop(blocked);
        if let Some(ClientId { number, .. }) = asked {
            tracing::info!(image = image.name(), new_owner = %format_args!("client.{number}"), "exclusive lock handed over");
        }
        // Not waited for: a client that has died takes the whole timeout to respond.
        let (watcher, released) = (self.watcher.clone(), NotifyMessage::ReleasedLock(self.watcher.client()));
        drop(spawn(async move { watcher.tell(released).await }));
        // It is on its way before the watch ends.
        yield_now().await;
    }

    async fn unlock(&self) {
        let cookie = wire::cookie_of(self.locked_by.replace(0));
        let call = ObjectOp::Call { method: UNLOCK, input: wire::encode_unlock(&cookie) };
        if let Err(error) = self.submit(call).await
            && error.kind() != ErrorKind::NotFound
        {
            let header = self.watcher.header();
            tracing::warn!(%header, %error, "cannot release the exclusive lock; it expires with the watch");
        }
    }

    // ---- Events ----

    /// Wakes the tasks that wait for the lock, which may be free now.
    pub(crate) fn on_released(&self) {
        self.may_be_free.notify_all();
    }

    /// Rebinds the lock to a re-established watch, or gives it up if another client has taken it. Returns whether the
    /// image can still be used.
    pub(crate) async fn on_watch_restored(&self, image: &impl LockedImage) -> bool {
        self.watches_broke.set(Some(now()));
        self.may_be_free.notify_all();
        let turn = self.turn.acquire(1).await;
        if self.phase.get() != Phase::Locked {
            return true;
        }
        let Err(error) = self.rebind().await else { return true };
        if self.is_kept() {
            // The write-back layer in front of the image would overwrite later writes of other clients.
            self.on_blocklisted(Error::new(ErrorKind::Fenced, "the lock was lost that was to be kept"));
            drop(turn);
            self.log_lost(image, &error).await;
            return false;
        }
        // Another client may hold the lock: cached object state is invalid. In-flight writes are fenced by the client
        // that took the lock.
        self.set_phase(Phase::Releasing);
        let blocked = image.block_writes().await;
        self.map.take();
        self.locked_by.set(0);
        self.set_phase(Phase::Unlocked);
        drop((blocked, turn));
        self.log_lost(image, &error).await;
        true
    }

    /// Fences another client for a time, and breaks the lock if that client holds it: nothing that it has sent to the cluster
    /// changes the image after this has ended.
    pub(crate) async fn fence(&self, client: &ClientIdentity, expire: Duration) -> Result<()> {
        let objects = self.watcher.objects();
        objects.blocklist(&client.address, Some(expire)).await?;
        outlast_fenced_reads(&self.pool, self.watcher.header()).await?;
        let info = self.info().await?;
        let holds = |locker: &&Locker| locker.client() == Some(client.number) || locker.address == client.address;
        let Some(locker) = info.lockers.first().filter(holds) else { return Ok(()) };
        if locker.address != client.address {
            // Servers may see a client at another address than monitors do.
            objects.blocklist(&locker.address, Some(expire)).await?;
            outlast_fenced_reads(&self.pool, self.watcher.header()).await?;
        }
        self.note_former(Some(locker), true);
        match self.submit(ObjectOp::Call { method: BREAK, input: wire::encode_break(locker) }).await {
            Err(error) if error.kind() != ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }

    /// Changes the lock's cookie to the new watch's, if this client still holds the lock.
    async fn rebind(&self) -> Result<()> {
        let watch = self.watcher.client().watch;
        if watch == 0 {
            // The watch broke again meanwhile; the task that restores it binds the lock to the new watch.
            return Ok(());
        }
        let (old, new) = (wire::cookie_of(self.locked_by.get()), wire::cookie_of(watch));
        self.submit(ObjectOp::Call { method: SET_COOKIE, input: wire::encode_set_cookie(&old, TAG, &new) }).await?;
        self.locked_by.set(watch);
        Ok(())
    }

    /// Makes the image unusable for this client, for good: requests that need the lock fail with `why`.
    pub(crate) fn on_blocklisted(&self, why: Error) {
        let header = self.watcher.header();
        tracing::error!(%header, error = %why, "image unusable for this client; open it again");
        *self.fenced.borrow_mut() = Some(why);
        self.map.take();
        self.set_phase(Phase::Unlocked);
        self.may_be_free.notify_all();
    }

    /// Logs that the lock was lost while the watch was broken, with its present owner if known.
    async fn log_lost(&self, image: &impl LockedImage, why: &Error) {
        let owner = self.info().await.ok().and_then(|info| info.lockers.first().map(owner_name));
        log_lost(image, owner.as_deref(), why);
    }
}

/// Logs that an exclusive lock was lost.
pub(crate) fn log_lost(image: &impl LockedImage, owner: Option<&str>, why: &Error) {
    let new_owner = owner.unwrap_or("unknown");
    tracing::info!(image = image.name(), new_owner, reason = %why, "exclusive lock lost");
}
