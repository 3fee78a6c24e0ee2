//! Test host that sends raw PDUs, and test device that completes requests on demand.

#![allow(dead_code, reason = "each test file uses a part of it")]

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use forebay_block::{
    BlockDevice, BlockReply, BlockRequest, Buf, BufMut, Extent, ExtentMap, ExtentState, Geometry, LocalFuture, Result,
    SizeWatch,
};
use forebay_nvmf::session::admin::SubsystemIdentity;
use forebay_nvmf::wire::command::{FABRICS, Sgl};
use forebay_nvmf::wire::fabrics::{CNTLID_ANY, Connect, fctype, property};
use forebay_nvmf::wire::pdu::{self, Common, DataHeader, IcReq, flag, kind};
use forebay_nvmf::wire::{NvmeStatus, Sqe, u16_at, u64_at};
use forebay_nvmf::{
    AnaGrouping, HostLimits, Namespace, NamespaceDevices, NvmeServer, Port, PortAddress, Subsystem, Subsystems,
};
use forebay_reactor::sync::Notify;
use forebay_reactor::{Addr, Listener, Stream, spawn};
use forebay_sim::{Faults, World};

pub const NQN: &str = "nqn.2014-08.org.nvmexpress:uuid:11111111-2222-3333-4444-555555555555";
pub const HOST: &str = "nqn.2014-08.org.nvmexpress:uuid:host-one";
pub const NSID: u32 = 1;

pub fn addr() -> Addr {
    Addr::Unix("/run/nvme".into())
}

/// In-memory device.  While it is shut, requests wait.
pub struct Disk {
    pub bytes: RefCell<Vec<u8>>,
    pub shut: Cell<bool>,
    /// Waiting requests, and the bytes of the reads among them.
    pub waiting: Cell<usize>,
    pub reading: Cell<u64>,
    /// Number of requests begun so far.
    pub begun: Cell<usize>,
    opened: Notify,
}

impl Disk {
    pub fn new(size: usize) -> Rc<Self> {
        Rc::new(Self {
            bytes: RefCell::new(vec![0; size]),
            shut: Cell::new(false),
            waiting: Cell::new(0),
            reading: Cell::new(0),
            begun: Cell::new(0),
            opened: Notify::new(),
        })
    }

    pub fn open(&self) {
        self.shut.set(false);
        self.opened.notify_all();
    }

    fn execute(&self, request: BlockRequest) -> Result<BlockReply> {
        let mut bytes = self.bytes.borrow_mut();
        let place = |extent: Extent| extent.offset as usize..extent.end() as usize;
        match request {
            BlockRequest::Read(extent) => return Ok(BlockReply::Data(Buf::copy_of(&bytes[place(extent)]).into())),
            BlockRequest::Write { offset, data, .. } | BlockRequest::CompareAndWrite { offset, data, .. } => {
                data.copy_to(&mut bytes[offset as usize..offset as usize + data.len()]);
            }
            BlockRequest::Discard(extent) | BlockRequest::WriteZeroes { extent, .. } => bytes[place(extent)].fill(0),
            BlockRequest::Flush => {}
        }
        Ok(BlockReply::Done)
    }
}

/// Device as the server opens it.
struct Shared(Rc<Disk>);

impl BlockDevice for Shared {
    fn geometry(&self) -> Geometry {
        let size = self.0.bytes.borrow().len() as u64;
        Geometry { size, block_size: 1, preferred_io: 4096, transfer_max: 1 << 20, read_only: false }
    }

    /// Submits a request, which continues even if its future is dropped.
    fn submit(&self, request: BlockRequest) -> LocalFuture<Result<BlockReply>> {
        let disk = self.0.clone();
        disk.begun.set(disk.begun.get() + 1);
        if !disk.shut.get() {
            return Box::pin(std::future::ready(disk.execute(request)));
        }
        let read = if let BlockRequest::Read(extent) = &request { extent.len } else { 0 };
        disk.waiting.set(disk.waiting.get() + 1);
        disk.reading.set(disk.reading.get() + read);
        let task = spawn(async move {
            disk.opened.wait_until(|| !disk.shut.get()).await;
            disk.waiting.set(disk.waiting.get() - 1);
            disk.reading.set(disk.reading.get() - read);
            disk.execute(request)
        });
        Box::pin(task)
    }

    fn map(&self, extent: Extent) -> LocalFuture<Result<ExtentMap>> {
        let mut map = ExtentMap::new();
        map.push(extent.offset, extent.len, ExtentState::Data);
        Box::pin(std::future::ready(Ok(map)))
    }

