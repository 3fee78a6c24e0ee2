//! Write logs of the volumes that this member owns: opened with their volumes, and kept as the record of the group says
//! (`docs/design/gateways.md`, "Write logs").

use std::cell::RefCell;
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::rc::{Rc, Weak};
use std::time::Duration;

use forebay_gateways::{GatewayState, GatewayVolume, GroupChange, GroupRecord, MemberId, VolumeName};
use forebay_image::Image;
use forebay_reactor::{Instant, now, sleep, spawn};
use forebay_writelog::replication::hello::ReplicaOffer;
use forebay_writelog::replication::{LogMembers, PeerId};
use forebay_writelog::{LogRecord, Mode, RecordedLog};

use super::JoinedGroup;
use super::copies::{CandidatePresence, CopyCandidate, LogOpeningPlan, choose_copies, plan_opening};
use super::settings::{VolumeLog, VolumeSettings};
use crate::api::{AttachRequest, GatewayLogStatus, LogPlace};
use crate::engine::Engine;
use crate::engine::log_keeper::{load_record, parse_client};
use crate::engine::logs::log_failure;
use crate::engine::volumes::{Volume, VolumeOpening};
use crate::failure::{Failure, FailureKind, Result};
use crate::log_place::LogMedium;
use crate::spec::ImageSpec;
use crate::units::Size;

/// Time between looks at the logs of the volumes that this member owns.
const LOOK: Duration = Duration::from_millis(200);
/// Time for which a member may be away until another one gets its copies.
const REPLACED: Duration = Duration::from_secs(5);
/// Time between questions to all members for the space that they offer.
const ASKED: Duration = Duration::from_secs(2);
/// Time without progress after which writing a log back, to end it, is begun again.
const STALLED: Duration = Duration::from_secs(30);
/// Number of members that have copies beside the owner, if the request names none.
const REPLICAS: u32 = 1;

/// Work on the logs of the volumes that this member owns.
#[derive(Default)]
pub(super) struct OwnedLogs {
    /// Volumes whose logs are being created, changed or ended.
    busy: RefCell<BTreeSet<VolumeName>>,
    /// Members that are away, and since when.
    away: RefCell<BTreeMap<PeerId, Instant>>,
    asked: RefCell<Option<Instant>>,
    /// Failure of the last attempt to create, change or end a log.
    failures: RefCell<BTreeMap<VolumeName, String>>,
}

impl OwnedLogs {
    /// Returns why a log could not be created, changed or ended.
    pub(super) fn failure(&self, name: &VolumeName) -> Option<String> {
        self.failures.borrow().get(name).cloned()
    }
}

/// Log of an image that is attached, and the member that is to own the volume.
pub(super) struct PlannedLog {
    /// Log that the volume is to have.
    pub(super) log: Option<VolumeLog>,
    /// Owner of the volume, if it is new in the group.
    pub(super) owner: MemberId,
    /// Members with complete copies of the log that the image has already.
    pub(super) copies: Option<BTreeSet<MemberId>>,
    /// Members that can have a primary of the log.
    pub(super) primaries: BTreeSet<MemberId>,
}

/// Returns the members with complete copies.
pub(super) fn complete(members: &LogMembers) -> BTreeSet<MemberId> {
    members.complete().map(|peer| MemberId(peer.0)).collect()
}

/// Returns the free space for a copy, if one of the offers takes it.
fn free_for(offers: &[ReplicaOffer], place: &LogPlace) -> Option<u64> {
    let takes =
        |offer: &&ReplicaOffer| LogMedium::from(offer.medium).takes_copies_of(place.medium) && offer.free >= place.size;
    offers.iter().filter(takes).map(|offer| offer.free).max()
}

/// Returns whether the first copy of a log, which decides on the unit of all, can be in a space that is offered.
fn takes_first(offer: &ReplicaOffer, place: &LogPlace) -> bool {
    LogMedium::from(offer.medium) == place.medium && offer.free >= place.size
}

