//! RBD metadata of an image, byte for byte: `docs/formats/rbd-image.md`.

use std::fmt;
use std::rc::Rc;
use std::time::Duration;

use forebay_block::{Error, ErrorKind, ObjectName, Result, SnapContext, SnapId};

use crate::info::Striping;
use crate::wire::snapshot::{Parent, Snapshot};
use crate::wire::{CephReader, CephWriter};

/// Object that lists the images of a pool.
pub(crate) const DIRECTORY: &str = "rbd_directory";
/// Object that lists the groups of a pool.
pub(crate) const GROUP_DIRECTORY: &str = "rbd_group_directory";
/// Name of the object that lists the images in the trash.
pub(crate) const TRASH: &str = "rbd_trash";
/// Name of the object that lists a pool's namespaces.
pub(crate) const NAMESPACES: &str = "rbd_namespace";
/// Longest image id in bytes; a longer one would not fit the data objects' prefix.
pub(crate) const ID_LEN_MAX: usize = 14;
/// Longest id of a group in bytes: librbd's are the number of a client and a random one, in hexadecimal digits.
pub(crate) const GROUP_ID_LEN_MAX: usize = 32;
/// Orders (binary logarithms of the object size) that RBD supports.
pub(crate) const ORDERS: std::ops::RangeInclusive<u8> = 12..=25;

/// Directory key of a namespace's state: whether it admits new images.
pub(crate) const NAMESPACE_STATE: &[u8] = b"state";
/// State of a namespace that admits new images.
pub(crate) const NAMESPACE_READY: &[u8] = &[0];

const NAME_PREFIX: &str = "name_";
const ID_PREFIX: &str = "id_";
/// Prefix of a snapshot's key, before 16 hexadecimal digits.
pub(crate) const SNAPSHOT_PREFIX: &str = "snapshot_";
/// Prefix of the keys of metadata values.
pub(crate) const METADATA_PREFIX: &str = "metadata_";
const DATA_PREFIX: &str = "rbd_data.";

/// Returns the name of the object that holds the id of the image of that name.
pub(crate) fn id_object(namespace: &Rc<str>, name: &str) -> ObjectName {
    ObjectName::in_namespace(namespace.clone(), format!("rbd_id.{name}"))
}

/// Returns the name of an image's header object, which holds its metadata.
pub(crate) fn header_object(namespace: &Rc<str>, id: &str) -> ObjectName {
    ObjectName::in_namespace(namespace.clone(), format!("rbd_header.{id}"))
}

/// Returns the name of the object map of the head, or of a snapshot.
pub(crate) fn map_object(namespace: &Rc<str>, id: &str, snap: Option<SnapId>) -> ObjectName {
    let name = match snap {
        Some(snap) => format!("rbd_object_map.{id}.{:016x}", snap.0),
        None => format!("rbd_object_map.{id}"),
    };
    ObjectName::in_namespace(namespace.clone(), name)
}

/// Returns the name of the object that lists the v1 clones of a pool's images.
pub(crate) fn children_object(namespace: &Rc<str>) -> ObjectName {
    ObjectName::in_namespace(namespace.clone(), "rbd_children")
}

/// Returns the name prefix of an image's data objects.
pub(crate) fn object_prefix(id: &str) -> String {
    format!("{DATA_PREFIX}{id}")
}

/// Returns the name prefix of the data objects of an image in `pool` whose data is in another pool.
pub(crate) fn object_prefix_elsewhere(pool: i64, id: &str) -> String {
    format!("{DATA_PREFIX}{pool}.{id}")
}

/// Returns the directory key of a name.
pub(crate) fn name_key(name: &str) -> Vec<u8> {
    format!("{NAME_PREFIX}{name}").into_bytes()
}

/// Returns the key of an id, in the directories of images, of groups and of the trash.
pub(crate) fn id_key(id: &str) -> Vec<u8> {
    format!("{ID_PREFIX}{id}").into_bytes()
}

/// Returns the prefix of all id keys.
pub(crate) fn id_keys() -> &'static [u8] {
    ID_PREFIX.as_bytes()
}

