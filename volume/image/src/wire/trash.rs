//! Entries of images in the trash: values of the keys `id_ID` of the object `rbd_trash`.

use std::time::Duration;

use super::{CephReader, CephWriter};

/// Origin of an entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TrashSource {
    /// Moved by a user.
    User,
    /// Moved by `rbd-mirror`.
    Mirroring,
    /// Moved by a migration.
    Migration,
    /// Being removed by `rbd rm`.
    Removing,
    /// Moved by a user, and removed with its last clone.
    UserParent,
    /// Origin of a newer version of Ceph.
    Other(u8),
}

impl TrashSource {
    fn code(self) -> u8 {
        match self {
            TrashSource::User => 0,
            TrashSource::Mirroring => 1,
            TrashSource::Migration => 2,
            TrashSource::Removing => 3,
            TrashSource::UserParent => 4,
            TrashSource::Other(code) => code,
        }
    }

    fn of_code(code: u8) -> Self {
        match code {
            0 => TrashSource::User,
            1 => TrashSource::Mirroring,
            2 => TrashSource::Migration,
            3 => TrashSource::Removing,
            4 => TrashSource::UserParent,
            other => TrashSource::Other(other),
        }
    }
}

/// State of an image in the trash.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum TrashState {
    /// In the trash.
    Normal,
    /// Being moved to the trash: it may still have a name.
    Moving,
    /// Being removed: it may lack a part of its data.
    Removing,
    /// Being restored: it may have a name already.
    Restoring,
}

/// Entry of an image in the trash.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct TrashEntry {
    pub(crate) source: TrashSource,
    /// Name of the image before.
    pub(crate) name: String,
    /// Time of the move, since 1970-01-01T00:00:00Z.
    pub(crate) deleted: Duration,
    /// Time up to which the image is not removed unless forced, since 1970-01-01T00:00:00Z.
    pub(crate) deferred_until: Duration,
    pub(crate) state: TrashState,
}

impl TrashEntry {
    /// Encodes the entry as the class `rbd` stores it.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let state = match self.state {
            TrashState::Normal => 0,
            TrashState::Moving => 1,
            TrashState::Removing => 2,
            TrashState::Restoring => 3,
        };
        let body = CephWriter::new().u8(self.source.code()).string(&self.name);
        let body = body.time(self.deleted).time(self.deferred_until).u8(state);
        CephWriter::new().versioned(2, 1, body).done()
    }

    /// Decodes an entry; `None` if it is malformed, or in a state that only newer versions know.
    pub(crate) fn decode(bytes: &[u8]) -> Option<Self> {
        let mut value = CephReader::new(bytes).versioned(2)?;
        let body = &mut value.body;
        let (source, name) = (TrashSource::of_code(body.u8()?), body.string()?);
        let (deleted, deferred_until) = (body.time()?, body.time()?);
        let state = match if value.version >= 2 { body.u8()? } else { 0 } {
            0 => TrashState::Normal,
            1 => TrashState::Moving,
            2 => TrashState::Removing,
            3 => TrashState::Restoring,
            _ => return None,
        };
        Some(Self { source, name, deleted, deferred_until, state })
    }
}

#[cfg(test)]
mod tests {
    use super::super::unhex;
    use super::*;

    /// Golden bytes stored by `rbd trash mv rbd/t` 16.2.
    #[test]
    fn an_entry_of_rbd_byte_for_byte() {
        let bytes = unhex("0201 17000000 00 01000000 74 a898046b 247b3d12 a898046b 247b3d12 00");
        let then = Duration::new(0x6b04_98a8, 0x123d_7b24);
        let entry = TrashEntry {
            source: TrashSource::User,
            name: "t".into(),
            deleted: then,
            deferred_until: then,
            state: TrashState::Normal,
        };
        assert_eq!(TrashEntry::decode(&bytes), Some(entry.clone()));
        assert_eq!(entry.encode(), bytes);
        for at in 0..bytes.len() {
            assert_eq!(TrashEntry::decode(&bytes[..at]), None);
        }
        for (code, state) in [(1, TrashState::Moving), (2, TrashState::Removing), (3, TrashState::Restoring)] {
            let bytes = [&bytes[..bytes.len() - 1], &[code]].concat();
            let entry = TrashEntry { state, ..entry.clone() };
            assert_eq!((TrashEntry::decode(&bytes), entry.encode()), (Some(entry.clone()), bytes));
        }
        assert_eq!(TrashEntry::decode(&[&bytes[..bytes.len() - 1], &[4]].concat()), None, "a state of the future");
        // The first version had no state.
        let older = unhex("0101 16000000 01 01000000 74 a898046b 247b3d12 a898046b 247b3d12");
        let of_mirroring = TrashEntry { source: TrashSource::Mirroring, ..entry };
        assert_eq!(TrashEntry::decode(&older), Some(of_mirroring));
    }

    #[test]
    fn sources_there_and_back() {
        for code in 0..=u8::MAX {
            assert_eq!(TrashSource::of_code(code).code(), code);
        }
    }
}
