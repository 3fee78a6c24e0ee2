use forebay_block::BufMut;
use forebay_reactor::BufPool;
use forebay_serve::secure::SealBuffers;
use forebay_serve::{SMALL, StagingPools};

/// Length from which data gets a buffer of its own, into which it is received directly.
pub(super) const DATA_OWN: usize = 64 * 1024;
/// Size of the largest data buffer; the maximum data length of an H2CData PDU.
pub(super) const PIECE: usize = super::H2C_DATA_MAX;
/// Maximum bytes of free memory retained per size class of data buffers.
const KEPT_BYTES: usize = 8 * 1024 * 1024;

/// Buffer pools, shared by the connections of a core.
#[derive(Debug)]
pub struct NvmePools {
    pub(super) staging: StagingPools,
    /// Data buffer pools, in powers of two from [`DATA_OWN`] up.
    data: Vec<BufPool>,
}

impl Default for NvmePools {
    fn default() -> Self {
        Self::new()
    }
}

impl NvmePools {
    /// Creates empty pools.
    pub fn new() -> Self {
        let classes = (DATA_OWN.ilog2()..=PIECE.ilog2()).map(|bits| 1 << bits);
        Self {
            staging: StagingPools::new(1024),
            data: classes.map(|size| BufPool::new(size, KEPT_BYTES / size)).collect(),
        }
    }

    /// Returns an empty buffer with space for exactly `len` bytes, at most `PIECE`.
    pub(super) fn data(&self, len: usize) -> BufMut {
        let pool = self.data.iter().find(|pool| pool.buf_size() >= len).expect("no longer than a piece");
        pool.get().limited(len)
    }
}

impl SealBuffers for NvmePools {
    fn sealed_size(&self, large: bool) -> usize {
        if large { DATA_OWN } else { SMALL }
    }

    fn sealed(&self, large: bool) -> BufMut {
        if large { self.data(DATA_OWN) } else { self.staging.small() }
    }

    fn sealing(&self, len: usize) -> BufMut {
        if len > SMALL { self.data(len.min(PIECE)) } else { self.staging.small() }
    }
}
