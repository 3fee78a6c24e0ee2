//! systemd readiness protocol: a datagram to the socket that NOTIFY_SOCKET names.

use std::ffi::OsStr;
use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::{SocketAddr, UnixDatagram};

/// Notifier of the service manager; does nothing without NOTIFY_SOCKET.
#[derive(Debug)]
pub struct Notifier {
    socket: Option<(UnixDatagram, SocketAddr)>,
}

impl Notifier {
    /// Creates it from the environment.
    pub fn from_environment() -> Self {
        let Some(name) = std::env::var_os("NOTIFY_SOCKET") else { return Self { socket: None } };
        match open(&name) {
            Ok(socket) => Self { socket: Some(socket) },
            Err(error) => {
                tracing::warn!(%error, socket = ?name, "cannot use the service manager's socket");
                Self { socket: None }
            }
        }
    }

    /// Reports that the daemon is ready.
    pub fn ready(&self, status: &str) {
        self.send(&format!("READY=1\nSTATUS={status}\n"));
    }

    /// Reports that the daemon is stopping.
    pub fn stopping(&self) {
        self.send("STOPPING=1\nSTATUS=Stopping\n");
    }

    fn send(&self, state: &str) {
        let Some((socket, to)) = &self.socket else { return };
        if let Err(error) = socket.send_to_addr(state.as_bytes(), to) {
            tracing::warn!(%error, "cannot notify the service manager");
        }
    }
}

fn open(name: &OsStr) -> io::Result<(UnixDatagram, SocketAddr)> {
    // A leading @ stands for the zero byte of an abstract socket name.
    let addr = match name.as_bytes().strip_prefix(b"@") {
        Some(name) => SocketAddr::from_abstract_name(name)?,
        None => SocketAddr::from_pathname(name)?,
    };
    Ok((UnixDatagram::unbound()?, addr))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_kinds_of_names_are_reached() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path().join("notify");
        let abstract_name = format!("forebay-test-{}", std::process::id());
        let listeners = [
            (path.as_os_str().to_owned(), UnixDatagram::bind(&path)),
            (
                format!("@{abstract_name}").into(),
                SocketAddr::from_abstract_name(&abstract_name).and_then(|addr| UnixDatagram::bind_addr(&addr)),
            ),
        ];
        for (name, listener) in listeners {
            let listener = listener.expect("a listening socket");
            let notifier = Notifier { socket: Some(open(&name).expect("an address")) };
            notifier.ready("Serving");
            let mut buf = [0; 64];
            let len = listener.recv(&mut buf).expect("a datagram");
            assert_eq!(&buf[..len], b"READY=1\nSTATUS=Serving\n");
        }
    }
}
