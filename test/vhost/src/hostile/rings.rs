//! Descriptors, chains, tables and indices that are wrong, in both formats.

use std::time::{Duration, Instant};

use super::DeviceReaction::{self, Accepted, Ignored};
use super::{HostileCase, SCRATCH_SECTOR, Tolerance};
use crate::block::{UNWRITTEN, VirtioBlkRequest, kind};
use crate::error::Result;
use crate::front_end::FrontEnd;
use crate::front_end::FrontEndStage::Running;
use crate::message::feature;
use crate::rings::{DriverRing, INDIRECT, NEXT, RawDescriptor, WRITE};

/// Time for which a ring is written while the device reads it.
const RACE: Duration = Duration::from_millis(200);

/// Buffers of one request in guest memory.
pub(super) struct RawRequest {
    pub(super) header: u64,
    pub(super) data: u64,
    pub(super) status: u64,
    /// Place for tables of descriptors.
    pub(super) table: u64,
}

/// Bytes of the data buffer.
pub(super) const DATA: u32 = 8192;

impl RawRequest {
    /// Writes a header to guest memory, and allocates the other buffers.
    pub(super) fn new(fe: &FrontEnd, kind: u32, sector: u64) -> Result<Self> {
        let allocate = |length: u64| fe.memory.allocate(length, 16);
        let this = Self {
            header: allocate(64)?,
            data: allocate(u64::from(DATA))?,
            status: allocate(16)?,
            table: allocate(65536)?,
        };
        fe.memory.write(this.header, &[kind.to_le_bytes(), [0; 4]].concat())?;
        fe.memory.write(this.header + 8, &sector.to_le_bytes())?;
        fe.memory.write(this.status, &[UNWRITTEN])?;
        Ok(this)
    }

    /// Returns the descriptors of a read of one sector.
    pub(super) fn read(&self) -> Vec<RawDescriptor> {
        chain(&[(self.header, 16, 0), (self.data, 512, WRITE), (self.status, 1, WRITE)])
    }

    /// Returns the descriptors of a write of one sector.
    pub(super) fn write(&self) -> Vec<RawDescriptor> {
        chain(&[(self.header, 16, 0), (self.data, 512, 0), (self.status, 1, WRITE)])
    }
}

/// Returns descriptors that continue in one another.
pub(super) fn chain(buffers: &[(u64, u32, u16)]) -> Vec<RawDescriptor> {
    let last = buffers.len() - 1;
    let linked = |(at, &(address, length, flags)): (usize, &(u64, u32, u16))| RawDescriptor {
        address,
        length,
        flags: flags | if at < last { NEXT } else { 0 },
        next_or_id: if at < last { at as u16 + 1 } else { 0 },
    };
    buffers.iter().enumerate().map(linked).collect()
}

impl FrontEnd {
    /// Writes descriptors from index 0 on, and makes the first available.  In a packed ring, numbers of next descriptors
    /// become the id 0.
    pub(super) fn fire(&mut self, descriptors: &[RawDescriptor]) -> Result<()> {
        self.fire_on(0, descriptors)
    }

    /// Does the same on any queue, on which nothing is in flight.
    pub(super) fn fire_on(&mut self, queue: usize, descriptors: &[RawDescriptor]) -> Result<()> {
        let queue = &mut self.queues[queue];
        match &mut queue.ring {
            DriverRing::Split(ring) => {
                for (index, descriptor) in descriptors.iter().enumerate() {
                    ring.write_descriptor(index as u16, descriptor)?;
                }
                ring.push_head(0)?;
                ring.publish()?;
            }
            DriverRing::Packed(ring) => {
                let available = ring.available_flags();
                for (index, descriptor) in descriptors.iter().enumerate().rev() {
                    let flags = descriptor.flags | available;
                    ring.write_descriptor(index as u16, &RawDescriptor { flags, next_or_id: 0, ..*descriptor })?;
                }
            }
        }
        queue.notify()
    }

    /// Makes descriptors available, and waits for what the device does.
    pub(super) fn fire_and_observe(&mut self, descriptors: &[RawDescriptor], status: u64) -> Result<DeviceReaction> {
        self.fire(descriptors)?;
        self.observe(status)
    }

