//! Serves disks of RAM over iSCSI, to try initiators against the front alone and to measure what it costs.
//!
//! ```text
//! cargo run --release -p forebay-iscsi --example ramdisk -- 127.0.0.1:3260 1G [--units N] [--cores N] [--read-only] \
//!     [--groups N]
//! iscsi-ls iscsi://127.0.0.1:3260
//! ```

use std::cell::RefCell;
use std::process::ExitCode;
use std::rc::Rc;
use std::sync::Arc;

use forebay_block::reservation::{Keep, ReservationTable, Reservations};
use forebay_block::{
    BlockDevice, BlockReply, BlockRequest, BufList, BufMut, DeviceHandle, Error, ErrorKind, Extent, ExtentMap,
    ExtentState, Geometry, LocalFuture, Result, SizeWatch,
};
use forebay_iscsi::scsi::inquiry::UnitIdentity;
use forebay_iscsi::unit::Unit;
use forebay_iscsi::{
    IscsiServer, IscsiServerOptions, PoolSpace, PortGroups, RemotePortGroup, TargetLimits, TargetPort, TargetSpec,
    Targets, UnitDevices, UnitSpec,
};
use forebay_reactor::{Addr, BufPool, Cores, CoresOptions, DriverChoice, Listener, Reactor};

/// The unit of allocation in bytes.
const CHUNK: u64 = 4096;
/// Reads up to this length come from a pool.
const POOLED: usize = 256 * 1024;

struct RamDisk {
    size: u64,
    chunks: RefCell<Vec<Option<Box<[u8]>>>>,
    small: BufPool,
    large: BufPool,
    reservations: Reservations,
}

/// Reservation store that persists nothing: reservations end with the process.
struct Forget;

impl Keep for Forget {
    fn save(&self, _table: Option<Vec<u8>>) -> LocalFuture<Result<()>> {
        Box::pin(std::future::ready(Ok(())))
    }
}

impl RamDisk {
    fn new(size: u64) -> Self {
        let chunks = (0..size.div_ceil(CHUNK)).map(|_| None).collect();
        let (small, large) = (BufPool::new(4096, 256), BufPool::new(POOLED, 64));
        let reservations = Reservations::new(ReservationTable::new(), Rc::new(Forget));
        Self { size, chunks: RefCell::new(chunks), small, large, reservations }
    }

    /// Calls `f` with each chunk that `extent` touches: its number, where in it, and where in the extent.
    fn each(extent: Extent, mut f: impl FnMut(usize, std::ops::Range<usize>, usize)) {
        let mut at = extent.offset;
        while at < extent.end() {
            let start = (at % CHUNK) as usize;
            let len = (CHUNK as usize - start).min((extent.end() - at) as usize);
            f((at / CHUNK) as usize, start..start + len, (at - extent.offset) as usize);
            at += len as u64;
        }
    }

    fn read(&self, extent: Extent) -> BufList {
        let len = extent.len as usize;
        let mut out = match len {
            0..=4096 => self.small.get(),
            4097..=POOLED => self.large.get(),
            _ => BufMut::with_capacity(len),
        };
        out.set_len(len);
        let chunks = self.chunks.borrow();
        Self::each(extent, |chunk, part, at| {
            let to = &mut out[at..at + part.len()];
            match &chunks[chunk] {
                Some(bytes) => to.copy_from_slice(&bytes[part]),
                None => to.fill(0),
            }
        });
        out.into()
    }

    fn write(&self, offset: u64, data: &BufList) {
        let mut chunks = self.chunks.borrow_mut();
        let mut at = offset;
        for part in data.parts() {
            Self::each(Extent::new(at, part.len() as u64), |chunk, range, from| {
                let bytes = chunks[chunk].get_or_insert_with(|| vec![0; CHUNK as usize].into());
                let len = range.len();
                bytes[range].copy_from_slice(&part[from..from + len]);
            });
            at += part.len() as u64;
        }
    }

    fn zero(&self, extent: Extent) {
        let mut chunks = self.chunks.borrow_mut();
        Self::each(extent, |chunk, range, _| match &mut chunks[chunk] {
            Some(_) if range.len() as u64 == CHUNK => chunks[chunk] = None,
            Some(bytes) => bytes[range].fill(0),
            None => {}
        });
    }

    fn serve(&self, request: &BlockRequest) -> Result<BlockReply> {
        if request.extent().is_some_and(|extent| extent.checked_end().is_none_or(|end| end > self.size)) {
            return Err(ErrorKind::OutOfRange.into());
        }
        match request {
            BlockRequest::Read(extent) => return Ok(BlockReply::Data(self.read(*extent))),
            BlockRequest::Write { offset, data, .. } => self.write(*offset, data),
            BlockRequest::Discard(extent) | BlockRequest::WriteZeroes { extent, .. } => self.zero(*extent),
            BlockRequest::Flush => {}
            BlockRequest::CompareAndWrite { offset, expect, data, .. } => {
                let found = self.read(Extent::new(*offset, expect.len() as u64)).to_vec();
                if let Some(at) = found.iter().zip(expect.to_vec()).position(|(found, wanted)| *found != wanted) {
                    return Err(Error::new(ErrorKind::Mismatch(at as u64), "compare and write"));
                }
                self.write(*offset, data);
            }
        }
        Ok(BlockReply::Done)
    }
}

impl BlockDevice for RamDisk {
    fn geometry(&self) -> Geometry {
        Geometry {
            size: self.size,
            block_size: 1,
            preferred_io: 4096,
            transfer_max: 32 * 1024 * 1024,
            read_only: false,
        }
    }

    fn submit(&self, request: BlockRequest) -> LocalFuture<Result<BlockReply>> {
        Box::pin(std::future::ready(self.serve(&request)))
    }

