//! Device side of virtqueues, both formats, as pure code over shared memory.
//!
//! Sources: VIRTIO 1.2 sections 2.7 (split) and 2.8 (packed), with VIRTIO_F_INDIRECT_DESC, VIRTIO_F_EVENT_IDX,
//! VIRTIO_F_IN_ORDER and VIRTIO_F_RING_PACKED; numbers are little-endian (VIRTIO_F_VERSION_1), the machine's own order.
//! States and numbered invariants: `docs/design/vhost-rings.md`.
//!
//! A guest may change its memory at any time.  Whatever decides something is therefore read once, into memory of this
//! process, and bounded there; results of a guest that breaks the rules are a [`VirtqViolation`], after which the
//! queue must not be used further.

pub(crate) mod chain;
mod in_order;
pub(crate) mod packed;
mod split;
pub(crate) mod store;

use std::sync::atomic::{AtomicU64, Ordering, fence};

use crate::dirty_log::DirtyLog;
use crate::inflight::InflightViolation;
use crate::iotlb::IotlbMiss;
use crate::memory::{AddressSpace, GuestArea, GuestPart, MemoryFault};

use self::chain::ChainBuilder;
use self::in_order::CompletionOrder;
use self::packed::PackedQueue;
use self::split::SplitQueue;

/// Maximum size of a queue, in descriptors (VIRTIO 1.2 section 2.7).
pub const VIRTQ_SIZE_MAX: u16 = 32768;

/// Maximum descriptors of an indirect table; Linux' drivers may use more than a ring has.
pub const INDIRECT_MAX: u16 = 1024;

/// Maximum parts of a chain: descriptors, and more where one spans regions of memory.
pub const CHAIN_PARTS_MAX: usize = 1030;

/// Violation of the rules of virtqueues by the guest's driver, or by the front-end that describes the queue.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum VirtqViolation {
    /// Size that the format does not allow.
    #[error("queue size {0} is not supported: 1 to 32768, and a power of two unless the ring is packed")]
    QueueSize(u16),
    /// Area that is too short for the queue's size.
    #[error("{area} area of {len} bytes is too short: the queue needs {need}")]
    AreaLength {
        /// Name of the area.
        area: &'static str,
        /// Length in bytes.
        len: u64,
        /// Length that the queue's size requires.
        need: u64,
    },
    /// Area at an address that is not aligned.
    #[error("{area} area is not aligned to {align} bytes")]
    AreaAlignment {
        /// Name of the area.
        area: &'static str,
        /// Alignment in bytes that the format requires.
        align: usize,
    },
    /// First position outside the ring.
    #[error("base {base:#x} is not a position of a ring of {size}")]
    Base {
        /// Number that the front-end has set.
        base: u32,
        /// Size of the queue.
        size: u16,
    },
    /// Available index further ahead than the ring has entries.
    #[error("available index {index} is more than the ring's {size} entries ahead of {last}")]
    AvailableIndex {
        /// Index that the driver has stored.
        index: u16,
        /// Index up to which entries were taken.
        last: u16,
        /// Size of the queue.
        size: u16,
    },
    /// Descriptors in flight that exceed the ring.
    #[error("chain of {count} descriptors exceeds the ring of {size}: {in_flight} are in flight")]
    Overrun {
        /// Descriptors in flight.
        in_flight: u32,
        /// Descriptors of the chain.
        count: u32,
        /// Size of the queue.
        size: u16,
    },
    /// Index of a descriptor, or a buffer ID, outside the queue.
    #[error("descriptor index or buffer ID {index} is outside a table of {len}")]
    Index {
        /// Index that the guest gave.
        index: u16,
        /// Entries of the table.
        len: u32,
    },
    /// Head or buffer ID that is in flight already.
    #[error("chain {0} was submitted while it is in flight")]
    InFlight(u16),
    /// Chain with more descriptors than allowed, such as a loop.
    #[error("chain has more than {max} descriptors, or is a loop")]
    ChainLength {
        /// Maximum descriptors.
        max: u32,
    },
    /// Device-readable buffer after a device-writable one.
    #[error("device-readable descriptor {0} of a chain follows a device-writable one")]
    ReadableAfterWritable(u32),
    /// Indirect table though the feature is not negotiated.
    #[error("indirect table without VIRTIO_F_INDIRECT_DESC")]
    IndirectUnexpected,
    /// Length of an indirect table that is not allowed.
    #[error("indirect table of {0} bytes: a multiple of 16 from 16 to 16384 is required")]
    IndirectLength(u32),
    /// Indirect table within an indirect table.
    #[error("indirect table within an indirect table")]
    IndirectNested,
    /// Indirect descriptor that is part of a list where it must not be.
    #[error("indirect descriptor in a list of descriptors that goes on")]
    IndirectInList,
    /// Total length that exceeds 32 bits.
    #[error("chain of {0} bytes: at most 4294967295 are supported")]
    ChainBytes(u64),
    /// Buffers in more parts than supported.
    #[error("chain of {0} parts: at most 1030 are supported")]
    ChainParts(usize),
    /// Head that is not one to resume.
    #[error("chain {0} does not wait to be resumed")]
    NotResumable(u16),
    /// In-flight region with contents that contradict each other.
    #[error("in-flight region: {0}")]
    Inflight(#[from] InflightViolation),
}

