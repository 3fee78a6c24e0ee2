//! Parameter lists that contradict their CDBs, or ask for what is not there.

use super::super::{HostileCase, SCRATCH_SECTOR, Tolerance, pattern};
use super::command;
use crate::scsi::cdb::{self, range16, reservation_type, reserve_out};
use crate::scsi::{ScsiHostCommand, unit_address};

/// Returns all cases.
pub(super) fn cases() -> Vec<HostileCase> {
    let mut all = unmap();
    all.extend(write_same());
    all.extend(compare_and_write());
    all.extend(reservations());
    all.extend(others());
    all
}

fn list_case(
    name: impl Into<String>,
    tolerance: Tolerance,
    cdb: impl Into<Vec<u8>>,
    list: impl Into<Vec<u8>>,
) -> HostileCase {
    let (cdb, list) = (cdb.into(), list.into());
    command(name, tolerance, move || ScsiHostCommand::new(0, cdb.clone()).writing(&list))
}

fn unmap() -> Vec<HostileCase> {
    let mut all = Vec::new();
    let good = (SCRATCH_SECTOR, 8);
    let ranges: [(&str, &[(u64, u32)], Tolerance); 7] = [
        ("past the end", &[(1 << 40, 8)], Tolerance::Failure),
        ("at the end of all blocks", &[(u64::MAX, 1)], Tolerance::Failure),
        ("whose bytes wrap", &[(1 << 55, 8)], Tolerance::Failure),
        ("of 2^32 - 1 blocks", &[(SCRATCH_SECTOR, u32::MAX)], Tolerance::Failure),
        ("of 0 blocks", &[(SCRATCH_SECTOR, 0)], Tolerance::Any),
        ("past the end behind a good one", &[(SCRATCH_SECTOR, 8), (1 << 40, 8)], Tolerance::Failure),
        ("that overlaps another", &[(SCRATCH_SECTOR, 8), (SCRATCH_SECTOR + 4, 8)], Tolerance::Any),
    ];
    for (name, ranges, tolerance) in ranges {
        let list = cdb::unmap_list(ranges);
        all.push(list_case(format!("UNMAP of a range {name}"), tolerance, cdb::unmap(list.len() as u16), list));
    }
    let list = cdb::unmap_list(&[good]);
    for length in [1, 7, 8, 16, 23] {
        // Cut, in the CDB or in the buffer.
        let cut = &list[..usize::from(length)];
        let name = |what: &str| format!("UNMAP of {length} {what}");
        all.push(list_case(name("bytes"), Tolerance::Any, cdb::unmap(length), cut));
        all.push(list_case(name("bytes of 24"), Tolerance::Failure, cdb::unmap(24), cut));
        all.push(list_case(name("bytes with more in the buffer"), Tolerance::Any, cdb::unmap(length), list.clone()));
    }
    all.push(list_case("UNMAP without a list", Tolerance::Failure, cdb::unmap(24), []));
    all.push(list_case("UNMAP of 0 bytes", Tolerance::Any, cdb::unmap(0), []));
    all.push(list_case("UNMAP of 65535 bytes", Tolerance::Failure, cdb::unmap(u16::MAX), list.clone()));
    for (name, at, value) in [("data length", 0, u16::MAX), ("descriptors' length", 2, u16::MAX), ("odd length", 2, 15)]
    {
        let mut list = list.clone();
        list[at..at + 2].copy_from_slice(&value.to_be_bytes());
        all.push(list_case(format!("UNMAP with a wrong {name}"), Tolerance::Any, cdb::unmap(24), list));
    }
    let many = cdb::unmap_list(&[(SCRATCH_SECTOR, 1); 4000]);
    all.push(list_case("UNMAP of 4000 ranges", Tolerance::Any, cdb::unmap(many.len() as u16), many));
    all
}

