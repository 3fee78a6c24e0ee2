//! Whole runs: a store, a load, crashes and recoveries, and an oracle that watches.
//!
//! Everything about a run follows from its seed: the shape of the store, the faults, the load, and where it crashes.

mod devices;
mod families;
mod forward;
mod images;
mod load;
mod messenger;
mod own_blocks;
mod replication;
mod scenario;
mod shared;
mod store;
mod striping;
mod writelog;

pub use devices::{DevicesTally, run_devices};
pub use families::{FamilyTally, run_families};
pub use forward::{ForwardTally, run_forward};
pub use messenger::{MessengerTally, run_messenger};
pub use replication::{ReplicationTally, run_replication};
pub use scenario::{Damage, Scenario, Subject};
pub use shared::{SharedTally, run_shared};
pub use store::{crash_everywhere, run};
pub use writelog::{AttachmentTally, Encryption, LogScenario, LogTally, run_attachment, run_writelog, sweep_writelog};

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::rng::mix64;
use crate::world::World;

/// A run that found something.
#[derive(Debug, Clone)]
pub struct Failure {
    /// The seed that replays it.
    pub seed: u64,
    /// Description of the failure.
    pub what: String,
    /// Scenario and last events before the failure.
    pub trace: String,
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "seed {}: {}\n{}", self.seed, self.what, self.trace)
    }
}

impl std::error::Error for Failure {}

/// Counters of runs, to verify that they reach the intended corner cases.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Tally {
    /// Number of runs.
    pub runs: u64,
    /// Runs with images on the store.
    pub images: u64,
    /// Requests that were completed.
    pub requests: u64,
    /// Persistence points passed.
    pub points: u64,
    /// Power failures.
    pub crashes: u64,
    /// Power failures while the store was being opened.
    pub crashes_opening: u64,
    /// Processes killed.
    pub kills: u64,
    /// Stores closed in order.
    pub closes: u64,
    /// Recoveries that replayed a part of the log.
    pub replays: u64,
    /// Number of checkpoints.
    pub checkpoints: u64,
    /// Stores that were cleaned while they ran.
    pub cleaned: u64,
    /// Stores that were full.
    pub full: u64,
    /// Stores that were full because other files filled the file system.
    pub host_full: u64,
    /// Bits flipped and other damage done.
    pub damage: u64,
    /// Answers that said `Corrupt`.
    pub corrupt: u64,
    /// Answers that said `Io`.
    pub io_errors: u64,
    /// Times that a request waited for a disk that had failed for good.
    pub stuck: u64,
}

impl Tally {
    /// Adds another's.
    pub fn add(&mut self, other: &Tally) {
        let Tally { runs, images, requests, points, crashes, crashes_opening, kills, closes, replays, .. } = other;
        let Tally { checkpoints, cleaned, full, host_full, damage, corrupt, io_errors, stuck, .. } = other;
        self.runs += runs;
        self.images += images;
        self.requests += requests;
        self.points += points;
        self.crashes += crashes;
        self.crashes_opening += crashes_opening;
        self.kills += kills;
        self.closes += closes;
        self.replays += replays;
        self.checkpoints += checkpoints;
        self.cleaned += cleaned;
        self.full += full;
        self.host_full += host_full;
        self.damage += damage;
        self.corrupt += corrupt;
        self.io_errors += io_errors;
        self.stuck += stuck;
    }
}

/// Runs scenarios that follow from `seed` until `steps` requests were completed.  The first scenario's seed is `seed`
/// itself, so a failure is replayed by its own seed and one step.
///
/// # Errors
/// The first run that failed.
pub fn soak(seed: u64, steps: u64) -> Result<Tally, Failure> {
    let mut total = Tally::default();
    let mut number = 0;
    loop {
        let scenario = if number == 0 { seed } else { mix64(seed.wrapping_add(number)) };
        total.add(&run(Scenario::draw(scenario))?);
        number += 1;
        if total.requests >= steps {
            return Ok(total);
        }
    }
}

/// Crashes the scenario of `seed` at every persistence point of its first life in turn, with a load short enough for
/// that.
///
/// # Errors
/// The first run that found something.
pub fn sweep(seed: u64) -> Result<Tally, Failure> {
    const REQUESTS: usize = 12;
    crash_everywhere(&Scenario::draw(seed), REQUESTS)
}

/// Calls `body` with a world; a panic or an error becomes a [`Failure`] with the world's trace.
fn guarded<T>(world: &World, about: &str, body: impl FnOnce() -> Result<T, String>) -> Result<T, Failure> {
    const LINES: usize = 400;
    let what = match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(value)) => return Ok(value),
        Ok(Err(what)) => what,
        Err(panic) => {
            let text = panic.downcast_ref::<String>().cloned();
            let text = text.or_else(|| panic.downcast_ref::<&str>().map(|text| (*text).to_owned()));
            format!("panicked: {}", text.unwrap_or_default())
        }
    };
    let trace = format!("{about}\n{}", world.trace(LINES));
    Err(Failure { seed: world.seed(), what, trace })
}
