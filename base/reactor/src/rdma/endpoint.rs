//! Endpoint of a connection: its queues, the buffers that the device uses, and received data.

mod runs;
mod window;

pub use window::RdmaWindow;

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::ffi::c_int;
use std::io;
use std::os::fd::BorrowedFd;
use std::rc::{Rc, Weak};
use std::time::Duration;

use slab::Slab;

use super::cm::{Id, failed};
use super::device::Admitted;
use super::device::Device;
use super::ffi::{self, CompChannel, Cq, Lib, QpInit, RecvRequest, ScatterGatherEntry, SendRequest, WorkCompletion};
use super::{EAGER_LEN, HEAD_LEN, LONG_MIN};
use crate::buf::{Buf, BufMut};
use crate::executor::{JoinHandle, spawn};
use crate::net::PolledFd;
use crate::sync::Notify;
use crate::time::{Instant, now, sleep};

/// Eager buffers posted for the peer's data.
const RECEIVES: usize = 64;
/// Eager buffers posted for messages outside of flow control: the peer's release of buffers.
const RECEIVES_MORE: usize = 16;
/// Maximum sends, reads and writes in flight.
const SENDS: usize = 128;
/// Maximum eager buffers of one connection: posted or unread, and in flight.
pub(super) const EAGER_EACH: usize = RECEIVES + RECEIVES_MORE + SENDS;
/// Maximum bytes of long data that the peer has not read yet; one piece is always allowed.
const LENT_MAX: usize = 4 << 20;
/// Maximum received items that wait to be taken: a correct peer has no more in flight.
const INBOX_MAX: usize = 2 * (LENT_MAX / LONG_MIN) + RECEIVES;
/// Maximum time after a shutdown for sent data to arrive before it is abandoned.
const DRAIN: Duration = Duration::from_secs(10);
/// Poll interval during that time.
const DRAIN_LOOK: Duration = Duration::from_millis(1);
/// Batches of 32 completions handled in one turn.
const BATCHES_A_TURN: u32 = 8;

const KIND_TELL: u32 = 0;
const KIND_BYTES: u32 = 1;
const KIND_LONG: u32 = 2;
/// Bytes of a long data descriptor: address, key, length.
const LONG_LEN: usize = 16;

/// Completion type, in the upper half of the work request id.
const RECEIVE: u64 = 1 << 32;
const SEND: u64 = 2 << 32;
const READ: u64 = 3 << 32;
const WRITE: u64 = 4 << 32;

/// Received item, in order.
pub(super) enum Item {
    /// Bytes of an eager buffer.
    Bytes(Buf),
    /// Long data to be read: address and key at the peer, and length.
    Long(u64, u32, usize),
}

#[derive(Default)]
struct State {
    /// Buffers posted for the peer.
    receives: Slab<BufMut>,
    inbox: VecDeque<Item>,
    /// Sends and writes in flight.
    sends: Slab<Buf>,
    /// Eager buffers of the peer that this side may use.
    credits: usize,
    /// Released eager buffers of this side that the peer was not told of yet.
    owed: u32,
    /// Long data read from the peer that it was not told of yet.
    read: u32,
    /// Long data that the peer has not read yet.
    lent: VecDeque<Buf>,
    lent_bytes: usize,
    /// Destination of the read in flight, its length, and a bounce buffer if one is used.
    reading: Option<(BufMut, usize, Option<BufMut>)>,
    read_done: bool,
    writes_begun: u64,
    writes_done: u64,
    broken: Option<(io::ErrorKind, String)>,
}

/// Endpoint of a connection.
pub(super) struct RdmaEndpoint {
    lib: &'static Lib,
    /// Dropped before `id`: the context of a removed device is closed with the last identifier.
    device: Rc<Device>,
    id: Id,
    cq: *mut Cq,
    events: *mut CompChannel,
    state: RefCell<State>,
    /// Notified when data may have arrived.
    pub(super) rung: Notify,
    over: Cell<bool>,
    closing: Cell<bool>,
    moved: Cell<Instant>,
    look: Duration,
    watchers: RefCell<Vec<JoinHandle<()>>>,
    _admitted: Admitted,
}

fn number(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(bytes[at..at + 4].try_into().expect("4 bytes"))
}

