//! Entry points of the fuzzers and property tests: bytes in, and a panic if a state machine breaks an invariant.

use std::rc::Rc;
use std::sync::Arc;

use forebay_accel::crypto::dh::DhGroup;
use forebay_block::BufList;

use crate::session::admin::{self, AdminResult, ControllerView, SubsystemIdentity};
use crate::session::auth::{AuthExchange, AuthProgress, AuthSecrets};
use crate::session::psk::{Parties, TlsKey, parties};
use crate::session::secret::{DhChapHash, DhChapSecret};
use crate::session::{
    AsyncEvent, Controller, ControllerType, Fatal, H2C_DATA_MAX, IN_CAPSULE, NvmePdu, NvmePools, NvmeReceiver,
    NvmeReplies, NvmeTcpParameters, TRANSFER_MAX, Transfers, io,
};
use crate::wire::command::FABRICS;
use crate::wire::fabrics::{CONNECT_DATA, Connect, Property};
use crate::wire::log::{AnaGroup, AnaState, DiscoveryEntry, Health};
use crate::wire::{Cqe, Sqe, identify, pdu, reservation};

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

/// Encodes a PDU in a comparable form.
fn describe(pdu: &NvmePdu) -> Vec<u8> {
    let bytes = |data: &BufList| data.to_vec();
    match pdu {
        NvmePdu::IcReq(request) => request.encode().to_vec(),
        NvmePdu::Command { sqe, data, intact } => [&sqe.0[..], &bytes(data), &[u8::from(*intact)]].concat(),
        NvmePdu::Data { header, last, data, intact } => {
            [format!("{header:?} {last} {intact}").as_bytes(), &bytes(data)].concat()
        }
        NvmePdu::Term(status) => status.to_le_bytes().to_vec(),
    }
}

/// Receives a stream in pieces of the given lengths, and returns the PDUs and the error, if any.
fn receive(input: &[u8], style: u8, mut cuts: Cuts<'_>) -> (Vec<Vec<u8>>, Option<Fatal>) {
    let mut receiver = NvmeReceiver::new(Rc::new(NvmePools::new()));
    let agreed = NvmeTcpParameters { header_digest: style & 1 != 0, data_digest: style & 2 != 0, host_alignment: 4 };
    if style & 4 == 0 {
        receiver.agree(agreed);
    }
    let mut transfers: Transfers<u16> = Transfers::default();
    for cid in 0..4 {
        transfers.begin(cid, 1 << (12 + 3 * cid), 0, cid);
    }
    let (mut rest, mut seen) = (input, Vec::new());
    loop {
        loop {
            match receiver.next(|header, last| transfers.check(header, last)) {
                Ok(None) => break,
                Ok(Some(pdu)) => {
                    seen.push(describe(&pdu));
                    match pdu {
                        NvmePdu::IcReq(request) => receiver.agree(NvmeTcpParameters::of(&request)),
                        NvmePdu::Command { data, .. } => assert!(data.len() <= IN_CAPSULE),
                        NvmePdu::Data { header, data, intact, .. } => {
                            assert!(data.len() <= H2C_DATA_MAX && data.len() == header.len as usize);
                            if let Some((cid, whole, _)) = transfers.arrived(&header, data, intact) {
                                assert_eq!(whole.len(), 1 << (12 + 3 * cid));
                            }
                        }
                        NvmePdu::Term(_) => return (seen, None),
                    }
                }
                Err(fatal) => {
                    let told = fatal.encode();
                    // A ClientHello is answered with an alert, any other error with a PDU.
                    let hello = told == forebay_tls::alert::record(forebay_tls::alert::UNEXPECTED_MESSAGE);
                    assert!(hello || (told.len() <= pdu::TERM_MAX && told[0] == pdu::kind::C2H_TERM));
                    assert_eq!(hello, seen.is_empty() && style & 4 != 0 && input.starts_with(&[22, 3]));
                    // The quoted header depends on how much had arrived; the reason does not.
                    return (seen, Some(Fatal { header: Vec::new(), ..fatal }));
                }
            }
        }
        if rest.is_empty() {
            return (seen, None);
        }
        let mut want = receiver.want();
        let room = want.buf.spare().min(rest.len());
        let len = if want.all { room } else { room.min(cuts.next()) };
        assert!(len > 0, "no room to receive into");
        let got = want.buf.len();
        want.buf.set_len(got + len);
        want.buf[got..].copy_from_slice(&rest[..len]);
        rest = &rest[len..];
        receiver.received(want.buf, len);
    }
}

