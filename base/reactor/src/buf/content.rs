//! Content of buffers: tests for zeroes, comparison, repetition.

use super::{Buf, BufList, BufMut};

/// Maximum length in bytes of the buffer that a list of repeated bytes refers to, but for one pattern.
const REPEAT_UNIT: usize = 128 << 10;

/// Returns whether all bytes are zero; true if there are none.
pub fn is_zero(bytes: &[u8]) -> bool {
    // Most data is recognized by its first bytes.  Only what begins with zeroes is scanned, in steps that the compiler
    // turns into vector instructions.
    if bytes.first_chunk::<16>().is_some_and(|head| u128::from_ne_bytes(*head) != 0) {
        return false;
    }
    let (chunks, rest) = bytes.as_chunks::<128>();
    let zero = |chunk: &[u8]| chunk.iter().fold(0, |any, byte| any | byte) == 0;
    chunks.iter().all(|chunk| zero(chunk)) && zero(rest)
}

impl BufList {
    /// Returns whether all bytes are zero; true if there are none.
    pub fn is_zero(&self) -> bool {
        self.parts().iter().all(|part| is_zero(part))
    }

    /// Returns the offset of the first byte that differs from `other`, or is in one of the lists only; `None` if both
    /// have the same content.
    pub fn first_difference(&self, other: &BufList) -> Option<u64> {
        let (mut parts, mut other_parts) = (self.parts().iter(), other.parts().iter());
        let (mut rest, mut other_rest): (&[u8], &[u8]) = (&[], &[]);
        let mut at = 0;
        loop {
            if rest.is_empty() {
                rest = parts.next().map_or(&[], |part| &part[..]);
            }
            if other_rest.is_empty() {
                other_rest = other_parts.next().map_or(&[], |part| &part[..]);
            }
            let len = rest.len().min(other_rest.len());
            if len == 0 {
                return (rest.len() != other_rest.len()).then_some(at);
            }
            if rest[..len] != other_rest[..len] {
                let same = rest.iter().zip(other_rest).take_while(|(one, other)| one == other).count();
                return Some(at + same as u64);
            }
            (rest, other_rest) = (&rest[len..], &other_rest[len..]);
            at += len as u64;
        }
    }

    /// Returns `len` bytes of an endless repetition of `pattern`, from its byte `skip` on.  Long lists share one
    /// buffer of repetitions.
    ///
    /// # Panics
    /// When `pattern` is empty.
    pub fn repeated(pattern: &[u8], skip: u64, len: usize) -> Self {
        assert!(!pattern.is_empty(), "a repetition of nothing");
        let mut from = (skip % pattern.len() as u64) as usize;
        // Each part begins within the first repetition.
        let unit = (len.min(REPEAT_UNIT) + pattern.len()).next_multiple_of(pattern.len());
        let mut buf = BufMut::with_capacity(unit);
        while buf.len() < unit {
            buf.extend_from_slice(pattern);
        }
        let (buf, mut list): (Buf, Self) = (buf.freeze(), Self::new());
        while list.len() < len {
            let part = (len - list.len()).min(REPEAT_UNIT);
            list.push(buf.slice(from..from + part));
            from = (from + part) % pattern.len();
        }
        list
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn list(bytes: &[u8], cuts: &[usize]) -> BufList {
        let mut cuts: Vec<usize> = cuts.iter().map(|cut| cut % (bytes.len() + 1)).collect();
        cuts.sort_unstable();
        let ends = cuts.iter().copied().chain([bytes.len()]);
        let starts = [0].into_iter().chain(cuts.iter().copied());
        starts.zip(ends).map(|(start, end)| Buf::copy_of(&bytes[start..end])).collect()
    }

    #[test]
    fn one_byte_among_zeroes_is_found_wherever_it_is() {
        for len in [0, 1, 15, 16, 17, 127, 128, 129, 300] {
            let mut bytes = vec![0; len];
            assert!(is_zero(&bytes), "{len}");
            for at in 0..len {
                bytes[at] = 1;
                assert!(!is_zero(&bytes) && !list(&bytes, &[7, 130]).is_zero(), "{at} of {len}");
                bytes[at] = 0;
            }
        }
        assert!(BufList::zeroes(300_001).is_zero());
    }

    #[test]
    fn long_repetitions_share_one_buffer() {
        let pattern: Vec<u8> = (0..12).collect();
        let made = BufList::repeated(&pattern, 5, 1 << 20);
        let plain: Vec<u8> = pattern.iter().copied().cycle().skip(5).take(1 << 20).collect();
        assert!(made == plain[..]);
        assert_eq!(made.parts().len(), 8);
        assert!(made.parts().iter().all(|part| part.retained() < REPEAT_UNIT + 4096 + 24));
    }

    proptest! {
        #[test]
        fn the_first_difference_is_that_of_plain_bytes(
            bytes in prop::collection::vec(0_u8..2, 0..40),
            (keep, changed) in (any::<prop::sample::Index>(), prop::collection::vec(0_u8..2, 0..4)),
            cuts in prop::array::uniform2(prop::collection::vec(0..40_usize, 0..6)),
        ) {
            let mut other = bytes[..keep.index(bytes.len() + 1)].to_vec();
            other.extend(changed);
            other.extend_from_slice(bytes.get(other.len()..).unwrap_or_default());
            let (one, two) = (list(&bytes, &cuts[0]), list(&other, &cuts[1]));
            let plain = (0..bytes.len().max(other.len())).find(|&at| bytes.get(at) != other.get(at));
            prop_assert_eq!(one.first_difference(&two), plain.map(|at| at as u64));
            prop_assert_eq!(two.first_difference(&one), plain.map(|at| at as u64));
            prop_assert_eq!(one.is_zero(), bytes.iter().all(|&byte| byte == 0));
        }

        #[test]
        fn a_repetition_is_that_of_plain_bytes(
            pattern in prop::collection::vec(any::<u8>(), 1..600), skip in any::<u64>(), len in 0..300_000_usize,
        ) {
            let phase = (skip % pattern.len() as u64) as usize;
            let plain: Vec<u8> = pattern.iter().copied().cycle().skip(phase).take(len).collect();
            prop_assert!(BufList::repeated(&pattern, skip, len) == plain[..]);
        }
    }
}
