//! NBD front: a server on each core; exports are selected by image name.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fs::Permissions;
use std::future::ready;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::rc::{Rc, Weak};
use std::sync::Arc;

use forebay_block::{BlockDevice, DeviceHandle, Error, ErrorKind, LocalFuture, Unnamed};
use forebay_nbd::access::{HostPattern, NbdAccessControl, NbdHost, SharedAccess};
use forebay_nbd::{ExportSummary, NbdExport, NbdListenerOptions, NbdServer, NbdServerOptions, NbdStats, Tls};
use forebay_reactor::{Addr, CoreHandle, Listener, spawn};
use rustix::thread::CapabilitySet;

use super::cores::{Listening, on_each_server, serve_on_cores};
use super::published::Published;
use super::{Engine, ExportedImage, FrontFuture, HostFront};
use crate::api::Front;
use crate::config::DaemonConfig;
use crate::failure::{Failure, Result};
use crate::spec::{ImageSpec, uri_encode};

thread_local! {
    /// Server of this core.
    static SERVER: RefCell<Option<Rc<NbdServer>>> = const { RefCell::new(None) };
}

/// Export as published to every core.
#[derive(Clone)]
struct Offer {
    handle: DeviceHandle,
    /// Hosts that see it; if empty, all do.
    hosts: Arc<[HostPattern]>,
}

impl Offer {
    fn is_for(&self, host: &NbdHost) -> bool {
        self.hosts.is_empty() || self.hosts.iter().any(|pattern| pattern.matches(host))
    }
}

/// State that the servers of all cores share.
#[derive(Clone)]
struct NbdShared {
    stats: NbdStats,
    access: SharedAccess,
    published: Published<Offer>,
}

/// The NBD front.
pub struct NbdFront {
    listeners: RefCell<Vec<Listening<NbdListenerOptions>>>,
    addrs: RefCell<Vec<(Addr, Tls)>>,
    /// Listening socket for the kernel's client.
    kernel_listener: RefCell<Option<Listening<NbdListenerOptions>>>,
    /// Socket for the kernel's client on this machine.
    kernel_socket: RefCell<Option<PathBuf>>,
    shared: NbdShared,
}

impl NbdFront {
    /// Creates the front; nothing listens yet.
    pub fn new() -> Self {
        let (stats, access, published) = (NbdStats::new(), SharedAccess::default(), Published::default());
        Self {
            listeners: RefCell::default(),
            addrs: RefCell::default(),
            kernel_listener: RefCell::default(),
            kernel_socket: RefCell::default(),
            shared: NbdShared { stats, access, published },
        }
    }

    /// Replaces access control, certificates and keys for new connections; [`expel`](Self::expel) ends connections
    /// that are no longer allowed.
    pub fn admit(&self, access: NbdAccessControl) {
        self.shared.access.set(access);
    }

    /// Ends the connections of hosts that are no longer allowed, after their requests in flight complete.
    pub async fn expel(&self, cores: &[CoreHandle]) {
        on_each_server(cores, &SERVER, |server| async move {
            server.expel();
        })
        .await;
    }

    /// Returns the addresses in configuration syntax.
    pub fn listeners(&self) -> Vec<String> {
        let told = |(addr, tls): &(Addr, Tls)| match tls {
            Tls::None => addr.to_string(),
            Tls::Allowed => format!("{addr},tls=allowed"),
            Tls::Required => format!("{addr},tls=required"),
        };
        self.addrs.borrow().iter().map(told).collect()
    }

    /// Returns the socket to which connections for the kernel's client are made; `None` if this process may not
    /// configure that client.
    pub fn kernel_socket(&self) -> Option<PathBuf> {
        self.kernel_socket.borrow().clone()
    }

    /// Listens for connections of the kernel's client, on a socket in the data directory.
    fn listen_for_kernel(&self, data: &Path) {
        let effective = rustix::thread::capabilities(None).map(|sets| sets.effective);
        if !effective.is_ok_and(|effective| effective.contains(CapabilitySet::SYS_ADMIN)) {
            return;
        }
        let path = kernel_socket_in(data);
        let bound = bind(&Addr::Unix(path.clone())).and_then(|listener| {
            // Neither TLS nor lists of hosts apply to it: it is its owner's, whatever the umask.
            std::fs::set_permissions(&path, Permissions::from_mode(0o600))
                .map_err(|error| Failure::io(error, format!("restricting {}", path.display())))?;
            Ok(listener)
        });
        match bound {
            Ok(listener) => {
                let options = NbdListenerOptions { tls: Tls::None, resumes: true };
                *self.kernel_listener.borrow_mut() = Some((listener, options));
                *self.kernel_socket.borrow_mut() = Some(path);
            }
            Err(failure) => tracing::warn!(error = %failure.message, "images cannot be mapped to block devices"),
        }
    }

