//! Exports of the group's volumes to guests of this member's machine, over vhost-user.
//!
//! Each is of one member, which the record names with it: its socket is of that member's machine.  Another member may export
//! the same volume to a guest of its own machine, as a live migration needs.

use std::cell::Cell;
use std::future::poll_fn;
use std::path::Path;
use std::pin::pin;
use std::rc::Rc;
use std::task::Poll;
use std::time::Duration;

use forebay_block::{
    BlockDevice, BlockReply, BlockRequest, Error, ErrorKind, Extent, ExtentMap, Geometry, LocalFuture, SizeWatch,
    reservation::Reservations,
};
use forebay_gateways::{GatewayMember, GatewayVolume, GroupChange, GroupRecord, MemberId, VolumeName};
use forebay_reactor::sync::Notify;
use forebay_reactor::{sleep, spawn, yield_now};

use super::settings::{self, MemberSettings, VolumeSettings, is_of_one_member};
use super::{ByVolume, JoinedGroup};
use crate::api::{AttachRequest, Front, GatewaySocket, VhostSocketOptions};
use crate::engine::exports::socket_taken;
use crate::engine::fronts::VhostBinding;
use crate::failure::{Failure, FailureKind, Result};
use crate::spec::ImageSpec;

/// Time after which a socket that could not be created is tried again.
const RETRY: Duration = Duration::from_secs(2);

/// Exports to guests of this machine.
#[derive(Default)]
pub(super) struct GuestExports {
    /// Volumes of those that are published.
    volumes: ByVolume<Rc<GuestVolume>>,
    /// Sockets of those that are to be published.
    sockets: ByVolume<GuestSocket>,
    /// Set while another attempt to create sockets is due.
    retrying: Cell<bool>,
}

/// Socket of an export.
struct GuestSocket {
    options: VhostSocketOptions,
    /// The same, once the names of its owners were looked up.
    binding: Option<VhostBinding>,
}

impl GuestExports {
    /// Returns a volume as a guest is to have it.
    pub(super) fn wrap(&self, name: &VolumeName, device: Rc<dyn BlockDevice>) -> Rc<dyn BlockDevice> {
        let volume = Rc::new(GuestVolume { device, outcome: Rc::default() });
        self.volumes.borrow_mut().insert(name.clone(), volume.clone());
        volume
    }

    /// Takes the volume of an export that ends.
    pub(super) fn take(&self, name: &VolumeName) -> Option<Rc<GuestVolume>> {
        self.volumes.borrow_mut().remove(name)
    }

    /// Forgets sockets of exports that are not wanted any more.
    pub(super) fn retain_sockets(&self, is_wanted: impl Fn(&VolumeName) -> bool) {
        self.sockets.borrow_mut().retain(|name, _| is_wanted(name));
    }
}

/// Volume of the group as a guest has it.  A guest has no other path, and no way to be told to wait: a request that fails
/// because this member was fenced, or is cut off, is held until the guest's connection ends.  It stays in the record of
/// requests in flight then, and is executed again when this member serves.
pub(super) struct GuestVolume {
    device: Rc<dyn BlockDevice>,
    outcome: Rc<FencedOutcome>,
}

/// Outcome of the requests of a guest whose member was fenced.
#[derive(Default)]
struct FencedOutcome {
    /// Set once the queues of all connections leave such requests to the next device.
    shown: Cell<bool>,
    /// Set once the connections have ended: what completes now must not change the guest's memory any more.
    over: Cell<bool>,
    changed: Notify,
}

impl GuestVolume {
    /// Ends the connections of an export.
    pub(super) async fn end(&self, disconnect: impl Future<Output = ()>) {
        let mut disconnect = pin!(disconnect);
        let is_over = poll_fn(|cx| Poll::Ready(disconnect.as_mut().poll(cx).is_ready())).await;
        // The connections are told now.  They tell their queues in their next turn.
        for _ in 0..2 {
            yield_now().await;
        }
        self.outcome.shown.set(true);
        self.outcome.changed.notify_all();
        if !is_over {
            disconnect.await;
        }
        self.outcome.over.set(true);
    }
}

impl FencedOutcome {
    async fn of<T>(&self, result: forebay_block::Result<T>) -> forebay_block::Result<T> {
        if self.over.get() {
            return Err(Error::new(ErrorKind::Fenced, "the connection of this guest has ended"));
        }
        if let Err(error) = &result
            && error.kind() == ErrorKind::Fenced
        {
            self.changed.wait_until(|| self.shown.get()).await;
        }
        result
    }
}

impl BlockDevice for GuestVolume {
    fn geometry(&self) -> Geometry {
        self.device.geometry()
    }

