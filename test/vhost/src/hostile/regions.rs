//! Guest memory that is not as it should be, or goes away.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use super::DeviceReaction::{self, Accepted, Ignored};
use super::messages::{strange_descriptors, tell};
use super::{HostileCase, SCRATCH_SECTOR, Tolerance};
use crate::block::VirtioBlkRequest;
use crate::error::{FrontEndError, Result};
use crate::front_end::FrontEnd;
use crate::front_end::FrontEndStage::{Negotiated, Running};
use crate::memory::{MemoryLayout, PAGE, RegionLayout, memory_file};
use crate::message::{self, RegionDescription, protocol, request};

const MIB: u64 = 1 << 20;
/// Region within a file of 4 MiB.
const GOOD: RegionDescription = RegionDescription { guest: 0, size: MIB, user: 0x7000_0000_0000, offset: 0 };

/// Returns all cases.
pub(super) fn cases() -> Vec<HostileCase> {
    let mut all = tables();
    all.extend(files());
    all.extend(slots());
    all.extend(changes());
    all
}

fn tables() -> Vec<HostileCase> {
    let mut all = Vec::new();
    let next = RegionDescription { guest: 2 * MIB, user: GOOD.user + 2 * MIB, offset: 2 * MIB, ..GOOD };
    let bad: Vec<(&str, Vec<RegionDescription>, Tolerance)> = vec![
        ("of size 0", vec![RegionDescription { size: 0, ..GOOD }], Tolerance::Refusal),
        ("of all sizes", vec![RegionDescription { size: u64::MAX, ..GOOD }], Tolerance::Refusal),
        ("of 1 EiB", vec![RegionDescription { size: 1 << 60, ..GOOD }], Tolerance::Refusal),
        ("larger than its file", vec![RegionDescription { size: 64 * MIB, ..GOOD }], Tolerance::Refusal),
        ("past its file", vec![RegionDescription { offset: 64 * MIB, ..GOOD }], Tolerance::Refusal),
        ("a page longer than its file", vec![RegionDescription { offset: 3 * MIB + PAGE, ..GOOD }], Tolerance::Refusal),
        ("with an odd offset", vec![RegionDescription { offset: 3, ..GOOD }], Tolerance::Any),
        (
            "whose guest addresses wrap",
            vec![RegionDescription { guest: u64::MAX - PAGE + 1, ..GOOD }],
            Tolerance::Refusal,
        ),
        (
            "whose user addresses wrap",
            vec![RegionDescription { user: u64::MAX - PAGE + 1, ..GOOD }],
            Tolerance::Refusal,
        ),
        ("whose offset wraps", vec![RegionDescription { offset: u64::MAX - PAGE + 1, ..GOOD }], Tolerance::Refusal),
        ("twice", vec![GOOD, GOOD], Tolerance::Refusal),
        ("that overlaps another", vec![GOOD, RegionDescription { guest: MIB - PAGE, ..next }], Tolerance::Refusal),
        ("within another", vec![GOOD, RegionDescription { guest: PAGE, size: PAGE, ..next }], Tolerance::Refusal),
        ("around another", vec![next, RegionDescription { size: 4 * MIB, ..GOOD }], Tolerance::Refusal),
        (
            "with the user addresses of another",
            vec![GOOD, RegionDescription { user: GOOD.user, ..next }],
            Tolerance::Any,
        ),
        ("with the file of another", vec![GOOD, RegionDescription { offset: 0, ..next }], Tolerance::Any),
    ];
    for (name, regions, tolerance) in bad {
        let (table, one) = (regions.clone(), regions.clone());
        let attack = move |fe: &mut FrontEnd| {
            let file = memory_file(4 * MIB)?;
            let payload = message::memory_table(table.len() as u32, &table);
            tell(fe, request::SET_MEM_TABLE, &payload, &vec![file.as_fd(); table.len()])
        };
        let case = HostileCase::new(format!("table with a region {name}"), Negotiated, tolerance, attack);
        all.push(case.with_protocol(protocol::REPLY_ACK));
        let attack = move |fe: &mut FrontEnd| {
            let file = memory_file(4 * MIB)?;
            for (at, region) in one.iter().enumerate() {
                let reaction = tell(fe, request::ADD_MEM_REG, &region.encode(), &[file.as_fd()])?;
                if at + 1 == one.len() || reaction != Accepted {
                    return Ok(reaction);
                }
            }
            Ok(Ignored)
        };
        let case = HostileCase::new(format!("added region {name}"), Negotiated, tolerance, attack);
        all.push(case.with_protocol(protocol::REPLY_ACK | protocol::CONFIGURE_MEM_SLOTS));
    }
    let counts = [
        ("of 0 regions", 0, 0, 0, Tolerance::Any),
        ("of 0 regions with a descriptor", 0, 0, 1, Tolerance::Any),
        ("that lacks a descriptor", 2, 2, 1, Tolerance::Refusal),
        ("that lacks all descriptors", 2, 2, 0, Tolerance::Refusal),
        ("with a descriptor too many", 2, 2, 3, Tolerance::Any),
        ("that lacks a region", 2, 1, 2, Tolerance::Refusal),
        ("of 9 regions", 9, 9, 9, Tolerance::Any),
        ("of 253 regions", 253, 253, 253, Tolerance::Any),
        ("of all regions there are", u32::MAX, 1, 1, Tolerance::Refusal),
        ("of a number of regions that wraps", 0x0800_0001, 1, 1, Tolerance::Refusal),
    ];
    for (name, count, regions, descriptors, tolerance) in counts {
        let attack = move |fe: &mut FrontEnd| {
            let file = memory_file(4 * MIB)?;
            let region = |at: u64| {
                let at = at * 2 * MIB;
                RegionDescription { guest: at, user: GOOD.user + at, ..GOOD }
            };
            let payload = message::memory_table(count, &(0..regions).map(region).collect::<Vec<_>>());
            tell(fe, request::SET_MEM_TABLE, &payload, &vec![file.as_fd(); descriptors])
        };
        let case = HostileCase::new(format!("table {name}"), Negotiated, tolerance, attack);
        all.push(case.with_protocol(protocol::REPLY_ACK));
    }
    all
}

