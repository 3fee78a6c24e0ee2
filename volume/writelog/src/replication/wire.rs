//! Messages between the primary of a log and its replicas: `docs/formats/replication.md`.
//!
//! A request names the log, and the term in which the sender opened it.  Appended entries are in the data segment of the
//! message, as they are on the medium; everything else is in its front segment.

mod group;

use forebay_block::Extent;
use forebay_messenger::wire::codec::{MalformedPayload, PayloadReader, PayloadWriter};
use forebay_messenger::{WINDOW_DESCRIPTOR_LEN, WindowDescriptor};

use crate::entries::{EntryKind, LogEntry};
use crate::format::{KeyCheck, LogId, PAYLOAD_MAX, RUN_MAX};
use crate::replication::{AppendCursor, AppendRefused, CopyStart, LogShape};

pub use group::{
    GROUP_DATA_MAX, GROUP_REQUESTS_MAX, KIND_GROUP, KIND_GROUP_ANSWER, decode_answers, decode_group, encode_answers,
    encode_group,
};

/// Message type of requests to a replica.
pub const KIND_REQUEST: u16 = 0x0101;
/// Message type of its answers.
pub const KIND_ANSWER: u16 = 0x0102;

/// Maximum number of terms in the shape of a log.
const SPANS_MAX: usize = 4096;
/// Bounds of the numbers of entries, and of sizes, blocks and positions: those of the format.
const SEQ_END: u64 = 1 << 47;
const SIZE_END: u64 = 1 << 48;
const BLOCK_END: u64 = 1 << 56;
/// Maximum length of a lease in milliseconds.
pub const LEASE_MAX_MS: u32 = 60_000;
/// Maximum length of a text in bytes.
const TEXT_MAX: usize = 2048;

/// Request to a replica.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReplicaRequest {
    /// Log that it is about.
    pub log: LogId,
    /// Term in which the sender opened it.
    pub term: u32,
    /// Action that is asked for.
    pub action: ReplicaAction,
}

/// Action that a primary asks of a replica.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ReplicaAction {
    /// Create an empty copy, which lacks everything.
    Create {
        /// Identity of the volume.
        volume: String,
        /// Name of the volume, for messages.
        name: String,
        /// Size of the log in bytes.
        size: u64,
        /// Unit of the log in bytes.
        unit: u32,
        /// Epoch of the record.
        epoch: u64,
        /// Set if the primary's copy is in memory, and this one may be as well.
        in_memory: bool,
    },
    /// Follow the sender's term.
    Adopt(AdoptTerm),
    /// Append the entries in the data segment.
    Append {
        /// Set if the answer waits until they are durable.
        durable: bool,
    },
    /// Move the tail, durably.
    Retire {
        /// Number of the oldest entry that the backend may not hold.
        tail: u64,
    },
    /// Make all that was appended durable.
    Sync,
    /// Discard the copy, unless it is of a later epoch.
    Discard {
        /// Epoch of the record, which does not name the copy.
        epoch: u64,
    },
    /// Heartbeat: extend the promise not to take over.
    Heartbeat {
        /// Set if the peer is to take over by itself when its promise is over.
        automatic: bool,
    },
    /// Read the payload of an entry, into the data segment of the answer.
    Read(LogEntry),
    /// Open a window onto the ring of the copy to the sender, instead of the one that is open.
    OpenWindow,
    /// Append the block whose header and entries are in the data segment, and whose payloads are in the ring.
    AppendPlaced {
        /// Set if the answer waits until it is durable.
        durable: bool,
        /// Id of the window that the payloads were written through.
        window: u64,
    },
}

