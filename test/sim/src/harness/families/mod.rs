//! Families of clones under power failures and dying clients: images are written, resized, cloned, flattened and removed, their
//! snapshots created, removed, protected and rolled back to, alone and as a group, one operation at a time, against a plain model.
//!
//! Half of the runs are on the embedded store, which loses power at any persistence point. The others are on the model of what
//! RADOS shares, where a client dies at any transaction, and another one goes on.

mod changes;
mod check;
mod group;
mod logs;
mod step;

use std::cell::{Cell, RefCell};
use std::future::{Future, poll_fn};
use std::pin::pin;
use std::rc::Rc;
use std::task::Poll;

use forebay_block::{BlockDevice, BlockRequest, Buf, BufList, Error, ErrorKind, Extent, ObjectBackend, Result};
use forebay_image::{
    CloneFormat, CloneOptions, CreateOptions, Image, ImageFeatures, ImageOpenOptions, Images, RemoveOptions, Striping,
};
use forebay_ram::cluster::{RamClient, RamCluster};
use forebay_reactor::sync::Notify;
use forebay_store::{InitOptions, Store, StoreOptions};

use self::group::KnownGroup;
use self::logs::{FamilyLogs, LoggedMember};
use self::step::{Step, describe};
use super::striping::draw_striping;
use super::{Failure, guarded};
use crate::faults::{CrashPolicy, Faults};
use crate::rng::Rng;
use crate::stamp::stamp;
use crate::world::{CrashKind, Stop, World};

const PATH: &str = "/data/store";
const POOL: i64 = 1;
const OBJECT: u64 = 64 << 10;
/// Size of the first image, in bytes.
const SIZE: u64 = 2 * OBJECT + 5000;
/// Images at once.
const MEMBERS_MAX: usize = 5;
/// Operations of a run.
const STEPS: u64 = 24;

/// Counters of runs, to verify that they reach the intended corner cases.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct FamilyTally {
    /// Number of runs.
    pub runs: u64,
    /// Runs on the store.
    pub on_store: u64,
    /// Runs with write logs in front of some images.
    pub logged: u64,
    /// Operations that were completed.
    pub operations: u64,
    /// Power failures.
    pub crashes: u64,
    /// Clients that died.
    pub deaths: u64,
    /// Operations that an end cut short, and that had happened nevertheless, or in part.
    pub cut_short: u64,
    /// Clones that were created.
    pub clones: u64,
    /// Clones that were flattened.
    pub flattened: u64,
    /// Snapshots that moved to the trash.
    pub trashed: u64,
    /// Images that were removed.
    pub removed: u64,
    /// Snapshots of the group that were created.
    pub group_snapshots: u64,
}

impl FamilyTally {
    /// Adds another's.
    pub fn add(&mut self, other: &FamilyTally) {
        let add = |mine: &mut u64, theirs: u64| *mine += theirs;
        add(&mut self.runs, other.runs);
        add(&mut self.on_store, other.on_store);
        add(&mut self.logged, other.logged);
        add(&mut self.operations, other.operations);
        add(&mut self.crashes, other.crashes);
        add(&mut self.deaths, other.deaths);
        add(&mut self.cut_short, other.cut_short);
        add(&mut self.clones, other.clones);
        add(&mut self.flattened, other.flattened);
        add(&mut self.trashed, other.trashed);
        add(&mut self.removed, other.removed);
        add(&mut self.group_snapshots, other.group_snapshots);
    }
}

/// Runs the scenario of a seed.
///
/// # Errors
/// When what is stored is not what the model has, or anything panics.
pub fn run_families(seed: u64) -> std::result::Result<FamilyTally, Failure> {
    let go = |verbose: bool| {
        let faults = Faults { crash: CrashPolicy::Seeded, events_max: 3_000_000, ..Faults::none() };
        let world = World::new(seed, faults);
        if verbose {
            world.set_verbose();
        }
        guarded(&world, "families of clones", || run(&world, seed))
    };
    go(false).map_err(|failure| go(true).err().unwrap_or(failure))
}

