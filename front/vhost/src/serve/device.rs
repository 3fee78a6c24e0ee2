//! Device as one front-end uses it: what its messages change, and its queues use.

use std::cell::{Cell, Ref, RefCell};
use std::rc::Rc;
use std::sync::Arc;

use forebay_block::{BlockDevice, SizeWatch};
use forebay_reactor::GuardedMapping;
use forebay_reactor::sync::Notify;

use super::backend_channel::BackendChannel;
use super::device_events::{ConnectionPhase, DeviceEvents};
use super::scsi_nexus::ScsiModel;
use super::{SERIAL_MAX, VhostExport, VhostVolume};
use crate::block::{BlockConfig, BlockRules, PayloadPools};
use crate::dirty_log::DirtyLog;
use crate::inflight::inflight_len;
use crate::iotlb::{Iotlb, IotlbMiss};
use crate::memory::{AddressSpace, GuestArea, GuestMemory};
use crate::scsi::ScsiConfig;
use crate::session::RING_SIZE_MAX;
use crate::stats::VhostCounters;
use crate::wire::{IotlbChange, feature};

/// Region for the record of requests in flight.
pub(super) struct InflightRegion {
    mapping: Rc<GuardedMapping>,
    queues: u16,
    /// Bytes of a queue's part.
    part_len: usize,
}

impl InflightRegion {
    /// Alignment in bytes of a region in its file: that of the parts of its queues.
    pub(super) const ALIGN: u64 = 64;

    /// Creates a region of mapped memory.
    pub(super) fn new(mapping: Rc<GuardedMapping>, queues: u16) -> Self {
        let part_len = mapping.len() / usize::from(queues.max(1));
        Self { mapping, queues, part_len: part_len - part_len % Self::ALIGN as usize }
    }

    /// Returns the bytes of a region, for rings of any size and format: a driver may choose larger ones than the front-end
    /// has announced.
    pub(super) fn len(queues: u16) -> u64 {
        const SIZE: u16 = RING_SIZE_MAX as u16;
        u64::from(queues) * inflight_len(SIZE, false).max(inflight_len(SIZE, true))
    }

    /// Returns a queue's part.
    ///
    /// # Errors
    /// Text that says why it has none of that size.
    fn part(&self, index: usize, size: u16, packed: bool) -> Result<GuestArea, String> {
        let fits = index < usize::from(self.queues) && inflight_len(size, packed) <= self.part_len as u64;
        let part = fits.then(|| GuestArea::of(&self.mapping, index * self.part_len, self.part_len)).flatten();
        part.ok_or_else(|| {
            let (queues, bytes) = (self.queues, self.mapping.len());
            format!("the in-flight region of {bytes} bytes for {queues} queues has no part for queue {index} of {size}")
        })
    }
}

/// virtio-blk device of a connection.
pub(super) struct BlockModel {
    volume: Rc<dyn BlockDevice>,
    serial: String,
    queues: u16,
    config: RefCell<BlockConfig>,
}

impl BlockModel {
    fn new(volume: Rc<dyn BlockDevice>, serial: String, queues: u16) -> Self {
        let geometry = volume.geometry();
        let config = RefCell::new(BlockConfig::new(&geometry, geometry.read_only, queues));
        Self { volume, serial, queues, config }
    }

    /// Returns the volume.
    pub(super) fn volume(&self) -> &Rc<dyn BlockDevice> {
        &self.volume
    }

    /// Returns the serial number, padded with zeroes.
    pub(super) fn serial(&self) -> [u8; SERIAL_MAX] {
        let mut serial = [0; SERIAL_MAX];
        let bytes = self.serial.as_bytes();
        let len = bytes.len().min(SERIAL_MAX);
        serial[..len].copy_from_slice(&bytes[..len]);
        serial
    }

    /// Returns the rules by which requests are checked now.
    pub(super) fn rules(&self, features: u64) -> BlockRules {
        let geometry = self.volume.geometry();
        let writeback = self.config.borrow().writeback();
        BlockRules { geometry, read_only: geometry.read_only, features, writeback }
    }

    fn reset(&self) {
        let geometry = self.volume.geometry();
        *self.config.borrow_mut() = BlockConfig::new(&geometry, geometry.read_only, self.queues);
    }
}

/// Device of a connection, by its type.
pub(super) enum DeviceModel {
    /// virtio-blk device.
    Block(BlockModel),
    /// virtio-scsi device.
    Scsi(ScsiModel),
}

/// Way from a device to its front-end.
pub(super) enum FrontEndChannel {
    /// Channel that the front-end may have given to the back-end.
    Direct(Option<BackendChannel>),
    /// Core of the connection, which speaks for this one.
    Forwarded(DeviceEvents),
}