/// Reason for which a chain is not returned.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum VirtqError {
    /// Violation, after which the queue must not be used further.
    #[error(transparent)]
    Violation(#[from] VirtqViolation),
    /// Buffer that cannot be accessed.  [`MemoryFault::Unmapped`] is retried after the translation came: the queue is
    /// as before.  [`MemoryFault::Outside`] is final like a violation.
    #[error(transparent)]
    Fault(#[from] MemoryFault),
}

impl VirtqError {
    /// Returns the address whose translation is missing, if the call is to be retried once it is there.
    pub fn miss(&self) -> Option<IotlbMiss> {
        match self {
            Self::Fault(MemoryFault::Unmapped(miss)) => Some(*miss),
            _ => None,
        }
    }
}

/// Sizes, areas and negotiated features of a virtqueue.
#[derive(Debug, Clone)]
pub struct VirtqSetup {
    /// Number of descriptors: 1 to [`VIRTQ_SIZE_MAX`], and a power of two unless packed.
    pub size: u16,
    /// Set for a packed ring (VIRTIO_F_RING_PACKED).
    pub packed: bool,
    /// Set if VIRTIO_F_EVENT_IDX is negotiated.
    pub event_index: bool,
    /// Set if VIRTIO_F_IN_ORDER is negotiated.
    pub in_order: bool,
    /// Set if VIRTIO_F_INDIRECT_DESC is negotiated.
    pub indirect: bool,
    /// Descriptor table, or the packed ring.
    pub descriptors: GuestPart,
    /// Available ring, or the packed ring's driver event suppression area.
    pub driver: GuestPart,
    /// Used ring, or the packed ring's device event suppression area.
    pub device: GuestPart,
    /// Guest address at which writes of the split used ring are logged (VHOST_VRING_F_LOG); `None` does not log them.
    /// Writes of a packed ring are logged at the guest addresses of its areas.
    pub log_used: Option<u64>,
    /// Region of this queue by which a restarted device resumes: [`inflight_len`](crate::inflight::inflight_len) bytes.
    pub inflight: Option<GuestArea>,
}

impl VirtqSetup {
    /// Returns the lengths in bytes of the descriptor, driver and device areas.
    pub fn area_lens(size: u16, packed: bool, event_index: bool) -> [u64; 3] {
        let size = u64::from(size);
        let event = if event_index { 2 } else { 0 };
        if packed { [16 * size, 4, 4] } else { [16 * size, 4 + 2 * size + event, 4 + 8 * size + event] }
    }

    fn check(&self) -> Result<(), VirtqViolation> {
        let valid = (1..=VIRTQ_SIZE_MAX).contains(&self.size) && (self.packed || self.size.is_power_of_two());
        if !valid {
            return Err(VirtqViolation::QueueSize(self.size));
        }
        let areas = [&self.descriptors, &self.driver, &self.device];
        check_areas(self.size, self.packed, self.event_index, areas)
    }
}

/// Checks the lengths and alignments of the descriptor, driver and device areas.
fn check_areas(size: u16, packed: bool, event_index: bool, areas: [&GuestPart; 3]) -> Result<(), VirtqViolation> {
    let names = ["descriptor", "driver", "device"];
    let aligns = if packed { [16, 4, 4] } else { [16, 2, 4] };
    let lens = VirtqSetup::area_lens(size, packed, event_index);
    for (((part, need), align), area) in areas.into_iter().zip(lens).zip(aligns).zip(names) {
        let len = part.area.len() as u64;
        if len < need {
            return Err(VirtqViolation::AreaLength { area, len, need });
        }
        if !part.area.is_aligned(align) {
            return Err(VirtqViolation::AreaAlignment { area, align });
        }
    }
    Ok(())
}

/// Head of a chain that a former device had in flight: see [`Virtq::resume`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChainHead {
    queue: u64,
    id: u16,
}