/// Checks a stream of PDUs: it must be parsed in the same way however it is cut, or be refused for the same
/// reason.
pub fn pdus(data: &[u8]) {
    let (style, lengths, input) = split(data);
    let whole = receive(input, style, Cuts { lengths: &[], at: 0 });
    let cut = receive(input, style, Cuts { lengths, at: 0 });
    assert_eq!(whole, cut, "the result depends on how the stream was cut");
}

struct Outside(SubsystemIdentity);

impl ControllerView for Outside {
    fn identity(&self) -> &SubsystemIdentity {
        &self.0
    }
    fn namespaces(&self) -> Vec<u32> {
        vec![1, 7, 4000]
    }
    fn namespace(&self, nsid: u32) -> Option<identify::IdentifyNamespace> {
        self.namespaces().contains(&nsid).then_some(identify::IdentifyNamespace {
            blocks: 1 << 20,
            block_shift: 9,
            preferred_blocks: 8,
            write_protected: false,
            ana_group: 1,
            nguid: [1; 16],
            eui64: [2; 8],
            uuid: [3; 16],
            reservations: 0xFF,
        })
    }
    fn controllers(&self) -> Vec<u16> {
        vec![1, 2, 9]
    }
    fn ana(&self) -> (u64, Vec<AnaGroup>) {
        (3, vec![AnaGroup { id: 1, state: AnaState::Optimized, namespaces: vec![1, 7, 4000] }])
    }
    fn ana_groups_max(&self) -> u32 {
        crate::session::admin::ANA_GROUPS_MAX
    }

    fn discovery(&self) -> (u64, Vec<DiscoveryEntry>) {
        (1, Vec::new())
    }
    fn health(&self) -> Health {
        Health::default()
    }
    fn queues_max(&self) -> u16 {
        64
    }
    fn has_io_queues(&self) -> bool {
        false
    }
    fn reservations(&self) -> bool {
        true
    }
    fn reservations_persist(&self, nsid: u32) -> Option<bool> {
        self.namespace(nsid).map(|_| true)
    }
}

/// Checks commands of 64 bytes each, with the bytes that follow as their data: no panic, and answers within their
/// bounds.
pub fn capsules(data: &[u8]) {
    let Some((&kind, rest)) = data.split_first() else { return };
    let kind = if kind & 1 == 0 { ControllerType::Io } else { ControllerType::Discovery };
    let identity = SubsystemIdentity {
        nqn: "nqn.2014-08.org.nvmexpress:x".into(),
        serial: "1".into(),
        model: "m".into(),
        firmware: "1".into(),
    };
    let view = Outside(identity);
    let mut controller = Controller::new(kind, 1, [1; 16], 0);
    let rules = io::NamespaceRules { blocks: 1 << 20, block_shift: 9, write_protected: false };
    let mut replies = NvmeReplies::new(Rc::new(NvmePools::new()));
    for (number, entry) in rest.chunks_exact(64).enumerate() {
        let mut sqe = Sqe::of(entry);
        if number % 8 != 7 {
            // Most commands pass the check of PSDT.
            sqe.0[1] = 1 << 6;
        }
        let after = &rest[((number + 1) * 64).min(rest.len())..];
        if sqe.opcode() == FABRICS {
            if after.len() >= CONNECT_DATA
                && let Ok(connect) = Connect::decode(&sqe, after)
            {
                assert!(connect.host.len() < 256 && connect.subsystem.len() < 256);
            }
            let property = Property::decode(&sqe);
            let _ = controller.property(property);
            let _ = controller.set_property(property);
        }
        match admin::execute(&mut controller, &view, &sqe, &after[..after.len().min(4096)]) {
            AdminResult::Data(data) => {
                assert!(data.len() <= TRANSFER_MAX);
                replies.data(sqe.cid(), forebay_block::Buf::copy_of(&data).into(), false);
            }
            AdminResult::Done(result) => replies.response(&Cqe { result, cid: sqe.cid(), ..Cqe::default() }),
            AdminResult::Failed(status) => assert!(!status.is_success()),
            AdminResult::Later | AdminResult::Abort { .. } => {}
        }
        if let Ok(command) = io::decode(&sqe, &rules) {
            if let io::NvmeAction::Read(extent) | io::NvmeAction::Compare(extent) | io::NvmeAction::Verify(extent) =
                command.action
            {
                assert!(extent.end() <= rules.blocks << rules.block_shift);
            }
            if let io::NvmeAction::Ranges { .. } = command.action {
                for extent in io::ranges(&after[..after.len().min(4096)], &rules).unwrap_or_default() {
                    assert!(extent.end() <= rules.blocks << rules.block_shift);
                }
            }
            if command.action == io::NvmeAction::Reservation && after.len() >= 16 {
                let _ = reservation::decode(&sqe, &after[..16]);
            }
        }
        let event = match entry[63] % 4 {
            0 => AsyncEvent::Namespace(u32::from(entry[62])),
            1 => AsyncEvent::Ana,
            2 => AsyncEvent::Reservation { nsid: 1, kind: 1 + entry[62] % 3 },
            _ => AsyncEvent::Discovery,
        };
        controller.raise(event);
        while controller.tell().is_some() {}
    }
    drop(replies.take());
}

