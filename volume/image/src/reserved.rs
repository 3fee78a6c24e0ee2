//! Reservations of an image that other daemons serve as well: where their table is kept, and when it is read again.

use std::cell::Cell;
use std::rc::{Rc, Weak};
use std::time::Duration;

use forebay_block::reservation::{Joint, Keep, Peers, Reservations, Table};
use forebay_block::{Error, ErrorKind, LocalFuture, ObjectOp, Result, Transaction};
use forebay_reactor::sync::Notify;
use forebay_reactor::{now, sleep};

use crate::format::{Features, metadata_key};
use crate::image::{Image, Shared};
use crate::metadata::METADATA_VALUE_MAX;
use crate::session::NOTIFY_TIMEOUT;
use crate::wire::notify::decode_incarnation;

/// How long another client may say nothing and still be waited for.  One that is dead is forgotten by its OSD before
/// that (`osd_client_watch_timeout`, 30 s).
const PATIENCE: Duration = Duration::from_secs(40);
/// Between attempts to reach the others, or to read the table.
const AGAIN: Duration = Duration::from_secs(1);

/// What an open image knows of reservations.
pub(crate) struct Reserved {
    joint: Joint,
    /// Its watch is broken: others may have changed the table.
    unsure: Cell<bool>,
    sure: Notify,
}

impl Reserved {
    /// From now on others may change the table unheard.
    pub(crate) fn lost_touch(&self) {
        self.unsure.set(true);
    }

    /// What others change is heard of again; the table is read anew before anything is let go on.
    pub(crate) async fn found_touch(&self, go_on: impl Fn() -> bool) {
        while let Err(error) = self.joint.renew().await {
            tracing::warn!(%error, "reservations could not be read after a watch broke");
            if !go_on() {
                break;
            }
            sleep(AGAIN).await;
        }
        self.let_go();
    }

    /// Nothing is waited for any more: whatever is asked of the image fails, or it is being closed.
    pub(crate) fn let_go(&self) {
        self.unsure.set(false);
        self.sure.notify_all();
    }

    pub(crate) fn is_unsure(&self) -> bool {
        self.unsure.get()
    }

    /// Waits until it is known whether a read is still allowed that was allowed by the table as it was.
    pub(crate) async fn wait_until_sure(&self) -> Result<()> {
        let before = self.joint.adopted();
        self.sure.wait_until(|| !self.unsure.get()).await;
        if self.joint.adopted() == before { Ok(()) } else { Err(outdated()) }
    }

    /// The image's lock is ours, and nothing has passed yet; see [`Joint::claimed`].
    pub(crate) async fn claimed(&self) -> Result<bool> {
        self.joint.claimed().await
    }

    /// Another daemon has changed the table; see [`Joint::told`].
    pub(crate) async fn told(&self) -> Result<u64> {
        self.joint.told().await
    }
}

/// The error of what was allowed by a table that is no more.  Hosts try again, and are asked for what counts now.
pub(crate) fn outdated() -> Error {
    Error::new(ErrorKind::Busy, "reservations have changed since this was allowed")
}

/// Keeps the table with the image, for all who serve it.
struct WithImage {
    image: Weak<Shared>,
    key: Vec<u8>,
}

impl WithImage {
    fn image(&self) -> Result<Rc<Shared>> {
        self.image.upgrade().ok_or_else(|| Error::new(ErrorKind::ShuttingDown, "the image is closed"))
    }
}

impl Peers for WithImage {
    fn claim(&self) -> LocalFuture<Result<()>> {
        let image = self.image();
        Box::pin(async move {
            let image = image?;
            if !image.header().features.has(Features::EXCLUSIVE_LOCK) {
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
            let lost = || Error::new(ErrorKind::Busy, "the image's lock was given up");
            let assertion = image.session().and_then(|session| session.assertion()).ok_or_else(lost)?;
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
                tracing::warn!(image, %error, "who else serves the image was not told of its reservations");
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

fn without_lock(image: &Shared) -> Error {
    let what =
        format!("image {}: reservations without the feature exclusive-lock in a pool shared with others", image.name());
    Error::new(ErrorKind::Unsupported, what)
}

/// Tells all who have the image open that its reservations may have changed, until each of them has answered or is
/// forgotten, or one has given an answer that is enough; the answers.
async fn ask_others(image: &Rc<Shared>, enough: impl Fn(&[u8]) -> bool) -> Result<Vec<Vec<u8>>> {
    let started = now();
    loop {
        let closed = || Error::new(ErrorKind::ShuttingDown, "the image is closed");
        let session = image.session().ok_or_else(closed)?;
        let missed = match session.ask_of_reservations().await {
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
            "not all who have the image open have answered within {NOTIFY_TIMEOUT:?}"
        );
    }
}

impl Image {
    /// Other clients may have it open at the same time.
    pub fn is_shared(&self) -> bool {
        self.shared().session().is_some()
    }

    /// The reservations of an image that other daemons may serve as well, in a pool shared with others: one table for
    /// all, kept as metadata under `key`.  It is changed by who has the exclusive lock, and read again whenever the lock
    /// is taken; what waits for the lock then and was allowed by another table fails with [`ErrorKind::Busy`].
    ///
    /// `None` where nothing can be reserved: the image is open for reading only, or has no exclusive lock.
    pub async fn joint_reservations(&self, key: &str, keep: Rc<dyn Keep>) -> Result<Option<Reservations>> {
        let shared = self.shared();
        if self.is_read_only() {
            return Ok(None);
        }
        if !shared.header().features.has(Features::EXCLUSIVE_LOCK) {
            return match self.metadata(key).await? {
                Some(stored) if !Table::decode(&stored)?.registrants().is_empty() => Err(without_lock(shared)),
                _ => Ok(None),
            };
        }
        let peers = WithImage { image: Rc::downgrade(shared), key: metadata_key(key) };
        let (reservations, joint) = Reservations::joint(keep, Rc::new(peers));
        // Before it is read, so that no change is missed.
        let reserved = Reserved { joint: joint.clone(), unsure: Cell::new(false), sure: Notify::new() };
        shared.set_reserved(Rc::new(reserved));
        joint.begin().await?;
        Ok(Some(reservations))
    }
}
