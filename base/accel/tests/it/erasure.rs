//! Erasure coding on every tier of this processor, against field arithmetic by polynomials.

use forebay_accel::Tier;
use forebay_accel::crc32c::crc32c;
use forebay_accel::erasure::{Code, CodeError, Construction, ErasureDecoder, Placement};
use proptest::prelude::*;

/// Creates a code on every tier of this processor, with every loop shape.
fn codes(construction: Construction, k: usize, m: usize) -> Vec<(String, Code)> {
    let of_tier = |tier: Tier| {
        Code::shapes().map(move |shape| {
            let code = Code::with_shape(construction, k, m, tier, shape).expect("a shape and an available tier");
            (format!("{tier}/{shape} {code:?}"), code)
        })
    };
    Tier::available().flat_map(of_tier).collect()
}

const CONSTRUCTIONS: [Construction; 3] =
    [Construction::Vandermonde, Construction::Cauchy, Construction::JerasureVandermonde];

/// Multiplication in GF(2^8) modulo 0x11d as it is taught.
fn multiply(a: u8, b: u8) -> u8 {
    let (mut product, mut shifted) = (0, a);
    for bit in 0..8 {
        if b >> bit & 1 == 1 {
            product ^= shifted;
        }
        shifted = (shifted << 1) ^ if shifted & 0x80 != 0 { 0x1d } else { 0 };
    }
    product
}

fn table() -> &'static [[u8; 256]; 256] {
    static TABLE: std::sync::OnceLock<Box<[[u8; 256]; 256]>> = std::sync::OnceLock::new();
    TABLE.get_or_init(|| {
        let mut table = Box::new([[0; 256]; 256]);
        for a in 0..=255 {
            for b in 0..=255 {
                table[usize::from(a)][usize::from(b)] = multiply(a, b);
            }
        }
        table
    })
}

