//! Images mapped to block devices of this machine, through the kernel's NBD client.
//!
//! The design is in `docs/design/map.md`.

mod device;
mod kernel;
mod record;
mod supervise;
#[cfg(test)]
mod tests;
mod users;
mod writes;

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::Duration;

use forebay_nbd::kernel::control::NewNbdDevice;
use forebay_nbd::wire::transmission;
use forebay_reactor::sync::{KeyedLock, Notify, Semaphore};
use forebay_reactor::{JoinHandle, sleep};

use super::Engine;
use super::identity::random_hex;
use super::offload::offload;
use crate::api::{AttachRequest, Front, MapRequest, MappedImage};
use crate::failure::{Failure, FailureKind, Result};
use crate::spec::{ImageSpec, image_spec};
use kernel::{LinkEvents, NbdControl, NegotiatedSockets, Subscribe};
use record::MappingRecord;
pub use writes::MappedWrites;

/// Maximum number of connections of a device.
pub const CONNECTIONS_MAX: u32 = 16;
/// Maximum seconds after which a request is sent again: the kernel counts them in an `unsigned int` of jiffies.
pub const TIMEOUT_MAX_S: u64 = 24 * 60 * 60;
/// Maximum seconds for which requests wait for a connection.
pub const RECONNECT_TIMEOUT_MAX_S: u64 = 30 * TIMEOUT_MAX_S;
/// Logical block size of devices in bytes, as the kernel's rbd client has it: partition tables count in it.
const BLOCK_SIZE: u64 = 512;
/// Maximum time for the kernel to create or to end a device.
const DEVICE_WAIT: Duration = Duration::from_secs(10);
/// Time after which a device that is in use counts as such: udev opens devices for a moment.
const BUSY_WAIT: Duration = Duration::from_secs(1);
/// Polling interval of `/sys` and `/proc`.
const LOOK: Duration = Duration::from_millis(20);

/// Mapping of one image.
struct Mapping {
    spec: ImageSpec,
    record: RefCell<MappingRecord>,
    /// Wakes the supervisor when a flag below is set.
    wake: Notify,
    /// Set while a connection is to be replaced.
    is_dead: Cell<bool>,
    /// Set if the size of the image may have changed.
    is_resized: Cell<bool>,
    /// Set from the beginning of `unmap` on.
    is_ending: Cell<bool>,
    /// Set if this process does not serve it, and the kernel had no device of it when it was loaded.
    is_stale: Cell<bool>,
    /// Last failure to reconnect, until one succeeds.
    failure: RefCell<Option<Failure>>,
    /// Task that watches the size of the image.
    size_watch: RefCell<Option<JoinHandle<()>>>,
}

impl Mapping {
    fn new(spec: ImageSpec, record: MappingRecord) -> Rc<Self> {
        Rc::new(Self {
            spec,
            record: RefCell::new(record),
            wake: Notify::new(),
            is_dead: Cell::new(false),
            is_resized: Cell::new(false),
            is_ending: Cell::new(false),
            is_stale: Cell::new(false),
            failure: RefCell::default(),
            size_watch: RefCell::default(),
        })
    }

    /// Ends its tasks.
    fn end(&self) {
        self.is_ending.set(true);
        self.wake.notify_all();
        if let Some(watch) = self.size_watch.take() {
            watch.abort();
        }
    }

    /// Marks its connections as ended, to be replaced.
    fn mark_dead(&self) {
        self.is_dead.set(true);
        self.wake.notify_all();
    }

    /// Returns the failure of what an image cannot undergo while it is mapped.
    fn in_use(&self) -> Failure {
        let device = self.record.borrow().device.map(device::path).unwrap_or_default();
        let what = format!("the image {} is mapped to {}", self.spec, device.display());
        Failure::new(FailureKind::Busy, what).hint(format!("end that first: forebay unmap {}", self.spec))
    }

    /// Checks that an image is the mapped one.
    ///
    /// # Errors
    /// If it has another id.  The kernel keeps the writes to a device without connections, and they are not for it.
    fn check_image(&self, id: &str) -> Result<()> {
        let record = self.record.borrow();
        match record.image_id.as_deref() {
            Some(mapped) if mapped != id => {
                let spec = &self.spec;
                let device = record.device.map(device::path).unwrap_or_default();
                let what = format!(
                    "{} is mapped to the image with the id {mapped}, and {spec} is another one now, with the id {id}",
                    device.display()
                );
                Err(Failure::failed(what).hint(format!(
                    "give the mapped image its name back, or end the device with 'forebay unmap --force {spec}': requests \
                     that wait fail then"
                )))
            }
            _ => Ok(()),
        }
    }

