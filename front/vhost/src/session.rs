//! State of a vhost-user connection, without I/O: which requests are allowed when, and what each asks of the device.
//!
//! ```text
//! request --receive--> step --the connection carries it out--> finish(result) --> reply, if one is due
//! ```
//!
//! 1. A request that breaks the protocol ends the connection; one that cannot be carried out is refused, and ends the
//!    connection only if the front-end did not ask for an acknowledgement.
//! 2. Exactly one reply is sent for a request that has one or asks for an acknowledgement, and none for others.
//! 3. A ring runs only while it is [complete](VringState::is_complete), enabled, and not stopped since its last kick
//!    descriptor.
//! 4. A step that fails changes neither the regions of memory nor which rings have a kick descriptor.

#[cfg(any(fuzzing, test, feature = "fuzz"))]
pub mod fuzz;
mod ring_state;

use std::fmt;

use crate::memory::RegionPlace;
use crate::wire::{
    self, FrontEndMessage, IotlbChange, SharedFileRange, VhostHeader, VhostMalformed, feature, protocol_feature,
    request,
};
pub use ring_state::VringState;

/// Maximum size of a ring.
pub const RING_SIZE_MAX: u32 = 1024;

/// Features that concern the transport, whatever the device.
pub const TRANSPORT_FEATURES: u64 = feature::LOG_ALL
    | feature::INDIRECT_DESC
    | feature::EVENT_INDEX
    | feature::PROTOCOL_FEATURES
    | feature::VERSION_1
    | feature::ACCESS_PLATFORM
    | feature::RING_PACKED
    | feature::IN_ORDER;

/// Protocol features that are offered.
pub const PROTOCOL_FEATURES: u64 = protocol_feature::MQ
    | protocol_feature::LOG_SHMFD
    | protocol_feature::REPLY_ACK
    | protocol_feature::BACKEND_REQ
    | protocol_feature::CONFIG
    | protocol_feature::INFLIGHT_SHMFD
    | protocol_feature::RESET_DEVICE
    | protocol_feature::CONFIGURE_MEM_SLOTS;

/// Features and queues that a device offers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceOffer {
    /// Feature bits of the device type; those of the transport are added.
    pub features: u64,
    /// Number of queues.
    pub queues: u16,
}

/// Violation of the protocol; ends the connection.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum VhostViolation {
    /// Message that cannot be parsed.
    #[error(transparent)]
    Malformed(#[from] VhostMalformed),
    /// Other number of descriptors than the request has.
    #[error("message {request} came with {found} descriptors; {expected} were expected")]
    Descriptors {
        /// Number of the request.
        request: u32,
        /// Descriptors that came with it.
        found: usize,
        /// Descriptors that it should have.
        expected: usize,
    },
    /// Request that is not allowed now.
    #[error("message {request}: {why}")]
    NotNow {
        /// Number of the request.
        request: u32,
        /// Reason for which it is not allowed.
        why: String,
    },
}

/// Work that a request asks for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum VhostStep {
    /// No work but the reply, if there is one.
    Nothing,
    /// Map these regions, with a descriptor each, instead of all others.
    SetMemory(Vec<RegionPlace>),
    /// Map another region, whose descriptor came along.
    AddRegion(RegionPlace),
    /// Unmap a region.
    RemoveRegion(RegionPlace),
    /// Use a dirty log, whose descriptor came along.
    SetLog(SharedFileRange),
    /// Use the descriptor that came along for kicks of a ring; without one, poll the ring.
    SetKick {
        /// Index of the ring.
        index: usize,
    },
    /// Use the descriptor that came along for interrupts of a ring; without one, send none.
    SetCall {
        /// Index of the ring.
        index: usize,
    },
    /// Use the descriptor that came along for errors of a ring.
    SetErr {
        /// Index of the ring.
        index: usize,
    },
    /// Complete the requests in flight of a ring, then finish with [`StepOutcome::RingBase`].
    StopRing {
        /// Index of the ring.
        index: usize,
    },
    /// Use the descriptor that came along as the channel for the back-end's messages.
    SetBackendChannel,
    /// Change the IOMMU's table.
    Iotlb(IotlbChange),
    /// Read the configuration space, then finish with [`StepOutcome::Config`].
    ReadConfig {
        /// First byte.
        offset: u32,
        /// Length in bytes.
        len: u32,
    },
    /// Write the configuration space.
    WriteConfig {
        /// First byte.
        offset: u32,
        /// Set if the content is restored by a migration.
        is_migration: bool,
        /// Bytes to write.
        content: Vec<u8>,
    },
    /// Create a region for the record of requests in flight, then finish with [`StepOutcome::Inflight`].
    CreateInflight {
        /// Number of queues.
        queues: u16,
    },
    /// Use the region that came along for the record of requests in flight.
    SetInflight {
        /// Location in the file.
        range: SharedFileRange,
        /// Number of queues.
        queues: u16,
    },
    /// Complete the requests in flight of all rings and forget their state.
    Reset,
    /// Refuse the request.
    Refuse(String),
}

