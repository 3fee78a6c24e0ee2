//! Devices of the kernel's NBD client, as `/sys/block`, `/dev` and `/proc` show them.  Everything here may block.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::{FileTypeExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

use super::record::MappingRecord;
use super::users::SystemView;
use crate::failure::{Failure, FailureKind, Result};

/// Unit of sizes in `/sys/block`, in bytes.
const SECTOR: u64 = 512;

/// Returns the path of a device.
pub fn path(index: u32) -> PathBuf {
    format!("/dev/nbd{index}").into()
}

/// Returns the number of a device by its path.
pub fn index_of(path: &str) -> Option<u32> {
    path.strip_prefix("/dev/nbd")?.parse().ok()
}

fn attribute(index: u32, name: &str) -> Option<String> {
    let text = fs::read_to_string(format!("/sys/block/nbd{index}/{name}")).ok()?;
    Some(text.trim().to_owned())
}

/// Returns the identifier of the running boot of this machine.
pub fn boot() -> String {
    fs::read_to_string("/proc/sys/kernel/random/boot_id").map_or_else(|_| String::new(), |text| text.trim().to_owned())
}

/// Returns the device of a mapping if the kernel still has it: configured, and by this mapping.
pub fn connected(record: &MappingRecord) -> Option<u32> {
    let index = record.device?;
    attribute(index, "pid")?;
    let same = match attribute(index, "backend") {
        Some(backend) => backend == record.backend,
        // A kernel before 5.14.
        None => record.boot == boot(),
    };
    same.then_some(index)
}

/// Finds the device with an identifier, for a mapping whose device was not recorded.
pub fn find(backend: &str) -> Option<u32> {
    let devices = fs::read_dir("/sys/block").ok()?;
    let indices = devices.flatten().filter_map(|entry| entry.file_name().to_str()?.strip_prefix("nbd")?.parse().ok());
    indices.into_iter().find(|&index| attribute(index, "backend").is_some_and(|found| found == backend))
}

/// Returns the size of a device in bytes.
pub fn size(index: u32) -> Option<u64> {
    Some(attribute(index, "size")?.parse::<u64>().ok()?.saturating_mul(SECTOR))
}

/// Returns whether a device has a size in bytes, rounded down to sectors, and a node in `/dev`.
pub fn is_usable(index: u32, bytes: u64) -> bool {
    size(index) == Some(bytes / SECTOR * SECTOR)
        && fs::metadata(path(index)).is_ok_and(|meta| meta.file_type().is_block_device())
}

/// Claim of a device, which keeps others from mounting or claiming it or its partitions.
pub struct ClaimedDevice {
    _device: File,
}

/// Claims a device, and writes its dirty pages and those of its partitions.
///
/// # Errors
/// `Busy` if it or a partition is mounted, claimed, part of another device, or open in another process.
pub fn claim(index: u32) -> Result<ClaimedDevice> {
    let path = path(index);
    let busy = |how: String| {
        Failure::new(FailureKind::Busy, format!("{} is in use: {how}", path.display())).hint(
            "unmount it and end the processes that have it open, or say --force: what they have not flushed is lost",
        )
    };
    let system = SystemView::default();
    if let Some(user) = system.user(&system.nodes(index), None) {
        return Err(busy(user));
    }
    let opened = OpenOptions::new().read(true).custom_flags(EXCLUSIVE).open(&path);
    let claimed = opened.map_err(|error| match error.kind() {
        io::ErrorKind::ResourceBusy => busy("mounted, or part of another device".into()),
        _ => Failure::io(error, format_args!("opening {}", path.display())),
    })?;
    // After the claim: opening the device may have found partitions.
    let nodes = system.nodes(index);
    // A partition has a page cache of its own.
    for partition in nodes.iter().skip(1) {
        flush(&Path::new("/dev").join(&partition.name))?;
    }
    claimed.sync_all().map_err(|error| Failure::io(error, format_args!("flushing {}", path.display())))?;
    // The claim keeps nobody from opening it without one, and writing while it was flushed.
    match system.user(&nodes, Some(std::process::id())) {
        Some(user) => Err(busy(user)),
        None => Ok(ClaimedDevice { _device: claimed }),
    }
}

/// Writes the dirty pages of a partition.
fn flush(path: &Path) -> Result<()> {
    let flushed = File::open(path).and_then(|file| file.sync_all());
    match flushed {
        // The kernel has read the partition table again, and nobody has it open.
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        flushed => flushed.map_err(|error| Failure::io(error, format_args!("flushing {}", path.display()))),
    }
}

/// `O_EXCL`: opening a block device fails if it is mounted or claimed.
const EXCLUSIVE: i32 = rustix::fs::OFlags::EXCL.bits() as i32;

/// Loads the kernel module.
///
/// # Errors
/// `Unsupported` if the kernel has none, or modules cannot be loaded here.
pub fn load_module() -> Result<()> {
    let failed = |why: String| {
        Failure::new(FailureKind::Unsupported, format!("the kernel's NBD client is missing, and 'modprobe nbd': {why}"))
            .hint("load the module 'nbd' as root (modprobe nbd nbds_max=16), or use another client of 'forebay attach IMAGE --nbd'")
    };
    let output = std::process::Command::new("modprobe").args(["nbd", "nbds_max=16"]).output();
    let output = output.map_err(|error| failed(error.to_string()))?;
    match output.status.success() {
        true => Ok(()),
        false => Err(failed(String::from_utf8_lossy(&output.stderr).trim().to_owned())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_and_numbers() {
        assert_eq!(index_of("/dev/nbd12"), Some(12));
        assert_eq!(index_of("/dev/nbd1p1"), None);
        assert_eq!(index_of("local/nbd1"), None);
        assert_eq!(path(3), Path::new("/dev/nbd3"));
    }
}
