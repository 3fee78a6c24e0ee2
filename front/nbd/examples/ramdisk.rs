//! Serves a disk of RAM over NBD, to try clients against the front alone and to measure what it costs.
//!
//! ```text
//! cargo run --release -p forebay-nbd --example ramdisk -- unix:/tmp/nbd.sock 1G [--cores N] [--read-only] [--poll]
//! nbdinfo 'nbd+unix:///ram?socket=/tmp/nbd.sock'
//! ```

use std::cell::RefCell;
use std::process::ExitCode;
use std::rc::Rc;

use forebay_block::{
    BlockDevice, BlockReply, BlockRequest, BufList, BufMut, DeviceHandle, Error, ErrorKind, Extent, ExtentMap,
    ExtentState, Geometry, LocalFuture, Result, SizeWatch,
};
use forebay_nbd::access::NbdHost;
use forebay_nbd::{ExportSource, ExportSummary, NbdExport, NbdServer, NbdServerOptions, NbdStats, Tls};
use forebay_reactor::{Addr, BufPool, Cores, CoresOptions, DriverChoice, Listener, Reactor};

/// Allocation unit in bytes.
const CHUNK: u64 = 64 * 1024;
/// Maximum length of reads from a pool buffer, in bytes.
const POOLED: usize = 256 * 1024;

struct RamDisk {
    size: u64,
    chunks: RefCell<Vec<Option<Box<[u8]>>>>,
    small: BufPool,
    large: BufPool,
}

impl RamDisk {
    fn new(size: u64) -> Self {
        let chunks = (0..size.div_ceil(CHUNK)).map(|_| None).collect();
        let (small, large) = (BufPool::new(4096, 256), BufPool::new(POOLED, 64));
        Self { size, chunks: RefCell::new(chunks), small, large }
    }

    /// Calls `f` with each chunk that `extent` touches: its number, the range in it, and the position in the extent.
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

    fn zero(&self, extent: Extent, keep: bool) {
        let mut chunks = self.chunks.borrow_mut();
        Self::each(extent, |chunk, range, _| match &mut chunks[chunk] {
            Some(_) if !keep && range.len() as u64 == CHUNK => chunks[chunk] = None,
            Some(bytes) => bytes[range].fill(0),
            None if keep => chunks[chunk] = Some(vec![0; CHUNK as usize].into()),
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
            BlockRequest::Discard(extent) => self.zero(*extent, false),
            BlockRequest::WriteZeroes { extent, no_unmap, .. } => self.zero(*extent, *no_unmap),
            BlockRequest::Flush => {}
            BlockRequest::CompareAndWrite { .. } => {
                return Err(Error::new(ErrorKind::Unsupported, "compare and write"));
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
        let chunks = self.chunks.borrow();
        let mut map = ExtentMap::new();
        Self::each(extent, |chunk, range, at| {
            let state = if chunks[chunk].is_some() { ExtentState::Data } else { ExtentState::Hole };
            map.push(extent.offset + at as u64, range.len() as u64, state);
        });
        Box::pin(std::future::ready(Ok(map)))
    }

    fn size_watch(&self) -> Option<Rc<SizeWatch>> {
        None
    }
}

/// Single export, called `ram`; also the default export.
struct One {
    device: Rc<dyn BlockDevice>,
    read_only: bool,
}

const NAME: &str = "ram";

impl ExportSource for One {
    fn list(&self, _: &NbdHost) -> Vec<ExportSummary> {
        vec![ExportSummary { name: NAME.into(), description: "a disk of RAM".into() }]
    }

    fn open(&self, name: &str, _: &NbdHost) -> LocalFuture<Result<NbdExport>> {
        let found = if name.is_empty() || name == NAME {
            let export = NbdExport::new(NAME, self.device.clone());
            Ok(export.description("a disk of RAM").read_only(self.read_only))
        } else {
            Err(Error::new(ErrorKind::NotFound, format!("export '{name}'")))
        };
        Box::pin(std::future::ready(found))
    }
}

struct Arguments {
    addr: Addr,
    size: u64,
    cores: usize,
    read_only: bool,
    driver: DriverChoice,
}

fn arguments() -> std::result::Result<Arguments, String> {
    let mut given = std::env::args().skip(1);
    let addr = given.next().ok_or("usage: ramdisk ADDR SIZE [--cores N] [--read-only] [--poll]")?;
    let addr = addr.parse().map_err(|error| format!("{error}"))?;
    let size = given.next().ok_or("a size is missing")?;
    let (number, unit) = size.split_at(size.trim_end_matches(char::is_alphabetic).len());
    let shift = ["", "K", "M", "G", "T"].iter().position(|&known| known == unit).ok_or("a size such as 1G")? * 10;
    let size = number.parse::<u64>().map_err(|error| error.to_string())? << shift;
    let mut found = Arguments { addr, size, cores: 1, read_only: false, driver: DriverChoice::Auto };
    while let Some(flag) = given.next() {
        match flag.as_str() {
            "--cores" => found.cores = given.next().and_then(|count| count.parse().ok()).ok_or("a number of cores")?,
            "--read-only" => found.read_only = true,
            "--poll" => found.driver = DriverChoice::Poll,
            other => return Err(format!("what is {other}?")),
        }
    }
    Ok(found)
}

fn main() -> ExitCode {
    let arguments = match arguments() {
        Ok(arguments) => arguments,
        Err(error) => {
            eprintln!("{error}");
            return ExitCode::FAILURE;
        }
    };
    match run(arguments) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: Arguments) -> std::io::Result<()> {
    let Arguments { addr, size, cores: count, read_only, driver } = arguments;
    let reactor = Reactor::system(driver)?;
    // This core owns the device; the other cores only have connections.
    let others = (count > 1).then(|| {
        Cores::start(&CoresOptions { count: count - 1, driver, name: "ramdisk".into(), ..CoresOptions::default() })
    });
    let others = others.transpose()?;
    reactor.block_on(async {
        let device: Rc<dyn BlockDevice> = Rc::new(RamDisk::new(size));
        let listener = Listener::bind(&addr)?;
        let stats = NbdStats::new();
        if let Some(others) = &others {
            let shared = DeviceHandle::new(device.clone());
            for core in others.handles() {
                let (listener, device, stats) = (listener.share()?, shared.clone(), stats.clone());
                drop(core.run(move || async move {
                    match listener.attach() {
                        Ok(listener) => {
                            let exports = Rc::new(One { device: device.attach(), read_only });
                            NbdServer::new(exports, NbdServerOptions::default(), stats)
                                .serve(listener, Tls::None)
                                .await;
                        }
                        Err(error) => eprintln!("a core cannot accept: {error}"),
                    }
                }));
            }
        }
        println!("ready at {}", listener.local_addr());
        NbdServer::new(Rc::new(One { device, read_only }), NbdServerOptions::default(), stats)
            .serve(listener, Tls::None)
            .await;
        Ok(())
    })
}
