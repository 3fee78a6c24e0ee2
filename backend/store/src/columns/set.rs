//! Devices of a store: reads of lines and columns, with reconstruction of what a device lacks.

use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::pin::Pin;
use std::rc::Rc;
use std::task::Poll;

use forebay_block::{Buf, BufMut, Error, ErrorKind, Result};
use forebay_reactor::sync::{Semaphore, join_all};
use forebay_reactor::timeout;

use super::buffers::ColumnBuffers;
use super::code::RowCode;
use super::device::{ColumnDevice, ColumnState};
use super::geometry::{ColumnAt, RowGeometry};
use super::place_uses::PlaceUses;
use crate::format::BLOCK;
use crate::format::devices::{DeviceTable, RecordedState};

/// Counters of a store on several devices, since it was opened.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct ColumnCounters {
    /// Reads of a column that were reconstructed from others.
    pub degraded_reads: u64,
    /// Reads that a device answered late, so that the column was also reconstructed.
    pub late_reads: u64,
    /// Blocks with wrong content that were reconstructed.
    pub reconstructed_blocks: u64,
    /// Blocks that were written again where they had been wrong.
    pub mended_blocks: u64,
}

/// Device of a store, for people.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DeviceStatus {
    /// Number in the store.
    pub number: u16,
    /// Identity, which is also in its superblock.
    pub id: [u8; 16],
    /// Path at which it was opened last.
    pub path: std::path::PathBuf,
    /// State of the device.
    pub state: ColumnState,
    /// Set if it cannot be opened.
    pub missing: bool,
    /// Reason why it is away; empty if there is none.
    pub reason: String,
    /// Number of the device that it replaces once it is filled.
    pub replaces: Option<u16>,
    /// Bytes for columns.
    pub size: u64,
    /// Bytes of columns on it, those of free segments included.
    pub allocated: u64,
    /// Set if it is being removed.
    pub leaving: bool,
    /// Segments that are complete on it while it is filled.
    pub filled: u32,
    /// Failed reads since the store was opened.
    pub read_errors: u64,
    /// Failed writes and flushes since the store was opened.
    pub write_errors: u64,
    /// Blocks with wrong content found since the store was opened.
    pub wrong_blocks: u64,
}

/// Column that was read, or why not.
type ReadColumn = Result<BufMut>;

/// Devices of a store.
///
/// # Invariants
/// 1. `table` is the newest durable device table, and the state of every device is the one that it records.
/// 2. At most m devices that hold columns are not active.
/// 3. What is written to a line of a column is its content as of the batch that has the line, and nothing else.
pub(crate) struct ColumnSet {
    pub(super) geometry: RefCell<RowGeometry>,
    pub(super) code: RefCell<RowCode>,
    pub(super) devices: RefCell<Vec<Rc<ColumnDevice>>>,
    pub(super) table: RefCell<DeviceTable>,
    /// Permit of changing the table.
    pub(super) changing: Semaphore,
    /// Highest batch number known to be durable.
    pub(super) durable_seq: Cell<u64>,
    /// Set if nothing is written: the store is open read-only.
    pub(super) read_only: bool,
    pub(super) counters: Cell<ColumnCounters>,
    pub(super) column_buffers: ColumnBuffers,
    /// Reads and writes in flight at places of columns.
    pub(super) place_uses: PlaceUses,
    /// Name of the store in messages.
    name: String,
}

/// Waits for the first of two futures that succeeds; returns the error of the second if both fail.
async fn first_success<T>(
    mut first: Pin<&mut impl Future<Output = Result<T>>>,
    mut second: Pin<&mut impl Future<Output = Result<T>>>,
) -> Result<T> {
    let (mut first_failed, mut second_failed) = (false, None);
    poll_fn(|cx| {
        if !first_failed && let Poll::Ready(result) = first.as_mut().poll(cx) {
            match result {
                Ok(value) => return Poll::Ready(Ok(value)),
                Err(_) => first_failed = true,
            }
        }
        if second_failed.is_none()
            && let Poll::Ready(result) = second.as_mut().poll(cx)
        {
            match result {
                Ok(value) => return Poll::Ready(Ok(value)),
                Err(error) => second_failed = Some(error),
            }
        }
        match second_failed.clone().filter(|_| first_failed) {
            Some(error) => Poll::Ready(Err(error)),
            None => Poll::Pending,
        }
    })
    .await
}

