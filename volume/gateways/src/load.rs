//! Measured loads of volumes: rates of requests and bytes, smoothed over a minute.

use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

use forebay_reactor::Instant;

use crate::ids::{MemberId, VolumeName};

/// Time over which loads are smoothed: what is older counts for less than 1/e.
const SMOOTHED: Duration = Duration::from_secs(60);
/// Shortest time between two samples.
const SAMPLE_INTERVAL: Duration = Duration::from_secs(1);
/// KiB that cost as much as a request does beside them.
pub const KIB_PER_REQUEST: u64 = 32;

/// Load of a volume, or of all volumes of a member.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RequestLoad {
    /// Requests a second.
    pub requests: u32,
    /// KiB a second that are read and written.
    pub kib: u32,
}

impl RequestLoad {
    /// Returns the load as one number: a request costs as much as 32 KiB that are read or written, in KiB a second.
    pub fn cost(&self) -> u64 {
        u64::from(self.requests) * KIB_PER_REQUEST + u64::from(self.kib)
    }

    /// Adds another load.
    pub fn add(&mut self, other: Self) {
        self.requests = self.requests.saturating_add(other.requests);
        self.kib = self.kib.saturating_add(other.kib);
    }
}

/// Requests of a volume since some time in the past, and bytes that they have read and written.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RequestTotals {
    /// Number of requests.
    pub requests: u64,
    /// Number of bytes.
    pub bytes: u64,
}

/// Rates of one volume, smoothed exponentially.
///
/// An average that has begun at zero is divided by the share of it that was measured: the first sample is the load, not a
/// small part of it, and after some minutes the division changes nothing.
#[derive(Debug, Clone)]
struct LoadAverage {
    at: Instant,
    totals: RequestTotals,
    requests: f64,
    bytes: f64,
    measured: f64,
}

impl LoadAverage {
    fn new(at: Instant, totals: RequestTotals) -> Self {
        Self { at, totals, requests: 0.0, bytes: 0.0, measured: 0.0 }
    }

    /// Takes the totals of a later time.  Totals that are smaller than before were begun again.
    fn sample(&mut self, at: Instant, totals: RequestTotals) {
        let time = at.since(self.at).as_secs_f64();
        if time <= 0.0 {
            return;
        }
        let share = 1.0 - (-time / SMOOTHED.as_secs_f64()).exp();
        let rate = |now: u64, before: u64| now.saturating_sub(before) as f64 / time;
        self.requests += share * (rate(totals.requests, self.totals.requests) - self.requests);
        self.bytes += share * (rate(totals.bytes, self.totals.bytes) - self.bytes);
        self.measured += share * (1.0 - self.measured);
        (self.at, self.totals) = (at, totals);
    }

    /// Returns the load; `None` before the first sample.
    fn load(&self) -> Option<RequestLoad> {
        // Rounded, and no more than the largest number of its type.
        let whole = |rate: f64| (rate / self.measured).round() as u32;
        (self.measured > 0.0).then(|| RequestLoad { requests: whole(self.requests), kib: whole(self.bytes / 1024.0) })
    }
}

/// Loads of volumes by name.
pub type VolumeLoads = BTreeMap<VolumeName, RequestLoad>;

/// Measurement of the volumes that a member has open.
#[derive(Debug, Default)]
pub struct LoadSampler {
    averages: BTreeMap<VolumeName, LoadAverage>,
    sampled: Option<Instant>,
    loads: Rc<VolumeLoads>,
}

impl LoadSampler {
    /// Returns the loads at time `now`, measured again if the last sample is a second old.  `totals` returns the volumes
    /// that are open; one that was closed meanwhile is measured from the beginning when it is opened again.
    pub fn loads<I>(&mut self, now: Instant, totals: impl FnOnce() -> I) -> Rc<VolumeLoads>
    where
        I: IntoIterator<Item = (VolumeName, RequestTotals)>,
    {
        if self.sampled.is_some_and(|at| now.since(at) < SAMPLE_INTERVAL) {
            return self.loads.clone();
        }
        self.sampled = Some(now);
        let mut before = std::mem::take(&mut self.averages);
        for (name, totals) in totals() {
            let average = match before.remove(&name) {
                Some(mut average) => {
                    average.sample(now, totals);
                    average
                }
                None => LoadAverage::new(now, totals),
            };
            self.averages.insert(name, average);
        }
        let measured = self.averages.iter().filter_map(|(name, average)| Some((name.clone(), average.load()?)));
        self.loads = Rc::new(measured.collect());
        self.loads.clone()
    }
}

