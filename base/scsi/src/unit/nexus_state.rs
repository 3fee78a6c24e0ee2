//! I_T nexus state: a session's view of a unit, with its pending unit attentions.

use std::rc::Rc;
use std::sync::Arc;
use std::task::Context;

use forebay_block::LocalFuture;
use forebay_block::reservation::{EventKind, ReservationAction};

use super::attentions::UnitAttentions;
use super::changes::ChangeCounts;
use super::{DrainGuard, LogicalUnit, Nexus, Order};
use crate::sense::code;

/// State of a session's nexus with a unit.  The session uses the unit as long as this exists: dropping it unregisters
/// the session and submits the release of its SPC-2 reservation.
pub(crate) struct NexusState {
    unit: Rc<LogicalUnit>,
    nexus: Arc<Nexus>,
    attentions: UnitAttentions,
    seen: Seen,
    /// Additional sense codes of changed parameters that the transport is to report, if the session watches.
    parameters: Vec<u16>,
    /// Next change of the device's size, if the session watches.
    resized: Option<LocalFuture<()>>,
}

/// Changes of a unit for which unit attentions are established already.
struct Seen {
    change_count: u32,
    counts: ChangeCounts,
    blocks: u64,
    event: u64,
    passed: u32,
}

impl NexusState {
    /// Creates the state when a session begins to use the unit; `first` is its first unit attention.
    pub(super) fn new(unit: Rc<LogicalUnit>, nexus: Arc<Nexus>, first: u16) -> Self {
        let shared = unit.shared();
        let seen = Seen {
            // Read before the counts: a change that they miss changes it once more.
            change_count: shared.change_count(),
            counts: shared.change_counts(),
            blocks: unit.blocks(),
            event: unit.last_event(),
            passed: shared.spec().space.passed(),
        };
        let attentions = UnitAttentions::new(first);
        Self { attentions, seen, unit, nexus, parameters: Vec::new(), resized: None }
    }

    /// Returns the unit.
    #[inline]
    pub(super) fn unit(&self) -> &Rc<LogicalUnit> {
        &self.unit
    }

    /// Returns the LUN of the unit.
    pub(crate) fn lun(&self) -> u16 {
        self.nexus.lun()
    }

    /// Takes the orders to the session since the last call.
    pub(crate) fn take_orders(&self) -> Vec<(Order, Arc<DrainGuard>)> {
        self.nexus.take_orders()
    }

    /// Establishes a unit attention for a changed LUN inventory.
    pub(super) fn luns_changed(&mut self) {
        self.attentions.establish(code::REPORTED_LUNS);
    }

    /// Clears the unit attention for a changed LUN inventory: the host has read it.
    pub(super) fn luns_reported(&mut self) {
        self.attentions.clear(code::REPORTED_LUNS);
    }

    /// Establishes unit attentions for changes since the last call.
    #[inline]
    pub(super) fn note_changes(&mut self) {
        let unit = self.unit.shared();
        if unit.change_count() != self.seen.change_count
            || self.unit.blocks() != self.seen.blocks
            || self.unit.last_event() != self.seen.event
            || unit.spec().space.passed() != self.seen.passed
        {
            self.collect_unit_attentions();
        }
    }

    /// Polls for a change of the device's size, for a session that watches; `cx` wakes the session.
    pub(crate) fn poll_size(&mut self, cx: &mut Context<'_>) {
        let Some(watch) = self.unit.device().size_watch() else { return };
        let next = || -> LocalFuture<()> {
            let watch = watch.clone();
            Box::pin(async move { watch.changed().await })
        };
        let resized = self.resized.get_or_insert_with(next);
        while resized.as_mut().poll(cx).is_ready() {
            *resized = next();
        }
    }

    /// Establishes unit attentions for changes, and takes the additional sense codes of changed parameters.
    pub(crate) fn take_parameters(&mut self) -> Vec<u16> {
        self.note_changes();
        std::mem::take(&mut self.parameters)
    }

    #[cold]
    fn collect_unit_attentions(&mut self) {
        let Self { unit, nexus, attentions, seen, parameters, .. } = self;
        let shared = unit.shared();
        // Read before what it announces: a change that is missed now changes it once more.
        seen.change_count = shared.change_count();
        let counts = shared.change_counts();
        let before = std::mem::replace(&mut seen.counts, counts);
        if before.resets != counts.resets {
            // Every nexus is told of a reset, including its originator (SAM-5, section 6.3.3).
            attentions.reset();
        }
        let mut changed = |parameter: u16| {
            attentions.establish(parameter);
            if nexus.watches() {
                parameters.push(parameter);
            }
        };
        if before.modes != counts.modes {
            changed(code::MODE_CHANGED);
        }
        if before.inquiry != counts.inquiry {
            changed(code::INQUIRY_CHANGED);
        }
        if before.access_states != counts.access_states {
            changed(code::ACCESS_STATE_CHANGED);
        }
        let blocks = unit.blocks();
        if std::mem::replace(&mut seen.blocks, blocks) != blocks {
            changed(code::CAPACITY_CHANGED);
        }
        let passed = shared.spec().space.passed();
        if std::mem::replace(&mut seen.passed, passed) != passed {
            attentions.establish(code::SOFT_THRESHOLD);
        }
        if let Some(table) = unit.table() {
            let seen = std::mem::replace(&mut seen.event, table.last_event());
            for event in table.events_after(seen).filter(|event| event.hosts.contains(nexus.host())) {
                attentions.establish(match event.kind {
                    EventKind::Released => code::RELEASED,
                    EventKind::RegistrationPreempted => code::REGISTRATION_PREEMPTED,
                    EventKind::Cleared => code::PREEMPTED,
                });
            }
        }
    }

    /// Clears the unit attention for changed modes after a change by this session itself.
    pub(super) fn set_modes_itself(&mut self) {
        self.note_changes();
        self.attentions.clear(code::MODE_CHANGED);
        self.parameters.retain(|&parameter| parameter != code::MODE_CHANGED);
    }

    /// Establishes the unit attention for the loss of the nexus, which the host has caused itself.
    pub(crate) fn nexus_lost(&mut self) {
        self.attentions.establish(code::NEXUS_LOSS);
    }

    /// Returns true if a unit attention is pending.
    #[inline]
    pub(super) fn has_attention(&self) -> bool {
        self.attentions.any()
    }

    /// Takes the next unit attention.
    pub(super) fn take_attention(&mut self) -> Option<u16> {
        self.attentions.take()
    }

    /// Releases the SPC-2 reservation of the session, which ends with it; `None` if it holds none.  The release is
    /// submitted by this call; the future completes when other hosts can reserve the unit.
    pub(crate) fn release_reservation(&self) -> Option<impl Future<Output = ()> + use<>> {
        let is_holder = self.unit.table().is_some_and(|table| table.whole() == Some(self.nexus.host()));
        let reservations = self.unit.device().reservations().filter(|_| is_holder)?;
        let released = reservations.apply(self.nexus.host(), ReservationAction::LetGoWhole);
        // An error means that the reservations are gone, and this one with them.
        Some(super::execute::ignore(released))
    }
}

impl Drop for NexusState {
    fn drop(&mut self) {
        self.unit.shared().unregister(self.nexus.session());
        // Submits the release; its completion is not awaited.
        drop(self.release_reservation());
    }
}
