//! Simulated worlds in which tests run.

use std::future::Future;

use forebay_reactor::Addr;
use forebay_sim::{Faults, World};

/// Returns the address at which tests serve.
pub fn addr() -> Addr {
    Addr::Unix("/run/nbd".into())
}

/// Runs a test in its own simulation, for some seeds.
pub fn simulate<F: Future<Output = ()>>(test: impl Fn() -> F) {
    for seed in 0..8 {
        simulate_seed(seed, &test);
    }
}

/// Runs a test in its own simulation, for one seed.
pub fn simulate_seed<F: Future<Output = ()>>(seed: u64, test: impl Fn() -> F) {
    let mut faults = Faults::none();
    if seed % 2 == 1 {
        // Messages arrive in small segments.
        faults.net.segment_max = 1 + (seed as usize * 37) % 300;
        faults.net.latency = 1..5_000;
    }
    let world = World::new(seed, faults);
    let reactor = world.reactor();
    world.run(&reactor, test()).unwrap_or_else(|stop| panic!("seed {seed}: {stop}\n{}", world.trace(60)));
}
