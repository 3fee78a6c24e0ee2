//! What is exported, kept over restarts in a file.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::rc::Rc;

use forebay_block::BlockDevice;
use forebay_nvmf::session::admin::ANA_GROUPS_MAX;
use forebay_reactor::sync::Semaphore;
use tokio::sync::oneshot;

use super::fronts::Exported;
use super::identity::{Uuid, format_uuid, parse_uuid};
use super::numbers::{Numbers, Retired};
use super::volumes::Volume;
use super::{Engine, targets};
use crate::api::{self, Front, Target};
use crate::failure::{Failure, FailureKind, Result};
use crate::spec::{ImageSpec, RAM_POOL, image_spec};

/// An export.
struct Export {
    request: api::Attach,
    /// What identifies the image, once it was open.
    identity: String,
    state: State,
}

/// Whether hosts can reach it.
enum State {
    /// They can; the volume is open.
    Serving { volume: Rc<Volume>, device: Rc<dyn BlockDevice> },
    /// They could not, because of this.
    Broken(Failure),
    /// No daemon runs.
    Idle,
}

impl Export {
    /// Its number, when it has ended.
    fn retired(&self) -> Option<Retired> {
        let unit = self.request.unit?;
        Some(Retired { front: self.request.front, unit, image: self.identity.clone() })
    }
}

/// The exports, by way and image.
pub struct Exports {
    exports: RefCell<BTreeMap<(Front, ImageSpec), Export>>,
    /// Numbers that are kept for images that are not exported any more.
    numbers: RefCell<Numbers>,
    data: PathBuf,
    /// One change at a time, so that the file is written in the order of the changes.
    changing: Semaphore,
}

impl Exports {
    /// What the data directory remembers; nothing is open yet.
    pub fn load(data: &Path) -> Result<Self> {
        let (targets, retired) = targets::load(data)?;
        let mut exports = BTreeMap::new();
        for request in targets {
            let spec = image_spec(&request.pool, &request.image)?;
            exports.insert((request.front, spec), Export { request, identity: String::new(), state: State::Idle });
        }
        let numbers = RefCell::new(Numbers::new(retired));
        Ok(Self { exports: RefCell::new(exports), numbers, data: data.into(), changing: Semaphore::new(1) })
    }

    /// How many there are.
    pub fn count(&self) -> usize {
        self.exports.borrow().len()
    }

    /// Where exports have their logs.
    pub fn log_places(&self) -> Vec<api::LogPlace> {
        self.exports.borrow().values().filter_map(|export| export.request.log.clone()).collect()
    }

    /// Closes every volume.
    pub fn let_go(&self) {
        let mut exports = self.exports.borrow_mut();
        exports.values_mut().for_each(|export| export.state = State::Idle);
    }

    /// The device behind an export name.
    pub fn device(&self, front: Front, name: &str) -> Option<Rc<dyn BlockDevice>> {
        let spec: ImageSpec = name.parse().ok()?;
        match &self.exports.borrow().get(&(front, spec))?.state {
            State::Serving { device, .. } => Some(device.clone()),
            State::Broken(_) | State::Idle => None,
        }
    }

    /// The number of a new export of an image within its front.
    fn choose_unit(&self, front: Front, wanted: Option<u32>, identity: &str) -> Result<Option<u32>> {
        let exports = self.exports.borrow();
        let of_front = exports.iter().filter(|((of, _), _)| *of == front);
        let taken: BTreeMap<u32, String> =
            of_front.filter_map(|((_, spec), export)| Some((export.request.unit?, spec.to_string()))).collect();
        self.numbers.borrow().choose(front, &taken, wanted, identity)
    }

    /// Makes the file say what there is.  The ram pool's images do not survive, so neither do their exports; hosts
    /// may remember their numbers all the same.
    async fn save(&self) -> Result<()> {
        let (list, retired) = {
            let exports = self.exports.borrow();
            let (passing, lasting): (Vec<&Export>, Vec<&Export>) =
                exports.values().partition(|export| export.request.pool == RAM_POOL);
            let list: Vec<api::Attach> = lasting.into_iter().map(|export| export.request.clone()).collect();
            let mut retired: Vec<Retired> = self.numbers.borrow().retired().cloned().collect();
            retired.extend(passing.into_iter().filter_map(Export::retired));
            (list, retired)
        };
        let data = self.data.clone();
        offload(move || targets::store(&data, list, retired)).await
    }
}

/// The identity that a request asks for.
fn identity_of(request: &api::Attach) -> Option<Uuid> {
    request.uuid.as_deref().and_then(parse_uuid)
}

