//! Sockets: the netlink socket that configures the kernel's NBD client, and the connections that it is given.  Everything
//! here blocks.

use std::io::{self, Read, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use forebay_nbd::kernel::control::{NbdFamily, NewNbdDevice, find_family};
use forebay_nbd::kernel::handshake::{ClientHandshake, ClientHandshakeError, HandshakeStep, NegotiatedExport};
use forebay_nbd::kernel::netlink::{NetlinkMessage, messages};
use rustix::io::Errno;
use rustix::net::sockopt::{Timeout, set_socket_timeout};
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, netlink};

use super::device;
use crate::failure::{Failure, FailureKind, Result};

/// Bytes of the longest datagram: the reply of the controller is the longest.
const DATAGRAM_MAX: usize = 32 << 10;
/// Maximum time for a reply of the kernel, or of the server in a handshake.
const PATIENCE: Duration = Duration::from_secs(30);
/// Highest multicast group that can be joined with the address of a socket.
const GROUP_MAX: u32 = 32;

/// Netlink socket of the generic family.
struct NetlinkSocket(OwnedFd);

impl NetlinkSocket {
    /// Opens a socket that is in the multicast groups of a mask.
    fn open(groups: u32) -> io::Result<Self> {
        let socket = rustix::net::socket_with(
            AddressFamily::NETLINK,
            SocketType::RAW,
            SocketFlags::CLOEXEC,
            Some(netlink::GENERIC),
        )?;
        rustix::net::bind(&socket, &netlink::SocketAddrNetlink::new(0, groups))?;
        Ok(Self(socket))
    }

    fn send(&self, message: &[u8]) -> io::Result<()> {
        rustix::net::sendto(&self.0, message, SendFlags::empty(), &netlink::SocketAddrNetlink::new(0, 0))?;
        Ok(())
    }

    /// Receives a datagram of the kernel.
    fn receive(&self, buf: &mut Vec<u8>) -> io::Result<()> {
        loop {
            buf.resize(DATAGRAM_MAX, 0);
            let (_, len, from) = rustix::net::recvfrom(&self.0, &mut buf[..], RecvFlags::TRUNC)?;
            if len > DATAGRAM_MAX {
                return Err(io::Error::other("a netlink message of more than 32 KiB"));
            }
            buf.truncate(len);
            let from = from.and_then(|from| netlink::SocketAddrNetlink::try_from(from).ok());
            // Processes may send to this socket too.
            if from.is_some_and(|from| from.pid() == 0) {
                return Ok(());
            }
        }
    }

    fn set_timeout(&self, timeout: Duration) -> io::Result<()> {
        Ok(set_socket_timeout(&self.0, Timeout::Recv, Some(timeout))?)
    }
}

/// Error of a netlink request.
fn failure(error: io::Error, what: &str) -> Failure {
    let context = format!("the kernel's NBD client: {what}");
    if error.kind() == io::ErrorKind::PermissionDenied || error.raw_os_error() == Some(Errno::PERM.raw_os_error()) {
        return not_permitted();
    }
    Failure::io(error, context)
}

/// Returns the failure of a daemon without the capability.
pub fn not_permitted() -> Failure {
    Failure::new(FailureKind::Denied, "the daemon may not configure the kernel's NBD client")
        .hint("it needs CAP_SYS_ADMIN: run 'forebay serve' as root")
}

/// Control socket of the kernel's NBD client.
pub struct NbdControl {
    socket: NetlinkSocket,
    family: NbdFamily,
    sequence: u32,
}

