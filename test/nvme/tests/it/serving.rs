//! NVMe/TCP target and its hosts on a simulated network.

use std::time::Duration;

use crate::common::*;
use forebay_nvme_host::client::Client;
use forebay_nvme_host::codec::{self, Digests, blocks, sqe, with};
use forebay_nvmf::wire::log::AnaState;
use forebay_reactor::{random, sleep, spawn, yield_now};

const NONE: Digests = Digests { header: false, data: false };
const BOTH: Digests = Digests { header: true, data: true };

fn le(bytes: &[u8], at: usize, len: usize) -> u64 {
    (0..len).rev().fold(0, |value, byte| value << 8 | u64::from(bytes[at + byte]))
}

async fn hosts(digests: Digests, host: &str) -> (Client, Client) {
    let (admin, cntlid) = Client::admin(&addr(), digests, NQN, host).await.expect("an admin queue");
    let io = Client::io(&addr(), digests, NQN, host, cntlid, 1).await.expect("an I/O queue");
    (admin, io)
}

async fn identify(admin: &mut Client, cns: u32, nsid: u32) -> Vec<u8> {
    admin.run(with(sqe(0x06, nsid), 10, cns), &[], 4096).await.expect("connected").ok()
}

fn log(page: u32, len: usize) -> codec::Sqe {
    with(sqe(0x02, 0xFFFF_FFFF), 10, page | (len as u32 / 4 - 1) << 16)
}

#[test]
fn random_commands_do_what_they_do_to_a_vector() {
    simulate(12, |seed, site| async move {
        let model = Model::new(3 << 20, seed % 3 != 0);
        site.add(1, &model);
        let digests = Digests { header: seed & 2 != 0, data: seed & 4 != 0 };
        let (_admin, mut io) = hosts(digests, HOST).await;
        let mut want = vec![0_u8; 3 << 20];
        let places = want.len() as u64 / 512;
        for _ in 0..60 {
            let count = [1, 8, 32, 33, 200, 2048][random() as usize % 6].min(places);
            let first = random() % (places - count + 1);
            let range = first as usize * 512..(first + count) as usize * 512;
            let len = range.len();
            match random() % 8 {
                0..3 => {
                    let factor = random() | 1;
                    let data: Vec<u8> = (0..len as u64).map(|at| (at.wrapping_mul(factor) >> 8) as u8).collect();
                    io.run(blocks(0x01, 1, first, count as u32), &data, 0).await.expect("write").ok();
                    want[range].copy_from_slice(&data);
                }
                3..6 => {
                    let data = io.run(blocks(0x02, 1, first, count as u32), &[], len).await.expect("read").ok();
                    assert!(data == want[range], "what was read differs");
                }
                6 => {
                    io.run(blocks(0x08, 1, first, count as u32), &[], 0).await.expect("write zeroes").ok();
                    want[range].fill(0);
                }
                _ => {
                    let mut ranges = vec![0; 16];
                    ranges[4..8].copy_from_slice(&(count as u32).to_le_bytes());
                    ranges[8..16].copy_from_slice(&first.to_le_bytes());
                    io.run(with(sqe(0x09, 1), 11, 4), &ranges, 0).await.expect("deallocate").ok();
                    want[range].fill(0);
                }
            }
        }
        assert!(*model.bytes.borrow() == want);
        io.run(sqe(0x00, 1), &[], 0).await.expect("flush").ok();
        assert_eq!(model.flushes.get(), 1);
        let fua = with(blocks(0x01, 1, 0, 1), 12, 1 << 30);
        io.run(fua, &[1; 512], 0).await.expect("write").ok();
        assert_eq!(model.durable_writes.get(), 1);
        assert_eq!(site.server.bytes_held(), 0, "everything that was held is given back");
    });
}

