//! Events of the event queue (VIRTIO 1.2, section 5.6.6.3).
//!
//! ```text
//! event u32, bit 31: events missed | lun [8] | reason u32
//! ```

use std::collections::VecDeque;

use forebay_scsi::ScsiUnitEvent;
use zerocopy::little_endian::U32;
use zerocopy::{Immutable, IntoBytes};

use super::{EVENT_LEN, PartWriter, ScsiAddress, ScsiRingViolation, feature};
use crate::block::buffer_len;
use crate::dirty_log::DirtyLog;
use crate::memory::GuestPart;

/// Maximum pending events.  Those beyond it are missed, which the driver learns of with the next one.
pub const EVENTS_PENDING_MAX: usize = 256;

/// Flag of an event before which others were lost.
const EVENTS_MISSED: u32 = 1 << 31;

/// Values of `event`.
mod event_type {
    /// No event but the flag for missed ones.
    pub(super) const NONE: u32 = 0;
    /// Unit was added or removed.
    pub(super) const TRANSPORT_RESET: u32 = 1;
    /// Parameters of a unit have changed; `reason` has the additional sense code and, above it, the qualifier.
    pub(super) const PARAM_CHANGE: u32 = 3;
}

/// Values of `reason` of a transport reset.
mod reset_reason {
    /// Unit has appeared.
    pub(super) const RESCAN: u32 = 1;
    /// Unit has disappeared.
    pub(super) const REMOVED: u32 = 2;
}

#[derive(Debug, Clone, IntoBytes, Immutable)]
#[repr(C)]
struct VirtioScsiEvent {
    event: U32,
    lun: [u8; 8],
    reason: U32,
}

const _: () = assert!(size_of::<VirtioScsiEvent>() == EVENT_LEN);

/// Events that wait for buffers of the driver.
#[derive(Debug)]
pub struct ScsiEvents {
    /// Negotiated features, without which kinds of events are not reported.
    features: u64,
    /// In the order in which they happened, at most [`EVENTS_PENDING_MAX`].
    pending: VecDeque<ScsiUnitEvent>,
    missed: bool,
}

impl ScsiEvents {
    /// Creates an empty list, for a driver with these negotiated features.
    pub fn new(features: u64) -> Self {
        Self { features, pending: VecDeque::new(), missed: false }
    }

    /// Adds an event.  Without its feature it is ignored; beyond the limit it is missed.
    pub fn push(&mut self, event: ScsiUnitEvent) {
        let needed = match event {
            ScsiUnitEvent::Added { .. } | ScsiUnitEvent::Removed { .. } => feature::HOTPLUG,
            ScsiUnitEvent::Changed { .. } => feature::CHANGE,
            ScsiUnitEvent::Missed => feature::HOTPLUG | feature::CHANGE,
        };
        if self.features & needed == 0 {
            return;
        }
        let known = match event {
            // The driver has not read the parameters yet, and will read those of now.
            ScsiUnitEvent::Changed { .. } => self.pending.contains(&event),
            _ => false,
        };
        if event == ScsiUnitEvent::Missed || (!known && self.pending.len() == EVENTS_PENDING_MAX) {
            self.missed = true;
        } else if !known {
            self.pending.push_back(event);
        }
    }

    /// Returns whether there is something to report when the driver has a buffer.
    pub fn has_pending(&self) -> bool {
        self.missed || !self.pending.is_empty()
    }

    /// Writes the next event to a buffer of the event queue, and then logs the written pages; returns the number of
    /// bytes for the used ring.  `None` without an event: the buffer is still the device's.
    ///
    /// # Errors
    /// When the buffer is too short.  The event remains.
    pub fn put(&mut self, writable: &[GuestPart], log: Option<&DirtyLog>) -> Result<Option<u32>, ScsiRingViolation> {
        let space = buffer_len(writable);
        if space < EVENT_LEN as u64 {
            return Err(ScsiRingViolation::EventBuffer(space));
        }
        let Some(bytes) = self.take() else { return Ok(None) };
        let used = PartWriter::new(writable).put(&bytes);
        if let Some(log) = log {
            log.mark_parts(writable, used as u64);
        }
        Ok(Some(used as u32))
    }

