//! Scenario of a run.

use forebay_block::{Compression, ErrorKind, ObjectBackend, ObjectName, Result};

use crate::faults::{CrashPolicy, DiskFaults, Faults};
use crate::rng::Rng;

/// Subject of the load.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Subject {
    /// The store's objects.
    Objects,
    /// Images on the store.
    Image,
}

/// Damage that is done to the disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Damage {
    /// No damage.
    None,
    /// Bits flip while the store is closed.
    Closed,
    /// Bits flip while the store is open.
    Open,
    /// The disk fails operations, and works again after the next crash.
    Errors,
    /// The disk dies under load, and is as good as new after the next crash.
    Dies,
}

/// Bytes that a small store reserves behind its end.
const HOST_RESERVE: u64 = 8 << 20;

/// A run, drawn from a seed.
#[derive(Debug, Clone)]
pub struct Scenario {
    /// The seed.
    pub seed: u64,
    /// Subject of the load.
    pub subject: Subject,
    /// A block device; otherwise a file.
    pub device: bool,
    /// Bytes a sector.
    pub sector: u32,
    /// Bytes a segment.
    pub segment_size: u32,
    /// Number of segments.
    pub segments: u32,
    /// Bytes of memory for metadata.
    pub metadata_cache: usize,
    /// Bytes of the store's data cache.
    pub data_cache: usize,
    /// Free segments are punched.
    pub punch_free: bool,
    /// Times that the store is opened, loaded and crashed or closed.
    pub lives: u32,
    /// Damage between lives.
    pub damage: Damage,
    /// Others fill the file system that the store's file lies on, and empty it again.
    pub others: bool,
    /// Faults of the world.
    pub faults: Faults,
    /// Persistence points, at most, between the opening and the crash.
    pub points_max: u64,
    /// Chances of a million that a life ends in order instead.
    pub close_ppm: u32,
    /// Chances of a million that only the process dies.
    pub kill_ppm: u32,
    /// Objects or images are large for the store, so that it is full soon.
    pub crowded: bool,
    /// Default compression of the store, in turn for each life; none: never set.
    pub compression: Vec<Compression>,
}

/// Draws the compression of each life, in two of three scenarios none at all.
fn draw_compression(rng: &mut Rng) -> Vec<Compression> {
    const SETTINGS: [Compression; 4] =
        [Compression::Lz4, Compression::Zstd { level: 1 }, Compression::Deflate { level: 1 }, Compression::None];
    let lives = if rng.one_in(3) { rng.range(1..4) } else { 0 };
    (0..lives).map(|_| *rng.pick(&SETTINGS)).collect()
}

impl Scenario {
    /// Encrypts one of the two volumes of the load in a third of the scenarios, before there is any data.
    pub async fn encrypt(&self, store: &dyn ObjectBackend) -> Result<()> {
        if !self.seed.is_multiple_of(3) {
            return Ok(());
        }
        match store.encrypt(&ObjectName::new("a.")).await {
            // A crash came before the key was durable, and then data was written in the plain.
            Err(error) if error.kind() == ErrorKind::Exists => Ok(()),
            done => done,
        }
    }

    /// The scenario of a seed.
    pub fn draw(seed: u64) -> Self {
        let mut rng = Rng::new(seed ^ 0x5ce0_a210);
        let damage = match rng.below(20) {
            0 | 1 => Damage::Closed,
            2 => Damage::Open,
            3 | 4 => Damage::Errors,
            5 => Damage::Dies,
            _ => Damage::None,
        };
        let disk = if rng.one_in(5) { DiskFaults::stalling() } else { DiskFaults::none() };
        let crash = match rng.below(6) {
            0 => CrashPolicy::LoseAll,
            1 => CrashPolicy::Mixed { keep_ppm: 500_000, tear_ppm: 500_000 },
            _ => CrashPolicy::Seeded,
        };
        // From a stream of its own, so that what else a seed decides does not hang on it.
        let subject = if Rng::new(seed ^ 0x001a_9e01).coin() { Subject::Image } else { Subject::Objects };
        let segment_size = *rng.pick(&[64 << 10, 64 << 10, 64 << 10, 128 << 10, 256 << 10]);
        let (device, sector) = (rng.coin(), *rng.pick(&[512, 4096]));
        let segments = *rng.pick(&[24, 24, 25, 32, 64, 200]);
        // From a stream of its own as well.
        let mut host = Rng::new(seed ^ 0x0057_f511);
        let others = !device && damage == Damage::None && host.one_in(4);
        let size = u64::from(segment_size) * u64::from(segments);
        // The store keeps some for itself; beside that there is less than all of its file may need, or a little more.
        let files_capacity = others.then(|| 2 * HOST_RESERVE + size * host.range(40..130) / 100);
        Self {
            seed,
            subject,
            device,
            sector,
            segment_size,
            segments,
            others,
            metadata_cache: *rng.pick(&[16 << 10, 64 << 10, 1 << 20, 60 << 20]),
            data_cache: *rng.pick(&[0, 4 << 10, 64 << 10, 4 << 20]),
            punch_free: rng.coin(),
            lives: rng.range(1..5) as u32,
            damage,
            faults: Faults {
                disk,
                crash,
                events_max: 3_000_000,
                files_capacity,
                files_space_known: others,
                ..Faults::none()
            },
            points_max: 4 << rng.below(9),
            close_ppm: *rng.pick(&[0, 100_000, 300_000]),
            kill_ppm: *rng.pick(&[0, 0, 200_000, 1_000_000]),
            crowded: rng.one_in(3),
            // From a stream of its own as well.
            compression: draw_compression(&mut Rng::new(seed ^ 0x0b10_b5ed)),
        }
    }
}
