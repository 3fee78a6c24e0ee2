//! Sizes, areas, bases and regions that are refused.

use std::rc::Rc;

use forebay_reactor::GuardedMapping;

use crate::inflight::{InflightViolation, inflight_len};
use crate::memory::GuestArea;
use crate::rings::{Virtq, VirtqSetup, VirtqViolation};

use super::model::{ModelDriver, ModelOptions};

pub fn options(packed: bool, size: u16) -> ModelOptions {
    ModelOptions { size, packed, event_index: true, in_order: false, inflight: true, first: 0 }
}

fn setup(packed: bool, size: u16) -> VirtqSetup {
    ModelDriver::new(options(packed, size)).setup()
}

fn refused(setup: VirtqSetup, base: u32) -> VirtqViolation {
    let violation = Virtq::start(setup, base).expect_err("a violation");
    assert!(violation.to_string().len() > 20);
    violation
}

fn area(len: usize) -> GuestArea {
    GuestArea::of(&Rc::new(GuardedMapping::anonymous(len).expect("memory")), 0, len).expect("inside")
}

#[test]
fn sizes_and_areas_are_checked() {
    for (packed, size) in [(false, 0), (false, 3), (false, 32769), (true, 0), (true, 40_000)] {
        let setup = VirtqSetup { size, ..setup(packed, 4) };
        assert_eq!(refused(setup, 0), VirtqViolation::QueueSize(size));
    }
    assert_eq!(VirtqSetup::area_lens(8, false, true), [128, 22, 70]);
    assert_eq!(VirtqSetup::area_lens(8, false, false), [128, 20, 68]);
    assert_eq!(VirtqSetup::area_lens(8, true, true), [128, 4, 4]);
    for packed in [false, true] {
        let lens = VirtqSetup::area_lens(4, packed, true);
        for (at, need) in lens.into_iter().enumerate() {
            for shift in [0, 1] {
                let mut setup = setup(packed, 4);
                let (part, name) = match at {
                    0 => (&mut setup.descriptors, "descriptor"),
                    1 => (&mut setup.driver, "driver"),
                    _ => (&mut setup.device, "device"),
                };
                let whole = area(need as usize + 1);
                part.area = whole.part(shift, need as usize - 1 + shift);
                let violation = refused(setup, 0x8000_8000 * u32::from(packed));
                let expected = if shift == 0 {
                    VirtqViolation::AreaLength { area: name, len: need - 1, need }
                } else {
                    VirtqViolation::AreaAlignment { area: name, align: [16, if packed { 4 } else { 2 }, 4][at] }
                };
                assert_eq!(violation, expected);
            }
        }
    }
}

#[test]
fn bases_outside_the_ring_are_refused() {
    assert_eq!(refused(setup(false, 4), 0x1_0000), VirtqViolation::Base { base: 0x1_0000, size: 4 });
    for base in [4, 0x8004, 4 << 16, 0x7fff_0000] {
        assert_eq!(refused(setup(true, 4), base), VirtqViolation::Base { base, size: 4 });
    }
    for base in [0x8000_8000, 3, 0x0003_8003] {
        let (virtq, _) = Virtq::start(setup(true, 4), base).expect("a queue");
        assert_eq!((virtq.base(), virtq.size()), (base, 4));
    }
}

#[test]
fn lengths_of_regions_are_multiples_of_64() {
    assert_eq!(inflight_len(1, false), 64);
    assert_eq!(inflight_len(256, false), 16 + 4096 + 48);
    assert_eq!(inflight_len(1, true), 64);
    assert_eq!(inflight_len(256, true), 32 + 8192 + 32);
    assert!(inflight_len(u16::MAX, true).is_multiple_of(64));
}

