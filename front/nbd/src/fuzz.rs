//! Entry points of the fuzzers and property tests: bytes in, and a panic if a state machine breaks an invariant.
//!
//! The first bytes of the input determine how the rest is cut into pieces, since the result must not depend on
//! that.

use std::rc::Rc;

use forebay_block::{Buf, Error, ErrorKind, Extent, ExtentState};
use forebay_tls::CertificateSubject;

use crate::access::HostName;
use crate::session::{
    ExportInfo, NbdAction, NbdCommand, NbdPools, NbdReceiver, NbdReplies, NbdRules, NbdViolation, Negotiation,
    NegotiationQuery, NegotiationStep, Origin, ReplyStyle, StatusRun, Tls,
};
use crate::wire::{self, Errno};

/// Only export that the negotiation finds.
const NAME: &str = "disk";

/// Lengths of pieces, from a few bytes of input.
struct Cuts<'a> {
    lengths: &'a [u8],
    at: usize,
}

impl Cuts<'_> {
    fn next(&mut self) -> usize {
        let Some(&length) = self.lengths.get(self.at % self.lengths.len().max(1)) else { return usize::MAX };
        self.at += 1;
        // Mostly short pieces, sometimes long ones.
        if length < 128 { usize::from(length) + 1 } else { usize::from(length) * 64 }
    }
}

fn split(data: &[u8]) -> (u8, &[u8], &[u8]) {
    let Some((&[style, cuts], rest)) = data.split_first_chunk() else { return (0, &[], &[]) };
    let (lengths, rest) = rest.split_at(rest.len().min(usize::from(cuts % 16)));
    (style, lengths, rest)
}

/// Result of a negotiation.
#[derive(Debug, PartialEq, Eq)]
enum Negotiated {
    Unfinished,
    Goodbye,
    Transmit(crate::session::NbdParameters, Vec<u8>),
    Violation(NbdViolation),
}

fn negotiate(input: &[u8], tls: Tls, mut cuts: Cuts<'_>) -> (Negotiated, Vec<u8>) {
    let info = ExportInfo {
        name: NAME.into(),
        description: "for people".into(),
        size: 1 << 30,
        block_min: 1,
        block_preferred: 4096,
        payload_max: wire::PAYLOAD_MAX_DEFAULT,
        read_only: false,
        rotational: false,
        multi_conn: true,
        fast_zero: true,
    };
    let mut out = Vec::new();
    let mut negotiation = Negotiation::new(tls, &mut out);
    let (mut from, mut to) = (0, 0);
    loop {
        let step = match negotiation.feed(&input[from..to], &mut out) {
            Ok((taken, step)) => {
                assert!(taken <= to - from, "more taken than given");
                from += taken;
                step
            }
            Err(violation) => return (Negotiated::Violation(violation), out),
        };
        let step = match step {
            NegotiationStep::Query(NegotiationQuery::List) => {
                negotiation.listed([(NAME, "for people")], &mut out);
                continue;
            }
            NegotiationStep::Query(NegotiationQuery::Export { name, .. }) => {
                assert!(name.len() <= wire::STRING_MAX && !name.contains('\0'));
                let error = Error::new(ErrorKind::NotFound, &name);
                let found = if name == NAME || name.is_empty() { Ok(&info) } else { Err(&error) };
                match negotiation.opened(found, &mut out) {
                    Ok(NegotiationStep::More) => continue,
                    Ok(step) => step,
                    Err(violation) => return (Negotiated::Violation(violation), out),
                }
            }
            other => other,
        };
        match step {
            NegotiationStep::More if to == input.len() => return (Negotiated::Unfinished, out),
            NegotiationStep::More => to = to.saturating_add(cuts.next()).min(input.len()),
            NegotiationStep::Goodbye => return (Negotiated::Goodbye, out),
            // Bytes that follow are taken as decrypted.
            NegotiationStep::StartTls => negotiation.secured(),
            NegotiationStep::Transmit(agreed) => return (Negotiated::Transmit(agreed, input[from..].to_vec()), out),
            NegotiationStep::Query(_) => unreachable!("answered above"),
        }
    }
}

