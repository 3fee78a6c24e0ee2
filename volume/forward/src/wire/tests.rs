use forebay_block::reservation::{
    EventKind, HOST_ID_LEN_MAX, HostId, REGISTRANTS_MAX, Refusal, ReservationAction, ReservationChange,
    ReservationTable, ReservationType,
};
use forebay_block::{Advice, BlockRequest, BufList, Error, ErrorKind, Extent, ExtentMap, ExtentState, Geometry};
use forebay_reactor::Buf;
use proptest::prelude::*;

use super::*;

fn extent() -> impl Strategy<Value = Extent> {
    (any::<u64>(), any::<u64>()).prop_map(|(offset, len)| Extent::new(offset >> 1, len >> 1))
}

fn bytes() -> impl Strategy<Value = BufList> {
    prop::collection::vec(any::<u8>(), 0..64).prop_map(|bytes| Buf::copy_of(&bytes).into())
}

fn block() -> impl Strategy<Value = BlockRequest> {
    let short = (any::<u32>(), 0..u64::from(TRANSFER_MAX) + 1).prop_map(|(at, len)| Extent::new(u64::from(at), len));
    prop_oneof![
        short.prop_map(BlockRequest::Read),
        (any::<u32>(), bytes(), any::<bool>()).prop_map(|(at, data, fua)| BlockRequest::Write {
            offset: u64::from(at),
            data,
            fua
        }),
        extent().prop_map(BlockRequest::Discard),
        (extent(), any::<bool>(), any::<bool>()).prop_map(|(extent, no_unmap, fua)| BlockRequest::WriteZeroes {
            extent,
            no_unmap,
            fua
        }),
        (any::<u32>(), bytes(), any::<bool>()).prop_map(|(at, data, fua)| {
            let expect = data.to_vec().iter().map(|byte| byte ^ 1).collect::<Vec<_>>();
            BlockRequest::CompareAndWrite { offset: u64::from(at), expect: Buf::copy_of(&expect).into(), data, fua }
        }),
        Just(BlockRequest::Flush),
    ]
}

fn advice() -> impl Strategy<Value = Advice> {
    let flags = [Advice::RANDOM, Advice::SEQUENTIAL, Advice::WILL_NEED, Advice::DONT_NEED, Advice::NO_CACHE];
    prop::collection::vec(any::<bool>(), 5).prop_map(move |set| {
        flags.into_iter().zip(set).filter(|(_, set)| *set).fold(Advice::NONE, |all, (flag, _)| all | flag)
    })
}

fn host() -> impl Strategy<Value = HostId> {
    prop::collection::vec(any::<u8>(), 1..HOST_ID_LEN_MAX).prop_map(|bytes| HostId::new(&bytes).expect("a host"))
}

fn action() -> impl Strategy<Value = ReservationAction> {
    let (key, known, persist) = (any::<u64>, any::<Option<u64>>, any::<Option<bool>>);
    let kind = || prop::sample::select(ReservationType::ALL.to_vec());
    prop_oneof![
        (known(), key(), persist()).prop_map(|(current, new, persist)| ReservationAction::Register {
            current,
            new,
            persist
        }),
        (key(), persist()).prop_map(|(key, persist)| ReservationAction::Add { key, persist }),
        (known(), key(), persist()).prop_map(|(current, new, persist)| ReservationAction::Replace {
            current,
            new,
            persist
        }),
        (known(), persist()).prop_map(|(current, persist)| ReservationAction::Remove { current, persist }),
        (key(), key(), host(), any::<bool>(), persist()).prop_map(|(key, new, to, unregister, persist)| {
            ReservationAction::Move { key, new, to, unregister, persist }
        }),
        (key(), kind()).prop_map(|(key, kind)| ReservationAction::Reserve { key, kind }),
        (known(), kind()).prop_map(|(key, kind)| ReservationAction::Release { key, kind }),
        known().prop_map(|key| ReservationAction::Clear { key }),
        (key(), key(), kind(), any::<bool>()).prop_map(|(key, victim, kind, abort)| ReservationAction::Preempt {
            key,
            victim,
            kind,
            abort
        }),
        prop::sample::select(vec![
            ReservationAction::HoldWhole,
            ReservationAction::LetGoWhole,
            ReservationAction::Reset
        ]),
    ]
}

