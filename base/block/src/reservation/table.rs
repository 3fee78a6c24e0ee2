//! The state machine.

use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;

/// Longest [`HostId`] in bytes: an iSCSI initiator's transport id, its session's and its target port's, and room.
pub const HOST_ID_LEN_MAX: usize = 512;
/// Most registrants of a volume.
pub const REGISTRANTS_MAX: usize = 1024;
/// Events that are remembered for hosts that have not looked yet.
pub(super) const EVENTS_MAX: usize = 64;

/// Who a host is, in the terms of its protocol: an I_T nexus for SCSI, a host identifier for NVMe.  Only its
/// equality means something here.  Fronts begin it with their name, so that identities of two protocols never meet.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct HostId(Arc<[u8]>);

impl HostId {
    /// `None` when it is empty or longer than [`HOST_ID_LEN_MAX`].
    pub fn new(bytes: &[u8]) -> Option<Self> {
        (1..=HOST_ID_LEN_MAX).contains(&bytes.len()).then(|| Self(bytes.into()))
    }

    /// Its bytes.
    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }
}

impl fmt::Debug for HostId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.0.escape_ascii())
    }
}

/// The kinds of reservation.  The numbers are SPC-4's TYPE field; NVMe's RTYPE counts them from 1 to 6.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Kind {
    /// Others may read (1, NVMe 1).
    WriteExclusive,
    /// Others may do neither (3, NVMe 2).
    ExclusiveAccess,
    /// Registrants may read and write, others read (5, NVMe 3).
    WriteExclusiveRegistrants,
    /// Registrants may read and write, others do neither (6, NVMe 4).
    ExclusiveAccessRegistrants,
    /// As [`Kind::WriteExclusiveRegistrants`], and every registrant holds it (7, NVMe 5).
    WriteExclusiveAll,
    /// As [`Kind::ExclusiveAccessRegistrants`], and every registrant holds it (8, NVMe 6).
    ExclusiveAccessAll,
}

impl Kind {
    /// All of them, in NVMe's order.
    pub const ALL: [Kind; 6] = [
        Kind::WriteExclusive,
        Kind::ExclusiveAccess,
        Kind::WriteExclusiveRegistrants,
        Kind::ExclusiveAccessRegistrants,
        Kind::WriteExclusiveAll,
        Kind::ExclusiveAccessAll,
    ];
    const SCSI: [u8; 6] = [1, 3, 5, 6, 7, 8];

    /// SPC-4's TYPE field.
    pub fn scsi(self) -> u8 {
        Self::SCSI[self as usize]
    }

    /// NVMe's RTYPE field.
    pub fn nvme(self) -> u8 {
        self as u8 + 1
    }

    /// From SPC-4's TYPE field.
    pub fn from_scsi(code: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.scsi() == code)
    }

    /// From NVMe's RTYPE field.
    pub fn from_nvme(code: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| kind.nvme() == code)
    }

    /// Every registrant holds it.
    pub fn is_held_by_all(self) -> bool {
        matches!(self, Kind::WriteExclusiveAll | Kind::ExclusiveAccessAll)
    }

    /// Registrants that do not hold it can write too, and so are told when it goes.
    fn admits_registrants(self) -> bool {
        !matches!(self, Kind::WriteExclusive | Kind::ExclusiveAccess)
    }

    /// Those it keeps out may still read.
    fn lets_read(self) -> bool {
        matches!(self, Kind::WriteExclusive | Kind::WriteExclusiveRegistrants | Kind::WriteExclusiveAll)
    }
}

/// What a command does to a volume, as far as reservations care.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Access {
    /// It reads data.
    Read,
    /// It changes data, or anything else that others would see.
    Write,
}

/// A host that is registered.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Registrant {
    /// Who.
    pub host: HostId,
    /// Its key; never 0.
    pub key: u64,
}

/// The reservation that is in force.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Held {
    /// Which kind.
    pub kind: Kind,
    /// Who made it; where [`Kind::is_held_by_all`], every registrant holds it.
    pub holder: HostId,
}

