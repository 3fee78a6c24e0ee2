//! Test client for `test/interop`, which runs it against a real cluster and against maps of Ceph's own tools.
//!
//! `rados-lab crush MAP RULE SIZE FIRST LAST [DEVICE=WEIGHT]...` prints placements like `crushtool --show-mappings`;
//! `rados-lab groups OSDMAP POOL` like `osdmaptool --test-map-pgs-dump`; `rados-lab objects OSDMAP POOL` reads names
//! and prints their placement; `rados-lab status` connects and prints its status; `rados-lab conformance [CASE]` runs
//! the conformance tests of object backends on new pools; `rados-lab steps SEED` compares random steps with a backend
//! in memory; `rados-lab shared [COMMAND]` has two clients watch, lock and fence, with a command in between that
//! disturbs them; `rados-lab hammer POOL STOP` writes and reads until a file STOP exists, reports acknowledgements and
//! errors, and compares in the end; `rados-lab notify COMMAND` disturbs a notification that waits for its
//! acknowledgements; `rados-lab tier POOL COMMAND` writes to a pool behind a cache tier that forwards writes, and
//! compares after the command has removed the tier; `rados-lab attrs POOL` sets and reads extended attributes next to
//! those of `rados`; `rados-lab advice POOL` writes and reads objects with each kind of I/O advice; `rados-lab settings
//! COMMAND TEXT` runs a command and waits until the settings contain a text; `rados-lab ask COMMAND` sends a request to
//! the monitors after a command that disturbs them.

use std::cell::{Cell, RefCell};
use std::collections::{BTreeMap, VecDeque};
use std::io::BufRead;
use std::net::{IpAddr, ToSocketAddrs};
use std::path::Path;
use std::process::ExitCode;
use std::rc::Rc;
use std::time::Duration;

use forebay_block::{
    Advice, ErrorKind, Extent, Method, Notification, ObjectBackend, ObjectName, ObjectOp, ObjectRead, SharedObjects,
    SnapContext, SnapId, Transaction, WatchHandler,
};
use forebay_messenger::wire::PayloadWriter;
use forebay_rados::crush::CrushMap;
use forebay_rados::map::{OsdMap, PgId};
use forebay_rados::{AttrOp, CephConfig, Environment, Flags, RadosCluster};
use forebay_ram::RamBackend;
use forebay_ram::conformance::{CASES, Guard, RandomStep, StepOp, compare, steps_from_seed};
use forebay_reactor::sync::Notify;
use forebay_reactor::{Buf, DriverChoice, Reactor, sleep, spawn, wall_clock};

struct ProcessEnvironment;

impl Environment for ProcessEnvironment {
    fn read(&self, path: &Path) -> std::io::Result<String> {
        std::fs::read_to_string(path)
    }
    fn variable(&self, name: &str) -> Option<String> {
        std::env::var(name).ok()
    }
    fn host(&self) -> String {
        "lab".into()
    }
    fn resolve(&self, name: &str) -> std::io::Result<Vec<IpAddr>> {
        Ok((name, 0).to_socket_addrs()?.map(|addr| addr.ip()).collect())
    }
    fn service(&self, _: &str, _: Option<&str>) -> std::io::Result<Vec<(String, u16)>> {
        Err(std::io::ErrorKind::Unsupported.into())
    }
}

type Outcome = Result<(), Box<dyn std::error::Error>>;

fn list(osds: &[i32]) -> String {
    let osds: Vec<String> = osds.iter().map(ToString::to_string).collect();
    format!("[{}]", osds.join(","))
}

