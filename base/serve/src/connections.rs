use std::cell::{Cell, Ref, RefCell};
use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::task::{Poll, Waker};
use std::time::Duration;

use forebay_reactor::sync::Notify;
use forebay_reactor::time::Sleep;
use forebay_reactor::{Addr, Listener, Stream, sleep};

/// Pause after a failed accept, for example when no file descriptors are left.
const ACCEPT_REST: Duration = Duration::from_millis(100);

/// Reason for which [`ConnectionStopSignal::within`] ended early.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Interrupted {
    /// Stopped: the connection is to end.
    #[error("the server is closing down")]
    Stopped,
    /// Timeout of the peer.
    #[error("timeout: the peer did not respond in time")]
    TooSlow,
}

/// Stop signal of a connection on the same core; wakes its task.
#[derive(Debug, Default)]
pub struct ConnectionStopSignal {
    stopping: Cell<bool>,
    task: RefCell<Option<Waker>>,
}

impl ConnectionStopSignal {
    /// Signals the connection to end.
    pub fn stop(&self) {
        self.stopping.set(true);
        if let Some(task) = &*self.task.borrow() {
            task.wake_by_ref();
        }
    }

    /// Returns whether the connection is to end.
    pub fn stopping(&self) -> bool {
        self.stopping.get()
    }

    /// Waits for `future`, until the connection is to end or `patience` is over.
    ///
    /// # Errors
    /// [`Interrupted::Stopped`] or [`Interrupted::TooSlow`].
    pub async fn within<F: Future>(&self, patience: &mut Sleep, future: F) -> Result<F::Output, Interrupted> {
        let mut future = pin!(future);
        std::future::poll_fn(|cx| {
            self.set_task(cx.waker());
            if let Poll::Ready(value) = future.as_mut().poll(cx) {
                return Poll::Ready(Ok(value));
            }
            if self.stopping() {
                return Poll::Ready(Err(Interrupted::Stopped));
            }
            Pin::new(&mut *patience).poll(cx).map(|()| Err(Interrupted::TooSlow))
        })
        .await
    }

    /// Sets the task to wake.
    pub fn set_task(&self, waker: &Waker) {
        let mut task = self.task.borrow_mut();
        if !task.as_ref().is_some_and(|task| task.will_wake(waker)) {
            *task = Some(waker.clone());
        }
    }
}

/// Connections of a server on one core, each with its control `C`.
pub struct ServerConnections<C> {
    list: RefCell<BTreeMap<u64, C>>,
    next: Cell<u64>,
    stopping: Cell<bool>,
    /// Notified when a connection has gone, or the server is to stop.
    changed: Notify,
}

impl<C> ServerConnections<C> {
    /// Creates an empty list.
    pub fn new() -> Rc<Self> {
        Rc::new(Self {
            list: RefCell::default(),
            next: Cell::new(0),
            stopping: Cell::new(false),
            changed: Notify::new(),
        })
    }

    /// Returns the number of connections.
    pub fn len(&self) -> usize {
        self.list.borrow().len()
    }

    /// Returns whether there are no connections.
    pub fn is_empty(&self) -> bool {
        self.list.borrow().is_empty()
    }

    /// Returns whether the server is to stop: no more connections are served then.
    pub fn stopping(&self) -> bool {
        self.stopping.get()
    }

