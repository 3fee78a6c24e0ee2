//! A session on the reactor: one connection, error recovery level 0.

use std::collections::{BTreeMap, VecDeque};
use std::io;

use forebay_iscsi::wire::{Lun, Response, TAG_NONE, request, response};
use forebay_reactor::{Addr, Buf, BufMut, Stream};

use crate::cdb::Cdb;
use crate::codec::{self, Digests, Pdu};

/// Who logs in, and how.
#[derive(Debug, Clone)]
pub struct Options {
    /// The initiator's name.
    pub initiator: String,
    /// Its part of the session's name.
    pub isid: [u8; 6],
    /// The target; empty for a discovery session.
    pub target: String,
    /// Digests that are asked for.
    pub digests: Digests,
    /// Bytes of data sent along with a command; nothing more is sent unasked.
    pub immediate: usize,
    /// Longest data segment that is taken.
    pub segment: usize,
}

impl Options {
    /// A host of a target.
    pub fn new(target: &str, initiator: &str) -> Self {
        Self {
            initiator: initiator.into(),
            isid: [0x80, 0, 0, 1, 0, 0],
            target: target.into(),
            digests: Digests::default(),
            immediate: 8192,
            segment: 64 << 10,
        }
    }
}

/// What a command came to.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Done {
    /// The command.
    pub itt: u32,
    /// Its status.
    pub status: u8,
    /// Its sense data, without the length before it.
    pub sense: Vec<u8>,
    /// What it read.
    pub data: Vec<u8>,
    /// Bytes that the command moves beyond those that were expected, or short of them.
    pub residual: i64,
}

impl Done {
    /// What it read, when it went well.
    ///
    /// # Panics
    /// When it failed.
    pub fn ok(self) -> Vec<u8> {
        assert_eq!(self.status, 0, "the command failed: {self:x?}");
        self.data
    }

    /// Sense key, and additional sense code with its qualifier.
    pub fn sense(&self) -> Option<(u8, u16)> {
        let sense = &self.sense;
        (sense.len() >= 14).then(|| (sense[2] & 0xf, u16::from_be_bytes([sense[12], sense[13]])))
    }
}

/// A residual count as a number with a sign.
fn residual(flags: u8, count: u32) -> i64 {
    use forebay_iscsi::wire::response_flag::{OVERFLOW, UNDERFLOW};
    match (flags & OVERFLOW != 0, flags & UNDERFLOW != 0) {
        (false, false) => 0,
        (true, false) => count.into(),
        (false, true) => -i64::from(count),
        (true, true) => panic!("overflow and underflow at once"),
    }
}

/// A session.
pub struct Client {
    stream: Stream,
    options: Options,
    digests: Digests,
    input: Vec<u8>,
    cmd_sn: u32,
    last_cmd_sn: u32,
    next_itt: u32,
    /// What is to be sent when it is asked for, by command.
    outgoing: BTreeMap<u32, ([u8; 8], Vec<u8>)>,
    reading: BTreeMap<u32, Vec<u8>>,
    done: VecDeque<Done>,
    /// Responses to what is not a command, and what came unasked.
    pub others: VecDeque<(Response, Vec<u8>)>,
}

impl Client {
    /// Logs in.
    ///
    /// # Errors
    /// When the target refuses, with the status in the text.
    pub async fn login(addr: &Addr, options: &Options) -> io::Result<Self> {
        let stream = Stream::connect(addr).await?;
        let mut client = Self {
            stream,
            options: options.clone(),
            digests: Digests::default(),
            input: Vec::new(),
            cmd_sn: 1,
            last_cmd_sn: 1,
            next_itt: 1,
            outgoing: BTreeMap::new(),
            reading: BTreeMap::new(),
            done: VecDeque::new(),
            others: VecDeque::new(),
        };
        let digest = |on: bool| if on { "CRC32C" } else { "None" };
        let segment = options.segment.to_string();
        let mut pairs = vec![
            ("InitiatorName", options.initiator.as_str()),
            ("HeaderDigest", digest(options.digests.header)),
            ("DataDigest", digest(options.digests.data)),
            ("MaxRecvDataSegmentLength", &segment),
        ];
        match options.target.as_str() {
            "" => pairs.push(("SessionType", "Discovery")),
            target => pairs.extend([("TargetName", target), ("InitialR2T", "Yes"), ("ImmediateData", "Yes")]),
        }
        client.send(&codec::login(options.isid, client.cmd_sn, &pairs)).await?;
        match client.pdu().await? {
            Some(Pdu::Login(header, _)) if header.status.get() == 0 => {
                client.digests = options.digests;
                client.last_cmd_sn = header.max_cmd_sn.get();
                Ok(client)
            }
            Some(Pdu::Login(header, _)) => {
                Err(io::Error::other(format!("the login is refused: {:#06x}", header.status.get())))
            }
            other => Err(io::Error::other(format!("{other:?} instead of a Login Response"))),
        }
    }

