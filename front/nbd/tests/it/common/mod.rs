//! Test client that speaks the protocol as documented, and test device backed by a vector of bytes.
//!
//! The client builds and reads its messages byte by byte, intentionally without the crate's own wire structs.

pub mod world;

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, VecDeque};
use std::rc::Rc;
use std::time::Duration;

use forebay_block::{
    BlockDevice, BlockReply, BlockRequest, Buf, BufMut, Error, ErrorKind, Extent, ExtentMap, ExtentState, Geometry,
    LocalFuture, Result, SizeWatch,
};
use forebay_nbd::access::{HostPattern, NbdHost};
use forebay_nbd::{ExportSource, ExportSummary, NbdExport};
use forebay_reactor::sync::Notify;
use forebay_reactor::{Addr, Stream, random, sleep};
use forebay_tls::{Read, TlsSession, sealed_len};

/// Reply format.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Style {
    Simple,
    Structured,
    Extended,
}

/// Type and data of a reply to an option.
pub type OptionReply = (u32, Vec<u8>);

/// Answer to a request, with all its chunks.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Answer {
    pub cookie: u64,
    pub error: u32,
    pub text: String,
    pub error_offset: Option<u64>,
    /// Offset and bytes; for a hole its length in zeroes.
    pub data: Vec<(u64, Vec<u8>)>,
    pub holes: usize,
    /// Length and flags.
    pub status: Vec<(u64, u64)>,
}

impl Answer {
    /// Returns the bytes of a read, which the pieces must cover without gap or overlap.
    pub fn bytes(&self, offset: u64, len: usize) -> Vec<u8> {
        let mut pieces = self.data.clone();
        pieces.sort();
        let mut out = Vec::new();
        for (at, bytes) in pieces {
            assert_eq!(at, offset + out.len() as u64, "pieces leave a gap or overlap");
            out.extend(bytes);
        }
        assert_eq!(out.len(), len);
        out
    }
}

/// Properties of an export, as known to the client.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub struct Facts {
    pub size: u64,
    pub flags: u16,
    pub name: Option<String>,
    pub description: Option<String>,
    pub block_sizes: Option<(u32, u32, u32)>,
}

pub const INFO_ALL: [u16; 3] = [1, 2, 3];

/// Client side of a connection.
pub struct Client {
    pub stream: Stream,
    input: Vec<u8>,
    style: Style,
    /// Lengths of reads, which a simple reply does not state.
    reads: BTreeMap<u64, (u64, usize)>,
    partial: BTreeMap<u64, Answer>,
    offsets: BTreeMap<u64, u64>,
    /// TLS session, once it is in force, and received bytes that are not decrypted yet.
    tls: RefCell<Option<TlsSession>>,
    sealed: Vec<u8>,
}

impl Client {
    /// Connects and reads the greeting.
    pub async fn connect(addr: &Addr) -> Self {
        let stream = Stream::connect(addr).await.expect("connects");
        let mut client = Self {
            stream,
            input: Vec::new(),
            style: Style::Simple,
            reads: BTreeMap::new(),
            partial: BTreeMap::new(),
            offsets: BTreeMap::new(),
            tls: RefCell::default(),
            sealed: Vec::new(),
        };
        assert_eq!(client.take(18).await.expect("a greeting"), b"NBDMAGICIHAVEOPT\0\x03");
        client
    }

    /// Connects, and negotiates fixed newstyle without padding.
    pub async fn fixed(addr: &Addr) -> Self {
        let client = Self::connect(addr).await;
        client.send(&3_u32.to_be_bytes()).await;
        client
    }

    /// Upgrades to TLS; returns `None` if the handshake fails.
    pub async fn start_tls(&mut self, mut session: TlsSession) -> Option<()> {
        assert_eq!(self.option(5, &[]).await, [(1, vec![])]);
        assert!(self.input.is_empty(), "the server speaks first");
        let mut out = Vec::new();
        let mut done = session.handshake(&mut &[][..], &mut out).ok()?;
        loop {
            self.send(&out).await;
            out.clear();
            if done {
                self.tls.replace(Some(session));
                return Some(());
            }
            let (result, buf) = self.stream.recv(BufMut::with_capacity(64 * 1024)).await;
            if !result.is_ok_and(|got| got > 0) {
                return None;
            }
            let mut left = &buf[..];
            done = session.handshake(&mut left, &mut out).ok()?;
            self.sealed.extend_from_slice(left);
        }
    }

