//! Range table: named ranges of one file or block device, for several stores. Two copies are written one after the other, at
//! the start of the device.

use super::{BLOCK, MalformedStore, Put, StoreReader, is_sealed, malformed, seal};

/// Magic number: the first eight bytes of a copy.
pub const MAGIC: &[u8; 8] = b"FBRANGES";
/// Version of the format; newer ones are rejected.
pub const VERSION: u32 = 1;
/// Byte addresses of the two copies.
pub const PLACES: [u64; 2] = [0, 64 * 1024];
/// Space for a copy in bytes.
pub const TABLE_MAX: usize = 64 * 1024;
/// Byte address of the first range, and the unit of offsets and lengths.
pub const RANGE_UNIT: u64 = 1 << 20;
/// Maximum number of ranges.
pub const RANGES_MAX: usize = 256;
/// Maximum length of a name in bytes.
pub const NAME_MAX: usize = 64;
/// Maximum share of a range.
pub const SHARE_MAX: u16 = 10_000;

const CRC_AT: usize = 8;
const LEN_AT: usize = 12;
/// Length of the fields before the ranges, and of a range without its name.
const HEADER: usize = 48;

/// Named range of a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RangeRecord {
    /// Name: ASCII letters, digits, `-`, `_` and `.`, 64 at most.
    pub name: String,
    /// Byte address on the device, a multiple of [`RANGE_UNIT`].
    pub offset: u64,
    /// Length in bytes, a multiple of [`RANGE_UNIT`].
    pub len: u64,
    /// Share of the device's queue, relative to the shares of the other ranges.
    pub share: u16,
}

impl RangeRecord {
    /// Returns the byte address behind the range.
    pub fn end(&self) -> u64 {
        self.offset + self.len
    }
}

/// Named ranges of a device.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RangeTable {
    /// UUID of the table.
    pub uuid: [u8; 16],
    /// Number of the table; each change has a higher one.
    pub generation: u64,
    /// Ranges, in order of their offsets.
    pub ranges: Vec<RangeRecord>,
}

/// Reason why a range table was rejected.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RangeTableError {
    /// No range table.
    NotATable,
    /// Range table of a newer version.
    Newer(u32),
    /// Range table that is damaged.
    Damaged(MalformedStore),
}

/// Returns whether a range may have this name.
pub fn is_range_name(name: &str) -> bool {
    let may_have = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    (1..=NAME_MAX).contains(&name.len()) && name.bytes().all(may_have)
}

impl RangeTable {
    /// Returns the range with a name.
    pub fn find(&self, name: &str) -> Option<&RangeRecord> {
        self.ranges.iter().find(|range| range.name == name)
    }

    /// Returns the number of requests that a range may have in flight on a device whose queue has `depth`: its share, 1 at
    /// least.
    pub fn requests(&self, range: &RangeRecord, depth: u32) -> usize {
        let total: u64 = self.ranges.iter().map(|range| u64::from(range.share)).sum();
        let requests = u64::from(depth) * u64::from(range.share) / total.max(1);
        requests.max(1) as usize
    }

    /// Returns the unused parts of a device of `size` bytes, as offsets and lengths, in order; whole units only.
    pub fn gaps(&self, size: u64) -> Vec<(u64, u64)> {
        let mut gaps = Vec::new();
        let mut at = RANGE_UNIT;
        for (offset, end) in self.ranges.iter().map(|range| (range.offset, range.end())).chain([(size, size)]) {
            let len = offset.saturating_sub(at) / RANGE_UNIT * RANGE_UNIT;
            if len > 0 {
                gaps.push((at, len));
            }
            at = at.max(end);
        }
        gaps
    }

