//! The oracle of order: whether what a disk holds could be what a crash of the host left, at some moment.
//!
//! One write is before another if a flush lies between them: submitted after the one was answered, and answered before
//! the other was submitted.  A disk is consistent if, wherever it shows a write, it shows all those that are before it,
//! or what was written over them.  Told of requests and answers by numbers that only grow; looks at whole sectors.

use std::collections::{BTreeMap, BTreeSet};

use forebay_block::{BlockReply, BlockRequest, ErrorKind, Extent, Result};

use crate::rng::mix64;

/// Bytes that are followed together.
pub const SECTOR: u64 = 512;

struct Write {
    submitted: u64,
    answered: Option<u64>,
    /// Refused before anything was done.
    refused: bool,
    /// Durable when it is answered.
    durable: bool,
    /// A crash may have undone it.
    uncertain: bool,
}

/// Names a request that the oracle was told of.
#[derive(Debug, Clone, Copy)]
pub enum OrderToken {
    /// A change.
    Change(usize),
    /// A flush, and when it was submitted.
    Flush(u64),
    /// Request that changes nothing.
    Other,
}

/// Oracle of the order of writes.
#[derive(Default)]
pub struct OrderOracle {
    clock: u64,
    writes: Vec<Write>,
    /// Contents of each sector: the hash, and the write.
    sectors: BTreeMap<u64, Vec<(u64, usize)>>,
    /// Sectors that were written in part.
    unknown: BTreeSet<u64>,
    /// Flushes that were answered: submitted, answered.
    flushes: Vec<(u64, u64)>,
}

fn hash(bytes: &[u8]) -> u64 {
    let word = |chunk: &[u8]| u64::from_le_bytes(chunk.try_into().unwrap_or_default());
    bytes.chunks_exact(8).fold(0, |all, chunk| mix64(all ^ word(chunk)))
}

impl OrderOracle {
    /// Creates an oracle for a disk of zeroes.
    pub fn new() -> Self {
        Self::default()
    }

    fn tick(&mut self) -> u64 {
        self.clock += 1;
        self.clock
    }

    /// The time, as requests are told by it.
    pub fn now(&mut self) -> u64 {
        self.tick()
    }

    /// Notes that a request is submitted.
    pub fn submit(&mut self, request: &BlockRequest) -> OrderToken {
        let submitted = self.tick();
        let (extent, data) = match request {
            BlockRequest::Write { offset, data, .. } | BlockRequest::CompareAndWrite { offset, data, .. } => {
                (Extent::new(*offset, data.len() as u64), Some(data.to_vec()))
            }
            BlockRequest::Discard(extent) | BlockRequest::WriteZeroes { extent, .. } => (*extent, None),
            BlockRequest::Flush => return OrderToken::Flush(submitted),
            BlockRequest::Read(_) => return OrderToken::Other,
        };
        let number = self.writes.len();
        let durable = matches!(
            request,
            BlockRequest::Write { fua: true, .. }
                | BlockRequest::WriteZeroes { fua: true, .. }
                | BlockRequest::CompareAndWrite { fua: true, .. }
        );
        self.writes.push(Write { submitted, answered: None, refused: false, durable, uncertain: false });
        let zero = hash(&[0; SECTOR as usize]);
        for sector in extent.offset / SECTOR..extent.end().div_ceil(SECTOR) {
            let (from, to) = (sector * SECTOR, (sector + 1) * SECTOR);
            if from < extent.offset || to > extent.end() {
                self.unknown.insert(sector);
                continue;
            }
            let content = match &data {
                Some(data) => hash(&data[(from - extent.offset) as usize..(to - extent.offset) as usize]),
                None => zero,
            };
            self.sectors.entry(sector).or_default().push((content, number));
        }
        OrderToken::Change(number)
    }

    /// Notes that a request has completed.
    pub fn complete(&mut self, token: OrderToken, result: &Result<BlockReply>) {
        let now = self.tick();
        match (token, result) {
            (OrderToken::Change(number), Ok(_)) => self.writes[number].answered = Some(now),
            (OrderToken::Change(number), Err(error)) if matches!(error.kind(), ErrorKind::Mismatch(_)) => {
                self.writes[number].refused = true;
            }
            (OrderToken::Flush(submitted), Ok(_)) => self.flushes.push((submitted, now)),
            _ => {}
        }
    }

    /// Records a crash of the machine: requests in flight have taken effect or never will, and writes that no flush has
    /// covered may be undone.
    pub fn crash(&mut self) {
        let now = self.tick();
        let covered = self.flushes.iter().map(|(submitted, _)| *submitted).max().unwrap_or(0);
        for write in self.writes.iter_mut().filter(|write| !write.refused) {
            let lasts = write.answered.is_some_and(|answered| write.durable || answered <= covered);
            write.uncertain |= !lasts;
            write.answered.get_or_insert(now);
        }
    }

