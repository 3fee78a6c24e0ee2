//! PDU parser: splits the received stream into PDUs, and verifies digests.

use std::rc::Rc;

use forebay_accel::crc32c::crc32c;
use forebay_block::{BufList, BufMut};
use forebay_reactor::BufPool;
use forebay_serve::{ReceiveRequest, ReceiveStaging, StagingPools};
use zerocopy::FromBytes;

use crate::wire::{BHS_LEN, Bhs, DIGEST_LEN, padding};

/// Length in bytes from which a data segment gets its own buffer and is received straight into it.
const DATA_OWN: usize = 48 * 1024;
/// Space in bytes for padding and digest in such a buffer.
const DATA_TAIL: usize = 4096;
/// Upper limit of data segments in bytes.
pub const DATA_MAX: usize = 1024 * 1024;
/// Maximum free memory kept per size class of data buffers, in bytes.
const KEPT_BYTES: usize = 8 * 1024 * 1024;

/// Receive buffer pools, shared by the connections of a core.
#[derive(Debug)]
pub struct IscsiPools {
    staging: StagingPools,
    data: Vec<BufPool>,
}

impl Default for IscsiPools {
    fn default() -> Self {
        Self::new()
    }
}

impl IscsiPools {
    /// Creates empty pools.
    pub fn new() -> Self {
        let classes = (16..=20).map(|bits| 1usize << bits);
        Self {
            staging: StagingPools::new(256),
            data: classes.map(|size| BufPool::new(size + DATA_TAIL, KEPT_BYTES / size)).collect(),
        }
    }

    /// Returns an empty buffer with a capacity of exactly `len` bytes, at most [`DATA_MAX`] and a tail.
    fn data(&self, len: usize) -> BufMut {
        let pool = self.data.iter().find(|pool| pool.buf_size() >= len).expect("no longer than what is taken");
        pool.get().limited(len)
    }

    /// Returns a small buffer for the headers of sent PDUs.
    pub(super) fn headers(&self) -> BufMut {
        self.staging.small()
    }
}

/// Limits and digests that the parser applies to a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PduRules {
    /// Headers carry a digest.
    pub header_digest: bool,
    /// Data segments carry a digest.
    pub data_digest: bool,
    /// Maximum data segment in bytes; at most [`DATA_MAX`].
    pub data_max: usize,
}

/// Stream error that ends the connection: PDU boundaries are lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Garbled {
    /// Header digest mismatch.
    #[error("wrong header digest")]
    HeaderDigest,
    /// Data segment longer than negotiated.
    #[error("PDU with {len} bytes of data; negotiated maximum is {max}")]
    DataLen {
        /// Length of the data segment in bytes.
        len: usize,
        /// Maximum length in bytes.
        max: usize,
    },
}

/// Received PDU.
#[derive(Debug, Clone)]
pub struct IscsiPdu {
    /// Basic header segment.
    pub bhs: Bhs,
    /// Data segment without padding.
    pub data: BufList,
    /// Data digest mismatch.
    pub damaged: bool,
}

/// PDU parser for a stream.
///
/// Small data is a slice of the staging buffer; long data is received straight into a buffer of its own, so that a byte
/// is copied at most when it arrived together with what precedes it.
#[derive(Debug)]
pub struct PduReceiver {
    pools: Rc<IscsiPools>,
    staging: ReceiveStaging,
    /// Header whose data segment is incomplete.
    head: Option<Bhs>,
    /// Separate buffer of its data segment, if it has one; `Some(None)` while a receive uses it.
    own: Option<Option<BufMut>>,
    rules: PduRules,
}

impl PduReceiver {
    /// Creates a parser in its initial state.
    pub fn new(pools: Rc<IscsiPools>, rules: PduRules) -> Self {
        Self { staging: ReceiveStaging::new(pools.staging.small()), pools, head: None, own: None, rules }
    }

    /// Sets the rules that apply from the next PDU on.
    pub fn set_rules(&mut self, rules: PduRules) {
        self.rules = rules;
    }

