//! Supervision of mapped images: replaces connections that have ended, and passes changes of size on to the device.

use std::rc::{Rc, Weak};
use std::time::Duration;

use forebay_reactor::{sleep, spawn, yield_now};
use tokio::sync::mpsc;

use super::device;
use super::kernel::{self, LinkEvent, LinkEventSource, NbdControl};
use super::{Engine, Mapping};
use crate::api::Front;
use crate::engine::offload::offload;
use crate::failure::{Failure, FailureKind, Result};

/// Retry delays of a connection, a resize and the subscription to events: the first, and the limit up to which it doubles.
const RETRY: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(2));
/// Interval of attempts to replace connections where the kernel's events cannot be received.
const POLL: Duration = Duration::from_secs(5);

impl Engine {
    /// Reconnects the devices that were mapped before the daemon was started, all at once: one that waits holds up no other.
    /// Mappings whose device is gone, as after a reboot, are removed with the exports that they created.
    pub async fn resume_mappings(self: Rc<Self>) {
        let resumed = self.mappings.all().into_iter().map(|mapping| spawn(self.clone().resume_mapping(mapping)));
        for each in resumed.collect::<Vec<_>>() {
            each.await;
        }
    }

    async fn resume_mapping(self: Rc<Self>, mapping: Rc<Mapping>) {
        let _turn = self.mappings.turns.lock(&mapping.spec).await;
        if mapping.is_ending.get() {
            return;
        }
        let record = mapping.record.borrow().clone();
        let removed = match offload(move || Ok(device::connected(&record))).await {
            Ok(Some(_)) => {
                // Before it is connected, so that no later event is lost.
                self.watch_links_or_retry().await;
                mapping.mark_dead();
                self.supervise(&mapping);
                Ok(())
            }
            Ok(None) => {
                tracing::info!(image = %mapping.spec, "the device of a mapped image is gone");
                self.remove_mapping(&mapping, false).await
            }
            Err(failure) => Err(failure),
        };
        if let Err(failure) = removed {
            tracing::warn!(image = %mapping.spec, error = %failure.message, "cannot resume a mapped image");
        }
    }

    /// Starts the supervisor of a mapping, which runs until the mapping or the engine ends.
    pub(super) fn supervise(self: &Rc<Self>, mapping: &Rc<Mapping>) {
        if !mapping.is_dead.get() {
            self.watch_size(mapping);
        }
        let engine: Weak<Self> = Rc::downgrade(self);
        drop(spawn(supervise(engine, mapping.clone())));
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

    /// Receives the kernel's events, from now until the engine ends.
    ///
    /// # Errors
    /// As of [`NbdControl::open`].
    pub(super) async fn watch_links(self: &Rc<Self>) -> Result<()> {
        if self.mappings.is_watching.get() {
            return Ok(());
        }
        let subscribe = self.mappings.subscribe.get();
        match offload(subscribe).await? {
            _ if self.mappings.is_watching.get() => {}
            Some(events) => {
                let (sender, receiver) = mpsc::unbounded_channel();
                let receiving = move || receive(events, &sender);
                let spawned = std::thread::Builder::new().name("nbd-events".into()).spawn(receiving);
                spawned.map_err(|error| Failure::io(error, "starting a thread"))?;
                self.mappings.is_watching.set(true);
                drop(spawn(distribute(Rc::downgrade(self), receiver)));
            }
            None => {
                tracing::warn!("the kernel's NBD events cannot be received; connections are checked every {POLL:?}");
                self.mappings.is_watching.set(true);
                drop(spawn(poll(Rc::downgrade(self))));
            }
        }
        Ok(())
    }

    /// Receives the kernel's events, and tries again in the background if that fails.
    async fn watch_links_or_retry(self: &Rc<Self>) {
        if let Err(failure) = self.watch_links().await {
            tracing::warn!(error = %failure.message, "lost connections of mapped images go unnoticed; retrying");
            drop(spawn(subscribe_again(Rc::downgrade(self))));
        }
    }
}

impl MappingUpkeep for Engine {
    fn is_closing(&self) -> bool {
        self.closing.get()
    }

    async fn reconnect(&self, mapping: &Rc<Mapping>) -> Result<bool> {
        if !self.fronts.is_serving() {
            return Err(Failure::failed("the daemon is stopping"));
        }
        let socket = self.fronts.nbd().kernel_socket().ok_or_else(kernel::not_permitted)?;
        let record = mapping.record.borrow().clone();
        if offload(move || Ok(device::connected(&record))).await?.is_none() {
            return Ok(false);
        }
        let sockets = self.negotiate(mapping, socket).await?;
        let record = mapping.record.borrow().clone();
        let reconnected = offload(move || {
            let Some(index) = device::connected(&record) else { return Ok(false) };
            NbdControl::open()?.reconnect(index, &record.backend, &sockets.fds())?;
            Ok(true)
        });
        let is_there = reconnected.await?;
        if is_there && !mapping.is_ending.get() {
            self.watch_size(mapping);
        }
        Ok(is_there)
    }

