use std::rc::Rc;

use forebay_accel::crc32c;
use forebay_block::{Buf, BufList, BufMut};
use forebay_serve::{ReceiveRequest, ReceiveStaging};

use super::pools::{DATA_OWN, NvmePools};
use super::{Fatal, H2C_DATA_MAX, IN_CAPSULE};
use crate::wire::command::SQE_LEN;
use crate::wire::pdu::{self, Common, DataHeader, Fes, IcReq, digest, flag, kind};
use crate::wire::{Sqe, u32_at};

/// Connection parameters negotiated by ICReq and ICResp.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct NvmeTcpParameters {
    /// Header digests enabled.
    pub header_digest: bool,
    /// Data digests enabled.
    pub data_digest: bool,
    /// Alignment of data towards the host, in bytes (HPDA).
    pub host_alignment: usize,
}

impl NvmeTcpParameters {
    /// Returns the parameters that an ICReq requests.
    pub fn of(request: &IcReq) -> Self {
        Self {
            header_digest: request.digests & digest::HEADER != 0,
            data_digest: request.digests & digest::DATA != 0,
            host_alignment: (usize::from(request.host_alignment) + 1) * 4,
        }
    }

    /// Returns the digest flags of ICResp.
    pub fn digests(&self) -> u8 {
        (u8::from(self.header_digest) * digest::HEADER) | (u8::from(self.data_digest) * digest::DATA)
    }
}

/// PDU of the host, validated as far as possible without its command.
#[derive(Debug)]
pub enum NvmePdu {
    /// Connection initialization.
    IcReq(IcReq),
    /// Command capsule, with its in-capsule data.
    Command {
        /// Submission queue entry.
        sqe: Sqe,
        /// In-capsule data.
        data: BufList,
        /// Data digest matches, or there is none.
        intact: bool,
    },
    /// H2CData PDU.
    Data {
        /// Command, transfer tag and position of the data.
        header: DataHeader,
        /// LAST_PDU flag.
        last: bool,
        /// Payload of the PDU.
        data: BufList,
        /// Data digest matches, or there is none.
        intact: bool,
    },
    /// H2CTermReq, with its fatal error status.
    Term(u16),
}

#[derive(Debug, Clone, Copy)]
enum Head {
    Command(Sqe),
    Data(DataHeader, bool),
}

/// PDU with a parsed header and incomplete data.
#[derive(Debug)]
struct Partial {
    head: Head,
    /// Padding bytes before the data that are still to be skipped.
    pad: usize,
    /// Bytes of data.
    len: usize,
    /// A digest follows the data.
    digest: bool,
    /// Buffer for the data, if it has one of its own.
    own: Own,
}

#[derive(Debug)]
enum Own {
    /// No buffer of its own: data is in the staging buffer.
    No,
    /// Buffer handed out for receiving.
    Out,
    /// Partially filled buffer.
    Here(BufMut),
    /// Complete data.
    Full(Buf),
}

/// Splits the received stream into PDUs.
///
/// Short data is a slice of the staging buffer.  Long data is received directly into a buffer of its own.  A byte
/// is copied at most once, and only if it arrived together with what precedes it.
#[derive(Debug)]
pub struct NvmeReceiver {
    pools: Rc<NvmePools>,
    agreed: Option<NvmeTcpParameters>,
    staging: ReceiveStaging,
    partial: Option<Partial>,
}

impl NvmeReceiver {
    /// Creates a receiver that waits for an ICReq.
    pub fn new(pools: Rc<NvmePools>) -> Self {
        let staging = ReceiveStaging::new(pools.staging.small());
        Self { pools, agreed: None, staging, partial: None }
    }

    /// Applies negotiated connection parameters from now on.
    pub fn agree(&mut self, agreed: NvmeTcpParameters) {
        self.agreed = Some(agreed);
    }