impl RdmaEndpoint {
    /// Creates the queues and posts the buffers.  On failure, returns the identifier if it was not used yet.
    pub(super) fn new(id: Id, look: Duration) -> Result<Rc<Self>, (io::Error, Option<Id>)> {
        match Self::set_aside(&id) {
            Ok(room) => Self::build(id, look, room).map_err(|error| (error, None)),
            Err(error) => Err((error, Some(id))),
        }
    }

    /// Reserves one more connection over the identifier's device.
    fn set_aside(id: &Id) -> io::Result<(Rc<Device>, Admitted)> {
        // SAFETY: the identifier lives, and its address was resolved, so it has a device.
        let context = unsafe { (*id.raw).verbs };
        if context.is_null() {
            return Err(io::Error::new(io::ErrorKind::NotFound, "no RDMA device has this address"));
        }
        let device = Device::of(id.lib, context)?;
        let admitted = device.admit()?;
        Ok((device, admitted))
    }

    fn build(id: Id, look: Duration, (device, admitted): (Rc<Device>, Admitted)) -> io::Result<Rc<Self>> {
        let (lib, context) = (id.lib, device.context);
        // SAFETY: the context is open.
        let events = unsafe { (lib.ibv_create_comp_channel)(context) };
        if events.is_null() {
            return Err(io::Error::last_os_error());
        }
        let mut endpoint = Self {
            lib,
            id,
            cq: std::ptr::null_mut(),
            events,
            state: RefCell::default(),
            rung: Notify::new(),
            over: Cell::new(false),
            closing: Cell::new(false),
            moved: Cell::new(now()),
            look,
            device,
            watchers: RefCell::default(),
            _admitted: admitted,
        };
        let entries = (SENDS + RECEIVES + RECEIVES_MORE) as c_int;
        // SAFETY: context and channel live.
        endpoint.cq = unsafe { (lib.ibv_create_cq)(context, entries, std::ptr::null_mut(), events, 0) };
        if endpoint.cq.is_null() {
            return Err(io::Error::last_os_error());
        }
        let mut init = QpInit {
            qp_context: std::ptr::null_mut(),
            send_cq: endpoint.cq,
            recv_cq: endpoint.cq,
            srq: std::ptr::null_mut(),
            max_send_wr: SENDS as u32,
            max_recv_wr: (RECEIVES + RECEIVES_MORE) as u32,
            max_send_sge: 1,
            max_recv_sge: 1,
            max_inline_data: 0,
            qp_type: ffi::QP_RELIABLE,
            sq_sig_all: 0,
        };
        // SAFETY: identifier, domain and completion queue live.
        failed(unsafe { (lib.rdma_create_qp)(endpoint.id.raw, endpoint.device.pd, &mut init) })?;
        {
            let mut state = endpoint.state.borrow_mut();
            state.credits = RECEIVES;
            for _ in 0..RECEIVES + RECEIVES_MORE {
                endpoint.post_receive(&mut state)?;
            }
        }
        // SAFETY: the channel keeps its descriptor open, and it is borrowed for these calls only.
        let fd = unsafe { BorrowedFd::borrow_raw((*events).fd) };
        crate::driver::os::set_nonblocking(std::os::fd::AsRawFd::as_raw_fd(&fd), true)?;
        let watched = PolledFd::new(fd)?;
        let endpoint = Rc::new(endpoint);
        let watcher = spawn(hear(Rc::downgrade(&endpoint), watched));
        endpoint.watchers.borrow_mut().push(watcher);
        Ok(endpoint)
    }

    /// Accepts the connection request of the identifier.
    pub(super) fn accept(self: &Rc<Self>) -> io::Result<()> {
        // SAFETY: the identifier lives; the parameters are copied.
        failed(unsafe { (self.lib.rdma_accept)(self.id.raw, &mut Id::params()) })?;
        self.watch_end();
        Ok(())
    }

    /// Connects to the resolved address.
    pub(super) async fn connect(self: &Rc<Self>) -> io::Result<()> {
        // SAFETY: as in `accept`.
        failed(unsafe { (self.lib.rdma_connect)(self.id.raw, &mut Id::params()) })?;
        self.id.channel.expect(ffi::EVENT_ESTABLISHED).await?;
        self.watch_end();
        Ok(())
    }

