//! A disk as a block device: what a backend is to a log.

use std::cell::{Cell, RefCell};
use std::rc::Rc;

use forebay_block::{
    BlockDevice, BlockReply, BlockRequest, BufList, Error, ErrorKind, Extent, ExtentMap, ExtentState, Geometry,
    LocalFuture, Result, SizeWatch, WriteExtent,
};
use forebay_reactor::sync::{Notify, Semaphore};
use forebay_reactor::{File, OpenOptions, spawn};

use super::{BACKEND, Record};
use crate::world::World;

/// Bytes of an object, about.
const UNIT: u64 = 64 << 10;

/// A disk as a block device: what a backend is to a log.
pub(super) struct Backend {
    file: File,
    /// Size as shown; the record has the durable one.
    size: Rc<Cell<u64>>,
    /// Says whether the log has got out of the way.
    record: Rc<Record>,
    /// A compare-and-write has all of them, another change one.
    gate: Semaphore,
    under_way: Rc<RefCell<UnderWay>>,
    ended: Rc<Notify>,
}

/// Ranges of requests in flight.
///
/// Who overlaps a write waits for its end, so that no read sees what the next one does not.  A write that overlaps a
/// read waits for it only when the log is off: the log must cope with a block that changes under a read of the backend,
/// but a host must not see, through no log, what a flush that it sends next does not cover yet.
#[derive(Default)]
struct UnderWay {
    writes: Vec<Extent>,
    reads: Vec<Extent>,
}

impl UnderWay {
    fn is_free(&self, extent: Extent, write: bool, mind_reads: bool) -> bool {
        let free = |all: &[Extent]| !all.iter().any(|other| other.overlaps(extent));
        free(&self.writes) && !(write && mind_reads && !free(&self.reads))
    }

    fn of(&mut self, write: bool) -> &mut Vec<Extent> {
        if write { &mut self.writes } else { &mut self.reads }
    }
}

const GATE: usize = 1000;

impl Backend {
    /// The volume, as long as its record says.
    pub(super) fn open(record: Rc<Record>) -> Result<Self> {
        let file = File::open(BACKEND, OpenOptions::read_write()).map_err(|error| Error::from_io(error, BACKEND))?;
        let gate = Semaphore::new(GATE);
        let size = Rc::new(Cell::new(record.size.get()));
        Ok(Self { file, size, record, gate, under_way: Rc::default(), ended: Rc::default() })
    }

    /// Changes the size as an image does: what is cut off is refused at once, gone for good next, and then the record
    /// says so.
    pub(super) async fn resize(&self, to: u64, world: &World) -> Result<()> {
        let from = self.size.get();
        if to < from {
            self.size.set(to);
            if let Err(error) = self.cut_off(Extent::new(to, from - to)).await {
                self.size.set(from);
                return Err(error);
            }
        }
        if world.is_off() {
            return std::future::pending().await;
        }
        self.record.size.set(to);
        self.size.set(to);
        Ok(())
    }

    async fn cut_off(&self, extent: Extent) -> Result<()> {
        let io = |error| Error::from_io(error, "the backend");
        self.ended.wait_until(|| self.under_way.borrow().is_free(extent, true, true)).await;
        let mut at = extent.offset;
        while at < extent.end() {
            let end = (at - at % UNIT + UNIT).min(extent.end());
            self.file.write_at(BufList::zeroes((end - at) as usize), at).await.map_err(io)?;
            at = end;
        }
        self.file.sync_data().await.map_err(io)
    }
}

fn past_the_end(extent: Extent, size: u64) -> Error {
    Error::new(ErrorKind::OutOfRange, format!("{} bytes at {} of {size}", extent.len, extent.offset))
}

/// A read or write at work.
struct AtWork {
    under_way: Rc<RefCell<UnderWay>>,
    ended: Rc<Notify>,
    extent: Extent,
    write: bool,
}

impl Drop for AtWork {
    fn drop(&mut self) {
        let mut under_way = self.under_way.borrow_mut();
        let all = under_way.of(self.write);
        if let Some(at) = all.iter().position(|extent| *extent == self.extent) {
            all.swap_remove(at);
        }
        drop(under_way);
        self.ended.notify_all();
    }
}

impl BlockDevice for Backend {
    fn geometry(&self) -> Geometry {
        Geometry { size: self.size.get(), block_size: 1, preferred_io: 4096, transfer_max: 1 << 20, read_only: false }
    }

