//! Superblock: identity and geometry of the store.  Written once, in two copies, when the store is created.

use super::{BLOCK, BLOCK64, MalformedStore, Put, StoreReader, is_sealed, malformed, seal};

/// Magic number: the first eight bytes of a store.
pub const MAGIC: &[u8; 8] = b"FOREBAY\x01";
/// Newest version of the format; newer ones are rejected. A store without features has version 1.
pub const VERSION: u32 = 2;
/// Byte addresses of the two copies.
pub const COPIES: [u64; 2] = [0, 64 * 1024];
/// Feature bit: the store is on several devices, which have a device table and identities.
pub const FEATURE_DEVICES: u64 = 1 << 0;
/// Feature bit: the store may have compressed blobs and data policies. It is set before the first one is written.
pub const FEATURE_BLOBS: u64 = 1 << 1;
/// Feature bit: the store may have a key table and encrypted objects, and the tree records the uses of segments.
pub const FEATURE_ENCRYPTION: u64 = 1 << 2;
/// Feature bit: the number of segments may have changed since the store was created, so that copies of the superblock,
/// segment tables and checkpoint records may have different ones. It is set with the first change.
pub const FEATURE_GROWN: u64 = 1 << 3;
/// Feature bits that this version can read and write; unknown ones are rejected.
pub const FEATURES_KNOWN: u64 = FEATURE_DEVICES | FEATURE_BLOBS | FEATURE_ENCRYPTION | FEATURE_GROWN;
/// Compatible feature bits: readers that do not know them may ignore them.
pub const FEATURES_COMPATIBLE_KNOWN: u64 = 0;
/// Byte address of the first segment.
pub const SEGMENTS_START: u64 = 1 << 20;

const CRC_AT: usize = 12;

/// Identity of one of the devices of a store.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DeviceIdentity {
    /// Number of the device in the store.
    pub number: u16,
    /// UUID of the device; not zero.
    pub id: [u8; 16],
}

/// Identity and geometry of a store.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoreSuperblock {
    /// Incompatible feature bits: a reader must know all of them.
    pub features: u64,
    /// Compatible feature bits: a reader may ignore unknown ones.
    pub features_compatible: u64,
    /// UUID of the store.
    pub uuid: [u8; 16],
    /// Creation time in seconds since 1970.
    pub created_s: u64,
    /// Segment size in bytes: a power of two, times the data columns if the store is on several devices.
    pub segment_size: u32,
    /// Number of segments; on several devices, that of an earlier time: the device table has the current one.
    pub segment_count: u32,
    /// Data columns of a segment (k); 1 on one device.
    pub data_devices: u16,
    /// Parity columns of a segment (m); 0 on one device.
    pub parity_devices: u16,
    /// Identity of the device, if the store is on several; `None` in the log's copies.
    pub device: Option<DeviceIdentity>,
}

/// Reason why a superblock was rejected.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SuperblockError {
    /// No Forebay store.
    NotAStore,
    /// Forebay store of a newer version, with a description of the unknown features.
    Newer(String),
    /// Forebay store whose superblock is damaged.
    Damaged(MalformedStore),
}

impl StoreSuperblock {
    /// Returns the number of bytes of the device in use.
    pub fn device_size(&self) -> u64 {
        SEGMENTS_START + u64::from(self.segment_size) * u64::from(self.segment_count)
    }

    /// Returns the store number, the part of the UUID that batches and anchors carry.
    pub fn store_number(&self) -> u64 {
        u64::from_le_bytes(self.uuid[..8].try_into().expect("eight bytes"))
    }

    /// Returns the superblock that two copies stand for, if they are of the same store. A crash may have interrupted the
    /// setting of a feature bit, or an increase of the number of segments, before anything needs it: all bits and the
    /// larger number count.
    pub fn reconcile(&self, other: &Self) -> Option<Self> {
        let features = self.features | other.features;
        let segment_count = self.segment_count.max(other.segment_count);
        let may_differ = features & FEATURE_GROWN != 0 || self.segment_count == other.segment_count;
        let both = Self { features, segment_count, ..self.clone() };
        (may_differ && both == Self { features, segment_count, ..other.clone() }).then_some(both)
    }

    /// Returns the largest number of segments of this size, which their table and the numbers of blocks allow.
    pub fn segments_max(&self) -> u32 {
        let by_table = (u64::from(self.segment_size) - 2 * BLOCK64) / 4;
        let by_blocks = ((1 << 48) * BLOCK64 - 1 - SEGMENTS_START) / u64::from(self.segment_size);
        by_table.min(by_blocks).min(1 << 20) as u32
    }

    /// Returns the version of the format: 1 without features.
    fn version(&self) -> u32 {
        if self.features == 0 { 1 } else { VERSION }
    }

