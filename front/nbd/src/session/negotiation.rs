use forebay_block::{Error, ErrorKind};
use zerocopy::IntoBytes;

use super::{ExportInfo, NbdViolation, ReplyStyle};
use crate::wire::{self, BASE_ALLOCATION, OptionHeader, STRING_MAX, handshake, info, option, rep};

/// Maximum number of options per connection.  A client that queries many exports over one connection needs one or
/// two options per export.
const OPTIONS_MAX: u32 = 4096;
/// Maximum bytes of option data that are processed.  The longest useful data is a name and a few queries.
const OPTION_DATA_MAX: usize = 4 * STRING_MAX;
/// Maximum bytes of option data that are skipped and answered with an error; more ends the connection.
const OPTION_SKIP_MAX: u32 = 1024 * 1024;
/// Text of the error for options that need TLS first.
const TLS_REQUIRED: &str = "TLS is required";
/// Number of the metadata context `base:allocation` on every connection that selected it.
pub(super) const ALLOCATION_CONTEXT: u32 = 1;

/// TLS mode of a listener.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Tls {
    /// TLS not offered.
    #[default]
    None,
    /// Optional TLS: a client may upgrade, or continue without (SELECTIVETLS with no export that needs it).
    Allowed,
    /// Mandatory TLS: a client gets nothing before it has upgraded (FORCEDTLS).
    Required,
}

/// Negotiated parameters of a transmission.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct NbdParameters {
    /// Format of replies.
    pub replies: ReplyStyle,
    /// `base:allocation` was selected for this export.
    pub allocation: bool,
}

/// Purpose of an export lookup.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Purpose {
    /// `NBD_OPT_EXPORT_NAME` option.
    ExportName,
    /// `NBD_OPT_INFO` or `NBD_OPT_GO`, with the requested information types.
    Info {
        /// Continue with transmission (`NBD_OPT_GO`).
        go: bool,
        /// Information types that the client requested.
        wanted: Vec<u16>,
    },
    /// List or selection of metadata contexts, and whether `base:allocation` matches.
    Contexts {
        /// Selection, not only a list.
        select: bool,
        /// Queries match `base:allocation`.
        allocation: bool,
    },
}

/// Query to the caller, which the state machine needs to have answered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NegotiationQuery {
    /// Names and descriptions of the exports: [`Negotiation::listed`].
    List,
    /// Export, by the name that the client gave: [`Negotiation::opened`].
    Export {
        /// Name as sent by the client; empty for the default export.
        name: String,
        /// Purpose of the lookup.
        purpose: Purpose,
    },
}

/// State of the negotiation after some input.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum NegotiationStep {
    /// More input needed.
    More,
    /// Answer of the caller needed.
    Query(NegotiationQuery),
    /// TLS handshake, beginning with the next byte in either direction; then [`Negotiation::secured`].
    StartTls,
    /// Transmission begins.
    Transmit(NbdParameters),
    /// End, requested by the client.
    Goodbye,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// Client flags due.
    Flags,
    /// Option due.
    Option,
    /// Data of an option being skipped, before an error reply.
    Skip { option: u32, left: u32 },
    /// Answer of the caller due.
    Asked,
    /// TLS handshake due.
    Tls,
    /// Negotiation ended.
    Over,
}

/// Option negotiation, server side ("Handshake").
#[derive(Debug)]
pub struct Negotiation {
    phase: Phase,
    tls: Tls,
    /// TLS is in force.
    secured: bool,
    fixed: bool,
    no_zeroes: bool,
    options_seen: u32,
    replies: ReplyStyle,
    /// Export for which `base:allocation` is selected.
    allocation_for: Option<String>,
    asked: Option<(u32, String, Purpose)>,
}

impl Negotiation {
    /// Begins a negotiation, and appends the greeting to `out`.
    pub fn new(tls: Tls, out: &mut Vec<u8>) -> Self {
        let greeting = wire::Greeting {
            magic: wire::GREETING_MAGIC.into(),
            option_magic: wire::OPTION_MAGIC.into(),
            flags: (handshake::FIXED_NEWSTYLE | handshake::NO_ZEROES).into(),
        };
        out.extend_from_slice(greeting.as_bytes());
        Self {
            phase: Phase::Flags,
            tls,
            secured: false,
            fixed: false,
            no_zeroes: false,
            options_seen: 0,
            replies: ReplyStyle::Simple,
            allocation_for: None,
            asked: None,
        }
    }

