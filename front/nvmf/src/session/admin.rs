//! Execution of admin commands.

use super::controller::EVENT_REQUESTS_MAX;
use super::{ADMIN_ENTRIES_MAX, Controller, ControllerType, IN_CAPSULE, QUEUE_ENTRIES_MAX, TRANSFER_MAX, log};
use crate::wire::command::{Fuse, NSID_ALL, admin as opcode};
use crate::wire::identify::{self, cns, event};
use crate::wire::log::{AnaGroup, DiscoveryEntry, Health};
use crate::wire::{DataStructure, NvmeStatus, PAGE, Sqe};

/// Largest namespace id, and the maximum number of namespaces; ids begin at 1.
pub const NAMESPACES_MAX: u32 = 8192;
/// Largest ANA group id, and the number of groups, of a subsystem whose groups have states by port; ids begin at 1.
pub const ANA_GROUPS_MAX: u32 = 16;
/// Maximum number of I/O queues of a controller.
pub const QUEUES_MAX: u16 = 64;
/// Maximum duration of an ANA transition, in seconds (ANATT).
const ANA_TRANSITION_S: u8 = 10;
/// Returns the bytes of the ANA log page with `groups` groups and every namespace.
pub(super) const fn ana_log_max(groups: u32) -> usize {
    16 + groups as usize * 32 + NAMESPACES_MAX as usize * 4
}

// Hosts read the page with one command; Linux does without ANA if that is longer than a transfer.
const _: () = assert!(ana_log_max(NAMESPACES_MAX) <= TRANSFER_MAX);

/// Granularity of the keep-alive timer: a second, in units of 100 ms.
const KEEP_ALIVE_UNIT: u16 = 10;

/// Immutable identity of a subsystem.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SubsystemIdentity {
    /// NVMe Qualified Name of the subsystem.
    pub nqn: String,
    /// Serial number; the first 20 characters are used.
    pub serial: String,
    /// Model number; the first 40 characters are used.
    pub model: String,
    /// Firmware revision; the first 8 characters are used.
    pub firmware: String,
}

/// Environment of a controller, as its admin queue sees it.
pub trait ControllerView {
    /// Returns the identity of the subsystem.
    fn identity(&self) -> &SubsystemIdentity;
    /// Returns the ids of the active namespaces, in ascending order.
    fn namespaces(&self) -> Vec<u32>;
    /// Returns the current description of a namespace; `None` if it does not exist.
    fn namespace(&self, nsid: u32) -> Option<identify::IdentifyNamespace>;
    /// Returns the ids of the controllers, in ascending order.
    fn controllers(&self) -> Vec<u16>;
    /// Returns the ANA change count, and the ANA groups as reached through this controller.
    fn ana(&self) -> (u64, Vec<AnaGroup>);
    /// Returns the largest ANA group id, which is the number of groups as well.
    fn ana_groups_max(&self) -> u32;
    /// Returns the generation counter and the entries of the discovery log page.
    fn discovery(&self) -> (u64, Vec<DiscoveryEntry>);
    /// Returns the counters of the SMART / Health Information log page: those of the whole process, of all
    /// subsystems and hosts together.
    fn health(&self) -> Health;
    /// Returns the maximum number of I/O queues of a controller.
    fn queues_max(&self) -> u16;
    /// Returns whether the host has connected I/O queues of this controller.
    fn has_io_queues(&self) -> bool;
    /// Returns whether reservations are supported.
    fn reservations(&self) -> bool;
    /// Returns whether a namespace's reservations persist through power loss; `None` if the namespace does not exist
    /// or does not support reservations.
    fn reservations_persist(&self, nsid: u32) -> Option<bool>;
}

