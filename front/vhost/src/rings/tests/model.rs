//! Driver side of virtqueues, as a plain model: it remembers each chain that it submitted, and accepts each back once.

use std::collections::BTreeMap;
use std::rc::Rc;
use std::sync::atomic::Ordering;

use forebay_reactor::GuardedMapping;

use crate::inflight::inflight_len;
use crate::memory::{AddressSpace, GuestArea, GuestMemory, GuestPart, GuestRegion, RegionPlace};
use crate::rings::{Chain, Virtq, VirtqSetup};

/// First guest address of the only region.
pub const GUEST: u64 = 0x1000_0000;
/// First user address of the only region.
const USER: u64 = 0x7f00_0000;
const MEMORY: u64 = 4 << 20;

/// Offset of the descriptor table, or the packed ring.
pub const TABLE: usize = 0;
/// Offset of the available ring, or the driver event area.
pub const DRIVER: usize = 0x1_0000;
/// Offset of the used ring, or the device event area.
pub const DEVICE: usize = 0x2_0000;
/// Offset of the indirect tables, by head or buffer ID.
pub const TABLES: usize = 0x4_0000;
const TABLE_LEN: usize = 256;
/// Offset of the buffers.
pub const BUFFERS: usize = 0x20_0000;

pub const NEXT: u16 = 1;
pub const WRITE: u16 = 2;
pub const INDIRECT: u16 = 4;

/// Memory of a guest, and the device's view of it.
#[derive(Debug)]
pub struct ModelGuest {
    pub memory: GuestMemory,
    pub mapping: Rc<GuardedMapping>,
}

impl ModelGuest {
    pub fn new() -> Self {
        let mapping = Rc::new(GuardedMapping::anonymous(MEMORY as usize).expect("memory"));
        let place = RegionPlace { guest: GUEST, len: MEMORY, user: USER, file_offset: 0 };
        let memory = GuestMemory::new(vec![GuestRegion::new(place, mapping.clone())]).expect("a region");
        Self { memory, mapping }
    }

    pub fn space(&self) -> AddressSpace<'_> {
        AddressSpace::plain(&self.memory)
    }

    pub fn part(&self, at: usize, len: u64) -> GuestPart {
        self.space().ring_area(USER + at as u64, len).expect("inside")
    }

    pub fn put(&self, at: usize, bytes: &[u8]) {
        self.mapping.write(at, bytes);
    }

    pub fn put_u16(&self, at: usize, value: u16) {
        self.mapping.store_u16(at, value, Ordering::Release);
    }

    pub fn get_u16(&self, at: usize) -> u16 {
        self.mapping.load_u16(at, Ordering::Acquire)
    }

    pub fn get_u32(&self, at: usize) -> u32 {
        self.mapping.load_u32(at, Ordering::Acquire)
    }

    /// Writes a descriptor of a split table.
    pub fn put_split(&self, at: usize, addr: u64, len: u32, flags: u16, next: u16) {
        self.put(at, &addr.to_ne_bytes());
        self.put(at + 8, &len.to_ne_bytes());
        self.put(at + 12, &flags.to_ne_bytes());
        self.put(at + 14, &next.to_ne_bytes());
    }

    /// Writes a descriptor of a packed ring.
    pub fn put_packed(&self, at: usize, addr: u64, len: u32, id: u16, flags: u16) {
        self.put(at, &addr.to_ne_bytes());
        self.put(at + 8, &len.to_ne_bytes());
        self.put(at + 12, &id.to_ne_bytes());
        self.put_u16(at + 14, flags);
    }
}

/// Features of a queue.
#[derive(Debug, Clone, Copy)]
pub struct ModelOptions {
    pub size: u16,
    pub packed: bool,
    pub event_index: bool,
    pub in_order: bool,
    pub inflight: bool,
    /// Start of the split indexes, or of the packed position.
    pub first: u16,
}

/// Form of a chain.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ChainForm {
    Direct,
    Indirect,
    /// Some direct descriptors, and the rest in a table (split only).
    Mixed,
}

/// Buffer of a chain: offset in the buffers, length, and whether the device writes it.
pub type ModelBuffer = (u32, u32, bool);

#[derive(Debug, Clone)]
struct Submitted {
    serial: u64,
    buffers: Vec<ModelBuffer>,
    descriptors: Vec<u16>,
    count: u16,
}

