//! What is exported, kept over restarts in a file.

mod entries;
mod pages;
mod restore;
mod saves;

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::path::Path;
use std::rc::Rc;

use forebay_block::BlockDevice;
use forebay_reactor::sync::KeyedLock;
use serde_json::Value;

use super::Engine;
use super::fronts::Exported;
use super::identity::{Uuid, format_uuid, parse_uuid};
use super::numbers::{Numbers, Retired};
use super::offload::offload;
use super::targets::{Change, Content, ExportName, TargetsFiles};
use super::volumes::Volume;
use crate::api::{self, Front, Target};
use crate::failure::{Failure, FailureKind, Result};
use crate::spec::{ImageSpec, RAM_POOL, image_spec};
use entries::{Listed, Unserved, check_initiators, check_nvme};
use saves::{Saves, lock};

/// Front and image: the name of an export.
type ExportKey = (Front, ImageSpec);

/// Export of an image over one front.
struct Export {
    request: api::Attach,
    /// Entry in the file, where that is more than `request` says, and cannot be understood.
    entry: Option<Value>,
    /// Identity of the image, once it was open.
    identity: String,
    state: ExportState,
    /// Set while it is being detached: the file does not list it any more, its number is not free yet.
    leaving: bool,
}

/// Whether hosts can reach an export.
enum ExportState {
    /// Hosts can reach it; the volume is open.
    Serving { volume: Rc<Volume>, device: Rc<dyn BlockDevice> },
    /// Image not open yet, since the daemon has started; who opens it serves the export.  The failure of the attempt
    /// before, if there was one.
    Opening(Option<Failure>),
    /// Failure to open or to serve it; it is tried again.
    Failed(Failure),
    /// Failure of its entry in the file, which somebody has to correct.
    Broken(Failure),
    /// Not to be served: no daemon runs, or it is being detached.
    Idle,
}

impl Export {
    /// Returns an export that the file lists.
    fn listed(request: api::Attach, entry: Option<Value>, state: ExportState) -> Self {
        Self { request, entry, identity: String::new(), state, leaving: false }
    }

    /// Returns why hosts do not reach it, if they do not.
    fn failure(&self, spec: &ImageSpec) -> Option<Failure> {
        match &self.state {
            ExportState::Broken(failure) | ExportState::Failed(failure) | ExportState::Opening(Some(failure)) => {
                Some(failure.clone())
            }
            ExportState::Opening(None) => Some(opening(spec)),
            ExportState::Serving { volume, .. } if volume.is_fenced() => Some(fenced(spec)),
            ExportState::Serving { .. } | ExportState::Idle => None,
        }
    }

    /// Returns its number, to be kept when it has ended.
    fn retired(&self) -> Option<Retired> {
        let unit = self.request.unit?;
        Some(Retired { front: self.request.front, unit, image: self.identity.clone() })
    }

