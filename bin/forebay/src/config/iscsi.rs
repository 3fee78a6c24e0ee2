//! Configuration of the iSCSI target.

use std::fmt;
use std::net::SocketAddr;

use forebay_iscsi::session::chap::{Chap, Credential, SECRET_MAX, SECRET_MIN};
use forebay_iscsi::session::login::is_name;
use forebay_reactor::Addr;
use serde::Deserialize;

use super::parse_addr;
use super::peers::read_private;
use crate::api;
use crate::failure::{Failure, Result};
use crate::units::Size;

/// Default usage of a pool, in percent, from which hosts are notified.
const THRESHOLD_PERCENT: u8 = 90;
/// Maximum number of sessions, with margin below what 16-bit identifiers in the protocol can distinguish.
const SESSIONS_MAX: usize = 65_000;

/// `[iscsi-target]` section.
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

/// CHAP name and secret.
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

/// Initiators that may log in to a target, and CHAP settings.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct IscsiAccess {
    /// Initiators by name, with a trailing `*` as a wildcard; `None`: every initiator.
    pub initiators: Option<Vec<String>>,
    /// CHAP credentials of initiators, and of the target for mutual CHAP.
    pub chap: Option<Chap>,
}

impl IscsiAccess {
    /// Reads the secrets of a target from their files.
    ///
    /// # Errors
    /// If a file cannot be read or holds no secret, or both hold the same one.
    pub fn read(
        initiators: Option<Vec<String>>,
        chap: Option<&api::ChapUser>,
        mutual: Option<&api::ChapUser>,
    ) -> Result<Self> {
        let read = |user: &api::ChapUser| {
            let secret = read_private(&user.secret)?.trim_end_matches(['\r', '\n']).to_owned();
            credential(CredentialSection { user: user.user.clone(), secret }, &user.secret.display().to_string())
        };
        let (chap, mutual) = (chap.map(read).transpose()?, mutual.map(read).transpose()?);
        Ok(Self { initiators, chap: pair(chap, mutual, "the target")? })
    }
}

/// Combines the credentials of initiators and of the target.
fn pair(initiator: Option<Credential>, target: Option<Credential>, whose: &str) -> Result<Option<Chap>> {
    match (initiator, target) {
        (Some(initiator), Some(target)) if initiator.secret == target.secret => {
            Err(Failure::invalid(format!("{whose}: chap and mutual-chap have the same secret; they must differ")))
        }
        (Some(initiator), target) => Ok(Some(Chap { initiator, target })),
        (None, Some(_)) => Err(Failure::invalid(format!("{whose}: mutual-chap requires chap"))),
        (None, None) => Ok(None),
    }
}

/// Parses the command-line form of a CHAP name and the file of its secret: `USER,FILE`.
///
/// # Errors
/// If one of the two is missing.
pub fn parse_chap(text: &str) -> Result<api::ChapUser> {
    match text.split_once(',') {
        Some((user, file)) if !user.is_empty() && !file.is_empty() => {
            Ok(api::ChapUser { user: user.to_owned(), secret: super::absolute(file.as_ref())? })
        }
        _ => Err(Failure::invalid(format!("'{text}' is not USER,FILE: a name and the file with its secret"))),
    }
}

/// Validates the name of a target.
///
/// # Errors
/// If it is not an iSCSI qualified name.
pub fn check_iqn(name: &str, whose: &str) -> Result<()> {
    match is_name(name) {
        true => Ok(()),
        false => Err(Failure::invalid(format!("{whose}: '{}' is not a valid target name", name.escape_debug()))
            .hint("such as iqn.2024-05.org.example:disks")),
    }
}

/// Settings of the default target: identity, access and limits.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct IscsiTargetSettings {
    /// Target name, if it is not derived from the data directory.
    pub name: Option<String>,
    /// Addresses reported by discovery instead of the listening addresses.
    pub advertise: Vec<SocketAddr>,
    /// Initiators that may log in, and CHAP settings.
    pub access: IscsiAccess,
    /// CHAP settings for discovery sessions.
    pub discovery_chap: Option<Chap>,
    /// Set if digests are required.
    pub digests: bool,
    /// Maximum number of sessions.
    pub sessions_max: usize,
    /// Maximum number of sessions per host.
    pub sessions_per_host: usize,
    /// Maximum bytes of data in flight, of all sessions together.
    pub memory_max: usize,
    /// Usage of a pool, in percent, from which hosts are notified; 0 for never.
    pub threshold_percent: u8,
}

impl Default for IscsiTargetSettings {
    fn default() -> Self {
        Self {
            name: None,
            advertise: Vec::new(),
            access: IscsiAccess::default(),
            discovery_chap: None,
            digests: false,
            sessions_max: 4096,
            sessions_per_host: 256,
            memory_max: 512 << 20,
            threshold_percent: THRESHOLD_PERCENT,
        }
    }
}

impl IscsiTargetSettings {
    pub(super) fn resolve(section: IscsiSection) -> Result<Self> {
        let default = Self::default();
        if let Some(name) = &section.name {
            check_iqn(name, "iscsi-target.name")?;
        }
        let mut advertise = Vec::new();
        for text in section.advertise.unwrap_or_default() {
            match parse_addr(&text)? {
                Addr::Tcp(addr) => advertise.push(addr),
                Addr::Unix(_) => return Err(Failure::invalid(format!("iscsi-target.advertise: '{text}' is not TCP"))),
            }
        }
        let target = section.mutual_chap.map(|section| credential(section, "iscsi-target.mutual-chap")).transpose()?;
        let initiator = section.chap.map(|section| credential(section, "iscsi-target.chap")).transpose()?;
        // An empty list means every initiator, for compatibility.
        let initiators = section.initiators.filter(|initiators| !initiators.is_empty());
        let access = IscsiAccess { initiators, chap: pair(initiator, target, "iscsi-target")? };
        let discovery =
            section.discovery_chap.map(|section| credential(section, "iscsi-target.discovery-chap")).transpose()?;
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
            access,
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
        let text = format!("{name}: a user, and a secret of {SECRET_MIN} to {SECRET_MAX} bytes");
        return Err(Failure::invalid(text));
    }
    Ok(Credential { name: user, secret: secret.into_bytes() })
}
