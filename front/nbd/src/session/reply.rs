use std::rc::Rc;

use forebay_block::{BufList, BufMut, Extent, ExtentState, is_zero};
use zerocopy::IntoBytes;

use super::negotiation::ALLOCATION_CONTEXT;
use super::{NbdCommand, NbdPools, ReplyStyle};
use crate::wire::{self, Errno, chunk, state};

/// Maximum length of payloads that are copied behind their header.  Longer ones are sent from their own buffers.
const PAYLOAD_COPY_MAX: usize = 512;
/// Block size of the search for zeroes, aligned to the start of the export.
const HOLE_UNIT: u64 = 4 * 1024;
/// Minimum length of a run of zeroes among data that gets a chunk of its own.
const HOLE_MIN: u64 = 32 * 1024;
/// Maximum bytes of an error's text.
const TEXT_MAX: usize = 512;

/// Identity of the request that a reply answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Origin {
    /// Cookie, chosen by the client.
    pub cookie: u64,
    /// Offset as sent by the client.
    pub offset: u64,
}

impl From<&NbdCommand> for Origin {
    fn from(command: &NbdCommand) -> Self {
        Self { cookie: command.cookie, offset: command.offset }
    }
}

/// Extent of a block status reply.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct StatusRun {
    /// Length in bytes.
    pub len: u64,
    /// Allocation state.
    pub state: ExtentState,
}

/// Outgoing replies, gathered for one send.
#[derive(Debug)]
pub struct NbdReplies {
    pools: Rc<NbdPools>,
    style: ReplyStyle,
    /// Headers and short payloads written since the last append to `ready`.
    headers: BufMut,
    ready: BufList,
}

impl NbdReplies {
    /// Creates an empty queue of replies.
    pub fn new(pools: Rc<NbdPools>, style: ReplyStyle) -> Self {
        let headers = pools.headers();
        Self { pools, style, headers, ready: BufList::new() }
    }

    /// Returns whether no bytes are queued.
    pub fn is_empty(&self) -> bool {
        self.ready.is_empty() && self.headers.is_empty()
    }

    /// Returns the number of queued bytes.
    pub fn len(&self) -> usize {
        self.ready.len() + self.headers.len()
    }

    /// Returns the number of queued buffers.
    pub fn parts(&self) -> usize {
        self.ready.parts().len() + usize::from(!self.headers.is_empty())
    }

    /// Takes all queued replies, as one sequence of bytes.
    pub fn take(&mut self) -> BufList {
        self.seal();
        std::mem::take(&mut self.ready)
    }

    /// Discards all queued replies.
    pub fn clear(&mut self) {
        self.headers.clear();
        self.ready = BufList::new();
    }

    /// Queues a success reply without payload.
    pub fn done(&mut self, origin: Origin) {
        match self.style {
            ReplyStyle::Extended => self.chunk(origin, chunk::DONE, chunk::NONE, 0),
            _ => self.simple(origin, 0),
        }
    }

    /// Queues the success reply to a read of zero length.
    pub fn no_data(&mut self, origin: Origin) {
        match self.style {
            ReplyStyle::Simple => self.simple(origin, 0),
            _ => self.chunk(origin, chunk::DONE, chunk::NONE, 0),
        }
    }

    /// Queues an error reply.
    pub fn error(&mut self, origin: Origin, errno: Errno, text: &str) {
        if self.style == ReplyStyle::Simple {
            return self.simple(origin, errno.code());
        }
        let text = &text[..text.floor_char_boundary(TEXT_MAX)];
        self.chunk(origin, chunk::DONE, chunk::ERROR, size_of::<wire::ErrorPayload>() + text.len());
        self.error_payload(errno, text);
    }

    /// Queues an error reply for a failure at byte `at` of the export.
    pub fn error_at(&mut self, origin: Origin, errno: Errno, text: &str, at: u64) {
        if self.style == ReplyStyle::Simple {
            return self.simple(origin, errno.code());
        }
        let text = &text[..text.floor_char_boundary(TEXT_MAX)];
        let len = size_of::<wire::ErrorPayload>() + text.len() + size_of::<u64>();
        self.chunk(origin, chunk::DONE, chunk::ERROR_OFFSET, len);
        self.error_payload(errno, text);
        self.bytes(&at.to_be_bytes());
    }

    fn error_payload(&mut self, errno: Errno, text: &str) {
        let head = wire::ErrorPayload { error: errno.code().into(), len: (text.len() as u16).into() };
        self.bytes(head.as_bytes());
        self.bytes(text.as_bytes());
    }