/// Driver of a queue.
#[derive(Debug)]
pub struct ModelDriver {
    pub guest: ModelGuest,
    pub options: ModelOptions,
    pub region: Option<GuestArea>,
    /// Chains that were not returned, by head or buffer ID.
    outstanding: BTreeMap<u16, Submitted>,
    /// Free descriptors (split) or buffer IDs (packed).
    free: Vec<u16>,
    free_descriptors: u16,
    /// Entries (split) or descriptors (packed) that were submitted.
    submitted: u64,
    /// Entries or descriptors that were taken back.
    pub reaped: u64,
    serial: u64,
    /// Number of entries or descriptors after which the driver waits for an interrupt.
    pub event: u64,
    pub interrupts: bool,
}

impl ModelDriver {
    pub fn new(options: ModelOptions) -> Self {
        let guest = ModelGuest::new();
        let first = u64::from(options.first);
        let region = options.inflight.then(|| {
            let len = inflight_len(options.size, options.packed) as usize;
            // Somewhere behind another queue's part.
            let mapping = Rc::new(GuardedMapping::anonymous(len + 64).expect("memory"));
            GuestArea::of(&mapping, 64, len).expect("inside")
        });
        if !options.packed {
            guest.put_u16(DRIVER + 2, options.first);
            guest.put_u16(DEVICE + 2, options.first);
        }
        Self {
            guest,
            options,
            region,
            outstanding: BTreeMap::new(),
            free: (0..options.size).collect(),
            free_descriptors: options.size,
            submitted: first,
            reaped: first,
            serial: 0,
            event: first,
            interrupts: true,
        }
        .armed()
    }

    fn armed(mut self) -> Self {
        self.arm(true, 0);
        self
    }

    pub fn setup(&self) -> VirtqSetup {
        let ModelOptions { size, packed, event_index, in_order, .. } = self.options;
        let lens = VirtqSetup::area_lens(size, packed, event_index);
        VirtqSetup {
            size,
            packed,
            event_index,
            in_order,
            indirect: true,
            descriptors: self.guest.part(TABLE, lens[0]),
            driver: self.guest.part(DRIVER, lens[1]),
            device: self.guest.part(DEVICE, lens[2]),
            log_used: None,
            inflight: self.region.clone(),
        }
    }

    /// Returns the position of a number of descriptors as bits of a packed ring.
    pub fn position(&self, number: u64) -> u16 {
        let size = u64::from(self.options.size);
        (number % size) as u16 | if (number / size).is_multiple_of(2) { 1 << 15 } else { 0 }
    }

    /// Returns the base of a queue with nothing in flight.
    pub fn base(&self, number: u64) -> u32 {
        if self.options.packed { u32::from(self.position(number)) * 0x1_0001 } else { u32::from(number as u16) }
    }

    /// Returns the base that a front-end gives after the device was killed: QEMU knows nothing about a packed one.
    pub fn crash_base(&self) -> u32 {
        if self.options.packed {
            self.base(u64::from(self.options.first))
        } else {
            u32::from(self.guest.get_u16(DEVICE + 2))
        }
    }

    pub fn start(&self) -> Virtq {
        let (virtq, orphans) = Virtq::start(self.setup(), self.base(u64::from(self.options.first))).expect("a queue");
        assert!(orphans.is_empty());
        virtq
    }

    /// Returns the available flags of a packed descriptor.
    pub fn available_flags(&self, number: u64) -> u16 {
        if self.position(number) >> 15 == 1 { 1 << 7 } else { 1 << 15 }
    }

