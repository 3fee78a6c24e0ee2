//! Load on a device: a thread for each queue, each with its own blocks, and a check of the data.
//!
//! Buffers stay where they are, so that the figures are the device's and not a copy's.  With `verify`, every sector that is
//! written has its number and a version in all of its words; no two requests in flight are for one block.

use std::os::fd::AsFd;
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use clap::Args;
use forebay_load::{Dice, Pattern, load};

use crate::block::{OK, REQUEST_HEADER, SECTOR, UNWRITTEN, kind};
use crate::front_end::{FrontEnd, FrontEndOptions};
use crate::memory::MemoryLayout;
use crate::message::feature;
use crate::queue::{FrontEndQueue, QueueEvent};
use crate::rings::ChainSegment;
use crate::socket::first_readable;

/// Maximum number of recorded latencies of a queue; those of later requests are not counted.
const LATENCIES_MAX: usize = 4 << 20;
/// Bytes that are checked unless more are asked for.
const SPAN_VERIFIED: u64 = 64 << 20;
/// Time in which the device must complete a request.
const PATIENCE: Duration = Duration::from_secs(30);

/// A load, as it is asked for.
#[derive(Args, Clone, Debug)]
pub struct VhostLoad {
    /// Access pattern
    #[arg(long, value_enum, default_value_t = Pattern::Randread)]
    pub mode: Pattern,
    /// Bytes a request, such as 4k or 1m; a multiple of 512
    #[arg(long, default_value = "4k", value_parser = parse_size)]
    pub block: u64,
    /// Requests in flight on each queue
    #[arg(long, default_value_t = 32)]
    pub depth: u16,
    /// Number of queues, each with a thread
    #[arg(long, default_value_t = 1)]
    pub queues: u16,
    /// Entries of a queue, a power of 2 (default: 128, and more if the depth needs it)
    #[arg(long)]
    pub queue_size: Option<u16>,
    /// Seconds
    #[arg(long, default_value_t = 3.0)]
    pub seconds: f64,
    /// Goes over the volume once, however long it takes
    #[arg(long)]
    pub once: bool,
    /// Bytes of the device that are used, from its beginning on (default: all; 64m with --verify)
    #[arg(long, value_parser = parse_size)]
    pub span: Option<u64>,
    /// Packed virtqueues
    #[arg(long)]
    pub packed: bool,
    /// Notifications by index
    #[arg(long)]
    pub event_idx: bool,
    /// Requests are completed in order, if the device offers that
    #[arg(long)]
    pub in_order: bool,
    /// Descriptors in the ring, not in tables of their own
    #[arg(long)]
    pub direct: bool,
    /// Ask the ring again and again instead of sleeping in the kernel
    #[arg(long)]
    pub poll: bool,
    /// Check that data are read as they were written; overwrites the device
    #[arg(long)]
    pub verify: bool,
}

/// Parses a size in bytes, with k, m or g for powers of 1024.
///
/// # Errors
/// When the text is no such size.
pub fn parse_size(text: &str) -> std::result::Result<u64, String> {
    let digits = text.trim_end_matches(['k', 'K', 'm', 'M', 'g', 'G', 't', 'T']);
    let shift = match text[digits.len()..].to_ascii_lowercase().as_str() {
        "" => 0,
        "k" => 10,
        "m" => 20,
        "g" => 30,
        "t" => 40,
        _ => return Err(format!("{text} is no size, such as 4k or 64m")),
    };
    let number: u64 = digits.parse().map_err(|_| format!("{text} is no size, such as 4k or 64m"))?;
    number.checked_mul(1 << shift).ok_or_else(|| format!("{text} is too large"))
}

impl VhostLoad {
    /// Returns the options of the front-end.
    fn options(&self) -> FrontEndOptions {
        let bits = [
            (self.packed, feature::RING_PACKED),
            (self.event_idx, feature::EVENT_IDX),
            (self.in_order, feature::IN_ORDER),
            (!self.direct, feature::INDIRECT_DESC),
        ];
        let features = bits.into_iter().filter(|(wanted, _)| *wanted).fold(0, |all, (_, bit)| all | bit);
        // A request has three descriptors.
        let needed = u64::from(self.depth) * if self.direct { 3 } else { 1 };
        let size = self.queue_size.unwrap_or(needed.next_power_of_two().clamp(128, 1 << 15) as u16);
        let buffers = u64::from(self.depth) * (self.block + 8192);
        let rings = u64::from(size) * 256 + (64 << 10);
        FrontEndOptions {
            memory: MemoryLayout::single(((buffers + rings) * u64::from(self.queues)).next_multiple_of(1 << 20)),
            queues: self.queues,
            queue_size: size,
            patience: PATIENCE,
            ..FrontEndOptions::default()
        }
        .with(features)
    }
}