    fn map(&self, extent: Extent) -> LocalFuture<Result<ExtentMap>> {
        let mut map = ExtentMap::new();
        let chunks = self.chunks.borrow();
        Self::each(extent, |chunk, part, at| {
            let state = if chunks[chunk].is_some() { ExtentState::Data } else { ExtentState::Hole };
            map.push(extent.offset + at as u64, part.len() as u64, state);
        });
        Box::pin(std::future::ready(Ok(map)))
    }

    fn size_watch(&self) -> Option<Rc<SizeWatch>> {
        None
    }

    fn reservations(&self) -> Option<Reservations> {
        Some(self.reservations.clone())
    }
}

/// Disks as accessed from their own core.
struct Own(Vec<Rc<RamDisk>>);

impl UnitDevices for Own {
    fn device(&self, unit: &Unit) -> Option<Rc<dyn BlockDevice>> {
        self.0.get(usize::from(unit.lun())).map(|disk| disk.clone() as _)
    }
}

/// Disks as accessed from other cores.
struct Far(Arc<Vec<DeviceHandle>>);

impl UnitDevices for Far {
    fn device(&self, unit: &Unit) -> Option<Rc<dyn BlockDevice>> {
        self.0.get(usize::from(unit.lun())).map(|disk| disk.attach() as _)
    }
}

struct Arguments {
    addr: Addr,
    size: u64,
    units: u16,
    cores: usize,
    read_only: bool,
    /// Target port groups; 0 for a target without a list.  The others than group 1 have no portals.
    groups: u16,
    driver: DriverChoice,
}

fn arguments() -> std::result::Result<Arguments, String> {
    let mut words = std::env::args().skip(1);
    let addr = words.next().ok_or("which address?")?.parse().map_err(|error| format!("{error}"))?;
    let size = words.next().ok_or("how many bytes?")?;
    let (digits, unit) = match size.strip_suffix('G') {
        Some(digits) => (digits, 1 << 30),
        None => (size.strip_suffix('M').unwrap_or(&size), 1 << 20),
    };
    let size = digits.parse::<u64>().map_err(|error| format!("{size}: {error}"))? * unit;
    let mut arguments =
        Arguments { addr, size, units: 1, cores: 1, read_only: false, groups: 0, driver: DriverChoice::Auto };
    while let Some(word) = words.next() {
        let mut number = || words.next().and_then(|word| word.parse().ok()).ok_or(format!("{word}: how many?"));
        match word.as_str() {
            "--groups" => arguments.groups = number()?,
            "--units" => arguments.units = number()?,
            "--cores" => arguments.cores = number()?.into(),
            "--read-only" => arguments.read_only = true,
            "--poll" => arguments.driver = DriverChoice::Poll,
            _ => return Err(format!("{word}?")),
        }
    }
    Ok(arguments)
}

fn run(arguments: Arguments) -> std::io::Result<()> {
    let Arguments { addr, size, units, cores, read_only, groups, driver } = arguments;
    let reactor = Reactor::system(driver)?;
    let options = CoresOptions { count: cores.max(2) - 1, driver, pin: false, ..CoresOptions::default() };
    let others = (cores > 1).then(|| Cores::start(&options)).transpose()?;
    reactor.block_on(async {
        let targets = Targets::new(TargetLimits::default());
        let mut spec = TargetSpec { name: "iqn.2026-11.io.forebay:ramdisk".into(), ..TargetSpec::default() };
        if groups > 0 {
            let port = |group| TargetPort { group, relative_id: group };
            let remote = (2..=groups).map(|group| RemotePortGroup { port: port(group), portals: Vec::new() });
            let groups = PortGroups::new(port(1), remote.collect()).map_err(std::io::Error::other)?;
            spec.port_groups = Some(groups);
        }
        let target = targets.create(spec).map_err(std::io::Error::other)?;
        let disks: Vec<Rc<RamDisk>> = (0..units).map(|_| Rc::new(RamDisk::new(size))).collect();
        for lun in 0..units {
            let mut uuid = *b"ram disk number ";
            uuid[14..].copy_from_slice(&lun.to_be_bytes());
            let spec = UnitSpec {
                name: format!("ram/{lun}"),
                identity: UnitIdentity { uuid, revision: "1".into() },
                read_only,
                rotational: false,
                space: Arc::new(PoolSpace::new(0)),
                initiators: Vec::new(),
            };
            let unit = target.add(lun.into(), spec).map_err(std::io::Error::other)?;
            unit.set_preferred_group((groups > 0).then_some(1));
        }
        let listener = Listener::bind(&addr)?;
        targets.set_portals(vec![listener.local_addr().clone()]);
        println!("iscsi://{}/{}/0", listener.local_addr(), target.name());
        if let Some(others) = &others {
            let handles = Arc::new(disks.iter().map(|disk| DeviceHandle::new(disk.clone())).collect::<Vec<_>>());
            for core in others.handles() {
                let (targets, handles, shared) = (targets.clone(), handles.clone(), listener.share()?);
                drop(core.run(move || async move {
                    let server = IscsiServer::new(targets, Rc::new(Far(handles)), IscsiServerOptions::default());
                    match shared.attach() {
                        Ok(listener) => server.serve(listener).await,
                        Err(error) => eprintln!("{error}"),
                    }
                }));
            }
        }
        IscsiServer::new(targets, Rc::new(Own(disks)), IscsiServerOptions::default()).serve(listener).await;
        Ok(())
    })
}

fn main() -> ExitCode {
    match arguments().and_then(|arguments| run(arguments).map_err(|error| error.to_string())) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}\nusage: ramdisk ADDR SIZE [--units N] [--cores N] [--read-only] [--groups N] [--poll]");
            ExitCode::from(2)
        }
    }
}
