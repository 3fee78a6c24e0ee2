//! Commands on gateway groups, and exports of their volumes.

use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

use forebay_gateways::store::GroupStore;
use forebay_gateways::{
    ChangeRefusal, GatewayGroupId, GatewayMember, GatewayState, GatewayVolume, GroupChange, GroupIdentity, GroupPolicy,
    GroupRecord, MemberId, StartId, VolumeName,
};
use forebay_image::ImageFeatures;
use forebay_messenger::Address;
use forebay_reactor::{spawn, timeout, wall_clock};

use super::guests::{check_socket, refuse_leaving};
use super::hosts::{GroupHosts, settings_to_change};
use super::names::GroupNames;
use super::plan::{plan_end, plan_export, planned_owner};
use super::settings::{self, GroupSettings, MemberSettings, VolumeSettings, is_of_one_member};
use super::{JoinedGroup, StoredMembership, logs, new_start, stale_copies};
use crate::api::{
    self, AttachRequest, DrainGateway, Front, GatewayGroupStatus, GatewayMemberStatus, GatewayVolumeStatus, ImageExport,
};
use crate::engine::Engine;
use crate::failure::{Failure, FailureKind, Result};
use crate::spec::{GroupSpec, ImageSpec, uri_encode};

/// Time that `attach` waits until hosts reach the volume here.
const ATTACHED: Duration = Duration::from_secs(30);
/// Time that `detach` waits until the owner has closed the volume.
const DETACHED: Duration = Duration::from_secs(30);
/// Time that `join` waits until this daemon is a member.
const JOINED: Duration = Duration::from_secs(30);
/// Number of attempts to change exports that others change as well.
const ATTEMPTS: u32 = 20;

/// Explains a refusal to the user.
fn refused(refusal: ChangeRefusal) -> Failure {
    let kind = match refusal {
        ChangeRefusal::NoMember | ChangeRefusal::NoVolume => FailureKind::NotFound,
        ChangeRefusal::VolumeExists => FailureKind::Exists,
        ChangeRefusal::Full => FailureKind::NoSpace,
        ChangeRefusal::Policy => FailureKind::Invalid,
        _ => FailureKind::Busy,
    };
    Failure::new(kind, refusal.to_string())
}

pub(super) fn not_joined() -> Failure {
    Failure::new(FailureKind::NotFound, "this daemon is in no gateway group")
        .hint("join one: forebay group join POOL/GROUP; or start the daemon with --group POOL/GROUP")
}

pub(super) fn find_member(record: &GroupRecord, name: &str) -> Result<MemberId> {
    let named = |(id, member): &(&MemberId, &GatewayMember)| {
        member.host == name || name.len() >= 8 && id.to_string().starts_with(name)
    };
    let found: Vec<MemberId> = record.members().iter().filter(named).map(|(id, _)| *id).collect();
    match &found[..] {
        [one] => Ok(*one),
        [] => Err(Failure::new(FailureKind::NotFound, format!("the group has no member '{name}'"))
            .hint("'forebay group status' lists them by host name and id")),
        _ => Err(Failure::invalid(format!("several members are called '{name}'")).hint("name it by its id")),
    }
}

impl JoinedGroup {
    /// Makes changes of the record that `plan` chooses, again where others have changed it meanwhile.
    pub(super) async fn change(&self, plan: impl Fn(&GroupRecord) -> Result<Vec<GroupChange>>) -> Result<()> {
        let running = self.must_run()?;
        let mut last = None;
        for _ in 0..ATTEMPTS {
            let record = running.runner.store().refresh().await.map_err(Failure::from)?;
            let mut changes = plan(&record)?;
            if changes.is_empty() {
                return Ok(());
            }
            // Refused if the record is another one: exports must not be chosen by an old one.
            changes.insert(0, GroupChange::Expect(record.epoch()));
            match running.runner.change(&changes).await.map_err(Failure::from)? {
                Ok(()) => return Ok(()),
                Err(ChangeRefusal::Epoch) => last = Some(ChangeRefusal::Epoch),
                Err(refusal) => return Err(refused(refusal)),
            }
        }
        Err(refused(last.unwrap_or(ChangeRefusal::Epoch)))
    }

