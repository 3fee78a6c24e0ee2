use forebay_reactor::BufList;

use crate::extent::Extent;

/// Request to a block device.  Offsets and lengths are in bytes, with any alignment that
/// [`Geometry::block_size`](crate::Geometry) allows.
#[derive(Debug, Clone)]
pub enum BlockRequest {
    /// Reads the extent; the reply is [`BlockReply::Data`] with exactly its length.
    Read(Extent),
    /// Writes `data` at `offset`.
    Write {
        /// Offset of the first byte.
        offset: u64,
        /// Data to write.
        data: BufList,
        /// Durable before it is acknowledged (force unit access).
        fua: bool,
    },
    /// Discards the content; the extent reads as zeroes after.
    Discard(Extent),
    /// Zeroes the extent.
    WriteZeroes {
        /// Range to zero.
        extent: Extent,
        /// True keeps the space allocated (NBD's no-hole); otherwise it may be deallocated.
        no_unmap: bool,
        /// Durable before it is acknowledged.
        fua: bool,
    },
    /// Compares and writes atomically: if the device contains `expect` at `offset`, writes `data` there; otherwise
    /// fails with [`ErrorKind::Mismatch`](crate::ErrorKind).
    CompareAndWrite {
        /// Offset of the first byte.
        offset: u64,
        /// Expected bytes.
        expect: BufList,
        /// Data to write; as long as `expect`.
        data: BufList,
        /// Durable before it is acknowledged.
        fua: bool,
    },
    /// Makes every write acknowledged before durable.
    Flush,
}

impl BlockRequest {
    /// Returns the extent of the request; `None` for a flush.
    pub fn extent(&self) -> Option<Extent> {
        match self {
            BlockRequest::Read(extent) | BlockRequest::Discard(extent) | BlockRequest::WriteZeroes { extent, .. } => {
                Some(*extent)
            }
            BlockRequest::Write { offset, data, .. } | BlockRequest::CompareAndWrite { offset, data, .. } => {
                Some(Extent::new(*offset, data.len() as u64))
            }
            BlockRequest::Flush => None,
        }
    }

    /// Returns whether the request changes stored data.
    pub fn is_write(&self) -> bool {
        !matches!(self, BlockRequest::Read(_) | BlockRequest::Flush)
    }
}

/// Reply to a [`BlockRequest`].
#[derive(Debug, Clone)]
pub enum BlockReply {
    /// Data of a read.
    Data(BufList),
    /// Completion of any other request.
    Done,
}

impl BlockReply {
    /// Returns the data of a read; an empty list for other requests.
    pub fn into_data(self) -> BufList {
        match self {
            BlockReply::Data(data) => data,
            BlockReply::Done => BufList::new(),
        }
    }
}
