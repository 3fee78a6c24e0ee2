//! Drives a store with services in process (columns on several files, compression, encryption), and prints one line of JSON.
//!
//! ```text
//! services FOLDER SIZE_MIB COLUMNS COMPRESSION MODE DEPTH SECONDS
//!   COLUMNS      1, or K+M: files dev0, dev1, ... in FOLDER, SIZE_MIB in all for data
//!   COMPRESSION  none, lz4, zstd[:LEVEL], deflate[:LEVEL]; half of each block is random, the rest repeats;
//!                with ,aes behind it, data is encrypted
//!   MODE         write, read                1 MiB, one after the other
//!                randwrite, randread        4 KiB, anywhere
//!                read-degraded, randread-degraded   without M of the files
//! ```

mod common;

use std::cell::{Cell, RefCell};
use std::path::{Path, PathBuf};
use std::rc::Rc;
use std::time::{Duration, Instant};

use common::{BLOCK, OBJECT, Rng, cpu_seconds, object};
use forebay_block::{BufMut, Compression, DataPolicy, ObjectBackend, ObjectName, ObjectOp, ObjectRead, Transaction};
use forebay_reactor::{DriverChoice, Reactor, spawn};
use forebay_store::{DeviceSetOptions, InitOptions, MasterKey, Store, StoreOptions};

const LONG: u64 = 1 << 20;

/// Settings of a run.
struct Settings {
    folder: PathBuf,
    size: u64,
    /// Data and parity columns; `None` for one file.
    columns: Option<(usize, usize)>,
    compression: Compression,
    encrypted: bool,
    mode: String,
    depth: usize,
    seconds: Duration,
}

impl Settings {
    fn paths(&self) -> Vec<PathBuf> {
        let count = self.columns.map_or(1, |(data, parity)| data + parity);
        (0..count).map(|number| self.folder.join(format!("dev{number}"))).collect()
    }

    async fn open(&self, missing: usize) -> Rc<Store> {
        let options = StoreOptions {
            data_cache: 0,
            punch_free: false,
            compression_threads: 1,
            master_key: self.encrypted.then(|| MasterKey::from_bytes([7; 32])),
            ..StoreOptions::default()
        };
        let paths = self.paths();
        match self.columns {
            None => Store::open(&paths[0], options).await.expect("open"),
            Some(_) => Store::open_devices(&paths[missing..], None, options).await.expect("open"),
        }
    }

    async fn init(&self) {
        match self.columns {
            None => {
                let options = InitOptions { size: self.size, force: true, preallocate: true, ..InitOptions::default() };
                Store::init(&self.paths()[0], options).await.expect("init");
            }
            Some((data, parity)) => {
                let size = self.size / data as u64;
                let options = DeviceSetOptions { data, parity, size, force: true, ..DeviceSetOptions::default() };
                Store::init_devices(&self.paths(), &options, |_, _| {}).await.expect("init");
            }
        }
    }
}

/// Content of which half is random, so that it compresses to about that.
fn content(rng: &mut Rng, len: u64) -> BufMut {
    let mut data = BufMut::zeroed(len as usize);
    for block in data.chunks_exact_mut(BLOCK as usize) {
        let (random, repeated) = block.split_at_mut(BLOCK as usize / 2);
        random.chunks_exact_mut(8).for_each(|word| word.copy_from_slice(&rng.next().to_le_bytes()));
        repeated.chunks_exact_mut(8).for_each(|word| word.copy_from_slice(b"repeated"));
    }
    data
}

fn main() {
    let args: Vec<String> = std::env::args().collect();
    let [_, folder, size, columns, compression, mode, depth, seconds] = &args[..] else {
        eprintln!("usage: services FOLDER SIZE_MIB 1|K+M none|lz4|zstd|deflate[,aes] MODE DEPTH SECONDS");
        std::process::exit(2);
    };
    let columns = columns.split_once('+').map(|(data, parity)| (data.parse().expect("K"), parity.parse().expect("M")));
    let (compression, encrypted) = match compression.strip_suffix(",aes") {
        Some(compression) => (compression, true),
        None => (compression.as_str(), false),
    };
    let settings = Settings {
        folder: Path::new(folder).into(),
        size: size.parse::<u64>().expect("SIZE_MIB") << 20,
        columns,
        compression: compression.parse().expect("COMPRESSION"),
        encrypted,
        mode: mode.clone(),
        depth: depth.parse().expect("DEPTH"),
        seconds: Duration::from_secs_f64(seconds.parse().expect("SECONDS")),
    };
    Reactor::system(DriverChoice::Auto).expect("a reactor").block_on(run(settings));
}

