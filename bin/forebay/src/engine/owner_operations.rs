//! Operations that other clients of a cluster ask of this daemon, as the owner of an image's exclusive lock: they go through
//! the volume, so that a write log takes part in them.

use std::rc::Weak;
use std::time::Duration;

use forebay_block::{Error, ErrorKind, LocalFuture, Result};
use forebay_image::{ObjectProgress, OperationProgress, OwnerOperation, OwnerOperations};
use forebay_reactor::{sleep, spawn};

use super::Engine;
use crate::failure::{Failure, FailureKind};
use crate::ops::ProgressSink;
use crate::spec::{ImageSpec, SnapshotSpec};

/// Interval between two looks at the progress of an operation.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// Operations of a volume for other clients.
pub(super) struct VolumeOperations {
    engine: Weak<Engine>,
    spec: ImageSpec,
}

impl VolumeOperations {
    pub(super) fn new(engine: Weak<Engine>, spec: &ImageSpec) -> Self {
        Self { engine, spec: spec.clone() }
    }
}

impl OwnerOperations for VolumeOperations {
    fn perform(&self, operation: OwnerOperation, progress: OperationProgress) -> LocalFuture<Result<()>> {
        let (engine, spec) = (self.engine.upgrade(), self.spec.clone());
        Box::pin(async move {
            let Some(engine) = engine else {
                return Err(Error::new(ErrorKind::ShuttingDown, "the daemon is stopping"));
            };
            let (sink, seen) = ProgressSink::channel();
            let telling = spawn({
                let progress = progress.clone();
                async move {
                    loop {
                        sleep(LOOK_EVERY).await;
                        if let Some(now) = *seen.borrow() {
                            progress(ObjectProgress { done: now.done, total: now.total });
                        }
                    }
                }
            });
            let snapshot = |name: String| SnapshotSpec { image: spec.clone(), snapshot: name };
            let done = match operation {
                OwnerOperation::Flatten => engine.flatten(&spec, sink).await,
                OwnerOperation::Sparsify { sparse_size } => engine.sparsify(&spec, sparse_size, sink).await,
                OwnerOperation::Resize { size, allow_shrink } => {
                    engine.resize_image(&spec, size, allow_shrink, sink).await
                }
                OwnerOperation::CreateSnapshot { name } => engine.create_snapshot(&snapshot(name)).await.map(drop),
                OwnerOperation::RemoveSnapshot { name, in_trash: false } => {
                    engine.remove_snapshot(&snapshot(name), false, sink).await
                }
                other => {
                    telling.abort();
                    let volume = engine.open_volume(&spec).await.map_err(error_of)?;
                    return volume.image.perform(other, progress).await;
                }
            };
            telling.abort();
            done.map_err(error_of)
        })
    }
}

/// Returns the error that another client is to see.
fn error_of(failure: Failure) -> Error {
    let kind = match failure.kind {
        FailureKind::Invalid => ErrorKind::Invalid,
        FailureKind::NotFound => ErrorKind::NotFound,
        FailureKind::Exists => ErrorKind::Exists,
        FailureKind::Busy => ErrorKind::Busy,
        FailureKind::NoSpace => ErrorKind::NoSpace,
        FailureKind::Corrupt => ErrorKind::Corrupt,
        FailureKind::Unsupported => ErrorKind::Unsupported,
        FailureKind::Denied => ErrorKind::Denied,
        FailureKind::Failed | FailureKind::Unreachable => ErrorKind::Io,
    };
    Error::new(kind, failure.to_string())
}
