//! What the configuration says of the iSCSI target.

use std::fmt;
use std::net::SocketAddr;

use forebay_iscsi::session::chap::{Chap, Credential, SECRET_MAX, SECRET_MIN};
use forebay_iscsi::session::login::is_name;
use forebay_reactor::Addr;
use serde::Deserialize;

use super::parse_addr;
use crate::failure::{Failure, Result};
use crate::units::Size;

/// Percent of a pool in use from which hosts are told, when nothing is said.
const THRESHOLD_PERCENT: u8 = 90;
/// Most sessions that a protocol with numbers of 16 bits tells apart, with some to spare.
const SESSIONS_MAX: usize = 65_000;

/// The `[iscsi-target]` section.
#[derive(Debug, Default, Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
pub(super) struct IscsiSection {
    name: Option<String>,
    advertise: Option<Vec<String>>,
    initiators: Option<Vec<String>>,
    chap: Option<CredentialSection>,
    mutual_chap: Option<CredentialSection>,
    discovery_chap: Option<CredentialSection>,
    digests: Option<bool>,
    sessions_max: Option<usize>,
    sessions_per_host: Option<usize>,
    memory: Option<Size>,
    threshold_percent: Option<u8>,
}

/// A name and a secret.
#[derive(Deserialize)]
#[serde(deny_unknown_fields, rename_all = "kebab-case")]
struct CredentialSection {
    user: String,
    secret: String,
}

impl fmt::Debug for CredentialSection {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CredentialSection({}, a secret)", self.user)
    }
}

/// What hosts see of the target, and which hosts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IscsiTarget {
    /// Its name, if not the data directory's own.
    pub name: Option<String>,
    /// What hosts that ask are told instead of the addresses that are listened on.
    pub advertise: Vec<SocketAddr>,
    /// Initiators that may log in; all may when there is none.
    pub initiators: Vec<String>,
    /// What initiators prove, and what the target proves to them.
    pub chap: Option<Chap>,
    /// What those prove who ask which targets there are.
    pub discovery_chap: Option<Chap>,
    /// Digests are insisted on.
    pub digests: bool,
    /// Sessions at a time.
    pub sessions_max: usize,
    /// Sessions of one host at a time.
    pub sessions_per_host: usize,
    /// Bytes that all sessions together hold for data under way.
    pub memory_max: usize,
    /// Percent of a pool in use from which hosts are told; 0 for never.
    pub threshold_percent: u8,
}

impl Default for IscsiTarget {
    fn default() -> Self {
        Self {
            name: None,
            advertise: Vec::new(),
            initiators: Vec::new(),
            chap: None,
            discovery_chap: None,
            digests: false,
            sessions_max: 4096,
            sessions_per_host: 256,
            memory_max: 512 << 20,
            threshold_percent: THRESHOLD_PERCENT,
        }
    }
}

impl IscsiTarget {
    pub(super) fn resolve(section: IscsiSection) -> Result<Self> {
        let default = Self::default();
        if let Some(name) = section.name.as_deref().filter(|name| !is_name(name)) {
            return Err(Failure::invalid(format!("iscsi-target.name: '{name}' is no name of a target"))
                .hint("such as iqn.2024-05.org.example:disks"));
        }
        let mut advertise = Vec::new();
        for text in section.advertise.unwrap_or_default() {
            match parse_addr(&text)? {
                Addr::Tcp(addr) => advertise.push(addr),
                Addr::Unix(_) => return Err(Failure::invalid(format!("iscsi-target.advertise: '{text}' is not TCP"))),
            }
        }
        let target = section.mutual_chap.map(|section| credential(section, "mutual-chap")).transpose()?;
        let chap = match (section.chap, target) {
            (Some(initiator), target) => {
                let initiator = credential(initiator, "chap")?;
                if target.as_ref().is_some_and(|target| target.secret == initiator.secret) {
                    let text = "iscsi-target: chap and mutual-chap have the same secret, which proves nothing";
                    return Err(Failure::invalid(text));
                }
                Some(Chap { initiator, target })
            }
            (None, Some(_)) => return Err(Failure::invalid("iscsi-target.mutual-chap is of no use without chap")),
            (None, None) => None,
        };
        let discovery = section.discovery_chap.map(|section| credential(section, "discovery-chap")).transpose()?;
        let threshold_percent = section.threshold_percent.unwrap_or(default.threshold_percent);
        if threshold_percent > 100 {
            return Err(Failure::invalid(format!("iscsi-target.threshold-percent: {threshold_percent} percent")));
        }
        let sessions_max = section.sessions_max.unwrap_or(default.sessions_max);
        if !(1..=SESSIONS_MAX).contains(&sessions_max) {
            return Err(Failure::invalid(format!("iscsi-target.sessions-max: from 1 to {SESSIONS_MAX}")));
        }
        Ok(Self {
            name: section.name,
            advertise,
            initiators: section.initiators.unwrap_or_default(),
            chap,
            discovery_chap: discovery.map(|initiator| Chap { initiator, target: None }),
            digests: section.digests.unwrap_or(default.digests),
            sessions_max,
            sessions_per_host: section.sessions_per_host.unwrap_or(default.sessions_per_host).max(1),
            memory_max: section.memory.map_or(default.memory_max, |size| size.0 as usize),
            threshold_percent,
        })
    }
}

fn credential(section: CredentialSection, name: &str) -> Result<Credential> {
    let CredentialSection { user, secret } = section;
    if !(SECRET_MIN..=SECRET_MAX).contains(&secret.len()) || user.is_empty() {
        let text = format!("iscsi-target.{name}: a user, and a secret of {SECRET_MIN} to {SECRET_MAX} bytes");
        return Err(Failure::invalid(text));
    }
    Ok(Credential { name: user, secret: secret.into_bytes() })
}