fn write_same() -> Vec<HostileCase> {
    let block = [0_u8; 512];
    let mut all = Vec::new();
    for (name, lba, blocks) in [
        ("past the end", 1 << 40, 8),
        ("at the end of all blocks", u64::MAX, 1),
        ("whose bytes wrap", 1 << 55, 8),
        ("of 2^32 - 1 blocks", SCRATCH_SECTOR, u32::MAX),
    ] {
        for (flags, what) in [(0, ""), (cdb::UNMAP, " with UNMAP")] {
            let cdb = cdb::write_same16(lba, blocks, flags);
            all.push(list_case(format!("WRITE SAME{what} {name}"), Tolerance::Failure, cdb, block));
        }
    }
    for length in [0, 1, 511] {
        let cdb = cdb::write_same16(SCRATCH_SECTOR, 8, 0);
        let name = format!("WRITE SAME of a block of {length} bytes");
        all.push(list_case(name, Tolerance::Failure, cdb, vec![1; length]));
    }
    let good = |flags| cdb::write_same16(SCRATCH_SECTOR, 8, flags);
    all.push(list_case("WRITE SAME of a block of 4096 bytes", Tolerance::Any, good(0), vec![1; 4096]));
    all.push(list_case("WRITE SAME without data that has some", Tolerance::Any, good(cdb::NO_DATA), block));
    all.push(list_case("WRITE SAME with ANCHOR alone", Tolerance::Failure, good(0x10), block));
    all.push(list_case("WRITE SAME with WRPROTECT", Tolerance::Failure, good(0xE0), block));
    all
}

fn compare_and_write() -> Vec<HostileCase> {
    let data = pattern(SCRATCH_SECTOR, 2, 3);
    let mut all = vec![
        list_case(
            "COMPARE AND WRITE of other data",
            Tolerance::Failure,
            cdb::compare_and_write(SCRATCH_SECTOR, 1),
            vec![0x5C; 1024],
        ),
        list_case(
            "COMPARE AND WRITE of 255 blocks with 2",
            Tolerance::Failure,
            cdb::compare_and_write(SCRATCH_SECTOR, 255),
            data.clone(),
        ),
        list_case("COMPARE AND WRITE past the end", Tolerance::Failure, cdb::compare_and_write(1 << 40, 1), data),
        list_case("COMPARE AND WRITE of 0 blocks", Tolerance::Any, cdb::compare_and_write(SCRATCH_SECTOR, 0), []),
    ];
    for length in [0, 1, 512, 1023] {
        let name = format!("COMPARE AND WRITE of 1 block with {length} bytes");
        let cdb = cdb::compare_and_write(SCRATCH_SECTOR, 1);
        all.push(list_case(name, Tolerance::Failure, cdb, vec![1; length]));
    }
    all.push(command("COMPARE AND WRITE with its data to read", Tolerance::Failure, || {
        ScsiHostCommand::new(0, cdb::compare_and_write(SCRATCH_SECTOR, 1)).reading(1024)
    }));
    all
}