/// Right to return one chain to the driver, once: see [`Virtq::complete`].
#[derive(Debug, PartialEq, Eq)]
#[must_use = "a chain that is not completed stays in flight"]
pub struct ChainToken {
    queue: u64,
    id: u16,
}

/// Chain of buffers that a driver has made available.
#[derive(Debug)]
pub struct Chain {
    /// Right to complete the chain.
    pub token: ChainToken,
    /// Parts that the device reads, which precede the writable ones.
    pub readable: Vec<GuestPart>,
    /// Parts that the device writes.
    pub writable: Vec<GuestPart>,
}

/// State of the chain with a given head or buffer ID.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum ChainState {
    /// Not in flight.
    #[default]
    Idle,
    /// In flight with a former device, and not resumed yet.
    Orphaned,
    /// In flight.
    InFlight,
}

/// Format of a queue.
#[derive(Debug)]
enum VirtqFormat {
    Split(SplitQueue),
    Packed(PackedQueue),
}

/// Number by which chains of a stopped queue are told apart from those of its successor.
static QUEUES: AtomicU64 = AtomicU64::new(0);

/// Device side of a virtqueue.
#[derive(Debug)]
pub struct Virtq {
    queue: u64,
    size: u16,
    format: VirtqFormat,
    order: Option<CompletionOrder>,
    builder: ChainBuilder,
    in_flight: u32,
    /// Entries (split) or descriptors (packed) that were returned since the driver was last interrupted, or asked for
    /// whether it wants to be.
    returned: u32,
    /// Set if the next interrupt is due whatever index the driver waits for: it may have waited for one that a former
    /// device has passed.
    interrupt_first: bool,
    /// Set if a former device may have returned chains without an interrupt.
    interrupt_lost: bool,
}

