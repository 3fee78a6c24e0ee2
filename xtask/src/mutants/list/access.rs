//! Access control: subsystems, targets and exports, and the hosts of each.

use super::Mutant;
use crate::mutants::stage::Stage;

const DEFAULTS: Stage = Stage::Test("forebay", "access_defaults");

const ACCESS: &str = "bin/forebay/src/engine/access/mod.rs";
const NVME: &str = "bin/forebay/src/engine/access/nvme.rs";
const ISCSI: &str = "bin/forebay/src/engine/access/iscsi.rs";
const NBD_FRONT: &str = "bin/forebay/src/engine/fronts/nbd.rs";

pub(super) const LIST: &[Mutant] = &[
    Mutant::new(
        "access-nbd-name-unlisted",
        "NBD: an export is opened without a look at its hosts",
        NBD_FRONT,
        "if found.as_ref().is_some_and(|(_, offer)| !offer.is_for(host)) {",
        "if found.as_ref().is_some_and(|(found, offer)| found == name && !offer.is_for(host)) {",
        &[DEFAULTS],
    ),
    Mutant::new(
        "access-nbd-name-uncounted",
        "NBD: a connection is counted under the name that the host has said",
        NBD_FRONT,
        "Some(NbdExport::new(name.clone(), self.device(&name, &offer)?))",
        "Some(NbdExport::new(name.trim_start_matches(\"local/\").to_owned(), self.device(&name, &offer)?))",
        &[DEFAULTS],
    ),
    Mutant::new(
        "access-nvme-list-opens",
        "A subsystem whose only host cannot be read is for everybody",
        NVME,
        "access.hosts.get_or_insert_default();",
        "",
        &[DEFAULTS],
    ),
    Mutant::new(
        "access-nvme-falls-back",
        "A host whose secret cannot be read is let in by its name",
        NVME,
        "access.remove(&host.nqn);",
        "",
        &[DEFAULTS],
    ),
    Mutant::new(
        "access-nvme-last-denied",
        "Denying the last host opens the default subsystem to everybody",
        NVME,
        "match nqn.is_none() && listed.is_none() && hosts.is_empty() {",
        "match nqn.is_none() && listed.is_none() && hosts.len() > 1 {",
        &[DEFAULTS],
    ),
    Mutant::new(
        "access-nvme-configured-denied",
        "A host of the configuration is denied for as long as the daemon runs",
        NVME,
        "if nqn.is_none() && listed.iter().flatten().any(|each| each.nqn == host) {",
        "if nqn.is_none() && listed.iter().flatten().all(|each| each.nqn == host) && false {",
        &[DEFAULTS],
    ),
    Mutant::new(
        "access-iscsi-secret-lost",
        "A change of a target's initiators forgets what they have to prove",
        ISCSI,
        "(_, chap) => IscsiAccess { initiators: (!entry.any_initiator).then_some(entry.initiators), chap },",
        "(_, _) => IscsiAccess { initiators: (!entry.any_initiator).then_some(entry.initiators), chap: None },",
        &[DEFAULTS],
    ),
    Mutant::new(
        "access-default-name-taken",
        "Two subsystems of one name are started",
        ACCESS,
        "match wrong.into_iter().find(|(_, _, taken)| *taken) {",
        "match wrong.into_iter().find(|(_, _, taken)| *taken && false) {",
        &[DEFAULTS],
    ),
];
