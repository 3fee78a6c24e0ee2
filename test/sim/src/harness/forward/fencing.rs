//! Hosts that fence each other with reservations.
//!
//! All of them use one reservation, "write exclusive, registrants only", which is never released.  Each registers with a key
//! that it uses once: after it has been preempted it registers with another one.  It sends writes over any forwarder without
//! waiting for them, so that some are held while it is preempted and registers again.

use std::cell::Cell;
use std::rc::Rc;
use std::time::Duration;

use forebay_block::ErrorKind;
use forebay_block::reservation::{HostId, ReservationAction, ReservationTable, ReservationType};
use forebay_reactor::{JoinHandle, sleep, spawn, timeout};

use super::Scene;
use super::daemons::ForwarderNode;
use crate::rng::Rng;

const KIND: ReservationType = ReservationType::WriteExclusiveRegistrants;
/// Steps of each host.
const STEPS: u64 = 60;
/// Writes of a host in flight.
const WRITES_MAX: usize = 12;

fn host_id(number: u64) -> HostId {
    HostId::new(&number.to_le_bytes()).expect("a host")
}

impl Scene {
    /// Makes the reservation, and runs the hosts.
    pub(super) async fn fence_each_other(self: Rc<Self>, mut rng: Rng) {
        // Each of the two is no change if it was executed before.
        let (host, key) = (host_id(0), 1);
        for action in [ReservationAction::Add { key, persist: None }, ReservationAction::Reserve { key, kind: KIND }] {
            loop {
                let node = rng.pick(self.group.forwarders()).clone();
                if let Ok(Ok(_)) = self.reserve(&node, &host, action.clone()).await {
                    break;
                }
                if self.is_wrong() {
                    return;
                }
                sleep(Duration::from_millis(5)).await;
            }
        }
        let hosts = (0..self.scenario.fencing).map(|number| spawn(self.clone().fencing_host(number, rng.fork())));
        for host in hosts.collect::<Vec<_>>() {
            host.await;
        }
    }

    async fn reserve(
        &self,
        node: &ForwarderNode,
        host: &HostId,
        action: ReservationAction,
    ) -> forebay_block::Result<std::result::Result<(), ()>> {
        let result = node.reserve(host, action).await;
        self.count(|tally| tally.actions_failed += u64::from(result.is_err()));
        result.map(|outcome| outcome.map(drop).map_err(drop))
    }

    async fn fencing_host(self: Rc<Self>, number: u64, mut rng: Rng) {
        let (host, key) = (host_id(number), Cell::new(number << 32 | 1));
        let mut writes: Vec<JoinHandle<()>> = Vec::new();
        for _ in 0..STEPS {
            if self.is_wrong() {
                break;
            }
            let node = rng.pick(self.group.forwarders()).clone();
            match rng.below(8) {
                0 => self.preempt(&node, &host, key.get(), &mut rng).await,
                1 => sleep(Duration::from_micros(rng.below(100_000))).await,
                _ => {
                    writes.retain(|write| !write.is_finished());
                    if writes.len() >= WRITES_MAX {
                        sleep(Duration::from_millis(rng.below(200))).await;
                    } else if let Some(write) = node.fenced_write(&host, self.group.content.fenced_write(key.get())) {
                        self.count(|tally| tally.fenced_writes += 1);
                        let scene = self.clone();
                        writes.push(spawn(async move {
                            let outdated = write.await.is_err_and(|error| error.kind() == ErrorKind::Busy);
                            scene.count(|tally| tally.outdated += u64::from(outdated));
                        }));
                    } else {
                        // Refused while it is registered with the former key.
                        key.set(key.get() + 1);
                        let _ =
                            self.reserve(&node, &host, ReservationAction::Add { key: key.get(), persist: None }).await;
                    }
                }
            }
        }
        for write in writes {
            write.await;
        }
    }

    /// Preempts another registrant; when that is acknowledged, nothing of it may land any more.
    async fn preempt(&self, node: &ForwarderNode, host: &HostId, key: u64, rng: &mut Rng) {
        let table = node.table();
        let others: Vec<u64> =
            table.registrants().iter().filter(|other| other.host != *host).map(|other| other.key).collect();
        if others.is_empty() {
            return;
        }
        let victim = *rng.pick(&others);
        let preempt = ReservationAction::Preempt { key, victim, kind: KIND, abort: rng.coin() };
        if let Ok(Ok(())) = self.reserve(node, host, preempt).await {
            self.count(|tally| tally.preempted += 1);
            self.group.content.preempted.borrow_mut().insert(victim);
        }
    }

    /// Compares the tables of all forwarders with the one that is stored.
    pub(super) async fn compare_tables(&self) -> Result<(), String> {
        if self.scenario.fencing == 0 {
            return Ok(());
        }
        let stored = self.group.content.table.borrow().clone().ok_or("no table is stored")?;
        let stored = ReservationTable::decode_whole(&stored).map_err(|error| format!("the stored table: {error}"))?;
        let preempted = self.group.content.preempted.borrow().clone();
        if let Some(registrant) = stored.registrants().iter().find(|one| preempted.contains(&one.key)) {
            return Err(format!("{registrant:?} is registered after it was preempted"));
        }
        for node in self.group.forwarders() {
            // Events may be kept for a while.
            let same = async {
                while *node.table() != stored {
                    sleep(Duration::from_millis(10)).await;
                }
            };
            let same = timeout(Duration::from_secs(60), same).await;
            same.map_err(|_| format!("a forwarder has another table than is stored: {:?}", node.table()))?;
        }
        Ok(())
    }
}