/// Loads that a member knows: those of members, and those of volumes by owner.
#[derive(Debug, Clone, Default)]
pub struct GroupLoads {
    /// Loads of members, as they have said them last.
    pub members: BTreeMap<MemberId, RequestLoad>,
    /// Loads of volumes: those of this member, and those that others have told.
    pub volumes: BTreeMap<MemberId, Rc<VolumeLoads>>,
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn at(seconds: f64) -> Instant {
        Instant::from_nanos(((1000.0 + seconds) * 1e9) as u64)
    }

    fn totals(requests: u64, kib: u64) -> RequestTotals {
        RequestTotals { requests, bytes: kib * 1024 }
    }

    #[test]
    fn a_load_is_known_with_its_first_sample() {
        let mut average = LoadAverage::new(at(0.0), totals(7, 7));
        assert_eq!(average.load(), None, "what was before says nothing about rates");
        average.sample(at(1.0), totals(507, 8007));
        assert_eq!(average.load(), Some(RequestLoad { requests: 500, kib: 8000 }));
        average.sample(at(1.0), totals(507, 8007));
        assert_eq!(average.load(), Some(RequestLoad { requests: 500, kib: 8000 }), "no time has passed");
    }

    #[test]
    fn a_load_follows_in_minutes() {
        let mut average = LoadAverage::new(at(0.0), totals(0, 0));
        for second in 1..=600 {
            average.sample(at(f64::from(second)), totals(1000 * second as u64, 0));
        }
        let done = 600_000;
        let after = |average: &mut LoadAverage, second: u32| {
            average.sample(at(600.0 + f64::from(second)), totals(done, 0));
            average.load().unwrap().requests
        };
        let loads: Vec<u32> = (1..=300).map(|second| after(&mut average, second)).collect();
        assert!(loads[0] > 970, "a second without requests is not the load");
        assert!((355..380).contains(&loads[59]), "1/e is left after a minute: {}", loads[59]);
        assert!(loads[299] < 10);
    }

    #[test]
    fn totals_that_begin_again_are_no_load() {
        let mut average = LoadAverage::new(at(0.0), totals(1_000_000, 0));
        average.sample(at(1.0), totals(0, 0));
        average.sample(at(2.0), totals(10, 0));
        assert_eq!(average.load().unwrap().requests, 5);
    }

    #[test]
    fn volumes_are_sampled_once_a_second_while_they_are_open() {
        let (a, b) = (VolumeName::new("rbd/a"), VolumeName::new("rbd/b"));
        let mut sampler = LoadSampler::default();
        let first = sampler.loads(at(0.0), || [(a.clone(), totals(5, 0)), (b.clone(), totals(0, 0))]);
        assert!(first.is_empty());
        let same = sampler.loads(at(0.5), || -> [(VolumeName, RequestTotals); 0] { panic!("sampled too soon") });
        assert!(same.is_empty());
        let loads = sampler.loads(at(1.0), || [(a.clone(), totals(25, 0)), (b.clone(), totals(0, 100))]);
        assert_eq!(loads[&a], RequestLoad { requests: 20, kib: 0 });
        assert_eq!(loads[&b], RequestLoad { requests: 0, kib: 100 });
        let loads = sampler.loads(at(2.0), || [(b.clone(), totals(0, 200))]);
        assert_eq!(loads.keys().collect::<Vec<_>>(), [&b]);
        // What others have served meanwhile is not this member's.
        let loads = sampler.loads(at(3.0), || [(a.clone(), totals(1000, 0)), (b.clone(), totals(0, 300))]);
        assert_eq!(loads.keys().collect::<Vec<_>>(), [&b]);
        assert_eq!(loads[&b].kib, 100);
    }

    proptest! {
        /// A load is between the least and the highest rate that were measured, whenever the samples were taken.
        #[test]
        fn a_load_is_a_mean_of_rates(samples in prop::collection::vec((1..10_000_u64, 0..100_000_u64), 1..100)) {
            let (mut time, mut total) = (0.0, 0);
            let mut average = LoadAverage::new(at(0.0), totals(0, 0));
            let (mut least, mut most) = (f64::MAX, 0.0_f64);
            for (ms, requests) in samples {
                time += ms as f64 / 1000.0;
                total += requests;
                average.sample(at(time), totals(total, 0));
                let rate = requests as f64 / (ms as f64 / 1000.0);
                (least, most) = (least.min(rate), most.max(rate));
                let load = f64::from(average.load().unwrap().requests);
                prop_assert!(load >= least * 0.999 - 1.0 && load <= most * 1.001 + 1.0, "{} in {}..{}", load, least, most);
            }
        }
    }
}
