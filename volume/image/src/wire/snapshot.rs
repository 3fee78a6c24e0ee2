//! Header encodings of snapshots and of the parent of a clone.

use std::ops::Range;
use std::time::Duration;

use forebay_block::SnapId;

use super::{CephReader, CephWriter};
use crate::info::{SnapshotInfo, SnapshotKind};

/// Parent of a clone.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Parent {
    pub(crate) pool: i64,
    pub(crate) namespace: String,
    pub(crate) image: String,
    pub(crate) snap: SnapId,
    /// Overlap of the head in bytes; `None` if only snapshots still need the parent.
    pub(crate) overlap: Option<u64>,
}

impl Parent {
    /// Decodes the value of the key `parent`.
    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        Self::read(&mut CephReader::new(bytes))
    }

    fn read(reader: &mut CephReader<'_>) -> Option<Self> {
        let mut value = reader.versioned(2)?;
        let body = &mut value.body;
        let pool = body.i64()?;
        let namespace = if value.version >= 2 { body.string()? } else { String::new() };
        let (image, snap) = (body.string()?, SnapId(body.u64()?));
        let overlap = if value.version >= 2 { body.optional(CephReader::u64)? } else { Some(body.u64()?) };
        Some(Self { pool, namespace, image, snap, overlap })
    }

    /// Encodes the value of the key `parent`, in the format version of `like`: clients older than the newer version
    /// may still use it.
    pub(crate) fn encode_like(&self, like: &[u8]) -> Vec<u8> {
        if like.first() == Some(&1) {
            let body = CephWriter::new().i64(self.pool).string(&self.image).u64(self.snap.0);
            return CephWriter::new().versioned(1, 1, body.u64(self.overlap.unwrap_or(0))).done();
        }
        let body = CephWriter::new().i64(self.pool).string(&self.namespace).string(&self.image).u64(self.snap.0);
        let body = match self.overlap {
            Some(overlap) => body.u8(1).u64(overlap),
            None => body.u8(0),
        };
        CephWriter::new().versioned(2, 2, body).done()
    }

    /// Encodes a parent of a new clone, in the newest format.
    pub(crate) fn encode(&self) -> Vec<u8> {
        self.encode_like(&[])
    }

    /// Encodes the entry of a snapshot of the older formats that has no parent.
    fn encode_none() -> Vec<u8> {
        let none = Self { pool: -1, namespace: String::new(), image: String::new(), snap: SnapId::HEAD, overlap: None };
        none.encode_like(&[1])
    }

    /// Returns whether both name the same snapshot, whatever their overlap.
    pub(crate) fn is_same_snapshot(&self, other: &Self) -> bool {
        (self.pool, &self.namespace, &self.image, self.snap) == (other.pool, &other.namespace, &other.image, other.snap)
    }

    /// Returns whether the entry names a parent: older clusters keep an empty one after a flatten.
    pub(crate) fn is_there(&self) -> bool {
        self.pool >= 0 && !self.image.is_empty()
    }
}

/// Stored snapshot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Snapshot {
    pub(crate) id: SnapId,
    pub(crate) name: String,
    /// Size of the image at the snapshot, in bytes.
    pub(crate) size: u64,
    /// Parent at the snapshot, in the older format that stores one per snapshot.
    pub(crate) parent: Option<Parent>,
    pub(crate) protection: Protection,
    /// Flags, like those of an image: 1, its object map is invalid.
    pub(crate) flags: u64,
    pub(crate) kind: SnapshotKind,
    /// Time of creation since 1970-01-01T00:00:00Z, if known.
    pub(crate) created: Option<Duration>,
    /// Number of clones recorded in the snapshot itself (v2 clones).
    pub(crate) children: u32,
    /// Overlap with the parent in bytes.
    pub(crate) overlap: Option<u64>,
    /// Value of the snapshot's key as it is stored.
    pub(crate) stored: Vec<u8>,
}

/// Properties of a snapshot that is being created.
#[derive(Debug, Clone)]
pub(crate) struct NewSnapshot {
    pub(crate) name: String,
    /// A user's, or a group's.
    pub(crate) kind: SnapshotKind,
    /// Size of the image in bytes.
    pub(crate) size: u64,
    /// Flags of the image.
    pub(crate) flags: u64,
    /// Overlap with the parent in bytes.
    pub(crate) overlap: Option<u64>,
}

/// Protection of a snapshot against removal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Protection {
    None = 0,
    /// Removal is refused, and so are new clones: clones are being looked for before the protection ends.
    Ending = 1,
    Full = 2,
}

/// Namespace numbers of snapshots.
const USER: u32 = 0;
const GROUP: u32 = 1;
const TRASH: u32 = 2;

