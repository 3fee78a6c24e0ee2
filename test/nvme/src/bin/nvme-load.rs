//! Benchmarks a namespace from one thread on one connection, and prints the results as JSON.

use std::io::{Read, Write};
use std::net::TcpStream;

use anyhow::{Context, Result, bail, ensure};
use clap::Parser;
use forebay_load::Load;
use forebay_load::load::{self, Command};
use forebay_nvme_host::codec::{self, Digests, Pdu};
use forebay_nvme_host::handshake::shake;
use forebay_nvme_host::target::Uri;
use forebay_nvmf::session::psk::TlsKey;
use forebay_tls::{Read as Opened, TlsSession, sealed_len};

#[derive(Parser)]
struct Arguments {
    /// nvme+tcp://HOST:PORT/NQN#NSID
    uri: Uri,
    #[command(flatten)]
    load: Load,
    /// Idle connections: admin queues, each with as many I/O queues as a host of many cores has
    #[arg(long, default_value_t = 0)]
    idle: usize,
    /// Header and data digests
    #[arg(long)]
    digests: bool,
    /// The host's name
    #[arg(long, default_value = "nqn.2014-08.org.nvmexpress:uuid:00000000-0000-4000-8000-00000000f0eb")]
    host: String,
    /// Through TLS, with this key, as 'nvme gen-tls-key' prints it
    #[arg(long, value_parser = TlsKey::parse)]
    tls_key: Option<TlsKey>,
}

/// Maximum in-capsule data in bytes.
const IN_CAPSULE: usize = 16 << 10;
/// Receive buffer size in bytes of an idle connection.
const ROOM_IDLE: usize = 8 << 10;
/// Connections of an idle controller, including its admin queue.
const QUEUES_IDLE: usize = 10;

/// Data bytes per TLS record.
const RECORD: usize = 16 << 10;

/// TLS session, with received bytes that are not decrypted yet.
struct Secure {
    session: TlsSession,
    sealed: Vec<u8>,
    from: usize,
    to: usize,
}

impl Secure {
    fn agree(stream: &mut TcpStream, key: &TlsKey, host: &str, subsystem: &str, room: usize) -> Result<Self> {
        let mut session = TlsSession::connect(&key.psks(host, subsystem)[..1])?;
        let mut sealed = Vec::new();
        ensure!(shake(stream, &mut session, &mut sealed, |_| {})?, "there is no agreement on TLS");
        let to = sealed.len();
        sealed.resize(to + room, 0);
        Ok(Self { session, sealed, from: 0, to })
    }

    /// Decrypts buffered bytes, receiving more if necessary; returns the number of data bytes.
    fn read(&mut self, stream: &mut TcpStream, out: &mut [u8]) -> Result<usize> {
        loop {
            let mut left = &self.sealed[self.from..self.to];
            let read = self.session.read(&mut left, out)?;
            self.from = self.to - left.len();
            match read {
                Opened::Data(len) => return Ok(len),
                Opened::Closed => return Ok(0),
                Opened::NeedInput => {}
            }
            if self.from == self.to || self.to == self.sealed.len() {
                self.sealed.copy_within(self.from..self.to, 0);
                (self.from, self.to) = (0, self.to - self.from);
            }
            let got = stream.read(&mut self.sealed[self.to..])?;
            if got == 0 {
                return Ok(0);
            }
            self.to += got;
        }
    }

    fn seal(&mut self, out: &mut Vec<u8>) -> Result<()> {
        let mut sealed = vec![0; out.chunks(RECORD).map(|part| sealed_len(part.len())).sum()];
        let mut at = 0;
        for part in out.chunks(RECORD) {
            at += self.session.write(part, &mut sealed[at..])?;
        }
        sealed.truncate(at);
        *out = sealed;
        Ok(())
    }
}

/// Minimal NVMe/TCP queue connection.
struct Queue {
    stream: TcpStream,
    secure: Option<Secure>,
    input: Vec<u8>,
    from: usize,
    to: usize,
    digests: Digests,
    nsid: u32,
}

impl Queue {
    fn open(arguments: &Arguments, queue: u16, entries: u16, cntlid: u16, room: usize) -> Result<(Self, u16)> {
        let digests = Digests { header: arguments.digests, data: arguments.digests };
        let mut stream = TcpStream::connect(&arguments.uri.address).context("connecting")?;
        stream.set_nodelay(true)?;
        let agree = |key| Secure::agree(&mut stream, key, &arguments.host, &arguments.uri.subsystem, room);
        let secure = arguments.tls_key.as_ref().map(agree).transpose()?;
        let (input, nsid) = (vec![0; room], arguments.uri.nsid);
        let mut this = Self { stream, secure, input, from: 0, to: 0, digests: Digests::default(), nsid };
        this.say(codec::ic_req(digests, 0))?;
        ensure!(matches!(this.pdu()?, Pdu::IcResp { .. }), "no ICResp");
        this.digests = digests;
        let (mut sqe, data) = codec::connect(queue, entries, &arguments.uri.subsystem, &arguments.host, cntlid, false);
        sqe = codec::with_data(sqe, data.len(), true);
        let result = this.call(&sqe, &data)?;
        Ok((this, result as u16))
    }

    /// Connects an admin queue and enables its controller; returns it with the controller id.
    fn controller(arguments: &Arguments, room: usize) -> Result<(Self, u16)> {
        let (mut admin, cntlid) = Self::open(arguments, 0, 32, 0xFFFF, room)?;
        admin.call(&codec::property(0x14, false, Some(1 | 6 << 16 | 4 << 20)), &[])?;
        Ok((admin, cntlid))
    }

