//! Bindings of libibverbs and librdmacm, loaded on first use: where they are not installed, only RDMA is unavailable.
//!
//! Structures are those of rdma-core's `verbs.h` and `rdma_cma.h`, as far as their fields are used here; both libraries
//! keep them stable.  Posting and polling are not functions of the library: they are called through the function table
//! in the device's context.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::io;
use std::sync::OnceLock;

#[repr(C)]
pub(super) struct Context {
    device: *mut c_void,
    ops: ContextOps,
}

/// Function table `struct ibv_context_ops`.
#[repr(C)]
struct ContextOps {
    before_poll: [*mut c_void; 11],
    poll_cq: unsafe extern "C" fn(*mut Cq, c_int, *mut WorkCompletion) -> c_int,
    req_notify_cq: unsafe extern "C" fn(*mut Cq, c_int) -> c_int,
    before_send: [*mut c_void; 12],
    post_send: unsafe extern "C" fn(*mut Qp, *mut SendRequest, *mut *mut SendRequest) -> c_int,
    post_recv: unsafe extern "C" fn(*mut Qp, *mut RecvRequest, *mut *mut RecvRequest) -> c_int,
}

#[repr(C)]
pub(super) struct Qp {
    context: *mut Context,
}

#[repr(C)]
pub(super) struct Cq {
    context: *mut Context,
}

#[repr(C)]
pub(super) struct CompChannel {
    context: *mut Context,
    pub(super) fd: c_int,
}

#[repr(C)]
pub(super) struct Mr {
    context: *mut Context,
    pd: *mut c_void,
    addr: *mut c_void,
    length: usize,
    handle: u32,
    pub(super) lkey: u32,
    pub(super) rkey: u32,
}

/// Piece of registered memory: `struct ibv_sge`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct ScatterGatherEntry {
    pub(super) addr: u64,
    pub(super) len: u32,
    pub(super) lkey: u32,
}

#[repr(C)]
pub(super) struct SendRequest {
    pub(super) wr_id: u64,
    pub(super) next: *mut SendRequest,
    pub(super) pieces: *mut ScatterGatherEntry,
    pub(super) piece_count: c_int,
    pub(super) opcode: c_int,
    pub(super) flags: u32,
    pub(super) immediate: u32,
    pub(super) remote_addr: u64,
    pub(super) rkey: u32,
    /// Fields for atomics, datagrams and memory windows.
    pub(super) rest: [u32; 19],
}