/// Returns the log device of this daemon that has space for the first copy of a log.
fn own_device(engine: &Engine, place: &LogPlace) -> Option<PathBuf> {
    let replicas = engine.peers.replicas();
    let mut offers = replicas.offers().into_iter().zip(replicas.shelves());
    offers.find(|(offer, _)| takes_first(offer, place)).map(|(_, replicas)| replicas.shelf.path().into())
}

impl JoinedGroup {
    /// Returns whether a volume has a write log, or is to have one.
    pub fn has_log(&self, spec: &ImageSpec) -> bool {
        let name = VolumeName::new(spec.to_string());
        let noted =
            self.record().is_some_and(|record| record.volume(&name).is_some_and(|entry| entry.copies.is_some()));
        noted || self.settings.get(&name).is_some_and(|settings| settings.log.is_some())
    }

    fn host_of(&self, member: MemberId) -> String {
        let record = self.record();
        record.and_then(|record| Some(record.member(member)?.host.clone())).unwrap_or_else(|| member.to_string())
    }

    /// Returns the offers of each active member that this one is connected to, its own included.
    fn offers(&self, engine: &Engine, record: &GroupRecord) -> BTreeMap<MemberId, Vec<ReplicaOffer>> {
        let others = engine.peers.known().list().into_iter();
        let others = others.map(|peer| (MemberId(peer.hello.peer.0), peer.hello.offers));
        let all = others.chain([(self.own, engine.peers.replicas().offers())]);
        all.filter(|(id, _)| record.member(*id).is_some_and(|member| member.state == GatewayState::Active)).collect()
    }

    /// Decides about the log of an image that is being attached.
    pub(super) async fn plan_log(
        &self,
        engine: &Rc<Engine>,
        spec: &ImageSpec,
        image: &Rc<Image>,
        request: &mut AttachRequest,
    ) -> Result<PlannedLog> {
        let (place, replicas) = (request.log.take(), request.replicas.take());
        let record = self.record().ok_or_else(|| Failure::failed("the record of the group is not known yet"))?;
        let mut planned =
            PlannedLog { log: None, owner: self.own, copies: None, primaries: BTreeSet::from([self.own]) };
        let known = record.volume(&VolumeName::new(spec.to_string()));
        if known.is_none()
            && let Some(log) = load_record(image).await.map_err(|error| log_failure(error, spec))?.log
        {
            let members = self.members_of(spec, log)?;
            let copies = complete(&members);
            let is_active =
                |id: &&MemberId| record.member(**id).is_some_and(|member| member.state == GatewayState::Active);
            let owner = copies.iter().filter(is_active).min_by_key(|id| **id != self.own);
            planned.owner = *owner.ok_or_else(|| {
                let hosts: Vec<String> = copies.iter().map(|id| self.host_of(*id)).collect();
                let what = format!("the write log of {spec} has complete copies only at {}", hosts.join(", "));
                Failure::new(FailureKind::Unreachable, what).hint("start that daemon, and let it join the group")
            })?;
            planned.copies = Some(copies);
        }
        let Some(place) = place else {
            return match replicas {
                Some(_) => Err(Failure::invalid("--replicas is of a write log: name it with --log, as in ssd:1G")),
                None => Ok(planned),
            };
        };
        let unsupported = |why: &str| Failure::invalid(format!("a write log in a gateway group: {why}"));
        if let Some(why) = place.refusal_in_group() {
            return Err(unsupported(why));
        }
        let replicas = replicas.unwrap_or(REPLICAS);
        if place.replicas_min.is_some_and(|least| least > replicas) {
            return Err(unsupported("min-replicas= is more than --replicas: no write would be acknowledged"));
        }
        let log = VolumeLog { place: LogPlace { replicas: None, group: None, ..place }, replicas };
        let has_it = known.is_some_and(|entry| entry.copies.is_some()) || planned.copies.is_some();
        if !has_it {
            self.require_space(engine, &record, &log, &mut planned).await?;
        }
        planned.log = Some(log);
        Ok(planned)
    }

