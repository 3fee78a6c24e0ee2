//! Synchronization between tasks of one reactor: single-threaded, not `Send`, without locks.

mod inflight;
mod join;
mod keyed;
mod notify;
pub mod oneshot;
pub mod queue;
mod semaphore;
mod weak_map;

pub use inflight::InFlight;
pub use join::join_all;
pub use keyed::{KeyedGuard, KeyedLock};
pub use notify::Notify;
pub use semaphore::{Permit, Semaphore};
pub use weak_map::WeakMap;
