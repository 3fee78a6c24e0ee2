//! Queues whose sizes, addresses and positions are wrong.

use std::os::fd::{AsFd, BorrowedFd};

use rustix::event::{EventfdFlags, eventfd};

use super::DeviceReaction::{self, Accepted};
use super::{HostileCase, Tolerance};
use crate::block::VirtioBlkRequest;
use crate::error::{FrontEndError, Result};
use crate::front_end::FrontEnd;
use crate::front_end::FrontEndStage::{Running, Shared};
use crate::message::{RingAddresses, feature, request};

type Change = fn(&FrontEnd, &mut RingAddresses);

/// Returns all cases.
pub(super) fn cases() -> Vec<HostileCase> {
    let mut all = sizes();
    all.extend(addresses());
    all.extend(positions());
    all.extend(events());
    all
}

/// Sets up queue 0 with other values, and reads from the device.
fn start(fe: &mut FrontEnd, size: Option<u32>, base: u32, change: Change) -> Result<DeviceReaction> {
    let queue = fe.create_queue(0)?;
    fe.queues.push(queue);
    let mut addresses = fe.ring_addresses(0)?;
    change(fe, &mut addresses);
    fe.set_vring_num(0, size.unwrap_or(u32::from(fe.options.queue_size)))?;
    fe.set_vring_base(0, base)?;
    fe.set_vring_addresses(&addresses)?;
    fe.set_queue_events(0)?;
    fe.set_vring_enable(0, true)?;
    fe.queues[0].notify()?;
    fe.run(0, &VirtioBlkRequest::read(0, 512)).map(|done| match done.status {
        0 => Accepted,
        status => DeviceReaction::Failed(status),
    })
}

fn sizes() -> Vec<HostileCase> {
    let mut all = Vec::new();
    for size in [0, 3, 17, 255, 1 << 16, (1 << 16) + 16, 65535, 1 << 31, u32::MAX] {
        let attack = move |fe: &mut FrontEnd| start(fe, Some(size), 0, |_, _| {});
        all.push(HostileCase::new(format!("queue of {size} entries"), Shared, Tolerance::Refusal, attack));
    }
    for size in [0, 1 << 15 | 1, 1 << 16, u32::MAX] {
        let attack = move |fe: &mut FrontEnd| start(fe, Some(size), 0x8000_8000, |_, _| {});
        let case = HostileCase::new(format!("packed queue of {size} entries"), Shared, Tolerance::Refusal, attack);
        all.push(case.with(feature::RING_PACKED));
    }
    // Larger than the memory that is left for it.
    let attack = |fe: &mut FrontEnd| {
        start(fe, Some(1 << 15), 0, |fe, addresses| {
            let last = fe.memory.regions()[0].description();
            addresses.descriptors = last.user + last.size - 4096;
        })
    };
    all.push(HostileCase::new("queue that does not fit its memory", Shared, Tolerance::Refusal, attack));
    all
}

fn addresses() -> Vec<HostileCase> {
    let changes: [(&str, Change); 18] = [
        ("descriptors outside", |_, it| it.descriptors = 0x1234_5000),
        ("used ring outside", |_, it| it.used = 0x1234_5000),
        ("available ring outside", |_, it| it.available = 0x1234_5000),
        ("descriptors at 0", |_, it| it.descriptors = 0),
        ("used ring at 0", |_, it| it.used = 0),
        ("available ring at 0", |_, it| it.available = 0),
        ("descriptors at the end of all addresses", |_, it| it.descriptors = u64::MAX - 15),
        ("used ring at the end of all addresses", |_, it| it.used = u64::MAX - 3),
        ("available ring at the end of all addresses", |_, it| it.available = u64::MAX - 1),
        ("descriptors misaligned", |_, it| it.descriptors += 8),
        ("used ring misaligned", |_, it| it.used += 2),
        ("available ring misaligned", |_, it| it.available += 1),
        ("descriptors across the end of memory", |fe, it| it.descriptors = user_end(fe) - 16),
        ("used ring across the end of memory", |fe, it| it.used = user_end(fe) - 8),
        ("available ring across the end of memory", |fe, it| it.available = user_end(fe) - 4),
        ("guest addresses", |fe, it| {
            let parts = fe.queues[0].ring.parts();
            (it.descriptors, it.used, it.available) = (parts.descriptors, parts.used, parts.available);
        }),
        ("addresses of the device's process", |_, it| {
            (it.descriptors, it.used, it.available) = (0x40_0000, 0x40_1000, 0x40_2000);
        }),
        ("log address at the end of all addresses", |_, it| (it.flags, it.log) = (1, u64::MAX - 1)),
    ];
    let mut all = Vec::new();
    for (name, change) in changes {
        for is_packed in [false, true] {
            let base = if is_packed { 0x8000_8000 } else { 0 };
            let attack = move |fe: &mut FrontEnd| start(fe, None, base, change);
            // A log address does not matter without a log.  Areas of a packed ring have other lengths and alignments.
            let fits_packed = [
                "used ring misaligned",
                "used ring across the end of memory",
                "available ring across the end of memory",
            ];
            let is_open = name.starts_with("log") || is_packed && fits_packed.contains(&name);
            let tolerance = if is_open { Tolerance::Any } else { Tolerance::Refusal };
            let format = if is_packed { "packed" } else { "split" };
            let case = HostileCase::new(format!("{format} queue, {name}"), Shared, tolerance, attack);
            all.push(if is_packed { case.with(feature::RING_PACKED) } else { case });
        }
    }
    let overlap: [(&str, Change); 3] = [
        ("used ring on the descriptors", |_, it| it.used = it.descriptors),
        ("available ring on the descriptors", |_, it| it.available = it.descriptors),
        ("all parts at one address", |_, it| (it.used, it.available) = (it.descriptors, it.descriptors)),
    ];
    for (name, change) in overlap {
        let attack = move |fe: &mut FrontEnd| start(fe, None, 0, change);
        all.push(HostileCase::new(format!("split queue, {name}"), Shared, Tolerance::Any, attack));
    }
    let moved = |fe: &mut FrontEnd| {
        let mut addresses = fe.ring_addresses(0)?;
        addresses.used = 0x1234_5000;
        fe.set_vring_addresses(&addresses)?;
        fe.run(0, &VirtioBlkRequest::read(0, 512)).map(|_| Accepted)
    };
    all.push(HostileCase::new("addresses of a running queue moved outside", Running, Tolerance::Any, moved));
    all
}