    /// Refuses a log for whose copies not enough members have space, and notes which ones can be its first primary.
    async fn require_space(
        &self,
        engine: &Rc<Engine>,
        record: &GroupRecord,
        VolumeLog { place, replicas }: &VolumeLog,
        planned: &mut PlannedLog,
    ) -> Result<()> {
        engine.peers.refresh().await;
        let offers = self.offers(engine, record);
        let with_space: Vec<MemberId> =
            offers.iter().filter(|(_, offers)| free_for(offers, place).is_some()).map(|(id, _)| *id).collect();
        let is_first = |id: &MemberId| offers[id].iter().any(|offer| takes_first(offer, place));
        planned.primaries = with_space.iter().copied().filter(is_first).collect();
        let needed = *replicas as usize + 1;
        if with_space.len() < needed || planned.primaries.is_empty() {
            let hosts: Vec<String> = with_space.iter().map(|id| self.host_of(*id)).collect();
            let found = if hosts.is_empty() { "none".to_owned() } else { hosts.join(", ") };
            let (size, medium) = (Size(place.size), place.medium.name());
            let what = format!("{needed} members must have space for a log of {size} on {medium}; found: {found}");
            return Err(Failure::new(FailureKind::NoSpace, what).hint(
                "the [replicas] section of each daemon (path, quota) offers space; 'forebay status' shows what peers offer",
            ));
        }
        if !planned.primaries.contains(&self.own) {
            planned.owner = *planned.primaries.first().expect("not empty");
        }
        Ok(())
    }

    /// Returns the members of a log, which must be one of this group.
    fn members_of(&self, spec: &ImageSpec, log: RecordedLog<LogPlace>) -> Result<LogMembers> {
        log.members.filter(|_| log.place.group.as_deref() == Some(&*self.spec.to_string())).ok_or_else(|| {
            let what = format!("{spec} has a write log at {}, which is none of this group", log.place);
            Failure::new(FailureKind::Busy, what)
                .hint("end it first: 'forebay detach' where it is served, or 'forebay log discard'")
        })
    }

    /// Returns whether a client of the cluster, as a log's record names it, is that of another member that serves.
    fn serves_with(&self, client: &str) -> bool {
        let (Some(client), Some(record)) = (parse_client(client), self.record()) else { return false };
        let mut others = record.members().iter().filter(|(id, member)| **id != self.own && member.state.serves());
        others.any(|(_, member)| member.clients.contains(&client.address))
    }

    /// Decides how to open a volume that this member owns; `Err` has the members with complete copies of its log, if it
    /// cannot be opened here for that reason.
    pub(super) async fn plan_volume(
        &self,
        engine: &Rc<Engine>,
        spec: &ImageSpec,
        image: &Rc<Image>,
    ) -> std::result::Result<VolumeOpening, NotOpened> {
        let record = load_record(image).await.map_err(|error| log_failure(error, spec))?;
        let LogRecord { log: Some(log), .. } = record else { return Ok(VolumeOpening::AsOwner) };
        let id = log.id;
        let members = self.members_of(spec, log)?;
        let own_copy = match engine.peers.replicas().shelf_of(&id) {
            Some(shelf) => Some(shelf.copy_of(&id).await.map_err(|error| log_failure(error, spec))?.0),
            None => None,
        };
        match plan_opening(&members, PeerId(self.own.0), own_copy, |client| self.serves_with(client)) {
            LogOpeningPlan::AsPrimary => Ok(VolumeOpening::AsOwner),
            LogOpeningPlan::TakeOver(term) => Ok(VolumeOpening::TakeOver(term)),
            LogOpeningPlan::PrimaryServes(primary) => {
                let host = self.host_of(MemberId(primary.0));
                let what = format!("the former owner of {spec}, {host}, has not closed its write log, and is alive");
                Err(Failure::new(FailureKind::Busy, what)
                    .hint(format!("restart the daemon at {host}: its former client is fenced then"))
                    .into())
            }
            LogOpeningPlan::Elsewhere(copies) if copies.is_empty() => {
                let what = format!("the only complete copy of the write log of {spec} was here, and is gone");
                Err(Failure::new(FailureKind::NotFound, what)
                    .hint(format!("to go on without what it held: forebay log discard {spec} --force"))
                    .into())
            }
            LogOpeningPlan::Elsewhere(copies) => {
                let hosts: Vec<String> = copies.iter().map(|id| self.host_of(*id)).collect();
                let what = format!("the write log of {spec} has complete copies only at {}", hosts.join(", "));
                Err(NotOpened { failure: Failure::new(FailureKind::Unreachable, what), copies: Some(copies) })
            }
        }
    }

