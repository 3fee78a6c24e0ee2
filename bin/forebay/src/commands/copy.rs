//! Commands `cp` and `deep cp`.

use super::shapes::Info;
use super::with_session;
use crate::api::CopyImageRequest;
use crate::cli::{CopyArgs, DeepCommand, GlobalArgs};
use crate::client::progress::{Bar, ProgressUnit};
use crate::failure::Result;
use crate::ops::CopyImage;
use crate::output::Output;

/// Copies an image or snapshot.
pub fn copy(global: &GlobalArgs, output: Output, options: CopyArgs) -> Result<()> {
    let CopyArgs { names, made } = options;
    let request = CopyImageRequest::new(names.to, made.options());
    run(global, output, CopyImage { source: names.source, request })
}

/// Copies an image with its snapshots.
pub fn deep(global: &GlobalArgs, output: Output, command: DeepCommand) -> Result<()> {
    let DeepCommand::Cp(options) = command;
    let request = CopyImageRequest::new(options.names.to, options.made.options());
    let request = CopyImageRequest { deep: true, flatten: options.flatten, ..request };
    run(global, output, CopyImage { source: options.names.source, request })
}

fn run(global: &GlobalArgs, output: Output, operation: CopyImage) -> Result<()> {
    let bar = Bar::new(global, "Copying", ProgressUnit::Steps);
    let made = with_session(global, |session| session.call(operation, |now| bar.show(now)))?;
    drop(bar);
    output.print(&Info::from(&made), |_| String::new())
}
