//! Chains of commands whose buffers are misplaced, short, missing, or of the wrong direction.

use std::time::{Duration, Instant};

use super::super::rings::chain;
use super::super::{HostileCase, SCRATCH_SECTOR, Tolerance};
use super::DeviceReaction::{self, Accepted};
use super::{REQUESTS, SIZES, judge, ready_case};
use crate::buffers::{UNWRITTEN, UsedBuffers};
use crate::error::{FrontEndError, Result};
use crate::front_end::FrontEnd;
use crate::message::feature;
use crate::rings::{INDIRECT, RawDescriptor, WRITE};
use crate::scsi::{ScsiHostCommand, ScsiHostCompletion, cdb, unit_address};

/// Time for which a header is written while the device reads it.
const RACE: Duration = Duration::from_millis(200);
/// Bytes of the data buffer.
const DATA: u32 = 8192;
/// Bytes around the response.
const RESPONSE: u32 = 512;
/// Bytes of a command before its data.
const HEADER: u32 = 51;
/// Bytes of a response before its data.
const REPLY: u32 = 108;

/// Buffers of one command in guest memory.
struct RawScsiCommand {
    header: u64,
    data: u64,
    response: u64,
    /// Place for a table of descriptors.
    table: u64,
}

impl RawScsiCommand {
    /// Writes a header to guest memory, and allocates the other buffers.
    fn new(fe: &FrontEnd, command: &ScsiHostCommand) -> Result<Self> {
        let allocate = |length: u32| fe.memory.allocate(length.into(), 16);
        let this = Self {
            header: allocate(HEADER)?,
            data: allocate(DATA)?,
            response: allocate(RESPONSE)?,
            table: allocate(4096)?,
        };
        fe.memory.write(this.header, &command.header(SIZES))?;
        fe.memory.write(this.data, &[UNWRITTEN; DATA as usize])?;
        fe.memory.write(this.response, &[UNWRITTEN; RESPONSE as usize])?;
        Ok(this)
    }

    /// Creates a read or a write of one block.
    fn one_block(fe: &FrontEnd, is_write: bool) -> Result<Self> {
        let cdb = if is_write { cdb::write16(SCRATCH_SECTOR, 1) } else { cdb::read16(SCRATCH_SECTOR, 1) };
        Self::new(fe, &ScsiHostCommand::new(0, cdb))
    }

    /// Returns the descriptors of a read or a write of one block: the response is behind the header or behind the data.
    fn descriptors(&self, is_write: bool) -> Vec<RawDescriptor> {
        let (header, response) = ((self.header, HEADER, 0), (self.response, REPLY, WRITE));
        match is_write {
            false => chain(&[header, response, (self.data, 512, WRITE)]),
            true => chain(&[header, (self.data, 512, 0), response]),
        }
    }

    /// Makes descriptors available, and waits for what the device does.
    fn fire(&self, fe: &mut FrontEnd, descriptors: &[RawDescriptor]) -> Result<DeviceReaction> {
        fe.fire_on(REQUESTS, descriptors)?;
        // A response begins in the first writable buffer.
        let response = match descriptors.first() {
            Some(first) if first.flags & WRITE != 0 => first.address,
            _ => self.response,
        };
        fe.observe_queue(REQUESTS, |memory| {
            let mut bytes = vec![0; REPLY as usize];
            memory.read(response, &mut bytes)?;
            Ok(judge(&ScsiHostCompletion::decode(UsedBuffers { id: 0, bytes, written: None }, SIZES)))
        })
    }

    /// Checks that the device wrote to no byte of a buffer from a place on.
    fn check_untouched(&self, fe: &FrontEnd, address: u64, from: u32, to: u32) -> Result<()> {
        let mut bytes = vec![0; (to - from) as usize];
        fe.memory.read(address + u64::from(from), &mut bytes)?;
        match bytes.iter().all(|&byte| byte == UNWRITTEN) {
            true => Ok(()),
            false => Err(FrontEndError::Violation("the device wrote past the end of a buffer".into())),
        }
    }
}

/// Returns all cases.
pub(super) fn cases() -> Vec<HostileCase> {
    let mut all = places();
    all.extend(directions());
    all.extend(headers());
    all.extend(responses());
    all.extend(races());
    all
}

/// Cases of a read and a write whose descriptors are changed.
fn changed<C>(name: &str, tolerance: Tolerance, change: C) -> [HostileCase; 2]
where
    C: Fn(&FrontEnd, &RawScsiCommand, &mut Vec<RawDescriptor>, bool) -> Result<()> + Clone + Send + Sync + 'static,
{
    [false, true].map(|is_write| {
        let change = change.clone();
        let name = format!("{name}, {}", if is_write { "write" } else { "read" });
        ready_case(name, tolerance, move |fe| {
            let command = RawScsiCommand::one_block(fe, is_write)?;
            let mut descriptors = command.descriptors(is_write);
            change(fe, &command, &mut descriptors, is_write)?;
            command.fire(fe, &descriptors)
        })
    })
}

type Misplacement = fn(&FrontEnd, &mut RawDescriptor) -> Result<()>;

