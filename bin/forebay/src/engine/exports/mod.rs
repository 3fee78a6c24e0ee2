//! Exports of images, persisted in a file across restarts.

mod entries;
mod failures;
mod grouped;
mod index;
mod pages;
mod replicas;
mod restore;
mod saves;
mod sockets;
mod within;

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::path::Path;
use std::rc::Rc;

use forebay_block::BlockDevice;
use forebay_export::list::{ExportChange, ExportName};
use forebay_export::{ExportNumbers, ExportState, RetiredNumber, TakenNumbers};
use forebay_reactor::sync::KeyedLock;
use serde_json::Value;

use super::Engine;
use super::fronts::{ExportedImage, VhostBinding};
use super::identity::{Uuid, format_uuid, parse_uuid};
use super::numbers::choose_number;
use super::offload::offload;
use super::targets::{TargetsContent, TargetsFiles};
use super::volumes::Volume;
use crate::api::{self, Front, ImageExport};
use crate::failure::{Failure, FailureKind, Result};
use crate::spec::{ImageSpec, RAM_POOL, image_spec};
pub use entries::check_initiators;
use entries::{Listed, Unserved, check_hosts, check_nvme};
use failures::{detaching, fenced, not_running, opening};
use index::ExportIndex;
use replicas::replicas_changed;
use saves::{Saves, lock};
pub use sockets::socket_taken;

/// Front and image: the name of an export.
type ExportKey = (Front, ImageSpec);

/// Export of an image over one front.
struct Export {
    request: api::AttachRequest,
    /// Entry in the file, if it has content beyond `request` that this build cannot parse.
    entry: Option<Value>,
    /// Identity of the image, known once the image was open.
    identity: String,
    life: Lifecycle,
}

/// Open volume of an export, and its device.
struct ServedExport {
    volume: Rc<Volume>,
    device: Rc<dyn BlockDevice>,
}

/// State of an export that is served or fails to be.
type Lifecycle = forebay_export::ExportLifecycle<ServedExport, Failure>;

impl Export {
    /// Creates an export that the file lists.
    fn listed(request: api::AttachRequest, entry: Option<Value>, life: Lifecycle) -> Self {
        Self { request, entry, identity: String::new(), life }
    }

    /// Returns the reason why hosts cannot reach it, if they cannot.
    fn failure(&self, spec: &ImageSpec) -> Option<Failure> {
        match self.life.state() {
            ExportState::Broken(failure) | ExportState::Failed(failure) | ExportState::Opening(Some(failure)) => {
                Some(failure.clone())
            }
            ExportState::Opening(None) => Some(opening(spec)),
            ExportState::Serving(served) if served.volume.is_fenced() => Some(fenced(spec)),
            ExportState::Serving(_) | ExportState::Idle => None,
        }
    }

    /// Returns its number, to be reserved for the image after the export has ended.
    fn retired(&self) -> Option<RetiredNumber<Front>> {
        let unit = self.request.unit?;
        let within = self.request.within().unwrap_or_default().to_owned();
        Some(RetiredNumber { front: self.request.front, within, unit, image: self.identity.clone() })
    }

    /// Returns whether the files omit it: it is being detached, or its image does not survive a restart, unlike the
    /// number that hosts may remember.
    fn is_passing(&self) -> bool {
        self.life.is_detaching() || self.request.pool == RAM_POOL
    }

    /// Returns its entry in the file.
    fn entry(&self) -> Result<Value> {
        match &self.entry {
            Some(entry) => Ok(entry.clone()),
            None => serde_json::to_value(&self.request)
                .map_err(|error| Failure::failed(format!("writing the exports: {error}"))),
        }
    }
}

/// Export that hosts cannot reach.
#[derive(Debug)]
pub struct UnservedExport {
    /// Front of the export.
    pub front: Front,
    /// Exported image.
    pub image: ImageSpec,
    /// Kind of the failure.
    pub kind: FailureKind,
}

