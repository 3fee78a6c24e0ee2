//! Messages with a wrong form: cut short, of a wrong size, with other descriptors than theirs, or no messages at all.

use std::fs::File;
use std::net::Shutdown;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::time::{Duration, Instant};

use forebay_load::Dice;
use rustix::event::{EventfdFlags, eventfd};
use rustix::fs::{Mode, OFlags};

use super::DeviceReaction::{self, Accepted, Ended, Ignored};
use super::{HostileCase, Tolerance};
use crate::error::{FrontEndError, Result};
use crate::front_end::FrontEnd;
use crate::front_end::FrontEndStage::{Connected, Negotiated, Running};
use crate::memory::{PAGE, memory_file};
use crate::message::{
    self, HEADER, InflightDescription, IotlbMessage, NEED_REPLY, NO_DESCRIPTOR, REPLY, RegionDescription,
    RingAddresses, VERSION, header, protocol, request,
};

/// Time for which a front-end stalls.
const STALL: Duration = Duration::from_millis(300);
/// Bytes that a front-end sends which never reads.
const FLOOD: usize = 64 << 20;

/// Message that is as it should be.
struct GoodMessage {
    name: &'static str,
    request: u32,
    payload: Vec<u8>,
    descriptors: usize,
    protocol: u64,
}

/// Returns one message of each form that a front-end sends.
fn good_messages() -> Vec<GoodMessage> {
    let region = RegionDescription { guest: 0, size: PAGE, user: 0x10_0000, offset: 0 };
    let inflight = InflightDescription { size: PAGE, offset: 0, queues: 1, queue_size: 16 };
    let addresses =
        RingAddresses { descriptors: 0x10_0000, used: 0x10_0400, available: 0x10_0800, ..Default::default() };
    let good = |name, request, payload: &[u8], descriptors, protocol| GoodMessage {
        name,
        request,
        payload: payload.to_vec(),
        descriptors,
        protocol,
    };
    let number = 0_u64.to_ne_bytes();
    let state = message::state(0, 16);
    vec![
        good("get-features", request::GET_FEATURES, &[], 0, 0),
        good("set-features", request::SET_FEATURES, &(1_u64 << 32).to_ne_bytes(), 0, 0),
        good("set-protocol-features", request::SET_PROTOCOL_FEATURES, &number, 0, 0),
        good("set-mem-table", request::SET_MEM_TABLE, &message::memory_table(1, &[region]), 1, 0),
        good("set-log-base", request::SET_LOG_BASE, &message::log(PAGE, 0), 1, protocol::LOG_SHMFD),
        good("set-vring-num", request::SET_VRING_NUM, &state, 0, 0),
        good("set-vring-addr", request::SET_VRING_ADDR, &addresses.encode(), 0, 0),
        good("set-vring-base", request::SET_VRING_BASE, &message::state(0, 0), 0, 0),
        good("get-vring-base", request::GET_VRING_BASE, &message::state(0, 0), 0, 0),
        good("set-vring-kick", request::SET_VRING_KICK, &number, 1, 0),
        good("set-vring-call", request::SET_VRING_CALL, &number, 1, 0),
        good("set-vring-err", request::SET_VRING_ERR, &number, 1, 0),
        good("set-vring-enable", request::SET_VRING_ENABLE, &message::state(0, 1), 0, 0),
        good("set-backend-req-fd", request::SET_BACKEND_REQ_FD, &[], 1, protocol::BACKEND_REQ),
        good("get-config", request::GET_CONFIG, &message::config(0, 60, 0, &[0; 60]), 0, protocol::CONFIG),
        good("set-config", request::SET_CONFIG, &message::config(32, 1, 0, &[1]), 0, protocol::CONFIG),
        good("get-inflight-fd", request::GET_INFLIGHT_FD, &inflight.encode(), 0, protocol::INFLIGHT_SHMFD),
        good("set-inflight-fd", request::SET_INFLIGHT_FD, &inflight.encode(), 1, protocol::INFLIGHT_SHMFD),
        good("add-mem-reg", request::ADD_MEM_REG, &region.encode(), 1, protocol::CONFIGURE_MEM_SLOTS),
        good("rem-mem-reg", request::REM_MEM_REG, &region.encode(), 0, protocol::CONFIGURE_MEM_SLOTS),
        good("set-status", request::SET_STATUS, &15_u64.to_ne_bytes(), 0, protocol::STATUS),
    ]
}