/// What a front is told of an export.
fn exported<'a>(spec: &'a ImageSpec, request: &'a api::Attach, identity: &'a Uuid) -> Exported<'a> {
    let ana_group = request.ana_group.unwrap_or(1);
    let (unit, read_only) = (request.unit, request.read_only);
    Exported { spec, unit, identity, ana_group, read_only, hosts: &request.hosts }
}

/// Whether what only NVMe knows makes sense.
fn check_nvme(request: &api::Attach) -> Result<()> {
    if request.front != Front::Nvme && (request.uuid.is_some() || request.ana_group.is_some()) {
        return Err(Failure::invalid("uuid and ana_group are for exports over nvme"));
    }
    if let Some(uuid) = request.uuid.as_deref().filter(|text| parse_uuid(text).is_none_or(|uuid| uuid == [0; 16])) {
        return Err(Failure::invalid(format!("'{uuid}' is no UUID")).hint("uuidgen makes one"));
    }
    match request.ana_group {
        Some(group) if !(1..=ANA_GROUPS_MAX).contains(&group) => {
            Err(Failure::invalid(format!("ANA group {group}: from 1 to {ANA_GROUPS_MAX}")))
        }
        _ => Ok(()),
    }
}

/// Runs what blocks on a thread of its own, so that the reactor goes on.
pub(super) async fn offload<T: Send + 'static>(work: impl FnOnce() -> Result<T> + Send + 'static) -> Result<T> {
    let (sender, receiver) = oneshot::channel();
    let run = move || {
        // The one who waits may have gone.
        let _ = sender.send(work());
    };
    let spawned = std::thread::Builder::new().name("offload".into()).spawn(run);
    spawned.map_err(|error| Failure::io(error, "starting a thread"))?;
    receiver.await.unwrap_or_else(|_| Err(Failure::failed("a helper thread ended with a panic")))
}

/// Why hosts reach a volume, and get nothing but errors.
fn fenced(spec: &ImageSpec) -> Failure {
    let what = format!("the cluster has fenced this client (blocklist): all requests to {spec} fail");
    Failure::new(FailureKind::Denied, what).hint(format!(
        "when nobody else uses the image, and hosts have let go of it: forebay detach {spec}, and attach it again"
    ))
}

impl Engine {
    /// The image is exported in some way.
    pub fn is_exported(&self, spec: &ImageSpec) -> bool {
        self.exports.exports.borrow().keys().any(|(_, exported)| exported == spec)
    }

    /// What is exported.
    pub fn list_targets(&self) -> Vec<Target> {
        let exports = self.exports.exports.borrow();
        exports.iter().map(|((_, spec), export)| self.describe_target(spec, export)).collect()
    }

    fn describe_target(&self, spec: &ImageSpec, export: &Export) -> Target {
        let serving = matches!(export.state, State::Serving { .. });
        let uris = if serving { self.fronts.uris(export.request.front, spec) } else { Vec::new() };
        Target {
            pool: spec.pool.clone(),
            image: spec.image.clone(),
            front: export.request.front,
            read_only: export.request.read_only,
            log: if serving { self.running_log(spec) } else { None },
            uri: uris.first().cloned(),
            uris,
            connections: if serving { self.fronts.connections_of(export.request.front, spec) } else { 0 },
            error: match &export.state {
                State::Broken(failure) => Some(failure.clone()),
                State::Serving { volume, .. } if volume.is_fenced() => Some(fenced(spec)),
                State::Serving { .. } | State::Idle => None,
            },
        }
    }