#[repr(C)]
pub(super) struct RecvRequest {
    pub(super) wr_id: u64,
    pub(super) next: *mut RecvRequest,
    pub(super) pieces: *mut ScatterGatherEntry,
    pub(super) piece_count: c_int,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(super) struct WorkCompletion {
    pub(super) wr_id: u64,
    pub(super) status: c_int,
    opcode: c_int,
    vendor_err: u32,
    pub(super) byte_len: u32,
    rest: [u32; 6],
}

#[repr(C)]
pub(super) struct QpInit {
    pub(super) qp_context: *mut c_void,
    pub(super) send_cq: *mut Cq,
    pub(super) recv_cq: *mut Cq,
    pub(super) srq: *mut c_void,
    pub(super) max_send_wr: u32,
    pub(super) max_recv_wr: u32,
    pub(super) max_send_sge: u32,
    pub(super) max_recv_sge: u32,
    pub(super) max_inline_data: u32,
    pub(super) qp_type: c_int,
    pub(super) sq_sig_all: c_int,
}

#[repr(C)]
pub(super) struct EventChannel {
    pub(super) fd: c_int,
}

#[repr(C)]
pub(super) struct CmId {
    pub(super) verbs: *mut Context,
    channel: *mut EventChannel,
    context: *mut c_void,
    pub(super) qp: *mut Qp,
    pub(super) src: libc::sockaddr_storage,
    pub(super) dst: libc::sockaddr_storage,
}

#[repr(C)]
pub(super) struct CmEvent {
    pub(super) id: *mut CmId,
    listen_id: *mut CmId,
    pub(super) event: c_int,
    pub(super) status: c_int,
}

#[repr(C)]
pub(super) struct ConnParam {
    pub(super) private_data: *const c_void,
    pub(super) private_data_len: u8,
    pub(super) responder_resources: u8,
    pub(super) initiator_depth: u8,
    pub(super) flow_control: u8,
    pub(super) retry_count: u8,
    pub(super) rnr_retry_count: u8,
    pub(super) srq: u8,
    pub(super) qp_num: u32,
}

#[cfg(target_pointer_width = "64")]
const _: () = {
    assert!(std::mem::offset_of!(Context, ops.poll_cq) == 96 && std::mem::offset_of!(Context, ops.post_send) == 208);
    assert!(size_of::<SendRequest>() == 128 && std::mem::offset_of!(SendRequest, rkey) == 48);
    assert!(size_of::<WorkCompletion>() == 48 && size_of::<QpInit>() == 64 && size_of::<ConnParam>() == 24);
    assert!(std::mem::offset_of!(Mr, lkey) == 36 && std::mem::offset_of!(CmId, dst) == 160);
    assert!(std::mem::offset_of!(CmEvent, status) == 20);
};

pub(super) const QP_RELIABLE: c_int = 2;
pub(super) const PORT_SPACE_TCP: c_int = 0x0106;
pub(super) const LOCAL_WRITE: c_int = 1;
pub(super) const REMOTE_WRITE: c_int = 2;
pub(super) const REMOTE_READ: c_int = 4;
/// Pages are looked up when the device accesses them, and not kept in place.
pub(super) const ON_DEMAND: c_int = 1 << 6;
pub(super) const SIGNALED: u32 = 2;
pub(super) const OP_WRITE: c_int = 0;
pub(super) const OP_SEND: c_int = 2;
pub(super) const OP_READ: c_int = 4;
/// Status `IBV_WC_WR_FLUSH_ERR`: the connection has ended, and the request was flushed.
pub(super) const STATUS_FLUSHED: c_int = 5;

pub(super) const EVENT_ADDR_RESOLVED: c_int = 0;
pub(super) const EVENT_ROUTE_RESOLVED: c_int = 2;
pub(super) const EVENT_CONNECT_REQUEST: c_int = 4;
pub(super) const EVENT_REJECTED: c_int = 8;
pub(super) const EVENT_ESTABLISHED: c_int = 9;

macro_rules! library {
    ($($name:ident: fn($($argument:ty),*) $(-> $result:ty)?;)*) => {
        /// Functions of both libraries.
        pub(super) struct Lib {
            $(pub(super) $name: unsafe extern "C" fn($($argument),*) $(-> $result)?,)*
        }

        impl Lib {
            fn load() -> Result<Self, String> {
                let verbs = open(c"libibverbs.so.1")?;
                let cm = open(c"librdmacm.so.1")?;
                Ok(Self {
                    // SAFETY: the signatures are those of the libraries' headers.
                    $($name: unsafe {
                        std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($argument),*) $(-> $result)?>(
                            symbol(verbs, cm, concat!(stringify!($name), "\0"))?,
                        )
                    },)*
                })
            }
        }
    };
}