/// Returns the id in a key; `None` if it is not that of an id.
pub(crate) fn id_of_key(key: &[u8]) -> Option<String> {
    let id = key.strip_prefix(ID_PREFIX.as_bytes()).and_then(|id| String::from_utf8(id.to_vec()).ok());
    id.filter(|id| is_valid_id(id))
}

/// Returns the prefix of all name keys.
pub(crate) fn name_keys() -> &'static [u8] {
    NAME_PREFIX.as_bytes()
}

/// Returns the name in a directory key; `None` if it is not UTF-8, and so cannot be opened by name.
pub(crate) fn name_of_key(key: &[u8]) -> Option<String> {
    key.strip_prefix(NAME_PREFIX.as_bytes()).and_then(|name| String::from_utf8(name.to_vec()).ok())
}

/// Returns the header key of a metadata value of the image.
pub(crate) fn metadata_key(key: &str) -> Vec<u8> {
    format!("{METADATA_PREFIX}{key}").into_bytes()
}

/// Returns the header key of the clones of version 2 of a snapshot.
pub(crate) fn children_key(id: SnapId) -> Vec<u8> {
    format!("snap_children_{:016x}", id.0).into_bytes()
}

/// Returns the prefix of the header keys of metadata values.
pub(crate) fn metadata_keys() -> &'static [u8] {
    METADATA_PREFIX.as_bytes()
}

/// Returns the header key of a snapshot.
pub(crate) fn snapshot_key(id: SnapId) -> Vec<u8> {
    format!("{SNAPSHOT_PREFIX}{:016x}", id.0).into_bytes()
}

/// Returns whether an id is 1 to [`ID_LEN_MAX`] ASCII letters and digits.
pub(crate) fn is_valid_id(id: &str) -> bool {
    (1..=ID_LEN_MAX).contains(&id.len()) && id.bytes().all(|byte| byte.is_ascii_alphanumeric())
}

/// Returns whether the id of a group, or of a snapshot of one, is 1 to [`GROUP_ID_LEN_MAX`] ASCII letters and digits.
pub(crate) fn is_valid_group_id(id: &str) -> bool {
    (1..=GROUP_ID_LEN_MAX).contains(&id.len()) && id.bytes().all(|byte| byte.is_ascii_alphanumeric())
}

/// Encodes a string as Ceph does: its length as little-endian `u32`, then its bytes.
pub(crate) fn encode_string(text: &str) -> Vec<u8> {
    let mut out = (text.len() as u32).to_le_bytes().to_vec();
    out.extend_from_slice(text.as_bytes());
    out
}

/// Decodes a Ceph string at the start of `bytes`; `None` if it is truncated or not UTF-8.
pub(crate) fn decode_string(bytes: &[u8]) -> Option<String> {
    let (len, rest) = bytes.split_first_chunk::<4>()?;
    let text = rest.get(..usize::try_from(u32::from_le_bytes(*len)).ok()?)?;
    String::from_utf8(text.to_vec()).ok()
}

fn decode_u64(bytes: &[u8]) -> Option<u64> {
    bytes.first_chunk::<8>().map(|bytes| u64::from_le_bytes(*bytes))
}

/// Feature bits of an image.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ImageFeatures(pub u64);

