//! The driver against QEMU's storage daemon, which proves the driver.
//!
//! The daemon of QEMU 7.2 offers split virtqueues, indirect descriptors and events by index; it offers neither packed
//! virtqueues nor in-order completion.  Those are proven by the ring's own tests, and by devices that offer them.

use std::time::{Duration, Instant};

use forebay_load::Dice;
use forebay_vhost_host::block::{SECTOR, SectorRange, kind};
use forebay_vhost_host::hostile::pattern;
use forebay_vhost_host::memory::{MemoryLayout, RegionLayout};
use forebay_vhost_host::message::{IotlbMessage, feature, protocol, request};
use forebay_vhost_host::{DeviceUnderTest, FrontEnd, FrontEndError, FrontEndOptions, FrontEndStage, VirtioBlkRequest};

use crate::common::{SIZE, StorageDaemon};

/// Features of queues that the peer offers.
const OFFERED: u64 = feature::INDIRECT_DESC | feature::EVENT_IDX;

pub(crate) fn connect(device: &dyn DeviceUnderTest, options: &FrontEndOptions) -> FrontEnd {
    FrontEnd::connect(&device.socket(), options).expect("the device accepts it")
}

/// Writes and reads at random places with random segmentation, against a copy in memory.
pub(crate) fn exercise(front_end: &mut FrontEnd, seed: u64, rounds: u64) {
    const SECTORS: u64 = 2048;
    let mut dice = Dice::new(seed);
    let mut copy = vec![0_u8; (SECTORS * SECTOR) as usize];
    front_end.write_sectors(0, &copy).expect("written");
    for round in 0..rounds {
        let queue = dice.below(front_end.queues.len());
        let mut requests = Vec::new();
        let mut places = Vec::new();
        // Requests of a batch do not overlap: each is in a part of its own.
        for part in 0..4_u64 {
            let count = 1 + dice.below(32) as u64;
            let sector = part * SECTORS / 4 + dice.below((SECTORS / 4 - count) as usize) as u64;
            let lengths: Vec<u32> = (0..dice.below(5)).map(|_| dice.below(3000) as u32).collect();
            let mut request = match dice.once_in(2) {
                true => VirtioBlkRequest::write(sector, &pattern(sector, count, round)).split(&lengths, &[]),
                false => VirtioBlkRequest::read(sector, (count * SECTOR) as u32).split(&[], &lengths),
            };
            request.misaligned_by = dice.below(4) as u64;
            places.push((sector * SECTOR) as usize..((sector + count) * SECTOR) as usize);
            requests.push(request);
        }
        let done = front_end.run_all(queue, &requests).expect("completed");
        for ((request, place), completion) in requests.iter().zip(places).zip(done) {
            let data = completion.ok();
            match request.kind {
                kind::OUT => copy[place].copy_from_slice(&request.data),
                _ => assert_eq!(data, copy[place], "seed {seed}, round {round}"),
            }
        }
    }
    assert_eq!(front_end.read_sectors(0, copy.len() as u32).expect("read"), copy);
}

#[test]
fn data_are_read_as_they_were_written() {
    let daemon = StorageDaemon::start(1, 4);
    for (seed, features) in [0, feature::INDIRECT_DESC, feature::EVENT_IDX, OFFERED].into_iter().enumerate() {
        for (by_slots, is_polled) in [(false, false), (true, true)] {
            // With events by index the daemon always notifies once, and ends the connection when it cannot.
            let is_polled = is_polled && features & feature::EVENT_IDX == 0;
            let options = FrontEndOptions { by_slots, is_polled, queues: 4, ..FrontEndOptions::default() };
            let mut front_end = connect(&daemon, &options.with(features));
            assert_eq!(front_end.features & OFFERED, features);
            exercise(&mut front_end, seed as u64, 100);
        }
    }
}

#[test]
fn memory_may_have_any_layout() {
    exercise_layouts(&StorageDaemon::start(1, 1));
}

/// Writes and reads with guest memory in several layouts.
pub(crate) fn exercise_layouts(device: &dyn DeviceUnderTest) {
    let size = 16 << 20;
    for layout in [
        MemoryLayout::single(size),
        MemoryLayout::split(8, size, true),
        MemoryLayout::split(3, size, false),
        MemoryLayout::adjacent(4, size),
    ] {
        let mut front_end = connect(device, &FrontEndOptions { memory: layout, ..FrontEndOptions::default() });
        exercise(&mut front_end, 9, 20);
    }
}

#[test]
fn the_peer_is_what_the_driver_was_proven_on() {
    let daemon = StorageDaemon::start(1, 2);
    let every = FrontEndOptions::default().with(OFFERED | feature::RING_PACKED | feature::IN_ORDER);
    let front_end = FrontEnd::attach(&daemon.socket(), &every, FrontEndStage::Negotiated).expect("negotiated");
    println!("features {:#x} {:#x}, {:?}", front_end.offered, front_end.protocol_offered, front_end.config);
    let needed = OFFERED | feature::VERSION_1 | feature::FLUSH | feature::DISCARD | feature::WRITE_ZEROES | feature::MQ;
    assert_eq!(front_end.offered & needed, needed);
    let needed = protocol::MQ | protocol::REPLY_ACK | protocol::CONFIG | protocol::CONFIGURE_MEM_SLOTS;
    assert_eq!(front_end.protocol_features & needed, needed);
    assert_eq!((front_end.config.capacity, front_end.config.num_queues), (SIZE / SECTOR, 2));
    assert_eq!(front_end.queue_max, 2);
}