    /// Does one command: `data` goes to the target, `read` bytes come back.
    pub async fn run(&mut self, lun: u16, cdb: Cdb, data: &[u8], read: usize) -> io::Result<Done> {
        let itt = self.start(lun, cdb, data, read).await?;
        self.finish(itt).await
    }

    /// The same, again and again while a unit attention is in the way.
    pub async fn settle(&mut self, lun: u16, cdb: Cdb, data: &[u8], read: usize) -> io::Result<Done> {
        loop {
            let done = self.run(lun, cdb, data, read).await?;
            if done.sense().is_none_or(|(key, _)| key != 6) {
                return Ok(done);
            }
        }
    }

    /// Begins a command; returns its number.
    pub async fn start(&mut self, lun: u16, cdb: Cdb, data: &[u8], read: usize) -> io::Result<u32> {
        while self.cmd_sn.wrapping_sub(self.last_cmd_sn) as i32 > 0 {
            self.step().await?;
        }
        let (itt, lun) = (self.tag(), Lun::Unit(lun).to_bytes());
        let header = codec::command(lun, itt, self.cmd_sn, cdb, data.len().max(read), !data.is_empty());
        self.cmd_sn = self.cmd_sn.wrapping_add(1);
        let now = data.len().min(self.options.immediate);
        if now < data.len() {
            self.outgoing.insert(itt, (lun, data.to_vec()));
        }
        if read > 0 {
            self.reading.insert(itt, Vec::new());
        }
        self.send(&codec::pdu(&header, &data[..now], self.digests)).await?;
        Ok(itt)
    }

    /// Waits until a command is done.
    pub async fn finish(&mut self, itt: u32) -> io::Result<Done> {
        loop {
            if let Some(at) = self.done.iter().position(|done| done.itt == itt) {
                return Ok(self.done.remove(at).unwrap_or_default());
            }
            self.step().await?;
        }
    }

    /// Waits until any command is done.
    pub async fn any(&mut self) -> io::Result<Done> {
        loop {
            if let Some(done) = self.done.pop_front() {
                return Ok(done);
            }
            self.step().await?;
        }
    }

    /// Something has come that nobody has taken.
    pub fn has_answers(&self) -> bool {
        !self.done.is_empty() || !self.others.is_empty()
    }

    /// Sends a function of task management; returns its number.
    pub async fn start_task(&mut self, function: u8, lun: u16, referenced: u32) -> io::Result<u32> {
        let itt = self.tag();
        let header = codec::task(function, Lun::Unit(lun).to_bytes(), itt, referenced, self.cmd_sn);
        self.send(&codec::pdu(&header, &[], self.digests)).await?;
        Ok(itt)
    }

    /// Does a function of task management, and returns the response.
    pub async fn task(&mut self, function: u8, lun: u16, referenced: u32) -> io::Result<u8> {
        self.start_task(function, lun, referenced).await?;
        Ok(self.response(response::TASK_MANAGEMENT).await?.0.code)
    }

    /// Asks with a text, and returns the answer.
    pub async fn text(&mut self, pairs: &[(&str, &str)]) -> io::Result<Vec<u8>> {
        let header = codec::other(request::TEXT, 0, self.tag(), self.cmd_sn);
        self.send(&codec::pdu(&header, &codec::text(pairs), self.digests)).await?;
        Ok(self.response(response::TEXT).await?.1)
    }

    /// Asks whether the target is there.
    pub async fn ping(&mut self) -> io::Result<()> {
        let header = codec::other(request::NOP_OUT, 0, self.tag(), self.cmd_sn);
        self.send(&codec::pdu(&header, b"ping", self.digests)).await?;
        self.response(response::NOP_IN).await.map(drop)
    }

    /// Logs out.
    pub async fn logout(mut self) -> io::Result<()> {
        let header = codec::other(request::LOGOUT, 0, self.tag(), self.cmd_sn);
        self.send(&codec::pdu(&header, &[], self.digests)).await?;
        let (header, _) = self.response(response::LOGOUT).await?;
        match header.code {
            0 => Ok(()),
            code => Err(io::Error::other(format!("the logout is refused: {code}"))),
        }
    }

