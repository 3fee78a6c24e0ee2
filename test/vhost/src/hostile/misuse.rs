//! Well-formed messages at a wrong time, or with values that no front-end sends.

use std::os::fd::AsFd;

use super::DeviceReaction::{self, Accepted};
use super::messages::tell;
use super::{HostileCase, SCRATCH_SECTOR, Tolerance};
use crate::block::VirtioBlkRequest;
use crate::error::Result;
use crate::front_end::FrontEnd;
use crate::front_end::FrontEndStage::{self, Negotiated, Running, Shared};
use crate::memory::{PAGE, SharedArea, memory_file};
use crate::message::{self, InflightDescription, RingAddresses, feature, protocol, request};

/// Returns all cases.
pub(super) fn cases() -> Vec<HostileCase> {
    let mut all = negotiation();
    all.extend(indices());
    all.extend(order());
    all.extend(config());
    all.extend(shared_areas());
    all
}

/// Case of one message.
fn one(
    name: impl Into<String>,
    stage: FrontEndStage,
    tolerance: Tolerance,
    request: u32,
    payload: Vec<u8>,
) -> HostileCase {
    HostileCase::new(name, stage, tolerance, move |fe| tell(fe, request, &payload, &[]))
        .with_protocol(protocol::REPLY_ACK)
}

fn negotiation() -> Vec<HostileCase> {
    let set = |name: &str, stage, tolerance, request, value: u64| {
        one(name, stage, tolerance, request, value.to_ne_bytes().to_vec())
    };
    let features = request::SET_FEATURES;
    let protocols = request::SET_PROTOCOL_FEATURES;
    let mut all = vec![
        set("all features", Negotiated, Tolerance::Refusal, features, u64::MAX),
        set("features of no device", Negotiated, Tolerance::Refusal, features, feature::VERSION_1 | 1 << 60),
        set("no features", Negotiated, Tolerance::Any, features, 0),
        set("features while queues run", Running, Tolerance::Any, features, feature::VERSION_1),
        set("all protocol features", Negotiated, Tolerance::Refusal, protocols, u64::MAX),
        set("protocol features while queues run", Running, Tolerance::Any, protocols, 0),
        set("in-band notifications alone", Negotiated, Tolerance::Refusal, protocols, protocol::INBAND_NOTIFICATIONS),
        set("status of all bits", Negotiated, Tolerance::Any, request::SET_STATUS, u64::MAX),
        set("status 0 while queues run", Running, Tolerance::Any, request::SET_STATUS, 0),
        set("status FAILED while queues run", Running, Tolerance::Any, request::SET_STATUS, 128),
    ];
    let foreign = [
        ("send-rarp", request::SEND_RARP, 8),
        ("net-set-mtu", request::NET_SET_MTU, 8),
        ("set-vring-endian", request::SET_VRING_ENDIAN, 8),
        ("create-crypto-session", request::CREATE_CRYPTO_SESSION, 64),
        ("close-crypto-session", request::CLOSE_CRYPTO_SESSION, 8),
        ("postcopy-advise", request::POSTCOPY_ADVISE, 0),
        ("postcopy-listen", request::POSTCOPY_LISTEN, 0),
        ("postcopy-end", request::POSTCOPY_END, 0),
        ("gpu-set-socket", request::GPU_SET_SOCKET, 0),
        ("in-band kick", request::VRING_KICK, 8),
        ("get-shared-object", request::GET_SHARED_OBJECT, 16),
        ("set-device-state-fd", request::SET_DEVICE_STATE_FD, 8),
        ("check-device-state", request::CHECK_DEVICE_STATE, 0),
    ];
    for (name, request, size) in foreign {
        all.push(one(format!("{name}, not negotiated"), Negotiated, Tolerance::Refusal, request, vec![0; size]));
        all.push(one(format!("{name} while queues run"), Running, Tolerance::Refusal, request, vec![0; size]));
    }
    all
}