/// What a host asks for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Action {
    /// SPC-4's REGISTER, and with `current` left out REGISTER AND IGNORE EXISTING KEY: registers, changes the key, or
    /// with the new key 0 unregisters.
    Register {
        /// The key it says it has; 0 while it is not registered.  `None`: not asked for.
        current: Option<u64>,
        /// The key it wants; 0 for none.
        new: u64,
        /// From now on registrations and reservation survive a restart, or do not.  `None`: as before.
        persist: Option<bool>,
    },
    /// NVMe's Reservation Register with the action "register": registers; being registered with the same key is no
    /// error.
    Add {
        /// The key it wants.
        key: u64,
        /// As in [`Action::Register`].
        persist: Option<bool>,
    },
    /// NVMe's Reservation Register with the action "replace", for a registrant.
    Replace {
        /// The key it has; `None`: not asked for.
        current: Option<u64>,
        /// The key it wants.
        new: u64,
        /// As in [`Action::Register`].
        persist: Option<bool>,
    },
    /// NVMe's Reservation Register with the action "unregister", for a registrant.
    Remove {
        /// The key it has; `None`: not asked for.
        current: Option<u64>,
        /// As in [`Action::Register`].
        persist: Option<bool>,
    },
    /// SPC-4's REGISTER AND MOVE: the holder gives its reservation to another host, which is registered with it.
    Move {
        /// The key it has.
        key: u64,
        /// The key that the other gets.
        new: u64,
        /// The other.
        to: HostId,
        /// The one who gives it is registered no more.
        unregister: bool,
        /// As in [`Action::Register`].
        persist: Option<bool>,
    },
    /// Takes the reservation.
    Reserve {
        /// The key it has.
        key: u64,
        /// Which kind.
        kind: Kind,
    },
    /// Gives the reservation up.
    Release {
        /// The key it has; `None`: not asked for (NVMe's IEKEY).
        key: Option<u64>,
        /// The kind that it holds.
        kind: Kind,
    },
    /// Removes the reservation and all registrations.
    Clear {
        /// The key it has; `None`: not asked for (NVMe's IEKEY).
        key: Option<u64>,
    },
    /// Removes the registrations with a key, and takes the reservation if one of them held it.
    Preempt {
        /// The key it has.
        key: u64,
        /// The key of those who go; 0: all who hold an "all registrants" reservation.
        victim: u64,
        /// The kind of the reservation it then has.
        kind: Kind,
        /// The commands of those who go are to be aborted.
        abort: bool,
    },
    /// SPC-2's RESERVE: the volume to itself, until it lets go of it, its session ends or the volume is reset.
    HoldWhole,
    /// SPC-2's RELEASE; of one who does not hold it, it does nothing.
    LetGoWhole,
    /// A reset of the volume: whoever holds it whole does so no more.
    Reset,
}

/// Why an action was refused; nothing has changed then.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Refusal {
    /// Another host's rights, or a key that is not the host's (RESERVATION CONFLICT).
    Conflict,
    /// The parameters make no sense together (INVALID FIELD IN PARAMETER LIST, Invalid Field in Command).
    Invalid,
    /// The reservation is of another kind (INVALID RELEASE OF PERSISTENT RESERVATION).
    WrongKind,
    /// There are too many registrants (INSUFFICIENT REGISTRATION RESOURCES).
    TooMany,
    /// Not offered for this volume (INVALID COMMAND OPERATION CODE).
    Unsupported,
}

/// What an action did.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Change {
    /// Hosts whose commands are to be aborted now.
    pub abort: Vec<HostId>,
}

/// What hosts are told that an action of another concerns.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EventKind {
    /// The reservation was released, or is of another kind now.
    Released,
    /// The host's registration was taken by another.
    RegistrationPreempted,
    /// Another host has cleared the reservation and all registrations.
    Cleared,
}

/// Something that hosts are told.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Event {
    /// Counted from 1.
    pub number: u64,
    /// What.
    pub kind: EventKind,
    /// Who is told.
    pub hosts: Arc<[HostId]>,
}

/// Registrants, the reservation, and what there is to tell.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Table {
    pub(super) registrants: Vec<Registrant>,
    pub(super) held: Option<Held>,
    pub(super) persist: bool,
    pub(super) generation: u32,
    whole: Option<HostId>,
    pub(super) events: VecDeque<Event>,
    pub(super) told: u64,
}

impl Table {
    /// Nobody is registered.
    pub fn new() -> Self {
        Self::default()
    }

    /// Those who are registered, in the order in which they came.
    pub fn registrants(&self) -> &[Registrant] {
        &self.registrants
    }

    /// The reservation.
    pub fn held(&self) -> Option<&Held> {
        self.held.as_ref()
    }

