//! State shared by the connections of one core over one device: protection domain, registered memory, pools.

use std::cell::{Cell, RefCell};
use std::ffi::c_void;
use std::io;
use std::ptr;
use std::rc::{Rc, Weak};
use std::sync::Arc;

use super::EAGER_LEN;
use super::ffi::{Context, LOCAL_WRITE, Lib, Mr, REMOTE_READ, ScatterGatherEntry};
use crate::buf::BufMut;
use crate::memory::Region;
use crate::pool::BufPool;

/// Bytes of a bounce buffer, for data outside of registered memory.
const BOUNCE_LEN: usize = 256 << 10;
/// Maximum connections of a core over one device.
const ENDPOINTS_MAX: usize = 1024;
/// Maximum short buffers of a core, for all connections: posted, unread and in flight.  Memory is allocated on use.
const EAGER_MAX: usize = ENDPOINTS_MAX * super::endpoint::EAGER_EACH;
/// Maximum bounce buffers; when all are in use, long data is sent like short data.
const BOUNCE_MAX: usize = 256;

thread_local! {
    static DEVICES: RefCell<Vec<Weak<Device>>> = const { RefCell::new(Vec::new()) };
}

pub(super) struct Device {
    lib: &'static Lib,
    pub(super) context: *mut Context,
    pub(super) pd: *mut c_void,
    /// Registered regions.  A region is registered on first use and stays registered, because registration is slow.
    registered: RefCell<Vec<(Arc<Region>, *mut Mr)>>,
    /// Registered regions that a peer may read.
    lent: RefCell<Vec<(Arc<Region>, *mut Mr)>>,
    seats: Rc<Seats>,
    /// Pool for short frames, sent and received.
    pub(super) eager: BufPool,
    /// Pool for long data outside of registered memory.
    pub(super) bounce: BufPool,
}

impl Device {
    /// Returns this core's state of a device, creating it on first use.
    pub(super) fn of(lib: &'static Lib, context: *mut Context) -> io::Result<Rc<Self>> {
        DEVICES.with_borrow_mut(|devices| {
            devices.retain(|device| device.strong_count() > 0);
            let known = devices.iter().filter_map(Weak::upgrade).find(|device| device.context == context);
            if let Some(known) = known {
                return Ok(known);
            }
            // SAFETY: the connection manager keeps the context open as long as an identifier of the device exists, and
            // every endpoint drops its device before its identifier.
            let pd = unsafe { (lib.ibv_alloc_pd)(context) };
            if pd.is_null() {
                return Err(io::Error::last_os_error());
            }
            let device = Rc::new(Self {
                lib,
                context,
                pd,
                registered: RefCell::default(),
                lent: RefCell::default(),
                seats: Rc::default(),
                eager: BufPool::new(EAGER_LEN, EAGER_MAX),
                bounce: BufPool::new(BOUNCE_LEN, BOUNCE_MAX),
            });
            devices.push(Rc::downgrade(&device));
            Ok(device)
        })
    }

    /// Reserves buffers for one more connection.
    ///
    /// # Errors
    /// `OutOfMemory` at the maximum number of connections.
    pub(super) fn admit(&self) -> io::Result<Admitted> {
        self.seats.admit()
    }

    /// Returns the local and the remote key of a pool's region.  The remote key gives no access, unless the memory is
    /// lent.
    fn keys(&self, region: &Region, lent: bool) -> io::Result<(u32, u32)> {
        let mut registered = if lent { self.lent.borrow_mut() } else { self.registered.borrow_mut() };
        if let Some((_, mr)) = registered.iter().find(|(known, _)| ptr::eq(&**known, region)) {
            // SAFETY: registered until `self` is dropped.
            return Ok(unsafe { ((**mr).lkey, (**mr).rkey) });
        }
        let memory = region.iovec();
        let access = if lent { LOCAL_WRITE | REMOTE_READ } else { LOCAL_WRITE };
        // SAFETY: the region is kept alive as long as it is registered.
        let mr = unsafe { (self.lib.ibv_reg_mr)(self.pd, memory.iov_base, memory.iov_len, access) };
        if mr.is_null() {
            return Err(io::Error::last_os_error());
        }
        registered.push((region.keep(), mr));
        // SAFETY: just registered.
        Ok(unsafe { ((*mr).lkey, (*mr).rkey) })
    }

    /// Returns memory in the device's form; `None` when it is not in a registered pool region.
    pub(super) fn piece(&self, region: Option<&Region>, at: *const u8, len: usize) -> Option<ScatterGatherEntry> {
        self.keyed(region, at, len, false).map(|(piece, _)| piece)
    }

    /// Returns memory in the device's form, and the key with which the peer may read it.
    pub(super) fn lent(&self, region: Option<&Region>, at: *const u8, len: usize) -> Option<(ScatterGatherEntry, u32)> {
        self.keyed(region, at, len, true)
    }

    fn keyed(
        &self,
        region: Option<&Region>,
        at: *const u8,
        len: usize,
        lent: bool,
    ) -> Option<(ScatterGatherEntry, u32)> {
        let region = region.filter(|region| region.may_be_registered())?;
        let (lkey, rkey) = match self.keys(region, lent) {
            Ok(keys) => keys,
            Err(error) => {
                tracing::debug!(%error, "cannot register more memory for RDMA; copying instead");
                return None;
            }
        };
        Some((ScatterGatherEntry { addr: at as u64, len: len as u32, lkey }, rkey))
    }

    /// Returns the spare space of a buffer of this device's own pools in the device's form.
    pub(super) fn own(&self, buf: &mut BufMut) -> io::Result<ScatterGatherEntry> {
        let room = buf.spare_mut();
        let (at, len) = (room.as_ptr(), room.len());
        let piece = self.piece(buf.region(), at, len);
        piece.ok_or_else(|| io::Error::new(io::ErrorKind::OutOfMemory, "no memory can be registered for RDMA"))
    }
}

/// Number of connections in use, limited by the buffers of a device.
#[derive(Default)]
struct Seats(Cell<usize>);

impl Seats {
    fn admit(self: &Rc<Self>) -> io::Result<Admitted> {
        if self.0.get() >= ENDPOINTS_MAX {
            let text = format!("this core has {ENDPOINTS_MAX} connections over RDMA already");
            return Err(io::Error::new(io::ErrorKind::OutOfMemory, text));
        }
        self.0.set(self.0.get() + 1);
        Ok(Admitted(self.clone()))
    }
}

/// Reservation of one connection.
pub(super) struct Admitted(Rc<Seats>);

impl Drop for Admitted {
    fn drop(&mut self) {
        self.0.0.set(self.0.0.get() - 1);
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        for (region, mr) in self.registered.take().into_iter().chain(self.lent.take()) {
            // SAFETY: no connection of this device is left, so nothing uses the registration any more.
            unsafe { (self.lib.ibv_dereg_mr)(mr) };
            drop(region);
        }
        // SAFETY: no reference to the domain is left.
        unsafe { (self.lib.ibv_dealloc_pd)(self.pd) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_connection_too_many_is_refused() {
        let seats = Rc::new(Seats::default());
        let mut admitted: Vec<_> = (0..ENDPOINTS_MAX).map(|_| seats.admit().expect("there is a seat")).collect();
        let error = seats.admit().err().expect("number 1,025");
        assert_eq!(error.kind(), io::ErrorKind::OutOfMemory);
        assert!(error.to_string().contains("1024 connections"), "{error}");
        admitted.pop();
        assert!(seats.admit().is_ok(), "one has gone");
    }
}
