//! The monitors (`MonMap`).

use forebay_messenger::wire::{EntityAddr, Malformed, Reader};

use super::{Epoch, Fsid};
use crate::denc::ReaderExt;

const WHAT: &str = "a map of monitors";
/// Monitors at most.
const COUNT_MAX: usize = 256;

/// A monitor.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Monitor {
    /// Its name.
    pub name: String,
    /// Where it is.
    pub addrs: Vec<EntityAddr>,
}

/// The cluster's monitors.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct MonMap {
    /// The cluster.
    pub fsid: Fsid,
    /// Of this map.
    pub epoch: Epoch,
    /// In the order of their names.
    pub monitors: Vec<Monitor>,
}

impl MonMap {
    /// Reads a map of Nautilus or later (encoding 6 and on).
    pub fn decode(bytes: &[u8]) -> Result<Self, Malformed> {
        let mut whole = Reader::new(bytes, WHAT);
        let (version, mut from) = whole.part(9)?;
        if version < 6 {
            return Err(whole.malformed());
        }
        let mut map = Self { fsid: from.array()?, epoch: from.u32()?, monitors: Vec::new() };
        // When it was changed and created.
        from.take(16)?;
        for _ in 0..2 {
            from.part(u8::MAX)?;
        }
        let monitor = |from: &mut Reader<'_>| {
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
