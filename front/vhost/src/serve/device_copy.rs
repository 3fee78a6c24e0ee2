//! Copy of a connection's device on another core, with the queues that run there.
//!
//! The connection's core owns the state of the device.  It tells each copy of every change, and waits until all of them have
//! adopted it before it replies to the front-end: no core uses memory or translations that are not valid any more.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::rc::{Rc, Weak};
use std::sync::Arc;

use forebay_block::DeviceHandle;
use forebay_reactor::cores::Running;
use forebay_reactor::cross::{self, OneshotSender};
use forebay_reactor::{CoreHandle, GuardedMapping, spawn};

use super::device::{FrontEndChannel, InflightRegion, VhostDevice};
use super::device_events::{ConnectionPhase, DeviceEvents};
use super::queue::{self, QueueControl, QueueOrder};
use super::{VhostExport, VhostVolume};
use crate::block::PayloadPools;
use crate::dirty_log::DirtyLog;
use crate::memory::{GuestMemory, GuestRegion, RegionPlace};
use crate::session::VringState;
use crate::stats::VhostCounters;
use crate::wire::IotlbChange;

thread_local! {
    /// Buffers of this core's copies.
    static POOLS: RefCell<Weak<PayloadPools>> = const { RefCell::new(Weak::new()) };
}

/// Change of a device's state.
pub(super) enum DeviceChange {
    /// Features that are enabled.
    Features(u64),
    /// Table of memory.
    Memory(Vec<(RegionPlace, GuardedMapping)>),
    /// Translation of the IOMMU.
    Translation(IotlbChange),
    /// Bitmap of written pages.
    Log(GuardedMapping),
    /// Region for the record of requests in flight, and its number of queues.
    Inflight(GuardedMapping, u16),
    /// Content of the configuration space that the driver has written.
    Config {
        /// First byte.
        offset: u32,
        /// Set on the destination of a migration.
        is_migration: bool,
        /// Bytes from there.
        content: Vec<u8>,
    },
    /// Reset by the driver, after all queues have stopped.
    Reset,
}

/// Change of a queue's control.
pub(super) enum ControlChange {
    /// Order to end.
    Order(QueueOrder),
    /// Descriptor for kicks.
    Kick(Option<OwnedFd>),
    /// Descriptor for interrupts.
    Call(Option<OwnedFd>),
    /// Descriptor for errors.
    Err(Option<OwnedFd>),
}

/// Result of a queue's run: its position, or the rule that was broken.
pub(super) type QueueEnd = Result<u32, String>;

/// Message to the core of a copy.
enum CopyMessage {
    Device(DeviceChange),
    Control(usize, ControlChange),
    Run {
        index: usize,
        ring: VringState,
        order: QueueOrder,
        ended: OneshotSender<QueueEnd>,
    },
    /// Asks whether all changes since the last such message were adopted.
    Settle(OneshotSender<Result<(), String>>),
    /// Ends the copy.
    End,
}

/// Origin of a copy.
pub(super) struct CopyOrigin {
    /// Name of the export.
    pub(super) name: String,
    /// Volume of the export.
    pub(super) volume: DeviceHandle,
    /// Serial number that the guest sees.
    pub(super) serial: String,
    /// Number of queues of the device.
    pub(super) queues: u16,
    /// Counters of the core.
    pub(super) counters: Arc<VhostCounters>,
    /// Phase of the connection.
    pub(super) phase: Arc<ConnectionPhase>,
    /// Connection, which speaks to the front-end.
    pub(super) connection: DeviceEvents,
}

/// Copy of a device, as its connection's core sees it.  The copy ends, and abandons its queues, when this is dropped.
pub(super) struct DeviceCopy {
    messages: cross::Sender<CopyMessage>,
    /// Set while changes may not have been adopted.
    changed: Cell<bool>,
    served: RefCell<Option<Running<()>>>,
}

impl DeviceCopy {
    /// Creates a copy on a core.
    pub(super) fn create(core: &CoreHandle, origin: CopyOrigin) -> Self {
        let (messages, receiver) = cross::channel();
        let served = RefCell::new(Some(core.run(move || serve(origin, receiver))));
        Self { messages, changed: Cell::new(false), served }
    }

    /// Ends the copy, and waits until it has released the volume.  Queues that still run keep it.
    pub(super) async fn end(&self) {
        let _ = self.messages.send(CopyMessage::End);
        if let Some(served) = self.served.take() {
            // A core that has stopped has released it too.
            let _ = served.await;
        }
    }