/// Term that a copy is to follow, and the log of its primary.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AdoptTerm {
    /// Id of the copy that the record names.
    pub copy: LogId,
    /// Epoch of the record.
    pub epoch: u64,
    /// Set if the record has the copy as one that is being filled.
    pub filling: bool,
    /// Shape of the log when its primary opened it.
    pub base: LogShape,
    /// Beginning of the primary's log.
    pub start: CopyStart,
    /// Number of the primary's first block (ssd) or entry (pmem) of the term.
    pub cut: u64,
    /// Length of the primary's lease in milliseconds: every accepted request of the term extends the promise by it.
    pub lease_ms: u32,
    /// Set if the peer is to take over by itself when its promise is over.
    pub automatic: bool,
    /// Check value of the key that the term's payloads are encrypted with.
    pub encryption: Option<KeyCheck>,
}

/// Progress of a copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CopyProgress {
    /// Number of the first entry that the copy does not hold durably.
    pub head: u64,
    /// Number of the oldest entry that a recovery of the copy replays.
    pub tail: u64,
    /// The same, where the newer of its two superblocks cannot be read.
    pub floor: u64,
    /// Position from which such a recovery reads.
    pub held: u64,
}

impl CopyProgress {
    /// Returns what is known after an answer, which may be an old one.
    pub fn newest(self, answer: Self) -> Self {
        Self {
            head: self.head.max(answer.head),
            tail: self.tail.max(answer.tail),
            floor: self.floor.max(answer.floor),
            held: self.held.max(answer.held),
        }
    }
}

/// Answer of a replica.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ReplicaAnswer {
    /// Created; the id of the copy.
    Created(LogId),
    /// Done; the progress of the copy.
    Done(CopyProgress),
    /// Refused, with the reason.
    Refused(AppendRefused),
    /// Failed, with the reason.
    Failed(String),
    /// Opened: a window onto the ring of the copy.
    Window(WindowDescriptor),
}

pub(super) fn text(reader: &mut PayloadReader<'_>) -> Result<String, MalformedPayload> {
    let bytes = reader.blob()?;
    let text = std::str::from_utf8(bytes).ok().filter(|text| text.len() <= TEXT_MAX);
    text.map(str::to_owned).ok_or(reader.malformed())
}

/// Writes a text, cut to the maximum length.
pub(super) fn write_text(writer: &mut PayloadWriter, text: &str) {
    let mut end = text.len().min(TEXT_MAX);
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    writer.blob(&text.as_bytes()[..end]);
}

/// Reads a number below `end`.
fn below(reader: &mut PayloadReader<'_>, end: u64) -> Result<u64, MalformedPayload> {
    let number = reader.u64()?;
    if number < end { Ok(number) } else { Err(reader.malformed()) }
}

fn flag(reader: &mut PayloadReader<'_>) -> Result<bool, MalformedPayload> {
    match reader.u8()? {
        0 => Ok(false),
        1 => Ok(true),
        _ => Err(reader.malformed()),
    }
}

fn write_shape(writer: &mut PayloadWriter, shape: &LogShape) {
    writer.u64(shape.tail()).u32(shape.spans().len() as u32);
    for span in shape.spans() {
        writer.u64(span.term).u64(span.end);
    }
}

fn read_shape(reader: &mut PayloadReader<'_>) -> Result<LogShape, MalformedPayload> {
    let mut shape = LogShape::empty_at(below(reader, SEQ_END)?);
    let spans = reader.u32()? as usize;
    if spans > SPANS_MAX {
        return Err(reader.malformed());
    }
    let mut before = None;
    for _ in 0..spans {
        let (term, end) = (reader.u64()?, below(reader, SEQ_END)?);
        if end <= shape.head() || before.is_some_and(|before| term <= before) {
            return Err(reader.malformed());
        }
        shape.push(term, end - shape.head());
        before = Some(term);
    }
    Ok(shape)
}

fn write_progress(writer: &mut PayloadWriter, progress: &CopyProgress) {
    writer.u64(progress.head).u64(progress.tail).u64(progress.floor).u64(progress.held);
}