    fn say(&mut self, mut bytes: Vec<u8>) -> Result<()> {
        load::Session::seal(self, &mut bytes)?;
        Ok(self.stream.write_all(&bytes)?)
    }

    fn call(&mut self, sqe: &codec::Sqe, data: &[u8]) -> Result<u64> {
        self.say(codec::command(sqe, data, self.digests))?;
        match self.pdu()? {
            Pdu::Response(completion) if completion.status == 0 => Ok(completion.result),
            other => bail!("{other:x?}"),
        }
    }

    fn pdu(&mut self) -> Result<Pdu> {
        loop {
            if let Some((pdu, len)) = codec::decode(&self.input[self.from..self.to], self.digests) {
                self.from += len;
                return Ok(pdu);
            }
            load::Session::fill(self)?;
        }
    }

    /// Returns the number of logical blocks of the namespace.
    fn identify(&mut self) -> Result<u64> {
        let sqe = codec::with_data(codec::sqe(0x06, self.nsid), 4096, false);
        self.say(codec::command(&sqe, &[], self.digests))?;
        let Pdu::Data { data, success, .. } = self.pdu()? else { bail!("no data") };
        if !success {
            ensure!(matches!(self.pdu()?, Pdu::Response(completion) if completion.status == 0), "identify");
        }
        Ok(u64::from_le_bytes(data[..8].try_into()?))
    }
}

impl load::Session for Queue {
    fn stream(&mut self) -> &mut TcpStream {
        &mut self.stream
    }

    fn fill(&mut self) -> Result<()> {
        if self.from == self.to {
            (self.from, self.to) = (0, 0);
        } else if self.from > self.input.len() / 2 || self.to == self.input.len() {
            self.input.copy_within(self.from..self.to, 0);
            (self.from, self.to) = (0, self.to - self.from);
        }
        let room = &mut self.input[self.to..];
        let got = match &mut self.secure {
            Some(secure) => secure.read(&mut self.stream, room)?,
            None => self.stream.read(room)?,
        };
        ensure!(got > 0, "the target has closed the connection");
        self.to += got;
        Ok(())
    }

    fn seal(&mut self, out: &mut Vec<u8>) -> Result<()> {
        self.secure.as_mut().map_or(Ok(()), |secure| secure.seal(out))
    }

    fn command(&mut self, out: &mut Vec<u8>, command: &Command<'_>) {
        let opcode = if command.data.is_empty() { 2 } else { 1 };
        let mut sqe = codec::blocks(opcode, self.nsid, command.block, command.count);
        sqe[2..4].copy_from_slice(&command.tag.to_le_bytes());
        let data = if command.data.len() <= IN_CAPSULE { command.data } else { &[] };
        let sqe = codec::with_data(sqe, command.count as usize * 512, !data.is_empty());
        if self.digests != Digests::default() {
            return out.extend_from_slice(&codec::command(&sqe, data, self.digests));
        }
        // Equivalent to `codec::command`, without allocating a vector each time.
        let len = (72 + data.len()) as u32;
        out.extend_from_slice(&[4, 0, 72, if data.is_empty() { 0 } else { 72 }]);
        out.extend_from_slice(&len.to_le_bytes());
        out.extend_from_slice(&sqe);
        out.extend_from_slice(data);
    }

    fn done(&mut self, out: &mut Vec<u8>, data: &[u8]) -> Result<Option<u16>> {
        // Complete PDUs are parsed in place.
        while self.to - self.from >= 24 {
            let head = &self.input[self.from..self.to];
            let len = u32::from_le_bytes(head[4..8].try_into()?) as usize;
            if head.len() < len {
                break;
            }
            self.from += len;
            let word = |at: usize| u16::from_le_bytes([head[at], head[at + 1]]);
            match head[0] {
                // Success flag: no response capsule follows.
                7 if head[1] & 8 != 0 => return Ok(Some(word(8))),
                7 => {}
                5 => {
                    let status = word(22) >> 1 & 0x7FF;
                    ensure!(status == 0, "a command failed with {status:#x}");
                    return Ok(Some(word(20)));
                }
                9 => out.extend_from_slice(&codec::data(word(8), word(10), 0, data, true, self.digests)),
                kind => bail!("a PDU of type {kind}"),
            }
        }
        Ok(None)
    }
}

fn main() -> Result<()> {
    let arguments = Arguments::parse();
    let mut standing = Vec::new();
    while standing.len() < arguments.idle {
        let (admin, cntlid) = Queue::controller(&arguments, ROOM_IDLE)?;
        standing.push(admin);
        for id in 1..QUEUES_IDLE.min(1 + arguments.idle - standing.len()) {
            standing.push(Queue::open(&arguments, id as u16, 128, cntlid, ROOM_IDLE)?.0);
        }
    }
    if arguments.load.seconds <= 0.0 {
        println!("{} connections", standing.len());
        std::io::stdin().read_line(&mut String::new())?;
        return Ok(());
    }
    let (mut admin, cntlid) = Queue::controller(&arguments, 16 << 10)?;
    let size = admin.identify()? * 512;
    let entries = (arguments.load.depth + 1).max(2);
    let (mut queue, _) = Queue::open(&arguments, 1, entries, cntlid, 2 << 20)?;
    println!("{}", load::run(&mut queue, size, &arguments.load)?);
    drop(standing);
    Ok(())
}
