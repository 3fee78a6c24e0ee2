//! Entries of the file that lists exports, parsed one by one: a malformed entry does not affect the others.

use std::collections::BTreeMap;
use std::path::PathBuf;

use forebay_export::RetiredNumber;
use forebay_nbd::access::HostPattern;
use forebay_nvmf::session::admin::ANA_GROUPS_MAX;
use serde::Deserialize;
use serde_json::Value;

use super::{Export, ExportKey, Lifecycle};
use crate::api::{self, Front};
use crate::engine::identity::parse_uuid;
use crate::engine::targets::TargetsContent;
use crate::failure::{Failure, FailureKind, Result};
use crate::spec::{ImageSpec, image_spec};

/// Entry that is kept in the file but not served: it names no image, or repeats an export listed before it.
pub(super) struct Unserved {
    pub(super) entry: Value,
    pub(super) key: Option<ExportKey>,
}

/// Content of the file.
pub(super) struct Listed {
    pub(super) exports: BTreeMap<ExportKey, Export>,
    pub(super) unserved: Vec<Unserved>,
    /// Numbers of exports that have ended.
    pub(super) retired: Vec<RetiredNumber<Front>>,
}

/// Fields that every entry of the file must have.
#[derive(Deserialize)]
struct EntryName {
    pool: String,
    image: String,
    front: Front,
}

/// Parses an entry.  If only its name can be parsed, it is an export that is not served.
fn read_entry(entry: &Value) -> Result<(ExportKey, Export)> {
    let wrong = |what: String| Failure::new(FailureKind::Corrupt, format!("invalid entry in targets.json: {what}"));
    let name = EntryName::deserialize(entry).map_err(|error| wrong(error.to_string()))?;
    let spec = image_spec(&name.pool, &name.image)?;
    let hint = format!("repair the entry while no daemon runs, or: forebay detach {spec}");
    let key = (name.front, spec);
    match api::AttachRequest::deserialize(entry) {
        Ok(request) => {
            let checked = check_nvme(&request).and_then(|()| request.check_vhost());
            let checked = checked.and_then(|()| match request.unit {
                Some(unit) => request.front.check_unit(unit),
                None => Ok(()),
            });
            let life = match checked {
                Ok(()) => Lifecycle::idle(),
                Err(failure) => Lifecycle::broken(wrong(failure.message).hint(hint)),
            };
            Ok((key, Export::listed(request, None, life)))
        }
        Err(error) => {
            let EntryName { pool, image, front } = name;
            let request = api::AttachRequest { read_only: true, ..api::AttachRequest::new(&pool, &image, front) };
            let life = Lifecycle::broken(wrong(error.to_string()).hint(hint));
            Ok((key, Export::listed(request, Some(entry.clone()), life)))
        }
    }
}

/// Parses all entries of the files.
pub(super) fn read_all(content: TargetsContent) -> Listed {
    let TargetsContent { targets: entries, retired } = content;
    let mut exports: BTreeMap<ExportKey, Export> = BTreeMap::new();
    let mut unserved = Vec::new();
    for entry in entries {
        let (key, export) = match read_entry(&entry) {
            Ok(read) => read,
            Err(failure) => {
                tracing::error!(%entry, error = %failure.message, "an export is not served");
                unserved.push(Unserved { entry, key: None });
                continue;
            }
        };
        match exports.get_mut(&key) {
            None => drop(exports.insert(key, export)),
            Some(first) => {
                let (front, spec) = &key;
                let what = format!("targets.json lists the export of {spec} over {} twice", front.name());
                match first.request == export.request && first.entry == export.entry {
                    true => tracing::warn!("{what}, identically; using the first"),
                    false => {
                        // It is unknown which of them hosts were given the number of.
                        let failure = Failure::new(FailureKind::Corrupt, format!("{what}, with different settings"));
                        let hint = format!("forebay detach {spec} removes both; attach it again as it should be");
                        first.life.set_broken(failure.hint(hint));
                        unserved.push(Unserved { entry, key: Some(key) });
                    }
                }
            }
        }
    }
    refuse_shared_numbers(&mut exports);
    refuse_shared_sockets(&mut exports);
    Listed { exports, unserved, retired }
}

