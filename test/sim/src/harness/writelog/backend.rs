//! A disk as a block device: what a backend is to a log.

use std::cell::RefCell;
use std::rc::Rc;

use forebay_block::{
    BlockDevice, BufList, Error, ErrorKind, Extent, ExtentMap, ExtentState, Geometry, LocalFuture, Reply, Request,
    Result, SizeWatch,
};
use forebay_reactor::sync::{Notify, Semaphore};
use forebay_reactor::{File, OpenOptions};

use super::BACKEND;

/// A disk as a block device: what a backend is to a log.
pub(super) struct Backend {
    file: File,
    size: u64,
    /// A compare-and-write has all of them, another change one.
    gate: Semaphore,
    /// What is being written: who overlaps it waits, so that no read sees what the next does not.
    writing: Rc<RefCell<Vec<Extent>>>,
    written: Rc<Notify>,
}

const GATE: usize = 1000;

impl Backend {
    /// A volume of `size` bytes.
    pub(super) fn open(size: u64) -> Result<Self> {
        let file = File::open(BACKEND, OpenOptions::read_write()).map_err(|error| Error::from_io(error, BACKEND))?;
        Ok(Self { file, size, gate: Semaphore::new(GATE), writing: Rc::default(), written: Rc::default() })
    }
}

/// A write under way.
struct Writing {
    writing: Rc<RefCell<Vec<Extent>>>,
    written: Rc<Notify>,
    extent: Extent,
}

impl Drop for Writing {
    fn drop(&mut self) {
        let mut writing = self.writing.borrow_mut();
        if let Some(at) = writing.iter().position(|extent| *extent == self.extent) {
            writing.swap_remove(at);
        }
        drop(writing);
        self.written.notify_all();
    }
}

impl BlockDevice for Backend {
    fn geometry(&self) -> Geometry {
        Geometry { size: self.size, block_size: 1, preferred_io: 4096, transfer_max: 1 << 20, read_only: false }
    }

    fn submit(&self, request: Request) -> LocalFuture<Result<Reply>> {
        let (file, gate) = (self.file.clone(), self.gate.clone());
        let (writing, written) = (self.writing.clone(), self.written.clone());
        Box::pin(async move {
            let io = |error| Error::from_io(error, "the backend");
            if let Some(extent) = &request.extent() {
                written.wait_until(|| !writing.borrow().iter().any(|other| other.overlaps(*extent))).await;
            }
            let _writing = request.extent().filter(|_| request.is_write()).map(|extent| {
                writing.borrow_mut().push(extent);
                Writing { writing: writing.clone(), written: written.clone(), extent }
            });
            let _passed = match &request {
                Request::Read(_) | Request::Flush => None,
                Request::CompareAndWrite { .. } => Some(gate.acquire(GATE).await),
                _ => Some(gate.acquire(1).await),
            };
            match request {
                Request::Read(Extent { offset, len }) => {
                    let data = file.read_exact_at(offset, len as usize).await.map_err(io)?;
                    return Ok(Reply::Data(data.into()));
                }
                Request::Write { offset, data, fua } if fua => file.write_durable_at(data, offset).await.map_err(io)?,
                Request::Write { offset, data, .. } => file.write_at(data, offset).await.map_err(io)?,
                Request::Discard(extent) => {
                    file.write_at(BufList::zeroes(extent.len as usize), extent.offset).await.map_err(io)?;
                }
                Request::WriteZeroes { extent, fua, .. } => {
                    let zeroes = BufList::zeroes(extent.len as usize);
                    match fua {
                        true => file.write_durable_at(zeroes, extent.offset).await.map_err(io)?,
                        false => file.write_at(zeroes, extent.offset).await.map_err(io)?,
                    }
                }
                Request::CompareAndWrite { offset, expect, data, fua } => {
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
                Request::Flush => file.sync_data().await.map_err(io)?,
            }
            Ok(Reply::Done)
        })
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
