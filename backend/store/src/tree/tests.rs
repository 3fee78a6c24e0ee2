//! Property tests of the tree against a plain map, with nodes that are damaged meanwhile.

use std::collections::{BTreeMap, BTreeSet};

use forebay_accel::crc32c::crc32c;
use forebay_block::Buf;
use forebay_reactor::{File, OpenOptions};
use forebay_sim::{DiskFaults, Faults, Rng, World};

use super::*;
use crate::cache::Cache;
use crate::device::StoreDevice;
use crate::format::superblock::SEGMENTS_START;
use crate::format::{BLOCK, BLOCK64};
use crate::segments::{LiveTable, SegmentGeometry, Segments};

const DISK: &str = "/disk";
const SIZE: u64 = 64 << 20;
const KEYS: u64 = 700;

/// Disk of nodes, each of which begins at a block of its own.
struct NodeDisk {
    media: Rc<Media>,
    next: Cell<u64>,
    unwritten: RefCell<Vec<(u64, Vec<u8>)>>,
    /// Nodes that were written and not released.
    live: RefCell<HashSet<BlobPtr>>,
    /// Nodes written and released since the last change of the tree, to undo a change that failed.
    added: RefCell<Vec<BlobPtr>>,
    released: RefCell<Vec<BlobPtr>>,
}

impl NodeDisk {
    fn new() -> Self {
        let file = File::open(DISK, OpenOptions::read_write().direct()).expect("the disk");
        let segment_size = 1 << 20;
        let geometry = SegmentGeometry { segment_size, segment_count: ((SIZE - SEGMENTS_START) / segment_size) as u32 };
        let segments = Segments::new(geometry, LiveTable::new(geometry.segment_count));
        Self {
            media: Rc::new(Media::new(StoreDevice::Single(file), 1, Rc::new(RefCell::new(segments)), Cache::new(0), 0)),
            next: Cell::new(SEGMENTS_START),
            unwritten: RefCell::default(),
            live: RefCell::default(),
            added: RefCell::default(),
            released: RefCell::default(),
        }
    }

    /// Returns the tree without anything in memory.
    fn tree(&self) -> Tree {
        Tree::new(self.media.clone(), 64 << 20)
    }

    async fn write_nodes(&self) {
        for (at, mut bytes) in self.unwritten.take() {
            bytes.resize(bytes.len().next_multiple_of(BLOCK), 0);
            self.media.device.file().expect("one file").write_at(Buf::copy_of(&bytes), at).await.expect("write");
        }
    }

    async fn apply(&self, root: BlobPtr, changes: &[(TreeKey, TreeChange)]) -> Result<BlobPtr> {
        self.added.take();
        self.released.take();
        let applied = self.tree().apply(root, changes, self).await;
        self.write_nodes().await;
        let mut live = self.live.borrow_mut();
        match applied.is_ok() {
            true => self.released.take().iter().for_each(|ptr| assert!(live.remove(ptr), "released twice: {ptr:?}")),
            false => self.added.take().iter().for_each(|ptr| assert!(live.remove(ptr))),
        }
        applied
    }

    async fn damage(&self, world: &World, ptr: BlobPtr, bad_sector: bool) {
        let at = ptr.addr / BLOCK64 * BLOCK64;
        if bad_sector {
            assert!(world.set_bad_sector(DISK, at));
            return;
        }
        let mut block = self.media.read_raw(at, BLOCK).await.expect("read").to_vec();
        block[0] ^= 0xFF;
        self.media.device.file().expect("one file").write_at(Buf::copy_of(&block), at).await.expect("write");
    }
}

impl NodeSink for NodeDisk {
    fn write(&self, _: &Node, _: &[u8], bytes: &[u8]) -> BlobPtr {
        let addr = self.next.get();
        self.next.set((addr + bytes.len() as u64).next_multiple_of(BLOCK64));
        let ptr = BlobPtr { addr, len: bytes.len() as u32, crc: crc32c(bytes) };
        self.unwritten.borrow_mut().push((addr, bytes.to_vec()));
        self.live.borrow_mut().insert(ptr);
        self.added.borrow_mut().push(ptr);
        ptr
    }

    fn release(&self, ptr: BlobPtr) {
        self.released.borrow_mut().push(ptr);
    }

    fn pause(&self) -> BoxFuture<'_, ()> {
        Box::pin(async {})
    }
}

/// Returns a key long enough that few of them fill a node.
fn key(number: u64) -> TreeKey {
    format!("{number:06}{}", "k".repeat(200)).into_bytes()
}

#[derive(Debug, Clone, PartialEq, Eq)]
enum Expected {
    Value(Vec<u8>),
    Absent,
    Lost,
}

async fn look(tree: &Tree, root: BlobPtr, number: u64) -> Expected {
    match tree.get(root, &key(number)).await {
        Ok(Some(value)) => Expected::Value(value),
        Ok(None) => Expected::Absent,
        Err(error) if error.kind() == ErrorKind::Corrupt || is_of_bad_sector(&error) => Expected::Lost,
        Err(error) => panic!("{error:?}"),
    }
}