#[test]
fn compare_alone_and_fused() {
    simulate(4, |seed, site| async move {
        let model = Model::new(1 << 20, seed > 1);
        site.add(1, &model);
        let (_admin, mut io) = hosts(if seed == 2 { BOTH } else { NONE }, HOST).await;
        for in_capsule in [8192, 0] {
            io.in_capsule = in_capsule;
            model.bytes.borrow_mut()[..4096].fill(7);
            io.run(blocks(0x05, 1, 0, 8), &[7; 4096], 0).await.expect("compare").ok();
            let other = io.run(blocks(0x05, 1, 0, 8), &[8; 4096], 0).await.expect("compare");
            assert_eq!(other.completion.status, 0x285);
            for (expect, found) in [(7_u8, 0), (7, 0x285)] {
                let mut first = blocks(0x05, 1, 0, 8);
                first[1] |= 1;
                let mut second = blocks(0x01, 1, 0, 8);
                second[1] |= 2;
                let first = io.start(first, &[expect; 4096], 0).await.expect("sent");
                let second = io.start(second, &[9; 4096], 0).await.expect("sent");
                let (first, second) = (io.finish(first).await.expect("done"), io.finish(second).await.expect("done"));
                assert_eq!(first.completion.status, found);
                assert_eq!(second.completion.status, if found == 0 { 0 } else { 0x009 });
                assert_eq!(model.bytes.borrow()[0], 9);
            }
        }
        // A first fused command alone, a second one alone, and two that do not match.
        let mut first = blocks(0x05, 1, 0, 1);
        first[1] |= 1;
        let lonely = io.start(first, &[9; 512], 0).await.expect("sent");
        io.run(sqe(0x00, 1), &[], 0).await.expect("flush").ok();
        assert_eq!(io.finish(lonely).await.expect("done").completion.status, 0x00A);
        let mut second = blocks(0x01, 1, 0, 1);
        second[1] |= 2;
        assert_eq!(io.run(second, &[1; 512], 0).await.expect("done").completion.status, 0x00A);
        let first = io.start(first, &[9; 512], 0).await.expect("sent");
        let mut elsewhere = blocks(0x01, 1, 1, 1);
        elsewhere[1] |= 2;
        assert_eq!(io.run(elsewhere, &[1; 512], 0).await.expect("done").completion.status, 0x009);
        assert_eq!(io.finish(first).await.expect("done").completion.status, 0x002);
        assert_eq!(site.server.bytes_held(), 0);
    });
}

#[test]
fn what_makes_no_sense_is_refused_and_the_next_is_served() {
    simulate(2, |_, site| async move {
        let model = Model::new(1 << 20, false);
        site.add(1, &model);
        let (mut admin, mut io) = hosts(NONE, HOST).await;
        let end = (1 << 20) / 512;
        for (command, data, read, status) in [
            (blocks(0x02, 1, end, 1), 0, 512, 0x080),
            (blocks(0x02, 1, u64::MAX, 2), 0, 1024, 0x080),
            (blocks(0x01, 1, end, 1), 512, 0, 0x080),
            (blocks(0x02, 2, 0, 1), 0, 512, 0x00B),
            (blocks(0x02, 0, 0, 1), 0, 512, 0x00B),
            (blocks(0x02, u32::MAX, 0, 1), 0, 512, 0x00B),
            (blocks(0x02, 1, 0, 4096), 0, 2 << 20, 0x002),
            (blocks(0x02, 1, 0, 2), 0, 512, 0x00F),
            (blocks(0x01, 1, 0, 2), 512, 0, 0x00F),
            (blocks(0x02, 1, 0, 1), 0, 0, 0x011),
            (sqe(0x04, 1), 0, 0, 0x001),
            (sqe(0x99, 1), 0, 0, 0x001),
        ] {
            let done = io.run(command, &vec![1; data], read).await.expect("answered");
            assert_eq!((done.completion.status, done.completion.final_), (status, true), "{command:x?}");
        }
        for (command, status) in [
            (with(sqe(0x06, 0), 10, 0xFF), 0x002),
            (with(sqe(0x06, 9999), 10, 0), 0x00B),
            (log(0xC7, 64), 0x109),
            (with(sqe(0x0A, 0), 10, 0x7E), 0x002),
            (with(sqe(0x09, 0), 10, 7 | 1 << 31), 0x00D + 0x100),
            (sqe(0x80, 1), 0x001),
        ] {
            let read = if command[0] & 3 == 2 { 4096 } else { 0 };
            let done = admin.run(command, &[], read).await.expect("answered");
            assert_eq!(done.completion.status, status, "{command:x?}");
        }
        // The second of two ranges to deallocate exceeds the capacity: nothing is deallocated.
        io.run(blocks(0x01, 1, 0, 1), &[1; 512], 0).await.expect("write").ok();
        for (first, count) in [(end - 1, 2_u32), (end, 1), (u64::MAX, 1)] {
            let range = |first: u64, count: u32| {
                [vec![0; 4], count.to_le_bytes().to_vec(), first.to_le_bytes().to_vec()].concat()
            };
            let ranges = [range(0, 1), range(first, count)].concat();
            let done = io.run(with(with(sqe(0x09, 1), 10, 1), 11, 4), &ranges, 0).await.expect("answered");
            assert_eq!(done.completion.status, 0x080, "{count} blocks from {first}");
            assert_eq!(model.bytes.borrow()[0], 1);
        }
        let errors = admin.run(log(0x01, 1024), &[], 1024).await.expect("log").ok();
        assert!(le(&errors, 0, 8) >= 10, "the error log counts them");
        io.run(blocks(0x01, 1, 0, 1), &[1; 512], 0).await.expect("write").ok();
    });
}

