//! Imports of changes: into an image that has the snapshot that they begin at, and into a new image.

use std::cell::RefCell;
use std::rc::Rc;

use forebay_block::{Advice, BlockRequest, BufList, ErrorKind, Extent, ObjectBackend, is_zero};
use forebay_image::{self as image, ImageFeatures};
use forebay_reactor::sync::Semaphore;
use forebay_reactor::{Buf, spawn};
use tokio::sync::{mpsc, oneshot};

use super::Engine;
use super::diffs::OWN_METADATA;
use super::images::{features, striping};
use super::logs::log_failure;
use super::transfer::{Chunk, IN_FLIGHT, ImageProperties};
use super::volumes::Volume;
use crate::api::{AppliedDiff, ImportResult, NewImageOptions};
use crate::failure::{Failure, FailureKind, Result};
use crate::ops::ProgressSink;
use crate::spec::{ImageSpec, SnapshotSpec};
use crate::transfer::source::nonzero_runs;

/// Bytes that one request zeroes at most.
const ZERO_LEN_MAX: u64 = 1 << 30;

/// Parameters of a new image, made of a stream with snapshots.
#[derive(Debug, Clone)]
pub struct ImageImport {
    /// Name of the new image.
    pub spec: ImageSpec,
    /// Its options.
    pub options: NewImageOptions,
    /// Parent, if it is a clone; the stream has the changes since that.
    pub parent: Option<CopiedParent>,
}

/// Snapshot of which a copy is a clone, as its source is.
#[derive(Debug, Clone)]
pub struct CopiedParent {
    /// Its name.
    pub spec: SnapshotSpec,
    /// Id of its image.
    pub image: String,
    /// Its number.
    pub snapshot: u64,
}

impl Engine {
    /// Applies changes to an image: requires the snapshot that they begin at, resizes the image, writes, and creates the
    /// snapshot that they lead to, last.  `begun` is notified once chunks are accepted.  A failure leaves the image partly
    /// changed, and without that snapshot; the same changes can be applied again.
    pub async fn import_diff(
        self: Rc<Self>,
        spec: ImageSpec,
        mut chunks: mpsc::Receiver<Chunk>,
        begun: oneshot::Sender<()>,
    ) -> Result<AppliedDiff> {
        self.pool(&spec.pool).await?;
        // Hosts would mix what they have cached with what is imported.
        let reserved = self.reserve_unused(&spec).await?;
        let volume = self.open_reserved(&reserved).await?;
        let _ = begun.send(());
        let applied = self.apply(&volume, &spec, &mut chunks).await;
        let applied = applied.map_err(|(failure, changed)| {
            let failure = failure.context(format_args!("importing changes into {spec}"));
            match (changed, &failure.hint) {
                (true, None) => failure.hint(
                    "the image is changed in part, and its snapshots are not: import the same changes again, or roll it back",
                ),
                _ => failure,
            }
        })?;
        tracing::info!(image = %spec, snapshot = applied.snapshot, written = applied.written, "changes were imported");
        Ok(applied)
    }

    /// Creates an image with snapshots from `chunks`.  `begun` is notified once chunks are accepted.  A failure removes the
    /// image.
    pub async fn import_image(
        self: Rc<Self>,
        import: ImageImport,
        mut chunks: mpsc::Receiver<Chunk>,
        begun: oneshot::Sender<()>,
    ) -> Result<ImportResult> {
        let spec = import.spec.clone();
        spec.check_new()?;
        let backend = self.pool_of_new(&spec).await?;
        let reserved = self.reserve_unexported(&spec)?;
        match image::info(&backend, &spec.image).await {
            Err(error) if error.kind() == ErrorKind::NotFound => {}
            Err(error) => return Err(self.image_failure(error, &spec)),
            Ok(_) => {
                let exists = forebay_block::Error::new(ErrorKind::Exists, "it exists");
                return Err(self.image_failure(exists, &spec));
            }
        }
        let _ = begun.send(());
        let importing = |failure: Failure| failure.context(format_args!("importing into {spec}"));
        let properties = match chunks.recv().await {
            Some(Chunk::Image(properties)) => properties,
            Some(_) => return Err(importing(Failure::invalid("the stream is not an image with snapshots"))),
            None => return Err(importing(incomplete())),
        };
        let options = create_options(&properties, &import, backend.shared().is_some()).map_err(importing)?;
        match &import.parent {
            Some(parent) => self.create_copied_clone(&backend, &spec, parent, options).await?,
            None => {
                let created = image::create(&backend, &spec.image, options).await;
                created.map_err(|error| self.image_failure(error, &spec))?;
            }
        }
        let filled = match self.open_reserved(&reserved).await {
            Ok(volume) => {
                let filled = self.fill_image(&volume, &spec, &properties, &mut chunks).await;
                if filled.is_err() {
                    self.remove_all_snapshots(&volume, &spec).await;
                }
                filled
            }
            Err(failure) => Err(failure),
        };
        match filled {
            Ok(written) => Ok(ImportResult { image: self.image_info(&spec).await?, written }),
            Err(failure) => {
                let (sink, _) = ProgressSink::channel();
                if let Err(left) = self.remove_reserved(&spec, sink).await {
                    tracing::warn!(image = %spec, error = %left, "an image whose import failed could not be removed");
                }
                Err(importing(failure))
            }
        }
    }

