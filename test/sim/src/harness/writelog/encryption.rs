//! Keys of encrypted logs, and the oracles of encryption: no data of the volume is on a log's medium, and no two contents
//! are encrypted with the same key and tweak.

use std::rc::Rc;

use forebay_block::{DataKey, Error, ErrorKind, Result};
use forebay_reactor::pmem::PersistentMemory;
use forebay_writelog::format::{LOGS_AT, LogSuperblock, SUPER_COPIES, SUPER_LEN};
use forebay_writelog::{LogId, OpenLog, Shelf, tweaks};

use super::scenario::Encryption;
use super::{LOG, Run, VOLUME};
use crate::stamp::find_stamp;

/// Returns the key of a run's volume.
pub(in crate::harness) fn key_of(seed: u64) -> DataKey {
    DataKey::from_bytes(&std::array::from_fn(|at| (seed >> (at % 8 * 8)) as u8 ^ (at * 37) as u8))
}

impl Run {
    /// Creates a log, which is encrypted from the beginning or not.
    pub(super) async fn create(&self, shelf: &Rc<Shelf>) -> Result<LogId> {
        let key = key_of(self.scenario.seed);
        let key = (self.scenario.encryption == Encryption::Always).then_some(&key);
        let epoch = self.record.epoch.get();
        shelf.create_with_key((VOLUME, "local/volume"), self.scenario.log_size, epoch, key).await
    }

    /// Opens the log, with its key if it is encrypted by now.
    pub(super) async fn open_encrypted(&mut self, shelf: &Rc<Shelf>, id: &LogId) -> Result<OpenLog> {
        let (epoch, key) = (self.record.epoch.get(), key_of(self.scenario.seed));
        let is_encrypted = shelf.inspect_superblock(id).await?.encrypted;
        if is_encrypted && self.rng.one_in(4) {
            let other = key_of(!self.scenario.seed);
            for wrong in [None, Some(&other)] {
                let refused = shelf.open_log_with_key(id, VOLUME, epoch, wrong).await;
                if refused.err().map(|error| error.kind()) != Some(ErrorKind::Denied) {
                    return Err(Error::new(ErrorKind::Invalid, "an encrypted log was opened without its key"));
                }
            }
        }
        match self.scenario.encryption {
            Encryption::Never => shelf.open_log(id, VOLUME, epoch).await,
            Encryption::Always => shelf.open_log_with_key(id, VOLUME, epoch, Some(&key)).await,
            Encryption::Later if is_encrypted || self.rng.coin() => {
                let entries = shelf.inspect(id).await?.dirty_entries;
                match shelf.open_log_with_key(id, VOLUME, epoch, Some(&key)).await {
                    Ok(_) if !is_encrypted && entries > 0 => {
                        Err(Error::new(ErrorKind::Invalid, "a log with entries became an encrypted one"))
                    }
                    Ok(opened) => {
                        self.tally.encrypted_later += u64::from(!is_encrypted);
                        Ok(opened)
                    }
                    Err(error) if error.kind() == ErrorKind::Denied && !is_encrypted && entries > 0 => {
                        shelf.open_log(id, VOLUME, epoch).await
                    }
                    Err(error) => Err(error),
                }
            }
            Encryption::Later => shelf.open_log(id, VOLUME, epoch).await,
        }
    }

    /// Returns `len` bytes at `at` of the log's medium.
    fn medium_bytes(&self, at: u64, len: usize) -> Vec<u8> {
        match &self.memory {
            Some(memory) => {
                let mut bytes = vec![0; len];
                memory.load(at, &mut bytes);
                bytes
            }
            None => self.world.peek(LOG, at, len).unwrap_or_default(),
        }
    }

    /// Returns whether the log on the medium is encrypted by now.
    pub(super) fn is_encrypted(&self) -> bool {
        let copies = SUPER_COPIES.map(|copy| LogSuperblock::decode(&self.medium_bytes(LOGS_AT + copy, SUPER_LEN)));
        let newest = copies.into_iter().flatten().max_by_key(|superblock| superblock.serial);
        newest.is_some_and(|superblock| superblock.encryption.is_some())
    }

    /// Verifies that no data of the volume is on the medium of a log that was always encrypted.
    pub(super) fn check_medium(&mut self) -> std::result::Result<(), String> {
        let len = (1 << 20) + 2 * self.scenario.log_size as usize;
        match find_stamp(&self.medium_bytes(0, len)) {
            Some(at) if self.scenario.encryption == Encryption::Always => {
                Err(format!("data of the volume is at {at} of the medium of an encrypted log"))
            }
            found => {
                self.tally.seen += u64::from(found.is_some());
                Ok(())
            }
        }
    }

    /// Verifies at the end that no two contents were encrypted with the same key and tweak.
    pub(super) fn check_tweaks(&mut self) -> std::result::Result<(), String> {
        self.tally.payloads_encrypted = tweaks::finish()? as u64;
        self.tally.encrypted = u64::from(self.scenario.encryption == Encryption::Always);
        Ok(())
    }
}