impl Virtq {
    /// Starts a queue at the number that the front-end has set as its base.  For a split ring that is the available
    /// index; for a packed one, bits 0 to 14 are the available position, 15 its wrap counter, 16 to 30 the used
    /// position, and 31 its wrap counter.
    ///
    /// Also returns the chains that a former device had in flight, in the order in which they were submitted: all of
    /// them are to be [resumed](Self::resume), and executed again.
    ///
    /// An in-flight region of a device that was killed overrides the base; that of one that was [stopped](Self::stop)
    /// does not.  After the start, call [`needs_interrupt`](Self::needs_interrupt) and
    /// [`enable_kicks`](Self::enable_kicks) once: notifications of a former device may be lost.
    ///
    /// # Errors
    /// Sizes, areas, or a base that the format does not allow; a region whose contents contradict each other.
    pub fn start(setup: VirtqSetup, base: u32) -> Result<(Self, Vec<ChainHead>), VirtqViolation> {
        setup.check()?;
        let (format, orphans, interrupt_lost) = if setup.packed {
            let (queue, orphans, live) = PackedQueue::start(&setup, base)?;
            (VirtqFormat::Packed(queue), orphans, live)
        } else {
            let (queue, orphans, live) = SplitQueue::start(&setup, base)?;
            (VirtqFormat::Split(queue), orphans, live)
        };
        let queue = QUEUES.fetch_add(1, Ordering::Relaxed);
        let mut order = setup.in_order.then(|| CompletionOrder::new(setup.size));
        if let Some(order) = &mut order {
            orphans.iter().for_each(|id| order.fetched(*id));
        }
        let heads: Vec<ChainHead> = orphans.into_iter().map(|id| ChainHead { queue, id }).collect();
        let virtq = Self {
            queue,
            size: setup.size,
            format,
            order,
            builder: ChainBuilder::new(setup.size, setup.indirect),
            in_flight: heads.len() as u32,
            returned: 0,
            interrupt_first: true,
            interrupt_lost,
        };
        Ok((virtq, heads))
    }

    /// Returns the next available chain; `None` when the driver has made no other one available.
    ///
    /// # Errors
    /// Violations, and buffers that cannot be accessed; nothing changes then, so that the chain is found again once a
    /// missing translation came.
    pub fn next(&mut self, space: &AddressSpace<'_>) -> Result<Option<Chain>, VirtqError> {
        let fetched = match &mut self.format {
            VirtqFormat::Split(queue) => queue.fetch(&mut self.builder, space)?,
            VirtqFormat::Packed(queue) => queue.fetch(&mut self.builder, space)?,
        };
        let Some(id) = fetched else { return Ok(None) };
        if let Some(order) = &mut self.order {
            order.fetched(id);
        }
        self.in_flight += 1;
        Ok(Some(self.chain(id)))
    }

    /// Returns the chain of a head that a former device had in flight.
    ///
    /// # Errors
    /// As [`next`](Self::next); a head of another queue, or one that is resumed already.
    pub fn resume(&mut self, head: ChainHead, space: &AddressSpace<'_>) -> Result<Chain, VirtqError> {
        if head.queue != self.queue {
            return Err(VirtqViolation::NotResumable(head.id).into());
        }
        match &mut self.format {
            VirtqFormat::Split(queue) => queue.resume(head.id, &mut self.builder, space)?,
            VirtqFormat::Packed(queue) => queue.resume(head.id, &mut self.builder, space)?,
        }
        Ok(self.chain(head.id))
    }

    fn chain(&mut self, id: u16) -> Chain {
        let (readable, writable) = self.builder.finish();
        Chain { token: ChainToken { queue: self.queue, id }, readable, writable }
    }

    /// Returns a chain to the driver, with the number of bytes that were written to its writable part, and marks what
    /// changes in the ring as dirty.  In order, the chain is held back until all earlier ones are complete.
    ///
    /// Tokens of another queue, such as the one that this queue has replaced, are ignored.
    pub fn complete(&mut self, chain: ChainToken, written: u32, log: Option<&DirtyLog>) {
        if chain.queue != self.queue {
            return;
        }
        let Some(order) = &mut self.order else { return self.put_used(chain.id, written, log) };
        order.completed(chain.id, written);
        while let Some((id, written)) = self.order.as_mut().and_then(CompletionOrder::pop) {
            self.put_used(id, written, log);
        }
    }

    fn put_used(&mut self, id: u16, written: u32, log: Option<&DirtyLog>) {
        let returned = match &mut self.format {
            VirtqFormat::Split(queue) => queue.put_used(id, written, log),
            VirtqFormat::Packed(queue) => queue.put_used(id, written, log),
        };
        self.returned = self.returned.saturating_add(returned);
        self.in_flight -= 1;
    }

