//! Connections of an NVMe/TCP host.

use std::io::{Read, Write};
use std::net::TcpStream;

use anyhow::{Context, Result, bail, ensure};
use forebay_load::Dice;
use forebay_nvme_host::codec::{self, Completion, Digests, Pdu, Sqe};
use forebay_nvme_host::target::Uri;
use forebay_nvmf::session::psk::TlsKey;

use crate::tls::Secure;

/// Hosts that there are.
const HOSTS: usize = 64;
/// Entries of an I/O queue.
const ENTRIES: u16 = 32;

fn host_name(number: usize) -> String {
    format!("nqn.2014-08.org.nvmexpress:uuid:00000000-0000-4000-8000-{number:012x}")
}

/// One of the hosts that there are.
pub fn any_host(dice: &mut Dice) -> String {
    host_name(dice.below(HOSTS))
}

/// Returns the PDUs of a host's connection: an admin queue, or an I/O queue of an existing controller.
pub fn session(dice: &mut Dice, uri: &Uri, host: &str, controller: Option<u16>) -> Vec<Vec<u8>> {
    // Digests are slow to make here.
    let digests = match dice.below(16) {
        0 => Digests { header: true, data: true },
        1 => Digests { header: true, data: false },
        _ => Digests::default(),
    };
    let mut talk = Talk { pdus: vec![codec::ic_req(digests, 0)], digests, cid: 0, nsid: uri.nsid };
    match controller {
        None => {
            let (sqe, data) = codec::connect(0, 32, &uri.subsystem, host, 0xFFFF, dice.once_in(2));
            talk.command(sqe, &data, true);
            talk.command(codec::property(0x14, false, Some(1 | 6 << 16 | 4 << 20)), &[], false);
            for _ in 0..1 + dice.below(8) {
                talk.admin(dice);
            }
            if dice.once_in(4) {
                talk.command(codec::property(0x14, false, Some(1 | 1 << 14 | 6 << 16 | 4 << 20)), &[], false);
            }
        }
        Some(cntlid) => {
            let queue = 1 + dice.below(4) as u16;
            let (sqe, data) = codec::connect(queue, ENTRIES, &uri.subsystem, host, cntlid, dice.once_in(2));
            talk.command(sqe, &data, true);
            for _ in 0..1 + dice.below(8) {
                talk.io(dice);
            }
        }
    }
    talk.pdus
}

struct Talk {
    pdus: Vec<Vec<u8>>,
    digests: Digests,
    cid: u16,
    nsid: u32,
}

impl Talk {
    fn command(&mut self, sqe: Sqe, data: &[u8], in_capsule: bool) -> u16 {
        let mut sqe = if data.is_empty() { sqe } else { codec::with_data(sqe, data.len(), in_capsule) };
        sqe[2..4].copy_from_slice(&self.cid.to_le_bytes());
        self.cid += 1;
        self.pdus.push(codec::command(&sqe, if in_capsule { data } else { &[] }, self.digests));
        self.cid - 1
    }

    fn say(&mut self, sqe: Sqe, data: &[u8], in_capsule: bool) {
        self.command(sqe, data, in_capsule);
    }

    fn read(&mut self, sqe: Sqe, len: usize) {
        let mut sqe = codec::with_data(sqe, len, false);
        sqe[2..4].copy_from_slice(&self.cid.to_le_bytes());
        self.cid += 1;
        self.pdus.push(codec::command(&sqe, &[], self.digests));
    }

    fn admin(&mut self, dice: &mut Dice) {
        match dice.below(9) {
            0 | 1 => {
                let what = dice.pick(&[0, 1, 2, 3, 5, 6, 7, 8, 0x10, 0x11, 0x12, 0x13, 0x14, 0x18, 0x1c]);
                self.read(codec::with(codec::sqe(0x06, self.nsid), 10, what), 4096);
            }
            2 | 3 => {
                let page = dice.pick(&[0, 1, 2, 3, 4, 5, 6, 0x0c, 0x0d, 0x70, 0x80]);
                let dwords = dice.pick(&[0, 15, 127, 1023]);
                let sqe = codec::with(codec::sqe(0x02, self.nsid), 10, dwords << 16 | page);
                self.read(sqe, (dwords as usize + 1) * 4);
            }
            4 => {
                let feature = dice.pick(&[1, 2, 4, 5, 6, 7, 8, 0x0a, 0x0b, 0x0f, 0x16, 0x78, 0x81, 0x82, 0x83]);
                self.read(codec::with(codec::sqe(0x0A, self.nsid), 10, feature), 4096);
            }
            5 => {
                let feature = dice.pick(&[1, 2, 4, 5, 6, 7, 8, 0x0a, 0x0b, 0x0f, 0x16, 0x81]);
                let sqe = codec::with(codec::sqe(0x09, self.nsid), 10, feature);
                let noise: Vec<u8> = (0..dice.below(64)).map(|_| dice.roll() as u8).collect();
                self.command(codec::with(sqe, 11, dice.roll() as u32), &noise, true);
            }
            6 => self.say(codec::sqe(0x0C, 0), &[], false),
            7 => self.say(codec::sqe(0x18, 0), &[], false),
            _ => {
                let mut sqe = codec::sqe(dice.roll() as u8, self.nsid);
                sqe[40..].iter_mut().for_each(|byte| *byte = dice.roll() as u8);
                self.read(sqe, dice.below(2) * 4096);
            }
        }
    }