    fn describe(&self, is_connected: bool, is_exported: bool, is_served: bool) -> MappedImage {
        let record = self.record.borrow();
        let failed = |kind, what: &str| Some(Failure::new(kind, what));
        let error = match (is_connected, is_exported) {
            (false, _) => failed(FailureKind::NotFound, "the kernel has ended the device; unmap it"),
            _ if !is_served => failed(FailureKind::Unreachable, "no daemon runs; requests wait for it"),
            (true, false) => failed(FailureKind::NotFound, "the image is no longer exported; requests wait for it"),
            (true, true) => self.failure.borrow().clone(),
        };
        MappedImage {
            id: record.device.map(|index| index.to_string()).unwrap_or_default(),
            pool: record.pool.clone(),
            namespace: self.spec.namespace().into(),
            name: self.spec.name().into(),
            snap: "-".into(),
            device: record.device.map(device::path).unwrap_or_default(),
            error,
        }
    }
}

/// Mappings of a data directory.
pub struct Mappings {
    data: PathBuf,
    mappings: RefCell<BTreeMap<ImageSpec, Rc<Mapping>>>,
    /// Per-image locks under which images are mapped and unmapped.
    turns: KeyedLock<ImageSpec>,
    /// Permit to write the file.
    saving: Semaphore,
    /// Set once the events of the kernel are received.
    is_watching: Cell<bool>,
    /// Subscribes to the events of the kernel.
    subscribe: Cell<Subscribe>,
}

impl Mappings {
    /// Loads the mappings from the data directory; nothing is reconnected yet.
    ///
    /// # Errors
    /// A file that cannot be read, is damaged, or has another version.
    pub fn load(data: &Path) -> Result<Self> {
        let mut mappings = BTreeMap::new();
        for record in record::load(data)? {
            let spec = image_spec(&record.pool, &record.image)?;
            mappings.insert(spec.clone(), Mapping::new(spec, record));
        }
        Ok(Self {
            data: data.into(),
            mappings: RefCell::new(mappings),
            turns: KeyedLock::new(),
            saving: Semaphore::new(1),
            is_watching: Cell::new(false),
            subscribe: Cell::new(LinkEvents::subscribe),
        })
    }

    fn get(&self, spec: &ImageSpec) -> Option<Rc<Mapping>> {
        self.mappings.borrow().get(spec).cloned()
    }

    fn all(&self) -> Vec<Rc<Mapping>> {
        self.mappings.borrow().values().cloned().collect()
    }

    /// Makes the mappings durable.
    async fn save(&self) -> Result<()> {
        let _permit = self.saving.acquire(1).await;
        let records: Vec<MappingRecord> = self.all().iter().map(|mapping| mapping.record.borrow().clone()).collect();
        let data = self.data.clone();
        offload(move || record::save(&data, &records)).await
    }

    /// Marks the mappings whose device is gone, as after a reboot.  For a process that does not serve them: with the
    /// daemon, `unmap` removes them.  Reads `/sys`.
    pub fn mark_stale(&self) {
        for mapping in self.mappings.borrow().values() {
            let record = mapping.record.borrow();
            let found = device::connected(&record).or_else(|| device::find(&record.backend));
            mapping.is_stale.set(found.is_none());
        }
    }

    /// Refuses what would give the writes that the kernel keeps to another image, or to older content.
    ///
    /// # Errors
    /// `Busy` if the image is mapped.
    pub fn refuse_mapped(&self, spec: &ImageSpec) -> Result<()> {
        match self.get(spec).filter(|mapping| !mapping.is_stale.get()) {
            Some(mapping) => Err(mapping.in_use()),
            None => Ok(()),
        }
    }

    /// Refuses to end the export of an image that is mapped.
    ///
    /// # Errors
    /// `Busy` if it is.
    pub fn refuse_detach(&self, spec: &ImageSpec, front: Front) -> Result<()> {
        match self.get(spec).filter(|mapping| front == Front::Nbd && !mapping.is_ending.get()) {
            Some(mapping) => Err(mapping.in_use()),
            None => Ok(()),
        }
    }
}

