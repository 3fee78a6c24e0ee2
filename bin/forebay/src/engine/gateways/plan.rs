//! Changes of the group's record that add exports and end them.

use forebay_gateways::assign::LoadPlan;
use forebay_gateways::load::GroupLoads;
use forebay_gateways::{GatewayVolume, GroupChange, GroupRecord, MemberId, VolumeName};

use super::guests::host_of;
use super::logs::{PlannedLog, wanted_log};
use super::settings::{self, VolumeSettings, is_of_one_member};
use crate::api::{AttachRequest, Front};
use crate::failure::{Failure, FailureKind, Result};

/// Chooses the owner of a new volume: the member that is loaded least, this one if there are several.
fn first_owner(record: &GroupRecord, loads: &GroupLoads, own: MemberId) -> Result<MemberId> {
    LoadPlan::new(record, loads).choose(None, Some(own)).ok_or_else(|| {
        Failure::new(FailureKind::Busy, "no member of the group takes volumes: all are drained or out")
            .hint("'forebay group status' shows them; forebay group drain MEMBER --undo")
    })
}

/// Chooses the owner of a new volume: where its log can be, if it is to have one.
pub(super) fn planned_owner(
    record: &GroupRecord,
    loads: &GroupLoads,
    own: MemberId,
    planned: &PlannedLog,
) -> Result<MemberId> {
    if planned.copies.is_some() {
        return Ok(planned.owner);
    }
    let first = first_owner(record, loads, own)?;
    let takes_log = planned.log.is_none() || planned.primaries.contains(&first);
    Ok(if takes_log { first } else { planned.owner })
}

/// Reads the settings of a volume that are to be changed.
fn to_change(name: &VolumeName, entry: &GatewayVolume) -> Result<VolumeSettings> {
    settings::read_to_change(&format!("the settings of {name}"), &entry.settings)
}

/// Chooses the changes that add an export to the record.
pub(super) fn plan_export(
    record: &GroupRecord,
    (name, own): (&VolumeName, MemberId),
    request: &AttachRequest,
    identity: &str,
    planned: &PlannedLog,
    owner: impl FnOnce(&GroupRecord) -> Result<MemberId>,
) -> Result<Vec<GroupChange>> {
    let entry = record.volume(name);
    if entry.is_some_and(|entry| entry.leaving) {
        return Err(Failure::new(FailureKind::Busy, format!("the image {name} is being removed from the group"))
            .hint("try again when its owner has closed it"));
    }
    let mut settings = entry.map_or_else(|| Ok(VolumeSettings::default()), |entry| to_change(name, entry))?;
    let log_before = settings.log.clone();
    settings.log = wanted_log(name, entry, log_before.as_ref(), planned)?;
    if let Some(before) = settings.export_at(own, request.front) {
        let same = AttachRequest { unit: request.unit.or(before.unit), ..request.clone() };
        return match same == *before {
            true if settings.log == log_before => Ok(Vec::new()),
            true => Ok(vec![GroupChange::SetVolume { volume: name.clone(), settings: settings::write(&settings) }]),
            false => Err(Failure::new(FailureKind::Exists, format!("the image {name} is exported already"))
                .hint(format!("end that first: forebay detach {name}"))),
        };
    }
    let mut export = request.clone();
    if let Some(units) = request.front.units().filter(|_| !is_of_one_member(request.front)) {
        let all = record.volumes().iter().filter(|(other, _)| *other != name);
        let taken: Vec<u32> =
            all.flat_map(|(_, volume)| settings::taken_units(&volume.settings, request.front)).collect();
        let chosen = match request.unit {
            Some(unit) if taken.contains(&unit) => {
                return Err(Failure::new(FailureKind::Exists, format!("number {unit} is taken in the group")));
            }
            Some(unit) => Some(unit),
            None => units.clone().find(|unit| !taken.contains(unit)),
        };
        export.unit =
            Some(chosen.ok_or_else(|| Failure::new(FailureKind::NoSpace, "all numbers of the group are taken"))?);
    }
    settings.identity = identity.to_owned();
    settings.add_export(own, export);
    let (volume, settings) = (name.clone(), settings::write(&settings));
    if entry.is_some() {
        return Ok(vec![GroupChange::SetVolume { volume, settings }]);
    }
    let owner = owner(record)?;
    let copies = planned.copies.clone().map(|copies| {
        let volume = volume.clone();
        GroupChange::SetCopies { volume, owner, copies: Some(copies) }
    });
    Ok(std::iter::once(GroupChange::AddVolume { volume, owner, settings }).chain(copies).collect())
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
