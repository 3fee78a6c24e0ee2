//! Implementations of the commands.

mod access;
mod ana;
mod bench;
mod cache;
mod clones;
mod complete;
mod config;
mod copy;
mod diffs;
mod gateways;
mod groups;
mod images;
mod logs;
mod manage;
mod map;
mod namespaces;
mod pages;
pub mod perf;
mod perf_messenger;
mod ranges;
mod reservations;
mod shapes;
mod snapshots;
mod status;
mod store;
mod streams;
mod targets;
mod transfer;
mod trash;

use forebay_accel::{shape, tier};

use crate::cli::{Cli, CliCommand, GlobalArgs};
use crate::client::session::CommandSession;
use crate::daemon;
use crate::failure::{Failure, FailureKind, Result};
use crate::output::Output;

/// Runs the command of the command line.
pub fn run(cli: Cli, output: Output) -> Result<()> {
    let global = &cli.global;
    let invalid = |variable: &str, error| Failure::new(FailureKind::Invalid, format!("{variable}: {error}"));
    // Completion must not print errors into the command line.
    let completes = matches!(cli.command, CliCommand::Complete(_));
    if !completes {
        // A tier that cannot be had would otherwise go unnoticed: the kernels fall back to the best there is.
        tier::Tier::forced().map_err(|error| invalid(tier::VARIABLE, error.to_string()))?;
        shape::forced().map_err(|error| invalid(shape::VARIABLE, error.to_string()))?;
    }
    if !completes && !matches!(cli.command, CliCommand::Serve(_)) {
        crate::logging::start(global.log_level.as_deref(), "warn", global.log_format.unwrap_or_default())?;
    }
    match cli.command {
        CliCommand::Serve(options) => daemon::serve(global, &options),
        CliCommand::Status(options) => status::status(global, output, options),
        CliCommand::Create(options) => images::create(global, output, options),
        CliCommand::Ls(options) => images::ls(global, output, options),
        CliCommand::Info(options) => images::info(global, output, options),
        CliCommand::Resize(options) => images::resize(global, output, options),
        CliCommand::Rm(options) => images::rm(global, output, options),
        CliCommand::Mv(options) => images::mv(global, output, options),
        CliCommand::Du(options) => images::du(global, output, options),
        CliCommand::Snap(command) => snapshots::run(global, output, command),
        CliCommand::Clone(options) => clones::clone(global, output, options),
        CliCommand::Children(options) => clones::children(global, output, options),
        CliCommand::Flatten(options) => clones::flatten(global, output, options),
        CliCommand::Sparsify(options) => images::sparsify(global, output, options),
        CliCommand::Group(command) => groups::run(global, output, command),
        CliCommand::Namespace(command) => namespaces::run(global, output, command),
        CliCommand::Trash(command) => trash::run(global, output, command),
        CliCommand::ImageMeta(command) => manage::image_meta(global, output, command),
        CliCommand::Lock(command) => manage::lock(global, output, command),
        CliCommand::Feature(command) => manage::feature(global, output, command),
        CliCommand::ObjectMap(command) => manage::object_map(global, output, command),
        CliCommand::Watch(options) => manage::watch(global, output, options),
        CliCommand::Config(command) => config::run(global, output, command),
        CliCommand::Import(options) => transfer::import(global, output, options),
        CliCommand::Export(options) => transfer::export(global, output, options),
        CliCommand::Diff(options) => diffs::list(global, output, options),
        CliCommand::ExportDiff(options) => diffs::export(global, output, options),
        CliCommand::ImportDiff(options) => diffs::import(global, output, options),
        CliCommand::MergeDiff(options) => diffs::merge(global, output, options),
        CliCommand::Cp(options) => copy::copy(global, output, options),
        CliCommand::Deep(command) => copy::deep(global, output, command),
        CliCommand::Bench(options) => bench::run(global, output, options),
        CliCommand::Attach(options) => targets::attach(global, output, options),
        CliCommand::Detach(options) => targets::detach(global, output, options),
        CliCommand::Targets => targets::list(global, output),
        CliCommand::Map(options) => map::map(global, output, options),
        CliCommand::Unmap(options) => map::unmap(global, output, options),
        CliCommand::Showmapped(_) => map::list(global, output),
        CliCommand::Device(command) => map::device(global, output, command),
        CliCommand::Ana(command) => ana::run(global, output, command),
        CliCommand::NvmeSubsystem(command) => access::nvme_subsystem(global, output, command),
        CliCommand::IscsiTarget(command) => access::iscsi_target(global, output, command),
        CliCommand::Reload => status::reload(global, output),
        CliCommand::Reservations(command) => reservations::run(global, output, command),
        CliCommand::Log(command) => logs::run(global, output, command),
        CliCommand::Cache(command) => cache::run(global, output, command),
        CliCommand::Store(command) => store::run(global, output, command),
        CliCommand::Perf(command) => perf::run(output, command),
        CliCommand::Complete(asked) => complete::complete(global, asked),
        CliCommand::Completions { shell } => pages::completions(shell),
        CliCommand::Man { dir } => pages::man(dir.as_deref()),
    }
}

/// Opens a session, does the work, and closes it cleanly even if the work failed.
fn with_session<T>(global: &GlobalArgs, work: impl FnOnce(&CommandSession) -> Result<T>) -> Result<T> {
    let session = CommandSession::open(global)?;
    let result = work(&session);
    let closed = session.close();
    let value = result?;
    closed.map(|()| value)
}
