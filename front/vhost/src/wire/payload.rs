//! Payloads of the front-end's requests, parsed with the checks that each field needs.

use zerocopy::little_endian::{U32, U64};
use zerocopy::{FromBytes, Immutable, KnownLayout, Unaligned};

use super::{
    CONFIG_HEAD, CONFIG_MAX, FrontEndMessage, INFLIGHT_LEN, IotlbChange, RingAddresses, SharedFileRange,
    TABLE_REGIONS_MAX, VhostMalformed, WireInflight, WireIotlb, WireRegion, WireRing, iotlb_kind, request,
};
use crate::memory::{MemoryAccess, RegionPlace};

/// Payload of a request, with the checks that every field needs.
struct Payload<'a> {
    request: u32,
    bytes: &'a [u8],
}

impl Payload<'_> {
    fn length(&self, expected: usize) -> VhostMalformed {
        VhostMalformed::Length { request: self.request, len: self.bytes.len(), expected }
    }

    fn field(&self, what: String) -> VhostMalformed {
        VhostMalformed::Field { request: self.request, what }
    }

    fn empty<T>(&self, message: T) -> Result<T, VhostMalformed> {
        if self.bytes.is_empty() { Ok(message) } else { Err(self.length(0)) }
    }

    fn exact<T: FromBytes + KnownLayout + Immutable + Unaligned>(&self) -> Result<&T, VhostMalformed> {
        T::ref_from_bytes(self.bytes).map_err(|_| self.length(size_of::<T>()))
    }

    fn number(&self) -> Result<u64, VhostMalformed> {
        self.exact::<U64>().map(|number| number.get())
    }

    /// Returns the ring and the number of a ring's state.
    fn ring_state(&self) -> Result<(u32, u32), VhostMalformed> {
        self.exact::<[U32; 2]>().map(|[index, number]| (index.get(), number.get()))
    }

    /// Returns the ring of a message with a descriptor, and whether one comes with it.
    fn ring_descriptor(&self) -> Result<(u32, bool), VhostMalformed> {
        const NO_DESCRIPTOR: u64 = 1 << 8;
        let number = self.number()?;
        if number & !(NO_DESCRIPTOR | 0xff) != 0 {
            return Err(self.field(format!("unknown bits in {number:#x}")));
        }
        Ok(((number & 0xff) as u32, number & NO_DESCRIPTOR == 0))
    }

    fn valid(&self, place: RegionPlace) -> Result<RegionPlace, VhostMalformed> {
        match place.is_valid() {
            true => Ok(place),
            false => Err(self.field(format!("region {place:x?} is empty or overflows"))),
        }
    }

    fn table(&self) -> Result<Vec<RegionPlace>, VhostMalformed> {
        let (count, rest) = <[U32; 2]>::ref_from_prefix(self.bytes).map_err(|_| self.length(8))?;
        let count = count[0].get();
        if count == 0 || count > TABLE_REGIONS_MAX {
            return Err(self.field(format!("{count} regions in a table; 1 to {TABLE_REGIONS_MAX} are allowed")));
        }
        let expected = count as usize * WireRegion::LEN;
        // QEMU's message has space for the maximum, and its length is that of the regions in it.
        let regions = <[WireRegion]>::ref_from_bytes(rest).map_err(|_| self.length(8 + expected))?;
        if regions.len() != count as usize {
            return Err(self.length(8 + expected));
        }
        regions.iter().map(|region| self.valid(region.place())).collect()
    }

    fn region(&self) -> Result<RegionPlace, VhostMalformed> {
        let expected = 8 + WireRegion::LEN;
        let region = self.bytes.get(8..).ok_or_else(|| self.length(expected))?;
        let region = WireRegion::ref_from_bytes(region).map_err(|_| self.length(expected))?;
        self.valid(region.place())
    }

    fn log(&self) -> Result<Option<SharedFileRange>, VhostMalformed> {
        if self.bytes.len() == 8 {
            // Without the feature the log is not shared memory, and the back-end cannot reach it.
            return Ok(None);
        }
        let [len, offset] = self.exact::<[U64; 2]>()?;
        self.range(len.get(), offset.get()).map(Some)
    }

    fn range(&self, len: u64, offset: u64) -> Result<SharedFileRange, VhostMalformed> {
        match len > 0 && offset.checked_add(len).is_some_and(|end| end <= i64::MAX as u64) {
            true => Ok(SharedFileRange { len, offset }),
            false => Err(self.field(format!("{len} bytes from offset {offset} are no part of a file"))),
        }
    }

    fn iotlb(&self) -> Result<IotlbChange, VhostMalformed> {
        // Senders include or leave out the padding at the end.
        let mut padded = [0; size_of::<WireIotlb>()];
        if !(26..=padded.len()).contains(&self.bytes.len()) {
            return Err(self.length(padded.len()));
        }
        padded[..self.bytes.len()].copy_from_slice(self.bytes);
        let message = WireIotlb::ref_from_bytes(&padded).map_err(|_| self.length(padded.len()))?;
        let (iova, len, user) = (message.iova.get(), message.len.get(), message.user.get());
        match (message.kind, message.access) {
            (iotlb_kind::UPDATE, access @ 1..=3) => {
                let access =
                    [MemoryAccess::Read, MemoryAccess::Write, MemoryAccess::ReadWrite][usize::from(access) - 1];
                Ok(IotlbChange::Update { iova, len, user, access })
            }
            (iotlb_kind::INVALIDATE, _) => Ok(IotlbChange::Invalidate { iova, len }),
            (kind, access) => Err(self.field(format!("IOTLB message of kind {kind} with access {access}"))),
        }
    }

    fn config_head(&self) -> Result<([u32; 3], &[u8]), VhostMalformed> {
        let (head, content) = <[U32; 3]>::ref_from_prefix(self.bytes).map_err(|_| self.length(CONFIG_HEAD))?;
        let [offset, len, flags] = head.map(U32::get);
        if len == 0 || offset.checked_add(len).is_none_or(|end| end > CONFIG_MAX) {
            return Err(self.field(format!("{len} bytes from offset {offset} of the configuration space")));
        }
        Ok(([offset, len, flags], content))
    }

    fn inflight(&self) -> Result<WireInflight, VhostMalformed> {
        // Senders include or leave out the padding at the end.
        let (message, rest) = WireInflight::read_from_prefix(self.bytes).map_err(|_| self.length(INFLIGHT_LEN))?;
        if rest.len() > 4 { Err(self.length(INFLIGHT_LEN)) } else { Ok(message) }
    }
}

