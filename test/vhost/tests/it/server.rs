//! Forebay's server in this process, on volumes in memory, as the device under test.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::rc::Rc;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, TryRecvError, channel};
use std::thread::JoinHandle;
use std::time::Duration;

use forebay_block::BlockDevice;
use forebay_load::model::Model;
use forebay_reactor::cores::{Cores, CoresOptions};
use forebay_reactor::{CoreHandle, sleep};
use forebay_scsi::inquiry::UnitIdentity;
use forebay_scsi::{
    LogicalUnits, PoolSpace, ScsiNaming, ScsiTarget, ScsiTargetSpec, Unit, UnitCatalog, UnitDevices, UnitSpec,
};
use forebay_vhost::{VhostExport, VhostScsiTarget, VhostServer, VhostSocket, VhostStats, VhostVolume};
use forebay_vhost_host::DeviceUnderTest;
use tempfile::TempDir;

use crate::fenced::{Fence, FencedVolume};

/// Bytes of a device.
pub const SIZE: usize = 64 << 20;

/// Order to the thread of the server.
enum ServerOrder {
    /// Requests to the first volume wait from now on, or go on.
    Hold(bool),
    /// The first volume has another size.
    Resize(usize),
    /// The first export ends.
    Detach,
    /// The first volume is exported again.
    Attach,
    /// The target has another unit.
    AddUnit(u16),
    /// The target has a unit no more.
    RemoveUnit(u16),
    /// The thread ends at once, and leaves everything as a killed process does.
    Crash,
    /// The server ends in an orderly way.
    Stop,
}

/// Returns a server whose queues are all on the core of its volumes, and one whose queues are on three cores.
pub fn servers(queues: u16) -> impl Iterator<Item = OurServer> {
    [1, 3].into_iter().map(move |cores| OurServer::start_on(queues, cores))
}

/// Server with two devices; it stops when dropped.
pub struct OurServer {
    folder: TempDir,
    queues: u16,
    /// Number of cores for queues.
    cores: usize,
    connect: bool,
    /// Number of units, if the devices are virtio-scsi ones.
    units: Option<u16>,
    pub stats: VhostStats,
    /// Fence before the volumes of virtio-blk devices.
    pub fence: Arc<Fence>,
    orders: Sender<(ServerOrder, Sender<()>)>,
    handles: Vec<CoreHandle>,
    thread: Option<JoinHandle<()>>,
}

impl OurServer {
    /// Starts the server with queues on several cores.  The first queue of device 1 is on the core of the volumes, that of
    /// device 0 on the next one.
    fn start_on(queues: u16, cores: usize) -> Self {
        Self::start_in(tempfile::tempdir().expect("a folder"), queues, cores, false, None)
    }

    /// Starts a server with two virtio-scsi devices, which are two initiators to the same units: 0 and up.
    pub fn start_scsi(queues: u16, units: u16) -> Self {
        Self::start_in(tempfile::tempdir().expect("a folder"), queues, 2, false, Some(units))
    }

    /// Adds a unit to the target.
    pub fn add_unit(&self, lun: u16) {
        self.order(ServerOrder::AddUnit(lun));
    }

    /// Removes a unit of the target.
    pub fn remove_unit(&self, lun: u16) {
        self.order(ServerOrder::RemoveUnit(lun));
    }

    /// Starts a server that connects to the socket of its first device.
    pub fn connecting(folder: TempDir) -> Self {
        Self::start_in(folder, 1, 1, true, None)
    }

    fn start_in(folder: TempDir, queues: u16, cores: usize, connect: bool, units: Option<u16>) -> Self {
        let (orders, taken) = channel();
        let (stats, fence) = (VhostStats::new(), Arc::default());
        let mut this =
            Self { folder, queues, cores, connect, units, stats, fence, orders, handles: Vec::new(), thread: None };
        this.launch(taken);
        this
    }