    /// Connects and chooses an export; with `base:allocation` unless replies are simple.
    pub async fn open(addr: &Addr, name: &str, style: Style) -> (Self, Facts) {
        Self::fixed(addr).await.choose(name, style).await
    }

    /// Chooses an export; with `base:allocation` unless replies are simple.
    pub async fn choose(self, name: &str, style: Style) -> (Self, Facts) {
        let mut client = self;
        match style {
            Style::Simple => {}
            Style::Structured => assert_eq!(client.option(8, &[]).await, [(1, vec![])]),
            Style::Extended => assert_eq!(client.option(11, &[]).await, [(1, vec![])]),
        }
        if style != Style::Simple {
            let contexts = client.option(10, &context_data(name, &["base:allocation"])).await;
            assert_eq!(contexts, [(4, b"\0\0\0\x01base:allocation".to_vec()), (1, vec![])]);
        }
        client.style = style;
        let facts = client.go(name).await.expect("the export is there");
        (client, facts)
    }

    /// Sends `NBD_OPT_GO`, requesting all information; returns the error reply if it is refused.
    pub async fn go(&mut self, name: &str) -> std::result::Result<Facts, OptionReply> {
        let replies = self.option(7, &info_data(name, &INFO_ALL)).await;
        facts(&replies)
    }

    pub async fn send(&self, bytes: &[u8]) {
        let sealed = self.tls.borrow_mut().as_mut().map(|session| {
            let mut sealed = vec![0; sealed_len(bytes.len())];
            let len = session.write(bytes, &mut sealed).expect("sealed");
            sealed.truncate(len);
            sealed
        });
        // The peer may have closed already; a sender notices that when receiving.
        let _ = self.stream.send(Buf::copy_of(sealed.as_deref().unwrap_or(bytes))).await;
    }

    /// Reads the next `len` bytes.  Returns the remaining bytes as the error if the stream ends before.
    pub async fn take(&mut self, len: usize) -> std::result::Result<Vec<u8>, Vec<u8>> {
        while self.input.len() < len {
            if self.open_sealed() {
                continue;
            }
            let (result, buf) = self.stream.recv(BufMut::with_capacity(64 * 1024)).await;
            let received = if self.tls.borrow().is_some() { &mut self.sealed } else { &mut self.input };
            match result {
                Ok(got) if got > 0 => received.extend_from_slice(&buf),
                _ => return Err(std::mem::take(&mut self.input)),
            }
        }
        Ok(self.input.drain(..len).collect())
    }

    /// Decrypts received bytes; returns true if there was data.
    fn open_sealed(&mut self) -> bool {
        let mut tls = self.tls.borrow_mut();
        let Some(session) = &mut *tls else { return false };
        let mut left = &self.sealed[..];
        let mut out = vec![0; 64 * 1024];
        let read = session.read(&mut left, &mut out);
        let taken = self.sealed.len() - left.len();
        self.sealed.drain(..taken);
        match read.expect("it can be opened") {
            Read::Data(len) => {
                self.input.extend_from_slice(&out[..len]);
                true
            }
            Read::NeedInput | Read::Closed => false,
        }
    }

    /// Sends an option and reads its replies up to the last.
    pub async fn option(&mut self, option: u32, data: &[u8]) -> Vec<OptionReply> {
        self.send(&option_bytes(option, data)).await;
        self.option_replies(option).await.expect("the connection stays")
    }

    /// Reads the replies to an option up to the last; returns `None` if the connection is closed.
    pub async fn option_replies(&mut self, option: u32) -> Option<Vec<OptionReply>> {
        let mut replies = Vec::new();
        loop {
            let head = self.take(20).await.ok()?;
            assert_eq!(be(&head[..8]), 0x3e889045565a9);
            assert_eq!(be(&head[8..12]), u64::from(option));
            let kind = be(&head[12..16]) as u32;
            let data = self.take(be(&head[16..20]) as usize).await.ok()?;
            replies.push((kind, data));
            if kind == 1 || kind >> 31 == 1 {
                return Some(replies);
            }
        }
    }

