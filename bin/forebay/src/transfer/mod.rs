//! Images in and out: the framing between command and daemon, and the files at the command's end.

pub mod container;
pub mod diff;
pub mod sink;
pub mod source;
