//! Encoding of messages to and from OSDs: operation vectors, replies, backoffs.

use forebay_block::Advice;
use forebay_messenger::wire::{MalformedPayload, PayloadReader, PayloadWriter};
use forebay_reactor::BufList;

use super::hobject::HObject;
use crate::denc::{ReaderExt, WriterExt};
use crate::map::{Epoch, PgId};

/// Message types.
pub(crate) mod kind {
    pub(crate) const OSD_MAP: u16 = 41;
    pub(crate) const OSD_OP: u16 = 42;
    pub(crate) const OSD_OP_REPLY: u16 = 43;
    pub(crate) const WATCH_NOTIFY: u16 = 44;
    pub(crate) const BACKOFF: u16 = 61;
}

/// Operation codes.
pub(crate) mod code {
    pub(crate) const READ: u16 = 0x1201;
    pub(crate) const STAT: u16 = 0x1202;
    pub(crate) const MAPEXT: u16 = 0x1203;
    pub(crate) const SPARSE_READ: u16 = 0x1205;
    pub(crate) const NOTIFY: u16 = 0x1206;
    pub(crate) const NOTIFY_ACK: u16 = 0x1207;
    pub(crate) const ASSERT_VER: u16 = 0x1208;
    pub(crate) const LIST_WATCHERS: u16 = 0x1209;
    pub(crate) const LIST_SNAPS: u16 = 0x120a;
    pub(crate) const OMAP_GET_VALS: u16 = 0x1212;
    pub(crate) const OMAP_GET_VALS_BY_KEYS: u16 = 0x1214;
    pub(crate) const OMAP_CMP: u16 = 0x1219;
    pub(crate) const CMPEXT: u16 = 0x1220;
    pub(crate) const WRITE: u16 = 0x2201;
    pub(crate) const WRITE_FULL: u16 = 0x2202;
    pub(crate) const TRUNCATE: u16 = 0x2203;
    pub(crate) const ZERO: u16 = 0x2204;
    pub(crate) const DELETE: u16 = 0x2205;
    pub(crate) const CREATE: u16 = 0x220d;
    pub(crate) const ROLLBACK: u16 = 0x220e;
    pub(crate) const WATCH: u16 = 0x220f;
    pub(crate) const OMAP_SET_VALS: u16 = 0x2215;
    pub(crate) const OMAP_RM_KEYS: u16 = 0x2218;
    pub(crate) const SET_ALLOC_HINT: u16 = 0x2223;
    pub(crate) const GET_ATTR: u16 = 0x1301;
    pub(crate) const GET_ATTRS: u16 = 0x1302;
    pub(crate) const CMP_ATTR: u16 = 0x1303;
    pub(crate) const SET_ATTR: u16 = 0x2301;
    pub(crate) const RM_ATTR: u16 = 0x2304;
    pub(crate) const CALL: u16 = 0x1401;
    pub(crate) const PGNLS: u16 = 0x1505;
}

/// Watch operations.
pub(crate) mod watch {
    pub(crate) const UNWATCH: u8 = 0;
    pub(crate) const WATCH: u8 = 3;
    pub(crate) const RECONNECT: u8 = 5;
    pub(crate) const PING: u8 = 7;
}

/// Request flags.
pub(crate) mod flag {
    pub(crate) const ON_DISK: u32 = 0x4;
    pub(crate) const RETRY: u32 = 0x8;
    pub(crate) const READ: u32 = 0x10;
    pub(crate) const WRITE: u32 = 0x20;
    pub(crate) const PG_OP: u32 = 0x400;
    pub(crate) const EXEC: u32 = 0x800;
    pub(crate) const IGNORE_CACHE: u32 = 0x8000;
    pub(crate) const IGNORE_OVERLAY: u32 = 0x2_0000;
    pub(crate) const REDIRECTED: u32 = 0x20_0000;
    pub(crate) const FULL_TRY: u32 = 0x80_0000;
}