/// Tables as actions of few hosts leave them.
fn table() -> impl Strategy<Value = NumberedTable> {
    let step = (0..4_u8, 1..4_u64, 1..4_u64, 0..5_usize);
    (1..u64::MAX, prop::collection::vec(step, 0..20)).prop_map(|(number, steps)| {
        let mut table = ReservationTable::new();
        for (host, key, victim, step) in steps {
            let host = HostId::new(&[host]).expect("a host");
            let kind = ReservationType::WriteExclusiveRegistrants;
            let action = match step {
                0 | 1 => ReservationAction::Register { current: None, new: key, persist: Some(true) },
                2 => ReservationAction::Reserve { key, kind },
                3 => ReservationAction::Preempt { key, victim, kind, abort: false },
                _ => ReservationAction::Release { key: None, kind },
            };
            let _ = table.apply(&host, &action);
        }
        NumberedTable { number, table: table.into() }
    })
}

fn outcome() -> impl Strategy<Value = ReservationOutcome> {
    prop_oneof![
        prop::collection::vec(host(), 0..5).prop_map(|abort| Ok(ReservationChange { abort })),
        prop::sample::select(vec![
            Refusal::Conflict,
            Refusal::Invalid,
            Refusal::WrongKind,
            Refusal::TooMany,
            Refusal::Unsupported
        ])
        .prop_map(Err),
    ]
}

fn lease() -> impl Strategy<Value = Duration> {
    (100..=60_000_u64).prop_map(Duration::from_millis)
}

fn request() -> impl Strategy<Value = ForwardRequest> {
    prop_oneof![
        ("[a-zß/]{0,40}", any::<[u8; 16]>(), 1..u64::MAX, lease())
            .prop_map(|(volume, start, session, lease)| ForwardRequest::Open { volume, start, session, lease }),
        any::<u64>().prop_map(|grant| ForwardRequest::Renew { grant }),
        any::<u64>().prop_map(|session| ForwardRequest::Close { session }),
        (any::<u64>(), any::<u64>()).prop_map(|(session, number)| ForwardRequest::Adopted { session, number }),
        (any::<u64>(), host(), action()).prop_map(|(session, host, action)| ForwardRequest::Volume {
            session,
            request: VolumeRequest::Reserve(host, action)
        }),
        (any::<u64>(), extent())
            .prop_map(|(session, extent)| ForwardRequest::Volume { session, request: VolumeRequest::Map(extent) }),
        (any::<u64>(), block(), advice()).prop_map(|(session, block, advice)| ForwardRequest::Volume {
            session,
            request: VolumeRequest::Submit(block, advice)
        }),
    ]
}

fn geometry() -> impl Strategy<Value = Geometry> {
    (any::<u64>(), 1..65_536_u32, 1..u32::MAX, 65_536..u32::MAX, any::<bool>()).prop_map(
        |(size, block_size, preferred_io, transfer_max, read_only)| Geometry {
            size,
            block_size,
            preferred_io,
            transfer_max,
            read_only,
        },
    )
}

fn kind() -> impl Strategy<Value = ErrorKind> {
    let plain = prop::sample::select(vec![
        ErrorKind::NotFound,
        ErrorKind::Exists,
        ErrorKind::NoSpace,
        ErrorKind::Io,
        ErrorKind::Corrupt,
        ErrorKind::ReadOnly,
        ErrorKind::OutOfRange,
        ErrorKind::Invalid,
        ErrorKind::Busy,
        ErrorKind::Guard,
        ErrorKind::TimedOut,
        ErrorKind::Fenced,
        ErrorKind::Unsupported,
        ErrorKind::ShuttingDown,
        ErrorKind::Denied,
    ]);
    prop_oneof![plain, any::<u64>().prop_map(ErrorKind::Mismatch)]
}

