//! Images of a pool that several clients use at once, on the plain model of what RADOS shares: clients take the
//! exclusive lock from each other, die with writes in flight, lose their watches, resize; the image may be a clone and
//! may have snapshots.
//!
//! Beside what reads see, one thing is looked at after every single transaction: an object that is there is on the
//! object map.

use std::cell::{Cell, RefCell};
use std::future::Future;
use std::pin::pin;
use std::rc::Rc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use forebay_block::{
    BlockDevice, BlockReply, BlockRequest, Buf, BufList, Error, ErrorKind, Extent, ExtentMap, Geometry, LocalFuture,
    ObjectBackend, ObjectName, ObjectRead, Result, SizeWatch, SnapId,
};
use forebay_image::{CreateOptions, Image, ImageFeatures, ImageOpenOptions, Images, OWN_BLOCKS_KEY};
use forebay_ram::RamBackend;
use forebay_ram::cluster::rbd::ClosedImage;
use forebay_ram::cluster::{RamClient, RamCluster};
use forebay_reactor::{sleep, spawn, timeout};

use super::own_blocks::{CACHE_PATH, LifeCache};
use super::striping::draw_striping;
use super::{Failure, guarded};
use crate::faults::Faults;
use crate::oracle::{BLOCK, BlockOracle, Expected};
use crate::rng::Rng;
use crate::stamp::stamp;
use crate::workload::{BlockLoad, Seen, verify_blocks};
use crate::world::{CrashKind, World};

const POOL: i64 = 1;
const OBJECT: u64 = 64 << 10;
const NAME: &str = "vm";
/// Maximum number of objects of the image.
const OBJECTS_MAX: u64 = 12;
/// After so long a client that is dead has lost its watches.
const WATCH_TIMEOUT: Duration = Duration::from_secs(30);
/// A load takes no longer: waiting for a dead owner's lock included.
const PATIENCE: Duration = Duration::from_secs(600);

/// Counters of runs, to verify that they reach the intended corner cases.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct SharedTally {
    /// Number of runs.
    pub runs: u64,
    /// Runs on a clone.
    pub clones: u64,
    /// Requests that were completed.
    pub requests: u64,
    /// Transactions that changed an object.
    pub transactions: u64,
    /// Clients that opened the image.
    pub clients: u64,
    /// Clients that died.
    pub deaths: u64,
    /// Times that all watches broke.
    pub breaks: u64,
    /// Clients that were put on the blocklist.
    pub fenced: u64,
    /// Times that the image was made shorter.
    pub shrunk: u64,
    /// Times that it was made longer.
    pub grown: u64,
    /// Number of snapshots.
    pub snapshots: u64,
    /// Parts of own blocks that were found in the read cache.
    pub own_hits: u64,
    /// Parts of own blocks that were removed from it because they were about to change.
    pub own_invalidated: u64,
}

impl SharedTally {
    /// Adds another's.
    pub fn add(&mut self, other: &SharedTally) {
        let add = |mine: &mut u64, theirs: u64| *mine += theirs;
        add(&mut self.runs, other.runs);
        add(&mut self.clones, other.clones);
        add(&mut self.requests, other.requests);
        add(&mut self.transactions, other.transactions);
        add(&mut self.clients, other.clients);
        add(&mut self.deaths, other.deaths);
        add(&mut self.breaks, other.breaks);
        add(&mut self.fenced, other.fenced);
        add(&mut self.shrunk, other.shrunk);
        add(&mut self.grown, other.grown);
        add(&mut self.snapshots, other.snapshots);
        add(&mut self.own_hits, other.own_hits);
        add(&mut self.own_invalidated, other.own_invalidated);
    }
}

/// Runs the scenario of a seed.
///
/// # Errors
/// When the oracle objects, the object map is not true, or anything panics.
pub fn run_shared(seed: u64) -> std::result::Result<SharedTally, Failure> {
    let go = |verbose: bool| {
        let world = World::new(seed, Faults { events_max: 3_000_000, ..Faults::none() });
        if verbose {
            world.set_verbose();
        }
        guarded(&world, "images of a shared pool", || Run::new(&world, seed).all())
    };
    go(false).map_err(|failure| go(true).err().unwrap_or(failure))
}

