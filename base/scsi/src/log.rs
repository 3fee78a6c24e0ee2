//! Log pages: pool space usage (SBC-3 section 6.4, SPC-4 section 7.3).

use super::sense::Sense;

/// Threshold set size exponent: space is counted in units of 2^n blocks, 1 MiB.
pub const THRESHOLD_EXPONENT: u8 = 11;

/// Space of the pool that backs a unit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Provisioning {
    /// Available bytes.
    pub available: u64,
    /// Used bytes.
    pub used: u64,
}

/// Converts bytes to units of the threshold exponent.
pub fn in_units(bytes: u64) -> u32 {
    u32::try_from((bytes / u64::from(super::BLOCK)) >> THRESHOLD_EXPONENT).unwrap_or(u32::MAX)
}

const PAGES: [(u8, u8); 3] = [(0x00, 0), (0x0c, 0), (0x2f, 0)];

/// Builds the LOG SENSE data.
///
/// # Errors
/// When there is no such page, or no such parameter.
pub fn sense(page: u8, subpage: u8, from: u16, space: Provisioning) -> Result<Vec<u8>, Sense> {
    let mut out = vec![page, 0, 0, 0];
    match (page, subpage) {
        (0x00, 0) => out.extend(PAGES.iter().map(|&(page, _)| page)),
        (0x00, 0xff) => {
            out[0] |= 0x40;
            out[1] = subpage;
            out.extend([0x00, 0x00, 0x00, 0xff]);
            out.extend(PAGES[1..].iter().flat_map(|&(page, subpage)| [page, subpage]));
        }
        (0x0c, 0) => {
            for (parameter, bytes) in [(1u16, space.available), (2, space.used)] {
                if parameter < from {
                    continue;
                }
                out.extend(parameter.to_be_bytes());
                out.extend([0x03, 8]);
                out.extend(in_units(bytes).to_be_bytes());
                // Scope is the pool, not this unit alone.
                out.extend([0x02, 0, 0, 0]);
            }
            if from > 2 {
                return Err(Sense::cdb(5));
            }
        }
        // Informational exceptions: none.
        (0x2f, 0) => {
            if from > 0 {
                return Err(Sense::cdb(5));
            }
            out.extend([0, 0, 0x03, 4, 0, 0, 0xff, 0xff]);
        }
        _ => return Err(Sense::cdb_bit(2, 5)),
    }
    let len = (out.len() - 4) as u16;
    out[2..4].copy_from_slice(&len.to_be_bytes());
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::super::{be16, be32};
    use super::*;

    #[test]
    fn pages_have_the_length_that_they_say() {
        let space = Provisioning { available: 10 << 20, used: 3 << 20 };
        for (page, subpage) in PAGES.into_iter().chain([(0x00, 0xff)]) {
            let bytes = sense(page, subpage, 0, space).expect("a page");
            assert_eq!(usize::from(be16(&bytes, 2)) + 4, bytes.len());
        }
        let bytes = sense(0x0c, 0, 0, space).expect("a page");
        assert_eq!((be32(&bytes, 8), be32(&bytes, 20)), (10, 3));
        assert_eq!(sense(0x0c, 0, 2, space).expect("a page").len(), 16);
        assert!(sense(0x0c, 0, 3, space).is_err() && sense(0x0d, 0, 0, space).is_err());
    }
}