    /// Creates a clone that a stream is to fill.
    async fn create_copied_clone(
        &self,
        backend: &Rc<dyn ObjectBackend>,
        spec: &ImageSpec,
        parent: &CopiedParent,
        options: image::CreateOptions,
    ) -> Result<()> {
        let CopiedParent { spec: parent, image: parent_image, snapshot } = parent;
        let image::CreateOptions { object_size, striping, features, data_pool, encrypted, .. } = options;
        let object_size = Some(object_size);
        let options =
            image::CloneOptions { object_size, striping, features, data_pool, encrypted, ..Default::default() };
        let parents = image::Images::of(&self.pool(&parent.image.pool).await?);
        let source = format!("{}@{}", parent.image.image, parent.snapshot);
        let images = image::Images::of(backend);
        let cloned = images.clone_from(&parents, &source, &spec.image, &options).await;
        cloned.map_err(|error| {
            let cannot_share =
                matches!(error.kind(), ErrorKind::Invalid | ErrorKind::NotFound | ErrorKind::Unsupported);
            let failure = self.image_failure(error, spec);
            match cannot_share {
                true => failure.hint(format!(
                    "a copy of a clone shares its parent {parent}; add --flatten for one with the parent's data in it"
                )),
                false => failure,
            }
        })?;
        // The name may have become that of another snapshot.
        let made = images.details(&spec.image).await.map_err(|error| self.image_failure(error, spec))?.parent;
        if made.is_some_and(|made| made.id == *parent_image && made.snapshot_id == *snapshot) {
            return Ok(());
        }
        image::remove(backend, &spec.image, |_| {}).await.map_err(|error| self.image_failure(error, spec))?;
        Err(Failure::new(FailureKind::Busy, format!("the parent {parent} has been replaced meanwhile"))
            .hint("run the command again"))
    }

    /// Fills a new image; returns the number of bytes written.
    async fn fill_image(
        &self,
        volume: &Rc<Volume>,
        spec: &ImageSpec,
        properties: &ImageProperties,
        chunks: &mut mpsc::Receiver<Chunk>,
    ) -> Result<u64> {
        for (key, value) in properties.metadata.iter().filter(|(key, _)| !key.starts_with(OWN_METADATA)) {
            let key = std::str::from_utf8(key).map_err(|_| Failure::invalid("a metadata key is not UTF-8"))?;
            let set = volume.image.set_metadata(key, Some(value.clone())).await;
            set.map_err(|error| self.image_failure(error, spec))?;
        }
        let mut written = 0;
        for _ in 0..properties.diffs {
            written += self.apply(volume, spec, chunks).await.map_err(|(failure, _)| failure)?.written;
        }
        match chunks.recv().await {
            Some(Chunk::End) => Ok(written),
            Some(_) => Err(Failure::invalid("the stream has more diffs than it says")),
            None => Err(incomplete()),
        }
    }

    /// Removes the snapshots of a new image, whose import has failed.
    async fn remove_all_snapshots(&self, volume: &Volume, spec: &ImageSpec) {
        for snapshot in volume.image.snapshots() {
            let removed = async {
                if snapshot.protected {
                    volume.image.set_snapshot_protection(&snapshot.name, false).await?;
                }
                volume.image.remove_snapshot(&snapshot.name).await
            };
            if let Err(error) = removed.await {
                tracing::warn!(image = %spec, snapshot = snapshot.name, %error, "a snapshot could not be removed");
            }
        }
    }

    /// Applies one diff.  No write is in flight once it has returned, whatever the result.
    ///
    /// # Errors
    /// The failure, and whether the image may have been changed.
    async fn apply(
        &self,
        volume: &Rc<Volume>,
        spec: &ImageSpec,
        chunks: &mut mpsc::Receiver<Chunk>,
    ) -> std::result::Result<AppliedDiff, (Failure, bool)> {
        let mut writer = DiffWriter {
            engine: self,
            volume,
            spec,
            size: volume.image.size(),
            to: None,
            protected: false,
            end: 0,
            changed: false,
            applied: AppliedDiff::default(),
            slots: Semaphore::new(IN_FLIGHT),
            failed: Rc::default(),
        };
        let mut result = Ok(());
        while result.is_ok() {
            result = match chunks.recv().await {
                Some(Chunk::End | Chunk::DiffEnd) => break,
                Some(chunk) => writer.take(chunk).await,
                None => Err(incomplete()),
            };
        }
        let drained = writer.drain().await;
        // A failed write is the cause of what follows it.
        let finished = match drained.and(result) {
            Ok(()) => writer.finish().await,
            failed => failed,
        };
        finished.map(|()| writer.applied).map_err(|failure| (failure, writer.changed))
    }
}