/// Operation flag: fail if the object exists.
pub(crate) const OP_EXCLUSIVE: u32 = 0x1;
/// Operation flag: a failure does not abort the other operations.
const OP_FAIL_OK: u32 = 0x2;
/// Operation flags for I/O advice (fadvise).
const ADVICE: [(Advice, u32); 5] = [
    (Advice::RANDOM, 0x4),
    (Advice::SEQUENTIAL, 0x8),
    (Advice::WILL_NEED, 0x10),
    (Advice::DONT_NEED, 0x20),
    (Advice::NO_CACHE, 0x40),
];
/// Comparison mode of attributes: equality, as bytes.
const CMP_SAME: u8 = 1;
const CMP_BYTES: u8 = 1;
/// Length in bytes of an operation in a message's front.
const OP_LEN: usize = 38;
/// Length in bytes of a request's front without names, operations and snapshots.
const FRONT_LEN: usize = 224;
/// Maximum number of operations in a reply.
const OPS_MAX: usize = 1024;
/// Snapshot id that denotes the head.
pub(crate) const SNAP_HEAD: u64 = u64::MAX - 1;
/// Snapshot id that denotes the snapshot set itself.
pub(crate) const SNAP_DIR: u64 = u64::MAX;

/// Operation of a request.
#[derive(Debug, Clone)]
pub(crate) struct OsdOp {
    pub(crate) code: u16,
    pub(crate) flags: u32,
    args: [u8; 28],
    pub(crate) data: BufList,
}

impl OsdOp {
    /// Creates an operation without arguments.
    pub(crate) fn new(code: u16) -> Self {
        Self { code, flags: 0, args: [0; 28], data: BufList::new() }
    }

    /// Creates an operation on a byte range.
    pub(crate) fn extent(code: u16, offset: u64, len: u64) -> Self {
        let mut op = Self::new(code);
        op.args[..8].copy_from_slice(&offset.to_le_bytes());
        op.args[8..16].copy_from_slice(&len.to_le_bytes());
        op
    }

    /// Creates an operation on a snapshot.
    pub(crate) fn snap(code: u16, snap: u64) -> Self {
        Self::extent(code, snap, 0)
    }

    /// Creates a guard on the object's version.
    pub(crate) fn assert_version(version: u64) -> Self {
        Self::extent(code::ASSERT_VER, 0, version)
    }

    /// Creates an allocation hint with the expected object size and write size, in bytes.
    pub(crate) fn expect(object_size: u64, write_size: u64) -> Self {
        let mut op = Self::extent(code::SET_ALLOC_HINT, object_size, write_size);
        op.flags = OP_FAIL_OK;
        op
    }

    /// Creates an operation on an extended attribute, with or without a value.
    pub(crate) fn attr(code: u16, name: &str, value: &[u8]) -> Self {
        let mut op = Self::new(code);
        op.args[..4].copy_from_slice(&(name.len() as u32).to_le_bytes());
        op.args[4..8].copy_from_slice(&(value.len() as u32).to_le_bytes());
        if code == code::CMP_ATTR {
            (op.args[8], op.args[9]) = (CMP_SAME, CMP_BYTES);
        }
        op.with(forebay_reactor::Buf::copy_of(&[name.as_bytes(), value].concat()))
    }

    /// Creates an operation that lists up to `count` objects of a placement group, as of an epoch.
    pub(crate) fn list(count: u64, epoch: Epoch) -> Self {
        let mut op = Self::extent(code::PGNLS, count, 0);
        op.args[8..12].copy_from_slice(&epoch.to_le_bytes());
        op
    }

    /// Creates a watch operation of [`watch`]: cookie, generation (incremented by each reconnect), and seconds of
    /// silence after which the OSD drops the watch.
    pub(crate) fn watch(cookie: u64, op: u8, generation: u32, timeout_s: u32) -> Self {
        let mut made = Self::extent(code::WATCH, cookie, 0);
        made.args[16] = op;
        made.args[17..21].copy_from_slice(&generation.to_le_bytes());
        made.args[21..25].copy_from_slice(&timeout_s.to_le_bytes());
        made
    }

    /// Creates a notify operation; its completion carries this cookie.
    pub(crate) fn notify(cookie: u64) -> Self {
        Self::extent(code::NOTIFY, cookie, 0)
    }

    /// Creates a call of an object class method.
    ///
    /// # Panics
    /// If a name is longer than 255 bytes.
    pub(crate) fn call(class: &str, method: &str, input: &[u8]) -> Self {
        let mut op = Self::new(code::CALL);
        op.args[0] = u8::try_from(class.len()).expect("a class's name is short");
        op.args[1] = u8::try_from(method.len()).expect("a method's name is short");
        op.args[3..7].copy_from_slice(&(input.len() as u32).to_le_bytes());
        let mut data = Vec::with_capacity(class.len() + method.len() + input.len());
        data.extend_from_slice(class.as_bytes());
        data.extend_from_slice(method.as_bytes());
        data.extend_from_slice(input);
        op.with(forebay_reactor::Buf::copy_of(&data))
    }

