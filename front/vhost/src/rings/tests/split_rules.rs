//! Rules of split queues, each broken by a guest.

use std::rc::Rc;

use forebay_reactor::GuardedMapping;

use crate::dirty_log::DirtyLog;
use crate::iotlb::Iotlb;
use crate::memory::{AddressSpace, MemoryAccess, MemoryFault};
use crate::rings::{Virtq, VirtqError, VirtqSetup, VirtqViolation};

use super::model::{
    BUFFERS, ChainForm, DEVICE, DRIVER, GUEST, INDIRECT, ModelDriver, ModelOptions, NEXT, TABLE, TABLES, WRITE,
};

const BUFFER: u64 = GUEST + BUFFERS as u64;

fn options() -> ModelOptions {
    ModelOptions { size: 4, packed: false, event_index: false, in_order: false, inflight: false, first: 0 }
}

/// Makes the heads available and returns what the device makes of them.
fn next(driver: &ModelDriver, heads: &[u16]) -> Result<Virtq, VirtqError> {
    let mut virtq = driver.start();
    for (at, head) in heads.iter().enumerate() {
        driver.guest.put_u16(DRIVER + 4 + 2 * (at % 4), *head);
    }
    driver.guest.put_u16(DRIVER + 2, heads.len() as u16);
    for _ in heads {
        virtq.next(&driver.guest.space())?.expect("available");
    }
    Ok(virtq)
}

type RingDescriptor = (u64, u32, u16, u16);

fn chain(table: &[RingDescriptor], indirect: &[RingDescriptor]) -> Result<Virtq, VirtqError> {
    let driver = ModelDriver::new(options());
    for (at, (addr, len, flags, next)) in table.iter().enumerate() {
        driver.guest.put_split(TABLE + 16 * at, *addr, *len, *flags, *next);
    }
    for (at, (addr, len, flags, next)) in indirect.iter().enumerate() {
        driver.guest.put_split(TABLES + 16 * at, *addr, *len, *flags, *next);
    }
    next(&driver, &[0])
}

