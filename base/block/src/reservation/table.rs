//! Reservation state machine.

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;

/// Maximum length of a [`HostId`] in bytes: an iSCSI initiator's transport id, session id and target port, with
/// reserve.
pub const HOST_ID_LEN_MAX: usize = 512;
/// Maximum number of registrants of a volume.
pub const REGISTRANTS_MAX: usize = 1024;
/// Maximum number of events kept for hosts that have not fetched them yet.
pub(super) const EVENTS_MAX: usize = 64;

/// Identity of a host in the terms of its protocol: an I_T nexus for SCSI, a host identifier for NVMe.  Compared for
/// equality only.  Fronts prefix it with their name, so that identities of two protocols never collide.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct HostId(Arc<[u8]>);

impl HostId {
    /// Creates an identity; `None` when `bytes` is empty or longer than [`HOST_ID_LEN_MAX`].
    pub fn new(bytes: &[u8]) -> Option<Self> {
        (1..=HOST_ID_LEN_MAX).contains(&bytes.len()).then(|| Self(bytes.into()))
    }

    /// Returns the bytes of the identity.
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }
}

impl fmt::Debug for HostId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0.escape_ascii())
    }
}

/// Reservation types.  The numbers are SPC-4's TYPE field; NVMe's RTYPE numbers them from 1 to 6.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum ReservationType {
    /// Other hosts may read (1, NVMe 1).
    WriteExclusive,
    /// Other hosts may neither read nor write (3, NVMe 2).
    ExclusiveAccess,
    /// Registrants may read and write, other hosts read (5, NVMe 3).
    WriteExclusiveRegistrants,
    /// Registrants may read and write, other hosts do neither (6, NVMe 4).
    ExclusiveAccessRegistrants,
    /// Like [`ReservationType::WriteExclusiveRegistrants`], and every registrant is a holder (7, NVMe 5).
    WriteExclusiveAll,
    /// Like [`ReservationType::ExclusiveAccessRegistrants`], and every registrant is a holder (8, NVMe 6).
    ExclusiveAccessAll,
}

impl ReservationType {
    /// Types, in NVMe's order.
    pub const ALL: [ReservationType; 6] = [
        ReservationType::WriteExclusive,
        ReservationType::ExclusiveAccess,
        ReservationType::WriteExclusiveRegistrants,
        ReservationType::ExclusiveAccessRegistrants,
        ReservationType::WriteExclusiveAll,
        ReservationType::ExclusiveAccessAll,
    ];
    const SCSI: [u8; 6] = [1, 3, 5, 6, 7, 8];

    /// Returns the code of SPC-4's TYPE field.
    pub fn scsi(self) -> u8 {
        Self::SCSI[self as usize]
    }

    /// Returns the code of NVMe's RTYPE field.
    pub fn nvme(self) -> u8 {
        self as u8 + 1
    }

    /// Decodes SPC-4's TYPE field; `None` for other codes.
    pub fn from_scsi(code: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.scsi() == code)
    }

    /// Decodes NVMe's RTYPE field; `None` for other codes.
    pub fn from_nvme(code: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.nvme() == code)
    }

    /// Returns whether every registrant is a holder.
    pub fn is_held_by_all(self) -> bool {
        matches!(self, ReservationType::WriteExclusiveAll | ReservationType::ExclusiveAccessAll)
    }

    /// Returns whether registrants that are not holders can write too, and so are notified when it is released.
    fn admits_registrants(self) -> bool {
        !matches!(self, ReservationType::WriteExclusive | ReservationType::ExclusiveAccess)
    }

    /// Returns whether hosts that it excludes may still read.
    fn lets_read(self) -> bool {
        matches!(
            self,
            ReservationType::WriteExclusive
                | ReservationType::WriteExclusiveRegistrants
                | ReservationType::WriteExclusiveAll
        )
    }
}

/// Access of a command to a volume, as reservations distinguish it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ReservationAccess {
    /// Reads data.
    Read,
    /// Changes data, or any other state visible to other hosts.
    Write,
}

/// Registered host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Registrant {
    /// Host identity.
    pub host: HostId,
    /// Reservation key; never 0.
    pub key: u64,
}

/// Reservation in force.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HeldReservation {
    /// Reservation type.
    pub kind: ReservationType,
    /// Host that made it; where [`ReservationType::is_held_by_all`], every registrant is a holder.
    pub holder: HostId,
}

