//! Write logs: the record that is kept with an image, opening logs with their volumes, and looking after them.
//!
//! An image whose record names a log is never opened without it: whoever opens the image, the daemon or a command, has
//! the log in front of it.  The record's epoch only grows, so that a log that was given up is refused for ever.

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::rc::{Rc, Weak};
use std::time::Duration;

use forebay_block::{BlockDevice, ErrorKind, LocalFuture, Request};
use forebay_image::{Image, KeptLock};
use forebay_reactor::wall_clock;
use forebay_writelog::{Limits, LogId, LogInfo, MediumKind, Options, Owner, Shelf, ShelfOptions, WriteLog, id_text};
use serde::{Deserialize, Serialize};

use super::Engine;
use super::identity::format_uuid;
use super::volumes::Volume;
use crate::api;
use crate::failure::{Failure, FailureKind, Result};
use crate::spec::{ImageSpec, RAM_POOL, image_spec};

/// The metadata under which an image keeps the record of its log.
const RECORD_KEY: &str = "forebay.writelog";

/// What is kept with the image: the only arbiter of which log belongs to it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
struct Record {
    /// Grows whenever a log is given up.
    epoch: u64,
    /// The log, if there is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    log: Option<RecordedLog>,
}

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct RecordedLog {
    id: String,
    place: api::LogPlace,
}

async fn load(image: &Image) -> forebay_block::Result<Record> {
    let Some(stored) = image.metadata(RECORD_KEY).await? else { return Ok(Record::default()) };
    let damaged = |error: serde_json::Error| {
        forebay_block::Error::new(ErrorKind::Corrupt, format!("the record of the image's write log: {error}"))
    };
    serde_json::from_slice(&stored).map_err(damaged)
}

async fn store(image: &Image, record: &Record) -> forebay_block::Result<()> {
    let text = serde_json::to_vec(record).expect("plain data becomes JSON");
    image.set_metadata(RECORD_KEY, Some(text)).await?;
    // What the record says must hold before anything is done that counts on it.
    image.submit(Request::Flush).await.map(drop)
}

/// Keeps the record of a log that gives itself up, and the image's exclusive lock as long as there may be a log: another
/// client would not see what the log has answered, and write-back would then go over what that client wrote.
struct KeptWithImage {
    image: Rc<Image>,
    _lock: KeptLock,
}

impl Owner for KeptWithImage {
    fn release(&self) -> LocalFuture<forebay_block::Result<()>> {
        let image = self.image.clone();
        Box::pin(async move {
            let record = load(&image).await?;
            store(&image, &Record { epoch: record.epoch + 1, log: None }).await
        })
    }
}

/// The shelves that are open, and the volumes whose logs are.
#[derive(Default)]
pub struct Logs {
    shelves: RefCell<BTreeMap<PathBuf, Weak<Shelf>>>,
    /// They stay open while the engine runs, or until their log is ended.
    volumes: RefCell<BTreeMap<ImageSpec, Rc<Volume>>>,
}

fn medium(place: &api::LogPlace) -> MediumKind {
    match place.medium {
        api::LogMedium::Ssd => MediumKind::Ssd,
        api::LogMedium::Pmem => MediumKind::Pmem,
    }
}

fn parse_id(text: &str) -> Option<LogId> {
    let bytes: Option<Vec<u8>> =
        (0..16).map(|at| text.get(2 * at..2 * at + 2).and_then(|digits| u8::from_str_radix(digits, 16).ok())).collect();
    bytes?.try_into().ok()
}

fn log_failure(error: forebay_block::Error, spec: &ImageSpec) -> Failure {
    let kind = error.kind();
    let failure = Failure::from(error).context(format!("the write log of {spec}"));
    match kind {
        ErrorKind::Busy => failure.hint("another process has the log's file; one at a time can"),
        ErrorKind::Unsupported => {
            failure.hint("put the log on a DAX file system, or say 'force' after the size where a loss does not matter")
        }
        ErrorKind::Denied | ErrorKind::Fenced | ErrorKind::Corrupt | ErrorKind::NotFound => failure.hint(format!(
            "if what it holds may be lost: forebay log discard {spec} --force; the image is then as the backend has it"
        )),
        _ => failure,
    }
}