impl ImageFeatures {
    /// Clones of the image are supported, and it may be a clone.
    pub const LAYERING: ImageFeatures = ImageFeatures(1);
    /// Bytes may be distributed over several objects, as the header says.
    pub const STRIPING: ImageFeatures = ImageFeatures(1 << 1);
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
    /// A single client writes at a time.
    pub const EXCLUSIVE_LOCK: ImageFeatures = ImageFeatures(1 << 2);
    /// An object map records which objects exist.
    pub const OBJECT_MAP: ImageFeatures = ImageFeatures(1 << 3);
    /// The object map also records which objects changed since the newest snapshot.
    pub const FAST_DIFF: ImageFeatures = ImageFeatures(1 << 4);
    /// Copy-up from the parent also fills the clone's snapshots.
    pub const DEEP_FLATTEN: ImageFeatures = ImageFeatures(1 << 5);
    /// Data is in another pool than the metadata.
    pub const DATA_POOL: ImageFeatures = ImageFeatures(1 << 7);
    /// The header has `op_features`. Set and cleared with them, never by users.
    pub(crate) const OPERATION_LIST: ImageFeatures = ImageFeatures(1 << 8);
    /// Default features of RBD: layering, exclusive-lock, object-map, fast-diff, deep-flatten. Used for new images in
    /// a shared pool.
    pub const RBD_DEFAULT: ImageFeatures = ImageFeatures(0b11_1101);
    /// Features supported for writing in an unshared pool: layering, striping, deep-flatten, and operations, which flags
    /// newer entries in the header.
    const WRITABLE: u64 = 0b1_0010_0011;
    /// Features supported for writing in a shared pool: additionally exclusive-lock, object-map, fast-diff,
    /// data-pool.
    const WRITABLE_SHARED: u64 = Self::WRITABLE | 0b1001_1100;
    /// Features supported for reading, but not always for writing: exclusive-lock, object-map, fast-diff, journaling,
    /// non-primary. None of them changes the location of data.
    const READABLE: u64 = 0b100_0101_1100;
    /// Bits of `op_features` that do not affect reads and writes: clone-parent and clone-child (v2 clones), groups,
    /// snapshots in the trash.
    pub(crate) const OPERATIONS: u64 = 0b1111;

    /// Returns the names of the bits; unknown ones as `bit N`.
    pub fn names(self) -> Vec<String> {
        let bits = (0..64).filter(|bit| self.0 >> bit & 1 == 1);
        bits.map(|bit| Self::NAMES.get(bit).map_or_else(|| format!("bit {bit}"), |name| (*name).to_owned())).collect()
    }

    /// Returns the features of these names.
    ///
    /// # Errors
    /// The first name that no feature has.
    pub fn of_names<'a>(names: impl Iterator<Item = &'a str>) -> std::result::Result<Self, &'a str> {
        let mut features = Self::default();
        for name in names {
            let bit = Self::NAMES.iter().position(|known| *known == name).ok_or(name)?;
            features.0 |= 1 << bit;
        }
        Ok(features)
    }

    /// Returns the feature of that name.
    pub fn of_name(name: &str) -> Option<ImageFeatures> {
        Self::NAMES.iter().position(|known| *known == name).map(|bit| ImageFeatures(1 << bit))
    }

    /// Returns the subset of these features that prevents opening an image here.
    pub(crate) fn unsupported(self, read_only: bool, shared: bool) -> ImageFeatures {
        let writable = if shared { Self::WRITABLE_SHARED } else { Self::WRITABLE };
        ImageFeatures(self.0 & !(writable | if read_only { Self::READABLE } else { 0 }))
    }

    /// Returns whether all of `those` are set.
    pub fn has(self, those: ImageFeatures) -> bool {
        self.0 & those.0 == those.0
    }
}

impl fmt::Display for ImageFeatures {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.names().join(", "))
    }
}

/// Metadata of an image: the keys of its header object.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ImageHeader {
    pub(crate) size: u64,
    pub(crate) order: u8,
    /// Striping; `None` without that feature.
    pub(crate) striping: Option<Striping>,
    pub(crate) features: ImageFeatures,
    pub(crate) object_prefix: String,
    pub(crate) snap_seq: u64,
    pub(crate) flags: u64,
    pub(crate) op_features: u64,
    pub(crate) created: Option<Duration>,
    pub(crate) accessed: Option<Duration>,
    pub(crate) modified: Option<Duration>,
    /// Pool of the data, if it is another than that of the metadata.
    pub(crate) data_pool: Option<i64>,
    /// Raw value of the key `parent`, and its decoded form.
    pub(crate) parent: Option<(Vec<u8>, Parent)>,
    /// Snapshots, newest first.
    pub(crate) snapshots: Vec<Snapshot>,
}

impl ImageHeader {
    /// Header keys that [`decode`](Self::decode) takes, in its order.
    pub(crate) const KEYS: [&str; 14] = [
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
        "data_pool_id",
        "stripe_unit",
        "stripe_count",
    ];

    /// Returns the header of an image created at `now` (since 1970-01-01T00:00:00Z).
    pub(crate) fn new(id: &str, size: u64, order: u8, features: ImageFeatures, now: Duration) -> Self {
        Self {
            size,
            order,
            striping: None,
            features,
            object_prefix: object_prefix(id),
            snap_seq: 0,
            flags: 0,
            op_features: 0,
            created: Some(now),
            accessed: Some(now),
            modified: Some(now),
            data_pool: None,
            parent: None,
            snapshots: Vec::new(),
        }
    }