    /// Returns the next complete PDU; `None` when more has to be received.
    ///
    /// # Errors
    /// When the stream cannot be parsed any further.
    pub fn next_pdu(&mut self) -> Result<Option<IscsiPdu>, Garbled> {
        let Some(staging) = self.staging.staged() else { return Ok(None) };
        let bhs = match self.head {
            Some(bhs) => bhs,
            None => {
                let Some(bhs) = take_header(staging, &self.rules)? else { return Ok(None) };
                bhs
            }
        };
        let len = bhs.data_len();
        if len == 0 {
            self.head = None;
            return Ok(Some(IscsiPdu { bhs, data: BufList::new(), damaged: false }));
        }
        let padded = len + padding(len);
        let total = padded + if self.rules.data_digest { DIGEST_LEN } else { 0 };
        let (data, damaged) = if let Some(own) = &mut self.own {
            let Some(buf) = own.take_if(|buf| buf.spare() == 0) else { return Ok(None) };
            self.own = None;
            let buf = buf.freeze();
            (buf.slice(0..len), self.rules.data_digest && is_damaged(&buf, padded))
        } else if staging.len() >= total {
            let damaged = self.rules.data_digest && is_damaged(staging, padded);
            let data = self.staging.cut(len, &self.pools.staging);
            if let Some(staging) = self.staging.staged() {
                staging.advance(total - len);
            }
            (data, damaged)
        } else {
            self.head = Some(bhs);
            if len >= DATA_OWN {
                let mut buf = self.pools.data(total);
                buf.extend_from_slice(staging);
                let here = staging.len();
                staging.advance(here);
                self.staging.expect_long();
                self.own = Some(Some(buf));
            }
            return Ok(None);
        };
        self.head = None;
        Ok(Some(IscsiPdu { bhs, data: data.into(), damaged }))
    }

    /// Returns the buffer for the next receive.
    ///
    /// # Panics
    /// When a receive is outstanding already.
    pub fn want(&mut self) -> ReceiveRequest {
        if let Some(own) = &mut self.own {
            return ReceiveRequest { buf: own.take().expect("one receive at a time"), all: true };
        }
        // Data that extends beyond the staged bytes needs contiguous space.
        let whole = self.head.map_or(BHS_LEN + DIGEST_LEN + 1020, |bhs| bhs.data_len() + 3 + DIGEST_LEN);
        let missing = whole.saturating_sub(self.staging.staged().map_or(0, |staged| staged.len()));
        self.staging.want(missing, &self.pools.staging, || self.pools.data(DATA_OWN + DATA_TAIL))
    }

    /// Takes back the buffer of [`want`](Self::want), with `got` more bytes in it.
    pub fn received(&mut self, buf: BufMut, got: usize) {
        if let Some(own) = &mut self.own
            && own.is_none()
        {
            *own = Some(buf);
            return;
        }
        self.staging.received(buf, got);
    }

    /// Takes back the buffer at the end of the stream. Returns true if it ended at a PDU boundary.
    pub fn ended(&mut self, buf: BufMut) -> bool {
        if self.own.is_none() {
            self.staging.ended(buf);
        }
        self.own.is_none() && self.head.is_none() && self.staging.is_empty()
    }
}

/// Removes a header with additional headers and digest from the front.
fn take_header(staging: &mut BufMut, rules: &PduRules) -> Result<Option<Bhs>, Garbled> {
    let Ok((bhs, _)) = Bhs::read_from_prefix(staging) else { return Ok(None) };
    let headers = BHS_LEN + bhs.ahs_len();
    let total = headers + if rules.header_digest { DIGEST_LEN } else { 0 };
    if staging.len() < total {
        return Ok(None);
    }
    if rules.header_digest && is_damaged(staging, headers) {
        return Err(Garbled::HeaderDigest);
    }
    if bhs.data_len() > rules.data_max {
        return Err(Garbled::DataLen { len: bhs.data_len(), max: rules.data_max });
    }
    staging.advance(total);
    Ok(Some(bhs))
}