/// Checks messages of a host that does not know the secret, each behind its length: none may authenticate it or
/// cause a panic, and answers fit into the space that it gives.
pub fn auth(data: &[u8]) {
    let secret =
        "DHHC-1:00:AAECAwQFBgcICQoLDA0ODxAREhMUFRYXGBkaGxwdHh8gISIjJCUmJygpKissLS4vMDEyMzQ1Njc4OTo7PD0+P4zODhA=:";
    let _ = DhChapSecret::parse(&String::from_utf8_lossy(data));
    let keys = AuthSecrets {
        host: DhChapSecret::parse(secret).expect("a secret"),
        controller: None,
        hashes: DhChapHash::ALL.to_vec(),
        groups: vec![None, Some(DhGroup::Ffdhe2048)],
    };
    let mut exchange = AuthExchange::new(Arc::new(keys), "nqn.2014-08.org.example:h", "nqn.2014-08.org.example:s");
    let (mut rest, mut number) = (data, 1_u64);
    let mut random = || {
        number = number.wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(31);
        number
    };
    while let Some((&[len, receive], after)) = rest.split_first_chunk() {
        let (message, after) = after.split_at(after.len().min(usize::from(len) * 8));
        rest = after;
        assert_ne!(exchange.take(message), AuthProgress::Done);
        if receive & 1 != 0 {
            let room = usize::from(receive) * 8;
            if let Ok((told, progress)) = exchange.give(room, &mut random) {
                assert!(told.len() <= room && progress != AuthProgress::Done);
            }
        }
        assert!(!exchange.is_done(), "a host that does not know the secret was let in");
    }
}

