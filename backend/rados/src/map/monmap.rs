//! Monitor map (`MonMap`).

use forebay_messenger::wire::{EntityAddr, MalformedPayload, PayloadReader};

use super::{Epoch, Fsid};
use crate::denc::ReaderExt;

const WHAT: &str = "a map of monitors";
/// Maximum number of monitors.
const COUNT_MAX: usize = 256;

/// Monitor of the cluster.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Monitor {
    /// Name of the monitor.
    pub name: String,
    /// Addresses of the monitor.
    pub addrs: Vec<EntityAddr>,
}

/// Monitor map of a cluster.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct MonMap {
    /// Cluster fsid.
    pub fsid: Fsid,
    /// Epoch of this map.
    pub epoch: Epoch,
    /// Monitors, sorted by name.
    pub monitors: Vec<Monitor>,
}

impl MonMap {
    /// Decodes a map of Nautilus or later (encoding 6 and later).
    pub fn decode(bytes: &[u8]) -> Result<Self, MalformedPayload> {
        let mut whole = PayloadReader::new(bytes, WHAT);
        let (version, mut from) = whole.part(9)?;
        if version < 6 {
            return Err(whole.malformed());
        }
        let mut map = Self { fsid: from.array()?, epoch: from.u32()?, monitors: Vec::new() };
        // Modification and creation times.
        from.take(16)?;
        for _ in 0..2 {
            from.part(u8::MAX)?;
        }
        let monitor = |from: &mut PayloadReader<'_>| {
            from.blob()?;
            let (version, mut info) = from.part(u8::MAX)?;
            if version < 3 {
                return Err(info.malformed());
            }
            Ok(Monitor { name: info.text()?, addrs: EntityAddr::decode_vector(&mut info)? })
        };
        map.monitors = from.vec(monitor)?;
        if map.monitors.len() > COUNT_MAX {
            return Err(from.malformed());
        }
        Ok(map)
    }
}
