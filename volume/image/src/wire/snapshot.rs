//! Header encodings of snapshots and of the parent of a clone.

use std::time::Duration;

use forebay_block::SnapId;

use super::{CephReader, CephWriter};
use crate::info::SnapshotInfo;

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
    /// Set if a user created it; others belong to groups, to the trash or to mirroring.
    pub(crate) by_user: bool,
    /// Time of creation since 1970-01-01T00:00:00Z, if known.
    pub(crate) created: Option<Duration>,
    /// Number of clones recorded in the snapshot itself (v2 clones).
    pub(crate) children: u32,
    /// Overlap with the parent in bytes.
    pub(crate) overlap: Option<u64>,
    /// Value of the snapshot's key as it is stored.
    pub(crate) stored: Vec<u8>,
}

/// Protection of a snapshot against removal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Protection {
    None = 0,
    /// Removal is refused, and so are new clones: clones are being looked for before the protection ends.
    Ending = 1,
    Full = 2,
}

impl Snapshot {
    /// Returns a new snapshot made by a user, in the newest format.
    pub(crate) fn new(id: SnapId, name: &str, size: u64, flags: u64, overlap: Option<u64>, now: Duration) -> Self {
        let by_user = CephWriter::new().versioned(1, 1, CephWriter::new().u32(0));
        let body = CephWriter::new().u64(id.0).string(name).u64(size).u8(Protection::None as u8).u64(flags);
        let body = body.append(by_user).time(now).u32(0);
        let body = match overlap {
            Some(overlap) => body.u8(1).u64(overlap),
            None => body.u8(0),
        };
        let stored = CephWriter::new().versioned(8, 8, body).done();
        let (name, created) = (name.to_owned(), Some(now));
        Self {
            id,
            name,
            size,
            parent: None,
            protection: Protection::None,
            flags,
            by_user: true,
            created,
            children: 0,
            overlap,
            stored,
        }
    }

    /// Returns the stored value with another name; all other fields, those of newer formats too, stay.
    pub(crate) fn renamed(&self, name: &str) -> Option<Vec<u8>> {
        let (version, compat, body) = (*self.stored.first()?, *self.stored.get(1)?, self.body()?);
        let mut rest = CephReader::new(body);
        let id = rest.u64()?;
        rest.bytes()?;
        let body = CephWriter::new().u64(id).string(name).raw(rest.rest());
        Some(CephWriter::new().versioned(version, compat, body).done())
    }

    /// Returns the stored value with another protection; `None` in the formats before snapshots had one.
    pub(crate) fn with_protection(&self, protection: Protection) -> Option<Vec<u8>> {
        let at = self.protection_at()?;
        let mut stored = self.stored.clone();
        *stored.get_mut(at).filter(|_| self.stored[0] >= 3)? = protection as u8;
        Some(stored)
    }

    /// Returns the stored value with other flags; `None` in the formats before snapshots had any.
    pub(crate) fn with_flags(&self, flags: u64) -> Option<Vec<u8>> {
        let at = self.protection_at()? + 1;
        let mut stored = self.stored.clone();
        let field = stored.get_mut(at..at + 8).filter(|_| self.stored[0] >= 4)?;
        field.copy_from_slice(&flags.to_le_bytes());
        Some(stored)
    }

    /// Returns the position of the protection in the stored value; the flags follow it.
    fn protection_at(&self) -> Option<usize> {
        let (version, older) = (*self.stored.first()?, *self.stored.get(1)? < 8);
        let body = self.body()?;
        let mut rest = CephReader::new(body);
        rest.u64()?;
        rest.bytes()?;
        rest.u64()?;
        if older {
            rest.u64()?;
            if version >= 2 {
                Parent::read(&mut rest)?;
            }
        }
        // After the two versions and the length.
        Some(6 + body.len() - rest.rest().len())
    }