    fn launch(&mut self, orders: Receiver<(ServerOrder, Sender<()>)>) {
        let setup = ServerSetup {
            sockets: [self.device(0), self.device(1)],
            queues: self.queues,
            connect: self.connect,
            units: self.units,
            stats: self.stats.clone(),
            fence: self.fence.clone(),
        };
        // As the daemon does: queues poll their rings before they sleep.
        let options = CoresOptions {
            count: self.cores,
            pin: false,
            linger: Duration::from_micros(50),
            ..CoresOptions::default()
        };
        let ((up, came_up), (told, handles)) = (channel(), channel());
        self.thread = Some(std::thread::spawn(move || {
            let cores = Cores::start(&options).expect("cores");
            let (all, (ended, has_ended)) = (cores.handles(), channel());
            told.send(all.clone()).expect("the test waits");
            drop(cores.handle(0).run(move || setup.serve(all, up, orders, ended)));
            // A core that panics is reported below.
            let _ = has_ended.recv();
            cores.stop().expect("no core panics");
        }));
        self.handles = handles.recv().expect("cores");
        came_up.recv().expect("the server comes up");
    }

    /// Returns the socket of a device.
    pub fn device(&self, device: usize) -> PathBuf {
        self.folder.path().join(format!("{device}.sock"))
    }

    fn order(&self, order: ServerOrder) {
        let (done, is_done) = channel();
        self.orders.send((order, done)).expect("the server runs");
        // A server that crashes does not reply.
        let _ = is_done.recv();
    }

    /// Lets requests to the first volume wait from now on, or go on.
    pub fn hold(&self, hold: bool) {
        self.order(ServerOrder::Hold(hold));
    }

    /// Blocks a core until the returned value is dropped.
    pub fn block_core(&self, core: usize) -> Sender<()> {
        let ((release, released), (blocked, is_blocked)) = (channel::<()>(), channel());
        drop(self.handles[core].run(async move || {
            blocked.send(()).expect("the test waits");
            // Nothing is sent: it ends when the other side is dropped.
            let _ = released.recv();
        }));
        is_blocked.recv().expect("the core runs");
        release
    }

    /// Gives the first volume another size.
    pub fn resize(&self, size: usize) {
        self.order(ServerOrder::Resize(size));
    }

    /// Ends the first export.
    pub fn detach(&self) {
        self.order(ServerOrder::Detach);
    }

    /// Exports the first volume again.
    pub fn attach(&self) {
        self.order(ServerOrder::Attach);
    }

    /// Ends the server as a kill does, and starts another on empty volumes.
    pub fn crash(&mut self) {
        self.order(ServerOrder::Crash);
        self.thread.take().expect("it runs").join().expect("no panic");
        let (orders, taken) = channel();
        self.orders = orders;
        self.launch(taken);
    }
}

/// Setup of a server, for its first core.
struct ServerSetup {
    sockets: [PathBuf; 2],
    queues: u16,
    connect: bool,
    units: Option<u16>,
    stats: VhostStats,
    fence: Arc<Fence>,
}

impl ServerSetup {
    async fn serve(
        self,
        cores: Vec<CoreHandle>,
        up: Sender<()>,
        orders: Receiver<(ServerOrder, Sender<()>)>,
        ended: Sender<()>,
    ) {
        let Self { sockets, queues, connect, units, stats, fence } = self;
        let disks = units.map(Disks::new);
        // The first volume is the one of the first unit.
        let first = disks.as_ref().map_or_else(|| Model::new(SIZE, false), |disks| disks.volume(0));
        let volumes = [first, Model::new(SIZE, false)];
        let server = VhostServer::on_cores(stats, cores);
        let add = |index: usize| {
            let (volume, path) = (&volumes[index], sockets[index].clone());
            let name = format!("local/disk{index}");
            let serial = format!("serial-{index}");
            let volume = match &disks {
                Some(disks) => VhostVolume::Scsi(disks.export(index as u8)),
                None => {
                    let fenced = FencedVolume { volume: volume.device(), fence: fence.clone() };
                    VhostVolume::Block { device: Rc::new(fenced), serial }
                }
            };
            let export = VhostExport { name, volume, queues };
            let socket = match connect && index == 0 {
                true => VhostSocket::Connect { path },
                false => VhostSocket::Listen { path, mode: 0o600, user: None, group: None },
            };
            server.add(export, socket).expect("the sockets are free");
        };
        add(1);
        add(0);
        up.send(()).expect("the test waits");
        let has_crashed = serve(&server, &volumes[0], disks.as_ref(), &orders, || add(0)).await;
        ended.send(()).expect("the thread waits");
        if has_crashed {
            // Nothing is dropped before the cores stop: a volume that ends would complete its requests.
            std::future::pending().await
        }
    }
}

