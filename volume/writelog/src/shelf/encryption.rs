//! Keys of encrypted logs on a log device.

use std::rc::Rc;

use forebay_block::{DataKey, Result};

use super::{NewestSuperblock, OpenLog, Shelf};
use crate::cipher::{key_check, require_empty, require_key};
use crate::format::{LogId, LogSuperblock, SUPER_COPIES, ShelfEntry};
use crate::shelf::id_text;

impl Shelf {
    /// Opens a log for its volume, which is not encrypted.
    ///
    /// # Errors
    /// As [`open_log_with_key`](Self::open_log_with_key).
    pub async fn open_log(self: &Rc<Self>, id: &LogId, volume: &str, epoch: u64) -> Result<OpenLog> {
        self.open_log_with_key(id, volume, epoch, None).await
    }

    /// Returns the name of a log for messages.
    pub(crate) fn log_name(&self, id: &LogId) -> String {
        format!("{}: log {}", self.path, id_text(id))
    }

    /// Fails if [`open_log_with_key`](Self::open_log_with_key) would because of the key, or a takeover of this device's
    /// copy; the copy may be open.
    ///
    /// # Errors
    /// [`ErrorKind::Denied`](forebay_block::ErrorKind::Denied); errors of the device.
    pub async fn check_key(&self, id: &LogId, key: Option<&DataKey>) -> Result<()> {
        let entry = self.entry(id)?;
        let NewestSuperblock { superblock, one_lost, .. } = self.superblock(&entry).await?;
        let what = self.log_name(id);
        require_key(superblock.encryption.as_ref(), key, id, &what)?;
        if key.is_none() || superblock.encryption.is_some() {
            return Ok(());
        }
        require_empty(self.scan(&entry, &superblock, one_lost).await?.len(), &what)
    }

    /// Makes a log that was opened with a key an encrypted one, unless it is; `entries` is the number of those that it
    /// holds. Both copies of the superblock have the check value before anything is appended.
    pub(super) async fn begin_encryption(
        &self,
        entry: &ShelfEntry,
        (superblock, copy): (&mut LogSuperblock, usize),
        key: &DataKey,
        entries: usize,
    ) -> Result<()> {
        if superblock.encryption.is_some() {
            return Ok(());
        }
        require_empty(entries, &self.log_name(&entry.log))?;
        superblock.set_encryption(key_check(key, &entry.log));
        // The older copy first: the newer one is whole until it is written.
        for copy in [1 - copy, copy] {
            superblock.serial += 1;
            self.write(entry.start + SUPER_COPIES[copy], &superblock.encode()).await?;
        }
        Ok(())
    }
}