/// Marks exports over one front that share a number as not served: hosts of one would write to the other's image.
fn refuse_shared_numbers(exports: &mut BTreeMap<ExportKey, Export>) {
    let mut owners: BTreeMap<(Front, Option<String>, u32), Vec<ImageSpec>> = BTreeMap::new();
    for ((front, spec), export) in exports.iter() {
        if let Some(unit) = export.request.unit {
            owners.entry((*front, export.request.within().map(str::to_owned), unit)).or_default().push(spec.clone());
        }
    }
    for ((front, _, unit), specs) in owners.into_iter().filter(|(_, specs)| specs.len() > 1) {
        for spec in &specs {
            let others: Vec<String> = specs.iter().filter(|other| *other != spec).map(ToString::to_string).collect();
            let what =
                format!("targets.json gives number {unit} over {} to {spec} and {}", front.name(), others.join(", "));
            let hint = format!("forebay detach {} and attach it again; then attach the other", others.join(" "));
            if let Some(export) = exports.get_mut(&(front, spec.clone())) {
                export.life.set_broken(Failure::new(FailureKind::Corrupt, what).hint(hint));
            }
        }
    }
}

/// Marks exports that share a socket as not served, except units of a controller: a guest of one would write to the
/// other's image.
fn refuse_shared_sockets(exports: &mut BTreeMap<ExportKey, Export>) {
    let mut owners: BTreeMap<PathBuf, Vec<ExportKey>> = BTreeMap::new();
    for (key, export) in exports.iter() {
        if let Some(path) = export.request.socket_path() {
            owners.entry(path.to_owned()).or_default().push(key.clone());
        }
    }
    for (path, keys) in owners.into_iter().filter(|(_, keys)| keys.len() > 1) {
        let options = |key: &ExportKey| exports.get(key).and_then(|export| export.request.vhost.clone());
        let first = options(&keys[0]);
        if first.as_ref().is_some_and(|first| first.scsi) && keys.iter().all(|key| options(key) == first) {
            // They are units of one controller.
            continue;
        }
        for key in &keys {
            let others: Vec<String> =
                keys.iter().filter(|other| *other != key).map(|(_, spec)| spec.to_string()).collect();
            let what =
                format!("targets.json gives the socket {} to {} and {}", path.display(), key.1, others.join(", "));
            let hint = format!("forebay detach {} and attach it again; then attach the other", others.join(" "));
            if let Some(export) = exports.get_mut(key) {
                export.life.set_broken(Failure::new(FailureKind::Corrupt, what).hint(hint));
            }
        }
    }
}

/// Validates the list of hosts that may see an export.
pub(super) fn check_hosts(front: Front, hosts: &[String]) -> Result<()> {
    match front {
        Front::Nbd => hosts.iter().try_for_each(|host| match host.parse::<HostPattern>() {
            Ok(_) => Ok(()),
            Err(why) => Err(Failure::invalid(why)),
        }),
        Front::Nvme | Front::Iscsi => check_initiators(hosts),
        Front::Vhost if hosts.is_empty() => Ok(()),
        Front::Vhost => Err(Failure::invalid("exports over vhost have no list of hosts")
            .hint("the permissions of the socket say who may connect: vhost.mode and vhost.owner")),
    }
}

/// Validates the initiator names that may see an export (RFC 7143, 4.2.7): `iqn.`, `eui.` or `naa.` and what follows,
/// or a prefix of such names and `*`.
pub fn check_initiators(hosts: &[String]) -> Result<()> {
    let is_name = |host: &String| {
        let known =
            ["iqn.", "eui.", "naa."].iter().any(|kind| host.strip_prefix(kind).is_some_and(|rest| !rest.is_empty()));
        let pattern = host.ends_with('*');
        let plain = host.chars().all(|c| c.is_alphanumeric() || matches!(c, '.' | '-' | ':' | '_' | '*'));
        plain && (known || pattern) && host.len() <= 223
    };
    match hosts.iter().find(|host| !is_name(host)) {
        Some(host) => Err(Failure::invalid(format!("'{}' is not a valid initiator name", host.escape_debug()))
            .hint("a Linux host has it in /etc/iscsi/initiatorname.iscsi: iqn.1993-08.org.debian:01:...")),
        None => Ok(()),
    }
}

/// Validates the fields that apply to NVMe only: UUID and ANA group.
pub(super) fn check_nvme(request: &api::AttachRequest) -> Result<()> {
    if request.front != Front::Nvme && (request.uuid.is_some() || request.ana_group.is_some()) {
        return Err(Failure::invalid("uuid and ana_group are for exports over nvme"));
    }
    if let Some(uuid) = request.uuid.as_deref().filter(|text| parse_uuid(text).is_none_or(|uuid| uuid == [0; 16])) {
        return Err(Failure::invalid(format!("'{uuid}' is not a UUID")).hint("uuidgen makes one"));
    }
    match request.ana_group {
        Some(group) if !(1..=ANA_GROUPS_MAX).contains(&group) => {
            Err(Failure::invalid(format!("ANA group {group}: from 1 to {ANA_GROUPS_MAX}")))
        }
        _ => Ok(()),
    }
}
