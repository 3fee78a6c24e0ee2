//! Implementations of the commands.

mod access;
mod ana;
mod bench;
mod complete;
mod images;
mod logs;
mod pages;
pub mod perf;
mod perf_messenger;
mod reservations;
mod shapes;
mod status;
mod store;
mod targets;
mod transfer;

use forebay_accel::{shape, tier};

use crate::cli::{Cli, Command, Global};
use crate::client::session::CommandSession;
use crate::daemon;
use crate::failure::{Failure, FailureKind, Result};
use crate::output::Output;

/// Runs the command of the command line.
pub fn run(cli: Cli, output: Output) -> Result<()> {
    let global = &cli.global;
    let invalid = |variable: &str, error| Failure::new(FailureKind::Invalid, format!("{variable}: {error}"));
    // Whoever presses TAB does not want to read what is wrong.
    let completes = matches!(cli.command, Command::Complete(_));
    if !completes {
        // A tier that cannot be had would otherwise go unnoticed: the kernels fall back to the best there is.
        tier::Tier::forced().map_err(|error| invalid(tier::VARIABLE, error.to_string()))?;
        shape::forced().map_err(|error| invalid(shape::VARIABLE, error.to_string()))?;
    }
    if !completes && !matches!(cli.command, Command::Serve(_)) {
        crate::logging::start(global.log_level.as_deref(), "warn", global.log_format.unwrap_or_default())?;
    }
    match cli.command {
        Command::Serve(options) => daemon::serve(global, &options),
        Command::Status(options) => status::status(global, output, options),
        Command::Create(options) => images::create(global, output, options),
        Command::Ls(options) => images::ls(global, output, options),
        Command::Info(options) => images::info(global, output, options),
        Command::Resize(options) => images::resize(global, output, options),
        Command::Rm(options) => images::rm(global, output, options),
        Command::Mv(options) => images::mv(global, output, options),
        Command::Du(options) => images::du(global, output, options),
        Command::Import(options) => transfer::import(global, output, options),
        Command::Export(options) => transfer::export(global, output, options),
        Command::Bench(options) => bench::run(global, output, options),
        Command::Attach(options) => targets::attach(global, output, options),
        Command::Detach(options) => targets::detach(global, output, options),
        Command::Targets => targets::list(global, output),
        Command::Ana(command) => ana::run(global, output, command),
        Command::NvmeSubsystem(command) => access::nvme_subsystem(global, output, command),
        Command::IscsiTarget(command) => access::iscsi_target(global, output, command),
        Command::Reload => status::reload(global, output),
        Command::Reservations(command) => reservations::run(global, output, command),
        Command::Log(command) => logs::run(global, output, command),
        Command::Store(command) => store::run(global, output, command),
        Command::Perf(command) => perf::run(output, command),
        Command::Complete(asked) => complete::complete(global, asked),
        Command::Completions { shell } => pages::completions(shell),
        Command::Man { dir } => pages::man(dir.as_deref()),
    }
}

/// Opens a session, does the work, and closes it cleanly even if the work failed.
fn with_session<T>(global: &Global, work: impl FnOnce(&CommandSession) -> Result<T>) -> Result<T> {
    let session = CommandSession::open(global)?;
    let result = work(&session);
    let closed = session.close();
    let value = result?;
    closed.map(|()| value)
}
