//! State of a controller: properties, features, asynchronous events, errors.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use super::QUEUE_ENTRIES_MAX;
use crate::wire::NvmeStatus;
use crate::wire::fabrics::{Property, property};
use crate::wire::identify::{VERSION, event};
use crate::wire::log::{self, ErrorEntry};

/// Type of a controller.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ControllerType {
    /// I/O controller, with namespaces and I/O queues.
    Io,
    /// Discovery controller, which reports the addresses of subsystems.
    Discovery,
}

/// State change caused by a write to Controller Configuration (CC).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Power {
    /// No change.
    Same,
    /// CC.EN set: the controller is ready now.
    Enabled,
    /// CC.EN cleared: the controller was reset, its I/O queues are gone.
    Disabled,
    /// CC.SHN set: the controller is to be shut down, after written data is made durable.
    Shutdown,
}

/// Asynchronous event, reported to hosts that requested it (base 5.2).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum AsyncEvent {
    /// Namespace with this id was added, removed or changed.
    Namespace(u32),
    /// Change of ANA states.
    Ana,
    /// Change of the discovery log page.
    Discovery,
    /// Change of the host's registration or reservation, caused by another host.
    Reservation {
        /// Namespace id.
        nsid: u32,
        /// Type, as in the reservation notification log page.
        kind: u8,
    },
}

/// Type of asynchronous event, as it is reported.
struct EventType {
    /// Bit in the sets of event types.
    bit: u8,
    /// Type of the controllers that report it.
    of: ControllerType,
    /// Bit with which a host enables it; `None` if it is always enabled.
    enabled_by: Option<u32>,
    /// Asynchronous event type, in the result of the request.
    code: u64,
    /// Asynchronous event information, in the result of the request.
    information: u64,
    /// Log page that tells more, and re-arms the event when it is read.
    page: u8,
}

/// Reported types of events, in order of precedence.
const EVENT_TYPES: [EventType; 4] = [
    EventType {
        bit: 1,
        of: ControllerType::Io,
        enabled_by: Some(event::NAMESPACE),
        code: 2,
        information: 0,
        page: log::id::CHANGED,
    },
    EventType {
        bit: 2,
        of: ControllerType::Io,
        enabled_by: Some(event::ANA),
        code: 2,
        information: 3,
        page: log::id::ANA,
    },
    EventType {
        bit: 4,
        of: ControllerType::Discovery,
        enabled_by: Some(event::DISCOVERY),
        code: 2,
        information: 0xF0,
        page: log::id::DISCOVERY,
    },
    EventType { bit: 8, of: ControllerType::Io, enabled_by: None, code: 6, information: 0, page: log::id::RESERVATION },
];

impl AsyncEvent {
    fn reported_as(&self) -> &'static EventType {
        match self {
            AsyncEvent::Namespace(_) => &EVENT_TYPES[0],
            AsyncEvent::Ana => &EVENT_TYPES[1],
            AsyncEvent::Discovery => &EVENT_TYPES[2],
            AsyncEvent::Reservation { .. } => &EVENT_TYPES[3],
        }
    }
}

/// Maximum number of outstanding asynchronous event requests.
pub(super) const EVENT_REQUESTS_MAX: usize = 4;

/// Maximum number of retained reservation notifications.
const NOTIFICATIONS_MAX: usize = 255;

/// Feature values.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FeatureValues {
    /// Arbitration; has no effect, since there is one queue per connection.
    pub arbitration: u32,
    /// Power management; there is only power state 0.
    pub power: u32,
    /// Temperature thresholds, over and under.
    pub temperature: [u16; 2],
    /// Error recovery.
    pub recovery: u32,
    /// Volatile write cache enabled.  If disabled, every write is durable when it is acknowledged.
    pub write_cache: bool,
    /// Number of I/O queues granted to the host; 0 before it asked.
    pub queues: u16,
    /// Write atomicity (DN): set if the host needs none beyond power failures.
    pub atomicity: u32,
    /// Enabled asynchronous events.
    pub events: u32,
    /// Masks of disabled reservation notifications, by namespace.
    pub reservation_mask: BTreeMap<u32, u32>,
    /// Host behaviour support structure, as set by the host.
    pub behaviour: Vec<u8>,
}