    /// Queues the data of a read of `extent`; in one content chunk if `whole`.
    pub fn data(&mut self, origin: Origin, extent: Extent, whole: bool, data: BufList) {
        debug_assert_eq!(data.len() as u64, extent.len);
        if self.style == ReplyStyle::Simple {
            self.simple(origin, 0);
            return self.payload(data);
        }
        if extent.len <= HOLE_MIN {
            // Too short for a hole among data: either all zeroes, or data.
            let zero = extent.len >= HOLE_UNIT && data.is_zero();
            return if zero {
                self.hole(origin, chunk::DONE, extent)
            } else {
                self.content(origin, chunk::DONE, extent.offset, data)
            };
        }
        let runs = zero_runs(extent, &data);
        match &runs[..] {
            [Run { zero: true, .. }] => self.hole(origin, chunk::DONE, extent),
            [_] => self.content(origin, chunk::DONE, extent.offset, data),
            _ if whole => self.content(origin, chunk::DONE, extent.offset, data),
            runs => {
                for (index, run) in runs.iter().enumerate() {
                    let flags = if index + 1 == runs.len() { chunk::DONE } else { 0 };
                    if run.zero {
                        self.hole(origin, flags, run.extent);
                    } else {
                        let from = (run.extent.offset - extent.offset) as usize;
                        let part = data.slice(from..from + run.extent.len as usize);
                        self.content(origin, flags, run.extent.offset, part);
                    }
                }
            }
        }
    }

    fn hole(&mut self, origin: Origin, flags: u16, extent: Extent) {
        self.chunk(origin, flags, chunk::OFFSET_HOLE, size_of::<wire::HolePayload>());
        let hole = wire::HolePayload { offset: extent.offset.into(), len: (extent.len as u32).into() };
        self.bytes(hole.as_bytes());
    }

    fn content(&mut self, origin: Origin, flags: u16, offset: u64, data: BufList) {
        self.chunk(origin, flags, chunk::OFFSET_DATA, size_of::<u64>() + data.len());
        self.bytes(&offset.to_be_bytes());
        self.payload(data);
    }

    /// Queues a block status reply, from the request's offset on.
    ///
    /// # Panics
    /// When `runs` is empty: the protocol requires at least one extent.
    pub fn status(&mut self, origin: Origin, runs: &[StatusRun]) {
        assert!(!runs.is_empty(), "a status reply without an extent");
        let flags = |state| match state {
            ExtentState::Data => 0,
            ExtentState::Hole => state::HOLE | state::ZERO,
            ExtentState::Zero => state::ZERO,
        };
        if self.style == ReplyStyle::Extended {
            let head =
                wire::ExtendedStatusHead { context: ALLOCATION_CONTEXT.into(), count: (runs.len() as u32).into() };
            let len = size_of_val(&head) + runs.len() * size_of::<wire::ExtendedDescriptor>();
            self.chunk(origin, chunk::DONE, chunk::BLOCK_STATUS_EXT, len);
            self.bytes(head.as_bytes());
            for run in runs {
                let state = u64::from(flags(run.state)).into();
                self.bytes(wire::ExtendedDescriptor { len: run.len.into(), state }.as_bytes());
            }
        } else {
            let len = size_of_val(&ALLOCATION_CONTEXT) + runs.len() * size_of::<wire::Descriptor>();
            self.chunk(origin, chunk::DONE, chunk::BLOCK_STATUS, len);
            self.bytes(&ALLOCATION_CONTEXT.to_be_bytes());
            for run in runs {
                let len = u32::try_from(run.len).expect("no longer than the request, whose length has 32 bits");
                self.bytes(wire::Descriptor { len: len.into(), state: flags(run.state).into() }.as_bytes());
            }
        }
    }

    fn simple(&mut self, origin: Origin, error: u32) {
        let head = wire::SimpleReply {
            magic: wire::SIMPLE_REPLY_MAGIC.into(),
            error: error.into(),
            cookie: origin.cookie.into(),
        };
        self.bytes(head.as_bytes());
    }

    fn chunk(&mut self, origin: Origin, flags: u16, kind: u16, len: usize) {
        if self.style == ReplyStyle::Extended {
            let head = wire::ExtendedChunkHeader {
                magic: wire::EXTENDED_CHUNK_MAGIC.into(),
                flags: flags.into(),
                kind: kind.into(),
                cookie: origin.cookie.into(),
                offset: origin.offset.into(),
                len: (len as u64).into(),
            };
            self.bytes(head.as_bytes());
        } else {
            let head = wire::ChunkHeader {
                magic: wire::CHUNK_MAGIC.into(),
                flags: flags.into(),
                kind: kind.into(),
                cookie: origin.cookie.into(),
                len: (len as u32).into(),
            };
            self.bytes(head.as_bytes());
        }
    }

    /// Appends a few bytes, using as few buffers as possible.
    fn bytes(&mut self, bytes: &[u8]) {
        if self.headers.spare() < bytes.len() {
            self.seal();
            if !self.headers.reclaim() {
                self.headers = self.pools.headers();
            }
        }
        self.headers.extend_from_slice(bytes);
    }

    fn payload(&mut self, data: BufList) {
        if data.len() <= PAYLOAD_COPY_MAX {
            for part in data.parts() {
                self.bytes(part);
            }
            return;
        }
        self.seal();
        self.ready.append(data);
    }

    /// Moves the contents of `headers` to the end of `ready`.
    fn seal(&mut self) {
        if !self.headers.is_empty() {
            let len = self.headers.len();
            self.ready.push(self.headers.split_to(len));
        }
    }
}

