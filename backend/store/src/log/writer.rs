//! Batch writer: writes closed batches to the device, several at a time, and makes them durable by group commit.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::Rc;
use std::time::Duration;

use forebay_block::{BufList, Error, ErrorKind, Result};
use forebay_reactor::sync::Notify;
use forebay_reactor::{File, sleep, spawn};

use super::acks::PendingAcks;
use super::batch::Batch;
use super::health::DeviceHealth;
use crate::columns::ColumnSet;
use crate::device::StoreDevice;
use crate::format::{BLOCK, BLOCK64};
use crate::host::HostFileSystem;

/// Maximum number of writes in flight.
pub const WRITES_MAX: usize = 8;
/// Bytes appended but not yet written, above which appending tasks are throttled.
const PENDING_BYTES_MAX: usize = 32 << 20;
/// Delay before a failed write is retried.
const RETRY_AFTER: Duration = Duration::from_millis(500);

/// Writer of closed batches.
///
/// # Invariants
/// 1. `closed` has the batches that follow `written_seq`, in order: all batches up to `written_seq` are on the device,
///    and the one after it is not.
/// 2. `durable_seq` <= `written_seq`, and all batches up to `durable_seq` have survived a flush.
/// 3. At most [`WRITES_MAX`] writes are in flight, and at most one flush.
/// 4. A batch is retried until it is written; it is never discarded while the store is open.
pub struct BatchWriter {
    device: StoreDevice,
    /// File system that holds the store file; `None` unless the store is in a file.
    host: Option<Rc<HostFileSystem>>,
    /// Closed batches, oldest first. Written batches are removed from the front.
    closed: RefCell<VecDeque<Rc<Batch>>>,
    /// Closed batches whose writes have not begun.
    waiting: RefCell<VecDeque<Rc<Batch>>>,
    in_flight: Cell<usize>,
    /// Payload bytes of the open batch and of closed ones that are not yet written.
    pending_bytes: Cell<usize>,
    written_seq: Cell<u64>,
    durable_seq: Cell<u64>,
    syncing: Cell<bool>,
    health: DeviceHealth,
    /// Signals that a batch was written, that a flush ended, or that the device failed.
    progress: Notify,
    acks: PendingAcks,
    /// Signals that the open batch may have to be closed early: see [`wants_early`](Self::wants_early).
    early: Rc<Notify>,
}

impl BatchWriter {
    /// Creates a writer for batches from `next_seq` on.
    pub fn new(device: StoreDevice, host: Option<Rc<HostFileSystem>>, next_seq: u64) -> Rc<Self> {
        Rc::new(Self {
            device,
            host,
            closed: RefCell::default(),
            waiting: RefCell::default(),
            in_flight: Cell::new(0),
            pending_bytes: Cell::new(0),
            written_seq: Cell::new(next_seq - 1),
            durable_seq: Cell::new(next_seq - 1),
            syncing: Cell::new(false),
            health: DeviceHealth::default(),
            progress: Notify::new(),
            acks: PendingAcks::default(),
            early: Rc::default(),
        })
    }

    /// Returns the number of payload bytes that wait to be written.
    pub fn pending_bytes(&self) -> usize {
        self.pending_bytes.get()
    }

    /// Counts payload bytes of the open batch.
    pub fn add_pending(&self, bytes: usize) {
        self.pending_bytes.set(self.pending_bytes.get() + bytes);
    }

    /// Returns the highest batch number up to which all batches are durable.
    pub fn durable_seq(&self) -> u64 {
        self.durable_seq.get()
    }

    /// Returns the error for which the device currently rejects writes.
    pub fn failure(&self) -> Option<Error> {
        self.health.failure()
    }

    /// Returns whether more than `PENDING_BYTES_MAX` bytes wait to be written.
    pub fn is_congested(&self) -> bool {
        self.pending_bytes.get() > PENDING_BYTES_MAX
    }

    /// Waits until the writer is no longer congested, or the device has failed.
    pub async fn wait_uncongested(&self) {
        self.progress.wait_until(|| !self.is_congested() || self.health.is_failed()).await;
    }