impl SnapshotKind {
    pub(super) fn read(reader: &mut CephReader<'_>) -> Option<Self> {
        let mut body = reader.versioned(u8::MAX)?.body;
        Some(match body.u32()? {
            USER => Self::User,
            GROUP => Self::Group { pool: body.i64()?, group: body.string()?, snapshot: body.string()? },
            TRASH => Self::Trash { name: body.string()? },
            other => Self::Other(other),
        })
    }

    /// Encodes the namespace of a new snapshot: of a user, or of a group.
    pub(super) fn encode_new(&self) -> CephWriter {
        let body = match self {
            Self::Group { pool, group, snapshot } => {
                CephWriter::new().u32(GROUP).i64(*pool).string(group).string(snapshot)
            }
            _ => CephWriter::new().u32(USER),
        };
        CephWriter::new().versioned(1, 1, body)
    }

    /// Encodes the namespace of a snapshot in the trash, which had a name of a user.
    pub(super) fn encode_trash(name: &str) -> CephWriter {
        CephWriter::new().versioned(1, 1, CephWriter::new().u32(TRASH).string(name).u32(USER))
    }
}

/// Positions of the fields of a stored snapshot, in bytes from its start; `None` for those that its format lacks.
struct FieldRanges {
    name: Range<usize>,
    /// Parent of the older formats.
    parent: Option<Range<usize>>,
    protection: Option<Range<usize>>,
    flags: Option<Range<usize>>,
    kind: Option<Range<usize>>,
    children: Option<Range<usize>>,
    overlap: Option<Range<usize>>,
}

/// Length of a versioned structure's version, compatible version and length.
const PREFIX: usize = 6;

impl Snapshot {
    /// Returns a new snapshot, in the newest format.
    pub(crate) fn new(id: SnapId, new: &NewSnapshot, now: Duration) -> Self {
        let NewSnapshot { name, kind, size, flags, overlap } = new.clone();
        let body = CephWriter::new().u64(id.0).string(&name).u64(size).u8(Protection::None as u8).u64(flags);
        let body = body.append(kind.encode_new()).time(now).u32(0);
        let body = match overlap {
            Some(overlap) => body.u8(1).u64(overlap),
            None => body.u8(0),
        };
        let stored = CephWriter::new().versioned(8, 8, body).done();
        let created = Some(now);
        Self {
            id,
            name,
            size,
            parent: None,
            protection: Protection::None,
            flags,
            kind,
            created,
            children: 0,
            overlap,
            stored,
        }
    }

    /// Returns whether a user created it, and has not removed it.
    pub(crate) fn is_user(&self) -> bool {
        self.kind == SnapshotKind::User
    }

    /// Returns the stored value with another name; all other fields, those of newer formats too, stay.
    pub(crate) fn renamed(&self, name: &str) -> Option<Vec<u8>> {
        let (_, fields) = Self::read(&self.stored)?;
        Some(self.replaced(fields.name, &CephWriter::new().string(name).done()))
    }

    /// Returns the stored value with another protection; `None` in the formats before snapshots had one.
    pub(crate) fn with_protection(&self, protection: Protection) -> Option<Vec<u8>> {
        let (_, fields) = Self::read(&self.stored)?;
        Some(self.replaced(fields.protection?, &[protection as u8]))
    }

    /// Returns the stored value with other flags; `None` in the formats before snapshots had any.
    pub(crate) fn with_flags(&self, flags: u64) -> Option<Vec<u8>> {
        let (_, fields) = Self::read(&self.stored)?;
        Some(self.replaced(fields.flags?, &flags.to_le_bytes()))
    }

    /// Returns the stored value with another number of clones; `None` in the formats before there were such clones.
    pub(crate) fn with_children(&self, children: u32) -> Option<Vec<u8>> {
        let (_, fields) = Self::read(&self.stored)?;
        Some(self.replaced(fields.children?, &children.to_le_bytes()))
    }

    /// Returns the stored value in the trash, under the name `id`, which is unique; `None` in the formats before there was one.
    pub(crate) fn trashed(&self, id: &str) -> Option<Vec<u8>> {
        let (_, fields) = Self::read(&self.stored)?;
        let moved = self.replaced(fields.kind?, &SnapshotKind::encode_trash(&self.name).done());
        Self::decode(&moved)?.renamed(id)
    }

    /// Returns the stored value without a parent.
    pub(crate) fn without_parent(&self) -> Option<Vec<u8>> {
        let (_, fields) = Self::read(&self.stored)?;
        // The later field first, so that the earlier range stays right.
        let stored = match fields.overlap {
            Some(overlap) => self.replaced(overlap, &[0]),
            None => self.stored.clone(),
        };
        let without = Self { stored, ..self.clone() };
        Some(match fields.parent {
            Some(parent) => without.replaced(parent, &Parent::encode_none()),
            None => without.stored,
        })
    }