    /// Returns whether the running start serves in the group.
    fn serves(&self) -> bool {
        let start = self.running().map(|running| StartId(*running.client.start()));
        start.zip(self.record()).is_some_and(|(start, record)| record.serves(self.own, start))
    }

    /// Waits until this daemon serves in the group: one that has just started has not joined yet.
    pub(super) async fn wait_to_serve(&self) -> Result<()> {
        match self.wait_until(JOINED, || self.serves()).await {
            true => Ok(()),
            false => self.must_run().and_then(|_| {
                let what = format!("this daemon is not a member of {} yet", self.spec);
                Err(Failure::new(FailureKind::Unreachable, what).hint("'forebay group status' shows why"))
            }),
        }
    }

    /// Waits until this daemon is a member of the group.
    async fn wait_to_join(&self) -> Result<()> {
        if !self.wait_until(JOINED, || self.serves()).await {
            let why = self.last_error.borrow().clone().unwrap_or_else(|| "the other members do not answer".into());
            return Err(Failure::new(FailureKind::Unreachable, format!("not a member of {} yet: {why}", self.spec))
                .hint("the daemon keeps trying; 'forebay group status' shows the group"));
        }
        Ok(())
    }

    /// Waits until something is so; returns whether it is.
    async fn wait_until(&self, time: Duration, is_so: impl FnMut() -> bool) -> bool {
        timeout(time, self.changed.wait_until(is_so)).await.is_ok()
    }

    /// Returns the URIs of an export at all members, those of this one first.
    fn uris(&self, engine: &Engine, record: &GroupRecord, spec: &ImageSpec, export: &AttachRequest) -> Vec<String> {
        let mut uris = engine.fronts.uris(export.front, spec);
        let Some(GroupNames { nqn, target, .. }) = self.host_paths.names() else { return uris };
        for (id, _) in record.members().iter().filter(|(id, member)| **id != self.own && member.state.serves()) {
            let member = self.member_settings.get(*id);
            let MemberSettings { nbd, nvme, iscsi, member_exports: _ } = &*member;
            match export.front {
                Front::Nbd => {
                    let name = uri_encode(&spec.to_string(), true);
                    uris.extend(nbd.iter().map(|addr| format!("nbd://{addr}/{name}")));
                }
                Front::Nvme => {
                    let unit = export.unit.unwrap_or_default();
                    uris.extend(nvme.iter().map(|port| format!("nvme+tcp://{}/{nqn}#{unit}", port.addr)));
                }
                Front::Iscsi => {
                    let unit = export.unit.unwrap_or_default();
                    uris.extend(iscsi.iter().map(|addr| format!("iscsi://{addr}/{target}/{unit}")));
                }
                // Its sockets are of single members.
                Front::Vhost => {}
            }
        }
        uris
    }

    fn describe(&self, engine: &Engine, record: &GroupRecord, spec: &ImageSpec, export: &AttachRequest) -> ImageExport {
        let name = VolumeName::new(spec.to_string());
        let served = self.exports.is_published(&name, export.front);
        let uris = if served { self.uris(engine, record, spec, export) } else { Vec::new() };
        let error = (!served).then(|| {
            if let Some(failure) = self.exports.failure(&name, export.front) {
                return failure;
            }
            let what = format!("{spec} is not served here yet: its owner has not opened it, or is not reached");
            Failure::new(FailureKind::Unreachable, what).hint("'forebay group status' shows members and owners")
        });
        ImageExport {
            pool: spec.pool.clone(),
            image: spec.image.clone(),
            front: export.front,
            read_only: export.read_only,
            uri: uris.first().cloned(),
            uris,
            vhost: export.vhost.clone(),
            connections: if served { engine.fronts.connections_of(export.front, spec) } else { 0 },
            log: None,
            qos: None,
            own_blocks: None,
            error,
            warnings: Vec::new(),
        }
    }

