//! Steps of `test/interop/rbd.sh` with Forebay's images on a real cluster, beside Ceph's own clients.
//!
//! An image is `POOL/IMAGE`, `POOL/NAMESPACE/IMAGE`, or either with `@SNAPSHOT`.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::net::{IpAddr, ToSocketAddrs};
use std::path::Path;
use std::process::ExitCode;
use std::rc::Rc;
use std::time::Duration;

use anyhow::{Context, Result, bail, ensure};
use forebay_block::{BlockDevice, BlockRequest, Buf, BufList, Extent, ObjectBackend};
use forebay_image::{CreateOptions, Image, ImageOpenOptions, Images, RemoveOptions};
use forebay_rados::{CephConfig, Environment, Flags, RadosCluster};
use forebay_reactor::{DriverChoice, Reactor, now, sleep, spawn};

const USAGE: &str = "usage: rbd-lab VERB ...
  create IMAGE SIZE OBJECT_SIZE [DATA_POOL]   makes an image with the default features
  info IMAGE                                  prints what it is
  export IMAGE FILE                           reads all of it
  mutate IMAGE FILE SEED COUNT                does random requests to the image and to its copy in FILE
  resize IMAGE SIZE                           shrinks, too
  remove IMAGE
  hold IMAGE SECONDS OFFSET                   writes and reads back blocks of the MiB at OFFSET; prints how many
  wait-size IMAGE SIZE                        opens it, says so, and waits until it is told of that size";

/// Longest that anything is waited for.
const PATIENCE: Duration = Duration::from_secs(600);

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

struct Lab {
    cluster: Rc<RadosCluster>,
    pool: Rc<dyn ObjectBackend>,
    image: String,
}

impl Lab {
    async fn connect(spec: &str) -> Result<Self> {
        let (pool, image) = spec.split_once('/').context("an image is POOL/IMAGE")?;
        let config = CephConfig::resolve(&Flags::default(), &ProcessEnvironment)?;
        let cluster = RadosCluster::connect(config).await?;
        let pool: Rc<dyn ObjectBackend> = cluster.pool(pool)?;
        Ok(Self { cluster, pool, image: image.to_owned() })
    }

    fn images(&self) -> Rc<Images> {
        Images::of(&self.pool)
    }

    async fn open(&self, read_only: bool) -> Result<Rc<Image>> {
        Ok(self.images().open(&self.image, ImageOpenOptions { read_only }).await?)
    }
}

/// A random number generator that gives the same numbers for the same seed everywhere.
struct Random(Cell<u64>);

impl Random {
    fn below(&self, limit: u64) -> u64 {
        let mut x = self.0.get();
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        self.0.set(x);
        x.wrapping_mul(0x2545_f491_4f6c_dd1d) % limit.max(1)
    }
}

fn bytes(data: &[u8]) -> BufList {
    Buf::copy_of(data).into()
}

async fn create(lab: &Lab, words: &[String]) -> Result<()> {
    let [size, object_size, data_pool @ ..] = words else { bail!(USAGE) };
    let options = CreateOptions {
        size: size.parse()?,
        object_size: object_size.parse()?,
        striping: None,
        features: None,
        data_pool: data_pool.first().cloned(),
        encrypted: false,
    };
    Ok(lab.images().create(&lab.image, options).await?)
}

async fn info(lab: &Lab) -> Result<()> {
    println!("{:#?}", lab.images().info(&lab.image).await?);
    println!("{:#?}", lab.images().snapshots(&lab.image).await?);
    Ok(())
}

async fn export(lab: &Lab, file: &str) -> Result<()> {
    let image = lab.open(true).await?;
    let mut whole = Vec::new();
    while (whole.len() as u64) < image.size() {
        let extent = Extent::new(whole.len() as u64, (4 << 20).min(image.size() - whole.len() as u64));
        whole.extend(image.submit(BlockRequest::Read(extent)).await?.into_data().to_vec());
    }
    std::fs::write(file, whole)?;
    image.close().await;
    Ok(())
}

