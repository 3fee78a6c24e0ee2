//! EXTENDED COPY (LID1): copies blocks from one unit to another, without passing them through the initiator (SPC-4,
//! sections 6.4 and 6.18).

use super::sense::{Sense, code, key};
use super::{be16, be32, be64, pad};

/// Maximum number of units in one copy.
pub const TARGETS_MAX: u16 = 16;
/// Maximum number of segments in one copy.
pub const SEGMENTS_MAX: u16 = 64;
/// Maximum length of the parameter list of one copy, in bytes.
pub const LIST_MAX: usize = 16 + 32 * TARGETS_MAX as usize + 28 * SEGMENTS_MAX as usize;
/// Maximum number of blocks in one segment.
pub const SEGMENT_BLOCKS_MAX: u32 = 0xffff;

/// Copy target: a unit named by a designator of its device identification page.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct CopyTarget {
    /// Code set, association and type, length, and designator, encoded as in the page.
    pub designator: Vec<u8>,
    /// Block size in bytes.
    pub block: u32,
}

/// Copy segment.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CopySegment {
    /// Index of the source in the list of targets.
    pub from: u16,
    /// Index of the destination in the list of targets.
    pub to: u16,
    /// Number of blocks.
    pub blocks: u32,
    /// First block to read.
    pub from_lba: u64,
    /// First block to write.
    pub to_lba: u64,
}

/// Parsed EXTENDED COPY parameter list.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Copy {
    /// List identifier chosen by the initiator.
    pub list: u8,
    /// Result need not be kept.
    pub forget: bool,
    /// Units named by the list.
    pub targets: Vec<CopyTarget>,
    /// Segments, in the order in which they are copied.
    pub segments: Vec<CopySegment>,
}

/// Parses a parameter list.
///
/// # Errors
/// When it is truncated, exceeds a limit, or has unsupported contents.
pub fn parse(list: &[u8]) -> Result<Copy, Sense> {
    let short = Sense::illegal(code::PARAMETER_LIST_LENGTH);
    if list.len() < 16 {
        return Err(short);
    }
    let (targets_len, segments_len, inline_len) =
        (usize::from(be16(list, 2)), be32(list, 8) as usize, be32(list, 12) as usize);
    if targets_len / 32 > TARGETS_MAX.into() {
        return Err(Sense::illegal(code::TOO_MANY_TARGETS));
    }
    if segments_len / 28 > SEGMENTS_MAX.into() {
        return Err(Sense::illegal(code::TOO_MANY_SEGMENTS));
    }
    if inline_len != 0 {
        return Err(Sense::list(12));
    }
    if !targets_len.is_multiple_of(32) {
        return Err(Sense::list(2));
    }
    let whole = 16 + targets_len + segments_len;
    if list.len() < whole {
        return Err(short);
    }
    let mut targets = Vec::with_capacity(targets_len / 32);
    for (index, one) in list[16..16 + targets_len].chunks_exact(32).enumerate() {
        let at = (16 + 32 * index) as u16;
        if one[0] != 0xe4 {
            return Err(Sense { field: Sense::list(at).field, ..Sense::illegal(code::TARGET_TYPE) });
        }
        // LU_ID_TYPE is obsolete since SPC-4; the device type, a block device, is checked.
        if one[1] & 0x1f != 0 {
            return Err(Sense::list(at + 1));
        }
        let len = usize::from(one[7]);
        if len > 20 {
            return Err(Sense::list(at + 7));
        }
        let mut designator = vec![one[4] & 0x0f, one[5] & 0x3f, 0, one[7]];
        designator.extend(&one[8..8 + len]);
        targets.push(CopyTarget { designator, block: be32(one, 28) & 0xff_ffff });
    }
    let (mut segments, mut at) = (Vec::new(), 16 + targets_len);
    while at < whole {
        let one = &list[at..whole];
        if one[0] != 0x02 {
            return Err(Sense { field: Sense::list(at as u16).field, ..Sense::illegal(code::SEGMENT_TYPE) });
        }
        if one.len() < 28 || be16(one, 2) != 24 {
            return Err(Sense::list(at as u16 + 2));
        }
        let segment = CopySegment {
            from: be16(one, 4),
            to: be16(one, 6),
            blocks: be16(one, 10).into(),
            from_lba: be64(one, 12),
            to_lba: be64(one, 20),
        };
        for (target, offset) in [(segment.from, 4), (segment.to, 6)] {
            if usize::from(target) >= targets.len() {
                return Err(Sense { field: Sense::list(at as u16 + offset).field, ..aborted(code::COPY_UNREACHABLE) });
            }
        }
        segments.push(segment);
        at += 28;
    }
    Ok(Copy { list: list[0], forget: list[1] >> 3 & 3 == 3, targets, segments })
}

/// Outcome of a copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CopyOutcome {
    /// Segments copied.
    pub segments: u16,
    /// Bytes written.
    pub bytes: u64,
    /// Error that ended the copy early.
    pub failed: Option<Sense>,
}

