//! Damage at rest: one flipped bit of a log's medium is told, or costs nothing but what a torn write may cost.

use std::rc::Rc;
use std::time::Duration;

use forebay_block::{BlockDevice, BlockReply, BlockRequest, Error, ErrorKind, Extent, Result};
use forebay_reactor::timeout;
use forebay_writelog::format::{AREA_AT, BlockHeader, ENTRY_LEN, LOGS_AT, SUPER_COPIES, SUPER_LEN, tag_of};
use forebay_writelog::{LogId, WriteLog};

use super::backend::Backend;
use super::{BACKEND, LOG, Record, Run, VOLUME, key_of};
use crate::oracle::ORDER_SECTOR;
use crate::world::{CrashKind, Saved};
use crate::{pmem, world};

/// Bits flipped in a run, one after the other; the first two in the copies of the superblock.
const FLIPS: usize = 6;
const BLOCK: u64 = 4096;

/// Media and record as they were.
struct Before {
    log: Option<Saved>,
    memory: Option<pmem::Saved>,
    backend: Option<Saved>,
    size: u64,
    epoch: u64,
    encrypted: bool,
}

/// Result of opening the log.
enum Looked {
    Refused(Error),
    Opened {
        /// Number of the entry after the last: how many there are says less, as more of them may be at the backend.
        head: u64,
        /// Block by block; nothing where reading failed.
        blocks: Vec<Option<Vec<u8>>>,
    },
}

impl Run {
    /// Flips bits of the log's medium, and opens it with each of them.
    pub(super) fn damage(&mut self) -> std::result::Result<(), String> {
        let Some(id) = self.log.filter(|_| !self.record.released.get()) else { return Ok(()) };
        let before = Before {
            log: self.world.save(LOG),
            memory: self.memory.as_ref().map(pmem::SimPmem::save),
            backend: self.world.save(BACKEND),
            size: self.record.size.get(),
            epoch: self.record.epoch.get(),
            encrypted: self.is_encrypted(),
        };
        let whole = self.look(id, &before)?;
        let Looked::Opened { head: whole_head, blocks: truth } = whole else {
            // It was made and not recorded, or it is not there yet.
            return Ok(());
        };
        let blocks = self.append_blocks(id);
        let durable = blocks.iter().map(|(_, header)| header.durable_before()).max().unwrap_or(0);
        let loose = blocks.iter().filter(|(_, header)| header.number >= durable);
        let may_be_lost: u64 = loose.map(|(_, header)| u64::from(header.count)).sum();
        for flip in 0..FLIPS {
            let at = self.flip(SUPER_COPIES.get(flip).copied(), &blocks);
            self.tally.flips += 1;
            let told = |text: String| format!("a bit flipped at {at} of the log: {text}");
            match self.look(id, &before).map_err(told)? {
                Looked::Refused(error) => {
                    let known = matches!(error.kind(), ErrorKind::Corrupt | ErrorKind::NotFound | ErrorKind::Invalid);
                    if !known {
                        return Err(told(format!("refused with {error:?}")));
                    }
                    self.tally.flips_refused += 1;
                }
                Looked::Opened { head, .. } if head + may_be_lost < whole_head => {
                    let text = format!("ends at {head} of {whole_head} without a word; {may_be_lost} may be lost");
                    return Err(told(text));
                }
                Looked::Opened { head, blocks } => {
                    self.tally.flips_shortened += u64::from(head < whole_head);
                    self.tally.flips_read += u64::from(blocks.iter().any(Option::is_none));
                    self.compare(head == whole_head, &blocks, &truth).map_err(told)?;
                }
            }
        }
        Ok(())
    }

    /// Checks that the content read is what was written or, of a log that ends earlier, the volume at an earlier time.
    fn compare(
        &self,
        same: bool,
        blocks: &[Option<Vec<u8>>],
        truth: &[Option<Vec<u8>>],
    ) -> std::result::Result<(), String> {
        if same {
            let other = blocks.iter().zip(truth).position(|(is, was)| is.is_some() && was.is_some() && is != was);
            return other.map_or(Ok(()), |number| Err(format!("block {number} reads otherwise")));
        }
        if blocks.iter().any(Option::is_none) {
            return Ok(());
        }
        let bytes: Vec<u8> = blocks.iter().flatten().flatten().copied().collect();
        let read = |sector: u64| {
            let from = (sector * ORDER_SECTOR) as usize;
            bytes.get(from..from + ORDER_SECTOR as usize).map(<[u8]>::to_vec).unwrap_or_default()
        };
        self.oracles.order.borrow().check(read)
    }

