//! Read errors that a device reports for bad sectors, and the retries before one counts as bad.

use std::error::Error as _;
use std::io;
use std::time::Duration;

use forebay_block::{Error, ErrorKind, Result};
use forebay_reactor::sleep;

use crate::format::BLOCK;
use crate::media::Media;

/// Read attempts before a sector counts as bad, so that a transient error does not cost a checkpoint.
pub(crate) const READ_ATTEMPTS: u32 = 4;
/// Pause between read attempts.
pub(crate) const READ_PAUSE: Duration = Duration::from_millis(250);
/// Error numbers of Linux for a sector that cannot be read: EIO, ENODATA (unrecovered medium error) and EILSEQ (wrong
/// protection information).
const BAD_SECTOR_ERRORS: [i32; 3] = [5, 61, 84];

/// Returns whether an error is one that a device reports for a bad sector.
pub(super) fn is_bad_sector(error: &io::Error) -> bool {
    error.raw_os_error().is_some_and(|number| BAD_SECTOR_ERRORS.contains(&number))
}

/// Returns whether an error was caused by a bad sector.
pub(crate) fn is_of_bad_sector(error: &Error) -> bool {
    let cause = error.source().and_then(|cause| cause.downcast_ref::<io::Error>());
    error.kind() == ErrorKind::Io && cause.is_some_and(is_bad_sector)
}

/// Reads a structure that is given up if it is damaged for good: its checksum is wrong twice in a row, or the device
/// reports a bad sector for each of [`READ_ATTEMPTS`] attempts while it can read its first block. The inner error is
/// that of the last attempt on such a structure.
///
/// # Errors
/// Errors of the device that may be transient.
pub(crate) async fn read_unless_damaged<T>(
    media: &Media,
    mut read: impl AsyncFnMut() -> Result<T>,
) -> Result<Result<T>> {
    let (mut bad_sectors, mut mismatches) = (0, 0);
    loop {
        let error = match read().await {
            Ok(found) => return Ok(Ok(found)),
            Err(error) => error,
        };
        if error.kind() == ErrorKind::Corrupt {
            // Read again, in case of a transient bit flip.
            mismatches += 1;
        } else if is_of_bad_sector(&error) {
            (mismatches, bad_sectors) = (0, bad_sectors + 1);
            if bad_sectors < READ_ATTEMPTS {
                sleep(READ_PAUSE).await;
            } else {
                // A device that cannot read its first block either is failing as a whole, and may recover.
                media.read_raw(0, BLOCK).await?;
            }
        } else {
            return Err(error);
        }
        if mismatches == 2 || bad_sectors == READ_ATTEMPTS {
            return Ok(Err(error));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_errors_that_media_give_count_as_damage() {
        let of = |number| Error::from_io(io::Error::from_raw_os_error(number), "reading").within("a store");
        for (name, number, expected) in [
            ("EIO", 5, true),
            ("ENODATA", 61, true),
            ("EILSEQ", 84, true),
            ("EINTR", 4, false),
            ("ENXIO", 6, false),
            ("EAGAIN", 11, false),
            ("ENOMEM", 12, false),
            ("ENODEV", 19, false),
            ("ENOLINK", 67, false),
            ("ETIMEDOUT", 110, false),
            ("EREMOTEIO", 121, false),
        ] {
            assert_eq!(is_of_bad_sector(&of(number)), expected, "{name}");
        }
        assert!(!is_of_bad_sector(&Error::new(ErrorKind::Io, "of nobody knows what")));
    }
}
