//! Simulator: a virtual disk, network and clock behind the reactor's driver trait, replayed from a seed. On top of it
//! are the tests of store and image: oracles of permitted reads, workloads, and runs with crashes.
//!
//! See `docs/design/simulation.md` for what is simulated, the crash model, and how to replay a seed.

mod content;
mod core;
mod driver;
pub mod faults;
mod fs;
pub mod harness;
mod net;
pub mod oracle;
mod pages;
mod pmem;
mod rng;
pub mod stamp;
mod trace;
pub mod workload;
mod world;

pub use faults::{CrashPolicy, DiskFaults, Faults, NetFaults};
pub use harness::soak;
pub use pmem::SimPmem;
pub use rng::{Rng, mix64};
pub use world::{CrashKind, Stop, World};
