//! Watch of an open image's header: notifications from and to the other clients of its pool.

use std::cell::{Cell, RefCell};
use std::rc::{Rc, Weak};
use std::time::Duration;

use forebay_block::{
    Error, ErrorKind, LocalFuture, Notification, Notified, ObjectName, Result, SharedObjects, Watch, WatchHandler,
};
use forebay_reactor::{sleep, spawn};

use crate::lock::Then;
use crate::wire::notify::{ClientId, NotifyMessage, OwnerRequest, encode_incarnation};

/// Notification timeout, the same as librbd's.
pub(crate) const NOTIFY_TIMEOUT: Duration = Duration::from_secs(5);
/// Retry interval for re-establishing the watch.
const WATCH_AGAIN: Duration = Duration::from_secs(1);

/// Events of a watched image: what other clients ask for and have changed, and what becomes of the watch.
pub(crate) trait ImageEvents {
    /// Returns the response to a notification, and the action that follows.
    fn react(&self, me: ClientId, message: Option<&NotifyMessage>) -> (Vec<u8>, Then);

    /// Handles a changed header. The sender waits for it.
    fn on_header_update(self: Rc<Self>) -> LocalFuture<Result<()>>;

    /// Handles changed reservations; returns the incarnation of the table in force, `None` if the image has no table.
    /// The sender waits for it.
    fn on_reservations_changed(self: Rc<Self>) -> LocalFuture<Result<Option<u64>>>;

    /// Handles another client's request for an operation; returns the response. `None` if the image is closing.
    fn on_operation(self: Rc<Self>, request: OwnerRequest) -> LocalFuture<Option<Vec<u8>>>;

    /// Handles a message about a request of this client to the owner of the lock.
    fn on_owner_message(&self, message: NotifyMessage);

    /// Handles another client's request for the exclusive lock, after the response.
    fn on_lock_requested(self: Rc<Self>, client: ClientId) -> LocalFuture<()>;

    /// Handles the release of the exclusive lock by another client.
    fn on_lock_released(&self);

    /// Handles the loss of the watch: notifications may be missed from now on.
    fn on_watch_lost(&self);

    /// Handles the re-established watch.
    fn on_watch_restored(self: Rc<Self>) -> LocalFuture<()>;

    /// Handles the end of an attempt to re-establish the watch, whether it was restored or not.
    fn on_watch_settled(self: Rc<Self>) -> LocalFuture<()>;

    /// Handles the permanent loss of the image: the cluster has fenced this client (`Fenced`), or the image has been
    /// removed (`NotFound`).
    fn on_blocklisted(&self, why: Error);
}

/// Watch of the header of an open image. Delivers events to the image, and notifies the other clients.
///
/// Invariants:
/// 1. There is one watch at most. While it is being re-established there is none, and [`HeaderWatcher::client`] has the
///    watch 0.
/// 2. Once ended, the watch is not re-established.
pub(crate) struct HeaderWatcher {
    objects: Rc<dyn SharedObjects>,
    header: ObjectName,
    image: Weak<dyn ImageEvents>,
    watch: RefCell<Option<CurrentWatch>>,
    ended: Cell<bool>,
}

/// Watch, until its loss was handled.
struct CurrentWatch {
    watch: Box<dyn Watch>,
    is_broken: Rc<Cell<bool>>,
}

/// Handler of the watch, which the pool keeps.
struct Handler {
    watcher: Weak<HeaderWatcher>,
    is_broken: Rc<Cell<bool>>,
}

impl WatchHandler for Handler {
    fn notified(&self, notification: Notification) {
        if let Some(watcher) = self.watcher.upgrade() {
            drop(spawn(async move { watcher.notified(notification).await }));
        }
    }

    fn broken(&self, error: Error) {
        // Known at once; what follows from it takes its time.
        self.is_broken.set(true);
        if let Some(watcher) = self.watcher.upgrade() {
            drop(spawn(async move { watcher.broken(error).await }));
        }
    }
}

impl HeaderWatcher {
    /// Creates a watcher of a header, without a watch; see [`begin`](Self::begin).
    pub(crate) fn new(objects: Rc<dyn SharedObjects>, header: ObjectName, image: Weak<dyn ImageEvents>) -> Rc<Self> {
        Rc::new(Self { objects, header, image, watch: RefCell::default(), ended: Cell::new(false) })
    }

    /// Establishes the watch.
    pub(crate) async fn begin(self: &Rc<Self>) -> Result<()> {
        let is_broken = Rc::new(Cell::new(false));
        let handler = Rc::new(Handler { watcher: Rc::downgrade(self), is_broken: is_broken.clone() });
        let watch = self.objects.watch(&self.header, handler).await?;
        // A watch may break before it is stored here; such a one is replaced.
        drop(self.watch.replace(Some(CurrentWatch { watch, is_broken })));
        Ok(())
    }

    /// Ends the watch.
    pub(crate) async fn end(&self) {
        self.ended.set(true);
        let watch = self.watch.take();
        if let Some(CurrentWatch { watch, .. }) = watch
            && let Err(error) = watch.end().await
        {
            tracing::debug!(header = %self.header, %error, "cannot end a watch; it expires");
        }
    }

    /// Returns whether the watch has been ended.
    pub(crate) fn is_ended(&self) -> bool {
        self.ended.get()
    }

