//! Encoding of messages to and from monitors.

use std::collections::BTreeMap;

use forebay_messenger::wire::{MalformedPayload, PayloadReader, PayloadWriter};

use crate::denc::{ReaderExt, WriterExt};
use crate::map::{Epoch, Fsid};

/// Message types.
pub(crate) mod kind {
    pub(crate) const MON_MAP: u16 = 4;
    pub(crate) const STATFS: u16 = 13;
    pub(crate) const STATFS_REPLY: u16 = 14;
    pub(crate) const MON_SUBSCRIBE: u16 = 15;
    pub(crate) const AUTH: u16 = 17;
    pub(crate) const AUTH_REPLY: u16 = 18;
    pub(crate) const GET_VERSION: u16 = 19;
    pub(crate) const GET_VERSION_REPLY: u16 = 20;
    pub(crate) const OSD_MAP: u16 = 41;
    pub(crate) const POOL_OP_REPLY: u16 = 48;
    pub(crate) const POOL_OP: u16 = 49;
    pub(crate) const MON_COMMAND: u16 = 50;
    pub(crate) const MON_COMMAND_ACK: u16 = 51;
    pub(crate) const CONFIG: u16 = 62;
}

/// Pool operations.
pub(crate) mod pool_op {
    pub(crate) const CREATE_UNMANAGED_SNAP: u32 = 0x21;
    pub(crate) const DELETE_UNMANAGED_SNAP: u32 = 0x22;
}

/// Maximum number of maps in a message.
const MAPS_MAX: usize = 4096;
/// Maximum number of settings in a message.
const SETTINGS_MAX: usize = 1 << 16;

/// Appends the common header of requests to the monitors' Paxos services.
fn paxos(out: &mut PayloadWriter) -> &mut PayloadWriter {
    // Known version, and an obsolete session.
    out.u64(0).u16(u16::MAX).u64(0)
}

fn skip_paxos(from: &mut PayloadReader<'_>) -> Result<(), MalformedPayload> {
    from.take(18).map(drop)
}

/// Encodes a subscription: names of maps, each with its first wanted version.
pub(crate) fn subscribe(what: &[(&str, u64)]) -> Vec<u8> {
    let mut out = PayloadWriter::new();
    out.u32(what.len() as u32);
    for (name, start) in what {
        out.text(name).u64(*start).u8(0);
    }
    // Host name.
    out.text("");
    out.finish()
}

/// Encodes a command in JSON.
pub(crate) fn command(fsid: &Fsid, json: &str) -> Vec<u8> {
    let mut out = PayloadWriter::new();
    paxos(&mut out).raw(fsid).u32(1).text(json);
    out.finish()
}

/// Decodes the reply to a command: a status (a negative error number on failure), and a message text.
pub(crate) fn command_ack(front: &[u8]) -> Result<(i32, String), MalformedPayload> {
    let mut from = PayloadReader::new(front, "the answer to a command");
    skip_paxos(&mut from)?;
    let status = from.i32()?;
    let words = String::from_utf8_lossy(from.blob()?).into_owned();
    Ok((status, words))
}

/// Encodes a snapshot operation on a pool.
pub(crate) fn snapshot_op(fsid: &Fsid, pool: i64, op: u32, snap: u64) -> Vec<u8> {
    let mut out = PayloadWriter::new();
    paxos(&mut out).raw(fsid).u32(pool as u32).u32(op).u64(0).u64(snap).text("").u8(0).u16(u16::MAX);
    out.finish()
}

/// Decodes the reply to a pool operation: a status, the map epoch that includes the change, and a snapshot id if
/// present.
pub(crate) fn pool_reply(front: &[u8]) -> Result<(i32, Epoch, Option<u64>), MalformedPayload> {
    let mut from = PayloadReader::new(front, "the answer to a request about a pool");
    skip_paxos(&mut from)?;
    from.take(16)?;
    let (status, epoch) = (from.i32()?, from.u32()?);
    let number = match from.flag()? {
        true => PayloadReader::new(from.blob()?, "a snapshot's number").u64().ok(),
        false => None,
    };
    Ok((status, epoch, number))
}

/// Encodes a request for the space usage of a pool.
pub(crate) fn statfs(fsid: &Fsid, pool: i64) -> Vec<u8> {
    let mut out = PayloadWriter::new();
    paxos(&mut out).raw(fsid).u8(1).i64(pool);
    out.finish()
}

/// Space usage of a pool: total, used and available KiB; number of objects.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct PoolUsage {
    pub(crate) total_kib: u64,
    pub(crate) used_kib: u64,
    pub(crate) left_kib: u64,
    pub(crate) objects: u64,
}

