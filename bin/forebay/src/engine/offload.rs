//! Blocking work, done outside the reactor.

use tokio::sync::oneshot;

use crate::failure::{Failure, Result};

/// Runs blocking work on a separate thread, so that the reactor continues.
pub async fn offload<T: Send + 'static>(work: impl FnOnce() -> Result<T> + Send + 'static) -> Result<T> {
    let (sender, receiver) = oneshot::channel();
    let run = move || {
        // The caller may have dropped its future.
        let _ = sender.send(work());
    };
    let spawned = std::thread::Builder::new().name("offload".into()).spawn(run);
    spawned.map_err(|error| Failure::io(error, "starting a thread"))?;
    receiver.await.unwrap_or_else(|_| Err(Failure::failed("a helper thread ended with a panic")))
}
