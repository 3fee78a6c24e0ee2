//! Object record (onode) in the tree: size, version, locations of map pages, clones.

use super::entry::NAME_MAX;
use super::{BLOCK64, BlobPtr, MalformedStore, PAGE_BLOCKS, Put, StoreReader, malformed};

/// Maximum object size in bytes.
pub const OBJECT_SIZE_MAX: u64 = 128 << 20;
/// Map pages of an object of maximum size.
pub const PAGES_MAX: usize = (OBJECT_SIZE_MAX / BLOCK64 / PAGE_BLOCKS as u64) as usize;

/// Map of a head or a clone: pointers to its pages, by index.
pub type PagePtrs = Vec<BlobPtr>;

/// Record of a clone.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct CloneRecord {
    /// Snapshots that the clone represents, newest first.
    pub snaps: Vec<u64>,
    /// Clone id: the newest snapshot number at its creation.
    pub id: u64,
    /// Size in bytes.
    pub size: u64,
    /// Block map of the clone.
    pub pages: PagePtrs,
}

/// Record of an object.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Onode {
    /// Namespace of the object.
    pub namespace: String,
    /// Name of the object.
    pub name: String,
    /// Number of the key that its data is encrypted with; 0 for none.
    pub key: u64,
    /// Set if the head exists.
    pub exists: bool,
    /// Set if the object has, or once had, keys.
    pub has_kv: bool,
    /// Size in bytes.
    pub size: u64,
    /// Version; increases with each change.
    pub version: u64,
    /// Newest snapshot number seen.
    pub snap_seq: u64,
    /// Block map of the head.
    pub pages: PagePtrs,
    /// Clones, oldest first.
    pub clones: Vec<CloneRecord>,
}

impl Onode {
    /// Encodes the record.
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(64 + self.name.len() + BlobPtr::SIZE * self.pages.len());
        out.put_u8(1);
        out.put_u8(u8::from(self.exists) | u8::from(self.has_kv) << 1 | u8::from(self.key != 0) << 2);
        out.put_u16(self.namespace.len() as u16);
        out.put_u16(self.name.len() as u16);
        out.put_u16(self.pages.len() as u16);
        out.put_u32(self.clones.len() as u32);
        out.put_u64(self.size);
        out.put_u64(self.version);
        out.put_u64(self.snap_seq);
        out.put(self.namespace.as_bytes());
        out.put(self.name.as_bytes());
        if self.key != 0 {
            out.put_u64(self.key);
        }
        self.pages.iter().for_each(|&ptr| out.put_ptr(ptr));
        for clone in &self.clones {
            out.put_u64(clone.id);
            out.put_u64(clone.size);
            out.put_u16(clone.snaps.len() as u16);
            out.put_u16(clone.pages.len() as u16);
            clone.snaps.iter().for_each(|&snap| out.put_u64(snap));
            clone.pages.iter().for_each(|&ptr| out.put_ptr(ptr));
        }
        out
    }

    /// Decodes a record.
    pub fn decode(bytes: &[u8]) -> Result<Self, MalformedStore> {
        let mut r = StoreReader::new(bytes, "object record");
        let version = r.u8()?;
        if version != 1 {
            return malformed(format!("object record: version {version}"));
        }
        let flags = r.u8()?;
        let (space, name) = (usize::from(r.u16()?), usize::from(r.u16()?));
        if space > NAME_MAX || name > NAME_MAX || name == 0 || flags > 7 {
            return malformed("object record: a name's length or the flags are wrong");
        }
        let pages = usize::from(r.u16()?);
        let clones = r.u32()? as usize;
        let (size, object_version, snap_seq) = (r.u64()?, r.u64()?, r.u64()?);
        let (namespace, name) = (r.text(space)?.to_owned(), r.text(name)?.to_owned());
        let key = if flags & 4 != 0 { r.u64()? } else { 0 };
        if flags & 4 != 0 && key == 0 {
            return malformed("object record: an encrypted object without a key");
        }
        let pages = ptrs(&mut r, pages)?;
        if clones > r.left() / 20 {
            return malformed(format!("object record: {clones} clones"));
        }
        let clones = (0..clones)
            .map(|_| {
                let (id, size) = (r.u64()?, r.u64()?);
                let (snaps, pages) = (r.u16()?, usize::from(r.u16()?));
                check_size(size)?;
                let snaps = (0..snaps).map(|_| r.u64()).collect::<Result<_, _>>()?;
                Ok(CloneRecord { id, size, snaps, pages: ptrs(&mut r, pages)? })
            })
            .collect::<Result<Vec<_>, MalformedStore>>()?;
        if clones.windows(2).any(|pair| pair[0].id >= pair[1].id) {
            return malformed("object record: clones out of order");
        }
        check_size(size)?;
        r.end()?;
        let (exists, has_kv) = (flags & 1 != 0, flags & 2 != 0);
        Ok(Self { namespace, name, key, exists, has_kv, size, version: object_version, snap_seq, pages, clones })
    }
}

fn check_size(size: u64) -> Result<(), MalformedStore> {
    if size > OBJECT_SIZE_MAX { malformed(format!("object record: {size} bytes")) } else { Ok(()) }
}

fn ptrs(r: &mut StoreReader<'_>, count: usize) -> Result<PagePtrs, MalformedStore> {
    if count > PAGES_MAX {
        return malformed(format!("object record: {count} map pages"));
    }
    (0..count).map(|_| r.ptr()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn round_trip() {
        let ptr = BlobPtr { addr: 4096, len: 9, crc: 2 };
        let onode = Onode {
            namespace: "n".into(),
            name: "rbd_header.1".into(),
            key: 0,
            exists: true,
            has_kv: true,
            size: 4 << 20,
            version: 7,
            snap_seq: 4,
            pages: vec![BlobPtr::default(), ptr],
            clones: vec![
                CloneRecord { id: 2, snaps: vec![2, 1], size: 5, pages: vec![ptr] },
                CloneRecord { id: 4, snaps: vec![4], size: 5, pages: vec![] },
            ],
        };
        for onode in [Onode { key: 5, ..onode.clone() }, onode] {
            let bytes = onode.encode();
            assert_eq!(Onode::decode(&bytes), Ok(onode));
            for len in 0..bytes.len() {
                assert!(Onode::decode(&bytes[..len]).is_err());
            }
        }
    }
}