/// Result of a step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum StepOutcome {
    /// Success without data.
    Done,
    /// Ring stopped, with its next index.
    RingBase(u32),
    /// Content of the configuration space.
    Config(Vec<u8>),
    /// Region created, of which the descriptor is to be sent along.
    Inflight(SharedFileRange),
    /// Step that cannot be carried out, with the reason.
    Failed(String),
}

/// Reply that is due once a step is done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ReplyDue {
    None,
    /// Zero for success, on request of the front-end.
    Acknowledgement(u32),
    /// Number that is known without a step.
    Number(u32, u64),
    RingBase(usize),
    Config {
        offset: u32,
        flags: u32,
    },
    Inflight {
        queues: u16,
        queue_size: u16,
    },
}

/// Change of the state that a step makes if it is carried out.
#[derive(Debug)]
enum PendingChange {
    /// Other regions of memory.
    Regions(Vec<RegionPlace>),
    /// Kick descriptor of a ring.
    Kicked(usize),
}

/// State of a connection.
pub struct VhostSession {
    offer: DeviceOffer,
    features: u64,
    features_set: bool,
    protocol: u64,
    rings: Vec<VringState>,
    /// Regions of memory that are mapped.
    regions: Vec<RegionPlace>,
    due: ReplyDue,
    pending: Option<PendingChange>,
}

impl fmt::Debug for VhostSession {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "VhostSession(features {:#x}, protocol {:#x})", self.features, self.protocol)
    }
}

impl VhostSession {
    /// Creates the state of a connection on which nothing was received.
    pub fn new(offer: DeviceOffer) -> Self {
        let rings = vec![VringState::default(); usize::from(offer.queues)];
        let (regions, due) = (Vec::new(), ReplyDue::None);
        Self { offer, features: 0, features_set: false, protocol: 0, rings, regions, due, pending: None }
    }

    /// Returns all features that can be enabled.
    pub fn offered(&self) -> u64 {
        self.offer.features | TRANSPORT_FEATURES
    }

    /// Returns the enabled features.
    pub fn features(&self) -> u64 {
        self.features
    }

    /// Returns whether a feature is enabled.
    pub fn has(&self, feature: u64) -> bool {
        self.features & feature != 0
    }

    /// Returns whether a protocol feature is enabled.
    pub fn has_protocol(&self, feature: u64) -> bool {
        self.protocol & feature != 0
    }

    /// Returns the state of a ring.
    pub fn ring(&self, index: usize) -> &VringState {
        &self.rings[index]
    }

    /// Returns whether a ring is to run: see invariant 3.
    pub fn is_runnable(&self, index: usize) -> bool {
        let ring = &self.rings[index];
        // Without protocol features rings cannot be enabled, and are from the start.
        let enabled = ring.enabled || !self.has(feature::PROTOCOL_FEATURES);
        self.features_set && ring.is_complete() && ring.kicked && enabled
    }

    /// Returns the number of queues.
    pub fn queues(&self) -> usize {
        self.rings.len()
    }

