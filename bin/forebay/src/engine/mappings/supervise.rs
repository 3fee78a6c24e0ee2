//! Supervision of mapped images: replaces connections that have ended, and passes changes of size on to the device.

use std::rc::{Rc, Weak};
use std::time::Duration;

use forebay_reactor::{sleep, spawn};
use tokio::sync::mpsc;

use super::device;
use super::kernel::{self, LinkEvent, LinkEvents, NbdControl, NegotiatedSockets};
use super::{Engine, Mapping};
use crate::api::Front;
use crate::engine::offload::offload;
use crate::failure::{Failure, FailureKind, Result};

/// Retry delays of a connection: the first, and the limit up to which it doubles.
const RETRY: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(2));
/// Interval of attempts to replace connections where the kernel's events cannot be received.
const POLL: Duration = Duration::from_secs(5);

impl Engine {
    /// Reconnects the devices that were mapped before the daemon was started.  Mappings whose device is gone, as after a
    /// reboot, are removed with the exports that they created.
    pub async fn resume_mappings(self: Rc<Self>) {
        for mapping in self.mappings.all() {
            let _turn = self.mappings.turns.lock(&mapping.spec).await;
            if mapping.is_ending.get() {
                continue;
            }
            let record = mapping.record.borrow().clone();
            match offload(move || Ok(device::connected(&record))).await {
                Ok(Some(_)) => {
                    // Before it is connected, so that no later event is lost.
                    if let Err(failure) = self.watch_links().await {
                        tracing::warn!(error = %failure.message, "lost connections of mapped images go unnoticed");
                    }
                    mapping.mark_dead();
                    self.supervise(&mapping);
                }
                Ok(None) => {
                    tracing::info!(image = %mapping.spec, "the device of a mapped image is gone");
                    self.remove_mapping(&mapping, false).await;
                }
                Err(failure) => tracing::warn!(image = %mapping.spec, error = %failure.message, "a mapped image"),
            }
        }
    }

    /// Starts the supervisor of a mapping, which runs until the mapping or the engine ends.
    pub(super) fn supervise(self: &Rc<Self>, mapping: &Rc<Mapping>) {
        if !mapping.is_dead.get() {
            self.watch_size(mapping);
        }
        drop(spawn(supervise(Rc::downgrade(self), mapping.clone())));
    }

    /// Watches the size of the image, starting with the present one.
    fn watch_size(&self, mapping: &Rc<Mapping>) {
        let device = self.exports.device(Front::Nbd, &mapping.spec.to_string());
        let Some(watch) = device.and_then(|device| device.size_watch()) else { return };
        let resized = mapping.clone();
        let task = spawn(async move {
            loop {
                resized.is_resized.set(true);
                resized.wake.notify_all();
                watch.changed().await;
            }
        });
        if let Some(before) = mapping.size_watch.replace(Some(task)) {
            before.abort();
        }
    }

    /// Replaces the connections of a device that have ended.  Returns false if the kernel has ended the device.
    async fn reconnect(&self, mapping: &Rc<Mapping>) -> Result<bool> {
        if !self.fronts.is_serving() {
            return Err(Failure::failed("the daemon is stopping"));
        }
        let socket = self.fronts.nbd().kernel_socket().ok_or_else(kernel::not_permitted)?;
        self.prepare_writes(&mapping.spec)?;
        let (record, name) = (mapping.record.borrow().clone(), mapping.spec.to_string());
        offload(move || {
            let Some(index) = device::connected(&record) else { return Ok(false) };
            let sockets = NegotiatedSockets::connect(&socket, &name, record.connections)?;
            NbdControl::open()?.reconnect(index, &record.backend, &sockets.fds())?;
            Ok(true)
        })
        .await
    }

    /// Gives a device the size of its image, if that has changed.
    async fn resize_device(&self, mapping: &Rc<Mapping>) -> Result<()> {
        let Some(served) = self.exports.device(Front::Nbd, &mapping.spec.to_string()) else { return Ok(()) };
        let (size, record) = (served.geometry().size, mapping.record.borrow().clone());
        let changed = offload(move || {
            let Some(index) = device::connected(&record).filter(|&index| !device::is_usable(index, size)) else {
                return Ok(None);
            };
            NbdControl::open()?.resize(index, &record.backend, size)?;
            Ok(Some(index))
        });
        if let Some(index) = changed.await? {
            tracing::info!(image = %mapping.spec, device = %device::path(index).display(), size, "a device was resized");
        }
        Ok(())
    }

