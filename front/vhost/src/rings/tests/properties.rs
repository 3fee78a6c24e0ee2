//! Random steps of a driver and of a device that dies, resumes and stops at any time.

use proptest::prelude::*;

use crate::memory::GuestPart;

use super::device::ModelDevice;
use super::model::{ChainForm, ModelBuffer, ModelOptions};

fn options() -> impl Strategy<Value = ModelOptions> {
    let flags = (any::<bool>(), any::<bool>(), any::<bool>(), any::<bool>());
    (flags, 0_u32..6, 1_u16..24, any::<u16>()).prop_map(
        |((packed, event_index, in_order, inflight), power, size, first)| {
            let size = if packed { size } else { 1 << power };
            let first = if packed { first % (2 * size) } else { 0_u16.wrapping_sub(first % 64) };
            ModelOptions { size, packed, event_index, in_order, inflight, first }
        },
    )
}

fn buffers() -> impl Strategy<Value = (Vec<ModelBuffer>, ChainForm)> {
    let form = prop_oneof![Just(ChainForm::Direct), Just(ChainForm::Indirect), Just(ChainForm::Mixed)];
    (proptest::collection::vec((0_u32..100_000, 0_u32..9000), 1..8), 0_usize..8, form).prop_map(
        |(buffers, writable, form)| {
            let buffers = buffers.into_iter().enumerate().map(|(at, (from, len))| (from, len, at >= writable));
            (buffers.collect(), form)
        },
    )
}

#[derive(Debug, Clone)]
enum ModelStep {
    Submit(Vec<ModelBuffer>, ChainForm),
    Sleep(Vec<ModelBuffer>, ChainForm),
    Fetch,
    Resume(usize),
    Complete(usize),
    Interrupt,
    Arm(bool, u64),
    Reap,
    Stop,
    Kill(u64),
    KillTwice(u64),
}

fn step() -> impl Strategy<Value = ModelStep> {
    prop_oneof![
        6 => buffers().prop_map(|(buffers, form)| ModelStep::Submit(buffers, form)),
        1 => buffers().prop_map(|(buffers, form)| ModelStep::Sleep(buffers, form)),
        4 => Just(ModelStep::Fetch),
        2 => any::<usize>().prop_map(ModelStep::Resume),
        6 => any::<usize>().prop_map(ModelStep::Complete),
        2 => Just(ModelStep::Interrupt),
        1 => (any::<bool>(), 0_u64..8).prop_map(|(enabled, more)| ModelStep::Arm(enabled, more)),
        2 => Just(ModelStep::Reap),
        1 => Just(ModelStep::Stop),
        2 => (0_u64..40).prop_map(ModelStep::Kill),
        1 => (0_u64..8).prop_map(ModelStep::KillTwice),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn each_chain_is_found_once_and_returned_once(
        options in options(),
        steps in proptest::collection::vec(step(), 1..150),
    ) {
        let mut device = ModelDevice::new(options);
        for step in steps {
            match step {
                ModelStep::Submit(buffers, form) => device.submit(&buffers, form),
                ModelStep::Sleep(buffers, form) => device.sleep(&buffers, form),
                ModelStep::Fetch => device.fetch(),
                ModelStep::Resume(which) => device.resume(which),
                ModelStep::Complete(which) => device.complete(which),
                ModelStep::Interrupt => device.interrupt(),
                ModelStep::Arm(enabled, more) => device.driver.arm(enabled, more % u64::from(options.size)),
                ModelStep::Reap => device.reap(),
                ModelStep::Stop => device.stop(),
                // Without a region, chains in flight are lost with the device.
                ModelStep::Kill(steps) if options.inflight => device.kill(steps),
                ModelStep::KillTwice(steps) if options.inflight => device.kill_twice(steps),
                ModelStep::Kill(_) | ModelStep::KillTwice(_) => {}
            }
        }
        device.finish();
    }
}

#[test]
fn lists_of_parts_are_used_again() {
    let options =
        ModelOptions { size: 4, packed: false, event_index: false, in_order: false, inflight: false, first: 0 };
    let mut device = ModelDevice::new(options);
    let mut lists: Vec<*const GuestPart> = Vec::new();
    for _ in 0..20 {
        device.submit(&[(0, 16, false), (100, 4096, true), (5000, 1, true)], ChainForm::Direct);
        device.fetch();
        lists.extend(device.executing.iter().flat_map(|(_, chain)| [chain.readable.as_ptr(), chain.writable.as_ptr()]));
        device.complete(0);
        device.reap();
    }
    lists.sort_unstable();
    lists.dedup();
    assert!(lists.len() <= 6, "{} lists", lists.len());
}
