//! Groups in virtual time: large ones that lose members, and small ones to which everything happens.

#[path = "simulation/conditions.rs"]
mod conditions;
#[path = "simulation/rebalancing.rs"]
mod rebalancing;
#[path = "simulation/world.rs"]
mod world;

use std::time::Duration;

use conditions::{Latencies, RandomFaults};
use forebay_gateways::{GatewayState, GroupChange, VolumeName};
use world::World;

const SECOND: u64 = 1_000_000_000;

/// Goal: longest time for which a volume is not served after a failure.
const UNSERVED_MAX: u64 = 5 * SECOND;

fn settled(seed: u64, members: usize, volumes: usize, latencies: Latencies) -> World {
    let mut world = World::new(seed, members, volumes, latencies);
    let limit = world.now + 30 * SECOND;
    while world.complaint().is_some() {
        assert!(world.now < limit, "seed {seed}: {:?}", world.complaint());
        world.run_until(world.now + SECOND / 10);
    }
    world.unserved_max = 0;
    world
}

/// Kills some members at once, and returns the longest time for which a volume was not served, in milliseconds.
fn lose(world: &mut World, killed: &[usize], kill: impl Fn(&mut World, usize)) -> u64 {
    world.unserved_max = 0;
    let fenced = world.fenced.len();
    for at in killed {
        kill(world, *at);
    }
    let limit = world.now + 2 * UNSERVED_MAX;
    while world.complaint().is_some() && world.now < limit {
        world.run_until(world.now + SECOND / 20);
    }
    assert_eq!(world.complaint(), None, "after {} members were killed", killed.len());
    assert!(world.unserved_max <= UNSERVED_MAX, "volumes were not served for {} ms", world.unserved_max / 1_000_000);
    // One fencing call a dead member, and none for any other.
    assert_eq!(world.fenced.len() - fenced, killed.len(), "{}", world.describe());
    assert!(world.fencings.values().all(|count| *count == 1), "{:?}", world.fencings);
    world.unserved_max / 1_000_000
}

fn hundred_members(seed: u64, latencies: Latencies) -> String {
    let mut world = settled(seed, 100, 10_000, latencies);
    let (mut singly, mut processes) = (0, 0);
    for number in 0..6 {
        let at = world.random.below(100) as usize;
        if world.daemons[at].machine.is_some() {
            match number % 2 {
                0 => singly = singly.max(lose(&mut world, &[at], World::kill)),
                _ => processes = processes.max(lose(&mut world, &[at], World::kill_process)),
            }
            world.run_until(world.now + 3 * SECOND);
        }
    }
    assert!(processes < singly, "a process that is killed is noticed sooner than a machine");
    let rack: Vec<usize> = (0..100).filter(|at| at % 10 == 3 && world.daemons[*at].machine.is_some()).collect();
    let by_rack = lose(&mut world, &rack, World::kill);
    // Messages while nothing happens.
    world.run_until(world.now + 5 * SECOND);
    let sent = |world: &World| world.daemons.iter().map(|daemon| daemon.sent).collect::<Vec<_>>();
    let before = sent(&world);
    world.run_until(world.now + 10 * SECOND);
    let most = sent(&world).iter().zip(&before).map(|(after, before)| after - before).max().unwrap();
    assert!(most <= 10 * 24 + 24, "a member has sent {most} messages in 10 leases");
    let (changes, conflicts) = (world.record_changes, world.conflicts);
    format!(
        "seed {seed}: not served for {singly} ms after a machine was lost, {processes} ms after a process was, {by_rack} ms after {} machines; {changes} changes, {conflicts} conflicts; {most} messages in 10 leases",
        rack.len()
    )
}

#[test]
fn a_hundred_members_lose_some_singly_and_by_the_rack() {
    println!("{}", hundred_members(1, Latencies::USUAL));
    println!("{}", hundred_members(2, Latencies::SLOW_RECORD));
}

fn seeds() -> std::ops::Range<u64> {
    let number = |name, or| std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(or);
    let first = number("FOREBAY_SEED", 0);
    first..first + number("FOREBAY_SEEDS", 2000)
}