    /// Looks at the logs of the volumes that are open here, and at the record.
    async fn look_at_logs(self: &Rc<Self>) {
        let (Some(engine), Some(record), Some(running)) = (self.engine(), self.record(), self.running()) else {
            return;
        };
        self.note_away(&engine, &record);
        let (offers, mut changes) = (self.offers(&engine, &record), Vec::new());
        for (name, volume) in self.owned.open_volumes() {
            let Some(entry) = record.volume(&name).filter(|entry| entry.owner.member == self.own && !entry.leaving)
            else {
                continue;
            };
            let Some(settings) = self.settings.get(&name) else { continue };
            let is_busy = self.logs.busy.borrow().contains(&name);
            if !is_busy && let Some(work) = self.work_on_log(&engine, (&record, &offers), &volume, &settings) {
                self.begin_work(&engine, &name, volume.clone(), work);
            }
            match copies_change(self.own, &name, entry, &settings, &volume) {
                Some(GroupChange::RemoveVolume { .. }) if is_busy => {}
                Some(change) => changes.push(change),
                None => {}
            }
        }
        if changes.iter().any(|change| matches!(change, GroupChange::RemoveVolume { .. })) {
            // Unless it has been exported again meanwhile.
            changes.insert(0, GroupChange::Expect(record.epoch()));
        }
        if changes.is_empty() {
            return;
        }
        match running.runner.change(&changes).await {
            Ok(Ok(())) => {}
            Ok(Err(refusal)) => {
                tracing::debug!(group = %self.spec, %refusal, "the copies of write logs are noted later")
            }
            Err(error) => tracing::debug!(group = %self.spec, %error, "cannot note the copies of write logs"),
        }
    }

    /// Notes which members are away.
    fn note_away(&self, engine: &Engine, record: &GroupRecord) {
        let known = engine.peers.known();
        let is_here = |(id, state): &(MemberId, GatewayState)| {
            *id == self.own || state.serves() && known.connection(PeerId(id.0)).is_some()
        };
        let members = record.members().iter().map(|(id, member)| (*id, member.state));
        let (here, gone): (Vec<_>, Vec<_>) = members.partition(is_here);
        let mut away = self.logs.away.borrow_mut();
        for (id, _) in here {
            away.remove(&PeerId(id.0));
        }
        for (id, _) in gone {
            away.entry(PeerId(id.0)).or_insert_with(now);
        }
    }

    /// Returns the members that may have copies of a log, as this one sees them.
    fn candidates(
        &self,
        record: &GroupRecord,
        offers: &BTreeMap<MemberId, Vec<ReplicaOffer>>,
        place: &LogPlace,
    ) -> Vec<CopyCandidate> {
        let away = self.logs.away.borrow();
        let candidate = |(id, member): (&MemberId, &forebay_gateways::GatewayMember)| {
            let peer = PeerId(id.0);
            let presence = match away.get(&peer) {
                _ if member.state == GatewayState::Draining => CandidatePresence::Leaving,
                None => CandidatePresence::Here,
                Some(since) if since.elapsed() < REPLACED => CandidatePresence::Away,
                Some(_) => CandidatePresence::Leaving,
            };
            CopyCandidate { peer, presence, free: offers.get(id).and_then(|offers| free_for(offers, place)) }
        };
        record.members().iter().map(candidate).collect()
    }

