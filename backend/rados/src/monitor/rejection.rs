//! Reasons why a daemon does not accept this client, as errors for operators.

use std::net::SocketAddr;

use forebay_block::{Error, ErrorKind};
use forebay_messenger::DisconnectReason;
use forebay_messenger::session::SessionViolation;
use forebay_messenger::wire::control::mode;

/// Returns the error for a daemon that accepts none of this client's connection modes. It names the modes of both
/// sides, and the settings of client and daemon that determine them.
fn mode_conflict(peer: &str, (ours, theirs): (&[u32], &[u32]), (client, service): (&str, &str)) -> Error {
    let (ours, theirs) = (mode::names(ours), mode::names(theirs));
    let text = format!(
        "{peer} accepts connections in mode {theirs} only, and this client offers {ours} only: change {client} of the client \
         or {service} of the daemon"
    );
    Error::new(ErrorKind::Unsupported, text)
}

/// Returns the error for a daemon that requires features that this client lacks.
fn features_missing(peer: &str, bits: u64) -> Error {
    let name = |bit: u32| match bit {
        38 => "CRUSH_MSR".to_owned(),
        44 => "NVMEOFHA".to_owned(),
        45 => "NVMEOFHAMAP".to_owned(),
        49 => "SERVER_SQUID".to_owned(),
        50 => "SERVER_TENTACLE".to_owned(),
        other => format!("bit {other}"),
    };
    let names: Vec<String> = (0..64).filter(|bit| bits >> bit & 1 == 1).map(name).collect();
    let text = format!(
        "{peer} requires features of releases newer than this build understands: {} ({bits:#x}); see 'ceph osd dump' and \
         'ceph osd crush dump' for what uses them",
        names.join(", ")
    );
    Error::new(ErrorKind::Unsupported, text)
}

/// Returns the error for a daemon that will reject this client until settings change; `None` for any other reason of a
/// lost connection.  `settings` are those that select modes, of the client and of the daemon.
pub(crate) fn conflict_of(peer: &str, reason: &DisconnectReason, settings: (&str, &str)) -> Option<Error> {
    match reason {
        DisconnectReason::Violation(SessionViolation::ModesDiffer { ours, theirs }) => {
            Some(mode_conflict(peer, (ours, theirs), settings))
        }
        DisconnectReason::Violation(SessionViolation::FeaturesRequired(bits)) => Some(features_missing(peer, *bits)),
        _ => None,
    }
}

/// Returns the error for a client that all monitors have denied access, of the error of the last one.
pub(super) fn denied_by_all(error: Error) -> Error {
    match error.kind() {
        ErrorKind::Denied => {
            Error::new(ErrorKind::Denied, format!("cannot authenticate with any monitor: {}", error.context()))
        }
        _ => error,
    }
}

/// Returns true if the reason is that authentication failed.
pub(super) fn is_refusal(reason: &DisconnectReason) -> bool {
    matches!(reason, DisconnectReason::Violation(SessionViolation::MethodRefused { .. } | SessionViolation::Auth(_)))
}

/// Meaning of a lost or failed connection to a monitor.
#[derive(Debug)]
pub(super) enum MonitorLoss {
    /// The monitor rejects this client until settings change.
    Conflict(Error),
    /// The monitor does not accept the global id that this client had.  That says nothing about its key: the next
    /// attempt, without that id, may succeed.
    IdentityRejected(Error),
    /// The monitor does not accept the key.
    Denied(Error),
    /// The monitor is down, or cannot be reached.
    Unreachable(Error),
}

impl MonitorLoss {
    /// Classifies the end of a connection. `name` is that of this client, `global_id` the one that it presented, or
    /// zero.
    pub(super) fn of(monitor: SocketAddr, name: &str, global_id: u64, reason: &DisconnectReason) -> Self {
        let peer = format!("the monitor at {monitor}");
        if let Some(error) = conflict_of(&peer, reason, ("ms_mon_client_mode", "ms_mon_service_mode")) {
            return MonitorLoss::Conflict(error);
        }
        if !is_refusal(reason) {
            let text = format!("{peer} cannot be reached: {reason}");
            return MonitorLoss::Unreachable(Error::new(ErrorKind::TimedOut, text));
        }
        if global_id == 0 {
            return MonitorLoss::Denied(Error::new(ErrorKind::Denied, format!("{peer} refuses {name}: {reason}")));
        }
        // Not `Denied`: requests must not fail while the key may still be valid.
        let text = format!("{peer} refuses {name} as client.{global_id}, authenticating again: {reason}");
        MonitorLoss::IdentityRejected(Error::new(ErrorKind::TimedOut, text))
    }

    /// Returns the error.
    pub(super) fn error(&self) -> &Error {
        match self {
            MonitorLoss::Conflict(error)
            | MonitorLoss::IdentityRejected(error)
            | MonitorLoss::Denied(error)
            | MonitorLoss::Unreachable(error) => error,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rejected_identity_is_not_a_rejected_key() {
        let monitor = SocketAddr::from(([127, 0, 0, 1], 3300));
        let refused = || {
            DisconnectReason::from(SessionViolation::MethodRefused {
                method: 2,
                result: -13,
                methods: Vec::new(),
                modes: Vec::new(),
            })
        };
        let of = |global_id, reason: &DisconnectReason| MonitorLoss::of(monitor, "client.a", global_id, reason);
        let identity = of(4123, &refused());
        assert!(matches!(identity, MonitorLoss::IdentityRejected(_)), "{identity:?}");
        assert_eq!(identity.error().kind(), ErrorKind::TimedOut, "requests wait");
        assert!(identity.error().context().contains("refuses client.a as client.4123"), "{identity:?}");
        let key = of(0, &refused());
        assert!(matches!(key, MonitorLoss::Denied(_)) && key.error().kind() == ErrorKind::Denied, "{key:?}");
        let silent = of(4123, &DisconnectReason::PeerClosed);
        assert!(matches!(silent, MonitorLoss::Unreachable(_)), "{silent:?}");
        let newer = of(4123, &SessionViolation::FeaturesRequired(1 << 50).into());
        assert!(matches!(newer, MonitorLoss::Conflict(_)), "{newer:?}");
    }
}
