//! Multiple targets in one daemon: login, discovery, and creation and removal of targets while hosts write.

use std::cell::{Cell, RefCell};
use std::future::Future;
use std::pin::pin;
use std::rc::Rc;
use std::task::Poll;
use std::time::Duration;

use crate::common::{HOST, Model, OTHER, Place, TARGET, addr, host, simulate, spec, until};
use forebay_iscsi::wire::async_event;
use forebay_iscsi::{AccessControl, AddError, Chap, Credential, Exists, Target};
use forebay_iscsi_host::cdb;
use forebay_iscsi_host::client::{Client, Options};
use forebay_load::log::Lines;
use forebay_reactor::{now, sleep, spawn, timeout};

/// Second target.
const SECOND: &str = "iqn.2026-11.io.forebay:second";

fn host_of(target: &str, name: &str, session: u8) -> Options {
    Options { target: target.into(), ..host(name, session) }
}

async fn login(target: &str, name: &str, session: u8) -> Client {
    Client::login(&addr(), &host_of(target, name, session)).await.expect("logs in")
}

async fn refused(options: &Options) -> String {
    let error = Client::login(&addr(), options).await.err().expect("refused").to_string();
    error.strip_prefix("the login is refused: ").unwrap_or_else(|| panic!("{error}")).to_owned()
}

/// Returns the target names that a host discovers.
async fn discovered(name: &str, which: &str) -> Vec<String> {
    let mut client = login("", name, 9).await;
    let found = client.discover(which).await.expect("answers");
    client.logout().await.expect("logs out");
    found.into_iter().map(|(target, _)| target).collect()
}

/// Polls a future once; returns true if it is ready.
async fn is_ready(future: &mut (impl Future + Unpin)) -> bool {
    std::future::poll_fn(|cx| Poll::Ready(pin!(&mut *future).poll(cx).is_ready())).await
}

#[test]
fn targets_have_units_of_their_own() {
    simulate(4, |seed, place| async move {
        let second = place.targets.create(spec(SECOND, &[])).expect("another name");
        let (one, two) = (Model::new(1 << 20, seed >= 2), Model::new(2 << 20, seed >= 2));
        place.add(0, &one);
        place.add_to(&second, 0, &two, &[]);
        // One initiator port has separate sessions with two targets.
        let (mut first, mut other) = (login(TARGET, HOST, 1).await, login(SECOND, HOST, 1).await);
        assert_ne!(first.tsih, other.tsih, "seed {seed}");
        first.settle(0, cdb::write(0, 1), &[1; 512], 0).await.expect("answers").ok();
        other.settle(0, cdb::write(0, 1), &[2; 512], 0).await.expect("answers").ok();
        assert_eq!((one.at(0), two.at(0)), (1, 2), "seed {seed}");
        assert_eq!((place.target.session_count(), second.session_count()), (1, 1), "seed {seed}");
        // Units report the name of their own target.
        let page = other.settle(0, cdb::inquiry(Some(0x83)), &[], 255).await.expect("answers").ok();
        let names = String::from_utf8_lossy(&page).into_owned();
        assert!(names.contains(SECOND) && !names.contains(TARGET), "seed {seed}: {names}");

        // A new session of the port replaces the one with the same target.
        let mut again = login(SECOND, HOST, 1).await;
        again.settle(0, cdb::write(1, 1), &[3; 512], 0).await.expect("answers").ok();
        first.run(0, cdb::write(1, 1), &[4; 512], 0).await.expect("goes on").ok();
        assert_eq!((one.at(1), two.at(1)), (4, 3), "seed {seed}");
        while other.step().await.is_ok() {}
        assert_eq!((place.target.session_count(), second.session_count()), (1, 1), "seed {seed}");
    });
}