impl ReplicaRequest {
    /// Encodes the request.
    pub fn encode(&self) -> Vec<u8> {
        let mut writer = PayloadWriter::new();
        writer.raw(&self.log).u32(self.term);
        match &self.action {
            ReplicaAction::Create { volume, name, size, unit, epoch, in_memory } => {
                writer
                    .u8(if *in_memory { 11 } else { 1 })
                    .blob(volume.as_bytes())
                    .blob(name.as_bytes())
                    .u64(*size)
                    .u32(*unit)
                    .u64(*epoch);
            }
            ReplicaAction::Adopt(adopt) => {
                let AdoptTerm { copy, epoch, filling, base, start, cut, lease_ms, automatic, encryption } = adopt;
                let code = if encryption.is_some() { 12 } else { 2 };
                writer.u8(code).raw(copy).u64(*epoch).u8(u8::from(*filling)).u32(*lease_ms).u8(u8::from(*automatic));
                let CopyStart { tail_seq, at: AppendCursor { number, pos, seq } } = start;
                writer.u64(*tail_seq).u64(*number).u64(*pos).u64(*seq).u64(*cut);
                write_shape(&mut writer, base);
                writer.raw(encryption.as_ref().map_or(&[], |check| check));
            }
            ReplicaAction::Append { durable } => {
                writer.u8(3).u8(u8::from(*durable));
            }
            ReplicaAction::Retire { tail } => {
                writer.u8(4).u64(*tail);
            }
            ReplicaAction::Sync => {
                writer.u8(5);
            }
            ReplicaAction::Discard { epoch } => {
                writer.u8(6).u64(*epoch);
            }
            ReplicaAction::Heartbeat { automatic } => {
                writer.u8(7).u8(u8::from(*automatic));
            }
            ReplicaAction::Read(entry) => {
                let extent = entry.extent();
                writer.u8(8).u8(entry.kind().code()).u64(extent.offset).u32(extent.len as u32);
                writer.u32(entry.place).u32(entry.crc);
            }
            ReplicaAction::OpenWindow => {
                writer.u8(9);
            }
            ReplicaAction::AppendPlaced { durable, window } => {
                writer.u8(10).u8(u8::from(*durable)).u64(*window);
            }
        }
        writer.finish()
    }

    /// Decodes a request.
    ///
    /// # Errors
    /// If it is malformed.
    pub fn decode(bytes: &[u8]) -> Result<Self, MalformedPayload> {
        let mut reader = PayloadReader::new(bytes, "a request to a replica of a write log");
        let (log, term) = (reader.array()?, reader.u32()?);
        let action = match reader.u8()? {
            code @ (1 | 11) => ReplicaAction::Create {
                in_memory: code == 11,
                volume: text(&mut reader)?,
                name: text(&mut reader)?,
                size: below(&mut reader, SIZE_END)?,
                unit: reader.u32()?,
                epoch: reader.u64()?,
            },
            code @ (2 | 12) => {
                let (copy, epoch, filling) = (reader.array()?, reader.u64()?, flag(&mut reader)?);
                let (lease_ms, automatic) = (reader.u32()?, flag(&mut reader)?);
                if lease_ms > LEASE_MAX_MS {
                    return Err(reader.malformed());
                }
                let tail_seq = below(&mut reader, SEQ_END)?;
                let (number, pos) = (below(&mut reader, BLOCK_END)?, below(&mut reader, BLOCK_END)?);
                let at = AppendCursor { number, pos, seq: below(&mut reader, SEQ_END)? };
                let (cut, base) = (below(&mut reader, BLOCK_END)?, read_shape(&mut reader)?);
                if at.seq > tail_seq || tail_seq != base.tail() {
                    return Err(reader.malformed());
                }
                let start = CopyStart { tail_seq, at };
                let encryption = if code == 12 { Some(reader.array()?) } else { None };
                let adopt = AdoptTerm { copy, epoch, filling, base, start, cut, lease_ms, automatic, encryption };
                ReplicaAction::Adopt(adopt)
            }
            3 => ReplicaAction::Append { durable: flag(&mut reader)? },
            4 => ReplicaAction::Retire { tail: below(&mut reader, SEQ_END)? },
            5 => ReplicaAction::Sync,
            6 => ReplicaAction::Discard { epoch: reader.u64()? },
            7 => ReplicaAction::Heartbeat { automatic: flag(&mut reader)? },
            8 => {
                let kind = EntryKind::from_code(reader.u8()?).filter(|kind| kind.has_payload());
                let (offset, len) = (reader.u64()?, reader.u32()?);
                let (place, crc) = (reader.u32()?, reader.u32()?);
                let kind = kind.ok_or(reader.malformed())?;
                let longest = if kind == EntryKind::Write { u64::from(PAYLOAD_MAX) } else { RUN_MAX };
                if len == 0 || u64::from(len) > longest || offset.checked_add(u64::from(len)).is_none() {
                    return Err(reader.malformed());
                }
                ReplicaAction::Read(LogEntry::new(kind, Extent::new(offset, u64::from(len)), place, crc))
            }
            9 => ReplicaAction::OpenWindow,
            10 => ReplicaAction::AppendPlaced { durable: flag(&mut reader)?, window: reader.u64()? },
            _ => return Err(reader.malformed()),
        };
        if !reader.rest().is_empty() {
            return Err(reader.malformed());
        }
        Ok(Self { log, term, action })
    }
}

