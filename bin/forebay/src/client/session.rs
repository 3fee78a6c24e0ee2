//! Execution of a command's operations: in the running daemon, or in this process on the store itself.

use std::io::{BufRead, BufReader, ErrorKind, Read};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::Duration;

use forebay_rados::Flags;
use serde::de::DeserializeOwned;

use super::direct::Direct;
use super::http::{Response, SentRequest};
use crate::api::{ErrorBody, Progress, StreamLine};
use crate::cli::{CephArgs, GlobalArgs};
use crate::config::{absolute, default_data_dir, default_store};
use crate::engine::{EngineOptions, store};
use crate::failure::{Failure, FailureKind, Result};
use crate::master_key::MasterKeySource;
use crate::ops::Operation;
use crate::running::{self, RunningDaemon};

/// Longest line of a streamed answer, in bytes: a listing of a very full pool.
const LINE_LEN_MAX: u64 = 1 << 30;

/// Time that `status` waits for a response of the daemon.
pub const STATUS_TIMEOUT: Duration = Duration::from_secs(10);

/// Backend of a command's operations.
pub enum CommandSession {
    /// The running daemon, through its control socket.
    Daemon(DaemonClient),
    /// Engine in this process, with the store open.
    Direct(Direct),
}

/// The directories and sockets that a command looks at.
struct Places {
    /// Sockets at which a daemon may answer, the likeliest first.
    controls: Vec<PathBuf>,
    /// The data directory.
    data: PathBuf,
    master_key: Option<MasterKeySource>,
    /// The store may be opened when no daemon answers.
    may_open: bool,
}

impl Places {
    fn find(global: &GlobalArgs) -> Result<Self> {
        let data = absolute(&global.data.clone().unwrap_or_else(default_data_dir))?;
        let mut controls = Vec::new();
        match &global.control {
            Some(path) => controls.push(absolute(path)?),
            None => {
                controls.push(data.join("control.sock"));
                if let Some(file) = RunningDaemon::read_in(&data).filter(|file| !controls.contains(&file.control)) {
                    controls.push(file.control);
                }
            }
        }
        // A control socket that is named, with no directory beside it, means: that daemon, nothing else.
        let may_open = global.control.is_none() || global.data.is_some();
        Ok(Self { controls, data, master_key: global.master_key.clone(), may_open })
    }

    /// Returns what an engine in this process is opened with.
    fn engine_options(&self, opens_store: bool, ceph: Flags) -> EngineOptions {
        let (data, controls) = (self.data.clone(), self.controls.clone());
        let master_key = self.master_key.clone();
        EngineOptions { store: default_store(&data), data, opens_store, master_key, ceph, controls, daemon: None }
    }

    fn daemon(&self) -> Result<Option<DaemonClient>> {
        for path in &self.controls {
            match UnixStream::connect(path) {
                Ok(_) => return Ok(Some(DaemonClient { socket: path.clone() })),
                Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::ConnectionRefused) => {}
                Err(error) if error.kind() == ErrorKind::NotADirectory => {}
                Err(error) => {
                    let failure = Failure::io(error, format_args!("the control socket {}", path.display()));
                    return Err(failure.hint("the socket belongs to the user who runs the daemon; become that user"));
                }
            }
        }
        Ok(None)
    }

    fn unreachable(&self) -> Failure {
        let what = format!("no daemon answers at {}", running::either(&self.controls));
        Failure::new(FailureKind::Unreachable, what).hint(running::advise(
            "start one with 'forebay serve', or name its socket with --control or FOREBAY_CONTROL",
        ))
    }
}

impl CommandSession {
    /// Connects to the running daemon, or opens the store if none is running.
    pub fn open(global: &GlobalArgs) -> Result<Self> {
        let places = Places::find(global)?;
        if let Some(client) = places.daemon()? {
            return Ok(CommandSession::Daemon(client));
        }
        if !places.may_open {
            return Err(places.unreachable());
        }
        let path = default_store(&places.data);
        // Without a store there are the pools of a cluster still.
        let flags = global.ceph.flags(CephArgs::default());
        Ok(CommandSession::Direct(Direct::open(places.engine_options(store::exists(&path), flags), Duration::ZERO)?))
    }

