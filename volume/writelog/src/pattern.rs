//! Pattern fill: detection of a repeated short pattern.

use forebay_block::{BufList, is_zero};

use crate::entries::SAME_LEN;

/// Minimum length of a write that is examined, in bytes.
const LOOK_MIN: usize = 4096;

/// Content classification of a write.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Pattern {
    /// Zeroes only.
    Zeroes,
    /// Repetition of the same [`SAME_LEN`] bytes.
    Same(Vec<u8>),
    /// Any other content.
    Mixed,
}

/// Classifies a write; nearly always the second sector rules out a pattern.
pub(crate) fn pattern_of(data: &BufList) -> Pattern {
    let same = SAME_LEN as usize;
    if data.len() < LOOK_MIN || !data.len().is_multiple_of(same) {
        return Pattern::Mixed;
    }
    // Parts that are not multiples of the pattern length are rare, and count as mixed.
    let Some(first) = data.parts().first().filter(|first| first.len() >= same) else { return Pattern::Mixed };
    let pattern = &first[..same];
    for part in data.parts() {
        if !part.len().is_multiple_of(same) || part.chunks_exact(same).any(|chunk| chunk != pattern) {
            return Pattern::Mixed;
        }
    }
    if is_zero(pattern) {
        return Pattern::Zeroes;
    }
    Pattern::Same(pattern.to_vec())
}

#[cfg(test)]
mod tests {
    use forebay_block::Buf;

    use super::*;

    #[test]
    fn patterns_are_found_and_made_again() {
        let pattern: Vec<u8> = (0..512_u32).map(|at| (at * 7) as u8).collect();
        let long: Vec<u8> = pattern.iter().copied().cycle().take(200_192).collect();
        let list = BufList::from(Buf::copy_of(&long));
        assert_eq!(pattern_of(&list), Pattern::Same(pattern.clone()));
        for (skip, len) in [(0, 4096), (100, 4096), (511, 1), (512 * 9 + 3, 150_000), (0, 199_000)] {
            let made = BufList::repeated(&pattern, skip, len).to_vec();
            let phase = (skip % 512) as usize;
            assert!(made == long[phase..phase + len], "{skip} {len}");
        }
        let mut other = long.clone();
        other[100_000] ^= 1;
        assert_eq!(pattern_of(&Buf::copy_of(&other).into()), Pattern::Mixed);
        assert_eq!(pattern_of(&Buf::copy_of(&long[..2048]).into()), Pattern::Mixed);
        assert_eq!(pattern_of(&BufList::zeroes(300 << 10)), Pattern::Zeroes);
    }
}
