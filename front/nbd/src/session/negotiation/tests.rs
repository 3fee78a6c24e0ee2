//! Unit tests.

use super::*;

fn option_bytes(option: u32, data: &[u8]) -> Vec<u8> {
    let head =
        OptionHeader { magic: wire::OPTION_MAGIC.into(), option: option.into(), len: (data.len() as u32).into() };
    [head.as_bytes(), data].concat()
}

/// Creates a negotiation that has processed the client's flags.
fn begun(tls: Tls) -> Negotiation {
    let mut negotiation = Negotiation::new(tls, &mut Vec::new());
    assert_eq!(negotiation.feed(&[0, 0, 0, 3], &mut Vec::new()), Ok((4, NegotiationStep::More)));
    negotiation
}

/// Sends an option; returns the result and the type of the reply.
fn sent(
    negotiation: &mut Negotiation,
    option: u32,
    data: &[u8],
) -> (Result<NegotiationStep, NbdViolation>, Option<u32>) {
    let mut out = Vec::new();
    let step = negotiation.feed(&option_bytes(option, data), &mut out).map(|(_, step)| step);
    let reply = wire::prefix::<wire::OptionReply>(&out).map(|(head, _)| head.kind.get());
    (step, reply)
}

#[test]
fn nothing_is_told_before_tls_where_it_is_required() {
    let mut negotiation = begun(Tls::Required);
    let go = [&4_u32.to_be_bytes()[..], b"disk", &[0, 0]].concat();
    for (option, data) in [
        (option::LIST, &[][..]),
        (option::INFO, &go),
        (option::GO, &go),
        (option::STRUCTURED_REPLY, &[]),
        (option::EXTENDED_HEADERS, &[]),
        (option::SET_META_CONTEXT, &[0; 8]),
        (77, &[1]),
        (option::LIST, &[0; OPTION_DATA_MAX + 1]),
    ] {
        assert_eq!(
            sent(&mut negotiation, option, data),
            (Ok(NegotiationStep::More), Some(rep::ERR_TLS_REQD)),
            "{option}"
        );
    }
    assert_eq!(sent(&mut negotiation, option::STARTTLS, &[0]), (Ok(NegotiationStep::More), Some(rep::ERR_INVALID)));
    assert_eq!(sent(&mut begun(Tls::Required), option::ABORT, &[]), (Ok(NegotiationStep::Goodbye), Some(rep::ACK)));
    let (step, reply) = sent(&mut begun(Tls::Required), option::EXPORT_NAME, b"disk");
    assert!(matches!(step, Err(NbdViolation::ExportName(_))) && reply.is_none());
    assert_eq!(sent(&mut negotiation, option::STARTTLS, &[]), (Ok(NegotiationStep::StartTls), Some(rep::ACK)));
    negotiation.secured();
    assert!(matches!(
        sent(&mut negotiation, option::LIST, &[]),
        (Ok(NegotiationStep::Query(NegotiationQuery::List)), None)
    ));
}

#[test]
fn tls_forgets_what_was_agreed_on_before() {
    for style in [option::STRUCTURED_REPLY, option::EXTENDED_HEADERS] {
        let mut negotiation = begun(Tls::Allowed);
        assert_eq!(sent(&mut negotiation, style, &[]), (Ok(NegotiationStep::More), Some(rep::ACK)));
        negotiation.allocation_for = Some("disk".into());
        // Bytes after the option are not parsed: they belong to TLS.
        let stream = [option_bytes(option::STARTTLS, &[]), option_bytes(option::LIST, &[])].concat();
        let mut out = Vec::new();
        assert_eq!(negotiation.feed(&stream, &mut out), Ok((16, NegotiationStep::StartTls)));
        assert_eq!(out.len(), 20);
        negotiation.secured();
        assert_eq!((negotiation.replies, &negotiation.allocation_for), (ReplyStyle::Simple, &None));
        assert_eq!(sent(&mut negotiation, option::STARTTLS, &[]), (Ok(NegotiationStep::More), Some(rep::ERR_INVALID)));
    }
    let mut plain = begun(Tls::None);
    assert_eq!(sent(&mut plain, option::STARTTLS, &[]), (Ok(NegotiationStep::More), Some(rep::ERR_UNSUP)));
}