fn crush(words: &[String]) -> Outcome {
    let [file, rule, size, first, last, weights @ ..] = words else {
        return Err("usage: crush MAP RULE SIZE FIRST LAST".into());
    };
    let map = CrushMap::decode(&std::fs::read(file)?)?;
    let mut all = vec![0x1_0000; 4096];
    for pair in weights {
        let (device, weight) = pair.split_once('=').ok_or("write DEVICE=WEIGHT")?;
        all[device.parse::<usize>()?] = (weight.parse::<f64>()? * 65536.0) as u32;
    }
    let rule: usize = rule.parse()?;
    for x in first.parse()?..=last.parse::<u32>()? {
        println!("CRUSH rule {rule} x {x} {}", list(&map.place(rule, x, size.parse()?, &all, -1)));
    }
    Ok(())
}

fn groups(words: &[String]) -> Outcome {
    let [file, pool] = words else { return Err("usage: groups OSDMAP POOL".into()) };
    let map = OsdMap::decode(&std::fs::read(file)?)?;
    let pool: i64 = pool.parse()?;
    for seed in 0..map.pools.get(&pool).ok_or("no such pool")?.pg_num {
        let pg = PgId { pool, seed };
        let at = map.map_pg(pg).ok_or("no such pool")?;
        println!("{pg}\t{}\t{}", list(&at.acting), at.primary);
    }
    Ok(())
}

fn objects(words: &[String]) -> Outcome {
    let [file, id] = words else { return Err("usage: objects OSDMAP POOL".into()) };
    let map = OsdMap::decode(&std::fs::read(file)?)?;
    let id: i64 = id.parse()?;
    let pool = map.pools.get(&id).ok_or("no such pool")?;
    for name in std::io::stdin().lock().lines() {
        let name = name?;
        let hash = pool.hash_object("", &name).ok_or("an unknown hash")?;
        let pg = PgId { pool: id, seed: pool.group(hash) };
        let at = map.map_pg(pg).ok_or("no such pool")?;
        println!("{name} {id}.{hash:x} {pg} {} {} {} {}", list(&at.up), at.up_primary, list(&at.acting), at.primary);
    }
    Ok(())
}

async fn connect() -> Result<Rc<RadosCluster>, Box<dyn std::error::Error>> {
    let flags = Flags { id: std::env::var("LAB_ID").ok(), ..Flags::default() };
    let config = CephConfig::resolve(&flags, &ProcessEnvironment)?;
    Ok(RadosCluster::connect(config).await?)
}

async fn status() -> Outcome {
    let cluster = connect().await?;
    println!("{:#?}", cluster.status());
    let map = cluster.map();
    for (id, name) in &map.names {
        let pool = cluster.pool(name)?;
        println!("pool {id} {name}: {:?}", pool.usage().await?);
    }
    cluster.close();
    Ok(())
}

/// Runs `work` on a new pool, which is deleted afterwards.
async fn on_a_pool<F: Future<Output = ()>>(
    cluster: &Rc<RadosCluster>,
    name: &str,
    work: impl FnOnce(Rc<dyn ObjectBackend>) -> F,
) -> Outcome {
    cluster.create_pool(name, 8).await?;
    let pool = cluster.pool(name)?;
    work(pool).await;
    Ok(cluster.delete_pool(name).await?)
}

async fn conformance(only: Option<&str>) -> Outcome {
    let cluster = connect().await?;
    let started: BTreeMap<&str, _> = CASES.iter().copied().collect();
    for (name, case) in &started {
        if only.is_some_and(|only| only != *name) {
            continue;
        }
        println!("case {name}");
        on_a_pool(&cluster, &format!("conformance-{name}"), case).await?;
    }
    cluster.close();
    Ok(())
}

async fn steps(seed: u64) -> Outcome {
    let cluster = connect().await?;
    on_a_pool(&cluster, &format!("steps-{seed}"), |pool| async move {
        let model: Rc<dyn ObjectBackend> = RamBackend::new("model");
        for round in 0..4 {
            let mut steps = steps_from_seed(seed * 4 + round, 40);
            // A rollback must be the only operation of its transaction here.
            for submit in
                steps.iter_mut().filter_map(|step| if let RandomStep::Submit(all) = step { Some(all) } else { None })
            {
                for one in submit {
                    if let Some(rollback) = one.ops.iter().find(|op| matches!(op, StepOp::Rollback(_))).cloned() {
                        one.ops = vec![rollback];
                        one.guards.retain(|guard| !matches!(guard, Guard::CreateNew));
                    }
                }
            }
            compare(pool.clone(), model.clone(), &steps).await;
        }
    })
    .await?;
    cluster.close();
    Ok(())
}