fn places() -> Vec<HostileCase> {
    let misplacements: [(&str, Misplacement); 6] = [
        ("outside of memory", |_, it| {
            it.address = 0x1234_5678_9000;
            Ok(())
        }),
        ("at the end of all addresses", |_, it| {
            it.address = u64::MAX;
            Ok(())
        }),
        ("that wraps", |_, it| {
            (it.address, it.length) = (u64::MAX - 511, 1024);
            Ok(())
        }),
        ("at its user address", |fe, it| {
            it.address = fe.memory.user(it.address)?;
            Ok(())
        }),
        ("across the end of memory", |fe, it| {
            (it.address, it.length) = (fe.memory.end() - 8, 512);
            Ok(())
        }),
        ("in a gap between regions", |fe, it| {
            it.address = fe.memory.regions()[1].description().guest - 1024;
            Ok(())
        }),
    ];
    let mut all = Vec::from(changed("as it should be", Tolerance::Success, |_, _, _, _| Ok(())));
    for (part, which) in [("header", 0), ("response", 1), ("data", 2)] {
        for (what, misplace) in misplacements {
            all.extend(changed(&format!("{part} {what}"), Tolerance::Failure, move |fe, _, it, is_write| {
                // The response of a write is behind the data.
                let at = if is_write && which > 0 { 3 - which } else { which };
                misplace(fe, &mut it[at])
            }));
        }
    }
    all.extend(changed("data of 2^32 - 1 bytes", Tolerance::Failure, |_, _, it, is_write| {
        it[if is_write { 1 } else { 2 }].length = u32::MAX;
        Ok(())
    }));
    all.extend(changed("header and response in one place", Tolerance::Any, |_, command, it, is_write| {
        it[if is_write { 2 } else { 1 }].address = command.header;
        Ok(())
    }));
    all.extend(changed("response and data in one place", Tolerance::Any, |_, command, it, is_write| {
        it[if is_write { 1 } else { 2 }].address = command.response;
        Ok(())
    }));
    all.extend(changed("data that are the queue itself", Tolerance::Any, |fe, _, it, is_write| {
        it[if is_write { 1 } else { 2 }].address = fe.queues[REQUESTS].ring.parts().descriptors;
        Ok(())
    }));
    all.extend(changed("data that are the event queue", Tolerance::Any, |fe, _, it, is_write| {
        it[if is_write { 1 } else { 2 }].address = fe.queues[1].ring.parts().used;
        Ok(())
    }));
    for case in changed("command in a table", Tolerance::Success, |fe, command, it, _| {
        fe.write_table(command.table, it)?;
        *it = vec![RawDescriptor { address: command.table, length: 48, flags: INDIRECT, next_or_id: 0 }];
        Ok(())
    }) {
        all.push(case.with(feature::INDIRECT_DESC));
    }
    all
}

fn directions() -> Vec<HostileCase> {
    let mut all = Vec::from(changed("data of the wrong direction", Tolerance::Failure, |_, command, it, is_write| {
        // Each command gets the chain of the other.
        *it = command.descriptors(!is_write);
        Ok(())
    }));
    all.extend(changed("no data", Tolerance::Failure, |_, command, it, _| {
        *it = chain(&[(command.header, HEADER, 0), (command.response, REPLY, WRITE)]);
        Ok(())
    }));
    all.extend(changed("data of length 0", Tolerance::Failure, |_, _, it, is_write| {
        it[if is_write { 1 } else { 2 }].length = 0;
        Ok(())
    }));
    all.extend(changed("data in both directions", Tolerance::Any, |_, command, it, _| {
        let (out, back) = ((command.data, 512, 0), (command.data + 4096, 512, WRITE));
        *it = chain(&[(command.header, HEADER, 0), out, (command.response, REPLY, WRITE), back]);
        Ok(())
    }));
    all.extend(changed("header that is writable", Tolerance::Failure, |_, _, it, _| {
        it[0].flags |= WRITE;
        Ok(())
    }));
    all.extend(changed("response that is not writable", Tolerance::Failure, |_, _, it, is_write| {
        it[if is_write { 2 } else { 1 }].flags &= !WRITE;
        Ok(())
    }));
    all.extend(changed("all buffers writable", Tolerance::Failure, |_, _, it, _| {
        it.iter_mut().for_each(|descriptor| descriptor.flags |= WRITE);
        Ok(())
    }));
    all.extend(changed("no buffer writable", Tolerance::Failure, |_, _, it, _| {
        it.iter_mut().for_each(|descriptor| descriptor.flags &= !WRITE);
        Ok(())
    }));
    all.extend(changed("readable buffer behind a writable one", Tolerance::Failure, |_, command, it, _| {
        *it = chain(&[(command.header, HEADER, 0), (command.response, REPLY, WRITE), (command.data, 512, 0)]);
        Ok(())
    }));
    all.extend(changed("response before the header", Tolerance::Failure, |_, command, it, _| {
        *it = chain(&[(command.response, REPLY, WRITE), (command.header, HEADER, 0)]);
        Ok(())
    }));
    all.extend(changed("only a header", Tolerance::Failure, |_, command, it, _| {
        *it = chain(&[(command.header, HEADER, 0)]);
        Ok(())
    }));
    all.extend(changed("only a response", Tolerance::Failure, |_, command, it, _| {
        *it = chain(&[(command.response, REPLY, WRITE)]);
        Ok(())
    }));
    all
}