impl Engine {
    /// Maps an image to a block device of this machine.
    ///
    /// # Errors
    /// `Exists` if it is mapped; `Denied` if the daemon may not configure the kernel's NBD client, or the export is
    /// read-only and the mapping is not; `Unsupported` if the kernel has no NBD client; those of an export.
    pub async fn map(self: Rc<Self>, request: MapRequest) -> Result<MappedImage> {
        let spec = image_spec(&request.pool, &request.image)?;
        check_timeouts(&request)?;
        if !(1..=CONNECTIONS_MAX).contains(&request.connections) {
            return Err(Failure::invalid(format!("a device has from 1 to {CONNECTIONS_MAX} connections")));
        }
        let socket = self.fronts.nbd().kernel_socket().ok_or_else(kernel::not_permitted)?;
        let _turn = self.mappings.turns.lock(&spec).await;
        if let Some(mapping) = self.mappings.get(&spec) {
            let device = mapping.record.borrow().device.map(device::path).unwrap_or_default();
            let what = format!("the image {spec} is mapped already, to {}", device.display());
            return Err(Failure::new(FailureKind::Exists, what).hint(format!("forebay unmap {spec}")));
        }
        let owns_export = match self.exports.nbd_access(&spec) {
            None => true,
            Some(true) if !request.read_only => {
                let what = format!("the image {spec} is exported read-only");
                return Err(Failure::new(FailureKind::Denied, what).hint("--read-only maps it so"));
            }
            Some(_) => false,
        };
        self.watch_links().await?;
        let record = MappingRecord {
            pool: spec.pool.clone(),
            image: spec.image.clone(),
            image_id: None,
            backend: format!("forebay:{spec}:{}", random_hex()?),
            boot: device::boot(),
            device: None,
            connections: request.connections,
            owns_export,
        };
        let mapping = Mapping::new(spec.clone(), record);
        self.mappings.mappings.borrow_mut().insert(spec.clone(), mapping.clone());
        match self.create_device(&mapping, &request, socket).await {
            Ok(()) => {
                self.supervise(&mapping);
                let mapped = mapping.describe(true, true, true);
                tracing::info!(image = %spec, device = %mapped.device.display(), read_only = request.read_only,
                    connections = request.connections, "an image is mapped");
                Ok(mapped)
            }
            Err(failure) => {
                if let Err(left) = self.remove_mapping(&mapping, true).await {
                    tracing::warn!(image = %spec, error = %left.message, "a mapping that failed was not ended");
                }
                Err(failure)
            }
        }
    }

    /// Exports the image if it is not, and creates the device.
    async fn create_device(
        self: &Rc<Self>,
        mapping: &Rc<Mapping>,
        request: &MapRequest,
        socket: PathBuf,
    ) -> Result<()> {
        // Durable before anything exists that would be left behind.
        self.mappings.save().await?;
        let (spec, owns_export) = (&mapping.spec, mapping.record.borrow().owns_export);
        if owns_export {
            let attach = AttachRequest {
                read_only: request.read_only,
                // Only this machine.
                hosts: vec!["unix".into()],
                ..AttachRequest::new(&spec.pool, &spec.image, Front::Nbd)
            };
            if let Err(failure) = self.clone().attach(attach).await {
                // Not this mapping's: another request may have created it meanwhile.
                mapping.record.borrow_mut().owns_export = false;
                return Err(failure);
            }
        }
        let sockets = self.negotiate(mapping, socket).await?;
        let (size, backend) = (sockets.export.size, mapping.record.borrow().backend.clone());
        let MapRequest { read_only, timeout_s, reconnect_timeout_s, .. } = *request;
        let index = offload(move || {
            let export = sockets.export;
            let read_only = if read_only { transmission::READ_ONLY } else { 0 };
            let device = NewNbdDevice {
                size: export.size,
                block_size: BLOCK_SIZE.max(export.block_min.into()),
                timeout: timeout_s,
                dead_connection_timeout: reconnect_timeout_s,
                server_flags: (export.flags | read_only).into(),
                sockets: sockets.fds(),
                backend,
            };
            NbdControl::open()?.connect(&device)
        })
        .await?;
        mapping.record.borrow_mut().device = Some(index);
        self.mappings.save().await?;
        let usable = wait_for(DEVICE_WAIT, move || device::is_usable(index, size)).await?;
        match usable {
            true => Ok(()),
            false => {
                let what = format!("{} did not appear within {DEVICE_WAIT:?}", device::path(index).display());
                Err(Failure::failed(what).hint("is devtmpfs mounted at /dev?"))
            }
        }
    }

