//! Connections over RDMA: an ordered stream of bytes in each direction, with the interface of a socket.
//!
//! Short data is sent eagerly, copied into registered buffers that the peer has posted.  Long data stays in place: the
//! peer is told its address, reads it by RDMA directly to its destination, and then releases it.  Memory of
//! [`BufPool`](crate::BufPool)s is registered once and used without copying; other memory is copied into registered
//! memory. Connections are made by rdma_cm.  The libraries are loaded at run time: without them, everything here is
//! `Unsupported`.
//!
//! Each send begins with a header of 16 bytes, little-endian: a kind, the number of eager buffers released, and the
//! number of long runs read.

mod cm;
mod device;
mod endpoint;
mod ffi;

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::rc::Rc;
use std::time::Duration;

use crate::buf::{BufList, BufMut};
use crate::executor::yield_now;
use crate::pmem::PmemFile;
use crate::time::now;
use cm::Id;
use endpoint::RdmaEndpoint;
use ffi::Lib;

/// Bytes of an eager buffer, its header included.
const EAGER_LEN: usize = 8 << 10;
/// Bytes of a header.
const HEAD_LEN: usize = 16;
/// Length in bytes from which data is read by the peer instead of being sent.
const LONG_MIN: usize = EAGER_LEN;
/// Polls of the completion queue in a row before the reactor's other work runs.
const LOOKS: u32 = 32;

/// Checks that the RDMA libraries are installed.
///
/// # Errors
/// `Unsupported`, with the missing library.
pub fn available() -> io::Result<()> {
    Lib::get().map(drop)
}

/// Listening RDMA endpoint.
pub struct RdmaListener {
    id: Id,
    addr: SocketAddr,
    look: Duration,
}

impl RdmaListener {
    /// Listens on an address of a device, or on all.  `look` is the busy-poll time of its connections.
    ///
    /// # Errors
    /// `Unsupported` without the libraries, `NotFound` or the like without a device; errors of the system.
    pub fn bind(addr: SocketAddr, look: Duration) -> io::Result<Self> {
        let id = Id::new(Lib::get()?)?;
        let addr = id.listen(addr)?;
        Ok(Self { id, addr, look })
    }

    /// Returns the bound address.
    pub fn local_addr(&self) -> SocketAddr {
        self.addr
    }

    /// Waits for the next connection request.
    ///
    /// # Errors
    /// Errors of the system; accepting can continue.
    pub async fn asked(&self) -> io::Result<RdmaAsk> {
        loop {
            let event = self.id.channel.next().await?;
            if event.kind != ffi::EVENT_CONNECT_REQUEST {
                continue;
            }
            let id = Id::asked(self.id.lib, event.id, self.id.channel.clone())?;
            let peer = id.peer().unwrap_or_else(|| SocketAddr::new(IpAddr::from([0; 4]), 0));
            return Ok(RdmaAsk { id: Some(id), peer, look: self.look });
        }
    }

    /// Accepts the next connection, from any peer; returns it and its peer's address.
    ///
    /// # Errors
    /// As [`asked`](Self::asked) and [`RdmaAsk::accept`].
    pub async fn accept(&self) -> io::Result<(RdmaStream, SocketAddr)> {
        let ask = self.asked().await?;
        let peer = ask.peer();
        Ok((ask.accept()?, peer))
    }
}

/// Connection request, without any resources allocated yet.  Rejected when it is dropped.
pub struct RdmaAsk {
    id: Option<Id>,
    peer: SocketAddr,
    look: Duration,
}

impl RdmaAsk {
    /// Returns the address of the peer.
    pub fn peer(&self) -> SocketAddr {
        self.peer
    }

    /// Accepts the connection.
    ///
    /// # Errors
    /// `OutOfMemory` when this core has as many connections as its buffers suffice for; errors of the system.  The
    /// request is rejected then.
    pub fn accept(mut self) -> io::Result<RdmaStream> {
        let id = self.id.take().expect("it is here until it is accepted");
        let endpoint = RdmaEndpoint::new(id, self.look).map_err(|(error, id)| {
            self.id = id;
            error
        })?;
        endpoint.accept()?;
        Ok(RdmaStream { endpoint })
    }
}

impl Drop for RdmaAsk {
    fn drop(&mut self) {
        if let Some(id) = &self.id {
            id.reject();
        }
    }
}

