//! Volumes that this member owns: opened, offered to the other members, and closed.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use forebay_block::{ErrorKind, LocalFuture};
use forebay_export::meter::CountersByKind;
use forebay_forward::VolumeOffer;
use forebay_gateways::{GatewayVolume, LoadSampler, OpenFailure, VolumeLoads, VolumeName};
use forebay_image::Image;
use forebay_reactor::{now, sleep, timeout};
use forebay_writelog::replication::PeerId;

use super::loads::totals;
use super::logs::NotOpened;
use super::settings::{self, VolumeSettings};
use super::{ByVolume, JoinedGroup};
use crate::engine::Engine;
use crate::engine::log_keeper::load_record;
use crate::engine::volumes::{Volume, VolumeOpening};
use crate::failure::{Failure, FailureKind, Result};
use crate::spec::ImageSpec;

/// Time that a volume's log may take until it serves; after it, opening the volume begins again.
const ACQUIRED: Duration = Duration::from_secs(30);
/// Attempts to close a log so that its record says so, and the time between them.
const CLOSE_ATTEMPTS: (u32, Duration) = (5, Duration::from_millis(300));

/// Volume that is open here, and offered to all members.
struct OwnedVolume {
    volume: Rc<Volume>,
    offer: VolumeOffer,
    /// Counters of the requests of all members, which its device executes.
    counters: Arc<CountersByKind>,
}

/// Volume that is being moved here, open without its lock; empty until it is.
#[derive(Default)]
struct PreparedVolume {
    _volume: Option<Rc<Volume>>,
    /// Image of a volume that has a write log, which only its owner opens.
    image: Option<Rc<Image>>,
}

/// Volumes that this member owns.
#[derive(Default)]
pub(super) struct OwnedVolumes {
    open: ByVolume<OwnedVolume>,
    /// Volumes that are being moved here.
    prepared: ByVolume<PreparedVolume>,
    /// Failure of the last attempt to open a volume.
    failures: ByVolume<String>,
    sampler: RefCell<LoadSampler>,
}

impl OwnedVolumes {
    /// Forgets what was prepared of a volume.
    pub(super) fn unprepare(&self, name: &VolumeName) {
        let prepared = self.prepared.borrow_mut().remove(name);
        drop(prepared);
    }

    /// Returns the volumes that are open here.
    pub(super) fn open_volumes(&self) -> Vec<(VolumeName, Rc<Volume>)> {
        self.open.borrow().iter().map(|(name, open)| (name.clone(), open.volume.clone())).collect()
    }

    /// Drops everything: this start has ended, and its client is fenced.
    pub(super) fn abandon(&self, group: &JoinedGroup) {
        let open = std::mem::take(&mut *self.open.borrow_mut());
        for (name, open) in &open {
            if let Some(set) = open.volume.attachment.members() {
                let text = "the start of this member that had the log open has ended";
                set.stop(forebay_block::Error::new(ErrorKind::Fenced, text));
            }
            if let (Some(engine), Ok(spec)) = (group.engine(), name.as_str().parse::<ImageSpec>()) {
                engine.let_go_of_log(&spec);
            }
        }
        let prepared = std::mem::take(&mut *self.prepared.borrow_mut());
        self.failures.take();
        drop((open, prepared));
    }

    /// Returns the loads of the volumes that are open here.
    pub(super) fn loads(&self) -> Rc<VolumeLoads> {
        let open = self.open.borrow();
        let totals = || open.iter().map(|(name, owned)| (name.clone(), totals(&owned.counters)));
        self.sampler.borrow_mut().loads(now(), totals)
    }

    /// Returns whether a volume is open here.
    pub(super) fn is_open(&self, name: &VolumeName) -> bool {
        self.open.borrow().contains_key(name)
    }

    /// Takes a volume for one that is open here.
    #[cfg(test)]
    pub(super) fn insert(&self, name: &VolumeName, volume: Rc<Volume>, offer: VolumeOffer) {
        self.open.borrow_mut().insert(name.clone(), OwnedVolume { volume, offer, counters: Arc::default() });
    }

    /// Returns why a volume could not be opened.
    pub(super) fn failure(&self, name: &VolumeName) -> Option<String> {
        self.failures.borrow().get(name).cloned()
    }
}

/// Returns a check of whether the start that is running now still does.
fn still_running(group: &Rc<JoinedGroup>) -> impl Fn() -> bool + use<> {
    let start = |group: &JoinedGroup| group.running().map(|running| *running.client.start());
    let (group, now) = (group.clone(), start(group));
    move || now.is_some() && start(&group) == now
}

