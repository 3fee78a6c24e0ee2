use std::rc::Rc;

use forebay_block::{Buf, BufList};
use forebay_reactor::GuardedMapping;
use forebay_scsi::cdb::ScsiCommand;
use forebay_scsi::sense::Sense;
use forebay_scsi::{Lun, ScsiCompletion, ScsiFailure, TaskFunction, TaskResponse, status};
use proptest::prelude::*;

use super::fuzz::{bytes_of, parts_of};
use super::*;
use crate::block::PayloadPools;
use crate::dirty_log::DirtyLog;

const LUN5: [u8; 8] = [1, 0, 0x40, 5, 0, 0, 0, 0];
/// Bytes of a response with the default size of sense data.
const RESPONSE: usize = 108;

/// Returns the readable bytes of a command with the default size of the CDB.
fn command(lun: [u8; 8], attribute: u8, cdb: &[u8], data: &[u8]) -> Vec<u8> {
    let mut bytes = [&lun[..], &0x1122_3344_5566_7788_u64.to_le_bytes(), &[attribute, 0, 0], cdb].concat();
    bytes.resize(51, 0);
    bytes.extend(data);
    bytes
}

/// Returns the CDB of READ (10) or WRITE (10).
fn transfer(opcode: u8, blocks: u8) -> [u8; 10] {
    [opcode, 0, 0, 0, 0, 7, 0, 0, blocks, 0]
}

fn parse(readable: &[u8], space: usize) -> Result<ScsiRequest, ScsiRingViolation> {
    ScsiRequest::parse(&parts_of(readable, &[]), &parts_of(&vec![0; space], &[]), &ScsiConfig::new(1))
}

/// Returns a request with its command, or with the outcome without one.
fn ready(readable: &[u8], space: usize) -> (ScsiRequest, Result<forebay_scsi::ReadyScsiCommand, ScsiOutcome>) {
    let mut request = parse(readable, space).expect("space for a response");
    let ready = request.ready_command(&parts_of(readable, &[3, 40, 9]), &PayloadPools::new());
    (request, ready)
}

/// Fields of a response.
#[derive(Debug, PartialEq, Eq)]
struct Answer {
    used: u32,
    sense: Vec<u8>,
    residual: u32,
    status: u8,
    response: u8,
    data: Vec<u8>,
}

fn answer(request: &ScsiRequest, outcome: &ScsiOutcome) -> Answer {
    let space = RESPONSE + request.reply.data_in() as usize;
    let writable = parts_of(&vec![0xee; space], &[5, 100, 7]);
    let used = request.respond(&writable, outcome, None);
    let bytes = bytes_of(&writable);
    let number = |at: usize| u32::from_le_bytes(bytes[at..at + 4].try_into().expect("four bytes"));
    assert_eq!(bytes[8..10], [0, 0], "status qualifier");
    Answer {
        used,
        sense: bytes[12..12 + number(0) as usize].to_vec(),
        residual: number(4),
        status: bytes[10],
        response: bytes[11],
        data: bytes[RESPONSE..used as usize].to_vec(),
    }
}

fn good(data: &[u8]) -> ScsiOutcome {
    let data = if data.is_empty() { BufList::new() } else { Buf::copy_of(data).into() };
    ScsiOutcome { data, ..ScsiOutcome::failed(ScsiResponse::Ok) }
}

#[test]
fn fields_of_a_command_are_where_the_standard_has_them() {
    let cdb = [0x12, 0, 0, 0, 36, 0];
    let request = parse(&command(LUN5, 1, &cdb, &[]), RESPONSE + 36).expect("space for a response");
    assert_eq!((request.lun, request.id), (Lun::Unit(5), 0x1122_3344_5566_7788));
    assert!(request.is_ordered() && request.refusal.is_none());
    assert_eq!((&request.cdb[..6], request.reply.data_out(), request.reply.data_in()), (&cdb[..], 0, 36));
    for (value, attribute) in [
        (0, ScsiTaskAttribute::Simple),
        (2, ScsiTaskAttribute::HeadOfQueue),
        (3, ScsiTaskAttribute::Aca),
        (77, ScsiTaskAttribute::Simple),
    ] {
        let request = parse(&command(LUN5, value, &cdb, &[]), RESPONSE).expect("space for a response");
        assert_eq!((request.attribute, request.is_ordered()), (attribute, false));
    }
}

