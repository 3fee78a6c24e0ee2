use proptest::prelude::*;

use super::*;
use crate::wire::HEADER_LEN;

const OFFER: DeviceOffer = DeviceOffer { features: 1 << 9, queues: 2 };

fn header(request: u32, needs_reply: bool, len: usize) -> VhostHeader {
    VhostHeader { request, is_reply: false, needs_reply, len: len as u32 }
}

fn send(session: &mut VhostSession, request: u32, payload: &[u8]) -> (VhostStep, Option<Vec<u8>>) {
    let descriptors = usize::from(matches!(request, request::SET_VRING_KICK | request::SET_VRING_CALL));
    let step = session.receive(header(request, true, payload.len()), payload, descriptors).expect("a valid request");
    let outcome = match &step {
        VhostStep::StopRing { .. } => StepOutcome::RingBase(77),
        VhostStep::ReadConfig { len, .. } => StepOutcome::Config(vec![7; *len as usize]),
        VhostStep::Refuse(why) => StepOutcome::Failed(why.clone()),
        _ => StepOutcome::Done,
    };
    let reply = session.finish(outcome).expect("acknowledged");
    (step, reply)
}

fn pair(index: u32, number: u32) -> [u8; 8] {
    wire::ring_base(index, number)
}

fn ring_addr(index: u32, descriptors: u64) -> Vec<u8> {
    let numbers = [descriptors, descriptors + 0x2000, descriptors + 0x1000, 0].map(u64::to_le_bytes).concat();
    [pair(index, 0).as_slice(), &numbers].concat()
}

/// Negotiates everything, and sets up ring 0.
fn running() -> VhostSession {
    let mut session = VhostSession::new(OFFER);
    let features = session.offered() & !feature::RING_PACKED & !feature::ACCESS_PLATFORM;
    send(&mut session, request::SET_PROTOCOL_FEATURES, &wire::number(PROTOCOL_FEATURES));
    send(&mut session, request::SET_FEATURES, &wire::number(features));
    send(&mut session, request::SET_VRING_NUM, &pair(0, 128));
    send(&mut session, request::SET_VRING_BASE, &pair(0, 5));
    send(&mut session, request::SET_VRING_ADDR, &ring_addr(0, 0x1000));
    assert!(!session.is_runnable(0));
    assert_eq!(send(&mut session, request::SET_VRING_KICK, &wire::number(0)).0, VhostStep::SetKick { index: 0 });
    assert!(!session.is_runnable(0), "it is not enabled");
    send(&mut session, request::SET_VRING_ENABLE, &pair(0, 1));
    assert!(session.is_runnable(0) && !session.is_runnable(1));
    session
}

#[test]
fn a_ring_runs_from_its_kick_descriptor_until_its_base_is_read() {
    let mut session = running();
    assert_eq!(session.ring(0).base, 5);
    let (step, reply) = send(&mut session, request::GET_VRING_BASE, &pair(0, 0));
    assert_eq!(step, VhostStep::StopRing { index: 0 });
    assert_eq!(reply.expect("the base")[HEADER_LEN..], pair(0, 77));
    assert!(!session.is_runnable(0));
    assert_eq!(session.ring(0).base, 77);
    send(&mut session, request::SET_VRING_KICK, &wire::number(0));
    assert!(session.is_runnable(0));
    send(&mut session, request::RESET_DEVICE, &[]);
    assert!(!session.is_runnable(0) && session.features() == 0);
}

#[test]
fn rings_do_not_change_while_they_run_but_the_log_may_be_turned_on() {
    let mut session = running();
    let features = session.features();
    send(&mut session, request::SET_FEATURES, &wire::number(features & !feature::LOG_ALL));
    send(&mut session, request::SET_VRING_ADDR, &ring_addr(0, 0x1000));
    for (request, payload) in [
        (request::SET_VRING_NUM, pair(0, 64).to_vec()),
        (request::SET_VRING_BASE, pair(0, 6).to_vec()),
        (request::SET_VRING_ADDR, ring_addr(0, 0x2000)),
        (request::SET_FEATURES, wire::number(0).to_vec()),
    ] {
        let violation = session.receive(header(request, true, payload.len()), &payload, 0).expect_err("it runs");
        assert!(matches!(violation, VhostViolation::NotNow { .. }), "{violation}");
        session = running();
    }
}