/// Host connections, counted once for all exports.
struct Connections(BTreeMap<Front, BTreeMap<String, usize>>);

impl Connections {
    fn of(&self, (front, spec): &ExportKey) -> usize {
        self.0.get(front).and_then(|of_front| of_front.get(&spec.to_string())).copied().unwrap_or(0)
    }
}

/// Exports, by front and image.
pub struct Exports {
    exports: RefCell<ExportIndex>,
    unserved: RefCell<Vec<Unserved>>,
    /// Devices of the gateway group's exports, which its record lists.
    grouped: RefCell<BTreeMap<ExportKey, Rc<dyn BlockDevice>>>,
    /// Numbers reserved for images that are no longer exported.
    numbers: RefCell<ExportNumbers<Front>>,
    /// Per-image locks under which exports change; an image that hangs blocks only requests for that image.
    turns: KeyedLock<ImageSpec>,
    saves: Saves,
}

impl Exports {
    /// Loads the exports from the data directory; no image is opened yet.
    pub fn load(data: &Path) -> Result<Self> {
        let (files, content) = TargetsFiles::open(data)?;
        let Listed { exports, unserved, retired } = entries::read_all(content);
        Ok(Self {
            exports: RefCell::new(ExportIndex::new(exports)),
            unserved: RefCell::new(unserved),
            grouped: RefCell::default(),
            numbers: RefCell::new(ExportNumbers::new(retired)),
            turns: KeyedLock::new(),
            saves: Saves::new(files),
        })
    }