/// Volumes by name.
#[derive(Clone, Default)]
struct Shelf(Rc<RefCell<BTreeMap<String, Rc<Model>>>>);

impl UnitDevices for Shelf {
    fn device(&self, unit: &Unit) -> Option<Rc<dyn BlockDevice>> {
        Some(self.0.borrow().get(&unit.spec().name)?.device())
    }
}

/// Target with disks in memory.
struct Disks {
    target: ScsiTarget,
    units: Rc<LogicalUnits>,
    shelf: Shelf,
}

impl Disks {
    fn new(count: u16) -> Self {
        let spec =
            ScsiTargetSpec { name: "disks".into(), naming: ScsiNaming::Naa([0x31, 0, 0, 0, 0, 0, 1, 0]), ports: None };
        let shelf = Shelf::default();
        let units = Rc::new(LogicalUnits::new(Rc::new(shelf.clone())));
        let disks = Self { target: ScsiTarget::new(spec, Arc::new(UnitCatalog::default())), units, shelf };
        (0..count).for_each(|lun| disks.add(lun));
        disks
    }

    fn name(lun: u16) -> String {
        format!("local/unit{lun}")
    }

    fn add(&self, lun: u16) {
        let name = Self::name(lun);
        self.shelf.0.borrow_mut().insert(name.clone(), Model::new(SIZE, false));
        let spec = UnitSpec {
            name,
            identity: UnitIdentity { uuid: [lun as u8 + 1; 16], revision: "1".into() },
            read_only: false,
            rotational: false,
            space: Arc::new(PoolSpace::default()),
            initiators: Vec::new(),
        };
        self.target.add(lun.into(), spec).expect("a free unit");
    }

    fn volume(&self, lun: u16) -> Rc<Model> {
        self.shelf.0.borrow()[&Self::name(lun)].clone()
    }

    /// Returns the target for one of its initiators.
    fn export(&self, initiator: u8) -> VhostScsiTarget {
        let (target, units) = (self.target.clone(), self.units.clone());
        VhostScsiTarget { target, units, initiator: [0x32, 0, 0, 0, 0, 0, 0, initiator] }
    }
}

/// Carries out orders to the end of the server; returns whether it is a crash.
async fn serve(
    server: &Rc<VhostServer>,
    volume: &Model,
    disks: Option<&Disks>,
    orders: &Receiver<(ServerOrder, Sender<()>)>,
    attach: impl Fn(),
) -> bool {
    loop {
        match orders.try_recv() {
            Ok((ServerOrder::Hold(true), _)) => volume.hold(),
            Ok((ServerOrder::Hold(false), _)) => volume.release(),
            Ok((ServerOrder::Resize(size), _)) => volume.resize(size),
            Ok((ServerOrder::AddUnit(lun), _)) => disks.expect("a target").add(lun),
            Ok((ServerOrder::RemoveUnit(lun), _)) => drop(disks.expect("a target").target.remove(lun)),
            Ok((ServerOrder::Detach, _done)) => server.detach("local/disk0").await,
            Ok((ServerOrder::Attach, _done)) => attach(),
            Ok((ServerOrder::Crash, _)) => return true,
            Ok((ServerOrder::Stop, _done)) => {
                server.stop().await;
                return false;
            }
            Err(TryRecvError::Empty) => sleep(Duration::from_millis(1)).await,
            Err(TryRecvError::Disconnected) => return false,
        }
    }
}

impl Drop for OurServer {
    fn drop(&mut self) {
        if let Some(thread) = self.thread.take()
            && !std::thread::panicking()
        {
            self.order(ServerOrder::Stop);
            thread.join().expect("the server did not panic");
        }
    }
}

impl DeviceUnderTest for OurServer {
    fn socket(&self) -> PathBuf {
        self.device(0)
    }

    fn other_socket(&self) -> Option<PathBuf> {
        Some(self.device(1))
    }

    fn is_alive(&self) -> bool {
        self.thread.as_ref().is_some_and(|thread| !thread.is_finished())
    }
}
