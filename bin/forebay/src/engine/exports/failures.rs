//! Failures of exports, in the words of operators.

use super::ExportKey;
use crate::failure::{Failure, FailureKind};
use crate::spec::ImageSpec;

/// Returns the failure of an export whose client is fenced: hosts reach the volume, but every request fails.
pub(super) fn fenced(spec: &ImageSpec) -> Failure {
    let what = format!("the cluster has fenced this client (blocklist): all requests to {spec} fail");
    Failure::new(FailureKind::Denied, what).hint(format!(
        "when no other client uses the image, and hosts have unmounted it: forebay detach {spec}, and attach it again"
    ))
}

/// Returns the failure of an export that hosts cannot reach yet.
pub(super) fn opening(spec: &ImageSpec) -> Failure {
    Failure::new(FailureKind::Unreachable, format!("the image {spec} is still being opened"))
        .hint("it is served as soon as it is open; the daemon's log says why if that fails")
}

/// Returns the failure of a request that came while the daemon stops.
pub(super) fn not_running() -> Failure {
    Failure::failed("the daemon is stopping")
}

/// Returns the failure to attach an export that is being detached.
pub(super) fn detaching((front, spec): &ExportKey) -> Failure {
    Failure::new(FailureKind::Busy, format!("the export of {spec} over {} is being detached", front.name()))
        .hint("try again when that is done")
}
