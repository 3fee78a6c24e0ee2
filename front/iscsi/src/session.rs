//! The protocol without any I/O: logging in, cutting the stream into PDUs, gathering what is sent.

pub mod chap;
pub mod login;
pub mod params;
pub mod receive;
pub mod reply;
pub mod text;
pub mod window;
