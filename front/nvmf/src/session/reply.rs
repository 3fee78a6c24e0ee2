use std::rc::Rc;

use forebay_accel::crc32c;
use forebay_block::{BufList, BufMut};

use super::{NvmePools, NvmeTcpParameters};
use crate::wire::Cqe;
use crate::wire::pdu::{self, Common, DataHeader, IcResp, flag, kind};

/// Maximum length of data that is copied behind its header.  Longer data is sent from its own buffer.
const DATA_COPY_MAX: usize = 512;
/// Maximum bytes of a header with its digests and padding.
const ROOM: usize = 256;

/// Outgoing PDUs, gathered for one send.
#[derive(Debug)]
pub struct NvmeReplies {
    pools: Rc<NvmePools>,
    agreed: NvmeTcpParameters,
    /// Headers and short data written since the last append to `ready`; `None` if released while idle.
    headers: Option<BufMut>,
    ready: BufList,
}

impl NvmeReplies {
    /// Creates an empty queue of PDUs.
    pub fn new(pools: Rc<NvmePools>) -> Self {
        Self { pools, agreed: NvmeTcpParameters::default(), headers: None, ready: BufList::new() }
    }

    /// Applies negotiated connection parameters from now on.
    pub fn agree(&mut self, agreed: NvmeTcpParameters) {
        self.agreed = agreed;
    }

    /// Returns whether no bytes are queued.
    pub fn is_empty(&self) -> bool {
        self.ready.is_empty() && self.headers.as_ref().is_none_or(|headers| headers.is_empty())
    }

    /// Returns the number of queued bytes.
    pub fn len(&self) -> usize {
        self.ready.len() + self.headers.as_ref().map_or(0, |headers| headers.len())
    }

    /// Returns an upper bound of the number of queued buffers.
    pub fn parts(&self) -> usize {
        self.ready.parts().len() + 1
    }

    /// Takes all queued PDUs, as one sequence of bytes.
    pub fn take(&mut self) -> BufList {
        self.seal();
        std::mem::take(&mut self.ready)
    }

    /// Discards all queued PDUs.
    pub fn clear(&mut self) {
        self.headers = None;
        self.ready = BufList::new();
    }

    /// Releases the header buffer if nothing is queued, to save the memory of idle connections.
    pub fn rest(&mut self) {
        if self.is_empty() {
            self.headers = None;
        }
    }

    /// Queues an ICResp.
    pub fn ic_resp(&mut self, resp: &IcResp) {
        self.write(&resp.encode());
    }

    /// Queues a response capsule.
    pub fn response(&mut self, cqe: &Cqe) {
        let digest = self.agreed.header_digest;
        let len = pdu::RESPONSE_HEADER + if digest { pdu::DIGEST } else { 0 };
        let flags = if digest { flag::HEADER_DIGEST } else { 0 };
        let header_len = pdu::RESPONSE_HEADER as u8;
        let common = Common { kind: kind::RESPONSE, flags, header_len, data_offset: 0, len: len as u32 };
        let mut header = [0; pdu::RESPONSE_HEADER];
        header[..pdu::COMMON].copy_from_slice(&common.encode());
        header[pdu::COMMON..].copy_from_slice(&cqe.encode());
        self.header(&header);
    }

    /// Queues an R2T for all of a command's data.
    pub fn ready_to_transfer(&mut self, cid: u16, tag: u16, len: u32) {
        let digest = self.agreed.header_digest;
        let whole = pdu::DATA_HEADER + if digest { pdu::DIGEST } else { 0 };
        let flags = if digest { flag::HEADER_DIGEST } else { 0 };
        let header_len = pdu::DATA_HEADER as u8;
        let common = Common { kind: kind::R2T, flags, header_len, data_offset: 0, len: whole as u32 };
        self.header(&DataHeader { cid, tag, offset: 0, len }.encode(common));
    }

    /// Queues a C2HData with all of a command's data; with `success` it replaces the response capsule.
    pub fn data(&mut self, cid: u16, data: BufList, success: bool) {
        let NvmeTcpParameters { header_digest, data_digest, host_alignment } = self.agreed;
        let header = pdu::DATA_HEADER + if header_digest { pdu::DIGEST } else { 0 };
        let offset = header.next_multiple_of(host_alignment.max(4));
        let len = offset + data.len() + if data_digest { pdu::DIGEST } else { 0 };
        let mut flags = flag::LAST;
        for (bit, set) in
            [(flag::HEADER_DIGEST, header_digest), (flag::DATA_DIGEST, data_digest), (flag::SUCCESS, success)]
        {
            if set {
                flags |= bit;
            }
        }
        let common = Common {
            kind: kind::C2H_DATA,
            flags,
            header_len: pdu::DATA_HEADER as u8,
            data_offset: offset as u8,
            len: len as u32,
        };
        let bytes = DataHeader { cid, tag: 0, offset: 0, len: data.len() as u32 }.encode(common);
        self.header(&bytes);
        if offset > header {
            self.write(&[0; 128][..offset - header]);
        }
        let digest = data_digest.then(|| crc32c::crc32c_parts(data.parts().iter().map(|part| &part[..])));
        if data.len() <= DATA_COPY_MAX {
            data.parts().iter().for_each(|part| self.write(part));
        } else {
            self.seal();
            self.ready.append(data);
        }
        if let Some(digest) = digest {
            self.write(&digest.to_le_bytes());
        }
    }

    /// Writes a header, and its digest if header digests are enabled.
    fn header(&mut self, bytes: &[u8]) {
        self.write(bytes);
        if self.agreed.header_digest {
            self.write(&crc32c::crc32c(bytes).to_le_bytes());
        }
    }

    /// Appends a few bytes, at most `DATA_COPY_MAX`.
    fn write(&mut self, bytes: &[u8]) {
        debug_assert!(bytes.len() <= DATA_COPY_MAX);
        if self.headers.as_ref().is_none_or(|headers| headers.spare() < bytes.len()) {
            self.seal();
            if self.headers.as_ref().is_none_or(|headers| headers.spare() < bytes.len().max(ROOM)) {
                self.headers = Some(self.pools.staging.small());
            }
        }
        if let Some(headers) = &mut self.headers {
            headers.extend_from_slice(bytes);
        }
    }

    /// Moves the contents of `headers` to the end of `ready`.
    fn seal(&mut self) {
        if let Some(headers) = &mut self.headers
            && !headers.is_empty()
        {
            let len = headers.len();
            self.ready.push(headers.split_to(len));
        }
    }
}