    /// Who holds the whole volume (SPC-2's RESERVE).
    pub fn whole(&self) -> Option<&HostId> {
        self.whole.as_ref()
    }

    /// PRGENERATION, NVMe's GEN: counts what changes registrations, from 0 at the start of the daemon, or of the first
    /// of several that serve the volume.
    pub fn generation(&self) -> u32 {
        self.generation
    }

    /// Registrations and reservation survive a restart (APTPL, PTPLS).
    pub fn persists(&self) -> bool {
        self.persist
    }

    /// The host's key.
    pub fn key_of(&self, host: &HostId) -> Option<u64> {
        self.registrants.iter().find(|registrant| registrant.host == *host).map(|registrant| registrant.key)
    }

    /// The host holds the reservation, maybe with others.
    pub fn is_holder(&self, host: &HostId) -> bool {
        self.held.as_ref().is_some_and(|held| match held.kind.is_held_by_all() {
            true => self.key_of(host).is_some(),
            false => held.holder == *host,
        })
    }

    /// Somebody may be refused something.
    pub fn restricts(&self) -> bool {
        self.held.is_some() || self.whole.is_some()
    }

    /// Whether a host may do something now; `None` is a host that has no name, over NBD for one.
    pub fn allows(&self, host: Option<&HostId>, access: Access) -> bool {
        if self.whole.as_ref().is_some_and(|holder| Some(holder) != host) {
            return false;
        }
        let Some(held) = &self.held else { return true };
        if access == Access::Read && held.kind.lets_read() {
            return true;
        }
        match host {
            None => false,
            Some(host) if held.kind.admits_registrants() => self.key_of(host).is_some(),
            Some(host) => held.holder == *host,
        }
    }

    /// Events after the one of that number that are still remembered, oldest first.
    pub fn events_after(&self, number: u64) -> impl Iterator<Item = &Event> {
        self.events.iter().filter(move |event| event.number > number)
    }

    /// The number of the newest event; 0 when there was none.
    pub fn last_event(&self) -> u64 {
        self.told
    }

    /// Does what a host asks for, or says why not and changes nothing.
    pub fn apply(&mut self, host: &HostId, action: &Action) -> Result<Change, Refusal> {
        match action {
            Action::HoldWhole => return self.hold_whole(host),
            Action::LetGoWhole => {
                self.whole.take_if(|holder| holder == host);
                return Ok(Change::default());
            }
            Action::Reset => {
                self.whole = None;
                return Ok(Change::default());
            }
            _ => {}
        }
        if self.whole.as_ref().is_some_and(|holder| holder != host) {
            return Err(Refusal::Conflict);
        }
        match *action {
            Action::Register { current, new, persist } => {
                // One who is not registered has the key 0.
                let has = self.key_of(host).unwrap_or(0);
                if current.is_some_and(|current| current != has) {
                    return Err(Refusal::Conflict);
                }
                match (has, new) {
                    // Nothing to do, which is no error (SPC-4, table 64) and no change.
                    (0, 0) => return Ok(Change::default()),
                    (0, key) => self.add(host, key)?,
                    (_, 0) => self.remove(host),
                    (_, key) => self.replace(host, key),
                }
                self.registered(persist)
            }
            Action::Add { key, persist } => {
                match self.key_of(host) {
                    _ if key == 0 => return Err(Refusal::Invalid),
                    None => self.add(host, key)?,
                    Some(has) if has == key => {}
                    Some(_) => return Err(Refusal::Conflict),
                }
                self.registered(persist)
            }
            Action::Replace { current, new, persist } => {
                self.check_registrant(host, current)?;
                if new == 0 {
                    return Err(Refusal::Invalid);
                }
                self.replace(host, new);
                self.registered(persist)
            }
            Action::Remove { current, persist } => {
                self.check_registrant(host, current)?;
                self.remove(host);
                self.registered(persist)
            }
            Action::Move { key, new, ref to, unregister, persist } => {
                self.check_registrant(host, Some(key))?;
                self.give(host, new, to, unregister)?;
                self.registered(persist)
            }
            Action::Reserve { key, kind } => {
                self.check_registrant(host, Some(key))?;
                match &self.held {
                    None => self.held = Some(Held { kind, holder: host.clone() }),
                    Some(held) if held.kind == kind && self.is_holder(host) => {}
                    Some(_) => return Err(Refusal::Conflict),
                }
                Ok(Change::default())
            }
            Action::Release { key, kind } => {
                self.check_registrant(host, key)?;
                // Of one who does not hold it, it does nothing and is no error (SPC-4, 5.13.11.1.2).
                if self.is_holder(host) {
                    if self.held.as_ref().is_some_and(|held| held.kind != kind) {
                        return Err(Refusal::WrongKind);
                    }
                    self.release(host);
                }
                Ok(Change::default())
            }
            Action::Clear { key } => {
                self.check_registrant(host, key)?;
                let others = self.others(host);
                self.registrants.clear();
                self.held = None;
                self.tell(EventKind::Cleared, others);
                self.registered(None)
            }
            Action::Preempt { key, victim, kind, abort } => {
                self.check_registrant(host, Some(key))?;
                self.preempt(host, victim, kind, abort)
            }
            Action::HoldWhole | Action::LetGoWhole | Action::Reset => Ok(Change::default()),
        }
    }