/// Reservation command of a host.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ReservationAction {
    /// SPC-4's REGISTER, and with `current` left out REGISTER AND IGNORE EXISTING KEY: registers, changes the key, or
    /// unregisters with the new key 0.
    Register {
        /// Key that the host claims to have; 0 while it is not registered.  `None`: not checked.
        current: Option<u64>,
        /// New key; 0 for none.
        new: u64,
        /// Survival of registrations and reservation over a restart from now on.  `None`: unchanged.
        persist: Option<bool>,
    },
    /// NVMe's Reservation Register with the action "register"; registering again with the same key is no error.
    Add {
        /// New key.
        key: u64,
        /// Persistence, as in [`ReservationAction::Register`].
        persist: Option<bool>,
    },
    /// NVMe's Reservation Register with the action "replace", for a registrant.
    Replace {
        /// Current key; `None`: not checked.
        current: Option<u64>,
        /// New key.
        new: u64,
        /// Persistence, as in [`ReservationAction::Register`].
        persist: Option<bool>,
    },
    /// NVMe's Reservation Register with the action "unregister", for a registrant.
    Remove {
        /// Current key; `None`: not checked.
        current: Option<u64>,
        /// Persistence, as in [`ReservationAction::Register`].
        persist: Option<bool>,
    },
    /// SPC-4's REGISTER AND MOVE: the holder moves its reservation to another host, which is registered with it.
    Move {
        /// Key of the holder.
        key: u64,
        /// Key that the other host gets.
        new: u64,
        /// New holder.
        to: HostId,
        /// Unregister the previous holder.
        unregister: bool,
        /// Persistence, as in [`ReservationAction::Register`].
        persist: Option<bool>,
    },
    /// Acquires the reservation.
    Reserve {
        /// Key of the host.
        key: u64,
        /// Reservation type.
        kind: ReservationType,
    },
    /// Releases the reservation.
    Release {
        /// Key of the host; `None`: not checked (NVMe's IEKEY).
        key: Option<u64>,
        /// Type of the reservation to release.
        kind: ReservationType,
    },
    /// Removes the reservation and all registrations.
    Clear {
        /// Key of the host; `None`: not checked (NVMe's IEKEY).
        key: Option<u64>,
    },
    /// Removes the registrations with a key, and takes the reservation if one of them was its holder.
    Preempt {
        /// Key of the host.
        key: u64,
        /// Key of the registrations to remove; 0: all holders of an "all registrants" reservation.
        victim: u64,
        /// Type of the new reservation.
        kind: ReservationType,
        /// Abort the commands of the preempted hosts.
        abort: bool,
    },
    /// SPC-2's RESERVE: reserves the volume for this host until it releases it, its session ends or the volume is
    /// reset.
    HoldWhole,
    /// SPC-2's RELEASE; does nothing for a host that is not the holder.
    LetGoWhole,
    /// Reset of the volume: ends an SPC-2 reservation.
    Reset,
}

/// Reason for refusing an action; nothing has changed then.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refusal {
    /// Conflict with another host's rights, or a wrong key (RESERVATION CONFLICT).
    Conflict,
    /// Invalid combination of parameters (INVALID FIELD IN PARAMETER LIST, Invalid Field in Command).
    Invalid,
    /// Reservation of another type (INVALID RELEASE OF PERSISTENT RESERVATION).
    WrongKind,
    /// Too many registrants (INSUFFICIENT REGISTRATION RESOURCES).
    TooMany,
    /// Not supported for this volume (INVALID COMMAND OPERATION CODE).
    Unsupported,
}

/// Effect of an action.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ReservationChange {
    /// Hosts whose commands must be aborted now.
    pub abort: Vec<HostId>,
}

/// Kind of an event that other hosts are notified of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EventKind {
    /// Reservation was released, or has another type now.
    Released,
    /// Registration of the host was preempted by another host.
    RegistrationPreempted,
    /// Reservation and all registrations were cleared by another host.
    Cleared,
}

/// Notification of hosts.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ReservationEvent {
    /// Event number, counted from 1.
    pub number: u64,
    /// Kind of event.
    pub kind: EventKind,
    /// Hosts to notify.
    pub hosts: Arc<[HostId]>,
}

