//! A session's view of a unit: what it was told, and what it still has to be told.

use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::Arc;

use forebay_block::reservation::{Action, EventKind};

use super::local::Local;
use crate::scsi::sense::code;
use crate::site::Session;
use crate::unit::Nexus;

/// Attentions that wait; the oldest are forgotten first.
const ATTENTIONS_MAX: usize = 16;

pub(super) struct LunState {
    pub(super) local: Rc<Local>,
    pub(super) nexus: Arc<Nexus>,
    session: Arc<Session>,
    attentions: VecDeque<u16>,
    news: u32,
    modes: u32,
    resets: u32,
    blocks: u64,
    event: u64,
    passed: u32,
}

impl LunState {
    /// The session has just begun to use the unit, and is told `first`.
    pub(super) fn new(local: Rc<Local>, nexus: Arc<Nexus>, session: Arc<Session>, first: u16) -> Self {
        let (modes, resets) = local.unit.changes();
        Self {
            attentions: VecDeque::from([first]),
            news: local.unit.news(),
            modes,
            resets,
            blocks: local.blocks(),
            event: local.last_event(),
            passed: local.unit.spec().space.passed(),
            local,
            nexus,
            session,
        }
    }

    fn tell(&mut self, attention: u16) {
        if self.attentions.contains(&attention) {
            return;
        }
        if self.attentions.len() == ATTENTIONS_MAX {
            self.attentions.pop_front();
        }
        self.attentions.push_back(attention);
    }

    /// Other units have come or gone.
    pub(super) fn luns_changed(&mut self) {
        self.tell(code::REPORTED_LUNS);
    }

    /// The host has seen which units there are.
    pub(super) fn luns_reported(&mut self) {
        self.attentions.retain(|&attention| attention != code::REPORTED_LUNS);
    }

    /// Looks for what is new.
    #[inline]
    pub(super) fn look(&mut self) {
        let unit = &self.local.unit;
        if unit.news() != self.news
            || self.local.blocks() != self.blocks
            || self.local.last_event() != self.event
            || unit.spec().space.passed() != self.passed
        {
            self.look_closer();
        }
    }

    #[cold]
    fn look_closer(&mut self) {
        let unit = self.local.unit.clone();
        self.news = unit.news();
        let (modes, resets) = unit.changes();
        if std::mem::replace(&mut self.resets, resets) != resets {
            // What was before a reset does not matter any more.
            self.attentions.clear();
            // Everybody is told, whoever did it (SAM-5, section 6.3.3).
            self.tell(code::UNIT_RESET);
        }
        if std::mem::replace(&mut self.modes, modes) != modes {
            self.tell(code::MODE_CHANGED);
        }
        let blocks = self.local.blocks();
        if std::mem::replace(&mut self.blocks, blocks) != blocks {
            self.tell(code::CAPACITY_CHANGED);
        }
        let passed = unit.spec().space.passed();
        if std::mem::replace(&mut self.passed, passed) != passed {
            self.tell(code::SOFT_THRESHOLD);
        }
        if let Some(table) = self.local.table() {
            let seen = std::mem::replace(&mut self.event, table.last_event());
            let nexus = self.nexus.clone();
            for event in table.events_after(seen).filter(|event| event.hosts.contains(&nexus.host)) {
                self.tell(match event.kind {
                    EventKind::Released => code::RELEASED,
                    EventKind::RegistrationPreempted => code::REGISTRATION_PREEMPTED,
                    EventKind::Cleared => code::PREEMPTED,
                });
            }
        }
    }

    /// This session has changed what is set, and need not be told.
    pub(super) fn set_modes_itself(&mut self) {
        self.look();
        self.attentions.retain(|&attention| attention != code::MODE_CHANGED);
    }

    /// There is something to tell.
    #[inline]
    pub(super) fn has_attention(&self) -> bool {
        !self.attentions.is_empty()
    }

    /// The next thing to tell.
    pub(super) fn take_attention(&mut self) -> Option<u16> {
        self.attentions.pop_front()
    }
}

impl Drop for LunState {
    fn drop(&mut self) {
        self.local.unit.leave(self.session.id);
        let held = self.local.table().is_some_and(|table| table.whole() == Some(&self.nexus.host));
        if let Some(reservations) = self.local.device.reservations().filter(|_| held) {
            // SPC-2's reservations end with the session.  It is on its way with this call; nobody waits for its end.
            drop(reservations.apply(&self.nexus.host, Action::LetGoWhole));
        }
    }
}
