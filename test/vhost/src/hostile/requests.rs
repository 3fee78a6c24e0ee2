//! Requests of virtio-blk that are wrong, or unusual.

use super::DeviceReaction::{self, Accepted};
use super::rings::{DATA, RawRequest, chain};
use super::{HostileCase, SCRATCH_SECTOR, Tolerance};
use crate::block::{OK, SECTOR, SectorRange, VirtioBlkRequest, kind};
use crate::error::{FrontEndError, Result};
use crate::front_end::FrontEnd;
use crate::front_end::FrontEndStage::Running;
use crate::message::feature;
use crate::rings::WRITE;

/// Returns all cases for one format.
pub(super) fn cases(is_packed: bool) -> Vec<HostileCase> {
    let mut all = headers();
    all.extend(places());
    all.extend(ranges());
    all.extend(segmentation());
    for case in &mut all {
        case.name = format!("{}: {}", if is_packed { "packed" } else { "split" }, case.name);
    }
    match is_packed {
        true => all.into_iter().map(|case| case.with(feature::RING_PACKED)).collect(),
        false => all,
    }
}

/// Case of one request, made for the device's configuration.
fn request(
    name: impl Into<String>,
    tolerance: Tolerance,
    make: impl Fn(&FrontEnd) -> VirtioBlkRequest + Send + Sync + 'static,
) -> HostileCase {
    HostileCase::new(name, Running, tolerance, move |fe| {
        let request = make(fe);
        status(fe.run(0, &request)?.status)
    })
}

fn status(status: u8) -> Result<DeviceReaction> {
    Ok(if status == OK { Accepted } else { DeviceReaction::Failed(status) })
}

fn headers() -> Vec<HostileCase> {
    let mut all = Vec::new();
    for kind in [2, 3, 5, 6, 7, 9, 12, 15, 16, 23, 24, 0x8000_0000, u32::MAX] {
        // What follows tells nothing about a request of an unknown type, but where its status is.
        for read in [0, 512] {
            let name = format!("type {kind:#x} with {read} bytes to read");
            // The highest bit was a barrier's, before virtio was a standard.
            let tolerance = if kind == 0x8000_0000 { Tolerance::Any } else { Tolerance::Failure };
            all.push(request(name, tolerance, move |_| VirtioBlkRequest::new(kind, 0, &[], read)));
        }
    }
    for length in [0_u32, 1, 4, 8, 15] {
        all.push(HostileCase::new(format!("header of {length} bytes"), Running, Tolerance::Failure, move |fe| {
            let raw = RawRequest::new(fe, kind::IN, SCRATCH_SECTOR)?;
            let chain = chain(&[(raw.header, length, 0), (raw.data, 512, WRITE), (raw.status, 1, WRITE)]);
            fe.fire_and_observe(&chain, raw.status)
        }));
    }
    all.push(HostileCase::new("header of 15 bytes in 15 buffers", Running, Tolerance::Failure, |fe| {
        let raw = RawRequest::new(fe, kind::FLUSH, 0)?;
        let mut buffers: Vec<_> = (0..15).map(|at| (raw.header + at, 1, 0)).collect();
        buffers.push((raw.status, 1, WRITE));
        fe.fire_and_observe(&chain(&buffers), raw.status)
    }));
    all.push(HostileCase::new("read without a status", Running, Tolerance::Any, |fe| {
        let raw = RawRequest::new(fe, kind::IN, SCRATCH_SECTOR)?;
        fe.fire_and_observe(&chain(&[(raw.header, 16, 0), (raw.data, 512, WRITE)]), raw.status)
    }));
    all.push(HostileCase::new("write without a status", Running, Tolerance::Failure, |fe| {
        let raw = RawRequest::new(fe, kind::OUT, SCRATCH_SECTOR)?;
        fe.fire_and_observe(&chain(&[(raw.header, 16, 0), (raw.data, 512, 0)]), raw.status)
    }));
    all.push(HostileCase::new("status of 0 bytes", Running, Tolerance::Any, |fe| {
        let raw = RawRequest::new(fe, kind::OUT, SCRATCH_SECTOR)?;
        let chain = chain(&[(raw.header, 16, 0), (raw.data, 512, 0), (raw.status, 0, WRITE)]);
        fe.fire_and_observe(&chain, raw.status)
    }));
    all.push(HostileCase::new("status of 16 bytes", Running, Tolerance::Any, |fe| {
        let raw = RawRequest::new(fe, kind::OUT, SCRATCH_SECTOR)?;
        let chain = chain(&[(raw.header, 16, 0), (raw.data, 512, 0), (raw.status, 16, WRITE)]);
        fe.fire_and_observe(&chain, raw.status + 15)
    }));
    all
}

