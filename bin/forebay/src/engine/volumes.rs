//! Open images, each opened once.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::pin::Pin;
use std::rc::{Rc, Weak};
use std::task::{Context, Poll};
use std::time::Duration;

use forebay_block::reservation::Reservations;
use forebay_block::{
    BlockDevice, BlockReply, BlockRequest, ErrorKind, Extent, ExtentMap, Geometry, InFlightTracker, LocalFuture,
    SizeWatch,
};
use forebay_export::{Delayed, MeasuredRequest, Meter};
use forebay_image::{Image, ImageOpenOptions, LUKS_HEADER_LEN, LuksHeader, OwnBlockState};
use forebay_qos::{CoreShare, QosLimits, QosStats, SharedRequest, VolumeQos, VolumeShare};
use forebay_reactor::sync::{KeyedLock, Notify, Semaphore, WeakMap};
use forebay_reactor::{now, timeout, try_spawn};
use forebay_writelog::{LogAttachment, WriteLog};

use super::Engine;
use super::held_writes::{HeldWrites, WriteGate};
use super::limits::{LimitSource, NO_OWN_BLOCKS};
use super::log_keeper::{ImageLog, load_record};
use super::logs::log_failure;
use super::mappings::MappedWrites;
use super::owner_operations::VolumeOperations;
use super::reservations::{RESERVATIONS_KEY, reservations_of};
use super::times::UseTimes;
use crate::failure::{Failure, FailureKind, Result};
use crate::spec::ImageSpec;

/// Open image.
pub struct Volume {
    /// Image behind the volume.
    pub image: Rc<Image>,
    /// Persistent reservations, if the image supports them; the error that prevented reading them otherwise.
    reservations: RefCell<forebay_block::Result<Option<Reservations>>>,
    /// Changes that have not been acknowledged.
    changes: Rc<InFlightTracker>,
    /// Turn to create a snapshot, of the image or of its group. Acquired before a cut of the write log and before any change of
    /// the image's header: those who wait for one of these hold the other.
    pub(super) snapshotting: Semaphore,
    /// Gate of the writes from hosts.
    pub(super) gate: Rc<WriteGate>,
    /// Limits of the requests from hosts.
    pub(super) qos: Rc<VolumeQos>,
    /// Share of the core, except in a pool of a cluster, whose own queues are elsewhere.
    pub(super) share: Option<Rc<VolumeShare>>,
    /// Source of the limits.
    pub(super) limits: Rc<LimitSource>,
    /// Times of the last read and the last write by hosts.
    pub(super) times: Rc<UseTimes>,
    /// Image as a device, with its write log in front if it has one.
    pub attachment: Rc<LogAttachment<ImageLog>>,
    spec: ImageSpec,
    /// Registry in which its log is entered while closing, after the last user is gone.
    closing: Rc<ClosingLogs>,
    /// Set if the image was opened read-only because its features forbid writing.
    unwritable: Cell<bool>,
    /// LUKS header found when the image was exported: hosts get encrypted bytes.
    encrypted: Cell<Option<LuksHeader>>,
    /// Set if a request was refused because the cluster has fenced this image's client.
    fenced: Cell<bool>,
    /// Rules of writes, once the image is mapped.
    pub(super) mapped_writes: MappedWrites,
}

/// Way in which a volume is opened.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum VolumeOpening {
    /// Opens it with the log that its record names, if this daemon may.
    Usual,
    /// Opens it as its owner in a gateway group, with the log that it has there as its primary.
    AsOwner,
    /// Takes its log over from the primary of this term.
    TakeOver(u64),
}

/// Maximum wait for the first bytes of an image when it is exported.
const LOOK_MAX: Duration = Duration::from_secs(2);

/// Maximum wait for the last user of an image whose client was fenced.
const REOPEN_MAX: Duration = Duration::from_secs(2);