#[test]
fn a_login_to_an_unknown_target_is_refused_with_one_line() {
    Lines::of(|lines| {
        simulate(2, |seed, place| async move {
            place.targets.create(spec(SECOND, &[OTHER])).expect("another name");
            let expect = |reason: &str, name: &str, target: &str| {
                let found = lines.take("WARN ");
                let start = format!("WARN host refused front=iscsi initiator={name} address=");
                assert!(
                    found.len() == 1
                        && found[0].starts_with(&start)
                        && found[0].ends_with(&format!(" target={target} reason={reason}")),
                    "seed {seed}: {found:?}"
                );
            };
            let nowhere = "iqn.2026-11.io.forebay:nowhere";
            assert_eq!(refused(&host_of(nowhere, HOST, 1)).await, "0x0203", "seed {seed}");
            expect("target not found", HOST, nowhere);
            assert_eq!(refused(&host_of(SECOND, HOST, 1)).await, "0x0202", "seed {seed}");
            expect("the initiator is not in the target's list", HOST, SECOND);
            assert_eq!(place.targets.counters().snapshot().logins_refused, 2, "seed {seed}");
            // Target names are case-insensitive.
            login(&SECOND.to_uppercase().replace("IQN", "iqn"), OTHER, 1).await.logout().await.expect("logs out");
            assert_eq!(lines.take("WARN "), Vec::<String>::new(), "seed {seed}");

            place.target.set_access(AccessControl { initiators: vec![OTHER.into()], chap: None });
            assert_eq!(refused(&host_of("", HOST, 1)).await, "0x0202", "seed {seed}");
            expect("the initiator is in no target's list", HOST, "discovery");
        });
    });
}

#[test]
fn hosts_discover_the_targets_that_they_may_log_in_to() {
    simulate(2, |seed, place| async move {
        place.targets.set_portals(vec![addr()]);
        place.targets.create(spec(SECOND, &[OTHER])).expect("another name");
        assert_eq!(discovered(HOST, "All").await, [TARGET], "seed {seed}");
        assert_eq!(discovered(OTHER, "All").await, [SECOND, TARGET], "seed {seed}");
        assert_eq!(discovered(OTHER, SECOND).await, [SECOND], "seed {seed}");
        assert!(discovered(HOST, SECOND).await.is_empty(), "seed {seed}: that is not for it");
        // In a normal session, discovery returns its own target only.
        let mut client = login(TARGET, OTHER, 1).await;
        for (which, found) in [("", vec![TARGET]), (TARGET, vec![TARGET]), (SECOND, vec![])] {
            let told = client.discover(which).await.expect("answers");
            let told: Vec<_> = told.iter().map(|(name, addrs)| (name.as_str(), addrs.len())).collect();
            assert_eq!(told, found.into_iter().map(|name| (name, 1)).collect::<Vec<_>>(), "seed {seed}: '{which}'");
        }
        // Later discoveries reflect changes.
        place.targets.get(SECOND).expect("is there").set_access(AccessControl::default());
        assert_eq!(discovered(HOST, "All").await, [SECOND, TARGET], "seed {seed}");
        drop(place.targets.remove(SECOND));
        assert_eq!(discovered(HOST, "All").await, [TARGET], "seed {seed}");
    });
}

#[test]
fn a_long_list_of_targets_is_discovered_whole() {
    simulate(2, |seed, place| async move {
        place.targets.set_portals(vec![addr(), addr()]);
        let name = |number: u32| format!("iqn.2026-11.io.forebay:{number:05}");
        for number in 0..3000 {
            let only = if number % 3 == 0 { &[OTHER][..] } else { &[] };
            place.targets.create(spec(&name(number), only)).expect("another name");
        }
        let mut client = login("", HOST, 1).await;
        let found = client.discover("All").await.expect("answers");
        let wanted = (0..3000).filter(|number| number % 3 != 0).map(name).chain([TARGET.to_owned()]);
        assert!(found.iter().map(|(name, _)| name.clone()).eq(wanted), "seed {seed}: {} found", found.len());
        assert!(found.iter().all(|(_, addrs)| addrs.len() == 2), "seed {seed}: each with its addresses");
    });
}

fn chap(name: &str, secret: &str, target: Option<&str>) -> Chap {
    let credential = |name: &str, secret: &str| Credential { name: name.into(), secret: secret.as_bytes().to_vec() };
    Chap { initiator: credential(name, secret), target: target.map(|secret| credential("disk", secret)) }
}

