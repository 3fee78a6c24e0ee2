//! Encoded example of each structure, byte for byte as specified in `docs/formats/store.md`.  A changed expectation is
//! a format change: it requires a feature bit or a new version instead.

use super::anchor::{Anchor, LogPosition, SLOTS};
use super::batch::{BatchHeader, ENTRY_ROOM, FIXED};
use super::blob::{BlobCodec, BlobHeader, BlobSlot};
use super::devices::{DeviceTable, PLACES, TABLE_MAX};
use super::entry::{StoreEntry, StoredBlob};
use super::key_table::{KEY_PLACES, KEY_TABLE_LEN, KeyTable};
use super::node::Node;
use super::onode::{CloneRecord, Onode};
use super::page::{self, MapSlot};
use super::policy;
use super::ranges::{self, RANGE_UNIT, RangeTable};
use super::superblock::{COPIES, FEATURE_GROWN, SEGMENTS_START, StoreSuperblock};
use super::{BLOCK, BlobPtr};

/// Decodes hexadecimal digits, with spaces between fields.
fn hex(text: &str) -> Vec<u8> {
    let digits: Vec<u32> = text.chars().filter_map(|c| c.to_digit(16)).collect();
    assert!(digits.len().is_multiple_of(2), "half a byte");
    digits.chunks(2).map(|pair| (pair[0] << 4 | pair[1]) as u8).collect()
}

/// Returns a block with the given beginning, zero-padded.
fn block(begin: &str) -> Vec<u8> {
    let mut out = hex(begin);
    out.resize(BLOCK, 0);
    out
}

#[test]
fn places() {
    assert_eq!(COPIES, [0, 65536]);
    assert_eq!(SLOTS, [[131072, 196608], [262144, 327680]]);
    assert_eq!((PLACES, TABLE_MAX), ([393216, 458752], 65536));
    assert_eq!((KEY_PLACES, KEY_TABLE_LEN), ([524288, 786432], 262144));
    assert_eq!(SEGMENTS_START, 1048576);
    assert_eq!((FIXED, ENTRY_ROOM), (72, 4024));
    assert_eq!((ranges::PLACES, ranges::TABLE_MAX, RANGE_UNIT), ([0, 65536], 65536, 1048576));
}

#[test]
fn superblock_of_several_devices() {
    let superblock = super::superblock::tests::sample_of_several();
    let golden = block(
        "464f5245 42415901 02000000 00000000 01000000 00000000 00000000 00000000
         30313233 34353637 38396162 63646566 00f15365 00000000 00100000 00003000 00010000 0300 0200
         61206465 76696365 27732055 5549442e 0400",
    );
    let encoded = superblock.encode();
    let with_crc = [&golden[..12], &encoded[12..16], &golden[16..]].concat();
    assert_eq!(encoded, with_crc);
    assert_eq!(StoreSuperblock::decode(&encoded), Ok(superblock));
}

#[test]
fn device_table() {
    let table = super::devices::tests::sample();
    let encoded = table.encode().expect("small");
    let device = |number: u8, rest: &str| format!("0{number}00 {rest} 0700 2f737276 2f64 3{number}");
    let golden = [
        "46424445 56544142 00000000 18010000 4d000000 00000000 05000000 00000000 0200 0100 10000000 0400 0400 02000000",
        &device(0, "00 00 0000 00000000 00000000 00000000 00000000 28000000 00000000 00000000 00000000"),
        &device(1, "01 00 0000 01010101 01010101 01010101 01010101 28000000 09000000 00000000 00000000"),
        &device(2, "00 00 0000 02020202 02020202 02020202 02020202 28000000 00000000 00000000 00000000"),
        &device(3, "02 01 0100 03030303 03030303 03030303 03030303 28000000 00000000 00000000 07000000"),
        "1e000000 0000 00000000 0100 00000000 0200 00000000",
        "0a000000 0000 1e000000 0200 1e000000 0100 1e000000",
    ]
    .concat();
    let golden = block(&golden);
    let with_crc = [&golden[..8], &encoded[8..12], &golden[12..]].concat();
    assert_eq!(encoded, with_crc);
    assert_eq!(DeviceTable::decode(&encoded, 77), Ok(table));
}