fn run(world: &World, seed: u64) -> std::result::Result<FamilyTally, String> {
    let mut rng = Rng::new(seed);
    let on_store = rng.coin();
    let features = match (on_store, rng.coin()) {
        (true, true) => ImageFeatures(ImageFeatures::LAYERING.0 | ImageFeatures::DEEP_FLATTEN.0),
        (false, true) => ImageFeatures::RBD_DEFAULT,
        (_, false) => ImageFeatures::LAYERING,
    };
    let logs = (on_store && rng.coin()).then(|| FamilyLogs::draw(world, &mut rng));
    let tally =
        FamilyTally { runs: 1, logged: logs.is_some().into(), on_store: on_store.into(), ..FamilyTally::default() };
    let striping = [draw_striping(&mut rng, OBJECT), draw_striping(&mut rng, OBJECT)];
    let family = Family {
        rng,
        striping,
        features,
        members: Vec::new(),
        group: KnownGroup::default(),
        logs,
        names: 0,
        pending: None,
        left: STEPS,
        tally,
        world: world.clone(),
    };
    if on_store { on_the_store(world, family) } else { on_a_cluster(world, family) }
}

fn on_the_store(world: &World, mut family: Family) -> std::result::Result<FamilyTally, String> {
    let options = InitOptions { size: 24 << 20, segment_size: 256 << 10, ..InitOptions::default() };
    let reactor = world.reactor();
    world
        .run(&reactor, Store::init(PATH, options))
        .map_err(|stop| stop.to_string())?
        .map_err(|error| format!("{error:?}"))?;
    world.crash(reactor, CrashKind::Power);
    loop {
        // The last life is not cut short.
        let cut = family.left > 0 && family.rng.below(4) > 0;
        let span = 1 << family.rng.range(3..9);
        let point = world.points() + 1 + family.rng.below(span);
        world.crash_at_point(cut.then_some(point));
        let reactor = world.reactor();
        let ran = world.run(&reactor, async {
            let store = Store::open(PATH, StoreOptions::default()).await?;
            family.live(store.clone(), None).await?;
            if !cut {
                let backend: Rc<dyn ObjectBackend> = store.clone();
                family.remove_all(&Images::of(&backend)).await?;
            }
            family.close_logs().await?;
            store.close().await
        });
        world.crash_at_point(None);
        family.logs.as_mut().into_iter().for_each(FamilyLogs::forget);
        world.crash(reactor, CrashKind::Power);
        match ran {
            Ok(Ok(())) if cut => {}
            Ok(Ok(())) => return Ok(family.tally),
            Ok(Err(error)) => return Err(format!("{error:?}")),
            Err(Stop::Crash(_)) => family.tally.crashes += 1,
            Err(stop) => return Err(stop.to_string()),
        }
    }
}

/// Death of a client.
#[derive(Default)]
struct Death {
    client: RefCell<Option<RamClient>>,
    /// Transactions until then.
    after: Cell<Option<u64>>,
    happened: Notify,
    is_dead: Cell<bool>,
}

fn on_a_cluster(world: &World, mut family: Family) -> std::result::Result<FamilyTally, String> {
    let reactor = world.reactor();
    let ran = world.run(&reactor, async {
        let cluster = RamCluster::new(family.rng.bits(), family.rng.below(4));
        assert_eq!(cluster.add_pool("rbd"), POOL);
        let death: Rc<Death> = Rc::default();
        let observed = death.clone();
        cluster.observe(move |_, _| {
            let Some(after) = observed.after.get() else { return };
            observed.after.set(after.checked_sub(1));
            if after == 0
                && let Some(client) = observed.client.borrow().as_ref()
            {
                client.die();
                observed.is_dead.set(true);
                observed.happened.notify_all();
            }
        });
        loop {
            let client = cluster.client();
            let pool = client.pool(POOL);
            *death.client.borrow_mut() = Some(client);
            death.is_dead.set(false);
            let cut = family.left > 0 && family.rng.below(4) > 0;
            let span = 1 << family.rng.range(3..8);
            let after = family.rng.below(span);
            death.after.set(cut.then_some(after));
            let lived = family.live(pool.clone(), Some(&death)).await;
            if !death.is_dead.get() {
                lived?;
                if !cut {
                    family.remove_all(&Images::of(&pool)).await?;
                    return Ok::<_, Error>(family.tally);
                }
                continue;
            }
            family.tally.deaths += 1;
            // A dead client is known by its watches.
            cluster.expire_watches();
        }
    });
    match ran.map_err(|stop| stop.to_string())? {
        Ok(tally) => Ok(tally),
        Err(error) => Err(format!("{error:?}")),
    }
}

