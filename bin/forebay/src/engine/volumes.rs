//! Images that are open, each once.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, BTreeSet};
use std::pin::Pin;
use std::rc::{Rc, Weak};
use std::task::{Context, Poll};
use std::time::Duration;

use forebay_block::reservation::{Keep, Reservations, Table};
use forebay_block::{BlockDevice, ErrorKind, Extent, ExtentMap, Geometry, LocalFuture, Reply, Request, SizeWatch};
use forebay_image::Image;
use forebay_reactor::sync::{KeyedLock, Notify};
use forebay_reactor::{Instant, now, timeout, try_spawn};
use forebay_writelog::{LogAttachment, WriteLog};

use super::Engine;
use super::delayed::delayed;
use super::log_keeper::ImageLog;
use super::logs::log_failure;
use super::meters::{Kind, Meter};
use super::underway::Underway;
use crate::failure::{Failure, FailureKind, Result};
use crate::spec::ImageSpec;

/// An open image.
pub struct Volume {
    /// The image.
    pub image: Rc<Image>,
    /// Who may read and write it, where that can be reserved; the error is why that is not known.
    pub reservations: forebay_block::Result<Option<Reservations>>,
    /// Changes that have not been answered.
    underway: Rc<Underway>,
    /// The image as a device, with its write log in front if it has one.
    pub attachment: Rc<LogAttachment<ImageLog>>,
    spec: ImageSpec,
    /// Where it says that its log is being closed, when nobody uses it any more.
    closing: Rc<ClosingLogs>,
    /// A request was refused because the cluster has fenced the client that has the image open.
    fenced: Cell<bool>,
}

/// The metadata under which an image keeps its reservations.
const RESERVATIONS_KEY: &str = "forebay.reservations";

/// Keeps reservations with their image.
struct WithImage {
    image: Weak<Image>,
    underway: Rc<Underway>,
}

impl Keep for WithImage {
    fn save(&self, table: Option<Vec<u8>>) -> LocalFuture<forebay_block::Result<()>> {
        let image = self.image.upgrade();
        Box::pin(async move {
            let closed = || forebay_block::Error::new(forebay_block::ErrorKind::ShuttingDown, "the volume is closed");
            image.ok_or_else(closed)?.set_metadata(RESERVATIONS_KEY, table).await
        })
    }

    fn drain(&self) -> LocalFuture<()> {
        let underway = self.underway.clone();
        Box::pin(async move { underway.drain().await })
    }
}

/// Takes charge of an image's reservations.
async fn reservations_of(image: &Rc<Image>, underway: &Rc<Underway>) -> forebay_block::Result<Option<Reservations>> {
    let keep = Rc::new(WithImage { image: Rc::downgrade(image), underway: underway.clone() });
    if image.is_shared() {
        return image.joint_reservations(RESERVATIONS_KEY, keep).await;
    }
    let table = match image.metadata(RESERVATIONS_KEY).await? {
        Some(stored) => Table::decode(&stored)?,
        None => Table::new(),
    };
    Ok(Some(Reservations::new(table, keep)))
}

impl Volume {
    /// Returns its write log.
    pub fn log(&self) -> Option<Rc<WriteLog>> {
        self.attachment.log()
    }

    /// Returns what requests go to: the log, or the image where there is none.
    pub fn top(&self) -> Rc<dyn BlockDevice> {
        self.attachment.device()
    }

    /// The cluster has fenced the client that has the image open: every request fails until it is opened anew.
    pub fn is_fenced(&self) -> bool {
        self.fenced.get() || self.image.is_fenced()
    }

    /// What a front serves.  Nothing, while it is not known who may write.
    pub fn device(self: &Rc<Self>, read_only: bool, meter: Meter) -> forebay_block::Result<Rc<dyn BlockDevice>> {
        let reservations = self.reservations.clone()?;
        Ok(Rc::new(Metered { volume: self.clone(), read_only, reservations, meter: Rc::new(meter) }))
    }

    /// Forgets who may read and write, whatever is stored, and lets everybody.
    pub async fn clear_reservations(&self) -> forebay_block::Result<()> {
        match &self.reservations {
            Ok(Some(reservations)) => reservations.clear_all().await,
            Ok(None) => Ok(()),
            Err(_) => self.image.set_metadata(RESERVATIONS_KEY, None).await,
        }
    }
}

/// A volume with its requests counted.
struct Metered {
    volume: Rc<Volume>,
    read_only: bool,
    reservations: Option<Reservations>,
    /// Shared with the requests: a count in the reactor's own memory, not atomic ones.
    meter: Rc<Meter>,
}

impl BlockDevice for Metered {
    fn geometry(&self) -> Geometry {
        let geometry = self.volume.image.geometry();
        Geometry { read_only: geometry.read_only || self.read_only, ..geometry }
    }