async fn run(settings: Settings) {
    settings.init().await;
    let mut store = settings.open(0).await;
    let policy = DataPolicy { compression: settings.compression };
    if settings.compression != Compression::None {
        store.set_data_policy(&ObjectName::new(""), Some(policy)).await.expect("a policy");
    }
    if settings.encrypted {
        let name = object(0);
        let prefix = name.name().rfind('.').map_or("", |dot| &name.name()[..=dot]);
        store.encrypt(&ObjectName::new(prefix)).await.expect("a key");
    }
    let objects = (store.stats().capacity / 2 / OBJECT).max(1);
    // The same data again and again: making it is not measured.
    let mut rng = Rng::new();
    let source: Vec<_> = (0..16).map(|_| content(&mut rng, LONG).freeze()).collect();
    let source = Rc::new(source);
    for index in 0..objects {
        for (i, at) in (0..OBJECT).step_by(LONG as usize).enumerate() {
            let data = source[(index as usize + i) % source.len()].clone().into();
            let write = Transaction::of(ObjectOp::Write { offset: at, data });
            store.submit(&object(index), write).await.expect("fill");
        }
    }
    store.flush().await.expect("flush");
    let mode = settings.mode.trim_end_matches("-degraded").to_owned();
    if mode.len() < settings.mode.len() {
        store.close().await.expect("close");
        drop(store);
        store = settings.open(settings.columns.map_or(0, |(_, parity)| parity)).await;
    }
    let before = store.stats();
    let (reads, random) = (mode.ends_with("read"), mode.starts_with("rand"));
    let len = if random { BLOCK } else { LONG };
    let (rng, next, done) = (Rc::new(RefCell::new(rng)), Rc::new(Cell::new(0u64)), Rc::new(Cell::new(0u64)));
    let (begun, cpu) = (Instant::now(), cpu_seconds());
    let seconds = settings.seconds;
    let tasks: Vec<_> = (0..settings.depth)
        .map(|_| {
            let (store, rng, next, done, source) =
                (store.clone(), rng.clone(), next.clone(), done.clone(), source.clone());
            spawn(async move {
                while begun.elapsed() < seconds {
                    let places = objects * OBJECT / len;
                    let place = match random {
                        true => rng.borrow_mut().next() % places,
                        false => next.replace(next.get() + 1) % places,
                    };
                    let (name, offset) = (object(place * len / OBJECT), place * len % OBJECT);
                    if reads {
                        let found = store.read(&name, ObjectRead::head(offset, len)).await.expect("read");
                        assert_eq!(found.runs.iter().map(|(_, data)| data.len() as u64).sum::<u64>(), len);
                    } else {
                        let pick = rng.borrow_mut().next();
                        let from = if random { (pick >> 8) % (LONG / BLOCK) * BLOCK } else { 0 } as usize;
                        let data = source[pick as usize % source.len()].slice(from..from + len as usize).into();
                        let write = Transaction::of(ObjectOp::Write { offset, data });
                        store.submit(&name, write).await.expect("write");
                    }
                    done.set(done.get() + 1);
                }
            })
        })
        .collect();
    for task in tasks {
        task.await;
    }
    if !reads {
        store.flush().await.expect("flush");
    }
    let (wall, cpu) = (begun.elapsed().as_secs_f64(), cpu_seconds() - cpu);
    let (bytes, after) = ((done.get() * len) as f64, store.stats());
    println!(
        "{{\"mode\":\"{}\",\"bytes_per_second\":{:.0},\"requests_per_second\":{:.0},\"cpu_seconds_per_gib\":{:.3},\
         \"bytes_per_cpu_second\":{:.0},\"log_bytes_per_user_byte\":{:.3}}}",
        settings.mode,
        bytes / wall,
        done.get() as f64 / wall,
        cpu / (bytes / f64::from(1 << 30)).max(1e-9),
        bytes / cpu.max(0.01),
        (after.device_bytes - before.device_bytes) as f64 / ((after.user_bytes - before.user_bytes) as f64).max(1.0),
    );
    store.close().await.expect("close");
    for path in settings.paths() {
        std::fs::remove_file(path).expect("removed");
    }
}