fn violation(table: &[RingDescriptor], indirect: &[RingDescriptor]) -> VirtqViolation {
    match chain(table, indirect) {
        Err(VirtqError::Violation(violation)) => {
            assert!(violation.to_string().len() > 20);
            violation
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn indexes_are_bounded() {
    let driver = ModelDriver::new(options());
    let mut virtq = driver.start();
    driver.guest.put_u16(DRIVER + 2, 5);
    let error = virtq.next(&driver.guest.space()).expect_err("too far");
    assert_eq!(error, VirtqViolation::AvailableIndex { index: 5, last: 0, size: 4 }.into());
    driver.guest.put_u16(DRIVER + 2, 0xffff);
    assert!(virtq.next(&driver.guest.space()).is_err(), "it goes backwards");
    let outside = |index| VirtqError::from(VirtqViolation::Index { index, len: 4 });
    assert_eq!(next(&driver, &[4]).expect_err("no such head"), outside(4));
    assert_eq!(chain(&[(BUFFER, 1, NEXT, 4)], &[]).expect_err("no such descriptor"), outside(4));
    let table = [(GUEST + TABLES as u64, 32, INDIRECT, 0)];
    let index = VirtqViolation::Index { index: 2, len: 2 };
    assert_eq!(violation(&table, &[(BUFFER, 1, NEXT, 2), (BUFFER, 1, 0, 0)]), index);
}

#[test]
fn a_head_is_in_flight_once() {
    let driver = ModelDriver::new(options());
    assert_eq!(next(&driver, &[1, 2, 1]).expect_err("twice"), VirtqViolation::InFlight(1).into());
    let driver = ModelDriver::new(options());
    assert_eq!(next(&driver, &[1, 2, 3]).expect("different heads").in_flight(), 3);
}

#[test]
fn loops_end() {
    assert_eq!(violation(&[(BUFFER, 1, NEXT, 0)], &[]), VirtqViolation::ChainLength { max: 4 });
    let table = [(GUEST + TABLES as u64, 32, INDIRECT, 0)];
    let entries = [(BUFFER, 1, NEXT, 1), (BUFFER, 1, NEXT, 0)];
    assert_eq!(violation(&table, &entries), VirtqViolation::ChainLength { max: 2 });
}

#[test]
fn order_and_lengths_of_buffers_are_checked() {
    let table = [(BUFFER, 1, NEXT | WRITE, 1), (BUFFER, 1, 0, 0)];
    assert_eq!(violation(&table, &[]), VirtqViolation::ReadableAfterWritable(1));
    let large = [(GUEST, 4 << 20, NEXT, 1), (GUEST, u32::MAX, 0, 0)];
    assert_eq!(violation(&large, &[]), VirtqViolation::ChainBytes((4 << 20) + u64::from(u32::MAX)));
    let error = chain(&[(GUEST + (4 << 20) - 1, 2, 0, 0)], &[]).expect_err("outside");
    assert_eq!(error, MemoryFault::Outside { addr: GUEST + (4 << 20) - 1, len: 2 }.into());
    assert_eq!(error.miss(), None);
    // An empty buffer is nowhere.
    assert!(chain(&[(0, 0, 0, 0)], &[]).is_ok());
}

#[test]
fn indirect_tables_are_checked() {
    let table = GUEST + TABLES as u64;
    for len in [0, 15, 17, 16 * 1025] {
        assert_eq!(violation(&[(table, len, INDIRECT, 0)], &[]), VirtqViolation::IndirectLength(len));
    }
    let nested = [(table, 16, INDIRECT, 0)];
    assert_eq!(violation(&nested, &nested), VirtqViolation::IndirectNested);
    assert_eq!(violation(&[(table, 16, INDIRECT | NEXT, 0)], &[]), VirtqViolation::IndirectInList);
    let outside = chain(&[(0, 16, INDIRECT, 0)], &[]).expect_err("outside");
    assert_eq!(outside, MemoryFault::Outside { addr: 0, len: 16 }.into());
    // 1024 descriptors are allowed, however small the ring is, and one before them is not.
    let entries: Vec<RingDescriptor> =
        (0..1024).map(|at| (BUFFER + at, 1, u16::from(at < 1023), at as u16 + 1)).collect();
    assert!(chain(&[(table, 16 * 1024, INDIRECT | WRITE, 0)], &entries).is_ok(), "the table's write flag is ignored");
    let mixed = [(BUFFER, 1, NEXT, 1), (table, 16 * 1024, INDIRECT, 0)];
    assert_eq!(violation(&mixed, &entries), VirtqViolation::ChainLength { max: 1024 });
    let driver = ModelDriver::new(options());
    let setup = VirtqSetup { indirect: false, ..driver.setup() };
    driver.guest.put_split(TABLE, table, 16, INDIRECT, 0);
    driver.guest.put_u16(DRIVER + 2, 1);
    let (mut virtq, _) = Virtq::start(setup, 0).expect("a queue");
    let error = virtq.next(&driver.guest.space()).expect_err("not negotiated");
    assert_eq!(error, VirtqViolation::IndirectUnexpected.into());
}

#[test]
fn a_chain_waits_for_translations() {
    let mut driver = ModelDriver::new(ModelOptions { inflight: true, ..options() });
    let mut virtq = driver.start();
    let serial = driver.submit(&[(0, 16, false), (4096, 5000, true)], ChainForm::Indirect).expect("free descriptors");
    let (guest, user) = (GUEST, 0x7f00_0000);
    let mut iotlb = Iotlb::default();
    let mut misses = Vec::new();
    let chain = loop {
        let memory = driver.guest.memory.clone();
        let space = AddressSpace { memory: &memory, iotlb: Some(&iotlb) };
        match virtq.next(&space) {
            Ok(chain) => break chain.expect("a chain"),
            Err(error) => {
                let miss = error.miss().expect("a miss");
                assert!(virtq.has_available() && virtq.in_flight() == 0);
                misses.push((miss.iova, miss.access));
                let page = miss.iova & !4095;
                let access = if misses.len() == 1 { MemoryAccess::Read } else { MemoryAccess::ReadWrite };
                iotlb.insert(page, 4096, user + page - guest, access).expect("space");
            }
        }
    };
    let (table, access) = misses.remove(0);
    assert!(table >= GUEST + TABLES as u64 && access == MemoryAccess::Read, "{table:#x}");
    assert_eq!(
        misses,
        [(BUFFER, MemoryAccess::Read), (BUFFER + 4096, MemoryAccess::Write), (BUFFER + 8192, MemoryAccess::Write),]
    );
    // The last two pages are adjacent in memory, and so are one part.
    assert_eq!((chain.readable.len(), chain.writable.len()), (1, 1));
    virtq.complete(chain.token, 200, None);
    assert_eq!(driver.reap(), Some((serial, 200)));
}

#[test]
fn parts_are_bounded() {
    // Pages of an IOMMU that are not next to each other.
    let driver = ModelDriver::new(options());
    let mut iotlb = Iotlb::default();
    for page in 0..1031 {
        iotlb.insert(page * 16, 16, 0x7f00_0000 + page * 32, MemoryAccess::ReadWrite).expect("space");
    }
    for (pages, fits) in [(1030, true), (1031, false)] {
        driver.guest.put_split(TABLE, 0, 16 * pages, 0, 0);
        driver.guest.put_u16(DRIVER + 2, 1);
        let mut virtq = driver.start();
        let space = AddressSpace { memory: &driver.guest.memory, iotlb: Some(&iotlb) };
        // The ring is not in the buffers: it is written again for each size.
        let result = virtq.next(&space);
        assert_eq!(result.is_ok(), fits, "{result:?}");
    }
}

#[test]
fn a_token_of_another_queue_is_ignored() {
    let mut driver = ModelDriver::new(options());
    let (mut old, mut new) = (driver.start(), driver.start());
    driver.submit(&[(0, 1, true)], ChainForm::Direct);
    let [old, stale] =
        [&mut old, &mut new].map(|virtq| virtq.next(&driver.guest.space()).expect("valid").expect("a chain"));
    new.complete(old.token, 1, None);
    assert_eq!((new.in_flight(), driver.reap()), (1, None));
    new.complete(stale.token, 1, None);
    assert_eq!((new.in_flight(), driver.reap()), (0, Some((0, 1))));
}

#[test]
fn stores_are_logged_where_the_front_end_wants_them() {
    let mut driver = ModelDriver::new(ModelOptions { event_index: true, ..options() });
    let bits = Rc::new(GuardedMapping::anonymous(64).expect("memory"));
    let log = DirtyLog::new(bits.clone());
    let dirty = || {
        let mut bytes = [0; 8];
        bits.read(0, &mut bytes);
        bits.write(0, &[0; 8]);
        u64::from_ne_bytes(bytes)
    };
    for (log_used, expected) in [(None, 0), (Some(3 * 4096 - 12), 0b1100)] {
        let (mut virtq, _) =
            Virtq::start(VirtqSetup { log_used, ..driver.setup() }, driver.base(driver.reaped)).expect("a queue");
        driver.submit(&[(0, 1, true)], ChainForm::Direct);
        let chain = virtq.next(&driver.guest.space()).expect("valid").expect("a chain");
        assert_eq!(dirty(), 0);
        virtq.complete(chain.token, 1, Some(&log));
        // The index is in front of the page, and entry 1 behind it.
        assert_eq!(dirty(), expected, "of the first 64 pages");
        assert!(driver.reap().is_some());
        virtq.enable_kicks(Some(&log));
        assert_eq!(dirty(), expected & 0b1000, "the event index is behind the entries");
    }
    assert_eq!(driver.guest.get_u16(DEVICE + 2), 2);
}

#[test]
fn a_killed_device_may_owe_an_interrupt() {
    let mut driver = ModelDriver::new(ModelOptions { inflight: true, ..options() });
    let mut virtq = driver.start();
    assert!(!virtq.needs_interrupt(), "nothing was returned");
    driver.submit(&[(0, 1, true)], ChainForm::Direct);
    let chain = virtq.next(&driver.guest.space()).expect("valid").expect("a chain");
    virtq.complete(chain.token, 1, None);
    drop(virtq);
    let (mut virtq, orphans) = Virtq::start(driver.setup(), 1).expect("a queue");
    assert!(orphans.is_empty() && virtq.needs_interrupt() && !virtq.needs_interrupt());
    driver.arm(false, 0);
    virtq.stop();
    let (mut virtq, _) = Virtq::start(driver.setup(), 1).expect("a queue");
    assert!(!virtq.needs_interrupt());
}
