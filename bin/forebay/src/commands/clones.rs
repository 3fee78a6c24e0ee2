//! Commands `clone`, `children`, `flatten`.

use super::shapes::{ChildRow, Info};
use super::with_session;
use crate::api::{CloneRequest, ImageChild};
use crate::cli::{ChildrenArgs, CloneArgs, GlobalArgs, OneImage};
use crate::client::progress::{Bar, ProgressUnit};
use crate::failure::Result;
use crate::ops::{CloneSnapshot, Flatten, ListChildren};
use crate::output::Output;

/// Makes a clone of a snapshot.
pub fn clone(global: &GlobalArgs, output: Output, CloneArgs { from, to, options }: CloneArgs) -> Result<()> {
    let request = CloneRequest {
        pool: to.pool,
        image: to.image,
        object_size: options.object_size.map(|size| size.0),
        stripe_unit: options.stripes.unit(),
        stripe_count: options.stripes.stripe_count,
        features: options.features.names(),
        data_pool: options.features.data_pool,
        format: options.clone_format,
    };
    let operation = CloneSnapshot { from, request };
    let info = with_session(global, |session| session.call(operation, |_| {}))?;
    output.print(&Info::from(&info), |_| String::new())
}

/// Lists clones.
pub fn children(global: &GlobalArgs, output: Output, options: ChildrenArgs) -> Result<()> {
    let ChildrenArgs { source, all, descendants } = options;
    let operation = ListChildren { source, descendants };
    let found = with_session(global, |session| session.call(operation, |_| {}))?;
    let rows: Vec<_> =
        found.iter().filter(|child| all || !child.trash).map(|child| ChildRow::new(child, all)).collect();
    output.print(&rows, |_| {
        let lines = found.iter().filter(|child| all || !child.trash).map(ImageChild::line);
        lines.collect::<Vec<_>>().join("\n")
    })
}

/// Makes a clone independent of its parent.
pub fn flatten(global: &GlobalArgs, output: Output, options: OneImage) -> Result<()> {
    let bar = Bar::new(global, "Flattening", ProgressUnit::Steps);
    let flattened = options.image.clone();
    with_session(global, |session| session.call(Flatten(options.image), |now| bar.show(now)))?;
    drop(bar);
    output.print(&flattened, |_| String::new())
}
