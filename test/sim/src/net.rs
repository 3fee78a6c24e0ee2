//! Listeners and connections: delays, partial receives, back-pressure, cuts, resets.
//!
//! A connection has two ends; what one sends arrives at the other in order, segment by segment, each at its time.
//! Between connections there is no order.

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};

use forebay_reactor::driver::{Completion, Handle, Op, OpKey};
use forebay_reactor::{Addr, BufList};

use crate::core::{Core, Event};
use crate::fs::os_error;
use crate::trace::What;

const EBADF: i32 = 9;
const EPIPE: i32 = 32;
const EADDRINUSE: i32 = 98;
const ECONNRESET: i32 = 104;
const ECONNREFUSED: i32 = 111;
const ECANCELED: i32 = 125;

/// Network event.
#[derive(Debug)]
pub(crate) enum NetEvent {
    /// A connect reaches its goal.
    Connect(u64),
    /// A segment reaches the end `side` of a connection.
    Data { conn: usize, side: usize, data: BufList },
    /// The other end has sent its last byte.
    Fin { conn: usize, side: usize },
}

/// One end of a connection.
#[derive(Debug, Default)]
struct End {
    /// Arrived, not yet received.
    arrived: BufList,
    /// In flight to this end.
    under_way: usize,
    /// Arrival of the last segment sent to this end, in nanoseconds.
    last_at: u64,
    fin: bool,
    reset: bool,
    /// Set once this end has closed or shut down: it sends nothing more, and receives nothing more.
    ended: bool,
    /// Set once the last byte of this end is sent.
    sent_last: bool,
    /// Operations that wait, with the bytes each has moved so far.
    recvs: VecDeque<(OpKey, Op, usize)>,
    sends: VecDeque<(OpKey, Op, usize)>,
}

#[derive(Debug)]
struct Conn {
    ends: [End; 2],
    /// Silent for good: nothing arrives any more, without an error.
    cut: bool,
    addr: Addr,
}

#[derive(Debug)]
struct Listening {
    addr: Addr,
    accepts: VecDeque<(OpKey, Op)>,
    backlog: VecDeque<(Handle, Addr)>,
}

#[derive(Debug)]
struct Connecting {
    key: OpKey,
    op: Op,
}

/// The network.
#[derive(Debug, Default)]
pub(crate) struct Net {
    listeners: BTreeMap<Handle, Listening>,
    conns: Vec<Conn>,
    socks: BTreeMap<Handle, (usize, usize)>,
    connecting: BTreeMap<u64, Connecting>,
    next_connect: u64,
    next_port: u16,
}

fn done(core: &mut Core, key: OpKey, op: Op, result: io::Result<u64>, peer: Option<Addr>) {
    let number = *result.as_ref().unwrap_or(&0);
    core.log(What::Net, if result.is_ok() { "done" } else { "failed" }, [key.0, number, 0]);
    core.done.push(Completion { key, result, op, peer });
}

impl Net {
    pub(crate) fn listen(&mut self, handle: Handle, addr: &Addr) -> io::Result<Addr> {
        let mut addr = addr.clone();
        if let Addr::Tcp(tcp) = &mut addr
            && tcp.port() == 0
        {
            const FIRST_PORT: u16 = 32768;
            self.next_port = self.next_port.max(FIRST_PORT) + 1;
            tcp.set_port(self.next_port);
        }
        if self.listeners.values().any(|other| other.addr == addr) {
            return os_error(EADDRINUSE);
        }
        let listening = Listening { addr: addr.clone(), accepts: VecDeque::new(), backlog: VecDeque::new() };
        self.listeners.insert(handle, listening);
        Ok(addr)
    }