    /// Makes connections to the image of a mapping, for the kernel.
    ///
    /// # Errors
    /// `NotFound` if the image is not exported; those of [`Mapping::check_image`].
    async fn negotiate(&self, mapping: &Rc<Mapping>, socket: PathBuf) -> Result<NegotiatedSockets> {
        self.bind_image(mapping).await?;
        let (name, connections) = (mapping.spec.to_string(), mapping.record.borrow().connections);
        let sockets = offload(move || NegotiatedSockets::connect(&socket, &name, connections)).await?;
        // Another image may have been exported by the name meanwhile.  Then either this sees it, or the connections are of
        // the export before, and end with it.
        self.bind_image(mapping).await?;
        Ok(sockets)
    }

    /// Checks that the open image is the one of a mapping, which takes its id if it has none yet, and prepares it for a
    /// client that outlives connections and the daemon.
    ///
    /// # Errors
    /// `NotFound` if the image is not open; those of [`Mapping::check_image`]; if the id cannot be recorded.
    async fn bind_image(&self, mapping: &Rc<Mapping>) -> Result<()> {
        let spec = &mapping.spec;
        let volume = self.volumes.find(spec);
        let volume = volume.ok_or_else(|| Failure::new(FailureKind::NotFound, format!("{spec} is not open")))?;
        let id = volume.image.id();
        mapping.check_image(id)?;
        volume.mapped_writes.enable();
        if mapping.record.borrow().image_id.is_none() {
            mapping.record.borrow_mut().image_id = Some(id.to_owned());
            // Durable before the kernel can send anything to it.
            if let Err(failure) = self.mappings.save().await {
                mapping.record.borrow_mut().image_id = None;
                return Err(failure);
            }
        }
        Ok(())
    }

    /// Ends the device of an image, and the export if the mapping created it.
    ///
    /// # Errors
    /// `NotFound` if the image is not mapped; without `force`, `Busy` if the device is in use, or not connected.
    pub async fn unmap(self: Rc<Self>, spec: &ImageSpec, force: bool) -> Result<()> {
        let _turn = self.mappings.turns.lock(spec).await;
        let Some(mapping) = self.mappings.get(spec) else {
            let what = format!("the image {spec} is not mapped");
            return Err(Failure::new(FailureKind::NotFound, what).hint("'forebay showmapped' lists what is mapped"));
        };
        let record = mapping.record.borrow().clone();
        let connected = offload(move || Ok(device::connected(&record))).await?;
        if let Some(index) = connected {
            match force {
                true => offload(move || NbdControl::open()?.disconnect(index)).await?,
                false => self.end_device(&mapping, index).await?,
            }
        }
        self.remove_mapping(&mapping, force).await?;
        tracing::info!(image = %spec, force, "an image was unmapped");
        Ok(())
    }

    /// Ends a device that nobody uses, after its dirty pages are written.
    async fn end_device(&self, mapping: &Mapping, index: u32) -> Result<()> {
        if mapping.is_dead.get() {
            let what = format!("{} is not connected, and its requests wait", device::path(index).display());
            return Err(Failure::new(FailureKind::Busy, what)
                .hint("'forebay showmapped' says why; --force ends it, and requests that wait fail"));
        }
        let mut left = BUSY_WAIT;
        loop {
            let ended = offload(move || {
                let claim = device::claim(index)?;
                NbdControl::open()?.disconnect(index)?;
                drop(claim);
                Ok(())
            });
            match ended.await {
                Err(failure) if failure.kind == FailureKind::Busy && !left.is_zero() => {
                    left = left.saturating_sub(LOOK);
                    sleep(LOOK).await;
                }
                Err(failure) => return Err(failure),
                Ok(()) => break,
            }
        }
        let record = mapping.record.borrow().clone();
        match wait_for(DEVICE_WAIT, move || device::connected(&record).is_none()).await? {
            true => Ok(()),
            false => Err(Failure::failed(format!("the kernel does not end {}", device::path(index).display()))),
        }
    }

