//! NVMe/TCP host on the reactor.

use std::collections::{BTreeMap, VecDeque};
use std::io;

use forebay_reactor::{Addr, Stream};
use forebay_tls::Psk;

use crate::codec::{self, Completion, Digests, Pdu, Sqe};
use crate::wire::Wire;

/// Outcome of a command.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Done {
    /// Completion queue entry; without a response capsule its status is 0.
    pub completion: Completion,
    /// Data read.
    pub data: Vec<u8>,
}

impl Done {
    /// Returns the data read by a successful command.
    ///
    /// # Panics
    /// When the command failed.
    pub fn ok(self) -> Vec<u8> {
        assert_eq!(self.completion.status, 0, "the command failed: {:x?}", self.completion);
        self.data
    }
}

/// Connection that has exchanged ICReq and ICResp: one queue.
pub struct Client {
    /// Transport, with or without TLS.
    pub wire: Wire,
    digests: Digests,
    input: Vec<u8>,
    next_cid: u16,
    /// Data to send when the controller solicits it, by command.
    outgoing: BTreeMap<u16, Vec<u8>>,
    reading: BTreeMap<u16, Vec<u8>>,
    done: VecDeque<Done>,
    /// Status and information of a received C2HTermReq.
    pub terminated: Option<(u16, u32)>,
    /// Maximum in-capsule data in bytes.
    pub in_capsule: usize,
    /// Maximum data of one H2CData in bytes.
    pub piece: usize,
}

impl Client {
    /// Connects and negotiates digests.
    pub async fn connect(addr: &Addr, digests: Digests) -> io::Result<Self> {
        Self::connect_over(Wire::plain(Stream::connect(addr).await?), digests).await
    }

    /// Connects through TLS with one of these keys, and negotiates digests.
    pub async fn connect_tls(addr: &Addr, digests: Digests, psks: &[Psk]) -> io::Result<Self> {
        Self::connect_over(Wire::secure(Stream::connect(addr).await?, psks).await?, digests).await
    }

    async fn connect_over(wire: Wire, digests: Digests) -> io::Result<Self> {
        let mut client = Self::over(wire);
        client.send(&codec::ic_req(digests, 0)).await?;
        match client.pdu().await? {
            Some(Pdu::IcResp { digests: granted, data_max }) => {
                assert_eq!(granted, digests);
                assert!(data_max >= 4096);
                client.digests = digests;
                Ok(client)
            }
            other => Err(io::Error::other(format!("{other:?} instead of ICResp"))),
        }
    }

    /// Creates a connection on which nothing was exchanged.
    pub fn raw(stream: Stream) -> Self {
        Self::over(Wire::plain(stream))
    }

    fn over(wire: Wire) -> Self {
        Self {
            wire,
            digests: Digests::default(),
            input: Vec::new(),
            next_cid: 1,
            outgoing: BTreeMap::new(),
            reading: BTreeMap::new(),
            done: VecDeque::new(),
            terminated: None,
            in_capsule: 8192,
            piece: 128 << 10,
        }
    }

    /// Connects the admin queue, enables the controller, and returns its id.
    pub async fn admin(addr: &Addr, digests: Digests, subsystem: &str, host: &str) -> io::Result<(Self, u16)> {
        let mut client = Self::connect(addr, digests).await?;
        let done = client.connect_queue(0, 32, subsystem, host, 0xFFFF, true).await?;
        if done.completion.status != 0 {
            return Err(io::Error::other(format!("Connect: {:x?}", done.completion)));
        }
        client.enable().await?;
        Ok((client, done.completion.result as u16))
    }

    /// Connects an I/O queue.
    pub async fn io(
        addr: &Addr,
        digests: Digests,
        subsystem: &str,
        host: &str,
        cntlid: u16,
        queue: u16,
    ) -> io::Result<Self> {
        let mut client = Self::connect(addr, digests).await?;
        let done = client.connect_queue(queue, 128, subsystem, host, cntlid, false).await?;
        if done.completion.status != 0 {
            return Err(io::Error::other(format!("Connect: {:x?}", done.completion)));
        }
        Ok(client)
    }

    /// Sends Connect.
    pub async fn connect_queue(
        &mut self,
        queue: u16,
        entries: u16,
        subsystem: &str,
        host: &str,
        cntlid: u16,
        flow: bool,
    ) -> io::Result<Done> {
        let (sqe, data) = codec::connect(queue, entries, subsystem, host, cntlid, flow);
        self.run(sqe, &data, 0).await
    }

