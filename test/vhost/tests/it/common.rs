//! QEMU's storage daemon, as the device that the driver is tested on.

use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::Mutex;
use std::time::{Duration, Instant};

use forebay_vhost_host::DeviceUnderTest;
use tempfile::TempDir;

/// Time in which the daemon must come up.
const PATIENCE: Duration = Duration::from_secs(30);
/// Bytes of a device.
pub const SIZE: u64 = 64 << 20;

/// Storage daemon with devices in files of memory; it ends when dropped.
pub struct StorageDaemon {
    child: Mutex<Child>,
    folder: TempDir,
    devices: usize,
    queues: u16,
}

impl StorageDaemon {
    /// Starts the daemon.
    ///
    /// # Panics
    /// When it is not installed or does not come up.
    pub fn start(devices: usize, queues: u16) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        for device in 0..devices {
            let file = std::fs::File::create(folder.path().join(format!("{device}.raw"))).expect("a file");
            file.set_len(SIZE).expect("space");
        }
        let child = Mutex::new(launch(folder.path(), devices, queues));
        let this = Self { child, folder, devices, queues };
        this.await_sockets();
        this
    }

    /// Returns the socket of a device.
    pub fn device(&self, device: usize) -> PathBuf {
        self.folder.path().join(format!("{device}.sock"))
    }

    /// Kills the daemon as a crash would, and starts another one on the same files.
    pub fn crash(&self) {
        let mut child = self.child.lock().expect("no panic");
        child.kill().expect("it runs");
        child.wait().expect("it ends");
        for device in 0..self.devices {
            // A killed daemon leaves its sockets.
            let _ = std::fs::remove_file(self.device(device));
        }
        *child = launch(self.folder.path(), self.devices, self.queues);
        drop(child);
        self.await_sockets();
    }

    fn await_sockets(&self) {
        let begun = Instant::now();
        for device in 0..self.devices {
            while UnixStream::connect(self.device(device)).is_err() {
                assert!(self.is_alive() && begun.elapsed() < PATIENCE, "qemu-storage-daemon does not come up");
                std::thread::sleep(Duration::from_millis(5));
            }
        }
    }
}

fn launch(folder: &Path, devices: usize, queues: u16) -> Child {
    let mut command = Command::new("qemu-storage-daemon");
    for device in 0..devices {
        let file = folder.join(format!("{device}.raw"));
        let socket = folder.join(format!("{device}.sock"));
        command.args([
            "--blockdev",
            &format!("driver=file,node-name=n{device},filename={},discard=unmap", file.display()),
        ]);
        command.args([
            "--export",
            &format!(
                "type=vhost-user-blk,id=e{device},node-name=n{device},addr.type=unix,addr.path={},writable=on,\
                 num-queues={queues}",
                socket.display()
            ),
        ]);
    }
    command.stdin(Stdio::null()).stderr(Stdio::null());
    command.spawn().unwrap_or_else(|error| {
        panic!("qemu-storage-daemon: {error}: install Debian's package qemu-system-common (scripts/setup test)")
    })
}

impl Drop for StorageDaemon {
    fn drop(&mut self) {
        if let Ok(child) = self.child.get_mut() {
            // Nothing is left to do where this fails: it has ended already.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

impl DeviceUnderTest for StorageDaemon {
    fn socket(&self) -> PathBuf {
        self.device(0)
    }

    fn other_socket(&self) -> Option<PathBuf> {
        (self.devices > 1).then(|| self.device(1))
    }

    fn patience(&self) -> Duration {
        // The daemon serves no one else once some cases have stopped it.
        Duration::from_secs(5)
    }

    fn is_alive(&self) -> bool {
        matches!(self.child.lock().expect("no panic").try_wait(), Ok(None))
    }
}
