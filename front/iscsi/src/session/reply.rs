//! PDUs that wait to be sent, gathered for one send.

use std::rc::Rc;

use forebay_accel::crc32c::{crc32c, extend};
use forebay_block::{BufList, BufMut};
use zerocopy::{Immutable, IntoBytes};

use super::receive::Pools;
use crate::wire::{BHS_LEN, padding};

/// Data up to this length is copied behind its header; longer data is sent from where it is.
const COPY_MAX: usize = 512;

/// PDUs that wait to be sent.
#[derive(Debug)]
pub struct Replies {
    pools: Rc<Pools>,
    header_digest: bool,
    data_digest: bool,
    /// Headers and short data written since something was last appended to `ready`.
    headers: BufMut,
    ready: BufList,
}

impl Replies {
    /// Nothing waits yet; no digests.
    pub fn new(pools: Rc<Pools>) -> Self {
        let headers = pools.headers();
        Self { pools, header_digest: false, data_digest: false, headers, ready: BufList::new() }
    }

    /// From the next PDU on.
    pub fn set_digests(&mut self, header: bool, data: bool) {
        (self.header_digest, self.data_digest) = (header, data);
    }

    /// True when nothing waits.
    pub fn is_empty(&self) -> bool {
        self.ready.is_empty() && self.headers.is_empty()
    }

    /// Bytes that wait.
    pub fn len(&self) -> usize {
        self.ready.len() + self.headers.len()
    }

    /// Buffers that wait.
    pub fn parts(&self) -> usize {
        self.ready.parts().len() + usize::from(!self.headers.is_empty())
    }

    /// Everything that waits, to be sent as one run of bytes.
    pub fn take(&mut self) -> BufList {
        self.seal();
        std::mem::take(&mut self.ready)
    }

    /// Forgets everything that waits.
    pub fn clear(&mut self) {
        self.headers.clear();
        self.ready = BufList::new();
    }

    /// A PDU; its header says how long `data` is.
    pub fn pdu<H: IntoBytes + Immutable>(&mut self, header: &H, data: BufList) {
        const { assert!(size_of::<H>() == BHS_LEN) };
        self.header(header.as_bytes());
        let len = data.len();
        if len == 0 {
            return;
        }
        let crc = if self.data_digest { data.parts().iter().fold(0, |crc, part| extend(crc, part)) } else { 0 };
        if len <= COPY_MAX {
            data.parts().iter().for_each(|part| self.bytes(part));
        } else {
            self.seal();
            self.ready.append(data);
        }
        self.tail(len, crc);
    }

    /// A PDU with data that is copied.
    pub fn pdu_with<H: IntoBytes + Immutable>(&mut self, header: &H, data: &[u8]) {
        if data.len() > COPY_MAX {
            return self.pdu(header, BufMut::copy_of(data).into());
        }
        self.header(header.as_bytes());
        if data.is_empty() {
            return;
        }
        let crc = if self.data_digest { crc32c(data) } else { 0 };
        self.bytes(data);
        self.tail(data.len(), crc);
    }

    #[inline]
    fn header(&mut self, header: &[u8]) {
        self.bytes(header);
        if self.header_digest {
            self.bytes(&crc32c(header).to_le_bytes());
        }
    }

    /// Padding, and the digest, which covers it.
    fn tail(&mut self, len: usize, crc: u32) {
        let zeroes = &[0; 3][..padding(len)];
        if !zeroes.is_empty() {
            self.bytes(zeroes);
        }
        if self.data_digest {
            self.bytes(&extend(crc, zeroes).to_le_bytes());
        }
    }

    /// Appends a few bytes; they end up in as few buffers as possible.
    #[inline]
    fn bytes(&mut self, bytes: &[u8]) {
        if self.headers.spare() < bytes.len() {
            self.seal();
            if !self.headers.reclaim() {
                self.headers = self.pools.headers();
            }
        }
        self.headers.extend_from_slice(bytes);
    }

    /// Moves what was written into `headers` behind what is ready.
    fn seal(&mut self) {
        if !self.headers.is_empty() {
            let len = self.headers.len();
            self.ready.push(self.headers.split_to(len));
        }
    }
}
