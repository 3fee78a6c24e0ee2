//! Interaction between units, and unit attentions.

use std::time::Duration;

use crate::common::{HOST, Model, OTHER, addr, host, simulate, until};
use forebay_iscsi_host::cdb;
use forebay_iscsi_host::client::Client;
use forebay_reactor::timeout;

/// Persistent reservations: service actions and the kind that lets registrants alone write.
const REGISTER: u8 = 0;
const RESERVE: u8 = 1;
const CLEAR: u8 = 3;
const PREEMPT: u8 = 4;
const REGISTRANTS_ONLY: u8 = 5;

/// Logs in, and clears the initial unit attention.
async fn login(name: &str, session: u8) -> Client {
    let mut client = Client::login(&addr(), &host(name, session)).await.expect("logs in");
    client.settle(0, cdb::test_unit_ready(), &[], 0).await.expect("answers").ok();
    client
}

/// Returns the sense data of TEST UNIT READY.
async fn told(client: &mut Client) -> Option<(u8, u16)> {
    client.run(0, cdb::test_unit_ready(), &[], 0).await.expect("answers").sense()
}

/// Returns the designator by which copies name a unit.
async fn designator(client: &mut Client, lun: u16) -> Vec<u8> {
    let page = client.settle(lun, cdb::inquiry(Some(0x83)), &[], 255).await.expect("answers").ok();
    assert_eq!((page[4], page[5], page[7]), (1, 3, 8), "the first is the unit's NAA name");
    page[4..16].to_vec()
}

#[test]
fn blocks_are_copied_from_unit_to_unit() {
    simulate(4, |seed, place| async move {
        let (from, to) = (Model::new(1 << 20, seed >= 2), Model::new(2 << 20, seed >= 2));
        place.add(0, &from);
        place.add(3, &to);
        for (at, byte) in from.bytes.borrow_mut().iter_mut().enumerate() {
            *byte = (at / 512 % 251) as u8 + 1;
        }
        let mut client = login(HOST, 1).await;
        let names = [designator(&mut client, 0).await, designator(&mut client, 3).await];
        assert_ne!(names[0], names[1]);
        let list = cdb::copy_list((&names[0], 100), (&names[1], 3000), 700);
        let copy = cdb::extended_copy(list.len() as u32);
        // The result does not depend on the unit that is asked.
        for lun in [0, 3] {
            to.bytes.borrow_mut().fill(0);
            client.settle(lun, copy, &list, 0).await.expect("answers").ok();
            let (from, to) = (from.bytes.borrow(), to.bytes.borrow());
            let (first, end) = (3000 * 512, 3700 * 512);
            assert_eq!(to[first..end], from[100 * 512..800 * 512], "seed {seed}");
            assert!(
                to[..first].iter().chain(&to[end..]).all(|byte| *byte == 0),
                "seed {seed}: nothing else is written"
            );
        }
        // A nonexistent unit, and blocks out of range.
        let mut unknown = names[1].clone();
        unknown[11] ^= 1;
        let list = cdb::copy_list((&names[0], 0), (&unknown, 0), 1);
        let done = client.run(0, copy, &list, 0).await.expect("answers");
        assert_eq!((done.status, done.sense().map(|(key, _)| key)), (2, Some(0xa)), "seed {seed}");
        let list = cdb::copy_list((&names[0], 2000), (&names[1], 0), 700);
        let done = client.run(0, copy, &list, 0).await.expect("answers");
        assert_eq!(done.status, 2, "seed {seed}: past the end of what is read");
    });
}