/// Snapshot as the model has it.
struct Known {
    name: String,
    content: Vec<u8>,
    protected: bool,
    /// Set if it may read the image's parent.
    uses_parent: bool,
}

/// Image as the model has it.
struct Member {
    name: String,
    content: Vec<u8>,
    snapshots: Vec<Known>,
    /// Image and snapshot that it is a clone of.
    origin: Option<(usize, String)>,
    /// Set while its head reads the parent.
    attached: bool,
    /// Content of the snapshot that it is a clone of.
    inherited: Vec<u8>,
    /// Names of snapshots that were removed, and may be in the trash for clones, and read the parent.
    removed: Vec<String>,
    gone: bool,
}

struct Family {
    rng: Rng,
    /// Striping of images, and of clones.
    striping: [Option<Striping>; 2],
    features: ImageFeatures,
    members: Vec<Member>,
    group: KnownGroup,
    /// Write logs, if images have some.
    logs: Option<FamilyLogs>,
    names: u64,
    /// Operation in flight when the last life ended.
    pending: Option<(usize, Step)>,
    /// Operations that are left.
    left: u64,
    tally: FamilyTally,
    world: World,
}

fn wrong(what: String) -> Error {
    Error::new(ErrorKind::Io, what)
}

async fn content_of(device: &dyn BlockDevice) -> Result<Vec<u8>> {
    match device.geometry().size {
        0 => Ok(Vec::new()),
        size => Ok(device.submit(BlockRequest::Read(Extent::new(0, size))).await?.into_data().to_vec()),
    }
}

async fn open(images: &Rc<Images>, name: &str) -> Result<Rc<Image>> {
    images.open(name, ImageOpenOptions::default()).await
}

impl Family {
    /// Goes on until the end, or until the client has died.
    async fn live(&mut self, backend: Rc<dyn ObjectBackend>, death: Option<&Death>) -> Result<()> {
        let images = Images::of(&backend);
        let mut life = pin!(self.go_on(&images));
        let Some(death) = death else { return life.await };
        let mut died = pin!(death.happened.wait());
        poll_fn(|cx| {
            if died.as_mut().poll(cx).is_ready() {
                return Poll::Ready(Ok(()));
            }
            life.as_mut().poll(cx)
        })
        .await
    }

    async fn go_on(&mut self, images: &Rc<Images>) -> Result<()> {
        let names = self.members.iter().map(|member| (!member.gone).then(|| member.name.clone())).collect::<Vec<_>>();
        if let Some(logs) = &mut self.logs {
            logs.begin(images, |number| names.get(number).cloned().flatten()).await?;
        }
        if let Some((number, step)) = self.pending.clone() {
            self.settle(images, number, step).await?;
            self.pending = None;
        }
        self.check(images).await?;
        while self.left > 0 {
            self.left -= 1;
            let (number, step) = self.draw();
            self.pending = Some((number, step.clone()));
            self.world.note(|| format!("{}: {}", number, describe(&step)));
            self.perform(images, number, &step).await?;
            self.flush(images).await?;
            self.apply(number, step);
            self.pending = None;
            self.tally.operations += 1;
            if self.rng.one_in(5) {
                self.check(images).await?;
            }
        }
        self.check(images).await
    }

    /// Makes everything durable.
    async fn flush(&self, images: &Rc<Images>) -> Result<()> {
        if let Some(logs) = &self.logs {
            logs.flush().await?;
        }
        images.backend().flush().await
    }

    /// Closes the logs at the end of a life, written back or not.
    async fn close_logs(&mut self) -> Result<()> {
        let write_back = self.rng.coin();
        match &mut self.logs {
            Some(logs) => logs.close(write_back).await,
            None => Ok(()),
        }
    }

    /// Returns the log of a member, if it has one.
    fn logged(&self, number: usize) -> Option<LoggedMember> {
        self.logs.as_ref()?.of(number)
    }

    fn fresh(&mut self, prefix: &str) -> String {
        self.names += 1;
        format!("{prefix}{}", self.names)
    }