impl Default for FeatureValues {
    fn default() -> Self {
        Self {
            arbitration: 7,
            power: 0,
            // Thresholds that no temperature exceeds.
            temperature: [u16::MAX, 0],
            recovery: 0,
            write_cache: true,
            queues: 0,
            atomicity: 0,
            events: 0,
            reservation_mask: BTreeMap::new(),
            behaviour: Vec::new(),
        }
    }
}

/// Controller state, as the admin queue sees it.
#[derive(Debug)]
pub struct Controller {
    /// Type of the controller.
    pub kind: ControllerType,
    /// Controller id.
    pub cntlid: u16,
    /// Host identifier.
    pub host_id: [u8; 16],
    /// Keep-alive timeout in milliseconds; 0 for none.
    pub keep_alive_ms: u32,
    /// Feature values, as set by the host.
    pub features: FeatureValues,
    cc: u32,
    csts: u32,
    /// Outstanding asynchronous event requests, by command identifier.
    requests: VecDeque<u16>,
    /// Event types that occurred and were not reported yet.
    pending: u8,
    /// Event types that were reported, and whose log page was not read since.
    reported: u8,
    /// Namespaces changed since the Changed Namespace List was read.  Holds at most one more than fits in the list,
    /// which means too many.
    changed: BTreeSet<u32>,
    errors: VecDeque<ErrorEntry>,
    error_count: u64,
    /// Unread reservation notifications, as (count, namespace, type); counted from 1.
    notifications: VecDeque<(u64, u32, u8)>,
    notified: u64,
}

mod cc {
    pub(super) const ENABLE: u32 = 1;
    /// CSS, MPS and AMS, which must be 0.
    pub(super) const MUST_BE_ZERO: u32 = 0x3FF0;
    pub(super) const SHUTDOWN: u32 = 3 << 14;
    pub(super) const ENTRY_SIZES: u32 = 0xFF << 16;
    pub(super) const ENTRY_SIZES_WANTED: u32 = 0x46 << 16;
}

mod csts {
    pub(super) const READY: u32 = 1;
    pub(super) const FATAL: u32 = 2;
    pub(super) const SHUTDOWN: u32 = 3 << 2;
    pub(super) const SHUTDOWN_GOES_ON: u32 = 1 << 2;
    pub(super) const SHUTDOWN_DONE: u32 = 2 << 2;
}

/// Maximum time to become ready, in units of 500 ms (CAP.TO and CRTO.CRWMT).
const READY_HALF_SECONDS: u64 = 30;

impl Controller {
    /// Creates a controller that is not enabled yet.
    pub fn new(kind: ControllerType, cntlid: u16, host_id: [u8; 16], keep_alive_ms: u32) -> Self {
        Self {
            kind,
            cntlid,
            host_id,
            keep_alive_ms,
            features: FeatureValues::default(),
            cc: 0,
            csts: 0,
            requests: VecDeque::new(),
            pending: 0,
            reported: 0,
            changed: BTreeSet::new(),
            errors: VecDeque::new(),
            error_count: 0,
            notifications: VecDeque::new(),
            notified: 0,
        }
    }

    /// Returns whether the controller is ready, so that commands other than Fabrics commands are accepted.
    pub fn is_ready(&self) -> bool {
        self.csts & csts::READY != 0
    }

    /// Returns the value of a property.
    ///
    /// # Errors
    /// Invalid Field if there is no such property of that width.
    pub fn property(&self, asked: Property) -> Result<u64, NvmeStatus> {
        match (asked.offset, asked.wide) {
            // MQES; contiguous queues (CQR); timeout (TO); NVM command set (CSS); ready with media (CRMS).
            (property::CAP, true) => {
                Ok((QUEUE_ENTRIES_MAX as u64 - 1) | 1 << 16 | READY_HALF_SECONDS << 24 | 1 << 37 | 1 << 59)
            }
            (property::VS, false) => Ok(VERSION.into()),
            (property::CC, false) => Ok(self.cc.into()),
            (property::CSTS, false) => Ok(self.csts.into()),
            (property::CRTO, false) => Ok(READY_HALF_SECONDS),
            _ => Err(NvmeStatus::INVALID_FIELD.final_()),
        }
    }

