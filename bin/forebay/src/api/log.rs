//! Write logs, their members and their takeovers.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::{LogPlace, TakeoverMode};

/// Write log of an image.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[schema(as = Log)]
pub struct WriteLogInfo {
    /// Log id.
    pub id: String,
    /// Image of the log, by its name when the log was created.
    pub image: String,
    /// Location of the log.
    pub place: LogPlace,
    /// Epoch of its membership.
    pub epoch: u64,
    /// Set if its payloads are encrypted; omitted if that is unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub encrypted: Option<bool>,
    /// `acquiring`, `on`, `turning-off`, `off` or `failed` while it is open; otherwise `closed`, `open` (elsewhere),
    /// `replica` (of another daemon's log), `abandoned` (no image's record names it) or `unreachable`.
    pub state: String,
    /// Reason why it is not on, or why write-back is stalled.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// Maximum of dirty bytes; if omitted, limited by the capacity of the log.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dirty_max: Option<u64>,
    /// Maximum age of a dirty write, in milliseconds.
    pub dirty_age_max_ms: u64,
    /// Number of dirty entries.
    pub dirty_entries: u64,
    /// Number of dirty bytes.
    pub dirty_bytes: u64,
    /// Time of the oldest dirty write: milliseconds since 1970.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub dirty_since_ms: Option<u64>,
    /// Members, if it has replicas.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub members: Vec<LogMember>,
    /// Number of copies that it should have, where this daemon is its primary.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub copies_wanted: Option<u32>,
    /// Policy of its replicas, if it has some.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub policy: Option<LogPolicy>,
    /// Last takeover of the log by this daemon since it started.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub last_takeover: Option<LogTakeover>,
}

/// Policy of a write log that has replicas, as it is in effect.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct LogPolicy {
    /// Mode of takeovers if the primary is lost.
    pub takeover: TakeoverMode,
    /// Length of the primary's lease in milliseconds.
    pub lease_ms: u64,
    /// Number of complete replicas below which writes are not acknowledged.
    pub min_replicas: u32,
}

/// Takeover of a write log.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct LogTakeover {
    /// Time at which the log served requests: milliseconds since 1970.
    pub at_ms: u64,
    /// Time from the command, or the decision of the daemon, until then, in milliseconds.
    pub duration_ms: u64,
    /// Former primary, by the id of its daemon.
    pub from: String,
    /// Host name of the former primary, if it is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub from_host: Option<String>,
    /// Set if the daemon took over by itself.
    pub automatic: bool,
}

impl WriteLogInfo {
    /// Returns a log of which only the location is known.
    pub fn at(place: LogPlace) -> Self {
        Self {
            id: String::new(),
            image: String::new(),
            dirty_max: place.dirty_max,
            dirty_age_max_ms: place.dirty_age_ms.unwrap_or_default(),
            place,
            epoch: 0,
            encrypted: None,
            state: String::new(),
            reason: None,
            dirty_entries: 0,
            dirty_bytes: 0,
            dirty_since_ms: None,
            members: Vec::new(),
            copies_wanted: None,
            policy: None,
            last_takeover: None,
        }
    }

    /// Formats the dirty bytes and entries for display.
    pub fn dirty(&self) -> String {
        format!("{} in {} entries", crate::units::Size(self.dirty_bytes), self.dirty_entries)
    }

    /// Formats what would be lost with the log for display, at a time since 1970: the dirty bytes, and since when they are.
    pub fn loss(&self, now: Duration) -> String {
        let since = self.dirty_since_ms.map(Duration::from_millis).map(|since| {
            let age = crate::units::duration(now.saturating_sub(since).as_secs());
            format!(", the oldest written {age} ago ({})", crate::timestamp::Timestamp(since.as_secs()))
        });
        self.dirty() + &since.unwrap_or_default()
    }
}

/// Member of a write log that has replicas.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct LogMember {
    /// Id of its daemon.
    pub peer: String,
    /// Host name of the daemon, if it is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host: Option<String>,
    /// `primary`, or `replica`.
    pub role: String,
    /// `complete`: it has every acknowledged write, and may take over; or `filling`.
    pub state: String,
    /// Set if it is connected; known to the primary only.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub connected: Option<bool>,
    /// Number of entries that it lacks.
    #[serde(default)]
    pub lag_entries: u64,
    /// Bytes of the log that it lacks, at most.
    #[serde(default)]
    pub lag_bytes: u64,
    /// Time for which it has lacked some without progress, in milliseconds.
    #[serde(default)]
    pub lag_ms: u64,
}