    /// Processes the front of `input` as far as possible, and appends replies to `out`.  Returns the number of bytes
    /// processed.  The rest (the start of an option, or of transmission) must be passed again, with more input behind
    /// it.
    ///
    /// # Panics
    /// When it waits for an answer or for TLS, or is over.
    pub fn feed(&mut self, input: &[u8], out: &mut Vec<u8>) -> Result<(usize, NegotiationStep), NbdViolation> {
        let mut taken = 0;
        loop {
            let rest = &input[taken..];
            match self.phase {
                Phase::Flags => {
                    let Some(bytes) = rest.first_chunk::<4>() else { return Ok((taken, NegotiationStep::More)) };
                    self.client_flags(u32::from_be_bytes(*bytes))?;
                    taken += bytes.len();
                }
                Phase::Skip { option, left } => {
                    let now = (left as usize).min(rest.len());
                    taken += now;
                    let left = left - now as u32;
                    if left > 0 {
                        self.phase = Phase::Skip { option, left };
                        return Ok((taken, NegotiationStep::More));
                    }
                    self.phase = Phase::Option;
                    if self.needs_tls(option) {
                        refuse(out, option, rep::ERR_TLS_REQD, TLS_REQUIRED);
                    } else {
                        refuse(out, option, rep::ERR_TOO_BIG, "too much data for an option");
                    }
                }
                Phase::Option => {
                    let Some((head, head_len)) = wire::prefix::<OptionHeader>(rest) else {
                        return Ok((taken, NegotiationStep::More));
                    };
                    let len = head.len.get();
                    self.check_header(&head)?;
                    if len as usize > OPTION_DATA_MAX {
                        self.options_seen += 1;
                        self.phase = Phase::Skip { option: head.option.get(), left: len };
                        taken += head_len;
                        continue;
                    }
                    let Some(data) = rest.get(head_len..head_len + len as usize) else {
                        return Ok((taken, NegotiationStep::More));
                    };
                    self.options_seen += 1;
                    taken += head_len + data.len();
                    if let Some(step) = self.option(head.option.get(), data, out)? {
                        return Ok((taken, step));
                    }
                }
                Phase::Asked | Phase::Tls | Phase::Over => panic!("input in phase {:?}", self.phase),
            }
        }
    }

    fn client_flags(&mut self, flags: u32) -> Result<(), NbdViolation> {
        let known = u32::from(handshake::FIXED_NEWSTYLE | handshake::NO_ZEROES);
        if flags & !known != 0 {
            return Err(NbdViolation::ClientFlags(flags));
        }
        self.fixed = flags & u32::from(handshake::FIXED_NEWSTYLE) != 0;
        self.no_zeroes = flags & u32::from(handshake::NO_ZEROES) != 0;
        self.phase = Phase::Option;
        Ok(())
    }

    /// Checks an option's header for errors that end the connection before its data is read.
    fn check_header(&self, head: &OptionHeader) -> Result<(), NbdViolation> {
        let (magic, option, len) = (head.magic.get(), head.option.get(), head.len.get());
        if magic != wire::OPTION_MAGIC {
            return Err(NbdViolation::OptionMagic(magic));
        }
        if self.options_seen >= OPTIONS_MAX {
            return Err(NbdViolation::TooManyOptions(OPTIONS_MAX));
        }
        if !self.fixed && option != option::EXPORT_NAME {
            return Err(NbdViolation::NotFixed(option));
        }
        if len > OPTION_SKIP_MAX || (option == option::EXPORT_NAME && len as usize > STRING_MAX) {
            return Err(NbdViolation::OptionTooLong { option, len });
        }
        Ok(())
    }

    /// Returns whether an option is refused because there is no TLS yet ("FORCEDTLS mode").
    fn needs_tls(&self, option: u32) -> bool {
        self.tls == Tls::Required && !self.secured && ![option::ABORT, option::STARTTLS].contains(&option)
    }

