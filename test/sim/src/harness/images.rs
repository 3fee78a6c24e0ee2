//! Images under load: made, resized, read, written and removed, with an oracle for the content of each, and one fact
//! more that it knows of each name: whether there is an image of that name, and how large.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;

use forebay_block::{BlockDevice, BlockRequest, Error, ErrorKind, Extent, ObjectBackend, ObjectName, Result};
use forebay_image::{CreateOptions, Image, ImageOpenOptions, Images, RemoveOptions, Striping};
use forebay_reactor::{sleep, spawn};

use super::own_blocks::{LifeCache, is_cached};
use super::scenario::Scenario;
use super::striping::draw_striping;
use crate::oracle::{BLOCK, BlockOracle, CheckedDevice, Expected, Token};
use crate::rng::Rng;
use crate::workload::{BlockLoad, Seen, verify_blocks};
use crate::world::{CrashKind, World};

/// Expected state of a name: no image, or the size of the image in bytes.
type Fact = Option<u64>;

/// Times that an image is made, used, and perhaps removed, in one load.
const ROUNDS_MAX: u64 = 3;

/// One name, and what is known of it.
struct Slot {
    name: String,
    object_size: u64,
    striping: Option<Striping>,
    /// Sizes are drawn up to this.
    size_max: u64,
    /// Oracle of the content of the image that exists, or existed last.
    oracle: Rc<RefCell<BlockOracle>>,
    /// Image that exists now; the outer none: unknown before the next life.
    live: Option<Fact>,
    /// All that may be there after a crash.
    crash: Vec<Fact>,
    /// Its entry may be in the directory, though there be no image.
    listed: bool,
    /// The id of the image that was removed last.
    removed: Option<String>,
    /// Set when metadata that leads to it is damaged: it is not verified any more.
    lost: bool,
}

/// Images under load; they outlive crashes.
pub(super) struct ImageLoad {
    slots: Vec<Rc<RefCell<Slot>>>,
    common: Rc<Common>,
    /// Requests of each load on an image; none: drawn.
    requests: Option<usize>,
    /// Writes that a close in flight makes durable.
    closing: Vec<Token>,
}

/// State shared by the tasks of all images.
struct Common {
    expected: Cell<Expected>,
    violation: RefCell<Option<String>>,
    version: Rc<Cell<u64>>,
    seen: Rc<Seen>,
    rooms: Cell<u64>,
    world: World,
    crowded: bool,
}

impl Common {
    fn violated(&self, text: String) {
        self.violation.borrow_mut().get_or_insert(text);
    }

    /// The answer to a control request; none when the environment failed it (or it should not have failed at all).
    fn answer<T>(&self, what: impl Fn() -> String, result: Result<T>) -> Option<T> {
        self.seen.note(&result);
        self.world.note(|| format!("{}: {:?}", what(), result.as_ref().err()));
        match result {
            Ok(value) => return Some(value),
            Err(error) if self.expected.get().allows(error.kind()) => {}
            Err(error) => self.violated(format!("{}: {error:?}", what())),
        }
        None
    }
}

impl ImageLoad {
    pub(super) fn draw(rng: &mut Rng, scenario: &Scenario, size: u64, world: &World) -> Self {
        let count = rng.range(1..4);
        let share = if scenario.crowded { 2 * size / count } else { size / 5 / count };
        let common = Rc::new(Common {
            expected: Cell::new(Expected::nothing()),
            violation: RefCell::default(),
            version: Rc::default(),
            seen: Rc::default(),
            rooms: Cell::new(0),
            world: world.clone(),
            crowded: scenario.crowded,
        });
        let slot = |index| {
            let object_size = *rng.pick(&[64 << 10, 64 << 10, 128 << 10, 1 << 20]);
            Slot {
                name: format!("vm{index}"),
                object_size,
                striping: draw_striping(rng, object_size),
                size_max: share.clamp(16 * BLOCK, 1 << 20),
                oracle: Rc::new(RefCell::new(BlockOracle::new(Expected::nothing()))),
                live: Some(None),
                crash: vec![None],
                listed: false,
                removed: None,
                lost: false,
            }
        };
        let slots = (0..count).map(slot).map(|slot| Rc::new(RefCell::new(slot))).collect();
        Self { slots, common, requests: None, closing: Vec::new() }
    }

    pub(super) fn seen(&self) -> &Seen {
        &self.common.seen
    }

    pub(super) fn expect(&mut self, expected: Expected) {
        self.common.expected.set(expected);
        for slot in &self.slots {
            slot.borrow().oracle.borrow_mut().expect(expected);
        }
    }