/// Collects notifications of a watch, and acknowledges them.
#[derive(Default)]
struct Ear {
    pool: RefCell<Option<Rc<dyn SharedObjects>>>,
    object: Option<ObjectName>,
    heard: RefCell<Vec<Notification>>,
    broken: RefCell<Option<ErrorKind>>,
    changed: Notify,
}

impl WatchHandler for Ear {
    fn notified(&self, notification: Notification) {
        let (pool, object) = (self.pool.borrow().clone(), self.object.clone());
        let (id, cookie) = (notification.id, notification.cookie);
        self.heard.borrow_mut().push(notification);
        self.changed.notify_all();
        if let (Some(pool), Some(object)) = (pool, object) {
            let answer = pool.answer_notification(&object, id, cookie, b"heard".to_vec());
            drop(spawn(async move { answer.await.expect("answered") }));
        }
    }
    fn broken(&self, error: forebay_block::Error) {
        *self.broken.borrow_mut() = Some(error.kind());
        self.changed.notify_all();
    }
}

/// Tests how two clients of this process share a pool.
async fn shared(hook: Option<&str>) -> Outcome {
    let (one, two) = (connect().await?, connect().await?);
    let name = "shared";
    one.create_pool(name, 8).await?;
    let (a, b) = (
        one.pool(name)?,
        loop {
            // The OSD map of the other client arrives asynchronously.
            match two.pool(name) {
                Ok(pool) => break pool,
                Err(_) => sleep(Duration::from_millis(20)).await,
            }
        },
    );
    let (sa, sb) = (a.shared().ok_or("it shares")?, b.shared().ok_or("it shares")?);
    let object = ObjectName::new("header");
    let ear = |pool: &Rc<dyn SharedObjects>| {
        Rc::new(Ear { pool: RefCell::new(Some(pool.clone())), object: Some(object.clone()), ..Ear::default() })
    };
    let nobody = sa.watch(&object, ear(&sa)).await.err().map(|error| error.kind());
    assert_eq!(nobody, Some(ErrorKind::NotFound), "a watch on what is not there");
    a.submit(&object, Transaction::of(ObjectOp::Create { exclusive: true })).await?;
    let (heard_a, heard_b) = (ear(&sa), ear(&sb));
    let watch_a = sa.watch(&object, heard_a.clone()).await?;
    let watch_b = sb.watch(&object, heard_b.clone()).await?;
    let mut seen = sa.watchers(&object).await?;
    seen.sort_by_key(|watcher| watcher.client);
    let mut expected = vec![(sa.identity(), watch_a.cookie()), (sb.identity(), watch_b.cookie())];
    expected.sort_by_key(|(identity, _)| identity.number);
    for (watcher, (identity, cookie)) in seen.iter().zip(&expected) {
        assert_eq!((watcher.client, watcher.cookie), (identity.number, *cookie));
        assert_eq!(watcher.address, identity.address, "who we are to others is who we say we are");
    }
    assert_eq!(seen.len(), 2);
    let notified = sb.notify(&object, b"hello".to_vec(), Duration::from_secs(10)).await?;
    assert_eq!((notified.answers.len(), notified.missed.len()), (2, 0));
    assert!(notified.answers.iter().all(|answer| answer.payload == b"heard"));
    assert_eq!(heard_a.heard.borrow()[0].payload, b"hello");
    assert_eq!(heard_a.heard.borrow()[0].sender, sb.identity().number);
    println!("ok watch and notify");

    if let Some(hook) = hook {
        // Runs a command that breaks the OSD's session.
        let status = std::process::Command::new("sh").args(["-c", hook]).status()?;
        assert!(status.success());
        loop {
            let again = sb.notify(&object, b"again".to_vec(), Duration::from_secs(10)).await;
            if again.is_ok_and(|notified| notified.answers.len() == 2) {
                break;
            }
            sleep(Duration::from_millis(200)).await;
        }
        assert_eq!((*heard_a.broken.borrow(), *heard_b.broken.borrow()), (None, None));
        println!("ok watches are taken up again");
    }

    // Lock by the object class `lock`: name, type, cookie, tag, description, duration, flags.
    let mut input = PayloadWriter::new();
    input.versioned(1, 1, |out| {
        out.blob(b"lock").u8(1).blob(b"cookie").blob(b"").blob(b"").u32(0).u32(0).u8(0);
    });
    let lock = ObjectOp::Call { method: Method::new("lock", "lock"), input: input.finish() };
    a.submit(&object, Transaction::of(lock.clone())).await?;
    let refused = b.submit(&object, Transaction::of(lock)).await.map_err(|error| error.kind());
    assert_eq!(refused, Err(ErrorKind::Busy));
    let mut input = PayloadWriter::new();
    input.versioned(1, 1, |out| {
        out.blob(b"lock");
    });
    let info = sb.exec(&object, SnapId::HEAD, Method::new("lock", "get_info"), input.finish()).await?;
    assert!(info.windows(6).any(|part| part == b"cookie"));
    println!("ok class calls");

    drop(watch_b);
    while sa.watchers(&object).await?.len() > 1 {
        sleep(Duration::from_millis(50)).await;
    }
    sa.blocklist(&sb.identity().address, Some(Duration::from_secs(600))).await?;
    let write = Transaction::of(ObjectOp::Write { offset: 0, data: Buf::copy_of(b"x").into() });
    let fenced = b.submit(&object, write).await.map_err(|error| error.kind());
    assert_eq!(fenced, Err(ErrorKind::Fenced), "who is on the blocklist writes no more");
    println!("ok blocklist");

    // Another client learns of the entry from the map, and does not change the blocklist again.  Something else may change
    // the map meanwhile, but not each time.
    let three = connect().await?;
    let address = sb.identity().address;
    let mut unchanged = 0;
    for _ in 0..10 {
        let before = three.status().epoch;
        three.blocklist(&address, Some(Duration::from_secs(900))).await?;
        one.blocklist(&address, None).await?;
        unchanged += u32::from((one.status().epoch, three.status().epoch) == (before, before));
    }
    assert!(unchanged > 0, "each change of the blocklist has a map of its own");
    // An entry that was removed is added again, by a client whose map may still have it.
    let left = |cluster: &RadosCluster, address: &str| {
        cluster.map().blocklisted_until(address).map(|until| until.saturating_sub(wall_clock()).as_secs())
    };
    three.command(&[("prefix", "osd blocklist"), ("blocklistop", "rm"), ("addr", &address)]).await?;
    one.blocklist(&address, None).await?;
    assert!(left(&one, &address).is_some_and(|secs| secs > 3000), "{:?}", left(&one, &address));
    // One that ends in a moment is replaced when it has ended: monitors do not prolong an entry.
    let passing = "10.255.255.1:0/77";
    one.blocklist(passing, Some(Duration::from_secs(2))).await?;
    three.blocklist(passing, Some(Duration::from_secs(900))).await?;
    assert!(left(&three, passing).is_some_and(|secs| secs > 800), "{:?}", left(&three, passing));
    three.close();
    println!("ok the blocklist is changed only if it must be");

    a.submit(&object, Transaction::of(ObjectOp::Remove)).await?;
    heard_a.changed.wait_until(|| heard_a.broken.borrow().is_some()).await;
    assert_eq!(*heard_a.broken.borrow(), Some(ErrorKind::NotFound), "a watch on what is removed");
    println!("ok a removed object ends its watches");
    drop(watch_a);
    one.delete_pool(name).await?;
    two.close();
    one.close();
    Ok(())
}