fn headers() -> Vec<HostileCase> {
    let mut all = Vec::new();
    let ready = || ScsiHostCommand::new(0, cdb::test_unit_ready());
    for length in [0, 1, 7, 8, 16, 18, 19, 20, 25, 50] {
        all.push(ready_case(format!("header of {length} bytes"), Tolerance::Failure, move |fe| {
            let command = RawScsiCommand::new(fe, &ready())?;
            command.fire(fe, &chain(&[(command.header, length, 0), (command.response, REPLY, WRITE)]))
        }));
    }
    all.push(ready_case("header of 13 bytes in 13 buffers", Tolerance::Failure, move |fe| {
        let command = RawScsiCommand::new(fe, &ready())?;
        let mut buffers: Vec<_> = (0..13).map(|at| (command.header + at, 1, 0)).collect();
        buffers.push((command.response, REPLY, WRITE));
        command.fire(fe, &chain(&buffers))
    }));
    all.push(ready_case("header of 2^32 - 1 bytes", Tolerance::Failure, move |fe| {
        let command = RawScsiCommand::new(fe, &ready())?;
        command.fire(fe, &chain(&[(command.header, u32::MAX, 0), (command.response, REPLY, WRITE)]))
    }));
    all
}

fn responses() -> Vec<HostileCase> {
    let mut all = Vec::new();
    for (what, lba) in [("a command", SCRATCH_SECTOR), ("a command that fails", u64::MAX)] {
        for length in [0, 1, 4, 10, 11, 12, 13, 29, 107] {
            // What the response says fits in 12 bytes; sense data do not.
            let tolerance = if length < 12 { Tolerance::Failure } else { Tolerance::Any };
            let name = format!("response of {length} bytes to {what}");
            all.push(ready_case(name, tolerance, move |fe| {
                let command = RawScsiCommand::new(fe, &ScsiHostCommand::new(0, cdb::synchronize_cache16(lba, 0)))?;
                let chain = chain(&[(command.header, HEADER, 0), (command.response, length, WRITE)]);
                let reaction = command.fire(fe, &chain);
                command.check_untouched(fe, command.response, length, RESPONSE)?;
                reaction
            }));
        }
    }
    for length in [0, 11, 107] {
        all.push(ready_case(format!("response of {length} bytes to a write"), Tolerance::Any, move |fe| {
            let command = RawScsiCommand::one_block(fe, true)?;
            let buffers = [(command.header, HEADER, 0), (command.data, 512, 0), (command.response, length, WRITE)];
            let reaction = command.fire(fe, &chain(&buffers));
            command.check_untouched(fe, command.response, length, RESPONSE)?;
            reaction
        }));
    }
    for length in [1, 511, 513, 1024] {
        let name = format!("response and {length} bytes for a read of 512");
        let tolerance = if length < 512 { Tolerance::Failure } else { Tolerance::Success };
        all.push(ready_case(name, tolerance, move |fe| {
            let command = RawScsiCommand::one_block(fe, false)?;
            let buffers =
                [(command.header, HEADER, 0), (command.response, REPLY, WRITE), (command.data, length, WRITE)];
            let reaction = command.fire(fe, &chain(&buffers));
            command.check_untouched(fe, command.data, length.min(512), DATA)?;
            reaction
        }));
    }
    all
}

/// Cases in which the driver writes what the device reads.
fn races() -> Vec<HostileCase> {
    let race = |name: &str, change: fn(&FrontEnd, u64, u64) -> Result<()>| {
        ready_case(name, Tolerance::Any, move |fe| {
            let command = RawScsiCommand::one_block(fe, false)?;
            let good = command.descriptors(false);
            let begun = Instant::now();
            let mut round = 0_u64;
            while begun.elapsed() < RACE {
                round += 1;
                if round.is_multiple_of(16) {
                    fe.fire_on(REQUESTS, &good)?;
                }
                change(fe, command.header, round)?;
            }
            fe.get_features()?;
            Ok(Accepted)
        })
    };
    vec![
        race("CDBs that change meanwhile", |fe, header, round| {
            // Only commands that write nothing.
            let opcode = [0x88, 0x12, 0x00, 0x9E, 0xA0, 0x5E, 0xFF][round as usize % 7];
            fe.memory.write(header + 19, &[opcode, round as u8])?;
            fe.memory.write(header + 29, &(round as u32 % 64).to_be_bytes())
        }),
        race("units that change meanwhile", |fe, header, round| {
            fe.memory.write(header, &unit_address((round % 3) as u8, (round % 5) as u16))
        }),
        race("identifiers and attributes that change meanwhile", |fe, header, round| {
            fe.memory.write(header + 8, &(round % 2).to_le_bytes())?;
            fe.memory.write(header + 16, &[(round % 4) as u8])
        }),
    ]
}