    fn send(&self, message: CopyMessage) {
        self.changed.set(true);
        // A core that has stopped is reported by the next reply that is awaited.
        let _ = self.messages.send(message);
    }

    /// Changes the state of the device.
    pub(super) fn change(&self, change: DeviceChange) {
        self.send(CopyMessage::Device(change));
    }

    /// Changes the control of a queue.
    pub(super) fn control(&self, index: usize, change: ControlChange) {
        self.send(CopyMessage::Control(index, change));
    }

    /// Runs a queue that has the right to run, until it is told to end.
    ///
    /// # Errors
    /// As [`queue::run`].
    pub(super) async fn run(&self, index: usize, ring: VringState, order: QueueOrder) -> QueueEnd {
        let (ended, end) = cross::oneshot();
        self.send(CopyMessage::Run { index, ring, order, ended });
        end.await.unwrap_or_else(|| Err(gone()))
    }

    /// Waits until all changes are adopted.
    ///
    /// # Errors
    /// Text that says which was not.
    pub(super) async fn settle(&self) -> Result<(), String> {
        if !self.changed.replace(false) {
            return Ok(());
        }
        let (answer, settled) = cross::oneshot();
        let _ = self.messages.send(CopyMessage::Settle(answer));
        settled.await.unwrap_or_else(|| Err(gone()))
    }
}

fn gone() -> String {
    "the core of a queue has stopped".to_owned()
}

/// Copy of a device, on its own core.
struct ServedCopy {
    device: Rc<VhostDevice>,
    controls: BTreeMap<usize, Rc<QueueControl>>,
}

/// Serves a copy until its connection has ended.
async fn serve(origin: CopyOrigin, mut messages: cross::Receiver<CopyMessage>) {
    let mut copy = ServedCopy::new(origin);
    let mut settled = Ok(());
    while let Some(message) = messages.recv().await {
        match message {
            CopyMessage::Device(change) => settled = settled.and(copy.change(change)),
            CopyMessage::Control(index, change) => {
                let changed = copy.control(index).change(change);
                settled = settled.and(changed.map_err(|why| format!("ring {index}: {why}")));
            }
            CopyMessage::Run { index, ring, order, ended } => copy.run(index, ring, order, ended),
            CopyMessage::Settle(answer) => answer.send(std::mem::replace(&mut settled, Ok(()))),
            CopyMessage::End => break,
        }
    }
    for control in copy.controls.values() {
        control.set_order(QueueOrder::Abandon);
    }
}

impl ServedCopy {
    fn new(origin: CopyOrigin) -> Self {
        let CopyOrigin { name, volume, serial, queues, counters, phase, connection } = origin;
        let volume = VhostVolume::Block { device: volume.attach(), serial };
        let pools = POOLS.with_borrow_mut(|kept| {
            let pools = kept.upgrade().unwrap_or_default();
            *kept = Rc::downgrade(&pools);
            pools
        });
        let channel = FrontEndChannel::Forwarded(connection);
        let device = VhostDevice::new(VhostExport { name, volume, queues }, pools, counters, phase, channel);
        Self { device: Rc::new(device), controls: BTreeMap::new() }
    }

    fn control(&mut self, index: usize) -> &Rc<QueueControl> {
        self.controls.entry(index).or_insert_with(|| Rc::new(QueueControl::new()))
    }

    fn change(&mut self, change: DeviceChange) -> Result<(), String> {
        let device = &self.device;
        match change {
            DeviceChange::Features(features) => device.set_features(features),
            DeviceChange::Memory(regions) => {
                let region = |(place, mapping)| GuestRegion::new(place, Rc::new(mapping));
                device.set_memory(GuestMemory::new(regions.into_iter().map(region).collect())?);
            }
            DeviceChange::Translation(change) => device.translate(change)?,
            DeviceChange::Log(bits) => device.set_log(Some(DirtyLog::new(Rc::new(bits)))),
            DeviceChange::Inflight(mapping, queues) => {
                device.set_inflight(InflightRegion::new(Rc::new(mapping), queues));
            }
            DeviceChange::Config { offset, is_migration, content } => {
                device.change_config(offset, &content, is_migration)?;
            }
            DeviceChange::Reset => {
                self.controls.clear();
                device.reset();
            }
        }
        Ok(())
    }

    fn run(&mut self, index: usize, ring: VringState, order: QueueOrder, ended: OneshotSender<QueueEnd>) {
        let (device, control) = (self.device.clone(), self.control(index).clone());
        control.set_order(order);
        drop(spawn(async move { ended.send(queue::run(index, ring, device, control).await) }));
    }
}