/// RDMA connection.  Clones share it, so that one task can receive while another sends; it is closed with the last
/// clone.
#[derive(Clone)]
pub struct RdmaStream {
    endpoint: Rc<RdmaEndpoint>,
}

impl RdmaStream {
    /// Connects to `addr`, from the device that has the address `local` where it is given.  After the last activity the
    /// connection busy-polls for `look` before it sleeps.
    ///
    /// # Errors
    /// `Unsupported` without the libraries; errors when there is no route, or no listener.
    pub async fn connect(addr: SocketAddr, local: Option<IpAddr>, look: Duration) -> io::Result<Self> {
        let id = Id::new(Lib::get()?)?;
        id.resolve(addr, local.map(|local| SocketAddr::new(local, 0))).await?;
        let endpoint = RdmaEndpoint::new(id, look).map_err(|(error, _)| error)?;
        endpoint.connect().await?;
        Ok(Self { endpoint })
    }

    /// Waits until `ready` returns true or the connection is over; busy-polls first, then sleeps.
    async fn wait(&self, ready: impl Fn(&RdmaEndpoint) -> bool) -> io::Result<()> {
        let begin = now();
        let endpoint = &*self.endpoint;
        loop {
            for _ in 0..LOOKS {
                endpoint.progress()?;
                if ready(endpoint) || endpoint.is_over() {
                    return Ok(());
                }
                std::hint::spin_loop();
            }
            if endpoint.moved().max(begin).elapsed() < endpoint.look() {
                yield_now().await;
                continue;
            }
            let rung = endpoint.rung.wait();
            endpoint.arm()?;
            endpoint.progress()?;
            if !ready(endpoint) && !endpoint.is_over() {
                rung.await;
            }
        }
    }

    /// Receives available bytes, or (`all`) until the buffer is full.  Returns 0 at the end of the stream.
    ///
    /// # Errors
    /// When the connection has failed; `UnexpectedEof` when it ended before the buffer was full.
    pub async fn recv(&self, buf: BufMut, all: bool) -> (io::Result<usize>, BufMut) {
        let before = buf.len();
        let mut place = Some(buf);
        let result = self.fill(&mut place, all, before).await;
        // If the connection failed while the device was writing to the buffer, the buffer stays with the connection.
        let buf = place.unwrap_or_else(|| BufMut::with_capacity(0));
        (result, buf)
    }

    async fn fill(&self, place: &mut Option<BufMut>, all: bool, before: usize) -> io::Result<usize> {
        loop {
            let buf = place.as_mut().expect("the buffer is here between reads");
            // Bytes received before a failure are still returned.
            let progressed = self.endpoint.progress();
            self.endpoint.take_eager(buf);
            let got = buf.len() - before;
            let long = self.endpoint.next_is_long();
            // Bytes sent before long data may determine its destination: return them first.
            if buf.spare() == 0 || (got > 0 && (!all || (!long && self.endpoint.is_over()))) {
                return match buf.spare() {
                    0 => Ok(got),
                    _ if all => Err(io::ErrorKind::UnexpectedEof.into()),
                    _ => Ok(got),
                };
            }
            progressed?;
            if long {
                self.read(place).await?;
                continue;
            }
            if self.endpoint.is_over() {
                // Distinguishes a failure from an end by the peer.
                self.endpoint.intact()?;
                return if all { Err(io::ErrorKind::UnexpectedEof.into()) } else { Ok(0) };
            }
            self.endpoint.tell()?;
            self.wait(RdmaEndpoint::has_item).await?;
        }
    }

    /// Reads as much of the next long data as fits.
    async fn read(&self, place: &mut Option<BufMut>) -> io::Result<()> {
        self.wait(RdmaEndpoint::has_room).await?;
        let buf = place.take().expect("the buffer is here between reads");
        self.endpoint.begin_read(buf)?;
        self.wait(RdmaEndpoint::has_read).await?;
        *place = Some(self.endpoint.end_read()?);
        Ok(())
    }

