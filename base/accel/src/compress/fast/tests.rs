//! Tests of the encoder against an inflater, on every tier, and of its codes against Kraft's inequality.

use proptest::prelude::*;

use super::huffman::{code_lengths, distance_extra_bits, length_extra_bits};
use super::matches::LENGTHS;
use super::{CompressError, FastEncoder};
use crate::compress::{Codec, Decompressor, Framing, Level};
use crate::tier::Tier;

fn inflated(stream: &[u8], length: usize) -> Vec<u8> {
    let mut out = vec![0xA5; length + 1];
    let codec = Codec::Deflate { framing: Framing::Raw, level: Level::FASTEST };
    let found = Decompressor::new().decompress(codec, stream, &mut out).unwrap();
    assert_eq!(found.consumed, stream.len());
    out.truncate(found.produced);
    out
}

fn check(data: &[u8]) {
    let mut streams = Vec::new();
    for tier in Tier::available() {
        let mut encoder = FastEncoder::new(tier);
        let mut out = vec![0; data.len() + data.len() / 1000 + 64];
        let length = encoder.compress(data, &mut out).unwrap();
        assert_eq!(inflated(&out[..length], data.len()), data, "{tier}");
        // The exact length is enough, one byte less is not, and nothing is written past the end.
        let mut tight = vec![0x5A; length + 32];
        assert_eq!(encoder.compress(data, &mut tight[..length]), Ok(length));
        assert_eq!(tight[..length], out[..length]);
        assert!(tight[length..].iter().all(|&byte| byte == 0x5A));
        assert_eq!(encoder.compress(data, &mut tight[..length - 1]), Err(CompressError::NoRoom));
        streams.push(out[..length].to_vec());
    }
    assert!(streams.iter().all(|stream| *stream == streams[0]), "the tiers differ");
}

/// Generates bytes with near and far repetitions.
fn mixed(seed: u64, length: usize) -> Vec<u8> {
    let mut state = seed | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    let mut data: Vec<u8> = Vec::with_capacity(length + 300);
    while data.len() < length {
        let roll = next();
        if roll & 3 != 0 && data.len() > 8 {
            let distance = 1 + (next() as usize >> 8) % data.len().min(40_000);
            let from = data.len() - distance;
            for at in 0..3 + (roll >> 8) as usize % (if roll & 0x70 == 0 { 400 } else { 12 }) {
                data.push(data[from + at]);
            }
        } else {
            (0..roll >> 8 & 15).for_each(|_| data.push((next() >> 20) as u8 & 0x3F));
        }
    }
    data.truncate(length);
    data
}

#[test]
fn lengths_and_distances_are_those_of_the_standard() {
    let bases = [
        3, 4, 5, 6, 7, 8, 9, 10, 11, 13, 15, 17, 19, 23, 27, 31, 35, 43, 51, 59, 67, 83, 99, 115, 131, 163, 195, 227,
        258,
    ];
    for length in 3..=258usize {
        let (symbol, extra) = LENGTHS[length - 3];
        assert_eq!(bases[usize::from(symbol)] + usize::from(extra), length);
        assert!(u32::from(extra) < 1 << length_extra_bits(usize::from(symbol)));
    }
    assert_eq!((0..30).map(distance_extra_bits).sum::<u32>(), 2 * (0..14).sum::<u32>());
}

#[test]
fn every_length_around_the_edges_of_blocks() {
    for length in [0, 1, 2, 3, 4, 7, 47, 48, 49, 52, 63, 257, 258, 259, 4096, 65_535, 65_536, 65_537] {
        check(&vec![0; length]);
        check(&mixed(7, length));
    }
    for length in [(128 << 10) - 1, 128 << 10, (128 << 10) + 1, 300_000] {
        check(&mixed(length as u64, length));
        check(&vec![b'x'; length]);
    }
}

#[test]
fn what_does_not_shrink_is_stored() {
    let mut state = 1u64;
    let data: Vec<u8> = (0..200_000)
        .map(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 40) as u8
        })
        .collect();
    check(&data);
    let mut out = vec![0; data.len() + 100];
    let length = FastEncoder::new(Tier::current()).compress(&data, &mut out).unwrap();
    // Two blocks, of which the first is stored in three pieces and the second in two.
    assert_eq!(length, data.len() + 5 * 5);
}

#[test]
fn two_blocks_of_one_byte_each_find_what_was_before() {
    // Data exactly 65536 bytes back has the same low position bits, and is too far.
    let mut data = mixed(3, 65_536);
    data.extend_from_within(..);
    data.extend_from_within(..70_000);
    check(&data);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn what_is_compressed_is_inflated_again(seed: u64, length in 0usize..20_000) {
        check(&mixed(seed, length));
    }

    #[test]
    fn any_bytes(data in proptest::collection::vec(any::<u8>(), 0..600), repeat in 1usize..6) {
        check(&data.repeat(repeat));
    }

    #[test]
    fn codes_are_complete_and_short_enough(
        counts in proptest::collection::vec(prop_oneof![Just(0u32), 1u32..4, 1u32..100_000], 2..286),
        fibonacci: bool,
    ) {
        let mut counts = counts;
        if fibonacci {
            // The worst case for the depth of a tree.
            let (mut a, mut b) = (1u32, 1u32);
            for count in counts.iter_mut().take(24) {
                *count = a;
                (a, b) = (b, a + b);
            }
        }
        for max in [15usize, 9] {
            let mut lengths = vec![0u8; counts.len()];
            code_lengths(&counts, max, &mut lengths);
            let used = counts.iter().filter(|&&count| count > 0).count();
            let sum: u32 = lengths.iter().filter(|&&length| length > 0).map(|&length| 1 << (max as u8 - length)).sum();
            prop_assert!(counts.iter().zip(&lengths).all(|(&count, &length)| (count > 0) == (length > 0)));
            if used > 1 {
                prop_assert_eq!(sum, 1 << max);
                for (left, right) in counts.iter().zip(&lengths).flat_map(|l| counts.iter().zip(&lengths).map(move |r| (l, r))) {
                    prop_assert!(left.0 <= right.0 || left.1 <= right.1 || *right.0 == 0);
                }
            }
        }
    }
}
