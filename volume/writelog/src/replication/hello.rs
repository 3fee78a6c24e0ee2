//! Messages in which peers describe themselves to each other: `docs/formats/replication.md`.

use forebay_messenger::wire::codec::{MalformedPayload, PayloadReader, PayloadWriter};

use super::PeerId;
use super::wire::{text, write_text};
use crate::format::MediumKind;

/// Message type with which a peer describes itself, and asks the other one to do the same.
pub const KIND_HELLO: u16 = 0x0103;
/// Message type of the answer, which describes the other one.
pub const KIND_HELLO_ANSWER: u16 = 0x0104;

/// Maximum number of offers in a description.
const OFFERS_MAX: u8 = 64;

/// Peer, as it describes itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PeerHello {
    /// Id of its data directory.
    pub peer: PeerId,
    /// Id that it drew when it started: two peers of one id with different ones have copies of one data directory.
    pub boot: [u8; 16],
    /// Host name.
    pub host: String,
    /// Space for copies of the other's logs.
    pub offers: Vec<ReplicaOffer>,
}

/// Space that a peer offers for copies of another peer's logs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ReplicaOffer {
    /// Medium of the log device.
    pub medium: MediumKind,
    /// Size that all copies on it may have, in bytes.
    pub quota: u64,
    /// Bytes of that which no copy has yet.
    pub free: u64,
}

impl PeerHello {
    /// Encodes the description.
    pub fn encode(&self) -> Vec<u8> {
        let mut writer = PayloadWriter::new();
        writer.raw(&self.peer.0).raw(&self.boot);
        write_text(&mut writer, &self.host);
        let offers = &self.offers[..self.offers.len().min(usize::from(OFFERS_MAX))];
        writer.u8(offers.len() as u8);
        for ReplicaOffer { medium, quota, free } in offers {
            writer.u8(medium.code()).u64(*quota).u64(*free);
        }
        writer.finish()
    }

    /// Decodes a description.
    ///
    /// # Errors
    /// If it is malformed.
    pub fn decode(bytes: &[u8]) -> Result<Self, MalformedPayload> {
        let mut reader = PayloadReader::new(bytes, "a peer's description of itself");
        let (peer, boot, host) = (PeerId(reader.array()?), reader.array()?, text(&mut reader)?);
        let count = reader.u8()?;
        if count > OFFERS_MAX {
            return Err(reader.malformed());
        }
        let mut offers = Vec::new();
        for _ in 0..count {
            let medium = MediumKind::from_code(reader.u8()?).ok_or(reader.malformed())?;
            let (quota, free) = (reader.u64()?, reader.u64()?);
            if free > quota {
                return Err(reader.malformed());
            }
            offers.push(ReplicaOffer { medium, quota, free });
        }
        if !reader.rest().is_empty() {
            return Err(reader.malformed());
        }
        Ok(Self { peer, boot, host, offers })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn descriptions_are_read_as_they_were_written(
            ids: [[u8; 16]; 2],
            host in "\\PC{0,40}",
            offers in prop::collection::vec((1..4_u8, any::<u64>(), any::<u64>()), 0..4),
        ) {
            let offer = |(medium, one, other): (u8, u64, u64)| ReplicaOffer {
                medium: MediumKind::from_code(medium).unwrap(),
                quota: one.max(other),
                free: one.min(other),
            };
            let offers = offers.into_iter().map(offer).collect();
            let hello = PeerHello { peer: PeerId(ids[0]), boot: ids[1], host, offers };
            let bytes = hello.encode();
            prop_assert!((0..bytes.len()).all(|end| PeerHello::decode(&bytes[..end]).is_err()));
            prop_assert_eq!(PeerHello::decode(&bytes), Ok(hello));
        }
    }

    #[test]
    fn more_free_space_than_there_is_is_refused() {
        let offer = ReplicaOffer { medium: MediumKind::Ssd, quota: 5, free: 6 };
        let hello = PeerHello { peer: PeerId([1; 16]), boot: [2; 16], host: "a".into(), offers: vec![offer] };
        assert!(PeerHello::decode(&hello.encode()).is_err());
    }
}
