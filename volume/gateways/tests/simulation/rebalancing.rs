//! Groups that move their volumes by themselves where loads differ.

use std::time::Duration;

use forebay_gateways::{GroupChange, GroupPolicy, MemberId, RequestLoad, VolumeLoads, VolumeName};

use crate::conditions::Latencies;
use crate::world::World;
use crate::{SECOND, chaos_of_seeds, seeds, settled};

fn volume(number: u64) -> VolumeName {
    VolumeName::new(format!("rbd/v{number:05}"))
}

fn turn_on(world: &mut World) {
    let policy = GroupPolicy { rebalance: true, ..world.record.policy() };
    assert!(world.command(&[GroupChange::SetPolicy(policy)]));
}

impl World {
    /// Gives a volume of a small group another load, where loads are rebalanced.
    pub fn change_a_load(&mut self) {
        if self.record.policy().rebalance {
            let (name, load) = (volume(self.random.below(20)), self.random.below(4) * self.random.below(1000));
            self.loads.insert(name, RequestLoad { requests: load as u32, kib: 0 });
        }
    }

    /// Measures the volumes that a daemon has open.
    pub fn measured(&mut self, at: usize) -> VolumeLoads {
        let start = self.daemons[at].start;
        let is_open = |name: &VolumeName| self.open.get(name).is_some_and(|open| open.contains_key(&start));
        let mut loads: VolumeLoads =
            self.loads.iter().filter(|(name, _)| is_open(name)).map(|(name, load)| (name.clone(), *load)).collect();
        if self.load_noise > 0 {
            for load in loads.values_mut() {
                let per_cent = 100 - self.load_noise + self.random.below(2 * self.load_noise + 1);
                load.requests = (u64::from(load.requests) * per_cent / 100) as u32;
            }
        }
        loads
    }

    /// Returns the load of each member's volumes, with 10 requests a second for each one, for each 100 of its weight.
    fn scores(&self) -> Vec<u64> {
        let of = |id: MemberId| {
            let loads = self.record.owned_by(id).map(|name| self.loads.get(name).copied().unwrap_or_default());
            let cost: u64 = loads.map(|load: RequestLoad| load.cost() / 32 + 10).sum();
            cost * 100 / u64::from(self.record.member(id).map_or(100, |member| member.weight.max(1)))
        };
        self.daemons.iter().map(|daemon| of(daemon.id)).collect()
    }

    /// Runs until nothing was moved for this many seconds; returns the number of moves and the seconds until the last one.
    fn run_until_still(&mut self, still: u64, limit: u64) -> (u64, u64) {
        let (begun, first) = (self.now, self.moves);
        let (mut moves, mut last) = (self.moves, self.now);
        while self.now - last < still * SECOND {
            assert!(self.now - begun < limit * SECOND, "{} moves, scores {:?}", self.moves - first, self.scores());
            self.run_until(self.now + SECOND);
            if self.moves != moves || self.record.moving_count() > 0 {
                (moves, last) = (self.moves, self.now);
            }
        }
        (self.moves - first, (last - begun) / SECOND)
    }

    fn spread(&self) -> (u64, u64) {
        let scores = self.scores();
        (*scores.iter().min().expect("members"), *scores.iter().max().expect("members"))
    }
}

/// Skewed loads: a tenth of the members has most, and volumes differ by up to 20 times.
#[test]
fn a_hundred_members_with_skewed_loads_become_alike_and_stay_still() {
    let seed = std::env::var("FOREBAY_SEED").ok().and_then(|text| text.parse().ok()).unwrap_or(1);
    let mut world = settled(seed, 100, 1000, Latencies::USUAL);
    for number in 0..1000 {
        let (usual, busy) = (20 + world.random.below(180), number % 100 < 10);
        let requests = if busy { usual * 4 } else { usual };
        world.loads.insert(volume(number), RequestLoad { requests: requests as u32, kib: requests as u32 });
    }
    world.load_noise = 5;
    let before = world.spread();
    world.moving_max = 0;
    world.run_until(world.now + 30 * SECOND);
    for daemon in &world.daemons {
        let known = daemon.machine.as_ref().expect("runs").group_loads().members;
        assert!(known.len() == 100 && known.values().all(|load| load.requests > 0), "all know all loads in 30 s");
    }
    world.run_until(world.now + 30 * SECOND);
    assert_eq!(world.moves, 0, "the policy is off");
    turn_on(&mut world);
    let (moves, seconds) = world.run_until_still(150, 3600);
    let after = world.spread();
    println!("seed {seed}: scores from {before:?} to {after:?} with {moves} moves in {seconds} s");
    assert!(before.1 > 3 * before.0 && after.1 * 10 <= after.0 * 15, "{after:?}");
    assert!((1..=200).contains(&moves), "{moves} moves");
    assert!(world.moving_max <= 2, "{} volumes on their way at once", world.moving_max);
    assert_eq!((world.complaint(), world.fenced.len()), (None, 0));
    assert!(world.unserved_max < SECOND / 2, "a pause of {} ms", world.unserved_max / 1_000_000);
}

