//! Location of a write log and its text form: `ssd:/srv/logs:1G`, `pmem:/mnt/pmem/logs:256M:force`, `dram:1G`.

use std::fmt;
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use forebay_writelog::replication::wire::LEASE_MAX_MS;
use forebay_writelog::replication::{PeerId, ReplicaPolicy};
use forebay_writelog::{MediumKind, PlaceChange, parse_id};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::config::absolute;
use crate::units::{Size, Span};

/// Minimum size of a log in bytes.
const SIZE_MIN: u64 = 16 << 20;
/// Maximum number of replicas of a log.
pub const REPLICAS_MAX: u32 = 4;

/// Medium of a log.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum LogMedium {
    /// File or device, written with direct I/O.
    Ssd,
    /// File on a DAX file system, memory-mapped.
    Pmem,
    /// Memory of the daemon: only of a log that has replicas, without which it is written back and given up.
    Dram,
}

impl From<MediumKind> for LogMedium {
    fn from(medium: MediumKind) -> Self {
        match medium {
            MediumKind::Ssd => Self::Ssd,
            MediumKind::Pmem => Self::Pmem,
            MediumKind::Dram => Self::Dram,
        }
    }
}

impl From<LogMedium> for MediumKind {
    fn from(medium: LogMedium) -> Self {
        match medium {
            LogMedium::Ssd => Self::Ssd,
            LogMedium::Pmem => Self::Pmem,
            LogMedium::Dram => Self::Dram,
        }
    }
}

impl LogMedium {
    /// Returns whether log devices of this medium take copies of logs on `log`.  Units of 64 bytes fit into memory only.
    /// Persistent memory takes copies of any log; memory that ends with the daemon only those of logs that are in such
    /// memory themselves, since a copy of another one would be weaker than what was asked for.
    pub fn takes_copies_of(self, log: LogMedium) -> bool {
        self == log || self == LogMedium::Pmem
    }

    /// Returns the name in the text form.
    pub fn name(self) -> &'static str {
        match self {
            LogMedium::Ssd => "ssd",
            LogMedium::Pmem => "pmem",
            LogMedium::Dram => "dram",
        }
    }
}

/// Way in which a log is taken over whose primary is lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "lowercase")]
pub enum TakeoverMode {
    /// The replica that `forebay log takeover` is run at.
    #[default]
    Manual,
    /// A replica by itself, when the primary's lease has run out.
    Auto,
}

impl TakeoverMode {
    /// Returns the name in the text form.
    pub fn name(self) -> &'static str {
        match self {
            Self::Manual => "manual",
            Self::Auto => "auto",
        }
    }
}

/// Minimum and maximum length of a lease, in milliseconds.
const LEASES_MS: std::ops::RangeInclusive<u64> = 50..=LEASE_MAX_MS as u64;

/// Location and options of a write log.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct LogPlace {
    /// Medium of the log.
    pub medium: LogMedium,
    /// File or device, which several logs may share; omitted for the medium `dram`.
    #[serde(default, skip_serializing_if = "is_no_path")]
    #[schema(value_type = String)]
    pub path: PathBuf,
    /// Size of this log in bytes.
    pub size: u64,
    /// Acknowledge writes before they are durable; a flush waits for them.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub on_flush: bool,
    /// Take memory that does not promise to keep what is stored.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub force: bool,
    /// Maximum of dirty bytes; the daemon's configured value if omitted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dirty_max: Option<u64>,
    /// Maximum age of a dirty write in milliseconds; the daemon's configured value if omitted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dirty_age_ms: Option<u64>,
    /// Way in which the log is taken over if its primary is lost: by command if omitted, or as before.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub takeover: Option<TakeoverMode>,
    /// Number of complete replicas below which writes are not acknowledged: 0 if omitted, or as before.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub replicas_min: Option<u32>,
    /// Length of the primary's lease in milliseconds; 500 if omitted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lease_ms: Option<u64>,
    /// Peers that are to have copies, other than the primary, in the order in which they take over: in a request by host
    /// name, address or id; in the record by id. If omitted, a new log has none, and an existing one those it has.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub replicas: Option<Vec<String>>,
    /// Gateway group of the log, which only the volume's owner in that group opens; set by the group.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group: Option<String>,
}

