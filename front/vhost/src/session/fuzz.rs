//! Entry point of the fuzzers: messages of a front-end in, and a panic if the state of its connection breaks an
//! invariant.

use super::{
    DeviceOffer, PROTOCOL_FEATURES, RING_SIZE_MAX, StepOutcome, TRANSPORT_FEATURES, VhostSession, VhostStep, VringState,
};
use crate::block::{self, BlockConfig};
use crate::iotlb::Iotlb;
use crate::memory::{MemoryAccess, REGIONS_MAX, RegionPlace};
use crate::scsi::{self, ScsiConfig};
use crate::wire::{
    CONFIG_MAX, FrontEndMessage, HEADER_LEN, IotlbChange, PAYLOAD_MAX, SharedFileRange, TABLE_REGIONS_MAX, VhostHeader,
    protocol_feature, request,
};

/// Number of descriptors that stands for those that the request should have.
const DESCRIPTORS_EXPECTED: u8 = 15;

/// Configuration space that the messages read and write.
enum FuzzedConfig {
    Block(BlockConfig),
    Scsi(ScsiConfig),
}

impl FuzzedConfig {
    fn read(&self, offset: u32, to: &mut [u8]) {
        match self {
            Self::Block(config) => config.read(offset, to),
            Self::Scsi(config) => config.read(offset, to),
        }
    }

    /// Writes bytes, of which none but those of fields for drivers may change anything.
    fn write(&mut self, offset: u32, content: &[u8]) -> Result<(), String> {
        let whole = |config: &Self| {
            let mut bytes = [0; CONFIG_MAX as usize];
            config.read(0, &mut bytes);
            bytes
        };
        let before = whole(self);
        let (result, writable) = match self {
            Self::Block(config) => (config.write(offset, content).map_err(|refusal| refusal.to_string()), 32..33),
            Self::Scsi(config) => (config.write(offset, content).map_err(|refusal| refusal.to_string()), 20..28),
        };
        let after = whole(self);
        let at = offset as usize;
        match &result {
            Ok(()) => assert_eq!(after[at..at + content.len()], *content, "a write that had no effect"),
            Err(_) => assert_eq!(after, before, "a refused write"),
        }
        assert_eq!(
            (&after[..writable.start], &after[writable.end..]),
            (&before[..writable.start], &before[writable.end..])
        );
        result
    }
}

/// Connection, of which files and rings are imagined.
struct FuzzedConnection {
    session: VhostSession,
    config: FuzzedConfig,
    /// Regions of memory that were mapped.
    regions: Vec<RegionPlace>,
    iotlb: Iotlb,
    /// Set, for each ring, once it has had a kick descriptor since it was stopped.
    kicked: Vec<bool>,
}

/// Receives messages, carries them out, and checks state and replies.
///
/// The input is a byte of options (the queues, and the type of the device), and then for each message a byte of how it
/// is carried out, its header and its payload.  That byte has the number of descriptors in its low four bits, 15 for as
/// many as the request has, and in its highest bit whether the step fails.
///
/// # Panics
/// When an invariant is broken.
pub fn messages(data: &[u8]) {
    let Some((&options, mut rest)) = data.split_first() else { return };
    let queues = u16::from(options % 8) + 1;
    let (features, config) = if options & 8 == 0 {
        let geometry = forebay_block::Geometry {
            size: 1 << 30,
            block_size: 512,
            preferred_io: 4096,
            transfer_max: 8192,
            read_only: options & 16 != 0,
        };
        let config = BlockConfig::new(&geometry, geometry.read_only, queues);
        (block::features(geometry.read_only, queues), FuzzedConfig::Block(config))
    } else {
        (scsi::features(), FuzzedConfig::Scsi(ScsiConfig::new(queues)))
    };
    let session = VhostSession::new(DeviceOffer { features, queues });
    let kicked = vec![false; usize::from(queues)];
    let mut connection = FuzzedConnection { session, config, regions: Vec::new(), iotlb: Iotlb::default(), kicked };
    while let Some((&how, message)) = rest.split_first() {
        let Some((head, after)) = message.split_first_chunk::<HEADER_LEN>() else { return };
        let Ok(header) = VhostHeader::parse(head) else { return };
        assert_eq!(VhostHeader::parse(&header.to_bytes()), Ok(header));
        assert!(header.len as usize <= PAYLOAD_MAX);
        let Some((payload, after)) = after.split_at_checked(header.len as usize) else { return };
        if connection.receive(header, payload, how).is_none() {
            return;
        }
        connection.check();
        rest = after;
    }
}