    fn draw(&mut self) -> (usize, Step) {
        let there: Vec<usize> = (0..self.members.len()).filter(|&number| !self.members[number].gone).collect();
        if there.is_empty() {
            return (self.members.len(), Step::Create);
        }
        let number = *self.rng.pick(&there);
        let size = self.members[number].content.len() as u64;
        let snapshots = self.members[number].snapshots.len() as u64;
        let known = (snapshots > 0).then(|| {
            let known = &self.members[number].snapshots[self.rng.below(snapshots) as usize];
            (known.name.clone(), known.protected)
        });
        let op = self.rng.below(24);
        let step = match (op, known) {
            (0..6, _) if size > 0 => {
                let offset = self.rng.below(size);
                let len = 1 + self.rng.below((OBJECT + 4096).min(size - offset));
                let data = match self.rng.one_in(4) {
                    true => vec![0; len as usize],
                    false => stamp(offset, len as usize, self.rng.bits()).to_vec(),
                };
                Step::Write { offset, data }
            }
            (6, _) if size > 0 => {
                let offset = self.rng.below(size);
                Step::Discard { offset, len: 1 + self.rng.below((2 * OBJECT).min(size - offset)) }
            }
            (7, _) => Step::Resize { to: self.rng.below(SIZE + OBJECT) },
            (8, Some((name, protected))) => Step::Protect { name, protected: !protected },
            (9..11, Some((name, false))) => Step::RemoveSnapshot { name },
            (11, Some((name, _))) => Step::RollBack { name },
            (12..16, Some((name, protected))) if there.len() < MEMBERS_MAX => {
                let format = if protected && self.rng.coin() { CloneFormat::V1 } else { CloneFormat::V2 };
                Step::Clone { name, to: self.fresh("m"), format }
            }
            (16 | 17, _) if self.members[number].attached => Step::Flatten,
            (18, _) if there.len() > 1 && snapshots == 0 && !self.has_trash(number) && !self.group.needs(number) => {
                Step::Remove
            }
            (20.., _) => Step::Group(self.draw_group_step(number)),
            _ => Step::Snapshot { name: self.fresh("s") },
        };
        // A protected snapshot with clones of version 1 keeps its protection.
        match step {
            Step::Protect { name, protected: false } if !self.clones(number, &name).is_empty() => {
                (number, Step::Snapshot { name: self.fresh("s") })
            }
            step => (number, step),
        }
    }

    /// Returns whether an image, or a snapshot of it, needs its parent.
    fn depends(&self, number: usize) -> bool {
        let member = &self.members[number];
        let by_snapshots = member.snapshots.iter().any(|known| known.uses_parent);
        let by_trash = || member.removed.iter().any(|name| !self.clones(number, name).is_empty());
        !member.gone && (member.attached || by_snapshots || self.group.uses_parent(number) || by_trash())
    }

    /// Returns the clones of a snapshot.
    fn clones(&self, number: usize, name: &str) -> Vec<&Member> {
        let is_of = |&other: &usize| {
            let origin = self.members[other].origin.as_ref();
            origin.is_some_and(|(of, at)| *of == number && at == name) && self.depends(other)
        };
        (0..self.members.len()).filter(is_of).map(|other| &self.members[other]).collect()
    }

    /// Returns whether clones need snapshots of this image that have been removed.
    fn has_trash(&self, number: usize) -> bool {
        let is_known = |name: &String| self.members[number].snapshots.iter().any(|known| known.name == *name);
        let waits = |other: usize| {
            let origin = self.members[other].origin.as_ref();
            origin.is_some_and(|(of, at)| *of == number && !is_known(at)) && self.depends(other)
        };
        (0..self.members.len()).any(waits)
    }