    /// Writes a table of descriptors in the format of the queue.
    pub(super) fn write_table(&self, address: u64, descriptors: &[RawDescriptor]) -> Result<()> {
        let is_packed = self.queues[0].ring.is_packed();
        let encode = |descriptor: &RawDescriptor| match is_packed {
            // Without links: what follows in the table follows in the chain (2.8.7).
            true => RawDescriptor { flags: descriptor.flags & !NEXT, next_or_id: 0, ..*descriptor }.encode_packed(),
            false => descriptor.encode_split(),
        };
        self.memory.write(address, &descriptors.iter().flat_map(encode).collect::<Vec<u8>>())
    }
}

type ChainChange = fn(&mut FrontEnd, &RawRequest, &mut Vec<RawDescriptor>) -> Result<()>;

/// Returns all cases for one format.
pub(super) fn cases(is_packed: bool) -> Vec<HostileCase> {
    let mut all = chains();
    all.extend(tables(is_packed));
    all.extend(if is_packed { packed() } else { split() });
    all.extend(races());
    for case in &mut all {
        case.name = format!("{}: {}", if is_packed { "packed" } else { "split" }, case.name);
    }
    match is_packed {
        true => all.into_iter().map(|case| case.with(feature::RING_PACKED)).collect(),
        false => all,
    }
}

fn changed(name: &str, tolerance: Tolerance, is_write: bool, change: ChainChange) -> HostileCase {
    HostileCase::new(name, Running, tolerance, move |fe| {
        let request = RawRequest::new(fe, if is_write { kind::OUT } else { kind::IN }, SCRATCH_SECTOR)?;
        let mut descriptors = if is_write { request.write() } else { request.read() };
        change(fe, &request, &mut descriptors)?;
        fe.fire_and_observe(&descriptors, request.status)
    })
}

fn chains() -> Vec<HostileCase> {
    let mut all = Vec::new();
    let mut add = |name: &str, tolerance, change: ChainChange| {
        for is_write in [false, true] {
            let name = format!("{name}, {}", if is_write { "write" } else { "read" });
            all.push(changed(&name, tolerance, is_write, change));
        }
    };
    add("as it should be", Tolerance::Success, |_, _, _| Ok(()));
    for (name, at) in [("header", 0), ("data", 1), ("status", 2)] {
        let changes: [(&str, ChainChange); 5] = match at {
            0 => bad_buffers::<0>(),
            1 => bad_buffers::<1>(),
            _ => bad_buffers::<2>(),
        };
        for (what, change) in changes {
            add(&format!("{name} {what}"), Tolerance::Failure, change);
        }
    }
    add("data of length 0", Tolerance::Any, |_, _, it| {
        it[1].length = 0;
        Ok(())
    });
    add("data of length 2^32 - 1", Tolerance::Failure, |_, _, it| {
        it[1].length = u32::MAX;
        Ok(())
    });
    add("data in a gap between regions", Tolerance::Failure, |fe, _, it| {
        it[1].address = fe.memory.regions()[1].description().guest - 1024;
        Ok(())
    });
    add("data from before a region into it", Tolerance::Failure, |fe, _, it| {
        it[1].address = fe.memory.regions()[1].description().guest - 256;
        Ok(())
    });
    add("header that is writable", Tolerance::Failure, |_, _, it| {
        it[0].flags |= WRITE;
        Ok(())
    });
    add("data of the wrong direction", Tolerance::Any, |_, _, it| {
        it[1].flags ^= WRITE;
        Ok(())
    });
    add("status that is not writable", Tolerance::Failure, |_, _, it| {
        it[2].flags &= !WRITE;
        Ok(())
    });
    add("readable buffer behind a writable one", Tolerance::Failure, |_, request, it| {
        *it = chain(&[(request.header, 16, 0), (request.status, 1, WRITE), (request.data, 512, 0)]);
        Ok(())
    });
    add("unknown flags", Tolerance::Any, |_, _, it| {
        it.iter_mut().for_each(|descriptor| descriptor.flags |= 0x7F78);
        Ok(())
    });
    add("only a header", Tolerance::Failure, |_, _, it| {
        it.truncate(1);
        it[0].flags = 0;
        Ok(())
    });
    add("only a status", Tolerance::Failure, |_, request, it| {
        *it = chain(&[(request.status, 1, WRITE)]);
        Ok(())
    });
    add("header and status in one place", Tolerance::Any, |_, request, it| {
        it[2].address = request.header;
        Ok(())
    });
    add("data that is the queue itself", Tolerance::Any, |fe, _, it| {
        it[1].address = fe.queues[0].ring.parts().descriptors;
        Ok(())
    });
    add("data that is the used ring", Tolerance::Any, |fe, _, it| {
        it[1].address = fe.queues[0].ring.parts().used;
        Ok(())
    });
    all
}

