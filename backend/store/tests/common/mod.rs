//! A simulated machine with one disk, as the tests of the store use it.

use forebay_sim::{CrashKind, Faults, World};

/// Where the store's disk is.
pub const DISK: &str = "/disk";

/// A machine whose disk has `size` bytes in sectors of 4 KiB.
pub fn machine(size: u64, faults: Faults) -> World {
    let world = World::new(1, faults);
    world.add_file(DISK, size, 4096);
    world
}

/// Runs `future` on a reactor of that machine, and takes its power away after.
pub fn run<F: Future>(world: &World, future: F) -> F::Output {
    let reactor = world.reactor();
    let out = world.run(&reactor, future).unwrap_or_else(|stop| panic!("{stop}"));
    world.crash(reactor, CrashKind::Power);
    out
}
