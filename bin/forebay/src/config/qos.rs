//! Configuration of limits for images that neither they nor their pool override.

use std::collections::BTreeMap;

use serde::Deserialize;

use crate::failure::{Failure, Result};
use crate::rbd_options::{self, OptionScope};

/// Prefix of the options whose names the section abbreviates.
const PREFIX: &str = "rbd_qos_";

/// `[qos]` section: options without their common prefix, such as `iops-limit` for `rbd_qos_iops_limit`.
#[derive(Debug, Default, Deserialize)]
#[serde(transparent)]
pub(super) struct QosSection(BTreeMap<String, OptionText>);

/// Value of an option.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
enum OptionText {
    Number(u64),
    Text(String),
}

impl QosSection {
    /// Resolves the section to options by their names.
    pub(super) fn resolve(self) -> Result<BTreeMap<String, String>> {
        let mut options = BTreeMap::new();
        for (key, value) in self.0 {
            let name = format!("{PREFIX}{}", key.replace('-', "_"));
            let option = rbd_options::find(&name).map_err(|_| {
                Failure::invalid(format!("[qos]: there is no setting '{key}'"))
                    .hint("write for example iops-limit = 1000 or bps-limit = \"100M\"; docs/operations.md lists all")
            })?;
            let value = match value {
                OptionText::Number(number) => number.to_string(),
                OptionText::Text(text) => text,
            };
            option.check(&value, OptionScope::Pool).map_err(|failure| failure.context("[qos]"))?;
            options.insert(name, value);
        }
        Ok(options)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn resolve(text: &str) -> Result<BTreeMap<String, String>> {
        toml::from_str::<QosSection>(text).expect("a section").resolve()
    }

    #[test]
    fn settings_are_options_without_their_prefix() {
        let options = resolve("iops-limit = 1000\nwrite_bps-burst = '5M'\n").expect("known");
        let want = [("rbd_qos_iops_limit", "1000"), ("rbd_qos_write_bps_burst", "5M")];
        assert!(options.iter().map(|(name, value)| (name.as_str(), value.as_str())).eq(want));
        for (text, says) in [
            ("iops = 5", "'iops'"),
            ("iops-limit = '5k'", "rbd_qos_iops_limit"),
            ("iops-burst-seconds = 0", "1 or more"),
        ] {
            let failure = resolve(text).expect_err(text);
            assert!(failure.message.contains("[qos]") && failure.message.contains(says), "{failure}");
        }
    }
}