/// Runs a load on a device; returns the results as JSON.
///
/// # Errors
/// When a request fails, data are wrong, or the device does not offer what was asked for.
pub fn run(socket: &std::path::Path, asked: &VhostLoad) -> Result<String> {
    ensure!(asked.block.is_multiple_of(SECTOR) && asked.block > 0, "a block of {} bytes", asked.block);
    ensure!(asked.depth > 0 && asked.queues > 0, "no requests in flight");
    let options = asked.options();
    let mut front_end = FrontEnd::connect(socket, &options).context(format!("connecting to {}", socket.display()))?;
    for (wanted, bit, name) in
        [(asked.packed, feature::RING_PACKED, "packed virtqueues"), (asked.event_idx, feature::EVENT_IDX, "EVENT_IDX")]
    {
        ensure!(!wanted || front_end.features & bit != 0, "the device does not offer {name}");
    }
    let size = front_end.config.capacity * SECTOR;
    let span = asked.span.unwrap_or(if asked.verify { SPAN_VERIFIED.min(size) } else { size }).min(size);
    let blocks = span / asked.block / u64::from(asked.queues);
    let enough = u64::from(asked.depth) * if asked.verify { 2 } else { 0 };
    ensure!(blocks > enough, "the device has {size} bytes: too few for {} requests in flight", asked.depth);
    let mut workers = Vec::new();
    for (number, queue) in std::mem::take(&mut front_end.queues).into_iter().enumerate() {
        let socket = front_end.socket.stream().try_clone()?;
        workers.push(Worker::new(queue, socket, number as u64, blocks, asked)?);
    }
    let begun = Instant::now();
    let done = std::thread::scope(|scope| {
        let threads: Vec<_> = workers.iter_mut().map(|worker| scope.spawn(|| worker.work())).collect();
        let join = |thread: std::thread::ScopedJoinHandle<'_, Result<Measured>>| thread.join().expect("no panic");
        threads.into_iter().map(join).collect::<Result<Vec<Measured>>>()
    })?;
    let took = done.iter().map(|measured| measured.took).max().unwrap_or(begun.elapsed());
    let requests = done.iter().map(|measured| measured.requests).sum();
    let latencies = done.into_iter().flat_map(|measured| measured.latencies).collect();
    let depth = u64::from(asked.depth) * u64::from(asked.queues);
    Ok(load::figures(took, requests, asked.block as usize, depth, latencies))
}

/// Figures of a queue.
#[derive(Debug, Default)]
struct Measured {
    took: Duration,
    requests: u64,
    latencies: Vec<u32>,
}

/// Buffers of one request in flight.
#[derive(Debug, Clone, Copy)]
struct LoadSlot {
    header: u64,
    data: u64,
    status: u64,
    /// Block, counted among those of the queue.
    block: u64,
    begun: Instant,
}

/// Order in which a phase visits blocks, and when it ends.
#[derive(Debug, Clone, Copy)]
struct Phase {
    writes: bool,
    is_random: bool,
    /// Ends after each block was visited once.
    once: bool,
    /// Visits only blocks that were written.
    written_only: bool,
}

/// Thread of a queue.
struct Worker {
    queue: FrontEndQueue,
    socket: UnixStream,
    number: u64,
    blocks: u64,
    asked: VhostLoad,
    slots: Vec<LoadSlot>,
    /// Slot of each chain in flight, by id.
    by_id: Vec<u16>,
    /// Version of each block, 0 if it was not written; only with `verify`.
    versions: Vec<u32>,
    in_flight: Vec<bool>,
    dice: Dice,
    next: u64,
    buffer: Vec<u8>,
}

