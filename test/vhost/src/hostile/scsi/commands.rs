//! Units, CDBs, attributes and lengths of commands that are wrong, and divisions into buffers that are unusual.

use std::time::Instant;

use super::super::rings::chain;
use super::super::{HostileCase, SCRATCH_SECTOR, Tolerance, pattern, same};
use super::DeviceReaction::Accepted;
use super::{PREPARATIONS, REQUESTS, SIZES, command, judge, ready_case, run};
use crate::message::feature;
use crate::rings::{INDIRECT, RawDescriptor, WRITE};
use crate::scsi::cdb::{self, range16};
use crate::scsi::command::attribute;
use crate::scsi::{REPORT_LUNS_UNIT, ScsiHostCommand, ScsiHostCompletion, unit_address};

/// Returns all cases.
pub(super) fn cases() -> Vec<HostileCase> {
    let mut all = units();
    all.extend(cdbs());
    all.extend(sweeps());
    all.extend(lengths());
    all.extend(attributes());
    all.extend(segmentation());
    all
}

fn read() -> ScsiHostCommand {
    ScsiHostCommand::read(0, SCRATCH_SECTOR, 1)
}

fn units() -> Vec<HostileCase> {
    let unit = unit_address(0, 0);
    let with = |at: usize, byte: u8| {
        let mut lun = unit;
        lun[at] = byte;
        lun
    };
    let addresses = [
        ("of zeroes", [0; 8], Tolerance::Failure),
        ("of ones", [0xFF; 8], Tolerance::Failure),
        ("whose first byte is 0", with(0, 0), Tolerance::Failure),
        ("whose first byte is 2", with(0, 2), Tolerance::Failure),
        ("of target 1", with(1, 1), Tolerance::Failure),
        ("of target 255", with(1, 255), Tolerance::Failure),
        ("of a unit that is not there", unit_address(0, 0x3FF0), Tolerance::Failure),
        ("of a unit in peripheral addressing that is not there", [1, 0, 0, 0xF0, 0, 0, 0, 0], Tolerance::Failure),
        ("in peripheral addressing", [1, 0, 0, 0, 0, 0, 0, 0], Tolerance::Success),
        ("on bus 1", [1, 0, 1, 0, 0, 0, 0, 0], Tolerance::Failure),
        ("in logical unit addressing", [1, 0, 0x80, 0, 0, 0, 0, 0], Tolerance::Failure),
        ("in extended addressing", [1, 0, 0xC0, 0, 0, 0, 0, 0], Tolerance::Failure),
        ("that is marked as unspecified", [1, 0, 0xFF, 0xFF, 0, 0, 0, 0], Tolerance::Failure),
        ("with a second level", with(5, 1), Tolerance::Any),
        ("with a last byte", with(7, 0xFF), Tolerance::Any),
        ("of the REPORT LUNS unit", REPORT_LUNS_UNIT, Tolerance::Failure),
        ("of the ACCESS CONTROLS unit", [0xC1, 0x02, 0, 0, 0, 0, 0, 0], Tolerance::Failure),
        ("of the TARGET LOG PAGES unit", [0xC1, 0x03, 0, 0, 0, 0, 0, 0], Tolerance::Failure),
        ("of the REPORT LUNS unit with a last byte", [0xC1, 0x01, 0, 0, 0, 0, 0, 1], Tolerance::Failure),
    ];
    let mut all = Vec::new();
    for (name, lun, tolerance) in addresses {
        all.push(command(format!("read at an address {name}"), tolerance, move || read().at(lun)));
        // Some of these commands have to succeed at a unit that is not there (SAM-5, 5.11).
        let inquiry = move || ScsiHostCommand::new(0, cdb::inquiry(None, 96)).reading(96).at(lun);
        let any = if tolerance == Tolerance::Success { tolerance } else { Tolerance::Any };
        all.push(command(format!("INQUIRY at an address {name}"), any, inquiry));
        let list = move || ScsiHostCommand::new(0, cdb::report_luns(0, 1024)).reading(1024).at(lun);
        all.push(command(format!("REPORT LUNS at an address {name}"), any, list));
    }
    all
}