    /// Returns what is to be done about the log of a volume that is open here.
    fn work_on_log(
        self: &Rc<Self>,
        engine: &Engine,
        (record, offers): (&GroupRecord, &BTreeMap<MemberId, Vec<ReplicaOffer>>),
        volume: &Volume,
        settings: &VolumeSettings,
    ) -> Option<LogWork> {
        let Some(VolumeLog { place, replicas }) = &settings.log else { return volume.log().map(|_| LogWork::End) };
        // One that is off has been written back, and is replaced.
        let log = volume.log().filter(|log| !matches!(log.mode(), Mode::Off(_)));
        let set = log.as_ref().and_then(|_| volume.attachment.members());
        if log.is_some_and(|log| !log.mode().is_on()) || set.as_ref().is_some_and(|set| set.is_fenced()) {
            return None;
        }
        let recorded = set.as_ref().and_then(|_| volume.attachment.recorded()).map(|recorded| recorded.place);
        let wanted = recorded.as_ref().map(LogPlace::replica_ids).unwrap_or_default();
        let members = set.map(|set| set.record());
        let candidates = self.candidates(record, offers, place);
        let chosen = choose_copies(*replicas as usize, PeerId(self.own.0), &wanted, members.as_ref(), &candidates);
        let (medium, path) = match &recorded {
            Some(recorded) => (recorded.medium, recorded.path.clone()),
            None => match own_device(engine, place) {
                Some(path) => (place.medium, path),
                None => return Some(LogWork::Wait("this daemon has no space for its write log")),
            },
        };
        if chosen.is_empty() {
            // A log that only its owner has would keep the volume there.
            return Some(LogWork::Wait("no other member has space for a copy of its write log"));
        }
        let replicas = Some(chosen.iter().map(ToString::to_string).collect());
        let place = LogPlace { medium, path, replicas, group: Some(self.spec.to_string()), ..place.clone() };
        let is_same = wanted == chosen && recorded.is_some_and(|recorded| recorded.adjusted_to(&place) == recorded);
        (!is_same).then_some(LogWork::Attach(place))
    }

    /// Creates, changes or ends a log, beside everything else.
    fn begin_work(self: &Rc<Self>, engine: &Rc<Engine>, name: &VolumeName, volume: Rc<Volume>, work: LogWork) {
        let Ok(spec) = name.as_str().parse::<ImageSpec>() else { return };
        // The spaces that were offered may be taken by now: asked again first, and decided again then.
        let must_ask = !matches!(work, LogWork::End)
            && self.logs.asked.borrow().is_none_or(|asked: Instant| asked.elapsed() >= ASKED);
        self.logs.busy.borrow_mut().insert(name.clone());
        let (group, engine, name) = (self.clone(), engine.clone(), name.clone());
        drop(spawn(async move {
            let result = match work {
                _ if must_ask => {
                    engine.peers.refresh().await;
                    group.logs.asked.replace(Some(now()));
                    None
                }
                LogWork::Wait(why) => Some(Err(Failure::new(FailureKind::NoSpace, why))),
                LogWork::Attach(place) => Some(engine.ensure_log(&spec, &volume, &place).await),
                LogWork::End => {
                    let ended = volume.attachment.end(STALLED).await;
                    if ended.is_ok() {
                        engine.let_go_of_log(&spec);
                    }
                    Some(ended.map_err(|error| log_failure(error, &spec)))
                }
            };
            drop(volume);
            group.note_work(&name, result);
            group.logs.busy.borrow_mut().remove(&name);
        }));
    }

    fn note_work(&self, name: &VolumeName, result: Option<Result<()>>) {
        let mut failures = self.logs.failures.borrow_mut();
        match result {
            None => {}
            Some(Ok(())) => drop(failures.remove(name)),
            Some(Err(failure)) => {
                let text = failure.to_string();
                if failures.insert(name.clone(), text.clone()).as_ref() != Some(&text) {
                    tracing::warn!(group = %self.spec, volume = %name, error = text, "cannot keep a write log as it is to be");
                }
            }
        }
    }
}

