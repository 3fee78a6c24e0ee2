//! Front-end of vhost-user: the side of a virtual machine monitor (QEMU's docs/interop/vhost-user.rst).
//!
//! A [`FrontEnd`] goes through its [stages](FrontEndStage) as QEMU does; each message can be sent out of turn, too.

mod messages;

use std::os::fd::BorrowedFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::block::{self, VirtioBlkConfig};
use crate::channel::BackendChannel;
use crate::error::{FrontEndError, Result};
use crate::memory::{GuestMemory, MemoryLayout, SharedArea};
use crate::message::{FrontEndMessage, InflightDescription, RingAddresses, feature, protocol};
use crate::queue::FrontEndQueue;
use crate::rings::DriverRingOptions;
use crate::scsi;
use crate::socket::{FrontEndSocket, is_readable};

/// Progress of a front-end.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum FrontEndStage {
    /// Connected; no message was sent.
    Connected,
    /// Features and protocol features are negotiated.
    Negotiated,
    /// The device has guest memory.
    Shared,
    /// Queues are set up and enabled.
    Running,
}

/// Type of a virtio device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum VirtioDeviceType {
    /// Disk: virtio-blk.
    Block,
    /// Controller with disks: virtio-scsi.
    Scsi,
}

impl VirtioDeviceType {
    /// Returns the number of bytes of the configuration that a driver of this type reads.
    pub fn config_size(self) -> u32 {
        match self {
            Self::Block => block::CONFIG_SIZE,
            Self::Scsi => scsi::CONFIG_SIZE,
        }
    }

    /// Returns the features that a driver of this type accepts, besides those of rings.
    pub fn features(self) -> u64 {
        match self {
            Self::Block => feature::BLOCK,
            Self::Scsi => feature::SCSI,
        }
    }
}

/// Options of a front-end.
#[derive(Debug, Clone)]
pub struct FrontEndOptions {
    /// Type of the device, which has this configuration.
    pub device: VirtioDeviceType,
    /// Features that are accepted where they are offered.
    pub features: u64,
    /// Protocol features that are accepted where they are offered.
    pub protocol_features: u64,
    /// Guest memory.
    pub memory: MemoryLayout,
    /// Regions are added one by one (ADD_MEM_REG), where the device can do that, not as a table.
    pub by_slots: bool,
    /// Number of queues.
    pub queues: u16,
    /// Entries of a queue.
    pub queue_size: u16,
    /// The device is given no descriptor for its notifications.
    pub is_polled: bool,
    /// The device tracks requests in flight in a region, where it can do that.
    pub inflight: bool,
    /// Time in which the device must reply, and complete a request.
    pub patience: Duration,
}

impl Default for FrontEndOptions {
    fn default() -> Self {
        Self {
            device: VirtioDeviceType::Block,
            features: feature::BLOCK,
            protocol_features: protocol::KNOWN,
            memory: MemoryLayout::split(2, 16 << 20, true),
            by_slots: false,
            queues: 1,
            queue_size: 128,
            is_polled: false,
            inflight: false,
            patience: Duration::from_secs(10),
        }
    }
}

impl FrontEndOptions {
    /// Options for a virtio-scsi device: its control queue, its event queue, and as many request queues.
    pub fn scsi(request_queues: u16) -> Self {
        let (device, queues) = (VirtioDeviceType::Scsi, request_queues + scsi::FIRST_REQUEST_QUEUE as u16);
        Self { device, features: device.features(), queues, ..Self::default() }
    }

    /// Accepts more features.
    pub fn with(mut self, features: u64) -> Self {
        self.features |= features;
        self
    }
}

/// Front-end, with its guest memory and queues.
#[derive(Debug)]
pub struct FrontEnd {
    /// Connection to the device.
    pub socket: FrontEndSocket,
    /// Options of the front-end.
    pub options: FrontEndOptions,
    /// Features that the device offers.
    pub offered: u64,
    /// Negotiated features.
    pub features: u64,
    /// Protocol features that the device offers.
    pub protocol_offered: u64,
    /// Negotiated protocol features.
    pub protocol_features: u64,
    /// Maximum number of queues that the device has.
    pub queue_max: u64,
    /// Maximum number of memory regions that the device takes.
    pub slots_max: u64,
    /// Device configuration at the time of negotiation; empty without CONFIG.
    pub config_bytes: Vec<u8>,
    /// Device configuration at the time of negotiation, if it is a virtio-blk device.
    pub config: VirtioBlkConfig,
    /// Guest memory.
    pub memory: GuestMemory,
    /// Queues that were set up.
    pub queues: Vec<FrontEndQueue>,
    /// Back-end channel.
    pub channel: Option<BackendChannel>,
    /// Region that tracks requests in flight.
    pub inflight: Option<(InflightDescription, SharedArea)>,
    /// Log of dirty pages.
    pub log: Option<SharedArea>,
    /// Socket of the device, if it listens.
    pub path: Option<PathBuf>,
    /// Socket of another device of the same process.
    pub neighbour: Option<PathBuf>,
}