/// Changes of the buffer at an index; status buffers among them have no status to look at.
fn bad_buffers<const AT: usize>() -> [(&'static str, ChainChange); 5] {
    [
        ("outside of memory", |_, _, it| {
            it[AT].address = 0x1234_5678_9000;
            Ok(())
        }),
        ("at the end of all addresses", |_, _, it| {
            it[AT].address = u64::MAX;
            Ok(())
        }),
        ("that wraps", |_, _, it| {
            (it[AT].address, it[AT].length) = (u64::MAX - 511, 1024);
            Ok(())
        }),
        ("at its user address", |fe, _, it| {
            it[AT].address = fe.memory.user(it[AT].address)?;
            Ok(())
        }),
        ("across the end of memory", |fe, _, it| {
            (it[AT].address, it[AT].length) = (fe.memory.end() - 8, 512);
            Ok(())
        }),
    ]
}

fn tables(is_packed: bool) -> Vec<HostileCase> {
    let mut all = Vec::new();
    let mut add = |name: &str, tolerance, change: ChainChange| {
        all.push(changed(name, tolerance, false, change).with(feature::INDIRECT_DESC));
    };
    fn whole(request: &RawRequest, length: u32, flags: u16) -> Vec<RawDescriptor> {
        vec![RawDescriptor { address: request.table, length, flags: INDIRECT | flags, next_or_id: 0 }]
    }
    fn replaced(fe: &FrontEnd, request: &RawRequest, it: &mut Vec<RawDescriptor>, length: u32) -> Result<()> {
        fe.write_table(request.table, it)?;
        *it = whole(request, length, 0);
        Ok(())
    }
    add("table as it should be", Tolerance::Success, |fe, request, it| replaced(fe, request, it, 48));
    add("table of length 0", Tolerance::Failure, |_, request, it| {
        *it = whole(request, 0, 0);
        Ok(())
    });
    let lengths: [(&str, ChainChange); 4] = [
        ("1 byte", |fe, request, it| replaced(fe, request, it, 1)),
        ("40 bytes", |fe, request, it| replaced(fe, request, it, 40)),
        ("47 bytes", |fe, request, it| replaced(fe, request, it, 47)),
        ("49 bytes", |fe, request, it| replaced(fe, request, it, 49)),
    ];
    for (name, change) in lengths {
        add(&format!("table of {name}"), Tolerance::Failure, change);
    }
    add("table of 2^32 - 1 bytes", Tolerance::Failure, |fe, request, it| replaced(fe, request, it, u32::MAX));
    add("table of 2^32 - 16 bytes", Tolerance::Failure, |fe, request, it| replaced(fe, request, it, u32::MAX - 15));
    add("table outside of memory", Tolerance::Failure, |_, request, it| {
        *it = whole(request, 48, 0);
        it[0].address = 0x1234_5678_9000;
        Ok(())
    });
    add("table across the end of memory", Tolerance::Failure, |fe, request, it| {
        *it = whole(request, 48, 0);
        it[0].address = fe.memory.end() - 16;
        Ok(())
    });
    add("table that wraps", Tolerance::Failure, |_, request, it| {
        *it = whole(request, 48, 0);
        it[0].address = u64::MAX - 15;
        Ok(())
    });
    add("table at an odd address", Tolerance::Any, |fe, request, it| {
        fe.write_table(request.table + 3, it)?;
        *it = whole(request, 48, 0);
        it[0].address += 3;
        Ok(())
    });
    add("table in a table", Tolerance::Failure, |fe, request, it| {
        fe.write_table(request.table, it)?;
        let inner = whole(request, 48, 0);
        fe.write_table(request.table + 1024, &inner)?;
        *it = whole(request, 16, 0);
        it[0].address += 1024;
        Ok(())
    });
    add("table that holds itself", Tolerance::Failure, |fe, request, it| {
        *it = whole(request, 16, 0);
        fe.write_table(request.table, it)
    });
    // The packed format does not forbid it.
    let continues = if is_packed { Tolerance::Any } else { Tolerance::Failure };
    add("table that continues", continues, |fe, request, it| {
        fe.write_table(request.table, it)?;
        let last = it[2];
        *it = whole(request, 48, NEXT);
        it[0].next_or_id = 1;
        it.push(last);
        Ok(())
    });
    add("table that is writable", Tolerance::Any, |fe, request, it| {
        fe.write_table(request.table, it)?;
        *it = whole(request, 48, WRITE);
        Ok(())
    });
    add("table of 4096 descriptors for one sector each", Tolerance::Any, |fe, request, it| {
        let data = (0..4094).map(|_| (request.data, 512, WRITE));
        let buffers: Vec<_> =
            [(request.header, 16, 0)].into_iter().chain(data).chain([(request.status, 1, WRITE)]).collect();
        fe.write_table(request.table, &chain(&buffers))?;
        *it = whole(request, 65536, 0);
        Ok(())
    });
    add("table whose buffers are all outside", Tolerance::Failure, |fe, request, it| {
        let buffers: Vec<_> = (0..100).map(|at| (0x1234_5678_0000 + at, 512, WRITE)).collect();
        fe.write_table(request.table, &chain(&buffers))?;
        *it = whole(request, 1600, 0);
        Ok(())
    });
    let without = changed("table without INDIRECT_DESC", Tolerance::Failure, false, |fe, request, it| {
        replaced(fe, request, it, 48)
    });
    all.push(without);
    all
}

/// Cases of the split format.
fn split() -> Vec<HostileCase> {
    let mut all = Vec::new();
    let mut add = |name: &str, tolerance, change: ChainChange| all.push(changed(name, tolerance, false, change));
    add("descriptor that continues in itself", Tolerance::Failure, |_, _, it| {
        it[1].next_or_id = 1;
        Ok(())
    });
    add("chain that returns to its head", Tolerance::Failure, |_, _, it| {
        it[2].flags |= NEXT;
        Ok(())
    });
    add("chain that continues outside", Tolerance::Failure, |_, _, it| {
        it[1].next_or_id = 16;
        Ok(())
    });
    add("chain that continues far outside", Tolerance::Failure, |_, _, it| {
        it[1].next_or_id = u16::MAX;
        Ok(())
    });
    add("chain of all descriptors, which goes on", Tolerance::Failure, |_, request, it| {
        let buffers: Vec<_> = (0..16).map(|_| (request.data, 32, WRITE)).collect();
        *it = chain(&buffers);
        it[15] = RawDescriptor { flags: WRITE | NEXT, next_or_id: 0, ..it[15] };
        Ok(())
    });
    for (name, next) in [("itself", 1_u16), ("its first", 0), ("what is outside", 3), ("what is far outside", u16::MAX)]
    {
        all.push(
            HostileCase::new(
                format!("table with a descriptor that continues in {name}"),
                Running,
                Tolerance::Failure,
                move |fe| {
                    let request = RawRequest::new(fe, kind::IN, SCRATCH_SECTOR)?;
                    let mut inner = request.read();
                    inner[1].next_or_id = next;
                    fe.write_table(request.table, &inner)?;
                    let outer = RawDescriptor { address: request.table, length: 48, flags: INDIRECT, next_or_id: 0 };
                    fe.fire_and_observe(&[outer], request.status)
                },
            )
            .with(feature::INDIRECT_DESC),
        );
    }
    for head in [16, 17, 255, 0x8000, u16::MAX] {
        all.push(HostileCase::new(format!("head {head} of 16"), Running, Tolerance::Failure, move |fe| {
            let request = RawRequest::new(fe, kind::IN, SCRATCH_SECTOR)?;
            let queue = &mut fe.queues[0];
            queue.ring.split().push_head(head)?;
            queue.publish()?;
            queue.notify()?;
            fe.observe(request.status)
        }));
    }
    for index in [17, 100, 0x7FFF, 0x8000, u16::MAX] {
        all.push(HostileCase::new(format!("available index {index} of 16"), Running, Tolerance::Failure, move |fe| {
            let request = RawRequest::new(fe, kind::IN, SCRATCH_SECTOR)?;
            fe.queues[0].ring.split().write_available_index(index)?;
            fe.queues[0].notify()?;
            fe.observe(request.status)
        }));
    }
    all.push(HostileCase::new("available index that goes back", Running, Tolerance::Failure, |fe| {
        fe.read_sectors(SCRATCH_SECTOR, 512)?;
        fe.read_sectors(SCRATCH_SECTOR, 512)?;
        let request = RawRequest::new(fe, kind::IN, SCRATCH_SECTOR)?;
        fe.queues[0].ring.split().write_available_index(1)?;
        fe.queues[0].notify()?;
        fe.observe(request.status)
    }));
    all.push(HostileCase::new("one head sixteen times", Running, Tolerance::Any, |fe| {
        let request = RawRequest::new(fe, kind::IN, SCRATCH_SECTOR)?;
        let descriptors = request.read();
        for (index, descriptor) in descriptors.iter().enumerate() {
            fe.queues[0].ring.write_descriptor(index as u16, descriptor)?;
        }
        for _ in 0..16 {
            fe.queues[0].ring.split().push_head(0)?;
        }
        fe.queues[0].publish()?;
        fe.observe(request.status)
    }));
    all.push(HostileCase::new("used ring that the driver writes", Running, Tolerance::Any, |fe| {
        for round in 0..50_u16 {
            if fe.submit_all(0, &[VirtioBlkRequest::read(SCRATCH_SECTOR, 512)]).is_err() {
                break;
            }
            let ring = fe.queues[0].ring.split();
            ring.write_used_index(round.wrapping_mul(40_503))?;
            ring.write_used_entry(round % 16, u32::MAX, u32::MAX)?;
        }
        fe.get_features()?;
        Ok(Ignored)
    }));
    all.push(HostileCase::new("rings of ones", Running, Tolerance::Any, |fe| {
        let parts = fe.queues[0].ring.parts();
        for (address, length) in [(parts.descriptors, 256), (parts.available, 38), (parts.used, 134)] {
            fe.memory.write(address, &vec![0xFF; length])?;
        }
        fe.queues[0].notify()?;
        fe.get_features()?;
        Ok(Ignored)
    }));
    all
}

/// Cases of the packed format.
fn packed() -> Vec<HostileCase> {
    let mut all = Vec::new();
    all.push(changed("chain of all descriptors, which goes on", Tolerance::Failure, false, |_, request, it| {
        let buffers: Vec<_> = (0..16).map(|_| (request.data, 32, WRITE)).collect();
        *it = chain(&buffers);
        it[15].flags |= NEXT;
        Ok(())
    }));
    all.push(changed("chain that continues in what is not available", Tolerance::Any, false, |_, _, it| {
        it[2].flags |= NEXT;
        Ok(())
    }));
    for id in [16, 1000, u16::MAX] {
        all.push(HostileCase::new(format!("id {id} of 16"), Running, Tolerance::Any, move |fe| {
            let request = RawRequest::new(fe, kind::IN, SCRATCH_SECTOR)?;
            let ring = fe.queues[0].ring.packed();
            let available = ring.available_flags();
            for (index, descriptor) in request.read().iter().enumerate().rev() {
                let flags = descriptor.flags | available;
                ring.write_descriptor(index as u16, &RawDescriptor { flags, next_or_id: id, ..*descriptor })?;
            }
            fe.queues[0].notify()?;
            fe.observe(request.status)
        }));
    }
    all.push(HostileCase::new("one id for all chains", Running, Tolerance::Any, |fe| {
        let request = RawRequest::new(fe, kind::IN, SCRATCH_SECTOR)?;
        let descriptors: Vec<RawDescriptor> = request.read().into_iter().cycle().take(15).collect();
        fe.fire_and_observe(&descriptors, request.status)
    }));
    all.push(HostileCase::new("chains of other ids within", Running, Tolerance::Any, |fe| {
        let request = RawRequest::new(fe, kind::IN, SCRATCH_SECTOR)?;
        let ring = fe.queues[0].ring.packed();
        let available = ring.available_flags();
        for (index, descriptor) in request.read().iter().enumerate().rev() {
            let (flags, next_or_id) = (descriptor.flags | available, index as u16 + 3);
            ring.write_descriptor(index as u16, &RawDescriptor { flags, next_or_id, ..*descriptor })?;
        }
        fe.queues[0].notify()?;
        fe.observe(request.status)
    }));
    for flags in [0, 0x80, 0x8000, 0x8080, u16::MAX] {
        all.push(HostileCase::new(format!("rings of flags {flags:#x}"), Running, Tolerance::Any, move |fe| {
            let request = RawRequest::new(fe, kind::IN, SCRATCH_SECTOR)?;
            for index in 0..16 {
                let descriptor = RawDescriptor { address: request.data, length: 512, flags, next_or_id: index };
                fe.queues[0].ring.write_descriptor(index, &descriptor)?;
            }
            fe.memory.write(fe.queues[0].ring.parts().available, &[0xFF; 4])?;
            fe.queues[0].notify()?;
            fe.get_features()?;
            Ok(Ignored)
        }));
    }
    all
}

/// Cases in which the driver writes what the device reads.
fn races() -> Vec<HostileCase> {
    let mut all = Vec::new();
    all.push(HostileCase::new("descriptors that change meanwhile", Running, Tolerance::Any, |fe| {
        let request = RawRequest::new(fe, kind::IN, SCRATCH_SECTOR)?;
        let good = request.read();
        let begun = Instant::now();
        let mut round = 0_u64;
        while begun.elapsed() < RACE {
            round += 1;
            if round.is_multiple_of(16) {
                fe.fire(&good)?;
            }
            let bad = RawDescriptor { address: round << 40, length: round as u32, ..good[1] };
            let available = match &fe.queues[0].ring {
                DriverRing::Split(_) => 0,
                DriverRing::Packed(ring) => ring.available_flags(),
            };
            let chosen = if round.is_multiple_of(2) { bad } else { good[1] };
            let flags = chosen.flags | available;
            fe.queues[0].ring.write_descriptor(1, &RawDescriptor { flags, ..chosen })?;
            fe.queues[0].notify()?;
        }
        fe.get_features()?;
        Ok(Accepted)
    }));
    all.push(
        HostileCase::new("tables that change meanwhile", Running, Tolerance::Any, |fe| {
            let request = RawRequest::new(fe, kind::OUT, SCRATCH_SECTOR)?;
            let good = request.write();
            let outer = RawDescriptor { address: request.table, length: 48, flags: INDIRECT, next_or_id: 0 };
            let begun = Instant::now();
            let mut round = 0_u64;
            while begun.elapsed() < RACE {
                round += 1;
                fe.write_table(request.table, &good)?;
                if round.is_multiple_of(8) {
                    fe.fire(&[outer])?;
                }
                let mut bad = good.clone();
                bad[round as usize % 3].address = round << 36;
                bad[1].length = round as u32;
                bad[2].flags ^= WRITE | NEXT;
                fe.write_table(request.table, &bad)?;
            }
            fe.get_features()?;
            Ok(Accepted)
        })
        .with(feature::INDIRECT_DESC),
    );
    all.push(HostileCase::new("headers that change meanwhile", Running, Tolerance::Any, |fe| {
        let request = RawRequest::new(fe, kind::IN, SCRATCH_SECTOR)?;
        let good = request.read();
        let begun = Instant::now();
        let mut round = 0_u64;
        while begun.elapsed() < RACE {
            round += 1;
            if round.is_multiple_of(16) {
                fe.fire(&good)?;
            }
            // Only types that write nothing.
            let kind = if round.is_multiple_of(2) { kind::IN } else { kind::GET_ID };
            fe.memory.write(request.header, &kind.to_le_bytes())?;
            fe.memory.write(request.header + 8, &(round << 30).to_le_bytes())?;
        }
        fe.get_features()?;
        Ok(Accepted)
    }));
    all
}