/// Returns true unless the four bytes behind the first `len` are their CRC32C.
fn is_damaged(bytes: &[u8], len: usize) -> bool {
    crc32c(&bytes[..len]).to_le_bytes() != bytes[len..len + DIGEST_LEN]
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use zerocopy::IntoBytes;

    use super::*;
    use crate::wire;

    fn pdu(rules: &PduRules, ahs: u8, data: &[u8], itt: u32) -> Vec<u8> {
        let mut bhs = Bhs::read_from_bytes(&[0; BHS_LEN]).expect("48 bytes");
        bhs.ahs_len = ahs;
        bhs.data_len = wire::data_len(data.len());
        bhs.itt = itt.into();
        let mut out = bhs.as_bytes().to_vec();
        out.extend(vec![0xaa; usize::from(ahs) * 4]);
        if rules.header_digest {
            out.extend(crc32c(&out).to_le_bytes());
        }
        let mut padded = data.to_vec();
        padded.extend(vec![0; padding(data.len())]);
        out.extend(&padded);
        if rules.data_digest && !data.is_empty() {
            out.extend(crc32c(&padded).to_le_bytes());
        }
        out
    }

    /// Feeds `stream` in pieces and returns the parsed PDUs.
    fn cut(stream: &[u8], pieces: &[usize], rules: PduRules) -> Result<Vec<(u32, Vec<u8>, bool)>, Garbled> {
        let mut receiver = PduReceiver::new(Rc::new(IscsiPools::new()), rules);
        let (mut out, mut at, mut piece) = (Vec::new(), 0, 0);
        loop {
            while let Some(pdu) = receiver.next_pdu()? {
                out.push((pdu.bhs.itt.get(), pdu.data.to_vec(), pdu.damaged));
            }
            if at == stream.len() {
                return Ok(out);
            }
            let ReceiveRequest { mut buf, all } = receiver.want();
            let wanted = if all { buf.spare() } else { pieces[piece % pieces.len()].max(1) };
            piece += 1;
            let len = wanted.min(buf.spare()).min(stream.len() - at);
            assert!(len > 0, "room to receive into");
            buf.extend_from_slice(&stream[at..at + len]);
            at += len;
            receiver.received(buf, len);
        }
    }

    proptest! {
        #[test]
        fn however_the_stream_is_cut(
            lens in prop::collection::vec((prop_oneof![0usize..64, 3000usize..9000, 40_000usize..80_000], 0u8..4), 1..8),
            pieces in prop::collection::vec(1usize..9000, 1..6),
            header_digest: bool,
            data_digest: bool,
        ) {
            let rules = PduRules { header_digest, data_digest, data_max: 100_000 };
            let mut stream = Vec::new();
            let mut want = Vec::new();
            for (index, &(len, ahs)) in lens.iter().enumerate() {
                let data: Vec<u8> = (0..len).map(|at| (at * 7 + index) as u8).collect();
                stream.extend(pdu(&rules, ahs, &data, index as u32));
                want.push((index as u32, data, false));
            }
            prop_assert_eq!(cut(&stream, &pieces, rules), Ok(want));
        }
    }

    #[test]
    fn damage_is_seen() {
        let rules = PduRules { header_digest: true, data_digest: true, data_max: 8192 };
        let good = pdu(&rules, 0, b"hello", 1);
        let mut bad = good.clone();
        bad[52] ^= 1;
        let want = vec![(1, b"iello".to_vec(), true), (1, b"hello".to_vec(), false)];
        assert_eq!(cut(&[bad, good.clone()].concat(), &[100], rules), Ok(want));
        let mut bad = good;
        bad[10] ^= 1;
        assert_eq!(cut(&bad, &[100], rules), Err(Garbled::HeaderDigest));
        let long = pdu(&rules, 0, &[0; 8196], 1);
        assert_eq!(cut(&long, &[100], rules), Err(Garbled::DataLen { len: 8196, max: 8192 }));
    }
}
