//! The faults that are planted, by area.

mod access;
mod columns;
mod encryption;
mod forward;
mod fronts;
mod gateways;
mod image;
mod leases;
mod qos;
mod rados;
mod readcache;
mod replication;
mod store;
mod vhost;
mod writelog;

use anyhow::{Result, bail};

use super::stage::Stage;

/// The areas of the list.
pub(super) const AREAS: [&str; 14] = [
    "writelog",
    "replication",
    "store",
    "columns",
    "encryption",
    "image",
    "rados",
    "fronts",
    "access",
    "readcache",
    "qos",
    "forward",
    "gateways",
    "vhost",
];

/// Fault, and the stages that should notice it.
#[derive(Clone)]
pub(super) struct Mutant {
    pub(super) id: &'static str,
    pub(super) area: &'static str,
    /// Fault that it plants.
    pub(super) fault: &'static str,
    /// The source file, from the workspace's root.
    pub(super) file: &'static str,
    find: &'static str,
    /// Which of the places where the text is, if it is in several: the first has the index 0.
    index: Option<usize>,
    replace: &'static str,
    /// Stages to run, in order.
    pub(super) stages: &'static [Stage],
    /// Reason why no test can notice it, if none can.
    pub(super) equivalent: Option<&'static str>,
}

impl Mutant {
    pub(super) const fn new(
        id: &'static str,
        fault: &'static str,
        file: &'static str,
        find: &'static str,
        replace: &'static str,
        stages: &'static [Stage],
    ) -> Self {
        Self { id, area: "", fault, file, find, index: None, replace, stages, equivalent: None }
    }

    /// Selects one of several places.
    pub(super) const fn nth(mut self, index: usize) -> Self {
        self.index = Some(index);
        self
    }

    /// No test can notice it, for this reason.
    pub(super) const fn equivalent(mut self, reason: &'static str) -> Self {
        self.equivalent = Some(reason);
        self
    }

    /// Returns the file's text with the fault in it.
    ///
    /// # Errors
    /// The text that it replaces is not there, or there more than once where no index says which is meant.
    pub(super) fn apply(&self, text: &str) -> Result<String> {
        let places: Vec<usize> = text.match_indices(self.find).map(|(at, _)| at).collect();
        let at = match (self.index, &places[..]) {
            (None, [at]) => *at,
            (Some(index), places) if index < places.len() => places[index],
            _ => bail!("{}: {} has its text {} times: {:?}", self.id, self.file, places.len(), self.find),
        };
        if self.find == self.replace {
            bail!("{}: it changes nothing", self.id);
        }
        Ok([&text[..at], self.replace, &text[at + self.find.len()..]].concat())
    }

    /// Returns what is the same for two runs with the same fault and the same stages.
    pub(super) fn key(&self) -> String {
        let stages: Vec<String> = self.stages.iter().map(ToString::to_string).collect();
        format!("{}\n{}\n{:?}\n{}\n{}", self.file, self.find, self.index, self.replace, stages.join("\n"))
    }
}

/// Returns all faults.
pub(super) fn all() -> Vec<Mutant> {
    let areas: [(&str, &[Mutant]); 15] = [
        ("writelog", writelog::LIST),
        ("replication", replication::LIST),
        ("replication", leases::LIST),
        ("store", store::LIST),
        ("columns", columns::LIST),
        ("encryption", encryption::LIST),
        ("image", image::LIST),
        ("rados", rados::LIST),
        ("fronts", fronts::LIST),
        ("access", access::LIST),
        ("readcache", readcache::LIST),
        ("qos", qos::LIST),
        ("forward", forward::LIST),
        ("gateways", gateways::LIST),
        ("vhost", vhost::LIST),
    ];
    areas.iter().flat_map(|(area, list)| list.iter().map(|mutant| Mutant { area, ..*mutant })).collect()
}
