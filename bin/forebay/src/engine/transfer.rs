//! Import and export of an image's content, as chunks through a bounded channel to and from other threads.

use std::cell::RefCell;
use std::collections::VecDeque;
use std::rc::Rc;

use forebay_block::{Advice, BlockDevice, BlockRequest, BufList, Extent, ExtentState};
use forebay_image as image;
use forebay_reactor::sync::Semaphore;
use forebay_reactor::{Buf, JoinHandle, spawn};
use tokio::sync::{mpsc, oneshot};

use super::Engine;
use super::images::{features, striping};
use super::volumes::Volume;
use crate::api::{ImportResult, NewImageOptions};
use crate::failure::{Failure, Result};
use crate::ops::ProgressSink;
use crate::spec::{ImageSpec, SourceSpec};

/// Capacity of a channel in chunks; with [`CHUNK_LEN_MAX`] it bounds the data buffered between disk and network.
pub const CHUNKS_QUEUED: usize = 8;

/// Maximum length of a data chunk, in bytes.
pub const CHUNK_LEN_MAX: usize = 1 << 20;

/// Requests in flight to an image.
pub(super) const IN_FLIGHT: usize = 8;

/// Bytes of an image that are mapped at a time by an export.
const MAP_LEN: u64 = 1 << 30;

/// Minimum growth of an image of unknown size, in bytes.
const GROW_MIN: u64 = 64 << 20;

/// Properties of an image that is exported with its snapshots.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ImageProperties {
    /// Object size as a power of two.
    pub order: Option<u64>,
    /// Feature bits; the default of the pool if they are not said.
    pub features: Option<u64>,
    /// Stripe unit in bytes.
    pub stripe_unit: Option<u64>,
    /// Number of objects of a stripe.
    pub stripe_count: Option<u64>,
    /// Metadata: keys and values.
    pub metadata: Vec<(Vec<u8>, Vec<u8>)>,
    /// Number of diffs: one a snapshot, and one for the image.
    pub diffs: u64,
}

/// Chunk of an image's content, or of its changes.
#[derive(Debug)]
pub enum Chunk {
    /// Properties of the image; the first chunk of an image with its snapshots.
    Image(Box<ImageProperties>),
    /// Snapshot that the changes begin at.
    From(String),
    /// Snapshot that the changes lead to.
    To(String),
    /// Protection of that snapshot.
    Protected(bool),
    /// Image size; the first chunk of an export.
    Size(u64),
    /// Offset and data.
    Data(u64, Buf),
    /// Offset and length of a range that reads as zeroes.
    Zero(u64, u64),
    /// Offset and length of a range that has changed, without its data.
    Changed(u64, u64),
    /// End of the changes up to one snapshot of several, or up to the image.
    DiffEnd,
    /// End of the content.
    End,
}

/// Parameters of a new image to be filled.
#[derive(Debug, Clone)]
pub struct ImportParameters {
    /// Name of the new image.
    pub spec: ImageSpec,
    /// Its options.
    pub options: NewImageOptions,
    /// Image size, if known at the start.
    pub size: Option<u64>,
}

impl Engine {
    /// Creates an image from `chunks`.  `begun` is notified once the image exists and chunks are accepted.  A
    /// failure, or an end without [`Chunk::End`], removes the image.
    pub async fn import(
        self: Rc<Self>,
        import: ImportParameters,
        mut chunks: mpsc::Receiver<Chunk>,
        begun: oneshot::Sender<()>,
    ) -> Result<ImportResult> {
        let spec = import.spec.clone();
        spec.check_new()?;
        let backend = self.pool_of_new(&spec).await?;
        let reserved = self.reserve_unexported(&spec)?;
        let NewImageOptions { object_size, stripe_unit, stripe_count, features: wanted, data_pool, encrypt } =
            import.options;
        let options = image::CreateOptions {
            size: import.size.unwrap_or(0),
            object_size: object_size.unwrap_or(image::OBJECT_SIZE_DEFAULT),
            striping: striping(stripe_unit, stripe_count)?,
            features: features(wanted.as_deref())?,
            data_pool,
            encrypted: encrypt,
        };
        let created = image::create(&backend, &spec.image, options).await;
        created.map_err(|error| self.image_failure(error, &spec))?;
        let _ = begun.send(());
        let filled = match self.open_reserved(&reserved).await {
            Ok(volume) => self.fill(&volume, &spec, import.size, &mut chunks).await,
            Err(failure) => Err(failure),
        };
        match filled {
            Ok(written) => Ok(ImportResult { image: self.image_info(&spec).await?, written }),
            Err(failure) => {
                let (sink, _) = ProgressSink::channel();
                if let Err(left) = self.remove_reserved(&spec, sink).await {
                    tracing::warn!(image = %spec, error = %left, "an image whose import failed could not be removed");
                }
                Err(failure.context(format_args!("importing into {spec}")))
            }
        }
    }

