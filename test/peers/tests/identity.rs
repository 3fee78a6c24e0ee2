//! Our chunks and checksums are byte for byte those of Debian's ISA-L and jerasure.

use forebay_accel::Tier;
use forebay_accel::crc32c::OnTier;
use forebay_accel::erasure::{Code, Construction, K_MAX, K_MIN, M_MAX};
use forebay_peers::debian::{Isal, Jerasure};

/// Bytes that are the same for the same seed.
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

fn shapes() -> impl Iterator<Item = (usize, usize)> {
    (K_MIN..=K_MAX).flat_map(|k| (1..=M_MAX).map(move |m| (k, m)))
}

#[test]
fn matrices_of_isal() {
    let isal = Isal::open().unwrap();
    for (k, m) in shapes() {
        for (construction, cauchy) in [(Construction::Vandermonde, false), (Construction::Cauchy, true)] {
            let code = Code::new(construction, k, m).unwrap();
            assert_eq!(code.parity_matrix(), isal.parity_matrix(cauchy, k, m), "{construction:?} {k}/{m}");
        }
    }
}

#[test]
fn matrices_of_jerasure() {
    let jerasure = Jerasure::open().unwrap();
    for (k, m) in shapes() {
        let code = Code::new(Construction::JerasureVandermonde, k, m).unwrap();
        let ours: Vec<i32> = code.parity_matrix().iter().map(|&entry| entry.into()).collect();
        assert_eq!(ours, jerasure.parity_matrix(k, m), "{k}/{m}");
    }
}

/// Parity of every shape on every tier, made by us and by the libraries.
#[test]
fn parity_of_both() {
    let (isal, jerasure) = (Isal::open().unwrap(), Jerasure::open().unwrap());
    for (k, m) in shapes() {
        // jerasure wants whole words.
        let len = (64 + 8 * (k * 16 + m)) & !7;
        let data: Vec<Vec<u8>> = (0..k).map(|chunk| bytes((k * m + chunk) as u64, len)).collect();
        let sources: Vec<&[u8]> = data.iter().map(|chunk| &chunk[..]).collect();
        let inputs: Vec<*const u8> = data.iter().map(|chunk| chunk.as_ptr()).collect();
        for construction in [Construction::Vandermonde, Construction::Cauchy, Construction::JerasureVandermonde] {
            let mut theirs = vec![vec![0u8; len]; m];
            let outputs: Vec<*mut u8> = theirs.iter_mut().map(|chunk| chunk.as_mut_ptr()).collect();
            match construction {
                Construction::JerasureVandermonde => {
                    let mut matrix = jerasure.parity_matrix(k, m);
                    // SAFETY: all chunks have `len` bytes, and the matrix is of this shape.
                    unsafe { jerasure.encode(len, &mut matrix, &inputs, &outputs) };
                }
                _ => {
                    let matrix = isal.parity_matrix(construction == Construction::Cauchy, k, m);
                    let tables = isal.tables(k, &matrix);
                    // SAFETY: as above.
                    unsafe { isal.encode(len, &tables, &inputs, &outputs) };
                }
            }
            for tier in Tier::available() {
                let code = Code::with_tier(construction, k, m, tier).unwrap();
                let mut ours = vec![vec![0u8; len]; m];
                let mut outputs: Vec<&mut [u8]> = ours.iter_mut().map(|chunk| &mut chunk[..]).collect();
                code.encode(&sources, &mut outputs).unwrap();
                assert!(ours == theirs, "{code:?}");
            }
        }
    }
}

#[test]
fn checksums_of_isal() {
    let isal = Isal::open().unwrap();
    let data = bytes(3, 70_000);
    for tier in Tier::available() {
        let on = OnTier::new(tier).unwrap();
        for len in (0..3000).chain([4096, 8192, 65_536, 70_000]) {
            let data = &data[data.len() - len..];
            assert_eq!(on.extend(0, data), isal.crc32c(data), "{tier} {len}");
        }
    }
}
