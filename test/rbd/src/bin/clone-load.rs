//! Measures clones of one parent in a pool that takes 2 ms for each read, for `cargo xtask bench clone`.
//!
//! `clone-load MIB CLONES none|memory|disk [FILE]` prints one line of JSON.

use std::rc::Rc;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use forebay_block::Extent;
use forebay_image::install_snapshot_cache;
use forebay_ram::cluster::RamCluster;
use forebay_rbd_lab::ClonePool;
use forebay_reactor::sync::join_all;
use forebay_reactor::{DriverChoice, Reactor, spawn};
use forebay_readcache::{CacheOptions, DiskOptions, ReadCache, ReadCacheStats};

/// Latency of the pool.
const LATENCY: Duration = Duration::from_millis(2);
/// Size of a read, one at a time for each clone, as a system reads that boots.
const READ_LEN: u64 = 16 << 10;
const OBJECT: u64 = 4 << 20;

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [mib, clones, mode, file @ ..] = &arguments[..] else { bail!("clone-load MIB CLONES none|memory|disk [FILE]") };
    let (size, clones) = (mib.parse::<u64>()? << 20, clones.parse()?);
    let options = match (mode.as_str(), file) {
        ("none", []) => None,
        ("memory", []) => Some(CacheOptions { memory: size + (64 << 20), disk: None }),
        ("disk", [path]) => {
            // A quarter of the parent fits into memory.
            let disk = Some(DiskOptions { path: path.into(), size: size + size / 4 + (16 << 20) });
            Some(CacheOptions { memory: size / 4, disk })
        }
        _ => bail!("clone-load MIB CLONES none|memory|disk [FILE]"),
    };
    Reactor::system(DriverChoice::Auto)?.block_on(measure(size, clones, options))
}

async fn measure(size: u64, clones: u64, options: Option<CacheOptions>) -> Result<()> {
    let cluster = RamCluster::new(1, 0);
    cluster.add_pool("rbd");
    let pool = ClonePool::of(&cluster, OBJECT, LATENCY);
    pool.create("parent", size).await?;
    let parent = pool.open("parent").await?;
    for at in (0..size).step_by(OBJECT as usize) {
        let seed = at / OBJECT + 1;
        let data: Vec<u8> = (0..OBJECT / 8)
            .flat_map(|word| (word.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ seed | 1).to_le_bytes())
            .collect();
        pool.write(&parent, at, &data).await?;
    }
    parent.close().await;
    let snap = pool.take_snapshot("parent", "gold", None).await?;
    let mut images = Vec::new();
    for number in 0..clones {
        let name = format!("clone{number}");
        pool.clone(&name, "parent", snap).await?;
        let image = pool.open(&name).await?;
        // As a system that boots does with its first write: then the object map says which objects the clone has.
        image.take_lock().await?;
        images.push(image);
    }
    let cache = match options {
        Some(options) => Some(ReadCache::open(options).await),
        None => None,
    };
    let _installed = cache.clone().map(|cache| install_snapshot_cache(cache));
    pool.pool.reset();
    let begun = Instant::now();
    let readers = images.iter().enumerate().map(|(number, image)| {
        let image = image.clone();
        // Clones are not in step: each begins elsewhere.
        let first = size / clones * number as u64 / READ_LEN * READ_LEN;
        spawn(async move {
            use forebay_block::{BlockDevice, BlockRequest};
            for step in (0..size).step_by(READ_LEN as usize) {
                let extent = Extent::new((first + step) % size, READ_LEN);
                let data = image.submit(BlockRequest::Read(extent)).await?.into_data();
                if data.len() as u64 != READ_LEN || data.parts()[0][0] & 1 == 0 {
                    return Err(forebay_block::Error::new(forebay_block::ErrorKind::Corrupt, "wrong bytes"));
                }
            }
            Ok(())
        })
    });
    for result in join_all(readers).await {
        result?;
    }
    let seconds = begun.elapsed().as_secs_f64();
    for image in images {
        image.close().await;
    }
    let stats: Option<ReadCacheStats> = cache.as_ref().map(|cache: &Rc<ReadCache>| cache.stats());
    let parent_bytes = match &stats {
        Some(stats) => stats.parents.fetched_bytes,
        None => clones * size,
    };
    let dropped = stats.as_ref().map_or(0, |stats| stats.dropped);
    let on_disk = stats.as_ref().map_or(0, |stats| stats.parents.hits_disk);
    let mib = (clones * size) as f64 / f64::from(1 << 20);
    println!(
        "{{\"mib_per_second\":{:.1},\"parent_bytes\":{parent_bytes},\"seconds\":{seconds:.3},\"dropped\":{dropped},\
         \"hits_disk\":{on_disk}}}",
        mib / seconds
    );
    if let Some(cache) = cache {
        cache.close().await;
    }
    Ok(())
}
