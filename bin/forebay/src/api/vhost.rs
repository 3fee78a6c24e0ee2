//! Socket of an export over vhost-user.

use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use forebay_vhost::serve::QUEUES_MAX;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use super::{AttachRequest, Front};
use crate::failure::{Failure, FailureKind, Result};

/// Maximum bytes of a socket's path: those of `sun_path` (unix(7)), without its terminating zero.
const PATH_MAX: usize = 107;

/// Default permissions of a socket: its owner may connect.
const MODE_DEFAULT: u32 = 0o600;

/// Number of queues of an export that asks for no number.  It does not depend on the machine: a monitor that connects again
/// to another daemon, or to one on fewer processors, finds as many.
const QUEUES_DEFAULT: u16 = 8;

/// Socket of an export over vhost-user, and the queues that a monitor may use.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
#[schema(as = VhostSocket)]
pub struct VhostSocketOptions {
    /// Absolute path of the socket, at most 107 bytes.
    #[schema(value_type = String)]
    pub path: PathBuf,
    /// Number of request queues that a monitor may use, from 1 to 64; 8 if omitted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub queues: Option<u16>,
    /// Permissions of the socket in octal, such as `0660`; `0600` if omitted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mode: Option<String>,
    /// Owner of the socket, by names or numbers: `USER`, `USER:GROUP` or `:GROUP`; the daemon's user if omitted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub owner: Option<String>,
    /// Set to export the image as a unit of a virtio-scsi controller, which all such exports with this path share.  Those
    /// that are added leave out the other options, or repeat them.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub scsi: bool,
    /// Set if the monitor listens on the socket, and the daemon connects to it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub connect: bool,
}

impl VhostSocketOptions {
    /// Returns options of a socket that the daemon creates, for itself only.
    #[cfg(test)]
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self { path: path.into(), queues: None, mode: None, owner: None, scsi: false, connect: false }
    }

    /// Validates the options.
    ///
    /// # Errors
    /// Names the option that is wrong.
    pub fn check(&self) -> Result<()> {
        check_path(&self.path)?;
        if let Some(queues) = self.queues
            && !(1..=QUEUES_MAX).contains(&queues)
        {
            return Err(Failure::invalid(format!("{queues} queues: a device has from 1 to {QUEUES_MAX}")));
        }
        if self.connect && (self.mode.is_some() || self.owner.is_some()) {
            return Err(Failure::invalid("mode and owner are for a socket that the daemon creates")
                .hint("leave them out, or leave out 'connect'"));
        }
        self.permissions()?;
        self.owner_names().map(drop)
    }

    /// Returns the permissions of the socket.
    ///
    /// # Errors
    /// If they are not octal, or have other bits than those of permissions.
    pub fn permissions(&self) -> Result<u32> {
        let Some(text) = &self.mode else { return Ok(MODE_DEFAULT) };
        let digits = text.bytes().all(|digit| (b'0'..=b'7').contains(&digit));
        match u32::from_str_radix(text, 8).ok().filter(|mode| digits && *mode <= 0o777) {
            Some(mode) => Ok(mode),
            None => Err(Failure::invalid(format!("'{}' is not the mode of a socket", text.escape_debug()))
                .hint("write it in octal: 0600, or 0660 for a group")),
        }
    }

    /// Returns the names, or numbers, of the user and the group that own the socket.
    ///
    /// # Errors
    /// If it is empty, or one of its names is.
    pub fn owner_names(&self) -> Result<(Option<&str>, Option<&str>)> {
        let Some(text) = &self.owner else { return Ok((None, None)) };
        let (user, group) = match text.split_once(':') {
            None => (Some(text.as_str()), None),
            Some(("", group)) => (None, Some(group)),
            Some((user, group)) => (Some(user), Some(group)),
        };
        let is_name = |name: &str| !name.is_empty() && !name.contains([':', '\0', '\n']);
        match [user, group].into_iter().flatten().all(is_name) {
            true => Ok((user, group)),
            false => Err(Failure::invalid(format!("'{}' is not the owner of a socket", text.escape_debug()))
                .hint("write USER, USER:GROUP or :GROUP, by names or numbers")),
        }
    }

    /// Adopts the options of the controller that the export is to be a unit of, where it has none.
    ///
    /// # Errors
    /// If it has others.
    pub fn join(&mut self, controller: &Self) -> Result<()> {
        let asked = self.clone();
        self.queues = self.queues.or(controller.queues);
        self.mode = self.mode.take().or_else(|| controller.mode.clone());
        self.owner = self.owner.take().or_else(|| controller.owner.clone());
        self.connect |= controller.connect;
        if self == controller {
            return Ok(());
        }
        *self = asked;
        let what = format!("the controller of the socket {} has other options", self.path.display());
        Err(Failure::new(FailureKind::Exists, what)
            .hint("leave out queues, mode, owner and connect: those of its first unit are used"))
    }

    /// Returns the number of request queues that a monitor may use.
    pub fn queue_count(&self) -> u16 {
        self.queues.unwrap_or(QUEUES_DEFAULT)
    }
}

/// Validates the path of a socket.
fn check_path(path: &Path) -> Result<()> {
    let (bytes, shown) = (path.as_os_str().as_bytes(), path.display());
    if !path.is_absolute() {
        return Err(Failure::invalid(format!("the path of a socket is absolute, and '{shown}' is not")));
    }
    if bytes.len() > PATH_MAX {
        let what = format!("the path '{shown}' has {} bytes, and that of a socket at most {PATH_MAX}", bytes.len());
        return Err(Failure::invalid(what).hint("choose a shorter directory, such as /run/forebay"));
    }
    if bytes.contains(&0) || bytes.ends_with(b"/") || path.file_name().is_none() {
        return Err(Failure::invalid(format!(
            "'{}' is not the path of a socket",
            path.display().to_string().escape_debug()
        )));
    }
    Ok(())
}

