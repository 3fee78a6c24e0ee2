//! Fair share of a core: volumes with few requests in flight are not delayed by volumes with many.

use std::collections::VecDeque;
use std::time::Duration;

use forebay_block::BlockRequest;
use forebay_reactor::Instant;
use slab::Slab;

use crate::throttle::{QosAdmission, Ticket};

/// Cost of a request besides its bytes, in bytes: what the embedded store takes for a request at all is as much as for
/// that many more bytes of one.
const REQUEST_COST: u64 = 8 << 10;
/// Demand up to which a volume is light: four requests of 4 KiB.
const LIGHT_MAX: u64 = 4 * (REQUEST_COST + (4 << 10));
/// Cost that all heavy volumes together may have in flight while a light one is active.
const BUDGET: u64 = 3 * (REQUEST_COST + (4 << 10));
/// Time after its last request for which a light volume is active.
const ACTIVE: Duration = Duration::from_millis(20);

/// Returns the cost of a request, in bytes; `None` for a flush, which is not delayed.
pub(crate) fn cost_of(request: &BlockRequest) -> Option<u64> {
    request.extent().map(|extent| match request {
        // These move no data.
        BlockRequest::Discard(_) | BlockRequest::WriteZeroes { .. } => REQUEST_COST,
        _ => REQUEST_COST.saturating_add(extent.len),
    })
}

/// Identifies a volume among those of a core.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ShareKey(usize);

/// Requests of a volume.
#[derive(Debug, Default)]
struct VolumeLoad {
    in_flight: usize,
    in_flight_cost: u64,
    waiting: VecDeque<(Ticket, u64)>,
    waiting_cost: u64,
}

impl VolumeLoad {
    fn is_heavy(&self) -> bool {
        self.in_flight_cost.saturating_add(self.waiting_cost) > LIGHT_MAX
    }
}

/// Volume that was light when its last request came.
#[derive(Debug, Clone, Copy)]
struct LightVolume {
    key: ShareKey,
    until: Instant,
}

/// Shares of the volumes of a core. It does no I/O and has no clock.
///
/// A volume is *heavy* while the requests that it has in flight or waiting cost more than `LIGHT_MAX`, and otherwise
/// *light*. While a light volume is active, the heavy ones divide a budget of requests in flight, so that a request of the
/// light one finds a short queue in front of the store.
///
/// | invariant | |
/// |---|---|
/// | F1 | A request of a light volume never waits. |
/// | F2 | While no other volume is light and active, nothing waits. |
/// | F3 | A volume with waiting requests has one in flight at least, so that they continue without a timer. |
/// | F4 | Requests of a volume are admitted in order. |
#[derive(Debug, Default)]
pub struct FairShare {
    volumes: Slab<VolumeLoad>,
    heavy: usize,
    /// The two volumes that were light last, so that each volume knows of another.
    light: [Option<LightVolume>; 2],
    next: u64,
}

impl FairShare {
    /// Adds a volume.
    pub fn add(&mut self) -> ShareKey {
        ShareKey(self.volumes.insert(VolumeLoad::default()))
    }

    /// Removes a volume without requests.
    pub fn remove(&mut self, key: ShareKey) {
        let load = self.volumes.remove(key.0);
        debug_assert!(load.in_flight == 0 && load.waiting.is_empty(), "requests of a volume that is removed");
        self.light
            .iter_mut()
            .filter(|light| light.is_some_and(|light| light.key == key))
            .for_each(|light| *light = None);
    }

    /// Admits a request of that cost, or lets it wait; calls `admitted` for each one that waited and is admitted now.
    pub fn admit(&mut self, key: ShareKey, cost: u64, now: Instant, mut admitted: impl FnMut(Ticket)) -> QosAdmission {
        let ticket = Ticket(self.next);
        self.next += 1;
        let was_heavy = self.volumes[key.0].is_heavy();
        let load = &mut self.volumes[key.0];
        load.waiting.push_back((ticket, cost));
        load.waiting_cost = load.waiting_cost.saturating_add(cost);
        self.count_heavy(key, was_heavy);
        if !self.volumes[key.0].is_heavy() {
            self.note_light(LightVolume { key, until: now + ACTIVE });
        }
        let mut admission = QosAdmission::Wait(ticket);
        self.release(key, now, |other| match other == ticket {
            true => admission = QosAdmission::Now,
            false => admitted(other),
        });
        admission
    }