fn user_end(fe: &FrontEnd) -> u64 {
    // Behind the first region of user addresses there is a gap.
    let first = fe.memory.regions()[0].description();
    first.user + first.size
}

fn positions() -> Vec<HostileCase> {
    let mut all = Vec::new();
    for base in [1, 100, 0xFFFF, 0x1_0000, 0x8000_0000, u32::MAX] {
        // The available index is 1 when the device looks: it would have to be ahead by more than the queue is long.
        let attack = move |fe: &mut FrontEnd| match start(fe, None, base, |_, _| {}) {
            // The chain is completed twice, for it is there twice.
            Err(FrontEndError::Violation(_)) if base == 0xFFFF => Ok(Accepted),
            other => other,
        };
        let tolerance = if base == 100 || base == 0xFFFF { Tolerance::Failure } else { Tolerance::Any };
        // From 65535 on, two entries are new, of which the first was never written: it is chain 0 again.
        let tolerance = if base == 0xFFFF { Tolerance::Any } else { tolerance };
        all.push(HostileCase::new(format!("split queue from {base:#x} on"), Shared, tolerance, attack));
    }
    for base in [0, 0x7FFF, 0x8000_7FFF, 0x7FFF_8000, 0x8000, u32::MAX] {
        let attack = move |fe: &mut FrontEnd| start(fe, None, base, |_, _| {});
        let case = HostileCase::new(format!("packed queue from {base:#x} on"), Shared, Tolerance::Any, attack);
        all.push(case.with(feature::RING_PACKED));
    }
    all
}

fn events() -> Vec<HostileCase> {
    let mut all = Vec::new();
    let replace = |fe: &mut FrontEnd, request: u32, event: BorrowedFd<'_>| fe.set_vring_event(request, 0, Some(event));
    let full = move |fe: &mut FrontEnd| {
        // A write to it blocks.
        let event = eventfd(0, EventfdFlags::CLOEXEC)?;
        rustix::io::write(&event, &(u64::MAX - 1).to_ne_bytes())?;
        for request in [request::SET_VRING_CALL, request::SET_VRING_ERR] {
            replace(fe, request, event.as_fd())?;
        }
        for _ in 0..4 {
            fe.submit_all(0, &[VirtioBlkRequest::read(0, 512)])?;
        }
        fe.check_neighbour()?;
        Ok(Accepted)
    };
    all.push(HostileCase::new("call and error descriptors that block", Running, Tolerance::Any, full));
    let pipe = move |fe: &mut FrontEnd| {
        let (reading, writing) = rustix::pipe::pipe()?;
        replace(fe, request::SET_VRING_CALL, writing.as_fd())?;
        drop(reading);
        for _ in 0..4 {
            fe.submit_all(0, &[VirtioBlkRequest::read(0, 512)])?;
        }
        fe.check_neighbour()?;
        Ok(Accepted)
    };
    all.push(HostileCase::new("call descriptor of a pipe without reader", Running, Tolerance::Any, pipe));
    let endless = move |fe: &mut FrontEnd| {
        let zero = std::fs::File::open("/dev/zero")?;
        match replace(fe, request::SET_VRING_KICK, zero.as_fd()) {
            Ok(()) | Err(FrontEndError::Refused { .. }) => {}
            Err(error) => return Err(error),
        }
        fe.check_neighbour()?;
        Ok(Accepted)
    };
    all.push(HostileCase::new("kick descriptor that is always readable", Running, Tolerance::Any, endless));
    let semaphore = move |fe: &mut FrontEnd| {
        let event = eventfd(u32::MAX - 1, EventfdFlags::CLOEXEC | EventfdFlags::SEMAPHORE)?;
        replace(fe, request::SET_VRING_KICK, event.as_fd())?;
        fe.check_neighbour()?;
        Ok(Accepted)
    };
    all.push(HostileCase::new("kick descriptor with four billion kicks", Running, Tolerance::Any, semaphore));
    let closed = move |fe: &mut FrontEnd| {
        let (reading, writing) = rustix::pipe::pipe()?;
        replace(fe, request::SET_VRING_KICK, reading.as_fd())?;
        drop(writing);
        fe.check_neighbour()?;
        Ok(Accepted)
    };
    all.push(HostileCase::new("kick descriptor of a pipe that has ended", Running, Tolerance::Any, closed));
    let shared = move |fe: &mut FrontEnd| {
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        for request in [request::SET_VRING_KICK, request::SET_VRING_CALL, request::SET_VRING_ERR] {
            replace(fe, request, event.as_fd())?;
        }
        fe.queues[0].submit(&VirtioBlkRequest::read(0, 512))?;
        fe.queues[0].ring.publish()?;
        rustix::io::write(&event, &1_u64.to_ne_bytes())?;
        fe.check_neighbour()?;
        Ok(Accepted)
    };
    all.push(HostileCase::new("one descriptor for kick, call and error", Running, Tolerance::Any, shared));
    all
}
