//! Hosts of a target without a transport, whose volumes are vectors of bytes.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::future::{Future, poll_fn};
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Poll, Waker};

use forebay_block::{BlockDevice, BufMut};
use forebay_load::model::{Model, worlds};
use forebay_reactor::spawn;
use forebay_scsi::inquiry::UnitIdentity;
use forebay_scsi::{
    LogicalUnits, Lun, PoolSpace, ReadyScsiCommand, ScsiCompletion, ScsiNaming, ScsiSession, ScsiSessionSpec,
    ScsiTarget, ScsiTargetSpec, ScsiTask, ScsiTransport, ScsiUnitEvent, TaskFunction, TaskResponse, Unit, UnitCatalog,
    UnitDevices, UnitSpec, reserve,
};

/// NAA identifier of the target.
pub const TARGET: [u8; 8] = [0x31, 0, 0, 0, 0, 0, 1, 0];

/// Volumes by name.
#[derive(Clone, Default)]
struct Shelf(Rc<RefCell<BTreeMap<String, Rc<Model>>>>);

impl UnitDevices for Shelf {
    fn device(&self, unit: &Unit) -> Option<Rc<dyn BlockDevice>> {
        Some(self.0.borrow().get(&unit.spec().name)?.device())
    }
}

/// Target under test.
#[derive(Clone)]
pub struct Disks {
    pub target: ScsiTarget,
    catalog: Arc<UnitCatalog>,
    units: Rc<LogicalUnits>,
    shelf: Shelf,
}

impl Disks {
    pub fn new() -> Self {
        let catalog = Arc::new(UnitCatalog::default());
        let spec = ScsiTargetSpec { name: "disks".into(), naming: ScsiNaming::Naa(TARGET), ports: None };
        let shelf = Shelf::default();
        let units = Rc::new(LogicalUnits::new(Rc::new(shelf.clone())));
        Self { target: ScsiTarget::new(spec, catalog.clone()), catalog, units, shelf }
    }

    /// Builds the configuration of a unit for a volume.
    pub fn spec(&self, model: &Rc<Model>, initiators: &[&str]) -> UnitSpec {
        let mut shelf = self.shelf.0.borrow_mut();
        let name = format!("volume-{}", shelf.len());
        shelf.insert(name.clone(), model.clone());
        UnitSpec {
            name,
            identity: UnitIdentity { uuid: [shelf.len() as u8; 16], revision: "1".into() },
            read_only: false,
            rotational: false,
            space: Arc::new(PoolSpace::default()),
            initiators: initiators.iter().map(|&name| name.to_owned()).collect(),
        }
    }

    pub fn add(&self, lun: u16, model: &Rc<Model>) -> Arc<Unit> {
        self.target.add(lun.into(), self.spec(model, &[])).expect("a LUN in range, and a new volume")
    }

    /// Begins a session of a host.
    pub fn host(&self, name: &str) -> Host {
        let spec = ScsiSessionSpec {
            id: self.catalog.next_session(),
            initiator: name.to_owned(),
            host: reserve::naa_host(identifier(name)),
            signal: Arc::default(),
            tasks_max: 64,
            watches: true,
        };
        let session = ScsiSession::new(self.target.clone(), self.units.clone(), spec);
        Host { session, port: Outcomes::default(), next_tag: 1 }
    }
}

/// Returns the NAA identifier of a host.
pub fn identifier(name: &str) -> [u8; 8] {
    let mut port = [0x30, 0, 0, 0, 0, 0, 0, 0];
    port.iter_mut().skip(1).zip(name.bytes()).for_each(|(byte, name)| *byte = name);
    port
}

/// Outcome of a task.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TaskOutcome {
    Done { status: u8, sense: Vec<u8>, data: Vec<u8> },
    Aborted,
    Managed(TaskResponse),
}

impl TaskOutcome {
    /// Returns the data of a command that succeeded.
    pub fn ok(self) -> Vec<u8> {
        match self {
            TaskOutcome::Done { status: 0, data, .. } => data,
            other => panic!("not GOOD: {other:x?}"),
        }
    }

    /// Returns status, sense key and additional sense code.
    pub fn failure(&self) -> (u8, Option<(u8, u16)>) {
        let TaskOutcome::Done { status, sense, .. } = self else { panic!("no status: {self:?}") };
        let sense = sense.first().map(|_| (sense[2] & 0x0f, u16::from_be_bytes([sense[12], sense[13]])));
        (*status, sense)
    }
}

/// Outcomes by tag, in the order in which they were reported.
#[derive(Default)]
pub struct Outcomes(pub Vec<(u64, TaskOutcome)>);

impl ScsiTransport for Outcomes {
    type Note = u64;

