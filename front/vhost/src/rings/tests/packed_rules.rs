//! Rules of packed queues, each broken by a guest.

use std::rc::Rc;

use forebay_reactor::GuardedMapping;

use crate::dirty_log::DirtyLog;
use crate::memory::MemoryFault;
use crate::rings::{Virtq, VirtqError, VirtqViolation};

use super::model::{
    BUFFERS, ChainForm, DEVICE, GUEST, INDIRECT, ModelDriver, ModelOptions, NEXT, TABLE, TABLES, WRITE,
};

const BUFFER: u64 = GUEST + BUFFERS as u64;
/// Flag of a descriptor that is available in the first round.
const AVAILABLE: u16 = 1 << 7;

fn options() -> ModelOptions {
    ModelOptions { size: 3, packed: true, event_index: true, in_order: false, inflight: false, first: 0 }
}

type RingDescriptor = (u64, u32, u16, u16);

/// Writes descriptors (address, length, buffer ID, flags), and takes up to `chains` chains.
fn chains(ring: &[RingDescriptor], table: &[RingDescriptor], chains: usize) -> Result<Virtq, VirtqError> {
    let driver = ModelDriver::new(options());
    for (at, (addr, len, id, flags)) in ring.iter().enumerate() {
        driver.guest.put_packed(TABLE + 16 * at, *addr, *len, *id, *flags | AVAILABLE);
    }
    for (at, (addr, len, id, flags)) in table.iter().enumerate() {
        driver.guest.put_packed(TABLES + 16 * at, *addr, *len, *id, *flags);
    }
    let mut virtq = driver.start();
    for _ in 0..chains {
        virtq.next(&driver.guest.space())?.expect("available");
    }
    Ok(virtq)
}

fn violation(ring: &[RingDescriptor], table: &[RingDescriptor], count: usize) -> VirtqViolation {
    match chains(ring, table, count) {
        Err(VirtqError::Violation(violation)) => {
            assert!(violation.to_string().len() > 20);
            violation
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn buffer_ids_are_bounded_and_in_flight_once() {
    assert_eq!(violation(&[(BUFFER, 1, 3, 0)], &[], 1), VirtqViolation::Index { index: 3, len: 3 });
    assert_eq!(violation(&[(BUFFER, 1, 1, 0), (BUFFER, 1, 1, 0)], &[], 2), VirtqViolation::InFlight(1));
    // Only the last descriptor's counts.
    let list = [(BUFFER, 1, 7, NEXT), (BUFFER, 1, 0, 0), (BUFFER, 1, 1, WRITE)];
    assert_eq!(chains(&list, &[], 2).expect("two chains").in_flight(), 2);
}

#[test]
fn a_ring_has_no_more_descriptors_than_its_size() {
    let list = [(BUFFER, 1, 0, NEXT), (BUFFER, 1, 0, NEXT), (BUFFER, 1, 0, NEXT)];
    assert_eq!(violation(&list, &[], 1), VirtqViolation::Overrun { in_flight: 0, count: 4, size: 3 });
    let driver = ModelDriver::new(options());
    let mut virtq = driver.start();
    for (at, id) in [0, 1, 2].into_iter().enumerate() {
        driver.guest.put_packed(TABLE + 16 * at, BUFFER, 1, id, AVAILABLE);
        assert!(virtq.next(&driver.guest.space()).expect("valid").is_some());
    }
    assert!(virtq.next(&driver.guest.space()).expect("valid").is_none());
    // The driver goes around without waiting for used ones.
    driver.guest.put_packed(TABLE, BUFFER, 1, 0, 1 << 15);
    let error = virtq.next(&driver.guest.space()).expect_err("full");
    assert_eq!(error, VirtqViolation::Overrun { in_flight: 3, count: 1, size: 3 }.into());
}

#[test]
fn lists_and_tables_are_checked() {
    let table = GUEST + TABLES as u64;
    let readable_last = [(BUFFER, 1, 0, NEXT | WRITE), (BUFFER, 1, 0, 0)];
    assert_eq!(violation(&readable_last, &[], 1), VirtqViolation::ReadableAfterWritable(1));
    let mixed = [(BUFFER, 1, 0, NEXT), (table, 16, 0, INDIRECT)];
    assert_eq!(violation(&mixed, &[], 1), VirtqViolation::IndirectInList);
    let nested = [(table, 16, 0, INDIRECT)];
    assert_eq!(violation(&nested, &nested, 1), VirtqViolation::IndirectNested);
    for len in [0, 15, 17, 16 * 1025] {
        assert_eq!(violation(&[(table, len, 0, INDIRECT)], &[], 1), VirtqViolation::IndirectLength(len));
    }
    let outside = chains(&[(7, 16, 0, INDIRECT)], &[], 1).expect_err("outside");
    assert_eq!(outside, MemoryFault::Outside { addr: 7, len: 16 }.into());
    let entries: Vec<RingDescriptor> = (0..1024).map(|at| (BUFFER + at, 1, 0, WRITE)).collect();
    assert!(chains(&[(table, 16 * 1024, 2, INDIRECT)], &entries, 1).is_ok());
}

#[test]
fn a_chain_that_changes_after_it_was_taken_is_resumed_as_it_was() {
    let mut driver = ModelDriver::new(ModelOptions { inflight: true, ..options() });
    let mut virtq = driver.start();
    driver.submit(&[(0, 8, false), (100, 20, true)], ChainForm::Direct);
    driver.submit(&[(300, 8, true)], ChainForm::Direct);
    let mut tokens = [(); 2].map(|()| virtq.next(&driver.guest.space()).expect("valid").expect("a chain").token);
    // The second is returned in the first's place of the ring.
    tokens.reverse();
    let [second, _first] = tokens;
    virtq.complete(second, 5, None);
    drop(virtq);
    let (mut virtq, orphans) = Virtq::start(driver.setup(), driver.base(0)).expect("a queue");
    let [head] = orphans[..] else { panic!("{orphans:?}") };
    let chain = virtq.resume(head, &driver.guest.space()).expect("a chain");
    assert_eq!(driver.serial_of(&chain), 0);
    let again = virtq.resume(head, &driver.guest.space()).expect_err("resumed");
    assert!(matches!(again, VirtqError::Violation(VirtqViolation::NotResumable(_))), "{again}");
    let (mut other, _) = Virtq::start(ModelDriver::new(options()).setup(), 0x8000_8000).expect("a queue");
    assert!(other.resume(head, &driver.guest.space()).is_err());
    virtq.complete(chain.token, 0, None);
    assert_eq!([driver.reap(), driver.reap()], [Some((1, 5)), Some((0, 0))]);
}

#[test]
fn stores_are_logged_at_the_addresses_of_the_ring() {
    let mut driver = ModelDriver::new(options());
    let bits = Rc::new(GuardedMapping::anonymous(1 << 16).expect("memory"));
    let log = DirtyLog::new(bits.clone());
    let dirty = |at: usize| {
        let page = (GUEST as usize + at) / 4096;
        let mut byte = [0];
        bits.read(page / 8, &mut byte);
        byte[0] == 1 << (page % 8)
    };
    let mut virtq = driver.start();
    driver.submit(&[(0, 1, true)], ChainForm::Direct);
    let chain = virtq.next(&driver.guest.space()).expect("valid").expect("a chain");
    assert!(!dirty(TABLE) && !dirty(DEVICE));
    virtq.complete(chain.token, 1, Some(&log));
    assert!(dirty(TABLE) && !dirty(DEVICE));
    virtq.disable_kicks(Some(&log));
    assert!(dirty(DEVICE));
    assert_eq!(driver.reap(), Some((0, 1)));
}
