//! Minimal iSCSI session on an operating system socket.

use std::io::{Read, Write};
use std::net::TcpStream;

use anyhow::{Context, Result, bail, ensure};
use forebay_iscsi::wire::{
    BHS_LEN, Bhs, DataIn, LoginResponse, Lun, R2t, ScsiResponse, padding, response, response_flag,
};
use zerocopy::FromBytes;

use crate::cdb::Cdb;
use crate::codec::{self, Digests};
use crate::target::Uri;

/// Maximum immediate data in bytes.
const IMMEDIATE_MAX: usize = 64 << 10;

/// Outcome of a command.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Done {
    /// SCSI status.
    pub status: u8,
    /// Sense data.
    pub sense: Vec<u8>,
    /// Data read.
    pub data: Vec<u8>,
}

impl Done {
    /// Returns sense key, and additional sense code with its qualifier.
    pub fn sense(&self) -> Option<(u8, u16)> {
        let sense = &self.sense;
        (sense.len() >= 14).then(|| (sense[2] & 0xf, u16::from_be_bytes([sense[12], sense[13]])))
    }
}

/// Initiator session.
pub struct Session {
    /// TCP connection.
    pub stream: TcpStream,
    input: Vec<u8>,
    from: usize,
    to: usize,
    /// LUN field as encoded in PDUs.
    pub lun: [u8; 8],
    cmd_sn: u32,
    /// ExpStatSN: next expected status.
    pub exp_stat_sn: u32,
    immediate: usize,
    segment: usize,
}

impl Session {
    /// Logs in.  `number` makes the initiator's sessions distinct; `room` is the receive buffer size in bytes.
    pub fn open(uri: &Uri, initiator: &str, number: u16, room: usize) -> Result<Self> {
        let stream = TcpStream::connect(&uri.address).context("connecting")?;
        stream.set_nodelay(true)?;
        let mut this = Self {
            stream,
            input: vec![0; room],
            from: 0,
            to: 0,
            lun: Lun::Unit(uri.lun).to_bytes(),
            cmd_sn: 1,
            exp_stat_sn: 0,
            immediate: 0,
            segment: 8192,
        };
        let [high, low] = number.to_be_bytes();
        let segment = (room / 2).clamp(512, 1 << 20).to_string();
        let pairs = [
            ("InitiatorName", initiator),
            ("TargetName", uri.target.as_str()),
            ("SessionType", "Normal"),
            ("AuthMethod", "None"),
            ("InitialR2T", "Yes"),
            ("ImmediateData", "Yes"),
            ("MaxRecvDataSegmentLength", segment.as_str()),
            ("MaxBurstLength", "1048576"),
            ("FirstBurstLength", "65536"),
            ("MaxOutstandingR2T", "1"),
            ("HeaderDigest", "None"),
            ("DataDigest", "None"),
            ("ErrorRecoveryLevel", "0"),
        ];
        this.stream.write_all(&codec::login([0x80, 0, 0, 2, high, low], 1, &pairs))?;
        let (header, at, len) = this.wait()?;
        let login: &LoginResponse = header.view();
        ensure!(login.status.get() == 0, "the login is refused: {:#06x}", login.status.get());
        this.exp_stat_sn = login.stat_sn.get().wrapping_add(1);
        let text = String::from_utf8_lossy(&this.input[at..at + len]).into_owned();
        let value = |key: &str| text.split('\0').find_map(|pair| pair.strip_prefix(key)?.strip_prefix('='));
        let number = |key: &str, default: usize| value(key).and_then(|value| value.parse().ok()).unwrap_or(default);
        this.segment = number("MaxRecvDataSegmentLength", 8192);
        if value("ImmediateData") != Some("No") {
            this.immediate = this.segment.min(number("FirstBurstLength", 65536)).min(IMMEDIATE_MAX);
        }
        Ok(this)
    }

    /// Decodes the next received PDU in place: its header, and offset and length of its data.
    pub fn peek(&mut self) -> Option<(Bhs, usize, usize)> {
        let (bhs, _) = Bhs::read_from_prefix(&self.input[self.from..self.to]).ok()?;
        let (len, at) = (bhs.data_len(), self.from + BHS_LEN + bhs.ahs_len());
        let end = at + len + padding(len);
        if end > self.to {
            return None;
        }
        self.from = end;
        Some((bhs, at, len))
    }