    /// Submits a closed batch.
    pub fn submit(self: &Rc<Self>, batch: Rc<Batch>) {
        let mut closed = self.closed.borrow_mut();
        debug_assert_eq!(
            batch.seq(),
            self.written_seq.get() + closed.len() as u64 + 1,
            "batches are submitted in order"
        );
        closed.push_back(batch.clone());
        drop(closed);
        self.waiting.borrow_mut().push_back(batch);
        self.start_writes();
    }

    fn start_writes(self: &Rc<Self>) {
        while self.in_flight.get() < WRITES_MAX && !self.health.is_failed_permanently() {
            let Some(batch) = self.waiting.borrow_mut().pop_front() else { return };
            self.in_flight.set(self.in_flight.get() + 1);
            let writer = self.clone();
            spawn(async move { writer.write(batch).await });
        }
    }

    async fn write(self: Rc<Self>, batch: Rc<Batch>) {
        let bufs = batch.to_bufs();
        let is_written = match &self.device {
            StoreDevice::Single(file) => self.write_to_file(file, &batch, &bufs).await,
            StoreDevice::Columns(set) => self.write_to_columns(set, &batch, &bufs).await,
        };
        if is_written {
            self.written(&batch, bufs.len() - BLOCK);
        }
    }

    /// Writes a batch to several devices until they accept it. Returns false if writing has failed permanently.
    async fn write_to_columns(&self, set: &ColumnSet, batch: &Batch, bufs: &BufList) -> bool {
        let mut row = set.row(batch.block(), bufs);
        while let Err(error) = set.write_row(&mut row).await {
            self.fail(error);
            if self.health.is_failed_permanently() {
                return false;
            }
            sleep(RETRY_AFTER).await;
            if self.health.is_failed_permanently() {
                return false;
            }
        }
        true
    }

    /// Writes a batch to one file or device until it accepts it. Returns false if writing has failed permanently.
    async fn write_to_file(&self, file: &File, batch: &Batch, bufs: &BufList) -> bool {
        loop {
            let released = self.host.as_ref().map_or(0, |host| host.times_released());
            match file.write_at(bufs.clone(), batch.block() * BLOCK64).await {
                Ok(()) => return true,
                Err(error) => {
                    // Retries the same write until the device accepts it: appended data is never discarded.
                    let no_space = error.kind() == std::io::ErrorKind::StorageFull;
                    if let Some(host) = self.host.as_ref().filter(|_| no_space) {
                        if host.release_reserve(released).await {
                            continue;
                        }
                        self.fail(host.full());
                        sleep(RETRY_AFTER).await;
                        if self.health.is_failed_permanently() {
                            return false;
                        }
                        continue;
                    }
                    let text = format!("writing {} bytes of the log at byte {}", bufs.len(), batch.block() * BLOCK64);
                    self.fail(Error::from_io(error, text));
                    if self.health.is_failed_permanently() {
                        return false;
                    }
                    sleep(RETRY_AFTER).await;
                    if self.health.is_failed_permanently() {
                        return false;
                    }
                }
            }
        }
    }

    /// Records that a batch with `payload` bytes of payload is on the device.
    fn written(self: &Rc<Self>, batch: &Batch, payload: usize) {
        batch.set_written();
        self.in_flight.set(self.in_flight.get() - 1);
        if self.in_flight.get() == 0 {
            self.health.recover();
        }
        let mut closed = self.closed.borrow_mut();
        while closed.front().is_some_and(|front| front.is_written()) {
            let front = closed.pop_front().expect("front");
            debug_assert_eq!(front.seq(), self.written_seq.get() + 1);
            self.written_seq.set(front.seq());
        }
        drop(closed);
        debug_assert!(self.pending_bytes.get() >= payload, "more bytes were written than appended");
        self.pending_bytes.set(self.pending_bytes.get().saturating_sub(payload));
        self.acks.written(self.written_seq.get());
        self.progress.notify_all();
        self.early.notify_all();
        self.start_writes();
    }