#[test]
fn a_new_member_gets_its_share_and_one_with_the_weight_0_gives_all() {
    for seed in 0..10 {
        let mut world = settled(seed, 4, 40, Latencies::USUAL);
        world.loads = (0..40).map(|number| (volume(number), RequestLoad { requests: 200, kib: 0 })).collect();
        world.load_noise = 10;
        let new = world.daemons[3].id;
        assert!(world.command(&[GroupChange::SetWeight { member: new, weight: 0 }]));
        turn_on(&mut world);
        world.run_until_still(40, 400);
        assert_eq!(world.record.owned_count(new), 0, "seed {seed}");
        assert!(world.command(&[GroupChange::SetWeight { member: new, weight: 100 }]));
        let (moves, _) = world.run_until_still(70, 600);
        let counts: Vec<usize> = world.daemons.iter().map(|daemon| world.record.owned_count(daemon.id)).collect();
        assert!(counts.iter().all(|count| (9..=11).contains(count)), "seed {seed}: {counts:?}");
        assert!(moves <= 12, "seed {seed}: {moves} moves");
    }
}

#[test]
fn a_load_that_comes_and_goes_moves_nothing() {
    for seed in 0..5 {
        let mut world = settled(seed, 3, 30, Latencies::USUAL);
        turn_on(&mut world);
        for round in 0..20 {
            for number in (0..30).step_by(3) {
                world.loads.insert(volume(number), RequestLoad { requests: 1000 * (round % 2), kib: 0 });
            }
            world.run_until(world.now + 10 * SECOND);
        }
        assert_eq!((world.moves, world.complaint(), world.fenced.len()), (0, None, 0), "seed {seed}");
        // The same load moves volumes once it stays.
        let (moves, _) = world.run_until_still(70, 400);
        assert!((1..=10).contains(&moves), "seed {seed}: {moves} moves");
    }
}

#[test]
fn a_load_of_a_former_start_is_forgotten() {
    for seed in 0..5 {
        let mut world = settled(seed, 3, 30, Latencies::USUAL);
        world.loads = (0..30).map(|number| (volume(number), RequestLoad { requests: 100, kib: 7 })).collect();
        world.run_until(world.now + 20 * SECOND);
        let id = world.daemons[0].id;
        let said = |world: &World, at: usize| {
            let machine = world.daemons[at].machine.as_ref().expect("runs");
            machine.group_loads().members.get(&id).copied()
        };
        assert_eq!(said(&world, 2), Some(RequestLoad { requests: 1000, kib: 70 }), "seed {seed}");
        world.loads.clear();
        world.kill(0);
        world.restart(0);
        world.run_until(world.now + 8 * SECOND);
        for at in [1, 2] {
            assert_eq!(said(&world, at), Some(RequestLoad::default()), "seed {seed}");
        }
    }
}

#[test]
fn small_groups_that_rebalance_recover_from_everything() {
    let (all, moved) = (seeds(), std::sync::atomic::AtomicU64::new(0));
    let (from, until) = (all.start, all.start + (all.end - all.start).div_ceil(2));
    chaos_of_seeds(from..until, |world| {
        world.settle = Some(Duration::from_secs(2));
        world.daemons.iter_mut().filter_map(|daemon| daemon.machine.as_mut()).for_each(|machine| {
            machine.set_settle_time(Duration::from_secs(2));
        });
        turn_on(world);
        world.loads = (0..20)
            .map(|number| (volume(number), RequestLoad { requests: if number % 3 == 0 { 2000 } else { 10 }, kib: 0 }))
            .collect();
        world.load_noise = 10;
        world.run_until(world.now + 6 * SECOND);
        moved.fetch_add(world.moves, std::sync::atomic::Ordering::Relaxed);
    });
    assert!(moved.into_inner() > 0, "volumes are moved by themselves before anything happens");
}