#[test]
fn each_target_has_secrets_of_its_own() {
    Lines::of(|lines| {
        simulate(2, |seed, place| async move {
            lines.take("");
            let one = chap("host", "secret of one", None);
            let two = chap("host", "secret of two", Some("proof of two"));
            place.target.set_access(AccessControl { initiators: Vec::new(), chap: Some(one.clone()) });
            let mut second = spec(SECOND, &[]);
            second.access.chap = Some(two.clone());
            place.targets.create(second).expect("another name");
            let discovery = chap("host", "secret of all", None);
            place.targets.set_discovery_chap(Some(discovery.clone()));
            let with = |target: &str, chap: &Chap| Options { chap: Some(chap.clone()), ..host_of(target, HOST, 1) };
            for (target, own, wrong) in
                [(TARGET, &one, &two), (SECOND, &two, &one), ("", &discovery, &one), ("", &discovery, &two)]
            {
                let client = Client::login(&addr(), &with(target, own)).await.expect("its own secret");
                client.logout().await.expect("logs out");
                assert_eq!(lines.take("WARN "), Vec::<String>::new(), "seed {seed}");
                let wrong = Chap { target: None, ..wrong.clone() };
                assert_eq!(refused(&with(target, &wrong)).await, "0x0201", "seed {seed}: {target}");
                assert_eq!(refused(&host_of(target, HOST, 1)).await, "0x0201", "seed {seed}: {target}");
                let found = lines.take("WARN host refused front=iscsi ");
                assert_eq!(found.len(), 2, "seed {seed}: {found:?}");
                assert!(!found.iter().any(|line| line.contains("secret of")), "seed {seed}: {found:?}");
            }
            // One target can authenticate itself, the other cannot.
            let mutual = Chap { target: two.target.clone(), ..one.clone() };
            assert_eq!(refused(&with(TARGET, &mutual)).await, "0x0201", "seed {seed}");
            // A new secret applies to new logins.
            let mut client = Client::login(&addr(), &with(SECOND, &two)).await.expect("its own secret");
            let second = place.targets.get(SECOND).expect("is there");
            second.set_access(AccessControl { initiators: Vec::new(), chap: Some(one.clone()) });
            client.ping().await.expect("goes on");
            let next = |chap: &Chap| Options { isid: [0x80, 0, 0, 1, 0, 2], ..with(SECOND, chap) };
            assert_eq!(refused(&next(&two)).await, "0x0201", "seed {seed}");
            Client::login(&addr(), &next(&one)).await.expect("the new secret");
        });
    });
}

/// Writes 500 blocks, again and again, until the session ends; collects those that were acknowledged.  Returns whether
/// the host was asked to log out before.  A host that has one write in flight at a time takes a rest after each.
async fn write_until_the_end(mut client: Client, base: u64, depth: usize, done: Rc<RefCell<Vec<u64>>>) -> bool {
    client.settle(0, cdb::test_unit_ready(), &[], 0).await.expect("answers");
    let mut next = 0;
    let mut open = std::collections::BTreeMap::new();
    let result = async {
        loop {
            while open.len() < depth {
                let block = base + next % 500;
                let itt = client.start(0, cdb::write(block, 1), &[7; 512], 0).await?;
                open.insert(itt, block);
                next += 1;
            }
            let answer = client.any().await?;
            let block = open.remove(&answer.itt).expect("one of its own");
            match answer.status {
                0 => {
                    done.borrow_mut().push(block);
                    if depth == 1 {
                        sleep(Duration::from_millis(20)).await;
                    }
                }
                // The session is ending and nothing was written: the host retries later.
                8 => sleep(Duration::from_millis(10)).await,
                status => panic!("a write fails with {status}: {answer:x?}"),
            }
        }
    };
    let ended: std::io::Result<std::convert::Infallible> = result.await;
    assert!(ended.is_err());
    matches!(
        timeout(Duration::from_millis(1), client.event()).await,
        Ok(Ok((async_event::LOGOUT, [0, 0, seconds]))) if seconds > 0
    )
}

