//! Tests of maps in encodings of older and newer releases than the one that tests run with: appended fields are
//! skipped, incompatible encodings are rejected.

use std::net::SocketAddr;
use std::time::Duration;

use forebay_accel::crc32c;
use forebay_messenger::wire::{AddrKind, EntityAddr, NewerEncoding, PayloadReader, PayloadWriter};

use super::osdmap::state;
use super::pool::VERSION;
use super::{Epoch, Incremental, MapError, OsdMap, PgPool, PoolKind, pool_flags};
use crate::denc::WriterExt;

/// Encodes a replicated pool in a given version; versions newer than known have extra data behind it.
fn pool(version: u8, compat: u8, flags: u64) -> Vec<u8> {
    let mut out = PayloadWriter::new();
    out.versioned(version, compat, |out| {
        // Type, copies, rule, hash, groups, localised groups, last change, snapshots.
        out.u8(1).u8(3).u8(0).u8(2).u32(32).u32(16).u32(0).u32(0).u32(7).u64(11).u32(5);
        // Pool snapshots and removed ones; owner, flags, obsolete crash_replay_interval, min_size, quotas.
        out.u32(0).u32(0).u64(0).u64(flags).u32(0).u8(2).u64(0).u64(0);
        // Tiers: own tiers, base pool, mode, read tier, write tier; properties; hit sets.
        out.u32(1).u64(9).i64(-1).u8(0).i64(9).i64(-1).u32(0);
        out.versioned(1, 1, |out| {
            out.u8(0);
        });
        out.u32(0).u32(0).u32(4096).raw(&[0; 32]).text("profile").u32(1);
        out.u32(0).u64(0).u32(0).u32(0).u8(1);
        if version >= 22 {
            out.u8(0);
        }
        if version >= 23 {
            out.u64(0);
        }
        if version >= 24 {
            out.versioned(2, 1, |out| {
                out.u32(0);
            });
        }
        if version >= 25 {
            out.u32(40);
        }
        if version >= 26 {
            out.u32(1).text("rbd").u32(1).text("key").text("value");
        }
        if version >= 27 {
            out.u64(0);
        }
        if version >= 28 {
            // Target and pending PG numbers, two epochs of 14.1; resend epoch; autoscale mode.
            out.u32(32).u32(32).u32(32).u32(0).u32(0).u32(41).u8(1);
        }
        if version >= 29 {
            // Last merge: its source; ready, started and clean epochs; versions of source and target.
            out.versioned(1, 1, |out| {
                out.u8(1).i64(4).u32(31).i32(-1).u32(17).u32(16).u32(16).u64(9).u32(3).u64(8).u32(2);
            });
        }
        // Peering requirements of a stretched pool: bucket count, target, barrier, mandatory member.
        if version == 30 {
            out.u32(2).u32(2).u32(8).i32(0x7fff_ffff);
        }
        if version >= 31 {
            out.u8(1).u32(2).u32(2).u32(8).i32(0x7fff_ffff);
        }
        if version >= 32 {
            // Shards that are never primary: two words of 64 bits, in seven bits per byte.
            out.raw(&[0b1110, 0]);
        }
        if version >= 33 {
            // PG migration: source and target pools; migrating PGs, and the lowest migrated one.
            out.u8(0).u8(0).u32(1).u8(1).i64(4).u32(3).i32(-1).u32(3);
        }
        if version > 33 {
            out.text("something new").u64(3);
        }
    });
    out.finish()
}

#[test]
fn pools_of_every_version() {
    // Encoding versions: 29 and, for stretched pools, 30: up to 19.2, and any release for clients without 20.2
    // features; 32: 20.2; 33: its successor.
    for version in [21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31, 32, 33, 40] {
        let bytes = pool(version, 5, pool_flags::HASH_PS_POOL);
        let mut from = PayloadReader::new(&bytes, "a pool");
        let found = PgPool::decode(&mut from).unwrap_or_else(|error| panic!("version {version}: {error}"));
        assert!(from.rest().is_empty(), "version {version}");
        assert_eq!((found.kind, found.size, found.min_size), (PoolKind::Replicated, 3, 2));
        assert_eq!((found.pg_num, found.pgp_num, found.snap_seq), (32, 16, 11));
        assert_eq!((found.read_tier, found.write_tier), (Some(9), None));
        let resend = match version {
            28.. => 41,
            25.. => 40,
            _ => 0,
        };
        assert_eq!(found.force_resend, resend, "version {version}");
        let applications: &[&str] = if version >= 26 { &["rbd"] } else { &[] };
        assert_eq!(found.applications, applications, "version {version}");
    }
    for (version, compat) in [(20, 5), (33, 31)] {
        let bytes = pool(version, compat, 0);
        assert!(
            PgPool::decode(&mut PayloadReader::new(&bytes, "a pool")).is_err(),
            "version {version}, for {compat} and later"
        );
    }
    let newer = pool(40, 34, 0);
    let refused = PgPool::decode(&mut PayloadReader::new(&newer, "a pool")).expect_err("for version 34 and later");
    assert_eq!(refused.newer, Some(NewerEncoding { version: 40, compat: 34, known: VERSION }));
}