#[test]
fn range_table() {
    let table = ranges::tests::sample();
    let encoded = table.encode();
    let golden = block(
        "46425241 4e474553 00000000 79000000 01000000 03000000 30313233 34353637 38396162 63646566 05000000 00000000
         00001000 00000000 00000004 00000000 6400 0500 6f73642e 30
         00001004 00000000 00000002 00000000 6400 0500 6f73642e 31
         0000800c 00000000 00000001 00000000 2c01 0300 6c6f67",
    );
    let with_crc = [&golden[..8], &encoded[8..12], &golden[12..]].concat();
    assert_eq!(encoded, with_crc);
    assert_eq!(RangeTable::decode(&encoded), Ok(table));
}

#[test]
fn superblock_of_a_store_that_has_grown() {
    let superblock =
        StoreSuperblock { features: FEATURE_GROWN, segment_count: 0x0201, ..super::superblock::tests::sample() };
    let expected = block(
        "464f524542415901 02000000 3998f1d5 0800000000000000 0000000000000000 30313233343536373839616263646566 \
         00f1536500000000 00100000 00004000 01020000 0100 0000",
    );
    assert_eq!(superblock.encode(), expected);
    assert_eq!(StoreSuperblock::decode(&expected), Ok(superblock));
}

#[test]
fn anchor() {
    let anchor = Anchor {
        store: 0x0102_0304_0506_0708,
        generation: 0x11,
        epoch: 0x1213,
        redo: LogPosition { block: 0x2122, seq: 0x23 },
        redo_next_segment: 0x24,
        root: BlobPtr { addr: 0x31_0000, len: 0x32, crc: 0x3334_3536 },
        segments: BlobPtr { addr: 0x41_0000, len: 0x42, crc: 0x4344_4546 },
        next_oid: 0x51,
        snap_seq: 0x52,
        version: 0x53,
        objects: 0x54,
        user_bytes: 0x55,
        device_bytes: 0x56,
        clean: true,
    };
    let expected = block(
        "4642414e43484f52 62167581 01000000 0807060504030201 1100000000000000 1312000000000000 2221000000000000 \
         2300000000000000 0000310000000000 32000000 36353433 0000410000000000 42000000 46454443 24000000 00000000 \
         5100000000000000 5200000000000000 5300000000000000 5400000000000000 5500000000000000 5600000000000000",
    );
    assert_eq!(anchor.encode(), expected);
    assert_eq!(Anchor::decode(&expected, 0x0102_0304_0506_0708), Ok(anchor));
}

#[test]
fn batch_header() {
    let header = BatchHeader {
        store: 0x0102_0304_0506_0708,
        epoch: 0x11,
        seq: 0x12,
        block: 0x1314,
        durable_seq: 0x15,
        next_segment: 0x16,
        payload_blocks: 0x17,
        continues: true,
        settled: 12,
        entries: hex("0c000c00 0900000000000000"),
    };
    let expected = block(
        "46424c4f47424154 ba6fea4f 01000000 0807060504030201 1100000000000000 1200000000000000 1413000000000000 \
         1500000000000000 16000000 17000000 0c000000 0c000000 0c000c00 0900000000000000",
    );
    let mut encoded = vec![0xEE; BLOCK];
    header.encode(&mut encoded);
    assert_eq!(encoded, expected);
    assert_eq!(BatchHeader::decode(&expected), Ok(header));
}

const BLOB: StoredBlob = StoredBlob { start: 0x22, blocks: 0x1e, payload: 0x24, sectors: 0xfe, crc: 0x26 };

