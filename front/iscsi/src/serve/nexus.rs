//! I_T nexus state: a session's view of a unit, with its pending unit attentions.

use std::collections::VecDeque;
use std::rc::Rc;
use std::sync::Arc;

use forebay_block::reservation::{Action, EventKind};

use super::logical_unit::LogicalUnit;
use crate::scsi::sense::code;
use crate::sessions::Session;
use crate::unit::Nexus;

/// Maximum number of pending unit attentions; the oldest are dropped first.
const ATTENTIONS_MAX: usize = 16;

pub(super) struct NexusState {
    pub(super) local: Rc<LogicalUnit>,
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

impl NexusState {
    /// Creates the state when a session begins to use the unit; `first` is its first unit attention.
    pub(super) fn new(local: Rc<LogicalUnit>, nexus: Arc<Nexus>, session: Arc<Session>, first: u16) -> Self {
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

    /// Establishes a unit attention for a changed LUN inventory.
    pub(super) fn luns_changed(&mut self) {
        self.tell(code::REPORTED_LUNS);
    }

    /// Clears the unit attention for a changed LUN inventory: the host has read it.
    pub(super) fn luns_reported(&mut self) {
        self.attentions.retain(|&attention| attention != code::REPORTED_LUNS);
    }

    /// Collects new unit attentions.
    #[inline]
    pub(super) fn look(&mut self) {
        let unit = &self.local.unit;
        if unit.news() != self.news
            || self.local.blocks() != self.blocks
            || self.local.last_event() != self.event
            || unit.spec().space.passed() != self.passed
        {
            self.collect_unit_attentions();
        }
    }

    #[cold]
    fn collect_unit_attentions(&mut self) {
        let unit = self.local.unit.clone();
        self.news = unit.news();
        let (modes, resets) = unit.changes();
        if std::mem::replace(&mut self.resets, resets) != resets {
            // A reset clears earlier unit attentions.
            self.attentions.clear();
            // Every nexus is told of a reset, including its originator (SAM-5, section 6.3.3).
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

    /// Clears the unit attention for changed modes after a change by this session itself.
    pub(super) fn set_modes_itself(&mut self) {
        self.look();
        self.attentions.retain(|&attention| attention != code::MODE_CHANGED);
    }

    /// Returns true if a unit attention is pending.
    #[inline]
    pub(super) fn has_attention(&self) -> bool {
        !self.attentions.is_empty()
    }

    /// Takes the next unit attention.
    pub(super) fn take_attention(&mut self) -> Option<u16> {
        self.attentions.pop_front()
    }

    /// Releases the SPC-2 reservation of the session, which ends with it; `None` if it holds none.  The release is
    /// submitted by this call; the future completes when other hosts can reserve the unit.
    pub(super) fn release_reservation(&self) -> Option<impl Future<Output = ()> + use<>> {
        let held = self.local.table().is_some_and(|table| table.whole() == Some(&self.nexus.host));
        let reservations = self.local.device.reservations().filter(|_| held)?;
        let released = reservations.apply(&self.nexus.host, Action::LetGoWhole);
        // An error means that the reservations are gone, and this one with them.
        Some(async move { drop(released.await) })
    }
}

impl Drop for NexusState {
    fn drop(&mut self) {
        self.local.unit.leave(self.session.id);
        // Submits the release; its completion is not awaited.
        drop(self.release_reservation());
    }
}