    /// Watches for the end of the connection.
    fn watch_end(self: &Rc<Self>) {
        let (channel, weak) = (self.id.channel.clone(), Rc::downgrade(self));
        let watcher = spawn(async move {
            while let Ok(event) = channel.next().await {
                if event.kind == ffi::EVENT_ESTABLISHED {
                    continue;
                }
                let Some(endpoint) = Weak::upgrade(&weak) else { return };
                tracing::debug!(event = event.kind, status = event.status, "RDMA connection closed");
                // Data that arrived before must still be seen.
                let _ = endpoint.progress();
                endpoint.over.set(true);
                endpoint.rung.notify_all();
            }
        });
        self.watchers.borrow_mut().push(watcher);
    }

    pub(super) fn look(&self) -> Duration {
        self.look
    }

    pub(super) fn moved(&self) -> Instant {
        self.moved.get()
    }

    pub(super) fn is_over(&self) -> bool {
        self.over.get() || self.closing.get()
    }

    pub(super) fn has_item(&self) -> bool {
        !self.state.borrow().inbox.is_empty()
    }

    pub(super) fn next_is_long(&self) -> bool {
        matches!(self.state.borrow().inbox.front(), Some(Item::Long(..)))
    }

    pub(super) fn has_read(&self) -> bool {
        self.state.borrow().read_done
    }

    pub(super) fn has_written(&self, number: u64) -> bool {
        self.state.borrow().writes_done >= number
    }

    /// Returns whether one more operation may be in flight; some slots are reserved for releasing the peer's buffers.
    pub(super) fn has_room(&self) -> bool {
        self.state.borrow().sends.len() < SENDS - RECEIVES_MORE
    }

    pub(super) fn may_send(&self) -> bool {
        self.has_room() && self.state.borrow().credits > 0
    }

    pub(super) fn may_lend(&self, len: usize) -> bool {
        let state = self.state.borrow();
        state.lent.is_empty() || state.lent_bytes + len <= LENT_MAX
    }

    /// Returns an error if the connection has failed; it may be over without one.
    pub(super) fn intact(&self) -> io::Result<()> {
        match &self.state.borrow().broken {
            Some((kind, text)) => Err(io::Error::new(*kind, text.clone())),
            None => Ok(()),
        }
    }

    /// Returns an error unless the connection can be used.
    fn check(&self) -> io::Result<()> {
        self.intact()?;
        if self.is_over() { Err(io::ErrorKind::BrokenPipe.into()) } else { Ok(()) }
    }

    /// Requests an event for the next completion.
    pub(super) fn arm(&self) -> io::Result<()> {
        // SAFETY: the queue lives as long as `self`.
        let result = unsafe { ffi::req_notify_cq(self.cq) };
        if result == 0 { Ok(()) } else { Err(io::Error::from_raw_os_error(result)) }
    }

    fn post_receive(&self, state: &mut State) -> io::Result<()> {
        let mut buf = self.device.eager.get();
        let mut piece = self.device.own(&mut buf)?;
        let place = state.receives.insert(buf);
        let mut request = RecvRequest {
            wr_id: RECEIVE | place as u64,
            next: std::ptr::null_mut(),
            pieces: &mut piece,
            piece_count: 1,
        };
        // SAFETY: the queue pair lives until `self` is dropped; the buffer is kept until its completion or until then.
        let result = unsafe { ffi::post_recv((*self.id.raw).qp, &mut request) };
        if result == 0 { Ok(()) } else { Err(io::Error::from_raw_os_error(result)) }
    }

    /// Posts a send, a read or a write; the caller keeps its memory.
    fn post(&self, opcode: c_int, wr_id: u64, mut piece: ScatterGatherEntry, remote: (u64, u32)) -> io::Result<()> {
        let mut request = SendRequest {
            wr_id,
            next: std::ptr::null_mut(),
            pieces: &mut piece,
            piece_count: 1,
            opcode,
            flags: ffi::SIGNALED,
            immediate: 0,
            remote_addr: remote.0,
            rkey: remote.1,
            rest: [0; 19],
        };
        // SAFETY: the queue pair lives until `self` is dropped; callers keep the memory in `state` until the completion
        // or until then.
        let result = unsafe { ffi::post_send((*self.id.raw).qp, &mut request) };
        self.moved.set(now());
        if result == 0 { Ok(()) } else { Err(io::Error::from_raw_os_error(result)) }
    }