/// Returns whether a path is that of a log in the daemon's memory.
fn is_no_path(path: &Path) -> bool {
    path.as_os_str().is_empty()
}

impl LogPlace {
    /// Returns whether the log is in memory that ends with the daemon.
    pub fn is_in_memory(&self) -> bool {
        self.medium == LogMedium::Dram
    }

    /// Returns why no log can be there, if so: a request may name anything.
    pub fn refusal(&self) -> Option<&'static str> {
        match (self.is_in_memory(), is_no_path(&self.path)) {
            (true, false) => Some("a log in memory has no path"),
            (false, true) => Some("no path, which only a log in a gateway group lacks"),
            _ => None,
        }
    }

    /// Returns why a gateway group cannot have such a log, if so: its members choose the device, the peers and the primary.
    pub fn refusal_in_group(&self) -> Option<&'static str> {
        match self {
            _ if self.is_in_memory() => Some("logs in memory are not possible yet"),
            _ if !is_no_path(&self.path) => Some(
                "each member keeps its copy in the space of its [replicas] section: leave out the path, as in ssd:1G",
            ),
            _ if self.replicas.as_ref().is_some_and(|names| !names.is_empty()) => {
                Some("the group chooses the members that have copies: give their number with --replicas")
            }
            _ if self.takeover.is_some() => Some("the group assigns owners: leave out takeover="),
            _ if self.force => Some("the [replicas] section of each member says what memory it takes: leave out force"),
            _ => None,
        }
    }

    /// Returns the ids of the peers that it names.
    pub fn replica_ids(&self) -> Vec<PeerId> {
        let ids = self.replicas.iter().flatten();
        ids.filter_map(|id| parse_id(id)).map(PeerId).collect()
    }

    /// Returns the policy of its replicas.
    pub fn policy(&self) -> ReplicaPolicy {
        let default = ReplicaPolicy::default();
        ReplicaPolicy {
            lease: self.lease_ms.map_or(default.lease, |lease| {
                // A request or a record may name any.
                Duration::from_millis(lease.clamp(*LEASES_MS.start(), *LEASES_MS.end()))
            }),
            automatic: self.takeover == Some(TakeoverMode::Auto),
            replicas_min: self.replicas_min.unwrap_or_default(),
        }
    }

    /// Returns this place without what can be changed while the log is open.
    pub fn fixed(&self) -> Self {
        Self { dirty_max: None, dirty_age_ms: None, takeover: None, replicas_min: None, replicas: None, ..self.clone() }
    }

    /// Returns what differs between the place of a log and a requested one.
    pub fn change_to(&self, wanted: &Self) -> PlaceChange {
        let limits = |place: &Self| (place.dirty_max, place.dirty_age_ms, place.policy());
        let (has, wants) = (self.replica_ids(), wanted.replica_ids());
        let wanted = &Self {
            takeover: wanted.takeover.or(self.takeover),
            replicas_min: wanted.replicas_min.or(self.replicas_min),
            lease_ms: wanted.lease_ms.or(self.lease_ms),
            ..wanted.clone()
        };
        // A log with members has no place of its own: each of its primaries has it on another device.
        let moves = !has.is_empty()
            && (self.size, self.on_flush, self.policy().lease) == (wanted.size, wanted.on_flush, wanted.policy().lease);
        match () {
            // A log on a durable medium is not what was asked for when it is in memory that ends with the daemon.
            () if self.is_in_memory() && !wanted.is_in_memory() => PlaceChange::Other,
            () if !moves && self.fixed() != wanted.fixed() => PlaceChange::Other,
            // A log gets members when it is created, or never.
            () if wanted.replicas.is_some() && has.is_empty() != wants.is_empty() => PlaceChange::Other,
            () if limits(self) == limits(wanted) && (wanted.replicas.is_none() || has == wants) => PlaceChange::Same,
            () => PlaceChange::Limits,
        }
    }

    /// Returns this place with the limits of a requested one, and with its peers if it names some.
    pub fn adjusted_to(&self, wanted: &Self) -> Self {
        Self {
            dirty_max: wanted.dirty_max,
            dirty_age_ms: wanted.dirty_age_ms,
            takeover: wanted.takeover.or(self.takeover),
            replicas_min: wanted.replicas_min.or(self.replicas_min),
            replicas: wanted.replicas.clone().or_else(|| self.replicas.clone()),
            ..self.clone()
        }
    }

    /// Returns the place of a log that `own` has taken over from `former`, with its own copy on another device.
    pub fn moved_to(&self, (medium, path): (LogMedium, PathBuf), own: PeerId, former: PeerId) -> Self {
        let path = if medium == LogMedium::Dram { PathBuf::new() } else { path };
        let mut peers = self.replica_ids();
        peers.retain(|peer| *peer != own && *peer != former);
        peers.push(former);
        let replicas = peers.into_iter().map(|peer| peer.to_string()).collect();
        Self { medium, path, replicas: Some(replicas), ..self.clone() }
    }
}

