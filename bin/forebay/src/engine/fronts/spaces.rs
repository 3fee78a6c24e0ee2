//! Space of pools, as SCSI hosts are told of it: they get a unit attention when a threshold is crossed.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::{Rc, Weak};
use std::sync::Arc;
use std::time::Duration;

use forebay_reactor::{JoinHandle, sleep, spawn};
use forebay_scsi::PoolSpace;

use super::Engine;

/// Interval between checks of the pools' free space.
const SPACE_LOOK: Duration = Duration::from_secs(2);

/// Space of each pool that has units, shared by the fronts that export them.
pub struct PoolSpaces {
    spaces: RefCell<BTreeMap<String, Arc<PoolSpace>>>,
    watching: RefCell<Option<JoinHandle<()>>>,
    /// Free space at which hosts are warned, in percent of the capacity.
    threshold_percent: u8,
}

impl PoolSpaces {
    /// Creates a list without pools.
    pub fn new(threshold_percent: u8) -> Rc<Self> {
        Rc::new(Self { spaces: RefCell::default(), watching: RefCell::default(), threshold_percent })
    }

    /// Returns the space of a pool, by name.
    pub fn of(&self, pool: &str) -> Arc<PoolSpace> {
        self.spaces.borrow_mut().entry(pool.to_owned()).or_default().clone()
    }

    /// Refreshes the spaces from now on, if that has not begun.
    pub fn watch(self: &Rc<Self>, engine: &Weak<Engine>) {
        let mut watching = self.watching.borrow_mut();
        if watching.is_none() {
            *watching = Some(spawn(self.clone().refresh(engine.clone())));
        }
    }

    /// Ends the refreshing.
    pub fn stop(&self) {
        if let Some(watching) = self.watching.take() {
            watching.abort();
        }
    }

    async fn refresh(self: Rc<Self>, engine: Weak<Engine>) {
        loop {
            let Some(engine) = engine.upgrade() else { return };
            let spaces: Vec<(String, Arc<PoolSpace>)> =
                self.spaces.borrow().iter().map(|(pool, space)| (pool.clone(), space.clone())).collect();
            for (pool, space) in spaces {
                let Ok(backend) = engine.pool(&pool).await else { continue };
                match backend.usage().await {
                    Ok(usage) => {
                        let threshold = usage.capacity / 100 * u64::from(self.threshold_percent);
                        space.update(usage.used, usage.available, threshold);
                    }
                    Err(error) => tracing::debug!(pool, %error, "asking a pool for its space failed"),
                }
            }
            drop(engine);
            sleep(SPACE_LOOK).await;
        }
    }
}