/// Returns the options of a new image with the properties of a stream.
fn create_options(properties: &ImageProperties, import: &ImageImport, shared: bool) -> Result<image::CreateOptions> {
    let order = properties.order.map(|order| 1u64.checked_shl(u32::try_from(order).unwrap_or(64)).unwrap_or(0));
    let NewImageOptions { object_size, stripe_unit, stripe_count, features: wanted, data_pool, encrypt } =
        import.options.clone();
    let object_size = object_size.or(order).unwrap_or(image::OBJECT_SIZE_DEFAULT);
    if !image::OBJECT_SIZES.contains(&object_size) {
        return Err(Failure::new(
            FailureKind::Unsupported,
            format!("objects of {object_size} bytes are not supported"),
        )
        .hint("choose another size, from 64K to 32M, with --object-size"));
    }
    let of_stream = match (properties.stripe_unit, properties.stripe_count) {
        // One object after the other, whatever their size is.
        (_, Some(0 | 1) | None) | (None, _) => None,
        (Some(unit), Some(count)) => Some(image::Striping { unit, count }),
    };
    let striping = striping(stripe_unit, stripe_count)?.or(of_stream);
    // What else an image may have there describes its place, or is not supported here: journaling, mirroring.
    let kept = match shared {
        true => ImageFeatures::RBD_DEFAULT.0,
        false => ImageFeatures::LAYERING.0 | ImageFeatures::DEEP_FLATTEN.0,
    };
    let of_stream = properties.features.map(|features| ImageFeatures(features & kept));
    let features = features(wanted.as_deref())?.or(of_stream);
    Ok(image::CreateOptions { object_size, striping, features, data_pool, encrypted: encrypt, ..Default::default() })
}

/// Returns the failure of a stream without its end.
fn incomplete() -> Failure {
    Failure::failed("the data ended before it was complete")
}

/// Image to which a diff is applied, with several writes in flight.
struct DiffWriter<'a> {
    engine: &'a Engine,
    volume: &'a Rc<Volume>,
    spec: &'a ImageSpec,
    /// Current image size.
    size: u64,
    /// Snapshot to create at the end.
    to: Option<String>,
    /// Set if it is to be protected.
    protected: bool,
    /// End of the ranges that were written since the last drain.
    end: u64,
    /// Set once the image may have been changed.
    changed: bool,
    applied: AppliedDiff,
    slots: Semaphore,
    /// First failed write.
    failed: Rc<RefCell<Option<forebay_block::Error>>>,
}