    /// Ends a request that was admitted; calls `admitted` for each waiting one of the volume that is admitted instead.
    pub fn complete(&mut self, key: ShareKey, cost: u64, now: Instant, admitted: impl FnMut(Ticket)) {
        let was_heavy = self.volumes[key.0].is_heavy();
        let load = &mut self.volumes[key.0];
        load.in_flight -= 1;
        load.in_flight_cost -= cost;
        self.count_heavy(key, was_heavy);
        self.release(key, now, admitted);
    }

    /// Removes a waiting request; returns whether it waited. One that does not has been admitted. Calls `admitted` for each
    /// one behind it that is admitted now.
    pub fn cancel(&mut self, key: ShareKey, ticket: Ticket, now: Instant, admitted: impl FnMut(Ticket)) -> bool {
        let was_heavy = self.volumes[key.0].is_heavy();
        let load = &mut self.volumes[key.0];
        let Ok(at) = load.waiting.binary_search_by_key(&ticket, |(ticket, _)| *ticket) else { return false };
        let removed = load.waiting.remove(at);
        load.waiting_cost -= removed.map_or(0, |(_, cost)| cost);
        self.count_heavy(key, was_heavy);
        self.release(key, now, admitted);
        true
    }

    /// Admits waiting requests of a volume, as many as its share allows.
    fn release(&mut self, key: ShareKey, now: Instant, mut admitted: impl FnMut(Ticket)) {
        while let Some(&(ticket, cost)) = self.volumes[key.0].waiting.front()
            && self.has_share(key, cost, now)
        {
            let load = &mut self.volumes[key.0];
            load.waiting.pop_front();
            load.waiting_cost -= cost;
            load.in_flight += 1;
            load.in_flight_cost += cost;
            admitted(ticket);
        }
    }

    /// Returns whether a volume may have one more request in flight.
    fn has_share(&self, key: ShareKey, cost: u64, now: Instant) -> bool {
        let load = &self.volumes[key.0];
        if load.in_flight == 0 || !load.is_heavy() {
            return true;
        }
        let is_other = |light: &LightVolume| light.key != key && light.until > now;
        if !self.light.iter().flatten().any(is_other) {
            return true;
        }
        load.in_flight_cost.saturating_add(cost) <= BUDGET / self.heavy.max(1) as u64
    }

    fn count_heavy(&mut self, key: ShareKey, was_heavy: bool) {
        match (was_heavy, self.volumes[key.0].is_heavy()) {
            (false, true) => self.heavy += 1,
            (true, false) => self.heavy -= 1,
            _ => {}
        }
    }

    fn note_light(&mut self, light: LightVolume) {
        if self.light[0].is_none_or(|last| last.key != light.key) {
            self.light[1] = self.light[0];
        }
        self.light[0] = Some(light);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SMALL: u64 = REQUEST_COST + (4 << 10);

    fn at(micros: u64) -> Instant {
        Instant::from_nanos(micros * 1000)
    }

    fn admit(share: &mut FairShare, key: ShareKey, cost: u64, micros: u64) -> QosAdmission {
        share.admit(key, cost, at(micros), |_| unreachable!("nothing else is admitted"))
    }

    #[test]
    fn a_volume_alone_has_no_limit() {
        let mut share = FairShare::default();
        let (busy, _idle) = (share.add(), share.add());
        for time in 0..1000 {
            assert_eq!(admit(&mut share, busy, SMALL, time), QosAdmission::Now);
        }
        for time in 0..1000 {
            share.complete(busy, SMALL, at(1000 + time), |_| unreachable!("nothing waits"));
        }
    }

    #[test]
    fn busy_volumes_divide_the_budget_while_a_light_one_is_active() {
        let mut share = FairShare::default();
        let (quiet, busy) = (share.add(), [share.add(), share.add()]);
        assert_eq!(admit(&mut share, quiet, SMALL, 0), QosAdmission::Now);
        for volume in busy {
            let admitted = (0..128).filter(|_| admit(&mut share, volume, SMALL, 1) == QosAdmission::Now).count();
            assert_eq!(admitted, 4, "it is light at first");
        }
        // From now on two share it: what ends is replaced only within half of the budget, by one at a time.
        let mut continued = 0;
        for _ in 0..4 {
            share.complete(busy[0], SMALL, at(2), |_| continued += 1);
        }
        assert_eq!((continued, share.volumes[busy[0].0].in_flight), (1, 1));
        // The quiet volume is never held up.
        share.complete(quiet, SMALL, at(3), |_| unreachable!("nothing waits"));
        assert_eq!(admit(&mut share, quiet, SMALL, 3), QosAdmission::Now);
        share.complete(quiet, SMALL, at(4), |_| unreachable!("nothing waits"));
        // When it is idle, the next completion lets all others go on.
        let mut all = 0;
        share.complete(busy[1], SMALL, at(30_000), |_| all += 1);
        assert_eq!(all, 124);
    }

    #[test]
    fn a_large_request_is_admitted_alone() {
        let mut share = FairShare::default();
        let (quiet, busy) = (share.add(), share.add());
        assert_eq!(admit(&mut share, quiet, SMALL, 0), QosAdmission::Now);
        assert_eq!(admit(&mut share, busy, 1 << 30, 0), QosAdmission::Now);
        assert!(matches!(admit(&mut share, busy, 1 << 30, 0), QosAdmission::Wait(_)));
        let mut continued = 0;
        share.complete(busy, 1 << 30, at(1), |_| continued += 1);
        assert_eq!(continued, 1);
    }

    #[derive(Debug, Clone)]
    enum Step {
        Admit(usize, u64),
        Complete(usize),
        Cancel(usize),
        Wait(u64),
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            5 => (0_usize..4, 1_u64..100_000).prop_map(|(volume, cost)| Step::Admit(volume, cost)),
            4 => (0_usize..4).prop_map(Step::Complete),
            1 => (0_usize..4).prop_map(Step::Cancel),
            1 => (0_u64..30_000).prop_map(Step::Wait),
        ]
    }

