//! Tests of messages from OSDs, in current and future encodings.

mod cluster;
mod queue;

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::future::Future;
use std::net::{SocketAddr, TcpListener};
use std::pin::pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use forebay_block::{Advice, Error, ErrorKind, ObjectName};
use forebay_messenger::MessengerCore;
use forebay_messenger::session::SessionViolation;
use forebay_messenger::session::cephx::TicketStore;
use forebay_messenger::wire::control::mode;
use forebay_messenger::wire::{PayloadReader, PayloadWriter};
use forebay_reactor::sync::oneshot;
use forebay_reactor::{Buf, BufList, DriverChoice, Instant, Reactor};

use super::hobject::HObject;
use super::in_flight::InFlightOp;
use super::placement::PgTarget;
use super::session::{OsdSession, covers};
use super::wire::{Backoff, Envelope, OsdOp, OsdReply, Redirect, SNAP_HEAD, backoff, code, flag, request};
use super::{Objecter, OsdRequest};
use crate::config::{Credentials, Said, Settings};
use crate::denc::WriterExt;
use crate::error::errno;
use crate::map::tests::{sample, sample_with_osd};
use crate::map::{Mapping, OsdMap, PgId};
use crate::monitor::conflict_of;

/// Encodes a redirect to a pool, key, namespace and name; its parts in the given versions.
fn redirect(versions: (u8, u8), (pool, key, namespace, name): (i64, &str, &str, &str)) -> Vec<u8> {
    let mut out = PayloadWriter::new();
    out.versioned(versions.0, 1, |out| {
        out.versioned(versions.1, 3, |out| {
            out.i64(pool).i32(-1).text(key).text(namespace).i64(-1);
            if versions.1 > 6 {
                out.text("something new");
            }
        });
        out.text(name).u32(0);
        if versions.0 > 1 {
            out.text("something new");
        }
    });
    out.finish()
}

/// Encodes a reply to one operation whose output is 3 bytes.
fn reply(version: u16, attempt: i32, redirected: Option<&[u8]>) -> Vec<u8> {
    let mut out = PayloadWriter::new();
    out.text("object");
    // Placement group: version, pool, number, obsolete preferred OSD.
    out.u8(1).u64(3).u32(7).i32(-1);
    out.u64(0x24).i32(5).raw(&[0; 12]).u32(99).u32(1);
    out.u16(0x1201).u32(0).raw(&[0; 28]).u32(3);
    out.i32(attempt).i32(-5).raw(&[0; 12]).u64(1234);
    if version >= 7 {
        out.u8(u8::from(redirected.is_some())).raw(redirected.unwrap_or_default());
    }
    if version >= 8 {
        // Trace fields.
        out.raw(&[0; 24]);
    }
    if version > 8 {
        out.text("something new");
    }
    out.finish()
}

fn decoded(version: u16, front: &[u8]) -> OsdReply {
    OsdReply::decode(version, front, BufList::from(Buf::copy_of(b"out"))).expect("an answer")
}

#[test]
fn answers_of_every_version() {
    for version in [5, 6, 7, 8, 9] {
        let reply = decoded(version, &reply(version, 2, None));
        assert_eq!((reply.result, reply.attempt, reply.version), (5, 2, 1234), "version {version}");
        assert_eq!(reply.redirect, None);
        assert_eq!((reply.ops[0].0, reply.ops[0].1.to_vec()), (-5, b"out".to_vec()));
    }
    assert!(OsdReply::decode(4, &reply(4, 0, None), BufList::new()).is_err());
}

#[test]
fn redirects_name_an_object_or_leave_it_its_name() {
    for versions in [(1, 6), (2, 7)] {
        // Redirect as sent by a read-only cache tier.
        let moved = redirect(versions, (3, "", "space", ""));
        let found = decoded(8, &reply(8, 0, Some(&moved))).redirect.expect("a redirect");
        assert_eq!((found.pool, found.namespace.as_str(), found.key.as_str()), (3, "space", ""));
        assert_eq!(found.name_or("own"), "own");
        let renamed = redirect(versions, (4, "key", "", "other"));
        let found: Redirect = decoded(9, &reply(9, 0, Some(&renamed))).redirect.expect("a redirect");
        assert_eq!((found.pool, found.key.as_str(), found.name_or("own")), (4, "key", "other"));
    }
    // Redirect that requires a newer reader.
    let mut strange = redirect((1, 6), (3, "", "", ""));
    strange[1] = 2;
    assert!(OsdReply::decode(8, &reply(8, 0, Some(&strange)), BufList::from(Buf::copy_of(b"out"))).is_err());
}

