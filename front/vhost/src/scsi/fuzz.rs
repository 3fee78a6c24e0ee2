//! Entry point of the fuzzers: buffers of all queues in, and a panic if one is parsed or answered as it must not be.

use std::rc::Rc;

use forebay_block::BufList;
use forebay_reactor::{Buf, GuardedMapping};
use forebay_scsi::{ScsiUnitEvent, status};

use super::{EVENT_LEN, ScsiConfig, ScsiControlRequest, ScsiEvents, ScsiOutcome, ScsiRequest, ScsiResponse, features};
use crate::block::{PayloadPools, buffer_len};
use crate::memory::{GuestArea, GuestPart};

/// Byte of guest memory that was not written.
const UNWRITTEN: u8 = 0xee;

/// Returns guest memory with `bytes`, in parts of the given lengths and a last one for the rest, none next to another.
pub(super) fn parts_of(bytes: &[u8], lengths: &[u8]) -> Vec<GuestPart> {
    let mut rest = bytes;
    let mut parts = Vec::new();
    for len in lengths.iter().map(|&len| usize::from(len)).chain([usize::MAX]) {
        let (piece, after) = rest.split_at(len.min(rest.len()));
        let mapping = Rc::new(GuardedMapping::anonymous(piece.len().max(1)).expect("memory"));
        mapping.write(0, piece);
        let area = GuestArea::of(&mapping, 0, piece.len()).expect("as long as the mapping");
        parts.push(GuestPart { guest: (parts.len() as u64 + 1) << 20, area });
        rest = after;
    }
    parts
}

/// Returns the bytes of parts.
pub(super) fn bytes_of(parts: &[GuestPart]) -> Vec<u8> {
    let mut bytes = vec![0; buffer_len(parts) as usize];
    crate::block::copy_from(parts, 0, &mut bytes);
    bytes
}

/// Buffer, once in one part each way and once in several.
struct FuzzedBuffer<'a> {
    readable: &'a [u8],
    space: usize,
    lengths: &'a [u8],
}

impl FuzzedBuffer<'_> {
    /// Returns the result of `answer` for both forms, with the written bytes: they are the same.
    fn same<T: PartialEq + std::fmt::Debug>(&self, answer: impl Fn(&[GuestPart], &[GuestPart]) -> T) -> (T, Vec<u8>) {
        let space = vec![UNWRITTEN; self.space];
        let form = |lengths: &[u8]| {
            let writable = parts_of(&space, lengths);
            let result = answer(&parts_of(self.readable, lengths), &writable);
            (result, bytes_of(&writable))
        };
        let (several, whole) = (form(self.lengths), form(&[]));
        assert_eq!(several, whole, "borders of descriptors changed the outcome");
        whole
    }
}

/// Checks that nothing after the used bytes was written.
fn check_used(used: u32, written: &[u8]) {
    assert!(written[used as usize..].iter().all(|&byte| byte == UNWRITTEN), "more was written than {used} bytes");
}

/// Parses a buffer as a command, as a control request and as one for an event, and answers each.
///
/// The input is a byte of options, the sizes of sense data and CDB, the number of descriptors' lengths, the bytes of
/// the writable parts, the descriptors' lengths, and the readable bytes.
///
/// # Panics
/// When an invariant is broken.
pub fn scsi_request(data: &[u8]) {
    let Some((&[options, sense, cdb, count, space_low, space_high], rest)) = data.split_first_chunk() else { return };
    let (lengths, readable) = rest.split_at(rest.len().min(usize::from(count % 16)));
    let space = usize::from(u16::from_le_bytes([space_low, space_high & 0x0f]));
    let mut config = ScsiConfig::new(1);
    // Sizes out of bounds are refused, and those from before remain.
    let _ = config.write(20, &[sense, 0, 0, 0]);
    let _ = config.write(24, &[cdb, 0, 0, 0]);
    let buffer = FuzzedBuffer { readable, space, lengths };
    command(&buffer, &config, options);
    control(&buffer);
    event(&buffer, options);
}

