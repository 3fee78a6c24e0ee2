//! vhost-user front: virtio-blk devices and virtio-scsi controllers of virtual machines on this machine.  Each device has
//! a socket of its own, and one server on the engine's core serves them all.  Queues of virtio-blk devices are distributed
//! over all cores.

mod controllers;

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use std::rc::{Rc, Weak};

use forebay_block::{BlockDevice, Unnamed};
use forebay_reactor::{Addr, CoreHandle};
use forebay_vhost::{VhostExport, VhostServer, VhostSocket, VhostStats, VhostVolume};
use nix::unistd::{Group, User};

use super::spaces::PoolSpaces;
use super::{Engine, ExportedImage, FrontFuture, HostFront};
use crate::api::{Front, VhostSocketOptions};
use crate::config::DaemonConfig;
use crate::engine::identity::{DataDirIdentity, Uuid};
use crate::engine::offload::offload;
use crate::failure::{Failure, FailureKind, Result};
use crate::spec::{ImageSpec, uri_encode};
use controllers::{VhostControllers, server_name};

/// Socket of an export, with the names of its owners resolved.
#[derive(Debug, Clone)]
pub struct VhostBinding {
    socket: VhostSocket,
    queues: u16,
    /// Set if the socket is of a virtio-scsi controller, of which the export is a unit.
    scsi: bool,
}

impl VhostBinding {
    /// Resolves the options of a socket.
    ///
    /// # Errors
    /// If an option is invalid, or the system knows no such user or group.
    pub async fn resolve(options: &VhostSocketOptions) -> Result<Self> {
        options.check()?;
        let (path, queues, scsi) = (options.path.clone(), options.queue_count(), options.scsi);
        if options.connect {
            return Ok(Self { socket: VhostSocket::Connect { path }, queues, scsi });
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
        let socket = VhostSocket::Listen { path, mode: options.permissions()?, user, group };
        Ok(Self { socket, queues, scsi })
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
    /// Sockets of virtio-blk exports, by name.
    sockets: RefCell<BTreeMap<String, VhostSocket>>,
    /// Controllers of the other exports.
    controllers: VhostControllers,
    engine: RefCell<Weak<Engine>>,
}

impl VhostFront {
    /// Creates the front; no guest is served yet.
    pub fn new(identity: &DataDirIdentity, spaces: Rc<PoolSpaces>) -> Self {
        Self {
            stats: VhostStats::default(),
            server: RefCell::default(),
            waiting: RefCell::default(),
            sockets: RefCell::default(),
            controllers: VhostControllers::new(identity, spaces),
            engine: RefCell::default(),
        }
    }

    /// Returns the server counters.
    pub fn stats(&self) -> &VhostStats {
        &self.stats
    }

    /// Returns the number of sockets of exports.
    pub fn socket_count(&self) -> usize {
        self.sockets.borrow().len() + self.controllers.count()
    }

    /// Publishes an export as a unit of its socket's controller.
    fn publish_unit(
        &self,
        exported: &ExportedImage<'_>,
        binding: &VhostBinding,
        device: &Rc<dyn BlockDevice>,
    ) -> Result<()> {
        self.controllers.add(exported, binding, device)?;
        let engine = self.engine.borrow().clone();
        let Some(engine) = engine.upgrade() else { return Ok(()) };
        let (path, name) = (binding.socket.path(), exported.spec.to_string());
        let others = self.controllers.names(path).into_iter().filter(|other| *other != name);
        let others: Vec<String> = others.collect();
        self.serve_controller(&engine, path).inspect_err(|failure| lose_units(&engine, &others, failure))
    }

    /// Serves a controller that is not served yet, unless some of its units are still being opened: a guest that goes on
    /// with its requests would find them missing.  On failure the controller has no units any more.
    fn serve_controller(&self, engine: &Engine, path: &Path) -> Result<()> {
        let Some(server) = self.server() else { return Ok(()) };
        if engine.exports.is_controller_opening(path) {
            return Ok(());
        }
        let Some((export, socket)) = self.controllers.begin(path) else { return Ok(()) };
        add(&server, export, socket).inspect_err(|_| self.controllers.lose(path))?;
        self.controllers.spaces.watch(&self.engine.borrow());
        Ok(())
    }

    /// Serves the controllers that waited for units to be opened, which have been, or cannot be.
    pub fn serve_controllers(&self, engine: &Rc<Engine>) {
        for path in self.controllers.unserved() {
            let names = self.controllers.names(&path);
            if let Err(failure) = self.serve_controller(engine, &path) {
                lose_units(engine, &names, &failure);
            }
        }
    }

    fn server(&self) -> Option<Rc<VhostServer>> {
        self.server.borrow().clone()
    }
}

impl HostFront for VhostFront {
    fn listen(&self, _config: &DaemonConfig) -> Result<()> {
        Ok(())
    }

    fn serve<'a>(&'a self, engine: &'a Rc<Engine>, cores: &'a [CoreHandle]) -> FrontFuture<'a, Result<()>> {
        let server = VhostServer::on_cores(self.stats.clone(), cores.to_vec());
        *self.server.borrow_mut() = Some(server.clone());
        for (name, WaitingExport { spec, export, socket }) in self.waiting.take() {
            if let Err(failure) = add(&server, export, socket) {
                self.sockets.borrow_mut().remove(&name);
                engine.lose_export(Front::Vhost, &spec, failure);
            }
        }
        *self.engine.borrow_mut() = Rc::downgrade(engine);
        self.serve_controllers(engine);
        Box::pin(std::future::ready(Ok(())))
    }

