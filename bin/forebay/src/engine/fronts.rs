//! The fronts: what listens for hosts, and on which cores.
//!
//! Each core has an NBD server of its own on the shared listening sockets, so a connection stays on the core that
//! took it.  Volumes live on the engine's core; the other cores reach them through device handles, which the engine
//! publishes.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::future::ready;
use std::io;
use std::rc::{Rc, Weak};
use std::sync::{Arc, PoisonError, RwLock};

use forebay_block::{BlockDevice, DeviceHandle, Error, ErrorKind, LocalFuture};
use forebay_nbd::{Export, ExportSummary, Options, Server, Stats};
use forebay_reactor::{Addr, CoreHandle, Listener, SharedListener, spawn};

use super::Engine;
use crate::api::Front;
use crate::failure::{Failure, Result};
use crate::spec::{ImageSpec, uri_encode};

thread_local! {
    /// This core's NBD server.
    static NBD: RefCell<Option<Rc<Server>>> = const { RefCell::new(None) };
}

/// What hosts may open over NBD, as other cores see it, by export name.
#[derive(Clone, Default)]
struct Published(Arc<RwLock<BTreeMap<String, DeviceHandle>>>);

impl Published {
    fn read<T>(&self, look: impl FnOnce(&BTreeMap<String, DeviceHandle>) -> T) -> T {
        look(&self.0.read().unwrap_or_else(PoisonError::into_inner))
    }

    fn write<T>(&self, change: impl FnOnce(&mut BTreeMap<String, DeviceHandle>) -> T) -> T {
        change(&mut self.0.write().unwrap_or_else(PoisonError::into_inner))
    }
}

/// What listens for hosts.
pub struct Fronts {
    nbd: RefCell<Vec<Addr>>,
    stats: Stats,
    published: Published,
    serving: Cell<bool>,
}

impl Fronts {
    /// Nothing listens yet.
    pub fn new() -> Self {
        Self {
            nbd: RefCell::default(),
            stats: Stats::new(),
            published: Published::default(),
            serving: Cell::new(false),
        }
    }

    /// Hosts can connect.
    pub fn is_serving(&self) -> bool {
        self.serving.get()
    }

    /// Where NBD is served.
    pub fn nbd_addrs(&self) -> Vec<Addr> {
        self.nbd.borrow().clone()
    }

    /// What the NBD servers count.
    pub fn nbd_stats(&self) -> &Stats {
        &self.stats
    }

    /// Connections to an export.
    pub fn connections_of(&self, front: Front, spec: &ImageSpec) -> usize {
        let name = spec.to_string();
        match front {
            Front::Nbd => self.stats.connections().iter().filter(|connection| connection.export == name).count(),
        }
    }

    /// Connections to all exports.
    pub fn connections(&self) -> usize {
        self.stats.connections().len()
    }

    /// What a client uses to reach an export, through each address.
    pub fn uris(&self, front: Front, spec: &ImageSpec) -> Vec<String> {
        match front {
            Front::Nbd => self.nbd.borrow().iter().map(|addr| nbd_uri(addr, spec)).collect(),
        }
    }
}

/// The URI of an NBD export, as the NBD project defines it.
fn nbd_uri(addr: &Addr, spec: &ImageSpec) -> String {
    let export = uri_encode(&spec.to_string(), true);
    match addr {
        // Who listens everywhere is reached here, too.
        Addr::Tcp(addr) if addr.ip().is_unspecified() => format!("nbd://localhost:{}/{export}", addr.port()),
        Addr::Tcp(addr) => format!("nbd://{addr}/{export}"),
        Addr::Unix(path) => {
            format!("nbd+unix:///{export}?socket={}", uri_encode(&path.to_string_lossy(), true))
        }
    }
}

/// The exports on one core.
struct NbdExports {
    published: Published,
    /// On the engine's own core requests take no detour.
    engine: Option<Weak<Engine>>,
}

impl NbdExports {
    fn device(&self, name: &str) -> Option<Rc<dyn BlockDevice>> {
        match &self.engine {
            Some(engine) => engine.upgrade()?.exports.device(Front::Nbd, name),
            None => {
                let handle = self.published.read(|published| published.get(name).cloned())?;
                Some(handle.attach())
            }
        }
    }
}

impl forebay_nbd::Exports for NbdExports {
    fn list(&self) -> Vec<ExportSummary> {
        let summary = |name: &String| ExportSummary { name: name.clone(), description: String::new() };
        self.published.read(|published| published.keys().map(summary).collect())
    }

    fn open(&self, name: &str) -> LocalFuture<forebay_block::Result<Export>> {
        // No name means the only export, if there is only one.
        let only = |published: &BTreeMap<String, DeviceHandle>| match published.len() {
            1 => published.keys().next().cloned(),
            _ => None,
        };
        let found = match name {
            "" => self.published.read(only),
            name => Some(name.to_owned()),
        };
        let export = found.and_then(|name| Some(Export::new(name.clone(), self.device(&name)?)));
        let missing = || Error::new(ErrorKind::NotFound, format!("no image is exported as '{name}'"));
        Box::pin(ready(export.ok_or_else(missing)))
    }
}

