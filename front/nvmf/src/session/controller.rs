//! A controller's own state: properties, features, asynchronous events, errors.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

use super::QUEUE_ENTRIES_MAX;
use crate::wire::Status;
use crate::wire::fabrics::{Property, property};
use crate::wire::identify::{VERSION, event};
use crate::wire::log::{self, ErrorEntry};

/// What a controller is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Kind {
    /// It has namespaces and I/O queues.
    Io,
    /// It tells where subsystems are.
    Discovery,
}

/// What a write to Controller Configuration comes to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Power {
    /// As before.
    Same,
    /// It is ready now.
    Enabled,
    /// It was reset: its I/O queues are gone.
    Disabled,
    /// It is to be shut down: what was written has to be durable first.
    Shutdown,
}

/// What a host may be told without having asked (base 5.2).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Event {
    /// This namespace has come, gone or changed.
    Namespace(u32),
    /// ANA states have changed.
    Ana,
    /// The discovery log page has changed.
    Discovery,
    /// A registration or reservation of the host has changed by another's doing.
    Reservation {
        /// On this namespace.
        nsid: u32,
        /// In the numbers of the notification log.
        kind: u8,
    },
}

/// The kinds of events, as bits.
mod kind {
    pub(super) const NAMESPACE: u8 = 1;
    pub(super) const ANA: u8 = 2;
    pub(super) const DISCOVERY: u8 = 4;
    pub(super) const RESERVATION: u8 = 8;
    pub(super) const ALL: [u8; 4] = [NAMESPACE, ANA, DISCOVERY, RESERVATION];
}

/// Asynchronous event requests that wait for something to happen, at most.
pub(super) const EVENT_REQUESTS_MAX: usize = 4;

/// Reservation notifications that are kept.
const NOTIFICATIONS_MAX: usize = 255;

/// What a host has set.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Features {
    /// Arbitration; without effect, as there is one queue a connection.
    pub arbitration: u32,
    /// Power management; there is one state.
    pub power: u32,
    /// Temperature thresholds, over and under.
    pub temperature: [u16; 2],
    /// Error recovery.
    pub recovery: u32,
    /// The volatile write cache is used; when not, every write is durable when it is answered.
    pub write_cache: bool,
    /// I/O queues that the host was granted; 0 before it asked.
    pub queues: u16,
    /// Write atomicity: whether the host needs none beyond power failures.
    pub atomicity: u32,
    /// Which events the host wants.
    pub events: u32,
    /// Reservation notifications that the host does not want, by namespace.
    pub reservation_mask: BTreeMap<u32, u32>,
    /// Host behaviour support, as the host has set it.
    pub behaviour: Vec<u8>,
}