#[test]
fn identify_features_and_logs_say_what_holds() {
    simulate(2, |_, site| async move {
        site.add(1, &Model::new(1 << 20, false));
        site.add(7, &Model::new(2 << 20, false));
        let (mut admin, _io) = hosts(BOTH, HOST).await;
        let page = identify(&mut admin, 1, 0).await;
        assert_eq!(&page[24..29], b"Model");
        assert_eq!(&page[768..768 + NQN.len()], NQN.as_bytes());
        assert_eq!((page[111], le(&page, 1792, 4), page[525] & 1, le(&page, 522, 2)), (1, (64 + 16384) / 16, 1, 1));
        let page = identify(&mut admin, 0, 7).await;
        assert_eq!((le(&page, 0, 8), page[130], page[30] & 1), (4096, 9, 1));
        assert_eq!(&page[104..120], &[8; 16]);
        // 4 KiB are atomic, and no larger unit is reported.
        assert_eq!((le(&page, 34, 2), le(&page, 36, 2), le(&page, 40, 2), le(&page, 44, 2)), (7, 7, 7, 7));
        assert!(identify(&mut admin, 0, 3).await.iter().all(|&byte| byte == 0), "an inactive namespace");
        let page = identify(&mut admin, 2, 0).await;
        assert_eq!((le(&page, 0, 4), le(&page, 4, 4), le(&page, 8, 4)), (1, 7, 0));
        assert_eq!(le(&identify(&mut admin, 2, 1).await, 0, 4), 7);
        let page = identify(&mut admin, 3, 1).await;
        assert_eq!((page[0], page[1], page[12], page[13], page[32], page[52]), (1, 8, 2, 16, 3, 4));
        for cns in [0x05, 0x06, 0x07, 0x08, 0x10, 0x11, 0x12, 0x13, 0x1A, 0x1C] {
            identify(&mut admin, cns, 1).await;
        }
        let page = admin.run(log(0x0C, 4096), &[], 4096).await.expect("ana").ok();
        assert_eq!((le(&page, 8, 2), le(&page, 20, 4), page[32]), (1, 2, AnaState::Optimized as u8));
        let page = admin.run(log(0x00, 1024), &[], 1024).await.expect("pages").ok();
        for each in [0x00, 0x01, 0x02, 0x03, 0x04, 0x05, 0x0C, 0x80] {
            assert_eq!(page[each * 4] & 1, 1, "log page {each:#x}");
            admin.run(log(each as u32, 512), &[], 512).await.expect("log").ok();
        }
    });
}

#[test]
fn nothing_is_claimed_that_is_not_so() {
    simulate(2, |_, site| async move {
        site.add(1, &Model::new(1 << 20, false));
        let (mut admin, mut io) = hosts(NONE, HOST).await;
        // Allocation is not tracked, so thin provisioning is not reported, and all blocks count as utilized.
        let page = identify(&mut admin, 0, 1).await;
        assert_eq!(page[24] & 1, 0, "THINP");
        assert_eq!((le(&page, 0, 8), le(&page, 8, 8), le(&page, 16, 8)), (2048, 2048, 2048), "NSZE, NCAP, NUSE");
        io.run(blocks(0x08, 1, 0, 8), &[], 0).await.expect("write zeroes").ok();
        assert_eq!(identify(&mut admin, 0, 1).await, page);
        // No temperature sensor and no power measurement exist.
        let controller = identify(&mut admin, 1, 0).await;
        assert_eq!((le(&controller, 266, 2), le(&controller, 268, 2)), (0, 0), "temperature thresholds");
        assert_eq!((controller[263], le(&controller, 2048, 4)), (0, 0), "one power state, without a power");
        let health = admin.run(log(0x02, 512), &[], 512).await.expect("log").ok();
        assert_eq!((health[0], le(&health, 1, 2)), (0, 0), "a temperature is reported");
        let threshold = admin.run(with(sqe(0x0A, 0), 10, 4), &[], 0).await.expect("get").completion;
        assert_eq!((threshold.status, threshold.result), (0, 0xFFFF), "a threshold that nothing passes");
        // NVM sets, secondary controllers and the like are not supported.
        for cns in [0x04, 0x14, 0x15, 0x16, 0x17, 0x18, 0x1D, 0xFF] {
            let done = admin.run(with(sqe(0x06, 1), 10, cns), &[], 4096).await.expect("answered").completion;
            assert_eq!((done.status, done.final_), (0x002, true), "CNS {cns:#x}");
        }
    });
}