    /// Lists the exports of the group.
    pub fn exports(&self, engine: &Engine) -> Vec<ImageExport> {
        let Some(record) = self.record() else { return Vec::new() };
        let mut all = Vec::new();
        for (name, settings) in self.settings.all() {
            let Ok(spec) = name.as_str().parse::<ImageSpec>() else { continue };
            let own = settings.exports_at(self.own);
            all.extend(own.map(|export| self.describe(engine, &record, &spec, export)));
        }
        all
    }

    /// Returns whether an export has ended here, and its volume is closed if it was the last one.
    fn has_ended(&self, name: &VolumeName, front: Front) -> bool {
        let is_closing =
            |entry: &GatewayVolume| entry.leaving || !settings::read::<VolumeSettings>(&entry.settings).has_exports();
        let record = self.record();
        let is_closed = record.as_ref().and_then(|record| record.volume(name)).is_none_or(|entry| !is_closing(entry));
        // A socket is free when its connections have ended.
        let is_ending = is_of_one_member(front) && self.exports.ending.borrow().contains(&(name.clone(), front));
        is_closed && !is_ending && !self.exports.is_published(name, front)
    }

    /// Returns whether a volume is one of the group.
    pub fn has(&self, spec: &ImageSpec) -> bool {
        self.record().is_some_and(|record| record.volume(&VolumeName::new(spec.to_string())).is_some())
    }

    /// Exports an image at all members, or to a guest of this member's machine.
    pub async fn attach(
        self: Rc<Self>,
        engine: Rc<Engine>,
        mut request: AttachRequest,
        spec: ImageSpec,
    ) -> Result<ImageExport> {
        let unsupported =
            |what: &str| Err(Failure::new(FailureKind::Unsupported, format!("{what} in a gateway group yet")));
        if request.within().is_some() || request.uuid.is_some() || request.ana_group.is_some() {
            return unsupported("subsystems, targets, UUIDs and ANA groups cannot be chosen");
        }
        if engine.is_exported_alone(&spec) {
            let what = format!("{spec} is exported by this daemon alone, over another front");
            return Err(Failure::new(FailureKind::Exists, what).hint(format!("end that first: forebay detach {spec}")));
        }
        if request.read_only {
            return unsupported("read-only exports are not possible");
        }
        // Without its log, which only its owner opens.
        let image = engine.open_image(&spec).await?;
        if image.size() == 0 {
            return Err(Failure::invalid(format!("the image {spec} has 0 bytes, which no host can use")));
        }
        if !image.features().has(ImageFeatures::EXCLUSIVE_LOCK) {
            let what =
                format!("{spec} lacks the feature exclusive-lock, by which members keep former owners from writing");
            return Err(Failure::new(FailureKind::Unsupported, what)
                .hint(format!("forebay feature enable {spec} exclusive-lock")));
        }
        let identity = engine.shared_id(&spec, image.id()).ok_or_else(|| {
            Failure::invalid(format!("{spec} is not in a Ceph cluster: other members cannot reach it"))
        })?;
        self.wait_to_serve().await?;
        let planned = self.plan_log(&engine, &spec, &image, &mut request).await?;
        drop(image);
        let name = VolumeName::new(spec.to_string());
        let GroupSettings { nqn, target, .. } = GroupSettings::of(self.must_run()?.runner.record().identity())?;
        match request.front {
            Front::Nbd | Front::Vhost => {}
            Front::Nvme => request.subsystem = Some(nqn),
            Front::Iscsi => {
                // Says at once what no member could serve.
                self.port_groups(&self.must_run()?.runner.record())?;
                request.target = Some(target);
            }
        }
        self.check_guest(&self.must_run()?.runner.record(), &request).await?;
        let loads = self.must_run()?.runner.inspect(|machine| machine.group_loads());
        let owner = |record: &GroupRecord| planned_owner(record, &loads, self.own, &planned);
        let is_new = Cell::new(false);
        let plan = |record: &GroupRecord| {
            let before = record.volume(&name).map(|entry| settings::read::<VolumeSettings>(&entry.settings));
            is_new.set(before.is_none_or(|before| before.export_at(self.own, request.front).is_none()));
            check_socket(record, &name, self.own, &request)?;
            plan_export(record, (&name, self.own), &request, &identity, &planned, owner)
        };
        self.change(plan).await?;
        let has_log = || self.record().is_some_and(|record| record.volume(&name).is_some_and(|it| it.copies.is_some()));
        let is_there = || self.exports.is_published(&name, request.front) && (planned.log.is_none() || has_log());
        // Whether a socket can be created shows here only.
        let socket_failure = || self.exports.failure(&name, request.front).filter(|_| request.vhost.is_some());
        self.wait_until(ATTACHED, || is_there() || socket_failure().is_some()).await;
        if let Some(failure) = socket_failure() {
            if is_new.get() {
                self.change(|record| plan_end(record, &name, self.own, request.front, false)).await?;
                self.wait_until(DETACHED, || self.has_ended(&name, request.front)).await;
            }
            return Err(failure);
        }
        if planned.log.is_some() && !has_log() {
            let what = format!("{spec} is attached, and its owner has not created its write log yet");
            return Err(
                Failure::new(FailureKind::Unreachable, what).hint("'forebay group status' at its owner shows why")
            );
        }
        let record = self.record().ok_or_else(not_joined)?;
        let settings = self.settings.get(&name);
        let export = settings.as_ref().and_then(|settings| settings.export_at(self.own, request.front));
        let export = export.ok_or_else(|| Failure::failed("the export was removed meanwhile"))?;
        Ok(self.describe(&engine, &record, &spec, export))
    }