/// Checks the parsers of TLS input: the text of a key, an identity, and a ClientHello that contains identities.
pub fn keys(data: &[u8]) {
    let _ = TlsKey::parse(&String::from_utf8_lossy(data));
    for identity in forebay_tls::offered(data).unwrap_or_default().into_iter().chain([data]) {
        if let Some(Parties { host, subsystem }) = parties(identity) {
            let name = format!(" {host} {subsystem}");
            assert!(identity[8..].starts_with(name.as_bytes()), "names that are not in the identity");
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::wire::command::Sgl;
    use crate::wire::pdu::{Common, DataHeader, kind};

    #[test]
    fn a_client_hello_is_refused_however_it_is_cut() {
        // Connection before ICReq, in pieces of a byte.
        pdus(&[4, 1, 0, 22, 3, 1, 0, 200, 1, 0, 0, 196]);
        // Connection after ICReq.
        pdus(&[0, 1, 0, 22, 3, 1, 0, 200, 1, 0, 0, 196]);
    }

    fn capsule(sqe: &Sqe, data: &[u8], pad: usize) -> Vec<u8> {
        let offset = pdu::CAPSULE_HEADER + pad;
        let len = if data.is_empty() { pdu::CAPSULE_HEADER } else { offset + data.len() };
        let data_offset = if data.is_empty() { 0 } else { offset as u8 };
        let common = Common { kind: kind::COMMAND, flags: 0, header_len: 72, data_offset, len: len as u32 };
        let mut out = common.encode().to_vec();
        out.extend_from_slice(&sqe.0);
        if !data.is_empty() {
            out.resize(offset, 0);
            out.extend_from_slice(data);
        }
        out
    }

    fn h2c_data(cid: u16, tag: u16, offset: u32, data: &[u8], last: bool) -> Vec<u8> {
        let flags = if last { pdu::flag::LAST } else { 0 };
        let len = (24 + data.len()) as u32;
        let common = Common { kind: kind::H2C_DATA, flags, header_len: 24, data_offset: 24, len };
        let mut out = DataHeader { cid, tag, offset, len: data.len() as u32 }.encode(common).to_vec();
        out.extend_from_slice(data);
        out
    }

    #[test]
    fn whole_sessions_are_the_same_however_they_are_cut() {
        let mut input = Vec::new();
        for number in 0..40_u16 {
            let len = [0, 512, 4096, 16384][usize::from(number % 4)];
            let sqe = Sqe::new(1, number, 1).with_sgl(Sgl::InCapsule { offset: 0, len });
            input.extend(capsule(&sqe, &vec![number as u8; len as usize], usize::from(number % 3) * 4));
        }
        input.extend(h2c_data(0, 0, 0, &[7; 4096], true));
        input.extend(h2c_data(3, 3, 0, &vec![8; 1 << 20], false));
        input.extend(h2c_data(3, 3, 1 << 20, &vec![9; 1 << 20], true));
        for lengths in [&[0][..], &[127], &[200, 3, 90], &[255]] {
            let (whole, fatal) = receive(&input, 0, Cuts { lengths: &[], at: 0 });
            assert_eq!((whole.len(), fatal), (43, None));
            assert_eq!(receive(&input, 0, Cuts { lengths, at: 0 }).0, whole);
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(400))]

        #[test]
        fn any_bytes_are_understood_or_refused(data in prop::collection::vec(any::<u8>(), 0..600)) {
            pdus(&data);
            capsules(&data);
            auth(&data);
            keys(&data);
        }

        #[test]
        fn no_message_lets_in_who_does_not_know_the_secret(
            order in prop::collection::vec((0_u8..4, any::<u8>(), any::<u8>(), any::<u8>()), 1..12),
        ) {
            let mut data = Vec::new();
            for (kind, at, with, receive) in order {
                let mut message = match kind {
                    0 => {
                        let mut message = vec![0; 72];
                        (message[7], message[8], message[10], message[11]) = (1, 1, 3, 1);
                        message[12..15].copy_from_slice(&[3, 2, 1]);
                        message
                    }
                    1 => [&[1, 2, 0, 0, 0, 0, 32, 0][..], &[0; 72]].concat(),
                    2 => [&[1, 4][..], &[0; 14]].concat(),
                    _ => [&[0, 0xF0][..], &[0; 14]].concat(),
                };
                if let Some(byte) = message.get_mut(usize::from(at)) {
                    *byte ^= with;
                }
                data.extend([(message.len() / 8) as u8, receive]);
                data.extend(message);
            }
            auth(&data);
        }

        #[test]
        fn damaged_headers_are_understood_or_refused(
            at in 0_usize..200,
            with in any::<u8>(),
            lengths in prop::collection::vec(any::<u8>(), 1..8),
        ) {
            let sqe = Sqe::new(1, 5, 1).with_sgl(Sgl::InCapsule { offset: 0, len: 512 });
            let mut input = capsule(&sqe, &[3; 512], 0);
            input.extend(h2c_data(1, 1, 0, &[7; 32768], true));
            input[at] = with;
            let mut data = vec![0, lengths.len() as u8];
            data.extend(&lengths);
            data.extend(input);
            pdus(&data);
        }
    }
}