/// Environment variable that delays every request to an image by a number of microseconds.
const DELAY_VARIABLE: &str = "FOREBAY_DEBUG_BACKEND_DELAY_US";

/// Wraps an image in a delay if the environment enables one, to measure a write log in front of a simulated cluster.
fn delayed(image: Rc<Image>) -> Rc<dyn BlockDevice> {
    let asked = std::env::var(DELAY_VARIABLE).ok().and_then(|text| text.parse().ok());
    match asked.filter(|&micros| micros > 0) {
        None => image,
        Some(micros) => {
            tracing::warn!("{DELAY_VARIABLE}: every request to this image is delayed by {micros} us");
            Rc::new(Delayed::new(image, Duration::from_micros(micros)))
        }
    }
}

impl Volume {
    /// Returns the write log.
    pub fn log(&self) -> Option<Rc<WriteLog>> {
        self.attachment.log()
    }

    /// Returns the reservations, if the image supports them, or the error that prevented reading them.
    pub fn reservations(&self) -> forebay_block::Result<Option<Reservations>> {
        self.reservations.borrow().clone()
    }

    /// Enables writes on an image that was opened read-only, if its features allow them by now.  Devices created
    /// before are unchanged: where reservations are shared with other daemons, they have none.
    async fn allow_writes(&self) -> forebay_block::Result<()> {
        if !self.unwritable.get() {
            return Ok(());
        }
        self.image.allow_writes()?;
        let reservations = reservations_of(&self.image, &self.changes, &self.qos).await;
        // Without reservations nothing is served for writing, and a retry reads them again.
        self.unwritable.set(reservations.is_err());
        if reservations.is_ok() {
            tracing::info!(image = %self.spec, "the image's features allow writing it by now");
        }
        *self.reservations.borrow_mut() = reservations;
        Ok(())
    }

    /// Holds the writes that hosts submit from now on, until the guard is dropped.
    pub(super) fn hold_writes(&self) -> HeldWrites {
        self.gate.hold()
    }

    /// Returns the device that requests go to: the log, or the image if there is none.
    pub fn top(&self) -> Rc<dyn BlockDevice> {
        self.attachment.device()
    }

    /// Returns whether the cluster has fenced the client of this image: every request fails until it is reopened.
    pub fn is_fenced(&self) -> bool {
        self.fenced.get() || self.image.is_fenced()
    }

    /// Returns the device that a front serves; fails while the reservations are unknown.
    pub fn device(self: &Rc<Self>, read_only: bool, meter: Meter) -> forebay_block::Result<Rc<dyn BlockDevice>> {
        let reservations = self.reservations()?;
        Ok(Rc::new(ExportDevice { volume: self.clone(), read_only, reservations, meter: Rc::new(meter) }))
    }

    /// Reads the LUKS header of an image, in pools where other clients may have created one.  A header that cannot be
    /// read in time is skipped: hosts will see the error.
    pub async fn look_for_encryption(&self) {
        if !self.image.is_shared() || self.image.size() < LUKS_HEADER_LEN as u64 {
            return;
        }
        let first = self.top().submit(BlockRequest::Read(Extent::new(0, LUKS_HEADER_LEN as u64)));
        if let Ok(Ok(BlockReply::Data(data))) = timeout(LOOK_MAX, first).await {
            self.encrypted.set(LuksHeader::find(&data.to_vec()));
        }
    }

    /// Returns warnings about exporting the image.
    pub fn warnings(&self) -> Vec<String> {
        let encrypted = self.encrypted.get().map(|header| {
            format!(
                "{} holds a {header} header: hosts get the encrypted bytes (the image was encrypted by a host, or by \
                 'rbd encryption format', whose images are not decrypted here)",
                self.spec
            )
        });
        let uncached = (self.own_block_state() == OwnBlockState::Unavailable)
            .then(|| format!("own blocks of {} are not cached: {NO_OWN_BLOCKS}", self.spec));
        encrypted.into_iter().chain(uncached).collect()
    }