impl Default for Features {
    fn default() -> Self {
        Self {
            arbitration: 7,
            power: 0,
            // There is no temperature that could pass them.
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

/// A controller, as its admin queue sees it.
#[derive(Debug)]
pub struct Controller {
    /// What it is for.
    pub kind: Kind,
    /// Its id.
    pub cntlid: u16,
    /// The host's identifier.
    pub host_id: [u8; 16],
    /// Keep-alive timeout in milliseconds; 0 for none.
    pub keep_alive_ms: u32,
    /// What the host has set.
    pub features: Features,
    cc: u32,
    csts: u32,
    /// Commands that wait for an event.
    requests: VecDeque<u16>,
    /// Kinds that happened and were not told yet.
    pending: u8,
    /// Kinds that were told, and whose log page was not read since.
    told: u8,
    /// Namespaces that changed since the list was read; one more than fits means too many.
    changed: BTreeSet<u32>,
    errors: VecDeque<ErrorEntry>,
    error_count: u64,
    /// Reservation notifications that were not read, numbered from 1.
    notifications: VecDeque<(u64, u32, u8)>,
    notified: u64,
}

mod cc {
    pub(super) const ENABLE: u32 = 1;
    /// CSS, MPS and AMS: all of them 0.
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

/// CAP.TO and CRTO.CRWMT: half seconds that becoming ready takes at most.
const READY_HALF_SECONDS: u64 = 30;

impl Controller {
    /// A controller that is not enabled yet.
    pub fn new(kind: Kind, cntlid: u16, host_id: [u8; 16], keep_alive_ms: u32) -> Self {
        Self {
            kind,
            cntlid,
            host_id,
            keep_alive_ms,
            features: Features::default(),
            cc: 0,
            csts: 0,
            requests: VecDeque::new(),
            pending: 0,
            told: 0,
            changed: BTreeSet::new(),
            errors: VecDeque::new(),
            error_count: 0,
            notifications: VecDeque::new(),
            notified: 0,
        }
    }

    /// Commands other than those of fabrics are taken.
    pub fn is_ready(&self) -> bool {
        self.csts & csts::READY != 0
    }

    /// A property's value.
    ///
    /// # Errors
    /// When there is no such property of that width.
    pub fn property(&self, asked: Property) -> Result<u64, Status> {
        match (asked.offset, asked.wide) {
            // MQES; queues are contiguous; timeout; the NVM command set; ready with media.
            (property::CAP, true) => {
                Ok((QUEUE_ENTRIES_MAX as u64 - 1) | 1 << 16 | READY_HALF_SECONDS << 24 | 1 << 37 | 1 << 59)
            }
            (property::VS, false) => Ok(VERSION.into()),
            (property::CC, false) => Ok(self.cc.into()),
            (property::CSTS, false) => Ok(self.csts.into()),
            (property::CRTO, false) => Ok(READY_HALF_SECONDS),
            _ => Err(Status::INVALID_FIELD.final_()),
        }
    }

    /// Sets a property.
    ///
    /// # Errors
    /// When there is none that can be set.
    pub fn set_property(&mut self, set: Property) -> Result<Power, Status> {
        if (set.offset, set.wide) != (property::CC, false) {
            return Err(Status::INVALID_FIELD.final_());
        }
        let before = std::mem::replace(&mut self.cc, set.value as u32);
        let now = self.cc;
        let mut power = Power::Same;
        if now & cc::ENABLE != 0 && before & cc::ENABLE == 0 {
            let sizes_fit = self.kind == Kind::Discovery || now & cc::ENTRY_SIZES == cc::ENTRY_SIZES_WANTED;
            if now & cc::MUST_BE_ZERO == 0 && sizes_fit {
                self.csts = csts::READY;
                power = Power::Enabled;
            } else {
                self.csts = csts::FATAL;
            }
        }
        if now & cc::ENABLE == 0 && before & cc::ENABLE != 0 {
            self.csts &= !(csts::READY | csts::FATAL);
            self.features = Features::default();
            (self.pending, self.told) = (0, 0);
            self.changed.clear();
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

    /// What was written is durable, or cannot be made so: the shutdown that goes on has come to its end.
    pub fn shut_down(&mut self, durable: bool) {
        if self.csts & csts::SHUTDOWN == csts::SHUTDOWN_GOES_ON {
            self.csts &= !csts::SHUTDOWN;
            self.csts |= if durable { csts::SHUTDOWN_DONE } else { csts::FATAL };
        }
    }

    /// Gives up the requests for events, which are not answered when a controller is reset; says how many there were.
    pub fn forget_requests(&mut self) -> usize {
        std::mem::take(&mut self.requests).len()
    }

    /// A host asks to be told of an event.
    ///
    /// # Errors
    /// When it has asked often enough.
    pub fn request_event(&mut self, cid: u16) -> Result<(), Status> {
        if self.requests.len() >= EVENT_REQUESTS_MAX {
            return Err(Status::AER_LIMIT.final_());
        }
        self.requests.push_back(cid);
        Ok(())
    }

    /// Takes back a request for an event; false when there is none by that number.
    pub fn abort_request(&mut self, cid: u16) -> bool {
        let at = self.requests.iter().position(|&request| request == cid);
        at.and_then(|at| self.requests.remove(at)).is_some()
    }

    /// Something has happened.
    pub fn raise(&mut self, event: Event) {
        if let Event::Reservation { nsid, kind } = event {
            if self.features.reservation_mask.get(&nsid).is_some_and(|mask| mask >> kind & 1 != 0) {
                return;
            }
            self.notified += 1;
            // The oldest go when nobody reads them.
            if self.notifications.len() >= NOTIFICATIONS_MAX {
                self.notifications.pop_front();
            }
            self.notifications.push_back((self.notified, nsid, kind));
        }
        if let Event::Namespace(nsid) = event
            && self.changed.len() <= log::CHANGED_MAX
        {
            self.changed.insert(nsid);
        }
        let (bit, wanted) = match event {
            Event::Namespace(_) => (kind::NAMESPACE, event::NAMESPACE),
            Event::Ana => (kind::ANA, event::ANA),
            Event::Discovery => (kind::DISCOVERY, event::DISCOVERY),
            Event::Reservation { .. } => (kind::RESERVATION, u32::MAX),
        };
        let of_this_kind = match self.kind {
            Kind::Io => bit != kind::DISCOVERY,
            Kind::Discovery => bit == kind::DISCOVERY,
        };
        if of_this_kind && (wanted == u32::MAX || self.features.events & wanted != 0) {
            self.pending |= bit;
        }
    }

    /// An event to be told now: the command that waited for it, and the completion's result.
    pub fn tell(&mut self) -> Option<(u16, u64)> {
        let bit = kind::ALL.into_iter().find(|bit| self.pending & !self.told & bit != 0)?;
        let cid = self.requests.pop_front()?;
        self.pending &= !bit;
        self.told |= bit;
        // Type in bits 2:0, information in 15:8, log page in 23:16.
        let (kind, information, page) = match bit {
            kind::NAMESPACE => (2, 0, log::id::CHANGED),
            kind::ANA => (2, 3, log::id::ANA),
            kind::DISCOVERY => (2, 0xF0, log::id::DISCOVERY),
            _ => (6, 0, log::id::RESERVATION),
        };
        Some((cid, kind | information << 8 | u64::from(page) << 16))
    }

    /// The log page of an event was read: it may be told again.
    pub(super) fn log_read(&mut self, page: u8) {
        let bit = match page {
            log::id::CHANGED => {
                self.changed.clear();
                kind::NAMESPACE
            }
            log::id::ANA => kind::ANA,
            log::id::DISCOVERY => kind::DISCOVERY,
            log::id::RESERVATION => kind::RESERVATION,
            _ => return,
        };
        self.told &= !bit;
        self.pending &= !bit;
        if page == log::id::RESERVATION {
            self.notifications.pop_front();
            if !self.notifications.is_empty() {
                self.pending |= kind::RESERVATION;
            }
        }
    }

    /// The oldest reservation notification (count, namespace, kind), and how many there are.
    pub(super) fn notification(&self) -> (Option<(u64, u32, u8)>, usize) {
        (self.notifications.front().copied(), self.notifications.len())
    }

    /// The namespaces that changed since the list was read last.
    pub(super) fn changed(&self) -> Vec<u32> {
        self.changed.iter().copied().collect()
    }

    /// Notes a command that failed.
    pub fn note_error(&mut self, entry: ErrorEntry) {
        self.error_count += 1;
        self.errors.truncate(log::ERRORS_MAX - 1);
        self.errors.push_front(ErrorEntry { count: self.error_count, ..entry });
    }

    /// Commands have failed of which nothing else is known: there were too many at a time.
    pub fn count_errors(&mut self, count: u64) {
        self.error_count += count;
    }

    /// Errors, the newest first.
    pub(super) fn errors(&self) -> impl Iterator<Item = &ErrorEntry> {
        self.errors.iter()
    }

    /// Errors ever noted.
    pub(super) fn error_count(&self) -> u64 {
        self.error_count
    }
}
