//! Requests of virtio-blk (VIRTIO 1.2, 5.2) on a queue.

use std::os::fd::BorrowedFd;
use std::time::Instant;

use crate::error::{FrontEndError, Result};
use crate::front_end::FrontEnd;
use crate::memory::GuestMemory;
use crate::queue::FrontEndQueue;
use crate::rings::{ChainSegment, UsedChain};

/// Bytes of a sector.
pub const SECTOR: u64 = 512;
/// Bytes of a request's header.
pub const REQUEST_HEADER: u32 = 16;
/// Bytes of the device's configuration up to the fields of WRITE_ZEROES.
pub const CONFIG_SIZE: u32 = 60;

/// Types of requests.
#[allow(missing_docs)]
pub mod kind {
    pub const IN: u32 = 0;
    pub const OUT: u32 = 1;
    pub const FLUSH: u32 = 4;
    pub const GET_ID: u32 = 8;
    pub const GET_LIFETIME: u32 = 10;
    pub const DISCARD: u32 = 11;
    pub const WRITE_ZEROES: u32 = 13;
    pub const SECURE_ERASE: u32 = 14;
}

/// Status of a request that succeeded.
pub const OK: u8 = 0;
/// Status of a request that failed.
pub const IOERR: u8 = 1;
/// Status of a request that the device does not support.
pub const UNSUPP: u8 = 2;
/// Contents of a status byte that the device has not written.
pub const UNWRITTEN: u8 = 0xFF;

/// Device configuration, as GET_CONFIG returns it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct VirtioBlkConfig {
    /// Size in sectors.
    pub capacity: u64,
    /// Maximum bytes of a segment.
    pub size_max: u32,
    /// Maximum segments of a request.
    pub seg_max: u32,
    /// Bytes of a block.
    pub blk_size: u32,
    /// 1 with a write-back cache.
    pub writeback: u8,
    /// Number of queues.
    pub num_queues: u16,
    /// Maximum sectors of a discarded segment.
    pub max_discard_sectors: u32,
    /// Maximum segments of a discard.
    pub max_discard_seg: u32,
    /// Alignment of a discard in sectors.
    pub discard_sector_alignment: u32,
    /// Maximum sectors of a zeroed segment.
    pub max_write_zeroes_sectors: u32,
    /// Maximum segments of a write of zeroes.
    pub max_write_zeroes_seg: u32,
    /// 1 if a write of zeroes may deallocate.
    pub write_zeroes_may_unmap: u8,
}

impl VirtioBlkConfig {
    /// Decodes the configuration; fields past the end are 0.
    pub fn decode(bytes: &[u8]) -> Self {
        let byte = |at: usize| bytes.get(at).copied().unwrap_or(0);
        let short = |at: usize| u16::from_le_bytes([byte(at), byte(at + 1)]);
        let word = |at: usize| u32::from(short(at)) | u32::from(short(at + 2)) << 16;
        Self {
            capacity: u64::from(word(0)) | u64::from(word(4)) << 32,
            size_max: word(8),
            seg_max: word(12),
            blk_size: word(20),
            writeback: byte(32),
            num_queues: short(34),
            max_discard_sectors: word(36),
            max_discard_seg: word(40),
            discard_sector_alignment: word(44),
            max_write_zeroes_sectors: word(48),
            max_write_zeroes_seg: word(52),
            write_zeroes_may_unmap: byte(56),
        }
    }
}

/// Segment of a discard or of a write of zeroes (5.2.6).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SectorRange {
    /// First sector.
    pub sector: u64,
    /// Number of sectors.
    pub count: u32,
    /// Flags; 1 allows a write of zeroes to deallocate.
    pub flags: u32,
}

impl SectorRange {
    fn encode(&self) -> [u8; 16] {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&self.sector.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.count.to_le_bytes());
        bytes[12..].copy_from_slice(&self.flags.to_le_bytes());
        bytes
    }
}

/// Request, with any division of its bytes into buffers.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VirtioBlkRequest {
    /// Type of the request.
    pub kind: u32,
    /// First sector.
    pub sector: u64,
    /// Data that follow the header.
    pub data: Vec<u8>,
    /// Bytes that the device writes before the status.
    pub read: u32,
    /// Lengths of the buffers of header and data; the rest is one more buffer.
    pub out_lengths: Vec<u32>,
    /// Lengths of the buffers that the device writes; the rest is one more buffer.
    pub in_lengths: Vec<u32>,
    /// Distance of each buffer from the next multiple of 16.
    pub misaligned_by: u64,
}

impl VirtioBlkRequest {
    /// Creates a request of any type.
    pub fn new(kind: u32, sector: u64, data: &[u8], read: u32) -> Self {
        let (out_lengths, in_lengths) = (vec![REQUEST_HEADER], vec![read]);
        Self { kind, sector, data: data.to_vec(), read, out_lengths, in_lengths, misaligned_by: 0 }
    }

    /// Creates a read of `length` bytes.
    pub fn read(sector: u64, length: u32) -> Self {
        Self::new(kind::IN, sector, &[], length)
    }