    /// Returns the stored value with other bytes in the place of a field.
    fn replaced(&self, field: Range<usize>, with: &[u8]) -> Vec<u8> {
        let mut stored = self.stored.clone();
        stored.splice(field, with.iter().copied());
        let len = (stored.len() - PREFIX) as u32;
        stored[2..PREFIX].copy_from_slice(&len.to_le_bytes());
        stored
    }

    /// Decodes the value of a snapshot's key.
    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        Self::read(bytes).map(|(snapshot, _)| snapshot)
    }

    fn read(bytes: &[u8]) -> Option<(Self, FieldRanges)> {
        let mut value = CephReader::new(bytes).versioned(8)?;
        let body = &mut value.body;
        let len = body.rest().len();
        let at = |body: &CephReader<'_>| PREFIX + len - body.rest().len();
        let (version, older) = (value.version, value.compat < 8);
        let id = SnapId(body.u64()?);
        let (name, named) = (at(body), body.string()?);
        let name = name..at(body);
        let size = body.u64()?;
        if older {
            body.u64()?;
        }
        let start = at(body);
        let parent = if older && version >= 2 { Some(Parent::read(body)?).filter(Parent::is_there) } else { None };
        let parent_range = Some(start..at(body)).filter(|range| !range.is_empty());
        let start = at(body);
        let protection = match if version >= 3 { body.u8()? } else { 0 } {
            0 => Protection::None,
            1 => Protection::Ending,
            _ => Protection::Full,
        };
        let protection_range = Some(start..at(body)).filter(|range| !range.is_empty());
        let start = at(body);
        let flags = if version >= 4 { body.u64()? } else { 0 };
        let flags_range = Some(start..at(body)).filter(|range| !range.is_empty());
        let start = at(body);
        let kind = if version >= 5 { SnapshotKind::read(body)? } else { SnapshotKind::User };
        let kind_range = Some(start..at(body)).filter(|range| !range.is_empty());
        let created = if version >= 6 { Some(body.time()?).filter(|time| !time.is_zero()) } else { None };
        let start = at(body);
        let children = if version >= 7 { body.u32()? } else { 0 };
        let children_range = Some(start..at(body)).filter(|range| !range.is_empty());
        let start = at(body);
        let overlap = if version >= 8 { body.optional(CephReader::u64)? } else { None };
        let overlap_range = Some(start..at(body)).filter(|range| !range.is_empty());
        let fields = FieldRanges {
            name,
            parent: parent_range,
            protection: protection_range,
            flags: flags_range,
            kind: kind_range,
            children: children_range,
            overlap: overlap_range,
        };
        let overlap = overlap.or(parent.as_ref().and_then(|parent| parent.overlap));
        let stored = bytes.to_vec();
        let snapshot =
            Self { id, name: named, size, parent, protection, flags, kind, created, children, overlap, stored };
        Some((snapshot, fields))
    }
}