    /// Takes a request; the step is to be carried out and then [`finish`](Self::finish)ed before the next.
    ///
    /// # Errors
    /// Violations of the protocol.
    ///
    /// # Panics
    /// When the former step was not finished.
    pub fn receive(
        &mut self,
        header: VhostHeader,
        payload: &[u8],
        descriptors: usize,
    ) -> Result<VhostStep, VhostViolation> {
        assert_eq!(self.due, ReplyDue::None, "a step was not finished");
        let request = header.request;
        let message = match FrontEndMessage::parse(request, payload) {
            Err(VhostMalformed::Unknown(_)) if self.acknowledges(header) && descriptors == 0 => {
                self.due = ReplyDue::Acknowledgement(request);
                return Ok(VhostStep::Refuse(format!("request {request} is not supported")));
            }
            other => other?,
        };
        let expected = Self::descriptors_of(&message, descriptors);
        if descriptors != expected {
            return Err(VhostViolation::Descriptors { request, found: descriptors, expected });
        }
        self.due = if self.acknowledges(header) { ReplyDue::Acknowledgement(request) } else { ReplyDue::None };
        self.step(request, message)
    }

    fn acknowledges(&self, header: VhostHeader) -> bool {
        header.needs_reply && self.has_protocol(protocol_feature::REPLY_ACK)
    }

    /// Returns the number of descriptors that come with a request.
    fn descriptors_of(message: &FrontEndMessage, found: usize) -> usize {
        match message {
            FrontEndMessage::SetMemTable(regions) => regions.len(),
            FrontEndMessage::SetLogBase(Some(_))
            | FrontEndMessage::AddMemReg(_)
            | FrontEndMessage::SetBackendReqFd
            | FrontEndMessage::SetInflight { .. } => 1,
            // A region is known by its addresses; some senders pass its descriptor too.
            FrontEndMessage::RemMemReg(_) | FrontEndMessage::SetLogFd => found.min(1),
            FrontEndMessage::SetVringKick { has_descriptor, .. }
            | FrontEndMessage::SetVringCall { has_descriptor, .. }
            | FrontEndMessage::SetVringErr { has_descriptor, .. } => usize::from(*has_descriptor),
            _ => 0,
        }
    }

    fn number(&mut self, request: u32, number: u64) -> VhostStep {
        self.due = ReplyDue::Number(request, number);
        VhostStep::Nothing
    }