impl FrontEnd {
    /// Uses a connected socket; no message is sent.
    ///
    /// # Errors
    /// When guest memory cannot be created.
    pub fn over(stream: UnixStream, options: &FrontEndOptions) -> Result<Self> {
        Ok(Self {
            socket: FrontEndSocket::over(stream),
            options: options.clone(),
            offered: 0,
            features: 0,
            protocol_offered: 0,
            protocol_features: 0,
            queue_max: 1,
            slots_max: 0,
            config_bytes: Vec::new(),
            config: VirtioBlkConfig::default(),
            memory: GuestMemory::create(&options.memory)?,
            queues: Vec::new(),
            channel: None,
            inflight: None,
            log: None,
            path: None,
            neighbour: None,
        })
    }

    /// Connects to a listening device, and goes on to `Running`.
    ///
    /// # Errors
    /// When the device refuses something.
    pub fn connect(path: &Path, options: &FrontEndOptions) -> Result<Self> {
        Self::attach(path, options, FrontEndStage::Running)
    }

    /// Connects to a listening device, and goes on to a stage.
    ///
    /// # Errors
    /// When the device refuses something.
    pub fn attach(path: &Path, options: &FrontEndOptions, stage: FrontEndStage) -> Result<Self> {
        let mut front_end = Self::over(UnixStream::connect(path)?, options)?;
        front_end.path = Some(path.to_path_buf());
        front_end.advance(FrontEndStage::Connected, stage)?;
        Ok(front_end)
    }

    /// Waits for a device that connects, and goes on to a stage.
    ///
    /// # Errors
    /// When no device connects in time, or it refuses something.
    pub fn accept(listener: &UnixListener, options: &FrontEndOptions, stage: FrontEndStage) -> Result<Self> {
        let descriptor = std::os::fd::AsFd::as_fd(listener);
        if !is_readable(descriptor, Instant::now() + options.patience)? {
            return Err(FrontEndError::timed_out("connection of a device", options.patience));
        }
        let mut front_end = Self::over(listener.accept()?.0, options)?;
        front_end.advance(FrontEndStage::Connected, stage)?;
        Ok(front_end)
    }

    /// Goes on from one stage to another.
    ///
    /// # Errors
    /// When the device refuses something.
    pub fn advance(&mut self, from: FrontEndStage, to: FrontEndStage) -> Result<()> {
        let is_due = |stage: FrontEndStage| from < stage && stage <= to;
        if is_due(FrontEndStage::Negotiated) {
            self.negotiate()?;
        }
        if is_due(FrontEndStage::Shared) {
            self.share_memory()?;
        }
        if is_due(FrontEndStage::Running) {
            self.start()?;
        }
        Ok(())
    }

    /// Negotiates features and protocol features, and reads the configuration.
    ///
    /// # Errors
    /// When the device refuses something.
    pub fn negotiate(&mut self) -> Result<()> {
        self.offered = self.get_features()?;
        if self.offered & feature::PROTOCOL_FEATURES != 0 {
            self.protocol_offered = self.get_protocol_features()?;
            self.set_protocol_features(self.protocol_offered & self.options.protocol_features)?;
        }
        self.set_owner()?;
        if self.has_protocol(protocol::MQ) {
            self.queue_max = self.get_queue_num()?;
        }
        if self.has_protocol(protocol::CONFIGURE_MEM_SLOTS) {
            self.slots_max = self.get_max_mem_slots()?;
        }
        if self.has_protocol(protocol::BACKEND_REQ) {
            let (channel, theirs) = BackendChannel::create()?;
            self.set_backend_channel(&theirs)?;
            self.channel = Some(channel);
        }
        if self.has_protocol(protocol::CONFIG) {
            self.config_bytes = self.get_config(0, self.options.device.config_size())?;
            if self.options.device == VirtioDeviceType::Block {
                self.config = VirtioBlkConfig::decode(&self.config_bytes);
            }
        }
        self.set_features(self.offered & self.options.features)
    }

    /// Gives the device guest memory, as a table or region by region.
    ///
    /// # Errors
    /// When the device refuses something.
    pub fn share_memory(&mut self) -> Result<()> {
        if !self.options.by_slots || !self.has_protocol(protocol::CONFIGURE_MEM_SLOTS) {
            return self.set_memory_table();
        }
        for region in self.memory.regions().to_vec() {
            self.add_memory_region(region.description(), region.descriptor())?;
        }
        Ok(())
    }