/// Checks a client's side of a negotiation.
pub fn negotiation(data: &[u8]) {
    let (style, lengths, input) = split(data);
    let tls = [Tls::None, Tls::Allowed, Tls::Required][usize::from(style) % 3];
    let whole = negotiate(input, tls, Cuts { lengths: &[], at: 0 });
    let pieces = negotiate(input, tls, Cuts { lengths, at: 0 });
    assert!(whole == pieces, "the result depends on how the stream is cut: {:?}, {:?}", whole.0, pieces.0);
    assert!(whole.1.len() <= 18 + input.len() * 40 + 4096, "{} bytes in, {} out", input.len(), whole.1.len());
}

/// Commands with their payloads, and the violation that ended the stream, if any.
type Parsed = (Vec<(NbdCommand, Vec<u8>)>, Option<NbdViolation>);

/// Parses a stream in one piece.
fn reference(rules: &NbdRules, mut input: &[u8]) -> Parsed {
    let mut found = Vec::new();
    loop {
        match rules.parse(input) {
            Ok(Some((command, head))) => {
                let payload = command.payload as usize;
                let written = matches!(command.action, NbdAction::Write { .. });
                let Some(bytes) = input[head..].get(..payload) else {
                    // A refused command is known before its payload is complete.
                    if !written {
                        found.push((command, Vec::new()));
                    }
                    return (found, None);
                };
                found.push((command, if written { bytes.to_vec() } else { Vec::new() }));
                input = &input[head + payload..];
                if command.action == NbdAction::Disconnect {
                    return (found, None);
                }
            }
            Ok(None) => return (found, None),
            Err(violation) => return (found, Some(violation)),
        }
    }
}

/// Receives a stream in pieces of the given lengths, and returns the commands and the violation, if any.
fn receive(rules: &NbdRules, input: &[u8], mut cuts: Cuts<'_>) -> Parsed {
    let mut found = Vec::new();
    let first = cuts.next().min(input.len());
    let mut receiver = NbdReceiver::new(Rc::new(NbdPools::new()), &input[..first]);
    let mut at = first;
    loop {
        loop {
            match receiver.next(rules) {
                Ok(Some((command, payload))) => {
                    found.push((command, payload.to_vec()));
                    if command.action == NbdAction::Disconnect {
                        return (found, None);
                    }
                }
                Ok(None) => break,
                Err(violation) => return (found, Some(violation)),
            }
        }
        let mut want = receiver.want();
        assert!(want.buf.spare() > 0, "nothing to receive into");
        let piece = if want.all { want.buf.spare() } else { cuts.next().min(want.buf.spare()) };
        let piece = piece.min(input.len() - at);
        if piece == 0 || (want.all && piece < want.buf.spare()) {
            receiver.ended(want.buf);
            return (found, None);
        }
        want.buf.extend_from_slice(&input[at..at + piece]);
        at += piece;
        receiver.received(want.buf, piece);
    }
}

/// Checks a client's side of transmission.
pub fn requests(data: &[u8]) {
    let (style, lengths, input) = split(data);
    let replies = [ReplyStyle::Simple, ReplyStyle::Structured, ReplyStyle::Extended][usize::from(style) % 3];
    let rules = NbdRules {
        replies,
        allocation: style & 4 != 0,
        size: if style & 64 != 0 { 1 << 44 } else { 1 << 30 },
        block_min: if style & 8 != 0 { 512 } else { 1 },
        payload_max: 256 * 1024,
        read_only: style & 16 != 0,
        fast_zero: style & 32 != 0,
    };
    let expected = reference(&rules, input);
    let found = receive(&rules, input, Cuts { lengths, at: 0 });
    assert!(expected == found, "the result depends on how the stream is cut:\n{expected:?}\n{found:?}");
    let mut out = NbdReplies::new(Rc::new(NbdPools::new()), replies);
    for (command, payload) in &found.0 {
        answer(&rules, &mut out, command, payload);
    }
    let sent = out.take();
    assert_eq!(sent.len(), sent.parts().iter().map(|part| part.len()).sum::<usize>());
}