/// Sends a message that asks for an acknowledgement, and returns what the device does about it.
pub(super) fn tell(
    front_end: &FrontEnd,
    request: u32,
    payload: &[u8],
    descriptors: &[BorrowedFd<'_>],
) -> Result<DeviceReaction> {
    front_end.send_raw(&message::encode(request, VERSION | NEED_REPLY, payload), descriptors)?;
    answer(front_end)
}

/// Sends any bytes, and returns what the device does about them.
fn say(front_end: &FrontEnd, bytes: &[u8]) -> Result<DeviceReaction> {
    front_end.send_raw(bytes, &[])?;
    answer(front_end)
}

fn answer(front_end: &FrontEnd) -> Result<DeviceReaction> {
    let reply = front_end.receive()?;
    // Messages with a reply of their own have no number, and the sign of an error is a lack of payload.
    match (reply.number(), reply.payload.is_empty()) {
        (Some(0), _) | (None, false) => Ok(Accepted),
        (Some(value), _) => Ok(DeviceReaction::Refused(value)),
        (None, true) => Ok(DeviceReaction::Refused(0)),
    }
}

fn file() -> Result<File> {
    memory_file(64 * PAGE)
}

/// Returns all cases.
pub(super) fn cases() -> Vec<HostileCase> {
    let mut all = truncated();
    all.extend(sizes());
    all.extend(headers());
    all.extend(descriptors());
    all.extend(timing());
    all
}

fn truncated() -> Vec<HostileCase> {
    let cases = good_messages().into_iter().map(|good| {
        let name = format!("{} truncated at every byte", good.name);
        let attack = move |front_end: &mut FrontEnd| {
            let bytes = message::encode(good.request, VERSION, &good.payload);
            let file = file()?;
            let descriptors = vec![file.as_fd(); good.descriptors];
            for length in 1..bytes.len() {
                // The device may end the connection before the last byte.
                let sent = front_end.send_raw(&bytes[..length], &descriptors);
                if !matches!(sent, Ok(()) | Err(FrontEndError::Ended)) {
                    return sent.map(|()| Ignored);
                }
                front_end.socket.stream().shutdown(Shutdown::Write)?;
                if front_end.ends()? != Ended {
                    return Ok(Ignored);
                }
                front_end.reconnect()?;
            }
            Ok(Ended)
        };
        HostileCase::new(name, Connected, Tolerance::Refusal, attack)
    });
    cases.collect()
}

fn sizes() -> Vec<HostileCase> {
    let mut all = Vec::new();
    for good in good_messages() {
        let length = good.payload.len();
        let mut add = |what: String, size: usize, tolerance: Tolerance| {
            let (request, count, needs) = (good.request, good.descriptors, good.protocol);
            let mut payload = good.payload.clone();
            payload.resize(size, 0);
            let attack = move |front_end: &mut FrontEnd| {
                let file = file()?;
                tell(front_end, request, &payload, &vec![file.as_fd(); count])
            };
            let case = HostileCase::new(format!("{} {what}", good.name), Negotiated, tolerance, attack);
            all.push(case.with_protocol(needs | protocol::REPLY_ACK));
        };
        if length == 0 {
            add("with a payload".into(), 8, Tolerance::Any);
            continue;
        }
        // Some front-ends send the descriptions of in-flight regions without the padding at their end.
        let short = if good.protocol == protocol::INFLIGHT_SHMFD { Tolerance::Any } else { Tolerance::Refusal };
        add("a byte too short".into(), length - 1, short);
        add("a byte too long".into(), length + 1, Tolerance::Refusal);
        add("without a payload".into(), 0, Tolerance::Refusal);
        add("padded to 4096 bytes".into(), 4096, Tolerance::Refusal);
    }
    all
}

fn headers() -> Vec<HostileCase> {
    let mut all = Vec::new();
    let mut add = |name: String, tolerance: Tolerance, bytes: Vec<u8>| {
        all.push(HostileCase::new(name, Negotiated, tolerance, move |front_end| say(front_end, &bytes)));
    };
    for version in [0, 2, 3] {
        let bytes = message::encode(request::GET_FEATURES, version, &[]);
        add(format!("version {version}"), Tolerance::Refusal, bytes);
    }
    add("a reply".into(), Tolerance::Refusal, message::encode(request::GET_FEATURES, VERSION | REPLY, &[]));
    add("reserved flags".into(), Tolerance::Any, message::encode(request::GET_FEATURES, VERSION | 0xFFFF_FFF0, &[]));
    for size in [1 << 16, 1 << 20, 1 << 31, u32::MAX - 11, u32::MAX] {
        let bytes = header(request::SET_MEM_TABLE, VERSION, size, &[0; 4096]);
        add(format!("size {size:#x}"), Tolerance::Refusal, bytes);
    }
    for request in [0, 44, 255, 0x100, 0x0001_0001, i32::MAX as u32, u32::MAX] {
        let bytes = message::encode(request, VERSION | NEED_REPLY, &[0; 8]);
        add(format!("unknown request {request:#x}"), Tolerance::Refusal, bytes);
    }
    add("64 KiB of zeroes".into(), Tolerance::Refusal, vec![0; 64 << 10]);
    add("64 KiB of ones".into(), Tolerance::Refusal, vec![0xFF; 64 << 10]);
    for seed in 0..8 {
        let mut dice = Dice::new(seed);
        let bytes = (0..8192).flat_map(|_| dice.roll().to_le_bytes()).collect();
        add(format!("64 KiB of rubbish, seed {seed}"), Tolerance::Refusal, bytes);
    }
    add("HTTP".into(), Tolerance::Refusal, b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n".to_vec());
    for seed in 0..4 {
        all.push(HostileCase::new(
            format!("messages of random requests, seed {seed}"),
            Negotiated,
            Tolerance::Any,
            move |fe| random_messages(fe, seed),
        ));
    }
    all
}

/// Sends well-formed messages of any request and payload, with any descriptors.
fn random_messages(front_end: &mut FrontEnd, seed: u64) -> Result<DeviceReaction> {
    let mut dice = Dice::new(seed);
    let (file, event) = (file()?, eventfd(0, EventfdFlags::CLOEXEC)?);
    for _ in 0..200 {
        let good = good_messages();
        let good = &good[dice.below(good.len())];
        let mut payload = good.payload.clone();
        if !payload.is_empty() && dice.once_in(2) {
            let at = dice.below(payload.len());
            payload[at] ^= dice.pick(&[1, 0x80, 0xFF]);
        }
        let descriptor = if dice.once_in(2) { file.as_fd() } else { event.as_fd() };
        let count = if dice.once_in(4) { dice.below(10) } else { good.descriptors };
        let sent = front_end.send_raw(&message::encode(good.request, VERSION, &payload), &vec![descriptor; count]);
        match sent {
            Err(FrontEndError::Ended) => front_end.reconnect()?,
            other => other?,
        }
    }
    front_end.socket.stream().shutdown(Shutdown::Write)?;
    front_end.ends()
}

/// Returns descriptors of many kinds that are neither memory nor events, by name.
pub(super) fn strange_descriptors() -> Result<Vec<(&'static str, OwnedFd)>> {
    let open = |path: &str, flags: OFlags| rustix::fs::open(path, flags | OFlags::CLOEXEC, Mode::empty());
    let (reading, writing) = rustix::pipe::pipe()?;
    let (socket, other) = UnixStream::pair()?;
    let (orphan, _) = UnixStream::pair()?;
    // Both ends must stay open for as long as the device has them: it gets a copy of the other one as well.
    let others = [("pipe to read from", reading), ("pipe to write to", writing), ("other socket", other.into())];
    let mut all = vec![
        ("directory", open("/", OFlags::RDONLY | OFlags::DIRECTORY)?),
        ("path", open("/", OFlags::PATH)?),
        ("null device", open("/dev/null", OFlags::RDWR)?),
        ("zero device", open("/dev/zero", OFlags::RDWR)?),
        ("file to read", open("/proc/self/exe", OFlags::RDONLY)?),
        ("socket", socket.into()),
        ("socket whose peer is closed", orphan.into()),
        ("empty file", memory_file(0)?.into()),
    ];
    all.extend(others);
    Ok(all)
}

fn descriptors() -> Vec<HostileCase> {
    let mut all = Vec::new();
    for good in good_messages() {
        let mut add = |count: usize, tolerance: Tolerance| {
            let (request, payload, needs) = (good.request, good.payload.clone(), good.protocol);
            let attack = move |front_end: &mut FrontEnd| {
                let file = file()?;
                tell(front_end, request, &payload, &vec![file.as_fd(); count])
            };
            let name = format!("{} with {count} descriptors", good.name);
            all.push(HostileCase::new(name, Negotiated, tolerance, attack).with_protocol(needs | protocol::REPLY_ACK));
        };
        if good.descriptors == 0 {
            add(1, Tolerance::Any);
            add(200, Tolerance::Any);
        } else {
            add(0, Tolerance::Refusal);
            add(2, Tolerance::Any);
            add(253, Tolerance::Any);
        }
    }
    for (name, request) in [
        ("kick", request::SET_VRING_KICK),
        ("call", request::SET_VRING_CALL),
        ("err", request::SET_VRING_ERR),
        ("back-end channel", request::SET_BACKEND_REQ_FD),
    ] {
        let name = format!("{name}: descriptors of other kinds");
        let case = HostileCase::new(name, Negotiated, Tolerance::Any, move |fe| {
            for (_, descriptor) in strange_descriptors()? {
                let payload: &[u8] = if request == request::SET_BACKEND_REQ_FD { &[] } else { &[0; 8] };
                match tell(fe, request, payload, &[descriptor.as_fd()]) {
                    Err(FrontEndError::Ended) => {
                        fe.reconnect()?;
                        fe.negotiate()?;
                    }
                    other => drop(other?),
                }
            }
            Ok(Accepted)
        });
        all.push(case.with_protocol(protocol::REPLY_ACK));
    }
    all.push(HostileCase::new("kick with a descriptor and the flag for none", Negotiated, Tolerance::Any, |fe| {
        let file = file()?;
        tell(fe, request::SET_VRING_KICK, &NO_DESCRIPTOR.to_ne_bytes(), &[file.as_fd()])
    }));
    let late = |fe: &mut FrontEnd| {
        let file = file()?;
        let bytes = message::encode(request::SET_VRING_KICK, VERSION | NEED_REPLY, &[0; 8]);
        fe.send_raw(&bytes[..HEADER + 3], &[])?;
        fe.send_raw(&bytes[HEADER + 3..], &[file.as_fd()])?;
        answer(fe)
    };
    all.push(HostileCase::new("a descriptor with the last bytes of its message", Negotiated, Tolerance::Any, late));
    let each = |fe: &mut FrontEnd| {
        let file = file()?;
        for byte in message::encode(request::SET_VRING_KICK, VERSION, &[0; 8]) {
            fe.send_raw(&[byte], &[file.as_fd(), file.as_fd()])?;
        }
        fe.socket.stream().shutdown(Shutdown::Write)?;
        fe.ends()
    };
    all.push(HostileCase::new("descriptors with every byte of a message", Negotiated, Tolerance::Any, each));
    all
}

fn timing() -> Vec<HostileCase> {
    let mut all = Vec::new();
    let bytes = || message::encode(request::GET_CONFIG, VERSION, &message::config(0, 60, 0, &[0; 60]));
    for length in [0, 1, HEADER - 1, HEADER, HEADER + 20] {
        let attack = move |fe: &mut FrontEnd| {
            fe.send_raw(&bytes()[..length], &[])?;
            let begun = Instant::now();
            while begun.elapsed() < STALL {
                fe.check_neighbour()?;
                std::thread::sleep(STALL / 20);
            }
            Ok(Ignored)
        };
        all.push(HostileCase::new(format!("stalls after {length} bytes"), Negotiated, Tolerance::Any, attack));
    }
    all.push(
        HostileCase::new("replies that are never read", Negotiated, Tolerance::Any, move |fe| {
            let (bytes, begun) = (bytes(), Instant::now());
            let (mut sent, mut last) = (0, begun);
            while sent < FLOOD && last.elapsed() < STALL {
                match fe.socket.try_send(&bytes)? {
                    0 => std::thread::sleep(STALL / 20),
                    count => (sent, last) = (sent + count, Instant::now()),
                }
            }
            fe.check_neighbour()?;
            Ok(Ignored)
        })
        .with_protocol(protocol::CONFIG),
    );
    let unread_end = |fe: &mut FrontEnd| {
        for _ in 0..100 {
            fe.send_raw(&message::encode(request::GET_FEATURES, VERSION, &[]), &[])?;
        }
        fe.reconnect()?;
        Ok(Ended)
    };
    all.push(HostileCase::new("a connection that ends with unread replies", Negotiated, Tolerance::Any, unread_end));
    all.push(HostileCase::new("a message byte by byte", Connected, Tolerance::Success, |fe| {
        for byte in message::encode(request::GET_FEATURES, VERSION, &[]) {
            fe.send_raw(&[byte], &[])?;
            std::thread::yield_now();
        }
        fe.reply_to(request::GET_FEATURES)?;
        Ok(Accepted)
    }));
    all.push(HostileCase::new("many messages at once", Connected, Tolerance::Success, |fe| {
        fe.send_raw(&message::encode(request::GET_FEATURES, VERSION, &[]).repeat(100), &[])?;
        for _ in 0..100 {
            fe.reply_to(request::GET_FEATURES)?;
        }
        Ok(Accepted)
    }));
    all.push(HostileCase::new("200 connections without a message", Connected, Tolerance::Success, |fe| {
        for _ in 0..200 {
            fe.reconnect()?;
        }
        fe.get_features()?;
        Ok(Accepted)
    }));
    all.push(HostileCase::new("a second front-end beside the first", Running, Tolerance::Success, |fe| {
        let Some(path) = &fe.path else { return Ok(Accepted) };
        let others: Vec<UnixStream> = (0..8).map(|_| UnixStream::connect(path)).collect::<std::io::Result<_>>()?;
        for other in &others {
            // It may be refused.
            let _ = rustix::net::send(
                other,
                &message::encode(request::GET_FEATURES, VERSION, &[]),
                rustix::net::SendFlags::NOSIGNAL,
            );
        }
        fe.read_sectors(0, 4096)?;
        drop(others);
        fe.read_sectors(0, 4096)?;
        Ok(Accepted)
    }));
    all.push(
        HostileCase::new("translations without ACCESS_PLATFORM", Negotiated, Tolerance::Refusal, |fe| {
            let update = IotlbMessage { iova: 0, size: PAGE, user: 0x7000_0000_0000, permissions: 3, kind: 2 };
            fe.iotlb(&update)?;
            Ok(Accepted)
        })
        .with_protocol(protocol::REPLY_ACK),
    );
    all
}
