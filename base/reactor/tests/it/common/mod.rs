//! Helpers of the integration tests: a temporary directory, and running one test body on each driver.

use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

/// Directory of one test, removed at its end.
pub struct TempDir(PathBuf);

impl TempDir {
    pub fn new() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let name = format!("forebay-reactor-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let path = std::env::temp_dir().join(name);
        std::fs::create_dir(&path).expect("a fresh directory");
        Self(path)
    }

    pub fn join(&self, name: impl AsRef<Path>) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for TempDir {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Runs an `async fn` as a test on each driver.
#[macro_export]
macro_rules! on_each_driver {
    ($($name:ident),* $(,)?) => {
        mod uring {
            $(#[test] fn $name() {
                let reactor = forebay_reactor::Reactor::system(forebay_reactor::DriverChoice::Uring).expect("io_uring");
                reactor.block_on(super::$name());
            })*
        }
        mod epoll {
            $(#[test] fn $name() {
                let reactor = forebay_reactor::Reactor::system(forebay_reactor::DriverChoice::Poll).expect("epoll");
                reactor.block_on(super::$name());
            })*
        }
    };
}