/// Encodes a CRUSH map with one rule, which places nothing.
fn crush() -> Vec<u8> {
    let mut out = PayloadWriter::new();
    out.u32(0x0001_0000).i32(0).u32(1).i32(0);
    // Rule present; number of steps, mask, and one step: emit.
    out.u32(1).u32(1).raw(&[0, 1, 1, 10]).u32(4).i32(0).i32(0);
    out.u32(0).u32(0).u32(0);
    out.finish()
}

/// Encodes an OSD map without OSDs, of epoch 12, in given versions of the whole and of the client section.
fn osd_map(whole: u8, part: u8, compat: u8, flags: u64) -> Vec<u8> {
    encoded(12, whole, (part, compat), flags)
}

/// Encodes an OSD map of any epoch, with the client section in a given version and compatibility version.
pub(crate) fn osd_map_of(epoch: Epoch, part: (u8, u8)) -> Vec<u8> {
    encoded(epoch, 8, part, 0)
}

fn encoded(epoch: Epoch, whole: u8, part: (u8, u8), flags: u64) -> Vec<u8> {
    let mut later = PayloadWriter::new();
    later.versioned(200, 200, |out| {
        out.text("for OSDs only");
    });
    encoded_with(epoch, whole, part, flags, &later.finish())
}

/// Encodes an OSD map with the OSDs' section `osds`.
fn encoded_with(epoch: Epoch, whole: u8, (part, compat): (u8, u8), flags: u64, osds: &[u8]) -> Vec<u8> {
    let mut out = PayloadWriter::new();
    out.versioned(whole, 7, |out| {
        out.versioned(part, compat, |out| {
            out.raw(&[7; 16]).u32(epoch).raw(&[0; 16]);
            out.u32(1).i64(4).raw(&pool(32, 5, flags)).u32(1).i64(4).text("rbd").u32(4).u32(0).u32(0);
            // States, weights, addresses; temporary placements, temporary primaries, affinities; CRUSH; profiles.
            out.u32(0).u32(0).u32(0).u32(0).u32(0).u32(0).blob(&crush()).u32(0);
            // Upmaps; the CRUSH map's version; snapshots being removed, and purged.
            out.u32(0).u32(0).u32(1).u32(0).u32(0);
            if part >= 9 {
                out.raw(&[0; 16]);
            }
            if part >= 10 {
                out.u32(1).u8(1).i64(4).u32(3).i32(-1).i32(0);
            }
            if part > 10 {
                out.text("something new");
            }
        });
        out.raw(osds);
        out.u32(0);
    });
    let mut bytes = out.finish();
    let at = bytes.len() - 4;
    let checksum = !crc32c::crc32c_parts([&bytes[..at]]);
    bytes[at..].copy_from_slice(&checksum.to_le_bytes());
    bytes
}

/// Returns a map without OSDs, of epoch 12, with pool 4.
pub(crate) fn sample() -> OsdMap {
    OsdMap::decode(&osd_map(8, 10, 1, 0)).expect("a map")
}

/// Returns the map of [`sample`] with one OSD that is up, at the given address and nonce.
pub(crate) fn sample_with_osd(osd: i32, socket: SocketAddr, nonce: u32) -> OsdMap {
    let mut map = sample();
    let at = usize::try_from(osd).expect("an OSD's number");
    map.resize(at + 1);
    map.states[at] = state::EXISTS | state::UP;
    map.addrs[at] = vec![EntityAddr::msgr2(Some(socket), nonce)];
    map
}

#[test]
fn changes_are_applied_in_order_only() {
    let following = Incremental::decode_unverified(&change(10, 1)).expect("a change to epoch 13");
    for epoch in [11, 13, 14] {
        let mut map = OsdMap { epoch, ..sample() };
        let before = map.clone();
        let refused = map.apply(following.clone());
        assert!(matches!(refused, Err(MapError::Order { got: 13, .. })), "on epoch {epoch}: {refused:?}");
        assert_eq!(map, before, "nothing of it is taken");
    }
    let mut other = OsdMap { fsid: [8; 16], ..sample() };
    assert!(matches!(other.apply(following), Err(MapError::Cluster)));
}