impl FrontEndMessage {
    /// Parses a request.
    ///
    /// # Errors
    /// Reason for which it is malformed; [`VhostMalformed::Unknown`] for one that is not supported.
    pub fn parse(request: u32, bytes: &[u8]) -> Result<Self, VhostMalformed> {
        let payload = Payload { request, bytes };
        Ok(match request {
            request::GET_FEATURES => payload.empty(Self::GetFeatures)?,
            request::SET_FEATURES => Self::SetFeatures(payload.number()?),
            request::SET_OWNER => payload.empty(Self::SetOwner)?,
            request::RESET_OWNER => payload.empty(Self::ResetOwner)?,
            request::SET_MEM_TABLE => Self::SetMemTable(payload.table()?),
            request::SET_LOG_BASE => Self::SetLogBase(payload.log()?),
            // Some senders repeat a number in it.
            request::SET_LOG_FD => Self::SetLogFd,
            request::SET_VRING_NUM => {
                let (index, size) = payload.ring_state()?;
                Self::SetVringNum { index, size }
            }
            request::SET_VRING_ADDR => {
                let ring = payload.exact::<WireRing>()?;
                let (descriptors, driver, device) = (ring.descriptors.get(), ring.available.get(), ring.used.get());
                Self::SetVringAddr { index: ring.index.get(), addresses: RingAddresses { descriptors, driver, device } }
            }
            request::SET_VRING_BASE => {
                let (index, base) = payload.ring_state()?;
                Self::SetVringBase { index, base }
            }
            request::GET_VRING_BASE => Self::GetVringBase { index: payload.ring_state()?.0 },
            request::SET_VRING_KICK => {
                let (index, has_descriptor) = payload.ring_descriptor()?;
                Self::SetVringKick { index, has_descriptor }
            }
            request::SET_VRING_CALL => {
                let (index, has_descriptor) = payload.ring_descriptor()?;
                Self::SetVringCall { index, has_descriptor }
            }
            request::SET_VRING_ERR => {
                let (index, has_descriptor) = payload.ring_descriptor()?;
                Self::SetVringErr { index, has_descriptor }
            }
            request::GET_PROTOCOL_FEATURES => payload.empty(Self::GetProtocolFeatures)?,
            request::SET_PROTOCOL_FEATURES => Self::SetProtocolFeatures(payload.number()?),
            request::GET_QUEUE_NUM => payload.empty(Self::GetQueueNum)?,
            request::SET_VRING_ENABLE => match payload.ring_state()? {
                (index, enable @ 0..=1) => Self::SetVringEnable { index, enable: enable == 1 },
                (index, other) => return Err(payload.field(format!("ring {index}: enable is 0 or 1, not {other}"))),
            },
            // Some senders put a number into it.
            request::SET_BACKEND_REQ_FD => Self::SetBackendReqFd,
            request::IOTLB_MSG => Self::Iotlb(payload.iotlb()?),
            request::GET_CONFIG => {
                let ([offset, len, flags], content) = payload.config_head()?;
                // QEMU sends the space for the content along.
                match content.is_empty() || content.len() == len as usize {
                    true => Self::GetConfig { offset, len, flags },
                    false => return Err(payload.length(CONFIG_HEAD + len as usize)),
                }
            }
            request::SET_CONFIG => {
                let ([offset, len, flags], content) = payload.config_head()?;
                if content.len() != len as usize {
                    return Err(payload.length(CONFIG_HEAD + len as usize));
                }
                Self::SetConfig { offset, is_migration: flags & 1 != 0, content: content.to_vec() }
            }
            request::POSTCOPY_ADVISE | request::POSTCOPY_LISTEN | request::POSTCOPY_END => Self::Postcopy,
            request::GET_INFLIGHT_FD => {
                let message = payload.inflight()?;
                Self::GetInflight { queues: message.queues.get(), queue_size: message.queue_size.get() }
            }
            request::SET_INFLIGHT_FD => {
                let message = payload.inflight()?;
                let range = payload.range(message.len.get(), message.offset.get())?;
                Self::SetInflight { range, queues: message.queues.get(), queue_size: message.queue_size.get() }
            }
            request::RESET_DEVICE => payload.empty(Self::ResetDevice)?,
            request::GET_MAX_MEM_SLOTS => payload.empty(Self::GetMaxMemSlots)?,
            request::ADD_MEM_REG => Self::AddMemReg(payload.region()?),
            request::REM_MEM_REG => Self::RemMemReg(payload.region()?),
            other => return Err(VhostMalformed::Unknown(other)),
        })
    }
}