/// Work on the log of a volume.
enum LogWork {
    /// Create it there, or change its limits and the members that have copies.
    Attach(LogPlace),
    /// Wait for space, for this reason.
    Wait(&'static str),
    /// Write it back, and discard it with its copies.
    End,
}

/// Returns the change of the record that notes the members with complete copies, or removes a volume whose last export and
/// log have ended.
fn copies_change(
    own: MemberId,
    name: &VolumeName,
    entry: &GatewayVolume,
    settings: &VolumeSettings,
    volume: &Volume,
) -> Option<GroupChange> {
    let set = volume.attachment.members();
    if set.as_ref().is_some_and(|set| set.is_fenced()) {
        return None;
    }
    let copies = set.map(|set| complete(&set.record()));
    if copies.is_none() && settings.log.is_none() && !settings.has_exports() {
        return Some(GroupChange::RemoveVolume { volume: name.clone() });
    }
    let has_ended = copies.is_some() || volume.attachment.recorded().is_none();
    (entry.copies != copies && has_ended).then(|| GroupChange::SetCopies { volume: name.clone(), owner: own, copies })
}

/// Returns the log that a volume is to have once it is attached.
pub(super) fn wanted_log(
    name: &VolumeName,
    entry: Option<&GatewayVolume>,
    before: Option<&VolumeLog>,
    planned: &PlannedLog,
) -> Result<Option<VolumeLog>> {
    let Some(wanted) = &planned.log else { return Ok(before.cloned()) };
    let fixed = |log: &VolumeLog| (log.place.medium, log.place.size, log.place.on_flush, log.place.policy().lease);
    if let Some(before) = before.filter(|before| fixed(before) != fixed(wanted)) {
        let what = format!("{name} has a write log of {}", before.place);
        return Err(Failure::new(FailureKind::Exists, what)
            .hint(format!("end it first, with all exports of the image: forebay detach {name}")));
    }
    let owner = entry.map(|entry| entry.owner.member);
    if let Some(owner) = owner.filter(|owner| before.is_none() && !planned.primaries.contains(owner)) {
        let what = format!("the owner of {name}, {owner}, has no space for its write log");
        return Err(Failure::new(FailureKind::NoSpace, what)
            .hint("drain that member, which moves its volumes, or offer space there ([replicas])"));
    }
    Ok(Some(wanted.clone()))
}

/// Describes the log of a volume.
pub(super) fn describe(
    entry: &GatewayVolume,
    settings: &VolumeSettings,
    host: impl Fn(MemberId) -> String,
) -> Option<GatewayLogStatus> {
    let copies = entry.copies.iter().flatten().map(|id| host(*id)).collect();
    match (&settings.log, &entry.copies) {
        (None, None) => None,
        (Some(log), _) => {
            Some(GatewayLogStatus { place: log.place.to_string(), copies, copies_wanted: log.replicas + 1 })
        }
        // It is being ended.
        (None, Some(_)) => Some(GatewayLogStatus { place: String::new(), copies, copies_wanted: 0 }),
    }
}

/// Returns why a volume waits for members with complete copies of its log, if it does.
pub(super) fn waits(record: &GroupRecord, entry: &GatewayVolume, host: impl Fn(MemberId) -> String) -> Option<String> {
    let copies = entry.copies.as_ref()?;
    let owner = entry.owner.member;
    let state = |id: MemberId| record.member(id).map(|member| member.state);
    if copies.iter().any(|id| *id != owner && state(*id) == Some(GatewayState::Active)) {
        return None;
    }
    let hosts: Vec<String> = copies.iter().map(|id| host(*id)).collect();
    match state(owner) {
        Some(GatewayState::Active) => None,
        Some(GatewayState::Draining) if entry.owner.next.is_some() => None,
        Some(GatewayState::Draining) => Some("stays until another member has a complete copy of its write log".into()),
        _ => Some(format!("waits for a member with a complete copy of its write log: {}", hosts.join(", "))),
    }
}

/// Keeps the logs of the volumes that a member owns as the record says, until it leaves the group.
pub(super) async fn keep(group: Weak<JoinedGroup>) {
    loop {
        sleep(LOOK).await;
        let Some(group) = group.upgrade() else { return };
        // If it cannot leave, it goes on.
        if !group.leaving.get() {
            group.look_at_logs().await;
        }
    }
}

/// Reason for which a volume is not open here.
pub(super) struct NotOpened {
    pub(super) failure: Failure,
    /// Members with complete copies of its log, if this one has none.
    pub(super) copies: Option<BTreeSet<MemberId>>,
}

impl From<Failure> for NotOpened {
    fn from(failure: Failure) -> Self {
        Self { failure, copies: None }
    }
}

impl Engine {
    /// Returns whether the log of an image is one of this daemon's gateway group, which has the volume, or of a group whose
    /// record this daemon does not know.
    fn is_in_group(&self, spec: &ImageSpec, place: &LogPlace) -> bool {
        let Some(group) = &place.group else { return false };
        match self.gateways.joined().filter(|joined| joined.spec.to_string() == *group) {
            Some(joined) => joined.record().is_none() || joined.has(spec),
            None => true,
        }
    }

