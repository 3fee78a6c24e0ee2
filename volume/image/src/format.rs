//! What is stored of an image besides its data, byte for byte: `docs/formats/rbd-image.md`.

use std::fmt;
use std::time::Duration;

use forebay_block::{Error, ErrorKind, ObjectName, Result, SnapContext, SnapId};

/// The object that lists a pool's images.
pub(crate) const DIRECTORY: &str = "rbd_directory";
/// Longest image id in bytes; a longer one would not fit the data objects' prefix.
pub(crate) const ID_LEN_MAX: usize = 14;
/// The orders (binary logarithms of the object size) that RBD has.
pub(crate) const ORDERS: std::ops::RangeInclusive<u8> = 12..=25;

const NAME_PREFIX: &str = "name_";
const ID_PREFIX: &str = "id_";
/// What a snapshot's key begins with; 16 hexadecimal digits follow.
pub(crate) const SNAPSHOT_PREFIX: &str = "snapshot_";
const METADATA_PREFIX: &str = "metadata_";
const DATA_PREFIX: &str = "rbd_data.";

/// The object that holds the id of the image of that name.
pub(crate) fn id_object(name: &str) -> ObjectName {
    ObjectName::new(format!("rbd_id.{name}"))
}

/// The object that holds an image's metadata.
pub(crate) fn header_object(id: &str) -> ObjectName {
    ObjectName::new(format!("rbd_header.{id}"))
}

/// What the names of an image's data objects begin with.
pub(crate) fn object_prefix(id: &str) -> String {
    format!("{DATA_PREFIX}{id}")
}

/// The directory's key for a name.
pub(crate) fn name_key(name: &str) -> Vec<u8> {
    format!("{NAME_PREFIX}{name}").into_bytes()
}

/// The directory's key for an id.
pub(crate) fn id_key(id: &str) -> Vec<u8> {
    format!("{ID_PREFIX}{id}").into_bytes()
}

/// What all keys of names begin with.
pub(crate) fn name_keys() -> &'static [u8] {
    NAME_PREFIX.as_bytes()
}

/// The name in a directory key; `None` when it is not text, and so cannot be asked for.
pub(crate) fn name_of_key(key: &[u8]) -> Option<String> {
    key.strip_prefix(NAME_PREFIX.as_bytes()).and_then(|name| String::from_utf8(name.to_vec()).ok())
}

/// The header's key for a value of the image's metadata.
pub(crate) fn metadata_key(key: &str) -> Vec<u8> {
    format!("{METADATA_PREFIX}{key}").into_bytes()
}

/// Letters and digits, not too many.
pub(crate) fn is_valid_id(id: &str) -> bool {
    (1..=ID_LEN_MAX).contains(&id.len()) && id.bytes().all(|byte| byte.is_ascii_alphanumeric())
}

/// A string as Ceph encodes it: its length in four bytes, little-endian, then its bytes.
pub(crate) fn encode_string(text: &str) -> Vec<u8> {
    let mut out = (text.len() as u32).to_le_bytes().to_vec();
    out.extend_from_slice(text.as_bytes());
    out
}

/// A string that fills `bytes`.
pub(crate) fn decode_string(bytes: &[u8]) -> Option<String> {
    let (len, rest) = bytes.split_first_chunk::<4>()?;
    let text = rest.get(..usize::try_from(u32::from_le_bytes(*len)).ok()?)?;
    String::from_utf8(text.to_vec()).ok()
}

fn encode_time(time: Duration) -> Vec<u8> {
    // The field is 32 bits wide, and unsigned: good until 2106.
    let seconds = u32::try_from(time.as_secs()).unwrap_or(u32::MAX);
    [seconds.to_le_bytes(), time.subsec_nanos().to_le_bytes()].concat()
}

fn decode_time(bytes: &[u8]) -> Option<Duration> {
    let (seconds, rest) = bytes.split_first_chunk::<4>()?;
    let nanos = u32::from_le_bytes(*rest.first_chunk::<4>()?);
    Some(Duration::from_secs(u32::from_le_bytes(*seconds).into()) + Duration::from_nanos(nanos.into()))
}

