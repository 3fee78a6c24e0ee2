//! iSCSI: one target, whose units are the exports.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::io;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::time::Duration;

use forebay_block::{BlockDevice, DeviceHandle};
use forebay_iscsi::scsi::inquiry::Identity as UnitIdentity;
use forebay_iscsi::unit::Unit;
use forebay_iscsi::{Devices, Gatekeeping, Limits, Options, Server, Site, Space, UnitSpec};
use forebay_reactor::{Addr, CoreHandle, JoinHandle, Listener, SharedListener, sleep, spawn};

use super::published::Published;
use super::{Engine, Exported, HostFront, Served, on_each_core};
use crate::api::Front;
use crate::config::{Config, IscsiTarget};
use crate::engine::identity::{Identity, format_uuid};
use crate::failure::{Failure, Result};
use crate::spec::ImageSpec;

/// How often it is looked how full the pools are.
const SPACE_LOOK: Duration = Duration::from_secs(2);

thread_local! {
    /// This core's server.
    static SERVER: RefCell<Option<Rc<Server>>> = const { RefCell::new(None) };
}

/// The iSCSI front.
pub struct IscsiFront {
    site: Site,
    settings: IscsiTarget,
    listeners: RefCell<Vec<Listener>>,
    addrs: RefCell<Vec<Addr>>,
    published: Published<DeviceHandle>,
    /// Units by image.
    luns: RefCell<BTreeMap<String, u16>>,
    /// Units that are being taken away, and what tells when nobody uses them any more.
    leaving: RefCell<BTreeMap<String, forebay_reactor::cross::Answered<()>>>,
    /// Space by pool.
    spaces: RefCell<BTreeMap<String, Arc<Space>>>,
    watching: RefCell<Option<JoinHandle<()>>>,
}

impl IscsiFront {
    /// The target of a data directory; nothing listens yet.
    pub fn new(identity: &Identity, settings: &IscsiTarget) -> Self {
        let name = || format!("iqn.2026-11.io.forebay:{}", format_uuid(&identity.uuid));
        let limits = Limits {
            sessions_max: settings.sessions_max,
            sessions_per_initiator: settings.sessions_per_host,
            memory_max: settings.memory_max,
        };
        let site = Site::new(settings.name.clone().unwrap_or_else(name), limits);
        let this = Self {
            site,
            settings: settings.clone(),
            listeners: RefCell::default(),
            addrs: RefCell::default(),
            published: Published::default(),
            luns: RefCell::default(),
            leaving: RefCell::default(),
            spaces: RefCell::default(),
            watching: RefCell::default(),
        };
        this.admit(settings);
        this
    }

    /// Says who may log in from now on, and what is proved; who is logged in stays.
    pub fn admit(&self, settings: &IscsiTarget) {
        self.site.set_gatekeeping(Gatekeeping {
            initiators: settings.initiators.clone(),
            chap: settings.chap.clone(),
            discovery_chap: settings.discovery_chap.clone(),
        });
    }

    /// The target.
    pub fn site(&self) -> &Site {
        &self.site
    }

    fn space(&self, pool: &str) -> Arc<Space> {
        self.spaces.borrow_mut().entry(pool.to_owned()).or_default().clone()
    }

    /// Keeps what hosts are told of the pools' space up to date.
    async fn watch_space(engine: Weak<Engine>) {
        loop {
            let Some(engine) = engine.upgrade() else { return };
            let front = engine.fronts.iscsi();
            let percent = front.settings.threshold_percent;
            let spaces: Vec<(String, Arc<Space>)> =
                front.spaces.borrow().iter().map(|(pool, space)| (pool.clone(), space.clone())).collect();
            for (pool, space) in spaces {
                let Ok(backend) = engine.pool(&pool).await else { continue };
                match backend.usage().await {
                    Ok(usage) => space.update(usage.used, usage.available, usage.capacity / 100 * u64::from(percent)),
                    Err(error) => tracing::debug!(pool, %error, "asking a pool for its space failed"),
                }
            }
            drop(engine);
            sleep(SPACE_LOOK).await;
        }
    }
}

fn options(settings: &IscsiTarget) -> Options {
    let mut options = Options { connections_max: settings.sessions_max, ..Options::default() };
    options.offer.digests = settings.digests;
    options
}

impl HostFront for IscsiFront {
    fn listen(&self, config: &Config) -> Result<()> {
        for addr in &config.iscsi {
            let listener = bind(addr, self.settings.chap.is_some())?;
            self.addrs.borrow_mut().push(listener.local_addr().clone());
            self.listeners.borrow_mut().push(listener);
        }
        let advertised: Vec<Addr> = self.settings.advertise.iter().copied().map(Addr::Tcp).collect();
        self.site.set_portals(if advertised.is_empty() { self.addrs() } else { advertised });
        Ok(())
    }

