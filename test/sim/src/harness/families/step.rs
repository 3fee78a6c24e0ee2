//! Operations on the images of a family.

use forebay_image::CloneFormat;

use super::group::GroupStep;

/// Operation, of the member of that number.
#[derive(Clone)]
pub(super) enum Step {
    Create,
    Write { offset: u64, data: Vec<u8> },
    Discard { offset: u64, len: u64 },
    Resize { to: u64 },
    Snapshot { name: String },
    RemoveSnapshot { name: String },
    Protect { name: String, protected: bool },
    RollBack { name: String },
    Clone { name: String, to: String, format: CloneFormat },
    Flatten,
    Remove,
    Group(GroupStep),
}

/// Describes an operation, for the trace of a run.
pub(super) fn describe(step: &Step) -> String {
    match step {
        Step::Create => "create".into(),
        Step::Write { offset, data } => format!("write {} at {offset}", data.len()),
        Step::Discard { offset, len } => format!("discard {len} at {offset}"),
        Step::Resize { to } => format!("resize to {to}"),
        Step::Snapshot { name } => format!("snapshot {name}"),
        Step::RemoveSnapshot { name } => format!("remove snapshot {name}"),
        Step::Protect { name, protected } => format!("protect {name}: {protected}"),
        Step::RollBack { name } => format!("roll back to {name}"),
        Step::Clone { name, to, format } => format!("clone {name} as {to}, {format:?}"),
        Step::Flatten => "flatten".into(),
        Step::Remove => "remove".into(),
        Step::Group(step) => format!("group: {step:?}"),
    }
}
