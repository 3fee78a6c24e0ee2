//! Scenario of a write log run, and its counters.

use std::time::Duration;

use forebay_writelog::{DirtyLimits, LogOptions, MediumKind, Persist};

use crate::faults::CrashPolicy;
use crate::rng::Rng;

/// A run, drawn from a seed.
#[derive(Debug, Clone)]
pub struct LogScenario {
    /// The seed.
    pub seed: u64,
    /// Medium of the log.
    pub medium: MediumKind,
    /// Bytes a sector of the log's disk.
    pub sector: u32,
    /// Bytes of the log.
    pub log_size: u64,
    /// Bytes of the volume.
    pub size: u64,
    /// Acknowledgement mode of writes.
    pub persist: Persist,
    /// Length in bytes from which sequential writes bypass the log.
    pub direct_min: Option<u32>,
    /// Limit of dirty bytes.
    pub dirty_bytes_max: Option<u64>,
    /// Limit of their age.
    pub dirty_age_max: Duration,
    /// Payload bytes kept in memory.
    pub recent_bytes: usize,
    /// Entries written back together.
    pub batch_entries: usize,
    /// Requests to the backend at once.
    pub parallel: usize,
    /// Groups appended at once.
    pub groups: usize,
    /// The backend takes milliseconds.
    pub slow_backend: bool,
    /// Chances of a million that a write to the backend fails.
    pub backend_error_ppm: u32,
    /// The log's disk fails writes.
    pub log_fails: bool,
    /// Times that the log is opened, loaded and crashed or closed.
    pub lives: u32,
    /// Persistence points, at most, of a life.
    pub points_max: u64,
    /// Chances of a million that a life ends in order instead.
    pub close_ppm: u32,
    /// Chances of a million that only the process dies.
    pub kill_ppm: u32,
    /// Effect of a crash on writes that were not synced.
    pub crash: CrashPolicy,
    /// Changes of the volume's size in each life, under load.
    pub resizes: u64,
    /// Long sequential writes are among the load.
    pub streams: bool,
    /// In the end bits of the log's medium are flipped, one at a time.
    pub damage: bool,
    /// The payloads of the log are encrypted.
    pub encryption: Encryption,
    /// A small log that is full most of the time, on a disk whose writes take very different times.
    pub full_ring: bool,
}

/// Time from which the payloads of a log are encrypted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Encryption {
    /// Payloads are not encrypted.
    Never,
    /// From its creation on.
    Always,
    /// From when it is opened without entries for the first time after its creation.
    Later,
}

impl Encryption {
    fn draw(seed: u64) -> Self {
        let all = [Self::Never, Self::Never, Self::Always, Self::Always, Self::Later];
        *Rng::new(seed ^ 0x656e_6372_7970).pick(&all)
    }
}

impl LogScenario {
    /// The scenario of a seed.
    pub fn draw(seed: u64) -> Self {
        let mut rng = Rng::new(seed ^ 0x10c5_10c5);
        let medium = if seed.is_multiple_of(2) { MediumKind::Ssd } else { MediumKind::Pmem };
        let crash = match rng.below(6) {
            0 => CrashPolicy::LoseAll,
            1 => CrashPolicy::Mixed { keep_ppm: 500_000, tear_ppm: 500_000 },
            _ => CrashPolicy::Seeded,
        };
        let log_fails = medium == MediumKind::Ssd && rng.one_in(10);
        let backend_error_ppm = if log_fails { 0 } else { *rng.pick(&[0, 0, 0, 20_000]) };
        let drawn = Self {
            seed,
            medium,
            sector: *rng.pick(&[512, 4096]),
            log_size: *rng.pick(&[256 << 10, 256 << 10, 320 << 10, 1 << 20]),
            size: *rng.pick(&[64 << 10, 256 << 10, 1 << 20]),
            persist: if rng.one_in(4) { Persist::OnFlush } else { Persist::OnWrite },
            direct_min: *rng.pick(&[None, None, Some(4096), Some(32 << 10)]),
            dirty_bytes_max: *rng.pick(&[None, None, None, Some(32 << 10), Some(128 << 10)]),
            dirty_age_max: *rng.pick(&[
                Duration::ZERO,
                Duration::from_micros(500),
                Duration::from_millis(5),
                Duration::from_secs(1),
            ]),
            recent_bytes: *rng.pick(&[0, 16 << 10, 4 << 20]),
            batch_entries: *rng.pick(&[1, 4, 64, 2048]),
            parallel: *rng.pick(&[1, 4, 64]),
            groups: *rng.pick(&[1, 2, 2, 4]),
            slow_backend: rng.coin(),
            backend_error_ppm,
            log_fails,
            lives: rng.range(1..5) as u32,
            points_max: 4 << rng.below(8),
            close_ppm: *rng.pick(&[0, 100_000, 300_000]),
            kill_ppm: *rng.pick(&[0, 0, 200_000, 1_000_000]),
            crash,
            resizes: 0,
            streams: false,
            damage: seed.is_multiple_of(3),
            encryption: Encryption::draw(seed),
            full_ring: false,
        };
        let drawn = Self { resizes: *rng.pick(&[0, 0, 0, 1, 4]), ..drawn };
        if medium == MediumKind::Ssd && !log_fails && rng.one_in(8) {
            return Self {
                full_ring: true,
                size: 1 << 20,
                log_size: 256 << 10,
                direct_min: None,
                dirty_bytes_max: None,
                slow_backend: false,
                lives: 3,
                points_max: *rng.pick(&[64, 256, 512]),
                ..drawn
            };
        }
        if !rng.one_in(8) {
            return drawn;
        }
        // Room for some of them, in the volume and in the log.
        Self {
            streams: true,
            size: 2 << 20,
            log_size: *rng.pick(&[1 << 20, 4 << 20]),
            direct_min: *rng.pick(&[None, Some(256 << 10), Some(256 << 10), Some(512 << 10)]),
            ..drawn
        }
    }