async fn open_now(
    group: &Rc<JoinedGroup>,
    name: &VolumeName,
    term: u64,
    settings: &VolumeSettings,
    may_have_log: bool,
) -> std::result::Result<(), NotOpened> {
    let is_running = still_running(group);
    let check_owner = || {
        let owner = group.record().and_then(|record| record.volume(name).map(|entry| entry.owner));
        match is_running() && owner.is_some_and(|owner| owner.member == group.own && owner.term == term) {
            true => Ok(()),
            false => Err(Failure::failed("the volume has another owner by now, or this start of the member has ended")),
        }
    };
    let engine = group.engine().ok_or_else(|| Failure::failed("the daemon has stopped"))?;
    let spec: ImageSpec = name.as_str().parse().map_err(Failure::invalid)?;
    let opened = match may_have_log {
        true => open_logged(group, &engine, name, &spec, &check_owner).await,
        // One that was created a moment ago may not be noted yet.
        false => match engine.open_owned(&spec, VolumeOpening::AsOwner).await {
            Err(_) => open_logged(group, &engine, name, &spec, &check_owner).await,
            opened => opened.map_err(NotOpened::from),
        },
    };
    let volume = opened?;
    let opened = serve(group, &engine, (name, term), (&spec, &settings.identity), volume, check_owner).await;
    if opened.is_err() {
        // Closed before it is tried again.
        engine.let_go_of_log(&spec);
    }
    opened.map_err(NotOpened::from)
}

/// Opens a volume that has a write log, or may have one: as its record says.
async fn open_logged(
    group: &Rc<JoinedGroup>,
    engine: &Rc<Engine>,
    name: &VolumeName,
    spec: &ImageSpec,
    check_owner: &impl Fn() -> Result<()>,
) -> std::result::Result<Rc<Volume>, NotOpened> {
    let prepared = group.owned.prepared.borrow().get(name).and_then(|prepared| prepared.image.clone());
    let image = match prepared {
        Some(image) => image,
        None => engine.open_image(spec).await?,
    };
    let opening = group.plan_volume(engine, spec, &image).await?;
    check_owner()?;
    Ok(engine.open_owned(spec, opening).await?)
}

/// Takes the lock of a volume that was opened, and offers the volume to all members.
async fn serve(
    group: &Rc<JoinedGroup>,
    engine: &Rc<Engine>,
    (name, term): (&VolumeName, u64),
    (spec, identity): (&ImageSpec, &str),
    volume: Rc<Volume>,
    check_owner: impl Fn() -> Result<()>,
) -> Result<()> {
    check_owner()?;
    if engine.shared_id(spec, volume.image.id()).as_deref() != Some(identity) {
        let what = format!("{spec} is another image than the one that was attached");
        return Err(Failure::new(FailureKind::Denied, what).hint(format!("forebay detach {spec}, and attach it again")));
    }
    // Breaks the lock of an owner that was fenced.
    volume.image.take_lock().await.map_err(|error| engine.image_failure(error, spec))?;
    volume.image.mark_in_use();
    match timeout(ACQUIRED, engine.log_acquired(spec, &volume)).await {
        Ok(acquired) => acquired?,
        Err(_) => {
            let what = format!("the members of the write log of {spec} do not answer");
            return Err(Failure::new(FailureKind::Unreachable, what));
        }
    }
    let meter = engine.meter(spec, None);
    let counters = meter.volume().clone();
    let device = volume.device(false, meter).map_err(|error| engine.image_failure(error, spec))?;
    check_owner()?;
    let offer = group.forward_host.offer(identity, term, device).map_err(Failure::from)?;
    group.owned.open.borrow_mut().insert(name.clone(), OwnedVolume { volume, offer, counters });
    Ok(())
}