    /// Sends all of `bufs`.  Only one send at a time per connection.
    ///
    /// # Errors
    /// When the connection has failed or ended.
    pub async fn send(&self, bufs: BufList) -> io::Result<()> {
        let endpoint = &*self.endpoint;
        let mut filling: Option<BufMut> = None;
        for part in bufs.parts() {
            let mut rest = part.clone();
            while rest.len() >= LONG_MIN {
                self.flush(&mut filling).await?;
                let Some((run, piece)) = endpoint.lend(&mut rest) else { break };
                self.wait(|endpoint| endpoint.may_lend(run.len()) && endpoint.may_send()).await?;
                endpoint.send_long(run, piece)?;
            }
            let mut rest = &rest[..];
            while !rest.is_empty() {
                let buf = filling.get_or_insert_with(|| endpoint.eager());
                let len = rest.len().min(buf.spare());
                buf.extend_from_slice(&rest[..len]);
                rest = &rest[len..];
                if buf.spare() == 0 {
                    self.flush(&mut filling).await?;
                }
            }
        }
        self.flush(&mut filling).await
    }

    async fn flush(&self, filling: &mut Option<BufMut>) -> io::Result<()> {
        let Some(buf) = filling.take() else { return Ok(()) };
        self.wait(RdmaEndpoint::may_send).await?;
        self.endpoint.send_eager(buf)
    }

    /// Registers memory that the peer may write to by itself once it has been sent its [`place`](RdmaWindow::place).
    ///
    /// # Errors
    /// When the memory cannot be registered.
    pub fn window(&self, len: usize) -> io::Result<RdmaWindow> {
        self.endpoint.window(len)
    }

    /// Opens a window onto `len` bytes of persistent memory from `at` on.
    ///
    /// # Errors
    /// When the memory cannot be registered.
    ///
    /// # Panics
    /// Past the end of the memory.
    pub fn window_onto(&self, file: Rc<PmemFile>, at: u64, len: u64) -> io::Result<RdmaWindow> {
        self.endpoint.window_onto(file, at, len)
    }

    /// Writes into the peer's window, without involving the peer; completes when all bytes are there.
    ///
    /// # Errors
    /// `InvalidInput` when they do not fit; an error when the connection fails, and then they may or may not be there.
    pub async fn write(&self, place: RemoteWindow, offset: u64, data: impl Into<BufList>) -> io::Result<()> {
        let data = data.into();
        let end = offset.checked_add(data.len() as u64);
        let begin = place.addr.checked_add(offset).filter(|at| at.checked_add(data.len() as u64).is_some());
        let Some(mut at) = begin.filter(|_| end.is_some_and(|end| end <= place.len)) else {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "more than the window holds"));
        };
        let mut last = None;
        for part in data.parts() {
            let mut rest = part.clone();
            while !rest.is_empty() {
                self.wait(RdmaEndpoint::has_room).await?;
                let (run, piece) = match self.endpoint.lend(&mut rest) {
                    Some(lent) => lent,
                    None => self.endpoint.lend_short(&mut rest)?,
                };
                let len = run.len() as u64;
                last = Some(self.endpoint.send_write(run, piece, (at, place.key))?);
                at += len;
            }
        }
        match last {
            // Writes of a connection complete in order.
            Some(number) => {
                self.wait(|endpoint| endpoint.has_written(number)).await?;
                if self.endpoint.has_written(number) { Ok(()) } else { Err(io::ErrorKind::ConnectionReset.into()) }
            }
            None => Ok(()),
        }
    }

    /// Shuts down both directions; bytes sent before still arrive if the peer continues to receive.
    pub fn shutdown(&self) {
        RdmaEndpoint::shutdown(&self.endpoint);
    }
}

/// Remote memory window that a peer may write to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RemoteWindow {
    /// Address in the peer's memory.
    pub addr: u64,
    /// Remote key.
    pub key: u32,
    /// Length in bytes.
    pub len: u64,
}

pub use endpoint::RdmaWindow;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{DriverChoice, Reactor};

    /// Without a device, and even without the libraries, an error is returned and nothing else happens; with a device,
    /// `test/interop/messenger-rdma.sh` tests the rest.
    #[test]
    fn without_a_device_there_is_an_error() {
        for choice in [DriverChoice::Uring, DriverChoice::Poll] {
            let Ok(reactor) = Reactor::system(choice) else { continue };
            reactor.block_on(async {
                // TEST-NET-1: no device has it, and there is no route to it.
                let addr: SocketAddr = "192.0.2.1:7".parse().expect("an address");
                assert!(RdmaStream::connect(addr, Some(addr.ip()), Duration::ZERO).await.is_err());
                assert!(RdmaListener::bind(addr, Duration::ZERO).is_err());
            });
        }
    }
}