    /// Returns the next complete PDU; `None` if more bytes must be received.  Nothing is parsed while a buffer is
    /// handed out.
    ///
    /// `expected` checks H2CData against the requested transfers, before memory is allocated for it.
    ///
    /// # Errors
    /// A protocol error, after which the stream cannot be parsed further.
    pub fn next(&mut self, expected: impl Fn(&DataHeader, bool) -> Result<(), Fes>) -> Result<Option<NvmePdu>, Fatal> {
        let Some(staging) = self.staging.staged() else { return Ok(None) };
        if self.partial.is_none() {
            match head(staging, self.agreed)? {
                None => return Ok(None),
                Some(Parsed::Whole(pdu, len)) => {
                    staging.advance(len);
                    return Ok(Some(pdu));
                }
                Some(Parsed::Part(partial, len)) => {
                    if let Head::Data(header, last) = &partial.head {
                        expected(header, *last)
                            .map_err(|fes| Fatal::new(fes, 12, &staging[..len], "data that was not asked for"))?;
                    }
                    staging.advance(len);
                    self.partial = Some(partial);
                }
            }
        }
        let Some(partial) = &mut self.partial else { return Ok(None) };
        if partial.pad > 0 {
            let now = partial.pad.min(staging.len());
            staging.advance(now);
            partial.pad -= now;
            if partial.pad > 0 {
                return Ok(None);
            }
        }
        let trailer = if partial.digest { pdu::DIGEST } else { 0 };
        match &mut partial.own {
            Own::No if partial.len + trailer <= staging.len() => {}
            Own::No if partial.len < DATA_OWN => return Ok(None),
            Own::No => {
                let mut buf = self.pools.data(partial.len);
                let here = staging.len().min(partial.len);
                buf.extend_from_slice(&staging[..here]);
                staging.advance(here);
                let wanting = here < partial.len || trailer > staging.len();
                partial.own = if here == partial.len { Own::Full(buf.freeze()) } else { Own::Here(buf) };
                self.staging.expect_long();
                if wanting {
                    return Ok(None);
                }
            }
            Own::Full(_) if trailer <= staging.len() => {}
            Own::Out | Own::Here(_) | Own::Full(_) => return Ok(None),
        }
        let Some(partial) = self.partial.take() else { return Ok(None) };
        let data = match partial.own {
            Own::Full(buf) => buf,
            _ => self.staging.cut(partial.len, &self.pools.staging),
        };
        let mut intact = true;
        if partial.digest
            && let Some(staging) = self.staging.staged()
        {
            intact = crc32c::crc32c(&data) == u32_at(staging, 0);
            staging.advance(pdu::DIGEST);
        }
        let data = BufList::from(data);
        Ok(Some(match partial.head {
            Head::Command(sqe) => NvmePdu::Command { sqe, data, intact },
            Head::Data(header, last) => NvmePdu::Data { header, last, data, intact },
        }))
    }

    /// Returns the buffer to receive into next.
    ///
    /// # Panics
    /// When a buffer is out already.
    pub fn want(&mut self) -> ReceiveRequest {
        if let Some(partial) = &mut self.partial
            && matches!(partial.own, Own::Here(_))
            && let Own::Here(buf) = std::mem::replace(&mut partial.own, Own::Out)
        {
            return ReceiveRequest { buf, all: true };
        }
        // Data that extends past the staged bytes must be contiguous, with its digest.
        let staged = self.staging.staged().map_or(0, |staged| staged.len());
        let missing = self.partial.as_ref().map_or(0, |partial| {
            let own = matches!(partial.own, Own::Full(_));
            let data = if own { 0 } else { partial.len };
            (partial.pad + data + pdu::DIGEST).saturating_sub(staged)
        });
        // Data that does not fit into a small buffer is shorter than data with a buffer of its own.
        self.staging.want(missing, &self.pools.staging, || self.pools.data(2 * DATA_OWN))
    }

    /// Takes back the buffer that [`want`](Self::want) gave, with `got` more bytes in it.
    pub fn received(&mut self, buf: BufMut, got: usize) {
        if let Some(partial) = &mut self.partial
            && matches!(partial.own, Own::Out)
        {
            partial.own = if buf.spare() == 0 { Own::Full(buf.freeze()) } else { Own::Here(buf) };
            return;
        }
        self.staging.received(buf, got);
    }

    /// Returns whether no incomplete PDU has arrived, so that the stream may end here.
    pub fn between_pdus(&self) -> bool {
        self.partial.is_none() && self.staging.is_empty()
    }
}

enum Parsed {
    /// PDU without data, and its length.
    Whole(NvmePdu, usize),
    /// PDU with data, and the length of its header.
    Part(Partial, usize),
}

/// Field offsets in PDU headers, for the information of a TermReq.
mod field {
    pub(super) const KIND: u32 = 0;
    pub(super) const FLAGS: u32 = 1;
    pub(super) const HEADER_LEN: u32 = 2;
    pub(super) const DATA_OFFSET: u32 = 3;
    pub(super) const LEN: u32 = 4;
    pub(super) const VERSION: u32 = 8;
    pub(super) const DATA_LEN: u32 = 16;
}