library! {
    ibv_alloc_pd: fn(*mut Context) -> *mut c_void;
    ibv_dealloc_pd: fn(*mut c_void) -> c_int;
    ibv_reg_mr: fn(*mut c_void, *mut c_void, usize, c_int) -> *mut Mr;
    ibv_dereg_mr: fn(*mut Mr) -> c_int;
    ibv_create_comp_channel: fn(*mut Context) -> *mut CompChannel;
    ibv_destroy_comp_channel: fn(*mut CompChannel) -> c_int;
    ibv_create_cq: fn(*mut Context, c_int, *mut c_void, *mut CompChannel, c_int) -> *mut Cq;
    ibv_destroy_cq: fn(*mut Cq) -> c_int;
    ibv_get_cq_event: fn(*mut CompChannel, *mut *mut Cq, *mut *mut c_void) -> c_int;
    ibv_ack_cq_events: fn(*mut Cq, u32);
    rdma_create_event_channel: fn() -> *mut EventChannel;
    rdma_destroy_event_channel: fn(*mut EventChannel);
    rdma_create_id: fn(*mut EventChannel, *mut *mut CmId, *mut c_void, c_int) -> c_int;
    rdma_destroy_id: fn(*mut CmId) -> c_int;
    rdma_migrate_id: fn(*mut CmId, *mut EventChannel) -> c_int;
    rdma_bind_addr: fn(*mut CmId, *mut libc::sockaddr) -> c_int;
    rdma_listen: fn(*mut CmId, c_int) -> c_int;
    rdma_resolve_addr: fn(*mut CmId, *mut libc::sockaddr, *mut libc::sockaddr, c_int) -> c_int;
    rdma_resolve_route: fn(*mut CmId, c_int) -> c_int;
    rdma_create_qp: fn(*mut CmId, *mut c_void, *mut QpInit) -> c_int;
    rdma_destroy_qp: fn(*mut CmId);
    rdma_connect: fn(*mut CmId, *mut ConnParam) -> c_int;
    rdma_accept: fn(*mut CmId, *mut ConnParam) -> c_int;
    rdma_disconnect: fn(*mut CmId) -> c_int;
    rdma_reject: fn(*mut CmId, *const c_void, u8) -> c_int;
    rdma_get_cm_event: fn(*mut EventChannel, *mut *mut CmEvent) -> c_int;
    rdma_ack_cm_event: fn(*mut CmEvent) -> c_int;
}

fn open(name: &CStr) -> Result<*mut c_void, String> {
    // SAFETY: a C string; the library's initialisers may run, as in any program that links to it.
    let library = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    if library.is_null() { Err(format!("{} is not installed", name.to_string_lossy())) } else { Ok(library) }
}

fn symbol(verbs: *mut c_void, cm: *mut c_void, name: &'static str) -> Result<*mut c_void, String> {
    let library = if name.starts_with("ibv_") { verbs } else { cm };
    // SAFETY: the library is open and stays so; the name ends with a zero.
    let found = unsafe { libc::dlsym(library, name.as_ptr().cast::<c_char>()) };
    if found.is_null() {
        Err(format!("the installed RDMA libraries lack {}", name.trim_end_matches('\0')))
    } else {
        Ok(found)
    }
}

impl Lib {
    /// Returns the libraries, loading them on first use.
    ///
    /// # Errors
    /// `Unsupported` where they are not installed.
    pub(super) fn get() -> io::Result<&'static Self> {
        static LIB: OnceLock<Result<Lib, String>> = OnceLock::new();
        let found = LIB.get_or_init(Self::load).as_ref();
        found.map_err(|text| io::Error::new(io::ErrorKind::Unsupported, format!("no RDMA: {text}")))
    }
}

/// Calls `ibv_poll_cq`.
///
/// # Safety
/// `cq` is alive.
pub(super) unsafe fn poll_cq(cq: *mut Cq, out: &mut [WorkCompletion]) -> c_int {
    // SAFETY: a completion queue's context and its table live as long as it does; the given count is the space
    // available.
    unsafe { ((*(*cq).context).ops.poll_cq)(cq, out.len() as c_int, out.as_mut_ptr()) }
}

/// Calls `ibv_req_notify_cq`.
///
/// # Safety
/// `cq` is alive.
pub(super) unsafe fn req_notify_cq(cq: *mut Cq) -> c_int {
    // SAFETY: as in `poll_cq`.
    unsafe { ((*(*cq).context).ops.req_notify_cq)(cq, 0) }
}

/// Calls `ibv_post_send`.
///
/// # Safety
/// `qp` is alive, and the memory of the request's pieces stays as it is until its completion or the end of `qp`.
pub(super) unsafe fn post_send(qp: *mut Qp, request: &mut SendRequest) -> c_int {
    let mut bad = std::ptr::null_mut();
    // SAFETY: a queue pair's context and its table live as long as it does; the request is copied before this returns.
    unsafe { ((*(*qp).context).ops.post_send)(qp, request, &mut bad) }
}

/// Calls `ibv_post_recv`.
///
/// # Safety
/// As for [`post_send`].
pub(super) unsafe fn post_recv(qp: *mut Qp, request: &mut RecvRequest) -> c_int {
    let mut bad = std::ptr::null_mut();
    // SAFETY: as in `post_send`.
    unsafe { ((*(*qp).context).ops.post_recv)(qp, request, &mut bad) }
}