    /// Encodes the table as whole blocks, at most [`TABLE_MAX`] bytes.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(BLOCK);
        out.put(MAGIC);
        out.put_u32(0);
        out.put_u32(0);
        out.put_u32(VERSION);
        out.put_u32(self.ranges.len() as u32);
        out.put(&self.uuid);
        out.put_u64(self.generation);
        for range in &self.ranges {
            out.put_u64(range.offset);
            out.put_u64(range.len);
            out.put_u16(range.share);
            out.put_u16(range.name.len() as u16);
            out.put(range.name.as_bytes());
        }
        let len = out.len();
        assert!(len <= TABLE_MAX, "{RANGES_MAX} ranges with the longest names need less");
        out[LEN_AT..LEN_AT + 4].copy_from_slice(&(len as u32).to_le_bytes());
        seal(&mut out, CRC_AT);
        out.resize(len.next_multiple_of(BLOCK), 0);
        out
    }

    /// Decodes a table from the bytes at one of its places.
    ///
    /// # Errors
    /// Reason of the rejection.
    pub fn decode(bytes: &[u8]) -> Result<Self, RangeTableError> {
        if !bytes.starts_with(MAGIC) {
            return Err(RangeTableError::NotATable);
        }
        let damaged = |what: &str| RangeTableError::Damaged(MalformedStore(format!("range table: {what}")));
        let len = bytes.get(LEN_AT..LEN_AT + 4).ok_or_else(|| damaged("cut short"))?;
        let len = u32::from_le_bytes(len.try_into().expect("four bytes")) as usize;
        let sealed = bytes.get(..len).filter(|bytes| bytes.len() >= HEADER && is_sealed(bytes, CRC_AT));
        let bytes = sealed.ok_or_else(|| damaged("the checksum is wrong"))?;
        let mut reader = StoreReader::new(&bytes[LEN_AT + 4..], "range table");
        match reader.u32().map_err(RangeTableError::Damaged)? {
            VERSION => Self::decode_fields(reader).map_err(RangeTableError::Damaged),
            version => Err(RangeTableError::Newer(version)),
        }
    }

    fn decode_fields(mut reader: StoreReader<'_>) -> Result<Self, MalformedStore> {
        let count = reader.u32()?;
        if count as usize > RANGES_MAX {
            return malformed(format!("range table: {count} ranges"));
        }
        let uuid = reader.bytes(16)?.try_into().expect("16 bytes");
        let generation = reader.u64()?;
        let ranges = (0..count).map(|_| read_range(&mut reader)).collect::<Result<_, _>>()?;
        reader.end()?;
        let table = Self { uuid, generation, ranges };
        table.check()?;
        Ok(table)
    }

    /// Checks that names are unique, and that ranges are in order and do not overlap.
    fn check(&self) -> Result<(), MalformedStore> {
        let mut at = RANGE_UNIT;
        for (i, range) in self.ranges.iter().enumerate() {
            if range.offset < at {
                return malformed(format!(
                    "range table: '{}' at {} overlaps what is before it",
                    range.name, range.offset
                ));
            }
            if self.ranges[..i].iter().any(|other| other.name == range.name) {
                return malformed(format!("range table: two ranges are named '{}'", range.name));
            }
            at = range.end();
        }
        Ok(())
    }
}