    fn option(&mut self, option: u32, data: &[u8], out: &mut Vec<u8>) -> Result<Option<NegotiationStep>, NbdViolation> {
        if self.needs_tls(option) {
            if option == option::EXPORT_NAME {
                return Err(NbdViolation::ExportName(TLS_REQUIRED.into()));
            }
            refuse(out, option, rep::ERR_TLS_REQD, TLS_REQUIRED);
            return Ok(None);
        }
        match option {
            option::EXPORT_NAME => {
                if self.replies == ReplyStyle::Extended {
                    return Err(NbdViolation::ExportName("extended headers are negotiated already".into()));
                }
                let name = name(data).map_err(|why| NbdViolation::ExportName(why.into()))?;
                return Ok(Some(self.ask(option, name, Purpose::ExportName)));
            }
            option::ABORT => {
                reply(out, option, rep::ACK, &[]);
                self.phase = Phase::Over;
                return Ok(Some(NegotiationStep::Goodbye));
            }
            option::LIST if data.is_empty() => {
                self.phase = Phase::Asked;
                return Ok(Some(NegotiationStep::Query(NegotiationQuery::List)));
            }
            option::STRUCTURED_REPLY if data.is_empty() => {
                if self.replies == ReplyStyle::Extended {
                    refuse(out, option, rep::ERR_EXT_HEADER_REQD, "extended headers are negotiated already");
                } else {
                    self.replies = ReplyStyle::Structured;
                    reply(out, option, rep::ACK, &[]);
                }
            }
            option::EXTENDED_HEADERS if data.is_empty() => {
                self.replies = ReplyStyle::Extended;
                reply(out, option, rep::ACK, &[]);
            }
            option::STARTTLS if self.tls == Tls::None => {
                refuse(out, option, rep::ERR_UNSUP, "TLS is not offered here");
            }
            option::STARTTLS if self.secured => refuse(out, option, rep::ERR_INVALID, "TLS is active already"),
            option::STARTTLS if data.is_empty() => {
                reply(out, option, rep::ACK, &[]);
                self.phase = Phase::Tls;
                return Ok(Some(NegotiationStep::StartTls));
            }
            option::LIST | option::STRUCTURED_REPLY | option::EXTENDED_HEADERS | option::STARTTLS => {
                refuse(out, option, rep::ERR_INVALID, "this option takes no data");
            }
            option::INFO | option::GO => match parse_info(data) {
                Ok((name, wanted)) => {
                    let purpose = Purpose::Info { go: option == option::GO, wanted };
                    return Ok(Some(self.ask(option, name, purpose)));
                }
                Err(why) => refuse(out, option, rep::ERR_INVALID, why),
            },
            option::LIST_META_CONTEXT | option::SET_META_CONTEXT => {
                let select = option == option::SET_META_CONTEXT;
                if select {
                    // A new selection always replaces the previous one, even if it fails.
                    self.allocation_for = None;
                }
                if !self.replies.has_chunks() {
                    refuse(out, option, rep::ERR_INVALID, "structured replies must be negotiated first");
                    return Ok(None);
                }
                match parse_contexts(data, select) {
                    Ok((name, allocation)) => {
                        return Ok(Some(self.ask(option, name, Purpose::Contexts { select, allocation })));
                    }
                    Err(why) => refuse(out, option, rep::ERR_INVALID, why),
                }
            }
            _ => refuse(out, option, rep::ERR_UNSUP, "unknown option"),
        }
        Ok(None)
    }

    fn ask(&mut self, option: u32, name: String, purpose: Purpose) -> NegotiationStep {
        self.phase = Phase::Asked;
        self.asked = Some((option, name.clone(), purpose.clone()));
        NegotiationStep::Query(NegotiationQuery::Export { name, purpose })
    }

    /// Continues after the TLS handshake, with decrypted input.  Parameters negotiated before are reset, since an
    /// attacker may have set them.
    ///
    /// # Panics
    /// When no TLS handshake was due.
    pub fn secured(&mut self) {
        assert!(self.phase == Phase::Tls, "TLS was not to begin");
        self.phase = Phase::Option;
        self.secured = true;
        self.replies = ReplyStyle::Simple;
        self.allocation_for = None;
    }