/// Result of an admin command.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum AdminResult {
    /// Success, with the completion's result.
    Done(u64),
    /// Success, with data for the host.
    Data(Vec<u8>),
    /// Failure, with its status.
    Failed(NvmeStatus),
    /// Asynchronous Event Request, completed when an event occurs.
    Later,
    /// Abort of a command.
    Abort {
        /// Submission queue id of the command to abort.
        queue: u16,
        /// Command identifier of the command to abort.
        cid: u16,
    },
}

impl From<Result<AdminResult, NvmeStatus>> for AdminResult {
    fn from(result: Result<AdminResult, NvmeStatus>) -> Self {
        result.unwrap_or_else(AdminResult::Failed)
    }
}

const INVALID_FIELD: NvmeStatus = NvmeStatus::INVALID_FIELD.final_();
const INVALID_NAMESPACE: NvmeStatus = NvmeStatus::INVALID_NAMESPACE.final_();

/// Executes an admin command; `data` is the data that the host sent with it.
pub fn execute(controller: &mut Controller, view: &impl ControllerView, sqe: &Sqe, data: &[u8]) -> AdminResult {
    let io = controller.kind == ControllerType::Io;
    if sqe.fuse() != Fuse::None || !sqe.uses_sgl() {
        return AdminResult::Failed(INVALID_FIELD);
    }
    match sqe.opcode() {
        opcode::IDENTIFY => identify(controller, view, sqe).map(AdminResult::Data).into(),
        opcode::GET_LOG => log::get(controller, view, sqe).map(AdminResult::Data).into(),
        opcode::KEEP_ALIVE => AdminResult::Done(0),
        opcode::ASYNC_EVENT => controller.request_event(sqe.cid()).map(|()| AdminResult::Later).into(),
        opcode::GET_FEATURES => get_feature(controller, view, sqe).into(),
        opcode::SET_FEATURES => set_feature(controller, view, sqe, data).map(AdminResult::Done).into(),
        opcode::ABORT if io => AdminResult::Abort { queue: sqe.cdw(10) as u16, cid: (sqe.cdw(10) >> 16) as u16 },
        _ => AdminResult::Failed(NvmeStatus::INVALID_OPCODE.final_()),
    }
}

fn identify(controller: &Controller, view: &impl ControllerView, sqe: &Sqe) -> Result<Vec<u8>, NvmeStatus> {
    let (what, nsid) = (sqe.cdw(10) as u8, sqe.nsid());
    let cntid = (sqe.cdw(10) >> 16) as u16;
    let csi = (sqe.cdw(11) >> 24) as u8;
    if controller.kind == ControllerType::Discovery && !matches!(what, cns::CONTROLLER | cns::ACTIVE_LIST) {
        return Err(INVALID_FIELD);
    }
    let nvm_only = |page: Result<Vec<u8>, NvmeStatus>| if csi == identify::CSI_NVM { page } else { Err(INVALID_FIELD) };
    // A valid but inactive namespace id gets a structure of zeroes.
    let of_namespace = |encode: fn(&identify::IdentifyNamespace) -> Vec<u8>| match nsid {
        1..=NAMESPACES_MAX => Ok(view.namespace(nsid).as_ref().map_or_else(|| vec![0; identify::LEN], encode)),
        _ => Err(INVALID_NAMESPACE),
    };
    let existing = |encode: fn(&identify::IdentifyNamespace) -> Vec<u8>| {
        view.namespace(nsid).as_ref().map(encode).ok_or(INVALID_NAMESPACE)
    };
    let list = || match nsid {
        0..=0xFFFF_FFFD => Ok(identify::namespace_list(view.namespaces().into_iter(), nsid)),
        _ => Err(INVALID_NAMESPACE),
    };
    match what {
        cns::NAMESPACE | cns::ALLOCATED_NAMESPACE => of_namespace(identify::IdentifyNamespace::encode),
        cns::CONTROLLER => Ok(identify_controller(controller, view)),
        cns::ACTIVE_LIST if controller.kind == ControllerType::Discovery => Ok(vec![0; identify::LEN]),
        cns::ACTIVE_LIST | cns::ALLOCATED_LIST => list(),
        cns::CSI_ACTIVE_LIST | cns::CSI_ALLOCATED_LIST => nvm_only(list()),
        cns::DESCRIPTORS => existing(identify::IdentifyNamespace::descriptors),
        // No protection information, no storage tags: all zero.
        cns::CSI_NAMESPACE | cns::CSI_ALLOCATED_NAMESPACE => nvm_only(existing(|_| vec![0; identify::LEN])),
        cns::CSI_CONTROLLER => nvm_only(Ok(identify::nvm_controller(0, 0, 0))),
        cns::INDEPENDENT_NAMESPACE => existing(identify::IdentifyNamespace::encode_independent),
        cns::FORMAT_NAMESPACE | cns::CSI_FORMAT_NAMESPACE => {
            // Format 0 is the only one.
            let index = sqe.cdw(11) & 0xFFFF;
            let example = view.namespaces().first().and_then(|&first| view.namespace(first));
            match (what, index, example) {
                (cns::FORMAT_NAMESPACE, 0, Some(namespace)) => Ok(namespace.encode_format()),
                (cns::CSI_FORMAT_NAMESPACE, 0, _) => nvm_only(Ok(vec![0; identify::LEN])),
                _ => Err(INVALID_FIELD),
            }
        }
        cns::ATTACHED_CONTROLLERS if view.namespace(nsid).is_none() => Err(INVALID_NAMESPACE),
        cns::ATTACHED_CONTROLLERS | cns::CONTROLLERS => {
            Ok(identify::controller_list(view.controllers().into_iter(), cntid))
        }
        cns::COMMAND_SETS => Ok(identify::command_sets()),
        // NVM sets, virtualization, granularities, UUID lists and other structures are not supported.
        _ => Err(INVALID_FIELD),
    }
}