#[test]
fn sizes_of_the_configuration_move_the_data() {
    let mut config = ScsiConfig::new(1);
    config.write(20, &[18, 0, 0, 0, 10, 0, 0, 0]).expect("sizes");
    let data = [7; 512];
    let bytes = [&LUN5[..], &[0; 11], &transfer(0x2a, 1), &data].concat();
    let (readable, writable) = (parts_of(&bytes, &[19, 10]), parts_of(&[0; 30], &[]));
    let mut request = ScsiRequest::parse(&readable, &writable, &config).expect("space for a response");
    let command = request.ready_command(&readable, &PayloadPools::new()).expect("a write");
    assert_eq!(command.data.to_vec(), data);
    assert!(matches!(command.command, Ok(ScsiCommand::Write(_))) && request.cdb[10..] == [0; 6]);
    let sense = vec![3; 40];
    let outcome = ScsiOutcome { status: status::CHECK_CONDITION, sense, ..good(&[]) };
    assert_eq!(request.respond(&writable, &outcome, None), 30);
    let bytes = bytes_of(&writable);
    assert_eq!((&bytes[..4], &bytes[12..]), (&[18, 0, 0, 0][..], &[3; 18][..]), "truncated sense data");
}

#[test]
fn only_a_buffer_without_a_response_is_a_violation() {
    let bytes = command(LUN5, 0, &[0; 6], &[]);
    assert_eq!(parse(&bytes, 11), Err(ScsiRingViolation::NoCommandResponse(11)));
    assert_eq!(parse(&[], 0), Err(ScsiRingViolation::NoCommandResponse(0)));
    let other_target = [1, 1, 0x40, 5, 0, 0, 0, 0];
    let data = [0; 512];
    for (bytes, space, response, refusal) in [
        (&bytes[..], 12, 9, ScsiRequestRefusal::ResponseShort { len: 12, needed: 108 }),
        (&bytes[..50], RESPONSE, 9, ScsiRequestRefusal::HeaderShort { len: 50, needed: 51 }),
        (&[], RESPONSE, 9, ScsiRequestRefusal::HeaderShort { len: 0, needed: 51 }),
        (
            &command(LUN5, 0, &transfer(0x2a, 1), &data),
            RESPONSE + 8,
            9,
            ScsiRequestRefusal::Bidirectional { data_out: 512, data_in: 8 },
        ),
        (&command(other_target, 0, &[0; 6], &[]), RESPONSE, 3, BadTarget(other_target).into()),
    ] {
        let (request, ready) = ready(bytes, space);
        assert_eq!(request.refusal, Some(refusal));
        let writable = parts_of(&vec![0xee; space], &[]);
        let used = request.respond(&writable, &ready.expect_err("a refusal"), None);
        assert_eq!((bytes_of(&writable)[11], used as usize), (response, space.min(RESPONSE)), "{refusal}");
    }
}

#[test]
fn data_of_a_write_is_matched_with_its_cdb() {
    let data: Vec<u8> = (0..1024).map(|at| (at / 5) as u8).collect();
    let (request, command) = ready(&command(LUN5, 0, &transfer(0x2a, 2), &data), RESPONSE);
    assert_eq!(command.expect("a write").data.to_vec(), data);
    let expected = Answer { used: 108, sense: vec![], residual: 0, status: 0, response: 0, data: vec![] };
    assert_eq!(answer(&request, &good(&[])), expected);
    let failed = ScsiOutcome { status: status::CHECK_CONDITION, sense: vec![0x70, 1], ..good(&[]) };
    let expected = Answer { sense: vec![0x70, 1], residual: 1024, status: 2, ..expected };
    assert_eq!(answer(&request, &failed), expected);
}

#[test]
fn data_of_another_length_than_the_cdb_has_is_reported() {
    let (request, longer) = ready(&command(LUN5, 0, &transfer(0x2a, 1), &[9; 700]), RESPONSE);
    assert_eq!(longer.expect("a write").data.len(), 512);
    assert_eq!(answer(&request, &good(&[])).residual, 188);
    for (bytes, space, residual) in [
        (command(LUN5, 0, &transfer(0x2a, 2), &[9; 512]), RESPONSE, 512),
        (command(LUN5, 0, &transfer(0x28, 2), &[]), RESPONSE + 512, 512),
        (command(LUN5, 0, &transfer(0x28, 2), &[9; 1024]), RESPONSE, 1024),
        (command(LUN5, 0, &transfer(0x2a, 2), &[]), RESPONSE + 1024, 1024),
    ] {
        let (request, outcome) = ready(&bytes, space);
        let answer = answer(&request, &outcome.expect_err("an overrun"));
        assert_eq!((answer.response, answer.residual, answer.used), (1, residual, 108));
    }
    // More than any command may transfer: a matter of the unit, however long the buffer is.
    let many = [0x88, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0, 1, 0, 0];
    assert!(ready(&command(LUN5, 0, &many, &[]), RESPONSE).1.is_ok());
}