/// Failures of clients, by transaction number of the round.
#[derive(Clone, Default)]
struct Fate {
    /// Transaction at which a client dies, and the client's number.
    death: Option<(u64, usize)>,
    /// All watches break.
    breaks: Option<u64>,
}

/// State shared by the observer of transactions and the tasks of a round.
#[derive(Default)]
struct Watched {
    /// Id of the image whose object map is looked at.
    id: RefCell<Option<String>>,
    lie: RefCell<Option<String>>,
    transactions: Cell<u64>,
    /// Transactions of this round.
    turn: Cell<u64>,
    fate: RefCell<Fate>,
    clients: RefCell<Vec<RamClient>>,
    dead: Cell<bool>,
    broken: Cell<bool>,
}

/// Image device of one client: every request passes the oracle, and acknowledged writes have to be durable.
struct Host {
    image: Rc<Image>,
    oracle: Rc<RefCell<BlockOracle>>,
    watched: Rc<Watched>,
    /// Set when it was fenced: nothing of it is verified any more.
    gone: Rc<Cell<bool>>,
    world: World,
    number: usize,
}

impl BlockDevice for Host {
    fn geometry(&self) -> Geometry {
        self.image.geometry()
    }

    fn submit(&self, request: BlockRequest) -> LocalFuture<Result<BlockReply>> {
        let mut told = request.clone();
        match &mut told {
            BlockRequest::Write { fua, .. } | BlockRequest::WriteZeroes { fua, .. } => *fua = true,
            BlockRequest::CompareAndWrite { fua, .. } => *fua = true,
            _ => {}
        }
        let token = self.oracle.borrow_mut().submit(&told);
        let (number, kind) = (self.number, std::mem::discriminant(&request));
        let name = format!("client {number}: {kind:?} {:?}", request.extent());
        self.world.note(|| format!("{name} begins"));
        let answer = self.image.submit(request);
        let (oracle, watched, gone) = (self.oracle.clone(), self.watched.clone(), self.gone.clone());
        let world = self.world.clone();
        Box::pin(async move {
            let result = answer.await;
            world.note(|| format!("{name}: {:?}", result.as_ref().map(drop)));
            let fenced = matches!(&result, Err(error) if error.kind() == ErrorKind::Fenced);
            if fenced && watched.broken.get() {
                gone.set(true);
                std::future::pending::<()>().await;
            }
            oracle.borrow_mut().complete(token, &result);
            result
        })
    }

    fn map(&self, extent: Extent) -> LocalFuture<Result<ExtentMap>> {
        self.image.map(extent)
    }

    fn size_watch(&self) -> Option<Rc<SizeWatch>> {
        self.image.size_watch()
    }
}

/// Content that a snapshot must keep.
struct Kept {
    name: String,
    content: Vec<u8>,
}

struct Run {
    world: World,
    rng: Rng,
    cluster: RamCluster,
    watched: Rc<Watched>,
    features: ImageFeatures,
    oracle: Rc<RefCell<BlockOracle>>,
    size: u64,
    /// Bytes that may be in the parent.
    overlap: Option<u64>,
    /// Contents of the parent.
    parent: Vec<u8>,
    kept: Vec<Kept>,
    version: Rc<Cell<u64>>,
    seen: Rc<Seen>,
    tally: SharedTally,
}

fn text(what: &str) -> impl Fn(Error) -> String + '_ {
    move |error| format!("{what}: {error:?}")
}