    pub(super) fn violation(&self) -> Option<String> {
        let of_image = |slot: &Rc<RefCell<Slot>>| {
            let slot = slot.borrow();
            slot.oracle.borrow().violation().map(|text| format!("image {}: {text}", slot.name))
        };
        self.common.violation.borrow().clone().or_else(|| self.slots.iter().find_map(of_image))
    }

    /// Looks at every name after a crash, or an orderly end.
    pub(super) async fn verify(&mut self, backend: Rc<dyn ObjectBackend>) -> Result<()> {
        // Whatever the end was, what is there now is there for good after this, and is looked at only then.
        backend.flush().await?;
        let images = Images::of(&backend);
        for slot in &self.slots {
            let corrupt = verify_slot(slot, &images, &self.common).await?;
            self.common.seen.corrupt.set(self.common.seen.corrupt.get() + corrupt as u64);
        }
        let damaged = self.common.expected.get().corrupt;
        match images.list().await {
            Ok(listed) => self.check_list(&listed),
            Err(error) if damaged && error.kind() == ErrorKind::Corrupt => {}
            Err(error) => return Err(error),
        }
        for slot in &self.slots {
            let Some(id) = slot.borrow().removed.clone() else { continue };
            match objects_of(&*backend, &id).await {
                Ok(left) if left.is_empty() => {}
                Ok(left) => {
                    self.common.violated(format!("image {}: removed, but {left:?} is left", slot.borrow().name))
                }
                Err(error) if damaged && error.kind() == ErrorKind::Corrupt => {}
                Err(error) => return Err(error),
            }
        }
        Ok(())
    }

    fn check_list(&self, listed: &[String]) {
        for slot in &self.slots {
            let slot = slot.borrow();
            let is_listed = listed.contains(&slot.name);
            let must = matches!(slot.live, Some(Some(_)));
            if !slot.lost && ((must && !is_listed) || (is_listed && !slot.listed)) {
                self.common.violated(format!("the list is {listed:?}, and {} is {:?}", slot.name, slot.live));
            }
        }
        let known = |name: &String| self.slots.iter().any(|slot| slot.borrow().name == *name);
        if let Some(stranger) = listed.iter().find(|name| !known(name)) {
            self.common.violated(format!("an image {stranger} is listed, which nobody made"));
        }
    }

    pub(super) async fn run(&mut self, backend: Rc<dyn ObjectBackend>, rng: &mut Rng, requests: Option<usize>) {
        self.requests = requests.or(self.requests);
        let _cache = LifeCache::open(&self.common.world, false).await;
        let rounds = if requests.is_some() { 1 } else { rng.range(1..ROUNDS_MAX + 1) };
        let tasks: Vec<_> = (self.slots.iter())
            .map(|slot| {
                let user = User {
                    slot: slot.clone(),
                    images: Images::of(&backend),
                    common: self.common.clone(),
                    requests: self.requests,
                    rng: rng.fork(),
                };
                spawn(user.run(rounds))
            })
            .collect();
        for task in tasks {
            task.await;
        }
    }

    /// If the store was full: removing must work, and after it there must be room again.
    pub(super) async fn make_room(&mut self, backend: Rc<dyn ObjectBackend>) -> Result<()> {
        let full = self.common.seen.no_space.get();
        if self.common.rooms.replace(full) == full {
            return Ok(());
        }
        let images = Images::of(&backend);
        for slot in &self.slots {
            let there = matches!(slot.borrow().live, Some(Some(_)));
            if there && !slot.borrow().lost {
                remove(slot, &images, &self.common, false).await;
            }
        }
        backend.flush().await?;
        super::load::check_room(&*backend).await
    }

    pub(super) fn close_begins(&mut self) {
        let begin = |slot: &Rc<RefCell<Slot>>| slot.borrow().oracle.borrow_mut().submit(&BlockRequest::Flush);
        self.closing = self.slots.iter().map(begin).collect();
    }

    pub(super) fn closed(&mut self) {
        for (slot, token) in self.slots.iter().zip(std::mem::take(&mut self.closing)) {
            slot.borrow().oracle.borrow_mut().complete(token, &Ok(forebay_block::BlockReply::Done));
        }
    }

    pub(super) fn crash(&mut self, kind: CrashKind) {
        for slot in &self.slots {
            let mut slot = slot.borrow_mut();
            slot.oracle.borrow_mut().crash(kind);
            slot.live = None;
        }
    }
}