#[test]
fn a_target_is_removed_under_load() {
    simulate(6, |seed, place| async move {
        let second = place.targets.create(spec(SECOND, &[])).expect("another name");
        let (kept, gone) = (Model::new(1 << 20, true), Model::new(1 << 20, true));
        place.add(0, &kept);
        place.add_to(&second, 0, &gone, &[]);
        let (done, kept_done) = (Rc::new(RefCell::new(Vec::new())), Rc::new(RefCell::new(Vec::new())));
        let writer = |target: &'static str, session: u8, depth: usize, done: &Rc<RefCell<Vec<u64>>>| {
            let (done, base) = (done.clone(), u64::from(session) * 500);
            spawn(async move { write_until_the_end(login(target, HOST, session).await, base, depth, done).await })
        };
        let writers: Vec<_> = (0..3).map(|session| writer(SECOND, session, 8, &done)).collect();
        let other = writer(TARGET, 0, 1, &kept_done);
        until(|| done.borrow().len() >= 50).await;
        let ending = place.targets.remove(SECOND).expect("is there");
        assert_eq!(ending.sessions(), 3, "seed {seed}");
        assert_eq!(refused(&host_of(SECOND, HOST, 7)).await, "0x0203", "seed {seed}: while it is being removed");
        ending.await;
        assert_eq!((second.session_count(), gone.in_flight.get()), (0, 0), "seed {seed}");
        let acknowledged = done.borrow().len();
        for block in done.borrow().iter() {
            assert_eq!(gone.at(*block), 7, "seed {seed}: block {block} was acknowledged");
        }
        for writer in writers {
            assert!(writer.await, "seed {seed}: it is asked to log out before the connection ends");
        }
        assert_eq!(done.borrow().len(), acknowledged, "seed {seed}: all that was acknowledged is over");
        // The other target's host is not affected.
        let before = kept_done.borrow().len();
        until(|| kept_done.borrow().len() >= before + 100).await;
        other.abort();
        // The name is free again, and now denotes a different target.
        let anew = place.targets.create(spec(SECOND, &[])).expect("free");
        assert_ne!(anew.id(), second.id());
        place.add_to(&anew, 0, &gone, &[]);
        assert!(matches!(
            second.add(1, place.unit(1, &gone, &[])),
            Err(AddError::Removed(name)) if name == SECOND
        ));
        let mut client = login(SECOND, HOST, 0).await;
        client.settle(0, cdb::write(0, 1), &[9; 512], 0).await.expect("answers").ok();
        assert_eq!(gone.at(0), 9, "seed {seed}");
    });
}

#[test]
fn a_removal_waits_for_writes_that_outlive_their_session() {
    simulate(2, |seed, place| async move {
        let model = Model::new(1 << 20, false);
        place.add(0, &model);
        let mut client = login(TARGET, HOST, 1).await;
        client.settle(0, cdb::test_unit_ready(), &[], 0).await.expect("answers").ok();
        model.hold();
        client.start(0, cdb::write(5, 1), &[7; 512], 0).await.expect("sent");
        until(|| model.in_flight.get() == 1).await;
        let mut ending = place.targets.remove(TARGET).expect("is there");
        until(|| place.targets.session_count() == 0).await;
        sleep(Duration::from_secs(60)).await;
        assert!(!is_ready(&mut ending).await, "seed {seed}: a write may still land");
        model.release();
        ending.await;
        assert_eq!((model.at(5), model.in_flight.get()), (7, 0), "seed {seed}");
    });
}

#[test]
fn a_host_that_does_not_log_out_when_asked_is_left() {
    simulate(2, |seed, place| async move {
        place.add(0, &Model::new(1 << 20, false));
        let mut client = login(TARGET, HOST, 1).await;
        let from = now();
        let ending = place.targets.expel(TARGET, HOST).expect("is there");
        assert_eq!(client.event().await.expect("an event"), (async_event::LOGOUT, [0, 0, 3]), "seed {seed}");
        // The host may continue to send commands, which end with BUSY.
        let busy = client.run(0, cdb::write(0, 1), &[1; 512], 0).await.expect("answers");
        assert_eq!(busy.status, 8, "seed {seed}: {busy:?}");
        assert_eq!(client.event().await.expect("an event"), (async_event::DROP_SESSION, [0, 1, 0]), "seed {seed}");
        assert!(now().since(from) >= Duration::from_secs(3), "seed {seed}: it has time");
        while client.step().await.is_ok() {}
        ending.await;
        assert!(now().since(from) < Duration::from_secs(5), "seed {seed}: but not for ever");

        // Commands begun before are completed and acknowledged.
        let model = Model::new(1 << 20, false);
        place.add(1, &model);
        let mut client = login(TARGET, HOST, 1).await;
        client.settle(1, cdb::test_unit_ready(), &[], 0).await.expect("answers").ok();
        model.hold();
        let write = client.start(1, cdb::write(5, 1), &[7; 512], 0).await.expect("sent");
        until(|| model.in_flight.get() == 1).await;
        let ending = place.targets.expel(TARGET, HOST).expect("is there");
        client.event().await.expect("an event");
        model.release();
        client.finish(write).await.expect("answered before the session ends").ok();
        assert_eq!(model.at(5), 7, "seed {seed}");
        client.logout().await.expect("logs out");
        ending.await;

        // A session that logs out ends at once.
        let mut client = login(TARGET, HOST, 1).await;
        let from = now();
        let ending = place.targets.expel(TARGET, HOST).expect("is there");
        client.event().await.expect("an event");
        client.logout().await.expect("logs out");
        ending.await;
        assert!(now().since(from) < Duration::from_secs(1), "seed {seed}");
        assert!(place.targets.expel(SECOND, HOST).is_none(), "seed {seed}: there is no such target");
    });
}