#[test]
fn nonsense_is_a_violation() {
    let offered = TRANSPORT_FEATURES | OFFER.features;
    for (request, payload, descriptors) in [
        (request::SET_FEATURES, wire::number(!offered).to_vec(), 0),
        (request::SET_PROTOCOL_FEATURES, wire::number(!0).to_vec(), 0),
        (request::SET_VRING_NUM, pair(0, 100).to_vec(), 0),
        (request::SET_VRING_NUM, pair(0, 0).to_vec(), 0),
        (request::SET_VRING_NUM, pair(0, 2048).to_vec(), 0),
        (request::SET_VRING_NUM, pair(2, 128).to_vec(), 0),
        (request::SET_VRING_BASE, pair(0, 65536).to_vec(), 0),
        (request::SET_VRING_ADDR, ring_addr(0, 8), 0),
        (request::SET_VRING_ENABLE, pair(0, 1).to_vec(), 0),
        (request::SET_VRING_KICK, wire::number(0).to_vec(), 0),
        (request::SET_VRING_KICK, wire::number(256).to_vec(), 1),
        (request::SET_VRING_KICK, wire::number(512).to_vec(), 1),
        (request::SET_VRING_KICK, wire::number(0).to_vec(), 2),
        (request::SET_MEM_TABLE, pair(9, 0).to_vec(), 9),
        (request::SET_MEM_TABLE, pair(0, 0).to_vec(), 0),
        (request::GET_FEATURES, vec![0], 0),
        (request::GET_FEATURES, vec![], 1),
        (request::POSTCOPY_ADVISE, vec![], 0),
        (request::GET_CONFIG, [0, 257, 0].map(u32::to_le_bytes).concat(), 0),
        (request::GET_INFLIGHT_FD, wire::inflight(SharedFileRange { len: 0, offset: 0 }, 3, 128), 0),
        (request::GET_INFLIGHT_FD, wire::inflight(SharedFileRange { len: 0, offset: 0 }, 1, 0), 0),
        (request::SET_INFLIGHT_FD, wire::inflight(SharedFileRange { len: 0, offset: 0 }, 1, 1), 1),
        (99, vec![], 0),
    ] {
        let mut session = VhostSession::new(OFFER);
        let step = session.receive(header(request, false, payload.len()), &payload, descriptors);
        assert!(step.is_err(), "{request} with {payload:?} is {step:?}");
    }
}

#[test]
fn a_failure_without_an_acknowledgement_ends_the_connection() {
    let mut session = VhostSession::new(OFFER);
    let gone = wire::inflight(SharedFileRange { len: 9, offset: 0 }, 1, 1);
    let step = session.receive(header(request::SET_INFLIGHT_FD, true, gone.len()), &gone, 1).expect("valid");
    assert!(matches!(step, VhostStep::SetInflight { .. }));
    assert_eq!(session.finish(StepOutcome::Failed("no memory".into())), Err("no memory".to_owned()));
    send(&mut session, request::SET_PROTOCOL_FEATURES, &wire::number(PROTOCOL_FEATURES));
    session.receive(header(request::SET_INFLIGHT_FD, true, gone.len()), &gone, 1).expect("valid");
    let reply = session.finish(StepOutcome::Failed("no memory".into())).expect("acknowledged").expect("a reply");
    assert_eq!(reply[HEADER_LEN..], wire::number(1));
    let (_, reply) = send(&mut session, 99, &[]);
    assert_eq!(reply.expect("a reply")[HEADER_LEN..], wire::number(1));
}

