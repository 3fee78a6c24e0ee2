//! `forebay serve`: starts the daemon, signals readiness, and shuts down in order.

mod access;
mod cache;
mod clones;
pub mod control;
mod gateways;
mod groups;
mod listen;
mod manage;
mod map;
mod metrics;
mod namespaces;
mod notify;
mod options;
mod page;
mod snapshots;
mod store;
mod streams;
mod trash;

use std::fs::{self, DirBuilder};
use std::os::unix::fs::{DirBuilderExt, FileTypeExt};
use std::path::Path;
use std::sync::Arc;

use forebay_reactor::cores::CorePanic;
use forebay_reactor::{Cores, CoresOptions};
use forebay_store::InitOptions;
use tokio::sync::oneshot;

use crate::api::DaemonStatus;
use crate::cli::{GlobalArgs, ServeArgs};
use crate::config::{DaemonConfig, default_store, follow_links, size_from_free_space};
use crate::engine::handle::{Jobs, jobs};
use crate::engine::small_files::{keep_reserve, replace_file};
use crate::engine::{DaemonOptions, Engine, EngineOptions, store as engine_store};
use crate::failure::{Failure, FailureKind, Result};
use crate::kernels;
use crate::ops::ProgressSink;
use crate::running::{RunningDaemon, RunningEntry};
use crate::units::Size;
use listen::Listeners;
use notify::Notifier;

/// Runs the daemon until it is told to stop.  The control plane runs on this thread, the reactors on separate ones.
pub fn serve(global: &GlobalArgs, options: &ServeArgs) -> Result<()> {
    let config = DaemonConfig::resolve(global, options)?;
    crate::logging::start(config.log_level.as_deref(), "info", config.log_format)?;
    crate::logging::log_panics();
    let notifier = Notifier::from_environment();
    raise_file_limit();
    prepare_dir(&config.data)?;
    link_store(&config.data, &config.store)?;
    keep_reserve(&config.data);
    kernels::choose();
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().enable_time().build();
    let runtime = runtime.map_err(|error| Failure::io(error, "starting the control plane"))?;
    // Not pinned: other programs, and other daemons, share the processors.
    let cores = CoresOptions {
        count: config.cores.into(),
        driver: config.driver,
        name: "core".into(),
        pin: false,
        linger: config.linger,
        on_panic: Some(end_process),
    };
    let cores = Cores::start(&cores).map_err(|error| Failure::io(error, "starting the reactors"))?;
    if let Err(error) = forebay_reactor::heap::start_trimmer() {
        tracing::warn!(
            %error,
            "cannot start the heap-trimming thread; memory of closed connections is not returned to the system"
        );
    }
    let (global, options) = (global.clone(), options.clone());
    let read_config = Arc::new(move || DaemonConfig::resolve(&global, &options));
    let daemon = DaemonOptions { config, read_config, cores: cores.handles() };
    let result = runtime.block_on(run(daemon, &cores, &notifier));
    let stopped = cores.stop().map_err(|panic| Failure::failed(panic.to_string()));
    result.and(stopped)?;
    tracing::info!("stopped");
    Ok(())
}

/// Ends the process because a reactor has panicked: its volumes and connections are lost, and a service manager
/// restarts a daemon that has exited, not one that no longer serves.  Data that hosts have flushed is durable, as
/// after `kill -9`.
fn end_process(panic: &CorePanic) {
    tracing::error!("{panic}; terminating, since the daemon cannot serve without this core");
    crate::logging::flush();
    std::process::exit(FailureKind::Failed.exit_code().into());
}

/// Raises the limit of open file descriptors to the maximum: each connection takes one, and the initial limit of a
/// shell or a service manager is often 1,024.
fn raise_file_limit() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    if limit.current == limit.maximum {
        return;
    }
    match setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit }) {
        Ok(()) => tracing::debug!(from = limit.current, to = limit.maximum, "file descriptors"),
        Err(error) => tracing::warn!(%error, limit = limit.current, "cannot raise the limit of open files"),
    }
}

async fn run(daemon: DaemonOptions, cores: &Cores, notifier: &Notifier) -> Result<()> {
    let config = &daemon.config.clone();
    let (engine, jobs) = jobs();
    let (started, wait) = oneshot::channel();
    let running = cores.handle(0).run(move || run_engine(daemon, jobs, started));
    let running = async move { running.await.unwrap_or_else(|gone| Err(Failure::failed(gone.to_string()))) };
    let Ok(status) = wait.await else {
        // Startup has failed; the result has the error.
        return running.await;
    };
    let listeners = match Listeners::bind(config).await {
        Ok(listeners) => listeners,
        Err(failure) => {
            drop(engine);
            running.await?;
            return Err(failure);
        }
    };
    let file_path = RunningDaemon::path_in(&config.data);
    let (control, data) = (config.control.clone(), config.data.clone());
    let running_daemon = RunningDaemon { pid: std::process::id(), control, data };
    let text = serde_json::to_vec(&running_daemon).map_err(|error| Failure::failed(error.to_string()))?;
    replace_file(&file_path, &text)
        .map_err(|error| Failure::io(error, format_args!("writing {}", file_path.display())))?;
    let listed = RunningEntry::write(&running_daemon);
    let (nbd, nvme, iscsi) = (status.nbd.join(", "), status.nvme.join(", "), status.iscsi.join(", "));
    tracing::info!(
        version = status.version,
        data = %config.data.display(),
        control = %config.control.display(),
        %nbd,
        %nvme,
        %iscsi,
        http = status.http.as_deref().unwrap_or("-"),
        cores = config.cores,
        driver = status.driver,
        targets = status.targets,
        "ready"
    );
    notifier.ready(&format!("Serving NBD on {nbd}"));
    // Drops the engine handle on return; the engine then closes open volumes.
    let served = listeners.serve(engine, notifier).await;
    let closed = running.await;
    // These files only help commands to find a running daemon.
    let _ = fs::remove_file(&file_path);
    drop(listed);
    served.and(closed)
}

