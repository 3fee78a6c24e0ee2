//! Oracles of encrypted volumes: what is on the media of gateways, and with which tweaks it was encrypted.

use forebay_reactor::pmem::PersistentMemory;
use forebay_writelog::tweaks;

use super::gateway::path;
use super::{Cluster, MEDIUM_SIZE};
use crate::stamp::find_stamp;

impl Cluster {
    /// Verifies that no data of an encrypted volume is on the medium of any gateway, and that no two contents were encrypted
    /// with the same key and tweak.
    pub(super) fn check_encryption(&self) -> std::result::Result<(), String> {
        let payloads = tweaks::finish()? as u64;
        self.image.count(|tally| {
            (tally.encrypted, tally.payloads_encrypted) = (u64::from(self.scenario.encrypted), payloads);
        });
        for number in 1..=self.scenario.gateways {
            let bytes = match &self.memories[usize::from(number) - 1] {
                Some(memory) => {
                    let mut bytes = vec![0; MEDIUM_SIZE as usize];
                    memory.load(0, &mut bytes);
                    bytes
                }
                None => self.image.world.peek(path(number), 0, MEDIUM_SIZE as usize).unwrap_or_default(),
            };
            match find_stamp(&bytes) {
                Some(at) if self.scenario.encrypted => {
                    return Err(format!("data of the encrypted volume is at {at} of the medium of gateway {number}"));
                }
                found => self.image.count(|tally| tally.seen += u64::from(found.is_some())),
            }
        }
        Ok(())
    }
}