    /// Submits a chain, and returns its serial; `None` if the ring is full.
    pub fn submit(&mut self, buffers: &[ModelBuffer], form: ChainForm) -> Option<u64> {
        let form = if self.options.packed && form == ChainForm::Mixed { ChainForm::Direct } else { form };
        let direct = match form {
            ChainForm::Direct => buffers.len(),
            ChainForm::Indirect => 0,
            ChainForm::Mixed => buffers.len() / 2,
        };
        let count = direct + usize::from(form != ChainForm::Direct);
        if count > usize::from(self.free_descriptors) {
            return None;
        }
        self.free_descriptors -= count as u16;
        let fields = |buffer: &ModelBuffer| {
            (GUEST + BUFFERS as u64 + u64::from(buffer.0), buffer.1, if buffer.2 { WRITE } else { 0 })
        };
        let descriptors: Vec<u16>;
        if self.options.packed {
            // Buffer IDs come back in any order.
            let id = self.free.pop()?;
            descriptors = vec![id];
            let first = self.submitted;
            let slot = |number: u64| TABLE + 16 * (number % u64::from(self.options.size)) as usize;
            for at in (0..count).rev() {
                let number = first + at as u64;
                let available = self.available_flags(number);
                if form == ChainForm::Direct {
                    let (addr, len, flags) = fields(&buffers[at]);
                    let last = at + 1 == count;
                    let flags = flags | available | if last { 0 } else { NEXT };
                    self.guest.put_packed(slot(number), addr, len, if last { id } else { 0xfff0 }, flags);
                } else {
                    let table = TABLES + TABLE_LEN * usize::from(id);
                    for (at, buffer) in buffers.iter().enumerate() {
                        let (addr, len, flags) = fields(buffer);
                        // The next flag is reserved within tables.
                        self.guest.put_packed(table + 16 * at, addr, len, 0xfff1, flags | NEXT);
                    }
                    let len = 16 * buffers.len() as u32;
                    self.guest.put_packed(slot(number), GUEST + table as u64, len, id, INDIRECT | available);
                }
            }
            self.submitted += count as u64;
        } else {
            descriptors = self.free.split_off(self.free.len() - count);
            let head = descriptors[0];
            for (at, &index) in descriptors.iter().enumerate() {
                let slot = TABLE + 16 * usize::from(index);
                let next = descriptors.get(at + 1);
                if at < direct {
                    let (addr, len, flags) = fields(&buffers[at]);
                    let flags = flags | if next.is_some() { NEXT } else { 0 };
                    self.guest.put_split(slot, addr, len, flags, next.copied().unwrap_or(0xfff0));
                    continue;
                }
                let (table, rest) = (TABLES + TABLE_LEN * usize::from(head), &buffers[direct..]);
                // The table's order is not that of its links.
                let place = |at: usize| if at == 0 { 0 } else { rest.len() - at };
                for (at, buffer) in rest.iter().enumerate() {
                    let (addr, len, flags) = fields(buffer);
                    let flags = flags | if at + 1 < rest.len() { NEXT } else { 0 };
                    self.guest.put_split(table + 16 * place(at), addr, len, flags, place(at + 1) as u16);
                }
                self.guest.put_split(slot, GUEST + table as u64, 16 * rest.len() as u32, INDIRECT, 0xfff0);
            }
            let entry = DRIVER + 4 + 2 * (self.submitted as u16 & (self.options.size - 1)) as usize;
            self.guest.put_u16(entry, head);
            self.submitted += 1;
            self.guest.put_u16(DRIVER + 2, self.submitted as u16);
        }
        let serial = self.serial;
        self.serial += 1;
        let submitted = Submitted { serial, buffers: buffers.to_vec(), descriptors, count: count as u16 };
        let id = submitted.descriptors[0];
        assert!(self.outstanding.insert(id, submitted).is_none());
        Some(serial)
    }

    /// Returns the number of entries or descriptors that the device has returned in all.
    pub fn returned(&self) -> u64 {
        if !self.options.packed {
            let index = self.guest.get_u16(DEVICE + 2);
            return self.reaped + u64::from(index.wrapping_sub(self.reaped as u16));
        }
        let mut number = self.reaped;
        while number < self.submitted
            && let Some((id, _)) = self.used_at(number)
        {
            number += u64::from(self.outstanding.get(&id).expect("outstanding").count);
        }
        number
    }

    fn used_at(&self, number: u64) -> Option<(u16, u32)> {
        let slot = TABLE + 16 * (number % u64::from(self.options.size)) as usize;
        let flags = self.guest.get_u16(slot + 14);
        let wrap = self.position(number) >> 15 == 1;
        let used = (flags & 1 << 7 != 0) == wrap && (flags & 1 << 15 != 0) == wrap;
        used.then(|| (self.guest.get_u16(slot + 12), self.guest.get_u32(slot + 8)))
    }

