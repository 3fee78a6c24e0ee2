//! Handling of OSD maps, and of their effects on requests and sessions.

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;

use forebay_block::{Error, ErrorKind};

use super::Objecter;
use super::placement::PgTarget;
use crate::map::{Incremental, MapError, OsdMap, PgId};
use crate::monitor::wire::OsdMaps;

/// OSD map in use, and the targets computed from it.
///
/// Invariant: every cached target was computed from the current map: both are replaced together.
#[derive(Default)]
pub(super) struct CurrentMap {
    map: RefCell<Option<Rc<OsdMap>>>,
    targets: RefCell<HashMap<PgId, Rc<PgTarget>>>,
    /// Error of a rejected map that has a newer encoding.
    unreadable: RefCell<Option<Error>>,
}

impl CurrentMap {
    /// Returns the map; `None` before the first one.
    pub(super) fn get(&self) -> Option<Rc<OsdMap>> {
        self.map.borrow().clone()
    }

    /// Replaces the map.
    pub(super) fn replace(&self, map: OsdMap) {
        self.targets.borrow_mut().clear();
        *self.map.borrow_mut() = Some(Rc::new(map));
    }

    /// Returns the target of a placement group; `None` without a map, or if the map does not have the pool.
    pub(super) fn target(&self, pg: PgId) -> Option<Rc<PgTarget>> {
        if let Some(target) = self.targets.borrow().get(&pg) {
            return Some(target.clone());
        }
        let target = Rc::new(PgTarget::of(self.map.borrow().as_deref()?, pg)?);
        self.targets.borrow_mut().insert(pg, target.clone());
        Some(target)
    }

    /// Sets the target of a placement group, whatever the map says.
    #[cfg(test)]
    pub(super) fn set_target(&self, target: Rc<PgTarget>) {
        self.targets.borrow_mut().insert(target.pg, target);
    }

    /// Returns the error of a map with a newer encoding, if no map could be decoded.
    pub(super) fn unreadable(&self) -> Option<Error> {
        self.unreadable.borrow().clone().filter(|_| self.map.borrow().is_none())
    }

    /// Records the error of a map with a newer encoding.
    fn set_unreadable(&self, error: Error) {
        *self.unreadable.borrow_mut() = Some(error);
    }
}

impl Objecter {
    /// Applies OSD maps received from monitors or OSDs.
    pub(crate) fn take_maps(self: &Rc<Self>, maps: &OsdMaps<'_>) {
        let Some(monitors) = self.monitors.borrow().clone() else { return };
        if monitors.fsid() != [0; 16] && monitors.fsid() != maps.fsid {
            tracing::warn!("ignoring an OSD map of another cluster");
            return;
        }
        let before = self.map();
        let (after, missed) = match advance(before.as_deref(), maps) {
            Ok(advanced) => advanced,
            Err(MapError::Malformed(error)) if error.newer.is_some() => {
                tracing::warn!(%error, "ignoring an OSD map with a newer encoding; requesting the full map");
                self.current.set_unreadable(Error::new(ErrorKind::Unsupported, error.to_string()));
                self.changed.notify_all();
                // Request full maps from now on: one may be newer than the incremental map, and readable again.  If a
                // full map is itself unreadable, another one is requested only after the next incremental map.
                monitors.want_osd_map(0);
                if maps.wholes.is_empty() {
                    monitors.ask_again();
                }
                return;
            }
            Err(error) => {
                tracing::warn!(%error, "ignoring an invalid OSD map; requesting the full map");
                monitors.want_osd_map(0);
                monitors.ask_again();
                return;
            }
        };
        if let Some(after) = after {
            monitors.want_osd_map(after.epoch + 1);
            tracing::debug!(epoch = after.epoch, "new OSD map");
            self.current.replace(after);
            self.rescan();
            self.changed.notify_all();
            self.watch_epoch.advance();
        }
        if missed {
            monitors.ask_again();
        }
    }

    /// Applies a new map: closes sessions with OSDs that moved or went down, and resends requests whose placement
    /// changed.
    pub(super) fn rescan(self: &Rc<Self>) {
        let Some(map) = self.map() else { return };
        let mut lost = Vec::new();
        self.sessions.borrow_mut().retain(|&osd, session| {
            let stays = session.is_at(&map, osd);
            if !stays {
                lost.push((osd, session.close()));
            }
            stays
        });
        for (osd, connection) in lost {
            if let Some(connection) = connection {
                connection.close();
            }
            self.rejections.clear_osd(osd);
            self.unsend(osd, |_, _| true);
        }
        for tid in self.ops.filter_map(|tid, _| Some(tid)) {
            let located = self.ops.with_mut(tid, |op| {
                let before = op.target.clone();
                let located = self.locate(&map, op);
                let same = match (&before, &op.target) {
                    (Some(before), Some(after)) => {
                        let unforced = PgTarget { force_resend: before.force_resend, ..PgTarget::clone(after) };
                        **before == unforced && after.force_resend <= op.sent_epoch
                    }
                    _ => false,
                };
                if !same {
                    op.sent = false;
                }
                // Requests in flight whose placement is unchanged need no action.
                if op.sent && located.is_ok() { Ok(None) } else { located }
            });
            match located {
                None => {}
                Some(Err(error)) => self.answer(tid, Err(error)),
                Some(Ok(Some(osd))) => self.send(&map, tid, osd),
                Some(Ok(None)) => {}
            }
        }
    }
}

/// Applies maps to the current one. Returns the resulting map, and whether maps in between are missing.
fn advance(before: Option<&OsdMap>, maps: &OsdMaps<'_>) -> std::result::Result<(Option<OsdMap>, bool), MapError> {
    let mut map: Option<OsdMap> = None;
    let epoch = |map: &Option<OsdMap>| map.as_ref().or(before).map_or(0, |map| map.epoch);
    let newest = maps.changes.iter().chain(&maps.wholes).map(|(epoch, _)| *epoch).max().unwrap_or(0);
    let mut changes = maps.changes.clone();
    changes.sort_by_key(|(epoch, _)| *epoch);
    let newest_whole = maps.wholes.iter().max_by_key(|(epoch, _)| *epoch);
    if let Some((whole, bytes)) = newest_whole
        && *whole > epoch(&map)
        && (epoch(&map) == 0 || !changes.iter().any(|(change, _)| *change == epoch(&map) + 1))
    {
        map = Some(OsdMap::decode(bytes)?);
    }
    for (number, bytes) in changes {
        if epoch(&map) > 0 && number == epoch(&map) + 1 {
            let change = Incremental::decode(bytes)?;
            map.get_or_insert_with(|| before.expect("there is a map").clone()).apply(change)?;
        }
    }
    let missed = newest > epoch(&map);
    Ok((map, missed))
}