/// Parity byte by byte.
fn plain_parity(matrix: &[u8], data: &[Vec<u8>]) -> Vec<Vec<u8>> {
    let row = |row: &[u8]| {
        let mut parity = vec![0; data[0].len()];
        for (&coefficient, chunk) in row.iter().zip(data) {
            for (sum, &byte) in parity.iter_mut().zip(chunk) {
                *sum ^= table()[usize::from(coefficient)][usize::from(byte)];
            }
        }
        parity
    };
    matrix.chunks_exact(data.len()).map(row).collect()
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

/// Memory for chunks, each at its own misalignment, with guards around that must not change.
struct Shelf {
    memory: Vec<u8>,
    places: Vec<std::ops::Range<usize>>,
}

const GUARD: u8 = 0xA5;

impl Shelf {
    fn new(len: usize, offsets: &[usize]) -> Self {
        let stride = (len + 64 + 127) / 64 * 64;
        let mut memory = vec![GUARD; stride * offsets.len() + 128];
        let base = memory.as_mut_ptr().align_offset(64);
        let places = offsets.iter().enumerate().map(|(at, offset)| {
            let start = base + at * stride + offset % 64;
            start..start + len
        });
        Self { places: places.collect(), memory }
    }

    fn filled(chunks: &[Vec<u8>], offsets: &[usize]) -> Self {
        let mut shelf = Self::new(chunks[0].len(), offsets);
        for (place, chunk) in shelf.places.clone().into_iter().zip(chunks) {
            shelf.memory[place].copy_from_slice(chunk);
        }
        shelf
    }

    fn get(&self) -> Vec<&[u8]> {
        self.places.iter().map(|place| &self.memory[place.clone()]).collect()
    }

    fn get_mut(&mut self) -> Vec<&mut [u8]> {
        let (mut rest, mut passed, mut chunks) = (&mut self.memory[..], 0, Vec::new());
        for place in &self.places {
            let (chunk, behind) = rest.split_at_mut(place.end - passed);
            chunks.push(&mut chunk[place.start - passed..]);
            (rest, passed) = (behind, place.end);
        }
        chunks
    }

    fn guards_hold(&self) -> bool {
        let mut at = 0;
        self.places.iter().all(|place| {
            let whole = self.memory[at..place.start].iter().all(|&byte| byte == GUARD);
            at = place.end;
            whole
        }) && self.memory[at..].iter().all(|&byte| byte == GUARD)
    }
}

fn data(seed: u64, k: usize, len: usize) -> Vec<Vec<u8>> {
    (0..k).map(|chunk| bytes(seed + chunk as u64, len)).collect()
}

fn shapes() -> impl Strategy<Value = (Construction, usize, usize)> {
    (prop::sample::select(&CONSTRUCTIONS[..]), 2usize..=32, 1usize..=16)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(192))]

    /// Any shape, length, alignment and placement; nothing beside the parity is touched.
    #[test]
    fn encoding_agrees_with_the_table(
        (construction, k, m) in shapes(),
        len in prop_oneof![0usize..300, 300usize..9000],
        seed: u64,
        aligned: bool,
        memory: bool,
    ) {
        let data = data(seed >> 1, k, len);
        let offset = |chunk: usize| if aligned { seed as usize % 64 } else { (seed as usize >> 3) + chunk * 29 };
        let offsets: Vec<usize> = (0..k + m).map(offset).collect();
        let sources = Shelf::filled(&data, &offsets[..k]);
        let mut expected = None;
        for (name, code) in codes(construction, k, m) {
            let expected = expected.get_or_insert_with(|| plain_parity(code.parity_matrix(), &data));
            let mut parity = Shelf::new(len, &offsets[k..]);
            let placement = if memory { Placement::Memory } else { Placement::Cached };
            code.encode_to(&sources.get(), &mut parity.get_mut(), placement).unwrap();
            prop_assert_eq!(&parity.get(), expected, "{} {:?}", name, placement);
            prop_assert!(parity.guards_hold(), "{name} {placement:?}");
        }
    }

    /// Encoding and checksumming at once gives what both give apart.
    #[test]
    fn fused_checksums_agree_with_separate_ones(
        (construction, k, m) in shapes(),
        len in prop_oneof![0usize..300, 300usize..20_000],
        seed: u64,
        aligned: bool,
        memory: bool,
    ) {
        let data = data(seed >> 1, k, len);
        let offsets: Vec<usize> = (0..k + m).map(|chunk| if aligned { 0 } else { seed as usize / 8 + chunk * 29 }).collect();
        let sources = Shelf::filled(&data, &offsets[..k]);
        let placement = if memory { Placement::Memory } else { Placement::Cached };
        let mut expected: Option<(Vec<Vec<u8>>, Vec<u32>)> = None;
        for (name, code) in codes(construction, k, m) {
            let (parity, sums) = expected.get_or_insert_with(|| {
                let parity = plain_parity(code.parity_matrix(), &data);
                let sums = data.iter().chain(&parity).map(|chunk| crc32c(chunk)).collect();
                (parity, sums)
            });
            let mut shelf = Shelf::new(len, &offsets[k..]);
            let mut crcs = vec![0; k + m];
            code.encode_checksummed_to(&sources.get(), &mut shelf.get_mut(), &mut crcs, placement).unwrap();
            prop_assert_eq!(&shelf.get(), &*parity, "{} {:?}", name, placement);
            prop_assert_eq!(&crcs, &*sums, "{} {:?}", name, placement);
            prop_assert!(shelf.guards_hold(), "{name} {placement:?}");
        }
    }

    /// Any losses, any choice of what to rebuild.
    #[test]
    fn rebuilding_agrees_with_what_was_lost(
        (construction, k, m) in shapes(),
        len in 1usize..700,
        seed: u64,
        order in Just(()).prop_perturb(|(), mut random| (0..48).map(|_| random.next_u64()).collect::<Vec<_>>()),
        lost in 1usize..=16,
    ) {
        let mut data = data(seed >> 1, k, len);
        for (name, code) in codes(construction, k, m) {
            data.truncate(k);
            let parity = plain_parity(code.parity_matrix(), &data);
            data.extend(parity);
            let mut chunks: Vec<usize> = (0..k + m).collect();
            chunks.sort_by_key(|&chunk| order[chunk]);
            let (want, have) = chunks.split_at(lost.min(m));
            let have: Vec<(usize, &[u8])> = have.iter().map(|&chunk| (chunk, &data[chunk][..])).collect();
            let mut rebuilt = vec![vec![0; len]; want.len()];
            let mut outputs: Vec<(usize, &mut [u8])> =
                want.iter().copied().zip(rebuilt.iter_mut().map(|chunk| &mut chunk[..])).collect();
            let mut decoder = ErasureDecoder::new(code.clone());
            match decoder.rebuild(&have, &mut outputs) {
                Ok(()) => {
                    for (&chunk, rebuilt) in want.iter().zip(&rebuilt) {
                        prop_assert_eq!(rebuilt, &data[chunk], "{} chunk {}", name, chunk);
                    }
                }
                // Vandermonde matrices of ISA-L are not always invertible from four parity rows on; the others are.
                Err(error) => {
                    prop_assert_eq!(error, CodeError::Lost);
                    prop_assert!(construction == Construction::Vandermonde && m >= 4, "{name}");
                }
            }
        }
    }

    /// Chunks cut anywhere give what whole ones give.
    #[test]
    fn parts_agree_with_wholes(
        k in 2usize..12, m in 1usize..12, len in 1usize..5000, seed: u64,
        cuts in prop::collection::vec(prop::collection::vec(0usize..5000, 0..4), 24),
    ) {
        let data = data(seed >> 1, k, len);
        let ranges = |chunk: usize| {
            let mut ends: Vec<usize> = cuts[chunk].iter().map(|cut| cut % (len + 1)).collect();
            ends.sort_unstable();
            ends.push(len);
            let mut start = 0;
            ends.into_iter().map(move |end| start..std::mem::replace(&mut start, end).max(end)).collect::<Vec<_>>()
        };
        let cut = |chunk: usize| -> Vec<std::ops::Range<usize>> {
            let mut start = 0;
            ranges(chunk).into_iter().map(|range| { let r = start..range.end; start = range.end; r }).collect()
        };
        let parts: Vec<Vec<&[u8]>> =
            data.iter().enumerate().map(|(at, chunk)| cut(at).into_iter().map(|r| &chunk[r]).collect()).collect();
        let sources: Vec<&[&[u8]]> = parts.iter().map(|parts| &parts[..]).collect();
        for tier in Tier::available() {
            let code = Code::with_tier(Construction::Cauchy, k, m, tier).unwrap();
            let expected = plain_parity(code.parity_matrix(), &data);
            let mut parity = vec![vec![0; len]; m];
            let mut pieces: Vec<Vec<&mut [u8]>> = Vec::new();
            for (at, chunk) in parity.iter_mut().enumerate() {
                let (mut rest, mut pieces_of) = (&mut chunk[..], Vec::new());
                for range in cut(k + at) {
                    let (piece, behind) = rest.split_at_mut(range.len());
                    pieces_of.push(piece);
                    rest = behind;
                }
                pieces.push(pieces_of);
            }
            let mut outputs: Vec<&mut [&mut [u8]]> = pieces.iter_mut().map(|pieces| &mut pieces[..]).collect();
            code.encode_parts(&sources, &mut outputs).unwrap();
            prop_assert_eq!(&parity, &expected, "{:?}", code);
            let mut crcs = vec![0; k + m];
            parity.iter_mut().for_each(|chunk| chunk.fill(0));
            let mut pieces: Vec<Vec<&mut [u8]>> =
                parity.iter_mut().map(|chunk| chunk.chunks_mut(1 + len / 3).collect()).collect();
            let mut outputs: Vec<&mut [&mut [u8]]> = pieces.iter_mut().map(|pieces| &mut pieces[..]).collect();
            code.encode_parts_checksummed(&sources, &mut outputs, &mut crcs).unwrap();
            prop_assert_eq!(&parity, &expected, "{:?}", code);
            let sums: Vec<u32> = data.iter().chain(&expected).map(|chunk| crc32c(chunk)).collect();
            prop_assert_eq!(&crcs, &sums, "{:?}", code);

            // The first m chunks (or all of the data) are lost.
            let lost = m.min(k);
            let have_parity: Vec<[&[u8]; 1]> = parity.iter().map(|chunk| [&chunk[..]]).collect();
            let have: Vec<(usize, &[&[u8]])> = (lost..k)
                .map(|at| (at, sources[at]))
                .chain(have_parity.iter().enumerate().map(|(at, chunk)| (k + at, &chunk[..])))
                .collect();
            let mut rebuilt = vec![vec![0; len]; lost];
            let mut halves: Vec<[&mut [u8]; 2]> = rebuilt.iter_mut().map(|chunk| chunk.split_at_mut(len / 3).into()).collect();
            let mut want: Vec<(usize, &mut [&mut [u8]])> =
                halves.iter_mut().enumerate().map(|(at, halves)| (at, &mut halves[..])).collect();
            ErasureDecoder::new(code).rebuild_parts(&have, &mut want).unwrap();
            prop_assert_eq!(&rebuilt[..], &data[..lost]);
        }
    }

    /// Checks that updating parity after a partial change gives the same result as encoding again.
    #[test]
    fn updates_agree_with_encoding_afresh(
        (construction, k, m) in shapes(), len in 1usize..3000, seed: u64, chunk in 0usize..32, at in 0usize..3000,
    ) {
        let chunk = chunk % k;
        let range = at % len..len;
        let old = data(seed >> 1, k, len);
        let mut new = old.clone();
        new[chunk][range.clone()].copy_from_slice(&bytes(seed ^ 7, range.len()));
        let difference: Vec<u8> = old[chunk].iter().zip(&new[chunk]).map(|(old, new)| old ^ new).collect();
        for (name, code) in codes(construction, k, m) {
            let before = plain_parity(code.parity_matrix(), &old);
            let after = plain_parity(code.parity_matrix(), &new);
            let mut parity = before.clone();
            let mut ranges: Vec<&mut [u8]> = parity.iter_mut().map(|chunk| &mut chunk[range.clone()]).collect();
            code.update(chunk, &old[chunk][range.clone()], &new[chunk][range.clone()], &mut ranges).unwrap();
            prop_assert_eq!(&parity, &after, "{}", name);
            let mut ranges: Vec<&mut [u8]> = parity.iter_mut().map(|chunk| &mut chunk[range.clone()]).collect();
            code.update_by(chunk, &difference[range.clone()], &mut ranges).unwrap();
            prop_assert_eq!(&parity, &before, "{}", name);
        }
    }
}

