//! vhost-user front: virtio-blk devices of virtual machines on this machine.  Each export has a socket of its own, and
//! one server on the engine's core serves them all: guests' requests reach their volumes without a message.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use std::rc::Rc;

use forebay_block::{BlockDevice, Unnamed};
use forebay_reactor::{Addr, CoreHandle};
use forebay_vhost::{VhostExport, VhostServer, VhostSocket, VhostStats};
use nix::unistd::{Group, User};

use super::{Engine, ExportedImage, FrontFuture, HostFront};
use crate::api::{Front, VhostSocketOptions};
use crate::config::DaemonConfig;
use crate::engine::identity::Uuid;
use crate::engine::offload::offload;
use crate::failure::{Failure, FailureKind, Result};
use crate::spec::{ImageSpec, uri_encode};

/// Socket of an export, with the names of its owners resolved.
#[derive(Debug, Clone)]
pub struct VhostBinding {
    socket: VhostSocket,
    queues: u16,
}

impl VhostBinding {
    /// Resolves the options of a socket.
    ///
    /// # Errors
    /// If an option is invalid, or the system knows no such user or group.
    pub async fn resolve(options: &VhostSocketOptions) -> Result<Self> {
        options.check()?;
        let (path, queues) = (options.path.clone(), options.queue_count());
        if options.connect {
            return Ok(Self { socket: VhostSocket::Connect { path }, queues });
        }
        let owned = |name: Option<&str>| name.map(str::to_owned);
        let (user, group) = options.owner_names()?;
        let (user, group) = match (owned(user), owned(group)) {
            (None, None) => (None, None),
            // A directory service may take long to answer.
            (user, group) => {
                offload(move || {
                    let user = user.map(|name| id_of("user", &name, user_id)).transpose()?;
                    let group = group.map(|name| id_of("group", &name, group_id)).transpose()?;
                    Ok((user, group))
                })
                .await?
            }
        };
        Ok(Self { socket: VhostSocket::Listen { path, mode: options.permissions()?, user, group }, queues })
    }
}

/// Looks up a user or group by its name, or takes its number.
fn id_of(kind: &str, name: &str, look: fn(&str) -> nix::Result<Option<u32>>) -> Result<u32> {
    if let Ok(id) = name.parse::<u32>() {
        // chown(2) takes the greatest number as "do not change".
        return match id {
            u32::MAX => Err(Failure::invalid(format!("{id} is not the number of a {kind}"))),
            id => Ok(id),
        };
    }
    let found =
        look(name).map_err(|error| Failure::io(error.into(), format_args!("looking up the {kind} '{name}'")))?;
    found.ok_or_else(|| {
        Failure::invalid(format!("this machine has no {kind} '{name}'")).hint(format!("getent {kind} lists them"))
    })
}

fn user_id(name: &str) -> nix::Result<Option<u32>> {
    Ok(User::from_name(name)?.map(|user| user.uid.as_raw()))
}

fn group_id(name: &str) -> nix::Result<Option<u32>> {
    Ok(Group::from_name(name)?.map(|group| group.gid.as_raw()))
}

/// Export that is published before the front serves.
struct WaitingExport {
    spec: ImageSpec,
    export: VhostExport,
    socket: VhostSocket,
}

/// The vhost-user front.
pub struct VhostFront {
    stats: VhostStats,
    /// Server, once the front serves.
    server: RefCell<Option<Rc<VhostServer>>>,
    /// Exports to serve when the front does, by name.
    waiting: RefCell<BTreeMap<String, WaitingExport>>,
    /// Sockets of all exports, by name.
    sockets: RefCell<BTreeMap<String, VhostSocket>>,
}

impl VhostFront {
    /// Creates the front; no guest is served yet.
    pub fn new() -> Self {
        Self {
            stats: VhostStats::default(),
            server: RefCell::default(),
            waiting: RefCell::default(),
            sockets: RefCell::default(),
        }
    }

    /// Returns the server counters.
    pub fn stats(&self) -> &VhostStats {
        &self.stats
    }

    /// Returns the number of sockets of exports.
    pub fn socket_count(&self) -> usize {
        self.sockets.borrow().len()
    }

    fn server(&self) -> Option<Rc<VhostServer>> {
        self.server.borrow().clone()
    }
}

impl HostFront for VhostFront {
    fn listen(&self, _config: &DaemonConfig) -> Result<()> {
        Ok(())
    }