fn identify_controller(controller: &Controller, view: &impl ControllerView) -> Vec<u8> {
    let identity = view.identity();
    let discovery = controller.kind == ControllerType::Discovery;
    identify::IdentifyController {
        serial: &identity.serial,
        model: &identity.model,
        firmware: &identity.firmware,
        cntlid: controller.cntlid,
        nqn: if discovery { crate::wire::fabrics::DISCOVERY_NQN } else { &identity.nqn },
        discovery,
        transfer_pages_log2: (TRANSFER_MAX / PAGE).ilog2() as u8,
        events: if discovery { event::DISCOVERY } else { event::NAMESPACE | event::ANA },
        event_requests_max: EVENT_REQUESTS_MAX as u8 - 1,
        keep_alive_unit: KEEP_ALIVE_UNIT,
        namespaces_max: NAMESPACES_MAX,
        ana_group_max: view.ana_groups_max(),
        ana_groups: view.ana_groups_max(),
        ana_transition_s: ANA_TRANSITION_S,
        commands_max: if discovery { ADMIN_ENTRIES_MAX as u16 } else { QUEUE_ENTRIES_MAX as u16 },
        in_capsule: if discovery { 0 } else { IN_CAPSULE as u32 },
        reservations: view.reservations(),
    }
    .encode()
}

/// Supported feature.
struct Feature {
    id: u8,
    changeable: bool,
    /// Supported by discovery controllers too.
    discovery: bool,
}

const fn feature(id: u8, changeable: bool, discovery: bool) -> Feature {
    Feature { id, changeable, discovery }
}

/// Feature identifiers (base figure 316).
mod fid {
    pub(super) const ARBITRATION: u8 = 0x01;
    pub(super) const POWER: u8 = 0x02;
    pub(super) const TEMPERATURE: u8 = 0x04;
    pub(super) const RECOVERY: u8 = 0x05;
    pub(super) const WRITE_CACHE: u8 = 0x06;
    pub(super) const QUEUES: u8 = 0x07;
    pub(super) const ATOMICITY: u8 = 0x0A;
    pub(super) const EVENTS: u8 = 0x0B;
    pub(super) const KEEP_ALIVE: u8 = 0x0F;
    pub(super) const BEHAVIOUR: u8 = 0x16;
    pub(super) const HOST_ID: u8 = 0x81;
    pub(super) const RESERVATION_MASK: u8 = 0x82;
    pub(super) const RESERVATION_PERSISTENCE: u8 = 0x83;
}