/// Part of a read, which is either all zeroes or sent as data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Run {
    extent: Extent,
    zero: bool,
}

/// Splits a read's result into runs where omitting zeroes saves more than the additional chunks cost.
fn zero_runs(extent: Extent, data: &BufList) -> Vec<Run> {
    let mut runs: Vec<Run> = Vec::new();
    let mut at = extent.offset;
    for part in data.parts() {
        let mut rest: &[u8] = part;
        while !rest.is_empty() {
            let unit = (HOLE_UNIT - at % HOLE_UNIT).min(rest.len() as u64);
            let (piece, after) = rest.split_at(unit as usize);
            let zero = is_zero(piece);
            match runs.last_mut() {
                Some(last) if last.zero == zero => last.extent.len += unit,
                _ => runs.push(Run { extent: Extent::new(at, unit), zero }),
            }
            at += unit;
            rest = after;
        }
    }
    if let [only] = runs[..] {
        return vec![only];
    }
    // Short holes are sent as data, together with their neighbours.
    let mut merged: Vec<Run> = Vec::with_capacity(runs.len());
    for run in runs {
        let zero = run.zero && run.extent.len >= HOLE_MIN;
        match merged.last_mut() {
            Some(last) if last.zero == zero => last.extent.len += run.extent.len,
            _ => merged.push(Run { zero, ..run }),
        }
    }
    merged
}

#[cfg(test)]
mod tests {
    use forebay_block::Buf;

    use super::*;

    fn list(parts: &[Vec<u8>]) -> BufList {
        parts.iter().map(|part| Buf::copy_of(part)).collect()
    }

    #[test]
    fn only_holes_that_save_something_are_cut_out() {
        let unit = HOLE_UNIT as usize;
        let zeroes = |units: usize| vec![0; units * unit];
        let ones = |units: usize| vec![1; units * unit];
        let runs = |offset: u64, parts: &[Vec<u8>]| {
            let data = list(parts);
            zero_runs(Extent::new(offset, data.len() as u64), &data)
                .iter()
                .map(|run| (run.extent.offset, run.extent.len, run.zero))
                .collect::<Vec<_>>()
        };
        let k = 1024;
        assert_eq!(runs(0, &[zeroes(9)]), [(0, 36 * k, true)]);
        assert_eq!(runs(0, &[ones(9)]), [(0, 36 * k, false)]);
        assert_eq!(runs(0, &[ones(1), zeroes(8), ones(1)]).len(), 3);
        assert_eq!(runs(0, &[ones(1), zeroes(7), ones(1)]), [(0, 36 * k, false)]);
        assert_eq!(runs(0, &[zeroes(8), ones(1)]), [(0, 32 * k, true), (32 * k, 4 * k, false)]);
        // The last byte decides; parts need not end at block boundaries.
        let mut almost = zeroes(9);
        almost[unit - 1] = 1;
        assert_eq!(runs(0, &[almost]), [(0, 4 * k, false), (4 * k, 32 * k, true)]);
        assert_eq!(runs(100, &[vec![0; 5000], vec![0; 40_000]]), [(100, 45_000, true)]);
    }

    #[test]
    fn short_reads_of_zeroes_are_holes() {
        let kind = |data: Vec<u8>| {
            let mut replies = NbdReplies::new(Rc::new(NbdPools::new()), ReplyStyle::Structured);
            let extent = Extent::new(0, data.len() as u64);
            replies.data(Origin { cookie: 1, offset: 0 }, extent, true, list(&[data]));
            let sent = replies.take().to_vec();
            wire::prefix::<wire::ChunkHeader>(&sent).expect("a header").0.kind.get()
        };
        assert_eq!(kind(vec![0; 4096]), chunk::OFFSET_HOLE);
        assert_eq!(kind(vec![0; 4095]), chunk::OFFSET_DATA);
        assert_eq!(kind([vec![0; 4095], vec![1]].concat()), chunk::OFFSET_DATA);
        assert_eq!(kind(vec![0; 1 << 20]), chunk::OFFSET_HOLE);
    }

    #[test]
    fn acknowledgements_share_one_buffer() {
        let mut replies = NbdReplies::new(Rc::new(NbdPools::new()), ReplyStyle::Structured);
        for cookie in 0..100 {
            replies.done(Origin { cookie, offset: 0 });
        }
        let sent = replies.take();
        assert_eq!((sent.len(), sent.parts().len()), (1600, 1));
        assert!(replies.is_empty());
    }

    #[test]
    fn long_payloads_are_not_copied() {
        let mut replies = NbdReplies::new(Rc::new(NbdPools::new()), ReplyStyle::Simple);
        let payload = Buf::copy_of(&[7; 4096]);
        replies.data(Origin { cookie: 1, offset: 0 }, Extent::new(0, 4096), false, payload.clone().into());
        let sent = replies.take();
        assert_eq!(sent.parts().len(), 2);
        assert_eq!(sent.parts()[1].as_ptr(), payload.as_ptr());
    }
}
