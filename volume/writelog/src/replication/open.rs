//! Opening of a log that has members, at the peer that the record names as its primary.

use std::rc::Rc;

use forebay_block::{Error, ErrorKind, Result};

use super::set::{LogIdentity, LogMembers, MemberKeeper, PrimarySet, ReplicationOptions};
use crate::format::LogId;
use crate::media::copy::NewTerm;
use crate::media::members::MembersMedium;
use crate::shelf::{OpenCopy, OpenLog, Shelf};

/// Log that has members, opened at its primary.
pub struct OpenedMembers {
    /// The log.
    pub log: OpenLog,
    /// Its members.
    pub set: Rc<PrimarySet>,
}

/// Opens this peer's copy of a log that has members. The record has been changed: it names this peer as the primary, the
/// backend client that it writes through, and a new term; the former primary is fenced. Requests may be served once the
/// set is ready.
///
/// # Errors
/// [`ErrorKind::Fenced`] if the copy is not the one that the record names, or follows a later term; errors of
/// [`Shelf::open_log`].
pub async fn open_members(
    shelf: &Rc<Shelf>,
    log: &LogId,
    (volume, name): (&str, &str),
    record: LogMembers,
    keeper: Rc<dyn MemberKeeper>,
    options: ReplicationOptions,
) -> Result<OpenedMembers> {
    let OpenCopy { medium, found, room, held, .. } = shelf.open_copy(log, Some(volume)).await?;
    let own = record.primary();
    let known = medium.state().map(|state| state.copy);
    let copy = record.copy(own).unwrap_or_default();
    if known.is_some_and(|known| known != copy) {
        let text = format!("{}: not the copy of the log that the record names", shelf.path());
        return Err(Error::new(ErrorKind::Fenced, text));
    }
    let term = u32::try_from(record.term()).ok().filter(|term| *term < u32::MAX - 1);
    let Some(term) = term.filter(|term| *term > medium.term()) else {
        let text =
            format!("{}: the copy of the log follows term {}, not {}", shelf.path(), medium.term(), record.term());
        return Err(Error::new(ErrorKind::Fenced, text));
    };
    medium.begin_term(NewTerm { term, epoch: record.epoch(), copy, filling: false, cut: None }).await?;
    let identity = LogIdentity {
        log: *log,
        volume: volume.to_owned(),
        name: name.to_owned(),
        size: medium.size(),
        unit: medium.unit(),
    };
    let set = PrimarySet::new(record, identity, medium.clone(), keeper, options);
    set.start();
    let kind = shelf.medium();
    let medium = Rc::new(MembersMedium::new(medium, set.clone()));
    Ok(OpenedMembers { log: OpenLog { medium, found, kind, room, held }, set })
}