    fn submit(&self, request: BlockRequest) -> LocalFuture<forebay_block::Result<BlockReply>> {
        let (result, outcome) = (self.device.submit(request), self.outcome.clone());
        Box::pin(async move { outcome.of(result.await).await })
    }

    fn unit(&self) -> Option<u64> {
        self.device.unit()
    }

    fn map(&self, extent: Extent) -> LocalFuture<forebay_block::Result<ExtentMap>> {
        let (result, outcome) = (self.device.map(extent), self.outcome.clone());
        Box::pin(async move { outcome.of(result.await).await })
    }

    fn size_watch(&self) -> Option<Rc<SizeWatch>> {
        self.device.size_watch()
    }

    fn reservations(&self) -> Option<Reservations> {
        self.device.reservations()
    }
}

impl JoinedGroup {
    /// Returns the socket of an export that is to be published.  `None` if the names of its owners are not known yet: exports
    /// are reconciled when they are.
    pub(super) fn take_socket(
        self: &Rc<Self>,
        name: &VolumeName,
        options: &VhostSocketOptions,
    ) -> Option<VhostBinding> {
        let mut sockets = self.exports.guests.sockets.borrow_mut();
        if let Some(socket) = sockets.get_mut(name).filter(|socket| socket.options == *options) {
            let binding = socket.binding.take()?;
            sockets.remove(name);
            return Some(binding);
        }
        sockets.insert(name.clone(), GuestSocket { options: options.clone(), binding: None });
        let (group, name, options) = (self.clone(), name.clone(), options.clone());
        drop(spawn(async move {
            let resolved = VhostBinding::resolve(&options).await;
            let guests = &group.exports.guests;
            match guests.sockets.borrow_mut().get_mut(&name).filter(|socket| socket.options == options) {
                Some(socket) => socket.binding = resolved.as_ref().ok().cloned(),
                None => return,
            }
            if let Err(failure) = resolved {
                guests.sockets.borrow_mut().remove(&name);
                group.exports.published(&name, Front::Vhost, Err(failure));
                group.changed.announce();
                group.retry_sockets();
            } else {
                group.exports.reconcile(&group);
            }
        }));
        None
    }

    /// Publishes exports again after a while: a socket may be in use, or its directory missing, for a moment only.
    pub(super) fn retry_sockets(self: &Rc<Self>) {
        if self.exports.guests.retrying.replace(true) {
            return;
        }
        let group = self.this.clone();
        drop(spawn(async move {
            sleep(RETRY).await;
            let Some(group) = group.upgrade() else { return };
            group.exports.guests.retrying.set(false);
            group.exports.reconcile(&group);
        }));
    }

    /// Returns the volume whose export at this member has a socket.
    pub fn socket_owner(&self, path: &Path) -> Option<ImageSpec> {
        let all = self.settings.all();
        let has_it = |(_, settings): &&(VolumeName, Rc<VolumeSettings>)| has_socket(settings, self.own, path);
        all.iter().find(has_it).and_then(|(name, _)| name.as_str().parse().ok())
    }

    /// Checks what this member can find out about an export to a guest before it is in the record.
    pub(super) async fn check_guest(&self, record: &GroupRecord, request: &AttachRequest) -> Result<()> {
        let Some(options) = &request.vhost else { return Ok(()) };
        if options.scsi {
            let what = format!("{} is of a gateway group, whose images cannot be units of a controller", request.image);
            return Err(Failure::new(FailureKind::Unsupported, what)
                .hint("attach it as a disk, without --scsi; or over iscsi, where it is a unit of the group's target"));
        }
        VhostBinding::resolve(options).await?;
        let is_older = |(_, member): &(&MemberId, &GatewayMember)| {
            !settings::read::<MemberSettings>(&member.settings).member_exports
        };
        match record.members().iter().find(is_older) {
            None => Ok(()),
            Some((_, GatewayMember { host, version, .. })) => {
                let what =
                    format!("the member {host} runs version {version}, which knows no exports over vhost in a group");
                Err(Failure::new(FailureKind::Unsupported, what)
                    .hint(format!("upgrade {host} first; or attach the image over nbd, nvme or iscsi")))
            }
        }
    }

    /// Returns the exports of other members to guests, for an operator: where they are, and at which sockets.
    pub(super) fn sockets_of(record: &GroupRecord, settings: &VolumeSettings) -> Vec<GatewaySocket> {
        let socket = |own: &settings::MemberExport| {
            let path = own.export.vhost.as_ref().map(|options| options.path.display().to_string()).unwrap_or_default();
            GatewaySocket { member: host_of(record, own.member), path }
        };
        settings.member_exports.iter().map(socket).collect()
    }
}