/// Number of objects written concurrently, and number of writes in flight per object.
const OBJECTS: usize = 8;
const WINDOW: usize = 4;
/// Pause after each write to an object.  The window stays full, so that whatever happens to the cluster happens to writes in
/// flight, and the OSDs leave the processors to what happens: without a pause, data that must move waits for minutes on a
/// busy machine.
const PACE: Duration = Duration::from_millis(50);

/// Object under numbered writes: its content must never be older than the last acknowledged write.
struct Lane {
    pool: Rc<dyn ObjectBackend>,
    object: ObjectName,
    submitted: Cell<u64>,
    acked: Cell<u64>,
    /// Number of the last failed write; a failed write may have been applied, or may still be applied.
    failed: Cell<u64>,
}

type Writing = forebay_block::LocalFuture<forebay_block::Result<u64>>;

impl Lane {
    fn write(&self) -> (u64, Writing) {
        let number = self.submitted.get() + 1;
        self.submitted.set(number);
        let data = Buf::copy_of(&number.to_le_bytes().repeat(512));
        // Grows the object a little each time, so that it needs more space.
        let more = ObjectOp::Write { offset: 4096 + 16 * number, data: data.slice(0..16).into() };
        let write = Transaction::new(vec![ObjectOp::Write { offset: 0, data: data.into() }, more]);
        (number, self.pool.submit(&self.object, write))
    }