#[test]
fn a_refused_region_leaves_the_table_as_it_was() {
    let region = |at: u64| {
        let place = [at, 0x1000, at, 0].map(u64::to_le_bytes).concat();
        [wire::number(0).as_slice(), &place].concat()
    };
    let mut session = running();
    let mut answer = |request, payload: &[u8], outcome: StepOutcome| {
        let step = session.receive(header(request, true, payload.len()), payload, 1).expect("valid");
        let refused = matches!(step, VhostStep::Refuse(_));
        let outcome = if refused { StepOutcome::Failed("refused".into()) } else { outcome };
        let reply = session.finish(outcome).expect("acknowledged").expect("an acknowledgement");
        (step, reply[HEADER_LEN] == 0)
    };
    let failed = || StepOutcome::Failed("it overlaps another".into());
    assert!(answer(request::ADD_MEM_REG, &region(0x1000), StepOutcome::Done).1);
    assert!(!answer(request::ADD_MEM_REG, &region(0x8000), failed()).1);
    let (step, done) = answer(request::REM_MEM_REG, &region(0x8000), StepOutcome::Done);
    assert!(matches!(step, VhostStep::Refuse(_)) && !done, "{step:?}");
    let table = [[1, 0, 0, 0, 0, 0, 0, 0].as_slice(), &region(0x4000)[8..]].concat();
    assert!(!answer(request::SET_MEM_TABLE, &table, failed()).1);
    let (step, done) = answer(request::REM_MEM_REG, &region(0x1000), StepOutcome::Done);
    assert!(matches!(step, VhostStep::RemoveRegion(_)) && done, "{step:?}");
}

#[test]
fn a_ring_does_not_run_with_a_kick_descriptor_that_failed() {
    let mut session = running();
    send(&mut session, request::GET_VRING_BASE, &pair(0, 0));
    let kick = wire::number(0);
    session.receive(header(request::SET_VRING_KICK, true, kick.len()), &kick, 1).expect("valid");
    session.finish(StepOutcome::Failed("no eventfd".into())).expect("acknowledged");
    assert!(!session.is_runnable(0));
    send(&mut session, request::SET_VRING_KICK, &kick);
    assert!(session.is_runnable(0));
}

/// Returns the input of the fuzzers for messages of which most can be parsed.
fn any_messages() -> impl Strategy<Value = Vec<u8>> {
    let numbers = prop_oneof![0_u64..4, Just(0x1000), Just(128), Just(1 << 32), Just(!0_u64 >> 1)];
    let payload = proptest::collection::vec(numbers.prop_map(u64::to_le_bytes), 0..6).prop_map(|parts| parts.concat());
    let how = prop_oneof![4 => Just(15_u8), 1 => Just(0x8f), 1 => any::<u8>()];
    let message = (how, 0_u32..40, any::<bool>(), payload).prop_map(|(how, request, needs_reply, payload)| {
        [&[how][..], &header(request, needs_reply, payload.len()).to_bytes(), &payload].concat()
    });
    let negotiated = [request::SET_PROTOCOL_FEATURES, request::SET_FEATURES].map(|request| {
        let bits = if request == request::SET_FEATURES { feature::PROTOCOL_FEATURES } else { PROTOCOL_FEATURES };
        [&[15][..], &header(request, false, 8).to_bytes(), &wire::number(bits)].concat()
    });
    (any::<u8>(), proptest::collection::vec(message, 0..40))
        .prop_map(move |(options, messages)| [&[options][..], &negotiated.concat(), &messages.concat()].concat())
}

proptest! {
    /// Any request has at most one reply, and no bytes make it panic.
    #[test]
    fn any_bytes_are_a_step_or_a_violation(
        messages in proptest::collection::vec((0_u32..45, any::<bool>(), proptest::collection::vec(any::<u8>(), 0..50), 0_usize..3), 1..40)
    ) {
        let mut session = VhostSession::new(OFFER);
        for (request, needs_reply, payload, descriptors) in messages {
            let Ok(step) = session.receive(header(request, needs_reply, payload.len()), &payload, descriptors) else {
                break;
            };
            let outcome = match step {
                VhostStep::StopRing { .. } => StepOutcome::RingBase(1),
                VhostStep::ReadConfig { len, .. } => StepOutcome::Config(vec![0; len as usize]),
                VhostStep::CreateInflight { .. } => StepOutcome::Inflight(SharedFileRange { len: 1, offset: 0 }),
                VhostStep::Refuse(why) => StepOutcome::Failed(why),
                _ => StepOutcome::Done,
            };
            if let Ok(Some(reply)) = session.finish(outcome) {
                let header = VhostHeader::parse_reply(reply[..HEADER_LEN].try_into().expect("a header")).expect("valid");
                prop_assert_eq!((header.request, header.len as usize), (request, reply.len() - HEADER_LEN));
            }
        }
    }

    /// The same with headers, descriptors and steps that fail, and a model of what is mapped and running.
    #[test]
    fn any_messages_keep_the_invariants(input in any_messages()) {
        fuzz::messages(&input);
    }
}
