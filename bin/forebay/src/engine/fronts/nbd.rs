//! NBD: a server on each core, exports by the image's name.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::future::ready;
use std::io;
use std::rc::{Rc, Weak};

use forebay_block::{BlockDevice, DeviceHandle, Error, ErrorKind, LocalFuture, Unnamed};
use forebay_nbd::{Export, ExportSummary, Options, Server, Stats};
use forebay_reactor::{Addr, CoreHandle, Listener, SharedListener, spawn};

use super::published::Published;
use super::{Engine, Exported, HostFront, Served, on_each_core};
use crate::api::Front;
use crate::config::Config;
use crate::failure::{Failure, Result};
use crate::spec::{ImageSpec, uri_encode};

thread_local! {
    /// This core's server.
    static SERVER: RefCell<Option<Rc<Server>>> = const { RefCell::new(None) };
}

/// The NBD front.
pub struct NbdFront {
    listeners: RefCell<Vec<Listener>>,
    addrs: RefCell<Vec<Addr>>,
    stats: Stats,
    published: Published<DeviceHandle>,
}

impl NbdFront {
    /// Nothing listens yet.
    pub fn new() -> Self {
        Self {
            listeners: RefCell::default(),
            addrs: RefCell::default(),
            stats: Stats::new(),
            published: Published::default(),
        }
    }

    /// What the servers count.
    pub fn stats(&self) -> &Stats {
        &self.stats
    }
}

impl HostFront for NbdFront {
    fn listen(&self, config: &Config) -> Result<()> {
        for addr in &config.nbd {
            let listener = bind(addr)?;
            self.addrs.borrow_mut().push(listener.local_addr().clone());
            self.listeners.borrow_mut().push(listener);
        }
        Ok(())
    }

    fn serve<'a>(&'a self, engine: &'a Rc<Engine>, cores: &'a [CoreHandle]) -> Served<'a, Result<()>> {
        Box::pin(async move {
            let listeners = self.listeners.take();
            for core in cores.iter().filter(|core| !core.is_current()) {
                let shared = listeners.iter().map(Listener::share).collect::<io::Result<Vec<_>>>();
                let shared = shared.map_err(|error| Failure::io(error, "sharing the listening sockets"))?;
                serve_on(core, self.published.clone(), self.stats.clone(), shared).await?;
            }
            let exports = NbdExports { published: self.published.clone(), engine: Some(Rc::downgrade(engine)) };
            serve(exports, self.stats.clone(), listeners);
            Ok(())
        })
    }

    fn stop<'a>(&'a self, cores: &'a [CoreHandle]) -> Served<'a, ()> {
        Box::pin(async move {
            on_each_core(cores, || async {
                if let Some(server) = SERVER.with_borrow(Clone::clone) {
                    server.stop().await;
                }
            })
            .await;
            self.published.clear();
        })
    }

    fn addrs(&self) -> Vec<Addr> {
        self.addrs.borrow().clone()
    }

    fn uris(&self, spec: &ImageSpec) -> Vec<String> {
        self.addrs.borrow().iter().map(|addr| nbd_uri(addr, spec)).collect()
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

    fn publish(&self, exported: &Exported<'_>, device: &Rc<dyn BlockDevice>) -> Result<()> {
        self.published.insert(exported.spec.to_string(), DeviceHandle::new(device.clone()));
        Ok(())
    }

    fn unpublish(&self, spec: &ImageSpec) {
        self.published.remove(&spec.to_string());
    }

    fn disconnect<'a>(&'a self, spec: &'a ImageSpec, cores: &'a [CoreHandle]) -> Served<'a, ()> {
        let name = spec.to_string();
        Box::pin(async move {
            let detached = name.clone();
            on_each_core(cores, move || {
                let name = detached.clone();
                async move {
                    if let Some(server) = SERVER.with_borrow(Clone::clone) {
                        server.detach(&name).await;
                    }
                }
            })
            .await;
            self.stats.forget(&name);
        })
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
    published: Published<DeviceHandle>,
    /// On the engine's own core requests take no detour.
    engine: Option<Weak<Engine>>,
}

impl NbdExports {
    fn device(&self, name: &str) -> Option<Rc<dyn BlockDevice>> {
        match &self.engine {
            Some(engine) => Some(Unnamed::new(engine.upgrade()?.exports.device(Front::Nbd, name)?)),
            None => {
                let handle = self.published.read(|published| published.get(name).cloned())?;
                Some(Unnamed::new(handle.attach()))
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
    SERVER.set(Some(server));
}

/// Starts the server of another core.
async fn serve_on(
    core: &CoreHandle,
    published: Published<DeviceHandle>,
    stats: Stats,
    shared: Vec<SharedListener>,
) -> Result<()> {
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
