//! Blocklist of a cluster: clients whose requests every OSD rejects, each until a time.
//!
//! It is in the section of the OSD map that is meant for OSDs (`OSDMap::encode`, "extended, osd-only data").  A section
//! with an encoding that is newer than known counts as one without entries.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::time::Duration;

use forebay_messenger::wire::{EntityAddr, MalformedPayload, PayloadReader};

use super::osdmap::OsdMap;
use crate::denc::ReaderExt;

/// Newest version of the OSDs' section whose fields are known here: of full maps, and of incremental ones.
const VERSION: u8 = 12;
/// Length of the encoded state of an OSD (`osd_info_t`): a version, and six epochs.
const OSD_INFO_LEN: usize = 1 + 6 * 4;

/// Address by which a client is blocklisted.  Its protocol does not count.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct BlocklistedAddr {
    ip: IpAddr,
    port: u16,
    nonce: u32,
}

impl BlocklistedAddr {
    fn new(socket: SocketAddr, nonce: u32) -> Self {
        Self { ip: socket.ip(), port: socket.port(), nonce }
    }

    /// Parses the text of an address, `IP:PORT/NONCE`; `None` if it is anything else.
    fn parse(text: &str) -> Option<Self> {
        let (socket, nonce) = text.rsplit_once('/')?;
        Some(Self::new(socket.parse().ok()?, nonce.parse().ok()?))
    }
}

/// Entries of the blocklist: the time until which each is kept, since the Unix epoch.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct Blocklist(BTreeMap<BlocklistedAddr, Duration>);

/// Entries that an incremental map adds and removes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct BlocklistChange {
    added: Blocklist,
    removed: Vec<BlocklistedAddr>,
}

/// Reads the OSDs' section of a map as far as `read` does; `None` if it has a newer encoding.
fn section<T>(
    from: &mut PayloadReader<'_>,
    read: impl FnOnce(&mut PayloadReader<'_>) -> Result<T, MalformedPayload>,
) -> Result<Option<T>, MalformedPayload> {
    let mut ahead = *from;
    from.part(u8::MAX)?;
    match ahead.part(VERSION) {
        Ok((_, mut part)) => read(&mut part).map(Some),
        Err(error) if error.newer.is_some() => Ok(None),
        Err(error) => Err(error),
    }
}

fn address(from: &mut PayloadReader<'_>) -> Result<Option<BlocklistedAddr>, MalformedPayload> {
    let EntityAddr { socket, nonce, .. } = EntityAddr::decode(from)?;
    Ok(socket.map(|socket| BlocklistedAddr::new(socket, nonce)))
}

impl Blocklist {
    /// Reads the OSDs' section of a full map.
    pub(super) fn decode(from: &mut PayloadReader<'_>) -> Result<Self, MalformedPayload> {
        let list = section(from, |from| {
            // Back addresses, for heartbeats; states of OSDs.
            from.map(EntityAddr::decode_vector, drop)?;
            from.map(|from| from.take(OSD_INFO_LEN), drop)?;
            Self::entries(from)
        })?;
        Ok(list.unwrap_or_default())
    }

    fn entries(from: &mut PayloadReader<'_>) -> Result<Self, MalformedPayload> {
        let mut list = Self::default();
        let entry = |from: &mut PayloadReader<'_>| {
            let addr = address(from)?;
            let (secs, nanos) = (from.u32()?, from.u32()?);
            Ok((addr, Duration::from_secs(secs.into()) + Duration::from_nanos(nanos.into())))
        };
        from.map(entry, |(addr, until)| {
            if let Some(addr) = addr {
                list.0.insert(addr, until);
            }
        })?;
        Ok(list)
    }

    /// Applies the change of an incremental map; `None` if it could not be read, upon which no entry is known any more.
    ///
    /// The time of an entry that is there already does not change, as in `OSDMap::apply_incremental`.
    pub(super) fn apply(&mut self, change: Option<BlocklistChange>) {
        let Some(change) = change else { return self.0.clear() };
        for (addr, until) in change.added.0 {
            self.0.entry(addr).or_insert(until);
        }
        for addr in change.removed {
            self.0.remove(&addr);
        }
    }
}

impl BlocklistChange {
    /// Reads the OSDs' section of an incremental map; `None` if it has a newer encoding.
    pub(super) fn decode(from: &mut PayloadReader<'_>) -> Result<Option<Self>, MalformedPayload> {
        section(from, |from| {
            // By OSD: new back addresses, the epochs until which it was up, intervals in which it was clean, lost epochs.
            from.map(|from| Ok((from.u32()?, EntityAddr::decode_vector(from)?)), drop)?;
            from.map(|from| from.take(8), drop)?;
            from.map(|from| from.take(12), drop)?;
            from.map(|from| from.take(8), drop)?;
            let added = Blocklist::entries(from)?;
            let removed = from.vec(address)?.into_iter().flatten().collect();
            Ok(Self { added, removed })
        })
    }
}

impl OsdMap {
    /// Returns the time until which the client at `address` (`IP:PORT/NONCE`) is on the blocklist, since the Unix epoch;
    /// `None` if it is not on it, or that is not known.  Entries of ranges of addresses do not count.
    pub fn blocklisted_until(&self, address: &str) -> Option<Duration> {
        self.blocklist.0.get(&BlocklistedAddr::parse(address)?).copied()
    }
}