    /// Clears all reservations, whatever is stored, which admits every host.
    pub async fn clear_reservations(&self) -> forebay_block::Result<()> {
        match self.reservations() {
            Ok(Some(reservations)) => reservations.clear_all().await,
            Ok(None) => Ok(()),
            Err(_) => self.image.set_metadata(RESERVATIONS_KEY, None).await,
        }
    }
}

/// Device of an export: a volume, read-only or not, with request counters.
struct ExportDevice {
    volume: Rc<Volume>,
    read_only: bool,
    reservations: Option<Reservations>,
    /// Meter, shared with the requests: counters in the reactor's own memory, not atomics.
    meter: Rc<Meter>,
}

impl BlockDevice for ExportDevice {
    fn geometry(&self) -> Geometry {
        let geometry = self.volume.image.geometry();
        Geometry { read_only: geometry.read_only || self.read_only, ..geometry }
    }

    fn submit(&self, request: BlockRequest) -> LocalFuture<forebay_block::Result<BlockReply>> {
        if self.read_only && request.is_write() {
            let error = forebay_block::Error::new(forebay_block::ErrorKind::ReadOnly, "a write to a read-only export");
            return Box::pin(std::future::ready(Err(error)));
        }
        let is_write = request.is_write();
        let mut share = None;
        let measured = self.meter.measure(request, |request| {
            let (submitted, used) = self.volume.submit_mapped(request);
            share = used;
            submitted
        });
        let request = ExportRequest { measured, share, volume: self.volume.clone() };
        match is_write {
            true => Box::pin(self.volume.changes.track(request)),
            false => Box::pin(request),
        }
    }

    fn map(&self, extent: Extent) -> LocalFuture<forebay_block::Result<ExtentMap>> {
        self.volume.top().map(extent)
    }

    fn size_watch(&self) -> Option<Rc<SizeWatch>> {
        self.volume.image.size_watch()
    }

    fn reservations(&self) -> Option<Reservations> {
        self.reservations.clone()
    }
}

/// Request to an export.  It keeps the volume open until it completes.
struct ExportRequest {
    measured: MeasuredRequest,
    /// Share of the core that it uses, unless it had to wait for one.
    share: Option<SharedRequest>,
    volume: Rc<Volume>,
}

impl Future for ExportRequest {
    type Output = forebay_block::Result<BlockReply>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let Poll::Ready(result) = Pin::new(&mut self.measured).poll(cx) else { return Poll::Pending };
        self.share = None;
        if result.as_ref().is_err_and(|error| error.kind() == ErrorKind::Fenced) && !self.volume.fenced.replace(true) {
            let image = self.volume.image.name();
            tracing::error!(
                image,
                "the cluster has fenced this client: requests fail until the image is detached and attached"
            );
        }
        Poll::Ready(result)
    }
}

impl Drop for Volume {
    fn drop(&mut self) {
        // Last user is gone: the log is closed in order, unless the engine has ended.
        if self.attachment.log().is_some_and(|log| !log.is_ending()) {
            self.closing.begin(&self.spec, self.attachment.clone());
        }
        self.closing.let_go.notify_all();
    }
}

/// Logs of volumes without users, until they are closed.
#[derive(Default)]
struct ClosingLogs {
    logs: RefCell<BTreeMap<ImageSpec, Rc<ClosingLog>>>,
    /// Notified when a volume has lost its last user.
    let_go: Notify,
}

/// Log that is being closed.
#[derive(Default)]
struct ClosingLog {
    /// Log, while it is open.
    log: Weak<WriteLog>,
    result: RefCell<Option<forebay_block::Result<()>>>,
    ended: Notify,
}