impl Engine {
    async fn shelf(&self, place: &api::LogPlace, create: bool) -> forebay_block::Result<Rc<Shelf>> {
        if let Some(shelf) = self.logs.shelves.borrow().get(&place.path).and_then(Weak::upgrade) {
            return Ok(shelf);
        }
        let room = if create { place.size } else { 0 };
        let options = ShelfOptions { create, room, force: place.force, ..ShelfOptions::default() };
        let shelf = Shelf::open(medium(place), &place.path, options).await?;
        self.logs.shelves.borrow_mut().insert(place.path.clone(), Rc::downgrade(&shelf));
        Ok(shelf)
    }

    /// How much an image may lack: what its log says, or the configuration.
    fn log_limits(&self, place: &api::LogPlace) -> Limits {
        let configured = self.options.daemon.as_ref().map_or_else(Limits::default, |daemon| daemon.config.log_limits);
        Limits {
            bytes_max: place.dirty_max.or(configured.bytes_max),
            age_max: place.dirty_age_ms.map_or(configured.age_max, Duration::from_millis),
        }
    }

    fn log_options(&self, place: &api::LogPlace) -> Options {
        let persist =
            if place.on_flush { forebay_writelog::Persist::OnFlush } else { forebay_writelog::Persist::OnWrite };
        Options { persist, limits: self.log_limits(place), ..Options::default() }
    }

    /// A log with the limits that hold for it.
    fn with_limits(&self, log: api::Log) -> api::Log {
        let limits = self.log_limits(&log.place);
        api::Log { dirty_max: limits.bytes_max, dirty_age_max_ms: limits.age_max.as_millis() as u64, ..log }
    }

    fn volume_id(&self, spec: &ImageSpec, image: &Image) -> String {
        format_uuid(&self.identity.volume(spec, image.id()))
    }

    /// Opens the log that an image's record names.
    pub(super) async fn recorded_log(
        &self,
        spec: &ImageSpec,
        image: &Rc<Image>,
        base: &Rc<dyn BlockDevice>,
    ) -> Result<Option<Rc<WriteLog>>> {
        let record = load(image).await.map_err(|error| log_failure(error, spec))?;
        let Some(recorded) = record.log else { return Ok(None) };
        let opened = self.open_recorded(spec, image, base, record.epoch, &recorded).await;
        // An earlier process of ours may count as the owner for half a minute still; hosts need not wait for that, since
        // nobody else gets the lock before.
        image.take_lock_soon();
        opened.map(Some).map_err(|error| log_failure(error, spec))
    }

    async fn open_recorded(
        &self,
        spec: &ImageSpec,
        image: &Rc<Image>,
        base: &Rc<dyn BlockDevice>,
        epoch: u64,
        recorded: &RecordedLog,
    ) -> forebay_block::Result<Rc<WriteLog>> {
        let id = parse_id(&recorded.id)
            .ok_or_else(|| forebay_block::Error::new(ErrorKind::Corrupt, "the record names no log"))?;
        let shelf = self.shelf(&recorded.place, false).await?;
        let lock = image.keep_lock();
        let log = shelf.open_log(&id, &self.volume_id(spec, image), epoch).await?;
        let owner = Rc::new(KeptWithImage { image: image.clone(), _lock: lock });
        Ok(WriteLog::new(base.clone(), log, owner, self.log_options(&recorded.place)))
    }

    /// Keeps a volume open whose log is.
    pub(super) fn keep_logged(&self, spec: &ImageSpec, volume: &Rc<Volume>) {
        if volume.log().is_some() {
            self.logs.volumes.borrow_mut().insert(spec.clone(), volume.clone());
        }
    }