    /// Returns whether the files do not list it: it is being detached, or its image does not survive a restart, unlike the
    /// number that hosts may remember.
    fn is_passing(&self) -> bool {
        self.leaving || self.request.pool == RAM_POOL
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

/// Export that hosts do not reach.
#[derive(Debug)]
pub struct UnservedExport {
    /// Its front.
    pub front: Front,
    /// Its image.
    pub image: ImageSpec,
    /// Kind of the failure.
    pub kind: FailureKind,
}

/// Connections that hosts hold, counted once for all exports.
struct Connections(BTreeMap<Front, BTreeMap<String, usize>>);

impl Connections {
    fn of(&self, (front, spec): &ExportKey) -> usize {
        self.0.get(front).and_then(|of_front| of_front.get(&spec.to_string())).copied().unwrap_or(0)
    }
}

/// Exports, by front and image.
pub struct Exports {
    exports: RefCell<BTreeMap<ExportKey, Export>>,
    unserved: RefCell<Vec<Unserved>>,
    /// Numbers that are kept for images that are not exported any more.
    numbers: RefCell<Numbers>,
    /// Locks under which the exports of an image change; an image that hangs holds up only those who want that image.
    turns: KeyedLock<ImageSpec>,
    saves: Saves,
}

impl Exports {
    /// Reads what the data directory remembers; nothing is open yet.
    pub fn load(data: &Path) -> Result<Self> {
        let (files, content) = TargetsFiles::open(data)?;
        let Listed { exports, unserved, retired } = entries::read_all(content);
        Ok(Self {
            exports: RefCell::new(exports),
            unserved: RefCell::new(unserved),
            numbers: RefCell::new(Numbers::new(retired)),
            turns: KeyedLock::new(),
            saves: Saves::new(files),
        })
    }

    /// Returns how many exports there are.
    pub fn count(&self) -> usize {
        self.exports.borrow().values().filter(|export| !export.leaving).count()
    }

    /// Returns where exports have their logs.
    pub fn log_places(&self) -> Vec<api::LogPlace> {
        self.exports.borrow().values().filter_map(|export| export.request.log.clone()).collect()
    }

    /// Closes every volume.
    pub fn let_go(&self) {
        let mut exports = self.exports.borrow_mut();
        exports.values_mut().for_each(|export| export.state = ExportState::Idle);
    }

    /// Returns the device behind an export name.
    pub fn device(&self, front: Front, name: &str) -> Option<Rc<dyn BlockDevice>> {
        let spec: ImageSpec = name.parse().ok()?;
        match &self.exports.borrow().get(&(front, spec))?.state {
            ExportState::Serving { device, .. } => Some(device.clone()),
            _ => None,
        }
    }

    /// Chooses the number of an export within its front.  It is taken by who inserts the export before anything else
    /// happens.
    fn choose_unit(&self, key: &ExportKey, wanted: Option<u32>, identity: &str) -> Result<Option<u32>> {
        if key.0.units().is_none() && wanted.is_none() {
            return Ok(None);
        }
        let exports = self.exports.borrow();
        let others = exports.iter().filter(|(other, _)| other.0 == key.0 && *other != key);
        // Of one that is asked for only whether somebody has it is of interest.
        let others = others.filter(|(_, export)| wanted.is_none() || export.request.unit == wanted);
        let taken: BTreeMap<u32, &ImageSpec> =
            others.filter_map(|((_, spec), export)| Some((export.request.unit?, spec))).collect();
        self.numbers.borrow().choose(key.0, &taken, wanted, identity)
    }

    /// Puts an export in the place of the one before it, if there was one; returns that.
    fn insert(&self, key: &ExportKey, export: Export) -> Option<Export> {
        self.exports.borrow_mut().insert(key.clone(), export)
    }

    /// Puts back what was there before an export; the number of one that is gone is kept for its image.
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

    /// Changes an export, if it is there.
    fn with<R>(&self, key: &ExportKey, change: impl FnOnce(&mut Export) -> R) -> Option<R> {
        self.exports.borrow_mut().get_mut(key).map(change)
    }

    /// Returns whether the start has not opened an export's image yet.
    fn is_opening(&self, key: &ExportKey) -> bool {
        let exports = self.exports.borrow();
        exports.get(key).is_some_and(|export| matches!(export.state, ExportState::Opening(_)) && !export.leaving)
    }

    /// Returns whether the images of some exports are still being opened.
    fn is_any_opening(&self) -> bool {
        self.exports.borrow().values().any(|export| matches!(export.state, ExportState::Opening(_)))
    }

    /// Makes the files say what there is of an export.  Changes that others wait to have written go with it.
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
            // With nothing waited for since the changes were taken: it has these, and no others.
            true => match self.content() {
                Ok(content) => {
                    offload(move || {
                        let mut files = lock(&files);
                        // On a full file system there may be room for a line where there is none for the list.
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

    /// Writes everything into the list, so that no journal is left for others to read.
    pub async fn settle(&self) -> Result<()> {
        let _turn = self.saves.turn.acquire(1).await;
        let files = self.saves.files.clone();
        if lock(&files).is_settled() {
            return Ok(());
        }
        let content = self.content()?;
        offload(move || lock(&files).replace(content)).await
    }

    /// Returns all that the files say of an export.
    fn change_of(&self, key: &ExportKey) -> Result<Change> {
        let (front, spec) = key;
        let name = ExportName { front: *front, pool: spec.pool.clone(), image: spec.image.clone() };
        let exports = self.exports.borrow();
        let Some(export) = exports.get(key) else { return Ok(Change { name, entries: Vec::new(), retired: None }) };
        if export.is_passing() {
            return Ok(Change { name, entries: Vec::new(), retired: export.retired() });
        }
        let mut entries = vec![export.entry()?];
        let unserved = self.unserved.borrow();
        entries
            .extend(unserved.iter().filter(|other| other.key.as_ref() == Some(key)).map(|other| other.entry.clone()));
        Ok(Change { name, entries, retired: None })
    }

    /// Returns all that the files say.
    fn content(&self) -> Result<Content> {
        let exports = self.exports.borrow();
        let (passing, lasting): (Vec<&Export>, Vec<&Export>) = exports.values().partition(|export| export.is_passing());
        let mut targets = lasting.into_iter().map(Export::entry).collect::<Result<Vec<Value>>>()?;
        let leaving = |key: &Option<ExportKey>| {
            key.as_ref().and_then(|key| exports.get(key)).is_some_and(|export| export.leaving)
        };
        let unserved = self.unserved.borrow();
        targets.extend(unserved.iter().filter(|other| !leaving(&other.key)).map(|other| other.entry.clone()));
        let mut retired: Vec<Retired> = self.numbers.borrow().retired().cloned().collect();
        retired.extend(passing.into_iter().filter_map(Export::retired));
        Ok(Content { targets, retired })
    }

    /// Takes an export off the file.  Until [`forget`](Self::forget) its number stays taken.
    async fn unlist(&self, key: &ExportKey) -> Result<()> {
        self.with(key, |export| export.leaving = true);
        let saved = self.save(key).await;
        if saved.is_err() {
            self.with(key, |export| export.leaving = false);
        }
        saved
    }

    /// Forgets an export that the file does not list; its number is kept for its image.
    fn forget(&self, key: &ExportKey) {
        self.unserved.borrow_mut().retain(|other| other.key.as_ref() != Some(key));
        self.put_back(key, None);
    }
}

/// Returns the identity that a request asks for.
fn identity_of(request: &api::Attach) -> Option<Uuid> {
    request.uuid.as_deref().and_then(parse_uuid)
}

/// Describes an export to its front.
fn exported<'a>(spec: &'a ImageSpec, request: &'a api::Attach, identity: &'a Uuid) -> Exported<'a> {
    let ana_group = request.ana_group.unwrap_or(1);
    let (unit, read_only) = (request.unit, request.read_only);
    Exported { spec, unit, identity, ana_group, read_only, hosts: &request.hosts }
}

/// Returns the failure of a volume that hosts reach and get nothing but errors from.
fn fenced(spec: &ImageSpec) -> Failure {
    let what = format!("the cluster has fenced this client (blocklist): all requests to {spec} fail");
    Failure::new(FailureKind::Denied, what).hint(format!(
        "when nobody else uses the image, and hosts have let go of it: forebay detach {spec}, and attach it again"
    ))
}

/// Returns the failure of a volume that hosts do not reach yet.
fn opening(spec: &ImageSpec) -> Failure {
    Failure::new(FailureKind::Unreachable, format!("the image {spec} is still being opened"))
        .hint("it is served as soon as it is open; the daemon's log says why if that fails")
}

impl Engine {
    /// Returns whether the image is exported over any front.
    pub fn is_exported(&self, spec: &ImageSpec) -> bool {
        let exports = self.exports.exports.borrow();
        Front::ALL.into_iter().any(|front| exports.contains_key(&(front, spec.clone())))
    }

    /// Lists what is exported.
    pub fn list_targets(&self) -> Vec<Target> {
        let connections = self.connections();
        let exports = self.exports.exports.borrow();
        let there = exports.iter().filter(|(_, export)| !export.leaving);
        there.map(|(key, export)| self.describe_target(&key.1, export, connections.of(key))).collect()
    }

    fn connections(&self) -> Connections {
        Connections(Front::ALL.into_iter().map(|front| (front, self.fronts.connections_by_export(front))).collect())
    }

    /// Lists the exports that hosts do not reach, with the kind of the failure.
    pub fn unserved_exports(&self) -> Vec<UnservedExport> {
        let exports = self.exports.exports.borrow();
        let failed = exports.iter().filter(|(_, export)| !export.leaving).filter_map(|((front, spec), export)| {
            let kind = export.failure(spec)?.kind;
            Some(UnservedExport { front: *front, image: spec.clone(), kind })
        });
        failed.collect()
    }

    fn describe_target(&self, spec: &ImageSpec, export: &Export, connections: usize) -> Target {
        let serving = matches!(export.state, ExportState::Serving { .. });
        let uris = if serving { self.fronts.uris(export.request.front, spec) } else { Vec::new() };
        Target {
            pool: spec.pool.clone(),
            image: spec.image.clone(),
            front: export.request.front,
            read_only: export.request.read_only,
            log: if serving { self.running_log(spec) } else { None },
            uri: uris.first().cloned(),
            uris,
            connections: if serving { connections } else { 0 },
            error: export.failure(spec),
        }
    }

    /// Exports an image; the same export again is no error.
    pub async fn attach(self: Rc<Self>, mut request: api::Attach) -> Result<Target> {
        let spec = image_spec(&request.pool, &request.image)?;
        // As it is written down, whatever it was called: `rados:rbd` is the pool `rbd`.
        (request.pool, request.image) = (spec.pool.clone(), spec.image.clone());
        check_nvme(&request)?;
        check_initiators(&request.hosts)?;
        if let Some(unit) = request.unit {
            request.front.check_unit(unit)?;
        }
        let _turn = self.exports.turns.lock(&spec).await;
        let key = (request.front, spec.clone());
        if self.exports.with(&key, |export| export.leaving) == Some(true) {
            let what = format!("the export of {spec} over {} is being detached", request.front.name());
            return Err(Failure::new(FailureKind::Busy, what).hint("try again when that is done"));
        }
        let before = self.exports.with(&key, |export| (export.request.clone(), export.entry.is_some()));
        if let Some((before, _)) = &before {
            request.unit = request.unit.or(before.unit);
            request.ana_group = request.ana_group.or(before.ana_group);
            request.uuid = request.uuid.or(before.uuid.clone());
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
            self.open_and_serve(&key, request).await?;
        }
        let exports = self.exports.exports.borrow();
        let export = exports.get(&key).ok_or_else(|| Failure::failed("the export is gone again"))?;
        Ok(self.describe_target(&spec, export, self.fronts.connections_of(key.0, &spec)))
    }

    /// Opens an image for an export, lets hosts reach it, and then adds it to the file.
    async fn open_and_serve(&self, key: &ExportKey, mut request: api::Attach) -> Result<()> {
        let spec = &key.1;
        let volume = self.open_volume(spec).await?;
        if volume.image.size() == 0 {
            return Err(Failure::invalid(format!("the image {spec} has 0 bytes, which no host can use"))
                .hint(format!("give it a size first: forebay resize {spec} --size 10G")));
        }
        // Who it is says which number it had before.
        let identity = format_uuid(&self.identity.volume(spec, volume.image.id()));
        // A number that cannot be had is known before anything changes.
        self.exports.choose_unit(key, request.unit, &identity)?;
        if let Some(place) = &request.log {
            self.ensure_log(spec, &volume, place).await?;
        }
        self.log_acquired(spec, &volume).await?;
        // Others may have been given numbers meanwhile.  From here until hosts can reach it, nothing is waited for.
        request.unit = self.exports.choose_unit(key, request.unit, &identity)?;
        let before = self.serve(key, request, volume)?;
        if before
            .as_ref()
            .is_some_and(|before| self.exports.with(key, |now| now.request == before.request) == Some(true))
        {
            // The file lists it as it is.
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
        tracing::info!(image = %spec, front = key.0.name(), unit, read_only, log, "an image is exported");
        Ok(())
    }

    /// Lets hosts reach an export; returns what was there before it.  When that fails, nothing has changed.
    fn serve(&self, key: &ExportKey, request: api::Attach, volume: Rc<Volume>) -> Result<Option<Export>> {
        let spec = &key.1;
        if self.closing.get() {
            return Err(Failure::failed("the daemon is stopping").hint("try again when it runs again"));
        }
        let device = volume
            .device(request.read_only, self.meters.meter(spec, Some(request.front)))
            .map_err(|error| self.reservations_failure(error, spec))?;
        let identity = self.identity.volume(spec, volume.image.id());
        let shown = identity_of(&request).unwrap_or(identity);
        let state = ExportState::Serving { volume, device: device.clone() };
        let export =
            Export { request: request.clone(), entry: None, identity: format_uuid(&identity), state, leaving: false };
        // Who is told of it finds its device.
        let before = self.exports.insert(key, export);
        if let Err(failure) = self.publish(key.0, &exported(spec, &request, &shown), &device) {
            match before {
                Some(before) => drop(self.exports.insert(key, before)),
                None => drop(self.exports.exports.borrow_mut().remove(key)),
            }
            return Err(failure);
        }
        if let Some(unit) = request.unit {
            self.exports.numbers.borrow_mut().take(key.0, unit);
        }
        Ok(before)
    }

    /// Ends an export.  While hosts are connected that is refused, unless it is forced, which disconnects them.
    /// With the last export of an image its write log is written back and given up, unless it is to be kept.  That of an
    /// image which the start has not opened yet is always kept: writing it back may take for ever.
    pub async fn detach(&self, spec: &ImageSpec, front: Front, force: bool, keep_log: bool) -> Result<()> {
        let key = (front, spec.clone());
        if self.exports.is_opening(&key) {
            // Who opens it, for however long, finds it gone.
            if let Err(failure) = self.exports.unlist(&key).await {
                // Its image may have been opened meanwhile, and it was not served as it was to go.  Otherwise it will be.
                self.exports.with(&key, |export| {
                    if !matches!(export.state, ExportState::Opening(_)) {
                        export.state = ExportState::Failed(failure.clone());
                    }
                });
                return Err(failure);
            }
            self.exports.forget(&key);
            if !self.has_open_log(spec) {
                // Who opens it closes its log again.
                return Ok(());
            }
            // It was opened meanwhile, for nobody else.  Its log is kept, as it is when the image is opened later.
            let _turn = self.exports.turns.lock(spec).await;
            return if self.is_exported(spec) { Ok(()) } else { self.end_log(spec, true).await };
        }
        let there = || match self.exports.with(&key, |export| export.leaving) {
            Some(false) => Ok(()),
            Some(true) | None => {
                let what = format!("the image {spec} is not exported over {}", front.name());
                Err(Failure::new(FailureKind::NotFound, what).hint("'forebay targets' lists what is exported"))
            }
        };
        // What is not there is not waited for.
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
        let served = self.exports.with(&key, |export| std::mem::replace(&mut export.state, ExportState::Idle));
        // Those who were just connecting, too.
        self.disconnect(front, spec).await;
        drop(served);
        self.exports.forget(&key);
        tracing::info!(image = %spec, front = front.name(), connections, force, keep_log, "an export was ended");
        if self.is_exported(spec) {
            return Ok(());
        }
        self.end_log(spec, keep_log).await
    }
}