    /// Returns the key-value pairs of a new header, sorted by key.
    pub(crate) fn encode(&self) -> Vec<(Vec<u8>, Vec<u8>)> {
        let time = |time: Option<Duration>| CephWriter::new().time(time.unwrap_or_default()).done();
        let data_pool = self.data_pool.map(|pool| ("data_pool_id", pool.to_le_bytes().to_vec()));
        let mut keys = vec![("access_timestamp", time(self.accessed)), ("create_timestamp", time(self.created))];
        keys.extend(data_pool);
        keys.extend([
            ("features", self.features.0.to_le_bytes().to_vec()),
            ("modify_timestamp", time(self.modified)),
            ("object_prefix", encode_string(&self.object_prefix)),
        ]);
        keys.extend((self.op_features != 0).then(|| ("op_features", self.op_features.to_le_bytes().to_vec())));
        keys.push(("order", vec![self.order]));
        keys.extend(self.parent.iter().map(|(stored, _)| ("parent", stored.clone())));
        keys.extend([("size", self.size.to_le_bytes().to_vec()), ("snap_seq", self.snap_seq.to_le_bytes().to_vec())]);
        if let Some(Striping { unit, count }) = self.striping {
            keys.extend([("stripe_count", count.to_le_bytes().to_vec()), ("stripe_unit", unit.to_le_bytes().to_vec())]);
        }
        keys.into_iter().map(|(key, value)| (key.as_bytes().to_vec(), value)).collect()
    }

    /// Returns the key and value that set the size.
    pub(crate) fn encode_size(size: u64) -> (Vec<u8>, Vec<u8>) {
        (b"size".to_vec(), size.to_le_bytes().to_vec())
    }

    /// Decodes the values of [`KEYS`](Self::KEYS), and the key-value pairs of the snapshots. `Corrupt` if any is
    /// malformed.
    pub(crate) fn decode(values: &[Option<Vec<u8>>], snapshots: &[(Vec<u8>, Vec<u8>)]) -> Result<Self> {
        let value = |at: usize| values.get(at).and_then(|value| value.as_deref());
        let bad = |at: usize| {
            let what = if value(at).is_none() { "missing" } else { "malformed" };
            Error::new(ErrorKind::Corrupt, format!("header key '{}' is {what}", Self::KEYS[at]))
        };
        let number = |at: usize| value(at).and_then(decode_u64).ok_or_else(|| bad(at));
        let optional = |at: usize| if value(at).is_some() { number(at) } else { Ok(0) };
        let time = |at: usize| value(at).map(|bytes| CephReader::new(bytes).time().ok_or_else(|| bad(at))).transpose();
        let order = match value(1) {
            Some(&[order]) if ORDERS.contains(&order) => order,
            _ => return Err(bad(1)),
        };
        let object_prefix = value(3).and_then(decode_string).ok_or_else(|| bad(3))?;
        // The name of a data object appends 17 bytes to the prefix.
        if object_prefix.is_empty() || object_prefix.len() > ObjectName::LEN_MAX - 17 {
            return Err(bad(3));
        }
        let mut snapshots = snapshots.iter().map(decode_snapshot).collect::<Result<Vec<_>>>()?;
        snapshots.sort_unstable_by_key(|snapshot| std::cmp::Reverse(snapshot.id));
        let parent = match value(10) {
            Some(bytes) => Some((bytes.to_vec(), Parent::decode(bytes).ok_or_else(|| bad(10))?)),
            None => None,
        };
        let data_pool = value(11).map(|bytes| decode_u64(bytes).ok_or_else(|| bad(11))).transpose()?;
        let features = ImageFeatures(number(2)?);
        let striping = match features.has(ImageFeatures::STRIPING) {
            // Old clients set the feature without the keys, for objects one after the other.
            true => {
                let given = |at: usize, default: u64| if value(at).is_some() { number(at) } else { Ok(default) };
                Some(Striping { unit: given(12, 1 << order)?, count: given(13, 1)? })
            }
            false => None,
        };
        if striping.is_some_and(|striping| !striping.is_consistent(1 << order)) {
            return Err(bad(12));
        }
        let header = Self {
            size: number(0)?,
            order,
            striping,
            features,
            object_prefix,
            snap_seq: number(4)?,
            flags: optional(5)?,
            op_features: optional(6)?,
            created: time(7)?,
            accessed: time(8)?,
            modified: time(9)?,
            data_pool: data_pool.map(u64::cast_signed),
            parent: parent.filter(|(_, parent)| parent.is_there()),
            snapshots,
        };
        if !header.snap_context().is_valid() {
            return Err(Error::new(ErrorKind::Corrupt, "a snapshot is newer than header key 'snap_seq' says"));
        }
        Ok(header)
    }