    /// Ends an export at all members, or that to a guest of this member's machine.
    pub async fn detach(self: Rc<Self>, engine: Rc<Engine>, spec: &ImageSpec, front: Front, force: bool) -> Result<()> {
        let name = VolumeName::new(spec.to_string());
        let connections = engine.fronts.connections_of(front, spec);
        if connections > 0 && !force {
            let what = format!("{connections} connection(s) to {spec} are open at this member alone");
            let hint = "disconnect the hosts first, or say --force to do it from here";
            return Err(Failure::new(FailureKind::Busy, what).hint(hint));
        }
        self.change(|record| plan_end(record, &name, self.own, front, force)).await?;
        if !self.wait_until(DETACHED, || self.has_ended(&name, front)).await {
            let what =
                format!("the export of {spec} has ended, but its owner has not closed the image and its log yet");
            return Err(Failure::new(FailureKind::Unreachable, what).hint("'forebay group status' shows its owner"));
        }
        Ok(())
    }
}

impl Engine {
    /// Returns the group that this daemon is in, if an image is of its cluster.
    pub fn group_of(&self, spec: &ImageSpec) -> Option<Rc<JoinedGroup>> {
        self.gateways.joined().filter(|_| self.is_in_ceph(&spec.pool))
    }

    async fn group_store(&self, spec: &GroupSpec) -> Result<Rc<GroupStore>> {
        let backend = self.pool(&spec.pool).await?;
        GroupStore::new(&backend, &spec.group).map_err(Failure::from)
    }

