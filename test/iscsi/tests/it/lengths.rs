//! Inconsistent command lengths, and text requests that do not fit their session type.

use crate::common::{HOST, Model, TARGET, addr, host, simulate, until};
use forebay_iscsi_host::cdb::{self, Cdb};
use forebay_iscsi_host::client::{Client, Done};

const ILLEGAL_REQUEST: u8 = 5;
const MISCOMPARE: u8 = 0xe;
const INFORMATION_UNIT: u16 = 0x0e03;

/// Logs in with the given limit of immediate data, and clears the initial unit attention.
async fn login(immediate: usize) -> Client {
    let options = forebay_iscsi_host::client::Options { immediate, ..host(HOST, 1) };
    let mut client = Client::login(&addr(), &options).await.expect("logs in");
    client.settle(0, cdb::test_unit_ready(), &[], 0).await.expect("answers").ok();
    client
}

/// Builds a 10-byte CDB for `blocks` blocks.
fn ten(opcode: u8, flags: u8, blocks: u8) -> Cdb {
    let mut cdb = [0; 16];
    (cdb[0], cdb[1], cdb[8]) = (opcode, flags, blocks);
    cdb
}

/// Builds a 12-byte CDB.
fn twelve(opcode: u8, flags: u8, blocks: u8) -> Cdb {
    let mut cdb = [0; 16];
    (cdb[0], cdb[1], cdb[9]) = (opcode, flags, blocks);
    cdb
}

/// Builds a 16-byte CDB.
fn sixteen(opcode: u8, flags: u8, blocks: u8) -> Cdb {
    let mut cdb = [0; 16];
    (cdb[0], cdb[1], cdb[13]) = (opcode, flags, blocks);
    cdb
}

/// Returns every form of a write of `blocks` blocks, from block 0 on.
fn writes(blocks: u8) -> Vec<Cdb> {
    let mut six = [0; 16];
    (six[0], six[4]) = (0x0a, blocks);
    vec![
        six,
        ten(0x2a, 0, blocks),
        twelve(0xaa, 0, blocks),
        sixteen(0x8a, 0, blocks),
        ten(0x2e, 0, blocks),
        ten(0x2e, 2, blocks),
        twelve(0xae, 2, blocks),
        sixteen(0x8e, 2, blocks),
        sixteen(0x8b, 0, blocks),
    ]
}

fn refused(done: &Done, what: &str) {
    assert_eq!((done.status, done.sense()), (2, Some((ILLEGAL_REQUEST, INFORMATION_UNIT))), "{what}: {done:x?}");
}

#[test]
fn a_write_with_a_part_of_a_block_writes_nothing() {
    simulate(4, |seed, place| async move {
        let model = Model::new(1 << 20, seed >= 2);
        place.add(0, &model);
        model.bytes.borrow_mut().fill(b'a');
        let before = model.bytes.borrow().clone();
        // All data immediate, then all data solicited.
        for immediate in [8192, 0] {
            let mut client = login(immediate).await;
            for (blocks, expected) in [(1, 1), (1, 200), (1, 511), (2, 1000), (100, 20_000)] {
                for cdb in writes(blocks) {
                    let what = format!("seed {seed}: {blocks} blocks, {expected} bytes, {cdb:x?}");
                    let done = client.run(0, cdb, &vec![b'b'; expected], 0).await.expect("answers");
                    refused(&done, &what);
                    assert_eq!(done.residual, i64::from(blocks) * 512 - expected as i64, "{what}");
                    assert!(*model.bytes.borrow() == before, "{what}: something is written");
                }
            }
            // Data is expected, but the write flag is not set, so none is sent.
            for cdb in writes(1) {
                for expected in [200, 512, 1024] {
                    let done = client.run(0, cdb, &[], expected).await.expect("answers");
                    refused(&done, &format!("seed {seed}: {expected} bytes, {cdb:x?}"));
                    assert!(*model.bytes.borrow() == before, "seed {seed}: something is written");
                }
            }
            client.close();
        }
        until(|| place.targets.memory() == 0).await;
    });
}

#[test]
fn a_write_with_fewer_blocks_writes_these_and_says_what_is_missing() {
    simulate(4, |seed, place| async move {
        let model = Model::new(1 << 20, seed >= 2);
        place.add(0, &model);
        for immediate in [8192, 0] {
            let mut client = login(immediate).await;
            for (blocks, sent) in [(1_u8, 0_usize), (2, 1), (3, 2), (100, 40)] {
                for cdb in writes(blocks) {
                    model.bytes.borrow_mut().fill(b'a');
                    let what = format!("seed {seed}: {sent} of {blocks} blocks, {cdb:x?}");
                    let done = client.run(0, cdb, &vec![b'b'; sent * 512], 0).await.expect("answers");
                    assert_eq!(done.residual, (i64::from(blocks) - sent as i64) * 512, "{what}");
                    let mut end = sent * 512;
                    if cdb[0] == 0x8b {
                        // ORWRITE takes all of its data or none.
                        refused(&done, &what);
                        end = 0;
                    } else {
                        assert_eq!(done.status, 0, "{what}");
                    }
                    let bytes = model.bytes.borrow();
                    assert!(bytes[..end].iter().all(|&byte| byte == b'b'), "{what}");
                    assert!(bytes[end..].iter().all(|&byte| byte == b'a'), "{what}");
                }
            }
            client.close();
        }
        until(|| place.targets.memory() == 0).await;
    });
}