fn bind(addr: &Addr) -> Result<Listener> {
    if !addr.is_local() {
        tracing::warn!(%addr, "NBD is served beyond this machine, without a password: whoever reaches it can write");
    }
    Listener::bind(addr).map_err(|error| {
        Failure::io(error, format_args!("listening for NBD on {addr}")).hint("choose another address with --nbd")
    })
}

/// Starts this core's server.
fn serve(exports: NbdExports, stats: Stats, listeners: Vec<Listener>) {
    let server = Server::new(Rc::new(exports), Options::default(), stats);
    for listener in listeners {
        drop(spawn(server.clone().serve(listener)));
    }
    NBD.set(Some(server));
}

/// Starts the server of another core.
async fn serve_on(core: &CoreHandle, published: Published, stats: Stats, shared: Vec<SharedListener>) -> Result<()> {
    let started = core.run(move || async move {
        let listeners = shared.into_iter().map(SharedListener::attach).collect::<io::Result<Vec<_>>>()?;
        serve(NbdExports { published, engine: None }, stats, listeners);
        Ok(())
    });
    match started.await {
        Ok(started) => started.map_err(|error| Failure::io(error, "listening on another core")),
        Err(gone) => Err(Failure::failed(gone.to_string())),
    }
}

impl Engine {
    /// Opens what was exported before, and listens for hosts.
    pub async fn start_fronts(self: &Rc<Self>) -> Result<()> {
        let Some(daemon) = &self.options.daemon else { return Ok(()) };
        self.restore_exports().await;
        let mut listeners = Vec::new();
        for addr in &daemon.config.nbd {
            let listener = bind(addr)?;
            self.fronts.nbd.borrow_mut().push(listener.local_addr().clone());
            listeners.push(listener);
        }
        // From here on there is something to stop.
        self.fronts.serving.set(true);
        let (published, stats) = (&self.fronts.published, &self.fronts.stats);
        for core in daemon.cores.iter().filter(|core| !core.is_current()) {
            let shared = listeners.iter().map(Listener::share).collect::<io::Result<Vec<_>>>();
            let shared = shared.map_err(|error| Failure::io(error, "sharing the listening sockets"))?;
            serve_on(core, published.clone(), stats.clone(), shared).await?;
        }
        let engine = Some(Rc::downgrade(self));
        serve(NbdExports { published: published.clone(), engine }, stats.clone(), listeners);
        Ok(())
    }

    /// Lets hosts open a device.
    pub fn publish(&self, front: Front, spec: &ImageSpec, device: &Rc<dyn BlockDevice>) {
        match front {
            Front::Nbd => {
                let handle = DeviceHandle::new(device.clone());
                self.fronts.published.write(|published| published.insert(spec.to_string(), handle));
            }
        }
    }

    /// Lets hosts open a device no more; those who have it open keep it.
    pub fn unpublish(&self, front: Front, spec: &ImageSpec) {
        match front {
            Front::Nbd => {
                // The handle is dropped after the lock is given back.
                drop(self.fronts.published.write(|published| published.remove(&spec.to_string())));
            }
        }
    }

    /// Ends the connections to an export, their requests in flight first.
    pub async fn disconnect(&self, front: Front, spec: &ImageSpec) {
        let name = spec.to_string();
        match front {
            Front::Nbd => {
                self.on_each_server(move |server| {
                    let name = name.clone();
                    async move {
                        server.detach(&name).await;
                    }
                })
                .await;
            }
        }
        self.fronts.stats.forget(&spec.to_string());
    }

    /// Takes no more hosts, and ends the connections, their requests in flight first.
    pub async fn stop_fronts(&self) {
        if !self.fronts.serving.replace(false) {
            return;
        }
        self.on_each_server(|server| async move { server.stop().await }).await;
        drop(self.fronts.published.write(std::mem::take));
        for addr in self.fronts.nbd.take() {
            if let Addr::Unix(path) = addr {
                // A path that is left would be replaced at the next start.
                let _ = forebay_reactor::fs::remove_file(path);
            }
        }
    }

    /// Does something with each core's NBD server, at the same time, and waits for all.
    async fn on_each_server<F, Fut>(&self, work: F)
    where
        F: Fn(Rc<Server>) -> Fut + Clone + Send + 'static,
        Fut: Future<Output = ()> + 'static,
    {
        let cores = self.options.daemon.iter().flat_map(|daemon| &daemon.cores);
        let started = cores.map(|core| {
            let work = work.clone();
            core.run(move || async move {
                if let Some(server) = NBD.with_borrow(Clone::clone) {
                    work(server).await;
                }
            })
        });
        for running in started.collect::<Vec<_>>() {
            // A core that is gone has no connections left.
            let _ = running.await;
        }
    }
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
            assert_eq!(nbd_uri(&addr.parse().expect("an address"), &spec), want);
        }
    }
}
