//! What the connections of one core over one device share: the protection domain, registered memory, pools.

use std::cell::RefCell;
use std::ffi::c_void;
use std::io;
use std::rc::{Rc, Weak};
use std::sync::Arc;

use super::EAGER_LEN;
use super::ffi::{Context, LOCAL_WRITE, Lib, Mr, Piece, REMOTE_READ};
use crate::buf::BufMut;
use crate::memory::Region;
use crate::pool::Pool;

/// Bytes of the buffers through which goes what does not lie in registered memory.
const BOUNCE_LEN: usize = 256 << 10;
/// Short buffers of a core at most, of all connections; a connection has up to 200.
const EAGER_MAX: usize = 1 << 16;
/// Long ones; when they are all in use, long runs travel like short ones.
const BOUNCE_MAX: usize = 256;

thread_local! {
    static DEVICES: RefCell<Vec<Weak<Device>>> = const { RefCell::new(Vec::new()) };
}

pub(super) struct Device {
    lib: &'static Lib,
    pub(super) context: *mut Context,
    pub(super) pd: *mut c_void,
    /// A region is registered when it is first used, and stays so: the registration is what takes long.
    registered: RefCell<Vec<(Arc<Region>, *mut Mr)>>,
    /// For short frames, sent and received.
    pub(super) eager: Pool,
    /// For long ones that lie elsewhere.
    pub(super) bounce: Pool,
}

impl Device {
    /// This core's share of a device.
    pub(super) fn of(lib: &'static Lib, context: *mut Context) -> io::Result<Rc<Self>> {
        DEVICES.with_borrow_mut(|devices| {
            devices.retain(|device| device.strong_count() > 0);
            let known = devices.iter().filter_map(Weak::upgrade).find(|device| device.context == context);
            if let Some(known) = known {
                return Ok(known);
            }
            // SAFETY: the connection manager keeps the context open as long as an identifier of the device is there, and
            // every endpoint lets go of its device before it does of its identifier.
            let pd = unsafe { (lib.ibv_alloc_pd)(context) };
            if pd.is_null() {
                return Err(io::Error::last_os_error());
            }
            let device = Rc::new(Self {
                lib,
                context,
                pd,
                registered: RefCell::default(),
                eager: Pool::new(EAGER_LEN, EAGER_MAX),
                bounce: Pool::new(BOUNCE_LEN, BOUNCE_MAX),
            });
            devices.push(Rc::downgrade(&device));
            Ok(device)
        })
    }

    /// The keys of a pool's region, ours and the peer's.
    fn keys(&self, region: &Arc<Region>) -> io::Result<(u32, u32)> {
        let mut registered = self.registered.borrow_mut();
        if let Some((_, mr)) = registered.iter().find(|(known, _)| Arc::ptr_eq(known, region)) {
            // SAFETY: registered until `self` goes.
            return Ok(unsafe { ((**mr).lkey, (**mr).rkey) });
        }
        let memory = region.iovec();
        let access = LOCAL_WRITE | REMOTE_READ;
        // SAFETY: the region is kept as long as it is registered.
        let mr = unsafe { (self.lib.ibv_reg_mr)(self.pd, memory.iov_base, memory.iov_len, access) };
        if mr.is_null() {
            return Err(io::Error::last_os_error());
        }
        registered.push((region.clone(), mr));
        // SAFETY: just registered.
        Ok(unsafe { ((*mr).lkey, (*mr).rkey) })
    }

    /// Memory as the device takes it, and the key under which the peer may read it; `None` when it is not a pool's.
    pub(super) fn piece(&self, region: Option<&Arc<Region>>, at: *const u8, len: usize) -> Option<(Piece, u32)> {
        let (lkey, rkey) = match self.keys(region?) {
            Ok(keys) => keys,
            Err(error) => {
                tracing::debug!(%error, "no more memory can be registered for RDMA; copying instead");
                return None;
            }
        };
        Some((Piece { addr: at as u64, len: len as u32, lkey }, rkey))
    }

    /// A buffer of one of our own pools, which must be one.
    pub(super) fn own(&self, buf: &mut BufMut) -> io::Result<Piece> {
        let room = buf.spare_mut();
        let (at, len) = (room.as_ptr(), room.len());
        let piece = self.piece(buf.region(), at, len).map(|(piece, _)| piece);
        piece.ok_or_else(|| io::Error::new(io::ErrorKind::OutOfMemory, "no memory can be registered for RDMA"))
    }
}

impl Drop for Device {
    fn drop(&mut self) {
        for (region, mr) in self.registered.take() {
            // SAFETY: no connection of this device is left, so nothing uses the registration any more.
            unsafe { (self.lib.ibv_dereg_mr)(mr) };
            drop(region);
        }
        // SAFETY: nothing refers to the domain any more.
        unsafe { (self.lib.ibv_dealloc_pd)(self.pd) };
    }
}