fn indices() -> Vec<HostileCase> {
    let mut all = Vec::new();
    for index in [200_u32, 255, 256, 0x1_0000, 0x8000_0000, u32::MAX] {
        let state = message::state(index, 16);
        let addresses = RingAddresses { index, ..Default::default() };
        let requests = [
            ("set-vring-num", request::SET_VRING_NUM, state.clone()),
            ("set-vring-addr", request::SET_VRING_ADDR, addresses.encode()),
            ("set-vring-base", request::SET_VRING_BASE, state.clone()),
            ("get-vring-base", request::GET_VRING_BASE, state.clone()),
            ("set-vring-enable", request::SET_VRING_ENABLE, message::state(index, 1)),
        ];
        for (name, request, payload) in requests {
            all.push(one(format!("{name} of queue {index:#x}"), Shared, Tolerance::Refusal, request, payload));
        }
    }
    for (name, request) in
        [("kick", request::SET_VRING_KICK), ("call", request::SET_VRING_CALL), ("err", request::SET_VRING_ERR)]
    {
        for index in [200_u64, 255] {
            let attack = move |fe: &mut FrontEnd| {
                let queue = fe.create_queue(0)?;
                tell(fe, request, &index.to_ne_bytes(), &[queue.kick()])
            };
            let case = HostileCase::new(format!("{name} of queue {index}"), Shared, Tolerance::Refusal, attack);
            all.push(case.with_protocol(protocol::REPLY_ACK));
        }
        let attack = move |fe: &mut FrontEnd| {
            let queue = fe.create_queue(0)?;
            tell(fe, request, &(u64::MAX << 9).to_ne_bytes(), &[queue.kick()])
        };
        let case = HostileCase::new(format!("{name} with reserved bits"), Shared, Tolerance::Any, attack);
        all.push(case.with_protocol(protocol::REPLY_ACK));
    }
    for value in [2, 0x100, u32::MAX] {
        let payload = message::state(0, value);
        all.push(one(format!("enable with {value:#x}"), Shared, Tolerance::Any, request::SET_VRING_ENABLE, payload));
    }
    all
}