impl DiffWriter<'_> {
    async fn take(&mut self, chunk: Chunk) -> Result<()> {
        match chunk {
            Chunk::From(name) => self.check_start(&name),
            Chunk::To(name) => self.check_end(name),
            Chunk::Protected(protected) => {
                self.protected = protected;
                Ok(())
            }
            Chunk::Size(size) => self.resize(size).await,
            Chunk::Zero(offset, len) => {
                self.admit(offset, len).await?;
                self.zero(offset, len).await
            }
            Chunk::Data(offset, data) => self.data(offset, data).await,
            Chunk::Image(_) | Chunk::Changed(..) | Chunk::DiffEnd | Chunk::End => {
                Err(Failure::invalid("the stream has no data: it is not the changes of an image"))
            }
        }
    }

    /// Refuses changes that begin at a snapshot which the image does not have.
    fn check_start(&self, name: &str) -> Result<()> {
        if self.volume.image.snapshots().iter().any(|snapshot| snapshot.name == name) {
            return Ok(());
        }
        let what = format!("the changes begin at the snapshot '{name}', which {} does not have", self.spec);
        Err(Failure::new(FailureKind::NotFound, what).hint(format!(
            "import what leads to that snapshot first; 'forebay snap ls {}' lists those there are",
            self.spec
        )))
    }

    /// Refuses changes that lead to a snapshot which the image has already.
    fn check_end(&mut self, name: String) -> Result<()> {
        let to = SnapshotSpec::new(self.spec.clone(), &name).map_err(Failure::invalid)?;
        to.check_new()?;
        if self.volume.image.snapshots().iter().any(|snapshot| snapshot.name == name) {
            let what = format!("the changes lead to the snapshot {to}, which exists already");
            return Err(Failure::new(FailureKind::Exists, what)
                .hint("they seem to be imported already; if not, remove or rename that snapshot"));
        }
        self.to = Some(name);
        Ok(())
    }

    async fn resize(&mut self, size: u64) -> Result<()> {
        if size == self.size {
            return Ok(());
        }
        self.drain().await?;
        self.changed = true;
        let log = self.volume.log().filter(|_| size < self.size);
        let shrinking = match log {
            Some(log) => Some(log.shrink(size).await.map_err(|error| log_failure(error, self.spec))?),
            None => None,
        };
        let resized = self.volume.image.resize(size, true, |_| {}).await;
        drop(shrinking);
        resized.map_err(|error| self.engine.image_failure(error, self.spec))?;
        self.size = size;
        Ok(())
    }

    /// Admits a range; waits for the writes in flight if it may overlap one of them.
    async fn admit(&mut self, offset: u64, len: u64) -> Result<()> {
        let end = offset.checked_add(len).filter(|&end| end <= self.size).ok_or_else(|| {
            let what = format!("the changes have {len} bytes at {offset}, past the image's end at {}", self.size);
            Failure::invalid(what)
        })?;
        if offset < self.end {
            self.drain().await?;
        }
        self.end = self.end.max(end);
        self.changed = true;
        Ok(())
    }

    async fn data(&mut self, offset: u64, data: Buf) -> Result<()> {
        self.admit(offset, data.len() as u64).await?;
        let mut at = 0;
        for run in nonzero_runs(offset, &data) {
            self.zero(offset + at as u64, (run.start - at) as u64).await?;
            at = run.end;
            let part = if run.len() == data.len() { data.clone() } else { Buf::copy_of(&data[run.clone()]) };
            debug_assert!(!is_zero(&part));
            self.applied.written += part.len() as u64;
            let (offset, data) = (offset + run.start as u64, BufList::from(part));
            self.submit(BlockRequest::Write { offset, data, fua: false }).await?;
        }
        self.zero(offset + at as u64, (data.len() - at) as u64).await
    }

    async fn zero(&mut self, offset: u64, len: u64) -> Result<()> {
        let end = offset + len;
        let mut at = offset;
        while at < end {
            let extent = Extent::new(at, ZERO_LEN_MAX.min(end - at));
            self.submit(BlockRequest::WriteZeroes { extent, no_unmap: false, fua: false }).await?;
            self.applied.zeroed += extent.len;
            at = extent.end();
        }
        Ok(())
    }

    /// Starts a request when a slot is free; fails with the error of an earlier one.
    async fn submit(&self, request: BlockRequest) -> Result<()> {
        let permit = self.slots.acquire(1).await;
        self.check_writes()?;
        let work = self.volume.top().submit_advised(request, Advice::ONE_PASS);
        let failed = self.failed.clone();
        drop(spawn(async move {
            if let Err(error) = work.await {
                failed.borrow_mut().get_or_insert(error);
            }
            drop(permit);
        }));
        Ok(())
    }

    fn check_writes(&self) -> Result<()> {
        match self.failed.borrow().clone() {
            Some(error) => Err(self.engine.image_failure(error, self.spec)),
            None => Ok(()),
        }
    }

    /// Waits for the writes in flight.
    async fn drain(&mut self) -> Result<()> {
        drop(self.slots.acquire(IN_FLIGHT).await);
        self.end = 0;
        self.check_writes()
    }

    /// Makes the changes durable, and creates the snapshot that they lead to.
    async fn finish(&mut self) -> Result<()> {
        let (volume, spec) = (self.volume, self.spec);
        let flushed = volume.top().submit(BlockRequest::Flush).await;
        flushed.map_err(|error| self.engine.image_failure(error, spec))?;
        self.applied.size = self.size;
        let Some(name) = self.to.take() else { return Ok(()) };
        let to = SnapshotSpec { image: spec.clone(), snapshot: name };
        let _turn = volume.snapshotting.acquire(1).await;
        let cut = match volume.log() {
            Some(log) => Some(log.cut().await.map_err(|error| log_failure(error, spec))?),
            None => None,
        };
        let created = volume.image.create_snapshot(&to.snapshot).await;
        drop(cut);
        if let Err(error) = created {
            return Err(self.engine.creation_failure(error, &to).await);
        }
        if self.protected
            && let Err(error) = volume.image.set_snapshot_protection(&to.snapshot, true).await
        {
            return Err(self.engine.snapshot_failure(error, &to).await);
        }
        self.engine.flush_pool(spec).await?;
        self.applied.snapshot = Some(to.snapshot);
        Ok(())
    }
}