    /// Sets CC.EN, with the only supported queue entry sizes.
    pub async fn enable(&mut self) -> io::Result<()> {
        self.run(codec::property(0x14, false, Some(1 | 6 << 16 | 4 << 20)), &[], 0).await?.ok();
        let status = self.run(codec::property(0x1C, false, None), &[], 0).await?;
        assert_eq!(status.completion.result & 1, 1, "the controller is ready");
        Ok(())
    }

    /// Runs one command: sends `data` to the controller, and reads up to `read` bytes.
    pub async fn run(&mut self, sqe: Sqe, data: &[u8], read: usize) -> io::Result<Done> {
        let cid = self.start(sqe, data, read).await?;
        self.finish(cid).await
    }

    /// Sends a command; returns its command identifier.
    pub async fn start(&mut self, sqe: Sqe, data: &[u8], read: usize) -> io::Result<u16> {
        let cid = self.next_cid;
        self.next_cid = self.next_cid.wrapping_add(1);
        let mut sqe = sqe;
        sqe[2..4].copy_from_slice(&cid.to_le_bytes());
        let in_capsule = !data.is_empty() && data.len() <= self.in_capsule;
        if !data.is_empty() || read > 0 {
            sqe = codec::with_data(sqe, data.len().max(read), in_capsule);
        }
        let capsule = codec::command(&sqe, if in_capsule { data } else { &[] }, self.digests);
        if !data.is_empty() && !in_capsule {
            self.outgoing.insert(cid, data.to_vec());
        }
        if read > 0 {
            self.reading.insert(cid, Vec::new());
        }
        self.send(&capsule).await?;
        Ok(cid)
    }

    /// Waits until the given command completes.
    pub async fn finish(&mut self, cid: u16) -> io::Result<Done> {
        loop {
            if let Some(at) = self.done.iter().position(|done| done.completion.cid == cid) {
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

    /// Receives and handles the next PDU.
    async fn step(&mut self) -> io::Result<()> {
        let ended = || io::Error::new(io::ErrorKind::UnexpectedEof, "the target has closed the connection");
        match self.pdu().await?.ok_or_else(ended)? {
            Pdu::IcResp { .. } => Err(io::Error::other("a second ICResp")),
            Pdu::Term { status, information, .. } => {
                self.terminated = Some((status, information));
                Err(io::Error::new(io::ErrorKind::ConnectionAborted, format!("C2HTermReq {status} {information}")))
            }
            Pdu::Response(completion) => {
                self.outgoing.remove(&completion.cid);
                let data = self.reading.remove(&completion.cid).unwrap_or_default();
                self.done.push_back(Done { completion, data });
                Ok(())
            }
            Pdu::Data { cid, offset, data, success, .. } => {
                let Some(reading) = self.reading.get_mut(&cid) else {
                    return Err(io::Error::other("data that was not asked for"));
                };
                assert_eq!(offset as usize, reading.len(), "data comes in order");
                reading.extend_from_slice(&data);
                if success {
                    let data = self.reading.remove(&cid).unwrap_or_default();
                    self.done.push_back(Done { completion: Completion { cid, ..Completion::default() }, data });
                }
                Ok(())
            }
            Pdu::Ready { cid, tag, offset, len } => {
                let Some(bytes) = self.outgoing.get(&cid) else {
                    return Err(io::Error::other("R2T for a command without data"));
                };
                let part = bytes[offset as usize..(offset + len) as usize].to_vec();
                let count = part.chunks(self.piece).count();
                let mut at = offset;
                for (index, piece) in part.chunks(self.piece).enumerate() {
                    let pdu = codec::data(cid, tag, at, piece, index + 1 == count, self.digests);
                    at += piece.len() as u32;
                    self.send(&pdu).await?;
                }
                Ok(())
            }
        }
    }

    /// Receives the next PDU; `None` at the end of the stream.
    pub async fn pdu(&mut self) -> io::Result<Option<Pdu>> {
        loop {
            if let Some((pdu, len)) = codec::decode(&self.input, self.digests) {
                self.input.drain(..len);
                return Ok(Some(pdu));
            }
            let bytes = self.wire.receive().await?;
            if bytes.is_empty() {
                return Ok(None);
            }
            self.input.extend_from_slice(&bytes);
        }
    }

    /// Sends raw bytes.
    pub async fn send(&self, bytes: &[u8]) -> io::Result<()> {
        self.wire.send(bytes).await
    }

    /// Ends the connection.
    pub fn close(self) {
        self.wire.shutdown();
    }
}