/// Checks the parser of a host's certificate, from which its name is read.
pub fn certificate(data: &[u8]) {
    let Some(subject) = CertificateSubject::of_certificate(data) else { return };
    let name = &subject.distinguished_name;
    assert!(!name.chars().any(|c| c.is_ascii_control()), "it would break a line of the log: {name:?}");
    let host = HostName::Certificate(subject.clone());
    // A name without `=` is compared with the common name.
    assert!(host.matches(name) || name.ends_with('*') || !name.contains('='));
    assert!(host.matches("*"));
}

/// Checks that a command conforms to the rules, and answers it.
fn answer(rules: &NbdRules, out: &mut NbdReplies, command: &NbdCommand, payload: &[u8]) {
    let origin = Origin::from(command);
    let inside = |extent: Extent| {
        assert!(extent.len > 0 && extent.checked_end().is_some_and(|end| end <= rules.size));
        assert!((extent.offset | extent.len).is_multiple_of(u64::from(rules.block_min)));
    };
    match command.action {
        NbdAction::Read { extent, whole } => {
            inside(extent);
            assert!(extent.len <= u64::from(rules.payload_max));
            // The offset determines the data read: non-zero bytes, zeroes, or both.
            let mut bytes = vec![command.offset as u8; extent.len as usize];
            let middle = bytes.len() / 2;
            bytes[middle..].fill((command.offset >> 8) as u8);
            out.data(origin, extent, whole, Buf::copy_of(&bytes).into());
        }
        NbdAction::Write { extent, .. } => {
            inside(extent);
            assert!(!rules.read_only);
            assert_eq!(extent.len, payload.len() as u64);
            out.done(origin);
        }
        NbdAction::Trim { extent, .. } | NbdAction::WriteZeroes { extent, .. } => {
            inside(extent);
            assert!(!rules.read_only);
            out.error_at(origin, Errno::Io, "for the sake of it", extent.offset);
        }
        NbdAction::BlockStatus { extent, .. } => {
            inside(extent);
            assert!(rules.allocation);
            out.status(origin, &[StatusRun { len: extent.len, state: ExtentState::Hole }]);
        }
        NbdAction::Refuse(errno, why) => out.error(origin, errno, why),
        NbdAction::Nothing => out.no_data(origin),
        NbdAction::Flush => out.done(origin),
        NbdAction::Disconnect => {}
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::wire::{command, command_flag as flag, option};

    fn option_bytes(option: u32, data: &[u8]) -> Vec<u8> {
        let head = [&wire::OPTION_MAGIC.to_be_bytes()[..], &option.to_be_bytes(), &(data.len() as u32).to_be_bytes()];
        [&head.concat()[..], data].concat()
    }

    fn named(name: &[u8], rest: &[u8]) -> Vec<u8> {
        [&(name.len() as u32).to_be_bytes()[..], name, rest].concat()
    }

    fn any_option() -> impl Strategy<Value = Vec<u8>> {
        let name = prop_oneof![Just(b"disk".to_vec()), Just(vec![]), prop::collection::vec(any::<u8>(), 0..20)];
        let query = b"\0\0\0\x01\0\0\0\x0fbase:allocation".to_vec();
        let rest = prop_oneof![
            Just(vec![0, 0]),
            Just(vec![0, 2, 0, 1, 0, 3]),
            Just(vec![0; 4]),
            Just(query),
            prop::collection::vec(any::<u8>(), 0..40)
        ];
        let data = prop_oneof![
            1 => Just(vec![]),
            3 => (name, rest).prop_map(|(name, rest)| named(&name, &rest)),
            1 => (0_usize..40_000).prop_map(|len| vec![1; len]),
        ];
        let kind = prop_oneof![
            6 => Just(option::STRUCTURED_REPLY), 2 => Just(option::EXTENDED_HEADERS), 4 => Just(option::INFO),
            2 => Just(option::SET_META_CONTEXT), 2 => Just(option::LIST_META_CONTEXT), 2 => Just(option::LIST),
            2 => Just(option::STARTTLS), 1 => Just(option::GO), 1 => Just(option::EXPORT_NAME), 1 => Just(option::ABORT), 1 => any::<u32>(),
        ];
        (kind, data).prop_map(|(kind, data)| option_bytes(kind, &data))
    }

    fn any_request(style: u8) -> impl Strategy<Value = Vec<u8>> {
        let len =
            prop_oneof![0_u64..5000, 60_000_u64..70_000, 100_000_u64..300_000, (1_u64 << 32)..1 << 40, any::<u64>()];
        let offset = prop_oneof![Just(0), 0_u64..1 << 30, any::<u64>()];
        let aligned = any::<bool>();
        (0_u16..9, any::<u16>(), offset, len, any::<u64>(), aligned).prop_map(
            move |(kind, flags, offset, len, cookie, aligned)| {
                let (offset, len) = if aligned { (offset & !511, len & !511) } else { (offset, len) };
                let flags = if flags % 4 > 0 { 0 } else { flags % 64 };
                let mut bytes = Vec::new();
                let payload;
                if style % 3 == 2 {
                    let has_payload = kind == command::WRITE || flags & flag::PAYLOAD_LEN != 0;
                    let len = if has_payload { len % 300_000 } else { len };
                    payload = if has_payload { len } else { 0 };
                    bytes.extend(wire::EXTENDED_REQUEST_MAGIC.to_be_bytes());
                    bytes.extend([flags.to_be_bytes(), kind.to_be_bytes()].concat());
                    bytes.extend([cookie.to_be_bytes(), offset.to_be_bytes(), len.to_be_bytes()].concat());
                } else {
                    let len = if kind == command::WRITE { len % 300_000 } else { len };
                    payload = if kind == command::WRITE { len } else { 0 };
                    bytes.extend(wire::REQUEST_MAGIC.to_be_bytes());
                    bytes.extend([flags.to_be_bytes(), kind.to_be_bytes()].concat());
                    bytes.extend([cookie.to_be_bytes(), offset.to_be_bytes()].concat());
                    bytes.extend((len as u32).to_be_bytes());
                }
                bytes.extend((0..payload).map(|at| (at as u8) ^ cookie as u8));
                bytes
            },
        )
    }

    fn input(style: u8, cuts: &[u8], stream: &[Vec<u8>]) -> Vec<u8> {
        [&[style, cuts.len() as u8][..], cuts, &stream.concat()].concat()
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn negotiation_does_not_depend_on_how_the_stream_is_cut(
            cuts in prop::collection::vec(any::<u8>(), 1..15),
            style in 0_u8..3,
            flags in 0_u8..5,
            options in prop::collection::vec(any_option(), 0..8),
        ) {
            let stream = [&[vec![0, 0, 0, flags]][..], &options].concat();
            negotiation(&input(style, &cuts, &stream));
        }

        #[test]
        fn requests_do_not_depend_on_how_the_stream_is_cut(
            (style, requests_) in any::<u8>().prop_flat_map(|style| {
                (Just(style), prop::collection::vec(any_request(style), 0..12))
            }),
            cuts in prop::collection::vec(any::<u8>(), 1..15),
        ) {
            requests(&input(style, &cuts, &requests_));
        }

        #[test]
        fn noise_is_survived(noise in prop::collection::vec(any::<u8>(), 0..2000)) {
            negotiation(&noise);
            requests(&noise);
            certificate(&noise);
        }

        #[test]
        fn damaged_certificates_are_survived(
            damage in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
        ) {
            let mut bytes = include_bytes!("../../../fuzz/seeds/nbd_certificate/host").to_vec();
            certificate(&bytes);
            for (at, byte) in damage {
                let at = at.index(bytes.len());
                bytes[at] = byte;
            }
            certificate(&bytes);
        }
    }

    #[test]
    fn many_small_writes_go_through_staging_of_every_size() {
        let write = |cookie: u64, len: usize| {
            let mut bytes = wire::REQUEST_MAGIC.to_be_bytes().to_vec();
            bytes.extend([0, 0, 0, 1]);
            bytes.extend([cookie.to_be_bytes(), (cookie * 512).to_be_bytes()].concat());
            bytes.extend((len as u32).to_be_bytes());
            bytes.extend(vec![cookie as u8; len]);
            bytes
        };
        let lengths = [512, 4096, 65_024, 65_536, 512, 131_072, 8192];
        let stream: Vec<_> = (0..700).map(|at| write(at as u64, lengths[at % lengths.len()])).collect();
        for cuts in [&[255][..], &[1], &[27, 200], &[255, 0, 90]] {
            requests(&input(0, cuts, &stream));
        }
    }
}