    fn serve<'a>(&'a self, engine: &'a Rc<Engine>, cores: &'a [CoreHandle]) -> Served<'a, Result<()>> {
        Box::pin(async move {
            let listeners = self.listeners.take();
            if listeners.is_empty() {
                return Ok(());
            }
            for core in cores.iter().filter(|core| !core.is_current()) {
                let shared = listeners.iter().map(Listener::share).collect::<io::Result<Vec<_>>>();
                let shared = shared.map_err(|error| Failure::io(error, "sharing the listening sockets"))?;
                serve_on(core, self.site.clone(), self.published.clone(), options(&self.settings), shared).await?;
            }
            let devices = Local { engine: Rc::downgrade(engine) };
            serve(self.site.clone(), Rc::new(devices), options(&self.settings), listeners);
            *self.watching.borrow_mut() = Some(spawn(Self::watch_space(Rc::downgrade(engine))));
            Ok(())
        })
    }

    fn stop<'a>(&'a self, cores: &'a [CoreHandle]) -> Served<'a, ()> {
        Box::pin(async move {
            if let Some(watching) = self.watching.take() {
                watching.abort();
            }
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
        let luns = self.luns.borrow();
        let Some(lun) = luns.get(&spec.to_string()) else { return Vec::new() };
        self.addrs.borrow().iter().filter_map(|addr| uri(addr, self.site.target(), *lun)).collect()
    }

    fn connections(&self) -> usize {
        self.site.session_count()
    }

    fn connections_of(&self, spec: &ImageSpec) -> usize {
        let name = spec.to_string();
        self.site.units().into_iter().find(|unit| unit.name == name).map_or(0, |unit| unit.sessions)
    }

    fn connections_by_export(&self) -> BTreeMap<String, usize> {
        self.site.units().into_iter().map(|unit| (unit.name, unit.sessions)).collect()
    }

    fn publish(&self, exported: &Exported<'_>, device: &Rc<dyn BlockDevice>) -> Result<()> {
        let name = exported.spec.to_string();
        let lun = exported.unit.ok_or_else(|| Failure::invalid("an export over iscsi without a LUN"))?;
        // Who is told of the unit finds its device.
        self.published.insert(name.clone(), DeviceHandle::new(device.clone()));
        let spec = UnitSpec {
            name: name.clone(),
            identity: UnitIdentity { uuid: *exported.identity, revision: env!("CARGO_PKG_VERSION").into() },
            read_only: exported.read_only,
            rotational: false,
            space: self.space(&exported.spec.pool),
            initiators: exported.hosts.to_vec(),
        };
        match self.site.add(lun, spec) {
            Ok(unit) => {
                self.luns.borrow_mut().insert(name, unit.lun());
                Ok(())
            }
            Err(error) => {
                self.published.remove(&name);
                Err(Failure::invalid(error.to_string()))
            }
        }
    }

    fn unpublish(&self, spec: &ImageSpec) {
        let name = spec.to_string();
        let Some(lun) = self.luns.borrow_mut().remove(&name) else { return };
        if let Some(gone) = self.site.remove(lun) {
            self.leaving.borrow_mut().insert(name.clone(), gone);
        }
        self.published.remove(&name);
    }

    fn disconnect<'a>(&'a self, spec: &'a ImageSpec, _cores: &'a [CoreHandle]) -> Served<'a, ()> {
        let gone = self.leaving.borrow_mut().remove(&spec.to_string());
        Box::pin(async move {
            if let Some(gone) = gone {
                // Sessions go on with the other units; of this one they have let go.
                let _ = gone.await;
            }
        })
    }
}

/// The URI of a unit, as libiscsi defines it.
fn uri(addr: &Addr, target: &str, lun: u16) -> Option<String> {
    match addr {
        // Who listens everywhere is reached here, too.
        Addr::Tcp(addr) if addr.ip().is_unspecified() => {
            Some(format!("iscsi://127.0.0.1:{}/{target}/{lun}", addr.port()))
        }
        Addr::Tcp(addr) => Some(format!("iscsi://{addr}/{target}/{lun}")),
        Addr::Unix(_) => None,
    }
}

/// The devices, on the engine's core: requests take no detour.
struct Local {
    engine: Weak<Engine>,
}

impl Devices for Local {
    fn device(&self, unit: &Unit) -> Option<Rc<dyn BlockDevice>> {
        self.engine.upgrade()?.exports.device(Front::Iscsi, &unit.spec().name)
    }
}

/// The devices, on another core.
struct Remote {
    published: Published<DeviceHandle>,
}

impl Devices for Remote {
    fn device(&self, unit: &Unit) -> Option<Rc<dyn BlockDevice>> {
        let handle = self.published.read(|published| published.get(&unit.spec().name).cloned())?;
        Some(handle.attach())
    }
}

fn bind(addr: &Addr, asks: bool) -> Result<Listener> {
    if !addr.is_local() && !asks {
        tracing::warn!(%addr, "iSCSI is served beyond this machine, without CHAP: whoever reaches it can write");
    }
    Listener::bind(addr).map_err(|error| {
        Failure::io(error, format_args!("listening for iSCSI on {addr}")).hint("choose another address with --iscsi")
    })
}

/// Starts this core's server.
fn serve(site: Site, devices: Rc<dyn Devices>, options: Options, listeners: Vec<Listener>) {
    let server = Server::new(site, devices, options);
    for listener in listeners {
        drop(spawn(server.clone().serve(listener)));
    }
    SERVER.set(Some(server));
}

/// Starts the server of another core.
async fn serve_on(
    core: &CoreHandle,
    site: Site,
    published: Published<DeviceHandle>,
    options: Options,
    shared: Vec<SharedListener>,
) -> Result<()> {
    let started = core.run(move || async move {
        let listeners = shared.into_iter().map(SharedListener::attach).collect::<io::Result<Vec<_>>>()?;
        serve(site, Rc::new(Remote { published }), options, listeners);
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
        let uri = |addr: &str, lun| uri(&addr.parse().expect("an address"), "iqn.x:y", lun);
        assert_eq!(uri("10.0.0.1:3260", 3).as_deref(), Some("iscsi://10.0.0.1:3260/iqn.x:y/3"));
        assert_eq!(uri("[::1]:3260", 0).as_deref(), Some("iscsi://[::1]:3260/iqn.x:y/0"));
        assert_eq!(uri("0.0.0.0:1", 0).as_deref(), Some("iscsi://127.0.0.1:1/iqn.x:y/0"));
        assert_eq!(uri("unix:/x", 0), None);
    }
}