fn object(hash: u32, name: &str) -> HObject {
    HObject { pool: 3, hash, name: name.into(), snap: u64::MAX - 1, ..HObject::default() }
}

#[test]
fn a_backoff_holds_back_its_range_of_its_group() {
    let target = |seed, shard| PgTarget {
        pg: PgId { pool: 3, seed },
        shard,
        mapping: Mapping { up: vec![1, 0], up_primary: 1, acting: vec![1, 0], primary: 1 },
        shape: (2, 1, 8),
        force_resend: 0,
    };
    let whole = Backoff {
        pg: PgId { pool: 3, seed: 7 },
        shard: -1,
        epoch: 12,
        op: backoff::BLOCK,
        id: 5,
        begin: HObject::start(3, 7),
        end: HObject { max: true, ..HObject::default() },
    };
    assert_eq!(Backoff::decode(&whole.encode()).as_ref(), Ok(&whole));
    assert!(covers(&whole, &target(7, -1), &object(7, "a")));
    assert!(!covers(&whole, &target(6, -1), &object(6, "a")), "another group");
    assert!(!covers(&whole, &target(7, 1), &object(7, "a")), "another shard of the group");
    // Backoff of a single object, as while it is unfound.
    let one = Backoff { begin: object(7, "b"), end: object(7, "c"), ..whole };
    let held = |name| covers(&one, &target(7, -1), &object(7, name));
    assert_eq!((held("a"), held("b"), held("bb"), held("c")), (false, true, true, false));
    // With unknown data behind it.
    let mut longer = one.encode();
    longer.extend_from_slice(b"something new");
    assert_eq!(Backoff::decode(&longer), Ok(one));
}

#[test]
fn places_of_later_versions() {
    let mut out = PayloadWriter::new();
    out.versioned(5, 3, |out| {
        out.blob(b"k").blob(b"n").u64(4).u32(9).u8(0).blob(b"s").i64(3).text("something new");
    });
    let bytes = out.finish();
    let mut from = PayloadReader::new(&bytes, "a position");
    let found = HObject::decode(&mut from).expect("a position");
    assert_eq!((found.name.as_slice(), found.pool, found.snap), (&b"n"[..], 3, 4));
    assert!(from.rest().is_empty());
}

#[test]
fn advice_is_in_the_flags_of_operations_on_bytes() {
    let flags = |op: OsdOp, advice| {
        let op = op.advised(advice);
        let envelope = Envelope {
            pg: PgId { pool: 1, seed: 0 },
            shard: -1,
            hash: 0,
            epoch: 1,
            flags: 0,
            client: 1,
            tid: 1,
            time: (0, 0),
            pool: 1,
            namespace: "",
            name: "o",
            key: "",
            snap: 0,
            snap_seq: 0,
            snaps: &[],
            attempt: 0,
            features: 0,
        };
        let front = request(&envelope, &[op]);
        // The last operation ends before the snapshots, the attempt and the features; its flags follow its code.
        let at = front.len() - 32 - 38 + 2;
        u32::from_le_bytes(front[at..at + 4].try_into().expect("four bytes"))
    };
    let read = || OsdOp::extent(code::READ, 0, 4096);
    // `CEPH_OSD_OP_FLAG_FADVISE_*` of Ceph's `include/rados.h`.
    for (advice, expected) in [
        (Advice::NONE, 0),
        (Advice::RANDOM, 0x4),
        (Advice::SEQUENTIAL, 0x8),
        (Advice::WILL_NEED, 0x10),
        (Advice::DONT_NEED, 0x20),
        (Advice::NO_CACHE, 0x40),
        (Advice::ONE_PASS, 0x48),
        (Advice::RANDOM | Advice::DONT_NEED, 0x24),
    ] {
        assert_eq!(flags(read(), advice), expected, "{advice:?}");
    }
    assert_eq!(flags(OsdOp::new(code::STAT), Advice::ONE_PASS), 0, "no bytes");
    assert_eq!(flags(OsdOp::expect(4096, 4096), Advice::ONE_PASS), 0x2, "no bytes, and a flag of its own");
}

