//! Messages between members: `docs/formats/gateways.md`.

use forebay_messenger::wire::codec::{MalformedPayload, PayloadReader, PayloadWriter};

use crate::ids::{GatewayGroupId, MemberId, StartId, VolumeName};
use crate::load::{RequestLoad, VolumeLoads};

/// Message type of [`GatewayMessage`].
pub const KIND_GATEWAY: u16 = 0x0301;

/// Maximum number of loads of other members in a heartbeat.
pub const LOADS_MAX: usize = 16;
/// Maximum number of members whose silence is in a heartbeat.
pub const SILENCES_MAX: usize = 16;
/// Maximum number of volumes whose loads are told.
pub const TOLD_MAX: usize = 4096;
/// Maximum length of the names of these volumes in bytes, all together.
const TOLD_NAMES_MAX: usize = 256 << 10;
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
    /// The sender is to be told the loads of the receiver's volumes.
    AskLoads,
    /// Loads of the sender's volumes, the highest ones where there are more than [`TOLD_MAX`]: to one that has asked.
    TellLoads(VolumeLoads),
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
    /// Number of the report, higher than those of all earlier ones of the member.
    pub number: u64,
    /// Load of the member.
    pub load: RequestLoad,
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
        // The first number was meant for the use of cores, which nobody has measured.
        writer.raw(&member.0).u64(*number).u32(0).u32(load.requests).u32(load.kib);
    }
}

fn read_report(reader: &mut PayloadReader<'_>) -> Result<HeartbeatReport, MalformedPayload> {
    let mut report = HeartbeatReport::default();
    for _ in 0..count(reader, SILENCES_MAX)? {
        report.silences.push((MemberId(reader.array()?), reader.u32()?));
    }
    for _ in 0..count(reader, LOADS_MAX)? {
        let (member, number) = (MemberId(reader.array()?), reader.u64()?);
        let _reserved = reader.u32()?;
        let load = RequestLoad { requests: reader.u32()?, kib: reader.u32()? };
        report.loads.push(LoadReport { member, number, load });
    }
    Ok(report)
}

/// Returns the loads that fit into a message: the highest ones.
pub fn told_loads(loads: &VolumeLoads) -> VolumeLoads {
    let mut highest: Vec<_> = loads.iter().filter(|(name, _)| name.as_str().len() <= NAME_MAX).collect();
    highest.sort_by_key(|(name, load)| (std::cmp::Reverse(load.cost()), *name));
    let mut names = 0;
    let fitting = highest.into_iter().take(TOLD_MAX).take_while(|(name, _)| {
        names += name.as_str().len();
        names <= TOLD_NAMES_MAX
    });
    fitting.map(|(name, load)| (name.clone(), *load)).collect()
}

fn read_name(reader: &mut PayloadReader<'_>) -> Result<VolumeName, MalformedPayload> {
    let name = reader.blob()?;
    let name = std::str::from_utf8(name).ok().filter(|name| name.len() <= NAME_MAX);
    Ok(VolumeName::new(name.ok_or(reader.malformed())?))
}

fn read_told(reader: &mut PayloadReader<'_>) -> Result<VolumeLoads, MalformedPayload> {
    let count = reader.u32()?;
    if count as usize > TOLD_MAX {
        return Err(reader.malformed());
    }
    let mut loads = VolumeLoads::new();
    for _ in 0..count {
        let (name, load) = (read_name(reader)?, RequestLoad { requests: reader.u32()?, kib: reader.u32()? });
        loads.insert(name, load);
    }
    Ok(loads)
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
            GatewayMessageBody::AskLoads => {
                writer.u8(4);
            }
            GatewayMessageBody::TellLoads(loads) => {
                writer.u8(5).u32(loads.len() as u32);
                for (name, load) in loads {
                    writer.blob(name.as_str().as_bytes()).u32(load.requests).u32(load.kib);
                }
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
                let term = reader.u64()?;
                GatewayMessageBody::Prepared { volume: read_name(&mut reader)?, term }
            }
            4 => GatewayMessageBody::AskLoads,
            5 => GatewayMessageBody::TellLoads(read_told(&mut reader)?),
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
            kind in 0..5,
            name in "\\PC{0,40}",
            silences in prop::collection::vec((any::<[u8; 16]>(), any::<u32>()), 0..SILENCES_MAX),
            loads in prop::collection::vec((any::<[u8; 16]>(), any::<u64>(), any::<[u32; 2]>()), 0..LOADS_MAX),
            told in prop::collection::btree_map("\\PC{0,9}", any::<[u32; 2]>(), 0..9),
        ) {
            let loads = loads.into_iter().map(|(id, number, [requests, kib])| LoadReport {
                member: MemberId(id), number, load: RequestLoad { requests, kib },
            }).collect();
            let told = told.into_iter().map(|(name, [requests, kib])| (VolumeName::new(name), RequestLoad { requests, kib }));
            let silences = silences.into_iter().map(|(id, silence)| (MemberId(id), silence)).collect();
            let report = HeartbeatReport { silences, loads };
            let body = match kind {
                0 => GatewayMessageBody::Heartbeat(report),
                1 => GatewayMessageBody::HeartbeatAnswer(report),
                2 => GatewayMessageBody::AskLoads,
                3 => GatewayMessageBody::TellLoads(told.collect()),
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
        fn the_highest_loads_are_told(requests in prop::collection::vec(any::<u32>(), 0..50), long in 0..3000_usize) {
            let name = |at| VolumeName::new(format!("{at:04}{}", "x".repeat(long)));
            let all: VolumeLoads = (0..TOLD_MAX + requests.len())
                .map(|at| (name(at), RequestLoad { requests: requests.get(at).copied().unwrap_or(0), kib: 0 }))
                .collect();
            let told = told_loads(&all);
            prop_assert!(told.len() <= TOLD_MAX && told.keys().map(|name| name.as_str().len()).sum::<usize>() <= TOLD_NAMES_MAX);
            prop_assert!(told.len() == TOLD_MAX || (told.len() + 1) * (long + 4) > TOLD_NAMES_MAX);
            let least = told.values().map(RequestLoad::cost).min().unwrap();
            prop_assert!(all.iter().all(|(name, load)| told.contains_key(name) || load.cost() <= least));
        }

        #[test]
        fn any_bytes_are_a_message_or_malformed(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            let _ = GatewayMessage::decode(&bytes);
        }
    }
}
