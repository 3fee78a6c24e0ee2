//! Sessions of an iSCSI initiator.

use std::io::Write;
use std::net::TcpStream;

use anyhow::{Result, ensure};
use forebay_iscsi::wire::{FINAL, Lun, TAG_NONE, request, task_function};
use forebay_iscsi_host::cdb::{self, Cdb};
use forebay_iscsi_host::codec::{self, Digests};
use forebay_iscsi_host::target::Uri;
use forebay_load::Dice;

/// Initiators that there are.
const INITIATORS: usize = 64;

/// Returns the PDUs of a session.
pub fn session(dice: &mut Dice, uri: &Uri) -> Vec<Vec<u8>> {
    let digests = match dice.below(4) {
        0 => Digests { header: true, data: true },
        1 => Digests { header: dice.once_in(2), data: true },
        _ => Digests::default(),
    };
    let mut talk = Talk { pdus: Vec::new(), digests, cmd_sn: 1, itt: 1, lun: uri.lun };
    let initiator = format!("iqn.2026-11.io.forebay:malformed-{}", dice.below(INITIATORS));
    let digest = |on: bool| if on { "CRC32C" } else { "None" };
    let discovery = dice.once_in(8);
    let mut pairs = vec![
        ("InitiatorName", initiator.as_str()),
        ("HeaderDigest", digest(digests.header)),
        ("DataDigest", digest(digests.data)),
        ("MaxRecvDataSegmentLength", "65536"),
        ("MaxBurstLength", "262144"),
        ("FirstBurstLength", "16384"),
        ("InitialR2T", if dice.once_in(2) { "Yes" } else { "No" }),
        ("ImmediateData", "Yes"),
        ("MaxOutstandingR2T", "4"),
        ("MaxConnections", "1"),
        ("DefaultTime2Wait", "2"),
        ("DefaultTime2Retain", "0"),
        ("DataPDUInOrder", "Yes"),
        ("DataSequenceInOrder", "Yes"),
        ("ErrorRecoveryLevel", "0"),
    ];
    match discovery {
        true => pairs.push(("SessionType", "Discovery")),
        false => pairs.extend([("TargetName", uri.target.as_str()), ("SessionType", "Normal")]),
    }
    let isid = [0x80, 0, 0, 9, 0, dice.below(8) as u8];
    talk.pdus.push(codec::login(isid, talk.cmd_sn, &pairs));
    if discovery {
        talk.other(request::TEXT, 0, &codec::text(&[("SendTargets", "All")]));
    } else {
        // The first command is told of the power on.
        talk.command(cdb::test_unit_ready(), 0, &[]);
        for _ in 0..1 + dice.below(8) {
            talk.anything(dice);
        }
    }
    if dice.once_in(2) {
        talk.other(request::LOGOUT, 0, &[]);
    }
    talk.pdus
}

struct Talk {
    pdus: Vec<Vec<u8>>,
    digests: Digests,
    cmd_sn: u32,
    itt: u32,
    lun: u16,
}

impl Talk {
    fn command(&mut self, cdb: Cdb, read: usize, data: &[u8]) {
        self.command_of(cdb, data.len().max(read), data, !data.is_empty());
    }

    fn command_of(&mut self, cdb: Cdb, expected: usize, now: &[u8], writes: bool) -> u32 {
        let itt = self.itt;
        let header = codec::command(Lun::Unit(self.lun).to_bytes(), itt, self.cmd_sn, cdb, expected, writes);
        (self.itt, self.cmd_sn) = (itt + 1, self.cmd_sn.wrapping_add(1));
        self.pdus.push(codec::pdu(&header, now, self.digests));
        itt
    }

    fn other(&mut self, opcode: u8, flags: u8, data: &[u8]) {
        let header = codec::other(opcode, flags, self.itt, self.cmd_sn);
        self.itt += 1;
        self.pdus.push(codec::pdu(&header, data, self.digests));
    }

