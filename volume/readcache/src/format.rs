//! Format of the cache's file: `docs/formats/readcache.md`.

use forebay_accel::crc32c::{crc32c, extend};
use forebay_block::{PoolIdentity, SnapId, SnapshotIdentity};

/// Length of a part in bytes.
pub const PART_LEN: u64 = 64 << 10;
/// Smallest size of the file in bytes.
pub const DISK_SIZE_MIN: u64 = 16 << 20;
/// Largest size of the file in bytes: 64 TiB.
pub(crate) const DISK_SIZE_MAX: u64 = 64 << 40;

/// Length of the superblock, and of a block of the table.
pub(crate) const BLOCK_LEN: usize = 4096;
/// Offset of the table.
pub(crate) const TABLE_AT: u64 = 64 << 10;
/// Rows of a block of the table.
pub(crate) const ROWS_PER_BLOCK: u32 = 42;
/// Longest image id in bytes whose parts are stored.
pub(crate) const IMAGE_LEN_MAX: usize = 32;
/// Number of parts of the largest object that a row may name.
pub(crate) const PARTS_MAX: u32 = 1 << 16;

const MAGIC: &[u8; 8] = b"FBYRDCH\x01";
const VERSION: u32 = 1;
const CRC_AT: usize = 12;
const HEAD_LEN: usize = 32;
const ROW_LEN: usize = 96;
const BLOCK_MAGIC: u32 = u32::from_le_bytes(*b"RCTB");

const _: () = assert!(HEAD_LEN + ROWS_PER_BLOCK as usize * ROW_LEN <= BLOCK_LEN);

/// Random number of a file's content; a cleared file has another.
pub(crate) type Incarnation = [u8; 16];

/// Reason for not using a file's content.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum CacheFormatError {
    /// Empty file: only zeroes.
    #[error("empty")]
    Empty,
    /// File of another program.
    #[error("not a read cache")]
    Stranger,
    /// Newer version or unknown features.
    #[error("{0}, which this program does not know")]
    Newer(String),
    /// Damaged bytes.
    #[error("{0}")]
    Damaged(&'static str),
}

/// Places in a file of a given size.
///
/// Row `n` below `data_rows` describes the part in slot `n`. The rows behind describe zero parts and absent objects,
/// which have no slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct CacheGeometry {
    pub(crate) size: u64,
    pub(crate) data_rows: u32,
    pub(crate) flag_rows: u32,
    pub(crate) data_at: u64,
}

impl CacheGeometry {
    /// Returns the geometry of a file of `size` bytes; `None` if it is too small or too large.
    pub(crate) fn of(size: u64) -> Option<Self> {
        if !(DISK_SIZE_MIN..=DISK_SIZE_MAX).contains(&size) {
            return None;
        }
        // A part needs its slot, and 5/4 rows.
        let per_row = (BLOCK_LEN as u64).div_ceil(u64::from(ROWS_PER_BLOCK));
        let mut rows = (size - TABLE_AT) / (PART_LEN + per_row * 5 / 4);
        loop {
            let flags = (rows / 4).max(64);
            let blocks = (rows + flags).div_ceil(u64::from(ROWS_PER_BLOCK));
            let data_at = (TABLE_AT + blocks * BLOCK_LEN as u64).next_multiple_of(PART_LEN);
            if data_at + rows * PART_LEN <= size {
                return Some(Self { size, data_rows: rows as u32, flag_rows: flags as u32, data_at });
            }
            rows -= 1;
        }
    }

    pub(crate) fn rows(&self) -> u32 {
        self.data_rows + self.flag_rows
    }

    pub(crate) fn blocks(&self) -> u32 {
        self.rows().div_ceil(ROWS_PER_BLOCK)
    }

    /// Returns the offset of a slot.
    pub(crate) fn slot_at(&self, row: u32) -> u64 {
        self.data_at + u64::from(row) * PART_LEN
    }

    /// Returns the offset of a block of the table.
    pub(crate) fn block_at(block: u32) -> u64 {
        TABLE_AT + u64::from(block) * BLOCK_LEN as u64
    }
}

/// Superblock of a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Superblock {
    pub(crate) incarnation: Incarnation,
    /// Size of the file in bytes.
    pub(crate) size: u64,
    /// Time at which it was created or cleared, in seconds since 1970.
    pub(crate) created_s: u64,
}

