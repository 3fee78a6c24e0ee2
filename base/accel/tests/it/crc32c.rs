//! CRC32C on every tier of this processor, against the definition bit by bit.

use forebay_accel::Tier;
use forebay_accel::crc32c::{self, OnTier};
use proptest::prelude::*;

/// Computes the CRC32C by its definition.
fn plain(data: &[u8]) -> u32 {
    let mut crc = !0u32;
    for &byte in data {
        crc ^= u32::from(byte);
        for _ in 0..8 {
            crc = (crc >> 1) ^ (0x82F6_3B78 & (0u32.wrapping_sub(crc & 1)));
        }
    }
    !crc
}

fn tiers() -> impl Iterator<Item = (Tier, OnTier)> {
    Tier::available().map(|tier| (tier, OnTier::new(tier).expect("an available tier")))
}

/// Every loop of every tier, by its name.
fn loops() -> Vec<(String, OnTier)> {
    let of_tier = |tier: Tier| {
        OnTier::shapes(tier)
            .map(move |shape| (format!("{tier}/{shape}"), OnTier::with_shape(tier, shape).expect("a loop of the tier")))
    };
    Tier::available().flat_map(of_tier).collect()
}

/// Generates pseudorandom bytes, reproducible by seed.
fn bytes(seed: u64, len: usize) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 24) as u8
    };
    std::iter::repeat_with(next).take(len).collect()
}

#[test]
fn rfc3720_vectors() {
    let ascending: Vec<u8> = (0..32).collect();
    let descending: Vec<u8> = (0..32).rev().collect();
    // Last example of RFC 3720, B.4: a SCSI READ (10) command.
    let mut command = [0u8; 48];
    command[0] = 0x01;
    command[1] = 0xC0;
    command[16] = 0x14;
    command[22] = 0x04;
    command[27] = 0x14;
    command[31] = 0x18;
    command[32] = 0x28;
    command[40] = 0x02;
    for (tier, on) in tiers() {
        assert_eq!(on.extend(0, &[0; 32]), 0x8A91_36AA, "{tier}");
        assert_eq!(on.extend(0, &[0xFF; 32]), 0x62A8_AB43, "{tier}");
        assert_eq!(on.extend(0, &ascending), 0x46DD_794E, "{tier}");
        assert_eq!(on.extend(0, &descending), 0x113F_DB5C, "{tier}");
        assert_eq!(on.extend(0, &command), 0xD996_3A56, "{tier}");
        assert_eq!(on.extend(0, b"123456789"), 0xE306_9283, "{tier}");
        assert_eq!(on.extend(0, b""), 0, "{tier}");
    }
}