    fn io(&mut self, dice: &mut Dice) {
        let (first, count) = (dice.below(10_000) as u64, 1 + dice.below(16) as u32);
        let len = count as usize * 512;
        match dice.below(12) {
            0 | 1 => self.read(codec::blocks(0x02, self.nsid, first, count), len),
            2 | 3 => self.say(codec::blocks(0x01, self.nsid, first, count), &vec![0x5a; len], true),
            4 => {
                // Data as if it had been asked for.
                let cid = self.command(codec::blocks(0x01, self.nsid, first, 64), &[0x5a; 64 * 512], false);
                let piece = dice.pick(&[4096, 32 << 10]);
                for at in (0..64 * 512).step_by(piece) {
                    let (tag, last) = (dice.pick(&[0, 0, 1, cid]), at + piece >= 64 * 512);
                    self.pdus.push(codec::data(cid, tag, at as u32, &vec![0x5a; piece], last, self.digests));
                }
            }
            5 => self.say(codec::sqe(0x00, self.nsid), &[], false),
            6 => {
                let mut range = vec![0; 16];
                range[4..8].copy_from_slice(&count.to_le_bytes());
                range[8..].copy_from_slice(&first.to_le_bytes());
                self.command(codec::with(codec::sqe(0x09, self.nsid), 11, 4), &range, true);
            }
            7 => self.say(codec::blocks(0x08, self.nsid, first, count), &[], false),
            8 => self.say(codec::blocks(0x05, self.nsid, first, count), &vec![0; len], true),
            9 => {
                // Compare and write, fused.
                let half = |opcode: u8, fuse: u8| {
                    let mut sqe = codec::blocks(opcode, 1, first, 1);
                    sqe[1] |= fuse;
                    sqe
                };
                self.command(half(0x05, 1), &[0; 512], true);
                self.command(half(0x01, 2), &[1; 512], true);
            }
            10 => {
                let opcode = dice.pick(&[0x0D, 0x0E, 0x11, 0x15]);
                let sqe = codec::with(codec::sqe(opcode, self.nsid), 10, dice.roll() as u32 & 0xF1F);
                match opcode {
                    0x0E => self.read(codec::with(sqe, 10, 1023), 4096),
                    _ => self.say(sqe, &[0, 0, 0, 0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 0, 1], true),
                }
            }
            _ => {
                let mut sqe = codec::sqe(dice.roll() as u8, self.nsid);
                sqe[40..].iter_mut().for_each(|byte| *byte = dice.roll() as u8);
                self.read(sqe, dice.below(3) * 4096);
            }
        }
    }
}

/// Transport of a well-behaved connection.
trait Wire: Read + Write {}

impl<T: Read + Write> Wire for T {}

/// A controller whose admin queue goes right.
pub struct Calm {
    wire: Box<dyn Wire>,
    host: String,
    cntlid: u16,
    cid: u16,
}

impl Calm {
    /// Connects as one of the hosts that only this does, and enables the controller.
    pub fn open(uri: &Uri, number: usize, key: Option<&TlsKey>) -> Result<Self> {
        let stream = TcpStream::connect(&uri.address)?;
        stream.set_read_timeout(Some(crate::PATIENCE))?;
        let host = host_name(HOSTS + number);
        let mut wire: Box<dyn Wire> = match key {
            Some(key) => Box::new(Secure::agree(stream, key, &host, &uri.subsystem)?),
            None => Box::new(stream),
        };
        wire.write_all(&codec::ic_req(Digests::default(), 0))?;
        let mut calm = Self { wire, host, cntlid: 0xFFFF, cid: 0 };
        ensure!(matches!(calm.pdu()?, Pdu::IcResp { .. }), "no ICResp");
        let (sqe, data) = codec::connect(0, 32, &uri.subsystem, &calm.host, 0xFFFF, false);
        calm.cntlid = calm.run(sqe, &data)?.result as u16;
        calm.run(codec::property(0x14, false, Some(1 | 6 << 16 | 4 << 20)), &[])?;
        Ok(calm)
    }

    /// Its number and its host's name, for I/O queues.
    pub fn controller(&self) -> (u16, &str) {
        (self.cntlid, &self.host)
    }

    /// Says that the host is there; an error when the target has ended the controller.
    pub fn turn(&mut self) -> Result<()> {
        self.run(codec::sqe(0x18, 0), &[]).map(drop)
    }

    fn run(&mut self, sqe: Sqe, data: &[u8]) -> Result<Completion> {
        let mut sqe = if data.is_empty() { sqe } else { codec::with_data(sqe, data.len(), true) };
        sqe[2..4].copy_from_slice(&self.cid.to_le_bytes());
        self.cid = (self.cid + 1) % 1024;
        self.wire.write_all(&codec::command(&sqe, data, Digests::default()))?;
        match self.pdu()? {
            Pdu::Response(completion) => {
                ensure!(completion.status == 0, "a command fails with {:#x}", completion.status);
                Ok(completion)
            }
            other => bail!("{other:?}"),
        }
    }

    fn pdu(&mut self) -> Result<Pdu> {
        let mut bytes = vec![0; 8];
        self.wire.read_exact(&mut bytes)?;
        let len = u32::from_le_bytes([bytes[4], bytes[5], bytes[6], bytes[7]]) as usize;
        ensure!((8..=1 << 20).contains(&len), "a PDU of {len} bytes");
        bytes.resize(len, 0);
        self.wire.read_exact(&mut bytes[8..])?;
        codec::decode(&bytes, Digests::default()).map(|(pdu, _)| pdu).context("half a PDU")
    }
}