#[test]
fn entries() {
    let head = u64::MAX;
    let cases = [
        (
            StoreEntry::Create { oid: 0x21, key: 0, namespace: "ns".into(), name: "abc".into() },
            "01 00 1500 2100000000000000 0200 0300 6e73 616263",
        ),
        (
            StoreEntry::Create { oid: 0x21, key: 0x22, namespace: "ns".into(), name: "abc".into() },
            "14 00 1d00 2100000000000000 0200 0300 2200000000000000 6e73 616263",
        ),
        (
            StoreEntry::Write {
                oid: 0x21,
                start: 0x22,
                payload: 0x23,
                size: 0x24,
                version: 0x25,
                crcs: vec![0x26, 0x27],
            },
            "02 00 2c00 2100000000000000 22000000 23000000 2400000000000000 2500000000000000 26000000 27000000",
        ),
        (
            StoreEntry::Unmap { oid: 0x21, start: 0x22, count: 0x23, size: 0x24, version: 0x25 },
            "03 00 2400 2100000000000000 22000000 23000000 2400000000000000 2500000000000000",
        ),
        (StoreEntry::Remove { oid: 0x21, version: 0x22 }, "04 00 1400 2100000000000000 2200000000000000"),
        (
            StoreEntry::Clone { oid: 0x21, seq: 9, snaps: vec![9, 7] },
            "05 00 2400 2100000000000000 0900000000000000 0900000000000000 0700000000000000",
        ),
        (
            StoreEntry::CloneSnaps { oid: 0x21, clone: 9, snaps: vec![7] },
            "06 00 1c00 2100000000000000 0900000000000000 0700000000000000",
        ),
        (
            StoreEntry::Rollback { oid: 0x21, clone: 9, version: 0x22 },
            "07 00 1c00 2100000000000000 0900000000000000 2200000000000000",
        ),
        (
            StoreEntry::KvSet { oid: 0x21, of: head, key: b"key".to_vec(), value: b"value".to_vec() },
            "08 00 1e00 2100000000000000 ffffffffffffffff 0300 6b6579 76616c7565",
        ),
        (
            StoreEntry::KvSetLong { oid: 0x21, of: 9, key: b"key".to_vec(), at: 0x22, len: 0x23, crc: 0x24 },
            "09 00 2300 2100000000000000 0900000000000000 22000000 23000000 24000000 6b6579",
        ),
        (
            StoreEntry::KvRemove { oid: 0x21, of: head, key: b"key".to_vec() },
            "0a 00 1700 2100000000000000 ffffffffffffffff 6b6579",
        ),
        (
            StoreEntry::Relocate { oid: 0x21, start: 0x22, payload: 0x23, old: 0x24, crcs: vec![0x25] },
            "0b 00 2800 2100000000000000 22000000 23000000 2400000000000000 0000000000000000 25000000",
        ),
        (StoreEntry::SnapAllocate { snap: 9 }, "0c 00 0c00 0900000000000000"),
        (StoreEntry::SnapRemove { snap: 9, done: true }, "0d 00 0d00 0900000000000000 01"),
        (
            StoreEntry::Page { oid: 0x21, of: head, index: 0x22, at: 0x23, len: 0x24 },
            "0e 00 2000 2100000000000000 ffffffffffffffff 22000000 23000000 24000000",
        ),
        (
            StoreEntry::Node { level: 1, at: 0x22, len: 0x23, key: b"key".to_vec() },
            "0f 00 1000 01 22000000 23000000 6b6579",
        ),
        (StoreEntry::Segments { at: 0x22, len: 0x23 }, "10 00 0c00 22000000 23000000"),
        (StoreEntry::Checkpoint { record: b"record".to_vec() }, "0f 00 1300 ff 00000000 00000000 7265636f7264"),
        (
            StoreEntry::WriteBlob { oid: 0x21, blob: BLOB, size: 0x27, version: 0x28 },
            "11 00 2c00 2100000000000000 22000000 24000000 26000000 1e fe 0000 2700000000000000 2800000000000000",
        ),
        (
            StoreEntry::RelocateBlob { oid: 0x21, blob: BLOB, old: 0x8120_0000_0000_4061 },
            "12 00 2400 2100000000000000 22000000 24000000 26000000 1e fe 0000 6140000000002081",
        ),
        (
            StoreEntry::Relocate {
                oid: 0x21,
                start: 0x22,
                payload: 0x23,
                old: 0x8120_0000_0000_4061,
                crcs: vec![0x25],
            },
            "0b 00 2800 2100000000000000 22000000 23000000 6140000000002081 0000000000000000 25000000",
        ),
        (
            StoreEntry::Policy { namespace: "ns".into(), prefix: "abc.".into(), policy: vec![1, 2, 0, 0] },
            "13 00 1200 0200 0400 6e73 6162632e 01020000",
        ),
    ];
    for (entry, expected) in cases {
        let expected = hex(expected);
        let mut encoded = Vec::new();
        entry.encode(&mut encoded);
        assert_eq!(encoded, expected, "{entry:?}");
        assert_eq!(StoreEntry::decode_all(&expected), Ok(vec![entry]));
    }
}

