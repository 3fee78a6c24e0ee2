//! Access of an attachment to what is outside: the image, its record, its log devices and other peers.

use std::fmt;
use std::future::ready;
use std::rc::Rc;

use forebay_block::{DataKey, Error, ErrorKind, LocalFuture, Result};

use super::members::PeerAccess;
use crate::options::LogOptions;
use crate::record::LogRecord;
use crate::replication::{PeerId, ReplicaPolicy};
use crate::shelf::Shelf;

/// Difference between the place of a log and a requested one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PlaceChange {
    /// No difference.
    Same,
    /// Only the limits differ, which can be changed online.
    Limits,
    /// Any other difference.
    Other,
}

/// Access to an image, its record and its log devices, on behalf of the write log.
pub trait LogKeeper: 'static {
    /// Location and settings of a log.
    type Place: Clone + fmt::Display + 'static;
    /// Guard that keeps the image's exclusive lock, once acquired, from being released on request.
    type Lock: 'static;

    /// Returns the identity of the image, which the log stores.
    fn volume_id(&self) -> String;

    /// Returns the identity of the image that all peers have for it, which a log with members stores.
    fn shared_id(&self) -> String {
        self.volume_id()
    }

    /// Returns the name of the image, for messages.
    fn volume_name(&self) -> String;

    /// Reads the record.
    ///
    /// # Errors
    /// Errors of the image; [`ErrorKind::Corrupt`] if the record is malformed.
    fn load(&self) -> LocalFuture<Result<LogRecord<Self::Place>>>;

    /// Replaces the record, durably. After an error, either the old or the new one may be stored.
    ///
    /// # Errors
    /// Errors of the image.
    fn store(&self, record: LogRecord<Self::Place>) -> LocalFuture<Result<()>>;

    /// Acquires the image's exclusive lock.
    ///
    /// # Errors
    /// [`ErrorKind::Busy`] if another client holds it and keeps it.
    fn lock(&self) -> LocalFuture<Result<Self::Lock>>;

    /// Waits until all changes submitted to the image so far have completed.
    fn drain_changes(&self) -> LocalFuture<()>;

    /// Opens the log device at a place; with `create`, with space for one more log.
    ///
    /// # Errors
    /// Errors of [`Shelf::open`].
    fn shelf(&self, place: &Self::Place, create: bool) -> LocalFuture<Result<Rc<Shelf>>>;

    /// Returns the size of a log at a place, in bytes.
    fn log_size(&self, place: &Self::Place) -> u64;

    /// Returns the options of a log at a place.
    fn options(&self, place: &Self::Place) -> LogOptions;

    /// Returns the key that the log's payloads are encrypted with; `None` for an image that is not encrypted.
    ///
    /// # Errors
    /// If the image is encrypted and its key is unavailable: its log is not opened then.
    fn key(&self) -> LocalFuture<Result<Option<DataKey>>> {
        Box::pin(ready(Ok(None)))
    }

    /// Compares two places.
    fn compare(&self, is: &Self::Place, wanted: &Self::Place) -> PlaceChange;

    /// Returns the place of a log that is at `is`, with the limits of `wanted`, and with its peers if it names some.
    fn adjusted(&self, _is: &Self::Place, wanted: &Self::Place) -> Self::Place {
        wanted.clone()
    }

    /// Returns the access to other peers; `None` where logs have no members.
    fn peers(&self) -> Option<Rc<dyn PeerAccess>> {
        None
    }

    /// Returns the peers that are to have copies of a log at a place, other than its primary.
    fn wanted(&self, _place: &Self::Place) -> Vec<PeerId> {
        Vec::new()
    }

    /// Returns the policy of a log at a place that has members.
    fn policy(&self, _place: &Self::Place) -> ReplicaPolicy {
        ReplicaPolicy::default()
    }

    /// Returns the place of a log that this peer takes over from a `former` primary, with its own copy on `shelf`.
    fn moved(&self, place: &Self::Place, _shelf: &Rc<Shelf>, _former: PeerId) -> Self::Place {
        place.clone()
    }

    /// Returns the client of the backend through which this process writes the image.
    fn client(&self) -> String {
        String::new()
    }

    /// Fences a client of the backend, and breaks its lock: once this has ended, nothing of it reaches the image any more.
    ///
    /// # Errors
    /// If that is not known to have happened.
    fn fence(&self, _client: &str) -> LocalFuture<Result<()>> {
        Box::pin(ready(Err(Error::new(ErrorKind::Unsupported, "this backend fences nobody"))))
    }

    /// Replaces the record, durably, if it is still `from`; returns whether it was. After an error, either may be stored.
    ///
    /// # Errors
    /// Errors of the image.
    fn replace(&self, _from: LogRecord<Self::Place>, _to: LogRecord<Self::Place>) -> LocalFuture<Result<bool>> {
        Box::pin(ready(Err(Error::new(ErrorKind::Unsupported, "this backend compares no records"))))
    }
}
