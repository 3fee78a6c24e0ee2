//! Persistent reservations of an image that several daemons serve: storage of their table, and when it is re-read.

use std::cell::Cell;
use std::rc::{Rc, Weak};
use std::time::Duration;

use forebay_block::reservation::{Joint, Keep, ReservationPeers, ReservationTable, Reservations};
use forebay_block::{Error, ErrorKind, LocalFuture, ObjectOp, Result, Transaction};
use forebay_reactor::sync::Notify;
use forebay_reactor::{now, sleep};

use crate::format::{ImageFeatures, metadata_key};
use crate::image::Image;
use crate::metadata::METADATA_VALUE_MAX;
use crate::open_image::OpenImage;
use crate::watcher::NOTIFY_TIMEOUT;
use crate::wire::notify::decode_incarnation;

/// Maximum time to wait for an unresponsive client. The OSD drops the watch of a dead one before that
/// (`osd_client_watch_timeout`, 30 s).
const PATIENCE: Duration = Duration::from_secs(40);
/// Retry interval for notifying the other clients, and for reading the table.
const AGAIN: Duration = Duration::from_secs(1);

/// Reservation state of an open image.
pub(crate) struct ImageReservations {
    joint: Joint,
    /// Set while the watch is broken: other clients may have changed the table.
    unsure: Cell<bool>,
    sure: Notify,
}

impl ImageReservations {
    /// Marks the table as possibly stale: changes by other clients can be missed from now on.
    pub(crate) fn lost_touch(&self) {
        self.unsure.set(true);
    }

    /// Re-reads the table after the watch is re-established, retrying as long as `go_on` holds, and then resumes
    /// reads.
    pub(crate) async fn found_touch(&self, go_on: impl Fn() -> bool) {
        while let Err(error) = self.joint.renew().await {
            tracing::warn!(%error, "cannot read reservations after a watch broke; retrying");
            if !go_on() {
                break;
            }
            sleep(AGAIN).await;
        }
        self.let_go();
    }

    /// Resumes waiting reads, also where requests fail or the image is closing.
    pub(crate) fn let_go(&self) {
        self.unsure.set(false);
        self.sure.notify_all();
    }

    pub(crate) fn is_unsure(&self) -> bool {
        self.unsure.get()
    }

    /// Waits until the table is known to be current. Fails with `Busy` if it has changed, since the read may no
    /// longer be allowed.
    pub(crate) async fn wait_until_sure(&self) -> Result<()> {
        let before = self.joint.adopted();
        self.sure.wait_until(|| !self.unsure.get()).await;
        if self.joint.adopted() == before { Ok(()) } else { Err(outdated()) }
    }

    /// Handles the acquisition of the image's lock, before any write is admitted; see [`Joint::claimed`].
    pub(crate) async fn claimed(&self) -> Result<bool> {
        self.joint.claimed().await
    }

    /// Handles a notification that another daemon has changed the table; see [`Joint::told`].
    pub(crate) async fn told(&self) -> Result<u64> {
        self.joint.told().await
    }
}

/// Returns the error of a request allowed by a superseded table. Hosts retry, and are checked against the current
/// one.
pub(crate) fn outdated() -> Error {
    Error::new(ErrorKind::Busy, "reservations have changed since this was allowed")
}

/// Reservation store in the image's metadata, for all daemons that serve it.
struct WithImage {
    image: Weak<OpenImage>,
    key: Vec<u8>,
}

impl WithImage {
    fn image(&self) -> Result<Rc<OpenImage>> {
        self.image.upgrade().ok_or_else(|| Error::new(ErrorKind::ShuttingDown, "the image is closed"))
    }
}

impl ReservationPeers for WithImage {
    fn claim(&self) -> LocalFuture<Result<()>> {
        let image = self.image();
        Box::pin(async move {
            let image = image?;
            if !image.header().features.has(ImageFeatures::EXCLUSIVE_LOCK) {
                return Err(without_lock(&image));
            }
            image.lock().await
        })
    }

    fn load(&self) -> LocalFuture<Result<Option<Vec<u8>>>> {
        let (image, key) = (self.image(), self.key.clone());
        Box::pin(async move {
            let image = image?;
            let mut values = image.backend().kv_get(&image.header_object(), vec![key]).await?;
            Ok(values.pop().flatten())
        })
    }