    pub(crate) fn submit(&mut self, core: &mut Core, key: OpKey, op: Op) {
        match op {
            Op::Accept { listener } => {
                let Some(listening) = self.listeners.get_mut(&listener) else {
                    return done(core, key, op, os_error(EBADF), None);
                };
                listening.accepts.push_back((key, op));
                serve_accepts(core, listening);
            }
            Op::Connect { .. } => {
                let number = self.next_connect;
                self.next_connect += 1;
                self.connecting.insert(number, Connecting { key, op });
                let delay = core.rng.range(core.faults.net.latency.clone());
                core.schedule(delay, Event::Net(NetEvent::Connect(number)));
            }
            Op::Recv { sock, .. } => {
                let Some(&(conn, side)) = self.socks.get(&sock) else {
                    return done(core, key, op, os_error(EBADF), None);
                };
                self.conns[conn].ends[side].recvs.push_back((key, op, 0));
                self.serve_recvs(core, conn, side);
            }
            Op::Send { sock, .. } => {
                let Some(&(conn, side)) = self.socks.get(&sock) else {
                    return done(core, key, op, os_error(EBADF), None);
                };
                self.conns[conn].ends[side].sends.push_back((key, op, 0));
                self.serve_sends(core, conn, side);
            }
            _ => unreachable!("not an operation on a socket: {op:?}"),
        }
    }

    pub(crate) fn happen(&mut self, core: &mut Core, event: NetEvent) {
        match event {
            NetEvent::Connect(number) => self.connect(core, number),
            NetEvent::Data { conn, side, data } => {
                let connection = &mut self.conns[conn];
                let end = &mut connection.ends[side];
                if connection.cut || end.reset {
                    return;
                }
                end.under_way -= data.len();
                if end.ended {
                    // No process receives it, and the sender gets an error.
                    return self.reset(core, conn);
                }
                core.log(What::Net, "arrived", [conn as u64, side as u64, data.len() as u64]);
                end.arrived.append(data);
                self.serve_recvs(core, conn, side);
            }
            NetEvent::Fin { conn, side } => {
                if !self.conns[conn].cut {
                    core.log(What::Net, "end of stream", [conn as u64, side as u64, 0]);
                    self.conns[conn].ends[side].fin = true;
                    self.serve_recvs(core, conn, side);
                }
            }
        }
    }

    fn connect(&mut self, core: &mut Core, number: u64) {
        let Some(Connecting { key, op }) = self.connecting.remove(&number) else { return };
        let Op::Connect { addr } = &op else { unreachable!("only connects are kept there") };
        let addr = addr.clone();
        let refused = core.rng.ppm(core.faults.net.refuse_ppm);
        let Some(listening) = self.listeners.values_mut().find(|listening| listening.addr == addr && !refused) else {
            return done(core, key, op, os_error(ECONNREFUSED), None);
        };
        let conn = self.conns.len();
        self.conns.push(Conn { ends: Default::default(), cut: false, addr: addr.clone() });
        let (client, server) = (core.handle(), core.handle());
        self.socks.insert(client, (conn, 0));
        self.socks.insert(server, (conn, 1));
        let peer = match &addr {
            Addr::Tcp(_) => {
                let port = 1024 + (conn % 60_000) as u16;
                Addr::Tcp(SocketAddr::new(IpAddr::V4(Ipv4Addr::LOCALHOST), port))
            }
            Addr::Unix(_) => Addr::Unix(Default::default()),
        };
        listening.backlog.push_back((server, peer));
        core.log(What::Net, "connected", [conn as u64, client.0, server.0]);
        serve_accepts(core, listening);
        done(core, key, op, Ok(client.0), None);
    }

    /// Hands out what has arrived.
    fn serve_recvs(&mut self, core: &mut Core, conn: usize, side: usize) {
        let mut took = false;
        let end = &mut self.conns[conn].ends[side];
        while let Some((key, mut op, mut got)) = end.recvs.pop_front() {
            let Op::Recv { buf, all, .. } = &mut op else { unreachable!("only receives wait there") };
            if end.reset {
                done(core, key, op, os_error(ECONNRESET), None);
                continue;
            }
            let mut take = end.arrived.len().min(buf.spare());
            if take > 1 && !*all && core.faults.net.partial_recv && core.rng.coin() {
                take = 1 + core.rng.below(take as u64) as usize;
            }
            if take > 0 {
                buf_append(buf, &end.arrived.slice(0..take));
                end.arrived = end.arrived.slice(take..end.arrived.len());
                got += take;
                took = true;
            }
            let over = end.fin || end.ended;
            if buf.spare() == 0 || (take > 0 && !*all) || over {
                done(core, key, op, Ok(got as u64), None);
            } else {
                end.recvs.push_front((key, op, got));
                break;
            }
        }
        if took {
            self.serve_sends(core, conn, 1 - side);
        }
    }

