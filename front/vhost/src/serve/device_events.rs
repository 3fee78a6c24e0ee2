//! State and events that the cores of a device share besides the messages to its copies.

use std::rc::Weak;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, AtomicUsize, Ordering};

use forebay_reactor::cross;

use super::device::VhostDevice;
use crate::iotlb::IotlbMiss;

/// Event of a copy of a device, for the core of its connection.
enum DeviceEvent {
    /// Translation that is missing.
    Miss(IotlbMiss),
    /// Rule that the guest has broken.
    Fault(String),
}

/// Sending half for events of a copy.
#[derive(Clone)]
pub(super) struct DeviceEvents {
    sender: cross::Sender<DeviceEvent>,
    /// Missing translations that are not asked for yet.
    misses: Arc<AtomicUsize>,
}

/// Receiving half for events of the copies.
pub(super) struct DeviceEventReceiver {
    receiver: cross::Receiver<DeviceEvent>,
    misses: Arc<AtomicUsize>,
}

impl DeviceEvents {
    /// Maximum misses that wait for the core of the connection; later ones are dropped, and found again at the next kick.
    const MISSES_MAX: usize = 256;

    /// Creates both halves.
    pub(super) fn channel() -> (Self, DeviceEventReceiver) {
        let (sender, receiver) = cross::channel();
        let misses = Arc::new(AtomicUsize::new(0));
        (Self { sender, misses: misses.clone() }, DeviceEventReceiver { receiver, misses })
    }

    /// Asks for a translation.
    pub(super) fn miss(&self, miss: IotlbMiss) {
        if self.misses.fetch_add(1, Ordering::Relaxed) >= Self::MISSES_MAX {
            self.misses.fetch_sub(1, Ordering::Relaxed);
            return;
        }
        // A connection that has ended asks for nothing.
        let _ = self.sender.send(DeviceEvent::Miss(miss));
    }

    /// Ends the connection's device for a reason.
    pub(super) fn fault(&self, why: String) {
        let _ = self.sender.send(DeviceEvent::Fault(why));
    }
}

impl DeviceEventReceiver {
    /// Passes events on to the connection's own device, as long as there is one.
    pub(super) async fn pass_on(mut self, device: Weak<VhostDevice>) {
        while let Some(event) = self.receiver.recv().await {
            if matches!(event, DeviceEvent::Miss(_)) {
                self.misses.fetch_sub(1, Ordering::Relaxed);
            }
            let Some(device) = device.upgrade() else { return };
            match event {
                DeviceEvent::Miss(miss) => device.request_translation(miss),
                DeviceEvent::Fault(why) => device.fail(why),
            }
        }
    }
}

/// Phase of a connection, as all cores of its device see it at once: messages to them may take a while.
#[derive(Debug, Default)]
pub(super) struct ConnectionPhase(AtomicU8);

impl ConnectionPhase {
    const ENDED: u8 = 1;
    const OVER: u8 = 2;

    /// Begins the end: what is in flight may complete.
    pub(super) fn set_ended(&self) {
        self.0.store(Self::ENDED, Ordering::Release);
    }

    /// Ends the wait for what is in flight: the guest's memory is not changed any more.
    pub(super) fn set_over(&self) {
        self.0.store(Self::OVER, Ordering::Release);
    }

    /// Returns whether the connection ends, or has ended.
    pub(super) fn has_ended(&self) -> bool {
        self.0.load(Ordering::Acquire) >= Self::ENDED
    }

    /// Returns whether the guest's memory is another one's.
    pub(super) fn is_over(&self) -> bool {
        self.0.load(Ordering::Acquire) >= Self::OVER
    }
}