    async fn look(&self) -> forebay_block::Result<u64> {
        let least = self.acked.get();
        let extent = forebay_block::Extent::new(0, 4096);
        let read = forebay_block::ObjectRead::new(SnapId::HEAD, extent);
        let found = self.pool.read(&self.object, read).await?.fill(extent).to_vec();
        let number = u64::from_le_bytes(found[..8].try_into().expect("eight bytes"));
        assert_eq!(found, number.to_le_bytes().repeat(512), "{}: half of a write", self.object);
        let most = self.submitted.get();
        assert!((least..=most).contains(&number), "{}: holds {number}, not {least} to {most}", self.object);
        Ok(number)
    }
}

/// Prints a status line each time it changes.
#[derive(Default)]
struct Teller(RefCell<String>);

impl Teller {
    fn tell(&self, text: String) {
        if *self.0.borrow() != text {
            println!("{text}");
            *self.0.borrow_mut() = text;
        }
    }
}

async fn drive(lane: Rc<Lane>, stop: Rc<Cell<bool>>, teller: Rc<Teller>) {
    let mut window: VecDeque<(u64, Writing)> = VecDeque::new();
    loop {
        while window.len() < WINDOW && !stop.get() {
            window.push_back(lane.write());
        }
        let Some((number, writing)) = window.pop_front() else { return };
        let done = match writing.await {
            Ok(_) => {
                assert!(number > lane.acked.get(), "{}: acknowledged out of order", lane.object);
                lane.acked.set(number);
                if number.is_multiple_of(8) { lane.look().await.map(drop) } else { Ok(()) }
            }
            Err(error) => {
                lane.failed.set(number);
                Err(error)
            }
        };
        match done {
            Ok(()) => {
                teller.tell("well".into());
                sleep(PACE).await;
            }
            Err(error) => {
                // The error's location differs between requests, and is omitted.
                let kind = error.kind();
                let text = error.to_string();
                let why = text.split_once(&lane.object.to_string()).map_or(text.as_str(), |(_, why)| why);
                teller.tell(format!("error {kind:?}: {}", why.trim_start_matches([':', ' '])));
                sleep(Duration::from_millis(50)).await;
            }
        }
    }
}