/// Runs the engine on its reactor until it is closed.
async fn run_engine(daemon: DaemonOptions, jobs: Jobs, started: oneshot::Sender<DaemonStatus>) -> Result<()> {
    let config = daemon.config.clone();
    if engine_store::is_absent(&config.store)? {
        let path = follow_links(&config.store);
        let size = match config.store_size {
            Some(Size(size)) => size,
            None => size_from_free_space(path.parent().unwrap_or(&config.data))?,
        };
        tracing::info!(store = %path.display(), size = %Size(size), "first start: creating the store");
        let options = InitOptions { size, ..InitOptions::default() };
        engine_store::init(&path, options, ProgressSink::channel().0).await?;
    }
    let options = EngineOptions {
        data: config.data.clone(),
        store: config.store.clone(),
        opens_store: true,
        master_key: None,
        ceph: config.ceph.clone(),
        controls: Vec::new(),
        daemon: Some(daemon),
    };
    let engine = Engine::open(options).await?;
    let up = match engine.start_fronts().await {
        Ok(()) => engine.status().await,
        Err(failure) => Err(failure),
    };
    let result = match up {
        Ok(status) => {
            // If the caller is gone, the queue ends immediately.
            let _ = started.send(status);
            jobs.serve(&engine).await;
            Ok(())
        }
        Err(failure) => Err(failure),
    };
    engine.stop_fronts().await;
    let closed = engine.close().await;
    result.and(closed)
}

/// Creates the data directory, with access for its owner only.
pub fn prepare_dir(data: &Path) -> Result<()> {
    DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(data)
        .map_err(|error| Failure::io(error, format_args!("creating the data directory {}", data.display())))
}

/// Links a store elsewhere from the data directory, so that commands find it while no daemon is running.
pub fn link_store(data: &Path, store: &Path) -> Result<()> {
    let default = default_store(data);
    if store == default {
        return Ok(());
    }
    match fs::read_link(&default) {
        // A relative target is resolved from the data directory.
        Ok(there) if data.join(&there) == store => return Ok(()),
        Ok(there) => {
            return Err(Failure::invalid(format!(
                "the data directory {} belongs to the store {}, not {}",
                data.display(),
                there.display(),
                store.display()
            ))
            .hint(format!("name another data directory, or remove the link {}", default.display())));
        }
        Err(_) if default.exists() => {
            return Err(Failure::invalid(format!("the data directory {} already has a store", data.display()))
                .hint("name another data directory, or leave out --store"));
        }
        Err(_) => {}
    }
    std::os::unix::fs::symlink(store, &default)
        .map_err(|error| Failure::io(error, format_args!("linking the store from {}", default.display())))
}

/// Returns whether the path is a socket, which may be replaced if no process responds on it.
pub fn is_socket(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok_and(|meta| meta.file_type().is_socket())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Environment variable set for the process that [`the_death_of_a_reactor_ends_the_process`] starts.
    const DYING: &str = "FOREBAY_TEST_DYING_REACTOR";

    #[test]
    fn the_death_of_a_reactor_ends_the_process() {
        if std::env::var_os(DYING).is_none() {
            let this = std::env::current_exe().expect("this program");
            let name = "daemon::tests::the_death_of_a_reactor_ends_the_process";
            let done = std::process::Command::new(this).args(["--exact", name]).env(DYING, "1").output();
            let done = done.expect("this program again");
            let said = String::from_utf8_lossy(&done.stderr);
            assert_eq!(done.status.code(), Some(FailureKind::Failed.exit_code().into()), "{said}");
            assert!(said.contains("core 1 panicked: on purpose"), "{said}");
            assert!(said.contains("thread 'core-1' panicked at "), "{said}");
            return;
        }
        crate::logging::start(None, "info", crate::cli::LogFormat::Text).expect("logging");
        crate::logging::log_panics();
        let options = CoresOptions { count: 2, pin: false, on_panic: Some(end_process), ..CoresOptions::default() };
        let cores = Cores::start(&options).expect("reactors");
        drop(cores.handle(1).run(async || panic!("on purpose")));
        // The other reactor stays alive, and this thread never ends by itself.
        loop {
            std::thread::park();
        }
    }

    #[test]
    fn a_store_elsewhere_is_linked_once() {
        let dir = tempfile::tempdir().expect("a directory");
        let elsewhere = dir.path().join("elsewhere.img");
        link_store(dir.path(), &elsewhere).expect("linked");
        link_store(dir.path(), &elsewhere).expect("linked already");
        assert_eq!(fs::read_link(default_store(dir.path())).expect("a link"), elsewhere);
        let failure = link_store(dir.path(), Path::new("/dev/other")).expect_err("another store");
        assert!(failure.message.contains("elsewhere.img"), "{failure}");
    }

    #[test]
    fn a_store_in_the_directory_is_not_shadowed() {
        let dir = tempfile::tempdir().expect("a directory");
        fs::write(default_store(dir.path()), b"a store").expect("written");
        assert!(link_store(dir.path(), Path::new("/dev/other")).is_err());
        link_store(dir.path(), &default_store(dir.path())).expect("its own");
    }
}
