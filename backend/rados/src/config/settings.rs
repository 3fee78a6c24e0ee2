//! Settings that the monitors may store for this client (`ceph config set client ...`), merged with the configuration
//! file.
//!
//! Precedence is Ceph's: the file overrides the monitors, which override the default. Monitors resolve their own
//! sections and masks before sending.  An invalid value from the monitors is reported and ignored, because one
//! administrator's mistake must not stop all clients.

use std::collections::BTreeMap;
use std::time::Duration;

use forebay_messenger::wire::control::mode;

use super::{Conf, ConfigError};

/// Default time limit of monitor requests.
const MONITOR_TIMEOUT: Duration = Duration::from_secs(60);
/// Practically infinite duration.
const FOREVER: Duration = Duration::from_secs(1 << 30);
/// Names of settings that are also accepted from the monitors.
pub(crate) const OSD_TIMEOUT: &str = "rados_osd_op_timeout";
const MON_TIMEOUT: &str = "rados_mon_op_timeout";
const MODES: &str = "ms_client_mode";
const KEPT: [&str; 3] = [OSD_TIMEOUT, MON_TIMEOUT, MODES];

/// Settings that may change while a client runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Settings {
    /// Time limit of OSD requests; `None` for no limit.
    pub osd_timeout: Option<Duration>,
    /// Time limit of monitor requests.
    pub monitor_timeout: Duration,
    /// Connection modes for OSDs, as defined in [`mode`], most preferred first.  Changes apply to new sessions.
    pub osd_modes: Vec<u32>,
}

/// Values of these settings in the configuration file.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Said(BTreeMap<&'static str, String>);

impl Said {
    pub(super) fn of(conf: &Conf) -> Self {
        Self(KEPT.iter().filter_map(|&name| Some((name, conf.get(name)?))).collect())
    }

    /// Merges the file's values with those stored by the monitors, by name. Returns the settings, and errors for
    /// invalid values from the monitors.
    ///
    /// # Errors
    /// Invalid value in the file.
    pub fn with(&self, kept: &BTreeMap<String, String>) -> Result<(Settings, Vec<ConfigError>), ConfigError> {
        let mut refused = Vec::new();
        let osd_timeout = self.one(OSD_TIMEOUT, kept, &mut refused, |value| seconds(OSD_TIMEOUT, value))?;
        let monitor_timeout = self.one(MON_TIMEOUT, kept, &mut refused, |value| seconds(MON_TIMEOUT, value))?;
        let modes = self.one(MODES, kept, &mut refused, |value| modes(MODES, value))?;
        let settings = Settings {
            osd_timeout: osd_timeout.flatten(),
            monitor_timeout: monitor_timeout.map_or(MONITOR_TIMEOUT, |limit| limit.unwrap_or(FOREVER)),
            osd_modes: modes.filter(|modes| !modes.is_empty()).unwrap_or_else(|| vec![mode::CRC, mode::SECURE]),
        };
        Ok((settings, refused))
    }

    fn one<T>(
        &self,
        name: &'static str,
        kept: &BTreeMap<String, String>,
        refused: &mut Vec<ConfigError>,
        parse: impl Fn(&str) -> Result<T, ConfigError>,
    ) -> Result<Option<T>, ConfigError> {
        if let Some(value) = self.0.get(name) {
            return parse(value).map(Some);
        }
        match kept.get(name).map(|value| parse(value)) {
            Some(Ok(value)) => Ok(Some(value)),
            Some(Err(error)) => {
                refused.push(error);
                Ok(None)
            }
            None => Ok(None),
        }
    }
}

/// Parses a time limit; zero means none (`None`), as in every Ceph client.
pub(super) fn seconds(name: &'static str, value: &str) -> Result<Option<Duration>, ConfigError> {
    let wrong = || ConfigError::Value { name, value: value.into(), text: "it is a number of seconds".into() };
    let total = timespan(value).filter(|total| (0.0..1e9).contains(total)).ok_or_else(wrong)?;
    Ok((total > 0.0).then(|| Duration::from_secs_f64(total)))
}