impl ClosingLogs {
    fn begin(self: &Rc<Self>, spec: &ImageSpec, attachment: Rc<LogAttachment<ImageLog>>) {
        let log = attachment.log().map_or_else(Weak::new, |log| Rc::downgrade(&log));
        let closing = Rc::new(ClosingLog { log, ..ClosingLog::default() });
        self.logs.borrow_mut().insert(spec.clone(), closing.clone());
        let (all, own) = (self.clone(), spec.clone());
        let begun = try_spawn(async move {
            let result = attachment.close().await;
            drop(attachment);
            if let Err(error) = &result {
                tracing::warn!(image = %own, %error, "a write log was not closed cleanly; it is recovered when opened");
            }
            closing.result.replace(Some(result));
            closing.ended.notify_all();
            let mut logs = all.logs.borrow_mut();
            if logs.get(&own).is_some_and(|now| Rc::ptr_eq(now, &closing)) {
                logs.remove(&own);
            }
        });
        if begun.is_none() {
            self.logs.borrow_mut().remove(spec);
        }
    }

    /// Waits until no log of an image is being closed.
    async fn closed(&self, spec: &ImageSpec) -> forebay_block::Result<()> {
        let closing = self.logs.borrow().get(spec).cloned();
        match closing {
            Some(closing) => closing.closed().await,
            None => Ok(()),
        }
    }
}

impl ClosingLog {
    /// Waits until the log is closed; returns the outcome.
    async fn closed(&self) -> forebay_block::Result<()> {
        self.ended.wait_until(|| self.result.borrow().is_some()).await;
        self.result.borrow().clone().unwrap_or(Ok(()))
    }

    /// Returns the error of a log that is abandoned before it is closed.
    fn not_closed(&self, patience: Duration) -> forebay_block::Error {
        let unkept = self.log.upgrade().map_or(0, |log| log.unkept_bytes());
        let mut text = format!("it could not be closed in {} s; it keeps its data", patience.as_secs());
        if unkept > 0 {
            text.push_str(&format!(", but not {unkept} acknowledged bytes at most that no host has flushed"));
        }
        forebay_block::Error::new(ErrorKind::TimedOut, text)
    }
}

/// Open volumes, and images that are reserved exclusively.
pub struct Volumes {
    open: WeakMap<ImageSpec, Volume>,
    /// Images reserved exclusively: being created, removed, renamed, or rolled back.
    reserved: Rc<RefCell<BTreeSet<ImageSpec>>>,
    /// Per-image lock that serializes opening, so that no image is opened twice.
    pub(super) opening: KeyedLock<ImageSpec>,
    closing: Rc<ClosingLogs>,
    /// Shares of the volumes of this core.
    shares: Rc<CoreShare>,
}

/// Exclusive reservation of an image; released when dropped.
pub struct ReservedImage {
    spec: ImageSpec,
    reserved: Rc<RefCell<BTreeSet<ImageSpec>>>,
}

impl Drop for ReservedImage {
    fn drop(&mut self) {
        self.reserved.borrow_mut().remove(&self.spec);
    }
}

impl Volumes {
    /// Creates an empty set.
    pub fn new() -> Self {
        Self {
            open: WeakMap::new(),
            reserved: Rc::default(),
            opening: KeyedLock::new(),
            closing: Rc::default(),
            shares: Rc::default(),
        }
    }

    /// Reserves an image exclusively; fails while it is open or reserved.
    pub fn reserve(&self, spec: &ImageSpec) -> Result<ReservedImage> {
        if self.is_open(spec) {
            return Err(Failure::new(FailureKind::Busy, format!("the image {spec} is in use"))
                .hint(format!("end its export with 'forebay detach {spec}', or wait for the transfer that runs")));
        }
        if !self.reserved.borrow_mut().insert(spec.clone()) {
            return Err(being_changed(spec));
        }
        Ok(ReservedImage { spec: spec.clone(), reserved: self.reserved.clone() })
    }

    /// Returns whether the image is open.
    pub fn is_open(&self, spec: &ImageSpec) -> bool {
        self.open.contains(spec)
    }