#[test]
fn log_pages_are_claimed_exactly_when_they_are_served() {
    // Log pages behind the bits of LPA, as far as a bit stands for whole pages.
    const BEHIND: [(u8, &[u32]); 4] = [(1, &[0x05]), (3, &[0x07, 0x08]), (4, &[0x0D]), (5, &[0x00, 0x12, 0x13])];
    simulate(2, |seed, site| async move {
        site.add(1, &Model::new(1 << 20, false));
        let subsystem = if seed == 0 { NQN } else { DISCOVERY };
        let (mut admin, _) = Client::admin(&addr(), NONE, subsystem, HOST).await.expect("an admin queue");
        let lpa = identify(&mut admin, 1, 0).await[261];
        let supported = admin.run(log(0x00, 1024), &[], 1024).await.expect("pages").ok();
        let mut served = Vec::new();
        for page in 0..256_u32 {
            let done = admin.run(log(page, 64), &[], 64).await.expect("answered").completion;
            let listed = supported[page as usize * 4] & 1 == 1;
            assert_eq!((done.status == 0, done.status), (listed, if listed { 0 } else { 0x109 }), "log page {page:#x}");
            served.extend(listed.then_some(page));
        }
        for (bit, pages) in BEHIND {
            let all = pages.iter().all(|page| served.contains(page));
            assert_eq!(lpa >> bit & 1 == 1, all, "LPA bit {bit}: {lpa:#x}, served: {served:x?}");
        }
        // Bit 0: health pages of namespaces.  Bit 2: offsets, and lengths past 16 bits of dwords.
        let of_namespace = with(with(sqe(0x02, 1), 10, 2 | 127 << 16), 11, 0);
        assert_ne!(admin.run(of_namespace, &[], 512).await.expect("answered").completion.status, 0);
        assert_eq!((lpa & 1, lpa >> 2 & 1), (0, 1));
        let part = admin.run(with(log(0x00, 64), 12, 64), &[], 64).await.expect("a part").ok();
        assert_eq!(part, supported[64..128]);
        // Bit 5: the effects log states the scope of each command.
        if served.contains(&0x05) {
            let effects = admin.run(log(0x05, 4096), &[], 4096).await.expect("effects").ok();
            let told: Vec<u64> = (0..512).map(|at| le(&effects, at * 4, 4)).filter(|each| each & 1 == 1).collect();
            assert!(told.len() > 10 && told.iter().all(|each| each >> 20 != 0), "{told:x?}");
        }
        // Features are listed exactly when they are supported.
        let features = admin.run(log(0x12, 1024), &[], 1024).await.expect("features").ok();
        for id in 0..=255_u32 {
            let read = if id == 0x16 || id == 0x81 { 4096 } else { 0 };
            let done = admin.run(with(sqe(0x0A, 1), 10, id), &[], read).await.expect("answered").completion;
            // A listed feature that depends on the namespace's device may still fail.
            let listed = features[id as usize * 4] & 1 == 1;
            assert_eq!(done.status == 0x002, !listed, "feature {id:#x}: {done:x?}");
        }
    });
}