fn cdbs() -> Vec<HostileCase> {
    let mut all = Vec::new();
    // Opcode and service actions of no command, or of none of a disk.
    let unknown: [(&str, &[u8]); 12] = [
        ("opcode 0xff", &[0xFF; 16]),
        ("opcode 0xc1", &[0xC1, 0, 0, 0]),
        ("opcode 0x02", &[0x02, 0, 0, 0]),
        ("opcode 0x7e", &[0x7E; 32]),
        ("variable length of 0 bytes", &[0x7F, 0, 0, 0, 0, 0, 0, 0, 0, 9]),
        ("variable length of 255 bytes", &[0x7F, 0, 0, 0, 0, 0, 0, 0xFF, 0, 9]),
        ("variable length of 24 bytes", &[0x7F, 0, 0, 0, 0, 0, 0, 24, 0, 9, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]),
        ("service action 0x1f of 0x9e", &[0x9E, 0x1F]),
        ("service action 0x1f of 0x5e", &[0x5E, 0x1F, 0, 0, 0, 0, 0, 0, 8]),
        ("service action 0x1f of 0x5f", &[0x5F, 0x1F, 0, 0, 0, 0, 0, 0, 24]),
        ("service action 0x1f of 0xa3", &[0xA3, 0x1F, 0, 0, 0, 0, 0, 0, 0, 8]),
        ("service action 0x1f of 0x9f", &[0x9F, 0x1F]),
    ];
    for (name, cdb) in unknown {
        all.push(command(format!("CDB of {name}"), Tolerance::Failure, move || {
            ScsiHostCommand::new(0, cdb).reading(512)
        }));
    }
    let places = [
        ("the end of all blocks", u64::MAX, 1),
        ("a place whose bytes wrap", 1 << 55, 8),
        ("a place whose blocks wrap", u64::MAX, u32::MAX),
        ("2^40", 1 << 40, 1),
    ];
    for (name, lba, blocks) in places {
        for (what, opcode) in [("read", 0x88), ("write", 0x8A), ("verify", 0x8F), ("synchronize", 0x91)] {
            let make = move || match opcode {
                0x8A => ScsiHostCommand::new(0, range16(opcode, 0, lba, blocks)).writing(&[1; 512]),
                0x88 => ScsiHostCommand::new(0, range16(opcode, 0, lba, blocks)).reading(512),
                _ => ScsiHostCommand::new(0, range16(opcode, 0, lba, blocks)),
            };
            all.push(command(format!("{what} of {blocks} blocks from {name} on"), Tolerance::Failure, make));
        }
    }
    for page in [0x01, 0x7F, 0x81, 0xB9, 0xC0, 0xFF] {
        let make = move || ScsiHostCommand::new(0, cdb::inquiry(Some(page), 512)).reading(512);
        all.push(command(format!("INQUIRY of page {page:#x}"), Tolerance::Failure, make));
    }
    all.push(command("INQUIRY of a page without EVPD", Tolerance::Failure, || {
        ScsiHostCommand::new(0, [0x12, 0, 0x83, 0, 255, 0]).reading(255)
    }));
    all.push(command("INQUIRY with CMDDT", Tolerance::Failure, || {
        ScsiHostCommand::new(0, [0x12, 2, 0x12, 0, 255, 0]).reading(255)
    }));
    for select in [0x03, 0x0F, 0x55, 0xFF] {
        let make = move || ScsiHostCommand::new(0, cdb::report_luns(select, 512)).reading(512);
        all.push(command(format!("REPORT LUNS with select report {select:#x}"), Tolerance::Failure, make));
    }
    for protect in [1, 3, 5, 7] {
        let make = move || ScsiHostCommand::new(0, range16(0x88, protect << 5, SCRATCH_SECTOR, 1)).reading(512);
        all.push(command(format!("read with RDPROTECT {protect}"), Tolerance::Failure, make));
    }
    all.push(command("read with NACA", Tolerance::Any, || {
        let mut cdb = cdb::read16(SCRATCH_SECTOR, 1);
        cdb[15] = 4;
        ScsiHostCommand::new(0, cdb).reading(512)
    }));
    all.push(command("CDB whose field has rubbish behind it", Tolerance::Any, || {
        let mut cdb = cdb::read16(SCRATCH_SECTOR, 1);
        cdb.resize(32, 0xA5);
        ScsiHostCommand::new(0, cdb).reading(512)
    }));
    all.push(command("TEST UNIT READY with rubbish behind it", Tolerance::Any, || {
        let mut cdb = vec![0; 6];
        cdb.resize(32, 0xFF);
        ScsiHostCommand::new(0, cdb)
    }));
    all
}

/// Returns whether a command of ones or zeroes could write to the unit, reserve it or stop it.
fn is_destructive(opcode: u8) -> bool {
    let formats = [0x04, 0x48];
    let writes = [0x0A, 0x2A, 0x2E, 0x41, 0x42, 0x83, 0x89, 0x8A, 0x8B, 0x8E, 0x93, 0x9F, 0xAA, 0xAE, 0x3B, 0x3F, 0x7F];
    let states = [0x15, 0x16, 0x17, 0x1B, 0x1D, 0x55, 0x56, 0x57, 0x5F, 0xA4];
    [&formats[..], &writes, &states].concat().contains(&opcode)
}