    /// Takes back the next chain: its serial and the bytes that the device has written.
    pub fn reap(&mut self) -> Option<(u64, u32)> {
        let (id, written) = if self.options.packed {
            if self.reaped == self.submitted {
                return None;
            }
            self.used_at(self.reaped)?
        } else {
            if self.guest.get_u16(DEVICE + 2) == self.reaped as u16 {
                return None;
            }
            let entry = DEVICE + 4 + 8 * (self.reaped as u16 & (self.options.size - 1)) as usize;
            (self.guest.get_u32(entry) as u16, self.guest.get_u32(entry + 4))
        };
        let chain = self.outstanding.remove(&id).expect("a chain that is returned is outstanding");
        self.reaped += if self.options.packed { u64::from(chain.count) } else { 1 };
        self.free_descriptors += chain.count;
        // At the front, so that all of them are used.
        self.free.splice(0..0, chain.descriptors);
        Some((chain.serial, written))
    }

    /// Returns the serials of the chains that were not taken back, oldest first.
    pub fn outstanding(&self) -> Vec<u64> {
        let mut serials: Vec<u64> = self.outstanding.values().map(|chain| chain.serial).collect();
        serials.sort_unstable();
        serials
    }

    /// Returns the serial of a chain that the device has found, and compares its buffers.
    pub fn serial_of(&self, chain: &Chain) -> u64 {
        let submitted = self.outstanding.get(&chain.token.id).expect("a chain that is found is outstanding");
        let expected = |writable: bool| -> Vec<(u64, usize)> {
            let buffers = submitted.buffers.iter().filter(|buffer| buffer.2 == writable && buffer.1 > 0);
            buffers.map(|buffer| (GUEST + BUFFERS as u64 + u64::from(buffer.0), buffer.1 as usize)).collect()
        };
        let found = |parts: &[GuestPart]| -> Vec<(u64, usize)> {
            parts.iter().map(|part| (part.guest, part.area.len())).collect()
        };
        assert_eq!(found(&chain.readable), expected(false));
        assert_eq!(found(&chain.writable), expected(true));
        submitted.serial
    }

    /// Asks for an interrupt after `more` entries or descriptors beyond the next one, or for none.
    pub fn arm(&mut self, interrupts: bool, more: u64) {
        let ModelOptions { size, packed, event_index, .. } = self.options;
        self.event = self.reaped + more;
        self.interrupts = interrupts || (event_index && !packed);
        match (packed, event_index) {
            (false, false) => self.guest.put_u16(DRIVER, u16::from(!interrupts)),
            (false, true) => self.guest.put_u16(DRIVER + 4 + 2 * usize::from(size), self.event as u16),
            (true, event_index) => {
                self.guest.put_u16(DRIVER, self.position(self.event));
                let flags = if !interrupts { 1 } else { 2 * u16::from(event_index) };
                self.guest.put_u16(DRIVER + 2, flags);
            }
        }
    }

    /// Returns whether an interrupt is due for entries or descriptors from `old` up to `new`; `None` if both are right.
    pub fn interrupt_due(&self, old: u64, new: u64) -> Option<bool> {
        if !self.options.event_index || !self.interrupts {
            return Some(self.interrupts && new > old);
        }
        let due = old <= self.event && self.event < new;
        // Indexes wrap, so that an old one is taken for a later one.
        let round = if self.options.packed { 2 * u64::from(self.options.size) } else { 1 << 16 };
        (due || new.saturating_sub(self.event) < round).then_some(due)
    }

    /// Returns whether the driver kicks for what it has submitted from `old` on.
    pub fn kicks(&self, old: u64) -> bool {
        let ModelOptions { size, packed, event_index, .. } = self.options;
        if !packed {
            if !event_index {
                return self.guest.get_u16(DEVICE) & 1 == 0;
            }
            let event = self.guest.get_u16(DEVICE + 4 + 8 * usize::from(size));
            let new = self.submitted as u16;
            return new.wrapping_sub(event).wrapping_sub(1) < new.wrapping_sub(old as u16);
        }
        match self.guest.get_u16(DEVICE + 2) {
            0 => true,
            2 => (old..self.submitted).any(|number| self.position(number) == self.guest.get_u16(DEVICE)),
            _ => false,
        }
    }

    pub fn submitted(&self) -> u64 {
        self.submitted
    }

    pub fn serial_by_id(&self, id: u16) -> u64 {
        self.outstanding.get(&id).expect("outstanding").serial
    }

    pub fn next_serial(&self) -> u64 {
        self.serial
    }
}