    /// Returns the snapshot context for writes.
    pub(crate) fn snap_context(&self) -> SnapContext {
        SnapContext { seq: self.snap_seq, snaps: self.snapshots.iter().map(|snapshot| snapshot.id).collect() }
    }

    /// Flag: the object maps are invalid.
    pub(crate) const MAP_INVALID: u64 = 1;
    /// Flag: the fast-diff information is invalid.
    pub(crate) const FAST_DIFF_INVALID: u64 = 2;

    /// Returns the key `parent`, its old value, and its new value with the head's overlap set to `overlap` bytes;
    /// `None` without a parent.
    pub(crate) fn encode_overlap(&self, overlap: u64) -> Option<(Vec<u8>, Vec<u8>, Vec<u8>)> {
        let (stored, parent) = self.parent.as_ref()?;
        let changed = Parent { overlap: Some(overlap), ..parent.clone() };
        Some((b"parent".to_vec(), stored.clone(), changed.encode_like(stored)))
    }

    /// Returns the header with bits of `op_features` set and cleared, and the feature `operations` with them.
    pub(crate) fn with_operations(mut self, set: u64, clear: u64) -> Self {
        self.op_features = self.op_features & !clear | set;
        let operations = ImageFeatures::OPERATION_LIST.0;
        let others = self.features.0 & !operations;
        self.features = ImageFeatures(if self.op_features == 0 { others } else { others | operations });
        self
    }

    /// Returns the object size in bytes.
    pub(crate) fn object_size(&self) -> u64 {
        1 << self.order
    }

    /// Returns the striping, that of an image without the feature too.
    pub(crate) fn striping_or_none(&self) -> Striping {
        self.striping.unwrap_or(Striping::none(self.object_size()))
    }
}