impl fmt::Display for LogPlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match is_no_path(&self.path) {
            true => write!(f, "{}:{}", self.medium.name(), Size(self.size)),
            false => write!(f, "{}:{}:{}", self.medium.name(), self.path.display(), Size(self.size)),
        }
    }
}

impl FromStr for LogPlace {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong =
            |why: &str| format!("'{text}' is not a valid location of a log: {why}; write for example ssd:/srv/logs:1G");
        let (medium, rest) = text.split_once(':').ok_or_else(|| wrong("no colon"))?;
        let medium = match medium {
            "ssd" => LogMedium::Ssd,
            "pmem" => LogMedium::Pmem,
            "dram" => LogMedium::Dram,
            _ => return Err(wrong("the medium is ssd, pmem or dram")),
        };
        let in_memory = medium == LogMedium::Dram;
        let is_size = |text: &str| text.parse::<Size>().is_ok();
        let mut parts = rest.split(':');
        // A log in a gateway group has no path either.
        let has_no_path = in_memory || parts.next().is_some_and(is_size) && !parts.any(is_size);
        // As if there were an empty path.
        let with_path = if has_no_path { format!(":{rest}") } else { rest.to_owned() };
        let mut rest = &with_path[..];
        let (mut on_flush, mut force, mut dirty_max, mut dirty_age_ms) = (false, false, None, None);
        let (mut takeover, mut replicas_min, mut lease_ms) = (None, None, None);
        loop {
            let (before, last) = rest.rsplit_once(':').ok_or_else(|| wrong("no size"))?;
            match last {
                "on-flush" => on_flush = true,
                "force" => force = true,
                option if option.contains('=') && !option.contains('/') => match option.split_once('=') {
                    Some(("dirty", size)) => {
                        let Size(bytes) = size.parse().map_err(|error: String| wrong(&error))?;
                        if bytes == 0 {
                            return Err(wrong("dirty=0 leaves no space for a write"));
                        }
                        dirty_max = Some(bytes);
                    }
                    Some(("age", span)) => {
                        let Span(age) = span.parse().map_err(|error: String| wrong(&error))?;
                        dirty_age_ms = Some(age.as_millis() as u64);
                    }
                    Some(("takeover", "auto")) => takeover = Some(TakeoverMode::Auto),
                    Some(("takeover", "manual")) => takeover = Some(TakeoverMode::Manual),
                    Some(("takeover", _)) => return Err(wrong("takeover= is auto or manual")),
                    Some(("min-replicas", count)) => {
                        let count = count.parse().ok().filter(|count| *count <= REPLICAS_MAX);
                        replicas_min = Some(count.ok_or_else(|| wrong("min-replicas= is a number from 0 to 4"))?);
                    }
                    Some(("lease", span)) => {
                        let Span(lease) = span.parse().map_err(|error: String| wrong(&error))?;
                        let lease = lease.as_millis() as u64;
                        if !LEASES_MS.contains(&lease) {
                            return Err(wrong("lease= is from 50ms to 60s"));
                        }
                        lease_ms = Some(lease);
                    }
                    _ => {
                        return Err(wrong(
                            "the options are on-flush, force, dirty=SIZE, age=TIME, takeover=MODE, min-replicas=N and \
                             lease=TIME",
                        ));
                    }
                },
                size => {
                    let Size(size) = size.parse().map_err(|error: String| wrong(&error))?;
                    if size < SIZE_MIN {
                        return Err(wrong("a log has 16M at least"));
                    }
                    let path = match (has_no_path, before.is_empty()) {
                        (true, true) => PathBuf::new(),
                        (true, false) => return Err(wrong("a log in memory has no path, as in dram:1G")),
                        (false, true) => return Err(wrong("no path")),
                        (false, false) => {
                            absolute(&PathBuf::from(before)).map_err(|failure| wrong(&failure.message))?
                        }
                    };
                    return Ok(Self {
                        medium,
                        path,
                        size,
                        on_flush,
                        force,
                        dirty_max,
                        dirty_age_ms,
                        takeover,
                        replicas_min,
                        lease_ms,
                        replicas: None,
                        group: None,
                    });
                }
            }
            rest = before;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_read_from_the_end() {
        let place: LogPlace = "ssd:/srv/a:b:64M".parse().expect("a place");
        assert_eq!((place.path.to_str(), place.size, place.force), (Some("/srv/a:b"), 64 << 20, false));
        assert!(LogMedium::Pmem.takes_copies_of(LogMedium::Ssd) && !LogMedium::Ssd.takes_copies_of(LogMedium::Pmem));
        let place: LogPlace = "pmem:/mnt/p:1G:force:on-flush".parse().expect("a place");
        assert!(place.medium == LogMedium::Pmem && place.force && place.on_flush);
        let place: LogPlace = "ssd:/srv/a=b:64M:dirty=8M:age=500ms".parse().expect("a place");
        assert_eq!((place.dirty_max, place.dirty_age_ms), (Some(8 << 20), Some(500)));
        assert_eq!(place.path.to_str(), Some("/srv/a=b"));
        let place: LogPlace = "ssd:/l:64M:takeover=auto:min-replicas=1:lease=2s".parse().expect("a place");
        let policy = ReplicaPolicy { lease: Duration::from_secs(2), automatic: true, replicas_min: 1 };
        assert_eq!(place.policy(), policy);
        for wrong in ["ssd:/l:1G:lease=1ms", "ssd:/l:1G:lease=2h", "ssd:/l:1G:takeover=now", "ssd:/l:1G:min-replicas=5"]
        {
            assert!(wrong.parse::<LogPlace>().is_err(), "{wrong}");
        }
        for wrong in ["ssd:/srv:1G:dirty=0B", "ssd:/srv:1G:dirty=x", "ssd:/srv:1G:age=5", "ssd:/srv:1G:colour=red"] {
            assert!(wrong.parse::<LogPlace>().is_err(), "{wrong}");
        }
        for wrong in ["ssd", "ssd:/srv", "disk:/srv:1G", "ssd:/srv:1M", "ssd::1G", "ssd:/srv:1G:often"] {
            assert!(wrong.parse::<LogPlace>().is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_log_in_memory_has_no_path() {
        let place: LogPlace = "dram:1G:takeover=auto:lease=2s".parse().expect("a place");
        assert_eq!((place.medium, place.size, place.policy().automatic), (LogMedium::Dram, 1 << 30, true));
        assert_eq!((place.to_string().as_str(), place.refusal()), ("dram:1 GiB", None));
        let stored = serde_json::to_string(&place).expect("JSON");
        assert!(!stored.contains("path"), "{stored}");
        assert_eq!(serde_json::from_str::<LogPlace>(&stored).expect("a place"), place);
        for wrong in ["dram", "dram:", "dram:/srv:1G", "dram:1M", "dram:1G:often", "dram:lease=2s"] {
            assert!(wrong.parse::<LogPlace>().is_err(), "{wrong}");
        }
        assert!(LogPlace { path: "/srv".into(), ..place.clone() }.refusal().is_some());
        assert!(LogPlace { medium: LogMedium::Pmem, ..place }.refusal().is_some());
        let takes = [(LogMedium::Dram, true), (LogMedium::Pmem, false), (LogMedium::Ssd, false)];
        for (log, expected) in takes {
            assert_eq!(LogMedium::Dram.takes_copies_of(log), expected, "{log:?}");
        }
        assert!(LogMedium::Pmem.takes_copies_of(LogMedium::Dram) && !LogMedium::Ssd.takes_copies_of(LogMedium::Dram));
    }

    #[test]
    fn a_log_in_a_group_has_no_path_and_only_such_a_log() {
        let place: LogPlace = "ssd:1G:on-flush:min-replicas=1".parse().expect("a place");
        assert_eq!((place.medium, place.size, place.to_string().as_str()), (LogMedium::Ssd, 1 << 30, "ssd:1 GiB"));
        assert!(place.on_flush && place.refusal().is_some() && place.refusal_in_group().is_none());
        // A relative path may look like a size.
        let place: LogPlace = "ssd:1G:2G".parse().expect("a place");
        assert_eq!((place.size, place.path.ends_with("1G")), (2 << 30, true));
        for refused in ["ssd:/srv:1G", "dram:1G", "ssd:1G:takeover=auto", "pmem:1G:force"] {
            assert!(refused.parse::<LogPlace>().expect("a place").refusal_in_group().is_some(), "{refused}");
        }
    }

    #[test]
    fn a_durable_log_is_never_replaced_by_one_in_memory() {
        let with = |text: &str| LogPlace {
            replicas: Some(vec![PeerId([2; 16]).to_string()]),
            ..text.parse::<LogPlace>().expect("a place")
        };
        let (memory, durable) = (with("dram:1G"), with("pmem:/p:1G"));
        assert_eq!(memory.change_to(&durable), PlaceChange::Other, "it would be weaker than what is asked for");
        assert_eq!(durable.change_to(&memory), PlaceChange::Same, "a takeover has made it stronger");
        let moved = durable.moved_to((LogMedium::Dram, "memory".into()), PeerId([2; 16]), PeerId([1; 16]));
        assert_eq!((moved.path.as_os_str().is_empty(), moved.refusal()), (true, None));
    }

    #[test]
    fn a_log_with_replicas_is_the_same_wherever_its_primary_has_it() {
        let peer = |number: u8| PeerId([number; 16]);
        let with = |text: &str, peers: &[u8]| LogPlace {
            replicas: Some(peers.iter().map(|number| peer(*number).to_string()).collect()),
            ..text.parse::<LogPlace>().expect("a place")
        };
        let place = with("ssd:/logs:1G", &[2, 3]);
        let moved = place.moved_to((LogMedium::Ssd, "/replicas".into()), peer(2), peer(1));
        assert_eq!(moved, with("ssd:/replicas:1G", &[3, 1]), "the former primary is the last that takes over");
        let plain: LogPlace = "ssd:/logs:1G".parse().expect("a place");
        assert_eq!(moved.change_to(&plain), PlaceChange::Same, "it names no peers");
        assert_eq!(moved.change_to(&with("ssd:/logs:1G", &[3, 1])), PlaceChange::Same);
        assert_eq!(moved.change_to(&with("ssd:/logs:1G", &[1, 3])), PlaceChange::Limits, "another order");
        let automatic = with("ssd:/logs:1G:takeover=auto:min-replicas=1", &[3, 1]);
        assert_eq!(moved.change_to(&automatic), PlaceChange::Limits);
        assert_eq!(moved.adjusted_to(&automatic), with("ssd:/replicas:1G:takeover=auto:min-replicas=1", &[3, 1]));
        assert_eq!(moved.change_to(&with("ssd:/logs:1G:lease=2s", &[3, 1])), PlaceChange::Other);
        let other = with("ssd:/logs:1G:dirty=8M", &[4]);
        assert_eq!(moved.change_to(&other), PlaceChange::Limits);
        assert_eq!(moved.adjusted_to(&other), with("ssd:/replicas:1G:dirty=8M", &[4]));
        // What is not named stays.
        let moved_auto = moved.adjusted_to(&automatic);
        assert_eq!(moved_auto.adjusted_to(&with("ssd:/logs:1G", &[4])).policy(), automatic.policy());
        assert_eq!(moved.adjusted_to(&plain), moved);
        // Neither another size, nor one without the other.
        for other in [with("ssd:/logs:2G", &[1, 3]), with("ssd:/logs:1G", &[])] {
            assert_eq!(moved.change_to(&other), PlaceChange::Other);
        }
        assert_eq!(plain.change_to(&with("ssd:/logs:1G", &[1])), PlaceChange::Other);
        assert_eq!(plain.change_to(&"ssd:/elsewhere:1G".parse().expect("a place")), PlaceChange::Other);
        assert_eq!(plain.change_to(&"ssd:/logs:1G:age=1s".parse().expect("a place")), PlaceChange::Limits);
        assert_eq!(plain.change_to(&plain), PlaceChange::Same);
    }
}
