//! One device of a store on several devices: its file, its state, counters of errors, and its usual latency.

use std::cell::{Cell, RefCell};
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use forebay_block::{BufList, BufMut};
use forebay_reactor::{File, now, timeout};

use crate::format::devices::RecordedState;

/// Consecutive failed reads after which a device counts as failed.
const READ_FAILURES_MAX: u32 = 16;
/// Factor of the usual latency above which a read is late.
const LATE_FACTOR: u64 = 10;
/// Shortest delay after which a read may be late.
const LATE_MIN: Duration = Duration::from_millis(5);
/// Longest time that a write or a flush may take; a device that takes longer counts as failed.
const WRITE_PATIENCE: Duration = Duration::from_secs(30);
/// Weight of the latest read in the usual latency, as a divisor.
const LATENCY_WEIGHT: u64 = 16;

/// State of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ColumnState {
    /// Read and written.
    Active,
    /// Neither read nor written.
    Away,
    /// Written; read where it is complete.
    Filling,
}

/// Waits for a request, [`WRITE_PATIENCE`] at most.
async fn in_time(what: &str, request: impl Future<Output = io::Result<()>>) -> io::Result<()> {
    timeout(WRITE_PATIENCE, request).await.unwrap_or_else(|_| {
        let text = format!("{what} has taken {} s, and is not complete", WRITE_PATIENCE.as_secs());
        Err(io::Error::new(io::ErrorKind::TimedOut, text))
    })
}

/// Device of a store on several devices.
pub struct ColumnDevice {
    /// Number in the store.
    pub number: u16,
    /// Identity, which is also in its superblock.
    pub id: [u8; 16],
    /// Number of slots.
    slots: Cell<u32>,
    /// Number of the device that it replaces once it is filled.
    replaces: Cell<Option<u16>>,
    path: RefCell<PathBuf>,
    /// Open file; `None` if it is missing.
    file: RefCell<Option<File>>,
    state: Cell<RecordedState>,
    /// Usual latency of a read in nanoseconds; 0 while unknown.
    latency: Cell<u64>,
    failed_reads: Cell<u32>,
    read_errors: Cell<u64>,
    write_errors: Cell<u64>,
    wrong_blocks: Cell<u64>,
    /// Reason why it is away, for messages.
    reason: RefCell<String>,
}

impl ColumnDevice {
    /// Creates a device in a state; `file` is `None` if it is missing.
    pub fn new(
        number: u16,
        id: [u8; 16],
        slots: u32,
        replaces: Option<u16>,
        path: PathBuf,
        file: Option<File>,
        state: RecordedState,
    ) -> Self {
        Self {
            number,
            id,
            slots: Cell::new(slots),
            replaces: Cell::new(replaces),
            path: RefCell::new(path),
            file: RefCell::new(file),
            state: Cell::new(state),
            latency: Cell::new(0),
            failed_reads: Cell::new(0),
            read_errors: Cell::new(0),
            write_errors: Cell::new(0),
            wrong_blocks: Cell::new(0),
            reason: RefCell::default(),
        }
    }

    /// Returns the path at which it was opened last.
    pub fn path(&self) -> PathBuf {
        self.path.borrow().clone()
    }

    /// Returns whether it was opened at `path`.
    pub fn is_at(&self, path: &Path) -> bool {
        *self.path.borrow() == path
    }

    /// Returns its number and path for messages.
    pub fn describe(&self) -> String {
        format!("device {} ({})", self.number, self.path.borrow().display())
    }

    /// Returns the number of slots.
    pub fn slots(&self) -> u32 {
        self.slots.get()
    }

    /// Sets the number of slots, as the table records it.
    pub fn set_slots(&self, slots: u32) {
        self.slots.set(slots);
    }

    /// Returns the number of the device that it replaces once it is filled.
    pub fn replaces(&self) -> Option<u16> {
        self.replaces.get()
    }

    /// Sets the number of the device that it replaces, as the table records it.
    pub fn set_replaces(&self, replaces: Option<u16>) {
        self.replaces.set(replaces);
    }

    /// Takes the device back, opened at `path`.
    pub fn reopen(&self, path: PathBuf, file: File) {
        *self.path.borrow_mut() = path;
        *self.file.borrow_mut() = Some(file);
    }

    /// Closes the file of a device that is away.
    pub fn close(&self) {
        debug_assert_eq!(self.state(), ColumnState::Away);
        self.file.borrow_mut().take();
    }

