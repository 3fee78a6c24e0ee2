//! virtio-scsi controllers: each is a socket, and a SCSI target whose units are the exports with that socket.
//!
//! 1. A controller exists as long as it has units, and afterwards until its front-ends are gone.
//! 2. The catalog and the targets say which units there are; each of them has its device in `devices`.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::sync::Arc;

use forebay_block::BlockDevice;
use forebay_reactor::cross::OneshotReceiver;
use forebay_scsi::inquiry::UnitIdentity;
use forebay_scsi::{LogicalUnits, ScsiNaming, ScsiTarget, ScsiTargetSpec, Unit, UnitCatalog, UnitDevices, UnitSpec};
use forebay_vhost::{VhostExport, VhostScsiTarget, VhostSocket, VhostVolume};

use super::VhostBinding;
use crate::engine::fronts::ExportedImage;
use crate::engine::fronts::spaces::PoolSpaces;
use crate::engine::identity::DataDirIdentity;
use crate::failure::{Failure, FailureKind, Result};

/// Devices of units, by name.
#[derive(Clone, Default)]
struct ControllerDevices(Rc<RefCell<BTreeMap<String, Rc<dyn BlockDevice>>>>);

impl UnitDevices for ControllerDevices {
    fn device(&self, unit: &Unit) -> Option<Rc<dyn BlockDevice>> {
        self.0.borrow().get(&unit.spec().name).cloned()
    }
}

/// Controller of a socket.
struct VhostController {
    target: ScsiTarget,
    socket: VhostSocket,
    queues: u16,
    /// Set once the server has the controller.
    served: bool,
}

impl VhostController {
    /// Returns whether its last unit was removed.
    fn is_unused(&self) -> bool {
        self.target.unit_count() == 0
    }

    fn names(&self) -> Vec<String> {
        self.target.units().into_iter().map(|unit| unit.name).collect()
    }
}

/// Unit that was removed from its controller.
struct RemovedUnit {
    path: PathBuf,
    /// Completes when no session uses the unit.
    gone: Option<OneshotReceiver<()>>,
}

/// Controllers by the path of their socket.
pub(super) struct VhostControllers {
    identity: DataDirIdentity,
    catalog: Arc<UnitCatalog>,
    devices: ControllerDevices,
    units: Rc<LogicalUnits>,
    controllers: RefCell<BTreeMap<PathBuf, VhostController>>,
    removed: RefCell<BTreeMap<String, RemovedUnit>>,
    /// Space of the pools of units.
    pub(super) spaces: Rc<PoolSpaces>,
}

impl VhostControllers {
    /// Creates a list without controllers.
    pub(super) fn new(identity: &DataDirIdentity, spaces: Rc<PoolSpaces>) -> Self {
        let devices = ControllerDevices::default();
        Self {
            identity: *identity,
            catalog: Arc::default(),
            units: Rc::new(LogicalUnits::new(Rc::new(devices.clone()))),
            devices,
            controllers: RefCell::default(),
            removed: RefCell::default(),
            spaces,
        }
    }

    /// Adds a unit.
    ///
    /// # Errors
    /// If the number is taken, or the controller of the socket is just ending.
    pub(super) fn add(
        &self,
        exported: &ExportedImage<'_>,
        binding: &VhostBinding,
        device: &Rc<dyn BlockDevice>,
    ) -> Result<()> {
        let (name, path) = (exported.spec.to_string(), binding.socket.path());
        let lun = exported.unit.ok_or_else(|| Failure::invalid("a unit of a vhost controller without a number"))?;
        let mut controllers = self.controllers.borrow_mut();
        let known = controllers.get(path);
        if known.is_some_and(VhostController::is_unused) {
            let what = format!("the controller of the socket {} is just ending", path.display());
            return Err(Failure::new(FailureKind::Busy, what).hint("try again"));
        }
        let target = match known {
            Some(controller) => controller.target.clone(),
            None => self.target(path),
        };
        let taken = u16::try_from(lun).ok().and_then(|lun| target.unit_at(lun));
        if let Some(owner) = taken.filter(|unit| unit.spec().name != name) {
            let what = format!("unit {lun} at the socket {} is {}'s already", path.display(), owner.spec().name);
            return Err(Failure::new(FailureKind::Exists, what));
        }
        // Inserted first: a guest that learns of the unit finds its device.
        self.devices.0.borrow_mut().insert(name.clone(), device.clone());
        let spec = UnitSpec {
            name: name.clone(),
            identity: UnitIdentity { uuid: *exported.identity, revision: env!("CARGO_PKG_VERSION").into() },
            read_only: exported.read_only,
            rotational: false,
            space: self.spaces.of(&exported.spec.pool),
            initiators: Vec::new(),
        };
        if let Err(error) = target.add(lun, spec) {
            self.devices.0.borrow_mut().remove(&name);
            return Err(Failure::invalid(error.to_string()));
        }
        let (socket, queues) = (binding.socket.clone(), binding.queues);
        controllers.entry(path.clone()).or_insert(VhostController { target, socket, queues, served: false });
        Ok(())
    }