    /// Writes chunks into an image and makes them durable; returns the number of bytes written.  No write is in
    /// flight once it has returned, whatever the result.
    async fn fill(
        &self,
        volume: &Rc<Volume>,
        spec: &ImageSpec,
        size: Option<u64>,
        chunks: &mut mpsc::Receiver<Chunk>,
    ) -> Result<u64> {
        let mut filler = Filler {
            volume: volume.clone(),
            room: size.unwrap_or(0),
            exact: size,
            end: 0,
            written: 0,
            slots: Semaphore::new(IN_FLIGHT),
            failed: Rc::default(),
        };
        let mut result = Ok(());
        while result.is_ok() {
            result = match chunks.recv().await {
                Some(Chunk::End) => break,
                Some(chunk) => filler.take(chunk).await,
                None => Err(Failure::failed("the data ended before it was complete")),
            };
        }
        drop(filler.slots.acquire(IN_FLIGHT).await);
        if let Some(error) = filler.failed.borrow_mut().take() {
            return Err(self.image_failure(error, spec));
        }
        result?;
        let size = filler.exact.unwrap_or(filler.end);
        if size != filler.room {
            volume.image.resize(size, true, |_| {}).await.map_err(|error| self.image_failure(error, spec))?;
        }
        volume.top().submit(BlockRequest::Flush).await.map_err(|error| self.image_failure(error, spec))?;
        Ok(filler.written)
    }

    /// Sends the content of an image or snapshot to `chunks`: its size, then the stored data in order, then the end.
    pub async fn export(self: Rc<Self>, source: SourceSpec, chunks: mpsc::Sender<Chunk>) -> Result<()> {
        match source.snapshot() {
            // Whatever a write log holds is newer than the snapshot.
            Some(snapshot) => {
                let image = self.open_snapshot(&snapshot).await?;
                let size = image.size();
                self.send_content(&source, size, || image.clone(), chunks).await
            }
            None => {
                let volume = self.open_volume_to_read(&source.image).await?;
                self.send_content(&source, volume.image.size(), || volume.top(), chunks).await
            }
        }
    }

    /// Sends the content of a device, which `top` returns for each request: a write log may be ended meanwhile.
    async fn send_content(
        &self,
        source: &SourceSpec,
        size: u64,
        top: impl Fn() -> Rc<dyn BlockDevice>,
        chunks: mpsc::Sender<Chunk>,
    ) -> Result<()> {
        let gone = || Failure::failed("the client that reads the image's content has disconnected");
        chunks.send(Chunk::Size(size)).await.map_err(|_| gone())?;
        let mut reads: VecDeque<(u64, JoinHandle<forebay_block::Result<Buf>>)> = VecDeque::new();
        let mut at = 0;
        while at < size {
            let window = Extent::new(at, MAP_LEN.min(size - at));
            at = window.end();
            let map = match top().map(window).await {
                Ok(map) => map,
                Err(error) => return Err(self.source_failure(error, source).await),
            };
            for run in map.runs() {
                if run.state != ExtentState::Data {
                    continue;
                }
                let mut from = run.extent.offset;
                while from < run.extent.end() {
                    let len = (run.extent.end() - from).min(CHUNK_LEN_MAX as u64);
                    if reads.len() == IN_FLIGHT {
                        self.send_oldest(&mut reads, &chunks, source).await?;
                    }
                    let work = top().submit_advised(BlockRequest::Read(Extent::new(from, len)), Advice::ONE_PASS);
                    reads.push_back((from, spawn(async move { Ok(work.await?.into_data().into_contiguous()) })));
                    from += len;
                }
            }
        }
        while !reads.is_empty() {
            self.send_oldest(&mut reads, &chunks, source).await?;
        }
        chunks.send(Chunk::End).await.map_err(|_| gone())
    }

