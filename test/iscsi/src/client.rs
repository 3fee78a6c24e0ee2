//! iSCSI session on the reactor: one connection, error recovery level 0.

use std::collections::{BTreeMap, VecDeque};
use std::io;

use forebay_iscsi::session::chap::{Algorithm, Chap};
use forebay_iscsi::session::text;
use forebay_iscsi::wire::{
    CONTINUE, FINAL, LoginResponse, Lun, Response, TAG_NONE, logout_response, request, response,
};
use forebay_reactor::{Addr, Buf, BufMut, Stream};

use crate::cdb::Cdb;
use crate::codec::{self, Digests, Pdu};

/// Login options.
#[derive(Debug, Clone)]
pub struct Options {
    /// Initiator name.
    pub initiator: String,
    /// Initiator session id (ISID).
    pub isid: [u8; 6],
    /// Target name; empty for a discovery session.
    pub target: String,
    /// Digests to negotiate.
    pub digests: Digests,
    /// Maximum immediate data in bytes; no other unsolicited data is sent.
    pub immediate: usize,
    /// Maximum data segment that is received, in bytes.
    pub segment: usize,
    /// CHAP credential of the initiator; the target has to authenticate too if there is a second credential.
    pub chap: Option<Chap>,
}

impl Options {
    /// Creates options for a session with a target.
    pub fn new(target: &str, initiator: &str) -> Self {
        Self {
            initiator: initiator.into(),
            isid: [0x80, 0, 0, 1, 0, 0],
            target: target.into(),
            digests: Digests::default(),
            immediate: 8192,
            segment: 64 << 10,
            chap: None,
        }
    }
}

/// Outcome of a command.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Done {
    /// Initiator task tag of the command.
    pub itt: u32,
    /// SCSI status.
    pub status: u8,
    /// Sense data, without the length field before it.
    pub sense: Vec<u8>,
    /// Data read.
    pub data: Vec<u8>,
    /// Residual count in bytes: positive for overflow, negative for underflow.
    pub residual: i64,
}

impl Done {
    /// Returns the data read by a successful command.
    ///
    /// # Panics
    /// When the command failed.
    pub fn ok(self) -> Vec<u8> {
        assert_eq!(self.status, 0, "the command failed: {self:x?}");
        self.data
    }

    /// Returns sense key, and additional sense code with its qualifier.
    pub fn sense(&self) -> Option<(u8, u16)> {
        let sense = &self.sense;
        (sense.len() >= 14).then(|| (sense[2] & 0xf, u16::from_be_bytes([sense[12], sense[13]])))
    }
}

/// Converts residual flags and count to a signed number.
fn residual(flags: u8, count: u32) -> i64 {
    use forebay_iscsi::wire::response_flag::{OVERFLOW, UNDERFLOW};
    match (flags & OVERFLOW != 0, flags & UNDERFLOW != 0) {
        (false, false) => 0,
        (true, false) => count.into(),
        (false, true) => -i64::from(count),
        (true, true) => panic!("overflow and underflow at once"),
    }
}