type Answer = oneshot::Receiver<forebay_block::Result<OsdReply>>;

/// Creates a write request for an object.
fn change(ops: Vec<OsdOp>) -> OsdRequest {
    let object = ObjectName::new("o");
    OsdRequest { pool: 4, object, group: 0, snap: SNAP_HEAD, snapc: None, flags: flag::WRITE, ops }
}

/// Adds a write that was sent to an OSD twice and is not yet acknowledged; without a map it has no target.
fn sent(objecter: &Objecter, tid: u64, target: Option<Rc<PgTarget>>, sent_epoch: u32) -> Answer {
    let (answer, answered) = oneshot::channel();
    let op = InFlightOp {
        request: change(vec![OsdOp::new(code::CREATE)]),
        hash: 0,
        target,
        sent: true,
        attempts: 2,
        sent_epoch,
        redirect: None,
        redirects: 0,
        since: Instant::default(),
        lingers: false,
        answer,
    };
    objecter.ops.insert_at(tid, op);
    answered
}

fn target_at(osd: i32) -> Rc<PgTarget> {
    let mapping = Mapping { up: vec![osd], up_primary: osd, acting: vec![osd], primary: osd };
    Rc::new(PgTarget { pg: PgId { pool: 4, seed: 1 }, shard: -1, mapping, shape: (3, 2, 32), force_resend: 0 })
}

fn answered(receiver: &mut Answer) -> Option<forebay_block::Result<OsdReply>> {
    match pin!(receiver).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(result) => result,
        Poll::Pending => None,
    }
}

#[test]
fn only_the_osd_and_the_attempt_that_count_answer_a_request() {
    let objecter = Objecter::new(TicketStore::new());
    let mut waiting = sent(&objecter, 9, Some(target_at(3)), 12);
    let of = |attempt| decoded(8, &reply(8, attempt, None));
    objecter.take_reply(3, 9, of(0));
    assert!(answered(&mut waiting).is_none(), "the first attempt was given up");
    objecter.take_reply(2, 9, of(1));
    assert!(answered(&mut waiting).is_none(), "another OSD, which had it before");
    objecter.take_reply(3, 8, of(1));
    assert!(answered(&mut waiting).is_none(), "another request");
    objecter.ops.with_mut(9, |op| op.sent = false).expect("it waits");
    objecter.take_reply(3, 9, of(1));
    assert!(answered(&mut waiting).is_none(), "it is to be sent again");
    objecter.ops.with_mut(9, |op| op.sent = true).expect("it waits");
    objecter.take_reply(3, 9, of(1));
    assert_eq!(answered(&mut waiting).expect("an answer").expect("a success").version, 1234);
    assert_eq!(objecter.counts(), (0, 0));
}

#[test]
fn who_is_on_the_blocklist_sends_nothing_any_more() {
    let objecter = Objecter::new(TicketStore::new());
    let mut waiting = sent(&objecter, 9, Some(target_at(3)), 12);
    objecter.take_reply(3, 9, OsdReply { result: -errno::ESHUTDOWN, ..decoded(8, &reply(8, 1, None)) });
    let kind = |result: Option<forebay_block::Result<OsdReply>>| result.and_then(Result::err).map(|error| error.kind());
    assert_eq!(kind(answered(&mut waiting)), Some(ErrorKind::Fenced));
    assert!(objecter.is_fenced());
    let mut refused = objecter.submit(change(Vec::new()));
    assert_eq!(kind(answered(&mut refused)), Some(ErrorKind::Fenced));
    assert_eq!(objecter.counts(), (0, 0));
}