/// Everything happens to a small group, and then nothing any more: all is served again.
fn chaos(seed: u64, prepare: impl Fn(&mut World)) {
    let members = 2 + (seed % 5) as usize;
    let latencies = if seed.is_multiple_of(3) { Latencies::SLOW_RECORD } else { Latencies::USUAL };
    let mut world = settled(seed, members, 20, latencies);
    prepare(&mut world);
    world.faults = RandomFaults { lost_answers: 10, lost_messages: 50, failed_opens: 10, failed_fences: 4 };
    for _ in 0..30 {
        let at = world.random.below(members as u64) as usize;
        let other = world.random.below(members as u64) as usize;
        let (id, to) = (world.daemons[at].id, world.daemons[other].id);
        let volume = VolumeName::new(format!("rbd/v{:05}", world.random.below(20)));
        world.change_a_load();
        match world.random.below(16) {
            0 => world.kill(at),
            13 => world.kill_process(at),
            // Refused by something on the way, although it runs.
            14 => world.refuse(at),
            1 => world.stop(at),
            2 => {
                let time = Duration::from_millis(100 + world.random.below(5000));
                world.suspend(at, time);
            }
            3 => world.daemons[at].cut_from_pool = true,
            4 => world.daemons[at].part = (1 + world.random.below(2)) as u8,
            5 => world.daemons.iter_mut().for_each(|daemon| (daemon.cut_from_pool, daemon.part) = (false, 0)),
            6 => {
                world.command(&[GroupChange::Drain { member: id, drain: true }]);
            }
            7 => {
                world.command(&[GroupChange::Drain { member: id, drain: false }]);
            }
            8 => {
                world.command(&[GroupChange::CancelMove { volume }]);
            }
            // A log is ended before its volume is removed.
            11 | 12 if !world.logs.is_empty() => {}
            11 => {
                world.command(&[GroupChange::RemoveVolume { volume }]);
            }
            12 => {
                world.command(&[GroupChange::AddVolume { volume, owner: to, settings: serde_json::Value::Null }]);
            }
            9 | 10 => {
                world.command(&[GroupChange::ProposeMove { volume, to }]);
            }
            _ => (0..members).for_each(|at| world.restart(at)),
        }
        let time = world.random.below(3 * SECOND / 2);
        world.run_until(world.now + time);
    }
    world.faults = RandomFaults::default();
    world.daemons.iter_mut().for_each(|daemon| (daemon.cut_from_pool, daemon.part) = (false, 0));
    let limit = world.now + 60 * SECOND;
    loop {
        for at in 0..members {
            world.restart(at);
            let id = world.daemons[at].id;
            if world.state(at) == Some(GatewayState::Draining) {
                world.command(&[GroupChange::Drain { member: id, drain: false }]);
            }
        }
        world.run_until(world.now + SECOND);
        let complaint = world.complaint();
        if complaint.is_none() && world.serving() == members {
            return;
        }
        assert!(world.now < limit, "{complaint:?}, {} of {members} serve: {}", world.serving(), world.describe());
    }
}

fn chaos_of_seeds(seeds: std::ops::Range<u64>, prepare: impl Fn(&mut World) + std::panic::RefUnwindSafe) {
    for seed in seeds {
        if let Err(panic) = std::panic::catch_unwind(|| chaos(seed, &prepare)) {
            println!("FOREBAY_SEED={seed} FOREBAY_SEEDS=1 repeats it");
            std::panic::resume_unwind(panic);
        }
    }
}

#[test]
fn small_groups_recover_from_everything() {
    chaos_of_seeds(seeds(), |_| {});
}

#[test]
fn small_groups_whose_volumes_have_logs_recover_from_everything() {
    chaos_of_seeds(seeds(), World::give_logs);
}

/// Returns a group whose volumes have logs with two complete copies each.
fn settled_with_logs(seed: u64, members: usize) -> World {
    let mut world = settled(seed, members, 30, Latencies::USUAL);
    world.give_logs();
    let limit = world.now + 30 * SECOND;
    while !world.logs_are_complete(2) {
        assert!(world.now < limit, "seed {seed}: no copies are made");
        world.run_until(world.now + SECOND / 10);
    }
    world
}