#[test]
fn the_number_of_queues_is_settled_before_the_first() {
    simulate(4, |_, site| async move {
        site.add(1, &Model::new(1 << 20, false));
        let (mut admin, cntlid) = Client::admin(&addr(), NONE, NQN, HOST).await.expect("an admin queue");
        let get = |select: u32| with(sqe(0x0A, 0), 10, 7 | select << 8);
        let set = |count: u32| with(with(sqe(0x09, 0), 10, 7), 11, (count - 1) | (count - 1) << 16);
        // Before it is set: the maximum, which is also the default.
        for select in 0..3 {
            let queues = admin.run(get(select), &[], 0).await.expect("get").completion;
            assert_eq!((queues.status, queues.result), (0, 63 | 63 << 16), "select {select}");
        }
        let granted = admin.run(set(8), &[], 0).await.expect("set").completion;
        assert_eq!((granted.status, granted.result), (0, 7 | 7 << 16));
        let granted = admin.run(set(2), &[], 0).await.expect("set again").completion;
        assert_eq!((granted.status, granted.result), (0, 1 | 1 << 16));
        let mut io = Client::io(&addr(), NONE, NQN, HOST, cntlid, 2).await.expect("an I/O queue");
        let late = admin.run(set(8), &[], 0).await.expect("answered").completion;
        assert_eq!((late.status, late.final_), (0x00C, true), "Command Sequence Error");
        let queues = admin.run(get(0), &[], 0).await.expect("get").completion;
        assert_eq!(queues.result, 1 | 1 << 16, "what was set holds");
        io.run(blocks(0x02, 1, 0, 1), &[], 512).await.expect("read").ok();
        // A controller reset restores the defaults.
        admin.run(codec::property(0x14, false, Some(6 << 16 | 4 << 20)), &[], 0).await.expect("reset").ok();
        admin.enable().await.expect("enabled");
        let granted = admin.run(set(4), &[], 0).await.expect("set").completion;
        assert_eq!((granted.status, granted.result), (0, 3 | 3 << 16));
    });
}

#[test]
fn commands_that_are_fused_or_use_prps_are_refused() {
    simulate(2, |_, site| async move {
        let model = Model::new(1 << 20, false);
        site.add(1, &model);
        let (mut admin, mut io) = hosts(NONE, HOST).await;
        let flags = |mut sqe: codec::Sqe, flags: u8| {
            sqe[1] = flags;
            sqe
        };
        // FUSE in bits 1:0, PSDT in 7:6; the only valid value is an SGL without one for metadata.
        for wrong in [0x00, 0x41, 0x42, 0x43, 0x80, 0xC0] {
            for (sqe, read) in [
                (with(sqe(0x06, 0), 10, 1), 4096),
                (log(0x00, 1024), 1024),
                (with(sqe(0x0A, 0), 10, 6), 0),
                (with(with(sqe(0x09, 0), 10, 6), 11, 0), 0),
                (sqe(0x18, 0), 0),
                (sqe(0x0C, 0), 0),
            ] {
                let done = admin.run(flags(sqe, wrong), &[], read).await.expect("answered").completion;
                assert_eq!((done.status, done.final_), (0x002, true), "{wrong:#x} {sqe:x?}");
            }
            if wrong & 3 == 0 {
                let done = io.run(flags(blocks(0x01, 1, 0, 1), wrong), &[1; 512], 0).await.expect("answered");
                assert_eq!((done.completion.status, done.completion.final_), (0x002, true), "{wrong:#x}");
            }
        }
        // None of it was executed.
        let cache = admin.run(with(sqe(0x0A, 0), 10, 6), &[], 0).await.expect("get").completion;
        assert_eq!((cache.status, cache.result), (0, 1));
        assert!(model.bytes.borrow().iter().all(|&byte| byte == 0));
        admin.run(sqe(0x18, 0), &[], 0).await.expect("keep alive").ok();
    });
}

#[test]
fn ids_out_of_range_are_refused() {
    use forebay_nvmf::session::admin::{ANA_GROUPS_MAX, NAMESPACES_MAX};
    use forebay_nvmf::{Namespace, NamespaceError};
    simulate(1, |_, site| async move {
        let add = |nsid, ana_group| {
            let namespace = Namespace { nsid, name: "n".into(), uuid: [9; 16], ana_group, read_only: false };
            site.subsystem.add_namespace(namespace)
        };
        for nsid in [0, NAMESPACES_MAX + 1, 9000, u32::MAX] {
            let error = add(nsid, 1).expect_err("out of range");
            assert_eq!(error, NamespaceError::Nsid(nsid));
            assert!(error.to_string().contains("8192"), "{error}");
        }
        for group in [0, ANA_GROUPS_MAX + 1, u32::MAX] {
            assert_eq!(add(1, group), Err(NamespaceError::AnaGroup { group, max: ANA_GROUPS_MAX }));
        }
        assert_eq!(site.subsystem.namespace_ids(), [] as [u32; 0]);
        assert_eq!((add(1, 1), add(NAMESPACES_MAX, ANA_GROUPS_MAX)), (Ok(()), Ok(())));
        assert_eq!(site.subsystem.namespace_ids(), [1, NAMESPACES_MAX]);
        let (mut admin, _) = Client::admin(&addr(), NONE, NQN, HOST).await.expect("an admin queue");
        assert_eq!(le(&identify(&mut admin, 1, 0).await, 516, 4), NAMESPACES_MAX.into(), "NN");
    });
}

