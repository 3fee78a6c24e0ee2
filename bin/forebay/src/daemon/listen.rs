//! Sockets of the control plane, signal handling, and the shutdown sequence.

use std::fs::{self, OpenOptions, Permissions};
use std::io::{Read, Write};
use std::net::SocketAddr;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::os::unix::net::{UnixListener as StdUnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::{TcpListener, UnixListener};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;
use tokio::task::{JoinError, JoinSet};

use super::control::{App, router};
use super::is_socket;
use super::notify::Notifier;
use crate::config::DaemonConfig;
use crate::engine::Engine;
use crate::engine::handle::EngineHandle;
use crate::failure::{Failure, FailureKind, Result};

/// Maximum time for requests in flight to end once the daemon stops.
const DRAIN: Duration = Duration::from_secs(10);

/// Random bytes in the token for HTTP over TCP.
const TOKEN_LEN: usize = 32;

/// Sockets and signals of the control plane.
pub struct Listeners {
    unix: UnixListener,
    tcp: Option<(TcpListener, Arc<str>)>,
    terminate: tokio::signal::unix::Signal,
    interrupt: tokio::signal::unix::Signal,
    hangup: tokio::signal::unix::Signal,
    control: PathBuf,
}

impl Listeners {
    /// Binds the sockets; no request is accepted yet.
    pub async fn bind(config: &DaemonConfig) -> Result<Self> {
        let catch = |kind| signal(kind).map_err(|error| Failure::io(error, "catching signals"));
        let unix = bind_control(&config.control)?;
        let tcp = match config.http {
            None => None,
            Some(addr) => Some((bind_tcp(addr).await?, token(&config.data.join("http.token"))?)),
        };
        let (terminate, interrupt) = (catch(SignalKind::terminate())?, catch(SignalKind::interrupt())?);
        let hangup = catch(SignalKind::hangup())?;
        Ok(Self { unix, tcp, terminate, interrupt, hangup, control: config.control.clone() })
    }

    /// Serves requests, and reloads hosts and secrets on SIGHUP, until another signal arrives; then waits for
    /// requests in flight and drops the engine handle.
    ///
    /// # Errors
    /// If one of the servers ends unexpectedly: no request would be served from then on.
    pub async fn serve(self, engine: EngineHandle, notifier: &Notifier) -> Result<()> {
        let Self { unix, tcp, mut terminate, mut interrupt, mut hangup, control } = self;
        let (stop, stopping) = watch::channel(false);
        let wait = |mut stopping: watch::Receiver<bool>| async move {
            // The sender lives until the servers have ended.
            let _ = stopping.wait_for(|&stop| stop).await;
        };
        let app = App { engine: engine.clone() };
        let unix = axum::serve(unix, router(app.clone(), None)).with_graceful_shutdown(wait(stopping.clone()));
        let mut servers = JoinSet::new();
        servers.spawn(unix.into_future());
        if let Some((listener, token)) = tcp {
            let server = axum::serve(listener, router(app.clone(), Some(token)));
            servers.spawn(server.with_graceful_shutdown(wait(stopping.clone())).into_future());
        }
        drop(app);

        let result = loop {
            tokio::select! {
                _ = hangup.recv() => {
                    let reloaded = engine.call(async |engine: Rc<Engine>| engine.reload().await);
                    tokio::spawn(async move {
                        if let Err(failure) = reloaded.await {
                            tracing::error!("SIGHUP: {failure}");
                        }
                    });
                }
                _ = terminate.recv() => {
                    tracing::info!("SIGTERM: stopping; a second signal ends at once");
                    break Ok(());
                }
                _ = interrupt.recv() => {
                    tracing::info!("SIGINT: stopping; a second signal ends at once");
                    break Ok(());
                }
                Some(ended) = servers.join_next() => break Err(server_ended(ended)),
            }
        };
        tokio::spawn(async move {
            tokio::select! {
                _ = terminate.recv() => {}
                _ = interrupt.recv() => {}
            }
            tracing::warn!("second signal: terminating at once");
            crate::logging::flush();
            std::process::exit(1);
        });
        notifier.stopping();
        // From here on commands no longer find the daemon.
        let _ = fs::remove_file(&control);
        stop.send_replace(true);
        let fronts = engine.call(async |engine| {
            engine.stop_fronts().await;
            Ok(())
        });
        let drained = tokio::time::timeout(DRAIN, async move {
            // The outcome of a server has no further information.
            while servers.join_next().await.is_some() {}
            fronts.await
        });
        if drained.await.is_err() {
            tracing::warn!(after_s = DRAIN.as_secs(), "aborting requests that are still running");
        }
        engine.stop();
        result
    }
}

/// Returns the reason why a server of the control plane has ended.
fn server_ended(ended: std::result::Result<std::io::Result<()>, JoinError>) -> Failure {
    let why = match ended {
        Ok(Ok(())) => "it has ended".to_owned(),
        Ok(Err(error)) => error.to_string(),
        Err(error) => error.to_string(),
    };
    Failure::failed(format!("the control plane's server: {why}"))
}

/// Binds the control socket with access for its owner only.  The socket of a dead daemon is replaced; that of a
/// running one is not.
fn bind_control(path: &Path) -> Result<UnixListener> {
    let fail = |error| Failure::io(error, format_args!("the control socket {}", path.display()));
    if path.exists() {
        if UnixStream::connect(path).is_ok() {
            let what = format!("another daemon answers at {}", path.display());
            return Err(Failure::new(FailureKind::Busy, what).hint("stop it, or name another socket with --control"));
        }
        if !is_socket(path) {
            let what = format!("{} is there and is no socket", path.display());
            return Err(Failure::new(FailureKind::Exists, what).hint("remove it, or name another with --control"));
        }
    }
    // Bound under a temporary name and renamed, so that the socket never exists with other permissions.
    let beside = path.with_extension(format!("{}", std::process::id()));
    let _ = fs::remove_file(&beside);
    let listener = StdUnixListener::bind(&beside).map_err(fail)?;
    fs::set_permissions(&beside, Permissions::from_mode(0o600)).map_err(fail)?;
    fs::rename(&beside, path).map_err(fail)?;
    listener.set_nonblocking(true).map_err(fail)?;
    UnixListener::from_std(listener).map_err(fail)
}

async fn bind_tcp(addr: SocketAddr) -> Result<TcpListener> {
    if !addr.ip().is_loopback() {
        tracing::warn!(%addr, "HTTP is not encrypted, and is served beyond this machine");
    }
    TcpListener::bind(addr).await.map_err(|error| {
        Failure::io(error, format_args!("listening for HTTP on {addr}")).hint("choose another address with --http")
    })
}

/// Reads the token for HTTP over TCP; creates it at the first start.
fn token(path: &Path) -> Result<Arc<str>> {
    let fail = |error| Failure::io(error, format_args!("the token {}", path.display()));
    match fs::read_to_string(path) {
        Ok(text) if text.trim().len() >= TOKEN_LEN => return Ok(text.trim().into()),
        Ok(_) => {
            return Err(Failure::invalid(format!("the token in {} is too short", path.display()))
                .hint("remove the file to have a new one made"));
        }
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {}
        Err(error) => return Err(fail(error)),
    }
    let mut chance = [0; TOKEN_LEN];
    fs::File::open("/dev/urandom").and_then(|mut file| file.read_exact(&mut chance)).map_err(fail)?;
    let token: String = chance.iter().map(|byte| format!("{byte:02x}")).collect();
    let mut file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path).map_err(fail)?;
    if let Err(error) = file.write_all(token.as_bytes()).and_then(|()| file.sync_all()) {
        // A partial token would be refused at the next start.
        let _ = fs::remove_file(path);
        return Err(fail(error));
    }
    Ok(token.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_made_once() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("http.token");
        let first = token(&path).expect("made");
        assert_eq!(first.len(), 2 * TOKEN_LEN);
        assert_eq!(token(&path).expect("read"), first);
        assert_eq!(fs::metadata(&path).expect("a file").permissions().mode() & 0o777, 0o600);
    }
}
