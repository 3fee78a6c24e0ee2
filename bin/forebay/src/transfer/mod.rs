//! Files, devices and streams that images are imported from and exported to.

pub mod container;
pub mod sink;
pub mod source;