    /// Creates a write.
    pub fn write(sector: u64, data: &[u8]) -> Self {
        Self::new(kind::OUT, sector, data, 0)
    }

    /// Creates a flush.
    pub fn flush() -> Self {
        Self::new(kind::FLUSH, 0, &[], 0)
    }

    /// Creates a request for the device's name.
    pub fn get_id() -> Self {
        Self::new(kind::GET_ID, 0, &[], 20)
    }

    /// Creates a discard.
    pub fn discard(ranges: &[SectorRange]) -> Self {
        Self::new(kind::DISCARD, 0, &ranges.iter().flat_map(SectorRange::encode).collect::<Vec<u8>>(), 0)
    }

    /// Creates a write of zeroes.
    pub fn write_zeroes(ranges: &[SectorRange]) -> Self {
        Self { kind: kind::WRITE_ZEROES, ..Self::discard(ranges) }
    }

    /// Divides header and data, and what the device writes, into buffers of these lengths.
    pub fn split(mut self, out_lengths: &[u32], in_lengths: &[u32]) -> Self {
        self.out_lengths = out_lengths.to_vec();
        self.in_lengths = in_lengths.to_vec();
        self
    }

    /// Returns header and data.
    fn out(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(REQUEST_HEADER as usize + self.data.len());
        bytes.extend(self.kind.to_le_bytes());
        bytes.extend([0; 4]);
        bytes.extend(self.sector.to_le_bytes());
        bytes.extend(&self.data);
        bytes
    }
}

/// Divides `total` bytes; lengths of 0 are left out.
fn divide(total: u32, lengths: &[u32]) -> Vec<u32> {
    let mut left = total;
    let mut divided = Vec::new();
    for &length in lengths.iter().chain([&u32::MAX]) {
        let length = length.min(left);
        if length > 0 {
            divided.push(length);
        }
        left -= length;
    }
    divided
}

/// Buffers of a request in flight.
#[derive(Debug)]
pub(crate) struct PendingRequest {
    allocated: Vec<(u64, u64)>,
    written_by_device: Vec<ChainSegment>,
}

/// Completed request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BlockCompletion {
    /// Number that [`FrontEndQueue::submit`] has returned.
    pub id: u16,
    /// Status byte; [`UNWRITTEN`] if the device did not write it.
    pub status: u8,
    /// Bytes before the status.
    pub data: Vec<u8>,
    /// Number of bytes that the device says it has written.
    pub written: Option<u32>,
}

impl BlockCompletion {
    /// Returns the data of a request that succeeded.
    ///
    /// # Panics
    /// When it failed.
    pub fn ok(self) -> Vec<u8> {
        assert_eq!(self.status, OK, "the request failed: {self:?}");
        self.data
    }
}

impl FrontEndQueue {
    /// Copies a request to guest memory and adds it to the ring; returns its number.  The device sees it after
    /// [`publish`](Self::publish).
    ///
    /// # Errors
    /// When guest memory or the ring is full.
    pub fn submit(&mut self, request: &VirtioBlkRequest) -> Result<u16> {
        let mut allocated = Vec::new();
        let chain = build_chain(&self.memory, request, &mut allocated);
        match chain.and_then(|chain| Ok((self.ring.add(&chain)?, chain))) {
            Ok((id, chain)) => {
                let written_by_device = chain.into_iter().filter(|segment| segment.is_writable).collect();
                self.pending.insert(id, PendingRequest { allocated, written_by_device });
                Ok(id)
            }
            Err(error) => {
                allocated.into_iter().for_each(|(address, length)| self.memory.free(address, length));
                Err(error)
            }
        }
    }

    /// Takes the next completed request.
    ///
    /// # Errors
    /// [`FrontEndError::Violation`] when the device used what it had not been given.
    pub fn completion(&mut self) -> Result<Option<BlockCompletion>> {
        match self.ring.take_used()? {
            Some(used) => self.complete(used).map(Some),
            None => Ok(None),
        }
    }

    /// Waits for the next completed request.
    ///
    /// # Errors
    /// As of [`await_used`](Self::await_used).
    pub fn await_completion(&mut self, socket: Option<BorrowedFd<'_>>, deadline: Instant) -> Result<BlockCompletion> {
        let used = self.await_used(socket, deadline)?;
        self.complete(used)
    }

    fn complete(&mut self, used: UsedChain) -> Result<BlockCompletion> {
        let missing = || FrontEndError::Violation(format!("completion of chain {}, which is no request", used.id));
        let request = self.pending.remove(&used.id).ok_or_else(missing)?;
        let mut data = Vec::new();
        for segment in &request.written_by_device {
            let at = data.len();
            data.resize(at + segment.length as usize, 0);
            self.memory.read(segment.address, &mut data[at..])?;
        }
        request.allocated.into_iter().for_each(|(address, length)| self.memory.free(address, length));
        let status = data.pop().unwrap_or(UNWRITTEN);
        Ok(BlockCompletion { id: used.id, status, data, written: used.written })
    }
}

