//! Versions of the group record and of messages between members.
//!
//! A program works with two versions: its own, and the one before.  The record has one version, the oldest that any member
//! still needs; it is raised once every member works with the next one.  Within a version, fields are only added: a
//! program keeps those that it does not know.

use serde::{Deserialize, Serialize};

/// Versions that a program works with, stored as `[oldest, newest]`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "[u32; 2]", into = "[u32; 2]")]
pub struct GroupVersions {
    /// Oldest version.
    pub oldest: u32,
    /// Newest version.
    pub newest: u32,
}

impl GroupVersions {
    /// Versions of this program.
    pub const OWN: Self = Self { oldest: 1, newest: 1 };

    /// Returns whether a program of these versions works with a record of this one.
    pub fn contains(self, version: u32) -> bool {
        (self.oldest..=self.newest).contains(&version)
    }
}

impl Default for GroupVersions {
    /// Returns the versions of programs that do not state theirs.
    fn default() -> Self {
        Self { oldest: 1, newest: 1 }
    }
}

impl From<[u32; 2]> for GroupVersions {
    fn from([oldest, newest]: [u32; 2]) -> Self {
        Self { oldest, newest }
    }
}

impl From<GroupVersions> for [u32; 2] {
    fn from(versions: GroupVersions) -> Self {
        [versions.oldest, versions.newest]
    }
}

impl std::fmt::Display for GroupVersions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        if self.oldest == self.newest {
            write!(f, "version {}", self.newest)
        } else {
            write!(f, "versions {} to {}", self.oldest, self.newest)
        }
    }
}
