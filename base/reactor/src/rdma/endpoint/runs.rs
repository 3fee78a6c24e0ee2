//! Long data, which stays in place until the peer has read it, and writes into the peer's memory.

use std::io;

use super::{Item, KIND_LONG, READ, RdmaEndpoint, WRITE};
use crate::buf::{Buf, BufMut};
use crate::rdma::ffi::{self, ScatterGatherEntry};

impl RdmaEndpoint {
    /// Starts to read as much of the next long data as fits into the buffer.
    pub(in crate::rdma) fn begin_read(&self, mut buf: BufMut) -> io::Result<()> {
        self.check()?;
        let mut state = self.state.borrow_mut();
        if state.reading.is_some() {
            // The device may still write to the buffer of an abandoned receive.
            let text = "a receive over RDMA was abandoned; the stream can no longer be read";
            return Err(io::Error::new(io::ErrorKind::ConnectionAborted, text));
        }
        let Some(&Item::Long(addr, key, len)) = state.inbox.front() else { unreachable!("a long run comes next") };
        let room = buf.spare_mut();
        let (at, len) = (room.as_ptr(), len.min(room.len()));
        let (piece, bounce) = match self.device.piece(buf.region(), at, len) {
            Some(piece) => (piece, None),
            None => {
                let mut bounce = self.device.bounce.get();
                let piece = self.device.own(&mut bounce).or_else(|_| {
                    bounce = self.device.eager.get();
                    self.device.own(&mut bounce)
                })?;
                (ScatterGatherEntry { len: piece.len.min(len as u32), ..piece }, Some(bounce))
            }
        };
        state.read_done = false;
        state.reading = Some((buf, piece.len as usize, bounce));
        drop(state);
        self.post(ffi::OP_READ, READ, piece, (addr, key))
    }

    /// Takes the buffer back after the read.
    pub(in crate::rdma) fn end_read(&self) -> io::Result<BufMut> {
        let mut state = self.state.borrow_mut();
        if !state.read_done {
            // The device may still write to the buffer; it is dropped with the connection.
            return Err(io::ErrorKind::ConnectionReset.into());
        }
        let (mut buf, len, bounce) = state.reading.take().expect("a read was under way");
        match bounce {
            None => buf.set_len(buf.len() + len),
            Some(mut bounce) => {
                bounce.set_len(len);
                buf.extend_from_slice(&bounce);
            }
        }
        let Some(Item::Long(addr, _, left)) = state.inbox.front_mut() else { unreachable!("a long run is read") };
        *addr += len as u64;
        *left -= len;
        if *left == 0 {
            state.inbox.pop_front();
            state.read += 1;
        }
        Ok(buf)
    }

    /// Splits off the next run of `rest`, in registered memory or copied there; returns it with its address and key.
    /// `None` when all bounce buffers are in use.
    pub(in crate::rdma) fn lend(&self, rest: &mut Buf) -> Option<(Buf, (ScatterGatherEntry, u32))> {
        if let Some(piece) = self.device.lent(rest.region(), rest.as_ptr(), rest.len()) {
            return Some((rest.split_to(rest.len()), piece));
        }
        self.copied(self.device.bounce.get(), rest)
    }

    /// Splits off the next run of `rest` like [`lend`](Self::lend), but copied to a short buffer, of which there are
    /// many.
    pub(in crate::rdma) fn lend_short(&self, rest: &mut Buf) -> io::Result<(Buf, (ScatterGatherEntry, u32))> {
        self.copied(self.device.eager.get(), rest).ok_or_else(|| io::ErrorKind::OutOfMemory.into())
    }

    fn copied(&self, mut copy: BufMut, rest: &mut Buf) -> Option<(Buf, (ScatterGatherEntry, u32))> {
        let len = rest.len().min(copy.spare());
        let piece = self.device.lent(copy.region(), copy.as_ptr(), len)?;
        copy.extend_from_slice(&rest.split_to(len));
        Some((copy.freeze(), piece))
    }

    /// Announces long data for the peer to read.
    pub(in crate::rdma) fn send_long(&self, run: Buf, (piece, key): (ScatterGatherEntry, u32)) -> io::Result<()> {
        self.check()?;
        let mut buf = self.eager();
        buf.extend_from_slice(&piece.addr.to_le_bytes());
        buf.extend_from_slice(&key.to_le_bytes());
        buf.extend_from_slice(&piece.len.to_le_bytes());
        let mut state = self.state.borrow_mut();
        state.credits -= 1;
        state.lent_bytes += run.len();
        state.lent.push_back(run);
        drop(state);
        self.send(KIND_LONG, buf)
    }

    /// Writes to the peer's memory; returns the number of the write.
    pub(in crate::rdma) fn send_write(
        &self,
        run: Buf,
        (piece, _): (ScatterGatherEntry, u32),
        remote: (u64, u32),
    ) -> io::Result<u64> {
        self.check()?;
        let mut state = self.state.borrow_mut();
        let place = state.sends.insert(run);
        state.writes_begun += 1;
        let number = state.writes_begun;
        drop(state);
        self.post(ffi::OP_WRITE, WRITE | place as u64, piece, remote)?;
        Ok(number)
    }
}