    /// Encodes a request.
    pub fn request_bytes(
        &mut self,
        cookie: u64,
        kind: u16,
        flags: u16,
        offset: u64,
        len: u64,
        payload: &[u8],
    ) -> Vec<u8> {
        if kind == 0 {
            self.reads.insert(cookie, (offset, len as usize));
        }
        self.offsets.insert(cookie, offset);
        let mut bytes = Vec::new();
        if self.style == Style::Extended {
            // Writes have a payload with and without the payload length flag.
            let flags = if kind == 1 && !cookie.is_multiple_of(2) { flags | 1 << 5 } else { flags };
            bytes.extend(0x21e41c71_u32.to_be_bytes());
            bytes.extend(flags.to_be_bytes());
            bytes.extend(kind.to_be_bytes());
            bytes.extend(cookie.to_be_bytes());
            bytes.extend(offset.to_be_bytes());
            bytes.extend(len.to_be_bytes());
        } else {
            bytes.extend(0x25609513_u32.to_be_bytes());
            bytes.extend(flags.to_be_bytes());
            bytes.extend(kind.to_be_bytes());
            bytes.extend(cookie.to_be_bytes());
            bytes.extend(offset.to_be_bytes());
            bytes.extend((len as u32).to_be_bytes());
        }
        bytes.extend(payload);
        bytes
    }

    /// Sends a request.
    pub async fn request(&mut self, cookie: u64, kind: u16, flags: u16, offset: u64, len: u64, payload: &[u8]) {
        let bytes = self.request_bytes(cookie, kind, flags, offset, len, payload);
        self.send(&bytes).await;
    }

    /// Sends a request and waits for its answer, the only one outstanding.
    pub async fn ask(&mut self, kind: u16, flags: u16, offset: u64, len: u64, payload: &[u8]) -> Answer {
        let cookie = random();
        self.request(cookie, kind, flags, offset, len, payload).await;
        let answer = self.answer().await.expect("the connection stays");
        assert_eq!(answer.cookie, cookie);
        answer
    }

    /// Reads, and checks for success.
    pub async fn read(&mut self, offset: u64, len: usize) -> Vec<u8> {
        let answer = self.ask(0, 0, offset, len as u64, &[]).await;
        assert_eq!(answer.error, 0, "{}", answer.text);
        answer.bytes(offset, len)
    }

    /// Writes, and checks for success.
    pub async fn write(&mut self, offset: u64, data: &[u8]) {
        let answer = self.ask(1, 0, offset, data.len() as u64, data).await;
        assert_eq!(answer.error, 0, "{}", answer.text);
    }

    /// Reads the next complete answer; returns `None` if the connection is closed.
    pub async fn answer(&mut self) -> Option<Answer> {
        loop {
            let magic = be(&self.take(4).await.ok()?);
            let answer = match (magic, self.style) {
                (0x67446698, Style::Simple | Style::Structured) => self.simple().await,
                (0x668e33ef, Style::Structured) => self.chunk(16).await,
                (0x6e8a278c, Style::Extended) => self.chunk(28).await,
                _ => panic!("a reply starts with {magic:#x} in style {:?}", self.style),
            };
            if let Some(answer) = answer? {
                self.reads.remove(&answer.cookie);
                self.offsets.remove(&answer.cookie);
                return Some(answer);
            }
        }
    }

    async fn simple(&mut self) -> Option<Option<Answer>> {
        let head = self.take(12).await.ok()?;
        let (error, cookie) = (be(&head[..4]) as u32, be(&head[4..]));
        let mut answer = Answer { cookie, error, ..Answer::default() };
        if let Some(&(offset, len)) = self.reads.get(&cookie) {
            assert_eq!(self.style, Style::Simple, "a read is answered in chunks");
            if error == 0 && len > 0 {
                answer.data.push((offset, self.take(len).await.ok()?));
            }
        }
        Some(Some(answer))
    }