    /// Returns the server counters.
    pub fn stats(&self) -> &NbdStats {
        &self.shared.stats
    }
}

impl HostFront for NbdFront {
    fn listen(&self, config: &DaemonConfig) -> Result<()> {
        self.admit(config.nbd_access.access()?);
        for (addr, tls) in config.nbd.iter().zip(&config.nbd_access.tls) {
            if let Some(why) = config.nbd_access.is_open(*tls).filter(|_| !addr.is_local()) {
                tracing::warn!(%addr, "NBD is served beyond this machine, {why}");
            }
            let listener = bind(addr)?;
            self.addrs.borrow_mut().push((listener.local_addr().clone(), *tls));
            self.listeners.borrow_mut().push((listener, (*tls).into()));
        }
        self.listen_for_kernel(&config.data);
        Ok(())
    }

    fn serve<'a>(&'a self, engine: &'a Rc<Engine>, cores: &'a [CoreHandle]) -> FrontFuture<'a, Result<()>> {
        Box::pin(async move {
            let (there, here) = (self.shared.clone(), self.shared.clone());
            let engine = Rc::downgrade(engine);
            let start_there = move |listeners| start_server(&there, None, listeners);
            let kernel_listener = self.kernel_listener.take();
            serve_on_cores(cores, self.listeners.take(), start_there, |mut listeners| {
                // On the core of the images only.  The kernel sends a request again over another connection: were that
                // served by another core, the first could still be on its way between cores, and overtake it.
                listeners.extend(kernel_listener);
                start_server(&here, Some(engine), listeners);
            })
            .await
        })
    }

    fn stop<'a>(&'a self, cores: &'a [CoreHandle]) -> FrontFuture<'a, ()> {
        Box::pin(async move {
            on_each_server(cores, &SERVER, |server| async move { server.stop().await }).await;
            self.shared.published.clear();
            if let Some(path) = self.kernel_socket.take() {
                // A socket path left behind would be replaced at the next start.
                let _ = forebay_reactor::fs::remove_file(path);
            }
        })
    }

    fn addrs(&self) -> Vec<Addr> {
        self.addrs.borrow().iter().map(|(addr, _)| addr.clone()).collect()
    }

    fn uris(&self, spec: &ImageSpec) -> Vec<String> {
        let addrs = self.addrs.borrow();
        let uris = addrs.iter().flat_map(|(addr, tls)| {
            let (plain, secure) = (*tls != Tls::Required, *tls != Tls::None);
            let uri = |wanted: bool, tls: bool| wanted.then(|| nbd_uri(addr, spec, tls));
            [uri(plain, false), uri(secure, true)]
        });
        uris.flatten().collect()
    }

    fn connections(&self) -> usize {
        self.shared.stats.connection_count(None)
    }

    fn connections_of(&self, spec: &ImageSpec) -> usize {
        let name = spec.to_string();
        self.shared.stats.connection_count(Some(&name))
    }

    fn connections_by_export(&self) -> BTreeMap<String, usize> {
        self.shared.stats.connections().into_iter().fold(BTreeMap::new(), |mut counts, connection| {
            *counts.entry(connection.export).or_default() += 1;
            counts
        })
    }

    fn publish(&self, exported: &ExportedImage<'_>, device: &Rc<dyn BlockDevice>) -> Result<()> {
        let hosts = exported.hosts.iter().map(|host| host.parse().map_err(Failure::invalid)).collect::<Result<_>>()?;
        let offer = Offer { handle: DeviceHandle::new(device.clone()), hosts };
        self.shared.published.insert(exported.spec.to_string(), offer);
        Ok(())
    }

    fn unpublish(&self, spec: &ImageSpec) {
        self.shared.published.remove(&spec.to_string());
    }

    fn disconnect<'a>(&'a self, spec: &'a ImageSpec, cores: &'a [CoreHandle]) -> FrontFuture<'a, ()> {
        let name = spec.to_string();
        Box::pin(async move {
            let detached = name.clone();
            on_each_server(cores, &SERVER, move |server| {
                let name = detached.clone();
                async move { _ = server.detach(&name).await }
            })
            .await;
            self.shared.stats.forget(&name);
        })
    }
}

/// Returns the path of the socket for the kernel's client in a data directory.
pub fn kernel_socket_in(data: &Path) -> PathBuf {
    data.join("map.sock")
}