#[test]
fn a_loop_shape_that_is_not_there_is_an_error() {
    let error = Code::with_shape(Construction::Cauchy, 4, 2, Tier::Portable, "v3").map(|_| ()).unwrap_err();
    assert_eq!(error.to_string(), "unknown loop shape `v3` for erasure coding; use one of: v4, v2, v1");
}

/// Rebuilds every pattern of up to m losses, for every shape with k + m up to 12, on every tier.
#[test]
fn every_pattern_of_losses_is_rebuilt() {
    for tier in Tier::available() {
        every_pattern_on(tier);
    }
}

fn every_pattern_on(tier: Tier) {
    const LEN: usize = 37;
    for construction in CONSTRUCTIONS {
        for (k, m) in (2..12).flat_map(|k| (1..=12 - k).map(move |m| (k, m))) {
            let code = Code::with_tier(construction, k, m, tier).unwrap();
            let mut chunks = data(k as u64 * 100, k, LEN);
            let parity = plain_parity(code.parity_matrix(), &chunks);
            chunks.extend(parity);
            let mut decoder = ErasureDecoder::new(code);
            for pattern in (1u32..1 << (k + m)).filter(|pattern| pattern.count_ones() as usize <= m) {
                let lost = |chunk: &usize| pattern >> chunk & 1 == 1;
                let have: Vec<(usize, &[u8])> =
                    (0..k + m).filter(|chunk| !lost(chunk)).map(|chunk| (chunk, &chunks[chunk][..])).collect();
                let mut rebuilt = vec![[0; LEN]; m];
                let mut want: Vec<(usize, &mut [u8])> =
                    (0..k + m).filter(lost).zip(rebuilt.iter_mut().map(|chunk| &mut chunk[..])).collect();
                match decoder.rebuild(&have, &mut want) {
                    Ok(()) => want.iter().for_each(|(chunk, rebuilt)| {
                        assert_eq!(rebuilt, &chunks[*chunk], "{construction:?} {k}/{m} {pattern:b}");
                    }),
                    Err(error) => {
                        assert_eq!(error, CodeError::Lost);
                        assert!(construction == Construction::Vandermonde && m >= 5, "{k}/{m} {pattern:b}");
                    }
                }
            }
        }
    }
}