    /// Sees to it that a volume has the log that was asked for.
    pub(super) async fn ensure_log(&self, spec: &ImageSpec, volume: &Rc<Volume>, place: &api::LogPlace) -> Result<()> {
        let image = &volume.image;
        let record = load(image).await.map_err(|error| log_failure(error, spec))?;
        match (&record.log, volume.log()) {
            (Some(recorded), Some(log)) if log.mode().is_on() => {
                if recorded.place == *place {
                    return Ok(());
                }
                // Limits may change while the log is in use.
                let limited = api::LogPlace {
                    dirty_max: place.dirty_max,
                    dirty_age_ms: place.dirty_age_ms,
                    ..recorded.place.clone()
                };
                if limited == *place {
                    let recorded = RecordedLog { id: recorded.id.clone(), place: limited };
                    let record = Record { epoch: record.epoch, log: Some(recorded) };
                    store(image, &record).await.map_err(|error| log_failure(error, spec))?;
                    log.set_limits(self.log_limits(place));
                    return Ok(());
                }
                let what = format!("{spec} has a write log at {}", recorded.place);
                return Err(Failure::new(FailureKind::Exists, what).hint("end its exports first, which ends the log"));
            }
            (None, Some(log)) if !log.mode().is_on() => {
                let what = format!("the write log of {spec} has turned itself off");
                return Err(Failure::new(FailureKind::Busy, what).hint("end its exports first, then attach it anew"));
            }
            _ => {}
        }
        let created = async {
            // What it answers is nobody else's to write from now on.
            image.take_lock().await?;
            let shelf = self.shelf(place, true).await?;
            let (volume_id, name) = (self.volume_id(spec, image), spec.to_string());
            if spec.pool == RAM_POOL {
                // Logs of images that went with an earlier daemon are nobody's.
                for id in shelf.ids() {
                    let info = shelf.inspect(&id).await?;
                    if !info.open && info.name == name && info.volume != volume_id {
                        shelf.discard(&id).await?;
                    }
                }
            }
            let id = shelf.create(&volume_id, &name, place.size, record.epoch).await?;
            let recorded = RecordedLog { id: id_text(&id), place: place.clone() };
            store(image, &Record { epoch: record.epoch, log: Some(recorded.clone()) }).await?;
            self.open_recorded(spec, image, &volume.base, record.epoch, &recorded).await
        };
        let log = created.await.map_err(|error| log_failure(error, spec))?;
        volume.set_log(Some(log));
        self.keep_logged(spec, volume);
        Ok(())
    }

    /// Ends a volume's log: writes everything back, and gives it up.  With `keep` it stays as it is, for the next time
    /// that the image is opened.
    pub(super) async fn end_log(&self, spec: &ImageSpec, keep: bool) -> Result<()> {
        let Some(volume) = self.logs.volumes.borrow().get(spec).cloned() else { return Ok(()) };
        let Some(log) = volume.log() else { return Ok(()) };
        let closed = log.close(!keep).await;
        self.logs.volumes.borrow_mut().remove(spec);
        volume.set_log(None);
        let gone = log.gone();
        let ended = async {
            closed?;
            gone.await;
            if keep {
                return Ok(());
            }
            let record = load(&volume.image).await?;
            store(&volume.image, &Record { epoch: record.epoch + 1, log: None }).await?;
            match record.log {
                Some(recorded) => self.discard_recorded(&recorded).await,
                None => Ok(()),
            }
        };
        ended.await.map_err(|error: forebay_block::Error| log_failure(error, spec))
    }

    async fn discard_recorded(&self, recorded: &RecordedLog) -> forebay_block::Result<()> {
        let Some(id) = parse_id(&recorded.id) else { return Ok(()) };
        self.shelf(&recorded.place, false).await?.discard(&id).await
    }

    /// Closes all logs as they are; they go on when their volumes are opened again.
    pub(super) async fn close_logs(&self) -> Result<()> {
        let volumes = std::mem::take(&mut *self.logs.volumes.borrow_mut());
        let mut result = Ok(());
        for (spec, volume) in volumes {
            if let Some(log) = volume.log()
                && let Err(error) = log.close(false).await
            {
                result = Err(log_failure(error, &spec));
            }
        }
        result
    }