fn decode_u64(bytes: &[u8]) -> Option<u64> {
    bytes.first_chunk::<8>().map(|bytes| u64::from_le_bytes(*bytes))
}

/// Feature bits of an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Features(pub u64);

impl Features {
    /// It may be cloned and be a clone.
    pub const LAYERING: Features = Features(1);
    /// Bits and their names, lowest first.
    const NAMES: [&str; 12] = [
        "layering",
        "striping",
        "exclusive-lock",
        "object-map",
        "fast-diff",
        "deep-flatten",
        "journaling",
        "data-pool",
        "operations",
        "migrating",
        "non-primary",
        "dirty-cache",
    ];
    /// Those with which an image can be written.
    const WRITABLE: u64 = 1;
    /// Those with which an image can be read: besides, exclusive-lock, object-map, fast-diff, deep-flatten,
    /// journaling, operations and non-primary, none of which changes where the bytes of an image are.
    const READABLE: u64 = Self::WRITABLE | 0b101_0111_1100;

    /// The names of the bits; of an unknown one, its number.
    pub fn names(self) -> Vec<String> {
        let bits = (0..64).filter(|bit| self.0 >> bit & 1 == 1);
        bits.map(|bit| Self::NAMES.get(bit).map_or_else(|| format!("bit {bit}"), |name| (*name).to_owned())).collect()
    }

    /// Those of these that keep an image from being opened here.
    pub(crate) fn unsupported(self, read_only: bool) -> Features {
        Features(self.0 & !if read_only { Self::READABLE } else { Self::WRITABLE })
    }
}

impl fmt::Display for Features {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.names().join(", "))
    }
}

/// An image's metadata, the keys of its header object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) size: u64,
    pub(crate) order: u8,
    pub(crate) features: Features,
    pub(crate) object_prefix: String,
    pub(crate) snap_seq: u64,
    pub(crate) flags: u64,
    pub(crate) op_features: u64,
    pub(crate) created: Option<Duration>,
    pub(crate) accessed: Option<Duration>,
    pub(crate) modified: Option<Duration>,
    pub(crate) has_parent: bool,
    /// Newest first.
    pub(crate) snaps: Vec<SnapId>,
}

impl Header {
    /// The keys that [`decode`](Self::decode) wants, in its order.
    pub(crate) const KEYS: [&str; 11] = [
        "size",
        "order",
        "features",
        "object_prefix",
        "snap_seq",
        "flags",
        "op_features",
        "create_timestamp",
        "access_timestamp",
        "modify_timestamp",
        "parent",
    ];

    /// Of an image that is being created at `now` (since 1970-01-01T00:00:00Z).
    pub(crate) fn new(id: &str, size: u64, order: u8, features: Features, now: Duration) -> Self {
        Self {
            size,
            order,
            features,
            object_prefix: object_prefix(id),
            snap_seq: 0,
            flags: 0,
            op_features: 0,
            created: Some(now),
            accessed: Some(now),
            modified: Some(now),
            has_parent: false,
            snaps: Vec::new(),
        }
    }

    /// The keys of a header that is created, in the order in which a key-value map sorts them.
    pub(crate) fn encode(&self) -> Vec<(Vec<u8>, Vec<u8>)> {
        let time = |time: Option<Duration>| encode_time(time.unwrap_or_default());
        [
            ("access_timestamp", time(self.accessed)),
            ("create_timestamp", time(self.created)),
            ("features", self.features.0.to_le_bytes().to_vec()),
            ("modify_timestamp", time(self.modified)),
            ("object_prefix", encode_string(&self.object_prefix)),
            ("order", vec![self.order]),
            ("size", self.size.to_le_bytes().to_vec()),
            ("snap_seq", self.snap_seq.to_le_bytes().to_vec()),
        ]
        .map(|(key, value)| (key.as_bytes().to_vec(), value))
        .to_vec()
    }

    /// The keys and value that set a size.
    pub(crate) fn encode_size(size: u64) -> (Vec<u8>, Vec<u8>) {
        (b"size".to_vec(), size.to_le_bytes().to_vec())
    }