/// Returns whether a request has a reply of its own.
fn has_reply(request: u32, payload: &[u8]) -> bool {
    match request {
        request::GET_FEATURES
        | request::GET_PROTOCOL_FEATURES
        | request::GET_QUEUE_NUM
        | request::GET_MAX_MEM_SLOTS
        | request::GET_VRING_BASE
        | request::GET_CONFIG
        | request::GET_INFLIGHT_FD
        | request::IOTLB_MSG => true,
        // Without the protocol feature the address of the log is all that it has.
        request::SET_LOG_BASE => payload.len() > 8,
        _ => false,
    }
}

/// Checks the fields of a parsed request.
fn check_message(message: &FrontEndMessage) {
    let in_file = |range: &SharedFileRange| {
        range.len > 0 && range.offset.checked_add(range.len).is_some_and(|end| end <= i64::MAX as u64)
    };
    let valid = match message {
        FrontEndMessage::SetMemTable(regions) => {
            (1..=TABLE_REGIONS_MAX as usize).contains(&regions.len()) && regions.iter().all(RegionPlace::is_valid)
        }
        FrontEndMessage::AddMemReg(region) | FrontEndMessage::RemMemReg(region) => region.is_valid(),
        FrontEndMessage::SetLogBase(range) => range.iter().all(in_file),
        FrontEndMessage::SetInflight { range, .. } => in_file(range),
        FrontEndMessage::GetConfig { offset, len, .. } => *len > 0 && u64::from(*offset) + u64::from(*len) <= 256,
        FrontEndMessage::SetConfig { offset, content, .. } => {
            !content.is_empty() && u64::from(*offset) + content.len() as u64 <= 256
        }
        _ => true,
    };
    assert!(valid, "{message:?}");
}

impl FuzzedConnection {
    /// Receives a message and carries it out; `None` when the connection ends.
    fn receive(&mut self, header: VhostHeader, payload: &[u8], how: u8) -> Option<()> {
        let parsed = FrontEndMessage::parse(header.request, payload);
        let descriptors = match (how & 0x0f, &parsed) {
            (DESCRIPTORS_EXPECTED, Ok(message)) => VhostSession::descriptors_of(message, 0),
            (count, _) => usize::from(count),
        };
        if let Ok(message) = &parsed {
            check_message(message);
        }
        let acknowledged = header.needs_reply && self.session.has_protocol(protocol_feature::REPLY_ACK);
        let before = self.running();
        let features = self.session.features();
        let step = self.session.receive(header, payload, descriptors).ok()?;
        let reset = step == VhostStep::Reset;
        let (outcome, kicked) = (self.carry_out(&step, descriptors, how & 0x80 != 0), &mut self.kicked);
        let failed = matches!(outcome, StepOutcome::Failed(_));
        match step {
            VhostStep::SetKick { index } if !failed => kicked[index] = true,
            VhostStep::StopRing { index } => kicked[index] = false,
            VhostStep::Reset => kicked.fill(false),
            _ => {}
        }
        let own_reply = has_reply(header.request, payload);
        let reply = match self.session.finish(outcome) {
            Ok(reply) => reply,
            Err(why) => {
                assert!(failed && !acknowledged || own_reply, "{why}");
                return None;
            }
        };
        assert_eq!(reply.is_some(), own_reply || acknowledged, "a reply that was not due, or none where one was");
        if let Some(reply) = reply {
            let (head, payload) = reply.split_first_chunk::<HEADER_LEN>().expect("a header");
            let replied = VhostHeader::parse_reply(head).expect("a reply");
            assert_eq!((replied.request, replied.len as usize), (header.request, payload.len()));
            assert!(payload.len() <= 12 + CONFIG_MAX as usize);
            if acknowledged && !own_reply {
                assert_eq!(payload, u64::from(failed).to_le_bytes(), "an acknowledgement");
            }
        }
        // A ring that goes on is not changed under its queue.
        let log = crate::wire::feature::LOG_ALL;
        for (index, ring) in before.into_iter().enumerate().filter(|_| !reset) {
            let Some(ring) = ring.filter(|_| self.session.is_runnable(index)) else { continue };
            let now = self.session.ring(index);
            assert_eq!((now.size, now.addresses, now.base), (ring.size, ring.addresses, ring.base));
            assert_eq!(self.session.features() & !log, features & !log);
        }
        Some(())
    }

