//! Benchmark load on an image: a fixed queue depth for a fixed time.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

use forebay_block::{BlockDevice, BlockRequest, BufList, Extent};
use forebay_messenger::perf::Measurement;
use forebay_reactor::{Buf, Instant, now, random, sleep, spawn, stand_back};

use super::Engine;
use super::peers::cpu_nanos;
use crate::failure::{Failure, Result};
use crate::spec::ImageSpec;
use crate::units::Size;

/// Warm-up time before the measurement.
const WARM_UP: Duration = Duration::from_millis(500);

/// Parameters of a benchmark.
#[derive(Debug, Clone)]
pub struct BenchLoad {
    /// Image under load.
    pub spec: ImageSpec,
    /// Percentage of write requests.
    pub writes: u8,
    /// Set for random offsets, unset for sequential ones.
    pub random: bool,
    /// Request size in bytes.
    pub size: u64,
    /// Queue depth.
    pub depth: usize,
    /// Measured time, the longest one if there is a total; `None`: until the total is reached.
    pub time: Option<Duration>,
    /// Bytes after which the benchmark ends; the first request is measured then.
    pub total: Option<u64>,
}

/// Result of a benchmark.
#[derive(Debug)]
pub struct Loaded {
    /// Requests, elapsed time and latencies.
    pub outcome: Measurement,
    /// CPU time of the process during the measurement, in nanoseconds.
    pub cpu_nanos: u64,
}

/// State shared by the lanes of a benchmark.
struct BenchState {
    device: Rc<dyn BlockDevice>,
    load: BenchLoad,
    /// Number of blocks of the image.
    blocks: u64,
    next: Cell<u64>,
    /// State of the random number generator.
    state: Cell<u64>,
    measuring: Cell<bool>,
    stop: Cell<bool>,
    /// Requests that are left to be issued, if there is a total.
    left: Cell<Option<u64>>,
    /// Lanes that have not ended.
    running: Cell<usize>,
    /// Time at which the last request was completed, and the CPU time of the process until then.
    ended: Cell<(Instant, u64)>,
    outcome: RefCell<Measurement>,
}

impl Engine {
    /// Runs a benchmark on an image.  Writes overwrite its data.
    pub async fn bench(self: Rc<Self>, load: BenchLoad) -> Result<Loaded> {
        let spec = load.spec.clone();
        let volume = self.open_volume(&spec).await?;
        // Served as to a host: a log that is attached or detached meanwhile takes effect.
        let device = volume.device(false, self.meter(&spec, None))?;
        let blocks = device.geometry().size / load.size.max(1);
        if load.size == 0 || load.size > u64::from(device.geometry().transfer_max) || blocks == 0 {
            let what = format!("requests of {} to {spec}, which has {}", Size(load.size), Size(device.geometry().size));
            return Err(Failure::invalid(what).hint("--io-size must be smaller than the image, and at most 32M"));
        }
        let shared = Rc::new(BenchState {
            device,
            blocks,
            next: Cell::new(0),
            state: Cell::new(random() | 1),
            measuring: Cell::new(false),
            stop: Cell::new(false),
            left: Cell::new(load.total.map(|bytes| bytes.div_ceil(load.size))),
            running: Cell::new(load.depth.max(1)),
            ended: Cell::new((now(), 0)),
            outcome: RefCell::default(),
            load,
        });
        shared.measuring.set(shared.load.total.is_some());
        let (mut begun, mut used) = (now(), cpu_nanos());
        let lanes: Vec<_> = (0..shared.load.depth.max(1)).map(|_| spawn(lane(shared.clone()))).collect();
        if shared.load.total.is_none() {
            sleep(WARM_UP).await;
            (begun, used) = (now(), cpu_nanos());
            shared.measuring.set(true);
        }
        let longest = shared.load.time.unwrap_or(Duration::MAX);
        while begun.elapsed() < longest && !shared.stop.get() && shared.running.get() > 0 {
            sleep(longest.saturating_sub(begun.elapsed()).min(Duration::from_millis(100))).await;
        }
        shared.measuring.set(false);
        let (ended, cpu) = if shared.running.get() == 0 { shared.ended.get() } else { (now(), cpu_nanos()) };
        let (seconds, cpu_nanos) = (ended.since(begun).as_secs_f64(), cpu.saturating_sub(used));
        shared.stop.set(true);
        for lane in lanes {
            lane.await.map_err(|error| self.image_failure(error, &spec))?;
        }
        let mut outcome = shared.outcome.take();
        outcome.seconds = seconds;
        Ok(Loaded { outcome, cpu_nanos })
    }
}

/// Issues one request after another, until the time is over, no requests are left, or one fails.
async fn lane(shared: Rc<BenchState>) -> forebay_block::Result<()> {
    let result = issue_all(&shared).await;
    shared.running.set(shared.running.get() - 1);
    if shared.running.get() == 0 {
        shared.ended.set((now(), cpu_nanos()));
    }
    result
}

async fn issue_all(shared: &BenchState) -> forebay_block::Result<()> {
    let size = shared.load.size;
    let bytes: Vec<u8> = (0..size).map(|_| shared.chance() as u8).collect();
    let data: BufList = Buf::copy_of(&bytes).into();
    let mut begun = now();
    while !shared.stop.get() && shared.take() {
        let offset = shared.block() * size;
        let request = if shared.writes() {
            BlockRequest::Write { offset, data: data.clone(), fua: false }
        } else {
            BlockRequest::Read(Extent::new(offset, size))
        };
        if let Err(error) = shared.device.submit(request).await {
            shared.stop.set(true);
            return Err(error);
        }
        // Reads of unwritten blocks complete immediately: the clock and other tasks still need a turn.
        stand_back().await;
        // The next request is issued immediately.
        let ended = now();
        let took = ended.since(std::mem::replace(&mut begun, ended));
        if shared.measuring.get() {
            shared.outcome.borrow_mut().count(took.as_nanos() as u64);
        }
    }
    Ok(())
}

impl BenchState {
    /// Takes one of the requests that are left; `false` if there is none.
    fn take(&self) -> bool {
        match self.left.get() {
            Some(0) => false,
            Some(left) => {
                self.left.set(Some(left - 1));
                true
            }
            None => true,
        }
    }

    fn chance(&self) -> u64 {
        let mut x = self.state.get();
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        self.state.set(x);
        x.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 16
    }

    fn block(&self) -> u64 {
        if self.load.random {
            return self.chance() % self.blocks;
        }
        let block = self.next.get();
        self.next.set((block + 1) % self.blocks);
        block
    }

    fn writes(&self) -> bool {
        match self.load.writes {
            0 => false,
            100.. => true,
            percent => self.chance() % 100 < percent.into(),
        }
    }
}
