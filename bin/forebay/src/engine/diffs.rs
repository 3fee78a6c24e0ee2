//! Exports of changes: of an image since a snapshot, and of an image with all its snapshots.

use std::collections::VecDeque;
use std::rc::Rc;

use forebay_block::{Advice, BlockDevice, BlockRequest, Extent, is_zero};
use forebay_image::{Image, ObjectProgress, SnapshotInfo, Striping};
use forebay_reactor::{JoinHandle, spawn};
use tokio::sync::mpsc;

use super::Engine;
use super::logs::log_failure;
use super::transfer::{CHUNK_LEN_MAX, Chunk, IN_FLIGHT, ImageProperties};
use super::volumes::Volume;
use crate::failure::{Failure, FailureKind, Result};
use crate::spec::{ImageSpec, SnapshotSpec, SourceSpec};

/// Prefix of the metadata keys that belong to this daemon's own state of an image, such as its write log.
pub(super) const OWN_METADATA: &[u8] = b"forebay.";

/// Parameters of an export of changes.
#[derive(Debug, Clone)]
pub struct DiffParameters {
    /// Image or snapshot that the changes lead to.
    pub source: SourceSpec,
    /// Snapshot that they begin at; `None`: the beginning.
    pub from: Option<String>,
    /// Set for whole objects.
    pub whole_object: bool,
    /// Set for the data of the changes, unset for their ranges alone.
    pub data: bool,
}

/// Open image or snapshot.
pub(super) struct OpenSource {
    pub(super) image: Rc<Image>,
    /// Keeps the image open.
    _volume: Option<Rc<Volume>>,
}

/// Content of an image that is sent.
#[derive(Debug, Clone, Copy)]
pub(super) struct SentContent {
    /// Set for that of each snapshot before, up to the source.
    pub(super) snapshots: bool,
    /// Set for the changes since the parent, in place of all data.
    pub(super) since_parent: bool,
}

/// One diff of a stream.
struct DiffPart<'a> {
    image: &'a Rc<Image>,
    spec: &'a ImageSpec,
    from: Option<&'a str>,
    /// Set for the changes since the parent, in place of an empty image.
    since_parent: bool,
    /// Snapshot at the end.
    to: Option<&'a str>,
    /// Protection of that snapshot, if it is said.
    protected: Option<bool>,
    whole_object: bool,
    data: bool,
}

/// Chunk to be sent, perhaps still being read.
enum QueuedChunk {
    Ready(Chunk),
    Reading(JoinHandle<forebay_block::Result<Chunk>>),
}

impl Engine {
    /// Sends the changes of an image or snapshot to `chunks`: the names of the snapshots, the size, the changed ranges in
    /// order, then the end.  Holds everything that was acknowledged before, and may hold later writes.
    pub async fn export_diff(self: Rc<Self>, diff: DiffParameters, chunks: mpsc::Sender<Chunk>) -> Result<()> {
        let DiffParameters { source, from, whole_object, data } = &diff;
        let opened = self.open_source(source).await?;
        let part = DiffPart {
            image: &opened.image,
            spec: &source.image,
            from: from.as_deref(),
            since_parent: false,
            to: source.snapshot.as_deref(),
            protected: None,
            whole_object: *whole_object,
            data: *data,
        };
        self.send_changes(part, &chunks, |_| {}).await?;
        send(&chunks, Chunk::End).await
    }

    /// Sends an image with all its snapshots to `chunks`.
    pub async fn export_image(self: Rc<Self>, spec: ImageSpec, chunks: mpsc::Sender<Chunk>) -> Result<()> {
        let opened = self.open_source(&spec.clone().into()).await?;
        let content = SentContent { snapshots: true, since_parent: false };
        self.send_image(&opened, &spec.into(), content, &chunks, |_, _| {}).await
    }