async fn hammer(pool: &str, stop_file: &str) -> Outcome {
    let cluster = connect().await?;
    let pool: Rc<dyn ObjectBackend> = cluster.pool(pool)?;
    let stop = Rc::new(Cell::new(false));
    let teller = Rc::new(Teller::default());
    let lanes: Vec<Rc<Lane>> = (0..OBJECTS)
        .map(|at| {
            let object = ObjectName::new(format!("hammer.{at}"));
            let zero = || Cell::new(0);
            Rc::new(Lane { pool: pool.clone(), object, submitted: zero(), acked: zero(), failed: zero() })
        })
        .collect();
    let running: Vec<_> = lanes.iter().map(|lane| spawn(drive(lane.clone(), stop.clone(), teller.clone()))).collect();
    while !Path::new(stop_file).exists() {
        let acked: u64 = lanes.iter().map(|lane| lane.acked.get()).sum();
        println!("acked {acked} monitor {}", cluster.status().monitor.unwrap_or_default());
        sleep(Duration::from_millis(50)).await;
    }
    stop.set(true);
    for lane in running {
        lane.await;
    }
    // Where a lane's last write has failed, e.g. for want of a key, its object cannot be read, either.
    if lanes.iter().all(|lane| lane.acked.get() > lane.failed.get()) {
        for lane in &lanes {
            let number = lane.look().await?;
            assert_eq!(number, lane.acked.get(), "{}: not the last write, which was acknowledged", lane.object);
        }
        println!("verified");
    }
    println!("ended {}", lanes.iter().map(|lane| lane.acked.get()).sum::<u64>());
    cluster.close();
    Ok(())
}

/// Writes through a cache tier with several writes in flight per object, and compares the content after removal of the
/// tier.
async fn tier(pool: &str, hook: &str) -> Outcome {
    let cluster = connect().await?;
    let pool: Rc<dyn ObjectBackend> = cluster.pool(pool)?;
    let namespaces = ["", "space"];
    let lanes: Vec<Lane> = (0..OBJECTS)
        .map(|at| {
            let object = ObjectName::in_namespace(namespaces[at % 2].into(), format!("tier.{at}"));
            let zero = || Cell::new(0);
            Lane { pool: pool.clone(), object, submitted: zero(), acked: zero(), failed: zero() }
        })
        .collect();
    for _ in 0..20 {
        let under_way: Vec<_> = lanes.iter().flat_map(|lane| (0..WINDOW).map(move |_| (lane, lane.write()))).collect();
        for (lane, (number, writing)) in under_way {
            writing.await?;
            assert!(number > lane.acked.get(), "{}: acknowledged out of order", lane.object);
            lane.acked.set(number);
        }
    }
    println!("ok {} writes", lanes.iter().map(|lane| lane.acked.get()).sum::<u64>());
    assert!(std::process::Command::new("sh").args(["-c", hook]).status()?.success());
    for lane in &lanes {
        assert_eq!(lane.look().await?, lane.acked.get(), "{}", lane.object);
    }
    println!("ok verified");
    cluster.close();
    Ok(())
}