fn error() -> impl Strategy<Value = Error> {
    (kind(), "[a-zß ]{0,60}", "[a-z]{0,9}").prop_map(|(kind, context, cause)| {
        let error = Error::new(kind, context);
        if cause.is_empty() { error } else { error.with_source(std::io::Error::other(cause)) }
    })
}

fn map() -> impl Strategy<Value = ExtentMap> {
    let run = (1..u64::from(u32::MAX), 0..3_usize);
    (any::<u32>(), prop::collection::vec(run, 0..20)).prop_map(|(offset, runs)| {
        let (mut map, mut at) = (ExtentMap::new(), u64::from(offset));
        for (len, state) in runs {
            map.push(at, len, [ExtentState::Data, ExtentState::Hole, ExtentState::Zero][state]);
            at += len;
        }
        map
    })
}

fn refusal() -> impl Strategy<Value = ForwardRefusal> {
    prop_oneof![
        "[a-z]{0,9}".prop_map(|hint| ForwardRefusal::NotOwner { hint }),
        Just(ForwardRefusal::Moving),
        Just(ForwardRefusal::Busy),
        Just(ForwardRefusal::Unknown),
        Just(ForwardRefusal::NoSession),
        Just(ForwardRefusal::StartEnded),
        "[a-z ]{0,40}".prop_map(ForwardRefusal::Other),
    ]
}

fn answer() -> impl Strategy<Value = ForwardAnswer> {
    prop_oneof![
        (any::<u64>(), geometry(), prop::option::of(table()), lease()).prop_map(
            |(term, geometry, reservations, lease)| ForwardAnswer::Opened { term, geometry, reservations, lease }
        ),
        any::<u64>().prop_map(|grant| ForwardAnswer::Renewed { grant }),
        outcome().prop_map(ForwardAnswer::Reserved),
        refusal().prop_map(ForwardAnswer::Refused),
        Just(ForwardAnswer::Done),
        bytes().prop_map(ForwardAnswer::Data),
        error().prop_map(ForwardAnswer::Failed),
        map().prop_map(ForwardAnswer::Mapped),
    ]
}

fn event() -> impl Strategy<Value = ForwardEvent> {
    let why = prop_oneof![
        Just(SessionEndReason::Moved),
        Just(SessionEndReason::Closed),
        Just(SessionEndReason::StartEnded),
        "[a-z ]{0,40}".prop_map(SessionEndReason::Other),
    ];
    prop_oneof![
        (any::<u64>(), geometry()).prop_map(|(session, geometry)| ForwardEvent::Size { session, geometry }),
        (any::<u64>(), why).prop_map(|(session, why)| ForwardEvent::Ended { session, why }),
        (any::<u64>(), table()).prop_map(|(session, table)| ForwardEvent::Reservations { session, table }),
    ]
}

/// Debug text of a request with its payload, which a list of buffers does not show.
fn whole(request: &ForwardRequest) -> String {
    let payload = match request {
        ForwardRequest::Volume { request: VolumeRequest::Submit(BlockRequest::Write { data, .. }, _), .. } => {
            data.to_vec()
        }
        ForwardRequest::Volume {
            request: VolumeRequest::Submit(BlockRequest::CompareAndWrite { expect, data, .. }, _),
            ..
        } => [expect.to_vec(), data.to_vec()].concat(),
        _ => Vec::new(),
    };
    format!("{request:?} {payload:?}")
}