impl Run {
    fn new(world: &World, seed: u64) -> Self {
        let mut rng = Rng::new(seed);
        world.add_file(CACHE_PATH, 0, 512);
        let cluster = RamCluster::new(seed, *rng.pick(&[0, 1, 3, 8]));
        cluster.add_pool("rbd");
        cluster.delay_transactions();
        let watched: Rc<Watched> = Rc::default();
        observe(&cluster, &watched, world);
        Self {
            world: world.clone(),
            cluster,
            watched,
            features: ImageFeatures::RBD_DEFAULT,
            oracle: Rc::new(RefCell::new(BlockOracle::new(Expected::nothing()))),
            size: rng.range(2..OBJECTS_MAX + 1) * OBJECT - rng.below(2) * rng.below(OBJECT),
            overlap: None,
            parent: Vec::new(),
            kept: Vec::new(),
            version: Rc::default(),
            seen: Rc::default(),
            tally: SharedTally { runs: 1, ..SharedTally::default() },
            rng,
        }
    }

    fn all(&mut self) -> std::result::Result<SharedTally, String> {
        let world = self.world.clone();
        let reactor = world.reactor();
        let prepared = world.run(&reactor, self.prepare()).map_err(|stop| stop.to_string())?;
        world.crash(reactor, CrashKind::Power);
        prepared.map_err(text("preparing"))?;
        for round in 0..self.rng.range(1..5) {
            let reactor = world.reactor();
            let ran = world.run(&reactor, self.round()).map_err(|stop| format!("round {round}: {stop}"))?;
            // Who is still there loses what it knows, and its watches; what is on its way does not arrive.
            world.crash(reactor, CrashKind::Power);
            self.violation()?;
            ran.map_err(|error| format!("round {round}: {error:?}"))?;
            self.watched.clients.borrow_mut().iter().for_each(RamClient::die);
            self.cluster.expire_watches();
            let reactor = world.reactor();
            let looked = world.run(&reactor, self.look()).map_err(|stop| format!("after round {round}: {stop}"))?;
            world.crash(reactor, CrashKind::Power);
            self.violation()?;
            looked.map_err(|error| format!("after round {round}: {error:?}"))?;
        }
        // The observer holds the cluster, which holds its observer.
        self.cluster.observe(|_, _| {});
        self.tally.requests = self.seen.answered.get();
        self.tally.transactions = self.watched.transactions.get();
        self.tally.fenced = self.cluster.blocklisted().len() as u64;
        Ok(self.tally)
    }

    fn violation(&self) -> std::result::Result<(), String> {
        if let Some(lie) = &*self.watched.lie.borrow() {
            return Err(format!("the object map is not true: {lie}"));
        }
        self.oracle.borrow().violation().map_or(Ok(()), |text| Err(text.to_owned()))
    }

    /// Makes the image, perhaps as a clone of one that is full of data.
    async fn prepare(&mut self) -> Result<()> {
        let backend = self.cluster.client().pool(POOL);
        let options = CreateOptions {
            size: self.size,
            object_size: OBJECT,
            striping: draw_striping(&mut self.rng, OBJECT),
            features: Some(self.features),
            ..CreateOptions::default()
        };
        forebay_image::create(&backend, NAME, options.clone()).await?;
        self.oracle.borrow_mut().set_size(self.size, self.size);
        if self.rng.coin() {
            self.tally.clones = 1;
            let size = self.rng.range(1..OBJECTS_MAX + 1) * OBJECT;
            let striping = draw_striping(&mut self.rng, OBJECT);
            forebay_image::create(&backend, "base", CreateOptions { size, striping, ..options }).await?;
            let base = Image::open(backend.clone(), "base", ImageOpenOptions::default()).await?;
            let overlap = size.min(self.size) - self.rng.below(2) * self.rng.below(OBJECT);
            self.parent = vec![0; size as usize];
            for object in 0..size / OBJECT {
                if self.rng.one_in(3) {
                    continue;
                }
                self.version.set(self.version.get() + 1);
                let data: BufList = stamp(object * OBJECT, OBJECT as usize, self.version.get()).into();
                let write = |data| BlockRequest::Write { offset: object * OBJECT, data, fua: true };
                base.submit(write(data.clone())).await?;
                self.parent[(object * OBJECT) as usize..][..OBJECT as usize].copy_from_slice(&data.to_vec());
                let len = OBJECT.min(overlap.saturating_sub(object * OBJECT));
                if len > 0 {
                    self.tell(&write(data.slice(0..len as usize)));
                }
            }
            base.close().await;
            let parent = closed_image(&backend, "base", None).await?;
            let snap = parent.take_snapshot(&*backend, "gold").await?;
            let child = closed_image(&backend, NAME, None).await?;
            child.set_parent(&*backend, POOL, &parent.id, snap, overlap).await?;
            self.overlap = Some(overlap);
        }
        if self.world.seed().is_multiple_of(3) {
            // Who fences a client waits until that reads nothing from its cache any more.
            Images::of(&backend).set_metadata(NAME, OWN_BLOCKS_KEY, b"true".to_vec()).await?;
        }
        *self.watched.id.borrow_mut() = Some(forebay_image::info(&backend, NAME).await?.id);
        Ok(())
    }