fn places() -> Vec<HostileCase> {
    let mut all = Vec::new();
    let sectors: [(&str, fn(u64) -> u64); 7] = [
        ("the end", |capacity| capacity),
        ("one sector before the end", |capacity| capacity - 1),
        ("seven sectors before the end", |capacity| capacity - 7),
        ("2^40", |_| 1 << 40),
        ("2^55", |_| 1 << 55),
        ("2^55 - 1", |_| (1 << 55) - 1),
        ("2^64 - 1", |_| u64::MAX),
    ];
    for (name, sector) in sectors {
        let read = move |fe: &FrontEnd| VirtioBlkRequest::read(sector(fe.config.capacity), 4096);
        all.push(request(format!("read from {name} on"), Tolerance::Failure, read));
        let write = move |fe: &FrontEnd| VirtioBlkRequest::write(sector(fe.config.capacity), &[1; 4096]);
        all.push(request(format!("write from {name} on"), Tolerance::Failure, write));
    }
    for length in [1, 100, 511, 513, 1000] {
        let read = move |_: &FrontEnd| VirtioBlkRequest::read(SCRATCH_SECTOR, length);
        all.push(request(format!("read of {length} bytes"), Tolerance::Failure, read));
        let write = move |_: &FrontEnd| VirtioBlkRequest::write(SCRATCH_SECTOR, &vec![1; length as usize]);
        all.push(request(format!("write of {length} bytes"), Tolerance::Failure, write));
    }
    all.push(request("read of 0 bytes", Tolerance::Any, |_| VirtioBlkRequest::read(SCRATCH_SECTOR, 0)));
    all.push(request("write of 0 bytes", Tolerance::Any, |_| VirtioBlkRequest::write(SCRATCH_SECTOR, &[])));
    all.push(request("read of 0 bytes past the end", Tolerance::Any, |_| VirtioBlkRequest::read(u64::MAX, 0)));
    for read in [0, 1, 19, 21, 4096] {
        let id = move |_: &FrontEnd| VirtioBlkRequest::new(kind::GET_ID, 0, &[], read);
        all.push(request(format!("get-id with {read} bytes"), Tolerance::Any, id));
    }
    all.push(request("flush with data", Tolerance::Any, |_| VirtioBlkRequest::new(kind::FLUSH, 0, &[1; 512], 0)));
    all.push(request("flush with a buffer to read", Tolerance::Any, |_| {
        VirtioBlkRequest::new(kind::FLUSH, 0, &[], 512)
    }));
    all.push(request("flush of a sector past the end", Tolerance::Any, |_| {
        VirtioBlkRequest::new(kind::FLUSH, u64::MAX, &[], 0)
    }));
    all.push(request("get-lifetime", Tolerance::Any, |_| VirtioBlkRequest::new(kind::GET_LIFETIME, 0, &[], 8)));
    all
}

fn ranges() -> Vec<HostileCase> {
    let mut all = Vec::new();
    let good = SectorRange { sector: SCRATCH_SECTOR, count: 8, flags: 0 };
    for (what, kind, needs) in
        [("discard", kind::DISCARD, feature::DISCARD), ("write-zeroes", kind::WRITE_ZEROES, feature::WRITE_ZEROES)]
    {
        let ranges: [(&str, SectorRange, Tolerance); 9] = [
            ("from the end on", SectorRange { sector: u64::MAX - 100, ..good }, Tolerance::Failure),
            ("from 2^55 on", SectorRange { sector: 1 << 55, ..good }, Tolerance::Failure),
            ("from 2^55 - 1 on", SectorRange { sector: (1 << 55) - 1, ..good }, Tolerance::Failure),
            ("of 2^32 - 1 sectors", SectorRange { count: u32::MAX, ..good }, Tolerance::Failure),
            ("that wraps", SectorRange { sector: u64::MAX, count: u32::MAX, flags: 0 }, Tolerance::Failure),
            ("of 0 sectors", SectorRange { count: 0, ..good }, Tolerance::Any),
            ("with reserved flags", SectorRange { flags: 2, ..good }, Tolerance::Failure),
            ("with all flags", SectorRange { flags: u32::MAX, ..good }, Tolerance::Failure),
            ("with the flag to unmap", SectorRange { flags: 1, ..good }, Tolerance::Any),
        ];
        for (name, range, tolerance) in ranges {
            let make = move |_: &FrontEnd| VirtioBlkRequest { kind, ..VirtioBlkRequest::discard(&[range]) };
            all.push(request(format!("{what} {name}"), tolerance, make).with(needs));
        }
        let past = move |fe: &FrontEnd| {
            let range = SectorRange { sector: fe.config.capacity - 4, ..good };
            VirtioBlkRequest { kind, ..VirtioBlkRequest::discard(&[range]) }
        };
        all.push(request(format!("{what} across the end"), Tolerance::Failure, past).with(needs));
        for length in [0_u32, 1, 15, 17, 24, 31] {
            let make = move |_: &FrontEnd| VirtioBlkRequest::new(kind, 0, &vec![0; length as usize], 0);
            all.push(request(format!("{what} of {length} bytes"), Tolerance::Failure, make).with(needs));
        }
        let many = move |fe: &FrontEnd| {
            let limit = if kind == kind::DISCARD { fe.config.max_discard_seg } else { fe.config.max_write_zeroes_seg };
            let range = SectorRange { count: 1, ..good };
            VirtioBlkRequest { kind, ..VirtioBlkRequest::discard(&vec![range; limit.min(4096) as usize + 1]) }
        };
        all.push(request(format!("{what} of too many segments"), Tolerance::Failure, many).with(needs));
        let huge = move |_: &FrontEnd| VirtioBlkRequest::new(kind, 0, &vec![0xFF; 1 << 20], 0);
        all.push(request(format!("{what} of 1 MiB of ones"), Tolerance::Failure, huge).with(needs));
        let one_bad = move |_: &FrontEnd| {
            let bad = SectorRange { sector: 1 << 54, ..good };
            VirtioBlkRequest { kind, ..VirtioBlkRequest::discard(&[good, bad]) }
        };
        all.push(
            request(format!("{what} with a bad segment behind a good one"), Tolerance::Failure, one_bad).with(needs),
        );
    }
    // Not negotiated, because no case without it asks for it.
    for (what, kind, bit) in
        [("discard", kind::DISCARD, feature::DISCARD), ("write-zeroes", kind::WRITE_ZEROES, feature::WRITE_ZEROES)]
    {
        let make = move |_: &FrontEnd| VirtioBlkRequest { kind, ..VirtioBlkRequest::discard(&[good]) };
        let mut case = request(format!("{what} that was not negotiated"), Tolerance::Any, make);
        case.options.features &= !bit;
        all.push(case);
    }
    all
}