impl Superblock {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(BLOCK_LEN);
        out.extend_from_slice(MAGIC);
        out.extend_from_slice(&VERSION.to_le_bytes());
        out.extend_from_slice(&[0; 4]);
        out.extend_from_slice(&0u64.to_le_bytes());
        out.extend_from_slice(&self.incarnation);
        out.extend_from_slice(&(PART_LEN as u32).to_le_bytes());
        out.extend_from_slice(&[0; 4]);
        out.extend_from_slice(&self.size.to_le_bytes());
        out.extend_from_slice(&self.created_s.to_le_bytes());
        out.resize(BLOCK_LEN, 0);
        let crc = crc32c(&out);
        out[CRC_AT..CRC_AT + 4].copy_from_slice(&crc.to_le_bytes());
        out
    }

    pub(crate) fn decode(bytes: &[u8]) -> Result<Self, CacheFormatError> {
        if forebay_block::is_zero(bytes) {
            return Err(CacheFormatError::Empty);
        }
        if bytes.len() != BLOCK_LEN || bytes[..8] != *MAGIC {
            return Err(CacheFormatError::Stranger);
        }
        if crc_without(bytes, CRC_AT) != u32_at(bytes, CRC_AT) {
            return Err(CacheFormatError::Damaged("the superblock's checksum is wrong"));
        }
        let version = u32_at(bytes, 8);
        if version != VERSION {
            return Err(CacheFormatError::Newer(format!("version {version} of the format")));
        }
        let features = u64_at(bytes, 16);
        if features != 0 {
            return Err(CacheFormatError::Newer(format!("features {features:#x}")));
        }
        let superblock =
            Self { incarnation: array_at(bytes, 24), size: u64_at(bytes, 48), created_s: u64_at(bytes, 56) };
        if u64::from(u32_at(bytes, 40)) != PART_LEN || CacheGeometry::of(superblock.size).is_none() {
            return Err(CacheFormatError::Damaged("the superblock's sizes are impossible"));
        }
        Ok(superblock)
    }
}

/// Kind of a row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub(crate) enum RowKind {
    /// The part is in the row's slot.
    Data = 1,
    /// The part is zero.
    Zero = 2,
    /// The object does not exist.
    Absent = 3,
}

/// Row of the table: what is known of one part, or of one object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Row {
    pub(crate) kind: RowKind,
    pub(crate) identity: SnapshotIdentity,
    pub(crate) object: u64,
    /// Number of the part; 0 in a row of a whole object.
    pub(crate) part: u32,
    /// Checksum of the slot's content, bound to the key; 0 without a slot.
    pub(crate) crc: u32,
}

impl Row {
    /// Encodes the row; `None` if the image id is too long.
    fn encode(&self) -> Option<[u8; ROW_LEN]> {
        let mut out = [0; ROW_LEN];
        out[0] = self.kind as u8;
        out[4..8].copy_from_slice(&self.crc.to_le_bytes());
        out[8..].copy_from_slice(&encode_key(&self.identity, self.object, self.part)?);
        Some(out)
    }

    fn decode(bytes: &[u8]) -> Option<Self> {
        let kind = match bytes[0] {
            1 => RowKind::Data,
            2 => RowKind::Zero,
            3 => RowKind::Absent,
            _ => return None,
        };
        let image_len = usize::from(bytes[12]);
        let image = std::str::from_utf8(bytes[56..56 + IMAGE_LEN_MAX].get(..image_len)?).ok()?;
        let row = Self {
            kind,
            crc: u32_at(bytes, 4),
            part: u32_at(bytes, 8),
            identity: SnapshotIdentity {
                pool: PoolIdentity { store: array_at(bytes, 16), pool: u64_at(bytes, 32) as i64 },
                snap: SnapId(u64_at(bytes, 40)),
                image: image.into(),
            },
            object: u64_at(bytes, 48),
        };
        let fits = if matches!(kind, RowKind::Data | RowKind::Zero) { row.part < PARTS_MAX } else { row.part == 0 };
        fits.then_some(row)
    }
}

/// Encodes the key of a part: bytes 8 to 96 of its row. `None` if the image id is too long.
fn encode_key(identity: &SnapshotIdentity, object: u64, part: u32) -> Option<[u8; ROW_LEN - 8]> {
    let image = identity.image.as_bytes();
    if image.len() > IMAGE_LEN_MAX {
        return None;
    }
    let mut out = [0; ROW_LEN - 8];
    out[..4].copy_from_slice(&part.to_le_bytes());
    out[4] = image.len() as u8;
    out[8..24].copy_from_slice(&identity.pool.store);
    out[24..32].copy_from_slice(&identity.pool.pool.to_le_bytes());
    out[32..40].copy_from_slice(&identity.snap.0.to_le_bytes());
    out[40..48].copy_from_slice(&object.to_le_bytes());
    out[48..48 + image.len()].copy_from_slice(image);
    Some(out)
}

