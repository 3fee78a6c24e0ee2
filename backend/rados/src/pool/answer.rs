//! Decoding of operation outputs.

use forebay_block::{Error, ErrorKind, Extent, KvPage, ObjectName, SnapClone, SnapId, SnapSet, SparseData};
use forebay_messenger::wire::{MalformedPayload, PayloadReader};
use forebay_reactor::BufList;

use crate::denc::ReaderExt;
use crate::osd::wire::SNAP_HEAD;

/// Returns the error for an undecodable reply.
pub(super) fn strange(object: &ObjectName, error: MalformedPayload) -> Error {
    Error::new(ErrorKind::Io, format!("object {object}: {error}, as an OSD sent it"))
}

/// Decodes size in bytes and modification time.
pub(crate) fn stat(data: &BufList) -> Result<(u64, u64), MalformedPayload> {
    let bytes = data.to_vec();
    let mut from = PayloadReader::new(&bytes, "an object's size");
    Ok((from.u64()?, from.u64()?))
}

/// Decodes extents: offset and length.
pub(crate) fn extents(data: &BufList) -> Result<Vec<(u64, u64)>, MalformedPayload> {
    let bytes = data.to_vec();
    let mut from = PayloadReader::new(&bytes, "a list of runs");
    let count = from.count(16)?;
    (0..count).map(|_| Ok((from.u64()?, from.u64()?))).collect()
}

/// Decodes extents with their data, all within `asked`; the data is not copied.
pub(crate) fn sparse(data: BufList, asked: Extent) -> Result<SparseData, MalformedPayload> {
    let malformed = MalformedPayload { what: "stored runs", newer: None };
    let head = |from: usize, len: usize| -> Result<Vec<u8>, MalformedPayload> {
        let end = from.checked_add(len).filter(|&end| end <= data.len()).ok_or(malformed)?;
        Ok(data.slice(from..end).to_vec())
    };
    let number = |bytes: Vec<u8>| u32::from_le_bytes(bytes.try_into().expect("four bytes")) as usize;
    let count = number(head(0, 4)?);
    let table = count.checked_mul(16).ok_or(malformed)?;
    let list = head(0, 4 + table)?;
    let runs = extents(&BufList::from(forebay_reactor::Buf::copy_of(&list)))?;
    let len = number(head(4 + table, 4)?);
    let mut at = 8 + table;
    if data.len() - at != len {
        return Err(malformed);
    }
    let mut out = SparseData::default();
    let mut from = asked.offset;
    for (offset, len) in runs {
        let end = offset.checked_add(len).filter(|&end| offset >= from && end <= asked.end()).ok_or(malformed)?;
        if (data.len() - at) as u64 != len && (data.len() - at) as u64 <= len {
            return Err(malformed);
        }
        if len > 0 {
            out.runs.push((offset, data.slice(at..at + len as usize)));
        }
        at += len as usize;
        from = end;
    }
    Ok(out)
}

/// Decodes attributes, by name.
pub(crate) fn attrs(data: &BufList) -> Result<Vec<(String, Vec<u8>)>, MalformedPayload> {
    let bytes = data.to_vec();
    let mut from = PayloadReader::new(&bytes, "an object's attributes");
    from.vec(|from| Ok((from.text()?, from.blob()?.to_vec())))
}

/// Decodes keys and values, and whether there are more.
pub(crate) fn pairs(data: &BufList) -> Result<KvPage, MalformedPayload> {
    let bytes = data.to_vec();
    let mut from = PayloadReader::new(&bytes, "keys and values");
    let pairs = from.vec(|from| Ok((from.blob()?.to_vec(), from.blob()?.to_vec())))?;
    // Only list operations report whether there are more.
    let more = !from.rest().is_empty() && from.flag()?;
    Ok(KvPage { pairs, more })
}

/// Decodes an object's clones.
pub(crate) fn snap_set(data: &BufList) -> Result<SnapSet, MalformedPayload> {
    let bytes = data.to_vec();
    let mut whole = PayloadReader::new(&bytes, "an object's snapshots");
    let (version, mut from) = whole.part(2)?;
    let mut set = SnapSet::default();
    let clones = from.vec(|from| {
        let (_, mut clone) = from.part(1)?;
        let id = clone.u64()?;
        let mut snaps: Vec<SnapId> = clone.vec(|from| from.u64().map(SnapId))?;
        snaps.sort_by(|one, other| other.cmp(one));
        clone.map(|from| Ok((from.u64()?, from.u64()?)), |_| ())?;
        Ok((id, snaps, clone.u64()?))
    })?;
    for (id, snaps, size) in clones {
        if id == SNAP_HEAD {
            set.head_exists = true;
        } else {
            set.clones.push(SnapClone { id: SnapId(id), snaps, size });
        }
    }
    if version >= 2 {
        set.seq = from.u64()?;
    }
    Ok(set)
}

/// Page of object names of a placement group, and the position to continue from.
pub(crate) struct Names {
    pub(crate) next: crate::osd::hobject::HObject,
    /// Namespace, name, and locator key, if any.
    pub(crate) names: Vec<(String, String, String)>,
}

pub(crate) fn names(data: &BufList) -> Result<Names, MalformedPayload> {
    let bytes = data.to_vec();
    let mut whole = PayloadReader::new(&bytes, "a list of objects");
    let (_, mut from) = whole.part(1)?;
    let next = crate::osd::hobject::HObject::decode(&mut from)?;
    // Names that are not UTF-8 are not used by this client.
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let names = from.vec(|from| Ok((text(from.blob()?), text(from.blob()?), text(from.blob()?))))?;
    Ok(Names { next, names })
}