#[test]
fn a_write_with_too_much_data_writes_its_blocks_and_says_what_is_left() {
    simulate(4, |seed, place| async move {
        let model = Model::new(1 << 20, seed >= 2);
        place.add(0, &model);
        for immediate in [8192, 0] {
            let mut client = login(immediate).await;
            for (blocks, expected) in [(1_u8, 1024_usize), (1, 10_000), (1, 513), (3, 20_000)] {
                for cdb in writes(blocks) {
                    model.bytes.borrow_mut().fill(b'a');
                    let done = client.run(0, cdb, &vec![b'c'; expected], 0).await.expect("answers");
                    let end = usize::from(blocks) * 512;
                    assert_eq!((done.status, done.residual), (0, end as i64 - expected as i64), "{cdb:x?}");
                    let bytes = model.bytes.borrow();
                    assert!(bytes[..end].iter().all(|&byte| byte == b'c'), "seed {seed}: {cdb:x?}");
                    assert!(bytes[end..].iter().all(|&byte| byte == b'a'), "seed {seed}: {cdb:x?}");
                }
            }
            client.close();
        }
    });
}

#[test]
fn compare_and_write_takes_twice_its_blocks_or_does_nothing() {
    simulate(4, |seed, place| async move {
        let model = Model::new(1 << 20, seed >= 2);
        place.add(0, &model);
        for immediate in [8192, 0] {
            let mut client = login(immediate).await;
            for content in [b'a', b'b'] {
                // The outcome must not depend on whether the stored data matches the data to compare.
                model.bytes.borrow_mut().fill(content);
                let before = model.bytes.borrow().clone();
                for (blocks, expected) in
                    [(1, 0), (1, 200), (1, 512), (1, 1023), (1, 1025), (1, 2048), (3, 2048), (2, 1024), (0, 1024)]
                {
                    let mut data = vec![b'a'; expected];
                    data[expected / 2..].fill(b'z');
                    let cdb = cdb::compare_and_write(0, blocks);
                    let done = client.run(0, cdb, &data, 0).await.expect("answers");
                    let what = format!("seed {seed}: {blocks} blocks with {expected} bytes: {done:x?}");
                    assert_eq!((done.status, done.sense().map(|(key, _)| key)), (2, Some(ILLEGAL_REQUEST)), "{what}");
                    assert!(*model.bytes.borrow() == before, "{what}");
                }
            }
            // With complete data, the command compares and writes.
            let mut data = vec![b'x'; 2048];
            data[1024..].fill(b'y');
            let done = client.run(0, cdb::compare_and_write(0, 2), &data, 0).await.expect("answers");
            assert_eq!(done.sense().map(|(key, _)| key), Some(MISCOMPARE), "seed {seed}");
            data[..1024].fill(b'b');
            client.run(0, cdb::compare_and_write(0, 2), &data, 0).await.expect("answers").ok();
            assert_eq!((model.at(0), model.at(1), model.at(2)), (b'y', b'y', b'b'), "seed {seed}");
            client.close();
        }
    });
}

#[test]
fn lists_and_patterns_come_whole_or_nothing_is_done() {
    simulate(4, |seed, place| async move {
        let model = Model::new(1 << 20, seed >= 2);
        place.add(0, &model);
        model.bytes.borrow_mut().fill(b'a');
        let before = model.bytes.borrow().clone();
        // UNMAP of blocks 0 to 7; WRITE SAME of a block; the parameters of a registration.
        let mut unmap = vec![0, 22, 0, 16, 0, 0, 0, 0];
        unmap.extend([0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 8, 0, 0, 0, 0]);
        let register = cdb::reserve_list(0, 7, false);
        let whole: [(Cdb, &[u8]); 3] = [
            (cdb::unmap(24), &unmap),
            (cdb::write_same(0, 8, false), &[b'b'; 512]),
            (cdb::reserve_out(0, 0), &register),
        ];
        for immediate in [8192, 0] {
            let mut client = login(immediate).await;
            for (cdb, data) in whole {
                for len in [0, 1, 8, data.len() - 1] {
                    let done = client.run(0, cdb, &data[..len], 0).await.expect("answers");
                    let key = done.sense().map(|(key, _)| key);
                    assert_eq!((done.status, key), (2, Some(ILLEGAL_REQUEST)), "seed {seed}: {len} of {cdb:x?}");
                    assert!(*model.bytes.borrow() == before, "seed {seed}: {len} of {cdb:x?}");
                }
            }
            let keys = client.run(0, cdb::reserve_in(0), &[], 1024).await.expect("answers").ok();
            assert_eq!(keys[4..8], [0; 4], "seed {seed}: nobody is registered");
            client.close();
        }
        // With complete data they succeed.
        let mut client = login(8192).await;
        for (cdb, data) in whole {
            client.run(0, cdb, data, 0).await.expect("answers").ok();
        }
        assert_eq!((model.at(0), model.at(7), model.at(8)), (b'b', b'b', b'a'), "seed {seed}");
    });
}