    /// Checks that the disk is consistent; `read` returns a sector.
    ///
    /// # Errors
    /// Description of the inconsistency.
    pub fn check(&self, mut read: impl FnMut(u64) -> Vec<u8>) -> std::result::Result<(), String> {
        let mut found = Vec::new();
        let mut barrier = 0;
        for (&sector, writes) in self.sectors.iter().filter(|(sector, _)| !self.unknown.contains(sector)) {
            let content = hash(&read(sector));
            let initial = content == hash(&[0; SECTOR as usize]);
            let here: Vec<usize> = writes
                .iter()
                .filter(|(other, number)| *other == content && !self.writes[*number].refused)
                .map(|(_, number)| *number)
                .collect();
            if here.is_empty() && !initial {
                return Err(format!("sector {sector} holds what was never written there"));
            }
            // Zeroes may be from the beginning, and then they show nothing.
            if !initial && let Some(first) = here.iter().map(|&number| self.writes[number].submitted).min() {
                let before = self.flushes.iter().filter(|(_, answered)| *answered <= first);
                barrier = barrier.max(before.map(|(submitted, _)| *submitted).max().unwrap_or(0));
            }
            found.push((sector, here, initial));
        }
        for (sector, here, initial) in found {
            self.check_sector(sector, &here, initial, barrier, u64::MAX)?;
        }
        Ok(())
    }

    /// Checks that the disk has everything that completed by `from`, and nothing that was submitted after `to`.
    ///
    /// # Errors
    /// Description of the inconsistency.
    pub fn check_cut(
        &self,
        from: u64,
        to: u64,
        mut read: impl FnMut(u64) -> Vec<u8>,
    ) -> std::result::Result<(), String> {
        for (&sector, writes) in self.sectors.iter().filter(|(sector, _)| !self.unknown.contains(sector)) {
            let content = hash(&read(sector));
            let initial = content == hash(&[0; SECTOR as usize]);
            let here: Vec<usize> = writes.iter().filter(|(other, _)| *other == content).map(|(_, n)| *n).collect();
            if here.is_empty() && !initial {
                return Err(format!("cut: sector {sector} holds what was never written there"));
            }
            self.check_sector(sector, &here, initial, from, to).map_err(|text| format!("cut: {text}"))?;
        }
        Ok(())
    }

    /// Checks that a sector is not older than what was acknowledged by `barrier`, and was submitted by `until`.
    fn check_sector(
        &self,
        sector: u64,
        here: &[usize],
        initial: bool,
        barrier: u64,
        until: u64,
    ) -> std::result::Result<(), String> {
        let Some(writes) = self.sectors.get(&sector) else { return Ok(()) };
        let due: Vec<&Write> = writes
            .iter()
            .map(|(_, number)| &self.writes[*number])
            .filter(|write| {
                !write.refused && !write.uncertain && write.answered.is_some_and(|answered| answered <= barrier)
            })
            .collect();
        let newest = due.iter().map(|write| write.submitted).max().unwrap_or(0);
        let fits = here.iter().any(|&number| {
            let write = &self.writes[number];
            write.submitted <= until && write.answered.is_none_or(|answered| answered > newest)
        });
        if fits || (initial && due.is_empty()) {
            return Ok(());
        }
        let shown: Vec<_> = here.iter().map(|&n| (self.writes[n].submitted, self.writes[n].answered)).collect();
        Err(format!(
            "sector {sector} shows a write of {shown:?} (none: from the beginning), but one submitted at {newest} was \
             answered by {barrier}, before something that the disk shows (or it came after {until})"
        ))
    }
}

#[cfg(test)]
mod tests {
    use forebay_block::Buf;

    use super::*;

    fn write(oracle: &mut OrderOracle, sector: u64, value: u8) {
        let data = Buf::copy_of(&[value; SECTOR as usize]).into();
        let token = oracle.submit(&BlockRequest::Write { offset: sector * SECTOR, data, fua: false });
        oracle.complete(token, &Ok(BlockReply::Done));
    }

    fn flush(oracle: &mut OrderOracle) {
        let token = oracle.submit(&BlockRequest::Flush);
        oracle.complete(token, &Ok(BlockReply::Done));
    }

    #[test]
    fn a_write_that_is_shown_without_what_was_before_it_is_found() {
        let mut oracle = OrderOracle::new();
        write(&mut oracle, 0, 1);
        write(&mut oracle, 1, 2);
        flush(&mut oracle);
        write(&mut oracle, 2, 3);
        write(&mut oracle, 0, 4);
        let disk = |values: [u8; 3]| move |sector: u64| vec![values[sector as usize]; SECTOR as usize];
        for good in [[0, 0, 0], [1, 0, 0], [0, 2, 0], [1, 2, 0], [1, 2, 3], [4, 2, 3], [4, 2, 0]] {
            assert_eq!(oracle.check(disk(good)), Ok(()), "{good:?}");
        }
        for bad in [[0, 0, 3], [1, 0, 3], [0, 2, 3], [4, 0, 0], [9, 2, 0]] {
            assert!(oracle.check(disk(bad)).is_err(), "{bad:?}");
        }
        let now = oracle.now();
        assert_eq!(oracle.check_cut(now, now, disk([4, 2, 3])), Ok(()));
        assert!(oracle.check_cut(now, now, disk([1, 2, 3])).is_err());
    }
}
