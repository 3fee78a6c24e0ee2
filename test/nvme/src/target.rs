//! Namespace URI: `nvme+tcp://host:port/NQN#NSID`.

use anyhow::{Context, Result};

/// Namespace with its address.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Uri {
    /// Host and port.
    pub address: String,
    /// Subsystem NQN.
    pub subsystem: String,
    /// Namespace identifier.
    pub nsid: u32,
}

impl std::str::FromStr for Uri {
    type Err = anyhow::Error;

    fn from_str(text: &str) -> Result<Self> {
        let rest = text.strip_prefix("nvme+tcp://").context("a URI begins with nvme+tcp://")?;
        let (address, rest) = rest.split_once('/').context("a URI has a subsystem after its address")?;
        let (subsystem, nsid) = rest.rsplit_once('#').context("a URI ends with # and a namespace")?;
        Ok(Self { address: address.into(), subsystem: subsystem.into(), nsid: nsid.parse()? })
    }
}