    fn complete(&mut self, done: ScsiCompletion<u64>) {
        let (status, sense) = (done.status(), done.sense());
        let data = done.result.map(|data| data.to_vec()).unwrap_or_default();
        self.0.push((done.note, TaskOutcome::Done { status, sense, data }));
    }

    fn aborted(&mut self, note: u64) {
        self.0.push((note, TaskOutcome::Aborted));
    }

    fn managed(&mut self, note: u64, response: TaskResponse) {
        self.0.push((note, TaskOutcome::Managed(response)));
    }
}

/// Session of a host, and the outcomes that it has not read.
pub struct Host {
    pub session: ScsiSession<u64>,
    pub port: Outcomes,
    next_tag: u64,
}

impl Host {
    fn tag(&mut self) -> u64 {
        self.next_tag += 1;
        self.next_tag
    }

    /// Starts a command, and returns its tag.
    pub fn start(&mut self, lun: u16, cdb: &[u8], data: &[u8]) -> u64 {
        self.start_as(lun, cdb, data, false)
    }

    /// Starts a command that may be ordered, and returns its tag.
    pub fn start_as(&mut self, lun: u16, cdb: &[u8], data: &[u8], ordered: bool) -> u64 {
        let tag = self.tag();
        let mut command = ReadyScsiCommand::new(Lun::Unit(lun), cdb, data.len() as u64);
        command.data = BufMut::copy_of(&data[..command.wants(data.len() as u64)]).into();
        self.session.submit(ScsiTask { tag, command, ordered, note: tag }, &mut self.port);
        tag
    }

    /// Starts a task management function, and returns its tag.
    pub fn manage(&mut self, function: TaskFunction) -> u64 {
        let tag = self.tag();
        self.session.manage(function, tag, &mut self.port);
        tag
    }

    /// Runs a turn of the session.
    pub fn turn(&mut self) {
        self.session.turn(Waker::noop(), &mut self.port);
    }

    /// Takes the outcome of a task, if it is reported already.
    pub fn outcome(&mut self, tag: u64) -> Option<TaskOutcome> {
        let at = self.port.0.iter().position(|(reported, _)| *reported == tag)?;
        Some(self.port.0.remove(at).1)
    }

    /// Waits for the outcome of a task.
    pub async fn end(&mut self, tag: u64) -> TaskOutcome {
        poll_fn(|cx| {
            self.session.turn(cx.waker(), &mut self.port);
            self.outcome(tag).map_or(Poll::Pending, Poll::Ready)
        })
        .await
    }

    /// Executes a command.
    pub async fn run(&mut self, lun: u16, cdb: &[u8], data: &[u8]) -> TaskOutcome {
        let tag = self.start(lun, cdb, data);
        self.end(tag).await
    }

    /// Executes a command after all pending unit attentions.
    pub async fn settle(&mut self, lun: u16, cdb: &[u8], data: &[u8]) -> TaskOutcome {
        loop {
            let outcome = self.run(lun, cdb, data).await;
            if !matches!(outcome.failure(), (2, Some((6, _)))) {
                return outcome;
            }
        }
    }

    /// Returns the sense key and code of TEST UNIT READY; `None` if it succeeds.
    pub async fn told(&mut self, lun: u16) -> Option<(u8, u16)> {
        self.run(lun, &[0; 6], &[]).await.failure().1
    }

    /// Waits for the next event.
    pub async fn event(&mut self) -> ScsiUnitEvent {
        poll_fn(|cx| {
            self.session.turn(cx.waker(), &mut self.port);
            self.session.take_event().map_or(Poll::Pending, Poll::Ready)
        })
        .await
    }

    /// Takes the events that are pending.
    pub fn events(&mut self) -> Vec<ScsiUnitEvent> {
        self.turn();
        std::iter::from_fn(|| self.session.take_event()).collect()
    }

    /// Ends the session; its commands in flight become orphaned tasks.
    pub fn leave(mut self) {
        let Some(mut orphans) = self.session.leave(&mut self.port) else { return };
        let mut port = self.port;
        drop(spawn(poll_fn(move |cx| orphans.poll(cx.waker(), &mut port))));
    }
}

/// Builds a READ (10).
pub fn read(lba: u32, blocks: u16) -> Vec<u8> {
    run10(0x28, lba, blocks)
}

/// Builds a WRITE (10).
pub fn write(lba: u32, blocks: u16) -> Vec<u8> {
    run10(0x2a, lba, blocks)
}

fn run10(opcode: u8, lba: u32, blocks: u16) -> Vec<u8> {
    let mut cdb = vec![opcode, 0];
    cdb.extend(lba.to_be_bytes());
    cdb.push(0);
    cdb.extend(blocks.to_be_bytes());
    cdb.push(0);
    cdb
}

/// Runs a test in simulated worlds.
pub fn simulate<F: Future<Output = ()>>(test: impl Fn(Disks) -> F) {
    worlds(2, |_| test(Disks::new()));
}