    /// Returns the state of each ring that runs.
    fn running(&self) -> Vec<Option<VringState>> {
        let rings = 0..self.session.queues();
        rings.map(|index| self.session.is_runnable(index).then(|| self.session.ring(index).clone())).collect()
    }

    /// Carries a step out as a connection does.
    fn carry_out(&mut self, step: &VhostStep, descriptors: usize, fails: bool) -> StepOutcome {
        match self.result(step, descriptors, fails) {
            Ok(outcome) => outcome,
            Err(why) => StepOutcome::Failed(why),
        }
    }

    fn result(&mut self, step: &VhostStep, descriptors: usize, fails: bool) -> Result<StepOutcome, String> {
        let refused = || if fails { Err("no memory".to_owned()) } else { Ok(()) };
        match step {
            VhostStep::SetMemory(places) => {
                assert_eq!(descriptors, places.len());
                refused()?;
                self.set_regions(places.clone())?;
            }
            VhostStep::AddRegion(place) => {
                refused()?;
                self.set_regions(self.regions.iter().copied().chain([*place]).collect())?;
            }
            VhostStep::RemoveRegion(place) => {
                assert!(self.regions.contains(place), "{place:x?} was never mapped");
                self.regions.retain(|known| known != place);
            }
            VhostStep::Iotlb(IotlbChange::Update { iova, len, user, access }) => {
                self.iotlb.insert(*iova, *len, *user, *access)?;
                let last = len - 1;
                assert_eq!(self.iotlb.translate(*iova, *access), Ok((*user, *len)));
                assert_eq!(self.iotlb.translate(iova + last, *access), Ok((user + last, 1)));
                let both = self.iotlb.translate(*iova, MemoryAccess::ReadWrite).is_ok();
                assert_eq!(both, *access == MemoryAccess::ReadWrite);
            }
            VhostStep::Iotlb(IotlbChange::Invalidate { iova, len }) => {
                self.iotlb.remove(*iova, *len);
                assert!(*len == 0 || self.iotlb.translate(*iova, MemoryAccess::Read).is_err());
            }
            VhostStep::ReadConfig { offset, len } => {
                refused()?;
                let mut content = vec![0; *len as usize];
                self.config.read(*offset, &mut content);
                return Ok(StepOutcome::Config(content));
            }
            VhostStep::WriteConfig { offset, is_migration: false, content } => self.config.write(*offset, content)?,
            VhostStep::CreateInflight { queues } => {
                assert!((1..=self.session.offer.queues).contains(queues));
                refused()?;
                return Ok(StepOutcome::Inflight(SharedFileRange { len: 64, offset: 0 }));
            }
            VhostStep::SetInflight { queues, .. } => {
                assert!((1..=self.session.offer.queues).contains(queues));
                refused()?;
            }
            VhostStep::StopRing { index } => {
                refused()?;
                let base = self.session.ring(*index).base;
                return Ok(StepOutcome::RingBase(base.wrapping_add(1) & 0xffff));
            }
            VhostStep::Refuse(why) => return Err(why.clone()),
            VhostStep::Reset => self.iotlb.clear(),
            VhostStep::Nothing => {}
            _ => refused()?,
        }
        Ok(StepOutcome::Done)
    }

    fn set_regions(&mut self, regions: Vec<RegionPlace>) -> Result<(), String> {
        let overlap = |(at, region): (usize, &RegionPlace)| regions[..at].iter().any(|other| other.overlaps(region));
        if regions.len() > REGIONS_MAX || regions.iter().enumerate().any(overlap) {
            return Err("too many regions, or some overlap".to_owned());
        }
        self.regions = regions;
        Ok(())
    }

    fn check(&self) {
        let session = &self.session;
        assert_eq!(session.features & !(session.offer.features | TRANSPORT_FEATURES), 0, "features");
        assert_eq!(session.protocol & !PROTOCOL_FEATURES, 0, "protocol features");
        assert_eq!(session.regions, self.regions, "regions of memory");
        assert_eq!(session.queues(), self.kicked.len());
        for (index, kicked) in self.kicked.iter().enumerate() {
            let ring = session.ring(index);
            assert!(u32::from(ring.size) <= RING_SIZE_MAX);
            assert!(ring.addresses.is_none_or(|areas| areas.descriptors.is_multiple_of(16)));
            assert_eq!(ring.kicked, *kicked, "ring {index}: a kick descriptor");
            let complete = session.features_set && ring.size > 0 && ring.addresses.is_some();
            assert!(!session.is_runnable(index) || (complete && *kicked), "ring {index} runs too early");
        }
    }
}