/// Registrants, the reservation, and events to deliver.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct ReservationTable {
    pub(super) registrants: Vec<Registrant>,
    pub(super) held: Option<HeldReservation>,
    pub(super) persist: bool,
    pub(super) generation: u32,
    whole: Option<HostId>,
    pub(super) events: VecDeque<ReservationEvent>,
    pub(super) told: u64,
    pub(super) revision: u64,
}

impl ReservationTable {
    /// Creates an empty table.
    pub fn new() -> Self {
        Self::default()
    }

    /// Returns the registrants, in the order of registration.
    pub fn registrants(&self) -> &[Registrant] {
        &self.registrants
    }

    /// Returns the reservation in force.
    pub fn held(&self) -> Option<&HeldReservation> {
        self.held.as_ref()
    }

    /// Returns the holder of the SPC-2 reservation.
    pub fn whole(&self) -> Option<&HostId> {
        self.whole.as_ref()
    }

    /// Returns PRGENERATION (NVMe: GEN): counts changes of registrations, from 0 at the start of the daemon, or of the
    /// first of several that serve the volume.
    pub fn generation(&self) -> u32 {
        self.generation
    }

    /// Returns the number of changes that the table has had.  Tables that several daemons share keep it in their stored form,
    /// so that two tables of a volume with the same revision are the same.
    pub fn revision(&self) -> u64 {
        self.revision
    }

    /// Returns whether registrations and reservation survive a restart (APTPL, PTPLS).
    pub fn persists(&self) -> bool {
        self.persist
    }

    /// Returns the host's key; `None` if it is not registered.
    pub fn key_of(&self, host: &HostId) -> Option<u64> {
        self.registrants.iter().find(|registrant| registrant.host == *host).map(|registrant| registrant.key)
    }

    /// Returns whether the host is a holder of the reservation, possibly one of several.
    pub fn is_holder(&self, host: &HostId) -> bool {
        self.held.as_ref().is_some_and(|held| match held.kind.is_held_by_all() {
            true => self.key_of(host).is_some(),
            false => held.holder == *host,
        })
    }

    /// Returns whether any reservation is in force, so that hosts may be refused access.
    pub fn restricts(&self) -> bool {
        self.held.is_some() || self.whole.is_some()
    }

    /// Returns whether a host is allowed this access now; `None` is an anonymous host, for example over NBD.
    pub fn allows(&self, host: Option<&HostId>, access: ReservationAccess) -> bool {
        if self.whole.as_ref().is_some_and(|holder| Some(holder) != host) {
            return false;
        }
        let Some(held) = &self.held else { return true };
        if access == ReservationAccess::Read && held.kind.lets_read() {
            return true;
        }
        match host {
            None => false,
            Some(host) if held.kind.admits_registrants() => self.key_of(host).is_some(),
            Some(host) => held.holder == *host,
        }
    }

    /// Returns the events after number `number` that are still kept, oldest first.
    pub fn events_after(&self, number: u64) -> impl Iterator<Item = &ReservationEvent> {
        self.events.iter().filter(move |event| event.number > number)
    }

    /// Returns the number of the newest event; 0 when there was none.
    pub fn last_event(&self) -> u64 {
        self.told
    }