    async fn perform(&mut self, images: &Rc<Images>, number: usize, step: &Step) -> Result<()> {
        let name = self.members.get(number).map_or_else(String::new, |member| member.name.clone());
        match step {
            Step::Create => {
                let options = CreateOptions {
                    size: SIZE,
                    object_size: OBJECT,
                    striping: self.striping[0],
                    features: Some(self.features),
                    ..CreateOptions::default()
                };
                return images.create(&format!("base{number}"), options).await;
            }
            Step::Clone { name: at, to, format } => {
                let (striping, features) = (self.striping[1], Some(self.features));
                let options = CloneOptions { format: *format, striping, features, ..CloneOptions::default() };
                return images.clone_from(images, &format!("{name}@{at}"), to, &options).await;
            }
            Step::Remove => {
                if let Some(logs) = &mut self.logs {
                    logs.end(number).await?;
                }
                return images.remove(&name, RemoveOptions::default(), |_| {}).await;
            }
            Step::Group(step) => return self.perform_group_step(images, number, step).await,
            Step::Write { .. } => {
                if self.logged(number).is_none()
                    && self.rng.one_in(3)
                    && let Some(logs) = &mut self.logs
                {
                    logs.create(&self.world, images, number, &name).await?;
                }
            }
            _ => {}
        }
        let image = open(images, &name).await?;
        let log = self.logged(number).map(|logged| logged.log);
        let device: Rc<dyn BlockDevice> = log.clone().map_or(image.clone(), |log| log);
        let done = match step {
            Step::Write { offset, data } => {
                let data: BufList = Buf::copy_of(data).into();
                device.submit(BlockRequest::Write { offset: *offset, data, fua: false }).await.map(drop)
            }
            Step::Discard { offset, len } => {
                device.submit(BlockRequest::Discard(Extent::new(*offset, *len))).await.map(drop)
            }
            Step::Resize { to } => {
                // The log holds nothing past the new end before the image loses it.
                let shrinking = match log.filter(|_| *to < image.size()) {
                    Some(log) => Some(log.shrink(*to).await?),
                    None => None,
                };
                let resized = image.resize(*to, true, |_| {}).await;
                drop(shrinking);
                resized
            }
            Step::Snapshot { name } => {
                let cut = match log {
                    Some(log) => Some(log.cut().await?),
                    None => None,
                };
                let created = image.create_snapshot(name).await;
                drop(cut);
                created.map(drop)
            }
            Step::RemoveSnapshot { name } => image.remove_snapshot(name).await,
            Step::Protect { name, protected } => image.set_snapshot_protection(name, *protected).await.map(drop),
            Step::RollBack { name } => {
                // An empty log replays nothing over the older data.
                let closed = match log {
                    Some(log) => Some(log.shrink(0).await?),
                    None => None,
                };
                let rolled_back = image.rollback(name, |_| {}).await;
                drop(closed);
                rolled_back
            }
            Step::Flatten => image.flatten(|_| {}).await,
            Step::Create | Step::Clone { .. } | Step::Remove | Step::Group(_) => Ok(()),
        };
        image.close().await;
        done
    }

    /// Does in the model what an operation has done.
    fn apply(&mut self, number: usize, step: Step) {
        let trashes = match &step {
            Step::RemoveSnapshot { name } => !self.clones(number, name).is_empty(),
            _ => false,
        };
        let is_deep = self.features.has(ImageFeatures::DEEP_FLATTEN);
        let new = |name: String, content, origin: Option<(usize, String)>| {
            let attached = origin.is_some();
            let content: Vec<u8> = content;
            let inherited = if attached { content.clone() } else { Vec::new() };
            Member {
                name,
                content,
                snapshots: Vec::new(),
                origin,
                attached,
                inherited,
                removed: Vec::new(),
                gone: false,
            }
        };
        match step {
            Step::Group(step) => self.apply_group_step(number, step),
            Step::Create => self.members.push(new(format!("base{number}"), vec![0; SIZE as usize], None)),
            Step::Clone { name, to, .. } => {
                let known = self.members[number].snapshots.iter().find(|known| known.name == name);
                let content = known.map(|known| known.content.clone()).unwrap_or_default();
                self.members.push(new(to, content, Some((number, name))));
                self.tally.clones += 1;
            }
            _ => {
                let member = &mut self.members[number];
                match step {
                    Step::Write { offset, data } => {
                        member.content[offset as usize..][..data.len()].copy_from_slice(&data);
                    }
                    Step::Discard { offset, len } => member.content[offset as usize..][..len as usize].fill(0),
                    Step::Resize { to } => member.content.resize(to as usize, 0),
                    Step::Snapshot { name } => {
                        let (content, uses_parent) = (member.content.clone(), member.attached);
                        member.snapshots.push(Known { name, content, protected: false, uses_parent });
                    }
                    Step::RemoveSnapshot { name } => {
                        let used = member.snapshots.iter().any(|known| known.name == name && known.uses_parent);
                        member.removed.extend(used.then(|| name.clone()));
                        member.snapshots.retain(|known| known.name != name);
                        self.tally.trashed += u64::from(trashes);
                    }
                    Step::Protect { name, protected } => {
                        let found = member.snapshots.iter_mut().find(|known| known.name == name);
                        found.into_iter().for_each(|known| known.protected = protected);
                    }
                    Step::RollBack { name } => {
                        let found = member.snapshots.iter().find(|known| known.name == name);
                        member.content = found.map(|known| known.content.clone()).unwrap_or_default();
                    }
                    Step::Flatten => {
                        member.attached = false;
                        if is_deep {
                            member.snapshots.iter_mut().for_each(|known| known.uses_parent = false);
                            member.removed.clear();
                            self.group.detach(number);
                        }
                        self.tally.flattened += 1;
                    }
                    Step::Remove => {
                        member.gone = true;
                        self.tally.removed += 1;
                    }
                    Step::Create | Step::Clone { .. } | Step::Group(_) => {}
                }
            }
        }
    }