fn decode_snapshot((key, value): &(Vec<u8>, Vec<u8>)) -> Result<Snapshot> {
    let id = decode_snapshot_key(key)?;
    Snapshot::decode(value).filter(|snapshot| snapshot.id == id).ok_or_else(|| {
        Error::new(ErrorKind::Corrupt, format!("header key '{}' is malformed", String::from_utf8_lossy(key)))
    })
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

    /// Golden bytes: the header that cls_rbd's `create` writes for `rbd create --size 10G` with layering only.
    #[test]
    fn a_created_header_byte_for_byte() {
        let now = Duration::new(0x6512_3456, 0x1234_5678);
        let header = ImageHeader::new("10226b8b4567", 10 << 30, 22, ImageFeatures::LAYERING, now);
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
            ImageHeader::KEYS.map(|key| golden.iter().find(|pair| pair.0 == key.as_bytes()).map(|pair| pair.1.clone()));
        assert_eq!(ImageHeader::decode(&values, &[]).expect("what was encoded"), header);
    }

    #[test]
    fn names_of_keys_and_objects() {
        assert_eq!(name_key("vm-1"), b"name_vm-1");
        assert_eq!(id_key("10226b8b4567"), b"id_10226b8b4567");
        assert_eq!(name_of_key(b"name_vm-1").as_deref(), Some("vm-1"));
        assert_eq!(name_of_key(b"id_x"), None);
        assert_eq!(encode_string("10226b8b4567"), b"\x0c\x00\x00\x0010226b8b4567");
        assert_eq!(id_object(&"".into(), "vm-1").name(), "rbd_id.vm-1");
        assert_eq!(header_object(&"".into(), "10226b8b4567").name(), "rbd_header.10226b8b4567");
        let map = |snap| map_object(&"ns".into(), "10226b8b4567", snap).to_string();
        assert_eq!(map(None), "ns/rbd_object_map.10226b8b4567");
        assert_eq!(map(Some(SnapId(10))), "ns/rbd_object_map.10226b8b4567.000000000000000a");
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
        let good = ImageHeader::new("a1", 1 << 20, 16, ImageFeatures::LAYERING, Duration::ZERO).encode();
        let values = |change: &dyn Fn(&mut Vec<Option<Vec<u8>>>)| {
            let mut values: Vec<_> = ImageHeader::KEYS
                .iter()
                .map(|key| good.iter().find(|p| p.0 == key.as_bytes()).map(|p| p.1.clone()))
                .collect();
            change(&mut values);
            ImageHeader::decode(&values, &[]).map_err(|error| error.kind())
        };
        assert!(values(&|_| {}).is_ok());
        for at in 0..5 {
            assert_eq!(
                values(&|values| values[at] = None),
                Err(ErrorKind::Corrupt),
                "without {}",
                ImageHeader::KEYS[at]
            );
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
        let mut values: Vec<_> = ImageHeader::KEYS.iter().map(|_| None).collect();
        let header = ImageHeader::new("a1", 1, 22, ImageFeatures::LAYERING, Duration::ZERO);
        for (key, value) in header.encode() {
            let at = ImageHeader::KEYS.iter().position(|known| known.as_bytes() == key).expect("a known key");
            values[at] = Some(value);
        }
        values[4] = Some(0x10u64.to_le_bytes().to_vec());
        let stored = |id: u64| {
            let body = [&id.to_le_bytes()[..], &[1, 0, 0, 0, b's'], &[0; 8], &[0; 8]].concat();
            let value = [&[1, 1][..], &(body.len() as u32).to_le_bytes(), &body].concat();
            (format!("snapshot_{id:016x}").into_bytes(), value)
        };
        let keys = [stored(4), stored(16)];
        let decoded = ImageHeader::decode(&values, &keys).expect("a good header");
        assert_eq!(decoded.snap_context(), SnapContext { seq: 16, snaps: vec![SnapId(16), SnapId(4)] });
        let newer = [stored(17)];
        assert_eq!(ImageHeader::decode(&values, &newer).map_err(|error| error.kind()), Err(ErrorKind::Corrupt));
        let other = [(b"snapshot_0000000000000004".to_vec(), stored(5).1)];
        for odd in [[(b"snapshot_zz".to_vec(), stored(4).1)], [(stored(4).0, vec![1, 2, 3])], other] {
            assert_eq!(ImageHeader::decode(&values, &odd).map_err(|error| error.kind()), Err(ErrorKind::Corrupt));
        }
    }

    #[test]
    fn features_have_names() {
        assert_eq!(ImageFeatures(0b1101).to_string(), "layering, exclusive-lock, object-map");
        assert_eq!(ImageFeatures(1 << 40).to_string(), "bit 40");
        assert_eq!(ImageFeatures::of_name("fast-diff"), Some(ImageFeatures::FAST_DIFF));
        assert_eq!(ImageFeatures::of_name("bit 40"), None);
        assert_eq!(ImageFeatures(0b1101).unsupported(false, false), ImageFeatures(0b1100));
        assert_eq!(ImageFeatures(0b1101).unsupported(true, false), ImageFeatures(0));
        assert_eq!(ImageFeatures::RBD_DEFAULT.unsupported(false, true), ImageFeatures(0));
        assert_eq!(ImageFeatures::STRIPING.unsupported(false, false), ImageFeatures(0));
        assert_eq!(ImageFeatures::DATA_POOL.unsupported(true, false), ImageFeatures::DATA_POOL);
        // Migration and a dirty cache change the location of data; only journaling clients may write a journal.
        for bit in [9, 11, 12, 63] {
            assert_eq!(ImageFeatures(1 << bit).unsupported(true, true), ImageFeatures(1 << bit));
        }
        assert_eq!(ImageFeatures(1 << 6).unsupported(false, true), ImageFeatures(1 << 6));
    }
}