    /// Finds the ring at other places in memory, after the tables by which its areas were found have changed.
    ///
    /// # Errors
    /// Areas that are too short or not aligned.
    pub fn relocate(
        &mut self,
        descriptors: GuestPart,
        driver: GuestPart,
        device: GuestPart,
    ) -> Result<(), VirtqViolation> {
        let (packed, event_index) = match &self.format {
            VirtqFormat::Split(queue) => (false, queue.event_index()),
            VirtqFormat::Packed(queue) => (true, queue.event_index()),
        };
        check_areas(self.size, packed, event_index, [&descriptors, &driver, &device])?;
        match &mut self.format {
            VirtqFormat::Split(queue) => queue.relocate(descriptors, driver, device),
            VirtqFormat::Packed(queue) => queue.relocate(descriptors, driver, device),
        }
        Ok(())
    }

    /// Takes back a list of parts of a finished chain, whose memory is used for later chains.
    pub fn recycle(&mut self, parts: Vec<GuestPart>) {
        self.builder.recycle(parts);
    }

    /// Returns whether the driver wants an interrupt for the chains that were returned since the last call.
    pub fn needs_interrupt(&mut self) -> bool {
        if self.returned == 0 && !self.interrupt_lost {
            return false;
        }
        // The driver stores the index that it waits for, and then looks for used entries: one of both sees the other's.
        fence(Ordering::SeqCst);
        let returned = if self.interrupt_first { None } else { Some(self.returned) };
        self.returned = 0;
        self.interrupt_first = false;
        self.interrupt_lost = false;
        match &self.format {
            VirtqFormat::Split(queue) => queue.wants_interrupt(returned),
            VirtqFormat::Packed(queue) => queue.wants_interrupt(returned),
        }
    }

    /// Tells the driver that kicks are not needed, while the device polls.
    pub fn disable_kicks(&mut self, log: Option<&DirtyLog>) {
        match &mut self.format {
            VirtqFormat::Split(queue) => queue.disable_kicks(log),
            VirtqFormat::Packed(queue) => queue.disable_kicks(log),
        }
    }

    /// Tells the driver to kick for the next chain, and returns whether chains have become available meanwhile: the
    /// driver may not kick for those.
    pub fn enable_kicks(&mut self, log: Option<&DirtyLog>) -> bool {
        match &mut self.format {
            VirtqFormat::Split(queue) => queue.enable_kicks(log),
            VirtqFormat::Packed(queue) => queue.enable_kicks(log),
        }
        fence(Ordering::SeqCst);
        self.has_available()
    }

    /// Returns whether [`next`](Self::next) would find a chain.
    pub fn has_available(&self) -> bool {
        match &self.format {
            VirtqFormat::Split(queue) => queue.has_available(),
            VirtqFormat::Packed(queue) => queue.has_available(),
        }
    }

    /// Returns the position, in the form that [`start`](Self::start) takes.  A successor continues there if nothing is
    /// in flight.
    pub fn base(&self) -> u32 {
        match &self.format {
            VirtqFormat::Split(queue) => queue.base(),
            VirtqFormat::Packed(queue) => queue.base(),
        }
    }

    /// Stops the queue in an orderly way, and returns its [`base`](Self::base).  If nothing is in flight, the in-flight
    /// region is marked as unused, so that its next user starts at the base that it is given; otherwise the region
    /// stays, and its next user resumes the chains.
    pub fn stop(self) -> u32 {
        if self.in_flight == 0 {
            match &self.format {
                VirtqFormat::Split(queue) => queue.close_record(),
                VirtqFormat::Packed(queue) => queue.close_record(),
            }
        }
        self.base()
    }

    /// Returns the number of chains that are in flight: not returned to the driver, whether complete or not.
    pub fn in_flight(&self) -> u32 {
        self.in_flight
    }

    /// Returns the number of descriptors.
    pub fn size(&self) -> u16 {
        self.size
    }
}

#[cfg(test)]
mod tests;