/// Returns whether the path to a key leads through the node at `addr`.
async fn leads_through(tree: &Tree, root: BlobPtr, number: u64, addr: u64) -> bool {
    let mut at = root;
    loop {
        if at.addr == addr {
            return true;
        }
        let Ok(node) = tree.load(at, None).await else { return false };
        let Node::Inner { children, .. } = &*node else { return false };
        at = children[child_of(children, &key(number))].1;
    }
}

fn some_changes(rng: &mut Rng) -> BTreeMap<u64, TreeChange> {
    let mut changes = BTreeMap::new();
    let (from, width_bits, removes) = (rng.below(KEYS), rng.below(9), rng.below(4));
    let width = 1 + rng.below(1 << width_bits);
    for _ in 0..1 + rng.below(60) {
        let change = match rng.below(5) {
            0 => TreeChange::Touch,
            kind if kind <= removes => TreeChange::Delete,
            _ => TreeChange::Put(vec![rng.below(256) as u8; rng.below(500) as usize]),
        };
        changes.insert((from + rng.below(width)) % KEYS, change);
    }
    changes
}

fn in_tree_form(changes: &BTreeMap<u64, TreeChange>) -> Vec<(TreeKey, TreeChange)> {
    changes.iter().map(|(&number, change)| (key(number), change.clone())).collect()
}

fn world(seed: u64) -> World {
    let world = World::new(seed, Faults::none());
    world.add_file(DISK, SIZE, 4096);
    world
}

fn run<T>(world: &World, future: impl Future<Output = T>) -> T {
    world.run(&world.reactor(), future).unwrap_or_else(|stop| panic!("{stop}"))
}

/// Every key is what it was last set to, or lost since a node on its path was damaged; and no node that can be reached
/// is released.
async fn damaged_nodes_lose_their_own_keys_only(world: &World, seed: u64) {
    let mut rng = Rng::new(seed);
    let disk = NodeDisk::new();
    let mut expected: Vec<Expected> = vec![Expected::Absent; KEYS as usize];
    let filled: BTreeMap<u64, TreeChange> =
        (0..KEYS).filter(|_| rng.below(8) > 0).map(|number| (number, TreeChange::Put(vec![7; 300]))).collect();
    let mut root = BlobPtr::default();
    let (mut changes, mut damaged_some) = (filled, false);
    for round in 0..24 {
        root = disk.apply(root, &in_tree_form(&changes)).await.expect("apply");
        for (&number, change) in &changes {
            match change {
                TreeChange::Put(value) => expected[number as usize] = Expected::Value(value.clone()),
                TreeChange::Delete => expected[number as usize] = Expected::Absent,
                TreeChange::Touch => {}
            }
        }
        let tree = disk.tree();
        for number in 0..KEYS {
            assert_eq!(look(&tree, root, number).await, expected[number as usize], "round {round}, key {number}");
        }
        let mut nodes: Vec<(BlobPtr, u8)> = Vec::new();
        tree.walk(root, |ptr, node| match node {
            Ok(node) => nodes.push((ptr, node.level())),
            Err(_) => assert!(ptr.crc == LOST_CRC || disk.live.borrow().contains(&ptr)),
        })
        .await;
        let live = disk.live.borrow().clone();
        assert!(nodes.iter().all(|(ptr, _)| live.contains(ptr)), "round {round}: a node in use was released");
        assert!(damaged_some || nodes.len() == live.len(), "round {round}: a node in no use was not released");
        // A leaf without keys is never read.
        nodes.retain(|(ptr, _)| !is_empty_leaf(*ptr));
        if rng.one_in(4) && !nodes.is_empty() {
            let levels: Vec<u8> = nodes.iter().map(|node| node.1).collect::<BTreeSet<u8>>().into_iter().collect();
            let level = *rng.pick(&levels);
            let of_level: Vec<BlobPtr> = nodes.iter().filter(|node| node.1 == level).map(|node| node.0).collect();
            let victim = *rng.pick(&of_level);
            for number in 0..KEYS {
                if leads_through(&tree, root, number, victim.addr).await {
                    expected[number as usize] = Expected::Lost;
                }
            }
            disk.damage(world, victim, rng.coin()).await;
            damaged_some = true;
        }
        changes = some_changes(&mut rng);
    }
    // Without the damaged nodes, what was lost is absent.
    let pruned = disk.tree().prune(root, &disk).await.expect("prune");
    disk.write_nodes().await;
    for number in 0..KEYS {
        let expected = match &expected[number as usize] {
            Expected::Lost => Expected::Absent,
            known => known.clone(),
        };
        assert_eq!(look(&disk.tree(), pruned, number).await, expected, "pruned, key {number}");
    }
    disk.tree().walk(pruned, |ptr, node| assert!(node.is_ok() && !is_empty_leaf(ptr))).await;
}

#[test]
fn damaged_nodes_of_every_level_lose_their_own_keys_only() {
    for seed in 0..30 {
        let world = world(seed);
        run(&world, damaged_nodes_lose_their_own_keys_only(&world, seed));
    }
}

