//! A block device that lives on another core.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll, Waker};

use forebay_reactor::cross::{self, Answer, Answered};
use forebay_reactor::{JoinHandle, spawn, yield_now};

use crate::device::{BlockDevice, Geometry, LocalFuture, SizeWatch};
use crate::error::{Error, ErrorKind, Result};
use crate::extent::{Extent, ExtentMap};
use crate::request::{Reply, Request};
use crate::reservation::Reservations;

/// Messages taken before the owner's other tasks and its driver have a turn.
const MESSAGES_PER_TURN: u32 = 64;

/// What travels to the core that owns the device.
enum Message {
    Submit(Request, Answer<Result<Reply>>),
    Map(Extent, Answer<Result<ExtentMap>>),
    /// Tell this queue of each change of the size from the given one on.
    Watch(u64, cross::Sender<()>),
}

struct Shared {
    /// The device's shape when it was shared, but for its size.
    geometry: Geometry,
    /// Bytes now.
    size: AtomicU64,
    /// The size can change.
    resizable: bool,
    reservations: Option<Reservations>,
}

/// Reaches a block device from any core.  The device is let go of when the last handle, and the last
/// [`RemoteDevice`] made of one, is dropped.
#[derive(Clone)]
pub struct DeviceHandle {
    shared: Arc<Shared>,
    messages: cross::Sender<Message>,
}

impl DeviceHandle {
    /// Shares a device of this core with the others.
    ///
    /// # Panics
    /// When no reactor runs on this thread.
    pub fn new(device: Rc<dyn BlockDevice>) -> Self {
        let geometry = device.geometry();
        let watch = device.size_watch();
        let (size, resizable) = (AtomicU64::new(geometry.size), watch.is_some());
        let reservations = device.reservations();
        let shared = Arc::new(Shared { geometry, size, resizable, reservations });
        let (messages, receiver) = cross::channel();
        let listeners = Rc::new(RefCell::new(Vec::new()));
        let watching = watch.map(|watch| {
            let (device, shared, listeners) = (device.clone(), shared.clone(), listeners.clone());
            spawn(follow_size(device, watch, shared, listeners))
        });
        drop(spawn(serve(device, receiver, listeners, watching)));
        Self { shared, messages }
    }

    /// The device, for use on this core.
    ///
    /// # Panics
    /// When no reactor runs on this thread.
    pub fn attach(&self) -> Rc<RemoteDevice> {
        let watch = self.shared.resizable.then(|| {
            let (sender, mut receiver) = cross::channel();
            // Refused when the owner is gone; then the size changes no more.
            let _ = self.messages.send(Message::Watch(self.shared.size.load(Ordering::Acquire), sender));
            let watch = Rc::new(SizeWatch::new());
            let announce = spawn({
                let watch = watch.clone();
                async move {
                    while receiver.recv().await.is_some() {
                        watch.announce();
                    }
                }
            });
            (watch, announce)
        });
        let (watch, announce) = watch.unzip();
        Rc::new(RemoteDevice { handle: self.clone(), watch, announce })
    }
}

/// Answers requests on the core that owns the device.
async fn serve(
    device: Rc<dyn BlockDevice>,
    mut messages: cross::Receiver<Message>,
    listeners: Rc<RefCell<Vec<cross::Sender<()>>>>,
    watching: Option<JoinHandle<()>>,
) {
    let mut served: u32 = 0;
    while let Some(message) = messages.recv().await {
        served = served.wrapping_add(1);
        if served.is_multiple_of(MESSAGES_PER_TURN) {
            yield_now().await;
        }
        match message {
            Message::Submit(request, answer) => answer_with(device.submit(request), answer),
            Message::Map(extent, answer) => answer_with(device.map(extent), answer),
            Message::Watch(seen, listener) => {
                if device.geometry().size != seen {
                    // It has changed on the way.  A listener that is gone already is forgotten at the next change.
                    let _ = listener.send(());
                }
                listeners.borrow_mut().push(listener);
            }
        }
    }
    if let Some(watching) = watching {
        watching.abort();
    }
}

/// Waits for a reply in a task of its own, unless it is there at once.  Nobody may wait for it any more: that
/// neither ends nor undoes the request.
fn answer_with<T: Send + 'static>(mut future: LocalFuture<Result<T>>, answer: Answer<Result<T>>) {
    match future.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(reply) => answer.send(reply),
        // The task polls again before it waits, so no wake-up is lost.
        Poll::Pending => drop(spawn(async move { answer.send(future.await) })),
    }
}

async fn follow_size(
    device: Rc<dyn BlockDevice>,
    watch: Rc<SizeWatch>,
    shared: Arc<Shared>,
    listeners: Rc<RefCell<Vec<cross::Sender<()>>>>,
) {
    loop {
        let change = watch.changed();
        // Between looking and waiting nothing else runs on this core, so no change is missed.
        shared.size.store(device.geometry().size, Ordering::Release);
        listeners.borrow_mut().retain(|listener| listener.send(()).is_ok());
        change.await;
    }
}

/// A device of another core, on this one.  Requests travel to the owner as they are submitted, and replies back;
/// buffers are handed over, not copied.  When the owner's core is gone, requests fail with
/// [`ErrorKind::ShuttingDown`].
pub struct RemoteDevice {
    handle: DeviceHandle,
    watch: Option<Rc<SizeWatch>>,
    announce: Option<JoinHandle<()>>,
}

impl RemoteDevice {
    /// The handle it was made of.
    pub fn handle(&self) -> &DeviceHandle {
        &self.handle
    }

    fn send<T: Send + 'static>(&self, answered: Answered<Result<T>>, message: Message) -> LocalFuture<Result<T>> {
        // What is refused is dropped with its answer, which then tells of the end.
        let _ = self.handle.messages.send(message);
        Box::pin(async move {
            let gone = || Err(Error::new(ErrorKind::ShuttingDown, "the volume's core has stopped"));
            answered.await.unwrap_or_else(gone)
        })
    }
}

impl Drop for RemoteDevice {
    fn drop(&mut self) {
        if let Some(announce) = self.announce.take() {
            announce.abort();
        }
    }
}

impl BlockDevice for RemoteDevice {
    fn geometry(&self) -> Geometry {
        let size = self.handle.shared.size.load(Ordering::Acquire);
        Geometry { size, ..self.handle.shared.geometry }
    }

    fn submit(&self, request: Request) -> LocalFuture<Result<Reply>> {
        let (answer, answered) = cross::oneshot();
        self.send(answered, Message::Submit(request, answer))
    }

    fn map(&self, extent: Extent) -> LocalFuture<Result<ExtentMap>> {
        let (answer, answered) = cross::oneshot();
        self.send(answered, Message::Map(extent, answer))
    }

    fn size_watch(&self) -> Option<Rc<SizeWatch>> {
        self.watch.clone()
    }

    fn reservations(&self) -> Option<Reservations> {
        self.handle.shared.reservations.clone()
    }
}