fn sweeps() -> Vec<HostileCase> {
    let mut all = Vec::new();
    for (what, byte) in [("zeroes", 0), ("ones", 0xFF), ("rubbish", 0xA5)] {
        for data_in in [0, 4096] {
            let name = format!("every opcode with {what} and {data_in} bytes to read");
            all.push(ready_case(name, Tolerance::Success, move |fe| {
                for opcode in (0..=255).filter(|&opcode| !is_destructive(opcode)) {
                    let mut cdb = [byte; 16];
                    cdb[0] = opcode;
                    // Whether it succeeds is not the question, but that it is completed.
                    run(fe, REQUESTS, &ScsiHostCommand::new(0, cdb).reading(data_in))?;
                }
                Ok(Accepted)
            }));
        }
    }
    all
}

fn lengths() -> Vec<HostileCase> {
    let mut all = Vec::new();
    for (blocks, length) in [(2, 512), (128, 512), (0x0080_0000, 512), (0x0080_0001, 512), (u32::MAX, 65536)] {
        let name = |what: &str| format!("{what} of {blocks} blocks with {length} bytes");
        let make = move || ScsiHostCommand::new(0, cdb::read16(SCRATCH_SECTOR, blocks)).reading(length);
        all.push(command(name("read"), Tolerance::Failure, make));
        let make =
            move || ScsiHostCommand::new(0, cdb::write16(SCRATCH_SECTOR, blocks)).writing(&vec![1; length as usize]);
        all.push(command(name("write"), Tolerance::Failure, make));
    }
    // What is more than the CDB asks for is residual.
    for length in [513, 1024, 65536] {
        let make = move || read().reading(length);
        all.push(command(format!("read of 1 block with {length} bytes"), Tolerance::Success, make));
        let make = move || ScsiHostCommand::new(0, cdb::write16(SCRATCH_SECTOR, 1)).writing(&vec![1; length as usize]);
        all.push(command(format!("write of 1 block with {length} bytes"), Tolerance::Success, make));
    }
    all.push(command("read of 0 blocks with data", Tolerance::Any, || {
        ScsiHostCommand::new(0, cdb::read16(SCRATCH_SECTOR, 0)).reading(512)
    }));
    all.push(command("write of 0 blocks with data", Tolerance::Any, || {
        ScsiHostCommand::new(0, cdb::write16(SCRATCH_SECTOR, 0)).writing(&[1; 512])
    }));
    all.push(command("TEST UNIT READY with data in both directions", Tolerance::Any, || {
        ScsiHostCommand::new(0, cdb::test_unit_ready()).writing(&[1; 512]).reading(512)
    }));
    for (length, data_in) in [(0, 0), (0, 512), (1, 1), (4, 4), (96, 5), (5, 96), (u16::MAX, 36)] {
        let make = move || ScsiHostCommand::new(0, cdb::inquiry(None, length)).reading(data_in);
        all.push(command(format!("INQUIRY for {length} bytes with {data_in}"), Tolerance::Any, make));
        let make = move || ScsiHostCommand::new(0, cdb::report_luns(0, length.into())).reading(data_in);
        all.push(command(format!("REPORT LUNS for {length} bytes with {data_in}"), Tolerance::Any, make));
    }
    // More is allocated than there are buffers for: an overrun, though the list would fit.
    all.push(command("REPORT LUNS for 2^32 - 1 bytes with 1024", Tolerance::Any, || {
        ScsiHostCommand::new(0, cdb::report_luns(0, u32::MAX)).reading(1024)
    }));
    all.push(ready_case("read of 1 MiB into one page many times", Tolerance::Any, |fe| {
        let page = fe.memory.allocate(4096, 4096)?;
        let header = fe.memory.allocate(64, 16)?;
        let response = fe.memory.allocate(128, 16)?;
        let command = ScsiHostCommand::new(0, cdb::read16(0, 2048));
        fe.memory.write(header, &command.header(SIZES))?;
        let mut buffers = vec![(header, SIZES.command(), 0), (response, SIZES.response(), WRITE)];
        buffers.extend((0..256).map(|_| (page, 4096, WRITE)));
        let table = fe.memory.allocate(8192, 16)?;
        fe.write_table(table, &chain(&buffers))?;
        let length = 16 * buffers.len() as u32;
        fe.fire_on(REQUESTS, &[RawDescriptor { address: table, length, flags: INDIRECT, next_or_id: 0 }])?;
        let reaction = fe.observe_queue(REQUESTS, |_| Ok(Accepted));
        fe.check_neighbour()?;
        reaction
    }));
    with_tables(all, "read of 1 MiB into one page many times")
}