fn command(buffer: &FuzzedBuffer<'_>, config: &ScsiConfig, options: u8) {
    let FuzzedBuffer { readable, space, .. } = *buffer;
    let (parsed, written) = buffer.same(|readable, writable| ScsiRequest::parse(readable, writable, config));
    assert!(written.iter().all(|&byte| byte == UNWRITTEN));
    let Ok(request) = parsed else {
        assert!(space < 12, "no response in {space} bytes");
        return;
    };
    let data_at = (19 + config.cdb_size() as usize).min(readable.len());
    let data_in = space.saturating_sub(12 + config.sense_size() as usize);
    assert_eq!(request.reply.data_out(), (readable.len() - data_at) as u64);
    assert_eq!(request.reply.data_in(), data_in as u64);
    let pools = PayloadPools::new();
    let ((taken, outcome), _) = buffer.same(|parts, _| {
        let mut request = request;
        match request.ready_command(parts, &pools) {
            Ok(command) => {
                let data = command.data.to_vec();
                assert_eq!(data, readable[data_at..][..data.len()], "Data-Out");
                assert_eq!(request.reply.taken, data.len() as u64);
                assert!(request.refusal.is_none() && command.read_bytes() <= data_in);
                (Some(data.len()), None)
            }
            Err(outcome) => {
                assert!(outcome.response == ScsiResponse::Overrun || request.refusal.is_some());
                (None, Some(outcome.response))
            }
        }
    });
    let answer: Vec<u8> = (0..usize::from(options) * 23).map(|at| (at / 3) as u8).collect();
    let outcome = match outcome {
        Some(response) => ScsiOutcome::failed(response),
        None if options & 1 != 0 => ScsiOutcome {
            status: status::CHECK_CONDITION,
            sense: answer.clone(),
            ..ScsiOutcome::failed(ScsiResponse::Ok)
        },
        None => {
            let mut data: BufList = Buf::copy_of(&answer[..answer.len() / 3]).into();
            data.push(Buf::copy_of(&answer[answer.len() / 3..]));
            ScsiOutcome { data, ..ScsiOutcome::failed(ScsiResponse::Ok) }
        }
    };
    let (used, written) = buffer.same(|_, writable| {
        let mut request = request;
        request.reply.taken = taken.unwrap_or(0) as u64;
        request.respond(writable, &outcome, None)
    });
    check_used(used, &written);
    let number = |at: usize| u32::from_le_bytes(written[at..at + 4].try_into().expect("four bytes")) as usize;
    let head = space.min(12 + config.sense_size() as usize);
    let sense_len = outcome.sense.len().min(head - 12);
    assert_eq!((number(0), &written[12..12 + sense_len]), (sense_len, &outcome.sense[..sense_len]));
    assert!(written[12 + sense_len..head].iter().all(|&byte| byte == 0));
    let returned = outcome.data.len().min(data_in);
    assert_eq!((used as usize, &written[head..head + returned]), (head + returned, &outcome.data.to_vec()[..returned]));
    let response = if outcome.data.len() > data_in { ScsiResponse::Overrun } else { outcome.response };
    assert_eq!((written[10], written[11]), (outcome.status, response as u8));
    let good = outcome.response == ScsiResponse::Ok && outcome.status == status::GOOD;
    let transferred = if good { taken.unwrap_or(0) + returned } else { 0 };
    assert_eq!(number(4), readable.len() - data_at + data_in - transferred, "residual");
}

fn control(buffer: &FuzzedBuffer<'_>) {
    let (parsed, _) = buffer.same(ScsiControlRequest::parse);
    let Ok(request) = parsed else {
        assert!(buffer.space < 5);
        return;
    };
    let (used, written) = buffer.same(|_, writable| request.respond(writable, ScsiResponse::IncorrectLun, None));
    check_used(used, &written);
    assert!((1..=5).contains(&used) && written[used as usize - 1] == 12);
}

fn event(buffer: &FuzzedBuffer<'_>, options: u8) {
    let (put, written) = buffer.same(|_, writable| {
        let mut events = ScsiEvents::new(features());
        let lun = u16::from(options) * 9;
        events.push(if options & 1 == 0 { ScsiUnitEvent::Added { lun } } else { ScsiUnitEvent::Missed });
        let put = events.put(writable, None);
        assert_eq!(events.has_pending(), put.is_err(), "an event is lost, or reported twice");
        put
    });
    match put {
        Ok(used) => check_used(used.expect("an event was pending"), &written),
        Err(_) => assert!(buffer.space < EVENT_LEN && written.iter().all(|&byte| byte == UNWRITTEN)),
    }
}