    /// Encodes the superblock as one block.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(BLOCK);
        out.put(MAGIC);
        out.put_u32(self.version());
        out.put_u32(0);
        out.put_u64(self.features);
        out.put_u64(self.features_compatible);
        out.put(&self.uuid);
        out.put_u64(self.created_s);
        out.put_u32(BLOCK as u32);
        out.put_u32(self.segment_size);
        out.put_u32(self.segment_count);
        out.put_u16(self.data_devices);
        out.put_u16(self.parity_devices);
        if let Some(device) = self.device {
            out.put(&device.id);
            out.put_u16(device.number);
        }
        out.resize(BLOCK, 0);
        seal(&mut out, CRC_AT);
        out
    }

    /// Decodes a superblock from one block.
    pub fn decode(block: &[u8]) -> Result<Self, SuperblockError> {
        let mut reader = StoreReader::new(block, "superblock");
        let magic = reader.bytes(8).map_err(SuperblockError::Damaged)?;
        if magic != MAGIC {
            return Err(SuperblockError::NotAStore);
        }
        Self::decode_fields(block, reader)
    }

    fn decode_fields(block: &[u8], mut reader: StoreReader<'_>) -> Result<Self, SuperblockError> {
        let damaged = SuperblockError::Damaged;
        let version = reader.u32().map_err(damaged)?;
        if block.len() != BLOCK || !is_sealed(block, CRC_AT) {
            return Err(damaged(MalformedStore("superblock: the checksum is wrong".into())));
        }
        // An unknown version counts as newer only after the checksum has been verified.
        if version == 0 || version > VERSION {
            return Err(SuperblockError::Newer(format!("format version {version}, this program knows {VERSION}")));
        }
        let fields = |reader: &mut StoreReader<'_>| {
            reader.u32()?;
            let features = reader.u64()?;
            let features_compatible = reader.u64()?;
            let uuid = reader.bytes(16)?.try_into().expect("16 bytes");
            let created_s = reader.u64()?;
            let block_size = reader.u32()?;
            let superblock = Self {
                features,
                features_compatible,
                uuid,
                created_s,
                segment_size: reader.u32()?,
                segment_count: reader.u32()?,
                data_devices: reader.u16()?,
                parity_devices: reader.u16()?,
                device: {
                    let id: [u8; 16] = reader.bytes(16)?.try_into().expect("16 bytes");
                    let number = reader.u16()?;
                    (id != [0; 16]).then_some(DeviceIdentity { number, id })
                },
            };
            if superblock.version() != version {
                return malformed(format!("superblock: version {version} with features {features:#x}"));
            }
            Ok((superblock, block_size))
        };
        let (superblock, block_size) = fields(&mut reader).map_err(damaged)?;
        let unknown = superblock.features & !FEATURES_KNOWN;
        if unknown != 0 {
            return Err(SuperblockError::Newer(format!("feature bits {unknown:#x}, which this program does not know")));
        }
        superblock.check(block_size).map_err(damaged)?;
        Ok(superblock)
    }

    fn check(&self, block_size: u32) -> Result<(), MalformedStore> {
        if block_size != BLOCK as u32 {
            return malformed(format!("superblock: blocks of {block_size} bytes"));
        }
        let several = self.features & FEATURE_DEVICES != 0;
        let (data, parity) = (u32::from(self.data_devices), u32::from(self.parity_devices));
        let is_known = if several {
            (1..=64).contains(&data) && (2..=64).contains(&(data + parity))
        } else {
            (data, parity) == (1, 0)
        };
        if !is_known || (!several && self.device.is_some()) {
            return malformed(format!("superblock: segments of {data}+{parity} columns"));
        }
        let column = self.segment_size / data;
        let whole = column.is_power_of_two() && column * data == self.segment_size;
        if !whole || column < 64 * 1024 || self.segment_size > 1 << 30 {
            return malformed(format!("superblock: segments of {} bytes", self.segment_size));
        }
        if !(8..=1 << 20).contains(&self.segment_count) {
            return malformed(format!("superblock: {} segments", self.segment_count));
        }
        // The table has four bytes per segment, and is stored in one segment behind a header.
        if u64::from(self.segment_count) * 4 > u64::from(self.segment_size) - 2 * BLOCK64 {
            return malformed(format!(
                "superblock: {} segments of {} bytes, too many for their table",
                self.segment_count, self.segment_size
            ));
        }
        if self.device_size() / BLOCK64 >= 1 << 48 {
            return malformed("superblock: more blocks than 48 bits can number");
        }
        Ok(())
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub(in crate::format) fn sample() -> StoreSuperblock {
        StoreSuperblock {
            features: 0,
            features_compatible: 0,
            uuid: *b"0123456789abcdef",
            created_s: 1_700_000_000,
            segment_size: 4 << 20,
            segment_count: 256,
            data_devices: 1,
            parity_devices: 0,
            device: None,
        }
    }

    pub(in crate::format) fn sample_of_several() -> StoreSuperblock {
        StoreSuperblock {
            features: FEATURE_DEVICES,
            segment_size: 3 << 20,
            data_devices: 3,
            parity_devices: 2,
            device: Some(DeviceIdentity { number: 4, id: *b"a device's UUID." }),
            ..sample()
        }
    }

    #[test]
    fn round_trip() {
        for superblock in [sample(), sample_of_several(), StoreSuperblock { device: None, ..sample_of_several() }] {
            assert_eq!(StoreSuperblock::decode(&superblock.encode()), Ok(superblock));
        }
    }

    #[test]
    fn impossible_rows_are_rejected() {
        let rejected = |superblock: StoreSuperblock| StoreSuperblock::decode(&superblock.encode()).is_err();
        assert!(rejected(StoreSuperblock { data_devices: 2, ..sample() }));
        assert!(rejected(StoreSuperblock { parity_devices: 1, ..sample() }));
        assert!(rejected(StoreSuperblock { device: sample_of_several().device, ..sample() }));
        assert!(rejected(StoreSuperblock { data_devices: 2, ..sample_of_several() }), "columns of no power of two");
        assert!(rejected(StoreSuperblock { data_devices: 0, ..sample_of_several() }));
        assert!(rejected(StoreSuperblock { data_devices: 1, parity_devices: 0, ..sample_of_several() }));
    }

    #[test]
    fn copies_that_a_crash_left_different_are_reconciled() {
        let old = sample();
        let grown = StoreSuperblock { features: FEATURE_GROWN, segment_count: 300, ..sample() };
        assert_eq!((old.reconcile(&grown), grown.reconcile(&old)), (Some(grown.clone()), Some(grown.clone())));
        let again = StoreSuperblock { segment_count: 400, ..grown.clone() };
        assert_eq!((again.reconcile(&grown), grown.reconcile(&again)), (Some(again.clone()), Some(again)));
        let blobs = StoreSuperblock { features: FEATURE_BLOBS, ..sample() };
        let both = StoreSuperblock { features: FEATURE_BLOBS | FEATURE_GROWN, ..grown.clone() };
        assert_eq!(blobs.reconcile(&grown), Some(both));
        assert_eq!(
            old.reconcile(&StoreSuperblock { segment_count: 300, ..sample() }),
            None,
            "one that cannot have grown"
        );
        assert_eq!(old.reconcile(&StoreSuperblock { segment_count: 200, ..sample() }), None);
        assert_eq!(grown.reconcile(&StoreSuperblock { uuid: [1; 16], ..sample() }), None);
    }

    #[test]
    fn more_segments_than_their_table_can_have_are_rejected() {
        for segment_size in [64 << 10, 4 << 20, 1 << 30] {
            let of = |segment_count| StoreSuperblock { segment_size, segment_count, ..sample() };
            let most = of(8).segments_max();
            assert_eq!(StoreSuperblock::decode(&of(most).encode()), Ok(of(most)));
            assert!(StoreSuperblock::decode(&of(most + 1).encode()).is_err());
        }
    }

    #[test]
    fn the_bytes_of_version_1_stay() {
        let block = sample().encode();
        let golden = [
            &b"FOREBAY\x01\x01\0\0\0"[..],
            &block[12..16],
            &[0; 16],
            b"0123456789abcdef",
            &1_700_000_000u64.to_le_bytes(),
            &[0, 0x10, 0, 0, 0, 0, 0x40, 0, 0, 1, 0, 0, 1, 0, 0, 0],
        ]
        .concat();
        assert_eq!(block[..golden.len()], golden);
        assert!(block[golden.len()..].iter().all(|&byte| byte == 0));
    }

    #[test]
    fn every_flipped_bit_is_noticed() {
        let block = sample().encode();
        for bit in 0..BLOCK * 8 {
            let mut bad = block.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            assert!(StoreSuperblock::decode(&bad).is_err(), "bit {bit}");
        }
    }

    #[test]
    fn newer_ones_are_told_from_damaged_ones() {
        let mut newer = sample().encode();
        newer[8] = 3;
        seal(&mut newer, CRC_AT);
        assert!(matches!(StoreSuperblock::decode(&newer), Err(SuperblockError::Newer(_))));
        let featured = StoreSuperblock { features: FEATURES_KNOWN + 1, ..sample() }.encode();
        assert!(matches!(StoreSuperblock::decode(&featured), Err(SuperblockError::Newer(_))));
        assert_eq!(StoreSuperblock::decode(&[0; BLOCK]), Err(SuperblockError::NotAStore));
        assert!(matches!(StoreSuperblock::decode(b"FOR"), Err(SuperblockError::Damaged(_))));
    }
}
