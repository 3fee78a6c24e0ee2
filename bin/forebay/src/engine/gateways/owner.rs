//! Volumes that this member owns: opened, offered to the other members, and closed.

use std::cell::RefCell;
use std::rc::Rc;
use std::sync::Arc;

use forebay_block::LocalFuture;
use forebay_export::meter::CountersByKind;
use forebay_forward::VolumeOffer;
use forebay_gateways::{GatewayVolume, LoadSampler, OpenFailure, VolumeLoads, VolumeName};
use forebay_reactor::now;

use super::loads::totals;
use super::settings::{self, VolumeSettings};
use super::{ByVolume, JoinedGroup};
use crate::engine::volumes::Volume;
use crate::failure::{Failure, FailureKind, Result};
use crate::spec::ImageSpec;

/// Volume that is open here, and offered to all members.
struct OwnedVolume {
    volume: Rc<Volume>,
    offer: VolumeOffer,
    /// Counters of the requests of all members, which its device executes.
    counters: Arc<CountersByKind>,
}

/// Volumes that this member owns.
#[derive(Default)]
pub(super) struct OwnedVolumes {
    open: ByVolume<OwnedVolume>,
    /// Volumes that are being moved here, open without their lock; `None` until they are.
    prepared: ByVolume<Option<Rc<Volume>>>,
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

    /// Drops everything: this start has ended, and its client is fenced.
    pub(super) fn abandon(&self) {
        let open = std::mem::take(&mut *self.open.borrow_mut());
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

async fn open_now(group: &Rc<JoinedGroup>, name: &VolumeName, term: u64, identity: &str) -> Result<()> {
    let is_running = still_running(group);
    let engine = group.engine().ok_or_else(|| Failure::failed("the daemon has stopped"))?;
    let spec: ImageSpec = name.as_str().parse().map_err(Failure::invalid)?;
    let volume = engine.open_volume(&spec).await?;
    let owns = || {
        let owner = group.record().and_then(|record| record.volume(name).map(|entry| entry.owner));
        is_running() && owner.is_some_and(|owner| owner.member == group.own && owner.term == term)
    };
    if !owns() {
        return Err(Failure::failed("the volume has another owner by now, or this start of the member has ended"));
    }
    if engine.shared_id(&spec, volume.image.id()).as_deref() != Some(identity) {
        let what = format!("{spec} is another image than the one that was attached");
        return Err(Failure::new(FailureKind::Denied, what).hint(format!("forebay detach {spec}, and attach it again")));
    }
    // Breaks the lock of an owner that was fenced.
    volume.image.take_lock().await.map_err(|error| engine.image_failure(error, &spec))?;
    volume.image.mark_in_use();
    let meter = engine.meter(&spec, None);
    let counters = meter.volume().clone();
    let device = volume.device(false, meter).map_err(|error| engine.image_failure(error, &spec))?;
    if !owns() {
        return Err(Failure::failed("the volume has another owner by now, or this start of the member has ended"));
    }
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
    let (group, name) = (group.clone(), name.clone());
    Box::pin(async move {
        let opened = open_now(&group, &name, term, &settings.identity).await;
        group.owned.unprepare(&name);
        match opened {
            Ok(()) => {
                group.owned.failures.borrow_mut().remove(&name);
                tracing::info!(group = %group.spec, volume = %name, term, "a volume of the group is open here");
                group.update_paths();
                group.changed.announce();
                Ok(())
            }
            Err(failure) => {
                let text = failure.to_string();
                let before = group.owned.failures.borrow_mut().insert(name.clone(), text.clone());
                if before.as_ref() != Some(&text) {
                    tracing::warn!(group = %group.spec, volume = %name, error = text, "cannot open a volume of the group yet");
                }
                Err(OpenFailure::Later)
            }
        }
    })
}

/// Opens the image of a volume that is being moved here, without its lock.
pub(super) fn prepare(group: &Rc<JoinedGroup>, name: &VolumeName) -> LocalFuture<()> {
    let (group, name) = (group.clone(), name.clone());
    group.owned.prepared.borrow_mut().insert(name.clone(), None);
    Box::pin(async move {
        let Some(engine) = group.engine() else { return };
        let Ok(spec) = name.as_str().parse::<ImageSpec>() else { return };
        let is_running = still_running(&group);
        if let Ok(volume) = engine.open_volume(&spec).await
            && is_running()
        {
            // Unless the move was cancelled meanwhile.
            if let Some(prepared) = group.owned.prepared.borrow_mut().get_mut(&name) {
                *prepared = Some(volume);
            }
        }
    })
}

/// Closes a volume: requests wait, those in flight complete, and the lock is given up.
pub(super) fn close(group: &Rc<JoinedGroup>, name: &VolumeName) -> LocalFuture<()> {
    let (group, name) = (group.clone(), name.clone());
    Box::pin(async move {
        let Some(OwnedVolume { volume, offer, .. }) = group.owned.open.borrow_mut().remove(&name) else { return };
        group.update_paths();
        offer.suspend().await;
        drop(offer);
        let image = volume.image.clone();
        drop(volume);
        if let (Some(engine), Ok(spec)) = (group.engine(), name.as_str().parse::<ImageSpec>())
            && let Err(error) = engine.volumes.closed(&spec).await
        {
            tracing::warn!(group = %group.spec, volume = %name, %error, "a volume of the group was not closed cleanly");
        }
        image.close().await;
        tracing::info!(group = %group.spec, volume = %name, "a volume of the group is closed here");
        group.changed.announce();
    })
}