    fn task(&mut self, function: u8, referenced: u32) {
        let header = codec::task(function, Lun::Unit(self.lun).to_bytes(), self.itt, referenced, self.cmd_sn);
        self.itt += 1;
        self.pdus.push(codec::pdu(&header, &[], self.digests));
    }

    /// One of the things that initiators do.
    fn anything(&mut self, dice: &mut Dice) {
        let (lba, blocks) = (dice.below(10_000) as u64, 1 + dice.below(16));
        let noise = |dice: &mut Dice, len: usize| (0..len).map(|_| dice.roll() as u8).collect::<Vec<u8>>();
        match dice.below(18) {
            0 | 1 => self.command(cdb::read(lba, blocks as u32), blocks * 512, &[]),
            2 | 3 => self.command(cdb::write(lba, blocks as u32), 0, &noise(dice, blocks * 512)),
            4 => self.long_write(dice, lba),
            5 => {
                let page = dice.pick(&[None, Some(0), Some(0x80), Some(0x83), Some(0xb0), Some(0xb1), Some(0xb2)]);
                self.command(cdb::inquiry(page), 255, &[]);
            }
            6 => {
                let mut list = vec![0, 22, 0, 16, 0, 0, 0, 0];
                list.extend(lba.to_be_bytes());
                list.extend((blocks as u32).to_be_bytes());
                list.extend([0; 4]);
                self.command(cdb::unmap(24), 0, &list);
            }
            7 => self.command(cdb::compare_and_write(lba, 1), 0, &noise(dice, 1024)),
            8 => self.command(cdb::write_same(lba, blocks as u32, dice.once_in(2)), 0, &[0; 512]),
            9 => {
                let (action, kind) = (dice.below(8) as u8, dice.pick(&[1, 3, 5, 6, 7, 8]));
                let list = cdb::reserve_list(dice.below(3) as u64, dice.below(3) as u64, false);
                self.command(cdb::reserve_out(action, kind), 0, &list);
            }
            10 => self.command(cdb::reserve_in(dice.below(4) as u8), 1024, &[]),
            11 => self.command(cdb::report_luns(), 1024, &[]),
            12 => self.command(cdb::sync(), 0, &[]),
            13 => self.other(request::NOP_OUT, 0, &noise(dice, 64)),
            14 => self.other(request::TEXT, 0, &codec::text(&[("SendTargets", "")])),
            15 => {
                let function = dice.pick(&[
                    task_function::ABORT_TASK,
                    task_function::ABORT_TASK_SET,
                    task_function::CLEAR_TASK_SET,
                    task_function::LOGICAL_UNIT_RESET,
                    task_function::TARGET_WARM_RESET,
                    task_function::TASK_REASSIGN,
                ]);
                self.task(function, self.itt.saturating_sub(2));
            }
            // Any command at all, with a list of parameters.
            _ => {
                let mut cdb = [0; 16];
                cdb.iter_mut().for_each(|byte| *byte = dice.roll() as u8);
                cdb[0] = dice.pick(&[
                    0x03, 0x15, 0x1a, 0x1b, 0x1d, 0x25, 0x28, 0x2a, 0x2e, 0x2f, 0x34, 0x35, 0x37, 0x41, 0x42, 0x4d,
                    0x55, 0x56, 0x57, 0x5a, 0x5e, 0x5f, 0x83, 0x84, 0x88, 0x89, 0x8a, 0x8b, 0x8e, 0x8f, 0x90, 0x91,
                    0x93, 0x9e, 0xa0, 0xa3, 0xa4, 0xa8, 0xaa, 0xae, 0xaf, 0xb7,
                ]);
                let len = dice.below(600);
                match dice.once_in(2) {
                    true => self.command(cdb, 0, &noise(dice, len + 1)),
                    false => self.command(cdb, len * 8, &[]),
                }
            }
        }
    }