    /// Changes the policy of the group, and whose hosts its members admit.
    ///
    /// # Errors
    /// If the lists of the group are to count, and have no host.
    pub async fn set_gateway_policy(&self, request: &api::GatewayGroupPolicy) -> Result<()> {
        let joined = self.gateways.joined().ok_or_else(not_joined)?;
        joined
            .change(|record| {
                let former = record.policy();
                let policy = GroupPolicy { rebalance: request.rebalance.unwrap_or(former.rebalance), ..former };
                let mut changes = Vec::new();
                if policy != former {
                    changes.push(GroupChange::SetPolicy(policy));
                }
                let before = settings_to_change(record.identity())?;
                let mut after = before.clone();
                after.hosts.source = request.hosts.unwrap_or(before.hosts.source);
                if after != before {
                    let GroupHosts { source, nvme, initiators } = &after.hosts;
                    if *source == api::GatewayHostSource::Group && nvme.is_empty() && initiators.is_empty() {
                        return Err(Failure::invalid("the group lists no host: none could connect to any member").hint(format!(
                            "list hosts first: forebay nvme-subsystem allow HOSTNQN --subsystem {}, or forebay iscsi-target allow \
                             IQN --target {}",
                            after.nqn, after.target
                        )));
                    }
                    changes.push(GroupChange::SetSettings(settings::write(&after)));
                }
                Ok(changes)
            })
            .await
    }

    /// Creates a gateway group without members.
    pub async fn create_gateway_group(&self, spec: &GroupSpec, lease_ms: Option<u32>, rebalance: bool) -> Result<()> {
        let policy = GroupPolicy { lease_ms: lease_ms.unwrap_or(GroupPolicy::default().lease_ms), rebalance };
        if !GroupPolicy::LEASE_MS.contains(&policy.lease_ms) {
            let (least, most) = (GroupPolicy::LEASE_MS.start(), GroupPolicy::LEASE_MS.end());
            return Err(Failure::invalid(format!("a lease of {} ms: from {least} to {most}", policy.lease_ms)));
        }
        let id = GatewayGroupId(new_start().0);
        let identity = GroupIdentity::new(id, policy, settings::write(&GroupSettings::new(id)));
        self.group_store(spec).await?.create(identity).await.map_err(Failure::from)
    }

    /// Removes a gateway group that has no members and no volumes.
    pub async fn remove_gateway_group(&self, spec: &GroupSpec) -> Result<()> {
        self.group_store(spec).await?.remove().await.map_err(Failure::from)
    }

    /// Makes this daemon a member of a group, now and after each restart.
    pub async fn join_gateway_group(self: &Rc<Self>, spec: &GroupSpec) -> Result<()> {
        if let Some(joined) = self.gateways.joined() {
            if joined.spec != *spec {
                let what = format!("this daemon is in the gateway group {}", joined.spec);
                return Err(Failure::new(FailureKind::Exists, what).hint("leave it first: forebay group leave"));
            }
            // Others may have made it leave.
            joined.begin();
            return joined.wait_to_join().await;
        }
        self.check_peer_addrs()?;
        // Says at once what is wrong with the name.
        self.group_store(spec).await?.load().await.map_err(Failure::from)?;
        let stored = self.gateways.stored().unwrap_or_default();
        self.gateways.store(&StoredMembership { group: Some(spec.to_string()), ..stored })?;
        let joined = self.enter_group(spec);
        joined.begin();
        joined.wait_to_join().await
    }

    fn check_peer_addrs_of(&self, spec: Option<GroupSpec>) -> Result<Option<GroupSpec>> {
        if spec.is_some() {
            self.check_peer_addrs()?;
        }
        Ok(spec)
    }

    /// Checks that other members can reach this daemon.
    fn check_peer_addrs(&self) -> Result<()> {
        let addrs = self.peers.addrs();
        let hint = "start the daemon with --peer HOST:PORT and --peer-key FILE";
        if addrs.is_empty() {
            let what = "members of a gateway group reach each other over the peer protocol: this daemon does not listen for it";
            return Err(Failure::invalid(what).hint(hint));
        }
        let is_wildcard = |text: &&String| match text.parse::<Address>() {
            Ok(Address::Tcp(addr) | Address::Rdma(addr)) => addr.ip().is_unspecified(),
            _ => false,
        };
        match addrs.iter().find(is_wildcard) {
            Some(addr) => Err(Failure::invalid(format!(
                "other members cannot reach this daemon at {addr}, which is no address of it"
            ))
            .hint(hint)),
            None => Ok(()),
        }
    }