/// Device of one connection on one core.
pub(super) struct VhostDevice {
    /// Volume and its name.
    pub(super) export: VhostExport,
    /// Buffers for data.
    pub(super) pools: Rc<PayloadPools>,
    /// Counters of the connection on this core.
    pub(super) counters: Arc<VhostCounters>,
    /// Phase of the connection.
    pub(super) phase: Arc<ConnectionPhase>,
    /// Enabled features.
    pub(super) features: Cell<u64>,
    memory: RefCell<Rc<GuestMemory>>,
    iotlb: RefCell<Iotlb>,
    /// Counts changes of memory and translations.
    generation: Cell<u64>,
    /// Notified of these changes.
    pub(super) changed: Notify,
    log: RefCell<Option<DirtyLog>>,
    inflight: RefCell<Option<InflightRegion>>,
    /// Device, by its type.
    pub(super) model: DeviceModel,
    channel: RefCell<FrontEndChannel>,
    /// Set once the guest or its monitor has broken the rules.
    fault: RefCell<Option<String>>,
    /// Notified of a fault.
    pub(super) faulted: Notify,
}

impl VhostDevice {
    /// Creates the device of a connection.
    pub(super) fn new(
        export: VhostExport,
        pools: Rc<PayloadPools>,
        counters: Arc<VhostCounters>,
        phase: Arc<ConnectionPhase>,
        channel: FrontEndChannel,
    ) -> Self {
        let model = match &export.volume {
            VhostVolume::Block { device, serial } => {
                DeviceModel::Block(BlockModel::new(device.clone(), serial.clone(), export.queues))
            }
            VhostVolume::Scsi(target) => DeviceModel::Scsi(ScsiModel::new(target, export.queues)),
        };
        Self {
            export,
            pools,
            counters,
            phase,
            features: Cell::new(0),
            memory: RefCell::default(),
            iotlb: RefCell::default(),
            generation: Cell::new(0),
            changed: Notify::new(),
            log: RefCell::default(),
            inflight: RefCell::default(),
            model,
            channel: RefCell::new(channel),
            fault: RefCell::default(),
            faulted: Notify::new(),
        }
    }

    /// Returns whether a feature is enabled.
    pub(super) fn has(&self, feature: u64) -> bool {
        self.features.get() & feature != 0
    }

    /// Enables features.
    pub(super) fn set_features(&self, features: u64) {
        self.features.set(features);
        if let DeviceModel::Block(model) = &self.model {
            model.config.borrow_mut().negotiated(features);
        }
    }

    /// Returns the virtio-blk device.
    ///
    /// # Panics
    /// When it is of another type.
    pub(super) fn block(&self) -> &BlockModel {
        match &self.model {
            DeviceModel::Block(model) => model,
            DeviceModel::Scsi(_) => unreachable!("a queue of another type of device"),
        }
    }

    /// Returns the virtio-scsi device.
    ///
    /// # Panics
    /// When it is of another type.
    pub(super) fn scsi(&self) -> &ScsiModel {
        match &self.model {
            DeviceModel::Scsi(model) => model,
            DeviceModel::Block(_) => unreachable!("a queue of another type of device"),
        }
    }

    /// Returns the number of queues besides those for requests.
    pub(super) fn extra_queues(&self) -> u16 {
        match &self.model {
            DeviceModel::Block(_) => 0,
            DeviceModel::Scsi(_) => 2,
        }
    }

    /// Returns the watch of the volume's size, where it is in the configuration space.
    pub(super) fn size_watch(&self) -> Option<Rc<SizeWatch>> {
        match &self.model {
            DeviceModel::Block(model) => model.volume.size_watch(),
            DeviceModel::Scsi(_) => None,
        }
    }

    /// Returns the features of the device's type.
    pub(super) fn model_features(&self) -> u64 {
        match &self.model {
            DeviceModel::Block(model) => crate::block::features(model.volume.geometry().read_only, self.export.queues),
            DeviceModel::Scsi(model) => model.features(),
        }
    }

    /// Returns the number of changes of memory and translations so far.
    pub(super) fn generation(&self) -> u64 {
        self.generation.get()
    }

    fn advance(&self) {
        self.generation.set(self.generation.get() + 1);
        self.changed.notify_all();
    }

    /// Returns whether memory was lost, because its file was truncated.
    pub(super) fn is_memory_lost(&self) -> bool {
        self.memory.borrow().is_lost()
    }

    /// Replaces the table of memory.
    pub(super) fn set_memory(&self, memory: GuestMemory) {
        *self.memory.borrow_mut() = Rc::new(memory);
        self.advance();
    }

    /// Changes the IOMMU's table as the front-end asks for.
    ///
    /// # Errors
    /// Text that says why the change is refused.
    pub(super) fn translate(&self, change: IotlbChange) -> Result<(), String> {
        self.change_iotlb(|iotlb| match change {
            IotlbChange::Update { iova, len, user, access } => iotlb.insert(iova, len, user, access),
            IotlbChange::Invalidate { iova, len } => {
                iotlb.remove(iova, len);
                Ok(())
            }
        })
    }

    fn change_iotlb<R>(&self, change: impl FnOnce(&mut Iotlb) -> R) -> R {
        let result = change(&mut self.iotlb.borrow_mut());
        self.advance();
        result
    }