    /// Every log that is known: those that images have, and what else is on their shelves.
    pub async fn list_logs(&self) -> Result<Vec<api::Log>> {
        let (mut logs, mut places) = (Vec::new(), BTreeMap::new());
        for pool in self.pools.keys() {
            let backend = self.pool(pool).await?;
            for image in forebay_image::list(&backend).await.map_err(|error| self.pool_failure(error, pool))? {
                let spec = image_spec(pool, &image)?;
                let Some(found) = self.find_log(&spec).await? else { continue };
                places.entry(found.place.path.clone()).or_insert_with(|| found.place.clone());
                logs.push(self.with_limits(found));
            }
        }
        for place in self.exports.log_places() {
            places.entry(place.path.clone()).or_insert(place);
        }
        let known: BTreeSet<String> = logs.iter().map(|log| log.id.clone()).collect();
        for place in places.into_values() {
            let Ok(shelf) = self.shelf(&place, false).await else { continue };
            for id in shelf.ids().into_iter().filter(|id| !known.contains(&id_text(id))) {
                if let Ok(info) = shelf.inspect(&id).await {
                    let place = api::LogPlace { size: info.size, ..place.clone() };
                    logs.push(self.with_limits(api::Log { state: "abandoned".into(), ..describe(&info, place) }));
                }
            }
        }
        Ok(logs)
    }

    /// An image's log.
    pub async fn log_info(&self, spec: &ImageSpec) -> Result<api::Log> {
        let found = self.find_log(spec).await?.ok_or_else(|| no_log(spec))?;
        Ok(self.with_limits(found))
    }

    async fn find_log(&self, spec: &ImageSpec) -> Result<Option<api::Log>> {
        let backend = self.pool(&spec.pool).await?;
        let open = self.logs.volumes.borrow().get(spec).cloned();
        let image = match &open {
            Some(volume) => volume.image.clone(),
            None => Image::open(backend, &spec.image, Default::default())
                .await
                .map_err(|error| self.image_failure(error, spec))?,
        };
        let record = load(&image).await.map_err(|error| log_failure(error, spec))?;
        let running = open.as_ref().and_then(|volume| volume.log());
        let Some(recorded) = record.log else {
            return Ok(running.map(|log| describe_running(spec, &log, None)));
        };
        if let Some(log) = running {
            return Ok(Some(describe_running(spec, &log, Some(&recorded))));
        }
        let looked = async {
            let id = parse_id(&recorded.id)
                .ok_or_else(|| forebay_block::Error::new(ErrorKind::Corrupt, "the record names no log"))?;
            self.shelf(&recorded.place, false).await?.inspect(&id).await
        };
        Ok(Some(match looked.await {
            Ok(info) => api::Log { image: spec.to_string(), ..describe(&info, recorded.place) },
            Err(error) => api::Log {
                id: recorded.id,
                image: spec.to_string(),
                epoch: record.epoch,
                state: "unreachable".into(),
                reason: Some(error.to_string()),
                ..api::Log::at(recorded.place)
            },
        }))
    }

    /// Writes back everything that an image's log holds.
    pub async fn flush_log(&self, spec: &ImageSpec) -> Result<api::Log> {
        let volume = self.open_volume(spec).await?;
        let log = volume.log().ok_or_else(|| no_log(spec))?;
        log.drain().await.map_err(|error| log_failure(error, spec))?;
        self.log_info(spec).await
    }

