//! Tests of maps in encodings of older and newer releases than the one that tests run with: appended fields are
//! skipped, incompatible encodings are rejected.

use std::net::SocketAddr;

use forebay_accel::crc32c;
use forebay_messenger::wire::{EntityAddr, NewerEncoding, PayloadReader, PayloadWriter};

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

fn encoded(epoch: Epoch, whole: u8, (part, compat): (u8, u8), flags: u64) -> Vec<u8> {
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
        out.versioned(200, 200, |out| {
            out.text("for OSDs only");
        });
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
pub(crate) fn change_to(epoch: Epoch, (part, compat): (u8, u8)) -> Vec<u8> {
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
        out.versioned(200, 200, |out| {
            out.text("for OSDs only");
        });
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