fn files() -> Vec<HostileCase> {
    let mut all = Vec::new();
    let table = |fe: &FrontEnd, descriptor: BorrowedFd<'_>| {
        tell(fe, request::SET_MEM_TABLE, &message::memory_table(1, &[GOOD]), &[descriptor])
    };
    let slot =
        |fe: &FrontEnd, descriptor: BorrowedFd<'_>| tell(fe, request::ADD_MEM_REG, &GOOD.encode(), &[descriptor]);
    let kinds = strange_descriptors().map(|all| all.into_iter().map(|(name, _)| name).collect()).unwrap_or_default();
    let kinds: Vec<&'static str> = kinds;
    for name in kinds {
        for by_slots in [false, true] {
            let attack = move |fe: &mut FrontEnd| {
                let all = strange_descriptors()?;
                let missing = || FrontEndError::Violation(format!("no {name}"));
                let (_, found) = all.iter().find(|(other, _)| *other == name).ok_or_else(missing)?;
                if by_slots { slot(fe, found.as_fd()) } else { table(fe, found.as_fd()) }
            };
            // Memory of the zero device can be shared.
            let tolerance = if name == "zero device" { Tolerance::Any } else { Tolerance::Refusal };
            let how = if by_slots { "added memory" } else { "memory" };
            let case = HostileCase::new(format!("{how}: {name}"), Negotiated, tolerance, attack);
            let slots = if by_slots { protocol::CONFIGURE_MEM_SLOTS } else { 0 };
            all.push(case.with_protocol(protocol::REPLY_ACK | slots));
        }
    }
    let read_only = move |fe: &mut FrontEnd| {
        let file = memory_file(4 * MIB)?;
        let path = format!("/proc/self/fd/{}", std::os::fd::AsRawFd::as_raw_fd(&file));
        let opened: OwnedFd = std::fs::File::open(path)?.into();
        table(fe, opened.as_fd())
    };
    let case = HostileCase::new("memory: file open for reading only", Negotiated, Tolerance::Refusal, read_only);
    all.push(case.with_protocol(protocol::REPLY_ACK));
    all
}

