//! Hosts with ordinary workloads, over an unreliable network.

use std::rc::Rc;
use std::time::Duration;

use crate::common::{HOST, Model, Place, addr, host};
use forebay_iscsi::{IscsiServerOptions, TargetLimits};
use forebay_iscsi_host::cdb;
use forebay_iscsi_host::client::Client;
use forebay_iscsi_host::codec::Digests;
use forebay_reactor::{random, sleep, spawn, timeout};
use forebay_sim::{Faults, World};

/// Number of blocks per host, and in total.
const BLOCKS: u64 = 64;
const HOSTS: u8 = 3;

fn below(end: u64) -> u64 {
    random() % end
}

/// Possible contents of a block: the last write, or writes interrupted by a disconnect.
#[derive(Clone, Default)]
struct Block(Vec<u8>);

impl Block {
    fn is(&mut self, found: u8) -> bool {
        let fits = self.0.contains(&found);
        self.0 = vec![found];
        fits
    }
}

/// Runs a host that writes and reads its own blocks, and logs in again when necessary.
async fn work(number: u8, seed: u64, turns: u32) {
    let mut options = host(HOST, number);
    options.digests = Digests { header: seed.is_multiple_of(2), data: seed.is_multiple_of(3) };
    options.immediate = if number == 1 { 0 } else { 8192 };
    let mut blocks = vec![Block(vec![0]); BLOCKS as usize];
    let mut turn = 0;
    while turn < turns {
        let Ok(Ok(mut client)) = timeout(Duration::from_secs(60), Client::login(&addr(), &options)).await else {
            sleep(Duration::from_millis(100)).await;
            continue;
        };
        // Network errors end the session; it is begun again.
        while turn < turns && step(&mut client, number, &mut blocks).await.is_ok() {
            turn += 1;
        }
    }
}

async fn step(client: &mut Client, number: u8, blocks: &mut [Block]) -> std::io::Result<()> {
    let base = u64::from(number) * BLOCKS;
    let first = below(BLOCKS);
    let count = 1 + below((BLOCKS - first).min(40));
    let range = first as usize..(first + count) as usize;
    let fill = 1 + below(255) as u8;
    let silent = || std::io::Error::new(std::io::ErrorKind::TimedOut, "no answer");
    let within = Duration::from_secs(90);
    let (lba, len) = (base + first, count as usize * 512);
    match below(5) {
        0 | 1 => {
            let read = client.settle(0, cdb::read(lba, count as u32), &[], len);
            let found = timeout(within, read).await.map_err(|_| silent())??;
            if found.status == BUSY {
                return Ok(());
            }
            for (block, data) in blocks[range].iter_mut().zip(found.ok().chunks(512)) {
                assert!(data.iter().all(|byte| *byte == data[0]), "half a block");
                assert!(block.is(data[0]), "host {number} reads {} where {:?} may be", data[0], block.0);
            }
        }
        2 => {
            let write = cdb::write_same(lba, count as u32, true);
            blocks[range.clone()].iter_mut().for_each(|block| block.0.push(0));
            let done = timeout(within, client.settle(0, write, &[0; 512], 0)).await.map_err(|_| silent())??;
            written(done.status, &mut blocks[range], 0);
        }
        _ => {
            blocks[range.clone()].iter_mut().for_each(|block| block.0.push(fill));
            let data = vec![fill; len];
            let write = client.settle(0, cdb::write(lba, count as u32), &data, 0);
            let done = timeout(within, write).await.map_err(|_| silent())??;
            written(done.status, &mut blocks[range], fill);
        }
    }
    Ok(())
}

/// BUSY status, while the host's writes from before the disconnect are in flight.
const BUSY: u8 = 8;

fn written(status: u8, blocks: &mut [Block], fill: u8) {
    match status {
        0 => blocks.iter_mut().for_each(|block| block.0 = vec![fill]),
        BUSY => blocks.iter_mut().for_each(|block| block.0.truncate(block.0.len() - 1)),
        other => panic!("a write fails with {other}"),
    }
}

fn world(seed: u64, faults: Faults, turns: u32) {
    let world = World::new(seed, faults);
    let reactor = world.reactor();
    let run = world.run(&reactor, async {
        let place = Place::new(TargetLimits::default(), IscsiServerOptions::default());
        let model: Rc<Model> = Model::new((u64::from(HOSTS) * BLOCKS * 512) as usize, true);
        place.add(0, &model);
        let hosts: Vec<_> = (0..HOSTS).map(|number| spawn(work(number, seed, turns))).collect();
        for host in hosts {
            host.await;
        }
        place.server.stop().await;
        crate::common::until(|| place.targets.memory() == 0 && model.in_flight.get() == 0).await;
    });
    run.unwrap_or_else(|stop| panic!("seed {seed}: {stop}\n{}", world.trace(60)));
}

#[test]
fn what_is_written_is_read() {
    for seed in 0..12 {
        let mut faults = Faults::none();
        if seed % 2 == 1 {
            faults.net.segment_max = 1 + (seed as usize * 37) % 300;
            faults.net.latency = 1..5_000;
        }
        world(seed, faults, 60);
    }
}

#[test]
fn and_over_a_network_that_resets_cuts_and_stalls() {
    for seed in 0..24 {
        let mut faults = Faults::none();
        faults.net.stall_ppm = 20_000;
        faults.net.refuse_ppm = 50_000;
        match seed % 3 {
            0 => faults.net.reset_ppm = 10_000,
            1 => faults.net.cut_ppm = 5_000,
            _ => (faults.net.reset_ppm, faults.net.cut_ppm, faults.net.segment_max) = (3_000, 1_000, 700),
        }
        world(100 + seed, faults, 60);
    }
}