/// RECEIVE COPY RESULTS: COPY STATUS.
pub fn status(outcome: &CopyOutcome) -> Vec<u8> {
    let mut out = vec![0, 0, 0, 8];
    out.push(if outcome.failed.is_some() { 0x02 } else { 0x01 });
    out.extend(outcome.segments.to_be_bytes());
    // Kibibytes.
    out.push(1);
    out.extend(u32::try_from(outcome.bytes >> 10).unwrap_or(u32::MAX).to_be_bytes());
    out
}

/// RECEIVE COPY RESULTS: OPERATING PARAMETERS.
pub fn parameters() -> Vec<u8> {
    let mut out = vec![0; 8];
    // Results are kept regardless of NRCR, where they are asked for.
    out[4] = 1;
    out.extend(TARGETS_MAX.to_be_bytes());
    out.extend(SEGMENTS_MAX.to_be_bytes());
    out.extend((LIST_MAX as u32).to_be_bytes());
    // Maximum segment length in bytes; no inline data, no held data, no stream devices.
    out.extend((SEGMENT_BLOCKS_MAX * super::BLOCK).to_be_bytes());
    out.extend([0; 12]);
    // Maximum concurrent copies of all initiators, and of one; data segment granularity in bytes, as a power of two.
    out.extend([0, 1, 1, 9, 0, 0]);
    pad(&mut out, 43);
    out.push(2);
    out.extend([0x02, 0xe4]);
    let len = (out.len() - 4) as u32;
    out[..4].copy_from_slice(&len.to_be_bytes());
    out
}

/// RECEIVE COPY RESULTS: FAILED SEGMENT DETAILS.
pub fn failed(outcome: &CopyOutcome) -> Vec<u8> {
    let Some(sense) = outcome.failed else { return vec![0; 4] };
    let sense = sense.to_bytes(false);
    let mut out = vec![0; 56];
    out.extend([super::status::CHECK_CONDITION, 0]);
    out.extend((sense.len() as u16).to_be_bytes());
    out.extend(sense);
    let len = (out.len() - 4) as u32;
    out[..4].copy_from_slice(&len.to_be_bytes());
    out
}

/// Builds the sense data of a copy that ended early.
pub fn aborted(code: u16) -> Sense {
    Sense::new(key::COPY_ABORTED, code)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn list() -> Vec<u8> {
        let mut list = vec![7, 0, 0, 32, 0, 0, 0, 0, 0, 0, 0, 28, 0, 0, 0, 0];
        let mut target = vec![0xe4, 0, 0, 0, 1, 3, 0, 8, 0x31, 1, 2, 3, 4, 5, 6, 7];
        target.resize(28, 0);
        target.extend([0, 0, 2, 0]);
        list.extend(target);
        let mut segment = vec![0x02, 0, 0, 24, 0, 0, 0, 0, 0, 0, 0, 16];
        segment.extend(5u64.to_be_bytes());
        segment.extend(900u64.to_be_bytes());
        list.extend(segment);
        list
    }

    #[test]
    fn a_copy_is_read() {
        let copy = parse(&list()).expect("a copy");
        assert_eq!(copy.segments, [CopySegment { from: 0, to: 0, blocks: 16, from_lba: 5, to_lba: 900 }]);
        assert_eq!((copy.list, copy.targets[0].block, copy.targets[0].designator.len()), (7, 512, 12));
    }

    #[test]
    fn what_is_wrong_is_named() {
        let with = |at: usize, byte: u8| {
            let mut list = list();
            list[at] = byte;
            parse(&list).expect_err("refused").code
        };
        assert_eq!(with(16, 0xe0), code::TARGET_TYPE);
        assert_eq!(with(48, 0x00), code::SEGMENT_TYPE);
        assert_eq!(with(48 + 5, 1), code::COPY_UNREACHABLE);
        assert_eq!(with(15, 1), code::FIELD_IN_LIST);
        assert_eq!(with(2, 0xff), code::TOO_MANY_TARGETS);
        assert_eq!(with(9, 0xff), code::TOO_MANY_SEGMENTS);
        assert_eq!(parse(&list()[..40]).expect_err("refused").code, code::PARAMETER_LIST_LENGTH);
    }

    proptest! {
        #[test]
        fn any_list_is_taken_or_refused(mut start in list_of(), rest in prop::collection::vec(any::<u8>(), 0..128)) {
            start.extend(rest);
            let _ = parse(&start);
        }
    }

    fn list_of() -> impl Strategy<Value = Vec<u8>> {
        (0..76usize, any::<u8>(), 0..76usize).prop_map(|(at, byte, cut)| {
            let mut list = list();
            list[at] = byte;
            list.truncate(cut + 1);
            list
        })
    }

    #[test]
    fn results_have_the_length_that_they_say() {
        let outcome = CopyOutcome { segments: 1, bytes: 8192, failed: Some(aborted(code::THIRD_PARTY)) };
        for bytes in [status(&outcome), parameters(), failed(&outcome)] {
            assert_eq!(be32(&bytes, 0) as usize + 4, bytes.len());
        }
    }
}