    fn stop<'a>(&'a self, _cores: &'a [CoreHandle]) -> FrontFuture<'a, ()> {
        Box::pin(async move {
            self.waiting.take();
            if let Some(server) = self.server() {
                server.stop().await;
            }
            self.sockets.take();
            self.controllers.clear();
        })
    }

    /// Returns none: sockets belong to exports.
    fn addrs(&self) -> Vec<Addr> {
        Vec::new()
    }

    fn uris(&self, spec: &ImageSpec) -> Vec<String> {
        let name = spec.to_string();
        if let Some((path, lun)) = self.controllers.place(&name) {
            return vec![unit_uri(&path, lun)];
        }
        self.sockets.borrow().get(&name).map(|socket| vhost_uri(socket.path())).into_iter().collect()
    }

    fn connections(&self) -> usize {
        self.stats.connection_count(None)
    }

    fn connections_of(&self, spec: &ImageSpec) -> usize {
        let name = spec.to_string();
        self.stats.connection_count(Some(&name)) + self.controllers.sessions(&name)
    }

    fn connections_by_export(&self) -> BTreeMap<String, usize> {
        self.stats.connections().into_iter().fold(self.controllers.sessions_by_unit(), |mut counts, connection| {
            *counts.entry(connection.export).or_default() += 1;
            counts
        })
    }

    fn publish(&self, exported: &ExportedImage<'_>, device: &Rc<dyn BlockDevice>) -> Result<()> {
        let binding = exported.socket.ok_or_else(|| Failure::invalid("an export over vhost without a socket"))?;
        if binding.scsi {
            return self.publish_unit(exported, binding, device);
        }
        let VhostBinding { socket, queues, .. } = binding.clone();
        let name = exported.spec.to_string();
        let export = VhostExport {
            name: name.clone(),
            // Guests are anonymous.
            volume: VhostVolume::Block { device: Unnamed::new(device.clone()), serial: serial(exported.identity) },
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
        if let Some(last_of) = self.controllers.remove(&name) {
            if let (Some(path), Some(server)) = (last_of, self.server()) {
                server.unpublish(&server_name(&path));
            }
            return;
        }
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
            let end = async |path: &Path| {
                let name = server_name(path);
                if let Some(server) = self.server() {
                    server.detach(&name).await;
                }
                self.stats.forget(&name);
            };
            self.controllers.end(&name, end).await;
        })
    }
}

/// Marks the exports of a controller that cannot be served as failed.
fn lose_units(engine: &Rc<Engine>, names: &[String], failure: &Failure) {
    for spec in names.iter().filter_map(|name| name.parse::<ImageSpec>().ok()) {
        engine.lose_export(Front::Vhost, &spec, failure.clone());
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

/// Returns the URI of a unit of a controller.
fn unit_uri(path: &Path, lun: u16) -> String {
    format!("vhost-user-scsi+unix://{}?lun={lun}", uri_encode(&path.to_string_lossy(), true))
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
        assert_eq!(unit_uri(Path::new("/run/a b"), 7), "vhost-user-scsi+unix:///run/a%20b?lun=7");
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
