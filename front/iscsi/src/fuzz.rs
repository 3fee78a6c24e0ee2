//! Entry points of the fuzzers and property tests. They take bytes and panic when a state machine breaks an invariant.

use std::rc::Rc;

use forebay_serve::ReceiveRequest;
use zerocopy::{FromBytes, IntoBytes};

use crate::session::chap::{Chap, Credential};
use crate::session::login::{Denied, Login, LoginAccess, LoginAction, LoginDirectory, SEED_LEN};
use crate::session::params::Offer;
use crate::session::receive::{Garbled, IscsiPools, PduReceiver, PduRules};
use crate::session::text;
use crate::wire::{BHS_LEN, Bhs, LoginRequest};

/// The one target that a login finds.
const TARGET: &str = "iqn.t";

struct Place {
    chap: bool,
}

impl LoginDirectory for Place {
    fn target(&self, target: &str, _initiator: &str) -> Result<LoginAccess, Denied> {
        let credential = |name: &str| Credential { name: name.into(), secret: name.as_bytes().to_vec() };
        let chap = Chap { initiator: credential("initiator"), target: Some(credential("target")) };
        match target {
            TARGET => Ok(LoginAccess { target_id: 1, portal_group: 1, chap: self.chap.then_some(chap) }),
            _ => Err(Denied::NotFound),
        }
    }

    fn discovery(&self, _initiator: &str) -> Result<LoginAccess, Denied> {
        Ok(LoginAccess::default())
    }

    fn has_session(&self, tsih: u16) -> bool {
        tsih == 1
    }
}

/// Result of parsing a stream: header, data and digest-error flag of each PDU, and the error that ended the stream, if
/// any.
type Cut = (Vec<(Bhs, Vec<u8>, bool)>, Option<Garbled>);

fn cut(stream: &[u8], rules: PduRules, mut piece: impl FnMut() -> usize) -> Cut {
    let mut receiver = PduReceiver::new(Rc::new(IscsiPools::new()), rules);
    let (mut out, mut at) = (Vec::new(), 0);
    loop {
        loop {
            match receiver.next_pdu() {
                Ok(Some(pdu)) => {
                    assert_eq!(pdu.data.len(), pdu.bhs.data_len(), "a PDU has the data that it says");
                    out.push((pdu.bhs, pdu.data.to_vec(), pdu.damaged));
                }
                Ok(None) => break,
                Err(garbled) => return (out, Some(garbled)),
            }
        }
        if at == stream.len() {
            return (out, None);
        }
        let ReceiveRequest { mut buf, all } = receiver.want();
        let wanted = if all { buf.spare() } else { piece().max(1) };
        let len = wanted.min(buf.spare()).min(stream.len() - at);
        assert!(len > 0, "there is room to receive into");
        buf.extend_from_slice(&stream[at..at + len]);
        at += len;
        receiver.received(buf, len);
    }
}

/// Checks that a stream yields the same PDUs regardless of how it is split into receives.
pub fn pdus(data: &[u8]) {
    let Some((&[flags, a, b, c], stream)) = data.split_first_chunk() else { return };
    let rules = PduRules { header_digest: flags & 1 != 0, data_digest: flags & 2 != 0, data_max: 128 * 1024 };
    let whole = cut(stream, rules, || usize::MAX);
    let lengths = [a, b, c].map(|length| if length < 128 { usize::from(length) } else { usize::from(length) * 64 });
    let mut turn = 0;
    let pieces = cut(stream, rules, || {
        turn += 1;
        lengths[turn % lengths.len()]
    });
    assert_eq!(whole, pieces, "how the stream is cut makes a difference");
}

/// Checks that a login terminates, and never with a session that the access rules forbid.
pub fn login(data: &[u8]) {
    let Some((&flags, mut rest)) = data.split_first() else { return };
    let chap = flags & 1 != 0;
    let offer = Offer { digests: flags & 2 != 0, ..Offer::default() };
    let mut login = Login::new(offer, [7; SEED_LEN]);
    let (mut proven, mut requests) = (false, 0);
    while rest.len() >= BHS_LEN {
        let (header, after) = rest.split_at(BHS_LEN);
        let Ok(request) = LoginRequest::read_from_bytes(header) else { return };
        let len = usize::from(request.data_len[1]) << 8 | usize::from(request.data_len[2]);
        let (text, after) = after.split_at(len.min(after.len()));
        rest = after;
        proven |= text.windows(6).any(|window| window == b"CHAP_R");
        requests += 1;
        let step = login.request(&request, text, &Place { chap });
        assert_eq!(
            Bhs::read_from_bytes(step.response.as_bytes()).map(|bhs| bhs.data_len()).ok(),
            Some(step.text.len())
        );
        match step.action {
            LoginAction::More => assert_eq!(step.response.status.get(), 0),
            LoginAction::Close(_) => {
                assert_ne!(step.response.status.get(), 0);
                return;
            }
            LoginAction::Session(session) => {
                assert!(session.target.is_none() || session.target.as_deref() == Some(TARGET));
                assert!(!chap || proven || session.target.is_none(), "a session without a proof");
                assert!(!offer.digests || session.params.header_digest);
                assert!(session.params.first_burst <= session.params.burst_max);
                return;
            }
        }
        assert!(requests < 100, "too many login requests");
    }
}

/// Checks that texts are parsed or rejected, and that parsed texts can be encoded again.
pub fn texts(data: &[u8]) {
    let Ok(pairs) = text::parse(data) else { return };
    let mut out = Vec::new();
    for pair in &pairs {
        let _ = (text::number(pair.value), text::binary(pair.value, 256));
        text::push(&mut out, pair.key, pair.value);
    }
    assert_eq!(text::parse(&out).as_ref(), Ok(&pairs));
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn noise_is_harmless(data in prop::collection::vec(any::<u8>(), 0..600)) {
            pdus(&data);
            login(&data);
            texts(&data);
        }
    }
}