fn slots() -> Vec<HostileCase> {
    let needs = protocol::CONFIGURE_MEM_SLOTS | protocol::REPLY_ACK;
    let mut all = Vec::new();
    let mut add = |name: &str, tolerance, attack: fn(&mut FrontEnd) -> Result<DeviceReaction>| {
        all.push(HostileCase::new(name, Running, tolerance, attack).with_protocol(needs));
    };
    add("more regions than there are slots", Tolerance::Refusal, |fe| {
        for index in 0..5000 {
            fe.add_region(&RegionLayout { guest: (index + 1) << 30, size: PAGE })?;
        }
        Ok(Accepted)
    });
    add("removal of a region that is unknown", Tolerance::Refusal, |fe| {
        fe.remove_memory_region(RegionDescription { guest: 1 << 40, ..GOOD })?;
        Ok(Accepted)
    });
    add("removal of a part of a region", Tolerance::Refusal, |fe| {
        let region = fe.memory.regions()[0].description();
        fe.remove_memory_region(RegionDescription { size: region.size / 2, ..region })?;
        Ok(Accepted)
    });
    add("removal of a region twice", Tolerance::Refusal, |fe| {
        fe.add_region(&RegionLayout { guest: 1 << 32, size: MIB })?;
        let region = fe.memory.regions()[fe.memory.regions().len() - 1].description();
        fe.remove_memory_region(region)?;
        fe.remove_memory_region(region)?;
        Ok(Accepted)
    });
    add("removal of a region with a descriptor", Tolerance::Any, |fe| {
        fe.add_region(&RegionLayout { guest: 1 << 32, size: MIB })?;
        let region = fe.memory.regions()[fe.memory.regions().len() - 1].clone();
        tell(fe, request::REM_MEM_REG, &region.description().encode(), &[region.descriptor()])
    });
    add("regions that come and go with requests", Tolerance::Success, |fe| {
        for round in 0..20_u64 {
            let guest = (1 << 32) + round * MIB;
            fe.add_region(&RegionLayout { guest, size: MIB })?;
            fe.write_sectors(SCRATCH_SECTOR, &[round as u8; 8192])?;
            fe.remove_region(guest)?;
            if fe.read_sectors(SCRATCH_SECTOR, 8192)? != [round as u8; 8192] {
                return Err(FrontEndError::Violation("what was written has changed".into()));
            }
        }
        Ok(Accepted)
    });
    add("removal of the region of the queue", Tolerance::Any, |fe| {
        let region = fe.memory.regions()[0].description();
        fe.remove_memory_region(region)?;
        fe.queues[0].notify()?;
        fe.get_features()?;
        Ok(Accepted)
    });
    add("removal of regions with requests in flight", Tolerance::Any, |fe| {
        for _ in 0..4 {
            fe.submit_all(0, &[VirtioBlkRequest::read(0, 65536)])?;
        }
        for region in fe.memory.regions().to_vec() {
            fe.remove_memory_region(region.description())?;
        }
        fe.get_features()?;
        Ok(Accepted)
    });
    all
}

