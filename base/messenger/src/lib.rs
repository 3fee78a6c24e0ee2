//! Moves messages between processes: ordered, typed, over TCP, Unix sockets, shared memory or within the process.
//!
//! [`wire`] is Ceph's msgr2.1 in bytes, [`session`] its state machines without any I/O.  How the parts work together is
//! in `docs/design/messenger.md`, what goes over the wire in `docs/formats/msgr2.md`.

#[cfg(any(fuzzing, test, feature = "fuzz"))]
pub mod fuzz;
pub mod session;
pub mod wire;
