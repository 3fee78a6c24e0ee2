//! Requests of any device type: bytes that the device reads, space for bytes that it writes, and their division into
//! buffers of a chain.

use std::os::fd::{AsFd, BorrowedFd};
use std::time::Instant;

use crate::error::{FrontEndError, Result};
use crate::front_end::FrontEnd;
use crate::memory::GuestMemory;
use crate::queue::FrontEndQueue;
use crate::rings::{ChainSegment, UsedChain};

/// Contents of bytes that the device has not written.
pub const UNWRITTEN: u8 = 0xFF;

/// Request as bytes, with any division into buffers.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct VirtqBuffers {
    /// Bytes that the device reads.
    pub out: Vec<u8>,
    /// Number of bytes that the device may write.
    pub read: u32,
    /// Lengths of the buffers that the device reads; the rest is one more buffer.
    pub out_lengths: Vec<u32>,
    /// Lengths of the buffers that the device writes; the rest is one more buffer.
    pub in_lengths: Vec<u32>,
    /// Distance of each buffer from the next multiple of 16.
    pub misaligned_by: u64,
}

impl VirtqBuffers {
    /// Request of one buffer in each direction.
    pub fn new(out: &[u8], read: u32) -> Self {
        Self { out: out.to_vec(), read, ..Self::default() }
    }

    /// Copies the request to guest memory; what is allocated there is appended to `allocated`, also on failure.
    fn build_chain(&self, memory: &GuestMemory, allocated: &mut Vec<(u64, u64)>) -> Result<Vec<ChainSegment>> {
        let mut buffer = |bytes: &[u8]| -> Result<u64> {
            let length = bytes.len() as u64 + self.misaligned_by;
            let address = memory.allocate(length, 16)?;
            allocated.push((address, length));
            memory.write(address + self.misaligned_by, bytes)?;
            Ok(address + self.misaligned_by)
        };
        let mut chain = Vec::new();
        let mut at = 0;
        for length in divide(self.out.len() as u32, &self.out_lengths) {
            chain.push(ChainSegment::readable(buffer(&self.out[at..at + length as usize])?, length));
            at += length as usize;
        }
        for length in divide(self.read, &self.in_lengths) {
            chain.push(ChainSegment::writable(buffer(&vec![UNWRITTEN; length as usize])?, length));
        }
        Ok(chain)
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
pub(crate) struct PendingBuffers {
    allocated: Vec<(u64, u64)>,
    written_by_device: Vec<ChainSegment>,
}

/// Request that the device has used.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UsedBuffers {
    /// Number that [`FrontEndQueue::submit_buffers`] has returned.
    pub id: u16,
    /// All bytes that the device may have written; [`UNWRITTEN`] where it did not.
    pub bytes: Vec<u8>,
    /// Number of bytes that the device says it has written.
    pub written: Option<u32>,
}

impl FrontEndQueue {
    /// Copies a request to guest memory and adds it to the ring; returns its number.  The device sees it after
    /// [`publish`](Self::publish).
    ///
    /// # Errors
    /// When guest memory or the ring is full.
    pub fn submit_buffers(&mut self, request: &VirtqBuffers) -> Result<u16> {
        let mut allocated = Vec::new();
        let chain = request.build_chain(&self.memory, &mut allocated);
        match chain.and_then(|chain| Ok((self.ring.add(&chain)?, chain))) {
            Ok((id, chain)) => {
                let written_by_device = chain.into_iter().filter(|segment| segment.is_writable).collect();
                self.pending.insert(id, PendingBuffers { allocated, written_by_device });
                Ok(id)
            }
            Err(error) => {
                allocated.into_iter().for_each(|(address, length)| self.memory.free(address, length));
                Err(error)
            }
        }
    }

    /// Takes the next used request.
    ///
    /// # Errors
    /// [`FrontEndError::Violation`] when the device used what it had not been given.
    pub fn used_buffers(&mut self) -> Result<Option<UsedBuffers>> {
        match self.ring.take_used()? {
            Some(used) => self.collect(used).map(Some),
            None => Ok(None),
        }
    }

    /// Waits for the next used request.
    ///
    /// # Errors
    /// As of [`await_used`](Self::await_used).
    pub fn await_used_buffers(&mut self, socket: Option<BorrowedFd<'_>>, deadline: Instant) -> Result<UsedBuffers> {
        let used = self.await_used(socket, deadline)?;
        self.collect(used)
    }

    fn collect(&mut self, used: UsedChain) -> Result<UsedBuffers> {
        let missing = || FrontEndError::Violation(format!("completion of chain {}, which is no request", used.id));
        let request = self.pending.remove(&used.id).ok_or_else(missing)?;
        let mut bytes = Vec::new();
        for segment in &request.written_by_device {
            let at = bytes.len();
            bytes.resize(at + segment.length as usize, 0);
            self.memory.read(segment.address, &mut bytes[at..])?;
        }
        request.allocated.into_iter().for_each(|(address, length)| self.memory.free(address, length));
        Ok(UsedBuffers { id: used.id, bytes, written: used.written })
    }
}

impl FrontEnd {
    /// Runs one request on a queue, on which no other is in flight.
    ///
    /// # Errors
    /// As of [`FrontEndQueue::await_used`].
    pub fn run_buffers(&mut self, queue: usize, request: &VirtqBuffers) -> Result<UsedBuffers> {
        let deadline = Instant::now() + self.options.patience;
        let id = self.queues[queue].submit_buffers(request)?;
        self.queues[queue].publish()?;
        let used = self.await_used_buffers(queue, deadline)?;
        match used.id == id {
            true => Ok(used),
            false => Err(FrontEndError::Violation(format!("completion of chain {}, where {id} was alone", used.id))),
        }
    }

    /// Waits for the next used request of a queue.
    ///
    /// # Errors
    /// As of [`FrontEndQueue::await_used`].
    pub fn await_used_buffers(&mut self, queue: usize, deadline: Instant) -> Result<UsedBuffers> {
        let socket = self.socket.stream().as_fd();
        self.queues[queue].await_used_buffers(Some(socket), deadline)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::MemoryLayout;

    #[test]
    fn bytes_are_divided_as_asked() {
        assert_eq!(divide(528, &[16]), [16, 512]);
        assert_eq!(divide(528, &[1, 0, 600]), [1, 527]);
        assert_eq!(divide(1, &[0]), [1]);
        assert_eq!(divide(512, &[512]), [512]);
        assert!(divide(0, &[512]).is_empty());
    }

    #[test]
    fn buffers_hold_the_bytes_at_the_asked_distance() {
        let memory = GuestMemory::create(&MemoryLayout::single(1 << 16)).expect("memory");
        let request = VirtqBuffers { misaligned_by: 3, out_lengths: vec![2], ..VirtqBuffers::new(&[7; 5], 9) };
        let mut allocated = Vec::new();
        let chain = request.build_chain(&memory, &mut allocated).expect("space");
        let lengths: Vec<(u32, bool)> = chain.iter().map(|segment| (segment.length, segment.is_writable)).collect();
        assert_eq!(lengths, [(2, false), (3, false), (9, true)]);
        assert!(chain.iter().all(|segment| segment.address % 16 == 3) && allocated.len() == 3);
        let mut bytes = [0; 9];
        memory.read(chain[2].address, &mut bytes).expect("within");
        assert_eq!(bytes, [UNWRITTEN; 9]);
    }
}