/// Returns the checksum of a part's content, bound to its key; `None` if the image id is too long.
pub(crate) fn part_crc(identity: &SnapshotIdentity, object: u64, part: u32, data: &[u8]) -> Option<u32> {
    Some(extend(crc32c(&encode_key(identity, object, part)?), data))
}

/// Block of the table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct TableBlock {
    /// Number that grows with each write of any block: of two rows with one key, that of the higher one is newer.
    pub(crate) serial: u64,
    /// Rows, [`ROWS_PER_BLOCK`] of them; `None` for unused ones.
    pub(crate) rows: Vec<Option<Row>>,
}

impl TableBlock {
    /// Encodes the block as number `block` of a table.
    pub(crate) fn encode(&self, block: u32, incarnation: &Incarnation) -> Vec<u8> {
        let mut out = Vec::with_capacity(BLOCK_LEN);
        out.extend_from_slice(&BLOCK_MAGIC.to_le_bytes());
        out.extend_from_slice(&block.to_le_bytes());
        out.extend_from_slice(&[0; 8]);
        out.extend_from_slice(&self.serial.to_le_bytes());
        out.extend_from_slice(&[0; 8]);
        for row in &self.rows {
            out.extend_from_slice(&row.as_ref().and_then(Row::encode).unwrap_or([0; ROW_LEN]));
        }
        out.resize(BLOCK_LEN, 0);
        let crc = extend(crc32c(incarnation), &out);
        out[CRC_AT..CRC_AT + 4].copy_from_slice(&crc.to_le_bytes());
        out
    }

    /// Decodes block number `block` of a table; `None` for one that was never written, is damaged, or is of another
    /// place or incarnation.
    pub(crate) fn decode(bytes: &[u8], block: u32, incarnation: &Incarnation) -> Option<Self> {
        if bytes.len() != BLOCK_LEN || u32_at(bytes, 0) != BLOCK_MAGIC || u32_at(bytes, 4) != block {
            return None;
        }
        let mut plain = bytes.to_vec();
        plain[CRC_AT..CRC_AT + 4].fill(0);
        if extend(crc32c(incarnation), &plain) != u32_at(bytes, CRC_AT) {
            return None;
        }
        let rows = bytes[HEAD_LEN..].chunks_exact(ROW_LEN).take(ROWS_PER_BLOCK as usize).map(Row::decode).collect();
        Some(Self { serial: u64_at(bytes, 16), rows })
    }
}

fn crc_without(bytes: &[u8], at: usize) -> u32 {
    extend(extend(crc32c(&bytes[..at]), &[0; 4]), &bytes[at + 4..])
}