/// Parses seconds: a number, or numbers with units (`1m 30s`).
fn timespan(text: &str) -> Option<f64> {
    if let Ok(seconds) = text.trim().parse::<f64>() {
        return Some(seconds).filter(|seconds| seconds.is_finite());
    }
    let mut rest = text.trim();
    let mut total = 0.0;
    if rest.is_empty() {
        return None;
    }
    while !rest.is_empty() {
        let (number, behind) = rest.split_at(rest.find(|c: char| !c.is_ascii_digit())?);
        let behind = behind.trim_start();
        let (unit, next) = behind.split_at(behind.find(|c: char| !c.is_ascii_alphabetic()).unwrap_or(behind.len()));
        let unit = match unit {
            "s" | "sec" | "secs" | "second" | "seconds" => 1,
            "m" | "min" | "mins" | "minute" | "minutes" => 60,
            "h" | "hr" | "hrs" | "hour" | "hours" => 3600,
            "d" | "day" | "days" => 86_400,
            "w" | "wk" | "wks" | "week" | "weeks" => 604_800,
            _ => return None,
        };
        total += number.parse::<f64>().ok()? * f64::from(unit);
        rest = next.trim_start();
    }
    Some(total)
}

/// Parses a list of connection modes, most preferred first.
pub(super) fn modes(name: &'static str, value: &str) -> Result<Vec<u32>, ConfigError> {
    let wrong = || ConfigError::Value { name, value: value.into(), text: "it is a list of 'crc' and 'secure'".into() };
    let one = |word: &str| match word {
        "crc" => Ok(mode::CRC),
        "secure" => Ok(mode::SECURE),
        _ => Err(wrong()),
    };
    value.split([' ', ',']).filter(|word| !word.is_empty()).map(one).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn said(text: &str) -> Said {
        Said::of(&Conf::parse(text, "ceph", "admin", "h").expect("a configuration"))
    }

    fn kept(pairs: &[(&str, &str)]) -> BTreeMap<String, String> {
        pairs.iter().map(|(name, value)| ((*name).into(), (*value).into())).collect()
    }

    #[test]
    fn the_file_goes_before_the_monitors_and_they_before_the_default() {
        let (default, refused) = said("").with(&kept(&[])).expect("settings");
        assert_eq!((default.osd_timeout, default.monitor_timeout), (None, MONITOR_TIMEOUT));
        assert_eq!((default.osd_modes, refused.len()), (vec![mode::CRC, mode::SECURE], 0));
        let theirs = kept(&[(OSD_TIMEOUT, "7"), (MON_TIMEOUT, "0"), (MODES, "secure"), ("debug_ms", "20")]);
        let (settings, refused) = said("").with(&theirs).expect("settings");
        assert_eq!((settings.osd_timeout, settings.monitor_timeout), (Some(Duration::from_secs(7)), FOREVER));
        assert_eq!((settings.osd_modes, refused.len()), (vec![mode::SECURE], 0));
        let (settings, _) = said("[client]\nrados osd op timeout = 2\n").with(&theirs).expect("settings");
        assert_eq!((settings.osd_timeout, settings.monitor_timeout), (Some(Duration::from_secs(2)), FOREVER));
        // Zero in the file counts as a value, too: no limit.
        let (settings, _) = said("rados osd op timeout = 0\n").with(&theirs).expect("settings");
        assert_eq!(settings.osd_timeout, None);
    }

    #[test]
    fn a_slip_of_the_monitors_is_left_out_and_one_of_the_file_is_an_error() {
        let theirs = kept(&[(OSD_TIMEOUT, "soon"), (MON_TIMEOUT, "9")]);
        let (settings, refused) = said("").with(&theirs).expect("settings");
        assert_eq!((settings.osd_timeout, settings.monitor_timeout), (None, Duration::from_secs(9)));
        assert!(refused.len() == 1 && refused[0].to_string().contains("soon"), "{refused:?}");
        assert!(said("rados osd op timeout = soon\n").with(&kept(&[])).is_err());
    }

    #[test]
    fn times_with_units() {
        for (text, expected) in [
            ("2.5", Some(2.5)),
            ("30s", Some(30.0)),
            ("1m 30s", Some(90.0)),
            ("2 hours", Some(7200.0)),
            ("1w1d", Some(691_200.0)),
            ("soon", None),
            ("", None),
            ("5x", None),
            ("5 5", None),
            ("inf", None),
        ] {
            assert_eq!(timespan(text), expected, "{text}");
        }
    }
}
