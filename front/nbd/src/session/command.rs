use forebay_block::Extent;

use super::{NbdViolation, ReplyStyle};
use crate::wire::{self, Errno, ExtendedRequestHeader, RequestHeader, command, command_flag as flag};

/// Maximum payload of a refused write that is skipped; a longer one ends the connection.
const PAYLOAD_SKIP_MAX: u64 = 64 * 1024 * 1024;

/// Connection parameters against which requests are validated.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NbdRules {
    /// Format of requests and replies.
    pub replies: ReplyStyle,
    /// `base:allocation` was selected.
    pub allocation: bool,
    /// Current size of the export in bytes.
    pub size: u64,
    /// Minimum block size in bytes, to which requests must be aligned: a power of two.
    pub block_min: u32,
    /// Maximum payload in bytes.
    pub payload_max: u32,
    /// Writes are rejected.
    pub read_only: bool,
    /// `NBD_CMD_FLAG_FAST_ZERO` was offered.
    pub fast_zero: bool,
}

/// Action of a request, validated against the [`NbdRules`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NbdAction {
    /// Read command.
    Read {
        /// Bytes to read.
        extent: Extent,
        /// Reply with one content chunk only (`NBD_CMD_FLAG_DF`).
        whole: bool,
    },
    /// Write of the payload.
    Write {
        /// Bytes to write; as long as the payload.
        extent: Extent,
        /// Force unit access: durable before it is acknowledged.
        fua: bool,
    },
    /// Flush: makes acknowledged writes durable.
    Flush,
    /// Discard command.
    Trim {
        /// Bytes to discard.
        extent: Extent,
        /// Force unit access: durable before it is acknowledged.
        fua: bool,
    },
    /// Write zeroes.
    WriteZeroes {
        /// Bytes to zero.
        extent: Extent,
        /// Space stays allocated.
        no_hole: bool,
        /// Fail unless it is faster than writing.
        fast: bool,
        /// Force unit access: durable before it is acknowledged.
        fua: bool,
    },
    /// Query of the allocation status.
    BlockStatus {
        /// Bytes to query.
        extent: Extent,
        /// Status of the first extent only.
        one: bool,
    },
    /// No operation: a request of zero length.  Succeeds.
    Nothing,
    /// Error reply, with its text.
    Refuse(Errno, &'static str),
    /// End of the connection, after all earlier requests are answered; has no reply.
    Disconnect,
}

/// Decoded request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NbdCommand {
    /// Cookie, chosen by the client.
    pub cookie: u64,
    /// Offset as sent by the client, for extended replies.
    pub offset: u64,
    /// Command code, for statistics.
    pub kind: u16,
    /// Action to perform.
    pub action: NbdAction,
    /// Bytes of payload that follow the header: to be written, or with a refusal to be skipped.
    pub payload: u32,
}

/// Fields of a compact or extended request header.
#[derive(Debug, Clone, Copy)]
struct Head {
    flags: u16,
    kind: u16,
    offset: u64,
    len: u64,
}

impl NbdRules {
    /// Parses the request at the front of `bytes`.  Returns it with the length of its header; `None` if the header is
    /// incomplete.
    pub fn parse(&self, bytes: &[u8]) -> Result<Option<(NbdCommand, usize)>, NbdViolation> {
        let (head, cookie, head_len, magic, expected) = if self.replies == ReplyStyle::Extended {
            let Some((raw, len)) = wire::prefix::<ExtendedRequestHeader>(bytes) else { return Ok(None) };
            let (flags, kind) = (raw.flags.get(), raw.kind.get());
            let head = Head { flags, kind, offset: raw.offset.get(), len: raw.len.get() };
            (head, raw.cookie.get(), len, raw.magic.get(), wire::EXTENDED_REQUEST_MAGIC)
        } else {
            let Some((raw, len)) = wire::prefix::<RequestHeader>(bytes) else { return Ok(None) };
            let (flags, kind) = (raw.flags.get(), raw.kind.get());
            let head = Head { flags, kind, offset: raw.offset.get(), len: raw.len.get().into() };
            (head, raw.cookie.get(), len, raw.magic.get(), wire::REQUEST_MAGIC)
        };
        if magic != expected {
            return Err(NbdViolation::RequestMagic(magic));
        }
        let Head { kind, offset, .. } = head;
        let payload = self.payload(&head)?;
        let action = self.check(&head).unwrap_or_else(|(errno, why)| NbdAction::Refuse(errno, why));
        Ok(Some((NbdCommand { cookie, offset, kind, action, payload }, head_len)))
    }