impl AttachRequest {
    /// Checks that exports over vhost have a valid socket, and others have none.
    ///
    /// # Errors
    /// Names what is missing or wrong.
    pub fn check_vhost(&self) -> Result<()> {
        match (self.front, &self.vhost) {
            (Front::Vhost, Some(options)) if !options.scsi && self.unit.is_some() => {
                Err(Failure::invalid("a virtio-blk device has no number")
                    .hint("leave it out, or export the image as a unit of a controller: --scsi"))
            }
            (Front::Vhost, Some(options)) => options.check(),
            (Front::Vhost, None) => {
                Err(Failure::invalid("an export over vhost needs the path of a socket: vhost.path"))
            }
            (_, Some(_)) => Err(Failure::invalid("the socket 'vhost' is for exports over vhost")),
            (_, None) => Ok(()),
        }
    }

    /// Returns the path of the controller that the export is a unit of.
    pub fn controller_path(&self) -> Option<&Path> {
        let options = self.vhost.as_ref().filter(|options| self.front == Front::Vhost && options.scsi);
        options.map(|options| options.path.as_path())
    }

    /// Returns the path of the socket of an export over vhost.
    pub fn socket_path(&self) -> Option<&Path> {
        self.vhost.as_ref().filter(|_| self.front == Front::Vhost).map(|options| options.path.as_path())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_are_checked() {
        let good = VhostSocketOptions::new("/run/x.sock");
        good.check().expect("valid");
        assert_eq!(good.permissions(), Ok(0o600));
        assert_eq!(good.queue_count(), 8);
        for path in ["x.sock", "", "/", "/run/", "/run/..", &format!("/{}", "x".repeat(107))] {
            assert!(VhostSocketOptions::new(path).check().is_err(), "{path}");
        }
        VhostSocketOptions::new(format!("/{}", "x".repeat(106))).check().expect("the longest");
        for queues in [0, 65, u16::MAX] {
            assert!(VhostSocketOptions { queues: Some(queues), ..good.clone() }.check().is_err(), "{queues}");
        }
        let of_mode = |mode: &str| VhostSocketOptions { mode: Some(mode.into()), ..good.clone() };
        assert_eq!((of_mode("0660").permissions(), of_mode("777").permissions()), (Ok(0o660), Ok(0o777)));
        for mode in ["", "8", "1777", "+6", "-6", "0x1", "u=rw", "99999999999"] {
            assert!(of_mode(mode).check().is_err(), "{mode}");
        }
        let of_owner = |owner: &str| VhostSocketOptions { owner: Some(owner.into()), ..good.clone() };
        assert_eq!(of_owner("a").owner_names(), Ok((Some("a"), None)));
        assert_eq!(of_owner("a:1").owner_names(), Ok((Some("a"), Some("1"))));
        assert_eq!(of_owner(":kvm").owner_names(), Ok((None, Some("kvm"))));
        for owner in ["", ":", "a:", "a:b:c", "a\n"] {
            assert!(of_owner(owner).check().is_err(), "{owner}");
        }
        let connecting = VhostSocketOptions { connect: true, ..of_mode("0600") };
        assert!(connecting.check().is_err());
    }

    #[test]
    fn units_join_a_controller() {
        let controller = VhostSocketOptions {
            scsi: true,
            queues: Some(4),
            mode: Some("0660".into()),
            ..VhostSocketOptions::new("/run/x.sock")
        };
        let mut unit = VhostSocketOptions { scsi: true, ..VhostSocketOptions::new("/run/x.sock") };
        unit.join(&controller).expect("its options are left out");
        assert_eq!(unit, controller);
        unit.join(&controller).expect("they are the same");
        let connecting = VhostSocketOptions { connect: true, ..controller.clone() };
        for other in [
            VhostSocketOptions { queues: Some(5), ..controller.clone() },
            VhostSocketOptions { owner: Some("qemu".into()), ..controller.clone() },
            connecting,
        ] {
            let mut joining = other.clone();
            assert_eq!(joining.join(&controller).expect_err("others").kind, FailureKind::Exists);
            assert_eq!(joining, other, "nothing has changed");
        }
    }

    #[test]
    fn only_units_of_controllers_have_numbers() {
        let with = |scsi| {
            let vhost = Some(VhostSocketOptions { scsi, ..VhostSocketOptions::new("/run/x.sock") });
            AttachRequest { vhost, unit: Some(3), ..AttachRequest::new("local", "x", Front::Vhost) }
        };
        with(true).check_vhost().expect("a unit");
        with(false).check_vhost().expect_err("a disk");
        assert_eq!(with(true).within(), Some("/run/x.sock"));
        assert_eq!(with(false).within(), None);
    }

    #[test]
    fn a_socket_is_for_one_front() {
        let with = |front, vhost| AttachRequest { vhost, ..AttachRequest::new("local", "x", front) };
        let socket = Some(VhostSocketOptions::new("/run/x.sock"));
        assert!(with(Front::Vhost, socket.clone()).check_vhost().is_ok());
        assert!(with(Front::Vhost, None).check_vhost().is_err());
        assert!(with(Front::Nbd, socket).check_vhost().is_err());
        assert!(with(Front::Nbd, None).check_vhost().is_ok());
    }
}