    async fn chunk(&mut self, rest: usize) -> Option<Option<Answer>> {
        let head = self.take(rest).await.ok()?;
        let (flags, kind, cookie) = (be(&head[..2]), be(&head[2..4]), be(&head[4..12]));
        if self.style == Style::Extended {
            assert_eq!(Some(&be(&head[12..20])), self.offsets.get(&cookie), "the request's offset comes back");
        }
        let len = be(&head[rest - if rest == 28 { 8 } else { 4 }..]) as usize;
        let payload = self.take(len).await.ok()?;
        let answer = self.partial.entry(cookie).or_insert_with(|| Answer { cookie, ..Answer::default() });
        match kind {
            0 => assert!(len == 0 && flags == 1),
            1 => {
                assert!(len > 8);
                answer.data.push((be(&payload[..8]), payload[8..].to_vec()));
            }
            2 => {
                assert_eq!(len, 12);
                answer.data.push((be(&payload[..8]), vec![0; be(&payload[8..]) as usize]));
                answer.holes += 1;
            }
            5 => {
                assert_eq!((be(&payload[..4]), self.style), (1, Style::Structured));
                answer.status = payload[4..].chunks_exact(8).map(|run| (be(&run[..4]), be(&run[4..]))).collect();
            }
            6 => {
                assert_eq!((be(&payload[..4]), self.style), (1, Style::Extended));
                answer.status = payload[8..].chunks_exact(16).map(|run| (be(&run[..8]), be(&run[8..]))).collect();
                assert_eq!(be(&payload[4..8]) as usize, answer.status.len());
            }
            0x8001 | 0x8002 => {
                let text_end = 6 + be(&payload[4..6]) as usize;
                answer.error = be(&payload[..4]) as u32;
                answer.text = String::from_utf8(payload[6..text_end].to_vec()).expect("UTF-8");
                if kind == 0x8002 {
                    answer.error_offset = Some(be(&payload[text_end..]));
                }
            }
            _ => panic!("chunk type {kind:#x}"),
        }
        Some((flags & 1 == 1).then(|| self.partial.remove(&cookie).expect("just entered")))
    }

    /// Sends a disconnect request, and expects the server to close.
    pub async fn disconnect(mut self) {
        self.request(0, 2, 0, 0, 0, &[]).await;
        assert_eq!(self.take(1).await, Err(vec![]), "nothing more comes");
    }
}

pub fn be(bytes: &[u8]) -> u64 {
    assert!(bytes.len() <= 8);
    bytes.iter().fold(0, |sum, &byte| sum << 8 | u64::from(byte))
}

pub fn option_bytes(option: u32, data: &[u8]) -> Vec<u8> {
    [b"IHAVEOPT", &option.to_be_bytes()[..], &(data.len() as u32).to_be_bytes(), data].concat()
}

pub fn info_data(name: &str, wanted: &[u16]) -> Vec<u8> {
    let mut data = (name.len() as u32).to_be_bytes().to_vec();
    data.extend(name.as_bytes());
    data.extend((wanted.len() as u16).to_be_bytes());
    wanted.iter().for_each(|info| data.extend(info.to_be_bytes()));
    data
}

pub fn context_data(name: &str, queries: &[&str]) -> Vec<u8> {
    let mut data = (name.len() as u32).to_be_bytes().to_vec();
    data.extend(name.as_bytes());
    data.extend((queries.len() as u32).to_be_bytes());
    for query in queries {
        data.extend((query.len() as u32).to_be_bytes());
        data.extend(query.as_bytes());
    }
    data
}

/// Decodes the replies to `NBD_OPT_INFO` or `NBD_OPT_GO`.
pub fn facts(replies: &[OptionReply]) -> std::result::Result<Facts, OptionReply> {
    let (last, infos) = replies.split_last().expect("a reply");
    if last.0 != 1 {
        return Err(last.clone());
    }
    let mut facts = Facts::default();
    for (kind, data) in infos {
        assert_eq!(*kind, 3);
        let (info, data) = data.split_at(2);
        match be(info) {
            0 => (facts.size, facts.flags) = (be(&data[..8]), be(&data[8..]) as u16),
            1 => facts.name = Some(String::from_utf8(data.to_vec()).expect("UTF-8")),
            2 => facts.description = Some(String::from_utf8(data.to_vec()).expect("UTF-8")),
            3 => {
                let number = |at: usize| be(&data[at..at + 4]) as u32;
                facts.block_sizes = Some((number(0), number(4), number(8)));
            }
            other => panic!("information {other}"),
        }
    }
    Ok(facts)
}