#[test]
fn maps_of_every_version() {
    for (whole, part) in [(8, 7), (8, 8), (8, 9), (8, 10), (8, 11), (9, 14)] {
        let map = OsdMap::decode(&osd_map(whole, part, 1, 0));
        let map = map.unwrap_or_else(|error| panic!("versions {whole}, {part}: {error}"));
        assert_eq!((map.epoch, map.fsid, map.pool_named("rbd")), (12, [7; 16], Some(4)));
        assert_eq!(map.upmap_primaries.len(), usize::from(part >= 10));
    }
    let refused = OsdMap::decode(&osd_map(8, 14, 11, 0)).expect_err("for later clients only").to_string();
    assert!(refused.starts_with("a map of OSDs is from a release newer than this build understands: "), "{refused}");
    assert!(refused.contains("version 14 for readers of version 11 and later, and 10 is the newest"), "{refused}");
    let mut damaged = osd_map(8, 9, 1, 0);
    damaged[40] ^= 1;
    assert!(matches!(OsdMap::decode(&damaged), Err(MapError::Checksum { .. })));
}

#[test]
fn pools_that_need_a_later_client_are_refused() {
    let map = OsdMap::decode(&osd_map(8, 10, 1, pool_flags::EC_OPTIMIZATIONS)).expect("a map");
    let mut pool = map.pools[&4].clone();
    let refused = map.check_pool(&pool).expect_err("an order of its own");
    assert!(refused.contains("allow_ec_optimizations"), "{refused}");
    pool.flags = 0;
    assert_eq!(map.check_pool(&pool), Ok(()));
}

/// Encodes an incremental map to epoch 13 of a later release: only flags, and unknown data behind them.
fn change(part: u8, compat: u8) -> Vec<u8> {
    change_to(13, (part, compat))
}

/// Encodes an incremental map to any epoch.
pub(crate) fn change_to(epoch: Epoch, part: (u8, u8)) -> Vec<u8> {
    let mut later = PayloadWriter::new();
    later.versioned(200, 200, |out| {
        out.text("for OSDs only");
    });
    change_with(epoch, part, &later.finish())
}

/// Encodes an incremental map with the OSDs' section `osds`.
fn change_with(epoch: Epoch, (part, compat): (u8, u8), osds: &[u8]) -> Vec<u8> {
    let mut out = PayloadWriter::new();
    out.versioned(8, 7, |out| {
        out.versioned(part, compat, |out| {
            out.raw(&[7; 16]).u32(epoch).raw(&[0; 8]).i64(-1).i32(0x40).blob(&[]).blob(&[]).i32(-1);
            // Pools, names, removed pools; up, states, weights, temporary placements and primaries, affinities.
            out.raw(&[0; 4 * 9]);
            // Profiles, removed profiles; upmaps, their removals, twice; removed and purged snapshots.
            out.raw(&[0; 4 * 8]);
            // Modification and creation times; chosen primaries, and removed ones.
            if part >= 8 {
                out.raw(&[0; 16]);
            }
            if part >= 9 {
                out.raw(&[0; 8]);
            }
            if part > 9 {
                out.text("something new");
            }
        });
        out.raw(osds);
        out.u32(0).u32(0);
    });
    out.finish()
}

#[test]
fn changes_of_later_versions() {
    for part in [7, 8, 9, 10, 14] {
        let mut map = OsdMap::decode(&osd_map(8, 10, 1, 0)).expect("a map");
        let change = Incremental::decode_unverified(&change(part, 1));
        let change = change.unwrap_or_else(|error| panic!("version {part}: {error}"));
        map.apply(change).expect("it follows");
        assert_eq!((map.epoch, map.flags), (13, 0x40), "version {part}");
    }
    assert!(Incremental::decode_unverified(&change(14, 11)).is_err(), "for later clients only");
}

/// Address of a client, as monitors keep it: of any protocol.
fn client(text: &str, nonce: u32) -> EntityAddr {
    EntityAddr { kind: AddrKind::Any, nonce, socket: Some(text.parse().expect("an address")) }
}

fn entries(out: &mut PayloadWriter, entries: &[(EntityAddr, u32)]) {
    out.u32(entries.len() as u32);
    for (addr, until) in entries {
        addr.encode(out);
        out.u32(*until).u32(500_000_000);
    }
}