#[test]
fn volumes_with_logs_go_to_the_members_that_have_copies() {
    for seed in 0..20 {
        let mut world = settled_with_logs(seed, 4);
        let killed = world.daemons[0].id;
        let owned: Vec<VolumeName> = world.record.owned_by(killed).cloned().collect();
        let copies: Vec<_> = owned.iter().map(|name| world.record.volumes()[name].copies.clone().unwrap()).collect();
        lose(&mut world, &[0], World::kill);
        for (name, copies) in owned.iter().zip(&copies) {
            let owner = world.record.volumes()[name].owner.member;
            assert!(owner != killed && copies.contains(&owner), "seed {seed}: {name}");
        }
        // Lost copies are made elsewhere, so that the next owner can be lost as well.
        let limit = world.now + 30 * SECOND;
        while !world.logs_are_complete(2) {
            assert!(world.now < limit, "seed {seed}: lost copies are not replaced");
            world.run_until(world.now + SECOND / 10);
        }
        let id = world.daemons[1].id;
        assert!(world.command(&[GroupChange::Drain { member: id, drain: true }]));
        while world.record.owned_count(id) > 0 {
            assert!(world.now < limit + 30 * SECOND, "seed {seed}: {} are left", world.record.owned_count(id));
            world.run_until(world.now + SECOND / 10);
        }
    }
}

#[test]
fn a_volume_waits_for_the_only_complete_copy_of_its_log() {
    for seed in 0..20 {
        let mut world = settled_with_logs(seed, 2);
        world.kill(1);
        // The copies at the member that is lost are dropped, and no other member is there.
        world.run_until(world.now + 5 * SECOND);
        assert_eq!((world.complaint(), world.record.owned_count(world.daemons[0].id)), (None, 30), "seed {seed}");
        world.kill(0);
        world.restart(1);
        world.run_until(world.now + 20 * SECOND);
        assert_eq!(world.unserved.len(), 30, "seed {seed}: it has no copy that is complete");
        world.restart(0);
        world.run_until(world.now + 10 * SECOND);
        assert_eq!(world.complaint(), None, "seed {seed}");
    }
}

#[test]
fn a_member_is_drained_and_stopped_without_a_fencing() {
    for seed in 0..20 {
        let mut world = settled(seed, 4, 100, Latencies::USUAL);
        let id = world.daemons[1].id;
        assert!(world.command(&[GroupChange::Drain { member: id, drain: true }]));
        let limit = world.now + 60 * SECOND;
        while world.record.owned_count(id) > 0 {
            assert!(world.now < limit, "seed {seed}: {} volumes are left", world.record.owned_count(id));
            world.run_until(world.now + SECOND / 10);
        }
        world.stop(1);
        world.stop(2);
        world.run_until(world.now + 3 * SECOND);
        assert_eq!(world.complaint(), None, "seed {seed}");
        assert_eq!(world.fenced.len(), 0, "seed {seed}");
        assert!([1, 2].iter().all(|at| world.daemons[*at].machine.is_none()), "seed {seed}");
    }
}

#[test]
fn a_member_that_is_started_again_at_once_keeps_its_volumes() {
    for seed in 0..20 {
        let mut world = settled(seed, 3, 30, Latencies::USUAL);
        world.kill(0);
        world.run_until(world.now + SECOND / 5);
        world.restart(0);
        world.run_until(world.now + 4 * SECOND);
        assert_eq!(world.complaint(), None, "seed {seed}");
        assert_eq!(world.record.owned_count(world.daemons[0].id), 10, "seed {seed}");
        assert_eq!(world.fenced.len(), 1, "seed {seed}: its own former start");
    }
}

#[test]
fn a_process_that_is_killed_is_fenced_at_once_and_a_member_that_others_hear_is_not() {
    for seed in 0..20 {
        let mut world = settled(seed, 3, 30, Latencies::USUAL);
        let (id, start) = (world.daemons[0].id, world.daemons[0].machine.as_ref().expect("runs").start());
        // One of the others is refused, by something on its way.
        world.refused_at(1, id, start);
        world.run_until(world.now + 3 * SECOND);
        assert_eq!(world.fenced.len(), 0, "seed {seed}: the third one hears it");
        world.kill_process(0);
        world.run_until(world.now + 2 * SECOND / 5);
        let fencing = world.record.member(id).map(|member| member.state);
        assert!(!fencing.is_some_and(GatewayState::serves), "seed {seed}: within less than half a lease");
        world.run_until(world.now + 3 * SECOND / 2);
        assert_eq!((world.complaint(), world.fenced.len()), (None, 1), "seed {seed}");
    }
}