impl NbdControl {
    /// Opens the socket, loading the kernel module if it is missing.
    ///
    /// # Errors
    /// `Unsupported` if the kernel has no NBD client.
    pub fn open() -> Result<Self> {
        let failed = |error| failure(error, "opening a netlink socket");
        let socket = NetlinkSocket::open(0).map_err(failed)?;
        socket.set_timeout(PATIENCE).map_err(failed)?;
        let mut control = Self { socket, family: NbdFamily { id: 0, group: None }, sequence: 0 };
        let family = match control.find_family() {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                device::load_module()?;
                control.find_family()
            }
            found => found,
        };
        control.family = family.map_err(|error| failure(error, "finding its netlink family"))?;
        Ok(control)
    }

    fn find_family(&mut self) -> io::Result<NbdFamily> {
        let mut found = None;
        self.call(find_family, |message| found = NbdFamily::parse(message).ok().or(found))?;
        found.ok_or_else(|| io::ErrorKind::InvalidData.into())
    }

    /// Sends a request, and waits until the kernel has carried it out.
    fn call(
        &mut self,
        request: impl FnOnce(u32) -> Vec<u8>,
        mut reply: impl FnMut(&NetlinkMessage<'_>),
    ) -> io::Result<()> {
        self.sequence += 1;
        self.socket.send(&request(self.sequence))?;
        let mut buf = Vec::new();
        loop {
            self.socket.receive(&mut buf)?;
            for message in messages(&buf) {
                match message.map_err(io::Error::other)? {
                    NetlinkMessage::End { sequence, error } if sequence == self.sequence => {
                        return match error {
                            0 => Ok(()),
                            error => Err(io::Error::from_raw_os_error(error)),
                        };
                    }
                    message => reply(&message),
                }
            }
        }
    }

    /// Creates a device; returns its number.
    ///
    /// # Errors
    /// `Denied` without the capability.
    pub fn connect(&mut self, device: &NewNbdDevice) -> Result<u32> {
        let (family, mut index) = (self.family, None);
        let connected = self.call(
            |sequence| family.connect(sequence, device),
            |message| index = family.parse_connected(message).ok().or(index),
        );
        connected.map_err(|error| failure(error, "creating a device"))?;
        index.ok_or_else(|| Failure::failed("the kernel does not say which NBD device it has created"))
    }

    /// Replaces the connections of a device that have ended.
    ///
    /// # Errors
    /// Errors of the kernel, as for a device that is not configured, or by another.
    pub fn reconnect(&mut self, index: u32, backend: &str, sockets: &[u32]) -> Result<()> {
        let family = self.family;
        let done = self.call(|sequence| family.reconnect(sequence, index, backend, sockets), |_| {});
        done.map_err(|error| failure(error, &format!("reconnecting /dev/nbd{index}")))
    }

    /// Changes the size of a device.
    ///
    /// # Errors
    /// As of [`reconnect`](Self::reconnect).
    pub fn resize(&mut self, index: u32, backend: &str, size: u64) -> Result<()> {
        let family = self.family;
        let done = self.call(|sequence| family.resize(sequence, index, backend, size), |_| {});
        done.map_err(|error| failure(error, &format!("changing the size of /dev/nbd{index}")))
    }

    /// Ends a device.
    ///
    /// # Errors
    /// Errors of the kernel.
    pub fn disconnect(&mut self, index: u32) -> Result<()> {
        let family = self.family;
        let done = self.call(|sequence| family.disconnect(sequence, index), |_| {});
        done.map_err(|error| failure(error, &format!("ending /dev/nbd{index}")))
    }
}

/// Event of the kernel's NBD client.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LinkEvent {
    /// A connection of this device has ended.
    Dead(u32),
    /// Events were lost: connections of any device may have ended.
    Lost,
}

/// Source of the events.
pub trait LinkEventSource: Send {
    /// Waits until the next event, or for a second.
    ///
    /// # Errors
    /// Errors of the socket, after which it receives nothing more.
    fn next(&mut self) -> io::Result<Option<LinkEvent>>;
}

/// Subscribes to the events.  `None`: the kernel has numbered the group so that it cannot be joined.
pub type Subscribe = fn() -> Result<Option<Box<dyn LinkEventSource>>>;

/// Socket that receives the events.
pub struct LinkEvents {
    socket: NetlinkSocket,
    family: NbdFamily,
    buf: Vec<u8>,
}