/// Every length in which the kernels change their course, at every alignment of a line.
#[test]
fn all_small_lengths_and_alignments() {
    let data = bytes(1, 2048 + 64);
    let mut expected = vec![[0u32; 64]; 2049];
    for offset in 0..64 {
        let mut crc = !0u32;
        for len in 0..=2048 {
            expected[len][offset] = !crc;
            crc ^= u32::from(data[offset + len]);
            (0..8).for_each(|_| crc = (crc >> 1) ^ (0x82F6_3B78 & (0u32.wrapping_sub(crc & 1))));
        }
    }
    let mut room = vec![0u8; 2048 + 64];
    for (tier, on) in tiers() {
        for len in 0..=2048 {
            for offset in [0, 1, 3, 7, 8, 31, 63, len % 64] {
                let from = &data[offset..offset + len];
                assert_eq!(on.extend(0, from), expected[len][offset], "{tier} {len} at {offset}");
                room.fill(0xA5);
                let to = (offset * 7) % 64;
                assert_eq!(on.copy_extend(0, from, &mut room[to..to + len]), expected[len][offset], "{tier} {len}");
                assert_eq!(&room[to..to + len], from, "{tier} {len}");
                assert!(room[..to].iter().chain(&room[to + len..]).all(|&byte| byte == 0xA5), "{tier} {len}");
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(128))]

    #[test]
    fn tiers_agree_with_the_definition(
        seed: u64, len in prop_oneof![0usize..3000, 0usize..120_000], start in 0usize..64, cut: prop::sample::Index,
    ) {
        let memory = bytes(seed, len + start);
        let data = &memory[start..];
        let expected = plain(data);
        let (a, b) = data.split_at(cut.index(len + 1));
        for (tier, on) in tiers() {
            prop_assert_eq!(on.extend(0, data), expected, "{}", tier);
            prop_assert_eq!(on.extend(on.extend(0, a), b), expected, "{}", tier);
            prop_assert_eq!(on.combine(on.extend(0, a), on.extend(0, b), b.len() as u64), expected, "{}", tier);
            let mut copy = vec![0; len];
            let (to_a, to_b) = copy.split_at_mut(a.len());
            prop_assert_eq!(on.copy_extend(on.copy_extend(0, a, to_a), b, to_b), expected, "{}", tier);
            prop_assert_eq!(&copy, data);
        }
        prop_assert_eq!(crc32c::crc32c_parts([a, b]), expected);
    }

    #[test]
    fn loops_agree_with_the_definition(
        seed: u64, crc: u32, start in 0usize..64,
        len in prop_oneof![0usize..3000, 3000usize..20_000, 20_000usize..300_000], cut: prop::sample::Index,
    ) {
        let memory = bytes(seed, len + start);
        let data = &memory[start..];
        // The tables are compared with the definition above, and are fast enough for many cases.
        let tables = OnTier::with_shape(Tier::Portable, "tables").unwrap();
        let expected = tables.extend(crc, data);
        let (a, b) = data.split_at(cut.index(len + 1));
        for (name, on) in loops() {
            prop_assert_eq!(on.extend(crc, data), expected, "{}", &name);
            prop_assert_eq!(on.extend(on.extend(crc, a), b), expected, "{}", &name);
        }
    }

    #[test]
    fn zeroes_need_not_be_there(seed: u64, len in 0usize..100, count in 0usize..70_000) {
        let mut data = bytes(seed, len);
        let crc = plain(&data);
        data.resize(len + count, 0);
        for (tier, on) in tiers() {
            prop_assert_eq!(on.extend_zeroes(crc, count as u64), plain(&data), "{}", tier);
        }
        prop_assert_eq!(crc32c::zeroes(count as u64), plain(&data[len..]));
    }

    #[test]
    fn blocks_are_those_of_slices(seed: u64, len in 0usize..40_000, block in 1usize..5000) {
        let data = bytes(seed, len);
        let expected: Vec<u32> = data.chunks(block).map(plain).collect();
        let mut crcs = vec![0; expected.len()];
        crc32c::crc32c_blocks(&data, block, &mut crcs);
        prop_assert_eq!(crcs, expected);
    }
}

/// Every length around a loop's rounds and blocks, and the end of memory that may be read.
#[test]
fn loops_at_all_lengths_to_5_kib() {
    let data = bytes(3, 5 << 10);
    let mut expected = vec![0u32];
    let mut crc = !0u32;
    for &byte in &data {
        crc ^= u32::from(byte);
        (0..8).for_each(|_| crc = (crc >> 1) ^ (0x82F6_3B78 & (0u32.wrapping_sub(crc & 1))));
        expected.push(!crc);
    }
    for (name, on) in loops() {
        for (len, &expected) in expected.iter().enumerate() {
            // A copy of its own ends where an address sanitizer or valgrind would notice.
            let message = data[..len].to_vec().into_boxed_slice();
            assert_eq!(on.extend(0, &message), expected, "{name} {len}");
        }
    }
}

#[test]
fn loops_agree_in_the_self_test() {
    assert_eq!(crc32c::verify(), Ok(loops().len()));
}

#[test]
fn every_tier_with_vectors_has_several_loops() {
    for tier in Tier::available() {
        let names: Vec<&str> = OnTier::shapes(tier).collect();
        assert!(names.len() >= if tier == Tier::Portable { 1 } else { 4 }, "{tier}: {names:?}");
        assert!(OnTier::with_shape(tier, "no such loop").is_none());
    }
    let absent = Tier::ALL.into_iter().find(|tier| !tier.is_available()).expect("no processor has all tiers");
    assert_eq!(OnTier::shapes(absent).count(), 0);
    assert!(OnTier::with_shape(absent, "v4").is_none());
}

/// Checks distances past 2^32 bytes by arithmetic: doubling a message of zeroes doubles the distance.
#[test]
fn long_runs_of_zeroes_follow_the_laws() {
    for (tier, on) in tiers() {
        let mut crc = on.extend(0, &[0]);
        for doubled in 1..60 {
            crc = on.combine(crc, crc, 1 << (doubled - 1));
            assert_eq!(on.extend_zeroes(0, 1 << doubled), crc, "{tier} {doubled}");
        }
    }
}

/// Copies that are large enough to go past the caches, between any two alignments.
#[test]
fn large_copies() {
    let data = bytes(9, (3 << 20) + 100);
    let mut room = vec![0u8; data.len() + 64];
    for (tier, on) in tiers() {
        for (from, to, cut) in [(0, 0, 0), (1, 17, 0), (13, 64, 1), (0, 5, 63)] {
            let from = &data[from..data.len() - cut];
            let to = &mut room[to..to + from.len()];
            to.fill(0);
            assert_eq!(on.copy_extend(7, from, to), OnTier::new(Tier::Portable).unwrap().extend(7, from), "{tier}");
            assert!(to == from, "{tier}");
        }
    }
}

#[test]
#[should_panic(expected = "as much room")]
fn copies_need_room() {
    crc32c::copy(&[1, 2], &mut [0]);
}