fn segmentation() -> Vec<HostileCase> {
    let mut all = Vec::new();
    let mut add = |name: &str, attack: fn(&mut FrontEnd) -> Result<DeviceReaction>| {
        all.push(HostileCase::new(name, Running, Tolerance::Success, attack));
    };
    add("header in sixteen buffers but two", |fe| {
        // The queue has 16 descriptors: twelve for a header, two for data, one for the status.
        let lengths = [1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 5];
        let data = super::pattern(SCRATCH_SECTOR, 2, 5);
        let write = VirtioBlkRequest::write(SCRATCH_SECTOR, &data).split(&[&lengths[..], &[3]].concat(), &[]);
        fe.run(0, &write)?.ok();
        let read = VirtioBlkRequest::read(SCRATCH_SECTOR, 1024).split(&lengths, &[1, 1023]);
        same(fe.run(0, &read)?.ok() == data)
    });
    add("header and data in one buffer, data and status in one", |fe| {
        let data = super::pattern(SCRATCH_SECTOR, 8, 6);
        fe.run(0, &VirtioBlkRequest::write(SCRATCH_SECTOR, &data).split(&[], &[]))?.ok();
        same(fe.run(0, &VirtioBlkRequest::read(SCRATCH_SECTOR, 4096).split(&[], &[]))?.ok() == data)
    });
    add("buffers at odd addresses", |fe| {
        let data = super::pattern(SCRATCH_SECTOR, 8, 7);
        let odd = |request: VirtioBlkRequest| VirtioBlkRequest { misaligned_by: 3, ..request };
        fe.run(0, &odd(VirtioBlkRequest::write(SCRATCH_SECTOR, &data).split(&[7, 100, 513, 1], &[])))?.ok();
        let read = VirtioBlkRequest::read(SCRATCH_SECTOR, 4096).split(&[5], &[1, 511, 700]);
        same(fe.run(0, &odd(read))?.ok() == data)
    });
    add("one buffer many times", |fe| {
        let raw = RawRequest::new(fe, kind::IN, SCRATCH_SECTOR)?;
        let mut buffers = vec![(raw.header, 16, 0)];
        buffers.extend((0..14).map(|_| (raw.data, DATA / 16 * 16, WRITE)));
        buffers.push((raw.status, 1, WRITE));
        fe.fire_and_observe(&chain(&buffers), raw.status)
    });
    all.push(HostileCase::new("read of 28 MiB into one buffer", Running, Tolerance::Any, |fe| {
        let length = 4 << 20;
        let address = fe.memory.allocate_in(1, length / 2, 4096)?;
        let raw = RawRequest::new(fe, kind::IN, 0)?;
        let mut buffers = vec![(raw.header, 16, 0)];
        buffers.extend((0..14).map(|_| (address, (length / 2 / SECTOR * SECTOR) as u32, WRITE)));
        buffers.push((raw.status, 1, WRITE));
        let reaction = fe.fire_and_observe(&chain(&buffers), raw.status);
        fe.check_neighbour()?;
        reaction
    }));
    all
}

fn same(is_same: bool) -> Result<DeviceReaction> {
    if is_same { Ok(Accepted) } else { Err(FrontEndError::Violation("other data".into())) }
}