impl LinkEvents {
    /// Subscribes as [`Subscribe`] says.
    ///
    /// # Errors
    /// Errors of the kernel.
    pub fn subscribe() -> Result<Option<Box<dyn LinkEventSource>>> {
        let family = NbdControl::open()?.family;
        let Some(group) = family.group.filter(|group| (1..=GROUP_MAX).contains(group)) else { return Ok(None) };
        let failed = |error| failure(error, "subscribing to its events");
        let socket = NetlinkSocket::open(1 << (group - 1)).map_err(failed)?;
        socket.set_timeout(Duration::from_secs(1)).map_err(failed)?;
        Ok(Some(Box::new(Self { socket, family, buf: Vec::new() })))
    }
}

impl LinkEventSource for LinkEvents {
    fn next(&mut self) -> io::Result<Option<LinkEvent>> {
        match self.socket.receive(&mut self.buf) {
            Ok(()) => {
                let found =
                    messages(&self.buf).flatten().find_map(|message| self.family.parse_link_dead(&message).ok());
                Ok(found.map(LinkEvent::Dead))
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(None),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => Ok(None),
            Err(error) if error.raw_os_error() == Some(Errno::NOBUFS.raw_os_error()) => Ok(Some(LinkEvent::Lost)),
            Err(error) => Err(error),
        }
    }
}

/// Connections for a device, negotiated.
pub struct NegotiatedSockets {
    sockets: Vec<UnixStream>,
    /// Export as the server describes it.
    pub export: NegotiatedExport,
}

impl NegotiatedSockets {
    /// Connects to a server `count` times, and negotiates an export.
    ///
    /// # Errors
    /// `NotFound` if the server does not show the export to this host.
    pub fn connect(path: &Path, name: &str, count: u32) -> Result<Self> {
        let mut sockets = Vec::new();
        let mut found = None;
        for _ in 0..count {
            let (socket, export) = negotiate(path, name)?;
            sockets.push(socket);
            found = Some(export);
        }
        let export = found.ok_or_else(|| Failure::invalid("a device needs a connection"))?;
        Ok(Self { sockets, export })
    }

    /// Returns the file descriptors.
    pub fn fds(&self) -> Vec<u32> {
        self.sockets.iter().map(|socket| socket.as_raw_fd().cast_unsigned()).collect()
    }
}

fn negotiate(path: &Path, name: &str) -> Result<(UnixStream, NegotiatedExport)> {
    let io_failure = |error| Failure::io(error, format_args!("connecting to NBD at {}", path.display()));
    let mut socket = UnixStream::connect(path).map_err(io_failure)?;
    socket.set_read_timeout(Some(PATIENCE)).map_err(io_failure)?;
    socket.set_write_timeout(Some(PATIENCE)).map_err(io_failure)?;
    let refused = |error: ClientHandshakeError| match error {
        ClientHandshakeError::Unknown => {
            Failure::new(FailureKind::NotFound, format!("{name} is not exported over NBD to this machine")).hint(
                format!("an export with a list of hosts needs 'unix' in it: forebay attach {name} --nbd --host unix"),
            )
        }
        error => Failure::failed(format!("the NBD handshake for {name}: {error}")),
    };
    let mut handshake = ClientHandshake::new(name);
    let mut buf = Vec::new();
    loop {
        match handshake.step().map_err(refused)? {
            HandshakeStep::Send(bytes) => socket.write_all(&bytes).map_err(io_failure)?,
            HandshakeStep::Receive(len) => {
                buf.resize(len, 0);
                socket.read_exact(&mut buf).map_err(io_failure)?;
                handshake.received(&buf).map_err(refused)?;
            }
            HandshakeStep::Done(export) => {
                // The kernel would inherit them.
                socket.set_read_timeout(None).map_err(io_failure)?;
                socket.set_write_timeout(None).map_err(io_failure)?;
                return Ok((socket, export));
            }
        }
    }
}