    /// Makes a group the one that this daemon is in.  Hosts that ask for it are told to try again until it has begun.
    pub(super) fn enter_group(self: &Rc<Self>, spec: &GroupSpec) -> Rc<JoinedGroup> {
        let joined = JoinedGroup::new(self, spec.clone());
        *self.gateways.group.borrow_mut() = Some(joined.clone());
        self.peers.set_group(Some(joined.clone()));
        joined.prepare_paths(self);
        drop(spawn(logs::keep(Rc::downgrade(&joined))));
        drop(spawn(stale_copies::look(Rc::downgrade(&joined))));
        joined
    }

    /// Prepares the membership that the configuration or the data directory names, if any.
    pub fn prepare_membership(self: &Rc<Self>, configured: Option<&GroupSpec>) -> Result<Option<Rc<JoinedGroup>>> {
        let stored = || match self.gateways.stored()?.group {
            Some(text) => text.parse::<GroupSpec>().map(Some).map_err(Failure::invalid),
            None => Ok(None),
        };
        let spec = match configured {
            Some(spec) => {
                self.check_peer_addrs()?;
                spec.clone()
            }
            // What this daemon serves alone is served all the same.
            None => match stored().and_then(|spec| self.check_peer_addrs_of(spec)) {
                Ok(Some(spec)) => spec,
                Ok(None) => return Ok(None),
                Err(failure) => {
                    tracing::error!(error = %failure, "this daemon does not take part in its gateway group");
                    return Ok(None);
                }
            },
        };
        Ok(Some(self.enter_group(&spec)))
    }

    /// Stops taking part in the group, so that others serve its volumes at once.
    pub async fn stop_membership(&self) {
        self.gateways.closing.set(true);
        if let Some(joined) = self.gateways.joined() {
            joined.stop().await;
        }
    }

    /// Leaves the group; volumes move to other members first.  If that fails, this daemon goes on as a member.
    pub async fn leave_gateway_group(&self) -> Result<()> {
        let joined = self.gateways.joined().ok_or_else(not_joined)?;
        let left = self.leave_record(&joined).await;
        if let Err(failure) = left {
            if !self.gateways.closing.get() {
                joined.begin();
            }
            return Err(failure);
        }
        joined.forget_exports();
        joined.forget_paths(self).await;
        self.peers.set_group(None);
        self.gateways.group.borrow_mut().take();
        self.gateways.store(&StoredMembership::default())
    }

    /// Stops as a member, and removes its entry from the record.
    async fn leave_record(&self, joined: &Rc<JoinedGroup>) -> Result<()> {
        let store = self.group_store(&joined.spec).await?;
        let record = store.load().await.map_err(Failure::from)?;
        let others = record.active().any(|member| member != joined.own);
        if record.owned_count(joined.own) > 0 && !others {
            return Err(Failure::new(FailureKind::Busy, "this daemon is the only active member, and owns volumes")
                .hint("end their exports first: forebay detach"));
        }
        refuse_leaving(&record, joined.own)?;
        joined.stop().await;
        if joined.running().is_some() {
            return Err(Failure::new(FailureKind::Busy, "this daemon has not closed all of its volumes yet")
                .hint("try again in a moment; 'forebay group status' shows what it has open"));
        }
        let leave = GroupChange::Leave { member: joined.own, now: wall_clock().as_secs() };
        match store.change(&[leave]).await.map_err(Failure::from)? {
            Ok(_) | Err(ChangeRefusal::NoMember) => Ok(()),
            Err(refusal) => Err(refused(refusal)),
        }
    }

    /// Begins or ends draining a member.
    pub async fn drain_gateway(&self, request: &DrainGateway) -> Result<()> {
        let joined = self.gateways.joined().ok_or_else(not_joined)?;
        let drain = !request.undo;
        joined
            .change(|record| {
                let member = match &request.member {
                    Some(name) => find_member(record, name)?,
                    None => joined.own,
                };
                let wanted = if drain { GatewayState::Draining } else { GatewayState::Active };
                let is_so = record.member(member).is_some_and(|entry| entry.state == wanted);
                Ok(if is_so { Vec::new() } else { vec![GroupChange::Drain { member, drain }] })
            })
            .await
    }