#[test]
fn write_cache_off_makes_every_write_durable() {
    simulate(1, |_, site| async move {
        let model = Model::new(1 << 20, false);
        site.add(1, &model);
        let (mut admin, mut io) = hosts(NONE, HOST).await;
        io.run(blocks(0x01, 1, 0, 1), &[1; 512], 0).await.expect("write").ok();
        assert_eq!(model.durable_writes.get(), 0);
        admin.run(with(with(sqe(0x09, 0), 10, 6), 11, 0), &[], 0).await.expect("set").ok();
        io.run(blocks(0x01, 1, 0, 1), &[1; 512], 0).await.expect("write").ok();
        assert_eq!(model.durable_writes.get(), 1);
    });
}

#[test]
fn events_tell_of_namespaces_sizes_and_states_once_each() {
    simulate(4, |_, site| async move {
        let model = Model::new(1 << 20, false);
        site.add(1, &model);
        let (mut admin, mut io) = hosts(NONE, HOST).await;
        let wanted = 1 << 8 | 1 << 11;
        admin.run(with(with(sqe(0x09, 0), 10, 0xB), 11, wanted), &[], 0).await.expect("set").ok();
        let request = admin.start(sqe(0x0C, 0), &[], 0).await.expect("sent");
        site.add(2, &Model::new(1 << 20, false));
        let told = admin.finish(request).await.expect("an event").completion;
        assert_eq!((told.status, told.result), (0, 2 | 4 << 16));
        // Until the log page is read, no further event of that type is reported, and other types are.
        let request = admin.start(sqe(0x0C, 0), &[], 0).await.expect("sent");
        model.resize(2 << 20);
        site.subsystems.set_ana(&site.port, 1, AnaState::Inaccessible);
        let told = admin.finish(request).await.expect("an event").completion;
        assert_eq!(told.result, 2 | 3 << 8 | 0xC << 16);
        let refused = io.run(blocks(0x02, 1, 0, 1), &[], 512).await.expect("answered").completion;
        assert_eq!((refused.status, refused.final_), (0x302, false));
        site.subsystems.set_ana(&site.port, 1, AnaState::NonOptimized);
        io.run(blocks(0x02, 1, 0, 1), &[], 512).await.expect("read").ok();
        let page = admin.run(log(4, 4096), &[], 4096).await.expect("changed").ok();
        assert_eq!((le(&page, 0, 4), le(&page, 4, 4), le(&page, 8, 4)), (1, 2, 0));
        let request = admin.start(sqe(0x0C, 0), &[], 0).await.expect("sent");
        site.subsystem.remove_namespace(2);
        let told = admin.finish(request).await.expect("an event").completion;
        assert_eq!(told.result, 2 | 4 << 16);
        assert_eq!(io.run(blocks(0x02, 2, 0, 1), &[], 512).await.expect("answered").completion.status, 0x00B);
        let grown = io.run(blocks(0x02, 1, 3000, 1), &[], 512).await.expect("read");
        assert_eq!(grown.completion.status, 0, "past the old end");
        // Five requests exceed the limit; a request can be aborted.
        let mut requests = Vec::new();
        for _ in 0..5 {
            requests.push(admin.start(sqe(0x0C, 0), &[], 0).await.expect("sent"));
        }
        assert_eq!(admin.finish(requests[4]).await.expect("answered").completion.status, 0x105);
        let abort = with(sqe(0x08, 0), 10, u32::from(requests[0]) << 16);
        assert_eq!(admin.run(abort, &[], 0).await.expect("abort").completion.result, 0);
        assert_eq!(admin.finish(requests[0]).await.expect("aborted").completion.status, 0x007);
    });
}

#[test]
fn discovery_tells_ports_and_that_they_changed() {
    simulate(2, |_, site| async move {
        let (mut admin, _) = Client::admin(&addr(), NONE, DISCOVERY, HOST).await.expect("discovery");
        let page = admin.run(log(0x70, 3072), &[], 3072).await.expect("log").ok();
        assert_eq!(le(&page, 8, 8), 2);
        assert_eq!((page[1024], page[1026], page[2048], page[2050]), (3, 3, 3, 2));
        assert_eq!(&page[2048 + 256..2048 + 256 + NQN.len()], NQN.as_bytes());
        assert_eq!(&page[2048 + 512..2048 + 512 + 9], b"192.0.2.7");
        admin.run(with(with(sqe(0x09, 0), 10, 0xB), 11, 1 << 31), &[], 0).await.expect("set").ok();
        let request = admin.start(sqe(0x0C, 0), &[], 0).await.expect("sent");
        site.subsystems.add_port(forebay_nvmf::Port::new(2, vec![]));
        let told = admin.finish(request).await.expect("an event").completion;
        assert_eq!(told.result, 2 | 0xF0 << 8 | 0x70 << 16);
        assert_eq!(admin.run(sqe(0x08, 0), &[], 0).await.expect("answered").completion.status, 0x001);
    });
}