#[test]
fn regions_that_contradict_themselves_are_refused() {
    use InflightViolation::{
        Alignment, Batch, BufferId, Entries, Entry, EntryState, Length, Overrun, Position, Version,
    };
    let with = |packed: bool, bytes: &[(usize, u8)]| {
        let setup = setup(packed, 4);
        let base = if packed { 0x8000_8000 } else { 0 };
        let (virtq, _) = Virtq::start(setup.clone(), base).expect("a queue");
        // Killed with nothing in flight.
        drop(virtq);
        for (at, byte) in bytes {
            setup.inflight.as_ref().expect("a region").write(*at, &[*byte]);
        }
        Virtq::start(setup, base).map(|(_, orphans)| orphans.len())
    };
    let cases: &[(bool, &[(usize, u8)], InflightViolation)] = &[
        (false, &[(8, 2)], Version { version: 2, features: 0 }),
        (false, &[(0, 1)], Version { version: 1, features: 1 }),
        (false, &[(10, 3)], Entries { entries: 3, size: 4 }),
        (false, &[(11, 1)], Entries { entries: 260, size: 4 }),
        (false, &[(16, 7)], EntryState { entry: 0, state: 7 }),
        // In flight, and five chains in the last batch; or one, whose head is not one.
        (false, &[(32, 1), (14, 251), (15, 255)], Batch { batch: 5, size: 4 }),
        (false, &[(32, 1), (14, 255), (15, 255), (12, 9)], Entry(9)),
        (true, &[(8, 9)], Version { version: 9, features: 0 }),
        (true, &[(10, 9)], Entries { entries: 9, size: 4 }),
        (true, &[(18, 4)], Position { index: 4, wrap: 1, size: 4 }),
        (true, &[(20, 2)], Position { index: 0, wrap: 2, size: 4 }),
        (true, &[(96, 3)], EntryState { entry: 2, state: 3 }),
        // The free list is a loop, or lacks an entry that is not in flight.
        (true, &[(32 + 2, 0)], Entry(0)),
        (true, &[(32 + 2, 2)], Entry(1)),
        // Entry 0 is in flight without descriptors; with one that is free; too many; one that is not the last.
        (true, &[(14, 1), (32, 1)], Entry(0)),
        (true, &[(14, 1), (32, 1), (32 + 6, 2), (32 + 4, 1)], Entry(1)),
        (true, &[(14, 1), (32, 1), (32 + 6, 5)], Overrun { descriptors: 5, size: 4 }),
        (true, &[(14, 1), (32, 1), (32 + 6, 1), (32 + 4, 3)], Entry(3)),
        (true, &[(14, 1), (32, 1), (32 + 6, 1), (32 + 16, 4)], BufferId(4)),
        (true, &[(14, 2), (32, 1), (32 + 6, 1), (64, 1), (64 + 6, 1), (64 + 4, 1)], BufferId(0)),
    ];
    for (packed, bytes, expected) in cases {
        assert_eq!(with(*packed, bytes), Err(VirtqViolation::Inflight(*expected)), "{bytes:?}");
        assert!(expected.to_string().len() > 10);
    }
    assert_eq!(with(false, &[(14, 251), (15, 255)]), Ok(0), "nothing is in flight");
    assert_eq!(with(false, &[(32, 1), (14, 255), (15, 255), (12, 1)]), Ok(0), "the last batch is idle");
    assert_eq!(with(true, &[(14, 1), (32, 1), (32 + 6, 1), (32 + 16, 3)]), Ok(1));
    for packed in [false, true] {
        let need = inflight_len(4, packed);
        let short = VirtqSetup { inflight: Some(area(need as usize - 1)), ..setup(packed, 4) };
        let length = Length { len: need - 1, need };
        assert_eq!(refused(short, 0), VirtqViolation::Inflight(length));
        let shifted = area(need as usize + 4).part(4, need as usize);
        let setup = VirtqSetup { inflight: Some(shifted), ..setup(packed, 4) };
        assert_eq!(refused(setup, 0), VirtqViolation::Inflight(Alignment));
    }
}

#[test]
fn larger_batches_of_other_back_ends_are_idle() {
    let driver = ModelDriver::new(options(false, 4));
    let setup = driver.setup();
    drop(Virtq::start(setup.clone(), 0).expect("a queue"));
    let region = setup.inflight.clone().expect("a region");
    // All are in flight; heads 2 and 0 are the last batch, of which 2 is idle already.
    for (head, state) in [1, 1, 0, 1].into_iter().enumerate() {
        region.write(16 + 16 * head, &[state]);
        region.write(16 + 16 * head + 8, &[10 - head as u8]);
    }
    region.write(16 + 32 + 6, &[0]);
    region.write(12, &[2]);
    driver.guest.put_u16(super::model::DEVICE + 2, 2);
    let (virtq, orphans) = Virtq::start(setup.clone(), 0).expect("a queue");
    assert_eq!(orphans.iter().map(|head| head.id).collect::<Vec<_>>(), [3, 1]);
    assert_eq!((virtq.base(), virtq.in_flight()), (4, 2));
    // It stops with chains in flight, so that its successor resumes them.
    assert_eq!(virtq.stop(), 4);
    let (_, orphans) = Virtq::start(setup, 2).expect("a queue");
    assert_eq!(orphans.len(), 2);
}