    fn serve<'a>(&'a self, engine: &'a Rc<Engine>, _cores: &'a [CoreHandle]) -> FrontFuture<'a, Result<()>> {
        let server = VhostServer::new(self.stats.clone());
        *self.server.borrow_mut() = Some(server.clone());
        for (name, WaitingExport { spec, export, socket }) in self.waiting.take() {
            if let Err(failure) = add(&server, export, socket) {
                self.sockets.borrow_mut().remove(&name);
                engine.lose_export(Front::Vhost, &spec, failure);
            }
        }
        Box::pin(std::future::ready(Ok(())))
    }

    fn stop<'a>(&'a self, _cores: &'a [CoreHandle]) -> FrontFuture<'a, ()> {
        Box::pin(async move {
            self.waiting.take();
            if let Some(server) = self.server() {
                server.stop().await;
            }
            self.sockets.take();
        })
    }

    /// Returns none: sockets belong to exports.
    fn addrs(&self) -> Vec<Addr> {
        Vec::new()
    }

    fn uris(&self, spec: &ImageSpec) -> Vec<String> {
        self.sockets.borrow().get(&spec.to_string()).map(|socket| vhost_uri(socket.path())).into_iter().collect()
    }

    fn connections(&self) -> usize {
        self.stats.connection_count(None)
    }

    fn connections_of(&self, spec: &ImageSpec) -> usize {
        let name = spec.to_string();
        self.stats.connection_count(Some(&name))
    }

    fn connections_by_export(&self) -> BTreeMap<String, usize> {
        self.stats.connections().into_iter().fold(BTreeMap::new(), |mut counts, connection| {
            *counts.entry(connection.export).or_default() += 1;
            counts
        })
    }

    fn publish(&self, exported: &ExportedImage<'_>, device: &Rc<dyn BlockDevice>) -> Result<()> {
        let VhostBinding { socket, queues } =
            exported.socket.ok_or_else(|| Failure::invalid("an export over vhost without a socket"))?.clone();
        let name = exported.spec.to_string();
        let export = VhostExport {
            name: name.clone(),
            // Guests are anonymous.
            device: Unnamed::new(device.clone()),
            serial: serial(exported.identity),
            queues,
        };
        match self.server() {
            Some(server) => add(&server, export, socket.clone())?,
            None => {
                let waiting = WaitingExport { spec: exported.spec.clone(), export, socket: socket.clone() };
                self.waiting.borrow_mut().insert(name.clone(), waiting);
            }
        }
        self.sockets.borrow_mut().insert(name, socket);
        Ok(())
    }

    fn unpublish(&self, spec: &ImageSpec) {
        let name = spec.to_string();
        let waiting = self.waiting.borrow_mut().remove(&name);
        drop(waiting);
        self.sockets.borrow_mut().remove(&name);
        if let Some(server) = self.server() {
            server.unpublish(&name);
        }
    }

    fn disconnect<'a>(&'a self, spec: &'a ImageSpec, _cores: &'a [CoreHandle]) -> FrontFuture<'a, ()> {
        Box::pin(async move {
            let name = spec.to_string();
            if let Some(server) = self.server() {
                server.detach(&name).await;
            }
            self.stats.forget(&name);
        })
    }
}

/// Returns the serial number that a guest sees: the first digits of the image's identity, of which SCSI shows 32.
fn serial(identity: &Uuid) -> String {
    identity[..10].iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Returns the URI of an export: the socket with the name of the device that QEMU makes of it.
fn vhost_uri(path: &Path) -> String {
    format!("vhost-user-blk+unix://{}", uri_encode(&path.to_string_lossy(), true))
}

/// Serves an export on its socket.
fn add(server: &Rc<VhostServer>, export: VhostExport, socket: VhostSocket) -> Result<()> {
    let (name, path) = (export.name.clone(), socket.path().clone());
    server.add(export, socket).map_err(|error| {
        let (shown, kind) = (path.display(), error.kind());
        let context = format!("creating the socket {shown} of {name}");
        match kind {
            io::ErrorKind::AddrInUse | io::ErrorKind::AlreadyExists => {
                let what = format!("{context}: it exists, and is in use or no socket");
                Failure::new(FailureKind::Exists, what).hint("choose another path, or end the process that has it")
            }
            io::ErrorKind::NotFound => Failure::io(error, context).hint("create its directory first"),
            io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => Failure::io(error, context).hint(
                "the daemon must be able to write to its directory (ReadWritePaths= of the service), and only root can \
                 give a socket to another user",
            ),
            _ => Failure::io(error, context),
        }
    })
}

#[cfg(test)]
mod tests {
    use forebay_reactor::{DriverChoice, Reactor};

    use super::*;

    #[test]
    fn uris_are_percent_encoded() {
        assert_eq!(vhost_uri(Path::new("/run/vm1.sock")), "vhost-user-blk+unix:///run/vm1.sock");
        assert_eq!(vhost_uri(Path::new("/run/a b%")), "vhost-user-blk+unix:///run/a%20b%25");
    }

    #[test]
    fn a_serial_number_has_20_digits() {
        assert_eq!(serial(&[0xA7; 16]), "a7".repeat(10));
    }

    #[test]
    fn owners_are_looked_up() {
        let reactor = Reactor::system(DriverChoice::Auto).expect("a reactor");
        reactor.block_on(async {
            let resolve = async |owner: &str| {
                let options = VhostSocketOptions { owner: Some(owner.into()), ..VhostSocketOptions::new("/run/x") };
                VhostBinding::resolve(&options).await.map(|binding| match binding.socket {
                    VhostSocket::Listen { mode, user, group, .. } => (mode, user, group),
                    VhostSocket::Connect { .. } => panic!("it listens"),
                })
            };
            assert_eq!(resolve("root").await, Ok((0o600, Some(0), None)));
            assert_eq!(resolve("7:root").await, Ok((0o600, Some(7), Some(0))));
            assert_eq!(resolve(":8").await, Ok((0o600, None, Some(8))));
            for (owner, why) in [
                ("no such user", "has no user 'no such user'"),
                (":no such group", "has no group 'no such group'"),
                ("4294967295", "is not the number of a user"),
            ] {
                let failure = resolve(owner).await.expect_err("unknown");
                assert!(failure.message.contains(why), "{failure}");
            }
        });
    }
}