impl ColumnSet {
    /// Creates the set of devices as of a table.
    pub(super) fn new(table: DeviceTable, devices: Vec<Rc<ColumnDevice>>, read_only: bool) -> Result<Rc<Self>> {
        let geometry = RowGeometry::of(&table);
        let code = RowCode::new(geometry.data, geometry.parity)?;
        let first = devices.iter().find(|device| device.file().is_some()).or(devices.first());
        let name = format!(
            "the store on {} devices ({}, ...)",
            table.members().count(),
            first.map(|device| device.path().display().to_string()).unwrap_or_default()
        );
        Ok(Rc::new(Self {
            geometry: RefCell::new(geometry),
            code: RefCell::new(code),
            devices: RefCell::new(devices),
            table: RefCell::new(table),
            changing: Semaphore::new(1),
            durable_seq: Cell::new(0),
            read_only,
            counters: Cell::default(),
            column_buffers: ColumnBuffers::new(),
            place_uses: PlaceUses::default(),
            name,
        }))
    }

    /// Returns the name of the store in messages.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the number of data columns (k).
    pub fn data_columns(&self) -> usize {
        self.geometry.borrow().data
    }

    /// Returns the number of parity columns (m).
    pub fn parity_columns(&self) -> usize {
        self.geometry.borrow().parity
    }

    /// Returns the counters.
    pub fn counters(&self) -> ColumnCounters {
        self.counters.get()
    }

    pub(super) fn count(&self, change: impl FnOnce(&mut ColumnCounters)) {
        let mut counters = self.counters.get();
        change(&mut counters);
        self.counters.set(counters);
    }

    /// Records the highest batch number that is durable, from which on a device lacks batches if it fails.
    pub fn note_durable(&self, seq: u64) {
        self.durable_seq.set(self.durable_seq.get().max(seq));
    }

    /// Returns the device with a number.
    pub(super) fn device(&self, number: u16) -> Option<Rc<ColumnDevice>> {
        self.devices.borrow().iter().find(|device| device.number == number).cloned()
    }

    /// Returns all devices.
    pub(super) fn all_devices(&self) -> Vec<Rc<ColumnDevice>> {
        self.devices.borrow().clone()
    }

    /// Returns the devices that are written to.
    pub(crate) fn written_devices(&self) -> Vec<Rc<ColumnDevice>> {
        self.devices.borrow().iter().filter(|device| device.is_written()).cloned().collect()
    }

    /// Returns the location of a column and its device.
    pub(super) fn column(&self, segment: u32, column: usize) -> (ColumnAt, Rc<ColumnDevice>) {
        let at = self.geometry.borrow().column(segment, column);
        let device = self.device(at.device).expect("columns are on devices of the table");
        (at, device)
    }

    /// Returns the number of columns: data and parity.
    pub(super) fn columns(&self) -> usize {
        self.geometry.borrow().columns()
    }

    /// Returns the devices that hold columns and cannot be read everywhere.
    pub(super) fn unavailable(&self) -> Vec<Rc<ColumnDevice>> {
        let devices = self.devices.borrow();
        let lacking = |device: &&Rc<ColumnDevice>| {
            device.replaces().is_none() && (device.state() != ColumnState::Active || device.file().is_none())
        };
        devices.iter().filter(lacking).cloned().collect()
    }

    /// Returns the devices, for people.
    pub fn status(&self) -> Vec<DeviceStatus> {
        let column_bytes = self.geometry.borrow().column_bytes();
        let table = self.table.borrow();
        let segments = table.segments();
        let status = |device: &Rc<ColumnDevice>| {
            let (read_errors, write_errors, wrong_blocks) = device.errors();
            DeviceStatus {
                number: device.number,
                id: device.id,
                path: device.path(),
                state: device.state(),
                missing: device.file().is_none(),
                reason: device.reason(),
                replaces: device.replaces(),
                size: u64::from(device.slots()) * column_bytes,
                allocated: u64::from(table.columns_on(device.number)) * column_bytes,
                leaving: table.device(device.number).is_some_and(|record| record.leaving),
                filled: match device.recorded() {
                    RecordedState::Active => segments,
                    RecordedState::Away { .. } => 0,
                    RecordedState::Filling { below, .. } => below,
                },
                read_errors,
                write_errors,
                wrong_blocks,
            }
        };
        self.devices.borrow().iter().map(status).collect()
    }

