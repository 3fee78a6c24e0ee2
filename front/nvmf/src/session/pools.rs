use forebay_block::BufMut;
use forebay_reactor::Pool;

/// Staging of a connection with little to say: 56 reads, and all that an idle connection holds.
pub(super) const STAGING_SMALL: usize = 4 * 1024;
/// Staging of a busy connection: many capsules and their data with one receive.
pub(super) const STAGING_LARGE: usize = 256 * 1024;
/// Data from this length on gets a buffer of its own and is received straight into it.
pub(super) const DATA_OWN: usize = 64 * 1024;
/// The longest buffer for data; as long as a H2CData can be.
pub(super) const PIECE: usize = super::H2C_DATA_MAX;
/// Large staging buffers of a core.  When all are in use, connections make do with small ones.
pub(super) const STAGING_LARGE_MAX: usize = 128;
/// Large staging buffers in use past which data is copied out, instead of keeping its whole neighbourhood in memory for
/// as long as the device holds it.
pub(super) const STAGING_CROWDED: usize = 64;
/// Free memory kept a size class of data, in bytes.
const KEPT_BYTES: usize = 8 * 1024 * 1024;

/// Where buffers come from: shared by the connections of a core.
#[derive(Debug)]
pub struct Pools {
    pub(super) small: Pool,
    pub(super) large: Pool,
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
            small: Pool::new(STAGING_SMALL, 1024),
            large: Pool::new(STAGING_LARGE, STAGING_LARGE_MAX),
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
        if large { DATA_OWN } else { STAGING_SMALL }
    }

    /// A buffer for what is received through TLS.
    pub(crate) fn sealed(&self, large: bool) -> BufMut {
        if large { self.data(DATA_OWN) } else { self.small.get() }
    }

    /// A buffer for what is sent through TLS: all of `len` bytes, or as much as there is room for in one.
    pub(crate) fn sealing(&self, len: usize) -> BufMut {
        if len > STAGING_SMALL { self.data(len.min(PIECE)) } else { self.small.get() }
    }

    /// A buffer for `len` bytes that keeps nothing else in memory.
    pub(super) fn apart(&self, len: usize) -> BufMut {
        if len > STAGING_SMALL { BufMut::with_capacity(len) } else { self.small.get() }
    }
}
