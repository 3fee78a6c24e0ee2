//! What OSDs send, as it is and as later versions of Ceph may send it.

use forebay_block::Advice;
use forebay_messenger::wire::{Reader, Writer};
use forebay_reactor::{Buf, BufList};

use super::Place;
use super::hobject::HObject;
use super::session::covers;
use super::wire::{Backoff, Envelope, OsdOp, Redirect, Reply, backoff, code, request};
use crate::denc::WriterExt;
use crate::map::{Mapping, PgId};

/// A redirect: to a pool, a key, a namespace, a name; its parts as of these versions.
fn redirect(versions: (u8, u8), (pool, key, namespace, name): (i64, &str, &str, &str)) -> Vec<u8> {
    let mut out = Writer::new();
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

/// An answer to one operation whose output is 3 bytes.
fn reply(version: u16, attempt: i32, redirected: Option<&[u8]>) -> Vec<u8> {
    let mut out = Writer::new();
    out.text("object");
    // The group: a version, the pool, the group's number, what was a preferred OSD.
    out.u8(1).u64(3).u32(7).i32(-1);
    out.u64(0x24).i32(5).raw(&[0; 12]).u32(99).u32(1);
    out.u16(0x1201).u32(0).raw(&[0; 28]).u32(3);
    out.i32(attempt).i32(-5).raw(&[0; 12]).u64(1234);
    if version >= 7 {
        out.u8(u8::from(redirected.is_some())).raw(redirected.unwrap_or_default());
    }
    if version >= 8 {
        // Of a trace.
        out.raw(&[0; 24]);
    }
    if version > 8 {
        out.text("something new");
    }
    out.finish()
}

fn decoded(version: u16, front: &[u8]) -> Reply {
    Reply::decode(version, front, BufList::from(Buf::copy_of(b"out"))).expect("an answer")
}

#[test]
fn answers_of_every_version() {
    for version in [5, 6, 7, 8, 9] {
        let reply = decoded(version, &reply(version, 2, None));
        assert_eq!((reply.result, reply.attempt, reply.version), (5, 2, 1234), "version {version}");
        assert_eq!(reply.redirect, None);
        assert_eq!((reply.ops[0].0, reply.ops[0].1.to_vec()), (-5, b"out".to_vec()));
    }
    assert!(Reply::decode(4, &reply(4, 0, None), BufList::new()).is_err());
}

#[test]
fn redirects_name_an_object_or_leave_it_its_name() {
    for versions in [(1, 6), (2, 7)] {
        // As a cache tier for reading sends it.
        let moved = redirect(versions, (3, "", "space", ""));
        let found = decoded(8, &reply(8, 0, Some(&moved))).redirect.expect("a redirect");
        assert_eq!((found.pool, found.namespace.as_str(), found.key.as_str()), (3, "space", ""));
        assert_eq!(found.name_or("own"), "own");
        let renamed = redirect(versions, (4, "key", "", "other"));
        let found: Redirect = decoded(9, &reply(9, 0, Some(&renamed))).redirect.expect("a redirect");
        assert_eq!((found.pool, found.key.as_str(), found.name_or("own")), (4, "key", "other"));
    }
    // One that wants more of its reader than there is.
    let mut strange = redirect((1, 6), (3, "", "", ""));
    strange[1] = 2;
    assert!(Reply::decode(8, &reply(8, 0, Some(&strange)), BufList::from(Buf::copy_of(b"out"))).is_err());
}

fn object(hash: u32, name: &str) -> HObject {
    HObject { pool: 3, hash, name: name.into(), snap: u64::MAX - 1, ..HObject::default() }
}

#[test]
fn a_backoff_holds_back_its_range_of_its_group() {
    let place = |seed, shard| Place {
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
    assert!(covers(&whole, &place(7, -1), &object(7, "a")));
    assert!(!covers(&whole, &place(6, -1), &object(6, "a")), "another group");
    assert!(!covers(&whole, &place(7, 1), &object(7, "a")), "another shard of the group");
    // One object only, as while it is unfound.
    let one = Backoff { begin: object(7, "b"), end: object(7, "c"), ..whole };
    let held = |name| covers(&one, &place(7, -1), &object(7, name));
    assert_eq!((held("a"), held("b"), held("bb"), held("c")), (false, true, true, false));
    // With something new behind it.
    let mut longer = one.encode();
    longer.extend_from_slice(b"something new");
    assert_eq!(Backoff::decode(&longer), Ok(one));
}

#[test]
fn places_of_later_versions() {
    let mut out = Writer::new();
    out.versioned(5, 3, |out| {
        out.blob(b"k").blob(b"n").u64(4).u32(9).u8(0).blob(b"s").i64(3).text("something new");
    });
    let bytes = out.finish();
    let mut from = Reader::new(&bytes, "a place");
    let found = HObject::decode(&mut from).expect("a place");
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