/// Creates a second target; both have a unit with LUN 0.
fn second_target(place: &Place) -> Target {
    let second = place.targets.create(spec(SECOND, &[])).expect("another name");
    place.add(0, &Model::new(1 << 20, false));
    place.add_to(&second, 0, &Model::new(1 << 20, false), &[]);
    second
}

#[test]
fn access_changes_for_new_logins_and_ends_sessions_when_asked() {
    simulate(2, |seed, place| async move {
        drop(second_target(&place));
        let (mut mine, mut others) = (login(TARGET, HOST, 1).await, login(TARGET, OTHER, 1).await);
        let mut elsewhere = login(SECOND, HOST, 1).await;
        place.target.set_access(AccessControl { initiators: vec!["IQN.2026-11.io.forebay:OTHER".into()], chap: None });
        assert_eq!(refused(&host_of(TARGET, HOST, 2)).await, "0x0202", "seed {seed}");
        mine.settle(0, cdb::write(0, 1), &[1; 512], 0).await.expect("goes on").ok();
        let ending = place.target.expel_unlisted();
        assert_eq!(ending.sessions(), 1, "seed {seed}");
        assert_eq!(mine.event().await.expect("an event").0, async_event::LOGOUT, "seed {seed}");
        mine.logout().await.expect("logs out");
        ending.await;
        for client in [&mut others, &mut elsewhere] {
            client.settle(0, cdb::write(1, 1), &[2; 512], 0).await.expect("goes on").ok();
            assert!(!client.has_answers(), "seed {seed}: nobody asks it to log out");
        }
        assert_eq!(place.targets.session_count(), 2, "seed {seed}");
    });
}

#[test]
fn a_suspended_target_ends_its_sessions_and_tells_hosts_to_come_later() {
    simulate(2, |seed, place| async move {
        drop(second_target(&place));
        let (mut mine, mut elsewhere) = (login(TARGET, HOST, 1).await, login(SECOND, HOST, 1).await);
        let ending = place.target.suspend();
        assert_eq!(ending.sessions(), 1, "seed {seed}");
        assert_eq!(mine.event().await.expect("an event").0, async_event::LOGOUT, "seed {seed}");
        mine.logout().await.expect("logs out");
        ending.await;
        // Service unavailable: initiators try again, which they do not after an initiator error.
        assert_eq!(refused(&host_of(TARGET, HOST, 1)).await, "0x0301", "seed {seed}");
        elsewhere.settle(0, cdb::write(1, 1), &[2; 512], 0).await.expect("goes on").ok();
        assert_eq!(place.target.unit_count(), 1, "seed {seed}");
        place.target.resume();
        let mut again = login(TARGET, HOST, 1).await;
        again.settle(0, cdb::write(0, 1), &[1; 512], 0).await.expect("goes on").ok();
    });
}

#[test]
fn hosts_are_told_of_units_of_their_target_only() {
    simulate(2, |seed, place| async move {
        let second = second_target(&place);
        let (mut first, mut other) = (login(TARGET, HOST, 1).await, login(SECOND, HOST, 1).await);
        for client in [&mut first, &mut other] {
            client.settle(0, cdb::test_unit_ready(), &[], 0).await.expect("answers").ok();
        }
        place.add_to(&second, 7, &Model::new(1 << 20, false), &[]);
        let told = other.run(0, cdb::test_unit_ready(), &[], 0).await.expect("answers").sense();
        assert_eq!(told, Some((6, 0x3f0e)), "seed {seed}");
        let told = first.run(0, cdb::test_unit_ready(), &[], 0).await.expect("answers").sense();
        assert_eq!(told, None, "seed {seed}: the list of its units is what it was");
        let lists = [(&mut first, 1), (&mut other, 2)];
        for (client, count) in lists {
            let list = client.settle(0, cdb::report_luns(), &[], 1024).await.expect("answers").ok();
            assert_eq!(list.len(), 8 + count * 8, "seed {seed}");
        }
    });
}