    /// Adds I/O advice to data operations; OSDs ignore it on others.
    pub(crate) fn advised(mut self, advice: Advice) -> Self {
        if matches!(self.code, code::READ | code::SPARSE_READ | code::WRITE | code::WRITE_FULL | code::ZERO) {
            self.flags |= ADVICE.iter().filter(|(one, _)| advice.has(*one)).map(|(_, flag)| flag).sum::<u32>();
        }
        self
    }

    /// Returns the first two arguments: offset and length of an extent.
    #[cfg(test)]
    pub(crate) fn numbers(&self) -> (u64, u64) {
        let number = |at: usize| u64::from_le_bytes(self.args[at..at + 8].try_into().expect("8 bytes"));
        (number(0), number(8))
    }

    /// Adds input data.
    pub(crate) fn with(mut self, data: impl Into<BufList>) -> Self {
        self.data = data.into();
        self
    }
}

/// Encodes keys as operation input.
pub(crate) fn keys<'a>(keys: impl ExactSizeIterator<Item = &'a [u8]>) -> Vec<u8> {
    let mut out = PayloadWriter::new();
    out.u32(keys.len() as u32);
    for key in keys {
        out.blob(key);
    }
    out.finish()
}

/// Encodes keys and values as operation input.
pub(crate) fn pairs<'a>(pairs: impl ExactSizeIterator<Item = (&'a [u8], &'a [u8])>) -> Vec<u8> {
    let mut out = PayloadWriter::new();
    out.u32(pairs.len() as u32);
    for (key, value) in pairs {
        out.blob(key).blob(value);
    }
    out.finish()
}

/// Request header fields of one attempt.
pub(crate) struct Envelope<'a> {
    pub(crate) pg: PgId,
    pub(crate) shard: i8,
    pub(crate) hash: u32,
    pub(crate) epoch: Epoch,
    pub(crate) flags: u32,
    /// Global id of the client, and the tid of the request, which is unchanged when it is resent.
    pub(crate) client: u64,
    pub(crate) tid: u64,
    /// Seconds and nanoseconds since 1970, for the object's modification time.
    pub(crate) time: (u32, u32),
    /// Target pool, and within it namespace and name; no name for an operation on a placement group.
    pub(crate) pool: i64,
    pub(crate) namespace: &'a str,
    pub(crate) name: &'a str,
    pub(crate) key: &'a str,
    pub(crate) snap: u64,
    pub(crate) snap_seq: u64,
    pub(crate) snaps: &'a [u64],
    pub(crate) attempt: i32,
    pub(crate) features: u64,
}

/// Encodes the front of a request (`MOSDOp` version 8).
pub(crate) fn request(envelope: &Envelope<'_>, ops: &[OsdOp]) -> Vec<u8> {
    let names = envelope.namespace.len() + envelope.name.len() + envelope.key.len();
    let mut out = PayloadWriter::with_capacity(FRONT_LEN + names + ops.len() * OP_LEN + envelope.snaps.len() * 8);
    out.versioned(1, 1, |out| {
        envelope.pg.encode(out);
        out.u8(envelope.shard as u8);
    });
    out.u32(envelope.hash).u32(envelope.epoch).u32(envelope.flags);
    out.versioned(2, 2, |out| {
        // Entity type 8 is a client.
        out.u8(8).u64(envelope.client).u64(envelope.tid).i32(0);
    });
    // Empty trace.
    out.raw(&[0; 24]);
    out.u32(0).u32(envelope.time.0).u32(envelope.time.1);
    let whole_group = envelope.name.is_empty();
    let hash = if whole_group { i64::from(envelope.hash) } else { -1 };
    out.versioned(6, if whole_group { 6 } else { 3 }, |out| {
        out.i64(envelope.pool).i32(-1).text(envelope.key).text(envelope.namespace).i64(hash);
    });
    out.text(envelope.name).u16(ops.len() as u16);
    for op in ops {
        out.u16(op.code).u32(op.flags).raw(&op.args).u32(op.data.len() as u32);
    }
    out.u64(envelope.snap).u64(envelope.snap_seq).u32(envelope.snaps.len() as u32);
    for &snap in envelope.snaps {
        out.u64(snap);
    }
    out.i32(envelope.attempt).u64(envelope.features);
    out.finish()
}