    /// Forgets all registrations and whatever is held, as an administrator may.
    pub fn clear_all(&mut self) {
        let hosts: Vec<HostId> = self.registrants.drain(..).map(|registrant| registrant.host).collect();
        self.held = None;
        self.whole = None;
        if !hosts.is_empty() {
            self.generation = self.generation.wrapping_add(1);
        }
        self.tell(EventKind::Cleared, hosts);
    }

    /// The two kinds of reservation keep out of each other's way (SPC-2, 5.5.1).
    fn hold_whole(&mut self, host: &HostId) -> Result<Change, Refusal> {
        let other = self.whole.as_ref().is_some_and(|holder| holder != host);
        if other || !self.registrants.is_empty() {
            return Err(Refusal::Conflict);
        }
        self.whole = Some(host.clone());
        Ok(Change::default())
    }

    fn check_registrant(&self, host: &HostId, key: Option<u64>) -> Result<(), Refusal> {
        match self.key_of(host) {
            Some(has) if key.is_none_or(|key| key == has) => Ok(()),
            _ => Err(Refusal::Conflict),
        }
    }

    /// Registrations have changed.
    fn registered(&mut self, persist: Option<bool>) -> Result<Change, Refusal> {
        self.generation = self.generation.wrapping_add(1);
        if let Some(persist) = persist {
            self.persist = persist;
        }
        Ok(Change::default())
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

    /// A registration goes, and with its holder the reservation (SPC-4, 5.13.11.1.3).
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

    /// The reservation ends.  Those who could write because of it are told.
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
        self.held = Some(Held { kind, holder: to.clone() });
        if unregister {
            self.registrants.retain(|registrant| registrant.host != *host);
        }
        Ok(())
    }

    /// SPC-4, 5.13.11.2, and NVM Express Base 2.0, 8.19.7.
    fn preempt(&mut self, host: &HostId, victim: u64, kind: Kind, abort: bool) -> Result<Change, Refusal> {
        // What the command does to the reservation: nothing, or one of the issuer's own in its place.
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
        // One may preempt oneself, which changes the kind of one's reservation; otherwise somebody must have the key.
        if !self.registrants.iter().any(is_victim) {
            return Err(Refusal::Conflict);
        }
        // Who takes the reservation stays registered, even with the key that goes (SPC-4, 5.13.11.2.4).
        let mut gone: Vec<HostId> = self
            .registrants
            .iter()
            .filter(|registrant| is_victim(registrant) && !(takes && registrant.host == *host))
            .map(|registrant| registrant.host.clone())
            .collect();
        self.registrants.retain(|registrant| !gone.contains(&registrant.host));
        let before = self.held.as_ref().map(|held| held.kind);
        if takes {
            self.held = Some(Held { kind, holder: host.clone() });
            if before != Some(kind) {
                let others = self.others(host);
                self.tell(EventKind::Released, others);
            }
        } else if let Some(held) = self.held.take() {
            // One that all registrants hold goes on with those who are left.
            let holder = match gone.contains(&held.holder) {
                false => Some(held.holder),
                true => self.registrants.first().map(|registrant| registrant.host.clone()),
            };
            self.held = holder.map(|holder| Held { kind: held.kind, holder });
        }
        gone.retain(|gone| gone != host);
        self.tell(EventKind::RegistrationPreempted, gone.clone());
        self.registered(None)?;
        Ok(Change { abort: if abort { gone } else { Vec::new() } })
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
        self.events.push_back(Event { number: self.told, kind, hosts: hosts.into() });
    }
}