fn build_chain(
    memory: &GuestMemory,
    request: &VirtioBlkRequest,
    allocated: &mut Vec<(u64, u64)>,
) -> Result<Vec<ChainSegment>> {
    let mut buffer = |bytes: &[u8]| -> Result<u64> {
        let length = bytes.len() as u64 + request.misaligned_by;
        let address = memory.allocate(length, 16)?;
        allocated.push((address, length));
        memory.write(address + request.misaligned_by, bytes)?;
        Ok(address + request.misaligned_by)
    };
    let mut chain = Vec::new();
    let out = request.out();
    let mut at = 0;
    for length in divide(out.len() as u32, &request.out_lengths) {
        chain.push(ChainSegment::readable(buffer(&out[at..at + length as usize])?, length));
        at += length as usize;
    }
    for length in divide(request.read + 1, &request.in_lengths) {
        chain.push(ChainSegment::writable(buffer(&vec![UNWRITTEN; length as usize])?, length));
    }
    Ok(chain)
}

impl FrontEnd {
    /// Runs one request on a queue.
    ///
    /// # Errors
    /// As of [`FrontEndQueue::await_used`].
    pub fn run(&mut self, queue: usize, request: &VirtioBlkRequest) -> Result<BlockCompletion> {
        self.run_all(queue, std::slice::from_ref(request))?.pop().ok_or(FrontEndError::QueueFull)
    }

    /// Runs requests at the same time; returns their completions in the order of the requests.
    ///
    /// # Errors
    /// As of [`FrontEndQueue::await_used`].
    pub fn run_all(&mut self, queue: usize, requests: &[VirtioBlkRequest]) -> Result<Vec<BlockCompletion>> {
        let deadline = Instant::now() + self.options.patience;
        let ids = self.submit_all(queue, requests)?;
        let mut done = Vec::new();
        while done.len() < ids.len() {
            done.push(self.await_completion(queue, deadline)?);
        }
        done.sort_by_key(|completion| ids.iter().position(|&id| id == completion.id));
        Ok(done)
    }

    /// Adds requests to a queue, publishes them, and notifies the device.
    ///
    /// # Errors
    /// When guest memory or the ring is full.
    pub fn submit_all(&mut self, queue: usize, requests: &[VirtioBlkRequest]) -> Result<Vec<u16>> {
        let queue = &mut self.queues[queue];
        let ids = requests.iter().map(|request| queue.submit(request)).collect::<Result<Vec<u16>>>()?;
        queue.publish()?;
        Ok(ids)
    }

    /// Waits for the next completed request of a queue.
    ///
    /// # Errors
    /// As of [`FrontEndQueue::await_used`].
    pub fn await_completion(&mut self, queue: usize, deadline: Instant) -> Result<BlockCompletion> {
        let socket = std::os::fd::AsFd::as_fd(self.socket.stream());
        self.queues[queue].await_completion(Some(socket), deadline)
    }

    /// Reads `length` bytes from a sector on.
    ///
    /// # Errors
    /// As of [`run`](Self::run); [`FrontEndError::Violation`] when the request fails.
    pub fn read_sectors(&mut self, sector: u64, length: u32) -> Result<Vec<u8>> {
        let done = self.run(0, &VirtioBlkRequest::read(sector, length))?;
        succeeded("read", done).map(|done| done.data)
    }

    /// Writes data from a sector on.
    ///
    /// # Errors
    /// As of [`run`](Self::run); [`FrontEndError::Violation`] when the request fails.
    pub fn write_sectors(&mut self, sector: u64, data: &[u8]) -> Result<()> {
        let done = self.run(0, &VirtioBlkRequest::write(sector, data))?;
        succeeded("write", done).map(drop)
    }

    /// Makes all completed writes durable.
    ///
    /// # Errors
    /// As of [`run`](Self::run); [`FrontEndError::Violation`] when the request fails.
    pub fn flush(&mut self) -> Result<()> {
        let done = self.run(0, &VirtioBlkRequest::flush())?;
        succeeded("flush", done).map(drop)
    }
}

fn succeeded(what: &str, done: BlockCompletion) -> Result<BlockCompletion> {
    match done.status {
        OK => Ok(done),
        status => Err(FrontEndError::Violation(format!("a {what} failed with status {status}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_divided_as_asked() {
        assert_eq!(divide(528, &[16]), [16, 512]);
        assert_eq!(divide(528, &[1, 0, 600]), [1, 527]);
        assert_eq!(divide(1, &[0]), [1]);
        assert_eq!(divide(512, &[512]), [512]);
    }

    #[test]
    fn the_configuration_has_its_fields() {
        let mut bytes = [0; 60];
        (bytes[0], bytes[7], bytes[20], bytes[34], bytes[52], bytes[56]) = (1, 2, 3, 4, 5, 1);
        let config = VirtioBlkConfig::decode(&bytes);
        assert_eq!((config.capacity, config.blk_size, config.num_queues), (1 | 2 << 56, 3, 4));
        assert_eq!((config.max_write_zeroes_seg, config.write_zeroes_may_unmap), (5, 1));
        assert_eq!(VirtioBlkConfig::decode(&bytes[..8]).blk_size, 0);
    }
}