    fn size_watch(&self) -> Option<Rc<SizeWatch>> {
        None
    }
}

struct Shelf(Rc<Disk>);

impl NamespaceDevices for Shelf {
    fn open(&self, _namespace: &Namespace) -> Option<Rc<dyn BlockDevice>> {
        Some(Rc::new(Shared(self.0.clone())))
    }
}

pub fn namespace() -> Namespace {
    Namespace { nsid: NSID, name: "pool/disk".into(), uuid: [7; 16], ana_group: 1, read_only: false }
}

/// Returns the only subsystem of a server.
pub fn subsystem(server: &NvmeServer) -> Subsystem {
    server.subsystems().get(NQN).expect("the subsystem")
}

/// Runs `test` in simulation, with a subsystem that has one namespace.
pub fn simulate<F: Future<Output = ()>>(limits: HostLimits, test: impl Fn(Rc<NvmeServer>, Rc<Disk>, Arc<Port>) -> F) {
    simulate_grouped(AnaGrouping::ByPort, limits, test);
}

/// Runs `test` as [`simulate`] does, with ANA groups of this kind.
pub fn simulate_grouped<F: Future<Output = ()>>(
    grouping: AnaGrouping,
    limits: HostLimits,
    test: impl Fn(Rc<NvmeServer>, Rc<Disk>, Arc<Port>) -> F,
) {
    let world = World::new(1, Faults::none());
    let reactor = world.reactor();
    let run = world.run(&reactor, async {
        let identity =
            SubsystemIdentity { nqn: NQN.into(), serial: "1".into(), model: "m".into(), firmware: "1".into() };
        let subsystems = Subsystems::new(limits.clone());
        let subsystem = subsystems.create_with(identity, 1..=100, grouping, |_| {}).expect("the first");
        let port = Port::new(1, vec![PortAddress::Unix]);
        subsystems.add_port(port.clone());
        subsystem.add_namespace(namespace()).expect("in range");
        let disk = Disk::new(8 << 20);
        let server = NvmeServer::new(subsystems, Box::new(Shelf(disk.clone())));
        let listener = Listener::bind(&addr()).expect("binds");
        drop(spawn(server.clone().serve(listener, port.clone())));
        test(server.clone(), disk.clone(), port).await;
        disk.open();
        server.stop().await;
    });
    run.unwrap_or_else(|stop| panic!("{stop}\n{}", world.trace(60)));
}

/// PDU of the target: its type, its whole header, and its data.
#[derive(Debug, Clone)]
pub struct Got {
    pub kind: u8,
    pub header: Vec<u8>,
    pub data: Vec<u8>,
}

impl Got {
    /// Returns command identifier and status of a response.
    pub fn response(&self) -> (u16, NvmeStatus) {
        assert_eq!(self.kind, kind::RESPONSE, "{self:?}");
        (u16_at(&self.header, 20), NvmeStatus(u16_at(&self.header, 22) >> 1))
    }

    pub fn data_header(&self) -> DataHeader {
        DataHeader::decode(&self.header)
    }
}

/// Host side of a connection.
pub struct Host {
    pub stream: Stream,
    input: Vec<u8>,
}

impl Host {
    pub async fn open() -> Self {
        let stream = Stream::connect(&addr()).await.expect("connects");
        let mut host = Self { stream, input: Vec::new() };
        host.send(&IcReq { version: 0, host_alignment: 0, digests: 0, r2t_max: 0 }.encode()).await;
        assert_eq!(host.pdu().await.expect("granted").kind, kind::IC_RESP);
        host
    }

    /// Sends a Connect, and does not wait for the response.
    pub async fn ask_queue(&mut self, queue: u16, entries: u16, cntlid: u16) {
        self.ask_queue_as(HOST, queue, entries, cntlid).await;
    }

    /// Sends a Connect in the name of a host.
    pub async fn ask_queue_as(&mut self, name: &str, queue: u16, entries: u16, cntlid: u16) {
        let connect = Connect {
            queue,
            sq_size: entries - 1,
            no_flow_control: false,
            keep_alive_ms: 0,
            host_id: [9; 16],
            cntlid,
            subsystem: NQN.into(),
            host: name.into(),
        };
        let (sqe, data) = connect.encode(Sqe::new(FABRICS, 0, 0));
        let sqe = sqe.with_sgl(Sgl::InCapsule { offset: 0, len: data.len() as u32 });
        self.send(&capsule(&sqe, &data)).await;
    }