/// Opens a volume that the record gives to this member, and offers it.
pub(super) fn open(
    group: &Rc<JoinedGroup>,
    name: &VolumeName,
    term: u64,
    entry: &GatewayVolume,
) -> LocalFuture<std::result::Result<(), OpenFailure>> {
    let settings: VolumeSettings = settings::read(&entry.settings);
    let may_have_log = settings.log.is_some() || entry.copies.is_some();
    let (group, name) = (group.clone(), name.clone());
    Box::pin(async move {
        let opened = open_now(&group, &name, term, &settings, may_have_log).await;
        group.owned.unprepare(&name);
        match opened {
            Ok(()) => {
                group.owned.failures.borrow_mut().remove(&name);
                tracing::info!(group = %group.spec, volume = %name, term, "a volume of the group is open here");
                group.update_paths();
                group.changed.announce();
                Ok(())
            }
            Err(NotOpened { failure, copies }) => {
                let text = failure.to_string();
                let before = group.owned.failures.borrow_mut().insert(name.clone(), text.clone());
                if before.as_ref() != Some(&text) {
                    tracing::warn!(group = %group.spec, volume = %name, error = text, "cannot open a volume of the group yet");
                }
                Err(copies.map_or(OpenFailure::Later, OpenFailure::CopiesElsewhere))
            }
        }
    })
}

/// Opens the image of a volume that is being moved here, without its lock and its log.
pub(super) fn prepare(group: &Rc<JoinedGroup>, name: &VolumeName, entry: &GatewayVolume) -> LocalFuture<()> {
    let settings: VolumeSettings = settings::read(&entry.settings);
    let may_have_log = settings.log.is_some() || entry.copies.is_some();
    let (group, name) = (group.clone(), name.clone());
    group.owned.prepared.borrow_mut().insert(name.clone(), PreparedVolume::default());
    Box::pin(async move {
        let Some(engine) = group.engine() else { return };
        let Ok(spec) = name.as_str().parse::<ImageSpec>() else { return };
        let is_running = still_running(&group);
        let opened = match may_have_log {
            true => engine.open_image(&spec).await.map(|image| PreparedVolume { image: Some(image), _volume: None }),
            false => {
                engine.open_volume(&spec).await.map(|volume| PreparedVolume { _volume: Some(volume), image: None })
            }
        };
        if let Ok(opened) = opened
            && is_running()
        {
            // Unless the move was cancelled meanwhile.
            if let Some(prepared) = group.owned.prepared.borrow_mut().get_mut(&name) {
                *prepared = opened;
            }
        }
    })
}

/// Closes a volume: requests wait, those in flight complete, and the lock is given up.  Its log is closed as it is.
pub(super) fn close(group: &Rc<JoinedGroup>, name: &VolumeName) -> LocalFuture<()> {
    let (group, name) = (group.clone(), name.clone());
    Box::pin(async move {
        let Some(OwnedVolume { volume, offer, .. }) = group.owned.open.borrow_mut().remove(&name) else { return };
        group.update_paths();
        offer.suspend().await;
        drop(offer);
        let image = volume.image.clone();
        let has_log = volume.attachment.members().is_some();
        if let (Some(engine), Ok(spec)) = (group.engine(), name.as_str().parse::<ImageSpec>()) {
            close_volume(&group, &engine, &spec, volume).await;
            if has_log {
                close_in_record(&group, &engine, &spec, &image).await;
            }
        }
        image.close().await;
        tracing::info!(group = %group.spec, volume = %name, "a volume of the group is closed here");
        group.changed.announce();
    })
}

async fn close_volume(group: &JoinedGroup, engine: &Engine, spec: &ImageSpec, volume: Rc<Volume>) {
    drop(volume);
    engine.let_go_of_log(spec);
    if let Err(error) = engine.volumes.closed(spec).await {
        tracing::warn!(group = %group.spec, volume = %spec, %error, "a volume of the group was not closed cleanly");
    }
}

/// Ensures that the record of a log that was closed names no client: the next owner would have to fence this daemon, which
/// is alive.  A log of which a request to the cluster has failed keeps its client, until it was opened and closed again.
async fn close_in_record(group: &Rc<JoinedGroup>, engine: &Rc<Engine>, spec: &ImageSpec, image: &Rc<Image>) {
    let (is_running, own) = (still_running(group), PeerId(group.own.0));
    for _ in 0..CLOSE_ATTEMPTS.0 {
        let is_open = match load_record(image).await {
            Ok(record) => record
                .log
                .and_then(|log| log.members)
                .is_some_and(|members| members.primary() == own && !members.client().is_empty()),
            Err(_) => true,
        };
        if !is_open || !is_running() {
            return;
        }
        sleep(CLOSE_ATTEMPTS.1).await;
        if let Ok(volume) = engine.open_owned(spec, VolumeOpening::AsOwner).await {
            let _ = timeout(ACQUIRED, engine.log_acquired(spec, &volume)).await;
            close_volume(group, engine, spec, volume).await;
        }
    }
    tracing::warn!(group = %group.spec, volume = %spec, "the record of a write log does not say that it was closed");
}