/// Encodes the OSDs' section of a full map with two OSDs and a blocklist.
fn osds(version: u8, compat: u8, blocklist: &[(EntityAddr, u32)]) -> Vec<u8> {
    let mut out = PayloadWriter::new();
    out.versioned(version, compat, |out| {
        out.u32(2);
        for nonce in [1, 2] {
            // A vector of addresses: its marker, and its length.
            out.u8(2).u32(1);
            client("10.0.0.1:6804", nonce).encode(out);
        }
        out.u32(2);
        for _ in 0..2 {
            out.u8(1).u32(0).u32(0).u32(5).u32(6).u32(0).u32(0);
        }
        entries(out, blocklist);
        out.text("further fields");
    });
    out.finish()
}

/// Encodes the OSDs' section of an incremental map that changes the blocklist.
fn osds_change(version: u8, compat: u8, added: &[(EntityAddr, u32)], removed: &[EntityAddr]) -> Vec<u8> {
    let mut out = PayloadWriter::new();
    out.versioned(version, compat, |out| {
        out.u32(1).u32(0).u8(2).u32(1);
        client("10.0.0.1:6804", 3).encode(out);
        // The epoch until which an OSD was up, an interval in which it was clean, one that was lost.
        out.u32(1).u32(0).u32(9).u32(1).u32(0).u32(7).u32(8).u32(1).u32(1).u32(4);
        entries(out, added);
        out.u32(removed.len() as u32);
        removed.iter().for_each(|addr| addr.encode(out));
        out.text("further fields");
    });
    out.finish()
}

#[test]
fn the_blocklist_is_read_and_changed() {
    let (a, b, six) = (client("10.0.0.1:0", 7), client("10.0.0.1:0", 8), client("[fd00::1]:5", 9));
    let map = |version, compat, list: &[(EntityAddr, u32)]| {
        OsdMap::decode(&encoded_with(12, 8, (10, 1), 0, &osds(version, compat, list))).expect("a map")
    };
    let until = |secs: u64| Some(Duration::from_millis(secs * 1000 + 500));
    for version in [9, 12, 15] {
        let mut map = map(version, 1, &[(a, 100), (six, 200)]);
        assert_eq!(map.blocklisted_until("10.0.0.1:0/7"), until(100), "version {version}");
        assert_eq!(map.blocklisted_until("[fd00::1]:5/9"), until(200));
        for other in ["10.0.0.1:0/8", "10.0.0.1:1/7", "10.0.0.2:0/7", "10.0.0.1:0", "", ":/7", "v2:10.0.0.1:0/7"] {
            assert_eq!(map.blocklisted_until(other), None, "{other}");
        }
        // An entry keeps its time; one that is added and removed at once is removed.
        let bytes = change_with(13, (9, 1), &osds_change(version, 1, &[(a, 900), (b, 300)], &[six]));
        map.apply(Incremental::decode_unverified(&bytes).expect("a change")).expect("it follows");
        assert_eq!(map.blocklisted_until("10.0.0.1:0/7"), until(100));
        assert_eq!(map.blocklisted_until("10.0.0.1:0/8"), until(300));
        assert_eq!(map.blocklisted_until("[fd00::1]:5/9"), None);
        let bytes = change_with(14, (9, 1), &osds_change(version, 1, &[(six, 1)], &[a, six]));
        map.apply(Incremental::decode_unverified(&bytes).expect("a change")).expect("it follows");
        assert_eq!(
            ["10.0.0.1:0/7", "10.0.0.1:0/8", "[fd00::1]:5/9"].map(|addr| map.blocklisted_until(addr)),
            [None, until(300), None]
        );
    }
    // What cannot be read is not known: neither a section of a full map, nor what was known before a change.
    assert_eq!(map(15, 13, &[(a, 100)]).blocklisted_until("10.0.0.1:0/7"), None);
    let mut known = map(12, 1, &[(a, 100)]);
    known.apply(Incremental::decode_unverified(&change_to(13, (9, 1))).expect("a change")).expect("it follows");
    assert_eq!((known.epoch, known.blocklisted_until("10.0.0.1:0/7")), (13, None));
    // A section that ends early is rejected.
    let mut short = osds(12, 1, &[(a, 100)]);
    short.truncate(6 + 40);
    short[2..6].copy_from_slice(&40u32.to_le_bytes());
    assert!(matches!(OsdMap::decode(&encoded_with(12, 8, (10, 1), 0, &short)), Err(MapError::Malformed(_))));
}