    /// The next PDU with an opcode; what comes before it is kept.
    pub async fn response(&mut self, opcode: u8) -> io::Result<(Response, Vec<u8>)> {
        loop {
            if let Some(at) = self.others.iter().position(|(header, _)| header.opcode == opcode) {
                return self.others.remove(at).ok_or_else(|| io::Error::other("it was just there"));
            }
            self.step().await?;
        }
    }

    /// Takes the next PDU.
    pub async fn step(&mut self) -> io::Result<()> {
        let ended = || io::Error::new(io::ErrorKind::UnexpectedEof, "the target has closed the connection");
        match self.pdu().await?.ok_or_else(ended)? {
            Pdu::Status(header, data) => {
                let itt = header.itt.get();
                self.last_cmd_sn = header.max_cmd_sn.get();
                self.outgoing.remove(&itt);
                let sense = data.get(2..).unwrap_or_default().to_vec();
                let data = self.reading.remove(&itt).unwrap_or_default();
                let residual = residual(header.flags, header.residual.get());
                self.done.push_back(Done { itt, status: header.status, sense, data, residual });
            }
            Pdu::Data(header, data) => {
                let itt = header.itt.get();
                let reading = self.reading.get_mut(&itt).ok_or_else(|| io::Error::other("data nobody asked for"))?;
                assert_eq!(header.offset.get() as usize, reading.len(), "data comes in order");
                reading.extend_from_slice(&data);
                if header.flags & forebay_iscsi::wire::response_flag::STATUS != 0 {
                    self.last_cmd_sn = header.max_cmd_sn.get();
                    let data = self.reading.remove(&itt).unwrap_or_default();
                    let residual = residual(header.flags, header.residual.get());
                    self.done.push_back(Done { itt, status: header.status, sense: Vec::new(), data, residual });
                }
            }
            Pdu::Ready(header) => {
                let (itt, ttt, offset) = (header.itt.get(), header.ttt.get(), header.offset.get());
                let Some((lun, bytes)) = self.outgoing.get(&itt) else {
                    return Err(io::Error::other("R2T for a command without data"));
                };
                let (lun, part) = (*lun, bytes[offset as usize..(offset + header.len.get()) as usize].to_vec());
                let count = part.chunks(8192).count();
                for (index, piece) in part.chunks(8192).enumerate() {
                    let at = offset + index as u32 * 8192;
                    let header = codec::data_out(lun, itt, ttt, index as u32, at, index + 1 == count);
                    self.send(&codec::pdu(&header, piece, self.digests)).await?;
                }
            }
            Pdu::Other(header, _) if header.opcode == response::NOP_IN && header.itt.get() == TAG_NONE => {
                if header.ttt.get() != TAG_NONE {
                    let mut pong = codec::other(request::NOP_OUT, 0, TAG_NONE, self.cmd_sn);
                    pong.ttt = header.ttt;
                    self.send(&codec::pdu(&pong, &[], self.digests)).await?;
                }
            }
            Pdu::Other(header, data) => self.others.push_back((header, data)),
            Pdu::Login(..) => return Err(io::Error::other("a second Login Response")),
        }
        Ok(())
    }

    /// The next PDU; `None` at the end of the stream.
    pub async fn pdu(&mut self) -> io::Result<Option<Pdu>> {
        loop {
            if let Some((pdu, len)) = codec::decode(&self.input, self.digests) {
                self.input.drain(..len);
                return Ok(Some(pdu));
            }
            let (got, buf) = self.stream.recv(BufMut::with_capacity(64 << 10)).await;
            if got? == 0 {
                return Ok(None);
            }
            self.input.extend_from_slice(&buf);
        }
    }

    /// Sends bytes as they are.
    pub async fn send(&self, bytes: &[u8]) -> io::Result<()> {
        self.stream.send(Buf::copy_of(bytes)).await
    }

    /// The connection, for who sends while somebody else receives.
    pub fn stream(&self) -> Stream {
        self.stream.clone()
    }

    /// The number of the next command.
    pub fn cmd_sn(&self) -> u32 {
        self.cmd_sn
    }

    /// Ends the connection without a word.
    pub fn close(self) {
        self.stream.shutdown();
    }

    fn tag(&mut self) -> u32 {
        self.next_itt += 1;
        self.next_itt - 1
    }
}
