//! Waiting for one another inside a reactor: nothing here is `Send`, nothing locks.

mod inflight;
mod keyed;
mod notify;
pub mod oneshot;
pub mod queue;
mod semaphore;

pub use inflight::InFlight;
pub use keyed::{KeyedGuard, KeyedLock};
pub use notify::Notify;
pub use semaphore::{Permit, Semaphore};