fn order() -> Vec<HostileCase> {
    let mut all = vec![
        one("owner twice", Negotiated, Tolerance::Any, request::SET_OWNER, vec![]),
        one("owner while queues run", Running, Tolerance::Any, request::SET_OWNER, vec![]),
        one("reset of the owner while queues run", Running, Tolerance::Any, request::RESET_OWNER, vec![]),
        one("enable before all else", Negotiated, Tolerance::Any, request::SET_VRING_ENABLE, message::state(0, 1)),
        one(
            "base of a queue that was not set up",
            Negotiated,
            Tolerance::Any,
            request::GET_VRING_BASE,
            message::state(0, 0),
        ),
        one("size of a running queue", Running, Tolerance::Any, request::SET_VRING_NUM, message::state(0, 8)),
        one("base of a running queue", Running, Tolerance::Any, request::SET_VRING_BASE, message::state(0, 7)),
    ];
    let mut add = |name: &str, stage, tolerance, attack: fn(&mut FrontEnd) -> Result<DeviceReaction>| {
        all.push(HostileCase::new(name, stage, tolerance, attack));
    };
    add("kick before addresses", Shared, Tolerance::Any, |fe| {
        let queue = fe.create_queue(0)?;
        fe.queues.push(queue);
        fe.set_queue_events(0)?;
        fe.set_vring_enable(0, true)?;
        for _ in 0..1000 {
            fe.queues[0].notify()?;
        }
        // The connection stands, or it has ended.
        fe.get_features()?;
        Ok(Accepted)
    });
    add("addresses before memory", Negotiated, Tolerance::Any, |fe| {
        let queue = fe.create_queue(0)?;
        fe.queues.push(queue);
        fe.start_queue(0, 0)?;
        fe.get_features()?;
        Ok(Accepted)
    });
    add("queue without a size", Shared, Tolerance::Any, |fe| {
        let queue = fe.create_queue(0)?;
        fe.queues.push(queue);
        let addresses = fe.ring_addresses(0)?;
        fe.set_vring_addresses(&addresses)?;
        fe.set_queue_events(0)?;
        fe.set_vring_enable(0, true)?;
        fe.queues[0].notify()?;
        fe.get_features()?;
        Ok(Accepted)
    });
    add("stopped twice", Running, Tolerance::Any, |fe| {
        fe.get_vring_base(0)?;
        fe.get_vring_base(0)?;
        Ok(Accepted)
    });
    add("stopped and started", Running, Tolerance::Success, |fe| {
        for round in 0..20 {
            fe.write_sectors(SCRATCH_SECTOR + round, &[round as u8; 512])?;
            let base = fe.get_vring_base(0)?;
            fe.start_queue(0, base)?;
        }
        fe.read_sectors(SCRATCH_SECTOR, 512)?;
        Ok(Accepted)
    });
    add("disabled and enabled with requests in flight", Running, Tolerance::Success, |fe| {
        for _ in 0..50 {
            let ids = fe.submit_all(0, &[VirtioBlkRequest::read(0, 4096), VirtioBlkRequest::read(8, 4096)])?;
            fe.set_vring_enable(0, false)?;
            fe.set_vring_enable(0, true)?;
            fe.queues[0].notify()?;
            let deadline = std::time::Instant::now() + fe.options.patience;
            for _ in ids {
                fe.await_completion(0, deadline)?.ok();
            }
        }
        Ok(Accepted)
    });
    add("reset of the device with requests in flight", Running, Tolerance::Any, |fe| {
        fe.submit_all(0, &[VirtioBlkRequest::read(0, 4096), VirtioBlkRequest::read(8, 4096)])?;
        fe.reset_device()?;
        fe.get_features()?;
        Ok(Accepted)
    });
    add("end of the connection with requests in flight", Running, Tolerance::Any, |fe| {
        let write = VirtioBlkRequest::write(SCRATCH_SECTOR, &[1; 65536]);
        fe.submit_all(0, &[write.clone(), write.clone(), write])?;
        fe.reconnect()?;
        Ok(Accepted)
    });
    for case in all.iter_mut().filter(|case| case.name.starts_with("reset of the device")) {
        case.needs_protocol |= protocol::RESET_DEVICE;
    }
    for count in [1000_u32, 100_000] {
        all.push(HostileCase::new(format!("{count} kicks"), Running, Tolerance::Success, move |fe| {
            for _ in 0..count {
                fe.queues[0].notify()?;
            }
            fe.read_sectors(0, 512)?;
            Ok(Accepted)
        }));
    }
    all
}

