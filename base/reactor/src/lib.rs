//! Thread-per-core runtime: tasks, timers, files, sockets and aligned buffers on io_uring.
//!
//! Forebay reaches every disk, socket and clock through this crate, and this crate through one trait,
//! [`driver::Driver`].  On a real machine the driver is io_uring, or epoll with a few file threads where io_uring is
//! forbidden.  In `test/sim` it is a virtual disk, network and clock that replay from a seed.
//!
//! ```
//! use forebay_reactor::{DriverChoice, Reactor, sleep, spawn};
//! let reactor = Reactor::system(DriverChoice::Auto)?;
//! let sum = reactor.block_on(async {
//!     let other = spawn(async { 40 });
//!     sleep(std::time::Duration::from_millis(1)).await;
//!     other.await + 2
//! });
//! assert_eq!(sum, 42);
//! # Ok::<(), std::io::Error>(())
//! ```

pub mod buf;
mod busy_poll;
pub mod cores;
pub mod cross;
pub mod driver;
pub mod event;
mod executor;
pub mod fs;
pub mod heap;
mod memory;
pub mod net;
mod network;
mod ops;
pub mod pmem;
pub mod pool;
mod queue_limit;
pub mod rdma;
pub mod shared;
pub mod shm;
pub mod sync;
pub mod time;

pub use buf::{BUF_ALIGN, Buf, BufList, BufMut, is_zero};
pub use busy_poll::BusyPoll;
pub use cores::{CoreGone, CoreHandle, Cores, CoresOptions, start_unpinned};
pub use driver::{ByteRange, DriverChoice, FileSystemSpace, OpenOptions};
pub use event::{EventSignal, EventWatch};
pub use executor::{JoinHandle, Reactor, driver_name, spawn, stand_back, try_spawn, yield_now};
pub use fs::{File, FileRange};
pub use net::{Addr, Listener, SharedListener, Stream};
pub use network::Network;
pub use pool::BufPool;
pub use shared::GuardedMapping;
pub use time::{Instant, now, random, sleep, sleep_until, timeout, try_now, wall_clock};