#[test]
fn who_makes_it_is_the_same_for_every_unit() {
    simulate(1, |_, place| async move {
        place.add(0, &Model::new(1 << 20, false));
        place.add(1, &Model::new(1 << 20, false));
        let mut client = login(8192).await;
        let mut pages = Vec::new();
        for lun in [0, 1] {
            let standard = client.settle(lun, cdb::inquiry(None), &[], 255).await.expect("answers").ok();
            assert_eq!(&standard[8..32], b"FOREBAY Forebay volume  ");
            pages.push(client.settle(lun, cdb::inquiry(Some(0x83)), &[], 255).await.expect("answers").ok());
        }
        assert_ne!(pages[0], pages[1]);
        let name = b"\x03\x00\x00\x08unit-0-0";
        assert!(pages[0].windows(name.len()).any(|part| part == name), "{:x?}", pages[0]);
    });
}

#[test]
fn only_discovery_is_told_of_all_targets() {
    simulate(2, |seed, place| async move {
        place.add(0, &Model::new(1 << 20, false));
        let told = |text: Vec<u8>| String::from_utf8(text).expect("text");
        let all = [("SendTargets", "All")];
        let mut client = login(8192).await;
        let answer = told(client.text(&all).await.expect("answers"));
        assert_eq!(answer, "SendTargets=Reject\0", "seed {seed}");
        // A session may request its own target, by name or without one, and learns of no other.
        let own = format!("TargetName={TARGET}\0");
        for which in ["", TARGET] {
            let answer = told(client.text(&[("SendTargets", which)]).await.expect("answers"));
            assert!(answer.starts_with(&own), "seed {seed}: {answer:?}");
        }
        let other = told(client.text(&[("SendTargets", "iqn.2026-11.io.forebay:other")]).await.expect("answers"));
        assert_eq!(other, "", "seed {seed}");
        client.run(0, cdb::write(0, 1), &[1; 512], 0).await.expect("goes on").ok();
        let discovery = forebay_iscsi_host::client::Options { target: String::new(), ..host(HOST, 2) };
        let mut client = Client::login(&addr(), &discovery).await.expect("logs in");
        let answer = told(client.text(&all).await.expect("answers"));
        assert!(answer.starts_with(&own), "seed {seed}: {answer:?}");
    });
}

#[test]
fn numbers_past_the_last_are_refused() {
    use forebay_iscsi::scsi::inquiry::UnitIdentity;
    use forebay_iscsi::wire::Lun;
    use forebay_iscsi::{LunOutOfRange, UnitSpec};
    simulate(1, |_, place| async move {
        let spec = || UnitSpec {
            name: "x".into(),
            identity: UnitIdentity { uuid: [1; 16], revision: "1".into() },
            read_only: false,
            rotational: false,
            space: Default::default(),
            initiators: Vec::new(),
        };
        for lun in [16_384, 65_536, u32::MAX] {
            let error = place.target.add(lun, spec()).expect_err("out of range");
            assert_eq!(error, LunOutOfRange(lun).into());
            assert!(error.to_string().contains("16383"), "{error}");
        }
        // The largest LUN is reachable: by flat addressing, like every LUN above 255.
        for lun in [0, 255, 256, Lun::MAX] {
            place.add(lun, &Model::new(1 << 20, false));
        }
        let mut client = login(8192).await;
        let luns = client.run(0, cdb::report_luns(), &[], 1024).await.expect("answers").ok();
        assert_eq!(luns[3], 32);
        let listed: Vec<&[u8]> = luns[8..].chunks_exact(8).map(|lun| &lun[..2]).collect();
        assert_eq!(listed, [[0, 0], [0, 255], [0x41, 0], [0x7f, 0xff]]);
        for lun in [255, 256, Lun::MAX] {
            client.settle(lun, cdb::write(0, 1), &[1; 512], 0).await.expect("answers").ok();
        }
    });
}