    /// Waits until no export of an image is being changed, and lets none be until the guard is dropped.
    pub async fn turn(&self, spec: &ImageSpec) -> impl Sized + use<'_> {
        self.turns.lock(spec).await
    }

    /// Returns the number of exports.
    pub fn count(&self) -> usize {
        self.exports.borrow().values().filter(|export| !export.life.is_detaching()).count()
    }

    /// Returns the locations of the exports' write logs.
    pub fn log_places(&self) -> Vec<api::LogPlace> {
        self.exports.borrow().values().filter_map(|export| export.request.log.clone()).collect()
    }

    /// Drops every export's volume.
    pub fn let_go(&self) {
        let mut exports = self.exports.borrow_mut();
        exports.values_mut().for_each(|export| drop(export.life.end()));
    }

    /// Returns the device of an export by its name.
    pub fn device(&self, front: Front, name: &str) -> Option<Rc<dyn BlockDevice>> {
        let spec: ImageSpec = name.parse().ok()?;
        let (key, exports) = ((front, spec), self.exports.borrow());
        let own = exports.get(&key).and_then(|export| export.life.served()).map(|served| served.device.clone());
        own.or_else(|| self.grouped.borrow().get(&key).cloned())
    }

    /// Chooses the number of an export within its front.  The caller must insert the export, which takes the number,
    /// before it awaits anything.
    fn choose_unit(
        &self,
        key: &ExportKey,
        within: Option<&str>,
        wanted: Option<u32>,
        identity: &str,
    ) -> Result<Option<u32>> {
        // Over vhost, only units of a controller have numbers.
        let has_number = key.0.units().is_some() && (key.0 != Front::Vhost || within.is_some());
        if !has_number && wanted.is_none() {
            return Ok(None);
        }
        let exports = self.exports.borrow();
        let within = within.unwrap_or_default();
        let listed = exports.get(key).filter(|export| export.request.within().unwrap_or_default() == within);
        let own = listed.and_then(|export| export.request.unit);
        let taken = TakenNumbers { owners: exports.owners(key.0, within), except: &key.1, own };
        choose_number(&self.numbers.borrow(), key.0, within, &taken, wanted, identity)
    }

    /// Inserts an export; returns the previous export under that key, if any.
    fn insert(&self, key: &ExportKey, export: Export) -> Option<Export> {
        self.exports.borrow_mut().insert(key.clone(), export)
    }

    /// Restores the previous export under a key; if there was none, the number is reserved for the image.
    fn put_back(&self, key: &ExportKey, before: Option<Export>) {
        let mut exports = self.exports.borrow_mut();
        let gone = match before {
            Some(before) => {
                exports.insert(key.clone(), before);
                None
            }
            None => exports.remove(key),
        };
        drop(exports);
        if let Some(retired) = gone.and_then(|export| export.retired()) {
            self.numbers.borrow_mut().retire(retired);
        }
    }

    /// Applies a change to an export, if it exists.
    fn with<R>(&self, key: &ExportKey, change: impl FnOnce(&mut Export) -> R) -> Option<R> {
        self.exports.borrow_mut().get_mut(key).map(change)
    }

    /// Returns whether the image of an export has not been opened since startup.
    fn is_opening(&self, key: &ExportKey) -> bool {
        let exports = self.exports.borrow();
        exports.get(key).is_some_and(|export| export.life.is_opening() && !export.life.is_detaching())
    }

    /// Returns whether images of some exports are still being opened.
    fn is_any_opening(&self) -> bool {
        self.exports.borrow().values().any(|export| export.life.is_opening())
    }

    /// Persists the state of an export.  Queued changes of other exports are written along with it.
    async fn save(&self, key: &ExportKey) -> Result<()> {
        let number = self.saves.enqueue(self.change_of(key)?);
        let _turn = self.saves.turn.acquire(1).await;
        if let Some(outcome) = self.saves.outcome(number) {
            return outcome;
        }
        let changes = self.saves.take_all();
        let files = self.saves.files.clone();
        let wants_replacing = lock(&files).wants_replacing();
        let outcome = match wants_replacing {
            // Nothing is awaited after the changes were taken, so the content has exactly these changes.
            true => match self.content() {
                Ok(content) => {
                    offload(move || {
                        let mut files = lock(&files);
                        // A full file system may have space for a journal line but not for the list.
                        files.replace(content).or_else(|failure| match files.takes_changes() {
                            true => files.append(&changes),
                            false => Err(failure),
                        })
                    })
                    .await
                }
                Err(failure) => Err(failure),
            },
            false => offload(move || lock(&files).append(&changes)).await,
        };
        self.saves.settle(number, &outcome);
        outcome
    }

    /// Writes everything to the list, so that no journal is left for other readers of the data directory.
    pub async fn settle(&self) -> Result<()> {
        let _turn = self.saves.turn.acquire(1).await;
        let files = self.saves.files.clone();
        if lock(&files).is_settled() {
            return Ok(());
        }
        let content = self.content()?;
        offload(move || lock(&files).replace(content)).await
    }

    /// Returns the complete persisted state of an export.
    fn change_of(&self, key: &ExportKey) -> Result<ExportChange<Front>> {
        let (front, spec) = key;
        let name = ExportName { front: *front, pool: spec.pool.clone(), image: spec.image.clone() };
        let exports = self.exports.borrow();
        let Some(export) = exports.get(key) else {
            return Ok(ExportChange { name, entries: Vec::new(), retired: None });
        };
        if export.is_passing() {
            return Ok(ExportChange { name, entries: Vec::new(), retired: export.retired() });
        }
        let mut entries = vec![export.entry()?];
        let unserved = self.unserved.borrow();
        entries
            .extend(unserved.iter().filter(|other| other.key.as_ref() == Some(key)).map(|other| other.entry.clone()));
        Ok(ExportChange { name, entries, retired: None })
    }

    /// Returns the complete persisted state of all exports.
    fn content(&self) -> Result<TargetsContent> {
        let exports = self.exports.borrow();
        let (passing, lasting): (Vec<&Export>, Vec<&Export>) = exports.values().partition(|export| export.is_passing());
        let mut targets = lasting.into_iter().map(Export::entry).collect::<Result<Vec<Value>>>()?;
        let leaving = |key: &Option<ExportKey>| {
            key.as_ref().and_then(|key| exports.get(key)).is_some_and(|export| export.life.is_detaching())
        };
        let unserved = self.unserved.borrow();
        targets.extend(unserved.iter().filter(|other| !leaving(&other.key)).map(|other| other.entry.clone()));
        let mut retired: Vec<RetiredNumber<Front>> = self.numbers.borrow().retired().cloned().collect();
        retired.extend(passing.into_iter().filter_map(Export::retired));
        Ok(TargetsContent { targets, retired })
    }

    /// Removes an export from the file.  Its number stays taken until [`forget`](Self::forget).
    async fn unlist(&self, key: &ExportKey) -> Result<()> {
        self.with(key, |export| export.life.begin_detach());
        let saved = self.save(key).await;
        if saved.is_err() {
            self.with(key, |export| export.life.abort_detach());
        }
        saved
    }

    /// Removes an export that is not in the file; its number is reserved for its image.
    fn forget(&self, key: &ExportKey) {
        self.unserved.borrow_mut().retain(|other| other.key.as_ref() != Some(key));
        self.put_back(key, None);
    }
}