    pub(crate) fn objects(&self) -> &Rc<dyn SharedObjects> {
        &self.objects
    }

    /// Returns the watched object.
    pub(crate) fn header(&self) -> &ObjectName {
        &self.header
    }

    /// Returns this client as the others see it; its watch is 0 while there is none.
    pub(crate) fn client(&self) -> ClientId {
        let watch = self.watch.borrow().as_ref().map_or(0, |current| current.watch.cookie());
        ClientId { number: self.objects.identity().number, watch }
    }

    /// Returns whether the watch with this cookie was confirmed at most `age` ago, and has not broken since.
    pub(crate) fn is_confirmed(&self, cookie: u64, age: Duration) -> bool {
        self.watch.borrow().as_ref().is_some_and(|CurrentWatch { watch, is_broken }| {
            !is_broken.get() && watch.cookie() == cookie && watch.confirmed().elapsed() < age
        })
    }

    // ---- Notifying others ----

    /// Notifies the other clients of a changed header.
    pub(crate) async fn header_changed(&self) {
        self.tell(NotifyMessage::HeaderUpdate).await;
    }

    /// Notifies the other clients, as far as they respond.
    pub(crate) async fn tell(&self, message: NotifyMessage) {
        // Clients that do not respond have lost their watch, or re-read when they have it again.
        if let Err(error) = self.notify(message).await {
            tracing::debug!(header = %self.header, %error, "cannot notify the other clients of an image");
        }
    }

    /// Notifies the other clients; returns their responses.
    pub(crate) async fn notify(&self, message: NotifyMessage) -> Result<Notified> {
        self.objects.notify(&self.header, message.encode(), NOTIFY_TIMEOUT).await
    }

    /// Notifies the other clients of the image's reservations; returns their responses, and the clients without one
    /// that still watch.
    pub(crate) async fn reservations_changed(&self) -> Result<(Vec<Vec<u8>>, Vec<String>)> {
        let told = self.notify(NotifyMessage::Reservations(self.client())).await?;
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

    // ---- Events ----

    async fn notified(self: Rc<Self>, notification: Notification) {
        let message = NotifyMessage::decode(&notification.payload);
        let image = self.image.upgrade();
        let (answer, then) = match &image {
            Some(image) => image.react(self.client(), message.as_ref()),
            None => (Vec::new(), Then::Nothing),
        };
        // A header update is acknowledged after the change is known here.
        if let (Then::Refresh, Some(image)) = (then, &image)
            && let Err(error) = image.clone().on_header_update().await
        {
            tracing::warn!(header = %self.header, %error, "cannot read a changed header");
        }
        let answer = match (then, &image) {
            (Then::Reservations, Some(image)) => match image.clone().on_reservations_changed().await {
                Ok(Some(incarnation)) => encode_incarnation(incarnation),
                Ok(None) => answer,
                Err(error) => {
                    // Not acknowledged: the sender must not assume that the reservations are in force here.
                    tracing::warn!(header = %self.header, %error, "cannot read changed reservations");
                    return;
                }
            },
            (Then::Operate, Some(image)) => match &message {
                Some(NotifyMessage::Operation(request)) => {
                    image.clone().on_operation(request.clone()).await.unwrap_or_default()
                }
                _ => answer,
            },
            _ => answer,
        };
        let answered = self.objects.answer_notification(&self.header, notification.id, notification.cookie, answer);
        if let Err(error) = answered.await {
            tracing::debug!(header = %self.header, %error, "cannot acknowledge a notification");
        }
        match (then, image, message) {
            (Then::Release, Some(image), Some(NotifyMessage::RequestLock { client, .. })) => {
                image.on_lock_requested(client).await;
            }
            (Then::Retry, Some(image), _) => image.on_lock_released(),
            (Then::Deliver, Some(image), Some(message)) => image.on_owner_message(message),
            _ => {}
        }
    }

    /// Re-establishes the watch, until it is ended or the image is lost for good.
    async fn broken(self: Rc<Self>, why: Error) {
        if let Some(image) = self.image.upgrade() {
            image.on_watch_lost();
        }
        drop(self.watch.take());
        tracing::warn!(header = %self.header, error = %why, "the watch of an image broke; establishing it again");
        if self.begin_again(why).await
            && let Some(image) = self.image.upgrade()
        {
            image.on_watch_restored().await;
        }
        if let Some(image) = self.image.upgrade() {
            image.on_watch_settled().await;
        }
    }

    /// Re-establishes the watch; returns whether there is one now.
    async fn begin_again(self: &Rc<Self>, mut why: Error) -> bool {
        while !self.ended.get() {
            let Some(image) = self.image.upgrade() else { return false };
            if why.kind() == ErrorKind::Fenced {
                image.on_blocklisted(why);
                return false;
            }
            drop(image);
            match self.begin().await {
                Ok(()) => return !self.ended.get(),
                Err(error) if error.kind() == ErrorKind::NotFound => {
                    if let Some(image) = self.image.upgrade() {
                        image.on_blocklisted(Error::new(ErrorKind::NotFound, "the image has been removed"));
                    }
                    return false;
                }
                Err(error) => why = error,
            }
            sleep(WATCH_AGAIN).await;
        }
        false
    }
}