    /// Returns the bytes of payload that follow the header.
    fn payload(&self, head: &Head) -> Result<u32, NbdViolation> {
        let extended = self.replies == ReplyStyle::Extended;
        // QEMU's client (up to 10.0 at least) leaves the flag out of its writes, and sends the payload all the same.
        let has_payload = head.kind == command::WRITE || (extended && head.flags & flag::PAYLOAD_LEN != 0);
        // "A server SHOULD initiate hard disconnect": with extended headers a client that sends more than it may is
        // beyond help.
        let worth_reading = if extended { u64::from(self.payload_max) } else { PAYLOAD_SKIP_MAX };
        match has_payload {
            false => Ok(0),
            true if head.len > worth_reading.max(u64::from(self.payload_max)) => {
                Err(NbdViolation::PayloadTooLong(head.len))
            }
            true => Ok(u32::try_from(head.len).expect("bounded above")),
        }
    }

    fn check(&self, head: &Head) -> Result<NbdAction, (Errno, &'static str)> {
        let fua = head.flags & flag::FUA != 0;
        let has = |bit: u16| head.flags & bit != 0;
        let allowed = |bits: u16| {
            if head.flags & !(bits | flag::FUA) != 0 {
                return Err((Errno::Inval, "a flag that this command does not have"));
            }
            Ok(())
        };
        match head.kind {
            command::READ => {
                allowed(if self.replies.has_chunks() { flag::DF } else { 0 })?;
                let extent = self.extent(head, Errno::Inval)?;
                if extent.len > u64::from(self.payload_max) {
                    let errno = if self.replies.has_chunks() { Errno::Overflow } else { Errno::Inval };
                    return Err((errno, "longer than the advertised maximum"));
                }
                Ok(nothing_or(extent, NbdAction::Read { extent, whole: has(flag::DF) }))
            }
            command::WRITE => {
                allowed(if self.replies == ReplyStyle::Extended { flag::PAYLOAD_LEN } else { 0 })?;
                self.writable()?;
                if head.len > u64::from(self.payload_max) {
                    return Err((Errno::Inval, "longer than the advertised maximum"));
                }
                let extent = self.extent(head, Errno::NoSpc)?;
                Ok(nothing_or(extent, NbdAction::Write { extent, fua }))
            }
            command::DISC => Ok(NbdAction::Disconnect),
            command::FLUSH => {
                allowed(0)?;
                if head.offset != 0 || head.len != 0 {
                    return Err((Errno::Inval, "a flush with an offset or a length"));
                }
                Ok(NbdAction::Flush)
            }
            command::TRIM => {
                allowed(0)?;
                self.writable()?;
                let extent = self.extent(head, Errno::Inval)?;
                Ok(nothing_or(extent, NbdAction::Trim { extent, fua }))
            }
            command::WRITE_ZEROES => {
                allowed(flag::NO_HOLE | if self.fast_zero { flag::FAST_ZERO } else { 0 })?;
                self.writable()?;
                let extent = self.extent(head, Errno::NoSpc)?;
                let (no_hole, fast) = (has(flag::NO_HOLE), has(flag::FAST_ZERO));
                if fast && no_hole {
                    // Keeping the space allocated requires writing zeroes.
                    return Err((Errno::NotSup, "zeroing without a hole is no faster than writing"));
                }
                Ok(nothing_or(extent, NbdAction::WriteZeroes { extent, no_hole, fast, fua }))
            }
            command::BLOCK_STATUS => {
                allowed(flag::REQ_ONE)?;
                if !self.allocation {
                    return Err((Errno::Inval, "no metadata context was selected"));
                }
                let extent = self.extent(head, Errno::Inval)?;
                if extent.len == 0 {
                    return Err((Errno::Inval, "a status query of no length"));
                }
                Ok(NbdAction::BlockStatus { extent, one: has(flag::REQ_ONE) })
            }
            command::CACHE => Err((Errno::Inval, "read-ahead is not offered")),
            _ => Err((Errno::Inval, "unknown command")),
        }
    }

    fn writable(&self) -> Result<(), (Errno, &'static str)> {
        if self.read_only { Err((Errno::Perm, "the export is read-only")) } else { Ok(()) }
    }

