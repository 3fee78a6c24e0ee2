//! Entry points of the fuzzers: bytes in, and a panic if a ring breaks an invariant.
//!
//! The input is options, steps, and what the guest's memory contains at first; a step may change it.

use std::rc::Rc;
use std::sync::atomic::Ordering;

use forebay_reactor::GuardedMapping;

use crate::dirty_log::DirtyLog;
use crate::inflight::inflight_len;
use crate::iotlb::Iotlb;
use crate::memory::{AddressSpace, GuestArea, GuestMemory, GuestPart, GuestRegion, MemoryAccess, RegionPlace};
use crate::rings::{CHAIN_PARTS_MAX, Chain, ChainHead, Virtq, VirtqError, VirtqSetup};

/// Bytes of the guest's memory; small, so that arbitrary addresses are often inside.
const MEMORY: usize = 16 << 10;
/// Offsets of the areas of the ring.
const AREAS: [usize; 3] = [0, 1024, 2048];
/// Bytes that the IOMMU translates together, to the same addresses.
const PAGE: u64 = 4096;
/// Maximum size of a queue.
const SIZE_MAX: u16 = 32;

/// Drives a split queue.
pub fn split_ring(data: &[u8]) {
    run(false, false, data);
}

/// Drives a packed queue.
pub fn packed_ring(data: &[u8]) {
    run(true, false, data);
}

/// Starts queues of both formats with an in-flight region from the input, and drives them.
pub fn inflight(data: &[u8]) {
    let Some((&first, rest)) = data.split_first() else { return };
    run(first & 1 != 0, true, rest);
}

/// Queue, and the guest that changes memory beneath it.
struct FuzzedQueue {
    memory: GuestMemory,
    /// Translations of buffers; rings are found without them.
    iotlb: Option<Iotlb>,
    mapping: Rc<GuardedMapping>,
    log: DirtyLog,
    setup: VirtqSetup,
    base: u32,
    virtq: Virtq,
    orphans: Vec<ChainHead>,
    chains: Vec<Chain>,
}

fn run(packed: bool, region_given: bool, data: &[u8]) {
    let Some((&[flags, size, base_low, base_high, steps, region_len], rest)) = data.split_first_chunk() else { return };
    let (steps, rest) = rest.split_at(rest.len().min(usize::from(steps)));
    let (region, rest) = rest.split_at(rest.len().min(if region_given { 4 * usize::from(region_len) } else { 0 }));
    let size = u16::from(size) % SIZE_MAX + 1;
    let size = if packed { size } else { size.next_power_of_two() };
    let flag = |bit: u8| flags & 1 << bit != 0;
    let Some(mapping) = anonymous(MEMORY) else { return };
    mapping.write(0, &rest[..rest.len().min(MEMORY)]);
    let place = RegionPlace { guest: 0, len: MEMORY as u64, user: 0, file_offset: 0 };
    let Ok(memory) = GuestMemory::new(vec![GuestRegion::new(place, mapping.clone())]) else { return };
    let lens = VirtqSetup::area_lens(size, packed, flag(0));
    let part = |at: usize| GuestArea::of(&mapping, AREAS[at], lens[at] as usize).map(|area| (AREAS[at] as u64, area));
    let (Some(descriptors), Some(driver), Some(device)) = (part(0), part(1), part(2)) else { return };
    let of = |(guest, area): (u64, GuestArea)| GuestPart { guest, area };
    let len = inflight_len(size, packed) as usize;
    let Some((region_mapping, log)) = anonymous(len).zip(anonymous(1)) else { return };
    region_mapping.write(0, &region[..region.len().min(len)]);
    if region_given {
        // The header, with which most of the input would be refused.
        region_mapping.write(0, &[0; 8]);
        region_mapping.store_u16(8, 1, Ordering::Relaxed);
        region_mapping.store_u16(10, size, Ordering::Relaxed);
    }
    let inflight = if region_given || flag(1) { GuestArea::of(&region_mapping, 0, len) } else { None };
    let setup = VirtqSetup {
        size,
        packed,
        event_index: flag(0),
        in_order: flag(2),
        indirect: !flag(3),
        descriptors: of(descriptors),
        driver: of(driver),
        device: of(device),
        log_used: flag(4).then_some(u64::from(base_low) << 56 | 4096),
        inflight,
    };
    let base = u32::from(u16::from_le_bytes([base_low, base_high]));
    let base = if packed { (base % u32::from(size) * 0x1_0001) | if flag(5) { 0x8000_8000 } else { 0 } } else { base };
    let Ok((virtq, orphans)) = Virtq::start(setup.clone(), base) else { return };
    let log = DirtyLog::new(log);
    let iotlb = flag(6).then(Iotlb::default);
    let mut queue = FuzzedQueue { memory, iotlb, mapping, log, setup, base, virtq, orphans, chains: Vec::new() };
    for step in steps.chunks(3) {
        let argument = |at: usize| step.get(at).copied().unwrap_or(0);
        if queue.step(argument(0), argument(1), argument(2)).is_none() {
            return;
        }
        let known = queue.chains.len() + queue.orphans.len();
        let in_flight = queue.virtq.in_flight() as usize;
        assert!(if queue.setup.in_order { in_flight >= known } else { in_flight == known });
        assert!(in_flight <= usize::from(size));
    }
}