    /// Gives up an image's log with what it holds.
    pub async fn discard_log(&self, spec: &ImageSpec, force: bool) -> Result<()> {
        if self.is_exported(spec) && self.logs.volumes.borrow().contains_key(spec) {
            return Err(Failure::new(FailureKind::Busy, format!("the write log of {spec} is in use"))
                .hint(format!("end its exports first: forebay detach {spec}")));
        }
        let found = self.log_info(spec).await?;
        if (found.dirty_entries > 0 || found.state == "unreachable") && !force {
            let what = match found.state.as_str() {
                "unreachable" => format!("the write log of {spec} cannot be looked at, and may hold writes"),
                _ => format!("the write log of {spec} holds {} that the backend does not", found.dirty()),
            };
            return Err(Failure::new(FailureKind::Busy, what)
                .hint(format!("forebay log flush {spec} saves them; --force loses them")));
        }
        if self.logs.volumes.borrow().contains_key(spec) {
            self.end_log(spec, true).await?;
        }
        let backend = self.pool(&spec.pool).await?;
        let image = Image::open(backend, &spec.image, Default::default())
            .await
            .map_err(|error| self.image_failure(error, spec))?;
        let discarded = async {
            let record = load(&image).await?;
            store(&image, &Record { epoch: record.epoch + 1, log: None }).await?;
            let Some(recorded) = record.log else { return Ok(()) };
            let (Some(id), Ok(shelf)) = (parse_id(&recorded.id), self.shelf(&recorded.place, false).await) else {
                return Ok(());
            };
            match shelf.discard(&id).await {
                Err(error) if error.kind() == ErrorKind::NotFound => Ok(()),
                result => result,
            }
        };
        discarded.await.map_err(|error: forebay_block::Error| log_failure(error, spec))
    }

    /// Fails when an image has a log: what would be done goes past it.
    pub(super) async fn refuse_logged(&self, spec: &ImageSpec) -> Result<()> {
        let backend = self.pool(&spec.pool).await?;
        let Ok(image) = Image::open(backend, &spec.image, Default::default()).await else { return Ok(()) };
        let record = load(&image).await.map_err(|error| log_failure(error, spec))?;
        match record.log {
            None => Ok(()),
            Some(recorded) => {
                let what = format!("{spec} has a write log at {}", recorded.place);
                Err(Failure::new(FailureKind::Busy, what)
                    .hint(format!("'forebay log flush {spec}', then 'forebay log discard {spec}' end it")))
            }
        }
    }

    /// How the log of an open volume stands.
    pub(super) fn running_log(&self, spec: &ImageSpec) -> Option<api::Log> {
        let volume = self.logs.volumes.borrow().get(spec).cloned()?;
        let log = volume.log()?;
        Some(self.with_limits(describe_running(spec, &log, None)))
    }

    /// The logs that are open, with their counters.
    pub(super) fn open_logs(&self) -> Vec<(ImageSpec, Rc<WriteLog>)> {
        let volumes = self.logs.volumes.borrow();
        volumes.iter().filter_map(|(spec, volume)| Some((spec.clone(), volume.log()?))).collect()
    }
}

fn no_log(spec: &ImageSpec) -> Failure {
    Failure::new(FailureKind::NotFound, format!("{spec} has no write log"))
        .hint("'forebay attach' gives it one with --log MEDIUM:PATH:SIZE; 'forebay log ls' lists those there are")
}

fn describe(info: &LogInfo, place: api::LogPlace) -> api::Log {
    api::Log {
        id: id_text(&info.id),
        image: info.name.clone(),
        epoch: info.epoch,
        state: if info.open { "open".into() } else { "closed".into() },
        dirty_entries: info.dirty_entries,
        dirty_bytes: info.dirty_bytes,
        dirty_since_ms: info.dirty_since_ms,
        ..api::Log::at(place)
    }
}

fn describe_running(spec: &ImageSpec, log: &WriteLog, recorded: Option<&RecordedLog>) -> api::Log {
    let (stats, mode) = (log.stats(), log.mode());
    let since = wall_clock().saturating_sub(stats.dirty_age).as_millis() as u64;
    let place = recorded.map(|recorded| recorded.place.clone());
    api::Log {
        id: recorded.map_or(String::new(), |recorded| recorded.id.clone()),
        image: spec.to_string(),
        state: mode.name().into(),
        reason: mode.reason().cloned().or_else(|| log.backend_error()).map(|error| error.to_string()),
        dirty_entries: stats.dirty_entries,
        dirty_bytes: stats.dirty_bytes,
        dirty_since_ms: (stats.dirty_entries > 0).then_some(since),
        ..api::Log::at(place.unwrap_or_else(|| api::LogPlace::unknown(log.medium() == MediumKind::Pmem)))
    }
}