    /// Finds out how far the operation got that the end of the last life cut short, and completes what must be.
    async fn settle(&mut self, images: &Rc<Images>, number: usize, step: Step) -> Result<()> {
        let name = self.members.get(number).map_or_else(String::new, |member| member.name.clone());
        self.world.note(|| format!("settling {number}: {}", describe(&step)));
        self.tally.cut_short += 1;
        let users = async |name: &str| -> Result<Vec<(String, bool)>> {
            let all = images.snapshots(name).await?;
            Ok(all.into_iter().filter(|one| one.is_user()).map(|one| (one.name, one.protected)).collect())
        };
        match &step {
            Step::Write { .. } | Step::Discard { .. } | Step::Resize { .. } => {
                let image = open(images, &name).await?;
                let log = self.logged(number).map(|logged| logged.log);
                let device: Rc<dyn BlockDevice> = log.map_or(image.clone(), |log| log);
                let found = content_of(&*device).await?;
                drop(device);
                image.close().await;
                let before = self.members[number].content.clone();
                self.apply(number, step.clone());
                let after = &self.members[number].content;
                if ![before.len(), after.len()].contains(&found.len()) {
                    return Err(wrong(format!("{name} has {} bytes", found.len())));
                }
                let cut = matches!(step, Step::Resize { .. });
                let at = |content: &[u8], at: usize| content.get(at).copied().unwrap_or(0);
                for (offset, &byte) in found.iter().enumerate() {
                    // A shrink that is cut short may have removed objects, so that nothing shows there, or the parent.
                    let inherited = &self.members[number].inherited;
                    let is_cut = cut && offset >= after.len() && (byte == 0 || byte == at(inherited, offset));
                    let may = byte == at(&before, offset) || byte == at(after, offset) || is_cut;
                    if !may {
                        return Err(wrong(format!("{name} has {byte} at {offset}, after {}", describe(&step))));
                    }
                }
                self.members[number].content = found;
            }
            Step::Snapshot { name: at } | Step::RemoveSnapshot { name: at } => {
                let is_there = users(&name).await?.iter().any(|(found, _)| found == at);
                if is_there == matches!(step, Step::Snapshot { .. }) {
                    self.apply(number, step);
                }
            }
            Step::Protect { name: at, protected } => {
                let found = users(&name).await?.iter().any(|(found, is)| found == at && is == protected);
                if found {
                    self.apply(number, step);
                } else {
                    // One whose protection was about to end counts as unprotected, and can be protected again.
                    self.perform(images, number, &step).await?;
                    self.apply(number, step);
                }
            }
            Step::Group(step) => self.settle_group_step(images, number, step.clone()).await?,
            Step::RollBack { .. } => {
                self.perform(images, number, &step).await?;
                self.apply(number, step);
            }
            Step::Flatten => {
                if images.details(&name).await?.parent.is_some() {
                    self.perform(images, number, &step).await?;
                }
                self.apply(number, step);
            }
            Step::Create | Step::Clone { .. } => {
                let to = match &step {
                    Step::Clone { to, .. } => to.clone(),
                    _ => format!("base{number}"),
                };
                let is_there = match images.info(&to).await {
                    Ok(_) => true,
                    Err(error) if error.kind() == ErrorKind::NotFound => false,
                    Err(error) => return Err(error),
                };
                if is_there {
                    self.apply(number, step);
                } else if images.list().await?.contains(&to) {
                    if self.rng.coin() {
                        self.perform(images, number, &step).await?;
                        self.apply(number, step);
                    } else {
                        images.remove(&to, RemoveOptions::default(), |_| {}).await?;
                    }
                }
            }
            Step::Remove => {
                if images.list().await?.contains(&name) {
                    self.perform(images, number, &step).await?;
                }
                self.apply(number, step);
            }
        }
        self.flush(images).await
    }
}