    /// Tells the oracle of a change that is there already.
    fn tell(&self, request: &BlockRequest) {
        let mut oracle = self.oracle.borrow_mut();
        let token = oracle.submit(request);
        oracle.complete(token, &Ok(BlockReply::Done));
    }

    /// Several clients at once, until all that live are done.
    async fn round(&mut self) -> Result<()> {
        let count = self.rng.range(1..4) as usize;
        self.tally.clients += count as u64;
        let clients: Vec<RamClient> = (0..count).map(|_| self.cluster.client()).collect();
        self.watched.clients.borrow_mut().clone_from(&clients);
        let resizes = self.rng.one_in(3);
        // A client that is not notified of another size would be right by its own; and a resize may fail with its
        // client.
        let breaks = (!resizes && self.rng.one_in(4)).then(|| self.rng.below(120));
        let death = (count > 1 && self.rng.one_in(3)).then(|| (self.rng.below(120), count - 1));
        *self.watched.fate.borrow_mut() = Fate { death, breaks };
        self.watched.turn.set(0);
        self.watched.dead.set(false);
        self.watched.broken.set(false);
        let cache = LifeCache::open(&self.world, true).await;
        let over: Vec<Rc<Cell<bool>>> = clients.iter().map(|_| Rc::default()).collect();
        let mut images = Vec::new();
        for (number, client) in clients.iter().enumerate() {
            let opened = Image::open(client.pool(POOL), NAME, ImageOpenOptions::default());
            let image = match timeout(PATIENCE, opened).await {
                Ok(opened) => opened?,
                // Its own death may have come while it opened.
                Err(_) if self.watched.dead.get() && number == count - 1 => {
                    over[number].set(true);
                    continue;
                }
                Err(_) => return Err(Error::new(ErrorKind::TimedOut, "an image is not opened")),
            };
            if cache.is_some() {
                image.cache_own_blocks(true);
            }
            let host = Host {
                image: image.clone(),
                oracle: self.oracle.clone(),
                watched: self.watched.clone(),
                gone: over[number].clone(),
                world: self.world.clone(),
                number,
            };
            images.push(image);
            let mut load = BlockLoad::draw(&mut self.rng, self.size.max(BLOCK));
            load.tasks = load.tasks.min(2);
            load.requests = 5 + self.rng.below(40) as usize;
            load.seen = self.seen.clone();
            let (oracle, version, mut rng) = (self.oracle.clone(), self.version.clone(), self.rng.fork());
            let done = over[number].clone();
            drop(spawn(async move {
                load.run_on(Rc::new(host), oracle, version, &mut rng).await;
                done.set(true);
            }));
        }
        let (watched, cluster) = (self.watched.clone(), self.cluster.clone());
        drop(spawn(async move {
            while !watched.dead.get() {
                sleep(Duration::from_millis(1)).await;
            }
            sleep(WATCH_TIMEOUT).await;
            cluster.expire_watches();
        }));
        if resizes && let Some(image) = images.first() {
            for _ in 0..self.rng.range(1..4) {
                self.resize(image).await?;
                sleep(Duration::from_micros(self.rng.below(2000))).await;
            }
        }
        let watched = self.watched.clone();
        let all = async {
            loop {
                let dead = |number: usize| watched.dead.get() && number == count - 1;
                if (0..count).all(|number| over[number].get() || dead(number)) || watched.lie.borrow().is_some() {
                    return;
                }
                sleep(Duration::from_millis(1)).await;
            }
        };
        if timeout(PATIENCE, all).await.is_err() {
            return Err(Error::new(ErrorKind::TimedOut, format!("the load is not over after {PATIENCE:?}")));
        }
        let (hits, invalidated) = cache.as_ref().map(LifeCache::counts).unwrap_or_default();
        (self.tally.own_hits, self.tally.own_invalidated) =
            (self.tally.own_hits + hits, self.tally.own_invalidated + invalidated);
        self.tally.deaths += u64::from(self.watched.dead.get());
        self.tally.breaks += u64::from(self.watched.broken.get());
        if self.rng.coin() && !self.watched.broken.get() {
            let dead = self.watched.dead.get();
            let living = if dead { &images[..images.len().min(count - 1)] } else { &images[..] };
            for image in living {
                image.clone().close().await;
            }
        }
        Ok(())
    }