    fn extent(&self, head: &Head, outside: Errno) -> Result<Extent, (Errno, &'static str)> {
        let extent = Extent::new(head.offset, head.len);
        match extent.checked_end() {
            Some(end) if end <= self.size => {}
            _ => return Err((outside, "past the end of the export")),
        }
        let mask = u64::from(self.block_min) - 1;
        if (head.offset | head.len) & mask != 0 {
            return Err((Errno::Inval, "not aligned to the minimum block size"));
        }
        Ok(extent)
    }
}

fn nothing_or(extent: Extent, action: NbdAction) -> NbdAction {
    if extent.len == 0 { NbdAction::Nothing } else { action }
}

#[cfg(test)]
mod tests {
    use zerocopy::IntoBytes;

    use super::*;

    const RULES: NbdRules = NbdRules {
        replies: ReplyStyle::Structured,
        allocation: true,
        size: 1 << 20,
        block_min: 512,
        payload_max: 64 * 1024,
        read_only: false,
        fast_zero: true,
    };

    fn action(rules: &NbdRules, kind: u16, flags: u16, offset: u64, len: u32) -> NbdAction {
        let head = RequestHeader {
            magic: wire::REQUEST_MAGIC.into(),
            flags: flags.into(),
            kind: kind.into(),
            cookie: 7.into(),
            offset: offset.into(),
            len: len.into(),
        };
        let (command, used) = rules.parse(head.as_bytes()).expect("no violation").expect("a whole header");
        assert_eq!((command.cookie, command.offset, used), (7, offset, 28));
        assert_eq!(command.payload, if kind == command::WRITE { len } else { 0 });
        command.action
    }

    fn refused(action: NbdAction) -> Errno {
        let NbdAction::Refuse(errno, _) = action else { panic!("not refused: {action:?}") };
        errno
    }

    #[test]
    fn bounds_alignment_and_lengths() {
        let end = RULES.size - 512;
        assert!(matches!(action(&RULES, command::READ, 0, end, 512), NbdAction::Read { whole: false, .. }));
        assert!(matches!(action(&RULES, command::READ, flag::DF, end, 512), NbdAction::Read { whole: true, .. }));
        assert_eq!(refused(action(&RULES, command::READ, 0, end, 1024)), Errno::Inval);
        assert_eq!(refused(action(&RULES, command::WRITE, 0, end, 1024)), Errno::NoSpc);
        assert_eq!(refused(action(&RULES, command::TRIM, 0, end, 1024)), Errno::Inval);
        assert_eq!(refused(action(&RULES, command::WRITE_ZEROES, 0, end, 1024)), Errno::NoSpc);
        assert_eq!(refused(action(&RULES, command::READ, 0, u64::MAX - 511, 512)), Errno::Inval);
        assert_eq!(refused(action(&RULES, command::READ, 0, u64::MAX, u32::MAX)), Errno::Inval);
        assert_eq!(refused(action(&RULES, command::READ, 0, 1, 512)), Errno::Inval);
        assert_eq!(refused(action(&RULES, command::WRITE, 0, 512, 511)), Errno::Inval);
        assert_eq!(refused(action(&RULES, command::READ, 0, 0, 128 * 1024)), Errno::Overflow);
        let simple = NbdRules { replies: ReplyStyle::Simple, ..RULES };
        assert_eq!(refused(action(&simple, command::READ, 0, 0, 128 * 1024)), Errno::Inval);
        assert_eq!(refused(action(&RULES, command::WRITE, 0, 0, 128 * 1024)), Errno::Inval);
        // Requests without payload may be longer than the maximum payload.
        assert!(matches!(action(&RULES, command::TRIM, 0, 0, 1 << 20), NbdAction::Trim { .. }));
        assert_eq!(action(&RULES, command::READ, 0, 512, 0), NbdAction::Nothing);
        assert_eq!(action(&RULES, command::WRITE, 0, RULES.size, 0), NbdAction::Nothing);
    }