    /// Returns a sentence about devices that are away or being filled; `None` if there are none.
    pub fn degraded(&self) -> Option<String> {
        let lacking: Vec<String> = self
            .unavailable()
            .iter()
            .map(|device| {
                let reason = device.reason();
                let state = match (device.state(), device.file()) {
                    (ColumnState::Filling, _) => "is being filled",
                    (_, None) => "is missing",
                    _ => "is away",
                };
                let reason = if reason.is_empty() { reason } else { format!(": {reason}") };
                format!("{} {state}{reason}", device.describe())
            })
            .collect();
        let parity = self.parity_columns();
        (!lacking.is_empty()).then(|| format!("{} (at most {parity} may)", lacking.join("; ")))
    }

    fn read_error(&self, segment: u32, column: usize, error: std::io::Error) -> Error {
        let (at, device) = self.column(segment, column);
        Error::from_io(error, format!("reading segment {segment} at byte {} of {}", at.offset, device.describe()))
    }

    /// Reads lines of a column from its device.
    pub(super) async fn read_stored(
        &self,
        segment: u32,
        column: usize,
        line: u64,
        buf: BufMut,
        len: usize,
    ) -> ReadColumn {
        let _use = self.place_uses.begin();
        let (at, device) = self.column(segment, column);
        if !device.is_readable(segment) {
            let text = format!("{} does not have segment {segment}", device.describe());
            return Err(Error::new(ErrorKind::Io, text));
        }
        let read = device.read(buf, len, at.line(line)).await;
        read.map_err(|error| self.read_error(segment, column, error))
    }

    /// Reads lines of a column: from its device, or reconstructed from other columns if the device lacks it, fails, or
    /// is late.
    pub(super) async fn read_column(
        &self,
        segment: u32,
        column: usize,
        line: u64,
        buf: BufMut,
        len: usize,
    ) -> ReadColumn {
        let (_, device) = self.column(segment, column);
        if !device.is_readable(segment) {
            return self.reconstruct(segment, column, line, len).await;
        }
        let mut stored = std::pin::pin!(self.read_stored(segment, column, line, buf, len));
        if self.parity_columns() == 0 {
            return stored.await;
        }
        let read = match timeout(device.late_after(), stored.as_mut()).await {
            Ok(read) => read,
            Err(_) if !self.can_reconstruct(segment, column) => stored.await,
            Err(_) => {
                self.count(|counters| counters.late_reads += 1);
                let others = std::pin::pin!(self.reconstruct(segment, column, line, len));
                return first_success(stored, others).await;
            }
        };
        match read {
            Ok(buf) => Ok(buf),
            Err(error) if !self.can_reconstruct(segment, column) => Err(error),
            Err(error) => {
                tracing::warn!("{error}; the column is reconstructed from others");
                self.reconstruct(segment, column, line, len).await.map_err(|_| error)
            }
        }
    }

    /// Reads lines of a column for a copy that is not verified: from its device however long that takes, and reconstructed
    /// from other columns, of which one may be wrong, only if the device lacks it or fails.
    pub(super) async fn read_column_to_copy(&self, segment: u32, column: usize, line: u64, len: usize) -> ReadColumn {
        match self.read_stored(segment, column, line, BufMut::with_capacity(len), len).await {
            Ok(buf) => Ok(buf),
            Err(error) => self.reconstruct(segment, column, line, len).await.map_err(|_| error),
        }
    }

    fn can_reconstruct(&self, segment: u32, column: usize) -> bool {
        let readable = |other: &usize| *other != column && self.column(segment, *other).1.is_readable(segment);
        (0..self.columns()).filter(readable).count() >= self.data_columns() && self.parity_columns() > 0
    }