    /// Opens the log and reads the volume; leaves everything as it was before.
    fn look(&mut self, id: LogId, before: &Before) -> std::result::Result<Looked, String> {
        let reactor = self.world.reactor();
        let world = self.world.clone();
        let looked = world.run(&reactor, self.look_into(id, before));
        self.world.crash(reactor, CrashKind::Power);
        if let (Some(memory), Some(saved)) = (&self.memory, &before.memory) {
            memory.restore(saved);
        }
        let disks = [(LOG, &before.log), (BACKEND, &before.backend)];
        for (path, saved) in disks {
            if let Some(saved) = saved {
                self.world.restore(path, saved);
            }
        }
        match looked {
            Ok(Ok(looked)) => Ok(looked),
            Ok(Err(error)) => Err(format!("{error:?}")),
            Err(stop) => Err(stop.to_string()),
        }
    }

    async fn look_into(&self, id: LogId, before: &Before) -> Result<Looked> {
        const PATIENCE: Duration = Duration::from_secs(200);
        let record = Rc::new(Record::default());
        record.size.set(before.size);
        record.epoch.set(before.epoch);
        let opened = async {
            let (shelf, key) = (self.shelf().await?, key_of(self.scenario.seed));
            // What a superblock says that has a flipped bit counts for nothing.
            let key = before.encrypted.then_some(&key);
            shelf.open_log_with_key(&id, VOLUME, before.epoch, key).await
        };
        let log = match timeout(PATIENCE, opened).await.map_err(|_| Error::from(ErrorKind::TimedOut))? {
            Ok(log) => log,
            Err(error) => return Ok(Looked::Refused(error)),
        };
        let backend = Rc::new(Backend::open(record.clone())?);
        let log = WriteLog::new(backend, log, record, self.scenario.options());
        let head = log.progress() + log.counters().replayed;
        let mut blocks = Vec::new();
        let span = self.span();
        for offset in (0..span).step_by(BLOCK as usize) {
            let read = log.submit(BlockRequest::Read(Extent::new(offset, BLOCK.min(span - offset))));
            let data = timeout(PATIENCE, read).await.map_err(|_| Error::from(ErrorKind::TimedOut))?;
            blocks.push(data.map(BlockReply::into_data).map(|data| data.to_vec()).ok());
        }
        Ok(Looked::Opened { head, blocks })
    }

    /// The valid append blocks of a log on a disk with their places, those of earlier laps included.
    fn append_blocks(&self, id: LogId) -> Vec<(u64, BlockHeader)> {
        let (tag, unit) = (tag_of(&id), self.scenario.sector);
        let len = (1 << 20) + 2 * self.scenario.log_size;
        let Some(bytes) = self.world.peek(LOG, 0, len as usize) else { return Vec::new() };
        let ring = (self.scenario.log_size - AREA_AT) / u64::from(unit);
        let places = (LOGS_AT..len).step_by(unit as usize);
        let valid = places.filter_map(|at| {
            let here = &bytes[at as usize..];
            let header = BlockHeader::peek(here, tag, unit)?;
            header.entries(here, tag, unit, ring).ok()?;
            Some((at, header))
        });
        valid.collect()
    }

    /// Flips a bit of this copy of the superblock; or else of an append block's header and entries, or anywhere of what is
    /// stored.
    fn flip(&mut self, superblock: Option<u64>, blocks: &[(u64, BlockHeader)]) -> u64 {
        let bit = self.rng.below(8) as u8;
        let at = match superblock {
            Some(copy) => LOGS_AT + copy + self.rng.below(SUPER_LEN as u64),
            None if !blocks.is_empty() && self.rng.coin() => {
                let (at, header) = *self.rng.pick(blocks);
                at + self.rng.below(((usize::from(header.count) + 1) * ENTRY_LEN) as u64)
            }
            _ => {
                let pages = match &self.memory {
                    Some(memory) => memory.stored_pages(),
                    None => self.world.stored_pages(LOG),
                };
                self.rng.pick(&pages) * world::PAGE + self.rng.below(world::PAGE)
            }
        };
        match &self.memory {
            Some(memory) => memory.flip(at, bit),
            None => self.world.flip(LOG, at, bit),
        }
        at
    }
}