    /// Returns the state of a group: the one that this daemon is in, or another one.
    pub async fn gateway_group_status(&self, spec: Option<&GroupSpec>) -> Result<GatewayGroupStatus> {
        let joined = self.gateways.joined().filter(|joined| spec.is_none_or(|spec| joined.spec == *spec));
        let spec = match (&joined, spec) {
            (Some(joined), _) => joined.spec.clone(),
            (None, Some(spec)) => spec.clone(),
            (None, None) => return Err(not_joined()),
        };
        let known = joined.as_ref().and_then(|joined| joined.record());
        let record = match known {
            Some(record) => record,
            None => self.group_store(&spec).await?.load().await.map_err(Failure::from)?,
        };
        let running = joined.as_ref().and_then(|joined| joined.running());
        let loads = running.map(|running| running.runner.inspect(|machine| machine.group_loads())).unwrap_or_default();
        let member = |(id, entry): (&MemberId, &GatewayMember)| GatewayMemberStatus {
            id: id.to_string(),
            host: entry.host.clone(),
            version: entry.version.clone(),
            record_versions: entry.versions.into(),
            state: match entry.state {
                GatewayState::Active => "active",
                GatewayState::Draining => "draining",
                GatewayState::Fencing(_) => "fencing",
                GatewayState::Out(_) => "out",
            }
            .into(),
            own: joined.as_ref().is_some_and(|joined| joined.own == *id),
            connected: joined.as_ref().is_some_and(|joined| joined.connection(*id).is_some()),
            volumes: record.owned_count(*id),
            weight: entry.weight,
            load: loads.members.get(id).map(|load| (*load).into()),
            peer: entry.peer_addrs.clone(),
        };
        let host = |id: MemberId| record.member(id).map_or_else(|| id.to_string(), |member| member.host.clone());
        let volume = |(name, entry): (&VolumeName, &GatewayVolume)| {
            let settings: VolumeSettings = settings::read(&entry.settings);
            let owned = joined.as_ref().filter(|joined| joined.own == entry.owner.member);
            GatewayVolumeStatus {
                image: name.to_string(),
                fronts: settings.exports.iter().map(|export| export.front.name().to_owned()).collect(),
                sockets: JoinedGroup::sockets_of(&record, &settings),
                owner: host(entry.owner.member),
                next: entry.owner.next.map(host),
                leaving: entry.leaving,
                open_here: joined.as_ref().is_some_and(|joined| joined.owned.is_open(name)),
                load: owned.and_then(|joined| joined.owned.loads().get(name).map(|load| (*load).into())),
                log: logs::describe(entry, &settings, host),
                error: owned
                    .and_then(|joined| joined.owned.failure(name).or_else(|| joined.logs.failure(name)))
                    .or_else(|| logs::waits(&record, entry, host)),
            }
        };
        let names = joined.as_ref().and_then(|joined| joined.host_paths.names());
        let listed = GroupSettings::of(record.identity());
        let hosts = listed.as_ref().map(|settings| settings.hosts.clone()).unwrap_or_default();
        let (nqn, target) = match names {
            Some(names) => (names.nqn, names.target),
            None => listed.map(|names| (names.nqn, names.target))?,
        };
        Ok(GatewayGroupStatus {
            group: spec.to_string(),
            id: record.identity().id.to_string(),
            epoch: record.epoch(),
            record_version: record.version(),
            lease_ms: record.policy().lease_ms,
            rebalance: record.policy().rebalance,
            nqn,
            target,
            hosts: hosts.source,
            nvme_hosts: hosts.nvme,
            initiators: hosts.initiators,
            error: joined.as_ref().and_then(|joined| joined.last_error.borrow().clone()),
            members: record.members().iter().map(member).collect(),
            volumes: record.volumes().iter().map(volume).collect(),
        })
    }
}