    /// Forgets an image that was removed.
    pub fn forget(&self, spec: &ImageSpec) {
        self.open.remove(spec);
    }

    /// Returns the volume of an image, if it is open.
    pub fn find(&self, spec: &ImageSpec) -> Option<Rc<Volume>> {
        self.open.get(spec)
    }

    /// Waits until a volume has no users and its log is closed; returns the outcome.
    pub async fn closed(&self, spec: &ImageSpec) -> forebay_block::Result<()> {
        loop {
            let next = self.closing.let_go.wait();
            if !self.is_open(spec) {
                return self.closing.closed(spec).await;
            }
            next.await;
        }
    }

    /// Closes the logs of all volumes in parallel, used or not; returns the outcomes.  Logs that take longer than
    /// `patience` are left as after a power failure, and recovery restores what they hold.  That is everything they
    /// have acknowledged, unless a log in write-back acknowledgement mode has no space or a failing medium.
    pub async fn close_all(&self, patience: Duration) -> Vec<(ImageSpec, forebay_block::Result<()>)> {
        let deadline = now() + patience;
        for spec in self.open_specs() {
            if let Some(volume) = self.find(&spec) {
                self.closing.begin(&spec, volume.attachment.clone());
            }
        }
        // Cloned first: logs that close during another wait disappear from the list.
        let closing = self.closing.logs.borrow().clone();
        let mut results = Vec::new();
        for (spec, log) in closing {
            let closed = timeout(deadline.since(now()), log.closed()).await.unwrap_or_else(|_| {
                let error = log.not_closed(patience);
                tracing::warn!(image = %spec, %error, "cannot close a write log; it is recovered when opened");
                Err(error)
            });
            results.push((spec, closed));
        }
        results
    }

    /// Returns the counters of the open volumes that have limits, or had some.
    pub fn limit_counters(&self) -> Vec<(ImageSpec, QosStats)> {
        let open = self.open.values().into_iter();
        let limited = open.filter(|volume| volume.has_limits() || volume.qos_stats().throttled > 0);
        limited.map(|volume| (volume.spec.clone(), volume.qos_stats())).collect()
    }

    /// Ends all limits, as the daemon stops: no request that is in flight waits for one.
    pub fn end_limits(&self) {
        self.open.values().iter().for_each(|volume| volume.qos.end());
    }

    /// Returns the images that are open.
    pub fn open_specs(&self) -> Vec<ImageSpec> {
        self.open.keys()
    }
}

fn being_changed(spec: &ImageSpec) -> Failure {
    Failure::new(FailureKind::Busy, format!("the image {spec} is being made, removed, renamed or rolled back"))
        .hint("try again when that is done")
}

impl Engine {
    /// Opens an image, or shares the volume if it is open.
    pub async fn open_volume(&self, spec: &ImageSpec) -> Result<Rc<Volume>> {
        let _turn = self.volumes.opening.lock(spec).await;
        if self.volumes.reserved.borrow().contains(spec) {
            return Err(being_changed(spec));
        }
        self.close_fenced(spec).await;
        self.open_shared(spec, false, false, VolumeOpening::Usual).await
    }

    /// Closes a volume that nobody uses and whose client the cluster has fenced: it is opened again as another client.
    async fn close_fenced(&self, spec: &ImageSpec) {
        let is_fenced = self.volumes.find(spec).is_some_and(|volume| volume.is_fenced());
        if is_fenced && !self.is_exported_alone(spec) {
            tracing::info!(image = %spec, "the cluster has fenced the client of an open image; opening it again as another one");
            self.let_go_of_log(spec);
            // A transfer may still use it; it fails soon.
            let _ = timeout(REOPEN_MAX, self.volumes.closed(spec)).await;
        }
    }