/// Cases of reservations that must not come to be: what a case leaves would be in the way of others.
fn reservations() -> Vec<HostileCase> {
    let mut all = Vec::new();
    let list = cdb::reserve_list(0, 0xAB, 0);
    let exclusive = reservation_type::EXCLUSIVE_ACCESS;
    // None of these has a registration.
    let unregistered = [
        ("RESERVE", reserve_out::RESERVE),
        ("CLEAR", reserve_out::CLEAR),
        ("PREEMPT", reserve_out::PREEMPT),
        ("PREEMPT AND ABORT", reserve_out::PREEMPT_AND_ABORT),
    ];
    for (name, action) in unregistered {
        for key in [0, 1, u64::MAX] {
            let cdb = cdb::persistent_reserve_out(action, exclusive, 24);
            let name = format!("{name} with key {key:#x} and no registration");
            all.push(list_case(name, Tolerance::Failure, cdb, cdb::reserve_list(key, 0xAB, 0)));
        }
    }
    for length in [0, 1, 23] {
        let cdb = cdb::persistent_reserve_out(reserve_out::REGISTER, 0, length);
        let cut = &list[..length as usize];
        all.push(list_case(format!("REGISTER with a list of {length} bytes"), Tolerance::Failure, cdb, cut));
    }
    for length in [0, 1, 8, 23] {
        let cdb = cdb::persistent_reserve_out(reserve_out::REGISTER, 0, 24);
        let cut = &list[..length];
        all.push(list_case(format!("REGISTER with {length} bytes of 24"), Tolerance::Failure, cdb, cut));
    }
    for length in [25, 1 << 20, u32::MAX] {
        let cdb = cdb::persistent_reserve_out(reserve_out::REGISTER, 0, length);
        let name = format!("REGISTER with 24 bytes of {length}");
        all.push(list_case(name, Tolerance::Failure, cdb, list.clone()));
    }
    for action in [0x08, 0x1F] {
        let cdb = cdb::persistent_reserve_out(action, exclusive, 24);
        let name = format!("PERSISTENT RESERVE OUT with service action {action:#x}");
        all.push(list_case(name, Tolerance::Failure, cdb, list.clone()));
    }
    // The flags ask for other initiators and for more of the list than there is.
    let cdb = cdb::persistent_reserve_out(reserve_out::REGISTER, 0, 24);
    let register = cdb::reserve_list(0, 0xAB, 0x08);
    all.push(list_case("REGISTER for other initiators with no list of them", Tolerance::Failure, cdb, register));
    let cdb = cdb::persistent_reserve_out(reserve_out::REGISTER_AND_MOVE, 0, 24);
    all.push(list_case("REGISTER AND MOVE with no registration", Tolerance::Failure, cdb, list));
    for (length, data_in) in [(0, 0), (1, 1), (7, 7), (8, 4), (u16::MAX, 8)] {
        all.push(command(format!("READ KEYS for {length} bytes with {data_in}"), Tolerance::Any, move || {
            ScsiHostCommand::new(0, cdb::persistent_reserve_in(0, length)).reading(data_in)
        }));
    }
    all
}

fn others() -> Vec<HostileCase> {
    let mut all = Vec::new();
    for (name, list) in [("ones", vec![0xFF; 255]), ("zeroes", vec![0; 255]), ("a header alone", vec![0; 4])] {
        let cdb = [0x15, 0x10, 0, 0, list.len() as u8, 0];
        all.push(list_case(format!("MODE SELECT (6) of {name}"), Tolerance::Any, cdb, list.clone()));
        let cdb = [0x55, 0x10, 0, 0, 0, 0, 0, 0, list.len() as u8, 0];
        all.push(list_case(format!("MODE SELECT (10) of {name}"), Tolerance::Any, cdb, list));
    }
    all.push(list_case(
        "MODE SELECT (10) of 65535 bytes with 8",
        Tolerance::Failure,
        [0x55, 0x10, 0, 0, 0, 0, 0, 0xFF, 0xFF, 0],
        [0; 8],
    ));
    // Of a copy from this unit to itself, nothing of which makes sense.
    for (name, list) in [("ones", vec![0xFF; 512]), ("zeroes", vec![0; 512]), ("one byte", vec![1])] {
        let cdb = range16(0x83, 0, 0, list.len() as u32);
        all.push(list_case(format!("EXTENDED COPY of {name}"), Tolerance::Any, cdb, list));
    }
    let cdb = range16(0x83, 0, 0, u32::MAX);
    all.push(list_case("EXTENDED COPY of 2^32 - 1 bytes with 64", Tolerance::Failure, cdb, [0; 64]));
    all.push(command("SEND DIAGNOSTIC of all bits", Tolerance::Any, || {
        ScsiHostCommand::new(0, [0x1D, 0xFF, 0xFF, 0xFF, 0xFF, 0]).writing(&[0xFF; 512])
    }));
    all.push(command("write to a unit that is not there", Tolerance::Failure, || {
        ScsiHostCommand::write(0, SCRATCH_SECTOR, &[1; 512]).at(unit_address(0, 0x3FF0))
    }));
    all
}