fn config() -> Vec<HostileCase> {
    let mut all = Vec::new();
    let gets = [
        ("past the end", 0x1000, 8, 8),
        ("across the end", 56, 200, 200),
        ("at the end of all numbers", u32::MAX, 1, 1),
        ("that wraps", u32::MAX - 3, 8, 8),
        ("of 0 bytes", 0, 0, 0),
        ("of 4096 bytes", 0, 4096, 4096),
        ("whose size is more than its payload", 0, 60, 8),
        ("whose size is less than its payload", 0, 8, 60),
        ("whose size is all ones", 0, u32::MAX, 8),
    ];
    for (name, offset, size, bytes) in gets {
        let payload = message::config(offset, size, 0, &vec![0; bytes]);
        let attack = move |fe: &mut FrontEnd| {
            let reply = fe.call(request::GET_CONFIG, &payload, &[])?;
            let is_error = reply.payload.len() < payload.len();
            Ok(if is_error { DeviceReaction::Refused(0) } else { Accepted })
        };
        // Where the configuration ends is the device's to say.
        let is_valid = ["of 0 bytes", "across the end", "of 4096 bytes"].contains(&name);
        let tolerance = if is_valid { Tolerance::Any } else { Tolerance::Refusal };
        let case = HostileCase::new(format!("get-config {name}"), Negotiated, tolerance, attack);
        all.push(case.with_protocol(protocol::CONFIG));
    }
    let sets: [(&str, u32, u32, u32, usize, Tolerance); 8] = [
        ("of the capacity", 0, 8, 0, 8, Tolerance::Refusal),
        ("of everything", 0, 60, 0, 60, Tolerance::Refusal),
        ("past the end", 0x1000, 8, 0, 8, Tolerance::Refusal),
        ("at the end of all numbers", u32::MAX, 1, 0, 1, Tolerance::Refusal),
        ("whose size is more than its payload", 32, 8, 0, 1, Tolerance::Refusal),
        ("with unknown flags", 32, 1, 0xFFFF_FFFE, 1, Tolerance::Any),
        ("of the write-back mode with a strange value", 32, 1, 0, 1, Tolerance::Any),
        ("of 0 bytes", 32, 0, 0, 0, Tolerance::Any),
    ];
    for (name, offset, size, flags, bytes, tolerance) in sets {
        let payload = message::config(offset, size, flags, &vec![0xA5; bytes]);
        let case = one(format!("set-config {name}"), Negotiated, tolerance, request::SET_CONFIG, payload);
        all.push(case.with_protocol(protocol::CONFIG));
    }
    all
}