#[test]
fn onode() {
    let onode = Onode {
        namespace: "ns".into(),
        name: "abc".into(),
        key: 0,
        exists: true,
        has_kv: true,
        size: 0x21,
        version: 0x22,
        snap_seq: 0x23,
        pages: vec![BlobPtr { addr: 0x31_0000, len: 0x32, crc: 0x33 }, BlobPtr::default()],
        clones: vec![CloneRecord {
            id: 9,
            snaps: vec![9, 7],
            size: 0x24,
            pages: vec![BlobPtr { addr: 0x41_0000, len: 0x42, crc: 0x43 }],
        }],
    };
    let expected = hex("01 03 0200 0300 0200 01000000 2100000000000000 2200000000000000 2300000000000000 6e73 616263 \
         0000310000000000 32000000 33000000 0000000000000000 00000000 00000000 \
         0900000000000000 2400000000000000 0200 0100 0900000000000000 0700000000000000 \
         0000410000000000 42000000 43000000");
    assert_eq!(onode.encode(), expected);
    assert_eq!(Onode::decode(&expected), Ok(onode.clone()));
    let encrypted = Onode { key: 0x25, pages: vec![], clones: vec![], ..onode };
    let expected = hex("01 07 0200 0300 0000 00000000 2100000000000000 2200000000000000 2300000000000000 6e73 616263 \
         2500000000000000");
    assert_eq!(encrypted.encode(), expected);
    assert_eq!(Onode::decode(&expected), Ok(encrypted));
}

#[test]
fn key_table() {
    let table = super::key_table::tests::sample();
    let key = |number: u8, prefix: &str| {
        format!("0{number}00000000000000 {prefix} {} 00000000", format!("0{number}").repeat(60))
    };
    let golden = [
        "46424b4559544142 00000000 f0000000 4d00000000000000 0700000000000000 0100 0000 02000000 0500000000000000",
        "30313233 34353637 38396162 63646566",
        &key(1, PREFIX_1),
        &key(4, PREFIX_4),
    ];
    let mut golden = hex(&golden.concat());
    golden.resize(KEY_TABLE_LEN, 0);
    let encoded = table.encode(77);
    let with_crc = [&golden[..8], &encoded[8..12], &golden[12..]].concat();
    assert_eq!(encoded, with_crc);
    assert_eq!(KeyTable::decode(&encoded, 77), Ok(Some(table)));
}

/// Beginning of the SHA-256 of a zero byte and `rbd_data.1.`.
const PREFIX_1: &str = "fc825961ff9b8e9c641399f898c61845";
/// Beginning of the SHA-256 of a zero byte and `rbd_data.4.`.
const PREFIX_4: &str = "ff1ba19628852a5497ab067018064bf2";

#[test]
fn map_page() {
    let slot = |block, crc| MapSlot { block, crc };
    let slots = [MapSlot::default(), slot(0x0102_0304_0506, 0x21), slot(0x0102_0304_0507, 0x22), slot(0x31, 0x23)];
    let expected = hex("0200 00 01 01 060504030201 21000000 22000000 00 03 00 310000000000 23000000");
    assert_eq!(page::encode(&slots), expected);
    assert_eq!(page::decode(&expected), Ok(slots.to_vec()));
}

