//! One-sided appends of a primary: it writes the payloads of a block into the ring of a replica's copy, through a memory
//! window, and sends header and entries by a message.

use std::pin::pin;
use std::rc::Rc;

use forebay_block::{BufList, Error, ErrorKind, Result};
use forebay_messenger::{Connection, WindowDescriptor};
use forebay_reactor::timeout;

use super::RawAppend;
use super::member::{HEARTBEATS, MemberLink, beat, exchange};
use super::set::PrimarySet;
use super::wire::{ReplicaAction, ReplicaAnswer};
use crate::format::{AREA_AT, ENTRY_LEN};

/// Maximum number of times in a row that a window is tried whose writes fail.
const FAILURES_MAX: u32 = 3;

/// Ring of the copies of a log.
struct CopyRing {
    /// Unit in bytes.
    unit: u64,
    /// Length in units.
    units: u64,
}

impl CopyRing {
    fn of(set: &PrimarySet) -> Self {
        let unit = u64::from(set.local.unit());
        Self { unit, units: (set.local.size() - AREA_AT) / unit }
    }
}

/// Opens a window onto the copy of a replica that has adopted the term; `None` if blocks are to be sent as messages.
pub(super) async fn open(set: &PrimarySet, link: &MemberLink, connection: &Connection) -> Option<WindowDescriptor> {
    let by_message = set.options.windows_by_message;
    if !(by_message || connection.writes_one_sided()) || link.window_failures.get() >= FAILURES_MAX {
        return None;
    }
    let why = match exchange(set, connection, ReplicaAction::OpenWindow, BufList::new()).await {
        Ok((ReplicaAnswer::Window(window), _)) => {
            let ring = CopyRing::of(set);
            match window.len() == ring.units * ring.unit && (by_message || window.is_one_sided()) {
                true => return Some(window),
                false => "its window is not onto the ring, or no device writes into it".to_owned(),
            }
        }
        Ok((ReplicaAnswer::Failed(why), _)) => why,
        Ok((ReplicaAnswer::Refused(refused), _)) => refused.to_string(),
        Ok(_) => "its answer is to something else".to_owned(),
        Err(error) => error.to_string(),
    };
    if !link.window_refused.replace(true) {
        tracing::info!(peer = %link.peer, why, "a replica of a write log is sent whole blocks: it has no memory window");
    }
    None
}

/// Writes the payloads of a block through a window, if there is one and the block has some.  Returns the request that appends
/// it and the data of that; `None` when the link has ended meanwhile.
///
/// # Errors
/// If the payloads may not be there: the window is lost.
pub(super) async fn place(
    set: &Rc<PrimarySet>,
    link: &Rc<MemberLink>,
    connection: &Connection,
    window: Option<WindowDescriptor>,
    raw: RawAppend,
) -> Result<Option<(ReplicaAction, BufList)>> {
    let whole = Ok(Some((ReplicaAction::Append { durable: true }, raw.bytes.clone())));
    let Some(window) = window.filter(|_| set.options.windows_by_message || connection.writes_one_sided()) else {
        return whole;
    };
    let ring = CopyRing::of(set);
    let head = (ENTRY_LEN * (1 + raw.count as usize)).next_multiple_of(ring.unit as usize);
    let units = raw.bytes.len() as u64 / ring.unit;
    // A recovery of the copy may read everything from `held` on: the replica refuses a block that would overwrite it, but not
    // a write through the window.
    let is_free = raw.next.pos <= link.progress.get().held + ring.units;
    if raw.bytes.len() <= head || !is_free {
        return whole;
    }
    let at = (raw.next.pos - units) % ring.units * ring.unit + head as u64;
    let mut write = pin!(connection.write(window, at, raw.bytes.slice(head..raw.bytes.len())));
    let patience = (set.lease_length / HEARTBEATS).min(set.options.retry);
    let written = loop {
        match timeout(patience, write.as_mut()).await {
            Ok(written) => break written,
            Err(_) if link.has_ended() || set.is_over() => return Ok(None),
            Err(_) => beat(set, link, connection),
        }
    };
    if let Err(error) = written {
        link.window_failures.set(link.window_failures.get() + 1);
        return Err(Error::new(ErrorKind::Io, format!("writing into a replica of the write log: {error}")));
    }
    link.window_failures.set(0);
    set.placed.set(set.placed.get() + 1);
    Ok(Some((ReplicaAction::AppendPlaced { durable: true, window: window.id() }, raw.bytes.slice(0..head))))
}