#[test]
fn requests_from_before_the_epoch_that_a_pool_names_are_sent_again() {
    let objecter = Objecter::new(TicketStore::new());
    let take = |map: OsdMap| {
        objecter.current.replace(map);
        objecter.rescan();
    };
    let is_sent = || objecter.ops.with(9, |op| op.sent).expect("it waits");
    let mut map = sample();
    map.pools.get_mut(&4).expect("the pool").force_resend = 0;
    let _waiting = sent(&objecter, 9, None, 12);
    take(map.clone());
    assert!(!is_sent(), "it was nowhere before");
    objecter.ops.with_mut(9, |op| op.sent = true).expect("it waits");
    map.epoch = 13;
    take(map.clone());
    assert!(is_sent(), "nothing has changed for it");
    map.epoch = 14;
    map.pools.get_mut(&4).expect("the pool").force_resend = 13;
    take(map.clone());
    assert!(!is_sent(), "it was sent in epoch 12");
    objecter.ops.with_mut(9, |op| (op.sent, op.sent_epoch) = (true, 14)).expect("it waits");
    take(map);
    assert!(is_sent(), "it was sent since");
}

/// Returns the error of an OSD that accepts connections in secure mode only.
fn secure_only(osd: i32) -> Error {
    let reason = SessionViolation::ModesDiffer { ours: vec![mode::CRC], theirs: vec![mode::SECURE] };
    conflict_of(&format!("osd.{osd}"), &reason.into(), ("ms_client_mode", "ms_service_mode")).expect("a conflict")
}

/// Returns the settings of an empty configuration.
fn settings() -> Settings {
    Said::default().with(&BTreeMap::new()).expect("settings").0
}

/// Creates a write request for the placement group that [`target_at`] assigns to an OSD.
fn change_in_group() -> OsdRequest {
    OsdRequest { object: ObjectName::new(""), group: 1, ..change(Vec::new()) }
}

/// Creates a client with a map in which an OSD has the group of [`change_in_group`].
fn objecter_with_group_at(osd: i32, map: OsdMap) -> Rc<Objecter> {
    let objecter = Objecter::new(TicketStore::new());
    objecter.current.replace(map);
    let target = target_at(osd);
    objecter.current.set_target(target);
    objecter
}

/// Returns the error of a request that exceeds its time limit.
fn overdue(objecter: &Objecter, waiting: &mut Answer) -> Error {
    objecter.set_timeout(Some(Duration::ZERO));
    objecter.look_after();
    objecter.set_timeout(None);
    let failed = answered(waiting).expect("an answer").expect_err("too late");
    assert_eq!(failed.kind(), ErrorKind::TimedOut);
    failed
}

#[test]
fn a_mode_conflict_fails_requests_of_a_pool_that_has_answered_nothing() {
    Reactor::system(DriverChoice::Auto).expect("a reactor").block_on(async {
        let objecter = objecter_with_group_at(3, sample());
        let mut before = objecter.submit(change_in_group());
        assert!(answered(&mut before).is_none(), "it waits for a session");
        let error = secure_only(3);
        assert!(objecter.rejections.set_by_osd(3, &error), "another reason");
        assert!(!objecter.rejections.set_by_osd(3, &error), "the same again");
        objecter.fail_conflicting(None);
        let failed = answered(&mut before).expect("an answer").expect_err("no session");
        assert_eq!((failed.kind(), failed.context()), (ErrorKind::Unsupported, error.context()));
        for text in ["osd.3 accepts", "mode secure only", "offers crc only", "ms_client_mode", "ms_service_mode"] {
            assert!(failed.context().contains(text), "{failed}");
        }
        let failed = answered(&mut objecter.submit(change_in_group())).expect("at once").expect_err("no session");
        assert_eq!(failed.context(), error.context());
        assert_eq!(objecter.counts().0, 0);

        // A request of a pool used by hosts waits, although the pool has not answered, and reports the reason when it
        // times out.
        objecter.mark_in_use(4);
        let mut waiting = objecter.submit(change_in_group());
        assert!(answered(&mut waiting).is_none());
        let failed = overdue(&objecter, &mut waiting);
        assert!(
            failed.context().contains("osd.3 does not accept requests")
                && failed.context().contains("mode secure only"),
            "{failed}"
        );
    });
}