/// Returns the UUID that a request specifies, if any.
fn identity_of(request: &api::AttachRequest) -> Option<Uuid> {
    request.uuid.as_deref().and_then(parse_uuid)
}

/// Describes an export to its front.
fn exported<'a>(spec: &'a ImageSpec, request: &'a api::AttachRequest, identity: &'a Uuid) -> ExportedImage<'a> {
    let ana_group = request.ana_group.unwrap_or(1);
    let (unit, read_only) = (request.unit, request.read_only);
    let (within, hosts) = (request.within(), request.hosts.as_slice());
    ExportedImage { spec, unit, identity, ana_group, read_only, within, hosts, socket: None }
}

impl Engine {
    /// Returns whether the image is exported over any front, by this daemon alone or by its gateway group.
    pub fn is_exported(&self, spec: &ImageSpec) -> bool {
        self.is_exported_alone(spec) || self.gateways.joined().is_some_and(|group| group.has(spec))
    }

    /// Returns whether this daemon alone exports the image over any front.
    pub fn is_exported_alone(&self, spec: &ImageSpec) -> bool {
        let exports = self.exports.exports.borrow();
        Front::ALL.into_iter().any(|front| exports.contains_key(&(front, spec.clone())))
    }

    /// Lists all exports.
    pub fn list_targets(&self) -> Vec<ImageExport> {
        let connections = self.connections();
        let exports = self.exports.exports.borrow();
        let there = exports.iter().filter(|(_, export)| !export.life.is_detaching());
        let own = there.map(|(key, export)| self.describe_target(&key.1, export, connections.of(key)));
        let grouped = self.gateways.joined().map(|group| group.exports(self)).unwrap_or_default();
        own.chain(grouped).collect()
    }

    fn connections(&self) -> Connections {
        Connections(Front::ALL.into_iter().map(|front| (front, self.fronts.connections_by_export(front))).collect())
    }

    /// Lists the exports that hosts cannot reach, with the kind of failure.
    pub fn unserved_exports(&self) -> Vec<UnservedExport> {
        let exports = self.exports.exports.borrow();
        let failed =
            exports.iter().filter(|(_, export)| !export.life.is_detaching()).filter_map(|((front, spec), export)| {
                let kind = export.failure(spec)?.kind;
                Some(UnservedExport { front: *front, image: spec.clone(), kind })
            });
        failed.collect()
    }

    fn describe_target(&self, spec: &ImageSpec, export: &Export, connections: usize) -> ImageExport {
        let serving = export.life.served().is_some();
        let uris = if serving { self.fronts.uris(export.request.front, spec) } else { Vec::new() };
        ImageExport {
            pool: spec.pool.clone(),
            image: spec.image.clone(),
            front: export.request.front,
            read_only: export.request.read_only,
            log: if serving { self.running_log(spec) } else { None },
            qos: export.life.served().and_then(|served| served.volume.describe_limits()),
            own_blocks: export.life.served().and_then(|served| api::own_block_state(served.volume.own_block_state())),
            uri: uris.first().cloned(),
            uris,
            vhost: export.request.vhost.clone(),
            connections: if serving { connections } else { 0 },
            error: export.failure(spec),
            warnings: export.life.served().map(|served| served.volume.warnings()).unwrap_or_default(),
        }
    }