    /// From the values of [`KEYS`](Self::KEYS) and the keys of the snapshots.
    pub(crate) fn decode(values: &[Option<Vec<u8>>], snapshot_keys: &[Vec<u8>]) -> Result<Self> {
        let value = |at: usize| values.get(at).and_then(|value| value.as_deref());
        let bad = |at: usize| {
            let what = if value(at).is_none() { "missing" } else { "malformed" };
            Error::new(ErrorKind::Corrupt, format!("header key '{}' is {what}", Self::KEYS[at]))
        };
        let number = |at: usize| value(at).and_then(decode_u64).ok_or_else(|| bad(at));
        let optional = |at: usize| if value(at).is_some() { number(at) } else { Ok(0) };
        let time = |at: usize| value(at).map(|bytes| decode_time(bytes).ok_or_else(|| bad(at))).transpose();
        let order = match value(1) {
            Some(&[order]) if ORDERS.contains(&order) => order,
            _ => return Err(bad(1)),
        };
        let object_prefix = value(3).and_then(decode_string).ok_or_else(|| bad(3))?;
        // 17 bytes follow it in the name of a data object.
        if object_prefix.is_empty() || object_prefix.len() > ObjectName::LEN_MAX - 17 {
            return Err(bad(3));
        }
        let mut snaps = snapshot_keys.iter().map(|key| decode_snapshot_key(key)).collect::<Result<Vec<_>>>()?;
        snaps.sort_unstable_by(|a, b| b.cmp(a));
        let header = Self {
            size: number(0)?,
            order,
            features: Features(number(2)?),
            object_prefix,
            snap_seq: number(4)?,
            flags: optional(5)?,
            op_features: optional(6)?,
            created: time(7)?,
            accessed: time(8)?,
            modified: time(9)?,
            has_parent: value(10).is_some(),
            snaps,
        };
        if !header.snap_context().is_valid() {
            return Err(Error::new(ErrorKind::Corrupt, "a snapshot is newer than header key 'snap_seq' says"));
        }
        Ok(header)
    }

    /// What writes must keep.
    pub(crate) fn snap_context(&self) -> SnapContext {
        SnapContext { seq: self.snap_seq, snaps: self.snaps.clone() }
    }

    /// Bytes an object.
    pub(crate) fn object_size(&self) -> u64 {
        1 << self.order
    }
}