    fn step(&mut self, request: u32, message: FrontEndMessage) -> Result<VhostStep, VhostViolation> {
        let not_now = |why: &str| Err(VhostViolation::NotNow { request, why: why.to_owned() });
        Ok(match message {
            FrontEndMessage::GetFeatures => self.number(request, self.offered()),
            FrontEndMessage::SetFeatures(features) => self.set_features(request, features)?,
            FrontEndMessage::SetOwner | FrontEndMessage::SetLogFd => VhostStep::Nothing,
            FrontEndMessage::ResetOwner | FrontEndMessage::ResetDevice => {
                self.reset();
                VhostStep::Reset
            }
            FrontEndMessage::GetProtocolFeatures => self.number(request, PROTOCOL_FEATURES),
            FrontEndMessage::SetProtocolFeatures(features) if features & !PROTOCOL_FEATURES != 0 => {
                return not_now(&format!("protocol features {:#x} were not offered", features & !PROTOCOL_FEATURES));
            }
            FrontEndMessage::SetProtocolFeatures(features) => {
                self.protocol = features;
                VhostStep::Nothing
            }
            FrontEndMessage::GetQueueNum => self.number(request, self.offer.queues.into()),
            FrontEndMessage::GetMaxMemSlots => self.number(request, crate::memory::REGIONS_MAX as u64),
            FrontEndMessage::SetMemTable(regions) => {
                self.pending = Some(PendingChange::Regions(regions.clone()));
                VhostStep::SetMemory(regions)
            }
            FrontEndMessage::AddMemReg(region) => {
                let regions = self.regions.iter().copied().chain([region]).collect();
                self.pending = Some(PendingChange::Regions(regions));
                VhostStep::AddRegion(region)
            }
            FrontEndMessage::RemMemReg(region) => {
                // The offset in the file need not be repeated.
                let same = |known: &RegionPlace| RegionPlace { file_offset: region.file_offset, ..*known } == region;
                match self.regions.iter().position(same) {
                    Some(at) => {
                        let mut regions = self.regions.clone();
                        let region = regions.remove(at);
                        self.pending = Some(PendingChange::Regions(regions));
                        VhostStep::RemoveRegion(region)
                    }
                    None => VhostStep::Refuse(format!("there is no memory region {region:x?}")),
                }
            }
            FrontEndMessage::SetLogBase(Some(range)) => {
                // With the feature it always has a reply.
                self.due = ReplyDue::Number(request, 0);
                VhostStep::SetLog(range)
            }
            FrontEndMessage::SetLogBase(None) => {
                VhostStep::Refuse("a dirty log needs the protocol feature LOG_SHMFD".to_owned())
            }
            FrontEndMessage::SetBackendReqFd => VhostStep::SetBackendChannel,
            FrontEndMessage::Iotlb(change) => {
                // It is acknowledged whether or not the front-end asks for that.
                self.due = ReplyDue::Acknowledgement(request);
                match self.has(feature::ACCESS_PLATFORM) {
                    true => VhostStep::Iotlb(change),
                    false => VhostStep::Refuse("translations without the feature ACCESS_PLATFORM".to_owned()),
                }
            }
            FrontEndMessage::GetConfig { offset, len, flags } => {
                self.due = ReplyDue::Config { offset, flags };
                VhostStep::ReadConfig { offset, len }
            }
            FrontEndMessage::SetConfig { offset, is_migration, content } => {
                VhostStep::WriteConfig { offset, is_migration, content }
            }
            FrontEndMessage::Postcopy => {
                return not_now("migration by page faults (postcopy) is not supported; use precopy");
            }
            FrontEndMessage::GetInflight { queues, queue_size } => {
                self.check_inflight(request, queues, queue_size)?;
                self.due = ReplyDue::Inflight { queues, queue_size };
                VhostStep::CreateInflight { queues }
            }
            FrontEndMessage::SetInflight { range, queues, queue_size } => {
                self.check_inflight(request, queues, queue_size)?;
                VhostStep::SetInflight { range, queues }
            }
            ring_message => self.ring_step(request, ring_message)?,
        })
    }

    fn check_inflight(&self, request: u32, queues: u16, queue_size: u16) -> Result<(), VhostViolation> {
        let fits = queues > 0 && queues <= self.offer.queues && (1..=RING_SIZE_MAX).contains(&queue_size.into());
        if fits {
            return Ok(());
        }
        let why =
            format!("{queues} queues of {queue_size}; the device has {} of up to {RING_SIZE_MAX}", self.offer.queues);
        Err(VhostViolation::NotNow { request, why })
    }

    fn set_features(&mut self, request: u32, features: u64) -> Result<VhostStep, VhostViolation> {
        let not_now = |why| Err(VhostViolation::NotNow { request, why });
        let unknown = features & !self.offered();
        if unknown != 0 {
            return not_now(format!("features {unknown:#x} were not offered"));
        }
        let changed = (features ^ self.features) & !feature::LOG_ALL;
        if changed != 0 && (0..self.rings.len()).any(|index| self.is_runnable(index)) {
            return not_now("features other than the dirty log are changed while rings run".to_owned());
        }
        (self.features, self.features_set) = (features, true);
        Ok(VhostStep::Nothing)
    }