    /// Opens an image or snapshot for reading its changes. What only a write log has is brought to the image first.
    pub(super) async fn open_source(&self, source: &SourceSpec) -> Result<OpenSource> {
        if let Some(snapshot) = source.snapshot() {
            return Ok(OpenSource { image: self.open_snapshot(&snapshot).await?, _volume: None });
        }
        let volume = self.open_volume_to_read(&source.image).await?;
        if let Some(log) = volume.log() {
            drop(log.cut().await.map_err(|error| log_failure(error, &source.image))?);
        }
        Ok(OpenSource { image: volume.image.clone(), _volume: Some(volume) })
    }

    /// Sends the properties of an image, and its content.
    /// `progress` is called with the objects that are done, and all.
    pub(super) async fn send_image(
        &self,
        opened: &OpenSource,
        source: &SourceSpec,
        content: SentContent,
        chunks: &mpsc::Sender<Chunk>,
        progress: impl Fn(u64, u64),
    ) -> Result<()> {
        let (image, spec) = (&opened.image, &source.image);
        let mut sent: Vec<SnapshotInfo> = if content.snapshots { image.snapshots() } else { Vec::new() };
        if let Some(last) = source.snapshot.as_ref()
            && let Some(at) = sent.iter().position(|snapshot| snapshot.name == *last)
        {
            sent.truncate(at + 1);
        }
        let metadata = image.metadata_pairs().await.map_err(|error| self.image_failure(error, spec))?;
        let striping = image.striping().unwrap_or(Striping::none(image.object_size()));
        let properties = ImageProperties {
            order: Some(image.object_size().trailing_zeros().into()),
            // Those of an image that is not shared mean nothing elsewhere.
            features: image.is_shared().then(|| image.features().0),
            stripe_unit: Some(striping.unit),
            stripe_count: Some(striping.count),
            metadata: metadata.into_iter().filter(|(key, _)| !key.starts_with(OWN_METADATA)).collect(),
            diffs: sent.len() as u64 + 1,
        };
        send(chunks, Chunk::Image(Box::new(properties))).await?;
        let objects = |size: u64| image.objects(size);
        let total = sent.iter().map(|snapshot| snapshot.size).chain([image.size()]).map(objects).sum();
        let mut done = 0;
        let mut before: Option<&str> = None;
        let since_parent = |before: Option<&str>| content.since_parent && before.is_none();
        for snapshot in &sent {
            let name = SnapshotSpec { image: spec.clone(), snapshot: snapshot.name.clone() };
            let at = self.open_snapshot(&name).await?;
            let part = DiffPart {
                image: &at,
                spec,
                from: before,
                since_parent: since_parent(before),
                to: Some(&snapshot.name),
                protected: Some(snapshot.protected),
                whole_object: false,
                data: true,
            };
            self.send_changes(part, chunks, |now| progress(done + now.done, total)).await?;
            send(chunks, Chunk::DiffEnd).await?;
            done += objects(snapshot.size);
            before = Some(&snapshot.name);
        }
        let part = DiffPart {
            image,
            spec,
            from: before,
            since_parent: since_parent(before),
            to: None,
            protected: None,
            whole_object: false,
            data: true,
        };
        self.send_changes(part, chunks, |now| progress(done + now.done, total)).await?;
        progress(total, total);
        send(chunks, Chunk::DiffEnd).await?;
        send(chunks, Chunk::End).await
    }

