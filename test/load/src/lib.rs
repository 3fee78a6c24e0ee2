//! Shared parts of the test initiators in `test/`.
//!
//! [`load`] keeps a number of commands in flight and measures their rate; an initiator provides a [`Session`].
//! [`counted`] is a pool whose reads are counted and take time.  [`dice`] is a seeded random generator.  [`log`] collects log lines.  [`model`] is a volume in a byte vector, with
//! the simulated worlds in which targets are tested.

#![warn(missing_docs)]

pub mod counted;
pub mod dice;
pub mod load;
pub mod log;
pub mod model;

pub use dice::Dice;
pub use load::{Load, Pattern, Session};
