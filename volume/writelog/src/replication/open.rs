//! Opening of a log that has members, at the peer that the record names as its primary.

use std::rc::Rc;

use forebay_block::{DataKey, Error, ErrorKind, Result};

use super::keeper::{LogIdentity, LogMembers, MemberKeeper, RecordChange, ReplicationOptions};
use super::set::PrimarySet;
use crate::cipher::{key_check, open_cipher, require_empty, require_key};
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

/// Way in which a peer becomes the primary of a log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LogOpening {
    /// Opens the log of which it is the primary already.
    Again,
    /// Takes the log over from another peer, or opens it again if it is the primary already.
    TakeOver,
}

/// Opens this peer's copy of a log that has members: fences the former primary, changes the record, and makes the new term
/// durable. Payloads are encrypted if there is a key. This peer must take nothing from a primary any more ([`ReplicaHost::release`](super::ReplicaHost::release)).
/// Requests may be served once the set is ready.
///
/// # Errors
/// [`ErrorKind::Fenced`] if the record does not name the log; [`ErrorKind::Busy`] if another peer is its primary, unless it
/// is to be taken over; [`ErrorKind::Denied`] if this peer's copy is none that may be served, or the key is not the log's; errors of the record, the
/// backend and the medium.
pub async fn open_primary(
    shelf: &Rc<Shelf>,
    log: &LogId,
    names: (&str, &str),
    opening: LogOpening,
    keeper: Rc<dyn MemberKeeper>,
    (key, options): (Option<&DataKey>, ReplicationOptions),
) -> Result<OpenedMembers> {
    let own = keeper.own();
    let record = loop {
        let Some(record) = keeper.load().await? else {
            return Err(Error::new(
                ErrorKind::Fenced,
                format!("the record of {} names this write log no more", names.1),
            ));
        };
        let client = keeper.client();
        // Nobody is fenced for an attempt that cannot succeed.
        shelf.check_key(log, key).await?;
        let (copy, term) = shelf.copy_of(log).await?;
        let is_own = record.primary() == own && *record.client() == client;
        // Stored by an attempt that was told otherwise, or died: the copy still followed the former primary.
        let was_promised = record.term() > u64::from(term);
        if is_own && was_promised {
            keeper.promise_over().await;
            break record;
        }
        if record.primary() != own && opening == LogOpening::Again {
            let text = format!("the write log of {} is served by peer {}", names.1, record.primary());
            return Err(Error::new(ErrorKind::Busy, text));
        }
        let next = match record.primary() == own {
            true => record.opened(own, copy, client),
            false => record.taken_over(own, copy, client),
        };
        let next = next.map_err(|refused| Error::new(ErrorKind::Denied, format!("{}: {refused}", names.1)))?;
        // A client that closed the log has nothing on its way any more: this one, or one that the record forgot.
        if !is_own && !record.client().is_empty() {
            keeper.fence(record.client()).await?;
            if record.primary() != own || was_promised {
                // A primary that is cut off reads what it has in memory until its lease has run out.
                keeper.promise_over().await;
            }
        }
        if keeper.change(record, next.clone()).await? == RecordChange::Changed {
            break next;
        }
    };
    let opened = open_members(shelf, log, names, record, keeper, (key, options)).await?;
    opened.set.start();
    Ok(opened)
}

/// Opens this peer's copy of a log, of which the record names it as the primary, with a new term. The caller starts the
/// set.
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
    (key, options): (Option<&DataKey>, ReplicationOptions),
) -> Result<OpenedMembers> {
    let OpenCopy { medium, found, room, held, .. } = shelf.open_copy(log, Some(volume)).await?;
    let what = shelf.log_name(log);
    require_key(medium.encryption().as_ref(), key, log, &what)?;
    if key.is_some() && medium.encryption().is_none() {
        require_empty(found.entries.len(), &what)?;
    }
    let encryption = key.map(|key| key_check(key, log));
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
    medium.begin_term(NewTerm { term, epoch: record.epoch(), copy, filling: false, encryption, cut: None }).await?;
    let cipher = open_cipher(&*medium, key, log, term, &found)?;
    let identity = LogIdentity {
        log: *log,
        volume: volume.to_owned(),
        name: name.to_owned(),
        size: medium.size(),
        unit: medium.unit(),
        encryption,
    };
    let kind = shelf.medium();
    let set = PrimarySet::new(record, identity, (medium.clone(), kind), keeper, options);
    let medium = Rc::new(MembersMedium::new(medium, set.clone()));
    Ok(OpenedMembers { log: OpenLog { medium, found, kind, cipher, room, held }, set })
}