    /// Sends one diff, without its end.
    async fn send_changes(
        &self,
        part: DiffPart<'_>,
        chunks: &mpsc::Sender<Chunk>,
        mut progress: impl FnMut(ObjectProgress),
    ) -> Result<()> {
        let changes = match part.since_parent {
            true => part.image.changes_since_parent().await,
            false => part.image.changes(part.from, part.whole_object).await,
        };
        let mut changes = match changes {
            Ok(changes) => changes,
            Err(error) => return Err(self.changes_failure(error, &part).await),
        };
        if let Some(name) = part.from {
            send(chunks, Chunk::From(name.to_owned())).await?;
        }
        if let Some(name) = part.to {
            send(chunks, Chunk::To(name.to_owned())).await?;
        }
        if let Some(protected) = part.protected {
            send(chunks, Chunk::Protected(protected)).await?;
        }
        send(chunks, Chunk::Size(changes.size())).await?;
        let mut queue = VecDeque::new();
        loop {
            let ranges = match changes.next().await {
                Ok(Some(ranges)) => ranges,
                Ok(None) => break,
                Err(error) => return Err(self.changes_failure(error, &part).await),
            };
            for range in ranges {
                let Extent { offset, len } = range.extent;
                if !range.exists || !part.data {
                    let chunk = if range.exists { Chunk::Changed(offset, len) } else { Chunk::Zero(offset, len) };
                    self.enqueue(&mut queue, QueuedChunk::Ready(chunk), &part, chunks).await?;
                    continue;
                }
                let mut at = offset;
                while at < range.extent.end() {
                    // Chunks end on their own boundary, so that each is in one object.
                    let room = CHUNK_LEN_MAX as u64 - at % CHUNK_LEN_MAX as u64;
                    let piece = Extent::new(at, room.min(range.extent.end() - at));
                    let read = QueuedChunk::Reading(read(part.image, piece));
                    self.enqueue(&mut queue, read, &part, chunks).await?;
                    at = piece.end();
                }
            }
            progress(changes.progress());
        }
        while let Some(oldest) = queue.pop_front() {
            self.send_queued(oldest, &part, chunks).await?;
        }
        Ok(())
    }

    /// Adds a chunk to those to be sent, of which at most [`IN_FLIGHT`] wait.
    async fn enqueue(
        &self,
        queue: &mut VecDeque<QueuedChunk>,
        chunk: QueuedChunk,
        part: &DiffPart<'_>,
        chunks: &mpsc::Sender<Chunk>,
    ) -> Result<()> {
        queue.push_back(chunk);
        match queue.len() > IN_FLIGHT {
            true => self.send_queued(queue.pop_front().expect("not empty"), part, chunks).await,
            false => Ok(()),
        }
    }

    async fn send_queued(&self, chunk: QueuedChunk, part: &DiffPart<'_>, chunks: &mpsc::Sender<Chunk>) -> Result<()> {
        let chunk = match chunk {
            QueuedChunk::Ready(chunk) => chunk,
            QueuedChunk::Reading(read) => match read.await {
                Ok(chunk) => chunk,
                Err(error) => return Err(self.changes_failure(error, part).await),
            },
        };
        send(chunks, chunk).await
    }

    /// Explains an error about the changes of an image to the user.
    async fn changes_failure(&self, error: forebay_block::Error, part: &DiffPart<'_>) -> Failure {
        let spec = |name: &str| SnapshotSpec { image: part.spec.clone(), snapshot: name.to_owned() };
        match (error.kind(), part.from, part.to) {
            (forebay_block::ErrorKind::Invalid, Some(from), _) => {
                let what = match part.to {
                    Some(to) => format!("the snapshot {} is newer than {}", spec(from), spec(to)),
                    None => error.to_string(),
                };
                Failure::new(FailureKind::Invalid, what).hint("changes begin at an older snapshot: name that one first")
            }
            (_, Some(name), _) | (_, None, Some(name)) => self.snapshot_failure(error, &spec(name)).await,
            (_, None, None) => self.image_failure(error, part.spec),
        }
    }
}

/// Reads a piece of an image as a chunk.
fn read(image: &Rc<Image>, piece: Extent) -> JoinHandle<forebay_block::Result<Chunk>> {
    let work = image.submit_advised(BlockRequest::Read(piece), Advice::ONE_PASS);
    spawn(async move {
        let data = work.await?.into_data().into_contiguous();
        Ok(match is_zero(&data) {
            true => Chunk::Zero(piece.offset, piece.len),
            false => Chunk::Data(piece.offset, data),
        })
    })
}

async fn send(chunks: &mpsc::Sender<Chunk>, chunk: Chunk) -> Result<()> {
    let sent = chunks.send(chunk).await;
    sent.map_err(|_| Failure::failed("the client that reads the image's content has disconnected"))
}