    /// Executes a host's action, or refuses it and changes nothing.
    pub fn apply(&mut self, host: &HostId, action: &ReservationAction) -> Result<ReservationChange, Refusal> {
        match action {
            ReservationAction::HoldWhole => return self.hold_whole(host),
            ReservationAction::LetGoWhole => {
                self.whole.take_if(|holder| holder == host);
                return Ok(ReservationChange::default());
            }
            ReservationAction::Reset => {
                self.whole = None;
                return Ok(ReservationChange::default());
            }
            _ => {}
        }
        if self.whole.as_ref().is_some_and(|holder| holder != host) {
            return Err(Refusal::Conflict);
        }
        match *action {
            ReservationAction::Register { current, new, persist } => {
                // A host that is not registered has the key 0.
                let has = self.key_of(host).unwrap_or(0);
                if current.is_some_and(|current| current != has) {
                    return Err(Refusal::Conflict);
                }
                match (has, new) {
                    // Does nothing, which is no error (SPC-4, table 64) and no change.
                    (0, 0) => return Ok(ReservationChange::default()),
                    (0, key) => self.add(host, key)?,
                    (_, 0) => self.remove(host),
                    (_, key) => self.replace(host, key),
                }
                self.registered(persist)
            }
            ReservationAction::Add { key, persist } => {
                match self.key_of(host) {
                    _ if key == 0 => return Err(Refusal::Invalid),
                    None => self.add(host, key)?,
                    Some(has) if has == key => {}
                    Some(_) => return Err(Refusal::Conflict),
                }
                self.registered(persist)
            }
            ReservationAction::Replace { current, new, persist } => {
                self.check_registrant(host, current)?;
                if new == 0 {
                    return Err(Refusal::Invalid);
                }
                self.replace(host, new);
                self.registered(persist)
            }
            ReservationAction::Remove { current, persist } => {
                self.check_registrant(host, current)?;
                self.remove(host);
                self.registered(persist)
            }
            ReservationAction::Move { key, new, ref to, unregister, persist } => {
                self.check_registrant(host, Some(key))?;
                self.give(host, new, to, unregister)?;
                self.registered(persist)
            }
            ReservationAction::Reserve { key, kind } => {
                self.check_registrant(host, Some(key))?;
                match &self.held {
                    None => self.held = Some(HeldReservation { kind, holder: host.clone() }),
                    Some(held) if held.kind == kind && self.is_holder(host) => {}
                    Some(_) => return Err(Refusal::Conflict),
                }
                Ok(ReservationChange::default())
            }
            ReservationAction::Release { key, kind } => {
                self.check_registrant(host, key)?;
                // For a host that is not a holder, it does nothing and is no error (SPC-4, 5.13.11.1.2).
                if self.is_holder(host) {
                    if self.held.as_ref().is_some_and(|held| held.kind != kind) {
                        return Err(Refusal::WrongKind);
                    }
                    self.release(host);
                }
                Ok(ReservationChange::default())
            }
            ReservationAction::Clear { key } => {
                self.check_registrant(host, key)?;
                let others = self.others(host);
                self.registrants.clear();
                self.held = None;
                self.tell(EventKind::Cleared, others);
                self.registered(None)
            }
            ReservationAction::Preempt { key, victim, kind, abort } => {
                self.check_registrant(host, Some(key))?;
                self.preempt(host, victim, kind, abort)
            }
            ReservationAction::HoldWhole | ReservationAction::LetGoWhole | ReservationAction::Reset => {
                Ok(ReservationChange::default())
            }
        }
    }

    /// Clears all registrations and reservations, for administrators.
    pub fn clear_all(&mut self) {
        let hosts: Vec<HostId> = self.registrants.drain(..).map(|registrant| registrant.host).collect();
        self.held = None;
        self.whole = None;
        if !hosts.is_empty() {
            self.generation = self.generation.wrapping_add(1);
        }
        self.tell(EventKind::Cleared, hosts);
    }

    /// Acquires an SPC-2 reservation; it and persistent reservations exclude each other (SPC-2, 5.5.1).
    fn hold_whole(&mut self, host: &HostId) -> Result<ReservationChange, Refusal> {
        let other = self.whole.as_ref().is_some_and(|holder| holder != host);
        if other || !self.registrants.is_empty() {
            return Err(Refusal::Conflict);
        }
        self.whole = Some(host.clone());
        Ok(ReservationChange::default())
    }

    fn check_registrant(&self, host: &HostId, key: Option<u64>) -> Result<(), Refusal> {
        match self.key_of(host) {
            Some(has) if key.is_none_or(|key| key == has) => Ok(()),
            _ => Err(Refusal::Conflict),
        }
    }

    /// Counts a change of registrations, and sets persistence.
    fn registered(&mut self, persist: Option<bool>) -> Result<ReservationChange, Refusal> {
        self.generation = self.generation.wrapping_add(1);
        if let Some(persist) = persist {
            self.persist = persist;
        }
        Ok(ReservationChange::default())
    }

    fn add(&mut self, host: &HostId, key: u64) -> Result<(), Refusal> {
        if self.registrants.len() >= REGISTRANTS_MAX {
            return Err(Refusal::TooMany);
        }
        self.registrants.push(Registrant { host: host.clone(), key });
        Ok(())
    }

    fn replace(&mut self, host: &HostId, key: u64) {
        if let Some(registrant) = self.registrants.iter_mut().find(|registrant| registrant.host == *host) {
            registrant.key = key;
        }
    }