    /// Returns its open file; `None` if it is missing.
    pub fn file(&self) -> Option<File> {
        self.file.borrow().clone()
    }

    /// Returns its state as recorded.
    pub fn recorded(&self) -> RecordedState {
        self.state.get()
    }

    /// Sets its state, as the table records it.
    pub fn set_state(&self, state: RecordedState) {
        self.state.set(state);
        if state == RecordedState::Active {
            self.reason.borrow_mut().clear();
            self.failed_reads.set(0);
        }
    }

    /// Returns its state.
    pub fn state(&self) -> ColumnState {
        match self.state.get() {
            RecordedState::Active => ColumnState::Active,
            RecordedState::Away { .. } => ColumnState::Away,
            RecordedState::Filling { .. } => ColumnState::Filling,
        }
    }

    /// Returns the reason why it is away; empty if there is none.
    pub fn reason(&self) -> String {
        self.reason.borrow().clone()
    }

    /// Records the reason why it is away.
    pub fn set_reason(&self, reason: String) {
        *self.reason.borrow_mut() = reason;
    }

    /// Returns whether batches are written to it.
    pub fn is_written(&self) -> bool {
        self.file.borrow().is_some() && self.state() != ColumnState::Away
    }

    /// Returns whether columns of a segment can be read from it.
    pub fn is_readable(&self, segment: u32) -> bool {
        let complete = match self.state.get() {
            RecordedState::Active => true,
            RecordedState::Filling { below, .. } => segment < below && self.replaces.get().is_none(),
            RecordedState::Away { .. } => false,
        };
        complete && self.file.borrow().is_some()
    }

    /// Reads `len` bytes.
    pub async fn read(&self, buf: BufMut, len: usize, offset: u64) -> io::Result<BufMut> {
        let Some(file) = self.file() else { return Err(io::ErrorKind::NotFound.into()) };
        let started = now();
        let (result, buf) = file.read_at(buf.limited(len), offset).await;
        let result = match result {
            Ok(got) if got < len => {
                Err(io::Error::new(io::ErrorKind::UnexpectedEof, format!("the device ends after {got} of {len} bytes")))
            }
            other => other,
        };
        match result {
            Ok(_) => {
                self.failed_reads.set(0);
                let (took, usual) = (started.elapsed().as_nanos() as u64, self.latency.get());
                let usual = if usual == 0 { took } else { usual - usual / LATENCY_WEIGHT + took / LATENCY_WEIGHT };
                self.latency.set(usual);
                Ok(buf)
            }
            Err(error) => {
                self.failed_reads.set(self.failed_reads.get().saturating_add(1));
                self.read_errors.set(self.read_errors.get() + 1);
                Err(error)
            }
        }
    }

    /// Returns whether so many reads in a row have failed that the device counts as failed.
    pub fn fails_to_read(&self) -> bool {
        self.failed_reads.get() >= READ_FAILURES_MAX
    }

    /// Returns the delay after which a read is late.
    pub fn late_after(&self) -> Duration {
        Duration::from_nanos(self.latency.get().saturating_mul(LATE_FACTOR)).max(LATE_MIN)
    }

    /// Writes buffers.
    ///
    /// # Errors
    /// `TimedOut` if that takes too long. It may still be written, but not after the file was opened again, since requests in
    /// flight keep its lock.
    pub async fn write(&self, bufs: BufList, offset: u64) -> io::Result<()> {
        let Some(file) = self.file() else { return Err(io::ErrorKind::NotFound.into()) };
        let result = in_time("a write", file.write_at(bufs, offset)).await;
        if result.is_err() {
            self.write_errors.set(self.write_errors.get() + 1);
        }
        result
    }

    /// Makes what was written durable.
    ///
    /// # Errors
    /// `TimedOut` if that takes too long.
    pub async fn sync(&self) -> io::Result<()> {
        let Some(file) = self.file() else { return Err(io::ErrorKind::NotFound.into()) };
        let result = in_time("a flush", file.sync_data()).await;
        if result.is_err() {
            self.write_errors.set(self.write_errors.get() + 1);
        }
        result
    }

    /// Counts a block whose content was wrong.
    pub fn count_wrong_block(&self) {
        self.wrong_blocks.set(self.wrong_blocks.get() + 1);
    }

    /// Returns the failed reads, the failed writes and the wrong blocks since the store was opened.
    pub fn errors(&self) -> (u64, u64, u64) {
        (self.read_errors.get(), self.write_errors.get(), self.wrong_blocks.get())
    }
}
