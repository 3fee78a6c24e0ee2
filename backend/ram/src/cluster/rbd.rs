//! Snapshots and clones as the `rbd` command of Ceph 16.2 writes them, for tests of images created by other clients.

use forebay_block::{Extent, Method, ObjectBackend, ObjectName, ObjectOp, ObjectRead, Result, SnapId, Transaction};

fn encode_text(text: &str) -> Vec<u8> {
    [&(text.len() as u32).to_le_bytes()[..], text.as_bytes()].concat()
}

/// Encodes the header entry of a snapshot of an image of `size` bytes, the first `overlap` of which are its parent's.
pub fn encode_snapshot(id: u64, name: &str, size: u64, overlap: Option<u64>) -> Vec<u8> {
    let mut body = [&id.to_le_bytes()[..], &encode_text(name), &size.to_le_bytes()].concat();
    // Unprotected, no flags, user namespace, arbitrary timestamp, no children.
    body.extend([0; 9]);
    body.extend([1, 1, 4, 0, 0, 0, 0, 0, 0, 0]);
    body.extend([0; 12]);
    body.push(overlap.is_some().into());
    body.extend(overlap.into_iter().flat_map(u64::to_le_bytes));
    [&[8, 8][..], &(body.len() as u32).to_le_bytes(), &body].concat()
}

/// Encodes the header entry of a parent: a snapshot of the image with this ID in a pool's namespace.
pub fn encode_parent(pool: i64, namespace: &str, image: &str, snap: u64, overlap: u64) -> Vec<u8> {
    let place = [&pool.to_le_bytes()[..], &encode_text(namespace), &encode_text(image)].concat();
    let body = [&place[..], &snap.to_le_bytes(), &[1], &overlap.to_le_bytes()].concat();
    [&[2, 2][..], &(body.len() as u32).to_le_bytes(), &body].concat()
}

/// Image that no client has open.
#[derive(Debug, Clone)]
pub struct ClosedImage {
    /// Image ID.
    pub id: String,
    /// Size in bytes.
    pub size: u64,
    /// Number of objects in its object map, if it has one.
    pub mapped: Option<u64>,
    /// Number of bytes shared with its parent, if it has one.
    pub overlap: Option<u64>,
}

impl ClosedImage {
    async fn set(&self, backend: &dyn ObjectBackend, pairs: Vec<(Vec<u8>, Vec<u8>)>) -> Result<()> {
        let header = ObjectName::new(format!("rbd_header.{}", self.id));
        backend.submit(&header, Transaction::of(ObjectOp::KvSet { pairs })).await.map(drop)
    }

    /// Takes a snapshot, including the object map; returns its ID.
    ///
    /// # Errors
    /// Errors of the backend.
    pub async fn take_snapshot(&self, backend: &dyn ObjectBackend, name: &str) -> Result<u64> {
        let snap = backend.snap_allocate().await?.0;
        let seq = (b"snap_seq".to_vec(), snap.to_le_bytes().to_vec());
        let value = encode_snapshot(snap, name, self.size, self.overlap);
        self.set(backend, vec![seq, (format!("snapshot_{snap:016x}").into_bytes(), value)]).await?;
        if let Some(objects) = self.mapped {
            let map = ObjectName::new(format!("rbd_object_map.{}", self.id));
            let size = backend.stat(&map, SnapId::HEAD).await?.size;
            let data = backend.read(&map, ObjectRead::head(0, size)).await?.fill(Extent::new(0, size));
            let copy = ObjectName::new(format!("rbd_object_map.{}.{snap:016x}", self.id));
            backend.submit(&copy, Transaction::of(ObjectOp::WriteFull { data })).await?;
            // Existing objects are marked clean from now on.
            let mut input = [0, objects].map(u64::to_le_bytes).concat();
            input.extend([3, 1, 1]);
            let method = Method::new("rbd", "object_map_update");
            backend.submit(&map, Transaction::of(ObjectOp::Call { method, input })).await?;
        }
        Ok(snap)
    }

    /// Makes the image, which is empty, a clone of a snapshot of the image with the ID `parent` in the same pool.
    ///
    /// # Errors
    /// Errors of the backend.
    pub async fn set_parent(
        &self,
        backend: &dyn ObjectBackend,
        pool: i64,
        parent: &str,
        snap: u64,
        overlap: u64,
    ) -> Result<()> {
        self.set(backend, vec![(b"parent".to_vec(), encode_parent(pool, "", parent, snap, overlap))]).await
    }
}