    /// Exports an image; repeating an identical request is not an error.
    pub async fn attach(self: Rc<Self>, mut request: api::AttachRequest) -> Result<ImageExport> {
        let spec = image_spec(&request.pool, &request.image)?;
        // The normalized name is stored: `rados:rbd` is the pool `rbd`.
        (request.pool, request.image) = (spec.pool.clone(), spec.image.clone());
        check_nvme(&request)?;
        request.check_vhost()?;
        let names_one = request.within().is_some();
        self.check_within(&mut request)?;
        check_hosts(request.front, &request.hosts)?;
        if let Some(unit) = request.unit {
            request.front.check_unit(unit)?;
        }
        let _turn = self.exports.turns.lock(&spec).await;
        let is_own = self.exports.exports.borrow().contains_key(&(request.front, spec.clone()));
        if let Some(group) = self.group_of(&spec).filter(|_| !is_own) {
            return group.attach(self.clone(), request, spec).await;
        }
        let key = (request.front, spec.clone());
        if self.exports.with(&key, |export| export.life.is_detaching()) == Some(true) {
            return Err(detaching(&key));
        }
        self.join_socket(&key, &mut request)?;
        let before = self.exports.with(&key, |export| (export.request.clone(), export.entry.is_some()));
        let was_listed = before.is_some();
        let recorded = self.volumes.find(&spec).and_then(|volume| volume.attachment.recorded()).map(|log| log.place);
        let had = before.as_ref().and_then(|(before, _)| before.log.as_ref()).or(recorded.as_ref());
        let had = had.and_then(|place| place.replicas.clone());
        self.resolve_replicas(&mut request, had.as_deref()).await?;
        if let Some((before, _)) = &before {
            request.unit = request.unit.or(before.unit);
            request.ana_group = request.ana_group.or(before.ana_group);
            request.uuid = request.uuid.or(before.uuid.clone());
            if !names_one {
                (request.subsystem, request.target) = (before.subsystem.clone(), before.target.clone());
            }
        }
        if let Some((before, false)) = &before
            && let Some(place) = replicas_changed(before, &mut request, recorded.as_ref())
            && self.exports.device(request.front, &spec.to_string()).is_some()
        {
            return self.change_replicas(&key, request, &place).await;
        }
        let listed_twice = self.exports.unserved.borrow().iter().any(|other| other.key.as_ref() == Some(&key));
        if let Some((before, unclear)) = before
            && (before != request || unclear || listed_twice)
        {
            let how = if before.read_only { "read-only" } else { "for reading and writing" };
            let number = before.unit.map_or(String::new(), |unit| format!(", as number {unit}"));
            let what = match unclear || listed_twice {
                true => format!("targets.json does not say clearly how the image {spec} is exported already"),
                false => format!("the image {spec} is exported already, {how}{number}"),
            };
            return Err(Failure::new(FailureKind::Exists, what).hint(format!("end that first: forebay detach {spec}")));
        }
        if self.exports.device(request.front, &spec.to_string()).is_none() {
            self.open_and_serve(&key, request, was_listed).await?;
        } else if let Some(place) = &request.log
            && self.lacks_log(&spec)
        {
            // It was given up while the image was served: a new one takes its place.
            let volume = self.open_volume(&spec).await?;
            self.ensure_log(&spec, &volume, place).await?;
        }
        let exports = self.exports.exports.borrow();
        let export = exports.get(&key).ok_or_else(|| Failure::failed("the export was removed meanwhile"))?;
        Ok(self.describe_target(&spec, export, self.fronts.connections_of(key.0, &spec)))
    }