    /// An engine in this process, whether a daemon runs or not, with the store or without it.  Its reactor polls for
    /// `linger` before it sleeps.
    pub fn own(global: &GlobalArgs, opens_store: bool, linger: Duration) -> Result<Direct> {
        let places = Places::find(global)?;
        let opens_store = opens_store && store::exists(&default_store(&places.data));
        Direct::open(places.engine_options(opens_store, global.ceph.flags(CephArgs::default())), linger)
    }

    /// Connects to the running daemon.
    pub fn daemon(global: &GlobalArgs) -> Result<DaemonClient> {
        let places = Places::find(global)?;
        places.daemon()?.ok_or_else(|| places.unreachable())
    }

    /// Runs an operation; `progress` is called with its progress.
    pub fn call<O: Operation>(&self, operation: O, progress: impl FnMut(Progress)) -> Result<O::Reply> {
        match self {
            CommandSession::Daemon(client) => client.call(&operation, None, progress),
            CommandSession::Direct(direct) => direct.call(operation, progress),
        }
    }

    /// Ends the work in this process cleanly.
    pub fn close(self) -> Result<()> {
        match self {
            CommandSession::Daemon(_) => Ok(()),
            CommandSession::Direct(direct) => direct.close(),
        }
    }
}

/// The running daemon, through its control socket.
pub struct DaemonClient {
    /// Control socket of the daemon.
    pub socket: PathBuf,
}

impl DaemonClient {
    /// Does an operation; `timeout` bounds each wait for something of the answer.
    pub fn call<O: Operation>(
        &self,
        operation: &O,
        timeout: Option<Duration>,
        progress: impl FnMut(Progress),
    ) -> Result<O::Reply> {
        let route = operation.route();
        let body = route.body.as_deref().map(str::as_bytes);
        let response = SentRequest::send(&self.socket, route.method, &route.target, body)
            .and_then(|request| request.response(timeout))
            .map_err(|error| self.lost(error))?;
        self.read_lines(response, progress)
    }

    /// Reads a streamed answer to its result.
    pub fn read_lines<T: DeserializeOwned>(&self, response: Response, mut progress: impl FnMut(Progress)) -> Result<T> {
        if response.status >= 300 {
            return Err(self.read_error(response));
        }
        let mut reader = BufReader::new(response);
        loop {
            let mut line = Vec::new();
            reader.by_ref().take(LINE_LEN_MAX).read_until(b'\n', &mut line).map_err(|error| self.lost(error))?;
            if line.is_empty() {
                return Err(self.lost(ErrorKind::UnexpectedEof.into()));
            }
            match serde_json::from_slice::<StreamLine<T>>(&line) {
                Ok(StreamLine::Progress(now)) => progress(now),
                Ok(StreamLine::Result(result)) => return Ok(result),
                Ok(StreamLine::Error(failure)) => return Err(failure),
                Err(error) => {
                    let what = format!("cannot parse the reply of the daemon at {}: {error}", self.socket.display());
                    return Err(Failure::failed(what).hint("run the same version of forebay on both sides"));
                }
            }
        }
    }

    /// Converts an error response to a failure.
    pub fn read_error(&self, mut response: Response) -> Failure {
        let status = response.status;
        let mut body = Vec::new();
        if let Err(error) = response.by_ref().take(LINE_LEN_MAX).read_to_end(&mut body) {
            return self.lost(error);
        }
        match serde_json::from_slice::<ErrorBody>(&body) {
            Ok(body) => body.error,
            Err(_) => {
                let text = String::from_utf8_lossy(&body);
                let text = text.trim();
                Failure::failed(format!("the daemon at {} answers {status}: {text}", self.socket.display()))
            }
        }
    }

    /// The connection has failed.
    pub fn lost(&self, error: std::io::Error) -> Failure {
        let what = match error.kind() {
            ErrorKind::WouldBlock | ErrorKind::TimedOut => "it does not answer in time".to_owned(),
            ErrorKind::UnexpectedEof | ErrorKind::ConnectionReset | ErrorKind::BrokenPipe => {
                "it has closed the connection".to_owned()
            }
            _ => error.to_string(),
        };
        Failure::new(FailureKind::Unreachable, format!("the daemon at {}: {what}", self.socket.display()))
            .hint("look at its log; it may be stopping")
    }
}