fn shared_areas() -> Vec<HostileCase> {
    let mut all = Vec::new();
    let logs: [(&str, u64, u64, u64, Tolerance); 7] = [
        ("of 0 bytes", 0, 0, PAGE, Tolerance::Refusal),
        ("larger than its file", 1 << 30, 0, PAGE, Tolerance::Refusal),
        ("whose offset is past its file", PAGE, 1 << 30, PAGE, Tolerance::Refusal),
        ("whose offset and size wrap", PAGE, u64::MAX - 100, PAGE, Tolerance::Refusal),
        ("of all bytes there are", u64::MAX, 0, PAGE, Tolerance::Refusal),
        ("in an empty file", PAGE, 0, 0, Tolerance::Refusal),
        ("too small for the memory", 8, 0, PAGE, Tolerance::Any),
    ];
    for (name, size, offset, file, tolerance) in logs {
        let attack = move |fe: &mut FrontEnd| {
            let file = memory_file(file)?;
            tell(fe, request::SET_LOG_BASE, &message::log(size, offset), &[file.as_fd()])
        };
        let case = HostileCase::new(format!("log {name}"), Shared, tolerance, attack);
        all.push(case.with_protocol(protocol::LOG_SHMFD));
    }
    let dirty = |fe: &mut FrontEnd| {
        let area = SharedArea::create(PAGE)?;
        fe.call(request::SET_LOG_BASE, &message::log(1, 0), &[area.descriptor()])?;
        fe.read_sectors(0, 65536)?;
        Ok(Accepted)
    };
    let case = HostileCase::new("log of 8 pages with requests", Running, Tolerance::Any, dirty);
    all.push(case.with(feature::LOG_ALL).with_protocol(protocol::LOG_SHMFD));
    let shrinks = |fe: &mut FrontEnd| {
        fe.set_log_base()?;
        if let Some(log) = &fe.log {
            rustix::fs::ftruncate(log.descriptor(), 0)?;
        }
        fe.read_sectors(0, 65536)?;
        Ok(Accepted)
    };
    let case = HostileCase::new("log whose file is truncated", Running, Tolerance::Any, shrinks);
    all.push(case.with(feature::LOG_ALL).with_protocol(protocol::LOG_SHMFD));

    let good = InflightDescription { size: PAGE, offset: 0, queues: 1, queue_size: 16 };
    let inflight: [(&str, InflightDescription, u64); 8] = [
        ("of 0 bytes", InflightDescription { size: 0, ..good }, PAGE),
        ("larger than its file", InflightDescription { size: 1 << 30, ..good }, PAGE),
        ("whose offset is past its file", InflightDescription { offset: 1 << 30, ..good }, PAGE),
        ("whose offset and size wrap", InflightDescription { offset: u64::MAX - 100, ..good }, PAGE),
        ("too small for its queues", InflightDescription { queues: 60, queue_size: 1024, ..good }, PAGE),
        ("of 65535 queues", InflightDescription { queues: 65535, queue_size: 65535, ..good }, PAGE),
        ("in an empty file", good, 0),
        ("whose offset is odd", InflightDescription { offset: 3, size: 64, ..good }, PAGE),
    ];
    for (name, description, file) in inflight {
        let attack = move |fe: &mut FrontEnd| {
            let file = memory_file(file)?;
            tell(fe, request::SET_INFLIGHT_FD, &description.encode(), &[file.as_fd()])
        };
        let case = HostileCase::new(format!("in-flight region {name}"), Shared, Tolerance::Refusal, attack);
        all.push(case.with_protocol(protocol::INFLIGHT_SHMFD | protocol::REPLY_ACK));
    }
    for (name, byte) in [("ones", 0xFF_u8), ("rubbish", 0xA5), ("version 1 and ones", 1)] {
        for is_packed in [false, true] {
            let attack = move |fe: &mut FrontEnd| {
                fe.get_inflight(1, fe.options.queue_size)?;
                if let Some((description, area)) = &fe.inflight {
                    let mut bytes = vec![if byte == 1 { 0xFF } else { byte }; description.size as usize];
                    if byte == 1 {
                        // Features 0, version 1, the size of the queue.
                        bytes[..12].copy_from_slice(&[0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 16, 0]);
                    }
                    area.write(0, &bytes)?;
                }
                fe.set_inflight()?;
                fe.start_again()
            };
            let format = if is_packed { "packed" } else { "split" };
            let name = format!("in-flight region of {name}, {format}");
            let case = HostileCase::new(name, Shared, Tolerance::Any, attack).with_protocol(protocol::INFLIGHT_SHMFD);
            all.push(if is_packed { case.with(feature::RING_PACKED) } else { case });
        }
    }
    let rewritten = |fe: &mut FrontEnd| {
        fe.get_inflight(1, fe.options.queue_size)?;
        fe.set_inflight()?;
        fe.start_again()?;
        for round in 0..20_u8 {
            fe.submit_all(0, &[VirtioBlkRequest::read(0, 512)])?;
            if let Some((description, area)) = &fe.inflight {
                area.write(8, &vec![round.wrapping_mul(37); description.size as usize - 8])?;
            }
            let deadline = std::time::Instant::now() + fe.options.patience;
            fe.await_completion(0, deadline)?;
        }
        Ok(Accepted)
    };
    let case = HostileCase::new("in-flight region that is written meanwhile", Shared, Tolerance::Any, rewritten);
    all.push(case.with_protocol(protocol::INFLIGHT_SHMFD));
    for (queues, size) in [(0, 16), (1, 0), (65535, 65535), (1000, 16), (1, 3)] {
        let attack = move |fe: &mut FrontEnd| {
            fe.get_inflight(queues, size)?;
            Ok(Accepted)
        };
        let name = format!("get-inflight-fd of {queues} queues of {size}");
        let tolerance = if size == 3 { Tolerance::Any } else { Tolerance::Refusal };
        all.push(HostileCase::new(name, Shared, tolerance, attack).with_protocol(protocol::INFLIGHT_SHMFD));
    }
    all
}

impl FrontEnd {
    /// Starts a queue without a new region of requests in flight, and reads from it.
    fn start_again(&mut self) -> Result<DeviceReaction> {
        let queue = self.create_queue(0)?;
        let base = queue.ring.resume_base();
        self.queues.push(queue);
        self.start_queue(0, base)?;
        self.read_sectors(0, 4096)?;
        Ok(Accepted)
    }
}
