//! Devices that die between any two stores, with scripts that pass each of them.

use super::device::ModelDevice;
use super::model::{ChainForm, ModelBuffer, ModelOptions};
use crate::rings::store::is_dead;

const ONE: &[ModelBuffer] = &[(0, 512, true)];
const TWO: &[ModelBuffer] = &[(0, 16, false), (4096, 4096, true)];
const FOUR: &[ModelBuffer] = &[(0, 16, false), (4096, 100, false), (9000, 200, true), (12_000, 1, true)];

/// Lets chains of one, two and all descriptors pass a ring of four, several times around.
fn run(device: &mut ModelDevice) {
    use ChainForm::{Direct, Indirect};
    for round in 0..5 {
        device.submit(ONE, Direct);
        device.submit(TWO, Direct);
        device.submit(FOUR, Indirect);
        (0..3).for_each(|_| device.resume(0));
        // The latest first.
        device.complete(2);
        device.complete(round % 2);
        device.reap();
        device.submit(ONE, Indirect);
        device.resume(round);
        device.complete(1);
        device.complete(0);
        device.reap();
        device.submit(FOUR, Direct);
        device.resume(0);
        device.complete(0);
        device.reap();
    }
}

fn all_options() -> Vec<ModelOptions> {
    let flags = |bits: u8| (bits & 1 != 0, bits & 2 != 0);
    let firsts = [(false, 0), (false, 65533), (true, 0), (true, 3), (true, 6)];
    let with = |bits| {
        firsts.map(|(packed, first)| {
            let (in_order, event_index) = flags(bits);
            ModelOptions { size: 4, packed, event_index, in_order, inflight: true, first }
        })
    };
    (0..4).flat_map(with).collect()
}

#[test]
fn a_device_that_dies_at_any_store_leaves_exactly_what_was_in_flight() {
    for options in all_options() {
        let mut steps = 1;
        loop {
            let mut device = ModelDevice::new(options);
            device.kill(steps);
            run(&mut device);
            // A death resets the countdown: the last of them is reached once no store is left.
            let alive = !is_dead() && device.deaths == 0;
            device.finish();
            if alive {
                break;
            }
            steps += 1;
        }
        assert!(steps > 100, "{steps} steps of {options:?}");
    }
}

#[test]
fn a_recovery_that_dies_at_any_store_is_repeated() {
    for options in all_options() {
        for steps in 1..100 {
            for recovery in 1..6 {
                let mut device = ModelDevice::new(options);
                device.recovery_steps = recovery;
                device.kill(steps);
                run(&mut device);
                device.finish();
            }
        }
    }
}

#[test]
fn a_region_of_a_stopped_queue_does_not_override_the_base() {
    for options in all_options() {
        let mut device = ModelDevice::new(options);
        run(&mut device);
        device.finish();
        let region = device.driver.region.clone();
        device.virtq.take().expect("a queue").stop();
        // The driver resets the ring: another one begins at the start, with the same region.
        let mut device = ModelDevice::with_region(options, region);
        run(&mut device);
        device.finish();
    }
}