    #[test]
    fn flags_are_taken_only_where_they_mean_something() {
        for kind in [command::READ, command::WRITE, command::FLUSH, command::TRIM, command::WRITE_ZEROES] {
            let len = if kind == command::FLUSH { 0 } else { 512 };
            assert!(!matches!(action(&RULES, kind, flag::FUA, 0, len), NbdAction::Refuse(..)), "FUA with {kind}");
            assert_eq!(refused(action(&RULES, kind, flag::REQ_ONE, 0, len)), Errno::Inval);
            assert_eq!(refused(action(&RULES, kind, 1 << 9, 0, len)), Errno::Inval);
            assert_eq!(refused(action(&RULES, kind, flag::PAYLOAD_LEN, 0, len)), Errno::Inval);
        }
        let simple = NbdRules { replies: ReplyStyle::Simple, ..RULES };
        assert_eq!(refused(action(&simple, command::READ, flag::DF, 0, 512)), Errno::Inval);
        let zeroes = |flags| action(&RULES, command::WRITE_ZEROES, flags, 0, 512);
        assert!(matches!(zeroes(flag::NO_HOLE), NbdAction::WriteZeroes { no_hole: true, fast: false, .. }));
        assert!(matches!(zeroes(flag::FAST_ZERO), NbdAction::WriteZeroes { no_hole: false, fast: true, .. }));
        assert_eq!(refused(zeroes(flag::FAST_ZERO | flag::NO_HOLE)), Errno::NotSup);
        let slow = NbdRules { fast_zero: false, ..RULES };
        assert_eq!(refused(action(&slow, command::WRITE_ZEROES, flag::FAST_ZERO, 0, 512)), Errno::Inval);
        assert_eq!(refused(action(&RULES, command::FLUSH, 0, 0, 1)), Errno::Inval);
        assert_eq!(refused(action(&RULES, command::CACHE, 0, 0, 512)), Errno::Inval);
        assert_eq!(refused(action(&RULES, 99, 0, 0, 512)), Errno::Inval);
    }

    #[test]
    fn read_only_and_unselected_contexts_are_refused() {
        let rules = NbdRules { read_only: true, allocation: false, ..RULES };
        for kind in [command::WRITE, command::TRIM, command::WRITE_ZEROES] {
            assert_eq!(refused(action(&rules, kind, 0, 0, 512)), Errno::Perm);
        }
        assert_eq!(action(&rules, command::FLUSH, 0, 0, 0), NbdAction::Flush);
        assert_eq!(refused(action(&rules, command::BLOCK_STATUS, 0, 0, 512)), Errno::Inval);
        assert_eq!(refused(action(&RULES, command::BLOCK_STATUS, 0, 0, 0)), Errno::Inval);
    }

    #[test]
    fn extended_requests_state_their_payload() {
        let rules = NbdRules { replies: ReplyStyle::Extended, size: 1 << 45, ..RULES };
        let parse = |kind: u16, flags: u16, len: u64| {
            let head = ExtendedRequestHeader {
                magic: wire::EXTENDED_REQUEST_MAGIC.into(),
                flags: flags.into(),
                kind: kind.into(),
                cookie: 7.into(),
                offset: 0.into(),
                len: len.into(),
            };
            rules.parse(head.as_bytes()).map(|found| found.expect("a whole header").0)
        };
        let trim = parse(command::TRIM, 0, 1 << 40).expect("no payload");
        assert!(matches!(trim.action, NbdAction::Trim { extent: Extent { len: 0x100_0000_0000, .. }, .. }));
        let write = parse(command::WRITE, flag::PAYLOAD_LEN, 512).expect("a short payload");
        assert!(matches!(write.action, NbdAction::Write { .. }));
        assert_eq!(write.payload, 512);
        let unflagged = parse(command::WRITE, 0, 512).expect("a short payload");
        assert_eq!((unflagged.action, unflagged.payload), (write.action, 512));
        let odd = parse(command::READ, flag::PAYLOAD_LEN, 512).expect("a short payload");
        assert_eq!((refused(odd.action), odd.payload), (Errno::Inval, 512));
        assert_eq!(parse(command::WRITE, flag::PAYLOAD_LEN, 1 << 20), Err(NbdViolation::PayloadTooLong(1 << 20)));
    }

    #[test]
    fn other_magic_and_endless_payloads_are_violations() {
        assert_eq!(RULES.parse(&[0x25; 28]), Err(NbdViolation::RequestMagic(0x2525_2525)));
        let mut head = [0; 28];
        head[..4].copy_from_slice(&wire::REQUEST_MAGIC.to_be_bytes());
        head[7] = command::WRITE as u8;
        head[24..].copy_from_slice(&0x8000_0000_u32.to_be_bytes());
        assert_eq!(RULES.parse(&head), Err(NbdViolation::PayloadTooLong(0x8000_0000)));
        assert_eq!(RULES.parse(&head[..27]), Ok(None));
    }
}
