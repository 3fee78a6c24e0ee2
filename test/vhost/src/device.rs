//! Device that a test runs against.

use std::path::PathBuf;
use std::time::Duration;

/// Served virtio-blk device, and its process.
pub trait DeviceUnderTest {
    /// Returns the socket on which the device listens.
    fn socket(&self) -> PathBuf;

    /// Returns the socket of another device of the same process, if it has one.
    fn other_socket(&self) -> Option<PathBuf> {
        None
    }

    /// Returns false once the process has ended.
    fn is_alive(&self) -> bool;

    /// Returns the time in which the device must serve the next front-end.
    fn patience(&self) -> Duration {
        Duration::from_secs(20)
    }

    /// Returns bytes of memory and the number of descriptors that the process holds, where it is one of its own.
    fn holdings(&self) -> Option<(u64, usize)> {
        None
    }
}

/// Returns bytes of resident memory and the number of open descriptors of a process, from /proc.
pub fn holdings(process: u32) -> Option<(u64, usize)> {
    let status = std::fs::read_to_string(format!("/proc/{process}/status")).ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    let kib: u64 = line.trim().trim_end_matches(" kB").trim().parse().ok()?;
    let files = std::fs::read_dir(format!("/proc/{process}/fd")).ok()?.count();
    Some((kib << 10, files))
}
