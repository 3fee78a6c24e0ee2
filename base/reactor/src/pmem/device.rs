//! Size of what is mapped: a DAX device is a character device, whose length the file system does not know.

use std::fs::File;
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::Path;

/// Returns whether a DAX device is at `path`: it has its size, and is accessed by mapping only.
pub fn is_dax_device(path: &Path) -> bool {
    std::fs::metadata(path).is_ok_and(|found| found.file_type().is_char_device())
}

/// Returns the size in bytes of a file or DAX device.
///
/// # Errors
/// Errors of the file; `Unsupported` for other character devices.
pub(super) fn size(file: &File) -> io::Result<u64> {
    let found = file.metadata()?;
    if !found.file_type().is_char_device() {
        return Ok(found.len());
    }
    let (major, minor) = (libc::major(found.rdev()), libc::minor(found.rdev()));
    let stated = std::fs::read_to_string(format!("/sys/dev/char/{major}:{minor}/size"));
    let size = stated.ok().and_then(|text| text.trim().parse().ok());
    size.ok_or_else(|| io::Error::new(io::ErrorKind::Unsupported, "a character device that is no DAX device"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_character_device_that_is_no_memory_is_refused() {
        let null = File::open("/dev/null").expect("a device");
        assert!(is_dax_device(Path::new("/dev/null")) && !is_dax_device(Path::new("/dev")));
        assert_eq!(size(&null).map_err(|error| error.kind()), Err(io::ErrorKind::Unsupported));
    }
}
