//! Connection set-up: librdmacm's identifiers, each with an event channel of its own, and their events.

use std::ffi::c_int;
use std::io;
use std::net::SocketAddr;
use std::os::fd::BorrowedFd;
use std::rc::Rc;

use super::ffi::{CmId, ConnParam, EventChannel, Lib, PORT_SPACE_TCP};
use crate::driver::os::{self, SockAddr};
use crate::net::{Addr, PolledFd};

/// Timeout in milliseconds for resolving an address or a route.
const RESOLVE_MS: c_int = 2000;
/// Maximum RDMA reads in flight, in each direction.
const READS_MAX: u8 = 4;
/// Unlimited retries, for a peer that has no buffer posted at the moment.
const RETRY_FOR_EVER: u8 = 7;

pub(super) fn failed(result: c_int) -> io::Result<()> {
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Event of an identifier.
pub(super) struct RdmaEvent {
    pub(super) kind: c_int,
    pub(super) status: c_int,
    pub(super) id: *mut CmId,
}

/// Event channel, destroyed with its last user.
pub(super) struct RdmaEventChannel {
    lib: &'static Lib,
    raw: *mut EventChannel,
    watched: PolledFd,
}

impl RdmaEventChannel {
    pub(super) fn new(lib: &'static Lib) -> io::Result<Rc<Self>> {
        // SAFETY: no arguments.
        let raw = unsafe { (lib.rdma_create_event_channel)() };
        if raw.is_null() {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: just created.
        let fd = unsafe { (*raw).fd };
        // SAFETY: the channel keeps its descriptor open, and it is borrowed for these calls only.
        let watched = os::set_nonblocking(fd, true).and_then(|()| PolledFd::new(unsafe { BorrowedFd::borrow_raw(fd) }));
        match watched {
            Ok(watched) => Ok(Rc::new(Self { lib, raw, watched })),
            Err(error) => {
                // SAFETY: nothing uses it yet.
                unsafe { (lib.rdma_destroy_event_channel)(raw) };
                Err(error)
            }
        }
    }

    /// Returns the next event, if there is one.
    fn take(&self) -> io::Result<Option<RdmaEvent>> {
        let mut raw = std::ptr::null_mut();
        // SAFETY: the channel lives; the event is acknowledged below, and not accessed after that.
        match failed(unsafe { (self.lib.rdma_get_cm_event)(self.raw, &mut raw) }) {
            Ok(()) => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
            Err(error) => return Err(error),
        }
        // SAFETY: the library returned an event; acknowledging it frees it, once.
        unsafe {
            let event = RdmaEvent { kind: (*raw).event, status: (*raw).status, id: (*raw).id };
            (self.lib.rdma_ack_cm_event)(raw);
            Ok(Some(event))
        }
    }

    pub(super) async fn next(&self) -> io::Result<RdmaEvent> {
        loop {
            match self.take()? {
                Some(event) => return Ok(event),
                None => self.watched.ready().await?,
            }
        }
    }

    /// Waits for the next event, which must be of this kind.
    ///
    /// # Errors
    /// `ConnectionRefused` after a rejection, `HostUnreachable` after any other event.
    pub(super) async fn expect(&self, kind: c_int) -> io::Result<()> {
        let event = self.next().await?;
        if event.kind == kind {
            return Ok(());
        }
        let text = format!("RDMA connection set-up: event {} with status {}", event.kind, event.status);
        let refused = event.kind == super::ffi::EVENT_REJECTED;
        let kind = if refused { io::ErrorKind::ConnectionRefused } else { io::ErrorKind::HostUnreachable };
        Err(io::Error::new(kind, text))
    }
}

impl Drop for RdmaEventChannel {
    fn drop(&mut self) {
        // SAFETY: identifiers hold the channel, so none is left; all events were acknowledged.
        unsafe { (self.lib.rdma_destroy_event_channel)(self.raw) };
    }
}

/// Connection identifier: the equivalent of a socket.
pub(super) struct Id {
    pub(super) lib: &'static Lib,
    pub(super) raw: *mut CmId,
    pub(super) channel: Rc<RdmaEventChannel>,
}

impl Id {
    pub(super) fn new(lib: &'static Lib) -> io::Result<Self> {
        let channel = RdmaEventChannel::new(lib)?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: the channel lives as long as the identifier, which holds it.
        failed(unsafe { (lib.rdma_create_id)(channel.raw, &mut raw, std::ptr::null_mut(), PORT_SPACE_TCP) })?;
        Ok(Self { lib, raw, channel })
    }

    /// Wraps the identifier of a connection request, moving it from the listener's channel to one of its own.
    pub(super) fn asked(lib: &'static Lib, raw: *mut CmId, listener: Rc<RdmaEventChannel>) -> io::Result<Self> {
        let mut id = Self { lib, raw, channel: listener };
        let own = RdmaEventChannel::new(lib)?;
        // SAFETY: both channels live; the identifier has no other user, and its events were acknowledged.
        failed(unsafe { (lib.rdma_migrate_id)(raw, own.raw) })?;
        id.channel = own;
        Ok(id)
    }

    pub(super) fn listen(&self, addr: SocketAddr) -> io::Result<SocketAddr> {
        let mut sock = SockAddr::new(&Addr::Tcp(addr))?;
        // SAFETY: the address lives through the calls, which copy it.
        unsafe {
            failed((self.lib.rdma_bind_addr)(self.raw, sock.ptr_mut()))?;
            failed((self.lib.rdma_listen)(self.raw, 128))?;
        }
        // SAFETY: the identifier lives.
        Ok(address(unsafe { &(*self.raw).src }).unwrap_or(addr))
    }

    /// Resolves the route to `addr`, from `local` where it is given.
    pub(super) async fn resolve(&self, addr: SocketAddr, local: Option<SocketAddr>) -> io::Result<()> {
        let mut to = SockAddr::new(&Addr::Tcp(addr))?;
        let mut from = local.map(|local| SockAddr::new(&Addr::Tcp(local))).transpose()?;
        let from = from.as_mut().map_or(std::ptr::null_mut(), SockAddr::ptr_mut);
        // SAFETY: the addresses live through the call, which copies them.
        failed(unsafe { (self.lib.rdma_resolve_addr)(self.raw, from, to.ptr_mut(), RESOLVE_MS) })?;
        self.channel.expect(super::ffi::EVENT_ADDR_RESOLVED).await?;
        // SAFETY: the identifier lives.
        failed(unsafe { (self.lib.rdma_resolve_route)(self.raw, RESOLVE_MS) })?;
        self.channel.expect(super::ffi::EVENT_ROUTE_RESOLVED).await
    }

    /// Returns the connection parameters, the same for both sides.
    pub(super) fn params() -> ConnParam {
        ConnParam {
            private_data: std::ptr::null(),
            private_data_len: 0,
            responder_resources: READS_MAX,
            initiator_depth: READS_MAX,
            flow_control: 1,
            retry_count: 7,
            rnr_retry_count: RETRY_FOR_EVER,
            srq: 0,
            qp_num: 0,
        }
    }

    /// Rejects a connection request.
    pub(super) fn reject(&self) {
        // SAFETY: the identifier lives.  A failure is ignored: the peer may be gone already.
        unsafe { (self.lib.rdma_reject)(self.raw, std::ptr::null(), 0) };
    }

    pub(super) fn peer(&self) -> Option<SocketAddr> {
        // SAFETY: the identifier lives.
        address(unsafe { &(*self.raw).dst })
    }
}

fn address(storage: &libc::sockaddr_storage) -> Option<SocketAddr> {
    let addr = SockAddr { storage: *storage, ..SockAddr::empty() };
    match addr.addr() {
        Some(Addr::Tcp(addr)) => Some(addr),
        _ => None,
    }
}

impl Drop for Id {
    fn drop(&mut self) {
        // SAFETY: its queue pair, if it had one, was destroyed before; all events were acknowledged.
        unsafe { (self.lib.rdma_destroy_id)(self.raw) };
    }
}