    /// Opens an image for an export, serves it to hosts, and then adds it to the file.
    async fn open_and_serve(&self, key: &ExportKey, mut request: api::AttachRequest, was_listed: bool) -> Result<()> {
        let spec = &key.1;
        let volume = match request.read_only {
            true => self.open_volume_to_read(spec).await?,
            false => self.open_volume(spec).await?,
        };
        if volume.image.size() == 0 {
            return Err(Failure::invalid(format!("the image {spec} has 0 bytes, which no host can use"))
                .hint(format!("give it a size first: forebay resize {spec} --size 10G")));
        }
        // The identity of the image selects the number it had before.
        let identity = format_uuid(&self.identity.volume(spec, volume.image.id()));
        volume.look_for_encryption().await;
        for warning in volume.warnings() {
            tracing::warn!(image = %spec, "{warning}");
        }
        // An unavailable number is reported before anything changes.
        self.exports.choose_unit(key, request.within(), request.unit, &identity)?;
        if let Some(place) = &request.log {
            self.ensure_log(spec, &volume, place).await?;
        }
        self.log_acquired(spec, &volume).await?;
        let socket = match &request.vhost {
            Some(options) => Some(VhostBinding::resolve(options).await?),
            None => None,
        };
        // An export that was still being opened can be detached without the image's lock.
        if self.exports.with(key, |export| export.life.is_detaching()).unwrap_or(was_listed) {
            return Err(detaching(key));
        }
        // Numbers and sockets may have been assigned meanwhile.  Nothing is awaited from here until hosts can reach the
        // export.
        request.unit = self.exports.choose_unit(key, request.within(), request.unit, &identity)?;
        self.join_socket(key, &mut request)?;
        let before = self.serve(key, request, volume, socket)?;
        if before
            .as_ref()
            .is_some_and(|before| self.exports.with(key, |now| now.request == before.request) == Some(true))
        {
            // The file already lists it in this form.
            return Ok(());
        }
        if let Err(failure) = self.exports.save(key).await {
            self.unpublish(key.0, spec);
            self.exports.put_back(key, before);
            self.disconnect(key.0, spec).await;
            return Err(failure);
        }
        let request = self.exports.with(key, |export| export.request.clone());
        let unit = request.as_ref().and_then(|request| request.unit).map(tracing::field::display);
        let log = request.as_ref().and_then(|request| request.log.as_ref()).map(tracing::field::display);
        let read_only = request.as_ref().is_some_and(|request| request.read_only);
        let within = request.as_ref().and_then(|request| request.within());
        let socket = request.as_ref().and_then(|request| request.socket_path());
        let socket = socket.map(|path| tracing::field::display(path.display()));
        tracing::info!(image = %spec, front = key.0.name(), unit, within, read_only, socket, log, "an image is exported");
        Ok(())
    }

    /// Serves an export to hosts; returns the previous export under that key.  On failure nothing has changed.
    fn serve(
        &self,
        key: &ExportKey,
        request: api::AttachRequest,
        volume: Rc<Volume>,
        socket: Option<VhostBinding>,
    ) -> Result<Option<Export>> {
        let spec = &key.1;
        if self.closing.get() {
            return Err(Failure::failed("the daemon is stopping").hint("try again when it runs again"));
        }
        let device = volume
            .device(request.read_only, self.meter(spec, Some(request.front)))
            .map_err(|error| self.reservations_failure(error, spec))?;
        let identity = self.identity.volume(spec, volume.image.id());
        let shown = identity_of(&request).unwrap_or(identity);
        // Marked in use whatever its pools have reported so far: requests of hosts wait on cluster settings that can
        // be reverted, instead of failing.
        volume.image.mark_in_use();
        let life = Lifecycle::serving(ServedExport { volume, device: device.clone() });
        let export = Export { request: request.clone(), entry: None, identity: format_uuid(&identity), life };
        // Inserted first: a host that learns of the export finds its device.
        let before = self.exports.insert(key, export);
        let exported = ExportedImage { socket: socket.as_ref(), ..exported(spec, &request, &shown) };
        if let Err(failure) = self.publish(key.0, &exported, &device) {
            match before {
                Some(before) => drop(self.exports.insert(key, before)),
                None => drop(self.exports.exports.borrow_mut().remove(key)),
            }
            return Err(failure);
        }
        if let Some(unit) = request.unit {
            self.exports.numbers.borrow_mut().take(&key.0, request.within().unwrap_or_default(), unit);
        }
        Ok(before)
    }