fn decode_snapshot_key(key: &[u8]) -> Result<SnapId> {
    let digits = key.strip_prefix(SNAPSHOT_PREFIX.as_bytes()).and_then(|digits| std::str::from_utf8(digits).ok());
    let id = digits.and_then(|digits| u64::from_str_radix(digits, 16).ok());
    id.map(SnapId).ok_or_else(|| {
        Error::new(ErrorKind::Corrupt, format!("'{}' is no snapshot's key", String::from_utf8_lossy(key)))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As cls_rbd's `create` writes it, for `rbd create --size 10G` with layering only.
    #[test]
    fn a_created_header_byte_for_byte() {
        let now = Duration::new(0x6512_3456, 0x1234_5678);
        let header = Header::new("10226b8b4567", 10 << 30, 22, Features::LAYERING, now);
        let time: &[u8] = &[0x56, 0x34, 0x12, 0x65, 0x78, 0x56, 0x34, 0x12];
        let golden: [(&str, &[u8]); 8] = [
            ("access_timestamp", time),
            ("create_timestamp", time),
            ("features", &[1, 0, 0, 0, 0, 0, 0, 0]),
            ("modify_timestamp", time),
            ("object_prefix", b"\x15\0\0\0rbd_data.10226b8b4567"),
            ("order", &[22]),
            ("size", &[0, 0, 0, 0x80, 2, 0, 0, 0]),
            ("snap_seq", &[0; 8]),
        ];
        let golden = golden.map(|(key, value)| (key.as_bytes().to_vec(), value.to_vec()));
        assert_eq!(header.encode(), golden);

        let values =
            Header::KEYS.map(|key| golden.iter().find(|pair| pair.0 == key.as_bytes()).map(|pair| pair.1.clone()));
        assert_eq!(Header::decode(&values, &[]).expect("what was encoded"), header);
    }

    #[test]
    fn names_of_keys_and_objects() {
        assert_eq!(name_key("vm-1"), b"name_vm-1");
        assert_eq!(id_key("10226b8b4567"), b"id_10226b8b4567");
        assert_eq!(name_of_key(b"name_vm-1").as_deref(), Some("vm-1"));
        assert_eq!(name_of_key(b"id_x"), None);
        assert_eq!(encode_string("10226b8b4567"), b"\x0c\x00\x00\x0010226b8b4567");
        assert_eq!(id_object("vm-1").name(), "rbd_id.vm-1");
        assert_eq!(header_object("10226b8b4567").name(), "rbd_header.10226b8b4567");
    }

    #[test]
    fn strings_that_do_not_fit_are_refused() {
        assert_eq!(decode_string(b"\x02\0\0\0ab").as_deref(), Some("ab"));
        for bad in [&b""[..], b"\x02\0\0", b"\x03\0\0\0ab", b"\xff\xff\xff\xffab", b"\x01\0\0\0\xff"] {
            assert_eq!(decode_string(bad), None, "{bad:?}");
        }
    }

    #[test]
    fn damaged_headers_are_refused() {
        let good = Header::new("a1", 1 << 20, 16, Features::LAYERING, Duration::ZERO).encode();
        let values = |change: &dyn Fn(&mut Vec<Option<Vec<u8>>>)| {
            let mut values: Vec<_> = Header::KEYS
                .iter()
                .map(|key| good.iter().find(|p| p.0 == key.as_bytes()).map(|p| p.1.clone()))
                .collect();
            change(&mut values);
            Header::decode(&values, &[]).map_err(|error| error.kind())
        };
        assert!(values(&|_| {}).is_ok());
        for at in 0..5 {
            assert_eq!(values(&|values| values[at] = None), Err(ErrorKind::Corrupt), "without {}", Header::KEYS[at]);
            assert_eq!(values(&|values| values[at] = Some(vec![])), Err(ErrorKind::Corrupt));
        }
        for order in [0, 11, 26, 64, 255] {
            assert_eq!(values(&|values| values[1] = Some(vec![order])), Err(ErrorKind::Corrupt), "order {order}");
        }
        assert_eq!(values(&|values| values[3] = Some(encode_string(""))), Err(ErrorKind::Corrupt));
        assert_eq!(values(&|values| values[3] = Some(encode_string(&"x".repeat(1020)))), Err(ErrorKind::Corrupt));
        assert_eq!(values(&|values| values[7] = Some(vec![1, 2, 3])), Err(ErrorKind::Corrupt));
    }

    #[test]
    fn snapshots_come_newest_first() {
        let mut values: Vec<_> = Header::KEYS.iter().map(|_| None).collect();
        let header = Header::new("a1", 1, 22, Features::LAYERING, Duration::ZERO);
        for (key, value) in header.encode() {
            let at = Header::KEYS.iter().position(|known| known.as_bytes() == key).expect("a known key");
            values[at] = Some(value);
        }
        values[4] = Some(0x10u64.to_le_bytes().to_vec());
        let keys = [&b"snapshot_0000000000000004"[..], b"snapshot_0000000000000010"].map(<[u8]>::to_vec);
        let decoded = Header::decode(&values, &keys).expect("a good header");
        assert_eq!(decoded.snap_context(), SnapContext { seq: 16, snaps: vec![SnapId(16), SnapId(4)] });
        let newer = [b"snapshot_0000000000000011".to_vec()];
        assert_eq!(Header::decode(&values, &newer).map_err(|error| error.kind()), Err(ErrorKind::Corrupt));
        let odd = [b"snapshot_zz".to_vec()];
        assert_eq!(Header::decode(&values, &odd).map_err(|error| error.kind()), Err(ErrorKind::Corrupt));
    }

    #[test]
    fn features_have_names() {
        assert_eq!(Features(0b1101).to_string(), "layering, exclusive-lock, object-map");
        assert_eq!(Features(1 << 40).to_string(), "bit 40");
        assert_eq!(Features(0b1101).unsupported(false), Features(0b1100));
        assert_eq!(Features(0b1101).unsupported(true), Features(0));
        // Striping, a data pool, migration and a dirty cache change where the bytes are.
        for bit in [1, 7, 9, 11, 12, 63] {
            assert_eq!(Features(1 << bit).unsupported(true), Features(1 << bit));
        }
    }
}
