//! Servers of a front on several cores: one on each, on listening sockets that all of them share.

use std::cell::RefCell;
use std::io;
use std::rc::Rc;
use std::thread::LocalKey;

use forebay_reactor::{CoreHandle, Listener, SharedListener};

use crate::failure::{Failure, Result};

/// Server `S` of a front on each core.
pub type CoreServer<S> = LocalKey<RefCell<Option<Rc<S>>>>;

/// Listening socket with the settings `T` of its address.
pub type Listening<T> = (Listener, T);

/// Starts a server on each of the given cores, which include this one, on the same listening sockets.  Calls
/// `start_there` on each of the other cores, one after another, then `start_here`.
///
/// # Errors
/// If a socket cannot be shared, or a core has ended; servers that were started before keep running.
pub async fn serve_on_cores<T, F>(
    cores: &[CoreHandle],
    listeners: Vec<Listening<T>>,
    start_there: F,
    start_here: impl FnOnce(Vec<Listening<T>>),
) -> Result<()>
where
    T: Clone + Send + 'static,
    F: Fn(Vec<Listening<T>>) + Clone + Send + 'static,
{
    for core in cores.iter().filter(|core| !core.is_current()) {
        let share = |(listener, settings): &Listening<T>| Ok((listener.share()?, settings.clone()));
        let shared = listeners.iter().map(share).collect::<io::Result<Vec<_>>>();
        let shared = shared.map_err(|error| Failure::io(error, "sharing the listening sockets"))?;
        let start = start_there.clone();
        let started = core.run(move || async move {
            let attach = |(listener, settings): (SharedListener, T)| Ok((listener.attach()?, settings));
            let listeners = shared.into_iter().map(attach).collect::<io::Result<Vec<_>>>()?;
            start(listeners);
            Ok(())
        });
        match started.await {
            Ok(started) => started.map_err(|error| Failure::io(error, "listening on another core"))?,
            Err(gone) => return Err(Failure::failed(gone.to_string())),
        }
    }
    start_here(listeners);
    Ok(())
}

/// Runs an operation with the server of each core in parallel, and waits for all.  Cores without a server are skipped.
pub async fn on_each_server<S, F, Fut>(cores: &[CoreHandle], server: &'static CoreServer<S>, work: F)
where
    S: 'static,
    F: Fn(Rc<S>) -> Fut + Clone + Send + 'static,
    Fut: Future<Output = ()> + 'static,
{
    let started = cores.iter().map(|core| {
        let work = work.clone();
        core.run(move || async move {
            if let Some(server) = server.with_borrow(Clone::clone) {
                work(server).await;
            }
        })
    });
    for running in started.collect::<Vec<_>>() {
        // A core that has ended has no connections left.
        let _ = running.await;
    }
}
