//! Exports of the group's volumes to guests of this member's machine, over vhost-user.
//!
//! Each is of one member, which the record names with it: its socket is of that member's machine.  Another member may export
//! the same volume to a guest of its own machine, as a live migration needs.

use std::cell::Cell;
use std::path::Path;
use std::rc::Rc;
use std::time::Duration;

use forebay_block::BlockDevice;
use forebay_gateways::{GatewayMember, GatewayVolume, GroupRecord, MemberId, VolumeName};
use forebay_reactor::{sleep, spawn};

use super::guest_volume::GuestVolume;
use super::settings::{self, MemberSettings, VolumeSettings};
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
        let volume = Rc::new(GuestVolume::new(device));
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

pub(super) fn host_of(record: &GroupRecord, member: MemberId) -> String {
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