    fn ring_step(&mut self, request: u32, message: FrontEndMessage) -> Result<VhostStep, VhostViolation> {
        let not_now = |why: String| VhostViolation::NotNow { request, why };
        let queues = self.rings.len();
        let ring_of = |index: u32| match usize::try_from(index) {
            Ok(index) if index < queues => Ok(index),
            _ => Err(not_now(format!("ring {index} of {queues}"))),
        };
        let (index, change): (u32, ring_state::RingChange) = match message {
            FrontEndMessage::SetVringNum { index, size } => (index, ring_state::RingChange::Size(size)),
            FrontEndMessage::SetVringAddr { index, addresses } => (index, ring_state::RingChange::Addresses(addresses)),
            FrontEndMessage::SetVringBase { index, base } => (index, ring_state::RingChange::Base(base)),
            FrontEndMessage::SetVringEnable { index, enable } => {
                if !self.has(feature::PROTOCOL_FEATURES) {
                    return Err(not_now("rings are enabled only with protocol features".to_owned()));
                }
                self.rings[ring_of(index)?].enabled = enable;
                return Ok(VhostStep::Nothing);
            }
            FrontEndMessage::SetVringKick { index, .. } => {
                let index = ring_of(index)?;
                self.pending = Some(PendingChange::Kicked(index));
                return Ok(VhostStep::SetKick { index });
            }
            FrontEndMessage::SetVringCall { index, .. } => return Ok(VhostStep::SetCall { index: ring_of(index)? }),
            FrontEndMessage::SetVringErr { index, .. } => return Ok(VhostStep::SetErr { index: ring_of(index)? }),
            FrontEndMessage::GetVringBase { index } => {
                let index = ring_of(index)?;
                self.rings[index].kicked = false;
                self.due = ReplyDue::RingBase(index);
                return Ok(VhostStep::StopRing { index });
            }
            other => unreachable!("no message of a ring: {other:?}"),
        };
        let index = ring_of(index)?;
        let packed = self.has(feature::RING_PACKED);
        let runs = self.is_runnable(index);
        match self.rings[index].change(change, packed, runs) {
            Ok(()) => Ok(VhostStep::Nothing),
            Err(why) => Err(not_now(format!("ring {index}: {why}"))),
        }
    }

    fn reset(&mut self) {
        self.rings.fill(VringState::default());
        (self.features, self.features_set) = (0, false);
    }

    /// Sets the next index of a ring that was stopped.
    pub fn set_base(&mut self, index: usize, base: u32) {
        self.rings[index].base = base;
    }

    /// Returns the reply that is due after a step, if there is one.
    ///
    /// # Errors
    /// The reason of a failed step for which no acknowledgement is due: the connection ends.
    pub fn finish(&mut self, outcome: StepOutcome) -> Result<Option<Vec<u8>>, String> {
        let due = std::mem::replace(&mut self.due, ReplyDue::None);
        let pending = self.pending.take();
        if !matches!(outcome, StepOutcome::Failed(_)) {
            match pending {
                Some(PendingChange::Regions(regions)) => self.regions = regions,
                Some(PendingChange::Kicked(index)) => self.rings[index].kicked = true,
                None => {}
            }
        }
        match (due, outcome) {
            (ReplyDue::RingBase(index), StepOutcome::RingBase(base)) => {
                self.set_base(index, base);
                Ok(Some(wire::reply(request::GET_VRING_BASE, &wire::ring_base(index as u32, base))))
            }
            (ReplyDue::Config { offset, flags }, StepOutcome::Config(content)) => {
                Ok(Some(wire::reply(request::GET_CONFIG, &wire::config(offset, flags, &content))))
            }
            (ReplyDue::Inflight { queues, queue_size }, StepOutcome::Inflight(range)) => {
                Ok(Some(wire::reply(request::GET_INFLIGHT_FD, &wire::inflight(range, queues, queue_size))))
            }
            // An empty reply is how a request for the configuration space or a region fails.
            (ReplyDue::Config { .. }, StepOutcome::Failed(_)) => Ok(Some(wire::reply(request::GET_CONFIG, &[]))),
            (ReplyDue::Acknowledgement(request), StepOutcome::Failed(_)) => {
                Ok(Some(wire::reply(request, &wire::number(1))))
            }
            (ReplyDue::Acknowledgement(request), _) => Ok(Some(wire::reply(request, &wire::number(0)))),
            (_, StepOutcome::Failed(why)) => Err(why),
            (ReplyDue::Number(request, number), _) => Ok(Some(wire::reply(request, &wire::number(number)))),
            (ReplyDue::None, _) => Ok(None),
            (due, outcome) => unreachable!("{due:?} after {outcome:?}"),
        }
    }
}

#[cfg(test)]
mod tests;
