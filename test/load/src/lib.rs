//! What the initiators of `test/` share.
//!
//! [`load`] keeps a number of commands under way and says how fast they were; an initiator brings a
//! [`Session`].  [`dice`] is chance from a seed.  [`model`] is a volume that is a vector of bytes, and the
//! simulated worlds that targets are tested in.

#![warn(missing_docs)]

pub mod dice;
pub mod load;
pub mod model;

pub use dice::Dice;
pub use load::{Load, Pattern, Session};
