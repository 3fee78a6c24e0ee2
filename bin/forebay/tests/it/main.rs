//! Integration tests, one program: a module a subject.

mod access;
mod access_defaults;
mod bad_input;
mod clones;
mod common;
mod completions;
mod daemon;
mod diffs;
mod exports;
mod hosts;
mod images;
mod logs;
mod manage;
mod memory;
mod packaging;
mod page;
mod peers;
mod rbd_shapes;
mod replicas;
mod snapshots;
mod space;
mod stderr;
mod store;
mod transfer;
mod trash;
mod usage;