fn changes() -> Vec<HostileCase> {
    let mut all = Vec::new();
    let mut add = |name: &str, tolerance, attack: fn(&mut FrontEnd) -> Result<DeviceReaction>| {
        all.push(HostileCase::new(name, Running, tolerance, attack));
    };
    add("same table again", Tolerance::Success, |fe| {
        for _ in 0..20 {
            fe.set_memory_table()?;
            fe.read_sectors(0, 4096)?;
        }
        Ok(Accepted)
    });
    add("same table again with requests in flight", Tolerance::Success, |fe| {
        for _ in 0..20 {
            let ids = fe.submit_all(0, &[VirtioBlkRequest::read(0, 65536), VirtioBlkRequest::read(8, 65536)])?;
            fe.set_memory_table()?;
            let deadline = std::time::Instant::now() + fe.options.patience;
            for _ in ids {
                fe.await_completion(0, deadline)?.ok();
            }
        }
        Ok(Accepted)
    });
    add("empty table with requests in flight", Tolerance::Any, |fe| {
        for _ in 0..4 {
            fe.submit_all(0, &[VirtioBlkRequest::read(0, 65536)])?;
        }
        tell(fe, request::SET_MEM_TABLE, &message::memory_table(0, &[]), &[])?;
        fe.queues[0].notify()?;
        fe.get_features()?;
        Ok(Accepted)
    });
    add("other memory below a running queue", Tolerance::Any, |fe| {
        let file = memory_file(4 * MIB)?;
        tell(fe, request::SET_MEM_TABLE, &message::memory_table(1, &[GOOD]), &[file.as_fd()])?;
        fe.queues[0].notify()?;
        fe.get_features()?;
        Ok(Accepted)
    });
    // From here on, this process must not look at its own memory: it would be killed.
    for (name, before, length) in
        [("before a request", true, 0), ("with requests in flight", false, 0), ("to one page", false, PAGE)]
    {
        for is_write in [false, true] {
            let attack = move |fe: &mut FrontEnd| {
                let data = vec![7; 65536];
                let request = match is_write {
                    true => VirtioBlkRequest::write(SCRATCH_SECTOR, &data),
                    false => VirtioBlkRequest::read(SCRATCH_SECTOR, 65536),
                };
                if before {
                    // All is prepared, but the device has not been told.
                    fe.queues[0].submit(&request)?;
                    fe.queues[0].ring.publish()?;
                } else {
                    fe.submit_all(0, &vec![request; 5])?;
                }
                fe.memory.regions()[0].truncate(length)?;
                for _ in 0..100 {
                    fe.queues[0].notify()?;
                }
                fe.check_neighbour()?;
                let answered = fe.get_features();
                fe.socket.stream().shutdown(std::net::Shutdown::Both)?;
                answered.map(|_| Accepted)
            };
            let what = if is_write { "write" } else { "read" };
            let case = HostileCase::new(format!("memory truncated {name}, {what}"), Running, Tolerance::Any, attack);
            all.push(case.with_memory(MemoryLayout::single(4 * MIB)));
        }
    }
    let sparse = |fe: &mut FrontEnd| {
        // Only the second region goes, with the data, and the queue stays.
        let address = fe.memory.allocate_in(1, 65536, PAGE)?;
        let status = fe.memory.allocate_in(0, 16, 16)?;
        let header = fe.memory.allocate_in(0, 16, 16)?;
        fe.memory.write(header, &[0; 16])?;
        fe.memory.write(status, &[0xFF])?;
        fe.memory.regions()[1].truncate(0)?;
        use crate::rings::ChainSegment;
        let queue = &mut fe.queues[0];
        queue.ring.add(&[
            ChainSegment::readable(header, 16),
            ChainSegment::writable(address, 65536),
            ChainSegment::writable(status, 1),
        ])?;
        queue.publish()?;
        queue.notify()?;
        let reaction = fe.observe(status);
        fe.check_neighbour()?;
        reaction
    };
    let case = HostileCase::new("memory of a buffer truncated", Running, Tolerance::Failure, sparse);
    all.push(case.with_memory(MemoryLayout::split(2, 4 * MIB, false)));
    all
}