/// Lets the case of a name use tables of descriptors.
fn with_tables(all: Vec<HostileCase>, name: &str) -> Vec<HostileCase> {
    let with = |case: HostileCase| if case.name == name { case.with(feature::INDIRECT_DESC) } else { case };
    all.into_iter().map(with).collect()
}

fn attributes() -> Vec<HostileCase> {
    let mut all = Vec::new();
    for (name, value, tolerance) in [
        ("ORDERED", attribute::ORDERED, Tolerance::Success),
        ("HEAD OF QUEUE", attribute::HEAD, Tolerance::Success),
        ("ACA", attribute::ACA, Tolerance::Any),
        ("4", 4, Tolerance::Any),
        ("255", 255, Tolerance::Any),
    ] {
        let make = move || read().with_attribute(value);
        all.push(command(format!("read with attribute {name}"), tolerance, make));
    }
    all.push(command("read with a priority and a reference number", Tolerance::Any, || ScsiHostCommand {
        priority: 0xFF,
        reference: 0xFF,
        ..read()
    }));
    for tag in [0, u64::MAX] {
        let make = move || read().tagged(tag);
        all.push(command(format!("read with identifier {tag:#x}"), Tolerance::Success, make));
    }
    for attribute in [attribute::SIMPLE, attribute::ORDERED, attribute::HEAD] {
        let name = format!("one identifier for five commands of attribute {attribute}");
        all.push(ready_case(name, Tolerance::Any, move |fe| {
            let buffers = read().tagged(7).with_attribute(attribute).buffers(SIZES);
            let deadline = Instant::now() + fe.options.patience;
            for _ in 0..5 {
                fe.queues[REQUESTS].submit_buffers(&buffers)?;
            }
            fe.queues[REQUESTS].publish()?;
            for _ in 0..5 {
                fe.await_used_buffers(REQUESTS, deadline)?;
            }
            Ok(Accepted)
        }));
    }
    all.push(ready_case("commands of both queues with all attributes", Tolerance::Success, |fe| {
        for round in 0..50_u8 {
            let deadline = Instant::now() + fe.options.patience;
            for queue in [REQUESTS, PREPARATIONS] {
                for at in 0..5 {
                    let buffers = read().with_attribute((round + at) % 3).tagged(u64::from(at) + queue as u64 * 100);
                    fe.queues[queue].submit_buffers(&buffers.buffers(SIZES))?;
                }
                fe.queues[queue].publish()?;
            }
            for queue in [REQUESTS, PREPARATIONS] {
                for _ in 0..5 {
                    let done = ScsiHostCompletion::decode(fe.await_used_buffers(queue, deadline)?, SIZES);
                    if !done.is_good() {
                        return Ok(judge(&done));
                    }
                }
            }
        }
        Ok(Accepted)
    }));
    all
}

fn segmentation() -> Vec<HostileCase> {
    let mut all = Vec::new();
    let mut add = |name: &str, out: &'static [u32], back: &'static [u32], misaligned_by: u64| {
        let version = all.len() as u64 + 40;
        all.push(ready_case(name, Tolerance::Success, move |fe| {
            let data = pattern(SCRATCH_SECTOR, 8, version);
            let odd = |command: ScsiHostCommand| ScsiHostCommand { misaligned_by, ..command };
            let write = ScsiHostCommand::write(0, SCRATCH_SECTOR, &data).split(out, &[]);
            let done = run(fe, REQUESTS, &odd(write))?;
            if !done.is_good() {
                return Ok(judge(&done));
            }
            let done = run(fe, REQUESTS, &odd(ScsiHostCommand::read(0, SCRATCH_SECTOR, 8).split(&[], back)))?;
            if done.is_good() {
                same("the scratch area", done.data == data)?;
            }
            Ok(judge(&done))
        }));
    };
    add("header and data in one buffer, response and data in one", &[], &[], 0);
    add("header and response in thirteen buffers", &[4; 12], &[9; 12], 0);
    add("buffers at odd addresses", &[7, 44, 100, 513, 1], &[5, 103, 1, 511, 700], 3);
    add("buffers that end within fields", &[8, 8, 3, 16, 16, 512], &[4, 4, 2, 1, 1, 96, 512], 0);
    add("data with the end of header and response", &[50, 2], &[107, 2], 1);
    const ONES: [u32; 51] = [1; 51];
    const MANY: [u32; 108] = [1; 108];
    add("a buffer for each byte", &ONES, &MANY, 0);
    with_tables(all, "a buffer for each byte")
}