pub(crate) fn statfs_reply(front: &[u8]) -> Result<PoolUsage, MalformedPayload> {
    let mut from = PayloadReader::new(front, "how full a pool is");
    from.take(16 + 8)?;
    Ok(PoolUsage { total_kib: from.u64()?, used_kib: from.u64()?, left_kib: from.u64()?, objects: from.u64()? })
}

/// Encodes a request for the newest version of a map.
pub(crate) fn version(what: &str) -> Vec<u8> {
    let mut out = PayloadWriter::new();
    out.u64(0).text(what);
    out.finish()
}

pub(crate) fn version_reply(front: &[u8]) -> Result<u64, MalformedPayload> {
    let mut from = PayloadReader::new(front, "a version");
    from.u64()?;
    from.u64()
}

/// Encodes an authentication step on an open connection.
pub(crate) fn auth(payload: &[u8]) -> Vec<u8> {
    let mut out = PayloadWriter::new();
    // Method 2 is cephx; the last number is the epoch of the monitor map.
    paxos(&mut out).u32(2).blob(payload).u32(0);
    out.finish()
}

/// Decodes the reply to an authentication step: a status, and the method's payload.
pub(crate) fn auth_reply(front: &[u8]) -> Result<(i32, Vec<u8>), MalformedPayload> {
    let mut from = PayloadReader::new(front, "the answer to a step of authentication");
    from.u32()?;
    let status = from.i32()?;
    from.u64()?;
    Ok((status, from.blob()?.to_vec()))
}

/// OSD maps of a message: full and incremental ones, by epoch.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct OsdMaps<'a> {
    pub(crate) fsid: Fsid,
    pub(crate) changes: Vec<(Epoch, &'a [u8])>,
    pub(crate) wholes: Vec<(Epoch, &'a [u8])>,
}

pub(crate) fn osd_maps(front: &[u8]) -> Result<OsdMaps<'_>, MalformedPayload> {
    let mut from = PayloadReader::new(front, "a message with maps of OSDs");
    let fsid = from.array()?;
    let mut read = || {
        let count = from.count(8)?;
        if count > MAPS_MAX {
            return Err(from.malformed());
        }
        (0..count).map(|_| Ok((from.u32()?, from.blob()?))).collect()
    };
    Ok(OsdMaps { fsid, changes: read()?, wholes: read()? })
}

/// Decodes the settings that the monitors store for this client, by name.
pub(crate) fn config(front: &[u8]) -> Result<BTreeMap<String, String>, MalformedPayload> {
    let mut from = PayloadReader::new(front, "a message with settings");
    let count = from.count(8)?;
    if count > SETTINGS_MAX {
        return Err(from.malformed());
    }
    (0..count).map(|_| Ok((from.text()?, from.text()?))).collect()
}

/// Extracts the monitor map from its message.
pub(crate) fn mon_map(front: &[u8]) -> Result<&[u8], MalformedPayload> {
    PayloadReader::new(front, "a message with a map of monitors").blob()
}

/// Returns a JSON string literal.
pub(crate) fn quote(text: &str) -> String {
    let mut out = String::from("\"");
    for c in text.chars() {
        match c {
            '"' | '\\' => out.extend(['\\', c]),
            c if c.is_control() => out.push_str(&format!("\\u{:04x}", c as u32)),
            c => out.push(c),
        }
    }
    out.push('"');
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn truncated_answers_are_errors() {
        let mut whole = PayloadWriter::new();
        paxos(&mut whole).raw(&[7; 16]).i32(-17).u32(9).u8(1).blob(&5u64.to_le_bytes());
        let whole = whole.finish();
        assert_eq!(pool_reply(&whole), Ok((-17, 9, Some(5))));
        for len in 0..whole.len() {
            assert!(pool_reply(&whole[..len]).is_err());
        }
    }

    #[test]
    fn settings_as_monitors_send_them() {
        let whole = [&[2, 0, 0, 0, 1, 0, 0, 0, b'a', 0, 0, 0, 0, 2, 0, 0, 0][..], b"bc", &[1, 0, 0, 0, b'7']].concat();
        let found = config(&whole).expect("settings");
        assert_eq!(found.into_iter().collect::<Vec<_>>(), [("a".into(), "".into()), ("bc".into(), "7".into())]);
        for len in 0..whole.len() {
            assert!(config(&whole[..len]).is_err());
        }
    }

    #[test]
    fn words_in_json() {
        assert_eq!(quote("a\"b\\c\n"), "\"a\\\"b\\\\c\\u000a\"");
    }
}