const FEATURES: &[Feature] = &[
    feature(fid::ARBITRATION, true, false),
    feature(fid::POWER, true, false),
    feature(fid::TEMPERATURE, true, false),
    feature(fid::RECOVERY, true, false),
    feature(fid::WRITE_CACHE, true, false),
    feature(fid::QUEUES, true, false),
    feature(fid::ATOMICITY, true, false),
    feature(fid::EVENTS, true, true),
    feature(fid::KEEP_ALIVE, true, true),
    feature(fid::BEHAVIOUR, true, false),
    feature(fid::HOST_ID, false, false),
    feature(fid::RESERVATION_MASK, true, false),
    feature(fid::RESERVATION_PERSISTENCE, false, false),
];

/// Bytes of the host behaviour support structure.
const BEHAVIOUR_LEN: usize = 512;

fn find(controller: &Controller, id: u8) -> Result<&'static Feature, NvmeStatus> {
    let found = FEATURES.iter().find(|feature| feature.id == id);
    found.filter(|feature| has(controller, feature)).ok_or(INVALID_FIELD)
}

/// Returns whether a controller supports a feature.
fn has(controller: &Controller, feature: &Feature) -> bool {
    controller.kind == ControllerType::Io || feature.discovery
}

/// Returns the features of a controller, and whether each is per namespace.
pub(super) fn supported_features(controller: &Controller) -> Vec<(u8, bool)> {
    let of_namespace = |id| [fid::RESERVATION_MASK, fid::RESERVATION_PERSISTENCE].contains(&id);
    let supported = FEATURES.iter().filter(|feature| has(controller, feature));
    supported.map(|feature| (feature.id, of_namespace(feature.id))).collect()
}

/// Returns the result of the Number of Queues feature: `count` for submission and completion queues, each
/// zero-based.
fn queues(count: u16) -> u64 {
    let from_zero = u64::from(count.max(1) - 1);
    from_zero | from_zero << 16
}

fn get_feature(controller: &Controller, view: &impl ControllerView, sqe: &Sqe) -> Result<AdminResult, NvmeStatus> {
    let feature = find(controller, sqe.cdw(10) as u8)?;
    let default;
    let features = match sqe.cdw(10) >> 8 & 7 {
        0 => &controller.features,
        // Features are not saveable, so that the saved value is the default.
        1 | 2 => {
            default = super::FeatureValues::default();
            &default
        }
        3 => return Ok(AdminResult::Done(u64::from(feature.changeable) << 2)),
        _ => return Err(INVALID_FIELD),
    };
    Ok(match feature.id {
        fid::ARBITRATION => AdminResult::Done(features.arbitration.into()),
        fid::POWER => AdminResult::Done(features.power.into()),
        fid::TEMPERATURE => match sqe.cdw(11) >> 16 & 0xF {
            0 => AdminResult::Done(features.temperature[(sqe.cdw(11) >> 20 & 1) as usize].into()),
            _ => return Err(INVALID_FIELD),
        },
        fid::RECOVERY => AdminResult::Done(features.recovery.into()),
        fid::WRITE_CACHE => AdminResult::Done(features.write_cache.into()),
        // A host that has not set the feature may have the maximum.
        fid::QUEUES if features.queues == 0 => AdminResult::Done(queues(view.queues_max())),
        fid::QUEUES => AdminResult::Done(queues(features.queues)),
        fid::ATOMICITY => AdminResult::Done(features.atomicity.into()),
        fid::EVENTS => AdminResult::Done(features.events.into()),
        fid::KEEP_ALIVE => AdminResult::Done(controller.keep_alive_ms.into()),
        fid::BEHAVIOUR => {
            let mut data = features.behaviour.clone();
            data.resize(BEHAVIOUR_LEN, 0);
            AdminResult::Data(data)
        }
        fid::HOST_ID => {
            let mut page = DataStructure::new(16);
            page.bytes(0, &controller.host_id);
            AdminResult::Data(page.finish())
        }
        fid::RESERVATION_MASK | fid::RESERVATION_PERSISTENCE => {
            let persists = view.reservations_persist(sqe.nsid()).ok_or(INVALID_NAMESPACE)?;
            let mask = features.reservation_mask.get(&sqe.nsid()).copied().unwrap_or(0);
            AdminResult::Done(if feature.id == fid::RESERVATION_MASK { mask.into() } else { persists.into() })
        }
        _ => return Err(INVALID_FIELD),
    })
}