    /// Sets a property.
    ///
    /// # Errors
    /// Invalid Field unless it is CC, the only writable property.
    pub fn set_property(&mut self, set: Property) -> Result<Power, NvmeStatus> {
        if (set.offset, set.wide) != (property::CC, false) {
            return Err(NvmeStatus::INVALID_FIELD.final_());
        }
        let before = std::mem::replace(&mut self.cc, set.value as u32);
        let now = self.cc;
        let mut power = Power::Same;
        if now & cc::ENABLE != 0 && before & cc::ENABLE == 0 {
            let sizes_fit = self.kind == ControllerType::Discovery || now & cc::ENTRY_SIZES == cc::ENTRY_SIZES_WANTED;
            if now & cc::MUST_BE_ZERO == 0 && sizes_fit {
                self.csts = csts::READY;
                power = Power::Enabled;
            } else {
                self.csts = csts::FATAL;
            }
        }
        if now & cc::ENABLE == 0 && before & cc::ENABLE != 0 {
            self.csts &= !(csts::READY | csts::FATAL);
            self.features = FeatureValues::default();
            (self.pending, self.reported) = (0, 0);
            self.changed.clear();
            // Reservation notifications are counted from the reset on (base 5.16.1.26).
            self.notifications.clear();
            self.notified = 0;
            power = Power::Disabled;
        }
        if now & cc::SHUTDOWN != 0 && before & cc::SHUTDOWN == 0 {
            self.csts |= csts::SHUTDOWN_GOES_ON;
            power = Power::Shutdown;
        } else if now & cc::SHUTDOWN == 0 {
            self.csts &= !csts::SHUTDOWN;
        }
        Ok(power)
    }

    /// Completes a shutdown in progress.  Reports a fatal status if written data could not be made durable.
    pub fn shut_down(&mut self, durable: bool) {
        if self.csts & csts::SHUTDOWN == csts::SHUTDOWN_GOES_ON {
            self.csts &= !csts::SHUTDOWN;
            self.csts |= if durable { csts::SHUTDOWN_DONE } else { csts::FATAL };
        }
    }

    /// Drops the outstanding asynchronous event requests, which get no response on a reset.  Returns their number.
    pub fn forget_requests(&mut self) -> usize {
        std::mem::take(&mut self.requests).len()
    }

    /// Records an Asynchronous Event Request.
    ///
    /// # Errors
    /// Asynchronous Event Request Limit Exceeded, after `EVENT_REQUESTS_MAX` outstanding ones.
    pub fn request_event(&mut self, cid: u16) -> Result<(), NvmeStatus> {
        if self.requests.len() >= EVENT_REQUESTS_MAX {
            return Err(NvmeStatus::AER_LIMIT.final_());
        }
        self.requests.push_back(cid);
        Ok(())
    }

    /// Drops an asynchronous event request.  Returns false if there is none with that command identifier.
    pub fn abort_request(&mut self, cid: u16) -> bool {
        let at = self.requests.iter().position(|&request| request == cid);
        at.and_then(|at| self.requests.remove(at)).is_some()
    }

    /// Records an event, to be reported if the host has enabled it.
    pub fn raise(&mut self, event: AsyncEvent) {
        if let AsyncEvent::Reservation { nsid, kind } = event {
            if self.features.reservation_mask.get(&nsid).is_some_and(|mask| mask >> kind & 1 != 0) {
                return;
            }
            self.notified += 1;
            // The oldest unread notification is dropped when there are too many.
            if self.notifications.len() >= NOTIFICATIONS_MAX {
                self.notifications.pop_front();
            }
            self.notifications.push_back((self.notified, nsid, kind));
        }
        if let AsyncEvent::Namespace(nsid) = event
            && self.changed.len() <= log::CHANGED_MAX
        {
            self.changed.insert(nsid);
        }
        let reported = event.reported_as();
        if reported.of == self.kind && reported.enabled_by.is_none_or(|bit| self.features.events & bit != 0) {
            self.pending |= reported.bit;
        }
    }

