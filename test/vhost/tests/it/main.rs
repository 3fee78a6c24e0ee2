//! Integration tests, one program: a module a subject.

mod changes;
mod common;
mod fenced;
mod iommu;
mod load;
mod ours;
mod peer;
mod resumption;
mod scsi;
mod server;
