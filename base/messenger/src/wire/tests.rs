//! Tests of frames through an encoder and a decoder, with the stream cut at arbitrary places.

use std::rc::Rc;

use forebay_reactor::{Buf, BufList};
use proptest::prelude::*;

use super::control::{self, ControlPayload};
use super::*;

fn secret() -> Vec<u8> {
    (0..40u8).map(|at| at.wrapping_mul(7)).collect()
}

/// Creates an encoder, and a decoder for its output.
fn pair(secure: bool, checksum: bool) -> (Encoder, FrameDecoder) {
    let pools = Rc::new(MessengerPools::new());
    let mut encoder = Encoder::new(pools.clone(), checksum);
    let mut decoder = FrameDecoder::new(pools, SegmentLimits::default(), checksum);
    if secure {
        encoder.secure(Direction::pair(&secret(), true).expect("long enough").1);
        decoder.secure(Direction::pair(&secret(), false).expect("long enough").0);
    }
    (encoder, decoder)
}

fn list(parts: &[Vec<u8>]) -> BufList {
    parts.iter().map(|part| Buf::copy_of(part)).collect()
}

#[derive(Debug, Clone)]
enum Item {
    Control(Tag, Vec<u8>),
    Message(MessageHeader, [Vec<Vec<u8>>; 3]),
}

fn bytes(max: usize) -> impl Strategy<Value = Vec<u8>> {
    (0..max, any::<u8>()).prop_map(|(len, salt)| (0..len).map(|at| (at as u8).wrapping_mul(31) ^ salt).collect())
}

fn segment() -> impl Strategy<Value = Vec<Vec<u8>>> {
    prop_oneof![
        2 => Just(vec![]),
        3 => prop::collection::vec(bytes(700), 1..4),
        2 => prop::collection::vec(bytes(9000), 1..3),
        1 => prop::collection::vec(bytes(150_000), 1..3),
    ]
}

fn item() -> impl Strategy<Value = Item> {
    let control = (0usize..16, prop_oneof![Just(0), Just(48), Just(49), 1usize..4000]).prop_flat_map(|(tag, len)| {
        prop::collection::vec(any::<u8>(), len).prop_map(move |payload| Item::Control(Tag::ALL[tag], payload))
    });
    let header = (any::<[u64; 3]>(), any::<[u16; 6]>(), any::<u8>()).prop_map(|(long, short, flags)| MessageHeader {
        seq: long[0],
        tid: long[1],
        ack_seq: long[2],
        kind: short[0],
        priority: short[1],
        version: short[2],
        data_off: short[3],
        compat_version: short[4],
        reserved: short[5],
        flags,
    });
    let message = (header, [segment(), segment(), segment()]).prop_map(|(header, parts)| Item::Message(header, parts));
    prop_oneof![1 => control, 2 => message]
}

fn encode(encoder: &mut Encoder, items: &[Item]) -> Vec<u8> {
    let mut out = BufList::new();
    for item in items {
        match item {
            Item::Control(tag, payload) => encoder.control(*tag, payload, &mut out),
            Item::Message(header, parts) => {
                let lists = parts.each_ref().map(|parts| list(parts));
                encoder.message(header, lists.each_ref(), &mut out)
            }
        }
        .expect("nonces are left");
    }
    out.to_vec()
}

/// Decodes frames from `stream`, which arrives in pieces of these lengths, repeated cyclically.
fn decode(decoder: &mut FrameDecoder, mut stream: &[u8], cuts: &[usize]) -> Result<Vec<Frame>, WireError> {
    let mut frames = Vec::new();
    let mut held = false;
    for cut in cuts.iter().cycle() {
        loop {
            // Each message is rejected once before it is admitted.
            let admit = |_: &FrameLayout| std::mem::replace(&mut held, true);
            match decoder.next(admit, |_| {})? {
                ParseProgress::Frame(frame) => {
                    held = false;
                    frames.push(frame);
                }
                ParseProgress::NotAdmitted => {}
                ParseProgress::NeedInput => break,
            }
        }
        if stream.is_empty() {
            return Ok(frames);
        }
        let fed = decoder.feed(&stream[..stream.len().min((*cut).max(1))]);
        assert!(fed > 0, "a hungry decoder takes something");
        stream = &stream[fed..];
    }
    unreachable!("cuts go round and round")
}

