//! Messages between members: `docs/formats/gateways.md`.

use forebay_messenger::wire::codec::{MalformedPayload, PayloadReader, PayloadWriter};

use crate::assign::MemberLoad;
use crate::ids::{GatewayGroupId, MemberId, StartId, VolumeName};

/// Message type of [`GatewayMessage`].
pub const KIND_GATEWAY: u16 = 0x0301;

/// Maximum number of loads of other members in a heartbeat.
pub const LOADS_MAX: usize = 16;
/// Maximum number of members whose silence is in a heartbeat.
pub const SILENCES_MAX: usize = 16;
/// Maximum length of a volume's name in bytes.
const NAME_MAX: usize = 4096;

/// Message from one member to another.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct GatewayMessage {
    /// Id of the group.
    pub group: GatewayGroupId,
    /// Id of the sender.
    pub from: MemberId,
    /// Start of the sender.
    pub start: StartId,
    /// Epoch of the record that the sender knows.
    pub epoch: u64,
    /// Time for which the sender has not reached the pool, in milliseconds.
    pub pool_silence_ms: u32,
    /// Body of the message.
    pub body: GatewayMessageBody,
}

/// Body of a message.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum GatewayMessageBody {
    /// The sender lives: to those that observe it, or would if it joined.
    Heartbeat(HeartbeatReport),
    /// Answer to a heartbeat.
    HeartbeatAnswer(HeartbeatReport),
    /// The sender has prepared a volume that is being moved to it: to its owner.
    Prepared {
        /// Name of the volume.
        volume: VolumeName,
        /// Term of the owner.
        term: u64,
    },
}

impl GatewayMessageBody {
    /// Returns whether it is a heartbeat, or the answer to one.
    pub fn is_heartbeat(&self) -> bool {
        matches!(self, Self::Heartbeat(_) | Self::HeartbeatAnswer(_))
    }
}

/// Report of a member about itself and others.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct HeartbeatReport {
    /// Members that it observes, and for how many milliseconds it has not heard them.
    pub silences: Vec<(MemberId, u32)>,
    /// Loads of members.
    pub loads: Vec<LoadReport>,
}

/// Load of a member, which others pass on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LoadReport {
    /// Id of the member.
    pub member: MemberId,
    /// Number of the report among those of this start of the member.
    pub number: u64,
    /// Load of the member.
    pub load: MemberLoad,
}

fn write_report(writer: &mut PayloadWriter, report: &HeartbeatReport) {
    let silences = &report.silences[..report.silences.len().min(SILENCES_MAX)];
    writer.u8(silences.len() as u8);
    for (member, silence_ms) in silences {
        writer.raw(&member.0).u32(*silence_ms);
    }
    let loads = &report.loads[..report.loads.len().min(LOADS_MAX)];
    writer.u8(loads.len() as u8);
    for LoadReport { member, number, load } in loads {
        writer.raw(&member.0).u64(*number).u32(load.busy).u32(load.requests).u32(load.kib);
    }
}

fn read_report(reader: &mut PayloadReader<'_>) -> Result<HeartbeatReport, MalformedPayload> {
    let mut report = HeartbeatReport::default();
    for _ in 0..count(reader, SILENCES_MAX)? {
        report.silences.push((MemberId(reader.array()?), reader.u32()?));
    }
    for _ in 0..count(reader, LOADS_MAX)? {
        let (member, number) = (MemberId(reader.array()?), reader.u64()?);
        let load = MemberLoad { busy: reader.u32()?, requests: reader.u32()?, kib: reader.u32()? };
        report.loads.push(LoadReport { member, number, load });
    }
    Ok(report)
}

fn count(reader: &mut PayloadReader<'_>, max: usize) -> Result<usize, MalformedPayload> {
    let count = usize::from(reader.u8()?);
    if count <= max { Ok(count) } else { Err(reader.malformed()) }
}

impl GatewayMessage {
    /// Encodes the message.
    pub fn encode(&self) -> Vec<u8> {
        let mut writer = PayloadWriter::new();
        writer.raw(&self.group.0).raw(&self.from.0).raw(&self.start.0).u64(self.epoch).u32(self.pool_silence_ms);
        match &self.body {
            GatewayMessageBody::Heartbeat(report) => write_report(writer.u8(1), report),
            GatewayMessageBody::HeartbeatAnswer(report) => write_report(writer.u8(2), report),
            GatewayMessageBody::Prepared { volume, term } => {
                writer.u8(3).u64(*term).blob(volume.as_str().as_bytes());
            }
        }
        writer.finish()
    }

    /// Decodes a message; bytes after those that this version knows are ignored.  `None` for a kind that a later version
    /// sends.
    ///
    /// # Errors
    /// If it is malformed.
    pub fn decode(bytes: &[u8]) -> Result<Option<Self>, MalformedPayload> {
        let mut reader = PayloadReader::new(bytes, "a message of a member of a gateway group");
        let (group, from, start) =
            (GatewayGroupId(reader.array()?), MemberId(reader.array()?), StartId(reader.array()?));
        let (epoch, pool_silence_ms) = (reader.u64()?, reader.u32()?);
        let body = match reader.u8()? {
            1 => GatewayMessageBody::Heartbeat(read_report(&mut reader)?),
            2 => GatewayMessageBody::HeartbeatAnswer(read_report(&mut reader)?),
            3 => {
                let (term, name) = (reader.u64()?, reader.blob()?);
                let name = std::str::from_utf8(name).ok().filter(|name| name.len() <= NAME_MAX);
                GatewayMessageBody::Prepared { volume: VolumeName::new(name.ok_or(reader.malformed())?), term }
            }
            0 => return Err(reader.malformed()),
            _ => return Ok(None),
        };
        Ok(Some(Self { group, from, start, epoch, pool_silence_ms, body }))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn messages_are_read_as_they_were_written(
            ids: [[u8; 16]; 3],
            numbers: [u64; 2],
            kind in 0..3,
            name in "\\PC{0,40}",
            silences in prop::collection::vec((any::<[u8; 16]>(), any::<u32>()), 0..SILENCES_MAX),
            loads in prop::collection::vec((any::<[u8; 16]>(), any::<u64>(), any::<[u32; 3]>()), 0..LOADS_MAX),
        ) {
            let loads = loads.into_iter().map(|(id, number, [busy, requests, kib])| LoadReport {
                member: MemberId(id), number, load: MemberLoad { busy, requests, kib },
            }).collect();
            let silences = silences.into_iter().map(|(id, silence)| (MemberId(id), silence)).collect();
            let report = HeartbeatReport { silences, loads };
            let body = match kind {
                0 => GatewayMessageBody::Heartbeat(report),
                1 => GatewayMessageBody::HeartbeatAnswer(report),
                _ => GatewayMessageBody::Prepared { volume: VolumeName::new(name), term: numbers[1] },
            };
            let [group, from, start] = ids;
            let message = GatewayMessage {
                group: GatewayGroupId(group), from: MemberId(from), start: StartId(start),
                epoch: numbers[0], pool_silence_ms: numbers[1] as u32, body,
            };
            let bytes = message.encode();
            prop_assert!((0..bytes.len()).all(|end| GatewayMessage::decode(&bytes[..end]).is_err()));
            prop_assert_eq!(GatewayMessage::decode(&bytes), Ok(Some(message)));
        }

        #[test]
        fn any_bytes_are_a_message_or_malformed(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = GatewayMessage::decode(&bytes);
        }
    }
}