    /// Cuts what waits to be sent into segments, as far as the receiver has room.
    fn serve_sends(&mut self, core: &mut Core, conn: usize, side: usize) {
        let connection = &mut self.conns[conn];
        let [first, second] = &mut connection.ends;
        let (own, other) = if side == 0 { (first, second) } else { (second, first) };
        while let Some((key, op, mut sent)) = own.sends.pop_front() {
            let Op::Send { bufs, .. } = &op else { unreachable!("only sends wait there") };
            if own.reset {
                done(core, key, op, os_error(ECONNRESET), None);
                continue;
            }
            if own.sent_last {
                done(core, key, op, os_error(EPIPE), None);
                continue;
            }
            let mut reset = false;
            while sent < bufs.len() {
                let faults = &core.faults.net;
                let room = faults.window.saturating_sub(other.under_way + other.arrived.len());
                if room == 0 {
                    break;
                }
                let len = (bufs.len() - sent).min(room).min(1 + core.rng.below(faults.segment_max as u64) as usize);
                let mut at = core.now + core.rng.range(faults.latency.clone());
                if core.rng.ppm(faults.stall_ppm) {
                    at += core.rng.range(faults.stall.clone());
                }
                if core.rng.ppm(faults.cut_ppm) {
                    connection.cut = true;
                    core.log(What::Fault, "connection cut", [conn as u64, side as u64, 0]);
                } else if core.rng.ppm(faults.reset_ppm) {
                    reset = true;
                    break;
                }
                other.last_at = other.last_at.max(at);
                other.under_way += len;
                let data = bufs.slice(sent..sent + len);
                core.schedule_at(other.last_at, Event::Net(NetEvent::Data { conn, side: 1 - side, data }));
                sent += len;
            }
            if reset {
                own.sends.push_front((key, op, sent));
                return self.reset(core, conn);
            }
            if sent < bufs.len() {
                own.sends.push_front((key, op, sent));
                break;
            }
            done(core, key, op, Ok(sent as u64), None);
        }
    }

    /// Both ends learn that the connection is closed; data in flight is lost.
    fn reset(&mut self, core: &mut Core, conn: usize) {
        core.log(What::Fault, "connection reset", [conn as u64, 0, 0]);
        for end in &mut self.conns[conn].ends {
            end.reset = true;
            end.arrived = BufList::new();
        }
        for side in 0..2 {
            self.serve_recvs(core, conn, side);
            self.serve_sends(core, conn, side);
        }
    }

    /// Resets those connections to `addr` (or all) that chance picks; returns how many.
    pub(crate) fn reset_some(&mut self, core: &mut Core, addr: Option<&Addr>, ppm: u32) -> usize {
        let picked = self.pick(core, addr, ppm);
        picked.iter().for_each(|&conn| self.reset(core, conn));
        picked.len()
    }

    /// Silences those connections to `addr` (or all) that chance picks; returns how many.
    pub(crate) fn cut_some(&mut self, core: &mut Core, addr: Option<&Addr>, ppm: u32) -> usize {
        let picked = self.pick(core, addr, ppm);
        for &conn in &picked {
            self.conns[conn].cut = true;
            core.log(What::Fault, "connection cut", [conn as u64, 0, 0]);
        }
        picked.len()
    }

    fn pick(&self, core: &mut Core, addr: Option<&Addr>, ppm: u32) -> Vec<usize> {
        let live = self.conns.iter().enumerate().filter(|(_, conn)| {
            !conn.cut && conn.ends.iter().all(|end| !end.reset) && addr.is_none_or(|addr| *addr == conn.addr)
        });
        live.map(|(index, _)| index).filter(|_| core.rng.ppm(ppm)).collect()
    }

