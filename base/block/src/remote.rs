//! Block device owned by another core.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::task::{Context, Poll, Waker};

use forebay_reactor::cross::{self, OneshotReceiver, OneshotSender};
use forebay_reactor::{JoinHandle, spawn, yield_now};

use crate::device::{BlockDevice, Geometry, LocalFuture, SizeWatch};
use crate::error::{Error, ErrorKind, Result};
use crate::extent::{Extent, ExtentMap};
use crate::request::{BlockReply, BlockRequest};
use crate::reservation::Reservations;

/// Messages handled before the owner's other tasks and its driver run.
const MESSAGES_PER_TURN: u32 = 64;

/// Message to the core that owns the device.
enum Message {
    Submit(BlockRequest, OneshotSender<Result<BlockReply>>),
    Map(Extent, OneshotSender<Result<ExtentMap>>),
    /// Subscribes to size changes since the given size, and to fence requests.
    Watch(u64, cross::Sender<Told>),
    /// Asks every core that uses the device to send a [`Message::Passed`]; the reply is the futures to wait for.
    AskCores(OneshotSender<Vec<OneshotReceiver<()>>>),
    /// Completes when every message sent before has been given to the device.
    Passed(OneshotSender<()>),
}

/// Message to a core that uses the device.
enum Told {
    /// Notifies that the size has changed.
    Size,
    /// Requests that the answer be sent back behind every submitted request.
    Fence(OneshotSender<()>),
}

pub(crate) struct DeviceShared {
    messages: cross::Sender<Message>,
    /// Geometry when the device was shared; its size may be stale.
    geometry: Geometry,
    /// Current size in bytes.
    size: AtomicU64,
    /// True if the size can change.
    resizable: bool,
    reservations: Option<Reservations>,
}

/// Handle to a block device that works from any core.  The device is released when the last handle, and the last
/// [`RemoteDevice`] made from one, is dropped.
#[derive(Clone)]
pub struct DeviceHandle {
    shared: Arc<DeviceShared>,
}

impl DeviceHandle {
    /// Shares a device of this core with other cores.
    ///
    /// # Panics
    /// When no reactor runs on this thread.
    pub fn new(device: Rc<dyn BlockDevice>) -> Self {
        let geometry = device.geometry();
        let watch = device.size_watch();
        let (size, resizable) = (AtomicU64::new(geometry.size), watch.is_some());
        let reservations = device.reservations();
        let (messages, receiver) = cross::channel();
        let shared = Arc::new(DeviceShared { messages, geometry, size, resizable, reservations });
        if let Some(reservations) = &shared.reservations {
            reservations.add_gate(Arc::downgrade(&shared));
        }
        let listeners = Rc::new(RefCell::new(Vec::new()));
        let watching = watch.map(|watch| {
            // Weak: users of `shared` own the queue's sending end, and the queue must end with the last of them.
            let (device, shared, listeners) = (device.clone(), Arc::downgrade(&shared), listeners.clone());
            spawn(follow_size(device, watch, shared, listeners))
        });
        drop(spawn(serve(device, receiver, listeners, watching)));
        Self { shared }
    }

    /// Attaches the device to this core.
    ///
    /// # Panics
    /// When no reactor runs on this thread.
    pub fn attach(&self) -> Rc<RemoteDevice> {
        let (sender, mut receiver) = cross::channel();
        // Fails when the owner is gone; then the size changes no more.
        let _ = self.shared.messages.send(Message::Watch(self.shared.size.load(Ordering::Acquire), sender));
        let watch = Rc::new(SizeWatch::new());
        let listening = spawn({
            let (watch, messages) = (watch.clone(), self.shared.messages.clone());
            async move {
                while let Some(told) = receiver.recv().await {
                    match told {
                        Told::Size => watch.announce(),
                        // Requests that this core has submitted are before it in the queue.
                        Told::Fence(answer) => drop(messages.send(Message::Passed(answer))),
                    }
                }
            }
        });
        let watch = self.shared.resizable.then_some(watch);
        Rc::new(RemoteDevice { handle: self.clone(), watch, listening: Some(listening) })
    }
}

impl DeviceShared {
    /// Waits until every request that any core has decided to submit by now has been given to the device.
    ///
    /// A core checks whether a request is allowed and submits it without yielding in between.  So once each core has
    /// processed the fence message, every request allowed before is in the queue.
    pub(crate) async fn fence(&self) {
        let (answer, cores) = cross::oneshot();
        // A message that fails to send is dropped with its answer: the owner is gone, and nothing is given to the
        // device any more.
        let _ = self.messages.send(Message::AskCores(answer));
        for core in cores.await.into_iter().flatten() {
            // A core that has released the device sends nothing more.
            core.await;
        }
        let (answer, passed) = cross::oneshot();
        let _ = self.messages.send(Message::Passed(answer));
        passed.await;
    }
}

/// Serves requests on the core that owns the device.
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
                    // The size changed in the meantime.  A listener that is gone is removed at the next change.
                    let _ = listener.send(Told::Size);
                }
                let mut listeners = listeners.borrow_mut();
                // Those of devices that were dropped: their number is that of connections since the start.
                listeners.retain(|listener| !listener.is_closed());
                listeners.push(listener);
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

/// Sends the reply at once if it is ready, otherwise from a task of its own.  The requester may be gone; that neither
/// cancels nor undoes the request.
fn answer_with<T: Send + 'static>(mut future: LocalFuture<Result<T>>, answer: OneshotSender<Result<T>>) {
    match future.as_mut().poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(reply) => answer.send(reply),
        // The task polls again before it waits, so no wake-up is lost.
        Poll::Pending => drop(spawn(async move { answer.send(future.await) })),
    }
}

async fn follow_size(
    device: Rc<dyn BlockDevice>,
    watch: Rc<SizeWatch>,
    shared: Weak<DeviceShared>,
    listeners: Rc<RefCell<Vec<cross::Sender<Told>>>>,
) {
    loop {
        let change = watch.changed();
        let Some(shared) = shared.upgrade() else { return };
        // No other task runs on this core between this look and the wait, so no change is missed.
        shared.size.store(device.geometry().size, Ordering::Release);
        listeners.borrow_mut().retain(|listener| listener.send(Told::Size).is_ok());
        drop(shared);
        change.await;
    }
}

/// Device of another core, used on this one.  Requests are sent to the owner as they are submitted, and replies are
/// sent back; buffers are moved, not copied.  Requests fail with [`ErrorKind::ShuttingDown`] when the
/// owner's core is gone.
pub struct RemoteDevice {
    handle: DeviceHandle,
    watch: Option<Rc<SizeWatch>>,
    /// Task that receives the owner's messages.
    listening: Option<JoinHandle<()>>,
}

impl RemoteDevice {
    /// Returns the handle that the device was attached from.
    pub fn handle(&self) -> &DeviceHandle {
        &self.handle
    }

    fn send<T: Send + 'static>(
        &self,
        answered: OneshotReceiver<Result<T>>,
        message: Message,
    ) -> LocalFuture<Result<T>> {
        // A message that fails to send is dropped with its answer, which then reports the end.
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

    fn submit(&self, request: BlockRequest) -> LocalFuture<Result<BlockReply>> {
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