fn read_range(reader: &mut StoreReader<'_>) -> Result<RangeRecord, MalformedStore> {
    let (offset, len) = (reader.u64()?, reader.u64()?);
    let (share, name_len) = (reader.u16()?, usize::from(reader.u16()?));
    if name_len > NAME_MAX {
        return malformed(format!("range table: a name of {name_len} bytes"));
    }
    let name = reader.text(name_len)?.to_owned();
    if !is_range_name(&name) {
        return malformed(format!("range table: a range is named '{}'", name.escape_debug()));
    }
    let is_whole = offset.is_multiple_of(RANGE_UNIT) && len.is_multiple_of(RANGE_UNIT);
    if !is_whole || len == 0 || offset.checked_add(len).is_none_or(|end| i64::try_from(end).is_err()) {
        return malformed(format!("range table: '{name}' has {len} bytes at {offset}"));
    }
    if !(1..=SHARE_MAX).contains(&share) {
        return malformed(format!("range table: '{name}' has the share {share}"));
    }
    Ok(RangeRecord { name, offset, len, share })
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use proptest::prelude::*;

    const MIB: u64 = RANGE_UNIT;

    fn range(name: &str, offset: u64, len: u64, share: u16) -> RangeRecord {
        RangeRecord { name: name.into(), offset: offset * MIB, len: len * MIB, share }
    }

    pub(in crate::format) fn sample() -> RangeTable {
        let ranges = vec![range("osd.0", 1, 64, 100), range("osd.1", 65, 32, 100), range("log", 200, 16, 300)];
        RangeTable { uuid: *b"0123456789abcdef", generation: 5, ranges }
    }

    #[test]
    fn round_trip_and_damage() {
        let bytes = sample().encode();
        assert_eq!(RangeTable::decode(&bytes), Ok(sample()));
        let used = u32::from_le_bytes(bytes[LEN_AT..LEN_AT + 4].try_into().expect("four")) as usize;
        for at in 0..used {
            for bit in 0..8 {
                let mut bad = bytes.clone();
                bad[at] ^= 1 << bit;
                let expected = if at < MAGIC.len() { "NotATable" } else { "Damaged" };
                let error = RangeTable::decode(&bad).expect_err("damaged");
                assert!(format!("{error:?}").starts_with(expected), "byte {at}, bit {bit}: {error:?}");
            }
            assert!(RangeTable::decode(&bytes[..at]).is_err(), "{at} bytes");
        }
    }

    #[test]
    fn a_newer_version_is_told_from_damage() {
        let mut bytes = sample().encode();
        let len = u32::from_le_bytes(bytes[LEN_AT..LEN_AT + 4].try_into().expect("four")) as usize;
        bytes[LEN_AT + 4] = 9;
        bytes.truncate(len);
        seal(&mut bytes, CRC_AT);
        assert_eq!(RangeTable::decode(&bytes), Err(RangeTableError::Newer(9)));
    }

    #[test]
    fn the_largest_table_fits() {
        let name = |i: usize| format!("{i:0>NAME_MAX$}");
        let ranges = (0..RANGES_MAX).map(|i| range(&name(i), 1 + i as u64, 1, SHARE_MAX)).collect();
        let table = RangeTable { ranges, ..sample() };
        assert_eq!(RangeTable::decode(&table.encode()), Ok(table));
    }

    #[test]
    fn impossible_tables_are_rejected() {
        let rejected = |change: fn(&mut RangeTable)| {
            let mut table = sample();
            change(&mut table);
            match RangeTable::decode(&table.encode()) {
                Err(RangeTableError::Damaged(why)) => why.0,
                other => panic!("{other:?}"),
            }
        };
        assert!(rejected(|table| table.ranges[1].offset -= MIB).contains("overlaps"));
        assert!(rejected(|table| table.ranges[0].offset = 0).contains("overlaps"));
        assert!(rejected(|table| table.ranges.swap(0, 1)).contains("overlaps"));
        assert!(rejected(|table| table.ranges[1].name = "osd.0".into()).contains("two ranges"));
        assert!(rejected(|table| table.ranges[1].name = "a/b".into()).contains("is named"));
        assert!(rejected(|table| table.ranges[1].name = String::new()).contains("is named"));
        assert!(rejected(|table| table.ranges[1].name = "n".repeat(NAME_MAX + 1)).contains("65 bytes"));
        assert!(rejected(|table| table.ranges[1].len = 0).contains("0 bytes"));
        assert!(rejected(|table| table.ranges[1].len += 512).contains("33554944 bytes"));
        assert!(rejected(|table| table.ranges[1].offset += 4096).contains("at 68161536"));
        assert!(rejected(|table| table.ranges[2].offset = (1 << 63) - MIB).contains("at 9223372036853727232"));
        assert!(rejected(|table| table.ranges[2].offset = u64::MAX / MIB * MIB).contains("has 16777216 bytes"));
        assert!(rejected(|table| table.ranges[2].share = 0).contains("the share 0"));
        assert!(rejected(|table| table.ranges[2].share = SHARE_MAX + 1).contains("the share"));
        assert!(rejected(|table| table.ranges = vec![table.ranges[0].clone(); RANGES_MAX + 1]).contains("257 ranges"));
    }

    #[test]
    fn requests_are_shared_and_never_none() {
        let table = sample();
        let requests: Vec<usize> = table.ranges.iter().map(|range| table.requests(range, 128)).collect();
        assert_eq!(requests, [25, 25, 76]);
        assert_eq!(table.requests(&table.ranges[0], 1), 1);
        let alone = RangeTable { ranges: vec![range("a", 1, 1, 1)], ..sample() };
        assert_eq!(alone.requests(&alone.ranges[0], 1023), 1023);
    }

    #[test]
    fn gaps_are_what_no_range_has() {
        assert_eq!(sample().gaps(300 * MIB + 4096), [(97 * MIB, 103 * MIB), (216 * MIB, 84 * MIB)]);
        assert_eq!(sample().gaps(210 * MIB), [(97 * MIB, 103 * MIB)], "a device that was cut short");
        assert_eq!(RangeTable { ranges: Vec::new(), ..sample() }.gaps(MIB), []);
    }

    proptest! {
        #[test]
        fn tables_round_trip(generation: u64, ranges in proptest::collection::vec((0u64..9, 1u64..9, 1u16..99), 0..20)) {
            let mut at = 1;
            let place = |(i, (gap, len, share)): (usize, (u64, u64, u16))| {
                let offset = at + gap;
                at = offset + len;
                range(&format!("r{i}"), offset, len, share)
            };
            let ranges: Vec<RangeRecord> = ranges.into_iter().enumerate().map(place).collect();
            let table = RangeTable { uuid: [7; 16], generation, ranges };
            prop_assert_eq!(RangeTable::decode(&table.encode()), Ok(table.clone()));
            // Gaps and ranges have the whole device, each byte once.
            let end = table.ranges.last().map_or(MIB, RangeRecord::end) + 5 * MIB;
            let mut parts: Vec<(u64, u64)> = table.ranges.iter().map(|range| (range.offset, range.len)).collect();
            parts.extend(table.gaps(end));
            parts.sort_unstable();
            prop_assert_eq!(parts.iter().fold(MIB, |at, &(offset, len)| if at == offset { at + len } else { 0 }), end);
        }

        #[test]
        fn junk_never_panics(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = RangeTable::decode(&[&MAGIC[..], &bytes].concat());
        }
    }
}