#[test]
fn data_of_an_answer_is_cut_to_the_space() {
    let inquiry = command(LUN5, 0, &[0x12, 0, 0, 0, 255, 0], &[]);
    let data: Vec<u8> = (0..74).collect();
    for (space, response, residual) in [(255, 0, 181), (74, 0, 0), (73, 1, 0), (0, 1, 0)] {
        let (request, command) = ready(&inquiry, RESPONSE + space);
        assert!(command.is_ok());
        let answer = answer(&request, &good(&data));
        let returned = space.min(74);
        assert_eq!((answer.response, answer.residual, &answer.data[..]), (response, residual, &data[..returned]));
        assert_eq!(answer.used as usize, RESPONSE + returned);
    }
}

#[test]
fn outcomes_are_those_of_the_session() {
    let failure = ScsiFailure::from(Sense::cdb(2));
    let (note, outcome) = ScsiOutcome::of(ScsiCompletion { note: 5, unit: None, result: Err(failure) });
    assert_eq!((note, outcome.response, outcome.status, outcome.data.len()), (5, ScsiResponse::Ok, 2, 0));
    assert_eq!(outcome.sense, Sense::cdb(2).to_bytes(false));
    let done = ScsiCompletion { note: 6, unit: None, result: Err(ScsiFailure::CONFLICT) };
    let (_, outcome) = ScsiOutcome::of(done);
    assert_eq!((outcome.status, outcome.sense.len()), (0x18, 0));
    let done = ScsiCompletion { note: 7, unit: None, result: Ok(Buf::copy_of(b"data").into()) };
    let (note, outcome) = ScsiOutcome::of(done);
    assert_eq!((note, outcome.status, outcome.data.to_vec()), (7, 0, b"data".to_vec()));
}

#[test]
fn written_pages_are_logged() {
    let bits = Rc::new(GuardedMapping::anonymous(128).expect("memory"));
    let log = DirtyLog::new(bits.clone());
    let request = parse(&command(LUN5, 0, &[0x12, 0, 0, 0, 255, 0], &[]), RESPONSE + 200).expect("a response");
    // The parts are 1 MiB apart, which is 32 bytes of the log.
    request.respond(&parts_of(&[0; RESPONSE + 200], &[108, 10, 90]), &good(&[1; 20]), Some(&log));
    let mut found = [0; 128];
    bits.read(0, &mut found);
    let set: Vec<_> = found.iter().enumerate().filter(|(_, bits)| **bits != 0).collect();
    assert_eq!(set, [(32, &1), (64, &1), (96, &1)]);
}

fn manage(subtype: u32, lun: [u8; 8]) -> Vec<u8> {
    [&[0; 4][..], &subtype.to_le_bytes(), &lun, &9_u64.to_le_bytes()].concat()
}

#[test]
fn task_management_is_decoded() {
    let action = |bytes: &[u8]| {
        ScsiControlRequest::parse(&parts_of(bytes, &[1, 6, 9]), &parts_of(&[0], &[])).expect("a response").action
    };
    let lun = Lun::Unit(5);
    for (subtype, function) in [
        (0, TaskFunction::AbortTask { lun: Some(lun), tag: 9 }),
        (1, TaskFunction::AbortTaskSet(lun)),
        (3, TaskFunction::ClearTaskSet(lun)),
        (4, TaskFunction::NexusReset),
        (5, TaskFunction::LogicalUnitReset(lun)),
        (6, TaskFunction::QueryTask { lun: Some(lun), tag: 9 }),
        (7, TaskFunction::QueryTaskSet(lun)),
    ] {
        assert_eq!(action(&manage(subtype, LUN5)), ScsiControlAction::Manage(function));
    }
    let respond = ScsiControlAction::Respond;
    assert_eq!(action(&manage(2, LUN5)), respond(ScsiResponse::FunctionRejected), "CLEAR ACA");
    assert_eq!(action(&manage(8, LUN5)), respond(ScsiResponse::FunctionRejected));
    assert_eq!(action(&manage(5, [1, 9, 0, 0, 0, 0, 0, 0])), respond(ScsiResponse::BadTarget));
    assert_eq!(action(&manage(4, [1, 9, 0, 0, 0, 0, 0, 0])), respond(ScsiResponse::BadTarget));
    let any_lun = ScsiControlAction::Manage(TaskFunction::NexusReset);
    assert_eq!(action(&manage(4, [1, 0, 0xff, 0xff, 0, 0, 0, 0])), any_lun);
    assert_eq!(action(&manage(5, LUN5)[..23]), respond(ScsiResponse::Failure));
    assert_eq!(action(&[0; 3]), respond(ScsiResponse::Failure));
}

