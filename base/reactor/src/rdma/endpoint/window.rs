//! Memory window that is open to a peer.

use std::cell::Cell;
use std::ffi::c_int;
use std::io;
use std::ptr;
use std::rc::Rc;

use super::RdmaEndpoint;
use crate::buf::BufMut;
use crate::pmem::{PersistentMemory, PmemFile};
use crate::rdma::RemoteWindow;
use crate::rdma::ffi::{self, Mr};

impl RdmaEndpoint {
    pub(in crate::rdma) fn window(self: &Rc<Self>, len: usize) -> io::Result<RdmaWindow> {
        let len = u32::try_from(len).map_err(|_| io::ErrorKind::InvalidInput)?.max(1);
        let buf = BufMut::zeroed(len as usize);
        // SAFETY: the window keeps the memory as long as it is registered, and this process has no reference to it
        // meanwhile, except to copy bytes in or out.
        let mr = unsafe { self.register(buf.as_ptr(), len as usize, 0) }?;
        Ok(RdmaWindow { endpoint: self.clone(), memory: WindowMemory::Own(buf), len: len.into(), mr: Cell::new(mr) })
    }

    /// Opens a window onto a range of persistent memory.
    pub(in crate::rdma) fn window_onto(
        self: &Rc<Self>,
        file: Rc<PmemFile>,
        at: u64,
        len: u64,
    ) -> io::Result<RdmaWindow> {
        let bytes = usize::try_from(len).map_err(|_| io::ErrorKind::InvalidInput)?;
        let memory = file.range(at, bytes);
        // SAFETY: the window keeps the mapping as long as it is registered, and no reference into it ever exists.
        let mr = match unsafe { self.register(memory, bytes, 0) } {
            // The kernel keeps no page of a file on a DAX file system in place for long, whose blocks may be given to another
            // file.  Devices that look pages up themselves need none in place.
            // SAFETY: as above.
            Err(error) if error.raw_os_error() == Some(libc::EOPNOTSUPP) => unsafe {
                self.register(memory, bytes, ffi::ON_DEMAND).map_err(|_| {
                    let text = "the device cannot access files on a DAX file system: use a DAX device";
                    io::Error::new(io::ErrorKind::Unsupported, text)
                })
            },
            registered => registered,
        }?;
        Ok(RdmaWindow { endpoint: self.clone(), memory: WindowMemory::Persistent { file, at }, len, mr: Cell::new(mr) })
    }

    /// Registers memory that the peer may write to.
    ///
    /// # Safety
    /// The memory must be mapped until the registration ends, and no reference to it may exist until then.
    unsafe fn register(&self, memory: *mut u8, len: usize, more: c_int) -> io::Result<*mut Mr> {
        let access = ffi::LOCAL_WRITE | ffi::REMOTE_WRITE | more;
        // SAFETY: the caller vouches for the memory; the domain lives as long as `self`.
        let mr = unsafe { (self.lib.ibv_reg_mr)(self.device.pd, memory.cast(), len, access) };
        if mr.is_null() { Err(io::Error::last_os_error()) } else { Ok(mr) }
    }
}

/// Memory of a window.
enum WindowMemory {
    /// Never accessed as a slice: the peer may be writing to it.
    Own(BufMut),
    /// Bytes from `at` on.
    Persistent { file: Rc<PmemFile>, at: u64 },
}

/// Memory window that the peer writes to by itself.
pub struct RdmaWindow {
    /// Keeps the protection domain alive.
    endpoint: Rc<RdmaEndpoint>,
    memory: WindowMemory,
    len: u64,
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
        let addr = match &self.memory {
            WindowMemory::Own(buf) => buf.as_ptr() as u64,
            WindowMemory::Persistent { file, at } => file.range(*at, 0) as u64,
        };
        RemoteWindow { addr, key, len: self.len }
    }

    fn check(&self, offset: usize, len: usize) {
        assert!(offset.checked_add(len).is_some_and(|end| end as u64 <= self.len), "past the window's end");
    }

    /// Copies out `out.len()` bytes from `offset`.  The peer may be writing them concurrently: it must announce
    /// complete data in a message.
    ///
    /// # Panics
    /// When they are not all in the window.
    pub fn read(&self, offset: usize, out: &mut [u8]) {
        self.check(offset, out.len());
        match &self.memory {
            WindowMemory::Own(buf) => {
                for (at, byte) in out.iter_mut().enumerate() {
                    // SAFETY: within the buffer, which lives; volatile, because the device writes to it concurrently.
                    *byte = unsafe { buf.as_ptr().add(offset + at).read_volatile() };
                }
            }
            WindowMemory::Persistent { file, at } => file.load(at + offset as u64, out),
        }
    }

    /// Writes from this side, as the peer could.
    ///
    /// # Panics
    /// When the bytes do not fit.
    pub fn put(&self, offset: usize, bytes: &[u8]) {
        self.check(offset, bytes.len());
        match &self.memory {
            WindowMemory::Own(buf) => {
                for (at, &byte) in bytes.iter().enumerate() {
                    // SAFETY: within the buffer, which lives and to which this process has no slice; volatile, as the
                    // device may write to it too.
                    unsafe { buf.as_ptr().add(offset + at).write_volatile(byte) };
                }
            }
            WindowMemory::Persistent { file, at } => file.store_cached(at + offset as u64, bytes),
        }
    }

    /// Revokes the peer's access: the device has ended what it wrote when this returns, and refuses all further writes.
    /// Bytes written before can still be read.  Aborts the process if the device keeps the registration: the owner relies on
    /// what it has revoked, and the end of a process revokes everything.
    pub fn revoke(&self) {
        let mr = self.mr.replace(ptr::null_mut());
        if !mr.is_null() {
            // SAFETY: registered by `RdmaEndpoint::register`, and its pointer was cleared above.
            let result = unsafe { (self.endpoint.lib.ibv_dereg_mr)(mr) };
            if result != 0 {
                tracing::error!(result, "an RDMA device does not revoke a memory window; aborting, which does");
                std::process::abort();
            }
        }
    }
}

impl Drop for RdmaWindow {
    fn drop(&mut self) {
        self.revoke();
    }
}
