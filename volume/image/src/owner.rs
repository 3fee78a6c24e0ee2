//! Operations that clients ask of the owner of an image's exclusive lock, so that the lock need not change hands.
//!
//! librbd asks for some operations with an id: the owner answers at once, sends its progress, and the result in the end.
//! For others the answer is the result. A client that hears nothing for a while asks again, with the same id.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, VecDeque};
use std::rc::Rc;
use std::time::Duration;

use forebay_block::{Error, ErrorKind, LocalFuture, Result, SnapId};
use forebay_reactor::{sleep, spawn};

use crate::ask_owner::AskedOperations;
use crate::format::ImageFeatures;
use crate::image::{Image, ImageOpenOptions};
use crate::info::{ObjectProgress, SnapshotKind};
use crate::open_image::OpenImage;
use crate::wire::notify::{NotifyMessage, OwnerRequest, RequestId, encode_response};

/// Interval between messages about the progress of an operation; librbd waits 30 s for one.
const TELL_AGAIN: Duration = Duration::from_secs(2);
/// Results that are kept, for clients that ask again.
const RESULTS: usize = 256;
/// Attempts to send the result of an operation.
const SEND_TRIES: usize = 10;

/// Response "not supported" (EOPNOTSUPP): librbd then requests the lock, and performs the operation itself.
pub(crate) const UNSUPPORTED: i32 = -95;
/// Result "try again": the client sent the request to itself (ERESTART).
const RESTART: i32 = -85;

/// Operation on an image that the owner of its lock carries out for other clients.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum OwnerOperation {
    /// Makes a clone independent of its parent.
    Flatten,
    /// Resizes the image.
    Resize {
        /// New size in bytes.
        size: u64,
        /// Set to allow a smaller one.
        allow_shrink: bool,
    },
    /// Creates a snapshot.
    CreateSnapshot {
        /// Name of the snapshot.
        name: String,
    },
    /// Removes a snapshot.
    RemoveSnapshot {
        /// Name of the snapshot.
        name: String,
        /// Set if it is in the trash, which has names of its own.
        in_trash: bool,
    },
    /// Renames a snapshot.
    RenameSnapshot {
        /// Number of the snapshot.
        id: u64,
        /// New name.
        to: String,
    },
    /// Protects a snapshot from removal, or ends that.
    ProtectSnapshot {
        /// Name of the snapshot.
        name: String,
        /// Set to protect it.
        protected: bool,
    },
    /// Renames the image.
    Rename {
        /// New name.
        to: String,
    },
    /// Deallocates zeroes that the image stores.
    Sparsify {
        /// Size in bytes of the blocks that are deallocated.
        sparse_size: u64,
    },
    /// Rebuilds the object map of the image.
    RebuildObjectMap,
    /// Enables or disables features.
    UpdateFeatures {
        /// Bits of the features.
        features: u64,
        /// Set to enable them.
        enabled: bool,
    },
    /// Sets a metadata value.
    SetMetadata {
        /// Key of the value.
        key: String,
        /// New value; `None` to remove it.
        value: Option<Vec<u8>>,
    },
}

/// Callback for the progress of an operation.
pub type OperationProgress = Rc<dyn Fn(ObjectProgress)>;

/// Layer above an image that takes part in operations for other clients, such as a write log.
pub trait OwnerOperations {
    /// Carries out an operation.
    fn perform(&self, operation: OwnerOperation, progress: OperationProgress) -> LocalFuture<Result<()>>;
}

/// Requests of other clients to this one, while it owns the lock of an image.
///
/// Invariant: a request with an id is carried out once, however often it is sent, as long as its result is kept.
#[derive(Default)]
pub(crate) struct OwnerRequests {
    operations: RefCell<Option<Rc<dyn OwnerOperations>>>,
    /// Requests with an id: their results, once they are complete.
    known: RefCell<BTreeMap<RequestId, Option<i32>>>,
    /// Complete ones, oldest first.
    complete: RefCell<VecDeque<RequestId>>,
    /// Requests of this client to the owner.
    pub(crate) asked: AskedOperations,
}

impl OwnerRequests {
    pub(crate) fn set_operations(&self, operations: Rc<dyn OwnerOperations>) {
        *self.operations.borrow_mut() = Some(operations);
    }

    fn finish(&self, id: RequestId, result: i32) {
        self.known.borrow_mut().insert(id, Some(result));
        let mut complete = self.complete.borrow_mut();
        complete.push_back(id);
        if complete.len() > RESULTS
            && let Some(oldest) = complete.pop_front()
        {
            self.known.borrow_mut().remove(&oldest);
        }
    }
}