    /// Reconstructs lines of a column from others.
    pub(super) async fn reconstruct(&self, segment: u32, column: usize, line: u64, len: usize) -> ReadColumn {
        self.count(|counters| counters.degraded_reads += 1);
        let data = self.data_columns();
        let mut left: Vec<usize> = (0..self.columns())
            .filter(|&other| other != column && self.column(segment, other).1.is_readable(segment))
            .collect();
        let mut have: Vec<(usize, BufMut)> = Vec::new();
        let mut failed = Vec::new();
        while have.len() < data {
            let wanted = data - have.len();
            if left.len() < wanted {
                let (_, device) = self.column(segment, column);
                let text = format!(
                    "cannot reconstruct what {} has of segment {segment}: {} of {data} other columns can be read{}",
                    device.describe(),
                    have.len() + left.len(),
                    failed.first().map(|error| format!(" ({error})")).unwrap_or_default()
                );
                return Err(Error::new(ErrorKind::Io, text));
            }
            let next: Vec<usize> = left.drain(..wanted).collect();
            let reads = next
                .iter()
                .map(|&other| Box::pin(self.read_stored(segment, other, line, BufMut::with_capacity(len), len)));
            for (other, read) in next.iter().zip(join_all(reads).await) {
                match read {
                    Ok(buf) => have.push((*other, buf)),
                    Err(error) => failed.push(error),
                }
            }
        }
        let mut out = BufMut::zeroed(len);
        let have: Vec<(usize, &[u8])> = have.iter().map(|(other, buf)| (*other, &buf[..])).collect();
        if !self.code.borrow_mut().rebuild(&have, column, &mut out) {
            return Err(Error::new(ErrorKind::Io, format!("segment {segment} has no parity to reconstruct it from")));
        }
        Ok(out)
    }

    /// Reads `len` bytes of the linear device at `addr`, both whole blocks of one segment, into `buf`.
    pub async fn read(&self, addr: u64, buf: BufMut, len: usize) -> Result<BufMut> {
        let (first, spans) = {
            let geometry = self.geometry.borrow();
            let first = geometry.locate(addr / BLOCK as u64);
            (first, geometry.spans(first, (len / BLOCK) as u64))
        };
        if let [(column, line, 1)] = spans[..] {
            let read = self.read_column(first.segment, column, line, buf, len).await;
            self.drop_failing_readers().await;
            return read;
        }
        let columns = match self.read_degraded(first.segment, &spans).await {
            Some(columns) => columns,
            None => {
                let reads = spans.iter().map(|&(column, line, lines)| {
                    let len = lines as usize * BLOCK;
                    let buf = self.column_buffers.empty(lines as usize);
                    Box::pin(self.read_column(first.segment, column, line, buf, len))
                });
                let mut columns: Vec<Option<Buf>> = vec![None; self.data_columns()];
                let read = join_all(reads).await;
                self.drop_failing_readers().await;
                for ((column, ..), read) in spans.iter().zip(read) {
                    columns[*column] = Some(read?.freeze());
                }
                columns
            }
        };
        let mut out = buf;
        out.clear();
        let (data, mut done) = (self.data_columns(), vec![0; self.data_columns()]);
        for i in 0..len / BLOCK {
            let column = (first.column + i) % data;
            let bytes = columns[column].as_ref().expect("every column of the blocks was read");
            out.extend_from_slice(&bytes[done[column]..done[column] + BLOCK]);
            done[column] += BLOCK;
        }
        Ok(out)
    }

    /// Stops using devices whose reads keep failing, as far as parity allows.
    async fn drop_failing_readers(&self) {
        if self.read_only {
            return;
        }
        let failing: Vec<Rc<ColumnDevice>> = self
            .devices
            .borrow()
            .iter()
            .filter(|device| device.fails_to_read() && device.is_written())
            .cloned()
            .collect();
        for device in failing {
            if let Err(error) = self.drop_device(device.number, "reads of it fail").await {
                tracing::debug!(%error, "cannot do without {}", device.describe());
            }
        }
    }
}
