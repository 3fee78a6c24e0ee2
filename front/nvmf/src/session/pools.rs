use forebay_block::BufMut;
use forebay_reactor::Pool;
use forebay_serve::{SMALL, StagingPools};

/// Data from this length on gets a buffer of its own and is received straight into it.
pub(super) const DATA_OWN: usize = 64 * 1024;
/// The longest buffer for data; as long as a H2CData can be.
pub(super) const PIECE: usize = super::H2C_DATA_MAX;
/// Free memory kept a size class of data, in bytes.
const KEPT_BYTES: usize = 8 * 1024 * 1024;

/// Where buffers come from: shared by the connections of a core.
#[derive(Debug)]
pub struct Pools {
    pub(super) staging: StagingPools,
    /// By powers of two, from [`DATA_OWN`] up.
    data: Vec<Pool>,
}

impl Default for Pools {
    fn default() -> Self {
        Self::new()
    }
}

impl Pools {
    /// Pools with nothing in them yet.
    pub fn new() -> Self {
        let classes = (DATA_OWN.ilog2()..=PIECE.ilog2()).map(|bits| 1 << bits);
        Self {
            staging: StagingPools::new(1024),
            data: classes.map(|size| Pool::new(size, KEPT_BYTES / size)).collect(),
        }
    }

    /// An empty buffer with room for exactly `len` bytes, at most a piece.
    pub(super) fn data(&self, len: usize) -> BufMut {
        let pool = self.data.iter().find(|pool| pool.buf_size() >= len).expect("no longer than a piece");
        pool.get().limited(len)
    }

    /// Bytes of a buffer for what is received through TLS.
    pub(crate) fn sealed_size(&self, large: bool) -> usize {
        if large { DATA_OWN } else { SMALL }
    }

    /// A buffer for what is received through TLS.
    pub(crate) fn sealed(&self, large: bool) -> BufMut {
        if large { self.data(DATA_OWN) } else { self.staging.small() }
    }

    /// A buffer for what is sent through TLS: all of `len` bytes, or as much as there is room for in one.
    pub(crate) fn sealing(&self, len: usize) -> BufMut {
        if len > SMALL { self.data(len.min(PIECE)) } else { self.staging.small() }
    }
}
