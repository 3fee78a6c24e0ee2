//! Integration tests, one program: a module a subject.

mod access;
mod access_defaults;
mod bad_input;
mod common;
mod completions;
mod config;
mod daemon;
mod exports;
mod hosts;
mod images;
mod logs;
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
mod usage;