    /// Returns whether the last byte of the other end, or a reset, has arrived.
    pub(crate) fn is_peer_closed(&self, handle: Handle) -> bool {
        let Some(&(conn, side)) = self.socks.get(&handle) else { return true };
        let end = &self.conns[conn].ends[side];
        end.fin || end.reset || end.ended
    }

    /// Ends an end: what it sent before still arrives, then the other end sees the end of the stream.
    pub(crate) fn shutdown(&mut self, core: &mut Core, handle: Handle) {
        let Some(&(conn, side)) = self.socks.get(&handle) else { return };
        self.conns[conn].ends[side].ended = true;
        self.send_last(core, conn, side);
        self.serve_recvs(core, conn, side);
        self.serve_sends(core, conn, side);
    }

    /// Ends one direction: what this end sent before still arrives, then the other end sees the end of the stream.
    pub(crate) fn shutdown_send(&mut self, core: &mut Core, handle: Handle) {
        let Some(&(conn, side)) = self.socks.get(&handle) else { return };
        self.send_last(core, conn, side);
        self.serve_sends(core, conn, side);
    }

    fn send_last(&mut self, core: &mut Core, conn: usize, side: usize) {
        let [first, second] = &mut self.conns[conn].ends;
        let (own, other) = if side == 0 { (first, second) } else { (second, first) };
        if !own.sent_last {
            own.sent_last = true;
            other.last_at = other.last_at.max(core.now + core.faults.net.latency.start);
            let at = other.last_at;
            core.schedule_at(at, Event::Net(NetEvent::Fin { conn, side: 1 - side }));
        }
    }

    /// True when the handle was a socket.
    pub(crate) fn close(&mut self, core: &mut Core, handle: Handle) -> bool {
        if let Some(listening) = self.listeners.remove(&handle) {
            for (key, op) in listening.accepts {
                done(core, key, op, os_error(ECANCELED), None);
            }
            for (sock, _) in listening.backlog {
                if let Some(&(conn, _)) = self.socks.get(&sock) {
                    self.reset(core, conn);
                }
            }
            return true;
        }
        self.shutdown(core, handle);
        self.socks.remove(&handle).is_some()
    }

    /// Ends the waiting of an operation; one that has moved bytes ends with their number.
    pub(crate) fn cancel(&mut self, core: &mut Core, key: OpKey) {
        let mut found = None;
        for listening in self.listeners.values_mut() {
            found = found.or_else(|| take(&mut listening.accepts, |(other, _)| *other == key).map(|(_, op)| (op, 0)));
        }
        for end in self.conns.iter_mut().flat_map(|conn| &mut conn.ends) {
            for queue in [&mut end.recvs, &mut end.sends] {
                found = found.or_else(|| take(queue, |(other, ..)| *other == key).map(|(_, op, moved)| (op, moved)));
            }
        }
        if found.is_none() {
            let number =
                self.connecting.iter().find(|(_, connecting)| connecting.key == key).map(|(number, _)| *number);
            let connecting = number.and_then(|number| self.connecting.remove(&number));
            found = connecting.map(|connecting| (connecting.op, 0));
        }
        if let Some((op, moved)) = found {
            let result = if moved > 0 { Ok(moved as u64) } else { os_error(ECANCELED) };
            done(core, key, op, result, None);
        }
    }

    /// The machine is off: nothing is left.
    pub(crate) fn crash(&mut self) {
        let next_port = self.next_port;
        *self = Self { next_port, ..Self::default() };
    }
}

fn serve_accepts(core: &mut Core, listening: &mut Listening) {
    while !listening.accepts.is_empty() && !listening.backlog.is_empty() {
        let Some(((key, op), (sock, peer))) = listening.accepts.pop_front().zip(listening.backlog.pop_front()) else {
            return;
        };
        done(core, key, op, Ok(sock.0), Some(peer));
    }
}

fn buf_append(buf: &mut forebay_reactor::BufMut, data: &BufList) {
    data.parts().iter().for_each(|part| buf.extend_from_slice(part));
}

fn take<T>(queue: &mut VecDeque<T>, mut is_it: impl FnMut(&T) -> bool) -> Option<T> {
    let index = queue.iter().position(&mut is_it)?;
    queue.remove(index)
}
