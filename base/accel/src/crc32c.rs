//! CRC32C (Castagnoli polynomial 0x1EDC6F41, reflected, initial value and final xor all ones).
//!
//! The values are those of RFC 3720, `crc32c(b"123456789") == 0xE3069283`.

use crc_fast::CrcAlgorithm::Crc32Iscsi;

use crate::perf::{Kernel, Variant};

/// The CRC32C of `data`.
#[inline]
pub fn crc32c(data: &[u8]) -> u32 {
    crc_fast::checksum(Crc32Iscsi, data) as u32
}

/// Continues a CRC32C: `extend(crc32c(a), b) == crc32c(a ++ b)`.
#[inline]
pub fn extend(crc: u32, data: &[u8]) -> u32 {
    // The library keeps its running state without the final inversion, as the reflected register holds it.
    let mut digest = crc_fast::Digest::new_with_init_state(Crc32Iscsi, u64::from(!crc));
    digest.update(data);
    digest.finalize() as u32
}

/// The CRC32C of `a ++ b` from the parts' own CRCs and the length of `b` in bytes.
#[inline]
pub fn combine(crc_a: u32, crc_b: u32, len_b: u64) -> u32 {
    crc_fast::checksum_combine(Crc32Iscsi, u64::from(crc_a), u64::from(crc_b), len_b) as u32
}

/// The CRC32C of many parts read as one.
pub fn crc32c_parts<'a>(parts: impl IntoIterator<Item = &'a [u8]>) -> u32 {
    let mut digest = crc_fast::Digest::new(Crc32Iscsi);
    for part in parts {
        digest.update(part);
    }
    digest.finalize() as u32
}

/// For `forebay perf accel`.
pub(crate) fn perf() -> Vec<Kernel> {
    let data = vec![0x5Au8; 4096];
    let work = move || {
        std::hint::black_box(crc32c(std::hint::black_box(&data)));
        data.len()
    };
    vec![Kernel {
        name: "crc32c 4 KiB".into(),
        chosen: "crc-fast".into(),
        variants: vec![Variant::new("crc-fast", work)],
    }]
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

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

    #[test]
    fn rfc3720_vectors() {
        let ascending: Vec<u8> = (0..32).collect();
        let descending: Vec<u8> = (0..32).rev().collect();
        assert_eq!(crc32c(&[0; 32]), 0x8A91_36AA);
        assert_eq!(crc32c(&[0xFF; 32]), 0x62A8_AB43);
        assert_eq!(crc32c(&ascending), 0x46DD_794E);
        assert_eq!(crc32c(&descending), 0x113F_DB5C);
        assert_eq!(crc32c(b"123456789"), 0xE306_9283);
        assert_eq!(crc32c(b""), 0);
    }

    proptest! {
        #[test]
        fn agrees_with_the_bitwise_version(data in proptest::collection::vec(any::<u8>(), 0..3000), cut in 0usize..3000) {
            let cut = cut.min(data.len());
            let (a, b) = data.split_at(cut);
            prop_assert_eq!(crc32c(&data), plain(&data));
            prop_assert_eq!(extend(crc32c(a), b), plain(&data));
            prop_assert_eq!(combine(crc32c(a), crc32c(b), b.len() as u64), plain(&data));
            prop_assert_eq!(crc32c_parts([a, b]), plain(&data));
        }
    }
}