/// In-memory device with random delays and injected errors.
pub struct Model {
    pub bytes: RefCell<Vec<u8>>,
    /// Allocation of each 4 KiB block.
    pub stored: RefCell<Vec<bool>>,
    pub geometry: Cell<Geometry>,
    /// Maximum delay of a request, in nanoseconds; 0 completes at once.
    pub delay: Cell<u64>,
    /// Results of the next requests: an error, or success.
    pub failures: RefCell<VecDeque<Option<ErrorKind>>>,
    /// Requests wait while this is set.
    pub held: Cell<bool>,
    pub released: Notify,
    pub in_flight: Cell<usize>,
    pub in_flight_most: Cell<usize>,
    /// Log of requests.
    pub log: RefCell<Vec<String>>,
}

const BLOCK: usize = 4096;

impl Model {
    pub fn new(size: usize) -> Rc<Self> {
        let geometry =
            Geometry { size: size as u64, block_size: 1, preferred_io: 4096, transfer_max: 32 << 20, read_only: false };
        Rc::new(Self {
            bytes: RefCell::new(vec![0; size]),
            stored: RefCell::new(vec![false; size.div_ceil(BLOCK)]),
            geometry: Cell::new(geometry),
            delay: Cell::new(0),
            failures: RefCell::default(),
            held: Cell::new(false),
            released: Notify::new(),
            in_flight: Cell::new(0),
            in_flight_most: Cell::new(0),
            log: RefCell::default(),
        })
    }

    pub fn change(&self, change: impl FnOnce(&mut Geometry)) {
        let mut geometry = self.geometry.get();
        change(&mut geometry);
        self.geometry.set(geometry);
    }

    pub fn release(&self) {
        self.held.set(false);
        self.released.notify_all();
    }

    pub fn fail(&self, kinds: &[ErrorKind]) {
        self.failures.borrow_mut().extend(kinds.iter().copied().map(Some));
    }

    /// Takes the log of requests since the previous call.
    pub fn asked(&self) -> Vec<String> {
        std::mem::take(&mut *self.log.borrow_mut())
    }

    fn apply(&self, request: &BlockRequest) -> Result<BlockReply> {
        if let Some(Some(kind)) = self.failures.borrow_mut().pop_front() {
            return Err(Error::new(kind, "as the test wants it"));
        }
        let mut bytes = self.bytes.borrow_mut();
        let range = |extent: Extent| extent.offset as usize..extent.end() as usize;
        let mark = |range: std::ops::Range<usize>, whole: bool, to: bool| {
            let (first, last) = if whole {
                (range.start.div_ceil(BLOCK), range.end / BLOCK)
            } else {
                (range.start / BLOCK, range.end.div_ceil(BLOCK))
            };
            (first..last).for_each(|block| self.stored.borrow_mut()[block] = to);
        };
        match request {
            BlockRequest::Read(extent) => return Ok(BlockReply::Data(Buf::copy_of(&bytes[range(*extent)]).into())),
            BlockRequest::Write { offset, data, .. } => {
                let range = range(Extent::new(*offset, data.len() as u64));
                data.copy_to(&mut bytes[range.clone()]);
                mark(range, false, true);
            }
            BlockRequest::Discard(extent) | BlockRequest::WriteZeroes { extent, no_unmap: false, .. } => {
                bytes[range(*extent)].fill(0);
                mark(range(*extent), true, false);
            }
            BlockRequest::WriteZeroes { extent, .. } => {
                bytes[range(*extent)].fill(0);
                mark(range(*extent), false, true);
            }
            BlockRequest::Flush => {}
            BlockRequest::CompareAndWrite { .. } => return Err(ErrorKind::Unsupported.into()),
        }
        Ok(BlockReply::Done)
    }
}

/// Device that shares a [`Model`] with its futures.
pub struct ModelDevice(pub Rc<Model>);

struct Counted(Rc<Model>);

impl Counted {
    fn new(model: &Rc<Model>) -> Self {
        model.in_flight.set(model.in_flight.get() + 1);
        model.in_flight_most.set(model.in_flight_most.get().max(model.in_flight.get()));
        Self(model.clone())
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.in_flight.set(self.0.in_flight.get() - 1);
    }
}