    /// Takes the next event, encoded.
    fn take(&mut self) -> Option<[u8; EVENT_LEN]> {
        if !self.has_pending() {
            return None;
        }
        let (event, lun, reason) = match self.pending.pop_front() {
            Some(ScsiUnitEvent::Added { lun }) => (event_type::TRANSPORT_RESET, Some(lun), reset_reason::RESCAN),
            Some(ScsiUnitEvent::Removed { lun }) => (event_type::TRANSPORT_RESET, Some(lun), reset_reason::REMOVED),
            Some(ScsiUnitEvent::Changed { lun, code }) => {
                (event_type::PARAM_CHANGE, Some(lun), u32::from(code.swap_bytes()))
            }
            Some(ScsiUnitEvent::Missed) | None => (event_type::NONE, None, 0),
        };
        let missed = if std::mem::take(&mut self.missed) { EVENTS_MISSED } else { 0 };
        let lun = lun.map_or([0; 8], ScsiAddress::to_bytes);
        let event = VirtioScsiEvent { event: (event | missed).into(), lun, reason: reason.into() };
        let mut bytes = [0; EVENT_LEN];
        bytes.copy_from_slice(event.as_bytes());
        Some(bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn events() -> ScsiEvents {
        ScsiEvents::new(feature::HOTPLUG | feature::CHANGE)
    }

    fn taken(events: &mut ScsiEvents) -> Vec<(u32, [u8; 8], u32)> {
        let number = |bytes: &[u8]| u32::from_le_bytes(bytes.try_into().expect("four bytes"));
        std::iter::from_fn(|| events.take())
            .map(|bytes| (number(&bytes[..4]), bytes[4..12].try_into().expect("eight bytes"), number(&bytes[12..])))
            .collect()
    }

    #[test]
    fn events_are_encoded_as_drivers_know_them() {
        let mut events = events();
        events.push(ScsiUnitEvent::Added { lun: 3 });
        events.push(ScsiUnitEvent::Changed { lun: 300, code: forebay_scsi::sense::code::CAPACITY_CHANGED });
        events.push(ScsiUnitEvent::Removed { lun: 3 });
        let lun3 = [1, 0, 0, 3, 0, 0, 0, 0];
        let expected = [(1, lun3, 1), (3, [1, 0, 0x41, 0x2c, 0, 0, 0, 0], 0x092a), (1, lun3, 2)];
        assert_eq!(taken(&mut events), expected);
        assert!(!events.has_pending());
    }

    #[test]
    fn missed_events_are_reported_with_the_next_or_alone() {
        let mut events = events();
        events.push(ScsiUnitEvent::Missed);
        assert!(events.has_pending());
        assert_eq!(taken(&mut events), [(1 << 31, [0; 8], 0)]);
        for lun in 0..=EVENTS_PENDING_MAX as u16 {
            events.push(ScsiUnitEvent::Added { lun });
        }
        let found = taken(&mut events);
        assert_eq!((found.len(), found[0].0, found[1].0), (EVENTS_PENDING_MAX, 1 << 31 | 1, 1));
        assert!(!events.has_pending());
    }

    #[test]
    fn repeated_changes_are_one_event() {
        let mut events = events();
        for _ in 0..2 * EVENTS_PENDING_MAX {
            events.push(ScsiUnitEvent::Changed { lun: 1, code: 0x2a09 });
            events.push(ScsiUnitEvent::Changed { lun: 1, code: 0x2a01 });
        }
        assert_eq!(taken(&mut events).len(), 2);
    }

    #[test]
    fn events_need_their_features() {
        for (features, expected) in [(0, 0), (feature::HOTPLUG, 2), (feature::CHANGE, 1)] {
            let mut events = ScsiEvents::new(features);
            events.push(ScsiUnitEvent::Added { lun: 1 });
            events.push(ScsiUnitEvent::Changed { lun: 1, code: 0x2a09 });
            events.push(ScsiUnitEvent::Removed { lun: 1 });
            events.push(ScsiUnitEvent::Missed);
            let found = taken(&mut events);
            assert_eq!(found.len(), expected, "features {features:#x}");
            assert!(found.first().is_none_or(|first| first.0 & EVENTS_MISSED != 0));
        }
    }
}