/// Answers a request of another client; `None` if the image is closing.
pub(crate) async fn answer_request(shared: &Rc<OpenImage>, request: OwnerRequest) -> Option<Vec<u8>> {
    let Some(operation) = request.operation else { return Some(encode_response(UNSUPPORTED)) };
    if shared.lifecycle().is_closing() || shared.lifecycle().is_removed() {
        return None;
    }
    let watcher = shared.watcher()?;
    if request.id.is_some_and(|id| id.client == watcher.client()) {
        return Some(encode_response(RESTART));
    }
    // The handle keeps the image open, and the lock with it.
    let image = Image::new(shared.clone(), ImageOpenOptions::default(), None);
    tracing::info!(image = shared.name(), ?operation, "another client asks for an operation");
    let Some(id) = request.id else {
        let result = perform(&image, operation, Rc::new(|_| {})).await;
        return Some(encode_response(result));
    };
    let known = shared.owner().known.borrow().get(&id).copied();
    match known {
        Some(Some(0)) => {
            // The client waits for the result, which it has missed.
            drop(spawn(send_result(shared.clone(), id, 0)));
            return Some(encode_response(0));
        }
        Some(Some(result)) => return Some(encode_response(result)),
        Some(None) => return Some(encode_response(0)),
        None => {}
    }
    shared.owner().known.borrow_mut().insert(id, None);
    drop(spawn(async move {
        let shared = image.shared().clone();
        let now = Rc::new(Cell::new(ObjectProgress::default()));
        let told = now.clone();
        let ticker = shared.clone();
        let ticking = spawn(async move {
            loop {
                sleep(TELL_AGAIN).await;
                let Some(watcher) = ticker.watcher() else { return };
                let ObjectProgress { done, total } = told.get();
                watcher.tell(NotifyMessage::Progress { id, done, total }).await;
            }
        });
        let result = perform(&image, operation, Rc::new(move |progress| now.set(progress))).await;
        ticking.abort();
        shared.owner().finish(id, result);
        send_result(shared, id, result).await;
    }));
    Some(encode_response(0))
}

/// Sends the result of a request to the client that waits for it.
async fn send_result(shared: Rc<OpenImage>, id: RequestId, result: i32) {
    for _ in 0..SEND_TRIES {
        let Some(watcher) = shared.watcher() else { return };
        match watcher.notify(NotifyMessage::Completed { id, result }).await {
            Err(error) if error.kind() == ErrorKind::TimedOut => {}
            _ => return,
        }
    }
}

/// Carries out an operation; returns 0, or a negative errno.
async fn perform(image: &Rc<Image>, operation: OwnerOperation, progress: OperationProgress) -> i32 {
    let operations = image.shared().owner().operations.borrow().clone();
    let done = match operations {
        Some(operations) => operations.perform(operation, progress).await,
        None => image.perform(operation, progress).await,
    };
    match done {
        Ok(()) => 0,
        Err(error) => {
            tracing::warn!(image = image.name(), %error, "an operation for another client failed");
            -errno(error.kind())
        }
    }
}

/// Returns the number of an error on Linux.
fn errno(kind: ErrorKind) -> i32 {
    match kind {
        ErrorKind::NotFound => 2,
        ErrorKind::Io | ErrorKind::Corrupt | ErrorKind::Mismatch(_) => 5,
        ErrorKind::Busy => 16,
        ErrorKind::Exists => 17,
        ErrorKind::Invalid | ErrorKind::OutOfRange => 22,
        ErrorKind::NoSpace => 122,
        ErrorKind::ReadOnly | ErrorKind::Denied => 30,
        ErrorKind::Unsupported => 95,
        ErrorKind::Fenced | ErrorKind::ShuttingDown => 108,
        ErrorKind::TimedOut | ErrorKind::Guard => 110,
    }
}

impl Image {
    /// Carries out an operation that another client has asked for.
    ///
    /// # Errors
    /// Those of the operation.
    pub async fn perform(&self, operation: OwnerOperation, progress: OperationProgress) -> Result<()> {
        let shared = self.shared();
        match operation {
            OwnerOperation::Flatten => self.flatten(|now| progress(now)).await,
            OwnerOperation::Resize { size, allow_shrink } => self.resize(size, allow_shrink, |now| progress(now)).await,
            OwnerOperation::CreateSnapshot { name } => self.create_snapshot(&name).await.map(drop),
            OwnerOperation::RemoveSnapshot { name, in_trash: false } => self.remove_snapshot(&name).await,
            OwnerOperation::RemoveSnapshot { name, in_trash: true } => {
                let header = shared.header();
                let is_it = |stored: &&crate::wire::snapshot::Snapshot| {
                    stored.name == name && matches!(stored.kind, SnapshotKind::Trash { .. })
                };
                let found = header.snapshots.iter().find(is_it).map(|stored| stored.id);
                let missing = || Error::new(ErrorKind::NotFound, format!("snapshot {name} in the trash"));
                self.remove_snapshot_number(found.ok_or_else(missing)?).await
            }
            OwnerOperation::RenameSnapshot { id, to } => {
                let header = shared.header();
                let found = header.snapshots.iter().find(|stored| stored.id == SnapId(id));
                let missing = || Error::new(ErrorKind::NotFound, format!("snapshot {id}"));
                let name = found.ok_or_else(missing)?.name.clone();
                self.rename_snapshot(&name, &to).await
            }
            OwnerOperation::ProtectSnapshot { name, protected } => {
                // As cls_rbd: what is protected already is no error.
                self.set_snapshot_protection(&name, protected).await.map(drop)
            }
            OwnerOperation::Rename { to } => shared.images().rename(&self.name(), &to).await,
            OwnerOperation::Sparsify { sparse_size } => self.sparsify(sparse_size, |now| progress(now)).await,
            OwnerOperation::RebuildObjectMap => self.rebuild_object_map(None, |now| progress(now)).await,
            OwnerOperation::UpdateFeatures { features, enabled } => {
                self.set_features(ImageFeatures(features), enabled).await.map(drop)
            }
            OwnerOperation::SetMetadata { key, value } => {
                self.set_metadata(&key, value).await?;
                if let Some(watcher) = shared.watcher() {
                    watcher.header_changed().await;
                }
                Ok(())
            }
        }
    }
}