    /// Refuses to open an image beside its owner in a gateway group: with its log, which only the owner opens.
    pub(in crate::engine) async fn refuse_grouped_log(&self, spec: &ImageSpec, image: &Rc<Image>) -> Result<()> {
        if image.client().is_none() {
            return Ok(());
        }
        let record = load_record(image).await.map_err(|error| self.image_failure(error, spec))?;
        let Some(log) = record.log.filter(|log| self.is_in_group(spec, &log.place)) else { return Ok(()) };
        let group = log.place.group.unwrap_or_default();
        let what = format!("{spec} has a write log in the gateway group {group}, which only its owner there opens");
        Err(Failure::new(FailureKind::Busy, what)
            .hint("run the command at the owner, which 'forebay group status' shows"))
    }

    /// Refuses a command on the log of a volume of this daemon's gateway group, which is `only` what it says there.
    pub(in crate::engine) fn refuse_group_volume(&self, spec: &ImageSpec, only: &str) -> Result<()> {
        match self.group_of(spec).filter(|group| group.has(spec)) {
            None => Ok(()),
            Some(group) => {
                let what = format!("{spec} is a volume of the gateway group {}: its write log is {only}", group.spec);
                Err(Failure::new(FailureKind::Busy, what).hint("'forebay group status' shows its owner and its copies"))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use forebay_gateways::{GatewayGroupId, GatewayMember, GroupIdentity, GroupPolicy, StartId};
    use forebay_writelog::MediumKind;

    use super::*;

    fn id(number: u8) -> MemberId {
        MemberId([number; 16])
    }

    fn log(place: &str, replicas: u32) -> VolumeLog {
        VolumeLog { place: place.parse().expect("a place"), replicas }
    }

    /// Returns a group of three members, the first of which owns a volume whose log has complete copies at these.
    fn group(copies: &[u8]) -> GroupRecord {
        let policy = GroupPolicy::default();
        let identity = GroupIdentity::new(GatewayGroupId([1; 16]), policy, serde_json::Value::Null);
        let mut record = GroupRecord::created(identity, 1);
        for number in 1..=3 {
            let entry = GatewayMember {
                slot: number.into(),
                host: format!("gateway{number}"),
                ..GatewayMember::new(StartId([number; 16]))
            };
            record.apply(&[GroupChange::Join { member: id(number), entry }]).expect("a member");
        }
        let (volume, settings) = (VolumeName::new("rbd/a"), serde_json::Value::Null);
        let copies = Some(copies.iter().map(|number| id(*number)).collect());
        let add = GroupChange::AddVolume { volume: volume.clone(), owner: id(1), settings };
        record.apply(&[add, GroupChange::SetCopies { volume, owner: id(1), copies }]).expect("a volume");
        record
    }

    fn lose(record: &mut GroupRecord, number: u8) {
        let (member, start, by) = (id(number), StartId([number; 16]), id(3));
        let fenced = GroupChange::Fenced { member, start, by };
        record.apply(&[GroupChange::BeginFencing { member, start, by }, fenced]).expect("it serves");
    }

    #[test]
    fn a_volume_says_for_which_copies_of_its_log_it_waits() {
        let waits = |record: &GroupRecord| {
            let host = |id: MemberId| record.member(id).map_or_else(String::new, |member| member.host.clone());
            waits(record, record.volume(&VolumeName::new("rbd/a")).expect("there"), host)
        };
        let drained = GroupChange::Drain { member: id(1), drain: true };
        let mut alone = group(&[1]);
        assert_eq!(waits(&alone), None);
        alone.apply(std::slice::from_ref(&drained)).expect("it serves");
        assert!(waits(&alone).expect("it stays").contains("until another member has a complete copy"));
        lose(&mut alone, 1);
        assert!(waits(&alone).expect("it waits").ends_with("gateway1"));
        let mut copied = group(&[1, 2]);
        copied.apply(&[drained]).expect("it serves");
        assert_eq!(waits(&copied), None, "it moves");
        lose(&mut copied, 1);
        assert_eq!(waits(&copied), None, "it is assigned");
        lose(&mut copied, 2);
        assert!(waits(&copied).expect("it waits").ends_with("gateway1, gateway2"));
    }

    #[test]
    fn a_log_is_given_to_a_volume_once_and_where_its_owner_has_space() {
        let record = group(&[1]);
        let (name, planned) = (VolumeName::new("rbd/a"), |log, primaries: &[u8]| PlannedLog {
            log,
            owner: id(1),
            copies: None,
            primaries: primaries.iter().map(|number| id(*number)).collect(),
        });
        let entry = record.volume(&name);
        let wanted = |before: Option<&VolumeLog>, planned: &PlannedLog| wanted_log(&name, entry, before, planned);
        let (small, large) = (log("ssd:16M", 1), log("ssd:32M", 1));
        assert_eq!(wanted(Some(&small), &planned(None, &[])).expect("it stays"), Some(small.clone()));
        assert_eq!(wanted(None, &planned(Some(small.clone()), &[1])).expect("new"), Some(small.clone()));
        let no_space = wanted(None, &planned(Some(small.clone()), &[2])).expect_err("its owner has no space");
        assert_eq!(no_space.kind, FailureKind::NoSpace);
        let other = wanted(Some(&small), &planned(Some(large), &[1])).expect_err("it has another one");
        assert_eq!(other.kind, FailureKind::Exists);
        // The limits and the number of copies can be changed.
        let changed = log("ssd:16M:dirty=8M", 2);
        assert_eq!(wanted(Some(&small), &planned(Some(changed.clone()), &[])).expect("changed"), Some(changed));
    }

    #[test]
    fn space_for_a_copy_is_of_a_medium_that_takes_it() {
        let offer = |medium, free| ReplicaOffer { medium, quota: 1 << 30, free };
        let place = "ssd:32M".parse().expect("a place");
        assert_eq!(free_for(&[offer(MediumKind::Ssd, 32 << 20)], &place), Some(32 << 20));
        assert_eq!(free_for(&[offer(MediumKind::Ssd, 31 << 20)], &place), None);
        assert_eq!(free_for(&[offer(MediumKind::Dram, 1 << 30)], &place), None, "it would be weaker");
        assert_eq!(free_for(&[offer(MediumKind::Ssd, 1), offer(MediumKind::Pmem, 1 << 30)], &place), Some(1 << 30));
    }
}