    /// Rejects writes until the store is reopened: appended data cannot be written any more.
    pub fn fail_permanently(&self, error: Error) {
        if self.health.fail_permanently(error.clone()) {
            self.report(&error);
        }
        self.note_failure();
    }

    /// Abandons writes that the device rejects when the store is dropped. They are no longer retried, so that the
    /// device is released.
    pub fn abandon(&self) {
        self.health.fail_permanently(Error::new(ErrorKind::ShuttingDown, "the store was closed"));
        self.note_failure();
    }

    fn fail(&self, error: Error) {
        if self.health.fail(error.clone()) {
            self.report(&error);
        }
        self.note_failure();
    }

    /// Ends the waits of tasks after a failure.
    fn note_failure(&self) {
        self.acks.failed();
        self.progress.notify_all();
    }

    fn report(&self, error: &Error) {
        let path = self.device.name();
        tracing::error!(?error, "cannot write to the store's device {path}; writes and flushes fail until it recovers");
    }

    /// Waits until all closed batches are written to the device (not yet durable).
    pub fn wait_written(self: &Rc<Self>) -> impl Future<Output = Result<()>> + use<> {
        let seq = self.closed.borrow().back().map_or(0, |batch| batch.seq());
        self.clone().wait_written_to(seq)
    }

    /// Waits until all batches up to `seq` are written to the device (not yet durable).
    ///
    /// Errors: the device has failed. The batches are written when it recovers, unless the store is reopened before.
    pub async fn wait_written_to(self: Rc<Self>, seq: u64) -> Result<()> {
        loop {
            if self.written_seq.get() >= seq {
                return Ok(());
            }
            if let Some(error) = self.failure() {
                return Err(error);
            }
            let written = self.acks.add(seq);
            if self.in_flight.get() == 0 {
                self.early.notify_all();
            }
            written.await;
        }
    }

    /// Returns the signal that the open batch may have to be closed early.
    pub fn early(&self) -> Rc<Notify> {
        self.early.clone()
    }

    /// Returns whether batch `seq`, which is open, is closed early: a task waits until it is written, and no write is in
    /// flight. With some in flight, batches would be smaller, and each has a header block of its own.
    pub fn wants_early(&self, seq: u64) -> bool {
        self.in_flight.get() == 0 && self.acks.is_awaited(seq)
    }

    /// Starts a group commit for batch `seq`, which is closed, unless one is in progress, and waits for progress.
    pub async fn sync_progress(self: &Rc<Self>, seq: u64) {
        let progress = self.progress.wait();
        if !self.syncing.replace(true) {
            let writer = self.clone();
            spawn(async move { writer.sync_round(seq).await });
        }
        progress.await;
    }

    /// Performs one group commit, of everything that is written when it begins.
    async fn sync_round(self: Rc<Self>, seq: u64) {
        self.progress.wait_until(|| self.written_seq.get() >= seq || self.health.is_failed()).await;
        let target = self.written_seq.get();
        if target >= seq {
            match self.device.sync().await {
                Ok(()) => self.note_durable(target),
                // The state of the device's cache is unknown now, and a later successful flush proves nothing about it.
                Err(error) => self.fail_permanently(error),
            }
        }
        debug_assert!(self.durable_seq.get() <= self.written_seq.get());
        self.syncing.set(false);
        self.progress.notify_all();
    }

    fn note_durable(&self, seq: u64) {
        self.durable_seq.set(seq.max(self.durable_seq.get()));
        if let Some(set) = self.device.columns() {
            set.note_durable(seq);
        }
    }

    /// Returns whether bytes are in a closed batch that is still in memory, all of them.
    pub fn has(&self, addr: u64, len: usize) -> bool {
        self.closed.borrow().iter().any(|batch| batch.has(addr, len))
    }

    /// Returns bytes of a closed batch that is still in memory; `None` unless all of them are.
    pub fn read(&self, addr: u64, len: usize) -> Option<BufList> {
        self.closed.borrow().iter().rev().find_map(|batch| batch.read(addr, len))
    }
}