#[test]
fn reservations_keep_others_out_and_tell_them() {
    simulate(4, |_, site| async move {
        let model = Model::new(1 << 20, false);
        site.add(1, &model);
        let (_a, mut first) = hosts(NONE, HOST).await;
        let (mut admin, mut second) = hosts(NONE, OTHER).await;
        let keys = |current: u64, new: u64| [current.to_le_bytes(), new.to_le_bytes()].concat();
        let register = sqe(0x0D, 1);
        first.run(register, &keys(0, 11), 0).await.expect("register").ok();
        second.run(register, &keys(0, 22), 0).await.expect("register").ok();
        // Write exclusive.
        let acquire = with(sqe(0x11, 1), 10, 1 << 8);
        first.run(acquire, &keys(11, 0), 0).await.expect("acquire").ok();
        assert_eq!(second.run(acquire, &keys(22, 0), 0).await.expect("answered").completion.status, 0x083);
        assert_eq!(second.run(blocks(1, 1, 0, 1), &[1; 512], 0).await.expect("answered").completion.status, 0x083);
        second.run(blocks(2, 1, 0, 1), &[], 512).await.expect("read").ok();
        first.run(blocks(1, 1, 0, 1), &[1; 512], 0).await.expect("write").ok();
        let report = with(with(sqe(0x0E, 1), 10, 255), 11, 1);
        let page = second.run(report, &[], 1024).await.expect("report").ok();
        assert_eq!((page[4], le(&page, 5, 2), page[64 + 2], page[128 + 2]), (1, 2, 1, 0));
        assert_eq!((le(&page, 64 + 8, 8), &page[64 + 16..64 + 32]), (11, &codec::host_id(HOST)[..]));
        // The second host preempts the first, which is notified and fenced.
        let request = admin.start(sqe(0x0C, 0), &[], 0).await.expect("sent");
        let release = with(sqe(0x15, 1), 10, 1 << 8);
        first.run(with(register, 10, 1), &keys(11, 0), 0).await.expect("unregister").ok();
        let refused = first.run(release, &11_u64.to_le_bytes(), 0).await.expect("answered").completion;
        assert_eq!(refused.status, 0x083);
        second.run(acquire, &keys(22, 0), 0).await.expect("acquire").ok();
        first.run(register, &keys(0, 33), 0).await.expect("register").ok();
        let preempt = with(sqe(0x11, 1), 10, 1 | 1 << 8);
        first.run(preempt, &keys(33, 22), 0).await.expect("preempt").ok();
        let told = admin.finish(request).await.expect("an event").completion;
        assert_eq!(told.result, 6 | 0x80 << 16);
        let page = admin.run(log(0x80, 64), &[], 64).await.expect("log").ok();
        assert_eq!((le(&page, 0, 8), page[8], le(&page, 12, 4)), (1, 1, 1));
        assert_eq!(second.run(blocks(1, 1, 0, 1), &[1; 512], 0).await.expect("answered").completion.status, 0x083);
    });
}

#[test]
fn a_write_whose_data_comes_after_a_preemption_is_refused() {
    simulate(4, |seed, site| async move {
        let model = Model::new(1 << 20, false);
        site.add(1, &model);
        let (_a, mut first) = hosts(if seed & 1 == 0 { NONE } else { BOTH }, HOST).await;
        let (_b, mut second) = hosts(NONE, OTHER).await;
        let keys = |current: u64, new: u64| [current.to_le_bytes(), new.to_le_bytes()].concat();
        first.run(sqe(0x0D, 1), &keys(0, 11), 0).await.expect("register").ok();
        second.run(sqe(0x0D, 1), &keys(0, 22), 0).await.expect("register").ok();
        first.run(with(sqe(0x11, 1), 10, 1 << 8), &keys(11, 0), 0).await.expect("acquire").ok();
        // Its data is not solicited and sent yet.
        first.in_capsule = 0;
        let late = first.start(blocks(1, 1, 0, 8), &[1; 4096], 0).await.expect("sent");
        until(|| site.server.bytes_held() >= 4096).await;
        let preempt = with(sqe(0x11, 1), 10, 1 | 1 << 8);
        second.run(preempt, &keys(22, 11), 0).await.expect("preempt").ok();
        assert_eq!(first.finish(late).await.expect("answered").completion.status, 0x083, "seed {seed}");
        assert!(model.bytes.borrow().iter().all(|byte| *byte == 0), "seed {seed}: nothing is written");
        assert_eq!(site.server.bytes_held(), 0);
    });
}