    /// Opens an image as its owner in a gateway group, or takes its log over.
    pub(super) async fn open_owned(&self, spec: &ImageSpec, opening: VolumeOpening) -> Result<Rc<Volume>> {
        let _turn = self.volumes.opening.lock(spec).await;
        self.close_fenced(spec).await;
        self.open_as(spec, opening).await
    }

    /// Opens an image, and the log that it has as `opening` says.  The caller has the turn of opening it.
    pub(super) async fn open_as(&self, spec: &ImageSpec, opening: VolumeOpening) -> Result<Rc<Volume>> {
        if self.volumes.reserved.borrow().contains(spec) {
            return Err(being_changed(spec));
        }
        self.open_shared(spec, false, false, opening).await
    }

    /// Keeps an image from being opened until the guard is dropped.
    #[cfg(test)]
    pub async fn block_opening(&self, spec: &ImageSpec) -> impl Sized + use<'_> {
        self.volumes.opening.lock(spec).await
    }

    /// Opens an image for reading only; this also succeeds if its features forbid writing it here.
    pub async fn open_volume_to_read(&self, spec: &ImageSpec) -> Result<Rc<Volume>> {
        let _turn = self.volumes.opening.lock(spec).await;
        if self.volumes.reserved.borrow().contains(spec) {
            return Err(being_changed(spec));
        }
        self.open_shared(spec, false, true, VolumeOpening::Usual).await
    }

    /// Opens an image that the caller has reserved.
    pub async fn open_reserved(&self, reserved: &ReservedImage) -> Result<Rc<Volume>> {
        let _turn = self.volumes.opening.lock(&reserved.spec).await;
        self.open_shared(&reserved.spec, true, false, VolumeOpening::Usual).await
    }

    async fn open_shared(
        &self,
        spec: &ImageSpec,
        is_reserved: bool,
        to_read: bool,
        opening: VolumeOpening,
    ) -> Result<Rc<Volume>> {
        if self.closing.get() {
            return Err(Failure::failed("the daemon is stopping").hint("try again when it runs again"));
        }
        let backend = self.pool(&spec.pool).await?;
        if let Some(volume) = self.volumes.find(spec) {
            if !to_read {
                volume.allow_writes().await.map_err(|error| self.image_failure(error, spec))?;
            }
            volume.attachment.settle().await.map_err(|error| log_failure(error, spec))?;
            self.keep_logged(spec, &volume);
            return Ok(volume);
        }
        // Its log, if it has one, is reopened after it was closed.
        let _ = self.volumes.closing.closed(spec).await;
        let mut unwritable = false;
        let mut opened = Image::open(backend.clone(), &spec.image, Default::default()).await;
        if let Err(error) = &opened
            && to_read
            && error.kind() == ErrorKind::Unsupported
        {
            let refusal = error.clone();
            unwritable = true;
            opened = Image::open(backend, &spec.image, ImageOpenOptions { read_only: true }).await;
            // A write log needs an image that accepts write-back; without the log, hosts would read stale data.
            if let Ok(image) = &opened
                && load_record(image).await.map_err(|error| self.image_failure(error, spec))?.log.is_some()
            {
                image.clone().close().await;
                return Err(self.image_failure(refusal, spec).hint(
                    "its write log keeps the data that is not written back; disable the feature and it is served again",
                ));
            }
        }
        let image = opened.map_err(|error| self.image_failure(error, spec))?;
        if opening == VolumeOpening::Usual {
            self.refuse_grouped_log(spec, &image).await?;
        }
        let changes = Rc::new(InFlightTracker::default());
        let (shared, qos) = (image.client().is_some(), VolumeQos::new(QosLimits::default()));
        let reservations = reservations_of(&image, &changes, &qos).await;
        let keeper = self.image_log(spec, &image, &changes);
        let device = delayed(image.clone());
        let attachment = match opening {
            VolumeOpening::Usual | VolumeOpening::AsOwner => LogAttachment::open(keeper, device).await,
            VolumeOpening::TakeOver(term) => LogAttachment::take_over(keeper, device, term).await,
        };
        let attachment = match attachment {
            Ok(attachment) => Rc::new(attachment),
            Err(error) => {
                let record = load_record(&image).await;
                let log = record.ok().and_then(|record| record.log);
                return Err(match &log {
                    Some(log) => self.opening_failure(error, spec, log),
                    None => log_failure(error, spec),
                });
            }
        };
        let weak = Rc::downgrade(&attachment);
        image.set_lock_check(Rc::new(move || {
            let attachment = weak.upgrade();
            Box::pin(async move {
                match attachment {
                    Some(attachment) => attachment.check_record().await,
                    None => Ok(()),
                }
            })
        }));
        image.set_operations(Rc::new(VolumeOperations::new(self.this.borrow().clone(), spec)));
        let (spec, closing) = (spec.clone(), self.volumes.closing.clone());
        let limits = Rc::new(LimitSource::new(&image, self.default_options()));
        let times = UseTimes::new(&image);
        let volume = Rc::new(Volume {
            image,
            reservations: RefCell::new(reservations),
            changes,
            snapshotting: Semaphore::new(1),
            gate: Rc::default(),
            qos,
            share: (!shared).then(|| VolumeShare::new(self.volumes.shares.clone())),
            limits,
            times,
            attachment,
            spec: spec.clone(),
            closing,
            unwritable: Cell::new(unwritable),
            encrypted: Cell::new(None),
            mapped_writes: MappedWrites::default(),
            fenced: Cell::new(false),
        });
        if !is_reserved && self.volumes.reserved.borrow().contains(&spec) {
            // A rename or removal began while the image was being opened.
            return Err(being_changed(&spec));
        }
        self.keep_logged(&spec, &volume);
        self.volumes.open.insert(spec, &volume);
        // Read only now: a change from here on finds the volume, and is read after this.
        volume.follow_limits();
        volume.reload_limits().await;
        Ok(volume)
    }
}