/// Objects that belong to the image of that id.
async fn objects_of(backend: &dyn ObjectBackend, id: &str) -> Result<Vec<ObjectName>> {
    const PAGE: usize = 100;
    let mut found = Vec::new();
    let mut cursor = None;
    loop {
        let page = backend.list(None, cursor, PAGE).await?;
        found.extend(page.names.into_iter().filter(|name| name.name().contains(id)));
        cursor = page.next;
        if cursor.is_none() {
            return Ok(found);
        }
    }
}

/// Verifies what a recovery has brought back of a name; returns the number of corrupt blocks.
async fn verify_slot(slot: &RefCell<Slot>, images: &Rc<Images>, common: &Common) -> Result<usize> {
    let (name, oracle) = {
        let slot = slot.borrow();
        if slot.lost {
            return Ok(0);
        }
        (slot.name.clone(), slot.oracle.clone())
    };
    let damaged = common.expected.get().corrupt;
    let image = match images.open(&name, ImageOpenOptions { read_only: true }).await {
        Ok(image) => Some(image),
        Err(error) if error.kind() == ErrorKind::NotFound => None,
        Err(error) if damaged && error.kind() == ErrorKind::Corrupt => {
            slot.borrow_mut().lost = true;
            return Ok(1);
        }
        Err(error) => return Err(error),
    };
    let found: Fact = image.as_ref().map(|image| image.size());
    common.world.note(|| format!("image {name}: found {found:?}"));
    {
        let mut slot = slot.borrow_mut();
        if !slot.crash.contains(&found) {
            common.violated(format!("image {name}: {found:?} is there; allowed are {:?}", slot.crash));
        }
        (slot.live, slot.crash) = (Some(found), vec![found]);
    }
    let (Some(image), Some(size)) = (image, found) else { return Ok(0) };
    {
        let mut oracle = oracle.borrow_mut();
        oracle.set_size(size, size);
        // Once the header tells a size, nothing is left past it.
        oracle.cut(Extent::new(size, u64::MAX / 2 - size));
    }
    match verify_blocks(&*image, &oracle, size, CrashKind::Power).await {
        Err(error) if damaged && error.kind() == ErrorKind::Corrupt => {
            // Not even what is stored where can be told.
            slot.borrow_mut().lost = true;
            Ok(1)
        }
        other => other,
    }
}

/// Removes an image that is there; answers whether that is done.
async fn remove(slot: &Rc<RefCell<Slot>>, images: &Rc<Images>, common: &Common, force: bool) -> bool {
    let (name, oracle, size) = {
        let mut slot = slot.borrow_mut();
        let Some(Some(size)) = slot.live.take() else { unreachable!("only what is there is removed") };
        slot.crash.push(None);
        (slot.name.clone(), slot.oracle.clone(), size)
    };
    let id = images.info(&name).await.map(|info| info.id);
    let what = || format!("removing image {name} (force: {force})");
    let Some(id) = common.answer(what, id) else { return false };
    if force {
        oracle.borrow_mut().set_ending();
    }
    let all = Extent::new(0, size);
    let token = oracle.borrow_mut().cut_begins(all);
    let removed = images.remove(&name, RemoveOptions { force }, |_| {}).await;
    oracle.borrow_mut().cut_ends(token, all, &removed.as_ref().map(drop).map_err(|error| error.kind().into()));
    if common.answer(what, removed).is_none() {
        return false;
    }
    let mut slot = slot.borrow_mut();
    (slot.live, slot.crash, slot.listed, slot.removed) = (Some(None), vec![None], false, Some(id));
    true
}

/// Client of one image.
struct User {
    slot: Rc<RefCell<Slot>>,
    images: Rc<Images>,
    common: Rc<Common>,
    requests: Option<usize>,
    rng: Rng,
}

impl User {
    /// Goes on as long as it knows what is there.
    async fn run(mut self, rounds: u64) {
        for _ in 0..rounds {
            let known = { self.slot.borrow().live.filter(|_| !self.slot.borrow().lost) };
            let there = match known {
                None => return,
                Some(None) => self.create().await,
                Some(Some(_)) => true,
            };
            if !there || !self.work().await {
                return;
            }
            let there = matches!(self.slot.borrow().live, Some(Some(_)));
            if there && self.rng.one_in(3) && !remove(&self.slot, &self.images, &self.common, false).await {
                return;
            }
        }
    }