/// Tests extended attributes, next to those that another client has set on `attributed` and verifies afterwards.
async fn attrs(pool: &str) -> Outcome {
    let cluster = connect().await?;
    let pool = cluster.pool(pool)?;
    let (object, head) = (ObjectName::new("attributed"), SnapId::HEAD);
    let set = |name: &str, value: &[u8]| AttrOp::Set(name.into(), value.into());
    let kind = |result: forebay_block::Result<u64>| result.map_err(|error| error.kind()).map(drop);
    assert_eq!(pool.attrs(&object, head).await?, [(String::from("theirs"), b"of rados".to_vec())]);
    assert_eq!(pool.attr(&object, head, "theirs").await?, Some(b"of rados".to_vec()));
    assert_eq!(pool.attr(&object, head, "nothing").await?, None);
    pool.change_attrs(&object, None, &[set("ours", b"of forebay"), set("empty", b""), set("passing", b"x")]).await?;
    // The snapshot preserves the state before the next change.
    let snap = pool.snap_allocate().await?;
    let snapc = Some(Rc::new(SnapContext { seq: snap.0, snaps: vec![snap] }));
    let compare = |name: &str, value: &[u8]| AttrOp::Compare(name.into(), value.into());
    let gone = AttrOp::Remove("passing".into());
    pool.change_attrs(&object, snapc.clone(), &[compare("ours", b"of forebay"), gone, set("new", &[0, 255])]).await?;
    let refused = pool.change_attrs(&object, snapc.clone(), &[set("new", b"y"), compare("ours", b"other")]).await;
    assert_eq!(kind(refused), Err(ErrorKind::Guard), "a comparison that fails undoes the rest");
    pool.change_attrs(&object, snapc.clone(), &[compare("passing", b"")]).await?;
    let names = |all: Vec<(String, Vec<u8>)>| all.into_iter().map(|(name, _)| name).collect::<Vec<_>>();
    assert_eq!(names(pool.attrs(&object, head).await?), ["empty", "new", "ours", "theirs"]);
    assert_eq!(pool.attr(&object, head, "new").await?, Some(vec![0, 255]));
    assert_eq!(pool.attr(&object, head, "empty").await?, Some(Vec::new()));
    assert_eq!(names(pool.attrs(&object, snap).await?), ["empty", "ours", "passing", "theirs"]);
    let nobody = ObjectName::new("nobody");
    assert_eq!(pool.attrs(&nobody, head).await.map_err(|error| error.kind()), Err(ErrorKind::NotFound));
    let gone = [AttrOp::Remove("x".into())];
    assert_eq!(kind(pool.change_attrs(&nobody, None, &gone).await), Err(ErrorKind::NotFound));
    assert_eq!(kind(pool.change_attrs(&nobody, None, &[set("", b"x")]).await), Err(ErrorKind::Invalid));
    pool.snap_remove(snap).await?;
    println!("ok attributes");
    cluster.close();
    Ok(())
}

/// Receives a notification, and delays its acknowledgement.
async fn notify(hook: &str) -> Outcome {
    let (one, two) = (connect().await?, connect().await?);
    let (a, b) = (one.pool("rbd")?, two.pool("rbd")?);
    let (sa, sb) = (a.shared().ok_or("it shares")?, b.shared().ok_or("it shares")?);
    let object = ObjectName::new("header");
    a.submit(&object, Transaction::of(ObjectOp::Create { exclusive: false })).await?;
    let ear = Rc::new(Ear::default());
    let watch = sa.watch(&object, ear.clone()).await?;
    let asked = {
        let (sb, object) = (sb.clone(), object.clone());
        spawn(async move { sb.notify(&object, b"hello".to_vec(), Duration::from_secs(5)).await })
    };
    ear.changed.wait_until(|| !ear.heard.borrow().is_empty()).await;
    println!("heard");
    assert!(std::process::Command::new("sh").args(["-c", hook]).status()?.success());
    // The notifier gets an error, or a list of watchers that missed it; it never waits indefinitely.
    match asked.await {
        Ok(notified) => println!("ok notified: {} answers, {} missed", notified.answers.len(), notified.missed.len()),
        Err(error) => println!("ok notified: {error}"),
    }
    // The next notification is received again.
    let before = ear.heard.borrow().len();
    let (again, changed) = (sb.clone(), &ear.changed);
    loop {
        let asked = again.notify(&object, b"again".to_vec(), Duration::from_secs(1)).await;
        if ear.heard.borrow().len() > before {
            break;
        }
        println!("not heard: {asked:?}");
        let _ = forebay_reactor::timeout(Duration::from_millis(200), changed.wait_until(|| false)).await;
    }
    println!("ok heard again");
    drop(watch);
    two.close();
    one.close();
    Ok(())
}

/// Kinds of I/O advice, and the names of the objects they are used with.
const ADVISED: [(&str, Advice); 6] = [
    ("random", Advice::RANDOM),
    ("sequential", Advice::SEQUENTIAL),
    ("willneed", Advice::WILL_NEED),
    ("dontneed", Advice::DONT_NEED),
    ("nocache", Advice::NO_CACHE),
    ("onepass", Advice::ONE_PASS),
];

