//! PDU encoding and decoding on the initiator's side.

use forebay_accel::crc32c::crc32c;
use forebay_iscsi::wire::{
    self, BHS_LEN, Bhs, DIGEST_LEN, DataIn, DataOut, FINAL, IMMEDIATE, LoginRequest, LoginResponse, R2t, Request,
    Response, ScsiCommand, ScsiResponse, TAG_NONE, TaskRequest, command_flag, padding, request, response,
};
use zerocopy::{FromBytes, FromZeros, Immutable, IntoBytes};

use crate::cdb::Cdb;

/// Digest settings.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Digests {
    /// Header digest.
    pub header: bool,
    /// Data digest.
    pub data: bool,
}

/// PDU sent by the target.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Pdu {
    /// SCSI Response, with its data segment.
    Status(ScsiResponse, Vec<u8>),
    /// SCSI Data-In.
    Data(DataIn, Vec<u8>),
    /// Ready To Transfer.
    Ready(R2t),
    /// Login Response, with its text.
    Login(LoginResponse, Vec<u8>),
    /// Any other PDU, with its data segment.
    Other(Response, Vec<u8>),
}

/// Encodes a PDU; sets the data length in its header.
pub fn pdu<H: IntoBytes + Immutable>(header: &H, data: &[u8], digests: Digests) -> Vec<u8> {
    const { assert!(size_of::<H>() == BHS_LEN) };
    let mut out = header.as_bytes().to_vec();
    out[5..8].copy_from_slice(&wire::data_len(data.len()));
    if digests.header {
        out.extend(crc32c(&out).to_le_bytes());
    }
    if !data.is_empty() {
        let from = out.len();
        out.extend_from_slice(data);
        out.extend(&[0; 3][..padding(data.len())]);
        if digests.data {
            out.extend(crc32c(&out[from..]).to_le_bytes());
        }
    }
    out
}

/// Decodes the first PDU of `bytes`, and returns its length; `None` when more is needed.
///
/// # Panics
/// When a digest is wrong.
pub fn decode(bytes: &[u8], digests: Digests) -> Option<(Pdu, usize)> {
    let (bhs, _) = Bhs::read_from_prefix(bytes).ok()?;
    let header = BHS_LEN + bhs.ahs_len();
    let data_at = header + if digests.header { DIGEST_LEN } else { 0 };
    let len = bhs.data_len();
    let data_end = data_at + len + padding(len);
    let end = data_end + if digests.data && len > 0 { DIGEST_LEN } else { 0 };
    if bytes.len() < end {
        return None;
    }
    if digests.header {
        assert_eq!(crc32c(&bytes[..header]).to_le_bytes(), bytes[header..data_at], "a header's digest");
    }
    if digests.data && len > 0 {
        assert_eq!(crc32c(&bytes[data_at..data_end]).to_le_bytes(), bytes[data_end..end], "a data segment's digest");
    }
    let data = bytes[data_at..data_at + len].to_vec();
    let pdu = match bhs.opcode() {
        response::SCSI => Pdu::Status(*bhs.view(), data),
        response::DATA_IN => Pdu::Data(*bhs.view(), data),
        response::R2T => Pdu::Ready(*bhs.view()),
        response::LOGIN => Pdu::Login(*bhs.view(), data),
        _ => Pdu::Other(*bhs.view(), data),
    };
    Some((pdu, end))
}

/// Encodes key-value pairs as text.
pub fn text(pairs: &[(&str, &str)]) -> Vec<u8> {
    pairs.iter().flat_map(|(key, value)| format!("{key}={value}\0").into_bytes()).collect()
}

/// Builds a Login Request that transits straight to the full feature phase.
pub fn login(isid: [u8; 6], cmd_sn: u32, pairs: &[(&str, &str)]) -> Vec<u8> {
    // Transits from the operational stage to the full feature phase.
    login_stage(isid, cmd_sn, FINAL | 1 << 2 | 3, pairs)
}

/// Builds a Login Request with the given stage flags.
pub fn login_stage(isid: [u8; 6], cmd_sn: u32, flags: u8, pairs: &[(&str, &str)]) -> Vec<u8> {
    let mut header = LoginRequest::new_zeroed();
    header.opcode = request::LOGIN | IMMEDIATE;
    header.flags = flags;
    header.isid = isid;
    header.cmd_sn = cmd_sn.into();
    pdu(&header, &text(pairs), Digests::default())
}

/// Builds a SCSI Command.  `expected` is the expected data transfer length in bytes.
pub fn command(lun: [u8; 8], itt: u32, cmd_sn: u32, cdb: Cdb, expected: usize, writes: bool) -> ScsiCommand {
    let mut header = ScsiCommand::new_zeroed();
    header.opcode = request::SCSI_COMMAND;
    header.flags = FINAL | command_flag::SIMPLE;
    if expected > 0 {
        header.flags |= if writes { command_flag::WRITE } else { command_flag::READ };
    }
    header.lun = lun;
    header.itt = itt.into();
    header.edtl = (expected as u32).into();
    header.cmd_sn = cmd_sn.into();
    header.cdb = cdb;
    header
}

/// Builds a Data-Out.
pub fn data_out(lun: [u8; 8], itt: u32, ttt: u32, number: u32, offset: u32, last: bool) -> DataOut {
    let mut header = DataOut::new_zeroed();
    header.opcode = request::DATA_OUT;
    header.flags = if last { FINAL } else { 0 };
    header.lun = lun;
    header.itt = itt.into();
    header.ttt = ttt.into();
    header.data_sn = number.into();
    header.offset = offset.into();
    header
}

/// Builds a Task Management Function Request for immediate delivery.
pub fn task(function: u8, lun: [u8; 8], itt: u32, referenced: u32, cmd_sn: u32) -> TaskRequest {
    let mut header = TaskRequest::new_zeroed();
    header.opcode = request::TASK_MANAGEMENT | IMMEDIATE;
    header.flags = FINAL | function;
    header.lun = lun;
    header.itt = itt.into();
    header.referenced = referenced.into();
    header.cmd_sn = cmd_sn.into();
    header
}

/// Builds a Text, Logout or NOP-Out request for immediate delivery.
pub fn other(opcode: u8, flags: u8, itt: u32, cmd_sn: u32) -> Request {
    let mut header = Request::new_zeroed();
    header.opcode = opcode | IMMEDIATE;
    header.flags = FINAL | flags;
    header.itt = itt.into();
    header.ttt = TAG_NONE.into();
    header.cmd_sn = cmd_sn.into();
    header
}