    /// Exports an image; the same export again is no error.
    pub async fn attach(self: Rc<Self>, mut request: api::Attach) -> Result<Target> {
        let spec = image_spec(&request.pool, &request.image)?;
        check_nvme(&request)?;
        let _turn = self.exports.changing.acquire(1).await;
        let key = (request.front, spec.clone());
        let before = self.exports.exports.borrow().get(&key).map(|export| export.request.clone());
        let mut opened = None;
        request.unit = match &before {
            Some(before) => request.unit.or(before.unit),
            None => {
                // Who it is says which number it had before.
                let volume = self.open_volume(&spec).await?;
                let identity = format_uuid(&self.identity.volume(&spec, volume.image.id()));
                opened = Some(volume);
                self.exports.choose_unit(request.front, request.unit, &identity)?
            }
        };
        if let Some(before) = &before {
            request.ana_group = request.ana_group.or(before.ana_group);
            request.uuid = request.uuid.or(before.uuid.clone());
        }
        if let Some(before) = before.filter(|before| *before != request) {
            let how = if before.read_only { "read-only" } else { "for reading and writing" };
            let number = before.unit.map_or(String::new(), |unit| format!(", as number {unit}"));
            return Err(Failure::new(
                FailureKind::Exists,
                format!("the image {spec} is exported already, {how}{number}"),
            )
            .hint(format!("end that first: forebay detach {spec}")));
        }
        let serving = self.exports.device(request.front, &spec.to_string()).is_some();
        if !serving {
            let volume = match opened {
                Some(volume) => volume,
                None => self.open_volume(&spec).await?,
            };
            if let Some(place) = &request.log {
                self.ensure_log(&spec, &volume, place).await?;
            }
            self.log_acquired(&spec, &volume).await?;
            let device = volume.device(request.read_only).map_err(|error| self.reservations_failure(error, &spec))?;
            let image = volume.image.clone();
            let identity = self.identity.volume(&spec, image.id());
            let state = State::Serving { volume, device: device.clone() };
            let export = Export { request: request.clone(), identity: format_uuid(&identity), state };
            let retired = export.retired();
            let before = self.exports.exports.borrow_mut().insert(key.clone(), export);
            if let Some(taken) = &retired {
                self.exports.numbers.borrow_mut().take(taken.front, taken.unit);
            }
            if let Err(failure) = self.exports.save().await {
                let mut exports = self.exports.exports.borrow_mut();
                match before {
                    Some(before) => drop(exports.insert(key, before)),
                    None => {
                        exports.remove(&key);
                        // Nobody has seen it; who has it kept for him has it kept still.
                        retired.into_iter().for_each(|retired| self.exports.numbers.borrow_mut().retire(retired));
                    }
                }
                return Err(failure);
            }
            let shown = identity_of(&request).unwrap_or(identity);
            let exported = exported(&spec, &request, &shown);
            self.publish(key.0, &exported, &device);
        }
        let exports = self.exports.exports.borrow();
        let export = exports.get(&key).ok_or_else(|| Failure::failed("the export is gone again"))?;
        Ok(self.describe_target(&spec, export))
    }

    /// Ends an export.  While hosts are connected that is refused, unless it is forced, which disconnects them.
    /// With the last export of an image its write log is written back and given up, unless it is to be kept.
    pub async fn detach(&self, spec: &ImageSpec, front: Front, force: bool, keep_log: bool) -> Result<()> {
        let _turn = self.exports.changing.acquire(1).await;
        let key = (front, spec.clone());
        if !self.exports.exports.borrow().contains_key(&key) {
            let what = format!("the image {spec} is not exported over {}", front.name());
            return Err(Failure::new(FailureKind::NotFound, what).hint("'forebay targets' lists what is exported"));
        }
        let connections = self.fronts.connections_of(front, spec);
        if connections > 0 && !force {
            let what = format!("{connections} connection(s) to {spec} are open");
            let hint = "disconnect the hosts first, or say --force to do it from here";
            return Err(Failure::new(FailureKind::Busy, what).hint(hint));
        }
        let Some(removed) = self.exports.exports.borrow_mut().remove(&key) else { return Ok(()) };
        let retired = removed.retired();
        retired.iter().for_each(|retired| self.exports.numbers.borrow_mut().retire(retired.clone()));
        if let Err(failure) = self.exports.save().await {
            retired.iter().for_each(|retired| self.exports.numbers.borrow_mut().take(retired.front, retired.unit));
            self.exports.exports.borrow_mut().insert(key, removed);
            return Err(failure);
        }
        self.unpublish(front, spec);
        // Those who were just connecting, too.
        self.disconnect(front, spec).await;
        drop(removed);
        if self.is_exported(spec) {
            return Ok(());
        }
        self.end_log(spec, keep_log).await
    }

    /// Opens what was exported before the daemon was started.  What cannot be opened is kept, and says why.
    pub async fn restore_exports(&self) {
        let wanted: Vec<((Front, ImageSpec), api::Attach)> = {
            let exports = self.exports.exports.borrow();
            exports.iter().map(|(key, export)| (key.clone(), export.request.clone())).collect()
        };
        for (key, request) in wanted {
            let opened = self.open_volume(&key.1).await.and_then(|volume| {
                let device = volume.device(request.read_only);
                Ok((device.map_err(|error| self.reservations_failure(error, &key.1))?, volume))
            });
            let mut known = String::new();
            let state = match opened {
                Ok((device, volume)) => {
                    let identity = self.identity.volume(&key.1, volume.image.id());
                    known = format_uuid(&identity);
                    let shown = identity_of(&request).unwrap_or(identity);
                    let exported = exported(&key.1, &request, &shown);
                    self.publish(key.0, &exported, &device);
                    State::Serving { device, volume }
                }
                Err(failure) => {
                    tracing::warn!(image = %key.1, error = %failure.message, "an export cannot be served");
                    State::Broken(failure)
                }
            };
            if let Some(export) = self.exports.exports.borrow_mut().get_mut(&key) {
                (export.state, export.identity) = (state, known);
            }
        }
    }
}