impl Snapshot {
    /// Returns the public description.
    pub(crate) fn info(&self) -> SnapshotInfo {
        SnapshotInfo {
            id: self.id.0,
            name: self.name.clone(),
            size: self.size,
            protected: self.protection == Protection::Full,
            created: self.created,
            kind: self.kind.clone(),
            children: self.children,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::unhex;
    use super::*;

    /// Golden bytes stored by `rbd clone` 16.2.
    #[test]
    fn a_parent_of_rbd_byte_for_byte() {
        let bytes = unhex(
            "0202 2d000000 0100000000000000 00000000 0c000000 313031356664626137316564 0500000000000000 01 0000a00000000000",
        );
        let parent = Parent::decode(&bytes).expect("readable");
        let expected = Parent {
            pool: 1,
            namespace: String::new(),
            image: "1015fdba71ed".into(),
            snap: SnapId(5),
            overlap: Some(10 << 20),
        };
        assert_eq!(parent, expected);
        assert_eq!(parent.encode_like(&bytes), bytes);
        for at in 0..bytes.len() {
            assert_eq!(Parent::decode(&bytes[..at]), None);
        }
        let older =
            unhex("0101 28000000 0100000000000000 0c000000 313031356664626137316564 0500000000000000 0000a00000000000");
        assert_eq!(Parent::decode(&older), Some(expected.clone()));
        assert_eq!(expected.encode_like(&older), older);
    }

    /// Golden bytes stored by `rbd snap create` 16.2, of a clone and of its parent.
    #[test]
    fn snapshots_of_rbd() {
        let of_clone = unhex(
            "0808 3e000000 0600000000000000 02000000 6373 0000a00000000000 00 0000000000000000 0101 04000000 00000000
             3fb9016b4a40191f 00000000 01 0000a00000000000",
        );
        let snapshot = Snapshot::decode(&of_clone).expect("readable");
        assert_eq!((snapshot.id, &snapshot.name[..], snapshot.size), (SnapId(6), "cs", 10 << 20));
        assert_eq!(
            (snapshot.overlap, snapshot.protection, snapshot.is_user()),
            (Some(10 << 20), Protection::None, true)
        );
        let protected = unhex(
            "0808 36000000 0500000000000000 02000000 7331 0000a00000000000 02 0000000000000000 0101 04000000 00000000
             3cb9016bfae3911b 01000000 00",
        );
        let snapshot = Snapshot::decode(&protected).expect("readable");
        assert_eq!(
            (snapshot.id, snapshot.protection, snapshot.children, snapshot.overlap),
            (SnapId(5), Protection::Full, 1, None)
        );
        for at in 0..protected.len() {
            assert_eq!(Snapshot::decode(&protected[..at]), None);
        }
    }

    #[test]
    fn a_new_snapshot_byte_for_byte_and_its_changes() {
        let bytes = unhex(
            "0808 3e000000 0600000000000000 02000000 6373 0000a00000000000 00 0000000000000000 0101 04000000 00000000
             3fb9016b 4a40191f 00000000 01 0000a00000000000",
        );
        let then = Duration::new(0x6b01_b93f, 0x1f19_404a);
        let (name, kind) = ("cs".to_owned(), SnapshotKind::User);
        let new = NewSnapshot { name, kind, size: 10 << 20, flags: 0, overlap: Some(10 << 20) };
        let new = Snapshot::new(SnapId(6), &new, then);
        assert_eq!(new.stored, bytes, "what rbd stores");
        assert_eq!(Snapshot::decode(&bytes), Some(new.clone()));
        let renamed = new.renamed("another").and_then(|bytes| Snapshot::decode(&bytes)).expect("readable");
        assert_eq!(renamed, Snapshot { name: "another".into(), stored: renamed.stored.clone(), ..new.clone() });
        let protected = new.with_protection(Protection::Full).expect("there is such a field");
        assert_eq!(Snapshot::decode(&protected).map(|snapshot| snapshot.protection), Some(Protection::Full));
        let flagged = new.with_flags(3).and_then(|bytes| Snapshot::decode(&bytes)).expect("there is such a field");
        assert_eq!(flagged, Snapshot { flags: 3, stored: flagged.stored.clone(), ..new.clone() });
        assert_eq!(flagged.with_flags(0).as_ref(), Some(&new.stored));
        let ending = Snapshot { stored: protected, ..new }.with_protection(Protection::Ending).expect("as before");
        assert_eq!(Snapshot::decode(&ending).map(|snapshot| snapshot.protection), Some(Protection::Ending));
    }

    #[test]
    fn changes_of_an_older_snapshot_keep_its_parent() {
        let parent = CephWriter::new().versioned(1, 1, CephWriter::new().i64(3).string("abc").u64(7).u64(4096));
        let body = CephWriter::new().u64(9).string("s").u64(8192).u64(1).append(parent).u8(0).u64(1);
        let older = Snapshot::decode(&CephWriter::new().versioned(4, 1, body).done()).expect("readable");
        for changed in [older.renamed("t"), older.with_protection(Protection::Full)] {
            let changed = changed.and_then(|bytes| Snapshot::decode(&bytes)).expect("readable");
            assert_eq!((changed.flags, changed.overlap, &changed.parent), (1, Some(4096), &older.parent));
            assert!(changed.name == "t" || changed.protection == Protection::Full);
        }
        let oldest = CephWriter::new().u64(9).string("s").u64(8192).u64(1);
        let oldest = Snapshot::decode(&CephWriter::new().versioned(1, 1, oldest).done()).expect("readable");
        assert_eq!((oldest.with_protection(Protection::Full), oldest.with_flags(1)), (None, None));
        let flagged = older.with_flags(3).and_then(|bytes| Snapshot::decode(&bytes)).expect("readable");
        assert_eq!((flagged.flags, flagged.overlap, &flagged.parent), (3, Some(4096), &older.parent));
    }

    #[test]
    fn an_older_snapshot_has_its_own_parent() {
        let parent = CephWriter::new().i64(3).string("abc").u64(7).u64(4096);
        let body = CephWriter::new().u64(9).string("s").u64(8192).u64(1).versioned(1, 1, parent).u8(0).u64(1);
        let snapshot = Snapshot::decode(&CephWriter::new().versioned(4, 1, body).done()).expect("readable");
        assert_eq!((snapshot.flags, snapshot.overlap), (1, Some(4096)));
        assert_eq!(snapshot.parent.map(|parent| (parent.pool, parent.image)), Some((3, "abc".into())));
    }
}