    /// Takes the next event to report.  Returns the command identifier of the request, and the completion's result.
    pub fn tell(&mut self) -> Option<(u16, u64)> {
        let event = EVENT_TYPES.iter().find(|event| self.pending & !self.reported & event.bit != 0)?;
        let cid = self.requests.pop_front()?;
        self.pending &= !event.bit;
        self.reported |= event.bit;
        // Type in bits 2:0, information in 15:8, log page in 23:16.
        Some((cid, event.code | event.information << 8 | u64::from(event.page) << 16))
    }

    /// Re-arms the event of a log page after that was read.
    pub(super) fn log_read(&mut self, page: u8) {
        let Some(event) = EVENT_TYPES.iter().find(|event| event.page == page) else { return };
        self.reported &= !event.bit;
        self.pending &= !event.bit;
        match page {
            log::id::CHANGED => self.changed.clear(),
            log::id::RESERVATION => {
                self.notifications.pop_front();
                if !self.notifications.is_empty() {
                    self.pending |= event.bit;
                }
            }
            _ => {}
        }
    }

    /// Returns the oldest unread reservation notification (count, namespace, type), and the number of unread ones.
    pub(super) fn notification(&self) -> (Option<(u64, u32, u8)>, usize) {
        (self.notifications.front().copied(), self.notifications.len())
    }

    /// Returns the namespaces changed since the Changed Namespace List was last read.
    pub(super) fn changed(&self) -> Vec<u32> {
        self.changed.iter().copied().collect()
    }

    /// Records a failed command for the Error Information log page.
    pub fn note_error(&mut self, entry: ErrorEntry) {
        self.error_count += 1;
        self.errors.truncate(log::ERRORS_MAX - 1);
        self.errors.push_front(ErrorEntry { count: self.error_count, ..entry });
    }

    /// Counts failed commands without log entries, of which there were too many at a time.
    pub fn count_errors(&mut self, count: u64) {
        self.error_count += count;
    }

    /// Returns the error log entries, newest first.
    pub(super) fn errors(&self) -> impl Iterator<Item = &ErrorEntry> {
        self.errors.iter()
    }

    /// Returns the number of errors since the controller was created.
    pub(super) fn error_count(&self) -> u64 {
        self.error_count
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn enable(controller: &mut Controller, enable: bool) {
        let value = if enable { u64::from(cc::ENABLE | cc::ENTRY_SIZES_WANTED) } else { 0 };
        controller.set_property(Property { offset: property::CC, wide: false, value }).expect("CC is writable");
    }

    #[test]
    fn a_reset_drops_unread_reservation_notifications() {
        let mut controller = Controller::new(ControllerType::Io, 1, [1; 16], 0);
        enable(&mut controller, true);
        controller.raise(AsyncEvent::Reservation { nsid: 7, kind: 1 });
        controller.raise(AsyncEvent::Reservation { nsid: 8, kind: 2 });
        assert_eq!(controller.notification(), (Some((1, 7, 1)), 2));
        enable(&mut controller, false);
        enable(&mut controller, true);
        assert_eq!(controller.notification(), (None, 0));
        controller.request_event(5).expect("a free request");
        assert_eq!(controller.tell(), None, "an event of before the reset");
        // Notifications are counted from the reset on, and announced.
        controller.raise(AsyncEvent::Reservation { nsid: 9, kind: 3 });
        assert_eq!(controller.notification(), (Some((1, 9, 3)), 1));
        let result = 6 | u64::from(log::id::RESERVATION) << 16;
        assert_eq!(controller.tell(), Some((5, result)));
    }
}