    /// A write whose data follows: unasked, or as if it had been asked for.
    fn long_write(&mut self, dice: &mut Dice, lba: u64) {
        let blocks = 32 + dice.below(64);
        let len = blocks * 512;
        let data = vec![0x5a; len];
        let now = dice.pick(&[0, 512, 8192]);
        let itt = self.command_of(cdb::write(lba, blocks as u32), len, &data[..now], true);
        // The target counts its tags from 0.
        let ttt = dice.pick(&[0, 0, 0, 1, TAG_NONE]);
        let piece = dice.pick(&[512, 4096, 8192]);
        let pieces = data[now..].chunks(piece);
        let last = pieces.len();
        for (index, piece_of) in pieces.enumerate() {
            let offset = (now + index * piece) as u32;
            let header =
                codec::data_out(Lun::Unit(self.lun).to_bytes(), itt, ttt, index as u32, offset, index + 1 == last);
            self.pdus.push(codec::pdu(&header, piece_of, self.digests));
        }
    }
}

/// A session that goes right, beside all those that do not.
pub struct Calm {
    stream: TcpStream,
    cmd_sn: u32,
    lun: u16,
}

impl Calm {
    /// Logs in.
    pub fn open(uri: &Uri, initiator: &str) -> Result<Self> {
        let mut stream = TcpStream::connect(&uri.address)?;
        stream.set_read_timeout(Some(crate::PATIENCE))?;
        let pairs = [("InitiatorName", initiator), ("TargetName", &uri.target), ("InitialR2T", "Yes")];
        stream.write_all(&codec::login([0x80, 0, 0, 7, 0, 0], 1, &pairs))?;
        let mut calm = Self { stream, cmd_sn: 1, lun: uri.lun };
        calm.pdu()?;
        // What there is to be told.
        for _ in 0..2 {
            calm.run(cdb::test_unit_ready(), &[], 0)?;
        }
        Ok(calm)
    }

    /// Writes a pattern, and reads what it wrote before.
    pub fn turn(&mut self, round: u64) -> Result<()> {
        let pattern = |round: u64| vec![round as u8; 4096];
        let at = |round: u64| round % 64 * 8;
        self.run(cdb::write(at(round), 8), &pattern(round), 0)?;
        if let Some(before) = round.checked_sub(1) {
            ensure!(self.run(cdb::read(at(before), 8), &[], 4096)? == pattern(before), "it reads something else");
        }
        Ok(())
    }

    fn run(&mut self, cdb: Cdb, data: &[u8], read: usize) -> Result<Vec<u8>> {
        let lun = Lun::Unit(self.lun).to_bytes();
        let header = codec::command(lun, self.cmd_sn, self.cmd_sn, cdb, data.len().max(read), !data.is_empty());
        self.cmd_sn = self.cmd_sn.wrapping_add(1);
        self.stream.write_all(&codec::pdu(&header, data, Digests::default()))?;
        loop {
            match self.pdu()? {
                codec::Pdu::Data(header, data) => {
                    ensure!(header.flags & FINAL != 0 && header.status == 0, "a read fails");
                    return Ok(data);
                }
                codec::Pdu::Status(header, _) => {
                    ensure!(header.status == 0 || cdb[0] == 0, "a command fails with status {}", header.status);
                    return Ok(Vec::new());
                }
                // It is asked whether it is there; what it does next is an answer.
                codec::Pdu::Other(header, _) if header.opcode == forebay_iscsi::wire::response::NOP_IN => {}
                other => anyhow::bail!("{other:?}"),
            }
        }
    }

    fn pdu(&mut self) -> Result<codec::Pdu> {
        use std::io::Read;
        let mut bytes = vec![0; 48];
        self.stream.read_exact(&mut bytes)?;
        let len = usize::from(bytes[5]) << 16 | usize::from(bytes[6]) << 8 | usize::from(bytes[7]);
        let from = bytes.len();
        bytes.resize(from + len.next_multiple_of(4), 0);
        self.stream.read_exact(&mut bytes[from..])?;
        codec::decode(&bytes, Digests::default()).map(|(pdu, _)| pdu).ok_or_else(|| anyhow::anyhow!("half a PDU"))
    }
}