/// Returns a disk with a tree of several levels.
async fn with_tree() -> (NodeDisk, BlobPtr) {
    let disk = NodeDisk::new();
    let changes: Vec<_> = (0..KEYS).map(|number| (key(number), TreeChange::Put(vec![1; 300]))).collect();
    let root = disk.apply(BlobPtr::default(), &changes).await.expect("apply");
    assert_eq!(disk.tree().load(root, None).await.expect("the root").level(), 2);
    (disk, root)
}

#[test]
fn a_damaged_root_stays_below_the_new_one() {
    for bad_sector in [false, true] {
        let world = world(1);
        run(&world, async {
            let (disk, root) = with_tree().await;
            disk.damage(&world, root, bad_sector).await;
            let touched = disk.apply(root, &[(key(5), TreeChange::Touch)]).await.expect("nothing to store");
            assert_eq!(touched, root, "a root that may be read well again is not given up without need");
            let mut root = root;
            // So many keys that the new root is split several times.
            for chunk in (0..KEYS).filter(|number| number % 2 == 0).collect::<Vec<_>>().chunks(40) {
                let put = |&number| (key(number), TreeChange::Put(b"new".to_vec()));
                root = disk.apply(root, &chunk.iter().map(put).collect::<Vec<_>>()).await.expect("apply");
            }
            root = disk.apply(root, &[(key(100), TreeChange::Delete)]).await.expect("apply");
            let tree = disk.tree();
            for number in 0..KEYS {
                let expected = match number {
                    100 => Expected::Absent,
                    _ if number % 2 == 0 => Expected::Value(b"new".to_vec()),
                    _ => Expected::Lost,
                };
                assert_eq!(look(&tree, root, number).await, expected, "key {number}");
                if expected == Expected::Lost {
                    let error = tree.get(root, &key(number)).await.expect_err("it is lost");
                    assert_eq!(error.kind(), ErrorKind::Corrupt, "{error}");
                }
            }
        });
    }
}

#[test]
fn a_device_that_reads_nothing_costs_no_node() {
    let world = world(1);
    run(&world, async {
        let (disk, root) = with_tree().await;
        let fails = DiskFaults { read_error_ppm: 1_000_000, ..DiskFaults::none() };
        world.set_faults(Faults { disk: fails, ..Faults::none() });
        let error = disk.apply(root, &[(key(5), TreeChange::Delete)]).await.expect_err("the device fails");
        assert_eq!(error.kind(), ErrorKind::Io, "{error}");
        world.set_faults(Faults::none());
        let root = disk.apply(root, &[(key(5), TreeChange::Delete)]).await.expect("apply");
        let tree = disk.tree();
        for number in 0..KEYS {
            let expected = if number == 5 { Expected::Absent } else { Expected::Value(vec![1; 300]) };
            assert_eq!(look(&tree, root, number).await, expected, "key {number}");
        }
    });
}

#[test]
fn a_leaf_without_keys_is_kept_only_beside_a_damaged_node() {
    let world = world(1);
    run(&world, async {
        let (disk, root) = with_tree().await;
        let empty_leaves = async |root: BlobPtr| {
            let mut count = 0;
            disk.tree()
                .walk(root, |_, node| count += u32::from(matches!(node, Ok(Node::Leaf(pairs)) if pairs.is_empty())))
                .await;
            count
        };
        let victim = {
            let tree = disk.tree();
            let top = tree.load(root, None).await.expect("the root");
            let Node::Inner { children, .. } = &*top else { panic!("an inner node") };
            let middle = tree.load(children[children.len() / 2].1, None).await.expect("an inner node");
            let Node::Inner { children, .. } = &*middle else { panic!("an inner node") };
            children[children.len() / 2].clone()
        };
        disk.damage(&world, victim.1, false).await;
        let number = |key: &[u8]| String::from_utf8_lossy(&key[..6]).parse::<u64>().expect("a number");
        let first = number(&victim.0);
        let removes = async |root, keys: std::ops::Range<u64>| {
            let changes: Vec<_> = keys.map(|number| (key(number), TreeChange::Delete)).collect();
            disk.apply(root, &changes).await.expect("apply")
        };
        // The removed key is the first one below the damaged node, and the leaf before has it now.
        let root = removes(root, first..first + 1).await;
        assert_eq!(empty_leaves(root).await, 0);
        let root = removes(root, first + 3..first + 4).await;
        assert_eq!(empty_leaves(root).await, 1, "lost keys are before and after it");
        // All others around it are removed, too: only the damaged node is left, and what says which of its keys are not
        // there.
        let root = removes(root, 0..first + 1).await;
        let root = removes(root, first + 60..KEYS).await;
        for number in 0..KEYS {
            let expected = match number {
                _ if number <= first || number == first + 3 || number >= first + 60 => Expected::Absent,
                _ => look(&disk.tree(), root, number).await,
            };
            assert_eq!(look(&disk.tree(), root, number).await, expected, "key {number}");
        }
        assert!(empty_leaves(root).await <= 3, "{}", empty_leaves(root).await);
    });
}