    fn target(&self, path: &Path) -> ScsiTarget {
        let path = path.to_string_lossy();
        let naming = ScsiNaming::Naa(ScsiNaming::naa(&self.identity.named(&format!("vhost target {path}"))));
        ScsiTarget::new(ScsiTargetSpec { name: path.into(), naming, ports: None }, self.catalog.clone())
    }

    fn export(&self, path: &Path, controller: &VhostController) -> VhostExport {
        let guest = self.identity.named(&format!("vhost initiator {}", path.display()));
        let target = VhostScsiTarget {
            target: controller.target.clone(),
            units: self.units.clone(),
            initiator: ScsiNaming::naa(&guest),
        };
        VhostExport { name: server_name(path), volume: VhostVolume::Scsi(target), queues: controller.queues }
    }

    /// Returns the paths of controllers that are not served yet.
    pub(super) fn unserved(&self) -> Vec<PathBuf> {
        let controllers = self.controllers.borrow();
        controllers.iter().filter(|(_, controller)| !controller.served).map(|(path, _)| path.clone()).collect()
    }

    /// Returns the export of a controller that is not served yet, with its socket, and marks it as served.
    pub(super) fn begin(&self, path: &Path) -> Option<(VhostExport, VhostSocket)> {
        let mut controllers = self.controllers.borrow_mut();
        let controller = controllers.get_mut(path).filter(|controller| !controller.served)?;
        controller.served = true;
        Some((self.export(path, controller), controller.socket.clone()))
    }

    /// Returns the names of a controller's units.
    pub(super) fn names(&self, path: &Path) -> Vec<String> {
        let controllers = self.controllers.borrow();
        controllers.get(path).map(VhostController::names).unwrap_or_default()
    }

    /// Removes a controller that cannot be served, with its units.
    pub(super) fn lose(&self, path: &Path) {
        let Some(controller) = self.controllers.borrow_mut().remove(path) else { return };
        let names = controller.names();
        drop(controller.target.remove_all());
        names.iter().for_each(|name| drop(self.devices.0.borrow_mut().remove(name)));
    }

    /// Removes a unit, if there is one of that name.  Returns whether there was, and the socket if that was its last one.
    pub(super) fn remove(&self, name: &str) -> Option<Option<PathBuf>> {
        let (path, lun) = self.place(name)?;
        let controllers = self.controllers.borrow();
        let controller = controllers.get(&path)?;
        let gone = controller.target.remove(lun);
        let device = self.devices.0.borrow_mut().remove(name);
        drop(device);
        let last_of = controller.is_unused().then(|| path.clone());
        self.removed.borrow_mut().insert(name.to_owned(), RemovedUnit { path, gone });
        Some(last_of)
    }

    /// Waits until no session uses a removed unit, and calls `end` with the socket of a controller that has no other.
    pub(super) async fn end(&self, name: &str, end: impl AsyncFnOnce(&Path)) {
        let Some(RemovedUnit { path, gone }) = self.removed.borrow_mut().remove(name) else { return };
        if let Some(gone) = gone {
            // Sessions keep the other units; they have released this one.
            let _ = gone.await;
        }
        if self.controllers.borrow().get(&path).is_some_and(VhostController::is_unused)
            && !self.removed.borrow().values().any(|other| other.path == path)
        {
            end(&path).await;
            self.controllers.borrow_mut().remove(&path);
        }
    }

    /// Forgets everything.
    pub(super) fn clear(&self) {
        self.spaces.stop();
        let paths: Vec<PathBuf> = self.controllers.borrow().keys().cloned().collect();
        paths.iter().for_each(|path| self.lose(path));
    }

    /// Returns the socket and the number of a unit.
    pub(super) fn place(&self, name: &str) -> Option<(PathBuf, u16)> {
        let unit = self.catalog.unit_by_name(name)?;
        Some((unit.target().into(), unit.lun()))
    }

    /// Returns the number of controllers.
    pub(super) fn count(&self) -> usize {
        self.controllers.borrow().len()
    }

    /// Returns the number of sessions that use a unit.
    pub(super) fn sessions(&self, name: &str) -> usize {
        self.catalog.unit_by_name(name).map_or(0, |unit| unit.sessions())
    }

    /// Returns the numbers of sessions that use units, by name.
    pub(super) fn sessions_by_unit(&self) -> BTreeMap<String, usize> {
        let controllers = self.controllers.borrow();
        let units = controllers.values().flat_map(|controller| controller.target.units());
        units.map(|unit| (unit.name, unit.sessions)).collect()
    }
}

/// Returns the name of a controller at the server: no image has one that begins with a slash.
pub(super) fn server_name(path: &Path) -> String {
    path.to_string_lossy().into_owned()
}