    /// Answers [`NegotiationQuery::List`] with names and descriptions.
    ///
    /// # Panics
    /// When no list was asked for.
    pub fn listed<'a>(&mut self, exports: impl IntoIterator<Item = (&'a str, &'a str)>, out: &mut Vec<u8>) {
        assert!(self.phase == Phase::Asked && self.asked.is_none(), "no list was asked for");
        self.phase = Phase::Option;
        let mut data = Vec::new();
        for (name, description) in exports {
            if !fits(name) {
                continue;
            }
            data.clear();
            data.extend_from_slice(&(name.len() as u32).to_be_bytes());
            data.extend_from_slice(name.as_bytes());
            data.extend_from_slice(clipped(description).as_bytes());
            reply(out, option::LIST, rep::SERVER, &data);
        }
        reply(out, option::LIST, rep::ACK, &[]);
    }

    /// Answers [`NegotiationQuery::Export`]; the result is [`NegotiationStep::More`] or [`NegotiationStep::Transmit`].
    ///
    /// # Panics
    /// When no export was asked for.
    pub fn opened(
        &mut self,
        export: Result<&ExportInfo, &Error>,
        out: &mut Vec<u8>,
    ) -> Result<NegotiationStep, NbdViolation> {
        let (option, name, purpose) = self.asked.take().expect("no export was asked for");
        self.phase = Phase::Option;
        let export = match export {
            Ok(export) => export,
            Err(error) if purpose == Purpose::ExportName => return Err(NbdViolation::ExportName(error.to_string())),
            Err(error) => {
                refuse(out, option, refusal(error), &error.to_string());
                return Ok(NegotiationStep::More);
            }
        };
        match purpose {
            Purpose::ExportName => {
                let head = wire::ExportNameReply {
                    size: export.size.into(),
                    flags: export.transmission_flags(self.replies).into(),
                };
                out.extend_from_slice(head.as_bytes());
                if !self.no_zeroes {
                    out.extend_from_slice(&[0; wire::EXPORT_NAME_PADDING]);
                }
                Ok(self.transmit(&name))
            }
            Purpose::Info { go, wanted } => {
                self.facts(option, export, &wanted, out);
                reply(out, option, rep::ACK, &[]);
                Ok(if go { self.transmit(&name) } else { NegotiationStep::More })
            }
            Purpose::Contexts { select, allocation } => {
                if allocation {
                    let id = if select { ALLOCATION_CONTEXT } else { 0 };
                    let mut data = id.to_be_bytes().to_vec();
                    data.extend_from_slice(BASE_ALLOCATION.as_bytes());
                    reply(out, option, rep::META_CONTEXT, &data);
                }
                if select && allocation {
                    self.allocation_for = Some(name);
                }
                reply(out, option, rep::ACK, &[]);
                Ok(NegotiationStep::More)
            }
        }
    }

    fn transmit(&mut self, name: &str) -> NegotiationStep {
        self.phase = Phase::Over;
        NegotiationStep::Transmit(NbdParameters {
            replies: self.replies,
            allocation: self.allocation_for.as_deref() == Some(name) && self.replies.has_chunks(),
        })
    }

    fn facts(&self, option: u32, export: &ExportInfo, wanted: &[u16], out: &mut Vec<u8>) {
        let fact = wire::InfoExport {
            kind: info::EXPORT.into(),
            size: export.size.into(),
            flags: export.transmission_flags(self.replies).into(),
        };
        reply(out, option, rep::INFO, fact.as_bytes());
        let texts = [(info::NAME, export.name.as_str()), (info::DESCRIPTION, clipped(&export.description))];
        for (kind, text) in texts {
            if wanted.contains(&kind) && !(kind == info::DESCRIPTION && text.is_empty()) {
                let mut data = kind.to_be_bytes().to_vec();
                data.extend_from_slice(text.as_bytes());
                reply(out, option, rep::INFO, &data);
            }
        }
        if wanted.contains(&info::BLOCK_SIZE) {
            let fact = wire::InfoBlockSize {
                kind: info::BLOCK_SIZE.into(),
                minimum: export.block_min.into(),
                preferred: export.block_preferred.into(),
                maximum: export.payload_max.into(),
            };
            reply(out, option, rep::INFO, fact.as_bytes());
        }
    }
}