    fn submit(&self, request: BlockRequest) -> LocalFuture<Result<BlockReply>> {
        let (file, gate) = (self.file.clone(), self.gate.clone());
        let (under_way, ended, record) = (self.under_way.clone(), self.ended.clone(), self.record.clone());
        let size = self.size.clone();
        Box::pin(async move {
            let io = |error| Error::from_io(error, "the backend");
            let mut _at_work = None;
            if let Some(extent) = request.extent() {
                let write = request.is_write();
                let free = || under_way.borrow().is_free(extent, write, record.released.get());
                ended.wait_until(free).await;
                if extent.end() > size.get() {
                    return Err(past_the_end(extent, size.get()));
                }
                under_way.borrow_mut().of(write).push(extent);
                _at_work = Some(AtWork { under_way, ended, extent, write });
            }
            let _passed = match &request {
                BlockRequest::Read(_) | BlockRequest::Flush => None,
                BlockRequest::CompareAndWrite { .. } => Some(gate.acquire(GATE).await),
                _ => Some(gate.acquire(1).await),
            };
            match request {
                BlockRequest::Read(Extent { offset, len }) => {
                    let data = file.read_exact_at(offset, len as usize).await.map_err(io)?;
                    return Ok(BlockReply::Data(data.into()));
                }
                BlockRequest::Write { offset, data, fua } if fua => {
                    file.write_durable_at(data, offset).await.map_err(io)?
                }
                BlockRequest::Write { offset, data, .. } => file.write_at(data, offset).await.map_err(io)?,
                BlockRequest::Discard(extent) => {
                    file.write_at(BufList::zeroes(extent.len as usize), extent.offset).await.map_err(io)?;
                }
                BlockRequest::WriteZeroes { extent, fua, .. } => {
                    let zeroes = BufList::zeroes(extent.len as usize);
                    match fua {
                        true => file.write_durable_at(zeroes, extent.offset).await.map_err(io)?,
                        false => file.write_at(zeroes, extent.offset).await.map_err(io)?,
                    }
                }
                BlockRequest::CompareAndWrite { offset, expect, data, fua } => {
                    let found = file.read_exact_at(offset, expect.len()).await.map_err(io)?;
                    let expect = expect.to_vec();
                    if let Some(at) = found.iter().zip(&expect).position(|(one, other)| one != other) {
                        return Err(Error::new(ErrorKind::Mismatch(at as u64), "the backend"));
                    }
                    match fua {
                        true => file.write_durable_at(data, offset).await.map_err(io)?,
                        false => file.write_at(data, offset).await.map_err(io)?,
                    }
                }
                BlockRequest::Flush => file.sync_data().await.map_err(io)?,
            }
            Ok(BlockReply::Done)
        })
    }

    fn write_many(&self, writes: Vec<WriteExtent>, fua: bool) -> LocalFuture<Result<()>> {
        let one = |WriteExtent { offset, data }| spawn(self.submit(BlockRequest::Write { offset, data, fua }));
        let under_way: Vec<_> = writes.into_iter().map(one).collect();
        Box::pin(async move {
            let mut all = Ok(());
            for write in under_way {
                all = all.and(write.await.map(drop));
            }
            all
        })
    }

    fn unit(&self) -> Option<u64> {
        Some(UNIT)
    }

    fn map(&self, extent: Extent) -> LocalFuture<Result<ExtentMap>> {
        let mut map = ExtentMap::new();
        map.push(extent.offset, extent.len, ExtentState::Data);
        Box::pin(std::future::ready(Ok(map)))
    }

    fn size_watch(&self) -> Option<Rc<SizeWatch>> {
        None
    }
}

#[cfg(test)]
mod tests {
    use forebay_reactor::Buf;

    use super::*;
    use crate::faults::{DiskFaults, Faults, MICRO, MILLI};

    /// Returns the byte that a read shows when a write overtakes it.
    fn overtaken(released: bool, seed: u64) -> u8 {
        let world = World::new(seed, Faults::none());
        world.add_disk(BACKEND, 64 << 10, 4096);
        let slow_reads = DiskFaults {
            read_latency: 2 * MILLI..3 * MILLI,
            write_latency: MILLI..4 * MILLI,
            sync_latency: MICRO..2 * MICRO,
            ..DiskFaults::none()
        };
        world.set_disk_faults(BACKEND, Some(slow_reads));
        let reactor = world.reactor();
        let ran = world.run(&reactor, async move {
            let record = Rc::new(Record::default());
            record.released.set(released);
            record.size.set(64 << 10);
            let backend = Backend::open(record).expect("a backend");
            let read = spawn(backend.submit(BlockRequest::Read(Extent::new(4096, 4096))));
            let data = Buf::copy_of(&[7; 4096]).into();
            let write = spawn(backend.submit(BlockRequest::Write { offset: 4096, data, fua: false }));
            let seen = read.await.expect("read").into_data().to_vec();
            write.await.expect("written");
            seen[0]
        });
        ran.expect("it ends")
    }

    #[test]
    fn a_host_without_a_log_never_sees_a_write_before_it_is_done_but_the_log_does() {
        assert!((0..40).all(|seed| overtaken(true, seed) == 0));
        assert!((0..40).any(|seed| overtaken(false, seed) == 7));
    }
}