fn anonymous(len: usize) -> Option<Rc<GuardedMapping>> {
    GuardedMapping::anonymous(len).ok().map(Rc::new)
}

impl FuzzedQueue {
    /// Takes a step; `None` once the queue must not be used further.
    fn step(&mut self, kind: u8, a: u8, b: u8) -> Option<()> {
        let space = AddressSpace { memory: &self.memory, iotlb: self.iotlb.as_ref() };
        let log = (a & 1 == 0).then_some(&self.log);
        match kind % 12 {
            0 | 1 => {
                let available = self.virtq.has_available();
                match self.virtq.next(&space) {
                    Ok(chain) => {
                        assert_eq!(chain.is_some(), available);
                        self.chains.extend(chain);
                    }
                    Err(error) => {
                        assert!(available, "{error}: nothing was available");
                        return self.retried(&error);
                    }
                }
            }
            2 => {
                if self.orphans.is_empty() {
                    return Some(());
                }
                let head = self.orphans.swap_remove(usize::from(a) % self.orphans.len());
                match self.virtq.resume(head, &space) {
                    Ok(chain) => self.chains.push(chain),
                    Err(error) => {
                        self.orphans.push(head);
                        return self.retried(&error);
                    }
                }
            }
            3 | 4 => {
                if self.chains.is_empty() {
                    return Some(());
                }
                let chain = self.chains.swap_remove(usize::from(b) % self.chains.len());
                check(&chain);
                self.virtq.complete(chain.token, u32::from(b), log);
                self.virtq.recycle(chain.readable);
                self.virtq.recycle(chain.writable);
            }
            5 => {
                self.virtq.needs_interrupt();
                self.virtq.disable_kicks(log);
            }
            6 => {
                let found = self.virtq.enable_kicks(log);
                assert_eq!(found, self.virtq.has_available());
            }
            // The guest writes somewhere, mostly into the rings.
            7 => self.mapping.store_u16(
                usize::from(a) * if b & 1 == 0 { 2 } else { 16 },
                u16::from(b),
                Ordering::Relaxed,
            ),
            // The guest moves its index, as drivers do.
            8 => {
                let at = AREAS[1] + 2;
                let index = self.mapping.load_u16(at, Ordering::Relaxed);
                self.mapping.store_u16(at, index.wrapping_add(u16::from(a % 3)), Ordering::Relaxed);
            }
            // The monitor changes a translation.
            10 => {
                let Some(iotlb) = &mut self.iotlb else { return Some(()) };
                let page = u64::from(a) % (MEMORY as u64 / PAGE) * PAGE;
                match b % 4 {
                    0 => iotlb.remove(page, PAGE),
                    access => {
                        let accesses = [MemoryAccess::ReadWrite, MemoryAccess::Read, MemoryAccess::Write];
                        iotlb.insert(page, PAGE, page, accesses[usize::from(access) - 1]).expect("a page");
                    }
                }
            }
            // The areas are found again.
            11 => {
                let VirtqSetup { descriptors, driver, device, .. } = self.setup.clone();
                self.virtq.relocate(descriptors, driver, device).expect("the same areas");
            }
            // The device is killed, or stopped, and its successor resumes.
            _ => {
                let stop = a & 1 == 0 && self.virtq.in_flight() == 0;
                self.chains.clear();
                if stop {
                    // Another queue takes the place of the one that is stopped.
                    let (unused, _) =
                        Virtq::start(VirtqSetup { inflight: None, ..self.setup.clone() }, self.base).ok()?;
                    self.base = std::mem::replace(&mut self.virtq, unused).stop();
                }
                let (virtq, orphans) = Virtq::start(self.setup.clone(), self.base).ok()?;
                assert!(!stop || orphans.is_empty());
                (self.virtq, self.orphans) = (virtq, orphans);
            }
        }
        Some(())
    }

    /// Returns whether the queue may be used further after an error: a translation is missing, and may come.
    fn retried(&self, error: &VirtqError) -> Option<()> {
        let miss = error.miss()?;
        let iotlb = self.iotlb.as_ref().expect("without an IOMMU no translation is missing");
        assert_eq!(iotlb.translate(miss.iova, miss.access), Err(miss));
        Some(())
    }
}

fn check(chain: &Chain) {
    let parts = chain.readable.iter().chain(&chain.writable);
    assert!(chain.readable.len() + chain.writable.len() <= CHAIN_PARTS_MAX);
    let bytes: u64 = parts.map(|part| part.area.len() as u64).sum();
    assert!(bytes <= u64::from(u32::MAX));
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    proptest! {
        #![proptest_config(ProptestConfig { cases: 500, failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn any_bytes_are_handled(data in proptest::collection::vec(any::<u8>(), 0..1500)) {
            super::split_ring(&data);
            super::packed_ring(&data);
            super::inflight(&data);
        }
    }
}