    /// Handles completions, up to the limit of one turn; at the limit it notifies for the next turn.
    pub(super) fn progress(&self) -> io::Result<()> {
        let mut found = [WorkCompletion::default(); 32];
        for batch in 0..=BATCHES_A_TURN {
            if batch == BATCHES_A_TURN {
                // A peer may send as fast as receives are posted again.
                self.rung.notify_all();
                break;
            }
            // SAFETY: the queue lives as long as `self`.
            let count = unsafe { ffi::poll_cq(self.cq, &mut found) };
            let Ok(count) = usize::try_from(count) else { return Err(io::Error::other("polling a completion queue")) };
            if count == 0 {
                break;
            }
            self.moved.set(now());
            for completion in &found[..count] {
                self.complete(completion)?;
            }
        }
        self.intact()
    }

    fn complete(&self, completion: &WorkCompletion) -> io::Result<()> {
        let mut state = self.state.borrow_mut();
        let place = completion.wr_id as u32 as usize;
        let kind = completion.wr_id & !u64::from(u32::MAX);
        // The device does not use the buffer any more, whatever the status.
        let received = (kind == RECEIVE).then(|| state.receives.remove(place));
        if kind == SEND || kind == WRITE {
            drop(state.sends.remove(place));
        }
        if completion.status != 0 {
            if completion.status == ffi::STATUS_FLUSHED {
                self.over.set(true);
            } else if state.broken.is_none() {
                let text = format!("an RDMA operation failed with status {}", completion.status);
                state.broken = Some((io::ErrorKind::ConnectionReset, text));
            }
            return Ok(());
        }
        match kind {
            READ => state.read_done = true,
            WRITE => state.writes_done += 1,
            RECEIVE => {
                let mut buf = received.expect("a receive has its buffer");
                buf.set_len((completion.byte_len as usize).min(EAGER_LEN));
                if self.received(&mut state, buf.freeze())? {
                    state.owed += 1;
                }
            }
            _ => {}
        }
        Ok(())
    }

    /// Handles a message of the peer; returns true when it used a counted buffer of which nothing is kept.
    fn received(&self, state: &mut State, mut buf: Buf) -> io::Result<bool> {
        let wrong = |state: &mut State| {
            state.broken = Some((io::ErrorKind::InvalidData, "the peer does not keep to the rules over RDMA".into()));
            Ok(false)
        };
        if buf.len() < HEAD_LEN || state.inbox.len() >= INBOX_MAX {
            return wrong(state);
        }
        let (kind, credits, read) = (number(&buf, 0), number(&buf, 4), number(&buf, 8));
        state.credits += credits as usize;
        if state.credits > RECEIVES || read as usize > state.lent.len() {
            return wrong(state);
        }
        for run in state.lent.drain(..read as usize) {
            state.lent_bytes -= run.len();
        }
        buf.advance(HEAD_LEN);
        match kind {
            KIND_TELL => {
                self.post_receive(state)?;
                Ok(false)
            }
            KIND_BYTES if !buf.is_empty() => {
                // Another buffer is posted when this one was consumed.
                state.inbox.push_back(Item::Bytes(buf));
                Ok(false)
            }
            KIND_LONG if buf.len() == LONG_LEN => {
                let addr = u64::from_le_bytes(buf[..8].try_into().expect("8 bytes"));
                let (key, len) = (number(&buf, 8), number(&buf, 12) as usize);
                if len == 0 {
                    return wrong(state);
                }
                state.inbox.push_back(Item::Long(addr, key, len));
                self.post_receive(state)?;
                Ok(true)
            }
            _ => wrong(state),
        }
    }

    /// Copies as many eager bytes as are available and fit.
    pub(super) fn take_eager(&self, buf: &mut BufMut) {
        let mut state = self.state.borrow_mut();
        while let Some(Item::Bytes(bytes)) = state.inbox.front_mut() {
            let len = bytes.len().min(buf.spare());
            buf.extend_from_slice(&bytes[..len]);
            bytes.advance(len);
            if !bytes.is_empty() {
                return;
            }
            state.inbox.pop_front();
            match self.post_receive(&mut state) {
                Ok(()) => state.owed += 1,
                // The connection continues with fewer buffers, or has ended.
                Err(error) => tracing::debug!(%error, "cannot post an RDMA receive buffer"),
            }
        }
    }

