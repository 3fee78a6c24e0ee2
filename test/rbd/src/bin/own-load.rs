//! Measures an image whose hot set is read again and again from a pool that takes 2 ms for each read, for
//! `cargo xtask bench clone`.
//!
//! `own-load MIB READS none|memory` prints one line of JSON.

use std::rc::Rc;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use forebay_block::{Error, ErrorKind, Extent};
use forebay_image::{OwnBlockState, install_snapshot_cache};
use forebay_ram::cluster::RamCluster;
use forebay_rbd_lab::ClonePool;
use forebay_reactor::sync::join_all;
use forebay_reactor::{DriverChoice, Reactor, sleep, spawn};
use forebay_readcache::{CacheOptions, ReadCache};

/// Latency of the pool.
const LATENCY: Duration = Duration::from_millis(2);
const READ_LEN: u64 = 16 << 10;
const OBJECT: u64 = 4 << 20;
/// Reads at a time.
const READERS: u64 = 4;
/// Size of the image, divided by that of its hot set.
const HOT_SHARE: u64 = 8;
/// One request in so many is elsewhere than in the hot set.
const COLD_ONE_IN: u64 = 10;
/// One request in so many is a write to the hot set.
const WRITE_ONE_IN: u64 = 20;

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [mib, reads, mode] = &arguments[..] else { bail!("own-load MIB READS none|memory") };
    let (size, reads) = (mib.parse::<u64>()? << 20, reads.parse()?);
    let memory = match mode.as_str() {
        "none" => None,
        "memory" => Some(size / 4),
        _ => bail!("own-load MIB READS none|memory"),
    };
    Reactor::system(DriverChoice::Auto)?.block_on(measure(size, reads, memory))
}

/// Next number of a sequence at random.
fn next(state: &mut u64) -> u64 {
    *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    *state >> 33
}

async fn measure(size: u64, reads: u64, memory: Option<u64>) -> Result<()> {
    let cluster = RamCluster::new(1, 0);
    cluster.add_pool("rbd");
    let pool = Rc::new(ClonePool::of(&cluster, OBJECT, LATENCY));
    pool.create("vm", size).await?;
    let image = pool.open("vm").await?;
    let data = vec![0x55; OBJECT as usize];
    for at in (0..size).step_by(OBJECT as usize) {
        pool.write(&image, at, &data).await?;
    }
    let cache = match memory {
        Some(memory) => Some(ReadCache::open(CacheOptions { memory, disk: None }).await),
        None => None,
    };
    let _installed = cache.clone().map(|cache| install_snapshot_cache(cache));
    if cache.is_some() {
        image.cache_own_blocks(true);
        while image.own_block_state() != OwnBlockState::Active {
            sleep(Duration::from_millis(1)).await;
        }
    }
    let begun = Instant::now();
    let readers = (0..READERS).map(|reader| {
        let (pool, image) = (pool.clone(), image.clone());
        spawn(async move {
            let mut state = reader + 1;
            for _ in 0..reads / READERS {
                let is_cold = next(&mut state).is_multiple_of(COLD_ONE_IN);
                let within = if is_cold { size } else { size / HOT_SHARE };
                let at = next(&mut state) % (within / READ_LEN) * READ_LEN;
                if next(&mut state).is_multiple_of(WRITE_ONE_IN) {
                    pool.write(&image, at % (size / HOT_SHARE), &[0x55; 4096]).await?;
                }
                let data = pool.read(&image, Extent::new(at, READ_LEN)).await?;
                if data.len() as u64 != READ_LEN || data.iter().any(|&byte| byte != 0x55) {
                    return Err(Error::new(ErrorKind::Corrupt, "wrong bytes"));
                }
            }
            Ok(())
        })
    });
    for result in join_all(readers).await {
        result?;
    }
    let seconds = begun.elapsed().as_secs_f64();
    image.close().await;
    let own = cache.as_ref().map(|cache| cache.stats()).map(|stats| (stats.own, stats.invalidated)).unwrap_or_default();
    println!(
        "{{\"reads_per_second\":{:.1},\"hits\":{},\"misses\":{},\"invalidated\":{}}}",
        reads as f64 / seconds,
        own.0.hits(),
        own.0.misses,
        own.1
    );
    Ok(())
}