#[test]
fn all_types_of_requests_are_served() {
    let daemon = StorageDaemon::start(1, 1);
    let mut front_end = connect(&daemon, &FrontEndOptions::default());
    let id = front_end.run(0, &VirtioBlkRequest::get_id()).expect("completed").ok();
    assert_eq!(id.len(), 20);
    front_end.write_sectors(0, &pattern(0, 32, 1)).expect("written");
    front_end.flush().expect("flushed");
    let range = |sector, count| SectorRange { sector, count, flags: 0 };
    front_end.run(0, &VirtioBlkRequest::write_zeroes(&[range(8, 8)])).expect("completed").ok();
    front_end.run(0, &VirtioBlkRequest::discard(&[range(16, 8)])).expect("completed").ok();
    let found = front_end.read_sectors(0, 32 * 512).expect("read");
    assert_eq!(found[..4096], pattern(0, 8, 1));
    assert_eq!(found[4096..8192], [0; 4096]);
    assert_eq!(found[12288..], pattern(24, 8, 1));
    let unknown = front_end.run(0, &VirtioBlkRequest::new(0x99, 0, &[], 0)).expect("completed");
    assert_eq!(unknown.status, forebay_vhost_host::block::UNSUPP);
    let past = front_end.run(0, &VirtioBlkRequest::read(SIZE / SECTOR, 512)).expect("completed");
    assert_eq!(past.status, forebay_vhost_host::block::IOERR);
}

#[test]
fn a_buffer_may_cross_regions() {
    let daemon = StorageDaemon::start(1, 1);
    let options = FrontEndOptions { memory: MemoryLayout::adjacent(2, 4 << 20), ..FrontEndOptions::default() };
    let mut front_end = connect(&daemon, &options);
    front_end.write_sectors(0, &pattern(0, 16, 3)).expect("written");
    let border = front_end.memory.regions()[1].description().guest;
    front_end.memory.reserve(border - 4096, 8192).expect("free");
    let small = front_end.memory.allocate(32, 16).expect("space");
    front_end.memory.write(small, &[0; 16]).expect("within");
    use forebay_vhost_host::rings::ChainSegment;
    let queue = &mut front_end.queues[0];
    let chain = [
        ChainSegment::readable(small, 16),
        ChainSegment::writable(border - 4096, 8192),
        ChainSegment::writable(small + 16, 1),
    ];
    queue.ring.add(&chain).expect("space");
    queue.publish().expect("published");
    queue.await_used(None, Instant::now() + Duration::from_secs(10)).expect("used");
    let mut found = vec![0; 8192];
    front_end.memory.read(border - 4096, &mut found).expect("within");
    assert_eq!(found, pattern(0, 16, 3));
}

#[test]
fn regions_come_and_go_while_the_device_runs() {
    exercise_regions(&StorageDaemon::start(1, 1));
}

/// Adds and removes a region of memory, which requests use meanwhile.
pub(crate) fn exercise_regions(device: &dyn DeviceUnderTest) {
    let mut front_end = connect(device, &FrontEndOptions { by_slots: true, ..FrontEndOptions::default() });
    for round in 0..10_u64 {
        let guest = 1 << 32;
        front_end.add_region(&RegionLayout { guest, size: 1 << 20 }).expect("added");
        let data = front_end.memory.allocate_in(2, 4096, 4096).expect("space");
        assert!(data >= guest);
        front_end.write_sectors(round * 8, &pattern(round * 8, 8, 1)).expect("written");
        assert_eq!(front_end.read_sectors(round * 8, 4096).expect("read"), pattern(round * 8, 8, 1));
        front_end.memory.free(data, 4096);
        front_end.remove_region(guest).expect("removed");
    }
}

#[test]
fn a_queue_is_stopped_and_goes_on() {
    exercise_stops(&StorageDaemon::start(1, 2), &FrontEndOptions { queues: 2, ..FrontEndOptions::default() });
}

/// Stops and starts two queues between requests.
pub(crate) fn exercise_stops(device: &dyn DeviceUnderTest, options: &FrontEndOptions) {
    let mut front_end = connect(device, options);
    for round in 0..20 {
        for queue in 0..2 {
            front_end.run(queue, &VirtioBlkRequest::write(round, &[round as u8; 512])).expect("completed").ok();
            let base = front_end.get_vring_base(queue as u32).expect("stopped");
            assert_eq!(base, front_end.queues[queue].ring.drained_base());
            front_end.start_queue(queue, base).expect("started");
        }
    }
}

#[test]
fn refusals_are_told() {
    let daemon = StorageDaemon::start(1, 1);
    let front_end = FrontEnd::attach(&daemon.socket(), &FrontEndOptions::default(), FrontEndStage::Negotiated);
    let front_end = front_end.expect("negotiated");
    // Without ACCESS_PLATFORM there are no translations; how that is refused is the device's choice.
    let update = IotlbMessage { iova: 0, size: 4096, user: 1 << 46, permissions: 3, kind: 2 };
    assert!(matches!(front_end.iotlb(&update), Err(FrontEndError::Ended | FrontEndError::Refused { .. })));
    let front_end = FrontEnd::attach(&daemon.socket(), &FrontEndOptions::default(), FrontEndStage::Negotiated);
    let ended = front_end.expect("negotiated").call(request::GPU_SET_SOCKET, &[], &[]);
    assert!(matches!(ended, Err(FrontEndError::Ended)), "{ended:?}");
}