/// Returns the type of the error reply that refuses an export.
fn refusal(error: &Error) -> u32 {
    match error.kind() {
        ErrorKind::Denied | ErrorKind::Busy | ErrorKind::ReadOnly => rep::ERR_POLICY,
        ErrorKind::ShuttingDown | ErrorKind::Fenced => rep::ERR_SHUTDOWN,
        ErrorKind::Unsupported => rep::ERR_PLATFORM,
        ErrorKind::Invalid => rep::ERR_INVALID,
        _ => rep::ERR_UNKNOWN,
    }
}

fn reply(out: &mut Vec<u8>, option: u32, kind: u32, data: &[u8]) {
    let head = wire::OptionReply {
        magic: wire::OPTION_REPLY_MAGIC.into(),
        option: option.into(),
        kind: kind.into(),
        len: (data.len() as u32).into(),
    };
    out.extend_from_slice(head.as_bytes());
    out.extend_from_slice(data);
}

fn refuse(out: &mut Vec<u8>, option: u32, kind: u32, why: &str) {
    reply(out, option, kind, clipped(why).as_bytes());
}

/// Decodes a string of the protocol: UTF-8, at most `STRING_MAX` bytes, without a zero byte.
fn name(bytes: &[u8]) -> Result<String, &'static str> {
    let text = std::str::from_utf8(bytes).map_err(|_| "a name that is not UTF-8")?;
    if !fits(text) {
        return Err("a name that is too long or has a zero byte");
    }
    Ok(text.to_owned())
}

fn fits(text: &str) -> bool {
    text.len() <= STRING_MAX && !text.contains('\0')
}

/// Truncates a text to `STRING_MAX` bytes, and before a zero byte.
fn clipped(text: &str) -> &str {
    let end = text.find('\0').unwrap_or(text.len()).min(STRING_MAX);
    &text[..text.floor_char_boundary(end)]
}

/// Reader of integers and counted strings at the front of an option's data.
struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    fn bytes(&mut self, len: usize) -> Result<&'a [u8], &'static str> {
        let (head, rest) = self.0.split_at_checked(len).ok_or("a length past the end of the option")?;
        self.0 = rest;
        Ok(head)
    }

    fn u16(&mut self) -> Result<u16, &'static str> {
        Ok(u16::from_be_bytes(self.bytes(2)?.try_into().expect("2 bytes")))
    }

    fn u32(&mut self) -> Result<u32, &'static str> {
        Ok(u32::from_be_bytes(self.bytes(4)?.try_into().expect("4 bytes")))
    }

    fn counted(&mut self) -> Result<&'a [u8], &'static str> {
        let len = self.u32()?;
        self.bytes(len as usize)
    }

    fn end(&self) -> Result<(), &'static str> {
        if self.0.is_empty() { Ok(()) } else { Err("data past the end of the option's fields") }
    }
}

fn parse_info(data: &[u8]) -> Result<(String, Vec<u16>), &'static str> {
    let mut fields = Fields(data);
    let name = name(fields.counted()?)?;
    let count = fields.u16()?;
    let wanted = (0..count).map(|_| fields.u16()).collect::<Result<Vec<_>, _>>()?;
    fields.end()?;
    Ok((name, wanted))
}

/// Parses a query of metadata contexts.  Returns the export's name, and whether the queries match
/// `base:allocation`.
fn parse_contexts(data: &[u8], select: bool) -> Result<(String, bool), &'static str> {
    let mut fields = Fields(data);
    let name = name(fields.counted()?)?;
    let count = fields.u32()?;
    let mut allocation = count == 0 && !select;
    for _ in 0..count {
        let query = fields.counted()?;
        if query.len() > STRING_MAX {
            return Err("a query that is too long");
        }
        // `base:` alone is a wildcard in a list, and selects nothing.
        allocation |= query == BASE_ALLOCATION.as_bytes() || (query == b"base:" && !select);
    }
    fields.end()?;
    Ok((name, allocation))
}

#[cfg(test)]
mod tests;