/// Redirect of a request to another pool.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Redirect {
    pub(crate) pool: i64,
    pub(crate) key: String,
    pub(crate) namespace: String,
    /// Empty if the object keeps its name, as between tiers of a pool.
    name: String,
}

/// Reply of an OSD.
#[derive(Debug)]
pub(crate) struct OsdReply {
    /// Zero, a count, or a negative error number.
    pub(crate) result: i32,
    /// Attempt that the reply belongs to; negative if unknown.
    pub(crate) attempt: i32,
    pub(crate) version: u64,
    pub(crate) redirect: Option<Redirect>,
    /// Result and output of each operation.
    pub(crate) ops: Vec<(i32, BufList)>,
}

impl OsdReply {
    pub(crate) fn decode(version: u16, front: &[u8], mut data: BufList) -> Result<Self, MalformedPayload> {
        let mut from = PayloadReader::new(front, "an OSD's answer");
        let from = &mut from;
        if version < 5 {
            return Err(from.malformed());
        }
        from.blob()?;
        PgId::decode(from)?;
        from.u64()?;
        let result = from.i32()?;
        from.take(12)?;
        // Epoch of the OSD.
        from.u32()?;
        let count = from.count(OP_LEN)?;
        if count > OPS_MAX {
            return Err(from.malformed());
        }
        let raw = from.take(count * OP_LEN)?;
        let attempt = from.i32()?;
        let mut ops = Vec::with_capacity(count);
        for op in raw.chunks_exact(OP_LEN) {
            let status = from.i32()?;
            let len = u32::from_le_bytes(op[OP_LEN - 4..].try_into().expect("four bytes")) as usize;
            if len > data.len() {
                return Err(from.malformed());
            }
            let rest = if len == data.len() { BufList::new() } else { data.slice(len..data.len()) };
            let output = if len == 0 {
                BufList::new()
            } else if rest.is_empty() {
                std::mem::take(&mut data)
            } else {
                data.slice(0..len)
            };
            data = if len == 0 { data } else { rest };
            ops.push((status, output));
        }
        from.take(12)?;
        let user_version = from.u64()?;
        let mut redirect = None;
        if version >= 7 && from.flag()? {
            redirect = Some(Redirect::decode(from)?);
        }
        Ok(Self { result, attempt, version: user_version, redirect, ops })
    }
}

impl Redirect {
    /// Returns the object's name in the redirect target.
    pub(crate) fn name_or<'a>(&'a self, own: &'a str) -> &'a str {
        if self.name.is_empty() { own } else { &self.name }
    }

    fn decode(from: &mut PayloadReader<'_>) -> Result<Self, MalformedPayload> {
        let (_, mut part) = from.part(1)?;
        let (version, mut locator) = part.part(6)?;
        let pool = locator.i64()?;
        locator.i32()?;
        let key = locator.text()?;
        let namespace = if version >= 5 { locator.text()? } else { String::new() };
        Ok(Self { pool, key, namespace, name: part.text()? })
    }
}

/// Backoff message: the OSD requests that operations on a range of objects be held back, or resent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Backoff {
    pub(crate) pg: PgId,
    pub(crate) shard: i8,
    pub(crate) epoch: Epoch,
    pub(crate) op: u8,
    pub(crate) id: u64,
    pub(crate) begin: HObject,
    pub(crate) end: HObject,
}

/// Backoff operations.
pub(crate) mod backoff {
    pub(crate) const BLOCK: u8 = 1;
    pub(crate) const ACK_BLOCK: u8 = 2;
    pub(crate) const UNBLOCK: u8 = 3;
}

impl Backoff {
    pub(crate) fn decode(front: &[u8]) -> Result<Self, MalformedPayload> {
        let mut from = PayloadReader::new(front, "an OSD's backoff");
        let (_, mut pg) = from.part(1)?;
        let (pg, shard) = (PgId::decode(&mut pg)?, pg.u8()? as i8);
        let (epoch, op, id) = (from.u32()?, from.u8()?, from.u64()?);
        Ok(Self { pg, shard, epoch, op, id, begin: HObject::decode(&mut from)?, end: HObject::decode(&mut from)? })
    }

    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut out = PayloadWriter::new();
        out.versioned(1, 1, |out| {
            self.pg.encode(out);
            out.u8(self.shard as u8);
        });
        out.u32(self.epoch).u8(self.op).u64(self.id);
        self.begin.encode(&mut out);
        self.end.encode(&mut out);
        out.finish()
    }
}