#[test]
fn in_a_group_of_two_a_process_is_gone_only_after_several_refusals() {
    for seed in 0..20 {
        let mut world = settled(seed, 2, 20, Latencies::USUAL);
        let (id, start) = (world.daemons[0].id, world.daemons[0].machine.as_ref().expect("runs").start());
        // In two bursts, while the connection is interrupted.
        world.cut_links.insert((0, 1));
        for pause in [SECOND / 40, SECOND / 10] {
            for _ in 0..5 {
                world.refused_at(1, id, start);
            }
            world.run_until(world.now + pause);
        }
        assert!(world.state(0).is_some_and(GatewayState::serves), "seed {seed}: two refusals fence nobody");
        world.cut_links.clear();
        world.run_until(world.now + 3 * SECOND);
        assert_eq!((world.complaint(), world.fenced.len()), (None, 0), "seed {seed}");
        world.kill_process(0);
        world.run_until(world.now + 2 * SECOND / 5);
        assert!(!world.state(0).is_some_and(GatewayState::serves), "seed {seed}: within less than half a lease");
        world.run_until(world.now + 3 * SECOND / 2);
        assert_eq!((world.complaint(), world.fenced.len()), (None, 1), "seed {seed}");
    }
}

#[test]
fn a_machine_that_is_refused_everywhere_accuses_nobody_at_once() {
    for seed in 0..20 {
        let mut world = settled(seed, 3, 30, Latencies::USUAL);
        // Its own packet filter refuses what it sends, for a moment.
        for other in [1, 2] {
            let (id, start) = (world.daemons[other].id, world.daemons[other].machine.as_ref().expect("runs").start());
            world.refused_at(0, id, start);
        }
        world.run_until(world.now + 3 * SECOND);
        assert_eq!((world.complaint(), world.fenced.len()), (None, 0), "seed {seed}");
    }
}

#[test]
fn a_pool_that_is_away_for_all_costs_nobody_anything() {
    let mut world = settled(1, 4, 40, Latencies::USUAL);
    world.daemons.iter_mut().for_each(|daemon| daemon.cut_from_pool = true);
    world.run_until(world.now + 20 * SECOND);
    assert!(world.daemons.iter().all(|daemon| daemon.hosts), "hosts wait, rather than lose their paths");
    world.daemons.iter_mut().for_each(|daemon| daemon.cut_from_pool = false);
    world.run_until(world.now + 3 * SECOND);
    assert_eq!(world.complaint(), None);
    assert_eq!((world.fenced.len(), world.unserved_max), (0, 0));
}

#[test]
fn a_member_without_the_pool_gives_its_hosts_up_and_is_fenced() {
    let mut world = settled(2, 3, 30, Latencies::USUAL);
    world.daemons[0].cut_from_pool = true;
    world.run_until(world.now + 3 * SECOND / 2);
    assert!(!world.daemons[0].hosts);
    world.run_until(world.now + 5 * SECOND);
    assert!(matches!(world.state(0), Some(GatewayState::Out(_))));
    assert!(world.unserved_max <= UNSERVED_MAX && world.unserved.is_empty());
    world.daemons[0].cut_from_pool = false;
    world.run_until(world.now + 5 * SECOND);
    assert_eq!(world.state(0), Some(GatewayState::Active));
    assert_eq!(world.complaint(), None);
}

#[test]
fn of_two_members_that_do_not_hear_each_other_one_goes_on() {
    for seed in 0..30 {
        let mut world = settled(seed, 2, 20, Latencies::USUAL);
        world.daemons[1].part = 1;
        world.run_until(world.now + 6 * SECOND);
        assert_eq!(world.fenced.len() % 2, 1, "seed {seed}: {} fencings", world.fenced.len());
        let fenced = world.fenced.len();
        world.daemons[1].part = 0;
        world.run_until(world.now + 6 * SECOND);
        assert_eq!(world.complaint(), None, "seed {seed}");
        assert!(world.fenced.len() <= fenced + 1, "seed {seed}");
    }
}

#[test]
fn members_that_a_third_one_hears_stay() {
    for seed in 0..10 {
        let mut world = settled(seed, 4, 20, Latencies::USUAL);
        world.cut_links.extend([(0, 1), (2, 3)]);
        world.run_until(world.now + 20 * SECOND);
        assert_eq!(world.fenced.len(), 0, "seed {seed}");
        assert_eq!(world.complaint(), None, "seed {seed}");
        // A member that dies is fenced all the same.
        world.kill(0);
        world.run_until(world.now + 5 * SECOND);
        assert_eq!((world.fenced.len(), world.unserved.len()), (1, 0), "seed {seed}");
    }
}