/// Requests at once, which do not overlap; then the same to the copy.
async fn mutate(lab: &Lab, file: &str, seed: u64, count: u64) -> Result<()> {
    let image = lab.open(false).await?;
    let mut copy = std::fs::read(file)?;
    ensure!(copy.len() as u64 == image.size(), "the image has {} bytes, its copy {}", image.size(), copy.len());
    let random = Random(Cell::new(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1));
    let object = image.object_size();
    for _ in 0..count.div_ceil(8) {
        let mut taken: Vec<Extent> = Vec::new();
        let mut running = Vec::new();
        for _ in 0..8 {
            let mut offset = random.below(image.size());
            let mut len = 1 + random.below(if random.below(4) == 0 { 3 * object } else { 20_000 });
            if random.below(3) == 0 {
                (offset, len) = (offset / object * object, object * (1 + random.below(2)));
            }
            let extent = Extent::new(offset, len.min(image.size() - offset));
            if taken.iter().any(|other| other.overlaps(extent)) {
                continue;
            }
            taken.push(extent);
            let range = offset as usize..extent.end() as usize;
            let request = match random.below(8) {
                0 | 1 => {
                    copy[range].fill(0);
                    BlockRequest::Discard(extent)
                }
                2 => {
                    copy[range].fill(0);
                    BlockRequest::WriteZeroes { extent, no_unmap: random.below(2) == 0, fua: false }
                }
                3 if extent.len <= 4096 => {
                    let expect = bytes(&copy[range.clone()]);
                    copy[range.clone()].iter_mut().for_each(|byte| *byte = byte.wrapping_add(1));
                    BlockRequest::CompareAndWrite { offset, expect, data: bytes(&copy[range]), fua: true }
                }
                _ => {
                    let base = random.below(u64::MAX);
                    for (at, byte) in copy[range.clone()].iter_mut().enumerate() {
                        *byte = (base >> (at % 7 * 8)) as u8 ^ (at / 7) as u8;
                    }
                    BlockRequest::Write { offset, data: bytes(&copy[range]), fua: false }
                }
            };
            running.push(image.submit(request));
        }
        for request in running {
            request.await?;
        }
    }
    image.submit(BlockRequest::Flush).await?;
    // What we read is what we wrote.
    for at in (0..image.size()).step_by(1 << 20) {
        let extent = Extent::new(at, (1 << 20).min(image.size() - at));
        let found = image.submit(BlockRequest::Read(extent)).await?.into_data().to_vec();
        ensure!(found == copy[at as usize..extent.end() as usize], "what was read at {at} is not what was written");
    }
    image.close().await;
    std::fs::write(file, copy)?;
    Ok(())
}

async fn hold(lab: &Lab, seconds: u64, offset: u64) -> Result<()> {
    let image = lab.open(false).await?;
    let start = now();
    let (written, slowest) = (Cell::new(0u64), Cell::new(Duration::ZERO));
    let seen: RefCell<BTreeSet<u64>> = RefCell::default();
    println!("holding");
    while start.elapsed() < Duration::from_secs(seconds) {
        let block = written.get() % 256;
        let data = [block as u8 ^ written.get() as u8 ^ 0x5a; 4096];
        let begun = now();
        let at = offset + block * 4096;
        image.submit(BlockRequest::Write { offset: at, data: bytes(&data), fua: false }).await?;
        slowest.set(slowest.get().max(begun.elapsed()));
        let found = image.submit(BlockRequest::Read(Extent::new(at, 4096))).await?.into_data().to_vec();
        ensure!(found == data, "the block at {at} is not what was written last");
        seen.borrow_mut().insert(block);
        written.set(written.get() + 1);
        sleep(Duration::from_millis(2)).await;
    }
    image.close().await;
    println!("written {} slowest_ms {}", written.get(), slowest.get().as_millis());
    Ok(())
}

async fn wait_size(lab: &Lab, size: u64) -> Result<()> {
    let image = lab.open(true).await?;
    let watch = image.size_watch().context("a size that can change")?;
    println!("watching {}", image.size());
    let changed = {
        let image = image.clone();
        spawn(async move {
            while image.size() != size {
                watch.changed().await;
            }
        })
    };
    ensure!(forebay_reactor::timeout(PATIENCE, changed).await.is_ok(), "no notification of a new size");
    println!("size {}", image.size());
    image.close().await;
    Ok(())
}

async fn run(words: &[String]) -> Result<()> {
    let [verb, spec, rest @ ..] = words else { bail!(USAGE) };
    let lab = Lab::connect(spec).await?;
    match (verb.as_str(), rest) {
        ("create", rest) => create(&lab, rest).await,
        ("info", []) => info(&lab).await,
        ("export", [file]) => export(&lab, file).await,
        ("mutate", [file, seed, count]) => mutate(&lab, file, seed.parse()?, count.parse()?).await,
        ("resize", [size]) => {
            let image = lab.open(false).await?;
            image.resize(size.parse()?, true, |_| {}).await?;
            image.close().await;
            Ok(())
        }
        ("remove", []) => Ok(lab.images().remove(&lab.image, RemoveOptions::default(), |_| {}).await?),
        ("hold", [seconds, offset]) => hold(&lab, seconds.parse()?, offset.parse()?).await,
        ("wait-size", [size]) => wait_size(&lab, size.parse()?).await,
        _ => bail!(USAGE),
    }?;
    lab.cluster.close();
    Ok(())
}

fn main() -> ExitCode {
    let filter = tracing_subscriber::EnvFilter::from_default_env();
    tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr).init();
    let words: Vec<String> = std::env::args().skip(1).collect();
    let reactor = Reactor::system(DriverChoice::Auto).expect("a reactor");
    match reactor.block_on(run(&words)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("rbd-lab: {error:#}");
            ExitCode::FAILURE
        }
    }
}