#[test]
fn a_copy_onto_itself_further_up_reads_before_it_writes() {
    simulate(2, |seed, place| async move {
        let unit = Model::new(8 << 20, seed >= 1);
        place.add(0, &unit);
        for (at, byte) in unit.bytes.borrow_mut().iter_mut().enumerate() {
            *byte = (at / 512 % 251) as u8 + 1;
        }
        let before = unit.bytes.borrow().clone();
        let mut client = login(HOST, 1).await;
        let name = designator(&mut client, 0).await;
        // Longer than one copy chunk, overlapping by less than a chunk, in both directions.
        for (from, to) in [(0_usize, 1000_usize), (1000, 0)] {
            unit.bytes.borrow_mut().copy_from_slice(&before);
            let blocks = 3 * 2048 + 77;
            let list = cdb::copy_list((&name, from as u64), (&name, to as u64), blocks as u16);
            client.settle(0, cdb::extended_copy(list.len() as u32), &list, 0).await.expect("answers").ok();
            let found = unit.bytes.borrow();
            let wanted = &before[from * 512..(from + blocks) * 512];
            assert!(found[to * 512..(to + blocks) * 512] == *wanted, "seed {seed}: from {from} to {to}");
        }
    });
}

#[test]
fn writes_are_durable_and_compared_as_they_ask() {
    simulate(2, |seed, place| async move {
        let unit = Model::new(1 << 20, false);
        place.add(0, &unit);
        let mut client = login(HOST, 1).await;
        client.settle(0, cdb::write(0, 1), &[1; 512], 0).await.expect("answers").ok();
        assert_eq!(unit.durable_writes.get(), 0, "seed {seed}");
        let mut fua = cdb::write(1, 1);
        fua[1] |= 8;
        client.settle(0, fua, &[2; 512], 0).await.expect("answers").ok();
        assert_eq!(unit.durable_writes.get(), 1, "seed {seed}: FUA");
        // Data to compare comes first, data to write after it.
        let both = |expect: u8, new: u8| [[expect; 512], [new; 512]].concat();
        client.settle(0, cdb::compare_and_write(0, 1), &both(1, 9), 0).await.expect("answers").ok();
        assert_eq!(unit.bytes.borrow()[..1024], [[9; 512], [2; 512]].concat());
        let other = client.run(0, cdb::compare_and_write(0, 1), &both(1, 7), 0).await.expect("answers");
        assert_eq!((other.status, other.sense().map(|(key, _)| key)), (2, Some(0xe)), "a miscompare");
        assert_eq!(unit.bytes.borrow()[0], 9, "nothing is written");
    });
}

#[test]
fn a_copy_needs_both_units_to_be_visible_and_not_reserved() {
    simulate(2, |seed, place| async move {
        let (own, foreign) = (Model::new(1 << 20, false), Model::new(1 << 20, false));
        place.add(0, &own);
        place.add_for(1, &foreign, &[OTHER]);
        own.bytes.borrow_mut().fill(7);
        let (mut client, mut other) = (login(HOST, 1).await, login(OTHER, 1).await);
        let names = [designator(&mut other, 0).await, designator(&mut other, 1).await];
        let list = cdb::copy_list((&names[0], 0), (&names[1], 0), 8);
        let copy = cdb::extended_copy(list.len() as u32);
        let done = client.run(0, copy, &list, 0).await.expect("answers");
        assert_eq!(done.status, 2, "seed {seed}: a unit that its host does not see is written");
        assert_eq!(foreign.at(0), 0, "seed {seed}");
        other.run(0, copy, &list, 0).await.expect("answers").ok();
        assert_eq!(foreign.at(0), 7, "seed {seed}");

        // The destination is the host's own unit, reserved by another host.
        for (action, key, service) in [(REGISTER, 0, 2), (RESERVE, 2, 0)] {
            let list = cdb::reserve_list(key, service, false);
            other.run(0, cdb::reserve_out(action, REGISTRANTS_ONLY), &list, 0).await.expect("answers").ok();
        }
        let list = cdb::copy_list((&names[0], 0), (&names[0], 100), 8);
        let done = client.settle(0, copy, &list, 0).await.expect("answers");
        assert_ne!(done.status, 0, "seed {seed}: a copy goes past a reservation");
    });
}

