//! Unit URI: `iscsi://host:port/NAME/LUN`, as in libiscsi.

use anyhow::{Context, Result};

/// Unit with its address.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Uri {
    /// Host and port.
    pub address: String,
    /// Target name.
    pub target: String,
    /// LUN of the unit.
    pub lun: u16,
}

impl std::str::FromStr for Uri {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Self> {
        let rest = text.strip_prefix("iscsi://").context("a URI begins with iscsi://")?;
        let (address, rest) = rest.split_once('/').context("a URI has a target after its address")?;
        let (target, lun) = rest.rsplit_once('/').context("a URI ends with a unit")?;
        Ok(Self { address: address.into(), target: target.into(), lun: lun.parse()? })
    }
}