fn has_socket(settings: &VolumeSettings, member: MemberId, path: &Path) -> bool {
    settings.export_at(member, Front::Vhost).and_then(AttachRequest::socket_path) == Some(path)
}

fn host_of(record: &GroupRecord, member: MemberId) -> String {
    record.member(member).map_or_else(|| member.to_string(), |member| member.host.clone())
}

/// Checks that no other volume's export at a member has the socket of a request.
pub(super) fn check_socket(
    record: &GroupRecord,
    name: &VolumeName,
    own: MemberId,
    request: &AttachRequest,
) -> Result<()> {
    let Some(path) = request.socket_path() else { return Ok(()) };
    let has_it = |(other, entry): &(&VolumeName, &GatewayVolume)| {
        *other != name && !entry.leaving && has_socket(&settings::read(&entry.settings), own, path)
    };
    match record.volumes().iter().find(has_it) {
        Some((other, _)) => Err(socket_taken(path, other)),
        None => Ok(()),
    }
}

/// Chooses the change of the record that ends an export: for all members, or of the member that ends it.
///
/// With `force`, a member that does not have the export ends those of members that are out.
pub(super) fn plan_end(
    record: &GroupRecord,
    name: &VolumeName,
    own: MemberId,
    front: Front,
    force: bool,
) -> Result<Vec<GroupChange>> {
    let entry = record.volume(name).filter(|entry| !entry.leaving);
    let has_log = entry.is_some_and(|entry| entry.copies.is_some());
    let mut settings = match entry {
        Some(entry) => settings::read_to_change(&format!("the settings of {name}"), &entry.settings)?,
        None => VolumeSettings::default(),
    };
    let is_out = |member| record.member(member).is_none_or(|member| !member.state.serves());
    if settings.export_at(own, front).is_some() {
        settings.remove_export(own, front);
    } else {
        let elsewhere: Vec<MemberId> = match is_of_one_member(front) {
            true => settings.member_exports.iter().map(|own| own.member).collect(),
            false => Vec::new(),
        };
        let out: Vec<MemberId> = elsewhere.iter().copied().filter(|member| is_out(*member)).collect();
        if out.is_empty() || !force {
            return Err(not_exported_here(record, name, front, &elsewhere, out.first()));
        }
        settings.member_exports.retain(|own| !out.contains(&own.member));
    }
    // Nobody would end those of members that have left.
    settings.member_exports.retain(|own| record.member(own.member).is_some());
    let volume = name.clone();
    let has_log = has_log || settings.log.is_some();
    if !settings.has_exports() {
        // With a log, its owner removes the volume when that has ended.
        settings.log = None;
    }
    Ok(vec![match settings.has_exports() || has_log {
        true => GroupChange::SetVolume { volume, settings: settings::write(&settings) },
        false => GroupChange::RemoveVolume { volume },
    }])
}

fn not_exported_here(
    record: &GroupRecord,
    name: &VolumeName,
    front: Front,
    elsewhere: &[MemberId],
    out: Option<&MemberId>,
) -> Failure {
    if elsewhere.is_empty() {
        let what = format!("the image {name} is not exported over {}", front.name());
        return Failure::new(FailureKind::NotFound, what).hint("'forebay targets' lists what is exported");
    }
    let hosts: Vec<String> = elsewhere.iter().map(|member| host_of(record, *member)).collect();
    let what = format!("{name} is exported over {} at {}, not at this member", front.name(), hosts.join(", "));
    let mut hint = "detach it there".to_owned();
    if let Some(out) = out {
        let host = host_of(record, *out);
        hint = format!(
            "{hint}; {host} is out: 'forebay detach {name} --{} --force' ends its export from here",
            front.name()
        );
    }
    Failure::new(FailureKind::NotFound, what).hint(hint)
}

/// Refuses that a member leaves which exports volumes to guests: they have no other path.
pub(super) fn refuse_leaving(record: &GroupRecord, own: MemberId) -> Result<()> {
    let has_guests = |(_, entry): &(&VolumeName, &GatewayVolume)| {
        let settings: VolumeSettings = settings::read(&entry.settings);
        !entry.leaving && settings.member_exports.iter().any(|each| each.member == own)
    };
    let names: Vec<String> = record.volumes().iter().filter(has_guests).map(|(name, _)| name.to_string()).collect();
    match names.first() {
        None => Ok(()),
        Some(first) => {
            let what = format!("this member exports volumes to guests of its machine: {}", names.join(", "));
            Err(Failure::new(FailureKind::Busy, what)
                .hint(format!("migrate or stop the guests, and end these exports: forebay detach {first} --vhost")))
        }
    }
}