    /// Connects the admin queue of a controller and enables it; returns the controller's id too.
    pub async fn admin() -> (Self, u16) {
        Self::admin_of(HOST).await
    }

    /// Connects and enables an admin queue in the name of a host.
    pub async fn admin_of(name: &str) -> (Self, u16) {
        let mut host = Self::open().await;
        host.ask_queue_as(name, 0, 32, CNTLID_ANY).await;
        let answer = host.pdu().await.expect("connected");
        assert!(answer.response().1.is_success(), "{:?}", answer.response());
        let cntlid = u64_at(&answer.header, 8) as u16;
        let mut sqe = Sqe::new(FABRICS, 1, 0);
        sqe.0[4] = fctype::PROPERTY_SET;
        sqe.0[44..48].copy_from_slice(&property::CC.to_le_bytes());
        sqe.0[48..52].copy_from_slice(&(1_u32 | 0x46 << 16).to_le_bytes());
        host.send(&capsule(&sqe, &[])).await;
        assert!(host.pdu().await.expect("enabled").response().1.is_success());
        (host, cntlid)
    }

    /// Connects an I/O queue.
    pub async fn io(cntlid: u16, queue: u16, entries: u16) -> Self {
        Self::io_of(HOST, cntlid, queue, entries).await
    }

    /// Connects an I/O queue in the name of a host.
    pub async fn io_of(name: &str, cntlid: u16, queue: u16, entries: u16) -> Self {
        let mut host = Self::open().await;
        host.ask_queue_as(name, queue, entries, cntlid).await;
        let answer = host.pdu().await.expect("connected");
        assert!(answer.response().1.is_success(), "{:?}", answer.response());
        host
    }

    pub async fn send(&self, bytes: &[u8]) {
        // The target may have closed already; a sender notices that when receiving.
        let _ = self.stream.send(Buf::copy_of(bytes)).await;
    }

    /// Receives the next PDU; returns `None` when the connection is closed.
    pub async fn pdu(&mut self) -> Option<Got> {
        loop {
            if self.input.len() >= pdu::COMMON {
                let common = Common::decode(&self.input);
                let len = common.len as usize;
                if self.input.len() >= len {
                    let whole: Vec<u8> = self.input.drain(..len).collect();
                    let (header, data) = whole.split_at(common.header_len.into());
                    return Some(Got { kind: common.kind, header: header.to_vec(), data: data.to_vec() });
                }
            }
            let (got, buf) = self.stream.recv(BufMut::with_capacity(64 * 1024)).await;
            if !got.is_ok_and(|got| got > 0) {
                return None;
            }
            self.input.extend_from_slice(&buf);
        }
    }
}

/// Encodes a command capsule.
pub fn capsule(sqe: &Sqe, data: &[u8]) -> Vec<u8> {
    let offset = if data.is_empty() { 0 } else { pdu::CAPSULE_HEADER as u8 };
    let len = (pdu::CAPSULE_HEADER + data.len()) as u32;
    let common =
        Common { kind: kind::COMMAND, flags: 0, header_len: pdu::CAPSULE_HEADER as u8, data_offset: offset, len };
    [&common.encode()[..], &sqe.0, data].concat()
}

/// Encodes an H2CData.
pub fn h2c_data(cid: u16, tag: u16, offset: u32, data: &[u8], last: bool) -> Vec<u8> {
    let common = Common {
        kind: kind::H2C_DATA,
        flags: if last { flag::LAST } else { 0 },
        header_len: pdu::DATA_HEADER as u8,
        data_offset: pdu::DATA_HEADER as u8,
        len: (pdu::DATA_HEADER + data.len()) as u32,
    };
    [&DataHeader { cid, tag, offset, len: data.len() as u32 }.encode(common)[..], data].concat()
}

/// Creates a command on blocks of 512 bytes.
pub fn blocks(opcode: u8, cid: u16, first: u64, count: u32) -> Sqe {
    let mut sqe = Sqe::new(opcode, cid, NSID).with(12, count - 1);
    sqe.0[40..48].copy_from_slice(&first.to_le_bytes());
    sqe
}

/// Waits for `future`, for at most a minute of simulated time.
pub async fn soon<F: Future>(future: F) -> Option<F::Output> {
    forebay_reactor::timeout(Duration::from_secs(60), future).await.ok()
}

pub use forebay_nvmf::wire::command::{admin as admin_opcode, nvm};