    /// Removes a registration, and with its last holder the reservation (SPC-4, 5.13.11.1.3).
    fn remove(&mut self, host: &HostId) {
        let was_holder = self.is_holder(host);
        self.registrants.retain(|registrant| registrant.host != *host);
        let Some(held) = &mut self.held else { return };
        if !was_holder {
            return;
        }
        if !held.kind.is_held_by_all() {
            self.release(host);
        } else if let Some(first) = self.registrants.first() {
            held.holder = first.host.clone();
        } else {
            self.held = None;
        }
    }

    /// Releases the reservation.  Registrants that could write because of it are notified.
    fn release(&mut self, host: &HostId) {
        if self.held.take().is_some_and(|held| held.kind.admits_registrants()) {
            let others = self.others(host);
            self.tell(EventKind::Released, others);
        }
    }

    fn give(&mut self, host: &HostId, new: u64, to: &HostId, unregister: bool) -> Result<(), Refusal> {
        let Some(held) = &self.held else { return Err(Refusal::Conflict) };
        if held.kind.is_held_by_all() || held.holder != *host {
            return Err(Refusal::Conflict);
        }
        if new == 0 || to == host {
            return Err(Refusal::Invalid);
        }
        let kind = held.kind;
        match self.key_of(to) {
            Some(_) => self.replace(to, new),
            None => self.add(to, new)?,
        }
        self.held = Some(HeldReservation { kind, holder: to.clone() });
        if unregister {
            self.registrants.retain(|registrant| registrant.host != *host);
        }
        Ok(())
    }

    /// Preempts registrations: SPC-4, 5.13.11.2, and NVM Express Base 2.0, 8.19.7.
    fn preempt(
        &mut self,
        host: &HostId,
        victim: u64,
        kind: ReservationType,
        abort: bool,
    ) -> Result<ReservationChange, Refusal> {
        // True if the command replaces the reservation by one of the issuer's own.
        let takes = match &self.held {
            Some(held) if held.kind.is_held_by_all() => victim == 0,
            Some(held) => self.key_of(&held.holder) == Some(victim),
            None => false,
        };
        let everybody = takes && victim == 0;
        if victim == 0 && !everybody {
            return Err(Refusal::Invalid);
        }
        let is_victim = |registrant: &Registrant| everybody || registrant.key == victim;
        // A host may preempt itself, which changes the type of its reservation; otherwise the key must have a
        // registrant.
        if !self.registrants.iter().any(is_victim) {
            return Err(Refusal::Conflict);
        }
        // The new holder stays registered, even with the preempted key (SPC-4, 5.13.11.2.4).
        let mut gone: Vec<HostId> = self
            .registrants
            .iter()
            .filter(|registrant| is_victim(registrant) && !(takes && registrant.host == *host))
            .map(|registrant| registrant.host.clone())
            .collect();
        self.registrants.retain(|registrant| !gone.contains(&registrant.host));
        let before = self.held.as_ref().map(|held| held.kind);
        if takes {
            self.held = Some(HeldReservation { kind, holder: host.clone() });
            if before != Some(kind) {
                let others = self.others(host);
                self.tell(EventKind::Released, others);
            }
        } else if let Some(held) = self.held.take() {
            // An "all registrants" reservation stays with the remaining registrants.
            let holder = match gone.contains(&held.holder) {
                false => Some(held.holder),
                true => self.registrants.first().map(|registrant| registrant.host.clone()),
            };
            self.held = holder.map(|holder| HeldReservation { kind: held.kind, holder });
        }
        gone.retain(|gone| gone != host);
        self.tell(EventKind::RegistrationPreempted, gone.clone());
        self.registered(None)?;
        Ok(ReservationChange { abort: if abort { gone } else { Vec::new() } })
    }

    fn others(&self, host: &HostId) -> Vec<HostId> {
        let others = self.registrants.iter().filter(|registrant| registrant.host != *host);
        others.map(|registrant| registrant.host.clone()).collect()
    }

    fn tell(&mut self, kind: EventKind, hosts: Vec<HostId>) {
        if hosts.is_empty() {
            return;
        }
        if self.events.len() == EVENTS_MAX {
            self.events.pop_front();
        }
        self.told += 1;
        self.events.push_back(ReservationEvent { number: self.told, kind, hosts: hosts.into() });
    }
}