    /// Removes a mapping with what is left of it: its export, and its device if `force` is set or it was not recorded.
    ///
    /// # Errors
    /// If the device cannot be ended, or the removal cannot be recorded.  The mapping is kept then, so that it can be
    /// unmapped again: a number in the file that the kernel has given to another device must not count as ours.
    async fn remove_mapping(&self, mapping: &Rc<Mapping>, force: bool) -> Result<()> {
        let spec = &mapping.spec;
        mapping.end();
        let record = mapping.record.borrow().clone();
        let owns_export = record.owns_export;
        let ended = offload(move || {
            // A device whose number was not recorded has the identifier.
            let left = device::connected(&record).or_else(|| device::find(&record.backend));
            match left.filter(|_| force || record.device.is_none()) {
                Some(index) => NbdControl::open()?.disconnect(index),
                None => Ok(()),
            }
        });
        ended.await?;
        // An export of another image by the name is not the mapping's.
        let is_own = self.volumes.find(spec).is_none_or(|volume| mapping.check_image(volume.image.id()).is_ok());
        if owns_export
            && is_own
            && let Err(failure) = self.end_own_export(spec, force).await
        {
            tracing::warn!(image = %spec, error = %failure.message, "the export of an unmapped image was not ended");
        }
        self.mappings.mappings.borrow_mut().remove(spec);
        let saved = self.mappings.save().await;
        saved.map_err(|failure| {
            self.mappings.mappings.borrow_mut().insert(spec.clone(), mapping.clone());
            let what = format_args!("the device of {spec} has ended, but its mapping cannot be removed");
            failure.context(what).hint(format!("once that is mended, say it again: forebay unmap {spec}"))
        })
    }

    /// Ends the export that a mapping created, once the connections of the device have ended.  An export that other
    /// hosts use is kept, unless `force` is set.
    async fn end_own_export(&self, spec: &ImageSpec, force: bool) -> Result<()> {
        let mut left = DEVICE_WAIT;
        loop {
            match self.detach(spec, Front::Nbd, force, false).await {
                Err(failure) if failure.kind == FailureKind::NotFound => return Ok(()),
                Err(failure) if failure.kind == FailureKind::Busy && !left.is_zero() => {
                    left = left.saturating_sub(LOOK);
                    sleep(LOOK).await;
                }
                ended => return ended,
            }
        }
    }

    /// Lists the mappings in the order of their devices.
    ///
    /// # Errors
    /// If no thread can be started.
    pub async fn list_mapped(&self) -> Result<Vec<MappedImage>> {
        let all = self.mappings.all();
        let records: Vec<MappingRecord> = all.iter().map(|mapping| mapping.record.borrow().clone()).collect();
        let connected: Vec<bool> =
            offload(move || Ok(records.iter().map(|record| device::connected(record).is_some()).collect())).await?;
        let is_served = self.options.daemon.is_some();
        let describe = |(mapping, is_connected): (&Rc<Mapping>, bool)| {
            mapping.describe(is_connected, self.exports.nbd_access(&mapping.spec).is_some(), is_served)
        };
        let mut listed: Vec<MappedImage> = all.iter().zip(connected).map(describe).collect();
        listed.sort_by_key(|mapped| (mapped.id.parse::<u32>().ok(), mapped.pool.clone(), mapped.name.clone()));
        Ok(listed)
    }

    /// Finds the image that is mapped to a device.
    ///
    /// # Errors
    /// `NotFound` if none is.
    pub fn mapped_to(&self, device: &str) -> Result<ImageSpec> {
        let index = device::index_of(device);
        let found = self.mappings.all().into_iter().find(|mapping| mapping.record.borrow().device == index);
        match found.filter(|_| index.is_some()) {
            Some(mapping) => Ok(mapping.spec.clone()),
            None => Err(Failure::new(FailureKind::NotFound, format!("no image is mapped to {device}"))
                .hint("'forebay showmapped' lists what is mapped")),
        }
    }
}

/// Checks the timeouts of a request.
///
/// # Errors
/// `Invalid` if one is too long.
fn check_timeouts(request: &MapRequest) -> Result<()> {
    for (option, given, max) in [
        ("--timeout", request.timeout_s, TIMEOUT_MAX_S),
        ("--reconnect-timeout", request.reconnect_timeout_s, RECONNECT_TIMEOUT_MAX_S),
    ] {
        if given > max {
            return Err(Failure::invalid(format!(
                "{option} {given}: at most {max} seconds, {} days",
                max / (24 * 60 * 60)
            )));
        }
    }
    Ok(())
}

/// Waits until a condition of the kernel holds; returns whether it does.
async fn wait_for(limit: Duration, condition: impl Fn() -> bool + Clone + Send + 'static) -> Result<bool> {
    let mut left = limit;
    loop {
        let condition = condition.clone();
        if offload(move || Ok(condition())).await? {
            return Ok(true);
        }
        if left.is_zero() {
            return Ok(false);
        }
        left = left.saturating_sub(LOOK);
        sleep(LOOK).await;
    }
}