    /// Calls `access` with the address space of descriptors and rings.
    pub(super) fn with_space<R>(&self, access: impl FnOnce(&AddressSpace<'_>) -> R) -> R {
        let memory: Ref<'_, Rc<GuestMemory>> = self.memory.borrow();
        let iotlb = self.iotlb.borrow();
        let iotlb = self.has(feature::ACCESS_PLATFORM).then_some(&*iotlb);
        access(&AddressSpace { memory: &memory, iotlb })
    }

    /// Asks the front-end for a translation.
    pub(super) fn request_translation(&self, miss: IotlbMiss) {
        match &*self.channel.borrow() {
            FrontEndChannel::Direct(Some(channel)) => channel.iotlb_miss(miss.iova, miss.access),
            FrontEndChannel::Direct(None) => {}
            FrontEndChannel::Forwarded(connection) => connection.miss(miss),
        }
    }

    /// Returns the dirty log, if writes are to be logged.
    pub(super) fn log(&self) -> Option<DirtyLog> {
        if self.has(feature::LOG_ALL) { self.log.borrow().clone() } else { None }
    }

    /// Sets the dirty log.
    pub(super) fn set_log(&self, log: Option<DirtyLog>) {
        *self.log.borrow_mut() = log;
    }

    /// Sets the channel for messages of the back-end.
    pub(super) fn set_channel(&self, channel: BackendChannel) {
        *self.channel.borrow_mut() = FrontEndChannel::Direct(Some(channel));
    }

    /// Sets the region for the record of requests in flight.
    pub(super) fn set_inflight(&self, region: InflightRegion) {
        *self.inflight.borrow_mut() = Some(region);
    }

    /// Returns a queue's part of the region for requests in flight, if the front-end has set one.
    ///
    /// # Errors
    /// Text that says why the queue has no part.
    pub(super) fn inflight_part(&self, index: usize, size: u16) -> Result<Option<GuestArea>, String> {
        let packed = self.has(feature::RING_PACKED);
        self.inflight.borrow().as_ref().map(|region| region.part(index, size, packed)).transpose()
    }

    /// Returns content of the configuration space.
    pub(super) fn read_config(&self, offset: u32, len: u32) -> Vec<u8> {
        let mut content = vec![0; len as usize];
        match &self.model {
            DeviceModel::Block(model) => model.config.borrow().read(offset, &mut content),
            DeviceModel::Scsi(model) => model.read_config(offset, &mut content),
        }
        content
    }

    /// Writes the configuration space as the front-end asks for: for a driver, or on the destination of a migration.
    ///
    /// # Errors
    /// Text that says what cannot be written.
    pub(super) fn change_config(&self, offset: u32, content: &[u8], is_migration: bool) -> Result<(), String> {
        match is_migration {
            true => self.restore_config(offset, content),
            false => self.write_config(offset, content),
        }
    }

    /// Writes the configuration space, as a driver does.
    fn write_config(&self, offset: u32, content: &[u8]) -> Result<(), String> {
        match &self.model {
            DeviceModel::Block(model) => {
                model.config.borrow_mut().write(offset, content).map_err(|refusal| refusal.to_string())
            }
            DeviceModel::Scsi(model) => model.write_config(offset, content),
        }
    }

    /// Restores what the driver had written of the configuration space, out of all of it, on the destination of a migration.
    fn restore_config(&self, offset: u32, content: &[u8]) -> Result<(), String> {
        let writable = match &self.model {
            DeviceModel::Block(_) => BlockConfig::WRITABLE,
            DeviceModel::Scsi(_) => ScsiConfig::WRITABLE,
        };
        // Other fields differ between devices.
        let offset = offset as usize;
        let begin = writable.start.max(offset);
        let end = writable.end.min(offset.saturating_add(content.len()));
        match content.get(begin - offset..end.saturating_sub(offset)) {
            Some(bytes) if !bytes.is_empty() => self.write_config(begin as u32, bytes),
            _ => Ok(()),
        }
    }

    /// Adopts another size of the volume, of which the driver is told.
    pub(super) fn resized(&self) {
        let DeviceModel::Block(model) = &self.model else { return };
        let geometry = model.volume.geometry();
        if !model.config.borrow_mut().update(&geometry, geometry.read_only) {
            return;
        }
        match &*self.channel.borrow() {
            FrontEndChannel::Direct(Some(channel)) => channel.config_changed(),
            _ => tracing::info!(
                export = self.export.name,
                "the guest sees the volume's other size when it starts again: its monitor takes no messages"
            ),
        }
    }

    /// Ends the device for a reason; the first one counts.
    pub(super) fn fail(&self, why: String) {
        if let FrontEndChannel::Forwarded(connection) = &*self.channel.borrow() {
            connection.fault(why.clone());
        }
        self.fault.borrow_mut().get_or_insert(why);
        self.faulted.notify_all();
    }

    /// Returns the reason for which the device is to end.
    pub(super) fn fault(&self) -> Option<String> {
        self.fault.borrow().clone()
    }

    /// Forgets what the driver has negotiated.
    pub(super) fn reset(&self) {
        self.features.set(0);
        match &self.model {
            DeviceModel::Block(model) => model.reset(),
            DeviceModel::Scsi(model) => model.reset(),
        }
        self.change_iotlb(Iotlb::clear);
        self.set_log(None);
        self.inflight.replace(None);
    }
}
