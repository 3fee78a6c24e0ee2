//! Files, devices and streams that images are imported from and exported to.

pub mod container;
pub mod merge;
pub mod records;
pub mod sink;
pub mod source;
pub mod stream_file;