    /// Returns an eager buffer with space reserved for its header.
    pub(super) fn eager(&self) -> BufMut {
        let mut buf = self.device.eager.get();
        buf.extend_from_slice(&[0; HEAD_LEN]);
        buf
    }

    fn send(&self, kind: u32, mut buf: BufMut) -> io::Result<()> {
        let mut state = self.state.borrow_mut();
        let (owed, read) = (std::mem::take(&mut state.owed), std::mem::take(&mut state.read));
        for (at, value) in [kind, owed, read, 0].into_iter().enumerate() {
            buf[at * 4..at * 4 + 4].copy_from_slice(&value.to_le_bytes());
        }
        let piece = self.device.piece(buf.region(), buf.as_ptr(), buf.len());
        let piece = piece.ok_or_else(|| io::Error::from(io::ErrorKind::OutOfMemory))?;
        let place = state.sends.insert(buf.freeze());
        drop(state);
        self.post(ffi::OP_SEND, SEND | place as u64, piece, (0, 0))
    }

    pub(super) fn send_eager(&self, buf: BufMut) -> io::Result<()> {
        self.check()?;
        self.state.borrow_mut().credits -= 1;
        self.send(KIND_BYTES, buf)
    }

    /// Tells the peer of released buffers and read long data, if many are pending and there is space to send.
    pub(super) fn tell(&self) -> io::Result<()> {
        let state = self.state.borrow();
        let urgent = state.read > 0 || state.owed as usize >= RECEIVES / 2;
        let room = state.sends.len() < SENDS - RECEIVES_MORE / 2;
        drop(state);
        if !urgent || !room || self.is_over() {
            return Ok(());
        }
        let buf = self.eager();
        self.send(KIND_TELL, buf)
    }

    /// Shuts the connection down once sent data has arrived, or after `DRAIN`.
    pub(super) fn shutdown(this: &Rc<Self>) {
        if this.closing.replace(true) {
            return;
        }
        this.rung.notify_all();
        let endpoint = this.clone();
        drop(spawn(async move {
            // Bounded even while the peer is active: one that receives nothing must not keep the connection.
            let deadline = now() + DRAIN;
            let busy = |endpoint: &RdmaEndpoint| {
                let state = endpoint.state.borrow();
                !state.sends.is_empty() || !state.lent.is_empty()
            };
            while !endpoint.over.get() && busy(&endpoint) && now() < deadline && endpoint.progress().is_ok() {
                sleep(DRAIN_LOOK).await;
            }
            // SAFETY: the identifier lives.  The result is reported as an event.
            unsafe { (endpoint.lib.rdma_disconnect)(endpoint.id.raw) };
        }));
    }
}

/// Waits for completion events and notifies the endpoint.
async fn hear(weak: Weak<RdmaEndpoint>, watched: PolledFd) {
    while watched.ready().await.is_ok() {
        let Some(endpoint) = weak.upgrade() else { return };
        let (mut cq, mut context, mut events) = (std::ptr::null_mut(), std::ptr::null_mut(), 0);
        // SAFETY: channel and queue live as long as the endpoint; each event is acknowledged once.
        unsafe {
            while (endpoint.lib.ibv_get_cq_event)(endpoint.events, &mut cq, &mut context) == 0 {
                events += 1;
            }
            if events > 0 {
                (endpoint.lib.ibv_ack_cq_events)(endpoint.cq, events);
            }
        }
        endpoint.rung.notify_all();
    }
}

impl Drop for RdmaEndpoint {
    fn drop(&mut self) {
        self.watchers.take().into_iter().for_each(JoinHandle::abort);
        // SAFETY: no reference to them is left; once the queue pair is gone the device does not access the buffers,
        // which are dropped after this.  All events of the completion queue were acknowledged.
        unsafe {
            if !(*self.id.raw).qp.is_null() {
                (self.lib.rdma_destroy_qp)(self.id.raw);
            }
            if !self.cq.is_null() {
                (self.lib.ibv_destroy_cq)(self.cq);
            }
            (self.lib.ibv_destroy_comp_channel)(self.events);
        }
    }
}
