//! Output batching: PDUs that wait to be sent, gathered for one send.

use std::rc::Rc;

use forebay_accel::crc32c::{crc32c, extend};
use forebay_block::{BufList, BufMut};
use zerocopy::{Immutable, IntoBytes};

use super::receive::IscsiPools;
use crate::wire::{BHS_LEN, padding};

/// Length in bytes up to which data is copied behind its header; longer data is sent in place.
const COPY_MAX: usize = 512;

/// PDUs waiting to be sent.
#[derive(Debug)]
pub struct IscsiReplies {
    pools: Rc<IscsiPools>,
    header_digest: bool,
    data_digest: bool,
    /// Headers and short data that are not yet appended to `ready`.
    headers: BufMut,
    ready: BufList,
}

impl IscsiReplies {
    /// Creates an empty queue, without digests.
    pub fn new(pools: Rc<IscsiPools>) -> Self {
        let headers = pools.headers();
        Self { pools, header_digest: false, data_digest: false, headers, ready: BufList::new() }
    }

    /// Enables digests from the next PDU on.
    pub fn set_digests(&mut self, header: bool, data: bool) {
        (self.header_digest, self.data_digest) = (header, data);
    }

    /// Returns true if nothing waits to be sent.
    pub fn is_empty(&self) -> bool {
        self.ready.is_empty() && self.headers.is_empty()
    }

    /// Returns the number of bytes waiting to be sent.
    pub fn len(&self) -> usize {
        self.ready.len() + self.headers.len()
    }

    /// Returns the number of buffers waiting to be sent.
    pub fn parts(&self) -> usize {
        self.ready.parts().len() + usize::from(!self.headers.is_empty())
    }

    /// Takes all waiting bytes, for one send.
    pub fn take(&mut self) -> BufList {
        self.seal();
        std::mem::take(&mut self.ready)
    }

    /// Discards all waiting bytes.
    pub fn clear(&mut self) {
        self.headers.clear();
        self.ready = BufList::new();
    }

    /// Appends a PDU; its header has to carry the length of `data`.
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

    /// Appends a PDU and copies its data.
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

    /// Appends padding and the digest, which covers it.
    fn tail(&mut self, len: usize, crc: u32) {
        let zeroes = &[0; 3][..padding(len)];
        if !zeroes.is_empty() {
            self.bytes(zeroes);
        }
        if self.data_digest {
            self.bytes(&extend(crc, zeroes).to_le_bytes());
        }
    }

    /// Appends a few bytes, in as few buffers as possible.
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

    /// Moves the bytes in `headers` to the end of `ready`.
    fn seal(&mut self) {
        if !self.headers.is_empty() {
            let len = self.headers.len();
            self.ready.push(self.headers.split_to(len));
        }
    }
}