    async fn send_oldest(
        &self,
        reads: &mut VecDeque<(u64, JoinHandle<forebay_block::Result<Buf>>)>,
        chunks: &mpsc::Sender<Chunk>,
        source: &SourceSpec,
    ) -> Result<()> {
        let Some((offset, read)) = reads.pop_front() else { return Ok(()) };
        let data = match read.await {
            Ok(data) => data,
            Err(error) => return Err(self.source_failure(error, source).await),
        };
        let sent = chunks.send(Chunk::Data(offset, data)).await;
        sent.map_err(|_| Failure::failed("the client that reads the image's content has disconnected"))
    }
}

/// Image that is being filled, with several writes in flight.
struct Filler {
    volume: Rc<Volume>,
    /// Current image size.
    room: u64,
    /// Final image size, if known.
    exact: Option<u64>,
    /// Highest end offset of a chunk so far.
    end: u64,
    written: u64,
    slots: Semaphore,
    /// First failed write.
    failed: Rc<RefCell<Option<forebay_block::Error>>>,
}

impl Filler {
    async fn take(&mut self, chunk: Chunk) -> Result<()> {
        match chunk {
            Chunk::Size(said) if self.exact.is_some_and(|exact| exact != said) => {
                Err(Failure::invalid(format!("the stream is of {said} bytes, the image of {}", self.room)))
            }
            Chunk::Size(said) if said < self.end => {
                Err(Failure::invalid(format!("the stream is of {said} bytes, and had some at {}", self.end)))
            }
            Chunk::Size(said) => {
                self.exact = Some(said);
                if said > self.room { self.grow(said).await } else { Ok(()) }
            }
            Chunk::Zero(offset, len) => {
                self.end = self.end.max(self.checked_end(offset, len)?);
                Ok(())
            }
            Chunk::Data(offset, data) => {
                self.end = self.end.max(self.checked_end(offset, data.len() as u64)?);
                self.written += data.len() as u64;
                if self.end > self.room {
                    let step = GROW_MIN.max(self.room / 8);
                    self.grow(self.end.max(self.room.saturating_add(step))).await?;
                }
                self.write(offset, data).await
            }
            Chunk::To(_) | Chunk::Protected(_) | Chunk::End => Ok(()),
            Chunk::From(name) => {
                let what = format!("the stream has only the changes since the snapshot '{name}'");
                Err(Failure::invalid(what).hint("apply them to an image that has it: forebay import-diff FILE IMAGE"))
            }
            Chunk::Image(_) | Chunk::Changed(..) | Chunk::DiffEnd => {
                Err(Failure::invalid("the stream is not the content of an image"))
            }
        }
    }

    /// Starts a write when a slot is free; fails with the error of an earlier one.
    async fn write(&mut self, offset: u64, data: Buf) -> Result<()> {
        let permit = self.slots.acquire(1).await;
        if let Some(error) = &*self.failed.borrow() {
            return Err(error.clone().into());
        }
        let write = BlockRequest::Write { offset, data: BufList::from(data), fua: false };
        let work = self.volume.top().submit_advised(write, Advice::ONE_PASS);
        let failed = self.failed.clone();
        spawn(async move {
            if let Err(error) = work.await {
                failed.borrow_mut().get_or_insert(error);
            }
            drop(permit);
        });
        Ok(())
    }

    async fn grow(&mut self, size: u64) -> Result<()> {
        self.volume.image.resize(size, true, |_| {}).await?;
        self.room = size;
        Ok(())
    }

    fn checked_end(&self, offset: u64, len: u64) -> Result<u64> {
        match offset.checked_add(len) {
            Some(end) if self.exact.is_none_or(|exact| end <= exact) => Ok(end),
            _ => Err(Failure::invalid(format!("the stream has {len} bytes at {offset}, past the image's end"))),
        }
    }
}
