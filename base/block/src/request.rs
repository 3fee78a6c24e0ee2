use forebay_reactor::BufList;

use crate::extent::Extent;

/// One request to a block device.  Offsets and lengths are bytes; any alignment that
/// [`Geometry::block_size`](crate::Geometry) allows.
#[derive(Debug, Clone)]
pub enum Request {
    /// Reads the run; answered by [`Reply::Data`] with exactly its length.
    Read(Extent),
    /// Writes `data` at `offset`.
    Write {
        /// First byte.
        offset: u64,
        /// What is written.
        data: BufList,
        /// Durable before it is answered (force unit access).
        fua: bool,
    },
    /// The content is not needed any more; reads as zeroes after.
    Discard(Extent),
    /// Reads as zeroes after.
    WriteZeroes {
        /// Where.
        extent: Extent,
        /// The space must stay reserved (NBD's no-hole); otherwise it may be given back.
        no_unmap: bool,
        /// Durable before it is answered.
        fua: bool,
    },
    /// Atomically: if the device holds `expect` at `offset`, write `data` there; otherwise
    /// [`ErrorKind::Mismatch`](crate::ErrorKind).
    CompareAndWrite {
        /// First byte.
        offset: u64,
        /// What must be there.
        expect: BufList,
        /// What is then written; as long as `expect`.
        data: BufList,
        /// Durable before it is answered.
        fua: bool,
    },
    /// Everything answered before is durable when this is answered.
    Flush,
}

impl Request {
    /// The run it touches; `None` for a flush.
    pub fn extent(&self) -> Option<Extent> {
        match self {
            Request::Read(extent) | Request::Discard(extent) | Request::WriteZeroes { extent, .. } => Some(*extent),
            Request::Write { offset, data, .. } | Request::CompareAndWrite { offset, data, .. } => {
                Some(Extent::new(*offset, data.len() as u64))
            }
            Request::Flush => None,
        }
    }

    /// It changes what is stored.
    pub fn is_write(&self) -> bool {
        !matches!(self, Request::Read(_) | Request::Flush)
    }
}

/// The answer to a [`Request`].
#[derive(Debug, Clone)]
pub enum Reply {
    /// What was read.
    Data(BufList),
    /// It is done.
    Done,
}

impl Reply {
    /// What was read; nothing for other requests.
    pub fn into_data(self) -> BufList {
        match self {
            Reply::Data(data) => data,
            Reply::Done => BufList::new(),
        }
    }
}