proptest! {
    #[test]
    fn requests_round_trip_and_no_truncation_is_accepted(request in request()) {
        let (front, data) = request.encode();
        prop_assert!(front.len() <= FRONT_MAX);
        let decoded = ForwardRequest::decode(&front, data.clone()).expect("readable");
        prop_assert_eq!(whole(&decoded), whole(&request));
        for len in 0..front.len() {
            prop_assert!(ForwardRequest::decode(&front[..len], data.clone()).is_err());
        }
        let longer = [&front[..], &[0]].concat();
        prop_assert!(ForwardRequest::decode(&longer, data).is_err());
    }

    #[test]
    fn answers_round_trip_and_no_truncation_is_accepted(answer in answer()) {
        let (front, data) = answer.encode();
        let decoded = ForwardAnswer::decode(&front, data.clone()).expect("readable");
        prop_assert_eq!(format!("{decoded:?}"), format!("{answer:?}"));
        match (&decoded, &answer) {
            (ForwardAnswer::Failed(found), ForwardAnswer::Failed(error)) => {
                prop_assert_eq!((found.kind(), found.context()), (error.kind(), error.context()));
            }
            (ForwardAnswer::Data(found), ForwardAnswer::Data(data)) => prop_assert_eq!(found.to_vec(), data.to_vec()),
            _ => {}
        }
        for len in 0..front.len() {
            prop_assert!(ForwardAnswer::decode(&front[..len], data.clone()).is_err());
        }
    }

    #[test]
    fn events_round_trip_and_no_truncation_is_accepted(event in event()) {
        let (front, data) = event.encode();
        prop_assert_eq!(ForwardEvent::decode(&front, data.clone()), Ok(event));
        for len in 0..front.len() {
            prop_assert!(ForwardEvent::decode(&front[..len], data.clone()).is_err());
        }
        if !data.is_empty() {
            prop_assert!(ForwardEvent::decode(&front, data.slice(0..data.len() - 2)).is_err());
        }
    }

    #[test]
    fn random_bytes_do_not_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
        crate::fuzz::decode_messages(&bytes);
    }

    #[test]
    fn changed_bytes_do_not_panic(request in request(), at in any::<prop::sample::Index>(), byte in any::<u8>()) {
        let (mut front, _) = request.encode();
        let at = at.index(front.len());
        front[at] = byte;
        crate::fuzz::decode_messages(&[&[0][..], &front].concat());
    }
}

#[test]
fn impossible_requests_are_refused() {
    let refused = |request: VolumeRequest| {
        let (front, data) = request.encode(1);
        ForwardRequest::decode(&front, data).is_err()
    };
    let submit = |request| VolumeRequest::Submit(request, Advice::NONE);
    let zeroes = |len: usize| BufList::zeroes(len);
    let (max, end) = (TRANSFER_MAX as usize, u64::MAX - 1);
    assert!(!refused(submit(BlockRequest::Read(Extent::new(0, max as u64)))));
    assert!(refused(submit(BlockRequest::Read(Extent::new(0, max as u64 + 1)))));
    assert!(refused(submit(BlockRequest::Read(Extent::new(end, 2)))));
    assert!(refused(submit(BlockRequest::Discard(Extent::new(end, 2)))));
    assert!(refused(VolumeRequest::Map(Extent::new(end, 2))));
    assert!(!refused(submit(BlockRequest::Write { offset: 0, data: zeroes(max), fua: false })));
    assert!(refused(submit(BlockRequest::Write { offset: 0, data: zeroes(max + 1), fua: false })));
    assert!(refused(submit(BlockRequest::Write { offset: end, data: zeroes(2), fua: false })));
    let odd = BlockRequest::CompareAndWrite { offset: 0, expect: zeroes(1), data: zeroes(2), fua: false };
    assert!(refused(submit(odd)));
    // Data behind a request that has none.
    let (front, _) = submit(BlockRequest::Flush).encode(1);
    assert!(ForwardRequest::decode(&front, zeroes(1)).is_err());
}