#[test]
fn a_new_controller_waits_for_the_commands_of_the_old_one() {
    simulate(4, |_, site| async move {
        let model = Model::new(1 << 20, true);
        site.add(1, &model);
        let (admin, mut io) = hosts(NONE, HOST).await;
        model.hold();
        io.start(blocks(1, 1, 0, 1), &[1; 512], 0).await.expect("sent");
        until(|| model.in_flight.get() == 1).await;
        admin.close();
        io.close();
        let again = spawn(async { Client::admin(&addr(), NONE, NQN, HOST).await });
        sleep(Duration::from_millis(50)).await;
        assert!(!again.is_finished(), "the old write may still land");
        // Another host does not wait.
        Client::admin(&addr(), NONE, NQN, OTHER).await.expect("the other host");
        model.release();
        let (_, cntlid) = again.await.expect("connected");
        assert_eq!(model.in_flight.get(), 0);
        assert!(cntlid >= 5);
    });
}

#[test]
fn a_silent_host_loses_its_controller_and_one_that_talks_keeps_it() {
    simulate(1, |_, site| async move {
        site.add(1, &Model::new(1 << 20, false));
        let (mut admin, cntlid) = Client::admin(&addr(), NONE, NQN, HOST).await.expect("an admin queue");
        let set = with(with(sqe(0x09, 0), 10, 0xF), 11, 2000);
        admin.run(set, &[], 0).await.expect("set").ok();
        let mut io = Client::io(&addr(), NONE, NQN, HOST, cntlid, 1).await.expect("an I/O queue");
        for _ in 0..10 {
            sleep(Duration::from_millis(1500)).await;
            io.run(blocks(2, 1, 0, 1), &[], 512).await.expect("any traffic counts").ok();
        }
        assert_eq!(site.subsystem.controller_ids(), [cntlid]);
        sleep(Duration::from_secs(6)).await;
        assert!(site.subsystem.controller_ids().is_empty());
        assert!(io.run(blocks(2, 1, 0, 1), &[], 512).await.is_err(), "its queues have gone, too");
        assert_eq!(site.subsystems.stats().counts().keep_alive_expired, 1);
    });
}

#[test]
fn connect_is_held_against_what_there_is() {
    simulate(2, |_, site| async move {
        site.add(1, &Model::new(1 << 20, false));
        let (_admin, cntlid) = Client::admin(&addr(), NONE, NQN, HOST).await.expect("an admin queue");
        for (queue, entries, subsystem, host, id, want) in [
            (0, 32, "nqn.2020-01.org.example:other", HOST, 0xFFFF, (0x182, 1 << 16 | 256)),
            (0, 32, NQN, "somebody", 0xFFFF, (0x182, 1 << 16 | 512)),
            (0, 32, NQN, HOST, 3, (0x182, 1 << 16 | 16)),
            (0, 1, NQN, HOST, 0xFFFF, (0x182, 44)),
            (1, 2000, NQN, HOST, cntlid, (0x182, 44)),
            (1, 32, NQN, HOST, cntlid + 1, (0x182, 1 << 16 | 16)),
            (1, 32, NQN, OTHER, cntlid, (0x182, 1 << 16 | 512)),
            (99, 32, NQN, HOST, cntlid, (0x182, 42)),
        ] {
            let mut client = Client::connect(&addr(), NONE).await.expect("connected");
            let done = client.connect_queue(queue, entries, subsystem, host, id, false).await.expect("answered");
            assert_eq!((done.completion.status, done.completion.result), want, "{queue} {entries} {subsystem} {host}");
        }
        let _io = Client::io(&addr(), NONE, NQN, HOST, cntlid, 1).await.expect("an I/O queue");
        let mut client = Client::connect(&addr(), NONE).await.expect("connected");
        let twice = client.connect_queue(1, 32, NQN, HOST, cntlid, false).await.expect("answered").completion;
        assert_eq!((twice.status, twice.result), (0x182, 42));
        let early = client.run(sqe(0x06, 0), &[], 4096).await.expect("answered").completion;
        assert_eq!(early.status, 0x00C);
        yield_now().await;
    });
}