impl Worker {
    fn new(queue: FrontEndQueue, socket: UnixStream, number: u64, blocks: u64, asked: &VhostLoad) -> Result<Self> {
        let mut slots = Vec::new();
        let payload: Vec<u8> = (0..asked.block).map(|at| (at * 31 % 251) as u8).collect();
        for _ in 0..asked.depth {
            let allocate = |length: u64, align| queue.memory.allocate(length, align);
            // Header and status have cache lines of their own.
            let small = allocate(128, 64)?;
            let data = allocate(asked.block, 4096)?;
            queue.memory.write(small, &[0; 128])?;
            queue.memory.write(data, &payload)?;
            slots.push(LoadSlot { header: small, data, status: small + 64, block: 0, begun: Instant::now() });
        }
        let by_id = vec![0; usize::from(queue.ring.size())];
        let tracked = if asked.verify { blocks as usize } else { 0 };
        let (versions, in_flight) = (vec![0; tracked], vec![false; tracked]);
        let (dice, buffer) = (Dice::new(number + 1), vec![0; asked.block as usize]);
        Ok(Self {
            queue,
            socket,
            number,
            blocks,
            asked: asked.clone(),
            slots,
            by_id,
            versions,
            in_flight,
            dice,
            next: 0,
            buffer,
        })
    }

    fn work(&mut self) -> Result<Measured> {
        let (writes, verify) = (self.asked.mode.writes(), self.asked.verify);
        let is_random = matches!(self.asked.mode, Pattern::Randread | Pattern::Randwrite);
        let all = Phase { writes: true, is_random: false, once: true, written_only: false };
        if verify && !writes {
            self.phase(all)?;
        }
        let measured = self.phase(Phase { writes, is_random, once: self.asked.once, written_only: false })?;
        if verify && writes {
            self.phase(Phase { writes: false, written_only: true, ..all })?;
        }
        Ok(measured)
    }

    fn phase(&mut self, phase: Phase) -> Result<Measured> {
        let begun = Instant::now();
        let until = begun + Duration::from_secs_f64(self.asked.seconds);
        self.next = 0;
        let mut measured = Measured { latencies: Vec::with_capacity(1 << 20), ..Measured::default() };
        let mut open = 0_u64;
        for slot in 0..self.slots.len() {
            open += u64::from(self.issue(slot, phase, begun)?);
        }
        self.queue.publish()?;
        self.queue.ring.set_notifications(!self.asked.poll)?;
        let mut ending = false;
        while open > 0 {
            let mut used = self.queue.ring.take_used()?;
            if used.is_none() {
                self.wait()?;
                used = self.queue.ring.take_used()?;
            }
            let now = Instant::now();
            ending |= !phase.once && now >= until;
            while let Some(chain) = used {
                let slot = usize::from(self.by_id[usize::from(chain.id)]);
                self.finish(slot, phase)?;
                measured.requests += 1;
                if measured.latencies.len() < LATENCIES_MAX {
                    let took = now.duration_since(self.slots[slot].begun).as_nanos();
                    measured.latencies.push(took.min(u128::from(u32::MAX)) as u32);
                }
                if ending || !self.issue(slot, phase, now)? {
                    open -= 1;
                }
                used = self.queue.ring.take_used()?;
            }
            self.queue.publish()?;
        }
        measured.took = begun.elapsed();
        Ok(measured)
    }

    /// Waits until the device has used something.
    fn wait(&mut self) -> Result<()> {
        let deadline = Instant::now() + PATIENCE;
        let mut spins = 0_u32;
        loop {
            if self.asked.poll {
                if self.queue.ring.is_used()? {
                    return Ok(());
                }
                std::hint::spin_loop();
                spins = spins.wrapping_add(1);
                if spins.is_multiple_of(1 << 16) {
                    ensure!(Instant::now() < deadline, "the device completes nothing");
                    let ended = [self.queue.error(), self.socket.as_fd()];
                    ensure!(
                        first_readable(&ended, Instant::now())?.is_none(),
                        "the device has ended or reports an error"
                    );
                }
                continue;
            }
            self.queue.ring.set_notifications(true)?;
            if self.queue.ring.is_used()? {
                return Ok(());
            }
            match self.queue.wait(Some(self.socket.as_fd()), deadline)? {
                QueueEvent::Notified => {}
                event => bail!("{event:?} while requests are in flight"),
            }
            self.queue.ring.set_notifications(false)?;
            if self.queue.ring.is_used()? {
                return Ok(());
            }
        }
    }

    /// Returns a block that is not in flight; `None` when all were visited.
    fn choose(&mut self, phase: Phase) -> Option<u64> {
        loop {
            if phase.once && self.next >= self.blocks {
                return None;
            }
            let at = self.next;
            self.next += 1;
            let mut block = if phase.is_random { self.dice.roll() } else { at } % self.blocks;
            if self.versions.is_empty() {
                return Some(block);
            }
            while self.in_flight[block as usize] {
                block = (block + 1) % self.blocks;
            }
            if !phase.written_only || self.versions[block as usize] > 0 {
                return Some(block);
            }
        }
    }

