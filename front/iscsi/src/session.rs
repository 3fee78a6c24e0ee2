//! iSCSI protocol without I/O: login, PDU parsing, and batching of output.

pub mod chap;
pub mod login;
pub mod params;
pub mod receive;
pub mod reply;
pub mod text;
pub mod window;
