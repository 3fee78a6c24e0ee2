//! Record of a split queue: which heads are in flight, in which order.
//!
//! Header: features (8 bytes), version, number of entries, head of the last batch, used index (2 bytes each).  Entry:
//! in flight (1), padding (5), next entry of the batch (2), counter (8).

use std::sync::atomic::Ordering;

use crate::memory::GuestArea;
use crate::rings::store::{put_u16, put_u64};

use super::{InflightViolation, VERSION, inflight_len};

pub(super) const HEADER: u64 = 16;
pub(super) const ENTRY: u64 = 16;

const FEATURES: usize = 0;
const VERSION_AT: usize = 8;
const ENTRIES: usize = 10;
const BATCH: usize = 12;
const USED: usize = 14;

/// Offset of the next entry in an entry.
const NEXT: usize = 6;
/// Offset of the counter in an entry.
const COUNTER: usize = 8;

fn at(head: u16, field: usize) -> usize {
    HEADER as usize + ENTRY as usize * usize::from(head) + field
}

/// In-flight record of a split queue.
#[derive(Debug)]
pub(crate) struct SplitRecord {
    area: GuestArea,
    /// Counter of the next chain.
    counter: u64,
    batch: u16,
}

impl SplitRecord {
    /// Opens a record, and returns the heads in flight in the order of their submission; `None` when it was unused.
    ///
    /// # Errors
    /// A record whose contents contradict each other or the queue.
    pub(crate) fn open(area: GuestArea, size: u16, used: u16) -> Result<(Self, Option<Vec<u16>>), InflightViolation> {
        let (len, need) = (area.len() as u64, inflight_len(size, false));
        if len < need {
            return Err(InflightViolation::Length { len, need });
        }
        if !area.is_aligned(8) {
            return Err(InflightViolation::Alignment);
        }
        let mut record = Self { area, counter: 0, batch: 0 };
        let version = record.area.load_u16(VERSION_AT, Ordering::Acquire);
        if version == 0 {
            record.initialize(size, used);
            return Ok((record, None));
        }
        let features = record.area.load_u64(FEATURES, Ordering::Relaxed);
        if version != VERSION || features != 0 {
            return Err(InflightViolation::Version { version, features });
        }
        let entries = record.area.load_u16(ENTRIES, Ordering::Relaxed);
        if entries < size || inflight_len(entries, false) > len {
            return Err(InflightViolation::Entries { entries, size });
        }
        let heads = record.recover(entries, size, used)?;
        Ok((record, Some(heads)))
    }

    fn put_u16(&self, at: usize, value: u16) {
        put_u16(&self.area, at, value, Ordering::Release);
    }

    fn initialize(&mut self, size: u16, used: u16) {
        put_u64(&self.area, FEATURES, 0, Ordering::Release);
        for head in 0..size {
            put_u64(&self.area, at(head, 0), 0, Ordering::Release);
            put_u64(&self.area, at(head, COUNTER), 0, Ordering::Release);
        }
        self.put_u16(ENTRIES, size);
        self.put_u16(BATCH, 0);
        self.put_u16(USED, used);
        self.put_u16(VERSION_AT, VERSION);
    }

    fn state(&self, head: u16) -> u8 {
        let [state, _] = self.area.load_u16(at(head, 0), Ordering::Relaxed).to_ne_bytes();
        state
    }

    fn recover(&mut self, entries: u16, size: u16, used: u16) -> Result<Vec<u16>, InflightViolation> {
        self.batch = self.area.load_u16(BATCH, Ordering::Relaxed);
        let mut in_flight = vec![false; usize::from(size)];
        for entry in 0..entries {
            match self.state(entry) {
                0 => {}
                1 if entry < size => in_flight[usize::from(entry)] = true,
                1 => return Err(InflightViolation::Entry(entry)),
                state => return Err(InflightViolation::EntryState { entry, state }),
            }
        }
        let batch = used.wrapping_sub(self.area.load_u16(USED, Ordering::Relaxed));
        // The ring may be another one if nothing is in flight.
        if in_flight.contains(&true) {
            if batch > size {
                return Err(InflightViolation::Batch { batch, size });
            }
            // The driver has seen the last batch as used, but not all of its entries may be marked as idle.
            let mut head = self.batch;
            for _ in 0..batch {
                let state = in_flight.get_mut(usize::from(head)).ok_or(InflightViolation::Entry(head))?;
                if std::mem::take(state) {
                    self.put_u16(at(head, 0), 0);
                }
                head = self.area.load_u16(at(head, NEXT), Ordering::Relaxed);
            }
        }
        if batch != 0 {
            self.put_u16(USED, used);
        }
        let heads = (0..size).filter(|head| in_flight[usize::from(*head)]);
        let counter = |head: u16| self.area.load_u64(at(head, COUNTER), Ordering::Relaxed);
        let mut heads: Vec<(u64, u16)> = heads.map(|head| (counter(head), head)).collect();
        heads.sort_unstable();
        self.counter = heads.last().map_or(0, |last| last.0.wrapping_add(1));
        Ok(heads.into_iter().map(|(_, head)| head).collect())
    }

    /// Records that a chain was taken from the available ring.
    pub(crate) fn fetched(&mut self, head: u16) {
        put_u64(&self.area, at(head, COUNTER), self.counter, Ordering::Release);
        self.counter = self.counter.wrapping_add(1);
        self.put_u16(at(head, 0), u16::from_ne_bytes([1, 0]));
    }

    /// Records that a chain is the next one in the used ring.
    pub(crate) fn completing(&mut self, head: u16) {
        self.put_u16(at(head, NEXT), self.batch);
        self.batch = head;
        self.put_u16(BATCH, head);
    }

    /// Records that the used ring's index has passed a chain.
    pub(crate) fn completed(&mut self, head: u16, used: u16) {
        self.put_u16(at(head, 0), 0);
        self.put_u16(USED, used);
    }

    /// Marks the record as unused.
    pub(crate) fn close(&self) {
        self.put_u16(VERSION_AT, 0);
    }
}
