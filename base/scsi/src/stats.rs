//! Command counters, readable from any thread: per unit and per session.

use std::rc::Rc;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use crate::cdb::ScsiCommand;
use crate::sense::Sense;
use crate::unit::LogicalUnit;

/// Command kind with separate counters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum ScsiCommandKind {
    /// READ commands.
    Read,
    /// WRITE commands, with or without verification.
    Write,
    /// WRITE SAME and UNMAP.
    Unmap,
    /// COMPARE AND WRITE.
    CompareAndWrite,
    /// SYNCHRONIZE CACHE.
    Sync,
    /// EXTENDED COPY.
    Copy,
    /// Other commands.
    Other,
}

impl ScsiCommandKind {
    /// All kinds, in the order of [`ScsiCounts::commands`].
    pub const ALL: [ScsiCommandKind; 7] = [
        ScsiCommandKind::Read,
        ScsiCommandKind::Write,
        ScsiCommandKind::Unmap,
        ScsiCommandKind::CompareAndWrite,
        ScsiCommandKind::Sync,
        ScsiCommandKind::Copy,
        ScsiCommandKind::Other,
    ];

    /// Returns the kind of a command.
    pub fn of(command: &Result<ScsiCommand, Sense>) -> Self {
        match command {
            Ok(ScsiCommand::Read(_)) => ScsiCommandKind::Read,
            Ok(ScsiCommand::Write(_) | ScsiCommand::WriteVerify { .. } | ScsiCommand::OrWrite(_)) => {
                ScsiCommandKind::Write
            }
            Ok(ScsiCommand::WriteSame { .. } | ScsiCommand::Unmap { .. }) => ScsiCommandKind::Unmap,
            Ok(ScsiCommand::CompareAndWrite(_)) => ScsiCommandKind::CompareAndWrite,
            Ok(ScsiCommand::SyncCache(_)) => ScsiCommandKind::Sync,
            Ok(ScsiCommand::ExtendedCopy { .. }) => ScsiCommandKind::Copy,
            _ => ScsiCommandKind::Other,
        }
    }

    /// Returns the label for metrics.
    pub fn label(self) -> &'static str {
        match self {
            ScsiCommandKind::Read => "read",
            ScsiCommandKind::Write => "write",
            ScsiCommandKind::Unmap => "unmap",
            ScsiCommandKind::CompareAndWrite => "compare_and_write",
            ScsiCommandKind::Sync => "sync",
            ScsiCommandKind::Copy => "copy",
            ScsiCommandKind::Other => "other",
        }
    }
}

const KINDS: usize = ScsiCommandKind::ALL.len();

/// Command counters that any core adds to.
#[derive(Debug, Default)]
pub struct ScsiCounters {
    commands: [AtomicU64; KINDS],
    nanos: [AtomicU64; KINDS],
    errors: AtomicU64,
    bytes_read: AtomicU64,
    bytes_written: AtomicU64,
}

/// Snapshot of command counters.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ScsiCounts {
    /// Commands completed, in the order of [`ScsiCommandKind::ALL`].
    pub commands: [u64; KINDS],
    /// Total service time in nanoseconds, in the same order.
    pub nanos: [u64; KINDS],
    /// Commands completed without GOOD status.
    pub errors: u64,
    /// Bytes sent to initiators.
    pub bytes_read: u64,
    /// Bytes received from initiators.
    pub bytes_written: u64,
}

impl ScsiCounts {
    /// Adds the counts of another snapshot.
    pub fn add(&mut self, other: &ScsiCounts) {
        self.commands.iter_mut().zip(other.commands).for_each(|(sum, more)| *sum += more);
        self.nanos.iter_mut().zip(other.nanos).for_each(|(sum, more)| *sum += more);
        self.errors += other.errors;
        self.bytes_read += other.bytes_read;
        self.bytes_written += other.bytes_written;
    }
}

/// Counts of one poll of a session, added to the shared counters at its end, so that a command costs no atomic
/// operation.
#[derive(Debug, Clone, Default)]
struct Tally {
    snapshot: ScsiCounts,
    any: bool,
}

impl Tally {
    /// Counts a completed command.
    #[inline]
    fn answered(&mut self, kind: ScsiCommandKind, took: Duration, failed: bool, read: u64, written: u64) {
        self.any = true;
        self.snapshot.commands[kind as usize] += 1;
        self.snapshot.nanos[kind as usize] += took.as_nanos() as u64;
        self.snapshot.errors += u64::from(failed);
        self.snapshot.bytes_read += read;
        self.snapshot.bytes_written += written;
    }

    /// Adds the counts to `counters`, and resets them.
    fn flush(&mut self, counters: &[&ScsiCounters]) {
        if !std::mem::take(&mut self.any) {
            return;
        }
        counters.iter().for_each(|counters| counters.add(&self.snapshot));
        self.snapshot = ScsiCounts::default();
    }
}

impl ScsiCounters {
    fn add(&self, more: &ScsiCounts) {
        let add = |counter: &AtomicU64, more: u64| {
            if more > 0 {
                counter.fetch_add(more, Ordering::Relaxed);
            }
        };
        self.commands.iter().zip(more.commands).for_each(|(counter, more)| add(counter, more));
        self.nanos.iter().zip(more.nanos).for_each(|(counter, more)| add(counter, more));
        add(&self.errors, more.errors);
        add(&self.bytes_read, more.bytes_read);
        add(&self.bytes_written, more.bytes_written);
    }

    /// Returns the current counts.
    pub fn snapshot(&self) -> ScsiCounts {
        let get = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        ScsiCounts {
            commands: std::array::from_fn(|kind| get(&self.commands[kind])),
            nanos: std::array::from_fn(|kind| get(&self.nanos[kind])),
            errors: get(&self.errors),
            bytes_read: get(&self.bytes_read),
            bytes_written: get(&self.bytes_written),
        }
    }
}

/// Counts of a session, and of the unit that its last commands went to.  What was not flushed is added on drop.
pub struct ScsiTallies {
    session: Arc<ScsiCounters>,
    of_session: Tally,
    of_unit: Option<(Rc<LogicalUnit>, Tally)>,
}

impl ScsiTallies {
    /// Creates empty counts of a session with these counters.
    pub fn new(session: Arc<ScsiCounters>) -> Self {
        Self { session, of_session: Tally::default(), of_unit: None }
    }

    /// Counts a completed command.
    #[inline]
    pub fn answered(
        &mut self,
        unit: Option<&Rc<LogicalUnit>>,
        (kind, took): (ScsiCommandKind, Duration),
        failed: bool,
        (read, written): (u64, u64),
    ) {
        self.of_session.answered(kind, took, failed, read, written);
        let Some(unit) = unit else { return };
        if self.of_unit.as_ref().is_none_or(|(last, _)| !Rc::ptr_eq(last, unit)) {
            self.flush_unit();
            self.of_unit = Some((unit.clone(), Tally::default()));
        }
        if let Some((_, tally)) = &mut self.of_unit {
            tally.answered(kind, took, failed, read, written);
        }
    }

    fn flush_unit(&mut self) {
        if let Some((unit, mut tally)) = self.of_unit.take() {
            tally.flush(&[unit.shared().counters()]);
        }
    }

    /// Adds the counts to the shared counters, and drops the reference to the unit.
    pub fn flush(&mut self) {
        self.of_session.flush(&[&*self.session]);
        self.flush_unit();
    }
}

impl Drop for ScsiTallies {
    fn drop(&mut self) {
        self.flush();
    }
}