    /// Adds a request in a slot; returns false when all blocks were visited.
    fn issue(&mut self, slot: usize, phase: Phase, now: Instant) -> Result<bool> {
        let Some(block) = self.choose(phase) else { return Ok(false) };
        let sector = (self.number * self.blocks + block) * self.asked.block / SECTOR;
        let LoadSlot { header, data, status, .. } = self.slots[slot];
        let mut head = [0; REQUEST_HEADER as usize];
        head[0] = if phase.writes { kind::OUT } else { kind::IN } as u8;
        head[8..].copy_from_slice(&sector.to_le_bytes());
        self.queue.memory.write(header, &head)?;
        self.queue.memory.write(status, &[UNWRITTEN])?;
        if !self.versions.is_empty() {
            self.in_flight[block as usize] = true;
            if phase.writes {
                self.versions[block as usize] += 1;
                stamp(&mut self.buffer, sector, self.versions[block as usize]);
                self.queue.memory.write(data, &self.buffer)?;
            } else {
                self.queue.memory.write(data, &[UNWRITTEN; 8])?;
            }
        }
        let length = self.asked.block as u32;
        let id = self.queue.ring.add(&[
            ChainSegment::readable(header, REQUEST_HEADER),
            ChainSegment { address: data, length, is_writable: !phase.writes },
            ChainSegment::writable(status, 1),
        ])?;
        self.by_id[usize::from(id)] = slot as u16;
        (self.slots[slot].block, self.slots[slot].begun) = (block, now);
        Ok(true)
    }

    fn finish(&mut self, slot: usize, phase: Phase) -> Result<()> {
        let LoadSlot { data, status, block, .. } = self.slots[slot];
        let mut byte = [UNWRITTEN];
        self.queue.memory.read(status, &mut byte)?;
        ensure!(byte[0] == OK, "a request for block {block} of queue {} failed with status {}", self.number, byte[0]);
        if self.versions.is_empty() {
            return Ok(());
        }
        self.in_flight[block as usize] = false;
        if !phase.writes {
            let sector = (self.number * self.blocks + block) * self.asked.block / SECTOR;
            let mut found = vec![0; self.asked.block as usize];
            self.queue.memory.read(data, &mut found)?;
            stamp(&mut self.buffer, sector, self.versions[block as usize]);
            let differs = found.iter().zip(&self.buffer).position(|(found, written)| found != written);
            if let Some(at) = differs {
                bail!(
                    "byte {at} of sector {sector} on is not what was written, version {}",
                    self.versions[block as usize]
                );
            }
        }
        Ok(())
    }
}

/// Fills a buffer with words that tell its sectors and a version.
fn stamp(buffer: &mut [u8], sector: u64, version: u32) {
    for (at, word) in buffer.chunks_exact_mut(8).enumerate() {
        let at = at as u64;
        let value =
            (sector + at * 8 / SECTOR).wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ ((u64::from(version) << 6) | (at % 64));
        word.copy_from_slice(&value.to_le_bytes());
    }
}

/// Connects to devices, starts their queues, and returns the front-ends: devices with a host that does nothing.
///
/// # Errors
/// When a device refuses something.
pub fn idle(sockets: &[std::path::PathBuf], asked: &VhostLoad) -> Result<Vec<FrontEnd>> {
    let options = FrontEndOptions { memory: MemoryLayout::single(8 << 20), ..asked.options() };
    let mut all = Vec::new();
    for socket in sockets {
        let mut front_end =
            FrontEnd::connect(socket, &options).context(format!("connecting to {}", socket.display()))?;
        // It has been used once, as a guest's disk has been when the guest is idle.
        front_end.read_sectors(0, 4096)?;
        all.push(front_end);
    }
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_have_suffixes() {
        assert_eq!(parse_size("4k"), Ok(4096));
        assert_eq!(parse_size("512"), Ok(512));
        assert_eq!(parse_size("2G"), Ok(2 << 30));
        assert!(parse_size("k").is_err() && parse_size("4x").is_err() && parse_size("99999999999999T").is_err());
    }

    #[test]
    fn sectors_of_a_block_are_stamped_apart() {
        let (mut block, mut sector) = (vec![0; 1024], vec![0; 512]);
        stamp(&mut block, 7, 1);
        stamp(&mut sector, 8, 1);
        assert_eq!(block[512..], sector[..]);
        stamp(&mut sector, 8, 2);
        assert_ne!(block[512..], sector[..]);
    }
}