#[test]
fn map_page_of_blobs() {
    let blob = BlobSlot { sector: 0x203, sectors: 0x12, index: 1 };
    assert_eq!(blob.location(), 0x8120_0000_0000_4061);
    let at = |index| MapSlot { block: blob.at(index).location(), crc: 0x21 };
    let slots = [MapSlot::default(), at(1), at(2), MapSlot { block: 0x31, crc: 0x23 }, at(4)];
    let expected = hex("0300 01 01 01 6140000000002081 21000000 00 03 00 310000000000 23000000 \
         01 04 00 6440000000002081 21000000");
    assert_eq!(page::encode(&slots), expected);
    assert_eq!(page::decode(&expected), Ok(slots.to_vec()));
}

#[test]
fn blob_header() {
    for (codec, byte) in [(BlobCodec::Deflate, "01"), (BlobCodec::Lz4, "02"), (BlobCodec::Zstd, "03")] {
        let header = BlobHeader { codec, blocks: 0x1e, length: 3 };
        let expected = hex(&format!("{byte} 1e 0000 03000000"));
        assert_eq!(header.encode(), expected);
        assert_eq!(BlobHeader::decode(&[&expected[..], b"abc\0"].concat()), Ok((header, &b"abc"[..])));
    }
}

#[test]
fn policies() {
    let cases =
        [("none", "01 00 00 00"), ("deflate:6", "01 01 06 00"), ("lz4", "01 02 00 00"), ("zstd:-7", "01 03 f9 00")];
    for (setting, expected) in cases {
        let policy = forebay_block::DataPolicy { compression: setting.parse().expect(setting) };
        assert_eq!(policy::encode(&policy), hex(expected), "{setting}");
        assert_eq!(policy::decode(&hex(expected)), Ok(policy));
    }
}

#[test]
fn tree_nodes() {
    let leaf = Node::Leaf(vec![(b"a"[..].into(), b"value"[..].into()), (b"bc"[..].into(), b""[..].into())]);
    let ptr = BlobPtr { addr: 0x31_0000, len: 0x32, crc: 0x33 };
    let inner = Node::Inner { level: 2, children: vec![(b""[..].into(), ptr), (b"key"[..].into(), ptr)] };
    let cases = [
        (leaf, "01 00 0200 0100 05000000 61 76616c7565 0200 00000000 6263"),
        (inner, "01 02 0200 0000 0000310000000000 32000000 33000000 0300 6b6579 0000310000000000 32000000 33000000"),
    ];
    for (node, expected) in cases {
        assert_eq!(node.encode(), hex(expected));
        assert_eq!(Node::decode(&hex(expected)), Ok(node));
    }
}

#[test]
fn segment_table() {
    let geometry = crate::segments::SegmentGeometry { segment_size: 64 << 10, segment_count: 3 };
    let bytes = hex("00100000 00000000 00000100");
    let table = crate::segments::LiveTable::decode(&bytes, &geometry).expect("a segment table");
    assert_eq!(table.all(), [4096, 0, 65536]);
    assert_eq!(table.encode(), bytes);
}

#[test]
fn tree_keys() {
    use crate::keys;
    let name = forebay_block::ObjectName::in_namespace("ns".into(), "abc");
    assert_eq!(keys::name(&name), hex("6e 0002 6e73 616263"));
    assert_eq!(keys::object(0x21), hex("6f 0000000000000021"));
    assert_eq!(keys::kv(0x21, u64::MAX, b"key"), hex("6b 0000000000000021 ffffffffffffffff 6b6579"));
    assert_eq!(keys::snap_object(9, 0x21), hex("6d 0000000000000009 0000000000000021"));
    assert_eq!(keys::snap_in_removal(9), hex("73 0000000000000009"));
    assert_eq!(keys::snap_removed(9), hex("72 0000000000000009"));
    assert_eq!(keys::policy("ns", "abc."), hex("70 0002 6e73 6162632e"));
    assert_eq!(keys::blob_counters(), hex("64"));
}