    fn body(&self) -> Option<&[u8]> {
        Some(CephReader::new(&self.stored).versioned(8)?.body.rest())
    }

    /// Decodes the value of a snapshot's key.
    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        let mut value = CephReader::new(bytes).versioned(8)?;
        let body = &mut value.body;
        let (version, older) = (value.version, value.compat < 8);
        let (id, name, size) = (SnapId(body.u64()?), body.string()?, body.u64()?);
        if older {
            body.u64()?;
        }
        let parent = if older && version >= 2 { Some(Parent::read(body)?).filter(Parent::is_there) } else { None };
        let protection = match if version >= 3 { body.u8()? } else { 0 } {
            0 => Protection::None,
            1 => Protection::Ending,
            _ => Protection::Full,
        };
        let flags = if version >= 4 { body.u64()? } else { 0 };
        let by_user = if version >= 5 { body.versioned(u8::MAX)?.body.u32()? == 0 } else { true };
        let created = if version >= 6 { Some(body.time()?).filter(|time| !time.is_zero()) } else { None };
        let children = if version >= 7 { body.u32()? } else { 0 };
        let overlap = if version >= 8 { body.optional(CephReader::u64)? } else { None };
        let overlap = overlap.or(parent.as_ref().and_then(|parent| parent.overlap));
        Some(Self {
            id,
            name,
            size,
            parent,
            protection,
            flags,
            by_user,
            created,
            children,
            overlap,
            stored: bytes.to_vec(),
        })
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
            by_user: self.by_user,
            children: self.children,
        }
    }
}

/// Decodes the group in an image's header: its pool and id; `None` if it is malformed.
pub(crate) fn decode_group(bytes: &[u8]) -> Option<(i64, String)> {
    let mut body = CephReader::new(bytes).versioned(1)?.body;
    Some((body.i64()?, body.string()?))
}

/// Encodes the key of the v1 clones of a snapshot in a pool's list of them.
pub(crate) fn encode_child_key(pool: i64, image: &str, snap: SnapId) -> Vec<u8> {
    CephWriter::new().i64(pool).string(image).u64(snap.0).done()
}

/// Encodes the input of `rbd.remove_child`, which removes a v1 clone: a list in a pool object.
pub(crate) fn encode_remove_child(parent: &Parent, child: &str) -> Vec<u8> {
    let key = encode_child_key(parent.pool, &parent.image, parent.snap);
    CephWriter::new().raw(&key).string(child).done()
}

/// Encodes the input of `rbd.child_detach`, which removes a v2 clone: a list in the parent's header.
pub(crate) fn encode_detach_child(snap: SnapId, pool: i64, namespace: &str, child: &str) -> Vec<u8> {
    let body = CephWriter::new().i64(pool).string(child).string(namespace);
    CephWriter::new().u64(snap.0).versioned(2, 1, body).done()
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
        assert_eq!((snapshot.overlap, snapshot.protection, snapshot.by_user), (Some(10 << 20), Protection::None, true));
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

    /// Golden bytes stored by `rbd group image add` 16.2.
    #[test]
    fn a_group_of_rbd() {
        let bytes = unhex("0101 18000000 0100000000000000 0c000000 313139353662386234353637");
        assert_eq!(decode_group(&bytes), Some((1, "11956b8b4567".into())));
        for at in 0..bytes.len() {
            assert_eq!(decode_group(&bytes[..at]), None);
        }
    }

    #[test]
    fn a_new_snapshot_byte_for_byte_and_its_changes() {
        let bytes = unhex(
            "0808 3e000000 0600000000000000 02000000 6373 0000a00000000000 00 0000000000000000 0101 04000000 00000000
             3fb9016b 4a40191f 00000000 01 0000a00000000000",
        );
        let then = Duration::new(0x6b01_b93f, 0x1f19_404a);
        let new = Snapshot::new(SnapId(6), "cs", 10 << 20, 0, Some(10 << 20), then);
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
