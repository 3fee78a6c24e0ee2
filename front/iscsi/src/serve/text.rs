//! Text requests: discovery, and renegotiation of parameters.

use forebay_reactor::Addr;

use super::connection::IscsiConnection;
use crate::scsi::ports::TargetPort;
use crate::session::params::renegotiate;
use crate::session::receive::IscsiPdu;
use crate::session::text;
use crate::target::Target;
use crate::wire::{CONTINUE, NAME_MAX, RejectReason, Request, TAG_NONE};

/// Maximum text response in bytes, besides discovered targets; more is omitted.
const TEXT_MAX: usize = 128 << 10;
/// Rest of a text response: encoded text, then the discovered targets that are not encoded yet.
#[derive(Default)]
struct TextAnswer {
    text: Vec<u8>,
    discovering: Option<Discovering>,
}

/// Progress of a SendTargets discovery of all targets.
#[derive(Default)]
struct Discovering {
    /// Name of the last target that was listed.
    after: Option<String>,
}

/// Text response that did not fit in one PDU, until the host asks for its rest by the target transfer tag.
#[derive(Default)]
pub(super) struct TextExchange(Option<(u32, TextAnswer)>);

impl TextExchange {
    fn keep(&mut self, tag: u32, rest: TextAnswer) {
        self.0 = Some((tag, rest));
    }

    /// Takes the rest with this tag.  A request with any other tag ends the exchange.
    fn take(&mut self, tag: u32) -> Option<TextAnswer> {
        self.0.take().filter(|(own, _)| *own == tag).map(|(_, rest)| rest)
    }
}

impl IscsiConnection<'_> {
    /// Handles a text request.
    pub(super) fn text_request(&mut self, pdu: &IscsiPdu) {
        let header = pdu.bhs.view::<Request>();
        let (itt, ttt) = (header.itt.get(), header.ttt.get());
        if header.flags & CONTINUE != 0 {
            // Requests fit in one PDU.
            return self.outbox.reject(RejectReason::LongOperation, &pdu.bhs);
        }
        if ttt != TAG_NONE {
            match self.text.take(ttt) {
                Some(answer) => return self.send_text(itt, answer),
                None => return self.outbox.reject(RejectReason::InvalidField, &pdu.bhs),
            }
        }
        let data = pdu.data.to_vec();
        let Ok(pairs) = text::parse(&data) else {
            return self.outbox.reject(RejectReason::Protocol, &pdu.bhs);
        };
        let mut answer = TextAnswer::default();
        for pair in pairs {
            let out = &mut answer.text;
            if out.len() > TEXT_MAX {
                break;
            }
            match pair.key {
                "SendTargets" if pair.value == "All" && self.discovery => {
                    answer.discovering = Some(Discovering::default());
                }
                "SendTargets" => self.send_targets(pair.value, out),
                _ if renegotiate(self.outbox.params(), pair, out) => {}
                _ => text::push(out, pair.key, "NotUnderstood"),
            }
        }
        answer.text.truncate(TEXT_MAX);
        self.send_text(itt, answer);
    }

    /// Sends as much text as one PDU may carry, and keeps the rest.
    fn send_text(&mut self, itt: u32, mut answer: TextAnswer) {
        let space = self.outbox.params().send_max as usize;
        // Targets are encoded as the host requests them, so that a long list takes no memory.
        while let Some(discovering) = answer.discovering.as_mut().filter(|_| answer.text.len() <= space) {
            match self.targets.next_visible(discovering.after.as_deref(), &self.session.initiator) {
                Some(target) => {
                    self.list_target(&target, &mut answer.text);
                    discovering.after = Some(target.name().to_owned());
                }
                None => answer.discovering = None,
            }
        }
        if answer.text.len() <= space {
            return self.outbox.text(itt, TAG_NONE, false, &answer.text);
        }
        let later = answer.text.split_off(space);
        let tag = self.tag();
        self.outbox.text(itt, tag, true, &answer.text);
        self.text.keep(tag, TextAnswer { text: later, ..answer });
    }

    fn send_targets(&mut self, which: &str, out: &mut Vec<u8>) {
        let target = match (which, self.session.target.as_ref()) {
            // `All` is permitted in discovery sessions only.
            ("All", _) => return text::push(out, "SendTargets", "Reject"),
            (name, _) if name.len() > NAME_MAX => None,
            // A normal session learns of its own target only (RFC 7143, appendix C).
            ("", own) => own.cloned(),
            (name, Some(own)) => Some(own).filter(|own| name.eq_ignore_ascii_case(own.name())).cloned(),
            (name, None) => {
                let named = self.targets.get(name);
                named.filter(|target| target.admits(&self.session.initiator))
            }
        };
        if let Some(target) = target {
            self.list_target(&target, out);
        }
    }

    fn list_target(&self, target: &Target, out: &mut Vec<u8>) {
        text::push(out, "TargetName", target.name());
        let groups = target.port_groups();
        let own = groups.as_ref().map_or(TargetPort::SINGLE, |groups| groups.own());
        let portals = self.targets.portals();
        for portal in &portals {
            // An unspecified listen address is omitted: hosts know the address that they connected to.
            if let Addr::Tcp(addr) = portal
                && !addr.ip().is_unspecified()
            {
                text::push(out, "TargetAddress", &format!("{addr},{}", own.group));
            }
        }
        for group in groups.iter().flat_map(|groups| groups.remote()) {
            // A portal belongs to one group (RFC 7143, section 4.4.1).
            for portal in group.portals.iter().filter(|portal| !portals.contains(&Addr::Tcp(**portal))) {
                text::push(out, "TargetAddress", &format!("{portal},{}", group.port.group));
            }
        }
    }
}