    async fn resize(&mut self, image: &Rc<Image>) -> Result<()> {
        let (from, to) = (self.size, self.rng.below(OBJECTS_MAX * OBJECT / 512) * 512 + 512);
        let cut = Extent::new(to, from.saturating_sub(to));
        let token = {
            let mut oracle = self.oracle.borrow_mut();
            oracle.set_size(from.min(to), from.max(to));
            // Other clients hear of it when it is done: until then they may find what the parent has where an object is
            // gone, as those of librbd may.
            let uncovered = Extent::new(to, self.overlap.unwrap_or(0).saturating_sub(to));
            let parent = (to < from && uncovered.len > 0).then(|| {
                let bytes = &self.parent[to as usize..uncovered.end() as usize];
                oracle.submit(&BlockRequest::Write { offset: to, data: Buf::copy_of(bytes).into(), fua: false })
            });
            (to < from).then(|| (oracle.cut_begins(cut), parent))
        };
        image.resize(to, true, |_| {}).await?;
        let mut oracle = self.oracle.borrow_mut();
        if let Some((token, parent)) = token {
            if let Some(parent) = parent {
                oracle.complete(parent, &Ok(BlockReply::Done));
            }
            oracle.cut_ends(token, cut, &Ok(()));
        }
        oracle.set_size(to, to);
        self.size = to;
        self.overlap = self.overlap.map(|overlap| overlap.min(to));
        let count = if to < from { &mut self.tally.shrunk } else { &mut self.tally.grown };
        *count += 1;
        Ok(())
    }

    /// A new client looks at everything, and may take a snapshot.
    async fn look(&mut self) -> Result<()> {
        {
            // All that was answered is there for good.
            let mut oracle = self.oracle.borrow_mut();
            let token = oracle.submit(&BlockRequest::Flush);
            oracle.complete(token, &Ok(BlockReply::Done));
            oracle.crash(CrashKind::Power);
            oracle.set_size(self.size, self.size);
        }
        let backend = self.cluster.client().pool(POOL);
        let image = Image::open(backend.clone(), NAME, ImageOpenOptions::default()).await?;
        if image.size() != self.size {
            let text = format!("the image has {} bytes instead of {}", image.size(), self.size);
            return Err(Error::new(ErrorKind::Invalid, text));
        }
        // As who has the lock, and goes by the object map.
        image.take_lock().await?;
        verify_blocks(&*image, &self.oracle, self.size, CrashKind::Power).await?;
        let content = read_all(&image).await?;
        image.close().await;
        for Kept { name, content } in &self.kept {
            let then = Image::open(backend.clone(), &format!("{NAME}@{name}"), ImageOpenOptions::default()).await?;
            if read_all(&then).await? != *content {
                return Err(Error::new(ErrorKind::Invalid, format!("snapshot {name} is not what it was")));
            }
            then.close().await;
        }
        Images::close_all(&backend, Duration::from_secs(60)).await;
        if self.kept.len() < 3 && self.rng.coin() {
            let name = format!("s{}", self.kept.len());
            closed_image(&backend, NAME, self.overlap).await?.take_snapshot(&*backend, &name).await?;
            self.kept.push(Kept { name, content });
            self.tally.snapshots += 1;
        }
        Ok(())
    }
}

