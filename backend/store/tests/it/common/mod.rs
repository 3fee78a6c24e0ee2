//! Simulated machine with one disk, for tests of the store.

use forebay_sim::{CrashKind, Faults, World};

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
