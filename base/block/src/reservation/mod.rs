//! Reservations: which hosts may read and write a volume that several have attached.
//!
//! SCSI's persistent reservations (SPC-4, 5.13) and NVMe's (NVM Express Base 2.0, 8.19) have the same semantics under
//! two names: hosts register with a key, a registrant may hold a reservation of one of six types, and a registrant may
//! preempt another's registration and reservation.  [`ReservationTable`] is that state machine, without I/O; fronts
//! translate their commands into [`ReservationAction`]s, so a volume exported over both protocols has one table.
//! [`Reservations`] keeps the table of an open volume on the core that owns the volume, durable where hosts requested
//! it, and readable from every core without a lock.  Daemons that serve the same volume share one stored table:
//! [`ReservationPeers`].  A daemon that reaches the volume through another one has a copy of that one's table:
//! [`ReservationMirror`].
//!
//! The stored form is described in `docs/formats/reservations.md`.

mod format;
mod mirror;
mod owner;
mod peers;
mod shared;
mod table;
#[cfg(test)]
mod tests;

pub use mirror::{ReservationAuthority, ReservationMirror};
pub use peers::{Joint, ReservationPeers};
pub use shared::{Changes, Keep, ReservationView, Reservations};
pub use table::{
    EventKind, HOST_ID_LEN_MAX, HeldReservation, HostId, REGISTRANTS_MAX, Refusal, Registrant, ReservationAccess,
    ReservationAction, ReservationChange, ReservationEvent, ReservationTable, ReservationType,
};