#[test]
fn control_responses_are_where_the_standard_has_them() {
    let answer = |bytes: &[u8], space: usize, response: Option<ScsiResponse>| {
        let writable = parts_of(&vec![0xee; space], &[1, 2]);
        let request = ScsiControlRequest::parse(&parts_of(bytes, &[]), &writable)?;
        let response = match request.action {
            ScsiControlAction::Respond(response) => response,
            ScsiControlAction::Manage(_) => response.expect("the response of the session"),
        };
        let used = request.respond(&writable, response, None);
        Ok((used, bytes_of(&writable)))
    };
    for (response, byte) in [
        (TaskResponse::Complete, 0),
        (TaskResponse::NoTask, 0),
        (TaskResponse::Succeeded, 10),
        (TaskResponse::Rejected, 11),
        (TaskResponse::NoUnit, 12),
    ] {
        assert_eq!(answer(&manage(6, LUN5), 2, Some(response.into())), Ok((1, vec![byte, 0xee])));
    }
    for kind in [1, 2] {
        let notification = [&u32::to_le_bytes(kind)[..], &LUN5, &[0xff; 4]].concat();
        assert_eq!(answer(&notification, 5, None), Ok((5, vec![0; 5])));
        assert_eq!(answer(&notification[..15], 6, None), Ok((5, vec![0, 0, 0, 0, 9, 0xee])));
        let violation = ScsiRingViolation::NoControlResponse { len: 4, needed: 5 };
        assert_eq!(answer(&notification, 4, None), Err(violation));
        let other = [&u32::to_le_bytes(kind)[..], &[1, 3, 0, 0, 0, 0, 0, 0], &[0xff; 4]].concat();
        assert_eq!(answer(&other, 5, None), Ok((5, vec![0, 0, 0, 0, 3])));
    }
    // The place of the response to an unknown request is not known: that of the known ones with this space.
    assert_eq!(answer(&[3; 30], 1, None), Ok((1, vec![9])));
    assert_eq!(answer(&[3; 30], 7, None), Ok((5, vec![0, 0, 0, 0, 9, 0xee, 0xee])));
    let violation = ScsiRingViolation::NoControlResponse { len: 0, needed: 1 };
    assert_eq!(answer(&manage(6, LUN5), 0, None), Err(violation));
}

#[test]
fn events_need_whole_buffers() {
    let mut events = ScsiEvents::new(features());
    assert_eq!(events.put(&parts_of(&[0; 16], &[]), None), Ok(None));
    events.push(forebay_scsi::ScsiUnitEvent::Removed { lun: 2 });
    assert_eq!(events.put(&parts_of(&[0; 15], &[]), None), Err(ScsiRingViolation::EventBuffer(15)));
    let writable = parts_of(&[0xee; 17], &[3, 2]);
    assert_eq!(events.put(&writable, None), Ok(Some(16)));
    assert_eq!(bytes_of(&writable), [1, 0, 0, 0, 1, 0, 0, 2, 0, 0, 0, 0, 2, 0, 0, 0, 0xee]);
    assert!(!events.has_pending());
}

/// Returns the input of the fuzzers for a request that is mostly valid.
fn nearly_valid() -> impl Strategy<Value = Vec<u8>> {
    let head = (any::<u8>(), 0..=60_u8, 0..=3_u16, prop::collection::vec(0..90_u8, 0..16));
    let cdb = prop_oneof![
        (0..4_u8).prop_map(|blocks| transfer(0x28, blocks).to_vec()),
        (0..4_u8).prop_map(|blocks| transfer(0x2a, blocks).to_vec()),
        any::<u8>().prop_map(|len| vec![0x12, 0, 0, 0, len, 0]),
        any::<u8>().prop_map(|len| vec![0x15, 0x10, 0, 0, len, 0]),
        prop::collection::vec(any::<u8>(), 16),
    ];
    let data = prop_oneof![Just(0), Just(512), 0..1500_usize];
    (head, cdb, data, any::<bool>()).prop_map(|((options, sense, spaces, lengths), cdb, data, addressed)| {
        let space = 12 + u16::from(sense) + if data > 0 { 0 } else { 512 * spaces };
        let [low, high] = space.to_le_bytes();
        let mut readable = command(if addressed { LUN5 } else { [1, 1, 0, 0, 0, 0, 0, 0] }, options, &cdb, &[]);
        readable.extend((0..data).map(|at| at as u8));
        [&[options, sense, 32, lengths.len() as u8, low, high], &lengths[..], &readable].concat()
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn any_bytes_are_handled(input in prop::collection::vec(any::<u8>(), 0..400)) {
        fuzz::scsi_request(&input);
    }

    #[test]
    fn commands_are_handled_however_they_are_divided(input in nearly_valid()) {
        fuzz::scsi_request(&input);
    }
}
