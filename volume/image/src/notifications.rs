//! Notifications on an image's header, as every client receives them that watches it.

use std::rc::Rc;

use forebay_block::{Error, ErrorKind, Notification, ObjectName, Result, SharedObjects, Watch, WatchHandler};
use forebay_reactor::spawn;

use crate::images::Images;
use crate::wire::notify::NotifyMessage;

/// Notification that was sent to the clients of an image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ImageNotification {
    /// Notification number.
    pub id: u64,
    /// Watch that received it.
    pub cookie: u64,
    /// Number of the client that sent it.
    pub sender: u64,
    /// Length of the message in bytes.
    pub len: usize,
    /// Kind of message: `acquired_lock`, `released_lock`, `request_lock`, `header_update`, `reservations`, `operation N` of
    /// the lock's owner, or `message N`; `malformed`.
    pub kind: String,
}

/// Watch of an image's notifications.
pub struct NotificationWatch(Box<dyn Watch>);

impl NotificationWatch {
    /// Ends the watch: nothing is received any more when this returns.
    pub async fn end(self) -> Result<()> {
        self.0.end().await
    }
}

/// Receiver of notifications, or of the error that has broken the watch.
pub type NotificationReceiver = Rc<dyn Fn(Result<ImageNotification>)>;

struct Handler {
    objects: Rc<dyn SharedObjects>,
    header: ObjectName,
    receiver: NotificationReceiver,
}

impl WatchHandler for Handler {
    fn notified(&self, notification: Notification) {
        let Notification { id, cookie, sender, payload } = notification;
        // Others wait for this client as well.
        let answer = self.objects.answer_notification(&self.header, id, cookie, Vec::new());
        drop(spawn(async move {
            if let Err(error) = answer.await {
                tracing::debug!(%error, "cannot acknowledge a notification");
            }
        }));
        (self.receiver)(Ok(ImageNotification { id, cookie, sender, len: payload.len(), kind: kind_of(&payload) }));
    }

    fn broken(&self, error: Error) {
        (self.receiver)(Err(error));
    }
}

fn kind_of(payload: &[u8]) -> String {
    match NotifyMessage::decode(payload) {
        Some(NotifyMessage::AcquiredLock(_)) => "acquired_lock".into(),
        Some(NotifyMessage::ReleasedLock(_)) => "released_lock".into(),
        Some(NotifyMessage::RequestLock { .. }) => "request_lock".into(),
        Some(NotifyMessage::HeaderUpdate) => "header_update".into(),
        Some(NotifyMessage::Reservations(_)) => "reservations".into(),
        Some(NotifyMessage::Operation(request)) => match request.operation {
            Some(operation) => format!("request {operation:?}"),
            None => "request".into(),
        },
        Some(NotifyMessage::Progress { .. }) => "progress".into(),
        Some(NotifyMessage::Completed { .. }) => "completed".into(),
        Some(NotifyMessage::Other(number)) => format!("message {number}"),
        None => "malformed".into(),
    }
}

impl Images {
    /// Watches the notifications of an image until the watch is ended or breaks.
    ///
    /// # Errors
    /// `NotFound`; `Unsupported` where the pool is not shared.
    pub async fn watch_notifications(&self, name: &str, receiver: NotificationReceiver) -> Result<NotificationWatch> {
        if let Some((images, name)) = self.route(name) {
            return Box::pin(images.watch_notifications(name, receiver)).await;
        }
        let id = self.id_of(name).await?;
        let objects = self.backend().shared().ok_or_else(|| {
            let what = format!("image {name}: only images in pools of a Ceph cluster have notifications");
            Error::new(ErrorKind::Unsupported, what)
        })?;
        let header = self.header_object(&id);
        let handler = Rc::new(Handler { objects: objects.clone(), header: header.clone(), receiver });
        let watch = objects.watch(&header, handler).await;
        watch.map(NotificationWatch).map_err(|error| error.within(format_args!("image {name}")))
    }
}