    /// Creates the queues, sets them up and enables them.
    ///
    /// # Errors
    /// When the device refuses something, or has fewer queues.
    pub fn start(&mut self) -> Result<()> {
        if u64::from(self.options.queues) > self.queue_max {
            return Err(FrontEndError::Violation(format!("the device has only {} queues", self.queue_max)));
        }
        if self.options.inflight && self.has_protocol(protocol::INFLIGHT_SHMFD) {
            self.get_inflight(self.options.queues, self.options.queue_size)?;
            self.set_inflight()?;
        }
        for index in 0..self.options.queues {
            let queue = self.create_queue(index)?;
            let base = queue.ring.resume_base();
            self.queues.push(queue);
            self.start_queue(usize::from(index), base)?;
        }
        if self.has_protocol(protocol::STATUS) {
            // ACKNOWLEDGE, DRIVER, FEATURES_OK, DRIVER_OK.
            self.set_status(15)?;
        }
        Ok(())
    }

    /// Creates a queue in guest memory, as negotiated.
    ///
    /// # Errors
    /// When guest memory has no space.
    pub fn create_queue(&self, index: u16) -> Result<FrontEndQueue> {
        let has = |bit: u64| self.features & bit != 0;
        let options = DriverRingOptions {
            indirect: has(feature::INDIRECT_DESC),
            event_idx: has(feature::EVENT_IDX),
            in_order: has(feature::IN_ORDER),
        };
        let (size, is_polled) = (self.options.queue_size, self.options.is_polled);
        FrontEndQueue::create(&self.memory, index, size, has(feature::RING_PACKED), options, is_polled)
    }

    /// Sets up a queue and enables it; `base` is where the device begins.
    ///
    /// # Errors
    /// When the device refuses something.
    pub fn start_queue(&mut self, queue: usize, base: u32) -> Result<()> {
        let index = u32::from(self.queues[queue].index);
        let addresses = self.ring_addresses(queue)?;
        self.set_vring_num(index, u32::from(self.queues[queue].ring.size()))?;
        self.set_vring_base(index, base)?;
        self.set_vring_addresses(&addresses)?;
        self.set_queue_events(queue)?;
        if self.features & feature::PROTOCOL_FEATURES != 0 {
            self.set_vring_enable(index, true)?;
        }
        // A device may start a queue with the first kick, and one that resumes must look for what is available.
        self.queues[queue].notify()
    }

    /// Returns the addresses of a queue, for SET_VRING_ADDR.
    ///
    /// # Errors
    /// When the queue is no longer in guest memory.
    pub fn ring_addresses(&self, queue: usize) -> Result<RingAddresses> {
        let queue = &self.queues[queue];
        let parts = queue.ring.parts();
        let is_logged = self.features & feature::LOG_ALL != 0;
        let address = |guest: u64| match self.features & feature::ACCESS_PLATFORM {
            0 => self.memory.user(guest),
            _ => Ok(guest),
        };
        Ok(RingAddresses {
            index: u32::from(queue.index),
            flags: u32::from(is_logged),
            descriptors: address(parts.descriptors)?,
            used: address(parts.used)?,
            available: address(parts.available)?,
            log: parts.used,
        })
    }

    /// Returns whether a protocol feature is negotiated.
    pub fn has_protocol(&self, bit: u64) -> bool {
        self.protocol_features & bit != 0
    }

    /// Replaces the connection by a new one, on which nothing was sent.
    ///
    /// # Errors
    /// When no one listens there.
    pub fn reconnect(&mut self) -> Result<()> {
        let path = self.path.clone().ok_or(FrontEndError::Ended)?;
        self.socket = FrontEndSocket::connect(&path)?;
        self.channel = None;
        self.protocol_features = 0;
        Ok(())
    }

    /// Sends any bytes and descriptors.
    ///
    /// # Errors
    /// [`FrontEndError::Ended`] when the device has closed the connection.
    pub fn send_raw(&self, bytes: &[u8], descriptors: &[BorrowedFd<'_>]) -> Result<()> {
        self.socket.send(bytes, descriptors)
    }

    /// Receives the next message.
    ///
    /// # Errors
    /// [`FrontEndError::Ended`] when the device has closed the connection, [`FrontEndError::TimedOut`].
    pub fn receive(&self) -> Result<FrontEndMessage> {
        self.socket.receive(self.options.patience)
    }

    /// Adds a region to guest memory while the device runs.
    ///
    /// # Errors
    /// When the device refuses it.
    pub fn add_region(&mut self, region: &crate::memory::RegionLayout) -> Result<()> {
        let added = self.memory.add(region)?;
        for queue in &mut self.queues {
            queue.memory = self.memory.clone();
        }
        self.add_memory_region(added.description(), added.descriptor())
    }

    /// Removes the region at a guest address while the device runs.
    ///
    /// # Errors
    /// When the device refuses it, or there is no such region.
    pub fn remove_region(&mut self, guest: u64) -> Result<()> {
        let missing = FrontEndError::NoMemory { address: guest, length: 0 };
        let removed = self.memory.remove(guest).ok_or(missing)?;
        for queue in &mut self.queues {
            queue.memory = self.memory.clone();
        }
        self.remove_memory_region(removed.description())
    }
}