    fn submit(&self, request: Request) -> LocalFuture<forebay_block::Result<Reply>> {
        if self.read_only && request.is_write() {
            let error = forebay_block::Error::new(forebay_block::ErrorKind::ReadOnly, "a write to a read-only export");
            return Box::pin(std::future::ready(Err(error)));
        }
        let (kind, is_write) = (Kind::of(&request), request.is_write());
        let bytes = request.extent().map_or(0, |extent| extent.len);
        let started = now();
        let work = self.volume.top().submit(request);
        let measured = Measured { work, volume: self.volume.clone(), meter: self.meter.clone(), kind, bytes, started };
        match is_write {
            true => Box::pin(self.volume.underway.carry(measured)),
            false => Box::pin(measured),
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

/// A request that is counted when it ends.  Until then the volume is open.
struct Measured {
    work: LocalFuture<forebay_block::Result<Reply>>,
    volume: Rc<Volume>,
    meter: Rc<Meter>,
    kind: Kind,
    bytes: u64,
    started: Instant,
}

impl Future for Measured {
    type Output = forebay_block::Result<Reply>;

    fn poll(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let Poll::Ready(result) = self.work.as_mut().poll(cx) else { return Poll::Pending };
        self.meter.count(self.kind, self.bytes, self.started.elapsed(), result.is_err());
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
        // Nobody uses it any more: its log is closed in order, as far as there is somebody left to do it.
        if self.attachment.log().is_some_and(|log| !log.is_ending()) {
            self.closing.begin(&self.spec, self.attachment.clone());
        }
        self.closing.let_go.notify_all();
    }
}

/// The logs of volumes that nobody uses any more, until they are closed.
#[derive(Default)]
struct ClosingLogs {
    logs: RefCell<BTreeMap<ImageSpec, Rc<ClosingLog>>>,
    /// A volume has lost its last user.
    let_go: Notify,
}

/// One log that is being closed.
#[derive(Default)]
struct ClosingLog {
    /// The log, as long as it is open.
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
                tracing::warn!(image = %own, %error, "a write log was not closed in order; it is recovered when opened");
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
    /// Waits until it is closed; what came of that.
    async fn closed(&self) -> forebay_block::Result<()> {
        self.ended.wait_until(|| self.result.borrow().is_some()).await;
        self.result.borrow().clone().unwrap_or(Ok(()))
    }

    /// Returns the error of a log that is given up before it is closed.
    fn not_closed(&self, patience: Duration) -> forebay_block::Error {
        let unkept = self.log.upgrade().map_or(0, |log| log.unkept_bytes());
        let mut text = format!("it could not be closed in {} s; it keeps what it holds", patience.as_secs());
        if unkept > 0 {
            text.push_str(&format!(", but not {unkept} acknowledged bytes at most that no host has flushed"));
        }
        forebay_block::Error::new(ErrorKind::TimedOut, text)
    }
}

/// Fewest entries of volumes, open or not, that are worth looking through.
const SWEEP_MIN: usize = 64;

/// The open volumes, and who has an image to itself.
pub struct Volumes {
    open: RefCell<BTreeMap<ImageSpec, Weak<Volume>>>,
    /// Entries of `open` at which those that nobody holds are taken out.
    sweep_at: Cell<usize>,
    /// Images that somebody has to itself: being made, removed, or given another name.
    reserved: Rc<RefCell<BTreeSet<ImageSpec>>>,
    /// Each image is opened by one at a time, so that none is opened twice.
    pub(super) opening: KeyedLock<ImageSpec>,
    closing: Rc<ClosingLogs>,
}

/// An image that nobody else may open; given back when dropped.
pub struct Reserved {
    spec: ImageSpec,
    reserved: Rc<RefCell<BTreeSet<ImageSpec>>>,
}

impl Drop for Reserved {
    fn drop(&mut self) {
        self.reserved.borrow_mut().remove(&self.spec);
    }
}

impl Volumes {
    /// None is open.
    pub fn new() -> Self {
        Self {
            open: RefCell::default(),
            sweep_at: Cell::new(SWEEP_MIN),
            reserved: Rc::default(),
            opening: KeyedLock::new(),
            closing: Rc::default(),
        }
    }

    /// An image to oneself; refused while it is open or somebody else has it.
    pub fn reserve(&self, spec: &ImageSpec) -> Result<Reserved> {
        if self.is_open(spec) {
            return Err(Failure::new(FailureKind::Busy, format!("the image {spec} is in use"))
                .hint(format!("end its export with 'forebay detach {spec}', or wait for the transfer that runs")));
        }
        if !self.reserved.borrow_mut().insert(spec.clone()) {
            return Err(being_changed(spec));
        }
        Ok(Reserved { spec: spec.clone(), reserved: self.reserved.clone() })
    }

    /// Somebody holds it open.
    pub fn is_open(&self, spec: &ImageSpec) -> bool {
        self.open.borrow().get(spec).is_some_and(|volume| volume.strong_count() > 0)
    }

    /// Forgets an image that is gone.
    pub fn forget(&self, spec: &ImageSpec) {
        self.open.borrow_mut().remove(spec);
    }

    /// Returns a volume that somebody has open.
    pub fn find(&self, spec: &ImageSpec) -> Option<Rc<Volume>> {
        self.open.borrow().get(spec).and_then(Weak::upgrade)
    }

    /// Waits until nobody uses a volume any more and its log is closed; what came of that.
    pub async fn closed(&self, spec: &ImageSpec) -> forebay_block::Result<()> {
        loop {
            let next = self.closing.let_go.wait();
            if !self.is_open(spec) {
                return self.closing.closed(spec).await;
            }
            next.await;
        }
    }

    /// Closes the logs of all volumes, used or not, side by side; what came of that.  Those that take longer than
    /// `patience` are left as a power failure would leave them: what they hold is recovered from them.  That is all that
    /// they have acknowledged, unless the log of a volume that answers early has no room or a medium that fails.
    pub async fn close_all(&self, patience: Duration) -> Vec<(ImageSpec, forebay_block::Result<()>)> {
        let deadline = now() + patience;
        for spec in self.open_specs() {
            if let Some(volume) = self.find(&spec) {
                self.closing.begin(&spec, volume.attachment.clone());
            }
        }
        // Those that end while another is waited for are not found any more.
        let closing = self.closing.logs.borrow().clone();
        let mut results = Vec::new();
        for (spec, log) in closing {
            let closed = timeout(deadline.since(now()), log.closed()).await.unwrap_or_else(|_| {
                let error = log.not_closed(patience);
                tracing::warn!(image = %spec, %error, "a write log is left as it is; it is recovered when opened");
                Err(error)
            });
            results.push((spec, closed));
        }
        results
    }

    /// Returns the images that somebody has open.
    pub fn open_specs(&self) -> Vec<ImageSpec> {
        let open = self.open.borrow();
        open.iter().filter(|(_, volume)| volume.strong_count() > 0).map(|(spec, _)| spec.clone()).collect()
    }
}

fn being_changed(spec: &ImageSpec) -> Failure {
    Failure::new(FailureKind::Busy, format!("the image {spec} is being made, removed or renamed"))
        .hint("try again when that is done")
}

impl Engine {
    /// Opens an image, or shares it with those who have it open.
    pub async fn open_volume(&self, spec: &ImageSpec) -> Result<Rc<Volume>> {
        let _turn = self.volumes.opening.lock(spec).await;
        if self.volumes.reserved.borrow().contains(spec) {
            return Err(being_changed(spec));
        }
        self.open_shared(spec, false).await
    }

    /// Opens an image that one has to oneself.
    pub async fn open_reserved(&self, reserved: &Reserved) -> Result<Rc<Volume>> {
        let _turn = self.volumes.opening.lock(&reserved.spec).await;
        self.open_shared(&reserved.spec, true).await
    }

    async fn open_shared(&self, spec: &ImageSpec, is_reserved: bool) -> Result<Rc<Volume>> {
        if self.closing.get() {
            return Err(Failure::failed("the daemon is stopping").hint("try again when it runs again"));
        }
        let backend = self.pool(&spec.pool).await?;
        if let Some(volume) = self.volumes.find(spec) {
            volume.attachment.settle().await.map_err(|error| log_failure(error, spec))?;
            self.keep_logged(spec, &volume);
            return Ok(volume);
        }
        // Its log, if it has one, is opened where it was closed.
        let _ = self.volumes.closing.closed(spec).await;
        let image = Image::open(backend, &spec.image, Default::default())
            .await
            .map_err(|error| self.image_failure(error, spec))?;
        let underway = Rc::new(Underway::default());
        let reservations = reservations_of(&image, &underway).await;
        let keeper = self.image_log(spec, &image, &underway);
        let attachment = LogAttachment::open(keeper, delayed(image.clone())).await;
        let attachment = Rc::new(attachment.map_err(|error| log_failure(error, spec))?);
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
        let (spec, closing) = (spec.clone(), self.volumes.closing.clone());
        let volume = Rc::new(Volume {
            image,
            reservations,
            underway,
            attachment,
            spec: spec.clone(),
            closing,
            fenced: Cell::new(false),
        });
        if !is_reserved && self.volumes.reserved.borrow().contains(&spec) {
            // Somebody has begun to rename or remove it while it was opened.
            return Err(being_changed(&spec));
        }
        self.keep_logged(&spec, &volume);
        let mut open = self.volumes.open.borrow_mut();
        if open.len() >= self.volumes.sweep_at.get() {
            open.retain(|_, volume| volume.strong_count() > 0);
            self.volumes.sweep_at.set(SWEEP_MIN.max(2 * open.len()));
        }
        open.insert(spec, Rc::downgrade(&volume));
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