    async fn resize(&self, mapping: &Rc<Mapping>) -> Result<()> {
        let Some(served) = self.exports.device(Front::Nbd, &mapping.spec.to_string()) else { return Ok(()) };
        // Not the size of another image.
        let volume = self.volumes.find(&mapping.spec);
        if volume.is_none_or(|volume| mapping.check_image(volume.image.id()).is_err()) {
            return Ok(());
        }
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
}

/// Operations of the supervisor of a mapping on its device.
pub(super) trait MappingUpkeep {
    /// Returns whether the engine is closing, which ends the supervisors.
    fn is_closing(&self) -> bool;

    /// Replaces the connections of a device that have ended.  Returns false if the kernel has ended the device.
    async fn reconnect(&self, mapping: &Rc<Mapping>) -> Result<bool>;

    /// Gives a device the size of its image, if that has changed.
    async fn resize(&self, mapping: &Rc<Mapping>) -> Result<()>;
}

/// Passes events on until nobody receives them.
fn receive(mut events: Box<dyn LinkEventSource>, sender: &mpsc::UnboundedSender<LinkEvent>) {
    while !sender.is_closed() {
        match events.next() {
            Ok(Some(event)) => {
                // A receiver that is gone is noticed above.
                let _ = sender.send(event);
            }
            Ok(None) => {}
            Err(error) => {
                tracing::warn!(%error, "cannot receive the kernel's NBD events; subscribing again");
                return;
            }
        }
    }
}

/// Marks devices whose connections have ended.  Subscribes again when the receiver has ended.
async fn distribute(engine: Weak<Engine>, mut events: mpsc::UnboundedReceiver<LinkEvent>) {
    while let Some(event) = events.recv().await {
        let Some(engine) = engine.upgrade().filter(|engine| !engine.closing.get()) else { return };
        for mapping in engine.mappings.all() {
            let device = mapping.record.borrow().device;
            if event == LinkEvent::Lost || device.is_some_and(|device| event == LinkEvent::Dead(device)) {
                mapping.mark_dead();
            }
        }
        // Events that come as fast as they are handled must not hold up the core.
        yield_now().await;
    }
    if let Some(engine) = engine.upgrade() {
        engine.mappings.is_watching.set(false);
    }
    subscribe_again(engine).await;
}

/// Subscribes to the kernel's events until that succeeds, and marks all devices then: events were lost.
async fn subscribe_again(engine: Weak<Engine>) {
    let mut wait = RETRY.0;
    let mut warned = false;
    loop {
        sleep(wait).await;
        wait = (wait * 2).min(RETRY.1);
        let Some(engine) = engine.upgrade().filter(|engine| !engine.closing.get()) else { return };
        match engine.watch_links().await {
            Ok(()) => {
                engine.mappings.all().iter().for_each(|mapping| mapping.mark_dead());
                return;
            }
            Err(failure) if !warned => {
                warned = true;
                tracing::warn!(error = %failure.message, "cannot subscribe to the kernel's NBD events; retrying");
            }
            Err(_) => {}
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

/// Keeps a device connected, and of the size of its image, until the mapping or the engine ends.
pub(super) async fn supervise<U: MappingUpkeep>(engine: Weak<U>, mapping: Rc<Mapping>) {
    let mut wait = RETRY.0;
    let mut last_resize = None;
    loop {
        let due = || mapping.is_ending.get() || mapping.is_dead.get() || mapping.is_resized.get();
        mapping.wake.wait_until(due).await;
        let Some(engine) = engine.upgrade().filter(|engine| !engine.is_closing()) else { return };
        if mapping.is_ending.get() {
            return;
        }
        let mut is_failed = false;
        if mapping.is_dead.replace(false) {
            match engine.reconnect(&mapping).await {
                Ok(true) => {
                    tracing::info!(image = %mapping.spec, "a mapped image is connected again");
                    *mapping.failure.borrow_mut() = None;
                }
                Ok(false) => {
                    tracing::warn!(image = %mapping.spec, "the kernel has ended the device of a mapped image");
                    return;
                }
                Err(failure) => {
                    mapping.is_dead.set(true);
                    note(&mapping, failure);
                    is_failed = true;
                }
            }
        }
        if !is_failed && mapping.is_resized.replace(false) {
            let failed = engine.resize(&mapping).await.err().map(|failure| failure.message);
            if let Some(error) = failed.as_ref().filter(|_| failed != last_resize) {
                tracing::warn!(image = %mapping.spec, error, "cannot resize the device of a mapped image; retrying");
            }
            is_failed = failed.is_some();
            mapping.is_resized.set(is_failed || mapping.is_resized.get());
            last_resize = failed;
        }
        drop(engine);
        if is_failed {
            sleep(wait).await;
            wait = (wait * 2).min(RETRY.1);
        } else {
            wait = RETRY.0;
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