fn array_at<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    let mut out = [0; N];
    out.copy_from_slice(&bytes[at..at + N]);
    out
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(array_at(bytes, at))
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(array_at(bytes, at))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn identity() -> SnapshotIdentity {
        let store = *b"0123456789abcdef";
        SnapshotIdentity { pool: PoolIdentity { store, pool: 3 }, image: "10ab5c2f7e1d".into(), snap: SnapId(7) }
    }

    fn row() -> Row {
        Row { kind: RowKind::Data, identity: identity(), object: 0x0102, part: 63, crc: 0xdead_beef }
    }

    #[test]
    fn golden_superblock() {
        let superblock = Superblock { incarnation: [0xa5; 16], size: 16 << 20, created_s: 1_700_000_000 };
        let bytes = superblock.encode();
        let mut want = b"FBYRDCH\x01\x01\0\0\0".to_vec();
        want.extend_from_slice(&bytes[12..16]);
        want.extend_from_slice(&[0; 8]);
        want.extend_from_slice(&[0xa5; 16]);
        want.extend_from_slice(&[0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0]);
        want.extend_from_slice(&[0x00, 0xf1, 0x53, 0x65, 0, 0, 0, 0]);
        assert_eq!(bytes[..64], want);
        assert!(bytes[64..].iter().all(|&byte| byte == 0) && bytes.len() == BLOCK_LEN);
        assert_eq!(u32_at(&bytes, 12), 0x7dbc_7a8b, "{:#x}", u32_at(&bytes, 12));
        assert_eq!(Superblock::decode(&bytes), Ok(superblock));
    }

    #[test]
    fn golden_row() {
        let bytes = row().encode().expect("fits");
        let mut want = vec![1, 0, 0, 0, 0xef, 0xbe, 0xad, 0xde, 63, 0, 0, 0, 12, 0, 0, 0];
        want.extend_from_slice(b"0123456789abcdef");
        want.extend_from_slice(&[3, 0, 0, 0, 0, 0, 0, 0, 7, 0, 0, 0, 0, 0, 0, 0, 2, 1, 0, 0, 0, 0, 0, 0]);
        want.extend_from_slice(b"10ab5c2f7e1d");
        want.resize(ROW_LEN, 0);
        assert_eq!(bytes[..], want);
        assert_eq!(Row::decode(&bytes), Some(row()));
    }

    #[test]
    fn superblocks_of_others_are_told_apart() {
        let superblock = Superblock { incarnation: [1; 16], size: 16 << 20, created_s: 0 };
        let sealed = |change: fn(&mut Vec<u8>)| {
            let mut bytes = superblock.encode();
            change(&mut bytes);
            bytes[CRC_AT..CRC_AT + 4].fill(0);
            let crc = crc32c(&bytes);
            bytes[CRC_AT..CRC_AT + 4].copy_from_slice(&crc.to_le_bytes());
            Superblock::decode(&bytes).expect_err("changed")
        };
        assert_eq!(Superblock::decode(&[0; BLOCK_LEN]), Err(CacheFormatError::Empty));
        assert_eq!(sealed(|bytes| bytes[0] = b'X'), CacheFormatError::Stranger);
        assert!(matches!(sealed(|bytes| bytes[8] = 2), CacheFormatError::Newer(_)));
        assert!(matches!(sealed(|bytes| bytes[23] = 0x80), CacheFormatError::Newer(_)));
        assert!(matches!(sealed(|bytes| bytes[42] = 2), CacheFormatError::Damaged(_)));
        assert!(matches!(sealed(|bytes| bytes[51] = 0), CacheFormatError::Damaged(_)));
        let mut bytes = superblock.encode();
        bytes[100] ^= 1;
        assert!(matches!(Superblock::decode(&bytes), Err(CacheFormatError::Damaged(_))));
    }

    #[test]
    fn a_block_is_valid_in_its_place_and_incarnation_only() {
        let mut rows = vec![None; ROWS_PER_BLOCK as usize];
        rows[41] = Some(row());
        let block = TableBlock { serial: 9, rows };
        let bytes = block.encode(5, &[1; 16]);
        assert_eq!(TableBlock::decode(&bytes, 5, &[1; 16]), Some(block));
        assert_eq!(TableBlock::decode(&bytes, 6, &[1; 16]), None);
        assert_eq!(TableBlock::decode(&bytes, 5, &[2; 16]), None);
        let mut damaged = bytes.clone();
        damaged[4000] ^= 1;
        assert_eq!(TableBlock::decode(&damaged, 5, &[1; 16]), None);
    }

    #[test]
    fn the_checksum_of_a_part_is_bound_to_every_field_of_its_key() {
        let (data, plain) = (vec![7; PART_LEN as usize], identity());
        let crc = part_crc(&plain, 1, 2, &data);
        let pool = |store, pool| SnapshotIdentity { pool: PoolIdentity { store, pool }, ..identity() };
        let others = [
            part_crc(&pool([0; 16], 3), 1, 2, &data),
            part_crc(&pool(*b"0123456789abcdef", 4), 1, 2, &data),
            part_crc(&SnapshotIdentity { image: "10ab5c2f7e1e".into(), ..identity() }, 1, 2, &data),
            part_crc(&SnapshotIdentity { snap: SnapId(8), ..identity() }, 1, 2, &data),
            part_crc(&plain, 2, 2, &data),
            part_crc(&plain, 1, 3, &data),
        ];
        assert!(crc.is_some() && others.iter().all(|other| other.is_some() && *other != crc));
        let long = SnapshotIdentity { image: "x".repeat(33).into(), ..identity() };
        assert_eq!(part_crc(&long, 1, 2, &data), None);
    }

    #[test]
    fn every_size_has_its_places() {
        for size in [DISK_SIZE_MIN, DISK_SIZE_MIN + 4097, 100 << 20, (10 << 30) + 12345, 1 << 40, DISK_SIZE_MAX] {
            let geometry = CacheGeometry::of(size).expect("a size in range");
            assert!(geometry.slot_at(geometry.data_rows) <= size);
            assert!(CacheGeometry::block_at(geometry.blocks()) <= geometry.data_at);
            let used = u64::from(geometry.data_rows) * PART_LEN;
            assert!(used * 100 >= size * 97, "{used} of {size}");
        }
        assert_eq!(CacheGeometry::of(DISK_SIZE_MIN - 1), None);
        assert_eq!(CacheGeometry::of(DISK_SIZE_MAX + 1), None);
    }
}
