//! A block device that lives on another core.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
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
    /// Tell this queue of each change of the size from the given one on, and ask it when a fence is wanted.
    Watch(u64, cross::Sender<Told>),
    /// Ask every core that uses the device to send a [`Message::Passed`]; the answers are what to wait for.
    AskCores(Answer<Vec<Answered<()>>>),
    /// Everything that was sent before has been given to the device.
    Passed(Answer<()>),
}

/// What travels to a core that uses the device.
enum Told {
    /// The size has changed.
    Size,
    /// Send it back behind everything that was submitted.
    Fence(Answer<()>),
}

pub(crate) struct Shared {
    messages: cross::Sender<Message>,
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
        let (messages, receiver) = cross::channel();
        let shared = Arc::new(Shared { messages, geometry, size, resizable, reservations });
        if let Some(reservations) = &shared.reservations {
            reservations.add_gate(Arc::downgrade(&shared));
        }
        let listeners = Rc::new(RefCell::new(Vec::new()));
        let watching = watch.map(|watch| {
            // Weak: those who share it hold the queue's sending end, and the queue must end with the last of them.
            let (device, shared, listeners) = (device.clone(), Arc::downgrade(&shared), listeners.clone());
            spawn(follow_size(device, watch, shared, listeners))
        });
        drop(spawn(serve(device, receiver, listeners, watching)));
        Self { shared }
    }

    /// The device, for use on this core.
    ///
    /// # Panics
    /// When no reactor runs on this thread.
    pub fn attach(&self) -> Rc<RemoteDevice> {
        let (sender, mut receiver) = cross::channel();
        // Refused when the owner is gone; then the size changes no more.
        let _ = self.shared.messages.send(Message::Watch(self.shared.size.load(Ordering::Acquire), sender));
        let watch = Rc::new(SizeWatch::new());
        let listening = spawn({
            let (watch, messages) = (watch.clone(), self.shared.messages.clone());
            async move {
                while let Some(told) = receiver.recv().await {
                    match told {
                        Told::Size => watch.announce(),
                        // What this core has submitted is before it in the queue.
                        Told::Fence(answer) => drop(messages.send(Message::Passed(answer))),
                    }
                }
            }
        });
        let watch = self.shared.resizable.then_some(watch);
        Rc::new(RemoteDevice { handle: self.clone(), watch, listening: Some(listening) })
    }
}

impl Shared {
    /// Waits until all that any core has decided to submit by now has been given to the device.
    ///
    /// Whoever looks whether a request is allowed, and submits it, does both without a pause; so once each core has had
    /// a turn, what was allowed before is in the queue.
    pub(crate) async fn fence(&self) {
        let (answer, cores) = cross::oneshot();
        // What is refused is dropped with its answer: then nothing is given to the device any more.
        let _ = self.messages.send(Message::AskCores(answer));
        for core in cores.await.into_iter().flatten() {
            // A core that uses the device no more sends nothing more.
            core.await;
        }
        let (answer, passed) = cross::oneshot();
        let _ = self.messages.send(Message::Passed(answer));
        passed.await;
    }
}

/// Answers requests on the core that owns the device.
async fn serve(
    device: Rc<dyn BlockDevice>,
    mut messages: cross::Receiver<Message>,
    listeners: Rc<RefCell<Vec<cross::Sender<Told>>>>,
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
                    let _ = listener.send(Told::Size);
                }
                listeners.borrow_mut().push(listener);
            }
            Message::AskCores(answer) => {
                let mut asked = Vec::new();
                listeners.borrow_mut().retain(|listener| {
                    let (answer, answered) = cross::oneshot();
                    let there = listener.send(Told::Fence(answer)).is_ok();
                    asked.extend(there.then_some(answered));
                    there
                });
                answer.send(asked);
            }
            Message::Passed(answer) => answer.send(()),
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
    shared: Weak<Shared>,
    listeners: Rc<RefCell<Vec<cross::Sender<Told>>>>,
) {
    loop {
        let change = watch.changed();
        let Some(shared) = shared.upgrade() else { return };
        // Between looking and waiting nothing else runs on this core, so no change is missed.
        shared.size.store(device.geometry().size, Ordering::Release);
        listeners.borrow_mut().retain(|listener| listener.send(Told::Size).is_ok());
        drop(shared);
        change.await;
    }
}

/// A device of another core, on this one.  Requests travel to the owner as they are submitted, and replies back;
/// buffers are handed over, not copied.  When the owner's core is gone, requests fail with
/// [`ErrorKind::ShuttingDown`].
pub struct RemoteDevice {
    handle: DeviceHandle,
    watch: Option<Rc<SizeWatch>>,
    /// Hears what the owner tells.
    listening: Option<JoinHandle<()>>,
}

impl RemoteDevice {
    /// The handle it was made of.
    pub fn handle(&self) -> &DeviceHandle {
        &self.handle
    }

    fn send<T: Send + 'static>(&self, answered: Answered<Result<T>>, message: Message) -> LocalFuture<Result<T>> {
        // What is refused is dropped with its answer, which then tells of the end.
        let _ = self.handle.shared.messages.send(message);
        Box::pin(async move {
            let gone = || Err(Error::new(ErrorKind::ShuttingDown, "the volume's core has stopped"));
            answered.await.unwrap_or_else(gone)
        })
    }
}

impl Drop for RemoteDevice {
    fn drop(&mut self) {
        if let Some(listening) = self.listening.take() {
            listening.abort();
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