    pub(super) fn options(&self) -> LogOptions {
        LogOptions {
            persist: self.persist,
            limits: DirtyLimits { bytes_max: self.dirty_bytes_max, age_max: self.dirty_age_max },
            direct_min: self.direct_min,
            recent_bytes: self.recent_bytes,
            parallel: self.parallel,
            batch_entries: self.batch_entries,
            groups: self.groups,
        }
    }
}

/// Counters of runs, to verify that they reach the intended corner cases.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct LogTally {
    /// Number of runs.
    pub runs: u64,
    /// Runs in persistent memory.
    pub pmem: u64,
    /// Runs whose logs were encrypted from the beginning, ...
    pub encrypted: u64,
    /// ... and times that a log became an encrypted one later.
    pub encrypted_later: u64,
    /// Payloads that were encrypted.
    pub payloads_encrypted: u64,
    /// Times that data of the volume was seen on the medium of a log that was not encrypted.
    pub seen: u64,
    /// Requests that were completed.
    pub requests: u64,
    /// Persistence points passed.
    pub points: u64,
    /// Power failures.
    pub crashes: u64,
    /// Power failures while the log was being opened.
    pub crashes_opening: u64,
    /// Processes killed.
    pub kills: u64,
    /// Logs closed in order.
    pub closes: u64,
    /// Entries replayed.
    pub replayed: u64,
    /// Entries appended.
    pub appended: u64,
    /// Groups they were appended in.
    pub groups: u64,
    /// Entries that were overwritten in the log.
    pub overwritten: u64,
    /// Writes that went round the log.
    pub direct: u64,
    /// Bytes of these.
    pub direct_bytes: u64,
    /// Writes that were throttled.
    pub throttled: u64,
    /// Bytes read from the log.
    pub hit_bytes: u64,
    /// Logs that turned themselves off.
    pub turned_off: u64,
    /// Cuts that were held and looked at.
    pub cuts: u64,
    /// Times that writing back failed and was tried again.
    pub backend_errors: u64,
    /// Times that the volume was made shorter.
    pub shrunk: u64,
    /// Times that it was made longer.
    pub grown: u64,
    /// Bits that were flipped on the log's medium.
    pub flips: u64,
    /// Flips with which the log was refused.
    pub flips_refused: u64,
    /// Flips with which some of the log could not be read.
    pub flips_read: u64,
    /// Flips in parts that a power failure might have torn: the log ended before them.
    pub flips_shortened: u64,
}

impl LogTally {
    /// Adds another's.
    pub fn add(&mut self, other: &LogTally) {
        let add = |mine: &mut u64, theirs: u64| *mine += theirs;
        add(&mut self.runs, other.runs);
        add(&mut self.pmem, other.pmem);
        add(&mut self.encrypted, other.encrypted);
        add(&mut self.encrypted_later, other.encrypted_later);
        add(&mut self.payloads_encrypted, other.payloads_encrypted);
        add(&mut self.seen, other.seen);
        add(&mut self.requests, other.requests);
        add(&mut self.points, other.points);
        add(&mut self.crashes, other.crashes);
        add(&mut self.crashes_opening, other.crashes_opening);
        add(&mut self.kills, other.kills);
        add(&mut self.closes, other.closes);
        add(&mut self.replayed, other.replayed);
        add(&mut self.appended, other.appended);
        add(&mut self.groups, other.groups);
        add(&mut self.overwritten, other.overwritten);
        add(&mut self.direct, other.direct);
        add(&mut self.direct_bytes, other.direct_bytes);
        add(&mut self.throttled, other.throttled);
        add(&mut self.hit_bytes, other.hit_bytes);
        add(&mut self.turned_off, other.turned_off);
        add(&mut self.cuts, other.cuts);
        add(&mut self.backend_errors, other.backend_errors);
        add(&mut self.shrunk, other.shrunk);
        add(&mut self.grown, other.grown);
        add(&mut self.flips, other.flips);
        add(&mut self.flips_refused, other.flips_refused);
        add(&mut self.flips_read, other.flips_read);
        add(&mut self.flips_shortened, other.flips_shortened);
    }
}