fn matches(frame: &Frame, item: &Item) -> bool {
    match item {
        Item::Control(tag, payload) => frame.tag == *tag && frame.payload() == payload,
        Item::Message(header, parts) => {
            let same = |(segment, parts): (&Option<Buf>, &Vec<Vec<u8>>)| {
                segment.as_ref().map_or(&[][..], |buf| &buf[..]) == parts.concat()
            };
            frame.tag == Tag::Message && frame.header() == Ok(*header) && frame.segments.iter().zip(parts).all(same)
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn frames_come_out_as_they_went_in(
        secure in any::<bool>(),
        checksum in any::<bool>(),
        items in prop::collection::vec(item(), 1..12),
        cuts in prop::collection::vec(prop_oneof![1usize..200, 1usize..70_000, Just(300_000)], 1..10),
    ) {
        let (mut encoder, mut decoder) = pair(secure, checksum);
        let stream = encode(&mut encoder, &items);
        let frames = decode(&mut decoder, &stream, &cuts).expect("all of it is well formed");
        prop_assert!(decoder.is_between_frames());
        prop_assert_eq!(frames.len(), items.len());
        for (frame, item) in frames.iter().zip(&items) {
            prop_assert!(matches(frame, item), "{:?} {:?}", frame, item);
        }
    }

    #[test]
    fn a_flipped_bit_is_noticed_before_it_is_delivered(
        secure in any::<bool>(),
        items in prop::collection::vec(item(), 1..5),
        place in any::<prop::sample::Index>(),
        bit in 0u8..8,
    ) {
        let (mut encoder, mut decoder) = pair(secure, true);
        let mut stream = encode(&mut encoder, &items);
        let at = place.index(stream.len());
        stream[at] ^= 1 << bit;
        match decode(&mut decoder, &stream, &[50_000]) {
            // Only an epilogue's unused bits in crc mode may change: the upper half of its status, and the checksums of
            // segments that are not there.
            Ok(frames) => {
                prop_assert!(!secure);
                prop_assert!(frames.iter().zip(&items).all(|(frame, item)| matches(frame, item)));
            }
            Err(error) => prop_assert!(!matches!(error, WireError::Malformed(_))),
        }
    }

    #[test]
    fn noise_is_survived(noise in prop::collection::vec(any::<u8>(), 0..3000), secure in any::<bool>()) {
        let (_, mut decoder) = pair(secure, true);
        let _ = decode(&mut decoder, &noise, &[777]);
        let mut reader = PayloadReader::new(&noise, "noise");
        let _ = EntityAddr::decode_vector(&mut reader);
        let _ = control::ClientIdent::decode(&noise);
        let _ = control::AuthBadMethod::decode(&noise);
        let _ = control::Reconnect::decode(&noise);
        let _ = Banner::decode(&noise);
    }

    #[test]
    fn idents_come_out_as_they_went_in(
        numbers in any::<[u64; 6]>(),
        nonces in prop::collection::vec(any::<u32>(), 0..5),
        v6 in any::<bool>(),
        port in any::<u16>(),
    ) {
        let socket = if v6 { format!("[fe80::1:2]:{port}") } else { format!("10.1.2.3:{port}") };
        let socket = Some(socket.parse().expect("an address"));
        let addrs: Vec<_> = nonces.iter().map(|&nonce| EntityAddr::msgr2(socket.filter(|_| nonce % 3 > 0), nonce)).collect();
        let ident = control::ClientIdent {
            addrs: addrs.clone(),
            target: EntityAddr::msgr2(socket, 0),
            gid: numbers[0],
            global_seq: numbers[1],
            supported: numbers[2],
            required: numbers[3],
            flags: numbers[4],
            cookie: numbers[5],
        };
        prop_assert_eq!(control::ClientIdent::decode(&ident.encode()), Ok(ident.clone()));
        for len in 0..ident.encode().len() {
            prop_assert!(control::ClientIdent::decode(&ident.encode()[..len]).is_err());
        }
    }
}

#[test]
fn an_aborted_frame_is_dropped() {
    let (mut encoder, mut decoder) = pair(false, true);
    let items = [1u8, 2].map(|at| {
        Item::Message(
            MessageHeader { seq: at.into(), ..MessageHeader::default() },
            [vec![], vec![], vec![vec![at; 600]]],
        )
    });
    let mut stream = encode(&mut encoder, &items);
    let status = stream.len() / 2 - frame::EPILOGUE_CRC_LEN;
    assert_eq!(stream[status], frame::STATUS_COMPLETE);
    stream[status] = frame::STATUS_ABORTED;
    let frames = decode(&mut decoder, &stream, &[9999]).expect("well formed");
    assert!(frames.len() == 1 && matches(&frames[0], &items[1]));
    let (_, mut decoder) = pair(false, true);
    stream[status] = 0;
    assert_eq!(decode(&mut decoder, &stream, &[9999]).expect_err("neither"), WireError::BadStatus(0));
}

#[test]
fn what_is_too_long_is_refused_before_room_is_made_for_it() {
    let limits = SegmentLimits { control_max: 100, front_max: 0, middle_max: 0, data_max: 0 };
    for lens in [[101, 0, 0, 0], [41, 1, 0, 0], [41, 0, 1, 0], [41, 0, 0, 1]] {
        let pools = Rc::new(MessengerPools::new());
        let mut decoder = FrameDecoder::new(pools.clone(), limits, true);
        decoder.feed(&FrameLayout::new(Tag::Message, lens).preamble([8; 4]));
        let error = decoder.next(|_| true, |_| {}).expect_err("it is too long");
        assert!(matches!(error, WireError::TooLong { .. }));
        assert_eq!(pools.bodies_out(), 0);
    }
}

#[test]
fn long_data_lands_aligned() {
    for (secure, front) in [(false, 0), (false, 77), (true, 77)] {
        let (mut encoder, mut decoder) = pair(secure, true);
        let data = vec![5; 100_000];
        let item = Item::Message(MessageHeader::default(), [vec![vec![1; front]], vec![], vec![data]]);
        let stream = encode(&mut encoder, std::slice::from_ref(&item));
        let frames = decode(&mut decoder, &stream, &[5000]).expect("well formed");
        assert!(matches(&frames[0], &item));
        let data = frames[0].segments[2].as_ref().expect("data");
        assert!((data.as_ptr() as usize).is_multiple_of(4096), "secure {secure} front {front}");
    }
}

#[test]
fn the_banner_is_read_however_it_is_cut() {
    let bytes = Banner::OURS.encode();
    assert_eq!(bytes.len(), 26);
    for len in 0..bytes.len() {
        assert_eq!(Banner::decode(&bytes[..len]), Ok(None));
    }
    assert_eq!(Banner::decode(&bytes), Ok(Some((Banner::OURS, 26))));
    assert!(matches!(Banner::decode(b"ceph v027"), Err(WireError::BadBanner(_))), "the first version's");
    assert!(matches!(Banner::decode(b"G"), Err(WireError::BadBanner(_))));
    assert!(matches!(Banner::decode(b"ceph v2\n\x00\x40"), Err(WireError::BadBannerLength(0x4000))));
    assert!(matches!(Banner::decode(b"ceph v2\n\x0f\x00"), Err(WireError::BadBannerLength(15))));
    let other = Banner { supported: 2, required: 2 };
    assert_eq!(Banner::OURS.disagreement(&other), Some((1, 2)));
    assert_eq!(Banner::OURS.disagreement(&Banner { supported: 3, required: 0 }), None);
}
