//! Fuzz target: all decoders of messages.

use forebay_block::BufList;
use forebay_reactor::Buf;

use crate::wire::{ForwardAnswer, ForwardEvent, ForwardRequest};

/// Decodes the bytes as each kind of message, with and without a data segment; decoded messages must round-trip.
pub fn decode_messages(bytes: &[u8]) {
    let (front, rest) = match bytes.split_first() {
        // The first byte tells how many bytes of the rest are the data segment.
        Some((&len, rest)) => rest.split_at(rest.len() - usize::from(len).min(rest.len())),
        None => (bytes, bytes),
    };
    let data: BufList = Buf::copy_of(rest).into();
    if let Ok(request) = ForwardRequest::decode(front, data.clone()) {
        let (encoded, payload) = request.encode();
        let again = ForwardRequest::decode(&encoded, payload).expect("an encoded request is readable");
        assert_eq!(format!("{again:?}"), format!("{request:?}"));
    }
    if let Ok(answer) = ForwardAnswer::decode(front, data.clone()) {
        let (encoded, payload) = answer.encode();
        let again = ForwardAnswer::decode(&encoded, payload).expect("an encoded answer is readable");
        assert_eq!(format!("{again:?}"), format!("{answer:?}"));
    }
    if let Ok(event) = ForwardEvent::decode(front, data) {
        let (encoded, payload) = event.encode();
        assert_eq!(ForwardEvent::decode(&encoded, payload), Ok(event));
    }
}