async fn read_all(image: &Image) -> Result<Vec<u8>> {
    let extent = Extent::new(0, image.size());
    Ok(image.submit(BlockRequest::Read(extent)).await?.into_data().to_vec())
}

/// Looks at the object map after every transaction, and lets happen what is to happen then.
fn observe(cluster: &RamCluster, watched: &Rc<Watched>, world: &World) {
    let (of, watched, bare, world) = (cluster.clone(), watched.clone(), cluster.bare(POOL), world.clone());
    cluster.observe(move |_, object| {
        watched.transactions.set(watched.transactions.get() + 1);
        let turn = watched.turn.get() + 1;
        world.note(|| format!("{turn}: {object} has changed"));
        watched.turn.set(turn);
        let id = watched.id.borrow().clone();
        if let Some(lie) = id.and_then(|id| lie_of_map(&bare, &id, object)) {
            watched.lie.borrow_mut().get_or_insert(lie);
        }
        let Fate { death, breaks } = watched.fate.borrow().clone();
        if let Some((_, client)) = death.filter(|(at, _)| turn == *at) {
            watched.clients.borrow()[client].die();
            watched.dead.set(true);
            world.note(|| format!("client {client} dies"));
        }
        if breaks == Some(turn) {
            watched.broken.set(true);
            world.note(|| "all watches break".to_owned());
            of.break_watches();
        }
    });
}

/// The model answers at once.
fn at_once<T>(work: impl Future<Output = T>) -> T {
    match pin!(work).poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(value) => value,
        Poll::Pending => unreachable!("the model of objects answers at once"),
    }
}

/// Returns the fault of an image's object map since a transaction on this object, if there is one.
fn lie_of_map(bare: &Rc<RamBackend>, id: &str, object: &ObjectName) -> Option<String> {
    let data = format!("rbd_data.{id}.");
    let map = ObjectName::new(format!("rbd_object_map.{id}"));
    let number = |name: &str| usize::from_str_radix(name.strip_prefix(&data)?, 16).ok();
    let changed = number(object.name());
    if changed.is_none() && *object != map {
        return None;
    }
    let size = at_once(bare.stat(&map, SnapId::HEAD)).ok()?.size;
    let bytes = at_once(bare.read(&map, ObjectRead::head(0, size))).ok()?.fill(Extent::new(0, size)).to_vec();
    let count = u64::from_le_bytes(bytes.get(10..18)?.try_into().ok()?) as usize;
    let state = |object: usize| bytes[18 + object / 4] >> (6 - object % 4 * 2) & 3;
    let is_missing = |object: usize| object >= count || state(object) == 0;
    let candidates = match changed {
        Some(object) => object..object + 1,
        // The last set of objects may have more of them, each with less.
        None => 0..2 * OBJECTS_MAX as usize + 8,
    };
    candidates.filter(|object| is_missing(*object)).find_map(|object| {
        let name = ObjectName::new(format!("{data}{object:016x}"));
        at_once(bare.stat(&name, SnapId::HEAD)).ok()?;
        let states: Vec<u8> = (0..count).map(state).collect();
        Some(format!("object {object} is there, and the map is {states:?}"))
    })
}

/// Finds what `rbd` must know of an image that no client has open.
async fn closed_image(backend: &Rc<dyn ObjectBackend>, image: &str, overlap: Option<u64>) -> Result<ClosedImage> {
    let info = forebay_image::info(backend, image).await?;
    let mapped = info.features.has(ImageFeatures::OBJECT_MAP).then(|| info.objects());
    Ok(ClosedImage { id: info.id, size: info.size, mapped, overlap })
}