#[cfg(test)]
mod tests {
    use forebay_reactor::{DriverChoice, Reactor, spawn, yield_now};

    use super::*;

    #[test]
    fn a_log_that_fails_to_close_while_another_is_waited_for_is_told_of() {
        let reactor = Reactor::system(DriverChoice::Auto).expect("a reactor");
        reactor.block_on(async {
            let volumes = Volumes::new();
            let spec = |text: &str| text.parse::<ImageSpec>().expect("a spec");
            let (first, second) = (Rc::new(ClosingLog::default()), Rc::new(ClosingLog::default()));
            let logs = [(spec("ram/a"), first.clone()), (spec("ram/b"), second.clone())];
            volumes.closing.logs.borrow_mut().extend(logs);
            let own = volumes.closing.clone();
            drop(spawn(async move {
                let failure = forebay_block::Error::new(ErrorKind::Io, "its medium is worn");
                for (log, of, result) in [(second, "ram/b", Err(failure)), (first, "ram/a", Ok(()))] {
                    yield_now().await;
                    log.result.replace(Some(result));
                    log.ended.notify_all();
                    own.logs.borrow_mut().remove(&spec(of));
                }
            }));
            let results = volumes.close_all(Duration::from_secs(60)).await;
            let failed: Vec<String> =
                results.iter().filter(|(_, closed)| closed.is_err()).map(|(spec, _)| spec.to_string()).collect();
            assert_eq!((results.len(), failed), (2, vec!["ram/b".to_owned()]));
        });
    }

    #[test]
    fn a_reserved_image_is_reserved_once() {
        let volumes = Volumes::new();
        let spec: ImageSpec = "ram/x".parse().expect("a spec");
        let held = volumes.reserve(&spec).expect("free");
        assert_eq!(volumes.reserve(&spec).err().expect("held").kind, FailureKind::Busy);
        drop(held);
        volumes.reserve(&spec).expect("free again");
    }
}