/// Returns the URI of an NBD export, as the NBD project defines it.
fn nbd_uri(addr: &Addr, spec: &ImageSpec, tls: bool) -> String {
    let scheme = if tls { "nbds" } else { "nbd" };
    let export = uri_encode(&spec.to_string(), true);
    match addr {
        // A wildcard address is reachable on the loopback address.
        Addr::Tcp(addr) if addr.ip().is_unspecified() => format!("{scheme}://localhost:{}/{export}", addr.port()),
        Addr::Tcp(addr) => format!("{scheme}://{addr}/{export}"),
        Addr::Unix(path) => {
            format!("{scheme}+unix:///{export}?socket={}", uri_encode(&path.to_string_lossy(), true))
        }
    }
}

/// NBD exports on one core.
struct NbdExports {
    published: Published<Offer>,
    /// Engine, on its own core only: requests there are not forwarded.
    engine: Option<Weak<Engine>>,
}

impl NbdExports {
    /// Opens the device of an offer, by the name under which it was found.
    fn device(&self, name: &str, offer: &Offer) -> Option<Rc<dyn BlockDevice>> {
        match &self.engine {
            Some(engine) => Some(Unnamed::new(engine.upgrade()?.exports.device(Front::Nbd, name)?)),
            None => Some(Unnamed::new(offer.handle.attach())),
        }
    }

    /// Finds an export by the name a host gives.  `disk` means `local/disk`, as everywhere; an empty name selects the
    /// only export that the host sees, if there is exactly one.
    fn find(&self, name: &str, host: &NbdHost) -> Option<(String, Offer)> {
        self.published.read(|published| {
            if name.is_empty() {
                let mut seen = published.iter().filter(|(_, offer)| offer.is_for(host));
                let (name, offer) = seen.next().filter(|_| seen.next().is_none())?;
                return Some((name.clone(), offer.clone()));
            }
            let name = name.parse::<ImageSpec>().ok()?.to_string();
            let offer = published.get(&name)?.clone();
            Some((name, offer))
        })
    }
}

impl forebay_nbd::ExportSource for NbdExports {
    fn list(&self, host: &NbdHost) -> Vec<ExportSummary> {
        let summary = |(name, _): (&String, &Offer)| ExportSummary { name: name.clone(), description: String::new() };
        self.published.read(|published| published.iter().filter(|(_, offer)| offer.is_for(host)).map(summary).collect())
    }

    fn open(&self, name: &str, host: &NbdHost) -> LocalFuture<forebay_block::Result<NbdExport>> {
        // The offer that is checked is the one that is opened, under the name by which connections are counted and
        // ended.
        let found = self.find(name, host);
        if found.as_ref().is_some_and(|(_, offer)| !offer.is_for(host)) {
            let error = Error::new(ErrorKind::Denied, "the host is not in the list of the export");
            return Box::pin(ready(Err(error)));
        }
        let export = found.and_then(|(name, offer)| Some(NbdExport::new(name.clone(), self.device(&name, &offer)?)));
        let missing = || Error::new(ErrorKind::NotFound, format!("no image is exported as '{name}'"));
        Box::pin(ready(export.ok_or_else(missing)))
    }
}

fn bind(addr: &Addr) -> Result<Listener> {
    Listener::bind(addr).map_err(|error| {
        Failure::io(error, format_args!("listening for NBD on {addr}")).hint("choose another address with --nbd")
    })
}

/// Starts the server of this core.
fn start_server(shared: &NbdShared, engine: Option<Weak<Engine>>, listeners: Vec<Listening<NbdListenerOptions>>) {
    let NbdShared { stats, access, published } = shared.clone();
    let exports = NbdExports { published, engine };
    let server = NbdServer::with_access(Rc::new(exports), NbdServerOptions::default(), stats, access);
    for (listener, options) in listeners {
        drop(spawn(server.clone().serve(listener, options)));
    }
    SERVER.set(Some(server));
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uris_are_what_clients_take() {
        let spec: ImageSpec = "local/disk1".parse().expect("a spec");
        for (addr, want) in [
            ("127.0.0.1:10809", "nbd://127.0.0.1:10809/local/disk1"),
            ("[::1]:10809", "nbd://[::1]:10809/local/disk1"),
            ("0.0.0.0:1", "nbd://localhost:1/local/disk1"),
            ("unix:/run/a b", "nbd+unix:///local/disk1?socket=/run/a%20b"),
        ] {
            let addr = addr.parse().expect("an address");
            assert_eq!(nbd_uri(&addr, &spec, false), want);
            assert_eq!(nbd_uri(&addr, &spec, true), want.replacen("nbd", "nbds", 1));
        }
    }
}