    /// Returns the next PDU as [`peek`](Self::peek) does, receiving until it is complete.
    pub fn wait(&mut self) -> Result<(Bhs, usize, usize)> {
        loop {
            if let Some(found) = self.peek() {
                return Ok(found);
            }
            self.fill()?;
        }
    }

    /// Receives available bytes.
    pub fn fill(&mut self) -> Result<()> {
        if self.from == self.to {
            (self.from, self.to) = (0, 0);
        } else if self.from > self.input.len() / 2 || self.to == self.input.len() {
            self.input.copy_within(self.from..self.to, 0);
            (self.from, self.to) = (0, self.to - self.from);
        }
        let got = self.stream.read(&mut self.input[self.to..])?;
        ensure!(got > 0, "the target has closed the connection");
        self.to += got;
        Ok(())
    }

    /// Encodes a command.
    pub fn command(&mut self, out: &mut Vec<u8>, itt: u32, cdb: Cdb, expected: usize, data: &[u8]) {
        let mut header = codec::command(self.lun, itt, self.cmd_sn, cdb, expected, !data.is_empty());
        header.exp_stat_sn = self.exp_stat_sn.into();
        self.cmd_sn = self.cmd_sn.wrapping_add(1);
        let now = &data[..data.len().min(self.immediate)];
        out.extend_from_slice(&codec::pdu(&header, now, Digests::default()));
    }

    /// Encodes the Data-Out PDUs that an R2T solicits.
    pub fn answer(&self, out: &mut Vec<u8>, asked: &R2t, data: &[u8]) {
        let (offset, len) = (asked.offset.get() as usize, asked.len.get() as usize);
        let pieces = data[offset..offset + len].chunks(self.segment);
        let last = pieces.len();
        for (index, piece) in pieces.enumerate() {
            let at = (offset + index * self.segment) as u32;
            let (itt, ttt) = (asked.itt.get(), asked.ttt.get());
            let header = codec::data_out(self.lun, itt, ttt, index as u32, at, index + 1 == last);
            out.extend_from_slice(&codec::pdu(&header, piece, Digests::default()));
        }
    }

    /// Runs one command: sends `data` to the target, and reads up to `read` bytes.
    pub fn run(&mut self, cdb: Cdb, data: &[u8], read: usize) -> Result<Done> {
        let mut out = Vec::new();
        self.command(&mut out, 1, cdb, data.len().max(read), data);
        self.stream.write_all(&out)?;
        let mut done = Done::default();
        loop {
            let (header, at, len) = self.wait()?;
            match header.opcode {
                response::DATA_IN => {
                    done.data.extend_from_slice(&self.input[at..at + len]);
                    let last: &DataIn = header.view();
                    if last.flags & response_flag::STATUS != 0 {
                        self.exp_stat_sn = last.stat_sn.get().wrapping_add(1);
                        done.status = last.status;
                        return Ok(done);
                    }
                }
                response::SCSI => {
                    let last: &ScsiResponse = header.view();
                    self.exp_stat_sn = last.stat_sn.get().wrapping_add(1);
                    done.status = last.status;
                    done.sense = self.input[at..at + len].get(2..).unwrap_or_default().to_vec();
                    return Ok(done);
                }
                response::R2T => {
                    out.clear();
                    self.answer(&mut out, header.view(), data);
                    self.stream.write_all(&out)?;
                }
                // NOP-In pings are ignored.
                response::NOP_IN => {}
                opcode => bail!("a PDU with opcode {opcode:#04x}"),
            }
        }
    }

    /// Runs one command as [`run`](Self::run) does, and retries while unit attentions are reported.
    pub fn settle(&mut self, cdb: Cdb, data: &[u8], read: usize) -> Result<Done> {
        loop {
            let done = self.run(cdb, data, read)?;
            if done.sense().is_none_or(|(key, _)| key != 6) {
                return Ok(done);
            }
        }
    }

    /// Returns the size of the unit in bytes.
    pub fn size(&mut self) -> Result<u64> {
        let mut capacity = [0; 16];
        (capacity[0], capacity[1], capacity[13]) = (0x9e, 0x10, 32);
        let done = self.settle(capacity, &[], 32)?;
        ensure!(done.status == 0 && done.data.len() >= 8, "the unit does not say how large it is: {done:x?}");
        Ok((u64::from_be_bytes(done.data[..8].try_into()?) + 1) * 512)
    }
}