fn set_feature(
    controller: &mut Controller,
    view: &impl ControllerView,
    sqe: &Sqe,
    data: &[u8],
) -> Result<u64, NvmeStatus> {
    let feature = find(controller, sqe.cdw(10) as u8)?;
    if sqe.cdw(10) & 1 << 31 != 0 {
        return Err(NvmeStatus::NOT_SAVEABLE.final_());
    }
    if !feature.changeable {
        // The host identifier is fixed at Connect.
        return Err(if feature.id == fid::HOST_ID {
            NvmeStatus::SEQUENCE.final_()
        } else {
            NvmeStatus::NOT_CHANGEABLE.final_()
        });
    }
    let value = sqe.cdw(11);
    let features = &mut controller.features;
    match feature.id {
        fid::ARBITRATION => features.arbitration = value,
        fid::POWER if value & 0x1F != 0 => return Err(INVALID_FIELD),
        fid::POWER => features.power = value & 0xE0,
        fid::TEMPERATURE if value >> 16 & 0xF != 0 || value >> 20 & 3 > 1 => return Err(INVALID_FIELD),
        fid::TEMPERATURE => features.temperature[(value >> 20 & 1) as usize] = value as u16,
        fid::RECOVERY if value & 1 << 16 != 0 => return Err(INVALID_FIELD),
        fid::RECOVERY => features.recovery = value & 0xFFFF,
        fid::WRITE_CACHE => features.write_cache = value & 1 != 0,
        // The number of queues cannot change once an I/O queue is connected (base 5.27.1.5).
        fid::QUEUES if view.has_io_queues() => return Err(NvmeStatus::SEQUENCE.final_()),
        fid::QUEUES => {
            let (sq, cq) = (value & 0xFFFF, value >> 16);
            if sq == 0xFFFF || cq == 0xFFFF {
                return Err(INVALID_FIELD);
            }
            features.queues = (sq.min(cq) + 1).min(view.queues_max().into()) as u16;
            return Ok(queues(features.queues));
        }
        fid::ATOMICITY => features.atomicity = value & 1,
        fid::EVENTS => features.events = value,
        fid::KEEP_ALIVE => controller.keep_alive_ms = value,
        fid::RESERVATION_MASK => {
            let ids = match sqe.nsid() {
                NSID_ALL => view.namespaces(),
                nsid if view.reservations_persist(nsid).is_none() => return Err(INVALID_NAMESPACE),
                nsid => vec![nsid],
            };
            features.reservation_mask.extend(ids.into_iter().map(|nsid| (nsid, value & 0xE)));
        }
        fid::BEHAVIOUR if data.len() < BEHAVIOUR_LEN => return Err(NvmeStatus::SGL_LENGTH.final_()),
        fid::BEHAVIOUR => features.behaviour = data[..BEHAVIOUR_LEN].to_vec(),
        _ => return Err(INVALID_FIELD),
    }
    Ok(0)
}
