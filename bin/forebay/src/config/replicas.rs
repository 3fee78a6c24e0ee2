//! Configuration of copies of other daemons' write logs: the log device for them, and who may use it.

use std::path::PathBuf;

use forebay_messenger::Network;
use serde::Deserialize;

use super::absolute;
use crate::api::LogMedium;
use crate::failure::{Failure, Result};
use crate::units::Size;

/// `[replicas]` section.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct ReplicasSection {
    medium: Option<LogMedium>,
    path: Option<PathBuf>,
    quota: Option<Size>,
    allow: Option<Vec<String>>,
    force: Option<bool>,
}

/// Log device for copies of other daemons' write logs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReplicaSettings {
    /// Medium of the device.
    pub medium: LogMedium,
    /// File or device; empty for copies in memory.
    pub path: PathBuf,
    /// Maximum size of all logs on it, in bytes.
    pub quota: u64,
    /// Networks of the daemons that may have copies; if empty, every peer may.
    pub allow: Vec<Network>,
    /// Accepts memory that is not persistent, for measurements.
    pub force: bool,
}

impl ReplicasSection {
    /// Resolves the settings; `None` if this daemon holds no copies.
    pub(super) fn resolve(self) -> Result<Option<ReplicaSettings>> {
        let Self { medium, path, quota, allow, force } = self;
        let in_memory = medium == Some(LogMedium::Dram);
        let path = match path {
            Some(_) if in_memory => {
                return Err(Failure::invalid("[replicas]: copies in memory have no path")
                    .hint("leave out path, or write medium = \"ssd\" or \"pmem\""));
            }
            Some(path) => absolute(&path)?,
            None if in_memory => PathBuf::new(),
            None => {
                return match (medium, quota, allow, force) {
                    (None, None, None, None) => Ok(None),
                    _ => Err(Failure::invalid("[replicas]: the path of the log device is missing")
                        .hint("write for example path = \"/srv/forebay/replicas\"")),
                };
            }
        };
        let Some(Size(quota)) = quota else {
            return Err(Failure::invalid("[replicas]: the quota is missing")
                .hint("write for example quota = \"64G\": the size that all copies may have together"));
        };
        let medium = medium.unwrap_or(LogMedium::Ssd);
        let allow = allow.unwrap_or_default().into_iter().map(|text| text.parse::<Network>().map_err(Failure::invalid));
        let allow = allow.collect::<Result<_>>()?;
        Ok(Some(ReplicaSettings { medium, path, quota, allow, force: force.unwrap_or(false) }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resolve(text: &str) -> Result<Option<ReplicaSettings>> {
        toml::from_str::<ReplicasSection>(text).map_err(|error| Failure::invalid(error.to_string()))?.resolve()
    }

    #[test]
    fn settings_are_read_and_what_is_missing_is_said() {
        assert_eq!(resolve("").expect("nothing"), None);
        let settings = resolve("path = '/r'\nquota = '2G'\nallow = ['10.0.0.0/8']").expect("settings");
        let settings = settings.expect("a device");
        assert_eq!((settings.medium, settings.quota, settings.allow.len()), (LogMedium::Ssd, 2 << 30, 1));
        assert!(!settings.force);
        let settings = resolve("path = '/dev/shm/r'\nquota = '1G'\nmedium = 'pmem'\nforce = true").expect("settings");
        let settings = settings.expect("a device");
        assert_eq!((settings.medium, settings.force), (LogMedium::Pmem, true));
        let settings = resolve("medium = 'dram'\nquota = '1G'").expect("settings").expect("memory");
        assert_eq!((settings.medium, settings.path.as_os_str().is_empty()), (LogMedium::Dram, true));
        for (text, says) in [
            ("medium = 'dram'", "quota"),
            ("medium = 'dram'\npath = '/r'\nquota = '1G'", "no path"),
            ("quota = '1G'", "path"),
            ("force = true", "path"),
            ("path = '/r'", "quota"),
            ("path = '/r'\nquota = '1G'\nmedium = 'tape'", "tape"),
            ("path = '/r'\nquota = '1G'\nallow = ['10.0.0.0/99']", "10.0.0.0/99"),
            ("room = '1G'", "room"),
        ] {
            let failure = resolve(text).expect_err(text);
            assert!(failure.message.contains(says), "{text}: {failure}");
        }
    }
}