impl ReplicaAnswer {
    /// Encodes the answer.
    pub fn encode(&self) -> Vec<u8> {
        let mut writer = PayloadWriter::new();
        match self {
            Self::Created(copy) => {
                writer.u8(1).raw(copy);
            }
            Self::Done(progress) => {
                writer.u8(2);
                write_progress(&mut writer, progress);
            }
            Self::Refused(refused) => {
                let (code, number) = match refused {
                    AppendRefused::Superseded(term) => (1, *term),
                    AppendRefused::NotAdopted => (2, 0),
                    AppendRefused::CopyLost => (3, 0),
                    AppendRefused::Gap(head) => (4, *head),
                };
                writer.u8(3).u8(code).u64(number);
            }
            Self::Failed(why) => {
                writer.u8(4);
                write_text(&mut writer, why);
            }
            Self::Window(window) => {
                writer.u8(5).raw(&window.encode());
            }
        }
        writer.finish()
    }

    /// Decodes an answer.
    ///
    /// # Errors
    /// If it is malformed.
    pub fn decode(bytes: &[u8]) -> Result<Self, MalformedPayload> {
        let mut reader = PayloadReader::new(bytes, "an answer of a replica of a write log");
        let answer = match reader.u8()? {
            1 => Self::Created(reader.array()?),
            2 => {
                let (head, tail) = (reader.u64()?, reader.u64()?);
                Self::Done(CopyProgress { head, tail, floor: reader.u64()?, held: reader.u64()? })
            }
            3 => {
                let (code, number) = (reader.u8()?, reader.u64()?);
                Self::Refused(match code {
                    1 => AppendRefused::Superseded(number),
                    2 => AppendRefused::NotAdopted,
                    3 => AppendRefused::CopyLost,
                    4 => AppendRefused::Gap(number),
                    _ => return Err(reader.malformed()),
                })
            }
            4 => Self::Failed(text(&mut reader)?),
            5 => {
                let window: [u8; WINDOW_DESCRIPTOR_LEN] = reader.array()?;
                Self::Window(WindowDescriptor::decode(&window)?)
            }
            _ => return Err(reader.malformed()),
        };
        if !reader.rest().is_empty() {
            return Err(reader.malformed());
        }
        Ok(answer)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn shape() -> impl Strategy<Value = LogShape> {
        (0..100_u64, prop::collection::vec((1..3_u64, 1..50_u64), 0..5)).prop_map(|(tail, spans)| {
            let (mut shape, mut term) = (LogShape::empty_at(tail), 0);
            for (step, count) in spans {
                term += step;
                shape.push(term, count);
            }
            shape
        })
    }

    fn action() -> impl Strategy<Value = ReplicaAction> {
        let number = || 0..u64::MAX;
        prop_oneof![
            ("[a-z/:]{0,20}", "\\PC{0,20}", 0..SIZE_END, any::<u32>(), (number(), any::<bool>())).prop_map(
                |(volume, name, size, unit, (epoch, in_memory))| {
                    ReplicaAction::Create { volume, name, size, unit, epoch, in_memory }
                }
            ),
            (any::<LogId>(), number(), any::<bool>(), shape(), [0..BLOCK_END, 0..BLOCK_END, 0..BLOCK_END]).prop_map(
                |(copy, epoch, filling, base, [number, pos, cut])| {
                    let (tail_seq, seq) = (base.tail(), base.tail() / 2);
                    let start = CopyStart { tail_seq, at: AppendCursor { number, pos, seq } };
                    let (lease_ms, automatic) = (number as u32 % (LEASE_MAX_MS + 1), number & 1 == 1);
                    let encryption = (epoch & 1 == 1).then_some(copy);
                    let adopt = AdoptTerm { copy, epoch, filling, base, start, cut, lease_ms, automatic, encryption };
                    ReplicaAction::Adopt(adopt)
                }
            ),
            any::<bool>().prop_map(|durable| ReplicaAction::Append { durable }),
            (0..SEQ_END).prop_map(|tail| ReplicaAction::Retire { tail }),
            Just(ReplicaAction::Sync),
            any::<bool>().prop_map(|automatic| ReplicaAction::Heartbeat { automatic }),
            Just(ReplicaAction::OpenWindow),
            (any::<bool>(), number()).prop_map(|(durable, window)| ReplicaAction::AppendPlaced { durable, window }),
            (any::<bool>(), 0..SIZE_END, 1..=PAYLOAD_MAX, any::<[u32; 2]>()).prop_map(
                |(same, offset, len, [place, crc])| {
                    let kind = if same { EntryKind::Same } else { EntryKind::Write };
                    ReplicaAction::Read(LogEntry::new(kind, Extent::new(offset, u64::from(len)), place, crc))
                }
            ),
            number().prop_map(|epoch| ReplicaAction::Discard { epoch }),
        ]
    }

    fn answer() -> impl Strategy<Value = ReplicaAnswer> {
        prop_oneof![
            any::<LogId>().prop_map(ReplicaAnswer::Created),
            any::<[u64; 4]>().prop_map(|[head, tail, floor, held]| {
                ReplicaAnswer::Done(CopyProgress { head, tail, floor, held })
            }),
            any::<u64>().prop_map(|term| ReplicaAnswer::Refused(AppendRefused::Superseded(term))),
            any::<u64>().prop_map(|head| ReplicaAnswer::Refused(AppendRefused::Gap(head))),
            Just(ReplicaAnswer::Refused(AppendRefused::NotAdopted)),
            Just(ReplicaAnswer::Refused(AppendRefused::CopyLost)),
            "\\PC{0,40}".prop_map(ReplicaAnswer::Failed),
            any::<[u8; WINDOW_DESCRIPTOR_LEN]>().prop_map(|bytes| {
                ReplicaAnswer::Window(WindowDescriptor::decode(&bytes).expect("any bytes describe a window"))
            }),
        ]
    }

    proptest! {
        #[test]
        fn messages_are_read_as_they_were_written(log: LogId, term: u32, action in action(), answer in answer()) {
            let request = ReplicaRequest { log, term, action };
            let bytes = request.encode();
            prop_assert_eq!(ReplicaRequest::decode(&bytes), Ok(request));
            prop_assert!((0..bytes.len()).all(|end| ReplicaRequest::decode(&bytes[..end]).is_err()));
            let bytes = answer.encode();
            prop_assert_eq!(ReplicaAnswer::decode(&bytes), Ok(answer));
            prop_assert!((0..bytes.len()).all(|end| ReplicaAnswer::decode(&bytes[..end]).is_err()));
        }
    }

    /// The bytes of `docs/formats/replication.md`: daemons of different versions have the same ones.
    #[test]
    fn requests_about_windows_are_these_bytes() {
        let encode = |action| ReplicaRequest { log: [7; 16], term: 0x0403_0201, action }.encode();
        let head = [&[7; 16][..], &[1, 2, 3, 4]].concat();
        assert_eq!(encode(ReplicaAction::OpenWindow), [&head[..], &[9]].concat());
        let placed = ReplicaAction::AppendPlaced { durable: true, window: 0x0807_0605_0403_0201 };
        assert_eq!(encode(placed), [&head[..], &[10, 1, 1, 2, 3, 4, 5, 6, 7, 8]].concat());
        let window: [u8; WINDOW_DESCRIPTOR_LEN] = std::array::from_fn(|at| at as u8);
        let answer = ReplicaAnswer::Window(WindowDescriptor::decode(&window).expect("a window"));
        assert_eq!(answer.encode(), [&[5][..], &window].concat());
    }

    #[test]
    fn a_request_to_follow_the_primary_of_an_encrypted_log_is_these_bytes() {
        let adopt = |encryption| {
            let (base, start) = (LogShape::empty_at(4), CopyStart { tail_seq: 4, at: AppendCursor::default() });
            let (copy, epoch, filling, lease_ms, automatic, cut) = ([2; 16], 3, true, 9, true, 5);
            let adopt = AdoptTerm { copy, epoch, filling, base, start, cut, lease_ms, automatic, encryption };
            ReplicaRequest { log: [7; 16], term: 1, action: ReplicaAction::Adopt(adopt) }.encode()
        };
        let (plain, encrypted) = (adopt(None), adopt(Some(*b"checkcheckcheck!")));
        assert_eq!((plain[20], encrypted[20]), (2, 12));
        assert_eq!(encrypted[21..], [&plain[21..], b"checkcheckcheck!"].concat());
    }

    #[test]
    fn a_shape_that_no_log_has_is_refused() {
        let request = |base: &[(u64, u64)]| {
            let mut bytes = ReplicaRequest {
                log: [1; 16],
                term: 3,
                action: ReplicaAction::Adopt(AdoptTerm {
                    copy: [2; 16],
                    epoch: 3,
                    filling: false,
                    base: LogShape::default(),
                    start: CopyStart::default(),
                    cut: 0,
                    lease_ms: 500,
                    automatic: false,
                    encryption: None,
                }),
            }
            .encode();
            bytes.truncate(bytes.len() - 4);
            bytes.extend_from_slice(&(base.len() as u32).to_le_bytes());
            base.iter()
                .flat_map(|(term, end)| [term, end])
                .for_each(|word| bytes.extend_from_slice(&word.to_le_bytes()));
            ReplicaRequest::decode(&bytes).is_ok()
        };
        assert!(request(&[(1, 5), (2, 6)]));
        assert!(!request(&[(1, 5), (1, 6)]), "the same term twice");
        assert!(!request(&[(2, 5), (1, 6)]), "a term that decreases");
        assert!(!request(&[(1, 5), (2, 5)]), "a term without entries");
        assert!(!request(&[(1, 0)]));
    }

    #[test]
    fn numbers_that_no_format_has_are_refused() {
        let adopt = |tail_seq, at, cut| {
            let start = CopyStart { tail_seq, at };
            let base = LogShape::empty_at(4);
            let (copy, epoch, filling, lease_ms, automatic, encryption) = ([2; 16], 3, false, 9, true, None);
            let adopt = AdoptTerm { copy, epoch, filling, base, start, cut, lease_ms, automatic, encryption };
            let request = ReplicaRequest { log: [1; 16], term: 3, action: ReplicaAction::Adopt(adopt) };
            ReplicaRequest::decode(&request.encode()).is_ok()
        };
        let at = AppendCursor { number: 1, pos: 8, seq: 3 };
        assert!(adopt(4, at, 5));
        assert!(!adopt(5, at, 5), "the shape has another tail");
        assert!(!adopt(4, AppendCursor { seq: 5, ..at }, 5), "it begins after its tail");
        assert!(!adopt(4, AppendCursor { pos: BLOCK_END, ..at }, 5));
        assert!(!adopt(4, AppendCursor { number: u64::MAX, ..at }, 5));
        assert!(!adopt(4, at, u64::MAX));
    }
}