#[test]
fn who_is_preempted_is_told() {
    simulate(4, |seed, place| async move {
        place.add(0, &Model::new(1 << 20, seed >= 2));
        let (mut held, mut other) = (login(HOST, 1).await, login(OTHER, 1).await);
        for (client, key) in [(&mut held, 1), (&mut other, 2)] {
            let list = cdb::reserve_list(0, key, false);
            client.run(0, cdb::reserve_out(REGISTER, 0), &list, 0).await.expect("answers").ok();
        }
        let list = cdb::reserve_list(1, 0, false);
        held.run(0, cdb::reserve_out(RESERVE, REGISTRANTS_ONLY), &list, 0).await.expect("answers").ok();
        assert_eq!(told(&mut held).await, None, "seed {seed}: nothing has happened yet");
        let list = cdb::reserve_list(2, 1, false);
        other.run(0, cdb::reserve_out(PREEMPT, REGISTRANTS_ONLY), &list, 0).await.expect("answers").ok();
        assert_eq!(told(&mut held).await, Some((6, 0x2a05)), "seed {seed}: registrations preempted");
        assert_eq!(told(&mut held).await, None, "seed {seed}: once");
        assert_eq!(told(&mut other).await, None, "seed {seed}: who does it knows it");
        let write = held.run(0, cdb::write(0, 1), &[1; 512], 0).await.expect("answers");
        assert_eq!(write.status, 0x18, "seed {seed}: a reservation conflict");

        // The host registers again, and all registrations are cleared.
        let list = cdb::reserve_list(0, 3, false);
        held.run(0, cdb::reserve_out(REGISTER, 0), &list, 0).await.expect("answers").ok();
        let list = cdb::reserve_list(2, 0, false);
        other.run(0, cdb::reserve_out(CLEAR, 0), &list, 0).await.expect("answers").ok();
        assert_eq!(told(&mut held).await, Some((6, 0x2a03)), "seed {seed}: reservations preempted");
        held.run(0, cdb::write(0, 1), &[1; 512], 0).await.expect("answers").ok();
    });
}

#[test]
fn everybody_is_told_of_another_size() {
    simulate(4, |seed, place| async move {
        let model = Model::new(1 << 20, seed >= 2);
        place.add(0, &model);
        let (mut first, mut second) = (login(HOST, 1).await, login(OTHER, 1).await);
        let past = cdb::write((1 << 20) / 512, 1);
        let done = first.run(0, past, &[1; 512], 0).await.expect("answers");
        assert_eq!(done.sense(), Some((5, 0x2100)), "seed {seed}: past the end");
        model.resize(2 << 20);
        for client in [&mut first, &mut second] {
            assert_eq!(told(client).await, Some((6, 0x2a09)), "seed {seed}: capacity data has changed");
            assert_eq!(told(client).await, None, "seed {seed}: once");
            client.run(0, past, &[1; 512], 0).await.expect("answers").ok();
        }
    });
}

#[test]
fn a_session_holds_no_more_than_its_share() {
    const MIB: usize = 1 << 20;
    const COMMANDS: usize = 40;
    simulate(2, |seed, place| async move {
        let model = Model::new(2 * MIB, false);
        place.add(0, &model);
        let mut client = login(HOST, 1).await;
        model.hold();
        let mut open = Vec::new();
        for _ in 0..COMMANDS {
            open.push(client.start(0, cdb::write(0, (MIB / 512) as u32), &vec![7; MIB], 0).await.expect("sent"));
        }
        // Receives until the target is silent: everything solicited has been sent.
        while timeout(Duration::from_secs(2), client.step()).await.is_ok_and(|done| done.is_ok()) {}
        let held = place.targets.memory();
        assert!((8 * MIB..=17 * MIB).contains(&held), "seed {seed}: {held} bytes are held for {COMMANDS} MiB");
        assert!(model.in_flight.get() >= 8, "seed {seed}: {} are under way", model.in_flight.get());
        // Other hosts are not delayed by it.
        let mut other = login(OTHER, 1).await;
        other.settle(0, cdb::inquiry(None), &[], 255).await.expect("answers").ok();
        model.release();
        for itt in open {
            client.finish(itt).await.expect("answers").ok();
        }
        until(|| place.targets.memory() < MIB).await;
    });
}