/// Parses and validates a PDU header, if it is complete.
fn head(staged: &[u8], agreed: Option<NvmeTcpParameters>) -> Result<Option<Parsed>, Fatal> {
    if staged.len() < pdu::COMMON {
        return Ok(None);
    }
    let common = Common::decode(staged);
    let fatal = |fes, information, text| Fatal::new(fes, information, &staged[..staged.len().min(128)], text);
    let invalid = |at, text| fatal(Fes::InvalidField, at, text);
    let header_len = match common.kind {
        kind::IC_REQ => pdu::IC_LEN,
        kind::COMMAND => pdu::CAPSULE_HEADER,
        kind::H2C_DATA | kind::H2C_TERM => pdu::DATA_HEADER,
        // Header of a TLS handshake record.
        22 if agreed.is_none() && staged[1] == 3 => return Err(Fatal::hello(staged)),
        _ => return Err(invalid(field::KIND, "PDU of a type that hosts must not send")),
    };
    let agreed = match (common.kind, agreed) {
        (kind::H2C_TERM, _) => NvmeTcpParameters::default(),
        (kind::IC_REQ, None) => NvmeTcpParameters::default(),
        (kind::IC_REQ, Some(_)) => return Err(fatal(Fes::Sequence, 0, "a second ICReq")),
        (_, None) => return Err(fatal(Fes::Sequence, 0, "a PDU before ICReq")),
        (_, Some(agreed)) => agreed,
    };
    if usize::from(common.header_len) != header_len {
        return Err(invalid(field::HEADER_LEN, "unexpected header length"));
    }
    if (common.flags & flag::HEADER_DIGEST != 0) != agreed.header_digest {
        return Err(invalid(field::FLAGS, "header digest present or absent against the negotiation"));
    }
    let len = common.len as usize;
    let whole_header = header_len + if agreed.header_digest { pdu::DIGEST } else { 0 };
    let data_max = match common.kind {
        kind::COMMAND => IN_CAPSULE,
        kind::H2C_DATA => H2C_DATA_MAX,
        kind::H2C_TERM => pdu::TERM_MAX - pdu::DATA_HEADER,
        _ => 0,
    };
    // Leaves slack of 1024 bytes for padding and a digest.  The data offset (PDO) is a single byte.
    if len < whole_header || len > whole_header + data_max + 1024 {
        return Err(invalid(field::LEN, "PDU of an invalid length"));
    }
    if common.kind == kind::IC_REQ && len != pdu::IC_LEN {
        return Err(invalid(field::LEN, "unexpected ICReq length"));
    }
    // A TermReq ends the connection, and is needed as a whole; it has no digest, and its "data" no offset.
    let needed = if common.kind == kind::H2C_TERM { len } else { whole_header };
    if staged.len() < needed {
        return Ok(None);
    }
    if agreed.header_digest && crc32c::crc32c(&staged[..header_len]) != u32_at(staged, header_len) {
        return Err(fatal(Fes::HeaderDigest, u32_at(staged, header_len), "a wrong header digest"));
    }
    match common.kind {
        kind::IC_REQ => {
            let request = IcReq::decode(staged);
            if request.version != 0 {
                return Err(fatal(Fes::Unsupported, field::VERSION, "another PDU format version"));
            }
            if request.host_alignment > 31 {
                return Err(invalid(10, "alignment of more than 128 bytes"));
            }
            return Ok(Some(Parsed::Whole(NvmePdu::IcReq(request), pdu::IC_LEN)));
        }
        kind::H2C_TERM => {
            return Ok(Some(Parsed::Whole(NvmePdu::Term(crate::wire::u16_at(staged, 8)), len)));
        }
        _ => {}
    }
    let offset = usize::from(common.data_offset);
    let has_data = len > whole_header;
    let digest = common.flags & flag::DATA_DIGEST != 0;
    if has_data && digest != agreed.data_digest {
        return Err(invalid(field::FLAGS, "data digest present or absent against the negotiation"));
    }
    let trailer = if has_data && digest { pdu::DIGEST } else { 0 };
    if has_data && (offset < whole_header || offset % 4 != 0 || offset + trailer > len) {
        return Err(invalid(field::DATA_OFFSET, "data at an invalid offset"));
    }
    let data_len = if has_data { len - offset - trailer } else { 0 };
    if data_len > data_max {
        return Err(fatal(Fes::DataLimit, field::LEN, "more data than a PDU may carry"));
    }
    let head = if common.kind == kind::COMMAND {
        Head::Command(Sqe::of(&staged[pdu::COMMON..pdu::COMMON + SQE_LEN]))
    } else {
        let header = DataHeader::decode(staged);
        if header.len as usize != data_len || data_len == 0 {
            return Err(invalid(field::DATA_LEN, "a data length that contradicts the PDU's"));
        }
        Head::Data(header, common.flags & flag::LAST != 0)
    };
    if !has_data && let Head::Command(sqe) = head {
        let pdu = NvmePdu::Command { sqe, data: BufList::new(), intact: true };
        return Ok(Some(Parsed::Whole(pdu, whole_header)));
    }
    let pad = offset - whole_header;
    Ok(Some(Parsed::Part(Partial { head, pad, len: data_len, digest: trailer > 0, own: Own::No }, whole_header)))
}
