//! The side of a command: finds the daemon or opens the store, and shows how far things have come.

pub mod direct;
pub mod http;
pub mod progress;
pub mod session;