    /// Returns all connections, by number.  None can be added or removed while the borrow lives.
    pub fn list(&self) -> Ref<'_, BTreeMap<u64, C>> {
        self.list.borrow()
    }

    /// Adds a connection, until its [`ConnectionEntry`] is dropped.
    pub fn enter(self: &Rc<Self>, control: C) -> ConnectionEntry<C> {
        let id = self.next.get();
        self.next.set(id + 1);
        self.list.borrow_mut().insert(id, control);
        ConnectionEntry { connections: self.clone(), id }
    }

    /// Accepts connections and passes them to `adopt`, until the server is to stop.
    pub async fn accept(&self, listener: &Listener, mut adopt: impl FnMut(Stream, Addr)) {
        while !self.stopping.get() {
            match self.unless_stopped(listener.accept()).await {
                Some(Ok((stream, peer))) => adopt(stream, peer),
                Some(Err(error)) if error.kind() == io::ErrorKind::ConnectionAborted => {}
                Some(Err(error)) => {
                    let addr = listener.local_addr();
                    tracing::warn!(%addr, %error, "cannot accept a connection, retrying");
                    self.unless_stopped(sleep(ACCEPT_REST)).await;
                }
                None => break,
            }
        }
    }

    /// Stops accepting, ends all connections with `end`, and waits until they are gone.
    pub async fn stop(&self, end: impl Fn(&C)) {
        self.stopping.set(true);
        self.list.borrow().values().for_each(end);
        self.changed.notify_all();
        self.changed.wait_until(|| self.is_empty()).await;
    }

    /// Waits until no connection matches.
    pub async fn wait_for_none(&self, matches: impl Fn(&C) -> bool) {
        self.changed.wait_until(|| !self.list.borrow().values().any(&matches)).await;
    }

    /// Waits for `future`; `None` when the server is to stop before.
    pub async fn unless_stopped<F: Future>(&self, future: F) -> Option<F::Output> {
        let mut future = pin!(future);
        let mut stopped = pin!(self.changed.wait_until(|| self.stopping.get()));
        std::future::poll_fn(|cx| {
            if stopped.as_mut().poll(cx).is_ready() {
                return Poll::Ready(None);
            }
            future.as_mut().poll(cx).map(Some)
        })
        .await
    }
}

impl<C> fmt::Debug for ServerConnections<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ServerConnections({})", self.len())
    }
}

/// Entry of a connection in the list, removed when its task ends, however it ends.
pub struct ConnectionEntry<C> {
    connections: Rc<ServerConnections<C>>,
    id: u64,
}

impl<C> Drop for ConnectionEntry<C> {
    fn drop(&mut self) {
        self.connections.list.borrow_mut().remove(&self.id);
        self.connections.changed.notify_all();
        forebay_reactor::heap::connection_closed();
    }
}

impl<C> fmt::Debug for ConnectionEntry<C> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ConnectionEntry({})", self.id)
    }
}

#[cfg(test)]
mod tests {
    use forebay_reactor::{BufMut, DriverChoice, Reactor, spawn};

    use super::*;

    #[test]
    fn a_server_that_stops_ends_its_connections_and_waits_for_them() {
        Reactor::system(DriverChoice::Auto).unwrap().block_on(async {
            let connections = ServerConnections::<Rc<ConnectionStopSignal>>::new();
            let listener = Listener::bind(&"127.0.0.1:0".parse().unwrap()).unwrap();
            let addr = listener.local_addr().clone();
            let serving = spawn({
                let connections = connections.clone();
                async move {
                    let adopt = |stream: Stream, _| {
                        let stop_signal = Rc::new(ConnectionStopSignal::default());
                        let place = connections.enter(stop_signal.clone());
                        drop(spawn(async move {
                            let mut patience = sleep(Duration::from_secs(60));
                            let read = stop_signal.within(&mut patience, stream.recv(BufMut::with_capacity(1))).await;
                            assert_eq!(read.err(), Some(Interrupted::Stopped));
                            drop(place);
                        }));
                    };
                    connections.accept(&listener, adopt).await;
                }
            });
            let first = Stream::connect(&addr).await.unwrap();
            let second = Stream::connect(&addr).await.unwrap();
            while connections.len() < 2 {
                forebay_reactor::yield_now().await;
            }
            assert_eq!(connections.list().keys().copied().collect::<Vec<_>>(), [0, 1]);
            connections.stop(|stop_signal| stop_signal.stop()).await;
            assert!(connections.is_empty() && connections.stopping());
            connections.wait_for_none(|_| true).await;
            serving.await;
            assert_eq!(connections.unless_stopped(std::future::pending::<()>()).await, None);
            drop((first, second));
        });
    }

    #[test]
    fn patience_ends() {
        Reactor::system(DriverChoice::Auto).unwrap().block_on(async {
            let stop_signal = ConnectionStopSignal::default();
            let mut patience = sleep(Duration::from_millis(1));
            assert_eq!(
                stop_signal.within(&mut patience, std::future::pending::<()>()).await,
                Err(Interrupted::TooSlow)
            );
            let mut patience = sleep(Duration::from_secs(60));
            assert_eq!(stop_signal.within(&mut patience, async { 7 }).await, Ok(7));
        });
    }
}