/// Writes, zeroes and reads one object with each kind of advice.
async fn advice(pool: &str) -> Outcome {
    let cluster = connect().await?;
    let pool = cluster.pool(pool)?;
    for (name, advice) in ADVISED {
        let object = ObjectName::new(format!("advised-{name}"));
        let data: forebay_block::BufList = Buf::copy_of(&[7; 128 << 10]).into();
        pool.submit(&object, Transaction::of(ObjectOp::Write { offset: 0, data: data.clone() }).advised(advice))
            .await?;
        let clear = Extent::new(4096, 4096);
        pool.submit(&object, Transaction::of(ObjectOp::Zero { extent: clear }).advised(advice)).await?;
        let sparse = pool.read(&object, ObjectRead::head(0, 128 << 10).advised(advice)).await?;
        let found = sparse.fill(Extent::new(0, 128 << 10)).to_vec();
        assert!(found.iter().enumerate().all(|(at, &byte)| byte == if (4096..8192).contains(&at) { 0 } else { 7 }));
        let read = pool.read(&object, ObjectRead::head(0, 4096).advised(advice)).await?;
        assert_eq!(read.fill(Extent::new(0, 4096)).to_vec(), [7; 4096]);
    }
    cluster.close();
    Ok(())
}

/// Runs a command, and waits until the settings show a text.
async fn settings(command: &str, text: &str) -> Outcome {
    let cluster = connect().await?;
    println!("settings {:?}", cluster.settings());
    assert!(std::process::Command::new("sh").args(["-c", command]).status()?.success());
    while !format!("{:?}", cluster.settings()).contains(text) {
        sleep(Duration::from_millis(50)).await;
    }
    println!("settings {:?}", cluster.settings());
    cluster.close();
    Ok(())
}

/// Runs a command that disturbs the monitors, sends them a request, and prints how and when it fails.
async fn ask(command: &str) -> Outcome {
    let cluster = connect().await?;
    assert!(std::process::Command::new("sh").args(["-c", command]).status()?.success());
    let begun = forebay_reactor::now();
    match cluster.command(&[("prefix", "status")]).await {
        Ok(_) => println!("answered"),
        Err(error) => println!("{:?} after {} s: {error}", error.kind(), begun.elapsed().as_secs()),
    }
    cluster.close();
    Ok(())
}

fn run(words: &[String]) -> Outcome {
    let reactor = || Reactor::system(DriverChoice::Auto).expect("a reactor");
    match words.split_first().map(|(verb, rest)| (verb.as_str(), rest)) {
        Some(("crush", rest)) => crush(rest),
        Some(("groups", rest)) => groups(rest),
        Some(("objects", rest)) => objects(rest),
        Some(("status", [])) => reactor().block_on(status()),
        Some(("conformance", rest)) => reactor().block_on(conformance(rest.first().map(String::as_str))),
        Some(("shared", rest)) => reactor().block_on(shared(rest.first().map(String::as_str))),
        Some(("hammer", [pool, stop])) => reactor().block_on(hammer(pool, stop)),
        Some(("tier", [pool, command])) => reactor().block_on(tier(pool, command)),
        Some(("attrs", [pool])) => reactor().block_on(attrs(pool)),
        Some(("settings", [command, text])) => reactor().block_on(settings(command, text)),
        Some(("ask", [command])) => reactor().block_on(ask(command)),
        Some(("advice", [pool])) => reactor().block_on(advice(pool)),
        Some(("notify", [command])) => reactor().block_on(notify(command)),
        Some(("steps", [seed])) => reactor().block_on(steps(seed.parse()?)),
        _ => Err("usage: rados-lab VERB ..., as the top of its source says".into()),
    }
}

fn main() -> ExitCode {
    let filter = tracing_subscriber::EnvFilter::from_default_env();
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).init();
    let words: Vec<String> = std::env::args().skip(1).collect();
    match run(&words) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::FAILURE
        }
    }
}