impl BlockDevice for ModelDevice {
    fn geometry(&self) -> Geometry {
        self.0.geometry.get()
    }

    fn submit(&self, request: BlockRequest) -> LocalFuture<Result<BlockReply>> {
        let model = self.0.clone();
        let text = match &request {
            BlockRequest::Read(extent) => format!("read {}+{}", extent.offset, extent.len),
            BlockRequest::Write { offset, data, fua } => format!("write {offset}+{} fua={fua}", data.len()),
            BlockRequest::Discard(extent) => format!("discard {}+{}", extent.offset, extent.len),
            BlockRequest::WriteZeroes { extent, no_unmap, fua } => {
                format!("zero {}+{} no_unmap={no_unmap} fua={fua}", extent.offset, extent.len)
            }
            BlockRequest::Flush => "flush".into(),
            other => format!("{other:?}"),
        };
        model.log.borrow_mut().push(text);
        Box::pin(async move {
            let _counted = Counted::new(&model);
            model.released.wait_until(|| !model.held.get()).await;
            let delay = model.delay.get();
            if delay > 0 && !random().is_multiple_of(4) {
                sleep(Duration::from_nanos(random() % delay)).await;
            }
            model.apply(&request)
        })
    }

    fn map(&self, extent: Extent) -> LocalFuture<Result<ExtentMap>> {
        let mut map = ExtentMap::new();
        let mut at = extent.offset;
        while at < extent.end() {
            let len = (BLOCK as u64 - at % BLOCK as u64).min(extent.end() - at);
            let stored = self.0.stored.borrow()[at as usize / BLOCK];
            map.push(at, len, if stored { ExtentState::Data } else { ExtentState::Hole });
            at += len;
        }
        self.0.log.borrow_mut().push(format!("map {}+{}", extent.offset, extent.len));
        Box::pin(std::future::ready(Ok(map)))
    }

    fn size_watch(&self) -> Option<Rc<SizeWatch>> {
        None
    }
}

/// Exports by name; the first is the default export.
#[derive(Default)]
pub struct TestExports {
    pub exports: RefCell<Vec<(ExportSummary, NbdExport)>>,
    pub opened: Cell<usize>,
    /// Hosts that see an export; every host if there is no entry.
    pub hosts: RefCell<BTreeMap<String, Vec<HostPattern>>>,
}

impl TestExports {
    pub fn with(name: &str, model: &Rc<Model>) -> Rc<Self> {
        let exported = Rc::new(Self::default());
        exported.add(NbdExport::new(name, Rc::new(ModelDevice(model.clone()))), name, "");
        exported
    }

    pub fn add(&self, export: NbdExport, name: &str, description: &str) {
        let summary = ExportSummary { name: name.into(), description: description.into() };
        self.exports.borrow_mut().push((summary, export.description(description)));
    }

    pub fn remove(&self, name: &str) {
        self.exports.borrow_mut().retain(|(summary, _)| summary.name != name);
    }
}

impl TestExports {
    fn sees(&self, host: &NbdHost, name: &str) -> bool {
        let hosts = self.hosts.borrow();
        hosts.get(name).is_none_or(|hosts| hosts.iter().any(|pattern| pattern.matches(host)))
    }
}

impl ExportSource for TestExports {
    fn list(&self, host: &NbdHost) -> Vec<ExportSummary> {
        let exports = self.exports.borrow();
        exports.iter().map(|(summary, _)| summary.clone()).filter(|export| self.sees(host, &export.name)).collect()
    }

    fn open(&self, name: &str, host: &NbdHost) -> LocalFuture<Result<NbdExport>> {
        self.opened.set(self.opened.get() + 1);
        let exports = self.exports.borrow();
        let found = exports.iter().find(|(summary, _)| name.is_empty() || summary.name == name);
        let allowed = found.is_none_or(|(summary, _)| self.sees(host, &summary.name));
        let found = found.map(|(_, export)| export.clone());
        if !allowed {
            return Box::pin(std::future::ready(Err(Error::new(ErrorKind::Denied, "it is not in the list"))));
        }
        let found = found.ok_or_else(|| Error::new(ErrorKind::NotFound, format!("no image is exported as '{name}'")));
        Box::pin(async move {
            sleep(Duration::from_micros(random() % 50)).await;
            found
        })
    }
}