#[test]
fn patterns_are_remembered_up_to_a_bound() {
    let code = Code::new(Construction::Cauchy, 8, 4).unwrap();
    let chunk = [0u8; 16];
    let mut decoder = ErasureDecoder::new(code);
    for pattern in (1u32..1 << 12).filter(|pattern| pattern.count_ones() == 4) {
        let have: Vec<(usize, &[u8])> =
            (0..12).filter(|at| pattern >> at & 1 == 0).map(|at| (at, &chunk[..])).collect();
        let mut rebuilt = [1u8; 16];
        decoder.rebuild(&have, &mut [(pattern.trailing_zeros() as usize, &mut rebuilt)]).unwrap();
        assert_eq!(rebuilt, chunk);
    }
    assert_eq!(decoder.remembered(), 256);
}

#[test]
fn nonsense_is_refused() {
    for (k, m) in [(1, 1), (33, 1), (4, 0), (4, 17)] {
        assert_eq!(Code::new(Construction::Cauchy, k, m).err(), Some(CodeError::Shape { k, m }));
    }
    let code = Code::new(Construction::Vandermonde, 2, 1).unwrap();
    let (a, b, mut p, mut short) = ([1u8; 8], [2u8; 8], [0u8; 8], [0u8; 7]);
    let count = |what, expected, found| Err(CodeError::Count { what, expected, found });
    assert_eq!(code.encode(&[&a], &mut [&mut p]), count("data", 2, 1));
    assert_eq!(code.encode(&[&a, &b], &mut []), count("parity", 1, 0));
    assert_eq!(code.encode_checksummed(&[&a, &b], &mut [&mut p], &mut [0; 2]), count("checksum", 3, 2));
    assert_eq!(code.encode(&[&a, &b], &mut [&mut short]), Err(CodeError::Length { expected: 8, found: 7 }));
    assert_eq!(code.update(2, &a, &b, &mut [&mut p]), Err(CodeError::Chunk(2)));
    let mut decoder = ErasureDecoder::new(code);
    assert_eq!(decoder.rebuild(&[(0, &a)], &mut [(1, &mut p)]), Err(CodeError::Lost));
    assert_eq!(decoder.rebuild(&[(0, &a), (0, &b)], &mut [(1, &mut p)]), Err(CodeError::Chunk(0)));
    assert_eq!(decoder.rebuild(&[(0, &a), (2, &b)], &mut [(2, &mut p)]), Err(CodeError::Chunk(2)));
    assert_eq!(decoder.rebuild(&[(0, &a), (3, &b)], &mut [(1, &mut p)]), Err(CodeError::Chunk(3)));
    assert_eq!(p, [0; 8]);
}