/// Initiator session.
pub struct Client {
    stream: Stream,
    options: Options,
    digests: Digests,
    input: Vec<u8>,
    cmd_sn: u32,
    last_cmd_sn: u32,
    next_itt: u32,
    /// Data-out to send when the target solicits it, by command.
    outgoing: BTreeMap<u32, ([u8; 8], Vec<u8>)>,
    reading: BTreeMap<u32, Vec<u8>>,
    done: VecDeque<Done>,
    /// Target session identifying handle (TSIH).
    pub tsih: u16,
    /// Target portal group tag of the session; `None` in a discovery session.
    pub portal_group: Option<u16>,
    /// Responses other than command completions, and unsolicited PDUs.
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
            tsih: 0,
            portal_group: None,
            others: VecDeque::new(),
        };
        let digest = |on: bool| if on { "CRC32C" } else { "None" };
        let segment = options.segment.to_string();
        let mut names = vec![("InitiatorName", options.initiator.as_str())];
        match options.target.as_str() {
            "" => names.push(("SessionType", "Discovery")),
            target => names.push(("TargetName", target)),
        }
        let mut pairs = vec![
            ("HeaderDigest", digest(options.digests.header)),
            ("DataDigest", digest(options.digests.data)),
            ("MaxRecvDataSegmentLength", &segment),
        ];
        if !options.target.is_empty() {
            pairs.extend([("InitialR2T", "Yes"), ("ImmediateData", "Yes")]);
        }
        match &options.chap {
            Some(chap) => client.authenticate(chap, &names).await?,
            None => pairs.splice(0..0, names).for_each(drop),
        }
        client.send(&codec::login(options.isid, client.cmd_sn, &pairs)).await?;
        let (header, _) = client.login_response().await?;
        client.digests = options.digests;
        client.last_cmd_sn = header.max_cmd_sn.get();
        client.tsih = header.tsih.get();
        Ok(client)
    }

    /// Authenticates with CHAP, and verifies the target's response if there is a credential for it.
    async fn authenticate(&mut self, chap: &Chap, names: &[(&str, &str)]) -> io::Result<()> {
        /// Challenge for the target; its length differs from the one that the target uses.
        const CHALLENGE: [u8; 20] = *b"what is your secret?";
        let isid = self.options.isid;
        let first = [names, &[("AuthMethod", "CHAP")]].concat();
        self.send(&codec::login_stage(isid, self.cmd_sn, 0, &first)).await?;
        self.login_response().await?;
        self.send(&codec::login_stage(isid, self.cmd_sn, 0, &[("CHAP_A", "7")])).await?;
        let (_, challenge) = self.login_response().await?;
        let wrong = |what: &str| io::Error::other(format!("{what} is missing or wrong"));
        let value = |answer: &[u8], key: &str| {
            let pairs = text::parse(answer).ok()?;
            pairs.iter().find(|pair| pair.key == key).map(|pair| pair.value.to_owned())
        };
        let id = value(&challenge, "CHAP_I").and_then(|id| id.parse().ok()).ok_or_else(|| wrong("CHAP_I"))?;
        let bytes = value(&challenge, "CHAP_C").and_then(|bytes| text::binary(&bytes, 1024));
        let bytes = bytes.ok_or_else(|| wrong("CHAP_C"))?;
        let response = text::to_hex(&Algorithm::Sha256.response(id, &chap.initiator.secret, &bytes));
        let ours = text::to_hex(&CHALLENGE);
        let mut pairs = vec![("CHAP_N", chap.initiator.name.as_str()), ("CHAP_R", &response)];
        if chap.target.is_some() {
            pairs.extend([("CHAP_I", "9"), ("CHAP_C", &ours)]);
        }
        // Transits from the security stage to the operational stage.
        self.send(&codec::login_stage(isid, self.cmd_sn, FINAL | 1, &pairs)).await?;
        let (_, proof) = self.login_response().await?;
        if let Some(target) = &chap.target {
            let right = text::to_hex(&Algorithm::Sha256.response(9, &target.secret, &CHALLENGE));
            if value(&proof, "CHAP_N").as_deref() != Some(&target.name) || value(&proof, "CHAP_R") != Some(right) {
                return Err(wrong("the target's proof"));
            }
        }
        Ok(())
    }

    /// Waits for a Login Response; fails if it is a refusal.
    async fn login_response(&mut self) -> io::Result<(LoginResponse, Vec<u8>)> {
        match self.pdu().await? {
            Some(Pdu::Login(header, text)) if header.status.get() == 0 => {
                let pairs = text::parse(&text).map_err(io::Error::other)?;
                if let Some(tag) = pairs.iter().find(|pair| pair.key == "TargetPortalGroupTag") {
                    self.portal_group = Some(tag.value.parse().map_err(io::Error::other)?);
                }
                Ok((header, text))
            }
            Some(Pdu::Login(header, _)) => {
                Err(io::Error::other(format!("the login is refused: {:#06x}", header.status.get())))
            }
            other => Err(io::Error::other(format!("{other:?} instead of a Login Response"))),
        }
    }

    /// Runs one command: sends `data` to the target, and reads up to `read` bytes.
    pub async fn run(&mut self, lun: u16, cdb: Cdb, data: &[u8], read: usize) -> io::Result<Done> {
        let itt = self.start(lun, cdb, data, read).await?;
        self.finish(itt).await
    }

    /// Runs one command as [`run`](Self::run) does, and retries while unit attentions are reported.
    pub async fn settle(&mut self, lun: u16, cdb: Cdb, data: &[u8], read: usize) -> io::Result<Done> {
        loop {
            let done = self.run(lun, cdb, data, read).await?;
            if done.sense().is_none_or(|(key, _)| key != 6) {
                return Ok(done);
            }
        }
    }

    /// Sends a command; returns its initiator task tag.
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

    /// Waits until the given command completes.
    pub async fn finish(&mut self, itt: u32) -> io::Result<Done> {
        loop {
            if let Some(at) = self.done.iter().position(|done| done.itt == itt) {
                return Ok(self.done.remove(at).unwrap_or_default());
            }
            self.step().await?;
        }
    }

    /// Waits until any command completes.
    pub async fn any(&mut self) -> io::Result<Done> {
        loop {
            if let Some(done) = self.done.pop_front() {
                return Ok(done);
            }
            self.step().await?;
        }
    }

    /// Returns true if a completion or response has not been taken yet.
    pub fn has_answers(&self) -> bool {
        !self.done.is_empty() || !self.others.is_empty()
    }

    /// Sends a task management function; returns its initiator task tag.
    pub async fn start_task(&mut self, function: u8, lun: u16, referenced: u32) -> io::Result<u32> {
        let itt = self.tag();
        let header = codec::task(function, Lun::Unit(lun).to_bytes(), itt, referenced, self.cmd_sn);
        self.send(&codec::pdu(&header, &[], self.digests)).await?;
        Ok(itt)
    }

    /// Runs a task management function, and returns the response.
    pub async fn task(&mut self, function: u8, lun: u16, referenced: u32) -> io::Result<u8> {
        self.start_task(function, lun, referenced).await?;
        Ok(self.response(response::TASK_MANAGEMENT).await?.0.code)
    }

    /// Sends a text request, and returns the response.
    pub async fn text(&mut self, pairs: &[(&str, &str)]) -> io::Result<Vec<u8>> {
        let header = codec::other(request::TEXT, 0, self.tag(), self.cmd_sn);
        self.send(&codec::pdu(&header, &codec::text(pairs), self.digests)).await?;
        Ok(self.response(response::TEXT).await?.1)
    }

    /// Sends a text request, and returns the complete response, over as many PDUs as needed.
    pub async fn long_text(&mut self, pairs: &[(&str, &str)]) -> io::Result<Vec<u8>> {
        let mut header = codec::other(request::TEXT, 0, self.tag(), self.cmd_sn);
        self.send(&codec::pdu(&header, &codec::text(pairs), self.digests)).await?;
        let mut all = Vec::new();
        loop {
            let (answer, part) = self.response(response::TEXT).await?;
            all.extend(part);
            if answer.flags & CONTINUE == 0 {
                return Ok(all);
            }
            header.ttt = answer.ttt;
            self.send(&codec::pdu(&header, &[], self.digests)).await?;
        }
    }

    /// Returns the names and addresses that a SendTargets discovery finds.
    pub async fn discover(&mut self, which: &str) -> io::Result<Vec<(String, Vec<String>)>> {
        let answer = self.long_text(&[("SendTargets", which)]).await?;
        let mut targets: Vec<(String, Vec<String>)> = Vec::new();
        for pair in String::from_utf8_lossy(&answer).split_terminator('\0') {
            match (pair.split_once('='), targets.last_mut()) {
                (Some(("TargetName", name)), _) => targets.push((name.to_owned(), Vec::new())),
                (Some(("TargetAddress", addr)), Some((_, addrs))) => addrs.push(addr.to_owned()),
                _ => return Err(io::Error::other(format!("{pair} in an answer to SendTargets"))),
            }
        }
        Ok(targets)
    }

    /// Waits for an Asynchronous Message, and returns its event code and parameters.
    pub async fn event(&mut self) -> io::Result<(u8, [u16; 3])> {
        let (header, _) = self.response(response::ASYNC).await?;
        let rest = header.rest.map(|word| word.get());
        Ok(((rest[0] >> 8) as u8, [rest[1], rest[2], rest[3]]))
    }

    /// Sends a NOP-Out and waits for the response.
    pub async fn ping(&mut self) -> io::Result<()> {
        let header = codec::other(request::NOP_OUT, 0, self.tag(), self.cmd_sn);
        self.send(&codec::pdu(&header, b"ping", self.digests)).await?;
        self.response(response::NOP_IN).await.map(drop)
    }

    /// Logs out.
    pub async fn logout(mut self) -> io::Result<()> {
        self.start_logout().await?;
        match self.finish_logout().await? {
            logout_response::CLOSED => Ok(()),
            code => Err(io::Error::other(format!("the logout is refused: {code}"))),
        }
    }

    /// Sends a logout request, without waiting for the response.
    pub async fn start_logout(&mut self) -> io::Result<()> {
        let header = codec::other(request::LOGOUT, 0, self.tag(), self.cmd_sn);
        self.send(&codec::pdu(&header, &[], self.digests)).await
    }

    /// Waits for the response to a logout request; returns its code.
    pub async fn finish_logout(&mut self) -> io::Result<u8> {
        Ok(self.response(response::LOGOUT).await?.0.code)
    }

    /// Waits for the next PDU with an opcode; earlier ones are kept.
    pub async fn response(&mut self, opcode: u8) -> io::Result<(Response, Vec<u8>)> {
        loop {
            if let Some(at) = self.others.iter().position(|(header, _)| header.opcode == opcode) {
                return self.others.remove(at).ok_or_else(|| io::Error::other("it was just there"));
            }
            self.step().await?;
        }
    }

    /// Receives and handles the next PDU.
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

    /// Receives the next PDU; `None` at the end of the stream.
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

    /// Sends raw bytes.
    pub async fn send(&self, bytes: &[u8]) -> io::Result<()> {
        self.stream.send(Buf::copy_of(bytes)).await
    }

    /// Returns the connection, for sending while another task receives.
    pub fn stream(&self) -> Stream {
        self.stream.clone()
    }

    /// Returns the CmdSN of the next command.
    pub fn cmd_sn(&self) -> u32 {
        self.cmd_sn
    }

    /// Closes the connection without logout.
    pub fn close(self) {
        self.stream.shutdown();
    }

    fn tag(&mut self) -> u32 {
        self.next_itt += 1;
        self.next_itt - 1
    }
}