#[test]
fn nothing_is_copied_from_target_to_target() {
    simulate(2, |seed, place| async move {
        let second = place.targets.create(spec(SECOND, &[])).expect("another name");
        let (own, foreign) = (Model::new(1 << 20, false), Model::new(1 << 20, false));
        place.add(0, &own);
        place.add_to(&second, 0, &foreign, &[]);
        own.bytes.borrow_mut().fill(7);
        let mut names = Vec::new();
        let (mut client, mut other) = (login(TARGET, HOST, 1).await, login(SECOND, HOST, 1).await);
        for client in [&mut client, &mut other] {
            let page = client.settle(0, cdb::inquiry(Some(0x83)), &[], 255).await.expect("answers").ok();
            names.push(page[4..16].to_vec());
        }
        let list = cdb::copy_list((&names[0], 0), (&names[1], 0), 8);
        let copy = cdb::extended_copy(list.len() as u32);
        // The host has direct write access; the target is not asked to copy.
        for client in [&mut client, &mut other] {
            let done = client.settle(0, copy, &list, 0).await.expect("answers");
            assert_eq!((done.status, done.sense().map(|(key, _)| key)), (2, Some(0xa)), "seed {seed}");
        }
        assert_eq!(foreign.at(0), 0, "seed {seed}");
    });
}

#[test]
fn a_volume_is_a_unit_of_one_target() {
    simulate(1, |_, place| async move {
        let second = place.targets.create(spec(SECOND, &[])).expect("another name");
        assert_eq!(place.targets.create(spec(SECOND, &[])).map(drop), Err(Exists(SECOND.into())));
        let unit = place.unit(3, &Model::new(1 << 20, false), &[]);
        place.target.add(3, unit.clone()).expect("the first");
        let exported = AddError::Exported { name: unit.name.clone(), target: TARGET.into(), lun: 3 };
        assert_eq!(second.add(0, unit.clone()).map(drop), Err(exported.clone()));
        assert_eq!(place.target.add(4, unit.clone()).map(drop), Err(exported));
        place.target.add(3, unit.clone()).expect("in its own place");
        assert_eq!(second.unit_count(), 0);
        let found = place.targets.unit_by_name(&unit.name).expect("is there");
        assert_eq!((found.target(), found.lun()), (TARGET, 3));
        place.target.remove(3).expect("is there").await;
        assert!(place.targets.unit_by_name(&unit.name).is_none());
        second.add(0, unit.clone()).expect("is free now");
        assert!(place.target.unit_by_name(&unit.name).is_none() && second.unit_by_name(&unit.name).is_some());
    });
}

#[test]
fn targets_come_and_go_among_hosts_that_come_and_go() {
    simulate(4, |seed, place| async move {
        let models: Vec<_> = (0..3).map(|_| Model::new(1 << 20, true)).collect();
        let name = |number: usize| format!("iqn.2026-11.io.forebay:{number}");
        let stop = Rc::new(Cell::new(false));
        let written = Rc::new(Cell::new(0_u32));
        let hosts: Vec<_> = (0..6_u8)
            .map(|session| {
                let (stop, written, target) = (stop.clone(), written.clone(), name(usize::from(session) % 3));
                spawn(async move {
                    while !stop.get() {
                        let options = host_of(&target, HOST, session);
                        let Ok(mut client) = Client::login(&addr(), &options).await else {
                            sleep(Duration::from_millis(20)).await;
                            continue;
                        };
                        // An error is the end of the session.
                        for block in 0..20 {
                            let block = u64::from(session) * 20 + block;
                            match client.settle(0, cdb::write(block, 1), &[session + 1; 512], 0).await {
                                Ok(done) if done.status == 0 => written.set(written.get() + 1),
                                Ok(_) => {}
                                Err(_) => break,
                            }
                        }
                    }
                })
            })
            .collect();
        for round in 0..12 {
            for (number, model) in models.iter().enumerate() {
                let target = place.targets.create(spec(&name(number), &[])).expect("free");
                place.add_to(&target, 0, model, &[]);
            }
            let before = written.get();
            until(|| written.get() >= before + 30).await;
            for (number, model) in models.iter().enumerate() {
                let ending = place.targets.remove(&name(number)).expect("is there");
                ending.await;
                assert_eq!(model.in_flight.get(), 0, "seed {seed}, round {round}: a write may land later");
            }
        }
        stop.set(true);
        for host in hosts {
            host.await;
        }
        until(|| place.targets.memory() == 0 && place.targets.session_count() == 0).await;
        for session in 0..6_u8 {
            let found = models[usize::from(session) % 3].at(u64::from(session) * 20);
            assert!(found == session + 1, "seed {seed}: host {session} finds {found}");
        }
    });
}
