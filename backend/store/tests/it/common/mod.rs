//! Simulated machine with one disk, for tests of the store.

use std::time::Duration;

use forebay_reactor::sleep;
use forebay_sim::{CrashKind, Faults, World};
use forebay_store::{ColumnState, Store};

/// Path of the store's disk.
pub const DISK: &str = "/disk";

/// Creates a machine with a disk of `size` bytes and 4 KiB sectors.
pub fn machine(size: u64, faults: Faults) -> World {
    let world = World::new(1, faults);
    world.add_file(DISK, size, 4096);
    world
}

/// Runs `future` on a reactor of the machine, followed by a power failure.
pub fn run<F: Future>(world: &World, future: F) -> F::Output {
    let reactor = world.reactor();
    let out = world.run(&reactor, future).unwrap_or_else(|stop| panic!("{stop}"));
    world.crash(reactor, CrashKind::Power);
    out
}

/// Waits until all devices of a store are complete.
pub async fn all_active(store: &Store) {
    while store.degraded().is_some() || store.devices().iter().any(|device| device.state != ColumnState::Active) {
        sleep(Duration::from_millis(1)).await;
    }
}

/// Scrubs a store; returns the numbers of mended and of lost blocks.
pub async fn scrub(store: &Store) -> (u64, u64) {
    store.start_scrub().expect("a scrub");
    while store.scrub_status().running {
        sleep(Duration::from_millis(1)).await;
    }
    let status = store.scrub_status();
    (status.mended, status.lost)
}