#[test]
fn a_submission_looks_at_no_other_request_for_a_conflict() {
    Reactor::system(DriverChoice::Auto).expect("a reactor").block_on(async {
        let objecter = objecter_with_group_at(3, sample());
        let mut before = objecter.submit(change_in_group());
        // The conflict is recorded; waiting requests have not been checked yet.
        objecter.rejections.set_by_osd(3, &secure_only(3));
        let mut after = objecter.submit(change_in_group());
        assert!(answered(&mut after).is_some_and(|answer| answer.is_err()), "the new one is refused");
        assert!(answered(&mut before).is_none(), "the old one is left for the walk");
        objecter.fail_conflicting(None);
        assert!(answered(&mut before).is_some_and(|answer| answer.is_err()));
    });
}

#[test]
fn a_session_that_is_lost_for_another_reason_forgets_its_conflict() {
    Reactor::system(DriverChoice::Auto).expect("a reactor").block_on(async {
        // The port is closed again.
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let socket = listener.local_addr().expect("an address");
        drop(listener);
        let objecter = objecter_with_group_at(3, sample_with_osd(3, socket, 7));
        objecter.start(("admin".into(), Credentials::None), 1, &MessengerCore::default(), &settings());
        objecter.mark_in_use(4);
        objecter.rejections.set_by_osd(3, &secure_only(3));
        let lost_before = objecter.watch_epoch.get();
        let mut waiting = objecter.submit(change_in_group());
        objecter.watch_epoch.wait_until(|| objecter.watch_epoch.get() > lost_before).await;
        assert!(!objecter.rejections.has_osds(), "the connection was refused");
        let failed = overdue(&objecter, &mut waiting);
        assert!(failed.context().contains("osd.3") && !failed.context().contains("mode secure only"), "{failed}");
        objecter.close();
    });
}

#[test]
fn an_osd_at_another_address_forgets_its_conflict() {
    Reactor::system(DriverChoice::Auto).expect("a reactor").block_on(async {
        let at = |port, nonce| sample_with_osd(3, SocketAddr::from(([127, 0, 0, 1], port)), nonce);
        let objecter = objecter_with_group_at(3, at(6800, 1));
        let _waiting = objecter.submit(change_in_group());
        let take = |map: OsdMap| {
            objecter.current.replace(map);
            objecter.rescan();
        };
        let is_known = || objecter.rejections.has_osds();
        objecter.rejections.set_by_osd(3, &secure_only(3));
        take(at(6800, 1));
        assert!(is_known(), "it is where it was");
        take(at(6801, 1));
        assert!(!is_known(), "it is elsewhere");
        let _session = objecter.sessions.borrow_mut().insert(3, OsdSession::open(&objecter, &at(6801, 1), 3));
        objecter.rejections.set_by_osd(3, &secure_only(3));
        take(at(6801, 2));
        assert!(!is_known(), "it was started again");
        let _session = objecter.sessions.borrow_mut().insert(3, OsdSession::open(&objecter, &at(6801, 2), 3));
        objecter.rejections.set_by_osd(3, &secure_only(3));
        take(sample());
        assert!(!is_known(), "it is down");
    });
}

#[test]
fn the_first_answer_of_a_pool_makes_its_requests_wait_from_then_on() {
    let objecter = Objecter::new(TicketStore::new());
    let _waiting = sent(&objecter, 9, Some(target_at(3)), 12);
    assert!(!objecter.rejections.is_in_use(4));
    objecter.take_reply(3, 9, decoded(8, &reply(8, 1, None)));
    assert!(objecter.rejections.is_in_use(4));
}

#[test]
fn features_that_a_daemon_requires_are_named() {
    let reason = SessionViolation::FeaturesRequired(1 << 38 | 1 << 50 | 1 << 5).into();
    let error = conflict_of("osd.1", &reason, ("", "")).expect("a conflict");
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert!(
        error.context().contains("newer than this build understands: bit 5, CRUSH_MSR, SERVER_TENTACLE ("),
        "{error}"
    );
    assert!(conflict_of("osd.1", &SessionViolation::Wait.into(), ("", "")).is_none());
}
