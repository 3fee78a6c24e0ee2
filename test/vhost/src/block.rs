//! Requests of virtio-blk (VIRTIO 1.2, 5.2) on a queue.

use std::os::fd::BorrowedFd;
use std::time::Instant;

use crate::buffers::{UsedBuffers, VirtqBuffers};
use crate::error::{FrontEndError, Result};
use crate::front_end::FrontEnd;
use crate::queue::FrontEndQueue;

pub use crate::buffers::UNWRITTEN;

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

    /// Returns the request as bytes.
    fn buffers(&self) -> VirtqBuffers {
        VirtqBuffers {
            out: self.out(),
            read: self.read + 1,
            out_lengths: self.out_lengths.clone(),
            in_lengths: self.in_lengths.clone(),
            misaligned_by: self.misaligned_by,
        }
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

impl From<UsedBuffers> for BlockCompletion {
    fn from(used: UsedBuffers) -> Self {
        let UsedBuffers { id, bytes: mut data, written } = used;
        let status = data.pop().unwrap_or(UNWRITTEN);
        Self { id, status, data, written }
    }
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
        self.submit_buffers(&request.buffers())
    }

    /// Takes the next completed request.
    ///
    /// # Errors
    /// [`FrontEndError::Violation`] when the device used what it had not been given.
    pub fn completion(&mut self) -> Result<Option<BlockCompletion>> {
        Ok(self.used_buffers()?.map(BlockCompletion::from))
    }

    /// Waits for the next completed request.
    ///
    /// # Errors
    /// As of [`await_used`](Self::await_used).
    pub fn await_completion(&mut self, socket: Option<BorrowedFd<'_>>, deadline: Instant) -> Result<BlockCompletion> {
        self.await_used_buffers(socket, deadline).map(BlockCompletion::from)
    }
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
    fn the_configuration_has_its_fields() {
        let mut bytes = [0; 60];
        (bytes[0], bytes[7], bytes[20], bytes[34], bytes[52], bytes[56]) = (1, 2, 3, 4, 5, 1);
        let config = VirtioBlkConfig::decode(&bytes);
        assert_eq!((config.capacity, config.blk_size, config.num_queues), (1 | 2 << 56, 3, 4));
        assert_eq!((config.max_write_zeroes_seg, config.write_zeroes_may_unmap), (5, 1));
        assert_eq!(VirtioBlkConfig::decode(&bytes[..8]).blk_size, 0);
    }
}