#[test]
fn leases_are_bounded() {
    let open = |lease| ForwardRequest::Open { volume: "v".into(), start: [1; 16], session: 1, lease };
    let (mut front, _) = open(Duration::from_secs(60)).encode();
    assert!(ForwardRequest::decode(&front, BufList::new()).is_ok());
    let at = front.len() - 4;
    for millis in [0, 99, 60_001, u32::MAX] {
        front[at..].copy_from_slice(&millis.to_le_bytes());
        assert!(ForwardRequest::decode(&front, BufList::new()).is_err(), "{millis} ms");
    }
}

#[test]
fn the_largest_table_fits() {
    let mut table = ReservationTable::new();
    let host = |number: u64| {
        let mut bytes = [7; HOST_ID_LEN_MAX];
        bytes[..8].copy_from_slice(&number.to_le_bytes());
        HostId::new(&bytes).expect("a host")
    };
    let kind = ReservationType::WriteExclusiveRegistrants;
    for number in 0..REGISTRANTS_MAX as u64 {
        table.apply(&host(number), &ReservationAction::Add { key: 1, persist: None }).expect("registered");
    }
    // Events that all hosts are told.
    for _ in 0..3 {
        table.apply(&host(0), &ReservationAction::Reserve { key: 1, kind }).expect("reserved");
        table.apply(&host(0), &ReservationAction::Release { key: None, kind }).expect("released");
    }
    assert_eq!(table.events_after(0).next().map(|event| event.kind), Some(EventKind::Released));
    table.apply(&host(0), &ReservationAction::Reserve { key: 1, kind }).expect("reserved");
    let event = ForwardEvent::Reservations { session: 1, table: NumberedTable { number: 1, table: table.into() } };
    let (front, data) = event.encode();
    assert!(data.len() < RESERVATIONS_MAX, "{}", data.len());
    let Ok(ForwardEvent::Reservations { table, .. }) = ForwardEvent::decode(&front, data) else { panic!("a table") };
    assert_eq!(table.table.registrants().len(), REGISTRANTS_MAX);
    let abort: Vec<HostId> = (0..REGISTRANTS_MAX as u64).map(host).collect();
    let (front, data) = ForwardAnswer::Reserved(Ok(ReservationChange { abort: abort.clone() })).encode();
    let Ok(ForwardAnswer::Reserved(Ok(change))) = ForwardAnswer::decode(&front, data) else { panic!("an outcome") };
    assert_eq!(change.abort, abort);
}

#[test]
fn long_maps_and_texts_are_cut() {
    let mut map = ExtentMap::new();
    for at in 0..MAP_RUNS_MAX as u64 + 5 {
        map.push(at, 1, if at % 2 == 0 { ExtentState::Data } else { ExtentState::Hole });
    }
    let (front, data) = ForwardAnswer::Mapped(map).encode();
    assert!(front.len() <= FRONT_MAX);
    let Ok(ForwardAnswer::Mapped(found)) = ForwardAnswer::decode(&front, data) else { panic!("a map") };
    assert_eq!(found.runs().len(), MAP_RUNS_MAX);
    let error = Error::new(ErrorKind::Io, "ß".repeat(TEXT_MAX));
    let (front, data) = ForwardAnswer::Failed(error).encode();
    let Ok(ForwardAnswer::Failed(found)) = ForwardAnswer::decode(&front, data) else { panic!("an error") };
    assert_eq!(found.context(), "ß".repeat(TEXT_MAX / 2));
}

#[test]
fn refusals_of_later_versions_keep_their_text() {
    let (mut front, data) = ForwardAnswer::Refused(ForwardRefusal::Other("the moon".into())).encode();
    front[1] = 77;
    let Ok(ForwardAnswer::Refused(found)) = ForwardAnswer::decode(&front, data) else { panic!("a refusal") };
    assert_eq!(found, ForwardRefusal::Other("the moon".into()));
}