    /// Receives the kernel's events, from now until the engine ends.
    ///
    /// # Errors
    /// As of [`NbdControl::open`].
    pub(super) async fn watch_links(self: &Rc<Self>) -> Result<()> {
        if self.mappings.is_watching.get() {
            return Ok(());
        }
        match offload(LinkEvents::subscribe).await? {
            _ if self.mappings.is_watching.replace(true) => {}
            Some(events) => {
                let (sender, receiver) = mpsc::unbounded_channel();
                let receiving = move || receive(events, &sender);
                let spawned = std::thread::Builder::new().name("nbd-events".into()).spawn(receiving);
                spawned.map_err(|error| Failure::io(error, "starting a thread"))?;
                drop(spawn(distribute(Rc::downgrade(self), receiver)));
            }
            None => {
                tracing::warn!("the kernel's NBD events cannot be received; connections are checked every {POLL:?}");
                drop(spawn(poll(Rc::downgrade(self))));
            }
        }
        Ok(())
    }
}

/// Passes events on until nobody receives them.
fn receive(mut events: LinkEvents, sender: &mpsc::UnboundedSender<LinkEvent>) {
    while !sender.is_closed() {
        match events.next() {
            Ok(Some(event)) => {
                // A receiver that is gone is noticed above.
                let _ = sender.send(event);
            }
            Ok(None) => {}
            Err(error) => {
                tracing::error!(%error, "cannot receive the kernel's NBD events; mapped images are not reconnected");
                return;
            }
        }
    }
}

/// Marks devices whose connections have ended.
async fn distribute(engine: Weak<Engine>, mut events: mpsc::UnboundedReceiver<LinkEvent>) {
    while let Some(event) = events.recv().await {
        let Some(engine) = engine.upgrade().filter(|engine| !engine.closing.get()) else { return };
        for mapping in engine.mappings.all() {
            let device = mapping.record.borrow().device;
            if event == LinkEvent::Lost || device.is_some_and(|device| event == LinkEvent::Dead(device)) {
                mapping.mark_dead();
            }
        }
    }
}

/// Marks all devices now and then.
async fn poll(engine: Weak<Engine>) {
    loop {
        sleep(POLL).await;
        let Some(engine) = engine.upgrade().filter(|engine| !engine.closing.get()) else { return };
        engine.mappings.all().iter().for_each(|mapping| mapping.mark_dead());
    }
}

async fn supervise(engine: Weak<Engine>, mapping: Rc<Mapping>) {
    let mut wait = RETRY.0;
    loop {
        let due = || mapping.is_ending.get() || mapping.is_dead.get() || mapping.is_resized.get();
        mapping.wake.wait_until(due).await;
        let Some(engine) = engine.upgrade().filter(|engine| !engine.closing.get()) else { return };
        if mapping.is_ending.get() {
            return;
        }
        if mapping.is_dead.replace(false) {
            match engine.reconnect(&mapping).await {
                Ok(true) => {
                    tracing::info!(image = %mapping.spec, "a mapped image is connected again");
                    *mapping.failure.borrow_mut() = None;
                    wait = RETRY.0;
                    if !mapping.is_ending.get() {
                        engine.watch_size(&mapping);
                    }
                }
                Ok(false) => {
                    tracing::warn!(image = %mapping.spec, "the kernel has ended the device of a mapped image");
                    return;
                }
                Err(failure) => {
                    mapping.is_dead.set(true);
                    note(&mapping, failure);
                    drop(engine);
                    sleep(wait).await;
                    wait = (wait * 2).min(RETRY.1);
                    continue;
                }
            }
        }
        if mapping.is_resized.replace(false)
            && let Err(failure) = engine.resize_device(&mapping).await
        {
            tracing::warn!(image = %mapping.spec, error = %failure.message, "a device has not the size of its image");
        }
    }
}

/// Records a failure to reconnect; a repeated one is logged once.
fn note(mapping: &Mapping, failure: Failure) {
    let before = mapping.failure.replace(Some(failure.clone()));
    // The image of an export is still being opened, or the daemon is stopping.
    let is_passing = failure.kind == FailureKind::NotFound && before.is_none();
    if !is_passing && before.is_none_or(|before| before.message != failure.message) {
        tracing::warn!(image = %mapping.spec, error = %failure.message, "cannot reconnect a mapped image; retrying");
    }
}