    /// Moves the waiting requests that were admitted to those in flight.
    fn admitted(
        volume: usize,
        tickets: Vec<Ticket>,
        flying: &mut [Vec<u64>],
        waiting: &mut [VecDeque<(Ticket, u64)>],
    ) -> Result<(), TestCaseError> {
        for ticket in tickets {
            let (first, cost) = waiting[volume].pop_front().expect("one waits");
            prop_assert_eq!(first, ticket, "F4");
            flying[volume].push(cost);
        }
        Ok(())
    }

    proptest! {
        #[test]
        fn nothing_is_lost_and_light_volumes_never_wait(steps in proptest::collection::vec(step(), 1..400)) {
            let mut share = FairShare::default();
            let keys: Vec<_> = (0..4).map(|_| share.add()).collect();
            let (mut flying, mut waiting) = (vec![Vec::new(); 4], vec![VecDeque::new(); 4]);
            let mut time = 0;
            for step in steps {
                match step {
                    Step::Admit(volume, cost) => {
                        let mut others = Vec::new();
                        let admission = share.admit(keys[volume], cost, at(time), |ticket| others.push(ticket));
                        admitted(volume, others, &mut flying, &mut waiting)?;
                        match admission {
                            QosAdmission::Now => flying[volume].push(cost),
                            QosAdmission::Wait(ticket) => {
                                waiting[volume].push_back((ticket, cost));
                                prop_assert!(share.volumes[volume].is_heavy(), "F1");
                            }
                        }
                    }
                    Step::Complete(volume) => if let Some(cost) = flying[volume].pop() {
                        let mut others = Vec::new();
                        share.complete(keys[volume], cost, at(time), |ticket| others.push(ticket));
                        admitted(volume, others, &mut flying, &mut waiting)?;
                    },
                    Step::Cancel(volume) => if let Some((ticket, _)) = waiting[volume].pop_front() {
                        let mut others = Vec::new();
                        prop_assert!(share.cancel(keys[volume], ticket, at(time), |ticket| others.push(ticket)));
                        admitted(volume, others, &mut flying, &mut waiting)?;
                    },
                    Step::Wait(micros) => time += micros,
                }
                for (volume, load) in &share.volumes {
                    prop_assert_eq!((load.in_flight, load.in_flight_cost), (flying[volume].len(), flying[volume].iter().sum()));
                    prop_assert_eq!(load.waiting_cost, waiting[volume].iter().map(|(_, cost)| cost).sum::<u64>());
                    prop_assert!(load.waiting.is_empty() || load.in_flight > 0, "F3");
                }
                prop_assert_eq!(share.heavy, share.volumes.iter().filter(|(_, load)| load.is_heavy()).count());
            }
        }
    }
}
