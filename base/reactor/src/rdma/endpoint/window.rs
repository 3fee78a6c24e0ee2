//! Memory window that is open to a peer.

use std::cell::Cell;
use std::io;
use std::ptr;
use std::rc::Rc;

use super::RdmaEndpoint;
use crate::buf::BufMut;
use crate::rdma::RemoteWindow;
use crate::rdma::ffi::{self, Mr};

impl RdmaEndpoint {
    pub(in crate::rdma) fn window(self: &Rc<Self>, len: usize) -> io::Result<RdmaWindow> {
        let len = u32::try_from(len).map_err(|_| io::ErrorKind::InvalidInput)?.max(1);
        let buf = BufMut::zeroed(len as usize);
        let access = ffi::LOCAL_WRITE | ffi::REMOTE_WRITE;
        // SAFETY: the window keeps the memory as long as it is registered, and this process has no reference to it
        // meanwhile, except to copy bytes in or out.
        let mr = unsafe { (self.lib.ibv_reg_mr)(self.device.pd, buf.as_ptr().cast(), len as usize, access) };
        if mr.is_null() {
            return Err(io::Error::last_os_error());
        }
        Ok(RdmaWindow { endpoint: self.clone(), buf, len, mr: Cell::new(mr) })
    }
}

/// Memory window that the peer writes to by itself.
pub struct RdmaWindow {
    /// Keeps the protection domain alive.
    endpoint: Rc<RdmaEndpoint>,
    /// Never accessed as a slice: the peer may be writing to it.
    buf: BufMut,
    len: u32,
    /// Null once revoked.
    mr: Cell<*mut Mr>,
}

impl RdmaWindow {
    /// Returns the window's address, key and length for the peer; the key gives no access once it was
    /// [revoked](Self::revoke).
    pub fn place(&self) -> RemoteWindow {
        let mr = self.mr.get();
        // SAFETY: registered until it is revoked, and null then.
        let key = if mr.is_null() { 0 } else { unsafe { (*mr).rkey } };
        RemoteWindow { addr: self.buf.as_ptr() as u64, key, len: self.len }
    }

    /// Copies out `out.len()` bytes from `offset`.  The peer may be writing them concurrently: it must announce
    /// complete data in a message.
    ///
    /// # Panics
    /// When they are not all in the window.
    pub fn read(&self, offset: usize, out: &mut [u8]) {
        assert!(offset.checked_add(out.len()).is_some_and(|end| end <= self.len as usize), "past the window's end");
        for (at, byte) in out.iter_mut().enumerate() {
            // SAFETY: within the buffer, which lives; volatile, because the device writes to it concurrently.
            *byte = unsafe { self.buf.as_ptr().add(offset + at).read_volatile() };
        }
    }
}

impl RdmaWindow {
    /// Writes from this side, as the peer could.
    ///
    /// # Panics
    /// When the bytes do not fit.
    pub fn put(&self, offset: usize, bytes: &[u8]) {
        assert!(offset.checked_add(bytes.len()).is_some_and(|end| end <= self.len as usize), "past the window's end");
        for (at, &byte) in bytes.iter().enumerate() {
            // SAFETY: within the buffer, which lives and to which this process has no slice; volatile, as the device
            // may write to it too.
            unsafe { self.buf.as_ptr().add(offset + at).write_volatile(byte) };
        }
    }
}

impl RdmaWindow {
    /// Revokes the peer's access: the device refuses all further writes; bytes written before can still be read.
    pub fn revoke(&self) {
        let mr = self.mr.replace(ptr::null_mut());
        if !mr.is_null() {
            // SAFETY: registered by `RdmaEndpoint::window`, and its pointer was cleared above.
            unsafe { (self.endpoint.lib.ibv_dereg_mr)(mr) };
        }
    }
}

impl Drop for RdmaWindow {
    fn drop(&mut self) {
        self.revoke();
    }
}