    fn draw_size(&mut self) -> u64 {
        let most = self.slot.borrow().size_max;
        let size = self.rng.below(most / BLOCK + 1) * BLOCK;
        // An end within a block, now and then.
        if self.rng.one_in(4) { (size + self.rng.below(BLOCK)).min(most) } else { size }
    }

    async fn create(&mut self) -> bool {
        let size = self.draw_size();
        let (name, object_size, striping) = {
            let mut slot = self.slot.borrow_mut();
            let mut oracle = BlockOracle::new(self.common.expected.get());
            oracle.set_size(size, size);
            slot.oracle = Rc::new(RefCell::new(oracle));
            slot.crash.push(Some(size));
            slot.live = None;
            slot.listed = true;
            (slot.name.clone(), slot.object_size, slot.striping)
        };
        let options = CreateOptions { size, object_size, striping, ..CreateOptions::default() };
        let created = self.images.create(&name, options).await;
        let what = || format!("creating image {name} of {size} bytes");
        if self.common.answer(what, created).is_some() {
            let mut slot = self.slot.borrow_mut();
            (slot.live, slot.crash) = (Some(Some(size)), vec![Some(size)]);
            return true;
        }
        // It is left alone in this life, but may be taken away to make room.
        self.slot.borrow_mut().live = match self.images.info(&name).await {
            Ok(info) => Some(Some(info.size)),
            Err(error) if error.kind() == ErrorKind::NotFound => Some(None),
            Err(_) => None,
        };
        false
    }

    /// A load on the image, while it is resized, or taken away.  False when it is to be left alone.
    async fn work(&mut self) -> bool {
        let (name, oracle, size_max) = {
            let slot = self.slot.borrow();
            (slot.name.clone(), slot.oracle.clone(), slot.size_max)
        };
        let opened = self.images.open(&name, ImageOpenOptions::default()).await;
        let Some(image) = self.common.answer(|| format!("opening image {name}"), opened) else { return false };
        image.cache_own_blocks(is_cached(self.common.world.seed()));
        // It reaches past the end now and then.
        let mut load = BlockLoad::draw(&mut self.rng, size_max);
        load.seen = self.common.seen.clone();
        if self.common.crowded {
            (load.span, load.blocks_max) = (size_max / BLOCK * BLOCK, 40);
            load.requests *= 2;
        }
        load.requests = self.requests.unwrap_or(load.requests);
        let device = CheckedDevice::new(image.clone(), oracle.clone());
        let (version, mut rng) = (self.common.version.clone(), self.rng.fork());
        let writer = spawn(async move { load.run(device, oracle, version, &mut rng).await });
        let mut known = true;
        for _ in 0..*self.rng.pick(&[0, 0, 1, 3]) {
            sleep(Duration::from_micros(self.rng.below(20_000))).await;
            known = known && self.resize(&image).await;
        }
        if known && self.rng.one_in(6) {
            sleep(Duration::from_micros(self.rng.below(20_000))).await;
            known = remove(&self.slot, &self.images, &self.common, true).await;
        }
        writer.await;
        known
    }

    async fn resize(&mut self, image: &Rc<Image>) -> bool {
        let to = self.draw_size();
        let (from, oracle) = {
            let mut slot = self.slot.borrow_mut();
            let Some(Some(from)) = slot.live.take() else { return false };
            slot.crash = vec![Some(from), Some(to)];
            (from, slot.oracle.clone())
        };
        let cut = Extent::new(to, from.saturating_sub(to));
        let token = {
            let mut oracle = oracle.borrow_mut();
            oracle.set_size(from.min(to), from.max(to));
            (to < from).then(|| oracle.cut_begins(cut))
        };
        let resized = image.resize(to, true, |_| {}).await;
        let told = resized.as_ref().map(drop).map_err(|error| Error::from(error.kind()));
        {
            let mut oracle = oracle.borrow_mut();
            if let Some(token) = token {
                oracle.cut_ends(token, cut, &told);
            }
            let now = if told.is_ok() { to } else { from };
            oracle.set_size(now, now);
        }
        let what = || format!("resizing an image from {from} to {to} bytes");
        let done = self.common.answer(what, resized).is_some();
        // When it fails, the old size is shown again.
        self.slot.borrow_mut().live = Some(Some(from));
        if done {
            let mut slot = self.slot.borrow_mut();
            (slot.live, slot.crash) = (Some(Some(to)), vec![Some(to)]);
            if image.geometry().size != to {
                self.common.violated(format!("{}, and it has {} bytes", what(), image.geometry().size));
            }
        }
        done
    }
}