    /// Ends an export.  Fails while hosts are connected unless `force` is set, which disconnects them.  With the last
    /// export of an image its write log is written back and discarded, unless `keep_log` is set.  The log of an image
    /// that was not opened since startup is always kept: writing it back may never finish.
    pub async fn detach(&self, spec: &ImageSpec, front: Front, force: bool, keep_log: bool) -> Result<()> {
        if !force {
            self.mappings.refuse_detach(spec, front)?;
        }
        let key = (front, spec.clone());
        if let Some(group) = self.group_of(spec)
            && !self.exports.exports.borrow().contains_key(&key)
        {
            if keep_log && group.has_log(spec) {
                self.refuse_group_volume(spec, "written back and ended with its last export: leave out --keep-log")?;
            }
            let engine = self.this.borrow().upgrade().ok_or_else(not_running)?;
            return group.detach(engine, spec, front, force).await;
        }
        if self.exports.is_opening(&key) {
            // The task that is opening the image finds the export gone, however long that takes.
            if let Err(failure) = self.exports.unlist(&key).await {
                // The image may have been opened meanwhile, and was not served because the export was being detached.
                // Otherwise it will be.
                self.exports.with(&key, |export| export.life.fail_detach(failure.clone()));
                return Err(failure);
            }
            self.exports.forget(&key);
            if let Some(engine) = self.this.borrow().upgrade() {
                engine.fronts.serve_controllers(&engine);
            }
            if !self.has_open_log(spec) {
                // The task that opens the image closes its log again.
                return Ok(());
            }
            // It was opened meanwhile, and no other export uses it.  Its log is kept, as it is if the image is opened
            // later.
            let _turn = self.exports.turns.lock(spec).await;
            return if self.is_exported(spec) { Ok(()) } else { self.end_log(spec, true).await };
        }
        let there = || match self.exports.with(&key, |export| export.life.is_detaching()) {
            Some(false) => Ok(()),
            Some(true) | None => {
                let what = format!("the image {spec} is not exported over {}", front.name());
                Err(Failure::new(FailureKind::NotFound, what).hint("'forebay targets' lists what is exported"))
            }
        };
        // A missing export is reported without waiting for the lock.
        there()?;
        let _turn = self.exports.turns.lock(spec).await;
        there()?;
        let connections = self.fronts.connections_of(front, spec);
        if connections > 0 && !force {
            let what = format!("{connections} connection(s) to {spec} are open");
            let hint = "disconnect the hosts first, or say --force to do it from here";
            return Err(Failure::new(FailureKind::Busy, what).hint(hint));
        }
        self.exports.unlist(&key).await?;
        self.unpublish(front, spec);
        let served = self.exports.with(&key, |export| export.life.end());
        let limited = self.volumes.find(spec);
        if let Some(volume) = &limited {
            // Requests in flight complete before a connection ends; none of them waits for a limit meanwhile.
            volume.qos.end();
        }
        // Ends hosts that were just connecting, too.
        self.disconnect(front, spec).await;
        if let Some(volume) = limited.filter(|_| !self.closing.get()) {
            volume.qos.resume();
        }
        drop(served);
        self.exports.forget(&key);
        tracing::info!(image = %spec, front = front.name(), connections, force, keep_log, "an export was ended");
        if self.is_exported(spec) {
            return Ok(());
        }
        self.end_log(spec, keep_log).await
    }
}