    fn replace(&self, before: Option<Vec<u8>>, after: Vec<u8>) -> LocalFuture<Result<()>> {
        let (image, key) = (self.image(), self.key.clone());
        Box::pin(async move {
            let image = image?;
            image.check_there()?;
            if after.len() > METADATA_VALUE_MAX {
                return Err(Error::new(ErrorKind::Invalid, format!("reservations of {} bytes", after.len())));
            }
            let lost = || Error::new(ErrorKind::Busy, "the image's exclusive lock was released");
            let assertion = image.exclusive_lock().and_then(|lock| lock.assertion()).ok_or_else(lost)?;
            let compare = ObjectOp::KvCompare { key: key.clone(), value: before };
            let set = ObjectOp::KvSet { pairs: vec![(key, after)] };
            let change = Transaction::new(vec![ObjectOp::AssertExists, assertion, compare, set]).durable();
            image.backend().submit(&image.header_object(), change).await.map(drop)
        })
    }

    fn announce(&self) -> LocalFuture<()> {
        let image = self.image();
        Box::pin(async move {
            if let Ok(image) = image
                && let Err(error) = ask_others(&image, |_| false).await
            {
                let image = image.name();
                tracing::warn!(image, %error, "cannot notify the other clients of changed reservations");
            }
        })
    }

    fn knows(&self, incarnation: u64) -> LocalFuture<Result<bool>> {
        let image = self.image();
        Box::pin(async move {
            let knows = |answer: &[u8]| decode_incarnation(answer) == Some(incarnation);
            let answers = ask_others(&image?, knows).await?;
            Ok(answers.iter().any(|answer| knows(answer)))
        })
    }
}

fn without_lock(image: &OpenImage) -> Error {
    let what =
        format!("image {}: reservations without the feature exclusive-lock in a pool shared with others", image.name());
    Error::new(ErrorKind::Unsupported, what)
}

/// Notifies all clients that have the image open of changed reservations, until each has responded or its watch is
/// gone, or one response satisfies `enough`; returns the responses.
async fn ask_others(image: &Rc<OpenImage>, enough: impl Fn(&[u8]) -> bool) -> Result<Vec<Vec<u8>>> {
    let started = now();
    loop {
        let closed = || Error::new(ErrorKind::ShuttingDown, "the image is closed");
        let watcher = image.watcher().ok_or_else(closed)?;
        let missed = match watcher.reservations_changed().await {
            Ok((answers, missed)) if missed.is_empty() || answers.iter().any(|answer| enough(answer)) => {
                return Ok(answers);
            }
            Ok((_, missed)) => format!("no answer from {}", missed.join(", ")),
            Err(error) if matches!(error.kind(), ErrorKind::Fenced | ErrorKind::NotFound) => return Err(error),
            Err(error) => {
                sleep(AGAIN).await;
                error.to_string()
            }
        };
        if started.elapsed() > PATIENCE {
            return Err(Error::new(ErrorKind::TimedOut, missed));
        }
        tracing::debug!(
            image = image.name(),
            missed,
            "no response from all clients that have the image open within {NOTIFY_TIMEOUT:?}; retrying"
        );
    }
}

impl Image {
    /// Returns whether other clients can have the image open at the same time.
    pub fn is_shared(&self) -> bool {
        self.shared().is_shared()
    }

    /// Returns the reservations of an image in a shared pool, which other daemons may serve too: one table for all,
    /// stored as metadata under `key`. It is changed by the owner of the exclusive lock, and re-read whenever the
    /// lock is acquired. Requests that waited for the lock and were allowed by a superseded table fail with
    /// [`ErrorKind::Busy`].
    ///
    /// Returns `None` where reservations are unsupported: the handle is read-only, or the image has no exclusive
    /// lock.
    pub async fn joint_reservations(&self, key: &str, keep: Rc<dyn Keep>) -> Result<Option<Reservations>> {
        let shared = self.shared();
        if self.is_read_only() {
            return Ok(None);
        }
        if !shared.header().features.has(ImageFeatures::EXCLUSIVE_LOCK) {
            return match self.metadata(key).await? {
                Some(stored) if !ReservationTable::decode(&stored)?.registrants().is_empty() => {
                    Err(without_lock(shared))
                }
                _ => Ok(None),
            };
        }
        let peers = WithImage { image: Rc::downgrade(shared), key: metadata_key(key) };
        let (reservations, joint) = Reservations::joint(keep, Rc::new(peers));
        // Registered before the table is read, so that no change is missed.
        let reserved = ImageReservations { joint: joint.clone(), unsure: Cell::new(false), sure: Notify::new() };
        shared.set_reserved(Rc::new(reserved));
        joint.begin().await?;
        Ok(Some(reservations))
    }
}
